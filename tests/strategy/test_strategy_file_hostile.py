"""Strategy files that are damaged, invalid or of no one pipeline: one error, with every fault and its place."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import check, refused
from samples import examples
from strategy_files import add_layout, add_operator, json_item, json_top, message, saved

from reshard.errors import StrategyError
from reshard.strategy.files import merge_strategies, read_strategy, write_strategy

if TYPE_CHECKING:
    from pathlib import Path


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
        with refused(StrategyError, "files-disagree", "4 faults", "strategy_1.ckpt", "stage 0 on w") as caught:
            call(tmp_path / "in")
        check(caught.value, "no-tensors", "strategy_2.ckpt")
        check(caught.value, "already-merged", "merged.ckpt")
        check(caught.value, "missing-stage", "stage 1", "strategy_10.ckpt is stage 2")
    assert not (tmp_path / "out.ckpt").exists()


def test_both_formats_in_one_directory(tmp_path: Path) -> None:
    saved(tmp_path / "a.ckpt", part(0, w=[0]))
    saved(tmp_path / "a.json", json_top({"w": json_item()}))
    with refused(StrategyError, "mixed-formats", tmp_path, "1 .ckpt", "1 .json"):
        read_strategy(tmp_path)


def test_a_directory_without_strategy_files(tmp_path: Path) -> None:
    saved(tmp_path / "notes.txt", b"")
    with refused(StrategyError, "no-strategy-file", tmp_path):
        read_strategy(tmp_path)
    with refused(StrategyError, "not-a-directory", "notes.txt"):
        merge_strategies(tmp_path / "notes.txt", tmp_path / "out.ckpt")


def test_a_pipeline_whose_last_stage_is_impossible_is_not_counted_through(tmp_path: Path) -> None:
    saved(tmp_path / "a.ckpt", part(4_000_000_000, w=[0]))
    with refused(StrategyError, "out-of-range", "stage 4000000000"):
        read_strategy(tmp_path)


# Files that are not valid: one error with every fault and its place.


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with refused(StrategyError, "not-found", "nowhere.ckpt"):
        read_strategy(tmp_path / "nowhere.ckpt")


@pytest.mark.parametrize(
    ("content", "code", "place"),
    [
        (b"", "empty-file", ""),
        (b"[1, 2]", "not-a-strategy", "list"),
        (b'{"parallel_layout_item": ', "not-json", ""),
        (b'{"a":' * 100_000, "not-json", "nested"),
        ({}, "no-tensors", ""),
        (json_top([]), "wrong-type", "$.parallel_layout_item is a list"),
        (json_top({"w": {"dev_matrix": [2]}}), "missing-key", "$.parallel_layout_item.w.tensor_map"),
        (
            json_top({"w": json_item(dev_matrix=[2, 0])}),
            "out-of-range",
            "$.parallel_layout_item.w: dev_matrix is [2, 0]",
        ),
        (
            json_top({"w": json_item(dev_matrix=[-2])}),
            "out-of-range",
            ".w.dev_matrix holds -2",
        ),
        (json_top({"w": json_item(tensor_map=[True, -1])}), "wrong-type", ".w.tensor_map is [True, -1]"),
        (
            json_top({"w": json_item(tensor_map=[5, -1])}),
            "out-of-range",
            "$.parallel_layout_item.w: tensor_map[0] is 5",
        ),
        (json_top({"w": json_item(tensor_shape=[8])}), "wrong-dimensions", ".w.tensor_shape is [8]"),
        (
            json_top({"w": json_item(opt_weight_shard_step=1 << 40)}),
            "out-of-range",
            ".w.opt_weight_shard_step is 1099511627776",
        ),
        (json_top({"w": json_item(opt_weight_shard_size=-7)}), "out-of-range", "opt_weight_shard_size is -7"),
        (json_top({"\ud800": json_item()}), "bad-name", "$.parallel_layout_item"),
        (
            json_top({"w": json_item()}, {"op": {"stage": -1}}),
            "out-of-range",
            "_item.op.stage is -1",
        ),
        (
            json_top({"w": json_item()}, {"op": {"parallel_strategy": [1]}}),
            "wrong-type",
            "op.parallel_strategy[0] is",
        ),
        (json_top({"w": json_item()}, {"a": {"stage": 0}, "b": {"stage": 1}}), "several-stages", "[0, 1]"),
        (json_top({"w": json_item(), "v": json_item(dev_matrix=[2, 2])}), "devices-differ", "v.dev_matrix: [2, 2]"),
        (json_top({"99999-w": json_item()}), "out-of-range", "stage 99999"),
        (json_top({"w" * 5000: json_item()}), "name-too-long", "5000"),
        (
            b'{"parallel_layout_item": {"w": {"dev_matrix": [2], "tensor_map": [0]}, "w": {}}}',
            "duplicate-key",
            "w",
        ),
        (json_top({"w": json_item()}, {"op": {"parallel_strategy": 1}}), "wrong-type", ".op.parallel_strategy is 1;"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_json_file_that_is_not_sound_says_where(
    tmp_path: Path, content: object, code: str | None, place: str
) -> None:
    path = saved(tmp_path / "a.json", content)
    with refused(StrategyError, code, place) as caught:
        read_strategy(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize(
    ("key", "misspelt"),
    [
        ("opt_weight_shard_size", "opt_weight_shard_sIze"),
        ("opt_weight_shard_step", "opt_weigth_shard_step"),
        ("tensor_shape", "tensor_shap"),
        ("stage", "Stage"),
        ("parallel_layout_item", "parallel_layout_items"),
        ("parallel_strategy_item", "parallel_stratsgy_item"),
    ],
)
def test_a_json_key_that_is_misspelt(tmp_path: Path, key: str, misspelt: str) -> None:
    """It was kept as one of a later format, and the known one taken to be 0."""
    item = json_item(opt_weight_shard_size=-1, opt_weight_shard_step=1)
    content = json.dumps(json_top({"w": item}, {"op": {"stage": 1, "parallel_strategy": []}}))
    assert content.count(f'"{key}":') == 1
    read_strategy(saved(tmp_path / "valid.json", json.loads(content)))
    changed = json.loads(content.replace(f'"{key}":', f'"{misspelt}":'))
    with refused(StrategyError, "unknown-key", f".{misspelt}", f"'{key}'"):
        read_strategy(saved(tmp_path / "a.json", changed))


def test_a_key_of_a_later_format_is_none_that_is_misspelt(tmp_path: Path) -> None:
    """Older files lack the optimizer's keys, newer ones may have others that are like keys that are there."""
    item = {key: value for key, value in json_item().items() if not key.startswith("opt_weight")}
    later = {"tensor_map_2": [0], "dev_matrix2": [2], "pipeline_shared": True, "shape": [1]}
    read = read_strategy(saved(tmp_path / "a.json", json_top({"w": {**item, **later}})))
    assert read.tensors["w"][0].unknown == tuple(later.items())


