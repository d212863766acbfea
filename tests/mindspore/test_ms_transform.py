"""`transform_checkpoints` and its kin: what the recorded calls do not show, and every documented error."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import helpers
import numpy as np
import pytest
from checkpoints import assert_rank_files, blocks, numbers, tree, write_file, write_ranks
from ms_files import refused_as_mindspore
from refusals import refused

import reshard
import reshard.mindspore as ms
from reshard.core.layout.layout import Layout
from reshard.errors import SourceError, StrategyError, TargetError, UsageError
from reshard.mindspore.arguments import check_order
from reshard.strategy.strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Iterator

FULL = numbers({"net.w": (8, 12), "net.b": (8,), "adam_m.net.w": (8, 12)})
STEP = {"global_step": np.array(7, np.int32)}
SOURCE = Strategy.of(
    {"net.w": Layout.of([2, 2], [1, 0]), "net.b": Layout.of([2, 2], [1]), "adam_m.net.w": Layout.of([4], [0, -1])}
)
TARGET = Strategy.of(
    {"net.w": Layout.of([2], [-1, 0]), "net.b": Layout.of([2], [-1], -1), "adam_m.net.w": Layout.of([2], [-1, 0])}
)
OTHER = Strategy.of({"encoder.w": Layout.of([2], [0, -1])})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_ranks(tmp_path / "src", FULL, SOURCE, "ckpt", STEP)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    with caplog.at_level(logging.WARNING, "reshard.mindspore"):
        yield lambda: [record.message for record in caplog.records]


def rank_map(source: Path, ranks: list[int], extension: str = "ckpt") -> dict[int, str]:
    return {rank: str(source / f"rank_{rank}" / f"checkpoint_{rank}.{extension}") for rank in ranks}


def assert_files(root: Path, strategy: Strategy = TARGET) -> None:
    """Each rank has one file, of its slices and the copy."""
    for rank in strategy.ranks:
        (path,) = (root / f"rank_{rank}").iterdir()
        expected = {**blocks(FULL, strategy, rank), **STEP}
        assert {name: content for name, (_, _, content) in helpers.read_rank_file(path).items()} == {
            name: np.ascontiguousarray(block).tobytes() for name, block in expected.items()
        }


# --- what works ---


def test_strategies_come_in_every_form(source: Path, tmp_path: Path) -> None:
    for extension in ("ckpt", "json"):
        reshard.write_strategy(SOURCE, tmp_path / f"src.{extension}")
        reshard.write_strategy(TARGET, tmp_path / f"dst.{extension}")
    folder = tmp_path / "stages"
    folder.mkdir()
    shutil.copy(tmp_path / "src.ckpt", folder / "src_strategy_0.ckpt")
    target = ms.build_searched_strategy(tmp_path / "dst.json")
    listed = {
        name: (list(p[0].layout.dev_matrix), [0, -1][: len(FULL[name].shape)]) for name, p in TARGET.tensors.items()
    }
    for number, (before, after) in enumerate(
        [
            (str(tmp_path / "src.ckpt"), tmp_path / "dst.json"),
            (folder, TARGET),
            (ms.build_searched_strategy(folder), target),
        ]
    ):
        ms.transform_checkpoints(source, tmp_path / f"{number}", "checkpoint_", before, after)
        assert_files(tmp_path / f"{number}")
    ms.transform_checkpoints(source, tmp_path / "rows", "checkpoint_", SOURCE, listed)  # as infer_predict_layout has it
    rows = Strategy.of({name: Layout.of(*layout) for name, layout in listed.items()})
    assert_files(tmp_path / "rows", rows)


def test_a_merged_strategy_as_a_dict(tmp_path: Path) -> None:
    layout = Layout.of([2], [0, -1])
    pipeline = Strategy.of({"net.w": {0: layout}, "adam_m.net.w": {1: layout}, "net.b": {0: Layout.of([2], [0])}})
    root = write_ranks(tmp_path / "src", FULL, pipeline)
    reshard.write_strategy(pipeline, tmp_path / "merged.ckpt")
    merged = ms.build_searched_strategy(tmp_path / "merged.ckpt")
    assert merged is not None
    assert set(merged) == {"0-net.w", "0-net.b", "1-adam_m.net.w"}
    ms.transform_checkpoints(root, tmp_path / "out", "checkpoint_", merged, TARGET)
    assert_rank_files(tmp_path / "out", FULL, TARGET)


def test_what_a_strategy_drops_or_lacks_is_a_warning_and_no_slice(source: Path, tmp_path: Path, warnings: Any) -> None:
    target = Strategy.of({"net.w": Layout.of([2], [-1, 0]), "lora.a": Layout.of([2], [0])})
    ms.transform_checkpoints(source, tmp_path / "out", "checkpoint_", SOURCE, target)
    for rank in range(2):
        assert set(helpers.read_rank_file(tmp_path / f"out/rank_{rank}/checkpoint_{rank}.ckpt")) == {
            "net.w",
            "global_step",
        }
    assert [message.partition(": ")[2] for message in warnings()] == [
        "left out, as the target strategy does not name it: net.b, adam_m.net.w",
        "left out, as it is in the strategy and in no file: lora.a",
    ]


def test_several_ranks_without_a_strategy_must_agree(tmp_path: Path) -> None:
    """MindSpore takes rank 0 and does not look at the others."""
    for rank in range(3):
        write_file(tmp_path / "src" / f"rank_{rank}" / "a.ckpt", {**FULL, **STEP}, "ckpt")
    ms.transform_checkpoints(tmp_path / "src", tmp_path / "out", "checkpoint_", None, TARGET)
    assert_files(tmp_path / "out")
    ms.transform_checkpoint_by_rank(0, {0: tmp_path / "src/rank_0/a.ckpt"}, tmp_path / "one.ckpt", None, TARGET)
    assert (tmp_path / "one.ckpt").read_bytes() == (tmp_path / "out/rank_0/checkpoint_0.ckpt").read_bytes()

    write_file(tmp_path / "src" / "rank_2" / "a.ckpt", {**FULL, "net.w": FULL["net.w"] + 1}, "ckpt")
    some = {1: tmp_path / "src/rank_1/a.ckpt", 0: tmp_path / "src/rank_0/a.ckpt"}
    ms.transform_checkpoint_by_rank(1, some, tmp_path / "two.ckpt", None, TARGET)
    assert (tmp_path / "two.ckpt").read_bytes() == (tmp_path / "out/rank_1/checkpoint_1.ckpt").read_bytes()
    with refused(SourceError, "replicas-differ-by-rule", "'net.w'", "rank 0 and rank 2"):
        ms.transform_checkpoints(tmp_path / "src", tmp_path / "no", "checkpoint_", None, TARGET)


def test_replicas_may_be_missing_as_in_mindspore(tmp_path: Path, warnings: Any) -> None:
    source = Strategy.of({name: Layout.of([2, 2], [1] + [-1] * (FULL[name].ndim - 1)) for name in FULL})
    root = write_ranks(tmp_path / "src", FULL, source)
    shutil.rmtree(root / "rank_1")
    ms.transform_checkpoints(root, tmp_path / "out", "checkpoint_", source, TARGET)
    assert_rank_files(tmp_path / "out", FULL, TARGET)
    (warning,) = warnings()
    assert "rank 1 has no file" in warning


def test_mindspores_rule_for_sub_networks_holds_for_ckpt_files(source: Path, tmp_path: Path) -> None:
    """Both one stage, the source's names but for states a strict subset of the target's."""
    more = Strategy.of({**{n: p[0].layout for n, p in TARGET.tensors.items()}, "head.w": Layout.of([2], [0, -1])})
    states = Strategy.of(
        {**{n: p[0].layout for n, p in TARGET.tensors.items()}, "adam_v.net.w": Layout.of([2], [0, -1])}
    )
    ms.transform_checkpoints(source, tmp_path / "more", "checkpoint_", SOURCE, more)
    ms.transform_checkpoints(source, tmp_path / "states", "checkpoint_", SOURCE, states)
    assert sorted(tree(tmp_path / "more")) == [f"rank_{rank}/checkpoint_{rank}_part0.ckpt" for rank in range(2)]
    assert sorted(tree(tmp_path / "states")) == [f"rank_{rank}/checkpoint_{rank}.ckpt" for rank in range(2)]

    root = write_ranks(tmp_path / "st", FULL, SOURCE)
    ms.transform_checkpoints(root, tmp_path / "safe", "checkpoint_", SOURCE, more)
    assert sorted(tree(tmp_path / "safe")) == [f"rank_{rank}/checkpoint_{rank}.ckpt" for rank in range(2)]


def test_by_rank_writes_either_format_and_whole_tensors(source: Path, tmp_path: Path) -> None:
    ranks = ms.rank_list_for_transform(0, SOURCE, None)
    assert ranks == [3, 2, 1, 0]
    for rank, extension in ((0, "ckpt"), (3, "safetensors")):  # without a strategy there is one rank, of any number
        path = tmp_path / f"whole.{extension}"
        ms.transform_checkpoint_by_rank(rank, rank_map(source, ranks), str(path), SOURCE)
        found = helpers.read_rank_file(path)
        assert {name: content for name, (_, _, content) in found.items()} == {
            name: value.tobytes() for name, value in {**FULL, **STEP}.items()
        }


def test_by_rank_of_a_deduplicated_source_loses_nothing(mindspore_data: Path, tmp_path: Path) -> None:
    """The strategy says that a rank has what its file leaves to another."""
    folder = mindspore_data / "deduplicated" / "tut_src8"
    before = mindspore_data / "real" / "tut_src8" / "strategy_0.ckpt"
    files = {rank: next((folder / f"rank_{rank}").iterdir()) for rank in range(8)}
    ms.transform_checkpoint_by_rank(0, files, tmp_path / "all.ckpt", before)
    some = {rank: files[rank] for rank in ms.rank_list_for_transform(0, before)}
    assert len(some) < 8
    with refused(SourceError, "missing-ranks", "rank_2", "net.layer1.weight", "ranks 1,3-7"):
        ms.transform_checkpoint_by_rank(0, some, tmp_path / "some.ckpt", before)
    assert not (tmp_path / "some.ckpt").exists()


def test_a_unified_set_is_a_source_too(source: Path, tmp_path: Path) -> None:
    ms.unified_safetensors(source, SOURCE, tmp_path / "unified")
    ms.transform_checkpoints(tmp_path / "unified", tmp_path / "out", "checkpoint_", None, TARGET)
    assert_files(tmp_path / "out")


def test_segments_are_loaded_together(tmp_path: Path, warnings: Any) -> None:
    write_file(tmp_path / "rank_0" / "x0_part0.ckpt", {"net.w": FULL["net.w"], **STEP}, "ckpt")
    write_file(tmp_path / "rank_0" / "x0_part1.ckpt", {"net.b": FULL["net.b"], **STEP, "note": "text"}, "ckpt")
    (tmp_path / "rank_0" / "x0_part2.ckpt").write_bytes(b"")  # a stage of which this rank has nothing
    net = {name: ms.Parameter(np.zeros_like(FULL[name]), name) for name in ("net.w", "net.b")}
    loaded = ms.load_segmented_checkpoints(str(tmp_path / "rank_0"), net)
    assert set(loaded) == {"net.w", "net.b", "global_step", "note"}
    assert loaded["note"] == "text"
    assert np.array_equal(net["net.b"].asnumpy(), FULL["net.b"])
    assert warnings() == []  # of parameters that the other part has
    chosen = ms.load_segmented_checkpoints(str(tmp_path / "rank_0"), choice_func=lambda name: name.startswith("net"))
    assert set(chosen) == {"net.w", "net.b"}
    assert set(ms.load_segmented_checkpoints(tmp_path / "rank_0", filter_prefix="net")) == {"global_step", "note"}
    with refused(UsageError, "no-tensors", "x0_part0.ckpt"):
        ms.load_segmented_checkpoints(tmp_path / "rank_0", specify_prefix="head")


def test_two_steps_are_no_segments(tmp_path: Path) -> None:
    """By their names step 10 comes before step 9, which then counted."""
    write_file(tmp_path / "net-9_1.ckpt", {"net.w": FULL["net.w"] + 1, **STEP}, "ckpt")
    write_file(tmp_path / "net-10_1.ckpt", {"net.w": FULL["net.w"], **STEP}, "ckpt")
    with refused(SourceError, "files-disagree", "'net.w'", "net-9_1.ckpt"):
        ms.load_segmented_checkpoints(tmp_path)
    assert set(ms.load_segmented_checkpoints(tmp_path, filter_prefix="net.w")) == {"global_step"}


def test_files_in_the_order_of_their_text_are_refused(source: Path, tmp_path: Path) -> None:
    right = rank_map(source, [0, 1, 2, 3])
    ms.transform_checkpoint_by_rank(0, right, tmp_path / "right.ckpt", SOURCE)
    swapped = {0: right[0], 1: right[2], 2: right[1], 3: right[3]}
    with refused(UsageError, "wrong-rank", "checkpoint_files_map", "0, 2, 1, 3"):
        ms.transform_checkpoint_by_rank(0, swapped, tmp_path / "wrong.ckpt", SOURCE)
    assert not (tmp_path / "wrong.ckpt").exists()
    with refused(UsageError, "wrong-rank", "checkpoint_filenames", "0, 2, 1, 3"):
        ms.load_distributed_checkpoint({}, list(swapped.values()), None, SOURCE)
    check_order("files", {0: Path("rank_1/a"), 1: Path("rank_1/a"), 2: Path("rank_0/a")})  # replicas
    check_order("files", {0: Path("rank_8/a"), 1: Path("rank_9/a"), 2: Path("rank_10/a")})  # of stage 1
    check_order("files", {0: Path("b"), 1: Path("a")})
    with refused(UsageError, "wrong-rank", "files", "0, 10, 2"):
        check_order("files", {n: Path(f"rank{r}/a.ckpt") for n, r in enumerate((0, 10, 2))})


def test_files_of_ranks_that_the_strategy_lacks_are_refused(source: Path, tmp_path: Path) -> None:
    rows = Layout.of([2], [0, -1])
    strategy = Strategy.of({"net.w": {0: rows, 1: rows}}).of_stage(0)
    with refused(SourceError, "strategy-mismatch", "ranks 2-3"):
        ms.transform_checkpoint_by_rank(0, rank_map(source, [0, 1, 2, 3]), tmp_path / "a.ckpt", strategy)
    assert not (tmp_path / "a.ckpt").exists()


# --- what is refused ---


@pytest.mark.parametrize(
    ("code", "place", "arguments"),
    [
        ("unknown-format", "'npz'", {"output_format": "npz"}),
        ("out-of-range", "process_num", {"process_num": 0}),
        ("bad-name", "../x", {"ckpt_prefix": "../x"}),
        ("empty-value", "src_checkpoints_dir", {"src_checkpoints_dir": ""}),
        ("empty-value", "dst_checkpoints_dir", {"dst_checkpoints_dir": ""}),
        ("empty-value", "src_strategy_file", {"src_strategy_file": ""}),
        ("strategy-mismatch", "ranks 0-3", {"src_strategy_file": {}}),
        ("not-found", "nowhere", {"dst_strategy_file": "nowhere"}),
        ("", "dst_checkpoints_dir", {"dst_checkpoints_dir": 5}),
        ("", "src_strategy_file", {"src_strategy_file": 5}),
        ("", "process_num", {"process_num": "2"}),
    ],
)
def test_wrong_arguments(source: Path, tmp_path: Path, code: str, place: str, arguments: dict[str, Any]) -> None:
    """Of another value, or of another type."""
    call = {
        "src_checkpoints_dir": source, "dst_checkpoints_dir": tmp_path / "out", "ckpt_prefix": "c_",
        "src_strategy_file": SOURCE, "dst_strategy_file": TARGET, **arguments,
    }  # fmt: skip
    with refused_as_mindspore(ValueError if code else TypeError, code, place):
        ms.transform_checkpoints(**call)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("code", "place", "arguments"),
    [
        ("unknown-format", "'npz'", {"save_checkpoint_file_name": "a.npz"}),
        ("no-such-rank", "rank 2", {"rank_id": 2}),
        ("out-of-range", "rank_id", {"rank_id": -1}),
        ("bad-argument", "{}", {"checkpoint_files_map": {}}),
        ("not-found", "nowhere.ckpt", {"checkpoint_files_map": {3: "nowhere.ckpt"}}),
        ("", "rank_id", {"rank_id": "0"}),
        ("", "checkpoint_files_map", {"checkpoint_files_map": {"0": "a"}}),
        ("", "save_checkpoint_file_name", {"save_checkpoint_file_name": 5}),
    ],
)
def test_wrong_arguments_by_rank(
    source: Path, monkeypatch: pytest.MonkeyPatch, code: str, place: str, arguments: dict[str, Any]
) -> None:
    monkeypatch.chdir(source)
    before = tree(source)
    call: dict[str, Any] = {
        "rank_id": 0, "checkpoint_files_map": rank_map(source, [0, 1, 2, 3]), "save_checkpoint_file_name": "a.ckpt",
        "src_strategy_file": SOURCE, "dst_strategy_file": TARGET, **arguments,
    }  # fmt: skip
    with refused_as_mindspore(ValueError if code else TypeError, code, place):
        ms.transform_checkpoint_by_rank(**call)
    assert tree(source) == before
    if "rank_id" in arguments:
        with refused_as_mindspore(ValueError if code else TypeError, code, place):
            ms.rank_list_for_transform(arguments["rank_id"], SOURCE, TARGET)


def test_directories_that_are_none(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty" / "rank_0").mkdir(parents=True)
    with refused(NotADirectoryError, "not-a-directory", "src_checkpoints_dir", tmp_path / "nowhere"):
        ms.transform_checkpoints(tmp_path / "nowhere", tmp_path / "out", "x", SOURCE, TARGET)
    with refused(NotADirectoryError, "not-a-directory", "dst_checkpoints_dir", tmp_path / "file"):
        ms.transform_checkpoints(source, tmp_path / "file", "x", SOURCE, TARGET)
    with refused(ValueError, "not-a-directory", "ckpt_file_dir", tmp_path / "file"):
        ms.load_segmented_checkpoints(str(tmp_path / "file"))
    with refused(StrategyError, "not-a-strategy", tmp_path / "file"):
        ms.transform_checkpoints(source, tmp_path / "out", "x", tmp_path / "file", TARGET)
    with refused(ValueError, "no-checkpoint", tmp_path / "empty"):
        ms.transform_checkpoints(tmp_path / "empty", tmp_path / "out", "x", SOURCE, TARGET)
    with refused(ValueError, "no-checkpoint", tmp_path / "empty" / "rank_0"):
        ms.load_segmented_checkpoints(tmp_path / "empty" / "rank_0")


def test_a_strategy_of_another_model(source: Path, tmp_path: Path) -> None:
    with refused(StrategyError, "other-strategy", "target strategy", "src", "it has encoder.w", "files have net.w"):
        ms.transform_checkpoints(source, tmp_path / "out", "x", SOURCE, OTHER)
    with refused(SourceError, "strategy-mismatch", source, "ranks 2-3", "ranks 0 to 1"):
        ms.transform_checkpoints(source, tmp_path / "out", "x", OTHER, TARGET)
    alike = write_ranks(
        tmp_path / "alike", FULL, Strategy.of({name: Layout.of([2], [-1] * v.ndim) for name, v in FULL.items()})
    )
    with refused(StrategyError, "other-strategy", "source strategy", alike, "encoder.w"):
        ms.transform_checkpoints(alike, tmp_path / "out", "x", OTHER, TARGET)
    with refused(StrategyError, "other-strategy", "target strategy", "encoder.w"):
        ms.transform_checkpoint_by_rank(0, rank_map(source, [0, 1, 2, 3]), tmp_path / "a.ckpt", SOURCE, OTHER)
    assert not (tmp_path / "out").exists()


def test_a_source_file_is_never_overwritten(source: Path) -> None:
    before = tree(source)
    with refused(TargetError, "target-is-source", source / "rank_0/checkpoint_0.ckpt"):
        ms.transform_checkpoints(source, source, "checkpoint_", SOURCE, TARGET)
    ranks = ms.rank_list_for_transform(0, SOURCE, TARGET)
    with refused(TargetError, "target-is-source", source / "rank_0/checkpoint_0.ckpt"):
        ms.transform_checkpoint_by_rank(0, rank_map(source, ranks), source / "rank_0/checkpoint_0.ckpt", SOURCE, TARGET)
    assert tree(source) == before


def test_a_missing_rank_is_told_with_what_needs_it(source: Path, tmp_path: Path) -> None:
    shutil.rmtree(source / "rank_3")
    with refused(SourceError, "missing-ranks", source, "rank 3", "2 tensors", "net.w, adam_m.net.w"):
        ms.transform_checkpoints(source, tmp_path / "out", "x", SOURCE, TARGET)
    columns = Strategy.of({"net.w": Layout.of([2], [-1, 0]), "net.b": Layout.of([2], [0])})
    for rank in (0, 1):
        given = [other for other in ms.rank_list_for_transform(rank, SOURCE, columns) if other != 3]
        files = rank_map(source, given)
        if rank == 0:
            ms.transform_checkpoint_by_rank(rank, files, tmp_path / "0.ckpt", SOURCE, columns)
            continue
        with refused(SourceError, "missing-block", "rank 3", "net.w", "net.b"):
            ms.transform_checkpoint_by_rank(rank, files, tmp_path / "1.ckpt", SOURCE, columns)
    assert not (tmp_path / "out").exists()


def test_tensors_of_a_stage_without_files_are_not_lost(tmp_path: Path) -> None:
    rows = Layout.of([2], [0, -1])
    pipeline = Strategy.of({"net.w": {0: rows}, "adam_m.net.w": {1: rows}, "net.b": {1: Layout.of([2], [0])}})
    root = write_ranks(tmp_path / "src", FULL, pipeline)
    for rank in (2, 3):
        shutil.rmtree(root / f"rank_{rank}")
    with refused(SourceError, "missing-ranks", "adam_m.net.w", "net.b", "ranks 2-3"):
        ms.transform_checkpoints(root, tmp_path / "out", "x", pipeline, TARGET)
    with refused(SourceError, "missing-ranks", "adam_m.net.w", "net.b", "ranks 2-3"):
        ms.transform_checkpoint_by_rank(
            0, rank_map(root, [0, 1], "safetensors"), tmp_path / "out/a.ckpt", pipeline, TARGET
        )
    with refused(SourceError, "missing-ranks", "adam_m.net.w", "net.b", "ranks 2-3"):
        ms.unified_safetensors(root, pipeline, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_tensors_that_only_one_replica_stores_are_not_lost(tmp_path: Path) -> None:
    """Nothing in `.ckpt` files says that they are de-duplicated, but that ranks of a stage have others."""
    same = Strategy.of({name: Layout.of([3], [-1] * FULL[name].ndim) for name in FULL})
    files = {
        rank: write_file(tmp_path / f"rank_{rank}" / "a.ckpt", {name: FULL[name]}, "ckpt")
        for rank, name in enumerate(FULL)
    }
    ms.transform_checkpoint_by_rank(0, files, tmp_path / "all.ckpt", same)
    with refused(SourceError, "missing-ranks", "adam_m.net.w", "rank 2"):
        ms.transform_checkpoint_by_rank(0, {rank: files[rank] for rank in (0, 1)}, tmp_path / "some.ckpt", same)
    assert not (tmp_path / "some.ckpt").exists()
