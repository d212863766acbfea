"""Files that are decoded in chunks: zarr's chunks, and zstd streams in distributed checkpoints.

Transfers handle files and offsets only. So decoded chunks have offsets of their own, `STRIDE` apart, in the file that
they are decoded from; smaller offsets are of the file itself. A chunk is decoded in memory when a thread first reads
from it, and cached while the thread reads on in the same rows. Of a long one, its decoder is cached instead, which
reads forward, as in a file without random access.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.core.storage.base import Around
from reshard.core.storage.places import any_store, is_url
from reshard.errors import SourceError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from reshard.core.storage.base import Want

STRIDE = 1 << 40
"""The distance between the offsets of decoded chunks; none is longer."""

IMPORTED_BYTES = 24 << 20
"""Additional resident memory of zarr and numcodecs; measured."""

_DECODED_BYTES = 1 << 19  # that are decoded at once
_LONGEST_FETCHED = 16 << 20  # longer chunks are not fetched together with others

_WINDOW_BYTES = 5 << 19  # a window of 2 MiB, as of the levels that Orbax uses, and the decoder
_LARGEST_WINDOW = 23  # as a power of 2: 8 MiB, which the levels up to 19 have
_PIECE_BYTES = 1 << 17
_REMOTE_PIECES = 256 << 10, 8 << 20, 64 << 20  # the shortest, the longest, the sum of all streams

_Bytes = bytes | bytearray | memoryview

Decode = Callable[["bytes | bytearray", int], memoryview]
"""Returns the contents of an encoded chunk, of at most a number of bytes; raises `ValueError` if it is damaged."""


class Chunk(NamedTuple):
    """An encoded chunk.

    Attributes:
        offset, length: the range of its bytes in the file; of 0 bytes if they are in memory.
        nbytes: the size of its contents, or the most that it may be.
        decode: decodes it; None if its contents are the bytes in memory, repeated.
        held: its bytes, if they are in memory: within a node of a database, or an element of the fill value.
        piece: how many bytes are read at once if it is decoded piece by piece, by zstd; 0 if it is decoded whole.
    """

    offset: int
    length: int
    nbytes: int
    decode: Decode | None
    held: bytes | None = None
    piece: int = 0


class TooLongError(ValueError):
    """Chunks have more contents than they may."""

    def __init__(self, most: int) -> None:
        super().__init__(f"it has more than {most:,} bytes")


class ZstdStream:
    """Contents of frames of zstd, which are decoded forward.

    Args:
        pieces: the bytes of the frames.
        nbytes: the size of the contents.
        held_bytes: the memory that it takes; if given, frames with a large window are refused.
        one_frame: there is exactly one frame.

    Attributes:
        position: how many bytes of the contents were read; earlier ones cannot be read again.
    """

    def __init__(
        self, pieces: Iterable[_Bytes], nbytes: int, held_bytes: int = 0, *, one_frame: bool = False
    ) -> None:  # fmt: skip
        self._pieces, self._one_frame = iter(pieces), one_frame
        self.nbytes, self.position, self.held_bytes = nbytes, 0, held_bytes
        self._options = {int(zstd.DecompressionParameter.window_log_max): _LARGEST_WINDOW} if held_bytes else None
        self._decoder = zstd.ZstdDecompressor(options=self._options)

    def read(self, begin: int, buffer: memoryview) -> None:
        """Fill a buffer from byte `begin` of the contents on, which is not before `position`.

        Raises:
            ValueError: a frame is damaged, or there are more or fewer bytes.
            SourceError: the file cannot be read.
        """
        end = begin + len(buffer)
        while self.position < end:
            skipped = self.position < begin
            piece = self.next((begin if skipped else end) - self.position)
            if not piece:
                raise ValueError(f"it has {self.position:,} bytes; the metadata says {self.nbytes:,}")
            if not skipped:
                at = self.position - begin
                buffer[at : at + len(piece)] = piece
            self.position += len(piece)
        if self.position == self.nbytes and self.next(1):
            raise TooLongError(self.nbytes)

    def next(self, most: int) -> bytes:
        """Return the next bytes of the contents, at most so many; none at their end."""
        while True:
            fed: _Bytes = b""
            if self._decoder.eof:
                fed = self._decoder.unused_data or next(self._pieces, b"")
                if not fed:
                    return b""
                if self._one_frame:
                    raise ValueError("it is not one frame of zstd")
                self._decoder = zstd.ZstdDecompressor(options=self._options)
            elif self._decoder.needs_input and not (fed := next(self._pieces, b"")):
                raise ValueError("it is truncated, and not one frame of zstd")
            try:
                piece = self._decoder.decompress(fed, min(most, _DECODED_BYTES))
            except zstd.ZstdError as error:
                raise ValueError(str(error)) from None
            if piece:
                return piece


def zstd_content(encoded: bytes | bytearray, most: int) -> memoryview:
    """Return what one frame of zstd decodes to, which is at most a number of bytes; no more are decoded.

    Raises:
        ValueError: it is truncated or damaged; a `TooLongError` if it has more bytes.
    """
    import numpy as np

    content = np.empty(most, np.uint8).data  # untouched pages take no memory
    stream = ZstdStream(_slices(encoded, _DECODED_BYTES), most, one_frame=True)
    done = 0
    while piece := stream.next(most - done + 1):
        if len(piece) > most - done:
            raise TooLongError(most)
        content[done : done + len(piece)] = piece
        done += len(piece)
    return content[:done]


def zstd_chunk(encoded: bytes | bytearray, nbytes: int) -> memoryview:
    """Return what frames of zstd decode to, which has a size; see `Decode`."""
    import numpy as np

    content = np.empty(nbytes, np.uint8).data
    if _declared_bytes(encoded) == nbytes:
        from numcodecs import zstd as numcodecs_zstd

        try:
            numcodecs_zstd.decompress(encoded, content)  # at once, which takes a quarter less time
        except RuntimeError as error:
            raise ValueError(str(error)) from None
    else:
        ZstdStream(_slices(encoded, _DECODED_BYTES), nbytes).read(0, content)
    return content


def _slices(content: bytes | bytearray, nbytes: int) -> Iterator[memoryview]:
    view = memoryview(content)
    return (view[begin : begin + nbytes] for begin in range(0, len(view), nbytes))


def _declared_bytes(encoded: bytes | bytearray) -> int | None:
    """Return the size of the contents in a frame's header; None without one."""
    try:
        return zstd.get_frame_info(encoded).decompressed_size
    except zstd.ZstdError:
        return None


