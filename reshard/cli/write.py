"""`reshard transform`, `unify` and `convert`: the commands that write checkpoints."""

from __future__ import annotations

import shlex
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

import reshard
from reshard.cli.commands import KEY_FILES, Command, option, refuse_to_write
from reshard.cli.options import (
    READ_PLACE,
    TARGET_PLACE,
    Running,
    StyleType,
    drop_option,
    encryption_options,
    key_option,
    memory_option,
    noting_swap,
    rank_pattern_option,
    run_options,
    selection_options,
    size,
    source_options,
    suffix_option,
    target_options,
)
from reshard.cli.terminal import called_as, cluster_client, print_json, print_text, say, say_warnings, wrote
from reshard.errors import ReshardError, SourceError, TargetError, UsageError
from reshard.plan.select import Selection
from reshard.readers.open import files_read, made_at
from reshard.storage.small import is_within, refuse_existing, refuse_inputs
from reshard.view.progress import progress

if TYPE_CHECKING:
    from reshard.formats.entries import TargetFiles
    from reshard.plan.plan import Plan
    from reshard.run.run import Report
    from reshard.storage.cipher import Cipher
    from reshard.storage.places import AnyName, Place


KEYS = """
The object of --json has the keys dry_run, source, step (of several checkpoints
the newest is read: name, and which are older), target, format, encryption (its
mode, or null), ranks, tensors, bytes_needed, bytes_read, bytes_written
(contents), target_bytes (whole files), source_files, target_files, tasks,
peak_memory, partition, read_amplification, seconds (null in a dry run),
dropped, missing, left_out (by --weights-only, --include and --exclude),
warnings, sampled (what was looked at when SOURCE was opened), files: rank,
path, nbytes; replicas, links, measured_memory, checksums, resumed, finished:
how many files an earlier run had finished, which were not read again; verify:
the command to type (null where TARGET alone is not enough); manifest: the
command that checks it.
"""


@click.command(
    cls=Command,
    epilog="""
Example:

  reshard transform src_checkpoints dst_checkpoints \\
      --source-strategy src_strategy.ckpt --target-strategy dst_strategy.ckpt
""",
    details=KEYS,
    short_help="Convert a checkpoint to another sharding strategy.",
)
@click.argument("source", type=READ_PLACE)
@click.argument("target", type=TARGET_PLACE)
@source_options
@target_options
@option(
    "--via-zarr",
    under="Target",
    type=TARGET_PLACE,
    metavar="STORE",
    help="Unify into this zarr store first, then make TARGET from it. A finished store of the same source is used as "
    "it is, even if SOURCE is gone.",
)
@selection_options
@run_options
def transform(
    source: Place,
    target: Place,
    source_strategy: Place | None,
    target_strategy: Place | None,
    planning: dict[str, Any],
    via_zarr: Place | None,
    selection: Selection,
    running: Running,
    **reading: Any,
) -> None:
    """Convert the checkpoint SOURCE to another sharding strategy, below TARGET.

    SOURCE is a directory of rank_0, rank_1 and so on, a unified set, a zarr store, or one file of whole tensors. Target
    files are TARGET/rank_0/checkpoint_0.ckpt and so on; those that exist are refused without --overwrite. To resume a
    run that was stopped, type the same command again.
    """
    if via_zarr is not None:
        _check_apart(via_zarr, source, target, running.write_manifest)
        _check_manifest_place(running.write_manifest, overwrite=running.overwrite)  # before the store is made
        if not _make_store(source, source_strategy, via_zarr, selection, planning["memory"], running, reading):
            return
        if reading["cipher"] and not running.quiet:
            plain = str(via_zarr) if planning["target_cipher"] else f"{via_zarr} and {target}"
            say_warnings([f"{source} is encrypted, and what is written is not: {plain}"])
        source, source_strategy, reading = via_zarr, None, {}
        planning["format"] = planning["format"] or _format_before(via_zarr)
    with noting_swap(source, source_strategy, target_strategy, reading):
        checkpoint = reshard.open(source, strategy=source_strategy, **reading)
    wanted = reshard.read_strategy(target_strategy) if target_strategy else None
    plan = reshard.plan(checkpoint, wanted, selection=selection, threads=running.threads, **planning)
    carry_out(plan, target, running)


