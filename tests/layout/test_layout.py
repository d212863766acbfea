"""Layouts: which block of a tensor each rank holds, whether blocks cover it, and who stores a replica."""

from __future__ import annotations

import time
from collections import Counter
from math import prod
from typing import TYPE_CHECKING, Any

import generators
import helpers
import numpy as np
import pytest
from generators import laid_out, layouts, pipelines, shapes
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

import reshard
from reshard.core.layout.block import Block, cover_fault, flat_boxes
from reshard.core.layout.grid import grid, map_text
from reshard.core.layout.layout import Layout, foldings, whole
from reshard.core.layout.replicas import by_size, by_turns, replica_groups, stored_once
from reshard.errors import LayoutError

if TYPE_CHECKING:
    from pathlib import Path

    from reshard.core.layout.block import Shape
    from reshard.core.layout.grid import Grid


def texts(layout: Layout, *shape: int) -> list[str]:
    """Each rank's block, written as numpy slices it."""
    by_rank = layout.grid(shape).by_rank()
    return [str(by_rank[rank]) for rank in range(layout.devices)]


@pytest.mark.parametrize(
    ("layout", "shape", "expected"),
    [
        # A map value counts device axes from the last: halves of the rows on four ranks each; strips that alternate.
        (Layout.of([2, 4], [1, -1]), (8, 6), ["[0:4, 0:6]"] * 4 + ["[4:8, 0:6]"] * 4),
        (Layout.of([2, 4], [-1, 0]), (2, 8), ["[0:2, 0:2]", "[0:2, 2:4]", "[0:2, 4:6]", "[0:2, 6:8]"] * 2),
        (Layout.of([2, 2], [0, 1]), (4, 4), ["[0:2, 0:2]", "[2:4, 0:2]", "[0:2, 2:4]", "[2:4, 2:4]"]),
        # A nested entry splits one dimension by several axes, the first of them most coarsely.
        (Layout.of([2, 2], [(1, 0)]), (8,), ["[0:2]", "[2:4]", "[4:6]", "[6:8]"]),
        (Layout.of([2, 2], [(0, 1)]), (8,), ["[0:2]", "[4:6]", "[2:4]", "[6:8]"]),
        # The optimizer splits the block of replicas along the rows, whatever the map splits.
        (Layout.of([2, 2], [1], -1), (8,), ["[0:2]", "[2:4]", "[4:6]", "[6:8]"]),
        (Layout.of([2, 2], [-1, 0], -1), (4, 4), ["[0:2, 0:2]", "[0:2, 2:4]", "[2:4, 0:2]", "[2:4, 2:4]"]),
        # Fewer shards than replicas repeat; shards of one rank or of size one are the block itself.
        (Layout.of([4], [-1], 2), (4,), ["[0:2]", "[2:4]", "[0:2]", "[2:4]"]),
        (Layout.of([4], [0], -1), (4,), ["[0:1]", "[1:2]", "[2:3]", "[3:4]"]),
        (Layout.of([2], [-1], 1), (4,), ["[0:4]", "[0:4]"]),
        (Layout.of([3], [0, -1], param_split_shape=[5, 2, 1]), (8, 2), ["[0:5, 0:2]", "[5:7, 0:2]", "[7:8, 0:2]"]),
    ],
)
def test_the_blocks_of_a_layout(layout: Layout, shape: Shape, expected: list[str]) -> None:
    assert texts(layout, *shape) == expected


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
    assert Layout.of([3], [0, -1], param_split_shape=[5, 2, 1]).full_shape((2, 2)) == (8, 2)
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


@st.composite
def cut(draw: st.DrawFn, outer: Block) -> list[Block]:
    """Blocks that tile a block, cut in two again and again; not a grid in general."""
    dims = [dim for dim in range(len(outer.start)) if outer.shape[dim] > 1]
    if not dims or draw(st.integers(0, 2)) == 0:
        return [outer]
    dim = draw(st.sampled_from(dims))
    place = draw(st.integers(outer.start[dim] + 1, outer.stop[dim] - 1))
    low = Block(outer.start, (*outer.stop[:dim], place, *outer.stop[dim + 1 :]))
    high = Block((*outer.start[:dim], place, *outer.start[dim + 1 :]), outer.stop)
    return [*draw(cut(low)), *draw(cut(high))]


