"""`transform_checkpoints` and its kin: what the recorded calls do not show, and every documented error."""

from __future__ import annotations

import inspect
import json
import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import helpers
import numpy as np
import pytest
from checkpoints import assert_rank_files, blocks, numbers, tree, write_file, write_ranks
from refusals import refused
from test_mindspore_peer import PYTHON, mindspore

import reshard
import reshard.mindspore as ms
from reshard.core.layout.layout import Layout
from reshard.errors import SourceError, StrategyError, TargetError, UsageError
from reshard.mindspore.arguments import check_order
from reshard.strategy.strategy import Placed, Strategy

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


@pytest.mark.parametrize("function", [ms.transform_checkpoints, ms.convert_checkpoints])
def test_ckpt_becomes_safetensors_which_mindspore_refuses(source: Path, tmp_path: Path, function: Any) -> None:
    function(str(source), str(tmp_path / "out"), "checkpoint_", SOURCE, TARGET, output_format="safetensors")
    assert_files(tmp_path / "out")
    assert {path.suffix for path in (tmp_path / "out").rglob("*.*")} == {".safetensors"}


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


def test_the_names_are_in_parallel_too() -> None:
    """MindSpore's own pages write `ms.parallel.rank_list_for_transform`."""
    for name in ms.parallel.__all__:
        assert getattr(ms.parallel, name) is getattr(ms, name)


def test_existing_files_are_replaced(source: Path, tmp_path: Path) -> None:
    old = write_file(tmp_path / "out" / "rank_0" / "checkpoint_0.ckpt", {"old": np.zeros(3)}, "ckpt")
    ms.transform_checkpoints(source, tmp_path / "out", "checkpoint_", SOURCE, TARGET)
    assert "old" not in helpers.read_rank_file(old)
    assert_files(tmp_path / "out")


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
    with refused(SourceError, "no-layout", "src_strategy_file", "3 source ranks", "'net.w'", "rank 0 and rank 2"):
        ms.transform_checkpoints(tmp_path / "src", tmp_path / "no", "checkpoint_", None, TARGET)


def test_replicas_may_be_missing_as_in_mindspore(tmp_path: Path, warnings: Any) -> None:
    source = Strategy.of({name: Layout.of([2, 2], [1] + [-1] * (FULL[name].ndim - 1)) for name in FULL})
    root = write_ranks(tmp_path / "src", FULL, source)
    shutil.rmtree(root / "rank_1")
    ms.transform_checkpoints(root, tmp_path / "out", "checkpoint_", source, TARGET)
    assert_rank_files(tmp_path / "out", FULL, TARGET)
    (warning,) = warnings()
    assert "source rank 1 has no file; other ranks hold all that is needed" in warning


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


def test_the_rank_list_without_a_source_strategy() -> None:
    assert ms.rank_list_for_transform(5, None, None) == ms.rank_list_for_convert(5, None, "not.read") == [0]


def test_a_unified_set_and_one_file_are_sources_too(source: Path, tmp_path: Path) -> None:
    ms.unified_safetensors(source, SOURCE, tmp_path / "unified")
    write_file(tmp_path / "one.safetensors", {**FULL, **STEP})
    for number, path in enumerate([tmp_path / "unified", tmp_path / "one.safetensors"]):
        ms.transform_checkpoints(path, tmp_path / f"{number}", "checkpoint_", None, TARGET)
        assert_files(tmp_path / f"{number}")


def test_one_of_several_checkpoints_by_its_suffix(source: Path, tmp_path: Path) -> None:
    for rank in range(4):
        write_file(source / f"rank_{rank}" / "other.ckpt", {"net.w": np.zeros(1)}, "ckpt")
    with refused(SourceError, "several-checkpoints", source, "checkpoint_0.ckpt", "other.ckpt"):
        ms.transform_checkpoints(source, tmp_path / "out", "checkpoint_", SOURCE, TARGET)
    for rank in range(4):
        (source / f"rank_{rank}" / f"checkpoint_{rank}.ckpt").rename(source / f"rank_{rank}" / "net-1_2.ckpt")
    ms.transform_checkpoints(source, tmp_path / "out", "checkpoint_", SOURCE, TARGET, file_suffix="1_2")
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
    with refused(UsageError, "no-tensors", "3 files", "rank_0"):
        ms.load_segmented_checkpoints(tmp_path / "rank_0", specify_prefix="head")


