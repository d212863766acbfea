"""Requests to URLs, for all of fsspec's file systems: timeouts and retries.

A request fails if nothing moves on its connection for `stall_seconds()`. It is then retried, as after a broken
connection, a temporary refusal (503), or a wrong checksum; `TRIES` tries in all. So all requests made here must be
idempotent. Known retries of the libraries are switched off, or a stall would be waited for `TRIES` times more often.

Two timeouts detect a stall. The library's socket times out if no byte moves (`urls.s3` sets that for S3). And a request
with a bounded response is ended here after a time that a working connection never needs (`_longest`), independently of
the library, if the file system is asynchronous, as for object stores.

After an interrupt of the main thread, or if all runs of this process are cancelled, or if the store failed to respond
in all tries, waits are cut short: requests continue only while the store responds to some request within `PATIENCE`
seconds. So unsent parts are removed if possible, and the process ends soon if not.
"""

from __future__ import annotations

import errno
import os
import random
import re
import time
from collections import defaultdict
from concurrent.futures import CancelledError
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

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
from reshard.storage.threads import interrupted, live_runs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

TRIES = 5
"""The number of tries before a request fails."""

PATIENCE = 3.0
"""The seconds to wait for any response of a store when waits are cut short."""

STALL_VARIABLE = "RESHARD_STALL_SECONDS"
"""The environment variable for the seconds without progress after which a request fails."""

_STALL_SECONDS = 30.0
_LOOK_SECONDS = 0.2
_FIRST_DELAY = 1.0  # before the second try; it doubles
_SLOWEST = 1 << 20  # a connection that moves fewer bytes in the time of a stall counts as stalled

_LIBRARIES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}

_AWS = (
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws (AWS_PROFILE names a profile there), and the role of this "
    "machine or container"
)
_GOOGLE = "GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth application-default login`, and this machine's service account"
_AZURE = (
    "AZURE_STORAGE_CONNECTION_STRING, and AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or "
    "AZURE_STORAGE_SAS_TOKEN"
)
_CREDENTIALS = {
    "s3": _AWS, "s3a": _AWS, "gs": _GOOGLE, "gcs": _GOOGLE, "az": _AZURE, "abfs": _AZURE, "abfss": _AZURE,
}  # fmt: skip
"""The sources of credentials that the libraries use, by scheme."""

_NO_BUCKET = re.compile(r"NoSuchBucket|(bucket|container) does not exist", re.IGNORECASE)

# Temporary errors: classes by library, codes of HTTP and of S3, and error numbers of the system.
_PASSING_CLASSES = {
    "aiohttp.ClientError", "botocore.ConnectionError", "botocore.HTTPClientError", "botocore.IncompleteReadError",
    "botocore.FlexibleChecksumError", "botocore.ResponseParserError", "botocore.ResponseStreamingError",
    "azure.ServiceRequestError", "azure.ServiceResponseError", "azure.IncompleteReadError", "fsspec.FSTimeoutError",
}  # fmt: skip
_PASSING_CODES = {
    "BadDigest", "IncompleteBody", "InternalError", "RequestTimeout", "ServiceUnavailable", "SlowDown", "Throttling",
    "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch", "408", "429", "500", "502", "503", "504",
}  # fmt: skip
_PASSING_NUMBERS = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN}


