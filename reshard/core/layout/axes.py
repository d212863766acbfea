"""Reshape a tensor's axes into finer ones, and a block into boxes of the finer axes."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod
from typing import TYPE_CHECKING

from reshard.core.layout.block import Block, flat_boxes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from reshard.core.layout.block import Shape


def factors(shape: Shape, space: Shape) -> list[Shape] | None:
    """Return the axes of a finer space that make up each axis of a shape, or None.

    The axes are in row-major order.

    >>> factors((6, 2), (2, 3, 2)), factors((6, 2), (3, 4)), factors((4, 1), (4,))
    ([(2, 3), (2,)], None, [(4,), ()])
    """
    factored: list[Shape] = []
    at = 0
    for extent in shape:
        axes: list[int] = []
        while at < len(space) and prod(axes) != extent:
            axes.append(space[at])
            at += 1
        if prod(axes) != extent:
            return None
        factored.append(tuple(axes))
    rest = space[at:]
    if prod(rest) != 1:
        return None
    return [*factored[:-1], (*factored[-1], *rest)] if factored else None if rest else factored


def common(shape: Shape, spaces: Iterable[Shape]) -> Shape | None:
    """Return the coarsest common refinement of several reshapings, or None.

    No extent is 0: a tensor without elements has no other space than its own.

    >>> common((6, 4), [(2, 3, 4), (6, 4)]), common((12,), [(4, 3), (2, 6)]), common((12,), [(4, 3), (3, 4)])
    ((2, 3, 4), (2, 2, 3), None)
    """
    steps: list[set[int]] = [set() for _ in shape]  # for each dimension, the strides of its axes
    for space in spaces:
        for strides, sizes in zip(steps, factors(shape, space) or (), strict=False):
            strides.update(row_major(sizes))
    extents: list[int] = []
    for extent, strides in zip(shape, steps, strict=True):
        chain = sorted({extent, 1, *strides}, reverse=True)
        if any(longer % shorter for longer, shorter in pairwise(chain)):
            return None
        extents += [longer // shorter for longer, shorter in pairwise(chain)] or [1]
    return tuple(extents)


def row_major(shape: Shape) -> Shape:
    """Return the strides of a row-major array, in elements.

    >>> row_major((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def position(index: Shape, corner: Shape, strides: Shape) -> int:
    """Return the offset of an index from a corner, in elements, given the strides.

    >>> position((2, 3), (1, 0), (10, 1))
    13
    """
    return sum((at - start) * step for at, start, step in zip(index, corner, strides, strict=True))


def together(shape: Shape, strides: Shape) -> tuple[int, int]:
    """Split axes into outer ones and trailing contiguous ones.

    Returns:
        the number of outer axes, and the number of elements in the contiguous ones.

    >>> together((4, 2, 3), (100, 3, 1)), together((4, 2, 3), (6, 3, 1)), together((4, 5), (1, 4))
    ((1, 6), (0, 24), (2, 1))
    """
    depth, count = len(shape), 1
    while depth and (shape[depth - 1] == 1 or strides[depth - 1] == count):
        depth -= 1
        count *= shape[depth]
    return depth, count


def refined(block: Block, axes: Sequence[Shape]) -> Iterator[tuple[Block, Block]]:
    """Yield the boxes of a block in finer axes, each with its part of the block.

    >>> [(str(box), str(part)) for box, part in refined(Block((1, 0), (4, 2)), [(2, 3), (2,)])]
    [('[0:1, 1:3, 0:2]', '[1:3, 0:2]'), ('[1:2, 0:1, 0:2]', '[3:4, 0:2]')]
    """
    boxes_of_axis: list[list[tuple[Block, int, int]]] = []
    for sizes, start, stop in zip(axes, block.start, block.stop, strict=True):
        if len(sizes) == 1:
            boxes_of_axis.append([(Block((start,), (stop,)), start, stop)])
            continue
        boxes = []
        begin = start
        for box in flat_boxes(sizes, start, stop):
            boxes.append((box, begin, begin + box.size))
            begin += box.size
        boxes_of_axis.append(boxes)
    for combination in product(*boxes_of_axis):
        yield (
            Block(
                tuple(n for box, _, _ in combination for n in box.start),
                tuple(n for box, _, _ in combination for n in box.stop),
            ),
            Block(tuple(begin for _, begin, _ in combination), tuple(end for _, _, end in combination)),
        )


def split(strides: Shape, axes: Sequence[Shape]) -> Shape:
    """Return the strides of finer axes.

    >>> split((10, 1), [(2, 3), (10,)])
    (30, 10, 1)
    """
    return tuple(step * inner for step, sizes in zip(strides, axes, strict=True) for inner in row_major(sizes))


def boxes(block: Block, axes: Sequence[Shape]) -> Iterator[tuple[Block, int]]:
    """Yield the contiguous boxes of a row-major block in finer axes, with offsets.

    The offset is the index of the box's first element in the block; its other elements follow directly.

    >>> [(str(box), begin) for box, begin in boxes(Block((0, 1), (2, 3)), [(2,), (3, 2)])]
    [('[0:1, 0:1, 1:2]', 0), ('[1:2, 0:1, 1:2]', 2), ('[0:1, 1:2, 0:1]', 1), ('[1:2, 1:2, 0:1]', 3)]
    """
    strides = row_major(block.shape)
    for box, piece in refined(block, axes):
        begin = position(piece.start, block.start, strides)
        steps = split(strides, axes)
        depth, _ = together(box.shape, steps)
        for index in product(*(range(count) for count in box.shape[:depth])):
            start = tuple(a + n for a, n in zip(box.start, index, strict=False))
            yield (
                Block((*start, *box.start[depth:]), (*(n + 1 for n in start), *box.stop[depth:])),
                begin + sum(n * step for n, step in zip(index, steps, strict=False)),
            )
