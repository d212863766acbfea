"""Text and plain data of plans and runs, and the elements of all text: counts, names, tables.

Names come from untrusted files, so each goes through `errors.printable` before it is shown on a terminal. Repeated
names are folded (`strategy.names`), which keeps tables of thousands of tensors short.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from reshard.core.format import targets
from reshard.core.layout.block import Block
from reshard.errors import Text, bytes_text, printable
from reshard.strategy.names import group_names, ranges_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reshard.core.model.checkpoint import Checkpoint, SourceFile
    from reshard.core.model.facts import SampleStats
    from reshard.core.rank_files import Step

_MOST_NAMES = 10
_MOST_FILES = 8
_LEAST_NAME = 24
_WIDEST = 256  # longer cells do not widen their column

NUMBERS = frozenset({
    "Inf", "NaN", "blocks", "bytes", "count", "differing", "in files", "max", "max |A-B|", "mean", "mean |A-B|", "min",
    "norm", "parameters", "rank", "read", "relative", "size", "std", "tensors", "time of all", "written", "zeros",
})  # fmt: skip
"""The titles of columns of numbers, which tables in text and HTML align to the right."""


# --- elements ---------------------------------------------------------------------------------------------------


def count_text(number: int, noun: str) -> str:
    """Write a number and its noun, in the plural if needed.

    >>> count_text(1, "file"), count_text(12_000, "tensor")
    ('1 file', '12,000 tensors')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def shortened(name: str, room: int) -> str:
    """Shorten a name to `room` characters by cutting its middle.

    >>> shortened("model.layers.{0-31}.attention.wq.weight", 24)
    'model.layer....wq.weight'
    """
    if len(name) <= room:
        return name
    tail = (room - 3) // 2
    return f"{name[: room - 3 - tail]}...{name[-tail:]}"


def near(path: str) -> str:
    """Return a path, or the paths in the title of a computed checkpoint, relative to the current directory."""
    here = f"{Path.cwd()}/"
    return "." if f"{path}/" == here else path.removeprefix(here).replace(f" {here}", " ")


def list_text(tensors: Sequence[str]) -> str:
    """Write the number of names and the first of them, folded."""
    return f"{count_text(len(tensors), 'name')}: {folded_text(tensors, _MOST_NAMES)}"


def folded_text(tensors: Iterable[str], most: int) -> str:
    """Write the first `most` names, folded, and the number of the rest."""
    folded = [printable(name) for name, _, _ in group_names((name, None) for name in tensors)]
    more = f" and {len(folded) - most:,} more" if len(folded) > most else ""
    return f"{', '.join(folded[:most])}{more}"


def table_lines(
    header: Sequence[str], rows: Iterable[Sequence[str]], width: int | None = None, *, below: int = 0
) -> list[str]:
    """Return the lines of a table; columns of numbers are aligned to the right.

    Args:
        header: the titles; the first column holds names.
        rows: the cells.
        width: the longest line, or None for any length; names are cut in the middle, but not so that two are equal.
        below: the number of last columns that get lines of their own if the table is too wide; there are more of these
            if names would be equal.
    """
    lines = [tuple(header), *map(tuple, rows)]
    sizes = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if width is None or sum(sizes) + 2 * len(sizes) - 2 <= width:
        return _columns(header, lines)
    first = [line[0] for line in lines]
    for kept in range(len(header) - below, 0, -1):
        room = max(_LEAST_NAME, width - sum(sizes[1:kept]) - 2 * (kept - 1))
        cut = [shortened(name, room) for name in first]
        if len(set(cut)) == len(set(first)):
            break
    else:
        kept, cut = 1, first
    above = _columns(header[:kept], [(name, *line[1:kept]) for name, line in zip(cut, lines, strict=True)])
    under = _columns(header[kept:], [line[kept:] for line in lines])
    if max(map(len, under)) > width - 4:
        under = ["  ".join(line[kept:]) for line in lines]
    return [
        text
        for line, rest in zip(above, under, strict=True)
        for text in (line, *wrap(rest, width, initial_indent="    ", subsequent_indent="    "))
    ]


def fitting_lines(lines: Iterable[str], width: int | None) -> list[str]:
    """Return lines, those that are wider than a terminal broken at spaces; rows of `table_lines` fit already."""
    fitting: list[str] = []
    for line in lines:
        is_wide = width is not None and len(line) > width
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        fitting += wrap(line, width or 0, subsequent_indent=indent, break_on_hyphens=False) if is_wide else [line]
    return fitting


