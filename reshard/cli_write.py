"""`reshard transform`, `unify` and `convert`: the commands that write checkpoints."""

from __future__ import annotations

import os
import shlex
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import click

import reshard
from reshard.cli_options import (
    PATH,
    Running,
    drop_option,
    memory_option,
    rank_pattern_option,
    run_options,
    selection_options,
    size,
    source_options,
    suffix_option,
    target_options,
)
from reshard.errors import SourceError, TargetError, names
from reshard.formats.unified import SET_FILES
from reshard.terminal import Command, called_as, print_json, progress, say, say_notices

if TYPE_CHECKING:
    from pathlib import Path

    from reshard.plan import Plan
    from reshard.selection import Selection

KEYS = """
The object of --json has the keys dry_run, source, target, format, ranks,
tensors, bytes_needed, bytes_read, bytes_written (contents), target_bytes (whole
files), source_files, target_files, tasks, peak_memory, read_amplification,
seconds (null in a dry run), dropped, missing, notices, files: rank, path,
nbytes; replicas, links, measured_memory, checksums, and verify: the command to
type.
"""


@click.command(
    cls=Command,
    epilog=f"""
Example:

  reshard transform src_checkpoints dst_checkpoints \\
      --source-strategy src_strategy.ckpt --target-strategy dst_strategy.ckpt
{KEYS}""",
    short_help="Write a checkpoint anew, cut as another strategy says.",
)
@click.argument("source", type=PATH)
@click.argument("target", type=PATH)
@source_options
@target_options
@selection_options
@run_options
def transform(
    source: Path,
    target: Path,
    source_strategy: Path | None,
    target_strategy: Path | None,
    planning: dict[str, Any],
    selection: Selection,
    running: Running,
    **reading: Any,
) -> None:
    """Write the checkpoint SOURCE anew below TARGET, cut as another strategy says.

    SOURCE is a directory of rank_0, rank_1 and so on, a unified set, or one file of whole tensors. Target files are
    TARGET/rank_0/checkpoint_0.ckpt and so on; those that exist are refused without --overwrite.
    """
    checkpoint = reshard.open(source, strategy=source_strategy, **reading)
    wanted = reshard.read_strategy(target_strategy) if target_strategy else None
    plan = reshard.plan(checkpoint, wanted, selection=selection, **planning)
    if not carry_out(plan, target, running, _verify(target, source, target_strategy, source_strategy)):
        return
    options = ["--source-strategy", str(target_strategy)] if target_strategy else []
    if options and (planning["ranks"] is not None or checkpoint.part is not None):
        options.append("--partial")
    propose(target, [*options, *_told_apart(plan, target, f"rank_{{rank}}/{planning['prefix']}{{rank}}*")])


@click.command(
    cls=Command,
    epilog=f"""
Example:

  reshard unify src_checkpoints weights --source-strategy src_strategy.ckpt \\
      --style huggingface --weights-only --cast float32=bfloat16
{KEYS}""",
    short_help="Write whole tensors, in a few safetensors files and an index.",
)
@click.argument("source", type=PATH)
@click.argument("target", type=PATH)
@source_options
@click.option(
    "--style",
    type=click.Choice(["mindspore", "huggingface"]),
    default="mindspore",
    show_default=True,
    help="Names of the files: part0.safetensors and param_name_map.json, or model-00001-of-00002.safetensors and "
    "model.safetensors.index.json.",
)
@click.option(
    "--max-shard-size",
    default="4GB",
    show_default=True,
    callback=size,
    metavar="SIZE",
    help="The most bytes of tensors in a file, unless one tensor is larger.",
)
@memory_option
@selection_options
@run_options
def unify(
    source: Path,
    target: Path,
    source_strategy: Path | None,
    style: str,
    max_shard_size: int,
    memory: int | None,
    selection: Selection,
    running: Running,
    **reading: Any,
) -> None:
    """Write the whole tensors of the checkpoint SOURCE into a few files in TARGET, with an index of them.

    In MindSpore's style, what the strategy does not name goes into hyper_param.safetensors.
    """
    checkpoint = reshard.open(source, strategy=source_strategy, **reading)
    files = (reshard.MindSporeSet if style == "mindspore" else reshard.HuggingFaceSet)(max_shard_size)
    plan = reshard.plan(checkpoint, format="safetensors", files=files, selection=selection, memory=memory)
    refuse_another_set(plan, target)
    if carry_out(plan, target, running, _verify(target, source, None, source_strategy)):
        propose(target, [])