def piece_bytes(path: str, streams: int) -> int:
    """Return how many bytes of a file a stream reads at once, for a number of streams side by side."""
    least, most, of_all = _REMOTE_PIECES
    return max(least, min(most, of_all // streams)) if is_url(path) else _PIECE_BYTES


def stream_bytes(piece: int) -> int:
    """Return the memory of an open stream: its window, and a piece of the file."""
    return _WINDOW_BYTES + piece


def repeat(value: bytes, begin: int, buffer: memoryview) -> None:
    """Fill a buffer from byte `begin` of a repeated value on, doubling the filled part."""
    turn = begin % len(value)
    done = min(len(value), len(buffer))
    buffer[:done] = (value[turn:] + value[:turn])[:done]
    while done < len(buffer):
        count = min(done, len(buffer) - done)
        buffer[done : done + count] = buffer[:count]
        done += count


@dataclass(frozen=True, slots=True, eq=False)
class Decoding:
    """The coding of files of encoded chunks.

    Attributes:
        chunks: the chunks of each file, by its path.
        held_bytes: the size of each thread's cache of decoded chunks and open streams.
        opening_bytes: the additional memory to decode a chunk.
    """

    chunks: Mapping[str, Sequence[Chunk]]
    held_bytes: int
    opening_bytes: int

    def nbytes(self, threads: int) -> int:
        """Return the memory of the threads' caches, and of one chunk that each decodes."""
        return threads * (self.held_bytes + self.opening_bytes) + (IMPORTED_BYTES if self.opening_bytes else 0)

    def chunk_at(self, path: str, offset: int) -> tuple[str, int] | None:
        """Return the file and the number of the encoded chunk at an offset; None if there is none."""
        number = offset // STRIDE
        is_encoded = number and path in self.chunks and self.chunks[path][number - 1].decode is not None
        return (path, number) if is_encoded else None

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
        fetched: dict[tuple[str, int], bytearray] = {}
        for path, offset, buffer in wants:
            key = path, offset // STRIDE
            chunk = self._chunk(path, offset)
            if chunk is None:
                plain.append((path, offset, buffer))
            elif (
                chunk.decode is not None and not chunk.piece and 0 < chunk.length <= _LONGEST_FETCHED
                and key not in self._cache.entries and key not in fetched
            ):  # fmt: skip
                fetched[key] = bytearray(chunk.length)
                plain.append((path, chunk.offset, memoryview(fetched[key])))
        self.inner.read(plain)
        for path, offset, buffer in wants:
            if chunk := self._chunk(path, offset):
                self._fill(chunk, path, offset, buffer, fetched)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill one buffer."""
        if chunk := self._chunk(path, offset):
            self._fill(chunk, path, offset, buffer, {})
        else:
            self.inner.read_into(path, offset, buffer)

    def prefetch(self, path: str, offset: int, nbytes: int) -> None:
        """Start to read the encoded chunk of a range into the page cache, if supported; do not wait."""
        chunk = self._chunk(path, offset)
        if chunk is None:
            self.inner.prefetch(path, offset, nbytes)
        elif chunk.length:
            self.inner.prefetch(path, chunk.offset, chunk.length)

    def _chunk(self, path: str, offset: int) -> Chunk | None:
        """Return the chunk at an offset; None if it is an offset of the file itself."""
        return self._decoding.chunks[path][offset // STRIDE - 1] if offset >= STRIDE else None

    def _fill(
        self, chunk: Chunk, path: str, offset: int, buffer: memoryview, fetched: Mapping[tuple[str, int], bytearray]
    ) -> None:
        number, begin = divmod(offset, STRIDE)
        try:
            self._copy(chunk, (path, number), begin, buffer, fetched.get((path, number)))
        except (ValueError, MemoryError) as error:
            if isinstance(error, SourceError):
                raise
            raise _not_decoded(path, number - 1, error) from None

    def _copy(
        self, chunk: Chunk, key: tuple[str, int], begin: int, buffer: memoryview, encoded: bytearray | None
    ) -> None:
        """Fill a buffer from byte `begin` of a chunk on; `encoded` if its bytes were read already."""
        if chunk.decode is None:
            repeat(chunk.held or b"\0", begin, buffer)
            return
        content = self._cache.take(key)
        if content is None or (isinstance(content, ZstdStream) and content.position > begin):
            content = self._opened(chunk, key[0], encoded)
        size = content.nbytes
        if begin + len(buffer) > size:
            raise ValueError(f"it ends at byte {size:,}")
        if isinstance(content, ZstdStream):
            content.read(begin, buffer)
            if content.position == size:
                return
        else:
            buffer[:] = content[begin : begin + len(buffer)]
        self._cache.add(key, content, self._decoding.held_bytes)

    def _opened(self, chunk: Chunk, path: str, encoded: bytearray | None) -> memoryview | ZstdStream:
        """Return a decoded chunk, or a stream of a long one."""
        if chunk.piece:
            return ZstdStream(self._pieces(chunk, path), chunk.nbytes, stream_bytes(chunk.piece))
        assert chunk.decode is not None  # noqa: S101 -- `_fill` repeats others
        if chunk.held is not None:
            return chunk.decode(chunk.held, chunk.nbytes)
        if encoded is None:
            encoded = bytearray(chunk.length)
            if encoded:
                self.inner.read_into(path, chunk.offset, memoryview(encoded))
        return chunk.decode(encoded, chunk.nbytes)

    def _pieces(self, chunk: Chunk, path: str) -> Iterator[_Bytes]:
        """Yield the bytes of an encoded chunk, a piece at a time."""
        if chunk.held is not None:
            yield from _slices(chunk.held, chunk.piece)
        for begin in range(0, chunk.length, chunk.piece):
            piece = bytearray(min(chunk.piece, chunk.length - begin))
            self.inner.read_into(path, chunk.offset + begin, memoryview(piece))
            yield piece

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
        self.entries: OrderedDict[tuple[str, int], memoryview | ZstdStream] = OrderedDict()
        self.nbytes = 0

    def take(self, key: tuple[str, int]) -> memoryview | ZstdStream | None:
        """Remove and return a chunk; it is added again after a successful read."""
        chunk = self.entries.pop(key, None)
        self.nbytes -= 0 if chunk is None else _held_bytes(chunk)
        return chunk

    def add(self, key: tuple[str, int], chunk: memoryview | ZstdStream, most: int) -> None:
        nbytes = _held_bytes(chunk)
        while self.entries and self.nbytes + nbytes > most:
            self.nbytes -= _held_bytes(self.entries.popitem(last=False)[1])
        self.entries[key] = chunk
        self.nbytes += nbytes


def _held_bytes(chunk: memoryview | ZstdStream) -> int:
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
