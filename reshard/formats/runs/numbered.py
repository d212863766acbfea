"""Find the steps of a run without a tracker file: directories whose names differ in a number alone.

Their contents show what they are: steps of Orbax, whose names may have a prefix, or distributed checkpoints, as
torchtitan saves them. The newest finished one is the last of the run.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from reshard.errors import SourceError, names
from reshard.formats.directories import DCP, DCP_OF_RANK, RUN_FORMATS, parts_below
from reshard.formats.orbax.steps import UNFINISHED, shown_orbax, unfinished_reason
from reshard.formats.sets.names import DCP_INDEX

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from reshard.core.storage.places import Place
    from reshard.formats.directories import RunFormat

_MOST_PROBED = 3  # of the steps of a run, the last ones
_MOST_GROUPS = 8
_ORBAX, _DCP = (run for run in RUN_FORMATS if run.is_numbered)


def run_of_steps(root: Place, listing: Sequence[str]) -> RunFormat | None:
    """Return the format of the run in a directory whose names match its steps alone; None if there is none, or several.

    Args:
        root: the directory.
        listing: the names in it.
    """
    runs = [
        run._replace(directory=pattern)
        for run in ([] if shown_orbax(root, listing) else [_ORBAX, _DCP])
        for pattern, steps in _groups(run, listing).items()
        if any(_is_step(run, root / name) for _, name in sorted(steps)[-_MOST_PROBED:])
    ]
    return runs[0] if len(runs) == 1 else None


def _groups(run: RunFormat, listing: Sequence[str]) -> dict[re.Pattern[str], list[tuple[int, str]]]:
    """Return the names that differ in the number alone, by a pattern that matches them; {} if there are many kinds."""
    groups: dict[re.Pattern[str], list[tuple[int, str]]] = {}
    for name in listing:
        if match := run.directory.fullmatch(name.partition(UNFINISHED)[0]):
            before, after = map(re.escape, (match[0][: match.start(1)], match[0][match.end(1) :]))
            pattern = re.compile(rf"{before}(\d{{1,18}}){after}")
            groups.setdefault(pattern, []).append((int(match[1]), name))
    return groups if len(groups) <= _MOST_GROUPS else {}


def _is_step(run: RunFormat, directory: Place) -> bool:
    """Return whether a directory is a step, finished or not."""
    listing = directory.names()
    if run is _ORBAX:
        return UNFINISHED in directory.name or bool(shown_orbax(directory, listing))
    return bool(DCP.shown_by(directory, listing) or parts_below(directory, listing))


def finished_step(root: Place, steps: Mapping[int, Place], listing: Collection[str], number: int | None) -> Place:
    """Return the directory of a step of a run, by default of the newest finished one.

    Args:
        root: the directory of the run.
        steps: the directories of its steps.
        listing: the names in it.
        number: the number of the step.

    Raises:
        SourceError: there is no such step, or it is not finished.
    """
    for step in sorted(steps, reverse=True) if number is None else [number] if number in steps else []:
        reason = _unfinished_reason(steps[step])
        if not reason:
            return steps[step]
        if number is not None:
            raise SourceError(
                f"iteration {number} of {root} is not finished", code="unfinished", facts=[reason],
                hint=f"open an older one; to read what is there, open {steps[step]}",
            )  # fmt: skip
    begun = sorted(name for name in listing if UNFINISHED in name)
    raise SourceError(
        f"{root} has no {'finished iteration' if number is None else f'iteration {number}'}", code="no-such-iteration",
        facts=[f"it has {names(sorted(steps)) if steps else 'none'}", *(f"{name} is not finished" for name in begun)],
    )  # fmt: skip


def unfinished_steps(root: Place, listing: Iterable[str], run: RunFormat, last: int) -> list[str]:
    """Return a warning that names the unfinished steps of a run, if there are any.

    Of steps that have their final names, only those after `last` are looked at, since each takes requests.
    """
    matches = ((run.directory.fullmatch(name.partition(UNFINISHED)[0]), name) for name in listing)
    steps = [(int(match[1]), name) for match, name in matches if match]
    begun = [
        name for number, name in sorted(steps)
        if UNFINISHED in name or (number > last and _unfinished_reason(root / name))
    ]  # fmt: skip
    return [f"{root}: {names(begun)} is not finished, and not read: was saving it interrupted?"] if begun else []


def _unfinished_reason(directory: Place) -> str:
    """Return why a step is not finished, or ""."""
    listing = directory.names()
    if not listing:
        return "it is empty"
    is_saved = DCP_INDEX in listing or any(map(DCP_OF_RANK.fullmatch, listing))
    if not is_saved and DCP.shown_by(directory, listing):
        return f"it has no {DCP_INDEX}, which is written last"
    return unfinished_reason(directory, listing)
