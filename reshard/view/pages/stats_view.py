"""Statistics of a checkpoint as a table, as plain data, and as an HTML page with histograms."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

from reshard.compute.stats import number_text
from reshard.core.layout.block import shape_text
from reshard.errors import bytes_text, printable
from reshard.view.pictures.hist import drawn, outline
from reshard.view.sections import MOST_ROWS, Facts, Reasons, Table, page, warnings_of
from reshard.view.sections import lines as section_lines
from reshard.view.svg import Markup, Picture
from reshard.view.text import count_text, fields_data, fitting_lines, near, table_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.compute.stats import CheckpointStats, ValueStats
    from reshard.view.sections import Section

_MOST_SHOWN = 8
_WIDTH, _HEIGHT = 120.0, 24.0


def stats_text(stats: CheckpointStats, *, by: str = "name", width: int | None = None) -> str:
    """Write a table of statistics, a row for each of `CheckpointStats.groups`, and where NaNs and infinities are."""
    rows = list(stats.groups(by).values())
    header, cells = _table(stats, rows)
    lines = []
    if rows:
        below = len(header) - header.index("norm")
        lines += [*table_lines(header, [tuple(map(printable, row)) for row in cells], width, below=below), ""]
    total = stats.total
    counts = f"{count_text(total.size, 'element')}, {count_text(total.zeros, 'zero')}"
    rate = f" ({bytes_text(stats.bytes_read / stats.seconds)}/s)" if stats.seconds else ""
    read = f"read {bytes_text(stats.bytes_read)} in {stats.seconds:.2f} s{rate}"
    lines.append(f"{count_text(len(stats.tensors), 'tensor')}: {counts}; {read}")
    if stats.not_finite:
        lines += [summary(stats), *_not_finite_lines(stats)]
    lines += section_lines(Reasons("not computed", stats.not_computed))
    return "\n".join(fitting_lines(lines, width))


def summary(stats: CheckpointStats) -> str:
    """Return the number of tensors with NaNs or infinities."""
    count, tensors = len(stats.not_finite), count_text(len(stats.tensors), "tensor")
    return f"{printable(near(stats.root))} has NaN or Inf in {count:,} of {tensors}"


def _not_finite_lines(stats: CheckpointStats) -> list[str]:
    places = list(stats.not_finite.items())
    lines = [
        f"  {printable(name)}{shape_text(first.index)} is {first.value}: {_counted(stats.tensors[name])}, "
        f"{'' if not stats.by_ranks else f'rank {first.rank}, '}{printable(near(first.path))}"
        for name, first in places[:_MOST_SHOWN]
    ]
    return [*lines, *([f"  and {len(places) - _MOST_SHOWN:,} more"] if len(places) > _MOST_SHOWN else [])]


def _counted(stats: ValueStats) -> str:
    """Write the number of NaNs and infinities of a tensor."""
    counts = [f"{count:,} {word}" for count, word in ((stats.nans, "NaN"), (stats.infs, "Inf")) if count]
    return f"{' and '.join(counts)} of {count_text(stats.size, 'element')}"


def _table(stats: CheckpointStats, rows: Sequence[ValueStats]) -> tuple[list[str], list[list[str]]]:
    """Return the titles and cells of a table; columns without information are left out."""
    columns = {
        "tensor": [row.name for row in rows],
        "count": [f"{row.tensors:,}" for row in rows],
        "dtype": [row.dtype for row in rows],
        **{title: [number_text(getattr(row, title)) for row in rows] for title in ("min", "max", "mean", "std")},
        "norm": [number_text(row.norm) for row in rows],
        "zeros": [f"{row.zeros:,}" for row in rows],
        "NaN": [f"{row.nans:,}" for row in rows],
        "Inf": [f"{row.infs:,}" for row in rows],
    }
    if all(row.tensors == 1 for row in rows):
        del columns["count"]
    if not stats.not_finite:
        del columns["NaN"], columns["Inf"]
    return list(columns), [list(row) for row in zip(*columns.values(), strict=True)]


# --- data -------------------------------------------------------------------------------------------------------


def stats_data(stats: CheckpointStats, *, by: str = "name") -> dict[str, object]:
    """Return statistics as plain data."""
    return {
        "source": stats.root,
        "finite": not stats.not_finite,
        "bytes_read": stats.bytes_read,
        "seconds": stats.seconds,
        "warnings": list(stats.warnings),
        "not_computed": dict(stats.not_computed),
        "total": _values_data(stats.total),
        "by": by,
        "groups": [{**_values_data(group), "tensors": group.tensors} for group in stats.groups(by).values()],
        "tensors": [
            {
                **_values_data(values),
                "shape": list(values.shape or ()),
                "kind": stats.kinds[name],
                "first": None if values.first is None else fields_data(values.first, "index", "value", "rank", "path"),
            }
            for name, values in stats.tensors.items()
        ],
    }


def _values_data(values: ValueStats) -> dict[str, object]:
    numbers = fields_data(values, "min", "max", "mean", "std", "norm")
    return {
        **fields_data(values, "name", "dtype", "size"),
        **{key: finite_or_none(number) for key, number in numbers.items()},
        **fields_data(values, "zeros", "nans", "infs"),
    }


def finite_or_none(number: float | None) -> float | None:
    """Return a number that JSON can have; None for a NaN, an infinity or no number."""
    return None if number is None or not isfinite(number) else number


# --- pages ------------------------------------------------------------------------------------------------------


def stats_html(stats: CheckpointStats) -> str:
    """Show statistics: sums, a table with a histogram of each group, and NaNs and infinities."""
    rows, total = list(stats.groups().values()), stats.total
    bad, rate = len(stats.not_finite), stats.bytes_read / stats.seconds if stats.seconds else 0
    header, cells = _table(stats, rows)
    with_pictures = [
        [row[0], _drawing(group) if number < MOST_ROWS else "", *row[1:]]
        for number, (row, group) in enumerate(zip(cells, rows, strict=True))
    ]
    facts = Facts([
        ("tensors", f"{len(stats.tensors):,}", f"{len(stats.not_computed):,} not computed"),
        ("elements", f"{total.size:,}", f"{total.zeros:,} zero"),
        ("norm", number_text(total.norm), f"{number_text(total.min)} to {number_text(total.max)}"),
        ("NaN or Inf", f"{total.nans + total.infs:,}", f"in {count_text(bad, 'tensor')}" if bad else ""),
        ("read", bytes_text(stats.bytes_read), f"{stats.seconds:.2f} s, {bytes_text(rate)}/s"),
    ])  # fmt: skip
    titles = ("tensor", "first at", "value", "NaN and Inf", "rank", "file")
    places = [
        (name, shape_text(first.index), first.value, _counted(stats.tensors[name]),
         f"{first.rank}" if stats.by_ranks else "", first.path)
        for name, first in stats.not_finite.items()
    ]  # fmt: skip
    values = Table(
        "Values", [header[0], "values", *header[1:]], with_pictures, most=MOST_ROWS, more="of finite elements",
        opened=True, found=_table(stats, list(stats.tensors.values())), typed=["[NAME]", ".hist(NAME)"],
    )  # fmt: skip
    sections: list[Section] = [
        facts,
        *([Table("NaN or Inf", titles, places, "tensor", wrap="file", opened=True)] if places else []),
        values,
        Reasons("not computed", stats.not_computed),
        *warnings_of(stats),
    ]
    return page(("Statistics", stats.root), sections, stats_text(stats))


def values_html(values: ValueStats) -> str:
    """Show the statistics of one tensor, or of a group, with a histogram."""
    about = values.dtype, shape_text(values.shape) if values.shape is not None else f"{values.tensors:,} tensors"
    total, bad = values.moments, values.nans + values.infs
    sections: list[Section] = [
        Facts([
            ("elements", f"{values.size:,}", f"{values.zeros:,} zero"),
            ("range", f"{number_text(values.min)} to {number_text(values.max)}" if total.finite else "none", "finite"),
            *((title, number_text(getattr(values, title)), "") for title in ("mean", "std", "norm")),
            ("NaN or Inf", f"{bad:,}", _counted(values) if bad else ""),
        ])
    ]  # fmt: skip
    if total.finite:
        remark = "of a sample of the elements; Checkpoint.hist counts all"
        if values.quartiles:
            remark = f"quartiles {', '.join(map(number_text, values.quartiles))}"
        drawing, height = drawn(*values.histogram(64), remark)
        sections.append(Picture(values.name, 562, height, drawing).html())
    return page(("Statistics", values.name, *about), sections, repr(values))


def _drawing(values: ValueStats) -> Markup:
    """Return a histogram in the size of a row; nothing without finite values."""
    if not values.moments.finite:
        return Markup("")
    drawing = outline(*values.histogram(), _WIDTH, _HEIGHT - 1)
    return Picture(f"{number_text(values.min)} to {number_text(values.max)}", _WIDTH, _HEIGHT, drawing).svg()
