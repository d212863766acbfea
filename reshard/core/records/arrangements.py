"""The arrangement of another checkpoint as a target, in plan files."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from reshard.core.layout.arrangement import Arranged, Arrangement
from reshard.core.layout.layout import Layout
from reshard.core.layout.mesh import Mesh
from reshard.core.records.schema import Count  # noqa: TC001 -- `schema.read` evaluates annotations
from reshard.strategy.strategy import MOST_RANKS


@dataclass(frozen=True, slots=True)
class ArrangementRecord:
    """The arrangement of a checkpoint in a plan file.

    Attributes:
        devices: the number of ranks.
        meshes: of each mesh: the device matrix and tensor map of its layout, its ranks, and the names of its axes.
        tensors: by name, the number of its mesh, the shape, and further ranks with their blocks, as in `Arranged`.
    """

    devices: Count
    meshes: tuple[tuple[tuple[Count, ...], tuple[tuple[Count, ...], ...], tuple[Count, ...], tuple[str, ...]], ...]
    tensors: dict[str, tuple[Count | None, tuple[Count, ...], tuple[tuple[Count, Count], ...]]]

    @classmethod
    def of(cls, arrangement: Arrangement) -> ArrangementRecord:
        """Return the record of an arrangement."""
        numbers: dict[Mesh, int] = {}
        tensors = {
            name: (numbers.setdefault(meshes[0], len(numbers)) if meshes else None, shape or (), others)
            for name, (meshes, shape, others) in arrangement.tensors.items()
        }
        meshes = tuple((mesh.layout.dev_matrix, mesh.layout.tensor_map, mesh.ranks, mesh.axes) for mesh in numbers)
        return cls(arrangement.devices, meshes, tensors)

    def read(self) -> Arrangement:
        """Return the arrangement; raise `ValueError` if it is invalid."""
        devices = self.devices
        if not 0 < devices <= MOST_RANKS:
            raise ValueError(f"an arrangement of {devices} ranks cannot be")
        meshes = [Mesh(Layout(matrix, axes), ranks, names) for matrix, axes, ranks, names in self.meshes]
        for mesh in meshes:
            ranks = mesh.ranks
            if len({*ranks}) != len(ranks) or len(ranks) != mesh.layout.devices or not max(ranks) < devices:
                raise ValueError("a mesh has not one rank for each device")
        tensors = {}
        for name, (number, shape, extra_ranks) in self.tensors.items():
            if number is not None and (number >= len(meshes) or len(meshes[number].layout.tensor_map) != len(shape)):
                raise ValueError("the arrangement of a tensor has a mesh that is not there, or of other dimensions")
            blocks = 1 if number is None else prod(meshes[number].layout.splits)
            if any(rank >= devices or block >= blocks for rank, block in extra_ranks):
                raise ValueError("the arrangement of a tensor has a rank, or a block, that is not there")
            tensors[name] = Arranged(() if number is None else (meshes[number],), shape, extra_ranks)
        return Arrangement(tensors, range(devices), devices, lists_all=True)
