"""Sections: what is shown of an object. Each object lists them once; `lines` prints them as text, `page` as HTML.

The size of a page is bounded: long lists are cut with a count of the rest, and a search box finds what is not shown.
Its styles apply only inside `class="reshard"` and inherit the colours of the page, for light and dark themes. Where
styles are stripped, as on some sites, a text is shown instead. The only script is that of the search boxes
(`notebook.search`); without it all tables can be read.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.errors import Text, printable
from reshard.strategy.names import group_names
from reshard.view.notebook.search import FEWEST, packed, script
from reshard.view.svg import Markup, escaped, join, tag
from reshard.view.text import NUMBERS, count_text, folded_text, table_lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MOST_ITEMS = 24
"""The most items in a list, and rows in a table, of a page."""

MOST_ROWS = 240
"""The most rows of the main table of a page."""

_MOST_NAMES = 10  # of a list in a text
_MOST_LINES = 60  # of the text in place of a page


class Facts(NamedTuple):
    """Numbers: side by side on a page, one below the other in a text.

    Attributes:
        facts: for each a title, the number, and a remark, which may be empty.
    """

    facts: Sequence[tuple[str, str, str]]


class Table(NamedTuple):
    """A table; on a page it can be collapsed and searched.

    Attributes:
        title: the title; "" for a table that cannot be collapsed.
        header: the titles of the columns; those of numbers (`NUMBERS`) are aligned to the right.
        rows: the cells; those of a page may be markup.
        noun: what a row is.
        wrap: the title of the column of long texts.
        most: the most rows on a page.
        more: a remark next to the title; by default the number of rows.
        opened: it is not collapsed at first.
        found: the titles and rows that the search box finds, if not those of the table.
        typed: what to type about a row that was found, where NAME is its first cell.
        beside: markup above the table.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    noun: str = "row"
    wrap: str = ""
    most: int = MOST_ITEMS
    more: str | None = None
    opened: bool = False
    found: tuple[Sequence[str], Sequence[Sequence[str]]] | None = None
    typed: Sequence[str] = ()
    beside: Markup = Markup("")


class Names(NamedTuple):
    """Names of tensors, folded, if there are any; `meaning` says their title in other words."""

    title: str
    names: Sequence[str]
    meaning: str = ""


class Reasons(NamedTuple):
    """Names, each with a reason or another text; nothing if there are none.

    Attributes:
        title: what they have in common.
        by_name: the texts.
        header: the titles of the columns of a page.
        noun: what a name is of.
    """

    title: str
    by_name: Mapping[str, str | Text]
    header: tuple[str, str] = ("tensor", "reason")
    noun: str = "tensor"


class Note(NamedTuple):
    """A remark."""

    text: str


Section = Facts | Table | Names | Reasons | Note | Markup
"""Markup, such as a picture, is of pages alone."""


# --- text -------------------------------------------------------------------------------------------------------


def lines(section: Section, width: int | None = None, *, below: int = 0, verbose: bool = False) -> list[str]:
    """Return the lines of a section.

    Args:
        section: the section.
        width: the columns of the terminal; None for any number.
        below: as for `table_lines`.
        verbose: write all names.
    """
    match section:
        case Facts(facts):
            return [Text(f"{title:<8} {number}{', ' if more else ''}{more}") for title, number, more in facts]
        case Table():
            return table_lines(section.header, [tuple(map(printable, row)) for row in section.rows], width, below=below)
        case Names(title, names):
            return (
                [f"{printable(title)}: {folded_text(names, len(names) if verbose else _MOST_NAMES)}"] if names else []
            )
        case Reasons(title, by_name):
            return [
                Text(f"{title}: {printable(name)}: ", reason if isinstance(reason, Text) else printable(reason))
                for name, reason, _ in group_names(by_name.items())
            ]
        case Note(text):
            return [printable(text)]
        case _:
            return []


# --- HTML -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _style() -> Markup:
    css = files("reshard.view").joinpath("style.css").read_text(encoding="utf-8")
    return Markup(f"<style>{css}</style>")


