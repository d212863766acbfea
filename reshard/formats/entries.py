"""What a format's module takes and gives: the entries of a file to be read, and the layout of one to be written."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, NamedTuple, Protocol

from reshard.errors import SourceError, UsageError
from reshard.storage.places import any_store

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reshard.dtypes import DType
    from reshard.layout.block import Shape
    from reshard.storage.base import Readable, ReadStore, Want

Runs = tuple[tuple[int, int], ...]
"""Byte ranges of a file that hold one block in row-major order: (offset, number of bytes), one after the other."""


class Extent(NamedTuple):
    """Where the bytes of one block lie.

    Attributes:
        file: the number of the file.
        runs: byte ranges in it; none of a block of zeros, which is in no file.
        strides: how many elements of what the runs hold it is from one element of the block to the next, along each
            dimension; none where the runs hold just the block, in row-major order.
    """

    file: int
    runs: Runs
    strides: Shape = ()

    @property
    def is_apart(self) -> bool:
        """Whether the runs are not the block's contents as they are: its elements lie in strides, or are zeros."""
        return bool(self.strides) or not self.runs


class Where(NamedTuple):
    """An extent but for what differs between tensors that lie in the same files: their runs, by number."""

    file: int
    runs: int
    strides: Shape = ()


def ranges(runs: Runs, begin: int, nbytes: int) -> list[tuple[int, int, int]]:
    """Return where a range of contents lies in a file: for each piece, offset there, start and stop in the range.

    Args:
        runs: where all of the contents lie.
        begin: where the range begins among the contents, in bytes.
        nbytes: how long it is.

    >>> ranges(((100, 10), (200, 10)), 8, 4)
    [(108, 0, 2), (200, 2, 4)]
    """
    if len(runs) == 1:
        return [(runs[0][0] + begin, 0, nbytes)]
    found = []
    position = 0
    for offset, length in runs:
        start, stop = max(begin, position), min(begin + nbytes, position + length)
        if start < stop:
            found.append((offset + start - position, start - begin, stop - begin))
        position += length
    return found


def part_of(runs: Runs, begin: int, nbytes: int) -> Runs:
    """Return where a range of contents lies in a file; arguments as for `ranges`.

    >>> part_of(((100, 10), (200, 10)), 8, 4)
    ((108, 2), (200, 2))
    """
    return tuple((offset, stop - start) for offset, start, stop in ranges(runs, begin, nbytes))


def wants(path: str, runs: Runs, begin: int, buffer: memoryview) -> list[Want]:
    """Return what fills a buffer with contents from a byte on, wherever they lie in a file."""
    if len(runs) == 1:
        return [(path, runs[0][0] + begin, buffer)]
    return [(path, offset, buffer[start:stop]) for offset, start, stop in ranges(runs, begin, len(buffer))]


class Entry(NamedTuple):
    """One tensor's part in one file, as the file's header describes it.

    Attributes:
        dtype: kind of the elements.
        shape: of the part that this file holds.
        runs: where its bytes lie in the file.
        text: the value of a `str` entry, which is small and read with the header; else None.
        strides: how its elements lie in those bytes, as in an `Extent`.
    """

    dtype: DType
    shape: Shape
    runs: Runs
    text: str | None = None
    strides: Shape = ()

    @property
    def nbytes(self) -> int:
        """How many bytes of the file hold the part, with what is between its elements."""
        return sum(nbytes for _, nbytes in self.runs)


class Summed(NamedTuple):
    """A part of a file that carries CRC-32 sums of itself, and what is known of it once its headers are read.

    Attributes:
        name: the tensor or object that it is; empty where it is the file.
        run: where it lies.
        left: what is to be read for its sum: what that is called, its bytes, and the sum that the file carries.
        faults: what is wrong already, in words.
        carries: it has sums; a program may have left them out.
        unread: it was not read to its end, because nothing says where that is.
    """

    name: str
    run: tuple[int, int]
    left: tuple[tuple[str, Runs, int], ...] = ()
    faults: tuple[str, ...] = ()
    carries: bool = True
    unread: bool = False


