"""Doing tasks that need one thing in common: on threads of this process, or on the workers of a dask cluster.

A run's graph has stages that wait for each other, and goes to a scheduler whole (`graph`). To compare is to do one
function many times, and needs no more than this.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from reshard.errors import ReshardError
from reshard.storage.threads import each, uninterrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

S = TypeVar("S")
T = TypeVar("T")
R = TypeVar("R")


def map_tasks(
    function: Callable[[S, T], R],
    shared: S,
    tasks: Sequence[T],
    *,
    threads: int,
    client: Any = None,
    on_result: Callable[[R], None],
) -> None:
    """Call a function with what is shared and each task; `on_result` gets what comes of it, here.

    Args:
        function: what to do; of a module, since it travels to workers.
        shared: goes to each worker once.
        tasks: what differs.
        threads: how many do it, where no client is given.
        client: a `distributed.Client`.
        on_result: called with each result, in any order.

    Raises:
        ReshardError: what a task raises, or that the cluster failed. What is not begun by then is not done.
    """
    if client is None:
        each(lambda task: function(shared, task), tasks, threads, on_result)
        return
    from distributed import as_completed

    given = client.scatter(shared, hash=False)
    futures = [client.submit(function, given, task, pure=False) for task in tasks]
    completed = as_completed(futures, loop=client.loop, with_results=True)

    def work(report: Callable[[R], None]) -> None:
        left = len(futures)
        for _, result in completed:
            if isinstance(result, BaseException):  # so `as_completed` reports a lost scheduler
                raise result
            report(result)
            left -= 1
        if left:
            raise ReshardError("the cluster ended before the work was done")

    def give_up() -> None:
        completed.clear()  # or it waits for a scheduler that is lost
        client.cancel(futures)

    try:
        uninterrupted(work, on_result, give_up)
    except BaseException as error:
        with suppress(Exception):
            client.cancel(futures)
        if isinstance(error, ReshardError | KeyboardInterrupt) or not isinstance(error, Exception):
            raise
        raise ReshardError(f"the cluster failed: {error}") from error
