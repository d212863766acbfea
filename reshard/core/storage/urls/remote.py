"""Files at URLs: read many ranges at once, write files in order.

Credentials and addresses come from the environment, the files of the stores' own tools and `storage_options`, never
from a plan, so that they are neither written down nor sent to other machines.

The latency of a request to an object store equals the transfer of a megabyte or more, and such a store has no
positioned writes. So adjacent and nearly adjacent ranges of one read are joined, and all are requested at once. A file
is sent in parts. If it appears only with its last part (`appears_whole`), it is written under its final name; otherwise
under an unfinished name, and moved, as on a local disk.
"""

from __future__ import annotations

from bisect import bisect_right
from contextlib import suppress
from functools import lru_cache, partial
from typing import TYPE_CHECKING, cast

from reshard.core.storage.base import Capabilities, Status, truncated, unfinished_path
from reshard.core.storage.urls.clients import appears_whole, in_s3
from reshard.core.storage.urls.listings import listings
from reshard.core.storage.urls.pool import SLAB_BYTES, pool, speed
from reshard.core.storage.urls.retries import StoreRequest, ask, results
from reshard.core.storage.urls.schemes import client_at
from reshard.errors import GoneError, TargetError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reshard.core.storage.base import Sink, Want
    from reshard.core.storage.urls.clients import SinkClient
    from reshard.core.storage.urls.pool import Slab
    from reshard.core.storage.urls.s3.upload_parts import Upload

Range = tuple[str, int, int]
"""A byte range of a file: path, offset and size."""

LIBRARY_BYTES = 16 << 20
"""Resident memory of the clients, with their threads and connections; measured."""

REQUESTS = 32
"""The number of concurrent small requests."""

_GAP = 1 << 20  # less than a request costs


def fetched_bytes(buffers: int, shared: int, held: int) -> int:
    """Return the memory of requests.

    Args:
        buffers: the number of buffers that belong to threads.
        shared: the bytes of shared buffers.
        held: how many times a requested byte is held; see `Buffering`.
    """
    return LIBRARY_BYTES + held * (buffers * SLAB_BYTES + shared)


@lru_cache(maxsize=64)
def remote_can(scheme: str) -> Capabilities:
    """Return the capabilities of the store of a URL scheme."""
    return Capabilities(
        positioned=False,
        whole=appears_whole(f"{scheme}://"),
        appends=False,
        locks=False,
        requests=REQUESTS,
        library_bytes=LIBRARY_BYTES,
    )


def joined(ranges: Iterable[Range], gap: int = _GAP, most: int = SLAB_BYTES) -> list[Range]:
    """Join ranges that adjoin or have a small gap, and cut long ones.

    Args:
        ranges: the ranges.
        gap: the longest gap in bytes; a gap is at most as long as the joined ranges before it, or 32 KiB.
        most: the longest request in bytes.

    >>> joined([("a", 100, 10), ("a", 0, 90), ("b", 0, 1)])
    [('a', 0, 110), ('b', 0, 1)]
    """
    merged: list[Range] = []
    useful = 0
    for path, offset, nbytes in sorted(ranges):
        end = sum(merged[-1][1:]) if merged else 0
        if merged and merged[-1][0] == path and offset - end <= min(gap, max(useful, 32 << 10)):
            begin = merged[-1][1]
            merged[-1] = (path, begin, max(end, offset + nbytes) - begin)
            useful += nbytes
        else:
            merged.append((path, offset, nbytes))
            useful = nbytes
    return [
        (path, begin, min(most, offset + nbytes - begin))
        for path, offset, nbytes in merged
        for begin in range(offset, offset + nbytes, most)
    ]


def read_request(path: str, offset: int, buffer: memoryview) -> StoreRequest[None]:
    """Begin to fill a buffer from a file, and return the request."""

    def read() -> None:
        client, key = client_at(path)
        nbytes = client.read_into(key, offset, buffer)
        if nbytes != len(buffer):
            raise truncated(path, offset + nbytes, offset + len(buffer))

    return StoreRequest(path, "read", read, nbytes=len(buffer))


class Fetch:
    """Ranges that are being read into a buffer of the pool.

    Args:
        wants: the requests to read, with the buffers to fill later.
        slab: a buffer of the pool, used if the ranges fit.
    """

    def __init__(self, wants: Sequence[Want], slab: Slab) -> None:
        self._slab = slab
        ranges = [(path, offset, len(buffer)) for path, offset, buffer in wants]
        most = speed.request_bytes()
        requested = joined(ranges, most=most)
        total = sum(nbytes for _, _, nbytes in requested)
        if total > SLAB_BYTES:
            requested = joined(ranges, 0, most)
            total = sum(nbytes for _, _, nbytes in requested)
        self._content = slab.view if total <= SLAB_BYTES else memoryview(bytearray(total))
        self._starts: list[tuple[str, int, int]] = []  # path, offset and position in the buffer, by path and offset
        self._requests: list[StoreRequest[None]] = []
        position = 0
        for path, offset, nbytes in requested:
            self._starts.append((path, offset, position))
            self._requests.append(read_request(path, offset, self._content[position : position + nbytes]))
            position += nbytes
        self._is_done = False

    def fill(self, want: Want) -> None:
        """Fill a buffer; wait for its contents if necessary."""
        if not self._is_done:
            results(self._requests)
            self._is_done = True
        path, offset, buffer = want
        if not buffer:
            return
        _, start, position = self._starts[bisect_right(self._starts, (path, offset, SLAB_BYTES << 32)) - 1]
        # Requests for adjacent ranges are adjacent in the buffer.
        begin = position + offset - start
        buffer[:] = self._content[begin : begin + len(buffer)]

    def close(self) -> None:
        """Return the buffer to the pool."""
        if self._is_done:
            pool.give(self._slab)
        else:
            for request in self._requests:
                request.give_up()
            pool.forget(self._slab)


