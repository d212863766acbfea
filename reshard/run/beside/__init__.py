"""What else is in a target directory: files of earlier runs, which a run that starts over removes, and foreign ones.

*Older* files are those that the ledger there notes, with the size and the time that they still have, and that a run
does not write. A run with `overwrite` or `restart` removes them when all that it writes is complete, just before that
gets its names: until then the old target is whole, and a run that is stopped and typed again removes them at its end.
They stay if they are of the same target (other ranks, stages or parts), of another step or iteration of a training, or
of the source.

`neighbours` are files that readers would find with what is written, or in its place: another checkpoint is refused.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import PurePath
from typing import TYPE_CHECKING, NamedTuple

from reshard.errors import Option, SourceError, TargetError, Text, names
from reshard.formats.directories import DIRECTORY_FORMATS, RUNS, SAVED_PARTS, is_iteration, is_of_a_set
from reshard.formats.entries import NamedFile, RankFiles, SomeFiles
from reshard.formats.rank_dirs import RANK_PATTERN, Step, every_file, families_of, is_checkpoint_name
from reshard.formats.sets import DCP_INDEX, SET_INDEXES
from reshard.formats.zarr_files import is_store
from reshard.run.locks import refuse_link
from reshard.run.preflight import states_of
from reshard.source.records import known
from reshard.storage.base import unfinished_path
from reshard.storage.places import as_place, can, store_at
from reshard.storage.small import is_within
from reshard.strategy.schema import is_inner_path

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from reshard.plan.plan import Plan
    from reshard.source.records import Record, State
    from reshard.storage.places import Place


class Older(NamedTuple):
    """A file of an earlier run: the target file that it is, or is the unfinished file of; and its state."""

    file: str
    state: State


def older_files(plan: Plan, root: str, made: str) -> dict[str, Older]:
    """Return the files of earlier runs that a run which starts over removes, by their paths below the target.

    Args:
        plan: what the run writes.
        root: the target, a URL or a local path without links in it.
        made: the digest of what the run makes its files of.

    Raises:
        TargetError: the ledger is behind a link.
        SourceError: the target's storage cannot be reached.
    """
    refuse_link(root)
    source = plan.source.opened
    if plan.alone or is_within(root, source.root):
        return {}
    records = known(root, with_ranges=False).records
    if plan.exclusive and not as_place(f"{root}.reshard").is_symlink():
        records = known(root, directory=f"{root}.reshard", with_ranges=False).records | records
    written = {file.path for file in plan.files}
    read = {str(as_place(file.path).real()) for file in source.files}
    of_target = _OfTarget(plan, made)
    files = [
        file
        for file, record in records.items()
        if file not in written and is_inner_path(file) and not of_target.keeps(file, record)
        if _is_below(root, file) and f"{root}/{file}" not in read
    ]
    states = states_of(root, files, files)
    older = {}
    for file in files:
        record = records[file]
        if states.get(file) is not None and states[file] in {record.ready, record.replaces}:
            older[file] = Older(file, states[file])
    if can(root).positioned:
        unfinished = {unfinished_path(file, records[file].digest): file for file in files}
        found = states_of(root, list(unfinished), ())
        older |= {path: Older(unfinished[path], state) for path, state in found.items()}
    return older


def remove_older(root: str, older: Mapping[str, Older], free: Collection[str]) -> list[str]:
    """Remove files of earlier runs that still have the state that they had; return their paths.

    Args:
        root: the target.
        older: what `older_files` found.
        free: target files that no other run writes.

    Raises:
        TargetError: one cannot be removed.
        SourceError: the target's storage cannot be reached.
    """
    paths = [path for path, one in older.items() if one.file in free and _is_below(root, path)]
    states = states_of(root, paths, paths)
    paths = sorted((path for path in paths if states.get(path) == older[path].state), key=_indexes_first)
    for path in paths:
        store_at(root).remove(f"{root}/{path}")
        directory = os.path.dirname(path)
        while directory and can(root).positioned:
            with suppress(OSError):  # it has something else
                os.rmdir(f"{root}/{directory}")
            directory = os.path.dirname(directory)
    return paths


def refuse_other_ranks(plan: Plan, root: str, older: Collection[str]) -> None:
    """Refuse a target that has files of other ranks which nobody is known to have written, if a run starts over.

    Readers would take them for a part of what is written.

    Raises:
        TargetError: it has.
    """
    with suppress(SourceError, OSError):  # a directory that cannot be listed does not keep a run from writing
        if others := [path for path in _other_ranks(plan, as_place(root)) if path not in older]:
            raise TargetError(
                f"{root} has {names(others, most=3)} too, of other ranks",
                code="other-ranks",
                facts=[f"no ledger there says that this program wrote {'it' if len(others) == 1 else 'them'}"],
                hint="remove the old files, or choose another directory",
            )


def neighbours(plan: Plan, target: Place, older: Collection[str] = ()) -> tuple[str, ...]:
    """Return warnings about what else is in a target directory, which may not be there yet.

    Args:
        plan: what is to be written.
        target: where.
        older: paths of files that the run removes.

    Raises:
        TargetError: it has another checkpoint: files of another format or checkpoint, a unified set or a zarr store.
            Readers would take that, or both. If the target is where the source is, this is a warning.
    """
    has_pointer = any(file.pointer for file in plan.files)
    if plan.exclusive or (has_pointer and is_iteration(target.name)):  # `check_target` refuses any
        return ()
    ranks, others, hiding = [], [], []
    with suppress(SourceError, OSError):  # a directory that cannot be listed does not keep a run from writing
        hiding = [] if any(file.last for file in plan.files) else target.existing(SET_INDEXES)
        hiding = [name for name in hiding if name not in older]
        hiding += ["a zarr store"] if is_store(target) else []
        if not has_pointer:
            hiding += sorted(filter(is_iteration, target.names()))
        ranks = [place for place in _other_ranks(plan, target) if place not in older]
        own, has_index = _own(plan), any(file.last for file in plan.files)
        has_step = Step.of([target / plan.files[0].path]) is not None
        others = [
            place
            for place in _checkpoint_files(target)
            if place not in ranks and place not in older and not own.fullmatch(place)
            if not (has_index and is_of_a_set(place))  # which `check_target` refuses
            if not (has_step and Step.of([target / place]))  # of the same training
        ]
    if hiding or others:
        found = f"{target} has {names([*hiding, *others], most=3)}, of another checkpoint"
        if not is_within(str(target), plan.source.opened.root):
            raise TargetError(
                found, code="other-checkpoint",
                facts=["readers would take that, or both"],
                hint=Text("choose another directory; ", Option("overwrite"), " replaces what this program wrote"),
            )  # fmt: skip
        return (f"{found}; readers may take either or both",)
    return (f"{target} has {names(ranks, most=3)}, of ranks that are not this target's",) if ranks else ()


def _checkpoint_files(target: Place) -> list[str]:
    """Return the files of checkpoints in a directory, and in rank directories there, by their places."""
    places = {path.relative_to(target).as_posix(): path for path in target.files(depth=2)}  # type: ignore[arg-type]  # of one kind
    found = [p for p, path in places.items() if re.fullmatch(r"(rank_\d+/)?[^/]+", p) and is_checkpoint_name(path)]
    direct = sorted(place for place in places if "/" not in place)
    shown = [known.shown_by(target, direct) for known in DIRECTORY_FORMATS if known not in (RUNS, *SAVED_PARTS)]
    return sorted({*found, *filter(None, shown)})


def _own(plan: Plan) -> re.Pattern[str]:
    """Return what matches the files of a target: those that a plan writes, and those of other ranks and stages."""
    patterns = [re.escape(file.path) for file in plan.files]
    way = plan.request.files if plan.request else None
    if isinstance(way, RankFiles):
        extension = PurePath(plan.files[0].path).suffix
        stage = r"_part\d+" if way.suffix else ""
        patterns.append(rf"rank_(\d+)/{re.escape(way.prefix)}\1{stage}{re.escape(extension)}")
    elif isinstance(way, NamedFile):
        patterns.append(re.escape(way.name).replace(re.escape("{rank}"), r"\d+"))
    return re.compile("|".join(patterns))


def _other_ranks(plan: Plan, target: Place) -> list[str]:
    """Return the files of ranks that the target does not have, and which are found like its own.

    They are those of an older run, or of another program; files of the source are not. Where the target is one stage of
    a pipeline nobody says which ranks others have.
    """
    strategy = plan.request and plan.request.target
    if plan.request is None:
        pattern, ranks = RANK_PATTERN, {*plan.ranks}
    elif isinstance(plan.request.files, RankFiles) and not (strategy and strategy.others):
        way, ranks = plan.request.files, {*(strategy.ranks if strategy else plan.ranks)}
        pattern = RANK_PATTERN.replace("*", f"{way.prefix}{{rank}}{way.suffix}{PurePath(plan.files[0].path).suffix}")
    else:
        return []
    of_plan = _families(plan)
    read = {file.path for file in plan.source.files}
    return [
        str(path.relative_to(target))  # type: ignore[arg-type]  # of one kind
        for rank, paths in every_file(target, pattern).items()
        for path in paths
        if rank not in ranks and str(target.absolute() / path.relative_to(target).as_posix()) not in read  # type: ignore[arg-type]  # likewise
        if not of_plan.isdisjoint(families_of(path, rank))
    ]


class _OfTarget:
    """Tells which files of earlier runs are of the target of a plan, or of no concern to it."""

    def __init__(self, plan: Plan, made: str) -> None:
        self._made = made
        self._steps = _steps(file.path for file in plan.files)
        self._iterations = {os.path.dirname(file.path) for file in plan.files if not file.pointer}
        self._is_of_run = any(file.pointer for file in plan.files)
        way, strategy = (plan.request.files, plan.request.target) if plan.request else (None, None)
        self._parts = {*way.every.paths, *(way.every.index or ())[:1]} if isinstance(way, SomeFiles) else set()
        self._families = None if plan.request else _families(plan)
        self._own, self._suffix = _own(plan), way.suffix if isinstance(way, RankFiles) else ""
        self._is_ranked = isinstance(way, RankFiles) or (isinstance(way, NamedFile) and "{rank}" in way.name)
        self._ranks, self._others = strategy.ranks if strategy else plan.ranks, bool(strategy and strategy.others)

    def keeps(self, file: str, record: Record) -> bool:
        """Return whether a file of an earlier run stays."""
        place = PurePath(file)
        if self._is_of_run:
            return os.path.dirname(file) not in self._iterations
        is_step = not self._steps.issuperset(_steps([file]))  # another checkpoint of a training
        if is_step or file in self._parts or any(map(is_iteration, place.parts[:-1])):
            return True
        if self._families is not None:  # what is converted file by file is a checkpoint only by its rank directories
            return record.rank is None or self._families.isdisjoint(families_of(as_place(file), record.rank))
        if not (self._is_ranked and self._own.fullmatch(file)):
            return False
        is_stage = self._suffix and not place.stem.endswith(self._suffix)  # another stage of the source
        return bool(is_stage) or (record.made == self._made if record.rank in self._ranks else self._others)


def _families(plan: Plan) -> set[object]:
    """Return the names under which readers take the files of ranks for one checkpoint."""
    return {family for file in plan.files for family in families_of(as_place(file.path), file.rank)}


def _steps(paths: Iterable[str]) -> set[str]:
    """Return the steps of a training that files are of, by their names."""
    return {step.name for path in paths if (step := Step.of([as_place(path)]))}


def _is_below(root: str, path: str) -> bool:
    """Return whether no link leads to a path below a target."""
    directory = os.path.dirname(f"{root}/{path}")
    return not can(root).positioned or os.path.realpath(directory) == directory


def _indexes_first(path: str) -> bool:
    """Return the place of a file among those that are removed: a set with an index is complete."""
    return os.path.basename(path) not in {*SET_INDEXES, DCP_INDEX}
