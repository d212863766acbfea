"""Thumbnails: how a tensor is cut, drawn without labels in a row of a table; and the picture that a row opens.

Equal drawings of a page are one `<symbol>`, which rows `<use>`. Its id is a hash of the drawing: ids of the pages of a
notebook are equal only if their drawings are.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING

from reshard.view.blocks import DrawnSide, Frame, cells_of, colours, holder, summary
from reshard.view.svg import Markup, hatch, join, moved, tag
from reshard.view.words import blocks_of, is_computed

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from reshard.core.model.checkpoint import Checkpoint, Tensor
    from reshard.core.plan.plan import Plan, Route
    from reshard.view.svg import Picture

_SIZE = (36.0, 20.0, 10.0)
"""The width and height of a thumbnail in a row, and its height if the tensor has one dimension."""

_MOST_CELLS, _LEAST = 64, 2.0
_MOST_DRAWN = 60
_ROOM = 60_000  # characters of the pictures of a page: about 30 of eight ranks; rows of further cuts have none
_HATCHED = 4.5  # the least pixels of a side of a rectangle that is hatched


class Thumbnails:
    """The thumbnails of one page.

    Args:
        size: the width, the height, and the height for a single dimension, in pixels.
    """

    def __init__(self, size: tuple[float, float, float] = _SIZE) -> None:
        self._size = size
        self._symbols: dict[str, Markup] = {}
        self._drawn: dict[Hashable, tuple[str, float, str]] = {}
        self._pictures: dict[Hashable, tuple[str, float, float]] = {}
        self._room = _ROOM

    def of_tensor(self, checkpoint: Checkpoint, tensor: Tensor, title: str) -> Markup:
        """Return the thumbnail of a tensor's blocks; `title` says how it is cut (`cut_words`)."""
        key = tensor.sharding, title

        def side() -> DrawnSide:
            computed = is_computed(checkpoint, tensor)
            return DrawnSide("", tensor.spec.shape, *blocks_of(checkpoint, tensor), computed=computed)

        return self.of(key, side, title)

    def of_target(self, plan: Plan, route: Route) -> Markup:
        """Return the thumbnail of the blocks that a plan writes of a tensor."""

        def side() -> DrawnSide:
            ranks: dict[object, set[int]] = {}
            for block, replicas in zip(route.held or route.recipe.targets, route.writes, strict=True):
                ranks.setdefault(block, set()).update(plan.files[at.file].rank for at in replicas)
            blocks = tuple(dict.fromkeys(route.held or route.recipe.targets))
            return DrawnSide("", route.recipe.shape, blocks, tuple(tuple(sorted(ranks[block])) for block in blocks))

        return self.of(route, side)

    def of(self, key: Hashable, side: Callable[[], DrawnSide | None], title: str = "") -> Markup:
        """Return the thumbnail of a side.

        Args:
            key: equal keys are of equal sides.
            side: returns the side, or None if there is no drawing; called once for each key.
            title: a description; by default the numbers of blocks and ranks.
        """
        if key not in self._drawn:
            self._drawn[key] = self._draw(side())
        name, height, counts = self._drawn[key]
        if not name:
            return Markup("")
        use = tag("use", href=f"#{name}")
        return tag(
            "svg", tag("title", title or counts), use, class_="cut", role="img", width=self._size[0] + 2, height=height
        )

    def picture(self, key: Hashable, draw: Callable[[], Picture]) -> tuple[str, float, float]:
        """Return the id, width and height of a picture, or "" and zeros if the page has no room for it.

        Args:
            key: equal keys are of equal pictures.
            draw: returns the picture; called once for each key.
        """
        if key not in self._pictures:
            self._pictures[key] = "", 0.0, 0.0
            if self._room > 0 and len(self._pictures) <= _MOST_DRAWN:
                picture = draw()
                is_new = picture.drawing not in self._symbols.values()
                if not is_new or len(picture.drawing) <= self._room:
                    self._pictures[key] = self._symbol(picture.drawing), picture.width, picture.height
                    self._room -= len(picture.drawing) * is_new
        return self._pictures[key]

    def _symbol(self, drawing: Markup) -> str:
        """Define a symbol, and return its id."""
        name = f"reshard-{sha256(drawing.encode()).hexdigest()[:12]}"
        self._symbols[name] = drawing
        return name

    def _draw(self, side: DrawnSide | None) -> tuple[str, float, str]:
        """Return the id of a symbol, its height and a description."""
        if side is None:
            return "", 0.0, ""
        width, tall, low = self._size
        frame = replace(Frame.of([side]), width=width, height=tall if len(side.shape) > 1 else low)
        cells = cells_of(side, frame, _MOST_CELLS, _LEAST)
        blocks, hatches = [], []
        for cell in cells:
            if any(cell.block.start[axis] for axis in frame.others):
                continue
            (y0, y1), (x0, x1) = frame.spans(cell.block)
            fill, text = colours(cell)[0], holder(cell)
            rectangle = {"x": round(x0, 2), "y": round(y0, 2), "width": round(x1 - x0, 2), "height": round(y1 - y0, 2)}
            blocks.append(tag("rect", tag("title", text), fill=fill, **rectangle))
            if cell.replicated and min(x1 - x0, y1 - y0) >= _HATCHED:
                hatches.append(hatch(x0, y0, x1 - x0, y1 - y0, 5))
        lines = tag("g", *blocks, stroke="currentColor", stroke_width=0.5, stroke_opacity=0.4)
        drawing = moved(1, 1, lines, *hatches)
        return self._symbol(drawing), frame.height + 2, summary(side)

    def symbols(self) -> Markup:
        """Return the definitions of all thumbnails that were returned, for the same page."""
        symbols = (tag("symbol", drawing, id=name) for name, drawing in self._symbols.items())
        return tag("svg", *symbols, width=0.0, height=0.0, class_="symbols") if self._symbols else join([])
