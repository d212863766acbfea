"""Execute tasks on threads of this process, or on the workers of a dask cluster.

The graph of a run has stages that wait for each other, and goes to a scheduler as a whole (`execute`). A comparison
calls one function many times, for which `map_tasks` is enough.

On a cluster only receipts and the plan travel. The plan is one node of the graph: it goes to the scheduler once, which
sends it to one worker; the other workers fetch it from there. Tasks refer to it, and carry a number and a few words.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar, cast

from reshard import environment
from reshard.errors import ReshardError, SourceError, TargetError, names
from reshard.messages import log
from reshard.storage.page_cache import cache_of
from reshard.storage.places import any_store, can, workers_at
from reshard.storage.threads import live_runs, map_ordered, processor_count, uninterrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from reshard.core.plan.plan import Plan
    from reshard.run.settings import Receipt

S = TypeVar("S")
T = TypeVar("T")
R = TypeVar("R")


def execute(
    tasks: dict[str, Any],
    key: str,
    run: str,
    threads: int,
    on_event: Callable[[Receipt], None],
    *,
    client: Any = None,
    get: Callable[..., Any] | None = None,
) -> list[Receipt]:
    """Execute a graph and return the receipts of a key; on an interrupt or error, cancel the run first.

    Args:
        tasks: the graph.
        key: the task that joins all receipts.
        run: the identifier of the run.
        threads: the number of threads, without `client` and `get`; 0 means this thread.
        on_event: called with the receipt of each task; with `get`, once all are done.
        client: a `distributed.Client`.
        get: a dask scheduler, called with the tasks and a key, such as `dask.threaded.get`; it may use other processes.

    Raises:
        ReshardError: a task raised it, or the cluster failed.
    """
    if client is not None:
        return _on_cluster(tasks, key, run, on_event, client)
    if get is None:
        return _here(tasks, key, run, threads, on_event)
    try:
        receipts: list[Receipt] = list(get(tasks, key))
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

    from reshard.run.settings import Receipt

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

    from reshard.run.settings import Receipt

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
        threads: the number of threads, if no client is given.
        client: a `distributed.Client`.
        on_result: called with each result, in any order.

    Raises:
        ReshardError: a task raised it, or the cluster failed. Tasks that have not begun by then are not done.
    """
    if client is None:
        map_ordered(lambda task: function(shared, task), tasks, threads, on_result)
        return
    shared_on_workers = client.scatter(shared, hash=False)
    futures = [client.submit(function, shared_on_workers, task, pure=False) for task in tasks]
    _gather(client, futures, lambda _, result: on_result(result))


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
    is_ours = False

    def work(report: Callable[[tuple[str, Any]], None]) -> None:
        pending = len(futures)
        for future, result in completed:
            if isinstance(result, BaseException):  # `as_completed` reports a lost scheduler like this
                raise result
            report((future.key, result))
            pending -= 1
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

    try:
        with _waking(client) as note_lost:
            uninterrupted(work, add, cancel)
            with suppress(Exception):  # the work is done
                note_lost()
    except BaseException as error:
        with suppress(Exception):  # the cluster may be gone
            client.cancel(futures)
            settle()
        if is_ours or isinstance(error, ReshardError) or not isinstance(error, Exception):
            raise
        reason = str(error) or type(error).__name__
        raise ReshardError("the cluster failed", code="cluster-failed", facts=[reason]) from error


@contextmanager
def _waking(client: Any) -> Iterator[Callable[[], None]]:
    """Let the scheduler look at its queue every few seconds, by a task that does nothing.

    Workers that are lost are logged then, and by the function that is yielded.

    It looks when a task is done or a worker is added, but not when a worker is lost (distributed 2026.7.1). If that
    takes inputs from all tasks of the others, nothing is executed again and the run would wait forever.
    """
    ended = threading.Event()
    workers = set(client.nthreads())

    def note_lost() -> None:
        present = set(client.nthreads())
        for worker in sorted(workers - present):
            log().warning("worker %s is lost; its tasks run again on others", worker)
        workers.intersection_update(present)
        workers.update(present)

    def wake() -> None:
        futures: list[Any] = []
        while not ended.wait(WOKEN_AFTER):
            with suppress(Exception):  # without a scheduler, the thread that waits for results is told
                note_lost()
                futures.clear()  # dask queues tasks of a kind of which it knows many
                futures.append(client.submit(int, key=f"reshard-wake-{uuid.uuid4().hex}"))

    thread = threading.Thread(target=wake, name="reshard-wake", daemon=True)
    try:
        thread.start()
        yield note_lost
    finally:
        ended.set()
        thread.join()


WOKEN_AFTER = 5.0
"""Seconds between two tasks that wake the scheduler."""

REACHED_WITHIN = 10
"""Seconds within which a scheduler must answer, and have a worker."""


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


_MOST_LOOKED_AT = 64  # source files that each worker checks before a run; tasks check their own files
_LARGE_GRAPH = "1 GiB"  # a plan is one node; dask warns of nodes from 10 MB on


