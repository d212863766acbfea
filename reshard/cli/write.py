"""`reshard convert`, which writes checkpoints, and its former names `transform` and `unify`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

import reshard
from reshard.cli.carry import KEYS, carry_out
from reshard.cli.commands import Command, option
from reshard.cli.options import (
    Running,
    average_source_options,
    dequantize_option,
    run_options,
    source_options,
    target_options,
)
from reshard.cli.selection import selection_options
from reshard.cli.terminal import say, say_warnings
from reshard.cli.values import READ_PLACE, TARGET_PLACE, WEIGHTED_PLACE, split_weight
from reshard.core.listing import OpenOptions
from reshard.core.plan.changes import refuse_unused
from reshard.core.plan.inputs import Selection
from reshard.core.plan.make import plan as make_plan
from reshard.core.storage.places import as_place
from reshard.core.storage.small import is_within, refuse_existing
from reshard.errors import TargetError, UsageError
from reshard.formats.open import open as open_checkpoint
from reshard.view.progress import READING, phase

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reshard.api.asked import TargetOptions
    from reshard.api.jobs import Verb
    from reshard.cli.options import Openings
    from reshard.core.storage.places import AnyName, Place


def _writing(verb: Verb) -> Callable[..., Any]:
    """Return a decorator that adds the arguments and options of a command."""
    via_zarr = option(
        "--via-zarr",
        under="Target",
        type=TARGET_PLACE,
        metavar="STORE",
        help="Unify into this zarr store first, then make TARGET from it. A finished store of the same source is used "
        "as it is, even if SOURCE is gone.",
    )

    def command(function: Callable[..., Any]) -> Any:
        for add in (
            run_options,
            selection_options,
            dequantize_option,
            via_zarr,
            target_options(verb),
            source_options,
            click.argument("target", type=TARGET_PLACE),
            click.argument("source", type=READ_PLACE),
        ):
            function = add(function)
        return function

    return command


@click.command(
    cls=Command,
    epilog="""
Examples:

  reshard convert src_checkpoints dst --source-strategy src_strategy.ckpt \\
      --target-strategy dst_strategy.ckpt
  reshard convert dst weights --to hf --weights-only --cast float32=bfloat16
""",
    details=KEYS,
    short_help="Convert a checkpoint: other devices, another format, other names.",
)
@_writing("convert")
def convert(source: Place, target: Place, **arguments: Any) -> None:
    """Convert the checkpoint SOURCE to other devices, another format, other names.

    TARGET is cut as --target-strategy says; without it, it has whole tensors. To resume a stopped run, type it again.

    \f
    What becomes of which options:

    - `--to ckpt` or `safetensors` with --target-strategy: TARGET/rank_0/checkpoint_0.ckpt and so on.
    - Without: whole tensors in the one file TARGET, if that is named x.ckpt or x.safetensors, or if SOURCE is one file;
      else in TARGET/rank_0.
    - Without, SOURCE has several ranks, nothing says how they were sharded, and --to is given; or with --same-ranks:
      each rank's file in the other format, with the tensors that it has.
    - `--to hf`, `mindspore`, `deepspeed-universal`, `orbax`, `zarr`: whole tensors; options about ranks are
      refused.
    - `--to dcp`, `checkpoint2`: blocks with --target-strategy or --layouts-of, else whole tensors.
    - No --to: x.zarr, x.ckpt and x.safetensors are what they are called; else the target is what SOURCE is. If that
      holds whole tensors only (a set, a store) and --target-strategy is given, it is safetensors.
    """  # noqa: D301 -- click's mark of what is not for the terminal
    _write("convert", source, target, **arguments)


@click.command(
    cls=Command,
    hidden=True,
    epilog="""
Example:

  reshard transform src_checkpoints dst_checkpoints \\
      --source-strategy src_strategy.ckpt --target-strategy dst_strategy.ckpt
