"""The command line: `reshard`, `python -m reshard`, and `dask reshard`.

Data goes to stdout, talk and progress to stderr. Heavy modules are imported inside the commands, so that `--help` is
quick. Errors, signals, exit codes and progress are in `reshard.terminal`.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import click

import reshard
from reshard.cli_options import PATH, json_option, rank_list, source_options
from reshard.cli_strategy import strategy
from reshard.terminal import Border, print_json, progress, say, say_notices

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from reshard.plan import Plan


@click.group(
    name="reshard",
    cls=Border,
    epilog="""
To see it work on real MindSpore files, and what to type then:

  reshard demo
""",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(reshard.__version__, prog_name="reshard")
def cli() -> None:
    """Cut and join sharded checkpoints of M devices anew for N devices, from the files alone.

    No framework and no accelerator is needed, and no tensor is ever whole in memory.
    """


@cli.command(
    epilog="""
Example:

  reshard transform src_checkpoints dst_checkpoints \\
      --source-strategy src_strategy.ckpt --target-strategy dst_strategy.ckpt

The object of --json has the keys dry_run, source, target, format, ranks,
tensors, bytes_needed, bytes_read, bytes_written (contents), target_bytes (whole
files), source_files, target_files, tasks, peak_memory, read_amplification,
seconds (null in a dry run), dropped, missing, notices, and files: rank, path,
nbytes.
""",
    short_help="Write a checkpoint anew, cut as another strategy says.",
)
@click.argument("source", type=PATH)
@click.argument("target", type=PATH)
@source_options
@click.option(
    "--target-strategy",
    type=PATH,
    metavar="STRATEGY",
    help="Strategy file of the target. Without it, the target is one rank of whole tensors.",
)
@click.option(
    "--prefix", default="checkpoint_", show_default=True, help="Target files are rank_0/checkpoint_0.ckpt and so on."
)
@click.option(
    "--format", type=click.Choice(["ckpt", "safetensors"]), help="Of the target files.  [default: the source's]"
)
@click.option("--ranks", callback=rank_list, metavar="LIST", help="Only these ranks of the target, such as 0,3-5.")
@click.option("--drop", multiple=True, metavar="GLOB", help="Weights that the target may lack. May be repeated.")
@click.option(
    "--allow-missing", multiple=True, metavar="GLOB", help="Weights that the source may lack. May be repeated."
)
@click.option("--dry-run", is_flag=True, help="Print what would be read and written, and write nothing.")
@click.option("--overwrite", is_flag=True, help="Replace target files that exist.")
@click.option(
    "--fsync/--no-fsync", default=True, help="Have each file on the disk before it gets its name.  [default: yes]"
)
@click.option(
    "--threads", type=click.IntRange(min=1), metavar="N", help="How many.  [default: one a processor, at most 4]"
)
@click.option(
    "--scheduler", type=click.Choice(["threads", "synchronous"]), help="Of the dask graph.  [default: threads]"
)
@json_option
@click.option("-q", "--quiet", is_flag=True, help="Say nothing but errors.")
def transform(
    source: Path,
    target: Path,
    source_strategy: Path | None,
    target_strategy: Path | None,
    prefix: str,
    format: str | None,
    ranks: tuple[int, ...] | None,
    drop: tuple[str, ...],
    allow_missing: tuple[str, ...],
    dry_run: bool,
    overwrite: bool,
    fsync: bool,
    threads: int | None,
    scheduler: str | None,
    as_json: bool,
    quiet: bool,
    **reading: Any,
) -> None:
    """Write the checkpoint SOURCE anew below TARGET, cut as another strategy says.

    SOURCE is a directory of rank_0, rank_1 and so on, or one file of whole tensors. Target files are
    TARGET/rank_0/checkpoint_0.ckpt and so on; those that exist are refused without --overwrite.
    """
    from reshard import show

    checkpoint = reshard.open(source, strategy=source_strategy, **reading)
    wanted = reshard.read_strategy(target_strategy) if target_strategy else None
    plan = reshard.plan(
        checkpoint,
        wanted,
        format=format,
        prefix=prefix,
        ranks=ranks,
        drop=drop,
        allow_missing=allow_missing,
    )
    if not quiet:
        say_notices(plan.notices)
    if dry_run:
        existing = 0 if overwrite or quiet else _existing(plan, target)
        if existing:
            say_notices([f"{show.count_text(existing, 'target file')} would be in the way; a run needs --overwrite"])
        if as_json:
            print_json(show.plan_data(plan, str(target)))
        else:
            click.echo(show.plan_text(plan, str(target)))
        return
    try:
        with progress(quiet=quiet) as shown:
            report = plan.run(
                target, scheduler=scheduler, threads=threads, fsync=fsync, overwrite=overwrite, progress=shown
            )
    except KeyboardInterrupt as stopped:
        finished = 0 if overwrite else _existing(plan, target)
        hint = f", with --overwrite because {show.count_text(finished, 'file')} got finished" if finished else ""
        stopped.add_note(f"unfinished files are removed; to go on, type the same command again{hint}")
        raise
    if as_json:
        print_json(show.plan_data(plan, str(target), report))
    elif not quiet:
        click.echo(show.report_text(plan, report))
        say(f"to look at it: {_inspect_command(target, None if ranks else target_strategy)}")


def _existing(plan: Plan, target: Path) -> int:
    return sum(os.path.lexists(target / file.path) for file in plan.files)


def _inspect_command(target: Path, strategy: Path | None) -> str:
    import shlex

    option = ["--source-strategy", str(strategy)] if strategy else []
    return shlex.join(["reshard", "inspect", str(target), *option])


@cli.command(
    epilog="""
