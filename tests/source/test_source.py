"""Opening checkpoints: which files, which step, which blocks; and everything that must be refused."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from checkpoints import blocks, numbers, write_file, write_ranks
from refusals import check, refused

import reshard
from reshard import Layout, Selection, Strategy
from reshard.core.model import probe
from reshard.core.rank_files import Step
from reshard.errors import SourceError, StrategyError, UsageError
from reshard.view.tables import checkpoint_data

if TYPE_CHECKING:
    from faulty import Faults

ROWS = Layout.of([4], [0, -1])
FULL = numbers({"w": (8, 4), "b": (4,)})
STRATEGY = Strategy.of({"w": ROWS, "b": Layout.of([2, 2], [0])})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_ranks(tmp_path / "src", FULL, STRATEGY, also={"global_step": np.array(7, np.int32)})


def test_blocks_come_from_the_strategy_and_their_places_from_the_headers(root: Path) -> None:
    source = reshard.open(root, strategy=STRATEGY)
    assert source["w"].shape == (8, 4)
    assert list(source) == ["b", "w", "global_step"]  # in the order of the files
    assert [(str(shard.block), shard.files) for shard in source.tensors["b"].shards] == [
        ("[0:2]", (0, 2)),
        ("[2:4]", (1, 3)),
    ]
    assert not source.tensors["global_step"].listed
    assert repr(source) == f"<Checkpoint {root}: 3 tensors, {8 * 4 * 4 + 4 * 4 + 4} bytes in 4 files>"


def test_contents_are_not_read(tmp_path: Path, faults: Faults) -> None:
    full = {"w": np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)}
    strategy = Strategy.of({"w": ROWS})
    for format in ("ckpt", "safetensors"):
        root = write_ranks(tmp_path / format, full, strategy, format)
        faults.clear()
        reshard.open(root, strategy=strategy)
        assert 0 < sum(call.nbytes for call in faults.of("read_into")) < 200_000  # of 4 MB: headers, and a few samples


def test_several_ranks_need_a_strategy(root: Path) -> None:
    with refused(SourceError, "no-layout", root, "4 ranks"):
        reshard.open(root)


# --- which files ---


def names_in(source: reshard.Checkpoint) -> set[str]:
    return {Path(file.path).name for file in source._record.files}


def test_the_newest_step_that_every_rank_has(tmp_path: Path) -> None:
    for name in ("net-1_10", "net-2_5"):
        write_ranks(tmp_path, FULL, STRATEGY, name=name)
    write_file(tmp_path / "rank_1" / "net-3_1.safetensors", FULL)
    source = reshard.open(tmp_path, strategy=STRATEGY)
    assert names_in(source) == {"net-2_5.safetensors"}
    assert source.warnings == ("step 3_1 is not in every rank; 2_5 is the newest that is",)
    assert source._record.opening.step == Step("2_5", ("1_10",))
    assert "step 2_5 (the newest of 2; suffix=... selects another)" in repr(source)
    older = reshard.open(tmp_path, strategy=STRATEGY, suffix="1_10")
    assert names_in(older) == {"net-1_10.safetensors"}
    assert older._record.opening.step == Step("1_10")


def test_steps_are_numbers_and_only_those_that_every_rank_has_count(tmp_path: Path) -> None:
    for name in ("net-1_9", "net-1_10", "net-1_100", "net-1_20"):
        write_ranks(tmp_path / "src", FULL, STRATEGY, name=name)
    (tmp_path / "src" / "rank_2" / "net-1_20.safetensors").unlink()
    source = reshard.open(tmp_path / "src", strategy=STRATEGY)
    assert source._record.opening.step == Step("1_100", ("1_10", "1_9"))
    data = checkpoint_data(source._record)
    assert data["step"] == {"name": "1_100", "older": ["1_10", "1_9"]}
    report = reshard.plan(source).run(tmp_path / "out")
    assert reshard.open(report.directory)._record.opening.step is None


def test_a_plan_file_and_a_ledger_know_the_step(tmp_path: Path) -> None:
    for name in ("net-1_10", "net-2_5"):
        write_ranks(tmp_path / "src", FULL, STRATEGY, name=name)
    plan = reshard.plan(reshard.open(tmp_path / "src", strategy=STRATEGY))
    plan.save(tmp_path / "plan.json")
    assert reshard.read_plan(tmp_path / "plan.json")._record.source.opening.step == Step("2_5")
    plan.run(tmp_path / "out")
    assert reshard.verify(tmp_path / "out").against_step == Step("2_5")


@pytest.mark.parametrize("name", ["net_rank_{rank}-1_10", "src{rank}", "checkpoint_{rank}", "net"])
def test_names_may_carry_the_rank(tmp_path: Path, name: str) -> None:
    write_ranks(tmp_path, FULL, STRATEGY, name=name)
    assert len(reshard.open(tmp_path, strategy=STRATEGY)._record.files) == 4


def test_a_restarted_run_beside_the_first_must_be_chosen(tmp_path: Path) -> None:
    for name in ("net-1_10", "net_1-1_10"):
        write_ranks(tmp_path, FULL, STRATEGY, name=name)
    with refused(SourceError, "several-checkpoints"):
        reshard.open(tmp_path, strategy=STRATEGY)
    assert names_in(reshard.open(tmp_path, strategy=STRATEGY, suffix="net_1-1_10")) == {"net_1-1_10.safetensors"}


def test_both_formats_of_one_checkpoint_must_be_chosen_between(tmp_path: Path) -> None:
    for format in ("ckpt", "safetensors"):
        write_ranks(tmp_path, FULL, STRATEGY, format)
    with refused(SourceError, "several-checkpoints"):
        reshard.open(tmp_path, strategy=STRATEGY)
    assert reshard.open(tmp_path, strategy=STRATEGY, suffix=".ckpt").format == "ckpt"


def test_ranks_without_a_step_in_common(tmp_path: Path) -> None:
    for rank in range(4):
        write_file(tmp_path / f"rank_{rank}" / f"net-1_{rank % 2 + 1}.safetensors", FULL)
    with refused(SourceError, "no-common-checkpoint"):
        reshard.open(tmp_path, strategy=STRATEGY)


def test_what_is_not_a_checkpoint_is_passed_over(root: Path) -> None:
    for name in ("net-graph.meta", "meta.json", "net.tmp", "x_breakpoint.ckpt", ".hidden.ckpt", "y.ckpt.partial"):
        (root / "rank_0" / name).write_bytes(b"no")
    assert len(reshard.open(root, strategy=STRATEGY)._record.files) == 4


def test_formats_are_told_by_content(root: Path) -> None:
    for path in root.rglob("*.safetensors"):
        path.rename(path.with_suffix(".ckpt"))
    assert reshard.open(root, strategy=STRATEGY).format == "safetensors"


def test_rank_pattern(root: Path) -> None:
    for rank in range(4):
        (root / f"rank_{rank}").rename(root / f"node{rank}")
    with refused(SourceError, "no-checkpoint", "rank_pattern"):
        reshard.open(root, strategy=STRATEGY)
    assert len(reshard.open(root, strategy=STRATEGY, rank_pattern="node{rank}/*.safetensors")._record.files) == 4
    with refused(SourceError, "bad-rank-pattern"):
        reshard.open(root, rank_pattern="node/*")


def test_parts_of_a_rank_are_read_together(tmp_path: Path) -> None:
    for rank in range(4):
        for part, name in enumerate(("w", "b")):
            some = Strategy.of({name: STRATEGY.tensors[name][0].layout})
            write_file(
                tmp_path / f"rank_{rank}" / f"checkpoint_{rank}_part{part}.ckpt", blocks(FULL, some, rank), "ckpt"
            )
    source = reshard.open(tmp_path, strategy=STRATEGY)
    assert len(source._record.files) == 8
    assert set(source) == {"w", "b"}


def test_global_steps_must_agree(root: Path) -> None:
    write_file(
        root / "rank_2" / "checkpoint_2.safetensors",
        {**blocks(FULL, STRATEGY, 2), "global_step": np.array(8, np.int32)},
    )
    with refused(SourceError, "several-steps", "global_step"):
        reshard.open(root, strategy=STRATEGY)


# --- against the strategy ---


def test_a_missing_rank_is_refused_though_replicas_have_all_it_held(tmp_path: Path) -> None:
    """A strategy of more ranks, with which the files look complete, would make wrong shapes without a word."""
    strategy = Strategy.of({"w": Layout.of([2, 2], [0, -1])})
    root = write_ranks(tmp_path, {"w": FULL["w"]}, strategy)
    (root / "rank_3" / "checkpoint_3.safetensors").unlink()
    with refused(SourceError, "missing-replicas", "rank 3", "the 4"):
        reshard.open(root, strategy=strategy)
    assert reshard.open(root, strategy=strategy, partial=True).tensors["w"].shards[1].files == (1,)
    (root / "rank_1" / "checkpoint_1.safetensors").unlink()
    with refused(SourceError, "missing-ranks", "rank 1", "for 1"):
        reshard.open(root, strategy=strategy)


def test_some_ranks_may_be_enough_for_some(root: Path) -> None:
    files = {rank: root / f"rank_{rank}" / f"checkpoint_{rank}.safetensors" for rank in (1, 3)}
    source = reshard.open(files, strategy=STRATEGY, partial=True)
    plan = reshard.plan(source, STRATEGY, ranks=[1])._record
    assert {plan.source.ranks[number] for number in plan.read_files()} == {1}
    with refused(SourceError, "missing-block", "tensor 'b'", "[0:2]", "ranks 0,2", "tensor 'w'"):
        reshard.plan(source, STRATEGY, ranks=[0])
    one = Strategy.of({"w": ROWS})
    with refused(SourceError, "missing-block", "tensor 'w'", "[0:2, 0:4]", "rank 0"):
        reshard.plan(source, one, ranks=[0], selection=Selection(include=["w"]))


def test_all_faults_at_once(root: Path) -> None:
    write_file(
        root / "rank_1" / "checkpoint_1.safetensors", {"w": np.zeros((3, 4), np.float32), "b": np.zeros(2, np.int8)}
    )
    with pytest.raises(SourceError) as caught:
        reshard.open(root, strategy=STRATEGY)
    check(caught.value, "wrong-shape", "tensor 'w' in", "rank_1/checkpoint_1.safetensors", "[3, 4]", "[2, 4]")
    check(caught.value, "mixed-dtypes", "tensor 'b' in", "int8", "float32")
    assert len(caught.value.codes) == 2


def test_more_ranks_than_the_strategy_describes(root: Path) -> None:
    with refused(SourceError, "strategy-mismatch", "ranks 2-3", "ranks 0 to 1"):
        reshard.open(root, strategy=Strategy.of({"w": Layout.of([2], [0, -1])}))
    with refused(SourceError, "no-checkpoint", "node0/*.ckpt"):
        reshard.open(root, rank_pattern="node{rank}/*.ckpt")


def test_another_number_of_dimensions(root: Path) -> None:
    strategy = Strategy.of({"w": Layout.of([4], [0, -1, -1])})
    with refused(SourceError, "wrong-dimensions", "'w'", "2 dimensions [2, 4]", "layout has 3"):
        reshard.open(root, strategy=strategy)


def test_a_tensor_shared_by_two_stages_is_read_from_the_lowest_that_holds_it(tmp_path: Path) -> None:
    layout = Layout.of([2], [0, -1])
    strategy = Strategy.of({"tied": {0: layout, 1: layout}})
    write_ranks(tmp_path, {"tied": FULL["w"]}, Strategy.of({"tied": layout}))  # stage 0 alone has files with it
    for rank in (2, 3):
        write_file(tmp_path / f"rank_{rank}" / f"checkpoint_{rank}.safetensors", {"other": np.zeros(2, np.float32)})
    source = reshard.open(tmp_path, strategy=strategy)
    assert [shard.files for shard in source.tensors["tied"].shards] == [(0,), (1,)]
    for rank in (0, 1):  # and if stage 0 has lost it, stage 1 will do
        old = tmp_path / f"rank_{rank}" / f"checkpoint_{rank}.safetensors"
        old.rename(tmp_path / f"rank_{rank + 2}" / f"checkpoint_{rank + 2}.safetensors")
        write_file(old, {"other": np.zeros(2, np.float32)})
    assert [shard.files for shard in reshard.open(tmp_path, strategy=strategy).tensors["tied"].shards] == [(2,), (3,)]


def test_a_tensor_that_a_higher_stage_has_whole_is_not_asked_of_a_lower(tmp_path: Path) -> None:
    layout = Layout.of([2], [0, -1])
    strategy = Strategy.of({"tied": {0: layout, 1: layout}})
    write_ranks(tmp_path, {"tied": FULL["w"]}, strategy)
    (tmp_path / "rank_0" / "checkpoint_0.safetensors").unlink()
    source = reshard.open(tmp_path, strategy=strategy, partial=True)
    assert [bool(shard.files) for shard in source.tensors["tied"].shards] == [True, True]
    (tmp_path / "rank_3" / "checkpoint_3.safetensors").unlink()
    some = reshard.open(tmp_path, strategy=strategy, partial=True)
    assert [bool(shard.files) for shard in some.tensors["tied"].shards] == [False, True]


# --- sharded but not listed, listed but whole ---


def test_a_frozen_weight_that_is_split_but_not_listed_is_refused(root: Path) -> None:
    trainable = Strategy.of({"b": STRATEGY.tensors["b"][0].layout})
    with refused(SourceError, "unlisted-tensor", "'w'"):
        reshard.open(root, strategy=trainable)
    given = reshard.open(root, strategy=trainable, layout={"w": "split:0"})
    assert given.tensors["w"].spec.shape == (8, 4)
    assert (
        reshard.open(root, strategy=trainable, layout={"w": "4:0,-1"}).tensors["w"].shards == given.tensors["w"].shards
    )


def test_also_a_large_one_of_which_only_pieces_are_compared(tmp_path: Path) -> None:
    full = numbers({"frozen": (64, 4096), "b": (4,)})
    write_ranks(tmp_path, full, Strategy.of({"frozen": ROWS, "b": Layout.of([4], [-1])}))
    with refused(SourceError, "unlisted-tensor", "'frozen'"):
        reshard.open(tmp_path, strategy=Strategy.of({"b": Layout.of([4], [-1])}))


def test_a_rule_that_makes_replicas_of_what_differs_is_refused(root: Path) -> None:
    with refused(SourceError, "replicas-differ-by-rule", "rank 0", "rank 1", "whole"):
        reshard.open(root, strategy=STRATEGY, layout={"w": "whole"})


def test_unlisted_tensors_of_different_shapes_are_refused(root: Path) -> None:
    write_file(
        root / "rank_3" / "checkpoint_3.safetensors", {**blocks(FULL, STRATEGY, 3), "x": np.zeros(3, np.float32)}
    )
    write_file(
        root / "rank_2" / "checkpoint_2.safetensors", {**blocks(FULL, STRATEGY, 2), "x": np.zeros(2, np.float32)}
    )
    with refused(SourceError, "unlisted-tensor", "'x'", "float32", "[3]", "rank 3"):
        reshard.open(root, strategy=STRATEGY)


def test_listed_tensors_that_every_rank_holds_whole_are_refused(tmp_path: Path) -> None:
    """`integrated_save=True` stores whole tensors though the strategy splits them."""
    for rank in range(4):
        write_file(tmp_path / f"rank_{rank}" / "net.ckpt", FULL, "ckpt")
    with refused(SourceError, "saved-whole", "layout={'*': 'whole'}"):
        reshard.open(tmp_path, strategy=STRATEGY)
    source = reshard.open(tmp_path, strategy=STRATEGY, layout={"*": "whole"})
    assert source.tensors["w"].spec.shape == (8, 4)


def test_a_json_strategy_tells_whole_tensors_by_their_shape(tmp_path: Path) -> None:
    for rank in range(4):
        write_file(tmp_path / f"rank_{rank}" / "net.ckpt", {"w": np.zeros((8, 4), np.float32)}, "ckpt")
    strategy = Strategy.of({"w": ROWS}, shapes={"w": (8, 4)})
    with refused(SourceError, "saved-whole", "[32, 4]", "[8, 4]"):
        reshard.open(tmp_path, strategy=strategy)


def test_equal_constant_blocks_tell_nothing(tmp_path: Path) -> None:
    write_ranks(tmp_path, {"w": np.ones((8, 4), np.float32)}, Strategy.of({"w": ROWS}))
    assert reshard.open(tmp_path, strategy=Strategy.of({"w": ROWS})).warnings == ()


@pytest.mark.parametrize("shape", [(8, 4), (512, 4096)], ids=["small", "large"])
def test_one_tensor_that_is_whole_among_split_ones_is_refused(tmp_path: Path, shape: tuple[int, int]) -> None:
    full = {**FULL, "table": np.tile(np.arange(shape[1], dtype=np.float32), (shape[0], 1))}
    strategy = Strategy.of({"w": ROWS, "b": Layout.of([4], [-1]), "table": ROWS})
    write_ranks(tmp_path, full, strategy)
    with refused(SourceError, "saved-whole", "'table'", "whole"):
        reshard.open(tmp_path, strategy=strategy)
    source = reshard.open(tmp_path, strategy=strategy, layout={"table": "4:0,-1"})
    assert source.tensors["table"].spec.shape == shape


def test_constants_of_which_nobody_knows_whether_they_are_whole_are_warned_of(tmp_path: Path) -> None:
    full = {**FULL, "zero": np.zeros(8, np.float32)}
    strategy = Strategy.of({"w": ROWS, "b": Layout.of([4], [0]), "zero": Layout.of([4], [0])})
    for rank in range(4):
        tensors = {**blocks(full, strategy, rank), "b": FULL["b"]}
        write_file(tmp_path / f"rank_{rank}" / "net.ckpt", tensors, "ckpt")
    with refused(SourceError, "saved-whole", "'b'"):
        reshard.open(tmp_path, strategy=strategy)
    (notice,) = reshard.open(tmp_path, strategy=strategy, layout={"b": "whole"}).warnings
    assert notice.startswith("zero: constant, and equal on all ranks")


# --- replicas that are none ---

WHOLE = Layout.of([4], [-1, -1])


@pytest.mark.parametrize("columns", [4, 8192], ids=["small", "large"])
@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
def test_a_strategy_that_says_whole_of_what_is_split_is_refused(tmp_path: Path, columns: int, format: str) -> None:
    full = numbers({"w": (8, columns), "v": (8, 4)})
    write_ranks(tmp_path, full, Strategy.of({"w": ROWS, "v": ROWS}), format)
    wrong = Strategy.of({"w": WHOLE, "v": ROWS})
    with refused(SourceError, "replicas-differ", "'w'", "rank 0", "rank 1"):
        reshard.open(tmp_path, strategy=wrong)


def test_every_axis_along_which_a_tensor_may_be_split_is_looked_at(tmp_path: Path) -> None:
    """With one pair of replicas a tensor: the first and the last rank differ on all axes of the mesh."""
    full = numbers({f"w{axis}.{number}": (8, 4) for axis in range(3) for number in range(4)})
    mesh = [2, 2, 2]
    truth = {name: Layout.of(mesh, [2 - int(name[1]), -1]) for name in full}
    write_ranks(tmp_path, full, Strategy.of(truth))
    for name in full:
        wrong = Strategy.of({**truth, name: Layout.of(mesh, [-1, -1])})
        with refused(SourceError, "replicas-differ", name):
            reshard.open(tmp_path, strategy=wrong)


def test_the_number_of_reads_is_bounded_and_what_was_looked_at_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = numbers({f"layers.{n}.{kind}": (2, 4) for n in range(100) for kind in ("a", "b", "c", "d")})
    strategy = Strategy.of(dict.fromkeys(full, WHOLE))
    write_ranks(tmp_path, full, strategy)
    assert reshard.open(tmp_path, strategy=strategy)._record.opening.looked == (400, 400, 1200, 1200, 1200)
    monkeypatch.setattr(probe, "_MOST_READS", 300)
    looked = reshard.open(tmp_path, strategy=strategy)._record.opening.looked
    assert looked == (100, 400, 200, 200, 1200)
    wrong = {**full, **{name: -value for name, value in full.items() if name.endswith(".c")}}
    write_file(tmp_path / "rank_3" / "checkpoint_3.safetensors", wrong)
    with refused(SourceError, "replicas-differ", "rank 0", "rank 3"):
        reshard.open(tmp_path, strategy=strategy)  # one kind of tensor in a hundred layers is not missed


def test_scalars_that_differ_are_noticed_and_kept_apart(tmp_path: Path) -> None:
    for rank in range(4):
        tensors = {**blocks(FULL, STRATEGY, rank), "loss_scale": np.array(rank, np.float32), "note": f"rank {rank}"}
        write_file(tmp_path / f"rank_{rank}" / "net.ckpt", tensors, "ckpt")
    source = reshard.open(tmp_path, strategy=STRATEGY)
    assert source.tensors["loss_scale"].varies
    assert len(source.warnings) == 2


# --- found by a second reader ---


def test_a_tensor_that_no_file_holds_is_missing_from_a_whole_model(tmp_path: Path) -> None:
    root = write_ranks(tmp_path, {"w": FULL["w"]}, STRATEGY)
    source = reshard.open(root, strategy=STRATEGY)
    with refused(SourceError, "missing-tensor", "tensor 'b'", "allow_missing='b'"):
        reshard.plan(source)
    assert reshard.plan(source, allow_missing=["b"]).missing == ("b",)


def test_a_stage_whose_ranks_are_gone_is_missed(tmp_path: Path) -> None:
    strategy = Strategy.of({"w": {0: Layout.of([2], [0, -1])}, "v": {1: Layout.of([2], [0])}})
    write_ranks(tmp_path, {"w": FULL["w"], "v": FULL["b"]}, strategy)
    for rank in (2, 3):
        (tmp_path / f"rank_{rank}" / f"checkpoint_{rank}.safetensors").unlink()
    with refused(SourceError, "missing-replicas", "ranks 2-3", "the 4"):
        reshard.open(tmp_path, strategy=strategy)


def test_one_stage_of_a_pipeline_says_what_is_left_out(tmp_path: Path) -> None:
    strategy = Strategy.of({"w": {0: Layout.of([2], [0, -1])}, "v": {1: Layout.of([2], [0])}})
    write_ranks(tmp_path, {"w": FULL["w"], "v": FULL["b"]}, strategy)
    for stage, name in ((0, "w"), (1, "v")):
        source = reshard.open(tmp_path, strategy=strategy, stage=stage)
        assert (list(source), source._record.opening.stage, len(source._record.files)) == ([name], stage, 2)
    with refused(StrategyError, "one-stage", "stage 0", "files of other stages are there", "stage=0"):
        reshard.open(tmp_path, strategy=strategy.of_stage(0))
    first = reshard.open(tmp_path, strategy=strategy.of_stage(0), stage="own")
    assert first._record.opening.stage == 0
    (notice,) = first.warnings
    assert notice.startswith("the strategy is that of stage 0 of a pipeline: of 4 ranks only 0-1 are read")
    plan = reshard.plan(first, Strategy.of({"w": Layout.of([4], [0, -1]), "v": Layout.of([4], [0])}))
    assert [file.path for file in plan._record.files][:1] == ["rank_0/checkpoint_0_part0.safetensors"]


def test_every_stage_that_holds_a_shared_tensor_is_checked(tmp_path: Path) -> None:
    layout = Layout.of([2], [0, -1])
    strategy = Strategy.of({"tied": {0: layout, 1: layout}})
    write_ranks(tmp_path, {"tied": FULL["w"]}, strategy)
    write_file(tmp_path / "rank_3" / "checkpoint_3.safetensors", {"tied": np.zeros((3, 4), np.float64)})
    with refused(SourceError, "mixed-dtypes", "'tied'", "float64", "float32"):
        reshard.open(tmp_path, strategy=strategy)


def test_constants_beside_whole_tensors_are_named_with_them(tmp_path: Path) -> None:
    """Zero biases look whole and split alike; where nothing is known to be split they must be ruled too."""
    full = {"w": FULL["w"], "zero": np.zeros(4, np.float32)}
    strategy = Strategy.of({"w": ROWS, "zero": Layout.of([4], [0])})
    for rank in range(4):
        write_file(tmp_path / f"rank_{rank}" / "net.ckpt", full, "ckpt")
    for rules in ({}, {"w": "whole"}):
        with refused(SourceError, "saved-whole", "'zero'"):
            reshard.open(tmp_path, strategy=strategy, layout=rules)
    assert reshard.open(tmp_path, strategy=strategy, layout={"*": "whole"}).tensors["zero"].spec.shape == (4,)


def test_a_value_of_its_own_for_every_rank(tmp_path: Path) -> None:
    for rank in range(4):
        tensors = {**blocks(FULL, STRATEGY, rank), "rng": np.array([rank, 1], np.int64)}
        write_file(tmp_path / "src" / f"rank_{rank}" / "net.ckpt", tensors, "ckpt")
    with refused(SourceError, "unlisted-tensor", "'rng'"):
        reshard.open(tmp_path / "src", strategy=STRATEGY)
    source = reshard.open(tmp_path / "src", strategy=STRATEGY, layout={"rng": "copy"})
    plan = reshard.plan(source, STRATEGY)
    plan.run(tmp_path / "out")
    for rank in range(4):
        written = reshard.open(tmp_path / "out" / f"rank_{rank}" / f"checkpoint_{rank}.ckpt")["rng"].compute()
        assert written.tolist() == plan.rank(rank)["rng"].compute().tolist() == [rank, 1]


PIPE = numbers({"w": (4, 4), "tied": (4, 4), "v": (4,)})
STAGES = Strategy.of(
    {
        "w": {0: Layout.of([2], [0, -1])},
        "tied": {0: Layout.of([2], [0, -1]), 1: Layout.of([2], [-1, -1])},
        "v": {1: Layout.of([2], [0])},
    }
)


def test_replicas_in_later_stages_are_looked_at_too(tmp_path: Path) -> None:
    write_ranks(tmp_path, PIPE, STAGES)
    assert reshard.open(tmp_path, strategy=STAGES)._record.opening.looked == (3, 3, 1, 1, 1)
    wrong = {**blocks(PIPE, STAGES, 3), "tied": -PIPE["tied"]}
    write_file(tmp_path / "rank_3" / "checkpoint_3.safetensors", wrong)
    with refused(SourceError, "replicas-differ", "'tied'", "rank 2", "rank 3"):
        reshard.open(tmp_path, strategy=STAGES)


def test_a_tensor_in_files_of_a_stage_that_shall_not_have_it_is_refused(tmp_path: Path) -> None:
    write_ranks(tmp_path, PIPE, STAGES)
    first_only = {name: {p.stage: p.layout for p in places} for name, places in STAGES.tensors.items()}
    del first_only["tied"][1]
    with refused(SourceError, "wrong-stage", "'tied'", "ranks 2-3", "stage 0"):
        reshard.open(tmp_path, strategy=Strategy.of(first_only))


def test_a_selection_of_which_all_is_dropped_is_refused(root: Path) -> None:
    source = reshard.open(root, strategy=STRATEGY)
    with refused(UsageError, "no-tensors"):
        reshard.plan(
            source, Strategy.of({"b": STRATEGY.tensors["b"][0].layout}), selection=Selection(include=["w"]), drop=["w"]
        )


def test_files_that_were_replaced_are_read_anew_by_a_relative_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is held open goes by name: a file must not have two."""
    monkeypatch.chdir(tmp_path)
    for sign in (1, -1):
        full = {name: sign * array for name, array in FULL.items()}
        for rank in range(4):
            new = write_file(tmp_path / "new", blocks(full, STRATEGY, rank))
            (tmp_path / "src" / f"rank_{rank}").mkdir(parents=True, exist_ok=True)
            new.replace(tmp_path / "src" / f"rank_{rank}" / f"checkpoint_{rank}.safetensors")
        for _ in range(3):
            source = reshard.open("src", strategy=STRATEGY)
            assert source["w"].compute(scheduler="threads").tolist() == full["w"].tolist()
