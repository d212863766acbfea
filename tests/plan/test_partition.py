"""Ownership by file: the same bytes, in order, and what it reads is what the plan says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import assert_rank_files, numbers, tree, write_file, write_ranks
from faulty import Faults, raising
from generators import Model, models
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samples import examples

import reshard
from reshard import Layout, Strategy
from reshard.core.plan import budget, partition
from reshard.core.plan.bands import AHEAD
from reshard.core.plan.partition import partitioned
from reshard.kits import ckpt

if TYPE_CHECKING:
    from pathlib import Path

    from reshard.core.plan.plan import Plan

FULL = numbers({"w": (48, 48), "v": (48, 24)})


def split(ranks: int, axis: int, names: tuple[str, ...] = ("w", "v")) -> Strategy:
    return Strategy.of({name: Layout.of([ranks], [0 if dim == axis else -1 for dim in range(2)]) for name in names})


def by_file(tmp_path: Path, before: Strategy, after: Strategy) -> Plan:
    """Plan by file, carry it out, and see that it reads what the plan says and writes what a plan by tensor does."""
    root = write_ranks(tmp_path / "src", FULL, before)
    plan = partitioned(reshard.plan(reshard.open(root, strategy=before), after)._record, "file", str(tmp_path))
    report = reshard.Plan(plan).run(tmp_path / "out")
    assert report.bytes_read == plan.stats.bytes_read
    assert_rank_files(tmp_path / "out", FULL, after)
    return plan


def files_of(plan: Plan) -> tuple[tuple[int, ...], ...]:
    return tuple(task.files for task in plan.tasks)


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(model=models(), most=st.sampled_from([1, 2, 64]), format=st.sampled_from(["ckpt", "safetensors"]))
def test_any_model(tmp_path_factory: pytest.TempPathFactory, model: Model, most: int, format: str) -> None:
    root = tmp_path_factory.mktemp("model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "FILES_AT_ONCE", most)
        patch.setattr(budget, "BAND_BYTES", 256)
        before = write_ranks(root / "a", numbers(model.shapes, "float64"), model.source)
        selection = reshard.Selection(cast={"float64": "float32"})
        plan = reshard.plan(reshard.open(before, strategy=model.source), model.target, to=format, selection=selection)
        plan.run(root / "b", fsync=False)
        alone = partitioned(plan._record, "file", str(root))
        report = reshard.Plan(alone).run(root / "c", fsync=False)
        assert tree(root / "c") == tree(root / "b")
        assert report.bytes_read == alone.stats.bytes_read >= plan.stats.bytes_read
        assert sorted(n for group in files_of(alone) for n in group) == list(range(len(plan._record.files)))
        assert max(map(len, files_of(alone))) <= most


def test_files_are_written_from_first_byte_to_last(
    tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "BAND_BYTES", 512)
    monkeypatch.setattr(ckpt, "PART_BYTES", 101)  # contents in several messages, cut in the middle of an element
    also = {"note": "päd → ✓", "empty": np.zeros((0, 3), np.float32), "step": np.array(7, np.int32)}
    root = write_ranks(tmp_path / "src", FULL, split(8, 0), "ckpt", also=also)
    plan = reshard.plan(reshard.open(root, strategy=split(8, 0)), split(6, 1))
    plan.run(tmp_path / "by_tensor")
    for drop_cache in (False, True):
        faults.clear()
        plan.run(tmp_path / "by_file", partition="file", threads=3, restart=True, drop_cache=drop_cache)
        assert tree(tmp_path / "by_file") == tree(tmp_path / "by_tensor")
        written: dict[str, list[tuple[int, int]]] = {}
        for call in faults.of("write_at"):
            written.setdefault(call.path, []).append((call.offset, call.nbytes))
        assert len(written) == 6
        for pieces in written.values():
            assert len(pieces) > 30
            assert [offset for offset, _ in pieces] == [sum(n for _, n in pieces[:i]) for i in range(len(pieces))]


def test_what_reads_the_same_bytes_is_written_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = by_file(tmp_path / "along", split(8, 0), split(4, 0))
    assert files_of(plan) == ((0,), (1,), (2,), (3,))  # they share nothing
    assert plan.stats.read_amplification == 1
    plan = by_file(tmp_path / "across", split(8, 0), split(4, 1))
    assert files_of(plan) == ((0, 1, 2, 3),)  # all of them need all rows
    assert plan.stats.read_amplification == 1
    plan = by_file(tmp_path / "thirds", split(4, 1), split(6, 1))
    assert files_of(plan) == ((0, 1, 2), (3, 4, 5))  # two of four columns are cut into three
    assert plan.stats.read_amplification == 1
    monkeypatch.setattr(partition, "FILES_AT_ONCE", 2)
    plan = by_file(tmp_path / "pairs", split(8, 0), split(4, 1))
    assert len(files_of(plan)) == 2
    assert plan.stats.read_amplification == 2


def test_small_replicas_do_not_put_files_together(tmp_path: Path) -> None:
    """Every rank has the norms; that is read again for each, and no reason to write all files in one task."""
    full = {**FULL, "norm": FULL["w"][0]}
    layouts = {rank: Strategy.of({**{n: Layout.of([rank], [0, -1]) for n in FULL}, "norm": Layout.of([rank], [-1])})
               for rank in (8, 4)}  # fmt: skip
    source = reshard.open(write_ranks(tmp_path / "src", full, layouts[8]), strategy=layouts[8])
    plan = partitioned(reshard.plan(source, layouts[4])._record, "file", str(tmp_path))
    assert len(files_of(plan)) == 4
    assert plan.stats.bytes_read == plan.stats.bytes_needed + 3 * 48 * 4
    assert reshard.Plan(plan).run(tmp_path / "out").bytes_read == plan.stats.bytes_read


def test_values_that_differ_between_ranks(tmp_path: Path) -> None:
    for rank in range(4):
        write_file(
            tmp_path / f"src/rank_{rank}/a.ckpt",
            {"w": FULL["w"][12 * rank : 12 * rank + 12], "seed": np.array(rank, np.int64), "z": FULL["v"]},
            "ckpt",
        )
    strategy = split(4, 0, ("w",))
    plan = reshard.plan(reshard.open(tmp_path / "src", strategy=strategy), split(2, 1, ("w",)))
    plan.run(tmp_path / "a")
    plan.run(tmp_path / "b", partition="file")
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


def test_sets_and_links(tmp_path: Path) -> None:
    source = reshard.open(write_ranks(tmp_path / "src", FULL, split(8, 0)), strategy=split(8, 0))
    replicas = Strategy.of({name: Layout.of([2, 4], [-1, 0]) for name in FULL})
    for name, plan in {
        "set": reshard.plan(source, to="mindspore", max_shard_size=5000),
    }.items():
        plan.run(tmp_path / name / "by_tensor")
        plan.run(tmp_path / name / "by_file", partition="file")
        assert tree(tmp_path / name / "by_file") == tree(tmp_path / name / "by_tensor")


def test_a_failure_leaves_nothing(tmp_path: Path, faults: Faults) -> None:
    source = reshard.open(write_ranks(tmp_path / "src", FULL, split(8, 0)), strategy=split(8, 0))
    faults.nth(4, raising(KeyboardInterrupt()), "write_at")
    with pytest.raises(KeyboardInterrupt):
        reshard.plan(source, split(4, 0)).run(tmp_path / "out", partition="file", client="synchronous")
    assert tree(tmp_path / "out") == {}


def test_a_graph_by_file_is_a_dask_collection(tmp_path: Path) -> None:
    source = reshard.open(write_ranks(tmp_path / "src", FULL, split(8, 0)), strategy=split(8, 0))
    collection: Any = reshard.plan(source, split(4, 0)).graph(tmp_path / "out", partition="file")
    assert repr(collection) == f"<Graph: 4 tasks to write 4 files below {tmp_path / 'out'}>"
    collection.compute()
    assert_rank_files(tmp_path / "out", FULL, split(4, 0))


def test_what_is_transposed_is_cut_where_reading_ahead_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that began in the middle would read what the one before has read."""
    monkeypatch.setattr(budget, "TASK_BYTES", 10_000)
    monkeypatch.setattr(budget, "STRIDED_BAND_BYTES", 1000)
    full = numbers({f"w{number}": (60, 50) for number in range(5)} | {"large": (60, 500)})
    checkpoint = reshard.open(write_file(tmp_path / "src.safetensors", full))
    turned = [{"a": name, "b": {"transpose": f"{name}.t"}} for name in full]
    rules = {"reshard-rules": 1, "sides": ["a", "b"], "rules": turned}
    plan = reshard.plan(checkpoint.derive(reshard.Rules.of(rules)), to="hf")
    pieces: dict[str, list[int]] = {}
    for task in plan._record.tasks:
        for piece in task.pieces:
            pieces.setdefault(plan._record.transfers[piece.transfer].name, []).append(piece.start)
    assert len(plan._record.tasks) > 1
    assert {name: starts for name, starts in pieces.items() if name != "large.t"} == {
        f"w{number}.t": [0] for number in range(5)
    }
    room = AHEAD * 1000 // (60 * 4)  # rows that are read ahead
    assert all(start % -(-500 // -(-500 // room)) == 0 for start in pieces["large.t"]), pieces["large.t"]
    assert len(pieces["large.t"]) > 3