class Sums(Protocol):
    """What says which CRC-32 sums a file carries."""

    def read(self, path: str, store: ReadStore) -> Iterator[Summed]:
        """Yield the parts that carry sums; raise `SourceError` where the file cannot be read."""


class FileIndex(NamedTuple):
    """What a checkpoint file holds, from its header alone.

    Attributes:
        format: the name of the file's format.
        entries: each tensor's part, in the file's order.
        metadata: the file's own key-value notes, without what the format itself writes there.
        crc: the CRC-32 that the file carries, unchecked; None if it has none.
        deduplicated: the file says that replicas are stored once in its set (`remove_redundancy`).
        unreadable: entries that cannot be converted, with the reason.
        header: files that were opened together and have the same number have equal entries.
        sums: which CRC-32 sums the file carries of its own bytes; None if it has none that are known.
    """

    format: str
    entries: Mapping[str, Entry]
    metadata: tuple[tuple[str, str], ...] = ()
    crc: int | None = None
    deduplicated: bool = False
    unreadable: tuple[tuple[str, str], ...] = ()
    header: int = 0
    sums: Sums | None = None


class Content(NamedTuple):
    """A block of a tensor to be written into one file.

    Attributes:
        name: the tensor's name in that file.
        dtype: kind of its elements.
        shape: of the block.
        text: the value of a `str` entry, which is among the literals; else None.
        runs: where its bytes go, once the file is laid out; none for a `str` entry.
    """

    name: str
    dtype: DType
    shape: Shape
    text: str | None = None
    runs: Runs = ()


class Crc(NamedTuple):
    """The CRC-32 of a range of a file, which the file has behind the range, in four bytes, little-endian.

    Attributes:
        begin, nbytes: the range.
        places: the offsets of the sums.
    """

    begin: int
    nbytes: int
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class FileLayout:
    """Where everything of a file to be written goes; equal only to itself, since files share it.

    Attributes:
        size: of the whole file, in bytes.
        literals: the bytes that are not tensor contents, with their offsets, ascending.
        contents: the blocks, each with its runs; a tensor may have several.
        crcs: CRC-32 sums that the file has of its contents, ascending.
    """

    size: int
    literals: tuple[tuple[int, bytes], ...]
    contents: tuple[Content, ...] = ()
    crcs: tuple[Crc, ...] = ()

    @property
    def content_bytes(self) -> int:
        """How many bytes of the file are contents of tensors."""
        return sum(nbytes for content in self.contents for _, nbytes in content.runs)


