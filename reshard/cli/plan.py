"""`reshard plan`, which saves a plan, and `reshard run`, which runs a saved one."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import click

from reshard.cli.carry import KEYS, carry_out, key_typed, print_plan
from reshard.cli.commands import Command, option
from reshard.cli.options import (
    Running,
    dequantize_option,
    json_option,
    key_option,
    overwrite_file_option,
    quiet_option,
    run_options,
    source_options,
    target_key_option,
    target_options,
    verbose_option,
)
from reshard.cli.selection import selection_options
from reshard.cli.terminal import called_as, say, say_warnings, wrote
from reshard.cli.values import READ, TARGET, WRITE
from reshard.core.plan.changes import refuse_unused
from reshard.core.storage.small import refuse_existing
from reshard.errors import UsageError
from reshard.view.progress import READING, phase

if TYPE_CHECKING:
    from pathlib import Path

    from reshard.api.asked import TargetOptions
    from reshard.core.listing import OpenOptions
    from reshard.core.plan.inputs import Selection
    from reshard.core.storage.cipher import Cipher
    from reshard.core.storage.places import Place


@click.command(
    cls=Command,
    epilog="""
Example:

  reshard plan src_checkpoints --source-strategy src_strategy.ckpt \\
      --target-strategy dst_strategy.ckpt -o plan.json
""",
    details=KEYS,
    short_help="Show what a conversion would do, and save the plan.",
)
@click.argument("source", type=READ)
@click.argument("target", type=TARGET, required=False)
@option(
    "-o",
    "--output",
    under="Output",
    in_short_help=True,
    type=WRITE,
    metavar="FILE",
    help="Write the plan to FILE, for `reshard run`.",
)
@overwrite_file_option
@source_options
@target_options
@dequantize_option
@selection_options
@json_option
@verbose_option
@quiet_option
def plan(
    source: Place,
    target: Place | None,
    output: Path | None,
    overwrite: bool,
    opening: OpenOptions,
    options: TargetOptions,
    dequantize: str | None,
    selection: Selection,
    as_json: bool,
    verbose: bool,
    quiet: bool,
) -> None:
    """Show what `reshard convert` would do to the checkpoint SOURCE.

    With -o the plan is saved, for `reshard run` here or on another machine that has the same files. The plan file holds
    no weights and no key. TARGET may be saved in it too, as a path below the directory in which it is run.
    """
    from reshard.api.jobs import job
    from reshard.core.plan import planfile as plan_file

    if overwrite and output is None:
        raise UsageError(
            "--overwrite is for the file of -o, and there is none", code="missing-option", hint="add -o FILE"
        )
    if output is not None:
        refuse_existing(output, overwrite=overwrite)
        if target is not None:
            plan_file.check_directory(str(target))
    with phase(READING, quiet=quiet or as_json):
        planned, directory, _, notes = job(source, target, opening, options, selection, dequantize=dequantize)
        refuse_unused(planned, selection, dequantize)
    if output is not None:
        saved = None if directory is None else str(directory)
        plan_file.save(planned, output, directory=saved, overwrite=overwrite)
        wrote()
    if not quiet:
        for note in notes:
            say(note)
        say_warnings(planned.warnings)
    then = None
    if output is not None:
        keys = key_typed("--key-file", "cipher") if planned.source.cipher else ()
        then = f"{called_as()} {shlex.join(['run', str(output), *([] if target else ['TARGET']), *map(str, keys)])}"
    if as_json or not quiet:
        print_plan(planned, str(directory or "TARGET"), as_json=as_json, verbose=verbose, then=then)


@click.command(
    cls=Command,
    epilog="""
Example:

  reshard run plan.json dst_checkpoints --source /mnt/src_checkpoints
""",
    details=KEYS,
    short_help="Carry out a saved plan.",
)
@click.argument("plan_file", type=READ, metavar="PLAN")
@click.argument("target", type=TARGET, required=False)
@option(
    "--source",
    under="Source",
    in_short_help=True,
    type=READ,
    metavar="SOURCE",
    help="Where the source is, if not where it was planned: a directory with the same files below it.",
)
@key_option
@target_key_option
@run_options
def run(
    plan_file: Path,
    target: Place | None,
    source: Path | None,
    cipher: Cipher | None,
    target_cipher: Cipher | None,
    running: Running,
) -> None:
    """Carry out the plan that `reshard plan` saved in the file PLAN, and write below TARGET.

    If the source is not what it was then, by sizes, headers and some pages of contents, nothing is written.
    """
    from reshard.core.plan.planfile import read

    saved = read(plan_file)
    if target is None:
        if saved.directory is None:
            raise UsageError(
                f"{plan_file} names no target", code="no-target", hint=f"{called_as()} run {plan_file} TARGET"
            )
        target = TARGET.convert(saved.directory, None, None)
    with phase(READING, quiet=running.quiet or running.as_json):
        planned = saved.plan(source, cipher=cipher, target_cipher=target_cipher, threads=running.threads)
    carry_out(planned, target, running)
