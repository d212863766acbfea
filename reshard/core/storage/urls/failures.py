"""Errors of stores: which pass, what they mean, and how long to wait for progress."""

from __future__ import annotations

import errno
import os
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

from reshard.environment import STALL_SECONDS
from reshard.errors import (
    GoneError,
    NoBucketError,
    ReshardError,
    SourceError,
    TargetError,
    UnansweredError,
    UnsentError,
    UsageError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


_STALL_SECONDS = 30.0

_AWS = (
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws (AWS_PROFILE names a profile there), and, with botocore "
    "installed, the role of this machine or container; AWS_SKIP_SIGNATURE=true reads public buckets"
)
_GOOGLE = "GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth application-default login`, and this machine's service account"
_AZURE = "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, and `az login`"
_HUB = "HF_TOKEN, and what `hf auth login` wrote"
_CREDENTIALS = {
    "hf": _HUB,
    "s3": _AWS, "s3a": _AWS, "gs": _GOOGLE, "gcs": _GOOGLE, "az": _AZURE, "abfs": _AZURE, "abfss": _AZURE,
}  # fmt: skip
"""The sources of credentials that the clients use, by scheme."""

_KIND = "(?:models|datasets|spaces|buckets)/"
REPOSITORY = re.compile(rf"((?:{_KIND})?(?!{_KIND})[^/@]+/[^/@]+)(?:@(refs/[^/]+/[^/]+|(?!refs(?:/|$))[^/]+))?(?=/|$)")
"""A repository of the Hub, and its revision."""

_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|(bucket|container) does not exist", re.IGNORECASE)
_REFUSED = re.compile(r"credential|anonymous|access ?denied|forbidden|unauthori[sz]ed", re.IGNORECASE)

# Temporary errors: classes by library, codes of HTTP and of S3, and error numbers of the system.
_PASSING_CLASSES = {"http.HTTPException", "aiohttp.ClientError", "fsspec.FSTimeoutError", "obstore.GenericError",
    "httpx.TransportError", "httpx2.TransportError", "requests.ConnectionError", "requests.Timeout",
    "ssl.SSLEOFError", "ssl.SSLZeroReturnError",
}  # fmt: skip
_PASSING_CODES = {
    "BadDigest", "ExpiredToken", "IncompleteBody", "InternalError", "RequestTimeout", "ServiceUnavailable", "SlowDown",
    "Throttling", "XAmzContentChecksumMismatch", "408", "429", "500", "502", "503", "504",
}  # fmt: skip
_PASSING_NUMBERS = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN}
_LASTING = re.compile(r"dns error|certificate|builder error|status code: 4(?!08|29)", re.IGNORECASE)


class StalledError(TimeoutError):
    """A request that made no progress and was ended here."""


class NoRepositoryError(OSError):
    """The Hub has no such repository, or not for this user."""

    hint = "log in with `hf auth login` if it is private; `hf repos create OWNER/NAME` makes one"


class NoRevisionError(NoRepositoryError):
    """A repository of the Hub has no such revision."""

    hint = "name a branch, a tag or a commit of it after @; without @ it is main"


class StoreError(OSError):
    """The response of a store that refuses a request.

    Attributes:
        code: the code of the store, such as `AccessDenied`.
        status: the HTTP status.
    """

    def __init__(self, code: str, message: str, status: int) -> None:
        super().__init__(f"{code}: {message}" if message and message != code else code)
        self.code, self.status = code, status


def stall_seconds() -> float:
    """Return the seconds without progress after which a request fails.

    Raises:
        UsageError: the environment variable is not a positive number.
    """
    text = os.environ.get(STALL_SECONDS, "")
    try:
        seconds = float(text or _STALL_SECONDS)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise UsageError(
            f"{STALL_SECONDS} is {text!r} in the environment; expected seconds, such as 30", code="bad-value"
        )
    return seconds


@contextmanager
def translating(url: str, action: str, kind: type[ReshardError] = SourceError) -> Iterator[None]:
    """Turn any exception of a client into a `ReshardError` with a one-line message."""
    try:
        yield
    except ReshardError:
        raise
    except Exception as error:
        lacking = lacking_bucket(url, error)
        if lacking or isinstance(error, FileNotFoundError | NotADirectoryError):
            kind = GoneError if kind is SourceError else kind
            if lacking:
                kind = NoBucketError if kind is TargetError else kind
                hint = error.hint if isinstance(error, NoRepositoryError) else ""
                raise kind(lacking, code="no-such-bucket", hint=hint) from None
            raise kind(f"{url} does not exist", code="not-found") from None
        message = f"{url} cannot be {action}: {one_line(error)}"
        if hint := key_hint(url, error):
            raise kind(message, code="no-access", hint=hint) from error
        raise kind(message, code="store-error") from error


def lacking_bucket(url: str, error: Exception) -> str:
    """Return a message that a bucket does not exist if a client's error says so, else ""."""
    scheme, _, name = url.partition("://")
    if (repository := REPOSITORY.match(name)) and isinstance(error, NoRepositoryError):
        where = f"{scheme}://{repository[1]}"
        lacks_revision = isinstance(error, NoRevisionError)
        return f"{where} has no revision {repository[2] or 'main'}" if lacks_revision else f"no repository {where}"
    match = _NO_BUCKET.search(f"{error} {error.__cause__}")
    return f"the bucket {scheme}://{name.partition('/')[0]} does not exist" if match else ""


def one_line(error: BaseException) -> str:
    """Return the message of an error on one line, or else its class name."""
    text = str(error).partition("\n\nDebug source:")[0]  # obstore adds the structure of its error
    return " ".join(text.split()) or type(error).__name__


def key_hint(url: str, error: Exception) -> str:
    """Return a hint on credentials if they seem to be missing or insufficient, else ""."""
    sources = _CREDENTIALS.get(url.partition("://")[0], "")
    lacks = isinstance(error, PermissionError) or _REFUSED.search(f"{type(error).__name__} {error}")
    return f"credentials are looked for in {sources}" if sources and lacks else ""


def failed(url: str, action: str, kind: type[ReshardError], error: BaseException, tries: int) -> ReshardError:
    """Return an error for a request that failed in all tries."""
    kind = {SourceError: UnansweredError, TargetError: UnsentError}.get(kind, kind)
    reason = f"the store sent nothing for {stall_seconds():g} s" if _is_timeout(error) else one_line(error)
    times = f", {tries} times" if tries > 1 else ""
    return kind(
        f"{url} cannot be {action}: {reason}{times}",
        code="store-not-answering",
        hint="check the connection, then type the same command again",
    )


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its chain of causes."""
    for _ in range(8):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def _is_timeout(error: BaseException) -> bool:
    return any(isinstance(cause, TimeoutError) or "Timeout" in type(cause).__name__ for cause in causes(error))


def passes(error: BaseException) -> bool:
    """Return whether an error is temporary, so that a retry may succeed."""
    for cause in causes(error):
        if isinstance(cause, TimeoutError | ConnectionError):
            return True
        if {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(cause).__mro__} & _PASSING_CLASSES:
            return not _LASTING.search(str(cause))
        if isinstance(cause, OSError) and cause.errno in _PASSING_NUMBERS:
            return True
        if {str(getattr(cause, name, "")) for name in ("code", "status", "status_code")} & _PASSING_CODES:
            return True
    return False
