"""Encoded chunks of a zarr store: how they are decoded and compressed.

* Reading: each chunk is read by its offset (`kits.chunks.decoding`). zstd is decoded there: zarr takes 0.5 ms longer
  for each chunk, and allocates as much memory as a damaged chunk declares. Chunks in any other encoding are decoded by
  zarr, which opens an array of one chunk in memory.
* Writing: a chunk is assembled in memory, compressed when its last byte has arrived, and appended to its file in
  row-major order, so that the file does not depend on the order of writes. One task owns a file.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from reshard.errors import TargetError
from reshard.formats.zarr.files import ARRAY_V2
from reshard.formats.zarr.layout import ABSENT, METADATA, shard_index
from reshard.kits.chunks.decoding import IMPORTED_BYTES, zstd_content

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.core.layout.block import Shape
    from reshard.core.storage.base import ReadStore, Sink

_MOST_ARRAYS = 64  # per thread
_BLOSC_HEADER = 16  # bytes


@dataclass(frozen=True, slots=True)
class Encoded:
    """A file of encoded chunks.

    Attributes:
        chunk_bytes: the decoded size of a chunk.
        spans: the offset and length of each encoded chunk.
        metadata: the metadata of an array of one such chunk; empty if chunks are compressed by zstd.
        key: the name of the chunk of that array.
    """

    chunk_bytes: int
    spans: tuple[tuple[int, int], ...]
    metadata: bytes
    key: str

    @property
    def plain_bytes(self) -> int:
        """Return 0: the whole file is encoded."""
        return 0

    def stream(self, number: int, store: ReadStore, path: str) -> None:
        """Return None: chunks are decoded whole."""

    def decoded(self, number: int, encoded: bytearray) -> memoryview:  # noqa: ARG002 -- all chunks are alike
        """Return a decoded chunk; raise `ValueError` if it has another size than the metadata says."""
        content = self._by_zarr(encoded) if self.metadata else zstd_content(encoded, self.chunk_bytes)
        if len(content) != self.chunk_bytes:
            raise ValueError(f"it has {len(content):,} bytes; the metadata says {self.chunk_bytes:,}")
        return content

    def _by_zarr(self, encoded: bytearray) -> memoryview:
        import numpy as np

        try:
            files, array, by_blosc = _arrays.opened(self.metadata)
            if by_blosc:
                _check_blosc(encoded)
            files[self.key] = _arrays.buffer(encoded)
            content = np.ascontiguousarray(array[...], array.dtype.newbyteorder("<"))
        except MemoryError:
            raise
        except Exception as error:  # zarr's codecs may raise anything
            raise ValueError(str(error) or type(error).__name__) from error
        return content.reshape(-1).view(np.uint8).data


class _Arrays(threading.local):
    """The arrays of one chunk that a thread has opened, each with its files in memory."""

    def __init__(self) -> None:
        self._opened: OrderedDict[bytes, tuple[dict[str, Any], Any, bool]] = OrderedDict()

    def opened(self, metadata: bytes) -> tuple[dict[str, Any], Any, bool]:
        """Return the files of an array, by name; the array; and whether its chunk begins with a header of blosc."""
        if metadata not in self._opened:
            import zarr

            noted = json.loads(metadata)
            version = noted["zarr_format"]
            files = {METADATA if version == 3 else ARRAY_V2: self.buffer(metadata)}
            store = zarr.storage.MemoryStore(files)
            array = zarr.open_array(store, mode="r", zarr_format=version)
            self._opened[metadata] = files, array, _last_codec(noted) == "blosc"
            if len(self._opened) > _MOST_ARRAYS:
                self._opened.popitem(last=False)
        return self._opened[metadata]

    def buffer(self, content: bytes | bytearray) -> Any:
        """Return bytes as zarr keeps them."""
        from zarr.core.buffer import default_buffer_prototype

        return default_buffer_prototype().buffer.from_bytes(content)


_arrays = _Arrays()


def _last_codec(metadata: dict[str, Any]) -> str:
    """Return the name of the codec that wrote the bytes of a chunk; empty if there is none."""
    if metadata["zarr_format"] == 3:
        last = metadata["codecs"][-1]
        return str(last["name"] if isinstance(last, dict) else last).removeprefix("numcodecs.")
    codecs = [*(metadata.get("filters") or ()), *filter(None, [metadata.get("compressor")])]
    return str(codecs[-1]["id"]) if codecs else ""


def _check_blosc(encoded: bytearray) -> None:
    """Raise `ValueError` if a chunk is shorter or longer than its header says: blosc reads on past its end.

    Bytes 12 to 16 of the header are the size of the chunk with its header (c-blosc, README_CHUNK_FORMAT).
    """
    said = int.from_bytes(encoded[12:16], "little")
    if len(encoded) < _BLOSC_HEADER or len(encoded) != said:
        raise ValueError(f"it has {len(encoded):,} bytes; blosc noted {said:,}")


def slab_bytes(shape: Shape, chunk: Shape, itemsize: int) -> int:
    """Return the total size of the chunks that share rows.

    A thread must cache that much to decode each chunk only once.

    >>> slab_bytes((100, 8), (10, 2), 4), slab_bytes((7, 100, 8), (1, 10, 8), 4)
    (320, 320)
    """
    axis = next((axis for axis, extent in enumerate(chunk) if extent > 1), len(chunk) - 1)
    return itemsize * prod(chunk[: axis + 1]) * prod(map(max, shape[axis + 1 :], chunk[axis + 1 :]))


@dataclass(frozen=True, slots=True)
class ToCompress:
    """A file of chunks to be written.

    Attributes:
        chunk_bytes: the uncompressed size of a chunk.
        valid: for each chunk, the number of bytes that will be written; the rest of the chunk is zeros. Chunks with 0
            bytes are not stored.
        sharded: whether the file ends with an index.
    """

    chunk_bytes: int
    valid: tuple[int, ...]
    sharded: bool


@dataclass(frozen=True, slots=True, eq=False)
class Encoding:
    """The compression of the files of a zarr store.

    Attributes:
        units: the compressed files, by path below the target directory.
        level: the zstd level.
        held_bytes: the memory of a thread's incomplete chunks.
        chunk_bytes: the size of the largest chunk.
    """

    units: Mapping[str, ToCompress]
    level: int
    held_bytes: int
    chunk_bytes: int

    def nbytes(self, threads: int) -> int:
        """Return the memory of incomplete chunks, and of an equal amount of waiting data."""
        return threads * (2 * self.held_bytes + self.chunk_bytes) + IMPORTED_BYTES

    def of(self, path: str) -> str | None:
        """Return a description of a file's compression; None if it is not compressed."""
        unit = self.units.get(path)
        return None if unit is None else f"zstd {self.level} {unit}"

    def sink(self, path: str, into: Sink) -> Sink:
        """Return a sink that compresses a file; `path` is below the target directory."""
        return _Compressing(path, self.units[path], self.level, into)


