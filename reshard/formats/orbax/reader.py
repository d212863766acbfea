"""Open a checkpoint of Orbax: a step of a run, or an item of one.

An item is a tree of arrays. Its values are in a database (`ocdbt`), or in files; each array is zarr's, of format 2 or
3. A step has one item, whose names are used as they are, or several, whose names have the name of the item before them.

Source: orbax-checkpoint 0.12.8, and checkpoints that it wrote (`tests/data/orbax`).
"""

from __future__ import annotations

import ast
from base64 import b64decode
from contextlib import suppress
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.core.layout.arrangement import Arranged, Arrangement
from reshard.core.layout.block import LONGEST_NAME
from reshard.core.layout.grid import MOST_DEVICES
from reshard.core.layout.layout import Layout
from reshard.core.layout.mesh import Mesh
from reshard.core.model.facts import Extras, Object
from reshard.core.model.table import nothing_readable
from reshard.core.storage.small import is_text, parse_json
from reshard.errors import LayoutError, SourceError, names
from reshard.formats.orbax.ocdbt import Database
from reshard.formats.orbax.steps import MANIFEST, METADATA, ORBAX, PROCESS, items_of, read_object, unfinished_reason
from reshard.formats.zarr.blocks import Arrays
from reshard.formats.zarr.files import StoreFiles, read_values
from reshard.formats.zarr.layout import METADATA as METADATA_V3
from reshard.formats.zarr.metadata import ARRAY_V2, parse_array, parse_node
from reshard.formats.zarr.reader import store_notes, strings

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from reshard.core.layout.block import Shape
    from reshard.core.model.checkpoint import Checkpoint, Tensor
    from reshard.core.storage.places import Place
    from reshard.formats.zarr.files import StoredValue, Values

_STRINGS, _SHARDING = "_strings.json", "_sharding"

_ARRAYS = {"jax.Array", "np.ndarray", "scalar"}
_SEQUENCE = 1  # the type of a key that is an index of a list or a tuple
_MOST_PARTS = 256
_MOST_DIGITS = 18
_MOST_AXES = 32
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
        tree = _read_tree(directory / METADATA) if METADATA in listing else None
        files = StoreFiles(directory)
        self._arrays.add_files(files)
        databases = _databases(listing, tree)
        values = self._values(files, databases, tree)
        ends = f"/{ARRAY_V2}", f"/{METADATA_V3}"
        keys = values if isinstance(values, dict) else files.paths()
        found = {name: key for key in keys if key.endswith(ends) and (name := key.rpartition("/")[0])}
        leaves = tree.leaves if tree else {name: _Leaf((name,)) for name in found}
        self._warn(directory, found.keys() - leaves.keys(), has_tree=tree is not None)
        self._add_paths(leaves, prefix)
        stores_fill = tree is not None and tree.stores_fill
        kept = f"{files.base}/{METADATA if tree else f'{databases[0]}{MANIFEST}'}"
        before = len(self._arrays.tensors)
        for key, content in read_values(values, [found[name] for name in leaves if name in found], _LARGEST_METADATA):
            name = key.rpartition("/")[0]
            try:
                array = parse_array(name, parse_node(key, content), key)
                self._arrays.add(prefix + name, array, values, kept, complete=stores_fill or bool(array.notes))
            except SourceError as error:
                self._unreadable[prefix + name] = f"cannot be read: {error.message}"
        self._note_absent({prefix + name: leaf.kind for name, leaf in leaves.items() if name not in found})
        notes = store_notes(directory) if METADATA_V3 in listing else None  # of an item that reshard wrote
        for name, text in strings((notes or {}).get("texts", {}), directory).items():
            self._arrays.add_text(prefix + name, text, kept)
        self._described[kept] = dict([*self._arrays.tensors.items()][before:])
        self._shardings |= {prefix + name: text for name, text in _read_shardings(directory / _SHARDING).items()}

    def _warn(self, directory: Place, unlisted: Collection[str], *, has_tree: bool) -> None:
        """Warn of a missing tree, and of arrays that it does not list."""
        if not has_tree:
            self.warnings.append(f"{directory} has no {METADATA}: arrays are named as they are stored")
        if unlisted:
            self.warnings.append(f"{METADATA} does not list {names(sorted(unlisted), most=3)}, which is not read")

    def _add_paths(self, leaves: Mapping[str, _Leaf], prefix: str) -> None:
        for name, leaf in leaves.items():
            if prefix + name in self._paths:
                raise SourceError(f"{self.directory} has {prefix + name!r} in two items", code="duplicate-name")
            self._paths[prefix + name] = (*filter(None, [prefix[:-1]]), *leaf.path)

    def _note_absent(self, kinds: Mapping[str, str]) -> None:
        """Note why leaves of some kinds, which have no metadata of an array, are not read."""
        for name, kind in kinds.items():
            if kind == "string":
                self._objects[name] = Object(problem=f"is a string, in {_STRINGS}")
            else:
                reason = "lost: no metadata of it are" if kind in _ARRAYS else f"a {kind}, which is not"
                self._unreadable[name] = f"is {reason} in the files"

    def _values(self, files: StoreFiles, databases: Sequence[str], tree: _Tree | None) -> Values:
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
        layouts = _arrangement(self._shardings, {name: tensor.spec.shape for name, tensor in tensors.items()})
        return self._arrays.checkpoint(
            str(self.directory), self._described, unreadable=self._unreadable, warnings=self.warnings,
            extras=Extras(METADATA, layouts, objects=self._objects, paths=self._paths),
        )  # fmt: skip


