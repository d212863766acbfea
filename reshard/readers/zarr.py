"""Open a zarr v3 store: its arrays become tensors, and its chunks their blocks.

1. Every `zarr.json` below the root is read. Groups within the group become part of the names, as in zarr.
2. An uncompressed chunk is a byte range of its file. In a shard it is found by the index, which is read. At the edge
   of an array a chunk extends beyond the tensor; its part within the tensor may then be several ranges.
3. Absent, compressed and foreign chunks get the extents of the decoded file that `zarr_chunks` presents.
4. A store that this program wrote (it has its notes) has every chunk and all notes; any that is missing was lost. In a
   store of another program an absent chunk is the fill value, and a warning gives their number (without those in
   shards of codecs that only zarr knows).

Nothing is trusted: extents, file sizes, shard indexes and the list of files (`zarr_files`) are all checked.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from reshard.dtypes import BY_NAME, INT4, STR
from reshard.errors import SourceError, names
from reshard.formats import zarr
from reshard.formats.entries import Entry, Extent, FileIndex
from reshard.formats.zarr import ABSENT, ATTRIBUTES, METADATA, counts, follows, grid, part, parts
from reshard.formats.zarr_chunks import Compressed, Decoding, Fill, Foreign, slab_bytes
from reshard.formats.zarr_files import V2, StoreFiles, check_options, option, own_notes, read_metadata, strings
from reshard.layout.block import Block, shape_text
from reshard.source.checkpoint import Checkpoint, Extras, Shard, SourceFile, Tensor, TensorSpec
from reshard.storage.crc import crc32c
from reshard.storage.places import any_store, in_batches

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from reshard.dtypes import DType
    from reshard.formats.entries import Runs
    from reshard.layout.block import Shape
    from reshard.storage.base import ReadStore, Status, Want
    from reshard.storage.places import Place

_MOST_DIMS = 32
_MOST_CHUNKS = 1 << 20
_MOST_RUNS = 1 << 12  # of a chunk that extends beyond the tensor; zarr decodes a chunk with more
_DEEPEST = 32

_CHUNKS = FileIndex(zarr.NAME, {})
"""The index of a file of chunks: it is empty, since only the array's metadata describe the chunks."""

_INDEX_CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]


def open_store(root: Place, *, contents: object = True) -> Checkpoint:  # noqa: ARG001 -- it has no replicas
    """Open a zarr store, reading its metadata and the indexes of its shards.

    Raises:
        SourceError: it is unfinished, has links, or its metadata does not fit its files.
    """
    files = StoreFiles(root)
    top = files.base / METADATA
    if files.status(top) is None:
        older = any(files.status(files.base / name) for name in V2)
        if older:
            raise SourceError(f"{root} is a zarr store of format 2; expected 3", code="unsupported-version")
        raise SourceError(
            f"{root} is an unfinished zarr store: it has no {METADATA}", code="unfinished", hint="write it again"
        )
    metadata = read_metadata(files, top)
    if metadata.get("node_type") != "group":
        raise SourceError(
            f"{top} is of node type {metadata.get('node_type')!r}; expected a group",
            code="not-a-group",
            hint="open the group of all tensors",
        )
    return _Store(files, own_notes(metadata)).checkpoint(str(root))


def store_notes(root: Place) -> dict[str, Any] | None:
    """Return the notes of this program in a store; None if it is unfinished or missing."""
    files = StoreFiles(root)
    top = files.base / METADATA
    return None if files.status(top) is None else own_notes(read_metadata(files, top))


