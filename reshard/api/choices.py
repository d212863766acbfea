"""What users may write for the arguments of several functions: a strategy as a path, a selection as keywords."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from reshard.errors import UsageError
from reshard.plan.select import Selection, derived, select
from reshard.rules.lora import LoRA
from reshard.rules.rules import Rules
from reshard.storage.places import as_place
from reshard.strategy.files import read_strategy
from reshard.strategy.strategy import Strategy
from reshard.targets.pattern import Pattern

if TYPE_CHECKING:
    from collections.abc import Callable

    from reshard.run.run import Progress
    from reshard.source.checkpoint import Checkpoint as Record
    from reshard.storage.places import AnyName

Globs = str | Iterable[str]
"""A glob, or several."""


def selection_of(
    selection: Selection | None,
    *,
    include: Globs = (),
    exclude: Globs = (),
    weights_only: bool = False,
    name_map: Mapping[str, str] | None = None,
    cast: Mapping[str, str] | None = None,
    drop: Globs = (),
    allow_missing: Globs = (),
    rules: Rules | Mapping[str, Any] | AnyName | None = None,
    lora: LoRA | AnyName | None = None,
) -> Selection | None:
    """Return the selection that keywords make; None if there are none and no selection.

    Raises:
        UsageError: a selection is given, and keywords for the same.
    """
    keywords = {
        "include": include, "exclude": exclude, "weights_only": weights_only, "name_map": name_map, "cast": cast,
        "drop": drop, "allow_missing": allow_missing, "rules": rules, "lora": lora,
    }  # fmt: skip
    given = {name: value for name, value in keywords.items() if value}
    if selection is not None:
        if given:
            both = f"selection and {', '.join(given)} both choose tensors"
            raise UsageError(both, code="two-selections", hint="give one Selection, or the keywords alone")
        return selection
    if not given:
        return None
    if rules is not None and not isinstance(rules, Rules | Mapping):
        given["rules"] = Rules.read(rules)
    if lora is not None and not isinstance(lora, LoRA):
        given["lora"] = LoRA(str(lora))
    chosen: dict[str, Any] = given
    return Selection(**chosen)


def target_of(
    target: Strategy | Pattern | AnyName | None, source: Record, selection: Selection | None
) -> Strategy | Pattern | None:
    """Return the strategy of a target, which is read, or made by rules for the tensors that it gets, if it is a path.

    Raises:
        UsageError: it is something else.
        StrategyError: the file is not valid.
    """
    if target is None or isinstance(target, Strategy | Pattern):
        return target
    try:
        place = as_place(target)
    except TypeError:
        what = type(target).__name__
        raise UsageError(f"target is a {what}; expected a strategy or its file", code="not-a-strategy") from None
    if place.suffix not in {".yaml", ".yml"}:
        return read_strategy(place)
    from reshard.source.strategies import strategy_by_rules  # seldom

    selection = selection or Selection()
    source = derived(source, selection)
    return strategy_by_rules(place, source, target_names=dict(select(source, None, selection).kept))


def progress_of(progress: Callable[[Progress], None] | bool | None) -> Any:
    """Return a context that gives the callback for progress, which shows a bar if `progress` is true."""
    if progress is True:
        from reshard.view.progress import shown  # seldom

        return shown()
    return nullcontext(progress or None)
