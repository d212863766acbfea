"""Open a distributed checkpoint (DCP) of PyTorch, Megatron-Core or hyper-parallel.

The metadata list all boxes. `.metadata`, which is written last, is a pickle of the program's own classes; if every rank
wrote metadata, there is one file per rank with the boxes of that rank. The metadata give the dtype, the shape and the
offsets of the boxes of each tensor, and the file of each box; several files may have the same box. Classes are
recognized by name alone, as modules move.

* PyTorch's files contain items that `torch.save` wrote, one behind the other (`torch_save`). On request PyTorch writes
  safetensors files; their headers are right where the metadata are not.
* hyper-parallel's files are safetensors files. A box has the name of its tensor, or a key of its own if a rank has
  several boxes of the tensor.

The files are compared with the metadata. Objects are pickled one by one, and read on request (`objects`), as are the
files that Megatron-Core writes next to the tensors.

Sources: PyTorch 2.13 `distributed/checkpoint/{metadata,filesystem}.py`, megatron-core 0.16.1 and 0.12.3
`dist_checkpointing/`, hyper-parallel `core/distributed_checkpoint` of September 2026 and `core/checkpoint` of March
2026, and files that these wrote (`tests/data/dcp`, `tests/data/checkpoint2`).
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import pairwise
from math import prod
from operator import add
from typing import TYPE_CHECKING, Literal

from reshard.core.layout.axes import row_major
from reshard.core.layout.block import Block, flat_boxes, shape_text
from reshard.core.model.checkpoint import Checkpoint, SourceFile, TensorSpec
from reshard.core.model.entries import Extent, FileIndex, RangeReader
from reshard.core.model.facts import Extras, Object
from reshard.core.model.probe import compare_contents
from reshard.core.model.reshape import laid
from reshard.core.model.table import Blocks, nothing_readable
from reshard.core.storage.base import COPY_AGAIN, truncated_text
from reshard.core.storage.places import workers_at
from reshard.core.storage.threads import map_ordered
from reshard.dtypes import BY_NAME
from reshard.errors import Faults, SourceError, names
from reshard.formats.dcp.hf_blocks import without_notes
from reshard.formats.dcp.items import Span, read_items
from reshard.formats.dcp.metadata import STREAM, DCPMetadata
from reshard.formats.dcp.names import DCP_FILES, DCP_INDEX, DCP_ITEMS, is_data_of, rank_of
from reshard.formats.dcp.sidecars import arguments_of, find_sidecars, status_of
from reshard.kits import safetensors
from reshard.kits.headers import read_indexes
from reshard.kits.torch.archive import Archives, ZipPart
from reshard.kits.torch.carried import BUCKET, BUCKETS
from reshard.kits.torch.pickles import describe

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reshard.core.layout.block import Shape
    from reshard.core.model.checkpoint import Tensor
    from reshard.core.model.entries import Entry
    from reshard.core.storage.places import Place
    from reshard.formats.dcp.metadata import DeclaredTensor, Item
    from reshard.formats.dcp.zstd import Streams
    from reshard.kits.chunks import Decoding

_MOST_HELD = 1 << 29  # bytes for the streams of a tensor that a thread decodes side by side
MTIME_TOLERANCE_NS = 2_000_000_000
"""How much newer than `.metadata` data files may be."""


def open_dcp(directory: Place, listing: Sequence[str], *, contents: bool | Literal["blocks"] = True) -> Checkpoint:
    """Open a distributed checkpoint, reading its metadata and the headers of its files.

    A tensor with missing blocks is unreadable, with the reason; a plan must drop it by name. Objects need not be named.

    Args:
        directory: the directory of the checkpoint, or the common parent of several that make one checkpoint.
        listing: the names of the files in it; paths if there are several directories.
        contents: compare samples of replicas.

    Raises:
        SourceError: the checkpoint is incomplete, or the metadata contradict themselves or the files; lists all faults.
    """
    metadata = DCPMetadata(directory, listing)
    files = _DCPFiles(directory, listing, metadata)
    block_list = Blocks()
    tensors: dict[str, Tensor] = {}
    unreadable: dict[str, str] = {}
    for name, declared in metadata.tensors.items():
        try:
            tensors[name] = _tensor(name, declared, metadata, files, block_list)
        except SourceError as error:
            unreadable[name] = error.message
    if not tensors:
        raise SourceError(f"{directory}: {nothing_readable(unreadable)}", code="no-tensors")
    objects = {name: _object(directory, metadata.items.get(name)) for name in metadata.objects}
    megatron_files = find_sidecars(directory, listing)
    sidecars = {} if metadata.paths else megatron_files
    bound = {name: BUCKET for name in tensors if name.startswith(BUCKETS)}
    checkpoint = Checkpoint(
        str(directory), tensors, files.files, files.ranks,
        warnings=tuple(_warnings(directory, listing, metadata, files)), unreadable=unreadable, coding=files.decoding(),
        extras=Extras(
            metadata.described_by, objects=objects, beside=sidecars, bound=bound,
            paths=None if sidecars else metadata.paths, arguments=arguments_of(megatron_files, objects),
        ),
    )  # fmt: skip
    return compare_contents(checkpoint, {}, contents=contents)


def _object(directory: Place, items: Sequence[Item] | None) -> Object:
    """Return an object from its storage entries; if several ranks have one, the object of the first rank."""
    if not items:
        return Object(problem="is an object that is not read")
    first = items[0]
    problem = f"is encoded ({names(map(describe, first.encoding))}), which is not read" if first.encoding else ""
    return Object(str(directory.absolute() / first.file), first.begin, first.nbytes, problem)


class _DCPFiles:
    """The files of tensors, and the entry of each box in them.

    Attributes:
        files: all files, in the order of ranks.
        ranks: the rank of each file.
        numbers: the number of each file, by path.
        streams: files whose items are all zstd streams, by path.
    """

    def __init__(self, directory: Place, listing: Sequence[str], metadata: DCPMetadata) -> None:
        self._directory, self._metadata = directory, metadata
        self._items: dict[str, list[tuple[str, Item]]] = {}
        for name, tensor_items in metadata.items.items():
            for item in tensor_items:
                self._items.setdefault(item.file, []).append((name, item))
        faults = Faults(str(directory))
        for file in sorted(self._items.keys() - set(listing)):
            faults.add(file, f"is missing; {metadata.described_by} names it", code="missing-file", hint=COPY_AGAIN)
        faults.raise_if_any(SourceError)
        ordered = sorted(self._items, key=lambda file: (rank_of(file), file))
        self.ranks = tuple(map(rank_of, ordered))
        self.numbers = {file: number for number, file in enumerate(ordered)}
        self.entries: dict[Item, Entry | str] = {}
        self.streams: dict[str, Streams] = {}
        headed = [file for file in ordered if _has_header(directory / file, [item for _, item in self._items[file]])]
        files = self._with_header(headed)
        files |= self._without_header([file for file in ordered if file not in files], len(headed))
        self.files = tuple(files[file] for file in ordered)

    def _with_header(self, names: Sequence[str]) -> dict[str, SourceFile]:
        """Read the headers of safetensors files."""
        indexes, _ = read_indexes({0: [self._directory / file for file in names]}, None)
        files = dict(zip(names, map(without_notes, indexes), strict=True))
        for file, source_file in files.items():
            lacks = f"is not in {file}, where {self._metadata.described_by} says it is"
            self.entries |= {item: source_file.index.entries.get(item.key, lacks) for _, item in self._items[file]}
        return files

    def _without_header(self, names: Sequence[str], first: int) -> dict[str, SourceFile]:
        """Read the heads of the items in files of PyTorch; the files' header numbers start at `first`."""
        ordered = [self._directory.absolute() / file for file in names]
        paths = dict(zip(names, map(str, ordered), strict=True))
        states = dict(zip(names, map_ordered(status_of, ordered, workers_at(ordered)), strict=True))
        faults = Faults(str(self._directory))
        for file, status in states.items():
            self._check_ranges(file, status.nbytes, faults)
        faults.raise_if_any(SourceError)
        is_tensor = self._metadata.tensors.__contains__
        tensors = {file: [(name, item) for name, item in self._items[file] if is_tensor(name)] for file in names}
        spans = {
            Span(paths[file], item.begin, item.nbytes): None  # many boxes may claim the same item; read it once
            for file in names
            for _, item in tensors[file]
            if not item.encoding
        }
        heads = dict(zip(spans, read_items([*spans]), strict=True))
        files = {}
        for number, file in enumerate(names, first):
            path, status = paths[file], states[file]
            entries = self._entries_of(path, tensors[file], heads)
            plain = (ZipPart(name, item.begin, item.nbytes) for name, item in self._items[file] if not item.encoding)
            index = FileIndex(DCP_ITEMS, entries, header_id=number, sums=Archives(tuple(dict.fromkeys(plain))))
            files[file] = SourceFile(path, status.nbytes, status.mtime_ns, index, status.change)
        return files

    def _check_ranges(self, file: str, nbytes: int, faults: Faults) -> None:
        """Add a fault if items lie outside a file, or overlap: these would read the same bytes several times."""
        ranges = sorted({(item.begin, item.begin + item.nbytes) for _, item in self._items[file]})
        end = max(end for _, end in ranges)
        if end > nbytes:
            faults.add(file, truncated_text(nbytes, end), code="truncated", hint=COPY_AGAIN)
        for (begin, end), (next_begin, _) in pairwise(ranges):
            if end > next_begin:
                fault = (
                    f"has an item at bytes {begin} to {end} and another from {next_begin} on, by "
                    f"{self._metadata.described_by}, which may be of another checkpoint"
                )
                faults.add(file, fault, code="overlapping-items")
                break

    def _entries_of(
        self, path: str, items: Sequence[tuple[str, Item]], heads: Mapping[Span, Entry | str]
    ) -> dict[str, Entry]:
        """Record the entry of each item of a tensor in a file; return those that can be read, by name."""
        read = [(name, item, heads[Span(path, item.begin, item.nbytes)]) for name, item in items if not item.encoding]
        if items and all(item.encoding == STREAM for _, item in items):
            from reshard.formats.dcp.zstd import read_streams  # not on every start

            sized = [((item.begin, item.nbytes), self._metadata.nbytes(name)) for name, item in items]
            self.streams[path], stream_entries = read_streams(path, sized)
            read = [(name, item, entry) for (name, item), entry in zip(items, stream_entries, strict=True)]
        entries: dict[str, Entry] = {}
        for name, item, entry in read:
            self.entries[item] = entry
            if not isinstance(entry, str):  # under its own name if a file has several boxes of a tensor
                entries[f"{name} {item.offsets}" if name in entries else name] = entry
        return entries

    def decoding(self) -> Decoding | None:
        """Return how to decode the files; None if all are plain."""
        if not self.streams:
            return None
        from reshard.formats.dcp.zstd import decoded_bytes  # not on every start
        from reshard.kits.chunks import Decoding

        cache_bytes = 0
        for name, declared in self._metadata.tensors.items():
            if any(item.encoding == STREAM for item in self._metadata.items.get(name, ())):
                nbytes = decoded_bytes(self._metadata.nbytes(name))
                cache_bytes = max(cache_bytes, min(_side_by_side(declared) * nbytes, max(_MOST_HELD, nbytes)))
        opening = max(unit.opening_bytes for unit in self.streams.values())
        return Decoding({path: each.chunks for path, each in self.streams.items()}, cache_bytes, opening)

    def entry(self, item: Item) -> Entry:
        """Return the entry of a box in a file; raise `SourceError` if it cannot be read."""
        encodings = ", ".join(map(describe, item.encoding[:3]))
        entry = self.entries.get(item, f"is encoded ({encodings}), which is not read")
        if isinstance(entry, str):
            raise SourceError(entry, code="unreadable-item")
        return entry


