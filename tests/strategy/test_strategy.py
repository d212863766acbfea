"""Strategies: a layout for every tensor, over pipeline stages; merging the files of a pipeline."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import generators
import helpers
import numpy as np
from hypothesis import given
from refusals import refused

from reshard.core.layout.block import Block
from reshard.core.layout.layout import Layout
from reshard.errors import LayoutError, StrategyError
from reshard.strategy.files import merge
from reshard.strategy.strategy import Placed, Strategy

ROWS = Layout.of([2], [0, -1])
COLUMNS = Layout.of([2], [-1, 0])


def stage(number: int, **layouts: Layout) -> Strategy:
    """What the file of one stage of a pipeline says."""
    tensors = {name: (Placed(number, layout),) for name, layout in layouts.items()}
    devices = next(iter(layouts.values())).devices if layouts else 0
    return Strategy(tensors, range(number, number + 1), devices)


# Examples.


def test_a_strategy_of_one_stage() -> None:
    strategy = Strategy.of({"w": Layout.of([4], [0, -1]), "b": Layout.of([2, 2], [-1])})
    assert (strategy.devices, strategy.stages, strategy.ranks) == (4, range(1), range(4))
    assert not strategy.merged
    assert strategy.grid("w", (8, 2)).ranks == ((0,), (1,), (2,), (3,))
    assert strategy.grid("b", (3,)).ranks == ((0, 1, 2, 3),)
    assert repr(strategy) == "<Strategy: 2 tensors over 4 ranks>"


def test_equal_strategies_have_one_hash() -> None:
    layouts = {"a": Layout.of([4], [0, -1]), "b": Layout.of([4], [-1])}
    one, other = Strategy.of(layouts), Strategy.of(dict(reversed(layouts.items())))
    assert one == other
    assert len({one, other, Strategy.of({"a": layouts["a"]})}) == 2


def test_a_pipeline_counts_ranks_over_its_stages() -> None:
    strategy = Strategy.of({"w": ROWS, "v": {1: COLUMNS}, "tied": {1: COLUMNS, 0: ROWS}})
    assert (strategy.devices, strategy.stages, strategy.ranks) == (2, range(2), range(4))
    assert strategy.merged
    assert [strategy.stage_of(rank) for rank in strategy.ranks] == [0, 0, 1, 1]
    assert strategy.stages_of("tied") == (0, 1)
    assert strategy.stages_of("not there") == ()
    assert (strategy.names_of(0), strategy.names_of(1)) == (["w", "tied"], ["v", "tied"])
    assert repr(strategy) == "<Strategy: 3 tensors over 4 ranks in 2 pipeline stages>"


def test_a_tensor_in_several_stages_has_blocks_in_each() -> None:
    tied = Strategy.of({"tied": {0: ROWS, 1: COLUMNS}})
    assert {rank: str(block) for rank, block in tied.grid("tied", (4, 4)).by_rank().items()} == {
        0: "[0:2, 0:4]",
        1: "[2:4, 0:4]",
        2: "[0:4, 0:2]",
        3: "[0:4, 2:4]",
    }
    assert sorted(tied.grid("tied", (4, 4), stage=1).by_rank()) == [2, 3]


def test_the_file_of_a_later_stage_describes_its_own_ranks() -> None:
    second = stage(1, w=ROWS)
    assert second.ranks == range(2, 4)
    assert second.grid("w", (4, 4)).ranks == ((2,), (3,))
    assert repr(second) == "<Strategy: 1 tensor over 2 ranks (stage 1 of a pipeline)>"


def test_a_layout_is_exchanged_or_taken_out() -> None:
    strategy = Strategy.of({"w": {0: ROWS, 1: ROWS}, "b": ROWS})
    changed = strategy.with_layout("w", COLUMNS)
    assert [placed.layout for placed in changed.tensors["w"]] == [COLUMNS, COLUMNS]
    assert list(strategy.with_layout("w", None).tensors) == ["b"]
    assert strategy.with_layout("new", ROWS).stages_of("new") == (0, 1)
    assert strategy == Strategy.of({"w": {0: ROWS, 1: ROWS}, "b": ROWS})  # itself unchanged


def from_json(layout: Layout, shape: tuple[int, ...]) -> Strategy:
    """A strategy as JSON gives it, in which nested entries stand expanded."""
    return Strategy({"w": (Placed(0, layout, shape, expanded=True),)}, range(1), layout.devices)


def test_the_whole_shape_of_an_expanded_layout() -> None:
    # JSON writes [784, 512] with entries [-1, (1, 0)] as [784, 2, 256], [-1, 1, 0]; the files store [784, 128].
    expanded = from_json(Layout.of([2, 2, 2], [-1, 1, 0]), (784, 2, 256))
    assert expanded.whole_shape("w", (784, 128), stage=0) == (784, 512)
    assert expanded.grid("w", (784, 512)) == Layout.of([2, 2, 2], [-1, (1, 0)]).grid((784, 512))
    assert expanded.whole_shape("w", (784, 1, 128), stage=0) == (784, 2, 256)


def test_an_expanded_layout_of_two_meanings_is_refused_until_the_shape_is_known() -> None:
    # [2, 2, 6] under [2, 1, 0] is [4, 6] or [2, 12]: the ranks store [1, 3] of both.
    expanded = from_json(Layout.of([2, 2, 2], [2, 1, 0]), (2, 2, 6))
    with refused(LayoutError, "unknown-shape", "[2, 12] or [4, 6]", "protobuf"):
        expanded.whole_shape("w", (1, 3), stage=0)
    assert expanded.grid("w", (4, 6)).by_rank()[7] == Block((3, 3), (4, 6))
    assert expanded.grid("w", (2, 12)).by_rank()[7] == Block((1, 9), (2, 12))


# Faults.


def test_a_layout_that_does_not_fit_names_the_tensor() -> None:
    strategy = Strategy.of({"net.w": ROWS})
    with refused(LayoutError, "not-divisible", "'net.w'", "0 of size 5"):
        strategy.grid("net.w", (5, 4))
    with refused(LayoutError, "wrong-dimensions", "'net.w'", "1 dimension"):
        strategy.whole_shape("net.w", (5,), stage=0)
    expanded = from_json(Layout.of([2, 2], [1, 0]), (2, 8))
    with refused(LayoutError, "wrong-shape", "tensor 'w'", "[12]"):
        expanded.grid("w", (12,))
    with refused(LayoutError, "unknown-shape", "'w'", "[3]", "no shape"):
        expanded.whole_shape("w", (3,), stage=0)


def test_tensors_that_disagree_on_the_number_of_devices_are_all_named() -> None:
    with refused(StrategyError, "devices-differ", "strategy has 2 faults", "b.dev_matrix: [4]", "d.dev_matrix"):
        Strategy.of({"a": ROWS, "b": Layout.of([4], [0]), "c": ROWS, "d": {1: Layout.of([2, 3], [0])}})


# Merging.


def test_the_files_of_all_ranks_become_one_strategy() -> None:
    parts = [
        ("rank_0", stage(0, w=ROWS, tied=COLUMNS)),
        ("rank_1", stage(0, w=ROWS, tied=COLUMNS)),
        ("rank_2", stage(1, v=COLUMNS, tied=ROWS)),
    ]
    merged = merge(parts)
    assert merged == Strategy.of({"w": ROWS, "tied": {0: COLUMNS, 1: ROWS}, "v": {1: COLUMNS}})
    assert merge(parts[::-1]) == merged


def test_a_pipeline_of_one_stage_is_that_stage() -> None:
    assert merge([("rank_0", stage(0, w=ROWS)), ("rank_1", stage(0, w=ROWS))]) == stage(0, w=ROWS)


def test_nothing_to_merge() -> None:
    with refused(StrategyError, "no-strategy-file"):
        merge([])


# Properties.


@given(generators.models())
def test_every_rank_of_every_stage_has_the_block_that_numpy_slices(model: generators.Model) -> None:
    for strategy in (model.source, model.target):
        for name, shape in model.shapes.items():
            numbers = np.arange(prod(shape)).reshape(shape)
            by_rank = strategy.grid(name, shape).by_rank()
            expected_ranks = set()
            for placed in strategy.tensors[name]:
                item = {
                    "dev_matrix": placed.layout.dev_matrix,
                    "tensor_map": [axes or (-1,) for axes in placed.layout.tensor_map],
                    "opt_weight_shard_size": placed.layout.opt_weight_shard_size,
                }
                for local in range(strategy.devices):
                    rank = placed.stage * strategy.devices + local
                    expected_ranks.add(rank)
                    np.testing.assert_array_equal(
                        numbers[by_rank[rank].within(Block.whole(shape))],
                        numbers[helpers.slices(item, shape, local)],
                    )
                    held = strategy.whole_shape(name, by_rank[rank].shape, stage=placed.stage)
                    assert held == shape
            assert set(by_rank) == expected_ranks


@given(generators.models())
def test_a_pipeline_taken_apart_merges_to_itself(model: generators.Model) -> None:
    strategy = model.source
    parts = []
    for number in strategy.stages:
        tensors = {
            name: tuple(placed for placed in places if placed.stage == number)
            for name, places in strategy.tensors.items()
            if number in strategy.stages_of(name)
        }
        if not tensors:
            return  # MindSpore's files of such a stage are empty, which merging refuses
        parts.append((f"{number}.ckpt", Strategy(tensors, range(number, number + 1), strategy.devices)))
    merged = merge(parts)
    assert merged.tensors == strategy.tensors
    assert (merged.stages, merged.devices) == (strategy.stages, strategy.devices)
    assert merged == replace(strategy, tensors=merged.tensors)


def test_a_layout_given_by_hand_is_for_as_many_devices() -> None:
    strategy = Strategy.of({"w": Layout.of([4], [0])})
    with refused(StrategyError, "devices-differ", "'w'", "3 devices", "has 4"):
        strategy.with_layout("w", Layout.of([3], [0]))
