"""The interface of format modules: entries of files to read, layouts of files to write."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from reshard.core.storage.base import truncated
from reshard.core.storage.places import any_store

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from reshard.core.layout.block import Shape
    from reshard.core.storage.base import RangeStore, ReadStore, Want
    from reshard.dtypes import DType

Runs = tuple[tuple[int, int], ...]
"""Byte ranges of a file, to be read one after the other as one block's contents: (offset, number of bytes)."""

Spans = list[tuple[int, int]]
"""Ascending byte ranges of a file, as begins and ends, that do not touch."""


class Extent(NamedTuple):
    """The location of a block's bytes in a file.

    Attributes:
        file: the number of the file.
        runs: byte ranges of the file; empty for a block of zeros, which is in no file.
        strides: the strides of the block's elements within the runs, in elements, along each dimension; empty if the
            runs hold exactly the block, in row-major order.
    """

    file: int
    runs: Runs
    strides: Shape = ()

    @property
    def is_indirect(self) -> bool:
        """Whether the runs are not the exact contents of the block: it is strided, or zeros."""
        return bool(self.strides) or not self.runs


class Replica(NamedTuple):
    """A stored copy of a block, with the index of its byte ranges in a table of the tensor.

    Tensors in the same files differ in their byte ranges only, so they can share replicas: a million of them, for 2,000
    tensors on 512 ranks, would take 150 MB with their byte ranges. `extent` returns the location.

    Attributes:
        file: the number of the file.
        runs_index: the index of its byte ranges in the table.
        strides: as in an `Extent`.
    """

    file: int
    runs_index: int
    strides: Shape = ()

    def extent(self, table: Sequence[Runs]) -> Extent:
        """Return the location, given the byte ranges of the tensor."""
        return Extent(self.file, table[self.runs_index], self.strides)


def ranges(runs: Runs, begin: int, nbytes: int) -> list[tuple[int, int, int]]:
    """Locate a range of contents in a file.

    Args:
        runs: the byte ranges of all contents.
        begin: the offset of the range in the contents, in bytes.
        nbytes: the size of the range.

    Returns:
        for each piece, its offset in the file, and its start and stop in the range.

    >>> ranges(((100, 10), (200, 10)), 8, 4)
    [(108, 0, 2), (200, 2, 4)]
    """
    if len(runs) == 1:
        return [(runs[0][0] + begin, 0, nbytes)]
    pieces = []
    position = 0
    for offset, length in runs:
        start, stop = max(begin, position), min(begin + nbytes, position + length)
        if start < stop:
            pieces.append((offset + start - position, start - begin, stop - begin))
        position += length
    return pieces


def part_of(runs: Runs, begin: int, nbytes: int) -> Runs:
    """Return the byte ranges of a range of contents in a file; arguments as for `ranges`.

    >>> part_of(((100, 10), (200, 10)), 8, 4)
    ((108, 2), (200, 2))
    """
    return tuple((offset, stop - start) for offset, start, stop in ranges(runs, begin, nbytes))


def wants(path: str, runs: Runs, begin: int, buffer: memoryview) -> list[Want]:
    """Return the read requests that fill a buffer with contents from byte `begin` on."""
    if len(runs) == 1:
        return [(path, runs[0][0] + begin, buffer)]
    return [(path, offset, buffer[start:stop]) for offset, start, stop in ranges(runs, begin, len(buffer))]


def wants_of(path: str, runs: Runs, requests: Sequence[tuple[int, memoryview]]) -> list[Want]:
    """Return the read requests that fill buffers with contents, each from an offset on."""
    if len(runs) == 1:
        start = runs[0][0]
        return [(path, start + begin, buffer) for begin, buffer in requests]
    return [want for begin, buffer in requests for want in wants(path, runs, begin, buffer)]


def covers(spans: Spans, begin: int, end: int) -> bool:
    """Return whether a single span covers a range.

    >>> [covers([(0, 4), (6, 9)], *span) for span in ((0, 4), (3, 7), (6, 6), (9, 10))]
    [True, False, True, False]
    """
    index = bisect_right(spans, begin, key=lambda span: span[0]) - 1
    return begin == end or (index >= 0 and end <= spans[index][1])


