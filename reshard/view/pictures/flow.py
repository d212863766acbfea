"""The picture of a plan: the bytes between three columns of boxes.

1. The columns are the source files, the tensors (repeated layers folded) and the target files.
2. The width of a ribbon is proportional to its bytes. Elements are counted once for each
   route, times the number of transfers that share it.
3. Neighbours share a box if a column would have too many boxes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import ceil, prod
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from reshard.core.plan.bands import is_grid
from reshard.errors import bytes_text
from reshard.strategy.names import group_members
from reshard.view.pictures.pens import plan_tensor_picture
from reshard.view.svg import GREY, Markup, Picture, cut, join, label, moved, rank_colour, ranks_label, tag, text_width
from reshard.view.text import count_text
from reshard.view.verdict import below

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.plan.plan import Plan, Route
    from reshard.core.target import TargetFile

_MAX_END_BOXES = 16
_MOST_MIDDLES = 14

_HEIGHT, _GAP, _LEAST = 340.0, 4.0, 29.0
_WIDTH, _BAR, _RIBBON_PX, _MAX_END_LABEL_PX, _LEAST_MIDDLE = 940.0, 14.0, 100.0, 180.0, 160.0
"""Widths in pixels: the widest picture, a file's bar, ribbons, the widest end label, the narrowest middle box."""

_NAME, _REMARK = 10.5, 9.0
"""Font sizes."""

_TITLES = ("source files", "tensors", "target files")

T = TypeVar("T")

Flows = Counter[tuple[int, int]]
"""Bytes from a box of one column to a box of the next, by their numbers."""

Column = list[tuple[float, float]]
"""The top and the height of each box of a column, in pixels."""


@dataclass(frozen=True, slots=True)
class Node:
    """A box in a column.

    Attributes:
        name: the label.
        remark: the line below it.
        nbytes: the number of bytes that are moved through it.
        tip: the tooltip; by default the name.
        rank: the first of its ranks, which determines its colour; None if it is of no rank.
    """

    name: str
    remark: str
    nbytes: int
    tip: str = ""
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Flow:
    """Three columns and the bytes between them."""

    sources: Sequence[Node]
    middles: Sequence[Node]
    targets: Sequence[Node]
    read: Flows
    written: Flows


def plan_picture(plan: Plan, name: str | None = None) -> Picture:
    """Draw the transfers of a plan by files, or the blocks of one tensor before and after.

    Args:
        plan: the plan.
        name: the name of the tensor in the target or in the source; None for the whole plan.
    """
    if name is not None:
        return plan_tensor_picture(plan, name)
    return draw(_of_plan(plan), f"{count_text(plan.stats.tensors, 'tensor')}: what goes where")


# --- plans ------------------------------------------------------------------------------------------------------


def _of_plan(plan: Plan) -> Flow:
    """Return the bytes between source files, folded tensors and target files."""
    files = plan.source.files
    inputs = {number for file in files for number in file.inputs or ()}  # a computed file stands for its inputs
    inputs -= {at.file for transfer in plan.transfers for at in transfer.route.reads}  # of which some are read as well
    shown = [number for number in range(len(files)) if number not in inputs]
    source_of, target_of = dict(zip(shown, _shared(len(shown)), strict=True)), _shared(len(plan.files))
    folded = group_members((transfer.name, transfer.recipe.shape) for transfer in plan.transfers)
    middle_of, tensors = _middles(plan, folded)
    alike: Counter[tuple[int, int, int, int]] = Counter()
    routes: dict[Route, int] = {}
    for transfer in plan.transfers:
        number = routes.setdefault(transfer.route, len(routes))
        alike[middle_of[transfer.name], number, transfer.dtype.itemsize, transfer.target_dtype.itemsize] += 1
    elements = list(map(_elements, routes))
    read, written = Flows(), Flows()
    for (middle, route, itemsize, target_itemsize), count in alike.items():
        for file, number in elements[route][0].items():
            read[source_of[file], middle] += number * itemsize * count
        for file, number in elements[route][1].items():
            written[middle, target_of[file]] += number * target_itemsize * count
    nbytes = _sums(read, 1)
    return Flow(
        _files([*source_of.values()], _sources(plan.source, shown), _sums(read, 0), "not read"),
        [Node(name, f"{remark}{bytes_text(nbytes[n])}", nbytes[n]) for n, (name, remark) in enumerate(tensors)],
        _files(target_of, _targets(plan.files), _sums(written, 1), "no tensors"),
        read,
        written,
    )


def _sources(source: Checkpoint, shown: Iterable[int]) -> list[_DrawnFile]:
    """Return the files of a source; a computed file stands for all files of the computation."""
    several = any(source.ranks)
    files = []
    for number in shown:
        file = source.files[number]
        if file.inputs is not None:
            files.append(_DrawnFile(None, "computed", source.title))
        else:
            files.append(
                _DrawnFile(source.ranks[number] if several else None, _name(file.path, source.root), file.path)
            )
    return files


