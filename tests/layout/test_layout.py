"""Layouts: which block of a tensor each rank holds."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import generators
import helpers
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from reshard.core.layout.block import Block
from reshard.core.layout.grid import grid, map_text
from reshard.core.layout.layout import Layout, foldings, whole
from reshard.errors import LayoutError

if TYPE_CHECKING:
    from pathlib import Path

    from reshard.core.layout.block import Shape


def texts(layout: Layout, *shape: int) -> list[str]:
    """Each rank's block, written as numpy slices it."""
    by_rank = layout.grid(shape).by_rank()
    return [str(by_rank[rank]) for rank in range(layout.devices)]


# Examples.


def test_a_map_value_counts_device_axes_from_the_last() -> None:
    # Axis 1 of [2, 4] is its first: two halves of the rows, each on four ranks.
    assert texts(Layout.of([2, 4], [1, -1]), 8, 6) == ["[0:4, 0:6]"] * 4 + ["[4:8, 0:6]"] * 4
    # Axis 0 is the last: four strips of columns, which alternate.
    assert texts(Layout.of([2, 4], [-1, 0]), 2, 8)[:5] == [
        "[0:2, 0:2]", "[0:2, 2:4]", "[0:2, 4:6]", "[0:2, 6:8]", "[0:2, 0:2]",
    ]  # fmt: skip


def test_an_ascending_map_crosses_the_axes() -> None:
    assert texts(Layout.of([2, 2], [0, 1]), 4, 4) == ["[0:2, 0:2]", "[2:4, 0:2]", "[0:2, 2:4]", "[2:4, 2:4]"]


def test_a_nested_entry_splits_one_dimension_by_several_axes_major_first() -> None:
    assert texts(Layout.of([2, 2], [(1, 0)]), 8) == ["[0:2]", "[2:4]", "[4:6]", "[6:8]"]
    assert texts(Layout.of([2, 2], [(0, 1)]), 8) == ["[0:2]", "[4:6]", "[2:4]", "[6:8]"]


def test_the_optimizer_splits_the_block_of_replicas_along_the_rows() -> None:
    # Two replicas of each half of the rows; each keeps half of it.
    assert texts(Layout.of([2, 2], [1], -1), 8) == ["[0:2]", "[2:4]", "[4:6]", "[6:8]"]
    # A dimension that the map splits by columns is split by rows too.
    columns = Layout.of([2, 2], [-1, 0], -1)
    assert texts(columns, 4, 4) == ["[0:2, 0:2]", "[0:2, 2:4]", "[2:4, 0:2]", "[2:4, 2:4]"]
    assert columns.splits == (2, 2)


def test_fewer_optimizer_shards_than_replicas_repeat() -> None:
    assert texts(Layout.of([4], [-1], 2), 4) == ["[0:2]", "[2:4]", "[0:2]", "[2:4]"]
    assert Layout.of([4], [-1], 2).grid((4,)).ranks == ((0, 2), (1, 3))


def test_optimizer_shards_of_one_rank_or_of_size_one_are_the_block_itself() -> None:
    assert Layout.of([4], [0], -1).optimizer_shards == 1
    assert Layout.of([4], [-1], 1).grid((4,)).ranks == ((0, 1, 2, 3),)


def test_a_tensor_without_dimensions_is_whole_everywhere() -> None:
    assert whole(0, 3).grid(()).by_rank() == dict.fromkeys(range(3), Block((), ()))


def test_a_tensor_without_elements_has_blocks_without_elements() -> None:
    empty = Layout.of([2], [0, -1]).grid((0, 4))
    assert [block.size for block in empty.blocks] == [0]
    assert empty.ranks == ((0, 1),)


def test_one_tensor_may_live_in_several_stages_with_different_layouts() -> None:
    rows, columns = Layout.of([2], [0, -1]), Layout.of([2], [-1, 0])
    tied = grid((4, 4), ((rows, 0), (columns, 6)))
    assert {rank: str(block) for rank, block in tied.by_rank().items()} == {
        0: "[0:2, 0:4]",
        1: "[2:4, 0:4]",
        6: "[0:4, 0:2]",
        7: "[0:4, 2:4]",
    }
    assert grid((4, 4), ((rows, 6), (rows, 0))).ranks == ((0, 6), (1, 7))  # in whatever order they are given


