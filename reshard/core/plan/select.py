"""Select the tensors that a target gets, with their names and dtypes.

| in the files | source strategy | target strategy | a target rank gets |
|---|---|---|---|
| yes | any | names it | its block, if its stage holds the tensor |
| yes | names it | does not | nothing: dropped; a weight must be covered by a pattern |
| yes | does not | does not | a copy |
| no | any | names it | nothing: missing; a weight must be covered by a pattern |
| yes | any | there is none | a copy, unless its own name is among the patterns of what to drop |

A weight that one pipeline stage lacks is in another stage: if a single stage was requested, as the source or as the
target, such a weight is dropped or missing without a pattern.

Optimizer states that are dropped or missing are reported, but are no error. Without a source strategy the source is one
rank of whole tensors; without a target strategy the target is.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from reshard.core.layout.arrangement import Arrangement
from reshard.core.model.holdings import leave_out
from reshard.core.plan.inputs import Renaming, Selection, unmatched
from reshard.dtypes import by_name
from reshard.errors import Faults, Option, SourceError, Text, UsageError
from reshard.expressions.quantized.methods import refuse_parted
from reshard.strategy.names import (
    STEPS,
    is_step,
    is_training_state,
    matches,
    matching,
    one_stage_advice,
    optimizer_states,
    role_of,
)
from reshard.strategy.strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from reshard.core.model.checkpoint import Checkpoint
    from reshard.strategy.names import State

_COUNTED = re.compile(r"^(?P<glob>.+)@(?P<count>\d+)$", re.DOTALL)


class Selected(NamedTuple):
    """The tensors that go to a target.

    Attributes:
        kept: source name and target name of the tensors that are converted or copied, in the order of the files.
        objects: source name and target name of the chosen objects; equal if the target cannot hold objects.
        dropped: source names that the target does not get.
        missing: target names that the source does not have.
        left_out: source names that the selection does not choose.
    """

    kept: tuple[tuple[str, str], ...]
    objects: tuple[tuple[str, str], ...]
    dropped: tuple[str, ...]
    missing: tuple[str, ...]
    left_out: tuple[str, ...]


def select(
    source: Checkpoint, target: Strategy | Arrangement | None, selection: Selection, *, carries: bool = False
) -> Selected:
    """Apply a selection and the table above.

    Args:
        source: the checkpoint to convert.
        target: names the target tensors; None for all tensors, whole.
        selection: the user's selection.
        carries: the target can hold objects.

    Raises:
        SourceError: weights would be dropped or are missing, and no pattern covers them; all at once.
        UsageError: a pattern matches no tensor, or not its number of tensors; names collide.
    """
    strategy = source.strategy
    expected_tensors = target.tensors if target else {}
    states = all_states(source, target)
    chosen = _chosen(source, selection, states)
    names_held = (*source.tensors, *(source.extras.objects if carries else ()))
    new_names = selection.renamed(
        [name for name in names_held if name in chosen], source.all_names, _before_rules(source), source.opening.states
    )
    renamed = {name: new_names[name] for name in source.tensors if name in chosen}
    objects = {name: new_names.get(name, name) for name in source.extras.objects if name in chosen}
    faults = Faults(source.root)
    dropped = []
    of_one_stage = isinstance(target, Strategy) and target.others
    if target is None:
        dropped += [name for name in renamed if name in selection.drop]
    for name, new in renamed.items():
        if target is not None and new not in expected_tensors and has_no_place(source, target, name):
            dropped.append(name)
            if not (name in states or of_one_stage or matches(name, selection.drop)):
                hint = leave_out(name)
                faults.add(f"tensor {name!r}", "is not in the target strategy", code="not-in-strategy", hint=hint)
    for name, reason in source.unreadable.items():
        if name in chosen:
            dropped.append(name)
            if not matches(name, selection.drop):
                hint = leave_out(name, reason)
                faults.add(f"tensor {name!r}", reason, code="unreadable-tensor", hint=hint)
    if target is not None:
        rename = Renaming(selection.name_map, set(source.all_names), source.opening.states)
        unchosen = [*(name for name in source.tensors if name not in chosen), *source.left_out]
        available = {*renamed.values(), *(rename(name) for name in unchosen)}
    else:
        available = {*source.tensors, *source.left_out}
    expected = (
        expected_tensors if target else [*(strategy.tensors if strategy else ()), *sorted(source.opening.elsewhere)]
    )
    # A source may lack step counters. Strategy files of MindSpore have no shapes.
    no_weights = {
        *states,
        *(name for name in expected_tensors if target and is_step(name, target.shape_of(name) or ())),
    }
    absent = [name for name in expected if name not in available and _would_be_chosen(name, selection, no_weights)]
    missing = _missing(source, absent, no_weights, selection, faults)
    faults.raise_if_any(SourceError, advice=_advice(target, set(renamed.values()), states))
    dropped_names = set(dropped)
    kept = [
        (name, renamed[name])
        for name in _in_message_order(source, {old for old, new in renamed.items() if new in expected_tensors})
        if name in renamed and name not in dropped_names
    ]
    if chosen and not kept:
        raise UsageError("every chosen tensor is dropped; the target would be empty", code="no-tensors")
    left_out = tuple(name for name in source.all_names if name not in chosen)
    return Selected(
        tuple(kept),
        tuple(objects.items()),
        tuple(dropped),
        tuple(missing),
        left_out,
    )


def select_listed(source: Checkpoint, selection: Selection) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the new names of the chosen tensors and objects, and the names left out.

    Raises:
        UsageError: a pattern matches nothing, or not its number of names; names collide.
    """
    chosen = _chosen(source, selection, all_states(source, None))
    named = [name for name in source.all_names if name in chosen]
    renamed = selection.renamed(named, source.all_names, words=source.opening.states)
    return renamed, tuple(name for name in source.all_names if name not in chosen)


