"""Blocks: half-open boxes of index space, each a part of a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

Shape = tuple[int, ...]

MOST_DIMS = 32
"""The most dimensions of a tensor; numpy 1 has no more."""

LONGEST_NAME = 4096
"""The most bytes of a tensor's name. The search for a weight in the name of a state tries every dot of it."""

_MOST_ELEMENTS = 1 << 59
_MOST_SHOWN = 64
_MOST_CORNERS = 1 << 22
_MOST_COMPARED = 1 << 10


@dataclass(frozen=True, slots=True, order=True)
class Block:
    """The indices from `start` (included) to `stop` (excluded), along every dimension.

    >>> left = Block((0, 0), (4, 3))
    >>> left & Block((2, 1), (6, 9))
    Block(start=(2, 1), stop=(4, 3))
    >>> left & Block((0, 3), (4, 6)) is None
    True
    """

    start: Shape
    stop: Shape

    @classmethod
    def whole(cls, shape: Shape) -> Block:
        """Return the block of a whole tensor of this shape."""
        return cls((0,) * len(shape), shape)

    @property
    def shape(self) -> Shape:
        """Return the block's extent along every dimension."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)

    @property
    def ranges(self) -> list[range]:
        """Return the indices along every dimension."""
        return [range(start, stop) for start, stop in zip(self.start, self.stop, strict=True)]

    def __and__(self, other: Block) -> Block | None:
        """Return the intersection of two blocks, or None if it is empty."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Block(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def within(self, outer: Block) -> tuple[slice, ...]:
        """Return the slices that select this block from an array that holds `outer`."""
        return tuple(slice(a - o, b - o) for a, b, o in zip(self.start, self.stop, outer.start, strict=True))

    def __str__(self) -> str:
        """Write the block as numpy would slice it.

        >>> str(Block((0, 4), (2, 8)))
        '[0:2, 4:8]'
        """
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"


def flat_boxes(shape: Shape, begin: int, end: int) -> list[Block]:
    """Return the boxes that make up a range of elements in row-major order.

    There are at most 2 x dims - 1, in row-major order.

    >>> [str(block) for block in flat_boxes((3, 4), 2, 11)]
    ['[0:1, 2:4]', '[1:2, 0:4]', '[2:3, 0:3]']
    """
    if begin >= end:
        return []
    if not shape:
        return [Block((), ())]
    row = prod(shape[1:])
    first, last = -(-begin // row), end // row  # whole rows
    parts = [(first - 1, begin - (first - 1) * row, row), (last, 0, end - last * row)]
    if first > last:
        parts = [(last, begin - last * row, end - last * row), (last, 0, 0)]
    head, tail = (
        [Block((at, *block.start), (at + 1, *block.stop)) for block in flat_boxes(shape[1:], low, high)]
        for at, low, high in parts
    )
    rows = [Block((first, *(0,) * len(shape[1:])), (last, *shape[1:]))] if first < last else []
    return [*head, *rows, *tail]


def is_possible(shape: Shape) -> bool:
    """Return whether an array of this shape can exist.

    It cannot if 64 bits cannot count its bytes, extents of 0 aside.

    >>> is_possible((3, 4)), is_possible((1 << 40, 1 << 40, 0)), is_possible((-1,)), is_possible((1,) * 65)
    (True, False, False, False)
    """
    valid = len(shape) <= MOST_DIMS and all(0 <= extent <= _MOST_ELEMENTS for extent in shape)
    return valid and prod(extent or 1 for extent in shape) <= _MOST_ELEMENTS


def shape_text(shape: Iterable[int]) -> str:
    """Write a shape as checkpoints print it; cut it if it is absurdly long.

    >>> shape_text((2, 8)), shape_text(())
    ('[2, 8]', '[]')
    """
    extents = list(shape)
    return str(extents) if len(extents) <= _MOST_SHOWN else f"{str(extents[:_MOST_SHOWN])[:-1]}, …]"


def cover_fault(shape: Shape, blocks: Collection[Block]) -> str | None:
    """Return why distinct blocks do not cover a tensor exactly once, or None.

    They do if their sizes add up to the tensor's, and if each point is the corner of an even number of them, but for
    the tensor's own corners: then every element is in an odd number of blocks, and on average in one. Comparing all
    pairs would take minutes if there are many blocks.

    >>> cover_fault((4, 4), [Block((0, 0), (2, 4)), Block((2, 0), (4, 1)), Block((2, 1), (4, 4))])
    >>> cover_fault((4,), [Block((0,), (3,)), Block((2,), (4,))])
    'is of shape [4], and its blocks [0:3] and [2:4] overlap'
    >>> cover_fault((4,), [Block((0,), (3,))])
    'is of shape [4], and its blocks have 3 of 4 elements'
    """
    whole = Block.whole(shape)
    for block in blocks:
        if len(block.start) != len(shape) or (block.size and block & whole != block):
            return f"is of shape {shape_text(shape)}, and its block {block} is not within that"
    covered, size = sum(block.size for block in blocks), prod(shape)
    if covered < size:
        return f"is of shape {shape_text(shape)}, and its blocks have {covered} of {size} elements"
    cut = [dim for dim, end in enumerate(shape) if any(b.start[dim] or b.stop[dim] != end for b in blocks if b.size)]
    if len(blocks) << len(cut) > _MOST_CORNERS:
        return f"is of shape {shape_text(shape)}, and in {len(blocks)} blocks along {len(cut)} dimensions"
    odd = _corners(whole, cut)
    for block in blocks:
        if block.size:
            odd ^= _corners(block, cut)
    if covered == size and (not odd or not size):
        return None
    return f"is of shape {shape_text(shape)}, and {_overlapping(blocks)} overlap"


def _corners(block: Block, dims: Iterable[int]) -> set[Shape]:
    """Return the corners of a block, projected onto some dimensions."""
    return set(product(*((block.start[dim], block.stop[dim]) for dim in dims)))


def _overlapping(blocks: Collection[Block]) -> str:
    """Return two blocks that overlap, as text; no names if there are too many."""
    near: list[Block] = []
    for block in sorted(blocks) if len(blocks) <= _MOST_COMPARED else ():
        near = [candidate for candidate in near if candidate.stop[0] > block.start[0]]
        for candidate in near:
            if candidate & block:
                return f"its blocks {candidate} and {block}"
        near.append(block)
    return "some of its blocks"
