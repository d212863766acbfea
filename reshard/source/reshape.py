"""Tensors of other shapes over the same bytes: one axis as several, several as one, axes in another order.

All of it is one map: element `x` of a box, counted from its corner, is element `sum(strides[k] * x[k])` of what lies in
an extent. To cut a box, to take an axis for several and to change the order of axes are steps in that map, so that a
block of a fused, stacked or transposed tensor needs nothing but an extent.
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from reshard.errors import LayoutError, names
from reshard.formats.entries import Extent, part_of
from reshard.layout.axes import factors, position, refined, row_major, split, together
from reshard.layout.block import Block, shape_text
from reshard.source.checkpoint import Shard, Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from reshard.layout.block import Shape
    from reshard.source.checkpoint import Checkpoint, Sharding, TensorSpec


_MOST_RUNS = 64
"""The most runs that stand for strides; what is in more of them is read through, and picked."""


class Shared:
    """Builds tensors from their blocks; those that are cut alike and lie in the same files share what says so."""

    def __init__(self) -> None:
        self._known: dict[object, Sharding] = {}

    def tensor(self, spec: TensorSpec, shards: Iterable[Shard], *, space: Shape | None = None) -> Tensor:
        """Return a tensor.

        Args:
            spec: what it is.
            shards: its blocks.
            space: what these are boxes of, where that is not its own shape.
        """
        some = sorted(shards, key=lambda shard: (shard.block.start, shard.block.stop))  # as tuples: thrice as quick
        if not prod(spec.shape):  # of which no block is another than all of it
            held = next((shard.replicas for shard in some if shard.replicas), (Extent(0, ((0, 0),)),))
            some, space = [Shard(Block.whole(spec.shape), held[:1])], None
        found = Tensor.of(spec, some, listed=len(some) > 1)
        sharding = self._known.setdefault((found.sharding.blocks, found.sharding.replicas), found.sharding)
        return found._replace(sharding=sharding, space=None if space == spec.shape else space)

    def in_space(self, tensor: Tensor, space: Shape) -> Tensor:
        """Return a tensor whose blocks are boxes of a space in which some of its axes are several."""
        found = self.tensor(tensor.spec, shards_in(tensor, space), space=space)
        return found._replace(listed=tensor.listed, varies=tensor.varies)


def shards_in(tensor: Tensor, space: Shape) -> Iterator[Shard]:
    """Yield the blocks of a tensor as boxes of a space in which some of its axes are several.

    Raises:
        LayoutError: its elements do not make that space, or its blocks are of another one.
    """
    have = tensor.space or tensor.spec.shape
    axes = factors(have, space)
    if axes is None:
        raise LayoutError(
            f"has blocks of {shape_text(have)}, which cannot make {shape_text(space)}", code="wrong-shape"
        )
    itemsize = tensor.spec.dtype.itemsize
    for block, replicas in tensor.shards:
        for box, piece in refined(block, axes):
            yield Shard(box, tuple(_cut(at, block, piece, box.shape, axes, itemsize) for at in replicas))


def _cut(extent: Extent, block: Block, piece: Block, shape: Shape, axes: Sequence[Shape], itemsize: int) -> Extent:
    """Return the extent of a part of a block, which is a box of this shape when its axes are taken for several each."""
    strides = extent.strides or row_major(block.shape)
    begin = position(piece.start, block.start, strides)
    return laid(extent, begin * itemsize, shape, split(strides, axes), itemsize)


def laid(extent: Extent, begin: int, shape: Shape, strides: Shape, itemsize: int) -> Extent:
    """Return the extent of a box by what lies in another: by runs where they are few, or by strides.

    Args:
        extent: has the box and more.
        begin: where the box begins among what that holds, in bytes.
        shape: of the box.
        strides: of its elements.
        itemsize: bytes of an element.

    >>> laid(Extent(0, ((100, 24),)), 4, (2, 2), (3, 1), 4)
    Extent(file=0, runs=((104, 8), (116, 8)), strides=())
    >>> laid(Extent(0, ((100, 24),)), 0, (3, 2), (1, 3), 4)
    Extent(file=0, runs=((100, 24),), strides=(1, 3))
    """
    depth, tail = together(shape, strides)
    pieces = prod(shape[:depth])
    if pieces > _MOST_RUNS or (tail == 1 and pieces > 1):
        last = sum((count - 1) * step for count, step in zip(shape, strides, strict=True))
        return Extent(extent.file, part_of(extent.runs, begin, (last + 1) * itemsize), strides)
    begins = [begin]
    for count, step in zip(shape[:depth], strides[:depth], strict=True):
        begins = [start + index * step * itemsize for start in begins for index in range(count)]
    runs = [run for start in begins for run in part_of(extent.runs, start, tail * itemsize)]
    return Extent(extent.file, tuple(runs))


def reshaped(tensor: Tensor, shape: Shape) -> Tensor | None:
    """Return a tensor with another shape over the same elements; None where axes would be cut across.

    >>> from reshard.dtypes import by_name
    >>> from reshard.errors import UsageError
    >>> from reshard.layout.block import Block
    >>> from reshard.source.checkpoint import TensorSpec
    >>> shards = [Shard(Block((0, 0), (4, 2)), (Extent(0, ((8, 8),)),)), Shard(Block((4, 0), (6, 2)), ())]
    >>> experts = reshaped(Tensor.of(TensorSpec("w", by_name("int8", UsageError), (6, 2)), shards), (2, 3, 2))
    >>> [(str(shard.block), shard.replicas[0].runs) for shard in experts.shards if shard.replicas]
    [('[0:1, 0:3, 0:2]', ((8, 6),)), ('[1:2, 0:1, 0:2]', ((14, 2),))]
    """
    have = tensor.space or tensor.spec.shape
    spec = tensor.spec._replace(shape=shape)
    if factors(shape, have) is not None:
        return tensor._replace(spec=spec, space=None if have == shape else have)
    if factors(have, shape) is None:
        return None
    return Shared().in_space(tensor, shape)._replace(spec=spec, space=None)


def with_shapes(checkpoint: Checkpoint, shapes: Mapping[str, Shape]) -> tuple[Checkpoint, tuple[str, ...]]:
    """Return a checkpoint in which stacked tensors have other shapes, and a warning that says which.

    MindSpore's static graph has those of all experts of a layer as [experts * rows, columns], its dynamic graph as
    [experts, rows, columns].

    Args:
        checkpoint: the checkpoint.
        shapes: of some of its tensors; those that cannot be had are left as they are.
    """
    found: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        tensor = checkpoint.tensors[name]
        if tensor.text is None and _is_stacked(shape, tensor.spec.shape) and (other := reshaped(tensor, shape)):
            found[name] = other
    if not found:
        return checkpoint, ()
    name, other = next(iter(found.items()))
    before, after = shape_text(checkpoint.tensors[name].spec.shape), shape_text(other.spec.shape)
    warning = (
        f"stacked otherwise in the target, {before} as {after} and so on, over the same bytes: {names(found, most=3)}"
    )
    return replace(checkpoint, tensors={**checkpoint.tensors, **found}), (warning,)


def _is_stacked(shape: Shape, other: Shape) -> bool:
    """Return whether one of two shapes has the first axis of the other as two."""
    longer, shorter = sorted((shape, other), key=len, reverse=True)
    return len(longer) == len(shorter) + 1 and (prod(longer[:2]), *longer[2:]) == shorter and longer[1] > 0


_STACKED = re.compile(r"(?:^|\.)(layer|expert)s(?=\.(?!(?:\w+\.)?\d+(?:\.|$)))")


def stacked_axes(tensor: Tensor) -> tuple[str, ...]:
    """Return what the first dimensions of a tensor count: `layer`, `expert`; none where that is not known.

    >>> from reshard.dtypes import by_name
    >>> from reshard.errors import UsageError
    >>> from reshard.layout.block import Block
    >>> from reshard.source.checkpoint import TensorSpec
    >>> shards = [Shard(Block((layer, 0), (layer + 1, 2)), ()) for layer in range(4)]
    >>> names = ("decoder.layers.norm.weight", "layers.0.norm.weight", "decoder.layers.mlp.experts.local_experts.0.w")
    >>> [stacked_axes(Tensor.of(TensorSpec(name, by_name("int8", UsageError), (4, 2)), shards)) for name in names]
    [('layer',), (), ('layer',)]
    """
    words = dict.fromkeys(_STACKED.findall(tensor.spec.name))
    found = []
    for axis, word in enumerate(words):
        if axis >= len(tensor.spec.shape) or any(block.shape[axis] != 1 for block in tensor.sharding.blocks):
            break
        found.append(word)
    return tuple(found)
