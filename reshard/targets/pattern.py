"""Patterns: the layout of another Checkpoint 2.0, from its metadata.

A strategy has the same devices for each tensor of a stage, in order. A pattern can express real trainings: experts on
a separate mesh, single tensors on the ranks 0 and 2 of four. Only `metadata.json` is read.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.errors import Faults, LayoutError, SourceError
from reshard.layout.layout import Grid, Layout, whole
from reshard.layout.mesh import Mesh
from reshard.readers.checkpoint2.metadata import METADATA, Metadata
from reshard.readers.open import iteration_at
from reshard.storage.places import as_place
from reshard.strategy.schema import COUNT, TEXT, Maybe

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.layout.block import Shape
    from reshard.storage.places import AnyName

_MOST_RANKS = 1 << 20

PATTERN = {
    "devices": COUNT,
    "meshes": [([COUNT], [[COUNT]], [COUNT], [TEXT])],  # dev_matrix, tensor_map, ranks, names of axes
    "tensors": {TEXT: (Maybe(COUNT), [COUNT], [(COUNT, COUNT)])},  # mesh, shape, others: rank and block
}
"""Schema of a pattern in a plan file."""


class Arranged(NamedTuple):
    """The layout of a tensor.

    Attributes:
        mesh: the number of its mesh; None if every rank that holds it has the whole tensor.
        shape: the whole shape.
        others: ranks outside its mesh that hold it, each with the number of its block.
    """

    mesh: int | None
    shape: Shape
    others: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Pattern:
    """The assignment of a Checkpoint 2.0's blocks to ranks; an `Arrangement`.

    Attributes:
        tensors: the layout of each tensor, by name.
        known: the meshes, by number.
        devices: the number of ranks.
    """

    tensors: Mapping[str, Arranged]
    known: tuple[Mesh, ...]
    devices: int

    stages = range(1)
    others = False

    @property
    def ranks(self) -> range:
        """Ranks of the pattern."""
        return range(self.devices)

    def __repr__(self) -> str:
        return f"<Pattern: {len(self.tensors)} tensors over {self.devices} ranks>"

    def shape_of(self, name: str) -> Shape:
        """Return the whole shape of a tensor."""
        return self.tensors[name].shape

    def meshes(self, name: str, shape: Shape) -> tuple[Mesh, ...]:  # noqa: ARG002 -- as in Arrangement
        """Return the mesh of a tensor; empty if it is whole on its ranks."""
        mesh = self.tensors[name].mesh
        return () if mesh is None else (self.known[mesh],)

    def grid(self, name: str, shape: Shape) -> Grid:
        """Return the blocks of a tensor and their ranks.

        Raises:
            LayoutError: sizes do not divide, or the pattern has another number of dimensions.
        """
        first = next(iter(self.meshes(name, shape)), None)
        mesh = first or Mesh(whole(len(shape), self.devices), tuple(self.ranks), ())
        try:
            grid = mesh.grid(shape)
        except LayoutError as error:
            raise error.about(f"tensor {name!r}") from None
        extra_ranks = self.tensors[name].others
        if not extra_ranks:
            return grid
        ranks = [list(block_ranks) for block_ranks in grid.ranks]
        for rank, number in extra_ranks:
            ranks[number].append(rank)
        return Grid(shape, grid.blocks, tuple(tuple(sorted(block_ranks)) for block_ranks in ranks))


def read_layouts(path: AnyName) -> Pattern:
    """Return the layout of a Checkpoint 2.0 of MindSpore Transformers as a pattern.

    Args:
        path: its directory, or a run directory, whose last iteration is used; only `metadata.json` is read.

    Raises:
        SourceError: the metadata are missing, or not valid.
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
        tensors[name] = Arranged(tensor.mesh, tensor.shape, extra_ranks)
    faults.raise_if_any(SourceError)
    ranks = {rank for mesh in meshes for rank in mesh.ranks}.union(metadata.ranks, *metadata.groups)
    if max(ranks, default=0) >= _MOST_RANKS:
        raise SourceError(
            f"{directory / METADATA} has rank {max(ranks)}; expected {_MOST_RANKS - 1} at most", code="out-of-range",
            facts=["the file seems to be corrupt"],
        )  # fmt: skip
    return Pattern(tensors, tuple(meshes), max(ranks, default=0) + 1)


def _others(mesh: Mesh, shape: Shape, numbers: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the ranks outside the mesh that hold a block, if numbers are plausible."""
    of_rank = {rank: number for number, ranks in enumerate(mesh.grid(shape).ranks) for rank in ranks}
    if any(of_rank.get(rank, number) != number for number, rank in numbers):
        return ()
    blocks = prod(mesh.layout.splits)
    return tuple(sorted({(rank, number) for number, rank in numbers if rank not in of_rank and number < blocks}))


def pattern_data(pattern: Pattern) -> dict[str, Any]:
    """Return a pattern as data for a plan file."""
    meshes = [(*astuple(mesh.layout)[:2], mesh.ranks, mesh.axes) for mesh in pattern.known]
    return {"devices": pattern.devices, "meshes": meshes, "tensors": dict(pattern.tensors)}


def read_pattern(content: dict[str, Any]) -> Pattern:
    """Read the pattern that `pattern_data` wrote; raise `ValueError` if invalid."""
    devices = content["devices"]
    if not 0 < devices <= _MOST_RANKS:
        raise ValueError(f"a pattern of {devices} ranks cannot be")
    meshes = []
    for matrix, axes, ranks, names in content["meshes"]:
        layout = Layout(tuple(matrix), tuple(map(tuple, axes)))
        if sorted({*ranks}) != sorted(ranks) or len(ranks) != layout.devices or not max(ranks) < devices:
            raise ValueError("a mesh of a pattern has not one rank for each device")
        meshes.append(Mesh(layout, tuple(ranks), tuple(names)))
    tensors = {}
    for name, (mesh, shape, extra_ranks) in content["tensors"].items():
        if mesh is not None and (mesh >= len(meshes) or len(meshes[mesh].layout.tensor_map) != len(shape)):
            raise ValueError("a tensor of a pattern has a mesh that is not there, or of other dimensions")
        blocks = 1 if mesh is None else prod(meshes[mesh].layout.splits)
        if any(rank >= devices or number >= blocks for rank, number in extra_ranks):
            raise ValueError("a tensor of a pattern is on a rank, or has a block, that is not there")
        tensors[name] = Arranged(mesh, tuple(shape), tuple(map(tuple, extra_ranks)))
    return Pattern(tensors, tuple(meshes), devices)
