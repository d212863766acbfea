"""Google Cloud Storage, Azure Blob Storage and web servers, through obstore."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import obstore
from obstore.store import AzureStore, GCSStore, HTTPStore

from reshard.core.storage.urls.clients import FileSink, Info, ListingPage
from reshard.core.storage.urls.failures import translating
from reshard.core.storage.urls.retries import attempt
from reshard.core.storage.urls.s3.upload_parts import part_bytes
from reshard.errors import TargetError

if TYPE_CHECKING:
    from obstore import ObjectMeta

    from reshard.core.storage.base import Sink

PARTS = 4
"""The number of parts of a file that are in flight at once."""


def _store(scheme: str, bucket: str, stall: float) -> Any:
    """Return obstore's store, without retries of its own."""
    seconds = f"{max(round(stall * 1000), 1)}ms"
    options: dict[str, Any] = {
        # Without TLS, too: the address in the environment may be of an emulator.
        "client_options": {
            "connect_timeout": seconds,
            "timeout": "1h",
            "read_timeout": seconds,
            "allow_http": scheme != "https",
        },
        "retry_config": {"max_retries": 0},
    }
    if scheme in {"http", "https"}:
        return HTTPStore.from_url(f"{scheme}://{bucket}", **options)
    return (GCSStore if scheme in {"gs", "gcs"} else AzureStore)(bucket, **options)


class ObjectClient:
    """A client by obstore; see `Client`."""

    def __init__(self, scheme: str, bucket: str, stall: float) -> None:
        self._store = _store(scheme, bucket, stall)
        self._lists = scheme not in {"http", "https"}

    def info(self, key: str) -> Info:
        """See `Client.info`."""
        return _info(obstore.head(self._store, key))

    def page(self, directory: str, token: str, *, deep: bool) -> ListingPage:  # noqa: ARG002 -- obstore follows the tokens
        """See `Client.page`: all pages at once; a web server lists nothing."""
        if not self._lists:
            return ListingPage({})
        prefix = directory or None
        if deep:
            metas = [meta for chunk in obstore.list(self._store, prefix) for meta in chunk]
            return ListingPage({meta["path"]: _info(meta) for meta in metas})
        level = obstore.list_with_delimiter(self._store, prefix)
        return ListingPage({meta["path"]: _info(meta) for meta in level["objects"]}, tuple(level["common_prefixes"]))

    def read_into(self, key: str, offset: int, buffer: memoryview) -> int:
        """See `Client.read_into`."""
        content = memoryview(obstore.get_range(self._store, key, start=offset, length=len(buffer))).cast("B")
        attempt().check_wanted()
        buffer[: len(content)] = content
        return len(content)

    def get(self, key: str) -> bytes:
        """See `Client.get`."""
        return bytes(obstore.get(self._store, key).bytes())

    def put(self, key: str, content: bytes) -> None:
        """See `Client.put`."""
        obstore.put(self._store, key, content, use_multipart=False)

    def delete(self, key: str) -> None:
        """See `Client.delete`."""
        with suppress(FileNotFoundError):
            obstore.delete(self._store, key)

    def copy(self, key: str, copy: str) -> None:
        """See `Client.copy`."""
        obstore.copy(self._store, key, copy)

    def sink(self, url: str, key: str, size: int | None) -> Sink:
        """See `SinkClient.sink`."""
        with translating(url, "written", TargetError):
            part = part_bytes(size or 0)
            return FileSink(url, obstore.open_writer(self._store, key, buffer_size=part, max_concurrency=PARTS))


def _info(meta: ObjectMeta) -> Info:
    version = str(meta["e_tag"] or meta["last_modified"]).strip('"')
    return Info(meta["size"], version, meta["last_modified"].timestamp())
