"""Rank directories: find the files of each rank, and choose a step that all ranks have.

Rank directories contain several steps, restarted runs, graphs and unfinished files. One checkpoint that every rank has
is read: the newest step, or the one with the user's suffix. An ambiguous choice is an error, never a guess.
"""

from __future__ import annotations

from itertools import chain
from shlex import quote
from typing import TYPE_CHECKING

from reshard.core.catalog import paths_below
from reshard.core.listing import RANK_PATTERN
from reshard.core.rank_files import EXTENSIONS, Step, every_file, families_of, is_checkpoint_name, stem
from reshard.core.records.logs import leftovers
from reshard.core.storage.base import similar
from reshard.errors import Option, SourceError, Text, names
from reshard.formats.ranks.one_of_ranks import refuse_parts_of_ranks
from reshard.formats.ranks.one_of_several import refuse_directory, refuse_one_of_several
from reshard.kits.files import is_save
from reshard.kits.torch.names import SAVE_EXTENSIONS, TRAINER_FILES
from reshard.strategy.names import ranks_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from reshard.core.rank_files import Family, StepNumbers
    from reshard.core.storage.places import Place


def rank_files(
    root: Place, rank_pattern: str, suffix: str | None, warnings: list[str], *, is_directory: bool | None = None
) -> tuple[dict[int, list[Place]], Step | None]:
    """Return the files of each rank for the newest common checkpoint, and its step if known.

    With a suffix, only files whose names end with it, with or without extension. A warning says that a newer step is
    skipped.

    Raises:
        SourceError: there are no files, no common checkpoint or several, or the files are of a directory format.
    """
    is_directory = root.is_dir() if is_directory is None else is_directory
    if not is_directory and root.is_there():
        refuse_one_of_several(root)
        return {0: [root]}, Step.of([root])
    if not is_directory:
        root.require_bucket()
        raise SourceError(
            f"{root} does not exist",
            code="not-found",
            facts=["expected a directory of rank directories, or one checkpoint file"],
            hint=similar(root),
        )
    of_ranks = every_file(root, rank_pattern)
    files_by_rank = of_ranks or _flat_files(root)
    if not files_by_rank:
        raise _nothing_found(root, rank_pattern)
    inside: dict[Place, list[str]] = {}
    for path in chain.from_iterable(files_by_rank.values()):
        inside.setdefault(path.parent, []).append(path.name)
    for directory, file_names in inside.items():
        listing = root.names() if directory == root else file_names
        refuse_directory(directory, listing, "alone", *(["others"] if of_ranks and len(listing) == 1 else []))
    if suffix is not None:
        files_by_rank = _of_suffix(root, files_by_rank, suffix)
    chosen, older = _same_checkpoint(root, files_by_rank, warnings)
    if not of_ranks and len(chosen[0]) == 1:
        refuse_one_of_several(chosen[0][0])
    return chosen, Step.of(chain.from_iterable(chosen.values()), older)


def _flat_files(root: Place) -> dict[int, list[Place]]:
    """Return the files of a directory itself as those of rank 0; refuse several of `torch.save`."""
    inside = sorted((path for path in root.iterdir() if path.is_file()), key=str)
    flat = [path for path in inside if is_checkpoint_name(path)]
    saves = flat or [path for path in inside if path.suffix in SAVE_EXTENSIONS]
    saves = [path for path in saves if not TRAINER_FILES.fullmatch(path.name)]
    if len(saves) > 1 and is_save(str(saves[0])):
        refuse_parts_of_ranks(root)
        raise SourceError(
            f"{root} has several files of torch.save",
            code="several-checkpoints",
            facts=[names([path.name for path in saves], most=4)],
            hint=f"open one of them; `reshard runs {quote(str(root))}` tells which are complete",
        )
    return {0: flat} if flat else {}


def _nothing_found(root: Place, rank_pattern: str) -> SourceError:
    """Return the error for a directory without a checkpoint, which names those below it; raise one of its format."""
    is_usual = rank_pattern == RANK_PATTERN
    is_searched = is_usual and not root.can.has_latency  # at a URL, each directory is a request
    below = paths_below(root) if is_searched else []
    refuse_directory(root, root.names(), *(["foreign"] if below else []))
    unfinished = leftovers(root)
    if below:
        return SourceError(
            f"{root} has no checkpoint itself",
            code="no-checkpoint",
            facts=[f"checkpoints below: {names(below)}", *unfinished],
            hint=f"open {quote(str(root / below[-1]))}; `reshard runs {quote(str(root))}` tells which are complete",
        )
    if unfinished:
        return SourceError(
            f"{root} is unfinished, and has no file that is done", code="unfinished", facts=unfinished,
            hint="the command that wrote it resumes it",
        )  # fmt: skip
    if is_searched and not root.names():
        return SourceError(f"{root} is empty", code="empty-directory", facts=["expected a checkpoint"])
    usual = [f"rank_0/*{extension}" for extension in sorted(EXTENSIONS)]
    examples = usual if is_usual else [rank_pattern.replace("{rank}", "0")]
    return SourceError(
        f"{root} has no checkpoint",
        code="no-checkpoint",
        facts=[f"expected files at {' or '.join(map(repr, examples))} and so on"],
        hint=Text("give ", Option("rank_pattern"), " for other names"),
    )


