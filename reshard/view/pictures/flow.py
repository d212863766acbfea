"""The picture of a plan: the bytes between three columns of boxes.

1. The columns are the source files, the tensors (repeated layers folded) and the target files.
2. The width of a ribbon is proportional to its bytes. Elements are counted once for each route, times the number of
   transfers that share it.
3. Neighbours share a box if a column would have too many boxes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import ceil, prod
from typing import TYPE_CHECKING, NamedTuple

from reshard.core.plan.bands import is_grid
from reshard.errors import bytes_text
from reshard.strategy.names import group_members
from reshard.view.pictures.pens import plan_tensor_picture
from reshard.view.svg import GREY, Markup, Picture, cut, join, label, moved, rank_colour, ranks_label, tag, text_width
from reshard.view.text import count_text
from reshard.view.verdict import below

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.plan.plan import Plan, Route
    from reshard.core.target import TargetFile

_MOST_ENDS, _MOST_MIDDLES = 16, 14  # boxes
_TITLES = ("source files", "tensors", "target files")

_HEIGHT, _GAP, _LEAST = 340.0, 4.0, 29.0
_WIDTH, _BAR, _RIBBON, _MOST_LABEL, _LEAST_MIDDLE = 940.0, 14.0, 100.0, 180.0, 160.0
"""Widths in pixels: the widest picture, a file's bar, ribbons, the widest end label, the narrowest middle box."""

_NAME, _REMARK = 10.5, 9.0
"""Font sizes."""

Flows = Counter[tuple[int, int]]
"""Bytes from a box of one column to a box of the next, by their numbers."""


@dataclass(slots=True)
class Box:
    """A box in a column.

    Attributes:
        name: the label.
        remark: the line below it.
        nbytes: the number of bytes that are moved through it.
        tip: the tooltip.
        fill: its colour, and that of its ribbons.
        top, tall: its place in the column, in pixels.
    """

    name: str
    remark: str
    nbytes: int
    tip: str
    fill: str = GREY[0]
    top: float = 0.0
    tall: float = 0.0


class Flow(NamedTuple):
    """Three columns and the bytes between them."""

    sources: Sequence[Box]
    middles: Sequence[Box]
    targets: Sequence[Box]
    read: Flows
    written: Flows


class DrawnFile(NamedTuple):
    """A file: its rank, or None if it is not of one rank of several; its name, and its path."""

    rank: int | None
    name: str
    path: str


def plan_picture(plan: Plan, name: str | None = None) -> Picture:
    """Draw the transfers of a plan by files, or the blocks of one tensor of the target or source before and after."""
    if name is not None:
        return plan_tensor_picture(plan, name)
    return draw(flow_of(plan), f"{count_text(plan.stats.tensors, 'tensor')}: what goes where")


# --- plans ------------------------------------------------------------------------------------------------------


