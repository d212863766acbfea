"""Whether blocks cover a tensor exactly once, compared with counting every element."""

from __future__ import annotations

import time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reshard.core.layout.block import Block, cover_fault, flat_boxes


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


shapes = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@given(data=st.data(), shape=shapes)
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


@given(data=st.data(), shape=shapes)
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
