"""`reshard plan` and `run`: plan here, run there."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import click

import reshard
from reshard.cli.commands import Command, option
from reshard.cli.options import (
    READ,
    TARGET,
    WRITE,
    Running,
    StyleType,
    json_option,
    key_option,
    noting_swap,
    run_options,
    selection_options,
    size,
    source_options,
    target_key_option,
    target_options,
)
from reshard.cli.terminal import called_as, print_json, print_text, say, say_warnings, wrote
from reshard.cli.write import KEYS, carry_out, key_typed
from reshard.errors import UsageError
from reshard.storage.small import refuse_existing

if TYPE_CHECKING:
    from pathlib import Path

    from reshard.plan.plan import Plan
    from reshard.plan.select import Selection
    from reshard.storage.cipher import Cipher
    from reshard.storage.places import Place


@click.command(
    cls=Command,
    epilog="""
Example:

  reshard plan src_checkpoints --source-strategy src_strategy.ckpt \\
      --target-strategy dst_strategy.ckpt -o plan.json
""",
    details=KEYS,
    short_help="Show what a transformation would do, and save the plan.",
)
@click.argument("source", type=READ)
@click.argument("target", type=TARGET, required=False)
@option(
    "-o",
    "--output",
    under="Output",
    first=True,
    type=WRITE,
    metavar="FILE",
    help="Write the plan to FILE, for `reshard run`.",
)
@option("--overwrite", under="Output", first=True, is_flag=True, help="Replace FILE if it exists.")
@source_options
@target_options
@option(
    "--style",
    under="Target",
    first=True,
    type=StyleType(),
    help="The target is a set of whole tensors, as `reshard unify` writes it.",
)
@option(
    "--max-shard-size",
    under="Target",
    first=True,
    default="4GB",
    show_default=True,
    callback=size,
    metavar="SIZE",
    help="Most tensor bytes in a file of such a set. One tensor alone may have more.",
)
@selection_options
@json_option
@option("-q", "--quiet", under="Output", first=True, is_flag=True, help="Print nothing but errors.")
def plan(
    source: Path,
    target: Path | None,
    output: Path | None,
    overwrite: bool,
    source_strategy: Path | None,
    target_strategy: Path | None,
    planning: dict[str, Any],
    style: str | None,
    max_shard_size: int,
    selection: Selection,
    as_json: bool,
    quiet: bool,
    **reading: Any,
) -> None:
    """Show what `reshard transform` (or `unify`, with --style) would do to the checkpoint SOURCE.

    With -o the plan is saved, for `reshard run` here or on another machine that has the same files. The plan file holds
    no weights and no key. TARGET may be saved in it too, as a path below the directory in which it is run.
    """
    from reshard.plan import planfile as plan_file
    from reshard.view.data import report_data
    from reshard.view.text import plan_text

    if overwrite and output is None:
        raise UsageError("--overwrite is about the file of -o; give it too")
    if output is not None:
        refuse_existing(output, overwrite=overwrite)
        if target is not None:
            plan_file.check_directory(str(target))
    with noting_swap(source, source_strategy, target_strategy, reading):
        checkpoint = reshard.open(source, strategy=source_strategy, **reading)
    if style is None:
        wanted = reshard.read_strategy(target_strategy) if target_strategy else None
        made = reshard.plan(checkpoint, wanted, selection=selection, **planning)
    else:
        made = _unified(checkpoint, style, max_shard_size, selection, target_strategy, planning)
    if output is not None:
        plan_file.save(made, output, directory=None if target is None else str(target), overwrite=overwrite)
        wrote()
    if not quiet:
        say_warnings(made.warnings)
    directory = "TARGET" if target is None else str(target)
    if as_json:
        print_json(report_data(made, directory))
    elif not quiet:
        print_text(plan_text(made, directory))
        if output is not None:
            keys = key_typed("--key-file", "cipher") if made.source.cipher else ()
            words = ["run", str(output), *([] if target else ["TARGET"]), *map(str, keys)]
            say(f"saved; to run it: {called_as()} {shlex.join(words)}")


def _unified(
    checkpoint: reshard.Checkpoint,
    style: str,
    max_shard_size: int,
    selection: Selection,
    target_strategy: Path | None,
    planning: dict[str, Any],
) -> Plan:
    """Plan a unified set, for which the options of rank directories mean nothing."""
    others = [key for key in ("ranks", "remove_redundancy", "link_replicas") if planning[key]]
    others += ["target_strategy"] if target_strategy else []
    others += ["target_stage"] if planning["stage"] is not None else []
    others += ["format"] if planning["format"] not in {None, "safetensors"} else []
    if others:
        given = ", ".join(f"--{key.replace('_', '-')}" for key in others)
        raise UsageError(f"--style asks for a set of whole tensors in safetensors files; leave {given} out")
    files = (reshard.MindSporeSet if style == "mindspore" else reshard.HuggingFaceSet)(max_shard_size)
    some = {key: planning[key] for key in ("memory", "target_cipher")}
    return reshard.plan(checkpoint, format="safetensors", files=files, selection=selection, **some)


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
    first=True,
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

    The source must be what it was then: every file is compared by its size, everything in its header, and some pages of
    its contents (its time may differ). What would be written is compared with what was planned; if anything
    differs, nothing is written.
    """
    from reshard.plan.planfile import read

    saved = read(plan_file)
    if target is None:
        if saved.directory is None:
            raise UsageError(f"{plan_file} names no target; give it: reshard run {plan_file} TARGET")
        target = TARGET.convert(saved.directory, None, None)
    made = saved.plan(source, cipher=cipher, target_cipher=target_cipher, threads=running.threads)
    carry_out(made, target, running)
