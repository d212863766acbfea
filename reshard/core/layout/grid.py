"""Grids: the distinct blocks of a tensor, and the ranks that hold each."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, product
from typing import TYPE_CHECKING

from reshard.core.layout.block import Block, Shape, shape_text
from reshard.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from reshard.core.layout.layout import Layout

Axes = tuple[int, ...]

MOST_DEVICES = 1 << 17
"""The most devices of a stage that are accepted; a file with more is corrupt."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The distinct blocks of a tensor in row-major order, and the ranks of each.

    The hash is computed once: thousands of tensors share a grid of thousands of blocks, which is used as a key.

    Attributes:
        shape: the whole tensor's shape.
        blocks: distinct blocks, which together cover the tensor.
        ranks: for each block, the ranks that hold it, ascending.
    """

    shape: Shape
    blocks: tuple[Block, ...]
    ranks: tuple[tuple[int, ...], ...]
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.shape, self.blocks, self.ranks)))

    def __hash__(self) -> int:
        return self._hash

    @classmethod
    def of(cls, shape: Shape, ranks_of: Mapping[Block, Iterable[int]]) -> Grid:
        """Return the grid of blocks in any order, each with its ranks."""
        blocks = sorted(ranks_of, key=lambda block: (block.start, block.stop[::-1]))
        return cls(shape, tuple(blocks), tuple(tuple(sorted(ranks_of[block])) for block in blocks))

    def by_rank(self) -> dict[int, Block]:
        """Return each rank's block."""
        return {rank: block for block, ranks in zip(self.blocks, self.ranks, strict=True) for rank in ranks}

    def holders(self, region: Block) -> list[tuple[int, ...]]:
        """Return the ranks of each block that overlaps a region."""
        return [ranks for block, ranks in zip(self.blocks, self.ranks, strict=True) if block & region]


@lru_cache(maxsize=4096)
def grid(shape: Shape, stages: tuple[tuple[Layout, int], ...]) -> Grid:
    """Return the grid of a tensor that lives in one pipeline stage or several.

    Args:
        shape: the whole tensor's shape.
        stages: a layout for each stage that holds the tensor, with the global number of the stage's first rank.

    Raises:
        LayoutError: sizes do not divide; the message names the dimension and both sizes.

    >>> from reshard.core.layout.layout import Layout
    >>> grid((4,), ((Layout.of([2], [0]), 0), (Layout.of([2], [-1]), 2))).ranks
    ((0,), (2, 3), (1,))
    """
    ranks_of: dict[Block, list[int]] = {}
    for layout, first_rank in stages:
        for rank, block in enumerate(_blocks(layout, shape), first_rank):
            ranks_of.setdefault(block, []).append(rank)
    return Grid.of(shape, ranks_of)


def _blocks(layout: Layout, shape: Shape) -> Iterator[Block]:
    """Yield the block of every rank of a stage, in rank order."""
    if layout.field:
        raise LayoutError(
            f"field is {layout.field}: its rows are interleaved by device, which no block describes",
            code="unsupported-layout",
        )
    if len(shape) != len(layout.tensor_map):
        raise LayoutError(
            f"the tensor has {len(shape)} dimensions {shape_text(shape)}, "
            f"the layout has {len(layout.tensor_map)} (tensor_map {map_text(layout.tensor_map)})",
            code="wrong-dimensions",
        )
    edges = _edges(layout, shape)
    depth = len(layout.dev_matrix) - 1
    axes_of = [tuple(depth - value for value in axes) for axes in layout.tensor_map]
    unused = layout.unused_axes
    pieces = layout.optimizer_shards
    # Equal blocks are one object, so that 4,096 replicas take the memory of one.
    cache: dict[tuple[int, ...], Block] = {}
    for coordinates in product(*map(range, layout.dev_matrix)):
        index = [flat_index(coordinates, layout.dev_matrix, axes) for axes in axes_of]
        if pieces > 1:
            index[0] = index[0] * pieces + flat_index(coordinates, layout.dev_matrix, unused) % pieces
        key = tuple(index)
        block = cache.get(key)
        if block is None:
            block = cache[key] = Block(
                tuple(edge[i] for edge, i in zip(edges, index, strict=True)),
                tuple(edge[i + 1] for edge, i in zip(edges, index, strict=True)),
            )
        yield block


def _edges(layout: Layout, shape: Shape) -> list[Sequence[int]]:
    """Return the slice boundaries of each dimension, from 0 to its extent."""
    edges: list[Sequence[int]] = []
    for dim, (extent, ways) in enumerate(zip(shape, layout.splits, strict=True)):
        if dim == 0 and layout.param_split_shape:
            sizes = layout.param_split_shape
            if layout.opt_weight_shard_size or len(sizes) != ways or sum(sizes) != extent or min(sizes) < 0:
                raise LayoutError(
                    f"dimension 0 of size {extent} is split {ways} ways, "
                    f"which param_split_shape {shape_text(sizes)} does not describe",
                    code="wrong-sizes",
                )
            edges.append([0, *accumulate(sizes)])
            continue
        if extent % ways:
            raise LayoutError(
                f"dimension {dim} of size {extent} does not divide into {_factors(layout, dim)}",
                code="not-divisible",
                facts=[f"it divides into {_nearest_divisors(extent, ways)}"],
            )
        edges.append(range(0, extent + 1, extent // ways) if extent else [0] * (ways + 1))
    if not shape and layout.optimizer_shards > 1:
        raise LayoutError("a tensor without dimensions cannot be sharded by the optimizer", code="wrong-dimensions")
    return edges


def _nearest_divisors(extent: int, ways: int) -> str:
    """Return the divisors of an extent nearest to `ways`, as text.

    >>> _nearest_divisors(12, 5), _nearest_divisors(7, 8)
    ('4 or 6', '7')
    """
    below = next(number for number in range(min(ways, extent), 0, -1) if not extent % number)
    above = next((number for number in range(ways, min(extent, MOST_DEVICES) + 1) if not extent % number), None)
    return f"{below}" if above is None else f"{below} or {above}"


def _factors(layout: Layout, dim: int) -> str:
    """Return the number of pieces of a dimension, as text that says what cuts it."""
    pieces = layout.splits[dim]
    if dim == 0 and layout.optimizer_shards > 1:
        by_optimizer = layout.optimizer_shards
        return f"{pieces} ({pieces // by_optimizer} by the tensor map, {by_optimizer} by the optimizer)"
    return f"{pieces}"


def flat_index(coordinates: Sequence[int], extents: Sequence[int], axes: Axes) -> int:
    """Return the row-major position of a rank among some device axes."""
    index = 0
    for axis in axes:
        index = index * extents[axis] + coordinates[axis]
    return index


def map_text(tensor_map: tuple[Axes, ...]) -> str:
    """Write a tensor map as a strategy file would.

    >>> map_text(((1, 0), (), (2,)))
    '[(1, 0), -1, 2]'
    """
    entries = [str(axes) if len(axes) > 1 else str(axes[0]) if axes else "-1" for axes in tensor_map]
    return "[" + ", ".join(entries) + "]"
