"""The files of a zarr store, on a local disk or at a URL, and their metadata.

All metadata are validated. All files are listed at once. Links on a local disk are refused, because they could lead
anywhere; at a URL, all metadata are requested concurrently, because sequential requests would take longer than reading
a small store.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from reshard.core.storage.base import Status, read_error, stem_of_unfinished
from reshard.core.storage.local import local_store
from reshard.core.storage.places import Place, as_place, workers_at
from reshard.core.storage.threads import map_ordered
from reshard.errors import SourceError, names
from reshard.formats.zarr.layout import ATTRIBUTES, METADATA

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

LARGEST_METADATA = 1 << 28

_KEYS = {
    "group": {"zarr_format", "node_type", "attributes", "consolidated_metadata"},
    "array": {
        "zarr_format", "node_type", "attributes", "shape", "data_type", "chunk_grid", "chunk_key_encoding", "codecs",
        "fill_value", "storage_transformers", "dimension_names",
    },
}  # fmt: skip
_OLDER = ("sources", "strategy")  # in stores of earlier versions

_NOTED = {
    "group": {"common", "tensors", "texts", "notes", "source", "version", *_OLDER},
    "array": {"dtype", "listed", "layout", "name", "carried"},
}

GROUP_V2, ARRAY_V2 = ".zgroup", ".zarray"
"""The files that describe a group and an array of zarr v2."""

V2 = (GROUP_V2, ARRAY_V2, ".zmetadata")
"""The files that mark a store of zarr v2."""


_ORBAX = "_METADATA"
"""The file of Orbax that describes an item, which may be a zarr group as well."""


def is_store(listing: Collection[str]) -> bool:
    """Return whether a directory with these names is a zarr store, even if it is unfinished or zarr v2.

    >>> is_store(["w", "zarr.json"]), is_store(["w", "zarr.json", "_METADATA"])
    (True, False)
    """
    return _ORBAX not in listing and any(map(is_of_store, listing))


def is_of_store(name: str) -> bool:
    """Return whether a file's name marks a zarr store."""
    return name in {METADATA, *V2} or stem_of_unfinished(name) == METADATA


class StoreFiles:
    """The files of a store by path, listed once on creation; with `below` false only those at the top.

    Attributes:
        base: the store.
        arrays_v2: the directories of arrays of zarr v2, sorted.

    Raises:
        SourceError: it cannot be listed; or on a local disk, it contains a link, a device or a pipe.
    """

    def __init__(self, root: Place, *, below: bool = True) -> None:
        self.base = root.real()
        self._statuses = (_listed if self.base.can.has_latency else _walked)(self.base, below=below)
        self._below: dict[str, list[Place]] = {}
        nodes = {str(self.base)}
        for path in self._having(METADATA):
            parent = path.rpartition("/")[0]  # sorted before its children
            if parent in nodes:
                nodes.add(path)
                self._below.setdefault(parent, []).append(as_place(path))
        self.arrays_v2 = [as_place(path) for path in self._having(ARRAY_V2)]
        prefetched = []
        if self.base.can.has_latency:
            paths = [as_place(f"{path}/{METADATA}") for path in nodes] + [path / ARRAY_V2 for path in self.arrays_v2]
            prefetched = [path for path in paths if (status := self.status(path)) and status.nbytes <= LARGEST_METADATA]
        contents = map_ordered(lambda path: path.read_bytes(), prefetched, workers_at(prefetched))
        self._contents = dict(zip(prefetched, contents, strict=True))

    def _having(self, name: str) -> list[str]:
        """Return the directories that have a file of a name, sorted."""
        end = f"/{name}"
        return sorted(path.removesuffix(end) for path in self._statuses if path.endswith(end))

    def status(self, path: Place) -> Status | None:
        """Return the state of a file; None if it does not exist.

        Raises:
            SourceError: it is a directory.
        """
        status = self._statuses.get(str(path))
        if status is None and str(path) in self._statuses:
            raise _is_other(path)
        return status

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Yield the path of each file below the store, and its size."""
        for path, status in self._statuses.items():
            if status is not None:
                yield path.removeprefix(f"{self.base}/"), status.nbytes

    def read_metadata(self, path: Place) -> bytes:
        """Return the contents of a file of metadata; raise `SourceError` if it does not exist, or is too large."""
        status = self.status(path)
        if status is None:
            raise SourceError(f"{path} does not exist", code="not-found")
        if status.nbytes > LARGEST_METADATA:
            raise SourceError(f"{path} has more than {LARGEST_METADATA} bytes, which no metadata has", code="too-large")
        return self.read(path)

    def read(self, path: Place) -> bytes:
        """Return the contents of a small file."""
        try:
            return self._contents[path] if path in self._contents else path.read_bytes()
        except OSError as error:
            raise read_error(SourceError, path, error) from None

    def directories(self, directory: Place) -> list[Place]:
        """Return the subdirectories of a directory that have metadata, sorted."""
        return self._below.get(str(directory), [])


def _walked(base: Place, *, below: bool) -> dict[str, Status | None]:
    """Return the state of each file of a local directory, by path; None for a directory.

    The result is empty if the directory does not exist.
    """
    statuses: dict[str, Status | None] = {}
    root = str(base)
    waiting = [root]
    while waiting:
        directory = waiting.pop()
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    if entry.is_symlink():
                        raise SourceError(
                            f"{entry.path} is a link; links in a zarr store are not followed", code="not-a-file"
                        )
                    if entry.is_dir():
                        statuses[entry.path] = None
                        if below:
                            waiting.append(entry.path)
                    elif entry.is_file():
                        statuses[entry.path] = Status.of(entry.stat())
                        local_store().forget(entry.path)
                    else:
                        raise _is_other(entry.path)
        except OSError as error:
            if not (isinstance(error, FileNotFoundError) and directory == root):
                raise read_error(SourceError, directory, error) from None
    return statuses


def _listed(base: Place, *, below: bool) -> dict[str, Status | None]:
    """Return the state of each file below a URL, or of the group's metadata alone, by URL."""
    base.refresh()
    top = base / METADATA
    files = [*base.files()] if below else [top] if top.is_there() else []
    # Mostly answered from the listing; one request each if the file system has dropped it.
    statuses = map_ordered(lambda path: path.status(), files, workers_at(files))
    return dict(zip(map(str, files), statuses, strict=True))


