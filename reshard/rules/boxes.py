"""Convert blocks of a fused tensor to blocks of its parts, and back."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from reshard.formats.entries import Extent
from reshard.layout.axes import position, row_major
from reshard.layout.block import Block
from reshard.source.checkpoint import Shard
from reshard.source.reshape import laid, shards_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reshard.layout.block import Shape
    from reshard.rules.equation import Equation, Part
    from reshard.source.checkpoint import Tensor


def indices(extents: Shape) -> Iterator[Shape]:
    """Yield all indices one by one: there may be too many for a list."""
    if not extents:
        yield ()
        return
    for first in range(extents[0]):
        for rest in indices(extents[1:]):
            yield (first, *rest)


def pieces(equation: Equation, shard: Shard, itemsize: int) -> Iterator[tuple[Shape, int, Shard]]:
    """Yield the pieces of a fused tensor's block that belong to its parts.

    Each comes with its index along the axes in front and the number of the part.
    """
    block = shard.block
    depth = len(equation.front)
    for number, part in enumerate(equation.parts):
        body = Block(block.start[depth:], block.stop[depth:]) & part.region
        if body is None:
            continue
        start, stop = ([at[axis] - part.region.start[axis] for axis in part.order] for at in (body.start, body.stop))
        box = Block(tuple(start), tuple(stop))
        steps = row_major(block.shape)
        for index in product(*(range(a, b) for a, b in zip(block.start[:depth], block.stop[:depth], strict=True))):
            corner = (*index, *body.start)
            replicas = []
            for at in shard.replicas:
                strides = at.strides or steps
                begin = position(corner, block.start, strides)
                piece_strides = tuple(strides[depth + axis] for axis in part.order)
                replicas.append(laid(at, begin * itemsize, box.shape, piece_strides, itemsize))
            yield index, number, Shard(box, tuple(replicas))


def placed(tensor: Tensor, index: Shape, part: Part) -> Iterator[Shard]:
    """Yield the blocks of a part as blocks of the fused tensor."""
    itemsize = tensor.spec.dtype.itemsize
    for block, replicas in shards_in(tensor, part.space):
        start, stop = list(part.region.start), list(part.region.stop)
        for axis, a, b in zip(part.order, block.start, block.stop, strict=True):
            start[axis], stop[axis] = part.region.start[axis] + a, part.region.start[axis] + b
        box = Block((*index, *start), (*(n + 1 for n in index), *stop))
        placed_replicas = []
        for at in replicas:
            strides = dict(zip(part.order, at.strides or row_major(block.shape), strict=True))
            fused_strides = (*(1 for _ in index), *(strides[axis] for axis in range(len(start))))
            placed_replicas.append(laid(at, 0, box.shape, fused_strides, itemsize))
        yield Shard(box, tuple(placed_replicas))


def zeros(padding: Block, index: Shape) -> Shard:
    """Return a block of padding."""
    return Shard(Block((*index, *padding.start), (*(n + 1 for n in index), *padding.stop)), (Extent(0, ()),))
