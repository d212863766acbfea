"""Bytes at URLs, through fsspec: ranges to be read, many in one go, and whole files to be written from first to last.

A request to an object store takes as long as a megabyte or more, and such a store has no positioned writes. So ranges
that are needed soon are announced (`fetch`): those that touch, or nearly, are joined, and all are requested at once.
A file is written as a stream, which the file system sends in parts. Where it appears only when its last part is there
(`_WHOLE`), it has its final name then; elsewhere it is written beside and moved, as on a local disk.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from reshard.errors import GoneError, SourceError, TargetError
from reshard.storage.local import PARTIAL, LocalStore, Stream, local_store
from reshard.storage.remote import Status, filesystem, is_url, status_of, telling
from reshard.storage.threads import results

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Range = tuple[str, int, int]
"""A path, where a range of bytes begins in it, and how many they are."""

FETCH_BYTES = 32 << 20
"""How many bytes a thread requests at once and then holds."""

LIBRARY_BYTES = 56 << 20
"""Resident memory of fsspec and a file system's library, s3fs with its client being the largest; measured."""

LEAST_PART_BYTES = 8 << 20
"""The least that is sent in one part of a file; S3 wants 5 MiB."""

_MOST_PARTS = 9_000  # S3 takes 10,000
_REQUEST_BYTES = 8 << 20  # longer ranges are several requests, which run side by side
REQUESTS = 16
"""How many files at URLs are looked at side by side."""

_GAP = 32 << 10  # less than a request costs

# File systems on which a file appears when its last byte is there.
_WHOLE = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "obs"}


