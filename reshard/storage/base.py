"""What a place for bytes is, and what one can do: the words that all stores share.

A path or URL becomes a `Place` once (`places.as_place`), and a place knows its store. What a store can do are its
`Capabilities`; nobody else asks whether a string is a URL. A store that decrypts or decodes is one *around* a store
(`Around`), which reads through it.
"""

from __future__ import annotations

import difflib
import os
import re
from contextlib import contextmanager, suppress
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple, Protocol

from reshard.errors import SourceError, TargetError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from reshard.errors import ReshardError

PARTIAL = ".partial"
"""What the name of an unfinished target file ends with."""

_DIGITS = 8
_UNFINISHED = re.compile(r"(.+?)(?:\.[0-9a-f]{8})?\.partial", re.DOTALL)
_LONGEST_NAME = 255
_CUT_BYTES = _LONGEST_NAME - 2 * (1 + _DIGITS) - len(PARTIAL)

Want = tuple[str, int, memoryview]
"""A path, where a range of bytes begins in the file, and the buffer that it fills."""


def unfinished_path(path: str, digest: str = "") -> str:
    """Return the path of an unfinished file.

    Args:
        path: of the file when it is finished.
        digest: of what makes the file, or of the run. The name has its first digits: a task that still works for a
            run whose client is lost does not write into what another run makes there.

    >>> unfinished_path("rank_0/a.ckpt", "0123456789abcdef")
    'rank_0/a.ckpt.01234567.partial'
    """
    return f"{unfinished_stem(path)}{'.' if digest else ''}{digest[:_DIGITS]}{PARTIAL}"


def unfinished_stem(path: str) -> str:
    """Return what the paths of all unfinished files of a file begin with: its own, cut where its name has no room."""
    directory, slash, name = path.rpartition("/")
    encoded = os.fsencode(name)
    if not _CUT_BYTES + 1 + _DIGITS < len(encoded) <= _LONGEST_NAME:  # one that is too long itself is refused
        return path
    cut = encoded[:_CUT_BYTES].decode(errors="ignore")
    return f"{directory}{slash}{cut}~{sha256(encoded).hexdigest()[:_DIGITS]}"


def stem_of_unfinished(path: str) -> str:
    """Return the stem of an unfinished file, with any digits or none; empty where a path is of no such file.

    >>> [stem_of_unfinished(path) for path in ("a.ckpt.01234567.partial", "a.ckpt.partial", "a.ckpt")]
    ['a.ckpt', 'a.ckpt', '']
    """
    match = _UNFINISHED.fullmatch(path)
    return match[1] if match else ""


def is_of_a_run(path: str) -> bool:
    """Return whether a path is that of an unfinished file of a run; without digits it may be another program's.

    >>> is_of_a_run("a.ckpt.01234567.partial"), is_of_a_run("a.ckpt.partial")
    (True, False)
    """
    return stem_of_unfinished(path) not in {"", path.removesuffix(PARTIAL)}


class Status(NamedTuple):
    """What distinguishes one state of a file from another.

    Attributes:
        nbytes: its size.
        mtime_ns: when it last changed, in nanoseconds; of a file at a URL a number that stands for its entity tag or
            whatever else its file system has.
        change: of a local file, when anything of it last changed (ctime) and the number of its inode: whoever sets the
            time back does not set these. No copy has them, and no other machine need see the same.
    """

    nbytes: int
    mtime_ns: int
    change: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, status: os.stat_result) -> Status:
        """Return what the system says of a local file."""
        return cls(status.st_size, status.st_mtime_ns, (status.st_ctime_ns, status.st_ino))

    def is_still(self, before: Status) -> bool:
        """Return whether a file is as it was before, as far as both are known."""
        return self[:2] == before[:2] and ((0, 0) in {self.change, before.change} or self.change == before.change)


class Capabilities(NamedTuple):
    """What a store can do.

    Attributes:
        positioned: an unfinished file can be written anywhere, by several tasks, and read again to resume it; without,
            a file is written by one task from its first byte to its last.
        whole: a file appears under its name when its last byte is there, and not before: it needs no unfinished name.
        appends: a file can be appended to.
        locks: a file can be locked.
        requests: how many requests at once pay; 1 where a read costs no more than its bytes.
        library_bytes: resident memory of what it imports.
    """

    positioned: bool
    whole: bool
    appends: bool
    locks: bool
    requests: int
    library_bytes: int

    @property
    def waits(self) -> bool:
        """Each request takes its time, whatever its size: few large ones are better, and many at once."""
        return self.requests > 1


