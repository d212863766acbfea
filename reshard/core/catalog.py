"""List the checkpoints below a directory, and tell which are complete, from names and headers alone.

1. All directories below it are listed; an object store is asked for all files below the root at once.
2. Names show the checkpoints and their formats (`Format.listed`), and targets that reshard has not finished.
3. Headers show whether a checkpoint is complete: it is opened, without its contents. Otherwise it is unknown.

Within a directory, the newest checkpoint is that of the highest step; among several directories, it is the one whose
files changed last.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.core.format import formats
from reshard.core.listing import RANK_DIRECTORY, STEP_NAME, Listing
from reshard.core.model.findings import Candidate, Directory, FileStat, Findings
from reshard.core.records.logs import DIRECTORY, leftovers, unfinished
from reshard.core.runs import checkpoint_of, final_name, is_iteration, iteration_of, run_at
from reshard.core.storage.base import similar
from reshard.core.storage.places import LocalPath, RemotePath, as_place
from reshard.core.storage.urls.listings import listings
from reshard.errors import SourceError
from reshard.siblings import keeping_siblings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from reshard.core.model.findings import State
    from reshard.core.storage.places import AnyName, Place

_DEEPEST = 64
_MOST_BELOW = 1000  # directories in which checkpoints are looked for, for a hint
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
    with _listed(as_place(path)) as tree:
        survey = _Survey(tree)
        for each in survey.candidates:
            survey.is_complete(each, each.examine)
        newest = survey.newest()
    return [replace(record, newest=each is newest) for each, record in survey.records.items()]


def newest_complete(path: AnyName) -> tuple[StoredCheckpoint, list[StoredCheckpoint]]:
    """Return the newest complete checkpoint below a directory, and newer ones that may be complete.

    Older ones are not looked at.

    Raises:
        SourceError: there is none, or the directory cannot be listed.
    """
    root = as_place(path)
    with _listed(root) as tree:
        survey = _Survey(tree)
        for directory in survey.directories:
            survey.look_in(directory)
        newest = survey.newest()
    states = [*survey.records.values()]
    if newest is not None:
        doubtful = [each for each in states if each.state == "unknown" and each.modified > newest.modified]
        return replace(survey.records[newest], newest=True), doubtful
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


def paths_below(root: Place) -> list[str]:
    """Return the paths of finished checkpoints below a local directory that is none, by the names of some of them."""
    with keeping_siblings():
        candidates = _in_order(_candidates(_walked(LocalPath(str(root)), _MOST_BELOW), ""))
    if any(each.path == root for each in candidates):
        return []
    paths = [each.path for each in candidates if each.files and final_name(each.path.name) == each.path.name]
    return [path.relative_to(str(root)).as_posix() for path in paths if not leftovers(path)]


def _in_order(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Sort checkpoints by their directory, then by step; `step-100.bak` is before `step-100`."""

    def key(each: Candidate) -> tuple[str, list[int], bool, float, str]:
        numbers = [*map(int, re.findall(r"\d+", each.step))]
        is_copy = _COPY.fullmatch(each.path.name) is not None
        return str(each.path.parent), numbers, not is_copy, each.modified, str(each.path)

    return sorted(candidates, key=key)


class _Survey:
    """The checkpoints below a directory by their names, and records of those whose headers were read."""

    def __init__(self, tree: Directory) -> None:
        self.candidates = _in_order(_candidates(tree, ""))
        self.records: dict[Candidate, StoredCheckpoint] = {}
        self.directories: dict[str, list[Candidate]] = {}
        for each in reversed(self.candidates):
            self.directories.setdefault(str(each.path.parent), []).append(each)
        self._last = dict(_last(tree))

    def is_complete(self, candidate: Candidate, examine: Callable[[], Findings]) -> bool:
        """Read the headers of a checkpoint, and record what is found."""
        findings = examine()
        path, named = str(candidate.path), self._last.get(str(candidate.path.parent))
        number, newest = (None if place is None else iteration_of(place) for place in (candidate.path, named))
        if findings.state == "complete" and number is not None and newest is not None and number > newest:
            reason = f"is newer than {newest}, which the run names as its last: was saving it interrupted?"
            findings = findings._replace(state="unknown", reason=reason)
        self.records[candidate] = StoredCheckpoint(
            path, candidate.step, candidate.format, findings.ranks, len(candidate.files),
            sum(file.nbytes for file in candidate.files), candidate.modified, findings.state, findings.reason,
            last=path == str(named), hint=findings.hint,
        )  # fmt: skip
        return findings.state == "complete"

    def look_in(self, directory: str) -> None:
        """Look at checkpoints in a directory that have no record, the newest first, until one is complete."""
        for each in self.directories[directory]:
            if each not in self.records and self.is_complete(each, each.examine):
                return

    def newest(self) -> Candidate | None:
        """Return the newest of the last complete ones of each directory, after a look at all of its headers."""
        while True:
            complete = [each for each, record in self.records.items() if record.state == "complete"]
            last = {str(each.path.parent): each for each in _in_order(complete)}
            newest = max(last.values(), key=lambda each: each.modified, default=None)
            if newest is None or newest.confirm is None or self.is_complete(newest, newest.confirm):
                return newest
            self.look_in(str(newest.path.parent))


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
    *asked, of_any_files = (
        each for each in formats(packages=True) if not (is_run and each.describes and each.has_steps)
    )
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
    yield from of_any_files.listed(directory)


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


