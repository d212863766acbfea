"""The checkpoints of a training run: which there are, which is the last that is complete, and opening one of them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from reshard.errors import Option, SourceError, Text, names
from reshard.formats.directories import RUN_FORMATS
from reshard.storage.small import read_small

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from reshard.formats.directories import RunFormat
    from reshard.source.checkpoint import Checkpoint
    from reshard.storage.places import Place


class Iteration(NamedTuple):
    """A checkpoint of a run.

    Attributes:
        number: how many steps were done.
        root: its directory.
        nbytes: the size of its files.
        is_last: the run names it as its last.
        problem: why it cannot be read, such as a file that is not there; empty where it is complete.
        warnings: what else is known of it, such as that the training was not healthy.
    """

    number: int
    root: str
    nbytes: int
    is_last: bool
    problem: str
    warnings: tuple[str, ...]


def run_at(there: Iterable[str]) -> RunFormat | None:
    """Return how a run keeps its checkpoints whose directory has these names; None where it is not a run's."""
    there = list(there)
    return next((run for run in RUN_FORMATS if any(map(run.directory.fullmatch, there))), None)


def checkpoint_of(root: Place, there: Sequence[str], run: RunFormat, iteration: int | None) -> Place:
    """Return the directory of a checkpoint of a run, by its iteration.

    Args:
        root: the directory of the run.
        there: the names of what is in it.
        run: how it keeps its checkpoints.
        iteration: which one; by default that which the run names as the last.

    Raises:
        SourceError: it is not there, or the run names none.
    """
    known = dict(_checkpoints(root, there, run))
    available = f"iteration{'s' * (len(known) > 1)} {names(sorted(known))}"
    if iteration is None:
        if run.tracker not in there:
            raise SourceError(
                f"{root} has no {run.tracker}, which says which iteration is complete",
                code="missing-tracker",
                facts=[f"it has {available}"],
                hint=Text("pass ", Option("iteration", max(known))),
            )
        text = read_small(root / run.tracker, "number of an iteration", 64, SourceError)
        if not re.fullmatch(rb"\s*\d{1,18}\s*", text):
            raise SourceError(
                f"{root / run.tracker} holds {text!r:.60}; expected the number of an iteration", code="bad-tracker"
            )
        iteration = int(text)
        available = f"{available}; {run.tracker} names {iteration}"
    if iteration not in known:
        raise SourceError(
            f"{root} has no iteration {iteration}", code="no-such-iteration", facts=[f"it has {available}"]
        )
    return known[iteration]


def iteration_of(place: Place) -> int | None:
    """Return which iteration a checkpoint is of, by the name of its directory; None where that does not say."""
    matches = (run.directory.fullmatch(place.absolute().name) for run in RUN_FORMATS)
    return next((int(match[1]) for match in matches if match), None)


def iterations(root: Place, there: Sequence[str], opened: Callable[[Place], Checkpoint]) -> list[Iteration]:
    """Return the checkpoints in a directory, ascending; none where it is not that of a run.

    Args:
        root: the directory.
        there: the names of what is in it.
        opened: opens a checkpoint: headers are read, to see whether all is there.
    """
    run = run_at(there)
    if run is None:
        return []
    try:
        last = iteration_of(checkpoint_of(root, there, run, None))
    except SourceError:
        last = None
    found = []
    for number, place in sorted(_checkpoints(root, there, run)):
        problem = ""
        warnings = ["newer than the last"] if last is not None and number > last else []
        try:
            checkpoint = opened(place)
            warnings += checkpoint.warnings
            if checkpoint.unreadable:
                name, reason = next(iter(checkpoint.unreadable.items()))
                problem = f"{len(checkpoint.unreadable)} tensors cannot be read, such as {name!r}, which {reason}"
        except SourceError as error:
            text = "; ".join([error.message, *error.facts])
            problem = text.removeprefix(f"{place}: ").removeprefix(f"{place} ")
        nbytes = sum(file.status().nbytes for file in place.files(depth=1))
        found.append(Iteration(number, str(place), nbytes, number == last, problem, tuple(warnings)))
    return found


def newer(root: Place, there: Sequence[str], run: RunFormat, place: Place) -> list[str]:
    """Return a warning where a run has checkpoints that are newer than the one that it names as the last."""
    last = iteration_of(place)
    later = sorted(number for number, _ in _checkpoints(root, there, run) if last is not None and number > last)
    if not later:
        return []
    what = f"newer than {last}, which {run.tracker} names: was saving it interrupted, or is it not done?"
    return [f"{root}: has iteration{'s' * (len(later) > 1)} {names(later)}, {what}"]


def _checkpoints(root: Place, there: Sequence[str], run: RunFormat) -> list[tuple[int, Place]]:
    return [(int(match[1]), root / name) for name in there if (match := run.directory.fullmatch(name))]
