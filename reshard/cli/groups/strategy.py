"""`reshard strategy`: show, merge, make and compare sharding strategy files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

import reshard
from reshard.cli.commands import Command, Group, option
from reshard.cli.options import (
    drop_option,
    json_option,
    output_file_option,
    overwrite_file_option,
    source_options,
)
from reshard.cli.terminal import print_json, print_text, say_warnings, wrote
from reshard.cli.values import READ, READ_PLACE, STRATEGY
from reshard.core.model.holdings import strategy_of
from reshard.core.open import open as open_checkpoint
from reshard.core.storage.places import as_place
from reshard.core.storage.small import read_yaml, refuse_existing, refuse_inputs
from reshard.errors import Faults, SourceError, UsageError, VerifyError, bytes_text, printable
from reshard.strategy.files import merge_strategies

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from reshard.core.layout.layout import Layout
    from reshard.core.listing import OpenOptions
    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.storage.places import Place
    from reshard.strategy.diff import Diff, LayoutChange
    from reshard.strategy.strategy import Strategy

_output = output_file_option("The file to write; JSON if its name ends with .json.")


@click.group(cls=Group, name="strategy")
def strategy() -> None:
    """Show, merge, make and compare sharding strategy files."""


@strategy.command(
    "show",
    epilog="""
Example:

  reshard strategy show src_strategy.ckpt
""",
    details="""
The object of --json has the keys ranks, stages, devices_per_stage, merged, and
tensors: name, stage, layout.
""",
    short_help="Show ranks, and the tensors of each layout.",
)
@click.argument("path", type=STRATEGY, metavar="FILE_OR_DIRECTORY")
@option(
    "--raw",
    under="Output",
    is_flag=True,
    help="Show device matrices and tensor maps, as strategy files have them.",
)
@json_option
def show_strategy(path: Path, raw: bool, as_json: bool) -> None:
    """Show a strategy file, or the merged strategy of a directory of them: ranks, and the tensors of each layout."""
    from reshard.view.words import strategy_data, strategy_text

    loaded = reshard.read_strategy(path)
    if as_json:
        print_json(strategy_data(loaded))
    else:
        print_text(strategy_text(loaded, str(path), raw=raw))


@strategy.command(
    "merge",
    epilog="""
Example:

  reshard strategy merge src_pipeline_strategys -o src_strategy.ckpt
""",
    short_help="Merge the files of a pipeline's ranks.",
)
@click.argument("directory", type=STRATEGY)
@_output
@overwrite_file_option
def merge_strategy(directory: Path, output: Path, overwrite: bool) -> None:
    """Merge the strategy files of a pipeline's ranks in DIRECTORY into one file."""
    if output.parent.resolve() == directory.resolve():
        raise UsageError(
            f"{output} is in {directory}, where every file is taken for that of a rank",
            code="target-in-source",
            hint="choose another directory",
        )
    refuse_existing(output, overwrite=overwrite)
    _say_written(merge_strategies(directory, output), output)


EXAMPLE = """\
# How the tensors of a target are cut. These rules are for the files that
# `reshard demo` makes. In its folder type
#   reshard strategy make > rules.yaml
#   reshard strategy make rules.yaml --like src_checkpoints \\
#       --source-strategy src_strategy.ckpt -o made.ckpt

mesh: {dp: 2, mp: 4}  # the devices of a stage, outermost axis first: 8 ranks

rules:  # globs of names; the first that matches counts
  "*.layer1.weight": [mp]         # dimension 0 by mp, the others whole
  "*.layer2.weight": [null, mp]   # dimension 1 by mp
  "*.layer3.weight": [[dp, mp]]   # dimension 0 by both, dp outermost
# What no rule matches is whole on every rank; optimizer states go with their
# weights. PyTorch's placements are understood too, one for each axis of the
# mesh: "*.layer1.weight": [shard(0), replicate]
# Over other axes of the same devices, as experts are:
# "*.experts.*": {mesh: {edp: 2, ep: 4}, layout: [ep]}

# Cut rows once more among the ranks that would hold the same, by MindSpore's
# own conditions: of 64 KB or more, as it is by default.
optimizer_parallel: true
parallel_optimizer_threshold: 1  # KB

# A pipeline: which stages have which tensors; each has such a mesh of its own.
# pipeline: {"*.layer[1-2].*": 0, "*.layer3.*": 1}

# Or, in place of mesh and rules, what the network's operators are given:
# devices: 8
# operators:
#   "*.layer1.weight": {matmul: [[2, 1], [1, 4]]}
"""


