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

from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod
from operator import add
from typing import TYPE_CHECKING, Literal

from reshard.dtypes import BY_NAME
from reshard.errors import Faults, SourceError, names
from reshard.formats import safetensors
from reshard.formats.directories import DCP_FILES
from reshard.formats.entries import Extent, FileIndex, RangeReader
from reshard.formats.sets import DCP_INDEX, DCP_ITEMS
from reshard.layout.axes import row_major
from reshard.layout.block import Block, flat_boxes, shape_text
from reshard.readers.dcp.archive import Archives, ZipPart
from reshard.readers.dcp.metadata import BUCKET, BUCKETS, STREAM, DCPMetadata
from reshard.readers.dcp.torch_save import Span, read_items
from reshard.readers.huggingface import without_notes
from reshard.readers.listed import BlockList, nothing_readable
from reshard.readers.pickles import shown
from reshard.source.checkpoint import Checkpoint, Extras, Object, SourceFile, TensorSpec
from reshard.source.headers import read_indexes
from reshard.source.probe import compare_contents
from reshard.source.reshape import laid
from reshard.storage.places import any_store, workers_at
from reshard.storage.threads import map_ordered

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from reshard.formats.decoding import Decoding
    from reshard.formats.entries import Entry, Sums
    from reshard.layout.block import Shape
    from reshard.readers.dcp.metadata import Item, Stated
    from reshard.readers.dcp.zstd import Streams
    from reshard.source.checkpoint import Tensor
    from reshard.storage.base import Status
    from reshard.storage.places import Place

_MOST_HELD = 1 << 29  # bytes for the streams of a tensor that a thread decodes side by side
_WHILE_NS = 2_000_000_000  # of time stamps


COMMON, BACKEND = "common.pt", "metadata.json"
"""Files that Megatron-Core keeps beside: what is no tensor, where that is not an object; and how it is kept."""


def open_dcp(place: Place, there: Sequence[str], *, contents: bool | Literal["blocks"] = True) -> Checkpoint:
    """Open a distributed checkpoint, reading its metadata and the headers of its files.

    A tensor with missing blocks is unreadable, with the reason; a plan must drop it by name. Objects need not be named.

    Args:
        place: the directory of the checkpoint, or the common parent of several that make one checkpoint.
        there: the names of the files in it; paths if there are several directories.
        contents: compare samples of replicas.

    Raises:
        SourceError: the checkpoint is incomplete, or the metadata contradict themselves or the files; lists all faults.
    """
    said = DCPMetadata(place, there)
    return compare_contents(_checkpoint(place, there, said), {}, contents=contents)


def _checkpoint(place: Place, there: Sequence[str], said: DCPMetadata) -> Checkpoint:
    """Return the checkpoint that metadata and files describe."""
    held = _DCPFiles(place, there, said)
    listed = BlockList()
    tensors: dict[str, Tensor] = {}
    unreadable: dict[str, str] = {}
    for name, one in said.tensors.items():
        try:
            tensors[name] = _tensor(name, one, said, held, listed)
        except SourceError as error:
            unreadable[name] = error.message
    if not tensors:
        raise SourceError(f"{place}: {nothing_readable(unreadable)}", code="no-tensors")
    objects = {name: _object(place, said.items.get(name)) for name in said.objects}
    beside = {} if said.paths else _beside(place, there)
    bound = {name: BUCKET for name in tensors if name.startswith(BUCKETS)}
    return Checkpoint(
        str(place), tensors, held.files, held.ranks, warnings=tuple(_warnings(place, there, said, held)),
        unreadable=unreadable, coding=held.decoding(),
        extras=Extras(
            said.described_by, objects=objects, beside=beside, bound=bound, paths=None if beside else said.paths
        ),
    )  # fmt: skip


def _object(place: Place, items: Sequence[Item] | None) -> Object:
    """Return an object from its storage entries; if several ranks have one, that of the first."""
    if not items:
        return Object(problem="is an object that is not read")
    first = items[0]
    problem = f"is encoded ({names(map(shown, first.encoding))}), which is not read" if first.encoding else ""
    return Object(str(place.absolute() / first.file), first.begin, first.nbytes, problem)


def _beside(place: Place, there: Sequence[str]) -> dict[str, Object]:
    """Return the files that Megatron-Core writes next to the tensors; none if another program saved them."""
    held = {name: [path for path in there if path.rpartition("/")[2] == name] for name in (COMMON, BACKEND)}
    found = {}
    for name, some in held.items() if held[BACKEND] else ():
        try:
            if len(some) == 1:
                path = place.absolute() / some[0]
                found[name] = Object(str(path), 0, _status(path).nbytes)
            elif some:
                found[name] = Object(problem=f"is not read: {names(some)} are two of a kind")
        except SourceError as error:
            found[name] = Object(problem=f"is not read: {error.message}")
    return found


