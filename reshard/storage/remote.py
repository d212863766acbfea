"""Bytes at URLs, through fsspec: ranges to be read, many in one go, and whole files to be written from first to last.

Every kind of URL that fsspec knows is one: `s3://`, `gs://`, `memory://` and so on. Credentials and addresses come from
where the file system itself looks for them (its environment variables, or fsspec's own `FSSPEC_S3_ENDPOINT_URL` and
the like), never from a plan, so that they are neither written down nor sent to other machines.

A request to an object store takes as long as a megabyte or more, and such a store has no positioned writes. So of the
ranges that are read together, those that touch, or nearly, are joined, and all are requested at once. A file is
written as a stream, which the file system sends in parts. Where it appears only when its last part is there (`_WHOLE`),
it has its final name then; elsewhere it is written next to it and moved, as on a local disk.
"""

from __future__ import annotations

from bisect import bisect_right
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from reshard.errors import GoneError, TargetError
from reshard.storage.base import Capabilities, Status, truncated, unfinished_path
from reshard.storage.urls.requests import Call, ask, ask_each, filesystem, telling

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from reshard.storage.base import Sink, Want

# What says that a file is another than before, the surest first; which of them there is depends on the file system.
_VERSIONS = (
    "ETag",
    "etag",
    "generation",
    "md5Hash",
    "mtime",
    "LastModified",
    "last_modified",
    "updated",
    "created",
    "modificationTime",
    "modify",
)

Range = tuple[str, int, int]
"""A path, where a range of bytes begins in it, and how many they are."""

FETCH_BYTES = 32 << 20
"""How many bytes a thread requests at once."""

LIBRARY_BYTES = 56 << 20
"""Resident memory of fsspec and a file system's library, s3fs with its client being the largest; measured."""

LEAST_PART_BYTES = 8 << 20
"""The least that is sent in one part of a file; S3 wants 5 MiB."""

_MOST_PARTS = 9_000  # S3 takes 10,000
_REQUEST_BYTES = 8 << 20  # longer ranges are several requests, which run side by side
REQUESTS = 16
"""How many requests are under way at once."""

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


@lru_cache(maxsize=64)
def remote_can(scheme: str) -> Capabilities:
    """Return what can be done at URLs of a kind."""
    return Capabilities(
        positioned=False,
        whole=scheme in _WHOLE,
        appends=False,
        locks=False,
        requests=REQUESTS,
        library_bytes=LIBRARY_BYTES,
    )


def appears_whole(path: str) -> bool:
    """Return whether a file at a URL has its final name as soon as it is complete, and not before."""
    return remote_can(path.partition("://")[0]).whole


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


def status_of(info: Mapping[str, Any]) -> Status:
    """Return what a file system's description of a file says about its state."""
    version = next((str(info[key]).strip('"') for key in _VERSIONS if info.get(key)), "")
    return Status(int(info["size"]), int.from_bytes(sha256(version.encode()).digest()[:7]) if version else 0)


def forget_listings(url: str) -> None:
    """Ask again what there is; file systems remember listings for as long as the process lives."""
    filesystem(url)[0].invalidate_cache()


