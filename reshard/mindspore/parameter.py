"""`Tensor` and `Parameter`: numpy arrays with MindSpore's methods.

Dtypes are numpy's (bfloat16 and float8 those of ml_dtypes) under MindSpore's names, so that a bfloat16 tensor goes to
numpy and back as it is. The dtype of MindSpore's own tensors is not read from their numpy arrays: `Int4` comes as int8,
and bfloat16 and float8 as dtypes that ml_dtypes does not know.

Source: MindSpore 2.10 `common/tensor.py` (`asnumpy`), `common/parameter.py`, `common/dtype.py`.
"""

from __future__ import annotations

import sys
from itertools import count
from typing import Any, Self

import ml_dtypes
import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from reshard.dtypes import BY_NAME, INT4, STR, DType

Array = np.ndarray[Any, np.dtype[Any]]

bool_ = np.dtype(np.bool_)
int8 = np.dtype(np.int8)
int16 = np.dtype(np.int16)
int32 = np.dtype(np.int32)
int64 = np.dtype(np.int64)
uint8 = np.dtype(np.uint8)
uint16 = np.dtype(np.uint16)
uint32 = np.dtype(np.uint32)
uint64 = np.dtype(np.uint64)
float16 = np.dtype(np.float16)
float32 = np.dtype(np.float32)
float64 = np.dtype(np.float64)
complex64 = np.dtype(np.complex64)
bfloat16 = np.dtype(ml_dtypes.bfloat16)
float8_e4m3fn = np.dtype(ml_dtypes.float8_e4m3fn)
float8_e5m2 = np.dtype(ml_dtypes.float8_e5m2)
qint4x2 = np.dtype(ml_dtypes.int4)
"""MindSpore's Int4, one byte an element; `asnumpy` gives it as int8, so that all eight bits survive."""

_unnamed = count()


def dtype_of(kind: DType) -> np.dtype[Any]:
    """Return the numpy dtype of a kind of the table; `qint4x2` for Int4."""
    return qint4x2 if kind is INT4 else kind.numpy()


# The names of MindSpore (`Float8E4M3FN`) in lower case are those of the table without `_`.
_DTYPES = {name.replace("_", ""): dtype_of(kind) for name, kind in BY_NAME.items() if kind is not STR and not kind.bits}


class Tensor(NDArrayOperatorsMixin):
    """An array with a shape and a dtype. Numpy's functions and operators take it, and return arrays.

    Args:
        input_data: an array, a Tensor (ours or MindSpore's), a number, or nested lists of numbers. Arrays are copied,
            as MindSpore does.
        dtype: the dtype to convert to, of numpy or MindSpore. By default the array's; for plain numbers int64 or
            float32, as in MindSpore.

    Attributes:
        array: the elements, row-major in the machine's byte order; Int4 as ml_dtypes' int4.

    Raises:
        TypeError: the data is not an array of numbers, or of a kind that a checkpoint cannot hold.

    >>> tensor = Tensor(np.array([[1, 2], [3, 4]], np.float16))
    >>> tensor.shape, tensor.dtype == float16, tensor.asnumpy()[1].tolist()
    ((2, 2), True, [3.0, 4.0])
    >>> Tensor([1.5, 2]).dtype, Tensor(1).dtype, Tensor([1, 2], bfloat16).asnumpy()
    (dtype('float32'), dtype('int64'), array([1, 2], dtype=bfloat16))
    """

    array: Array
    __hash__ = object.__hash__

    def __init__(self, input_data: Any, dtype: Any = None) -> None:
        array = np.array(array_of(input_data), order="C")
        if dtype is None:
            is_plain = array.dtype == float64 and not hasattr(input_data, "dtype")
            dtype = float32 if is_plain else array.dtype
        self.array = _converted(array, numpy_dtype(dtype))

    @classmethod
    def from_numpy(cls, array: Array) -> Self:
        """Return a tensor over an array, which is not copied unless it is strided or in foreign byte order."""
        tensor = cls.__new__(cls)
        tensor.array = np.asarray(_converted(array, numpy_dtype(array.dtype)), order="C")
        return tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the length of each dimension."""
        return tuple(self.array.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the kind of the elements, a numpy dtype."""
        return self.array.dtype

    @property
    def ndim(self) -> int:
        """Return the number of dimensions."""
        return self.array.ndim

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return self.array.size

    def asnumpy(self) -> Array:
        """Return the array itself, not a copy; Int4 as int8."""
        return self.array.view(int8) if self.array.dtype == qint4x2 else self.array

    numpy = asnumpy

    def astype(self, dtype: Any) -> Tensor:
        """Return a copy in another dtype, rounded as numpy and ml_dtypes do (to the nearest, ties to even)."""
        return Tensor(self.data, dtype)

    @property
    def data(self) -> Tensor:
        """Return the tensor itself; for a Parameter, the tensor without its name."""
        return self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.array, dtype, copy=True) if copy else np.asarray(self.array, dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        arrays = [array_of(value) if is_array(value) else value for value in inputs]
        return getattr(ufunc, method)(*arrays, **options)

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: Any) -> Tensor:
        return Tensor.from_numpy(np.asarray(self.array[index]))

    def __bool__(self) -> bool:
        return bool(self.array)

    def __int__(self) -> int:
        return int(self.array)

    def __float__(self) -> float:
        return float(self.array)

    def __repr__(self) -> str:
        return f"Tensor(shape={list(self.shape)}, dtype={_shown(self.dtype)}, value={self.array})"


