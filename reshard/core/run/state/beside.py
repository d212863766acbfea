"""Handle other files in a target directory: of earlier runs, and foreign ones.

*Older* files are files that a run does not write, and that still have the size and time in the ledger. A run with
`overwrite` or `restart` removes them once all its files are complete, just before they get their names: until then the
old target is whole, and a run that is stopped and started again removes them at its end. Files are kept if they belong
to the same target (other ranks, stages or parts), to another step or iteration of a training, or to the source.

`neighbours` are files that readers would find together with the target, or in its place: another checkpoint is refused.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import PurePath
from typing import TYPE_CHECKING, NamedTuple

from reshard.core.format import is_of_several, marked, parts_of_several
from reshard.core.listing import RANK_PATTERN, Listing
from reshard.core.model.digests import digest
from reshard.core.model.entries import SomeFiles
from reshard.core.options import Options
from reshard.core.plan.inputs import ledger_provenance
from reshard.core.rank_files import Step, every_file, families_of, is_checkpoint_name, stage_mark
from reshard.core.records.logs import known
from reshard.core.records.made import provenance_file
from reshard.core.records.schema import is_inner_path
from reshard.core.run.state.ledger import known_of_target
from reshard.core.run.state.locks import refuse_link
from reshard.core.run.state.preflight import states_of
from reshard.core.run.state.uploads import end_upload
from reshard.core.runs import is_iteration
from reshard.core.storage.base import unfinished_path
from reshard.core.storage.places import as_place, can, store_at
from reshard.core.storage.small import is_within
from reshard.core.storage.urls.clients import in_s3
from reshard.errors import Option, SourceError, TargetError, Text, names
from reshard.kits.indexes import SET_INDEX, set_indexes
from reshard.strategy.strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from reshard.core.plan.plan import Plan
    from reshard.core.records.logs import Record, State
    from reshard.core.storage.places import Place


class Older(NamedTuple):
    """A file of an earlier run, maybe unfinished.

    Attributes:
        file: its target path.
        state: its state; None if only its upload exists.
        upload: the upload that makes it, as in the ledger; "" if there is none.
    """

    file: str
    state: State | None
    upload: str = ""


def older_files(plan: Plan, root: str) -> dict[str, Older]:
    """Return the files of earlier runs to be removed when starting over, by path.

    Args:
        plan: the plan of the run.
        root: the target, a URL or a local path without links in it.

    Raises:
        TargetError: the ledger is behind a link.
        SourceError: the storage of the target cannot be reached.
    """
    refuse_link(root)
    source = plan.source.opened
    if plan.shape == "file" or is_within(root, source.root):
        return {}
    records = known_of_target(root, with_ranges=False).records
    if plan.shape == "store" and not as_place(f"{root}.reshard").is_symlink():
        records = known(root, directory=f"{root}.reshard", with_ranges=False).records | records
    written = {file.path for file in plan.files}
    read = {str(as_place(file.path).real()) for file in source.files}
    of_target = _Retention(plan, digest(provenance_file(ledger_provenance(plan))))
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
        elif states.get(file) is None and record.upload and in_s3(root):
            older[file] = Older(file, None, record.upload)
    if can(root).positioned:
        unfinished = {unfinished_path(file, records[file].digest): file for file in files}
        states_of_unfinished = states_of(root, list(unfinished), ())
        older |= {path: Older(unfinished[path], state) for path, state in states_of_unfinished.items()}
    return older


def remove_older(root: str, older: Mapping[str, Older], free: Collection[str]) -> list[str]:
    """Remove files of earlier runs whose state has not changed, and return their paths; end their uploads.

    Args:
        root: the target.
        older: the result of `older_files`.
        free: target files that no other run writes.

    Raises:
        TargetError: a file cannot be removed.
        SourceError: the storage of the target cannot be reached.
    """
    for path, item in older.items():
        if item.upload and item.file in free and _is_below(root, path):
            end_upload(f"{root}/{path}", item.upload)
    paths = [path for path, item in older.items() if item.state and item.file in free and _is_below(root, path)]
    states = states_of(root, paths, paths)
    paths = sorted((path for path in paths if states.get(path) == older[path].state), key=_indexes_first)
    for path in paths:
        store_at(root).remove(f"{root}/{path}")
        directory = os.path.dirname(path)
        while directory and can(root).positioned:
            with suppress(OSError):  # it has other files
                os.rmdir(f"{root}/{directory}")
            directory = os.path.dirname(directory)
    return paths


def refuse_other_ranks(plan: Plan, root: str, older: Collection[str]) -> None:
    """Reject a target with foreign files of other ranks, for a run that starts over.

    Readers would take them for parts of the target.

    Raises:
        TargetError: the target has files of other ranks that are not in `older`.
    """
    with suppress(SourceError, OSError):  # a directory that cannot be listed does not keep a run from writing
        if foreign := [path for path in _other_ranks(plan, as_place(root)) if path not in older]:
            raise TargetError(
                f"{root} has {names(foreign, most=3)} too, of other ranks",
                code="other-ranks",
                facts=[f"no ledger there says that this program wrote {'it' if len(foreign) == 1 else 'them'}"],
                hint="choose another directory, or move the old files away",
            )


def neighbours(plan: Plan, target: Place, older: Collection[str] = ()) -> tuple[str, ...]:
    """Return warnings about other files in a target directory, which need not exist.

    Args:
        plan: the plan to be run.
        target: the target directory.
        older: paths of files that the run removes.

    Raises:
        TargetError: the directory has another checkpoint: files of another format or checkpoint, a unified set or a
            zarr store. Readers would read that, or both. If the target is inside the source, this is a warning.
    """
    has_pointer = any(file.publish == "pointer" for file in plan.files)
    if plan.shape == "store" or (has_pointer and is_iteration(target.name)):  # `check_target` rejects any other file
        return ()
    ranks, foreign, hiding = [], [], []
    with suppress(SourceError, OSError):  # a directory that cannot be listed does not keep a run from writing
        listing = target.names()
        if not listing:
            return ()
        own_pattern, has_index = _own(plan), any(file.publish != "file" for file in plan.files)
        hiding = [name for name in set_indexes(listing) if not has_index and name not in older]
        hiding += [other.called or other.title] if (other := marked(listing)) else []
        if not has_pointer:
            hiding += sorted(filter(is_iteration, listing))
        ranks = [path for path in _other_ranks(plan, target) if path not in older]
        has_step = Step.of([target / plan.files[0].path]) is not None
        foreign = [
            path
            for path in _checkpoint_files(target)
            if path not in ranks and path not in older and not own_pattern.fullmatch(path)
            if not (has_index and is_of_several(path))  # rejected by `check_target`
            if not (has_step and Step.of([target / path]))  # of the same training
        ]
    if hiding or foreign:
        message = f"{target} has {names([*hiding, *foreign], most=3)}, of another checkpoint"
        if not is_within(str(target), plan.source.opened.root):
            raise TargetError(
                message, code="other-checkpoint",
                facts=["readers would take that, or both"],
                hint=Text("choose another directory; ", Option("overwrite"), " replaces what this program wrote"),
            )  # fmt: skip
        return (f"{message}; readers may take either or both",)
    return (f"{target} has {names(ranks, most=3)}, of ranks that are not this target's",) if ranks else ()


def _checkpoint_files(target: Place) -> list[str]:
    """Return relative paths of checkpoint files in a directory and its rank directories."""
    places = {path.relative_to(target).as_posix(): path for path in target.files(depth=2)}  # type: ignore[arg-type]  # of one kind
    by_name = [p for p, path in places.items() if re.fullmatch(r"(rank_\d+/)?[^/]+", p) and is_checkpoint_name(path)]
    direct = sorted(name for name in places if "/" not in name)
    here = Listing(target, direct)
    by_directory = [
        each.shown_by(here) for each in parts_of_several() if "alone" not in each.when or "foreign" in each.when
    ]
    return sorted({*by_name, *filter(None, by_directory)})


def _path_of_rank(plan: Plan) -> str:
    """Return the path of each rank's file in a target, with `{rank}` for its number; "" if it is not known."""
    way = plan.request.files if plan.request else None
    path = way.path_of_rank(PurePath(plan.files[0].path).suffix) if isinstance(way, Options) else ""
    return path if "{rank}" in path else ""


