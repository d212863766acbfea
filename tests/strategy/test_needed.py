"""The source ranks that a target rank needs: they suffice, and none can be left out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from generators import layouts, shapes
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

import reshard
from reshard.core.layout.layout import Layout
from reshard.errors import LayoutError, UsageError
from reshard.strategy.needed import needed_ranks
from reshard.strategy.strategy import Placed, Strategy

if TYPE_CHECKING:
    from pathlib import Path

    from reshard.core.layout.block import Block, Shape


def test_each_replica_group_gives_one_rank_and_the_own_number_is_preferred() -> None:
    rows = Strategy.of({"w": Layout.of([2, 2], [1, -1])})
    assert [needed_ranks(rows, rows, rank) for rank in rows.ranks] == [(0,), (1,), (2,), (3,)]
    assert needed_ranks(rows, None, 0) == (0, 2)
    assert needed_ranks(rows, None, 3) == (0, 3)


def test_tensors_are_covered_together() -> None:
    """`a` is split over the first axis and `b` over the second: two ranks on the diagonal have both."""
    crossed = Strategy.of({"a": Layout.of([2, 2], [1]), "b": Layout.of([2, 2], [0])})
    assert needed_ranks(crossed, None, 0) == (0, 3)
    assert needed_ranks(crossed, None, 1) == (1, 2)
    large = Strategy.of({"a": Layout.of([64, 64], [1]), "b": Layout.of([64, 64], [0])})
    assert len(needed_ranks(large, None, 0)) == 64


def test_a_tensor_of_several_stages_comes_from_the_lowest() -> None:
    layout = Layout.of([2], [0])
    source = Strategy.of({"tied": {0: layout, 1: layout}, "head": {1: layout}})
    assert needed_ranks(source, None, 0) == (0, 1, 2, 3)
    assert needed_ranks(source, Strategy.of({"tied": Layout.of([1], [-1])}), 0) == (0, 1)


def test_only_what_the_targets_stage_holds_counts() -> None:
    source = Strategy.of({"a": Layout.of([2], [0]), "b": Layout.of([2], [-1])})
    target = Strategy.of({"a": {0: Layout.of([1], [-1])}, "b": {1: Layout.of([1], [-1])}})
    assert needed_ranks(source, target, 0) == (0, 1)
    assert needed_ranks(source, target, 1) == (1,)
    assert needed_ranks(source, Strategy.of({"c": Layout.of([1], [-1])}), 0) == (0,)  # copies come from somewhere


def test_expanded_json_layouts_are_folded_to_the_other_sides_dimensions() -> None:
    nested = Layout.of([2, 2, 2], [-1, (1, 0)])
    expanded = Strategy({"w": (Placed(0, Layout.of([2, 2, 2], [-1, 1, 0]), (8, 2, 4), expanded=True),)}, range(1), 8)
    columns = Strategy.of({"w": Layout.of([4], [-1, 0])})
    for rank in range(4):
        assert needed_ranks(expanded, columns, rank) == needed_ranks(Strategy.of({"w": nested}), columns, rank)
        assert needed_ranks(columns, expanded, rank) == needed_ranks(columns, Strategy.of({"w": nested}), rank)
    assert len(needed_ranks(expanded, None, 0)) == 4


def test_layouts_of_no_common_shape_and_unknown_ranks_are_refused() -> None:
    flat, deep = Strategy.of({"w": Layout.of([2], [0])}), Strategy.of({"w": Layout.of([2], [0, -1])})
    with refused(LayoutError, "no-common-shape", "'w'"):
        needed_ranks(flat, deep, 0)
    with refused(UsageError, "no-such-rank", "rank 2", "0 to 1"):
        needed_ranks(flat, flat, 2)


def test_real_strategies_of_4096_ranks_take_no_time(mindspore_data: Path) -> None:
    source = Strategy.of(
        {
            f"{number}": Layout.of([8, 8, 8, 8], axes, size)
            for number, (axes, size) in enumerate(
                [([3, -1], 0), ([2, 1], 0), ([(3, 0), -1], 0), ([1, 2], 8), ([0, -1], 0), ([(1, 0), 2], 0)]
            )
        }
    )
    assert len(needed_ranks(source, None, 0)) == 512
    for path in sorted((mindspore_data / "strategies").glob("*.ckpt")):
        strategy = reshard.read_strategy(path)
        assert needed_ranks(strategy, strategy, 0) == (0,), path.name


@given(st.data())
def test_it_suffices_and_none_can_be_left_out(data: st.DataObject) -> None:
    """Block by block, on real shapes. A smaller set may exist: to find the least one is hard (set cover)."""
    devices, others = data.draw(st.sampled_from([(4, 2), (6, 4), (8, 8), (8, 3)]))
    before: dict[str, Layout] = {}
    after: dict[str, Layout] = {}
    sizes: dict[str, Shape] = {}
    for name in "abc"[: data.draw(st.integers(1, 3))]:
        ndim = data.draw(st.integers(1, 3))
        pair = [data.draw(layouts(count, ndim)) for count in (devices, others)]
        before[name], after[name] = pair
        sizes[name] = data.draw(shapes(pair))
    source, target = Strategy.of(before), Strategy.of(after)
    rank = data.draw(st.integers(0, others - 1))

    wanted: dict[str, Block] = {name: after[name].grid(sizes[name]).by_rank()[rank] for name in after}
    held = {name: source.grid(name, sizes[name]).by_rank() for name in before}

    def suffices(ranks: tuple[int, ...]) -> bool:
        for name, block in wanted.items():
            parts = {part for r in ranks if (part := held[name][r] & block)}
            if sum(part.size for part in parts) < block.size:
                return False
        return True

    found = needed_ranks(source, target, rank)
    assert suffices(found)
    for gone in found:
        rest = tuple(r for r in found if r != gone)
        assert not suffices(rest)
