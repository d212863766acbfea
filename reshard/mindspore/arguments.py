"""The common parts of MindSpore's functions on whole checkpoints: check arguments, open a source, plan and run."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from reshard.core.model.holdings import is_deduplicated
from reshard.core.open import has_several_ranks
from reshard.core.open import open as open_source
from reshard.core.plan.inputs import Selection
from reshard.core.plan.make import plan
from reshard.core.run.run import run
from reshard.core.run.settings import RunOptions
from reshard.core.storage.threads import processor_count
from reshard.errors import SourceError, StrategyError, UsageError, names
from reshard.mindspore.strategy import any_layout, path_of
from reshard.strategy.files import read_strategy
from reshard.strategy.names import ranks_text
from reshard.strategy.strategy import Strategy, merged_names

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from reshard.core.layout.layout import Layout
    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.plan.plan import Plan


PathLike = str | os.PathLike[str]
StrategyLike = PathLike | Strategy | Mapping[str, Any]

_log = logging.getLogger("reshard.mindspore")

_RANK_IN_PATH = re.compile(r"rank_?(\d{1,9})(?!\d)", re.IGNORECASE)


class DirectoryError(SourceError, NotADirectoryError):
    """A path is not a directory. Also a NotADirectoryError, as in MindSpore."""


def strategy_of(argument: str, value: StrategyLike | None) -> Strategy | None:
    """Return a strategy from any form that MindSpore's functions take: see `reshard.mindspore`."""
    if value is None or isinstance(value, Strategy):
        return value
    if not isinstance(value, Mapping):
        return read_strategy(path_of(argument, value))
    staged = merged_names(value)
    layouts: dict[str, dict[int, Layout]] = {}
    for name, layout in value.items():
        stage, own_name = staged.get(name, (0, name))
        layouts.setdefault(own_name, {})[stage] = any_layout(layout)
    return replace(Strategy.of(layouts), merged=bool(staged))


