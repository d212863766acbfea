"""`reshard stats`: compute with the values of checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from reshard.cli.commands import Command, option
from reshard.cli.options import (
    cluster_option,
    json_option,
    memory_option,
    quiet_option,
    source_options,
    threads_option,
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
from reshard.errors import VerifyError
from reshard.readers.open import open as open_checkpoint
from reshard.view.progress import progress

if TYPE_CHECKING:
    from reshard.api.asked import OpenOptions
    from reshard.rules.rules import Rules
    from reshard.storage.places import Place

_WORDS = ("reading", "reading", "read")

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
Minimum, maximum, mean, standard deviation and norm are those of the finite
values of a tensor, computed in float64; NaNs and infinities are counted. Of
complex numbers, magnitudes are measured. Replicas are not read, and texts and
what cannot be read are listed as not computed.

Exits with 0, and with --nan with 3 if any tensor has a NaN or an infinity.

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
@option("--nan", under="Output", in_short_help=True, is_flag=True, help="Exit with 3 if any tensor has a NaN or Inf.")
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

    Each byte is read once, and replicas are not read. If there are NaNs or infinities, the first of each tensor is
    named, with its index in the whole tensor and the rank that has it.
    """
    from reshard.compute.stats import stats as compute_stats
    from reshard.view.computed.stats_view import stats_data, stats_text, summary

    checkpoint = open_checkpoint(source, **vars(opening))
    checkpoint = rules.derived(checkpoint).checkpoint if rules else checkpoint
    checkpoint = checkpoint.sel(*match) if match else checkpoint
    if not quiet:
        say_warnings(checkpoint.warnings)
    with (
        cluster_client(cluster, threads, quiet=quiet) as client,
        progress(quiet=quiet, words=_WORDS) as callback,
    ):
        result = compute_stats(checkpoint, memory=memory, threads=threads, client=client, progress=callback)
    error = VerifyError(summary(result), code="not-finite") if nan and result.not_finite else None
    if as_json:
        print_json(stats_data(result, by=by), error)
    elif not quiet:
        print_text(stats_text(result, by=by, width=width()))
        click.get_current_context().meta[REPORTED] = error is not None  # the text says it
    if error:
        raise error