def _side_by_side(declared: DeclaredTensor) -> int:
    """Return how many boxes of a tensor share their rows: a band of rows is read from all of them in turn."""
    axis = next((axis for axis, extent in enumerate(declared.shape) if extent > 1), 0)
    starts = Counter(start[axis : axis + 1] for start, extents in declared.boxes if all(extents))
    return max(starts.values(), default=1)


def _has_header(path: Place, items: Sequence[Item]) -> bool:
    """Return whether a file is a safetensors file: all of hyper-parallel's are, and PyTorch's can be."""
    if not any(item.nbytes for item in items):
        return True
    if any(item.begin for item in items):
        return False
    reader = RangeReader(str(path), window=0)
    return safetensors.recognizes(reader.upto(0, 16), reader.size)


def _tensor(name: str, declared: DeclaredTensor, metadata: DCPMetadata, files: _DCPFiles, block_list: Blocks) -> Tensor:
    """Return a tensor; raise `SourceError` if it cannot be read."""
    blocks: list[tuple[Block, Extent]] = []
    dtypes = {declared.dtype: BY_NAME[declared.dtype]} if declared.dtype else {}
    offsets_by_location: dict[tuple[str, str, int], Shape] = {}
    for item in metadata.items.get(name, ()):
        entry = files.entry(item)
        first_offsets = offsets_by_location.setdefault((item.file, item.key, item.begin), item.offsets)
        if first_offsets != item.offsets and entry.nbytes:
            both = f"{shape_text(first_offsets)} and {shape_text(item.offsets)}"
            raise SourceError(f"has its boxes at {both} in one place of {item.file}", code="overlapping-items")
        shape = () if not declared.shape and entry.shape == (1,) else entry.shape
        if (item.offsets, shape) not in declared.boxes:
            expected = [shape_text(extents) for offsets, extents in sorted(declared.boxes) if offsets == item.offsets]
            raise SourceError(
                f"has shape {shape_text(shape)} at {shape_text(item.offsets)} in {item.file}; expected "
                f"{names(expected) or 'no box'}", code="wrong-shape",
            )  # fmt: skip
        dtypes[entry.dtype.name] = entry.dtype
        block, extent = _block(item.offsets, shape), Extent(files.numbers[item.file], entry.runs, entry.strides)
        if name in metadata.flat:
            blocks += _unflattened(declared.shape, metadata.flat[name], block, extent, entry.dtype.itemsize)
        else:
            blocks.append((block, extent))
    if not dtypes:
        raise SourceError(f"is in no file according to {metadata.described_by}", code="missing-blocks")
    if len(dtypes) > 1:
        raise SourceError(
            f"is {' and '.join(sorted(dtypes))} according to {metadata.described_by} and the files", code="mixed-dtypes"
        )
    (dtype,) = dtypes.values()
    return block_list.tensor(TensorSpec(name, dtype, metadata.flat.get(name, declared.shape)), blocks)