class _Store:
    """Gathers the files and tensors of a store."""

    def __init__(self, disk: StoreFiles, notes: Mapping[str, Any]) -> None:
        self.disk, self.base, self.notes = disk, disk.base, notes
        self.files: dict[str, SourceFile] = {}
        self.numbers: dict[str, int] = {}
        self.tensors: dict[str, Tensor] = {}
        self.unreadable: dict[str, str] = {}
        self.units: dict[str, Fill | Compressed | Foreign] = {}
        self.slabs: list[int] = []
        self.chunks: list[int] = []
        self.absent: dict[str, int] = {}

    def checkpoint(self, root: str) -> Checkpoint:
        """Return the store as a checkpoint of one rank."""
        for directory, metadata in self._arrays(self.base, 0):
            self._add(directory, metadata)
        shards = (Shard(Block.whole((0,)), (Extent(len(self.files), ()),)),)  # of texts, in the group's own file
        for name, text in strings(self.notes.get("texts", {}), self.base).items():
            if name in self.tensors:
                raise SourceError(f"{self.base} has {name!r} both as an array and as text", code="duplicate-name")
            self.tensors[name] = Tensor.of(TensorSpec(name, STR, (0,)), shards, listed=False, text=text)
        order = self.notes.get("tensors")
        order = [name for name in order if isinstance(name, str)] if isinstance(order, list) else []
        absent = [name for name in order if name not in self.tensors and name not in self.unreadable]
        if absent:
            raise SourceError(f"{self.base} lists tensor {absent[0]!r} but has no such array", code="missing-tensor")
        ordered = {name: self.tensors[name] for name in (*order, *self.tensors) if name in self.tensors}
        if not ordered:
            raise SourceError(f"{root} has no tensor", code="no-tensors")
        # The group's metadata file, which is the last file, gives the order of the tensors.
        entries = {
            name: Entry(tensor.spec.dtype, tensor.spec.shape, (), tensor.text) for name, tensor in ordered.items()
        }
        notes = tuple(strings(self.notes.get("notes", {}), self.base).items())
        self.file(self.base / METADATA, index=FileIndex(zarr.NAME, entries, notes, header=1))
        return Checkpoint(
            root, ordered, tuple(self.files.values()), (0,) * len(self.files), unreadable=self.unreadable,
            coding=Decoding.of(self.units, self.slabs, self.chunks) if self.units else None,
            warnings=tuple(self._warnings()), extras=Extras(METADATA),
        )  # fmt: skip

    def _warnings(self) -> Iterator[str]:
        if self.absent:
            count = sum(self.absent.values())
            yield (
                f"the store has no file for {count} chunk{'s' * (count > 1)} of {names(self.absent)}; by zarr's rule "
                "their elements are the fill value"
            )

    def _arrays(self, directory: Place, depth: int) -> Iterator[tuple[Place, dict[str, Any]]]:
        """Yield the directories of arrays, by name, with their metadata."""
        for path in self.disk.directories(directory):
            metadata = read_metadata(self.disk, path / METADATA)
            if metadata.get("node_type") != "group":
                yield path, metadata
            elif depth < _DEEPEST:
                yield from self._arrays(path, depth + 1)

    def _add(self, directory: Place, metadata: dict[str, Any]) -> None:
        notes = own_notes(metadata)
        name = notes.get("name", str(directory).removeprefix(f"{self.base}/"))
        if not isinstance(name, str) or name in self.tensors or name in self.unreadable:
            raise SourceError(f"{directory} has a second tensor {name!r}, or its name is not text", code="bad-name")
        listed_names = self.notes.get("tensors")
        if notes and not self.notes:
            raise SourceError(
                f"{self.base / METADATA} has no notes of reshard, but array {name!r} has",
                code="missing-notes",
                facts=[f"expected {ATTRIBUTES!r} in its attributes; texts may be lost"],
                hint="open the group that reshard wrote, or write it again",
            )
        if (notes or (isinstance(listed_names, list) and name in listed_names)) and "dtype" not in notes:
            raise SourceError(
                f"{directory / METADATA} has no notes of reshard, which wrote it",
                code="missing-notes",
                facts=[f"expected a dtype in {ATTRIBUTES!r} in its attributes"],
                hint="write the store again",
            )
        array = _Array.parse(directory, metadata, notes)
        if array is None and notes:
            raise SourceError(
                f"{directory / METADATA} has dtype {metadata.get('data_type')!r}, which reshard never writes",
                code="unknown-dtype",
                hint="write the store again",
            )
        if array is None:
            self.unreadable[name] = f"is of zarr's dtype {metadata.get('data_type')!r}, which no checkpoint has"
            return
        shards = _Shards(self, array, name).shards()
        self.tensors[name] = Tensor.of(
            TensorSpec(name, array.dtype, array.shape), shards, listed=bool(notes.get("listed", False))
        )

    def file(self, path: Place, status: Status | None = None, *, index: FileIndex = _CHUNKS) -> int:
        """Return the number of a file, adding it if it is new."""
        key = str(path)
        if key not in self.numbers:
            status = status or self.disk.status(path)
            assert status is not None  # noqa: S101 -- its metadata were read
            self.numbers[key] = len(self.files)
            self.files[key] = SourceFile(key, status.nbytes, status.mtime_ns, index, status.change)
        return self.numbers[key]