of_covers = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@given(data=st.data(), shape=of_covers)
def test_it_is_what_counting_says(data: st.DataObject, shape: tuple[int, ...]) -> None:
    blocks = data.draw(st.permutations(data.draw(cut(Block.whole(shape)))))
    assert cover_fault(shape, blocks) is None
    empty = Block(shape, shape)
    assert cover_fault(shape, [*blocks, empty] if 0 not in shape and shape else blocks) is None
    more = data.draw(st.lists(st.sampled_from(data.draw(cut(Block.whole(shape)))), unique=True, max_size=3))
    some = [*dict.fromkeys([*data.draw(st.lists(st.sampled_from(blocks), unique=True)), *more])]
    counts = np.zeros(shape, int)
    for block in some:
        counts[block.within(Block.whole(shape))] += 1
    fault = cover_fault(shape, some)
    assert (fault is None) == bool((counts == 1).all())
    if fault:
        assert ("overlap" in fault) == (sum(block.size for block in some) >= counts.size)


@given(data=st.data(), shape=of_covers)
def test_flat_boxes_are_the_elements_of_a_range_in_order(data: st.DataObject, shape: tuple[int, ...]) -> None:
    numbers = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    begin = data.draw(st.integers(0, numbers.size))
    end = data.draw(st.integers(0, numbers.size))
    found = flat_boxes(shape, begin, end)
    elements = [number for box in found for number in numbers[box.within(Block.whole(shape))].reshape(-1).tolist()]
    assert elements == list(range(begin, end))
    assert len(found) <= max(2 * len(shape) - 1, 1)


def test_what_is_not_within() -> None:
    assert cover_fault((4,), [Block((2,), (6,))]) == "is of shape [4], and its block [2:6] is not within that"
    assert "is not within that" in str(cover_fault((4,), [Block((0, 0), (4, 1))]))
    assert cover_fault((), [Block((), ())]) is None
    assert cover_fault((), []) == "is of shape [], and its blocks have 0 of 1 elements"
    assert cover_fault((0, 4), []) is None


def test_many_blocks_take_no_time() -> None:
    began = time.process_time()
    rows = [Block((row, column), (row + 1, column + 1)) for row in range(128) for column in range(128)]
    assert cover_fault((128, 128), rows) is None
    twice = [*rows[1:], Block((3, 3), (3, 4)), Block((3, 3), (4, 5))]
    assert cover_fault((128, 128), twice) == "is of shape [128, 128], and some of its blocks overlap"
    deep = tuple([2] * 20)
    corners = [Block.whole(deep), *(Block((0,) * 20, (*[2] * dim, 1, *[2] * (19 - dim))) for dim in range(20))]
    assert "along 20 dimensions" in str(cover_fault(deep, corners))
    assert time.process_time() - began < 2


def test_ranks_of_the_same_block_are_a_group() -> None:
    assert replica_groups(Layout.of([2, 2], [-1])) == ((0, 1, 2, 3),)
    assert replica_groups(Layout.of([2, 2], [1])) == ((0, 1), (2, 3))
    assert replica_groups(Layout.of([2, 2], [(1, 0)])) == ((0,), (2,), (1,), (3,))
    assert replica_groups(Layout.of([2, 2], [-1], 2), 4) == ((4, 6), (5, 7))
    assert replica_groups(whole(0, 3)) == ((0, 1, 2),)
    assert replica_groups(Layout.of([2, 2, 2], [2, 1])) == ((0, 1), (4, 5), (2, 3), (6, 7)), "the last axis first"


def test_pieces_that_do_not_divide_the_replicas_are_refused() -> None:
    with refused(LayoutError, "not-divisible", "opt_weight_shard_size", "size 3", "the 4"):
        replica_groups(Layout((4,), ((),), 3))


@given(laid_out())
def test_groups_are_the_ranks_of_equal_blocks(pair: tuple[Layout, Shape]) -> None:
    layout, shape = pair
    assert sorted(replica_groups(layout, 7)) == sorted(
        tuple(rank + 7 for rank in ranks) for ranks in layout.grid(shape).ranks
    )


def test_ranks_take_turns_in_each_group_of_its_own() -> None:
    pair = (0, 1)
    taken = by_turns({"a": [pair], "b": [(2, 3)], "c": [pair], "d": [pair, (2, 3)]})
    assert taken == {"a": [(0,)], "b": [(2,)], "c": [(1,)], "d": [(0,), (3,)]}


