"""Placements of PyTorch's DTensor: what each axis of a mesh does, where a layout has axes for each dimension.

1. `Shard(d)` cuts dimension d. Several axes that cut one dimension do so one after the other, the first the coarsest.
2. `_StridedShard(d, split_factor=k)` cuts it after the later axes that do, into k pieces together: so FSDP2 cuts what
   tensor parallelism has cut.
3. A dimension of size n that is cut k ways has pieces of ceil(n / k), of which the last are shorter or empty, as
   `torch.chunk` makes them. A layout has such sizes for dimension 0 alone.

Source: PyTorch 2.13 `distributed/tensor/placement_types.py`.
"""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from reshard.errors import LayoutError
from reshard.layout.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reshard.layout.block import Shape

_REPLICATE = re.compile(r"replicate(?:\(\))?", re.IGNORECASE)
_SHARD = re.compile(
    r"(?P<strided>_?strided_?)?shard\((?:dim=)?(?P<dim>-?\d{1,3})(?:, *(?:split_factor|sf)=(?P<factor>\d{1,6}))?\)",
    re.IGNORECASE,
)


class Shard(NamedTuple):
    """An axis cuts a dimension; into how many pieces later axes have cut it before, or None for none of them."""

    dim: int
    factor: int | None = None


Placement = Shard | None
"""What an axis does; None: nothing, its devices hold the same."""


def is_placement(text: object) -> bool:
    """Return whether a text is a placement, or looks as if it were to be one.

    >>> [is_placement(text) for text in ("shard(0)", "Replicate()", "partial(sum)", "tp", None)]
    [True, True, True, False, False]
    """
    return isinstance(text, str) and ("(" in text or bool(_REPLICATE.fullmatch(text)))


def placement(text: str) -> Placement:
    """Parse a placement, as PyTorch writes it or in small letters.

    Raises:
        LayoutError: the text is not a placement.

    >>> placement("shard(0)"), placement("_StridedShard(dim=0, sf=4)"), placement("Replicate()")
    (Shard(dim=0, factor=None), Shard(dim=0, factor=4), None)
    """
    if _REPLICATE.fullmatch(text):
        return None
    match = _SHARD.fullmatch(text)
    if not match or bool(match["strided"]) != bool(match["factor"]):
        raise LayoutError(
            f"{text!r:.60} is not a placement",
            code="bad-placement",
            hint="use shard(DIM), strided_shard(DIM, split_factor=N) or replicate",
        )
    return Shard(int(match["dim"]), int(match["factor"]) if match["factor"] else None)


def placed(extents: Shape, placements: Sequence[Placement], shape: Shape) -> Layout:
    """Return the layout of a tensor.

    Args:
        extents: of the axes of the mesh, outermost first.
        placements: one for each axis.
        shape: of the whole tensor.

    Raises:
        LayoutError: there is no such dimension, strided pieces are not those of the later axes, or a dimension that is
            not the first has pieces of several sizes.

    >>> print(placed((2, 4), [Shard(0), Shard(1)], (4, 8)), placed((2, 4), [Shard(0, 4), Shard(0)], (8, 8)))
    [2, 4] map [1, 0] [2, 4] map [(0, 1), -1]
    >>> placed((8,), [Shard(0)], (10, 4)).param_split_shape
    (2, 2, 2, 2, 2, 0, 0, 0)
    """
    axes_of: list[list[int]] = [[] for _ in shape]
    for axis, one in reversed(list(enumerate(placements))):
        if one is None:
            continue
        _check_dim(one, shape)
        axes = axes_of[one.dim]
        before = prod(extents[other] for other in axes)
        if one.factor not in {None, before}:
            raise LayoutError(
                f"has the split_factor {one.factor}; later axes cut dimension {one.dim} {before} ways",
                code="bad-split-factor",
            )
        axes.insert(0 if one.factor is None else len(axes), axis)
    sizes: Shape = ()
    for dim, axes in enumerate(axes_of):
        pieces = [shape[dim]]
        for axis in axes:
            pieces = [size for piece in pieces for size in _chunks(piece, extents[axis])]
        if len(set(pieces)) > 1:
            if dim:
                raise LayoutError(
                    f"splits dimension {dim} of size {shape[dim]} {len(pieces)} ways, which does not divide it",
                    code="not-divisible",
                    facts=["only dimension 0 can have pieces of several sizes"],
                )
            sizes = tuple(pieces)
    last = len(extents) - 1
    return Layout(
        tuple(extents), tuple(tuple(last - axis for axis in axes) for axes in axes_of), param_split_shape=sizes
    )


_MOST_PIECES = 1 << 8  # of a dimension; a rank has as many ranges of it as it was cut into before, or one


def held(extents: Shape, placements: Sequence[Placement], shape: Shape, place: Shape) -> list[list[tuple[int, int]]]:
    """Return what a device holds of each dimension: ranges, one behind the other in its memory.

    Unlike a layout, these have no limits: any dimension can be cut into pieces of several sizes, and strided pieces
    need not be those of later axes.

    Args:
        extents: as for `placed`, as the next two are.
        placements: likewise.
        shape: likewise.
        place: of the device in the mesh, along each axis.

    Raises:
        LayoutError: there is no such dimension, or it is cut into too many pieces.

    >>> held((2, 3), [Shard(0), Shard(1)], (4, 8), (1, 2))
    [[(2, 4)], [(6, 8)]]
    >>> held((2,), [Shard(0, 3)], (9,), (1,)), held((2, 2), [Shard(0, 2), Shard(0)], (8,), (1, 0))
    ([[(2, 3), (5, 6), (8, 9)]], [[(2, 4)]])
    """
    found = [[(0, extent)] for extent in shape]
    for count, one, number in zip(extents, placements, place, strict=True):
        if one is None:
            continue
        _check_dim(one, shape)
        some, kept = found[one.dim], list[tuple[int, int]]()
        size = sum(stop - start for start, stop in some)
        length = -(-size // (one.factor or 1)) or 1
        if size > length * _MOST_PIECES:
            raise LayoutError(
                f"has the split_factor {one.factor}; at most {_MOST_PIECES} are read", code="bad-split-factor"
            )
        for begin in range(0, size, length):
            piece = min(length, size - begin)
            step = -(-piece // count)
            first, last = (begin + min(at * step, piece) for at in (number, number + 1))
            for start, stop in _within(some, first, last):
                joined = kept.pop()[0] if kept and kept[-1][1] == start else start
                kept.append((joined, stop))
        found[one.dim] = kept
    return found


def _within(ranges: Sequence[tuple[int, int]], begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield what is between two places of ranges that are one behind the other."""
    position = 0
    for start, stop in ranges:
        first, last = max(begin - position, 0) + start, min(end - position + start, stop)
        if first < last:
            yield first, last
        position += stop - start


def _check_dim(one: Shard, shape: Shape) -> None:
    if not -len(shape) <= one.dim < len(shape):
        raise LayoutError(f"shards dimension {one.dim} of a tensor of {len(shape)} dimensions", code="out-of-range")


def _chunks(extent: int, count: int) -> list[int]:
    """Return the sizes of pieces as `torch.chunk` makes them, and of those that it leaves out.

    >>> _chunks(10, 8), _chunks(9, 2)
    ([2, 2, 2, 2, 2, 0, 0, 0], [5, 4])
    """
    size = -(-extent // count)
    return [min(size, max(extent - size * number, 0)) for number in range(count)]