@dataclass(frozen=True, slots=True)
class _Array:
    """The metadata of an array.

    Attributes:
        directory: the directory of the array.
        shape: the shape of the tensor.
        dtype: the dtype of the tensor.
        unit: the shape of a file's part of the tensor.
        chunk: the shape of a chunk, which is encoded by itself; equal to `unit` unless files are shards.
        sharded: whether files are shards, with an index.
        index_at_end: whether the index is at the end of the file, not at its beginning.
        codec: `plain`, `zstd`, or `foreign` if zarr itself decodes the chunks.
        separator: the text between the numbers in the name of a file.
        prefix: the beginning of file names.
        fill: an element of an absent chunk.
        by_reshard: whether this program wrote it, so that no chunk may be absent.
    """

    directory: Place
    shape: Shape
    dtype: DType
    unit: Shape
    chunk: Shape
    sharded: bool
    index_at_end: bool
    codec: str
    separator: str
    prefix: str
    fill: bytes
    by_reshard: bool

    @classmethod
    def parse(cls, directory: Place, metadata: Mapping[str, Any], notes: Mapping[str, Any]) -> _Array | None:
        """Check and parse the metadata of an array; None if no checkpoint has its dtype.

        Raises:
            SourceError: they are inconsistent or malicious.
        """
        path = f"{directory / METADATA}"
        match metadata:
            case {
                "node_type": "array", "shape": [*shape], "data_type": data_type, "codecs": [*codecs],
                "fill_value": fill, "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [*unit]}},
                "chunk_key_encoding": {"name": ("default" | "v2") as encoding, **keys},
            }:  # fmt: skip
                separator = option(keys, "separator", "/" if encoding == "default" else ".")
            case _:
                raise SourceError(f"{path} does not describe an array of regular chunks", code="bad-metadata")
        for section in (metadata["chunk_grid"], metadata["chunk_key_encoding"], *codecs):
            check_options(path, section)
        if metadata.get("storage_transformers"):
            raise SourceError(f"{path} has storage transformers, which are not supported", code="unsupported-storage")
        stored = BY_NAME.get(data_type) if isinstance(data_type, str) else None
        if stored is None or stored is STR or stored is INT4:
            return None
        dtype = BY_NAME.get(str(notes.get("dtype", stored.name)))
        if dtype is None or dtype is STR or dtype.itemsize != stored.itemsize:
            raise SourceError(
                f"{path} stores {data_type}, but its attributes say dtype {notes.get('dtype')!r}", code="wrong-dtype"
            )
        chunk, sharded, at_end = unit, False, True
        match codecs:
            case [{"name": "sharding_indexed", "configuration": {"chunk_shape": [*chunk], "codecs": inner, **rest}}]:
                sharded = rest.get("index_codecs") == _INDEX_CODECS
                location = rest.get("index_location", "end")
                if location not in ("start", "end"):
                    raise SourceError(
                        f"{path} has index_location {location!r:.60}; expected 'start' or 'end'", code="bad-metadata"
                    )
                at_end = location == "end"
                codec = _codec(inner, stored) if sharded else "foreign"
            case _:
                codec = _codec(codecs, stored)
        _check_shapes(path, shape, unit, chunk, dtype.itemsize)
        if separator not in {"/", "."}:
            raise SourceError(f"{path} has separator {separator!r}; expected '/' or '.'", code="bad-metadata")
        return cls(
            directory, tuple(shape), dtype, tuple(unit), tuple(chunk), sharded, at_end, codec, separator,
            "c" if encoding == "default" else "", _fill(path, fill, stored), bool(notes),
        )  # fmt: skip

    @property
    def chunk_bytes(self) -> int:
        return prod(self.chunk) * self.dtype.itemsize

    @property
    def inner(self) -> Shape:
        """Return the number of chunks of a file along each dimension."""
        return counts(self.unit, self.chunk)

    def path(self, cell: Shape) -> Place:
        """Return the file of a cell of the grid."""
        numbers = [*([self.prefix] if self.prefix else []), *map(str, cell)]
        return self.directory / (self.separator.join(numbers) or "0")


