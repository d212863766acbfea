"""`reshard plan` and `run`, plan here and run there, and how every command that writes carries out its plan."""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

import reshard
from reshard.cli.commands import KEY_FILES, Command, option, refuse_to_write
from reshard.cli.options import (
    Running,
    json_option,
    key_option,
    max_shard_size_option,
    overwrite_file_option,
    quiet_option,
    run_options,
    source_options,
    target_key_option,
    target_options,
)
from reshard.cli.selection import selection_options
from reshard.cli.terminal import called_as, cluster_client, print_json, print_text, say, say_warnings, wrote
from reshard.cli.values import CHECKPOINT2, DCP, READ, TARGET, WRITE, noting_swap, refuse_store
from reshard.errors import ReshardError, SourceError, UsageError, names
from reshard.plan.make import plan as make_plan
from reshard.readers.open import files_read, made_at
from reshard.readers.open import open as open_checkpoint
from reshard.storage.places import as_place
from reshard.storage.small import refuse_existing, refuse_inputs
from reshard.view.progress import progress

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from reshard.plan.plan import Plan
    from reshard.plan.select import Selection
    from reshard.run.run import Report
    from reshard.source.checkpoint import Checkpoint
    from reshard.storage.cipher import Cipher
    from reshard.storage.places import Place
    from reshard.strategy.strategy import Strategy
    from reshard.targets.kinds import AnyFiles
    from reshard.targets.pattern import Pattern


