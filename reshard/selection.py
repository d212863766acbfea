"""Which tensors a target gets, under which names and dtypes.

| in the files | source strategy | target strategy | a target rank gets |
|---|---|---|---|
| yes | any | names it | its block, if its stage holds the tensor |
| yes | names it | does not | nothing: dropped; a weight must be covered by a pattern |
| yes | does not | does not | a copy |
| no | any | names it | nothing: missing; a weight must be covered by a pattern |

Optimizer states that are dropped or missing are reported and no error. Without a source strategy the source is one
rank of whole tensors; without a target strategy the target is.

A `Selection` is what a user asks for beside that: less than all tensors, other names, other dtypes. The target
strategy goes by the new names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from reshard.dtypes import DType, by_name
from reshard.errors import Faults, SourceError, UsageError, names
from reshard.strategy import weight_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from reshard.checkpoint import Checkpoint
    from reshard.strategy import Strategy

_COUNTED = re.compile(r"^(?P<glob>.+)@(?P<count>\d+)$", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which tensors are wanted, under which names, as which dtypes.

    A pattern is a glob of source names; `layers.*.wq.weight@32` must match exactly 32 tensors. Every pattern must
    match at least one.

    Attributes:
        include: only tensors that one of these matches; all where there is none.
        exclude: no tensors that one of these matches.
        weights_only: no optimizer states.
        names: old name to new name, applied at once, so that two may be swapped. An old name may be a glob, whose
            stars stand in the new name too, in order. Optimizer states follow their weights.
        cast: source dtype to target dtype, by name; rounding is ml_dtypes' (to nearest, ties to even).
        drop: globs of weights that the target strategy may lack.
        allow_missing: globs of weights that the source may lack.

    >>> Selection(names={"layers.*.wq": "model.*.q_proj"}).renamed(["layers.3.wq", "adam_m.layers.3.wq"])
    {'layers.3.wq': 'model.3.q_proj', 'adam_m.layers.3.wq': 'adam_m.model.3.q_proj'}
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    weights_only: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    cast: Mapping[str, str] = field(default_factory=dict)
    drop: tuple[str, ...] = ()
    allow_missing: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for old, new in self.cast.items():
            by_name(old, UsageError), by_name(new, UsageError)
            if "str" in {old, new}:
                raise UsageError(f"cast {old}={new}: text is no number")
        for attribute in ("include", "exclude", "drop", "allow_missing"):
            object.__setattr__(self, attribute, tuple(getattr(self, attribute)))

    def target_dtype(self, dtype: DType) -> DType:
        """Return what elements of a dtype become."""
        return by_name(self.cast[dtype.name], UsageError) if dtype.name in self.cast else dtype

    def renamed(self, chosen: Collection[str], known: Collection[str] | None = None) -> dict[str, str]:
        """Return the new name of every chosen tensor.

        Args:
            chosen: names of tensors.
            known: names of all tensors of the source, if more are there than are chosen.

        Raises:
            UsageError: two tensors would have one name, or an old name is not there; all at once.
        """
        rename = _Renaming(self.names, set(known or chosen))
        found = {name: rename(name) for name in chosen}
        faults = Faults("name map")
        for old in rename.unused():
            faults.add(f"name {old!r}", "is no tensor of the source")
        by_new: dict[str, list[str]] = {}
        for old, new in found.items():
            by_new.setdefault(new, []).append(old)
        for new, olds in by_new.items():
            if len(olds) > 1 or not new:
                faults.add(f"name {new!r}", f"is given to {names(olds)}; every tensor needs a name of its own")
        faults.raise_if_any(UsageError)
        return found


class _Renaming:
    """Gives names by a map of exact names and globs; the states of an optimizer follow their weights."""

    def __init__(self, new_names: Mapping[str, str], known: set[str]) -> None:
        self.new_names, self.known = new_names, known
        self.globs = [
            (re.compile("(.*)".join(map(re.escape, old.split("*"))), re.DOTALL), new)
            for old, new in new_names.items()
            if "*" in old
        ]

    def __call__(self, name: str) -> str:
        for prefix, base in self._readings(name):
            if base in self.new_names:
                return prefix + self.new_names[base]
            for regex, new in self.globs:
                match = regex.fullmatch(base)
                if match:
                    return prefix + _filled(new, match.groups())
        return name

    def _readings(self, name: str) -> Iterable[tuple[str, str]]:
        """Yield the ways to read a name as a prefix of the optimizer and a weight's name; first the name itself."""
        yield "", name
        dot = name.find(".")
        while dot >= 0:
            if name[dot + 1 :] in self.known:
                yield name[: dot + 1], name[dot + 1 :]
            dot = name.find(".", dot + 1)

    def unused(self) -> list[str]:
        """Return the old names that no tensor has."""
        exact = [old for old in self.new_names if "*" not in old and old not in self.known]
        olds = [old for old in self.new_names if "*" in old]
        globs = [
            old
            for old, (regex, _) in zip(olds, self.globs, strict=True)
            if not any(regex.fullmatch(name) for name in self.known)
        ]
        return exact + globs


def _filled(new: str, taken: tuple[str, ...]) -> str:
    """Put what the stars of the old name stood for in place of those of the new one."""
    pieces = new.split("*")
    if len(taken) < len(pieces) - 1:
        raise UsageError(f"name map: new name {new!r} has more stars than the old name, which has {len(taken)}")
    return pieces[0] + "".join(a + b for a, b in zip(taken, pieces[1:], strict=False))


