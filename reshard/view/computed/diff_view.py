"""Differences of two checkpoints as a table, as plain data, and as an HTML page with bars."""

from __future__ import annotations

from math import isfinite, log10
from typing import TYPE_CHECKING

from reshard.compute.stats import number_text
from reshard.core.layout.block import shape_text
from reshard.errors import bytes_text, printable
from reshard.strategy.names import group_names
from reshard.view.computed.stats_view import finite_or_none
from reshard.view.svg import (
    Markup,
    Picture,
    and_more,
    details,
    heading,
    listing,
    note,
    page,
    searched,
    section,
    table,
    tag,
    tiles,
    warnings_listed,
)
from reshard.view.text import count_text, fields_data, fitting_lines, folded_text, near, table_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.compute.differences import CheckpointDiff, TensorDiff

_MOST_SHOWN = 20
_MOST_NAMES = 10
_MOST_ROWS = 240
_WIDTH, _HEIGHT = 120.0, 12.0
_HEADER = ("tensor", "differing", "max |A-B|", "mean |A-B|", "relative", "cosine", "first at")


def diff_text(diff: CheckpointDiff, *, width: int | None = None, verbose: bool = False) -> str:
    """Write the verdict, the tensors that changed most, and names, shapes and dtypes that differ.

    Args:
        diff: the differences.
        width: the columns of the terminal; None for any number.
        verbose: list all tensors that differ.
    """
    lines = [verdict(diff)]
    changed = [diff.tensors[name] for name in diff.changed]
    if changed:
        first_changed = changed if verbose else changed[:_MOST_SHOWN]
        rows = [tuple(map(printable, _row(each))) for each in first_changed]
        lines += ["", *table_lines(_HEADER, rows, width, below=2)]
        if len(changed) > len(first_changed):
            lines.append(
                f"and {len(changed) - len(first_changed):,} more tensors that differ less; --verbose lists all"
            )
        lines.append("")
    for title, only in ((f"only in A, {near(diff.a)}", diff.only_a), (f"only in B, {near(diff.b)}", diff.only_b)):
        if only:
            lines.append(f"{printable(title)}: {folded_text(only, len(only) if verbose else _MOST_NAMES)}")
    lines += [f"{printable(name)} {printable(reason)}" for name, reason, _ in group_names(diff.unlike.items())]
    lines += [
        f"not compared: {printable(name)}: {printable(reason)}"
        for name, reason, _ in group_names(diff.not_compared.items())
    ]
    by_dtypes: dict[tuple[str, str], list[str]] = {}
    for name, dtypes in diff.dtypes.items():
        by_dtypes.setdefault(dtypes, []).append(name)
    for (first, second), members in by_dtypes.items():
        folded = folded_text(members, len(members) if verbose else 3)
        lines.append(f"{first} in A, {second} in B: {count_text(len(members), 'tensor')}, {folded}")
    rate = f" ({bytes_text(diff.bytes_read / diff.seconds)}/s)" if diff.seconds else ""
    lines.append(f"read {bytes_text(diff.bytes_read)} in {diff.seconds:.2f} s{rate}")
    return "\n".join(fitting_lines(lines, width))


def verdict(diff: CheckpointDiff) -> str:
    """Return in one line whether two checkpoints are the same."""
    sides = f"A = {printable(near(diff.a))}, B = {printable(near(diff.b))}"
    count, of = len(diff.changed), count_text(len(diff.tensors), "tensor")
    if diff.same:
        within = f"{count:,} of {of} differ, within the tolerance" if count else f"all values of {of} are equal"
        return f"{sides}: {within}"
    parts = [f"{count:,} of {of} differ"] if count else [f"the values of {of} are equal"]
    counts = {
        "only in A": diff.only_a, "only in B": diff.only_b, "of other shapes or texts": diff.unlike,
        "not compared": diff.not_compared,
    }  # fmt: skip
    parts += [f"{len(items):,} {title}" for title, items in counts.items() if items]
    return f"{sides}: {', '.join(parts)}"


def _row(each: TensorDiff) -> list[str]:
    """Return the cells of a tensor."""
    not_finite = f", {each.not_finite:,} with NaN or Inf" if each.not_finite else ""
    return [
        each.name,
        f"{each.differing:,} of {each.size:,}{not_finite}",
        number_text(each.max_abs),
        number_text(each.mean_abs),
        number_text(each.relative),
        "" if each.cosine is None else f"{each.cosine:.6f}",
        shape_text(each.first) if each.first else "",
    ]


