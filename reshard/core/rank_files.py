"""Files of ranks by their names: which rank and step a file is of, and which files belong together."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, NamedTuple, Self

from reshard.core.listing import RANK_DIRECTORY
from reshard.core.storage.base import reading
from reshard.errors import Option, SourceError, Text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reshard.core.storage.places import Place

EXTENSIONS = {".ckpt", ".safetensors"}
"""The extensions of files of tensors."""

_STEP = re.compile(r"(?P<name>.*)-(?P<epoch>[0-9]+)_(?P<step>[0-9]+)", re.DOTALL)
_PART = re.compile(r"_part[0-9]+$")
_NUMBER = re.compile(r"([0-9]+)")

StepNumbers = tuple[int, int]  # the epoch, and the step in it
Family = tuple[str, StepNumbers | None, str]  # the name common to all ranks, the step, the extension


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
        names = {match and f"{match['epoch']}_{match['step']}" for path in paths for match in [_step(path)]}
        name = names.pop() if len(names) == 1 else None
        return cls(name, older) if name else None

    def text(self, side: str = "source") -> Text:
        """Describe the step, and how to choose another for the `source` or the `target` of a call."""
        if not self.older:
            return Text(f"step {self.name}")
        newest = f"step {self.name} (the newest of {len(self.older) + 1}; "
        return Text(newest, Option("suffix").of(side), " selects another)")


def stem(path: Place) -> str:
    """Return a file's name without extension and pipeline stage."""
    return _PART.sub("", path.stem)


def stage_mark(path: str) -> str:
    """Return what a file of one stage of a pipeline has at the end of its name, such as `_part1`; else ""."""
    match = _PART.search(PurePath(path).stem)
    return match[0] if match else ""


def _step(path: Place) -> re.Match[str] | None:
    return _STEP.fullmatch(stem(path))


def families_of(path: Place, rank: int) -> set[Family]:
    """Return the families that a file may share with files of other ranks.

    Files of one checkpoint have a family in common.
    """
    match = _step(path)
    name, step = (match["name"], (int(match["epoch"]), int(match["step"]))) if match else (stem(path), None)
    parts = _NUMBER.split(name)  # numbers have the odd indexes
    own = [index for index in range(1, len(parts), 2) if int(parts[index]) == rank]
    variants = {name, "".join("{rank}" if index in own else part for index, part in enumerate(parts))}
    for index in own:
        variants.add("".join((*parts[:index], "{rank}", *parts[index + 1 :])))
    return {(variant, step, path.suffix) for variant in variants}


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
    # Two stars in one component are an error in `glob`, and mean the same as one here.
    glob = re.sub(r"\*+", "*", rank_pattern.replace("{rank}", "[0-9]*"))
    with reading(SourceError):
        candidates: Iterable[Place] = root.matching(glob, _matcher(rank_pattern.rpartition("/")[0]))
    matches = _matcher(rank_pattern)
    files: dict[int, list[Place]] = {}
    rank_texts: dict[int, str] = {}
    for path in sorted(candidates, key=str):
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
    if RANK_DIRECTORY.fullmatch(directory.name) is None:  # `best` may be a link to a rank
        directory = directory.real()
    match = RANK_DIRECTORY.fullmatch(directory.name)
    if match is None:
        return None
    ranks: set[int] = set()
    with suppress(SourceError, OSError):  # the parent may be unreadable
        for sibling in directory.parent.iterdir():
            of_sibling = RANK_DIRECTORY.fullmatch(sibling.name)
            if of_sibling and sibling.name != directory.name and _has_checkpoint(sibling):
                ranks.add(int(of_sibling[1]))
    return RankPlace(int(match[1]), sorted(ranks), directory.parent)


def _has_checkpoint(directory: Place) -> bool:
    """Return whether a directory has a checkpoint file; assume it at a URL: it is not empty."""
    return directory.can.has_latency or any(map(is_checkpoint_name, directory.iterdir()))
