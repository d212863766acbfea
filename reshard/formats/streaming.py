"""Long chunks of zstd: read forward, in little memory, as a file without random access."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    from reshard.storage.base import ReadStore

STREAM_BYTES = 5 << 20
"""The memory of an open stream: a window of up to 4 MiB, as of the levels that Orbax uses, and a piece of the file."""

_LARGEST_WINDOW = 23  # as a power of 2: 8 MiB, which the levels up to 19 have
_PIECE_BYTES = 1 << 19
_REMOTE_PIECE_BYTES = 8 << 20
_OPTIONS = {int(zstd.DecompressionParameter.window_log_max): _LARGEST_WINDOW}


class ChunkStream:
    """A chunk that is one frame of zstd in a file.

    Args:
        store: reads the file.
        path: the file.
        span: the offset and the length of the frame.
        nbytes: the size of the contents.

    Attributes:
        position: how many bytes of the contents were read.
    """

    def __init__(self, store: ReadStore, path: str, span: tuple[int, int], nbytes: int) -> None:
        self._store, self._path, self._nbytes = store, path, nbytes
        self._offset, self._length = span
        self._piece_bytes = _REMOTE_PIECE_BYTES if "://" in path else _PIECE_BYTES
        self._fed = 0
        self._decoder = zstd.ZstdDecompressor(options=_OPTIONS)
        self.position = 0

    def read(self, begin: int, buffer: memoryview) -> None:
        """Fill a buffer from byte `begin` of the contents on, which is not before `position`.

        Raises:
            ValueError: the frame is damaged, or has more or fewer bytes.
            SourceError: the file cannot be read.
        """
        if begin + len(buffer) > self._nbytes:
            raise ValueError(f"it ends at byte {self._nbytes:,}")
        while self.position < begin:
            self.position += len(self._next(begin - self.position))
        done = 0
        while done < len(buffer):
            piece = self._next(len(buffer) - done)
            buffer[done : done + len(piece)] = piece
            done += len(piece)
            self.position += len(piece)
        if self.position == self._nbytes:
            self._check_end()

    def _next(self, most: int) -> bytes:
        """Return the next bytes of the contents, at least one."""
        while not (piece := self._decoded(min(most, _PIECE_BYTES))):
            if self._decoder.eof:
                raise ValueError(f"it has {self.position:,} bytes; the metadata says {self._nbytes:,}")
        return piece

    def _decoded(self, most: int) -> bytes:
        fed = b""
        if self._decoder.needs_input and not self._decoder.eof:
            fed = bytes(self._read())
        try:
            return b"" if self._decoder.eof else self._decoder.decompress(fed, most)
        except zstd.ZstdError as error:
            raise ValueError(str(error)) from None

    def _read(self) -> bytearray:
        piece = bytearray(min(self._piece_bytes, self._length - self._fed))
        if not piece:
            raise ValueError("the zstd data is truncated")
        self._store.read_into(self._path, self._offset + self._fed, memoryview(piece))
        self._fed += len(piece)
        return piece

    def _check_end(self) -> None:
        """Raise `ValueError` unless the frame ends here, and is all there is."""
        while not self._decoder.eof:
            if self._decoded(1):
                raise ValueError(f"it has more than {self._nbytes:,} bytes")
        if self._decoder.unused_data or self._fed < self._length:
            raise ValueError("it is not one frame of zstd")
