"""Arguments as MindSpore's functions take them: strategies in all their forms, paths, numbers, formats."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.errors import PYTHON, SourceError, StrategyError, UsageError, Words, spelled
from reshard.mindspore.strategy import any_layout, layout_of
from reshard.storage.places import as_place
from reshard.storage.small import refuse_inputs
from reshard.strategy.files import read_strategy, strategy_files
from reshard.strategy.strategy import MERGED_NAME, Strategy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reshard.layout.block import Shape
    from reshard.layout.layout import Layout
    from reshard.plan.plan import Plan

PathLike = str | os.PathLike[str]
StrategyLike = PathLike | Strategy | Mapping[str, Any]

FORMATS = ("ckpt", "safetensors")

_RANK_IN_PATH = re.compile(r"rank_?(\d{1,9})(?!\d)", re.IGNORECASE)

WORDS: Words = {
    **PYTHON,
    "layout": ("layouts={{{!r}: {!r}}} to reshard.open",),
    "partial": ("partial=True to reshard.open",),
    "rank_pattern": ("rank_pattern to reshard.open",),
    "strategy": ("src_strategy_file",),
    "suffix": ("file_suffix",),
}
"""How options are written for callers of MindSpore's functions; what these do not take is Python's."""


class DirectoryError(SourceError, NotADirectoryError):
    """What should be a directory is none; NotADirectoryError is what MindSpore raises."""


def refuse_strategies(planned: Plan, target: Path, *given: StrategyLike | None) -> None:
    """Raise `TargetError` where a file that is to be written is a strategy file that was given."""
    paths = [as_place(strategy) for strategy in given if isinstance(strategy, str | os.PathLike)]
    some = [strategy_files(path) if path.is_dir() else [path] for path in paths]
    written = [target / file.path for file in planned.files]
    refuse_inputs(written, [file for files in some for file in files], "one of the strategy files")


def strategy_of(argument: str, given: StrategyLike | None) -> Strategy | None:
    """Return a strategy given in any of the ways that MindSpore's functions take one.

    Args:
        argument: its name, for messages.
        given: a file, a directory of the files of a pipeline's ranks, a `Strategy`, or a dict of layouts by name as
            `build_searched_strategy` or MindSpore's `infer_predict_layout` return it.

    Raises:
        TypeError: it is none of these.
        StrategyError: it cannot be read, or contradicts itself.
    """
    if given is None or isinstance(given, Strategy):
        return given
    if isinstance(given, str | os.PathLike):
        path = path_of(argument, given)
        if not path.exists():
            raise StrategyError(f"{argument} {path} is not there; expected a strategy file")
        return read_strategy(path)
    if not isinstance(given, Mapping):
        raise TypeError(f"{argument} is a {type(given).__name__}; expected the name of a strategy file")
    if not given:
        raise StrategyError(f"{argument} names no parameter")
    matches = {name: MERGED_NAME.fullmatch(name) for name in given}
    merged = all(matches.values())
    layouts: dict[str, dict[int, Layout]] = {}
    shapes: dict[str, Shape] = {}
    for name, value in given.items():
        match = matches[name] if merged else None
        own_name, stage = (match[2], int(match[1])) if match else (name, 0)
        layouts.setdefault(own_name, {})[stage] = any_layout(value)
        shape = None if isinstance(value, list | tuple) else layout_of(value)[1]
        if shape is not None:
            shapes[own_name] = shape
    strategy = Strategy.of(layouts, shapes=shapes)
    tensors = {  # a shape may be expanded, as JSON files have it
        name: tuple(placed._replace(expanded=placed.shape is not None) for placed in places)
        for name, places in strategy.tensors.items()
    }
    return replace(strategy, tensors=tensors, merged=merged)


def thread_count(argument: str, given: object) -> int:
    """Return how many threads a number of processes means here: no more than there are processors.

    Raises:
        TypeError: it is no number.
        UsageError: it is below 1.
    """
    check_whole(argument, given)
    assert isinstance(given, int)  # noqa: S101 -- for mypy; checked above
    if given < 1:
        raise UsageError(f"{argument} is {given}; expected at least 1")
    return min(given, len(os.sched_getaffinity(0)))


def check_whole(argument: str, given: object) -> None:
    """Refuse what is not a whole number.

    Raises:
        TypeError: it is not one.
    """
    if not isinstance(given, int) or isinstance(given, bool):
        raise TypeError(f"{argument} is {given!r:.60} ({type(given).__name__}); expected an int")


def check_rank(argument: str, given: object) -> None:
    """Refuse what is not the number of a rank.

    Raises:
        TypeError: it is not a whole number.
        UsageError: it is below 0.
    """
    check_whole(argument, given)
    if isinstance(given, int) and given < 0:
        raise UsageError(f"{argument} is {given}; expected 0 or more")


def check_order(argument: str, files: Mapping[int, Path]) -> None:
    """Refuse files that are given in another order than their paths say: slices would be put in wrong places.

    Only paths that all have a number after `rank`, each another one, say so. Their numbers may begin anywhere, as those
    of a stage do. The file of a replica may stand in for one that is lost, so paths of the same rank say nothing.

    Raises:
        UsageError: their numbers do not ascend.

    >>> check_order("files", {0: Path("rank_8/a.ckpt"), 1: Path("rank_9/a.ckpt"), 2: Path("rank_10/a.ckpt")})
    """
    matches = {rank: _RANK_IN_PATH.findall(os.fspath(file)) for rank, file in files.items()}
    if not all(matches.values()):
        return
    said = {rank: int(found[-1]) for rank, found in sorted(matches.items())}
    wanted = sorted(said.values())
    wrong = [rank for rank, number in zip(said, wanted, strict=True) if said[rank] != number]
    if wrong and len(set(wanted)) == len(wanted):
        rank = wrong[0]
        raise UsageError(
            f"{argument}[{rank}] is {files[rank]}, by its path of rank {said[rank]}; expected the files in the order "
            f"of their ranks (sort by number: as text rank_10 comes before rank_2)"
        )


def check_format(argument: str, given: object) -> None:
    """Refuse what is no name of a format.

    Raises:
        UsageError: it is none.
    """
    if given not in FORMATS:
        raise UsageError(f"{argument} is {given!r}; expected 'ckpt' or 'safetensors'")


def target_directory(argument: str, given: object) -> Path:
    """Return a directory to write to, which need not be there yet.

    Raises:
        TypeError: it is no path.
        NotADirectoryError: it is a file.
    """
    path = path_of(argument, given)
    if path.exists() and not path.is_dir():
        raise DirectoryError(f"{argument} {path} is a file; expected a directory")
    return path


def path_of(argument: str, given: object) -> Path:
    """Return an argument that is a path.

    Raises:
        TypeError: it is none.
        UsageError: it is empty, which would be the current directory.
    """
    if not isinstance(given, str | os.PathLike):
        raise TypeError(f"{argument} is {given!r:.60} ({type(given).__name__}); expected a path")
    if not os.fspath(given):
        raise UsageError(f"{argument} is empty; expected a path")
    return Path(given)


@contextmanager
def own_words() -> Iterator[None]:
    """Raise errors of the core in the words of MindSpore's functions."""
    try:
        yield
    except SourceError as error:
        raise type(error)(spelled(error.text, WORDS)) from error.__cause__