def flow_of(plan: Plan) -> Flow:
    """Return the bytes between source files, folded tensors and target files."""
    sources, targets = _sources(plan), _targets(plan.files)
    source_of = {file: n // _shared(len(sources)) for n, file in enumerate(sources)}
    target_of = [n // _shared(len(targets)) for n in range(len(targets))]
    middle_of, middles = _middles(plan)
    alike: Counter[tuple[int, Route, int, int]] = Counter()
    for each in plan.transfers:
        alike[middle_of[each.name], each.route, each.dtype.itemsize, each.target_dtype.itemsize] += 1
    elements = {route: _elements(route) for route in {route for _, route, _, _ in alike}}
    read, written = Flows(), Flows()
    for (middle, route, itemsize, target_itemsize), count in alike.items():
        from_files, to_files = elements[route]
        for file, number in from_files.items():
            read[source_of[file], middle] += number * itemsize * count
        for file, number in to_files.items():
            written[middle, target_of[file]] += number * target_itemsize * count
    for (_, middle), nbytes in read.items():
        middles[middle].nbytes += nbytes
    for box in middles:
        box.remark += bytes_text(box.nbytes)
    ends = file_boxes([*sources.values()], read, 0, "not read"), file_boxes(targets, written, 1, "no tensors")
    return Flow(ends[0], middles, ends[1], read, written)


def _sources(plan: Plan) -> dict[int, DrawnFile]:
    """Return the files of a source by number; a computed file stands for all files of the computation."""
    source: Checkpoint = plan.source
    inputs = {number for file in source.files for number in file.inputs or ()}
    inputs -= {at.file for transfer in plan.transfers for at in transfer.route.reads}  # some are read as well
    several = any(source.ranks)
    drawn = {}
    for number, (rank, file) in enumerate(zip(source.ranks, source.files, strict=True)):
        if file.inputs is not None:
            drawn[number] = DrawnFile(None, "computed", source.title)
        elif number not in inputs:
            drawn[number] = DrawnFile(rank if several else None, _name(file.path, source.root), file.path)
    return drawn


def _targets(files: Sequence[TargetFile]) -> list[DrawnFile]:
    """Return the files of a target; an index is of no rank."""
    several = any(file.rank for file in files)
    return [
        DrawnFile(file.rank if several and file.publish == "file" else None, _name(file.path), file.path)
        for file in files
    ]


def _name(path: str, root: str = "") -> str:
    """Return the path of a file below its root, without the suffix of a file of tensors.

    >>> _name("s3://b/set/model-00001-of-00002.safetensors", "s3://b/set"), _name("model.safetensors.index.json")
    ('model-00001-of-00002', 'model.safetensors.index.json')
    """
    name = below(path.removeprefix(f"{root}/"), root)
    return name.removesuffix(".safetensors").removesuffix(".ckpt")


def _middles(plan: Plan) -> tuple[dict[str, int], list[Box]]:
    """Return the box of each tensor by name, and the boxes, without bytes.

    The largest tensors have boxes of their own; the others share the last box.
    """
    nbytes: Counter[str] = Counter()
    for transfer in plan.transfers:
        nbytes[transfer.name] += prod(transfer.recipe.shape) * transfer.dtype.itemsize
    folded = group_members((transfer.name, transfer.recipe.shape) for transfer in plan.transfers)
    sizes = [sum(nbytes[member] for member in members) for _, _, members in folded]
    order = sorted(range(len(folded)), key=lambda row: -sizes[row])
    largest = set(order if len(order) <= _MOST_MIDDLES else order[: _MOST_MIDDLES - 1])
    box_of: dict[str, int] = {}
    boxes: list[Box] = []
    rest: list[str] = []
    for row, (name, _, members) in enumerate(folded):
        if row in largest:
            box_of |= dict.fromkeys(members, len(boxes))
            several = f"{count_text(len(members), 'tensor')}, " if len(members) > 1 else ""
            boxes.append(Box(name, several, 0, name))
        else:
            rest += members
    if rest:
        box_of |= dict.fromkeys(rest, len(boxes))
        name = count_text(len(rest), "smaller tensor")
        boxes.append(Box(name, "", 0, name))
    return box_of, boxes


def _elements(route: Route) -> tuple[Counter[int], Counter[int]]:
    """Count the elements read from each source file and written to each target file."""
    recipe = route.recipe
    read: Counter[int] = Counter()
    if is_grid(recipe.shape, recipe.targets):  # all source blocks are read
        for at, block in zip(route.reads, recipe.sources, strict=True):
            read[at.file] += block.size
    else:
        for segment in recipe.segments(route.axis, 0, recipe.rows(route.axis)):
            for number, shape in zip(segment.columns.sources, segment.columns.source_shapes, strict=True):
                read[route.reads[number].file] += (segment.stop - segment.start) * prod(shape)
    written: Counter[int] = Counter()
    for copies, block in zip(route.writes, recipe.targets, strict=True):
        for at in copies:
            written[at.file] += block.size
    return read, written


def _shared(count: int) -> int:
    """Return the number of neighbouring files that share a box."""
    return ceil(count / _MOST_ENDS) or 1


def file_boxes(files: Sequence[DrawnFile], flows: Flows, side: int, nothing: str) -> list[Box]:
    """Return the boxes of files, named by their ranks if they have any, which differ.

    Args:
        files: the files.
        flows: the bytes to or from each box.
        side: the end of the flows that the boxes are at.
        nothing: the remark of a box without bytes.
    """
    size, nbytes = _shared(len(files)), _sums(flows, side)
    inside = [files[first : first + size] for first in range(0, len(files), size)]
    ranks = [tuple(sorted({file.rank for file in each if file.rank is not None})) for each in inside]
    labels = Counter(ranks)
    boxes = []
    for n, (some, holders) in enumerate(zip(inside, ranks, strict=True)):
        rest = f" and {len(some) - 1} more" if len(some) > 1 else ""
        name = ranks_label(holders) if holders and labels[holders] == 1 else f"{some[0].name}{rest}"
        tip = ", ".join(file.path for file in some[:3])
        fill = rank_colour(holders[0])[0] if holders else GREY[0]
        boxes.append(Box(name, bytes_text(nbytes[n]) if nbytes[n] else nothing, nbytes[n], tip, fill))
    return boxes


def _sums(flows: Mapping[tuple[int, int], int], side: int) -> Counter[int]:
    sums: Counter[int] = Counter()
    for ends, nbytes in flows.items():
        sums[ends[side]] += nbytes
    return sums


# --- drawing ----------------------------------------------------------------------------------------------------


def draw(flow: Flow, title: str) -> Picture:
    """Draw three columns and the ribbons between them."""
    left, right = (
        ceil(max(text_width(head, 12) - _BAR, 8 + min(_widest(boxes), _MOST_LABEL)))
        for head, boxes in ((_TITLES[0], flow.sources), (_TITLES[2], flow.targets))
    )
    spare = _WIDTH - left - right - 2 * (_BAR + _RIBBON)
    middle = ceil(max(_LEAST_MIDDLE, min(spare, 16 + _widest(flow.middles))))
    height = _place(flow[:3])
    x0, x1 = left, left + _BAR + _RIBBON
    x2 = x1 + middle + _RIBBON
    ribbons = [
        *_ribbons(flow.read, flow.sources, flow.middles, x0 + _BAR, x1, 0),
        *_ribbons(flow.written, flow.middles, flow.targets, x1 + middle, x2, 1),
    ]
    boxes = [
        *(_end_box(box, x0, x0 - 6, "end") for box in flow.sources),
        *(_middle_box(box, x1, middle) for box in flow.middles),
        *(_end_box(box, x2, x2 + _BAR + 6, "start") for box in flow.targets),
    ]
    places = ((x0 + _BAR, "end"), (x1 + middle / 2, "middle"), (x2, "start"))
    heads = [
        label(at, 14, text, anchor=anchor, font_weight=600) for text, (at, anchor) in zip(_TITLES, places, strict=True)
    ]
    body = moved(0, 26, tag("g", *ribbons, fill_opacity=0.5), *boxes)
    return Picture(title, x2 + _BAR + right, height + 34, join([*heads, body]))


def _widest(boxes: Sequence[Box]) -> float:
    """Return the width of the widest label."""
    return max((max(text_width(b.name, _NAME), text_width(b.remark, _REMARK)) for b in boxes), default=0.0)


def _place(columns: Iterable[Sequence[Box]]) -> float:
    """Place the boxes of columns, with heights by bytes and room for each label; return the height of the picture."""
    heights = []
    columns = [*columns]
    for boxes in columns:
        total, at = sum(box.nbytes for box in boxes) or 1, 0.0
        room = max(_HEIGHT - _GAP * len(boxes), 0)
        for box in boxes:
            box.top, box.tall = at, max(_LEAST, room * box.nbytes / total)
            at += box.tall + _GAP
        heights.append(max(at - _GAP, 0.0))
    for boxes, height in zip(columns, heights, strict=True):
        for box in boxes:
            box.top += (max(heights) - height) / 2
    return max(heights)


def _ribbons(
    flows: Flows, left: Sequence[Box], right: Sequence[Box], x0: float, x1: float, coloured: int
) -> list[Markup]:
    """Draw ribbons in the colour of one end; the width at each end is the share of the box there."""
    sums = _sums(flows, 0), _sums(flows, 1)
    done: tuple[Counter[int], Counter[int]] = Counter(), Counter()
    middle = (x0 + x1) / 2
    ribbons = []
    for ends, nbytes in sorted(flows.items()):
        if not nbytes:
            continue
        edges = []
        for side, box in enumerate((left[ends[0]], right[ends[1]])):
            before, total = done[side][ends[side]], sums[side][ends[side]]
            edges += [box.top + box.tall * part / total for part in (before, before + nbytes)]
            done[side][ends[side]] += nbytes
        y0, y1, z0, z1 = edges
        path = (
            f"M{x0:.0f} {y0:.1f}C{middle:.0f} {y0:.1f} {middle:.0f} {z0:.1f} {x1:.0f} {z0:.1f}V{z1:.1f}"
            f"C{middle:.0f} {z1:.1f} {middle:.0f} {y1:.1f} {x0:.0f} {y1:.1f}Z"
        )
        fill = (left, right)[coloured][ends[coloured]].fill
        ribbons.append(tag("path", tag("title", bytes_text(nbytes)), d=Markup(path), fill=fill))
    return ribbons


def _end_box(box: Box, x: float, text_x: float, anchor: str) -> Markup:
    bar = tag(
        "rect", tag("title", box.tip), x=x, y=box.top, width=_BAR, height=box.tall, rx=2,
        fill=box.fill if box.nbytes else "none", stroke="currentColor", stroke_opacity=0.4,
    )  # fmt: skip
    return join([bar, *_two_lines(box, text_x, anchor, _MOST_LABEL, 1.0 if box.nbytes else 0.45)])


def _middle_box(box: Box, x: float, width: float) -> Markup:
    frame = tag(
        "rect", tag("title", box.tip), x=x, y=box.top, width=width, height=box.tall, rx=3,
        fill="currentColor", fill_opacity=0.08, stroke="currentColor", stroke_opacity=0.3,
    )  # fmt: skip
    return join([frame, *_two_lines(box, x + width / 2, "middle", width - 8, 1.0)])


def _two_lines(box: Box, x: float, anchor: str, room: float, opacity: float) -> list[Markup]:
    y = box.top + box.tall / 2
    return [
        label(x, y - 2.5, cut(box.name, room, _NAME), size=_NAME, anchor=anchor, opacity=opacity),
        label(x, y + 10, cut(box.remark, room, _REMARK), size=_REMARK, anchor=anchor, opacity=0.66 * opacity),
    ]
