"""Build the dask graph of a plan: create files, move bytes, name files.

There are few, large tasks, implemented in `tasks`. If other processes may execute them, small ones are joined. The plan
itself is one node, which a cluster sends to each worker once. Keys are numbered downwards, because dask starts with the
last of the tasks that wait for nothing; tasks that wait for the same task have no order in dask (its dependents are a
set), so `run` sorts them on this machine. Files are then read from the first byte to the last, which suits the
read-ahead of the kernel.

A cluster that loses a worker repeats its tasks on another worker, including tasks whose receipts the lost one held. So
working tasks are idempotent, and may even run twice at the same time: creating a file keeps its contents, and the same
bytes go to the same offsets. Naming a file is not idempotent, since a file without its contents would be created again;
so naming begins only after all working tasks have returned their receipts; `run` does it in its own process, not on
workers. At URLs a task names its files: if it is repeated, the new file replaces the old one as a whole.
"""

from __future__ import annotations

import sys
import time
import uuid
from copy import copy
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import dask
from dask.base import DaskMethodsMixin
from dask.highlevelgraph import HighLevelGraph
from dask.optimization import cull
from dask.task_spec import DataNode, List, Task, TaskRef
from dask.threaded import get as threaded_get

from reshard.core.plan.partition import partitioned
from reshard.core.plan.plan import Task as PlanTask
from reshard.core.records.logs import DIRECTORY
from reshard.core.run.clusters.carried import carries_arrays
from reshard.core.run.layers import PlanNode, kinds_of, staged
from reshard.core.run.settings import Report, TaskOptions, peak_memory, process_name, report_of, uncounted_memory
from reshard.core.run.state.locks import locks_at
from reshard.core.run.state.preflight import Policy, check_target, fates, planned_files, refuse, seen_files
from reshard.core.run.state.unchanged import check_sources
from reshard.core.run.tasks import (
    close_files,
    commit_files,
    crcs_of_files,
    create_files,
    files_task,
    move_task,
    withdraw_index,
)
from reshard.core.storage.places import as_place, can
from reshard.errors import names
from reshard.sizes import counted
from reshard.upward import upward

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from reshard.core.plan.plan import Plan
    from reshard.core.run.settings import Receipt
    from reshard.core.storage.places import AnyName
    from reshard.core.target import TargetFile
    from reshard.expressions.assigned import FromArray, Key

FILES_A_TASK = 32
"""The most target files that a task creates or finishes."""

FILE_TASKS = 64
"""Below this number, each file has a task: allocating a large file keeps a thread busy."""

ENOUGH_TASKS = 256
"""The fewest tasks that are left when small tasks are joined."""

JOINED_BYTES, JOINED_FILES = 16 << 20, 16
"""The most bytes that joined tasks move, and whole files that they write side by side: at URLs these are buffered."""


def collect(*receipts: Sequence[Receipt]) -> list[Receipt]:
    """Join the receipts of several tasks."""
    return [receipt for group in receipts for receipt in group]


def graph(plan: Plan, directory: AnyName, *, fsync: bool, overwrite: bool, partition: str | None) -> Graph:
    """Return the graph that writes the target files below a directory; see `reshard.Plan.graph`."""
    root = str(as_place(directory).real())
    plan = replace(partitioned(plan, partition, root), digests=(uuid.uuid4().hex,) * len(plan.files))
    check_target(plan, root)
    check_sources(plan, None)
    existing = seen_files(plan, root, {}, ())  # it has no ledger, so all of them are foreign
    policy = Policy(early=not can(root).positioned, overwrite=overwrite)
    refuse(fates(planned_files(plan, plan.digests), existing, policy), root)
    if as_place(f"{root}/{DIRECTORY}").is_there():
        locks = locks_at(root)
        locks.take([file.path for file in plan.files])  # another run may write them
        locks.release()
    # It may be computed in several processes.
    return Graph(plan, root, TaskOptions(fsync=fsync, multi_process=True, wakes=True))


