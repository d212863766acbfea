"""Scaled and shifted tensors: `x * factor + shift` in float32, rounded once."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING

from reshard.errors import Faults, SourceError, UsageError
from reshard.expressions.average import WeightedSum
from reshard.expressions.computed import computed
from reshard.expressions.operand import Operand
from reshard.source.checkpoint import matched
from reshard.source.facts import Computation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.source.checkpoint import Checkpoint


def scale(source: Checkpoint, patterns: Sequence[str], factor: float, shift: float) -> Checkpoint:
    """Return a checkpoint in which chosen tensors are multiplied by a factor, and a number is added.

    Args:
        source: the checkpoint.
        patterns: names of tensors, or globs; every one must match.
        factor: the factor.
        shift: the number that is added to the product.

    Raises:
        UsageError: a pattern matches no tensor, or a number is not finite.
        SourceError: a tensor is not of floats, or has blocks in no file; all at once.
    """
    for word, number in (("factor", factor), ("shift", shift)):
        if not isfinite(number):
            raise UsageError(f"{word} is {number}; expected a finite number", code="bad-value")
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
        if "float" in dtype.name:
            expressions[name] = WeightedSum((operand,), (factor,), dtype, shift)
        else:
            faults.add(f"tensor {name!r}", f"is {dtype}; expected floats", code="wrong-dtype")
    faults.raise_if_any(SourceError)
    options = {"patterns": list(patterns), "factor": factor, "shift": shift}
    opening = replace(source.opening, computation=Computation("scale", options, (source,)))
    return replace(computed(source, expressions), opening=opening)
