"""Chunks of a zarr store whose bytes are not those of the tensor: compressed, absent, or encoded in another way.

Moving bytes knows files and offsets only. So such a chunk, or a shard of them, is a file that seems to have its
contents uncompressed, chunk after chunk; a store decodes what is read of it, and encodes what is written.

* To be read: a chunk is decoded when a thread first reads of it, and held while the thread reads on in the same rows.
  zstd is decoded here, into memory of the size that the metadata says; every other codec by zarr itself. A stream that
  is too long to be held is decoded piece by piece (`readers.dcp.zstd`).
* To be written: a chunk is put together in memory, compressed when its last byte has come, and appended to its file
  in row-major order, so that the file is the same whoever wrote its bytes when. One task owns a file.
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
"""Resident memory of zarr and numcodecs besides what every run imports; measured."""

_SLABS_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Fill:
    """Chunks that a store does not have: the fill value again and again."""

    value: bytes


@dataclass(frozen=True, slots=True)
class Compressed:
    """A file of chunks compressed by zstd: the bytes of each uncompressed, and where each is (offset, length)."""

    chunk_bytes: int
    spans: tuple[tuple[int, int], ...]

    def decoded(self, encoded: bytearray) -> bytes | bytearray:
        """Return the bytes of a chunk; raise `ValueError` or `RuntimeError` where it has others."""
        from numcodecs import zstd  # with the first that is read

        content = bytearray(self.chunk_bytes)
        # A frame says how long its contents are; given where they go, zstd takes no memory for more.
        zstd.decompress(encoded, content)
        stated = _frame_bytes(encoded)
        if stated not in {None, self.chunk_bytes}:
            raise ValueError(f"it has {stated} bytes; the metadata says {self.chunk_bytes}")
        return content


@dataclass(frozen=True, slots=True)
class Foreign:
    """A file of chunks that zarr itself decodes.

    Attributes:
        directory: the array.
        shape: the tensor's.
        chunk: of a chunk, in elements.
        first: the place of the file's first chunk among all chunks.
        inner: how many chunks the file has along each dimension.
        itemsize: bytes an element.
    """

    directory: str
    shape: Shape
    chunk: Shape
    first: Shape
    inner: Shape
    itemsize: int

    @property
    def chunk_bytes(self) -> int:
        """How far the chunks are from each other in what the file seems to be."""
        return prod(self.chunk) * self.itemsize


def slab_bytes(shape: Shape, chunk: Shape, itemsize: int) -> int:
    """Return the bytes of all chunks that some rows meet: what is to be held so that each is decoded once.

    >>> slab_bytes((100, 8), (10, 2), 4), slab_bytes((7, 100, 8), (1, 10, 8), 4)
    (320, 320)
    """
    axis = next((axis for axis, extent in enumerate(chunk) if extent > 1), len(chunk) - 1)
    return itemsize * prod(chunk[: axis + 1]) * prod(map(max, shape[axis + 1 :], chunk[axis + 1 :]))


class Opened(Protocol):
    """A chunk that a thread reads; `memory` is what it takes, in bytes."""

    memory: int

    def fill(self, begin: int, buffer: memoryview) -> None:
        """Fill a buffer from a byte on; raise `ValueError` where the chunk ends before, or cannot be decoded."""


class Streamed(Protocol):
    """A file of chunks that are too long to be held decoded."""

    @property
    def chunk_bytes(self) -> int:
        """How far the chunks are from each other in what the file seems to be."""

    def opened(self, store: ReadStore, path: str, number: int) -> Opened:
        """Return a chunk that is decoded as far as it is read."""


Unit = Fill | Compressed | Foreign | Streamed


class _Whole:
    """A chunk that is held decoded."""

    def __init__(self, content: memoryview) -> None:
        self._content = content
        self.memory = len(content)

    def fill(self, begin: int, buffer: memoryview) -> None:
        """Fill a buffer from a byte on; raise `ValueError` where the chunk ends before."""
        if begin + len(buffer) > self.memory:
            raise ValueError(f"it ends at byte {self.memory:,}")
        buffer[:] = self._content[begin : begin + len(buffer)]


@dataclass(frozen=True, slots=True, eq=False)
class Decoding:
    """How files of encoded chunks are read.

    Attributes:
        units: the files that seem to be other than they are, by path.
        held_bytes: the memory for the chunks that a thread holds.
        opening_bytes: the memory that decoding one more takes.
    """

    units: Mapping[str, Unit]
    held_bytes: int
    opening_bytes: int

    @classmethod
    def of(cls, units: Mapping[str, Unit], slabs: list[int], chunks: list[int]) -> Decoding:
        """Return how to read these files, whose slabs and chunks have so many bytes; decoding one takes it twice."""
        largest = max(chunks, default=0)
        return cls(units, max(min(max(slabs, default=0), _SLABS_BYTES), largest), 2 * largest)

    def nbytes(self, threads: int) -> int:
        """Return the memory that reading takes: the chunks that each thread holds, and one that it decodes."""
        return threads * (self.held_bytes + self.opening_bytes) + (IMPORTED_BYTES if self.opening_bytes else 0)

    def store(self) -> DecodingStore:
        """Return what reads the files."""
        return DecodingStore(self)


class DecodingStore(Around):
    """Files of which chunks are read decoded. Safe to use from several threads."""

    def __init__(self, decoding: Decoding) -> None:
        super().__init__(any_store())
        self._decoding = decoding
        self._held = _Held()

    def read(self, wants: Sequence[Want]) -> None:
        """Fill buffers with contents; what is to be decoded for them is read at once, but by zarr, which reads itself.

        Raises:
            SourceError: a chunk cannot be decoded, or has not as many bytes as the metadata says.
        """
        plain: list[Want] = []
        encoded: dict[tuple[str, int], bytearray] = {}
        for path, offset, buffer in wants:
            unit = self._decoding.units.get(path)
            if unit is None:
                plain.append((path, offset, buffer))
            elif isinstance(unit, Compressed):
                for number in range(offset // unit.chunk_bytes, -(-(offset + len(buffer)) // unit.chunk_bytes)):
                    if (path, number) not in self._held.chunks and (path, number) not in encoded:
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
            chunk = self._held.take(key) or self._opened(path, number, unit, encoded.get(key))
            chunk.fill(begin, buffer)
        except SourceError:  # which is a ValueError
            raise
        except (RuntimeError, ValueError, MemoryError, OverflowError) as error:
            raise _not_decoded(path, number, error) from None
        self._held.add(key, chunk, self._decoding.held_bytes)

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
        """Close every file that nobody uses, and forget this thread's chunks."""
        self._held = _Held()
        super().close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel to another process as a fresh store."""
        return DecodingStore, (self._decoding,)


class _Held(threading.local):
    """A thread's decoded chunks, those used last at the end."""

    def __init__(self) -> None:
        self.chunks: OrderedDict[tuple[str, int], Opened] = OrderedDict()
        self.nbytes = 0

    def take(self, key: tuple[str, int]) -> Opened | None:
        """Return a chunk that is held, and hold it no more: it is added again when all went well."""
        chunk = self.chunks.pop(key, None)
        self.nbytes -= chunk.memory if chunk else 0
        return chunk

    def add(self, key: tuple[str, int], chunk: Opened, most: int) -> None:
        while self.chunks and self.nbytes + chunk.memory > most:
            self.nbytes -= self.chunks.popitem(last=False)[1].memory
        self.chunks[key] = chunk
        self.nbytes += chunk.memory


