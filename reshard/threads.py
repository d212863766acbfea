"""Work on several threads that an interrupt neither locks up nor leaves behind.

Python raises KeyboardInterrupt in the main thread between any two instructions, also where `threading` has just taken
a lock and does not yet see to it that it is given back (https://github.com/python/cpython/issues/74174). Threads that
want that lock then wait for ever, and so does who waits for them. So the main thread neither feeds a pool nor waits for
one: another thread does, which interrupts do not reach, and the main thread waits at a queue that has no such gap.
"""

from __future__ import annotations

import threading
from _thread import start_new_thread
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")
R = TypeVar("R")


class _Said(NamedTuple):
    """What the work tells, while it is done."""

    value: Any


class _Done(NamedTuple):
    """How the work ended."""

    result: Any = None
    error: BaseException | None = None


class _GivenUpError(Exception):
    """Raised in work that nobody wants any more."""


def shielded(work: Callable[[Callable[[T], None]], R], told: Callable[[T], None], give_up: Callable[[], object]) -> R:
    """Do work that waits for threads where no interrupt reaches it; what is raised here ends it first.

    Args:
        work: what to do. It gets a function to tell something with, which waits until that is told, and raises where
            the work is given up.
        told: called here with each thing that the work tells.
        give_up: called where this is interrupted, or `told` raises: to have the work end soon. It is waited for.

    Returns:
        what the work returns; what it raises is raised.
    """
    if threading.current_thread() is not threading.main_thread():
        return work(told)  # interrupts are the main thread's
    calls: SimpleQueue[_Said | _Done] = SimpleQueue()
    answers: SimpleQueue[bool] = SimpleQueue()

    def tell(value: T) -> None:
        calls.put(_Said(value))
        if not answers.get():
            raise _GivenUpError

    def body() -> None:
        try:
            calls.put(_Done(work(tell)))
        except BaseException as error:
            calls.put(_Done(error=error))

    def begin() -> None:  # to start a thread is to wait for it, too
        try:
            threading.Thread(target=body, name="reshard", daemon=False).start()
        except RuntimeError as error:
            calls.put(_Done(error=error))

    try:
        try:
            start_new_thread(begin, ())
        except RuntimeError as error:
            calls.put(_Done(error=error))
        while isinstance(call := calls.get(), _Said):
            told(call.value)
            answers.put(True)
    except BaseException:
        give_up()
        answers.put(False)
        while isinstance(calls.get(), _Said):
            answers.put(False)
        raise
    if call.error is not None:
        raise call.error
    result: R = call.result
    return result


def each(function: Callable[[T], R], items: Sequence[T], threads: int, told: Callable[[R], None]) -> None:
    """Call a function with each item on some threads, and `told` here with each result, in the order of the items.

    Whatever the function or `told` raises is raised; of what is not begun by then, nothing is.
    """
    given_up = False

    def one(item: T) -> R:
        if given_up:
            raise _GivenUpError
        return function(item)

    def work(tell: Callable[[R], None]) -> None:
        pool = ThreadPoolExecutor(threads, thread_name_prefix="reshard")
        try:
            for result in pool.map(one, items):
                tell(result)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def give_up() -> None:
        nonlocal given_up
        given_up = True

    shielded(work, told, give_up)


def results(function: Callable[[T], R], items: Sequence[T], threads: int) -> list[R]:
    """Return what a function makes of each item, on some threads."""
    found: list[R] = []
    each(function, items, threads, found.append)
    return found
