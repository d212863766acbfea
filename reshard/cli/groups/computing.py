"""`reshard stats` and `diff`: compute with the values of checkpoints."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import islice
from typing import TYPE_CHECKING

import click

from reshard.cli.commands import Command, option
from reshard.cli.options import (
    cluster_option,
    json_option,
    memory_option,
    opened_target_options,
    quiet_option,
    source_options,
    threads_option,
    verbose_option,
)
from reshard.cli.selection import rules_options
from reshard.cli.terminal import (
    REPORTED,
    cluster_client,
    print_json,
    print_text,
    say_warnings,
    width,
)
from reshard.cli.values import READ_PLACE
from reshard.core.open import open as open_checkpoint
from reshard.errors import SourceError, VerifyError
from reshard.view.progress import progress

if TYPE_CHECKING:
    from reshard.compute.stats import CheckpointStats
    from reshard.core.listing import OpenOptions
    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.storage.places import Place
    from reshard.errors import ReshardError
    from reshard.rules.rules import Rules

_WORDS = ("reading", "reading")

match_option = option(
    "--match", under="Tensors", in_short_help=True, multiple=True, metavar="GLOB",
    help="Only tensors of these names, such as 'layers.0.*'. May be repeated.",
)  # fmt: skip


@click.command(
    cls=Command,
    epilog="""
Examples:

  reshard stats src_checkpoints --source-strategy src_strategy.ckpt
  reshard stats weights --by kind
  reshard stats weights --nan
""",
    details="""
Minimum, maximum, mean, standard deviation and norm are those of finite values.

Exits with 0; with --nan with 3 if any tensor has a NaN or an infinity, else with
4 if a tensor could not be read.

The object of --json has the keys source, finite, bytes_read, seconds, warnings,
not_computed (reasons by name), total, by, groups, and tensors: name, dtype,
size (number of elements), min, max, mean, std, norm (null without finite
values), zeros, nans, infs; of a tensor shape, kind (weights, a state of the
optimizer, other), and first: the first NaN or infinity in row-major order, or
null: index (in the whole tensor), value (nan, inf, -inf), rank, path. total
and groups have the same numbers, and groups their number of tensors.
""",
    short_help="Show minimum, maximum, mean, norm and NaNs of tensors.",
)
@click.argument("source", metavar="CHECKPOINT", type=READ_PLACE)
@source_options
@rules_options
@match_option
@option(
    "--by",
    under="Output",
    in_short_help=True,
    default="name",
    show_default=True,
    type=click.Choice(["name", "prefix", "dtype", "kind", "tensor"]),
    help="What tensors share a row: name (repeated layers), prefix (the part before the first dot), dtype, kind "
    "(weights, each state of the optimizer), or tensor, each by itself.",
)
@option(
    "--nan", under="Output", in_short_help=True, is_flag=True,
    help="Exit with 3 if any tensor has a NaN or Inf, with 4 if one could not be read.",
)  # fmt: skip
@memory_option
@threads_option
@cluster_option
@json_option
@quiet_option
def stats(
    source: Place,
    opening: OpenOptions,
    rules: Rules | None,
    match: tuple[str, ...],
    by: str,
    nan: bool,
    memory: int | None,
    threads: int | None,
    cluster: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Show statistics of the values of CHECKPOINT: minimum, maximum, mean, standard deviation, norm, zeros, NaNs, Infs.

    Replicas are not read. The first NaN or infinity of each tensor is named, with its index and its rank.
    """
    from reshard.compute.stats import stats as compute_stats
    from reshard.view.pages.stats_view import stats_data, stats_text

    checkpoint = open_checkpoint(source, **vars(opening))
    checkpoint = rules.derived(checkpoint).checkpoint if rules else checkpoint
    checkpoint = checkpoint.sel(*match) if match else checkpoint
    if not quiet:
        say_warnings(checkpoint.warnings)
    with (
        cluster_client(cluster, threads, quiet=quiet) as client,
        progress(quiet=quiet or as_json, words=_WORDS) as callback,
    ):
        result = compute_stats(checkpoint, memory=memory, threads=threads, client=client, progress=callback)
    error = _not_finite(checkpoint, result) if nan else None
    if as_json:
        print_json(stats_data(result, by=by), error)
    elif not quiet:
        print_text(stats_text(result, by=by, width=width()))
        click.get_current_context().meta[REPORTED] = isinstance(error, VerifyError)  # the text says it
    if error:
        raise error


