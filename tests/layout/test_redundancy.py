"""Who stores a replica, when every replica is stored once."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import helpers
import pytest
from generators import laid_out, layouts, pipelines, shapes
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

import reshard
from reshard.core.layout.layout import Layout, whole
from reshard.core.layout.replicas import by_size, by_turns, replica_groups, stored_once
from reshard.errors import LayoutError

if TYPE_CHECKING:
    from pathlib import Path

    from reshard.core.layout.block import Shape
    from reshard.core.layout.grid import Grid


def test_ranks_of_the_same_block_are_a_group() -> None:
    assert replica_groups(Layout.of([2, 2], [-1])) == ((0, 1, 2, 3),)
    assert replica_groups(Layout.of([2, 2], [1])) == ((0, 1), (2, 3))
    assert replica_groups(Layout.of([2, 2], [(1, 0)])) == ((0,), (2,), (1,), (3,))
    assert replica_groups(Layout.of([2, 2], [-1], 2), 4) == ((4, 6), (5, 7))
    assert replica_groups(whole(0, 3)) == ((0, 1, 2),)


def test_groups_come_by_the_last_axis_first() -> None:
    assert replica_groups(Layout.of([2, 2, 2], [2, 1])) == ((0, 1), (4, 5), (2, 3), (6, 7))


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


def test_a_tensor_of_several_stages_is_stored_once_in_each() -> None:
    tied = reshard.Strategy.of({"w": {0: Layout.of([2], [-1]), 2: Layout.of([2], [-1])}}).grid("w", (4,))
    assert tied.ranks == ((0, 1, 4, 5),)
    assert stored_once({"v": tied, "w": tied}, devices=2)["v"].ranks == ((0, 4),)
    assert stored_once({"v": tied, "w": tied}, devices=2)["w"].ranks == ((1, 5),)


def test_equal_grids_are_shared() -> None:
    every, split = Layout.of([2], [-1]).grid((8,)), Layout.of([2], [0]).grid((8,))
    kept = stored_once(dict.fromkeys("abcd", every) | {"s": split}, devices=2)
    assert kept["a"] is kept["c"] is not kept["b"] is kept["d"]
    assert kept["s"] is split


@given(st.data())
def test_every_block_is_stored_once_in_each_stage_by_a_rank_that_holds_it(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from("abcdefgh"), min_size=1, unique=True))
    strategy, by_name = data.draw(pipelines({name: data.draw(st.integers(1, 3)) for name in names}))
    grids = {name: strategy.grid(name, data.draw(shapes(by_name[name]))) for name in names}
    itemsizes = data.draw(st.sampled_from([None, dict.fromkeys(names, 2)]))
    kept = stored_once(grids, devices=strategy.devices, itemsizes=itemsizes)
    assert list(kept) == names
    for name, grid in grids.items():
        assert (kept[name].shape, kept[name].blocks) == (grid.shape, grid.blocks)
        for held, stored in zip(grid.ranks, kept[name].ranks, strict=True):
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
    for grid in grids.values():
        for block, ranks in zip(grid.blocks, grid.ranks, strict=True):
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
