"""Files that are decoded in chunks: zarr's chunks, and zstd streams in distributed checkpoints.

Transfers handle files and offsets only. So a file of encoded chunks is presented as a virtual file of decoded chunks of
equal size, one after the other. A chunk is decoded in memory when a thread first reads from it, and cached while the
thread reads on in the same rows. Of a long one (`streaming`), the decoder is cached instead.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from reshard.core.storage.base import Around
from reshard.core.storage.places import any_store
from reshard.errors import SourceError
from reshard.kits.chunks.streaming import repeat

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard.core.storage.base import ReadStore, Want
    from reshard.kits.chunks.streaming import Stream

IMPORTED_BYTES = 24 << 20
"""Additional resident memory of zarr and numcodecs; measured."""

_PIECE_BYTES = 1 << 19
_LONGEST_FETCHED = 16 << 20  # longer chunks are not fetched together with others


class TooLongError(ValueError):
    """Chunks have more contents than they may."""

    def __init__(self, most: int) -> None:
        super().__init__(f"it has more than {most:,} bytes")


def zstd_content(encoded: bytes | bytearray, most: int, *, one_frame: bool = False) -> memoryview:
    """Return what zstd frames decode to.

    Args:
        encoded: the frames.
        most: the most bytes that they may decode to; no more are decoded.
        one_frame: there is exactly one frame.

    Raises:
        ValueError: they are truncated or damaged; a `TooLongError` if they have more bytes.
    """
    import numpy as np

    view = memoryview(encoded)
    content = np.empty(most, np.uint8).data  # untouched pages take no memory
    if not one_frame and _declared_bytes(encoded) == most:
        from numcodecs import zstd as numcodecs_zstd

        try:
            numcodecs_zstd.decompress(encoded, content)  # at once, which takes a quarter less time
        except RuntimeError as error:
            raise ValueError(str(error)) from None
        return content
    begin = done = 0
    while True:
        decoder = zstd.ZstdDecompressor()
        while not decoder.eof:
            fed = view[begin : begin + _PIECE_BYTES] if decoder.needs_input else view[:0]
            if decoder.needs_input and not fed:
                raise ValueError("it is not one frame of zstd" if one_frame else "the zstd data is truncated")
            begin += len(fed)
            try:
                piece = decoder.decompress(fed, min(_PIECE_BYTES, most - done + 1))
            except zstd.ZstdError as error:
                raise ValueError(str(error)) from None
            if len(piece) > most - done:
                raise TooLongError(most)
            content[done : done + len(piece)] = piece
            done += len(piece)
        begin -= len(decoder.unused_data)
        if begin == len(view):
            return content[:done]
        if one_frame:
            raise ValueError("it is not one frame of zstd")


def zstd_begun(head: bytes, most: int) -> bytes:
    """Return the contents of the first whole blocks of a frame, at most `most` bytes.

    Raises:
        ValueError: it is not a frame, or its first block is not whole.
    """
    try:
        content = zstd.ZstdDecompressor().decompress(head, most)
    except zstd.ZstdError as error:
        raise ValueError(str(error)) from None
    if not content:
        raise ValueError("it has no contents in its first block")
    return content


def _declared_bytes(encoded: bytes | bytearray) -> int | None:
    """Return the size of the contents in a frame's header; None without one."""
    try:
        return zstd.get_frame_info(encoded).decompressed_size
    except zstd.ZstdError:
        return None


@dataclass(frozen=True, slots=True)
class Fill:
    """Missing chunks: the repeated fill value."""

    value: bytes


class Chunks(Protocol):
    """A file of encoded chunks."""

    @property
    def chunk_bytes(self) -> int:
        """The distance between chunks in the virtual file, in bytes; none is longer."""

    @property
    def plain_bytes(self) -> int:
        """Offsets below this are of the file itself, not of the virtual file."""

    @property
    def spans(self) -> Sequence[tuple[int, int]]:
        """The offset and length of each encoded chunk."""

    def stream(self, number: int, store: ReadStore, path: str) -> Stream | None:
        """Return a chunk that is read piece by piece; None for one that is decoded whole."""

    def decoded(self, number: int, encoded: bytearray) -> memoryview:
        """Return a decoded chunk, by its number; raise `ValueError` if it is damaged."""


@dataclass(frozen=True, slots=True, eq=False)
class Decoding:
    """The coding of files of encoded chunks.

    Attributes:
        units: the virtual files, by path.
        held_bytes: the size of each thread's cache of decoded chunks and open streams.
        opening_bytes: the additional memory to decode a chunk.
    """

    units: Mapping[str, Fill | Chunks]
    held_bytes: int
    opening_bytes: int

    def nbytes(self, threads: int) -> int:
        """Return the memory of the threads' caches, and of one chunk that each decodes."""
        return threads * (self.held_bytes + self.opening_bytes) + (IMPORTED_BYTES if self.opening_bytes else 0)

    def chunk_at(self, path: str, offset: int) -> tuple[str, int] | None:
        """Return the file and the number of the encoded chunk at an offset; None if there is none."""
        unit = self.units.get(path)
        if unit is None or isinstance(unit, Fill) or offset < unit.plain_bytes:
            return None
        return path, offset // unit.chunk_bytes

    def store(self) -> DecodingStore:
        """Return a store that reads the files decoded."""
        return DecodingStore(self)