@dataclass(frozen=True, slots=True)
class Selected:
    """Which tensors go to a target.

    Attributes:
        kept: source name and target name of the tensors that are converted or copied, in the order of the files.
        dropped: source names that the target does not get.
        missing: target names that the source does not have.
    """

    kept: tuple[tuple[str, str], ...]
    dropped: tuple[str, ...]
    missing: tuple[str, ...]


def select(source: Checkpoint, target: Strategy | None, wishes: Selection) -> Selected:
    """Apply a selection and the table above.

    Args:
        source: the checkpoint to convert.
        target: names the tensors wanted; None for all of them, whole.
        wishes: what the user asks for.

    Raises:
        SourceError: weights would be dropped or are missing, and no pattern covers them; all at once.
        UsageError: a pattern matches nothing, or not as many tensors as it says; names collide.
    """
    strategy = source.strategy
    wanted = target.tensors if target else {}
    known = {**source.tensors, **(strategy.tensors if strategy else {})}
    chosen = _chosen(source, wishes, known)
    renamed = wishes.renamed([name for name in source.tensors if name in chosen], source.tensors)
    faults = Faults(source.root)
    dropped = []
    for name, new in renamed.items():
        if target is not None and source.tensors[name].listed and new not in wanted:
            dropped.append(name)
            if not is_optimizer_state(name, known) and not matches(name, wishes.drop):
                faults.add(f"tensor {name!r}", f"is not in the target strategy; to leave it out give --drop '{name}'")
    for name, reason in source.unreadable.items():
        dropped.append(name)
        if not matches(name, wishes.drop):
            faults.add(f"tensor {name!r}", f"{reason}; to leave it out give --drop '{name}'")
    if target is not None:
        rename = _Renaming(wishes.names, set(source.tensors))
        left_out = {rename(name) for name in source.tensors if name not in chosen}
        absent = [name for name in wanted if name not in left_out and name not in set(renamed.values())]
    else:
        absent = [name for name in (strategy.tensors if strategy else ()) if name not in source.tensors]
    missing = _missing(source, absent, {*wanted, *known}, wishes, faults)
    faults.raise_if_any(SourceError)
    kept = [
        (name, renamed[name])
        for name in _in_message_order(source, {old for old, new in renamed.items() if new in wanted})
        if name in renamed and name not in set(dropped)
    ]
    return Selected(tuple(kept), tuple(dropped), tuple(missing))


def _chosen(source: Checkpoint, wishes: Selection, known: Collection[str]) -> set[str]:
    """Return the tensors that the user asks for, having checked the patterns."""
    faults = Faults("selection")
    included = _matched(source, wishes.include, "--include", faults) if wishes.include else set(source.tensors)
    excluded = _matched(source, wishes.exclude, "--exclude", faults)
    faults.raise_if_any(UsageError)
    chosen = included - excluded
    return {n for n in chosen if not is_optimizer_state(n, known)} if wishes.weights_only else chosen


def _matched(source: Checkpoint, patterns: Iterable[str], option: str, faults: Faults) -> set[str]:
    found: set[str] = set()
    for pattern in patterns:
        counted = _COUNTED.match(pattern)
        some = {name for name in source.tensors if fnmatchcase(name, counted["glob"] if counted else pattern)}
        if counted and len(some) != int(counted["count"]):
            faults.add(f"{option} {pattern}", f"matches {len(some)} tensors; expected {counted['count']}")
        elif not some:
            faults.add(f"{option} {pattern}", "matches no tensor of the source")
        found |= some
    return found


def _missing(
    source: Checkpoint, absent: list[str], known: Collection[str], wishes: Selection, faults: Faults
) -> list[str]:
    """Return the names that are wanted and absent; weights that no pattern covers are faults."""
    if source.part is not None and source.strategy:  # one stage says nothing of the tensors of the others
        absent = [name for name in absent if name in source.strategy.tensors]
    for name in absent:
        if not is_optimizer_state(name, known) and not matches(name, wishes.allow_missing):
            faults.add(
                f"tensor {name!r}",
                f"is in the strategy and in no source file; to go on without it give --allow-missing '{name}'",
            )
    return absent


def _in_message_order(source: Checkpoint, wanted: set[str]) -> list[str]:
    """Return the tensors in the order in which MindSpore writes them.

    It takes the needed source ranks downwards, and puts those without a layout last.
    """
    found: dict[str, None] = {}
    seen: set[int] = set()
    for file in reversed(source.files):
        if id(file.index) not in seen:  # ranks with equal headers share one index
            seen.add(id(file.index))
            found.update(dict.fromkeys(file.index.entries))
    kept = [name for name in found if name in source.tensors]
    laid_out = {name for name in kept if source.tensors[name].listed or name in wanted}
    return [name for name in kept if name in laid_out] + [name for name in kept if name not in laid_out]


def is_optimizer_state(name: str, known: Collection[str]) -> bool:
    """Tell an optimizer state by its name: it ends with a dot and another tensor's name; `accu_grads.*` are, too.

    >>> is_optimizer_state("adam_m.layers.0.w", {"layers.0.w"}), is_optimizer_state("layers.0.w", {"layers.0.w"})
    (True, False)
    """
    return name.startswith("accu_grads.") or weight_of(name, known) is not None


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Tell whether any pattern is a name, or a glob that matches it.

    >>> matches("layers.3.w", ["layers.*"])
    True
    """
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)