def _of_suffix(root: Place, files_by_rank: Mapping[int, Sequence[Place]], suffix: str) -> dict[int, list[Place]]:
    """Return the files of each rank whose names end with a suffix; refuse ranks without one."""
    chosen = {
        rank: [path for path in paths if path.name.endswith(suffix) or stem(path).endswith(suffix)]
        for rank, paths in files_by_rank.items()
    }
    if without := [rank for rank, paths in chosen.items() if not paths]:
        raise SourceError(
            f"{root} has no file of {ranks_text(without)} that ends with {suffix!r}",
            code="no-match",
            hint=Text("give another ", Option("suffix")),
        )
    return chosen


def _same_checkpoint(
    root: Place, by_rank: dict[int, list[Place]], warnings: list[str]
) -> tuple[dict[int, list[Place]], tuple[str, ...]]:
    """Return each rank's files of the newest common checkpoint, and the older common steps, newest first."""
    families = _families(by_rank)
    runs: dict[tuple[str, str], dict[StepNumbers | None, dict[int, list[Place]]]] = {}
    for (name, step, extension), files in families.items():
        if len(files) == len(by_rank):
            runs.setdefault((name, extension), {})[step] = files
    if not runs:
        raise _nothing_in_common(root, by_rank)
    steps = max(runs.values(), key=len)
    # One set of files may have several names (`x_1` of rank 1 is also `x_{rank}`).
    common = {tuple(chain.from_iterable(files.values())) for run in runs.values() for files in run.values()}
    if len(common) > len(steps) or (len(steps) > 1 and None in steps):
        refuse_parts_of_ranks(root)
        raise _several(root, common)
    newest, *older = sorted(steps, key=lambda step: step or (0, 0), reverse=True)
    later = [step for _, step, _ in families if step and newest and step > newest]
    if later and newest:
        warnings.append(f"step {_text(max(later))} is not in every rank; {_text(newest)} is the newest that is")
    return steps[newest], tuple(map(_text, filter(None, older)))


def _text(step: StepNumbers) -> str:
    return f"{step[0]}_{step[1]}"


def _nothing_in_common(root: Place, by_rank: Mapping[int, Sequence[Place]]) -> SourceError:
    """Return the error for ranks that have no checkpoint in common."""
    facts = [f"rank {rank}: {names([path.name for path in paths], most=3)}" for rank, paths in by_rank.items()]
    return SourceError(
        f"the ranks of {root} have no checkpoint in common",
        code="no-common-checkpoint",
        facts=[*facts[:4], *([f"and {len(facts) - 4} more ranks"] if facts[4:] else [])],
        hint=Text("choose the files with ", Option("suffix"), ", or `reshard convert` those of one extension"),
    )


def _several(root: Place, by_files: Collection[Sequence[Place]]) -> SourceError:
    """Return the error for ranks that have several checkpoints in common, of which none is the newest."""
    file_names = sorted({path.name for files in by_files for path in files})
    extensions = sorted({files[0].suffix for files in by_files})
    by_extension = extensions[-1] if len(extensions) == len(by_files) else None
    return SourceError(
        f"the ranks of {root} have several checkpoints", code="several-checkpoints", facts=[names(file_names)],
        hint=Text("choose one with ", Option("suffix", by_extension)),
    )  # fmt: skip


def steps_of(by_rank: Mapping[int, Sequence[Place]]) -> Iterator[tuple[Family, dict[int, list[Place]]]]:
    """Yield each checkpoint in rank directories: its family, and its files by rank.

    A file of several families belongs to the one with the most ranks; the name that all ranks have comes first.
    """
    assigned: set[Place] = set()
    for family, files in sorted(_families(by_rank).items(), key=lambda item: (-len(item[1]), item[0][0])):
        paths = {*chain.from_iterable(files.values())}
        if assigned.isdisjoint(paths):
            assigned |= paths
            yield family, files


def _families(by_rank: Mapping[int, Sequence[Place]]) -> dict[Family, dict[int, list[Place]]]:
    """Return the files of each rank, by family."""
    families: dict[Family, dict[int, list[Place]]] = {}
    for rank, paths in by_rank.items():
        for path in paths:
            for family in families_of(path, rank):
                families.setdefault(family, {}).setdefault(rank, []).append(path)
    return families
