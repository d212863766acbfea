"""Open the two sides of a comparison, and find out how one was made from the other.

A ledger names the source of its target, whose own ledger may name a further source: a lineage. If two lineages meet,
the ledgers tell by which changes (names, casts, rules, an adapter, tensors left out) one side was made from the other,
or both from a common source:

* A was made from B, or from a source equal to B since only A was changed: apply the changes of A to B and compare.
* B was made from A, or from a source equal to A: apply the changes of B to A and compare.
* Both were changed in the same way, or neither: compare them unchanged.
* Both were changed in different ways: compare them unchanged, and say so in a note.

If the lineages do not meet (for example if B is a copy of the source of A), the changes of A are applied if the changed
names of B match at least as many names of A as the original names do; dtypes and values do not matter for this. Ledgers
only choose what to compare: everything is read, and the verdict names each change.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from reshard.core.model.checkpoint import Checkpoint, unreadable_in
from reshard.core.model.digests import digest
from reshard.core.model.facts import Opening
from reshard.core.open import is_described, made_at, read_headers
from reshard.core.open import open as open_checkpoint
from reshard.core.plan.changes import refuse_unused_changes
from reshard.core.plan.inputs import Selection, derived
from reshard.core.plan.select import select_listed
from reshard.core.records.provenance import SourceRecord
from reshard.core.records.schema import to_json
from reshard.core.reopen import reopen_target
from reshard.core.runs import iteration_at
from reshard.core.storage.places import as_place
from reshard.core.verify.recorded import noted_source, selection_in
from reshard.core.verify.structure import refuse_deduplicated
from reshard.errors import Faults, GoneError, Option, ReshardError, SourceError, Text, UsageError, joined, names
from reshard.strategy.names import matching, no_match

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from reshard.core.records.made import Made
    from reshard.core.records.provenance import SelectionRecord
    from reshard.core.storage.cipher import Cipher
    from reshard.core.storage.places import AnyName
    from reshard.strategy.strategy import Strategy

_LONGEST_LINEAGE = 16


class Sides(NamedTuple):
    """The two sides of a comparison.

    Attributes:
        target: the side that was made.
        source: the side that it was made from, with adapter and rules applied.
        selection: further changes of the conversion.
        deduplicated: the target stores each block on one rank only.
        note: a remark for the user: which side was derived, and whose changes apply; may be empty.
    """

    target: Checkpoint
    source: Checkpoint
    selection: Selection
    deduplicated: bool = False
    note: str = ""


class _Lineage(NamedTuple):
    """A checkpoint and its chain of sources; and the provenance of each but the last."""

    places: list[str]
    steps: list[Made]


class _ConversionChange(NamedTuple):
    """The changes of a conversion, with a key that is equal for equal changes."""

    key: tuple[SelectionRecord, frozenset[str]]
    selection: Selection
    left_out: frozenset[str]

    @property
    def only_leaves_out(self) -> bool:
        """Return whether names and values are unchanged."""
        selection = self.selection
        return not (selection.name_map or selection.cast or selection.rules or selection.lora)


@contextmanager
def options_of(side: str) -> Iterator[None]:
    """Have errors name the options of one side, `source` or `target`.

    Raises:
        ReshardError: the error, in these words.
    """
    try:
        yield
    except ReshardError as error:
        raise error.changed(lambda text: Text(text).map(lambda option: option.of(side))) from None


def opened(
    path: AnyName,
    strategy: Strategy | AnyName | None,
    *,
    what: str = "target",
    **reading: Any,
) -> Checkpoint:
    """Open a checkpoint for verification; several ranks without a strategy become one without tensors.

    Args:
        path: as for `reshard.open`.
        strategy: as for `reshard.open`.
        what: `source` or `target`, for messages.
        reading: other options of `reshard.open`.

    Raises:
        SourceError: as `reshard.open`.
    """
    with options_of(what):
        unruled = strategy is None and not reading.get("layouts") and reading.get("stage") is None
        if unruled and not is_described(path):
            options = {name: value for name, value in reading.items() if name in {"rank_pattern", "suffix", "cipher"}}
            files, ranks, warnings, step, cipher = read_headers(path, **options)
            if len(set(ranks)) > 1:
                return Checkpoint(
                    str(path), {}, files, ranks, warnings=tuple(warnings), unreadable=unreadable_in(files),
                    coding=cipher, opening=Opening(step=step),
                )  # fmt: skip
        return open_checkpoint(path, strategy=strategy, contents="blocks" if what == "source" else False, **reading)


def sides_of(
    target: AnyName | Checkpoint,
    against: AnyName | Checkpoint,
    selection: Selection | None,
    *,
    deduplicated: bool = False,
    cipher: Cipher | None = None,
    against_cipher: Cipher | None = None,
) -> Sides:
    """Open two checkpoints, and decide which one is the target.

    Args:
        target: a path, opened with the options in ledgers; or an open checkpoint, used unchanged.
        against: a path or checkpoint, like `target`.
        selection: the changes from `against` to `target`; None to read them from ledgers. A selection with only `drop`
            and `allow_missing` is added to the ledgers.
        deduplicated: `target` stores each block on one rank only, even if its ledger does not say so; the ledger of an
            open checkpoint is not used for this.
        cipher: decrypts `target`.
        against_cipher: decrypts `against`.

    Raises:
        SourceError: a side cannot be opened, or an adapter or rules cannot be applied.
        UsageError: the selection matches nothing.
    """
    target_lineage, source_lineage = _lineage(target), _lineage(against)
    target_steps, source_steps, related = _meeting(target_lineage, source_lineage)
    target_conversions, source_conversions = target_lineage.steps[:target_steps], source_lineage.steps[:source_steps]
    first = _open(target, "target", target_lineage, source_conversions if related and not target_steps else [], cipher)
    second = _open(
        against, "source", source_lineage, target_conversions if related and not source_steps else [], against_cipher
    )
    given_selection = selection or Selection()
    if deduplicated:
        refuse_deduplicated(first)
    if first.tensors and not second.tensors:
        second = _open_copy(against, target_lineage, against_cipher) or second
    _require_known(given_selection, first, second)
    once = deduplicated or (not isinstance(target, Checkpoint) and _is_deduplicated(target_lineage))
    is_said = selection is not None and (selection == Selection() or _changed_by(selection) != Selection())
    if is_said or first.origin is not None or second.origin is not None:
        source = derived(second, given_selection)
        if is_said and source.tensors:
            refuse_unused_changes(source, given_selection, [*select_listed(source, given_selection)[0]])
        return Sides(first, source, given_selection, once)
    plain = Sides(first, second, replace(given_selection, drop=_drops(target_conversions) + given_selection.drop), once)
    target_changes, source_changes = _unshared(target_conversions, source_conversions)
    way = _way(target_changes, source_changes, target_steps if related else 1, source_steps if related else 1)
    if way is None:
        origin = target_lineage.places[target_steps]
        note = f"{names([first.root, second.root])} were changed in different ways since {origin}"
        return plain._replace(note=f"{note}; verify each by its path alone") if related else plain
    if way == "plain":
        return plain
    is_forward = way == "forward"
    derived_side, source, steps, distance = (
        (first, second, target_conversions, source_steps)
        if is_forward
        else (second, first, source_conversions, target_steps)
    )
    exact = related and distance == 0 and len(steps) == 1
    change = next(iter(target_changes if is_forward else source_changes), None)
    combined = replace(
        change.selection if change else Selection(),
        drop=_drops(steps) + given_selection.drop,
        allow_missing=(selection_in(steps[0]).allow_missing if exact else ()) + given_selection.allow_missing,
    )
    if not exact:
        source = source.without(change.left_out if change else ())
        if not _fits(derived_side, source, combined):
            return plain
    notes = [] if exact and is_forward else [_note(derived_side, source, steps[0], exact=exact)]
    if change is not None:
        notes.append(Text("changes are those of its ledger; ", Option("as_is"), " compares without them"))
    once = once if is_forward else not isinstance(against, Checkpoint) and _is_deduplicated(source_lineage)
    return Sides(derived_side, derived(source, combined), combined, once, joined("; ", notes))


def _require_known(selection: Selection, *sides: Checkpoint) -> None:
    """Refuse patterns of tensors that may be absent, if neither side ever had such a tensor; not with rules."""
    if selection.rules is not None:
        return
    known = dict.fromkeys(
        name
        for side in sides
        for names_of_side in (
            side.all_names, side.left_out, side.opening.elsewhere, side.strategy.tensors if side.strategy else (),
            *(file.index.entries for file in side.files), side.opened.all_names,
        )
        for name in names_of_side
    )  # fmt: skip
    faults = Faults("selection")
    for option, patterns in (("drop", selection.drop), ("allow_missing", selection.allow_missing)):
        for pattern in patterns:
            if pattern != "*" and not matching(pattern, known):
                faults.add(Text(Option(option, pattern)), no_match(pattern, known), code="no-match", alike=pattern)
    faults.raise_if_any(UsageError)


def _way(
    target_changes: Sequence[_ConversionChange],
    source_changes: Sequence[_ConversionChange],
    target_steps: int,
    source_steps: int,
) -> Literal["plain", "forward", "reverse"] | None:
    """Return the direction of a comparison.

    `plain`: compare unchanged; None: they were changed differently, or by several conversions.

    Args:
        target_changes: the changes of the target since the common checkpoint.
        source_changes: the changes of the source since the common checkpoint.
        target_steps: number of conversions from the common checkpoint to the target.
        source_steps: number of conversions from the common checkpoint to the source.
    """
    if not target_changes and not source_changes:
        return (
            "forward"
            if target_steps and not source_steps
            else "reverse"
            if source_steps and not target_steps
            else "plain"
        )
    if len(target_changes) == 1 and all(change.only_leaves_out for change in source_changes):
        return "forward"
    if len(source_changes) == 1 and all(change.only_leaves_out for change in target_changes):
        return "reverse"
    return None


def _note(derived_side: Checkpoint, source: Checkpoint, step: Made, *, exact: bool) -> str:
    """Return the note that explains the comparison."""
    root = step.provenance.source.title
    if exact:
        return f"{derived_side.root} was made from {source.title}, as its ledger says, and is compared with it"
    return f"{derived_side.root} was made from {root}, as its ledger says; {source.root} is taken for that"


def _open(
    side: AnyName | Checkpoint, what: str, lineage: _Lineage, below: Sequence[Made], cipher: Cipher | None
) -> Checkpoint:
    """Open one side with the options in a ledger, if there is one.

    Args:
        side: a path, or an open checkpoint, which is returned.
        what: `source` or `target`, for messages.
        lineage: its lineage.
        below: the conversions that later made the other side from it.
        cipher: decrypts it.
    """
    if isinstance(side, Checkpoint):
        return side
    root = str(as_place(side))
    with options_of(what):
        if below:
            with suppress(GoneError):  # the files may have been replaced
                return replace(noted_source(below[-1], cipher, Option(f"{what}_key")), root=root)
        if lineage.steps:
            return replace(reopen_target(lineage.steps[0], cipher), root=root)
    return opened(side, None, what=what, cipher=cipher)


def _open_copy(side: AnyName | Checkpoint, lineage: _Lineage, cipher: Cipher | None) -> Checkpoint | None:
    """Open a side with the strategy that the target's ledger has for its source; None if it does not fit."""
    if isinstance(side, Checkpoint) or not lineage.steps:
        return None
    source = lineage.steps[0].provenance.source
    if source.strategy is None or source.stage is not None:
        return None
    with suppress(SourceError):
        return open_checkpoint(side, strategy=source.strategy.read(), contents="blocks", cipher=cipher)
    return None