class Graph(DaskMethodsMixin):  # type: ignore[misc]  # dask has no types
    """A dask collection that writes the target; `dask.compute` runs the conversion.

    Its layers are the stages of a run: `plan`, `create` and `move`, or `files` if tasks write whole files; `check`,
    `close`, `commit` and `index`; `arrays` compute chunks of assigned arrays. It has the annotations of
    `dask.annotate` with which it was made.

    `Plan.run` does more: it resumes, cleans up after a failure and reports progress.

    Attributes:
        plan: by tensor, or by file (see `plan.partition`); with fewer tasks than given, if they are joined.
        directory: the target directory; a path or a URL.
        options: options of the tasks.
        run: the identifier of this run, used to cancel it.
        created: the key of the receipts of creating files, if that is not done by the tasks that fill them.
        ready: the key of the receipts of all work; later tasks complete the files and give them their names.
        closed: the key of the receipts once the files are complete.
        key: the key of all receipts.
    """

    def __init__(self, plan: Plan, directory: str, options: TaskOptions) -> None:
        self.plan = plan = _with_joined_tasks(plan) if options.multi_process else plan
        self.directory = directory
        self.run = uuid.uuid4().hex
        self.options = options._replace(run=self.run, crcs=plan.has_crcs)
        # A dask token of all this would take more memory than the plan: it repeats the shared parts of the moves.
        self._token = self.run
        self.created = self._key("created")
        self.ready = self._key("ready")
        self.closed = self._key("closed")
        self.key = self._key("done")
        self._carries = carries_arrays(plan, by_file=self._by_file)
        self._annotations = dask.get_annotations().copy() or None
        self._layers: HighLevelGraph | None = None

    def __dask_graph__(self) -> HighLevelGraph:
        """Return the tasks by stage."""
        if self._layers is None:
            self._layers = staged(self.work() | self.closing() | self.naming(), self.key, self._annotations)
        return self._layers

    def __dask_layers__(self) -> tuple[str, ...]:
        """Return the name of the layer that has the key of all receipts."""
        return tuple(name for name, layer in self.dask.layers.items() if self.key in layer)

    @property
    def dask(self) -> HighLevelGraph:
        """Return the tasks by stage, like other dask collections."""
        return self.__dask_graph__()

    def kinds(self) -> dict[str, int]:
        """Return the number of tasks by kind.

        Kinds are `create` and `move`, or `files` if tasks write whole files; `check`; `close` and `last`, which
        complete files; `commit`, `link` and `index`, which give them their names.
        """
        return kinds_of(self.dask)

    @property
    def has_arrays(self) -> bool:
        """Return whether tasks get chunks of assigned arrays."""
        return not self._by_file and bool(_arrays(self.plan))

    def creating(self) -> dict[str, Any]:
        """Return the tasks that create files, for a graph of their own."""
        graph = self._with_plan()
        graph[self.created] = Task(self.created, collect, self._add_creating(graph))
        return graph

    def _add_creating(self, graph: dict[str, Any]) -> TaskRef:
        written = [number for number, file in enumerate(self.plan.files) if file.link is None and not file.done]
        creations = [(files, self.directory, self.options) for files in _batches(written)]
        return self._add(graph, "create", create_files, creations)

    def _moves(self, created: TaskRef, graph: dict[str, Any]) -> list[tuple[Any, ...]]:
        """Return the arguments of the tasks that move bytes; add the tasks that compute chunks of arrays."""
        moves: list[tuple[Any, ...]]
        moves = [(number, self.directory, self.options, created) for number in range(len(self.plan.tasks))]
        arrays = _arrays(self.plan)
        if not arrays:
            return moves
        from reshard.expressions.assigned import Needed

        needed = Needed(self.plan)
        keys = [needed.of(task) for task in self.plan.tasks]
        graph.update(_tasks_of(arrays, list(dict.fromkeys(key for of_task in keys for key in of_task))))
        refs = [List(*map(TaskRef, of_task)) for of_task in keys]
        return [(*move, tuple(of_task), ref) for move, of_task, ref in zip(moves, keys, refs, strict=True)]

    def work(self, created: Sequence[Receipt] | None = None) -> dict[str, Any]:
        """Return the tasks that create and fill the files; they may be done twice.

        Args:
            created: the receipts of `creating`, if that was executed before.
        """
        plan, directory, options = self.plan, self.directory, self.options
        known = self._key("made")  # a cluster still has the task of that key
        graph = self._after(known, created)
        if self._by_file:
            tasks = [(number, directory, options) for number in range(len(plan.tasks))]
            done = [self._add(graph, "files", files_task, tasks)]
            if plan.shape == "store":  # the tasks of other plans check the sources before they complete a file
                done.append(self._unchanged(graph, done[0]))
        else:
            made = self._add_creating(graph) if created is None else TaskRef(known)
            moves = self._moves(made, graph)
            moved = self._add(graph, "move", move_task, moves) if moves else made
            done = [made, moved, self._unchanged(graph, moved)]
        graph[self.ready] = Task(self.ready, collect, *done)
        return graph

    def closing(self, receipts: Sequence[Receipt] | None = None) -> dict[str, Any]:
        """Return the tasks that complete the files; a separate graph if given receipts."""
        graph = self._after(self.ready, receipts)
        done = [TaskRef(self.ready)]
        files = [number for number, file in enumerate(self.plan.files) if not (file.done or file.link)]
        if files and can(self.directory).positioned:  # at URLs files are complete when they appear
            crcs = self._key("crcs")
            graph[crcs] = Task(crcs, crcs_of_files, TaskRef(self._key("plan")), done[-1])
            before = TaskRef(crcs)
            last = tuple(number for number in files if self.plan.files[number].publish != "file")
            rest = _batches([number for number in files if self.plan.files[number].publish == "file"])
            for kind, batches in (("close", rest), ("last", [last] if last else [])):
                if batches:
                    tasks = [(batch, self.directory, self.options, TaskRef(crcs), before) for batch in batches]
                    before = self._add(graph, kind, close_files, tasks)
                    done.append(before)
        graph[self.closed] = Task(self.closed, collect, *done)
        return graph

    def naming(self, receipts: Sequence[Receipt] | None = None) -> dict[str, Any]:
        """Return the tasks that name the files; a separate graph if given receipts."""
        graph = self._after(self.closed, receipts)
        files = [(number, file) for number, file in enumerate(self.plan.files) if not file.done]
        done = [TaskRef(self.closed)]
        last = [number for number, file in files if file.publish != "file"]
        if last and can(self.directory).positioned:  # at URLs files have their names already
            withdrawn = self._key("withdraw")
            graph[withdrawn] = Task(withdrawn, withdraw_index, TaskRef(self._key("plan")), self.directory, done[-1])
            done.append(TaskRef(withdrawn))
        unnamed = [
            number for number, file in files if file.link is None and file.publish == "file" and self._unnamed(file)
        ]
        for kind, numbers in (
            ("commit", unnamed),
            ("link", [number for number, file in files if file.link is not None]),
            ("index", last),
        ):
            if numbers:
                batches = [tuple(last)] if kind == "index" else _batches(numbers)  # the last files are ordered
                tasks = [(batch, self.directory, self.options, done[-1]) for batch in batches]
                done.append(self._add(graph, kind, commit_files, tasks))
        graph[self.key] = Task(self.key, collect, *done)
        return graph

    @property
    def _by_file(self) -> bool:
        """Return whether tasks write whole files; true even if no file is left to write."""
        return self.plan.by_file or not can(self.directory).positioned

    def _unnamed(self, file: TargetFile) -> bool:
        """Return whether a file is still unnamed after the work.

        At URLs working tasks name their files, except the metadata of a store, which they do not write.
        """
        return can(self.directory).positioned or (self.plan.shape == "store" and not file.layout.contents)

    def _unchanged(self, graph: dict[str, Any], moved: TaskRef) -> TaskRef:
        """Add the task that checks the sources once all bytes are moved."""
        key = self._key("check")
        graph[key] = Task(key, check_sources, TaskRef(self._key("plan")), moved)
        return TaskRef(key)

    def _with_plan(self) -> dict[str, Any]:
        return {self._key("plan"): PlanNode(self._key("plan"), replace(self.plan, request=None), self._carries)}

    def _after(self, key: str, receipts: Sequence[Receipt] | None) -> dict[str, Any]:
        """Return a graph that has only the plan, and the receipts if given."""
        return self._with_plan() | ({} if receipts is None else {key: DataNode(key, receipts)})

    def _key(self, kind: str) -> str:
        """Return a key from which a dashboard shows the kind of a task."""
        return f"reshard-{kind}-{self._token}"

    def _add(
        self, graph: dict[str, Any], kind: str, function: Callable[..., Receipt], arguments: Sequence[tuple[Any, ...]]
    ) -> TaskRef:
        """Add a task per tuple of arguments, and return a task that joins the receipts."""
        prefix, plan = self._key(kind), TaskRef(self._key("plan"))
        keys = [f"{prefix}-{number:06d}" for number in range(len(arguments), 0, -1)]
        for key, values in zip(keys, arguments, strict=True):
            # A cluster would send all tasks to the worker that has the plan; it spreads those that are data producers.
            graph[key] = Task(key, function, plan, *values, _data_producer=True)
        joined = self._key(f"{kind}-all")
        graph[joined] = Task(joined, collect, List(*map(TaskRef, keys)))
        return TaskRef(joined)

    def __dask_keys__(self) -> list[str]:
        """Return the key of all receipts."""
        return [self.key]

    def __dask_tokenize__(self) -> str:
        """Return the identifier of the collection."""
        return self.key

    if TYPE_CHECKING:

        def compute(self, **options: Any) -> Report:
            """Write the target files."""

    def __dask_postcompute__(self) -> tuple[Callable[..., Report], tuple[Report, float, int, str]]:
        """Return the function and arguments that turn results into a report."""
        empty = report_of(self.plan, self.directory, (), 0.0, 0)
        return _reported, (empty, time.time(), uncounted_memory(self.plan), process_name())

    def __dask_postpersist__(self) -> tuple[Callable[..., Graph], tuple[()]]:
        """Return the function that turns persisted results into a graph."""
        return self._ran, ()

    def _ran(self, tasks: Mapping[str, Any], *, rename: dict[str, str] | None = None) -> Graph:
        done = copy(self)
        done.key = (rename or {}).get(self.key, self.key)
        if isinstance(tasks.get(done.key), Task) and not isinstance(tasks, HighLevelGraph):  # dask joined the layers
            tasks = staged(tasks, done.key, self._annotations)
        elif not isinstance(tasks, HighLevelGraph):  # results, or futures of them
            tasks = HighLevelGraph.from_collections(done.key, tasks)
        done._layers = tasks  # noqa: SLF001 -- of the same class
        return done

    @staticmethod
    def __dask_optimize__(tasks: HighLevelGraph, _keys: object, **_options: object) -> HighLevelGraph:
        """Return the tasks unchanged; there is nothing to optimize."""
        return tasks

    __dask_scheduler__ = staticmethod(threaded_get)

    def __len__(self) -> int:
        return len(self.dask)

    def _repr_html_(self) -> str:
        return str(upward("html")(self))

    def __repr__(self) -> str:
        tasks, files = counted(self.plan.stats.tasks, "task"), counted(len(self.plan.files), "file")
        return f"<Graph: {tasks} to write {files} below {names([self.directory])}>"


