"""Files at S3, sent in parts: several at once, and some copied on the server instead of sent."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from reshard.errors import TargetError
from reshard.storage.urls.lines import Request, ask
from reshard.storage.urls.pool import SLAB_BYTES, pool

if TYPE_CHECKING:
    from reshard.storage.urls.pool import Slab
    from reshard.storage.urls.s3 import S3Client

LEAST_PART_BYTES = 8 << 20
"""The smallest part of an upload; S3 requires 5 MiB."""

_MOST_PARTS = 9_000  # S3 takes 10,000


def part_bytes(size: int) -> int:
    """Return the part size for the upload of a file of this size, in bytes.

    >>> part_bytes(1 << 20) >> 20, part_bytes(1 << 40) >> 20
    (8, 117)
    """
    return max(LEAST_PART_BYTES, -(-size // (_MOST_PARTS << 20)) << 20)


class PartsSink:
    """An object that is uploaded in parts, written in order; see `Sink`.

    A part is sent while the next ones are written, as long as the pool has buffers.

    Args:
        client: the client of its bucket.
        url: its URL, for messages.
        key: its key.
        part: the size of a part, in bytes; a smaller object is sent with one request.
    """

    def __init__(self, client: S3Client, url: str, key: str, part: int) -> None:
        self.ended = False
        self._client, self._url, self._key, self._part = client, url, key, part
        self._size = 0
        self._slabs: list[Slab] = []  # of the part that is being written
        self._filled = 0
        self._upload = ""
        self._number = 0
        self._sent: dict[int, str] = {}
        self._flying: deque[tuple[int, Request[str], list[Slab]]] = deque()

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        """Add the next bytes; send each complete part."""
        assert offset == self._size, "a file is sent in order"  # noqa: S101
        view = memoryview(data).cast("B")
        self._size += len(view)
        while view:
            at = self._filled % SLAB_BYTES
            if at == 0:
                self._slabs.append(self._slab())
            count = min(len(view), SLAB_BYTES - at, self._part - self._filled)
            self._slabs[-1].view[at : at + count] = view[:count]
            self._filled += count
            view = view[count:]
            if self._filled == self._part:
                self._send()

    def _slab(self) -> Slab:
        """Return a buffer; if the pool has none, wait for a part of this file that is being sent."""
        while (slab := pool.take(own=not self._flying)) is None:
            self._land()
        return slab

    def _land(self) -> None:
        """Wait for the part that was sent first."""
        number, request, slabs = self._flying[0]
        self._sent[number] = request.result()
        self._flying.popleft()
        for slab in slabs:
            pool.give(slab)

    def _body(self) -> list[memoryview]:
        sizes = range(0, self._filled, SLAB_BYTES)
        return [slab.view[: self._filled - at] for slab, at in zip(self._slabs, sizes, strict=True)]

    def _send(self) -> None:
        """Begin to send the part that was written."""
        if not self._upload:
            self._upload = ask(self._url, "written", partial(self._client.begin, self._key), TargetError)
        self._number += 1
        call = partial(self._client.send_part, self._key, self._upload, self._number, self._body())
        request = Request(self._url, "written", call, TargetError, self._filled)
        self._flying.append((self._number, request, self._slabs))
        self._slabs, self._filled = [], 0

    def finish(self, *, durable: bool) -> None:  # noqa: ARG002 -- finished objects are durable
        """Send the rest and complete the object."""
        if self._upload:
            if self._filled:
                self._send()
            while self._flying:
                self._land()
            ask(self._url, "written", self._complete(), TargetError, None)
        else:
            ask(self._url, "written", partial(self._client.put, self._key, self._body()), TargetError, self._filled)
        self._leave()
        self.ended = True

    def _complete(self) -> partial[None]:
        """Return a function that joins the parts.

        If the response of a successful try was lost, the next try finds no upload: then the object is checked.
        """
        tries: list[None] = []

        def complete() -> None:
            tries.append(None)
            try:
                self._client.complete(self._key, self._upload, self._sent)
            except FileNotFoundError:
                if len(tries) == 1 or self._client.info(self._key).nbytes != self._size:
                    raise

        return partial(complete)

    def abort(self) -> None:
        """Abort the upload, so that the store drops its parts."""
        for _, request, _ in self._flying:
            request.give_up()
        if self._upload and not self.ended:
            with suppress(Exception):  # a failure here must not hide the first error
                ask(self._url, "written", partial(self._client.abort, self._key, self._upload), TargetError)
        self._leave()

    def _leave(self) -> None:
        """Give the buffers back, but for those of requests that were given up, which may still use them."""
        for slab in self._slabs:
            pool.give(slab)
        self._slabs, self._filled = [], 0
        for _, _, slabs in self._flying:
            for slab in slabs:
                pool.forget(slab)
        self._flying.clear()
