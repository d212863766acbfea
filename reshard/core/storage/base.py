"""Interfaces that all stores share: capabilities, readers, codings and sinks.

A path or URL becomes a `Place` once (`places.as_place`), and a place knows its store. A store describes its abilities
as `Capabilities`, which other modules ask instead of the scheme. A store that decrypts or decodes wraps
another store (`Around`) and reads through it.
"""

from __future__ import annotations

import os
import re
from contextlib import contextmanager, suppress
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple, Protocol

from reshard.errors import SourceError
from reshard.spelling import nearest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from reshard.errors import ReshardError

PARTIAL = ".partial"
"""The extension of unfinished target files."""

_DIGITS = 8
_UNFINISHED = re.compile(r"(.+?)(?:\.[0-9a-f]{8})?\.partial", re.DOTALL)
_LONGEST_NAME = 255
_CUT_BYTES = _LONGEST_NAME - 2 * (1 + _DIGITS) - len(PARTIAL)

Want = tuple[str, int, memoryview]
"""A request to read: a path, the offset of a byte range in the file, and the buffer to fill."""


def unfinished_path(path: str, digest: str = "") -> str:
    """Return the path of an unfinished file.

    Args:
        path: the final path.
        digest: identifies the run, or the recipe of the file. Its first digits are in the name, so that a task of a
            run whose client is lost does not write into a file of another run.

    >>> unfinished_path("rank_0/a.ckpt", "0123456789abcdef")
    'rank_0/a.ckpt.01234567.partial'
    """
    return f"{unfinished_stem(path)}{'.' if digest else ''}{digest[:_DIGITS]}{PARTIAL}"


def unfinished_stem(path: str) -> str:
    """Return the common prefix of a file's unfinished paths.

    It is the file's own path, with the name shortened if the suffixes would make it too long.
    """
    directory, slash, name = path.rpartition("/")
    encoded = os.fsencode(name)
    if not _CUT_BYTES + 1 + _DIGITS < len(encoded) <= _LONGEST_NAME:  # a name that is too long itself is refused
        return path
    cut = encoded[:_CUT_BYTES].decode(errors="ignore")
    return f"{directory}{slash}{cut}~{sha256(encoded).hexdigest()[:_DIGITS]}"


def stem_of_unfinished(path: str) -> str:
    """Return the stem of an unfinished file, with or without digits; "" for other files.

    >>> [stem_of_unfinished(path) for path in ("a.ckpt.01234567.partial", "a.ckpt.partial", "a.ckpt")]
    ['a.ckpt', 'a.ckpt', '']
    """
    match = _UNFINISHED.fullmatch(path)
    return match[1] if match else ""


def is_of_a_run(path: str) -> bool:
    """Return whether a path names an unfinished file of a run.

    Without digits, the file may belong to another program.

    >>> is_of_a_run("a.ckpt.01234567.partial"), is_of_a_run("a.ckpt.partial")
    (True, False)
    """
    return stem_of_unfinished(path) not in {"", path.removesuffix(PARTIAL)}


class Status(NamedTuple):
    """The state of a file: size and version.

    Attributes:
        nbytes: the size.
        mtime_ns: the time of the last change, in nanoseconds; for a file at a URL, a number derived from its entity tag
            or from another version field of its file system.
        change: for a local file, its ctime and inode number, which reveal a change even if the mtime was set back. They
            differ for every copy, and may differ on another machine.
    """

    nbytes: int
    mtime_ns: int
    change: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, status: os.stat_result) -> Status:
        """Return the state of a local file, from its `stat`."""
        return cls(status.st_size, status.st_mtime_ns, (status.st_ctime_ns, status.st_ino))

    def is_unchanged_since(self, before: Status) -> bool:
        """Return whether a file is unchanged; fields that one side lacks are not compared."""
        return self[:2] == before[:2] and ((0, 0) in {self.change, before.change} or self.change == before.change)


class Capabilities(NamedTuple):
    """The capabilities of a store.

    Attributes:
        positioned: an unfinished file can be written at any offset, by several tasks, and read again to resume it; if
            not, one task writes a file from its first byte to its last.
        whole: a file appears under its name only when it is complete, so it needs no unfinished name.
        appends: a file can be appended to.
        locks: a file can be locked.
        requests: the useful number of concurrent requests; 1 if a read has no latency of its own.
        library_bytes: resident memory of the imported libraries.
    """

    positioned: bool
    whole: bool
    appends: bool
    locks: bool
    requests: int
    library_bytes: int

    @property
    def has_latency(self) -> bool:
        """Return whether each request has high latency: make few large ones, and many at once."""
        return self.requests > 1