def diff_data(diff: CheckpointDiff) -> dict[str, object]:
    """Return the differences of two checkpoints as plain data."""
    return {
        **fields_data(diff, "a", "b", "same", "tolerance", "relative", "only_a", "only_b"),
        "unlike": dict(diff.unlike),
        "not_compared": dict(diff.not_compared),
        "dtypes": {name: list(dtypes) for name, dtypes in diff.dtypes.items()},
        **fields_data(diff, "bytes_read", "seconds", "warnings"),
        "tensors": [_tensor_data(diff, each) for each in diff.tensors.values()],
    }


def _tensor_data(diff: CheckpointDiff, each: TensorDiff) -> dict[str, object]:
    return {
        **fields_data(each, "name", "shape", "dtypes", "size", "differing", "not_finite"),
        **{key: finite_or_none(getattr(each, key)) for key in ("max_abs", "mean_abs", "relative", "cosine")},
        "first": None if each.first is None else list(each.first),
        "within": diff.accepts(each),
    }


# --- pages ------------------------------------------------------------------------------------------------------


def diff_html(diff: CheckpointDiff) -> str:
    """Show the differences of two checkpoints, with a bar for how much each tensor changed."""
    changed = [diff.tensors[name] for name in diff.changed]
    parts = [
        heading("Difference", diff.a, "and", diff.b),
        tiles(
            ("tensors that differ", f"{len(changed):,}", f"of {len(diff.tensors):,}"),
            ("beyond the tolerance", f"{len(diff.beyond):,}", _tolerance(diff)),
            ("only in A", f"{len(diff.only_a):,}", ""),
            ("only in B", f"{len(diff.only_b):,}", ""),
            ("read", bytes_text(diff.bytes_read), f"{diff.seconds:.2f} s"),
        ),
    ]
    if changed:
        relatives = [each.relative for each in changed if each.relative > 0 and isfinite(each.relative)]
        rows: list[Sequence[str]] = []
        for each in changed[:_MOST_ROWS]:
            name, *cells = _row(each)
            rows.append([name, _bar(each, relatives), *cells])
        parts.append(
            details(
                "Changed most",
                searched(
                    [table([_HEADER[0], "change", *_HEADER[1:]], rows), *and_more(len(changed), _MOST_ROWS, "tensor")],
                    _HEADER, map(_row, changed),
                ),
                note("bars: the relative difference, on a logarithmic scale; red: NaN or Inf"), opened=True,
            )
        )  # fmt: skip
    parts += [
        listing(title, names, meaning)
        for title, names, meaning in (("Only in A", diff.only_a, "in A"), ("Only in B", diff.only_b, "in B"))
        if names
    ]
    for title, reasons in (("Other shapes or texts", diff.unlike), ("Not compared", diff.not_compared)):
        if reasons:
            parts.append(section(title, ("tensor", "reason"), list(reasons.items()), tuple, "tensor", opened=True))
    if dtypes := [(name, *pair) for name, pair in diff.dtypes.items()]:
        parts.append(section("Other dtypes", ("tensor", "in A", "in B"), dtypes, tuple, "tensor"))
    return page(*parts, *warnings_listed(diff.warnings), text=diff_text(diff))


def _tolerance(diff: CheckpointDiff) -> str:
    """Write the tolerance."""
    relative = "" if diff.relative is None else f" or relative {number_text(diff.relative)}"
    return f"max |A-B| up to {number_text(float(diff.tolerance))}{relative}"


def _bar(each: TensorDiff, relatives: Sequence[float]) -> Markup:
    """Draw a relative difference as a bar, on a logarithmic scale from the smallest to the largest one."""
    share = 1.0
    if relatives and isfinite(each.relative) and not each.not_finite:
        low, high = log10(min(relatives)), log10(max(relatives))
        position = log10(max(each.relative, min(relatives)))
        share = 0.1 + 0.9 * (position - low) / (high - low) if high > low else 1.0
    fill = "#ee8866" if each.not_finite else "#77aadd"
    bar = tag("rect", x=0.0, y=1.0, width=_WIDTH * share, height=_HEIGHT - 2, fill=fill)
    return Picture(f"relative difference {number_text(each.relative)}", _WIDTH, _HEIGHT, bar).svg()
