"""The arrays of one item: their blocks, and the location of each chunk.

1. An uncompressed chunk in a data file is a byte range of it.
2. A compressed one, and one within a node of a database, gets the extent of a virtual file (`kits.chunks.decoding`).
   The chunks of a node are kept in memory, and belong to the file of metadata.
3. An absent chunk is the fill value, if Orbax left out such chunks; if not, it is lost, and so is the array.
"""

from __future__ import annotations

from collections import defaultdict
from math import prod
from typing import TYPE_CHECKING

from reshard.core.layout.block import Block
from reshard.core.model.checkpoint import Shard, Tensor, TensorSpec
from reshard.core.model.entries import Extent
from reshard.core.storage.places import any_store, in_batches
from reshard.errors import SourceError
from reshard.formats.orbax.item_values import LONGEST_WHOLE, STRIDE, EncodedValues
from reshard.formats.zarr.array import ArrayMetadata, clipped, parse_v2
from reshard.formats.zarr.chunks import slab_bytes
from reshard.formats.zarr.files import ARRAY_V2, own_notes, parse_metadata
from reshard.formats.zarr.layout import ABSENT, METADATA, counts, grid, part, parts
from reshard.kits.chunks.streaming import piece_bytes, stream_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from reshard.core.layout.block import Shape
    from reshard.core.model.reshape import Shared
    from reshard.core.storage.base import ReadStore, Want
    from reshard.formats.orbax.item_values import ItemValues
    from reshard.formats.orbax.ocdbt import StoredValue

_LARGEST_METADATA = 1 << 20
_MOST_CHUNKS = 1 << 22  # of all arrays
_MOST_ABSENT = 1 << 17
_MOST_HELD = 32 << 20  # bytes of decoded chunks in a thread's cache


class ChunkDecoding:
    """Gathers the virtual files of a checkpoint.

    Attributes:
        units, held_bytes, opening_bytes: as in `Decoding`.
        chunks, absent: how many chunks all arrays have, and how many of these are absent.
    """

    def __init__(self) -> None:
        self.units: defaultdict[str, EncodedValues] = defaultdict(EncodedValues)
        self.held_bytes = self.opening_bytes = self.chunks = self.absent = 0

    def note(self, array: ArrayMetadata, path: str) -> None:
        """Note the memory that decoding chunks of an array in a file takes."""
        slab = slab_bytes(array.shape, array.chunk, array.dtype.itemsize)
        if array.chunk_bytes > LONGEST_WHOLE:
            side_by_side = slab // array.chunk_bytes
            unit = self.units[path]
            piece = unit.piece_bytes = min(piece_bytes(path, side_by_side), unit.piece_bytes or array.chunk_bytes)
            self.held_bytes = max(self.held_bytes, side_by_side * stream_bytes(piece))
            self.opening_bytes = max(self.opening_bytes, stream_bytes(piece) + piece)  # as it is read, and copied
        else:
            self.held_bytes = max(self.held_bytes, min(slab, _MOST_HELD), array.chunk_bytes)
            self.opening_bytes = max(self.opening_bytes, 2 * array.chunk_bytes)


def read_metadata(item: ItemValues, names: Iterable[str]) -> dict[str, ArrayMetadata | str]:
    """Return the metadata of arrays, by name, or the reason why one cannot be read; none for what is not stored."""
    keys = {f"{name}/{file}": (name, file) for name in names for file in (METADATA, ARRAY_V2)}
    result: dict[str, ArrayMetadata | str] = {}
    for key, content in item.read(keys, _LARGEST_METADATA):
        name, file = keys[key]
        if name not in result:
            try:
                result[name] = _parsed(item, name, file, content)
            except SourceError as error:
                result[name] = error.message
    return result


def _parsed(item: ItemValues, name: str, file: str, content: bytes) -> ArrayMetadata | str:
    directory = item.files.base / name
    array: ArrayMetadata | None
    if file == ARRAY_V2:
        array = parse_v2(directory, content)
    else:
        metadata = parse_metadata(directory / file, content)
        array = ArrayMetadata.parse(directory, metadata, own_notes(metadata))
        if array is None:
            return f"is of zarr's dtype {metadata.get('data_type')!r:.60}, which no checkpoint has"
    if array.encoding:
        return f"has chunks in an encoding that Orbax does not write: {array.encoding.decode()[:300]}"
    return array


