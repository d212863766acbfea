"""Files at S3, sent in parts: several at once, and some copied on the server instead of sent."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from reshard.core.storage.urls.pool import SLAB_BYTES, pool
from reshard.core.storage.urls.retries import StoreRequest, ask
from reshard.core.storage.urls.s3.client import Source
from reshard.core.storage.urls.s3.upload_parts import LEAST_PART_BYTES, UploadPart
from reshard.errors import Option, TargetError, Text

if TYPE_CHECKING:
    from reshard.core.storage.urls.pool import Slab
    from reshard.core.storage.urls.s3.client import S3Client
    from reshard.core.storage.urls.s3.upload_parts import Upload

_MOST_IN_FLIGHT = 16  # requests for one file: parts that are copied need no buffers


class PartsSink:
    """An object that is uploaded in parts, written in order; see `Sink`.

    A part is sent while the next ones are written, as long as the pool has buffers. Bytes of parts that are copied, or
    that the upload has, may be left out.

    Args:
        client: the client of its bucket.
        url: its URL, for messages.
        key: its key.
        upload: its parts, none if its size is unknown; a file of one part that is sent needs a single request.
    """

    def __init__(self, client: S3Client, url: str, key: str, upload: Upload) -> None:
        self.ended = False
        self._client, self._url, self._key, self._upload = client, url, key, upload
        self._is_ours = not upload.identifier  # a recorded upload is kept, to be resumed
        self._identifier = upload.identifier
        self._parts = [*upload.parts]
        self._is_open = not upload.parts
        self._position = self._next = 0
        self._slabs: list[Slab] = []  # of the part that is being written
        self._filled = 0
        self._tags = dict(upload.done)
        self._in_flight: deque[tuple[int, StoreRequest[str], list[Slab]]] = deque()

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        """Add bytes; send each complete part."""
        view = memoryview(data).cast("B")
        self._skip_to(offset)
        while view:
            if self._is_open and self._next == len(self._parts):
                self._parts.append(UploadPart(self._position, self._position + LEAST_PART_BYTES))
            part = self._parts[self._next]
            count = min(len(view), part.end - self._position)
            if not self._skips():
                at = self._filled % SLAB_BYTES
                if at == 0:
                    self._slabs.append(self._slab())
                count = min(count, SLAB_BYTES - at)
                self._slabs[-1].view[at : at + count] = view[:count]
                self._filled += count
            self._position += count
            view = view[count:]
            if self._position == part.end:
                self._end_part()

    def _skips(self) -> bool:
        """Return whether the current part is not sent."""
        return self._parts[self._next].copied is not None or self._next + 1 in self._upload.done

    def _skip_to(self, offset: int) -> None:
        """Move to an offset, past bytes of parts that are not sent."""
        while self._position < offset:
            assert self._skips(), "a file is sent in order"  # noqa: S101
            self._position = min(offset, self._parts[self._next].end)
            if self._position == self._parts[self._next].end:
                self._end_part()

    def _slab(self) -> Slab:
        """Return a buffer; if the pool has none, wait for a part of this file that is being sent."""
        while (slab := pool.take(own=not self._in_flight, sends=True)) is None:
            self._await_first()
        return slab

    def _await_first(self) -> None:
        """Wait for the request that was made first."""
        number, request, slabs = self._in_flight[0]
        try:
            self._tags[number] = request.result()
        except TargetError as error:
            if self._parts[number - 1].copied and error.code in {"no-access", "store-error"}:
                before = f"{error.hint}; " if error.hint else ""
                error.hint = Text(before, "to send all bytes, pass ", Option("no_server_copy"))
            raise
        self._in_flight.popleft()
        for slab in slabs:
            pool.give(slab)

    def _body(self) -> list[memoryview]:
        sizes = range(0, self._filled, SLAB_BYTES)
        return [slab.view[: self._filled - at] for slab, at in zip(self._slabs, sizes, strict=True)]

    def _end_part(self) -> None:
        """Begin to send or copy the current part, unless the file is sent with one request."""
        part, self._next = self._parts[self._next], self._next + 1
        number = self._next
        if number in self._upload.done or (len(self._parts) == 1 and not (part.copied or self._is_open)):
            return
        if not self._identifier:
            self._identifier = ask(self._url, "written", partial(self._client.begin, self._key), TargetError)
        while len(self._in_flight) >= _MOST_IN_FLIGHT:
            self._await_first()
        if part.copied:
            source = Source(*self._upload.sources[part.copied.source], part.copied.offset, part.copied.nbytes)
            call = partial(self._client.copy_part, self._key, self._identifier, number, source)
        else:
            call = partial(self._client.send_part, self._key, self._identifier, number, self._body())
        request = StoreRequest(self._url, "written", call, TargetError, None if part.copied else self._filled)
        self._in_flight.append((number, request, self._slabs))
        self._slabs, self._filled = [], 0

    def finish(self, *, durable: bool) -> None:  # noqa: ARG002 -- finished objects are durable
        """Send the rest and complete the object."""
        if self._parts and not self._is_open:
            self._skip_to(self._parts[-1].end)
        if self._identifier:
            if self._filled:
                self._end_part()
            while self._in_flight:
                self._await_first()
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
                self._client.complete(self._key, self._identifier, self._tags)
            except FileNotFoundError:
                if len(tries) == 1 or self._client.info(self._key).nbytes != self._position:
                    raise

        return partial(complete)

    def abort(self) -> None:
        """Abort the upload, so that the store drops its parts; an upload that was begun before is kept."""
        for _, request, _ in self._in_flight:
            request.give_up()
        if self._identifier and self._is_ours and not self.ended:
            with suppress(Exception):  # a failure here must not hide the first error
                ask(self._url, "written", partial(self._client.abort, self._key, self._identifier), TargetError)
        self._leave()

    def _leave(self) -> None:
        """Return the buffers, except those of cancelled requests, which may still use them."""
        for slab in self._slabs:
            pool.give(slab)
        self._slabs, self._filled = [], 0
        for _, _, slabs in self._in_flight:
            for slab in slabs:
                pool.forget(slab)
        self._in_flight.clear()
