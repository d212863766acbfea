"""Which checkpoints of ranks are complete, and which strategies next to one fit it.

A rank file does not say how many ranks there are. A set of rank files is complete if the ledger of its directory, or
the strategy files next to it, say that there are no more ranks; if nothing says it, that is unknown.

Strategies are looked for in the directory and its parent, for hints and for lists, and are never applied. Few files and
no large ones are read, since any of them may be something else.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache, partial
from itertools import chain, islice
from shlex import quote
from typing import TYPE_CHECKING

from reshard.core.listing import RANK_DIRECTORY
from reshard.core.model.assemble import assemble
from reshard.core.model.findings import Candidate, Findings, of_error
from reshard.core.records.logs import DIRECTORY
from reshard.core.records.made import made_of
from reshard.core.storage.base import reading
from reshard.core.storage.places import as_place
from reshard.errors import Option, ReshardError, SourceError, Text, names
from reshard.formats.ranks.directories import is_checkpoint_name, steps_of
from reshard.formats.ranks.reader import changed_text, index_ranks
from reshard.strategy.files import read_strategy, strategy_files
from reshard.strategy.names import ranks_text

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from reshard.core.model.findings import Directory
    from reshard.core.records.made import Made
    from reshard.core.storage.places import Place
    from reshard.formats.ranks.reader import IndexedFiles
    from reshard.strategy.strategy import Strategy


def ranked(directory: Directory) -> Iterator[Candidate]:
    """Yield the checkpoints in rank directories: one for each step, or other name that ranks share."""
    root = directory.place
    rank_of = {match[0]: int(match[1]) for match in filter(None, map(RANK_DIRECTORY.fullmatch, directory.below))}
    every_rank = {*rank_of.values()}
    by_rank: dict[int, list[Place]] = {}
    for name, rank in rank_of.items():
        below = directory.below[name]
        if paths := [path for file in sorted(below.files) if is_checkpoint_name(path := below.place / file)]:
            by_rank[rank] = paths
    if by_rank and len(every_rank) < len(rank_of):
        examine = partial(Findings, "unknown", "has a rank twice, such as rank_0 and rank_00")
        yield Candidate(root, "ranks", "", [*directory.every_file()], examine)
        return
    for (_, step, extension), files in steps_of(by_rank):
        states = [directory.below[path.parent.name].files[path.name] for paths in files.values() for path in paths]
        text = f"{step[0]}_{step[1]}" if step else ""
        examine = partial(_findings, directory, files, every_rank)
        yield Candidate(root, f"{extension.removeprefix('.')} ranks", text, states, examine)


def _findings(directory: Directory, files: Mapping[int, Sequence[Place]], every_rank: set[int]) -> Findings:
    """Return whether every rank has its file, whole by its header, and whether there can be more ranks."""
    root = directory.place
    try:
        with reading(SourceError):
            indexed = index_ranks(files, None, [])
            recorded = made_of(root) if DIRECTORY in directory.names else None
    except SourceError as error:
        return of_error(error, root)._replace(ranks=len(files))
    findings = Findings("complete", "", len(files))
    if missing := sorted((every_rank | {*range(max(files))}).difference(files)):
        return findings._replace(state="incomplete", reason=f"has no file of {ranks_text(missing)}")
    if recorded and recorded.ranks:
        strategies = {DIRECTORY: own} if (own := _own_strategy(recorded)) else {}
        sources = {DIRECTORY: frozenset(recorded.ranks)}
    else:
        strategies = _strategies_beside(root)
        sources = {path: frozenset(strategy.ranks) for path, strategy in strategies.items()}
    larger = [path for path, ranks in sources.items() if ranks > {*files}]
    fitting = [path for path, ranks in sources.items() if ranks == {*files}]
    if not larger and fitting:
        misfits = [_misfit(root, indexed, strategies[path]) for path in fitting if path in strategies]
        if misfits and all(misfits):
            return findings._replace(state="unknown", reason=f"does not fit {fitting[0]}: {misfits[0]}")
        return findings
    if larger and not fitting:
        lacking = ranks_text(sorted(sources[larger[0]].difference(files)))
        return findings._replace(state="incomplete", reason=f"has no file of {lacking}, which {larger[0]} names")
    reason = (
        f"{names(larger)} names more ranks" if larger else "no strategy file next to it says how many ranks there are"
    )
    return findings._replace(state="unknown", reason=reason)


def _own_strategy(recorded: Made) -> Strategy | None:
    """Return the strategy of a target, or of the stage that it has."""
    stage = recorded.provenance.target.stage
    return recorded.strategy.of_stage(stage) if recorded.strategy and stage is not None else recorded.strategy


def _misfit(root: Place, indexed: IndexedFiles, strategy: Strategy) -> str:
    """Return why the headers of the files do not fit a strategy, or ""."""
    if strategy.tensors and not any(strategy.tensors.keys() & file.index.entries.keys() for file in indexed.files):
        return "it names none of their tensors"
    partial = {*indexed.ranks} < {*strategy.ranks}  # a target may be of some ranks only
    try:
        assemble(str(root), indexed.files, indexed.ranks, strategy, partial=partial)
    except ReshardError as error:
        return of_error(error, root).reason
    return ""


def _strategies_beside(root: Place) -> dict[str, Strategy]:
    """Return the strategies in a directory, or else those next to it, by path."""
    return strategies_at(str(root)) or strategies_at(str(root.absolute().parent))


@cache
def strategies_at(directory: str) -> dict[str, Strategy]:
    """Return the strategies in a directory, by path."""
    return {str(path): strategy for path, strategy in strategies_in(as_place(directory))}


def forget_strategies() -> None:
    """Forget the strategies that were read next to checkpoints."""
    strategies_at.cache_clear()


_SUFFIXES = {".ckpt", ".json"}
_MOST_LISTED = 4096
_MOST_READ = 16
_MOST_OPENED = 4  # each one reads the headers of the checkpoint
_MOST_BYTES = 16 << 20  # of one file, or of all in one directory


def unknown_layout(root: str, ranks: Sequence[int], change: str, fits: Callable[[Strategy], object]) -> SourceError:
    """Return the error for several ranks with an unknown sharding.

    Args:
        root: their directory.
        ranks: the rank of each file.
        change: why the layout in the ledger is not used, or "".
        fits: opens the checkpoint with a strategy.
    """
    hint = Text("pass ", Option("strategy"), ", or ", Option("layout", "*", "RULE"))
    if fitting := fitting_strategies(as_place(root), ranks, fits):
        first, several = str(fitting[0]), len(fitting) > 1
        hint = Text(
            f"{names(fitting, most=3)} {'fit' if several else 'fits'}: pass ",
            Option("strategy", first, quote(first)),
            ", or another of them" if several else "",
        )
    facts = [changed_text(root, change)] if change else []
    message = f"{root} has {len(set(ranks))} ranks, and nothing says how they were sharded"
    return SourceError(message, code="no-layout", facts=facts, hint=hint)


def fitting_strategies(root: Place, ranks: Collection[int], fits: Callable[[Strategy], object]) -> list[Place]:
    """Return the strategy files and pipeline directories that fit a checkpoint.

    Args:
        root: the directory of the checkpoint.
        ranks: its ranks.
        fits: raises an error if a strategy does not fit.
    """
    above = root.absolute().parent if root.name in {"", ".."} else root.parent
    fitting: list[Place] = []
    opened = 0
    for path, strategy in islice(chain(strategies_in(root), strategies_in(above)), _MOST_READ):
        with suppress(ReshardError, OSError):
            if set(strategy.ranks) == set(ranks) and opened < _MOST_OPENED:
                opened += 1
                fits(strategy)
                fitting.append(path)
    return fitting


def strategies_in(directory: Place) -> Iterator[tuple[Place, Strategy]]:
    """Yield the strategy files and pipeline directories in a directory, of its first few possible ones."""
    for path in islice(_candidates(directory), _MOST_READ):
        with suppress(ReshardError, OSError):
            yield path, read_strategy(path)


def _candidates(directory: Place) -> Iterator[Place]:
    """Yield possible strategies in a directory, starting with names like "strategy"."""
    paths: list[Place] = []
    with suppress(ReshardError, OSError):
        paths = sorted(islice(directory.iterdir(), _MOST_LISTED), key=lambda path: path.name)
    for path in sorted(paths, key=lambda path: "strateg" not in path.name):
        with suppress(ReshardError, OSError):
            if path.suffix not in _SUFFIXES and ("strateg" not in path.name or not path.is_dir()):
                continue
            files = strategy_files(path) if path.is_dir() else [path]
            if all(file.is_file() for file in files) and sum(file.status().nbytes for file in files) <= _MOST_BYTES:
                yield path