def test_several_copies_are_those_of_the_next_turns() -> None:
    groups = {"a": [(0, 1, 2)], "b": [(0, 1, 2)], "c": [(5,)]}
    assert by_turns(groups, copies=2) == {"a": [(0, 1)], "b": [(1, 2)], "c": [(5,)]}
    assert by_turns(groups, copies=9) == {"a": [(0, 1, 2)], "b": [(1, 2, 0)], "c": [(5,)]}


def test_by_size_the_largest_goes_first_and_to_whom_has_least() -> None:
    pair = (0, 1)
    assert by_size({"a": [(pair, 1)], "b": [(pair, 5)], "c": [(pair, 3)], "d": [((0,), 4)]}) == {
        "d": [(0,)],  # nobody else has it
        "b": [(1,)], "c": [(0,)], "a": [(1,)],
    }  # fmt: skip


def test_weights_and_biases_that_alternate_are_even_by_size_only() -> None:
    every = Layout.of([2], [-1, -1]).grid((64, 64)), Layout.of([2], [-1]).grid((64,))
    grids = {f"{layer}.{kind}": every[kind == "bias"] for layer in range(8) for kind in ("bias", "weight")}
    turns = bytes_of(stored_once(grids, devices=2))
    sizes = bytes_of(stored_once(grids, devices=2, itemsizes=dict.fromkeys(grids, 4)))
    assert turns == {0: 8 * 64, 1: 8 * 4096}
    assert sizes == {0: 4 * 64 + 4 * 4096, 1: 4 * 64 + 4 * 4096}


@given(st.data())
def test_every_block_is_stored_once_in_each_stage_by_a_rank_that_holds_it(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from("abcdefgh"), min_size=1, unique=True))
    strategy, by_name = data.draw(pipelines({name: data.draw(st.integers(1, 3)) for name in names}))
    grids = {name: strategy.grid(name, data.draw(shapes(by_name[name]))) for name in names}
    itemsizes = data.draw(st.sampled_from([None, dict.fromkeys(names, 2)]))
    kept = stored_once(grids, devices=strategy.devices, itemsizes=itemsizes)
    assert list(kept) == names
    for name, before in grids.items():
        assert (kept[name].shape, kept[name].blocks) == (before.shape, before.blocks)
        for held, stored in zip(before.ranks, kept[name].ranks, strict=True):
            stages = [rank // strategy.devices for rank in held]
            assert set(stored) <= set(held)
            assert [rank // strategy.devices for rank in stored] == sorted(set(stages))


@given(layouts(8, 1), st.lists(st.integers(1, 100), min_size=1, max_size=20))
def test_bytes_are_even_up_to_the_largest_block(layout: Layout, factors: list[int]) -> None:
    """In one set of groups; where groups overlap, what one leaves uneven the next can only even out so far."""
    rows = layout.splits[0]
    grids = {f"t{number:02}": layout.grid((rows * factor,)) for number, factor in enumerate(factors)}
    stored = bytes_of(stored_once(grids, devices=8, itemsizes=dict.fromkeys(grids, 4)))
    for group in replica_groups(layout):
        sizes = [stored[rank] for rank in group]
        assert max(sizes) - min(sizes) <= max(factors)


def bytes_of(grids: dict[str, Grid]) -> Counter[int]:
    """How many elements each rank stores."""
    found: Counter[int] = Counter()
    for stored in grids.values():
        for block, ranks in zip(stored.blocks, stored.ranks, strict=True):
            found.update(dict.fromkeys(ranks, block.size))
    return found


@pytest.mark.parametrize("run", ["tut_src8", "mix8_optsize2"])
def test_mindspore_has_stored_the_same_tensors_on_the_same_ranks(mindspore_data: Path, run: str) -> None:
    strategy = reshard.read_strategy(mindspore_data / f"real/{run}/strategy_0.ckpt")
    original = helpers.read_rank_file(mindspore_data / f"real/{run}/safetensors/rank_0/net.safetensors")
    grids = {
        name: strategy.grid(name, strategy.whole_shape(name, original[name][1], stage=0)) for name in strategy.tensors
    }
    kept = stored_once(grids, devices=8)
    for rank in range(8):
        theirs = helpers.read_rank_file(mindspore_data / f"deduplicated/{run}/rank_{rank}/net.safetensors")
        ours = {name for name, grid in kept.items() if any(rank in ranks for ranks in grid.ranks)}
        assert ours == set(theirs) & set(grids)
