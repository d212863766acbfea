"""Differences of two checkpoints as a table, as plain data, and as an HTML page with bars."""

from __future__ import annotations

from math import isfinite, log10
from typing import TYPE_CHECKING

from reshard.compute.stats import number_text
from reshard.core.layout.block import shape_text
from reshard.errors import bytes_text, printable
from reshard.view.pages.stats_view import finite_or_none
from reshard.view.sections import MOST_ROWS, Facts, Names, Reasons, Table, lines, note, page, warnings_of
from reshard.view.svg import Markup, Picture, tag
from reshard.view.text import count_text, fields_data, fitting_lines, near

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.compute.differences import CheckpointDiff, TensorDiff
    from reshard.view.sections import Section

_MOST_SHOWN = 20
_WIDTH, _HEIGHT = 120.0, 12.0
_HEADER = ("tensor", "differing", "max |A-B|", "mean |A-B|", "relative", "cosine", "first at")


def diff_text(diff: CheckpointDiff, *, width: int | None = None, verbose: bool = False) -> str:
    """Write the verdict, the tensors that changed most (`verbose`: all), and names, shapes and dtypes that differ."""
    written = [verdict(diff)]
    changed = [_row(diff.tensors[name]) for name in diff.changed]
    if changed:
        shown = changed if verbose else changed[:_MOST_SHOWN]
        written += ["", *lines(Table("", _HEADER, shown), width, below=2)]
        if len(changed) > len(shown):
            written.append(f"and {len(changed) - len(shown):,} more tensors that differ less; --verbose lists all")
        written.append("")
    written += [line for section in _differing(diff) for line in lines(section, width, verbose=verbose)]
    rate = f" ({bytes_text(diff.bytes_read / diff.seconds)}/s)" if diff.seconds else ""
    written.append(f"read {bytes_text(diff.bytes_read)} in {diff.seconds:.2f} s{rate}")
    return "\n".join(fitting_lines(written, width))


def _differing(diff: CheckpointDiff) -> list[Section]:
    """Return what differs besides values."""
    by_dtypes: dict[tuple[str, str], list[str]] = {}
    for name, dtypes in diff.dtypes.items():
        by_dtypes.setdefault(dtypes, []).append(name)
    return [
        Names(f"only in A, {near(diff.a)}", diff.only_a),
        Names(f"only in B, {near(diff.b)}", diff.only_b),
        Reasons("not alike", diff.unlike),
        Reasons("not compared", diff.not_compared),
        *(Names(f"{first} in A, {second} in B", members) for (first, second), members in by_dtypes.items()),
    ]


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
    facts = Facts([
        ("tensors that differ", f"{len(changed):,}", f"of {len(diff.tensors):,}"),
        ("beyond the tolerance", f"{len(diff.beyond):,}", _tolerance(diff)),
        ("only in A", f"{len(diff.only_a):,}", ""),
        ("only in B", f"{len(diff.only_b):,}", ""),
        ("read", bytes_text(diff.bytes_read), f"{diff.seconds:.2f} s"),
    ])  # fmt: skip
    sections: list[Section] = [facts]
    if changed:
        relatives = [each.relative for each in changed if each.relative > 0 and isfinite(each.relative)]
        bars = [_bar(each, relatives) if number < MOST_ROWS else "" for number, each in enumerate(changed)]
        rows = [*map(_row, changed)]
        with_bars = [(row[0], bar, *row[1:]) for row, bar in zip(rows, bars, strict=True)]
        sections += [
            Table(
                "Changed most", (_HEADER[0], "change", *_HEADER[1:]), with_bars, "tensor", most=MOST_ROWS, opened=True,
                found=(_HEADER, rows),
                beside=note("bars: the relative difference, on a logarithmic scale; red: NaN or Inf"),
            )
        ]  # fmt: skip
    return page(
        ("Difference", diff.a, "and", diff.b), [*sections, *_differing(diff), *warnings_of(diff)], diff_text(diff)
    )


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
