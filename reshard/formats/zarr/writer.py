"""A zarr store of whole tensors; each chunk is a block in a file or a shard.

Its files are numbered array by array: chunks or shards, then metadata; the group's metadata come last.
"""

from __future__ import annotations

import json
from math import prod
from typing import TYPE_CHECKING, Any

from reshard.core.records.schema import plain
from reshard.core.target import Target, TargetBlocks, TargetFile, literal, merged_notes
from reshard.dtypes import BY_NAME
from reshard.formats.sets.sidecars import Sidecars, shard_size
from reshard.formats.zarr.layout import (
    ATTRIBUTES,
    CARRIED,
    CARRIED_CHUNK,
    METADATA,
    NAME,
    Array,
    escaped,
    slab_bytes,
)
from reshard.kits.torch.carried import Carried

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reshard.core.layout.block import Block, Shape
    from reshard.core.model.entries import FileLayout
    from reshard.core.plan.budget import Share
    from reshard.core.storage.base import TargetCoding
    from reshard.core.target import Assigned, TargetInputs, TargetTensor
    from reshard.dtypes import DType
    from reshard.formats.zarr.codec import Compression

_BYTE = BY_NAME["uint8"]

_FILE_BYTES = 1000  # resident memory of a chunk file in a plan, as measured
_ARRAY_BYTES = 2500  # the same of an array's metadata, with those that the group repeats


class ZarrStore(Target):
    """The files of one zarr store.

    Attributes:
        arrays: the array of each tensor; similar tensors share one.
        consolidates: the metadata of the group repeat those of the arrays.
    """

    format = NAME
    ranks: tuple[int, ...] = (0,)
    shape = "store"
    carries = True
    consolidates = True

    def __init__(self, inputs: TargetInputs) -> None:
        self._source, self._items = inputs.source, inputs.items
        self._carried = _CarriedInStore(inputs) if self.carries else None
        self.carried = self._carried.names if self._carried else ()
        by_key: dict[tuple[Shape, DType, tuple[Block, ...]], Array] = {}
        self.arrays: dict[str, Array] = {}
        self._first: dict[str, int] = {}  # the number of the first file of each array
        number = 0
        for name, tensor, dtype in self._items:
            if tensor.text is None:
                blocks = () if tensor.space else tensor.sharding.blocks  # no blocks if the shards are of a finer shape
                key = (tensor.spec.shape, dtype, blocks)
                if key not in by_key:
                    by_key[key] = inputs.request.files.array(*key)
                self.arrays[name] = by_key[key]
                self._first[name] = number
                number += len(by_key[key].units) + 1
        self._directories = {name: escaped(name) for name in self.arrays}
        self.coding: TargetCoding | None = self._compression(by_key.values())
        self.memory: tuple[Share, ...] = (
            ("files of chunks", _FILE_BYTES * (number - len(self.arrays))),
            ("metadata of arrays", _ARRAY_BYTES * len(self.arrays)),
            ("carried files", len(self._carried.content) if self._carried else 0),
        )

    def _compression(self, arrays: Iterable[Array]) -> Compression | None:
        """Return how chunks are compressed, or None if they are not."""
        arrays = [array for array in arrays if array.level is not None]
        if not arrays:
            return None
        from reshard.formats.zarr.codec import Compression  # imported only if needed

        units = {
            f"{self._directories[name]}/{unit.path}": (array, unit)
            for name, array in self.arrays.items()
            for unit in array.units
        }
        slabs = [slab_bytes(each.shape, each.chunk, each.dtype.itemsize) for each in arrays if prod(each.shape)]
        return Compression(units, max(slabs, default=0), max(array.chunk_bytes for array in arrays))

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
            layouts: dict[tuple[int, ...], FileLayout] = {}  # similar files share one
            for unit in array.units:
                if unit.valid not in layouts:
                    layouts[unit.valid] = array.file_layout(name, unit)
                result.append(TargetFile(0, f"{directory}/{unit.path}", layouts[unit.valid]))
            metadata[directory] = self.metadata_of(array, self._attributes(items[name], array))
            result.append(TargetFile(0, f"{directory}/{METADATA}", _json(metadata[directory])))
        if self._carried and (described := self._carried.metadata()):
            metadata[CARRIED] = described
            if content := self._carried.content:
                result.append(TargetFile(0, f"{CARRIED}/{CARRIED_CHUNK}", literal(content)))
            result.append(TargetFile(0, f"{CARRIED}/{METADATA}", _json(described)))
        from reshard import __version__

        common = self._source.extras.common
        attributes = {
            "tensors": list(items),
            "texts": {item.name: item.tensor.text for item in texts},
            "notes": merged_notes(self._source.files, {}, deduplicated=False),
            "version": __version__,
            **({"common": common} if common else {}),
        }
        group: dict[str, Any] = {"attributes": {ATTRIBUTES: attributes}, "zarr_format": 3, "node_type": "group"}
        if metadata and self.consolidates:  # so that a reader needs one request
            group["consolidated_metadata"] = {"kind": "inline", "must_understand": False, "metadata": metadata}
        return (*result, TargetFile(0, METADATA, _json(group, None), publish="index"))

    def warnings(self) -> tuple[str, ...]:
        """Warn of files that are left out, and of carried data with old names."""
        return self._carried.warnings if self._carried else ()

    def metadata_of(self, array: Array, attributes: dict[str, Any]) -> dict[str, Any]:
        """Return the contents of the `zarr.json` of an array."""
        return array.metadata(attributes)

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


def _json(metadata: dict[str, Any], indent: int | None = 2) -> FileLayout:
    """Return the layout of a file of metadata."""
    return literal(json.dumps(metadata, indent=indent, default=plain).encode())


class _CarriedInStore:
    """Data of the source besides its tensors: files of a set, and objects, files and paths of a DCP.

    Attributes:
        content: the bytes, one after the other.
        names: the names in the source, with those of files that a warning names.
        warnings: warnings about files that are left out, and data with old names of tensors.
    """

    def __init__(self, inputs: TargetInputs) -> None:
        """Read them.

        Raises:
            SourceError: a file cannot be read.
        """
        source, tensors = inputs.source, {item.name: item.tensor.spec.name for item in inputs.items}
        sidecars, data = Sidecars(source, inputs.items), Carried(source, tensors, inputs.objects, inputs.faults)
        self.names = {*data.names, *sidecars.names}
        self.warnings = (*sidecars.warnings(), *data.warnings())
        kinds = {"files": sidecars.contents, "objects": data.objects, "beside": data.beside}
        self.content = b"".join(content for items in kinds.values() for content in items.values())
        paths = data.paths and {name: path for name, path in data.paths.items() if path != (name,)}
        self._noted = {
            **{kind: {name: len(content) for name, content in items.items()} for kind, items in kinds.items()},
            "paths": paths,
            "shard_size": shard_size(source),
        }

    def metadata(self) -> dict[str, Any] | None:
        """Return the metadata of their array; None if there is nothing to carry."""
        if not (self.content or self._noted["paths"] or self._noted["shard_size"]):
            return None
        array = Array((len(self.content),), _BYTE, (max(len(self.content), 1),), None, None)
        return array.metadata({"dtype": _BYTE.name, "carried": self._noted})