def _databases(listing: Iterable[str], tree: _Tree | None) -> list[str]:
    """Return the paths of the databases of an item, which end with a slash; one is empty: the item itself."""
    if tree is not None and tree.uses_ocdbt is False:  # an array may be named like a file of a database
        return []
    if MANIFEST in listing:
        return [""]
    return [
        f"{name}/"
        for _, name in sorted((int(match[1]), match[0]) for match in map(PROCESS.fullmatch, listing) if match)
    ]


# --- the tree that a checkpoint was saved from: `_METADATA`, and the strings in it ---
#
# Arrays are stored by the parts of their paths, joined by dots. A dot in a part is not escaped, so that the path is
# taken from the metadata, and two arrays may have the same name, which is refused.


class _Leaf(NamedTuple):
    """A leaf of the tree.

    Attributes:
        path: the dict keys and list indices of it.
        kind: its type, such as `jax.Array`; empty if it is not known.
    """

    path: tuple[str | int, ...]
    kind: str = ""


class _Tree(NamedTuple):
    """The tree of one item.

    Attributes:
        leaves: the leaves, by name.
        stores_fill: chunks that are equal to the fill value are stored, so that an absent one is lost.
        uses_ocdbt: values are in a database; None if it is not known.
    """

    leaves: Mapping[str, _Leaf]
    stores_fill: bool
    uses_ocdbt: bool | None


def _read_tree(path: Place) -> _Tree:
    """Return the tree that `_METADATA` describes.

    Raises:
        SourceError: it is not valid, or two arrays have the same name.
    """
    content = read_object(path)
    leaves: dict[str, _Leaf] = {}
    tree = content.get("tree_metadata")
    if not isinstance(tree, dict):
        raise SourceError(f"{path} has no tree_metadata, an object", code="bad-metadata")
    for key, node in tree.items():
        leaf = _leaf(path, key, node)
        if leaf is None:
            continue
        name = ".".join(map(str, leaf.path))
        if not name or not is_text(name) or len(name.encode()) > LONGEST_NAME:
            raise SourceError(f"{path} has an array without a name, or too long a one: {key:.300}", code="bad-name")
        if name in leaves:  # a dot in a key is not escaped
            raise SourceError(f"{path} has two arrays of the name {name!r}", code="duplicate-name")
        leaves[name] = leaf
    uses_ocdbt = content.get("use_ocdbt")
    return _Tree(
        leaves, content.get("store_array_data_equal_to_fill_value") is True,
        uses_ocdbt if isinstance(uses_ocdbt, bool) else None,
    )  # fmt: skip