def merged(spans: Iterable[tuple[int, int]]) -> Spans:
    """Return byte ranges, as begins and ends, with touching or overlapping ones joined.

    >>> merged([(4, 6), (0, 2), (2, 3), (5, 9)])
    [(0, 3), (4, 9)]
    """
    result: Spans = []
    for begin, end in sorted(spans):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((begin, end))
    return result


class Entry(NamedTuple):
    """One tensor's part in one file, as the file's header describes it.

    Attributes:
        dtype: the dtype of the elements.
        shape: the shape of the part in this file.
        runs: the byte ranges of the part in the file.
        text: the value of a `str` entry, which is small and read with the header; else None.
        strides: the strides of its elements in these bytes, as in an `Extent`.
    """

    dtype: DType
    shape: Shape
    runs: Runs
    text: str | None = None
    strides: Shape = ()

    @property
    def nbytes(self) -> int:
        """The number of bytes in the runs, including gaps between strided elements."""
        return sum(nbytes for _, nbytes in self.runs)


class Summed(NamedTuple):
    """A part of a file with CRC-32 checksums, as known after reading its headers.

    Attributes:
        name: the name of the tensor or object; empty if the part is the whole file.
        run: its byte range.
        pending: the checks still to do: for each, a label, the byte ranges to sum, and the checksum in the file.
        faults: the faults found so far, in words.
        carries: it has checksums; some programs leave them out.
    """

    name: str
    run: tuple[int, int]
    pending: tuple[tuple[str, Runs, int], ...] = ()
    faults: tuple[str, ...] = ()
    carries: bool = True


class Sums(Protocol):
    """The CRC-32 checksums that a file carries of itself."""

    def read(self, path: str, store: ReadStore) -> Iterator[Summed]:
        """Yield the parts with checksums; raise `SourceError` if the file cannot be read."""


class FileIndex(NamedTuple):
    """The index of a checkpoint file, from its header alone.

    Attributes:
        format: the name of the file's format.
        entries: each tensor's part, in the file's order.
        metadata: the file's own key-value notes, without keys that the format itself defines.
        crc: the CRC-32 in the file, unchecked; None if it has none.
        deduplicated: the file is marked as part of a set that stores replicas once (`remove_redundancy`).
        unreadable: entries that cannot be converted, with the reason.
        header_id: files opened together with the same number have equal entries.
        sums: the known CRC-32 checksums in the file of its own bytes; None if it has none.
    """

    format: str
    entries: Mapping[str, Entry]
    metadata: tuple[tuple[str, str], ...] = ()
    crc: int | None = None
    deduplicated: bool = False
    unreadable: tuple[tuple[str, str], ...] = ()
    header_id: int = 0
    sums: Sums | None = None


class Content(NamedTuple):
    """A block of a tensor to be written into one file.

    Attributes:
        name: the tensor's name in that file.
        dtype: the dtype of its elements.
        shape: the shape of the block.
        text: the value of a `str` entry, which is among the literals; else None.
        runs: the byte ranges for it, once the file is laid out; empty for a `str` entry.
    """

    name: str
    dtype: DType
    shape: Shape
    text: str | None = None
    runs: Runs = ()


class Crc(NamedTuple):
    """A CRC-32 of a byte range of a file, stored after the range.

    It takes four bytes, little-endian.

    Attributes:
        begin, nbytes: the range; it has bytes of tensors only, no literals.
        places: the offsets of the stored checksums, which the literals leave out.
    """

    begin: int
    nbytes: int
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class FileLayout:
    """The layout of a file to be written; compares by identity, since files share it.

    Attributes:
        size: the size of the file, in bytes.
        literals: the bytes that are not tensor contents, with their offsets, ascending.
        contents: the blocks, each with its runs; a tensor may have several.
        crcs: the CRC-32 checksums of contents that the file stores, ascending.
    """

    size: int
    literals: tuple[tuple[int, bytes], ...]
    contents: tuple[Content, ...] = ()
    crcs: tuple[Crc, ...] = ()

    @property
    def content_bytes(self) -> int:
        """The number of bytes of tensor contents in the file."""
        return sum(nbytes for content in self.contents for _, nbytes in content.runs)