def _targets(files: Sequence[TargetFile]) -> list[_DrawnFile]:
    """Return the files of a target; an index is of no rank."""
    several = any(file.rank for file in files)
    return [_DrawnFile(file.rank if several and not file.last else None, _name(file.path), file.path) for file in files]


def _name(path: str, root: str = "") -> str:
    """Return the path of a file below its root, without the suffix of a file of tensors.

    >>> _name("s3://b/set/model-00001-of-00002.safetensors", "s3://b/set"), _name("model.safetensors.index.json")
    ('model-00001-of-00002', 'model.safetensors.index.json')
    """
    name = below(path.removeprefix(f"{root}/"), root)
    return name.removesuffix(".safetensors").removesuffix(".ckpt")


def _middles(
    plan: Plan, folded: Sequence[tuple[str, object, list[str]]]
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return the box of each tensor by name, and the name and remark of each box.

    The largest tensors have boxes of their own; the others share the last box.
    """
    nbytes: Counter[str] = Counter()
    for transfer in plan.transfers:
        nbytes[transfer.name] += prod(transfer.recipe.shape) * transfer.dtype.itemsize
    sizes = [sum(nbytes[member] for member in members) for _, _, members in folded]
    order = sorted(range(len(folded)), key=lambda row: -sizes[row])
    largest = sorted(order if len(order) <= _MOST_MIDDLES else order[: _MOST_MIDDLES - 1])
    box_of_row = {row: box for box, row in enumerate(largest)}
    box_of = {name: box_of_row.get(row, len(largest)) for row, (*_, members) in enumerate(folded) for name in members}
    counts = [len(members) for _, _, members in folded]
    boxes = [(folded[row][0], f"{count_text(counts[row], 'tensor')}, " if counts[row] > 1 else "") for row in largest]
    if rest := sum(counts) - sum(counts[row] for row in largest):
        boxes.append((count_text(rest, "smaller tensor"), ""))
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


def _shared(count: int, most: int = _MAX_END_BOXES) -> list[int]:
    """Return the box of each of `count` items; neighbours share one if there are more than `most`.

    >>> _shared(3, 4), _shared(5, 3)
    ([0, 1, 2], [0, 0, 1, 1, 2])
    """
    size = ceil(count / most) or 1
    return [number // size for number in range(count)]


def _inside(box_of: Sequence[int], items: Sequence[T]) -> list[list[T]]:
    """Return the items in each box."""
    boxes: dict[int, list[T]] = {}
    for box, item in zip(box_of, items, strict=True):
        boxes.setdefault(box, []).append(item)
    return list(boxes.values())


def _sums(flows: Flows, side: int) -> Counter[int]:
    sums: Counter[int] = Counter()
    for ends, nbytes in flows.items():
        sums[ends[side]] += nbytes
    return sums


class _DrawnFile(NamedTuple):
    """A file: its rank, or None if it is not of one rank of several; its name, and its path."""

    rank: int | None
    name: str
    path: str


def _files(box_of: Sequence[int], files: Sequence[_DrawnFile], nbytes: Counter[int], nothing: str) -> list[Node]:
    """Return the boxes of files, named by their ranks if they have any, which differ."""
    boxes = _inside(box_of, files)
    ranks = [sorted({file.rank for file in inside if file.rank is not None}) for inside in boxes]
    labels = Counter(map(tuple, ranks))
    nodes = []
    for n, (inside, holders) in enumerate(zip(boxes, ranks, strict=True)):
        rest = f" and {len(inside) - 1} more" if len(inside) > 1 else ""
        name = ranks_label(holders) if holders and labels[tuple(holders)] == 1 else f"{inside[0].name}{rest}"
        remark = bytes_text(nbytes[n]) if nbytes[n] else nothing
        tip = ", ".join(file.path for file in inside[:3])
        nodes.append(Node(name, remark, nbytes[n], tip, holders[0] if holders else None))
    return nodes


# --- drawing ----------------------------------------------------------------------------------------------------


def draw(flow: Flow, title: str) -> Picture:
    """Draw three columns and the ribbons between them."""
    left, right = (
        ceil(max(text_width(head, 12) - _BAR, 8 + min(_wide(nodes), _MAX_END_LABEL_PX)))
        for head, nodes in ((_TITLES[0], flow.sources), (_TITLES[2], flow.targets))
    )
    spare = _WIDTH - left - right - 2 * (_BAR + _RIBBON_PX)
    middle = ceil(max(_LEAST_MIDDLE, min(spare, 16 + _wide(flow.middles))))
    columns = [_placed(nodes) for nodes in (flow.sources, flow.middles, flow.targets)]
    height = max(at + tall for column in columns for at, tall in column or [(0.0, 0.0)])
    columns = [_centred(column, height) for column in columns]
    x = [left, left + _BAR + _RIBBON_PX, left + _BAR + 2 * _RIBBON_PX + middle]
    fills = [_fills(flow.sources), _fills(flow.targets)]
    ribbons = [
        *_ribbons(flow.read, columns[0], columns[1], x[0] + _BAR, x[1], fills[0], by_source=True),
        *_ribbons(flow.written, columns[1], columns[2], x[1] + middle, x[2], fills[1], by_source=False),
    ]
    boxes = [
        *_bars(flow.sources, columns[0], x[0], fills[0], x[0] - 6, "end"),
        *_middle_boxes(flow.middles, columns[1], x[1], middle),
        *_bars(flow.targets, columns[2], x[2], fills[1], x[2] + _BAR + 6, "start"),
    ]
    heads = [
        label(at, 14, text, anchor=anchor, font_weight=600)
        for at, text, anchor in (
            (x[0] + _BAR, _TITLES[0], "end"),
            (x[1] + middle / 2, _TITLES[1], "middle"),
            (x[2], _TITLES[2], "start"),
        )
    ]
    body = moved(0, 26, tag("g", *ribbons, fill_opacity=0.5), *boxes)
    return Picture(title, x[2] + _BAR + right, height + 34, join([*heads, body]))


def _wide(nodes: Sequence[Node]) -> float:
    """Return the width of the widest label."""
    return max((max(text_width(n.name, _NAME), text_width(n.remark, _REMARK)) for n in nodes), default=0.0)


def _fills(nodes: Sequence[Node]) -> list[str]:
    return [GREY[0] if node.rank is None else rank_colour(node.rank)[0] for node in nodes]


def _placed(nodes: Sequence[Node]) -> Column:
    """Place the boxes of a column, with heights by bytes and room for each label."""
    total = sum(node.nbytes for node in nodes) or 1
    room = max(_HEIGHT - _GAP * len(nodes), 0)
    column: Column = []
    at = 0.0
    for node in nodes:
        tall = max(_LEAST, room * node.nbytes / total)
        column.append((at, tall))
        at += tall + _GAP
    return column


def _centred(column: Column, height: float) -> Column:
    spare = (height - (column[-1][0] + column[-1][1])) / 2 if column else 0.0
    return [(at + spare, tall) for at, tall in column]


def _ribbons(
    flows: Flows, left: Column, right: Column, x0: float, x1: float, fills: Sequence[str], *, by_source: bool
) -> list[Markup]:
    """Draw ribbons; the width at each end is the share of the box there."""
    out, into = _sums(flows, 0), _sums(flows, 1)
    done_left: Counter[int] = Counter()
    done_right: Counter[int] = Counter()
    middle = (x0 + x1) / 2
    ribbons = []
    for (a, b), nbytes in sorted(flows.items()):
        if not nbytes:
            continue
        y0, y1 = (left[a][0] + left[a][1] * part / out[a] for part in (done_left[a], done_left[a] + nbytes))
        z0, z1 = (right[b][0] + right[b][1] * part / into[b] for part in (done_right[b], done_right[b] + nbytes))
        done_left[a] += nbytes
        done_right[b] += nbytes
        path = (
            f"M{x0:.0f} {y0:.1f}C{middle:.0f} {y0:.1f} {middle:.0f} {z0:.1f} {x1:.0f} {z0:.1f}V{z1:.1f}"
            f"C{middle:.0f} {z1:.1f} {middle:.0f} {y1:.1f} {x0:.0f} {y1:.1f}Z"
        )
        ribbons.append(tag("path", tag("title", bytes_text(nbytes)), d=Markup(path), fill=fills[a if by_source else b]))
    return ribbons


def _bars(
    nodes: Sequence[Node], column: Column, x: float, fills: Sequence[str], text_x: float, anchor: str
) -> list[Markup]:
    parts = []
    for node, (at, tall), fill in zip(nodes, column, fills, strict=True):
        faint = 1.0 if node.nbytes else 0.45
        parts += [
            tag("rect", tag("title", node.tip or node.name), x=x, y=at, width=_BAR, height=tall, rx=2,
                fill=fill if node.nbytes else "none", stroke="currentColor", stroke_opacity=0.4),
            *_two_lines(node, text_x, at + tall / 2, anchor, _MAX_END_LABEL_PX, faint),
        ]  # fmt: skip
    return parts


def _middle_boxes(nodes: Sequence[Node], column: Column, x: float, width: float) -> list[Markup]:
    parts = []
    for node, (at, tall) in zip(nodes, column, strict=True):
        parts += [
            tag("rect", tag("title", node.name), x=x, y=at, width=width, height=tall, rx=3,
                fill="currentColor", fill_opacity=0.08, stroke="currentColor", stroke_opacity=0.3),
            *_two_lines(node, x + width / 2, at + tall / 2, "middle", width - 8, 1.0),
        ]  # fmt: skip
    return parts


def _two_lines(node: Node, x: float, y: float, anchor: str, room: float, opacity: float) -> list[Markup]:
    return [
        label(x, y - 2.5, cut(node.name, room, _NAME), size=_NAME, anchor=anchor, opacity=opacity),
        label(x, y + 10, cut(node.remark, room, _REMARK), size=_REMARK, anchor=anchor, opacity=0.66 * opacity),
    ]
