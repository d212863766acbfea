"""Reshape tensors over the same bytes: split, join and permute axes.

Everything is one map: element `x` of a box, counted from its corner, is element `sum(strides[k] * x[k])` of the
contents of an extent. Cutting a box, splitting an axis and permuting axes are steps in that map, so that a block of a
fused, stacked or transposed tensor needs only an extent.
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from reshard.core.layout.axes import factors, position, refined, row_major, split, together
from reshard.core.layout.block import Block, shape_text
from reshard.core.model.checkpoint import Shard, Tensor
from reshard.core.model.entries import Extent, part_of
from reshard.errors import LayoutError, names

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from reshard.core.layout.block import Shape
    from reshard.core.model.checkpoint import Checkpoint, Sharding, TensorSpec


_MOST_RUNS = 64
"""The most runs used in place of strides; with more, the whole span is read and elements are picked."""


class Shared:
    """Builds tensors from their blocks; equal shardings are shared between tensors."""

    def __init__(self) -> None:
        self._shardings: dict[object, Sharding] = {}

    def tensor(self, spec: TensorSpec, shards: Iterable[Shard], *, space: Shape | None = None) -> Tensor:
        """Return a tensor.

        Args:
            spec: name, dtype and shape.
            shards: its blocks.
            space: the shape that the blocks are boxes of, if not the shape of the tensor.
        """
        blocks = sorted(shards, key=lambda shard: (shard.block.start, shard.block.stop))  # fast: as tuples
        if not prod(spec.shape):  # an empty tensor has only one block
            replicas = next((shard.replicas for shard in blocks if shard.replicas), (Extent(0, ((0, 0),)),))
            blocks, space = [Shard(Block.whole(spec.shape), replicas[:1])], None
        tensor = Tensor.of(spec, blocks, listed=len(blocks) > 1)
        sharding = self._shardings.setdefault((tensor.sharding.blocks, tensor.sharding.replicas), tensor.sharding)
        return tensor._replace(sharding=sharding, space=None if space == spec.shape else space)

    def in_space(self, tensor: Tensor, space: Shape) -> Tensor:
        """Return a tensor whose blocks are boxes of a space in which axes are split."""
        reshaped_tensor = self.tensor(tensor.spec, shards_in(tensor, space), space=space)
        return reshaped_tensor._replace(listed=tensor.listed, varies=tensor.varies)


def shards_in(tensor: Tensor, space: Shape) -> Iterator[Shard]:
    """Yield the blocks of a tensor as boxes of a space in which axes are split.

    Raises:
        LayoutError: the axes of the tensor, or of its blocks, cannot be split into that space.
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
    """Return the extent of a piece of a block with split axes."""
    strides = extent.strides or row_major(block.shape)
    begin = position(piece.start, block.start, strides)
    return laid(extent, begin * itemsize, shape, split(strides, axes), itemsize)


def part_extent(extent: Extent, block: Block, part: Block, itemsize: int) -> Extent:
    """Return the extent of a part of a block.

    >>> str(part_extent(Extent(0, ((100, 24),)), Block((0, 0), (2, 3)), Block((1, 1), (2, 3)), 4).runs)
    '((116, 8),)'
    """
    axes = [(size,) for size in part.shape]
    return extent if part == block else _cut(extent, block, part, part.shape, axes, itemsize)


def laid(extent: Extent, begin: int, shape: Shape, strides: Shape, itemsize: int) -> Extent:
    """Return the extent of a box in another extent, as few runs or with strides.

    Args:
        extent: the extent that contains the box.
        begin: the offset of the box in the contents of the extent, in bytes.
        shape: the shape of the box.
        strides: the strides of its elements.
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
    """Return a tensor reshaped over the same elements; None if axes do not divide.

    >>> from reshard.dtypes import by_name
    >>> from reshard.errors import UsageError
    >>> from reshard.core.layout.block import Block
    >>> from reshard.core.model.checkpoint import TensorSpec
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
    """Reshape stacked tensors of a checkpoint; return a warning that names them, too.

    The static graph of MindSpore stacks the experts of a layer as [experts * rows, columns], its dynamic graph as
    [experts, rows, columns].

    Args:
        checkpoint: the checkpoint.
        shapes: the requested shapes of tensors; impossible ones are ignored.
    """
    changed: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        tensor = checkpoint.tensors[name]
        if tensor.text is None and _is_stacked(shape, tensor.spec.shape) and (new := reshaped(tensor, shape)):
            changed[name] = new
    if not changed:
        return checkpoint, ()
    name, new = next(iter(changed.items()))
    before, after = shape_text(checkpoint.tensors[name].spec.shape), shape_text(new.spec.shape)
    warning = (
        f"stacked otherwise in the target, {before} as {after} and so on, over the same bytes: {names(changed, most=3)}"
    )
    return replace(checkpoint, tensors={**checkpoint.tensors, **changed}), (warning,)


def _is_stacked(shape: Shape, other: Shape) -> bool:
    """Return whether one of two shapes is the other with its first axis split in two."""
    longer, shorter = sorted((shape, other), key=len, reverse=True)
    return len(longer) == len(shorter) + 1 and (prod(longer[:2]), *longer[2:]) == shorter and longer[1] > 0


_STACKED = re.compile(r"(?:^|\.)(layer|expert)s(?=\.(?!(?:\w+\.)?\d+(?:\.|$)))")

_PARAMS = "params"  # in names of JAX's programs, which stack layers along other axes


def stacked_axes(tensor: Tensor) -> tuple[str, ...]:
    """Return the meaning of the first dimensions (`layer`, `expert`), if known.

    >>> from reshard.dtypes import by_name
    >>> from reshard.errors import UsageError
    >>> from reshard.core.layout.block import Block
    >>> from reshard.core.model.checkpoint import TensorSpec
    >>> shards = [Shard(Block((layer, 0), (layer + 1, 2)), ()) for layer in range(4)]
    >>> names = ("decoder.layers.norm.weight", "layers.0.norm.weight", "decoder.layers.mlp.experts.local_experts.0.w")
    >>> [stacked_axes(Tensor.of(TensorSpec(name, by_name("int8", UsageError), (4, 2)), shards)) for name in names]
    [('layer',), (), ('layer',)]
    """
    if _PARAMS in tensor.spec.name.split("."):
        return ()
    words = dict.fromkeys(_STACKED.findall(tensor.spec.name))
    axes = []
    for axis, word in enumerate(words):
        if axis >= len(tensor.spec.shape) or any(block.shape[axis] != 1 for block in tensor.sharding.blocks):
            break
        axes.append(word)
    return tuple(axes)
