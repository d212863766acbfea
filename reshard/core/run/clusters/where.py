"""Decide where tasks are executed: on threads of this process, by a scheduler of dask, or on a cluster.

1. What the caller passes as `client`.
2. `scheduler` of dask's configuration, as in `dask.config.set(scheduler="synchronous")`.
3. The current client of `distributed`: the last one that was made, the one of `with Client():`, or that of the worker
   whose task this is.
4. Threads.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.core.run.clusters.connect import address_in, connected
from reshard.core.run.clusters.names import CURRENT, LOCAL, PROCESSES, SYNCHRONOUS, THREADS, is_address
from reshard.core.storage.urls.s3.options import refuse_on_cluster
from reshard.errors import Option, ReshardError, Text, UsageError
from reshard.sizes import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


class Where(NamedTuple):
    """Where tasks are executed: on threads of this process, unless an attribute says otherwise.

    Attributes:
        client: a `distributed.Client`.
        get: a scheduler of dask, called with tasks and keys; it may use other processes.
        executor: the name of the class of an executor that `get` submits tasks to; else empty.
        is_synchronous: in the calling thread.
    """

    client: Any = None
    get: Callable[..., Any] | None = None
    executor: str = ""
    is_synchronous: bool = False

    @property
    def is_elsewhere(self) -> bool:
        """Return whether other processes may execute the tasks."""
        return self.client is not None or self.get is not None

    def text(self, threads: int) -> str:
        """Describe it for a report, given the number of threads of this process."""
        if self.client is not None:
            workers = self.client.nthreads()
            of_workers = f"{counted(len(workers), 'worker')}, {counted(sum(workers.values()), 'thread')}"
            return f"cluster {self.client.scheduler.address} ({of_workers})"
        if self.get is not None:
            return self.executor or getattr(self.get, "__module__", type(self.get).__name__)
        return counted(threads, "thread") if threads else "the calling thread"


@contextmanager
def located(client: Any, threads: int | None = None) -> Iterator[Where]:
    """Yield where tasks are executed; what is connected or started for them ends with the context.

    Args:
        client: as `client` of `reshard.Plan.run`, or a `Where`.
        threads: the threads of each worker of a temporary cluster.

    Raises:
        UsageError: the value means nothing, or a client that cannot be waited for.
        ReshardError: the cluster cannot be reached.
    """
    if client is None:
        client = _configured() or _current() or "threads"
    if isinstance(client, str):
        word = client.lower()
        if word in CURRENT:
            client = _current()
            if client is None:
                raise UsageError(
                    f"{word} is the current client, and there is none", code="no-client",
                    hint="make one first, such as with distributed.Client()",
                )  # fmt: skip
        elif word in {*THREADS, *SYNCHRONOUS}:
            client = Where(is_synchronous=word in SYNCHRONOUS)
        elif word in PROCESSES:
            client = "local"
    if isinstance(client, Where):
        yield client
    elif hasattr(client, "submit") and hasattr(client, "scatter"):
        yield Where(_usable(client))
    elif isinstance(client, Executor):
        from dask.base import get_scheduler

        yield Where(get=get_scheduler(scheduler=client), executor=type(client).__name__)
    elif callable(client):
        yield Where(get=client)
    else:
        with connected(_cluster(client), threads) as temporary:
            yield Where(temporary)


def refuse_unshared(client: Any, paths: Iterable[object]) -> None:
    """Refuse other processes for paths that only this one has options for; nothing is connected.

    Raises:
        ReshardError: a bucket has options, and tasks would be executed by other processes.
    """
    if client is None:
        client = _configured() or _current()
    is_here = isinstance(client, str) and client.lower() in {*THREADS, *SYNCHRONOUS}
    is_here = is_here or (isinstance(client, Where) and not client.is_elsewhere)
    if client is not None and not is_here:
        refuse_on_cluster(paths)


def _cluster(value: Any) -> Any:
    """Return what `connected` takes: a cluster object, an address, or `local`.

    Raises:
        UsageError: the value is of another kind.
    """
    if hasattr(value, "scheduler_address"):
        return _usable(value)
    if isinstance(value, os.PathLike):
        return address_in(os.fspath(value))
    if isinstance(value, str):
        if LOCAL.fullmatch(value) or is_address(value):
            return value
        if "/" in value or os.path.exists(value):
            return address_in(value)
    raise UsageError(
        f"client is {value!r:.200}; expected a cluster or a scheduler of dask", code="unknown-scheduler",
        hint="pass a distributed.Client or a cluster, the address or the file of a scheduler, 'threads', 'synchronous' "
        "or 'processes'",
    )  # fmt: skip


def _usable(client: Any) -> Any:
    """Return a client or a cluster that can be waited for."""
    if getattr(client, "asynchronous", False):
        raise UsageError(
            "the client is asynchronous, and this call waits", code="asynchronous-client",
            hint=Text("pass a distributed.Client that is not, or ", Option("client", "threads")),
        )  # fmt: skip
    status = getattr(client, "status", "running")
    if str(getattr(status, "name", status)) in {"closing", "closed", "failed"}:
        raise ReshardError("the client or cluster is closed", code="not-reachable", hint="make another one")
    return client


def _configured() -> Any:
    """Return the scheduler of dask's configuration; None if it is the current client, or there is none."""
    dask = sys.modules.get("dask")
    config = getattr(dask, "config", None)
    scheduler = config.get("scheduler", None) if config is not None else None
    return None if scheduler in CURRENT else scheduler


def _current() -> Any:
    """Return the current client, or None. A program that has one has imported distributed."""
    distributed = sys.modules.get("distributed")
    if distributed is None:
        return None
    try:
        return distributed.get_client()
    except ValueError:
        return None
