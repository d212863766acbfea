"""The one dask graph of a plan: make the target files, move the bytes, give the files their names.

Tasks are few and fat, carry no arrays and return receipts. The plan itself is one node, which a cluster sends to each
worker once. Independent tasks run in reverse key order, so keys are numbered downwards for sequential reading.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from dask.base import DaskMethodsMixin, tokenize
from dask.task_spec import DataNode, List, Task, TaskRef
from dask.threaded import get as threaded_get

from reshard.cipher import store_of
from reshard.errors import TargetError, names
from reshard.move import move_pieces
from reshard.store import local_store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reshard.plan import Plan

_KIND = re.compile("([a-z]+)-[0-9]{6}|check")

FILES_A_TASK = 32
"""The most target files that a task makes or finishes."""

FILE_TASKS = 64
"""Fewer files than this have a task each: to take the space of a large file is work for a thread."""


class Receipt(NamedTuple):
    """What a task did.

    Attributes:
        task: `create`, `move`, `sync` or `commit`, with its number.
        read, written: bytes of contents.
        seconds: how long it took.
    """

    task: str
    read: int
    written: int
    seconds: float


def create_files(plan: Plan, files: Sequence[int], directory: str) -> Receipt:
    """Make unfinished target files with the space for them, and write all that is not contents."""
    began = time.perf_counter()
    store = local_store()
    for number in files:
        file = plan.files[number]
        path = f"{directory}/{file.path}"
        store.create(path, file.layout.size)
        for offset, content in file.layout.literals:
            store.write_at(path, offset, memoryview(content))
    return Receipt(f"create {files[0]}", 0, 0, time.perf_counter() - began)


def move_task(plan: Plan, number: int, directory: str, drop_cache: bool, _made: object) -> Receipt:
    """Move the pieces of one task."""
    began = time.perf_counter()
    store = store_of(plan.source.cipher)
    moved = move_pieces(plan, plan.tasks[number], directory, store)
    if drop_cache:
        moves = [plan.moves[piece.move] for piece in plan.tasks[number]]
        for holder in {holder for move in moves for holder in move.holders}:
            store.drop_cache(plan.source.files[holder].path)
        for target in {target for move in moves for targets in move.targets for target in targets}:
            store.drop_cache(f"{directory}/{plan.files[target].path}", written=True)
    return Receipt(f"move {number}", moved.read, moved.written, time.perf_counter() - began)


def check_sources(plan: Plan, _moved: object) -> list[Receipt]:
    """Refuse to finish what was read from files that changed meanwhile.

    Raises:
        TargetError: a source file is not what was opened.
    """
    for number in {number for move in plan.moves for number in move.holders}:
        file = plan.source.files[number]
        try:
            status = os.stat(file.path)
        except OSError as error:
            raise TargetError(f"{file.path}: is gone since it was opened ({error.strerror}); start again") from None
        if (status.st_size, status.st_mtime_ns) != (file.nbytes, file.mtime_ns):
            raise TargetError(f"{file.path}: changed since it was opened; no target file was made; start again")
    return []


def sync_files(plan: Plan, files: Sequence[int], directory: str, _moved: object) -> Receipt:
    """Have finished target files on the disk, before any gets its name: that is slow, and naming all is quick."""
    began = time.perf_counter()
    for number in files:
        local_store().sync(f"{directory}/{plan.files[number].path}")
    return Receipt(f"sync {files[0]}", 0, 0, time.perf_counter() - began)


def commit_files(plan: Plan, files: Sequence[int], directory: str, sync: bool, _ready: object) -> Receipt:
    """Give finished target files their names."""
    began = time.perf_counter()
    for number in files:
        file = plan.files[number]
        if file.link is not None:
            local_store().link(f"{directory}/{file.link}", f"{directory}/{file.path}", sync=sync)
        else:
            local_store().commit(f"{directory}/{file.path}", sync=sync)
    return Receipt(f"commit {files[0]}", 0, 0, time.perf_counter() - began)


def collect(*receipts: Sequence[Receipt]) -> list[Receipt]:
    """Join receipts; what depends on all of some tasks depends on this."""
    return [receipt for some in receipts for receipt in some]


class Graph(DaskMethodsMixin):  # type: ignore[misc]  # dask has no types
    """The graph of a plan and a target directory, as a dask collection: `dask.compute` of it runs the conversion.

    `Plan.run` does more: it refuses to overwrite, cleans up after a failure and tells progress.
    """

    def __init__(self, plan: Plan, directory: str, *, fsync: bool = True, drop_cache: bool = False) -> None:
        self.plan = plan
        self.directory = directory
        self.fsync = fsync
        self.drop_cache = drop_cache
        self._name: str = "reshard-" + tokenize(
            directory,
            fsync,
            [(file.path, file.nbytes, file.mtime_ns) for file in plan.source.files],
            [(file.path, file.layout.size, file.layout.literals[:1]) for file in plan.files],
            [(move.name, move.source_name, move.holders, move.targets) for move in plan.moves],
        )
        self.key = f"{self._name}-done"
        self._tasks: dict[str, Any] | None = None

    def __dask_graph__(self) -> dict[str, Any]:
        """Return the tasks by key."""
        if self._tasks is None:
            self._tasks = self._made()
        return self._tasks

    @property
    def dask(self) -> dict[str, Any]:
        """The tasks by key, as other collections have them."""
        return self.__dask_graph__()

    def kinds(self) -> dict[str, int]:
        """Return how many tasks of each kind there are: `create`, `move`, `check`, `sync`, `commit`."""
        found = (_KIND.fullmatch(key.removeprefix(f"{self._name}-")) for key in self.dask)
        return dict(Counter(match[1] or match[0] for match in found if match))

    def _made(self) -> dict[str, Any]:
        name, plan, directory = self._name, self.plan, self.directory
        whole = TaskRef(f"{name}-plan")
        graph: dict[str, Any] = {whole.key: DataNode(whole.key, replace(plan, request=None))}

        def add(kind: str, function: Callable[..., Receipt], arguments: Sequence[tuple[Any, ...]]) -> TaskRef:
            keys = [f"{name}-{kind}-{len(arguments) - i:06d}" for i in range(len(arguments))]
            for key, some in zip(keys, arguments, strict=True):
                graph[key] = Task(key, function, whole, *some)
            every = f"{name}-{kind}"
            graph[every] = Task(every, collect, List(*map(TaskRef, keys)))
            return TaskRef(every)

        written = [number for number, file in enumerate(plan.files) if file.link is None]
        last = [number for number, file in enumerate(plan.files) if file.last]
        links = [number for number, file in enumerate(plan.files) if file.link is not None]
        made = add("create", create_files, [(files, directory) for files in _batches(written)])
        tasks = [(number, directory, self.drop_cache, made) for number in range(len(plan.tasks))]
        moved = add("move", move_task, tasks) if tasks else made
        unchanged = f"{name}-check"
        graph[unchanged] = Task(unchanged, check_sources, whole, moved)
        done = [made, moved, TaskRef(unchanged)]
        if self.fsync:
            done.append(add("sync", sync_files, [(files, directory, done[-1]) for files in _batches(written)]))
        first = [number for number in written if number not in set(last)]
        for kind, numbers in (("commit", first), ("link", links), ("index", last)):
            if numbers:
                done.append(add(kind, commit_files, [(f, directory, self.fsync, done[-1]) for f in _batches(numbers)]))
        graph[self.key] = Task(self.key, collect, *done)
        return graph

    def __dask_keys__(self) -> list[str]:
        """Return the key of all receipts."""
        return [self.key]

    def __dask_tokenize__(self) -> str:
        """Return what identifies the collection."""
        return self._name

    def __dask_postcompute__(self) -> tuple[Callable[..., Any], tuple[()]]:
        """Return how the computed keys become the result: the receipts."""
        return _first, ()

    def __dask_postpersist__(self) -> tuple[Callable[..., Graph], tuple[()]]:
        """Return how the persisted task, which has run, becomes a graph again."""
        return self._ran, ()

    def _ran(self, tasks: dict[str, Any], *, rename: dict[str, str] | None = None) -> Graph:
        done = copy(self)
        done.key = (rename or {}).get(self.key, self.key)
        done._tasks = dict(tasks)  # noqa: SLF001 -- of the same class
        return done

    __dask_optimize__ = None  # the tasks are what they should be
    __dask_scheduler__ = staticmethod(threaded_get)

    def __len__(self) -> int:
        return len(self.dask)

    def _repr_html_(self) -> str:
        from reshard.show.notebook import graph_html

        return graph_html(self)

    def __repr__(self) -> str:
        tasks, files = len(self.plan.tasks), len(self.plan.files)
        return f"<Graph: {tasks} tasks to write {files} files below {names([self.directory])}>"


def _batches(numbers: Sequence[int]) -> list[tuple[int, ...]]:
    size = min(FILES_A_TASK, -(-len(numbers) // FILE_TASKS)) or 1
    return [tuple(numbers[i : i + size]) for i in range(0, len(numbers), size)]


def _first(results: Sequence[Any]) -> Any:
    return results[0]
