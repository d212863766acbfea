"""The choice of a client by the scheme of a URL."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from reshard.core.storage.urls.clients import HUB, OBSTORE, S3
from reshard.core.storage.urls.failures import REPOSITORY, key_hint, one_line, stall_seconds
from reshard.errors import ReshardError, UsageError

if TYPE_CHECKING:
    from reshard.core.storage.urls.clients import Client


def client_at(url: str) -> tuple[Client, str]:
    """Return the client for a URL, and the key of the file.

    Raises:
        UsageError: the URL or its scheme is invalid.
        ReshardError: its library is not installed.
    """
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    key = key.strip("/")
    if scheme in S3:
        if not bucket:
            raise UsageError(f"cannot open {url}: it names no bucket", code="bad-url")
        from reshard.core.storage.urls.s3.client import S3Client

        return S3Client(bucket), key
    try:
        if scheme in OBSTORE:
            return _object_client(scheme, bucket, stall_seconds()), key
        if scheme == HUB:
            from reshard.core.storage.urls.hub import HubClient

            return HubClient(url), _hub_key(url, rest)
        from reshard.core.storage.urls.filesystems import FileSystemClient, named

        return FileSystemClient(url), named(url)
    except ImportError as error:
        hint = "pip install obstore, or 'reshard[remote]'" if scheme in OBSTORE else ""
        hint = "pip install 'reshard[hf]'" if scheme == HUB else hint
        raise ReshardError(
            f"the library for {scheme}:// is not installed, to open {url}",
            code="library-missing",
            facts=[] if hint else [str(error)],
            hint=hint,
        ) from None
    except ReshardError:
        raise
    except Exception as error:  # of a library, about its settings
        raise UsageError(f"cannot open {url}: {one_line(error)}", code="bad-url", hint=key_hint(url, error)) from None


def _hub_key(url: str, rest: str) -> str:
    """Return the key of a file of the Hub, which begins with its repository."""
    key = rest.removeprefix("models/").strip("/")
    if not REPOSITORY.match(key):
        raise UsageError(
            f"cannot open {url}: it names no repository", code="bad-url",
            hint="such URLs are hf://OWNER/NAME and hf://datasets/OWNER/NAME",
        )  # fmt: skip
    return key


@lru_cache(maxsize=64)
def _object_client(scheme: str, bucket: str, stall: float) -> Client:
    from reshard.core.storage.urls.obstore_client import ObjectClient

    return ObjectClient(scheme, bucket, stall)