def _with_joined_tasks(plan: Plan) -> Plan:
    """Return the plan with small tasks joined: a cluster needs 5 ms of processor time for each, besides the work."""
    most = len(plan.tasks) // ENOUGH_TASKS
    if most < 2 or _arrays(plan):  # a task keeps all chunks of arrays that it needs in memory
        return plan
    mean = max(plan.stats.bytes_read, plan.stats.bytes_written) // max(plan.stats.tasks, 1)
    batches: list[list[PlanTask]] = []
    files = nbytes = 0
    for task in plan.tasks:
        size = max(mean, sum(plan.size_of(plan.files[number]) for number in task.files))
        files, nbytes = files + len(task.files), nbytes + size
        if not batches or len(batches[-1]) == most or files > JOINED_FILES or nbytes > JOINED_BYTES:
            batches.append([])
            files, nbytes = len(task.files), size
        batches[-1].append(task)
    tasks = tuple(PlanTask(*(tuple(chain(*parts)) for parts in zip(*batch, strict=True))) for batch in batches)
    return replace(plan, tasks=tasks, stats=plan.stats._replace(tasks=len(tasks)))


def _arrays(plan: Plan) -> list[FromArray]:
    """Return the assigned arrays of the source."""
    if all(file.inputs is None for file in plan.source.files):
        return []
    from reshard.expressions.assigned import arrays_in  # rarely needed

    return [array for array in arrays_in(plan.source.coding) if array.array is not None]


