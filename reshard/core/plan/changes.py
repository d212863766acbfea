"""Describe how a conversion changes tensors, in plans, reports and verifications; refuse changes without effect."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Literal, NamedTuple

from reshard.core.plan.inputs import Renaming, Selection, cast_fault
from reshard.core.plan.select import matching_counted, select_listed
from reshard.dtypes import by_name
from reshard.errors import Faults, Option, Text, UsageError, names
from reshard.expressions.quantized.methods import is_code
from reshard.strategy.names import matches, matching, no_match, optimizer_states

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.plan.plan import Plan


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
    if origin is not None and origin.lora is not None and (merged := origin.merged & pairs.keys()):
        root = origin.lora.root
        name = root.rstrip("/").rpartition("/")[2]
        states = optimizer_states({*source.all_names, *source.left_out}, source.opening.states)
        masters = len(merged & states.keys())
        numbers = (("weight", len(merged) - masters), ("master", masters))
        counts = [_count(number, noun) for noun, number in numbers if number]
        yield Change("lora", f'LoRA adapter "{name}" merged into {" and ".join(counts)}', len(merged), root)
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
    if selection.include or selection.exclude or selection.weights_only or source.left_out:
        left_out = left_out_text(source, select_listed(source, selection)[1])
        parts = ["weights only" if selection.weights_only else "", f"{left_out} left out" if left_out else ""]
        if text := ", ".join(filter(None, parts)):
            yield Change("selection", text, total)


def left_out_text(source: Checkpoint, by_selection: Sequence[str]) -> str:
    """Count the tensors and objects of a source that a target does not get, or return "".

    Args:
        source: the source; what was left out of it before counts, too.
        by_selection: the names that the selection does not choose.
    """
    objects = sum(name in source.extras.objects for name in by_selection)
    tensors = len(by_selection) - objects + len(source.left_out)
    counts = ((tensors, "tensor"), (objects, "object"))
    return " and ".join(_count(number, noun) for number, noun in counts if number)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def refuse_unused(plan: Plan, selection: Selection | None, dequantize: str | None = None) -> None:
    """Refuse a selection whose parts do not all have an effect on a plan.

    Args:
        plan: the plan.
        selection: what the user chose. A `drop` or `allow_missing` of `*` allows what may never happen.
        dequantize: the dtype to which weights were dequantized for the plan, if any.

    Raises:
        UsageError: an adapter, a cast, the name map or a pattern changes nothing; all at once.
    """
    selection, faults = selection or Selection(), Faults("selection")
    if dequantize is not None and not _reads_last_file(plan):
        hint = "choose quantized weights, or leave it out"
        _add(faults, Option("dequantize"), "has no effect: it changes nothing of what is chosen", hint)
    source, absent = plan.source, {*plan.left_out, *plan.dropped}
    converted = [transfer.source_name for transfer in plan.transfers]
    kept = [name for name in dict.fromkeys((*source.all_names, *converted)) if name not in absent]
    _find_unused_changes(source, selection, kept, faults)
    before = source.opened.all_names if source.origin else ()
    known = dict.fromkeys((*kept, *absent, *source.left_out, *before))
    for pattern in (pattern for pattern in selection.drop if pattern != "*"):
        dropped = set(matching(pattern, known))
        if not dropped:
            faults.add(Text(Option("drop", pattern)), no_match(pattern, known), code="no-match", alike=pattern)
        elif dropped.issubset(kept):
            hint = Text("to leave out what the target can hold, give ", Option("exclude", pattern))
            _add(
                faults, Option("drop", pattern), "has no effect: the target holds all that it matches",
                hint if plan.request else "leave it out",  # files that stay as they are cut take no other selection
            )  # fmt: skip
    for pattern in (pattern for pattern in selection.allow_missing if pattern != "*"):
        if not any(matches(name, [pattern]) for name in plan.missing):
            missing = f"missing are {names(plan.missing, most=3)}" if plan.missing else "nothing is missing"
            _add(faults, Option("allow_missing", pattern), f"has no effect: {missing}")
    faults.raise_if_any(UsageError)


def refuse_unused_changes(source: Checkpoint, selection: Selection, kept: Collection[str]) -> None:
    """Refuse a selection with a change that changes no tensor.

    Args:
        source: the source, with its adapter and rules.
        selection: the selection.
        kept: the names in the source of what goes to the target.

    Raises:
        UsageError: there are such changes; all at once.
    """
    faults = Faults("selection")
    _find_unused_changes(source, selection, kept, faults)
    faults.raise_if_any(UsageError)


def _find_unused_changes(source: Checkpoint, selection: Selection, kept: Collection[str], faults: Faults) -> None:
    """Add a fault for each change that changes no tensor."""
    if selection.lora and source.origin and source.origin.merged.isdisjoint(kept):
        states = optimizer_states(source.all_names, source.opening.states)
        changed = names(sorted(source.origin.merged, key=lambda name: (name in states, name)), most=3)
        hint = f"choose some of {changed}, or leave the adapter out"
        _add(faults, Option("lora"), "has no effect: it changes nothing of what is chosen", hint)
    tensors = [source.tensors[name] for name in kept if name in source.tensors and name not in source.extras.bound]
    dtypes = sorted({tensor.spec.dtype.name for tensor in tensors if tensor.text is None})
    for old, new in selection.cast.items():
        if old not in dtypes:
            hint = f"the tensors are {names(dtypes)}" if dtypes else "leave it out"
            _add(faults, Option("cast", old, new), f"has no effect: no tensor is {old}", hint)
        elif old == new:
            _add(faults, Option("cast", old, new), "has no effect")
    rename = Renaming(selection.name_map, set(source.all_names), source.opening.states)
    if selection.name_map and all(rename(name) == name for name in kept):
        hint = f"give names of what is chosen: {names(kept, most=3)}"
        _add(faults, Option("name_map"), "has no effect: it renames nothing of what is chosen", hint)
    included = {name for pattern in selection.include for name in matching_counted(pattern, source.all_names)}
    for pattern in selection.exclude if included else ():
        if included.isdisjoint(matching_counted(pattern, source.all_names)):
            _add(faults, Option("exclude", pattern), Text("has no effect on what ", Option("include"), " chooses"))


def _reads_last_file(plan: Plan) -> bool:
    """Return whether a plan needs the last file of its source, in which computed tensors are."""
    last = len(plan.source.files) - 1
    tensors = (plan.source.tensors.get(transfer.source_name) for transfer in plan.transfers)
    shardings = {tensor.sharding for tensor in tensors if tensor is not None}
    return any(at.file == last for sharding in shardings for replicas in sharding.replicas for at in replicas)


def _add(faults: Faults, option: Option, fault: str, hint: str = "leave it out") -> None:
    """Add a fault of an option without effect."""
    faults.add(Text(option), fault, code="no-effect", hint=hint, alike=str(Text(option)))


def cast_advice(target: str, source: str, count: int, sides: tuple[str, str]) -> Text | None:
    """Return how to compare tensors of two dtypes, or None if neither can be cast.

    >>> str(cast_advice("bfloat16", "float32", 6, ("b", "a"))).partition("; ")[0]
    '6 tensors are bfloat16 in the target, float32 in the source'
    >>> str(cast_advice("float32", "bfloat16", 1, ("b", "a"))).partition("; ")[2]
    "reshard diff b a compares numbers; to compare with a cast exchange the two and give cast={'float32': 'bfloat16'}"
    """
    after, before = by_name(target, UsageError), by_name(source, UsageError)
    directions = [(before, after, ""), (after, before, "exchange the two and ")]
    is_coded = is_code(after) or is_code(before)
    legal = [] if is_coded else [direction for direction in directions if not cast_fault(*direction[:2])]
    if not legal:
        return None
    old, new, first = min(legal, key=lambda direction: direction[1].itemsize)  # casts usually narrow
    tensors = f"{_count(count, 'tensor')} {'is' if count == 1 else 'are'} {after} in the target, {before} in the source"
    numbers = f"reshard diff {' '.join(sides)} compares numbers"
    return Text(f"{tensors}; {numbers}; to compare with a cast {first}give ", Option("cast", old.name, new.name))
