"""The compression of the chunks of a zarr store.

A chunk is assembled in memory, compressed when its last byte has arrived, and appended to its file in row-major order,
so that the file does not depend on the order of writes. One task owns a file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reshard.errors import TargetError
from reshard.formats.zarr.layout import ABSENT, shard_index
from reshard.kits.chunks import IMPORTED_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.core.storage.base import Sink


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
