"""Before a run: what its target must not be, and what to do with each file: keep it, resume it, make it again, refuse.

`fates` decides from what a run wants, what the ledger knows and what is found there, and from nothing else; so dry
runs, runs and resumed runs decide alike. Files are *ours* where an earlier run made what has their names: with the size
and the time that it noted. What is not is somebody else's, and is replaced only when that is asked for.

What else is in the directory is `run.beside`'s.
"""

from __future__ import annotations

import os
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from reshard.errors import TargetError, names
from reshard.formats import check_name
from reshard.formats.directories import is_iteration, is_of_a_set
from reshard.formats.entries import SomeFiles
from reshard.plan.plan import changes_digest, file_digests
from reshard.run.ledger import refuse_foreign
from reshard.run.locks import refuse_link
from reshard.source.records import DIRECTORY, Record, known
from reshard.storage.base import stem_of_unfinished, unfinished_stem
from reshard.storage.local import local_store
from reshard.storage.places import RemotePath, as_place, can
from reshard.storage.remote import REQUESTS, forget_listings
from reshard.storage.small import is_within, refuse_inputs
from reshard.storage.threads import map_threads

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from reshard.plan.plan import Plan
    from reshard.source.records import State


class Do(Enum):
    """What to do with a file."""

    KEEP = "keep"  # an earlier run finished it as this one would
    RESUME = "resume"  # a run of the same plan from the same sources began it; what still has its sums stays
    MAKE = "make"
    CHANGED = "changed"  # refuse: another plan made or began it, or other sources
    UNMANAGED = "unmanaged"  # refuse: no run is known to have made it


class Planned(NamedTuple):
    """What a run would make of a file: the digest of all that makes it, its size, whether it is a link, or an index.

    An index comes last, because what it is of is complete then. A pointer to that comes after it.
    """

    digest: str
    size: int
    is_link: bool = False
    is_last: bool = False
    is_pointer: bool = False


class Seen(NamedTuple):
    """What is known of a file and found there.

    Attributes:
        record: of the ledger.
        state: of what has its name; None where nothing has.
        unfinished: the paths of unfinished files of it, whichever runs left them.
    """

    record: Record = Record()
    state: State | None = None
    unfinished: Sequence[str] = ()


class Policy(NamedTuple):
    """What decides for all files.

    Attributes:
        sources: when anything of the source files last changed; empty where that is not known.
        early: files have their names before that is noted, as at URLs.
        overwrite: somebody else's files may be replaced.
        restart: what earlier runs left is of no use.
    """

    sources: str = ""
    early: bool = False
    overwrite: bool = False
    restart: bool = False


class Fate(NamedTuple):
    """What to do with a file.

    Attributes:
        do: that.
        ours: the state of the file that an earlier run made, of this plan or another.
        is_touched: the source files were changed, touched or copied since, though size and time are as they were.
    """

    do: Do
    ours: State | None = None
    is_touched: bool = False


class Preflight(NamedTuple):
    """What a run would find of its target files.

    Attributes:
        fates: what it would do with each.
        resumable: how many of those to be resumed have anything written that is noted.
    """

    fates: Mapping[str, Fate]
    resumable: int = 0


def fates(wanted: Mapping[str, Planned], seen: Mapping[str, Seen], policy: Policy) -> dict[str, Fate]:
    """Return what to do with each file."""
    found = {file: fate(one, seen.get(file, Seen()), policy) for file, one in wanted.items()}
    is_complete = all(one.do is Do.KEEP or wanted[file].is_pointer for file, one in found.items())
    if not is_complete:  # a set with an index is complete: that is withdrawn
        for file, one in found.items():
            if one.do is Do.KEEP and wanted[file].is_last:
                found[file] = one._replace(do=Do.MAKE)
    return found


def fate(wanted: Planned, seen: Seen, policy: Policy) -> Fate:
    """Return what to do with one file.

    >>> ours = Record("9f", 4, ready=(4, 1))
    >>> fate(Planned("9f", 4), Seen(ours, (4, 1)), Policy()).do, fate(Planned("9f", 4), Seen(ours, (4, 2)), Policy()).do
    (<Do.KEEP: 'keep'>, <Do.UNMANAGED: 'unmanaged'>)
    """
    record, state = seen.record, seen.state
    is_same = record.digest == wanted.digest != ""
    is_touched = is_same and "" not in {policy.sources, record.sources} and policy.sources != record.sources
    is_ours = state is not None and state in {record.ready, record.replaces}
    ours = state if is_ours else None
    if is_ours and is_same and state == record.ready and not (record.may_be_lost or policy.restart):
        return Fate(Do.KEEP, ours, is_touched)
    may_replace = (
        wanted.is_pointer or is_ours or policy.overwrite or is_unnoted(wanted, record, state, early=policy.early)
    )
    if state is not None and not may_replace:
        return Fate(Do.UNMANAGED)
    starts_over = policy.restart or (policy.overwrite and not is_same)
    if starts_over or is_touched or wanted.is_pointer:  # or a file might have blocks of two sources
        return Fate(Do.MAKE, ours)
    if is_same:
        return Fate(Do.RESUME, ours)
    if is_ours or (record.digest and seen.unfinished):
        return Fate(Do.CHANGED, ours)
    return Fate(Do.MAKE, ours)


