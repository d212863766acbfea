"""Pictures of layouts: which rank holds which block of a tensor, one layout or source and target side by side.

1. Two axes are drawn, those that are cut before others; where more are cut, every slice of the rest is a panel.
2. A block is a rectangle in the colour of the first rank that holds it, hatched where other ranks hold it too.
3. Next to a source, the target has colours of its own, and shows by dashes where the source is cut.
4. Of very fine grids, neighbouring blocks are drawn as one, so that a picture of thousands of ranks stays small.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache
from itertools import pairwise
from math import ceil, prod
from typing import TYPE_CHECKING

from reshard.errors import LayoutError, UsageError, names
from reshard.layout.block import Block, shape_text
from reshard.layout.layout import least_shape
from reshard.plan.bands import is_grid
from reshard.strategy.names import ranges_text
from reshard.view.svg import Drawn, Markup, Picture, colour, fitting, hatch, join, label, tag, text_width, wrapped
from reshard.view.text import count_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard.layout.block import Shape
    from reshard.layout.layout import Layout
    from reshard.rules.show import Fusion
    from reshard.source.checkpoint import Checkpoint, Tensor
    from reshard.strategy.strategy import Placed, Strategy

_MOST_CELLS = 576
"""The most rectangles of a side; finer grids are drawn coarser."""

_LEAST = 4.0
_BAR = 420.0  # pixels of a fused tensor's rows
"""The least distance of two cuts, in pixels; finer grids are drawn coarser."""

_MOST_PANELS = 12
_MOST_SIDES = 8
_LONG, _SHORT = 220.0, 84.0
"""The longer side of a panel, and the least of the shorter one, in pixels."""


_Cuts = tuple["Sequence[float]", "Sequence[float]"]
"""Where rows and columns are cut, in pixels."""


@dataclass(frozen=True, slots=True)
class Side:
    """One tensor's blocks under one layout.

    Attributes:
        title: of whom.
        shape: the whole tensor's.
        blocks: distinct blocks.
        ranks: for each block, the ranks that hold it; none where no file has it.
        rule: the layout in the numbers of a strategy file, if there is one.
    """

    title: str
    shape: Shape
    blocks: tuple[Block, ...]
    ranks: tuple[tuple[int, ...], ...]
    rule: str = ""

    @property
    def kind(self) -> str:
        """Whether it is the `source` or the `target` of a picture of both."""
        return self.title.partition(" ")[0]


def layout_picture(layout: Layout, shape: Shape | None = None, target: Layout | None = None) -> Picture:
    """Draw which rank of a stage holds which block, and next to it the same for another layout.

    Args:
        layout: what is drawn.
        shape: the whole tensor's; by default the least that all layouts divide, in units of blocks.
        target: the layout to be drawn next to it.

    Raises:
        LayoutError: the shape does not divide, or the layouts have different numbers of dimensions.
    """
    layouts = [layout] if target is None else [layout, target]
    if shape is None:
        shape = least_shape(layouts)
    titles = [""] if target is None else ["source", "target"]
    sides = []
    for title, each in zip(titles, layouts, strict=True):
        grid = each.grid(tuple(shape))
        sides.append(Side(title, grid.shape, grid.blocks, grid.ranks, str(each)))
    return draw(sides, f"{shape_text(shape)} under {' and '.join(map(str, layouts))}")


def strategy_picture(
    strategy: Strategy, name: str, shape: Shape | None = None, target: Strategy | None = None
) -> Picture:
    """Draw which rank holds which block of a tensor, in every stage that has it, and next to it for another strategy.

    Args:
        strategy: names the tensor.
        name: the tensor's name.
        shape: the whole tensor's; by default what the strategy says, else the least that the layouts divide.
        target: the strategy to be drawn next to it.

    Raises:
        UsageError: a strategy does not name the tensor.
        LayoutError: the shape does not divide.
    """
    both = [strategy] if target is None else [strategy, target]
    places = [placed for each in both for placed in _places(each, name)]
    if shape is None:
        stated = [placed.shape for placed in places if placed.shape is not None and not placed.expanded]
        shape = stated[0] if stated else least_shape([placed.layout for placed in places])
    titles = [""] if target is None else ["source", "target"]
    sides = [
        side
        for each, title in zip(both, titles, strict=True)
        for side in _strategy_sides(each, name, tuple(shape), title)
    ]
    return draw(sides, f"{name} {shape_text(shape)}")


def checkpoint_picture(checkpoint: Checkpoint, name: str, target: Strategy | None = None) -> Picture:
    """Draw which rank's files hold which block of a tensor, and next to it how another strategy cuts it.

    Raises:
        UsageError: the target does not name it.
        LayoutError: the target does not fit its shape.
    """
    tensor = checkpoint.tensors[name]
    ranks = tuple(tuple(sorted({checkpoint.ranks[at.file] for at in some})) for some in tensor.sharding.replicas)
    places = checkpoint.strategy.tensors.get(name, ()) if checkpoint.strategy and tensor.listed else ()
    title = "" if target is None else "source"
    blocks = tensor.sharding.blocks
    sides = [Side(title, tensor.spec.shape, blocks, ranks, str(places[0].layout) if places else "")]
    if target is not None:
        sides += _strategy_sides(target, name, tensor.spec.shape, "target")
    return draw(sides, f"{name} {tensor.spec.dtype} {shape_text(tensor.spec.shape)}")


def fusion_picture(fusion: Fusion) -> Picture:
    """Draw which rows of a fused tensor are those of which part."""
    count = len(fusion.parts)
    fills = [*(colour(number, count) for number in range(count)), ("none", "currentColor")]
    scale = _BAR / max(fusion.rows, 1)
    bars = [label(0, 12, fusion.name, font_weight=600), label(0, 28, f"{fusion.rows:,} rows along axis {fusion.axis}")]
    for band in fusion.bands[:_MOST_CELLS]:
        rows = [band.rows] if band.step == 1 else [range(row, row + 1) for row in band.rows[:_MOST_CELLS]]
        own = (
            f"{fusion.parts[band.part]} {band.first}-{band.first + len(band.rows) - 1}" if band.part >= 0 else "padding"
        )
        title = tag("title", f"rows {band.rows[0]}-{band.rows[-1]}: {own}")
        bars += [
            tag("rect", title, x=0.0, y=36 + some.start * scale, width=90.0, height=max(len(some) * scale, 0.5),
                fill=fills[band.part][0], stroke="#00000040", stroke_width=0.5)
            for some in rows
        ]  # fmt: skip
        if band.step == 1 and len(band.rows) * scale >= _LEAST:
            bars.append(label(96, 40 + (band.start + band.stop) / 2 * scale, f"{band.start}-{band.stop - 1}", size=10))
    for number, part in enumerate(fusion.parts):
        y = 36.0 + 18 * number
        bars += [tag("rect", x=180.0, y=y, width=12.0, height=12.0, fill=fills[number][0]), label(198, y + 10, part)]
    width = 200 + max(map(text_width, (*fusion.parts, fusion.name)), default=0)
    return Picture(f"{fusion.name}: {fusion.verb}", ceil(width), ceil(40 + max(_BAR, 18 * count)), join(bars))


def _places(strategy: Strategy, name: str) -> tuple[Placed, ...]:
    if name not in strategy.tensors:
        alike = get_close_matches(name, strategy.tensors, n=3)
        raise UsageError(
            f"the strategy has no tensor {name!r}",
            code="not-in-strategy",
            hint=f"did you mean {names(alike)}?" if alike else "",
        )
    return strategy.tensors[name]


def _strategy_sides(strategy: Strategy, name: str, shape: Shape, title: str) -> list[Side]:
    sides = []
    for placed in _places(strategy, name):
        grid = strategy.grid(name, shape, stage=placed.stage)
        stage = f"stage {placed.stage}" if len(strategy.stages) > 1 else ""
        sides.append(Side(" · ".join(filter(None, [title, stage])), shape, grid.blocks, grid.ranks, str(placed.layout)))
    return sides


@lru_cache(maxsize=1024)
def thumbnail(layout: Layout) -> Markup:
    """Return a small drawing of a layout, without labels; nothing where it is not possible."""
    try:
        grid = layout.grid(least_shape([layout]))
    except LayoutError:
        return Markup("")
    side = Side("", grid.shape, grid.blocks, grid.ranks)
    frame = replace(_Frame.of([side]), width=96.0, height=64.0 if len(grid.shape) > 1 else 20.0)
    cells = [cell for cell in _cells(side, frame, 64) if all(cell.block.start[axis] == 0 for axis in frame.others)]
    firsts = {cell.ranks[0]: n for n, cell in enumerate(cells)}
    colours = {rank: colour(n, len(firsts)) for rank, n in firsts.items()}
    drawing = [_rectangle(frame, cell, colours) for cell in cells]
    return Picture(str(layout), 98, frame.height + 2, tag("g", *drawing, transform="translate(1 1)")).svg()


@lru_cache(maxsize=1024)
def _tiny(shape: Shape, blocks: tuple[Block, ...], ranks: tuple[tuple[int, ...], ...]) -> Markup:
    side = Side("", shape, blocks, ranks)
    frame = replace(_Frame.of([side]), width=34.0, height=22.0 if len(shape) > 1 else 10.0)
    cells = [cell for cell in _cells(side, frame, 64) if all(cell.block.start[axis] == 0 for axis in frame.others)]
    firsts = {cell.ranks[0]: n for n, cell in enumerate(cells) if cell.ranks}
    colours = {rank: colour(n, len(firsts)) for rank, n in firsts.items()}
    drawing = [_rectangle(frame, cell, colours) for cell in cells]
    return Picture("", 36, frame.height + 2, tag("g", *drawing, transform="translate(1 1)")).svg()


def tiny(layout: Layout | None, tensor: Tensor, file_ranks: Sequence[int]) -> Markup:
    """Return a drawing of a tensor's cut as high as a row of a table; nothing if it cannot be drawn.

    Args:
        layout: how ranks cut it, if that is known; else its blocks in the files are drawn.
        tensor: the tensor.
        file_ranks: the rank of each file of its checkpoint.
    """
    try:
        if layout is not None:
            grid = layout.grid(least_shape([layout]))
            return _tiny(grid.shape, grid.blocks, grid.ranks)
    except LayoutError:
        return Markup("")
    ranks = tuple(tuple(sorted({file_ranks[at.file] for at in some})) for some in tensor.sharding.replicas)
    return _tiny(tensor.spec.shape, tensor.sharding.blocks, ranks)


# --- drawing ----------------------------------------------------------------------------------------------------


def draw(sides: Sequence[Side], title: str) -> Picture:
    """Draw layouts of one tensor side by side, the first as the source of the others."""
    frame = _Frame.of(sides)
    fills: dict[str, dict[int, tuple[str, str]]] = {}
    for kind in {side.kind for side in sides}:
        firsts = sorted({ranks[0] for side in sides if side.kind == kind for ranks in side.ranks if ranks})
        fills[kind] = {rank: colour(number, len(firsts), kind) for number, rank in enumerate(firsts)}
    cuts = _edges(sides[0], frame) if len(sides) > 1 else ((), ())
    parts = [
        _side(side, frame, fills[side.kind], cuts if side.kind == "target" else ((), ()))
        for side in sides[:_MOST_SIDES]
    ]
    drawing, width, height = wrapped(parts, 900, 44)
    remarks = []
    if any(len(ranks) > 1 for side in sides for ranks in side.ranks):
        remarks.append("hatched: on several ranks")
    if any(cuts):
        remarks.append("dashed: where the source is cut")
    if any(not ranks for side in sides for ranks in side.ranks):
        remarks.append("empty: in no file")
    if len(sides) > _MOST_SIDES:
        remarks.append(f"and {len(sides) - _MOST_SIDES} more stages")
    if remarks:
        text = " · ".join(remarks)
        drawing = join([drawing, label(0, height + 18, text, opacity=0.66)])
        width, height = max(width, text_width(text)), height + 26
    return Picture(title, ceil(width) + 2.0, ceil(height) + 2.0, drawing)


@dataclass(frozen=True, slots=True)
class _Frame:
    """What the panels of all sides have in common.

    Attributes:
        shape: the whole tensor's.
        rows, columns: the axes drawn downwards and to the right; None where the tensor has too few.
        others: the axes whose slices are panels.
        width, height: of a panel, in pixels.
    """

    shape: Shape
    rows: int | None
    columns: int | None
    others: tuple[int, ...]
    width: float
    height: float

    @classmethod
    def of(cls, sides: Sequence[Side]) -> _Frame:
        """Choose the axes: those that are cut, the last ones first, then the largest."""
        shape = sides[0].shape
        cut = [
            axis
            for axis, extent in enumerate(shape)
            if any(block.start[axis] or block.stop[axis] < extent for side in sides for block in side.blocks)
        ]
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

    def span(self, block: Block, axis: int | None, pixels: float) -> tuple[float, float]:
        """Return where a block begins and ends along a side of a panel."""
        if axis is None:
            return 0.0, pixels
        scale = pixels / max(self.shape[axis], 1)
        return block.start[axis] * scale, block.stop[axis] * scale


@dataclass(frozen=True, slots=True)
class _Cell:
    """A rectangle of a picture: one block, or of a fine grid several neighbours."""

    block: Block
    ranks: tuple[int, ...]
    count: int
    replicated: bool


def _side(side: Side, frame: _Frame, colours: Mapping[int, tuple[str, str]], cuts: _Cuts) -> Drawn:
    panels: dict[tuple[tuple[int, int], ...], list[_Cell]] = {}
    cells = _cells(side, frame)
    for cell in cells:
        key = tuple((cell.block.start[axis], cell.block.stop[axis]) for axis in frame.others)
        panels.setdefault(key, []).append(cell)
    shown = sorted(panels)[:_MOST_PANELS]
    drawings = [_panel(frame, key, panels[key], colours, cuts) for key in shown]
    drawing, width, height = wrapped(drawings, 4 * (frame.width + 50), 14)
    lines = [line for line in (side.title, side.rule, _summary(side)) if line]
    remarks = []
    if len(cells) < len(side.blocks):
        most = max(cell.count for cell in cells)
        remarks.append(f"drawn coarser: up to {most} blocks as one" if most > 1 else f"the first {len(cells):,} blocks")
    if len(panels) > len(shown):
        remarks.append(f"the first {len(shown)} of {len(panels)} panels")
    top = 16.0 * len(lines) + 6
    below = top + height
    texts = [
        *(label(0, 13 + 16 * n, t, **({"font_weight": 600} if t == side.title else {"opacity": 0.8}))
          for n, t in enumerate(lines)),
        *(label(0, below + 11 + 16 * n, text, opacity=0.66) for n, text in enumerate(remarks)),
    ]  # fmt: skip
    width = max([width, *map(text_width, lines + remarks)])
    body = tag("g", drawing, transform=f"translate(0 {top:.6g})")
    return join([*texts, body]), width, below + 16.0 * len(remarks)


def _summary(side: Side) -> str:
    copies = sorted({len(ranks) for ranks in side.ranks})
    each = count_text(copies[-1], "rank") if len(copies) == 1 else f"{copies[0]} to {copies[-1]} ranks"
    if len(side.blocks) == 1:
        return f"whole on {each}"
    if not is_grid(side.shape, side.blocks):
        return f"{len(side.blocks):,} blocks, each on {each}"
    ways = [len({block.start[axis] for block in side.blocks}) for axis in range(len(side.shape))]
    return f"{' x '.join(map(str, ways))} blocks, each on {each}"


def _cells(side: Side, frame: _Frame, most: int = _MOST_CELLS) -> list[_Cell]:
    """Return a rectangle for each block; of a grid with too many, one for some neighbours together."""
    cells = [_Cell(block, ranks, 1, len(ranks) > 1) for block, ranks in zip(side.blocks, side.ranks, strict=True)]
    panels = min(_MOST_PANELS, len({tuple(b.start[axis] for axis in frame.others) for b in side.blocks}))
    most = max(most // panels, 1)
    drawn = [axis for axis in (frame.rows, frame.columns) if axis is not None]
    starts = {axis: sorted({block.start[axis] for block in side.blocks}) for axis in drawn}
    step = dict.fromkeys(drawn, 1)
    for axis, pixels in ((frame.rows, frame.height), (frame.columns, frame.width)):
        while axis is not None and len(starts[axis]) / step[axis] > pixels / _LEAST:
            step[axis] *= 2
    while prod(ceil(len(starts[axis]) / step[axis]) for axis in drawn) > most:
        finest = max(drawn, key=lambda axis: len(starts[axis]) / step[axis])
        step[finest] *= 2
    if all(factor == 1 for factor in step.values()):
        return cells
    if not is_grid(side.shape, side.blocks):
        return cells[:most]
    place = {axis: {start: number // step[axis] for number, start in enumerate(starts[axis])} for axis in drawn}
    joined: dict[tuple[int, ...], list[_Cell]] = {}
    for cell in cells:
        start = cell.block.start
        key = tuple(place[axis][at] if axis in place else at for axis, at in enumerate(start))
        joined.setdefault(key, []).append(cell)
    return [
        _Cell(
            Block(some[0].block.start, some[-1].block.stop),  # in row-major order: the first corner and the last
            tuple(sorted({rank for cell in some for rank in cell.ranks})),
            len(some),
            any(cell.replicated for cell in some),
        )
        for some in joined.values()
    ]


def _panel(
    frame: _Frame,
    key: tuple[tuple[int, int], ...],
    cells: Sequence[_Cell],
    colours: Mapping[int, tuple[str, str]],
    cuts: _Cuts,
) -> Drawn:
    """Draw one panel with the indices of its cuts."""
    width, height = frame.width, frame.height
    elements = [_rectangle(frame, cell, colours) for cell in cells]
    lines = [*(f"M0 {at:.2f}H{width:.6g}" for at in cuts[0]), *(f"M{at:.2f} 0V{height:.6g}" for at in cuts[1])]
    elements += [
        tag("path", d=line, stroke="#1a1a1a", stroke_width=1.4, stroke_dasharray="3 3", class_="cut") for line in lines
    ]
    elements += [_label(frame, cell, colours, cuts) for cell in cells]
    left = 4.0
    top = 14.0 if frame.columns is not None else 0.0
    ticks: list[Markup] = []
    if frame.columns is not None:
        for at, text in _ticks(cells, frame, frame.columns, width, 9 + 6 * len(str(frame.shape[frame.columns]))):
            ticks.append(label(at, -4, text, size=9, anchor="middle", opacity=0.7))
    if frame.rows is not None:
        found = _ticks(cells, frame, frame.rows, height, 11)
        left = 6 + max((text_width(text, 9) for _, text in found), default=0.0)
        ticks += [label(-4, at + 3, text, size=9, anchor="end", opacity=0.7) for at, text in found]
    if frame.others:
        spans = dict(zip(frame.others, key, strict=True))
        inside = ", ".join(
            f"{spans[axis][0]}:{spans[axis][1]}" if axis in spans else ":" for axis in range(len(frame.shape))
        )
        ticks.append(label(0, height + 16, f"[{inside}]"))
    margin = 4 + text_width(str(frame.shape[frame.columns]), 9) / 2 if frame.columns is not None else 4
    body = tag("g", *elements, *ticks, transform=f"translate({left:.6g} {top:.6g})")
    return body, left + width + margin, top + height + (20 if frame.others else 6)


def _who(cell: _Cell) -> str:
    return f"rank{'s' if len(cell.ranks) > 1 else ''} {ranges_text(cell.ranks)}" if cell.ranks else "in no file"


def _rectangle(frame: _Frame, cell: _Cell, colours: Mapping[int, tuple[str, str]]) -> Markup:
    x0, x1 = frame.span(cell.block, frame.columns, frame.width)
    y0, y1 = frame.span(cell.block, frame.rows, frame.height)
    blocks = f"{cell.count} blocks, " if cell.count > 1 else ""
    rectangle = tag(
        "rect",
        tag("title", f"{_who(cell)}: {blocks}{cell.block}"),
        class_="block",
        x=round(x0, 3),
        y=round(y0, 3),
        width=round(x1 - x0, 3),
        height=round(y1 - y0, 3),
        fill=_colour(cell, colours)[0],
        stroke="currentColor",
        stroke_width=0.8,
        stroke_opacity=0.55,
    )
    hatched = cell.replicated and min(x1 - x0, y1 - y0) >= 5
    return join([rectangle, hatch(x0, y0, x1 - x0, y1 - y0)]) if hatched else rectangle


def _label(frame: _Frame, cell: _Cell, colours: Mapping[int, tuple[str, str]], cuts: _Cuts) -> Markup:
    """Name the ranks of a rectangle as far as there is room; the edge in the fill's colour keeps off what is below."""
    x0, x1 = _widest(frame.span(cell.block, frame.columns, frame.width), cuts[1])
    y0, y1 = _widest(frame.span(cell.block, frame.rows, frame.height), cuts[0])
    choices = [_who(cell)]
    if cell.ranks:
        choices += [ranges_text(cell.ranks), f"{cell.ranks[0]} +{len(cell.ranks) - 1}", f"{cell.ranks[0]}"]
    caption = fitting(choices, x1 - x0 - 4, 10) if y1 - y0 >= 13 else ""
    fill, ink = _colour(cell, colours)
    around: dict[str, str | float] = {
        "fill": ink,
        "stroke": fill,
        "stroke_width": 3,
        "paint_order": "stroke",
        "stroke_linejoin": "round",
    }
    x, y = (x0 + x1) / 2, (y0 + y1) / 2 + 3.5
    return label(x, y, caption, anchor="middle", size=10, **around) if caption else Markup("")


