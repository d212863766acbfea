"""`Tensor` and `Parameter`: numpy arrays with MindSpore's methods; and conversion from and to other libraries' tensors.

A checkpoint script handles parameters by `name`, `data`, `asnumpy()` and `set_data()`; these classes have little more.
They compute nothing: a script computes with `asnumpy()`.

Dtypes are numpy's (bfloat16 and float8 those of ml_dtypes), also under MindSpore's names: `float32`, `bfloat16`,
`bool_` and so on are numpy dtypes. So a bfloat16 tensor goes to numpy and back as it is, and `str(tensor.dtype)` is
`float32`, where MindSpore prints `Float32`.

No framework is imported: a framework's tensor belongs to one that is imported already. Its dtype is read from the
tensor, not from its numpy array, since two kinds are lost there: MindSpore's `Int4` comes as int8; its bfloat16 and
float8 come as dtypes of its own, which neither ml_dtypes nor numpy's casts know.

Source: MindSpore 2.10 `common/tensor.py` (`asnumpy`), `common/parameter.py`, `common/dtype.py`.
"""

from __future__ import annotations

import sys
from itertools import count
from typing import Any, Self

import ml_dtypes
import numpy as np

from reshard.dtypes import BY_NAME, INT4, DType

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

_DTYPE_NAMES = ", ".join(name for name, value in list(globals().items()) if isinstance(value, np.dtype))

_KINDS = {name.replace("_", ""): kind for name, kind in BY_NAME.items()}

_unnamed = count()


class Tensor:
    """An array with a shape and a dtype.

    Args:
        input_data: an array, a Tensor (ours, MindSpore's or torch's), a number, or nested lists of numbers. Arrays
            are copied, as MindSpore does.
        dtype: the dtype to convert to: one of this module, of MindSpore, or anything that numpy accepts as one. By
            default the array's; for plain numbers int64 for integers and float32 for floats, as in MindSpore.

    Attributes:
        array: the elements, row-major in the machine's byte order; Int4 as int8.
        kind: their entry in `reshard`'s dtype table, which has their name in each file format.

    Raises:
        TypeError: the data is not an array of numbers, or of a kind that a checkpoint cannot hold.

    >>> tensor = Tensor(np.array([[1, 2], [3, 4]], np.float16))
    >>> tensor.shape, tensor.dtype == float16, tensor.asnumpy()[1].tolist()
    ((2, 2), True, [3.0, 4.0])
    >>> Tensor([1.5, 2]).dtype, Tensor(1).dtype, Tensor([1, 2], bfloat16).asnumpy()
    (dtype('float32'), dtype('int64'), array([1, 2], dtype=bfloat16))
    """

    __slots__ = ("array", "kind")
    array: Array
    kind: DType
    __hash__ = object.__hash__

    def __init__(self, input_data: Any, dtype: Any = None) -> None:
        if isinstance(input_data, str | bytes):
            raise TypeError(f"a Tensor is made of numbers; got {type(input_data).__name__} {input_data[:20]!r}")
        array = np.array(array_of(input_data) if is_array(input_data) else input_data, order="C")
        if dtype is None:
            is_plain = array.dtype == float64 and not hasattr(input_data, "dtype")
            own = input_data.dtype if isinstance(input_data, Tensor) else array.dtype
            dtype = float32 if is_plain else own  # Python's floats, as in MindSpore
        self.array, self.kind = _converted(array, numpy_dtype(dtype))

    @classmethod
    def from_numpy(cls, array: Array) -> Tensor:
        """Return a tensor over an array, which is not copied unless it is strided or in foreign byte order.

        Raises:
            TypeError: it is not an array, or of a kind that a checkpoint cannot hold.
        """
        if not isinstance(array, np.ndarray):
            raise TypeError(f"from_numpy takes a numpy array; got {type(array).__name__}")
        array = array_of(array)
        return Tensor.of_kind(*_converted(np.asarray(array, order="C"), array.dtype))

    @classmethod
    def of_kind(cls, array: Array, kind: DType) -> Self:
        """Return a tensor over a row-major array whose elements are of a kind of the table."""
        tensor = cls.__new__(cls)
        tensor.array, tensor.kind = array, kind
        return tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the length of each dimension."""
        return tuple(self.array.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the kind of the elements, a numpy dtype."""
        return dtype_of(self.kind)

    @property
    def ndim(self) -> int:
        """Return the number of dimensions."""
        return self.array.ndim

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return self.array.size

    @property
    def nbytes(self) -> int:
        """Return the size of the elements, in bytes."""
        return self.array.nbytes

    def asnumpy(self) -> Array:
        """Return the array itself, not a copy."""
        return self.array

    numpy = asnumpy

    def astype(self, dtype: Any) -> Tensor:
        """Return a copy in another dtype, rounded as numpy and ml_dtypes do (to the nearest, ties to even)."""
        return Tensor(self.data, dtype)

    @property
    def data(self) -> Tensor:
        """Return the tensor itself; for a Parameter, the tensor without its name."""
        return self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if dtype is not None and np.dtype(dtype) != self.array.dtype:
            if copy is False:
                raise ValueError(f"{self.dtype} cannot become {np.dtype(dtype)} without a copy")
            return self.array.astype(dtype)
        return self.array.copy() if copy else self.array

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a Tensor without dimensions has no length")
        return len(self.array)

    def __getitem__(self, index: Any) -> Tensor:
        return Tensor.of_kind(np.asarray(self.array[index], order="C"), self.kind)

    def __eq__(self, other: object) -> Any:
        """Compare element by element, as arrays do; return a numpy array of bool."""
        return self.array == (array_of(other) if is_array(other) else other)

    def __ne__(self, other: object) -> Any:
        """Compare element by element."""
        return self.array != (array_of(other) if is_array(other) else other)

    def __bool__(self) -> bool:
        return bool(self.array)

    def __int__(self) -> int:
        return int(self.array.item())

    def __float__(self) -> float:
        return float(self.array.item())

    def __repr__(self) -> str:
        return f"Tensor(shape={list(self.shape)}, dtype={_shown(self.kind)}, value={self.array})"

    def __str__(self) -> str:
        return str(self.array)