def is_unnoted(wanted: Planned, record: Record, state: State | None, *, early: bool) -> bool:
    """Return whether a file may have got its name from a run of the same plan that ended before it could note that."""
    if state is None or record.digest != wanted.digest or record.ready is not None:
        return False
    return wanted.is_link or (early and state != record.replaces and state[0] == record.size)


def of(fates: Mapping[str, Fate], *some: Do) -> list[str]:
    """Return the files with which something is to be done.

    >>> of({"a": Fate(Do.KEEP), "b": Fate(Do.MAKE)}, Do.MAKE)
    ['b']
    """
    return [file for file, one in fates.items() if one.do in some]


def check_target(plan: Plan, root: str, older: Collection[str] = ()) -> None:
    """Refuse a target that no option of a run makes right; nothing is made or changed.

    Args:
        plan: what goes there.
        root: a URL, or a local path without links in it.
        older: files of earlier runs that the run removes (`beside.older_files`), by their paths below the root.

    Raises:
        TargetError: it is inside its source or has that inside; it is a file, has a directory where a file goes, a
            source file, or a link that leads out of it; or, where the files must be alone, others; or, where they are a
            unified set, files of another.
        SourceError: the target's storage cannot be reached.
        UsageError: its name is that of a zarr store, and it is none.
    """
    if root.endswith(".zarr") and not plan.exclusive:
        check_name(root, plan.format)
    below = root.rstrip("/") + "/"
    if any(file.pointer for file in plan.files) and is_iteration(os.path.basename(root)):
        raise TargetError(
            f"{root} is an iteration, not the directory of a run",
            code="is-iteration",
            hint=f"name {os.path.dirname(root)}",
        )
    _check_apart(plan, root)
    linked = plan.linked
    if linked and not can(root).positioned:
        raise TargetError(
            f"no file can be linked at a URL such as {root}", code="not-linkable", hint="make a copy, without links"
        )
    sources = {str(as_place(file.path).real()) for file in plan.source.files}
    indexes = {os.path.dirname(below + file.path) for file in plan.files if file.last and not file.pointer}
    if any(path.startswith(f"{directory}/") for directory in indexes for path in sources):
        raise TargetError(
            f"{root} holds the source",
            code="overlaps",
            facts=["the index of the target would hide it"],
            hint="choose another target",
        )
    # A link is one of the source files already where an earlier run made it; nothing is written into it.
    written = [below + file.path for file in plan.files if file.link not in linked]
    read = [file.path for file in plan.source.files]
    refuse_inputs(written, read, "one of the source files", "choose another target directory")
    for file in plan.files:
        path = below + file.path
        resolved = str(as_place(path).real())
        if not resolved.startswith(below):
            raise TargetError(
                f"{path} leads out of the target directory, to {resolved}",
                code="outside-directory",
                hint="remove the link",
            )
    if can(root).positioned:  # where there are directories
        _check_kinds(plan, root)
    if plan.exclusive:
        _check_exclusive(plan, root, older)
    for directory in () if plan.exclusive else sorted(indexes):
        _check_one_set(plan, root, directory, older)


def _check_apart(plan: Plan, root: str) -> None:
    """Refuse a target inside its source, and a source inside its target; two directories that are one may be.

    In the directory of a run only the iteration that is written is the target. A source of files that were named one by
    one, or of one that is given itself, is not the directory that they are in; nor is a target of
    one file.
    """
    source = plan.source.opened
    place = as_place(source.root).absolute()
    if source.opening.by_file or place in {as_place(file.path) for file in source.files[:1]} or place.is_file():
        return
    iterations = {os.path.dirname(file.path) for file in plan.files if not file.pointer}
    targets = [f"{root}/{path}" for path in iterations] if any(file.pointer for file in plan.files) else [root]
    for target in targets:
        if is_within(target, source.root) and not is_within(source.root, target):
            raise TargetError(
                f"{target} is inside its source, {source.root}", code="overlaps", hint="choose a target outside it"
            )
        if is_within(source.root, target) and not (plan.alone or is_within(target, source.root)):
            raise TargetError(
                f"{target} has its source inside, {source.root}",
                code="overlaps",
                hint="choose a directory of its own for the target",
            )


def _check_kinds(plan: Plan, root: str) -> None:
    """Refuse a file where a directory has to be, and a directory where a file has to."""
    place = root
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    for directory in (place, *sorted({os.path.dirname(f"{root}/{file.path}") for file in plan.files})):
        if os.path.lexists(directory) and not os.path.isdir(directory):
            raise TargetError(
                f"{directory} is not a directory", code="not-a-directory", hint="remove it, or choose another target"
            )
    for file in plan.files:
        if os.path.isdir(f"{root}/{file.path}"):
            raise TargetError(
                f"{root}/{file.path} is a directory, and a file of the target goes there",
                code="is-directory",
                hint="move it away, or choose another target",
            )


