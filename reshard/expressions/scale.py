"""Scaled and shifted tensors: `x * factor + shift` in float32, rounded once."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.core.model.checkpoint import matched
from reshard.core.model.facts import Computation
from reshard.errors import Faults, SourceError, UsageError, names
from reshard.expressions.average import FLOATS, LARGEST, WeightedSum
from reshard.expressions.computed import computed
from reshard.expressions.operand import Operand

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.core.model.checkpoint import Checkpoint


def scale(source: Checkpoint, patterns: Sequence[str], factor: float, shift: float) -> Checkpoint:
    """Return a checkpoint in which chosen tensors are multiplied by a factor, and a number is added.

    Args:
        source: the checkpoint.
        patterns: names of tensors, or globs; every one must match.
        factor: the factor.
        shift: the number that is added to the product.

    Raises:
        UsageError: a pattern matches no tensor, a number is not finite, or nothing is changed.
        SourceError: a tensor is not of floats, or has blocks in no file; all at once.
    """
    factor, shift = (_number(word, number) for word, number in (("factor", factor), ("shift", shift)))
    if not patterns or (factor, shift) == (1, 0):
        missing = "factor is 1 and shift is 0" if patterns else "no tensor is named"
        hint = "give names, and a factor or a shift"
        raise UsageError(f"scale changes nothing: {missing}", code="no-effect", hint=hint)
    faults = Faults(source.root)
    expressions = {}
    for name in sorted(matched(source.root, source.all_names, patterns)):
        try:
            source.require(name)
            operand = Operand(source, name)
            operand.require()
        except SourceError as error:
            faults.add(f"tensor {name!r}", error)
            continue
        dtype = operand.spec.dtype
        if dtype.name in FLOATS:
            expressions[name] = WeightedSum((operand,), (factor,), dtype, shift)
        else:
            faults.add(f"tensor {name!r}", f"is {dtype}; expected {names(FLOATS)}", code="wrong-dtype")
    faults.raise_if_any(SourceError)
    options = {"patterns": list(patterns), "factor": factor, "shift": shift}
    opening = replace(source.opening, computation=Computation("scale", options, (source,)))
    return replace(computed(source, expressions), opening=opening, origin=None)


def _number(word: str, value: object) -> float:
    """Return a number of float32; raise `UsageError` for other values."""
    with suppress(TypeError, ValueError, OverflowError):
        if abs(number := float(value)) <= LARGEST:  # type: ignore[arg-type]  # others raise
            return number
    raise UsageError(f"{word} is {value!r:.60}; expected a number that float32 can hold", code="bad-value")