class RangeReader:
    """Reads pieces of one file, for indexing it; keeps the last piece, because headers lie close together."""

    def __init__(self, path: str, *, store: Readable | None = None, window: int = 4096) -> None:
        self.path = path
        self._store = store or any_store()
        self.size = self._store.size(path)
        self._window = window
        self._start = 0
        self._held = b""

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset`.

        Raises:
            SourceError: the file ends before.
        """
        begin = offset - self._start
        if begin >= 0 and begin + nbytes <= len(self._held):
            return self._held[begin : begin + nbytes]
        if nbytes < 0 or offset + nbytes > self.size:
            raise SourceError(
                f"{self.path} is truncated or corrupt",
                code="truncated",
                facts=[f"expected bytes {offset} to {offset + nbytes}; the file ends at byte {self.size}"],
            )
        buffer = bytearray(min(max(nbytes, self._window), self.size - offset))
        self._store.read_into(self.path, offset, memoryview(buffer))
        self._start, self._held = offset, bytes(buffer)
        return self._held[:nbytes]

    def upto(self, offset: int, nbytes: int) -> bytes:
        """Return at most `nbytes` bytes from `offset`, fewer where the file ends."""
        return self.read(offset, max(0, min(nbytes, self.size - offset)))


class Format(Protocol):
    """What the module of a format offers."""

    NAME: str
    EXTENSION: str

    def recognizes(self, start: bytes, size: int) -> bool:
        """Return whether a file is of this format, by its first bytes and its size."""

    def index(self, reader: RangeReader) -> FileIndex:
        """Return what a file holds; raise `SourceError` where it is not valid."""

    def lay_out(self, contents: Sequence[Content], metadata: Mapping[str, str]) -> FileLayout:
        """Return where the contents of a file to be written go, and all its other bytes."""


class Stored(NamedTuple):
    """A tensor to be stored: its name, its size in bytes, whether a strategy names it, whether it is a `str` entry."""

    name: str
    nbytes: int
    listed: bool
    is_text: bool = False


@dataclass(frozen=True, slots=True)
class ShardFiles:
    """How the tensors of a rank are shared out to files.

    Attributes:
        paths: the files of a rank, below the target directory; `{rank}` stands for its number.
        of: for each tensor, the number of its file.
        index: path and content of the index file, if there is one.
        notes: what the files' own notes say, whatever those of the source say.
        numbered: only ranks that hold anything have a file; `{number}` in its name is that of the file among those of
            all ranks, `{count}` how many these are.
    """

    paths: tuple[str, ...]
    of: Mapping[str, int]
    index: tuple[str, bytes] | None = None
    notes: Mapping[str, str] = field(default_factory=dict)
    numbered: bool = False


class TargetFiles(Protocol):
    """A way to lay out the files of ranks; formats of whole directories have others (`targets.kinds`)."""

    def shard_files(self, tensors: Sequence[Stored], extension: str) -> ShardFiles:
        """Share the tensors out to files."""


class RankFiles(NamedTuple):
    """`rank_<r>/<prefix><r><suffix>.<ext>`; the suffix is `_part<stage>` for one stage of a pipeline.

    >>> RankFiles("checkpoint_").shard_files([], ".ckpt").paths
    ('rank_{rank}/checkpoint_{rank}.ckpt',)
    """

    prefix: str = "checkpoint_"
    suffix: str = ""

    def shard_files(self, tensors: Sequence[Stored], extension: str) -> ShardFiles:
        """Put all tensors of a rank into one file."""
        for what, part in (("prefix", self.prefix), ("suffix", self.suffix)):
            hides = what == "prefix" and part.startswith(".")
            if not part.isprintable() or "/" in part or "{rank}" in part or hides:
                raise UsageError(
                    f"{what} {part!r} cannot be part of a file name", code="bad-name", hint="use one such as 'model_'"
                )
        path = f"rank_{{rank}}/{self.prefix}{{rank}}{self.suffix}{extension}"
        return ShardFiles((path,), {tensor.name: 0 for tensor in tensors})


class NamedFile(NamedTuple):
    """One file a rank, of a given name below the target directory, in which `{rank}` stands for the rank."""

    name: str

    def shard_files(self, tensors: Sequence[Stored], extension: str) -> ShardFiles:  # noqa: ARG002 -- the name has its own
        """Put all tensors of a rank into the file of that name."""
        path = PurePosixPath(self.name)
        if path.is_absolute() or ".." in path.parts or not path.name or not self.name.isprintable():
            raise UsageError(f"file name {self.name!r} is empty or leads out of the target directory", code="bad-name")
        return ShardFiles((self.name,), {tensor.name: 0 for tensor in tensors})


class SomeFiles(NamedTuple):
    """Some files of a set that is laid out already: one process's share of the work.

    Attributes:
        every: how all tensors are shared out to the files of the set.
        numbers: the files that are written; a plan takes their tensors only.
        with_index: the index file is written too.

    >>> some = SomeFiles(ShardFiles(("a", "b"), {"w": 0, "v": 1}), (1,), with_index=False)
    >>> some.shard_files([Stored("v", 8, True)], "")
    ShardFiles(paths=('b',), of={'v': 0}, index=None, notes={}, numbered=False)
    """

    every: ShardFiles
    numbers: tuple[int, ...]
    with_index: bool

    def has(self, name: str) -> bool:
        """Return whether a tensor is in one of the files that are written."""
        return self.every.of[name] in self.numbers

    def shard_files(self, tensors: Sequence[Stored], extension: str) -> ShardFiles:  # noqa: ARG002 -- the set has its own
        """Put the tensors where the set has them."""
        places = {number: place for place, number in enumerate(self.numbers)}
        return ShardFiles(
            tuple(self.every.paths[number] for number in self.numbers),
            {tensor.name: places[self.every.of[tensor.name]] for tensor in tensors},
            self.every.index if self.with_index else None,
            self.every.notes,
        )
