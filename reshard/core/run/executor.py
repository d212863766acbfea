"""Execute tasks on threads of this process, or on the workers of a dask cluster.

The graph of a run has stages that wait for each other, and goes to a scheduler as a whole (`execute`). A comparison
calls one function many times, for which `map_tasks` is enough.

On a cluster only receipts and the plan travel. The plan is one node of the graph: it goes to the scheduler once, which
sends it to one worker; the other workers fetch it from there. Tasks refer to it, and carry a number and a few words.
"""

from __future__ import annotations

import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar, cast

from reshard.core.run.clusters import waking
from reshard.core.run.clusters.carried import WithArrays, contents
from reshard.core.run.clusters.where import Where, located
from reshard.core.run.clusters.workers import settled
from reshard.core.storage.threads import live_runs, map_ordered, uninterrupted
from reshard.errors import ReshardError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from reshard.core.run.settings import Receipt

S = TypeVar("S")
T = TypeVar("T")
R = TypeVar("R")

HERE = Where()
_LARGE_GRAPH = "1 GiB"  # a plan is one node; dask warns of nodes from 10 MB on


def execute(
    tasks: dict[str, Any],
    key: str,
    run: str,
    threads: int,
    on_event: Callable[[Receipt], None],
    where: Where = HERE,
) -> list[Receipt]:
    """Execute a graph and return the receipts of a key; on an interrupt or error, cancel the run first.

    Args:
        tasks: the graph.
        key: the task that joins all receipts.
        run: the identifier of the run.
        threads: the number of threads of this process; 0 means this thread.
        on_event: called with the receipt of each task; with a scheduler of dask, once all are done.
        where: where the tasks are executed.

    Raises:
        ReshardError: a task raised it, or the cluster failed.
    """
    if where.client is not None:
        return _on_cluster(tasks, key, run, on_event, where.client)
    if distributed := sys.modules.get("distributed"):  # chunks of arrays that a cluster holds
        from dask.task_spec import Task

        held = {name: task for name, task in tasks.items() if isinstance(task, distributed.Future)}
        tasks = tasks | {name: Task(name, future.result) for name, future in held.items()}
    if where.get is None:
        return _here(tasks, key, run, threads, on_event)
    try:
        receipts: list[Receipt] = list(where.get(tasks, key))
    except BaseException:
        live_runs.stopped.add(run)
        raise
    for receipt in receipts:
        on_event(receipt)
    return receipts


def _here(
    tasks: dict[str, Any], key: str, run: str, threads: int, on_event: Callable[[Receipt], None]
) -> list[Receipt]:
    """Execute a graph on threads of this process."""
    from dask.callbacks import Callback
    from dask.local import get_async, get_sync

    from reshard.core.run.settings import Receipt

    sorts = all(isinstance(task, str) for task in tasks)  # others are of arrays, which dask puts into an order

    def callback(report: Callable[[Receipt], None]) -> Callback:
        def posttask(_key: str, result: object, _dsk: object, state: dict[str, list[str]], _worker: object) -> None:
            if isinstance(result, Receipt):
                report(result)
            elif sorts and isinstance(result, list):  # a group of tasks is done; its dependents are ready, in no order
                state["ready"].sort()  # the last one runs first

        return Callback(posttask=posttask)

    def cancel() -> None:
        live_runs.stopped.add(run)

    def work(report: Callable[[Receipt], None]) -> list[Receipt]:
        receipts: list[Receipt]
        pool = ThreadPoolExecutor(threads, thread_name_prefix="reshard")
        try:
            with callback(report):
                # Two tasks for each thread are submitted, so that no thread idles until dask sees a result.
                (receipts,) = get_async(pool.submit, 2 * threads, tasks, [key])
        except BaseException:
            cancel()
            raise
        finally:
            # dask raises while other tasks still write: wait for them before the files are touched.
            pool.shutdown(wait=True, cancel_futures=True)
        return receipts

    if threads:
        return uninterrupted(work, on_event, cancel)
    with callback(on_event):
        (receipts,) = get_sync(tasks, [key])
    return list(receipts)


def _on_cluster(
    tasks: dict[str, Any], key: str, run: str, on_event: Callable[[Receipt], None], client: Any
) -> list[Receipt]:
    """Execute a graph on a cluster."""
    import dask

    from reshard.core.run.settings import Receipt

    receipts: list[Receipt] = []

    def add(done: str, result: object) -> None:
        if isinstance(result, Receipt):
            on_event(result)
        if done == key:
            receipts.extend(cast("list[Receipt]", result))

    plan_key = next(iter(tasks))
    with dask.config.set({"distributed.admin.large-graph-warning-threshold": _LARGE_GRAPH}):
        ours = [task for task in tasks if isinstance(task, str) and task.startswith("reshard-") and task != plan_key]
        futures = client.get(tasks, ours, sync=False)  # without the chunks of arrays, which are large
    _gather(client, futures, add, lambda: client.run(settled, run))
    return receipts