@click.command(
    cls=Command,
    epilog="""
Example:

  reshard unify src_checkpoints weights --source-strategy src_strategy.ckpt \\
      --style huggingface --weights-only --cast float32=bfloat16
  reshard unify src_checkpoints model.zarr --format zarr \\
      --source-strategy src_strategy.ckpt
""",
    details=KEYS,
    short_help="Merge into whole tensors: a Hugging Face or MindSpore set, or a zarr store.",
)
@click.argument("source", type=READ_PLACE)
@click.argument("target", type=TARGET_PLACE)
@source_options
@option(
    "--format",
    under="Target",
    first=True,
    type=click.Choice(["safetensors", "zarr"]),
    default="safetensors",
    show_default=True,
    help="Files and an index, or a zarr v3 group in the directory TARGET.",
)
@option(
    "--style",
    under="Target",
    first=True,
    type=StyleType(),
    help="Names of the files. In MindSpore's style part0.safetensors and param_name_map.json, and what the strategy "
    "does not name goes into hyper_param.safetensors; in Hugging Face's model-00001-of-00002.safetensors and "
    "model.safetensors.index.json.  [default: mindspore]",
)
@option(
    "--max-shard-size",
    under="Target",
    first=True,
    callback=size,
    metavar="SIZE",
    help="Most tensor bytes in a file. One tensor alone may have more.  [default: 4GB]",
)
@option(
    "--chunk-size",
    under="Target",
    callback=size,
    metavar="SIZE",
    help="zarr: the most bytes in a chunk, such as 16MB.  [default: chunks are the source's blocks]",
)
@option(
    "--shard-size",
    under="Target",
    callback=size,
    metavar="SIZE",
    help="zarr: the most bytes of chunks in a file; 0 for each chunk in its own.  [default: 64MiB if chunks are small]",
)
@option(
    "--compression", under="Target", metavar="CODEC", help="zarr: zstd, or zstd:LEVEL such as zstd:3.  [default: none]"
)
@memory_option
@selection_options
@run_options
def unify(
    source: Place,
    target: Place,
    source_strategy: Place | None,
    format: str,
    style: str | None,
    max_shard_size: int | None,
    chunk_size: int | None,
    shard_size: int | None,
    compression: str | None,
    memory: int | None,
    selection: Selection,
    running: Running,
    **reading: Any,
) -> None:
    """Write the whole tensors of the checkpoint SOURCE into a few files in TARGET, with an index of them."""
    zarr_options = (chunk_size, shard_size, compression)
    for wrong, options in (("safetensors", zarr_options), ("zarr", (style, max_shard_size))):
        if format == wrong and any(option is not None for option in options):
            raise UsageError(
                "--chunk-size, --shard-size and --compression are of --format zarr, --style and --max-shard-size of "
                "safetensors"
            )
    files: TargetFiles
    if format == "zarr":
        files = reshard.ZarrGroup(*zarr_options)
    else:
        kind = reshard.HuggingFaceSet if style == "huggingface" else reshard.MindSporeSet
        files = kind() if max_shard_size is None else kind(max_shard_size)
    checkpoint = reshard.open(source, strategy=source_strategy, **reading)
    plan = reshard.plan(
        checkpoint, format=format, files=files, selection=selection, memory=memory, threads=running.threads
    )
    carry_out(plan, target, running)


