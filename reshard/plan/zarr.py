"""Planning a zarr store: whole tensors, of which each chunk is a block to be made, in a file of its own or a shard.

What is selected, recipes, tasks and costs are as in `plan.build`. Here files are numbered array by array: its chunks or
shards, then its metadata; the group's metadata are the last.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from functools import cached_property
from math import prod
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from reshard.formats.entries import FileLayout
from reshard.formats.zarr import METADATA, NAME, escaped, group_metadata
from reshard.formats.zarr_chunks import Encoding, ToCompress, slab_bytes
from reshard.plan.build import Planner, Wanted
from reshard.plan.plan import TargetFile
from reshard.source.checkpoint import Shard

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reshard.dtypes import DType
    from reshard.formats.zarr import Array, ZarrGroup
    from reshard.layout.block import Shape
    from reshard.plan.build import _Way
    from reshard.plan.plan import Move, Plan
    from reshard.plan.select import Selection
    from reshard.source.checkpoint import Checkpoint, Tensor

FILE_BYTES = 1000
"""Resident memory of a file of chunks in a plan; measured."""


class ZarrPlanner(Planner):
    """Makes the plan of one zarr store."""

    def __init__(
        self, source: Checkpoint, group: ZarrGroup, *, wishes: Selection, memory: int | None, threads: int | None
    ) -> None:
        self.group = group
        super().__init__(
            source, None, format=None, files=group, ranks=None, wishes=wishes, remove_redundancy=False,
            link_replicas=False, memory=memory, threads=threads,
        )  # fmt: skip
        self._kept_alive: list[Tensor] = []

    def plan(self) -> Plan:
        """Make the plan."""
        return replace(super().plan(), format=NAME, alone=True)

    @cached_property
    def arrays(self) -> dict[str, Array]:
        """How each tensor is stored, by its target name; tensors alike share it."""
        known: dict[tuple[Shape, DType, int], Array] = {}
        found = {}
        for name, new in self.selected.kept:
            tensor = self.source.tensors[name]
            if tensor.text is None:
                dtype = self.wishes.target_dtype(tensor.spec.dtype)
                key = (tensor.spec.shape, dtype, id(tensor.shards))
                if key not in known:
                    blocks = [shard.block for shard in tensor.shards]
                    known[key] = self.group.array(tensor.spec.shape, dtype, blocks)
                found[new] = known[key]
        return found

    @cached_property
    def directories(self) -> dict[str, str]:
        """The directory of each array, by the tensor's target name."""
        return {new: escaped(new) for new in self.arrays}

    @cached_property
    def first(self) -> dict[str, int]:
        """The number of each array's first file."""
        found = {}
        number = 0
        for new, array in self.arrays.items():
            found[new] = number
            number += len(array.units) + 1
        return found

    @cached_property
    def coding(self) -> Encoding | None:  # type: ignore[override]  # an attribute that is worked out
        """How chunks are compressed."""
        if self.group.level is None:
            return None
        known: dict[tuple[int, Shape], ToCompress] = {}
        units = {}
        for new, array in self.arrays.items():
            for unit in array.units:
                key = (id(array), unit.valid)
                if key not in known:
                    there = tuple(place for place, valid in enumerate(unit.valid) if valid)
                    valid = tuple(unit.valid[place] for place in there)
                    known[key] = ToCompress(array.chunk_bytes, valid, there, len(unit.valid) if array.shard else 0)
                units[f"{self.directories[new]}/{unit.path}"] = known[key]
        every = set(self.arrays.values())
        held = max((slab_bytes(a.shape, a.chunk, a.dtype.itemsize) for a in every if prod(a.shape)), default=0)
        return Encoding(units, self.group.level, held, max((a.chunk_bytes for a in every), default=0))

    def _fixed_bytes(self) -> int:
        return super()._fixed_bytes() + FILE_BYTES * sum(len(array.units) for array in self.arrays.values())

    def _wanted_of(self, tensor: Tensor, new: str) -> Wanted | None:  # noqa: ARG002 -- as in Planner
        array = self.arrays[new]
        files = ((self.first[new] + i,) for i, unit in enumerate(array.units) for _ in unit.blocks)
        return Wanted(array.blocks, tuple(files))

    def _move(self, tensor: Tensor, new: str, way: _Way) -> Move:
        array = self.arrays[new]
        move = super()._move(tensor, new, way)
        starts = array.starts if any(array.starts) else ()
        # A file of compressed chunks, or one at a URL, is written by one task: tasks are cut where files are, along
        # the first axis.
        rows = prod(move.recipe.shape[1 : move.axis + 1])
        return move._replace(starts=starts, grain=rows * array.unit[0] if array.unit else 1)

    def _ranks_read(self, moves: Sequence[Move]) -> dict[int, set[int]]:  # noqa: ARG002 -- as in Planner
        """Return nothing: a store has no ranks, and its files are not theirs."""
        return {}

    def _copies(self, tensor: Tensor, new: str, read_for: Mapping[int, set[int]]) -> list[tuple[Move, _Way]]:  # noqa: ARG002
        """Plan a copy that differs between source ranks: there is one of each tensor, that of the lowest rank."""
        shard = tensor.shards[0]
        alone = tensor._replace(shards=(Shard(shard.block, shard.holders[:1]),))
        self._kept_alive.append(alone)  # what is planned is remembered by identity
        return self._moves(alone, new)

    def _files(self, moves: Sequence[tuple[Move, _Way]], texts: Sequence[tuple[Tensor, str]]) -> tuple[TargetFile, ...]:  # noqa: ARG002
        """Lay out every file of chunks, and write the metadata."""
        old_names = {new: name for name, new in self.selected.kept}
        found: list[TargetFile] = []
        for new, array in self.arrays.items():
            directory = self.directories[new]
            layouts = _layouts(array, new)
            found += [TargetFile(0, f"{directory}/{unit.path}", next(layouts)) for unit in array.units]
            metadata = array.metadata(self._attributes(old_names[new], new, array))
            found.append(TargetFile(0, f"{directory}/{METADATA}", _literal(metadata)))
        attributes = {
            "tensors": [new for _, new in self.selected.kept],
            "texts": {new: tensor.text for tensor, new in texts},
            "notes": dict(self._metadata()),
            **provenance(self.source, times=self.group.times),
        }
        found.append(TargetFile(0, METADATA, _literal(group_metadata(attributes)), last=True))
        return tuple(found)

    def _attributes(self, name: str, new: str, array: Array) -> dict[str, Any]:
        """Return what the metadata of an array say beyond what zarr asks for."""
        tensor = self.source.tensors[name]
        strategy = self.source.strategy
        placed = strategy.tensors.get(name) if strategy and tensor.listed else None
        found: dict[str, Any] = {"dtype": array.dtype.name, "listed": tensor.listed}
        if placed:
            found["layout"] = str(placed[0].layout)
        if self.directories[new] != new:
            found["name"] = new
        return found


