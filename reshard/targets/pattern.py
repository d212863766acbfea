"""Another Checkpoint 2.0 as a pattern: which rank holds which block of a tensor is as its metadata say.

A strategy has the same devices for each tensor of a stage, in order. A pattern has what trainings have: experts on a
mesh of their own, single tensors on the ranks 0 and 2 of four. No file but `metadata.json` is looked at.
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
"""What a plan file has of a pattern."""


class Arranged(NamedTuple):
    """How a tensor is cut.

    Attributes:
        mesh: the number of its mesh; None where every rank that holds it has all of it.
        shape: the whole shape.
        others: ranks that hold it though its mesh does not have them, each with the number of its block.
    """

    mesh: int | None
    shape: Shape
    others: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Pattern:
    """Which rank of a Checkpoint 2.0 holds which block of each tensor: `Arrangement`.

    Attributes:
        tensors: how each tensor is cut, by its name.
        known: the meshes, by their numbers.
        devices: the number of ranks.
    """

    tensors: Mapping[str, Arranged]
    known: tuple[Mesh, ...]
    devices: int

    stages = range(1)
    others = False

    @property
    def ranks(self) -> range:
        """The ranks."""
        return range(self.devices)

    def __repr__(self) -> str:
        return f"<Pattern: {len(self.tensors)} tensors over {self.devices} ranks>"

    def shape_of(self, name: str) -> Shape:
        """Return the whole shape that a tensor has there."""
        return self.tensors[name].shape

    def meshes(self, name: str, shape: Shape) -> tuple[Mesh, ...]:  # noqa: ARG002 -- as in Arrangement
        """Return how a tensor is cut; none where every rank that holds it has all of it."""
        mesh = self.tensors[name].mesh
        return () if mesh is None else (self.known[mesh],)

    def grid(self, name: str, shape: Shape) -> Grid:
        """Return which ranks hold which block of a tensor.

        Raises:
            LayoutError: sizes do not divide, or the tensor has other dimensions there.
        """
        found = next(iter(self.meshes(name, shape)), None)
        mesh = found or Mesh(whole(len(shape), self.devices), tuple(self.ranks), ())
        try:
            grid = mesh.grid(shape)
        except LayoutError as error:
            raise error.about(f"tensor {name!r}") from None
        others = self.tensors[name].others
        if not others:
            return grid
        ranks = [list(some) for some in grid.ranks]
        for rank, number in others:
            ranks[number].append(rank)
        return Grid(shape, grid.blocks, tuple(tuple(sorted(some)) for some in ranks))


def read_layouts(path: AnyName) -> Pattern:
    """Return how a Checkpoint 2.0 of MindSpore Transformers is cut, as a pattern for another.

    Args:
        path: its directory, or that of a run, of which the last iteration is taken; `metadata.json` alone is read.

    Raises:
        SourceError: there are no metadata, or they are not valid.
    """
    place = iteration_at(as_place(path))
    if not (place / METADATA).is_file():
        if not place.is_dir():
            raise SourceError(f"no such directory: {place}", code="not-found")
        raise SourceError(
            f"{place} has no {METADATA}", code="not-a-checkpoint", hint="give a Checkpoint 2.0 whose tensors are cut"
        )
    said = Metadata(place / METADATA)
    meshes = list(said.meshes)
    faults = Faults(str(place / METADATA))
    tensors = {}
    for name, one in said.listed.items():
        if one.reason:
            faults.add(f"tensor {name!r}", one.reason, code="unreadable-tensor")
        mesh = None if one.mesh is None else meshes[one.mesh]
        others = _others(mesh, one.shape, said.held(name)) if mesh else ()
        tensors[name] = Arranged(one.mesh, one.shape, others)
    faults.raise_if_any(SourceError)
    ranks = {rank for mesh in meshes for rank in mesh.ranks}.union(said.ranks, *said.groups)
    if max(ranks, default=0) >= _MOST_RANKS:
        raise SourceError(
            f"{place / METADATA} has rank {max(ranks)}; expected {_MOST_RANKS - 1} at most", code="out-of-range",
            facts=["the file seems to be corrupt"],
        )  # fmt: skip
    return Pattern(tensors, tuple(meshes), max(ranks, default=0) + 1)


def _others(mesh: Mesh, shape: Shape, held: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the ranks that hold a block though the mesh does not have them, as far as its number can be believed."""
    of_rank = {rank: number for number, some in enumerate(mesh.grid(shape).ranks) for rank in some}
    if any(of_rank.get(rank, number) != number for number, rank in held):
        return ()
    blocks = prod(mesh.layout.splits)
    return tuple(sorted({(rank, number) for number, rank in held if rank not in of_rank and number < blocks}))


def pattern_data(pattern: Pattern) -> dict[str, Any]:
    """Return a pattern as a plan file has it."""
    meshes = [(*astuple(mesh.layout)[:2], mesh.ranks, mesh.axes) for mesh in pattern.known]
    return {"devices": pattern.devices, "meshes": meshes, "tensors": dict(pattern.tensors)}


def read_pattern(content: dict[str, Any]) -> Pattern:
    """Return the pattern that `pattern_data` wrote, or raise `ValueError` where it is not valid."""
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
    for name, (mesh, shape, others) in content["tensors"].items():
        if mesh is not None and (mesh >= len(meshes) or len(meshes[mesh].layout.tensor_map) != len(shape)):
            raise ValueError("a tensor of a pattern has a mesh that is not there, or of other dimensions")
        blocks = 1 if mesh is None else prod(meshes[mesh].layout.splits)
        if any(rank >= devices or number >= blocks for rank, number in others):
            raise ValueError("a tensor of a pattern is on a rank, or has a block, that is not there")
        tensors[name] = Arranged(mesh, tuple(shape), tuple(map(tuple, others)))
    return Pattern(tensors, tuple(meshes), devices)
