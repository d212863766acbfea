"""Tensors that are not stored, but follow from stored ones or from numbers: rounded copies, and single numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from reshard.core.model.facts import Computation
from reshard.dtypes import by_name
from reshard.errors import Faults, SourceError, UsageError, names
from reshard.expressions.arithmetic import rounded, scratch
from reshard.expressions.computed import computed
from reshard.expressions.operand import AnyBox, Operand

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from reshard.core.layout.block import Block, Shape
    from reshard.core.model.checkpoint import Checkpoint
    from reshard.dtypes import DType

FLOATS = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
"""The dtypes that `astype` converts, and converts to."""


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


def astype(source: Checkpoint, dtype: str) -> Checkpoint:
    """Return a checkpoint with all tensors of floats in another dtype; nothing is read.

    Args:
        source: the checkpoint.
        dtype: the dtype.

    Raises:
        UsageError: the dtype is not one of floats.
        SourceError: a tensor has blocks in no file; all at once.
    """
    target = by_name(dtype, UsageError, FLOATS)
    if target.name not in FLOATS:
        raise UsageError(
            f"tensors are not converted to {target}", code="unsupported-dtype", facts=[f"expected {names(FLOATS)}"]
        )
    faults = Faults(source.root)
    expressions = {}
    for name, tensor in source.tensors.items():
        if tensor.spec.dtype.name in FLOATS and tensor.spec.dtype != target:
            operand = Operand(source, name)
            try:
                operand.require()
            except SourceError as error:
                faults.add(f"tensor {name!r}", error)
            expressions[name] = Cast(operand, target)
    faults.raise_if_any(SourceError)
    opening = replace(source.opening, computation=Computation("astype", {"dtype": target.name}, (source,)))
    return replace(computed(source, expressions), opening=opening, origin=None)
