"""Requests on threads of their own, made again until they succeed.

A request that fails for a passing reason (a stall, a broken connection, a temporary refusal, a wrong checksum) is made
again, `TRIES` times in all, so all requests must be idempotent. Known retries of the libraries are switched off, or a
stall would be waited for `TRIES` times more often.

After an interrupt of the main thread, or if all runs of this process are cancelled, or if the store failed to respond
in all tries, waits are cut short: requests continue only while the store responds to some request within `PATIENCE`
seconds. So unsent parts are removed if possible, and the process ends soon if not. The threads are daemons, since a
library may keep one of them waiting for ever.
"""

from __future__ import annotations

import os
import random
import threading
import time
from _thread import start_new_thread
from collections import defaultdict
from contextlib import suppress
from queue import Empty, SimpleQueue
from socket import SHUT_RDWR
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from reshard.core.storage.threads import interrupted, live_runs
from reshard.core.storage.urls.failures import StalledError, failed, passes, stall_seconds, translating
from reshard.errors import ReshardError, SourceError
from reshard.messages import log

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")

TRIES = 5
"""The number of tries before a request fails."""

PATIENCE = 3.0
"""The seconds to wait for any response of a store when waits are cut short."""

MOST_REQUESTS = 48
"""The number of requests of this process that are in flight at most."""

_LOOK_SECONDS = 0.2
_FIRST_DELAY = 1.0  # before the second try; it doubles
_SLOWEST = 1 << 20  # a library that moves fewer bytes in the time of a stall counts as stalled


class Attempt:
    """The work of one thread for a request.

    Attributes:
        connections: the connections that it uses now, so that another thread can break them.
        is_given_up: nobody waits for it, and its buffer may be in use for something else.
    """

    def __init__(self) -> None:
        self.connections: list[Any] = []
        self.is_given_up = False

    def check_wanted(self) -> None:
        """Raise an error if it was given up: it must not write into its buffer any more."""
        if self.is_given_up:
            raise StalledError


class _Current(threading.local):
    """The attempt of this thread; outside of requests, one that nobody gives up."""

    def __init__(self) -> None:
        self.attempt = Attempt()


_current = _Current()


def attempt() -> Attempt:
    """Return the attempt of this thread."""
    return _current.attempt


class _Responses:
    """When a store last responded, and when it last failed to respond in all tries."""

    def __init__(self) -> None:
        self.answered = self.failed = float("-inf")


_RESPONSES: defaultdict[str, _Responses] = defaultdict(_Responses)
"""The stores by URL prefix, up to the bucket."""


class _Hurry:
    """Since when waits are cut short; None if they are not."""

    since: float | None = None


