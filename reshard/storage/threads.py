"""Work on several threads that an interrupt neither locks up nor leaves behind.

Python raises KeyboardInterrupt in the main thread between any two instructions, also where `threading` has just taken
a lock and does not yet see to it that it is given back (https://github.com/python/cpython/issues/74174). Threads that
want that lock then wait for ever, and so does who waits for them. So the main thread neither feeds a pool nor waits for
one: another thread does, which interrupts do not reach, and the main thread waits at a queue without such a lock.
"""

from __future__ import annotations

import sys
import threading
from _thread import start_new_thread
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from reshard.errors import ReshardError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")
R = TypeVar("R")

_END = object()
"""What the work reports last."""


class _Done(NamedTuple):
    """How the work ended."""

    result: Any = None
    error: BaseException | None = None


class _GivenUpError(Exception):
    """Raised in work that nobody wants any more."""


def uninterrupted(
    work: Callable[[Callable[[T], None]], R], on_event: Callable[[T], None], give_up: Callable[[], object]
) -> R:
    """Do work that waits for threads where no interrupt reaches it; what is raised here ends it first.

    Args:
        work: what to do. It gets a function to report something with, which waits until that is done, and raises where
            the work is given up.
        on_event: called here with each thing that the work reports.
        give_up: called where this is interrupted, or `on_event` raises, to have the work end soon. That is waited for,
            whatever interrupts come meanwhile. (Outside the main thread, `on_event` raises in the work itself.)

    Returns:
        what the work returns; what it raises is raised.
    """
    if threading.current_thread() is not threading.main_thread():
        return work(on_event)  # interrupts are the main thread's
    interrupted()
    calls: SimpleQueue[Any] = SimpleQueue()
    answers: SimpleQueue[bool] = SimpleQueue()
    done: list[_Done] = []  # not in the queue: an interrupt may take what that has just given
    may_begin = [True]  # taken by the work, or where it is given up before it begins

    def report(value: T) -> None:
        calls.put(value)
        if not answers.get():
            raise _GivenUpError

    def body() -> None:
        if not _take(may_begin):
            return
        try:
            done.append(_Done(work(report)))
        except BaseException as error:  # it is raised where the result is wanted
            done.append(_Done(error=error))
        calls.put(_END)

    def start(starting: Callable[[], object]) -> None:
        try:
            starting()
        except (RuntimeError, MemoryError) as error:
            done.append(_Done(error=error))
            calls.put(_END)

    thread = threading.Thread(target=body, name="reshard", daemon=False)
    try:
        start(lambda: start_new_thread(start, (thread.start,)))  # to start a thread is to wait for it, too
        while (call := calls.get()) is not _END:
            on_event(call)
            answers.put(True)
    except BaseException:
        interrupted()  # the threads see it
        answers.put(False)
        try:
            give_up()
        finally:
            while not (done or _take(may_begin)):
                with suppress(KeyboardInterrupt):
                    calls.get()
                    answers.put(False)
        raise
    ended = done.pop()
    try:
        if ended.error is not None:
            raise ended.error
        result: R = ended.result
        return result
    finally:
        del ended  # an error that is held by what raised it would keep all that has to do with it


class _Interrupt:
    """Whether the main thread was interrupted, as it last found."""

    is_handled = False


def interrupted() -> bool:
    """Return whether the main thread is cleaning up after an interrupt; other threads get what it last found."""
    if threading.current_thread() is threading.main_thread():
        error = sys.exception()
        while error is not None and not isinstance(error, KeyboardInterrupt):
            error = error.__context__
        _Interrupt.is_handled = error is not None
    return _Interrupt.is_handled


def _take(some: list[bool]) -> bool:
    """Take what only one may have; False where it is gone."""
    with suppress(IndexError):
        return some.pop()
    return False


def run_threads(function: Callable[[T], R], items: Sequence[T], threads: int, on_event: Callable[[R], None]) -> None:
    """Call a function with each item on some threads, and `on_event` here with each result, in the order of the items.

    Whatever the function or `on_event` raises is raised; of what is not begun by then, nothing is.
    """
    if not items:
        return
    given_up = False

    def one(item: T) -> R:
        if given_up:
            raise _GivenUpError
        return function(item)

    def work(report: Callable[[R], None]) -> None:
        pool = ThreadPoolExecutor(threads, thread_name_prefix="reshard")
        try:
            for result in pool.map(one, items):
                report(result)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def give_up() -> None:
        nonlocal given_up
        given_up = True

    uninterrupted(work, on_event, give_up)


def map_threads(function: Callable[[T], R], items: Sequence[T], threads: int) -> list[R]:
    """Return what a function makes of each item, on some threads."""
    found: list[R] = []
    run_threads(function, items, threads, found.append)
    return found


class LiveRuns:
    """The tasks of this process that write, by run, and the runs that are given up."""

    def __init__(self) -> None:
        self.tasks: Counter[str] = Counter()
        self.stopped: set[str] = set()
        self._lock = threading.Lock()

    def add(self, run: str, number: int) -> None:
        """Count tasks of a run."""
        with self._lock:
            self.tasks[run] += number

    def check_cancelled(self, run: str) -> None:
        """Raise if a run is cancelled; a task that writes large files takes long."""
        if run in self.stopped:
            raise ReshardError("the run was cancelled", code="cancelled")

    def are_given_up(self) -> bool:
        """Return whether tasks are at work, all of them for runs that are given up."""
        with self._lock:
            runs = [run for run, number in self.tasks.items() if number]
        return bool(runs) and self.stopped.issuperset(runs)


live_runs = LiveRuns()
