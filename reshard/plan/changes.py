"""Describe how a conversion changes tensors, in plans, reports and verifications."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Literal, NamedTuple

from reshard.dtypes import by_name
from reshard.errors import Option, Text, UsageError
from reshard.plan.inputs import cast_fault

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from reshard.plan.inputs import Selection
    from reshard.plan.plan import Plan
    from reshard.source.checkpoint import Checkpoint


class Change(NamedTuple):
    """One difference between a target and its source.

    Attributes:
        kind: the cause: values were changed (`lora`, `rules`, `cast`), names were changed (`rules`, `names`), or
            tensors were left out (`selection`).
        text: the change, in words.
        tensors: how many tensors of the target it affects.
        detail: the directory of the adapter, the rules file, or the cast, as `float32=bfloat16`.
    """

    kind: Literal["lora", "rules", "names", "cast", "selection"]
    text: str
    tensors: int
    detail: str = ""


def changes(source: Checkpoint, selection: Selection, pairs: Iterable[tuple[str, str]]) -> tuple[Change, ...]:
    """Return the changes between a source's tensors and the target's.

    Args:
        source: the source, with its adapter and rules (`select.derived`).
        selection: the selection that was applied.
        pairs: the source name and the target name of each tensor.
    """
    return tuple(_changes(source, selection, dict(pairs)))


def changes_of(plan: Plan) -> tuple[Change, ...]:
    """Return the changes of a plan; empty if it was combined from other plans."""
    if plan.request is None:
        return ()
    pairs = [(transfer.source_name, transfer.name) for transfer in plan.transfers]
    return changes(plan.source, plan.request.selection, [*pairs, *((name, name) for name in plan.texts)])


def described(found: Iterable[Change]) -> str:
    """Return the changes of values and names as text; empty if there are none.

    >>> described([Change("cast", "cast to bfloat16", 6), Change("selection", "weights only", 6)])
    'cast to bfloat16'
    """
    return ", ".join(change.text for change in found if change.kind != "selection")


def _changes(source: Checkpoint, selection: Selection, new_names: dict[str, str]) -> Iterator[Change]:
    tensors = {old: source.tensors[old] for old in new_names if old in source.tensors}
    pairs = {old: new for old, new in new_names.items() if old in tensors and tensors[old].text is None}
    origin, total = source.origin, len(pairs)
    if origin is not None and origin.lora is not None:
        merged = len(origin.merged if origin.rules else origin.merged & pairs.keys())
        if merged:
            root = origin.lora.root
            name = root.rstrip("/").rpartition("/")[2]
            yield Change("lora", f'LoRA adapter "{name}" merged into {_count(merged, "weight")}', merged, root)
    if origin is not None and origin.rules is not None:
        yield Change("rules", f"in the names and shapes of {origin.side}", total, origin.rules.root)
    renamed = sum(old != new for old, new in pairs.items())
    if renamed:
        yield Change("names", f"{_count(renamed, 'tensor')} renamed", renamed)
    dtypes = Counter((tensors[old].spec.dtype, selection.target_dtype(source, old)) for old in pairs)
    for (before, after), count in dtypes.items():
        if before is not after:
            share = "" if count == total else f"{count:,} of {_count(total, 'tensor')} "
            yield Change("cast", f"{share}cast to {after}", count, f"{before}={after}")
    if selection.weights_only:
        yield Change("selection", "weights only", total)
    if selection.include or selection.exclude or source.left_out:
        source_total = sum(tensor.text is None for tensor in source.tensors.values()) + len(source.left_out)
        if total < source_total:
            yield Change("selection", f"{_count(source_total - total, 'other')} left out", total)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def cast_advice(target: str, source: str, count: int, sides: tuple[str, str]) -> Text | None:
    """Return how to compare tensors of two dtypes, or None if neither can be cast.

    >>> str(cast_advice("bfloat16", "float32", 6, ("b", "a"))).partition("; ")[0]
    '6 tensors are bfloat16 in the target, float32 in the source'
    >>> str(cast_advice("float32", "bfloat16", 1, ("b", "a"))).partition("; ")[2]
    "reshard diff b a compares numbers; to compare with a cast exchange the two and give cast={'float32': 'bfloat16'}"
    """
    after, before = by_name(target, UsageError), by_name(source, UsageError)
    directions = [(before, after, ""), (after, before, "exchange the two and ")]
    legal = [direction for direction in directions if not cast_fault(*direction[:2])]
    if not legal:
        return None
    old, new, first = min(legal, key=lambda direction: direction[1].itemsize)  # casts usually narrow
    tensors = f"{_count(count, 'tensor')} {'is' if count == 1 else 'are'} {after} in the target, {before} in the source"
    numbers = f"reshard diff {' '.join(sides)} compares numbers"
    return Text(f"{tensors}; {numbers}; to compare with a cast {first}give ", Option("cast", old.name, new.name))