def test_all_faults_of_a_json_file_are_told_at_once(tmp_path: Path) -> None:
    top = json_top(
        {"a": 1, "b": json_item(dev_matrix=[]), "c": json_item(tensor_map="x"), "d": json_item(field="y")},
        {"op": {"stage": "z"}},
    )
    with refused(StrategyError, "wrong-type", "a.json has 5 faults", "$.parallel_layout_item.b") as caught:
        read_strategy(saved(tmp_path / "a.json", top))
    for place in ("layout_item.a", "layout_item.c.tensor_map", "layout_item.d.field", "strategy_item.op.stage"):
        check(caught.value, "wrong-type", f"$.parallel_{place}")


def test_all_faults_of_a_protobuf_file_are_told_at_once(tmp_path: Path) -> None:
    top = message()
    add_layout(top, "a", [2, 2], [2])
    add_layout(top, "b", [0], [-1])
    add_layout(top, "c", [4], [0])
    add_layout(top, "c", [4], [0])
    add_layout(top, "d", [8], [0])
    for stage in (0, 1):
        add_operator(top, f"op{stage}", stage)
    with refused(StrategyError, "several-stages", "5 faults", "operators", "[0, 1]") as caught:
        read_strategy(saved(tmp_path / "a.ckpt", top))
    check(caught.value, "duplicate-name", "c")
    check(caught.value, "devices-differ", "d.dev_matrix: [8]")
    check(caught.value, "out-of-range", "a: tensor_map[0] is 2", "b")


def test_missing_required_fields_are_all_named(tmp_path: Path) -> None:
    top = message()
    top.ClearField("current_stage")
    add_layout(top, "a", [2], [0]).parallel_layouts.ClearField("field")
    with refused(StrategyError, "missing-key", "current_stage", "parallel_layout_item[0].parallel_layouts.field"):
        read_strategy(saved(tmp_path / "a.ckpt", top))


@pytest.mark.parametrize("content", [b"", b"\x08", b"\xff" * 20, b"PK\x03\x04", b"a text"])
def test_what_is_not_a_strategy_file(tmp_path: Path, content: bytes) -> None:
    with refused(StrategyError, "not-a-strategy" if content else "empty-file", "a.ckpt"):
        read_strategy(saved(tmp_path / "a.ckpt", content))


def test_a_name_that_is_not_a_text(tmp_path: Path) -> None:
    top = message()
    add_layout(top, "wwww", [2], [0])
    add_operator(top, "oooo", 0)
    content = top.SerializeToString().replace(b"wwww", b"w\xed\xa0\x80").replace(b"oooo", b"\xff\xfe\xfd\xfc")
    with refused(
        StrategyError, "not-utf-8", "parallel_layout_item[0].param_name", "parallel_strategy_item[0].node_name"
    ):
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


@settings(max_examples=examples(300))
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