class RangeStore(Protocol):
    """A reader of byte ranges, by path. Offsets and sizes are in bytes."""

    def size(self, path: str) -> int:
        """Return the size of a file."""

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from a file; raise `SourceError` if the file ends too early."""


class ReadStore(RangeStore, Protocol):
    """A store that reads files of checkpoints: plain, decrypted or decoded."""

    def read(self, wants: Sequence[Want]) -> None:
        """Fill buffers from files, concurrently if requests have high latency."""

    def holds(self, path: str, pieces: Iterable[tuple[int, bytes]]) -> bool:
        """Return whether a file has certain bytes at certain offsets."""

    def prefetch(self, path: str, offset: int, nbytes: int) -> None:
        """Start to read a byte range into the page cache, if supported; do not wait."""

    def drop_cache(self, path: str, first: int = 0, last: int | None = None) -> None:
        """Evict a byte range of a file (default: all of it) from the page cache."""

    def close(self) -> None:
        """Close all files that are not in use."""


class Around:
    """A store that wraps another one and reads through it."""

    def __init__(self, inner: ReadStore) -> None:
        self.inner = inner

    def size(self, path: str) -> int:
        """Return the size of a file."""
        return self.inner.size(path)

    def read(self, wants: Sequence[Want]) -> None:
        """Fill buffers from files, one after the other."""
        for want in wants:
            self.read_into(*want)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill one buffer."""
        self.inner.read_into(path, offset, buffer)

    def holds(self, path: str, pieces: Iterable[tuple[int, bytes]]) -> bool:
        """Return whether a file has certain bytes at certain offsets."""
        for offset, piece in pieces:
            content = bytearray(len(piece))
            self.read_into(path, offset, memoryview(content))
            if content != piece:
                return False
        return True

    def prefetch(self, path: str, offset: int, nbytes: int) -> None:
        """Do nothing, since the inner store may have other offsets."""

    def drop_cache(self, path: str, first: int = 0, last: int | None = None) -> None:
        """Evict a byte range of a file (default: all of it) from the page cache."""
        self.inner.drop_cache(path, first, last)

    def close(self) -> None:
        """Close all files that are not in use."""
        self.inner.close()


class Coding(Protocol):
    """A codec of source files: encryption or compression."""

    def store(self) -> ReadStore:
        """Return a store that reads the decoded files."""

    def nbytes(self, threads: int) -> int:
        """Return the memory that decoding takes on this number of threads."""

    def __hash__(self) -> int:
        """Return a hash: there is one store for each distinct coding."""


class TargetCoding(Protocol):
    """A codec of target files: compression."""

    def of(self, path: str) -> str | None:
        """Return a description of the encoding of a file below the target; None if plain."""

    def sink(self, path: str, into: Sink) -> Sink:
        """Return a sink that encodes a file's contents; the size is known only at the end."""

    def nbytes(self, threads: int) -> int:
        """Return the memory that encoding takes on this number of threads."""


class Sink(Protocol):
    """A target file that is being written."""

    @property
    def ended(self) -> bool:
        """Return whether the file is complete."""

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        """Write bytes at an offset of the file."""

    def finish(self, *, durable: bool) -> None:
        """Finish the file, synced to disk if `durable`; raise `TargetError` if it is incomplete."""

    def abort(self) -> None:
        """Abort the file; never raises."""


@contextmanager
def reading(error: type[ReshardError], path: object = None) -> Iterator[None]:
    """Turn an `OSError` (permissions, loops of links, long names) into an error of a class.

    Args:
        error: the class.
        path: the path to name if the `OSError` names none.
    """
    try:
        yield
    except OSError as failed:
        raise read_error(error, failed.filename or path or "a file", failed) from failed


def similar(path: object) -> str:
    """Return a hint that names an existing path similar to a missing one, or ""."""
    directory, name = os.path.split(str(path).rstrip("/"))
    with suppress(OSError):
        if matches := nearest(name, sorted(os.listdir(directory or "."))):
            return f"did you mean {os.path.join(directory, matches[0])}?"
    return ""


def read_error(kind: type[ReshardError], path: object, error: OSError, position: str = "") -> ReshardError:
    """Return an error for a file that does not exist or cannot be read.

    Args:
        kind: the class of the error.
        path: the file.
        error: the error of the operating system.
        position: the position in the file, if known.
    """
    if isinstance(error, FileNotFoundError):
        return kind(f"{path} does not exist", code="not-found", hint=similar(path))
    return kind(f"cannot read {path}{position and f' {position}'}: {error.strerror}", code="cannot-read")


COPY_AGAIN = "copy all files of the checkpoint again, or take another one"
"""The hint for files that are missing or cut off."""


def truncated_text(nbytes: int, expected: int) -> str:
    """Return what is wrong with a file that ends too early, as the predicate of a sentence."""
    return f"is truncated: it has {nbytes} bytes of {expected}"


def truncated(path: object, nbytes: int, expected: int, *, facts: Iterable[str] = ()) -> SourceError:
    """Return an error for a file that ends too early."""
    return SourceError(f"{path} {truncated_text(nbytes, expected)}", code="truncated", facts=facts, hint=COPY_AGAIN)
