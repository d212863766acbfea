"""Items that are streams of zstd, as PyTorch's extension for compression writes them.

A stream does not say how long its contents are, and is decoded from its first byte on. The head of an item, which says
what tensor it has, is in the first block; of a file that is read, an item is decoded whole, into memory, and held while
a thread reads of it (`zarr_chunks`). How much it can have is known from the metadata; no more is decoded. To be
verified, a stream is decoded piece by piece, twice where it is long: how long it is is known at its end, where the
directory of the zip lies.

An item carries what the zip in it does (`archive`), and the checksum of its frame, if it has one, which zstd compares.
A bit of the stream may stand in several places of the zip, so that these agree on another name of a record: names are
those that PyTorch gives. A bit that leaves the records as they are, such as one of the window's size, is not seen.

Sources: RFC 8878; PyTorch 2.13 `distributed/checkpoint/_extension.py`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from reshard.errors import SourceError
from reshard.formats.entries import Entry, Summed
from reshard.formats.zarr_chunks import Compressed
from reshard.readers.dcp.archive import Archives, Part
from reshard.readers.dcp.records import directory
from reshard.readers.dcp.torch_save import Known, Span, item, read_heads
from reshard.storage.base import Around
from reshard.storage.crc import crc32, crc32_fault, crc_of_range
from reshard.storage.places import any_store, in_batches

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from reshard.storage.base import ReadStore, Want

_BLOCK = 1 << 17
"""The most that a block has, encoded or decoded."""

_HEAD = 18 + 3 + _BLOCK
"""What is read of a stream for the tensor that it has: the longest header, and a block."""

_OF_HEAD = 4 * _BLOCK
"""The most that is decoded of it: the first block of a stream that was flushed may be short."""

_SUMMED = 4  # in the fifth byte of a stream: there is a checksum behind the last block
_READ, _PIECE = 8 << 20, 1 << 20  # of a stream at once, and of its contents
_KEPT = 4 << 20  # of the end of contents, which has the directory; most contents as a whole
_LARGEST_OBJECT = 1 << 30  # decoded; nothing says how long an object is
_NOT_ONE = "it is not one frame of zstd"
_PICKLE = b"archive/data.pkl"
_NAMES = {_PICKLE} | {
    b"archive/" + name
    for name in (b"byteorder", b"version", b".format_version", b".storage_alignment", b".data/serialization_id")
}


class _TooLongError(ValueError):
    """A stream has more contents than it may."""

    def __init__(self, most: int) -> None:
        super().__init__(f"it has more than {most:,} bytes")


@dataclass(frozen=True, slots=True)
class Streams(Compressed):
    """A file of zstd streams: `chunk_bytes` is the most that any has, and how far they seem to be from each other."""

    def decoded(self, encoded: bytearray) -> bytearray:
        """Return the contents of a stream; raise `ValueError` where it is none, or has more than it may."""
        if len(encoded) > 2 * self.chunk_bytes:
            raise _TooLongError(self.chunk_bytes)
        content = bytearray()
        for piece in _decoded([encoded]):
            content += piece
            if len(content) > self.chunk_bytes:
                raise _TooLongError(self.chunk_bytes)
        return content


def read_streams(path: str, spans: Sequence[tuple[int, int]], most: int) -> tuple[Streams, list[Entry | str]]:
    """Return how the items of a file are decoded, and the tensor that each has, or why it cannot be read.

    Args:
        path: the file.
        spans: where its items are: offset and length.
        most: how many bytes of a tensor one has at most.

    Raises:
        SourceError: the file ends before an item does.
    """
    unit = Streams(_room(most), tuple(spans))
    known = Known({}, {})
    found: list[Entry | str] = []
    for number, (_, head) in enumerate(read_heads([Span(path, *span) for span in spans], _HEAD)):
        try:
            content = _begun(head)
        except ValueError as error:
            found.append(f"is not a zstd stream: {error}")
            continue
        entry = item(Span(path, number * unit.chunk_bytes, unit.chunk_bytes), content, known)
        if isinstance(entry, Entry) and entry.nbytes > spans[number][1] // 3 * _BLOCK:
            entry = "has an item that is shorter than the tensor"
        found.append(entry or "is not a tensor that torch.save stored: its head is too long")
    return unit, found


class StreamArchives(NamedTuple):
    """The zips of a file of which some are zstd streams.

    Attributes:
        plain: the others.
        parts: each stream, and how many bytes of a tensor it has at most; None of an object.
    """

    plain: Archives
    parts: tuple[tuple[Part, int | None], ...]

    def read(self, path: str, store: ReadStore) -> Iterator[Summed]:
        """Yield each, its records summed; an object that goes on for more than 1 GiB is left."""
        yield from self.plain.read(path, store)

        def steps() -> Iterator[tuple[tuple[Part, int | None, bytearray], ReadStore, list[Want]]]:
            for part, most in self.parts:
                head = bytearray(min(part.nbytes, _READ))
                yield (part, most, head), any_store(), [(path, part.begin, memoryview(head))]

        for part, most, head in in_batches(steps()):
            try:
                contents = _Contents(path, part, head, _LARGEST_OBJECT if most is None else _room(most))
                yield _summed(path, part, contents, has_sum=len(head) > 4 and bool(head[4] & _SUMMED))
            except _TooLongError as error:
                yield Summed(part.name, part[1:], unread=True) if most is None else _not_a_stream(part, error)
            except ValueError as error:
                yield _not_a_stream(part, error)


class _Contents(Around):
    """A store that has the contents of a stream where this begins in its file; what lies back is decoded again.

    Raises:
        ValueError: it is not one frame of zstd, or has more than it may.
    """

    def __init__(self, path: str, part: Part, head: bytearray, most: int) -> None:
        super().__init__(any_store())
        self._path, self._part, self._head = path, part, head
        self._tail = bytearray()
        self.nbytes = self._at = 0  # of all contents; where the piece begins
        self._pieces, self._piece = self._decoded(), b""
        if part.nbytes > 2 * most:
            raise _TooLongError(most)
        for piece in self._decoded():
            self.nbytes += len(piece)
            if self.nbytes > most:
                raise _TooLongError(most)
            self._tail += piece
            del self._tail[: max(0, len(self._tail) - _KEPT)]

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill one buffer."""
        begin, done = offset - self._part.begin, 0
        of_tail = begin - (self.nbytes - len(self._tail))
        if of_tail >= 0:
            buffer[:] = self._tail[of_tail : of_tail + len(buffer)]
            return
        if begin < self._at:
            self._pieces, self._piece, self._at = self._decoded(), b"", 0
        while done < len(buffer):
            while self._at + len(self._piece) <= begin + done:
                self._at += len(self._piece)
                piece = next(self._pieces, None)
                if piece is None:
                    raise SourceError(f"{path}: was changed while it was read; start again")
                self._piece = piece
            some = self._piece[begin + done - self._at :][: len(buffer) - done]
            buffer[done : done + len(some)] = some
            done += len(some)

    def _decoded(self) -> Iterator[bytes]:
        return _decoded(self._encoded())

    def _encoded(self) -> Iterator[bytes | bytearray | memoryview]:
        yield self._head
        held = memoryview(bytearray(min(self._part.nbytes - len(self._head), _READ)))
        for begin in range(len(self._head), self._part.nbytes, _READ):
            piece = held[: self._part.nbytes - begin]
            self.inner.read_into(self._path, self._part.begin + begin, piece)
            yield piece


