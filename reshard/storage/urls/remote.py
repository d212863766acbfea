"""Files at URLs, through fsspec: read many ranges at once, write files in order.

All schemes of fsspec are accepted: `s3://`, `gs://`, `memory://` and so on. Credentials and addresses come from the
sources that the file system itself uses (its environment variables, or fsspec's own, such as `FSSPEC_S3_ENDPOINT_URL`),
never from a plan, so that they are neither written down nor sent to other machines.

The latency of a request to an object store equals the transfer of a megabyte or more, and such a store has no
positioned writes. So adjacent and nearly adjacent ranges of one read are joined, and all are requested at once. A file
is written as a stream, which the file system sends in parts. If it appears only with its last part (`_WHOLE`), it is
written under its final name; otherwise under an unfinished name, and moved, as on a local disk.
"""

from __future__ import annotations

from bisect import bisect_right
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from reshard.errors import GoneError, TargetError
from reshard.storage.base import Capabilities, Status, truncated, unfinished_path
from reshard.storage.urls.requests import StoreCall, ask, ask_each, filesystem, translating

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from reshard.storage.base import Sink, Want

# Fields that identify the version of a file, the surest first; file systems differ in the fields they have.
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
"""A byte range of a file: path, offset and size."""

FETCH_BYTES = 32 << 20
"""The number of bytes that a thread requests at once."""

LIBRARY_BYTES = 56 << 20
"""Resident memory of fsspec and the library of a file system; measured with s3fs, the largest."""

LEAST_PART_BYTES = 8 << 20
"""The smallest part of a multipart upload; S3 requires 5 MiB."""

_MOST_PARTS = 9_000  # S3 takes 10,000
_REQUEST_BYTES = 8 << 20  # longer ranges are split into concurrent requests
REQUESTS = 16
"""The number of concurrent requests."""

_GAP = 32 << 10  # less than a request costs

# File systems on which a file appears only when it is complete.
_WHOLE = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "obs"}


