"""Opening a distributed checkpoint (DCP) of hyper-parallel: its metadata list the boxes of every tensor.

`.metadata`, which comes last, is a pickle of the program's own classes; where every rank wrote its own, there is one a
rank, with the boxes of that rank. Of each tensor they have the dtype, the shape and the boxes by their offsets, and of
each box the file that has it; several files may have the same one. Classes are told by their names alone: the module
that has them moved from `hyper_parallel.core.checkpoint` to `hyper_parallel.core.distributed_checkpoint`.

A file of tensors is a whole safetensors file, in which a box is under the name of its tensor, or under a key of its own
where a rank has several. What its header says is compared with the metadata. Objects are pickled one by one, and not
read.

Sources: hyper-parallel `core/distributed_checkpoint/{metadata,filesystem_storage,standard_planner}.py` of September
2026, `core/checkpoint` of March 2026, and what that wrote (`tests/data/checkpoint2`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from reshard.dtypes import BY_NAME
from reshard.errors import Faults, SourceError, names
from reshard.formats.directories import DCP
from reshard.formats.entries import Extent, RangeReader
from reshard.layout.block import LONGEST_NAME, Block, is_possible, shape_text
from reshard.readers.pickles import Name, Pairs, Record, unpickled
from reshard.source.checkpoint import Checkpoint, TensorSpec
from reshard.source.headers import indexed
from reshard.source.listed import Listed
from reshard.source.probe import compare_contents
from reshard.storage.small import is_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reshard.layout.block import Shape
    from reshard.source.checkpoint import SourceFile, Tensor
    from reshard.storage.places import Place

METADATA = ".metadata"

_WHAT = "the metadata of a distributed checkpoint (DCP)"
_MOST_BOXES = 1 << 21

_OF_RANK = re.compile(r"(?:\.rank|__|)(\d{1,9})(?:_metadata|\.metadata)")
_RANK_OF_FILE = re.compile(r"_rank(\d{1,9})_\.safetensors")


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
    said = _Metadata(place, _metadata_files(place, there))
    return compare_contents(_checkpoint(place, there, said), {}, contents=contents)


def _metadata_files(place: Place, there: Sequence[str]) -> list[str]:
    """Return the names of the metadata: one file, or one a rank."""
    if METADATA in there:
        return [METADATA]
    by_rank = {int(match[1]): name for name in there if (match := _OF_RANK.fullmatch(name))}
    if not by_rank:
        shown = f"{DCP.shown_by(place, sorted(there))} {DCP.problem}"
        raise SourceError(f"{place}: {shown}, and has no {METADATA}, which comes last; was saving it interrupted?")
    absent = [rank for rank in range(max(by_rank)) if rank not in by_rank]
    if absent:
        raise SourceError(f"{place}: has no metadata of rank {names(absent)}, and some of rank {max(by_rank)}")
    return [name for _, name in sorted(by_rank.items())]


class _Tensor(NamedTuple):
    """A tensor as the metadata list it.

    Attributes:
        dtype: its name; empty where it is not known.
        shape: of the whole tensor.
        boxes: the offsets and extents of each box; an empty one may have the offsets of another.
    """

    dtype: str
    shape: Shape
    boxes: set[tuple[Shape, Shape]]


class _Item(NamedTuple):
    """Where a box is: its offsets, a file, and the key in the file."""

    offsets: Shape
    file: str
    key: str


class _Metadata:
    """What the metadata say, read with nothing believed; the parts of all ranks are joined."""

    def __init__(self, place: Place, files: Sequence[str]) -> None:
        self.described_by = names(files, most=1)
        self.tensors: dict[str, _Tensor] = {}
        self.objects: dict[str, str] = {}
        self.items: dict[str, list[_Item]] = {}
        self.known: dict[Record, tuple[Shape, Shape]] = {}
        self.count = 0
        for name in files:
            content = unpickled(RangeReader(str(place / name), window=0), _WHAT)
            try:
                self._add(content)
            except SourceError as error:
                raise SourceError(f"{place / name}: {error}") from None

    def _add(self, content: object) -> None:
        if not (isinstance(content, Record) and content.name.endswith("Metadata")):
            raise SourceError(f"is not {_WHAT}")
        for name, one in _pairs(content, "state_dict_metadata"):
            kind = one.name if isinstance(one, Record) else ""
            if not isinstance(name, str) or not is_text(name) or len(name.encode()) > LONGEST_NAME:
                raise SourceError(
                    f"{name!r:.60} is the name of a tensor; expected at most {LONGEST_NAME} bytes of text"
                )
            if kind == "BytesStorageMetadata":
                self.objects[name] = "a pickled object, which is not read"
            elif kind == "TensorStorageMetadata":
                self._add_tensor(name, one)
            else:
                raise SourceError(f"{name!r:.60} is a {kind or 'value'!r:.60}; expected a tensor or an object")
        both = self.tensors.keys() & self.objects.keys()
        if both:
            raise SourceError(f"{names(sorted(both), most=3)} is both a tensor and an object")
        for index, info in _pairs(content, "storage_data"):
            self._add_item(index, info)

    def _add_tensor(self, name: str, one: Record) -> None:
        shape = _numbers(one.field("size"))
        if not is_possible(shape):
            raise SourceError(f"tensor {name!r:.60} has the shape {shape_text(shape)}, which no array can have")
        found = _Tensor(_dtype(one.field("properties")), shape, set())
        known = self.tensors.setdefault(name, found)
        if (known.dtype, known.shape) != (found.dtype, found.shape):
            ranks = f"{known.dtype} {shape_text(known.shape)} and {found.dtype} {shape_text(found.shape)}"
            raise SourceError(f"tensor {name!r:.60} is {ranks}, as different ranks say")
        chunks = one.field("chunks")
        if not isinstance(chunks, list) or not all(isinstance(chunk, Record) for chunk in chunks):
            raise SourceError(f"tensor {name!r:.60} has no list of boxes")
        self.count += len(chunks)
        if self.count > _MOST_BOXES:  # which a file can repeat without being large
            raise SourceError(f"has more than {_MOST_BOXES:,} boxes")
        boxes = {self._box(chunk) for chunk in chunks}
        if not all(len(shape) == len(offsets) == len(extents) for offsets, extents in boxes):
            raise SourceError(f"tensor {name!r:.60} of shape {shape_text(shape)} has a box of other dimensions")
        known.boxes.update(boxes)

    def _box(self, chunk: Record) -> tuple[Shape, Shape]:
        """Return the offsets and extents of a box."""
        if chunk not in self.known:
            self.known[chunk] = _numbers(chunk.field("offsets")), _numbers(chunk.field("sizes"))
        return self.known[chunk]

    def _add_item(self, index: object, info: object) -> None:
        if not (isinstance(index, Record) and isinstance(info, Record)):
            raise SourceError("has a place that is not one of a box")
        if info.name != "StorageInfo":
            raise SourceError(
                "is of a distributed checkpoint (DCP) of PyTorch or Megatron; expected one of hyper-parallel; such "
                "checkpoints are not read yet: have the program that wrote it save whole tensors as safetensors"
            )
        name, file, key = index.field("fqn"), info.field("relative_path"), info.field("tensor_key")
        if isinstance(name, str) and name in self.objects:
            return
        if not isinstance(name, str) or name not in self.tensors:
            raise SourceError(f"has a place of {name!r:.60}, and no such tensor")
        if not isinstance(file, str) or not _RANK_OF_FILE.fullmatch(file):
            raise SourceError(f"tensor {name!r:.60} is in {file!r:.60}; expected _rank0_.safetensors and so on")
        key = name if key is None else key
        if not isinstance(key, str):
            raise SourceError(f"tensor {name!r:.60} has {key!r:.60} for a tensor_key; expected text")
        self.items.setdefault(name, []).append(_Item(_numbers(index.field("offset")), file, key))


def _pairs(content: Record, name: str) -> Iterator[tuple[Any, Any]]:
    found = content.field(name)
    if not isinstance(found, Pairs):
        raise SourceError(f"has no {name}; expected {_WHAT}")
    return found.items()


def _numbers(value: object) -> Shape:
    """Return a shape or offsets: a tuple, or what would make one of it."""
    if isinstance(value, Record) and isinstance(value.arguments, tuple) and len(value.arguments) == 1:
        (value,) = value.arguments
    if not isinstance(value, tuple | list) or any(type(one) is not int or not 0 <= one < 1 << 63 for one in value):
        raise SourceError(f"has {value!r:.60} for a shape or offsets; expected whole numbers")
    return tuple(value)


def _dtype(properties: object) -> str:
    """Return the name of a dtype from the properties of a tensor; empty where it is not known."""
    found = properties.field("dtype") if isinstance(properties, Record) else None
    text = found.name if isinstance(found, Name) else str(found)
    known = BY_NAME.get(text.removeprefix("torch.").lower())
    return known.name if known else ""


def _checkpoint(place: Place, there: Sequence[str], said: _Metadata) -> Checkpoint:
    """Join metadata and files."""
    faults = Faults(str(place))
    by_rank: dict[int, list[Place]] = {}
    for name in sorted({item.file for items in said.items.values() for item in items}):
        if name not in there:
            faults.add(name, f"is not there, and {said.described_by} names it; was saving it interrupted?")
        match = _RANK_OF_FILE.fullmatch(name)
        by_rank.setdefault(int(match[1]) if match else 0, []).append(place / name)
    faults.raise_if_any(SourceError)
    files, ranks = indexed(dict(sorted(by_rank.items())), None)
    numbers = {file.path.rpartition("/")[2]: number for number, file in enumerate(files)}
    listed = Listed()
    tensors: dict[str, Tensor] = {}
    unreadable: dict[str, str] = {}
    for name, one in said.tensors.items():
        try:
            tensors[name] = _tensor(name, one, said, files, numbers, listed)
        except SourceError as error:
            unreadable[name] = str(error)
    if not tensors:
        raise SourceError(f"{place}: holds no tensor that can be read; was saving it interrupted?")
    return Checkpoint(
        str(place), tensors, files, ranks, warnings=tuple(_warnings(there, said, files)), unreadable=unreadable,
        objects=said.objects, described_by=said.described_by,
    )  # fmt: skip


def _tensor(
    name: str, one: _Tensor, said: _Metadata, files: Sequence[SourceFile], numbers: dict[str, int], listed: Listed
) -> Tensor:
    """Return a tensor; raise `SourceError` where it cannot be read."""
    held = []
    dtypes = {one.dtype: BY_NAME[one.dtype]} if one.dtype else {}
    for item in said.items.get(name, ()):
        entry = files[numbers[item.file]].index.entries.get(item.key)
        if entry is None:
            raise SourceError(f"is not in {item.file}, where {said.described_by} says it is")
        shape = () if not one.shape and entry.shape == (1,) else entry.shape
        if (item.offsets, shape) not in one.boxes:
            there = [shape_text(extents) for offsets, extents in sorted(one.boxes) if offsets == item.offsets]
            where = f"at {shape_text(item.offsets)} in {item.file}"
            raise SourceError(f"is of shape {shape_text(shape)} {where}; expected {names(there) or 'no box'} there")
        stop = tuple(begin + extent for begin, extent in zip(item.offsets, shape, strict=True))
        held.append((Block(item.offsets, stop), Extent(numbers[item.file], entry.runs)))
        dtypes[entry.dtype.name] = entry.dtype
    if len(dtypes) != 1:
        raise SourceError(f"is {' and '.join(sorted(dtypes)) or 'in no file'}, as {said.described_by} and files say")
    (dtype,) = dtypes.values()
    found = listed.tensor(TensorSpec(name, dtype, one.shape), held)
    if isinstance(found, str):
        raise SourceError(found)
    return found


def _warnings(there: Sequence[str], said: _Metadata, files: Sequence[SourceFile]) -> Iterator[str]:
    named = {item.file for items in said.items.values() for item in items}
    if others := sorted(name for name in there if _RANK_OF_FILE.fullmatch(name) and name not in named):
        yield f"{said.described_by} does not name {names(others, most=3)}, which is not read"
    keys = {(item.file, item.key) for items in said.items.values() for item in items}
    for file in files:
        name = file.path.rpartition("/")[2]
        if unlisted := sorted(key for key in file.index.entries if (name, key) not in keys):
            yield f"{name} has {names(unlisted, most=3)}, which {said.described_by} does not list"