@click.command(
    cls=Command,
    epilog="""
Example:

  reshard convert src_checkpoints src_safetensors --format safetensors
  reshard convert net.ckpt net.safetensors --format safetensors
""",
    details=KEYS,
    short_help="Convert every file to another format.",
)
@click.argument("source", type=READ_PLACE)
@click.argument("target", type=TARGET_PLACE)
@option(
    "--format",
    under="Target",
    first=True,
    type=click.Choice(["ckpt", "safetensors"]),
    required=True,
    help="Format of the target files.",
)
@rank_pattern_option
@suffix_option
@key_option
@encryption_options
@drop_option("Entries that may be left out because they cannot be converted. May be repeated.")
@run_options
def convert(
    source: Place,
    target: Place,
    format: str,
    rank_pattern: str,
    suffix: str | None,
    cipher: Cipher | None,
    target_cipher: Cipher | None,
    drop: tuple[str, ...],
    running: Running,
) -> None:
    """Convert every file of the checkpoint SOURCE to another format, below TARGET; nothing is cut or joined.

    Files keep their places and names except for the extension. If SOURCE is one file, so is TARGET. No strategy is
    needed.
    """
    from reshard.plan.make import plan_convert

    directory, name = target, None
    if source.is_file():
        if target.is_dir():
            raise TargetError(f"{target}: is a directory; expected the name of a file, because {source} is one")
        directory, name = target.parent, target.name
    plan = plan_convert(
        source, format, name=name, rank_pattern=rank_pattern, suffix=suffix, drop=drop, threads=running.threads,
        cipher=cipher, target_cipher=target_cipher,
    )  # fmt: skip
    carry_out(plan, directory, running, result=target)


def _check_apart(store: Place, source: Place, target: Place, manifest: Place | None) -> None:
    """Refuse a store that is the source or the target, or holds one of them or lies in it.

    Raises:
        TargetError: it does; nothing is made or changed.
    """
    places: list[AnyName] = [source, target, *([manifest] if manifest else [])]
    for path in places:
        if is_within(path, store) or is_within(store, path):
            raise TargetError(
                f"{store}: overlaps with {path}; expected a directory of its own for the store of --via-zarr; choose "
                "another"
            )


def _make_store(
    source: Place,
    source_strategy: Place | None,
    store: Place,
    selection: Selection,
    memory: int | None,
    running: Running,
    reading: dict[str, Any],
) -> bool:
    """Unify a source into a zarr store, unless that is done; return whether the store is there to be read.

    Raises:
        TargetError: the store is finished, and of another source or of one that changed since.
    """
    from reshard.readers.zarr import noted_provenance
    from reshard.targets.zarr import provenance

    noted = noted_provenance(store)
    if noted is not None and not (source.is_dir() or source.is_file()):
        say_warnings([f"{source} is not there; {store} is used, which is finished"])
        return True
    checkpoint = reshard.open(source, strategy=source_strategy, **reading)
    if noted is not None:
        now = provenance(checkpoint, times=True)
        if (now["sources"], now["strategy"]) != (noted.get("sources"), noted.get("strategy")):
            raise TargetError(
                f"{store}: is finished, and of another source, or of {source} before it changed; choose another store, "
                "remove it, or give it as SOURCE"
            )
        if not running.quiet:
            say_warnings([f"{store} is finished and of this source; it is used as it is"])
        return True
    selection = Selection(drop=selection.drop, allow_missing=selection.allow_missing)
    plan = reshard.plan(
        checkpoint, files=reshard.ZarrGroup(times=True), selection=selection, memory=memory, threads=running.threads
    )
    # What is unfinished is of no use but to resume from. The report is that of the second step.
    quiet = running.quiet or (running.as_json and not running.dry_run)
    as_json = running.as_json and running.dry_run
    if quiet and not running.quiet:
        say_warnings(plan.warnings)
    first = running._replace(overwrite=True, write_manifest=None, quiet=quiet, as_json=as_json)
    carry_out(plan, store, first)
    return not running.dry_run


def _format_before(store: Place) -> str | None:
    """Return the format of the files that a store was made of; None where it is not one that all have."""
    from reshard.readers.zarr import noted_provenance

    sources = (noted_provenance(store) or {}).get("sources")
    paths = [str(item.get("path")) for item in sources if isinstance(item, dict)] if isinstance(sources, list) else []
    return "ckpt" if paths and all(path.endswith(".ckpt") for path in paths) else None


