"""Encoded chunks of a zarr store: compressed, absent, or encoded in another way.

Transfers handle files and offsets only. So such a chunk, or a shard, is presented as a virtual file of uncompressed
consecutive chunks; a store decodes reads of it, and a sink encodes writes.

* Reading: a chunk is decoded when a thread first reads from it, and cached while the thread reads on in the same rows.
  zstd is decoded here, into a buffer of the size in the metadata; other codecs by zarr itself. A stream that is too
  long for memory is decoded piece by piece (`readers.dcp.zstd`).
* Writing: a chunk is assembled in memory, compressed when its last byte has arrived, and appended to its file in
  row-major order, so that the file does not depend on the order of writes. One task owns a file.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

from reshard.errors import SourceError, TargetError
from reshard.formats.zarr import ABSENT, part, shard_index
from reshard.storage.base import Around
from reshard.storage.places import any_store

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard.layout.block import Shape
    from reshard.storage.base import ReadStore, Sink, Want

IMPORTED_BYTES = 24 << 20
"""Additional resident memory of zarr and numcodecs; measured."""

_SLABS_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Fill:
    """Missing chunks: the repeated fill value."""

    value: bytes


@dataclass(frozen=True, slots=True)
class Compressed:
    """A file of chunks compressed by zstd.

    Attributes:
        chunk_bytes: the uncompressed size of a chunk.
        spans: the offset and length of each compressed chunk.
    """

    chunk_bytes: int
    spans: tuple[tuple[int, int], ...]

    def decoded(self, encoded: bytearray) -> bytes | bytearray:
        """Return a chunk decoded; raise `ValueError` or `RuntimeError` if that fails."""
        from numcodecs import zstd  # imported with the first chunk

        content = bytearray(self.chunk_bytes)
        # A frame declares its size; with an output buffer, zstd allocates no more memory than that buffer.
        zstd.decompress(encoded, content)
        declared = _frame_bytes(encoded)
        if declared not in {None, self.chunk_bytes}:
            raise ValueError(f"it has {declared} bytes; the metadata says {self.chunk_bytes}")
        return content


@dataclass(frozen=True, slots=True)
class Foreign:
    """A file of chunks that zarr itself decodes.

    Attributes:
        directory: the directory of the array.
        shape: the shape of the tensor.
        chunk: the shape of a chunk.
        first: the grid position of the file's first chunk.
        inner: the number of chunks in the file along each dimension.
        itemsize: the bytes per element.
    """

    directory: str
    shape: Shape
    chunk: Shape
    first: Shape
    inner: Shape
    itemsize: int

    @property
    def chunk_bytes(self) -> int:
        """The distance between chunks in the virtual file, in bytes."""
        return prod(self.chunk) * self.itemsize


def slab_bytes(shape: Shape, chunk: Shape, itemsize: int) -> int:
    """Return the total size of the chunks that share rows.

    A thread must cache that much to decode each chunk only once.

    >>> slab_bytes((100, 8), (10, 2), 4), slab_bytes((7, 100, 8), (1, 10, 8), 4)
    (320, 320)
    """
    axis = next((axis for axis, extent in enumerate(chunk) if extent > 1), len(chunk) - 1)
    return itemsize * prod(chunk[: axis + 1]) * prod(map(max, shape[axis + 1 :], chunk[axis + 1 :]))


class Opened(Protocol):
    """A chunk that a thread reads; `memory` is its memory use, in bytes."""

    memory: int

    def fill(self, begin: int, buffer: memoryview) -> None:
        """Fill a buffer from byte `begin` on; raise `ValueError` on an early end or bad data."""


class Streamed(Protocol):
    """A file of chunks that are too long to cache decoded."""

    @property
    def chunk_bytes(self) -> int:
        """The distance between chunks in the virtual file, in bytes."""

    def opened(self, store: ReadStore, path: str, number: int) -> Opened:
        """Return a chunk that is decoded as it is read."""


Unit = Fill | Compressed | Foreign | Streamed


class _Whole:
    """A decoded chunk in memory."""

    def __init__(self, content: memoryview) -> None:
        self._content = content
        self.memory = len(content)

    def fill(self, begin: int, buffer: memoryview) -> None:
        """Fill a buffer from byte `begin` on; raise `ValueError` if the chunk ends too early."""
        if begin + len(buffer) > self.memory:
            raise ValueError(f"it ends at byte {self.memory:,}")
        buffer[:] = self._content[begin : begin + len(buffer)]


@dataclass(frozen=True, slots=True, eq=False)
class Decoding:
    """The coding of files of encoded chunks.

    Attributes:
        units: the virtual files, by path.
        held_bytes: the size of each thread's cache of decoded chunks.
        opening_bytes: the additional memory to decode a chunk.
    """

    units: Mapping[str, Unit]
    held_bytes: int
    opening_bytes: int

    @classmethod
    def of(cls, units: Mapping[str, Unit], slabs: list[int], chunks: list[int]) -> Decoding:
        """Return the coding of files with these slab and chunk sizes.

        Decoding a chunk takes twice its size.
        """
        largest = max(chunks, default=0)
        return cls(units, max(min(max(slabs, default=0), _SLABS_BYTES), largest), 2 * largest)

    def nbytes(self, threads: int) -> int:
        """Return the memory of the threads' caches, and of one chunk that each decodes."""
        return threads * (self.held_bytes + self.opening_bytes) + (IMPORTED_BYTES if self.opening_bytes else 0)

    def store(self) -> DecodingStore:
        """Return a store that reads the files decoded."""
        return DecodingStore(self)