class _Make(Command):
    """A command that prints example rules if it gets no arguments."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Print example rules if there are no arguments, else parse them."""
        if not args and not ctx.resilient_parsing:
            click.echo(EXAMPLE, nl=False)
            ctx.exit()
        return super().parse_args(ctx, args)


@strategy.command(
    "make",
    cls=_Make,
    epilog="""
Examples:

  reshard strategy make rules.yaml -o dst_strategy.ckpt \\
      --like src_checkpoints --source-strategy src_strategy.ckpt
  reshard strategy make --like output/checkpoint -o strategy.ckpt

Without arguments it prints rules with comments, to begin with:

  reshard strategy make > rules.yaml
""",
    short_help="Make a strategy file without compiling the network.",
)
@click.argument("rules", type=READ, required=False)
@option(
    "--like",
    under="Source",
    in_short_help=True,
    type=READ_PLACE,
    required=True,
    metavar="CHECKPOINT",
    help="The checkpoint that has the tensors' names, shapes and dtypes. Without RULES also their layouts.",
)
@source_options
@_output
@overwrite_file_option
@option(
    "--predict",
    under="Tensors",
    in_short_help=True,
    is_flag=True,
    help="Leave out optimizer states, which a network for prediction lacks.",
)
@drop_option("Without RULES: tensors that are left out of the strategy. May be repeated.")
def make_strategy(
    rules: Path | None,
    like: Place,
    opening: OpenOptions,
    output: Path,
    overwrite: bool,
    predict: bool,
    drop: tuple[str, ...],
) -> None:
    """Make a strategy file from RULES, a YAML file, without compiling the network.

    Tensors that no rule matches are whole on every device of a stage; optimizer states go with their weights. The
    training's state (global_step and the like) is left out unless a rule gives it a layout.

    Without RULES it is the strategy of the checkpoint itself, such as a Checkpoint 2.0.
    """
    from reshard.core.model.holdings import strategy_by_rules
    from reshard.core.open import files_read

    if rules is None and predict:
        raise UsageError("--predict needs RULES", code="no-effect", hint="leave --predict out")
    if rules is not None and drop:
        raise UsageError("--drop is for a strategy without RULES", code="no-effect", hint="leave --drop out")
    refuse_existing(output, overwrite=overwrite)
    if rules is None:
        _refuse_unknown_layout(like, opening)
    checkpoint = open_checkpoint(like, **vars(opening), **({} if rules else {"contents": False}))
    refuse_inputs([output], files_read(like, checkpoint.files), "one of the files of the checkpoint")
    if rules is None:
        result = strategy_of(checkpoint, drop=drop)
        say_warnings([*checkpoint.warnings, *_unread_by_mindspore(result, output)])
    else:
        result = strategy_by_rules(as_place(rules), checkpoint, predict=predict)
        say_warnings(_uncut(rules, result, checkpoint))
    reshard.write_strategy(result, output)
    _say_written(result, output)


def _refuse_unknown_layout(checkpoint: Place, opening: OpenOptions) -> None:
    """Refuse a checkpoint that does not say itself which rank holds which block.

    Raises:
        SourceError: its ledger does, and a file changed since.
        UsageError: nothing says it.
    """
    from reshard.core.open import is_described, ledger_layout
    from reshard.core.records.made import changed_text

    if not checkpoint.is_dir() or is_described(checkpoint):
        return
    is_known, change = ledger_layout(checkpoint, opening.cipher)
    if change:
        raise SourceError(changed_text(checkpoint, change), code="source-changed")
    if not is_known:
        raise UsageError(
            f"{checkpoint} does not say which rank holds which block", code="no-strategy",
            facts=["a Checkpoint 2.0 does, and what reshard wrote with a strategy"], hint="add RULES",
        )  # fmt: skip


def _unread_by_mindspore(result: Strategy, output: Path) -> list[str]:
    """Return a warning if a JSON file would have nested layouts, which MindSpore 2.10 does not read."""
    nested = [
        name for name, (placed, *_) in result.tensors.items() if any(len(axes) > 1 for axes in placed.layout.tensor_map)
    ]
    if not nested or output.suffix != ".json":
        return []
    advice = "MindSpore 2.10 does not read such JSON; give a name that does not end with .json for it"
    return [f"{output}: has nested layouts, as that of {nested[0]}; {advice}"]