def _advice(target: Strategy | Arrangement | None, known: Collection[str], states: Collection[str]) -> str:
    """Return advice for dropped or missing weights, or an empty string."""
    if target is None:
        return ""
    if not any(name in target.tensors for name in known):
        return "no name is in both; is the strategy of another model?"
    return one_stage_advice(target, known, states) if isinstance(target, Strategy) else ""


def has_no_place(source: Checkpoint, target: Strategy | Arrangement, name: str) -> bool:
    """Return whether an unlisted tensor is dropped rather than replicated.

    Nothing tells which whole tensors are split in training. But weights that the strategy of a single stage does not
    name are most likely of other stages, and a training does not load a weight that its metadata do not list.
    """
    tensor = source.tensors[name]
    one_stage = isinstance(target, Strategy) and target.others and len(target.stages) == 1 and source.strategy is None
    is_whole = isinstance(target, Arrangement)
    is_sharded = tensor.listed and name not in source.extras.bound
    return is_sharded or ((one_stage or is_whole) and not is_training_state(name, tensor))


def _chosen(source: Checkpoint, selection: Selection, states: Collection[str]) -> set[str]:
    """Check the patterns, and return the names that the selection chooses."""
    faults = Faults("selection")
    source_names, before = source.all_names, _before_rules(source)
    included = (
        _matched(source_names, selection.include, Option("include"), faults, before)
        if selection.include
        else {*source_names}
    )
    excluded = _matched(source_names, selection.exclude, Option("exclude"), faults, before)
    faults.raise_if_any(UsageError)
    chosen = included - excluded
    if selection.weights_only:
        no_weights = {*states, *source.extras.objects}
        chosen = {n for n in chosen if n not in no_weights and not is_training_state(n, source.tensors.get(n))}
    if not chosen and (source_names or source.left_out):
        raise UsageError("the selection leaves no tensor of the source", code="no-tensors")
    return chosen