def _not_finite(checkpoint: Checkpoint, result: CheckpointStats) -> ReshardError | None:
    """Return the error of `stats --nan`; None if every tensor was read and is finite."""
    from reshard.view.pages.stats_view import summary
    from reshard.view.text import count_text

    if result.not_finite:
        return VerifyError(summary(result), code="not-finite")
    texts = {name for name, tensor in checkpoint.tensors.items() if tensor.text is not None}
    unread = {name: reason for name, reason in result.not_computed.items() if name not in texts}
    if not unread:
        return None
    return SourceError(
        f"{count_text(len(unread), 'tensor')} could not be read, so whether all are finite is not known",
        code="not-computed",
        facts=[f"{name}: {reason}" for name, reason in islice(unread.items(), 3)],
        hint="choose the others with --match",
    )


@click.command(
    cls=Command,
    epilog="""
Examples:

  reshard diff step-1000 step-2000
  reshard diff weights finetuned --match 'model.*' --tolerance 1e-3
  reshard diff src_checkpoints weights --source-strategy src_strategy.ckpt
""",
    details="""
Values are compared as numbers in float64. A NaN equals a NaN of the same bits
at the same place, or, of another dtype, any NaN. If other NaNs or infinities
differ, no tolerance accepts it.

Exits with 0 if names, shapes and texts are the same and the values of all
tensors are within the tolerance, and with 3 if not. Other dtypes are listed.

The object of --json has the keys a, b, same, tolerance, relative, only_a,
only_b (names), unlike (shapes or texts that differ), not_compared (reasons by
name), dtypes (of tensors of which they differ), bytes_read, seconds, warnings,
and tensors, those that changed most first: name, shape, dtypes, size, differing
(number of elements), not_finite (how many of these have a NaN or an infinity),
max_abs, mean_abs (null if not finite), relative (norm of the difference,
divided by the norm in SOURCE), cosine (null if either is zero), first (index of
the first element that differs), within (the tolerance).
""",
    short_help="Show how far the values of two checkpoints are apart.",
)
@click.argument("source", type=READ_PLACE)
@click.argument("target", type=READ_PLACE)
@source_options
@opened_target_options
@match_option
@option(
    "--tolerance",
    under="Output",
    in_short_help=True,
    type=float,
    default=0.0,
    metavar="X",
    help="The largest absolute difference of elements that counts as equal.  [default: 0]",
)
@option(
    "--relative",
    under="Output",
    in_short_help=True,
    type=float,
    metavar="X",
    help="The largest relative difference of a tensor that counts as equal, whatever its elements differ.  "
    "[default: none]",
)
@memory_option
@threads_option
@cluster_option
@json_option
@verbose_option
@quiet_option
def diff(
    source: Place,
    target: Place,
    opening: OpenOptions,
    target_opening: OpenOptions,
    match: tuple[str, ...],
    tolerance: float,
    relative: float | None,
    memory: int | None,
    threads: int | None,
    cluster: str | None,
    as_json: bool,
    verbose: bool,
    quiet: bool,
) -> None:
    """Show how the values of the checkpoint TARGET (B) differ from those of SOURCE (A), those that changed most first.

    The two may have any layouts and formats. Names and shapes that differ are listed, too.
    """
    from reshard.compute.differences import diff as compute_diff
    from reshard.view.pages.diff_view import diff_data, diff_text, verdict
    from reshard.view.tables import chosen

    sides = chosen([_opened(source, opening), _opened(target, target_opening, of_target=True)], match)
    if not quiet:
        say_warnings([*dict.fromkeys(warning for side in sides for warning in side.warnings)])
    with (
        cluster_client(cluster, threads, quiet=quiet) as client,
        progress(quiet=quiet or as_json, words=_WORDS) as callback,
    ):
        result = compute_diff(
            *sides, tolerance=tolerance, relative=relative, memory=memory, threads=threads, client=client,
            progress=callback,
        )  # fmt: skip
    error = None if result.same else VerifyError(verdict(result), code="different")
    if as_json:
        print_json(diff_data(result), error)
    elif not quiet:
        print_text(diff_text(result, width=width(), verbose=verbose))
        click.get_current_context().meta[REPORTED] = error is not None  # the text says it
    if error:
        raise error


def _opened(path: Place, opening: OpenOptions, *, of_target: bool = False) -> Checkpoint:
    """Open a side; errors name the options of the side."""
    from reshard.core.verify.sides import options_of

    with options_of("target") if of_target else nullcontext():
        return open_checkpoint(path, **vars(opening))
