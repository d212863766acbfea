"""Stacked tensors: those of all experts of a layer, one below the other, have the same bytes as one of them a plane.

MindSpore's static graph has such weights as [experts * rows, columns], its dynamic graph as [experts, rows, columns].
Blocks of one are blocks of the other, or each is several of them.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from reshard.errors import names
from reshard.formats.entries import Extent, part_of
from reshard.layout.block import Block, shape_text
from reshard.source.checkpoint import Shard, Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from reshard.layout.block import Shape
    from reshard.source.checkpoint import Checkpoint


def stacked(tensor: Tensor, shape: Shape) -> Tensor | None:
    """Return a tensor with its first dimension as two, or its first two as one; None where that is not its shape.

    >>> from reshard.dtypes import by_name
    >>> from reshard.errors import UsageError
    >>> from reshard.source.checkpoint import TensorSpec
    >>> shards = [Shard(Block((0, 0), (4, 2)), (Extent(0, ((8, 8),)),)), Shard(Block((4, 0), (6, 2)), ())]
    >>> experts = stacked(Tensor.of(TensorSpec("w", by_name("int8", UsageError), (6, 2)), shards), (2, 3, 2))
    >>> [(str(shard.block), shard.replicas[0]) for shard in experts.shards if shard.replicas]
    [('[0:1, 0:3, 0:2]', Extent(file=0, runs=((8, 6),))), ('[1:2, 0:1, 0:2]', Extent(file=0, runs=((14, 2),)))]
    """
    before = tensor.spec.shape
    if len(shape) == len(before) + 1 and (prod(shape[:2]), *shape[2:]) == before and shape[1]:
        pieces, rows = _planes, shape[1]
    elif len(before) == len(shape) + 1 and (prod(before[:2]), *before[2:]) == shape and before[1]:
        pieces, rows = _rows, before[1]
    else:
        return None
    shards = []
    for block, replicas in tensor.shards:
        begin = 0
        for piece in pieces(block, rows):
            nbytes = piece.size * tensor.spec.dtype.itemsize
            found = (Extent(file, part_of(runs, begin, nbytes)) for file, runs in replicas)
            shards.append(Shard(piece, tuple(found)))
            begin += nbytes
    shards.sort(key=lambda shard: shard.block.start)
    return Tensor.of(tensor.spec._replace(shape=shape), shards, listed=tensor.listed, varies=tensor.varies)


def with_shapes(checkpoint: Checkpoint, shapes: Mapping[str, Shape]) -> tuple[Checkpoint, tuple[str, ...]]:
    """Return a checkpoint in which stacked tensors have other shapes, and a warning that says which.

    Args:
        checkpoint: the checkpoint.
        shapes: of some of its tensors; those that cannot be had are left as they are.
    """
    found: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        tensor = checkpoint.tensors[name]
        if tensor.text is None and shape != tensor.spec.shape and (other := stacked(tensor, shape)):
            found[name] = other
    if not found:
        return checkpoint, ()
    name, other = next(iter(found.items()))
    before, after = shape_text(checkpoint.tensors[name].spec.shape), shape_text(other.spec.shape)
    warning = (
        f"stacked otherwise in the target, {before} as {after} and so on, over the same bytes: {names(found, most=3)}"
    )
    return replace(checkpoint, tensors={**checkpoint.tensors, **found}), (warning,)


def _planes(block: Block, rows: int) -> Iterator[Block]:
    """Yield the boxes that some rows are, of planes of so many."""
    (first, *start), (last, *stop) = block.start, block.stop
    if not first % rows and not last % rows:
        yield Block((first // rows, 0, *start), (last // rows, rows, *stop))
        return
    for plane in range(first // rows, -(-last // rows)):
        top, bottom = max(first - plane * rows, 0), min(last - plane * rows, rows)
        yield Block((plane, top, *start), (plane + 1, bottom, *stop))


def _rows(block: Block, rows: int) -> Iterator[Block]:
    """Yield the rows that a box of planes of so many is."""
    (first, top, *start), (last, bottom, *stop) = block.start, block.stop
    if (top, bottom) == (0, rows):
        yield Block((first * rows, *start), (last * rows, *stop))
        return
    for plane in range(first, last):
        yield Block((plane * rows + top, *start), (plane * rows + bottom, *stop))