def page(title: Sequence[str], sections: Iterable[Section], text: str) -> str:
    """Return the HTML of one object in a notebook.

    Args:
        title: the kind of the object, its name, and facts.
        sections: what is shown of it.
        text: shown in its place where styles are stripped.
    """
    shown = [escaped(line) for line in text.splitlines()]
    if len(shown) > _MOST_LINES:
        shown[_MOST_LINES:] = [f"and {count_text(len(shown) - _MOST_LINES, 'more line')}"]
    spans = [
        tag("span", part, class_=kind) for part, kind in zip(title, ("kind", "title", *["fact"] * 3), strict=False)
    ]
    children = [*([tag("div", *spans, class_="head")] if title else []), *map(markup, sections)]
    has_search = any(' class="find"' in child for child in children)
    return tag(
        "div",
        _style(),
        tag("pre", Markup("\n".join(shown)), class_="reshard-text"),
        tag("div", *children, class_="reshard", hidden="hidden"),
        *([tag("script", Markup(script()))] if has_search else []),
        class_="reshard-output",
    )


def markup(section: Section) -> Markup:
    """Return a section as a part of a page."""
    match section:
        case Facts(facts):
            return tag("div", *(_tile(*fact) for fact in facts), class_="tiles")
        case Table():
            return _table(section)
        case Names():
            return _names(section)
        case Reasons(title, by_name, header, noun):
            rows = [(name, str(reason)) for name, reason in by_name.items()]
            return _table(Table(title, header, rows, noun, wrap=header[1], opened=True)) if rows else Markup("")
        case Note(text):
            return note(text)
    return section


def _names(of: Names) -> Markup:
    if not of.names:
        return Markup("")
    folded = [tag("code", name) for name, _, _ in group_names((name, None) for name in of.names)]
    return _bullets(of.title, folded, "name", ", ".join(filter(None, [f"{len(of.names):,}", of.meaning])))


def _tile(title: str, number: str, more: str) -> Markup:
    parts = tag("div", title, class_="what"), tag("b", number), tag("div", more, class_="more")
    return tag("div", *parts, class_="tile")


def _table(of: Table) -> Markup:
    """Return the first rows of a table, with a search box over all if there are many."""
    kinds = ["n" if title in NUMBERS else "wrap" if title == of.wrap else "t" for title in of.header]
    head = tag("tr", *(tag("th", title, class_=kind) for title, kind in zip(of.header, kinds, strict=True)))
    body = [
        tag("tr", *(tag("td", cell, class_=kind) for cell, kind in zip(row, kinds, strict=True)))
        for row in of.rows[: of.most]
    ]
    shown = [tag("div", tag("table", tag("thead", head), tag("tbody", *body)), class_="scroll")]
    shown += and_more(len(of.rows), of.most, of.noun)
    found = join(shown)
    header, rows = of.found or (of.header, of.rows)
    if len(rows) > FEWEST:
        is_all = of.found is None and len(rows) <= of.most  # the script searches the table itself
        data = "" if is_all else packed(header, rows, wrap=of.wrap, typed=of.typed)
        script_of = [tag("script", Markup(data), type="application/json")] if data else []
        found = tag("div", tag("div", *shown, class_="still"), *script_of, class_="find")
    if not of.title:
        return join([of.beside, found])
    more = f"{len(of.rows):,}" if of.more is None else of.more
    return details(of.title, of.beside, found, more=more, opened=of.opened)


def details(title: str, *children: Markup, more: str = "", opened: bool = False) -> Markup:
    """Return a collapsible part, with a remark next to its title."""
    attributes = {"open": "open"} if opened else {}
    summary = tag("summary", tag("span", title[:1].upper() + title[1:]), " ", tag("span", more, class_="more"))
    return tag("details", summary, *children, **attributes)


def note(text: str) -> Markup:
    """Return a remark."""
    return tag("div", text, class_="note")


def and_more(count: int, shown: int, noun: str) -> list[Markup]:
    """Return a remark on the number of items that are not shown, if any."""
    return [note(f"and {count_text(count - shown, f'more {noun}')}")] if count > shown else []


def warnings_of(subject: Any) -> list[Markup]:
    """Return the warnings of an object, if any, as a part of its page: the command line says them beforehand."""
    warnings = subject.warnings
    return [_bullets("Warnings", warnings, "warning", f"{len(warnings):,}")] if warnings else []


def _bullets(title: str, items: Sequence[str], noun: str, more: str) -> Markup:
    shown = tag("ul", *(tag("li", item) for item in items[:MOST_ITEMS]))
    return details(title, shown, *and_more(len(items), MOST_ITEMS, noun), more=more, opened=True)
