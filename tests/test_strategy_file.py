"""Strategy files, protobuf and JSON: reading, writing, merging."""

from __future__ import annotations

import json
import os
import re
import subprocess
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import generators
import helpers
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import reshard
from reshard.errors import StrategyError, TargetError, UsageError
from reshard.layout import Layout, foldings
from reshard.proto import DESCRIPTORS, HERE, message_class
from reshard.strategy import Strategy
from reshard.strategy_file import merge_strategies, read_strategy, write_strategy

if TYPE_CHECKING:
    from reshard.block import Shape


def strategy_names() -> list[str]:
    """Every strategy file of the test data."""
    return [
        name
        for folder in ("cases", "merged", "real", "strategies")
        for name in helpers.packed_files(folder)
        if (folder in ("merged", "strategies") or "strategy" in name or "_stages/" in name)
        and name.endswith((".ckpt", ".json"))
        and not name.endswith(("index.json", "info.json", "meta.json", "param_name_map.json"))
    ]


NAMES = strategy_names()
EMPTY = {f"strategies/pipe_tf8_tie_ckpt/src_strategy_{rank}.ckpt" for rank in range(4)}


def message() -> Any:
    """An empty strategy message, which tests fill by protobuf itself."""
    return message_class("mindspore.straspb.ParallelStrategyMap")(current_stage=2)


def add_layout(top: Any, name: str, matrix: list[int], *tensor_map: list[int], **fields: int) -> Any:
    item = top.parallel_layout_item.add(param_name=name)
    item.parallel_layouts.dev_matrix.add(dim=matrix)
    for dims in tensor_map:
        item.parallel_layouts.tensor_map.add(dim=dims)
    item.parallel_layouts.param_split_shape.add()
    item.parallel_layouts.indices_offset.add()
    for key, value in ({"field": 0, "opt_weight_shard_step": 0, "opt_weight_shard_size": 0} | fields).items():
        setattr(item.parallel_layouts, key, value)
    return item


def add_operator(top: Any, name: str, stage: int) -> Any:
    item = top.parallel_strategy_item.add(node_name=name)
    item.parallel_strategys.stage = stage
    item.parallel_strategys.parallel_strategy.add(dim=[2, 1])
    return item