def _lineage(side: AnyName | Checkpoint) -> _Lineage:
    """Return the lineage of a checkpoint, as recorded in ledgers."""
    path = side.root if isinstance(side, Checkpoint) else side
    if isinstance(side, Checkpoint) and side.opened.opening.computation:
        return _Lineage([_computed_key(SourceRecord.by_path(side.opened))], [])
    lineage = _Lineage([_key(path)], [])
    while len(lineage.steps) < _LONGEST_LINEAGE and (made := made_at(path)):
        source = made.provenance.source
        path = source.root
        key = _key(path) if source.computation is None else _computed_key(source)
        if key in lineage.places:
            break
        lineage.places.append(key)
        lineage.steps.append(made)
        if source.computation is not None:  # it has several sources
            break
    return lineage


def _computed_key(source: SourceRecord) -> str:
    """Return a title of a computed source that is equal for equal ones."""
    return f"{source.title} ({digest(to_json(source))[:8]})"


def _key(path: AnyName) -> str:
    """Return a canonical path, equal for all paths of a checkpoint."""
    location = as_place(path)
    with suppress(SourceError):  # a run directory without a checkpoint
        location = iteration_at(location)
    return str(location.real())


def _meeting(first: _Lineage, second: _Lineage) -> tuple[int, int, bool]:
    """Return the steps to the common checkpoint, and whether there is one."""
    for steps, path in enumerate(first.places):
        if path in second.places:
            return steps, second.places.index(path), True
    return min(1, len(first.steps)), min(1, len(second.steps)), False


