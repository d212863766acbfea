"""The inputs of a plan: the user's selection, and the provenance that records all of them.

A `Selection` has the user's options: fewer tensors, other names, other dtypes. The target strategy refers to the new
names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from glob import escape
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from reshard.arguments import checked
from reshard.core.records.provenance import (
    LoraRecord,
    Provenance,
    SelectionRecord,
    SourceRecord,
    StrategyRecord,
    TargetRecord,
)
from reshard.dtypes import INT4, DType, by_name
from reshard.errors import Faults, Option, Text, UsageError, names
from reshard.strategy.names import matching, no_match, omitted, optimizer_states
from reshard.strategy.strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.plan.plan import Plan
    from reshard.rules.lora import LoRA
    from reshard.rules.rules import Rules

_MOST_STARS = 8


@dataclass(frozen=True, slots=True, init=False)
class Selection:
    """Which tensors are selected, under which names, as which dtypes.

    A pattern is a glob of source names, or of the names that `rules` make of these; `layers.*.wq.weight@32` must match
    exactly 32 tensors. Every pattern must match at least one.

    Attributes:
        include: only tensors that match one of these patterns; all tensors if it is empty.
        exclude: no tensors that match one of these patterns.
        weights_only: no optimizer states or other training state (`global_step`, `learning_rate`, text).
        name_map: old name to new name, applied at once, so that two may be swapped. An old name may be a glob, whose
            stars appear in the new name too, in order; the first match counts, exact names before globs.
            Optimizer states follow their weights, unless a name or the beginning of a glob is the state's own.
        cast: source dtype to target dtype, as names (`bfloat16` or `bf16`). Rounds like numpy's and ml_dtypes'
            `astype`: to nearest, ties to even. Also texts such as `float32=bfloat16`.
        drop: globs of weights that the target strategy may lack, and of tensors that no rule names.
        allow_missing: globs of weights that the source may lack.
        rules: map the source's names and shapes to another program's; applied first, so that the names above are the
            new ones. Also the result of `Rules.data`.
        lora: an adapter that is merged into the source's weights, before the rules. Also its fields as a mapping.
            Weights of 16 bits cannot be cast then, because that would round them twice.

    Raises:
        UsageError: an unknown dtype, a cast or a name map that contradicts itself; all at once.

    >>> Selection(name_map={"layers.*.wq": "model.*.q_proj"}).renamed(["layers.3.wq", "adam_m.layers.3.wq"])
    {'layers.3.wq': 'model.3.q_proj', 'adam_m.layers.3.wq': 'adam_m.model.3.q_proj'}
    >>> Selection(name_map={"model.wq": "model.q_proj"}).renamed(["model.wq", "optim.state.wq.exp_avg"])
    {'model.wq': 'model.q_proj', 'optim.state.wq.exp_avg': 'optim.state.q_proj.exp_avg'}
    """

    include: tuple[str, ...]
    exclude: tuple[str, ...]
    weights_only: bool
    name_map: Mapping[str, str]
    cast: Mapping[str, str]
    drop: tuple[str, ...]
    allow_missing: tuple[str, ...]
    rules: Rules | None
    lora: LoRA | None

    @checked
    def __init__(
        self,
        include: str | Iterable[str] = (),
        exclude: str | Iterable[str] = (),
        weights_only: bool = False,
        name_map: Mapping[str, str] = MappingProxyType({}),
        cast: Mapping[str, str] | str | Iterable[str] = MappingProxyType({}),
        drop: str | Iterable[str] = (),
        allow_missing: str | Iterable[str] = (),
        rules: Rules | Mapping[str, Any] | None = None,
        lora: LoRA | Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(rules, Mapping):
            from reshard.rules.rules import Rules  # rarely needed

            rules = Rules.of(rules)
        if isinstance(lora, Mapping):
            from reshard.rules.lora import LoRA  # rarely needed

            lora = LoRA(**lora)
        values = {
            "include": globs(include), "exclude": globs(exclude), "weights_only": weights_only,
            "name_map": dict(name_map), "drop": globs(drop), "allow_missing": globs(allow_missing), "rules": rules,
            "lora": lora,
        }  # fmt: skip
        for name, value in values.items():
            object.__setattr__(self, name, value)
        faults = Faults("selection")
        casts: dict[str, str] = {}
        for old, new in _pairs_of(cast):
            before, after = by_name(old, UsageError), by_name(new, UsageError)
            if fault := cast_fault(before, after):
                faults.add(f"cast {old}={new}", fault, code="unsupported-cast")
            if (first := casts.setdefault(before.name, after.name)) != after.name:
                both = f"{before} cannot become both {first} and {after}"
                faults.add(f"cast {old}={new}", both, code="conflicting-options")
        object.__setattr__(self, "cast", casts)
        for old, new in self.name_map.items():
            if new.count("*") > old.count("*"):
                problem = f"becomes {new!r}, which has more stars than the old name"
                faults.add(f"name {old!r}", problem, code="bad-pattern")
            if not new:
                faults.add(f"name {old!r}", f"becomes {new!r}; a tensor's name cannot be empty", code="bad-name")
        faults.raise_if_any(UsageError)

    def target_dtype(self, source: Checkpoint, name: str) -> DType:
        """Return the target dtype of a tensor; tensors bound to their format are not cast."""
        dtype = source.tensors[name].spec.dtype
        cast = dtype.name in self.cast and name not in source.extras.bound
        return by_name(self.cast[dtype.name], UsageError) if cast else dtype

    def renamed(
        self,
        chosen: Collection[str],
        known: Collection[str] | None = None,
        before: Collection[str] = (),
        words: Collection[str] = (),
    ) -> dict[str, str]:
        """Return the new name of every chosen tensor or object.

        Args:
            chosen: their names; a name of both a tensor and an object occurs twice.
            known: names of all tensors of the source, if only a part of them is chosen.
            before: the names before rules, for messages.
            words: as for `optimizer_states`.

        Raises:
            UsageError: two tensors would have the same name, or an old name does not exist; all at once.
        """
        rename = Renaming(self.name_map, set(known or chosen), words)
        pairs = [(name, rename(name)) for name in chosen]
        if any(not new for _, new in pairs):
            raise UsageError(
                "a tensor has the name '', which no target can hold", code="bad-name",
                hint=Text("name it with ", Option("name_map"), """, as by '{"": "NAME"}'"""),
            )  # fmt: skip
        faults = Faults("name map")
        for old in rename.unused():
            faults.add(f"name {old!r}", partial(unmatched, old, chosen, before), code="no-match")
        for old in rename.hidden():
            faults.add(f"name {old!r}", "is never used: other names of the map take its tensors", code="unused-pattern")
        by_new: dict[str, list[str]] = {}
        for old, new in pairs:
            by_new.setdefault(new, []).append(old)
        for new, olds in by_new.items():
            if len(olds) > 1:
                shared = f"is given to {names(olds)}; every tensor needs its own name"
                faults.add(f"name {new!r}", shared, code="duplicate-name")
        faults.raise_if_any(UsageError)
        return dict(pairs)


def derived(source: Checkpoint, selection: Selection) -> Checkpoint:
    """Return a source with the selection's adapter merged, and then its rules applied.

    Raises:
        SourceError, UsageError: as `reshard.Checkpoint.merge_lora` and `derive`, or merged weights would be rounded
            twice.
    """
    if selection.lora:
        from reshard.rules.lora.merge import merged  # not on every start

        source = merged(source, selection.lora)
    if selection.rules:
        source = selection.rules.derived(source, selection.drop).checkpoint
    twice = [f"{old}={new}" for old, new in selection.cast.items() if old in {"bfloat16", "float16"} - {new}]
    if source.lora and twice:
        raise UsageError(
            f"cast {names(twice)} would round merged weights twice", code="rounds-twice",
            facts=["merged weights are rounded to their own dtype"], hint="cast in a run of its own, before or after",
        )  # fmt: skip
    return source


def _pairs_of(cast: Mapping[str, str] | str | Iterable[str]) -> list[tuple[str, str]]:
    """Return casts as pairs of dtypes; a text is one cast, such as `float32=bfloat16`.

    Raises:
        UsageError: a text is not of that form.
    """
    if isinstance(cast, Mapping):
        return [*cast.items()]
    pairs = []
    for text in globs(cast):
        old, _, new = str(text).partition("=")
        if not (old and new):
            raise UsageError(f"cast {text!r:.60} is not OLD=NEW, such as float32=bfloat16", code="bad-value")
        pairs.append((old, new))
    return pairs


def globs(patterns: str | Iterable[str]) -> tuple[str, ...]:
    """Return globs as a tuple; a string is a single glob."""
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


class _Globs:
    """Globs, found by the text before their first star or behind their last, whichever is longer.

    A name is not compared with every glob: both are counted in tens of thousands.
    """

    def __init__(self, globs: Iterable[str]) -> None:
        self.patterns = {old: re.compile("(.*)".join(map(re.escape, old.split("*"))), re.DOTALL) for old in globs}
        self._by_begin: dict[str, list[tuple[int, str]]] = {}
        self._by_end: dict[str, list[tuple[int, str]]] = {}
        for number, old in enumerate(self.patterns):
            begin, end = old.partition("*")[0], old.rpartition("*")[2]
            table, key = (self._by_begin, begin) if len(begin) >= len(end) else (self._by_end, end)
            table.setdefault(key, []).append((number, old))
        self._begins, self._ends = ({*map(len, table)} for table in (self._by_begin, self._by_end))

    def matching(self, name: str) -> Iterator[tuple[str, re.Match[str]]]:
        """Yield the globs that match a name, in their order."""
        lists = [self._by_begin.get(name[:length]) for length in self._begins]
        lists += [self._by_end.get(name[-length:]) for length in self._ends]
        for _, old in sorted({item for items in lists for item in items or ()}):
            if match := self.patterns[old].fullmatch(name):
                yield old, match


class Renaming:
    """Renames by exact names and globs; optimizer states follow their weights."""

    def __init__(self, new_names: Mapping[str, str], known: set[str], words: Collection[str] = ()) -> None:
        self.new_names, self.known = new_names, known
        self.states = optimizer_states(known, words) if new_names else {}
        self._used: set[str] = set()
        self.globs = _Globs(old for old in new_names if "*" in old)
        self._omitted: set[str] = set()
        self._omitted = omitted(self.states.values(), self)

    def __call__(self, name: str) -> str:
        """Return the new name of a tensor."""
        if name in self.new_names:
            self._used.add(name)
            return self.new_names[name]
        state = self.states.get(name)
        if state is not None:
            direct = self._by_glob(name, state.prefix)  # `adam_m.*` is about states, `*.wq` is not
            followed = self(state.weight)
            if direct is not None or followed != state.weight:
                return direct or state.of(followed, omits=state.outer in self._omitted)
        return self._by_glob(name) or name

    def _by_glob(self, name: str, beginning: str = "") -> str | None:
        """Rename by the first matching glob that starts with `beginning`, or return None."""
        for old, match in self.globs.matching(name):
            if old.startswith(beginning):
                self._used.add(old)
                pieces = self.new_names[old].split("*")
                return pieces[0] + "".join(a + b for a, b in zip(match.groups(), pieces[1:], strict=False))
        return None

    def unused(self) -> list[str]:
        """Return the old names that no tensor has."""
        matching = (
            {old for name in self.known for old, _ in self.globs.matching(name)} if self.globs.patterns else set()
        )
        return [old for old in self.new_names if old not in self.known and old not in matching]

    def hidden(self) -> list[str]:
        """Return the globs that match tensors, all of which other names of the map take."""
        for name in self.known if self.globs.patterns else ():
            self(name)
        unused = {*self.unused()}
        return [old for old in self.globs.patterns if old not in self._used and old not in unused]


def cast_fault(old: DType, new: DType) -> str | None:
    """Return why a dtype cannot be cast to another, or None."""
    if "str" in {old.name, new.name}:
        return "text is not a number"
    if old.bits or new.bits:
        return "its values are narrower than a byte, and are moved as they are"
    if new is INT4:
        return "int4 is four bits of a byte, of which nobody says how they would be rounded"
    kinds = ("bool", "int", "float", "complex")
    ranks = [next((rank for rank, kind in enumerate(kinds) if kind in d.name), 1) for d in (old, new)]
    if ranks[0] > ranks[1]:
        return f"{kinds[ranks[1]]} cannot hold what {kinds[ranks[0]]} can; only the other way round is cast"
    return None


def unmatched(pattern: str, source_names: Collection[str], before: Collection[str]) -> str:
    """Return the message for a pattern without matches, or with matches before rules."""
    hint = "; it is of names before the rules: give names that the rules make" if matching(pattern, before) else ""
    return f"{no_match(pattern, source_names)}{hint}"


def provenance_of(plan: Plan, source: SourceRecord) -> Provenance:
    """Return the provenance of a plan's target.

    Args:
        plan: the plan; without a request, its files are converted one by one.
        source: the record of its source.
    """
    from reshard import __version__

    request = plan.request
    strategy = request.target if request and isinstance(request.target, Strategy) else None
    target = TargetRecord(
        StrategyRecord.of(strategy),
        request.stage if request else None,
        plan.format,
        bool(request and request.remove_redundancy),
        plan.cipher.mode if plan.cipher else None,
        next((file.path for file in plan.files if file.publish != "file"), None),
    )
    selection = request.selection if request else Selection(drop=tuple(map(escape, plan.dropped)))
    return Provenance(__version__, source, target, selection_record(selection))


def ledger_provenance(plan: Plan) -> Provenance:
    """Return the provenance of a plan's target for its ledger, equal for all plans that write parts of one target."""
    result = provenance_of(plan, SourceRecord.by_path(plan.source.opened))
    target, selection = result.target, result.selection
    if any(file.publish == "pointer" for file in plan.files):  # it describes itself, without the dropped tensors
        target = replace(target, strategy=None)
        selection = replace(selection, exclude=(*selection.exclude, *map(escape, plan.dropped)))
    if target.strategy is not None and len(range(*target.strategy.stages)) > 1:
        target = replace(target, stage=None)  # the strategy defines the ranks, even if only some are written
    return replace(result, target=target, selection=selection)


def selection_record(selection: Selection) -> SelectionRecord:
    """Return the record of a selection."""
    return SelectionRecord(
        selection.include, selection.exclude, selection.weights_only, dict(selection.name_map), dict(selection.cast),
        selection.drop, selection.allow_missing, selection.rules.data() if selection.rules else None,
        LoraRecord(**asdict(selection.lora)) if selection.lora else None,
    )  # fmt: skip


def selection_of(record: SelectionRecord) -> Selection:
    """Return the selection of a record; raise `ValueError`, or a `ReshardError`, if it is invalid.

    Globs whose regular expressions could take forever are refused.
    """
    for old in record.names:
        if old.count("*") > _MOST_STARS or "**" in old:
            key_path = f"$.provenance.selection.names[{old!r:.60}]"
            raise ValueError(f"{key_path} has more than {_MOST_STARS} stars, or two next to each other")
    return Selection(
        record.include, record.exclude, record.weights_only, record.names, record.cast, record.drop,
        record.allow_missing, record.rules, asdict(record.lora) if record.lora else None,
    )  # fmt: skip