def _widest(span: tuple[float, float], cuts: Sequence[float]) -> tuple[float, float]:
    """Return the first of the widest parts of a span that no cut crosses.

    >>> _widest((0, 60), [20, 60]), _widest((0, 60), [30])
    ((20, 60), (0, 30))
    """
    edges = [span[0], *(at for at in cuts if span[0] < at < span[1]), span[1]]
    return max(pairwise(edges), key=lambda part: round(part[1] - part[0], 3))


def _colour(cell: _Cell, colours: Mapping[int, tuple[str, str]]) -> tuple[str, str]:
    """Return the fill of a rectangle, that of the first rank that holds it, and the colour of a label on it."""
    return next((colours[rank] for rank in cell.ranks if rank in colours), ("none", "currentColor"))


def _ticks(cells: Sequence[_Cell], frame: _Frame, axis: int, pixels: float, apart: float) -> list[tuple[float, str]]:
    """Return where along an axis to write which index: at the ends, and at the cuts as far as there is room."""
    extent = frame.shape[axis]
    scale = pixels / max(extent, 1)
    found: list[tuple[float, str]] = []
    for edge in sorted({cell.block.start[axis] for cell in cells}):
        if not found or (edge * scale - found[-1][0] >= apart and pixels - edge * scale >= apart):
            found.append((edge * scale, str(edge)))
    return [*found, (pixels, str(extent))]


def _edges(side: Side, frame: _Frame) -> _Cuts:
    """Return where a side is cut along the rows and the columns; nothing where that is too fine to be drawn."""
    found: list[Sequence[float]] = []
    for axis, pixels in ((frame.rows, frame.height), (frame.columns, frame.width)):
        edges = sorted({frame.span(block, axis, pixels)[0] for block in side.blocks} - {0.0})
        found.append(edges if len(edges) < pixels / _LEAST else ())
    return found[0], found[1]
