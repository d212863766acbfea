"""MindSpore's classes as far as a border to them shows: dtypes, Tensor, Parameter, MapParameter, Cell.

They behave as MindSpore 2.10 does on a CPU (tests/test_ms_foreign.py compares, where that is there): dtypes that numpy
does not know, a bfloat16 and a float8 of its own in numpy, Int4 that comes as int8, and a refusal of all that is not
its own.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    import pytest

Array = np.ndarray[Any, np.dtype[Any]]


class DType:
    """A dtype that numpy cannot interpret."""

    def __init__(self, shown: str, stored: Any, name: str) -> None:
        self.shown, self.stored, self.name = shown, np.dtype(stored), name

    def __str__(self) -> str:
        return self.shown

    def __repr__(self) -> str:
        return f"mindspore.{self.name}"


OWN_8_BITS = np.dtype({"names": [], "formats": [], "offsets": [], "itemsize": 1})

DTYPES = {
    **{
        name: DType(shown, stored, name)
        for name, shown, stored in (
            ("bool_", "Bool", "bool"), ("int8", "Int8", "int8"), ("int32", "Int32", "int32"),
            ("int64", "Int64", "int64"), ("uint16", "UInt16", "uint16"), ("float16", "Float16", "float16"),
            ("float32", "Float32", "float32"), ("float64", "Float64", "float64"),
            ("complex64", "Complex64", "complex64"),
            ("bfloat16", "BFloat16", "V2"), ("qint4x2", "Int4", "int8"),
        )
    },
    "float8_e5m2": DType("Float8E5M2", OWN_8_BITS, "float8_e5m2"),
    "float8_e4m3fn": DType("Float8E4M3FN", OWN_8_BITS, "float8_e4m3fn"),
    "complex128": DType("Complex128", "complex128", "complex128"),
}  # fmt: skip


class Tensor:
    """Bits, with a dtype."""

    def __init__(self, given: Any, dtype: DType | None = None) -> None:
        if not isinstance(given, Tensor | np.ndarray | list | int | float):
            raise TypeError(f"For 'Tensor', the type of 'input_data' is {type(given)}")
        if isinstance(given, Tensor):
            self.array, self.dtype = given.array.copy(), given.dtype
        elif dtype is not None and dtype.stored.kind == "V":
            rounded = np.asarray(given).astype(getattr(ml_dtypes, dtype.name))
            self.array, self.dtype = rounded.view(dtype.stored), dtype
        else:
            self.array = np.array(given, dtype and dtype.stored, order="C")
            name = "bfloat16" if self.array.dtype == ml_dtypes.bfloat16 else self.array.dtype.name
            self.dtype = dtype or DTYPES.get(name) or DTYPES["bool_"]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def data(self) -> Tensor:
        return self

    def view(self, dtype: DType) -> Tensor:
        tensor = Tensor(self)
        tensor.array, tensor.dtype = tensor.array.view(dtype.stored), dtype
        return tensor

    def asnumpy(self) -> Array:
        return self.array

    def assign_value(self, other: Tensor) -> None:
        assert isinstance(other, Tensor)
        assert (str(other.dtype), other.shape) == (str(self.dtype), self.shape)
        self.array = other.array

    copy_ = None


class Parameter(Tensor):
    """A Tensor with a name."""

    def __init__(self, given: Any, name: str = "w", requires_grad: bool = True) -> None:
        super().__init__(given)
        self.name, self.requires_grad, self.layerwise_parallel, self.sliced = name, requires_grad, False, False

    def set_data(self, data: Any, slice_shape: bool = False) -> None:
        if not isinstance(data, Tensor):
            raise TypeError(f"Parameter data must be a Tensor, but is {type(data)}")
        self.assign_value(data)
        self.sliced = slice_shape


class MapParameter(Parameter):
    """A table on a device, which looks like a tensor of one value."""

    def export_data(self) -> None:
        """The table."""


class Cell:
    """A network."""

    def __init__(self, *parameters: Parameter) -> None:
        self.parameters = parameters
        self.parameter_layout_dict: dict[str, Any] = {}

    def parameters_and_names(self) -> list[tuple[str, Parameter]]:
        return [(f"scope.{parameter.name}", parameter) for parameter in self.parameters]


def load_param_into_net(net: Cell, given: dict[str, Any], strict_load: bool = False) -> tuple[list[str], list[str]]:
    """As MindSpore's: its own Parameters only, one after the other."""
    assert all(isinstance(value, Parameter | str | list) for value in given.values())
    for parameter in net.parameters:
        if isinstance(given.get(parameter.name), Parameter):
            parameter.set_data(given[parameter.name])
    return [parameter.name for parameter in net.parameters if parameter.name not in given], []


def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have `mindspore` imported, as it is where its objects are."""
    module: Any = ModuleType("mindspore")
    module.nn = ModuleType("mindspore.nn")
    module.nn.Cell, module.Tensor, module.Parameter, module.MapParameter = Cell, Tensor, Parameter, MapParameter
    module.load_param_into_net = load_param_into_net
    for name, dtype in DTYPES.items():
        setattr(module, name, dtype)
    monkeypatch.setitem(__import__("sys").modules, "mindspore", module)
    return module
