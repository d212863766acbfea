"""The arrangement of another Checkpoint 2.0 as a target: read from its metadata, and kept in plan files."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from reshard.arguments import checked
from reshard.core.layout.arrangement import Arranged, Arrangement
from reshard.core.layout.layout import Layout
from reshard.core.layout.mesh import Mesh
from reshard.core.records.schema import Count  # noqa: TC001 -- `schema.read` evaluates annotations
from reshard.core.runs import iteration_at
from reshard.core.storage.places import as_place
from reshard.errors import Faults, SourceError
from reshard.formats.checkpoint2.metadata import Metadata
from reshard.formats.checkpoint2.names import METADATA
from reshard.strategy.strategy import MOST_RANKS

if TYPE_CHECKING:
    from reshard.core.layout.block import Shape
    from reshard.core.storage.places import AnyName


@dataclass(frozen=True, slots=True)
class ArrangementRecord:
    """The arrangement of a Checkpoint 2.0 in a plan file.

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


@checked
def read_layouts(path: AnyName) -> Arrangement:
    """Return the arrangement of a Checkpoint 2.0 of MindSpore Transformers.

    Args:
        path: its directory, or a run directory, whose last iteration is used; only `metadata.json` is read.

    Raises:
        SourceError: the metadata are missing, or not valid.

    >>> options = {"source_strategy": "src_strategy.ckpt", "target_strategy": "dst_strategy.ckpt"}
    >>> report = reshard.convert("src_checkpoints", "run", to="checkpoint2", step=4, **options)
    >>> len(reshard.read_layouts("run").tensors)
    15
    """
    directory = iteration_at(as_place(path))
    if not (directory / METADATA).is_file():
        if not directory.is_dir():
            raise SourceError(f"no such directory: {directory}", code="not-found")
        raise SourceError(
            f"{directory} has no {METADATA}",
            code="not-a-checkpoint",
            hint="give a Checkpoint 2.0 whose tensors are cut",
        )
    metadata = Metadata(directory / METADATA)
    meshes = list(metadata.meshes)
    faults = Faults(str(directory / METADATA))
    tensors = {}
    for name, tensor in metadata.listed.items():
        if tensor.reason:
            faults.add(f"tensor {name!r}", tensor.reason, code="unreadable-tensor")
        mesh = None if tensor.mesh is None else meshes[tensor.mesh]
        extra_ranks = _others(mesh, tensor.shape, metadata.held(name)) if mesh else ()
        tensors[name] = Arranged((mesh,) if mesh else (), tensor.shape, extra_ranks)
    faults.raise_if_any(SourceError)
    devices = metadata.devices
    if devices > MOST_RANKS:
        raise SourceError(
            f"{directory / METADATA} has rank {devices - 1}; expected {MOST_RANKS - 1} at most", code="out-of-range",
            facts=["the file seems to be corrupt"],
        )  # fmt: skip
    return Arrangement(tensors, range(devices), devices, lists_all=True)


def _others(mesh: Mesh, shape: Shape, numbers: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the ranks outside the mesh that hold a block, if numbers are plausible."""
    of_rank = {rank: number for number, ranks in enumerate(mesh.grid(shape).ranks) for rank in ranks}
    if any(of_rank.get(rank, number) != number for number, rank in numbers):
        return ()
    blocks = prod(mesh.layout.splits)
    return tuple(sorted({(rank, number) for number, rank in numbers if rank not in of_rank and number < blocks}))