# --- the tree of directories: names, sizes and times, listed once ---------------------------------------------------


@contextmanager
def _listed(root: Place) -> Iterator[Directory]:
    """List all below a directory; at a URL, readers are answered from this list until the end.

    Raises:
        SourceError: it does not exist, is a file, or cannot be listed.
    """
    if isinstance(root, RemotePath):
        with listings.kept(root.url) as files, keeping_siblings():
            directory = Directory(root)
            for url, info in files.items():
                _add(directory, url.removeprefix(f"{root.url}/").split("/"), FileStat(info.nbytes, info.modified))
            if files:
                yield directory
                return
        root.require_bucket()
        raise _missing(root, is_file=root.is_file())
    if not root.is_dir():
        raise _missing(root, is_file=root.exists())
    with keeping_siblings():
        yield _walked(root)


def _missing(root: Place, *, is_file: bool) -> SourceError:
    if is_file:
        return SourceError(
            f"{root} is a file; expected a directory", code="not-a-directory", hint=f"reshard inspect {root}"
        )
    return SourceError(f"{root} does not exist", code="not-found", hint=similar(root))


def _add(directory: Directory, names: list[str], state: FileStat) -> None:
    """Add a file by the names in its path, unless one is invalid."""
    *above, name = names
    if {"", ".", ".."}.intersection(names) or len(names) > _DEEPEST:
        return
    for part in above:
        if part.startswith("."):
            directory.hidden += [] if part in directory.hidden else [part]
            return
        directory = directory.below.setdefault(part, Directory(directory.place / part))
    directory.files[name] = state


def _walked(root: LocalPath, most: int = sys.maxsize) -> Directory:
    """Return a local directory with all below it, but for hidden directories; at most so many directories.

    Links are followed last, so that a directory keeps its own path; each directory is listed once, so that circles end.
    """
    top = Directory(root)
    visited: dict[tuple[int, int], Directory | None]
    visited = {_identity(above): None for above in root.resolve().parents}  # a link to one of them leads out
    waiting, links = [(top, 0)], list[tuple[Directory, int]]()
    while (waiting or links) and len(visited) < most:
        directory, depth = waiting.pop() if waiting else links.pop(0)
        try:
            identity = _identity(directory.place)
            if identity in visited:
                _link_of_rank(directory, visited[identity])
                continue
            visited[identity] = directory
            with os.scandir(str(directory.place)) as entries:
                for entry in entries:
                    _enter(directory, depth, entry, links if entry.is_symlink() else waiting)
        except OSError as error:
            directory.problem = error.strerror or str(error)
    return top


def _link_of_rank(link: Directory, original: Directory | None) -> None:
    """Give the files of a directory to a link that says that they are of a rank."""
    if original is not None and RANK_DIRECTORY.fullmatch(link.place.name):
        link.files = dict(original.files)
        if not RANK_DIRECTORY.fullmatch(original.place.name):
            original.files.clear()  # they are no model


def _enter(directory: Directory, depth: int, entry: os.DirEntry[str], waiting: list[tuple[Directory, int]]) -> None:
    """Add an entry to its directory; a directory waits until it is listed."""
    try:
        if not entry.is_dir():
            if "\n" in entry.name:  # readers refuse such files, and open such directories
                return
            status = entry.stat()
            directory.files[entry.name] = FileStat(status.st_size, status.st_mtime)
        elif entry.name.startswith("."):
            directory.hidden.append(entry.name)
        elif depth < _DEEPEST:
            directory.below[entry.name] = below = Directory(LocalPath(entry.path))
            waiting.append((below, depth + 1))
    except OSError:  # a broken link, or a circle of links
        directory.files[entry.name] = FileStat(0, 0.0)


def _identity(path: Place | Path) -> tuple[int, int]:
    status = Path(str(path)).stat()
    return status.st_dev, status.st_ino