def _codec(codecs: object, stored: DType) -> str:
    """Return whether chunks are `plain` bytes, compressed by `zstd`, or `foreign`."""
    match codecs:
        case [{"name": "bytes", **rest}, *compressors]:
            endian = option(rest, "endian", None)
        case _:
            return "foreign"
    if endian != "little" and stored.itemsize > 1:
        return "foreign"
    names = [compressor.get("name") if isinstance(compressor, dict) else None for compressor in compressors]
    return "plain" if not names else "zstd" if names == ["zstd"] else "foreign"


def _check_shapes(path: str, shape: list[Any], unit: list[Any], chunk: list[Any], itemsize: int) -> None:
    for label, extents, least in (("shape", shape, 0), ("chunk shape", unit, 1), ("shape of inner chunks", chunk, 1)):
        if len(extents) > _MOST_DIMS or not all(
            type(extent) is int and least <= extent < 1 << 62 for extent in extents
        ):
            raise SourceError(f"{path} has {label} {extents[:4]}{'…' * (len(extents) > 4)}", code="bad-shape")
        if prod(extents) * itemsize >= 1 << 62:
            raise SourceError(f"{path} has {label} {shape_text(extents)}, larger than any disk", code="bad-shape")
    if not len(shape) == len(unit) == len(chunk) or any(a % b for a, b in zip(unit, chunk, strict=True)):
        raise SourceError(
            f"{path} has a shape and chunks that do not fit",
            code="wrong-shape",
            facts=[f"shape {shape_text(shape)}, chunks {shape_text(unit)}, inner chunks {shape_text(chunk)}"],
        )
    count = prod(counts(tuple(shape), tuple(chunk)))
    if count > _MOST_CHUNKS:
        raise SourceError(
            f"{path} has {count} chunks; at most {_MOST_CHUNKS} are supported",
            code="too-many-blocks",
            hint="write it with larger chunks",
        )


def _fill(path: str, value: object, stored: DType) -> bytes:
    """Return the bytes of a fill value."""
    if value in (0, None) and not isinstance(value, float):  # also False
        return bytes(stored.itemsize)
    if isinstance(value, str) and value.startswith("0x") and len(value) == 2 + 2 * stored.itemsize:
        try:
            return bytes.fromhex(value[2:])[::-1]
        except ValueError:
            value = object()
    import numpy as np

    kind = stored.numpy()
    number: Any = value
    try:
        if isinstance(value, list) and kind.kind == "c":
            number = complex(*map(float, value))
        elif kind.kind not in "biu":
            number = float(number)  # also "NaN" and "-Infinity"
        return np.asarray(number, kind).reshape(()).tobytes()
    except (TypeError, ValueError, OverflowError):
        raise SourceError(f"{path} has fill value {value!r}, which is not a {stored}", code="bad-value") from None


