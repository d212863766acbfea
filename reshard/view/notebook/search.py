"""Data and script of the search boxes of long tables.

A page shows a short table: layers are folded, and long lists are cut. A script beside it has all rows, and a search box
that it makes itself shows those that match. The rows are packed: those that differ in numbers only are one template.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING

from reshard.errors import printable
from reshard.view.text import NUMBERS, count_text, shortened

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

FEWEST = 12
"""The most rows of a table without a search box."""

_LARGEST = 250_000  # characters of packed rows; the rest cannot be searched
_LONGEST = 300  # characters of a cell
_NUMBER = re.compile(r"(\d+)")


def packed(header: Sequence[str], rows: Iterable[Sequence[str]], *, wrap: str = "", typed: Sequence[str] = ()) -> str:
    """Return all rows of a table as JSON for `search.js`, safe inside a script of HTML or XML.

    Args:
        header: the titles.
        rows: the cells; one more than there are titles is the picture of a row: its id, width and height.
        wrap: as for `svg.table`.
        typed: what to type about a row, where NAME is its first cell.
    """
    templates: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    size = shown = count = 0
    for row in rows:
        count += 1
        if size > _LARGEST:
            continue
        parts = _NUMBER.split("\t".join(printable(shortened(cell, _LONGEST)) for cell in row))
        text, numbers = tuple(parts[::2]), tuple(parts[1::2])
        if text not in templates:
            templates[text] = []
            size += len("".join(text))
        templates[text].append(numbers)
        size += len(",".join(numbers))
        shown = count
    data = {
        "header": list(header),
        "kinds": ["n" if title in NUMBERS else "wrap" if title == wrap else "t" for title in header],
        "groups": [_group(text, numbers) for text, numbers in templates.items()],
        "code": list(typed),
        "beyond": "" if shown == count else f"among the first {count_text(shown, 'row')} of {count:,}",
    }
    content = json.dumps(data, separators=(",", ":"))
    return content.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")


def _group(text: Sequence[str], rows: Sequence[tuple[str, ...]]) -> tuple[list[str], str]:
    """Return a template with the numbers that all rows share, and the other numbers of each."""
    varying = [len(set(column)) > 1 for column in zip(*rows, strict=True)]
    parts = [text[0]]
    for number, part, varies in zip(rows[0], text[1:], varying, strict=True):
        if varies:
            parts.append(part)
        else:
            parts[-1] += number + part
    items = [",".join(number for number, varies in zip(row, varying, strict=True) if varies) for row in rows]
    return parts, ";".join(items)


@lru_cache(maxsize=1)
def script() -> str:
    """Return the script of a page, without comments and indents."""
    text = files("reshard.view.notebook").joinpath("search.js").read_text(encoding="utf-8")
    lines = (line.strip() for line in text.splitlines())
    return "\n".join(line for line in lines if not line.startswith("//"))
