"""The one table of dtypes: their names in every format, their width, and the integers that carry their bits.

Between a source file and a target file a tensor is bits: unsigned integers of the dtype's width, because numpy,
dask and zarr all mishandle bfloat16 or float8 somewhere. Only at the edge, where a user sees an array, does
`DType.numpy` give the real dtype.

Sources: MindSpore 2.10 `train/serialization.py` (`tensor_to_ms_type`), safetensors 0.8 `Dtype`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.spelling import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from numpy.typing import DTypeLike

    from reshard.errors import ReshardError


@dataclass(frozen=True, slots=True)
class DType:
    """One kind of element.

    Attributes:
        name: the numpy or ml_dtypes name, which is also the name used in messages.
        itemsize: bytes an element.
        safetensors: name in a safetensors header; None if that format has no such kind.
        mindspore: `tensor_type` in a `.ckpt` file; None if MindSpore has no such kind.
        bits: bits of a value that is narrower than a byte. An element is then a byte of a row of such values; else 0.
    """

    name: str
    itemsize: int
    safetensors: str | None
    mindspore: str | None
    bits: int = 0

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[object, tuple[str]]:
        """Travel by name: there is one object of each kind in a process."""
        return _interned, (self.name,)

    def numpy(self) -> np.dtype[np.generic]:
        """Return the real numpy dtype, from ml_dtypes where numpy has none.

        `int4` is MindSpore's, one byte an element, and comes as int8 so that all eight bits survive.

        >>> BFLOAT16.numpy().name, BFLOAT16.numpy().itemsize
        ('bfloat16', 2)
        """
        import ml_dtypes
        import numpy as np

        if self is INT4:
            return np.dtype(np.int8)
        if self is STR:
            return np.dtype("<U1")
        if self.bits:
            return np.dtype(np.uint8)
        scalar = getattr(ml_dtypes, self.name, None)
        return np.dtype(self.name if scalar is None else scalar)

    def carrier(self) -> np.dtype[np.unsignedinteger]:
        """Return the unsigned integer dtype that carries this dtype's bits.

        >>> str(BFLOAT16.carrier())
        'uint16'
        """
        import numpy as np

        return np.dtype(f"uint{8 * self.itemsize}")

    def as_bytes(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the shape of the bytes of values that may be narrower, or None if a row ends within a byte.

        >>> BY_NAME["float4_e2m1fn_x2"].as_bytes((4, 16)), BY_NAME["float4_e2m1fn_x2"].as_bytes((4, 3))
        ((4, 8), None)
        """
        return _scaled(shape, self.bits, 8) if self.bits else shape

    def as_values(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the shape of the values in bytes of a shape, or None if a row ends within a value.

        >>> BY_NAME["float6_e2m3fn_bytes"].as_values((4, 12)), BY_NAME["float6_e2m3fn_bytes"].as_values((4, 4))
        ((4, 16), None)
        """
        return _scaled(shape, 8, self.bits) if self.bits else shape


def _scaled(shape: tuple[int, ...], factor: int, divisor: int) -> tuple[int, ...] | None:
    """Return a shape whose last extent is multiplied by a fraction; None if that is not a whole number."""
    if not shape or shape[-1] * factor % divisor:
        return None
    return (*shape[:-1], shape[-1] * factor // divisor)


# In safetensors' own order, in which its library sorts tensors (last first).
_TABLE = (
    DType("str", 4, None, "str"),
    DType("bool", 1, "BOOL", "Bool"),
    DType("float4_e2m1fn_x2", 1, "F4", None, 4),  # PyTorch's name and shapes: two values an element
    DType("float6_e2m3fn_bytes", 1, "F6_E2M3", None, 6),
    DType("float6_e3m2fn_bytes", 1, "F6_E3M2", None, 6),
    DType("uint8", 1, "U8", "UInt8"),
    DType("int4", 1, "I8", "Int4"),
    DType("int8", 1, "I8", "Int8"),
    DType("float8_e5m2", 1, "F8_E5M2", None),
    DType("float8_e4m3fn", 1, "F8_E4M3", None),
    DType("float8_e8m0fnu", 1, "F8_E8M0", None),
    DType("float8_e4m3fnuz", 1, "F8_E4M3FNUZ", None),
    DType("float8_e5m2fnuz", 1, "F8_E5M2FNUZ", None),
    DType("int16", 2, "I16", "Int16"),
    DType("uint16", 2, "U16", "UInt16"),
    DType("float16", 2, "F16", "Float16"),
    DType("bfloat16", 2, "BF16", "BFloat16"),
    DType("int32", 4, "I32", "Int32"),
    DType("uint32", 4, "U32", "UInt32"),
    DType("float32", 4, "F32", "Float32"),
    DType("complex64", 8, "C64", None),
    DType("float64", 8, "F64", "Float64"),
    DType("int64", 8, "I64", "Int64"),
    DType("uint64", 8, "U64", "UInt64"),
)

E8M0 = "float8_e8m0fnu"
"""The dtype of scales that are powers of two."""

BY_NAME = {dtype.name: dtype for dtype in _TABLE}
_BY_SHORT_NAME = {dtype.safetensors.lower(): dtype for dtype in _TABLE if dtype.safetensors}
BY_MINDSPORE = {dtype.mindspore: dtype for dtype in _TABLE if dtype.mindspore}
# A safetensors file says I8 for int4 too; its `__metadata__` says which (see formats/safetensors).
BY_SAFETENSORS = {dtype.safetensors: dtype for dtype in _TABLE if dtype.safetensors}
SAFETENSORS_ORDER = {dtype: place for place, dtype in enumerate(_TABLE)}

BFLOAT16 = BY_NAME["bfloat16"]
INT4 = BY_NAME["int4"]
STR = BY_NAME["str"]


def _interned(name: str) -> DType:
    return BY_NAME[name]


def name_of(dtype: DTypeLike) -> str:
    """Return the name of a dtype of numpy or ml_dtypes; a text unchanged.

    >>> import ml_dtypes, numpy
    >>> [name_of(dtype) for dtype in ("bf16", numpy.float16, numpy.dtype("f4"), ml_dtypes.bfloat16)]
    ['bf16', 'float16', 'float32', 'bfloat16']
    """
    if isinstance(dtype, str):
        return dtype
    import numpy as np

    return np.dtype(dtype).name


def by_name(name: str, error: type[ReshardError], known: Iterable[str] = BY_NAME) -> DType:
    """Return the dtype of a name, which may be a short one, or raise `error` naming those that can be given: `known`.

    >>> from reshard.errors import UsageError
    >>> [by_name(name, UsageError).name for name in ("bfloat16", "bf16", "FP32", "f8_e4m3")]
    ['bfloat16', 'bfloat16', 'float32', 'float8_e4m3fn']
    """
    word = str(name).lower()
    dtype = BY_NAME.get(word) or _BY_SHORT_NAME.get(re.sub("^fp", "f", word))
    if dtype is None:
        known = [*known]
        raise error(
            f"unknown dtype {name!r}",
            code="unknown-dtype",
            facts=[f"known dtypes: {', '.join(known)}, and short names such as bf16 or fp32"],
            hint=did_you_mean(word, [*known, *(_BY_SHORT_NAME if known == [*BY_NAME] else ())]),
        )
    return dtype