def _summed(path: str, part: Part, contents: _Contents, *, has_sum: bool) -> Summed:
    """Return what is known of a stream of these contents, whose frame may have had a sum of its own."""
    (found,) = Archives((Part(part.name, part.begin, contents.nbytes),)).read(path, contents)
    wrong = [
        f"{what} {fault}"
        for what, ((begin, nbytes),), crc in found.left
        if (fault := crc32_fault(crc_of_range(contents, path, begin, nbytes, crc32), crc))
    ]
    if not found.faults and not _has_names(path, part, contents):
        wrong.append(f"{part.text} has records of other names than torch.save gives them")
    return Summed(part.name, part[1:], faults=(*found.faults, *wrong), carries=found.carries or has_sum)


def _has_names(path: str, part: Part, contents: _Contents) -> bool:
    """Return whether the records of a zip, whose directory is valid, are named as PyTorch does."""

    def read(begin: int, nbytes: int) -> bytes:
        held = bytearray(nbytes)
        contents.read_into(path, part.begin + begin, memoryview(held))
        return bytes(held)

    records, _ = directory(contents.nbytes, read)
    names = {record.name for record in records}
    data = names - _NAMES
    return _PICKLE in names and data == {b"archive/data/%d" % number for number in range(len(data))}


def _not_a_stream(part: Part, why: object) -> Summed:
    return Summed(part.name, part[1:], faults=(f"{part.text} is not a zstd stream: {why}",))


def _room(most: int) -> int:
    """Return how many bytes an item has at most that has so many of a tensor, in whole blocks."""
    return -(-(most + _BLOCK) // _BLOCK) * _BLOCK


def _begun(head: bytes) -> bytes:
    """Return the contents of a stream's first blocks, as far as these are whole; raise `ValueError` for no stream."""
    try:
        found = zstd.ZstdDecompressor().decompress(head, _OF_HEAD)
    except zstd.ZstdError as error:
        raise ValueError(str(error)) from None
    if not found:
        raise ValueError("it has no contents in its first block")
    return found


def _decoded(encoded: Iterable[bytes | bytearray | memoryview]) -> Iterator[bytes]:
    """Yield the contents of a stream, some at a time; raise `ValueError` where it is not one frame of zstd."""
    decoder = zstd.ZstdDecompressor()
    for piece in encoded:
        if decoder.eof:
            raise ValueError(_NOT_ONE)
        try:
            yield decoder.decompress(piece, _PIECE)
            while not decoder.eof and not decoder.needs_input:
                yield decoder.decompress(b"", _PIECE)
        except zstd.ZstdError as error:
            raise ValueError(str(error)) from None
    if not decoder.eof or decoder.unused_data:
        raise ValueError(_NOT_ONE)
