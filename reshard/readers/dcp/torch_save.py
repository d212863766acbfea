"""What `torch.save` makes of one tensor: an item of PyTorch's distributed checkpoints, found by one read of its head.

An item is a zip archive of stored records. The first are small: how the tensor is rebuilt (`data.pkl`), the order of
bytes; then come the bytes, `data/0`. Sizes are behind the records, in data descriptors, so that the records are walked
through from the first. Where the bytes begin is aligned to 64 within the item, not within the file.

Strides count: a tensor that is transposed or permuted in memory is saved as it lies, and the metadata do not say so.

Sources: PyTorch 2.13 `torch/serialization.py`, `torch/_utils.py`, `caffe2/serialize/inline_container.cc`, and what that
wrote (`tests/data/dcp`).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.dtypes import BY_NAME
from reshard.errors import SourceError
from reshard.formats.entries import Entry
from reshard.layout.block import is_possible, shape_text
from reshard.readers.pickles import Name, Record, numbers, shown, unpickled
from reshard.storage.places import any_store, in_batches

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reshard.dtypes import DType
    from reshard.formats.entries import Runs
    from reshard.layout.block import Shape
    from reshard.storage.base import ReadStore, Want

_HEAD = 2048  # has all that is needed of most items
_LONGEST_HEAD = 1 << 18
_MOST_RUNS = 1 << 16  # of an item that is not contiguous
_MOST_RUNS_OF_ALL = 1 << 21
_LOCAL = struct.Struct("<4s10xIIIHH")
_DESCRIPTOR = b"PK\x07\x08"

STORAGES = {
    "BFloat16": "bfloat16", "Bool": "bool", "Byte": "uint8", "Char": "int8", "ComplexFloat": "complex64",
    "Double": "float64", "Float": "float32", "Half": "float16", "Int": "int32", "Long": "int64", "Short": "int16",
}  # fmt: skip
"""The dtype of each typed storage of PyTorch, by what its name begins with."""


class Span(NamedTuple):
    """Where an item lies: a file and its bytes."""

    path: str
    begin: int
    nbytes: int


def read_items(spans: Sequence[Span]) -> Iterator[Entry | str]:
    """Yield, for each item, the tensor that it has, with the runs of its bytes in the file; or why it cannot be read.

    Raises:
        SourceError: a file ends before an item does.
    """
    known: dict[bytes, _Rebuilt] = {}
    pieces = 0
    for span, head in _heads(spans, _HEAD):
        found = _item(span, head, known)
        if found is None:
            found = next((_item(span, more, known) for _, more in _heads([span], _LONGEST_HEAD)), None)
        if isinstance(found, Entry):
            pieces += len(found.runs)
            if pieces - len(spans) > _MOST_RUNS_OF_ALL:
                found = "is transposed in its file, as too many tensors are to be read"
        yield found or "is not a tensor that torch.save stored: its head is too long"


def _heads(spans: Sequence[Span], nbytes: int) -> Iterator[tuple[Span, bytes]]:
    """Yield the first bytes of each item; at URLs, those of many are read at once."""

    def steps() -> Iterator[tuple[tuple[Span, bytearray], ReadStore, list[Want]]]:
        for span in spans:
            head = bytearray(min(span.nbytes, nbytes))
            yield (span, head), any_store(), [(span.path, span.begin, memoryview(head))]

    for span, head in in_batches(steps()):
        yield span, bytes(head)


def _item(span: Span, head: bytes, known: dict[bytes, _Rebuilt]) -> Entry | str | None:
    """Return what an item has, or why it cannot be read; None where its head goes on."""
    pickled, order, at = b"", b"little", 0
    while True:
        if len(head) - at < _LOCAL.size:
            return None if len(head) < span.nbytes else "is not a tensor that torch.save stored: it has no bytes"
        mark, _, _, size, of_name, of_more = _LOCAL.unpack_from(head, at)
        method = head[at + 8 : at + 10]
        begin = at + _LOCAL.size + of_name + of_more
        if mark != b"PK\x03\x04" or method != b"\0\0":
            return "is not a tensor that torch.save stored: it is not a zip archive of plain records"
        name = head[at + _LOCAL.size : at + _LOCAL.size + of_name].partition(b"/")[2]
        if name.startswith(b"data/"):
            if order.strip() != b"little":
                return f"has its bytes in the order {order!r:.20}, which is not read"
            break
        end = _end_of(head, begin, size)
        if end is None:
            return None if len(head) < span.nbytes else "is not a tensor that torch.save stored: it is cut off"
        content, at = head[begin : end[0]], end[1]
        if name == b"data.pkl":
            pickled = content
        elif name == b"byteorder":
            order = content
    try:
        if pickled not in known:
            known[pickled] = _rebuilt(pickled, span)
        return known[pickled].entry(name, span.begin + begin, span.begin + span.nbytes)
    except SourceError as error:
        return str(error)


def _end_of(head: bytes, begin: int, size: int) -> tuple[int, int] | None:
    """Return where a record ends, and where the next begins; None where that is not in the head."""
    if size:
        return (begin + size, begin + size) if begin + size <= len(head) else None
    end = head.find(_DESCRIPTOR, begin)
    while end >= 0:
        if int.from_bytes(head[end + 8 : end + 12], "little") == end - begin:
            return end, end + 16
        end = head.find(_DESCRIPTOR, end + 1)
    return None


@dataclass(frozen=True, slots=True)
class _Rebuilt:
    """How a tensor is rebuilt from its storage: from which element on, in what steps, along each dimension."""

    dtype: DType
    record: bytes
    elements: int
    first: int
    shape: Shape
    strides: Shape

    def entry(self, record: bytes, begin: int, end: int) -> Entry:
        """Return the tensor, whose storage lies in a file from one byte on, in an item that ends at another."""
        if record != self.record:
            raise SourceError(f"is in the record {self.record!r:.60} of its item, which has {record!r:.60} first")
        width = self.dtype.itemsize
        if begin + self.elements * width > end:
            raise SourceError("has an item that is shorter than the tensor")
        return Entry(self.dtype, self.shape, self.runs(begin + self.first * width))

    def runs(self, begin: int) -> Runs:
        """Return the byte ranges in row-major order."""
        width = self.dtype.itemsize
        depth, together = len(self.shape), 1
        while depth and (self.shape[depth - 1] == 1 or self.strides[depth - 1] == together):
            depth -= 1
            together *= self.shape[depth]
        if not prod(self.shape):
            return ((begin, 0),)
        if prod(self.shape[:depth]) > _MOST_RUNS:
            pieces = f"{prod(self.shape[:depth]):,} pieces (strides {shape_text(self.strides)})"
            raise SourceError(f"is transposed in its file, in {pieces}; at most {_MOST_RUNS:,} are read")
        begins = [begin]
        for extent, stride in zip(self.shape[:depth], self.strides[:depth], strict=True):
            begins = [start + index * stride * width for start in begins for index in range(extent)]
        return tuple((start, together * width) for start in begins)


@dataclass(frozen=True, slots=True)
class _Held:
    """The bytes of a pickle, as `unpickled` reads a file."""

    path: str
    content: bytes

    @property
    def size(self) -> int:
        return len(self.content)

    def upto(self, offset: int, nbytes: int) -> bytes:
        return self.content[offset : offset + nbytes]


def _rebuilt(pickled: bytes, span: Span) -> _Rebuilt:
    """Return how a pickled tensor is rebuilt; `SourceError` where it is none, or one that is not read."""
    made = unpickled(_Held(span.path, pickled), "a tensor that torch.save stored", outside=True)
    name, arguments = "", tuple[Any, ...]()
    while isinstance(made, Record) and isinstance(made.arguments, tuple):
        name, arguments = made.name, made.arguments
        if name == "_rebuild_from_type_v2" and len(arguments) == 4 and isinstance(arguments[0], Name):
            inner = Record(arguments[0], arguments[2])
        elif name.startswith("_rebuild_parameter") and arguments:
            inner = arguments[0]
        else:
            break
        made = inner
    version = {"_rebuild_tensor_v2": 6, "_rebuild_tensor_v3": 7}.get(name)
    if version is None or not version <= len(arguments) <= version + 1:
        raise SourceError(f"is kept as {shown(name) if name else 'a value'}, which is not read")
    if len(arguments) > version and not (isinstance(arguments[-1], list) and not arguments[-1]):
        raise SourceError("is conjugated or negated when it is loaded, which is not read")
    outside = arguments[0].arguments if isinstance(arguments[0], Record) and not arguments[0].name else ()
    if not (isinstance(outside, tuple) and len(outside) == 5 and outside[0] == "storage"):
        raise SourceError("has no storage")
    _, kind, key, _, elements = outside
    stated = arguments[6] if version == 7 else kind
    text = stated.name if isinstance(stated, Name) else ""
    dtype = BY_NAME.get(text if version == 7 else STORAGES.get(text.removesuffix("Storage"), ""))
    if dtype is None:
        raise SourceError(f"is of PyTorch's dtype {text.removesuffix('Storage')!r:.60}, which no other format has")
    shape, strides, (first, count) = numbers(arguments[2]), numbers(arguments[3]), numbers((arguments[1], elements))
    if len(shape) != len(strides) or not is_possible(shape):
        raise SourceError(f"has the shape {shape_text(shape)} and the strides {shape_text(strides)}")
    last = first + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    if version == 7:
        count //= dtype.itemsize
    if prod(shape) and last >= count:
        raise SourceError("goes beyond its storage")
    if not isinstance(key, str):
        raise SourceError("has no storage")
    return _Rebuilt(dtype, b"data/" + key.encode(), count, first, shape, strides)
