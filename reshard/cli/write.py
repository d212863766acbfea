"""`reshard transform`, `unify` and `convert`: the commands that write checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

import reshard
from reshard.cli.commands import Command, option
from reshard.cli.options import (
    Running,
    drop_option,
    encryption_options,
    key_option,
    max_shard_size_option,
    memory_option,
    prefix_option,
    rank_pattern_option,
    refused_target_key_option,
    run_options,
    source_options,
    style_option,
    suffix_option,
    target_options,
    target_step_option,
)
from reshard.cli.plan import KEYS, carry_out, check_manifest_place, made_plan, refuse_options, set_files
from reshard.cli.selection import rules_options, selection_options
from reshard.cli.terminal import say_warnings
from reshard.cli.values import CHECKPOINT2, DCP, READ_PLACE, TARGET_PLACE, noting_swap, refuse_store, size
from reshard.errors import TargetError, UsageError
from reshard.formats import check_name
from reshard.plan.make import plan as make_plan
from reshard.plan.select import Selection
from reshard.readers.open import open as open_checkpoint
from reshard.storage.small import is_within

if TYPE_CHECKING:
    from reshard.rules.rules import Rules
    from reshard.storage.cipher import Cipher
    from reshard.storage.places import AnyName, Place
    from reshard.targets.kinds import AnyFiles


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
@target_options(
    "checkpoint2: add a Checkpoint 2.0 to TARGET, a run's directory. Its iteration has metadata.json of the blocks; "
    "without --target-strategy and --layouts-of it has whole tensors, which MindSpore Transformers loads on every "
    "number of cards. The other styles are those of `reshard unify`."
)
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

    SOURCE is a directory of rank_0, rank_1 and so on, a unified set, a Checkpoint 2.0, a zarr store, or one file.
    Target files are TARGET/rank_0/checkpoint_0.ckpt and so on; those that exist are refused without --overwrite. To
    resume a stopped run, type the same command again.
    """
    refuse_store(target)
    if planning["style"] not in {None, CHECKPOINT2}:
        raise UsageError(f"--style {planning['style']} is of whole tensors; `reshard unify` writes it")
    if via_zarr is not None:
        _check_apart(via_zarr, source, target, running.write_manifest)
        check_manifest_place(running.write_manifest, overwrite=running.overwrite)  # before the store is made
        plain = str(via_zarr) if planning["target_cipher"] else f"{via_zarr} and {target}"
        if not _make_store(source, source_strategy, via_zarr, plain, selection, planning["memory"], running, reading):
            return
        source, source_strategy, reading = via_zarr, None, {}
        if planning["style"] is None:
            planning["format"] = planning["format"] or _format_before(via_zarr)
    with noting_swap(source, source_strategy, target_strategy, reading):
        checkpoint = open_checkpoint(source, strategy=source_strategy, **reading)
    plan = made_plan(checkpoint, target_strategy, selection, planning, threads=running.threads)
    carry_out(plan, target, running)