def _fill(buffer: memoryview, value: bytes) -> None:
    """Fill a buffer, doubling what is filled."""
    done = min(len(value), len(buffer))
    buffer[:done] = value[:done]
    while done < len(buffer):
        count = min(done, len(buffer) - done)
        buffer[done : done + count] = buffer[:count]
        done += count


def _frame_bytes(encoded: bytearray) -> int | None:
    """Return how many bytes a zstd frame says it has; None if it is none, or does not say."""
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
    """Return what a chunk has of the tensor, in row-major order."""
    import numpy as np

    place = []
    for first, count in zip(reversed(unit.first), reversed(unit.inner), strict=True):
        number, within = divmod(number, count)
        place.append(first + within)
    block = part(unit.shape, unit.chunk, tuple(reversed(place)))
    assert block is not None  # noqa: S101 -- no shard is made of what lies beyond the end
    try:
        found = np.ascontiguousarray(_array(unit.directory)[block.within(block.whole(unit.shape))])
    except Exception as error:  # zarr's codecs raise whatever they like
        raise _not_decoded(path, number, error) from error
    if found.nbytes != block.size * unit.itemsize:
        raise _not_decoded(path, number, f"zarr gives {found.nbytes} bytes; expected {block.size * unit.itemsize}")
    return found.reshape(-1).view(np.uint8).data


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
        chunk_bytes: of a chunk, uncompressed.
        valid: how many of them come, for each chunk that its file has; the rest of a chunk is zeros.
        places: the number of each chunk in the index of the shard.
        count: how many chunks the index has; 0 where the file is one chunk, without an index.
    """

    chunk_bytes: int
    valid: tuple[int, ...]
    places: tuple[int, ...]
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class Encoding:
    """How the files of a zarr store are written.

    Attributes:
        units: the files that are compressed, by their paths below the target directory.
        level: of zstd.
        held_bytes: how much a thread holds at once of chunks that are not complete.
        chunk_bytes: the largest of those chunks.
    """

    units: Mapping[str, ToCompress]
    level: int
    held_bytes: int
    chunk_bytes: int

    def nbytes(self, threads: int) -> int:
        """Return the memory that writing takes: chunks that are put together, and as much that waits for its turn."""
        return threads * (2 * self.held_bytes + self.chunk_bytes) + IMPORTED_BYTES

    def of(self, path: str) -> str | None:
        """Return what says how a file is compressed; None of one that is not."""
        unit = self.units.get(path)
        return None if unit is None else f"zstd {self.level} {unit}"

    def sink(self, path: str, into: Sink) -> Sink:
        """Return what takes the contents of a file, whose path is below the target, and writes it compressed."""
        return _Compressing(path, self.units[path], self.level, into)


@dataclass(slots=True, eq=False)
class _Compressing:
    """A sink for the contents of chunks, which compresses each and appends it to a file; see `Sink`.

    Attributes:
        raw: what has come of a chunk that is not complete, and how many bytes.
        waiting: compressed chunks before whose turn others are.
        spans: of the chunks that are written: offset and length.
        size: of the file so far.
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
        """Take contents at an offset of what the file seems to be."""
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
            for place, span in zip(self.unit.places, self.spans, strict=True):
                spans[place] = span
            self._append(bytes(shard_index(spans)))
        self.into.finish(durable=False)
        self.ended = True

    def finish(self, *, durable: bool) -> None:  # noqa: ARG002 -- it ends with its last chunk
        """Check that every chunk came: `TargetError`."""
        if not self.ended:
            raise TargetError(
                f"{self.path} is incomplete",
                code="internal-error",
                hint="this is an error of reshard; please report it",
            )

    def abort(self) -> None:
        """Give up."""
        self.into.abort()