class _Shards:
    """Finds the blocks of one array, and their extents."""

    def __init__(self, store: _Store, array: _Array, name: str) -> None:
        self.store, self.array, self.name = store, array, name

    def shards(self) -> tuple[Shard, ...]:
        """Return every block."""
        array = self.array
        if not prod(array.shape):
            return (self._filled(Block.whole(array.shape)),)
        shards: list[Shard] = []
        for cell, path, status, index in in_batches(self._files()):
            box = part(array.shape, array.unit, cell)
            assert box is not None  # noqa: S101 -- of the array's own grid
            if status is None:
                self._note_absent(f"{path} is missing", sum(1 for _ in self._blocks(cell)))
                shards.append(self._filled(box))
            elif array.codec == "foreign":
                shards += self._foreign(cell, path, status)
            elif array.sharded:
                shards += self._sharded(cell, path, status, index, box)
            else:
                shards.append(self._chunk(cell, path, status, box))
        if array.codec != "plain":
            self.store.slabs.append(slab_bytes(array.shape, array.chunk, array.dtype.itemsize))
            self.store.chunks.append(array.chunk_bytes)
        shards.sort(key=lambda shard: shard.block.start)
        return tuple(shards)

    def _files(self) -> Iterator[tuple[tuple[Shape, Place, Status | None, bytearray], ReadStore, list[Want]]]:
        """Yield the cell, path, status and index buffer of each file, with its reads.

        The status is None if the file does not exist; the buffer is empty unless the file is a shard.
        """
        array = self.array
        for cell in grid(array.shape, array.unit):
            path = array.path(cell)
            status = self.store.disk.status(path)
            index = bytearray()
            requests: list[Want] = []
            if status is not None and array.sharded and array.codec != "foreign":
                index = bytearray(min(16 * prod(array.inner) + 4, status.nbytes))
                begin = status.nbytes - len(index) if array.index_at_end else 0
                requests.append((str(path), begin, memoryview(index)))
            yield (cell, path, status, index), any_store(), requests

    def _shard(self, block: Block, path: Place, status: Status, runs: Runs) -> Shard:
        return Shard(block, (Extent(self.store.file(path, status), runs),))

    def _note_absent(self, message: str, count: int) -> None:
        """Count absent chunks.

        Raises:
            SourceError: this program wrote the array, so they are lost.
        """
        if self.array.by_reshard:
            raise SourceError(
                message,
                code="missing-chunk",
                facts=[f"reshard wrote every chunk of tensor {self.name!r}; this one is lost"],
                hint="copy the store again, or write it again",
            )
        self.store.absent[self.name] = self.store.absent.get(self.name, 0) + count

    def _filled(self, block: Block) -> Shard:
        """Return a block of the fill value, for a missing chunk.

        Its file is the metadata of the array, which have the value.
        """
        path = self.array.directory / METADATA
        self.store.units[str(path)] = Fill(self.array.fill)
        return Shard(block, (Extent(self.store.file(path), ((0, block.size * self.array.dtype.itemsize),)),))

    def _chunk(self, cell: Shape, path: Place, status: Status, box: Block) -> Shard:
        """Return the block of a file that is one chunk."""
        array = self.array
        runs = clipped(0, array.chunk, box.shape, array.dtype.itemsize)
        if runs is None:
            return self._foreign(cell, path, status)[0]
        if array.codec == "zstd":
            self.store.units[str(path)] = Compressed(array.chunk_bytes, ((0, status.nbytes),))
        elif status.nbytes != array.chunk_bytes:
            raise SourceError(
                f"{path} has {status.nbytes} bytes; expected {array.chunk_bytes}",
                code="wrong-size",
                facts=[f"its chunk is {array.dtype} {shape_text(array.chunk)}"],
            )
        return self._shard(box, path, status, runs)

    def _blocks(self, cell: Shape) -> Iterator[tuple[int, Block]]:
        """Yield the number and the block of each chunk of a file that overlaps the tensor."""
        array = self.array
        for number, block in enumerate(parts(array.shape, array.chunk, cell, array.inner)):
            if block is not None:
                yield number, block

    def _foreign(self, cell: Shape, path: Place, status: Status) -> list[Shard]:
        """Return the blocks of a file that zarr itself decodes."""
        array = self.array
        first = tuple(a * count for a, count in zip(cell, array.inner, strict=True))
        itemsize = array.dtype.itemsize
        unit = Foreign(str(array.directory), array.shape, array.chunk, first, array.inner, itemsize)
        self.store.units[str(path)] = unit
        self.store.chunks.append(array.chunk_bytes)
        return [
            self._shard(block, path, status, ((number * array.chunk_bytes, block.size * itemsize),))
            for number, block in self._blocks(cell)
        ]

    def _sharded(self, cell: Shape, path: Place, status: Status, index: bytearray, box: Block) -> list[Shard]:
        """Return the blocks of a shard, found by its index."""
        array = self.array
        spans = self._spans(path, status, index)
        itemsize = array.dtype.itemsize
        blocks = list(self._blocks(cell))
        block_spans = [spans[number] for number, _ in blocks]
        for number, _ in blocks:
            if spans[number][0] == ABSENT:
                self._note_absent(f"{path} has no chunk {number} in its index", 1)
        in_line = all(
            span == (block_spans[0][0] + i * array.chunk_bytes, array.chunk_bytes) for i, span in enumerate(block_spans)
        )
        if array.codec == "plain" and in_line and block_spans[0][0] != ABSENT and follows(array.unit, array.chunk):
            runs = clipped(block_spans[0][0], array.unit, box.shape, itemsize)
            if runs is not None:
                return [self._shard(box, path, status, runs)]
        if array.codec == "zstd":
            self.store.units[str(path)] = Compressed(array.chunk_bytes, spans)
        shards = []
        for number, block in blocks:
            offset = spans[number][0] if array.codec == "plain" else number * array.chunk_bytes
            runs = clipped(offset, array.chunk, block.shape, itemsize)
            if runs is None:
                return self._foreign(cell, path, status)
            if spans[number][0] == ABSENT:
                shards.append(self._filled(block))
            else:
                shards.append(self._shard(block, path, status, runs))
        return shards

    def _spans(self, path: Place, status: Status, content: bytearray) -> tuple[tuple[int, int], ...]:
        """Return the offset and length of each chunk, from the index of a shard."""
        array = self.array
        count = prod(array.inner)
        nbytes = 16 * count + 4
        if status.nbytes < nbytes:
            raise SourceError(
                f"{path} is truncated: it has {status.nbytes} bytes; the index of {count} chunks has {nbytes}",
                code="truncated",
            )
        begin = status.nbytes - nbytes if array.index_at_end else 0
        if struct.unpack_from("<I", content, nbytes - 4)[0] != crc32c(memoryview(content)[:-4]):
            raise SourceError(f"{path} has an index that does not match its checksum", code="wrong-checksum")
        spans = tuple(struct.iter_unpack("<QQ", bytes(content[:-4])))
        for number, (offset, length) in enumerate(spans):
            if (offset, length) == (ABSENT, ABSENT):
                continue
            valid = offset + length <= begin if array.index_at_end else nbytes <= offset <= status.nbytes - length
            if not valid or (array.codec == "plain" and length != array.chunk_bytes):
                raise SourceError(
                    f"{path} has chunk {number} at bytes {offset} to {offset + length} by its index",
                    code="out-of-range",
                    facts=[
                        f"the file has {status.nbytes} bytes, {nbytes} of them the index",
                        *([f"a chunk has {array.chunk_bytes} bytes"] if array.codec == "plain" else []),
                    ],
                )
        return spans


def clipped(offset: int, chunk: Shape, shape: Shape, itemsize: int) -> Runs | None:
    """Return the byte ranges of a chunk's leading part; None if they are too many.

    Args:
        offset: the offset of the chunk in bytes.
        chunk: the shape of the chunk.
        shape: the shape of the part, which begins where the chunk does.
        itemsize: bytes per element.

    >>> clipped(0, (4, 3), (2, 3), 2), clipped(100, (4, 3), (2, 2), 2)
    (((0, 12),), ((100, 4), (106, 4)))
    """
    axis = max((axis for axis, extent in enumerate(chunk) if shape[axis] < extent), default=0)
    if prod(shape[:axis]) > _MOST_RUNS:
        return None
    pitches = [itemsize * prod(chunk[dim + 1 :]) for dim in range(axis)]
    nbytes = itemsize * prod(shape[axis:])
    return tuple(
        (offset + sum(map(int.__mul__, position, pitches)), nbytes) for position in product(*map(range, shape[:axis]))
    )
