"""Tensors that are arrays of zarr, in files or in a database: their blocks, and the location of each chunk.

1. An uncompressed chunk is a byte range of its file. In a shard it is found by the index, which is read. At the edge of
   an array a chunk extends beyond the tensor; its part within the tensor may then be several ranges.
2. A compressed chunk, and one within a node of a database, gets an offset of its own (`kits.chunks`).
3. An absent chunk is the fill value. Where every chunk is stored, it is lost, and so is the array.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from math import prod
from typing import TYPE_CHECKING

from reshard.core.layout.axes import row_major
from reshard.core.layout.block import Block, shape_text
from reshard.core.model.checkpoint import Checkpoint, Shard, SourceFile, Tensor, TensorSpec
from reshard.core.model.entries import Entry, Extent, FileIndex
from reshard.core.model.reshape import Shared
from reshard.core.storage.base import COPY_AGAIN, truncated
from reshard.core.storage.places import any_store, in_batches
from reshard.dtypes import STR
from reshard.errors import SourceError, names
from reshard.formats.zarr.layout import ABSENT, follows, grid, part, parts, slab_bytes
from reshard.kits.chunks import STRIDE, Chunk, Decoding, piece_bytes, stream_bytes, zstd_chunk

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reshard.core.layout.block import Shape
    from reshard.core.model.facts import Extras
    from reshard.core.storage.base import ReadStore, Status, Want
    from reshard.formats.zarr.files import StoredValue, StoreFiles, Values
    from reshard.formats.zarr.metadata import ArrayMetadata

LONGEST_WHOLE = 4 << 20
"""The most bytes of a chunk that is decoded whole where longer ones are decoded piece by piece."""

_MOST_HELD = 64 << 20  # bytes of decoded chunks in a thread's cache, or one chunk
_MOST_RUNS = 1 << 12  # of a chunk that extends beyond the tensor; with more, its part is strided
_MOST_ENCODED = 1 << 22  # chunks of one file
_MOST_ABSENT = 1 << 18  # chunks of a checkpoint, which take no space in it


class Arrays:
    """Gathers the tensors and files of a checkpoint.

    Args:
        format_name: the name of the format of its files.
        streams: long chunks of zstd are decoded piece by piece, which takes longer, and less memory.

    Attributes:
        tensors: the tensors, by name.
        absent: how many chunks are absent, by the name of the array.
    """

    def __init__(self, format_name: str, *, streams: bool) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.absent: dict[str, int] = {}
        self._format, self._streams = format_name, streams
        self._statuses: dict[str, Status | None] = {}
        self._numbers: dict[str, int] = {}
        self._chunks: defaultdict[str, list[Chunk]] = defaultdict(list)
        self._held_bytes = self._opening_bytes = 0
        self._shared = Shared()

    def add_files(self, files: StoreFiles) -> None:
        """Add the files of a store, of which those with chunks are listed."""
        self._statuses |= files.statuses

    def add(self, name: str, array: ArrayMetadata, values: Values, described: str, *, complete: bool) -> None:
        """Add the tensor of an array.

        Args:
            name: the name of the tensor.
            array: the metadata.
            values: has the chunks.
            described: the path of the file that describes the array; chunks in memory belong to it.
            complete: every chunk is stored.

        Raises:
            SourceError: a chunk is lost, or its size or its index is wrong, or too many are absent.
        """
        blocks = _ArrayBlocks(self, array, values, described, complete)
        tensor = self._shared.tensor(TensorSpec(name, array.dtype, array.shape), blocks.shards())
        self.tensors[name] = tensor._replace(listed=bool(array.notes.get("listed", tensor.listed)))
        if blocks.absent:
            self.absent[name] = blocks.absent

    def add_text(self, name: str, text: str, described: str) -> None:
        """Add a text, which is in a file of metadata."""
        shards = (Shard(Block.whole((0,)), (Extent(self.number_of(described), ()),)),)
        self.tensors[name] = Tensor.of(TensorSpec(name, STR, (0,)), shards, listed=False, text=text)

    def number_of(self, path: str) -> int:
        """Return the number of a file, which is added."""
        return self._numbers.setdefault(path, len(self._numbers))

    def offset_of(self, path: str, chunk: Chunk) -> int:
        """Add an encoded chunk of a file; return its offset."""
        chunks = self._chunks[path]
        chunks.append(chunk)
        if len(chunks) > _MOST_ENCODED or chunk.nbytes > STRIDE:
            raise SourceError(f"{path} has too many chunks, or too long ones", code="too-many-blocks")
        return len(chunks) * STRIDE

    def piece_of(self, array: ArrayMetadata, path: str) -> int:
        """Note the memory that decoding chunks of an array takes; return how many bytes are read at once, or 0."""
        slab = slab_bytes(array.shape, array.chunk, array.dtype.itemsize)
        if self._streams and array.decode is zstd_chunk and array.chunk_bytes > LONGEST_WHOLE:
            side_by_side = slab // array.chunk_bytes
            piece = min(piece_bytes(path, side_by_side), array.chunk_bytes)
            held, opening = side_by_side * stream_bytes(piece), stream_bytes(piece) + piece  # as it is read, and copied
        else:
            piece = 0
            held = max(min(slab, _MOST_HELD), array.chunk_bytes)
            opening = (2 if array.decode is zstd_chunk else 3) * array.chunk_bytes  # zarr copies it once more
        self._held_bytes = max(self._held_bytes, held)
        self._opening_bytes = max(self._opening_bytes, opening)
        return piece

    def checkpoint(
        self, root: str, describing: Mapping[str, Mapping[str, Tensor]], *, notes: tuple[tuple[str, str], ...] = (),
        unreadable: Mapping[str, str], warnings: Sequence[str], extras: Extras,
    ) -> Checkpoint:  # fmt: skip
        """Return the checkpoint of one rank.

        Args:
            root: what was opened.
            describing: the tensors that each of some files describes, by its path.
            notes: the notes of the source.
            unreadable: why names cannot be read.
            warnings: further warnings.
            extras: further metadata.
        """
        indexes = {}
        for number, (path, tensors) in enumerate(describing.items(), 1):
            self.number_of(path)
            entries = {
                name: Entry(tensor.spec.dtype, tensor.spec.shape, (), tensor.text) for name, tensor in tensors.items()
            }
            indexes[path] = FileIndex(self._format, entries, notes, header_id=number)
        plain = FileIndex(self._format, {})  # only metadata describe chunks
        files = []
        for path in self._numbers:
            status = self._statuses[path]
            assert status is not None  # noqa: S101 -- it is a file
            files.append(SourceFile(path, status.nbytes, status.mtime_ns, indexes.get(path, plain), status.change))
        decoding = Decoding(dict(self._chunks), self._held_bytes, self._opening_bytes) if self._chunks else None
        return Checkpoint(
            root, self.tensors, tuple(files), (0,) * len(files), unreadable=unreadable, coding=decoding,
            warnings=(*warnings, *self._absent_warning(root)), extras=extras,
        )  # fmt: skip

    def _absent_warning(self, root: str) -> Iterator[str]:
        if self.absent:
            count = sum(self.absent.values())
            yield (
                f"{root} has no data for {count} chunk{'s' * (count > 1)} of {names(self.absent, most=3)}; their "
                "elements are the fill value"
            )


class _ArrayBlocks:
    """Finds the blocks of one array.

    Attributes:
        absent: how many of its chunks are absent.
    """

    def __init__(self, arrays: Arrays, array: ArrayMetadata, values: Values, described: str, complete: bool) -> None:
        self._arrays, self._array, self._values = arrays, array, values
        self._described, self._complete = described, complete
        self._piece = 0 if array.decode is None else arrays.piece_of(array, described)
        self._others_absent = sum(arrays.absent.values())
        self.absent = 0

    def shards(self) -> Iterator[Shard]:
        """Yield every block."""
        array = self._array
        if not prod(array.shape):
            yield self._zeros(Block.whole(array.shape))
            return
        for cell, key, value, index in in_batches(self._files()):
            box = part(array.shape, array.unit, cell)
            assert box is not None  # noqa: S101 -- of the array's own grid
            if value is None:
                count = sum(block is not None for block in parts(array.shape, array.chunk, cell, array.inner))
                yield self._filled(box, key, count)
            elif array.index:
                yield from self._of_shard(cell, value, index, box)
            else:
                yield Shard(box, (self._chunk(value, 0, value.nbytes, box),))

    def _files(self) -> Iterator[tuple[tuple[Shape, str, StoredValue | None, bytearray], ReadStore, list[Want]]]:
        """Yield the cell, key, value and index buffer of each chunk or shard, with the reads of the index."""
        array = self._array
        for cell in grid(array.shape, array.unit):
            key = array.key(cell)
            value = self._values.get(key)
            index = bytearray()
            requests: list[Want] = []
            if value is not None and array.index:
                index = bytearray(min(array.index_bytes, value.nbytes))
                begin = value.nbytes - len(index) if array.index == "end" else 0
                if value.content is None:
                    requests.append((value.path, value.offset + begin, memoryview(index)))
                else:
                    index[:] = value.content[begin : begin + len(index)]
            yield (cell, key, value, index), any_store(), requests

    def _of_shard(self, cell: Shape, value: StoredValue, index: bytearray, box: Block) -> Iterator[Shard]:
        """Yield the blocks of a shard; one, if plain chunks follow each other as in the tensor."""
        array = self._array
        spans = array.spans(value.path, value.nbytes, index)
        blocks = [
            (number, spans[number], block)
            for number, block in enumerate(parts(array.shape, array.chunk, cell, array.inner))
            if block is not None
        ]
        begin, step = blocks[0][1][0], array.chunk_bytes
        in_order = array.decode is None and value.content is None and follows(array.unit, array.chunk)
        if in_order and all(span == (begin + i * step, step) for i, (_, span, _) in enumerate(blocks)):
            yield Shard(box, (self._extent(value.path, value.offset + begin, box, array.unit),))
            return
        for number, (offset, nbytes), block in blocks:
            if offset == ABSENT:
                yield self._filled(block, f"chunk {number} of {value.path}", 1)
            else:
                yield Shard(block, (self._chunk(value, offset, nbytes, block),))

    def _chunk(self, value: StoredValue, begin: int, nbytes: int, block: Block) -> Extent:
        """Return the extent of a chunk: a range of a value."""
        array = self._array
        if array.decode is None and nbytes < array.chunk_bytes:
            raise truncated(value.path, nbytes, array.chunk_bytes)
        if array.decode is None and nbytes > array.chunk_bytes:
            raise SourceError(
                f"{value.path} has {nbytes} bytes; expected {array.chunk_bytes}", code="wrong-size",
                facts=[f"its chunk is {array.dtype} {shape_text(array.chunk)}"],
            )  # fmt: skip
        if value.content is not None:
            held = value.content[begin : begin + nbytes]
            return self._encoded(
                self._described, Chunk(0, 0, array.chunk_bytes, array.decode, held, self._piece), block
            )
        if array.decode is None:
            return self._extent(value.path, value.offset + begin, block, array.chunk)
        chunk = Chunk(value.offset + begin, nbytes, array.chunk_bytes, array.decode, None, self._piece)
        return self._encoded(value.path, chunk, block)

    def _filled(self, block: Block, what: str, count: int) -> Shard:
        """Return a block of absent chunks, of the fill value."""
        if self._complete:
            raise SourceError(
                f"{what} is missing, although every chunk was stored", code="missing-chunk", hint=COPY_AGAIN
            )
        self.absent += count
        if self._others_absent + self.absent > _MOST_ABSENT:
            raise SourceError(f"{self._described}: more than {_MOST_ABSENT} chunks are absent", code="too-many-blocks")
        if not any(self._array.fill):
            return self._zeros(block)
        chunk = Chunk(0, 0, block.size * self._array.dtype.itemsize, None, self._array.fill)
        offset = self._arrays.offset_of(self._described, chunk)
        return Shard(block, (Extent(self._arrays.number_of(self._described), ((offset, chunk.nbytes),)),))

    def _zeros(self, block: Block) -> Shard:
        return Shard(block, (Extent(self._arrays.number_of(self._described), ()),))

    def _encoded(self, path: str, chunk: Chunk, block: Block) -> Extent:
        return self._extent(path, self._arrays.offset_of(path, chunk), block, self._array.chunk)

    def _extent(self, path: str, offset: int, block: Block, chunk: Shape) -> Extent:
        return clipped(self._arrays.number_of(path), offset, chunk, block.shape, self._array.dtype.itemsize)


def clipped(file: int, offset: int, chunk: Shape, shape: Shape, itemsize: int) -> Extent:
    """Return the extent of a chunk's leading part; it is strided if its byte ranges are too many.

    Args:
        file: the number of the file.
        offset: the offset of the chunk in bytes.
        chunk: the shape of the chunk.
        shape: the shape of the part, which begins where the chunk does.
        itemsize: bytes per element.

    >>> clipped(0, 0, (4, 3), (2, 3), 2).runs, clipped(0, 100, (4, 3), (2, 2), 2).runs
    (((0, 12),), ((100, 4), (106, 4)))
    """
    axis = max((axis for axis, extent in enumerate(chunk) if shape[axis] < extent), default=0)
    strides = row_major(chunk)
    if prod(shape[:axis]) > _MOST_RUNS:
        last = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
        return Extent(file, ((offset, (last + 1) * itemsize),), strides)
    nbytes = itemsize * prod(shape[axis:])
    return Extent(
        file,
        tuple(
            (offset + itemsize * sum(map(int.__mul__, position, strides)), nbytes)
            for position in product(*map(range, shape[:axis]))
        ),
    )