class _DCPFiles:
    """The files of tensors, and the entry of each box in them.

    Attributes:
        files: all files, in the order of ranks.
        ranks: the rank of each file.
        unlisted: tensors of safetensors files that the metadata do not list, by file.
        streams: files whose items are all zstd streams, by path.
    """

    def __init__(self, place: Place, there: Sequence[str], said: DCPMetadata) -> None:
        self._said = said
        items: dict[str, list[tuple[str, Item]]] = {}
        for name, some in said.items.items():
            for item in some:
                items.setdefault(item.file, []).append((name, item))
        faults = Faults(str(place))
        for name in sorted(items.keys() - set(there)):
            faults.add(name, f"is missing; {said.described_by} names it", code="missing-file")
        faults.raise_if_any(SourceError)
        by_rank: dict[int, list[str]] = {}
        for name in sorted(items):
            by_rank.setdefault(rank_of(name), []).append(name)
        ordered = [name for _, some in sorted(by_rank.items()) for name in some]
        self.ranks = tuple(rank for rank, some in sorted(by_rank.items()) for _ in some)
        self.numbers = {name: number for number, name in enumerate(ordered)}
        self.entries: dict[Item, Entry | str] = {}
        self.unlisted: dict[str, list[str]] = {}
        self.streams: dict[str, Streams] = {}
        headed = [name for name in ordered if _has_header(place / name, [item for _, item in items[name]])]
        indexes, _ = read_indexes({0: [place / name for name in headed]}, None)
        known = dict(zip(headed, map(without_notes, indexes), strict=True))
        for name, file in known.items():
            for _, item in items[name]:
                lacks = f"is not in {name}, where {said.described_by} says it is"
                self.entries[item] = file.index.entries.get(item.key, lacks)
            keys = {item.key for _, item in items[name]}
            self.unlisted[name] = sorted(key for key in file.index.entries if key not in keys)
        others = [name for name in ordered if name not in known]
        known |= self._read(place, [(name, items[name]) for name in others], len(headed), said.tensors)
        self.files = tuple(known[name] for name in ordered)

    def _read(
        self,
        place: Place,
        some: Sequence[tuple[str, Sequence[tuple[str, Item]]]],
        first: int,
        tensors: Collection[str],
    ) -> dict[str, SourceFile]:
        """Read the heads of the tensors in files; return the files, with headers numbered from 1."""
        paths = [place.absolute() / file for file, _ in some]
        states = list(map_ordered(_status, paths, workers_at(paths)))
        faults = Faults(str(place))
        for (file, items), status in zip(some, states, strict=True):
            places = sorted({(item.begin, item.begin + item.nbytes) for _, item in items})
            end = max(end for _, end in places)
            if end > status.nbytes:
                faults.add(file, f"is truncated: it has {status.nbytes} bytes of {end}", code="truncated")
            for (begin, end), (other, _) in pairwise(places):  # each would be read, of bytes that are there once
                if end > other:
                    faults.add(
                        file,
                        f"has an item at bytes {begin} to {end} and another from {other} on, by "
                        f"{self._said.described_by}, which may be of another checkpoint",
                        code="overlapping-items",
                    )
                    break
        faults.raise_if_any(SourceError)
        plain = [
            (number, name, item)
            for number, (_, items) in enumerate(some)
            for name, item in items
            if not item.encoding and name in tensors
        ]
        texts = list(map(str, paths))
        spans = [Span(texts[number], item.begin, item.nbytes) for number, _, item in plain]
        apart = list(dict.fromkeys(spans))  # any number of boxes may be said to be in one
        heads = dict(zip(apart, read_items(apart), strict=True))
        read = [(one, heads[span]) for one, span in zip(plain, spans, strict=True)]
        for number, (_, items) in enumerate(some):
            streams = [(name, item) for name, item in items if name in tensors]
            if streams and all(item.encoding == STREAM for _, item in items):
                found = self._read_streams(texts[number], streams)
                read += zip([(number, *one) for one in streams], found, strict=True)
        indexes: list[dict[str, Entry]] = [{} for _ in some]
        for (number, name, item), entry in read:
            self.entries[item] = entry
            if not isinstance(entry, str):  # under its own name if a file has several boxes of a tensor
                indexes[number][f"{name} {item.offsets}" if name in indexes[number] else name] = entry
        sums = [self._sums(items) for _, items in some]
        return {
            file: SourceFile(
                str(path), status.nbytes, status.mtime_ns, FileIndex(DCP_ITEMS, index, header_id=number, sums=carried),
                status.change,
            )
            for number, ((file, _), path, status, index, carried) in enumerate(
                zip(some, paths, states, indexes, sums, strict=True), first
            )
        }  # fmt: skip

    def _sums(self, items: Sequence[tuple[str, Item]]) -> Sums:
        """Return the checksums that the items of a file carry; other encodings than zstd have none that are known."""
        parts = {ZipPart(name, item.begin, item.nbytes): item.encoding for name, item in items}
        plain = Archives(tuple(part for part, encoding in parts.items() if not encoding))
        streams = [part for part, encoding in parts.items() if encoding == STREAM]
        if not streams:
            return plain
        from reshard.readers.dcp.zstd import StreamArchives  # not on every start

        said = self._said
        most = ((part, said.nbytes(part.name) if part.name in said.tensors else None) for part in streams)
        return StreamArchives(plain, tuple(most))

    def _read_streams(self, path: str, items: Sequence[tuple[str, Item]]) -> list[Entry | str]:
        """Read the heads of the items of a file of zstd streams, and record how to decode them."""
        from reshard.readers.dcp.zstd import read_streams  # not on every start

        sized = [((item.begin, item.nbytes), self._said.nbytes(name)) for name, item in items]
        self.streams[path], entries = read_streams(path, sized)
        return entries

    def decoding(self) -> Decoding | None:
        """Return how to decode the files; None if all are plain."""
        if not self.streams:
            return None
        from reshard.formats.decoding import Decoding  # not on every start

        held = 0
        for name, one in self._said.tensors.items():
            paths = {self.files[self.numbers[item.file]].path for item in self._said.items.get(name, ())}
            units = [self.streams[path] for path in paths if path in self.streams]
            if units:
                largest = max(unit.opened_bytes(self._said.nbytes(name)) for unit in units)
                held = max(held, min(_side_by_side(one) * largest, max(_MOST_HELD, largest)))
        opening = max(unit.opening_bytes for unit in self.streams.values())
        return Decoding(self.streams, held, opening)

    def entry(self, item: Item) -> Entry:
        """Return the entry of a box in a file; raise `SourceError` if it cannot be read."""
        encodings = ", ".join(map(shown, item.encoding[:3]))
        found = self.entries.get(item, f"is encoded ({encodings}), which is not read")
        if isinstance(found, str):
            raise SourceError(found, code="unreadable-item")
        return found


