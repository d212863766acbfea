"""The interface of clients of object stores and other file systems at URLs.

A client makes each request once; `retries` makes it again if it fails. Errors are its own; `failures` translates them.
"""

from __future__ import annotations

from contextlib import suppress
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from reshard.core.storage.base import Status
from reshard.core.storage.urls.failures import translating
from reshard.errors import TargetError

if TYPE_CHECKING:
    from reshard.core.storage.base import Sink

S3 = {"s3", "s3a"}
"""The schemes of S3 and its compatibles."""

HUB = "hf"
"""The scheme of the Hugging Face Hub."""

OBSTORE = {"gs", "gcs", "az", "abfs", "abfss", "http", "https"}
"""The schemes that obstore serves."""

# File systems on which a file appears only when it is complete.
_WHOLE = {*S3, "gs", "gcs", "abfs", "abfss", "az", "oss", "obs", HUB}


class Info(NamedTuple):
    """The state of a file at a URL.

    Attributes:
        nbytes: its size.
        version: a text that identifies its version; "" if unknown.
        modified: the time of its last change, in seconds since 1970; 0 if unknown.
    """

    nbytes: int
    version: str
    modified: float = 0.0

    @property
    def status(self) -> Status:
        """Return the state with a number derived from the version."""
        number = int.from_bytes(sha256(self.version.encode()).digest()[:7]) if self.version else 0
        return Status(self.nbytes, number)


class Buffering(NamedTuple):
    """How a client buffers.

    Attributes:
        read: how many times a requested byte is held: in the buffer of the request, and by the library.
        sent: how many parts of a file are buffered, besides the shared buffers of the pool.
    """

    read: int
    sent: int


class ListingPage(NamedTuple):
    """A part of a listing.

    Attributes:
        files: the states of files by key.
        directories: the keys of directories, if only one level is listed.
        next: the token of the next page; "" if there is none.
    """

    files: dict[str, Info]
    directories: tuple[str, ...] = ()
    next: str = ""


class Client(Protocol):
    """A client of one bucket or file system. Keys have no slash at either end."""

    def info(self, key: str) -> Info:
        """Return the state of a file as it is now; raise `FileNotFoundError` if there is none."""

    def page(self, directory: str, token: str, *, deep: bool) -> ListingPage:
        """Return a page of the files below a directory, at any depth if `deep`; empty if it does not exist."""

    def read_into(self, key: str, offset: int, buffer: memoryview) -> int:
        """Fill a buffer with bytes of a file, and return how many it has there."""

    def get(self, key: str) -> bytes:
        """Return the contents of a file, checked against the store's checksum if it has one."""

    def put(self, key: str, content: bytes) -> None:
        """Write a small file."""

    def delete(self, key: str) -> None:
        """Remove a file, if it exists."""

    def copy(self, key: str, copy: str) -> None:
        """Copy a file within the store."""


class FileSink:
    """A file that a library writes in order; see `Sink`.

    Args:
        url: its URL, for messages.
        file: the library's file, which has `write` and `close`.
    """

    def __init__(self, url: str, file: Any) -> None:
        self.ended = False
        self._url, self._file, self._position = url, file, 0

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        """Write the next bytes."""
        assert offset == self._position, "a file is sent in order"  # noqa: S101
        with translating(self._url, "written", TargetError):
            self._file.write(bytes(data))  # a library may keep what it is given, and the buffer is used again
        self._position += len(data)

    def finish(self, *, durable: bool) -> None:  # noqa: ARG002 -- finished objects are durable
        """Complete the file."""
        with translating(self._url, "written", TargetError):
            self._file.close()
        self.ended = True

    def abort(self) -> None:
        """Leave the file incomplete."""
        with suppress(Exception):  # a failure here must not hide the first error
            self._file.discard()
        self._leave()

    def _leave(self) -> None:
        with suppress(Exception):
            self._file.closed = True  # or fsspec would complete the partial file on garbage collection

    def __del__(self) -> None:
        if not self.ended:
            self._leave()


class SinkClient(Client, Protocol):
    """A client that writes files in order."""

    def sink(self, url: str, key: str, size: int | None) -> Sink:
        """Begin to write a file in order."""


def appears_whole(url: str) -> bool:
    """Return whether a file at a URL appears under its name only when it is complete."""
    return url.partition("://")[0] in _WHOLE


def in_s3(url: str) -> bool:
    """Return whether a URL is of S3, whose parts may be sent in any order and copied on the server.

    >>> in_s3("s3://bucket/a"), in_s3("gs://bucket/a")
    (True, False)
    """
    return url.partition("://")[0] in S3


def buffering(url: str) -> Buffering:
    """Return how the client of a URL buffers."""
    if in_s3(url):
        return Buffering(1, 1)
    return Buffering(2, 6 if url.partition("://")[0] in OBSTORE else 2)  # obstore sends four parts at once
