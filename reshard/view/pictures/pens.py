"""The pen that draws blocks as SVG: pictures of layouts, tensors and strategies, of source and target side by side.

A block is a rectangle in the colour of the first rank that holds it, hatched if other ranks hold it too. Dashes on the
target are the cuts of the source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING, Any

from reshard.core.layout.block import shape_text
from reshard.core.layout.layout import least_shape
from reshard.core.model.checkpoint import Sharding
from reshard.view.pictures.blocks import (
    LEAST,
    MOST_PANELS,
    DrawnSide,
    Frame,
    panels_of,
    places_of,
    strategy_sides,
    summary,
    target_side,
    tensor_side,
)
from reshard.view.svg import Drawn, Markup, Picture, fitting, hatch, join, label, moved, tag, text_width, wrapped
from reshard.view.words import caption_words, cut_words, sharding_words

if TYPE_CHECKING:
    from reshard.core.layout.block import Shape
    from reshard.core.layout.layout import Layout
    from reshard.core.model.checkpoint import Checkpoint, Tensor
    from reshard.core.plan.plan import Plan
    from reshard.strategy.strategy import Strategy
    from reshard.view.pictures.blocks import Cell

_MOST_SIDES = 8

_Cuts = tuple[Sequence[float], Sequence[float]]  # positions of the cuts of rows and of columns, in pixels


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
    places = [placed for each in strategies.values() for placed in places_of(each, name)]
    if shape is None:
        shapes = [placed.shape for placed in places if placed.shape is not None and not placed.expanded]
        shape = shapes[0] if shapes else least_shape([placed.layout for placed in places])
    sides = [side for title, each in strategies.items() for side in strategy_sides(each, name, tuple(shape), title)]
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
    sides = [tensor_side(checkpoint, tensor, "" if target is None else "source")]
    if target is not None:
        sides += strategy_sides(target, tensor.spec.name, tensor.spec.shape, "target")
    return draw(sides, f"{tensor.spec.name} {tensor.spec.dtype} {shape_text(tensor.spec.shape)}")


def plan_tensor_picture(plan: Plan, name: str) -> Picture:
    """Draw the blocks of a tensor that a plan reads, each from one rank, next to those that it writes."""
    sides: list[DrawnSide] = []
    shape = ""
    for transfer in plan.transfers:
        if name not in (transfer.name, transfer.source_name):
            continue
        route, recipe = transfer.route, transfer.recipe
        if not sides:
            files = plan.source.files
            ranks = [() if files[at.file].inputs is not None else (plan.source.ranks[at.file],) for at in route.reads]
            rule = cut_words(plan.source, plan.source.tensors[transfer.source_name])
            computed = not any(ranks)
            sides.append(DrawnSide("source: what is read", recipe.shape, recipe.sources, tuple(ranks), rule, computed))
            shape = shape_text(recipe.shape)
        written = sharding_words(Sharding(recipe.targets, route.writes), recipe.shape)
        sides.append(replace(target_side(plan, route), title="target: what is written", rule=written))
    return draw(sides, f"{name} {shape}: what is read and written")


def _titled(source: Any, target: Any) -> dict[str, Any]:
    return {"": source} if target is None else {"source": source, "target": target}


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
        f"and {len(sides) - _MOST_SIDES} more": len(sides) > _MOST_SIDES,
    }
    if text := " · ".join(remark for remark, applies in remarks.items() if applies):
        drawing = join([drawing, label(0, height + 18, text, opacity=0.66)])
        width, height = max(width, text_width(text)), height + 26
    return Picture(title, ceil(width) + 2.0, ceil(height) + 2.0, drawing)


def thumbnail(side: DrawnSide, width: float, height: float, most: int, least: float) -> Markup:
    """Draw the first panel of a side without labels, in a size of its own."""
    frame = replace(Frame.of([side]), width=width, height=height)
    _, cells = panels_of(side, frame, most, least)[0]
    blocks = [_rectangle(frame, cell, cell.holder) for cell in cells]
    lines = tag("g", *blocks, stroke="currentColor", stroke_width=0.5, stroke_opacity=0.4)
    return moved(1, 1, lines, *_hatches(frame, cells, 4.5, 5))


def _side(side: DrawnSide, frame: Frame, cuts: _Cuts) -> Drawn:
    panels = panels_of(side, frame)
    shown = panels[:MOST_PANELS]
    drawing, width, height = wrapped([_panel(frame, *panel, cuts) for panel in shown], 4 * (frame.width + 50), 14)
    lines = [line for line in (side.title, side.rule, summary(side)) if line]
    remarks = []
    cells = [cell for _, of_panel in panels for cell in of_panel]
    if len(cells) < len(side.blocks):
        most = max(cell.count for cell in cells)
        remarks.append(f"drawn coarser: up to {most} blocks as one" if most > 1 else f"the first {len(cells):,} blocks")
    if len(panels) > len(shown):
        remarks.append(f"the first {len(shown)} of {len(panels)} panels")
    top = 16.0 * len(lines) + 6
    below = top + height
    titles = [
        label(0, 13 + 16 * n, line, **({"font_weight": 600} if line == side.title else {"opacity": 0.8}))
        for n, line in enumerate(lines)
    ]
    notes = [label(0, below + 11 + 16 * n, remark, opacity=0.66) for n, remark in enumerate(remarks)]
    width = max([width, *map(text_width, lines + remarks)])
    return join([*titles, *notes, moved(0, top, drawing)]), width, below + 16.0 * len(remarks)


def _panel(frame: Frame, title: str, cells: Sequence[Cell], cuts: _Cuts) -> Drawn:
    """Draw a panel with the indices of its cuts."""
    width, height = frame.width, frame.height
    outline: dict[str, str | float] = {"stroke": "currentColor", "stroke_width": 0.8, "stroke_opacity": 0.55}
    elements = [
        _rectangle(frame, cell, f"{cell.holder}: {f'{cell.count} blocks, ' * (cell.count > 1)}{cell.block}", **outline)
        for cell in cells
    ]
    elements += _hatches(frame, cells, 5, 7)
    lines = [*(f"M0 {at:.2f}H{width:.6g}" for at in cuts[0]), *(f"M{at:.2f} 0V{height:.6g}" for at in cuts[1])]
    elements += [
        tag("path", d=line, stroke="#1a1a1a", stroke_width=1.4, stroke_dasharray="3 3", class_="cut") for line in lines
    ]
    elements += [_caption(frame, cell) for cell in cells]
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
    if title:
        elements.append(label(0, height + 16, title))
    return moved(margin, top, *elements), margin + width + right, top + height + (20 if title else 6)


def _rectangle(frame: Frame, cell: Cell, tip: str, **stroke: str | float) -> Markup:
    (y0, y1), (x0, x1) = frame.spans(cell.block)
    return tag(
        "rect", tag("title", tip), class_="block", x=round(x0, 3), y=round(y0, 3), width=round(x1 - x0, 3),
        height=round(y1 - y0, 3), fill=cell.colours[0], **stroke,
    )  # fmt: skip


def _hatches(frame: Frame, cells: Sequence[Cell], least: float, step: float) -> list[Markup]:
    """Hatch the cells that several ranks hold, if they have at least so many pixels."""
    spans = [frame.spans(cell.block) for cell in cells if cell.replicated]
    return [hatch(x0, y0, x1 - x0, y1 - y0, step) for (y0, y1), (x0, x1) in spans if min(x1 - x0, y1 - y0) >= least]


def _caption(frame: Frame, cell: Cell) -> Markup:
    """Label a cell with its ranks, shortened to the room; an outline separates text and lines."""
    (y0, y1), (x0, x1) = frame.spans(cell.block)
    caption = fitting(cell.captions, x1 - x0 - 4, 10) if y1 - y0 >= 13 else ""
    if not caption:
        return Markup("")
    fill, ink = cell.colours
    return label(
        (x0 + x1) / 2, (y0 + y1) / 2 + 3.5, caption, anchor="middle", size=10,
        fill=ink, stroke=fill, stroke_width=5, paint_order="stroke", stroke_linejoin="round",
    )  # fmt: skip


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
        cuts.append(edges if len(edges) < pixels / LEAST else ())
    return cuts[0], cuts[1]
