"""Rank directories: find the files of each rank, and choose a step that all ranks have.

Rank directories contain several steps, restarted runs, graphs and unfinished files. One checkpoint that every rank has
is read: the newest step, or the one with the user's suffix. An ambiguous choice is an error, never a guess.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, NamedTuple, Self

from reshard.core.format import parts_of_several
from reshard.core.listing import RANK_DIRECTORY, RANK_PATTERN, Listing
from reshard.core.storage.base import PARTIAL, reading, similar
from reshard.errors import Option, SourceError, Text, names
from reshard.formats.ranks.names import EXTENSIONS
from reshard.formats.ranks.one_of_several import refuse_directory, refuse_one_of_several
from reshard.kits.files import is_save
from reshard.kits.torch.names import SAVE_EXTENSIONS, TRAINER_FILES
from reshard.strategy.names import ranks_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from reshard.core.storage.places import Place

_STEP = re.compile(r"(?P<name>.*)-(?P<epoch>[0-9]+)_(?P<step>[0-9]+)", re.DOTALL)
_PART = re.compile(r"_part[0-9]+$")
_NUMBER = re.compile(r"([0-9]+)")
_DEEPEST_BELOW, _MOST_BELOW = 4, 1000  # levels, and entries of a level, in which checkpoints are looked for


class Step(NamedTuple):
    """The checkpoint of a training run that is read.

    Attributes:
        name: its epoch and step, as in file names.
        older: older checkpoints that every rank has too, newest first.

    >>> str(Step("1_100", ("1_50",)).text()), str(Step("1_50").text())
    ('step 1_100 (the newest of 2; suffix=... selects another)', 'step 1_50')
    """

    name: str
    older: tuple[str, ...] = ()

    @classmethod
    def of(cls, paths: Iterable[Place], older: tuple[str, ...] = ()) -> Self | None:
        """Return the step in the names of files; None if they do not agree on one."""
        names = {match and f"{match['epoch']}_{match['step']}" for match in map(_step, paths)}
        name = names.pop() if len(names) == 1 else None
        return cls(name, older) if name else None

    def text(self, side: str = "source") -> Text:
        """Describe the step, and how to choose another for the `source` or the `target` of a call."""
        if not self.older:
            return Text(f"step {self.name}")
        newest = f"step {self.name} (the newest of {len(self.older) + 1}; "
        return Text(newest, Option("suffix").of(side), " selects another)")


_StepNumbers = tuple[int, int]  # the epoch, and the step in it
_Family = tuple[str, _StepNumbers | None, str]  # the name common to all ranks, the step, the extension


def rank_files(
    root: Place, rank_pattern: str, suffix: str | None, warnings: list[str], *, is_directory: bool | None = None
) -> tuple[dict[int, list[Place]], Step | None]:
    """Return the files of each rank for the newest common checkpoint, and its step if known.

    Args:
        root: a directory of rank directories, or one file.
        rank_pattern: the path pattern of a rank's files below it.
        suffix: accept only files whose names end with it, with or without extension.
        warnings: receives a line if a newer step is skipped.
        is_directory: whether it is a directory, if known.

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
    files_by_rank = every_file(root, rank_pattern)
    by_rank = bool(files_by_rank)
    files_by_rank = files_by_rank or _flat_files(root)
    below: list[str] = []
    if not files_by_rank and rank_pattern == RANK_PATTERN and not root.can.has_latency:  # at a URL, each is a request
        below = checkpoints_below(root)
    _refuse_directory_formats(root, files_by_rank, by_rank=by_rank, has_below=bool(below))
    if not files_by_rank:
        raise _nothing_found(root, rank_pattern, below)
    if suffix is not None:
        files_by_rank = _of_suffix(root, files_by_rank, suffix)
    chosen, older = _same_checkpoint(root, files_by_rank, warnings)
    if not by_rank and len(chosen[0]) == 1:
        refuse_one_of_several(chosen[0][0])
    return chosen, Step.of((path for paths in chosen.values() for path in paths), older)


def _flat_files(root: Place) -> dict[int, list[Place]]:
    """Return the files of a directory itself as those of rank 0; {} if there are none."""
    inside = sorted((path for path in root.iterdir() if path.is_file()), key=str)
    flat = [path for path in inside if is_checkpoint_name(path)]
    _refuse_saves(root, flat or [path for path in inside if path.suffix in SAVE_EXTENSIONS])
    return {0: flat} if flat else {}


