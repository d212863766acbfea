"""Opening a distributed checkpoint (DCP) of PyTorch, Megatron-Core or hyper-parallel: its metadata list all boxes.

`.metadata`, which comes last, is a pickle of the program's own classes; where every rank wrote its own, there is one a
rank, with the boxes of that rank. Of each tensor they have the dtype, the shape and the boxes by their offsets, and of
each box the file that has it; several files may have the same one. Classes are told by their names alone: modules move.

* PyTorch's files have one item after the other, each of which `torch.save` made (`torch_save`). On request they
  are safetensors files, whose headers are right where the metadata are not.
* hyper-parallel's files are safetensors files, in which a box is under the name of its tensor, or under a key of its
  own where a rank has several.

What the files say is compared with the metadata. Objects are pickled one by one, and not read.

Sources: PyTorch 2.13 `distributed/checkpoint/{metadata,filesystem}.py`, megatron-core 0.16.1 and 0.12.3
`dist_checkpointing/`, hyper-parallel `core/distributed_checkpoint` of September 2026 and `core/checkpoint` of March
2026, and what these wrote (`tests/data/dcp`, `tests/data/checkpoint2`).
"""

from __future__ import annotations

from math import prod
from operator import add
from typing import TYPE_CHECKING, Literal

from reshard.dtypes import BY_NAME
from reshard.errors import Faults, SourceError, names
from reshard.formats import safetensors
from reshard.formats.entries import Extent, FileIndex, RangeReader, part_of
from reshard.layout.block import Block, flat_boxes, shape_text
from reshard.readers.dcp.metadata import FILES, Metadata
from reshard.readers.dcp.torch_save import Span, read_items
from reshard.readers.huggingface import without_notes
from reshard.readers.listed import Listed, nothing_readable
from reshard.source.checkpoint import Checkpoint, SourceFile, TensorSpec
from reshard.source.headers import read_indexes
from reshard.source.probe import compare_contents
from reshard.storage.places import of_each

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reshard.formats.entries import Entry
    from reshard.layout.block import Shape
    from reshard.readers.dcp.metadata import Item, Stated
    from reshard.source.checkpoint import Tensor
    from reshard.storage.places import Place


def open_dcp(place: Place, there: Sequence[str], *, contents: bool | Literal["blocks"] = True) -> Checkpoint:
    """Open a distributed checkpoint, reading its metadata and the headers of its files.

    A tensor of which blocks are missing is unreadable, with the reason: a plan needs it dropped by name. Objects are
    dropped without that.

    Args:
        place: its directory.
        there: the names of what is in it.
        contents: compare samples of replicas.

    Raises:
        SourceError: it is incomplete, or the metadata contradict themselves or the files; all at once.
    """
    said = Metadata(place, there)
    return compare_contents(_checkpoint(place, there, said), {}, contents=contents)


def _checkpoint(place: Place, there: Sequence[str], said: Metadata) -> Checkpoint:
    """Join metadata and files."""
    held = _Files(place, there, said)
    listed = Listed()
    tensors: dict[str, Tensor] = {}
    unreadable = {name: reason for name, reason in said.refused.items() if name in said.tensors}
    for name, one in said.tensors.items():
        try:
            if name not in unreadable:
                tensors[name] = _tensor(name, one, said, held, listed)
        except SourceError as error:
            unreadable[name] = str(error)
    if not tensors:
        raise SourceError(f"{place}: {nothing_readable(unreadable)}")
    return Checkpoint(
        str(place), tensors, held.files, held.ranks, warnings=tuple(_warnings(there, said, held)),
        unreadable=unreadable, objects=said.objects, described_by=said.described_by,
    )  # fmt: skip


class _Files:
    """The files of tensors, and what each has of a box.

    Attributes:
        files: all, in the order of ranks.
        ranks: the rank of each.
        unlisted: what safetensors files have that the metadata do not list, by file.
    """

    def __init__(self, place: Place, there: Sequence[str], said: Metadata) -> None:
        items: dict[str, list[tuple[str, Item]]] = {}
        for name, some in said.items.items():
            for item in some:
                items.setdefault(item.file, []).append((name, item))
        faults = Faults(str(place))
        for name in sorted(items.keys() - set(there)):
            faults.add(name, f"is not there, and {said.described_by} names it; was saving it interrupted?")
        faults.raise_if_any(SourceError)
        by_rank: dict[int, list[str]] = {}
        for name in sorted(items):
            by_rank.setdefault(_rank_of(name), []).append(name)
        ordered = [name for _, some in sorted(by_rank.items()) for name in some]
        self.ranks = tuple(rank for rank, some in sorted(by_rank.items()) for _ in some)
        self.numbers = {name: number for number, name in enumerate(ordered)}
        self.entries: dict[Item, Entry | str] = {}
        self.unlisted: dict[str, list[str]] = {}
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
        known |= self._read(place, [(name, items[name]) for name in others], len(headed))
        self.files = tuple(known[name] for name in ordered)

    def _read(
        self, place: Place, some: Sequence[tuple[str, Sequence[tuple[str, Item]]]], first: int
    ) -> dict[str, SourceFile]:
        """Read the heads of the items of files; return these, whose headers are numbered from one on."""
        paths = [place.absolute() / file for file, _ in some]
        states = list(of_each(lambda path: path.status(), paths))
        faults = Faults(str(place))
        for (file, items), status in zip(some, states, strict=True):
            end = max(item.begin + item.nbytes for _, item in items)
            if end > status.nbytes:
                faults.add(file, f"has {status.nbytes} bytes; its items end at {end}; was saving it interrupted?")
        faults.raise_if_any(SourceError)
        every = [
            (number, name, item) for number, (_, items) in enumerate(some) for name, item in items if not item.encoding
        ]
        spans = [Span(str(paths[number]), item.begin, item.nbytes) for number, _, item in every]
        indexes: list[dict[str, Entry]] = [{} for _ in some]
        for (number, name, item), found in zip(every, read_items(spans), strict=True):
            self.entries[item] = found
            if not isinstance(found, str):  # under a name of its own, where a file has several boxes of a tensor
                indexes[number][f"{name} {item.offsets}" if name in indexes[number] else name] = found
        return {
            file: SourceFile(
                str(path), status.nbytes, status.mtime_ns, FileIndex("distcp", index, header=number), status.change
            )
            for number, ((file, _), path, status, index) in enumerate(
                zip(some, paths, states, indexes, strict=True), first
            )
        }

    def entry(self, item: Item) -> Entry:
        """Return what a file has of a box; raise `SourceError` where it cannot be read."""
        found = self.entries.get(item, f"is encoded ({item.encoding}), which is not read")
        if isinstance(found, str):
            raise SourceError(found)
        return found


