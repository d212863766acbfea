"""The two sides of a comparison: opened as options or ledgers say, and which of them is made from the other, and how.

A ledger names the source of its target, and so may that source's own: a lineage. If two lineages meet, the ledgers say
by which changes (names, casts, rules, an adapter, tensors left out) one side is made from the other, or both from one:

* B is what A was made from, or stands for it, as only A was changed: A is compared with what its changes make of B.
* A is what B was made from, or stands for it: B is compared with what its changes make of A.
* Both were changed in the same way, or neither: they are compared as they are.
* Both were changed, in different ways: likewise, and a note says so.

If the lineages do not meet (B is a copy of A's source, say), A's changes are applied if they make A's names of B's at
least as well as B's own are, which a changed dtype or value does not tell. Ledgers choose what is compared, no more:
all of it is read, and the verdict names each change.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from reshard.errors import GoneError, Option, ReshardError, SourceError, Text, joined, names
from reshard.plan.planfile import read_selection
from reshard.plan.select import Selection, derived, select_listed
from reshard.readers.open import iteration_at, made_at, read_headers, self_described
from reshard.readers.open import open as open_checkpoint
from reshard.source.checkpoint import Checkpoint, Opening
from reshard.source.made import read_small_strategy
from reshard.storage.places import as_place, is_url
from reshard.verify.made import noted_source, target_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from reshard.source.made import Made
    from reshard.storage.cipher import Cipher
    from reshard.storage.places import AnyName
    from reshard.strategy.strategy import Strategy

_LONGEST_LINEAGE = 16


class Sides(NamedTuple):
    """What is compared.

    Attributes:
        target: the side that was made.
        source: the side that it was made from, with its adapter and rules.
        selection: what else the making changes.
        deduplicated: the target has each replica once.
        note: why these are compared so, if not because they were named in this order.
    """

    target: Checkpoint
    source: Checkpoint
    selection: Selection
    deduplicated: bool = False
    note: str = ""


class _Lineage(NamedTuple):
    """A checkpoint, its source, the source of that and so on; and for each but the last how it was made."""

    places: list[str]
    steps: list[Made]


class _Change(NamedTuple):
    """How a target differs from its source by what was asked for, and a key by which two of them are equal."""

    key: str
    selection: Selection
    left_out: frozenset[str]

    @property
    def only_leaves_out(self) -> bool:
        """Return whether names and values stay what they were."""
        asked = self.selection
        return not (asked.name_map or asked.cast or asked.rules or asked.lora)


def opened(
    path: AnyName,
    strategy: Strategy | AnyName | None,
    *,
    what: str = "target",
    **reading: Any,
) -> Checkpoint:
    """Open a checkpoint to be verified; rank directories without a strategy become one that has no tensors.

    Args:
        path: as for `reshard.open`.
        strategy: likewise.
        what: `source` or `target`, for messages.
        reading: other options of `reshard.open`.

    Raises:
        SourceError: as `reshard.open`.
    """
    try:
        unruled = strategy is None and not reading.get("layouts") and reading.get("stage") is None
        if unruled and not self_described(as_place(path), reading.get("iteration")):
            some = {name: value for name, value in reading.items() if name in {"rank_pattern", "suffix", "cipher"}}
            files, ranks, warnings, step, cipher = read_headers(path, **some)
            if len(set(ranks)) > 1:
                unreadable = {name: reason for file in files for name, reason in file.index.unreadable}
                return Checkpoint(
                    str(path), {}, files, ranks, warnings=tuple(warnings), unreadable=unreadable, coding=cipher,
                    opening=Opening(step=step),
                )  # fmt: skip
        return open_checkpoint(path, strategy=strategy, contents="blocks" if what == "source" else False, **reading)
    except SourceError as error:
        raise error.changed(lambda text: Text(text).map(lambda option: option.of(what))) from None


def sides_of(
    target: AnyName | Checkpoint,
    against: AnyName | Checkpoint,
    selection: Selection | None,
    *,
    deduplicated: bool = False,
    cipher: Cipher | None = None,
    against_cipher: Cipher | None = None,
) -> Sides:
    """Open two checkpoints, and return which is compared with what is made of the other.

    Args:
        target: a path, opened as ledgers say; or a checkpoint, taken as it is.
        against: likewise.
        selection: how `target` is made of `against`; None to take that from their ledgers. One that has nothing but
            `drop` and `allow_missing` is added to it.
        deduplicated: `target` has each replica once, whether its ledger says so or not; that of a checkpoint is not
            asked, as it was opened otherwise.
        cipher: decrypts `target`.
        against_cipher: decrypts `against`.

    Raises:
        SourceError: one cannot be opened, or an adapter or rules cannot be applied.
        UsageError: the selection matches nothing.
    """
    own, other = _lineage(target), _lineage(against)
    up, down, related = _meeting(own, other)
    mine, theirs = own.steps[:up], other.steps[:down]
    first = _open(target, "target", own, theirs if related and not up else [], cipher)
    second = _open(against, "source", other, mine if related and not down else [], against_cipher)
    if first.tensors and not second.tensors:
        second = _open_copy(against, own, against_cipher) or second
    once = deduplicated or (not isinstance(target, Checkpoint) and _is_deduplicated(own))
    more = selection or Selection()
    is_said = selection is not None and (selection == Selection() or _changed_by(selection) != Selection())
    if is_said or first.origin is not None or second.origin is not None:
        return Sides(first, derived(second, more), more, once)
    plain = Sides(first, second, replace(more, drop=_drops(mine) + more.drop), once)
    changed, changed_too = _unshared(mine, theirs)
    way = _way(changed, changed_too, up if related else 1, down if related else 1)
    if way is None:
        note = f"{names([first.root, second.root])} were changed in different ways since {own.places[up]}"
        return plain._replace(note=f"{note}; verify each by its path alone") if related else plain
    if way == "plain":
        return plain
    is_forward = way == "forward"
    made, source, steps, distance = (first, second, mine, down) if is_forward else (second, first, theirs, up)
    exact = related and distance == 0 and len(steps) == 1
    change = next(iter(changed if is_forward else changed_too), None)
    asked = replace(
        change.selection if change else Selection(),
        drop=_drops(steps) + more.drop,
        allow_missing=(_selection(steps[0]).allow_missing if exact else ()) + more.allow_missing,
    )
    if not exact:
        source = source.without(change.left_out if change else ())
        if not _fits(made, source, asked):
            return plain
    notes = [] if exact and is_forward else [_note(made, source, steps[0], exact=exact)]
    if change is not None:
        notes.append(Text("changes are those of its ledger; ", Option("as_is"), " compares without them"))
    once = once if is_forward else not isinstance(against, Checkpoint) and _is_deduplicated(other)
    return Sides(made, derived(source, asked), asked, once, joined("; ", notes))


def _way(
    changed: Sequence[_Change], changed_too: Sequence[_Change], up: int, down: int
) -> Literal["plain", "forward", "reverse"] | None:
    """Return which side is compared with what is made of the other; None if neither can be made of the other.

    Args:
        changed: how the target was changed since the checkpoint that both are made from.
        changed_too: how the source was changed since then.
        up: how many conversions made the target of that checkpoint.
        down: how many made the source of it.
    """
    if not changed and not changed_too:
        return "forward" if up and not down else "reverse" if down and not up else "plain"
    if len(changed) == 1 and all(one.only_leaves_out for one in changed_too):
        return "forward"
    if len(changed_too) == 1 and all(one.only_leaves_out for one in changed):
        return "reverse"
    return None


def _note(made: Checkpoint, source: Checkpoint, step: Made, *, exact: bool) -> str:
    """Return why two checkpoints are compared as they are."""
    root = step.content["source"]["root"]
    if exact:
        return f"{made.root} was made from {source.root}, as its ledger says, and is compared with it"
    return f"{made.root} was made from {root}, as its ledger says; {source.root} is taken for that"


def _open(
    side: AnyName | Checkpoint, what: str, lineage: _Lineage, below: Sequence[Made], cipher: Cipher | None
) -> Checkpoint:
    """Open one side: as the ledger of what was made from it says, as its own ledger says, or as it is.

    Args:
        side: a path, or a checkpoint, which is taken as it is.
        what: `source` or `target`, for messages.
        lineage: what it was made from.
        below: how others were made from it, one after the other.
        cipher: decrypts it.
    """
    if isinstance(side, Checkpoint):
        return side
    root = str(as_place(side))
    try:
        if below:
            with suppress(GoneError):  # other files may be there now
                return replace(noted_source(below[-1].content["source"], cipher, Option(f"{what}_key")), root=root)
        if lineage.steps:
            return replace(target_of(lineage.steps[0], cipher), root=root)
    except SourceError as error:
        raise error.changed(lambda text: Text(text).map(lambda option: option.of(what))) from None
    return opened(side, None, what=what, cipher=cipher)


def _open_copy(side: AnyName | Checkpoint, lineage: _Lineage, cipher: Cipher | None) -> Checkpoint | None:
    """Open ranks that nothing joins with the strategy of another's source, if they fit it; else return None."""
    if isinstance(side, Checkpoint) or not lineage.steps:
        return None
    noted = lineage.steps[0].content["source"]
    strategy = read_small_strategy(noted["strategy"])
    if strategy is None or noted["stage"] is not None:
        return None
    with suppress(SourceError):
        return open_checkpoint(side, strategy=strategy, contents="blocks", cipher=cipher)
    return None