def _nothing_found(root: Place, rank_pattern: str, below: Sequence[str]) -> SourceError:
    """Return the error for a directory without a checkpoint; `below` are the paths of those below it."""
    finished = [path for path in below if not leftovers(root / path)]
    unfinished = leftovers(root)
    if unfinished and not finished:
        return SourceError(
            f"{root} is unfinished, and has no file that is done", code="unfinished", facts=unfinished,
            hint="the command that wrote it resumes it",
        )  # fmt: skip
    is_usual = rank_pattern == RANK_PATTERN
    if is_usual and not root.can.has_latency and not any(root.iterdir()):
        return SourceError(f"{root} is empty", code="empty-directory", facts=["expected a checkpoint"])
    if finished:
        return SourceError(
            f"{root} has no checkpoint itself",
            code="no-checkpoint",
            facts=[f"checkpoints below: {names(finished)}", *unfinished],
            hint=f"open {quote(str(root / finished[-1]))}; `reshard runs {quote(str(root))}` tells which are complete",
        )
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
        rank: [path for path in paths if path.name.endswith(suffix) or _stem(path).endswith(suffix)]
        for rank, paths in files_by_rank.items()
    }
    if without := [rank for rank, paths in chosen.items() if not paths]:
        raise SourceError(
            f"{root} has no file of {ranks_text(without)} that ends with {suffix!r}",
            code="no-match",
            hint=Text("give another ", Option("suffix")),
        )
    return chosen


def _refuse_saves(root: Place, files: Sequence[Place]) -> None:
    """Raise an error if files, which are no rank's, are several of `torch.save`."""
    files = [path for path in files if not TRAINER_FILES.fullmatch(path.name)]
    if len(files) > 1 and is_save(str(files[0])):
        raise SourceError(
            f"{root} has several files of torch.save",
            code="several-checkpoints",
            facts=[names([path.name for path in files], most=4)],
            hint=f"open one of them; `reshard runs {quote(str(root))}` tells which are complete",
        )


class RankPlace(NamedTuple):
    """The rank implied by a path, its sibling ranks and their parent directory."""

    rank: int
    others: list[int]
    above: Place


def rank_of(path: Place) -> RankPlace | None:
    """Return the rank implied by the path of a file or directory, or None.

    >>> rank_of(Path("/run/rank_3/net.ckpt"))
    RankPlace(rank=3, others=[], above=PosixPath('/run'))
    """
    directory = path.absolute() if path.is_dir() else path.absolute().parent
    match = RANK_DIRECTORY.fullmatch(directory.name)
    if match is None:  # `best` may be a link to a rank
        directory = directory.real()
        match = RANK_DIRECTORY.fullmatch(directory.name)
    if match is None:
        return None
    ranks: set[int] = set()
    with suppress(SourceError, OSError):  # the parent may be unreadable
        for sibling in directory.parent.iterdir():
            sibling_match = RANK_DIRECTORY.fullmatch(sibling.name)
            if sibling_match and sibling.name != directory.name and _has_checkpoint(sibling):
                ranks.add(int(sibling_match[1]))
    return RankPlace(int(match[1]), sorted(ranks), directory.parent)


def _has_checkpoint(directory: Place) -> bool:
    """Return whether a directory has a checkpoint file; assume it at a URL: it is not empty."""
    return directory.can.has_latency or any(map(is_checkpoint_name, directory.iterdir()))


def _refuse_directory_formats(
    root: Place, files: Mapping[int, Sequence[Place]], *, by_rank: bool, has_below: bool
) -> None:
    """Raise an error if the files, or else the entries of the root, have a directory format.

    Args:
        root: the directory.
        files: the files of each rank.
        by_rank: they are in directories of ranks.
        has_below: there are checkpoints below the root, so that other programs' files in it do not matter.
    """
    inside: dict[Place, list[str]] = {}
    for path in (path for paths in files.values() for path in paths):
        inside.setdefault(path.parent, []).append(path.name)
    if not files or root in inside:
        inside[root] = [path.name for path in root.iterdir()]
    for directory, file_names in inside.items():
        accepted = ["alone"] if files else ["foreign"] if has_below else []
        accepted += ["others"] if by_rank and len(file_names) == 1 else []
        refuse_directory(directory, file_names, *accepted)