class RangeReader:
    """A reader of one file, for indexing.

    It caches the last piece, since headers lie close together.

    Args:
        path: the file.
        store: the store to read from; by default this process's store.
        window: the least number of bytes to read at once.
        head: the first bytes of the file, if they have been read.
    """

    def __init__(self, path: str, *, store: RangeStore | None = None, window: int = 4096, head: bytes = b"") -> None:
        self.path = path
        self._store = store or any_store()
        self.size = self._store.size(path)
        self._window = window
        self._start = 0
        self._buffer = head

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset`.

        Raises:
            SourceError: the file ends too early.
        """
        begin = offset - self._start
        if begin >= 0 and begin + nbytes <= len(self._buffer):
            return self._buffer[begin : begin + nbytes]
        if nbytes < 0 or offset + nbytes > self.size:
            raise truncated(self.path, self.size, offset + nbytes)
        buffer = bytearray(min(max(nbytes, self._window), self.size - offset))
        self._store.read_into(self.path, offset, memoryview(buffer))
        self._start, self._buffer = offset, bytes(buffer)
        return self._buffer[:nbytes]

    def upto(self, offset: int, nbytes: int) -> bytes:
        """Return at most `nbytes` bytes from `offset`, fewer at the end of the file."""
        return self.read(offset, max(0, min(nbytes, self.size - offset)))


class Format(Protocol):
    """The interface of a format's module."""

    NAME: str
    EXTENSION: str

    def recognizes(self, start: bytes, size: int) -> bool:
        """Return whether a file is of this format, by its first bytes and its size."""

    def index(self, reader: RangeReader) -> FileIndex:
        """Return the index of a file; raise `SourceError` if it is invalid."""

    def lay_out(self, contents: Sequence[Content], metadata: Mapping[str, str]) -> FileLayout:
        """Return the layout of a file to be written: offsets of contents, and all other bytes."""


class SizedTensor(NamedTuple):
    """A tensor to be stored.

    Attributes:
        name: its name.
        nbytes: its size in bytes.
        listed: a strategy names it.
        is_text: it is a `str` entry.
    """

    name: str
    nbytes: int
    listed: bool
    is_text: bool = False


@dataclass(frozen=True, slots=True)
class ShardFiles:
    """The assignment of a rank's tensors to files.

    Attributes:
        paths: the files of a rank, below the target directory; `{rank}` stands for its number.
        of: for each tensor, the number of its file.
        index: path and content of the index file, if there is one.
        notes: entries for the files' own notes; they override notes of the source.
        numbered: only ranks that hold tensors have a file; in its name, `{number}` is the number of the file among the
            files of all ranks, and `{count}` is their count.
    """

    paths: tuple[str, ...]
    of: Mapping[str, int]
    index: tuple[str, bytes] | None = None
    notes: Mapping[str, str] = field(default_factory=dict)
    numbered: bool = False


class TargetFiles(Protocol):
    """A policy for the files of ranks; directory formats have others (`Format.options`)."""

    def shard_files(self, tensors: Sequence[SizedTensor], extension: str) -> ShardFiles:
        """Assign the tensors to files."""


class SomeFiles(NamedTuple):
    """A subset of the files of a set: one process's share of the work.

    Attributes:
        every: the assignment of all tensors to the files of the set.
        numbers: the numbers of the files to write; a plan takes their tensors only.
        with_index: write the index file, too.

    >>> some = SomeFiles(ShardFiles(("a", "b"), {"w": 0, "v": 1}), (1,), with_index=False)
    >>> some.shard_files([SizedTensor("v", 8, True)], "")
    ShardFiles(paths=('b',), of={'v': 0}, index=None, notes={}, numbered=False)
    """

    every: ShardFiles
    numbers: tuple[int, ...]
    with_index: bool

    def has(self, name: str) -> bool:
        """Return whether a tensor is in one of the files that are written."""
        return self.every.of[name] in self.numbers

    def shard_files(self, tensors: Sequence[SizedTensor], extension: str) -> ShardFiles:  # noqa: ARG002 -- the set has its own
        """Assign the tensors to the same files as the set does."""
        positions = {number: position for position, number in enumerate(self.numbers)}
        return ShardFiles(
            tuple(self.every.paths[number] for number in self.numbers),
            {tensor.name: positions[self.every.of[tensor.name]] for tensor in tensors},
            self.every.index if self.with_index else None,
            self.every.notes,
        )
