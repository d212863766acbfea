"""What the metadata of a distributed checkpoint say, as `readers.pickles` reads them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.dtypes import BY_NAME
from reshard.errors import SourceError, names
from reshard.formats.directories import DCP
from reshard.formats.entries import RangeReader
from reshard.formats.sets import DCP_INDEX
from reshard.layout.block import LONGEST_NAME, is_possible, shape_text
from reshard.readers.pickles import Name, Pairs, Record, numbers, shown, unpickled
from reshard.storage.small import is_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reshard.layout.block import Shape
    from reshard.storage.places import Place

_WHAT = "the metadata of a distributed checkpoint (DCP)"
_MOST_BOXES = 1 << 21

_OF_RANK = re.compile(r"(?:\.rank|__|)(\d{1,9})(?:_metadata|\.metadata)")
FILES = {
    "StorageInfo": re.compile(r"_rank(?P<rank>\d{1,9})_\.safetensors"),
    "_StorageInfo": re.compile(r"(?:[^/\\]*__(?P<rank>\d{1,9})_\d+|[^/\\]+)\.distcp", re.DOTALL),
}
"""The names of files of tensors, by the class that says which has a box: hyper-parallel's, PyTorch's."""

_BUCKET = (
    "is a bucket of Megatron's optimizer (dp_reshardable), of which nothing says what it holds: it can only be resumed "
    "with the same layout"
)
_WHOLE_SHAPE = "nd_reformulated_orig_global_shape"
_BUCKETS = "optimizer.distributed.dp_group_idx_"


class Stated(NamedTuple):
    """A tensor as the metadata list it.

    Attributes:
        dtype: its name; empty where it is not known.
        shape: of the whole tensor.
        boxes: the offsets and extents of each box; an empty one may have the offsets of another.
    """

    dtype: str
    shape: Shape
    boxes: set[tuple[Shape, Shape]]


class Item(NamedTuple):
    """Where a box is.

    Attributes:
        offsets: of the box in its tensor.
        file: the name of the file that has it.
        key: its name in a safetensors file.
        begin: where an item of PyTorch's begins.
        nbytes: how long that is; 0 of a box in hyper-parallel's.
        encoding: how the item is encoded; empty where it is not.
    """

    offsets: Shape
    file: str
    key: str
    begin: int
    nbytes: int
    encoding: str


class Metadata:
    """What the metadata say, read with nothing believed; the parts of all ranks are joined.

    Attributes:
        described_by: the names of their files.
        tensors: each tensor, by name.
        objects: what is not a tensor, and what that is.
        items: the places of the boxes of each tensor.
        refused: tensors that cannot be read, with the reason.
        flat: the whole shapes of tensors that are stored flattened.
    """

    def __init__(self, place: Place, there: Sequence[str]) -> None:
        files = _files(place, there)
        self.described_by = names(files, most=1)
        self.tensors: dict[str, Stated] = {}
        self.objects: dict[str, str] = {}
        self.items: dict[str, list[Item]] = {}
        self.refused: dict[str, str] = {}
        self.flat: dict[str, Shape] = {}
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
                    f"{shown(name)} is the name of a tensor; expected at most {LONGEST_NAME} bytes of text"
                )
            if kind == "BytesStorageMetadata":
                self.objects[name] = "a pickled object, which is not read"
            elif kind == "TensorStorageMetadata":
                self._add_tensor(name, one)
            else:
                raise SourceError(f"{shown(name)} is a {shown(kind or 'value')}; expected a tensor or an object")
        both = self.tensors.keys() & self.objects.keys()
        if both:
            raise SourceError(f"{names(sorted(both), most=3)} is both a tensor and an object")
        for index, info in _pairs(content, "storage_data"):
            self._add_item(index, info)
        reshaped = content.field("mcore_data")
        for name, one in reshaped.items() if isinstance(reshaped, Pairs) else ():
            if isinstance(name, str) and isinstance(one, Pairs) and _WHOLE_SHAPE in (keys := one[::2]):
                self.flat[name] = shape = numbers(one[2 * keys.index(_WHOLE_SHAPE) + 1])
                if not is_possible(shape):
                    raise SourceError(f"tensor {shown(name)} was of shape {shape_text(shape)}, which no array can have")
        self.refused |= {name: _BUCKET for name in self.tensors if name.startswith(_BUCKETS)}

    def _add_tensor(self, name: str, one: Record) -> None:
        shape = numbers(one.field("size"))
        if not is_possible(shape):
            raise SourceError(f"tensor {shown(name)} has the shape {shape_text(shape)}, which no array can have")
        found = Stated(_dtype(one.field("properties")), shape, set())
        known = self.tensors.setdefault(name, found)
        if (known.dtype, known.shape) != (found.dtype, found.shape):
            ranks = f"{known.dtype} {shape_text(known.shape)} and {found.dtype} {shape_text(found.shape)}"
            raise SourceError(f"tensor {shown(name)} is {ranks}, as different ranks say")
        chunks = one.field("chunks")
        if not isinstance(chunks, list) or not all(isinstance(chunk, Record) for chunk in chunks):
            raise SourceError(f"tensor {shown(name)} has no list of boxes")
        self.count += len(chunks)
        if self.count > _MOST_BOXES:  # which a file can repeat without being large
            raise SourceError(f"has more than {_MOST_BOXES:,} boxes")
        boxes = {self._box(chunk) for chunk in chunks}
        if not all(len(shape) == len(offsets) == len(extents) for offsets, extents in boxes):
            raise SourceError(f"tensor {shown(name)} of shape {shape_text(shape)} has a box of other dimensions")
        known.boxes.update(boxes)

    def _box(self, chunk: Record) -> tuple[Shape, Shape]:
        """Return the offsets and extents of a box."""
        if chunk not in self.known:
            self.known[chunk] = numbers(chunk.field("offsets")), numbers(chunk.field("sizes"))
        return self.known[chunk]

    def _add_item(self, index: object, info: object) -> None:
        if not (isinstance(index, Record) and isinstance(info, Record)):
            raise SourceError("has a place that is not one of a box")
        name, file, key = index.field("fqn"), info.field("relative_path"), info.field("tensor_key")
        if isinstance(name, str) and name in self.objects:
            return
        if not isinstance(name, str) or name not in self.tensors:
            raise SourceError(f"has a place of {shown(name)}, and no such tensor")
        known = FILES.get(info.name)
        if known is None:
            raise SourceError(f"has a place of {shown(name)} that is a {shown(info.name)}, which is not known")
        if not isinstance(file, str) or not known.fullmatch(file) or not file.isprintable():
            raise SourceError(
                f"tensor {shown(name)} is in {shown(file)}; expected a file of a rank, without directories"
            )
        key = name if key is None else key
        if not isinstance(key, str):
            raise SourceError(f"tensor {shown(name)} has {shown(key)} for a tensor_key; expected text")
        begin, nbytes, encoding = 0, 0, info.field("transform_descriptors")
        if info.name == "_StorageInfo":
            begin, nbytes = numbers((info.field("offset"), info.field("length")))
        said = ", ".join(map(shown, encoding[:3])) if isinstance(encoding, list) else "" if not encoding else "?"
        item = Item(numbers(index.field("offset")), file, key, begin, nbytes, said)
        self.items.setdefault(name, []).append(item)


def _files(place: Place, there: Sequence[str]) -> list[str]:
    """Return the names of the metadata: one file, or one a rank."""
    if DCP_INDEX in there:
        return [DCP_INDEX]
    by_rank = {int(match[1]): name for name in there if (match := _OF_RANK.fullmatch(name))}
    if not by_rank:
        shown = f"{DCP.shown_by(place, sorted(there))} {DCP.problem}"
        raise SourceError(f"{place}: {shown}, and has no {DCP_INDEX}, which comes last; was saving it interrupted?")
    absent = [rank for rank in range(max(by_rank)) if rank not in by_rank]
    if absent:
        raise SourceError(f"{place}: has no metadata of rank {names(absent)}, and some of rank {max(by_rank)}")
    return [name for _, name in sorted(by_rank.items())]


def _pairs(content: Record, name: str) -> Iterator[tuple[Any, Any]]:
    found = content.field(name)
    if not isinstance(found, Pairs):
        raise SourceError(f"has no {name}; expected {_WHAT}")
    return found.items()


def _dtype(properties: object) -> str:
    """Return the name of a dtype from the properties of a tensor; empty where it is not known."""
    found = properties.field("dtype") if isinstance(properties, Record) else None
    if isinstance(properties, Record) and isinstance(properties.state, tuple) and properties.state:
        found = properties.state[0]  # as PyTorch's own reduction has them
    text = found.name if isinstance(found, Name) else str(found)
    known = BY_NAME.get(text.removeprefix("torch.").lower())
    return known.name if known else ""