def _own(plan: Plan) -> re.Pattern[str]:
    """Return a pattern of the files of a target, including other ranks and stages."""
    patterns = [re.escape(file.path) for file in plan.files]
    if path := _path_of_rank(plan):
        mark = stage_mark(path)
        of_every_rank = re.escape(path).replace(re.escape("{rank}"), r"\d+")
        patterns.append(r"_part\d+".join(of_every_rank.rsplit(mark, 1)) if mark else of_every_rank)
    return re.compile("|".join(patterns))


def _other_ranks(plan: Plan, target: Place) -> list[str]:
    """Return files of ranks outside the target that match the pattern of its files.

    They are from an older run or another program; files of the source are excluded. If the target is one stage of a
    pipeline, the ranks of other stages are unknown, and there are no such files.
    """
    strategy = plan.request and plan.request.target
    pattern, ranks = RANK_PATTERN, {*plan.ranks}
    if plan.request is not None:
        pattern, ranks = _path_of_rank(plan), {*(strategy.ranks if strategy else plan.ranks)}
    if not pattern or (isinstance(strategy, Strategy) and strategy.others):
        return []
    of_plan = _families(plan)
    read = {file.path for file in plan.source.files}
    return [
        str(path.relative_to(target))  # type: ignore[arg-type]  # of one kind
        for rank, paths in every_file(target, pattern).items()
        for path in paths
        if rank not in ranks and f"{target.absolute()}/{path.relative_to(target)}" not in read  # type: ignore[arg-type]  # of one kind
        if not of_plan.isdisjoint(families_of(path, rank))
    ]