""",
    details=KEYS,
    short_help="Convert a checkpoint to another sharding strategy.",
)
@_writing("transform")
def transform(source: Place, target: Place, **arguments: Any) -> None:
    """Convert the checkpoint SOURCE to another sharding strategy, below TARGET: as `reshard convert`, to rank files.

    Target files are TARGET/rank_0/checkpoint_0.ckpt and so on; those that exist are refused without --overwrite. To
    resume a stopped run, type the same command again.
    """
    _write("transform", source, target, **arguments)


@click.command(
    cls=Command,
    hidden=True,
    epilog="""
Example:

  reshard unify src_checkpoints weights --source-strategy src_strategy.ckpt \\
      --style huggingface --weights-only --cast float32=bfloat16
""",
    details=KEYS,
    short_help="Merge into whole tensors.",
)
@_writing("unify")
def unify(source: Place, target: Place, **arguments: Any) -> None:
    """Write the whole tensors of SOURCE into a few files in TARGET, with an index: as `reshard convert --to mindspore`.

    With --style checkpoint2 TARGET is the directory of a run: other iterations there stay, and the tracker is replaced.
    """
    _write("unify", source, target, **arguments)


@click.command(
    cls=Command,
    epilog="""
Examples:

  reshard average step-100 step-200 step-300 merged --to hf
  reshard average a:0.5 b:0.3 c:0.2 merged.safetensors --dtype bfloat16
  reshard average run --last 8 --schedule minus-sqrt merged --to hf
