"""Plans: which tensors a rank gets (DESIGN section 4), in which files, and what it costs."""

from __future__ import annotations

import pickle
from pathlib import Path

import helpers
import numpy as np
import pytest
from checkpoints import assert_rank_files, blocks, numbers, write_file, write_ranks
from commands import least_memory
from generators import Model, models
from hypothesis import given
from refusals import refused

import reshard
from reshard import Layout, Strategy
from reshard.core.layout.block import Block
from reshard.core.plan.budget import MOST_TASKS, TASK_BYTES
from reshard.errors import BudgetError, SourceError, UsageError

ROWS, COLUMNS = Layout.of([4], [0, -1]), Layout.of([4], [-1, 0])
FULL = numbers({"w": (8, 8), "moments.w": (8, 8), "b": (8,)})
SOURCE = Strategy.of({"w": ROWS, "moments.w": ROWS, "b": Layout.of([4], [-1])})


@pytest.fixture
def source(tmp_path: Path) -> reshard.Checkpoint:
    root = write_ranks(tmp_path / "src", FULL, SOURCE, also={"global_step": np.array(7, np.int32)})
    return reshard.open(root, strategy=SOURCE)


def held(plan: reshard.Plan, rank: int) -> list[str]:
    return sorted(plan._record.blocks(rank))


def test_a_plan_is_told_before_anything_is_read(source: reshard.Checkpoint, tmp_path: Path) -> None:
    target = Strategy.of({"w": COLUMNS, "moments.w": COLUMNS, "b": Layout.of([4], [0])})
    plan = reshard.plan(source, target, prefix="net")
    for file in source._record.files:
        Path(file.path).unlink()  # pure: it opens no file
    assert reshard.plan(source, target, prefix="net").stats == plan.stats
    assert [file.path for file in plan._record.files] == [f"rank_{r}/net{r}.safetensors" for r in range(4)]
    stats = plan.stats
    assert (stats.tensors, stats.source_files, stats.target_files, stats.tasks) == (4, 4, 4, 1)
    assert stats.bytes_read == stats.bytes_needed == (64 + 64 + 8) * 4 + 4
    assert stats.read_amplification == 1
    assert stats.bytes_written == stats.bytes_read + 3 * 4  # global_step is copied to all four ranks
    assert stats.target_bytes == sum(file.layout.size for file in plan._record.files)
    assert stats.peak_memory < 100 << 20
    assert not (tmp_path / "out").exists()


def test_some_ranks_read_no_more_than_their_rows_need(source: reshard.Checkpoint) -> None:
    plan = reshard.plan(source, SOURCE, ranks=[2])
    assert [file.rank for file in plan._record.files] == [2]
    assert plan.stats.bytes_needed == plan.stats.bytes_read == (16 + 16 + 8) * 4 + 4
    columns = Strategy.of({"w": COLUMNS, "moments.w": COLUMNS, "b": Layout.of([4], [-1])})
    assert reshard.plan(source, columns, ranks=[2]).stats.read_amplification > 1  # whole rows are read for a column


def test_named_for_another_stage_a_rank_gets_nothing(source: reshard.Checkpoint) -> None:
    target = Strategy.of({"w": {0: ROWS}, "moments.w": {0: ROWS}, "b": {1: Layout.of([4], [-1])}})
    plan = reshard.plan(source, target)
    assert held(plan, 0) == ["global_step", "moments.w", "w"]
    assert held(plan, 7) == ["b", "global_step"]


def test_not_in_the_target_an_optimizer_state_is_dropped_and_reported(source: reshard.Checkpoint) -> None:
    target = Strategy.of({"w": ROWS, "b": Layout.of([4], [-1])})
    plan = reshard.plan(source, target)
    assert plan.dropped == ("moments.w",)
    assert held(plan, 0) == ["b", "global_step", "w"]


def test_not_in_the_target_a_weight_is_an_error_unless_a_pattern_covers_it(source: reshard.Checkpoint) -> None:
    target = Strategy.of({"w": ROWS, "moments.w": ROWS})
    with refused(SourceError, "not-in-strategy", "'b'") as caught:
        reshard.plan(source, target)
    assert caught.value.exit_code == 4
    assert reshard.plan(source, target, drop=["b*"]).dropped == ("b",)


def test_not_in_the_source_likewise(source: reshard.Checkpoint) -> None:
    named = {"w": ROWS, "moments.w": ROWS, "b": Layout.of([4], [-1])}
    assert reshard.plan(source, Strategy.of({**named, "adam_v.w": ROWS})).missing == ("adam_v.w",)
    with refused(SourceError, "missing-tensor", "allow_missing", "'lora.a'"):
        reshard.plan(source, Strategy.of({**named, "lora.a": ROWS}))
    assert reshard.plan(source, Strategy.of({**named, "lora.a": ROWS}), allow_missing=["lora.*"]).missing == ("lora.a",)