def _lineage(side: AnyName | Checkpoint) -> _Lineage:
    """Return what a checkpoint was made from, as far as ledgers are there."""
    place = side.root if isinstance(side, Checkpoint) else side
    found = _Lineage([_key(place)], [])
    while len(found.steps) < _LONGEST_LINEAGE and (made := made_at(place)):
        place = made.content["source"]["root"]
        if (key := _key(place)) in found.places:
            break
        found.places.append(key)
        found.steps.append(made)
    return found


def _key(path: AnyName) -> str:
    """Return a name by which two paths of one checkpoint are equal."""
    place = as_place(path)
    with suppress(SourceError):  # a run that names no checkpoint
        place = iteration_at(place)
    return str(place) if is_url(place) else os.path.realpath(str(place))


def _meeting(own: _Lineage, other: _Lineage) -> tuple[int, int, bool]:
    """Return how far up two lineages meet, and whether they do; if not, the first step of each counts."""
    for up, place in enumerate(own.places):
        if place in other.places:
            return up, other.places.index(place), True
    return min(1, len(own.steps)), min(1, len(other.steps)), False


def _unshared(mine: Sequence[Made], theirs: Sequence[Made]) -> tuple[list[_Change], list[_Change]]:
    """Return the changes that two lineages do not have in common since they met."""
    both = [[change for step in steps if (change := _change(step))] for steps in (mine, theirs)]
    while both[0] and both[1] and both[0][-1].key == both[1][-1].key:
        del both[0][-1], both[1][-1]
    return both[0], both[1]