class ArrayBlocks:
    """Finds the blocks of arrays of one item, and their extents.

    Args:
        item: the values of the item.
        decoding: gets the chunks that are not byte ranges.
        number_of: returns the number of a file.
        kept: the path of the file to which chunks in memory belong.
        stores_fill: an absent chunk is lost.
        shared: shares equal shardings of tensors.
    """

    def __init__(
        self, item: ItemValues, decoding: ChunkDecoding, number_of: Callable[[str], int], kept: str,
        *, stores_fill: bool, shared: Shared,
    ) -> None:  # fmt: skip
        self._item, self._decoding, self._number_of, self._kept = item, decoding, number_of, kept
        self._stores_fill, self._shared = stores_fill, shared
        self.absent: dict[str, int] = {}

    def tensor(self, tensor_name: str, name: str, array: ArrayMetadata) -> Tensor:
        """Return the tensor of an array, by its name in the item.

        Raises:
            SourceError: a chunk is lost, or its size or its index is wrong, or there are too many.
        """
        self._decoding.chunks += prod(-(-a // b) for a, b in zip(array.shape, array.chunk, strict=True))
        if self._decoding.chunks > _MOST_CHUNKS:
            raise SourceError(f"has chunks beyond the {_MOST_CHUNKS} of a checkpoint", code="too-many-blocks")
        if array.chunk_bytes > STRIDE:
            raise SourceError(f"has chunks of {array.chunk_bytes} bytes", code="too-large")
        shards = [Shard(block, (extent,)) for block, extent in self._blocks(name, array)]
        return self._shared.tensor(TensorSpec(tensor_name, array.dtype, array.shape), shards)

    def _blocks(self, name: str, array: ArrayMetadata) -> Iterator[tuple[Block, Extent]]:
        whole = Block.whole(array.shape)
        if not whole.size:
            yield whole, Extent(self._number_of(self._kept), ())
            return
        count = self._item.count(name)
        units = prod(counts(array.shape, array.unit))
        if units > count and self._stores_fill:
            raise _lost(units - count)
        if not count and not any(array.fill):
            self.absent[name] = units
            yield whole, self._filled(array, whole)
            return
        self._decoding.absent += max(units - count, 0)
        if self._decoding.absent > _MOST_ABSENT:
            raise SourceError(f"has absent chunks beyond the {_MOST_ABSENT} of a checkpoint", code="too-many-blocks")
        lost = 0
        for cell, key, value, index in in_batches(self._cells(name, array)):
            box = part(array.shape, array.unit, cell)
            assert box is not None  # noqa: S101 -- of the array's own grid
            if value is None:
                lost += prod(array.inner)
                yield box, self._filled(array, box)
                continue
            if not array.sharded:
                yield box, self._chunk(array, value, (0, value.nbytes), key, box)
                continue
            spans = array.spans(key, value.nbytes, index)
            for span, block in zip(spans, parts(array.shape, array.chunk, cell, array.inner), strict=True):
                if block is not None and span[0] == ABSENT:
                    lost += 1
                    yield block, self._filled(array, block)
                elif block is not None:
                    yield block, self._chunk(array, value, span, key, block)
        if lost and self._stores_fill:
            raise _lost(lost)
        if lost:
            self.absent[name] = lost

    def _cells(
        self, name: str, array: ArrayMetadata
    ) -> Iterator[tuple[tuple[Shape, str, StoredValue | None, bytearray], ReadStore, list[Want]]]:
        """Yield the cell, key, value and index buffer of each file or shard, with its reads."""
        for cell in grid(array.shape, array.unit):
            key = f"{name}/{array.key(cell)}"
            value = self._item.values.get(key)
            index = bytearray()
            requests: list[Want] = []
            if value is not None and array.sharded:
                index = bytearray(min(array.index_bytes, value.nbytes))
                begin = value.nbytes - len(index) if array.index_at_end else 0
                if value.content is None:
                    requests.append((value.path, value.offset + begin, memoryview(index)))
                else:
                    index[:] = value.content[begin : begin + len(index)]
            yield (cell, key, value, index), any_store(), requests

    def _chunk(self, array: ArrayMetadata, value: StoredValue, span: tuple[int, int], key: str, block: Block) -> Extent:
        """Return the extent of a chunk: a range of a value."""
        begin, nbytes = span
        plain = array.encoding is None
        if plain and nbytes != array.chunk_bytes:
            raise SourceError(f"has {nbytes} bytes in chunk {key!r}; expected {array.chunk_bytes}", code="wrong-size")
        if plain and value.content is None:
            return self._extent(array, value.path, value.offset + begin, block)
        content = None if value.content is None else value.content[begin : begin + nbytes]
        path, place = (value.path, (value.offset + begin, nbytes)) if content is None else (self._kept, (0, 0))
        offset = self._decoding.units[path].add(place, array.chunk_bytes, content=content, plain=plain)
        if not plain:
            self._decoding.note(array, path)
        return self._extent(array, path, offset, block)

    def _filled(self, array: ArrayMetadata, block: Block) -> Extent:
        """Return the extent of an absent chunk, of the fill value."""
        if not any(array.fill):
            return Extent(self._number_of(self._kept), ())
        offset = self._decoding.units[self._kept].add((0, 0), array.chunk_bytes, content=array.fill, plain=True)
        return self._extent(array, self._kept, offset, block)

    def _extent(self, array: ArrayMetadata, path: str, offset: int, block: Block) -> Extent:
        return clipped(self._number_of(path), offset, array.chunk, block.shape, array.dtype.itemsize)


def _lost(count: int) -> SourceError:
    return SourceError(
        f"has lost {count} of its chunks, which are not in the files: its checkpoint stores all", code="missing-chunk"
    )