def test_whole_in_the_files_and_named_by_the_target_it_is_cut(tmp_path: Path) -> None:
    root = write_ranks(tmp_path, {"w": FULL["w"]}, Strategy.of({"w": ROWS}), also={"frozen": FULL["b"]})
    source = reshard.open(root, strategy=Strategy.of({"w": ROWS}))
    plan = reshard.plan(source, Strategy.of({"w": ROWS, "frozen": Layout.of([4], [0])}))
    assert plan._record.blocks(3)["frozen"].block == Block((6,), (8,))


def test_no_target_strategy_means_one_rank_of_whole_tensors(source: reshard.Checkpoint, tmp_path: Path) -> None:
    plan = reshard.plan(source)
    plan.run(tmp_path / "out")
    assert plan.ranks == (0,)
    assert_rank_files(tmp_path / "out", {**FULL, "global_step": np.array(7, np.int32)}, None)


def test_copies_that_differ_come_from_the_rank_that_the_rule_says(tmp_path: Path) -> None:
    for rank in range(4):
        tensors = {**blocks(FULL, SOURCE, rank), "loss_scale": np.array(rank, np.float32)}
        write_file(tmp_path / "src" / f"rank_{rank}" / "net.ckpt", tensors, "ckpt")
    source = reshard.open(tmp_path / "src", strategy=SOURCE)
    wide = Strategy.of({name: Layout.of([8], [0] + [-1] * (value.ndim - 1)) for name, value in FULL.items()})
    plan = reshard.plan(source, wide)
    plan.run(tmp_path / "out")
    values = {}
    for rank in range(8):
        out = reshard.open(tmp_path / "out" / f"rank_{rank}" / f"checkpoint_{rank}.ckpt")
        values[rank] = float(out["loss_scale"].compute())
    # Target rank r reads w from source rank r // 2, and b (replicated) from rank 0; r mod 4 is read only where equal.
    assert values == {0: 0, 1: 0, 2: 0, 3: 0, 4: 0, 5: 0, 6: 0, 7: 3}


def test_a_layout_that_does_not_fit_names_tensor_dimension_and_sizes(source: reshard.Checkpoint) -> None:
    target = Strategy.of(
        {"w": Layout.of([3], [0, -1]), "moments.w": Layout.of([3], [0, -1]), "b": Layout.of([3], [-1])}
    )
    with pytest.raises(SourceError) as caught:
        reshard.plan(source, target)
    assert all(f"tensor {name!r}" in str(caught.value) for name in ("w", "moments.w"))
    with pytest.raises(SourceError) as again:  # who asks for the grid twice is told once
        reshard.plan(source, target, remove_redundancy=True)
    assert str(again.value) == str(caught.value)


def test_a_shape_that_the_target_strategy_contradicts(source: reshard.Checkpoint) -> None:
    """Frozen zero biases that are split and not listed look whole; the target's JSON file knows better."""
    target = Strategy.of({"w": ROWS, "moments.w": ROWS, "b": Layout.of([4], [0])}, shapes={"b": (32,)})
    with refused(SourceError, "wrong-shape", "'b'", "[8]", "[32]"):
        reshard.plan(source, target)


def test_memory_is_predicted_and_refused_before_anything_is_read(source: reshard.Checkpoint) -> None:
    assert reshard.plan(source, SOURCE, memory=1 << 30)._record.threads == 4
    tight = reshard.plan(source, SOURCE, memory=56 << 20)
    assert (tight._record.threads, tight._record.band_bytes < 4 << 20) == (1, True)
    assert tight.stats.peak_memory <= 56 << 20
    with refused(BudgetError, "not-enough-memory", "'w'") as caught:
        reshard.plan(source, SOURCE, memory=20 << 20)
    least = least_memory(caught.value)
    assert reshard.plan(source, SOURCE, memory=least).stats.peak_memory <= least
    with refused(BudgetError, "not-enough-memory", "'w'"):
        reshard.plan(source, SOURCE, memory=least - 1_000_000)


@pytest.mark.parametrize("prefix", ["../x", "a/b", "x\n", "\0"])
def test_a_prefix_cannot_leave_the_target(source: reshard.Checkpoint, prefix: str) -> None:
    with refused(UsageError, "bad-name", repr(prefix)):
        reshard.plan(source, SOURCE, prefix=prefix)