def _change(step: Made) -> _Change | None:
    """Return what a conversion changed; None if nothing but files, blocks and formats."""
    left_out = frozenset(step.content["source"]["left_out"])
    asked = _changed_by(_selection(step))
    if asked == Selection() and not left_out:
        return None
    said = {**step.content["selection"], "drop": [], "allow_missing": []}
    if asked.lora and asked.lora.digest:  # the adapter may have been moved
        said["lora"] = {**said["lora"], "root": ""}
    return _Change(json.dumps([said, sorted(left_out)], sort_keys=True), asked, left_out)


def _changed_by(selection: Selection) -> Selection:
    """Return a selection without what may be missing."""
    return replace(selection, drop=(), allow_missing=())


def _selection(step: Made) -> Selection:
    try:
        return read_selection(step.content["selection"])
    except (ValueError, TypeError) as error:
        raise SourceError(
            f"the ledger of {step.target} has no valid selection", code="bad-ledger", facts=[str(error)]
        ) from None


def _drops(steps: Sequence[Made]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(pattern for step in steps for pattern in _selection(step).drop))


def _is_deduplicated(lineage: _Lineage) -> bool:
    return bool(lineage.steps and lineage.steps[0].content["target"]["deduplicated"])


def _fits(target: Checkpoint, source: Checkpoint, selection: Selection) -> bool:
    """Return whether a selection gives a source's tensors names of the target's, no fewer than they have of them."""
    bare = replace(selection, lora=None)  # which changes no name
    try:
        new_names, _ = select_listed(derived(source, bare), bare)
    except ReshardError:
        return False
    return len(target.tensors.keys() & set(new_names.values())) >= max(1, len(target.tensors.keys() & source.tensors))
