"""Find a checkpoint of a training run: its last, or the one with a number."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from reshard.core.storage.places import as_place
from reshard.core.storage.small import read_small
from reshard.errors import Option, SourceError, Text, names
from reshard.formats.directories import RUN_FORMATS
from reshard.formats.runs.numbered import finished_step, run_of_steps, unfinished_steps

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reshard.core.storage.places import AnyName, Place
    from reshard.formats.directories import RunFormat

_RUN_NAMES = (
    "iteration_00000100, iter_0000100, global_step_100 or global_step100, as MindSpore Transformers, Megatron, "
    "hyper-parallel and DeepSpeed name checkpoints"
)
_WEIGHTS = re.compile(r".*\.(?:safetensors|ckpt)|.*\.index\.json|.*_model_states\.pt|rank_\d+|.*\.distcp", re.DOTALL)


def run_at(root: Place, listing: Iterable[str]) -> RunFormat | None:
    """Return the run format of a directory with these names, or None.

    Next to weights, as transformers saves them with a checkpoint of DeepSpeed, it is not a run: the weights are opened.
    Nor is a Universal Checkpoint that this program wrote, which names itself.
    """
    listing = list(listing)
    has_weights = any(map(_WEIGHTS.fullmatch, listing))
    runs = [
        run for run in RUN_FORMATS
        if not (run.is_numbered or (run.by_name and has_weights))
        and ((run.by_name and run.tracker in listing) or any(map(run.directory.fullmatch, listing)))
    ]  # fmt: skip
    tracked = [run for run in runs if run.tracker in listing]  # DeepSpeed's tags may be named like other checkpoints
    numbered = None if runs or has_weights else run_of_steps(root, listing)
    return next(iter([*tracked, *runs]), numbered)


def checkpoint_of(root: Place, listing: Sequence[str], run: RunFormat, iteration: int | None) -> Place:
    """Return the directory of a checkpoint of a run, by its iteration.

    Args:
        root: the directory of the run.
        listing: the names in it.
        run: the format of the run.
        iteration: its number; by default the one that the run names as the last.

    Raises:
        SourceError: there is no such iteration, or the run names none.
    """
    directories = dict(_checkpoints(root, listing, run))
    available = f"iteration{'s' * (len(directories) > 1)} {names(sorted(directories))}" if directories else "none"
    if run.is_numbered:
        return finished_step(root, directories, listing, iteration)
    if iteration is None:
        if run.tracker not in listing:
            raise SourceError(
                f"{root} has no {run.tracker}, which says which iteration is complete",
                code="missing-tracker",
                facts=[f"it has {available}"],
                hint=Text("pass ", Option("iteration", max(directories))),
            )
        if run.by_name:
            return _named(root, listing, run.tracker, available)
        text = read_small(root / run.tracker, "number of an iteration", 64, SourceError)
        if not re.fullmatch(rb"\s*\d{1,18}\s*", text):
            raise SourceError(
                f"{root / run.tracker} holds {text!r:.60}; expected the number of an iteration", code="bad-tracker"
            )
        iteration = int(text)
        available = f"{available}; {run.tracker} names {iteration}"
    if iteration not in directories:
        raise SourceError(
            f"{root} has no iteration {iteration}", code="no-such-iteration", facts=[f"it has {available}"]
        )
    return directories[iteration]


def _named(root: Place, listing: Sequence[str], tracker: str, available: str) -> Place:
    """Return the directory that a tracker file names."""
    text = read_small(root / tracker, "name of a directory", 4096, SourceError)
    name = text.decode(errors="replace").strip()
    if name not in listing:
        raise SourceError(
            f"{root} has no {name!r:.300}, which {tracker} names", code="no-such-iteration",
            facts=[f"it has {available}"],
        )  # fmt: skip
    return root / name


def iteration_at(root: Place, listing: Sequence[str] | None = None) -> Place:
    """Return the checkpoint that a run names as its last; any other path as it is.

    Args:
        root: the path.
        listing: the names of its entries, if known.

    Raises:
        SourceError: the run names no checkpoint.
    """
    listing = root.names() if listing is None else listing
    run = run_at(root, listing)
    return root if run is None else checkpoint_of(root, listing, run, None)


def iteration_of(directory: Place, *, numbered: bool = False) -> int | None:
    """Return the iteration in the name of a checkpoint's directory, or None.

    Args:
        directory: the directory.
        numbered: its name may be the number alone.
    """
    runs = (run for run in RUN_FORMATS if numbered or not run.is_numbered)
    matches = (run.directory.fullmatch(directory.absolute().name) for run in runs)
    return next((int(match[1]) for match in matches if match), None)


def newest_iterations(path: AnyName, count: int, iteration: int | None = None) -> list[int]:
    """Return the numbers of the newest checkpoints of a run, ascending.

    Args:
        path: the directory of the run.
        count: how many.
        iteration: the newest; by default the one that the run names as the last.

    Raises:
        SourceError: there are fewer, or there is no such iteration, or the run names none, or it is not a run.
    """
    root = as_place(path)
    listing = root.names()
    run = run_at(root, listing)
    if run is None:
        raise SourceError(
            f"{root} is not the directory of a run", code="not-a-run",
            facts=[f"expected {_RUN_NAMES}"],
            hint="name each checkpoint, in the order of the steps",
        )  # fmt: skip
    newest = iteration_of(checkpoint_of(root, listing, run, iteration), numbered=run.is_numbered)
    numbers = sorted(n for n, _ in _checkpoints(root, listing, run) if newest is None or n <= newest)
    if len(numbers) < count:
        raise SourceError(
            f"{root} has fewer than {count} checkpoints up to iteration {newest}", code="too-few-checkpoints",
            facts=[f"it has iteration{'s' * (len(numbers) > 1)} {names(numbers)}"],
            hint=f"pass --last {len(numbers)}" if numbers[1:] else "",
        )  # fmt: skip
    return numbers[-count:]


def newer(root: Place, listing: Sequence[str], run: RunFormat, current: Place) -> list[str]:
    """Return a warning about checkpoints newer than the one that the run names, if any."""
    if run.is_numbered:
        return unfinished_steps(root, listing, run, iteration_of(current, numbered=True) or 0)
    last = iteration_of(current)
    later = sorted(number for number, _ in _checkpoints(root, listing, run) if last is not None and number > last)
    if not later:
        return []
    question = f"newer than {last}, which {run.tracker} names: was saving it interrupted, or is it not done?"
    return [f"{root}: has iteration{'s' * (len(later) > 1)} {names(later)}, {question}"]


def _checkpoints(root: Place, listing: Sequence[str], run: RunFormat) -> list[tuple[int, Place]]:
    return [(int(match[1]), root / name) for name in listing if (match := run.directory.fullmatch(name))]