def _columns(header: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [min(_WIDEST, max(map(len, column))) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if title in NUMBERS else cell.ljust(width)
            for cell, width, title in zip(line, widths, header, strict=True)
        ).rstrip()
        for line in lines
    ]


def plain(value: object) -> Any:
    """Convert a value to plain data for JSON: named tuples and blocks to dicts, other sequences to lists.

    >>> from reshard.core.layout.block import Block
    >>> plain((Block((0, 4), (2, 8)), "w", None))
    [{'start': [0, 4], 'stop': [2, 8]}, 'w', None]
    """
    if isinstance(value, Block):
        return fields_data(value, "start", "stop")
    if isinstance(value, tuple | list):
        keys = getattr(value, "_fields", None)
        return fields_data(value, *keys) if keys else [plain(item) for item in value]
    return value


def fields_data(record: object, *names: str) -> dict[str, Any]:
    """Return attributes of a record as plain data."""
    return {name: plain(getattr(record, name)) for name in names}


# --- sources ----------------------------------------------------------------------------------------------------


def kinds_text(formats: Iterable[str], *, index: bool = False) -> str:
    """Count the files of each format; a zarr store counts as one.

    >>> kinds_text(["ckpt", "ckpt"]), kinds_text(["safetensors"], index=True), kinds_text(["zarr"] * 31)
    ('2 ckpt files', '1 safetensors file and its index', 'a zarr store of 31 files')
    """
    counted = Counter(formats)
    called = next((each.called for each in targets() if {each.name} == counted.keys()), "")
    if called:
        return f"{called} of {count_text(sum(counted.values()), 'file')}"
    files = " and ".join(count_text(count, f"{kind} file") for kind, count in sorted(counted.items()))
    its = "its" if counted.total() == 1 else "their"
    return f"{files} and {its} index" if index else files


def of_ranks(before: str, ranks: Iterable[int]) -> str:
    """Write the ranks of files after `before`, or "" for none, or rank 0 alone, which has whole tensors.

    >>> of_ranks(", ", [0, 1, 1, 2]), of_ranks(" for ", [3]), of_ranks(" for ", [0])
    (', 3 ranks (0-2)', ' for rank 3', '')
    """
    distinct = sorted(set(ranks))
    if len(distinct) <= 1:
        return f"{before}rank {distinct[0]}" if any(distinct) else ""
    return f"{before}{count_text(len(distinct), 'rank')} ({ranges_text(distinct)})"


def source_lines(source: Checkpoint) -> list[str]:
    """Describe a source: its title, step if known, files, ranks and size."""
    ranks = [] if source.opened.opening.computation else source.ranks
    return files_lines(source.title, source.stored_files, ranks, source.opening.step)


def files_lines(
    title: str, files: Sequence[tuple[int, SourceFile]], ranks: Sequence[int], step: Step | None
) -> list[str]:
    """Describe files, given the rank of each: their title, step if known, ranks and size."""
    nbytes = bytes_text(sum(file.nbytes for _, file in files))
    kinds = f"{kinds_text(file.index.format for _, file in files)}{of_ranks(', ', ranks)}, {nbytes}"
    title = f"{printable(title)}: "
    return [Text(title, kinds)] if step is None else [Text(title, step.text()), kinds]


def looked_text(looked: SampleStats | None) -> str | None:
    """Describe the content sampling done on open, or return None if there is nothing to report.

    >>> from reshard.core.model.facts import SampleStats
    >>> looked_text(SampleStats(2, 10, 4, 1, 70))
    '2 of 10 tensors; 4 of 70 replicas, 1 of them bit for bit; verify compares all'
    >>> looked_text(SampleStats(10, 10, 70, 70, 70))
    'all 10 tensors; all 70 replicas, bit for bit'
    """
    if looked is None or (looked.tensors == looked.of_tensors and not looked.of_copies):
        return None
    tensors = count_text(looked.of_tensors, "tensor")
    all_ = "all " if looked.of_tensors > 1 else ""
    parts = [f"{all_}{tensors}" if looked.tensors == looked.of_tensors else f"{looked.tensors:,} of {tensors}"]
    if looked.of_copies:
        replicas = count_text(looked.of_copies, "replica")
        sampled = f"all {replicas}" if looked.copies == looked.of_copies else f"{looked.copies:,} of {replicas}"
        whole = "bit for bit" if looked.whole == looked.copies else f"{looked.whole:,} of them bit for bit"
        parts.append(f"{sampled}, {whole}")
    if looked.tensors < looked.of_tensors or looked.whole < looked.of_copies:
        parts.append("verify compares all")
    return "; ".join(parts)