def _side_by_side(one: Stated) -> int:
    """Return the most boxes of a tensor that share a row along its first dimension longer than 1.

    A band of rows is read from all of them in turn. Replicas count once.
    """
    axis = next((axis for axis, extent in enumerate(one.shape) if extent > 1), None)
    if axis is None:
        return 1
    ends = sorted(
        end
        for start, extents in one.boxes
        for end in ((start[axis], 1), (start[axis] + extents[axis], -1))
        if extents[axis]
    )
    return max(accumulate(change for _, change in ends), default=1)


def _status(path: Place) -> Status:
    """Return the state of a file; evict an older file of this name that is held open."""
    any_store().size(str(path))
    return path.status()


def rank_of(path: str) -> int:
    """Return the rank that wrote a file, from its name; 0 if the name has no rank."""
    name = path.rpartition("/")[2]
    match = next(filter(None, (known.fullmatch(name) for known in DCP_FILES.values())), None)
    return int(match[1]) if match and match[1] else 0


def _has_header(path: Place, items: Sequence[Item]) -> bool:
    """Return whether a file is a safetensors file: all of hyper-parallel's are, and PyTorch's can be."""
    if not any(item.nbytes for item in items):
        return True
    if any(item.begin for item in items):
        return False
    reader = RangeReader(str(path), window=0)
    return safetensors.recognizes(reader.upto(0, 16), reader.size)


