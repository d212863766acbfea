"""Items that are streams of zstd, as PyTorch's extension for compression writes them.

A stream does not declare the size of its contents; the metadata bound it by the size of the tensor's block. The head of
an item, which describes its tensor, is in the first block of the stream. An item is decoded in memory as a whole
(`kits.chunks`), which compares the checksum of its frame, if there is one; the checksums of the zip are not
compared. Items of more than 1 GB are refused.

Sources: RFC 8878; PyTorch 2.13 `distributed/checkpoint/_extension.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.core.model.entries import Entry
from reshard.errors import bytes_text
from reshard.formats.dcp.items import KnownHeads, Span, item, read_heads
from reshard.kits.chunks import STRIDE, Chunk, TooLongError, ZstdStream, zstd_content

if TYPE_CHECKING:
    from collections.abc import Sequence

_LARGEST = 1 << 30  # bytes that an item may decode to
_BLOCK = 1 << 17  # the largest block, encoded or decoded
_HEAD = 18 + 3 + _BLOCK  # the longest header of a frame, and a block
_DECODED_HEAD = 4 * _BLOCK  # the first block of a stream that was flushed may be short
_PIECE = 1 << 19
_LARGEST_WINDOW = 128 << 20  # zstd refuses a larger one


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
    room = decoded_bytes(max((most for _, most in items if most <= _LARGEST), default=0))
    known: KnownHeads = {}
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
        entry = item(Span(path, number * STRIDE, room), content, known)
        if isinstance(entry, Entry) and entry.nbytes > span[1] // 3 * _BLOCK:
            entry = "has an item that is shorter than the tensor"
        entries.append(entry or "is not a tensor of torch.save: its head is too long")
    return Streams(room, tuple(span for span, _ in items)), entries


def decoded_bytes(most: int) -> int:
    """Return the most bytes of an item with `most` bytes of a tensor, in whole blocks."""
    return -(-(most + _BLOCK) // _BLOCK) * _BLOCK
