"""The common parts of MindSpore's functions on whole checkpoints.

1. Check and convert arguments: strategies in all their forms, paths, numbers, formats.
2. Open a source, and refuse unsuitable ones.
3. Run a plan; the log names tensors that it leaves out or lacks.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from reshard.core.model.holdings import is_deduplicated
from reshard.core.open import open as open_source
from reshard.core.open import read_headers
from reshard.core.plan.select import all_states
from reshard.core.run.run import run
from reshard.core.run.settings import RunOptions
from reshard.core.storage.places import as_place
from reshard.core.storage.small import refuse_inputs
from reshard.core.storage.threads import processor_count
from reshard.errors import PYTHON, Faults, SourceError, StrategyError, UsageError, Words, joined, names, spelled
from reshard.mindspore.strategy import any_layout, layout_of
from reshard.strategy.files import read_strategy, strategy_files
from reshard.strategy.names import is_training_state, ranks_text
from reshard.strategy.needed import lacking_ranks
from reshard.strategy.strategy import Strategy, merged_names

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from reshard.core.layout.block import Shape
    from reshard.core.layout.layout import Layout
    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.plan.plan import Plan


PathLike = str | os.PathLike[str]
StrategyLike = PathLike | Strategy | Mapping[str, Any]

_log = logging.getLogger("reshard.mindspore")

FORMATS = ("ckpt", "safetensors")

_RANK_IN_PATH = re.compile(r"rank_?(\d{1,9})(?!\d)", re.IGNORECASE)

WORDS = Words(
    PYTHON.rule,
    {
        **PYTHON.exceptions,
        "step": ("step to reshard.open", "step={} to reshard.open"),
        "key": ("dec_key", "dec_key=key, dec_mode={!r}"),
        "layout": ("layout={{{!r}: {!r}}} to reshard.open",),
        "partial": ("partial=True to reshard.open",),
        "rank_pattern": ("rank_pattern to reshard.open",),
        "strategy": ("src_strategy_file",),
        "suffix": ("file_suffix",),
    },
)
"""How messages spell options for callers of MindSpore's functions; other options are spelled as in Python."""


class DirectoryError(SourceError, NotADirectoryError):
    """A path is not a directory. Also a NotADirectoryError, as in MindSpore."""


def strategy_of(argument: str, value: StrategyLike | None) -> Strategy | None:
    """Return a strategy from any form that MindSpore's functions take: see `reshard.mindspore`.

    Raises:
        TypeError: it is of another form; the message begins with `argument`.
        StrategyError: it cannot be read, or contradicts itself.
    """
    if value is None or isinstance(value, Strategy):
        return value
    if isinstance(value, str | os.PathLike):
        path = path_of(argument, value)
        if not path.exists():
            raise StrategyError(f"{argument} {path} does not exist; expected a strategy file", code="not-found")
        return read_strategy(path)
    if not isinstance(value, Mapping):
        raise TypeError(f"{argument} is a {type(value).__name__}; expected the name of a strategy file")
    if not value:
        raise StrategyError(f"{argument} names no parameter", code="no-tensors")
    return _strategy_of_layouts(value)


def _strategy_of_layouts(layouts_by_name: Mapping[str, Any]) -> Strategy:
    staged = merged_names(layouts_by_name)
    layouts: dict[str, dict[int, Layout]] = {}
    shapes: dict[str, Shape] = {}
    for name, value in layouts_by_name.items():
        stage, own_name = staged.get(name, (0, name))
        layouts.setdefault(own_name, {})[stage] = any_layout(value)
        shape = None if isinstance(value, list | tuple) else layout_of(value)[1]
        if shape is not None:
            shapes[own_name] = shape
    strategy = Strategy.of(layouts, shapes=shapes)
    tensors = {  # a shape may be expanded, as in JSON files
        name: tuple(placed._replace(expanded=placed.shape is not None) for placed in places)
        for name, places in strategy.tensors.items()
    }
    return replace(strategy, tensors=tensors, merged=bool(staged))


def thread_count(argument: str, value: object) -> int:
    """Return the number of threads for a number of processes, at most one a processor."""
    count = whole_number(argument, value)
    if count < 1:
        raise UsageError(f"{argument} is {value}; expected at least 1", code="out-of-range")
    return min(count, processor_count())


