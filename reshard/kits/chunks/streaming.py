"""Long chunks: read forward, in little memory, as files without random access."""

from __future__ import annotations

import sys
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

from reshard.core.storage.places import is_url

if TYPE_CHECKING:
    from reshard.core.storage.base import ReadStore

_WINDOW_BYTES = 5 << 19  # a window of 2 MiB, as of the levels that Orbax uses, and the decoder
_LARGEST_WINDOW = 23  # as a power of 2: 8 MiB, which the levels up to 19 have
_PIECE_BYTES = 1 << 17
_REMOTE_PIECES = 256 << 10, 8 << 20, 64 << 20  # the shortest, the longest, the sum of all streams
_DECODED_BYTES = 1 << 19
_OPTIONS = {int(zstd.DecompressionParameter.window_log_max): _LARGEST_WINDOW}


class Stream(Protocol):
    """A chunk that is read piece by piece.

    Attributes:
        nbytes: the size of the contents.
        position: how many bytes of the contents were read; earlier ones cannot be read again.
        held_bytes: the memory that it takes.
    """

    nbytes: int
    position: int
    held_bytes: int

    def read(self, begin: int, buffer: memoryview) -> None:
        """Fill a buffer from byte `begin` of the contents on."""


def piece_bytes(path: str, streams: int) -> int:
    """Return how many bytes of a file a stream reads at once, for a number of streams side by side."""
    least, most, of_all = _REMOTE_PIECES
    return max(least, min(most, of_all // streams)) if is_url(path) else _PIECE_BYTES


def stream_bytes(piece: int) -> int:
    """Return the memory of an open stream: its window, and a piece of the file."""
    return _WINDOW_BYTES + piece


class ChunkStream:
    """A chunk that is one frame of zstd, in a file or in memory.

    Args:
        store: reads the file.
        path: the file.
        span: the offset and the length of the frame in the file.
        nbytes: the size of the contents.
        piece: how many bytes of the file are read at once.
        encoded: the frame, if it is in memory.

    Attributes: as of a `Stream`.
    """

    def __init__(
        self, store: ReadStore, path: str, span: tuple[int, int], nbytes: int, piece: int, encoded: bytes | None = None
    ) -> None:
        self._piece = piece
        self._store, self._path, self._encoded = store, path, encoded
        self._offset, self._length = span if encoded is None else (0, len(encoded))
        self._fed = 0
        self.nbytes, self.position, self.held_bytes = nbytes, 0, stream_bytes(piece)

    @cached_property
    def _decoder(self) -> zstd.ZstdDecompressor:
        return zstd.ZstdDecompressor(options=_OPTIONS)

    def read(self, begin: int, buffer: memoryview) -> None:
        """Fill a buffer from byte `begin` of the contents on, which is not before `position`.

        Raises:
            ValueError: the frame is damaged, or has more or fewer bytes.
            SourceError: the file cannot be read.
        """
        if begin + len(buffer) > self.nbytes:
            raise ValueError(f"it ends at byte {self.nbytes:,}")
        while self.position < begin:
            self.position += len(self._next(begin - self.position))
        done = 0
        while done < len(buffer):
            piece = self._next(len(buffer) - done)
            buffer[done : done + len(piece)] = piece
            done += len(piece)
            self.position += len(piece)
        if self.position == self.nbytes:
            self._check_end()

    def _next(self, most: int) -> bytes:
        """Return the next bytes of the contents, at least one."""
        while not (piece := self._decoded(min(most, _DECODED_BYTES))):
            if self._decoder.eof:
                raise ValueError(f"it has {self.position:,} bytes; the metadata says {self.nbytes:,}")
        return piece

    def _decoded(self, most: int) -> bytes:
        fed: bytes | bytearray = b""
        if self._decoder.needs_input and not self._decoder.eof:
            fed = self._read()
        try:
            return b"" if self._decoder.eof else self._decoder.decompress(fed, most)
        except zstd.ZstdError as error:
            raise ValueError(str(error)) from None

    def _read(self) -> bytes | bytearray:
        begin, nbytes = self._fed, min(self._piece, self._length - self._fed)
        if not nbytes:
            raise ValueError("the zstd data is truncated")
        self._fed += nbytes
        if self._encoded is not None:
            return self._encoded[begin : self._fed]
        piece = bytearray(nbytes)
        self._store.read_into(self._path, self._offset + begin, memoryview(piece))
        return piece

    def _check_end(self) -> None:
        """Raise `ValueError` unless the frame ends here, and is all there is."""
        while not self._decoder.eof:
            if self._decoded(1):
                raise ValueError(f"it has more than {self.nbytes:,} bytes")
        if self._decoder.unused_data or self._fed < self._length:
            raise ValueError("it is not one frame of zstd")


class RepeatedValue:
    """A chunk of one repeated value, such as the fill value, which takes no memory.

    Args:
        value: the bytes of the value.
        nbytes: the size of the chunk.

    Attributes: as of a `Stream`. All of it can be read at any time.
    """

    def __init__(self, value: bytes, nbytes: int) -> None:
        self._value = value
        self.nbytes, self.position, self.held_bytes = nbytes, 0, 0

    def read(self, begin: int, buffer: memoryview) -> None:
        """Fill a buffer from byte `begin` of the contents on."""
        turn = begin % len(self._value)
        repeat(self._value[turn:] + self._value[:turn], buffer)


def repeat(value: bytes, buffer: memoryview) -> None:
    """Fill a buffer with a repeated value, doubling the filled part."""
    done = min(len(value), len(buffer))
    buffer[:done] = value[:done]
    while done < len(buffer):
        count = min(done, len(buffer) - done)
        buffer[done : done + count] = buffer[:count]
        done += count