@contextmanager
def connected(cluster: str, threads: int | None = None) -> Iterator[Any]:
    """Yield a client of an existing cluster, or of a temporary local one.

    A local cluster ends with the context.

    Args:
        cluster: `local`, `local:N` with N worker processes, or the address of a scheduler.
        threads: threads of each worker of a local cluster; by default the processors are shared out.

    Raises:
        ReshardError: `distributed` is not installed, or the cluster does not answer in time.
    """
    try:
        from distributed import Client, LocalCluster
    except ImportError:
        raise ReshardError(
            "a cluster needs the library distributed", code="library-missing", hint="pip install 'reshard[distributed]'"
        ) from None
    if not cluster.startswith("local"):
        try:
            client = Client(cluster, timeout=REACHED_WITHIN, set_as_default=False)
        except (OSError, ValueError, RuntimeError) as error:
            raise ReshardError(
                f"cluster {cluster} did not answer within {REACHED_WITHIN} s", code="not-reachable", facts=[str(error)]
            ) from None
        with client:
            try:
                client.wait_for_workers(1, timeout=REACHED_WITHIN)
            except TimeoutError:
                raise ReshardError(
                    f"cluster {cluster} has no worker after {REACHED_WITHIN} s",
                    code="no-workers",
                    hint=f"start one: dask worker {cluster}",
                ) from None
            yield client
        return
    processors = processor_count()
    workers = int(cluster.partition(":")[2] or min(processors, 4))
    with (
        LocalCluster(
            n_workers=workers,
            threads_per_worker=environment.threads(threads) or max(1, processors // workers),
            processes=True,
            dashboard_address="127.0.0.1:0",
            silence_logs=logging.CRITICAL,  # workers of a stopped run log tracebacks; errors are raised here
        ) as local,
        Client(local, set_as_default=False) as client,
    ):
        client.run(ignore_interrupts)
        yield client


def check_workers(plan: Plan, root: str, client: Any) -> str:
    """Reject a cluster whose workers do not all see the same files.

    Returns:
        `page_cache.cache_of` of the target directory, if all workers and this process share it; else "".

    Raises:
        SourceError, TargetError: the worker and the file are named; or workers cannot compute with assigned arrays.
        ReshardError: a worker cannot run this program.
    """
    if any(file.inputs is not None for file in plan.source.files):
        _refuse_arrays(plan, root)
    files = plan.read_files()
    sampled = [plan.source.files[number] for number in files[:: len(files) // _MOST_LOOKED_AT + 1]]
    expected = [(file.path, (file.nbytes, file.mtime_ns)) for file in sampled]  # machines have only these in common
    with _probe(root) as probe:
        here = cache_of(os.path.dirname(probe)) if probe else ""
        answers = client.run(look, expected, probe, on_error="return")
        for worker, answer in answers.items():
            if isinstance(answer, SourceError | TargetError):
                error = answer.about(f"worker {worker}")
                error.hint = "make the source and the target reachable by the same paths on every worker"
                raise error
            if isinstance(answer, BaseException):
                raise ReshardError(
                    f"worker {worker} cannot run reshard",
                    code="worker-failed",
                    facts=[f"{type(answer).__name__}: {answer}"],
                )
    return here if all(answer == here for answer in answers.values()) else ""


def _refuse_arrays(plan: Plan, root: str) -> None:
    """Refuse assigned arrays of which workers need more than the chunks that they are given."""
    from reshard.expressions.assigned import not_given  # rarely needed

    if missing := not_given(plan, by_file=plan.by_file or not can(root).positioned):
        raise SourceError(
            f"the workers of a cluster cannot compute with assigned arrays: {names(map(repr, missing), most=3)}",
            code="array-not-here", hint="write the arrays first, or run without a cluster",
        )  # fmt: skip


def look(expected: Sequence[tuple[str, tuple[int, int]]], probe: str | None) -> str:
    """Check on a worker that source files and target directory are the same as here.

    Returns:
        `page_cache.cache_of` of the target directory.
    """
    paths = [path for path, _ in expected]
    statuses = map_ordered(any_store().status, paths, workers_at(paths))
    for (path, expected_state), status in zip(expected, statuses, strict=True):
        if status[:2] != expected_state:
            raise SourceError(
                f"{path} is not the file that was opened", code="different-file", facts=["its size or time differs"]
            )
    if probe is not None and not os.path.exists(probe):
        raise TargetError(f"{os.path.dirname(probe)} is another directory there, or none", code="different-directory")
    return cache_of(os.path.dirname(probe)) if probe is not None else ""


@contextmanager
def _probe(root: str) -> Iterator[str | None]:
    """Yield the path of a temporary file in a local target; None for a URL."""
    if not can(root).positioned:
        yield None
        return
    is_new = not os.path.isdir(root)
    path = f"{root}/.reshard-{uuid.uuid4().hex}"
    try:
        os.makedirs(root, exist_ok=True)
        with open(path, "x"):
            pass
    except OSError as error:
        raise TargetError(f"cannot write to {root}: {error.strerror}", code="cannot-write") from None
    try:
        yield path
    except BaseException:
        os.unlink(path)
        if is_new:
            with suppress(OSError):
                os.rmdir(root)
        raise
    os.unlink(path)
    if is_new:
        with suppress(OSError):
            os.rmdir(root)


async def settled(run: str) -> None:
    """Cancel a run on a worker, and wait for its writes, before files are removed."""
    import asyncio

    live_runs.stopped.add(run)
    while live_runs.tasks[run]:
        await asyncio.sleep(0.05)


def ignore_interrupts() -> None:
    """Ignore Ctrl-C on a local worker, since the command handles it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