KEYS = """
The object of --json has the keys dry_run, source, step (of several checkpoints
the newest is read: name, and which are older), target, format, encryption (its
mode, or null), ranks, tensors, bytes_needed, bytes_read, bytes_written
(contents), target_bytes (whole files), source_files, target_files, tasks,
peak_memory, partition, read_amplification, seconds (null in a dry run),
dropped, missing, left_out (by --weights-only, --include and --exclude), changes
(of names and values: kind, text, tensors, detail), warnings, sampled (what was
looked at when SOURCE was opened), files: rank, path, nbytes; replicas, links,
measured_memory, checksums, resumed, finished: how many files an earlier run had
finished, which were not read again; removed: those of earlier runs that
--overwrite or --restart removed; verify: the command to type (null where TARGET
alone is not enough); manifest: the command that checks it.
"""


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
@overwrite_file_option
@source_options
@target_options(
    "The target is a set of whole tensors, as `reshard unify` writes it. With --target-strategy or --layouts-of, "
    "checkpoint2 is one of blocks, as `reshard transform` writes it."
)
@max_shard_size_option
@selection_options
@json_option
@quiet_option
def plan(
    source: Path,
    target: Path | None,
    output: Path | None,
    overwrite: bool,
    source_strategy: Path | None,
    target_strategy: Path | None,
    planning: dict[str, Any],
    max_shard_size: int | None,
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
        raise UsageError("--overwrite is only for the file of -o; give that too")
    if target is not None:
        refuse_store(as_place(target))
    if output is not None:
        refuse_existing(output, overwrite=overwrite)
        if target is not None:
            plan_file.check_directory(str(target))
    with noting_swap(source, source_strategy, target_strategy, reading):
        checkpoint = open_checkpoint(source, strategy=source_strategy, **reading)
    made = made_plan(checkpoint, target_strategy, selection, planning, max_shard_size=max_shard_size)
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


def made_plan(
    checkpoint: Checkpoint,
    target_strategy: Path | Place | None,
    selection: Selection,
    planning: dict[str, Any],
    *,
    max_shard_size: int | None = None,
    threads: int | None = None,
) -> Plan:
    """Plan what the options of a target ask for (`target_options`)."""
    given = dict(planning)
    style, prefix, step, layouts_of, link = map(given.pop, ("style", "prefix", "target_step", "layouts_of", "link"))
    if link:
        return _linked(checkpoint, target_strategy, selection, planning, max_shard_size)
    if style != CHECKPOINT2 and given["format"] != DCP:
        refuse_options({"--target-step": step, "--layouts-of": layouts_of}, "--style checkpoint2 or --format dcp")
    if style not in {None, CHECKPOINT2}:
        return _unified(checkpoint, style, max_shard_size, selection, target_strategy, planning)
    if given["format"] != DCP and (not style or layouts_of or target_strategy):
        refuse_options({"--max-shard-size": max_shard_size}, "a set of whole tensors (--style), or --format dcp")
    if layouts_of and target_strategy:
        raise UsageError("--layouts-of and --target-strategy both say how tensors are cut; leave one out")
    if given["format"] == DCP:
        refuse_options({"--prefix": prefix, "--style": style}, "--format ckpt or safetensors")
        given["files"] = set_files(DCP, max_shard_size, None, step)
    elif style:
        given["files"] = set_files(style, max_shard_size, prefix, step)
    elif prefix is not None:
        given["prefix"] = prefix
    wanted: Strategy | Pattern | None = None
    if layouts_of:
        wanted = reshard.read_layouts(layouts_of)
    elif target_strategy:
        wanted = _wanted(as_place(target_strategy), checkpoint, selection)
    return make_plan(checkpoint, wanted, selection=selection, threads=threads, **given)


def _linked(
    checkpoint: Checkpoint,
    target_strategy: Path | Place | None,
    selection: Selection,
    planning: dict[str, Any],
    max_shard_size: int | None,
) -> Plan:
    """Plan a DCP of links, for which other options of targets mean nothing."""
    if planning["format"] != DCP:
        raise UsageError("--link: only for --format dcp; give that too, or leave --link out")
    given = {**planning, "target_strategy": target_strategy, "max_shard_size": max_shard_size}
    others = [f"--{key.replace('_', '-')}" for key, value in given.items() if value and key not in {"format", "link"}]
    if others:
        raise UsageError(f"--link keeps files and blocks as they are; leave {', '.join(others)} out, or --link")
    return make_plan(checkpoint, files=reshard.LinkedDCP(), selection=selection)


def _wanted(strategy: Place, checkpoint: Checkpoint, selection: Selection) -> Strategy:
    """Return the strategy of a target, read or made by rules for the tensors that it gets."""
    if strategy.suffix not in {".yaml", ".yml"}:
        return reshard.read_strategy(strategy)
    from reshard.plan.select import derived, select
    from reshard.source.strategies import strategy_by_rules

    checkpoint = derived(checkpoint, selection)
    kept = select(checkpoint, None, selection).kept
    return strategy_by_rules(strategy, checkpoint, target_names=dict(kept))


def refuse_options(given: Mapping[str, object], which: str) -> None:
    """Check that no option is given that is only for another kind of target.

    Raises:
        UsageError: one is.
    """
    some = [option for option, value in given.items() if value is not None]
    if some:
        raise UsageError(f"{', '.join(some)}: only for {which}; give that too, or leave {', '.join(some)} out")


def _unified(
    checkpoint: Checkpoint,
    style: str,
    max_shard_size: int | None,
    selection: Selection,
    target_strategy: Path | Place | None,
    planning: dict[str, Any],
) -> Plan:
    """Plan a unified set, for which the options of rank directories mean nothing."""
    others = [key for key in ("prefix", "ranks", "remove_redundancy", "link_replicas") if planning[key]]
    others += ["target_strategy"] if target_strategy else []
    others += ["target_stage"] if planning["stage"] is not None else []
    others += ["format"] if planning["format"] not in {None, "safetensors"} else []
    if others:
        given = ", ".join(f"--{key.replace('_', '-')}" for key in others)
        raise UsageError(f"--style asks for a set of whole tensors in safetensors files; leave {given} out")
    files = set_files(style, max_shard_size, None, None)
    some = {key: planning[key] for key in ("memory", "target_cipher")}
    return make_plan(checkpoint, format="safetensors", files=files, selection=selection, **some)


def set_files(style: str | None, max_shard_size: int | None, prefix: str | None, step: int | None) -> AnyFiles:
    """Return the files of a style or a format, as the options ask for them."""
    some: dict[str, Any] = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    if style == DCP:
        return reshard.DCP(step=step, **some)
    if style == CHECKPOINT2:
        return reshard.Checkpoint2(step, prefix, **some)
    return reshard.HuggingFaceSet(**some) if style == "huggingface" else reshard.MindSporeSet(**some)


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


def carry_out(plan: Plan, target: Place, running: Running, *, result: Place | None = None) -> None:
    """Run a plan, or report what it would do.

    Args:
        plan: what to do.
        target: the directory of the target files.
        running: the options.
        result: what was asked for, where that is a file in the target directory.
    """
    from reshard.plan.partition import partitioned
    from reshard.run.beside import neighbours
    from reshard.run.session import older_at
    from reshard.view.data import report_data
    from reshard.view.text import report_text

    check_manifest_place(running.write_manifest, overwrite=running.overwrite)
    _check_manifest(running.write_manifest, plan, target)
    refuse_to_write([f"{target}/{file.path}" for file in plan.files])
    older = older_at(plan, str(target.real())) if running.overwrite or running.restart else {}
    warnings = [*plan.warnings, *(neighbours(plan, target, older) if result in {None, target} else ())]
    if plan.source.cipher and not plan.cipher:
        advice = "; --target-key-file encrypts it" if plan.format == "ckpt" else ""
        warnings.append(f"{plan.source.root} is encrypted, and what is written is not{advice}")
    plan = partitioned(replace(plan, warnings=tuple(warnings)), None, str(target))
    if not running.quiet:
        say_warnings(plan.warnings)
    if running.dry_run:
        _report_plan(plan, target, running, older)
        return
    with (
        cluster_client(running.cluster, running.threads, quiet=running.quiet) as client,
        progress(quiet=running.quiet) as shown,
    ):
        done = plan.run(
            target,
            client=client,
            scheduler=running.scheduler,
            threads=running.threads,
            fsync=running.fsync,
            drop_cache=running.drop_cache,
            overwrite=running.overwrite,
            restart=running.restart,
            checksums=None if running.write_manifest is None else True,
            progress=shown,
        )
    wrote()
    if done.touched and not running.quiet:
        say_warnings([_touched(done.touched, "kept")])
    place, manifest, check = result or target, None, None
    if running.write_manifest is not None:
        manifest = _write_manifest(running.write_manifest, done, overwrite=running.overwrite)
        check = _command("verify", place, "--manifest", running.write_manifest)
    if running.quiet and not running.as_json:
        return
    is_known = not plan.alone and _is_known(plan, place)
    keys = [
        *(key_typed("--key-file", "cipher") if plan.source.cipher else ()),
        *(key_typed("--target-key-file", "target_cipher") if plan.cipher else ()),
    ]
    against = ("--against", plan.source.root)
    is_same = plan.alone and plan.request is None and not (plan.dropped or keys)
    verify = _command("verify", place, *(against if is_same else keys)) if is_known or is_same else None
    if running.as_json:
        print_json(report_data(plan, str(target), done, verify, check))
        return
    print_text(report_text(plan, done, verify, manifest, check))
    if is_known or plan.alone:
        say(f"to look at it: {_inspect(place) if plan.cipher else _command('inspect', place)}")


def _is_known(plan: Plan, place: Place) -> bool:
    """Return whether the ledger of a target says what all files of a plan are made from, so that a path is enough."""
    place.refresh()
    with suppress(SourceError):  # what cannot be read back now is not proposed to be
        made = made_at(place)
        return made is not None and all(file.path in made.records for file in plan.files)
    return False


def _command(*words: object) -> str:
    """Return a command of this program, for a shell."""
    return f"{called_as()} {shlex.join(map(str, words))}"


def _inspect(place: Place) -> str:
    """Return the command that shows an encrypted target: what was its key is that of a source then."""
    command = _command("inspect", place, *(typed := key_typed("--key-file", "target_cipher")))
    end = "_FILE" if os.environ.get("RESHARD_TARGET_KEY_FILE") else ""
    return command if typed else f'RESHARD_KEY{end}="$RESHARD_TARGET_KEY{end}" {command}'


def key_typed(option: str, name: str) -> tuple[object, ...]:
    """Return an option with the key file that was typed for the parameter of a name; nothing where none was."""
    typed = click.get_current_context().meta.get(KEY_FILES, {})
    return (option, typed[name]) if name in typed else ()


def _report_plan(plan: Plan, target: Place, running: Running, older: Collection[str]) -> None:
    """Report what a run would do, and what it would find."""
    from reshard.view.data import report_data
    from reshard.view.text import plan_text

    found = _preflight(plan, target, running, older)
    if not running.quiet:
        say_warnings(found)
    if running.as_json:
        print_json(report_data(plan, str(target)))
    else:
        print_text(plan_text(plan, str(target)))


def _preflight(plan: Plan, target: Place, running: Running, older: Collection[str]) -> list[str]:
    """Return what a run would find of its target files, and which option it would need."""
    from reshard.run.beside import refuse_other_ranks
    from reshard.run.preflight import Do, of, preflight
    from reshard.view.text import count_text

    there = preflight(plan, str(target), overwrite=running.overwrite, restart=running.restart, older=older)
    if running.overwrite or running.restart:
        refuse_other_ranks(plan, str(target.real()), older)
    kept = of(there.fates, Do.KEEP)
    key = ", with another key" if plan.cipher else ""
    counts = (
        (len(kept), "would be kept unread, finished by an earlier run; reshard verify reads every bit"),
        (there.resumable, "would be resumed, begun by an earlier run"),
        (
            len(of(there.fates, Do.CHANGED)),
            f"would be refused, made by another plan{key} or from other sources; a run needs --restart",
        ),
        (len(of(there.fates, Do.UNMANAGED)), "would be in the way; a run needs --overwrite"),
    )
    removed = [f"{count_text(len(older), 'file')} of earlier runs would be removed: {names(sorted(older), most=3)}"]
    found = [f"{count_text(count, 'target file')} {words}" for count, words in counts if count]
    touched = sum(there.fates[file].is_touched for file in kept)
    return [*found, *(removed if older else []), *([_touched(touched, "would keep")] if touched else [])]


def _touched(count: int, kept: str) -> str:
    """Return what to say of finished files whose sources may have changed since; a copy of them is as good."""
    from reshard.view.text import count_text

    return (
        f"{kept} {count_text(count, 'target file')} that an earlier run finished before source files were "
        "changed, or copied or touched, with the size and time that they had; --restart starts over, and "
        "`reshard verify --against` compares them"
    )


def check_manifest_place(path: Place | None, *, overwrite: bool) -> None:
    """Refuse a manifest that could not be written, before anything is.

    Raises:
        TargetError: the manifest is there already, or a directory is.
    """
    if path is not None:
        refuse_existing(path, overwrite=overwrite)


def _check_manifest(path: Place | None, plan: Plan, target: Place) -> None:
    """Refuse a manifest that would stand in place of a file of the run, or that no files are for.

    Raises:
        UsageError: the target is a zarr store, or encrypted.
        TargetError: the manifest's path is that of a target file or of a source file.
    """
    if path is None:
        return
    if plan.exclusive or plan.cipher or plan.linked:
        what = "becomes a zarr store" if plan.exclusive else "is encrypted" if plan.cipher else "gets links"
        raise UsageError(
            f"--write-manifest is only for plain checkpoint files, and {target} {what}; leave it out, and compare "
            f"{target} with its source by `reshard verify --against`"
        )
    advice = "choose another name for the manifest"
    refuse_inputs([path], files_read(plan.source.root, plan.source.files), "one of the source files", advice)
    refuse_inputs([path], [f"{target}/{file.path}" for file in plan.files], "one of the target files", advice)


def _write_manifest(path: Place, report: Report, *, overwrite: bool) -> str:
    """Write the manifest of a run that is done, and return what to say of it."""
    from reshard.view.text import count_text  # not on every start

    try:
        count = report.write_manifest(path, overwrite=overwrite)
    except ReshardError as error:
        error.add_note("the target files are complete; the same command, without --restart, makes the manifest alone")
        raise
    return f"{path}, {count_text(count, 'checksum')} of {count_text(len(report.files), 'file')}"