def test_uneven_rows_are_honoured() -> None:
    uneven = Layout.of([3], [0, -1], param_split_shape=[5, 2, 1])
    assert texts(uneven, 8, 2) == ["[0:5, 0:2]", "[5:7, 0:2]", "[7:8, 0:2]"]
    assert uneven.full_shape((2, 2)) == (8, 2)


def test_layouts_are_values() -> None:
    assert Layout.of([2, 4], [1, -1]) == Layout((2, 4), ((1,), ()))
    assert hash(Layout.of([2, 4], [(1, 0)])) == hash(Layout.of((2, 4), ([1, 0],)))
    assert Layout.of([8], [-1, -1]).tensor_map == Layout.of([8], [[-1], [-1]]).tensor_map == ((), ())


@pytest.mark.parametrize(
    ("layout", "step"),
    [
        (Layout.of([8], [-1], 0), 0),  # no optimizer sharding
        (Layout.of([8], [0], -1), 0),  # nobody shares a block
        (Layout.of([8], [-1], -1), 1),  # ranks 0 to 7
        (Layout.of([4, 2], [0], -1), 2),  # ranks 0, 2, 4, 6
        (Layout.of([4, 2], [0], 2), 2),  # the ranks that share the block, not only those of one piece
        (Layout.of([2, 2, 2], [1], -1), 1),  # ranks 0, 1, 4, 5: (5 - 0) // 3
    ],
)
def test_the_step_that_mindspore_writes(layout: Layout, step: int) -> None:
    assert layout.shard_step() == layout.opt_weight_shard_step == step


def test_foldings_of_an_expanded_layout_that_could_be_two() -> None:
    # [2, 2, 2] split by three axes may be [4, 2] or [2, 4]; only the files or the other strategy know.
    both = foldings(Layout.of([2, 2, 2], [2, 1, 0]), (2, 2, 2), 2)
    assert [(map_text(layout.tensor_map), shape) for layout, shape in both] == [
        ("[(2, 1), 0]", (4, 2)),
        ("[2, (1, 0)]", (2, 4)),
    ]
    assert foldings(Layout.of([2, 2], [1, -1]), (2, 8), 1) == []  # what is not split binds nothing
    assert foldings(Layout.of([2, 2], [1, 0]), (4, 8), 1) == []  # 4 rows over an axis of 2 are a dimension
    assert foldings(Layout.of([2, 2], [1, 0]), (2, 8), 3) == []


@pytest.mark.parametrize(
    ("rule", "layout"),
    [
        ("whole", Layout.of([8], [-1, -1])),
        ("split:0", Layout.of([8], [0, -1])),
        ("split:1", Layout.of([8], [-1, 0])),
        ("2,4:1,-1", Layout.of([2, 4], [1, -1])),
        ("2,2,2:1+0,-1:-1", Layout.of([2, 2, 2], [(1, 0), -1], -1)),
    ],
)
def test_a_rule_of_the_command_line(rule: str, layout: Layout) -> None:
    assert Layout.parse(rule, 2, 8) == layout


@pytest.mark.parametrize("rule", ["", "split", "split:2", "split:-1", "split:x", "whole:1", "2,4", "2:0:0:0"])
def test_a_rule_that_is_none_is_quoted(rule: str) -> None:
    with refused(LayoutError, "bad-rule", repr(rule)):
        Layout.parse(rule, 2, 8)


def test_a_rule_that_is_not_sound_says_where() -> None:
    with refused(LayoutError, "out-of-range", "'2:9,-1'", "tensor_map[0]"):
        Layout.parse("2:9,-1", 2, 8)


# Faults: dimension and sizes are named.


@pytest.mark.parametrize(
    ("matrix", "tensor_map", "code", "places"),
    [
        ([], [-1], "out-of-range", ["dev_matrix is []", "at least 1"]),
        ([4, 0], [-1], "out-of-range", ["dev_matrix is [4, 0]"]),
        ([-2], [-1], "out-of-range", ["dev_matrix is [-2]"]),
        ([1024, 2048], [-1], "too-large", ["131072 devices"]),
        ([2, 2], [2, -1], "out-of-range", ["tensor_map[0] is 2", "-1 to 1", "dev_matrix [2, 2]"]),
        ([2, 2], [-1, -2], "out-of-range", ["tensor_map[1] is -2", "-1 to 1"]),
        ([2, 2], [0, 0], "repeated-axis", ["tensor_map[1]", "value 0"]),
        ([2, 2], [-1, (1, 1)], "repeated-axis", ["tensor_map[1]", "value 1"]),
    ],
)
def test_a_layout_is_sound_once_it_exists(
    matrix: list[int], tensor_map: list[Any], code: str, places: list[str]
) -> None:
    with refused(LayoutError, code, *places):
        Layout.of(matrix, tensor_map)


