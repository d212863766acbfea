"""Read a tensor that `torch.save` wrote: an item of PyTorch's distributed checkpoints, from its first bytes.

An item is a zip archive of stored records. The first records are small: `data.pkl`, which describes the tensor, and
`byteorder`; then follow the bytes of the tensor, `data/0`. Sizes are in descriptors behind the records, so the records
are walked through from the first. The bytes of a tensor are aligned to 64 within the item, not within the file.

Strides count: a tensor that is transposed, permuted or expanded in memory is saved in that order, and the metadata do
not mention it.

Sources: PyTorch 2.13 `torch/serialization.py`, `torch/_utils.py`, `caffe2/serialize/inline_container.cc`, and files
that it wrote (`tests/data/dcp`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from operator import mul
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.dtypes import BY_NAME
from reshard.errors import SourceError
from reshard.formats.entries import Entry, Extent
from reshard.layout.axes import row_major
from reshard.layout.block import is_possible, shape_text
from reshard.readers.dcp.archive import Damaged, first_records
from reshard.readers.pickles import Name, PickledObject, describe, numbers, unpickled
from reshard.source.reshape import laid
from reshard.storage.page_cache import GLANCE_BYTES
from reshard.storage.places import any_store, in_batches

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reshard.dtypes import DType
    from reshard.layout.block import Block, Shape
    from reshard.storage.base import ReadStore, Want

_HEAD = 2048  # has all that is needed of most items
_LONGEST_HEAD = 1 << 18
_MOST_BEGINS, _MOST_HEADS = 8, 512  # of items that differ in nothing but their bytes
_EXPECTED = "a tensor that torch.save stored"

STORAGES = {
    "BFloat16": "bfloat16", "Bool": "bool", "Byte": "uint8", "Char": "int8", "ComplexFloat": "complex64",
    "Double": "float64", "Float": "float32", "Half": "float16", "Int": "int32", "Long": "int64", "Short": "int16",
}  # fmt: skip
"""The dtype of each typed storage of PyTorch, by the name of its class without `Storage`."""


class Span(NamedTuple):
    """The range of an item in a file."""

    path: str
    begin: int
    nbytes: int


def read_items(spans: Sequence[Span]) -> Iterator[Entry | str]:
    """Yield the entry of the tensor in each item, or the reason why it cannot be read.

    Raises:
        SourceError: a file ends before an item does.
    """
    known_heads = KnownHeads({}, {})
    for span, head in read_heads(spans, _HEAD):
        entry = item(span, head, known_heads)
        if entry is None:
            entry = next(
                (item(span, longer_head, known_heads) for _, longer_head in read_heads([span], _LONGEST_HEAD)), None
            )
        yield entry or "is not a tensor of torch.save: its head is too long"


def read_heads(spans: Sequence[Span], nbytes: int) -> Iterator[tuple[Span, bytes]]:
    """Yield the first bytes of each item; near items are read together, and at URLs many at once."""

    def steps() -> Iterator[tuple[tuple[list[Span], bytearray], ReadStore, list[Want]]]:
        for near in _near(spans, nbytes):
            begin = near[0].begin
            buffer = bytearray(near[-1].begin + min(near[-1].nbytes, nbytes) - begin)
            yield (near, buffer), any_store(), [(near[0].path, begin, memoryview(buffer))]

    for near, buffer in in_batches(steps()):
        for span in near:
            begin = span.begin - near[0].begin
            yield span, bytes(buffer[begin : begin + min(span.nbytes, nbytes)])


def _near(spans: Sequence[Span], nbytes: int) -> Iterator[list[Span]]:
    """Yield groups of consecutive items whose first bytes lie within one read."""
    near: list[Span] = []
    for span in spans:
        if near:
            (path, begin, _), last = near[0], near[-1]
            if span.path != path or span.begin < last.begin + last.nbytes or span.begin + nbytes > begin + GLANCE_BYTES:
                yield near
                near = []
        near.append(span)
    if near:
        yield near


def item(span: Span, head: bytes, known_heads: KnownHeads) -> Entry | str | None:
    """Return the entry of the tensor in an item, or a reason why not; None if the head is too short.

    Args:
        span: the range of the item.
        head: its first bytes.
        known_heads: the results for other items.
    """
    try:
        for begin, heads in known_heads.heads.items():
            if (alike := heads.get(head[:begin])) is not None:
                return alike.entry(span.begin + begin, span.begin + span.nbytes)
        record = _tensor_record(head, is_whole=len(head) == span.nbytes)
        if record is None:
            return None
        begin, name, pickled = record
        if pickled not in known_heads.pickles:
            known_heads.pickles[pickled] = rebuilt(unpickled(PickleBytes(span.path, pickled), _EXPECTED, outside=True))
        alike = known_heads.pickles[pickled]
        if name != alike.record:
            raise SourceError(  # noqa: TRY301 -- returned as a reason
                f"is in record {alike.record!r:.60} of its item; the first is {name!r:.60}", code="wrong-record"
            )
        if begin in known_heads.heads or len(known_heads.heads) < _MOST_BEGINS:
            heads = known_heads.heads.setdefault(begin, {})
            if len(heads) < _MOST_HEADS:
                heads[head[:begin]] = alike
        return alike.entry(span.begin + begin, span.begin + span.nbytes)
    except SourceError as error:
        return error.message


def _tensor_record(head: bytes, *, is_whole: bool) -> tuple[int, bytes, bytes] | None:
    """Return the offset and name of a tensor's record, and its pickle; None if the head is too short.

    Args:
        head: the first bytes of the item.
        is_whole: the head is all of the item.

    Raises:
        SourceError: the item is not a tensor that `torch.save` stored.
    """
    contents: dict[bytes, bytes | None] = {}
    try:
        for name, begin, content in first_records(head):
            if name.startswith(b"data/"):
                order = contents.get(b"byteorder") or b"little"
                if order.strip() != b"little":
                    raise SourceError(f"has the unsupported byte order {order!r:.20}", code="unsupported-byte-order")
                return begin, name, contents.get(b"data.pkl") or b""
            contents[name] = content
    except Damaged as error:
        raise SourceError(f"is not a tensor of torch.save: it {error}", code="not-torch-save") from None
    if is_whole:
        raise SourceError("is not a tensor of torch.save: it has no bytes, or is truncated", code="truncated")
    return None


class KnownHeads(NamedTuple):
    """The results for other items; many items are alike.

    Attributes:
        pickles: tensors by their pickles.
        heads: tensors by the offset of their bytes in an item, and by all bytes before it.
    """

    pickles: dict[bytes, Rebuilt]
    heads: dict[int, dict[bytes, Rebuilt]]


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A tensor as a view of its storage.

    Attributes:
        dtype: the dtype of its elements.
        record: the name of the record that is the storage.
        elements: the number of elements of the storage.
        first: the index of the tensor's first element in the storage.
        shape: the shape of the tensor.
        strides: the number of elements between neighbours along each dimension.
    """

    dtype: DType
    record: bytes
    elements: int
    first: int
    shape: Shape
    strides: Shape

    def entry(self, begin: int, end: int) -> Entry:
        """Return the entry of the tensor in an item that ends at `end`, with the storage at `begin`."""
        if begin + self.elements * self.dtype.itemsize > end:
            raise SourceError("has an item that is shorter than the tensor", code="truncated")
        extent = self.extent(0, begin)
        return Entry(self.dtype, self.shape, extent.runs, strides=extent.strides)

    def part(self, block: Block) -> Rebuilt:
        """Return a part of the tensor."""
        first = self.first + sum(map(mul, block.start, self.strides))
        return replace(self, first=first, shape=block.shape)

    def extent(self, file: int, begin: int) -> Extent:
        """Return the extent of the tensor in file number `file`, with the storage at `begin`."""
        _, runs, strides = _storage_extent(self)
        return Extent(file, tuple((begin + offset, nbytes) for offset, nbytes in runs), strides)