def excluding(sources: Sequence[Checkpoint], selection: Selection) -> tuple[list[Checkpoint], Selection]:
    """Return checkpoints without what a selection excludes, and the rest of the selection.

    With rules or an adapter, whose names are others, they are returned as they are.

    Raises:
        UsageError: a pattern matches no tensor of any of them, or not its number of tensors, or only scales.
    """
    if not selection.exclude or selection.rules is not None or selection.lora is not None:
        return [*sources], selection
    faults = Faults("selection")
    every = dict.fromkeys(name for each in sources for name in each.all_names)
    excluded = _matched(every, selection.exclude, Option("exclude"), faults, ())
    faults.raise_if_any(UsageError)
    for each in sources:
        refuse_parted(each, {name: name for name in each.all_names if name not in excluded})
    return [each.without(excluded & each.all_names.keys()) for each in sources], replace(selection, exclude=())


def _before_rules(source: Checkpoint) -> Collection[str]:
    """Return the names that a source had before rules; empty if there are no rules."""
    return source.origin.checkpoint.all_names if source.origin and source.origin.rules else ()


def _matched(
    source_names: Collection[str], patterns: Iterable[str], option: Option, faults: Faults, before: Collection[str]
) -> set[str]:
    matched: set[str] = set()
    for pattern in patterns:
        counted = _counted(pattern, source_names)
        glob = counted["glob"] if counted else pattern
        of_pattern = matching(glob, source_names)
        option_text = Text(option._replace(value=pattern))
        if not of_pattern:
            faults.add(option_text, partial(unmatched, glob, source_names, before), code="no-match")
        elif counted and len(of_pattern) != int(counted["count"]):
            faults.add(
                option_text, f"matches {len(of_pattern)} tensors; expected {counted['count']}", code="wrong-count"
            )
        matched.update(of_pattern)
    return matched


def _counted(pattern: str, source_names: Collection[str]) -> re.Match[str] | None:
    """Split a pattern such as `layers.*@32`; return None for others, as a name may end with @ and digits."""
    return None if pattern in source_names else _COUNTED.match(pattern)


def matching_counted(pattern: str, source_names: Collection[str]) -> list[str]:
    """Return the names that match a pattern, which may have a count."""
    counted = _counted(pattern, source_names)
    return matching(counted["glob"] if counted else pattern, source_names)


def _would_be_chosen(name: str, selection: Selection, states: Collection[str]) -> bool:
    """Return whether the selection would choose a tensor that the source lacks."""
    include, exclude = (
        [_COUNTED.sub(r"\g<glob>", pattern) for pattern in patterns]
        for patterns in (selection.include, selection.exclude)
    )
    included = not include or matches(name, include)
    return included and not matches(name, exclude) and not (selection.weights_only and name in states)


def _missing(
    source: Checkpoint, absent: list[str], states: Collection[str], selection: Selection, faults: Faults
) -> list[str]:
    """Return the absent names; report weights that no pattern covers as faults."""
    stage_tensors = source.strategy.tensors if source.opening.stage is not None and source.strategy else absent
    for name in absent:
        if name in stage_tensors and name not in states and not matches(name, selection.allow_missing):
            hint = Text("to do without it, give ", Option("allow_missing", name))
            faults.add(f"tensor {name!r}", "is in the strategy but in no source file", code="missing-tensor", hint=hint)
    return absent


def _in_message_order(source: Checkpoint, in_target: set[str]) -> list[str]:
    """Return the tensors in the order in which MindSpore writes them.

    MindSpore reads the needed source ranks in descending order, and puts tensors without a layout last. Files of one
    rank, such as those of a set, are in their own order.
    """
    ordered: dict[str, None] = {}
    headers: set[int] = set()
    for _, file in sorted(zip(source.ranks, source.files, strict=True), key=lambda item: -item[0]):
        if file.index.header_id not in headers:  # ranks with equal headers share the header
            headers.add(file.index.header_id)
            ordered.update(dict.fromkeys(file.index.entries))
    ordered.update(dict.fromkeys(source.tensors))  # a file may have a block under another name
    tensors = [name for name in ordered if name in source.tensors]
    laid_out = {name for name in tensors if source.tensors[name].listed or name in in_target}
    return [name for name in tensors if name in laid_out] + [name for name in tensors if name not in laid_out]


