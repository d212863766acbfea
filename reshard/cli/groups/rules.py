"""`reshard rules`: list, check and show rules between the names and shapes of two programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

import reshard
from reshard.cli.commands import Group
from reshard.cli.options import json_option, source_options
from reshard.cli.selection import rules_numbers
from reshard.cli.terminal import print_json, print_text, say_warnings, width
from reshard.cli.values import READ_PLACE
from reshard.core.open import open as open_checkpoint
from reshard.errors import VerifyError, names, printable

if TYPE_CHECKING:
    from reshard.core.listing import OpenOptions
    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.storage.places import Place
    from reshard.rules.derive import Derived


@click.group(cls=Group, name="rules")
def rules() -> None:
    """List, check and show rules between the names and shapes of two programs."""


def _derived(
    file: Place, source: Place, opening: OpenOptions, model_config: Place | None, let: dict[str, int]
) -> Derived:
    rules = reshard.Rules.read(file, config=model_config, let=let)
    derived = rules.derived(open_checkpoint(source, **vars(opening)))
    say_warnings(derived.checkpoint.warnings)
    return derived


@rules.command(
    "list",
    epilog="""
Examples:

  reshard rules list
  reshard rules list llama-hf-mcore > mine.yaml
""",
    short_help="List the built-in rules, or print one.",
)
@click.argument("name", required=False)
def list_rules(name: str | None) -> None:
    """List the built-in rules, whose names are taken in place of FILE; with NAME, print that file."""
    from reshard.rules.rules import example, examples, not_built_in

    if name is None:
        names_width = max(map(len, examples()))
        print_text("\n".join(f"{rules_name:{names_width}}  {about}" for rules_name, about in examples().items()))
        return
    path = example(name)
    if path is None:
        raise not_built_in(name)
    print_text(path.read_text("utf-8").rstrip("\n"))


@rules.command(
    "check",
    epilog="""
Example:

  reshard rules check llama.yaml iter_0005000
""",
    details="""
The object of --json has the keys source, sides (of the source, and of what is
made), rules (rule, verb, sources, source, targets, target), dropped, kept,
tensors, nbytes, and with TARGET differences.
""",
    short_help="Check rules against a checkpoint.",
)
@click.argument("file", type=READ_PLACE)
@click.argument("source", type=READ_PLACE)
@click.argument("target", type=READ_PLACE, required=False)
@source_options
@rules_numbers
@json_option
def check(file: Place, source: Place, target: Place | None, as_json: bool, **arguments: Any) -> None:
    """Check the rules FILE against the checkpoint SOURCE: each weight by one rule, shapes that add up, no hole.

    Only headers are read. With TARGET, names, dtypes and shapes of what the rules make are compared with
    those of another checkpoint.
    """
    from reshard.rules.show import table
    from reshard.view.text import count_text, table_lines

    derived = _derived(file, source, **arguments)
    result, rows = derived.checkpoint, table(derived)
    header = ("rule", "verb", "tensors", derived.sides[0], "become", derived.sides[1])
    differences = _differences(result, open_checkpoint(target, contents=False)) if target else []
    if as_json:
        keys = ("rule", "verb", "sources", "source", "targets", "target")
        print_json(
            {
                "source": result.root,
                "sides": list(derived.sides),
                "rules": [dict(zip(keys, row, strict=True)) for row in rows],
                "dropped": list(derived.dropped),
                "kept": list(derived.kept),
                "tensors": len(result.tensors),
                "nbytes": result.nbytes,
                **({"differences": differences} if target else {}),
            }
        )
    else:
        print_text("\n".join(table_lines(header, [tuple(map(str, row)) for row in rows], width())) + "\n")
        for label, group in (("left out", derived.dropped), ("kept as they are", derived.kept)):
            if group:
                print_text(f"{label}: {count_text(len(group), 'tensor')}: {names(group)}")
        print_text(f"{count_text(sum(row[2] for row in rows), 'tensor')} become {sum(row[4] for row in rows)}")
    if differences:
        raise VerifyError(
            f"{target} differs from what {file} makes of {source}", code="not-equal", facts=differences[:20]
        )


def _differences(result: Checkpoint, target: Checkpoint) -> list[str]:
    """Return the differences between headers."""
    from reshard.core.plan.inputs import Selection
    from reshard.core.verify.match import match

    return [
        printable(f"{difference.name}: {difference.text}")
        for difference in match(result, target, Selection()).differences
        if difference.name
    ]


@rules.command(
    "show",
    epilog="""
Example:

  reshard rules show llama.yaml iter_5000 decoder.layers.mlp.linear_fc1.weight
""",
    short_help="Show which rows of a fused tensor are whose.",
)
@click.argument("file", type=READ_PLACE)
@click.argument("source", type=READ_PLACE)
@click.argument("tensors", nargs=-1, metavar="[TENSOR]...")
@source_options
@rules_numbers
def show(file: Place, source: Place, tensors: tuple[str, ...], **arguments: Any) -> None:
    """Show which rows of a fused tensor are which rows of its parts; by default of one tensor of every rule.

    Shapes alone cannot tell whether gate and up stand one behind the other or row by row.
    """
    from reshard.rules.show import fusion_of

    derived = _derived(file, source, **arguments)
    firsts: dict[str, str] = {}  # of each rule
    for name, fused in derived.fused.items():
        firsts.setdefault(fused.use.rule.key_path, name)
    for name in tensors or firsts.values():
        print_text(f"{fusion_of(derived, name)}\n")
