"""The kit for pages and pictures: HTML and SVG elements, colours, labels.

`tag` makes every element and escapes all text except the result of another `tag`: names come from untrusted files. The
result is both HTML and XML and loads no resources.

Lines and labels have the colour of the surrounding text (`currentColor`). Fills can be told apart with colour-vision
deficiencies, and each has a label colour of high contrast. A rank has the same colour in every picture (`rank_colour`).
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

from reshard.core.storage.places import as_place
from reshard.errors import printable
from reshard.upward import upward
from reshard.view.text import shortened
from reshard.view.words import ranks_words

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

_LONGEST = 300
"""The most characters of a text in an element: a name may have any length."""

_EMPTY = frozenset({"rect", "path", "line"})


class Markup(str):
    """Text that is already markup; other text is escaped when it is put into an element."""

    __slots__ = ()


# --- elements ---------------------------------------------------------------------------------------------------


def tag(name: str, *children: str, **attributes: str | float) -> Markup:
    """Return an element.

    Args:
        name: the name of the element.
        children: `Markup`, which is kept, and other text, which is escaped, and shortened if it is very long.
        attributes: its attributes; `class_` becomes `class`, `stroke_width` becomes `stroke-width`.

    >>> print(tag("p", "a < b ", tag("b", "!"), class_="x"))
    <p class="x">a &lt; b <b>!</b></p>
    """
    written = ""
    for key, value in attributes.items():
        text = f"{value:.6g}" if isinstance(value, float) else value
        written += f' {key.removesuffix("_").replace("_", "-")}="{escaped(text)}"'
    inside = "".join(map(escaped, children))
    return Markup(f"<{name}{written}>{inside}</{name}>" if inside or name not in _EMPTY else f"<{name}{written}/>")


def escaped(value: object) -> str:
    """Return text as markup, shortened if it is very long; what is markup as it is."""
    return value if isinstance(value, Markup) else html.escape(printable(shortened(str(value), _LONGEST)))


def join(children: Iterable[Markup]) -> Markup:
    """Concatenate elements."""
    return Markup("".join(children))


# --- pictures ---------------------------------------------------------------------------------------------------


# Paul Tol's "light" scheme (personal.sron.nl/~pault), made for filled cells with dark labels.
_FEW = ("#77aadd", "#ee8866", "#eedd88", "#ffaabb", "#99ddff", "#44bb99", "#bbcc33", "#aaaa00", "#dddddd")
GREY = ("#a3a3a3", "#1a1a1a")
"""The fill of what is of no rank, such as a computed tensor, and the colour of a label on it."""

_SHADES = (1.0, 0.8, 1.4, 0.65)  # of `_FEW`, for ranks 0-8, 9-17, 18-26, 27-35
_DARK_INK, _LIGHT_INK = "#1a1a1a", "#ffffff"

_ALONE = """\
<style>svg{background:#ffffff;color:#1f1f1f;font-family:system-ui,"DejaVu Sans",sans-serif}
@media(prefers-color-scheme:dark){svg{background:#1c1c1c;color:#dddddd}}</style>"""

Drawn = tuple[Markup, float, float]
"""SVG elements with their width and height in pixels."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawing for a notebook; `save` writes it to a file.

    Attributes:
        title: a description.
        width, height: the size in pixels.
        drawing: the SVG elements.
    """

    title: str
    width: float
    height: float
    drawing: Markup

    def svg(self, *, alone: bool = False) -> Markup:
        """Return the picture as an `<svg>` element, or with `alone` as the text of a file."""
        attributes: dict[str, str | float] = {
            "viewBox": f"0 0 {self.width:.6g} {self.height:.6g}",
            "width": float(self.width),
            "height": float(self.height),
            "role": "img",
        }
        if alone:
            attributes["xmlns"] = "http://www.w3.org/2000/svg"
        elif self.width > 100:  # shrinks to 63 % of its width, then scrolls
            attributes["style"] = f"max-width: max(100%, {0.63 * self.width:.0f}px)"
        style = [Markup(_ALONE)] if alone else []
        title = [tag("title", self.title)] if self.title else []
        return tag("svg", *title, *style, self.drawing, **attributes)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture to an SVG file, for light and dark themes."""
        FilePath(str(as_place(path))).write_text(self.svg(alone=True), encoding="utf-8")

    def html(self) -> Markup:
        """Return the picture as a part of a page; it scrolls if there is little room."""
        return tag("div", self.svg(), class_="scroll")

    def _repr_html_(self) -> str:
        return str(upward("html")(self))

    def __repr__(self) -> str:
        return f"<Picture {self.width:.0f} x {self.height:.0f}: {printable(self.title)}>"


@lru_cache(maxsize=1024)
def rank_colour(rank: int) -> tuple[str, str]:
    """Return the fill of a rank's blocks in every picture, and the colour of a label on it.

    Nine colours are repeated in four shades. Nine has no factor in common with the sizes of most groups of ranks, so
    ranks 0, 8, 16 and so on differ, too.

    >>> rank_colour(0), rank_colour(8), rank_colour(9), rank_colour(36) == rank_colour(0)
    (('#77aadd', '#1a1a1a'), ('#dddddd', '#1a1a1a'), ('#5f88b1', '#1a1a1a'), True)
    """
    shade = _SHADES[rank // len(_FEW) % len(_SHADES)]
    fill = _FEW[rank % len(_FEW)]
    parts = [int(fill[at : at + 2], 16) for at in (1, 3, 5)]
    rgb = [round(part * shade if shade <= 1 else 255 - (255 - part) / shade) for part in parts]
    light = 0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2]
    return "#{:02x}{:02x}{:02x}".format(*rgb), _DARK_INK if light > 118 else _LIGHT_INK


def label(x: float, y: float, text: str, *, size: float = 11, anchor: str = "start", **more: str | float) -> Markup:
    """Return text with its baseline at `y`; `more` are attributes of its element."""
    attributes = {"font_size": size, "text_anchor": anchor, "fill": "currentColor", **more}
    return tag("text", text, x=float(x), y=float(y), **attributes)


def text_width(text: str, size: float = 11) -> float:
    """Return an upper estimate of the width of a label in pixels, since fonts differ."""
    return len(text) * size * 0.6


def cut(text: str, room: float, size: float = 11) -> str:
    """Shorten the text of a label to a width in pixels, by cutting its middle.

    >>> cut("model.layers.0.wq", 120), cut("model.layers.0.wq", 80)
    ('model.layers.0.wq', 'mode...0.wq')
    """
    return shortened(printable(text), int(room / text_width(" ", size)))


def fitting(choices: Iterable[str], room: float, size: float = 11) -> str:
    """Return the first label that fits, or "".

    >>> fitting(["ranks 0-3", "0-3"], 40), fitting(["ranks 0-3", "0-3"], 5)
    ('0-3', '')
    """
    return next((text for text in choices if text_width(text, size) <= room), "")


def hatch(x: float, y: float, width: float, height: float, step: float = 7) -> Markup:
    """Return diagonal lines over a rectangle.

    An SVG pattern would need an id, and ids clash if a page has several pictures.
    """
    lines = []
    offset = step
    while offset < width + height:
        x0, y0 = (offset, 0.0) if offset <= width else (width, offset - width)
        x1, y1 = (0.0, offset) if offset <= height else (offset - height, height)
        lines.append(f"M{x + x0:.1f} {y + y0:.1f}L{x + x1:.1f} {y + y1:.1f}")
        offset += step
    return tag("path", d=Markup("".join(lines)), stroke="#000000", stroke_opacity=0.2, pointer_events="none")


def moved(x: float, y: float, *children: Markup) -> Markup:
    """Return a group of elements, moved to the right and downwards."""
    return tag("g", *children, transform=f"translate({x:.6g} {y:.6g})")


def wrapped(drawings: Iterable[Drawn], most: float, gap: float) -> Drawn:
    """Arrange drawings in rows of at most `most` pixels, `gap` pixels apart."""
    placed: list[Markup] = []
    width = height = x = y = 0.0
    for drawing, w, h in drawings:
        if x and x + w > most:
            x, y = 0.0, height + gap
        placed.append(moved(x, y, drawing))
        width, height = max(width, x + w), max(height, y + h)
        x += w + gap
    return join(placed), width, height


def ranks_range(ranks: Sequence[int]) -> str:
    """Write ranks for a page.

    >>> ranks_range(range(8)), ranks_range(range(0, 64, 8))
    ('0–7', '0–56, step 8')
    """
    return ranks_words(ranks).replace("-", "–")


def ranks_label(ranks: Sequence[int]) -> str:
    """Write ranks for a label.

    >>> ranks_label([3]), ranks_label([0, 1, 2])
    ('rank 3', 'ranks 0–2')
    """
    return f"rank{'s' if len(ranks) > 1 else ''} {ranks_range(ranks)}"
