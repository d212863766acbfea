"""Interpret the metadata of a distributed checkpoint, as `kits.torch.pickles` reads them."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.core.layout.block import LONGEST_NAME, is_possible, shape_text
from reshard.core.listing import Listing
from reshard.core.model.entries import RangeReader
from reshard.core.storage.base import COPY_AGAIN
from reshard.core.storage.small import is_text
from reshard.dtypes import BY_NAME
from reshard.errors import SourceError, names
from reshard.formats.dcp.names import DCP_FILES, DCP_INDEX, DCP_OF_RANK, FILES, is_data_of
from reshard.kits.torch.pickles import Name, Pairs, PickledObject, describe, numbers, unpickled
from reshard.strategy.names import ranks_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reshard.core.layout.block import Shape
    from reshard.core.storage.places import Place
    from reshard.kits.torch.carried import KeyPath

_EXPECTED = "the metadata of a distributed checkpoint (DCP)"
_MOST_BOXES = 1 << 21
_DEEPEST = 64  # of dicts in each other

STREAM = ("stream.zstd/1",)
"""The encoding of items that are zstd streams."""

_WIDEST = 16  # bytes of an element of a dtype that is not known
WHOLE_SHAPE = "nd_reformulated_orig_global_shape"


class DeclaredTensor(NamedTuple):
    """A tensor as the metadata describe it.

    Attributes:
        dtype: the name of the dtype; empty if it is not known.
        shape: the shape of the whole tensor.
        boxes: the offsets and extents of each box; an empty box may have the offsets of another.
    """

    dtype: str
    shape: Shape
    boxes: set[tuple[Shape, Shape]]


class Item(NamedTuple):
    """The storage entry of a box or an object.

    Attributes:
        offsets: the offsets of the box in its tensor; empty for an object.
        file: the path of its file, below the directory that was opened.
        begin: the offset of an item of PyTorch in the file.
        nbytes: the length of the item; 0 for a box of hyper-parallel.
        encoding: the encoders of the item, in order; empty if it is plain.
        key: its name in a safetensors file.
    """

    offsets: Shape
    file: str
    begin: int
    nbytes: int
    encoding: tuple[str, ...] = ()
    key: str = ""


class DCPMetadata:
    """The checked metadata of all ranks, and of all directories if there are several, joined.

    Args:
        directory: the directory.
        listing: the names of its files.
        content: the content of the metadata file, if it is the only one and was read before.

    Attributes:
        described_by: the first metadata file, and how many more, for messages.
        tensors: the tensors, by name.
        objects: the names of the objects.
        items: the storage entries of the boxes of each tensor, and of each object that PyTorch wrote.
        paths: the path of a tensor or an object in nested dicts and lists, if it is known.
        flat: the whole shapes of tensors that are stored flattened.
    """

    def __init__(self, directory: Place, listing: Sequence[str], *, content: bytes = b"") -> None:
        files = metadata_files(directory, listing)
        self.described_by = files[0] + (f" (and {len(files) - 1} more)" if len(files) > 1 else "")
        self._directories: dict[str, str] = {}
        self.tensors: dict[str, DeclaredTensor] = {}
        self.objects: dict[str, None] = {}
        self.items: dict[str, list[Item]] = {}
        self.paths: dict[str, KeyPath] = {}
        self.flat: dict[str, Shape] = {}
        self._boxes_by_chunk: dict[PickledObject, tuple[Shape, Shape]] = {}
        self._count = 0
        for name in files:
            value = unpickled(RangeReader(str(directory / name), window=0, head=content), _EXPECTED)
            try:
                self._add(value, name[: name.rfind("/") + 1])
            except SourceError as error:
                raise error.about(f"{directory / name}") from None

    def nbytes(self, name: str) -> int:
        """Return the largest possible size in bytes of a box of a tensor."""
        tensor = self.tensors[name]
        itemsize = BY_NAME[tensor.dtype].itemsize if tensor.dtype else _WIDEST
        return itemsize * min(prod(tensor.shape), max((prod(extents) for _, extents in tensor.boxes), default=0))

    def _add(self, content: object, directory: str) -> None:
        if not (isinstance(content, PickledObject) and content.name.endswith("Metadata")):
            raise SourceError(f"is not {_EXPECTED}", code="bad-metadata")
        for name, entry in _pairs(content, "state_dict_metadata"):
            self._check_name(name, directory)
            kind = entry.name if isinstance(entry, PickledObject) else ""
            if kind == "BytesStorageMetadata":
                self.objects[name] = None
            elif kind == "TensorStorageMetadata":
                self._add_tensor(name, entry)
            else:
                fault = f"{describe(name)} is a {describe(kind or 'value')}; expected a tensor or an object"
                raise SourceError(fault, code="bad-metadata")
        if both := self.tensors.keys() & self.objects.keys():
            raise SourceError(f"{names(sorted(both), most=3)} is both a tensor and an object", code="duplicate-name")
        for index, info in _pairs(content, "storage_data"):
            self._add_item(index, info, directory)
        planned = content.field("planner_data")
        for name, path in planned.items() if isinstance(planned, Pairs) else ():
            if isinstance(name, str) and _is_path(path):
                self.paths[name] = path
        self._add_flat(content.field("mcore_data"))

    def _add_flat(self, reshaped: object) -> None:
        """Add the whole shapes of flattened tensors, from an attribute of Megatron-Core."""
        for name, attributes in reshaped.items() if isinstance(reshaped, Pairs) else ():
            if isinstance(name, str) and isinstance(attributes, Pairs) and WHOLE_SHAPE in (keys := attributes[::2]):
                self.flat[name] = _shape(name, attributes[2 * keys.index(WHOLE_SHAPE) + 1])

    def _check_name(self, name: object, directory: str) -> None:
        if not isinstance(name, str) or not is_text(name) or len(name.encode()) > LONGEST_NAME:
            fault = f"{describe(name)} is not a valid name; expected at most {LONGEST_NAME} bytes of text"
            raise SourceError(fault, code="bad-name")
        other_directory = self._directories.setdefault(name, directory)
        if other_directory != directory:
            fault = f"has {describe(name)}, which {other_directory.rstrip('/')} has too"
            raise SourceError(fault, code="several-checkpoints", hint="open one of the directories")

    def _add_tensor(self, name: str, entry: PickledObject) -> None:
        shape = _shape(name, entry.field("size"))
        tensor = DeclaredTensor(_dtype(entry.field("properties")), shape, set())
        first_tensor = self.tensors.setdefault(name, tensor)
        if (first_tensor.dtype, first_tensor.shape) != (tensor.dtype, tensor.shape):
            ranks = " and ".join(f"{each.dtype} {shape_text(each.shape)}" for each in (first_tensor, tensor))
            raise SourceError(f"tensor {describe(name)} is {ranks} by different ranks", code="ranks-disagree")
        chunks = entry.field("chunks")
        if not isinstance(chunks, list) or not all(isinstance(chunk, PickledObject) for chunk in chunks):
            raise SourceError(f"tensor {describe(name)} has no list of boxes", code="bad-metadata")
        self._count += len(chunks)
        if self._count > _MOST_BOXES:  # a small file can repeat a list of boxes
            raise SourceError(f"has more than {_MOST_BOXES:,} boxes", code="too-many-blocks")
        boxes = {self._box(chunk) for chunk in chunks}
        if not all(len(shape) == len(offsets) == len(extents) for offsets, extents in boxes):
            fault = f"tensor {describe(name)} of shape {shape_text(shape)} has a box of other dimensions"
            raise SourceError(fault, code="wrong-dimensions")
        first_tensor.boxes.update(boxes)

    def _box(self, chunk: PickledObject) -> tuple[Shape, Shape]:
        """Return the offsets and extents of a box."""
        if chunk not in self._boxes_by_chunk:
            offsets, extents = chunk.fields("offsets", "sizes")
            self._boxes_by_chunk[chunk] = numbers(offsets), numbers(extents)
        return self._boxes_by_chunk[chunk]

    def _add_item(self, index: object, info: object, directory: str) -> None:
        if not (isinstance(index, PickledObject) and isinstance(info, PickledObject)):
            raise SourceError("has an entry in storage_data that is not a box", code="bad-metadata")
        name, _, offset = index.fields("fqn", "index", "offset")
        file, begin, nbytes, encoding, key = info.fields(
            "relative_path", "offset", "length", "transform_descriptors", "tensor_key"
        )
        is_object = isinstance(name, str) and name in self.objects
        if is_object and info.name != "_StorageInfo":
            return
        if not isinstance(name, str) or not (is_object or name in self.tensors):
            raise SourceError(f"has a box of {describe(name)}, but no such tensor", code="unknown-tensor")
        if info.name not in DCP_FILES:
            fault = f"has a box of {describe(name)} in an unknown {describe(info.name)}"
            raise SourceError(fault, code="unknown-storage")
        if not isinstance(file, str) or not is_data_of(info.name, file):
            fault = f"tensor {describe(name)} is in {describe(file)}; expected a file of a rank, without directories"
            raise SourceError(fault, code="bad-file-name")
        key = name if key is None else key
        if not isinstance(key, str):
            fault = f"tensor {describe(name)} has {describe(key)} for a tensor_key; expected text"
            raise SourceError(fault, code="bad-name")
        begin, nbytes = numbers((begin, nbytes)) if info.name == "_StorageInfo" else (0, 0)
        encodings = encoding if isinstance(encoding, list) else [encoding] if encoding else []
        offsets = () if is_object else numbers(offset)
        item = Item(offsets, directory + file, begin, nbytes, tuple(map(_text, encodings)), key)
        self.items.setdefault(name, []).append(item)


def metadata_files(root: Place, listing: Sequence[str]) -> list[str]:
    """Return the paths of the metadata in all directories.

    Raises:
        SourceError: there is none, metadata of a rank are absent, or there are metadata of two checkpoints.
    """
    by_directory: dict[str, list[str]] = {}
    for path in listing:
        directory, slash, name = path.rpartition("/")
        by_directory.setdefault(directory + slash, []).append(name)
    if len(by_directory) < 2:
        return _files_in(root, listing)
    return [
        f"{above}{name}"
        for above, file_names in by_directory.items()
        for name in _files_in(root / above[:-1], file_names)
    ]


def _files_in(directory: Place, listing: Sequence[str]) -> list[str]:
    """Return the names of the metadata: one file, or one per rank."""
    by_kind: dict[str, dict[int, str]] = {DCP_INDEX: {0: DCP_INDEX}} if DCP_INDEX in listing else {}
    for match in filter(None, map(DCP_OF_RANK.fullmatch, listing)):
        by_kind.setdefault(match[1], {})[int(match[2])] = match[0]
    if len(by_kind) > 1:
        firsts = sorted(by_rank[min(by_rank)] for by_rank in by_kind.values())
        raise SourceError(
            f"{directory} holds two checkpoints, of {firsts[0]} and {firsts[1]}", code="several-checkpoints",
            hint="move the files of one of them to another directory",
        )  # fmt: skip
    if not by_kind:
        fact = f"{FILES.shown_by(Listing(directory, sorted(listing)))} {FILES.problem}"
        raise SourceError(
            f"{directory} has no {DCP_INDEX}, which is written last; saving it was interrupted", code="unfinished",
            facts=[fact],
        )  # fmt: skip
    (by_rank,) = by_kind.values()
    if absent := [rank for rank in range(max(by_rank)) if rank not in by_rank]:
        raise SourceError(
            f"{directory} has no file of metadata of {ranks_text(absent)}, of {max(by_rank) + 1}", code="missing-ranks",
            hint=COPY_AGAIN,
        )  # fmt: skip
    return [name for _, name in sorted(by_rank.items())]


def _shape(name: str, value: object) -> Shape:
    shape = numbers(value)
    if not is_possible(shape):
        raise SourceError(f"tensor {describe(name)} has the impossible shape {shape_text(shape)}", code="bad-shape")
    return shape


def _text(value: object) -> str:
    return value if isinstance(value, str) else "?"


def _is_path(path: object) -> bool:
    """Return whether a value is a path of keys of dicts and indices of lists."""
    return (
        isinstance(path, tuple)
        and 0 < len(path) <= _DEEPEST
        and all((isinstance(key, str) and is_text(key)) or (type(key) is int and 0 <= key < 1 << 31) for key in path)
    )


def _pairs(content: PickledObject, name: str) -> Iterator[tuple[Any, Any]]:
    pairs = content.field(name)
    if not isinstance(pairs, Pairs):
        raise SourceError(f"has no {name}; expected {_EXPECTED}", code="bad-metadata")
    return pairs.items()


def _dtype(properties: object) -> str:
    """Return the name of a dtype from the properties of a tensor; empty if it is not known."""
    value = properties.field("dtype") if isinstance(properties, PickledObject) else None
    if isinstance(properties, PickledObject) and isinstance(properties.state, tuple) and properties.state:
        value = properties.state[0]  # as PyTorch's own reduction has them
    text = value.name if isinstance(value, Name) else value if isinstance(value, str) else ""
    dtype = BY_NAME.get(text.removeprefix("torch.").lower())
    return dtype.name if dtype else ""
