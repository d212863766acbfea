"""Strategy files that lie beside a checkpoint which was opened without one.

They are looked at to tell the user which fits, and are never used unasked. Few are, none of them large, because nobody
said that they are strategies: those in the checkpoint's directory and in the one above it.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import chain, islice
from shlex import quote
from typing import TYPE_CHECKING

from reshard.errors import Option, ReshardError, SourceError, Text, names
from reshard.readers.ranks import changed_text
from reshard.storage.places import as_place
from reshard.strategy.files import read_strategy, strategy_files

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from reshard.storage.places import Place
    from reshard.strategy.strategy import Strategy

_SUFFIXES = {".ckpt", ".json"}
_MOST_LISTED = 4096
_MOST_READ = 16
_MOST_OPENED = 4  # with each the headers of the checkpoint are read
_MOST_BYTES = 16 << 20  # of one file, or of all in one directory


def unknown_layout(root: str, ranks: Sequence[int], change: str, fits: Callable[[Strategy], object]) -> SourceError:
    """Return the error for several ranks of which nothing says how they were sharded.

    Args:
        root: their directory.
        ranks: the rank of each file.
        change: why the layout in the ledger is not used, if there is one.
        fits: opens them with a strategy.
    """
    hint = Text("pass ", Option("strategy"), ", or ", Option("layout", "*", "RULE"))
    if beside := fitting_strategies(as_place(root), ranks, fits):
        first, several = str(beside[0]), len(beside) > 1
        hint = Text(
            f"{names(beside, most=3)} {'fit' if several else 'fits'}: pass ",
            Option("strategy", first, quote(first)),
            ", or another of them" if several else "",
        )
    facts = [changed_text(root, change)] if change else []
    message = f"{root} has {len(set(ranks))} ranks, and nothing says how they were sharded"
    return SourceError(message, code="no-layout", facts=facts, hint=hint)


def fitting_strategies(root: Place, ranks: Collection[int], fits: Callable[[Strategy], object]) -> list[Place]:
    """Return the strategies beside a checkpoint that fit it: files, and directories of the files of a pipeline.

    Args:
        root: the directory of the checkpoint.
        ranks: that it has.
        fits: raises an error if a strategy does not fit.
    """
    above = root.absolute().parent if root.name in {"", ".."} else root.parent
    fitting: list[Place] = []
    opened = 0
    for place in islice(chain(_candidates(root), _candidates(above)), _MOST_READ):
        with suppress(ReshardError, OSError):
            strategy = read_strategy(place)
            if set(strategy.ranks) == set(ranks) and opened < _MOST_OPENED:
                opened += 1
                fits(strategy)
                fitting.append(place)
    return fitting


def _candidates(directory: Place) -> Iterator[Place]:
    """Yield what may be a strategy in a directory, first what is called one."""
    places: list[Place] = []
    with suppress(ReshardError, OSError):
        places = sorted(islice(directory.iterdir(), _MOST_LISTED), key=lambda place: place.name)
    for place in sorted(places, key=lambda place: "strateg" not in place.name):
        with suppress(ReshardError, OSError):
            if place.suffix not in _SUFFIXES and ("strateg" not in place.name or not place.is_dir()):
                continue
            files = strategy_files(place) if place.is_dir() else [place]
            if all(file.is_file() for file in files) and sum(file.status().nbytes for file in files) <= _MOST_BYTES:
                yield place
