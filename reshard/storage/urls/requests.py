"""Requests to URLs: the one place through which all of them go, whatever fsspec's file system does with them.

A request fails if nothing moves on its connection for `stall_seconds()`. It is then made again, as it is after a broken
connection, a refusal that passes (503), or bytes whose checksum is wrong; `TRIES` times in all. So whatever is asked
here must be harmless to ask twice. Libraries' own retries are switched off if they are known, or one stall would take
tries times tries as long.

Two things watch for a stall. The library's socket times out if no byte moves (`urls.s3` sets that for S3). And here a
request with a bounded answer ends after a time that a working connection never takes (`_longest`), whatever the library
does, if its file system is an asynchronous one, as those of object stores are.

Once the main thread is interrupted, or every run of this process is given up, or the store did not answer in all tries,
nobody wants to wait: requests go on for as long as the store answers another one within `PATIENCE` seconds. So unsent
parts are removed if that can be done, and the process ends soon if it cannot.
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
"""How often a request is made before it has failed."""

PATIENCE = 3.0
"""For how many seconds a store need not answer while nobody wants to wait."""

STALL_VARIABLE = "RESHARD_STALL_SECONDS"
"""The environment variable that says after how many seconds without progress a request has failed."""

_STALL_SECONDS = 30.0
_LOOK_SECONDS = 0.2
_FIRST_DELAY = 1.0  # before the second try; it doubles
_SLOWEST = 1 << 20  # bytes that move in the time of a stall, or a connection is as good as stalled

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
"""Where the libraries look for credentials."""

_NO_BUCKET = re.compile(r"NoSuchBucket|(bucket|container) does not exist", re.IGNORECASE)

# What passes: classes of errors by their library, codes of HTTP and of S3, and the system's.
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


class Call(NamedTuple):
    """A method of a file system that is called with the name of a file and more, or a coroutine function without any.

    Attributes:
        url: of the file.
        method: its name, or the function.
        arguments: what follows the file's name.
        options: the keyword arguments.
        nbytes: how many bytes are sent or answered, but for small things; None if the answer may take any time, such as
            that of a listing in many parts.
    """

    url: str
    method: str | Callable[[], Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    nbytes: int | None


class StalledError(TimeoutError):
    """A request was given up here."""


class _Store:
    """What is known of a store: when it last answered, and when it last did not in all tries."""

    def __init__(self) -> None:
        self.answered = self.failed = float("-inf")


_STORES: defaultdict[str, _Store] = defaultdict(_Store)
"""By the beginning of URLs up to the bucket."""


class _Hurry:
    """Since when nobody wants to wait; None if somebody does."""

    since: float | None = None


def stall_seconds() -> float:
    """Return after how many seconds without progress a request has failed.

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
    """Return fsspec's file system for a URL, and the file's name there.

    Raises:
        UsageError: there is no such kind of URL.
        ReshardError: its library is not installed.
    """
    from fsspec.core import url_to_fs  # 40 ms, for URLs only

    scheme = url.partition("://")[0]
    try:
        if scheme in {"s3", "s3a"}:
            from reshard.storage.urls.s3 import options

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
def telling(url: str, what: str, kind: type[ReshardError] = SourceError) -> Iterator[None]:
    """Turn whatever a file system raises into one sentence; each library has errors of its own."""
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
        message = f"{url} cannot be {what}: {_one_line(error)}"
        if hint := _key_hint(url, error):
            raise kind(message, code="no-access", hint=hint) from error
        raise kind(message, code="store-error") from error


def lacking_bucket(url: str, error: Exception) -> str:
    """Return that a bucket does not exist, if a file system's error says so; else nothing."""
    scheme, _, name = url.partition("://")
    is_said = _NO_BUCKET.search(f"{error} {error.__cause__}")
    return f"the bucket {scheme}://{name.partition('/')[0]} does not exist" if is_said else ""