@dataclass(slots=True, eq=False)
class _Compressing:
    """A sink that compresses each chunk and appends it to a file; see `Sink`.

    Attributes:
        valid: the bytes of each stored chunk.
        raw: the incomplete chunks: content so far, and number of bytes received.
        waiting: compressed chunks that wait for earlier ones.
        spans: offset and length of each written chunk.
        size: the size of the file so far.
    """

    path: str
    unit: ToCompress
    level: int
    into: Sink
    ended: bool = False
    raw: dict[int, tuple[bytearray, int]] = field(default_factory=dict)
    waiting: dict[int, bytes] = field(default_factory=dict)
    spans: list[tuple[int, int]] = field(default_factory=list)
    size: int = 0
    valid: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.valid = tuple(filter(None, self.unit.valid))

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        """Write bytes at an offset of the uncompressed virtual file."""
        while len(data):
            number, begin = divmod(offset, self.unit.chunk_bytes)
            piece = data[: self.unit.chunk_bytes - begin]
            offset, data = offset + len(piece), data[len(piece) :]
            self._add(number, begin, piece)

    def _add(self, number: int, begin: int, piece: memoryview | bytes) -> None:
        if len(piece) == self.unit.chunk_bytes:
            content: memoryview | bytes | bytearray = piece
        else:
            content, done = self.raw.get(number) or (bytearray(self.unit.chunk_bytes), 0)
            content[begin : begin + len(piece)] = piece
            self.raw[number] = content, done + len(piece)
            if done + len(piece) < self.valid[number]:
                return
            del self.raw[number]
        from numcodecs import zstd

        self.waiting[number] = zstd.compress(content, self.level)
        while len(self.spans) in self.waiting:
            encoded = self.waiting.pop(len(self.spans))
            self.spans.append((self.size, len(encoded)))
            self._append(encoded)
        if len(self.spans) == len(self.valid):
            self._end()

    def _append(self, content: bytes) -> None:
        self.into.write_at(self.size, content)
        self.size += len(content)

    def _end(self) -> None:
        if self.unit.sharded:
            spans = iter(self.spans)
            self._append(shard_index(next(spans) if nbytes else (ABSENT, ABSENT) for nbytes in self.unit.valid))
        self.into.finish(durable=False)
        self.ended = True

    def finish(self, *, durable: bool) -> None:  # noqa: ARG002 -- it ends with its last chunk
        """Raise `TargetError` if a chunk is missing."""
        if not self.ended:
            raise TargetError(
                f"{self.path} is incomplete",
                code="internal-error",
                hint="this is an error of reshard; please report it",
            )

    def abort(self) -> None:
        """Abort the file."""
        self.into.abort()
