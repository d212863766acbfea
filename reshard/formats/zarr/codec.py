"""How chunks are decoded by zarr, and compressed.

* Reading: zarr opens an array of one chunk in memory. zstd alone is not decoded so: zarr takes 0.5 ms longer for each
  chunk, and allocates as much memory as a damaged chunk declares.
* Writing: a chunk is assembled in memory, compressed when its last byte has arrived, and appended to its file in
  row-major order, so that the file does not depend on the order of writes. One task owns a file.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from reshard.errors import TargetError
from reshard.formats.zarr.layout import ABSENT, shard_index
from reshard.kits.chunks import IMPORTED_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.core.storage.base import Sink
    from reshard.formats.zarr.layout import Array, Unit

_BLOSC_HEADER = 16  # bytes


@dataclass(frozen=True, slots=True)
class ZarrCodec:
    """Decodes chunks; see `kits.chunks.Decode`.

    Attributes:
        metadata: the metadata of an array of one such chunk.
        file: the name of the file of such metadata.
        key: the name of the chunk of that array.
        by_blosc: chunks begin with a header of blosc.
    """

    metadata: bytes
    file: str
    key: str
    by_blosc: bool

    def __call__(self, encoded: bytes | bytearray, nbytes: int) -> memoryview:
        """Return the contents of a chunk; raise `ValueError` if it is damaged."""
        import numpy as np

        try:
            files, array = _opened(self, threading.get_ident())
            if self.by_blosc:
                _check_blosc(encoded)
            files[self.key] = _buffer(encoded)
            content = np.ascontiguousarray(array[...], array.dtype.newbyteorder("<"))
        except MemoryError:
            raise
        except Exception as error:  # zarr's codecs may raise anything
            raise ValueError(str(error) or type(error).__name__) from error
        if content.nbytes != nbytes:
            raise ValueError(f"it has {content.nbytes:,} bytes; the metadata says {nbytes:,}")
        return content.reshape(-1).view(np.uint8).data


@lru_cache(256)
def _opened(codec: ZarrCodec, _thread: int) -> tuple[dict[str, Any], Any]:
    """Return the files of the array of one chunk, and the array, which one thread uses."""
    import zarr

    files = {codec.file: _buffer(codec.metadata)}
    store = zarr.storage.MemoryStore(files)
    return files, zarr.open_array(store, mode="r", zarr_format=json.loads(codec.metadata)["zarr_format"])


def _buffer(content: bytes | bytearray) -> Any:
    """Return bytes as zarr keeps them."""
    from zarr.core.buffer import default_buffer_prototype

    return default_buffer_prototype().buffer.from_bytes(content)


def _check_blosc(encoded: bytes | bytearray) -> None:
    """Raise `ValueError` if a chunk is shorter or longer than its header says: blosc reads on past its end.

    Bytes 12 to 16 of the header are the size of the chunk with its header (c-blosc, README_CHUNK_FORMAT).
    """
    said = int.from_bytes(encoded[12:16], "little")
    if len(encoded) < _BLOSC_HEADER or len(encoded) != said:
        raise ValueError(f"it has {len(encoded):,} bytes; blosc noted {said:,}")


@dataclass(frozen=True, slots=True, eq=False)
class Compression:
    """The compression of the files of a zarr store.

    Attributes:
        units: the compressed files, and the array of each, by path below the target directory.
        held_bytes: the memory of a thread's incomplete chunks.
        chunk_bytes: the size of the largest chunk.
    """

    units: Mapping[str, tuple[Array, Unit]]
    held_bytes: int
    chunk_bytes: int

    def nbytes(self, threads: int) -> int:
        """Return the memory of incomplete chunks, and of an equal amount of waiting data."""
        return threads * (2 * self.held_bytes + self.chunk_bytes) + IMPORTED_BYTES

    def of(self, path: str) -> str | None:
        """Return a description of a file's compression; None if it is not compressed."""
        if path not in self.units:
            return None
        array, unit = self.units[path]
        return f"zstd {array.level} {array.chunk_bytes} {unit.valid} {array.shard is not None}"

    def sink(self, path: str, into: Sink) -> Sink:
        """Return a sink that compresses a file; `path` is below the target directory."""
        return _Compressing(path, *self.units[path], into)


class _Compressing:
    """A sink that compresses each chunk of a file and appends it to another one; see `Sink`."""

    def __init__(self, path: str, array: Array, unit: Unit, into: Sink) -> None:
        self._path, self._array, self._unit, self._into = path, array, unit, into
        self._valid = tuple(filter(None, unit.valid))  # the bytes of each stored chunk; the rest of it is zeros
        self._raw: dict[int, tuple[bytearray, int]] = {}  # incomplete chunks, and how many bytes of each are there
        self._waiting: dict[int, bytes] = {}  # compressed chunks that wait for earlier ones
        self._spans: list[tuple[int, int]] = []  # of the chunks in the file
        self._size = 0
        self.ended = False

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        """Write bytes at an offset of the uncompressed contents."""
        chunk_bytes = self._array.chunk_bytes
        while len(data):
            number, begin = divmod(offset, chunk_bytes)
            piece = data[: chunk_bytes - begin]
            offset, data = offset + len(piece), data[len(piece) :]
            if len(piece) == chunk_bytes:
                self._compress(number, piece)
                continue
            content, done = self._raw.get(number) or (bytearray(chunk_bytes), 0)
            content[begin : begin + len(piece)] = piece
            self._raw[number] = content, done + len(piece)
            if done + len(piece) == self._valid[number]:
                del self._raw[number]
                self._compress(number, content)

    def _compress(self, number: int, content: memoryview | bytes | bytearray) -> None:
        from numcodecs import zstd

        self._waiting[number] = zstd.compress(content, self._array.level)
        while len(self._spans) in self._waiting:
            encoded = self._waiting.pop(len(self._spans))
            self._spans.append((self._size, len(encoded)))
            self._append(encoded)
        if len(self._spans) < len(self._valid):
            return
        if self._array.shard is not None:
            spans = iter(self._spans)
            self._append(shard_index(next(spans) if nbytes else (ABSENT, ABSENT) for nbytes in self._unit.valid))
        self._into.finish(durable=False)
        self.ended = True

    def _append(self, content: bytes) -> None:
        self._into.write_at(self._size, content)
        self._size += len(content)

    def finish(self, *, durable: bool) -> None:  # noqa: ARG002 -- it ends with its last chunk
        """Raise `TargetError` if a chunk is missing."""
        if not self.ended:
            raise TargetError(
                f"{self._path} is incomplete", code="internal-error",
                hint="this is an error of reshard; please report it",
            )  # fmt: skip

    def abort(self) -> None:
        """Abort the file."""
        self._into.abort()
