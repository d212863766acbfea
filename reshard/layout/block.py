"""Blocks: half-open boxes of index space, which say what part of a tensor something is."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

Shape = tuple[int, ...]

MOST_DIMS = 32
"""The most dimensions of a tensor; numpy 1 has no more."""

LONGEST_NAME = 4096
"""The most bytes of a tensor's name. Whatever looks for a weight in the name of a state tries every dot of it."""

_MOST_ELEMENTS = 1 << 59
_MOST_SHOWN = 64


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
        """Return the block that is all of a tensor of this shape."""
        return cls((0,) * len(shape), shape)

    @property
    def shape(self) -> Shape:
        """The block's extent along every dimension."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    def __and__(self, other: Block) -> Block | None:
        """Return what both hold, or None where they have no element in common."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Block(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def within(self, outer: Block) -> tuple[slice, ...]:
        """Return the slices that take this block out of an array that holds `outer`."""
        return tuple(slice(a - o, b - o) for a, b, o in zip(self.start, self.stop, outer.start, strict=True))

    def __str__(self) -> str:
        """Write the block as numpy would slice it.

        >>> str(Block((0, 4), (2, 8)))
        '[0:2, 4:8]'
        """
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"


def is_possible(shape: Shape) -> bool:
    """Return whether there can be an array of this shape: its bytes, extents of 0 aside, can be counted in 64 bits.

    >>> is_possible((3, 4)), is_possible((1 << 40, 1 << 40, 0)), is_possible((-1,)), is_possible((1,) * 65)
    (True, False, False, False)
    """
    valid = len(shape) <= MOST_DIMS and all(0 <= extent <= _MOST_ELEMENTS for extent in shape)
    return valid and prod(extent or 1 for extent in shape) <= _MOST_ELEMENTS


def shape_text(shape: Iterable[int]) -> str:
    """Write a shape the way checkpoints print it; of one longer than any, the beginning.

    >>> shape_text((2, 8)), shape_text(())
    ('[2, 8]', '[]')
    """
    extents = list(shape)
    return str(extents) if len(extents) <= _MOST_SHOWN else f"{str(extents[:_MOST_SHOWN])[:-1]}, …]"
