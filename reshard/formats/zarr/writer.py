"""A zarr store of whole tensors; each chunk is a block in a file or a shard.

Its files are numbered array by array: chunks or shards, then metadata; the group's metadata come last.
"""

from __future__ import annotations

import os
from math import prod
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from reshard.core.records.provenance import ComputationRecord, FileRecord, SourceRecord
from reshard.core.target import Target, TargetBlocks, TargetFile, literal, merged_notes
from reshard.dtypes import BY_NAME
from reshard.errors import UsageError
from reshard.formats.sets.sidecars import Sidecars, shard_size
from reshard.formats.zarr.layout import (
    CARRIED,
    CARRIED_CHUNK,
    METADATA,
    NAME,
    Array,
    array_json,
    escaped,
    group_metadata,
    slab_bytes,
)
from reshard.kits.torch.carried import Carried

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reshard.core.layout.block import Block, Shape
    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.model.entries import FileLayout
    from reshard.core.plan.budget import Share
    from reshard.core.plan.plan import Request
    from reshard.core.storage.base import TargetCoding
    from reshard.core.target import Assigned, TargetInputs, TargetTensor
    from reshard.dtypes import DType
    from reshard.formats.zarr.compression import Encoding


_BYTE = BY_NAME["uint8"]

FILE_BYTES = 1000
"""Resident memory of a chunk file in a plan, as measured."""

ARRAY_BYTES = 2500
"""Resident memory of an array's metadata in a plan, with those that the group repeats; measured."""


class ZarrStore(Target):
    """The files of one zarr store.

    Attributes:
        arrays: the array of each tensor.
        consolidates: the metadata of the group repeat those of the arrays.
    """

    format = NAME
    ranks: tuple[int, ...] = (0,)
    exclusive = True
    carries = True
    consolidates = True

    def __init__(self, inputs: TargetInputs) -> None:
        self._source, self._items, self._group = inputs.source, inputs.items, inputs.request.files
        self._carried = _CarriedInStore(inputs) if self.carries else None
        self.carried = {*self._carried.names, *self._carried.files} if self._carried else ()
        self.arrays = self._chosen()
        self._directories = {name: escaped(name) for name in self.arrays}
        self._first: dict[str, int] = {}  # the number of the first file of each array
        number = 0
        for name, array in self.arrays.items():
            self._first[name] = number
            number += len(array.units) + 1
        self.coding: TargetCoding | None = self._encoding()
        self.memory: tuple[Share, ...] = (
            ("files of chunks", FILE_BYTES * (number - len(self.arrays))),
            ("metadata of arrays", ARRAY_BYTES * len(self.arrays)),
            ("carried files", len(self._carried.content) if self._carried else 0),
        )

    @classmethod
    def settled(cls, request: Request, _source: Checkpoint) -> Request:
        """Return the request; raise `UsageError` if it is not for whole tensors."""
        if request.target or request.is_partial or request.remove_redundancy:
            raise UsageError(
                "a zarr store holds whole tensors", code="needs-whole-tensors",
                hint="leave the target strategy, ranks and redundancy out",
            )  # fmt: skip
        return request

    def blocks_of(self, item: TargetTensor) -> TargetBlocks:
        """Return the blocks of chunks or shards."""
        array, first = self.arrays[item.name], self._first[item.name]
        files = tuple((first + number,) for number, unit in enumerate(array.units) for _ in unit.blocks)
        return TargetBlocks(array.blocks, files, array.unit[0] if array.unit else 0)

    def files(self, assigned: Sequence[Assigned], texts: Sequence[TargetTensor]) -> tuple[TargetFile, ...]:  # noqa: ARG002 -- as in Target
        """Lay out every chunk file, and make the metadata."""
        items = {item.name: item for item in self._items}
        result: list[TargetFile] = []
        metadata: dict[str, dict[str, Any]] = {}
        for name, array in self.arrays.items():
            directory = self._directories[name]
            layouts = _layouts(array, name)
            result += [TargetFile(0, f"{directory}/{unit.path}", next(layouts)) for unit in array.units]
            metadata[directory] = self.metadata_of(array, self._attributes(items[name], array))
            result.append(TargetFile(0, f"{directory}/{METADATA}", literal(array_json(metadata[directory]))))
        if self._carried and (described := self._carried.metadata()):
            metadata[CARRIED] = described
            if content := self._carried.content:
                result.append(TargetFile(0, f"{CARRIED}/{CARRIED_CHUNK}", literal(content)))
            result.append(TargetFile(0, f"{CARRIED}/{METADATA}", literal(array_json(described))))
        from reshard import __version__

        common = self._source.extras.common
        attributes = {
            "tensors": list(items),
            "texts": {item.name: item.tensor.text for item in texts},
            "notes": merged_notes(self._source.files, {}, deduplicated=False),
            "source": source_record(self._source),
            "version": __version__,
            **({"common": common} if common else {}),
        }
        group = group_metadata(attributes, metadata if self.consolidates else {})
        result.append(TargetFile(0, METADATA, literal(group), last=True))
        return tuple(result)

    def warnings(self) -> tuple[str, ...]:
        """Warn of files that are left out, and of carried data with old names."""
        return tuple(self._carried.warnings()) if self._carried else ()

    def metadata_of(self, array: Array, attributes: dict[str, Any]) -> dict[str, Any]:
        """Return the contents of the `zarr.json` of an array."""
        return array.metadata(attributes)

    def _chosen(self) -> dict[str, Array]:
        """Return the array of each tensor; similar tensors share an array."""
        by_key: dict[tuple[Shape, DType, tuple[Block, ...]], Array] = {}
        arrays = {}
        for name, tensor, dtype in self._items:
            if tensor.text is None:
                blocks = () if tensor.space else tensor.sharding.blocks  # no blocks if the shards are of a finer shape
                key = (tensor.spec.shape, dtype, blocks)
                if key not in by_key:
                    by_key[key] = self._group.array(*key)
                arrays[name] = by_key[key]
        return arrays

    def _encoding(self) -> Encoding | None:
        """Return the encoding of chunks, or None if they are not compressed."""
        if self._group.level is None:
            return None
        from reshard.formats.zarr.compression import Encoding, ToCompress  # imported only if needed

        units = {
            f"{self._directories[name]}/{unit.path}": ToCompress(array.chunk_bytes, unit.valid, array.shard is not None)
            for name, array in self.arrays.items()
            for unit in array.units
        }
        arrays = set(self.arrays.values())
        buffered = max((slab_bytes(a.shape, a.chunk, a.dtype.itemsize) for a in arrays if prod(a.shape)), default=0)
        return Encoding(units, self._group.level, buffered, max((a.chunk_bytes for a in arrays), default=0))

    def _attributes(self, item: TargetTensor, array: Array) -> dict[str, Any]:
        """Return the attributes of an array that zarr does not need."""
        strategy, tensor = self._source.strategy, item.tensor
        placements = strategy.tensors.get(tensor.spec.name) if strategy and tensor.listed else None
        attributes: dict[str, Any] = {"dtype": array.dtype.name, "listed": tensor.listed}
        if placements:
            attributes["layout"] = str(placements[0].layout)
        if self._directories[item.name] != item.name:
            attributes["name"] = item.name
        return attributes


