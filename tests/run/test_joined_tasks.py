"""Small tasks are joined for clusters, which need milliseconds for each: the same bytes, receipts and progress."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import dask
import dask.array as da
import numpy as np
import pytest
from checkpoints import numbers, tree, write_ranks
from clusters import client_of, cluster
from remotes import get

import reshard
from reshard import Layout, Strategy
from reshard.core.plan import budget, partition
from reshard.core.plan.partition import partitioned
from reshard.core.plan.uploads import sending
from reshard.core.run import graph
from reshard.core.run.settings import TaskOptions

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from reshard.core.plan.plan import Plan

FULL = numbers({f"layers.{i}.w": (24, 16) for i in range(40)})
SEVERAL = TaskOptions(multi_process=True)


def split(ranks: int, axis: int) -> Strategy:
    return Strategy.of({name: Layout.of([ranks], [0 if dim == axis else -1 for dim in range(2)]) for name in FULL})


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> reshard.Plan:
    """A plan of 40 tasks, of which at least 8 are left when they are joined."""
    monkeypatch.setattr(budget, "TASK_BYTES", 1)
    monkeypatch.setattr(budget, "MOST_TASKS", 40)
    monkeypatch.setattr(graph, "ENOUGH_TASKS", 8)
    root = write_ranks(tmp_path / "src", FULL, split(8, 0))
    return reshard.plan(reshard.open(root, strategy=split(8, 0)), split(16, 1))


def joined(plan: Plan, options: TaskOptions = SEVERAL) -> Plan:
    return graph.Graph(plan, "/out", options).plan


def flat(groups: Iterable[Iterable[Any]]) -> list[Any]:
    return list(chain(*groups))


def test_tasks_are_joined_in_their_order(plan: reshard.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    before = plan._record
    assert len(before.tasks) == 40
    after = joined(before)
    assert len(after.tasks) == after.stats.tasks == 8
    assert flat(task.pieces for task in after.tasks) == flat(task.pieces for task in before.tasks)
    assert joined(before, TaskOptions()) is before, "on threads a task costs little"
    monkeypatch.setattr(graph, "JOINED_BYTES", 3 * 24 * 16 * 4)
    assert [len(task.pieces) for task in joined(before).tasks] == [3] * 13 + [1]
    monkeypatch.setattr(graph, "JOINED_BYTES", 2 * 24 * 16 * 4 - 1)
    assert joined(before).tasks == before.tasks, "they are not small"
    monkeypatch.undo()
    assert joined(before) is before, "they are few"


def test_files_are_joined_up_to_a_number(plan: reshard.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "FILES_AT_ONCE", 1)
    before = partitioned(plan._record, "file", "/out")
    assert [len(task.files) for task in before.tasks] == [1] * 16
    assert [task.files for task in joined(before).tasks] == [(n, n + 1) for n in range(0, 16, 2)]
    monkeypatch.setattr(graph, "JOINED_FILES", 1)
    assert joined(before).tasks == before.tasks
    monkeypatch.setattr(graph, "JOINED_FILES", 16)
    large = before.files[3]._replace(layout=replace(before.files[3].layout, size=1 << 30))
    after = joined(replace(before, files=(*before.files[:3], large, *before.files[4:])))
    assert [task.files for task in after.tasks][1:4] == [(2,), (3,), (4, 5)], "many would be sent with a large one"


def test_tasks_of_assigned_arrays_are_not_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task has all chunks that it needs in memory."""
    monkeypatch.setattr(budget, "TASK_BYTES", 1)
    monkeypatch.setattr(graph, "ENOUGH_TASKS", 2)
    source = reshard.open(write_ranks(tmp_path / "src", FULL, split(1, 0)))
    array = da.from_array(np.arange(4096, dtype=np.float32), chunks=256)
    record = reshard.plan(source.assign({"layers.0.w": array}), to="safetensors")._record
    assert len(record.tasks) >= 4
    assert joined(record) is record


def test_a_collection_of_joined_tasks(plan: reshard.Plan, tmp_path: Path) -> None:
    plan.run(tmp_path / "expected", client="threads")
    collection = plan.graph(tmp_path / "out")
    assert collection.kinds()["move"] == 8
    report = collection.compute()
    assert (report.bytes_read, report.bytes_written) == (plan.stats.bytes_read, plan.stats.bytes_written)
    assert tree(tmp_path / "out") == tree(tmp_path / "expected")


@pytest.mark.parametrize("format", ["safetensors", "zarr"])
def test_joined_tasks_at_a_url(plan: reshard.Plan, monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    """A dask scheduler may use several processes."""
    monkeypatch.setattr(sending, "STREAMS_AT_ONCE", 1)
    source = reshard.Checkpoint(plan._record.source)
    plan = reshard.plan(source, split(16, 1)) if format == "safetensors" else reshard.plan(source, to="zarr")
    urls = [f"memory://joined-{format}-{scheduler}" for scheduler in ("threads", "dask")]
    plan.run(urls[0], client="threads")
    report = plan.run(urls[1], client=dask.get)
    assert 8 <= sum(receipt.task.startswith("files") for receipt in report.receipts) < 16
    assert get(urls[0]) == get(urls[1])


@pytest.mark.slow
def test_joined_tasks_on_a_cluster(plan: reshard.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has one receipt; one is lost with the worker that has it."""
    pytest.importorskip("distributed")
    monkeypatch.setattr(partition, "FILES_AT_ONCE", 1)
    plan.run(tmp_path / "expected", client="threads")
    with cluster(tmp_path, 2) as one, client_of(one.address, 2) as client:
        for by in ("tensor", "file"):
            told: list[Any] = []
            report = plan.run(tmp_path / by, client=client, progress=told.append, partition=by)
            assert tree(tmp_path / by) == tree(tmp_path / "expected")
            kinds = [receipt.task.partition(" ")[0] for receipt in report.receipts]
            assert kinds.count("move") + kinds.count("files") == 8
            assert report.bytes_written == told[-1].written == told[-1].total == plan.stats.bytes_written
            assert report.manifest()

        def kill(event: Any) -> None:
            if event.written and one.workers[0].poll() is None:
                one.workers[0].kill()
                one.workers[0].wait()

        plan.run(tmp_path / "one worker", client=client, progress=kill)
    assert tree(tmp_path / "one worker") == tree(tmp_path / "expected")