def number_of(argument: str, value: object, least: int) -> int:
    """Return an argument that must be an int, and not below the least."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{argument} is {value!r:.60} ({type(value).__name__}); expected an int")
    if value < least:
        raise UsageError(f"{argument} is {value}; expected at least {least}", code="out-of-range")
    return value


def thread_count(argument: str, value: object) -> int:
    """Return the number of threads for a number of processes, at most one a processor."""
    return min(number_of(argument, value, 1), processor_count())


def directory_of(argument: str, value: object, *, exists: bool = True) -> Path:
    """Return an argument that must be a directory; one to write to need not exist."""
    path = path_of(argument, value)
    if not path.is_dir() and (exists or path.exists()):
        raise DirectoryError(f"{argument} {path} is not a directory", code="not-a-directory")
    return path


def check_order(argument: str, files: Mapping[int, Path]) -> None:
    """Refuse files in another order than the ranks in their paths, if those are all different."""
    matches = [_RANK_IN_PATH.findall(os.fspath(file)) for _, file in sorted(files.items())]
    ranks = [int(numbers[-1]) for numbers in matches if numbers]
    if len(set(ranks)) == len(files) and ranks != sorted(ranks):
        raise UsageError(
            f"{argument} has files of ranks in this order: {names(map(str, ranks))}",
            code="wrong-rank",
            hint="sort by number: as text rank_10 comes before rank_2",
        )


def open_ranks(
    path: Path, before: Strategy | None, *, stage: int | Literal["own"] | None = "own", suffix: str | None = None
) -> Checkpoint:
    """Open a directory of rank directories; without a strategy each holds whole tensors.

    As in MindSpore, a rank may be missing if other ranks have its blocks.
    """
    if before is None:
        return open_whole(path, several=has_several_ranks(path, suffix=suffix), suffix=suffix)
    try:
        return open_source(path, strategy=before, stage=stage, suffix=suffix)
    except SourceError as error:
        if {*error.codes} != {"missing-replicas"}:
            raise
        _log.warning("%s: %s", path, error.message)
    return open_source(path, strategy=before, stage=stage, suffix=suffix, partial=True)


def open_whole(path: Path | Mapping[int, Path], *, several: bool, suffix: str | None = None) -> Checkpoint:
    """Open a source whose ranks, one or several, each hold whole tensors; they are compared, unlike by MindSpore."""
    if not several:
        return open_source(path, suffix=suffix)
    source = open_source(path, layouts={"*": "whole"}, suffix=suffix, partial=True)
    # No strategy names these tensors: the target's ranks have copies of those that its strategy does not name, too.
    tensors = {name: tensor._replace(listed=False) for name, tensor in source.tensors.items()}
    return replace(source, tensors=tensors, strategy=None)


def check_model(source: Checkpoint, after: Strategy | None, new_names: Mapping[str, str] | None = None) -> None:
    """Refuse strategies that name no tensor of a checkpoint: they are of another model."""
    renamed = list(source.tensors) if new_names is None else list(new_names.values())
    for strategy, side, tensors in ((source.strategy, "source", list(source.tensors)), (after, "target", renamed)):
        if strategy is not None and strategy.tensors.keys().isdisjoint(tensors):
            raise StrategyError(
                f"the {side} strategy names no tensor of {source.root}",
                code="other-strategy",
                facts=[f"it has {names(strategy.tensors)}", f"the files have {names(tensors)}"],
            )


def planned(
    source: Checkpoint,
    after: Strategy | None,
    new_names: Mapping[str, str] | None = None,
    *,
    rank: int | None = None,
    **options: Any,
) -> Plan:
    """Plan a conversion to all target ranks, or one. Tensors that one strategy lacks are left out, and logged.

    `new_names` has the tensors to convert, by default all. The options are those of `reshard.plan`.
    """
    target, one_stage = after, source.opening.stage is not None
    if after and source.strategy and rank is not None and rank in after.ranks and len(after.stages) > 1:
        target = after.of_stage(after.stage_of(rank))  # tensors of other stages are not missing
    result = plan(
        source if new_names is None else source.without(source.tensors.keys() - new_names.keys()),
        target,
        ranks=None if rank is None or after is None else [rank],
        stage=after.stages.start if after and after.others and one_stage else None,
        selection=Selection(name_map=new_names or {}, drop="*", allow_missing="*"),
        **options,
    )
    expected = source.strategy.tensors if source.strategy and one_stage else result.missing
    missing = [name for name in result.missing if name in expected]  # other stages have the rest
    if source.strategy:
        _refuse_lost(source, source.strategy, missing)
    dropped = [name for name in result.dropped if after is None or name not in after.tensors]
    _log_left_out(source, result.warnings, dropped, missing)
    return result


def _refuse_lost(source: Checkpoint, strategy: Strategy, missing: list[str]) -> None:
    """Refuse to lose tensors that may be in the missing file of a rank, as in a de-duplicated source."""
    absent = {*strategy.ranks} - {*source.ranks}
    lost = [name for name in missing if name in strategy.tensors]
    if not (absent and lost):
        return
    stages = [strategy.stage_of(rank) for rank in source.ranks]
    contents = {(stage, frozenset(file.index.entries)) for stage, file in zip(stages, source.files, strict=True)}
    if len(contents) == len({*stages}) and not is_deduplicated(source):
        lost = [name for name in lost if not {*stages} & {*strategy.stages_of(name)}]
    if lost:
        raise SourceError(
            f"no file of {source.root} has {names(lost)}; source {ranks_text(absent)} may have them, and have no file",
            code="missing-ranks",
        )


def _log_left_out(source: Checkpoint, warnings: Iterable[str], dropped: list[str], missing: list[str]) -> None:
    for warning in warnings:
        _log.warning("%s: %s", source.root, warning)
    for tensors, reason in (
        (dropped, "the target strategy does not name it"),
        (missing, "it is in the strategy and in no file"),
    ):
        if tensors:
            _log.warning("%s: left out, as %s: %s", source.root, reason, names(tensors, most=20))


def carry_out(result: Plan, target: Path, threads: int | None = None) -> None:
    """Write the files of a plan; existing ones are replaced, but none of the source files."""
    run(result, target, RunOptions(threads=threads, overwrite=True, ledger=False))