def part_bytes(size: int) -> int:
    """Return the part size for the upload of a file of this size, in bytes.

    >>> part_bytes(1 << 20) >> 20, part_bytes(1 << 40) >> 20
    (8, 117)
    """
    return max(LEAST_PART_BYTES, -(-size // (_MOST_PARTS << 20)) << 20)


def fetched_bytes(threads: int, band_bytes: int) -> int:
    """Return the memory that reading at URLs takes on this number of threads.

    Each requested byte is held twice: in the response as it arrives, and in a piece.
    """
    return LIBRARY_BYTES + threads * 2 * (FETCH_BYTES + band_bytes)


@lru_cache(maxsize=64)
def remote_can(scheme: str) -> Capabilities:
    """Return the capabilities of the store of a URL scheme."""
    return Capabilities(
        positioned=False,
        whole=scheme in _WHOLE,
        appends=False,
        locks=False,
        requests=REQUESTS,
        library_bytes=LIBRARY_BYTES,
    )


def appears_whole(path: str) -> bool:
    """Return whether a file at a URL appears under its final name only when it is complete."""
    return remote_can(path.partition("://")[0]).whole


def joined(ranges: Iterable[Range]) -> list[Range]:
    """Join adjacent and nearly adjacent ranges, and cut long ones.

    >>> joined([("a", 100, 10), ("a", 0, 90), ("b", 0, 1)])
    [('a', 0, 110), ('b', 0, 1)]
    """
    merged: list[Range] = []
    for path, offset, nbytes in sorted(ranges):
        if merged and merged[-1][0] == path and offset <= sum(merged[-1][1:]) + _GAP:
            begin = merged[-1][1]
            merged[-1] = (path, begin, max(sum(merged[-1][1:]), offset + nbytes) - begin)
        else:
            merged.append((path, offset, nbytes))
    return [
        (path, begin, min(_REQUEST_BYTES, offset + nbytes - begin))
        for path, offset, nbytes in merged
        for begin in range(offset, offset + nbytes, _REQUEST_BYTES)
    ]


def status_of(info: Mapping[str, Any]) -> Status:
    """Return the state of a file from its fsspec `info`."""
    version = next((str(info[key]).strip('"') for key in _VERSIONS if info.get(key)), "")
    return Status(int(info["size"]), int.from_bytes(sha256(version.encode()).digest()[:7]) if version else 0)


def forget_listings(url: str) -> None:
    """Drop cached listings; file systems keep them for the life of the process."""
    filesystem(url)[0].invalidate_cache()


class RemoteStore:
    """Files at URLs. Safe to use from several threads."""

    def status(self, path: str) -> Status:
        """Return the state of a file as it is now."""
        with translating(path, "looked at"):
            fs, name = filesystem(path)
            fs.invalidate_cache(fs._parent(name))  # noqa: SLF001 -- the one way to ask about a single file again
            return status_of(ask(path, "looked at", "info"))

    def size(self, path: str) -> int:
        """Return the size of a file in bytes, as the last listing has it."""
        with translating(path, "looked at"):
            return status_of(ask(path, "looked at", "info")).nbytes

    def read(self, wants: Sequence[Want]) -> None:
        """Fill buffers from files with few requests, about `FETCH_BYTES` at a time concurrently.

        Raises:
            SourceError: a file ends too early, or cannot be read.
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
        """Return a file's path until it is published: the final one if it appears whole."""
        return path if appears_whole(path) else unfinished_path(path, digest)

    def create(self, path: str, size: int | None) -> Sink:
        """Begin to write a file in order; its size decides how it is sent.

        Raises:
            TargetError: it cannot be written.
        """
        part = part_bytes(size or 0)
        if path.startswith(("s3://", "s3a://")):
            from reshard.storage.urls.s3 import S3Sink

            with translating(path, "written", TargetError):
                return S3Sink(path, part)
        return _RemoteSink(path, part)

    def publish(self, unfinished: str, path: str, *, durable: bool) -> None:  # noqa: ARG002 -- finished objects are durable
        """Move a written file to its final name, unless it has that already."""
        if unfinished == path:
            return
        action = "given its final name"
        if ask(path, action, "exists", kind=TargetError):
            ask(path, action, "rm_file", kind=TargetError)
        with translating(path, action, TargetError):
            fs, name = filesystem(unfinished)
            fs.mv(name, filesystem(path)[1])

    def link(self, original: str, unfinished: str) -> None:
        """Copy a file within the file system, without transferring its bytes here."""
        _make_directory(unfinished)
        with translating(unfinished, "copied", TargetError):
            copy = filesystem(unfinished)[1]
        ask(original, "copied", "cp_file", copy, kind=TargetError, nbytes=None)

    def remove(self, path: str) -> None:
        """Remove a finished file, if it exists.

        Raises:
            TargetError: it cannot be removed.
        """
        try:
            ask(path, "removed", "rm_file", kind=TargetError)
        except TargetError as error:
            if not isinstance(error.__context__, FileNotFoundError):
                raise

    def discard(self, path: str) -> None:
        """Remove a file, if it exists; never raises."""
        with suppress(Exception):  # a failure here must not hide why the file is removed
            self.remove(path)

    def put(self, path: str, content: bytes) -> None:
        """Write a small file with one request.

        Raises:
            TargetError: it cannot be written.
        """
        _make_directory(path)
        ask(path, "written", "pipe_file", content, kind=TargetError, nbytes=len(content))

    def contents(self, path: str) -> bytes | None:
        """Return the contents of a small file; None if it does not exist.

        Raises:
            SourceError: it cannot be read.
        """
        with suppress(GoneError):
            return whole(path)
        return None


class _RemoteSink:
    """A file that is uploaded in order; see `Sink`."""

    ended = False

    def __init__(self, path: str, part: int) -> None:
        self._path, self._position = path, 0
        with translating(path, "written", TargetError):
            _make_directory(path)
            fs, name = filesystem(path)
            self._file = fs.open(name, "wb", block_size=part)

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        assert offset == self._position, "a file is sent in order"  # noqa: S101
        with translating(self._path, "written", TargetError):
            self._file.write(data)
        self._position += len(data)

    def finish(self, *, durable: bool) -> None:  # noqa: ARG002 -- finished objects are durable
        with translating(self._path, "written", TargetError):
            self._file.close()
        self.ended = True

    def abort(self) -> None:
        with suppress(Exception):  # a failure here must not hide the first error
            self._file.discard()
        self._leave()

    def _leave(self) -> None:
        with suppress(Exception):
            self._file.closed = True  # or fsspec would complete the partial file on garbage collection

    def __del__(self) -> None:
        if not self.ended:
            self._leave()


def whole(path: str) -> bytes:
    """Return the contents of a file, checked against the store's checksum if it has one.

    Raises:
        SourceError: it cannot be read.
    """
    return bytes(ask(path, "read", "cat_file", nbytes=None))


def _make_directory(path: str) -> None:
    if not appears_whole(path):
        ask(path.rpartition("/")[0], "made", "makedirs", exist_ok=True, kind=TargetError)


def _fill(wants: Sequence[Want]) -> None:
    """Fill buffers by concurrent requests."""
    pieces: dict[str, tuple[list[int], list[bytes]]] = {}
    requests = joined((path, offset, len(buffer)) for path, offset, buffer in wants)
    for (path, offset, _), piece in zip(requests, _requested(requests), strict=True):
        starts, contents = pieces.setdefault(path, ([], []))
        starts.append(offset)
        contents.append(piece)
    for path, offset, buffer in wants:
        starts, contents = pieces[path]
        number = bisect_right(starts, offset) - 1
        done = 0
        while done < len(buffer):
            part = memoryview(contents[number])[offset + done - starts[number] :][: len(buffer) - done]
            buffer[done : done + len(part)] = part
            done += len(part)
            number += 1


def _requested(requests: Sequence[Range]) -> list[bytes]:
    """Return the contents of ranges, requested concurrently within each file system."""
    contents: dict[Range, bytes] = {}
    by_scheme: dict[str, list[Range]] = {}
    for request in requests:
        by_scheme.setdefault(request[0].partition("://")[0], []).append(request)
    for ranges in by_scheme.values():
        calls = [
            StoreCall(path, "cat_file", (), {"start": offset, "end": offset + nbytes}, nbytes)
            for path, offset, nbytes in ranges
        ]
        for request, content in zip(ranges, ask_each("read", calls), strict=True):
            path, offset, nbytes = request
            if len(content) != nbytes:
                raise truncated(path, offset + len(content), nbytes - len(content))
            contents[request] = content
    return [contents[request] for request in requests]


@lru_cache(maxsize=1)
def remote_store() -> RemoteStore:
    """Return this process's store of files at URLs."""
    return RemoteStore()
