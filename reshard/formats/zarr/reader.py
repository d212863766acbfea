"""Open a zarr store: its arrays become tensors, and its chunks their blocks.

1. Every `zarr.json` below the root is read, or every `.zarray` of a store of format 2. Groups within the group become
   part of the names, as in zarr. The consolidated metadata are not read: who changes an array may leave them as they
   are.
2. An uncompressed chunk is a byte range of its file. In a shard it is found by the index, which is read. At the edge
   of an array a chunk extends beyond the tensor; its part within the tensor may then be several ranges.
3. Absent and encoded chunks get the extents of the decoded file that `kits.chunks.decoding` presents.
4. A store that this program wrote (it has its notes) has every chunk and all notes; any that is missing was lost. In a
   store of another program an absent chunk is the fill value, and a warning gives their number.

Nothing is trusted: extents, file sizes, shard indexes, the list of files (`zarr.files`) and the metadata of arrays
(`zarr.array`) are all checked.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import reshard.formats.zarr.layout as zarr
from reshard.core.layout.block import Block, shape_text
from reshard.core.model.checkpoint import Checkpoint, Shard, SourceFile, Tensor, TensorSpec
from reshard.core.model.entries import Entry, Extent, FileIndex
from reshard.core.model.facts import Extras, Object
from reshard.core.storage.base import truncated
from reshard.core.storage.places import any_store, in_batches
from reshard.dtypes import STR
from reshard.errors import SourceError, names
from reshard.formats.zarr.array import ArrayMetadata, clipped, parse_v2
from reshard.formats.zarr.carried import CHUNK, KINDS, parse
from reshard.formats.zarr.carried import DIRECTORY as CARRIED
from reshard.formats.zarr.chunks import Encoded, slab_bytes
from reshard.formats.zarr.files import ARRAY_V2, GROUP_V2, StoreFiles, own_notes, parse_json, parse_metadata, strings
from reshard.formats.zarr.layout import ABSENT, ATTRIBUTES, METADATA, follows, grid, part, parts
from reshard.kits.chunks.decoding import Decoding, Fill
from reshard.kits.torch.carried import BUCKET, BUCKETS
from reshard.kits.torch.names import BACKEND, COMMON

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from reshard.core.layout.block import Shape
    from reshard.core.storage.base import ReadStore, Status, Want
    from reshard.core.storage.places import Place

_DEEPEST = 32
_MOST_HELD = 64 << 20  # bytes of decoded chunks in a thread's cache, or one chunk

_LARGEST_COMMON = 1 << 20
_CHUNKS = FileIndex(zarr.NAME, {})
"""The index of a file of chunks: it is empty, since only the array's metadata describe the chunks."""


def open_store(root: Place, *, contents: object = True) -> Checkpoint:  # noqa: ARG001 -- it has no replicas
    """Open a zarr store, reading its metadata and the indexes of its shards.

    Raises:
        SourceError: it is unfinished, has links, or its metadata does not fit its files.
    """
    files = StoreFiles(root)
    top = files.base / METADATA
    if files.status(top) is None:
        top = files.base / GROUP_V2
        if files.status(top):
            parse_json(top, files.read_metadata(top), 2)
            return _Store(files, top, {}).checkpoint(str(root), _arrays_v2(files))
        if files.status(files.base / ARRAY_V2):
            raise _not_a_group(files.base / ARRAY_V2, "array")
        raise SourceError(
            f"{root} is an unfinished zarr store: it has no {METADATA}", code="unfinished", hint="write it again"
        )
    metadata = parse_metadata(top, files.read_metadata(top))
    if metadata.get("node_type") != "group":
        raise _not_a_group(top, metadata.get("node_type"))
    store = _Store(files, top, own_notes(metadata))
    return store.checkpoint(str(root), store.arrays(files.base, 0))


def _not_a_group(path: Place, kind: object) -> SourceError:
    return SourceError(
        f"{path} is of node type {kind!r}; expected a group", code="not-a-group", hint="open the group of all tensors"
    )


def store_notes(root: Place) -> dict[str, Any] | None:
    """Return the notes of this program in a store; None if it is unfinished or missing."""
    files = StoreFiles(root, below=False)
    top = files.base / METADATA
    return None if files.status(top) is None else own_notes(parse_metadata(top, files.read_metadata(top)))


class _ArrayInStore(NamedTuple):
    """An array: its directory, the notes of this program, and its metadata or why it cannot be read."""

    directory: Place
    notes: Mapping[str, Any]
    metadata: ArrayMetadata | str