def _leaf(path: Place, key: str, node: object) -> _Leaf | None:
    """Return a leaf by the text of the tuple of its path; None for an empty node."""
    match node:
        case {"value_metadata": {"value_type": str(kind), **rest}, **more}:
            if rest.get("skip_deserialize") is True:
                return None
        case _:
            raise SourceError(f"{path} has no value_metadata for {key!r:.300}", code="bad-metadata")
    parts: Any = None
    if len(key) <= 4 * LONGEST_NAME:
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            parts = ast.literal_eval(key)
    if not isinstance(parts, tuple) or len(parts) > _MOST_PARTS or not all(isinstance(part, str) for part in parts):
        raise SourceError(f"{path} has the key {key!r:.300}; expected a tuple of strings", code="bad-metadata")
    keys = more.get("key_metadata")
    keys = keys if isinstance(keys, list) and len(keys) == len(parts) else [None] * len(parts)
    return _Leaf(tuple(map(_key, parts, keys)), kind)


def _key(part: str, metadata: object) -> str | int:
    """Return a dict key, or the index of a sequence."""
    is_index = isinstance(metadata, dict) and metadata.get("key_type") == _SEQUENCE
    return int(part) if is_index and part.isascii() and part.isdecimal() and len(part) < _MOST_DIGITS else part


# --- the layouts of arrays: `_sharding`, a mesh and a partition spec for each ---
#
# They are shown, and other targets may keep them; nothing is read by them, since chunks are cut otherwise. So an entry
# that is not understood is no error, and has no layout.


def _read_shardings(path: Place) -> dict[str, str]:
    """Return the JSON text of the sharding of each array, by name; none if the file is not valid."""
    try:
        content = read_object(path)
        return {b64decode(name).decode(): text for name, text in content.items() if isinstance(text, str)}
    except (SourceError, ValueError):
        return {}


def _arrangement(shardings: Mapping[str, str], shapes: Mapping[str, Shape]) -> Arrangement | None:
    """Return the layouts of arrays by the JSON texts of their shardings; None if none is known."""
    kinds = {(shardings[name], len(shape)) for name, shape in shapes.items() if name in shardings}
    known = {kind: mesh for kind in kinds if (mesh := _mesh(*kind))}
    tensors = {name: Arranged(()) for name in shapes}
    for name, shape in shapes.items():
        mesh = known.get((shardings.get(name, ""), len(shape)))
        if mesh and all(extent % ways == 0 for extent, ways in zip(shape, mesh.layout.splits, strict=True)):
            tensors[name] = Arranged((mesh,), shape)
    if not any(each.meshes for each in tensors.values()):
        return None
    devices = 1 + max(rank for mesh in known.values() for rank in mesh.ranks)
    return Arrangement(tensors, range(devices), devices) if devices <= MOST_DEVICES else None


def _mesh(text: str, ndim: int) -> Mesh | None:
    """Return a mesh of devices and a layout over them; None if the text is of another kind of sharding."""
    try:
        match parse_json(text.encode(), []):
            case {
                "sharding_type": "NamedSharding", "shape": [*extents], "axis_names": [*axes],
                "partition_spec": [*spec], **rest,
            } if 0 < len(extents) == len(axes) <= _MOST_AXES and _are_numbers(extents):  # fmt: skip
                entries = [[] if entry is None else entry if isinstance(entry, list) else [entry] for entry in spec]
            case _:
                return None
        entries += [[]] * (ndim - len(spec))
        numbers = {axis: len(axes) - 1 - index for index, axis in enumerate(axes)}
        layout = Layout.of(extents, [[numbers[axis] for axis in entry] or -1 for entry in entries])
        return Mesh(layout, tuple(_devices(rest.get("device_mesh"), extents)), tuple(map(str, axes)))
    except (ValueError, TypeError, KeyError, LayoutError):
        return None


def _devices(mesh: Any, extents: list[int]) -> list[int]:
    """Return the numbers of devices in row-major order; consecutive ones if they are not known."""
    level = [mesh.get("mesh")] if isinstance(mesh, dict) else []
    for _ in extents:
        level = list(chain.from_iterable(each if isinstance(each, list) else [] for each in level))
    ids: list[Any] = [each.get("id") if isinstance(each, dict) else None for each in level]
    count = prod(extents)
    return ids if len(ids) == count == len(set(ids)) and _are_numbers(ids, 0) else list(range(count))


def _are_numbers(values: list[Any], least: int = 1) -> bool:
    return all(type(value) is int and least <= value < MOST_DEVICES for value in values)
