"""The headers of many files: equal ones are parsed once and held once.

Ranks that do the same have files that differ in nothing but contents. A file as long as one that is indexed, and with
the same bytes everywhere outside of contents, has the same index: to compare takes a tenth of the time of parsing, and
4,096 ranks with an index each would not fit into memory.
"""

from __future__ import annotations

import threading
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from reshard.formats import index_file
from reshard.formats.entries import RangeReader

if TYPE_CHECKING:
    from reshard.formats.entries import FileIndex, Runs
    from reshard.storage.base import ReadStore

_MOST_HELD = 32 << 20  # an entry has some hundred bytes; what cannot be converted, such as a hash table, may be huge


class _Header(NamedTuple):
    """What was found in a file, and all of its bytes that are not contents, with their offsets."""

    found: FileIndex
    pieces: list[tuple[int, bytes]]

    def is_of(self, path: str, store: ReadStore) -> bool:
        """Return whether another file of the same size has it."""
        return store.holds(path, self.pieces)


class Headers:
    """Indexes the files of one checkpoint."""

    def __init__(self, store: ReadStore) -> None:
        self._store = store
        # The last of each size, because ranks alike follow each other: no file is compared with more than one.
        self._known: dict[int, _Header] = {}
        self._entries: dict[int, list[FileIndex]] = {}  # with all distinct entries, by how many these are
        self._headers = count()
        self._lock = threading.Lock()  # headers at URLs are read side by side

    def index(self, path: str) -> FileIndex:
        """Return what a file holds; `SourceError` where it is not sound, as `index_file`."""
        size = self._store.size(path)
        known = self._known.get(size)
        if known is not None and known.is_of(path, self._store):
            return known.found
        index = self.shared(index_file(path, store=self._store))
        runs = gaps(index, size)
        if sum(nbytes for _, nbytes in runs) <= _MOST_HELD:
            reader = RangeReader(path, store=self._store, window=0)
            self._known[size] = _Header(index, [(offset, reader.read(offset, nbytes)) for offset, nbytes in runs])
        return index

    def shared(self, index: FileIndex) -> FileIndex:
        """Return an index with the number of its entries; files that differ in their notes alone share these."""
        with self._lock:
            alike = self._entries.setdefault(len(index.entries), [])
            known = next((one for one in alike if one.entries == index.entries), None)
            if known is None:
                known = index._replace(header=next(self._headers))
                alike.append(known)
        return index._replace(entries=known.entries, header=known.header)


def gaps(index: FileIndex, size: int) -> Runs:
    """Return the ranges of a file that are not contents of tensors; text is part of an index."""
    found: list[tuple[int, int]] = []
    position = 0
    for offset, nbytes in sorted(run for entry in index.entries.values() if entry.text is None for run in entry.runs):
        if offset > position:
            found.append((position, offset - position))
        position = offset + nbytes
    if position < size:
        found.append((position, size - position))
    return tuple(found)