class Parameter(Tensor):
    """A tensor with a name, as checkpoints hold it.

    Args:
        default_input: the value, as for `Tensor`. An integer becomes int32 here, as in MindSpore.
        name: by default `Parameter#0` and so on, as in MindSpore; without blanks around it.
        requires_grad: kept and returned, as are `layerwise_parallel` and `parallel_optimizer`; nothing is trained here.
        storage_format: accepted, as is `device`; everything is in the memory of the host.

    Raises:
        TypeError: the value is not an array of numbers.
        ValueError: the name is not a string.

    >>> weight = Parameter(Tensor(np.ones((4, 8), np.float32)), "weight")
    >>> weight
    Parameter (name=weight, shape=(4, 8), dtype=Float32, requires_grad=True)
    >>> weight.set_data(Tensor(np.zeros((2, 8), np.float32)), True)
    Parameter (name=weight, shape=(2, 8), dtype=Float32, requires_grad=True)
    """

    requires_grad = parallel_optimizer = True
    layerwise_parallel = sliced = False

    def __init__(
        self,
        default_input: Any,
        name: str | None = None,
        requires_grad: bool = True,
        layerwise_parallel: bool = False,
        parallel_optimizer: bool = True,
        storage_format: str = "",  # noqa: ARG002 -- as above
        device: str | None = None,  # noqa: ARG002 -- as above
    ) -> None:
        super().__init__(default_input, int32 if type(default_input) is int else None)
        self.name = name
        self.requires_grad = requires_grad
        self.layerwise_parallel = layerwise_parallel
        self.parallel_optimizer = parallel_optimizer

    @classmethod
    def over(cls, array: Array, name: str) -> Parameter:
        """Return a parameter that shares an array; `Parameter(array, name)` copies it."""
        parameter = cls.from_numpy(array)
        parameter.name = name
        return parameter

    @property
    def name(self) -> str:
        """Return the name."""
        return self._name

    @name.setter
    def name(self, name: str | None) -> None:
        if not isinstance(name, str | None):
            raise ValueError(f"a Parameter's name is a string; got {type(name).__name__} {name!r}")  # noqa: TRY004 -- as MindSpore
        self._name = (name or "").strip() or f"Parameter#{next(_unnamed)}"

    @property
    def data(self) -> Tensor:
        """Return the value as a Tensor, which shares its array with this parameter."""
        return Tensor.from_numpy(self.array)

    def set_data(self, data: Any, slice_shape: bool = False) -> Parameter:
        """Set another value, converted to the parameter's dtype; its shape may be another, as in MindSpore 2.10.

        Args:
            data: the value. A Tensor's array is shared if its dtype is the parameter's; everything else is copied.
            slice_shape: the value is one device's slice; kept as `sliced`.

        Raises:
            TypeError: the value is not an array of numbers, or a float for a parameter of integers.
        """
        if isinstance(data, float) and self.dtype.kind in "iub":
            raise TypeError(f"parameter {self.name!r} is of {self.dtype}; the float {data} cannot be converted to it")
        is_shared = isinstance(data, Tensor) and data.dtype == self.dtype
        self.array = data.array if is_shared else Tensor(data, self.dtype).array
        self.sliced = slice_shape
        return self

    def __repr__(self) -> str:
        return (
            f"Parameter (name={self.name}, shape={self.shape}, dtype={_shown(self.dtype)}, "
            f"requires_grad={self.requires_grad})"
        )


