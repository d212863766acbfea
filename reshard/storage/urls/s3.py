"""S3: multipart uploads.

Each part and each small object is sent with its CRC-32, which botocore computes (since version 1.36, unless
AWS_REQUEST_CHECKSUM_CALCULATION is `when_required`); the store refuses damaged ones. Whole objects are checked against
the store's checksum when read, if it has one. It has none for byte ranges of large files.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from reshard.errors import TargetError
from reshard.storage.urls.requests import ask, filesystem

if TYPE_CHECKING:
    from collections.abc import Callable


class S3Sink:
    """An object that is uploaded in parts, in order; see `Sink`.

    Args:
        path: its URL.
        part: the size of a part, in bytes; a smaller object is sent with one request.
    """

    ended = False

    def __init__(self, path: str, part: int) -> None:
        self._path, self._part = path, part
        self._fs, self._name = filesystem(path)
        bucket, key, _ = self._fs.split_path(self._name)
        self._object = {"Bucket": bucket, "Key": key}
        self._buffer = bytearray()
        self._size = 0
        self._upload: dict[str, Any] = {}
        self._parts: list[dict[str, Any]] = []

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        """Buffer the next bytes; send each complete part."""
        assert offset == self._size, "a file is sent in order"  # noqa: S101
        view = memoryview(data).cast("B")
        self._size += len(view)
        while view:
            room = self._part - len(self._buffer)
            self._buffer += view[:room]
            view = view[room:]
            if len(self._buffer) == self._part:
                self._send()

    def _send(self) -> None:
        """Send the buffer as the next part."""
        if not self._upload:
            upload = self._ask("create_multipart_upload", **self._object)
            self._upload = {**self._object, "UploadId": upload["UploadId"]}
        body = bytes(self._buffer)
        self._buffer.clear()
        number = len(self._parts) + 1
        part = self._ask("upload_part", Body=body, PartNumber=number, nbytes=len(body), **self._upload)
        self._parts.append({"PartNumber": number, "ETag": part["ETag"]})

    def finish(self, *, durable: bool) -> None:  # noqa: ARG002 -- finished objects are durable
        """Send the rest and complete the object."""
        if self._upload:
            if self._buffer:
                self._send()
            ask(self._path, "written", self._complete(), kind=TargetError, nbytes=None)
        else:
            self._ask("put_object", Body=bytes(self._buffer), nbytes=len(self._buffer), **self._object)
        self._buffer.clear()
        self._fs.invalidate_cache(self._name)
        self.ended = True

    def _complete(self) -> Callable[[], Any]:
        """Return a coroutine function that joins the parts.

        If the response of a successful try was lost, the next try finds no upload: then the object is checked.
        """
        tries = 0

        async def complete() -> None:
            nonlocal tries
            tries += 1
            try:
                parts = {"Parts": self._parts}
                await self._fs._call_s3("complete_multipart_upload", MultipartUpload=parts, **self._upload)  # noqa: SLF001
            except FileNotFoundError:
                if tries == 1:
                    raise
                head = await self._fs._call_s3("head_object", **self._object)  # noqa: SLF001 -- fsspec's for coroutines
                if head["ContentLength"] != self._size:
                    raise

        return complete

    def abort(self) -> None:
        """Abort the upload, so that the store drops its parts."""
        self._buffer.clear()
        if self._upload and not self.ended:
            with suppress(Exception):  # a failure here must not hide the first error
                self._ask("abort_multipart_upload", **self._upload)

    def _ask(self, operation: str, *, nbytes: int = 0, **parameters: Any) -> Any:
        call = partial(self._fs._call_s3, operation, **parameters)  # noqa: SLF001 -- fsspec's for coroutines
        return ask(self._path, "written", call, kind=TargetError, nbytes=nbytes)
