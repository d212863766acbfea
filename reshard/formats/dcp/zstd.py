"""Items that are streams of zstd, as PyTorch's extension for compression writes them.

A stream does not declare the size of its contents; the metadata bound it by the size of the tensor's block. The head of
an item, which describes its tensor, is in the first block of the stream. An item is decoded in memory as a whole
(`kits.chunks`), by `verify` too; items of more than 1 GB are refused.

An item carries the checksums of its zip (`archive`), and the checksum of the frame, if it has one, which zstd compares.
A bit of the stream may occur in several places of the zip, so that these agree on another name of a record: names have
to be those that PyTorch gives.

Sources: RFC 8878; PyTorch 2.13 `distributed/checkpoint/_extension.py`.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from reshard.core.model.entries import Entry, Summed
from reshard.core.storage.base import Around
from reshard.core.storage.crc import crc32, crc32_fault
from reshard.core.storage.places import any_store, in_batches
from reshard.errors import bytes_text
from reshard.formats.dcp.items import KnownHeads, Span, item, read_heads
from reshard.kits.chunks import STRIDE, Chunk, TooLongError, ZstdStream, zstd_content
from reshard.kits.torch.archive import Archives, ZipPart, directory

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reshard.core.storage.base import ReadStore, Want

_LARGEST = 1 << 30  # bytes that an item may decode to
_BLOCK = 1 << 17  # the largest block, encoded or decoded
_HEAD = 18 + 3 + _BLOCK  # the longest header of a frame, and a block
_DECODED_HEAD = 4 * _BLOCK  # the first block of a stream that was flushed may be short
_SUMMED = 4  # in the fifth byte of a stream: a checksum is behind the last block
_PIECE = 1 << 19
_LARGEST_WINDOW = 128 << 20  # zstd refuses a larger one
_PICKLE = b"archive/data.pkl"
_NAMES = {_PICKLE} | {
    b"archive/" + name
    for name in (b"byteorder", b"version", b".format_version", b".storage_alignment", b".data/serialization_id")
}

_one_at_a_time = threading.Lock()
"""Held by `verify` while an item is decoded, since its threads are not counted in any budget."""


@dataclass(frozen=True, slots=True)
class Streams:
    """A file of zstd streams.

    Attributes:
        most: the most bytes that a stream decodes to.
        spans: the offset and length of each stream.
    """

    most: int
    spans: tuple[tuple[int, int], ...]

    @property
    def chunks(self) -> list[Chunk]:
        """Return the streams as encoded chunks."""
        return [Chunk(*span, self.most, _contents) for span in self.spans]

    def opened_bytes(self, most: int) -> int:
        """Return the memory of a decoded item with at most `most` bytes of a tensor."""
        return min(self.most, _room(most))

    @property
    def opening_bytes(self) -> int:
        """Return the memory to decode an item: the stream, its window and its contents."""
        longest = max(nbytes for _, nbytes in self.spans)
        return self.most + min(longest, 2 * self.most) + min(_LARGEST_WINDOW, self.most) + _PIECE


def _contents(encoded: bytes | bytearray, most: int) -> memoryview:
    """Return the contents of a stream; raise `ValueError` if it is damaged or has too many."""
    if len(encoded) > 2 * most:
        raise TooLongError(most)
    return zstd_content(encoded, most)


def read_streams(path: str, items: Sequence[tuple[tuple[int, int], int]]) -> tuple[Streams, list[Entry | str]]:
    """Return the streams of a file, and the tensor in each, or the reason why it cannot be read.

    Args:
        path: the file.
        items: offset and length of each item, and the most bytes of a tensor that it has.

    Raises:
        SourceError: the file ends before an item does.
    """
    room = _room(max((most for _, most in items if most <= _LARGEST), default=0))
    known_heads = KnownHeads({}, {})
    entries: list[Entry | str] = []
    heads = read_heads([Span(path, *span) for span, _ in items], _HEAD)
    for number, ((span, most), (_, head)) in enumerate(zip(items, heads, strict=True), 1):
        if most > _LARGEST:
            entries.append(
                f"has an item of {bytes_text(most)} in a zstd stream; at most {bytes_text(_LARGEST)} can be decoded"
            )
            continue
        try:
            content = ZstdStream([head], _DECODED_HEAD).next(_DECODED_HEAD)
        except ValueError as error:
            entries.append(f"is not a zstd stream: {error}")
            continue
        entry = item(Span(path, number * STRIDE, room), content, known_heads)
        if isinstance(entry, Entry) and entry.nbytes > span[1] // 3 * _BLOCK:
            entry = "has an item that is shorter than the tensor"
        entries.append(entry or "is not a tensor of torch.save: its head is too long")
    return Streams(room, tuple(span for span, _ in items)), entries


class StreamArchives(NamedTuple):
    """The zips of a file, some of them in zstd streams.

    Attributes:
        plain: the zips that are not encoded.
        parts: each stream, and the most bytes of a tensor in it; None if it is an object.
    """

    plain: Archives
    parts: tuple[tuple[ZipPart, int | None], ...]

    def read(self, path: str, store: ReadStore) -> Iterator[Summed]:
        """Yield each zip, its records summed; what may decode to more than 1 GB is `unread`."""
        yield from self.plain.read(path, store)

        def steps() -> Iterator[tuple[tuple[ZipPart, int | None, bytearray], ReadStore, list[Want]]]:
            for part, most in self.parts:
                encoded = bytearray(part.nbytes if part.nbytes <= 2 * _limit(most) else 0)
                yield (part, most, encoded), any_store(), [(path, part.begin, memoryview(encoded))]

        for part, most, encoded in in_batches(steps()):
            yield _checked(path, part, most, encoded)


def _limit(most: int | None) -> int:
    """Return the most bytes that a stream may decode to; 0 if it is not decoded, because it may be longer than 1 GB."""
    if most is None:
        return _LARGEST
    return _room(most) if most <= _LARGEST else 0


def _checked(path: str, part: ZipPart, most: int | None, encoded: bytearray) -> Summed:
    """Check a stream of an object, or of at most `most` bytes of a tensor; `encoded` is empty if it is too long."""
    with _one_at_a_time:
        content = None
        try:
            if len(encoded) == part.nbytes:
                content = zstd_content(encoded, _limit(most))
        except TooLongError:
            pass
        except MemoryError:
            return Summed(part.name, part[1:], unread=True)
        except ValueError as error:
            return _not_a_stream(part, error)
        if content is not None:
            return _summed(path, part, content, has_sum=bool(encoded[4] & _SUMMED))
        if most is None or not _limit(most):
            return Summed(part.name, part[1:], unread=True)
        return _not_a_stream(part, TooLongError(_limit(most)))


class _Decoded(Around):
    """A store of the contents of a stream, at the offset of the stream in its file."""

    def __init__(self, begin: int, content: memoryview) -> None:
        super().__init__(any_store())
        self._begin, self._content = begin, content

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:  # noqa: ARG002 -- there is one file
        """Fill one buffer."""
        buffer[:] = self._content[offset - self._begin :][: len(buffer)]


def _summed(path: str, part: ZipPart, content: memoryview, *, has_sum: bool) -> Summed:
    """Return the result of checking the zip in a stream; `has_sum` if the frame has a checksum, too."""
    (zipped,) = Archives((ZipPart(part.name, part.begin, len(content)),)).read(path, _Decoded(part.begin, content))
    wrong = [
        f"{subject} {fault}"
        for subject, ((begin, nbytes),), crc in zipped.pending
        if (fault := crc32_fault(crc32(content[begin - part.begin :][:nbytes]), crc))
    ]
    if not zipped.faults and not _has_names(content):
        wrong.append(f"{part.text} has records of other names than torch.save gives them")
    return Summed(part.name, part[1:], faults=(*zipped.faults, *wrong), carries=zipped.carries or has_sum)


def _has_names(content: memoryview) -> bool:
    """Return whether the records of a zip, whose directory is valid, are named as PyTorch does."""
    records = directory(len(content), lambda begin, nbytes: bytes(content[begin : begin + nbytes]))
    names = {record.name for record in records}
    data = names - _NAMES
    return _PICKLE in names and data == {b"archive/data/%d" % number for number in range(len(data))}


def _not_a_stream(part: ZipPart, why: object) -> Summed:
    return Summed(part.name, part[1:], faults=(f"{part.text} is not a zstd stream: {why}",))


def _room(most: int) -> int:
    """Return the most bytes of an item with `most` bytes of a tensor, in whole blocks."""
    return -(-(most + _BLOCK) // _BLOCK) * _BLOCK