class StoreCall(NamedTuple):
    """A call of a file system's method on a file, or of a coroutine function.

    Attributes:
        url: the URL of the file.
        method: the method's name, or the coroutine function, which takes no arguments.
        arguments: the arguments after the file's name.
        options: the keyword arguments.
        nbytes: the number of bytes sent or received, apart from small messages; None if the response may take any time,
            such as a listing in many parts.
    """

    url: str
    method: str | Callable[[], Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    nbytes: int | None


class StalledError(TimeoutError):
    """A request that stalled and was ended here."""


class _Responses:
    """When a store last responded, and when it last failed to respond in all tries."""

    def __init__(self) -> None:
        self.answered = self.failed = float("-inf")


_RESPONSES: defaultdict[str, _Responses] = defaultdict(_Responses)
"""The stores by URL prefix, up to the bucket."""


class _Hurry:
    """Since when waits are cut short; None if they are not."""

    since: float | None = None


def stall_seconds() -> float:
    """Return the seconds without progress after which a request fails.

    Raises:
        UsageError: the environment variable is not a positive number.
    """
    text = os.environ.get(STALL_VARIABLE, "")
    try:
        seconds = float(text or _STALL_SECONDS)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise UsageError(
            f"{STALL_VARIABLE} is {text!r} in the environment; expected seconds, such as 30", code="bad-value"
        )
    return seconds


def filesystem(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the file's name in it.

    Raises:
        UsageError: the URL or its scheme is invalid.
        ReshardError: its library is not installed.
    """
    from fsspec.core import url_to_fs  # 40 ms, for URLs only

    scheme = url.partition("://")[0]
    try:
        if scheme in {"s3", "s3a"}:
            from reshard.storage.urls.s3_clients import options

            fs, name = url_to_fs(url, **options(stall_seconds()))
            fs.retries = 1
        else:
            fs, name = url_to_fs(url)
    except ImportError as error:
        library = _LIBRARIES.get(scheme)
        raise ReshardError(
            f"the library for {scheme}:// is not installed, to open {url}",
            code="library-missing",
            facts=[] if library else [str(error)],
            hint=f"pip install {library}, or 'reshard[remote]'" if library else "",
        ) from None
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(f"cannot open {url}: {_one_line(error)}", code="bad-url", hint=_key_hint(url, error)) from None
    return fs, str(name)


@contextmanager
def translating(url: str, action: str, kind: type[ReshardError] = SourceError) -> Iterator[None]:
    """Turn any exception of a file system into a `ReshardError` with a one-line message."""
    try:
        yield
    except ReshardError:
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        kind = GoneError if kind is SourceError else kind
        if lacking := lacking_bucket(url, error):
            kind = NoBucketError if kind is TargetError else kind
            raise kind(lacking, code="no-such-bucket") from None
        raise kind(f"{url} does not exist", code="not-found") from None
    except Exception as error:
        message = f"{url} cannot be {action}: {_one_line(error)}"
        if hint := _key_hint(url, error):
            raise kind(message, code="no-access", hint=hint) from error
        raise kind(message, code="store-error") from error


def lacking_bucket(url: str, error: Exception) -> str:
    """Return a message that a bucket does not exist if a file system's error says so, else ""."""
    scheme, _, name = url.partition("://")
    match = _NO_BUCKET.search(f"{error} {error.__cause__}")
    return f"the bucket {scheme}://{name.partition('/')[0]} does not exist" if match else ""


def _one_line(error: BaseException) -> str:
    """Return the message of an error on one line, or else its class name."""
    return " ".join(str(error).split()) or type(error).__name__


def _key_hint(url: str, error: Exception) -> str:
    """Return a hint on credentials if the library seems to lack them, else ""."""
    sources = _CREDENTIALS.get(url.partition("://")[0], "")
    lacks = isinstance(error, PermissionError) or re.search("credential|anonymous", str(error), re.IGNORECASE)
    return f"credentials are looked for in {sources}" if sources and lacks else ""


def ask(
    url: str,
    action: str,
    method: str | Callable[[], Any],
    *arguments: Any,
    kind: type[ReshardError] = SourceError,
    nbytes: int | None = 0,
    **options: Any,
) -> Any:
    """Return the result of one call of a file system; see `StoreCall` and `ask_each`."""
    return ask_each(action, [StoreCall(url, method, arguments, options, nbytes)], kind)[0]


def ask_each(action: str, calls: Sequence[StoreCall], kind: type[ReshardError] = SourceError) -> list[Any]:
    """Return the results of concurrent calls of one file system.

    Args:
        action: the action on the files, a participle, for messages.
        calls: the calls, each idempotent.
        kind: the class of errors.

    Raises:
        UnansweredError, UnsentError: all tries failed, but a later one may succeed; for SourceError and TargetError.
        ReshardError: of class `kind`: a lasting error.
    """
    responses = _RESPONSES["/".join(calls[0].url.split("/", 3)[:3])]
    with translating(calls[0].url, action, kind):
        fs, _ = filesystem(calls[0].url)
        prepared = [_prepared(fs, call) for call in calls]
    answers: list[Any] = [None] * len(calls)
    pending = list(range(len(calls)))
    for number in range(1, TRIES + 1):
        ends = time.monotonic() + _longest([calls[index] for index in pending])
        outcomes = _outcomes(fs, [prepared[index] for index in pending], ends, responses)
        errors: dict[int, BaseException] = {}
        for index, outcome in zip(pending, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                errors[index] = outcome
            else:
                answers[index] = outcome
        lasting = [index for index, error in errors.items() if not passes(error)]
        if lasting or len(errors) < len(pending):
            responses.answered = time.monotonic()
        if lasting:
            with translating(calls[lasting[0]].url, action, kind):
                raise errors[lasting[0]]
        if not errors:
            break
        pending = list(errors)
        if number == TRIES or not _wait(number, responses):
            responses.failed = time.monotonic()
            error = errors[pending[0]]
            raise _failed(calls[pending[0]].url, action, kind, error, number) from error
    return answers


def _failed(url: str, action: str, kind: type[ReshardError], error: BaseException, tries: int) -> ReshardError:
    """Return an error for a request that failed in all tries."""
    kind = {SourceError: UnansweredError, TargetError: UnsentError}.get(kind, kind)
    reason = f"the store sent nothing for {stall_seconds():g} s" if _is_timeout(error) else _one_line(error)
    times = f", {tries} times" if tries > 1 else ""
    return kind(
        f"{url} cannot be {action}: {reason}{times}",
        code="store-not-answering",
        hint="check the connection, then type the same command again",
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its chain of causes."""
    for _ in range(8):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def _is_timeout(error: BaseException) -> bool:
    return any(isinstance(cause, TimeoutError) or "Timeout" in type(cause).__name__ for cause in _causes(error))


def passes(error: BaseException) -> bool:
    """Return whether an error is temporary, so that a retry may succeed."""
    for cause in _causes(error):
        if isinstance(cause, TimeoutError | ConnectionError):
            return True
        if {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(cause).__mro__} & _PASSING_CLASSES:
            return True
        if isinstance(cause, OSError) and cause.errno in _PASSING_NUMBERS:
            return True
        response = getattr(cause, "response", None)  # of botocore
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            if {str(response.get("Error", {}).get("Code")), str(status)} & _PASSING_CODES:
                return True
        if {str(getattr(cause, name, "")) for name in ("code", "status", "status_code")} & _PASSING_CODES:
            return True
    return False


def _prepared(fs: Any, call: StoreCall) -> Callable[[], Any]:
    """Bind a call's arguments; the result returns a coroutine if the file system is asynchronous."""
    if not isinstance(call.method, str):
        return call.method
    method = getattr(fs, f"_{call.method}" if fs.async_impl else call.method)
    return partial(method, filesystem(call.url)[1], *call.arguments, **call.options)


def _outcomes(fs: Any, calls: Sequence[Callable[[], Any]], ends: float, responses: _Responses) -> list[Any]:
    """Run calls concurrently and return their results or exceptions."""
    if not fs.async_impl:
        return [_outcome(call) for call in calls]
    import asyncio  # slow, and fsspec's for such file systems

    async def gather() -> list[Any]:
        return await asyncio.gather(*(call() for call in calls), return_exceptions=True)

    interrupted()  # other threads use the main thread's last result
    future = asyncio.run_coroutine_threadsafe(gather(), fs.loop)
    try:
        while True:
            try:
                return future.result(timeout=_LOOK_SECONDS)
            except TimeoutError:
                if time.monotonic() > min(ends, _deadline(responses)):
                    return [StalledError()] * len(calls)
            except CancelledError:
                return [StalledError()] * len(calls)
    finally:
        future.cancel()  # which closes its connections


def _outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return error


def _longest(calls: Sequence[StoreCall]) -> float:
    """Return a time limit for calls, in seconds, at a rate below all working connections."""
    if any(call.nbytes is None for call in calls):
        return float("inf")
    return stall_seconds() * (2 + sum(call.nbytes or 0 for call in calls) / _SLOWEST)


def _deadline(responses: _Responses) -> float:
    """Return the time by which a store must respond; infinity unless waits are cut short."""
    now = time.monotonic()
    is_dead = responses.failed > responses.answered and now < responses.failed + stall_seconds()
    if not (is_dead or interrupted() or live_runs.are_cancelled()):
        _Hurry.since = None
        return float("inf")
    since = _Hurry.since = _Hurry.since or now
    return max(since, responses.answered) + PATIENCE


def _wait(number: int, responses: _Responses) -> bool:
    """Wait before the next try, longer each time; return False if it would be too late."""
    delay = min(_FIRST_DELAY * 2 ** (number - 1), stall_seconds()) * random.uniform(0.5, 1)  # noqa: S311 -- no secret
    ends = time.monotonic() + delay
    while (now := time.monotonic()) < ends:
        if ends > _deadline(responses):
            return False
        time.sleep(min(_LOOK_SECONDS, ends - now))
    return True
