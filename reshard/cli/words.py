"""What to type next: the options of a command put back into words, for the commands that its report proposes.

Values stand behind an equals sign, so that none is taken for an option, wherever it comes from.
"""

from __future__ import annotations

import shlex
from glob import escape
from typing import TYPE_CHECKING, Any

from reshard.cli.terminal import called_as
from reshard.formats.rank_dirs import RANK_PATTERN

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from reshard.plan.select import Selection
    from reshard.source.checkpoint import Checkpoint
    from reshard.storage.places import Place

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