@click.command(
    cls=Command,
    epilog=f"""
Example:

  reshard convert src_checkpoints src_safetensors --format safetensors
  reshard convert net.ckpt net.safetensors --format safetensors
{KEYS}""",
    short_help="Write every file anew in another format.",
)
@click.argument("source", type=PATH)
@click.argument("target", type=PATH)
@click.option("--format", type=click.Choice(["ckpt", "safetensors"]), required=True, help="Of the target files.")
@rank_pattern_option
@suffix_option
@drop_option("Entries that may be left out because they cannot be converted. May be repeated.")
@run_options
def convert(
    source: Path,
    target: Path,
    format: str,
    rank_pattern: str,
    suffix: str | None,
    drop: tuple[str, ...],
    running: Running,
) -> None:
    """Write every file of the checkpoint SOURCE anew below TARGET in another format; nothing is cut or joined.

    Files keep their places and names but for the extension. Where SOURCE is one file, TARGET is one too. No strategy is
    needed.
    """
    from reshard.convert import plan_convert

    directory, name = target, None
    if source.is_file():
        if target.is_dir():
            raise TargetError(f"{target}: is a directory; expected the name of a file, because {source} is one")
        directory, name = target.parent, target.name
    plan = plan_convert(source, format, name=name, rank_pattern=rank_pattern, suffix=suffix, drop=drop)
    if carry_out(plan, directory, running):
        pattern = ["--rank-pattern", rank_pattern] if rank_pattern != _default_pattern() else []
        propose(target, pattern or ([] if name else _told_apart(plan, target)))


def _default_pattern() -> str:
    from reshard.rank_files import RANK_PATTERN

    return RANK_PATTERN


def carry_out(plan: Plan, target: Path, running: Running, verify: str | None = None) -> bool:
    """Run a plan, or tell what it would do; return whether there is something to look at, and a reader of text.

    Args:
        plan: what to do.
        target: the directory of the target files.
        running: the options.
        verify: the command that verifies the result, for the report.
    """
    from reshard import report, show

    if not running.quiet:
        say_notices(plan.notices)
    if running.dry_run:
        existing = 0 if running.overwrite or running.quiet else _existing(plan, target)
        if existing:
            say_notices([f"{show.count_text(existing, 'target file')} would be in the way; a run needs --overwrite"])
        if running.as_json:
            print_json(report.report_data(plan, str(target)))
        else:
            click.echo(show.plan_text(plan, str(target)))
        return False
    try:
        with progress(quiet=running.quiet) as shown:
            done = plan.run(
                target,
                scheduler=running.scheduler,
                threads=running.threads,
                fsync=running.fsync,
                drop_cache=running.drop_cache,
                overwrite=running.overwrite,
                progress=shown,
            )
    except KeyboardInterrupt as stopped:
        finished = 0 if running.overwrite else _existing(plan, target)
        hint = f"; it needs --overwrite, because {show.count_text(finished, 'file')} got finished" if finished else ""
        stopped.add_note(f"unfinished files are removed; the same command starts from the beginning{hint}")
        raise
    if running.as_json:
        print_json(report.report_data(plan, str(target), done, verify))
    elif not running.quiet:
        click.echo(report.report_text(plan, done, verify))
    return not (running.as_json or running.quiet)


def _verify(target: Path, source: Path, target_strategy: Path | None, source_strategy: Path | None) -> str:
    """Return the command that verifies what was written."""
    from reshard.report import verify_command

    return verify_command(
        called_as(),
        str(target),
        str(source),
        target_strategy=None if target_strategy is None else str(target_strategy),
        source_strategy=None if source_strategy is None else str(source_strategy),
    )


def refuse_another_set(plan: Plan, target: Path) -> None:
    """Refuse a directory in which something of an older set would be taken for a part of this one."""
    planned = {file.path for file in plan.files}
    other = [name for name in SET_FILES if name not in planned and os.path.lexists(target / name)]
    if other:
        raise TargetError(f"{target}: has {names(other)} of another set; choose another directory, or remove it")


def _existing(plan: Plan, target: Path) -> int:
    return sum(os.path.lexists(target / file.path) for file in plan.files)


def propose(target: Path, options: list[str]) -> None:
    """Say how to look at what was written."""
    say(f"to look at it: {called_as()} {shlex.join(['inspect', str(target), *options])}")


def _told_apart(plan: Plan, target: Path, pattern: str | None = None) -> list[str]:
    """Return the options that find what was written, where other checkpoints are in the same directories."""
    from reshard.rank_files import RANK_PATTERN, rank_files

    written = {file.rank: target / file.path for file in plan.files}
    extension = PurePath(plan.files[0].path).suffix
    tries: list[tuple[list[str], str, str | None]] = [
        ([], RANK_PATTERN, None),
        (["--suffix", extension], RANK_PATTERN, extension),
    ]
    if pattern:
        tries.append((["--rank-pattern", pattern + extension], pattern + extension, None))
    for options, rank_pattern, suffix in tries:
        try:
            found = rank_files(target, rank_pattern, suffix, [])
        except SourceError:
            continue
        if all(found.get(rank) == [path] for rank, path in written.items()):
            return options
    return []