@lru_cache(maxsize=1 << 16)  # tensors are cut alike
def _block(offsets: Shape, shape: Shape) -> Block:
    return Block(offsets, tuple(map(add, offsets, shape)))


def _unflattened(
    stored: Shape, shape: Shape, block: Block, extent: Extent, itemsize: int
) -> Iterator[tuple[Block, Extent]]:
    """Yield the boxes of a tensor in a block of the flat form that Megatron-Core before 0.14 stores.

    A tensor whose ranks have equal parts is stored as a grid of the parts. The elements of each part lie in row-major
    order along one more dimension, which may be cut anywhere.

    Args:
        stored: the shape of the grid, and the number of elements of a part.
        shape: the shape of the tensor.
        block: a block of the flat form, within one part.
        extent: its place in a file.
        itemsize: the bytes of an element.

    >>> boxes = _unflattened((2, 1, 30), (6, 10), Block((1, 0, 17), (2, 1, 30)), Extent(0, ((0, 52),)), 4)
    >>> [str(box) for box, _ in boxes]
    ['[4:5, 7:10]', '[5:6, 0:10]']
    """
    grid = stored[:-1]
    if len(grid) != len(shape) or any(not count or size % count for size, count in zip(shape, grid, strict=True)):
        raise SourceError(
            f"is a grid of {shape_text(grid)} parts, which do not divide {shape_text(shape)}", code="not-divisible"
        )
    part = tuple(size // count for size, count in zip(shape, grid, strict=True))
    if prod(part) != stored[-1] or any(size > 1 for size in block.shape[:-1]):
        raise SourceError(
            f"has parts of {shape_text(part)} in {stored[-1]} elements, or several in a block", code="wrong-shape"
        )
    at = tuple(number * size for number, size in zip(block.start, part, strict=False))
    begin, step = 0, (extent.strides or (1,))[-1]
    for box in flat_boxes(part, block.start[-1], block.stop[-1]):
        strides = tuple(step * stride for stride in row_major(box.shape))
        yield (
            Block(tuple(map(add, at, box.start)), tuple(map(add, at, box.stop))),
            laid(extent, begin * step * itemsize, box.shape, strides, itemsize),
        )
        begin += box.size


def _warnings(directory: Place, listing: Sequence[str], metadata: DCPMetadata, files: _DCPFiles) -> Iterator[str]:
    if DCP_INDEX in listing and not directory.can.has_latency:  # it is written last; at a URL times are unknown
        saved = (directory / DCP_INDEX).status().mtime_ns + MTIME_TOLERANCE_NS
        if newer := [path for path, number in files.numbers.items() if files.files[number].mtime_ns > saved]:
            yield (
                f"{names(newer, most=3)} changed after {DCP_INDEX}, which comes last: copied in that order, or saving "
                "another checkpoint here was interrupted"
            )
    data = (path for path in listing if any(is_data_of(kind, path.rpartition("/")[2]) for kind in DCP_FILES))
    if unnamed := sorted(path for path in data if path not in files.numbers):
        yield f"{metadata.described_by} does not name {names(unnamed, most=3)}, which is not read"
    if unfinished := sorted(name for name in listing if name.endswith(".metadata.tmp")):
        yield f"{unfinished[0]} is there: saving another checkpoint here was interrupted, which may have replaced files"
    if several := [name for name in metadata.objects if len(metadata.items.get(name, ())) > 1]:
        yield f"several ranks have an object {names(several, most=3)} each; that of the first rank is taken"