def test_an_optimizer_size_below_minus_one_is_none() -> None:
    with refused(LayoutError, "out-of-range", "opt_weight_shard_size", "is -2", "expected -1"):
        Layout.of([2], [-1], -2)


@pytest.mark.parametrize(
    ("layout", "shape", "code", "places"),
    [
        (Layout.of([3], [-1, 0]), (6, 8), "not-divisible", ["dimension 1 of size 8", "into 3"]),
        (
            Layout.of([2, 3], [1], -1), (8,), "not-divisible",
            ["dimension 0 of size 8", "into 6", "2 by the tensor map, 3 by the optimizer"],
        ),
        (
            Layout((6,), ((), ()), 4), (24, 2), "not-divisible",
            ["opt_weight_shard_size 4", "6 devices", "dev_matrix [6]"],
        ),
        (Layout.of([2], [0]), (4, 4), "wrong-dimensions", ["2 dimensions [4, 4]", "has 1", "tensor_map"]),
        (Layout.of([2], [0], field=3), (6,), "unsupported-layout", ["field is 3"]),
        (Layout.of([2], [0], param_split_shape=[5, 2]), (8,), "wrong-sizes", ["param_split_shape [5, 2]"]),
        (Layout.of([2], [0], param_split_shape=[4, 2, 2]), (8,), "wrong-sizes", ["split 2 ways"]),
        (Layout.of([2], [0], param_split_shape=[9, -1]), (8,), "wrong-sizes", ["param_split_shape [9, -1]"]),
        (Layout((2,), (), -1), (), "wrong-dimensions", ["optimizer"]),
    ],
)  # fmt: skip
def test_a_layout_that_does_not_fit_names_what_does_not_divide(
    layout: Layout, shape: Shape, code: str, places: list[str]
) -> None:
    with refused(LayoutError, code, *places):
        layout.grid(shape)


def test_a_shard_of_another_rank_is_refused() -> None:
    with refused(LayoutError, "wrong-dimensions", "1 dimensions [4]", "has 2"):
        Layout.of([2], [0, -1]).full_shape((4,))


def test_four_thousand_replicas_are_one_block() -> None:
    held = whole(2, 4096).grid((64, 64))
    assert (len(held.blocks), len(held.ranks[0])) == (1, 4096)


# Properties.


def as_meta(layout: Layout) -> dict[str, Any]:
    """A layout in the words of `meta.json`, which the oracle reads."""
    return {
        "dev_matrix": list(layout.dev_matrix),
        "tensor_map": [list(axes) or [-1] for axes in layout.tensor_map],
        "opt_weight_shard_size": layout.opt_weight_shard_size,
    }


@given(generators.laid_out())
def test_every_rank_has_the_block_that_numpy_slices(drawn: tuple[Layout, Shape]) -> None:
    layout, shape = drawn
    numbers = np.arange(prod(shape)).reshape(shape)
    by_rank = layout.grid(shape).by_rank()
    assert sorted(by_rank) == list(range(layout.devices))
    for rank, block in by_rank.items():
        ours = numbers[block.within(Block.whole(shape))]
        np.testing.assert_array_equal(ours, numbers[helpers.slices(as_meta(layout), shape, rank)])


@given(generators.laid_out())
def test_blocks_cover_the_tensor_exactly_once(drawn: tuple[Layout, Shape]) -> None:
    layout, shape = drawn
    times = np.zeros(shape, int)
    for block in layout.grid(shape).blocks:
        times[block.within(Block.whole(shape))] += 1
    assert (times == 1).all()


@given(generators.laid_out())
def test_replicas_are_together_and_blocks_in_row_major_order(drawn: tuple[Layout, Shape]) -> None:
    layout, shape = drawn
    held = layout.grid(shape)
    assert len(held.blocks) == prod(layout.splits) == len(set(held.blocks))
    assert [block.start for block in held.blocks] == sorted(block.start for block in held.blocks)
    assert sorted(rank for ranks in held.ranks for rank in ranks) == list(range(layout.devices))
    assert all(list(ranks) == sorted(ranks) for ranks in held.ranks)
    assert len({len(ranks) for ranks in held.ranks}) == 1  # every block has as many replicas


