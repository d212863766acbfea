"""Read pickled tensors of PyTorch: views of storages.

Strides count: a tensor that is transposed, permuted or expanded in memory is saved in that order, and the metadata of a
checkpoint do not mention it.

Sources: PyTorch 2.13 `torch/serialization.py` and `torch/_utils.py`, and files that it wrote (`tests/data/dcp`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from operator import mul
from typing import TYPE_CHECKING, Any

from reshard.core.layout.axes import row_major
from reshard.core.layout.block import is_possible, shape_text
from reshard.core.model.entries import Entry, Extent
from reshard.core.model.reshape import laid
from reshard.dtypes import BY_NAME
from reshard.errors import SourceError
from reshard.kits.torch.pickles import Name, PickledObject, describe, numbers

if TYPE_CHECKING:
    from reshard.core.layout.block import Block, Shape
    from reshard.dtypes import DType

STORAGES = {
    "BFloat16": "bfloat16", "Bool": "bool", "Byte": "uint8", "Char": "int8", "ComplexFloat": "complex64",
    "Double": "float64", "Float": "float32", "Half": "float16", "Int": "int32", "Long": "int64", "Short": "int16",
}  # fmt: skip
"""The dtype of each typed storage of PyTorch, by the name of its class without `Storage`."""


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
    kind, key, elements = storage_reference(arguments[0])
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
    return Rebuilt(dtype, b"data/" + key.encode(), count, first, shape, strides)


def storage_reference(value: object) -> tuple[object, str, object]:
    """Return the kind, the key and the number of elements of a storage; raise `SourceError` for other values.

    Before PyTorch 1.6 a reference has another item: the part of another storage, if it is not None.
    """
    outside = value.arguments if isinstance(value, PickledObject) and not value.name else ()
    if not (isinstance(outside, tuple) and len(outside) in {5, 6} and outside[0] == "storage"):
        raise SourceError("has no storage", code="bad-tensor")
    _, kind, key, _, elements, *part = outside
    if not isinstance(key, str) or part not in ([], [None]):
        raise SourceError("has no storage of its own", code="bad-tensor")
    return kind, key, elements
