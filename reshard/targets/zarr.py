"""A zarr store of whole tensors, of which each chunk is a block to be made, in a file or a shard.

Its files are numbered array by array: chunks or shards, then metadata; the group's metadata are the last.
"""

from __future__ import annotations

import hashlib
import os
from math import prod
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from reshard.errors import UsageError
from reshard.formats.zarr import METADATA, NAME, escaped, group_metadata
from reshard.targets.checkpoint2 import common_of
from reshard.targets.destination import Destination, TargetFile, Wanted, literal, merged_notes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reshard.dtypes import DType
    from reshard.formats.entries import FileLayout
    from reshard.formats.zarr import Array
    from reshard.formats.zarr_chunks import Encoding
    from reshard.layout.block import Block, Shape
    from reshard.plan.budget import Share
    from reshard.plan.build import Routed
    from reshard.plan.plan import Request
    from reshard.source.checkpoint import Checkpoint
    from reshard.storage.base import TargetCoding
    from reshard.targets.destination import Item


FILE_BYTES = 1000
"""Resident memory of a file of chunks in a plan; measured."""


class ZarrStore(Destination):
    """The files of one zarr store."""

    format = NAME
    ranks: tuple[int, ...] = (0,)
    exclusive = True

    def __init__(self, source: Checkpoint, request: Request, items: Sequence[Item], *_: object) -> None:
        self._source, self._items, self._group = source, items, request.files
        self._arrays = self._chosen()
        self._directories = {name: escaped(name) for name in self._arrays}
        self._first: dict[str, int] = {}  # of an array, the number of its first file
        number = 0
        for name, array in self._arrays.items():
            self._first[name] = number
            number += len(array.units) + 1
        self.coding: TargetCoding | None = self._encoding()
        self.memory: tuple[Share, ...] = (("files of chunks", FILE_BYTES * (number - len(self._arrays))),)

    @classmethod
    def settled(cls, request: Request, _source: Checkpoint) -> Request:
        """Return the request; raise `UsageError` if it is for anything but whole tensors."""
        if request.target or request.of_some or request.once:
            raise UsageError(
                "a zarr store holds whole tensors", code="needs-whole-tensors",
                hint="leave the target strategy, ranks, redundancy and links out",
            )  # fmt: skip
        return request

    def wanted(self, item: Item) -> Wanted:
        """Return the blocks that have chunks, or shards, of their own."""
        array, first = self._arrays[item.name], self._first[item.name]
        files = tuple((first + number,) for number, unit in enumerate(array.units) for _ in unit.blocks)
        return Wanted(array.blocks, files, array.unit[0] if array.unit else 0)

    def files(self, routed: Sequence[Routed], texts: Sequence[Item]) -> tuple[TargetFile, ...]:  # noqa: ARG002 -- as in Destination
        """Lay out every file of chunks, and write the metadata."""
        items = {item.name: item for item in self._items}
        found: list[TargetFile] = []
        for name, array in self._arrays.items():
            directory = self._directories[name]
            layouts = _layouts(array, name)
            found += [TargetFile(0, f"{directory}/{unit.path}", next(layouts)) for unit in array.units]
            metadata = array.metadata(self._attributes(items[name], array))
            found.append(TargetFile(0, f"{directory}/{METADATA}", literal(metadata)))
        common = common_of(self._source)
        attributes = {
            "tensors": list(items),
            "texts": {item.name: item.tensor.text for item in texts},
            "notes": merged_notes(self._source.files, {}, deduplicated=False),
            **provenance(self._source, times=self._group.times),
            **({} if common is None else {"common": common}),
        }
        found.append(TargetFile(0, METADATA, literal(group_metadata(attributes)), last=True))
        return tuple(found)

    def _chosen(self) -> dict[str, Array]:
        """Return how each tensor is stored; tensors alike share it."""
        known: dict[tuple[Shape, DType, tuple[Block, ...]], Array] = {}
        found = {}
        for name, tensor, dtype in self._items:
            if tensor.text is None:
                blocks = () if tensor.space else tensor.sharding.blocks  # of its own shape, or of a finer one
                key = (tensor.spec.shape, dtype, blocks)
                if key not in known:
                    known[key] = self._group.array(*key)
                found[name] = known[key]
        return found

    def _encoding(self) -> Encoding | None:
        """Return how chunks are compressed."""
        if self._group.level is None:
            return None
        from reshard.formats.zarr_chunks import Encoding, ToCompress, slab_bytes  # not on every start

        known: dict[tuple[Array, Shape], ToCompress] = {}
        units = {}
        for name, array in self._arrays.items():
            for unit in array.units:
                key = (array, unit.valid)
                if key not in known:
                    there = tuple(place for place, valid in enumerate(unit.valid) if valid)
                    valid = tuple(unit.valid[place] for place in there)
                    known[key] = ToCompress(array.chunk_bytes, valid, there, len(unit.valid) if array.shard else 0)
                units[f"{self._directories[name]}/{unit.path}"] = known[key]
        every = set(self._arrays.values())
        held = max((slab_bytes(a.shape, a.chunk, a.dtype.itemsize) for a in every if prod(a.shape)), default=0)
        return Encoding(units, self._group.level, held, max((a.chunk_bytes for a in every), default=0))

    def _attributes(self, item: Item, array: Array) -> dict[str, Any]:
        """Return what the metadata of an array say beyond what zarr asks for."""
        strategy, tensor = self._source.strategy, item.tensor
        placed = strategy.tensors.get(tensor.spec.name) if strategy and tensor.listed else None
        found: dict[str, Any] = {"dtype": array.dtype.name, "listed": tensor.listed}
        if placed:
            found["layout"] = str(placed[0].layout)
        if self._directories[item.name] != item.name:
            found["name"] = item.name
        return found


def _layouts(array: Array, name: str) -> Iterator[FileLayout]:
    """Yield the layout of each file of an array; alike files share it."""
    known: dict[tuple[int, ...], FileLayout] = {}
    for unit in array.units:
        key = unit.valid
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