def whole_number(argument: str, value: object) -> int:
    """Return an argument that must be an int."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{argument} is {value!r:.60} ({type(value).__name__}); expected an int")
    return value


def check_rank(argument: str, value: object) -> None:
    """Refuse an argument that is not an int from 0 on."""
    if whole_number(argument, value) < 0:
        raise UsageError(f"{argument} is {value}; expected 0 or more", code="out-of-range")


def check_order(argument: str, files: Mapping[int, Path]) -> None:
    """Refuse files in another order than the ranks in their paths: slices would be put in wrong places.

    Paths are checked only if each has a number after `rank`, all different: the file of a replica may replace a lost
    one. The numbers need not begin at 0, as those of a stage do not.

    Raises:
        UsageError: the numbers do not ascend.

    >>> check_order("files", {0: Path("rank_8/a.ckpt"), 1: Path("rank_9/a.ckpt"), 2: Path("rank_10/a.ckpt")})
    """
    matches = {rank: _RANK_IN_PATH.findall(os.fspath(file)) for rank, file in files.items()}
    if not all(matches.values()):
        return
    path_ranks = {rank: int(numbers[-1]) for rank, numbers in sorted(matches.items())}
    ascending = sorted(path_ranks.values())
    for (rank, number), expected in zip(path_ranks.items(), ascending, strict=True):
        if number != expected and len(set(ascending)) == len(ascending):
            raise UsageError(
                f"{argument}[{rank}] is {files[rank]}, a file of rank {number}",
                code="wrong-rank",
                facts=["expected the files in the order of their ranks"],
                hint="sort by number: as text rank_10 comes before rank_2",
            )


def check_format(argument: str, value: object) -> None:
    """Refuse an unknown name of a format."""
    if value not in FORMATS:
        raise UsageError(f"{argument} is {value!r}; expected 'ckpt' or 'safetensors'", code="unknown-format")


def target_directory(argument: str, value: object) -> Path:
    """Return the path of a directory to write to, which need not exist."""
    path = path_of(argument, value)
    if path.exists() and not path.is_dir():
        raise DirectoryError(f"{argument} {path} is a file; expected a directory", code="not-a-directory")
    return path


def path_of(argument: str, value: object) -> Path:
    """Return an argument that must be a path, and not empty, which would be the current directory."""
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{argument} is {value!r:.60} ({type(value).__name__}); expected a path")
    if not os.fspath(value):
        raise UsageError(f"{argument} is empty; expected a path", code="empty-value")
    return Path(value)


@contextmanager
def mindspore_words() -> Iterator[None]:
    """Spell options in errors as arguments of MindSpore's functions."""
    try:
        yield
    except SourceError as error:
        raise error.changed(lambda text: spelled(text, WORDS)) from error.__cause__


_MOST_TARGET_RANKS = 64  # whose needs an error names


def open_ranks(
    path: Path,
    before: Strategy | None,
    after: Strategy | None,
    *,
    stage: int | Literal["own"] = "own",
    suffix: str | None = None,
) -> Checkpoint:
    """Open a directory of rank directories; without a strategy each holds whole tensors.

    As in MindSpore, a rank may be missing if other ranks have its blocks.

    Raises:
        SourceError: no files, both formats, headers that contradict the strategy, or a missing rank that is needed; the
            error says by which target ranks and tensors.
    """
    checked_format(path)
    if before is None:
        return open_whole(path, suffix)
    try:
        with mindspore_words():
            return open_source(path, strategy=before, stage=stage, suffix=suffix)
    except SourceError as error:
        if isinstance(error.__cause__, OSError):
            raise  # an unreadable directory is not one without files
        source = before if stage == "own" else before.of_stage(stage)
        present = present_ranks(path)
        absent = set(source.ranks) - present
        if not absent or not present:
            raise
        if after is not None:
            named = {name: places for name, places in source.tensors.items() if name in after.tensors}
            source = replace(source, tensors=named)
        faults = Faults(str(path))
        target_ranks = list(after.ranks)[:_MOST_TARGET_RANKS] if after else [0]
        lacking = {rank: lacking_ranks(source, after, rank, present) for rank in target_ranks}
        for rank, needing in lacking_ranks(source, None, 0, present).items():
            by = [target for target, ranks in lacking.items() if rank in ranks]
            faults.add(f"source rank {rank}", f"has no file; {needed_text(needing, by)}", code="missing-ranks")
        faults.raise_if_any(SourceError)
        with mindspore_words():
            opened = open_source(path, strategy=before, stage=stage, suffix=suffix, partial=True)
        _log.warning(
            "%s: source rank %s has no file; other ranks hold all that is needed, if the strategy is the right one",
            path,
            names(sorted(absent)),
        )
        return opened


