"""The directory of a training run, which has a directory for each step: of any format that saves steps."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from reshard.core.format import Format, Found, find, formats
from reshard.core.listing import FileNames, Listing
from reshard.core.storage.places import as_place
from reshard.core.storage.small import read_small
from reshard.errors import Option, SourceError, Text, names

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reshard.core.listing import Contents, OpenOptions, RunLayout
    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.model.findings import Candidate, Directory
    from reshard.core.storage.places import AnyName, Place

_RUN_NAMES = "directories such as iteration_00000100, iter_0000100, global_step_100 or global_step100"
_WEIGHTS = re.compile(r".*\.(?:safetensors|ckpt)|.*\.index\.json|rank_\d+", re.DOTALL)
_MOST_PROBED = 3  # of the steps of a run, the last ones
_MOST_GROUPS = 8


@dataclass(frozen=True, slots=True)
class Run:
    """A run.

    Attributes:
        here: its directory.
        format: the format of its steps, by their names; those of DeepSpeed may be named like others.
        layout: how its steps are named.
    """

    here: Listing
    format: Format
    layout: RunLayout

    @property
    def steps(self) -> Mapping[int, Place]:
        """Return the directories of its steps, by number."""
        matches = ((self.layout.directory.fullmatch(name), name) for name in self.here.names)
        return {int(match[1]): self.here.place / name for match, name in matches if match}


@cache
def _trackers() -> FileNames:
    files = {layout.tracker for _, layout in _layouts() if layout.tracker and not layout.by_name}
    return FileNames(
        re.compile("|".join(map(re.escape, sorted(files)))),
        "names an iteration of a training run that saves distributed checkpoints",
        "open the directory of the run, which has that of the iteration",
        when=frozenset({"alone", "run"}),
    )


class Runs(Format):
    """The directory of a run, of which the last finished step is opened, or the one with a number."""

    name = "run"
    title = "run"
    takes = frozenset({"strategy", "layouts", "step"})
    is_deep = True

    @property
    def parts(self) -> tuple[FileNames, ...]:  # type: ignore[override]  # of all formats
        """See `Format`. A whole file next to a tracker belongs to none of the steps."""
        return (_trackers(),)

    def find(self, here: Listing) -> Found | None:
        """See `Format`."""
        return Found(self, here) if run_at(here) else None

    def open(self, found: Found, options: OpenOptions, *, contents: Contents) -> Checkpoint:
        """See `Format`."""
        run = run_at(found.here)
        assert run is not None  # noqa: S101 -- it was found
        directory = checkpoint_of(run, options.step)
        step = find(Listing(directory))
        if not step.format.describes:
            raise SourceError(
                f"{directory} has no file of a distributed checkpoint", code="not-a-checkpoint",
                facts=[f"the checkpoints of a run are of {names([each.title for each in formats() if each.runs])}"],
                hint="open it by its own path",
            )  # fmt: skip
        checkpoint = step.open(replace(options, step=None), contents=contents)
        warnings = newer(run, directory) if options.step is None else []
        return replace(checkpoint, warnings=(*warnings, *checkpoint.warnings))

    def listed(self, tree: Directory) -> Iterator[tuple[Candidate, tuple[str, ...]]]:  # noqa: ARG002 -- steps are listed
        """See `Format`. Its steps are listed."""
        yield from ()


def _layouts() -> list[tuple[Format, RunLayout]]:
    """Return how the steps of each format lie side by side."""
    return [(each, layout) for each in formats() for layout in each.runs]


def is_iteration(name: str) -> bool:
    """Return whether a name is a checkpoint's directory within the directory of a run; not by a number alone."""
    return any(layout.directory.fullmatch(name) for _, layout in _layouts() if not layout.is_numbered)


def final_name(name: str) -> str:
    """Return the name that the directory of a step has once it is finished."""
    marks = (each.unfinished_mark for each in formats() if each.unfinished_mark)
    return next((name.partition(mark)[0] for mark in marks if mark in name), name)


def _is_weights(name: str) -> bool:
    """Return whether a name is of a file of weights, or of one of several files of a checkpoint."""
    parts = (part for each in formats() for part in each.parts if part.when.isdisjoint({"run", "directory", "foreign"}))
    return bool(_WEIGHTS.fullmatch(name)) or any(part.files.fullmatch(name) for part in parts)