def _arrays_v2(files: StoreFiles) -> Iterator[_ArrayInStore]:
    """Yield the arrays of a store of format 2."""
    for directory in files.arrays_v2:
        try:
            yield _ArrayInStore(directory, {}, parse_v2(directory, files.read_metadata(directory / ARRAY_V2)))
        except SourceError as error:
            if error.code not in {"unknown-dtype", "unsupported-storage"}:
                raise
            yield _ArrayInStore(directory, {}, error.message)


class _Store:
    """Gathers the files and tensors of a store.

    Args:
        disk: its files.
        top: the metadata of the group.
        notes: the notes of this program in them.
    """

    def __init__(self, disk: StoreFiles, top: Place, notes: Mapping[str, Any]) -> None:
        self.disk, self.base, self.top, self.notes = disk, disk.base, top, notes
        self.files: dict[str, SourceFile] = {}
        self.numbers: dict[str, int] = {}
        self.tensors: dict[str, Tensor] = {}
        self.unreadable: dict[str, str] = {}
        self.units: dict[str, Fill | Encoded] = {}
        self.held_bytes = 0
        self.opening_bytes = 0
        self.absent: dict[str, int] = {}
        self.extras = Extras(METADATA, common=_common(notes))

    def checkpoint(self, root: str, arrays: Iterable[_ArrayInStore]) -> Checkpoint:
        """Return the store as a checkpoint of one rank."""
        for array in arrays:
            self._add(array)
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
        bound = {name: BUCKET for name in ordered if name.startswith(BUCKETS)} if self.extras.objects else {}
        notes = tuple(strings(self.notes.get("notes", {}), self.base).items())
        self.file(self.top, index=FileIndex(zarr.NAME, entries, notes, header_id=1))
        return Checkpoint(
            root, ordered, tuple(self.files.values()), (0,) * len(self.files), unreadable=self.unreadable,
            coding=Decoding(self.units, self.held_bytes, self.opening_bytes) if self.units else None,
            warnings=tuple(self._warnings()), extras=replace(self.extras, bound=bound),
        )  # fmt: skip

    def _warnings(self) -> Iterator[str]:
        if self.absent:
            count = sum(self.absent.values())
            yield (
                f"the store has no file for {count} chunk{'s' * (count > 1)} of {names(self.absent)}; by zarr's rule "
                "their elements are the fill value"
            )

    def arrays(self, directory: Place, depth: int) -> Iterator[_ArrayInStore]:
        """Yield the arrays of format 3, by name, but the one of what is carried."""
        for path in self.disk.directories(directory):
            metadata = parse_metadata(path / METADATA, self.disk.read_metadata(path / METADATA))
            if metadata.get("node_type") == "group":
                if depth < _DEEPEST:
                    yield from self.arrays(path, depth + 1)
            elif path == self.base / CARRIED:
                self.extras = replace(self._carried(path, own_notes(metadata)), common=self.extras.common)
            else:
                yield self._parsed(path, metadata)

    def _parsed(self, directory: Place, metadata: dict[str, Any]) -> _ArrayInStore:
        notes = own_notes(metadata)
        name = self._name(directory, notes)
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
        array = ArrayMetadata.parse(directory, metadata, notes)
        if array is None and notes:
            raise SourceError(
                f"{directory / METADATA} has dtype {metadata.get('data_type')!r}, which reshard never writes",
                code="unknown-dtype",
                hint="write the store again",
            )
        reason = f"is of zarr's dtype {metadata.get('data_type')!r}, which no checkpoint has"
        return _ArrayInStore(directory, notes, array or reason)

    def _name(self, directory: Place, notes: Mapping[str, Any]) -> str:
        """Return the name of an array; raise `SourceError` if another one has it."""
        name = notes.get("name", str(directory).removeprefix(f"{self.base}/"))
        if not isinstance(name, str) or name in self.tensors or name in self.unreadable:
            raise SourceError(f"{directory} has a second tensor {name!r}, or its name is not text", code="bad-name")
        return name

    def _add(self, array: _ArrayInStore) -> None:
        name, metadata = self._name(array.directory, array.notes), array.metadata
        if isinstance(metadata, str):
            self.unreadable[name] = metadata
            return
        shards = _Shards(self, metadata, name).shards()
        listed = bool(array.notes.get("listed", False))
        self.tensors[name] = Tensor.of(TensorSpec(name, metadata.dtype, metadata.shape), shards, listed=listed)

    def _carried(self, directory: Place, notes: Mapping[str, Any]) -> Extras:
        """Return what the store carries that is not a tensor."""
        path = directory / CHUNK
        status = self.disk.status(path)
        carried = parse(notes.get("carried"), directory / METADATA, status.nbytes if status else 0)
        items = {
            kind: {name: Object(str(path), begin, nbytes) for name, (begin, nbytes) in ranges.items()}
            for kind, ranges in carried.ranges.items()
        }
        if unknown := items["beside"].keys() - {BACKEND, COMMON}:
            raise SourceError(
                f"{directory / METADATA} names {names(sorted(unknown))} beside the tensors", code="bad-metadata",
                facts=[f"expected {COMMON} and {BACKEND}"],
            )  # fmt: skip
        files, objects, beside = (items[kind] for kind in KINDS)
        return Extras(
            METADATA,
            objects=objects,
            beside=beside,
            common=_common(notes),
            files=files,
            paths=carried.paths,
            shard_size=carried.shard_size,
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


def _common(notes: Mapping[str, Any]) -> str:
    """Return the state of a training that the source of the store kept as JSON, or ""."""
    common = notes.get("common")
    return common if isinstance(common, str) and len(common) <= _LARGEST_COMMON else ""


class _Shards:
    """Finds the blocks of one array, and their extents."""

    def __init__(self, store: _Store, array: ArrayMetadata, name: str) -> None:
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
            elif array.sharded:
                shards += self._sharded(cell, path, status, index, box)
            else:
                shards.append(self._chunk(path, status, box))
        if array.encoding is not None:
            # zstd: the chunk encoded and decoded; zarr copies it once more.
            opening = (3 if array.encoding else 2) * array.chunk_bytes
            slab = min(slab_bytes(array.shape, array.chunk, array.dtype.itemsize), _MOST_HELD)
            self.store.held_bytes = max(self.store.held_bytes, slab, array.chunk_bytes)
            self.store.opening_bytes = max(self.store.opening_bytes, opening)
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
            if status is not None and array.sharded:
                index = bytearray(min(array.index_bytes, status.nbytes))
                begin = status.nbytes - len(index) if array.index_at_end else 0
                requests.append((str(path), begin, memoryview(index)))
            yield (cell, path, status, index), any_store(), requests

    def _shard(self, block: Block, path: Place, status: Status, offset: int, chunk: Shape) -> Shard:
        """Return a block that is the leading part of a chunk at an offset."""
        file = self.store.file(path, status)
        return Shard(block, (clipped(file, offset, chunk, block.shape, self.array.dtype.itemsize),))

    def _encode(self, path: Place, spans: tuple[tuple[int, int], ...]) -> None:
        """Note that the chunks of a file are encoded."""
        array = self.array
        assert array.encoding is not None  # noqa: S101
        self.store.units[str(path)] = Encoded(array.chunk_bytes, spans, array.encoding, array.first_key)

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
        path = self.array.directory / self.array.file
        self.store.units[str(path)] = Fill(self.array.fill)
        return Shard(block, (Extent(self.store.file(path), ((0, block.size * self.array.dtype.itemsize),)),))

    def _chunk(self, path: Place, status: Status, box: Block) -> Shard:
        """Return the block of a file that is one chunk."""
        array = self.array
        if array.encoding is not None:
            self._encode(path, ((0, status.nbytes),))
        elif status.nbytes < array.chunk_bytes:
            raise truncated(path, status.nbytes, array.chunk_bytes)
        elif status.nbytes > array.chunk_bytes:
            raise SourceError(
                f"{path} has {status.nbytes} bytes; expected {array.chunk_bytes}",
                code="wrong-size",
                facts=[f"its chunk is {array.dtype} {shape_text(array.chunk)}"],
            )
        return self._shard(box, path, status, 0, array.chunk)

    def _blocks(self, cell: Shape) -> Iterator[tuple[int, Block]]:
        """Yield the number and the block of each chunk of a file that overlaps the tensor."""
        array = self.array
        for number, block in enumerate(parts(array.shape, array.chunk, cell, array.inner)):
            if block is not None:
                yield number, block

    def _sharded(self, cell: Shape, path: Place, status: Status, index: bytearray, box: Block) -> list[Shard]:
        """Return the blocks of a shard, found by its index."""
        array = self.array
        spans = array.spans(path, status.nbytes, index)
        blocks = list(self._blocks(cell))
        block_spans = [spans[number] for number, _ in blocks]
        for number, _ in blocks:
            if spans[number][0] == ABSENT:
                self._note_absent(f"{path} has no chunk {number} in its index", 1)
        if array.encoding is not None:
            self._encode(path, spans)
        elif follows(array.unit, array.chunk) and all(
            span == (block_spans[0][0] + i * array.chunk_bytes, array.chunk_bytes) for i, span in enumerate(block_spans)
        ):
            return [self._shard(box, path, status, block_spans[0][0], array.unit)]
        shards = []
        for number, block in blocks:
            offset = spans[number][0] if array.encoding is None else number * array.chunk_bytes
            if spans[number][0] == ABSENT:
                shards.append(self._filled(block))
            else:
                shards.append(self._shard(block, path, status, offset, array.chunk))
        return shards