def carry_out(plan: Plan, target: Place, running: Running, *, result: Place | None = None) -> None:
    """Run a plan, or report what it would do.

    Args:
        plan: what to do.
        target: the directory of the target files.
        running: the options.
        result: what was asked for, where that is a file in the target directory.
    """
    from reshard.plan.partition import partitioned
    from reshard.run.preflight import neighbours
    from reshard.view.data import report_data
    from reshard.view.text import report_text

    _check_manifest_place(running.write_manifest, overwrite=running.overwrite)
    _check_manifest(running.write_manifest, plan, target)
    refuse_to_write([f"{target}/{file.path}" for file in plan.files])
    warnings = [*plan.warnings, *(neighbours(plan, target) if result in {None, target} else ())]
    if plan.source.cipher and not plan.cipher:
        advice = "; --target-key-file encrypts it" if plan.format == "ckpt" else ""
        warnings.append(f"{plan.source.root} is encrypted, and what is written is not{advice}")
    plan = partitioned(replace(plan, warnings=tuple(warnings)), None, str(target))
    if not running.quiet:
        say_warnings(plan.warnings)
    if running.dry_run:
        _report_plan(plan, target, running)
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
    is_known = _is_known(plan, place)
    keys = [
        *(key_typed("--key-file", "cipher") if plan.source.cipher else ()),
        *(key_typed("--target-key-file", "target_cipher") if plan.cipher else ()),
    ]
    verify = _command("verify", place, *keys) if is_known else None
    if running.as_json:
        print_json(report_data(plan, str(target), done, verify, check))
        return
    print_text(report_text(plan, done, verify, manifest, check))
    if is_known:
        key = key_typed("--key-file", "target_cipher") if plan.cipher else ()
        say(f"to look at it: {_command('inspect', place, *key)}")


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


def key_typed(option: str, name: str) -> tuple[object, ...]:
    """Return an option with the key file that was typed for the parameter of a name; nothing where none was."""
    typed = click.get_current_context().meta.get(KEY_FILES, {})
    return (option, typed[name]) if name in typed else ()


def _report_plan(plan: Plan, target: Place, running: Running) -> None:
    """Report what a run would do, and what it would find."""
    from reshard.view.data import report_data
    from reshard.view.text import plan_text

    found = _preflight(plan, target, running)
    if not running.quiet:
        say_warnings(found)
    if running.as_json:
        print_json(report_data(plan, str(target)))
    else:
        print_text(plan_text(plan, str(target)))


def _preflight(plan: Plan, target: Place, running: Running) -> list[str]:
    """Say what a run would find of its target files, and which option it would need."""
    from reshard.run.preflight import Do, of, preflight
    from reshard.view.text import count_text

    there = preflight(plan, str(target), overwrite=running.overwrite, restart=running.restart)
    kept = of(there.fates, Do.KEEP)
    counts = (
        (len(kept), "would be kept unread, finished by an earlier run; reshard verify reads every bit"),
        (there.resumable, "would be resumed, begun by an earlier run"),
        (
            len(of(there.fates, Do.CHANGED)),
            "would be refused, made by another plan or from other sources; a run needs --restart",
        ),
        (len(of(there.fates, Do.UNMANAGED)), "would be in the way; a run needs --overwrite"),
    )
    found = [f"{count_text(count, 'target file')} {words}" for count, words in counts if count]
    touched = sum(there.fates[file].is_touched for file in kept)
    return [*found, *([_touched(touched, "would keep")] if touched else [])]


def _touched(count: int, kept: str) -> str:
    """Tell of finished files whose sources may have changed since; or they were copied, and nothing is wrong."""
    from reshard.view.text import count_text

    return (
        f"{kept} {count_text(count, 'target file')} that an earlier run finished before source files were "
        "changed, or copied or touched, with the size and time that they had; --restart starts over, and "
        "`reshard verify --against` compares them"
    )


def _check_manifest_place(path: Place | None, *, overwrite: bool) -> None:
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
    if plan.exclusive:
        raise UsageError(
            f"--write-manifest is of checkpoint files, and {target} becomes a zarr store; leave it out, and compare "
            "the store with its source by `reshard verify --against`"
        )
    if plan.cipher:
        raise UsageError(
            f"--write-manifest is only for plain files, and those of {target} are encrypted; leave it out, and compare "
            "them with their source by `reshard verify --against`"
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
