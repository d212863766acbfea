"""What a zarr store has, on a local disk or at a URL: which files, and the metadata in them.

Nothing is believed. Links on a local disk are refused, because they could lead anywhere. At a URL everything is listed
at once, and all metadata are requested side by side: a request for each would take longer than reading a small store.
"""

from __future__ import annotations

import json
import os
import stat
from typing import TYPE_CHECKING, Any, Protocol

from reshard.errors import SourceError, names
from reshard.formats.zarr import ATTRIBUTES, METADATA
from reshard.storage.base import Status, stem_of_unfinished
from reshard.storage.places import LocalPath, Place, as_place, of_each

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from pathlib import Path


LARGEST_METADATA = 1 << 28

_KEYS = {
    "group": {"zarr_format", "node_type", "attributes", "consolidated_metadata"},
    "array": {
        "zarr_format", "node_type", "attributes", "shape", "data_type", "chunk_grid", "chunk_key_encoding", "codecs",
        "fill_value", "storage_transformers", "dimension_names",
    },
}  # fmt: skip
_NOTED = {
    "group": {"tensors", "texts", "notes", "sources", "strategy", "version"},
    "array": {"dtype", "listed", "layout", "name"},
}

V2 = (".zgroup", ".zarray", ".zmetadata")
"""The files that mark a store of the older format."""


def is_store(root: Place) -> bool:
    """Return whether a directory, or what is at a URL, is a zarr store, be it unfinished or of the older format.

    Raises:
        SourceError: what is at the URL cannot be looked at.
    """
    return any(name in {METADATA, *V2} or stem_of_unfinished(name) == METADATA for name in root.names())


class StoreFiles(Protocol):
    """The files of a store, by their paths."""

    @property
    def base(self) -> Place:
        """The root, without links."""

    def status(self, path: Any) -> Status | None:
        """Return the state of a file; None where there is none; `SourceError` of a link."""

    def read(self, path: Any) -> bytes:
        """Return the contents of a small file."""

    def directories(self, directory: Any) -> list[Any]:
        """Return the directories in a directory that have metadata, by name."""

    def refuse_link(self, directory: Any) -> None:
        """Raise `SourceError` where a directory is a link."""


class LocalFiles:
    """A store on a local disk, of which one file after the other is looked at."""

    def __init__(self, base: str) -> None:
        self.base = LocalPath(os.path.realpath(base))

    def status(self, path: Path) -> Status | None:
        """Return the state of a file; None where there is none.

        Raises:
            SourceError: it is a link, or no file.
        """
        try:
            status = path.lstat()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SourceError(f"{path}: cannot be read: {error.strerror}") from None
        if stat.S_ISLNK(status.st_mode):
            raise _is_link(path)
        if not stat.S_ISREG(status.st_mode):
            raise SourceError(f"{path}: is not a regular file; expected a chunk")
        return Status.of(status)

    def read(self, path: Path) -> bytes:
        """Return the contents of a small file."""
        try:
            return path.read_bytes()
        except OSError as error:
            raise SourceError(f"{path}: cannot be read: {error.strerror}") from None

    def directories(self, directory: Path) -> list[Path]:
        """Return the directories in a directory that have metadata, by name; none may be a link."""
        with os.scandir(directory) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        for entry in entries:
            if entry.is_symlink():
                raise _is_link(directory / entry.name)
        some = [directory / entry.name for entry in entries if entry.is_dir()]
        return [path for path in some if (path / METADATA).exists()]

    def refuse_link(self, directory: Path) -> None:
        """Raise `SourceError` where a directory is a link."""
        if directory.is_symlink():
            raise _is_link(directory)


class ListedFiles:
    """A store at a URL, as it is when this is made: all files are listed at once."""

    def __init__(self, base: Place) -> None:
        self.base = base
        self._below: dict[str, list[Place]] = {}
        base.refresh()
        files: list[Place] = [*base.files()]
        # Mostly what was listed; one request each where that is forgotten.
        self._statuses = dict(zip(map(str, files), of_each(_status, files), strict=True))
        found = sorted(url.removesuffix(f"/{METADATA}") for url in self._statuses if url.endswith(f"/{METADATA}"))
        known = {str(base)}
        for url in found:  # parents come before what is in them
            parent = url.rpartition("/")[0]
            if url != str(base) and parent in known:
                known.add(url)
                self._below.setdefault(parent, []).append(as_place(url))
        paths = [as_place(f"{url}/{METADATA}") for url in known]
        wanted = [path for path in paths if (status := self.status(path)) and status.nbytes <= LARGEST_METADATA]
        self._contents = dict(zip(wanted, of_each(_contents, wanted), strict=True))

    def status(self, path: Place) -> Status | None:
        """Return the state of a file; None where there is none."""
        return self._statuses.get(str(path))

    def read(self, path: Place) -> bytes:
        """Return the contents of a small file."""
        return self._contents[path] if path in self._contents else path.read_bytes()

    def directories(self, directory: Place) -> list[Place]:
        """Return the directories in a directory that have metadata, by name."""
        return self._below.get(str(directory), [])

    def refuse_link(self, directory: Place) -> None:
        """Do nothing: there are no links at URLs."""


def _status(path: Place) -> Status:
    return path.status()


def _contents(path: Place) -> bytes:
    return path.read_bytes()


def files_of(root: Place) -> StoreFiles:
    """Return the files of a store."""
    return ListedFiles(root) if root.can.waits else LocalFiles(str(root))


def read_metadata(files: StoreFiles, path: Place) -> dict[str, Any]:
    """Read a `zarr.json`.

    As the specification has it, what is not known may be left unread only where it says so (`must_understand`).

    Raises:
        SourceError: it is none, or not there, or has keys that nobody knows.
    """
    status = files.status(path)
    if status is None or status.nbytes > LARGEST_METADATA:
        raise SourceError(f"{path}: is larger than {LARGEST_METADATA} bytes, which no metadata is, or not there")
    try:
        content = json.loads(files.read(path))
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(content, dict) or content.get("zarr_format") != 3:
        raise SourceError(f"{path}: is no metadata of zarr's format 3")
    kind = str(content.get("node_type"))
    needless = {
        key for key, value in content.items() if isinstance(value, dict) and value.get("must_understand") is False
    }
    refuse_unknown(path, "", content.keys() - needless, _KEYS.get(kind, content.keys()))
    attributes = content.get("attributes", {})
    if not isinstance(attributes, dict) or not isinstance(attributes.get(ATTRIBUTES, {}), dict):
        raise SourceError(
            f"{path}: its attributes are {attributes!r:.60}; expected an object, and one in {ATTRIBUTES!r}"
        )
    refuse_unknown(path, f"attributes.{ATTRIBUTES}.", own_notes(content), _NOTED.get(kind, own_notes(content)))
    return content


def refuse_unknown(path: object, where: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise `SourceError` where metadata have a key that is not known.

    Args:
        path: the file.
        where: what stands before the keys, for the message.
        given: the keys.
        known: those that there may be.
    """
    unknown = sorted(set(given).difference(known))
    if unknown:
        listed = names([f"{where}{key}" for key in unknown])
        raise SourceError(f"{path}: has {listed}, which is not known; expected {names(sorted(known), most=20)}")


def own_notes(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return what this program noted in the attributes; nothing in a store of another program."""
    found: dict[str, Any] = metadata.get("attributes", {}).get(ATTRIBUTES, {})
    return found


def _is_link(path: Path) -> SourceError:
    return SourceError(f"{path}: is a link; those in a zarr store are not followed")