def leftovers(root: Place) -> list[str]:
    """Return a fact on the unfinished files below a directory; [] without any."""
    files = root.files() if root.is_dir() else []
    unfinished = sorted(path.relative_to(str(root)).as_posix() for path in files if path.suffix == PARTIAL)
    if not unfinished:
        return []
    count = f"{len(unfinished)} unfinished file{'s' * (len(unfinished) != 1)}"
    return [f"{root} has {count} ({names(unfinished, most=1)}): a run was interrupted, or is not done"]


def checkpoints_below(root: Place) -> list[str]:
    """Return the paths of the nearest checkpoints below a local directory."""
    level = [root]
    for _ in range(_DEEPEST_BELOW):
        entries = [directory / name for directory in level for name in sorted(directory.names()) if name[0] != "."]
        level = [path for path in entries[:_MOST_BELOW] if path.is_dir()]
        if checkpoints := [path for path in level if _is_checkpoint(path)]:
            return [path.relative_to(str(root)).as_posix() for path in checkpoints]
    return []


def _is_checkpoint(directory: Place) -> bool:
    """Return whether a directory has rank directories or files of a checkpoint of any format."""
    here = Listing(directory)
    entries = here.names
    has_format = any(each.shown_by(here) for each in parts_of_several() if "foreign" not in each.when)
    saves = (name for name in entries if Path(name).suffix in SAVE_EXTENSIONS and not TRAINER_FILES.fullmatch(name))
    return has_format or "rank_0" in entries or any(saves) or any(is_checkpoint_name(directory / n) for n in entries)


def every_file(root: Place, rank_pattern: str) -> dict[int, list[Place]]:
    """Return the files of each rank, for all of its checkpoints.

    Raises:
        SourceError: the pattern is invalid, a directory cannot be read, or a rank occurs twice.
    """
    if "{rank}" not in rank_pattern or rank_pattern.startswith("/") or ".." in rank_pattern.split("/"):
        raise SourceError(
            f"rank pattern {rank_pattern!r} has no {{rank}}, or leads out of the directory",
            code="bad-rank-pattern",
            hint="use one such as 'node{rank}/*.ckpt'",
        )
    any_extension = bool(Path(rank_pattern).suffix)
    matches = _matcher(rank_pattern)
    files: dict[int, list[Place]] = {}
    rank_texts: dict[int, str] = {}
    for path in sorted(_files(root, rank_pattern), key=str):
        match = matches.fullmatch(path.relative_to(root).as_posix())  # type: ignore[arg-type]  # of one kind
        if not match or not is_checkpoint_name(path, any_extension=any_extension):
            continue
        rank = int(match["rank"])
        if rank_texts.setdefault(rank, match["rank"]) != match["rank"]:
            raise SourceError(
                f"{root} has rank {rank} twice, as {rank_texts[rank]!r} and {match['rank']!r}", code="duplicate-rank"
            )
        files.setdefault(rank, []).append(path)
    return dict(sorted(files.items()))


def _matcher(rank_pattern: str) -> re.Pattern[str]:
    """Return a regular expression for a rank pattern; all `{rank}` match the same number."""
    regex = re.escape(rank_pattern).replace(re.escape("{rank}"), r"(?P<rank>[0-9]+)", 1).replace(r"\*", "[^/]*")
    return re.compile(regex.replace(re.escape("{rank}"), "(?P=rank)"))


def _files(root: Place, rank_pattern: str) -> Iterable[Place]:
    """Return files that may match; `_matcher` decides."""
    # Two stars in one component are an error in `glob`, and mean the same as one here.
    pattern = re.sub(r"\*+", "*", rank_pattern.replace("{rank}", "[0-9]*"))
    with reading(SourceError):
        return root.matching(pattern, _matcher(rank_pattern.rpartition("/")[0]))


def is_checkpoint_name(path: Place, *, any_extension: bool = False) -> bool:
    """Return whether a file belongs to a checkpoint, by its name.

    Raises:
        SourceError: the name has a line break.
    """
    if "\n" in path.name:  # it could forge lines of a message
        raise SourceError(
            f"{path.parent} has a file whose name has a line break: {path.name!r}",
            code="bad-name",
            hint="rename the file",
        )
    if path.suffix in {".tmp", ".meta", ".partial"} or "_breakpoint" in path.stem or path.name == "meta.json":
        return False
    return not path.name.startswith(".") and (any_extension or path.suffix in EXTENSIONS)