@lru_cache(maxsize=1 << 12)  # items are alike
def _storage_extent(tensor: Rebuilt) -> Extent:
    """Return the extent of a tensor in its storage."""
    width = tensor.dtype.itemsize
    strides = tensor.strides if prod(tensor.shape) else row_major(tensor.shape)
    return laid(Extent(0, ((0, tensor.elements * width),)), tensor.first * width, tensor.shape, strides, width)


@dataclass(frozen=True, slots=True)
class PickleBytes:
    """The bytes of a pickle, as `unpickled` reads a file."""

    path: str
    content: bytes

    @property
    def size(self) -> int:
        """Return the number of bytes."""
        return len(self.content)

    def upto(self, offset: int, nbytes: int) -> bytes:
        """Return at most `nbytes` bytes from `offset`."""
        return self.content[offset : offset + nbytes]


def rebuilt(value: object) -> Rebuilt:
    """Return the tensor that a pickled call rebuilds; raise `SourceError` if it is not a supported tensor."""
    name, arguments = "", tuple[Any, ...]()
    while isinstance(value, PickledObject) and isinstance(value.arguments, tuple):
        name, arguments = value.name, value.arguments
        if name == "_rebuild_from_type_v2" and len(arguments) == 4 and isinstance(arguments[0], Name):
            inner = PickledObject(arguments[0], arguments[2])
        elif name.startswith("_rebuild_parameter") and arguments:
            inner = arguments[0]
        else:
            break
        value = inner
    version = {"_rebuild_tensor_v2": 6, "_rebuild_tensor_v3": 7}.get(name)
    if version is None or not version <= len(arguments) <= version + 1:
        raise SourceError(
            f"is saved as {describe(name) if name else 'a value'}, not as a plain tensor", code="unsupported-class"
        )
    if len(arguments) > version and not (isinstance(arguments[-1], list) and not arguments[-1]):
        raise SourceError("is conjugated or negated on loading, which is not supported", code="unsupported-tensor")
    outside = arguments[0].arguments if isinstance(arguments[0], PickledObject) and not arguments[0].name else ()
    if not (isinstance(outside, tuple) and len(outside) == 5 and outside[0] == "storage"):
        raise SourceError("has no storage", code="bad-tensor")
    _, kind, key, _, elements = outside
    dtype_or_storage = arguments[6] if version == 7 else kind
    text = dtype_or_storage.name if isinstance(dtype_or_storage, Name) else ""
    dtype = BY_NAME.get(text if version == 7 else STORAGES.get(text.removesuffix("Storage"), ""))
    if dtype is None:
        raise SourceError(
            f"has PyTorch's dtype {text.removesuffix('Storage')!r:.60}, which no other format has",
            code="unsupported-dtype",
        )
    shape, strides, (first, count) = numbers(arguments[2]), numbers(arguments[3]), numbers((arguments[1], elements))
    if len(shape) != len(strides) or not is_possible(shape):
        raise SourceError(f"has shape {shape_text(shape)} and strides {shape_text(strides)}", code="bad-shape")
    last = first + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    if version == 7:
        count //= dtype.itemsize
    if prod(shape) and last >= count:
        raise SourceError("reaches beyond its storage", code="out-of-range")
    if not isinstance(key, str):
        raise SourceError("has no storage", code="bad-tensor")
    return Rebuilt(dtype, b"data/" + key.encode(), count, first, shape, strides)
