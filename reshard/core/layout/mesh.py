"""Meshes: a layout, and the rank of each of its devices."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from reshard.core.layout.grid import Grid

if TYPE_CHECKING:
    from reshard.core.layout.block import Shape
    from reshard.core.layout.layout import Layout


@dataclass(frozen=True, slots=True)
class Mesh:
    """A layout over given ranks.

    The hash is computed once: a mesh may have thousands of ranks, and is used as a key.

    Attributes:
        layout: the layout.
        ranks: the rank of each device, in row-major order of the device matrix.
        axes: the names of the axes of the device matrix.
    """

    layout: Layout
    ranks: tuple[int, ...]
    axes: tuple[str, ...]
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.layout, self.ranks)))

    def __hash__(self) -> int:
        return self._hash

    @staticmethod
    @lru_cache(maxsize=4096)
    def of(layout: Layout, first_rank: int) -> Mesh:
        """Return the mesh of consecutive ranks, with the axes named as MindSpore does.

        >>> from reshard.core.layout.layout import Layout
        >>> mesh = Mesh.of(Layout.of([2, 1], [1]), 2)
        >>> mesh.ranks, mesh.axes
        ((2, 3), ('a', 'b'))
        """
        names = (chr(ord("a") + axis) if axis < _LETTERS else f"axis{axis}" for axis in range(len(layout.dev_matrix)))
        return Mesh(layout, tuple(range(first_rank, first_rank + layout.devices)), tuple(names))

    def grid(self, shape: Shape) -> Grid:
        """Return the blocks of a tensor of this shape and the ranks that hold them.

        Raises:
            LayoutError: sizes do not divide.

        >>> from reshard.core.layout.layout import Layout
        >>> Mesh(Layout.of([2], [0]), (3, 1), ("a",)).grid((4,)).ranks
        ((3,), (1,))
        """
        return _grid(self, shape)


_LETTERS = 26


@lru_cache(maxsize=4096)
def _grid(mesh: Mesh, shape: Shape) -> Grid:
    local = mesh.layout.grid(shape)
    ranks = tuple(tuple(sorted(mesh.ranks[device] for device in devices)) for devices in local.ranks)
    return Grid(shape, local.blocks, ranks)