def part_bytes(size: int) -> int:
    """Return how large the parts are in which a file of this size is sent, in bytes.

    >>> part_bytes(1 << 20) >> 20, part_bytes(1 << 40) >> 20
    (8, 117)
    """
    return max(LEAST_PART_BYTES, -(-size // (_MOST_PARTS << 20)) << 20)


def fetched_bytes(threads: int, band_bytes: int) -> int:
    """Return the memory that so many threads take to read at URLs: what is requested, as it comes in and as a piece."""
    return LIBRARY_BYTES + threads * 2 * (FETCH_BYTES + band_bytes)


def appears_whole(path: str) -> bool:
    """Return whether a file at a URL has its final name as soon as it is complete, and not before."""
    return path.partition("://")[0] in _WHOLE


def joined(ranges: Iterable[Range]) -> list[Range]:
    """Join ranges that touch or nearly do, and cut what is long.

    >>> joined([("a", 100, 10), ("a", 0, 90), ("b", 0, 1)])
    [('a', 0, 110), ('b', 0, 1)]
    """
    found: list[Range] = []
    for path, offset, nbytes in sorted(ranges):
        if found and found[-1][0] == path and offset <= sum(found[-1][1:]) + _GAP:
            begin = found[-1][1]
            found[-1] = (path, begin, max(sum(found[-1][1:]), offset + nbytes) - begin)
        else:
            found.append((path, offset, nbytes))
    return [
        (path, begin, min(_REQUEST_BYTES, offset + nbytes - begin))
        for path, offset, nbytes in found
        for begin in range(offset, offset + nbytes, _REQUEST_BYTES)
    ]


class _Held(threading.local):
    """What a thread fetched: for each path, where pieces begin, and the pieces."""

    def __init__(self) -> None:
        self.pieces: dict[str, tuple[list[int], list[bytes]]] = {}


class RemoteStore:
    """Files at URLs. Safe to use from several threads."""

    def __init__(self) -> None:
        self._held = _Held()

    def status(self, path: str) -> Status:
        """Return the state of a file as it is now."""
        with telling(path, "looked at"):
            fs, name = filesystem(path)
            fs.invalidate_cache(fs._parent(name))  # noqa: SLF001 -- the one way to ask about a single file anew
            return status_of(fs.info(name))

    def size(self, path: str) -> int:
        """Return the size of a file in bytes, as the last listing has it."""
        with telling(path, "looked at"):
            fs, name = filesystem(path)
            return status_of(fs.info(name)).nbytes

    def fetch(self, ranges: Iterable[Range]) -> None:
        """Request ranges side by side, and hold them for this thread until the next call.

        Raises:
            SourceError: a file ends before, or cannot be read.
        """
        self._held.pieces = {}
        wanted = joined(ranges)
        by_root: dict[str, list[Range]] = {}
        for each in wanted:
            by_root.setdefault(each[0].partition("://")[0], []).append(each)
        for some in by_root.values():
            self._fetch(some)

    def _fetch(self, wanted: list[Range]) -> None:
        fs, _ = filesystem(wanted[0][0])
        known: dict[str, str] = {path: fs._strip_protocol(path) for path, _, _ in wanted}  # noqa: SLF001 -- as fsspec's own
        with telling(wanted[0][0], "read"):
            pieces = fs.cat_ranges(
                [known[path] for path, _, _ in wanted],
                [offset for _, offset, _ in wanted],
                [offset + nbytes for _, offset, nbytes in wanted],
                on_error="raise",
            )
        for (path, offset, nbytes), piece in zip(wanted, pieces, strict=True):
            _check_length(path, offset, nbytes, piece)
            starts, held = self._held.pieces.setdefault(path, ([], []))
            starts.append(offset)
            held.append(piece)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from a file: from what was fetched, else by a request of its own.

        Raises:
            SourceError: the file ends before the buffer is full, or cannot be read.
        """
        done = 0
        starts, held = self._held.pieces.get(path, ([], []))
        number = bisect_right(starts, offset) - 1
        while 0 <= number < len(held) and starts[number] <= offset + done and done < len(buffer):
            piece = memoryview(held[number])[offset + done - starts[number] :][: len(buffer) - done]
            buffer[done : done + len(piece)] = piece
            done += len(piece)
            number += 1
        if done < len(buffer):
            with telling(path, "read"):
                fs, name = filesystem(path)
                piece = fs.cat_file(name, start=offset + done, end=offset + len(buffer))
            _check_length(path, offset + done, len(buffer) - done, piece)
            buffer[done:] = piece

    def stream(self, path: str, size: int) -> Stream:
        """Begin to write a file of this size.

        Raises:
            TargetError: it cannot be written.
        """
        return _RemoteStream(_unfinished(path), size)

    def commit(self, path: str, *, sync: bool) -> None:  # noqa: ARG002 -- what is there is there for good
        """Give a written file its final name, where it does not have it yet."""
        if appears_whole(path):
            return
        with telling(path, "given its final name", TargetError):
            fs, name = filesystem(path)
            if fs.exists(name):
                fs.rm_file(name)
            fs.mv(name + PARTIAL, name)

    def link(self, original: str, path: str, *, sync: bool) -> None:
        """Make a file with the bytes of another: a copy that the file system makes by itself."""
        with telling(path, "copied", TargetError):
            fs, name = filesystem(original)
            _make_directory(path)
            fs.cp_file(name, filesystem(_unfinished(path))[1])
        self.commit(path, sync=sync)

    def remove(self, path: str) -> None:
        """Remove a finished file, if it is there.

        Raises:
            TargetError: it cannot be removed.
        """
        with telling(path, "removed", TargetError), suppress(FileNotFoundError):
            fs, name = filesystem(path)
            fs.rm_file(name)

    def discard(self, path: str) -> None:
        """Remove what a run wrote of a file before it gets its name; where files appear whole, the file."""
        self.erase(_unfinished(path))

    def discard_unfinished(self, path: str) -> None:
        """Remove what a run wrote of a file beside it, if it is there."""
        if not appears_whole(path):
            self.erase(path + PARTIAL)

    def erase(self, path: str) -> None:
        """Remove a file, if it is there; never raises."""
        with suppress(Exception):  # nothing that fails here may hide why the file is removed
            fs, name = filesystem(path)
            fs.rm_file(name)

    def put(self, path: str, content: bytes) -> None:
        """Write a small file in one go.

        Raises:
            TargetError: it cannot be written.
        """
        with telling(path, "written", TargetError):
            _make_directory(path)
            fs, name = filesystem(path)
            fs.pipe_file(name, content)

    def contents(self, path: str) -> bytes | None:
        """Return what is in a small file; None where it is not there.

        Raises:
            SourceError: it cannot be read.
        """
        with suppress(GoneError), telling(path, "read"):
            fs, name = filesystem(path)
            return bytes(fs.cat_file(name))
        return None


class _RemoteStream:
    """A file that is being sent; see `Stream`."""

    def __init__(self, path: str, size: int) -> None:
        self._path = path
        with telling(path, "written", TargetError):
            _make_directory(path)
            fs, name = filesystem(path)
            self._file = fs.open(name, "wb", block_size=part_bytes(size))

    def write(self, content: memoryview | bytes) -> None:
        with telling(self._path, "written", TargetError):
            self._file.write(content)

    def finish(self, *, sync: bool) -> None:  # noqa: ARG002 -- what is there is there for good
        with telling(self._path, "written", TargetError):
            self._file.close()

    def abort(self) -> None:
        with suppress(Exception):  # nothing that fails here may hide why
            self._file.discard()
        with suppress(Exception):
            self._file.closed = True  # or it would be completed as it is when it is collected


def _unfinished(path: str) -> str:
    return path if appears_whole(path) else path + PARTIAL


def _make_directory(path: str) -> None:
    if not appears_whole(path):
        fs, name = filesystem(path.rpartition("/")[0])
        fs.makedirs(name, exist_ok=True)


def _check_length(path: str, offset: int, nbytes: int, piece: bytes) -> None:
    if len(piece) != nbytes:
        raise SourceError(
            f"{path}: ends at byte {offset + len(piece)}; {nbytes - len(piece)} more bytes were expected "
            "(cut short, or changed since it was opened)"
        )


@lru_cache(maxsize=1)
def remote_store() -> RemoteStore:
    """Return this process's store of files at URLs."""
    return RemoteStore()


def store_at(path: str) -> LocalStore | RemoteStore:
    """Return this process's store that has a file, by its path or URL."""
    return remote_store() if is_url(path) else local_store()


class AnyStore:
    """Reads local files by their paths and others by their URLs; positioned writes are local. Safe for threads."""

    def __init__(self) -> None:
        self._local = local_store()

    def status(self, path: str) -> Status:
        """Return the state of a file as it is now."""
        return store_at(path).status(path)

    def statuses(self, paths: Sequence[str]) -> list[Status | SourceError]:
        """Return the state of many files as it is now, those at URLs asked side by side; or what is wrong with one."""

        def status(path: str) -> Status | SourceError:
            try:
                return self.status(path)
            except SourceError as error:
                return error

        if not any(map(is_url, paths)):
            return list(map(status, paths))
        return results(status, paths, REQUESTS)

    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""
        return store_at(path).size(path)

    def fetch(self, ranges: Iterable[Range]) -> None:
        """Request those of the ranges that are at URLs side by side, and hold them for this thread."""
        remote_store().fetch([each for each in ranges if is_url(each[0])])

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from a file."""
        (remote_store() if "://" in path else self._local).read_into(path, offset, buffer)

    def write_at(self, path: str, offset: int, buffer: memoryview) -> None:
        """Write a whole buffer into an unfinished local file."""
        self._local.write_at(path, offset, buffer)

    def drop_cache(self, path: str, first: int = 0, last: int | None = None, *, written: bool = False) -> None:
        """Leave nothing of a local file, or of a part of it, in the page cache; see `LocalStore.drop_cache`."""
        if not is_url(path):
            self._local.drop_cache(path, first, last, written=written)

    def close(self) -> None:
        """Close every local file that nobody uses."""
        self._local.close()

    def __reduce__(self) -> tuple[type[AnyStore], tuple[Any, ...]]:
        """Travel to another process as a fresh store: handles do not."""
        return AnyStore, ()


@lru_cache(maxsize=1)
def any_store() -> AnyStore:
    """Return this process's store of all files."""
    return AnyStore()
