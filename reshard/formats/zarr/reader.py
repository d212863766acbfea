"""Open a zarr store: its arrays become tensors, and its chunks their blocks (`blocks`).

Every `zarr.json` below the root is read, or every `.zarray` of a store of format 2. Groups within the group become part
of the names, as in zarr. The consolidated metadata are not read: who changes an array may leave them as they are.

A store that this program wrote (it has its notes) has every chunk and all notes; any that is missing was lost.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from reshard.core.model.facts import Extras, Object
from reshard.core.records.schema import Count, FormatError, Kind, read
from reshard.core.storage.small import read_small
from reshard.errors import SourceError, names
from reshard.formats.zarr.blocks import Arrays
from reshard.formats.zarr.files import GROUP_V2, StoreFiles, read_values
from reshard.formats.zarr.layout import ATTRIBUTES, CARRIED, CARRIED_CHUNK, METADATA, NAME
from reshard.formats.zarr.metadata import ARRAY_V2, LARGEST_METADATA, own_notes, parse_array, parse_node
from reshard.kits.torch.carried import BUCKET, BUCKETS
from reshard.kits.torch.names import BACKEND, COMMON

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.storage.places import Place

_LARGEST_COMMON = 1 << 20
_UNREADABLE = {"unknown-dtype", "unsupported-storage", "too-many-blocks"}
"""What makes an array of another program unreadable, not its store."""


def open_store(root: Place, *, contents: object = True) -> Checkpoint:  # noqa: ARG001 -- it has no replicas
    """Open a zarr store, reading its metadata and the indexes of its shards.

    Raises:
        SourceError: it is unfinished, has links, or its metadata does not fit its files.
    """
    files = StoreFiles(root)
    top = next((name for name in (METADATA, GROUP_V2) if files.get(name)), None)
    if top is None:
        if files.get(ARRAY_V2):
            raise _not_a_group(files.base / ARRAY_V2, "array")
        raise SourceError(
            f"{root} is an unfinished zarr store: it has no {METADATA}", code="unfinished", hint="write it again"
        )
    ((_, content),) = read_values(files, [top], LARGEST_METADATA)
    metadata = parse_node(files.base / top, content)
    if top == METADATA and metadata.get("node_type") != "group":
        raise _not_a_group(files.base / top, metadata.get("node_type"))
    store = _Store(files, top, own_notes(metadata))
    store.add_arrays(METADATA if top == METADATA else ARRAY_V2)
    return store.checkpoint(str(root))


def _not_a_group(path: Place, kind: object) -> SourceError:
    return SourceError(
        f"{path} is of node type {kind!r}; expected a group", code="not-a-group", hint="open the group of all tensors"
    )


def store_notes(root: Place) -> dict[str, Any] | None:
    """Return the notes of this program in a store; None if it is unfinished or missing."""
    path = root / METADATA
    if not path.is_there():
        return None
    return own_notes(parse_node(path, read_small(path, "metadata", LARGEST_METADATA, SourceError)))


class _Store:
    """Gathers the arrays of a store; `notes` are those of this program in the metadata of the group, the file `top`."""

    def __init__(self, files: StoreFiles, top: str, notes: Mapping[str, Any]) -> None:
        self._files, self._base, self._top, self._notes = files, files.base, f"{files.base}/{top}", notes
        self._arrays = Arrays(NAME, streams=False)
        self._arrays.add_files(files)
        self._unreadable: dict[str, str] = {}
        common = notes.get("common")  # the state of a training that the source of the store kept as JSON
        common = common if isinstance(common, str) and len(common) <= _LARGEST_COMMON else ""
        self._extras = Extras(METADATA, common=common)

    def add_arrays(self, file: str) -> None:
        """Add the arrays that files of a name describe, but the one of what is carried.

        Programs may leave out the metadata of groups of format 2 between.
        """
        directories = sorted(path.rpartition("/")[0] for path in self._files.paths() if path.endswith(f"/{file}"))
        groups = {""}
        for key, content in read_values(self._files, [f"{each}/{file}" for each in directories], LARGEST_METADATA):
            directory, path = key.rpartition("/")[0], self._base / key
            if file == METADATA and directory.rpartition("/")[0] not in groups:
                continue
            metadata = parse_node(path, content)
            if metadata.get("node_type") == "group":
                groups.add(directory)
            elif directory == CARRIED and self._notes:
                self._extras = self._carried(path, own_notes(metadata))
            else:
                self._add_array(directory, metadata, path)

    def _add_array(self, directory: str, metadata: Mapping[str, Any], path: Place) -> None:
        notes = own_notes(metadata)
        name = notes.get("name", directory)
        if not isinstance(name, str) or name in self._arrays.tensors or name in self._unreadable:
            raise SourceError(f"{path} has a second tensor {name!r}, or its name is not text", code="bad-name")
        own_names = self._notes.get("tensors")
        is_own = bool(notes) or (isinstance(own_names, list) and name in own_names)
        if is_own and not (self._notes and "dtype" in notes):
            raise SourceError(
                f"{path if self._notes else self._top} has no notes of reshard, which wrote array {name!r}",
                code="missing-notes", facts=[f"expected {ATTRIBUTES!r} in its attributes"], hint="write it again",
            )  # fmt: skip
        try:
            array = parse_array(directory, metadata, path)
            self._arrays.add(name, array, self._files, str(path), complete=is_own)
        except SourceError as error:
            if is_own or error.code not in _UNREADABLE:
                raise
            self._unreadable[name] = error.message

    def checkpoint(self, root: str) -> Checkpoint:
        """Return the store as a checkpoint of one rank."""
        arrays = self._arrays
        for name, text in strings(self._notes.get("texts", {}), self._top).items():
            if name in arrays.tensors:
                raise SourceError(f"{self._base} has {name!r} both as an array and as text", code="duplicate-name")
            arrays.add_text(name, text, self._top)
        order = self._notes.get("tensors")
        order = [name for name in order if isinstance(name, str)] if isinstance(order, list) else []
        lost = [name for name in order if name not in arrays.tensors and name not in self._unreadable]
        if lost:
            raise SourceError(f"{self._base} lists tensor {lost[0]!r} but has no such array", code="missing-tensor")
        arrays.tensors = {name: arrays.tensors[name] for name in (*order, *arrays.tensors) if name in arrays.tensors}
        if not arrays.tensors:
            raise SourceError(f"{root} has no tensor", code="no-tensors")
        notes = tuple(strings(self._notes.get("notes", {}), self._top).items())
        buckets = [name for name in arrays.tensors if name.startswith(BUCKETS)] if self._extras.objects else []
        return arrays.checkpoint(
            root, {self._top: arrays.tensors}, notes=notes, unreadable=self._unreadable, warnings=(),
            extras=replace(self._extras, bound=dict.fromkeys(buckets, BUCKET)),
        )  # fmt: skip

    def _carried(self, path: Place, notes: Mapping[str, Any]) -> Extras:
        """Return what the store carries that is not a tensor."""
        chunk = f"{CARRIED}/{CARRIED_CHUNK}"
        value = self._files.get(chunk)
        try:
            record: _CarriedRecord = read(_CarriedRecord, notes.get("carried"))
        except FormatError as error:
            raise _not_described(path, str(error)) from None
        items: list[dict[str, Object]] = []
        begin = 0
        for sizes in (record.files, record.objects, record.beside):
            items.append({})
            for name, nbytes in sizes.items():
                items[-1][name] = Object(f"{self._base}/{chunk}", begin, nbytes)
                begin += nbytes
        if begin != (value.nbytes if value else 0):
            raise _not_described(path, f"{begin} bytes in all, and {value.nbytes if value else 0} in {chunk}")
        if unknown := record.beside.keys() - {BACKEND, COMMON}:
            raise _not_described(path, f"{names(sorted(unknown))}; expected {COMMON} and {BACKEND}")
        files, objects, beside = items
        return Extras(
            METADATA, objects=objects, beside=beside, common=self._extras.common, files=files, paths=record.paths,
            shard_size=record.shard_size,
        )  # fmt: skip


def _not_described(path: Place, why: str) -> SourceError:
    return SourceError(
        f"{path} does not say what the bytes beside it are", code="bad-metadata", facts=[why],
        hint="write the store again",
    )  # fmt: skip


def _is_path(keys: object) -> bool:
    return isinstance(keys, list) and len(keys) > 0 and all(type(key) in {str, int} for key in keys)


_KeyPath = Annotated[Any, Kind("a list of keys and indices", _is_path, tuple)]


@dataclass(frozen=True, slots=True)
class _CarriedRecord:
    """What an array of carried bytes has, one after the other; see the writer.

    Attributes:
        files, objects, beside: the size of each item, by name.
        paths: the path of each tensor and object in nested dicts and lists; None for a checkpoint without paths.
        shard_size: the most bytes of tensors in a file of the set that is stored; 0 for any other checkpoint.
    """

    files: dict[str, Count]
    objects: dict[str, Count]
    beside: dict[str, Count]
    paths: dict[str, _KeyPath] | None
    shard_size: Count


def strings(texts: object, where: object) -> dict[str, str]:
    """Return the notes or texts of a store after checking that all are strings."""
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise SourceError(f"{where} has notes or texts that are not an object of strings", code="bad-metadata")
    return texts