class Parameter(Tensor):
    """A tensor with a name, as checkpoints hold it.

    Args:
        default_input: the value, as for `Tensor`. An integer becomes int32 here, as in MindSpore.
        name: by default `Parameter#0` and so on, as in MindSpore; without blanks around it.
        requires_grad: kept and returned, as are `layerwise_parallel` and `parallel_optimizer`; nothing is trained here.
        layerwise_parallel: this parameter is split by the network itself (r1.5).
        parallel_optimizer: the optimizer may split this parameter.
        storage_format: accepted; says how a device arranges the bytes.
        device: accepted; everything is in the memory of the host.

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
        is_integer = isinstance(default_input, int) and not isinstance(default_input, bool)
        super().__init__(default_input, int32 if is_integer else None)
        self.name = name
        self.requires_grad = requires_grad
        self.layerwise_parallel = layerwise_parallel
        self.parallel_optimizer = parallel_optimizer

    @classmethod
    def over(cls, tensor: Tensor, name: str) -> Parameter:
        """Return a parameter that shares the array of a tensor; `Parameter(tensor, name)` copies it."""
        parameter = cls.of_kind(tensor.array, tensor.kind)
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
        return Tensor.of_kind(self.array, self.kind)

    def value(self) -> Tensor:
        """Return the value as a Tensor."""
        return self.data

    def set_data(self, data: Any, slice_shape: bool = False) -> Parameter:
        """Set another value, converted to the parameter's dtype.

        The shape may change even if `slice_shape` is false: MindSpore's page says that shapes are compared then, but
        MindSpore 2.10 does not compare them, and its scripts must run here.

        Args:
            data: the value. A Tensor's array is shared if its dtype is the parameter's; MindSpore's own Tensor or
                Parameter is copied.
            slice_shape: the value is one device's slice; kept as `sliced`.

        Raises:
            TypeError: the value is neither a Tensor nor a number, or a float for a parameter of integers.
        """
        if not isinstance(data, Tensor) and hasattr(data, "asnumpy"):
            data = Tensor(data)
        if not isinstance(data, Tensor | int | float):
            raise TypeError(
                f"parameter {self.name!r}: its data is set from a Tensor, an int or a float; got "
                f"{type(data).__name__} (make it a Tensor)"
            )
        if isinstance(data, float) and self.array.dtype.kind in "iub":
            raise TypeError(f"parameter {self.name!r} is of {self.dtype}; the float {data} cannot be converted to it")
        if not isinstance(data, Tensor) or data.dtype != self.dtype:
            data = Tensor(data, self.dtype)
        self.array, self.kind = data.array, data.kind
        self.sliced = slice_shape
        return self

    def __repr__(self) -> str:
        return (
            f"Parameter (name={self.name}, shape={self.shape}, dtype={_shown(self.kind)}, "
            f"requires_grad={self.requires_grad})"
        )

    __str__ = __repr__


def _converted(array: Array, dtype: np.dtype[Any]) -> tuple[Array, DType]:
    """Return an array in another dtype and the machine's byte order, and that dtype's entry in the table."""
    if dtype == qint4x2:
        return array.view(np.int8) if array.dtype == qint4x2 else array.astype(np.int8), INT4
    kind = BY_NAME.get(dtype.name)
    if kind is None or dtype.kind in "US":
        raise TypeError(f"no checkpoint holds elements of dtype {dtype}; known are {_DTYPE_NAMES}")
    return array.astype(dtype.newbyteorder("="), copy=False), kind


def _shown(kind: DType) -> str:
    """Return a dtype's name as MindSpore prints it.

    >>> _shown(BY_NAME["bfloat16"]), _shown(BY_NAME["bool"]), _shown(BY_NAME["float8_e5m2"])
    ('BFloat16', 'Bool', 'Float8E5M2')
    """
    return kind.mindspore or {"float8_e4m3fn": "Float8E4M3FN", "float8_e5m2": "Float8E5M2"}.get(kind.name, kind.name)


def as_tensor(value: Any, name: str) -> Tensor:
    """Return a Tensor, a Parameter or an array as a Tensor, if possible without a copy.

    Raises:
        TypeError: `array_of` does not take it; the message begins with the name.
    """
    if isinstance(value, Tensor):
        return value.data
    try:
        return Tensor.from_numpy(array_of(value))
    except TypeError as error:
        raise TypeError(f"{name!r}: {error}") from error


def as_parameter(value: Any, where: str) -> Parameter:
    """Return a Parameter as it is, and MindSpore's own as one of ours, over the same memory.

    Raises:
        TypeError: it has no name and `asnumpy()`; the message begins with `where`.
    """
    if isinstance(value, Parameter):
        return value
    name = getattr(value, "name", None)
    if not isinstance(name, str) or not hasattr(value, "asnumpy"):
        raise TypeError(
            f"{where} is {type(value).__name__}; expected a Parameter, here or MindSpore's, which has a name and data"
        )
    parameter = Parameter.over(as_tensor(value, name), name)
    for flag in ("requires_grad", "layerwise_parallel", "parallel_optimizer", "sliced"):
        setattr(parameter, flag, bool(getattr(value, flag, getattr(parameter, flag))))
    return parameter


def kind_of(dtype: Any) -> DType | None:
    """Return the table's entry for a dtype of numpy, MindSpore or torch, or None.

    >>> kind_of(np.dtype(">f4")).name, kind_of("Float8E4M3FN").name, kind_of("torch.bool").name, kind_of("object")
    ('float32', 'float8_e4m3fn', 'bool', None)
    """
    name = dtype.name if isinstance(dtype, np.dtype) else str(dtype).rpartition(".")[2]
    return _KINDS.get(name.replace("_", "").lower())


def dtype_of(kind: DType) -> np.dtype[Any]:
    """Return the numpy dtype of a kind; `qint4x2` for Int4."""
    return qint4x2 if kind is INT4 else kind.numpy()


def numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """Return a dtype of numpy, MindSpore or torch as numpy's; raise TypeError if it is no dtype."""
    try:
        return np.dtype(dtype)  # type: ignore[no-any-return]
    except TypeError:
        if (kind := kind_of(dtype)) is None:
            raise
        return dtype_of(kind)


