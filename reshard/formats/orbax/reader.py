"""Open a checkpoint of Orbax: a step of a run, or an item of one.

An item is a tree of arrays (`tree`). Its values are in a database (`ocdbt`), or in files; each array is zarr's, of
format 2 or 3 (`array_blocks`). A step has one item, whose names are used as they are, or several, whose names have the
name of the item before them.

Source: orbax-checkpoint 0.12.8, and checkpoints that it wrote (`tests/data/orbax`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.core.layout.block import Block
from reshard.core.model.checkpoint import Checkpoint, Shard, SourceFile, Tensor, TensorSpec
from reshard.core.model.entries import Entry, Extent, FileIndex
from reshard.core.model.facts import Extras, Object
from reshard.core.model.reshape import Shared
from reshard.core.model.table import nothing_readable
from reshard.core.storage.places import as_place
from reshard.dtypes import STR
from reshard.errors import SourceError, names
from reshard.formats.orbax.array_blocks import ArrayBlocks, ChunkDecoding, read_metadata
from reshard.formats.orbax.item_values import ItemValues
from reshard.formats.orbax.sharding import SHARDING, arrangement, read_shardings
from reshard.formats.orbax.steps import MANIFEST, METADATA, ORBAX, items_of, unfinished_reason
from reshard.formats.orbax.tree import STRING, STRINGS, TreeLeaf, read_tree
from reshard.formats.zarr.files import ARRAY_V2, strings
from reshard.formats.zarr.layout import METADATA as METADATA_V3
from reshard.formats.zarr.reader import store_notes
from reshard.kits.chunks.decoding import Decoding

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reshard.core.storage.places import Place

_VALUES = FileIndex(ORBAX, {})
"""The index of a file of values: it is empty, since only the metadata describe them."""


def open_orbax(directory: Place, listing: Sequence[str], *, contents: object = True) -> Checkpoint:  # noqa: ARG001 -- it has no replicas
    """Open a step or an item, reading its metadata, its database, and the indexes of shards.

    An array with lost chunks, or in an unknown encoding, is unreadable, with the reason; a plan needs it dropped by
    name.

    Args:
        directory: the directory of the step or the item.
        listing: the names in it.
        contents: ignored.

    Raises:
        SourceError: it has no array; a file is missing, damaged or not valid; two arrays have one name.
    """
    items = items_of(directory, listing)
    if not items:
        raise SourceError(
            f"{directory} is a step of Orbax without an item that has arrays", code="no-tensors",
            facts=[f"it has {names(sorted(listing))}"],
        )  # fmt: skip
    checkpoint = _OrbaxItems(directory)
    if reason := unfinished_reason(directory, listing):
        checkpoint.warnings.append(f"{directory} is not finished ({reason}), and may lack arrays")
    for name, (item, inside) in items.items():
        checkpoint.add(item, inside, f"{name}." if len(items) > 1 else "")
    return checkpoint.result()


class _OrbaxItems:
    """Gathers the files and arrays of items."""

    def __init__(self, directory: Place) -> None:
        self.directory = directory
        self.warnings: list[str] = []
        self._files: dict[str, SourceFile] = {}
        self._numbers: dict[str, int] = {}
        self._tensors: dict[str, Tensor] = {}
        self._unreadable: dict[str, str] = {}
        self._objects: dict[str, Object] = {}
        self._paths: dict[str, tuple[str | int, ...]] = {}
        self._shardings: dict[str, str] = {}
        self._decoding = ChunkDecoding()
        self._shared = Shared()

    def add(self, directory: Place, listing: Sequence[str], prefix: str) -> None:
        """Add an item; `prefix` is before the names of its arrays."""
        tree = read_tree(directory / METADATA) if METADATA in listing else None
        item = ItemValues(directory, listing, tree)
        self.warnings += item.warnings
        notes = store_notes(directory) if METADATA_V3 in listing else None  # of an item that reshard wrote
        stored = list(dict.fromkeys(_stored_names(item)))
        if tree is None:
            self.warnings.append(f"{directory} has no {METADATA}: arrays are named as they are stored")
        leaves = tree.leaves if tree else {name: TreeLeaf((name,)) for name in stored}
        if unlisted := sorted(set(stored) - leaves.keys()):
            self.warnings.append(f"{METADATA} does not list {names(unlisted, most=3)}, which is not read")
        metadata = read_metadata(item, leaves)
        kept = METADATA if tree else MANIFEST if MANIFEST in listing else f"{item.first_process}/{MANIFEST}"
        blocks = ArrayBlocks(
            item, self._decoding, self._number_of, str(item.files.base / kept),
            stores_fill=tree is not None and tree.stores_fill, shared=self._shared,
        )  # fmt: skip
        tensors: dict[str, Tensor] = {}
        for name, leaf in leaves.items():
            full_name = prefix + name
            if full_name in self._paths:
                raise SourceError(f"{self.directory} has {full_name!r} in two items", code="duplicate-name")
            self._paths[full_name] = (*filter(None, [prefix[:-1]]), *leaf.path)
            array = metadata.get(name) or _not_stored(leaf)
            if array is None:
                self._objects[full_name] = Object(problem=f"is a string, in {STRINGS}")
            elif isinstance(array, str):
                self._unreadable[full_name] = array
            else:
                try:
                    tensors[full_name] = blocks.tensor(full_name, name, array)
                except SourceError as error:
                    self._unreadable[full_name] = error.message
        for name, text in strings((notes or {}).get("texts", {}), directory).items():
            shards = (Shard(Block.whole((0,)), (Extent(self._number_of(str(item.files.base / kept)), ()),)),)
            tensors[prefix + name] = Tensor.of(TensorSpec(prefix + name, STR, (0,)), shards, text=text)
        self._tensors |= tensors
        self._add_files(item, str(item.files.base / kept), tensors)
        self._shardings |= {prefix + name: text for name, text in read_shardings(directory / SHARDING).items()}
        if blocks.absent:
            count = sum(blocks.absent.values())
            self.warnings.append(
                f"{directory} has no data for {count} chunk{'s' * (count > 1)} of {names(blocks.absent, most=3)}, and "
                "does not say that it stores all; their elements are the fill value"
            )

    def _number_of(self, path: str) -> int:
        """Return the number of a file of the item that is added."""
        return self._numbers.setdefault(path, len(self._numbers))

    def _add_files(self, item: ItemValues, kept: str, tensors: dict[str, Tensor]) -> None:
        """Add the files of an item that have chunks, and the one that describes its tensors."""
        entries = {name: Entry(each.spec.dtype, each.spec.shape, (), each.text) for name, each in tensors.items()}
        self._number_of(kept)
        headers = len({file.index.header_id for file in self._files.values()})
        for path in self._numbers:
            if path not in self._files:
                status = item.files.status(as_place(path))
                assert status is not None  # noqa: S101 -- it is among the files of the item
                index = FileIndex(ORBAX, entries, header_id=max(headers, 1)) if path == kept else _VALUES
                self._files[path] = SourceFile(path, status.nbytes, status.mtime_ns, index, status.change)

    def result(self) -> Checkpoint:
        """Return the checkpoint of all items."""
        if not self._tensors:
            raise SourceError(f"{self.directory}: {nothing_readable(self._unreadable)}", code="no-tensors")
        units = dict(self._decoding.units)
        decoding = Decoding(units, self._decoding.held_bytes, self._decoding.opening_bytes) if units else None
        layouts = arrangement(self._shardings, {name: tensor.spec.shape for name, tensor in self._tensors.items()})
        return Checkpoint(
            str(self.directory), self._tensors, tuple(self._files.values()), (0,) * len(self._files),
            warnings=tuple(self.warnings), unreadable=self._unreadable, coding=decoding,
            extras=Extras(METADATA, layouts, objects=self._objects, paths=self._paths),
        )  # fmt: skip


def _not_stored(leaf: TreeLeaf) -> str | None:
    """Return why a leaf without metadata of an array cannot be read; None if it is a string."""
    if leaf.kind == STRING:
        return None
    kind = "lost: no metadata of it are" if leaf.is_stored else f"a {leaf.kind}, which is not"
    return f"is {kind} in the files"


def _stored_names(item: ItemValues) -> Iterator[str]:
    """Yield the names of the arrays that have metadata."""
    for key in item.values:
        name, _, file = key.rpartition("/")
        if name and file in {ARRAY_V2, METADATA_V3}:
            yield name