Example:

  reshard inspect src_checkpoints --source-strategy src_strategy.ckpt

The object of --json has the keys source, ranks, files (rank, path, format,
nbytes), nbytes, notices, unreadable, and tensors: name, dtype, shape, nbytes,
layouts, shards. For several ranks without a strategy it has source, ranks,
files, and groups: ranks, tensors.
""",
    short_help="Show the tensors of a checkpoint.",
)
@click.argument("source", type=PATH)
@source_options
@json_option
def inspect(source: Path, source_strategy: Path | None, as_json: bool, **reading: Any) -> None:
    """Show the tensors of the checkpoint SOURCE: shapes, dtypes, bytes, layouts. Reads headers only.

    Repeated layers are one row: layers.{0-31}.wq.weight. The bytes are those of the whole tensors, of
    all that the row stands for. Without a strategy, several ranks are shown as their files are.
    """
    from reshard import show
    from reshard.source import read_headers

    layouts = reading.pop("layouts")
    if source_strategy is None and not layouts:
        files, ranks, notices = read_headers(source, **reading)
        if len(set(ranks)) > 1:
            say_notices(
                [*notices, "these are shapes of parts; a strategy (--source-strategy) would tell the whole tensors"]
            )
            if as_json:
                print_json(show.rank_files_data(str(source), files, ranks))
            else:
                click.echo(show.rank_files_text(str(source), files, ranks))
            return
    checkpoint = reshard.open(source, strategy=source_strategy, layouts=layouts, **reading)
    say_notices(checkpoint.notices)
    if as_json:
        print_json(show.checkpoint_data(checkpoint))
    else:
        click.echo(show.checkpoint_text(checkpoint))


cli.add_command(strategy)


@cli.command(
    epilog="""
Example:

  reshard demo
""",
    short_help="Make, transform and check a small example.",
)
@click.argument("directory", type=PATH, default="reshard-demo", required=False)
def demo(directory: Path) -> None:
    """Make the tutorial's case in DIRECTORY (default: reshard-demo), transform it and check every byte.

    8 ranks that MindSpore saved become 4 ranks with optimizer parallel; each byte of the result is held
    against numpy slices of the whole tensors. It then tells what to type next.
    """
    from reshard.demo import demo as run_demo
    from reshard.show import printable

    run_demo(directory, lambda line: click.echo(printable(line, keep="\n")))


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # names may be of any script, terminals may not
            stream.reconfigure(errors="backslashreplace")
    cli.main(args=None if arguments is None else list(arguments), prog_name="reshard")
    raise AssertionError("unreachable: click exits")
