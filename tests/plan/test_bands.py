"""Row bands: every target byte is written exactly once, from the right place, whatever the splits."""

from __future__ import annotations

import itertools
from math import prod

import numpy as np
from generators import laid_out, layouts, shapes
from hypothesis import given
from hypothesis import strategies as st

from reshard.core.layout.block import Block
from reshard.core.plan.bands import Recipe, is_grid


def carry_out(recipe: Recipe, axis: int, cuts: list[int]) -> list[np.ndarray]:
    """Do with numpy what a recipe says, segment by segment, counting how often each element is written."""
    whole = np.arange(1, prod(recipe.shape) + 1).reshape(recipe.shape)
    sources = [whole[block.within(Block.whole(recipe.shape))].ravel() for block in recipe.sources]
    targets = [np.zeros(block.size, int) for block in recipe.targets]
    written = [np.zeros(block.size, int) for block in recipe.targets]
    for start, stop in itertools.pairwise(cuts):
        for segment in recipe.segments(axis, start, stop):
            rows, columns = segment.stop - segment.start, segment.columns
            read = [
                sources[number][offset : offset + rows * prod(shape)].reshape(rows, *shape)
                for number, offset, shape in zip(
                    columns.sources, segment.source_offsets, columns.source_shapes, strict=True
                )
            ]
            for place, number in enumerate(columns.targets):
                shape = (rows, *columns.target_shapes[place])
                made = np.zeros(shape, int)
                for part in columns.parts[place]:
                    made[part.target_slices or ...] = read[part.source][part.source_slices or ...]
                offset = segment.target_offsets[place]
                targets[number][offset : offset + made.size] = made.ravel()
                written[number][offset : offset + made.size] += 1
    assert all((count == 1).all() for count in written)
    return [content.reshape(block.shape) for content, block in zip(targets, recipe.targets, strict=True)]


def test_rows_to_columns_reads_every_source_and_writes_every_target_in_each_band() -> None:
    rows = [Block((0, 0), (2, 4)), Block((2, 0), (4, 4))]
    columns = [Block((0, 0), (4, 2)), Block((0, 2), (4, 4))]
    recipe = Recipe.of((4, 4), rows, columns)
    assert [(s.start, s.stop, s.columns.sources, s.columns.targets) for s in recipe.segments(0, 0, 4)] == [
        (0, 2, (0,), (0, 1)),
        (2, 4, (1,), (0, 1)),
    ]
    assert recipe.elements_read(0) == 16


def test_columns_that_stay_together_are_not_copied() -> None:
    halves = [Block((0, 0), (8, 3)), Block((0, 3), (8, 6))]
    quarters = [Block((a, b), (a + 4, b + 3)) for a in (0, 4) for b in (0, 3)]
    for segment in Recipe.of((8, 6), halves, quarters).segments(0, 0, 8):
        assert all(len(parts) == 1 and not parts[0].source_slices for parts in segment.columns.parts)


def test_a_long_row_is_banded_along_a_later_axis() -> None:
    recipe = Recipe.of((3, 4, 5), [Block.whole((3, 4, 5))], [Block((1, 1, 0), (3, 3, 5))])
    assert recipe.axis(most_elements=19) == 1
    assert recipe.rows(1) == 12
    assert [(s.start, s.stop) for s in recipe.segments(1, 0, 12)] == [(5, 7), (9, 11)]


def test_rows_that_no_target_needs_are_not_read() -> None:
    recipe = Recipe.of((8,), [Block((0,), (4,)), Block((4,), (8,))], [Block((1,), (3,))])
    assert recipe.elements_read(0) == 2


def test_scalars_and_empty_tensors() -> None:
    scalar = Recipe.of((), [Block((), ())], [Block((), ())])
    assert scalar.elements_read(0) == 1
    empty = Recipe.of((0, 4), [Block.whole((0, 4))], [Block.whole((0, 4))])
    assert list(empty.segments(0, 0, empty.rows(0))) == []
    hollow = Recipe.of((4, 0), [Block.whole((4, 0))], [Block.whole((4, 0))])
    assert list(hollow.segments(0, 0, 4)) == []


def test_blocks_that_overlap_are_no_grid() -> None:
    assert not is_grid((2, 2), [Block((0, 0), (2, 1)), Block((0, 0), (1, 2))])
    assert not is_grid((2,), [Block((0,), (2,)), Block((0,), (2,))])


@given(st.data())
def test_any_grid_becomes_any_other(data: st.DataObject) -> None:
    before, shape = data.draw(laid_out())
    after = data.draw(layouts(ndim=len(shape)))
    shape = tuple(a * b for a, b in zip(shape, data.draw(shapes([after])), strict=True))
    target_blocks = after.grid(shape).blocks
    wanted = data.draw(st.lists(st.sampled_from(target_blocks), min_size=1, unique=True) | st.just(list(target_blocks)))
    recipe = Recipe.of(shape, before.grid(shape).blocks, wanted)
    axis = data.draw(st.integers(0, len(shape) - 1))
    rows = recipe.rows(axis)
    cuts = sorted({0, rows, *data.draw(st.lists(st.integers(0, rows), max_size=4))})
    whole = np.arange(1, prod(shape) + 1).reshape(shape)
    for block, made in zip(wanted, carry_out(recipe, axis, cuts), strict=True):
        assert np.array_equal(made, whole[block.within(Block.whole(shape))])
    needed = prod(shape) if is_grid(shape, wanted) else sum(block.size for block in wanted)
    assert needed <= recipe.elements_read(axis) <= prod(shape)
