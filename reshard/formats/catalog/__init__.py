"""List the checkpoints below a directory, and tell which are complete, from names and headers alone.

1. All directories below it are listed (`walk`).
2. Names show the checkpoints and their formats: checkpoints that describe their own blocks (`Format.listed`), rank
   directories, sets and single files (`ranked`), and targets that reshard has not finished.
3. Headers show whether a checkpoint is complete: it is opened, without its contents. Otherwise it is unknown.

Within a directory, the newest checkpoint is that of the highest step; among several directories, it is the one whose
files changed last.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING

from reshard.core.format import formats
from reshard.core.listing import STEP_NAME, Listing
from reshard.core.model.findings import Candidate, Findings, by_opening, of_error
from reshard.core.records.logs import DIRECTORY, unfinished
from reshard.core.runs import checkpoint_of, final_name, is_iteration, iteration_of, run_at
from reshard.core.storage.places import as_place
from reshard.errors import SourceError
from reshard.formats.catalog.walk import listed
from reshard.formats.open import open as open_checkpoint
from reshard.formats.ranks.completeness import forget_strategies, strategies_at
from reshard.formats.ranks.directories import is_checkpoint_name
from reshard.formats.ranks.names import EXTENSIONS
from reshard.formats.ranks.one_of_several import refuse_directory
from reshard.kits.files import is_save
from reshard.kits.torch.names import SAVE_EXTENSIONS, TRAINER_FILES, faulty_trainer_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from reshard.core.model.findings import Directory, State
    from reshard.core.storage.places import AnyName, Place


_TEMPORARY = re.compile(
    r"(?:tmp|temp)[-_.].*|.*[-_.](?:tmp|temp|temporary|incomplete|unfinished)", re.IGNORECASE | re.DOTALL
)
_STEP = re.compile(rf"{STEP_NAME}(?:[-_.].*)?", re.IGNORECASE | re.DOTALL)
_COPY = re.compile(r".*[-_.](?:bak|backup|copy|old|orig)[0-9]*", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint below a directory.

    Attributes:
        path: its directory or file, as `reshard.open` takes it.
        step: the step of the training in its name, such as 500 or, of MindSpore, 2_100; empty if there is none.
        format: the name of its format.
        ranks: the number of ranks whose files it has; None if unknown.
        files: the number of its files.
        nbytes: their size in bytes.
        modified: the time of the last change of a file, in seconds since 1970; 0 if unknown.
        state: complete, incomplete, or unknown if names and headers do not tell.
        reason: why it is not complete; empty if it is.
        newest: whether it is the newest complete one of all.
        last: whether a run names it as its last.
        hint: how to complete it, such as the command that resumes an unfinished target; empty if that is not known.
    """

    path: str
    step: str
    format: str
    ranks: int | None
    files: int
    nbytes: int
    modified: float
    state: State
    reason: str = ""
    newest: bool = False
    last: bool = False
    hint: str = ""


def stored_checkpoints(path: AnyName) -> list[StoredCheckpoint]:
    """Return the checkpoints below a directory, by directory and step.

    Raises:
        SourceError: it does not exist, or cannot be listed.
    """
    forget_strategies()
    with listed(as_place(path)) as root:
        last = dict(_last(root))
        records = {each: _examined(each, last, each.examine) for each in _in_order(_candidates(root, ""))}
        while (newest := _newest(_complete(records))) and not _is_confirmed(newest, records, last):
            pass
    return [replace(record, newest=each is newest) for each, record in records.items()]


def newest_complete(path: AnyName) -> tuple[StoredCheckpoint, list[StoredCheckpoint]]:
    """Return the newest complete checkpoint below a directory, and newer ones that may be complete.

    Older ones are not looked at.

    Raises:
        SourceError: there is none, or the directory cannot be listed.
    """
    forget_strategies()
    root = as_place(path)
    with listed(root) as tree:
        last = dict(_last(tree))
        groups: dict[str, list[Candidate]] = {}
        for each in reversed(_in_order(_candidates(tree, ""))):
            groups.setdefault(str(each.path.parent), []).append(each)
        records: dict[Candidate, StoredCheckpoint] = {}
        for group in groups.values():
            _look(group, records, last)
        while (newest := _newest(_complete(records))) and not _is_confirmed(newest, records, last):
            _look(groups[str(newest.path.parent)], records, last)
    states = [*records.values()]
    if newest is not None:
        doubtful = [each for each in states if each.state == "unknown" and each.modified > newest.modified]
        return replace(records[newest], newest=True), doubtful
    facts = [f"{record.path} is {record.state}: {record.reason}" for record in states[:3]]
    raise SourceError(
        f"{root} has no complete checkpoint", code="no-checkpoint",
        facts=[*facts, *([f"and {len(states) - 3} more"] if states[3:] else [])],
        hint=f"reshard runs {root}" if states else "",
    )  # fmt: skip


