"""What a command wrote: with which options it is found again, and what else lies there and is found with it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import PurePath
from typing import TYPE_CHECKING

from reshard.cli_words import option
from reshard.errors import SourceError, names
from reshard.formats.ckpt import NAME as CKPT
from reshard.rank_files import RANK_PATTERN, every_file, rank_files
from reshard.remote import RemotePath, forget_listings
from reshard.target_files import RankFiles

if TYPE_CHECKING:
    from reshard.plan import Plan
    from reshard.rank_files import AnyPath


def found_by(plan: Plan, target: AnyPath) -> list[str]:
    """Return the options with which what was written is found, as those of a source."""
    if plan.request is None or any(file.last for file in plan.files):
        return []
    some = plan.request.ranks is not None or plan.source.part is not None
    partial = ["--partial"] if some and plan.request.target is not None else []
    way = plan.request.files
    pattern = RANK_PATTERN.replace("*", f"{way.prefix}{{rank}}*") if isinstance(way, RankFiles) else None
    return [*partial, *told_apart(plan, target, pattern)]


def told_apart(plan: Plan, target: AnyPath, pattern: str | None = None) -> list[str]:
    """Return the options that find what was written, where other checkpoints are in the same directories."""
    if isinstance(target, RemotePath):
        forget_listings(target.url)
    written = {file.rank: target / file.path for file in plan.files}
    extension = PurePath(plan.files[0].path).suffix
    tries: list[tuple[list[str], str, str | None]] = [
        ([], RANK_PATTERN, None),
        (option("suffix", extension), RANK_PATTERN, extension),
    ]
    if pattern:
        tries.append((option("rank-pattern", pattern + extension), pattern + extension, None))
    for options, rank_pattern, suffix in tries:
        try:
            found = rank_files(target, rank_pattern, suffix, [])
        except SourceError:
            continue
        if all(found.get(rank) == [path] for rank, path in written.items()):
            return options
    return []


def is_a_share(plan: Plan) -> bool:
    """Tell whether other ranks store what these would hold too: nothing in the files tells that they do."""
    return plan.request is not None and plan.request.remove_redundancy and plan.request.ranks is not None


def is_silently_deduplicated(plan: Plan) -> bool:
    """Tell whether each replica is stored once in files that do not say so, because their format has no notes."""
    request = plan.request
    return request is not None and request.remove_redundancy and request.target is not None and plan.format == CKPT


def other_ranks(plan: Plan, target: AnyPath) -> str:
    """Tell of files of ranks that the target does not have, and which are found like its own; empty without any.

    They are those of an older run, or of another stage: the strategy of one stage does not say which ranks others have.
    """
    if plan.request is None or not isinstance(plan.request.files, RankFiles):
        return ""
    way, ranks = plan.request.files, plan.request.target.ranks if plan.request.target else plan.ranks
    pattern = RANK_PATTERN.replace("*", f"{way.prefix}{{rank}}{way.suffix}{PurePath(plan.files[0].path).suffix}")
    files: list[AnyPath] = []
    with suppress(SourceError):  # of what else is there; all that was asked for is done
        files = [path for rank, paths in every_file(target, pattern).items() if rank not in ranks for path in paths]
    found = names([path.relative_to(target) for path in files], most=3)  # type: ignore[arg-type]  # of one kind
    return f"notice: {target} has {found} too, of ranks that are not this target's; remove what is old" if files else ""
