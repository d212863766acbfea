"""The one dask graph of a plan: make the target files, move the bytes, give the files their names.

Tasks are few and fat; what they do is in `tasks`. The plan itself is one node, which a cluster sends to each worker
once. Keys are numbered downwards, since dask begins with the last of tasks that wait for nothing; those that wait for
the same one are in no order for it (its dependents are a set), so `run` sorts those of this machine. Files are then
read from their first byte to their last, which is what the kernel reads ahead for.

A cluster that loses a worker runs its tasks again elsewhere, and those whose receipts it had. So whatever a working
task does may be done twice, at the same time even: making a file leaves what is in it, and the same bytes go to the
same places. Naming a file may not, since a file without its contents would be made again; so naming begins only when
nothing but the receipts of all work is left to be lost, and `run` does it itself. At URLs a task names its files: made
again, a file there replaces the one before as a whole.
"""

from __future__ import annotations

import re
import time
import uuid
from collections import Counter
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dask.base import DaskMethodsMixin
from dask.task_spec import DataNode, List, Task, TaskRef
from dask.threaded import get as threaded_get

from reshard.errors import names
from reshard.plan.partition import partitioned
from reshard.run.tasks import (
    How,
    check_sources,
    close_files,
    commit_files,
    crcs_of_files,
    create_files,
    files_task,
    move_task,
    withdraw_index,
)
from reshard.storage.places import can
from reshard.upward import upward

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reshard.plan.plan import Plan
    from reshard.run.run import Report
    from reshard.run.tasks import Receipt
    from reshard.targets.destination import TargetFile

_KIND = re.compile("reshard-([a-z]+)--[0-9]{6}|reshard-(check)-")

FILES_A_TASK = 32
"""The most target files that a task makes or finishes."""

FILE_TASKS = 64
"""Fewer files than this have a task each: to take the space of a large file is work for a thread."""


def collect(*receipts: Sequence[Receipt]) -> list[Receipt]:
    """Join receipts; what depends on all of some tasks depends on this."""
    return [receipt for some in receipts for receipt in some]


def graph(plan: Plan, directory: str, *, fsync: bool, partition: str | None) -> Graph:
    """Return the graph that writes the target files below a directory: `Plan.graph`."""
    plan = replace(partitioned(plan, partition, directory), digests=(uuid.uuid4().hex,) * len(plan.files))
    # Whoever computes it may do so in several processes.
    return Graph(plan, directory, How(fsync=fsync, apart=True))


class _PlanNode(DataNode):  # type: ignore[misc]  # dask has no types
    """The plan, whose key distinguishes it from others; dask would walk through all of it to do so."""

    def __dask_tokenize__(self) -> str:
        return str(self.key)

    def __reduce__(self) -> tuple[type[_PlanNode], tuple[Any, ...]]:
        return _PlanNode, (self.key, self.value)