def _one_line(error: BaseException) -> str:
    """Return what a library says, on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _key_hint(url: str, error: Exception) -> str:
    """Return where a library looks for credentials, if it seems to lack them; else nothing."""
    places = _CREDENTIALS.get(url.partition("://")[0], "")
    lacks = isinstance(error, PermissionError) or re.search("credential|anonymous", str(error), re.IGNORECASE)
    return f"credentials are looked for in {places}" if places and lacks else ""


def ask(
    url: str,
    what: str,
    method: str | Callable[[], Any],
    *arguments: Any,
    kind: type[ReshardError] = SourceError,
    nbytes: int | None = 0,
    **options: Any,
) -> Any:
    """Return what a file system answers to one call; see `Call` and `ask_each`."""
    return ask_each(what, [Call(url, method, arguments, options, nbytes)], kind)[0]


def ask_each(what: str, calls: Sequence[Call], kind: type[ReshardError] = SourceError) -> list[Any]:
    """Return what a file system answers to each of some calls, which are under way at once.

    Args:
        what: is done to the files, for messages.
        calls: to one file system, each harmless to repeat.
        kind: of the error.

    Raises:
        UnansweredError, UnsentError: no try succeeded, and a later one may; for SourceError and TargetError.
        ReshardError: of this kind; another try would fail as well.
    """
    store = _STORES["/".join(calls[0].url.split("/", 3)[:3])]
    with telling(calls[0].url, what, kind):
        fs, _ = filesystem(calls[0].url)
        prepared = [_prepared(fs, call) for call in calls]
    answers: list[Any] = [None] * len(calls)
    left = list(range(len(calls)))
    for number in range(1, TRIES + 1):
        ends = time.monotonic() + _longest([calls[index] for index in left])
        outcomes = _outcomes(fs, [prepared[index] for index in left], ends, store)
        errors: dict[int, BaseException] = {}
        for index, outcome in zip(left, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                errors[index] = outcome
            else:
                answers[index] = outcome
        lasting = [index for index, error in errors.items() if not passes(error)]
        if lasting or len(errors) < len(left):
            store.answered = time.monotonic()
        if lasting:
            with telling(calls[lasting[0]].url, what, kind):
                raise errors[lasting[0]]
        if not errors:
            break
        left = list(errors)
        if number == TRIES or not _wait(number, store):
            store.failed = time.monotonic()
            error = errors[left[0]]
            raise _failed(calls[left[0]].url, what, kind, error, number) from error
    return answers


def _failed(url: str, what: str, kind: type[ReshardError], error: BaseException, tries: int) -> ReshardError:
    """Return the error of a request that failed in every try."""
    kind = {SourceError: UnansweredError, TargetError: UnsentError}.get(kind, kind)
    reason = f"the store sent nothing for {stall_seconds():g} s" if _is_timeout(error) else _one_line(error)
    times = f", {tries} times" if tries > 1 else ""
    return kind(
        f"{url} cannot be {what}: {reason}{times}",
        code="store-not-answering",
        hint="check the connection, then type the same command again",
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what it came from."""
    for _ in range(8):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def _is_timeout(error: BaseException) -> bool:
    return any(isinstance(each, TimeoutError) or "Timeout" in type(each).__name__ for each in _causes(error))


def passes(error: BaseException) -> bool:
    """Return whether a request that failed so may succeed the next time."""
    for each in _causes(error):
        if isinstance(each, TimeoutError | ConnectionError):
            return True
        if {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(each).__mro__} & _PASSING_CLASSES:
            return True
        if isinstance(each, OSError) and each.errno in _PASSING_NUMBERS:
            return True
        response = getattr(each, "response", None)  # of botocore
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            if {str(response.get("Error", {}).get("Code")), str(status)} & _PASSING_CODES:
                return True
        if {str(getattr(each, name, "")) for name in ("code", "status", "status_code")} & _PASSING_CODES:
            return True
    return False


def _prepared(fs: Any, call: Call) -> Callable[[], Any]:
    """Return a call without its arguments; of an asynchronous file system, one that returns a coroutine."""
    if not isinstance(call.method, str):
        return call.method
    method = getattr(fs, f"_{call.method}" if fs.async_impl else call.method)
    return partial(method, filesystem(call.url)[1], *call.arguments, **call.options)


def _outcomes(fs: Any, calls: Sequence[Callable[[], Any]], ends: float, store: _Store) -> list[Any]:
    """Return what comes of some calls that are under way at once: answers, or errors."""
    if not fs.async_impl:
        return [_outcome(call) for call in calls]
    import asyncio  # slow, and fsspec's for such file systems

    async def every() -> list[Any]:
        return await asyncio.gather(*(call() for call in calls), return_exceptions=True)

    interrupted()  # threads that are not the main one ask for what it finds here
    future = asyncio.run_coroutine_threadsafe(every(), fs.loop)
    try:
        while True:
            try:
                return future.result(timeout=_LOOK_SECONDS)
            except TimeoutError:
                if time.monotonic() > min(ends, _deadline(store)):
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


def _longest(calls: Sequence[Call]) -> float:
    """Return how many seconds some calls may take in all: at a rate that no working connection has."""
    if any(call.nbytes is None for call in calls):
        return float("inf")
    return stall_seconds() * (2 + sum(call.nbytes or 0 for call in calls) / _SLOWEST)


def _deadline(store: _Store) -> float:
    """Return until when a store must answer something; never, if somebody wants to wait."""
    now = time.monotonic()
    is_dead = store.failed > store.answered and now < store.failed + stall_seconds()
    if not (is_dead or interrupted() or live_runs.are_given_up()):
        _Hurry.since = None
        return float("inf")
    since = _Hurry.since = _Hurry.since or now
    return max(since, store.answered) + PATIENCE


def _wait(number: int, store: _Store) -> bool:
    """Wait before the next try, longer each time; return False if it comes too late."""
    delay = min(_FIRST_DELAY * 2 ** (number - 1), stall_seconds()) * random.uniform(0.5, 1)  # noqa: S311 -- no secret
    ends = time.monotonic() + delay
    while (now := time.monotonic()) < ends:
        if ends > _deadline(store):
            return False
        time.sleep(min(_LOOK_SECONDS, ends - now))
    return True
