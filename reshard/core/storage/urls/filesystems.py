"""Other URLs, through the file systems of fsspec: `memory://`, `sftp://` and so on."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

from fsspec.core import url_to_fs  # 40 ms

from reshard.core.storage.urls.clients import FileSink, Info, ListingPage, appears_whole
from reshard.core.storage.urls.failures import translating
from reshard.core.storage.urls.retries import attempt
from reshard.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.core.storage.base import Sink

# Fields that identify the version of a file, the surest first; file systems differ in the fields they have.
_VERSIONS = ("ETag", "etag", "generation", "md5Hash", "blob_id", "mtime", "LastModified", "last_modified", "updated",
             "created", "modificationTime", "modify")  # fmt: skip

_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")

_PART_BYTES = 8 << 20


def named(url: str) -> str:
    """Return the name of a file in its file system, without the slashes around it."""
    return str(url_to_fs(url)[1]).strip("/")


class FileSystemClient:
    """A client by a file system of fsspec; see `Client`.

    Attributes:
        lists_versions: a listing gives the same versions as a request for one file, unlike in some file systems.
    """

    lists_versions = False

    def __init__(self, url: str) -> None:
        self._fs, name = url_to_fs(url)
        self._root = "/" if str(name).startswith("/") else ""
        self._makes_directories = not appears_whole(url)

    def _name(self, key: str) -> str:
        return f"{self._root}{key}"

    def info(self, key: str) -> Info:
        """See `Client.info`."""
        self._fs.invalidate_cache()
        info = self._fs.info(self._name(key))
        if info["type"] != "file":
            raise FileNotFoundError(key)
        return version_of(info)

    def page(self, directory: str, token: str, *, deep: bool) -> ListingPage:  # noqa: ARG002 -- there is one page
        """See `Client.page`."""
        self._fs.invalidate_cache()
        with suppress(FileNotFoundError, NotADirectoryError):
            entries = self._entries(self._name(directory), deep=deep)
            found = {str(entry["name"]).strip("/"): entry for entry in entries}
            found.pop(directory, None)
            infos = {key: version_of(entry) for key, entry in found.items() if entry["type"] == "file"}
            # In most file systems, a listing and a request for one file give different versions.
            files = infos if self.lists_versions else {key: info._replace(version="") for key, info in infos.items()}
            return ListingPage(files, tuple(key for key in found if key not in files))
        return ListingPage({})

    def _entries(self, name: str, *, deep: bool) -> list[dict[str, Any]]:
        """Return the contents of a directory; raise `FileNotFoundError` if it does not exist."""
        return list(self._fs.find(name, detail=True).values()) if deep else list(self._fs.ls(name, detail=True))

    def read_into(self, key: str, offset: int, buffer: memoryview) -> int:
        """See `Client.read_into`."""
        content = self._fs.cat_file(self._name(key), start=offset, end=offset + len(buffer))
        attempt().check_wanted()
        buffer[: len(content)] = content
        return len(content)

    def get(self, key: str) -> bytes:
        """See `Client.get`."""
        return bytes(self._fs.cat_file(self._name(key)))

    def put(self, key: str, content: bytes) -> None:
        """See `Client.put`."""
        self._make_directory(key)
        self._fs.pipe_file(self._name(key), content)

    def delete(self, key: str) -> None:
        """See `Client.delete`."""
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._name(key))

    def copy(self, key: str, copy: str) -> None:
        """See `Client.copy`."""
        self._make_directory(copy)
        self._fs.cp_file(self._name(key), self._name(copy))

    def move(self, key: str, final: str) -> None:
        """Move a file to its final name."""
        self.delete(final)
        self._fs.mv(self._name(key), self._name(final))

    def sink(self, url: str, key: str, size: int | None) -> Sink:  # noqa: ARG002 -- it is sent as it comes
        """See `SinkClient.sink`."""
        with translating(url, "written", TargetError):
            self._make_directory(key)
            return FileSink(url, self._fs.open(self._name(key), "wb", block_size=_PART_BYTES))

    def _make_directory(self, key: str) -> None:
        if self._makes_directories:
            self._fs.makedirs(self._name(key.rpartition("/")[0]), exist_ok=True)


def _modified(info: Mapping[str, Any]) -> float:
    """Return the time of the last change in seconds since 1970; 0 if unknown."""
    value = next((info[key] for key in _TIMES if info.get(key)), 0.0)
    if isinstance(value, datetime):
        return value.timestamp()
    return float(value) if isinstance(value, int | float) else 0.0


def version_of(info: Mapping[str, Any]) -> Info:
    """Return the size, the version and the time of a file, as its file system describes it."""
    version = next((str(info[key]).strip('"') for key in _VERSIONS if info.get(key)), "")
    return Info(int(info["size"] or 0), version, _modified(info))
