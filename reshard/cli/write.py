"""`reshard convert` and `reshard average`, which write checkpoints."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click

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
from reshard.cli.terminal import say
from reshard.cli.values import READ_PLACE, TARGET_PLACE, WEIGHTED_PLACE, split_weight
from reshard.core.listing import OpenOptions
from reshard.core.open import open as open_checkpoint
from reshard.core.plan.changes import refuse_unused
from reshard.core.storage.places import as_place
from reshard.errors import UsageError
from reshard.view.progress import READING, phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.api.asked import TargetOptions
    from reshard.cli.options import Openings
    from reshard.core.plan.inputs import Selection
    from reshard.core.storage.places import Place


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
@click.argument("source", type=READ_PLACE)
@click.argument("target", type=TARGET_PLACE)
@source_options
@target_options
@dequantize_option
@selection_options
@run_options
def convert(
    source: Place,
    target: Place,
    opening: OpenOptions,
    options: TargetOptions,
    dequantize: str | None,
    selection: Selection,
    running: Running,
) -> None:
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
    - `--to dcp`, `checkpoint2`: blocks with --target-strategy, else whole tensors.
    - No --to: x.zarr, x.ckpt and x.safetensors are what they are called; else the target is what SOURCE is. If that
      holds whole tensors only (a set, a store) and --target-strategy is given, it is safetensors.
    """  # noqa: D301 -- click's mark of what is not for the terminal
    from reshard.api.jobs import job  # not on every start

    with phase(READING, quiet=running.quiet or running.as_json):
        plan, directory, result, notes = job(
            source, target, opening, options, selection, threads=running.threads, dequantize=dequantize
        )
        refuse_unused(plan, selection, dequantize)
    if not running.quiet:
        for note in notes:
            say(note)
    carry_out(plan, directory or target, running, result=result)


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
    "the run names as its last, or --step.",
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
@target_options
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
    with phase(READING, quiet=running.quiet or running.as_json):
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
            numbers = newest_iterations(paths[0], last, opening.step)
            pairs = [(paths[0], replace(opening, step=number)) for number in numbers]
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
    from reshard.core.open import has_several_ranks

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