""",
    details=KEYS,
    short_help="Average checkpoints, weighted or by a schedule.",
)
@click.argument("sources", type=WEIGHTED_PLACE, nargs=-1, required=True, metavar="SOURCE[:WEIGHT]...")
@click.argument("target", type=TARGET_PLACE)
@average_source_options
@option(
    "--last",
    under="Source",
    in_short_help=True,
    type=click.IntRange(min=2),
    metavar="N",
    help="Average the N newest checkpoints of the run whose directory SOURCE is. The newest of them is the one that "
    "the run names as its last, or --iteration.",
)
@option(
    "--schedule",
    under="Source",
    in_short_help=True,
    type=click.Choice(["linear", "minus-sqrt"]),
    help="Weights as after such a decay of the learning rate. Sources are in the order of their steps. linear: all "
    "are equal; minus-sqrt: larger for older ones.  [default: linear]",
)
@option(
    "--dtype",
    under="Tensors",
    in_short_help=True,
    metavar="DTYPE",
    help="dtype of all averages, such as bfloat16.  [default: those of the first source]",
)
@option(
    "--states",
    under="Tensors",
    in_short_help=True,
    is_flag=True,
    help="Average optimizer states, too. The step and other training state are those of the first source.",
)
@target_options("convert")
@dequantize_option
@selection_options
@run_options
def average(
    sources: tuple[tuple[Place, float | None], ...],
    target: Place,
    openings: Openings,
    last: int | None,
    schedule: str | None,
    dtype: str | None,
    states: bool,
    dequantize: str | None,
    options: TargetOptions,
    selection: Selection,
    running: Running,
) -> None:
    """Write the weighted average of checkpoints, of any layouts and formats, to TARGET, as `reshard convert` would.

    A WEIGHT is a number after the last colon, and is used as it is; without weights all are equal, with the sum 1.
    Sums are in float32, in the given order, and are rounded once. Names and shapes must be equal in all sources, and so
    must integers. Optimizer states are left out. To resume a stopped run, type it again.
    """  # fmt: skip
    from reshard.api.jobs import job, noting_swap  # not on every start
    from reshard.core.plan.select import excluding
    from reshard.core.runs import newest_iterations
    from reshard.expressions.average import average as average_of

    _refuse_weighted(target)
    weights = _weights(sources, schedule)
    paths = [path for path, _ in sources]
    opening = openings.common
    with phase(READING, quiet=running.quiet):
        if last is None and len(paths) == 1:
            raise UsageError(
                f"{paths[0]} is the only source", code="one-source",
                hint="name two or more, and TARGET after them; of the directory of a run, give --last N",
            )  # fmt: skip
        if last is None:
            pairs = [(path, opening) for path in paths]
        elif len(paths) > 1 or sources[0][1] is not None:
            raise UsageError(
                "--last is for one run, whose checkpoints have the weights of --schedule", code="conflicting-options",
                hint="name the directory of the run alone, or leave --last out",
            )  # fmt: skip
        else:
            numbers = newest_iterations(paths[0], last, opening.iteration)
            pairs = [(paths[0], replace(opening, iteration=number)) for number in numbers]
        checkpoints = []
        for (path, each), strategy in zip(pairs, _strategies(pairs, openings), strict=True):
            with noting_swap(path, replace(each, strategy=strategy), options.target_strategy):
                checkpoints.append(open_checkpoint(path, **vars(replace(each, strategy=strategy))))
        if dequantize is not None:
            from reshard.expressions.quantized.dequantize import dequantize_each  # seldom

            checkpoints = dequantize_each(checkpoints, dequantize)
        checkpoints, selection = excluding(checkpoints, selection)
        checkpoint = average_of(checkpoints, weights, dtype, states)
        plan, directory, result, notes = job(
            checkpoint, target, OpenOptions(), options, selection, threads=running.threads
        )
        refuse_unused(plan, selection)
    if not running.quiet:
        for note in notes:
            say(note)
    carry_out(plan, directory or target, running, result=result)


def _refuse_weighted(target: Place) -> None:
    """Refuse a target that is a source with a weight.

    Raises:
        UsageError: it is; the target was left out.
    """
    path, weight = split_weight(str(target))
    if weight is not None and ((place := as_place(path)).is_dir() or place.is_file()):
        raise UsageError(f"{target} is a source with a weight", code="no-target", hint="add TARGET after the sources")


def _weights(sources: Sequence[tuple[Place, float | None]], schedule: str | None) -> list[float] | str | None:
    """Return the weights of sources, the name of a schedule, or None for equal ones.

    Raises:
        UsageError: some sources have no weight, or there are weights and a schedule.
    """
    weights = [weight for _, weight in sources if weight is not None]
    if weights and schedule:
        raise UsageError(
            "--schedule makes the weights, and sources have some", code="conflicting-options",
            hint="leave --schedule out, or the weights",
        )  # fmt: skip
    if weights and len(weights) < len(sources):
        path = next(path for path, weight in sources if weight is None)
        raise UsageError(
            f"{path} has no weight, and other sources have one", code="missing-weight",
            hint=f"give one to each, such as {path}:0.5, or to none",
        )  # fmt: skip
    return weights or schedule


def _strategies(pairs: Sequence[tuple[Place, OpenOptions]], openings: Openings) -> list[Place | None]:
    """Return the strategy of each source; None if it needs none.

    Raises:
        UsageError: there are several strategies, and not one for each source, or for each that has several ranks.
    """
    strategies = openings.strategies
    if len(strategies) == len(pairs):
        return [*strategies]
    if not strategies:
        return [None] * len(pairs)
    from reshard.formats.open import has_several_ranks

    needed = [has_several_ranks(path, opening.rank_pattern, opening.suffix) for path, opening in pairs]
    if not any(needed):
        raise UsageError(
            "no source has several ranks, for which --source-strategy would be", code="no-effect", hint="leave it out"
        )
    if len(strategies) not in {1, sum(needed)}:
        raise UsageError(
            f"{len(strategies)} strategies are given for {len(pairs)} sources; {sum(needed)} of these can use one",
            code="wrong-count", hint="give one for all, or one for each",
        )  # fmt: skip
    remaining = iter(strategies * (sum(needed) if len(strategies) == 1 else 1))
    return [next(remaining) if is_needed else None for is_needed in needed]


def _write(
    verb: Verb,
    source: Place,
    target: Place,
    *,
    opening: OpenOptions,
    options: TargetOptions,
    via_zarr: Place | None,
    dequantize: str | None,
    selection: Selection,
    running: Running,
) -> None:
    """Write a checkpoint, through a zarr store if `via_zarr` is given."""
    from reshard.api.jobs import job, with_format  # not on every start

    if via_zarr is not None:
        if options.same_ranks:
            raise UsageError(
                "--same-ranks keeps files as they are cut", code="conflicting-options", hint="leave --via-zarr out"
            )
        if dequantize is not None:
            raise UsageError(
                "--dequantize reads the config.json of SOURCE, which a store does not have", code="conflicting-options",
                hint="leave --via-zarr out",
            )  # fmt: skip
        _check_apart(via_zarr, source, target, running.write_manifest)
        if running.write_manifest is not None:
            refuse_existing(running.write_manifest, overwrite=running.overwrite)  # before the store is made
        plain = str(via_zarr) if options.target_cipher else f"{via_zarr} and {target}"
        if not _make_store(source, opening, via_zarr, plain, selection, options.memory, running):
            return
        source, opening = via_zarr, OpenOptions()
        options = with_format(options, target, _format_before(via_zarr))
    with phase(READING, quiet=running.quiet):
        plan, directory, result, notes = job(
            source, target, opening, options, selection, verb=verb, threads=running.threads, dequantize=dequantize
        )
        # What is dropped may be dropped on the way into the store.
        chosen = selection if via_zarr is None else replace(selection, drop=(), allow_missing=())
        refuse_unused(plan, chosen, dequantize)
    if not running.quiet:
        for note in notes:
            say(note)
    carry_out(plan, directory or target, running, result=result)


def _check_apart(store: Place, source: Place, target: Place, manifest: Place | None) -> None:
    """Refuse a store that overlaps with the source, the target or the manifest.

    Raises:
        TargetError: the store overlaps with one of them; nothing is made or changed.
    """
    paths: list[AnyName] = [source, target, *([manifest] if manifest else [])]
    for path in paths:
        if is_within(path, store) or is_within(store, path):
            raise TargetError(
                f"{store} overlaps with {path}", code="overlaps",
                hint="choose a directory of its own for the store of --via-zarr",
            )  # fmt: skip


def _make_store(
    source: Place,
    opening: OpenOptions,
    store: Place,
    plain: str,
    selection: Selection,
    memory: int | None,
    running: Running,
) -> bool:
    """Unify a source into a zarr store, unless that is done.

    Return whether the store can be read: not after a dry run.

    If the source is encrypted, a warning names the targets that are not: `plain`.

    Raises:
        TargetError: the store is finished, and was made from another source, or from this one before it changed.
    """
    from reshard.core.records.provenance import SourceRecord
    from reshard.formats.zarr.reader import store_notes
    from reshard.formats.zarr.writer import source_record

    store_content = store_notes(store)
    if store_content is not None and not (source.is_dir() or source.is_file()):
        say_warnings([f"{source} does not exist; {store} is finished, and is used"])
        return True
    checkpoint = open_checkpoint(source, **vars(opening))
    if checkpoint.cipher and not running.quiet:
        say_warnings([f"{source} is encrypted, and what is written is not: {plain}"])
    if store_content is not None:
        recorded = SourceRecord.noted(store_content)
        if recorded is None or not recorded.is_of(source_record(checkpoint, times=True)):
            raise TargetError(
                f"{store} is finished, and was made from another source, or from {source} before it changed",
                code="other-store", hint="choose another store, or give it as SOURCE",
            )  # fmt: skip
        if not running.quiet:
            say_warnings([f"{store} is finished and of this source; it is used as it is"])
        return True
    selection = Selection(drop=selection.drop, allow_missing=selection.allow_missing)
    plan = make_plan(
        checkpoint, files=reshard.ZarrGroup(times=True), selection=selection, memory=memory, threads=running.threads
    )
    # The second step prints the report.
    quiet = running.quiet or (running.as_json and not running.dry_run)
    as_json = running.as_json and running.dry_run
    if quiet and not running.quiet:
        say_warnings(plan.warnings)
    first = replace(running, write_manifest=None, quiet=quiet, as_json=as_json)
    carry_out(plan, store, first)
    return not running.dry_run


def _format_before(store: Place) -> str | None:
    """Return `ckpt` if a store was made from `.ckpt` files only, else None."""
    from reshard.core.records.provenance import SourceRecord
    from reshard.formats.zarr.reader import store_notes

    recorded = SourceRecord.noted(store_notes(store) or {})
    paths = [file.path for file in recorded.files] if recorded else []
    return "ckpt" if paths and all(path.endswith(".ckpt") for path in paths) else None
