"""S3: how its connections stall, and files that are sent in parts.

aiohttp, with which s3fs sends, has a timeout between bytes that come in, and none between those that go out: a store
that takes no more of a part is waited for without end. The kernel knows better (TCP_USER_TIMEOUT of Linux): bytes that
nobody acknowledges for so long end the connection. (aiohttp sends a part once again then, before the try has failed.)

Each part and each small object goes with its CRC-32, which botocore computes (since version 1.36, unless
AWS_REQUEST_CHECKSUM_CALCULATION is `when_required`); the store refuses what arrives otherwise. Whole objects are
compared with the checksum that the store has of them, if it has one. It has none of the ranges that are read of large
files.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from reshard.errors import TargetError
from reshard.storage.urls.requests import ask, filesystem

if TYPE_CHECKING:
    from collections.abc import Callable


@lru_cache(maxsize=16)
def options(stall: float) -> dict[str, Any]:
    """Return options of s3fs for connections that fail after a time without progress, and are not retried there."""
    from fsspec.config import conf

    given = conf.get("s3", {}).get("config_kwargs", {})
    config: dict[str, Any] = {"read_timeout": stall, "retries": {"total_max_attempts": 1}}
    if _takes_sockets():
        config["connector_args"] = {"socket_factory": _sockets(stall)}
    return {"config_kwargs": {**config, **given}}


def _takes_sockets() -> bool:
    """Return whether the client of this version can be told how to make its sockets."""
    from aiobotocore.config import AioConfig
    from botocore.exceptions import ParamValidationError

    with suppress(ParamValidationError):
        AioConfig(connector_args={"socket_factory": socket.socket})
        return hasattr(socket, "TCP_USER_TIMEOUT")
    return False


def _sockets(stall: float) -> Callable[[tuple[Any, ...]], socket.socket]:
    """Return what makes a socket whose connection ends if what is sent is not acknowledged for a time."""

    def make(address: tuple[Any, ...]) -> socket.socket:
        made = socket.socket(*address[:3])
        with suppress(OSError):  # not every system that has the name has the option
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(stall * 1000)))
        return made

    return make


class S3Sink:
    """An object that is being sent in parts, from its first byte to its last; see `Sink`.

    Args:
        path: its URL.
        part: how many bytes a part has; an object with fewer is sent at once.
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
        """Take what comes next; send it if it completes a part."""
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
        """Send the next part."""
        if not self._upload:
            upload = self._ask("create_multipart_upload", **self._object)
            self._upload = {**self._object, "UploadId": upload["UploadId"]}
        body = bytes(self._buffer)
        self._buffer.clear()
        number = len(self._parts) + 1
        part = self._ask("upload_part", Body=body, PartNumber=number, nbytes=len(body), **self._upload)
        self._parts.append({"PartNumber": number, "ETag": part["ETag"]})

    def finish(self, *, durable: bool) -> None:  # noqa: ARG002 -- what is there is there for good
        """Send the rest; then the object is there."""
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
        """Return what joins the parts. If that was done and the reply was lost, the next try finds no upload."""
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
        """Have the store forget what was sent."""
        self._buffer.clear()
        if self._upload and not self.ended:
            with suppress(Exception):  # nothing that fails here may hide why
                self._ask("abort_multipart_upload", **self._upload)

    def _ask(self, operation: str, *, nbytes: int = 0, **parameters: Any) -> Any:
        call = partial(self._fs._call_s3, operation, **parameters)  # noqa: SLF001 -- fsspec's for coroutines
        return ask(self._path, "written", call, kind=TargetError, nbytes=nbytes)
