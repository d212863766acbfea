"""Pieces of HTML and SVG in which nothing that comes from a file can be taken for markup.

Every element is made by `tag`, which escapes whatever is not the result of another `tag`. What comes out is HTML and
XML alike, has no script, and asks for nothing from elsewhere; its styles hold inside `class="reshard"` only, and take
their colours from the page around it, so that light and dark themes both suit.
"""

from __future__ import annotations

import html
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING

from reshard.view.words import printable, shortened

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_LONGEST = 300
"""The most characters of one piece of text: a name may be of any length."""


class Markup(str):
    """Text that is markup already; any other is escaped when it comes into an element."""

    __slots__ = ()


def tag(name: str, *children: str, **attributes: str | float) -> Markup:
    """Return an element.

    Args:
        name: what element it is.
        children: `Markup`, which is left as it is, and any other text, which is escaped and cut if it is very long.
        attributes: `class_` stands for `class`, `stroke_width` for `stroke-width`.

    >>> print(tag("p", "a < b ", tag("b", "!"), class_="x"))
    <p class="x">a &lt; b <b>!</b></p>
    """
    told = "".join(f' {_attribute(key)}="{_value(value)}"' for key, value in attributes.items())
    inside = "".join(child if isinstance(child, Markup) else _escaped(child) for child in children)
    return Markup(f"<{name}{told}>{inside}</{name}>" if inside or name not in _EMPTY else f"<{name}{told}/>")


_EMPTY = frozenset({"rect", "path", "line"})


def _attribute(key: str) -> str:
    return key.removesuffix("_").replace("_", "-")


def _value(value: str | float) -> str:
    if isinstance(value, Markup):
        return value
    return f"{value:.6g}" if isinstance(value, float) else _escaped(str(value))


def _escaped(text: str) -> str:
    return html.escape(printable(shortened(text, _LONGEST)))


def join(children: Iterable[Markup]) -> Markup:
    """Return elements one after the other."""
    return Markup("".join(children))


@lru_cache(maxsize=1)
def _style() -> Markup:
    css = files("reshard.view").joinpath("style.css").read_text(encoding="utf-8")
    return Markup(f"<style>{css}</style>")


def page(*children: Markup) -> str:
    """Return what a notebook shows for one object."""
    return tag("div", _style(), *children, class_="reshard")


def heading(kind: str, title: str, *also: str) -> Markup:
    """Return the first line: what it is, its name, and facts beside it."""
    facts = [tag("span", fact, class_="fact") for fact in also]
    return tag("div", tag("span", kind, class_="kind"), tag("span", title, class_="title"), *facts, class_="head")


def tiles(*items: tuple[str, str, str]) -> Markup:
    """Return numbers side by side: what each is, how much, and a remark (or an empty one)."""
    return tag(
        "div",
        *(
            tag("div", tag("div", what, class_="what"), tag("b", much), tag("div", more, class_="more"), class_="tile")
            for what, much, more in items
        ),
        class_="tiles",
    )


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[str] = ()) -> Markup:
    """Return a table; columns whose titles are in `right` hold numbers."""
    sides = ["n" if title in set(right) else "t" for title in header]
    head = tag("tr", *(tag("th", title, class_=side) for title, side in zip(header, sides, strict=True)))
    body = [tag("tr", *(tag("td", cell, class_=side) for cell, side in zip(row, sides, strict=True))) for row in rows]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body)), class_="scroll")


def details(title: str, *children: Markup, more: str = "", opened: bool = False) -> Markup:
    """Return a part that is folded away, with a remark beside its title."""
    attributes = {"open": "open"} if opened else {}
    summary = tag("summary", tag("span", title), " ", tag("span", more, class_="more"))
    return tag("details", summary, *children, **attributes)
