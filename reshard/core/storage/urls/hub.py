"""Repositories of the Hugging Face Hub, `hf://`, through the file system of huggingface_hub.

A repository takes the place of a bucket, and `@` before the path names a revision. Each file that is written is sent
with one commit once it is complete, so a file appears whole, and an index that is written last completes its set.
Commits of this process wait for each other: the Hub refuses a commit if another one overtakes it.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from reshard.core.storage.urls.clients import FileSink
from reshard.core.storage.urls.failures import (
    REPOSITORY,
    NoRepositoryError,
    NoRevisionError,
    StoreError,
    causes,
    one_line,
    translating,
)
from reshard.core.storage.urls.filesystems import FileSystemClient, version_of
from reshard.core.storage.urls.retries import attempt
from reshard.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reshard.core.storage.base import Sink
    from reshard.core.storage.urls.clients import Info

_COMMITTING = Lock()
_PAST_THE_END = 416  # the HTTP status of a range that begins after the end of a file


class HubClient(FileSystemClient):
    """A client by huggingface_hub's file system; see `Client`."""

    lists_versions = True

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn errors of the Hub into `FileNotFoundError`, `StoreError` or those of a missing repository."""
        try:
            yield
        except (HfHubHTTPError, FileNotFoundError, RuntimeError) as error:
            for cause in causes(error):  # the library wraps some errors in others, which say less
                if isinstance(cause, RepositoryNotFoundError | RevisionNotFoundError):
                    self._fs.invalidate_cache()  # it may be made next
                if isinstance(cause, RepositoryNotFoundError):
                    raise NoRepositoryError(one_line(cause)) from error
                if isinstance(cause, RevisionNotFoundError):
                    raise NoRevisionError(one_line(cause)) from error
                if isinstance(cause, EntryNotFoundError):
                    raise FileNotFoundError(one_line(cause)) from error
                if isinstance(cause, HfHubHTTPError):
                    raise StoreError(one_line(cause), "", cause.response.status_code) from error
            raise

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Let one commit at a time be made, without the library's progress bars."""
        with _COMMITTING, self._explained():
            are_shown = not are_progress_bars_disabled()
            if are_shown:
                disable_progress_bars()
            try:
                yield
            finally:
                if are_shown:
                    enable_progress_bars()

    def info(self, key: str) -> Info:
        """See `Client.info`."""
        if REPOSITORY.fullmatch(key):
            raise FileNotFoundError(key)
        directory = key.rpartition("/")[0]
        for entry in self._entries(directory, deep=False):  # a request for one file gives no version
            if entry["name"] == key and entry["type"] == "file":
                return version_of(entry)
        raise FileNotFoundError(key)

    def _entries(self, name: str, *, deep: bool) -> list[dict[str, Any]]:
        with self._explained():
            if deep:
                return list(self._fs.find(name, detail=True, refresh=True).values())
            return list(self._fs.ls(name, detail=True, refresh=True))

    def read_into(self, key: str, offset: int, buffer: memoryview) -> int:
        """See `Client.read_into`."""
        # One request for the range: the size is given, so it is not asked for, and nothing is read ahead.
        end = offset + len(buffer)
        try:
            with self._explained(), self._fs.open(key, "rb", cache_type="none", size=end) as file:
                file.seek(offset)
                content = file.read(len(buffer))
        except StoreError as error:
            if error.status != _PAST_THE_END:
                raise
            content = b""
        attempt().check_wanted()
        buffer[: len(content)] = content
        return len(content)

    def get(self, key: str) -> bytes:
        """See `Client.get`."""
        with self._explained(), self._fs.open(key, "rb", block_size=0) as file:
            return bytes(file.read())

    def put(self, key: str, content: bytes) -> None:
        """See `Client.put`."""
        with self.committing():
            file = self._fs.open(key, "wb")
            try:
                file.write(content)
                file.close()
            finally:
                _remove_temporary(file)

    def delete(self, key: str) -> None:
        """See `Client.delete`."""
        with suppress(FileNotFoundError), self.committing():
            self._fs.rm_file(key)

    def copy(self, key: str, copy: str) -> None:
        """See `Client.copy`."""
        with self.committing():
            super().copy(key, copy)

    def sink(self, url: str, key: str, size: int | None) -> Sink:  # noqa: ARG002 -- it is sent when it is complete
        """See `SinkClient.sink`."""
        with translating(url, "written", TargetError), self._explained():
            return _HubSink(url, self._fs.open(key, "wb"), self)


class _HubSink(FileSink):
    """A file that is collected in a temporary file, and sent with one commit."""

    def __init__(self, url: str, file: Any, client: HubClient) -> None:
        super().__init__(url, file)
        self._client = client

    def finish(self, *, durable: bool) -> None:  # noqa: ARG002 -- a commit is durable
        """Complete the file."""
        with translating(self._url, "written", TargetError), self._client.committing():
            self._file.close()
        self.ended = True

    def _leave(self) -> None:
        _remove_temporary(self._file)


def _remove_temporary(file: Any) -> None:
    """Remove the temporary file that a file was collected in, if it was not sent."""
    file.closed = True  # or it would be sent on garbage collection
    if (temporary := getattr(file, "temp_file", None)) is not None:
        temporary.close()
        Path(temporary.name).unlink(missing_ok=True)