def _converted(array: Array, dtype: np.dtype[Any]) -> Array:
    """Return an array in another dtype, if possible without a copy."""
    if dtype == qint4x2 != array.dtype:
        return array.astype(int8).view(qint4x2)
    return array.astype(dtype, copy=False)


def _shown(dtype: np.dtype[Any]) -> str:
    """Return a dtype's name as MindSpore prints it."""
    return BY_NAME[dtype.name].mindspore or dtype.name


def numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """Return a dtype of numpy or MindSpore as numpy's, in the machine's byte order.

    >>> numpy_dtype(">f4"), numpy_dtype(bfloat16)
    (dtype('float32'), dtype(bfloat16))
    """
    try:
        name = np.dtype(dtype).name
    except TypeError:
        name = str(dtype).lower()
    if (known := _DTYPES.get(name.replace("_", ""))) is None:
        raise TypeError(f"no checkpoint holds elements of dtype {name}")
    return known


def is_array(value: Any) -> bool:
    """Return whether a value is an array or tensor of any library, not a number or a list of them."""
    return hasattr(value, "asnumpy") or hasattr(value, "__array__")


def array_of(value: Any) -> Array:
    """Return the elements of a Tensor, here or MindSpore's, or of anything that numpy takes, if possible uncopied."""
    if isinstance(value, Tensor):
        return value.array
    if hasattr(value, "export_data"):
        raise TypeError("a MapParameter has no array of values; save it with mindspore.save_checkpoint")
    if not hasattr(value, "asnumpy"):
        return np.asarray(value)
    array, dtype = value.asnumpy(), numpy_dtype(value.dtype)
    return array if array.dtype == dtype else array.view(dtype)  # type: ignore[no-any-return]


def as_tensor(value: Any, name: str) -> Tensor:
    """Return a Tensor, a Parameter or an array as a Tensor, if possible without a copy."""
    if not is_array(value):
        raise TypeError(f"{name!r}: expected a Parameter, a Tensor or an array; got {type(value).__name__}")
    try:
        return Tensor.from_numpy(array_of(value))
    except TypeError as error:
        raise TypeError(f"{name!r}: {error}") from error


def as_parameter(value: Any, where: str) -> Parameter:
    """Return a Parameter as it is, and MindSpore's own as one of ours, over the same memory."""
    if isinstance(value, Parameter):
        return value
    name = getattr(value, "name", None)
    if not isinstance(name, str) or not hasattr(value, "asnumpy"):
        raise TypeError(f"{where} is {type(value).__name__}; expected a Parameter, here or MindSpore's")
    parameter = Parameter.over(as_tensor(value, name).array, name)
    parameter.requires_grad = bool(getattr(value, "requires_grad", True))
    parameter.layerwise_parallel = bool(getattr(value, "layerwise_parallel", False))
    return parameter


def as_mindspore(tensor: Tensor) -> Any:
    """Return a tensor as MindSpore's own, which must have been imported."""
    mindspore: Any = sys.modules["mindspore"]
    dtype = {"dtype": mindspore.qint4x2} if tensor.dtype == qint4x2 else {}
    return mindspore.Tensor(tensor.asnumpy(), **dtype)