def check_all_stages(path: Path, source: Checkpoint) -> None:
    """Refuse a strategy of one pipeline stage if files of other stages exist, whose tensors would be lost."""
    if source.opening.stage is not None and present_ranks(path) - set(source.ranks):
        raise StrategyError(
            f"src_strategy_file covers stage {source.opening.stage} of a pipeline only, and {path} has files of others",
            code="one-stage",
            hint="use the strategy of all stages, which merge_pipeline_strategys makes",
        )


def check_target_stages(argument: str, source: Checkpoint, after: Strategy | None) -> None:
    """Refuse a target strategy of one pipeline stage for a whole source if it would lose weights."""
    if after is None or not after.others or source.opening.stage is not None:
        return
    states = all_states(source, after)
    lost = [n for n, t in source.tensors.items() if not (n in after.tensors or n in states or is_training_state(n, t))]
    if lost:
        raise StrategyError(
            f"{argument} covers stage {after.stages.start} of a pipeline only, unlike {source.root}",
            code="one-stage",
            facts=[f"it does not name {_counted(lost)}"],
            hint="use the strategy of all stages, which merge_pipeline_strategys makes",
        )


def own_stage(after: Strategy | None) -> int | None:
    """Return the stage of a target strategy that is known to cover one of several, else None."""
    return after.stages.start if after is not None and after.others else None


def check_model(source: Checkpoint, after: Strategy | None) -> None:
    """Refuse strategies that name no tensor of a checkpoint: they are of another model."""
    before = source.strategy
    for strategy, which in ((before, "source"), (after, "target")):
        if strategy is not None and source.tensors and not any(name in strategy.tensors for name in source.tensors):
            raise StrategyError(
                f"the {which} strategy names no tensor of {source.root}",
                code="other-strategy",
                facts=[f"it has {names(strategy.tensors)}", f"the files have {names(source.tensors)}"],
                hint="use the strategy of this model",
            )


def carry_out(
    planned: Plan,
    target: Path,
    after: Strategy | None,
    strategies: Iterable[StrategyLike | None],
    *,
    rank: int | None = None,
    threads: int | None = None,
) -> None:
    """Write the files of a plan.

    Args:
        planned: the plan.
        target: the directory of its files.
        after: the target strategy.
        strategies: the strategies as the caller passed them; a target file may not be one of their files.
        rank: the target rank that is written, if it is a single one.
        threads: the number of threads.

    Raises:
        SourceError: the source is de-duplicated, and missing tensors may be in the missing file of a rank.
        TargetError: a target file would be one of the source files, or of the strategy files.
    """
    _check_complete(planned, after, rank)
    warn_of(planned, after, rank)
    paths = [as_place(strategy) for strategy in strategies if isinstance(strategy, str | os.PathLike)]
    files = [file for path in paths for file in (strategy_files(path) if path.is_dir() else [path])]
    refuse_inputs([target / file.path for file in planned.files], files, "one of the strategy files")
    run(planned, target, RunOptions(threads=threads, overwrite=True, ledger=False))


def _check_complete(planned: Plan, after: Strategy | None, rank: int | None) -> None:
    """Refuse to lose tensors that a de-duplicated source may have in the missing file of a rank."""
    source = planned.source
    if source.strategy is None:
        return
    absent = set(source.strategy.ranks) - set(source.ranks)
    lost = [name for name in _missing(planned, after, rank) if name in source.strategy.tensors]
    if lost and absent and (len(lost) > 1 or _is_deduplicated(source, source.strategy)):
        raise SourceError(
            f"no file of {source.root} has {_counted(lost)}",
            code="missing-ranks",
            facts=[
                "this happens in a de-duplicated source",
                f"source {ranks_text(absent)} have no files here, and may have them",
            ],
        )


def _is_deduplicated(source: Checkpoint, strategy: Strategy) -> bool:
    """Return whether a source stores replicas once.

    A safetensors file has a mark; of `.ckpt` files it is known if some ranks of a stage lack a tensor that others have.
    """
    for name in source.tensors:
        stages = strategy.stages_of(name)[:1]
        files = [source.files[n] for n, rank in enumerate(source.ranks) if strategy.stage_of(rank) in stages]
        if 0 < sum(name in file.index.entries for file in files) < len(files):
            return True
    return is_deduplicated(source)


