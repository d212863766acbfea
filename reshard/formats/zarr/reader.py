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
from reshard.formats.zarr.metadata import (
    ARRAY_V2,
    LARGEST_METADATA,
    own_notes,
    parse_array,
    parse_json,
    parse_metadata,
    parse_v3,
)
from reshard.kits.torch.carried import BUCKET, BUCKETS
from reshard.kits.torch.names import BACKEND, COMMON

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.storage.places import Place
    from reshard.formats.zarr.metadata import ArrayMetadata

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
    if top == GROUP_V2:
        parse_json(files.base / top, content, 2)
        store = _Store(files, top, {})
        store.add_arrays_v2()
    else:
        metadata = parse_metadata(files.base / top, content)
        if metadata.get("node_type") != "group":
            raise _not_a_group(files.base / top, metadata.get("node_type"))
        store = _Store(files, top, own_notes(metadata))
        store.add_arrays()
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
    return own_notes(parse_metadata(path, read_small(path, "metadata", LARGEST_METADATA, SourceError)))


class _Store:
    """Gathers the arrays of a store.

    Args:
        files: its files.
        top: the file of the metadata of the group.
        notes: the notes of this program in them.
    """

    def __init__(self, files: StoreFiles, top: str, notes: Mapping[str, Any]) -> None:
        self._files, self._base, self._top, self._notes = files, files.base, f"{files.base}/{top}", notes
        self._arrays = Arrays(NAME, streams=False)
        self._arrays.add_files(files)
        self._unreadable: dict[str, str] = {}
        self._extras = Extras(METADATA, common=_common(notes))

    def _keys(self, file: str) -> list[str]:
        """Return the files of a name below the store, those of groups before those of their members."""
        directories = [path.rpartition("/")[0] for path in self._files.paths() if path.endswith(f"/{file}")]
        return [f"{directory}/{file}" for directory in sorted(directories)]

    def add_arrays_v2(self) -> None:
        """Add the arrays of format 2; programs may leave out the metadata of groups between."""
        for key, content in read_values(self._files, self._keys(ARRAY_V2), LARGEST_METADATA):
            name = key.rpartition("/")[0]
            try:
                self._add(name, parse_array(name, ARRAY_V2, content, self._base / key))
            except SourceError as error:
                self._note(name, error)

    def add_arrays(self) -> None:
        """Add the arrays of format 3, but the one of what is carried."""
        groups = {""}
        for key, content in read_values(self._files, self._keys(METADATA), LARGEST_METADATA):
            directory, path = key.rpartition("/")[0], self._base / key
            if directory.rpartition("/")[0] not in groups:
                continue
            metadata = parse_metadata(path, content)
            notes = own_notes(metadata)
            if metadata.get("node_type") == "group":
                groups.add(directory)
            elif directory == CARRIED:
                self._extras = self._carried(path, notes)
            else:
                self._add_array(directory, metadata, notes, path)

    def _add_array(self, directory: str, metadata: Mapping[str, Any], notes: Mapping[str, Any], path: Place) -> None:
        name = notes.get("name", directory)
        if not isinstance(name, str) or name in self._arrays.tensors or name in self._unreadable:
            raise SourceError(f"{path} has a second tensor {name!r}, or its name is not text", code="bad-name")
        listed_names = self._notes.get("tensors")
        if notes and not self._notes:
            raise SourceError(
                f"{self._top} has no notes of reshard, but array {name!r} has",
                code="missing-notes",
                facts=[f"expected {ATTRIBUTES!r} in its attributes; texts may be lost"],
                hint="open the group that reshard wrote, or write it again",
            )
        if (notes or (isinstance(listed_names, list) and name in listed_names)) and "dtype" not in notes:
            raise SourceError(
                f"{path} has no notes of reshard, which wrote it",
                code="missing-notes",
                facts=[f"expected a dtype in {ATTRIBUTES!r} in its attributes"],
                hint="write the store again",
            )
        try:
            self._add(name, parse_v3(directory, metadata, path))
        except SourceError as error:
            if notes:
                raise
            self._note(name, error)

    def _add(self, name: str, array: ArrayMetadata) -> None:
        described = f"{self._base}/{array.name}/{array.file}"
        self._arrays.add(name, array, self._files, described, complete=bool(array.notes))

    def _note(self, name: str, error: SourceError) -> None:
        """Note why an array of another program is not read; raise the error if it is of another kind."""
        if error.code not in _UNREADABLE:
            raise error
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


def _common(notes: Mapping[str, Any]) -> str:
    """Return the state of a training that the source of the store kept as JSON, or ""."""
    common = notes.get("common")
    return common if isinstance(common, str) and len(common) <= _LARGEST_COMMON else ""


def strings(texts: object, where: object) -> dict[str, str]:
    """Return the notes or texts of a store after checking that all are strings."""
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise SourceError(f"{where} has notes or texts that are not an object of strings", code="bad-metadata")
    return texts
