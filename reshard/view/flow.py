"""Pictures of plans: source files or shards, what is moved, target files, and the bytes between them.

1. A plan is drawn as its files, left and right, and its tensors, repeated layers folded; one tensor as its source
   blocks, the runs of rows that are moved alike (each is a band, or several where it is long) and its target blocks.
2. Widths go by bytes. Moves that share their recipe and files are counted once and multiplied.
3. Neighbours are drawn as one where a column would have too many.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import islice
from math import ceil, prod
from typing import TYPE_CHECKING

from reshard.errors import bytes_text
from reshard.layout.block import shape_text
from reshard.plan.bands import is_grid
from reshard.strategy.names import group_members, ranges_text
from reshard.view.svg import Markup, Picture, colour, cut, join, label, tag, text_width
from reshard.view.text import count_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.plan.bands import Segment
    from reshard.plan.plan import Plan, Route, Transfer

_MOST_ENDS = 16
_MOST_MIDDLES = 14
_MOST_MEETINGS = 200_000
"""The most pairs of a run of rows and a block that are looked at: of a huge grid, only the first rows are drawn."""

_HEIGHT, _GAP, _LEAST = 340.0, 4.0, 29.0
_WIDTH, _BAR, _REACH, _MOST_END, _LEAST_MIDDLE = 960.0, 14.0, 140.0, 210.0, 180.0
"""Widths in pixels: of a page at most, of a file's bar, of ribbons, of labels at the ends, of boxes in the middle."""

_NAME, _REMARK = 10.5, 9.0
"""Sizes of letters."""

Flows = Counter[tuple[int, int]]
"""Bytes from a thing of one column to a thing of the next, by their numbers."""


@dataclass(frozen=True, slots=True)
class Node:
    """A thing in a column.

    Attributes:
        name: what is written next to it.
        remark: what is written below that.
        nbytes: what goes through it.
        tip: what is shown where the pointer rests; by default the name.
        rank: the first rank of those that it is of, which decides its colour.
    """

    name: str
    remark: str
    nbytes: int
    tip: str = ""
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Flow:
    """Three columns and what goes between them."""

    titles: tuple[str, str, str]
    sources: Sequence[Node]
    middles: Sequence[Node]
    targets: Sequence[Node]
    read: Flows
    written: Flows


def plan_picture(plan: Plan, name: str | None = None) -> Picture:
    """Draw what a plan moves: all of it by files, or one tensor by blocks and bands.

    Args:
        plan: what goes where.
        name: the tensor's name in the target, or in the source.
    """
    if name is None:
        return draw(_of_plan(plan), f"{count_text(plan.stats.tensors, 'tensor')}: what goes where")
    transfers = [transfer for transfer in plan.transfers if name in (transfer.name, transfer.source_name)]
    return draw(_of_tensor(plan, transfers), f"{name} {shape_text(transfers[0].recipe.shape)}: what goes where")


# --- what flows -------------------------------------------------------------------------------------------------


def _of_plan(plan: Plan) -> Flow:
    """Return the bytes between source files, folded tensors and target files."""
    source_of, target_of = _shared(len(plan.source.files)), _shared(len(plan.files))
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
    moved = _sums(read, 1)
    return Flow(
        ("source files", "tensors", f"target files ({plan.format})"),
        _files(source_of, plan.source.ranks, [file.path for file in plan.source.files], _sums(read, 0), "not read"),
        [Node(name, f"{remark}{bytes_text(moved[n])}", moved[n]) for n, (name, remark) in enumerate(tensors)],
        _files(target_of, [file.rank for file in plan.files], [f.path for f in plan.files], _sums(written, 1), "-"),
        read,
        written,
    )


