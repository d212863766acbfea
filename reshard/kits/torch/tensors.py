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
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.core.layout.axes import row_major
from reshard.core.layout.block import is_possible, shape_text
from reshard.core.model.entries import Entry, Extent
from reshard.core.model.reshape import laid
from reshard.dtypes import BY_NAME
from reshard.errors import SourceError
from reshard.kits.torch.pickles import Name, PickledObject, describe, numbers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.core.layout.block import Shape
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

    def part(self, start: Shape, shape: Shape) -> Rebuilt:
        """Return a part of the tensor."""
        return replace(self, first=self.first + sum(map(mul, start, self.strides)), shape=shape)

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


class PickleBytes(NamedTuple):
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
    name, arguments = _plain_call(value)
    has_dtype = name == "_rebuild_tensor_v3"
    count = 7 if has_dtype else 6
    if not (has_dtype or name == "_rebuild_tensor_v2") or not count <= len(arguments) <= count + 1:
        raise SourceError(
            f"is saved as {describe(name) if name else 'a value'}, not as a plain tensor", code="unsupported-class"
        )
    if arguments[count:] and not (isinstance(arguments[count], list) and not arguments[count]):
        raise SourceError("is conjugated or negated on loading, which is not supported", code="unsupported-tensor")
    kind, key, size = storage_reference(arguments[0])
    dtype = _dtype(arguments[6]) if has_dtype else _dtype(kind, storages=STORAGES)
    shape, strides, (first, elements) = numbers(arguments[2]), numbers(arguments[3]), numbers((arguments[1], size))
    if has_dtype:  # an untyped storage counts bytes
        elements //= dtype.itemsize
    if len(shape) != len(strides) or not is_possible(shape):
        raise SourceError(f"has shape {shape_text(shape)} and strides {shape_text(strides)}", code="bad-shape")
    last = first + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    if prod(shape) and last >= elements:
        raise SourceError("reaches beyond its storage", code="out-of-range")
    return Rebuilt(dtype, b"data/" + key.encode(), elements, first, shape, strides)


def without_parameter(value: object) -> object:
    """Return the tensor in a parameter, or another value as it is."""
    while isinstance(value, PickledObject) and value.name.startswith("_rebuild_parameter") and arguments_of(value):
        value = arguments_of(value)[0]
    return value


def arguments_of(value: object) -> tuple[Any, ...]:
    """Return the arguments of a pickled call; empty for other values."""
    return value.arguments if isinstance(value, PickledObject) and isinstance(value.arguments, tuple) else ()


def _plain_call(value: object) -> tuple[str, tuple[Any, ...]]:
    """Return the function that rebuilds a tensor of no class of its own, and the arguments."""
    while isinstance(value := without_parameter(value), PickledObject):
        arguments = arguments_of(value)
        if value.name != "_rebuild_from_type_v2" or len(arguments) != 4 or not isinstance(arguments[0], Name):
            return value.name, arguments
        value = PickledObject(arguments[0], arguments[2])
    return "", ()


def _dtype(name: object, *, storages: Mapping[str, str] | None = None) -> DType:
    """Return a dtype by its name, or by the name of a storage of its elements."""
    text = name.name.removesuffix("Storage") if isinstance(name, Name) else ""
    dtype = BY_NAME.get(text if storages is None else storages.get(text, ""))
    if dtype is None:
        raise SourceError(f"has PyTorch's dtype {text!r:.60}, which no other format has", code="unsupported-dtype")
    return dtype


def storage_reference(value: object) -> tuple[object, str, object]:
    """Return the kind, the key and the number of elements of a storage; raise `SourceError` for other values.

    Before PyTorch 1.6 a reference has another item: the part of another storage, if it is not None.
    """
    key = value.arguments if isinstance(value, PickledObject) and value.made_by is None else None
    match key:
        case ("storage", kind, str() as name, _, elements) | ("storage", kind, str() as name, _, elements, None):
            return kind, name, elements
    raise SourceError("has no storage of its own", code="bad-tensor")