def _same_checkpoint(
    root: Place, by_rank: dict[int, list[Place]], warnings: list[str]
) -> tuple[dict[int, list[Place]], tuple[str, ...]]:
    """Return each rank's files of the newest common checkpoint, and the older common steps, newest first."""
    families = _families(by_rank)
    runs: dict[tuple[str, str], dict[_StepNumbers | None, dict[int, list[Place]]]] = {}
    for (name, step, extension), files in families.items():
        if len(files) == len(by_rank):
            runs.setdefault((name, extension), {})[step] = files
    if not runs:
        raise _nothing_in_common(root, by_rank)
    steps = max(runs.values(), key=len)
    # One set of files may have several names (`x_1` of rank 1 is also `x_{rank}`).
    common = {
        tuple(path for paths in files.values() for path in paths) for run in runs.values() for files in run.values()
    }
    if len(common) > len(steps) or (len(steps) > 1 and None in steps):
        raise _several(root, common)
    newest, *older = sorted(steps, key=lambda step: step or (0, 0), reverse=True)
    later = [step for _, step, _ in families if step and newest and step > newest]
    if later and newest:
        warnings.append(f"step {_text(max(later))} is not in every rank; {_text(newest)} is the newest that is")
    return steps[newest], tuple(map(_text, filter(None, older)))


def _text(step: _StepNumbers) -> str:
    return f"{step[0]}_{step[1]}"


def _nothing_in_common(root: Place, by_rank: Mapping[int, Sequence[Place]]) -> SourceError:
    """Return the error for ranks that have no checkpoint in common."""
    facts = [f"rank {rank}: {names([path.name for path in paths], most=3)}" for rank, paths in by_rank.items()]
    encodings = {tuple(sorted({path.suffix for path in paths})) for paths in by_rank.values()}
    advice = (
        "`reshard convert` those of one format to the other"
        if encodings == {(extension,) for extension in EXTENSIONS}
        else Text("choose the files with ", Option("suffix"))
    )
    rest = [f"and {len(facts) - 4} more ranks"] if len(facts) > 4 else []
    return SourceError(
        f"the ranks of {root} have no checkpoint in common",
        code="no-common-checkpoint",
        facts=[*facts[:4], *rest],
        hint=advice,
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


def steps_of(by_rank: Mapping[int, Sequence[Place]]) -> Iterator[tuple[_Family, dict[int, list[Place]]]]:
    """Yield each checkpoint in rank directories: its family, and its files by rank.

    A file of several families belongs to the one with the most ranks; the name that all ranks have comes first.
    """
    assigned: set[Place] = set()
    for family, files in sorted(_families(by_rank).items(), key=lambda item: (-len(item[1]), item[0][0])):
        paths = {path for paths in files.values() for path in paths}
        if assigned.isdisjoint(paths):
            assigned |= paths
            yield family, files


def _families(by_rank: Mapping[int, Sequence[Place]]) -> dict[_Family, dict[int, list[Place]]]:
    """Return the files of each rank, by family."""
    families: dict[_Family, dict[int, list[Place]]] = {}
    for rank, paths in by_rank.items():
        for path in paths:
            for family in families_of(path, rank):
                families.setdefault(family, {}).setdefault(rank, []).append(path)
    return families


def _stem(path: Place) -> str:
    """Return a file's name without extension and pipeline stage."""
    return _PART.sub("", path.stem)


def _step(path: Place) -> re.Match[str] | None:
    return _STEP.fullmatch(_stem(path))


def families_of(path: Place, rank: int) -> set[_Family]:
    """Return the families that a file may share with files of other ranks.

    Files of one checkpoint have a family in common.
    """
    match = _step(path)
    name, step = (match["name"], (int(match["epoch"]), int(match["step"]))) if match else (_stem(path), None)
    parts = _NUMBER.split(name)  # numbers have the odd indexes
    own = [index for index in range(1, len(parts), 2) if int(parts[index]) == rank]
    variants = {name, "".join("{rank}" if index in own else part for index, part in enumerate(parts))}
    for index in own:
        variants.add("".join((*parts[:index], "{rank}", *parts[index + 1 :])))
    return {(variant, step, path.suffix) for variant in variants}