def is_array(value: Any) -> bool:
    """Return whether a value is an array or tensor of any library, not a number or a list of them."""
    return isinstance(value, np.ndarray | np.generic) or any(
        hasattr(value, method) for method in ("asnumpy", "detach", "__array__")
    )


def array_of(value: Any) -> Array:
    """Return the elements of an array of any library, if possible without a copy.

    Args:
        value: a Tensor, a numpy array, a MindSpore Tensor or Parameter, a `torch.Tensor`, or an object with
            `__array__`.

    Raises:
        TypeError: it is none of these, or a MindSpore `MapParameter`, whose values are in a table on the device.
    """
    if isinstance(value, Tensor):
        return value.array
    if not is_array(value):
        raise TypeError(f"expected a Parameter, a Tensor or an array; got {type(value).__name__}")
    if hasattr(value, "export_data"):
        raise TypeError("a MapParameter has no array of values; save it with mindspore.save_checkpoint")
    array: Array
    if hasattr(value, "asnumpy"):
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
    return array.view(dtype_of(kind))


_NOT_FROM_NUMPY = ("bfloat", "float8")
"""Beginnings of the names of dtypes of ml_dtypes, which torch does not exchange with numpy."""


def _of_torch(tensor: Any) -> Array:
    """Return the elements of a torch tensor, which gives numpy no bfloat16 and no float8."""
    array: Array
    kind = kind_of(tensor.dtype)
    if kind is None or not kind.name.startswith(_NOT_FROM_NUMPY):
        array = tensor.numpy()
        return array
    torch: Any = sys.modules["torch"]
    array = tensor.view(torch.int8 if kind.itemsize == 1 else torch.int16).numpy()
    return array.view(kind.numpy())


def as_torch(tensor: Tensor) -> Any:
    """Return a tensor as torch's own, which must have been imported."""
    torch: Any = sys.modules["torch"]
    array = tensor.array if tensor.array.flags.writeable else tensor.array.copy()
    if hasattr(torch, tensor.kind.name) and tensor.kind.name.startswith(_NOT_FROM_NUMPY):
        bits = array.view(np.int8 if array.itemsize == 1 else np.int16)
        return torch.from_numpy(bits).view(getattr(torch, tensor.kind.name))
    return torch.from_numpy(array)


def as_mindspore(tensor: Tensor) -> Any:
    """Return a tensor as MindSpore's own, which must have been imported."""
    mindspore: Any = sys.modules["mindspore"]
    if tensor.kind.name == "bfloat16":  # its own bfloat16 is another numpy dtype than ml_dtypes'
        return mindspore.Tensor(tensor.array.view(np.uint16)).view(mindspore.bfloat16)
    if tensor.kind is INT4:
        return mindspore.Tensor(tensor.array, dtype=mindspore.qint4x2)
    return mindspore.Tensor(tensor.array)
