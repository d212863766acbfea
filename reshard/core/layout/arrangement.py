"""Arrangements: the layout of each tensor, and the ranks that hold its blocks.

A `Strategy` has the same devices for each tensor of a stage, in order. Real trainings need more: experts on a mesh of
their own, single tensors on ranks 0 and 2 of four. An arrangement expresses both; a Checkpoint 2.0 describes its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from reshard.core.layout.block import Block
from reshard.core.layout.grid import Grid
from reshard.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.core.layout.block import Shape
    from reshard.core.layout.layout import Layout
    from reshard.core.layout.mesh import Mesh


class Arranged(NamedTuple):
    """The layout of a tensor, and its ranks.

    Attributes:
        meshes: the layout over the ranks of each group that holds it, such as a pipeline stage; a mesh without ranks if
            these are unknown. Empty if each of its ranks has the whole tensor.
        shape: the whole shape, if known.
        others: further ranks that hold a block, each with the number of the block. If there are neither meshes nor
            others, every rank holds the tensor.
    """

    meshes: tuple[Mesh, ...]
    shape: Shape | None = None
    others: tuple[tuple[int, int], ...] = ()

    @property
    def layout(self) -> Layout | None:
        """Return the layout of the first mesh; None if every rank has the whole tensor."""
        return self.meshes[0].layout if self.meshes else None

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks of the meshes in the order of their devices, then the others.

        They are empty if the ranks are unknown, or all ranks hold the tensor.
        """
        return (*(rank for mesh in self.meshes for rank in mesh.ranks), *(rank for rank, _ in self.others))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Arrangement:
    """The layout and the ranks of each tensor.

    Attributes:
        tensors: the layout of each tensor, by name.
        ranks: all ranks.
        devices: number of ranks of a stage, which together store a block once if requested.
        lists_all: the training loads no other tensors.
    """

    tensors: Mapping[str, Arranged]
    ranks: range
    devices: int
    lists_all: bool = False
    _grids: dict[tuple[object, ...], Grid] = field(default_factory=dict, init=False)

    def __repr__(self) -> str:
        return f"<Arrangement: {len(self.tensors)} tensors over {len(self.ranks)} ranks>"

    def shape_of(self, name: str) -> Shape | None:
        """Return the whole shape of a tensor, or None if it is not known."""
        return self.tensors[name].shape

    def grid(self, name: str, shape: Shape) -> Grid:
        """Return the blocks of a tensor and their ranks.

        Raises:
            LayoutError: sizes do not divide, or the layout has another number of dimensions.
        """
        arranged = self.tensors[name]
        key = (arranged.meshes, shape, arranged.others)
        if key not in self._grids:
            try:
                self._grids[key] = self._grid(arranged, shape)
            except LayoutError as error:
                raise error.about(f"tensor {name!r}") from None
        return self._grids[key]

    def _grid(self, arranged: Arranged, shape: Shape) -> Grid:
        if not arranged.meshes:
            return Grid(shape, (Block.whole(shape),), (arranged.ranks or tuple(self.ranks),))
        grids = [mesh.grid(shape) for mesh in arranged.meshes]
        if len(grids) == 1 and not arranged.others:
            return grids[0]
        ranks_of: dict[Block, list[int]] = {}
        for grid in grids:
            for block, ranks in zip(grid.blocks, grid.ranks, strict=True):
                ranks_of.setdefault(block, []).extend(ranks)
        for rank, number in arranged.others:
            ranks_of[grids[0].blocks[number]].append(rank)
        return Grid.of(shape, ranks_of)
