"""Strategy files, protobuf and JSON: what is read, what is written, and that they say the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import generators
import helpers
import pytest
from hypothesis import given
from refusals import refused
from strategy_files import add_layout, add_operator, json_item, json_top, meaning, message, saved

from reshard.core.layout.layout import Layout, foldings
from reshard.errors import BudgetError, StrategyError, UsageError
from reshard.strategy.files import merge_strategies, read_strategy, write_strategy
from reshard.strategy.proto import DESCRIPTORS, HERE
from reshard.strategy.strategy import Strategy

if TYPE_CHECKING:
    from reshard.core.layout.block import Shape


def test_a_protobuf_file(tmp_path: Path) -> None:
    top = message()
    add_layout(top, "flat", [2, 4], [1, -1])
    add_layout(top, "nested", [2, 2, 2], [2], [1, 0], opt_weight_shard_size=-1)
    add_layout(top, "nested, one dimension", [2, 4], [1, 0], [])  # the empty message is not a dimension
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
    with refused(UsageError, "wrong-dimensions" if shape else "unknown-shape", "tensor 'w'"):
        write_strategy(strategy, tmp_path / "a.json")
    assert list(tmp_path.iterdir()) == []


def test_an_expanded_layout_is_not_written_as_protobuf_of_more_dimensions(tmp_path: Path) -> None:
    """JSON does not say how many dimensions the tensor has; protobuf must."""
    write_strategy(
        Strategy.of({"w": Layout.of([2, 2, 2], [-1, (1, 0)])}, shapes={"w": (784, 512)}), tmp_path / "b.json"
    )
    strategy = read_strategy(tmp_path / "b.json")
    with refused(UsageError, "unknown-nesting", ".json"):
        write_strategy(strategy, tmp_path / "a.ckpt")
    write_strategy(strategy, tmp_path / "a.json")


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
        with refused(BudgetError, "no-space", path):
            write_strategy(Strategy.of({"v": Layout.of([4], [0])}), path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
    write_strategy(Strategy.of({"v": Layout.of([4], [0])}), path)
    assert path.stat().st_ino != inode  # another file took the name; the old one was not written over
    assert list(path.parent.iterdir()) == [path]


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


def test_the_descriptor_set_is_what_the_proto_files_say(tmp_path: Path) -> None:
    protoc = pytest.importorskip("grpc_tools.protoc")
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    target = tmp_path / "descriptors.binpb"
    sources = sorted(str(path) for path in HERE.glob("*.proto"))
    assert protoc.main(["protoc", f"-I{HERE}", f"--descriptor_set_out={target}", *sources]) == 0
    assert FileDescriptorSet.FromString(target.read_bytes()) == FileDescriptorSet.FromString(DESCRIPTORS.read_bytes())


# --- Strategy files of MindSpore: all of its own are read and come back equal, and it reads what is writt ---


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


def test_every_file_of_mindspore_is_read(mindspore_data: Path) -> None:
    assert len(NAMES) == 324
    for name in NAMES:
        if name in EMPTY:
            with refused(StrategyError, "no-tensors"):
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