def saved(path: Path, content: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    if hasattr(content, "SerializePartialToString"):
        content = content.SerializePartialToString()
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def json_item(**items: object) -> dict[str, object]:
    return {
        "dev_matrix": [2, 4], "tensor_map": [1, -1], "tensor_shape": [8, 8], "field": 0,
        "opt_weight_shard_step": 0, "opt_weight_shard_size": 0,
    } | items  # fmt: skip


def json_top(layouts: object, operators: object = None, **items: object) -> dict[str, object]:
    return {"current_stage": 2, "parallel_layout_item": layouts, "parallel_strategy_item": operators or {}} | items


def meaning(strategy: Strategy) -> tuple[object, ...]:
    """What a strategy says about tensors, without the operators that a file needs for its stage."""
    return strategy.tensors, strategy.stages, strategy.devices, strategy.merged


# Examples.


def test_a_protobuf_file(tmp_path: Path) -> None:
    top = message()
    add_layout(top, "flat", [2, 4], [1, -1])
    add_layout(top, "nested", [2, 2, 2], [2], [1, 0], opt_weight_shard_size=-1)
    add_layout(top, "nested, one dimension", [2, 4], [1, 0], [])  # the empty message is no dimension
    add_layout(top, "scalar", [8], [])
    add_operator(top, "MatMul", 3)
    strategy = read_strategy(saved(tmp_path / "strategy.ckpt", top))
    assert {name: placed.layout for name, (placed,) in strategy.tensors.items()} == {
        "flat": Layout.of([2, 4], [1, -1]),
        "nested": Layout.of([2, 2, 2], [2, (1, 0)], -1),
        "nested, one dimension": Layout.of([2, 4], [(1, 0)]),
        "scalar": Layout.of([8], []),
    }
    # The stage is in the operators alone; current_stage says nothing.
    assert (strategy.stages, strategy.ranks, strategy.merged) == (range(3, 4), range(24, 32), False)


def test_a_json_file(tmp_path: Path) -> None:
    top = json_top({"w": json_item()}, {"MatMul": {"stage": 1, "parallel_strategy": [[2, 1], [1]]}})
    strategy = read_strategy(saved(tmp_path / "strategy.json", top))
    (placed,) = strategy.tensors["w"]
    assert (placed.layout, placed.shape, placed.stage) == (Layout.of([2, 4], [1, -1]), (8, 8), 1)
    assert strategy.operators[0].strategy == ((2, 1), (1,))


def test_names_with_stage_numbers_make_a_merged_file(tmp_path: Path) -> None:
    top = message()
    add_layout(top, "0-w", [2], [0])
    add_layout(top, "1-w", [2], [-1])
    add_layout(top, "1-a-b", [2], [0])
    strategy = read_strategy(saved(tmp_path / "merged.ckpt", top))
    assert strategy.merged
    assert strategy.stages == range(2)
    assert {name: strategy.stages_of(name) for name in strategy.tensors} == {"w": (0, 1), "a-b": (1,)}


def test_one_name_without_a_stage_number_makes_it_a_file_of_one_stage(tmp_path: Path) -> None:
    top = message()
    add_layout(top, "0-w", [2], [0])
    add_layout(top, "bias", [2], [0])
    strategy = read_strategy(saved(tmp_path / "strategy.ckpt", top))
    assert (list(strategy.tensors), strategy.merged) == (["0-w", "bias"], False)


def test_the_format_is_told_by_content(tmp_path: Path) -> None:
    path = saved(tmp_path / "misnamed.ckpt", json_top({"w": json_item()}))
    assert list(read_strategy(path).tensors) == ["w"]


def test_older_files_without_the_optimizer_fields(tmp_path: Path) -> None:
    top = message()
    item = add_layout(top, "w", [2], [0])
    item.parallel_layouts.ClearField("opt_weight_shard_step")
    item.parallel_layouts.ClearField("opt_weight_shard_size")
    assert read_strategy(saved(tmp_path / "a.ckpt", top)).tensors["w"][0].layout == Layout.of([2], [0])
    older = {key: value for key, value in json_item().items() if not key.startswith("opt")}
    assert read_strategy(saved(tmp_path / "a.json", json_top({"w": older}))).tensors["w"][0].layout == Layout.of(
        [2, 4], [1, -1]
    )


def test_uneven_shapes_and_fields_are_kept(tmp_path: Path) -> None:
    layout = Layout.of([2], [0], param_split_shape=[5, 3], indices_offset=[0, 5], field=2)
    for name in ("a.ckpt", "a.json"):
        write_strategy(Strategy.of({"w": layout}), tmp_path / name)
        assert read_strategy(tmp_path / name).tensors["w"][0].layout == layout


def test_nested_entries_are_written_expanded_in_json(tmp_path: Path) -> None:
    strategy = Strategy.of({"w": Layout.of([2, 2, 2], [-1, (1, 0)])}, shapes={"w": (784, 512)})
    write_strategy(strategy, tmp_path / "a.json")
    item = json.loads((tmp_path / "a.json").read_text())["parallel_layout_item"]["w"]
    assert (item["tensor_map"], item["tensor_shape"]) == ([-1, 1, 0], [784, 2, 256])
    assert read_strategy(tmp_path / "a.json").grid("w", (784, 512)) == strategy.grid("w", (784, 512))


@pytest.mark.parametrize("shape", [None, (784,)])
def test_nested_entries_without_a_fitting_shape_need_protobuf(tmp_path: Path, shape: Shape | None) -> None:
    layout = Layout.of([2, 2], [-1, (1, 0)])
    strategy = Strategy.of({"w": layout}, shapes={"w": shape} if shape else None)
    with pytest.raises(UsageError, match="tensor 'w'"):
        write_strategy(strategy, tmp_path / "a.json")
    assert list(tmp_path.iterdir()) == []


def test_a_nested_tensor_of_one_dimension_has_an_empty_second_map(tmp_path: Path) -> None:
    # So does MindSpore: one message would be read as a flat map of two dimensions.
    write_strategy(Strategy.of({"w": Layout.of([2, 2], [(1, 0)])}), tmp_path / "a.ckpt")
    top = message()
    top.ParseFromString((tmp_path / "a.ckpt").read_bytes())
    assert [list(part.dim) for part in top.parallel_layout_item[0].parallel_layouts.tensor_map] == [[1, 0], []]


def test_unknown_protobuf_fields_come_back_where_they_were(tmp_path: Path) -> None:
    top = message()
    layout, operator = add_layout(top, "w", [2], [0]), add_operator(top, "MatMul", 0)
    for number, place in enumerate([top, layout, layout.parallel_layouts, operator, operator.parallel_strategys]):
        place.MergeFromString(b"\xa2\x06\x03no" + bytes([48 + number]))  # field 100, "no0" and so on
    path = saved(tmp_path / "a.ckpt", top)
    write_strategy(read_strategy(path), tmp_path / "b.ckpt")
    assert (tmp_path / "b.ckpt").read_bytes() == path.read_bytes()
    assert path.read_bytes().count(b"\xa2\x06\x03no") == 5


def test_unknown_json_keys_come_back_where_they_were(tmp_path: Path) -> None:
    top = json_top(
        {"w": json_item(new=[1, {"a": None}])}, {"op": {"stage": 0, "parallel_strategy": [], "new": 1}}, newer="x"
    )
    write_strategy(read_strategy(saved(tmp_path / "a.json", top)), tmp_path / "b.json")
    assert json.loads((tmp_path / "b.json").read_text()) == top


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new folder" / "a.ckpt"
    write_strategy(Strategy.of({"w": Layout.of([2], [0])}), path)
    before, inode = path.read_bytes(), path.stat().st_ino

    def failing(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", failing)
        with pytest.raises(TargetError, match="No space left"):
            write_strategy(Strategy.of({"v": Layout.of([4], [0])}), path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
    write_strategy(Strategy.of({"v": Layout.of([4], [0])}), path)
    assert path.stat().st_ino != inode  # another file took the name; the old one was not written over
    assert list(path.parent.iterdir()) == [path]


# MindSpore's own files.


def test_every_file_of_mindspore_is_read(mindspore_data: Path) -> None:
    assert len(NAMES) == 324
    for name in NAMES:
        if name in EMPTY:
            with pytest.raises(StrategyError, match="names no tensor; expected the layout of at least one"):
                read_strategy(mindspore_data / name)
        else:
            strategy = read_strategy(mindspore_data / name)
            assert strategy.tensors, name
            assert strategy.merged == name.startswith("merged/") or name.startswith("cases/pipe"), name


def test_every_file_of_mindspore_comes_back_equal(mindspore_data: Path, tmp_path: Path) -> None:
    same_bytes = 0
    for name in NAMES:
        if name in EMPTY:
            continue
        path, ours = mindspore_data / name, tmp_path / f"ours{Path(name).suffix}"
        strategy = read_strategy(path)
        write_strategy(strategy, ours)
        assert read_strategy(ours) == strategy, name
        if ours.suffix == ".json":
            assert json.loads(ours.read_bytes()) == json.loads(path.read_bytes()), name
        else:
            # All but merged files (whose tensors MindSpore lists in an order of its own) even byte for byte.
            same = ours.read_bytes() == path.read_bytes()
            assert same or strategy.merged, name
            same_bytes += same
    assert same_bytes == 240


def test_the_step_is_what_mindspore_writes(mindspore_data: Path) -> None:
    seen = 0
    for name in NAMES:
        if name in EMPTY:
            continue
        for places in read_strategy(mindspore_data / name).tensors.values():
            for placed in places:
                assert placed.layout.shard_step() == placed.layout.opt_weight_shard_step, name
                seen += placed.layout.opt_weight_shard_size != 0
    assert seen == 3686


BOTH = sorted(
    name[:-5] for name in NAMES if name.endswith(".json") and name[:-5] + ".ckpt" in NAMES and "cases" not in name
)


def test_protobuf_and_json_of_one_network_say_the_same(mindspore_data: Path) -> None:
    assert len(BOTH) == 64
    nested = 0
    for name in BOTH:
        proto, text = (read_strategy(mindspore_data / (name + suffix)) for suffix in (".ckpt", ".json"))
        assert proto.tensors.keys() == text.tensors.keys()
        assert (proto.stages, proto.devices, proto.merged) == (text.stages, text.devices, text.merged)
        assert {op.name: (op.stage, op.strategy) for op in proto.operators} == {
            op.name: (op.stage, op.strategy) for op in text.operators
        }
        for tensor, places in proto.tensors.items():
            for one, other in zip(places, text.tensors[tensor], strict=True):
                assert one.stage == other.stage
                assert other.shape is not None
                possible = dict(foldings(other.layout, other.shape, len(one.layout.tensor_map)))
                assert one.layout in possible, (name, tensor)
                shape = possible[one.layout]
                assert text.grid(tensor, shape, stage=one.stage) == proto.grid(tensor, shape, stage=one.stage)
                nested += one.layout != other.layout
    assert nested == 44


def test_shapes_of_json_files_are_those_of_the_network(mindspore_data: Path) -> None:
    networks = json.loads((mindspore_data / "strategies" / "index.json").read_text())
    seen = 0
    for name in BOTH:
        network = networks.get(f"{Path(name).name}.json")
        if not network or not name.startswith("strategies/"):
            continue
        text = read_strategy(mindspore_data / f"{name}.json")
        for tensor, places in text.tensors.items():
            if tensor in network["params_after"] and places[0].shape is not None:
                assert prod(places[0].shape) == prod(network["params_after"][tensor][0]), (name, tensor)
                seen += 1
    assert seen > 500


@pytest.mark.parametrize("name", ["pipe_noopt4", "pipe_tf8", "pipe_tut8"])
def test_merging_gives_what_mindspore_merges(mindspore_data: Path, tmp_path: Path, name: str) -> None:
    theirs = read_strategy(mindspore_data / "merged" / f"{name}.ckpt")
    folder = mindspore_data / "strategies" / f"{name}_ckpt"
    ours = merge_strategies(folder, tmp_path / "merged.ckpt")
    assert meaning(ours) == meaning(theirs) == meaning(read_strategy(folder))
    assert sorted(ours.operators, key=str) == sorted(theirs.operators, key=str)
    assert meaning(read_strategy(tmp_path / "merged.ckpt")) == meaning(theirs)
    assert ours.current_stage == theirs.current_stage == 1


def test_a_pipeline_may_lack_files_of_ranks_whose_stage_is_known(mindspore_data: Path) -> None:
    # Two files a stage of four.
    strategy = read_strategy(mindspore_data / "strategies" / "pipe_tf16_4st_ckpt")
    assert (strategy.devices, strategy.ranks) == (4, range(16))


# Directories that are not one pipeline.


def part(stage: int, **layouts: list[int]) -> Any:
    top = message()
    add_operator(top, "op", stage)
    for name, tensor_map in layouts.items():
        add_layout(top, name, [2], tensor_map)
    return top


def test_all_faults_of_a_directory_are_told_at_once(tmp_path: Path) -> None:
    saved(tmp_path / "in" / "strategy_0.ckpt", part(0, w=[0]))
    saved(tmp_path / "in" / "strategy_1.ckpt", part(0, w=[-1]))
    saved(tmp_path / "in" / "strategy_2.ckpt", part(0))
    saved(tmp_path / "in" / "strategy_10.ckpt", part(2, w=[0]))
    merged = message()
    add_layout(merged, "0-w", [2], [0])
    saved(tmp_path / "in" / "merged.ckpt", merged)
    for call in (read_strategy, lambda folder: merge_strategies(folder, tmp_path / "out.ckpt")):
        with pytest.raises(StrategyError) as caught:
            call(tmp_path / "in")
        message_ = str(caught.value)
        assert "has 4 faults:" in message_
        assert re.search(r"strategy_1\.ckpt: disagrees with .*strategy_0\.ckpt of the same stage 0 on w", message_)
        assert re.search(r"strategy_2\.ckpt: names no tensor", message_)
        assert re.search(r"merged\.ckpt: is merged already", message_)
        assert re.search(r"stage 1: has no file; 3 stages are expected because .*strategy_10\.ckpt", message_)
    assert not (tmp_path / "out.ckpt").exists()


def test_both_formats_in_one_directory(tmp_path: Path) -> None:
    saved(tmp_path / "a.ckpt", part(0, w=[0]))
    saved(tmp_path / "a.json", json_top({"w": json_item()}))
    with pytest.raises(StrategyError, match=r"both formats \(1 \.ckpt, 1 \.json\); expected one"):
        read_strategy(tmp_path)


def test_a_directory_without_strategy_files(tmp_path: Path) -> None:
    saved(tmp_path / "notes.txt", b"")
    with pytest.raises(StrategyError, match="holds no strategy file; expected"):
        read_strategy(tmp_path)
    with pytest.raises(StrategyError, match=r"notes\.txt: is not a directory"):
        merge_strategies(tmp_path / "notes.txt", tmp_path / "out.ckpt")


def test_a_pipeline_whose_last_stage_is_impossible_is_not_counted_through(tmp_path: Path) -> None:
    saved(tmp_path / "a.ckpt", part(4_000_000_000, w=[0]))
    with pytest.raises(StrategyError, match="stage 4000000000, more than any pipeline has"):
        read_strategy(tmp_path)


# Files that are not sound: one error with every fault and its place.


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match=r"nowhere\.ckpt: cannot be read: No such file or directory"):
        read_strategy(tmp_path / "nowhere.ckpt")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is empty; a strategy file was expected"),
        (b"[1, 2]", "is a JSON list; expected an object"),
        (b'{"parallel_layout_item": ', "is not JSON"),
        (b'{"a":' * 100_000, "is not JSON: it is nested too deeply"),
        (b"\xff\xfe{", "is not JSON"),
        ({}, "names no tensor"),
        (json_top([]), "$.parallel_layout_item: is a list; expected an object"),
        (json_top({"w": [1]}), "$.parallel_layout_item.w: is a list; expected an object"),
        (json_top({"w": {"dev_matrix": [2]}}), "$.parallel_layout_item.w.tensor_map: is missing"),
        (json_top({"w": json_item(dev_matrix=[2, 0])}), "$.parallel_layout_item.w: dev_matrix is [2, 0]"),
        (json_top({"w": json_item(dev_matrix=["2"])}), ".w.dev_matrix: is ['2']; expected a list of integers"),
        (json_top({"w": json_item(dev_matrix=[-2])}), ".w.dev_matrix: holds -2; expected 0 to 4294967295"),
        (json_top({"w": json_item(tensor_map=[True, -1])}), ".w.tensor_map: is [True, -1]; expected a list of"),
        (json_top({"w": json_item(tensor_map=[5, -1])}), "$.parallel_layout_item.w: tensor_map[0] is 5"),
        (json_top({"w": json_item(tensor_map=[[1, 0]])}), ".w.tensor_map: is [[1, 0]]; expected a list of integers"),
        (json_top({"w": json_item(tensor_shape=[8])}), ".w.tensor_shape: is [8], of 1 dimensions; tensor_map has 2"),
        (json_top({"w": json_item(tensor_shape=[-8, 8])}), ".w.tensor_shape: holds -8; expected 0 to"),
        (json_top({"w": json_item(field=None)}), ".w.field: is None; expected an integer"),
        (json_top({"w": json_item(opt_weight_shard_step=1 << 40)}), ".w.opt_weight_shard_step: is 1099511627776"),
        (json_top({"w": json_item(opt_weight_shard_size=-7)}), "opt_weight_shard_size is -7; expected -1 or more"),
        (json_top({"\ud800": json_item()}), "is no name; half of a surrogate pair"),
        (json_top({"w": json_item()}, {"op": {"stage": -1}}), "$.parallel_strategy_item.op.stage: is -1; expected 0"),
        (json_top({"w": json_item()}, {"op": {"parallel_strategy": [1]}}), ".op.parallel_strategy[0]: is 1;"),
        (json_top({"w": json_item()}, {"op": {"parallel_strategy": 1}}), ".op.parallel_strategy: is 1; expected"),
        (json_top({"w": json_item()}, {"a": {"stage": 0}, "b": {"stage": 1}}), "operators: are of stages [0, 1]"),
        (json_top({"w": json_item()}, current_stage=-1), "$.current_stage: is -1; expected 0"),
        (json_top({"w": json_item(), "v": json_item(dev_matrix=[4])}), "tensor_map[0] is 1; expected -1 to 0"),
        (json_top({"w": json_item(), "v": json_item(dev_matrix=[2, 2])}), "v.dev_matrix: [2, 2] has 4 devices"),
        (json_top({"99999-w": json_item()}), "stage 99999: is more than any pipeline has"),
        (json_top({"9" * 4000 + "-w": json_item()}), "is more than any pipeline has"),
        (json_top({"w" * 5000: json_item()}), "is a name of 5000 characters; at most 4096 bytes"),
        (
            b'{"parallel_layout_item": {"w": {"dev_matrix": [2], "tensor_map": [0]}, "w": {}}}',
            "w: is listed a second time",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_json_file_that_is_not_sound_says_where(tmp_path: Path, content: object, expected: str) -> None:
    path = saved(tmp_path / "a.json", content)
    with pytest.raises(StrategyError, match=re.escape(expected)) as caught:
        read_strategy(path)
    assert str(caught.value).startswith(str(path))


def test_all_faults_of_a_json_file_are_told_at_once(tmp_path: Path) -> None:
    top = json_top(
        {"a": 1, "b": json_item(dev_matrix=[]), "c": json_item(tensor_map="x"), "d": json_item(field="y")},
        {"op": {"stage": "z"}},
    )
    with pytest.raises(StrategyError) as caught:
        read_strategy(saved(tmp_path / "a.json", top))
    assert [line.split(":")[0] for line in str(caught.value).splitlines()[1:]] == [
        "  $.parallel_layout_item.a",
        "  $.parallel_layout_item.b",
        "  $.parallel_layout_item.c.tensor_map",
        "  $.parallel_layout_item.d.field",
        "  $.parallel_strategy_item.op.stage",
    ]


def test_all_faults_of_a_protobuf_file_are_told_at_once(tmp_path: Path) -> None:
    top = message()
    add_layout(top, "a", [2, 2], [2])
    add_layout(top, "b", [0], [-1])
    add_layout(top, "c", [4], [0])
    add_layout(top, "c", [4], [0])
    add_layout(top, "d", [8], [0])
    for stage in (0, 1):
        add_operator(top, f"op{stage}", stage)
    with pytest.raises(StrategyError) as caught:
        read_strategy(saved(tmp_path / "a.ckpt", top))
    assert str(caught.value).splitlines()[1:] == [
        "  a: tensor_map[0] is 2; expected -1 to 1 for dev_matrix [2, 2]",
        "  b: dev_matrix is [0]; expected extents of at least 1",
        "  operators: are of stages [0, 1]; expected one stage in a file that is not merged",
        "  c: is listed a second time",
        "  d.dev_matrix: [8] has 8 devices; the tensors before it have 4",
    ]


def test_missing_required_fields_are_all_named(tmp_path: Path) -> None:
    top = message()
    top.ClearField("current_stage")
    add_layout(top, "a", [2], [0]).parallel_layouts.ClearField("field")
    with pytest.raises(StrategyError) as caught:
        read_strategy(saved(tmp_path / "a.ckpt", top))
    assert [line.split(": ")[0] for line in str(caught.value).splitlines()[1:]] == [
        "  current_stage",
        "  parallel_layout_item[0].parallel_layouts.field",
    ]


@pytest.mark.parametrize("content", [b"", b"\x08", b"\xff" * 20, b"PK\x03\x04", b"a text"])
def test_what_is_no_strategy_file(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(StrategyError, match=r"a\.ckpt: "):
        read_strategy(saved(tmp_path / "a.ckpt", content))


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    top = message()
    add_layout(top, "wwww", [2], [0])
    add_operator(top, "oooo", 0)
    content = top.SerializeToString().replace(b"wwww", b"w\xed\xa0\x80").replace(b"oooo", b"\xff\xfe\xfd\xfc")
    with pytest.raises(StrategyError, match=r"(?i)utf-8"):
        read_strategy(saved(tmp_path / "a.ckpt", content))


# Properties.

ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-3, 9) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def nearly_strategies(draw: st.DrawFn) -> dict[str, object]:
    """A JSON strategy in which a few values are replaced by anything."""
    layouts = {
        name: json_item() for name in draw(st.lists(st.sampled_from(["w", "1-w", "0-é", "\ud800"]), unique=True))
    }
    for item in layouts.values():
        for key in draw(st.lists(st.sampled_from(sorted(item)), max_size=2)):
            item[key] = draw(ANY_JSON | st.lists(st.integers(-2, 5), max_size=3))
    operators: dict[str, object] = {"op": draw(st.just({"stage": 1, "parallel_strategy": [[2]]}) | ANY_JSON)}
    return json_top(layouts, operators, current_stage=draw(st.integers(0, 3) | ANY_JSON))


def reads_or_refuses(path: Path) -> None:
    """A strategy that is read can be written in both formats and means the same; all else is one StrategyError."""
    try:
        strategy = read_strategy(path)
    except StrategyError as error:
        assert str(path) in str(error)  # noqa: PT017 -- the other outcome is as good
        return
    assert all(placed.layout.devices == strategy.devices for places in strategy.tensors.values() for placed in places)
    ours = path.with_name("ours.ckpt")
    write_strategy(strategy, ours)
    again = read_strategy(ours)
    assert {n: [(p.stage, p.layout) for p in places] for n, places in again.tensors.items()} == {
        n: [(p.stage, p.layout) for p in places] for n, places in strategy.tensors.items()
    }
    assert (again.stages, again.devices, again.merged) == (strategy.stages, strategy.devices, strategy.merged)


@settings(max_examples=300)
@given(nearly_strategies())
def test_any_json_is_a_strategy_or_one_error(tmp_path_factory: pytest.TempPathFactory, top: dict[str, object]) -> None:
    reads_or_refuses(saved(tmp_path_factory.getbasetemp() / "any.json", top))


@given(st.data())
def test_any_damage_to_a_protobuf_file_is_a_strategy_or_one_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    top = message()
    add_layout(top, "0-w", [2, 2], [1], [0, -1], opt_weight_shard_size=-1)
    add_layout(top, "1-b", [4], [0])
    add_operator(top, "op", 1)
    content = bytearray(top.SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        begin = data.draw(st.integers(0, len(content)))
        content[begin : begin + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    reads_or_refuses(saved(tmp_path_factory.getbasetemp() / "any.ckpt", bytes(content)))


def test_a_protobuf_file_cut_at_any_byte_is_a_shorter_strategy_or_one_error(tmp_path: Path) -> None:
    top = message()
    add_operator(top, "op", 1)
    add_layout(top, "w", [2, 2], [1], [0, -1], opt_weight_shard_size=-1)
    add_layout(top, "b", [4], [0])
    content, refused = top.SerializeToString(), 0
    for length in range(len(content)):
        path = saved(tmp_path / "a.ckpt", content[:length])
        try:
            assert list(read_strategy(path).tensors) == ["w"]  # cut between two tensors, which no field tells
        except StrategyError:
            refused += 1
    assert refused == len(content) - 1


@given(generators.models())
def test_what_is_written_as_protobuf_is_read_again(
    tmp_path_factory: pytest.TempPathFactory, model: generators.Model
) -> None:
    path = tmp_path_factory.getbasetemp() / "a.ckpt"
    for strategy in (model.source, model.target):
        write_strategy(strategy, path)
        assert meaning(read_strategy(path)) == meaning(strategy)


@given(generators.models())
def test_what_is_written_as_json_says_the_same(
    tmp_path_factory: pytest.TempPathFactory, model: generators.Model
) -> None:
    path = tmp_path_factory.getbasetemp() / "a.json"
    layouts = {n: {p.stage: p.layout for p in places} for n, places in model.source.tensors.items()}
    strategy = Strategy.of(layouts, shapes=model.shapes)
    write_strategy(strategy, path)
    found = read_strategy(path)
    assert (found.stages, found.devices, found.merged) == (strategy.stages, strategy.devices, strategy.merged)
    for name, shape in model.shapes.items():
        assert found.stages_of(name) == strategy.stages_of(name)
        assert found.grid(name, shape) == strategy.grid(name, shape)
        if all(len(axes) <= 1 for placed in strategy.tensors[name] for axes in placed.layout.tensor_map):
            assert [(p.layout, p.shape) for p in found.tensors[name]] == [
                (p.layout, p.shape) for p in strategy.tensors[name]
            ]


# The messages and MindSpore itself.


def test_the_descriptor_set_is_what_the_proto_files_say(tmp_path: Path) -> None:
    protoc = pytest.importorskip("grpc_tools.protoc")
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    target = tmp_path / "descriptors.binpb"
    sources = sorted(str(path) for path in HERE.glob("*.proto"))
    assert protoc.main(["protoc", f"-I{HERE}", f"--descriptor_set_out={target}", *sources]) == 0
    assert FileDescriptorSet.FromString(target.read_bytes()) == FileDescriptorSet.FromString(DESCRIPTORS.read_bytes())


SCRIPT = """
import json, pathlib, sys
import mindspore
from mindspore.parallel._parallel_serialization import _convert_to_list, _build_searched_strategy
from reshard.strategy_file import read_strategy  # beside MindSpore's own messages in one process
found = {}
for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    found[path.name] = _convert_to_list(_build_searched_strategy(str(path)))
    ours = read_strategy(path)
    assert set(ours.tensors) == set(found[path.name]), path
json.dump(found, open(sys.argv[2], "w"))
"""


@pytest.fixture
def mindspore_python() -> str:
    python = os.environ.get("RESHARD_MINDSPORE_PYTHON")
    if not python:
        pytest.skip("RESHARD_MINDSPORE_PYTHON names no Python that has MindSpore")
    return python


@pytest.mark.mindspore
def test_mindspore_reads_what_is_written_here(mindspore_python: str, tmp_path: Path, mindspore_data: Path) -> None:
    folder = tmp_path / "written"
    written: dict[str, Strategy] = {}

    @settings(
        max_examples=60, phases=[Phase.generate], database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(generators.models())
    def draw(model: generators.Model) -> None:
        # MindSpore takes a name apart at every dash.
        layouts = {
            name: {placed.stage: placed.layout for placed in places}
            for name, places in model.source.tensors.items()
            if "-" not in name
        }
        if not layouts:
            return
        shapes = {name: model.shapes[name] for name in layouts}
        name = f"{len(written)}.ckpt"
        written[name] = Strategy.of(layouts, shapes=shapes)
        write_strategy(written[name], folder / name)
        if all(len(axes) < 2 for by in layouts.values() for one in by.values() for axes in one.tensor_map):
            name = f"{len(written)}.json"
            written[name] = Strategy.of(layouts, shapes=shapes)
            write_strategy(written[name], folder / name)

    draw()
    for number, name in enumerate(NAMES):
        if name.startswith("strategies/") and name.endswith(".ckpt") and name not in EMPTY:
            written[f"real{number}.ckpt"] = read_strategy(mindspore_data / name)
            write_strategy(written[f"real{number}.ckpt"], folder / f"real{number}.ckpt")
    result = tmp_path / "found.json"
    home = str(Path(reshard.__file__).parent.parent)
    done = subprocess.run(
        [mindspore_python, "-c", SCRIPT, str(folder), str(result)],
        env=os.environ | {"PYTHONPATH": home},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(result.read_text())
    assert found.keys() == written.keys()
    assert sum(name.endswith(".json") for name in found) >= 5
    for file, tensors in found.items():
        strategy = written[file]
        assert tensors.keys() == strategy.tensors.keys()
        for name, (matrix, tensor_map, uneven, field, step, size, stages) in tensors.items():
            places = strategy.tensors[name]
            if not strategy.merged:
                assert stages == [0]  # which MindSpore says of any file that is not merged
            else:
                assert sorted(stages) == [placed.stage for placed in places]
            layouts = [
                Layout.of(matrix, tensor_map, size, opt_weight_shard_step=step, param_split_shape=uneven, field=field)
            ]
            assert layouts[0] in [placed.layout for placed in places], (file, name)
            np.testing.assert_equal(step, layouts[0].shard_step())


def test_an_expanded_layout_is_not_written_as_protobuf_of_more_dimensions(tmp_path: Path) -> None:
    """JSON does not tell how many dimensions the tensor has; protobuf must."""
    write_strategy(
        Strategy.of({"w": Layout.of([2, 2, 2], [-1, (1, 0)])}, shapes={"w": (784, 512)}), tmp_path / "b.json"
    )
    strategy = read_strategy(tmp_path / "b.json")
    with pytest.raises(UsageError, match="cannot be told; write JSON"):
        write_strategy(strategy, tmp_path / "a.ckpt")
    write_strategy(strategy, tmp_path / "a.json")