class DecodingStore(Around):
    """A store of decoded chunks. Safe to use from several threads."""

    def __init__(self, decoding: Decoding) -> None:
        super().__init__(any_store())
        self._decoding = decoding
        self._cache = _ChunkCache()

    def read(self, wants: Sequence[Want]) -> None:
        """Fill buffers with contents, reading all zstd chunks for them at once.

        Chunks of other codecs are read by zarr itself.

        Raises:
            SourceError: a chunk cannot be decoded, or its size contradicts the metadata.
        """
        plain: list[Want] = []
        encoded: dict[tuple[str, int], bytearray] = {}
        for path, offset, buffer in wants:
            unit = self._decoding.units.get(path)
            if unit is None:
                plain.append((path, offset, buffer))
            elif isinstance(unit, Compressed):
                for number in range(offset // unit.chunk_bytes, -(-(offset + len(buffer)) // unit.chunk_bytes)):
                    if (path, number) not in self._cache.chunks and (path, number) not in encoded:
                        begin, nbytes = unit.spans[number]
                        encoded[path, number] = bytearray(nbytes)
                        plain.append((path, begin, memoryview(encoded[path, number])))
        self.inner.read(plain)
        for path, offset, buffer in wants:
            unit = self._decoding.units.get(path)
            if unit is not None:
                self._fill(path, unit, offset, buffer, encoded)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill one buffer."""
        unit = self._decoding.units.get(path)
        if unit is None:
            self.inner.read_into(path, offset, buffer)
        else:
            self._fill(path, unit, offset, buffer, {})

    def _fill(
        self,
        path: str,
        unit: Unit,
        offset: int,
        buffer: memoryview,
        encoded: Mapping[tuple[str, int], bytearray],
    ) -> None:
        if isinstance(unit, Fill):
            _fill(buffer, unit.value)
            return
        number, begin = divmod(offset, unit.chunk_bytes)
        key = path, number
        try:
            chunk = self._cache.take(key) or self._opened(path, number, unit, encoded.get(key))
            chunk.fill(begin, buffer)
        except SourceError:  # which is a ValueError
            raise
        except (RuntimeError, ValueError, MemoryError, OverflowError) as error:
            raise _not_decoded(path, number, error) from None
        self._cache.add(key, chunk, self._decoding.held_bytes)

    def _opened(
        self, path: str, number: int, unit: Compressed | Foreign | Streamed, encoded: bytearray | None
    ) -> Opened:
        if isinstance(unit, Foreign):
            return _Whole(_by_zarr(path, number, unit))
        if not isinstance(unit, Compressed):
            return unit.opened(self.inner, path, number)
        if encoded is None:
            offset, length = unit.spans[number]
            encoded = bytearray(length)
            self.inner.read_into(path, offset, memoryview(encoded))
        return _Whole(memoryview(unit.decoded(encoded)))

    def close(self) -> None:
        """Close all files that are not in use, and empty the cache."""
        self._cache = _ChunkCache()
        super().close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel to another process as a fresh store."""
        return DecodingStore, (self._decoding,)


class _ChunkCache(threading.local):
    """A thread's decoded chunks, least recently used first."""

    def __init__(self) -> None:
        self.chunks: OrderedDict[tuple[str, int], Opened] = OrderedDict()
        self.nbytes = 0

    def take(self, key: tuple[str, int]) -> Opened | None:
        """Remove and return a chunk; it is added again after a successful read."""
        chunk = self.chunks.pop(key, None)
        self.nbytes -= chunk.memory if chunk else 0
        return chunk

    def add(self, key: tuple[str, int], chunk: Opened, most: int) -> None:
        while self.chunks and self.nbytes + chunk.memory > most:
            self.nbytes -= self.chunks.popitem(last=False)[1].memory
        self.chunks[key] = chunk
        self.nbytes += chunk.memory


def _fill(buffer: memoryview, value: bytes) -> None:
    """Fill a buffer with a repeated value, doubling the filled part."""
    done = min(len(value), len(buffer))
    buffer[:done] = value[:done]
    while done < len(buffer):
        count = min(done, len(buffer) - done)
        buffer[done : done + count] = buffer[:count]
        done += count


def _frame_bytes(encoded: bytearray) -> int | None:
    """Return the content size in a zstd frame's header; None if absent or not a frame."""
    if len(encoded) < 6 or encoded[:4] != b"\x28\xb5\x2f\xfd":
        return None
    flag, single, dictionary = encoded[4] >> 6, encoded[4] >> 5 & 1, encoded[4] & 3
    start = 5 + (not single) + (0, 1, 2, 4)[dictionary]
    size = (single, 2, 4, 8)[flag]
    return int.from_bytes(encoded[start : start + size], "little") + 256 * (flag == 1) if size else None


@lru_cache(maxsize=64)
def _array(directory: str) -> Any:
    import zarr

    return zarr.open_array(directory, mode="r", zarr_format=3)


def _by_zarr(path: str, number: int, unit: Foreign) -> memoryview:
    """Return the tensor's part in a chunk, decoded by zarr, in row-major order."""
    import numpy as np

    position = []
    for first, count in zip(reversed(unit.first), reversed(unit.inner), strict=True):
        number, within = divmod(number, count)
        position.append(first + within)
    block = part(unit.shape, unit.chunk, tuple(reversed(position)))
    assert block is not None  # noqa: S101 -- no shard lies beyond the end
    try:
        content = np.ascontiguousarray(_array(unit.directory)[block.within(block.whole(unit.shape))])
    except Exception as error:  # zarr's codecs may raise anything
        raise _not_decoded(path, number, error) from error
    if content.nbytes != block.size * unit.itemsize:
        raise _not_decoded(path, number, f"zarr gives {content.nbytes} bytes; expected {block.size * unit.itemsize}")
    return content.reshape(-1).view(np.uint8).data


def _not_decoded(path: str, number: int, why: object) -> SourceError:
    reason = str(why)
    if not reason:  # Python's own MemoryError has no text
        reason = "there is too little memory" if isinstance(why, MemoryError) else type(why).__name__
    return SourceError(
        f"cannot decode chunk {number} of {path}",
        code="bad-chunk",
        facts=[reason, "the chunk is damaged, or its metadata is wrong"],
    )


# --- writing ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ToCompress:
    """A file of chunks to be written.

    Attributes:
        chunk_bytes: the uncompressed size of a chunk.
        valid: for each chunk of the file, the number of bytes that will be written; the rest of the chunk is zeros.
        places: the position of each chunk in the index of the shard.
        count: the number of chunks in the index; 0 if the file is one chunk, without an index.
    """

    chunk_bytes: int
    valid: tuple[int, ...]
    places: tuple[int, ...]
    count: int


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
            if done + len(piece) < self.unit.valid[number]:
                return
            del self.raw[number]
        from numcodecs import zstd

        self.waiting[number] = zstd.compress(content, self.level)
        while len(self.spans) in self.waiting:
            encoded = self.waiting.pop(len(self.spans))
            self.spans.append((self.size, len(encoded)))
            self._append(encoded)
        if len(self.spans) == len(self.unit.valid):
            self._end()

    def _append(self, content: bytes) -> None:
        self.into.write_at(self.size, content)
        self.size += len(content)

    def _end(self) -> None:
        if self.unit.count:
            spans = [(ABSENT, ABSENT)] * self.unit.count
            for position, span in zip(self.unit.places, self.spans, strict=True):
                spans[position] = span
            self._append(bytes(shard_index(spans)))
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
