"""Open a checkpoint of Orbax: a step of a run, or an item of one.

An item is a tree of arrays (`tree`). Its values are in a database (`ocdbt`), or in files; each array is zarr's, of
format 2 or 3. A step has one item, whose names are used as they are, or several, whose names have the name of the item
before them.

Source: orbax-checkpoint 0.12.8, and checkpoints that it wrote (`tests/data/orbax`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.core.model.facts import Extras, Object
from reshard.core.model.table import nothing_readable
from reshard.errors import SourceError, names
from reshard.formats.orbax.ocdbt import Database
from reshard.formats.orbax.sharding import SHARDING, arrangement, read_shardings
from reshard.formats.orbax.steps import MANIFEST, METADATA, ORBAX, PROCESS, items_of, unfinished_reason
from reshard.formats.orbax.tree import STRING, STRINGS, TreeLeaf, read_tree
from reshard.formats.zarr.blocks import Arrays
from reshard.formats.zarr.files import StoreFiles, read_values
from reshard.formats.zarr.layout import METADATA as METADATA_V3
from reshard.formats.zarr.metadata import ARRAY_V2, parse_array, parse_node
from reshard.formats.zarr.reader import store_notes, strings

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from reshard.core.model.checkpoint import Checkpoint, Tensor
    from reshard.core.storage.places import Place
    from reshard.formats.orbax.tree import SavedTree
    from reshard.formats.zarr.files import StoredValue, Values
    from reshard.formats.zarr.metadata import ArrayMetadata

_LARGEST_METADATA = 1 << 20


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
    """Gathers the arrays of items."""

    def __init__(self, directory: Place) -> None:
        self.directory = directory
        self.warnings: list[str] = []
        self._arrays = Arrays(ORBAX, streams=True)
        self._described: dict[str, Mapping[str, Tensor]] = {}
        self._unreadable: dict[str, str] = {}
        self._objects: dict[str, Object] = {}
        self._paths: dict[str, tuple[str | int, ...]] = {}
        self._shardings: dict[str, str] = {}

    def add(self, directory: Place, listing: Sequence[str], prefix: str) -> None:
        """Add an item; `prefix` is before the names of its arrays."""
        tree = read_tree(directory / METADATA) if METADATA in listing else None
        files = StoreFiles(directory)
        self._arrays.add_files(files)
        databases = _databases(listing, tree)
        values = self._values(files, databases, tree)
        notes = store_notes(directory) if METADATA_V3 in listing else None  # of an item that reshard wrote
        keys = values if isinstance(values, dict) else files.paths()
        ends = f"/{ARRAY_V2}", f"/{METADATA_V3}"
        found = {name: key for key in keys if key.endswith(ends) and (name := key.rpartition("/")[0])}
        if tree is None:
            self.warnings.append(f"{directory} has no {METADATA}: arrays are named as they are stored")
        leaves = tree.leaves if tree else {name: TreeLeaf((name,)) for name in found}
        if unlisted := sorted(found.keys() - leaves.keys()):
            self.warnings.append(f"{METADATA} does not list {names(unlisted, most=3)}, which is not read")
        metadata = _metadata(values, [found[name] for name in leaves if name in found])
        kept = f"{files.base}/{METADATA if tree else f'{databases[0]}{MANIFEST}'}"
        before = len(self._arrays.tensors)
        for name, leaf in leaves.items():
            full_name = prefix + name
            if full_name in self._paths:
                raise SourceError(f"{self.directory} has {full_name!r} in two items", code="duplicate-name")
            self._paths[full_name] = (*filter(None, [prefix[:-1]]), *leaf.path)
            try:
                if name in metadata:
                    array = metadata[name]
                    if isinstance(array, SourceError):
                        raise array
                    complete = bool(array.notes) or (tree is not None and tree.stores_fill)
                    self._arrays.add(full_name, array, values, kept, complete=complete)
                elif leaf.kind == STRING:
                    self._objects[full_name] = Object(problem=f"is a string, in {STRINGS}")
                else:
                    kind = "lost: no metadata of it are" if leaf.is_stored else f"a {leaf.kind}, which is not"
                    self._unreadable[full_name] = f"is {kind} in the files"
            except SourceError as error:
                self._unreadable[full_name] = f"cannot be read: {error.message}"
        for name, text in strings((notes or {}).get("texts", {}), directory).items():
            self._arrays.add_text(prefix + name, text, kept)
        self._described[kept] = dict([*self._arrays.tensors.items()][before:])
        self._shardings |= {prefix + name: text for name, text in read_shardings(directory / SHARDING).items()}

    def _values(self, files: StoreFiles, databases: Sequence[str], tree: SavedTree | None) -> Values:
        """Return the values of an item, in databases or in files."""
        if not databases and tree is not None and tree.uses_ocdbt:
            raise SourceError(
                f"{files.base} has no {MANIFEST}, which has the locations of all values", code="missing-file",
                hint="copy all of the checkpoint; if saving it was interrupted, open an older step",
            )  # fmt: skip
        if databases and databases[0]:
            self.warnings.append(
                f"{files.base} has no {MANIFEST}: saving it was interrupted before the databases of its processes were "
                f"merged; they are read as they are: {names([name[:-1] for name in databases], most=3)}"
            )
        values: dict[str, StoredValue] = {}
        for below in databases:
            values = Database(files, below).values | values
        return values if databases else files

    def result(self) -> Checkpoint:
        """Return the checkpoint of all items."""
        tensors = self._arrays.tensors
        if not tensors:
            raise SourceError(f"{self.directory}: {nothing_readable(self._unreadable)}", code="no-tensors")
        layouts = arrangement(self._shardings, {name: tensor.spec.shape for name, tensor in tensors.items()})
        return self._arrays.checkpoint(
            str(self.directory), self._described, unreadable=self._unreadable, warnings=self.warnings,
            extras=Extras(METADATA, layouts, objects=self._objects, paths=self._paths),
        )  # fmt: skip


def _databases(listing: Iterable[str], tree: SavedTree | None) -> list[str]:
    """Return the paths of the databases of an item, which end with a slash; one is empty: the item itself."""
    if tree is not None and tree.uses_ocdbt is False:  # an array may be named like a file of a database
        return []
    if MANIFEST in listing:
        return [""]
    return [
        f"{name}/"
        for _, name in sorted((int(match[1]), match[0]) for match in map(PROCESS.fullmatch, listing) if match)
    ]


def _metadata(values: Values, keys: Iterable[str]) -> dict[str, ArrayMetadata | SourceError]:
    """Return the metadata of arrays by name, or why they are not valid."""
    result: dict[str, ArrayMetadata | SourceError] = {}
    for key, content in read_values(values, keys, _LARGEST_METADATA):
        name = key.rpartition("/")[0]
        try:
            result[name] = parse_array(name, parse_node(key, content), key)
        except SourceError as error:
            result[name] = error
    return result