def _is_other(path: object) -> SourceError:
    return SourceError(f"{path} is not a regular file; expected a chunk", code="not-a-file")


def parse_json(path: object, text: bytes, version: int) -> dict[str, Any]:
    """Parse a file of metadata.

    Raises:
        SourceError: it is not a JSON object of this version of zarr's format.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path} is not JSON", code="not-json", facts=[str(error)]) from None
    if not isinstance(content, dict) or content.get("zarr_format") != version:
        raise SourceError(f"{path} is not metadata of zarr's format {version}", code="bad-metadata")
    return content


def parse_metadata(path: object, text: bytes) -> dict[str, Any]:
    """Parse and check a `zarr.json`.

    As the specification requires, an unknown key is ignored only if its `must_understand` is false.

    Raises:
        SourceError: it is not valid, or has unknown keys.
    """
    content = parse_json(path, text, 3)
    kind = str(content.get("node_type"))
    needless = {
        key for key, value in content.items() if isinstance(value, dict) and value.get("must_understand") is False
    }
    refuse_unknown(path, "", content.keys() - needless, _KEYS.get(kind, content.keys()))
    attributes = content.get("attributes", {})
    if not isinstance(attributes, dict) or not isinstance(attributes.get(ATTRIBUTES, {}), dict):
        raise SourceError(
            f"{path} has the attributes {attributes!r:.60}; expected an object, and one in {ATTRIBUTES!r}",
            code="bad-metadata",
        )
    refuse_unknown(path, f"attributes.{ATTRIBUTES}.", own_notes(content), _NOTED.get(kind, own_notes(content)))
    return content


def refuse_unknown(path: object, where: str, keys: Iterable[str], known: Collection[str]) -> None:
    """Raise `SourceError` if metadata have an unknown key.

    Args:
        path: the file.
        where: a prefix for keys in the message.
        keys: the keys of the metadata.
        known: the known keys.
    """
    unknown = sorted(set(keys).difference(known))
    if unknown:
        raise SourceError(
            f"{path} has unknown keys: {names([f'{where}{key}' for key in unknown])}",
            code="unknown-key",
            facts=[f"known keys: {names(sorted(known), most=20)}"],
        )


def own_notes(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return this program's notes in the attributes; empty in a store of another program."""
    notes: dict[str, Any] = metadata.get("attributes", {}).get(ATTRIBUTES, {})
    return notes


def strings(texts: object, base: Place) -> dict[str, str]:
    """Return the notes or texts of a store after checking that all are strings."""
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise SourceError(
            f"{base / METADATA} has notes or texts that are not an object of strings", code="bad-metadata"
        )
    return texts