def run_at(here: Listing) -> Run | None:
    """Return the run in a directory, or None.

    Next to weights, as transformers saves them with a checkpoint of DeepSpeed, it is not a run: the weights are opened.
    Nor is a Universal Checkpoint that this program wrote, which names itself.
    """
    has_weights = any(map(_is_weights, here.names))
    runs = [
        Run(here, format_, layout)
        for format_, layout in _layouts()
        if not (layout.is_numbered or (layout.by_name and has_weights))
        and ((layout.by_name and _has_tracker(here, layout)) or any(map(layout.directory.fullmatch, here.names)))
    ]
    tracked = [run for run in runs if run.layout.tracker in here.names]  # tags may be named like other checkpoints
    numbered = None if runs or has_weights else _run_of_numbers(here)
    return next(iter([*tracked, *runs]), numbered)


def _has_tracker(here: Listing, layout: RunLayout) -> bool:
    """Return whether a directory has a tracker file; `latest` may be a link to a step, too."""
    return layout.tracker in here.names and (here.place / layout.tracker).is_file()


def checkpoint_of(run: Run, iteration: int | None) -> Place:
    """Return the directory of a checkpoint of a run, by its iteration.

    Args:
        run: the run.
        iteration: its number; by default the one that the run names as the last.

    Raises:
        SourceError: there is no such iteration, or the run names none.
    """
    root, layout, steps = run.here.place, run.layout, run.steps
    available = f"iteration{'s' * (len(steps) > 1)} {names(sorted(steps))}" if steps else "none"
    if layout.is_numbered:
        return _finished_step(run, iteration)
    if iteration is None:
        if layout.tracker not in run.here.names:
            raise SourceError(
                f"{root} has no {layout.tracker}, which says which iteration is complete",
                code="missing-tracker",
                facts=[f"it has {available}"],
                hint=Text("pass ", Option("step", max(steps))),
            )
        if layout.by_name:
            return _named(run, available)
        text = read_small(root / layout.tracker, "number of an iteration", 64, SourceError)
        if not re.fullmatch(rb"\s*\d{1,18}\s*", text):
            raise SourceError(
                f"{root / layout.tracker} holds {text!r:.60}; expected the number of an iteration", code="bad-tracker"
            )
        iteration = int(text)
        available = f"{available}; {layout.tracker} names {iteration}"
    if iteration not in steps:
        raise SourceError(
            f"{root} has no iteration {iteration}", code="no-such-iteration", facts=[f"it has {available}"]
        )
    return steps[iteration]


def _named(run: Run, available: str) -> Place:
    """Return the directory that a tracker file names."""
    root, tracker = run.here.place, run.layout.tracker
    text = read_small(root / tracker, "name of a directory", 4096, SourceError)
    name = text.decode(errors="replace").strip()
    if name not in run.here.names:
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
    run = run_at(Listing(root, listing))
    return root if run is None else checkpoint_of(run, None)


def iteration_of(directory: Place, *, numbered: bool = False) -> int | None:
    """Return the iteration in the name of a checkpoint's directory, or None.

    Args:
        directory: the directory.
        numbered: its name may be the number alone.
    """
    layouts = (layout for _, layout in _layouts() if numbered or not layout.is_numbered)
    matches = (layout.directory.fullmatch(directory.absolute().name) for layout in layouts)
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
    run = run_at(Listing(root))
    if run is None:
        raise SourceError(
            f"{root} is not the directory of a run", code="not-a-run",
            facts=[f"expected {_RUN_NAMES}"],
            hint="name each checkpoint, in the order of the steps",
        )  # fmt: skip
    newest = iteration_of(checkpoint_of(run, iteration), numbered=run.layout.is_numbered)
    numbers = sorted(number for number in run.steps if newest is None or number <= newest)
    if len(numbers) < count:
        raise SourceError(
            f"{root} has fewer than {count} checkpoints up to iteration {newest}", code="too-few-checkpoints",
            facts=[f"it has iteration{'s' * (len(numbers) > 1)} {names(numbers)}"],
            hint=f"pass --last {len(numbers)}" if numbers[1:] else "",
        )  # fmt: skip
    return numbers[-count:]


