"""The command line: `reshard`, `python -m reshard`, and `dask reshard`.

Data goes to stdout, messages and progress to stderr. Heavy modules are imported inside the commands, so that `--help`
is quick. Errors, signals and exit codes are in `cli.terminal`, progress in `view.progress`.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from reshard.cli.commands import RootGroup, option
from reshard.cli.options import json_option, source_options
from reshard.cli.selection import rules_options
from reshard.cli.terminal import (
    OWN_PROCESS,
    called_as,
    print_csv,
    print_json,
    print_picture,
    print_text,
    say_warnings,
    width,
    wrote,
)
from reshard.cli.values import READ_PLACE, TARGET
from reshard.core.open import open as open_checkpoint
from reshard.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.core.listing import OpenOptions
    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.storage.places import Place
    from reshard.rules.rules import Rules


_HOMES = {
    "average": "reshard.cli.write:average",
    "completion": "reshard.cli.groups.about:completion",
    "help": "reshard.cli.groups.about:help_command",
    "version": "reshard.cli.groups.about:version",
    "convert": "reshard.cli.write:convert",
    "diff": "reshard.cli.groups.computing:diff",
    "plan": "reshard.cli.plan:plan",
    "run": "reshard.cli.plan:run",
    "rules": "reshard.cli.groups.rules:rules",
    "formats": "reshard.cli.groups.lists:formats",
    "runs": "reshard.cli.groups.lists:runs",
    "stats": "reshard.cli.groups.computing:stats",
    "strategy": "reshard.cli.groups.strategy:strategy",
    "verify": "reshard.cli.verify:verify",
}


_SECTIONS = {
    "Convert": ("convert", "average", "plan", "run"),
    "Look": ("inspect", "runs", "stats", "formats"),
    "Check": ("verify", "diff"),
    "Describe": ("strategy", "rules"),
    "Learn": ("demo", "help", "version"),
}


def _show_version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    """Print the version and exit; with --verbose, also of dependencies.

    --verbose is eager, so it is already parsed.
    """
    if value and not ctx.resilient_parsing:
        from reshard.cli.groups.about import print_versions  # not on every start

        print_versions(verbose=ctx.params["verbose"])
        ctx.exit()


@click.group(
    name="reshard",
    cls=RootGroup,
    epilog="""
To see it work on real MindSpore files, and what to type next:

  reshard demo

Environment variables, such as RESHARD_MEMORY: reshard help environment
""",
    homes=_HOMES,
    sections=_SECTIONS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option("--version", is_flag=True, expose_value=False, callback=_show_version, help="Show the version and exit.")
@click.option("--verbose", is_flag=True, is_eager=True, help="With --version: of Python and the libraries too.")
def cli(verbose: bool) -> None:
    """Turn the sharded checkpoint of M devices into that of N devices, from the files alone.

    No framework and no accelerator is needed, and no tensor is ever whole in memory.
    """
    if verbose:
        raise UsageError(
            "--verbose is for --version alone",
            code="missing-option",
            hint="after the name of a command it is its own",
        )
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads are not needed, and spin while idle


@cli.command(
    epilog="""
Example:

  reshard inspect src_checkpoints --source-strategy src_strategy.ckpt
""",
    details="""
The object of --json has the keys source, step (of several checkpoints the
newest is read: name, and which are older), ranks, files (rank, path, format,
nbytes), nbytes, warnings, sampled (tensors, of_tensors, copies, whole,
of_copies: what was looked at), unreadable, bound (only a checkpoint of the
same format can have them), objects (the beginning of each), training (what
its files say: iteration, optimizer and others), totals (kind, dtype, tensors,
parameters, nbytes), iterations (of a run's directory: the checkpoints, as
`reshard runs` has them), and tensors: name, dtype, shape, nbytes, stacked
(what the first dimensions count), layouts, shards. For the files of ranks
without a strategy it has source, step, ranks, files, warnings, and groups of
ranks that hold the same: ranks, totals, unreadable, tensors.