class Readable(Protocol):
    """Ranges of bytes to be read, by path. Offsets and sizes are in bytes."""

    def size(self, path: str) -> int:
        """Return the size of a file."""

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from a file; `SourceError` where that ends before the buffer is full."""


class ReadStore(Readable, Protocol):
    """What reads the files of checkpoints: plain, decrypted or decoded."""

    def read(self, wants: Sequence[Want]) -> None:
        """Fill buffers from files, many at once where that pays."""

    def holds(self, path: str, pieces: Iterable[tuple[int, bytes]]) -> bool:
        """Return whether a file has certain bytes at certain offsets."""

    def drop_cache(self, path: str, first: int = 0, last: int | None = None) -> None:
        """Leave nothing of a file, or of its bytes from `first` to `last`, in a page cache."""

    def close(self) -> None:
        """Close every file that nobody uses."""


class Around:
    """A store around another, which reads what that has."""

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
            found = bytearray(len(piece))
            self.read_into(path, offset, memoryview(found))
            if found != piece:
                return False
        return True

    def drop_cache(self, path: str, first: int = 0, last: int | None = None) -> None:
        """Leave nothing of a file, or of a part of it, in the page cache."""
        self.inner.drop_cache(path, first, last)

    def close(self) -> None:
        """Close every file that nobody uses."""
        self.inner.close()


class Coding(Protocol):
    """How source files have other bytes than the tensors' own: encrypted, compressed."""

    def store(self) -> ReadStore:
        """Return what reads the tensors' own."""

    def nbytes(self, threads: int) -> int:
        """Return the memory that so many threads take for it."""

    def __hash__(self) -> int:
        """Return what sets codings apart: there is one store for each."""


class TargetCoding(Protocol):
    """How target files get other bytes than the tensors' own: compressed."""

    def of(self, path: str) -> str | None:
        """Return what says how a file is encoded, by its path below the target directory; None of one that is not."""

    def sink(self, path: str, into: Sink) -> Sink:
        """Return what takes a file's contents and writes the file, whose size is known only then."""

    def nbytes(self, threads: int) -> int:
        """Return the memory that so many threads take for it."""


class Sink(Protocol):
    """A target file that is being written."""

    @property
    def ended(self) -> bool:
        """The file is complete: nothing more comes."""

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        """Write bytes at an offset of the file."""

    def finish(self, *, durable: bool) -> None:
        """End the file, on the disk if `durable`; raise `TargetError` where something of it did not come."""

    def abort(self) -> None:
        """Give up; never raises."""


class Sinks(dict[int, Sink]):
    """The files that a task writes, by their numbers; those that are not there yet are opened with the first byte.

    Attributes:
        ended: the numbers of the files that are complete.
    """

    def __init__(self, opened: Callable[[int], Sink]) -> None:
        super().__init__()
        self._opened = opened
        self.ended: set[int] = set()

    def __missing__(self, file: int) -> Sink:
        sink = self[file] = self._opened(file)
        return sink

    def open(self, files: Iterable[int]) -> None:
        """Open files of which nothing need come."""
        for file in files:
            self[file] = self._opened(file)

    def write_at(self, file: int, offset: int, data: memoryview | bytes) -> None:
        """Write bytes into a file; of one that is complete then, nothing is held any more."""
        sink = self[file]
        sink.write_at(offset, data)
        if sink.ended:
            self.ended.add(file)
            del self[file]

    def finish(self, *, durable: bool) -> None:
        """End every file."""
        for file, sink in list(self.items()):
            sink.finish(durable=durable)
            self.ended.add(file)
            del self[file]

    def abort(self) -> None:
        """Give up what is not ended."""
        for sink in self.values():
            sink.abort()