def newer(run: Run, current: Place) -> list[str]:
    """Return a warning about checkpoints newer than the one that the run names, if any."""
    if run.layout.is_numbered:
        return _unfinished_steps(run, iteration_of(current, numbered=True) or 0)
    last = iteration_of(current)
    later = sorted(number for number in run.steps if last is not None and number > last)
    if not later:
        return []
    question = f"newer than {last}, which {run.layout.tracker} names: was saving it interrupted, or is it not done?"
    return [f"{run.here.place}: has iteration{'s' * (len(later) > 1)} {names(later)}, {question}"]


# --- steps without a tracker, whose names differ in a number alone ---------------------------------------------------


def _run_of_numbers(here: Listing) -> Run | None:
    """Return the run in a directory whose names match its steps alone; None if there is none, or several."""
    asked = [(each, layout) for each, layout in _layouts() if layout.is_numbered]
    if any(each.is_numbered and each.find(here) for each, _ in asked):
        return None  # it is a step itself
    runs = [
        Run(here, each, layout._replace(directory=pattern))
        for each, layout in asked
        for pattern, steps in _groups(layout, here.names).items()
        if any(_is_step(each, here.below(name)) for _, name in sorted(steps)[-_MOST_PROBED:])
    ]
    return runs[0] if len(runs) == 1 else None


def _groups(layout: RunLayout, listing: Sequence[str]) -> dict[re.Pattern[str], list[tuple[int, str]]]:
    """Return the names that differ in the number alone, by a pattern that matches them; {} if there are many kinds."""
    groups: dict[re.Pattern[str], list[tuple[int, str]]] = {}
    for name in listing:
        if match := layout.directory.fullmatch(final_name(name)):
            before, after = map(re.escape, (match[0][: match.start(1)], match[0][match.end(1) :]))
            pattern = re.compile(rf"{before}(\d{{1,18}}){after}")
            groups.setdefault(pattern, []).append((int(match[1]), name))
    return groups if len(groups) <= _MOST_GROUPS else {}


def _is_step(format_: Format, here: Listing) -> bool:
    """Return whether a directory is a step of a format, finished or not."""
    mark = format_.unfinished_mark
    return bool(mark and mark in here.place.name) or format_.find(here) is not None


def _finished_step(run: Run, number: int | None) -> Place:
    """Return the directory of a step, by default of the newest finished one.

    Raises:
        SourceError: there is no such step, or it is not finished.
    """
    root, steps = run.here.place, run.steps
    for step in sorted(steps, reverse=True) if number is None else [number] if number in steps else []:
        reason = _unfinished_reason(Listing(steps[step]))
        if not reason:
            return steps[step]
        if number is not None:
            raise SourceError(
                f"iteration {number} of {root} is not finished", code="unfinished", facts=[reason],
                hint=f"open an older one; to read what is there, open {steps[step]}",
            )  # fmt: skip
    begun = sorted(name for name in run.here.names if final_name(name) != name)
    raise SourceError(
        f"{root} has no {'finished iteration' if number is None else f'iteration {number}'}", code="no-such-iteration",
        facts=[f"it has {names(sorted(steps)) if steps else 'none'}", *(f"{name} is not finished" for name in begun)],
    )  # fmt: skip


def _unfinished_steps(run: Run, last: int) -> list[str]:
    """Return a warning that names the unfinished steps of a run, if there are any.

    Of steps that have their final names, only those after `last` are looked at, since each takes requests.
    """
    root = run.here.place
    matches = ((run.layout.directory.fullmatch(final_name(name)), name) for name in run.here.names)
    steps = [(int(match[1]), name) for match, name in matches if match]
    begun = [
        name for number, name in sorted(steps)
        if final_name(name) != name or (number > last and _unfinished_reason(run.here.below(name)))
    ]  # fmt: skip
    return [f"{root}: {names(begun)} is not finished, and not read: was saving it interrupted?"] if begun else []


def _unfinished_reason(here: Listing) -> str:
    """Return why a step is not finished, or ""."""
    if not here.names:
        return "it is empty"
    return next(filter(None, (each.unfinished(here) for each, layout in _layouts() if layout.is_numbered)), "")


FORMATS = (Runs(),)