The rows of --csv have name, kind (weights, a prefix of the optimizer's states,
other), dtype, shape, parameters (the numbers in it), nbytes, layout, blocks,
replicas; without a strategy ranks in front, and none of the last three.
""",
    short_help="Show the tensors of a checkpoint.",
)
@click.argument("source", type=READ_PLACE)
@source_options
@rules_options
@option(
    "--match",
    under="Tensors",
    in_short_help=True,
    multiple=True,
    metavar="GLOB",
    help="Only tensors of these names, such as 'layers.0.*'. May be repeated.",
)
@option(
    "--sort",
    under="Output",
    in_short_help=True,
    type=click.Choice(["bytes", "name"]),
    help="Largest first, or by name.  [default: the order of the files]",
)
@option(
    "--picture",
    under="Output",
    in_short_help=True,
    is_flag=False,
    flag_value="",
    metavar="[NAME]",
    help="Draw which ranks hold which block: of this tensor, or of all.",
)
@json_option
@option(
    "--csv",
    "as_csv",
    under="Output",
    in_short_help=True,
    is_flag=True,
    help="Print a row for each tensor, as RFC 4180.",
)
def inspect(
    source: Place,
    opening: OpenOptions,
    rules: Rules | None,
    match: tuple[str, ...],
    sort: str | None,
    picture: str | None,
    as_json: bool,
    as_csv: bool,
) -> None:
    """Show the tensors of the checkpoint SOURCE: shapes, dtypes, bytes, layouts, and sums.

    Headers are read, and with a strategy samples of the contents. Repeated layers share one row, with their
    bytes: layers.{0-31}.wq.weight. Without a strategy, files of ranks are shown as they are.
    """
    from reshard.core.catalog import iterations_at
    from reshard.core.open import has_several_ranks, ledger_layout, read_headers
    from reshard.core.rank_files import rank_of
    from reshard.core.records.made import changed_text
    from reshard.view.pages.runs_view import Runs, runs_data, runs_text
    from reshard.view.pictures.characters import picture_text
    from reshard.view.tables import (
        checkpoint_data,
        checkpoint_text,
        chosen,
        in_order,
        rank_files_data,
        rank_files_text,
        rank_parts,
        table_rows,
    )

    if as_json and as_csv:
        raise UsageError("--json and --csv exclude each other", code="conflicting-options", hint="leave one out")
    if picture is not None and (as_json or as_csv):
        raise UsageError("--picture is drawn for a terminal", hint="leave out --json or --csv", code="bad-options")
    iterations = iterations_at(source) if opening.step is None else []
    if iterations and not (as_json or as_csv):  # even if no iteration can be opened
        print_text(f"{runs_text(Runs(str(source), iterations), width=width())}\n")
    unruled = opening.strategy is None and not opening.layouts and opening.stage is None
    is_known, change = False, ""
    if unruled and not {"rank_pattern", "suffix"} & {*opening.given}:
        is_known, change = ledger_layout(source, opening.cipher)
    if rules is None and unruled and not is_known and has_several_ranks(source, opening.rank_pattern, opening.suffix):
        files, ranks, warnings, step, _ = read_headers(source, **opening.of_files)
        warnings += [changed_text(source, change)] if change else []
        warnings.append("shapes are those in the files of each rank; --source-strategy shows whole tensors")
        parts, whole = rank_parts(str(source), files, ranks, step), False
    else:
        checkpoint = open_checkpoint(source, **vars(opening))
        checkpoint = rules.derived(checkpoint).checkpoint if rules else checkpoint
        warnings, whole = list(checkpoint.warnings), not checkpoint.opening.lone_rank
        rank_dir = None if whole else rank_of(source)
        ranks = (rank_dir.rank,) * len(checkpoint.files) if rank_dir else checkpoint.ranks
        parts = [replace(checkpoint, ranks=ranks)]
    say_warnings(warnings)
    parts = chosen(parts, match)
    if picture is not None:
        print_picture(partial(picture_text, _pictured(parts[0], picture)))
    elif as_csv:
        print_csv(table_rows([in_order(part, sort) for part in parts], whole=whole))
    elif as_json:
        parts = [in_order(part, sort) for part in parts]
        print_json(
            {**checkpoint_data(parts[0]), "iterations": runs_data(iterations)}
            if whole
            else rank_files_data(parts, warnings)
        )
    elif whole:
        print_text(checkpoint_text(parts[0], sort=sort, width=width()))
    else:
        print_text(rank_files_text(parts, sort=sort, width=width()))


def _pictured(checkpoint: Checkpoint, name: str) -> Checkpoint:
    """Return a checkpoint of one tensor, or of all if there is no name."""
    from reshard.strategy.names import no_match

    if not name:
        return checkpoint
    if name not in checkpoint.tensors and name not in checkpoint.unreadable:
        raise UsageError(f"--picture {name}: {no_match(name, checkpoint.tensors)}", code="unknown-tensor")
    checkpoint.require(name)
    return replace(checkpoint, tensors={name: checkpoint.tensors[name]})


@cli.command(
    epilog="""
Examples:

  reshard demo
  reshard demo training
""",
    short_help="Make, convert and check a small example.",
)
@click.argument("name", default="mindspore", required=False)
@click.argument("directory", type=TARGET, required=False)
def demo(name: str, directory: Path | None) -> None:
    """Make the checkpoint NAME (default: mindspore) in DIRECTORY (default: reshard-demo, or reshard-demo-NAME).

    mindspore is the example of MindSpore's tutorial: 8 ranks become 4, and each byte is compared with numpy slices.
    training is for the guides; torchtitan, large and 70b are for the notebooks. If an earlier demo made DIRECTORY,
    its files are replaced; other files stay.
    """
    from reshard.cli.groups.demo import demo as run_demo

    wrote()  # file after file
    run_demo(name, directory, print_text, command=called_as())


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    # Imported modules and plans are not garbage; scanning them takes a tenth of a short command's time.
    gc.set_threshold(100_000)
    atexit.register(gc.freeze)
    if sys.stdout is None:  # closed by the caller
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 -- until the exit
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # names may have characters that the terminal's encoding lacks
            stream.reconfigure(errors="backslashreplace")
    cli.main(args=None if arguments is None else list(arguments), prog_name="reshard", obj=OWN_PROCESS)
    raise AssertionError("unreachable: click exits")
