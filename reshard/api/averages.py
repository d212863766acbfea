"""`reshard.average`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from reshard.api.checkpoints import Checkpoint, record_of
from reshard.arguments import checked
from reshard.dtypes import name_of
from reshard.errors import Option, ReshardError, Text
from reshard.expressions.average import average as average_of
from reshard.messages import warn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import DTypeLike

_METHODS = {"dequantize": "checkpoint.dequantize('bfloat16')", "exclude": "checkpoint.sel(...)"}
"""What is done to the inputs, by the option of the command."""


@checked
def average(
    checkpoints: Sequence[Checkpoint],
    weights: Sequence[float] | Literal["linear", "minus-sqrt"] | None = None,
    *,
    dtype: DTypeLike | None = None,
    states: bool = False,
) -> Checkpoint:
    """Return the weighted average of checkpoints, computed when it is read or written.

    The checkpoints may have any layouts and formats; optimizer states and other training state are left out. Sums are
    in float32, in the given order: each product and each sum is rounded by itself, and the result once, to its dtype.

    Args:
        checkpoints: opened checkpoints with the same names and shapes. Integers and the like must be equal in all.
        weights: a factor for each, used as it is; by default they are equal, with the sum 1. Or a schedule, for
            checkpoints in the order of their steps: their average is as after a decay of the learning rate. `linear`
            means equal weights, `minus-sqrt` larger ones for older checkpoints.
        dtype: the dtype of all results that are floats; by default each has the dtype in the first checkpoint.
        states: average optimizer states, too; the step and other training state are taken from the first.

    Raises:
        reshard.SourceError: names, shapes, or kinds of dtypes differ, or tensors cannot be averaged; all at once.
        reshard.UsageError: fewer than two checkpoints, or weights or a dtype that cannot be used.

    >>> source = reshard.open("src_checkpoints", strategy="src_strategy.ckpt")
    >>> mean = reshard.average([source, source.scale("net.*", factor=3)], [0.5, 0.5])
    >>> mean.sel("net.*").nbytes
    7456
    """
    records = [record_of(each, f"checkpoint {number}") for number, each in enumerate(checkpoints)]
    try:
        average = average_of(records, weights, None if dtype is None else name_of(dtype), states)
    except ReshardError as error:
        raise error.changed(_with_methods) from None
    known = {text for record in records for text in record.warnings}
    warn(text for text in average.warnings if text not in known)
    return Checkpoint(average)


def _with_methods(text: str) -> Text:
    """Return a text with methods of the inputs in place of options."""
    parts = Text(text).parts
    return Text(*(_METHODS.get(part.name, part) if isinstance(part, Option) else part for part in parts))