def _middles(
    plan: Plan, folded: Sequence[tuple[str, object, list[str]]]
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return in which box each tensor is, and the boxes' names and remarks: the largest, then one of all others."""
    nbytes: Counter[str] = Counter()
    for transfer in plan.transfers:
        nbytes[transfer.name] += prod(transfer.recipe.shape) * transfer.dtype.itemsize
    sizes = [sum(nbytes[member] for member in members) for _, _, members in folded]
    order = sorted(range(len(folded)), key=lambda row: -sizes[row])
    own = sorted(order if len(order) <= _MOST_MIDDLES else order[: _MOST_MIDDLES - 1])
    place = {row: number for number, row in enumerate(own)}
    found = {name: place.get(row, len(own)) for row, (_, _, members) in enumerate(folded) for name in members}
    boxes = [
        (folded[row][0], f"{count_text(len(folded[row][2]), 'tensor')}, " if len(folded[row][2]) > 1 else "")
        for row in own
    ]
    others = sum(len(members) for row, (_, _, members) in enumerate(folded) if row not in place)
    return found, [*boxes, *([(f"{count_text(others, 'smaller tensor')}", "")] if others else [])]


def _elements(route: Route) -> tuple[Counter[int], Counter[int]]:
    """Return how many elements each source file gives and each target file gets."""
    recipe = route.recipe
    given: Counter[int] = Counter()
    if is_grid(recipe.shape, recipe.targets):  # everything is read
        for at, block in zip(route.reads, recipe.sources, strict=True):
            given[at.file] += block.size
    else:
        for segment in recipe.segments(route.axis, 0, recipe.rows(route.axis)):
            for number, shape in zip(segment.columns.sources, segment.columns.source_shapes, strict=True):
                given[route.reads[number].file] += (segment.stop - segment.start) * prod(shape)
    taken: Counter[int] = Counter()
    for written, block in zip(route.writes, recipe.targets, strict=True):
        for at in written:
            taken[at.file] += block.size
    return given, taken


def _of_tensor(plan: Plan, transfers: Sequence[Transfer]) -> Flow:
    """Return the bytes between the source blocks, runs of rows and target blocks of one tensor."""
    shards = [(place, n) for place, transfer in enumerate(transfers) for n in range(len(transfer.recipe.sources))]
    wanted = [(place, n) for place, transfer in enumerate(transfers) for n in range(len(transfer.recipe.targets))]
    every = (
        (place, run)
        for place, transfer in enumerate(transfers)
        for run in transfer.recipe.segments(transfer.axis, 0, transfer.rows)
    )
    most = max(_MOST_MEETINGS // (len(shards) + len(wanted)), _MOST_MIDDLES)
    runs = list(islice(every, most))
    title = "row bands" if next(every, None) is None else f"row bands, the first {most:,} runs"
    shard_number = {key: number for number, key in enumerate(shards)}
    wanted_number = {key: number for number, key in enumerate(wanted)}
    source_of, run_of, target_of = _shared(len(shards)), _shared(len(runs), _MOST_MIDDLES), _shared(len(wanted))
    read, written = Flows(), Flows()
    for n, (place, segment) in enumerate(runs):
        transfer = transfers[place]
        rows, columns = segment.stop - segment.start, segment.columns
        for number, shape in zip(columns.sources, columns.source_shapes, strict=True):
            nbytes = rows * prod(shape) * transfer.dtype.itemsize
            read[source_of[shard_number[place, number]], run_of[n]] += nbytes
        for number, shape in zip(columns.targets, columns.target_shapes, strict=True):
            nbytes = rows * prod(shape) * transfer.target_dtype.itemsize * len(transfer.route.writes[number])
            written[run_of[n], target_of[wanted_number[place, number]]] += nbytes
    ranks = plan.source.ranks
    replicas = [
        ((ranks[transfers[place].route.reads[n].file],), str(transfers[place].recipe.sources[n])) for place, n in shards
    ]
    takers = [
        (
            tuple(sorted({plan.files[at.file].rank for at in transfers[p].route.writes[n]})),
            str(transfers[p].recipe.targets[n]),
        )
        for p, n in wanted
    ]
    return Flow(
        ("source blocks", title, "target blocks"),
        _blocks(source_of, replicas, _sums(read, 0)),
        _bands(plan, run_of, [(transfers[place], segment) for place, segment in runs], _sums(read, 1)),
        _blocks(target_of, takers, _sums(written, 1)),
        read,
        written,
    )


def _bands(
    plan: Plan, run_of: Sequence[int], runs: Sequence[tuple[Transfer, Segment]], nbytes: Counter[int]
) -> list[Node]:
    nodes = []
    for number in range(max(run_of, default=-1) + 1):
        some = [run for n, run in zip(run_of, runs, strict=True) if n == number]
        bands = sum(
            ceil((s.stop - s.start) * s.columns.row_elements * transfer.dtype.itemsize / plan.band_bytes)
            for transfer, s in some
        )
        name = f"rows {some[0][1].start}:{some[-1][1].stop}"
        nodes.append(Node(name, f"{count_text(bands, 'band')}, {bytes_text(nbytes[number])}", nbytes[number]))
    return nodes


def _shared(count: int, most: int = _MOST_ENDS) -> list[int]:
    """Return in which box each of some things is: one of its own, or together with its neighbours.

    >>> _shared(3, 4), _shared(5, 3)
    ([0, 1, 2], [0, 0, 1, 1, 2])
    """
    together = ceil(count / most) or 1
    return [number // together for number in range(count)]


def _sums(flows: Flows, side: int) -> Counter[int]:
    sums: Counter[int] = Counter()
    for ends, nbytes in flows.items():
        sums[ends[side]] += nbytes
    return sums


def _files(
    box_of: Sequence[int], ranks: Sequence[int], paths: Sequence[str], nbytes: Counter[int], nothing: str
) -> list[Node]:
    """Return the boxes of files; those of one rank or neighbouring ones may share theirs."""
    nodes = []
    for number in range(max(box_of, default=-1) + 1):
        inside = [n for n, box in enumerate(box_of) if box == number]
        held = sorted({ranks[n] for n in inside})
        remark = bytes_text(nbytes[number]) if nbytes[number] else nothing
        tip = ", ".join(paths[n] for n in inside[:3])
        nodes.append(Node(_ranks_text(held), remark, nbytes[number], tip, held[0]))
    return nodes


def _blocks(box_of: Sequence[int], held: Sequence[tuple[tuple[int, ...], str]], nbytes: Counter[int]) -> list[Node]:
    """Return the boxes of blocks, each with the ranks that hold it."""
    nodes = []
    for number in range(max(box_of, default=-1) + 1):
        inside = [n for n, box in enumerate(box_of) if box == number]
        ranks = sorted({rank for n in inside for rank in held[n][0]})
        remark = held[inside[0]][1] if len(inside) == 1 else f"{len(inside)} blocks"
        tip = f"{remark}, {bytes_text(nbytes[number])}"
        nodes.append(Node(_ranks_text(ranks), remark, nbytes[number], tip, ranks[0]))
    return nodes


def _ranks_text(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges_text(ranks)}"


# --- drawing ----------------------------------------------------------------------------------------------------


def draw(flow: Flow, title: str) -> Picture:
    """Draw three columns and the ribbons between them."""
    left, right = (
        ceil(max(text_width(title, 12) - _BAR, 8 + min(_wide(nodes), _MOST_END)))
        for title, nodes in ((flow.titles[0], flow.sources), (flow.titles[2], flow.targets))
    )
    spare = _WIDTH - left - right - 2 * (_BAR + _REACH)
    middle = ceil(max(_LEAST_MIDDLE, text_width(flow.titles[1], 12), min(spare, 16 + _wide(flow.middles))))
    columns = [_placed(nodes) for nodes in (flow.sources, flow.middles, flow.targets)]
    height = max(at + tall for column in columns for at, tall in column or [(0.0, 0.0)])
    columns = [_centred(column, height) for column in columns]
    x = [left, left + _BAR + _REACH, left + _BAR + 2 * _REACH + middle]
    fills = [_fills(flow.sources, "source"), _fills(flow.targets, "target")]
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
            (x[0] + _BAR, flow.titles[0], "end"),
            (x[1] + middle / 2, flow.titles[1], "middle"),
            (x[2], flow.titles[2], "start"),
        )
    ]
    body = tag("g", tag("g", *ribbons, fill_opacity=0.5), *boxes, transform="translate(0 26)")
    return Picture(title, x[2] + _BAR + right, height + 34, join([*heads, body]))


def _wide(nodes: Sequence[Node]) -> float:
    """Return how wide the labels of some boxes are."""
    return max((max(text_width(n.name, _NAME), text_width(n.remark, _REMARK)) for n in nodes), default=0.0)


def _fills(nodes: Sequence[Node], side: str) -> list[str]:
    ranks = sorted({node.rank for node in nodes})
    return [colour(ranks.index(node.rank), len(ranks), side)[0] for node in nodes]


Column = list[tuple[float, float]]
"""Where each box of a column begins, and how tall it is, in pixels."""


def _placed(nodes: Sequence[Node]) -> Column:
    """Share out the height by bytes; every box has room for its label."""
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
    """Draw ribbons that are as wide at each end as their share of the box there."""
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
            *_two_lines(node, text_x, at + tall / 2, anchor, _MOST_END, faint),
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