class Graph(DaskMethodsMixin):  # type: ignore[misc]  # dask has no types
    """The graph of a plan and a target directory, as a dask collection: `dask.compute` of it runs the conversion.

    `Plan.run` does more: it refuses to overwrite, cleans up after a failure and reports progress.

    Attributes:
        plan: by tensor, or by file (see `plan.partition`).
        directory: where the target files go; a path or a URL.
        how: the tasks do their work.
        run: what distinguishes this run from others, for giving it up.
        ready: the key of the receipts of all work; what comes after completes the files and gives them their names.
        closed: the key of those, when the files are complete.
        key: the key of all receipts.
    """

    def __init__(self, plan: Plan, directory: str, how: How) -> None:
        self.plan = plan
        self.directory = directory
        self.run = uuid.uuid4().hex
        self.how = how._replace(run=self.run, crcs=plan.has_crcs)
        # Not dask's token of all this: with what moves share in each of them, it would take more than the plan.
        self._token = self.run
        self.ready = self._key("ready")
        self.closed = self._key("closed")
        self.key = self._key("done")
        self._tasks: dict[str, Any] | None = None

    def __dask_graph__(self) -> dict[str, Any]:
        """Return the tasks by key."""
        if self._tasks is None:
            self._tasks = self.work() | self.closing() | self.naming()
        return self._tasks

    @property
    def dask(self) -> dict[str, Any]:
        """The tasks by key, as other collections have them."""
        return self.__dask_graph__()

    def kinds(self) -> dict[str, int]:
        """Return how many tasks of each kind there are.

        `create`, `move`, or where tasks write whole files `files`; `check`; `close` and `last`, which complete files;
        `commit`, `link` and `index`, which give them their names.
        """
        found = (_KIND.fullmatch(key.replace(self._token, "")) for key in self.dask)
        return dict(Counter(match[1] or match[2] for match in found if match))

    def work(self) -> dict[str, Any]:
        """Return the tasks that make the files and fill them, which may be done twice."""
        plan, directory, how = self.plan, self.directory, self.how
        graph = self._with_plan()
        if self._by_file:
            tasks = [(number, directory, how) for number in range(len(plan.tasks))]
            done = [self._add(graph, "files", files_task, tasks)]
            if plan.exclusive:  # others look themselves, before they complete a file
                done.append(self._unchanged(graph, done[0]))
        else:
            written = [number for number, file in enumerate(plan.files) if file.link is None and not file.done]
            made = self._add(graph, "create", create_files, [(files, directory, how) for files in _batches(written)])
            moves = [(number, directory, how, made) for number in range(len(plan.tasks))]
            moved = self._add(graph, "move", move_task, moves) if moves else made
            done = [made, moved, self._unchanged(graph, moved)]
        graph[self.ready] = Task(self.ready, collect, *done)
        return graph

    def closing(self, receipts: Sequence[Receipt] | None = None) -> dict[str, Any]:
        """Return the tasks that complete the files; with the receipts of all work a graph of its own."""
        graph = self._after(self.ready, receipts)
        done = [TaskRef(self.ready)]
        files = [number for number, file in enumerate(self.plan.files) if not (file.done or file.link)]
        if files and can(self.directory).positioned:  # there they are complete when they appear
            crcs = self._key("crcs")
            graph[crcs] = Task(crcs, crcs_of_files, TaskRef(self._key("plan")), done[-1])
            before = TaskRef(crcs)
            last = tuple(number for number in files if self.plan.files[number].last)
            others = _batches([number for number in files if not self.plan.files[number].last])
            for kind, batches in (("close", others), ("last", [last] if last else [])):
                if batches:
                    tasks = [(some, self.directory, self.how, TaskRef(crcs), before) for some in batches]
                    before = self._add(graph, kind, close_files, tasks)
                    done.append(before)
        graph[self.closed] = Task(self.closed, collect, *done)
        return graph

    def naming(self, receipts: Sequence[Receipt] | None = None) -> dict[str, Any]:
        """Return the tasks that give the files their names; with the receipts so far a graph of its own."""
        graph = self._after(self.closed, receipts)
        files = [(number, file) for number, file in enumerate(self.plan.files) if not file.done]
        done = [TaskRef(self.closed)]
        how = self.how
        last = [number for number, file in files if file.last]
        if last and can(self.directory).positioned:  # elsewhere files have their names already
            withdrawn = self._key("withdraw")
            graph[withdrawn] = Task(withdrawn, withdraw_index, TaskRef(self._key("plan")), self.directory, done[-1])
            done.append(TaskRef(withdrawn))
        unnamed = [number for number, file in files if file.link is None and not file.last and self._unnamed(file)]
        for kind, numbers in (
            ("commit", unnamed),
            ("link", [number for number, file in files if file.link is not None]),
            ("index", last),
        ):
            if numbers:
                batches = [tuple(last)] if kind == "index" else _batches(numbers)  # what stands last has an order
                tasks = [(some, self.directory, how, done[-1]) for some in batches]
                done.append(self._add(graph, kind, commit_files, tasks))
        graph[self.key] = Task(self.key, collect, *done)
        return graph

    @property
    def _by_file(self) -> bool:
        """Return whether tasks write whole files; none may be left to be written."""
        return self.plan.by_file or not can(self.directory).positioned

    def _unnamed(self, file: TargetFile) -> bool:
        """Return whether no task of the work names a file, as they do where no file can be resumed.

        Metadata of a store is not written by any.
        """
        return can(self.directory).positioned or (self.plan.exclusive and not file.layout.contents)

    def _unchanged(self, graph: dict[str, Any], moved: TaskRef) -> TaskRef:
        """Add the task that looks at the sources when all is moved."""
        key = self._key("check")
        graph[key] = Task(key, check_sources, TaskRef(self._key("plan")), moved)
        return TaskRef(key)

    def _with_plan(self) -> dict[str, Any]:
        return {self._key("plan"): _PlanNode(self._key("plan"), replace(self.plan, request=None))}

    def _after(self, key: str, receipts: Sequence[Receipt] | None) -> dict[str, Any]:
        """Return a graph of the plan, and of receipts that are there."""
        return self._with_plan() | ({} if receipts is None else {key: DataNode(key, receipts)})

    def _key(self, kind: str) -> str:
        """Return a key by which a dashboard can say what a task is."""
        return f"reshard-{kind}-{self._token}"

    def _add(
        self, graph: dict[str, Any], kind: str, function: Callable[..., Receipt], arguments: Sequence[tuple[Any, ...]]
    ) -> TaskRef:
        """Add a task for each of some arguments, and one that joins their receipts; return that."""
        keys = [f"{self._key(kind)}-{len(arguments) - i:06d}" for i in range(len(arguments))]
        for key, some in zip(keys, arguments, strict=True):
            # A cluster would give all to the worker that has the plan; it spreads those that are said to load data.
            graph[key] = Task(key, function, TaskRef(self._key("plan")), *some, _data_producer=True)
        every = self._key(f"{kind}-all")
        graph[every] = Task(every, collect, List(*map(TaskRef, keys)))
        return TaskRef(every)

    def __dask_keys__(self) -> list[str]:
        """Return the key of all receipts."""
        return [self.key]

    def __dask_tokenize__(self) -> str:
        """Return what identifies the collection."""
        return self._token

    if TYPE_CHECKING:

        def compute(self, **options: Any) -> Report:
            """Write the target files."""

    def __dask_postcompute__(self) -> tuple[Callable[..., Report], tuple[Report, float]]:
        """Return how the computed keys become the result: a report."""
        from reshard.run.run import report_of  # which imports this module

        return _reported, (report_of(self.plan, self.directory, (), 0.0), time.time())

    def __dask_postpersist__(self) -> tuple[Callable[..., Graph], tuple[()]]:
        """Return how the persisted task, which has run, becomes a graph again."""
        return self._ran, ()

    def _ran(self, tasks: dict[str, Any], *, rename: dict[str, str] | None = None) -> Graph:
        done = copy(self)
        done.key = (rename or {}).get(self.key, self.key)
        done._tasks = dict(tasks)  # noqa: SLF001 -- of the same class
        return done

    @staticmethod
    def __dask_optimize__(tasks: dict[str, Any], _keys: object, **_options: object) -> dict[str, Any]:
        """Return the tasks, which are what they should be."""
        return tasks

    __dask_scheduler__ = staticmethod(threaded_get)

    def __len__(self) -> int:
        return len(self.dask)

    def _repr_html_(self) -> str:
        return str(upward("html")(self))

    def __repr__(self) -> str:
        tasks, files = self.plan.stats.tasks, len(self.plan.files)
        return f"<Graph: {tasks} tasks to write {files} files below {names([self.directory])}>"


def _batches(numbers: Sequence[int]) -> list[tuple[int, ...]]:
    size = min(FILES_A_TASK, -(-len(numbers) // FILE_TASKS)) or 1
    return [tuple(numbers[i : i + size]) for i in range(0, len(numbers), size)]


def _reported(results: Sequence[Sequence[Receipt]], empty: Report, began: float) -> Report:
    """Return the report of a graph that was computed, from one that has no receipts yet."""
    receipts = tuple(results[0])
    return empty._replace(
        bytes_read=sum(receipt.read for receipt in receipts),
        bytes_written=sum(receipt.written for receipt in receipts),
        seconds=time.time() - began,
        receipts=receipts,
    )