class _RequestThreads:
    """Threads that make requests; each starts when there is work for it."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.unstarted = [None] * MOST_REQUESTS  # a token for each thread; a list, because its `pop` needs no lock
        self._idle: list[None] = []

    def start(self, job: Callable[[], None]) -> None:
        """Do a job on a thread as soon as one is free."""
        self._jobs.put(job)
        with suppress(IndexError):
            self._idle.pop()  # a thread that waits for a job
            return
        with suppress(IndexError):
            self.unstarted.pop()
            start_new_thread(self._work, ())

    def _work(self) -> None:
        job = self._jobs.get()  # not as an idle thread: the job that it was started for may be done by another
        while True:
            job()
            del job  # it holds buffers
            try:
                job = self._jobs.get_nowait()
            except Empty:
                self._idle.append(None)
                job = self._jobs.get()


_threads = _RequestThreads()
os.register_at_fork(after_in_child=_threads.__init__)  # type: ignore[misc]  # a copy of the process has no threads


class StoreRequest(Generic[T]):
    """A request that is made on another thread until it succeeds.

    Args:
        url: the URL that it is about.
        action: the action on the file, a participle, for messages.
        call: makes the request once; idempotent.
        kind: the class of errors.
        nbytes: the number of bytes sent or received, apart from small messages; None if the response may take any time,
            such as a listing in many parts.
    """

    def __init__(
        self,
        url: str,
        action: str,
        call: Callable[[], T],
        kind: type[ReshardError] = SourceError,
        nbytes: int | None = 0,
    ) -> None:
        self._url, self._action, self._call, self._kind = url, action, call, kind
        self._longest = float("inf") if nbytes is None else stall_seconds() * (2 + nbytes / _SLOWEST)
        self._responses = _RESPONSES["/".join(url.split("/", 3)[:3])]
        self._answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._turn = self._tries = 0
        self._began = float("inf")
        self._attempt = Attempt()
        self._job(0)

    def _job(self, turn: int) -> None:
        _threads.start(lambda: self._make(turn))

    def _make(self, turn: int) -> None:
        """Make the request, again if it fails for a passing reason; on a thread of its own."""
        self._attempt = _current.attempt = Attempt()
        while turn == self._turn:
            self._began = time.monotonic()
            error: BaseException | None = None
            result = None
            try:
                result = self._call()
            except BaseException as caught:  # raised in the thread that waits
                error = caught
            if turn != self._turn:
                return  # it was given up
            self._began = float("inf")
            if error is not None and passes(error):
                self._tries += 1
                if self._tries < TRIES and self._pause():
                    log().warning("%s: tried again (%d of %d): %r", self._url, self._tries + 1, TRIES, error)
                    continue
                if turn != self._turn:
                    return  # the store did not fail
                self._responses.failed = time.monotonic()
            else:
                self._responses.answered = time.monotonic()
            self._answers.put((result, error))
            return

    def result(self) -> T:
        """Wait for the response and return its result.

        Raises:
            UnansweredError, UnsentError: all tries failed, but a later one may succeed; for SourceError and
                TargetError.
            ReshardError: of the given class: a lasting error.
        """
        interrupted()  # other threads use the main thread's last result
        while True:
            try:
                result, error = self._answers.get(timeout=_LOOK_SECONDS)
            except Empty:
                now = time.monotonic()
                if now > _deadline(self._responses):
                    self.give_up()
                    self._tries += 1
                    self._responses.failed = now
                    result, error = None, StalledError()
                elif now - self._began > self._longest:  # only a library that has no timeout of its own
                    self._lose()
                    continue
                else:
                    continue
            break
        if error is None:
            return result  # type: ignore[no-any-return]  # of type T
        if passes(error):
            raise failed(self._url, self._action, self._kind, error, max(self._tries, 1)) from error
        with translating(self._url, self._action, self._kind):
            raise error

    def give_up(self) -> None:
        """Cancel the request; its result is ignored."""
        self._turn += 1
        self._attempt.is_given_up = True
        for connection in [*self._attempt.connections]:
            with suppress(OSError, AttributeError):
                connection.sock.shutdown(SHUT_RDWR)  # the thread that waits for it gets an error

    def _lose(self) -> None:
        """Leave a thread that waits for ever, and make the request again on another."""
        self.give_up()
        _threads.unstarted.append(None)
        self._tries += 1
        self._began = float("inf")
        if self._tries < TRIES and self._pause():
            if self._answers.empty():  # otherwise it succeeded in the meantime
                log().warning("%s: tried again (%d of %d): no answer", self._url, self._tries + 1, TRIES)
                self._job(self._turn)
        else:
            self._responses.failed = time.monotonic()
            self._answers.put((None, StalledError()))

    def _pause(self) -> bool:
        """Wait before the next try, longer each time; return False if it would be too late."""
        turn = self._turn
        delay = min(_FIRST_DELAY * 2 ** (self._tries - 1), stall_seconds())
        ends = time.monotonic() + delay * random.uniform(0.5, 1)  # noqa: S311 -- no secret
        while (now := time.monotonic()) < ends:
            if ends > _deadline(self._responses) or turn != self._turn:
                return False
            time.sleep(min(_LOOK_SECONDS, ends - now))
        return True


def ask(
    url: str, action: str, call: Callable[[], T], kind: type[ReshardError] = SourceError, nbytes: int | None = 0
) -> T:
    """Make one request and return its result; see `StoreRequest`."""
    return StoreRequest(url, action, call, kind, nbytes).result()


def results(requests: Sequence[StoreRequest[T]]) -> list[T]:
    """Return the results of requests in flight; if one fails, give the others up."""
    try:
        return [request.result() for request in requests]
    except BaseException:
        for request in requests:
            request.give_up()
        raise


def _deadline(responses: _Responses) -> float:
    """Return the time by which a store must respond; infinity unless waits are cut short."""
    now = time.monotonic()
    is_dead = responses.failed > responses.answered and now < responses.failed + stall_seconds()
    if not (is_dead or interrupted() or live_runs.are_cancelled()):
        _Hurry.since = None
        return float("inf")
    since = _Hurry.since = _Hurry.since or now
    return max(since, responses.answered) + PATIENCE
