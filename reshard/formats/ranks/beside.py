"""Find strategy files next to a checkpoint that was opened without one.

They are read only to tell the user which of them fits, and are never applied. The search covers the checkpoint's
directory and its parent. It reads few files and no large ones, since any of them may be something else.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import chain, islice
from shlex import quote
from typing import TYPE_CHECKING

from reshard.core.storage.places import as_place
from reshard.errors import Option, ReshardError, SourceError, Text, names
from reshard.formats.ranks.reader import changed_text
from reshard.strategy.files import read_strategy, strategy_files

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from reshard.core.storage.places import Place
    from reshard.strategy.strategy import Strategy

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
