"""The border to MindSpore, torch and numpy: their tensors and dtypes as numpy's, and ours as theirs.

No framework is imported: what is given is of one that is there already. Two things a framework's own way to numpy
loses, so its dtype is asked for, and counts: MindSpore's `Int4` comes as int8; its bfloat16 and float8 come as dtypes
of its own, which neither ml_dtypes nor numpy's casts know.

Source: MindSpore 2.10 `common/tensor.py` (`asnumpy`), `common/dtype.py`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from reshard.dtypes import BY_NAME, INT4, DType

if TYPE_CHECKING:
    from reshard.mindspore.parameter import Tensor

Array = np.ndarray[Any, np.dtype[Any]]

_BY_PLAIN_NAME = {name.replace("_", ""): kind for name, kind in BY_NAME.items()}
_INT4 = np.dtype(ml_dtypes.int4)


def kind_of(dtype: Any) -> DType | None:
    """Return the table's entry for a dtype of numpy, MindSpore or torch; None for what no checkpoint holds.

    >>> kind_of(np.dtype(">f4")).name, kind_of("Float8E4M3FN").name, kind_of("torch.bool").name, kind_of("object")
    ('float32', 'float8_e4m3fn', 'bool', None)
    """
    name = dtype.name if isinstance(dtype, np.dtype) else str(dtype).rpartition(".")[2]
    return _BY_PLAIN_NAME.get(name.replace("_", "").lower())


def numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """Return a dtype of any of these libraries as numpy's; Int4 as that of ml_dtypes.

    Raises:
        TypeError: it is not a dtype, or one that no checkpoint holds.
    """
    try:
        found: np.dtype[Any] = np.dtype(dtype)
    except TypeError:
        kind = kind_of(dtype)
        if kind is None:
            raise
        found = _wanted(kind)
    return found


def is_array(value: Any) -> bool:
    """Tell an array or tensor of any library from numbers and lists of them."""
    return isinstance(value, np.ndarray | np.generic) or any(
        hasattr(value, way) for way in ("asnumpy", "detach", "__array__")
    )


def array_of(value: Any) -> Array:
    """Return the elements of an array of any library, over the same memory where that can be.

    Args:
        value: a numpy array, a MindSpore Tensor or Parameter, a `torch.Tensor`, or anything that numpy takes for an
            array by its `__array__`.

    Raises:
        TypeError: it is none of these, or a MindSpore `MapParameter`, whose values are in a table on the device.
    """
    if not is_array(value):
        raise TypeError(f"expected a Parameter, a Tensor or an array; got {type(value).__name__}")
    if hasattr(value, "export_data"):
        raise TypeError("a MapParameter has no array of values; save it with mindspore.save_checkpoint")
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
    elif hasattr(value, "asnumpy"):
        array = value.asnumpy()
    elif hasattr(value, "detach"):
        array = _of_torch(value.detach().cpu().contiguous())
    else:
        array = np.asarray(value)
    kind = kind_of(getattr(value, "dtype", array.dtype))
    if kind is None or (array.dtype.kind != "V" and array.dtype.name == kind.name):
        return array
    if array.dtype.itemsize != kind.itemsize or (array.dtype.kind != "V" and kind is not INT4):
        raise TypeError(f"its dtype is {kind}, but its elements are {array.dtype}")
    return array.view(_wanted(kind))


def as_mindspore(tensor: Tensor) -> Any:
    """Return a tensor as MindSpore's own, which must have been imported."""
    mindspore: Any = sys.modules["mindspore"]
    if tensor.kind.name == "bfloat16":  # its own bfloat16 is another numpy dtype than ml_dtypes'
        return mindspore.Tensor(tensor.array.view(np.uint16)).view(mindspore.bfloat16)
    if tensor.kind is INT4:
        return mindspore.Tensor(tensor.array, dtype=mindspore.qint4x2)
    return mindspore.Tensor(tensor.array)


def as_torch(tensor: Tensor) -> Any:
    """Return a tensor as torch's own, which must have been imported."""
    torch: Any = sys.modules["torch"]
    array = tensor.array if tensor.array.flags.writeable else tensor.array.copy()
    if hasattr(torch, tensor.kind.name) and array.dtype.kind == "V":  # ml_dtypes', which torch does not take from numpy
        bits = array.view(np.int8 if array.itemsize == 1 else np.int16)
        return torch.from_numpy(bits).view(getattr(torch, tensor.kind.name))
    return torch.from_numpy(array)


def _of_torch(tensor: Any) -> Array:
    """Return the elements of a torch tensor, which gives numpy no bfloat16 and no float8."""
    kind = kind_of(tensor.dtype)
    if kind is not None and kind.name.startswith(("bfloat", "float8")):
        torch: Any = sys.modules["torch"]
        bits: Array = tensor.view(torch.int8 if kind.itemsize == 1 else torch.int16).numpy()
        return bits.view(kind.numpy())
    found: Array = tensor.numpy()
    return found


def _wanted(kind: DType) -> np.dtype[Any]:
    return _INT4 if kind is INT4 else kind.numpy()
