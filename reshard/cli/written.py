"""What a command wrote: what else lies there, and what to type next.

The options of a command are put back into words, for the commands that its report proposes. Values stand behind an
equals sign, so that none is taken for an option, wherever it comes from.
"""

from __future__ import annotations

import re
import shlex
from contextlib import suppress
from glob import escape
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.cli.terminal import called_as
from reshard.errors import SourceError, names
from reshard.formats.ckpt import NAME as CKPT
from reshard.formats.directories import DIRECTORY_FORMATS, RUNS
from reshard.formats.entries import NamedFile, RankFiles
from reshard.formats.rank_dirs import RANK_PATTERN, every_file, is_checkpoint_name, rank_files
from reshard.formats.sets import SET_INDEXES
from reshard.formats.zarr_files import is_store

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from reshard.plan.plan import Plan
    from reshard.plan.select import Selection
    from reshard.source.checkpoint import Checkpoint
    from reshard.storage.places import Place


def found_by(plan: Plan, directory: Place) -> list[str]:
    """Return the options with which what was written is found, as those of a source."""
    if plan.request is None or any(file.last for file in plan.files):
        return []
    way, strategy = plan.request.files, plan.request.target
    some = strategy is not None and (len(plan.ranks) < len(strategy.ranks) or plan.source.part is not None)
    partial = ["--partial"] if some else []
    stage = option("stage", plan.request.stage) if strategy and strategy.others else []
    pattern = RANK_PATTERN.replace("*", f"{way.prefix}{{rank}}*") if isinstance(way, RankFiles) else None
    return [*partial, *stage, *told_apart(plan, directory, pattern)]


def told_apart(plan: Plan, target: Place, pattern: str | None = None) -> list[str]:
    """Return the options that find what was written, where other checkpoints are in the same directories."""
    target.refresh()
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
    """Return whether other ranks store what these would hold too: nothing in the files tells that they do."""
    return plan.request is not None and plan.request.remove_redundancy and plan.request.ranks is not None


def is_silently_deduplicated(plan: Plan) -> bool:
    """Return whether each replica is stored once in files that do not say so, because their format has no notes."""
    request = plan.request
    return request is not None and request.remove_redundancy and request.target is not None and plan.format == CKPT


class Beside(NamedTuple):
    """What else is in a target, and would be found with what is written there, or in its place.

    Attributes:
        warnings: what should be said of it.
        found: whether what is written is found in spite of that.
    """

    warnings: tuple[str, ...] = ()
    found: bool = True


def beside(plan: Plan, target: Place) -> Beside:
    """Look what else is in a target directory; it may not be there yet.

    It is what an older run left there, or another program: files of other ranks, of another format or checkpoint, a
    unified set or a zarr store, whose readers do not look at rank files at all.
    """
    if plan.exclusive:  # `check_target` refuses any
        return Beside()
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
        warnings = tuple(f"{target} has {names(some, most=3)} {words}" for some, words in said if some)
        return Beside(warnings, found=not (hiding or ranks))
    return Beside()


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


_MOST_NAMES = 40  # that somebody would type


def option(name: str, value: object) -> list[str]:
    """Return an option that was given, as one word; nothing for None.

    >>> option("suffix", "-1_2"), option("suffix", None)
    (['--suffix=-1_2'], [])
    """
    return [] if value is None else [f"--{name}={value}"]


def reading_words(reading: Mapping[str, Any]) -> list[str]:
    """Return the options of `cli.options.source_options` that were given, but for the strategy."""
    pattern = reading["rank_pattern"]
    return [
        *option("rank-pattern", None if pattern == RANK_PATTERN else pattern),
        *option("suffix", reading["suffix"]),
        *[word for name, rule in reading["layouts"].items() for word in option("layout", f"{name}={rule}")],
        *option("stage", reading["stage"]),
        *(["--partial"] if reading["partial"] else []),
    ]


def selection_words(selection: Selection, name_map: str | None) -> list[str]:
    """Return the options of `cli.options.selection_options` that were given; a map of names is in a file.

    >>> from reshard.plan.select import Selection
    >>> selection_words(Selection(include=("a*",), cast={"float32": "bfloat16"}), None)
    ['--include=a*', '--cast=float32=bfloat16']
    """
    return [
        *[word for glob in selection.include for word in option("include", glob)],
        *[word for glob in selection.exclude for word in option("exclude", glob)],
        *(["--weights-only"] if selection.weights_only else []),
        *option("name-map", (name_map or "FILE") if selection.names else None),
        *[word for old, new in selection.cast.items() for word in option("cast", f"{old}={new}")],
        *[word for glob in selection.drop for word in option("drop", glob)],
        *[word for glob in selection.allow_missing for word in option("allow-missing", glob)],
    ]


def left_out_words(source: Checkpoint, selection: Selection) -> list[str] | None:
    """Return the options that leave out what `Checkpoint.sel` did; None where that takes too many.

    Args:
        source: the checkpoint of some tensors.
        selection: what was asked for beside it.
    """
    if not source.left_out:
        return []
    every: dict[str, Collection[str]] = {"include": {**source.tensors, **source.unreadable}, "exclude": source.left_out}
    if selection.include:
        del every["include"]
    which, chosen = min(every.items(), key=lambda item: len(item[1]))
    return None if len(chosen) > _MOST_NAMES else [f"--{which}={escape(name)}" for name in sorted(chosen)]


def strategy_words(side: str, path: object) -> list[str]:
    """Return the option of a strategy file; nothing where there is none."""
    return [] if path is None else [f"--{side}-strategy", str(path)]


def verify_command(
    target: Place, target_strategy: object, found_by: Sequence[str], source: object, asked: Sequence[str]
) -> str:
    """Write the command that compares a target with its source, for a shell.

    Args:
        target: where the target files are.
        target_strategy: its strategy file, or None.
        found_by: the options with which the files are found there, as those of a source.
        source: the checkpoint that was read.
        asked: the options that said how to read it, and what to take of it.
    """
    there = [*strategy_words("target", target_strategy), *(f"--target-{word[2:]}" for word in found_by)]
    return f"{called_as()} {shlex.join(['verify', str(target), *there, '--against', str(source), *asked])}"


def manifest_command(target: Place, manifest: object) -> str:
    """Write the command that compares target files with a manifest."""
    return f"{called_as()} {shlex.join(['verify', str(target), '--manifest', str(manifest)])}"


def inspect_command(target: Place, target_strategy: object, found_by: Sequence[str]) -> str:
    """Write the command that shows what was written."""
    words = ["inspect", str(target), *strategy_words("source", target_strategy), *found_by]
    return f"{called_as()} {shlex.join(words)}"
