"""Tensors that are not stored, but follow from stored ones or from numbers: rounded copies, and single numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reshard.expressions.arithmetic import rounded, scratch
from reshard.expressions.operand import AnyBox

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from reshard.dtypes import DType
    from reshard.expressions.operand import Operand
    from reshard.layout.block import Block, Shape


@dataclass(frozen=True, slots=True, eq=False)
class Cast(AnyBox):
    """A tensor in another dtype, rounded to nearest, ties to even."""

    operand: Operand
    dtype: DType

    @property
    def shape(self) -> Shape:
        """Return the shape of the operand."""
        return self.operand.spec.shape

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Return the operand."""
        return (self.operand,)

    @property
    def scratch(self) -> int:
        """Return the bytes of an element of the operand."""
        return self.operand.spec.dtype.itemsize

    def definition(self) -> str:
        """Return the dtype."""
        return f"cast {self.dtype}"

    def evaluate(self, box: Block, out: NDArray[Any]) -> None:
        """Fill an array with rounded elements."""
        dtype = self.operand.spec.dtype
        with scratch(box.shape, dtype.carrier()) as bits:
            self.operand.read_into(box, bits)
            rounded(bits.view(dtype.numpy()), out)


@dataclass(frozen=True, slots=True, eq=False)
class Number(AnyBox):
    """A number as a tensor without dimensions."""

    value: float
    dtype: DType

    @property
    def shape(self) -> Shape:
        """Return the shape of a number."""
        return ()

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Return nothing: it reads no tensor."""
        return ()

    @property
    def scratch(self) -> int:
        """Return 0."""
        return 0

    def definition(self) -> str:
        """Return the number."""
        return f"number {self.value!r} {self.dtype}"

    def evaluate(self, box: Block, out: NDArray[Any]) -> None:  # noqa: ARG002 -- it has one element
        """Fill an array with the number."""
        out[...] = self.value