def warn_of(planned: Plan, after: Strategy | None, rank: int | None = None) -> None:
    """Log a plan's warnings, and the tensors that it leaves out or lacks."""
    for warning in planned.warnings:
        _log.warning("%s: %s", planned.source.root, spelled(warning, WORDS))
    dropped = [name for name in planned.dropped if name not in planned.source.unreadable]
    for name, reason in planned.source.unreadable.items():
        _log.warning("%s: %r %s; it is left out", planned.source.root, name, reason)
    for tensors, reason in (
        (dropped, "the target strategy does not name it"),
        (_missing(planned, after, rank), "it is in the strategy and in no file"),
    ):
        if tensors:
            _log.warning("%s: left out, as %s: %s", planned.source.root, reason, names(tensors, most=20))


def warn_of_others(path: Path, ranks: range) -> None:
    """Warn of files in a target directory that belong to ranks beyond the target's."""
    beyond = sorted(present_ranks(path) - set(ranks))
    if beyond:
        _log.warning(
            "%s: has files of %s too, which the target strategy does not have; move them away if they are of "
            "an older target",
            path, ranks_text(beyond),
        )  # fmt: skip


def checked_format(path: Path) -> str | None:
    """Return the format of the files in rank directories, or None; refuse both formats in one directory."""
    formats = {file.suffix.removeprefix(".") for file in _rank_files(path)}
    if len(formats) > 1:
        raise SourceError(
            f"rank directories of {path} hold both .ckpt and .safetensors files",
            code="mixed-formats",
            hint="move one kind away",
        )
    return formats.pop() if formats else None


def present_ranks(path: Path) -> set[int]:
    """Return the ranks that have files."""
    return {int(file.parent.name.removeprefix("rank_")) for file in _rank_files(path)}


def _rank_files(path: Path) -> list[Path]:
    """List the files in rank directories that have a checkpoint's extension."""
    return [
        file
        for file in path.glob("rank_[0-9]*/*")
        if file.suffix.removeprefix(".") in FORMATS and file.parent.name.removeprefix("rank_").isdecimal()
    ]


@mindspore_words()
def open_whole(path: Path | Mapping[int, Path], suffix: str | None = None) -> Checkpoint:
    """Open a source whose ranks each hold whole tensors. MindSpore reads rank 0 and compares nothing."""
    ranks = set(path) if isinstance(path, Mapping) else set(read_headers(path, suffix=suffix)[1])
    if len(ranks) == 1:
        return open_source(path, suffix=suffix)
    try:
        source = open_source(path, layouts={"*": "whole"}, suffix=suffix, partial=True)
    except SourceError as error:
        raise SourceError(
            f"without src_strategy_file each of the {len(ranks)} source ranks must hold the same whole tensors",
            code="no-layout",
            facts=[error.message, *error.facts],
            hint=joined("; ", ["give src_strategy_file if each has a part", *([error.hint] if error.hint else [])]),
        ) from error
    tensors = {name: tensor._replace(listed=False) for name, tensor in source.tensors.items()}
    return replace(source, tensors=tensors, strategy=None)


def _missing(planned: Plan, after: Strategy | None, rank: int | None) -> list[str]:
    """List the tensors that a plan lacks, for one target rank or all; other source stages do not count."""
    source = planned.source
    expected = None if source.opening.stage is None or source.strategy is None else source.strategy.tensors
    missing = [name for name in planned.missing if expected is None or name in expected]
    if after is None or rank is None:
        return missing
    return [name for name in missing if after.stage_of(rank) in after.stages_of(name)]


def _counted(tensors: Collection[str]) -> str:
    """Format a count of tensors with some of their names.

    >>> _counted(["a"]), _counted(["a", "b", "c", "d"])
    ('1 tensor: a', '4 tensors: a, b, c and 1 more')
    """
    return f"{len(tensors)} tensor{'s' * (len(tensors) != 1)}: {names(tensors, most=3)}"


def needed_text(needing: Collection[str], by: Collection[int]) -> str:
    """Format the target ranks and tensors for which a source rank is needed.

    >>> needed_text(["w", "b"], [0, 1])
    'it is needed for target ranks 0-1 (2 tensors: w, b)'
    """
    return f"it is needed for target {ranks_text(by)} ({_counted(needing)})"