@given(generators.laid_out())
def test_the_whole_shape_follows_from_any_shard(drawn: tuple[Layout, Shape]) -> None:
    layout, shape = drawn
    assert {layout.full_shape(block.shape) for block in layout.grid(shape).blocks} == {shape}


@given(generators.laid_out(), st.data())
def test_a_size_that_does_not_divide_is_never_split(drawn: tuple[Layout, Shape], data: st.DataObject) -> None:
    layout, shape = drawn
    cut = [dim for dim, ways in enumerate(layout.splits) if ways > 1]
    if not cut:
        return
    dim = data.draw(st.sampled_from(cut))
    rest = data.draw(st.integers(1, layout.splits[dim] - 1))
    uneven = (*shape[:dim], shape[dim] + rest, *shape[dim + 1 :])
    with refused(LayoutError, "not-divisible", f"dimension {dim} of size {shape[dim] + rest}"):
        layout.grid(uneven)


@given(generators.laid_out())
def test_foldings_contain_what_was_expanded(drawn: tuple[Layout, Shape]) -> None:
    layout, shape = drawn
    flat, sizes = helpers.expanded(layout.dev_matrix, layout.tensor_map, shape)
    expanded = Layout.of(layout.dev_matrix, flat, layout.opt_weight_shard_size)
    assert (layout, shape) in foldings(expanded, sizes, len(shape))


@given(generators.laid_out(optimizer=False))
def test_an_expanded_layout_holds_the_same_bytes(drawn: tuple[Layout, Shape]) -> None:
    # Optimizer sharding apart, which splits dimension 0 of the true shape.
    layout, shape = drawn
    flat, sizes = helpers.expanded(layout.dev_matrix, layout.tensor_map, shape)
    numbers = np.arange(prod(shape))
    one, other = layout.grid(shape).by_rank(), Layout.of(layout.dev_matrix, flat).grid(sizes).by_rank()
    for rank in range(layout.devices):
        mine = numbers.reshape(shape)[one[rank].within(Block.whole(shape))]
        theirs = numbers.reshape(sizes)[other[rank].within(Block.whole(sizes))]
        np.testing.assert_array_equal(mine.ravel(), theirs.ravel())


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6), st.integers(0, 6)), max_size=3))
def test_blocks_meet_where_numpy_says(spans: list[tuple[int, int, int, int]]) -> None:
    one = Block(tuple(min(a, b) for a, b, *_ in spans), tuple(max(a, b) for a, b, *_ in spans))
    other = Block(tuple(min(c, d) for *_, c, d in spans), tuple(max(c, d) for *_, c, d in spans))
    space = Block.whole((6,) * len(spans))
    inside = np.zeros(space.shape, int)
    inside[one.within(space)] += 1
    inside[other.within(space)] += 1
    common = one & other
    assert (common.size if common else 0) == (inside == 2).sum()
    if common:
        assert (inside[common.within(space)] == 2).all()


# MindSpore's own rank files.


@pytest.mark.parametrize("case", helpers.case_names())
def test_source_ranks_of_the_recorded_cases_hold_these_blocks(mindspore_data: Path, case: str) -> None:
    folder = mindspore_data / "cases" / case
    meta, full = helpers.load_meta(folder), helpers.load_full(folder)
    side = meta["src"]
    if side["layouts"] is None:
        assert case == "fromfull_1"
        return
    devices = side["devices"] // side["stages"]
    for path in (folder / "src_safetensors").glob("rank_*/*"):
        rank = int(path.parent.name.removeprefix("rank_"))
        stage, local = divmod(rank, devices)
        held = helpers.read_rank_file(path)
        for name, item in side["layouts"].items():
            if name not in full or stage not in item["stages"]:
                continue
            layout = Layout.of(item["dev_matrix"], item["tensor_map"], item["opt_weight_shard_size"])
            shape = full[name].shape
            block = layout.grid(shape).by_rank()[local]
            expected = full[name][block.within(Block.whole(shape))]
            assert held[name][1:] == (expected.shape, expected.tobytes()), (rank, name)
            assert item["opt_weight_shard_step"] == layout.shard_step()
