"""Averages of checkpoints: weighted sums in float32, rounded once.

The arithmetic: `acc = f32(w0) * f32(a)`, then `acc + f32(w1) * f32(b)` and so on, in the given order; each product and
each sum is rounded to float32 by itself, and the result once to its dtype. float64 is summed in float64.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard.errors import SourceError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from reshard.dtypes import DType
    from reshard.expressions.operand import Operand
    from reshard.layout.block import Block, Shape


CHUNK = 1 << 15
"""How many elements are added at once, so that they stay in a core's own cache."""


@dataclass(frozen=True, slots=True, eq=False)
class WeightedSum:
    """The weighted sum of tensors of one shape, in float32.

    Attributes:
        operands: the tensors, in the order in which they are added.
        weights: their weights.
        dtype: the dtype of the result.
        shift: a number that is added at the end, if it is not 0.
        wide: the dtype of the sums.
    """

    operands: tuple[Operand, ...]
    weights: tuple[float, ...]
    dtype: DType
    shift: float = 0.0
    wide: np.dtype[Any] = field(init=False)

    def __post_init__(self) -> None:
        wide = np.float64 if any(operand.spec.dtype.name == "float64" for operand in self.operands) else np.float32
        object.__setattr__(self, "wide", np.dtype(wide))

    @property
    def shape(self) -> Shape:
        """Return the shape of the result."""
        return self.operands[0].spec.shape

    @property
    def scratch(self) -> int:
        """Return the bytes for each element: a sum, a product, and an operand."""
        return 2 * self.wide.itemsize + max(op.spec.dtype.itemsize for op in self.operands)

    def evaluate(self, box: Block, out: NDArray[Any]) -> None:
        """Fill an array with sums."""
        wide = self.wide
        total, product = np.empty(out.size, wide), np.empty(min(out.size, CHUNK), wide)
        with np.errstate(over="ignore", invalid="ignore"):
            for number, (operand, weight) in enumerate(zip(self.operands, self.weights, strict=True)):
                content, factor = operand.read(box).reshape(-1), wide.type(weight)
                for begin in range(0, out.size, CHUNK):
                    part = total[begin : begin + CHUNK]
                    target = product[: len(part)] if number else part
                    np.copyto(target, content[begin : begin + CHUNK])
                    np.multiply(target, factor, out=target)
                    if number:
                        np.add(part, target, out=part)
            if self.shift:
                np.add(total, wide.type(self.shift), out=total)
            np.copyto(out.reshape(-1), total, casting="unsafe")

    def definition(self) -> str:
        """Return the weights and the dtype."""
        weights = [float.hex(float(weight)) for weight in (*self.weights, self.shift)]
        return f"sum {weights} {self.dtype}"


@dataclass(frozen=True, slots=True, eq=False)
class Same:
    """A tensor that must be equal in all checkpoints, such as one of integers."""

    operands: tuple[Operand, ...]

    @property
    def dtype(self) -> DType:
        """Return the dtype of the first."""
        return self.operands[0].spec.dtype

    @property
    def shape(self) -> Shape:
        """Return the shape of the result."""
        return self.operands[0].spec.shape

    @property
    def scratch(self) -> int:
        """Return the bytes for each element: two operands, and whether they are equal."""
        return 2 * self.dtype.itemsize + 1

    def evaluate(self, box: Block, out: NDArray[Any]) -> None:
        """Fill an array with the common values.

        Raises:
            SourceError: they differ.
        """
        first, *others = self.operands
        out[...] = first.read(box)
        bits = self.dtype.carrier()
        for other in others:
            if not np.array_equal(other.read(box).view(bits), out.view(bits)):
                raise SourceError(
                    f"tensor {first.name!r} of {other.checkpoint.root} differs from that of {first.checkpoint.root}",
                    code="different-values", facts=[f"{self.dtype} cannot be averaged"],
                )  # fmt: skip

    def definition(self) -> str:
        """Return the name of the rule."""
        return f"same of {len(self.operands)}"