class RemoteStore:
    """Files at URLs. Safe to use from several threads."""

    def status(self, path: str) -> Status:
        """Return the state of a file as it is now."""
        return listings.status_now(path)

    def size(self, path: str) -> int:
        """Return the size of a file in bytes, as the last listing has it."""
        return listings.status(path).nbytes

    def read(self, wants: Sequence[Want]) -> None:
        """Fill buffers from files with few requests at once.

        Raises:
            SourceError: a file ends too early, or cannot be read.
        """
        most = speed.request_bytes()
        ordered = sorted((want for want in wants if want[2]), key=lambda want: want[:2])
        small = [want for want in ordered if len(want[2]) < _GAP] if len(ordered) > 1 else []  # these may be joined
        requests = [
            read_request(path, offset + at, buffer[at : at + most])
            for path, offset, buffer in ordered
            if not small or len(buffer) >= _GAP
            for at in range(0, len(buffer), most)
        ]
        while small:
            count = nbytes = 0
            while count < len(small) and nbytes < SLAB_BYTES - _GAP:
                nbytes += len(small[count][2])
                count += 1
            slab = pool.take(own=True, sends=False)
            assert slab is not None  # noqa: S101 -- with `own` there is always one
            fetch = Fetch(small[:count], slab)
            try:
                for want in small[:count]:
                    fetch.fill(want)
            finally:
                fetch.close()
            small = small[count:]
        results(requests)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill one buffer."""
        self.read([(path, offset, buffer)])

    @staticmethod
    def unfinished(path: str, digest: str = "") -> str:
        """Return a file's path until it is published: the final one if it appears whole."""
        return path if appears_whole(path) else unfinished_path(path, digest)

    def create(self, path: str, size: int | None, upload: Upload | None = None) -> Sink:
        """Begin to write a file in order; its size decides how it is sent, unless that is known.

        Raises:
            TargetError: it cannot be written.
        """
        listings.forget(path)
        client, key = client_at(path)
        if not in_s3(path):
            return cast("SinkClient", client).sink(path, key, size)
        from reshard.core.storage.urls.s3.client import S3Client
        from reshard.core.storage.urls.s3.sink import PartsSink
        from reshard.core.storage.urls.s3.upload_parts import Upload, parts_of

        assert isinstance(client, S3Client)  # noqa: S101 -- of the scheme
        return PartsSink(client, path, key, upload or Upload(() if size is None else parts_of(size)))

    def publish(self, unfinished: str, path: str, *, durable: bool) -> None:  # noqa: ARG002 -- finished objects are durable
        """Move a written file to its final name, unless it has that already."""
        if unfinished == path:
            return
        from reshard.core.storage.urls.filesystems import FileSystemClient

        listings.forget(path)
        action = "given its final name"
        client, key = client_at(unfinished)
        assert isinstance(client, FileSystemClient)  # noqa: S101 -- in the others files appear whole
        ask(path, action, partial(client.move, key, client_at(path)[1]), TargetError)

    def link(self, original: str, unfinished: str) -> None:
        """Copy a file within the file system, without transferring its bytes here."""
        listings.forget(unfinished)
        client, key = client_at(original)
        ask(original, "copied", partial(client.copy, key, client_at(unfinished)[1]), TargetError, None)

    def remove(self, path: str) -> None:
        """Remove a finished file, if it exists.

        Raises:
            TargetError: it cannot be removed.
        """
        listings.forget(path)
        client, key = client_at(path)
        ask(path, "removed", partial(client.delete, key), TargetError)

    def discard(self, path: str) -> None:
        """Remove a file, if it exists; never raises."""
        with suppress(Exception):  # a failure here must not hide why the file is removed
            self.remove(path)

    def put(self, path: str, content: bytes) -> None:
        """Write a small file with one request.

        Raises:
            TargetError: it cannot be written.
        """
        listings.forget(path)
        client, key = client_at(path)
        ask(path, "written", partial(client.put, key, content), TargetError, len(content))

    def contents(self, path: str) -> bytes | None:
        """Return the contents of a small file; None if it does not exist.

        Raises:
            SourceError: it cannot be read.
        """
        with suppress(GoneError):
            return whole(path)
        return None


def whole(path: str) -> bytes:
    """Return the contents of a file, checked against the store's checksum if it has one.

    Raises:
        SourceError: it cannot be read.
    """
    client, key = client_at(path)
    return ask(path, "read", partial(client.get, key), nbytes=None)


@lru_cache(maxsize=1)
def remote_store() -> RemoteStore:
    """Return this process's store of files at URLs."""
    return RemoteStore()