def test_two_steps_are_no_segments(tmp_path: Path) -> None:
    """By their names step 10 comes before step 9, which then counted."""
    write_file(tmp_path / "net-9_1.ckpt", {"net.w": FULL["net.w"] + 1, **STEP}, "ckpt")
    write_file(tmp_path / "net-10_1.ckpt", {"net.w": FULL["net.w"], **STEP}, "ckpt")
    with refused(SourceError, "files-disagree", "'net.w'", "net-9_1.ckpt", "net-10_1.ckpt"):
        ms.load_segmented_checkpoints(tmp_path)
    assert set(ms.load_segmented_checkpoints(tmp_path, filter_prefix="net.w")) == {"global_step"}


def test_files_in_the_order_of_their_text_are_refused(source: Path, tmp_path: Path) -> None:
    right = rank_map(source, [0, 1, 2, 3])
    ms.transform_checkpoint_by_rank(0, right, tmp_path / "right.ckpt", SOURCE)
    swapped = {0: right[0], 1: right[2], 2: right[1], 3: right[3]}
    with refused(UsageError, "wrong-rank", "checkpoint_files_map[1]", "rank_2/", "of rank 2"):
        ms.transform_checkpoint_by_rank(0, swapped, tmp_path / "wrong.ckpt", SOURCE)
    assert not (tmp_path / "wrong.ckpt").exists()
    with refused(UsageError, "wrong-rank", "checkpoint_filenames[1]", "rank_2/", "of rank 2"):
        ms.load_distributed_checkpoint({}, list(swapped.values()), None, SOURCE)
    check_order("files", {0: Path("rank_1/a"), 1: Path("rank_1/a"), 2: Path("rank_0/a")})  # replicas
    check_order("files", {0: Path("rank_8/a"), 1: Path("rank_9/a"), 2: Path("rank_10/a")})  # of stage 1
    check_order("files", {0: Path("b"), 1: Path("a")})
    with refused(UsageError, "wrong-rank", "files[1]", "rank10/a.ckpt", "of rank 10"):
        check_order("files", {n: Path(f"rank{r}/a.ckpt") for n, r in enumerate((0, 10, 2))})


def test_a_rank_is_not_below_0_and_of_the_strategy(source: Path, tmp_path: Path) -> None:
    everything = rank_map(source, [0, 1, 2, 3])
    with refused(UsageError, "out-of-range", "rank_id", "-1"):
        ms.transform_checkpoint_by_rank(-1, everything, tmp_path / "a.ckpt", SOURCE)
    rows = Layout.of([2], [0, -1])
    for stage, others, its in ((0, "2-3", "0 to 1"), (1, "0-1", "2 to 3")):
        strategy = Strategy.of({"net.w": {0: rows, 1: rows}}).of_stage(stage)
        with refused(
            UsageError, "no-such-rank", "checkpoint_files_map", f"ranks {others}", "src_strategy_file", f"ranks {its}"
        ):
            ms.transform_checkpoint_by_rank(0, everything, tmp_path / "a.ckpt", strategy)
    assert not (tmp_path / "a.ckpt").exists()


def test_ranks_of_an_older_target_are_reported(source: Path, tmp_path: Path, warnings: Any) -> None:
    ms.transform_checkpoints(source, tmp_path / "out", "c", SOURCE, SOURCE)
    assert warnings() == []
    ms.transform_checkpoints(source, tmp_path / "out", "c", SOURCE, TARGET)
    assert "out: has files of ranks 2-3 too, which the target strategy does not have" in warnings()[0]


# --- what is refused ---


