"""What else is in a target directory: files that readers would find with what is written there, or in its place."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import PurePath
from typing import TYPE_CHECKING

from reshard.errors import SourceError, names
from reshard.formats.directories import DIRECTORY_FORMATS, RUNS
from reshard.formats.entries import NamedFile, RankFiles
from reshard.formats.rank_dirs import RANK_PATTERN, every_file, is_checkpoint_name
from reshard.formats.sets import SET_INDEXES
from reshard.formats.zarr_files import is_store

if TYPE_CHECKING:
    from reshard.plan.plan import Plan
    from reshard.storage.places import Place


def neighbours(plan: Plan, target: Place) -> tuple[str, ...]:
    """Return warnings about what else is in a target directory, which may not be there yet.

    It is what an older run left there, or another program: files of other ranks, of another format or checkpoint, a
    unified set or a zarr store, whose readers do not look at rank files at all.
    """
    if plan.exclusive:  # `check_target` refuses any
        return ()
    with suppress(SourceError, OSError):  # a directory that cannot be listed does not keep a run from writing
        hiding = [] if any(file.last for file in plan.files) else target.existing(SET_INDEXES)
        hiding += ["a zarr store"] if is_store(target) else []
        ranks = _other_ranks(plan, target)
        own = _own(plan)
        others = [place for place in _checkpoint_files(target) if place not in ranks and not own.fullmatch(place)]
        said = (
            (hiding, f"too, and readers take that for the checkpoint of {target}; choose another directory"),
            (others, "too, of another checkpoint, and readers may take either or both; choose another directory"),
            (ranks, "too, of ranks that are not this target's; remove what is old"),
        )
        return tuple(f"{target} has {names(some, most=3)} {words}" for some, words in said if some)
    return ()


def _checkpoint_files(target: Place) -> list[str]:
    """Return the files of checkpoints in a directory, and in rank directories there, by their places."""
    places = {path.relative_to(target).as_posix(): path for path in target.files(depth=2)}  # type: ignore[arg-type]  # of one kind
    found = [p for p, path in places.items() if re.fullmatch(r"(rank_\d+/)?[^/]+", p) and is_checkpoint_name(path)]
    direct = sorted(place for place in places if "/" not in place)
    shown = [known.shown_by(target, direct) for known in DIRECTORY_FORMATS if known is not RUNS]
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

    They are those of an older run. Where the target is one stage of a pipeline nobody says which ranks others have.
    """
    strategy = plan.request and plan.request.target
    if plan.request is None or not isinstance(plan.request.files, RankFiles) or (strategy and strategy.others):
        return []
    way, ranks = plan.request.files, strategy.ranks if strategy else plan.ranks
    pattern = RANK_PATTERN.replace("*", f"{way.prefix}{{rank}}{way.suffix}{PurePath(plan.files[0].path).suffix}")
    files = [path for rank, paths in every_file(target, pattern).items() if rank not in ranks for path in paths]
    return [path.relative_to(target).as_posix() for path in files]  # type: ignore[arg-type]  # of one kind