def _rank_of(name: str) -> int:
    match = next(filter(None, (known.fullmatch(name) for known in FILES.values())), None)
    return int(match["rank"]) if match and match["rank"] else 0


def _has_header(path: Place, items: Sequence[Item]) -> bool:
    """Return whether a file is a safetensors file: all of hyper-parallel's are, and PyTorch's can be."""
    if not any(item.nbytes for item in items):
        return True
    if any(item.begin for item in items):
        return False
    reader = RangeReader(str(path), window=0)
    return safetensors.recognizes(reader.upto(0, 16), reader.size)


def _tensor(name: str, one: Stated, said: Metadata, files: _Files, listed: Listed) -> Tensor:
    """Return a tensor; raise `SourceError` where it cannot be read."""
    held = []
    dtypes = {one.dtype: BY_NAME[one.dtype]} if one.dtype else {}
    for item in said.items.get(name, ()):
        entry = files.entry(item)
        shape = () if not one.shape and entry.shape == (1,) else entry.shape
        if (item.offsets, shape) not in one.boxes:
            there = [shape_text(extents) for offsets, extents in sorted(one.boxes) if offsets == item.offsets]
            where = f"at {shape_text(item.offsets)} in {item.file}"
            raise SourceError(f"is of shape {shape_text(shape)} {where}; expected {names(there) or 'no box'} there")
        stop = tuple(begin + extent for begin, extent in zip(item.offsets, shape, strict=True))
        block, number = Block(item.offsets, stop), files.numbers[item.file]
        dtypes[entry.dtype.name] = entry.dtype
        if name not in said.flat:
            held.append((block, Extent(number, entry.runs)))
            continue
        begin = 0
        for part in _unflattened(one.shape, said.flat[name], block):
            nbytes = part.size * entry.dtype.itemsize
            held.append((part, Extent(number, part_of(entry.runs, begin, nbytes))))
            begin += nbytes
    if len(dtypes) != 1:
        raise SourceError(f"is {' and '.join(sorted(dtypes)) or 'in no file'}, as {said.described_by} and files say")
    (dtype,) = dtypes.values()
    found = listed.tensor(TensorSpec(name, dtype, said.flat.get(name, one.shape)), held)
    if isinstance(found, str):
        raise SourceError(found)
    return found


def _unflattened(stored: Shape, shape: Shape, block: Block) -> list[Block]:
    """Return which boxes of a tensor a block has, of what Megatron-Core before 0.14 kept flattened.

    A tensor of which ranks have equal parts is stored as a grid of these, the elements of each in row-major order along
    one more dimension, which is cut anywhere.

    Args:
        stored: the shape of the grid, and how many elements a part has.
        shape: the tensor's.
        block: of what is stored, within one part.

    >>> [str(box) for box in _unflattened((2, 1, 30), (6, 10), Block((1, 0, 17), (2, 1, 30)))]
    ['[4:5, 7:10]', '[5:6, 0:10]']
    """
    grid = stored[:-1]
    if len(grid) != len(shape) or any(not count or extent % count for extent, count in zip(shape, grid, strict=True)):
        raise SourceError(f"is a grid of {shape_text(grid)} parts of {shape_text(shape)}, which these do not divide")
    part = tuple(extent // count for extent, count in zip(shape, grid, strict=True))
    if prod(part) != stored[-1] or any(extent > 1 for extent in block.shape[:-1]):
        raise SourceError(f"has parts of {shape_text(part)} in {stored[-1]} elements, or several of them in a block")
    at = tuple(number * extent for number, extent in zip(block.start, part, strict=False))
    return [
        Block(tuple(map(add, at, box.start)), tuple(map(add, at, box.stop)))
        for box in flat_boxes(part, block.start[-1], block.stop[-1])
    ]


def _warnings(there: Sequence[str], said: Metadata, files: _Files) -> Iterator[str]:
    own = [name for name in there if any(known.fullmatch(name) for known in FILES.values())]
    if others := sorted(name for name in own if name not in files.numbers):
        yield f"{said.described_by} does not name {names(others, most=3)}, which is not read"
    for name, some in files.unlisted.items():
        if some:
            yield f"{name} has {names(some, most=3)}, which {said.described_by} does not list"
    if "common.pt" in there:
        yield "common.pt, which has Megatron's arguments and step, is not read"
