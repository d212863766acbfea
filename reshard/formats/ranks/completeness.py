"""The checkpoints of ranks and single files in a directory, and which strategies next to one fit it.

A rank file does not say how many ranks there are. A set of rank files is complete if the ledger of its directory, or
the strategy files next to it, say that there are no more ranks; if nothing says it, that is unknown.

Strategies are looked for in the directory and its parent, for hints and for lists, and are never applied. Few files and
no large ones are read, since any of them may be something else.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache, partial
from itertools import islice
from shlex import quote
from typing import TYPE_CHECKING

from reshard.core.format import find
from reshard.core.listing import RANK_DIRECTORY, Listing
from reshard.core.model.assemble import assemble
from reshard.core.model.findings import Candidate, Findings, by_opening, of_error
from reshard.core.rank_files import EXTENSIONS, is_checkpoint_name
from reshard.core.records.logs import DIRECTORY
from reshard.core.records.made import changed_text, made_of
from reshard.core.storage.base import reading
from reshard.core.storage.places import as_place
from reshard.errors import Option, ReshardError, SourceError, Text, names
from reshard.formats.ranks.directories import steps_of
from reshard.formats.ranks.one_of_several import refuse_directory
from reshard.kits.files import is_save
from reshard.kits.headers import index_ranks
from reshard.kits.torch.names import SAVE_EXTENSIONS, TRAINER_FILES, faulty_trainer_file
from reshard.siblings import siblings_of
from reshard.strategy.files import read_strategy, strategy_files
from reshard.strategy.names import ranks_text

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from reshard.core.model.checkpoint import IndexedFiles
    from reshard.core.model.findings import Directory
    from reshard.core.storage.places import Place
    from reshard.strategy.strategy import Strategy

_SAVE = "torch.save"


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
        strategies = {DIRECTORY: recorded.own_strategy} if recorded.own_strategy else {}
        sources = {DIRECTORY: frozenset(recorded.ranks)}
    else:
        strategies = strategies_beside(root)
        sources = {path: frozenset(strategy.ranks) for path, strategy in strategies.items()}
    larger = [path for path, ranks in sources.items() if ranks > {*files}]
    fitting = [path for path, ranks in sources.items() if ranks == {*files}]
    if fitting and not larger:
        misfits = [_misfit(root, indexed, strategies[path]) for path in fitting if path in strategies]
        if misfits and all(misfits):
            return findings._replace(state="unknown", reason=f"does not fit {fitting[0]}: {misfits[0]}")
        return findings
    if larger and not fitting:
        lacking = ranks_text(sorted(sources[larger[0]].difference(files)))
        return findings._replace(state="incomplete", reason=f"has no file of {lacking}, which {larger[0]} names")
    reason = "no strategy file next to it says how many ranks there are"
    return findings._replace(state="unknown", reason=f"{names(larger)} names more ranks" if larger else reason)


def _misfit(root: Place, indexed: IndexedFiles, strategy: Strategy) -> str:
    """Return why the headers of the files do not fit a strategy, or ""."""
    if strategy.tensors and not any(strategy.tensors.keys() & file.index.entries.keys() for file in indexed.files):
        return "it names none of their tensors"
    some = {*indexed.ranks} < {*strategy.ranks}  # a target may be of some ranks only
    try:
        assemble(str(root), indexed.files, indexed.ranks, strategy, partial=some)
    except ReshardError as error:
        return of_error(error, root).reason
    return ""


def single_files(directory: Directory) -> Iterator[Candidate]:
    """Yield the checkpoints in the files of one directory, each by itself; or that they are useful together only."""
    root = directory.place
    files = sorted(name for name in directory.files if is_checkpoint_name(root / name))
    if any(name.endswith(".ckpt") for name in files):  # strategies of MindSpore are, too
        strategies = _strategies_in(root)
        files = [name for name in files if str(root / name) not in strategies]
    if not files:
        saved = [name for name in directory.files if (root / name).suffix in SAVE_EXTENSIONS]
        files = sorted(name for name in saved if not TRAINER_FILES.fullmatch(name))
    try:
        refuse_directory(root, files, "alone", *(["others"] if len(files) == 1 else []))
    except SourceError as error:
        yield Candidate(root, "set", "", [*directory.files.values()], partial(of_error, error, root))
        return
    trainer_files = cache(partial(faulty_trainer_file, directory))
    for name in files:
        suffix = (root / name).suffix
        kind = _SAVE if suffix not in EXTENSIONS or _is_save(root / name) else suffix.removeprefix(".")
        path = root if len(files) == 1 and kind != _SAVE else root / name
        states = [*directory.files.values()] if path == root else [directory.files[name]]
        yield Candidate(path, kind, "", states, partial(_of_file, root / name, trainer_files))


def _is_save(path: Place) -> bool:
    """Return whether `torch.save` wrote a file; opening says why another one cannot be read."""
    with suppress(SourceError, OSError):
        return is_save(str(path))
    return False


def _of_file(path: Place, trainer_files: Callable[[], Findings | None]) -> Findings:
    """Return the findings about a file, or about those of its trainer."""
    findings = by_opening(lambda: find(Listing(path)).open(contents=False), path.parent)
    return (trainer_files() or findings) if findings.state == "complete" else findings


# --- strategies ---------------------------------------------------------------------------------------------------

_SUFFIXES = {".ckpt", ".json"}
_MOST_LISTED = 4096
_MOST_READ = 16
_MOST_OPENED = 4  # each one reads the headers of the checkpoint
_MOST_BYTES = 16 << 20  # of one file, or of all in one directory


def unknown_layout(root: str, ranks: Sequence[int], change: str, fits: Callable[[Strategy], object]) -> SourceError:
    """Return the error for several ranks with an unknown sharding; `change` is why the ledger's is not used, or ""."""
    hint = Text("pass ", Option("strategy"), ", or ", Option("layout", "*", "RULE"))
    if fitting := fitting_strategies(as_place(root), ranks, fits):
        first, several = fitting[0], len(fitting) > 1
        hint = Text(
            f"{names(fitting, most=3)} {'fit' if several else 'fits'}: pass ",
            Option("strategy", first, quote(first)),
            ", or another of them" if several else "",
        )
    facts = [changed_text(root, change)] if change else []
    message = f"{root} has {len(set(ranks))} ranks, and nothing says how they were sharded"
    return SourceError(message, code="no-layout", facts=facts, hint=hint)