def all_states(
    source: Checkpoint, target: Strategy | Arrangement | None, written: Collection[str] = ()
) -> dict[str, State]:
    """Return the optimizer states among all names of a conversion, by name.

    Args:
        source: the source checkpoint; names of its strategy are included.
        target: the strategy of the target.
        written: names in the target.
    """
    named = [strategy.tensors for strategy in (source.strategy, target) if strategy]
    return optimizer_states(set().union(source.all_names, written, *named), source.opening.states)


def kinds(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the kind of each tensor: `weights`, an optimizer state such as `adam_m`, or `other`.

    The kind `other` has text and values such as `global_step` and `learning_rate`. Names that were left out are taken
    into account, so that optimizer states do not become weights if only they are selected.
    """
    states = all_states(checkpoint, None, checkpoint.left_out)
    return {
        name: states[name].kind if name in states else "other" if is_training_state(name, tensor) else "weights"
        for name, tensor in checkpoint.tensors.items()
    }


_ROLES = ("moments", "masters", "steps")
_FAMILIES = ("weights", "optimizer", *_ROLES, "other")


def narrowed(checkpoint: Checkpoint, *, dtype: str | None, kind: str | None) -> Checkpoint:
    """Return the checkpoint with only the tensors of a dtype and of a kind; None for any.

    It has no tensors if none is of that dtype and kind, as a filtered table has no rows. Names in the files whose dtype
    is unknown, since they cannot be read, are of no dtype.

    Args:
        checkpoint: the checkpoint.
        dtype: the name of a dtype, such as `bfloat16` or `bf16`.
        kind: one of `kinds`; `optimizer` for all states of the optimizer; `moments`, `masters` or `steps` for some.

    Raises:
        UsageError: there is no such dtype or kind.
    """
    chosen = _of_kind(checkpoint, kind)
    other_stages = checkpoint.opening.elsewhere & chosen
    if dtype is not None:
        of_dtype, other_stages = by_name(dtype, UsageError), frozenset()
        chosen &= {name for name, tensor in checkpoint.tensors.items() if tensor.spec.dtype == of_dtype}
    return replace(
        checkpoint.without(checkpoint.all_names.keys() - chosen),
        opening=replace(checkpoint.opening, elsewhere=other_stages),
    )


def _of_kind(checkpoint: Checkpoint, kind: str | None) -> set[str]:
    """Return the names of a kind, including other stages."""
    all_names = {*checkpoint.all_names, *checkpoint.opening.elsewhere}
    if kind is None:
        return all_names
    states = all_states(checkpoint, None, {*checkpoint.left_out, *all_names})
    exact = {state.kind for name, state in states.items() if name in checkpoint.tensors}
    if kind not in {*_FAMILIES, *exact}:
        raise UsageError(
            f"unknown kind {kind!r:.60}", code="unknown-kind",
            hint=f"give one of {', '.join((*_FAMILIES, *sorted(exact.difference(_FAMILIES))))}",
        )  # fmt: skip
    numbers = {name for name, tensor in checkpoint.tensors.items() if is_training_state(name, tensor)}
    values = {*numbers, *checkpoint.extras.objects}.difference(states)
    if kind in _ROLES:
        counters = {name for name in values if kind == "steps" and name.rpartition(".")[2] in STEPS}
        return counters | {name for name in all_names.intersection(states) if role_of(states[name]) == kind}
    families = {
        "weights": all_names.difference(states, values),
        "optimizer": all_names.intersection(states),
        "other": values,
    }
    return families.get(kind, {name for name in all_names if name in states and states[name].kind == kind})
