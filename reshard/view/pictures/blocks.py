"""Pictures of blocks: which rank holds which part of a tensor. One drawer, and two pens.

The drawer chooses two axes, preferably ones that are cut; each slice of other cut axes is a panel. It merges
neighbouring blocks of very fine grids, so that a picture of thousands of ranks stays small. The pens draw its cells: as
SVG (`pens`), and as block characters (`characters`). In both a cell has the colour of its first rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from math import ceil, prod
from typing import TYPE_CHECKING

from reshard.core.layout.block import Block
from reshard.core.plan.bands import is_grid
from reshard.errors import UsageError, names
from reshard.view.svg import GREY, rank_colour, ranks_label, ranks_range
from reshard.view.text import count_text
from reshard.view.words import blocks_of, caption_words, cut_words, is_computed, placements_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.core.layout.block import Shape
    from reshard.core.model.checkpoint import Checkpoint, Tensor
    from reshard.core.plan.plan import Plan, Route
    from reshard.strategy.strategy import Placed, Strategy

_MOST_CELLS = 576  # rectangles of a side; finer grids are drawn coarser
_LONG, _SHORT = 220.0, 84.0  # pixels of the longer side of a panel, and the least of the shorter one

LEAST = 4.0
"""The least pixels between two cuts; finer grids are drawn coarser."""

MOST_PANELS = 12

Span = tuple[float, float]


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


# --- what is drawn ----------------------------------------------------------------------------------------------


def tensor_side(checkpoint: Checkpoint, tensor: Tensor, title: str = "") -> DrawnSide:
    """Return the blocks of a tensor of a checkpoint."""
    computed = is_computed(checkpoint, tensor)
    places = placements_of(checkpoint, tensor)
    rule = caption_words(places[0].layout) if places else ""
    if computed:
        rule = cut_words(checkpoint, tensor)
    return DrawnSide(title, tensor.spec.shape, *blocks_of(checkpoint, tensor), rule, computed)


def target_side(plan: Plan, route: Route) -> DrawnSide:
    """Return the blocks that a plan writes of a tensor."""
    ranks: dict[Block, set[int]] = {}
    for block, replicas in zip(route.held or route.recipe.targets, route.writes, strict=True):
        ranks.setdefault(block, set()).update(plan.files[at.file].rank for at in replicas)
    return DrawnSide("", route.recipe.shape, tuple(ranks), tuple(tuple(sorted(each)) for each in ranks.values()))


def places_of(strategy: Strategy, name: str) -> tuple[Placed, ...]:
    """Return the places of a tensor.

    Raises:
        UsageError: the strategy does not name it.
    """
    if name not in strategy.tensors:
        alike = get_close_matches(name, strategy.tensors, n=3)
        hint = f"did you mean {names(alike)}?" if alike else ""
        raise UsageError(f"the strategy has no tensor {name!r}", code="not-in-strategy", hint=hint)
    return strategy.tensors[name]


def strategy_sides(strategy: Strategy, name: str, shape: Shape, title: str) -> list[DrawnSide]:
    """Return the blocks of a tensor in every stage of a strategy."""
    sides = []
    for placed in places_of(strategy, name):
        grid = strategy.grid(name, shape, stage=placed.stage)
        stage = f"stage {placed.stage}" if len(strategy.stages) > 1 else ""
        titles = " · ".join(filter(None, [title, stage]))
        sides.append(DrawnSide(titles, shape, grid.blocks, grid.ranks, caption_words(placed.layout)))
    return sides


# --- the drawer -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Frame:
    """The axes and the size that the panels of all sides share.

    Attributes:
        shape: the shape of the whole tensor.
        rows, columns: the axes drawn downwards and to the right; None if the tensor has too few axes.
        others: the other axes that are cut; each of their slices is a panel.
        width, height: the size of a panel in pixels, or in characters.
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

    def spans(self, block: Block) -> list[Span]:
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

    @property
    def holder(self) -> str:
        """Name the ranks that hold it, or say why there are none."""
        return ranks_label(self.ranks) if self.ranks else "computed" if self.computed else "in no file"

    @property
    def captions(self) -> list[str]:
        """Return its ranks as a label, and shorter ones."""
        if not self.ranks:
            return [self.holder]
        first = self.ranks[0]
        return [self.holder, ranks_range(self.ranks), f"{first} +{len(self.ranks) - 1}", f"{first}"]

    @property
    def colours(self) -> tuple[str, str]:
        """Return its fill, by its first rank, and the colour of labels on it."""
        return rank_colour(self.ranks[0]) if self.ranks else GREY if self.computed else ("none", "currentColor")


def panels_of(
    side: DrawnSide, frame: Frame, most: int = _MOST_CELLS, least: float = LEAST
) -> list[tuple[str, list[Cell]]]:
    """Return the slices of the axes that are not drawn, each with its cells; the slice is "" if there is but one.

    Args:
        side: the blocks.
        frame: the size of the panels.
        most: the most cells.
        least: the least pixels between two cuts; finer grids have cells of several blocks.
    """
    panels: dict[tuple[tuple[int, int], ...], list[Cell]] = {}
    for cell in _cells(side, frame, most, least):
        key = tuple((cell.block.start[axis], cell.block.stop[axis]) for axis in frame.others)
        panels.setdefault(key, []).append(cell)
    slices = []
    for key in sorted(panels):
        spans = {axis: f"{start}:{stop}" for axis, (start, stop) in zip(frame.others, key, strict=True)}
        text = ", ".join(spans.get(axis, ":") for axis in range(len(frame.shape)))
        slices.append((f"[{text}]" if spans else "", panels[key]))
    return slices


def _cells(side: DrawnSide, frame: Frame, most: int, least: float) -> list[Cell]:
    """Return a cell for each block, or for several neighbours of a fine grid."""
    cells = [
        Cell(block, ranks, 1, len(ranks) > 1, side.computed)
        for block, ranks in zip(side.blocks, side.ranks, strict=True)
    ]
    panels = len({tuple(block.start[axis] for axis in frame.others) for block in side.blocks})
    merged = _merged(side, frame, max(most // min(MOST_PANELS, panels), 1), least)
    if not merged:
        return cells
    if not is_grid(side.shape, side.blocks):
        return cells[:most]
    groups: dict[tuple[int, ...], list[Cell]] = {}
    for cell in cells:
        key = tuple(merged[axis][start] if axis in merged else start for axis, start in enumerate(cell.block.start))
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


def _merged(side: DrawnSide, frame: Frame, most: int, least: float) -> dict[int, dict[int, int]]:
    """Return for each drawn axis the group of each start of a block; empty if every block has room."""
    room = {axis: max(pixels / least, 1) for axis, pixels in frame.drawn if axis is not None}
    starts = {axis: sorted({block.start[axis] for block in side.blocks}) for axis in room}
    step = dict.fromkeys(room, 1)  # the number of neighbours that are merged
    while True:
        counts = {axis: ceil(len(starts[axis]) / step[axis]) for axis in step}
        fine = [axis for axis in counts if counts[axis] > room[axis]]
        if not fine and prod(counts.values()) <= most:
            break
        step[max(fine or counts, key=lambda axis: len(starts[axis]) / step[axis])] *= 2
    if all(factor == 1 for factor in step.values()):
        return {}
    return {axis: {start: n // step[axis] for n, start in enumerate(starts[axis])} for axis in step}


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