def fitting_strategies(root: Place, ranks: Collection[int], fits: Callable[[Strategy], object]) -> list[str]:
    """Return the strategy files and pipeline directories with which `fits` opens a checkpoint of some ranks."""
    of_ranks = [each for each in strategies_beside(root).items() if {*each[1].ranks} == {*ranks}]
    fitting: list[str] = []
    for path, strategy in of_ranks[:_MOST_OPENED]:
        with suppress(ReshardError, OSError):
            fits(strategy)
            fitting.append(path)
    return fitting


def strategies_beside(root: Place) -> dict[str, Strategy]:
    """Return the strategies in a directory, or else those next to it, by path."""
    above = root.absolute().parent if root.name in {"", ".."} else root.parent
    return _strategies_in(root) or _strategies_in(above)


def _strategies_in(directory: Place) -> dict[str, Strategy]:
    """Return the strategy files and pipeline directories in a directory, of its first few possible ones, by path."""
    strategies: dict[str, Strategy] | None = siblings_of(directory).known.get("strategies")
    if strategies is None:
        siblings_of(directory).known["strategies"] = strategies = {}
        for path in islice(_candidates(directory), _MOST_READ):
            with suppress(ReshardError, OSError):
                strategies[str(path)] = read_strategy(path)
    return strategies


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