def _unshared(
    target_conversions: Sequence[Made], source_conversions: Sequence[Made]
) -> tuple[list[_ConversionChange], list[_ConversionChange]]:
    """Return the changes of two lineages, without equal first changes."""
    both = [
        [change for step in steps if (change := _change(step))] for steps in (target_conversions, source_conversions)
    ]
    while both[0] and both[1] and both[0][-1].key == both[1][-1].key:
        del both[0][-1], both[1][-1]
    return both[0], both[1]


def _change(step: Made) -> _ConversionChange | None:
    """Return the changes of names and values in a conversion, or None."""
    left_out = frozenset(step.provenance.source.left_out)
    selection = _changed_by(selection_in(step))
    if selection == Selection() and not left_out:
        return None
    record = replace(step.provenance.selection, drop=(), allow_missing=())
    if record.lora and record.lora.digest:  # the adapter may have been moved
        record = replace(record, lora=replace(record.lora, root=""))
    return _ConversionChange((record, left_out), selection, left_out)


def _changed_by(selection: Selection) -> Selection:
    """Return a selection without `drop` and `allow_missing`."""
    return replace(selection, drop=(), allow_missing=())


def _drops(steps: Sequence[Made]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(pattern for step in steps for pattern in selection_in(step).drop))


def _is_deduplicated(lineage: _Lineage) -> bool:
    return bool(lineage.steps and lineage.steps[0].provenance.target.remove_redundancy)


def _fits(target: Checkpoint, source: Checkpoint, selection: Selection) -> bool:
    """Return whether a selection keeps or increases the number of matching names."""
    bare = replace(selection, lora=None)  # an adapter changes no name
    try:
        new_names, _ = select_listed(derived(source, bare), bare)
    except ReshardError:
        return False
    return len(target.tensors.keys() & set(new_names.values())) >= max(1, len(target.tensors.keys() & source.tensors))
