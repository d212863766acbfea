"""The arrangement of a Checkpoint 2.0, read from its metadata."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from reshard.core.layout.arrangement import Arranged, Arrangement
from reshard.errors import Faults, SourceError
from reshard.formats.checkpoint2.metadata import Metadata
from reshard.formats.checkpoint2.names import METADATA
from reshard.strategy.strategy import MOST_RANKS

if TYPE_CHECKING:
    from reshard.core.layout.block import Shape
    from reshard.core.layout.mesh import Mesh
    from reshard.core.storage.places import Place


def layouts_at(directory: Place) -> Arrangement:
    """Return the arrangement of a Checkpoint 2.0; only its metadata are read.

    Raises:
        SourceError: the metadata are missing, or not valid.
    """
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