class Ordered:
    """A file that is written from its first byte to its last; what comes before its turn waits in memory.

    Args:
        begin: opens what is written in order, when the first byte can be.
        path: for messages.
        size: of the file; None where that is not known.
        room: how many bytes may wait, but for constant ones.
        ends: the file ends with its last byte; without, when `finish` is called.
    """

    def __init__(
        self, begin: Callable[[], Sink], path: str, size: int | None, *, room: int = 0, ends: bool = False
    ) -> None:
        self.ended = False
        self._begin, self._path, self._size, self._room, self._ends = begin, path, size, room, ends
        self._into: Sink | None = None
        self._position = 0
        self._waiting: dict[int, bytes | memoryview] = {}

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        """Write what comes next in the file, or have it wait; bytes that cannot change are not copied."""
        if offset != self._position:
            if not memoryview(data).readonly:
                data = bytes(data)
                self._room -= len(data)
                assert self._room >= 0, "bytes come about in the order of their files"  # noqa: S101
            self._waiting[offset] = data
            return
        self._append(data)
        while (more := self._waiting.pop(self._position, None)) is not None:
            self._append(more)
        if self._ends and self._position == self._size:
            self.finish(durable=False)

    def _append(self, data: memoryview | bytes) -> None:
        if self._into is None:
            self._into = self._begin()
        self._into.write_at(self._position, data)
        self._position += len(data)

    def finish(self, *, durable: bool) -> None:
        """End the file.

        Raises:
            TargetError: something of it did not come, or it cannot be written.
        """
        if self._waiting or self._size not in {None, self._position}:
            raise TargetError(
                f"{self._path} is incomplete",
                code="internal-error",
                facts=[f"expected {self._size} bytes, found {self._position} in order"],
                hint="this is an error of reshard; please report it",
            )
        self._into = self._into or self._begin()
        self._into.finish(durable=durable)
        self.ended = True

    def abort(self) -> None:
        """Give up."""
        if self._into is not None:
            self._into.abort()


class Summing:
    """A file that is written from its first byte to its last, into which sums of its ranges are filled.

    Args:
        into: takes the file.
        sums: of each range where it begins, its bytes, and the places of its sum behind it, at each of which four bytes
            of zeros come at once; ascending.
        crc: continues a sum of four bytes with what comes next.
    """

    def __init__(
        self,
        into: Sink,
        sums: Iterable[tuple[int, int, tuple[int, ...]]],
        crc: Callable[[memoryview | bytes, int], int],
    ) -> None:
        self._into, self._crc = into, crc
        self._sums = iter(sums)
        self._range = next(self._sums, None)
        self._value = 0
        self._found: dict[int, bytes] = {}

    @property
    def ended(self) -> bool:
        """The file is complete."""
        return self._into.ended

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        """Write what comes next in the file."""
        end = offset + len(data)
        while self._range and self._range[0] < end:
            begin, nbytes, places = self._range
            self._value = self._crc(data[max(begin - offset, 0) : begin + nbytes - offset], self._value)
            if begin + nbytes > end:
                break
            self._found.update(dict.fromkeys(places, self._value.to_bytes(4, "little")))
            self._range, self._value = next(self._sums, None), 0
        self._into.write_at(offset, self._found.pop(offset, data))

    def finish(self, *, durable: bool) -> None:
        """End the file."""
        self._into.finish(durable=durable)

    def abort(self) -> None:
        """Give up."""
        self._into.abort()


@contextmanager
def reading(error: type[ReshardError], path: object = None) -> Iterator[None]:
    """Turn what the system refuses (permissions, loops of links, names that are too long) into an error of a kind.

    Args:
        error: the kind.
        path: what is read, if the system does not say.
    """
    try:
        yield
    except OSError as failed:
        raise read_error(error, failed.filename or path or "a file", failed) from failed


def similar(path: object) -> str:
    """Return the advice to take a local path that is there and has a name like that of one that is not."""
    directory, name = os.path.split(str(path).rstrip("/"))
    with suppress(OSError):
        if there := difflib.get_close_matches(name, os.listdir(directory or "."), 1):
            return f"did you mean {os.path.join(directory, there[0])}?"
    return ""


def read_error(kind: type[ReshardError], path: object, error: OSError, where: str = "") -> ReshardError:
    """Return the error of a file that does not exist or cannot be read.

    Args:
        kind: of the error.
        path: the file.
        error: what the system says.
        where: the place in the file, if known.
    """
    if isinstance(error, FileNotFoundError):
        return kind(f"{path} does not exist", code="not-found", hint=similar(path))
    return kind(f"cannot read {path}{where and f' {where}'}: {error.strerror}", code="cannot-read")


def truncated(path: object, end: int, missing: int) -> SourceError:
    """Return the error of a file that ends before what is read of it."""
    return SourceError(
        f"{path} is truncated, or changed since it was opened",
        code="truncated",
        facts=[f"ends at byte {end}; expected {missing} more bytes"],
    )