def _literal(content: bytes) -> FileLayout:
    return FileLayout(len(content), ((0, content),), {})


def _layouts(array: Array, name: str) -> Iterator[FileLayout]:
    """Yield the layout of each file of an array; alike files share it."""
    known: dict[tuple[bool, ...], FileLayout] = {}
    for unit in array.units:
        key = tuple(map(bool, unit.valid))
        if key not in known:
            known[key] = array.file_layout(name, unit)
        yield known[key]


def provenance(source: Checkpoint, *, times: bool) -> dict[str, Any]:
    """Return what a store says of where it comes from: files, strategy, this program.

    Args:
        source: the checkpoint.
        times: with the times of the files, by which a change is found. Without them it is the same wherever and
            whenever the same files lie.
    """
    from reshard import __version__

    files = {file.path: file for file in source.files}
    base = os.path.commonpath([PurePath(path).parent for path in files])
    listed = [
        {"path": os.path.relpath(path, base), "nbytes": file.nbytes} | ({"mtime_ns": file.mtime_ns} if times else {})
        for path, file in files.items()
    ]
    return {"sources": listed, "strategy": strategy_digest(source), "version": __version__}


def strategy_digest(source: Checkpoint) -> str | None:
    """Return a digest of the layouts of a source's tensors; None of one of whole tensors."""
    strategy = source.strategy
    if strategy is None:
        return None
    lines = [f"{strategy.stages} {strategy.devices}"]
    for name, places in sorted(strategy.tensors.items()):
        lines += [f"{name!r} {placed.stage} {placed.layout}" for placed in places]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
