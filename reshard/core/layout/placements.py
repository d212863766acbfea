"""Placements of PyTorch's DTensor: one for each axis of a mesh, while a layout has axes for each dimension.

1. `Shard(d)` cuts dimension d. Several axes that cut one dimension do so one after the other, the first the coarsest.
2. `_StridedShard(d, split_factor=k)` cuts dimension d after the later axes have cut it into k pieces. FSDP2 does so
   after tensor parallelism.
3. A dimension of size n that is cut k ways has pieces of ceil(n / k); the last ones are shorter or empty, as with
   `torch.chunk`. A layout can have such sizes for dimension 0 only.

Source: PyTorch 2.13 `distributed/tensor/placement_types.py`.
"""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from reshard.core.layout.layout import Layout
from reshard.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reshard.core.layout.block import Shape

_REPLICATE = re.compile(r"replicate(?:\(\))?", re.IGNORECASE)
_SHARD = re.compile(
    r"(?P<strided>_?strided_?)?shard\((?:dim=)?(?P<dim>-?\d{1,3})(?:, *(?:split_factor|sf)=(?P<factor>\d{1,6}))?\)",
    re.IGNORECASE,
)


class DimShard(NamedTuple):
    """The cut of a dimension by a mesh axis.

    Attributes:
        dim: the dimension.
        factor: the number of pieces that later axes have cut it into before; None if they cut it afterwards.
    """

    dim: int
    factor: int | None = None


Placement = DimShard | None
"""The effect of a mesh axis; None if its devices hold replicas."""


def is_placement(text: object) -> bool:
    """Return whether a string looks like a placement.

    >>> [is_placement(text) for text in ("shard(0)", "Replicate()", "partial(sum)", "tp", None)]
    [True, True, True, False, False]
    """
    return isinstance(text, str) and ("(" in text or bool(_REPLICATE.fullmatch(text)))


def placement(text: str) -> Placement:
    """Parse a placement, as PyTorch writes it or in lower case.

    Raises:
        LayoutError: the text is not a placement.

    >>> placement("shard(0)"), placement("_StridedShard(dim=0, sf=4)"), placement("Replicate()")
    (DimShard(dim=0, factor=None), DimShard(dim=0, factor=4), None)
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
    return DimShard(int(match["dim"]), int(match["factor"]) if match["factor"] else None)


def layout_of_placements(extents: Shape, placements: Sequence[Placement], shape: Shape) -> Layout:
    """Return the layout of a tensor with placements on a mesh.

    Args:
        extents: the extents of the axes of the mesh, outermost first.
        placements: one for each axis.
        shape: the shape of the whole tensor.

    Raises:
        LayoutError: there is no such dimension, strided pieces differ from the pieces of the later axes, or a
            dimension other than the first has pieces of several sizes.

    >>> print(layout_of_placements((2, 4), [DimShard(0), DimShard(1)], (4, 8)))
    [2, 4] map [1, 0]
    >>> print(layout_of_placements((2, 4), [DimShard(0, 4), DimShard(0)], (8, 8)))
    [2, 4] map [(0, 1), -1]
    >>> layout_of_placements((8,), [DimShard(0)], (10, 4)).param_split_shape
    (2, 2, 2, 2, 2, 0, 0, 0)
    """
    axes_of: list[list[int]] = [[] for _ in shape]
    for axis, shard in reversed(list(enumerate(placements))):
        if shard is None:
            continue
        _check_dim(shard, shape)
        axes = axes_of[shard.dim]
        before = prod(extents[later] for later in axes)
        if shard.factor not in {None, before}:
            raise LayoutError(
                f"has the split_factor {shard.factor}; later axes cut dimension {shard.dim} {before} ways",
                code="bad-split-factor",
            )
        axes.insert(0 if shard.factor is None else len(axes), axis)
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


_MOST_PIECES = 1 << 8  # of a dimension before a strided shard; a rank then has one range for each piece


def device_ranges(
    extents: Shape, placements: Sequence[Placement], shape: Shape, device: Shape
) -> list[list[tuple[int, int]]]:
    """Return the ranges of each dimension that a device holds, in memory order.

    Unlike a layout, this works for all placements: any dimension can be cut into pieces of several sizes, and strided
    pieces need not be the pieces of later axes.

    Args:
        extents: as for `layout_of_placements`.
        placements: as for `layout_of_placements`.
        shape: as for `layout_of_placements`.
        device: the coordinates of the device in the mesh.

    Raises:
        LayoutError: there is no such dimension, or it is cut into too many pieces.

    >>> device_ranges((2, 3), [DimShard(0), DimShard(1)], (4, 8), (1, 2))
    [[(2, 4)], [(6, 8)]]
    >>> device_ranges((2,), [DimShard(0, 3)], (9,), (1,))
    [[(2, 3), (5, 6), (8, 9)]]
    >>> device_ranges((2, 2), [DimShard(0, 2), DimShard(0)], (8,), (1, 0))
    [[(2, 4)]]
    """
    ranges = [[(0, extent)] for extent in shape]
    for count, shard, number in zip(extents, placements, device, strict=True):
        if shard is None:
            continue
        _check_dim(shard, shape)
        before, after = ranges[shard.dim], list[tuple[int, int]]()
        size = sum(stop - start for start, stop in before)
        length = -(-size // (shard.factor or 1)) or 1
        if size > length * _MOST_PIECES:
            raise LayoutError(
                f"has the split_factor {shard.factor}; at most {_MOST_PIECES} are read", code="bad-split-factor"
            )
        for begin in range(0, size, length):
            piece = min(length, size - begin)
            step = -(-piece // count)
            first, last = (begin + min(at * step, piece) for at in (number, number + 1))
            for start, stop in _within(before, first, last):
                joined = after.pop()[0] if after and after[-1][1] == start else start
                after.append((joined, stop))
        ranges[shard.dim] = after
    return ranges


def _within(ranges: Sequence[tuple[int, int]], begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of consecutive ranges between two positions."""
    position = 0
    for start, stop in ranges:
        first, last = max(begin - position, 0) + start, min(end - position + start, stop)
        if first < last:
            yield first, last
        position += stop - start


def _check_dim(shard: DimShard, shape: Shape) -> None:
    if not -len(shape) <= shard.dim < len(shape):
        raise LayoutError(f"shards dimension {shard.dim} of a tensor of {len(shape)} dimensions", code="out-of-range")


def _chunks(extent: int, count: int) -> list[int]:
    """Return the sizes of the pieces of `torch.chunk`, 0 for pieces that it omits.

    >>> _chunks(10, 8), _chunks(9, 2)
    ([2, 2, 2, 2, 2, 0, 0, 0], [5, 4])
    """
    size = -(-extent // count)
    return [min(size, max(extent - size * number, 0)) for number in range(count)]
