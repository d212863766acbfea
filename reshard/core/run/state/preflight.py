"""Check sources and a target; decide to keep, resume, make or refuse each target file.

`fates` decides only from the plan, the ledger and the files found in the target, so that dry runs, runs and resumed
runs decide alike. A file is *ours* if its size and time are as an earlier run recorded them. Any other file is
foreign, and is replaced only with `overwrite`.

`core.run.state.beside` handles other files in the directory.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from itertools import product
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from reshard.core.format import is_of_several, targets
from reshard.core.model.entries import SomeFiles
from reshard.core.plan.plan import changes_digest, file_digests
from reshard.core.records.logs import DIRECTORY, Record
from reshard.core.run.state.ledger import known_of_target, records_beside, refuse_foreign
from reshard.core.run.state.locks import refuse_link
from reshard.core.run.state.unchanged import are_of_others, is_as_planned
from reshard.core.runs import is_iteration
from reshard.core.storage.base import stem_of_unfinished, unfinished_stem
from reshard.core.storage.local import local_store
from reshard.core.storage.places import as_place, can
from reshard.core.storage.small import is_within, refuse_inputs
from reshard.core.storage.threads import map_ordered
from reshard.core.storage.urls.remote import REQUESTS
from reshard.errors import Option, TargetError, Text, names
from reshard.kits.files import check_name

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from reshard.core.plan.plan import Plan
    from reshard.core.records.logs import State
    from reshard.core.run.settings import RunOptions
    from reshard.core.target import Publish

T = TypeVar("T")


class Do(Enum):
    """The action for a file."""

    KEEP = "keep"  # an earlier run finished the same file
    RESUME = "resume"  # a run of the same plan and sources began it; ranges with correct checksums stay
    MAKE = "make"
    CHANGED = "changed"  # refuse: made or begun by another plan, or from other sources
    UNMANAGED = "unmanaged"  # refuse: not in the ledger


class Planned(NamedTuple):
    """A file that a run would write.

    Attributes:
        digest: a digest of everything that determines its contents.
        size: its size in bytes.
        is_link: it is a link.
        publish: when it gets its name: see `TargetFile`.
        is_encoded: it is compressed, and so cannot be compared with a source that may have changed.
    """

    digest: str
    size: int
    is_link: bool = False
    publish: Publish = "file"
    is_encoded: bool = False


class FileState(NamedTuple):
    """The record of a file, and its state in the target.

    Attributes:
        record: the record in the ledger.
        state: the state of the existing file; None if there is none.
        unfinished: the paths of its unfinished files, of any run.
    """

    record: Record = Record()
    state: State | None = None
    unfinished: Sequence[str] = ()


class Policy(NamedTuple):
    """Inputs of the decision that are the same for all files.

    Attributes:
        sources: a digest of the last change of the source files; empty if unknown.
        early: files get their names before that is recorded, as at URLs.
        overwrite: foreign files may be replaced.
        restart: do not reuse files of earlier runs.
    """

    sources: str = ""
    early: bool = False
    overwrite: bool = False
    restart: bool = False


class Fate(NamedTuple):
    """The decision for a file.

    Attributes:
        do: the action.
        ours: the state of the existing file if an earlier run made it, of this plan or another; else None.
        is_touched: the source files were changed, touched or copied since, without a change of size or time.
    """

    do: Do
    ours: State | None = None
    is_touched: bool = False


class Preflight(NamedTuple):
    """The decisions of a run for its target files.

    Attributes:
        fates: the decision for each file.
        resumable: number of files to be resumed that have recorded ranges.
    """

    fates: Mapping[str, Fate]
    resumable: int = 0


def fates(files: Mapping[str, Planned], states: Mapping[str, FileState], policy: Policy) -> dict[str, Fate]:
    """Decide what to do with each file."""
    decisions = {file: fate(planned, states.get(file, FileState()), policy) for file, planned in files.items()}
    is_complete = all(
        decision.do is Do.KEEP or files[file].publish == "pointer" for file, decision in decisions.items()
    )
    if not is_complete:  # an index marks a set as complete: withdraw it
        for file, decision in decisions.items():
            if decision.do is Do.KEEP and files[file].publish != "file":
                decisions[file] = decision._replace(do=Do.MAKE)
    return decisions


def fates_of(
    plan: Plan, root: str, files: Mapping[str, Planned], states: Mapping[str, FileState], policy: Policy
) -> dict[str, Fate]:
    """Decide what to do with each file of a plan, by contents where neither ledger nor time tells.

    Finished files of a source that was swapped since are of another run. A target that is one file has no ledger once
    it is finished: if it is as this plan writes it, it is kept.

    Raises:
        SourceError: a file cannot be read.
    """
    decisions = fates(files, states, policy)
    if plan.shape == "file" and not policy.restart:
        for number, path in enumerate(files):
            if decisions[path].do is Do.UNMANAGED and is_as_planned(plan, root, number):
                decisions[path] = Fate(Do.KEEP, states[path].state)
    kept = [number for number, file in enumerate(plan.files) if decisions[file.path].do is Do.KEEP]
    linked = plan.linked  # their sources' change times are not watched: a link changes them
    touched = [n for n in kept if decisions[plan.files[n].path].is_touched or plan.files[n].link in linked]
    if not touched or not are_of_others(plan, root, touched, plan.threads):
        return decisions
    others = {path: states[path] for path in (plan.files[number].path for number in touched)}
    others = {path: item._replace(record=replace(item.record, digest="other")) for path, item in others.items()}
    return fates(files, {**states, **others}, policy)


def fate(planned: Planned, existing: FileState, policy: Policy) -> Fate:
    """Decide what to do with one file.

    >>> ours = Record("9f", 4, ready=(4, 1))
    >>> [fate(Planned("9f", 4), FileState(ours, state), Policy()).do for state in ((4, 1), (4, 2))]
    [<Do.KEEP: 'keep'>, <Do.UNMANAGED: 'unmanaged'>]
    """
    record, state = existing.record, existing.state
    is_same = record.digest == planned.digest != ""
    is_touched = is_same and "" not in {policy.sources, record.sources} and policy.sources != record.sources
    is_ours = state is not None and state in {record.ready, record.replaces}
    ours = state if is_ours else None
    starts_again = record.may_be_lost or policy.restart or (is_touched and planned.is_encoded)
    if is_ours and is_same and state == record.ready and not starts_again:
        return Fate(Do.KEEP, ours, is_touched)
    may_replace = (
        planned.publish == "pointer"
        or is_ours
        or policy.overwrite
        or is_unnoted(planned, record, state, early=policy.early)
    )
    if state is not None and not may_replace:
        return Fate(Do.UNMANAGED)
    starts_over = policy.restart or (policy.overwrite and not is_same)
    if starts_over or is_touched or planned.publish == "pointer":  # otherwise a file might mix blocks of two sources
        return Fate(Do.MAKE, ours)
    if is_same:
        return Fate(Do.RESUME, ours)
    if is_ours or (record.digest and existing.unfinished):
        return Fate(Do.CHANGED, ours)
    return Fate(Do.MAKE, ours)


def is_unnoted(planned: Planned, record: Record, state: State | None, *, early: bool) -> bool:
    """Return whether a run of the same plan may have published a file unrecorded."""
    if state is None or record.digest != planned.digest or record.ready is not None:
        return False
    return planned.is_link or (early and state != record.replaces and state[0] == record.size)


def files_with(fates: Mapping[str, Fate], *actions: Do) -> list[str]:
    """Return the files that have one of the given actions.

    >>> files_with({"a": Fate(Do.KEEP), "b": Fate(Do.MAKE)}, Do.MAKE)
    ['b']
    """
    return [file for file, decision in fates.items() if decision.do in actions]


def refuse(fates: Mapping[str, Fate], root: str, *, has_key: bool = False) -> None:
    """Refuse existing files that a run must not replace.

    Raises:
        TargetError: there are such files.
    """
    if changed := files_with(fates, Do.CHANGED):
        key = ", with another key" if has_key else ""
        raise TargetError(
            f"{root} holds {names(changed, most=3)} of a different run",
            code="other-run",
            facts=[f"made by another plan{key}, or the sources changed since"],
            hint=Text("to start over, pass ", Option("restart"), "; or choose another target"),
        )
    if foreign := files_with(fates, Do.UNMANAGED):
        them = "it" if len(foreign) == 1 else "them"
        raise TargetError(
            f"{root} already has {names(foreign, most=3)}",
            code="already-exists",
            hint=Text(f"to replace {them}, pass ", Option("overwrite"), "; or choose another target"),
        )


def check_target(plan: Plan, root: str, older: Collection[str] = ()) -> None:
    """Reject a target that no option of a run makes valid; change nothing.

    Args:
        plan: the plan to be run.
        root: a URL, or a local path without links in it.
        older: files of earlier runs that the run removes (`beside.older_files`), by their paths below the root.

    Raises:
        TargetError: the target is inside its source or contains it; it is a file; a path of a target file is a
            directory, a source file, or a link that leads out; it has other files, and the files must be alone; or the
            files are a unified set, and it has files of another set.
        SourceError: the storage of the target cannot be reached.
        UsageError: the target has the name of a store, but another format.
    """
    if plan.shape != "store" and any(
        each.extension and root.endswith(f".{each.extension}") for each in targets() if not each.one_file
    ):
        check_name(root, plan.format)
    below = root.rstrip("/") + "/"
    if any(file.publish == "pointer" for file in plan.files) and is_iteration(os.path.basename(root)):
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
    read = [file.path for file in plan.source.files if file.inputs is None]
    sources = {str(as_place(path).real()) for path in read}
    indexes = {os.path.dirname(below + file.path) for file in plan.files if file.publish == "index"}
    if any(path.startswith(f"{directory}/") for directory in indexes for path in sources):
        raise TargetError(
            f"{root} holds the source",
            code="overlaps",
            facts=["the index of the target would hide it"],
            hint="choose another target",
        )
    # A link made by an earlier run already is one of the source files; nothing is written into it.
    written = [below + file.path for file in plan.files if file.link not in linked]
    refuse_inputs(written, read, "one of the source files", "choose another target directory")
    for file in plan.files:
        path = below + file.path
        resolved = str(as_place(path).real())
        if not resolved.startswith(below):
            raise TargetError(
                f"{path} leads out of the target directory, to {resolved}",
                code="outside-directory",
                hint="choose another target, or move the link away",
            )
    if can(root).positioned:  # URLs have no directories
        _check_kinds(plan, root)
    if plan.shape == "store":
        _check_exclusive(plan, root, older)
    for directory in () if plan.shape == "store" else sorted(indexes):
        _check_one_set(plan, root, directory, older)


def _check_apart(plan: Plan, root: str) -> None:
    """Reject a target inside its source, and a source inside its target.

    The two may be equal. In a run directory only the iteration that is written is the target. If the source files were
    named one by one, or the source is one file, their directory is not the source. The same holds for a target that
    is one file.
    """
    iterations = {os.path.dirname(file.path) for file in plan.files if file.publish != "pointer"}
    targets = (
        [f"{root}/{path}" for path in iterations] if any(file.publish == "pointer" for file in plan.files) else [root]
    )
    for source, target in product((each.opened for each in plan.source.sources), targets):
        origin = as_place(source.root).absolute()
        if source.opening.by_file or origin in {as_place(file.path) for file in source.files[:1]} or origin.is_file():
            continue
        if is_within(target, source.root) and not is_within(source.root, target):
            raise TargetError(
                f"{target} is inside its source, {source.root}", code="overlaps", hint="choose a target outside it"
            )
        if is_within(source.root, target) and not (plan.shape == "file" or is_within(target, source.root)):
            raise TargetError(
                f"{target} has its source inside, {source.root}",
                code="overlaps",
                hint="choose a directory of its own for the target",
            )


def _check_kinds(plan: Plan, root: str) -> None:
    """Reject files at paths of directories, and directories at paths of files."""
    existing = root
    while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    for directory in (existing, *sorted({os.path.dirname(f"{root}/{file.path}") for file in plan.files})):
        if os.path.lexists(directory) and not os.path.isdir(directory):
            raise TargetError(
                f"{directory} is not a directory", code="not-a-directory", hint="choose another target, or move it away"
            )
    for file in plan.files:
        if os.path.isdir(f"{root}/{file.path}"):
            raise TargetError(
                f"{root}/{file.path} is a directory, and a file of the target goes there",
                code="is-directory",
                hint="choose another target, or move it away",
            )


def _check_exclusive(plan: Plan, root: str, older: Collection[str]) -> None:
    """Reject a directory with other files, which readers would take as parts."""
    planned = {path for file in plan.files for path in (file.path, unfinished_stem(file.path))}.union(older)
    if not can(root).positioned:
        paths = _files_at(root)
    else:
        walk = os.walk(root)
        paths = [os.path.relpath(os.path.join(parent, name), root) for parent, _, files in walk for name in files]
    foreign = [
        path
        for path in paths
        if planned.isdisjoint((path, stem_of_unfinished(path))) and not path.startswith(f"{DIRECTORY}/")
    ]
    if foreign:
        raise TargetError(
            f"{root} has other files too: {names(sorted(foreign), most=3)}",
            code="other-files",
            hint="choose another directory, or move them away",
        )


def _check_one_set(plan: Plan, root: str, directory: str, older: Collection[str]) -> None:
    """Reject a directory with files of another set: many readers glob."""
    planned = {f"{root}/{path}" for path in (*(file.path for file in plan.files), *older)}
    if plan.request and isinstance(plan.request.files, SomeFiles):  # files that other processes write
        planned.update(f"{root}/{path}" for path in plan.request.files.every.paths)
    entries: list[str] = []
    with suppress(OSError):  # it does not exist yet, or is writable but not listable
        entries = os.listdir(directory) if can(root).positioned else _files_at(directory)
    foreign = sorted(name for name in entries if is_of_several(name) and f"{directory}/{name}" not in planned)
    if foreign:
        raise TargetError(
            f"{directory} has {names(foreign, most=3)} of another set",
            code="other-set",
            hint="choose another directory, or move the other set away",
        )


def _files_at(url: str) -> list[str]:
    """Return the paths of all files below a URL, bypassing cached listings."""
    directory = as_place(url)
    directory.refresh()
    return [str(path.relative_to(str(directory))) for path in directory.files()]


def planned_files(plan: Plan, digests: Sequence[str]) -> dict[str, Planned]:
    """Return the files that a plan writes, by path."""
    return {
        file.path: Planned(made_of, plan.size_of(file), file.link is not None, file.publish, bool(plan.encoded(file)))
        for file, made_of in zip(plan.files, digests, strict=True)
    }


def seen_files(plan: Plan, root: str, records: Mapping[str, Record], needed: Collection[str]) -> dict[str, FileState]:
    """Return records and states; at URLs, full states only of `needed` files."""
    paths = [file.path for file in plan.files]
    states = states_of(root, paths, needed)
    nothing, begun = Record(), dict[str, list[str]]()
    if can(root).positioned:
        begun = local_store().all_unfinished([f"{root}/{path}" for path in paths])
    return {
        path: FileState(records.get(path, nothing), states.get(path), begun.get(f"{root}/{path}", ())) for path in paths
    }


def states_of(root: str, files: Sequence[str], needed: Collection[str]) -> dict[str, State]:
    """Return the states of the files that exist.

    At URLs one listing tells which files exist; the full state is requested one by one, of `needed` files only. In some
    file systems, a listing and a request for one file give different states.

    Raises:
        SourceError: the storage cannot be reached.
    """
    if can(root).positioned:
        local_states = {}
        for file in files:
            with suppress(OSError):
                status = os.lstat(f"{root}/{file}")
                local_states[file] = status.st_size, status.st_mtime_ns
        return local_states
    directory = as_place(root)
    directory.refresh()
    urls = set(map(str, directory.files()))
    present = [file for file in files if f"{root}/{file}" in urls]
    requested = [file for file in present if file in needed]
    states = map_ordered(lambda file: (directory / file).status()[:2], requested, REQUESTS)
    return dict.fromkeys(present, (-1, 0)) | dict(zip(requested, states, strict=True))


def preflight(plan: Plan, root: str, options: RunOptions) -> Preflight:
    """Return what a run would do with each target file; nothing is locked or changed.

    Only a run itself checks locks of other runs, and space on the disk.

    Args:
        plan: a plan that is bound to the target.
        root: the target, a URL or a local path without links in it.
        options: how the plan would be carried out.

    Raises:
        TargetError: the ledger directory is a link or has other files.
        SourceError: the storage of the target cannot be reached.
    """
    refuse_link(root)
    paths = [file.path for file in plan.files]
    records = known_of_target(root, paths).records
    if plan.shape == "store":
        refuse_foreign(f"{root}.reshard")
        records = records_beside(root, paths) | records
    existing = seen_files(plan, root, records, records)
    if not any(item.state is not None or item.record.digest for item in existing.values()):
        return Preflight({file.path: Fate(Do.MAKE) for file in plan.files})  # digests of a large plan are slow
    policy = Policy(changes_digest(plan), not can(root).positioned, options.overwrite, options.restart)
    decisions = fates_of(plan, root, planned_files(plan, file_digests(plan)), existing, policy)
    resumed = (existing[file].record for file in files_with(decisions, Do.RESUME))
    return Preflight(decisions, sum(len(record.wrote) > 0 or bool(record.upload) for record in resumed))
