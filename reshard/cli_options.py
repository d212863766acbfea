"""Options that commands share, and what their values are turned into."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MOST_RANKS = 1 << 20
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def rank_list(_ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Return the ranks of a list such as `0,3-5`."""
    if value is None:
        return None
    found: set[int] = set()
    for part in value.split(","):
        match = _RANGE.fullmatch(part.strip())
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not low <= high < _MOST_RANKS:
            raise click.BadParameter(f"{part!r} is no rank or range of ranks; expected such as 0,3-5", param=param)
        found.update(range(low, high + 1))
    return tuple(sorted(found))


def _rules(_ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    found = {}
    for value in values:
        name, equals, rule = value.rpartition("=")
        if not (name and equals and rule):
            raise click.BadParameter(f"{value!r} is not NAME=RULE, such as 'embedding.*=split:0'", param=param)
        found[name] = rule
    return found


PATH = click.Path(path_type=Path)

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
source_strategy_option = click.option(
    "--source-strategy",
    type=PATH,
    metavar="STRATEGY",
    help="Strategy file of the source, or the directory of its ranks' strategy files.",
)


def source_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say what the source is."""
    for option in (
        click.option(
            "--layout",
            "layouts",
            multiple=True,
            metavar="NAME=RULE",
            callback=_rules,
            help="How the tensors of this name (or glob) are cut, whatever the strategy says: whole, split:DIM or "
            "DEV_MATRIX:TENSOR_MAP[:OPT_SIZE] such as 2,4:1,-1. May be repeated.",
        ),
        click.option(
            "--suffix",
            metavar="SUFFIX",
            help="Of several checkpoints in a rank's directory, take that whose name ends so.",
        ),
        click.option(
            "--rank-pattern",
            metavar="PATTERN",
            default="rank_{rank}/*",
            show_default=True,
            help="Where a rank's files are below SOURCE, such as 'node{rank}/*.ckpt'.",
        ),
        source_strategy_option,
    ):
        command = option(command)
    return command