def iterations_at(path: AnyName) -> list[StoredCheckpoint]:
    """Return the checkpoints of a run; [] for any other path."""
    root = as_place(path)
    return stored_checkpoints(root) if run_at(Listing(root)) else []


def _in_order(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Sort checkpoints by their directory, then by step; `step-100.bak` is before `step-100`."""

    def key(each: Candidate) -> tuple[str, list[int], bool, float, str]:
        numbers = [*map(int, re.findall(r"\d+", each.step))]
        is_copy = _COPY.fullmatch(each.path.name) is not None
        return str(each.path.parent), numbers, not is_copy, each.modified, str(each.path)

    return sorted(candidates, key=key)


def _newest(candidates: Iterable[Candidate]) -> Candidate | None:
    """Return the newest of the last of each directory, given checkpoints in order."""
    last = {str(each.path.parent): each for each in _in_order(candidates)}
    return max(last.values(), key=lambda each: each.modified, default=None)


def _look(group: Iterable[Candidate], records: dict[Candidate, StoredCheckpoint], last: Mapping[str, Place]) -> None:
    """Examine those of a directory, the newest first, that were not examined yet, until one is complete."""
    for each in group:
        if each not in records:
            records[each] = _examined(each, last, each.examine)
            if records[each].state == "complete":
                return


def _is_confirmed(candidate: Candidate, records: dict[Candidate, StoredCheckpoint], last: Mapping[str, Place]) -> bool:
    """Return whether a checkpoint is complete, by all of its headers; else record why not."""
    if candidate.confirm is not None:
        records[candidate] = _examined(candidate, last, candidate.confirm)
    return records[candidate].state == "complete"


def _complete(records: Mapping[Candidate, StoredCheckpoint]) -> list[Candidate]:
    return [each for each, record in records.items() if record.state == "complete"]


def _examined(candidate: Candidate, last: Mapping[str, Place], examine: Callable[[], Findings]) -> StoredCheckpoint:
    """Read the headers of a checkpoint; `last` is the checkpoint that each run names as its last."""
    findings = examine()
    path = str(candidate.path)
    named = last.get(str(candidate.path.parent))
    number, newest = (None if place is None else iteration_of(place) for place in (candidate.path, named))
    if findings.state == "complete" and number is not None and newest is not None and number > newest:
        reason = f"is newer than {newest}, which the run names as its last: was saving it interrupted?"
        findings = findings._replace(state="unknown", reason=reason)
    return StoredCheckpoint(
        path, candidate.step, candidate.format, findings.ranks, len(candidate.files),
        sum(file.nbytes for file in candidate.files), candidate.modified, findings.state, findings.reason,
        last=path == str(named), hint=findings.hint,
    )  # fmt: skip


def _last(directory: Directory) -> Iterator[tuple[str, Place]]:
    """Yield the directory of each run, and the checkpoint that it names as its last."""
    if run := run_at(Listing(directory.place, directory.names)):
        with suppress(SourceError):  # it names none
            yield str(directory.place), checkpoint_of(run, None)
    for below in directory.below.values():
        yield from _last(below)


def _candidates(directory: Directory, temporary: str) -> Iterator[Candidate]:
    """Yield the checkpoints in a directory and below it.

    Args:
        directory: the directory.
        temporary: the name of the temporary directory that it is in; empty if it is in none.
    """
    name = directory.place.name
    if _TEMPORARY.fullmatch(name) and final_name(name) == name:
        temporary = name
    remaining = {*directory.below}
    for candidate, names in _here(directory):
        remaining.difference_update(names)
        examine = candidate.examine
        if temporary:
            examine = partial(Findings, "incomplete", f"{temporary} is the name of a temporary directory")
        yield replace(
            candidate,
            step=candidate.step or _step(candidate.path, numbered=candidate.is_numbered),
            examine=examine,
        )
    for name in sorted(remaining):
        yield from _candidates(directory.below[name], temporary)


def _step(path: Place, *, numbered: bool) -> str:
    """Return the step in the name of a checkpoint, or of the directory that it is in.

    Args:
        path: the checkpoint.
        numbered: a number at the end of the name is the step, whatever is before it.
    """
    for directory in (path, path.parent):
        name = final_name(directory.name)
        number = iteration_of(directory.parent / name, numbered=numbered or name.isdecimal())
        match = _STEP.fullmatch(name)
        if number is not None or match:
            return str(int(match[1]) if number is None and match else number)
    return ""


def _here(directory: Directory) -> Iterator[tuple[Candidate, Iterable[str]]]:
    """Yield the checkpoints in a directory itself, each with the subdirectories that belong to it."""
    if directory.problem:
        examine = partial(Findings, "unknown", f"it cannot be read: {directory.problem}")
        yield Candidate(directory.place, "", "", [], examine), ()
        return
    target = _unfinished(directory) if DIRECTORY in directory.names else None
    if target is not None:
        yield target
    if target is None or target[0].path != directory.place:
        yield from _finished(directory)


def _finished(directory: Directory) -> Iterator[tuple[Candidate, Iterable[str]]]:
    """Yield the checkpoints in a directory itself that are not unfinished targets, as `_here` does."""
    root, names = directory.place, directory.names
    is_run = run_at(Listing(root, names)) is not None
    # The names of a store's arrays may be those of steps; no other checkpoint is in the directory of a run itself.
    asked = [each for each in formats(packages=True) if not (is_run and each.describes and each.has_steps)]
    for each in asked:
        if found := [*each.listed(directory)]:
            yield from found
            return
    for each in asked:
        if reason := each.remains(directory):
            candidate = each.candidate(directory, partial(Findings, "incomplete", reason))
            yield candidate, directory.below if each.is_deep else ()
            return
    if not names and _STEP.fullmatch(root.name):
        yield Candidate(root, "", "", [], partial(Findings, "incomplete", "is an empty directory")), ()
        return
    yield from ((candidate, ()) for candidate in single_files(directory))


def _unfinished(directory: Directory) -> tuple[Candidate, Iterable[str]] | None:
    """Return the unfinished target in a directory, and the subdirectories of its files."""
    progress = unfinished(str(directory.place.absolute()))
    if progress is None:
        return None
    below = {file.partition("/")[0] for file in progress.files}
    first = min(below)
    path = directory.place / first if len(below) == 1 and (is_iteration(first) or progress.files == (first,)) else None
    written = [directory.below[name] for name in below if name in directory.below]
    files = [state for each in written for state in each.every_file()]
    files += directory.files.values() if path is None else ()
    examine = partial(Findings, "incomplete", progress.text, hint=progress.hint)
    return Candidate(path or directory.place, "unfinished target", "", files, examine), below


_SAVE = "torch.save"


def single_files(directory: Directory) -> Iterator[Candidate]:
    """Yield the checkpoints in the files of one directory, each by itself; or that they are useful together only."""
    root = directory.place
    files = sorted(name for name in directory.files if is_checkpoint_name(root / name))
    if any(name.endswith(".ckpt") for name in files):  # strategies of MindSpore are, too
        strategies = strategies_at(str(root))
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
        opens = partial(open_checkpoint, root / name, contents=False)
        yield Candidate(path, kind, "", states, partial(_with, trainer_files, partial(by_opening, opens, root)))


def _is_save(path: Place) -> bool:
    """Return whether `torch.save` wrote a file; opening says why another one cannot be read."""
    try:
        return is_save(str(path))
    except (SourceError, OSError):
        return False


def _with(trainer_files: Callable[[], Findings | None], examine: Callable[[], Findings]) -> Findings:
    findings = examine()
    return (trainer_files() or findings) if findings.state == "complete" else findings
