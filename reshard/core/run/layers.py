"""The layers of a run's graph: the stages of the run, as dask shows, annotates and copies them."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from dask.base import clone_key
from dask.graph_manipulation import chunks
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from dask.task_spec import DataNode, Task, TaskRef

from reshard.core.run.clusters.carried import WithArrays

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

    from reshard.core.plan.plan import Plan

_STAGES = {
    "plan": ("plan",),
    "arrays": (),
    "create": ("create", "created", "made"),
    "move": ("move",),
    "files": ("files",),
    "check": ("check", "ready"),
    "close": ("crcs", "close", "last", "closed"),
    "commit": ("withdraw", "commit", "link"),
    "index": ("index", "done"),
}
"""The stages of a graph in their order, and the words in the keys of their tasks; other keys are of arrays."""

_STAGE_OF = {word: stage for stage, words in _STAGES.items() for word in words}

_COUNTED = re.compile("reshard-(create|move|files|check|close|last|commit|link|index)-[0-9a-f]{32}(-[0-9]{6})?")


class PlanNode(DataNode):  # type: ignore[misc]  # dask has no types
    """The plan, identified by its key; otherwise dask would hash all of it.

    Args:
        key: the key.
        plan: the plan.
        carries: it is sent to other processes with its assigned arrays.
    """

    def __init__(self, key: Any, plan: Plan, carries: bool = False) -> None:
        super().__init__(key, plan)
        self._carries = carries

    def __dask_tokenize__(self) -> str:
        return str(self.key)

    def __reduce__(self) -> tuple[type[PlanNode], tuple[Any, ...]]:
        return PlanNode, (self.key, WithArrays(self.value) if self._carries else self.value, self._carries)

    def copy(self) -> PlanNode:
        """Return a copy of the same kind."""
        return PlanNode(self.key, self.value, self._carries)

    def substitute(self, _keys: Mapping[str, Any], key: str | None = None) -> PlanNode:
        """Return the plan under another key; it waits for no task."""
        return PlanNode(key or self.key, self.value, self._carries)


class _Stage(MaterializedLayer):  # type: ignore[misc]  # dask has no types
    """The tasks of one stage."""

    def __init__(self, tasks: Mapping[Any, Any], annotations: Mapping[str, Any] | None) -> None:
        super().__init__(tasks)
        self.annotations = annotations  # not those of a `compute` that happens to be the first to ask for the layers

    def clone(self, keys: set[Any], seed: Hashable, bind_to: Any = None) -> tuple[_Stage, bool]:
        """Return the stage with other keys; tasks that wait for no task of `keys` then wait for `bind_to`.

        The method of dask does not change the keys inside tasks (2026.8).
        """
        tasks: dict[Any, Any] = {}
        is_bound = False
        for key, task in self.items():
            if key not in keys:
                tasks[key] = task
                continue
            new, changed = clone_key(key, seed), {each: clone_key(each, seed) for each in task.dependencies & keys}
            tasks[new] = task.substitute(changed, key=new)
            if bind_to is not None and not changed:
                tasks[new] = Task(new, chunks.bind, tasks[new], TaskRef(bind_to))
                is_bound = True
        return _Stage(tasks, self.annotations), is_bound


def staged(tasks: Mapping[Any, Any], key: str, annotations: Mapping[str, Any] | None) -> HighLevelGraph:
    """Return tasks by stage.

    Args:
        tasks: the tasks of a whole run.
        key: the key of all receipts, which ends with the token of the graph.
        annotations: the annotations of all tasks.
    """
    token = key.rpartition("-")[2]
    stages: dict[str, dict[Any, Any]] = {stage: {} for stage in _STAGES}
    for name, task in tasks.items():
        stages[_stage(name)][name] = task
    layers = {f"reshard-{stage}-{token}": of_stage for stage, of_stage in stages.items() if of_stage}
    dependencies = {}
    for name, of_stage in layers.items():
        needed = set().union(*(getattr(task, "dependencies", ()) for task in of_stage.values())) - of_stage.keys()
        dependencies[name] = {f"reshard-{_stage(each)}-{token}" for each in needed}
    return HighLevelGraph({name: _Stage(of_stage, annotations) for name, of_stage in layers.items()}, dependencies)


def _stage(key: Any) -> str:
    """Return the stage of a task."""
    return _STAGE_OF.get(key.split("-", 2)[1], "arrays") if isinstance(key, str) and "-" in key else "arrays"


def kinds_of(keys: Iterable[Any]) -> dict[str, int]:
    """Return the number of tasks by kind."""
    matches = (_COUNTED.fullmatch(key) for key in keys if isinstance(key, str))
    return dict(Counter(match[1] for match in matches if match))
