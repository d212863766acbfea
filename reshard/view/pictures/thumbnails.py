"""Thumbnails: how a tensor is cut, drawn without labels in a row of a table; and the picture that a row opens.

Equal drawings of a page are one `<symbol>`, which rows `<use>`. Its id is a hash of the drawing: ids of the pages of a
notebook are equal only if their drawings are.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING

from reshard.view.pictures.blocks import summary, target_side, tensor_side
from reshard.view.pictures.pens import thumbnail
from reshard.view.svg import Markup, join, tag

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from reshard.core.model.checkpoint import Checkpoint, Tensor
    from reshard.core.plan.plan import Plan, Route
    from reshard.view.pictures.blocks import DrawnSide
    from reshard.view.svg import Picture

_SIZE = (36.0, 20.0, 10.0)
"""The width and height of a thumbnail in a row, and its height if the tensor has one dimension."""

_MOST_CELLS, _LEAST = 64, 2.0
_MOST_DRAWN = 60
_ROOM = 60_000  # characters of the pictures of a page: about 30 of eight ranks; rows of further cuts have none


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
        return self.of((tensor.sharding, title), lambda: tensor_side(checkpoint, tensor), title)

    def of_target(self, plan: Plan, route: Route) -> Markup:
        """Return the thumbnail of the blocks that a plan writes of a tensor."""
        return self.of(route, lambda: target_side(plan, route))

    def of(self, key: Hashable, side: Callable[[], DrawnSide | None], title: str = "") -> Markup:
        """Return the thumbnail of a side.

        Args:
            key: equal keys are of equal sides.
            side: returns the side, or None if there is no drawing; called once for each key.
            title: a description; by default the numbers of blocks and ranks.
        """
        if key not in self._drawn:
            drawn = side()
            self._drawn[key] = ("", 0.0, "") if drawn is None else self._draw(drawn)
        name, height, counts = self._drawn[key]
        if not name:
            return Markup("")
        use, width = tag("use", href=f"#{name}"), self._size[0] + 2
        return tag("svg", tag("title", title or counts), use, class_="cut", role="img", width=width, height=height)

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

    def _draw(self, side: DrawnSide) -> tuple[str, float, str]:
        """Return the id of a symbol, its height and a description."""
        width, tall, low = self._size
        height = tall if len(side.shape) > 1 else low
        return self._symbol(thumbnail(side, width, height, _MOST_CELLS, _LEAST)), height + 2, summary(side)

    def _symbol(self, drawing: Markup) -> str:
        """Define a symbol, and return its id."""
        name = f"reshard-{sha256(drawing.encode()).hexdigest()[:12]}"
        self._symbols[name] = drawing
        return name

    def symbols(self) -> Markup:
        """Return the definitions of all thumbnails that were returned, for the same page."""
        symbols = (tag("symbol", drawing, id=name) for name, drawing in self._symbols.items())
        return tag("svg", *symbols, width=0.0, height=0.0, class_="symbols") if self._symbols else join([])
