"""The headers of many files: equal ones are parsed once and held once; and digests of them.

Ranks that do the same have files that differ in nothing but contents. A file as long as one that is indexed, and with
the same bytes everywhere outside of contents, has the same index: to compare takes a tenth of the time of parsing, and
4,096 ranks with an index each would not fit into memory.

Digests are of what two machines, or two runs, must have the same. None depends on a time: copying a file changes that.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from reshard.errors import SourceError
from reshard.formats import index_file
from reshard.formats.directories import refuse_blocks
from reshard.formats.entries import FileIndex, RangeReader
from reshard.source.checkpoint import SourceFile
from reshard.source.records import digest
from reshard.storage.cipher import MAGICS, required, store_of
from reshard.storage.local import local_store
from reshard.storage.places import of_each

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from reshard.formats.entries import Content, Entry, Runs
    from reshard.storage.base import ReadStore, Status
    from reshard.storage.cipher import Cipher
    from reshard.storage.places import Place

_MOST_HELD = 32 << 20  # an entry has some hundred bytes; what cannot be converted, such as a hash table, may be huge

_SMALL = 64 << 10
_PAGE = 4096
_PAGES = 4


class _Header(NamedTuple):
    """What was found in a file, and all of its bytes that are not contents, with their offsets."""

    found: FileIndex
    pieces: list[tuple[int, bytes]]


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
        """Return what a file holds; `SourceError` where it is not valid, as `index_file`."""
        size = self._store.size(path)
        known = self._known.get(size)
        if known is not None and self._store.holds(path, known.pieces):
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


def index_digests(indexes: Sequence[FileIndex]) -> list[str]:
    """Return the digest of all that each header says: names, dtypes, shapes, byte ranges, notes and text.

    The headers were read together: the entries that they share are looked through once.
    """
    entries = {index.header: index for index in indexes}
    digests = {header: _entries_digest(index) for header, index in entries.items()}
    notes: dict[tuple[object, ...], str] = {}
    found = []
    for index in indexes:
        key = (index.format, digests[index.header], index.metadata, index.crc, index.deduplicated, index.unreadable)
        if key not in notes:
            notes[key] = digest(key)
        found.append(notes[key])
    return found


def contents_digest(contents: Iterable[tuple[str, Entry | Content]]) -> str:
    """Return the digest of what a header says of tensors, by their names; notes and the order are not in it.

    A file to be written has the same, from its layout, as its reader finds in it.
    """
    said = (
        (name, one.dtype.name, one.shape, one.runs) if one.text is None else (name, one.text) for name, one in contents
    )
    return digest(sorted(said))


def pages_digest(path: str) -> str:
    """Return the digest of four pages of a file, the last one among them; of all of it up to 64 KiB.

    Checkpoints of two steps of one training have equal names, shapes and headers; their weights differ everywhere.

    Raises:
        SourceError: it cannot be read.
    """
    store = local_store()
    nbytes = store.size(path)
    pages, length = 1, nbytes
    if nbytes > _SMALL:
        pages, length = _PAGES, _PAGE
    content = bytearray(pages * length)
    for number in range(pages):
        offset = (nbytes - length) * (number + 1) // pages
        store.read_into(path, offset, memoryview(content)[number * length : (number + 1) * length])
    return digest(bytes(content))


def _entries_digest(index: FileIndex) -> str:
    return digest([(name, e.dtype.name, e.shape, e.runs, e.text) for name, e in index.entries.items()])


def key_of(paths: Sequence[Place], cipher: Cipher | None) -> Cipher | None:
    """Return the key with which the files of a checkpoint are read; None where they are plain and it is not required.

    Raises:
        SourceError: some are encrypted and some are not: what is plain may have been put there by others. Empty files,
            of ranks without a tensor, are neither.
    """
    if cipher is None:
        return None
    encrypted: list[Place] = []
    plain: list[Place] = []
    for path, start in zip(paths, of_each(_start, paths), strict=True):
        if start:
            (encrypted if int.from_bytes(start, "little") in MAGICS else plain).append(path)
    if encrypted and plain:
        raise SourceError(
            f"{plain[0]} is not encrypted, and {encrypted[0]} is",
            code="mixed-encryption",
            facts=["expected all files of a checkpoint to be encrypted, or none; it may have been replaced"],
            hint="get the file again from where it was saved",
        )
    return replace(cipher, required=True) if encrypted else required(cipher)


def _start(path: Place) -> bytes:
    """Return the first bytes of a file, as many as the magic of an encrypted one has."""
    path.status()  # a file that is gone has an error of its own
    return RangeReader(str(path), window=4).upto(0, 4)


def indexed(
    chosen: Mapping[int, Sequence[Place]], cipher: Cipher | None
) -> tuple[tuple[SourceFile, ...], tuple[int, ...]]:
    """Return the files of each rank, indexed, and the rank of each file.

    Raises:
        SourceError: a file is not valid, or says of itself that it has blocks of tensors.
    """
    files, ranks = read_indexes(chosen, cipher)
    for file in files:
        refuse_blocks(file.path, dict(file.index.metadata))
    return files, ranks


def read_indexes(
    chosen: Mapping[int, Sequence[Place]], cipher: Cipher | None
) -> tuple[tuple[SourceFile, ...], tuple[int, ...]]:
    """Return the files of each rank, indexed, and the rank of each; they may have blocks that say which they are.

    Raises:
        SourceError: a file is not valid.
    """
    # One name for each file everywhere: what is held open of it goes by name.
    paths = [path.absolute() for of_rank in chosen.values() for path in of_rank]
    files = [
        SourceFile(str(path), status.nbytes, status.mtime_ns, index, status.change)
        for path, (status, index) in zip(paths, _headers(paths, cipher), strict=True)
    ]
    return tuple(files), tuple(rank for rank, of_rank in chosen.items() for _ in of_rank)


def _headers(paths: Sequence[Place], cipher: Cipher | None) -> Iterator[tuple[Status, FileIndex]]:
    """Yield the state and the header of every file."""
    store = store_of(cipher)
    headers = Headers(store)

    def header(path: Place) -> tuple[Status, FileIndex]:
        status = path.status()
        # MindSpore refuses an empty .ckpt file; it is what a rank without any tensor gets.
        empty = not status.nbytes and path.suffix == ".ckpt" and path.is_file()
        if empty:
            return status, headers.shared(FileIndex("ckpt", {}))
        if path.can.waits:  # to look whether its header is one that is known is a request too
            return status, headers.shared(index_file(str(path), store=store))
        return status, headers.index(str(path))

    return of_each(header, paths)
