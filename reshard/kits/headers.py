"""Index many files, parsing equal headers once; compute digests of headers.

Ranks with the same role have files that differ only in contents. A file that has the same size as an indexed file, and
the same bytes outside of contents, has the same index: comparing takes a tenth of the time of parsing, and 4,096 ranks
with an index each would not fit into memory. At URLs, the heads of many files are requested at once, each as long as
the header is expected to be.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import count, islice
from typing import TYPE_CHECKING, NamedTuple

from reshard.core.model.checkpoint import IndexedFiles, SourceFile
from reshard.core.model.digests import gaps
from reshard.core.model.entries import FileIndex, RangeReader
from reshard.core.storage.cipher import required, store_of
from reshard.core.storage.decryption import MAGICS
from reshard.core.storage.places import in_batches, workers_at
from reshard.core.storage.threads import map_ordered
from reshard.errors import SourceError
from reshard.kits.files import REMOTE_HEAD, header_of, refuse_unreadable
from reshard.kits.safetensors import refuse_blocks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from reshard.core.rank_files import Step
    from reshard.core.storage.base import ReadStore, Status, Want
    from reshard.core.storage.cipher import Cipher
    from reshard.core.storage.places import Place

_MOST_HELD = 32 << 20  # an entry has some hundred bytes; other content, such as a hash table, may be huge

_LEAST_HEAD = 64 << 10  # a request takes longer than that


class _Header(NamedTuple):
    """The index of a file, and its bytes outside of contents, with offsets."""

    file_index: FileIndex
    pieces: list[tuple[int, bytes]]


class Headers:
    """Indexes the files of one checkpoint."""

    def __init__(self, store: ReadStore) -> None:
        self._store = store
        # The last header of each size, as similar ranks are adjacent: a file is compared with at most one.
        self._known: dict[int, _Header] = {}
        self._entries: dict[int, list[FileIndex]] = {}  # indexes with distinct entries, by number of entries
        self._headers = count()
        self._lock = threading.Lock()  # headers at URLs are read side by side

    def index(self, path: str, head: bytes = b"") -> FileIndex:
        """Return the index of a file; its first bytes are given if they have been read.

        Raises:
            SourceError: it is invalid.
        """
        size = self._store.size(path)
        known = self._known.get(size)
        if known and (head.startswith(known.pieces[0][1]) if head else self._store.holds(path, known.pieces)):
            return known.file_index
        index = self.read(path, head)
        runs = gaps(index, size)
        is_told_by_head = len(runs) == 1  # a header, and contents behind it
        if (is_told_by_head or not head) and sum(nbytes for _, nbytes in runs) <= _MOST_HELD:
            reader = RangeReader(path, store=self._store, window=0, head=head)
            self._known[size] = _Header(index, [(offset, reader.read(offset, nbytes)) for offset, nbytes in runs])
        return index

    def read(self, path: str, head: bytes = b"") -> FileIndex:
        """Return the index of a file that is not compared with others."""
        return self.shared(header_of(path, store=self._store, head=head))

    def of_heads(self, files: Iterable[tuple[str, int]]) -> Iterator[FileIndex]:
        """Yield the index of each safetensors file at a URL, given its size; heads are requested in batches.

        The first head is requested alone, and shows how long the others may be.

        Raises:
            SourceError: a file is invalid.
        """
        buffer = memoryview(bytearray(REMOTE_HEAD))  # shared by all steps
        expected = REMOTE_HEAD

        def step(path: str, size: int) -> tuple[tuple[str, int, memoryview], ReadStore, list[Want]]:
            nonlocal buffer
            known = self._known.get(size)
            nbytes = min(size, len(known.pieces[0][1]) if known else expected)
            buffer = buffer if nbytes <= len(buffer) else memoryview(bytearray(nbytes))
            return (path, size, buffer[:nbytes]), self._store, [(path, 0, buffer[:nbytes])] if nbytes else []

        files, longest = iter(files), 0
        for batch in (islice(files, 1), files):
            for path, size, head in in_batches(step(*file) for file in batch):
                yield self.index(path, bytes(head))
                if size in self._known:
                    longest = max(longest, len(self._known[size].pieces[0][1]))
                    expected = max(_LEAST_HEAD, longest * 3 // 2)

    def shared(self, index: FileIndex) -> FileIndex:
        """Return an index with its header number; share entries that are equal."""
        with self._lock:
            alike = self._entries.setdefault(len(index.entries), [])
            first = next((item for item in alike if item.entries == index.entries), None)
            if first is None:
                first = index._replace(header_id=next(self._headers))
                alike.append(first)
        return index._replace(entries=first.entries, header_id=first.header_id)


def key_of(paths: Sequence[Place], cipher: Cipher | None) -> Cipher | None:
    """Return the cipher of files; None if they are plain and it is optional.

    Raises:
        SourceError: only a part of the files is encrypted: a plain file may have been replaced by others. Empty files,
            of ranks without a tensor, count as neither.
    """
    if cipher is None:
        return None
    encrypted: list[Place] = []
    plain: list[Place] = []
    for path, start in zip(paths, map_ordered(_start, paths, workers_at(paths)), strict=True):
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
    """Return the first four bytes of a file, in which an encrypted one has its magic."""
    path.status()  # this raises the specific error for a missing file
    return RangeReader(str(path), window=4).upto(0, 4)


def index_ranks(
    of_ranks: Mapping[int, Sequence[Place]], cipher: Cipher | None, warnings: list[str], step: Step | None = None
) -> IndexedFiles:
    """Index the files of each rank, with the key if they are encrypted."""
    cipher = key_of([path.absolute() for paths in of_ranks.values() for path in paths], cipher)
    return IndexedFiles(*indexed(of_ranks, cipher), warnings, step, cipher)


def indexed(
    chosen: Mapping[int, Sequence[Place]], cipher: Cipher | None
) -> tuple[tuple[SourceFile, ...], tuple[int, ...]]:
    """Return the files of each rank, indexed, and the rank of each file.

    Raises:
        SourceError: a file is invalid, or its header says that it has blocks of tensors.
    """
    files, ranks = read_indexes(chosen, cipher)
    for file in files:
        refuse_blocks(file.path, dict(file.index.metadata))
    return files, ranks


def read_indexes(
    chosen: Mapping[int, Sequence[Place]], cipher: Cipher | None
) -> tuple[tuple[SourceFile, ...], tuple[int, ...]]:
    """Return indexed files and their ranks; they may have blocks of tensors.

    Raises:
        SourceError: a file is invalid, or no file has a tensor that can be read.
    """
    # Each file has one path everywhere: open files are cached by path.
    paths = [path.absolute() for of_rank in chosen.values() for path in of_rank]
    headers = Headers(store_of(cipher))
    files = [
        SourceFile(str(path), status.nbytes, status.mtime_ns, index, status.change)
        for path, (status, index) in zip(paths, _read(headers, paths, cipher), strict=True)
    ]
    if not any(file.index.entries for file in files):
        for file in files:
            refuse_unreadable(file.path, file.index)
    return tuple(files), tuple(rank for rank, of_rank in chosen.items() for _ in of_rank)


def _read(headers: Headers, paths: Sequence[Place], cipher: Cipher | None) -> Iterable[tuple[Status, FileIndex]]:
    """Return the state and the header of every file."""
    if cipher is None and all(path.can.has_latency and path.suffix != ".ckpt" for path in paths):
        states = list(map_ordered(lambda path: path.status(), paths, workers_at(paths)))
        files = ((str(path), state.nbytes) for path, state in zip(paths, states, strict=True))
        return zip(states, headers.of_heads(files), strict=True)

    def header(path: Place) -> tuple[Status, FileIndex]:
        status = path.status()
        # A rank without any tensor gets an empty .ckpt file, which MindSpore rejects.
        empty = not status.nbytes and path.suffix == ".ckpt" and path.is_file()
        if empty:
            return status, headers.shared(FileIndex("ckpt", {}))
        if path.can.has_latency:  # comparing it with a known header would take as many requests
            return status, headers.read(str(path))
        return status, headers.index(str(path))

    return map_ordered(header, paths, workers_at(paths))