def map_tasks(
    function: Callable[[S, T], R],
    shared: S,
    tasks: Sequence[T],
    *,
    threads: int,
    client: Any = None,
    on_result: Callable[[R], None],
) -> None:
    """Call `function(shared, task)` for each task; pass results to `on_result`.

    Args:
        function: a function of a module, since it travels to workers.
        shared: the first argument of all calls, sent to each worker once.
        tasks: the second argument of each call.
        threads: the number of threads of this process.
        client: where the calls are executed, as `client` of `reshard.Plan.run`.
        on_result: called with each result, in any order.

    Raises:
        ReshardError: a task raised it, or the cluster failed. Tasks that have not begun by then are not done.
    """
    with located(client, threads) as where:
        if where.client is not None:
            carried, seconds = WithArrays(shared), waking.NO_WORKERS_AFTER
            try:
                shared_on_workers = where.client.scatter(carried, hash=False, timeout=seconds)
            except TimeoutError:
                raise _no_workers(where.client) from None
            run = f"reshard-{function.__name__}-{uuid.uuid4().hex}"
            futures = [
                where.client.submit(_call, function, shared_on_workers, task, key=f"{run}-{number:06d}")
                for number, task in enumerate(tasks)
            ]
            _gather(where.client, futures, lambda _, result: on_result(result))
        elif where.get is not None:
            from dask.task_spec import Task

            calls = {
                ("reshard-call", n): Task(("reshard-call", n), function, shared, task) for n, task in enumerate(tasks)
            }
            for result in where.get(calls, list(calls)):
                on_result(result)
        elif where.is_synchronous:
            for task in tasks:
                on_result(function(shared, task))
        else:
            map_ordered(lambda task: function(shared, task), tasks, threads, on_result)


def _call(function: Callable[[S, T], R], shared: S, task: T) -> R:
    """Call a function on a worker."""
    return function(contents(shared), task)


def _gather(
    client: Any,
    futures: Sequence[Any],
    on_result: Callable[[str, Any], None],
    settle: Callable[[], object] = lambda: None,
) -> None:
    """Wait for tasks of a cluster, shielded like `uninterrupted`.

    Args:
        client: a `distributed.Client`.
        futures: the tasks.
        on_result: called with the key and the result of each task; its errors are raised unchanged.
        settle: called on failure, once the tasks are cancelled.

    Raises:
        ReshardError: a task raised it, or the cluster failed.
    """
    from distributed import as_completed

    completed = as_completed(futures, loop=client.loop, with_results=True)
    is_ours = has_no_workers = False

    def work(report: Callable[[tuple[str, Any]], None]) -> None:
        pending = len(futures)
        for future, result in completed:
            if isinstance(result, BaseException):  # `as_completed` reports a lost scheduler like this
                raise result
            report((future.key, result))
            pending -= 1
        if has_no_workers:
            raise _no_workers(client)
        if pending:
            raise ReshardError("the cluster ended before the work was done", code="cluster-ended")

    def add(event: tuple[str, Any]) -> None:
        nonlocal is_ours
        try:
            on_result(*event)
        except BaseException:
            is_ours = True
            raise

    def cancel() -> None:
        completed.clear()  # otherwise it waits for a lost scheduler
        client.cancel(futures)

    def end() -> None:
        nonlocal has_no_workers
        has_no_workers = True
        completed.clear()

    try:
        with waking.kept_awake(client, end), _seceded():
            uninterrupted(work, add, cancel)
    except BaseException as error:
        with suppress(Exception):  # the cluster may be gone
            client.cancel(futures)
            settle()
        if is_ours or isinstance(error, ReshardError) or not isinstance(error, Exception):
            raise
        reason = str(error) or type(error).__name__
        raise ReshardError("the cluster failed", code="cluster-failed", facts=[reason]) from error


def _no_workers(client: Any) -> ReshardError:
    return ReshardError(
        f"the cluster has had no worker for {waking.NO_WORKERS_AFTER:.0f} s",
        code="no-workers",
        hint=f"start workers, such as with dask worker {client.scheduler.address}, and start again",
    )


@contextmanager
def _seceded() -> Iterator[None]:
    """In a task of a worker, leave its threads while waiting, since the tasks that are waited for need one."""
    from distributed import rejoin, secede

    is_task = False
    with suppress(AttributeError, KeyError, ValueError):  # this is no task, or one that has left
        secede()
        is_task = True
    try:
        yield
    finally:
        if is_task:
            rejoin()


def import_dask() -> None:
    """Import dask as if jinja2 and psutil were not installed, which takes it a third less time.

    It needs them to draw collections as HTML and to count processors, if the system does not say how many there are.
    Later imports find them. Only for a process of this program alone, without a cluster.
    """
    absent = {"jinja2", "psutil"} - sys.modules.keys()
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # None, and an import fails
    try:
        import dask  # noqa: F401
    finally:
        for name in absent:
            del sys.modules[name]