def test_wrong_types(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for place, arguments in [
        ("ckpt_prefix", (source, out, 5)),
        ("dst_checkpoints_dir", (source, 5, "x")),
        ("src_checkpoints_dir", (5, out, "x")),
        ("src_strategy_file", (source, out, "x", 5)),
        ("dst_strategy_file", (source, out, "x", None, 5)),
    ]:
        with pytest.raises(TypeError, match=place):
            ms.transform_checkpoints(*arguments)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="process_num"):
        ms.transform_checkpoints(source, out, "x", SOURCE, TARGET, "2")  # type: ignore[arg-type]
    for place, by_rank in [
        ("rank_id .*'0'", ("0", {}, "a.ckpt")),
        ("checkpoint_files_map .*list", (0, [], "a.ckpt")),
        ("checkpoint_files_map .*'0'", (0, {"0": "a"}, "a.ckpt")),
        ("save_checkpoint_file_name", (0, {}, 5)),
        ("rank_id .*True", (True, {}, "a.ckpt")),
    ]:
        with pytest.raises(TypeError, match=place):
            ms.transform_checkpoint_by_rank(*by_rank)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="rank_id"):
        ms.rank_list_for_transform("0", SOURCE, TARGET)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="ckpt_file_dir"):
        ms.load_segmented_checkpoints(5)  # type: ignore[arg-type]
    assert not out.exists()