def _tensor(name: str, one: Stated, said: DCPMetadata, files: _DCPFiles, listed: BlockList) -> Tensor:
    """Return a tensor; raise `SourceError` if it cannot be read."""
    held = []
    dtypes = {one.dtype: BY_NAME[one.dtype]} if one.dtype else {}
    places: dict[tuple[str, str, int], Shape] = {}
    for item in said.items.get(name, ()):
        entry = files.entry(item)
        other = places.setdefault((item.file, item.key, item.begin), item.offsets)
        if other != item.offsets and entry.nbytes:
            both = f"{shape_text(other)} and {shape_text(item.offsets)}"
            raise SourceError(f"has its boxes at {both} in one place of {item.file}", code="overlapping-items")
        shape = () if not one.shape and entry.shape == (1,) else entry.shape
        if (item.offsets, shape) not in one.boxes:
            expected = [shape_text(extents) for offsets, extents in sorted(one.boxes) if offsets == item.offsets]
            where = f"at {shape_text(item.offsets)} in {item.file}"
            raise SourceError(
                f"has shape {shape_text(shape)} {where}; expected {names(expected) or 'no box'}", code="wrong-shape"
            )
        block, number = _block(item.offsets, shape), files.numbers[item.file]
        dtypes[entry.dtype.name] = entry.dtype
        at = Extent(number, entry.runs, entry.strides)
        if name not in said.flat:
            held.append((block, at))
            continue
        begin, width, step = 0, entry.dtype.itemsize, (at.strides or (1,))[-1]
        for part in _unflattened(one.shape, said.flat[name], block):
            strides = tuple(step * each for each in row_major(part.shape))
            held.append((part, laid(at, begin * step * width, part.shape, strides, width)))
            begin += part.size
    if not dtypes:
        raise SourceError(f"is in no file by {said.described_by}", code="missing-blocks")
    if len(dtypes) > 1:
        raise SourceError(
            f"is {' and '.join(sorted(dtypes))} by {said.described_by} and the files", code="mixed-dtypes"
        )
    (dtype,) = dtypes.values()
    found = listed.tensor(TensorSpec(name, dtype, said.flat.get(name, one.shape)), held)
    if isinstance(found, str):
        raise SourceError(found, code="missing-blocks")
    return found


@lru_cache(maxsize=1 << 16)  # tensors are cut alike
def _block(offsets: Shape, shape: Shape) -> Block:
    return Block(offsets, tuple(map(add, offsets, shape)))


def _unflattened(stored: Shape, shape: Shape, block: Block) -> list[Block]:
    """Return the boxes of a tensor in a block of the flat form that Megatron-Core before 0.14 stores.

    A tensor whose ranks have equal parts is stored as a grid of the parts. The elements of each part lie in row-major
    order along one more dimension, which may be cut anywhere.

    Args:
        stored: the shape of the grid, and the number of elements of a part.
        shape: the shape of the tensor.
        block: a block of the flat form, within one part.

    >>> [str(box) for box in _unflattened((2, 1, 30), (6, 10), Block((1, 0, 17), (2, 1, 30)))]
    ['[4:5, 7:10]', '[5:6, 0:10]']
    """
    grid = stored[:-1]
    if len(grid) != len(shape) or any(not count or extent % count for extent, count in zip(shape, grid, strict=True)):
        raise SourceError(
            f"is a grid of {shape_text(grid)} parts, which do not divide {shape_text(shape)}", code="not-divisible"
        )
    part = tuple(extent // count for extent, count in zip(shape, grid, strict=True))
    if prod(part) != stored[-1] or any(extent > 1 for extent in block.shape[:-1]):
        raise SourceError(
            f"has parts of {shape_text(part)} in {stored[-1]} elements, or several in a block", code="wrong-shape"
        )
    at = tuple(number * extent for number, extent in zip(block.start, part, strict=False))
    return [
        Block(tuple(map(add, at, box.start)), tuple(map(add, at, box.stop)))
        for box in flat_boxes(part, block.start[-1], block.stop[-1])
    ]


def _warnings(place: Place, there: Sequence[str], said: DCPMetadata, files: _DCPFiles) -> Iterator[str]:
    if DCP_INDEX in there:  # which comes last, but may be copied first
        saved = (place / DCP_INDEX).status().mtime_ns + _WHILE_NS
        if newer := [path for path, number in files.numbers.items() if files.files[number].mtime_ns > saved]:
            yield (
                f"{names(newer, most=3)} changed after {DCP_INDEX}, which comes last: copied in that order, or saving "
                "another checkpoint here was interrupted"
            )
    own = [path for path in there if any(known.fullmatch(path.rpartition("/")[2]) for known in DCP_FILES.values())]
    if others := sorted(path for path in own if path not in files.numbers):
        yield f"{said.described_by} does not name {names(others, most=3)}, which is not read"
    if unfinished := sorted(name for name in there if name.endswith(".metadata.tmp")):
        yield f"{unfinished[0]} is there: saving another checkpoint here was interrupted, which may have replaced files"
    for name, some in files.unlisted.items():
        if some:
            yield f"{name} has {names(some, most=3)}, which {said.described_by} does not list"
    if several := [name for name in said.objects if len(said.items.get(name, ())) > 1]:
        yield f"several ranks have an object {names(several, most=3)} each; that of the first rank is taken"