class DecodingStore(Around):
    """A store of decoded chunks; each read lies within one chunk. Safe to use from several threads."""

    def __init__(self, decoding: Decoding) -> None:
        super().__init__(any_store())
        self._decoding = decoding
        self._cache = _ChunkCache()

    def read(self, wants: Sequence[Want]) -> None:
        """Fill buffers with contents, reading all chunks for them at once.

        Raises:
            SourceError: a chunk cannot be decoded, or its size contradicts the metadata.
        """
        plain: list[Want] = []
        encoded: dict[tuple[str, int], bytearray] = {}
        for path, offset, buffer in wants:
            unit = self._unit(path, offset)
            if unit is None:
                plain.append((path, offset, buffer))
            elif not isinstance(unit, Fill):
                number = offset // unit.chunk_bytes
                begin, nbytes = unit.spans[number]
                key = path, number
                if (
                    nbytes <= _LONGEST_FETCHED and key not in self._cache.entries and key not in encoded
                    and unit.stream(number, self.inner, path) is None
                ):  # fmt: skip
                    encoded[key] = bytearray(nbytes)
                    plain.append((path, begin, memoryview(encoded[key])))
        self.inner.read(plain)
        for path, offset, buffer in wants:
            if unit := self._unit(path, offset):
                self._fill(unit, path, offset, buffer, encoded)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill one buffer."""
        if unit := self._unit(path, offset):
            self._fill(unit, path, offset, buffer, {})
        else:
            self.inner.read_into(path, offset, buffer)

    def prefetch(self, path: str, offset: int, nbytes: int) -> None:
        """Start to read the encoded chunks of a range into the page cache, if supported; do not wait."""
        unit = self._unit(path, offset)
        if unit is None:
            self.inner.prefetch(path, offset, nbytes)
        elif not isinstance(unit, Fill):
            for number in range(offset // unit.chunk_bytes, -(-(offset + nbytes) // unit.chunk_bytes)):
                self.inner.prefetch(path, *unit.spans[number])

    def _unit(self, path: str, offset: int) -> Fill | Chunks | None:
        """Return the virtual file that has an offset; None if it is an offset of the file itself."""
        unit = self._decoding.units.get(path)
        return None if unit is None or (not isinstance(unit, Fill) and offset < unit.plain_bytes) else unit

    def _fill(
        self, unit: Fill | Chunks, path: str, offset: int, buffer: memoryview,
        fetched: Mapping[tuple[str, int], bytearray],
    ) -> None:  # fmt: skip
        if isinstance(unit, Fill):
            repeat(unit.value, buffer)
            return
        number, begin = divmod(offset, unit.chunk_bytes)
        key = path, number
        chunk = self._cache.take(key)
        if chunk is None or (not isinstance(chunk, memoryview) and chunk.position > begin):
            chunk = unit.stream(number, self.inner, path) or self._decoded(path, number, unit, fetched.get(key))
        if isinstance(chunk, memoryview):
            if begin + len(buffer) > len(chunk):
                raise _not_decoded(path, number, f"it ends at byte {len(chunk):,}")
            buffer[:] = chunk[begin : begin + len(buffer)]
        else:
            try:
                chunk.read(begin, buffer)
            except (ValueError, MemoryError) as error:
                if isinstance(error, SourceError):
                    raise
                raise _not_decoded(path, number, error) from None
            if chunk.position == chunk.nbytes:
                return
        self._cache.add(key, chunk, self._decoding.held_bytes)

    def _decoded(self, path: str, number: int, unit: Chunks, encoded: bytearray | None) -> memoryview:
        if encoded is None:
            offset, length = unit.spans[number]
            encoded = bytearray(length)
            if length:
                self.inner.read_into(path, offset, memoryview(encoded))
        try:
            return unit.decoded(number, encoded)
        except (ValueError, MemoryError) as error:
            raise _not_decoded(path, number, error) from None

    def close(self) -> None:
        """Close all files that are not in use, and empty the cache."""
        self._cache = _ChunkCache()
        super().close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel to another process as a fresh store."""
        return DecodingStore, (self._decoding,)


class _ChunkCache(threading.local):
    """A thread's decoded chunks and open streams, least recently used first."""

    def __init__(self) -> None:
        self.entries: OrderedDict[tuple[str, int], memoryview | Stream] = OrderedDict()
        self.nbytes = 0

    def take(self, key: tuple[str, int]) -> memoryview | Stream | None:
        """Remove and return a chunk; it is added again after a successful read."""
        chunk = self.entries.pop(key, None)
        self.nbytes -= 0 if chunk is None else _held_bytes(chunk)
        return chunk

    def add(self, key: tuple[str, int], chunk: memoryview | Stream, most: int) -> None:
        nbytes = _held_bytes(chunk)
        while self.entries and self.nbytes + nbytes > most:
            self.nbytes -= _held_bytes(self.entries.popitem(last=False)[1])
        self.entries[key] = chunk
        self.nbytes += nbytes


def _held_bytes(chunk: memoryview | Stream) -> int:
    return len(chunk) if isinstance(chunk, memoryview) else chunk.held_bytes


def _not_decoded(path: str, number: int, why: object) -> SourceError:
    reason = str(why)
    if not reason:  # Python's own MemoryError has no text
        reason = "there is too little memory" if isinstance(why, MemoryError) else type(why).__name__
    return SourceError(
        f"cannot decode chunk {number} of {path}",
        code="bad-chunk",
        facts=[reason, "the chunk is damaged, or its metadata is wrong"],
    )
