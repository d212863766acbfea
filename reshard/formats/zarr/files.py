"""The values of a zarr store: its files, on a local disk or at a URL.

All files are listed at once. Links on a local disk are refused, because they could lead anywhere.
"""

from __future__ import annotations

import os
from stat import S_ISDIR, S_ISREG
from typing import TYPE_CHECKING, NamedTuple, Protocol

from reshard.core.storage.base import Status, read_error, stem_of_unfinished
from reshard.core.storage.local import local_store
from reshard.core.storage.places import any_store, in_batches, workers_at
from reshard.core.storage.threads import map_ordered
from reshard.errors import SourceError
from reshard.formats.zarr.layout import METADATA

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from reshard.core.storage.base import ReadStore, Want
    from reshard.core.storage.places import Place

GROUP_V2 = ".zgroup"
"""The file that describes a group of zarr v2."""

_MARKS = {METADATA, GROUP_V2, ".zarray", ".zmetadata"}
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
    return name in _MARKS or stem_of_unfinished(name) == METADATA


class StoredValue(NamedTuple):
    """The location of a value.

    Attributes:
        path: its file; of a value within a node of a database, the manifest.
        offset, nbytes: the range of its bytes in the file; of a value within a node, its size.
        content: the value, if it is within a node; else None.
    """

    path: str
    offset: int
    nbytes: int
    content: bytes | None = None


class Values(Protocol):
    """The values of a store by key."""

    def get(self, key: str, /) -> StoredValue | None:
        """Return the location of a value; None if there is none."""


def read_values(values: Values, keys: Iterable[str], most: int) -> Iterator[tuple[str, bytes]]:
    """Yield the values of some keys that exist; of those with more than `most` bytes, the first ones alone."""

    def steps() -> Iterator[tuple[tuple[str, bytes | bytearray], ReadStore, list[Want]]]:
        for key in keys:
            value = values.get(key)
            if value is not None and value.content is not None:
                yield (key, value.content[:most]), any_store(), []
            elif value is not None:
                buffer = bytearray(min(value.nbytes, most))
                yield (key, buffer), any_store(), [(value.path, value.offset, memoryview(buffer))]

    for key, content in in_batches(steps()):
        yield key, bytes(content)


class StoreFiles:
    """The files of a store, listed once on creation.

    Attributes:
        base: the store.
        statuses: the state of each file, by its full path; on a local disk, None for a directory.

    Raises:
        SourceError: it cannot be listed; or on a local disk, it contains a link, a device or a pipe.
    """

    def __init__(self, root: Place) -> None:
        self.base = root.real()
        self.statuses = (_listed if self.base.can.has_latency else _walked)(self.base)

    def get(self, key: str) -> StoredValue | None:
        """Return a file as a value, by its path below the store; see `Values`.

        Raises:
            SourceError: it is a directory.
        """
        path = f"{self.base}/{key}"
        status = self.statuses.get(path)
        if status is None and path in self.statuses:
            raise _is_other(path)
        return None if status is None else StoredValue(path, 0, status.nbytes)

    def paths(self) -> list[str]:
        """Return the path of each file below the store, sorted."""
        return sorted(path.removeprefix(f"{self.base}/") for path, status in self.statuses.items() if status)


def _walked(base: Place) -> dict[str, Status | None]:
    """Return the state of each file of a local directory, by path; None for a directory."""
    statuses: dict[str, Status | None] = {}
    try:
        for directory, below, files in os.walk(str(base), onerror=_raised):
            for name in (*below, *files):
                path = f"{directory}/{name}"
                status = os.lstat(path)
                if S_ISDIR(status.st_mode):
                    statuses[path] = None
                elif S_ISREG(status.st_mode):
                    statuses[path] = Status.of(status)
                    local_store().forget(path)
                else:
                    raise _is_other(path)
    except OSError as error:
        raise read_error(SourceError, error.filename, error) from None
    return statuses


def _raised(error: OSError) -> None:
    raise error


def _listed(base: Place) -> dict[str, Status | None]:
    """Return the state of each file below a URL, by URL."""
    base.refresh()
    files = [*base.files()]
    # Mostly answered from the listing; one request each if the file system has dropped it.
    statuses = map_ordered(lambda path: path.status(), files, workers_at(files))
    return dict(zip(map(str, files), statuses, strict=True))


def _is_other(path: object) -> SourceError:
    return SourceError(f"{path} is not a regular file; links in a zarr store are not followed", code="not-a-file")