def test_unknown_ranks_and_formats(source: reshard.Checkpoint) -> None:
    with refused(UsageError, "no-such-rank", "ranks 4", "0 to 3"):
        reshard.plan(source, SOURCE, ranks=[1, 4, 9])
    with refused(UsageError, "unknown-format", "'pickle'"):
        reshard.plan(source, SOURCE, to="pickle")


def test_tasks_are_few_and_fat(tmp_path: Path) -> None:
    """A model of a terabyte that is not there: 64 tensors of 16 GB each, only as headers."""
    from reshard.core.model.checkpoint import Checkpoint, Sharding, SourceFile, Tensor, TensorSpec
    from reshard.core.model.entries import Entry, FileIndex, Replica
    from reshard.dtypes import BFLOAT16

    shape = (1 << 16, 1 << 17)
    names = [f"w{i}" for i in range(64)]
    grid = Layout.of([8], [0, -1]).grid(shape)
    nbytes = grid.blocks[0].size * 2
    index = FileIndex("ckpt", {name: Entry(BFLOAT16, grid.blocks[0].shape, ((0, nbytes),)) for name in names})
    sharding = Sharding(grid.blocks, tuple(tuple(Replica(rank, 0) for rank in ranks) for ranks in grid.ranks))
    source = Checkpoint(
        "nowhere",
        {name: Tensor(TensorSpec(name, BFLOAT16, shape), sharding, (((0, nbytes),),)) for name in names},
        tuple(SourceFile(f"{r}", nbytes * 64, 0, index) for r in range(8)),
        tuple(range(8)),
        Strategy.of({name: Layout.of([8], [0, -1]) for name in names}),
    )
    plan = reshard.plan(reshard.Checkpoint(source), Strategy.of({name: Layout.of([6, 2], [-1, 0]) for name in names}))
    assert len(plan._record.tasks) <= MOST_TASKS * 1.1
    rows = {}
    for task in plan._record.tasks:
        for piece in task.pieces:
            assert rows.setdefault(piece.transfer, 0) == piece.start  # in order, without gap or overlap
            rows[piece.transfer] = piece.stop
    assert all(rows[number] == move.recipe.rows(move.axis) for number, move in enumerate(plan._record.transfers))
    assert len(pickle.dumps(plan)) < 1 << 20
    assert TASK_BYTES < (1 << 40) // len(plan._record.tasks) < 1 << 30


@given(models())
def test_every_rank_gets_its_blocks_and_no_others(model: Model) -> None:
    """Plan from a source of one whole file, so that only the target side is at stake."""
    from reshard.core.model.checkpoint import Checkpoint, Shard, SourceFile, Tensor, TensorSpec
    from reshard.core.model.entries import Entry, Extent, FileIndex
    from reshard.dtypes import BY_NAME

    f4 = BY_NAME["float32"]
    full = numbers(model.shapes)
    index = FileIndex("ckpt", {n: Entry(f4, a.shape, ((0, a.nbytes),)) for n, a in full.items()})
    tensors = {
        n: Tensor.of(
            TensorSpec(n, f4, a.shape),
            [Shard(Block.whole(a.shape), (Extent(0, ((0, a.nbytes),)),))],
            listed=False,
        )
        for n, a in full.items()
    }
    source = Checkpoint("x", tensors, (SourceFile("x", 0, 0, index),), (0,))
    plan = reshard.plan(reshard.Checkpoint(source), model.target)
    for rank in model.target.ranks:
        expected = blocks(full, model.target, rank)
        found = plan._record.blocks(rank)
        assert set(found) == set(expected)
        for name, held in found.items():
            whole = Block.whole(full[name].shape)
            assert np.array_equal(full[name][held.block.within(whole)], expected[name])


def test_memory_of_a_run(tmp_path: Path) -> None:
    """As a number or a text, in place of the plan's; what is written is the same."""
    full = {"w": np.arange(400_000, dtype="f4").reshape(400, 1000), "b": np.ones(3, "f4")}
    source = reshard.open(write_file(tmp_path / "model.safetensors", full))
    plan = reshard.plan(source, cast="float32=float64", include="w")
    for number, memory in enumerate(("300MB", 300_000_000)):
        report = plan.run(tmp_path / f"{number}", memory=memory, fsync=False)
        assert report.predicted_memory <= 300_000_000
        found = helpers.read_rank_file(tmp_path / f"{number}" / "rank_0" / "checkpoint_0.safetensors")
        assert found["w"] == ("float64", (400, 1000), full["w"].astype("f8").tobytes())
    with refused(BudgetError, "not-enough-memory", "10 B"):
        plan.run(tmp_path / "little", memory=10)
    with refused(UsageError, "bad-size", "memory"):
        plan.run(tmp_path / "little", memory="much")
    assert not (tmp_path / "little").exists()
