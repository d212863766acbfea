"""Items that are streams of zstd, as PyTorch's extension for compression writes them.

A stream does not say how long its contents are, and is decoded from its first byte on. The head of an item, which says
what tensor it has, is in the first block. An item of up to 16 MiB is decoded into memory and held while a thread reads
it (`zarr_chunks`). A longer one is decoded piece by piece, and again from the beginning when an earlier part is needed.
How long an item can be is known from the metadata. `verify` decodes each item piece by piece, long ones more than once,
because the directory of the zip stands at the end.

An item carries what the zip in it does (`archive`), and the checksum of its frame, if it has one, which zstd compares.
A bit of the stream may stand in several places of the zip, so that these agree on another name of a record: names are
those that PyTorch gives. A bit that leaves the records as they are, such as one of the window's size, is not seen.

Sources: RFC 8878; PyTorch 2.13 `distributed/checkpoint/_extension.py`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from reshard.formats.entries import Entry, Summed
from reshard.formats.zarr_chunks import Compressed
from reshard.readers.dcp.archive import Archives, Part, directory
from reshard.readers.dcp.torch_save import Known, Span, item, read_heads
from reshard.storage.base import Around
from reshard.storage.crc import crc32, crc32_fault, crc_of_range
from reshard.storage.places import any_store, can, in_batches

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from reshard.storage.base import ReadStore, Want

_BLOCK = 1 << 17
"""The most that a block has, encoded or decoded."""

_HEAD = 18 + 3 + _BLOCK
"""What is read of a stream for the tensor that it has: the longest header, and a block."""

_OF_HEAD = 4 * _BLOCK
"""The most that is decoded of it: the first block of a stream that was flushed may be short."""

_SUMMED, _IS_ONE_SEGMENT = 4, 32  # in the fifth byte of a stream: there is a checksum behind the last block
_LONGEST_HELD = 16 << 20  # an item that is decoded into memory has at most so many bytes
_READ, _PIECE = 1 << 20, 1 << 19  # bytes of a stream, and of its contents, that are handled at once
_AHEAD = 8 << 20  # bytes of a stream that are read at once where requests take long, and first of all by `verify`
_LARGEST_WINDOW = 128 << 20  # zstd refuses a larger one
_KEPT = 4 << 20  # bytes at the end of contents that `verify` keeps: the directory, or all of most contents
_LARGEST_OBJECT = 1 << 30  # bytes that `verify` decodes of an object, since nothing says how long it is
_NOT_ONE = "it is not one frame of zstd"
_PICKLE = b"archive/data.pkl"
_NAMES = {_PICKLE} | {
    b"archive/" + name
    for name in (b"byteorder", b"version", b".format_version", b".storage_alignment", b".data/serialization_id")
}


class _BadStreamError(ValueError):
    """A stream cannot be decoded: a short fact."""


class _TooLongError(_BadStreamError):
    """A stream has more contents than it may."""

    def __init__(self, most: int) -> None:
        super().__init__(f"it has more than {most:,} bytes")


class Stream:
    """The contents of a stream, decoded as far as they are read.

    Args:
        read: returns bytes of it: from which one on, and how many.
        encoded_bytes: how long it is.
        memory: what decoding takes, in bytes.
    """

    def __init__(
        self, read: Callable[[int, int], bytes | bytearray | memoryview], encoded_bytes: int, memory: int = 0
    ) -> None:
        self.memory = memory
        self._read, self._encoded_bytes = read, encoded_bytes
        self._start()

    def _start(self) -> None:
        self._decoder = zstd.ZstdDecompressor()
        self._fed = self._begin = 0  # of the stream; where the piece is in the contents
        self._piece = b""

    def more(self) -> bytes:
        """Return the contents that follow, some of them; none at the end.

        Raises:
            _BadStreamError: it is not one frame of zstd, or other bytes follow the frame.
        """
        decoder, content = self._decoder, b""
        while not content and not decoder.eof:
            fed: bytes | bytearray | memoryview = b""
            if decoder.needs_input:
                if self._fed == self._encoded_bytes:
                    raise _BadStreamError(_NOT_ONE)
                fed = self._read(self._fed, min(_READ, self._encoded_bytes - self._fed))
                self._fed += len(fed)
            try:
                content = decoder.decompress(fed, _PIECE)
            except (zstd.ZstdError, MemoryError) as error:
                raise _BadStreamError(str(error) or "there is too little memory") from None
        if decoder.eof and (decoder.unused_data or self._fed < self._encoded_bytes):
            raise _BadStreamError(_NOT_ONE)
        self._begin += len(self._piece)
        self._piece = content
        return content

    def fill(self, begin: int, buffer: memoryview) -> None:
        """Fill a buffer from a byte of the contents on.

        Raises:
            _BadStreamError: the contents end before the buffer is full, or as for `more`.
        """
        if begin < self._begin:
            self._start()
        done = 0
        while done < len(buffer):
            while begin + done >= self._begin + len(self._piece):
                if not self.more():
                    raise _BadStreamError(f"it ends at byte {self._begin:,}")
            some = self._piece[begin + done - self._begin :][: len(buffer) - done]
            buffer[done : done + len(some)] = some
            done += len(some)
        # Decode to the end if it is near, for zstd to compare the checksum there. `verify` always goes to the end.
        while self._encoded_bytes - self._fed <= _READ and not self._decoder.eof and len(self._piece) <= 2 * _PIECE:
            before, at = self._piece, self._begin
            self._begin, self._piece = at, before + self.more()


@dataclass(frozen=True, slots=True)
class Streams(Compressed):
    """A file of zstd streams.

    Attributes:
        chunk_bytes: the most that any has, and how far they seem to be from each other.
        window: the largest window of a frame, in bytes.
    """

    window: int

    def opened_bytes(self, most: int) -> int:
        """Return the memory of an item with so many bytes of a tensor: a buffer that grows is an eighth larger."""
        return min(self.chunk_bytes, _room(most)) * 9 // 8

    @property
    def opening_bytes(self) -> int:
        """The memory that decoding an item takes: the stream, its window, and a buffer that moves as it grows."""
        longest = max(nbytes for _, nbytes in self.spans)
        grown = 2 * self.opened_bytes(self.chunk_bytes)
        return grown + min(longest, 2 * self.chunk_bytes) + min(self.window, self.chunk_bytes) + _PIECE

    def decoded(self, encoded: bytearray) -> bytearray:
        """Return the contents of a stream; raise `ValueError` where it is none, or has more than it may."""
        if len(encoded) > 2 * self.chunk_bytes:
            raise _TooLongError(self.chunk_bytes)
        content = bytearray()
        stream = Stream(lambda begin, nbytes: memoryview(encoded)[begin : begin + nbytes], len(encoded))
        while piece := stream.more():
            content += piece
            if len(content) > self.chunk_bytes:
                raise _TooLongError(self.chunk_bytes)
        return content


@dataclass(frozen=True, slots=True)
class LongStreams:
    """A file of zstd streams, some of which are too long to be held decoded.

    Attributes:
        chunk_bytes: as of `Streams`.
        spans: where each stream is: offset and length.
        opening_bytes: the memory that decoding an item takes.
    """

    chunk_bytes: int
    spans: tuple[tuple[int, int], ...]
    opening_bytes: int

    def opened_bytes(self, most: int) -> int:  # noqa: ARG002 -- it does not depend on the length
        """Return the memory of an item with so many bytes of a tensor."""
        return self.opening_bytes

    def opened(self, store: ReadStore, path: str, number: int) -> Stream:
        """Return a stream by its number."""
        begin, nbytes = self.spans[number]
        return Stream(_reading(store, path, begin, nbytes), nbytes, self.opening_bytes)


def _reading(
    store: ReadStore, path: str, begin: int, nbytes: int, held: bytes | bytearray = b""
) -> Callable[[int, int], memoryview]:
    """Return a function that reads a part of a stream; where requests take long, it reads ahead.

    Args:
        store: reads the file.
        path: the file.
        begin: where the stream begins in the file.
        nbytes: the length of the stream.
        held: the first bytes of the stream, if they are read already.
    """
    at, some = 0, memoryview(held)
    ahead = _AHEAD if can(path).waits else 0

    def read(offset: int, count: int) -> memoryview:
        nonlocal at, some
        if not at <= offset < at + len(some):
            at, some = offset, memoryview(bytearray(min(max(count, ahead), nbytes - offset)))
            store.read([(path, begin + offset, some)])
        return some[offset - at :][:count]

    return read


def read_streams(
    path: str, spans: Sequence[tuple[int, int]], most: int
) -> tuple[Streams | LongStreams, list[Entry | str]]:
    """Return how the items of a file are decoded, and the tensor that each has, or why it cannot be read.

    Args:
        path: the file.
        spans: where its items are: offset and length.
        most: how many bytes of a tensor one has at most.

    Raises:
        SourceError: the file ends before an item does.
    """
    room, window = _room(most), 0
    known = Known({}, {})
    found: list[Entry | str] = []
    for number, (_, head) in enumerate(read_heads([Span(path, *span) for span in spans], _HEAD)):
        try:
            content = _begun(head)
            window = max(window, _window(head))
        except _BadStreamError as error:
            found.append(f"is not a zstd stream: {error}")
            continue
        entry = item(Span(path, number * room, room), content, known)
        if isinstance(entry, Entry) and entry.nbytes > spans[number][1] // 3 * _BLOCK:
            entry = "has an item that is shorter than the tensor"
        found.append(entry or "is not a tensor of torch.save: its head is too long")
    if room <= _LONGEST_HELD:
        return Streams(room, tuple(spans), window), found
    memory = window + 2 * _READ + 4 * _PIECE + (_AHEAD if can(path).waits else 0)
    return LongStreams(room, tuple(spans), memory), found


class StreamArchives(NamedTuple):
    """The zips of a file of which some are zstd streams.

    Attributes:
        plain: the others.
        parts: each stream, and how many bytes of a tensor it has at most; None of an object.
    """

    plain: Archives
    parts: tuple[tuple[Part, int | None], ...]

    def read(self, path: str, store: ReadStore) -> Iterator[Summed]:
        """Yield each, its records summed; an object that decodes to more than 1 GiB is `unread`."""
        yield from self.plain.read(path, store)

        def steps() -> Iterator[tuple[tuple[Part, int | None, bytearray], ReadStore, list[Want]]]:
            for part, most in self.parts:
                head = bytearray(min(part.nbytes, _AHEAD))
                yield (part, most, head), any_store(), [(path, part.begin, memoryview(head))]

        for part, most, head in in_batches(steps()):
            yield _checked(path, part, most, head)


def _checked(path: str, part: Part, most: int | None, head: bytearray) -> Summed:
    """Return what is known of a stream that has at most `most` bytes of a tensor, or is an object."""
    try:
        contents = _Contents(path, part, head, _LARGEST_OBJECT if most is None else _room(most))
        return _summed(path, part, contents, has_sum=len(head) > 4 and bool(head[4] & _SUMMED))
    except _TooLongError as error:
        return Summed(part.name, part[1:], unread=True) if most is None else _not_a_stream(part, error)
    except _BadStreamError as error:
        return _not_a_stream(part, error)


class _Contents(Around):
    """A store in which the decoded contents of a stream stand where the stream begins in its file.

    Args:
        path: the file.
        part: the stream.
        head: the first bytes of the stream.
        most: how many bytes of contents it has at most.

    Raises:
        _BadStreamError: it is not one frame of zstd, or has more contents.
    """

    def __init__(self, path: str, part: Part, head: bytearray, most: int) -> None:
        super().__init__(any_store())
        if part.nbytes > 2 * most:
            raise _TooLongError(most)
        self._stream = Stream(_reading(self.inner, path, part.begin, part.nbytes, head), part.nbytes)
        self._begin, self._tail, self.nbytes = part.begin, bytearray(), 0
        while piece := self._stream.more():
            self.nbytes += len(piece)
            if self.nbytes > most:
                raise _TooLongError(most)
            self._tail += piece
            del self._tail[: max(0, len(self._tail) - _KEPT)]

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:  # noqa: ARG002 -- it has one
        """Fill one buffer."""
        begin = offset - self._begin
        of_tail = begin - (self.nbytes - len(self._tail))
        if of_tail >= 0:
            buffer[:] = self._tail[of_tail : of_tail + len(buffer)]
        else:
            self._stream.fill(begin, buffer)


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

    records = directory(contents.nbytes, read)
    names = {record.name for record in records}
    data = names - _NAMES
    return _PICKLE in names and data == {b"archive/data/%d" % number for number in range(len(data))}


def _not_a_stream(part: Part, why: object) -> Summed:
    return Summed(part.name, part[1:], faults=(f"{part.text} is not a zstd stream: {why}",))


def _room(most: int) -> int:
    """Return how many bytes an item has at most that has so many of a tensor, in whole blocks."""
    return -(-(most + _BLOCK) // _BLOCK) * _BLOCK


def _window(head: bytes) -> int:
    """Return the size of the window that a frame's header asks for, in bytes (RFC 8878, 3.1.1.1.2).

    >>> _window(bytes.fromhex("28b52ffd0058")) >> 20
    2
    """
    if head[4] & _IS_ONE_SEGMENT:  # the window is as large as the contents
        return _LARGEST_WINDOW
    base = 1 << 10 + (head[5] >> 3)
    return min(base + base // 8 * (head[5] & 7), _LARGEST_WINDOW)


def _begun(head: bytes) -> bytes:
    """Return the contents of a stream's first blocks, as far as these are whole; raise `ValueError` for no stream."""
    try:
        found = zstd.ZstdDecompressor().decompress(head, _OF_HEAD)
    except zstd.ZstdError as error:
        raise _BadStreamError(str(error)) from None
    if not found:
        raise _BadStreamError("it has no contents in its first block")
    return found