@click.command(
    cls=Command,
    epilog="""
Example:

  reshard unify src_checkpoints weights --source-strategy src_strategy.ckpt \\
      --style huggingface --weights-only --cast float32=bfloat16
  reshard unify src_checkpoints model.zarr --source-strategy src_strategy.ckpt
""",
    details=KEYS,
    short_help="Merge into whole tensors: a Hugging Face or MindSpore set, a Checkpoint 2.0, a DCP, or a zarr store.",
)
@click.argument("source", type=READ_PLACE)
@click.argument("target", type=TARGET_PLACE)
@source_options
@option(
    "--format",
    under="Target",
    first=True,
    type=click.Choice(["safetensors", "zarr", DCP]),
    help="Files and an index, a zarr v3 group, or a DCP. The group is in the directory TARGET; a DCP is a distributed "
    "checkpoint of PyTorch, which loads it into any mesh.  [default: zarr if TARGET ends with .zarr, else safetensors]",
)
@style_option(
    "Names of the files. In MindSpore's style part0.safetensors and param_name_map.json, and what the strategy "
    "does not name goes into hyper_param.safetensors; in Hugging Face's model-00001-of-00002.safetensors and "
    "model.safetensors.index.json. checkpoint2: an iteration of a run, which MindSpore Transformers loads on every "
    "number of cards.  [default: mindspore]"
)
@prefix_option
@target_step_option
@max_shard_size_option
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
@refused_target_key_option
@memory_option
@selection_options
@run_options
def unify(
    source: Place,
    target: Place,
    source_strategy: Place | None,
    format: str | None,
    style: str | None,
    prefix: str | None,
    target_step: int | None,
    max_shard_size: int | None,
    chunk_size: int | None,
    shard_size: int | None,
    compression: str | None,
    target_cipher: Cipher | None,
    memory: int | None,
    selection: Selection,
    running: Running,
    **reading: Any,
) -> None:
    """Write the whole tensors of SOURCE into a few files in TARGET, with an index.

    With --style checkpoint2 TARGET is the directory of a run: other iterations there stay, and the tracker is replaced.
    """
    written = format or ("zarr" if target.suffix == ".zarr" else "safetensors")
    if written != "zarr":
        if target.suffix == ".zarr":
            check_name(str(target), written)
        of_zarr = {"--chunk-size": chunk_size, "--shard-size": shard_size, "--compression": compression}
        refuse_options(of_zarr, "--format zarr")
    else:
        refuse_options({"--max-shard-size": max_shard_size}, "--format safetensors or dcp")
    if written != "safetensors":
        refuse_options({"--style": style}, "--format safetensors")
    if style != CHECKPOINT2:
        refuse_options({"--prefix": prefix}, "--style checkpoint2")
        refuse_options({} if written == DCP else {"--target-step": target_step}, "--style checkpoint2 or --format dcp")
    files: AnyFiles
    if written == "zarr":
        files = reshard.ZarrGroup(chunk_size, shard_size, compression)
    else:
        files = set_files(DCP if written == DCP else style, max_shard_size, prefix, target_step)
    checkpoint = open_checkpoint(source, strategy=source_strategy, **reading)
    plan = make_plan(
        checkpoint, format=written, files=files, selection=selection, memory=memory, threads=running.threads,
        target_cipher=target_cipher,
    )  # fmt: skip
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
@rules_options
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
    rules: Rules | None,
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
        check_name(str(target), format)
        directory, name = target.parent, target.name
    else:
        refuse_store(target)
    plan = plan_convert(
        source, format, name=name, rank_pattern=rank_pattern, suffix=suffix, drop=drop, threads=running.threads,
        cipher=cipher, target_cipher=target_cipher, rules=rules,
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
    plain: str,
    selection: Selection,
    memory: int | None,
    running: Running,
    reading: dict[str, Any],
) -> bool:
    """Unify a source into a zarr store, unless that is done; return whether the store is there to be read.

    What is written that is not encrypted is said where the source is.

    Raises:
        TargetError: the store is finished, and of another source or of one that changed since.
    """
    from reshard.readers.zarr import noted_provenance
    from reshard.targets.zarr import provenance

    noted = noted_provenance(store)
    if noted is not None and not (source.is_dir() or source.is_file()):
        say_warnings([f"{source} is not there; {store} is used, which is finished"])
        return True
    checkpoint = open_checkpoint(source, strategy=source_strategy, **reading)
    if checkpoint.cipher and not running.quiet:
        say_warnings([f"{source} is encrypted, and what is written is not: {plain}"])
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
    plan = make_plan(
        checkpoint, files=reshard.ZarrGroup(times=True), selection=selection, memory=memory, threads=running.threads
    )
    # The report is that of the second step.
    quiet = running.quiet or (running.as_json and not running.dry_run)
    as_json = running.as_json and running.dry_run
    if quiet and not running.quiet:
        say_warnings(plan.warnings)
    first = running._replace(write_manifest=None, quiet=quiet, as_json=as_json)
    carry_out(plan, store, first)
    return not running.dry_run


def _format_before(store: Place) -> str | None:
    """Return the format of the files that a store was made of; None where it is not one that all have."""
    from reshard.readers.zarr import noted_provenance

    sources = (noted_provenance(store) or {}).get("sources")
    paths = [str(item.get("path")) for item in sources if isinstance(item, dict)] if isinstance(sources, list) else []
    return "ckpt" if paths and all(path.endswith(".ckpt") for path in paths) else None