class _Retention:
    """Decides which files of earlier runs are kept, given the target of a plan."""

    def __init__(self, plan: Plan, provenance: str) -> None:
        self._provenance = provenance
        self._steps = _steps(file.path for file in plan.files)
        self._iterations = {os.path.dirname(file.path) for file in plan.files if file.publish != "pointer"}
        self._is_of_run = any(file.publish == "pointer" for file in plan.files)
        way, strategy = (plan.request.files, plan.request.target) if plan.request else (None, None)
        self._parts = {*way.every.paths, *(way.every.index or ())[:1]} if isinstance(way, SomeFiles) else set()
        self._families = None if plan.request else _families(plan)
        path = _path_of_rank(plan)
        self._own, self._is_ranked, self._mark = _own(plan), bool(path), stage_mark(path)
        self._ranks = strategy.ranks if strategy else plan.ranks
        self._others = isinstance(strategy, Strategy) and strategy.others

    def keeps(self, file: str, record: Record) -> bool:
        """Return whether a file of an earlier run stays."""
        path = PurePath(file)
        if self._is_of_run:
            return os.path.dirname(file) not in self._iterations
        is_step = not self._steps.issuperset(_steps([file]))  # another checkpoint of a training
        if is_step or file in self._parts or any(map(is_iteration, path.parts[:-1])):
            return True
        if self._families is not None:  # files that are converted one by one form a checkpoint only by rank directories
            return record.rank is None or self._families.isdisjoint(families_of(as_place(file), record.rank))
        if not (self._is_ranked and self._own.fullmatch(file)):
            return False
        is_stage = self._mark and not path.stem.endswith(self._mark)  # another stage of the source
        return bool(is_stage) or (record.made == self._provenance if record.rank in self._ranks else self._others)


def _families(plan: Plan) -> set[object]:
    """Return the families of target files, by which readers find checkpoints."""
    return {family for file in plan.files for family in families_of(as_place(file.path), file.rank)}


def _steps(paths: Iterable[str]) -> set[str]:
    """Return the training steps in the names of files."""
    return {step.name for path in paths if (step := Step.of([as_place(path)]))}


def _is_below(root: str, path: str) -> bool:
    """Return whether the path of a file below a target has no links."""
    directory = os.path.dirname(f"{root}/{path}")
    return not can(root).positioned or os.path.realpath(directory) == directory


def _indexes_first(path: str) -> bool:
    """Return a sort key that puts indexes first: an index marks a set as complete."""
    name = os.path.basename(path)
    return not (SET_INDEX.fullmatch(name) or any(name in each.marks for each in parts_of_several()))