def _check_exclusive(plan: Plan, root: str, older: Collection[str]) -> None:
    """Refuse a directory in which something else would be taken for a part of what is written."""
    planned = {path for file in plan.files for path in (file.path, unfinished_stem(file.path))}.union(older)
    if not can(root).positioned:
        found = _files_at(root)
    else:
        found = [os.path.relpath(os.path.join(where, name), root) for where, _, some in os.walk(root) for name in some]
    other = [
        path
        for path in found
        if planned.isdisjoint((path, stem_of_unfinished(path))) and not path.startswith(f"{DIRECTORY}/")
    ]
    if other:
        raise TargetError(
            f"{root} has other files too: {names(sorted(other), most=3)}",
            code="other-files",
            hint="choose another directory, or remove them",
        )


def _check_one_set(plan: Plan, root: str, directory: str, older: Collection[str]) -> None:
    """Refuse a directory in which something of another set would be taken for a part of this one: many readers glob."""
    planned = {f"{root}/{path}" for path in (*(file.path for file in plan.files), *older)}
    if plan.request and isinstance(plan.request.files, SomeFiles):  # what other processes write
        planned.update(f"{root}/{path}" for path in plan.request.files.every.paths)
    found: list[str] = []
    with suppress(OSError):  # it is not there yet, or may be written to and not be listed
        found = os.listdir(directory) if can(root).positioned else _files_at(directory)
    other = sorted(name for name in found if is_of_a_set(name) and f"{directory}/{name}" not in planned)
    if other:
        raise TargetError(
            f"{directory} has {names(other, most=3)} of another set",
            code="other-set",
            hint="choose another directory, or remove the other set",
        )


def _files_at(url: str) -> list[str]:
    """Return the paths of all files below a URL, as it is now."""
    forget_listings(url)
    return [str(path.relative_to(RemotePath(url))) for path in RemotePath(url).files()]


def planned_files(plan: Plan, digests: Sequence[str]) -> dict[str, Planned]:
    """Return what a plan makes of its files, by their paths."""
    return {
        file.path: Planned(made_of, plan.size_of(file), file.link is not None, file.last, file.pointer)
        for file, made_of in zip(plan.files, digests, strict=True)
    }


def seen_files(plan: Plan, root: str, records: Mapping[str, Record], asked: Collection[str]) -> dict[str, Seen]:
    """Return what is known and found of a plan's files; of those at URLs that are `asked`, all of their state."""
    paths = [file.path for file in plan.files]
    states = states_of(root, paths, asked)
    begun: Mapping[str, Sequence[str]] = {}
    nothing = Record()
    if can(root).positioned:
        begun = local_store().all_unfinished([f"{root}/{path}" for path in paths])
    return {path: Seen(records.get(path, nothing), states.get(path), begun.get(f"{root}/{path}", ())) for path in paths}


def states_of(root: str, files: Sequence[str], asked: Collection[str]) -> dict[str, State]:
    """Return the states of what has the names of some files.

    At URLs one listing says which there are; only some of them are asked for more, one by one. Some file systems say
    other things of a file in a listing than where they are asked for it alone.

    Raises:
        SourceError: the storage cannot be reached.
    """
    if can(root).positioned:
        found = {}
        for file in files:
            with suppress(OSError):
                status = os.lstat(f"{root}/{file}")
                found[file] = status.st_size, status.st_mtime_ns
        return found
    place = RemotePath(root)
    place.refresh()
    there = {file.url for file in place.files()}
    present = [file for file in files if f"{root}/{file}" in there]
    some = [file for file in present if file in asked]
    states = map_threads(lambda file: (place / file).status()[:2], some, REQUESTS)
    return dict.fromkeys(present, (-1, 0)) | dict(zip(some, states, strict=True))


def preflight(plan: Plan, root: str, *, overwrite: bool, restart: bool, older: Collection[str] = ()) -> Preflight:
    """Return what a run would find of its target files now; nothing is taken or changed.

    Locks of other runs, and room on the disk, are seen by the run alone.

    Raises:
        TargetError: no run may write there (`check_target`), or the logs are behind a link, or may not be there.
        SourceError: the target's storage cannot be reached.
    """
    root = str(as_place(root).real())
    check_target(plan, root, older)
    refuse_link(root)
    if plan.exclusive:
        refuse_foreign(f"{root}.reshard")
    records = known(root, [file.path for file in plan.files]).records
    seen = seen_files(plan, root, records, records)
    if not any(some.state is not None or some.record.digest for some in seen.values()):
        return Preflight({file.path: Fate(Do.MAKE) for file in plan.files})  # digests of a large plan take long
    policy = Policy(changes_digest(plan), not can(root).positioned, overwrite, restart)
    found = fates(planned_files(plan, file_digests(plan)), seen, policy)
    return Preflight(found, sum(len(seen[file].record.wrote) > 0 for file in of(found, Do.RESUME)))