def _tasks_of(arrays: Sequence[FromArray], keys: Sequence[Key]) -> dict[Any, Any]:
    """Return the tasks that compute chunks of arrays, optimized by dask."""
    tasks: dict[Any, Any] = {}
    for array in dask.optimize(*(item.array for item in arrays)):
        tasks.update(array.__dask_graph__())
    if "distributed" in sys.modules:
        from reshard.expressions.assigned import futures_of  # rarely needed

        for item in arrays:  # dask leaves out chunks that a cluster holds
            tasks.update({future.key: future for future in futures_of(item.array)})
    culled, _ = cull(tasks, list(keys))
    return dict(culled)


def _batches(numbers: Sequence[int]) -> list[tuple[int, ...]]:
    size = min(FILES_A_TASK, -(-len(numbers) // FILE_TASKS)) or 1
    return [tuple(numbers[i : i + size]) for i in range(0, len(numbers), size)]


def _reported(
    results: Sequence[Sequence[Receipt]], empty: Report, began: float, uncounted: int, process: str
) -> Report:
    """Add the receipts of a computed graph to an empty report.

    A cluster calls this on a worker; the memory of the process where the graph was made is not measured then.
    """
    receipts = tuple(results[0])
    return empty._replace(
        bytes_read=sum(receipt.bytes_read for receipt in receipts),
        bytes_written=sum(receipt.bytes_written for receipt in receipts),
        seconds=time.time() - began,
        receipts=receipts,
        peak_memory=peak_memory(uncounted) if process == process_name() else 0,
        ran_on=_workers_text({receipt.worker for receipt in receipts if receipt.worker}),
    )


def _workers_text(workers: Collection[str]) -> str:
    """Describe the threads that executed a graph, each as `HOST:PID THREAD`.

    >>> _workers_text({"a:1 x", "a:1 y"}), _workers_text({"a:1 x", "b:1 x"})
    ('2 threads', '2 processes (2 threads)')
    """
    processes, threads = {worker.partition(" ")[0] for worker in workers}, counted(len(workers), "thread")
    return threads if len(processes) < 2 else f"{counted(len(processes), 'process')} ({threads})"