class _CarriedInStore:
    """Data of the source besides its tensors: files of a set, and objects, files and paths of a DCP.

    Attributes:
        content: the bytes, one after the other.
        names: the names of objects and of files of a distributed checkpoint, in the source.
        files: the names of files beside the weights of a set, with those that a warning names.
    """

    def __init__(self, inputs: TargetInputs) -> None:
        """Read them.

        Raises:
            SourceError: a file cannot be read.
        """
        source, tensors = inputs.source, {item.name: item.tensor.spec.name for item in inputs.items}
        self._sidecars = Sidecars(source, inputs.items)
        self._data = Carried(source, tensors, inputs.objects, inputs.faults)
        self.names, self.files = self._data.names, self._sidecars.names
        self._kinds = {"files": self._sidecars.contents, "objects": self._data.objects, "beside": self._data.beside}
        self._shard_size = shard_size(source)
        self.content = b"".join(content for items in self._kinds.values() for content in items.values())

    def metadata(self) -> dict[str, Any] | None:
        """Return the metadata of their array; None if there is nothing to carry."""
        paths = self._data.paths
        if paths is not None:
            paths = {name: path for name, path in paths.items() if path != (name,)}
        if not (self.content or paths or self._shard_size):
            return None
        sizes = {kind: {name: len(content) for name, content in items.items()} for kind, items in self._kinds.items()}
        array = Array((len(self.content),), _BYTE, (max(len(self.content), 1),), None, None)
        carried = {**sizes, "paths": paths, "shard_size": self._shard_size}
        return array.metadata({"dtype": _BYTE.name, "carried": carried})

    def warnings(self) -> Iterator[str]:
        """Yield warnings about files that are left out, and carried data with old tensor names."""
        yield from self._sidecars.warnings()
        yield from self._data.warnings()


def _layouts(array: Array, name: str) -> Iterator[FileLayout]:
    """Yield the layout of each file of an array; similar files share a layout."""
    by_key: dict[tuple[int, ...], FileLayout] = {}
    for unit in array.units:
        key = unit.valid
        if key not in by_key:
            by_key[key] = array.file_layout(name, unit)
        yield by_key[key]


def source_record(source: Checkpoint) -> SourceRecord:
    """Return the record of a source for a store, with file paths relative to their common directory.

    The same source gives the same record at any path, so it has no times of files.
    """
    computation = ComputationRecord.of(source, source_record)
    if computation is not None:
        return SourceRecord.of(source, "", (), computation=computation)
    pairs = {f.path: (rank, f) for rank, f in zip(source.ranks, source.files, strict=True) if f.inputs is None}
    base = os.path.commonpath([PurePath(path).parent for path in pairs]) if pairs else ""
    files = [FileRecord(rank, os.path.relpath(path, base), file.nbytes) for path, (rank, file) in pairs.items()]
    return SourceRecord.of(source, "", files)
