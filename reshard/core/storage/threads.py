"""Run work on several threads so that an interrupt neither deadlocks nor leaks it.

Python raises KeyboardInterrupt in the main thread between any two instructions, even if `threading` has just taken a
lock and not yet entered the block that releases it (https://github.com/python/cpython/issues/74174). Threads that need
that lock then wait forever, and so do their callers. So the main thread neither feeds a pool nor waits for one: another
thread does, which interrupts do not reach, and the main thread waits at a queue without such a lock.
"""

from __future__ import annotations

import os
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
    from collections.abc import Callable, Iterable, Sequence

T = TypeVar("T")
R = TypeVar("R")

_END = object()
"""The last value that the work reports."""


class _Done(NamedTuple):
    """The outcome of the work."""

    result: Any = None
    error: BaseException | None = None


class _CancelledError(Exception):
    """Raised inside cancelled work."""


def processor_count() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def uninterrupted(
    work: Callable[[Callable[[T], None]], R], on_event: Callable[[T], None], cancel: Callable[[], object]
) -> R:
    """Run `work` shielded from KeyboardInterrupt; on an error here, cancel it and wait.

    Args:
        work: the function to run. Its argument is a function that reports a value: it returns after `on_event` has
            handled the value, and raises if the work is cancelled.
        on_event: called in this thread with each value that the work reports.
        cancel: called on an interrupt, or if `on_event` raises, to make the work end soon. Its end is awaited despite
            further interrupts. (Outside the main thread, `on_event` raises in the work itself.)

    Returns:
        the result of the work; its exceptions propagate.
    """
    if threading.current_thread() is not threading.main_thread():
        return work(on_event)  # interrupts are the main thread's
    interrupted()
    calls: SimpleQueue[Any] = SimpleQueue()
    answers: SimpleQueue[bool] = SimpleQueue()
    done: list[_Done] = []  # not in the queue: an interrupt may lose an item just taken from it
    may_begin = [True]  # taken by the work, or by a cancellation before the work begins

    def report(value: T) -> None:
        calls.put(value)
        if not answers.get():
            raise _CancelledError

    def body() -> None:
        if not _take(may_begin):
            return
        try:
            done.append(_Done(work(report)))
        except BaseException as error:  # raised in the calling thread
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
        start(lambda: start_new_thread(start, (thread.start,)))  # starting a thread waits for it, too
        while (call := calls.get()) is not _END:
            on_event(call)
            answers.put(True)
    except BaseException:
        interrupted()  # the threads see it
        answers.put(False)
        try:
            cancel()
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
        del ended  # a reference cycle of an error and its frame would keep all their objects alive


class _Interrupt:
    """The last result of `interrupted` in the main thread."""

    is_handled = False


def interrupted() -> bool:
    """Return whether the main thread is handling an interrupt.

    Other threads get its last result.
    """
    if threading.current_thread() is threading.main_thread():
        error = sys.exception()
        while error is not None and not isinstance(error, KeyboardInterrupt):
            error = error.__context__
        _Interrupt.is_handled = error is not None
    return _Interrupt.is_handled


def _take(token: list[bool]) -> bool:
    """Take a token that only one thread may have; return False if it is taken."""
    with suppress(IndexError):
        return token.pop()
    return False


def map_ordered(
    function: Callable[[T], R], items: Sequence[T], workers: int, on_result: Callable[[R], None] | None = None
) -> Iterable[R]:
    """Call a function with each item on several threads, and return the results in the order of the items.

    Exceptions propagate, and items not begun by then are skipped.

    Args:
        function: the function.
        items: its arguments.
        workers: the number of threads; 0 calls the function in this thread, each time when a result is needed; at least
            1 with `on_result`.
        on_result: called in this thread with each result as soon as possible; then nothing is returned.
    """
    if not workers and on_result is None:
        return map(function, items)
    results: list[R] = []
    if not items:
        return results
    is_cancelled = False

    def call(item: T) -> R:
        if is_cancelled:
            raise _CancelledError
        return function(item)

    def work(report: Callable[[R], None]) -> None:
        pool = ThreadPoolExecutor(workers, thread_name_prefix="reshard")
        try:
            for result in pool.map(call, items):
                report(result)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def cancel() -> None:
        nonlocal is_cancelled
        is_cancelled = True

    uninterrupted(work, on_result or results.append, cancel)
    return results


class LiveRuns:
    """The number of writing tasks of this process by run, and the cancelled runs."""

    def __init__(self) -> None:
        self.tasks: Counter[str] = Counter()
        self.stopped: set[str] = set()
        self._lock = threading.Lock()

    def add(self, run: str, number: int) -> None:
        """Add to the number of tasks of a run."""
        with self._lock:
            self.tasks[run] += number

    def check_cancelled(self, run: str) -> None:
        """Raise if a run is cancelled; tasks call it often, since they may take long."""
        if run in self.stopped:
            raise ReshardError("the run was cancelled", code="cancelled")

    def are_cancelled(self) -> bool:
        """Return whether there are active tasks, all of cancelled runs."""
        with self._lock:
            runs = [run for run, number in self.tasks.items() if number]
        return bool(runs) and self.stopped.issuperset(runs)


live_runs = LiveRuns()