def _uncut(rules: Path, result: Strategy, checkpoint: Checkpoint) -> list[str]:
    """Return a warning if rules ask for optimizer parallel, and it cuts no tensor."""
    top = read_yaml(as_place(rules), "rules file", Faults(str(rules)))
    is_cut = any(placed.layout.opt_weight_shard_size for places in result.tensors.values() for placed in places)
    if is_cut or not (isinstance(top, dict) and top.get("optimizer_parallel")):
        return []
    largest = max(checkpoint.tensors[name].spec.nbytes for name in result.tensors)
    threshold = top.get("parallel_optimizer_threshold", 64)
    text = f"optimizer_parallel cut nothing: it cuts weights of {threshold} KB or more (parallel_optimizer_threshold), "
    return [f"{text}if devices that hold copies can share their rows; the largest has {bytes_text(largest)}"]


@strategy.command(
    "diff",
    epilog="""
Example:

  reshard strategy diff src_strategy.ckpt dst_strategy.ckpt

Exits with 0 if every rank holds the same blocks, and with 3 if not.
""",
    details="""
The object of --json has the keys same, ranks_a, ranks_b, only_a, only_b (name,
stage), blocks and fields (name, stage, a, b).
""",
    short_help="Compare two strategies.",
)
@click.argument("a", type=STRATEGY)
@click.argument("b", type=STRATEGY)
@json_option
def diff_strategies(a: Path, b: Path, as_json: bool) -> None:
    """Compare the strategies A and B: tensors that only one names, and layouts that differ.

    Layouts that are only written differently are reported, and are no difference.
    """
    result = reshard.read_strategy(a).diff(reshard.read_strategy(b))
    error = None if result.same else VerifyError(f"{a} and {b} are not the same strategy", code="other-strategy")
    if as_json:
        print_json(_diff_data(result), error)
    else:
        print_text("\n".join(_diff_lines(result, (str(a), str(b)))))
    if error:
        raise error


def _diff_lines(diff: Diff, titles: tuple[str, str]) -> Iterable[str]:
    from reshard.strategy.names import group_names
    from reshard.view.text import count_text
    from reshard.view.words import layout_words, raw_text

    def words_of(layout: Layout, counterpart: Layout) -> str:
        words = layout_words(layout)  # without the order of the ranks that hold the blocks
        return f"{words}   # {raw_text(layout)}" if words == layout_words(counterpart) else words

    a, b = diff.a, diff.b
    if a.ranks != b.ranks:
        yield f"A is for {count_text(len(a.ranks), 'rank')}, B for {len(b.ranks)}"
    for title, path, strategy, only in (("A", titles[0], a, diff.only_a), ("B", titles[1], b, diff.only_b)):
        if only:
            yield f"only in {title} ({printable(path)}):"
            yield from (f"  {printable(name)}{_stage(strategy, stage)}" for name, stage, _ in group_names(only))
    for title, changes in (("other blocks", diff.blocks), ("the same blocks, written otherwise", diff.fields)):
        groups: dict[tuple[int, str, str], list[LayoutChange]] = {}
        for change in changes:
            groups.setdefault((change.stage, words_of(change.a, change.b), words_of(change.b, change.a)), []).append(
                change
            )
        for (stage, first, second), group in groups.items():
            yield f"{title}{_stage(a, stage)}:"
            yield f"  A {first}"
            yield f"  B {second}"
            yield from (f"    {printable(name)}" for name, _, _ in group_names((change.name, None) for change in group))
    if diff.same:
        yield f"every rank holds the same blocks of {count_text(len(a.tensors), 'tensor')}"


def _stage(strategy: Strategy, stage: int) -> str:
    return f", stage {stage}" if stage or len(strategy.stages) > 1 else ""


def _diff_data(diff: Diff) -> dict[str, object]:
    from reshard.view.words import layout_data

    def changes(group: Iterable[LayoutChange]) -> list[dict[str, object]]:
        return [{"name": c.name, "stage": c.stage, "a": layout_data(c.a), "b": layout_data(c.b)} for c in group]

    return {
        "same": diff.same,
        "ranks_a": list(diff.a.ranks),
        "ranks_b": list(diff.b.ranks),
        "only_a": [{"name": name, "stage": stage} for name, stage in diff.only_a],
        "only_b": [{"name": name, "stage": stage} for name, stage in diff.only_b],
        "blocks": changes(diff.blocks),
        "fields": changes(diff.fields),
    }


def _say_written(written: Strategy, output: Path) -> None:
    from reshard.view.text import count_text

    wrote()
    print_text(
        f"wrote {printable(output)}: {count_text(len(written.tensors), 'tensor')} over "
        f"{count_text(len(written.ranks), 'rank')} in {count_text(len(written.stages), 'stage')}"
    )