class RemoteStore:
    """Files at URLs. Safe to use from several threads."""

    def status(self, path: str) -> Status:
        """Return the state of a file as it is now."""
        with telling(path, "looked at"):
            fs, name = filesystem(path)
            fs.invalidate_cache(fs._parent(name))  # noqa: SLF001 -- the one way to ask about a single file again
            return status_of(ask(path, "looked at", "info"))

    def size(self, path: str) -> int:
        """Return the size of a file in bytes, as the last listing has it."""
        with telling(path, "looked at"):
            return status_of(ask(path, "looked at", "info")).nbytes

    def read(self, wants: Sequence[Want]) -> None:
        """Fill buffers from files: by few requests, all of those for some MB at once.

        Raises:
            SourceError: a file ends before a buffer is full, or cannot be read.
        """
        batch: list[Want] = []
        room = FETCH_BYTES
        for path, offset, buffer in wants:
            for begin in range(0, len(buffer), FETCH_BYTES):
                piece = buffer[begin : begin + FETCH_BYTES]
                batch.append((path, offset + begin, piece))
                room -= len(piece)
                if room <= 0:
                    _fill(batch)
                    batch, room = [], FETCH_BYTES
        _fill(batch)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill one buffer."""
        self.read([(path, offset, buffer)])

    @staticmethod
    def unfinished(path: str, digest: str = "") -> str:
        """Return the name that a file has until it is published: its own where it appears whole."""
        return path if appears_whole(path) else unfinished_path(path, digest)

    def create(self, path: str, size: int | None) -> Sink:
        """Begin to write a file in order; its size decides how it is sent.

        Raises:
            TargetError: it cannot be written.
        """
        part = part_bytes(size or 0)
        if path.startswith(("s3://", "s3a://")):
            from reshard.storage.urls.s3 import S3Sink

            with telling(path, "written", TargetError):
                return S3Sink(path, part)
        return _RemoteSink(path, part)

    def publish(self, unfinished: str, path: str, *, durable: bool) -> None:  # noqa: ARG002 -- what is there stays
        """Give a written file its final name, where it does not have it yet."""
        if unfinished == path:
            return
        what = "given its final name"
        if ask(path, what, "exists", kind=TargetError):
            ask(path, what, "rm_file", kind=TargetError)
        with telling(path, what, TargetError):
            fs, name = filesystem(unfinished)
            fs.mv(name, filesystem(path)[1])

    def link(self, original: str, unfinished: str) -> None:
        """Make a file with the bytes of another: a copy that the file system makes by itself."""
        _make_directory(unfinished)
        with telling(unfinished, "copied", TargetError):
            copy = filesystem(unfinished)[1]
        ask(original, "copied", "cp_file", copy, kind=TargetError, nbytes=None)

    def remove(self, path: str) -> None:
        """Remove a finished file, if it is there.

        Raises:
            TargetError: it cannot be removed.
        """
        try:
            ask(path, "removed", "rm_file", kind=TargetError)
        except TargetError as error:
            if not isinstance(error.__context__, FileNotFoundError):
                raise

    def discard(self, path: str) -> None:
        """Remove a file, if it is there; never raises."""
        with suppress(Exception):  # nothing that fails here may hide why the file is removed
            self.remove(path)

    def put(self, path: str, content: bytes) -> None:
        """Write a small file in one go.

        Raises:
            TargetError: it cannot be written.
        """
        _make_directory(path)
        ask(path, "written", "pipe_file", content, kind=TargetError, nbytes=len(content))

    def contents(self, path: str) -> bytes | None:
        """Return what is in a small file; None where it is not there.

        Raises:
            SourceError: it cannot be read.
        """
        with suppress(GoneError):
            return whole(path)
        return None


class _RemoteSink:
    """A file that is being sent, from its first byte to its last; see `Sink`."""

    ended = False

    def __init__(self, path: str, part: int) -> None:
        self._path, self._position = path, 0
        with telling(path, "written", TargetError):
            _make_directory(path)
            fs, name = filesystem(path)
            self._file = fs.open(name, "wb", block_size=part)

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        assert offset == self._position, "a file is sent in order"  # noqa: S101
        with telling(self._path, "written", TargetError):
            self._file.write(data)
        self._position += len(data)

    def finish(self, *, durable: bool) -> None:  # noqa: ARG002 -- what is there is there for good
        with telling(self._path, "written", TargetError):
            self._file.close()
        self.ended = True

    def abort(self) -> None:
        with suppress(Exception):  # nothing that fails here may hide why
            self._file.discard()
        self._leave()

    def _leave(self) -> None:
        with suppress(Exception):
            self._file.closed = True  # or fsspec would complete it as it is when it is collected

    def __del__(self) -> None:
        if not self.ended:
            self._leave()


def whole(path: str) -> bytes:
    """Return what is in a file; the store's checksum of it is compared, if there is one.

    Raises:
        SourceError: it cannot be read.
    """
    return bytes(ask(path, "read", "cat_file", nbytes=None))


def _make_directory(path: str) -> None:
    if not appears_whole(path):
        ask(path.rpartition("/")[0], "made", "makedirs", exist_ok=True, kind=TargetError)


def _fill(wants: Sequence[Want]) -> None:
    """Request what some buffers are to hold, and copy it there."""
    pieces: dict[str, tuple[list[int], list[bytes]]] = {}
    requests = joined((path, offset, len(buffer)) for path, offset, buffer in wants)
    for (path, offset, _), piece in zip(requests, _requested(requests), strict=True):
        starts, found = pieces.setdefault(path, ([], []))
        starts.append(offset)
        found.append(piece)
    for path, offset, buffer in wants:
        starts, found = pieces[path]
        number = bisect_right(starts, offset) - 1
        done = 0
        while done < len(buffer):
            part = memoryview(found[number])[offset + done - starts[number] :][: len(buffer) - done]
            buffer[done : done + len(part)] = part
            done += len(part)
            number += 1


def _requested(requests: Sequence[Range]) -> list[bytes]:
    """Return what some ranges hold, those of one file system asked for side by side."""
    found: dict[Range, bytes] = {}
    by_scheme: dict[str, list[Range]] = {}
    for each in requests:
        by_scheme.setdefault(each[0].partition("://")[0], []).append(each)
    for ranges in by_scheme.values():
        calls = [
            Call(path, "cat_file", (), {"start": offset, "end": offset + nbytes}, nbytes)
            for path, offset, nbytes in ranges
        ]
        for each, content in zip(ranges, ask_each("read", calls), strict=True):
            _check_length(*each, content)
            found[each] = content
    return [found[each] for each in requests]


def _check_length(path: str, offset: int, nbytes: int, piece: bytes) -> None:
    if len(piece) != nbytes:
        raise truncated(path, offset + len(piece), nbytes - len(piece))


@lru_cache(maxsize=1)
def remote_store() -> RemoteStore:
    """Return this process's store of files at URLs."""
    return RemoteStore()