def test_wrong_values(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with refused(ValueError, "unknown-format", "output_format", "'npz'"):
        ms.transform_checkpoints(source, out, "x", SOURCE, TARGET, output_format="npz")
    with refused(ValueError, "out-of-range", "process_num", "0"):
        ms.transform_checkpoints(source, out, "x", SOURCE, TARGET, 0)
    with refused(ValueError, "bad-name", "../x"):
        ms.transform_checkpoints(source, out, "../x", SOURCE, TARGET)
    with refused(ValueError, "wrong-extension", "save_checkpoint_file_name", "a.npz"):
        ms.transform_checkpoint_by_rank(0, rank_map(source, [0]), "a.npz", SOURCE, TARGET)
    with refused(ValueError, "no-such-rank", "rank 2", "ranks 0 to 1"):
        ms.transform_checkpoint_by_rank(2, rank_map(source, [0]), "a.ckpt", SOURCE, TARGET)
    with refused(ValueError, "no-such-rank", "rank 2"):
        ms.rank_list_for_transform(2, SOURCE, TARGET)
    with refused(ValueError, "empty-value", "checkpoint_files_map"):
        ms.transform_checkpoint_by_rank(0, {}, "a.ckpt", SOURCE, TARGET)
    with refused(ValueError, "not-found", "checkpoint_files_map", "rank 9", "nowhere.ckpt"):
        ms.transform_checkpoint_by_rank(0, {9: "nowhere.ckpt"}, "a.ckpt", SOURCE, TARGET)
    for place, arguments in [
        ("src_checkpoints_dir", ("", tmp_path, "c_")),
        ("dst_checkpoints_dir", (source, "", "c_")),
        ("src_strategy_file", (source, tmp_path, "c_", "")),
    ]:
        with refused(ValueError, "empty-value", place):
            ms.transform_checkpoints(*arguments)


def test_directories_that_are_none(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with refused(NotADirectoryError, "not-found", "src_checkpoints_dir", tmp_path / "nowhere"):
        ms.transform_checkpoints(tmp_path / "nowhere", tmp_path / "out", "x", SOURCE, TARGET)
    with refused(NotADirectoryError, "not-a-directory", "dst_checkpoints_dir", tmp_path / "file"):
        ms.transform_checkpoints(source, tmp_path / "file", "x", SOURCE, TARGET)
    with refused(ValueError, "not-a-directory", "ckpt_file_dir", tmp_path / "file"):
        ms.load_segmented_checkpoints(str(tmp_path / "file"))
    with refused(StrategyError, "not-found", "dst_strategy_file", "nowhere"):
        ms.transform_checkpoints(source, tmp_path / "out", "x", SOURCE, tmp_path / "nowhere")
    with refused(StrategyError, "not-a-strategy", tmp_path / "file"):
        ms.transform_checkpoints(source, tmp_path / "out", "x", tmp_path / "file", TARGET)
    with refused(StrategyError, "no-tensors", "src_strategy_file"):
        ms.transform_checkpoints(source, tmp_path / "out", "x", {}, TARGET)


def test_empty_directories_and_both_formats(source: Path, tmp_path: Path) -> None:
    (tmp_path / "empty" / "rank_0").mkdir(parents=True)
    with refused(ValueError, "no-checkpoint", tmp_path / "empty"):
        ms.transform_checkpoints(tmp_path / "empty", tmp_path / "out", "x", SOURCE, TARGET)
    with refused(ValueError, "no-checkpoint", tmp_path / "empty" / "rank_0"):
        ms.load_segmented_checkpoints(tmp_path / "empty" / "rank_0")
    write_file(source / "rank_2" / "checkpoint_2.safetensors", FULL)
    for function in (ms.transform_checkpoints, ms.convert_checkpoints):
        with refused(ValueError, "mixed-formats", source):
            function(source, tmp_path / "out", "x", SOURCE, TARGET)
    with refused(ValueError, "mixed-formats", source / "rank_2"):
        ms.load_segmented_checkpoints(source / "rank_2")


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


# --- MindSpore itself ---

with_mindspore = pytest.mark.skipif(not PYTHON, reason="RESHARD_MINDSPORE_PYTHON names no Python that has MindSpore")

SIGNATURES = """
import inspect, json
import mindspore as ms, mindspore.parallel as p
names = ["transform_checkpoints", "transform_checkpoint_by_rank", "rank_list_for_transform", "convert_checkpoints",
         "convert_checkpoint_by_rank", "rank_list_for_convert", "load_segmented_checkpoints", "unified_safetensors",
         "load_distributed_checkpoint"]
found = {n: [(a.name, repr(a.default)) for a in inspect.signature(getattr(p, n)).parameters.values()] for n in names}
print("RESULT" + json.dumps(found))
"""


@pytest.mark.mindspore
@with_mindspore
def test_the_signatures_are_mindspores() -> None:
    theirs = json.loads(mindspore(SIGNATURES).split("RESULT")[1])
    for name, parameters in theirs.items():
        own = inspect.signature(getattr(ms, name)).parameters.values()
        given = [[p.name, repr(p.default)] for p in own if p.kind is not inspect.Parameter.KEYWORD_ONLY]
        assert given == parameters, name


def test_an_expanded_json_layout_as_a_dict(tmp_path: Path) -> None:
    """A nested layout as JSON has it; MindSpore cannot read its own."""
    nested = Layout.of([2, 2], [(1, 0), -1])
    strategy = Strategy({"w": (Placed(0, nested, (8, 6)),)}, range(1), 4)
    reshard.write_strategy(strategy, tmp_path / "s.json")
    content = json.loads((tmp_path / "s.json").read_text())
    assert len(content["parallel_layout_item"]["w"]["tensor_map"]) == 3
    whole = numbers({"w": (8, 6)})
    root = write_ranks(tmp_path / "src", whole, Strategy.of({"w": nested}), "ckpt")
    found = ms.build_searched_strategy(tmp_path / "s.json")
    ms.transform_checkpoints(root, tmp_path / "out", "checkpoint_", found, Strategy.of({"w": Layout.of([3], [-1, 0])}))
    assert_rank_files(tmp_path / "out", whole, Strategy.of({"w": Layout.of([3], [-1, 0])}))


def test_a_missing_rank_is_told_with_who_needs_it(source: Path, tmp_path: Path) -> None:
    shutil.rmtree(source / "rank_3")
    needing = "target ranks 0-1 (2 tensors: net.w, adam_m.net.w)"
    with refused(SourceError, "missing-ranks", source, "source rank 3", needing):
        ms.transform_checkpoints(source, tmp_path / "out", "x", SOURCE, TARGET)
    columns = Strategy.of({"net.w": Layout.of([2], [-1, 0]), "net.b": Layout.of([2], [0])})
    for rank in (0, 1):
        given = [other for other in ms.rank_list_for_transform(rank, SOURCE, columns) if other != 3]
        files = rank_map(source, given)
        if rank == 0:
            ms.transform_checkpoint_by_rank(rank, files, tmp_path / "0.ckpt", SOURCE, columns)
            continue
        with refused(SourceError, "missing-ranks", "source rank 3", "target rank 1 (2 tensors: net.w, net.b)"):
            ms.transform_checkpoint_by_rank(rank, files, tmp_path / "1.ckpt", SOURCE, columns)
    assert not (tmp_path / "out").exists()
