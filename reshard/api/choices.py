"""Convert arguments that several functions accept: a strategy as a path, a selection as keywords."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from reshard.core.format import find, targets
from reshard.core.layout.arrangement import Arrangement
from reshard.core.listing import Listing
from reshard.core.plan.inputs import Selection, derived
from reshard.core.plan.select import select
from reshard.core.runs import iteration_at
from reshard.core.storage.places import as_place
from reshard.errors import Option, Text, UsageError
from reshard.messages import warn
from reshard.rules.lora import LoRA
from reshard.strategy.files import read_strategy
from reshard.strategy.strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from reshard.api.jobs import Job
    from reshard.core.model.checkpoint import Checkpoint as Record
    from reshard.core.plan.plan import Plan
    from reshard.core.run.bound import Bound
    from reshard.core.run.settings import Progress, Report, RunOptions
    from reshard.core.storage.places import AnyName, Place
    from reshard.rules.rules import Rules

Globs = str | Iterable[str]
"""A glob, or several."""


def selection_of(
    *,
    selection: Selection | None = None,
    include: Globs = (),
    exclude: Globs = (),
    weights_only: bool = False,
    name_map: Mapping[str, str] | None = None,
    cast: Mapping[str, str] | Globs | None = None,
    drop: Globs = (),
    allow_missing: Globs = (),
    rules: Rules | Mapping[str, Any] | AnyName | None = None,
    lora: LoRA | AnyName | None = None,
) -> Selection | None:
    """Return the selection, or the one that keywords make; None if there is neither.

    Raises:
        UsageError: both a selection and keywords are given.
    """
    keywords = {
        "include": include, "exclude": exclude, "weights_only": weights_only, "name_map": name_map, "cast": cast,
        "drop": drop, "allow_missing": allow_missing, "rules": rules, "lora": lora,
    }  # fmt: skip
    arguments = {name: value for name, value in keywords.items() if value}
    if selection is not None:
        if arguments:
            both = f"selection and {', '.join(arguments)} both choose tensors"
            raise UsageError(both, code="two-selections", hint="give one Selection, or the keywords alone")
        return selection
    if not arguments:
        return None
    if rules is not None and not isinstance(rules, Mapping):
        from reshard.rules.rules import Rules  # not on every start

        arguments["rules"] = rules if isinstance(rules, Rules) else Rules.read(rules)
    if lora is not None and not isinstance(lora, LoRA):
        arguments["lora"] = LoRA(str(lora))
    chosen: dict[str, Any] = arguments
    return Selection(**chosen)


def target_of(
    target: Strategy | Arrangement | AnyName | None, source: Record, selection: Selection | None
) -> Strategy | Arrangement | None:
    """Return the strategy of a target.

    A path is read: a strategy, rules that are applied to the selected tensors, or the metadata of a checkpoint.

    Raises:
        UsageError: the target is neither a strategy nor a path.
        StrategyError: the file is not valid.
    """
    if target is None or isinstance(target, Strategy | Arrangement):
        return target
    try:
        path = as_place(target)
    except TypeError:
        kind = type(target).__name__
        raise UsageError(f"target is a {kind}; expected a strategy or its file", code="not-a-strategy") from None
    refuse_format(target, Text("give it as ", Option("to", str(target))))
    if path.suffix not in {".yaml", ".yml"}:
        return _layouts_of(path) or read_strategy(path)
    from reshard.core.model.holdings import strategy_by_rules  # seldom

    selection = selection or Selection()
    source = derived(source, selection)
    return strategy_by_rules(path, source, target_names=dict(select(source, None, selection).kept))


def refuse_format(target: object, hint: str) -> None:
    """Refuse the word for a format in place of a strategy.

    Raises:
        UsageError: the target is such a word, and no file is called so.
    """
    if any(str(target) in {each.name, *each.aliases} for each in targets()) and not as_place(str(target)).is_there():
        raise UsageError(f"{target} is a format; expected a strategy or its file", code="not-a-strategy", hint=hint)


def progress_of(
    progress: Callable[[Progress], None] | bool | None,
) -> AbstractContextManager[Callable[[Progress], None] | None]:
    """Return a context manager that yields the progress callback.

    The callback shows a bar if `progress` is True.
    """
    if progress is True:
        from reshard.view.progress import shown  # seldom

        return shown()
    return nullcontext(progress or None)


def run_plan(
    plan: Plan,
    directory: AnyName,
    options: RunOptions,
    progress: Callable[[Progress], None] | bool | None,
) -> Report:
    """Run a plan, with `progress` as in `Plan.run`."""
    from reshard.core.run.bound import bind

    return _run_bound(bind(plan, directory, options), options, progress)


def _run_bound(bound: Bound, options: RunOptions, progress: Callable[[Progress], None] | bool | None) -> Report:
    from reshard.core.run.run import run_bound  # it brings dask

    with progress_of(progress) as callback:
        return run_bound(bound, options, progress=callback)


def carried_out(
    conversion: Job,
    target: Place,
    options: RunOptions,
    progress: Callable[[Progress], None] | bool | None,
    warned: Collection[str] = (),
) -> Report:
    """Run the plan of a job, and warn of what the source did not; of other files, too, if the target is a directory."""
    from reshard.core.run.bound import bind  # it imports the modules that run a plan

    is_whole = conversion.result in {None, conversion.directory}
    bound = bind(conversion.plan, conversion.directory or target, options, is_whole=is_whole)
    warn(text for text in bound.plan.warnings if text not in warned)
    return _run_bound(bound, options, progress)


def _layouts_of(path: Place) -> Arrangement | None:
    """Return the arrangement in the metadata of a checkpoint; None for a strategy file or a directory of them."""
    if not path.is_dir():
        return None
    directory = iteration_at(path)
    return find(Listing(directory)).format.layouts(directory)
