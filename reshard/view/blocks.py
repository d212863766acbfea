"""Pictures of layouts: the blocks of a tensor and their ranks, for one layout or for source and target side by side.

1. Draw two axes, preferably ones that are cut; if more axes are cut, draw a panel for each slice of the others.
2. Draw a block as a rectangle in the colour of the first rank that holds it, hatched if other ranks hold it too. A rank
   has one colour on both sides.
3. Draw dashes on the target at the cuts of the source.
4. Merge neighbouring blocks of very fine grids, so that a picture of thousands of ranks stays small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise
from math import ceil, prod
from typing import TYPE_CHECKING, Any

from reshard.core.layout.block import Block, shape_text
from reshard.core.layout.layout import least_shape
from reshard.core.plan.bands import is_grid
from reshard.errors import UsageError, names
from reshard.view.svg import (
    GREY,
    Drawn,
    Markup,
    Picture,
    fitting,
    hatch,
    join,
    label,
    moved,
    rank_colour,
    ranks_label,
    ranks_range,
    tag,
    text_width,
    wrapped,
)
from reshard.view.text import count_text
from reshard.view.words import blocks_of, caption_words, cut_words, is_computed, placements_of

if TYPE_CHECKING:
    from reshard.core.layout.block import Shape
    from reshard.core.layout.layout import Layout
    from reshard.core.model.checkpoint import Checkpoint, Tensor
    from reshard.strategy.strategy import Placed, Strategy

_MOST_CELLS = 576  # rectangles of a side; finer grids are drawn coarser
_LEAST = 4.0  # pixels between two cuts; finer grids are drawn coarser
_LONG, _SHORT = 220.0, 84.0  # pixels of the longer side of a panel, and the least of the shorter one
_MOST_PANELS = 12
_MOST_SIDES = 8

_Cuts = tuple[Sequence[float], Sequence[float]]  # positions of the cuts of rows and of columns, in pixels


@dataclass(frozen=True, slots=True)
class DrawnSide:
    """One tensor's blocks under one layout.

    Attributes:
        title: `source` or `target` in a picture of both, and the stage if there are several.
        shape: the shape of the whole tensor.
        blocks: distinct blocks.
        ranks: for each block, the ranks that hold it; empty if no file has it.
        rule: the layout in words, if there is one.
        computed: the blocks are in no file, but computed when they are read.
    """

    title: str
    shape: Shape
    blocks: tuple[Block, ...]
    ranks: tuple[tuple[int, ...], ...]
    rule: str = ""
    computed: bool = False

    @property
    def is_target(self) -> bool:
        """Return whether it is drawn next to a source."""
        return self.title.startswith("target")


def layout_picture(layout: Layout, shape: Shape | None = None, target: Layout | None = None) -> Picture:
    """Draw the blocks and ranks of a layout, and of a target layout next to it.

    The default shape is the smallest that all layouts divide.

    Raises:
        LayoutError: the shape does not divide, or the layouts have different numbers of dimensions.
    """
    layouts = _titled(layout, target)
    if shape is None:
        shape = least_shape(list(layouts.values()))
    grids = {title: each.grid(tuple(shape)) for title, each in layouts.items()}
    sides = [
        DrawnSide(title, grid.shape, grid.blocks, grid.ranks, caption_words(layouts[title]))
        for title, grid in grids.items()
    ]
    return draw(sides, f"{shape_text(shape)} cut as {' and as '.join(map(caption_words, layouts.values()))}")


def strategy_picture(
    strategy: Strategy, name: str, shape: Shape | None = None, target: Strategy | None = None
) -> Picture:
    """Draw the blocks and ranks of a tensor in every stage, and in a target strategy next to it.

    The default shape is the strategy's, or else the smallest that the layouts divide.

    Raises:
        UsageError: a strategy does not name the tensor.
        LayoutError: the shape does not divide.
    """
    strategies = _titled(strategy, target)
    places = [placed for each in strategies.values() for placed in _places(each, name)]
    if shape is None:
        shapes = [placed.shape for placed in places if placed.shape is not None and not placed.expanded]
        shape = shapes[0] if shapes else least_shape([placed.layout for placed in places])
    sides = [side for title, each in strategies.items() for side in _strategy_sides(each, name, tuple(shape), title)]
    return draw(sides, f"{name} {shape_text(shape)}")


def checkpoint_picture(checkpoint: Checkpoint, name: str, target: Strategy | None = None) -> Picture:
    """Draw the blocks and ranks of a tensor in files, and in a target strategy next to it.

    Raises:
        UsageError: the target does not name it.
        LayoutError: the target does not fit its shape.
    """
    return tensor_picture(checkpoint, checkpoint.tensors[name], target)


def tensor_picture(checkpoint: Checkpoint, tensor: Tensor, target: Strategy | None = None) -> Picture:
    """Draw the blocks and ranks of a tensor of a checkpoint; see `checkpoint_picture`."""
    name = tensor.spec.name
    places = placements_of(checkpoint, tensor)
    rule = caption_words(places[0].layout) if places else ""
    title = "" if target is None else "source"
    computed = is_computed(checkpoint, tensor)
    rule = cut_words(checkpoint, tensor) if computed else rule
    sides = [DrawnSide(title, tensor.spec.shape, *blocks_of(checkpoint, tensor), rule, computed)]
    if target is not None:
        sides += _strategy_sides(target, name, tensor.spec.shape, "target")
    return draw(sides, f"{name} {tensor.spec.dtype} {shape_text(tensor.spec.shape)}")


def _titled(source: Any, target: Any) -> dict[str, Any]:
    return {"": source} if target is None else {"source": source, "target": target}


def _places(strategy: Strategy, name: str) -> tuple[Placed, ...]:
    if name not in strategy.tensors:
        alike = get_close_matches(name, strategy.tensors, n=3)
        hint = f"did you mean {names(alike)}?" if alike else ""
        raise UsageError(f"the strategy has no tensor {name!r}", code="not-in-strategy", hint=hint)
    return strategy.tensors[name]


def _strategy_sides(strategy: Strategy, name: str, shape: Shape, title: str) -> list[DrawnSide]:
    sides = []
    for placed in _places(strategy, name):
        grid = strategy.grid(name, shape, stage=placed.stage)
        stage = f"stage {placed.stage}" if len(strategy.stages) > 1 else ""
        sides.append(
            DrawnSide(
                " · ".join(filter(None, [title, stage])), shape, grid.blocks, grid.ranks, caption_words(placed.layout)
            )
        )
    return sides


# --- drawing ----------------------------------------------------------------------------------------------------


def draw(sides: Sequence[DrawnSide], title: str) -> Picture:
    """Draw the sides next to each other; cuts of the first side are dashed on target sides."""
    frame = Frame.of(sides)
    cuts = _cuts(sides[0], frame) if any(side.is_target for side in sides) else ((), ())
    drawings = [_side(side, frame, cuts if side.is_target else ((), ())) for side in sides[:_MOST_SIDES]]
    drawing, width, height = wrapped(drawings, 900, 44)
    remarks = {
        "hatched: on several ranks": any(len(ranks) > 1 for side in sides for ranks in side.ranks),
        "dashed: where the source is cut": any(cuts),
        "empty: in no file": any(not ranks for side in sides if not side.computed for ranks in side.ranks),
        "grey: computed when it is read": any(side.computed for side in sides),
        f"and {len(sides) - _MOST_SIDES} more stages": len(sides) > _MOST_SIDES,
    }
    if text := " · ".join(remark for remark, applies in remarks.items() if applies):
        drawing = join([drawing, label(0, height + 18, text, opacity=0.66)])
        width, height = max(width, text_width(text)), height + 26
    return Picture(title, ceil(width) + 2.0, ceil(height) + 2.0, drawing)


@dataclass(frozen=True, slots=True)
class Frame:
    """The axes and the size that the panels of all sides share.

    Attributes:
        shape: the shape of the whole tensor.
        rows, columns: the axes drawn downwards and to the right; None if the tensor has too few axes.
        others: the other axes that are cut; each of their slices is a panel.
        width, height: the size of a panel in pixels.
    """

    shape: Shape
    rows: int | None
    columns: int | None
    others: tuple[int, ...]
    width: float
    height: float

    @classmethod
    def of(cls, sides: Sequence[DrawnSide]) -> Frame:
        """Choose the drawn axes: the last ones that are cut, then the largest ones."""
        shape = sides[0].shape
        blocks = [block for side in sides for block in side.blocks]
        cut = [axis for axis, n in enumerate(shape) if any(b.start[axis] or b.stop[axis] < n for b in blocks)]
        rest = sorted((axis for axis in range(len(shape)) if axis not in cut), key=lambda axis: (shape[axis], axis))
        drawn = sorted((rest + cut)[-2:])
        rows, columns = ([None, None, *drawn])[-2:]
        long, short = (_LONG, _SHORT) if len(cut) <= 2 else (_LONG * 0.7, _SHORT * 0.7)
        if rows is None:
            width, height = long, 40.0
        else:
            ratio = max(shape[rows], 1) / max(shape[drawn[1]], 1)
            width, height = max(short, min(long, long / ratio)), max(short, min(long, long * ratio))
        return cls(shape, rows, columns, tuple(axis for axis in cut if axis not in drawn), width, height)

    @property
    def drawn(self) -> tuple[tuple[int | None, float], tuple[int | None, float]]:
        """Return the two drawn axes, rows first, each with its length in pixels."""
        return (self.rows, self.height), (self.columns, self.width)

    def spans(self, block: Block) -> list[tuple[float, float]]:
        """Return the begin and end of a block downwards, and to the right, in pixels."""
        spans = []
        for axis, pixels in self.drawn:
            scale = pixels if axis is None else pixels / max(self.shape[axis], 1)
            spans.append((0.0, pixels) if axis is None else (block.start[axis] * scale, block.stop[axis] * scale))
        return spans


@dataclass(frozen=True, slots=True)
class Cell:
    """A rectangle of a picture: one block, or several merged ones of a fine grid."""

    block: Block
    ranks: tuple[int, ...]
    count: int
    replicated: bool
    computed: bool = False


def _side(side: DrawnSide, frame: Frame, cuts: _Cuts) -> Drawn:
    panels: dict[tuple[tuple[int, int], ...], list[Cell]] = {}
    cells = cells_of(side, frame)
    for cell in cells:
        key = tuple((cell.block.start[axis], cell.block.stop[axis]) for axis in frame.others)
        panels.setdefault(key, []).append(cell)
    keys = sorted(panels)[:_MOST_PANELS]
    drawings = [_panel(frame, key, panels[key], cuts) for key in keys]
    drawing, width, height = wrapped(drawings, 4 * (frame.width + 50), 14)
    lines = [line for line in (side.title, side.rule, summary(side)) if line]
    remarks = []
    if len(cells) < len(side.blocks):
        most = max(cell.count for cell in cells)
        remarks.append(f"drawn coarser: up to {most} blocks as one" if most > 1 else f"the first {len(cells):,} blocks")
    if len(panels) > len(keys):
        remarks.append(f"the first {len(keys)} of {len(panels)} panels")
    top = 16.0 * len(lines) + 6
    below = top + height
    titles = [
        label(0, 13 + 16 * n, line, **({"font_weight": 600} if line == side.title else {"opacity": 0.8}))
        for n, line in enumerate(lines)
    ]
    notes = [label(0, below + 11 + 16 * n, remark, opacity=0.66) for n, remark in enumerate(remarks)]
    width = max([width, *map(text_width, lines + remarks)])
    return join([*titles, *notes, moved(0, top, drawing)]), width, below + 16.0 * len(remarks)


def summary(side: DrawnSide) -> str:
    """Count the blocks of a side and the ranks of each."""
    if side.computed:
        return "" if len(side.blocks) == 1 else f"in {len(side.blocks):,} blocks"
    copies = sorted({len(ranks) for ranks in side.ranks})
    each = count_text(copies[-1], "rank") if len(copies) == 1 else f"{copies[0]} to {copies[-1]} ranks"
    if len(side.blocks) == 1:
        return f"whole on {each}"
    if not is_grid(side.shape, side.blocks):
        return f"{len(side.blocks):,} blocks, each on {each}"
    ways = [len({block.start[axis] for block in side.blocks}) for axis in range(len(side.shape))]
    return f"{' x '.join(map(str, ways))} blocks, each on {each}"


def cells_of(side: DrawnSide, frame: Frame, most: int = _MOST_CELLS, least: float = _LEAST) -> list[Cell]:
    """Return a rectangle for each block, or for several neighbours of a fine grid.

    Args:
        side: the blocks.
        frame: the size of the panels.
        most: the most rectangles.
        least: the least pixels between two cuts.
    """
    cells = [
        Cell(block, ranks, 1, len(ranks) > 1, side.computed)
        for block, ranks in zip(side.blocks, side.ranks, strict=True)
    ]
    panels = min(_MOST_PANELS, len({tuple(b.start[axis] for axis in frame.others) for b in side.blocks}))
    most = max(most // panels, 1)
    starts: dict[int, list[int]] = {}
    step: dict[int, int] = {}  # the number of neighbours that are merged
    for axis, pixels in frame.drawn:
        if axis is not None:
            starts[axis] = sorted({block.start[axis] for block in side.blocks})
            step[axis] = 1
            while len(starts[axis]) / step[axis] > pixels / least:
                step[axis] *= 2
    while prod(ceil(len(starts[axis]) / step[axis]) for axis in step) > most:
        finest = max(step, key=lambda axis: len(starts[axis]) / step[axis])
        step[finest] *= 2
    if all(factor == 1 for factor in step.values()):
        return cells
    if not is_grid(side.shape, side.blocks):
        return cells[:most]
    number = {axis: {start: n // step[axis] for n, start in enumerate(starts[axis])} for axis in step}
    groups: dict[tuple[int, ...], list[Cell]] = {}
    for cell in cells:
        key = tuple(number[axis][start] if axis in number else start for axis, start in enumerate(cell.block.start))
        groups.setdefault(key, []).append(cell)
    return [
        Cell(
            Block(group[0].block.start, group[-1].block.stop),  # the group is in row-major order
            tuple(sorted({rank for cell in group for rank in cell.ranks})),
            len(group),
            any(cell.replicated for cell in group),
            side.computed,
        )
        for group in groups.values()
    ]


def _panel(frame: Frame, key: tuple[tuple[int, int], ...], cells: Sequence[Cell], cuts: _Cuts) -> Drawn:
    """Draw a panel with the indices of its cuts."""
    width, height = frame.width, frame.height
    elements = [_rectangle(frame, cell) for cell in cells]
    lines = [*(f"M0 {at:.2f}H{width:.6g}" for at in cuts[0]), *(f"M{at:.2f} 0V{height:.6g}" for at in cuts[1])]
    elements += [
        tag("path", d=line, stroke="#1a1a1a", stroke_width=1.4, stroke_dasharray="3 3", class_="cut") for line in lines
    ]
    elements += [_caption(frame, cell, cuts) for cell in cells]
    margin, top, right = 4.0, 0.0, 4.0
    if frame.columns is not None:
        digits = len(str(frame.shape[frame.columns]))
        ticks = _ticks(cells, frame, frame.columns, width, 9 + 6 * digits)
        elements += [label(at, -4, text, size=9, anchor="middle", opacity=0.7) for at, text in ticks]
        top, right = 14.0, 4 + text_width(str(frame.shape[frame.columns]), 9) / 2
    if frame.rows is not None:
        ticks = _ticks(cells, frame, frame.rows, height, 11)
        elements += [label(-4, at + 3, text, size=9, anchor="end", opacity=0.7) for at, text in ticks]
        margin = 6 + max(text_width(text, 9) for _, text in ticks)
    if frame.others:
        spans = {axis: f"{start}:{stop}" for axis, (start, stop) in zip(frame.others, key, strict=True)}
        slices = ", ".join(spans.get(axis, ":") for axis in range(len(frame.shape)))
        elements.append(label(0, height + 16, f"[{slices}]"))
    return moved(margin, top, *elements), margin + width + right, top + height + (20 if frame.others else 6)


def _rectangle(frame: Frame, cell: Cell) -> Markup:
    (y0, y1), (x0, x1) = frame.spans(cell.block)
    blocks = f"{cell.count} blocks, " if cell.count > 1 else ""
    rectangle = tag(
        "rect", tag("title", f"{holder(cell)}: {blocks}{cell.block}"), class_="block",
        x=round(x0, 3), y=round(y0, 3), width=round(x1 - x0, 3), height=round(y1 - y0, 3),
        fill=colours(cell)[0], stroke="currentColor", stroke_width=0.8, stroke_opacity=0.55,
    )  # fmt: skip
    hatched = cell.replicated and min(x1 - x0, y1 - y0) >= 5
    return join([rectangle, hatch(x0, y0, x1 - x0, y1 - y0)]) if hatched else rectangle


def holder(cell: Cell) -> str:
    """Name the ranks that hold a rectangle, or say why there are none."""
    return ranks_label(cell.ranks) if cell.ranks else "computed" if cell.computed else "in no file"


def _caption(frame: Frame, cell: Cell, cuts: _Cuts) -> Markup:
    """Label a rectangle with its ranks, shortened to the room; an outline separates text and lines."""
    (y0, y1), (x0, x1) = (_widest(span, at) for span, at in zip(frame.spans(cell.block), cuts, strict=True))
    choices = [holder(cell)]
    if cell.ranks:
        choices += [ranks_range(cell.ranks), f"{cell.ranks[0]} +{len(cell.ranks) - 1}", f"{cell.ranks[0]}"]
    caption = fitting(choices, x1 - x0 - 4, 10) if y1 - y0 >= 13 else ""
    if not caption:
        return Markup("")
    fill, ink = colours(cell)
    return label(
        (x0 + x1) / 2, (y0 + y1) / 2 + 3.5, caption, anchor="middle", size=10,
        fill=ink, stroke=fill, stroke_width=3, paint_order="stroke", stroke_linejoin="round",
    )  # fmt: skip


def _widest(span: tuple[float, float], cuts: Sequence[float]) -> tuple[float, float]:
    """Return the widest part of a span between cuts, the first if there are several.

    >>> _widest((0, 60), [20, 60]), _widest((0, 60), [30])
    ((20, 60), (0, 30))
    """
    edges = [span[0], *(at for at in cuts if span[0] < at < span[1]), span[1]]
    return max(pairwise(edges), key=lambda part: round(part[1] - part[0], 3))


def colours(cell: Cell) -> tuple[str, str]:
    """Return the fill of a rectangle, by its first rank, and the colour of labels on it."""
    return rank_colour(cell.ranks[0]) if cell.ranks else GREY if cell.computed else ("none", "currentColor")


def _ticks(cells: Sequence[Cell], frame: Frame, axis: int, pixels: float, apart: float) -> list[tuple[float, str]]:
    """Return positions and indices to write along an axis: the ends, and the cuts with enough room."""
    extent = frame.shape[axis]
    scale = pixels / max(extent, 1)
    ticks: list[tuple[float, str]] = []
    for edge in sorted({cell.block.start[axis] for cell in cells}):
        if not ticks or (edge * scale - ticks[-1][0] >= apart and pixels - edge * scale >= apart):
            ticks.append((edge * scale, str(edge)))
    return [*ticks, (pixels, str(extent))]


def _cuts(side: DrawnSide, frame: Frame) -> _Cuts:
    """Return the cuts of a side along rows and columns; none if they are too close to be drawn."""
    cuts: list[Sequence[float]] = []
    for n, (_, pixels) in enumerate(frame.drawn):
        edges = sorted({frame.spans(block)[n][0] for block in side.blocks} - {0.0})
        cuts.append(edges if len(edges) < pixels / _LEAST else ())
    return cuts[0], cuts[1]
