"""Items that are streams of zstd, as PyTorch's extension for compression writes them.

A stream does not say how long its contents are, and is decoded from its first byte on. The head of an item, which says
what tensor it has, is in the first block; of a file that is read, an item is decoded whole, into memory, and held while
a thread reads of it (`zarr_chunks`). How much it can have is known from the metadata: blocks are decoded as far as they
cannot have twice that, and it is seen how much they have, before more are.

An item carries what the zip in it does (`archive`), and the checksum of its frame, if it has one, which zstd compares.
A bit of the stream may stand in several places of the zip, so that these agree on another name of a record: names are
those that PyTorch gives. A bit that leaves the records as they are, such as one of the window's size, is not seen.

Sources: RFC 8878; PyTorch 2.13 `distributed/checkpoint/_extension.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from reshard.formats.entries import Entry, Summed
from reshard.formats.zarr_chunks import Compressed
from reshard.readers.dcp.archive import Archives, Part
from reshard.readers.dcp.records import directory
from reshard.readers.dcp.torch_save import Known, Span, item, read_heads
from reshard.storage.base import Around
from reshard.storage.crc import crc32, crc32_fault
from reshard.storage.places import any_store, in_batches

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reshard.storage.base import ReadStore, Want

_MAGIC = b"\x28\xb5\x2f\xfd"
_HEADER = 6  # of a frame that says nothing but its window
_SUMMED = 4  # in its fifth byte: there is a checksum behind the last block
_CHECKSUM = 4
_BLOCK = 1 << 17
"""The most that a block has, encoded or decoded."""

_LARGEST_OBJECT, _LARGEST = 1 << 24, 1 << 30  # of what is decoded to be summed; nothing says how long an object is
_PICKLE = b"archive/data.pkl"
_NAMES = {_PICKLE} | {
    b"archive/" + name
    for name in (b"byteorder", b"version", b".format_version", b".storage_alignment", b".data/serialization_id")
}
_OF_HEAD = 4  # blocks: the first of a stream that was flushed may be short
_HEAD = _HEADER + 3 + _BLOCK


class _TooLongError(ValueError):
    """A stream has more contents than it may."""

    def __init__(self, most: int) -> None:
        super().__init__(f"it has more than {most:,} bytes")


@dataclass(frozen=True, slots=True)
class Streams(Compressed):
    """A file of zstd streams: `chunk_bytes` is the most that any has, and how far they seem to be from each other."""

    def decoded(self, encoded: bytes | bytearray) -> bytes:
        """Return the contents of a stream; raise `ValueError` or `RuntimeError` where it is none."""
        if len(encoded) > 2 * self.chunk_bytes:
            raise _TooLongError(self.chunk_bytes)
        ends = list(_ends(encoded))
        if not ends or ends[-1][1] + _CHECKSUM * bool(encoded[4]) != len(encoded):
            raise ValueError("it is not one frame of zstd")
        done, content = 0, b""
        while done < len(ends):
            done = min(len(ends), done + 1 + (2 * self.chunk_bytes - len(content)) // _BLOCK)
            content = _decompressed(encoded if done == len(ends) else _cut(encoded, *ends[done - 1]))
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
            content = _decompressed(_cut(head, *list(islice(_ends(head), _OF_HEAD))[-1]))
        except (IndexError, RuntimeError, ValueError) as error:
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
        """Yield each, its records summed; a tensor or an object that is too large to be held for that is not read."""
        yield from self.plain.read(path, store)

        def steps() -> Iterator[tuple[tuple[Part, int | None, Streams, bytearray | None], ReadStore, list[Want]]]:
            for part, most in self.parts:
                unit = Streams(_room(_LARGEST_OBJECT if most is None else most), ())
                is_small = unit.chunk_bytes <= _LARGEST and (most is not None or part.nbytes <= _LARGEST_OBJECT)
                held = bytearray(min(part.nbytes, 2 * unit.chunk_bytes + 1)) if is_small else None
                wanted = [] if held is None else [(path, part.begin, memoryview(held))]
                yield (part, most, unit, held), any_store(), wanted

        for part, most, unit, held in in_batches(steps()):
            if held is None:
                yield _unread(part)
                continue
            try:
                yield _summed(path, part, unit.decoded(held), has_sum=bool(held[4]))
            except _TooLongError as error:
                yield _unread(part) if most is None else _not_a_stream(part, error)
            except (RuntimeError, ValueError, MemoryError, OverflowError) as error:
                yield _not_a_stream(part, error)


def _summed(path: str, part: Part, content: bytes, *, has_sum: bool) -> Summed:
    """Return what is known of a stream of these contents, whose frame may have had a sum of its own."""
    (found,) = Archives((Part(part.name, part.begin, len(content)),)).read(path, _Decoded(part.begin, content))
    wrong = [
        f"{what} {fault}"
        for what, ((begin, nbytes),), crc in found.left
        if (fault := crc32_fault(crc32(memoryview(content)[begin - part.begin :][:nbytes]), crc))
    ]
    if not found.faults and not _has_names(content):
        wrong.append(f"{part.text} has records of other names than torch.save gives them")
    return Summed(part.name, part[1:], faults=(*found.faults, *wrong), carries=found.carries or has_sum)


def _has_names(content: bytes) -> bool:
    """Return whether the records of a zip, whose directory is valid, are named as PyTorch does."""
    records, _ = directory(len(content), lambda begin, nbytes: content[begin : begin + nbytes])
    names = {record.name for record in records}
    data = names - _NAMES
    return _PICKLE in names and data == {b"archive/data/%d" % number for number in range(len(data))}


def _unread(part: Part) -> Summed:
    return Summed(part.name, part[1:], unread=True)


def _not_a_stream(part: Part, why: object) -> Summed:
    return Summed(part.name, part[1:], faults=(f"{part.text} is not a zstd stream: {why}",))


class _Decoded(Around):
    """A store that has the contents of a stream where this begins in its file."""

    def __init__(self, begin: int, content: bytes) -> None:
        super().__init__(any_store())
        self._begin, self._content = begin, content

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:  # noqa: ARG002 -- it has one
        """Fill one buffer."""
        begin = offset - self._begin
        buffer[:] = self._content[begin : begin + len(buffer)]


def _room(most: int) -> int:
    """Return how many bytes an item has at most that has so many of a tensor, in whole blocks."""
    return -(-(most + _BLOCK) // _BLOCK) * _BLOCK


def _ends(encoded: bytes | bytearray) -> Iterator[tuple[int, int]]:
    """Yield where each block of a frame begins and ends, as far as they are whole; nothing where it is not a frame."""
    if encoded[:4] != _MAGIC or len(encoded) < _HEADER or encoded[4] & ~_SUMMED:
        return  # which PyTorch does not write: a size in the header, or a dictionary
    at, last = _HEADER, 0
    while not last and len(encoded) - at >= 3:
        block = int.from_bytes(encoded[at : at + 3], "little")
        last, kind, nbytes = block & 1, block >> 1 & 3, block >> 3
        begin, at = at, at + 3 + (1 if kind == 1 else nbytes)
        if at > len(encoded) or nbytes > _BLOCK:
            return
        yield begin, at


def _cut(encoded: bytes | bytearray, begin: int, end: int) -> bytes:
    """Return a frame that ends with the block that is here in another."""
    cut = bytearray(encoded[:end])
    cut[4] = 0
    cut[begin] |= 1
    return bytes(cut)


def _decompressed(encoded: bytes | bytearray) -> bytes:
    from numcodecs import zstd  # with the first that is read

    return bytes(zstd.decompress(encoded))
