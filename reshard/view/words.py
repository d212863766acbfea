"""Pieces of text: sizes, counts, runs of numbers, tables, names that are safe to print.

Names come from files that nobody vouches for, so every one goes through `printable` before it may reach a terminal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.view.folding import fold

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_MOST_NAMES = 10
_LEAST_NAME = 24
_WIDEST_NAME = 256  # every row of a table is as wide as its longest name
_RIGHT = frozenset({"count", "bytes", "bytes in all"})  # columns of numbers


def printable(text: object, *, keep: str = "") -> str:
    r"""Escape what a terminal would obey instead of showing: control characters, bidirectional marks, lone bytes.

    >>> print(printable("w\x1b[2J\n"), printable("a\nb", keep="\n").count("\n"), printable("größe"))
    w\x1b[2J\n 1 größe
    """
    text = str(text)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode("ascii") for c in text)


def bytes_text(nbytes: float) -> str:
    """Write a size in decimal units, as disks and networks are sold by.

    >>> bytes_text(0), bytes_text(999), bytes_text(1_500_000), bytes_text(999_999), bytes_text(2e15)
    ('0 B', '999 B', '1.5 MB', '1.0 MB', '2000.0 TB')
    """
    size = float(nbytes)
    unit = "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 999.5 or (unit != "B" and size < 999.95):
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"


def count_text(number: int, noun: str) -> str:
    """Write how many of something there are.

    >>> count_text(1, "file"), count_text(12_000, "tensor")
    ('1 file', '12,000 tensors')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def table_lines(
    header: Sequence[str], rows: Iterable[Sequence[str]], width: int | None = None, *, below: int = 0
) -> list[str]:
    """Return the lines of a table, numbers to the right.

    Args:
        header: the titles; the first column is that of names.
        rows: the cells.
        width: how long lines may be, if not as long as they are: names are cut in the middle.
        below: so many columns, the last ones, go to a line of their own where the width does not suffice.
    """
    lines = [tuple(header), *((shortened(name, _WIDEST_NAME), *more) for name, *more in rows)]
    sizes = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if width is None or sum(sizes) + 2 * len(sizes) - 2 <= width:
        return _columns(header, lines)
    kept = len(header) - below
    room = max(_LEAST_NAME, width - sum(sizes[1:kept]) - 2 * (kept - 1))
    above = _columns(header[:kept], [(shortened(line[0], room), *line[1:kept]) for line in lines])
    return [
        text
        for line, first in zip(lines, above, strict=True)
        for text in (first, *(["    " + "  ".join(line[kept:])] if below else []))
    ]


def shortened(name: str, room: int) -> str:
    """Cut a name in its middle.

    >>> shortened("model.layers.{0-31}.attention.wq.weight", 24)
    'model.layer....wq.weight'
    """
    if len(name) <= room:
        return name
    tail = (room - 3) // 2
    return f"{name[: room - 3 - tail]}...{name[-tail:]}"


def _columns(header: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return [
        "  ".join(
            cell.rjust(width) if title in _RIGHT else cell.ljust(width)
            for cell, width, title in zip(line, widths, header, strict=True)
        ).rstrip()
        for line in lines
    ]


def list_text(found: Sequence[str]) -> str:
    """Return names, folded, the first few of many."""
    folded = [printable(name) for name, _, _ in fold((name, None) for name in found)]
    more = f" and {len(folded) - _MOST_NAMES:,} more" if len(folded) > _MOST_NAMES else ""
    return f"{count_text(len(found), 'name')}: {', '.join(folded[:_MOST_NAMES])}{more}"
