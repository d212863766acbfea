"""The task stream of a run: which thread did what when, as in the reports of dask.

1. The receipts of a thread are a lane; lanes are in the order in which their threads began.
2. A task is a box from its begin to its end, in the colour of its kind, with its bytes in the tooltip.
3. If there are too many tasks, those of one kind that follow each other closely share a box, which is fainter the less
   of it the thread was busy.

Times of several machines are by their own clocks.
"""

from __future__ import annotations

from math import ceil, floor, log10
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from reshard.errors import bytes_text
from reshard.view.svg import Markup, Picture, fitting, join, label, moved, tag, text_width
from reshard.view.text import count_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reshard.core.run.settings import Receipt, Report

_KINDS = {
    "create": ("create files", "#77aadd"),
    "move": ("move bytes", "#ee8866"),
    "files": ("write files", "#eedd88"),
    "close": ("complete files", "#ffaabb"),
    "commit": ("name files", "#99ddff"),
}
"""The title and the colour of each kind of task."""

_MOST_LANES, _MOST_BOXES = 32, 800
_WIDTH, _LANE, _GAP, _BUSY = 420.0, 20.0, 4.0, 64.0
"""Sizes in pixels: the time axis, a lane, the gap between lanes, the column of busy shares."""

_TICKS = 6  # at most


class Box(NamedTuple):
    """Tasks of one kind that a thread did one after the other.

    Attributes:
        kind: the kind.
        begin, end: seconds since the first task began.
        busy: seconds in which the tasks ran.
        tasks: their number.
        read, written: bytes.
    """

    kind: str
    begin: float
    end: float
    busy: float
    tasks: int
    read: int
    written: int

    @property
    def text(self) -> str:
        """Describe the tasks in a sentence."""
        tasks = f"{count_text(self.tasks, 'task')} to {_KINDS[self.kind][0]}"
        nbytes = f"read {bytes_text(self.read)}, wrote {bytes_text(self.written)}"
        return f"{tasks}: {nbytes} in {self.busy:.3f} s, from {self.begin:.3f} s on"


def task_stream(report: Report) -> Picture:
    """Draw which thread did what when in a run."""
    receipts = sorted((each for each in report.receipts if each.worker), key=attrgetter("began"))
    if not receipts:
        return Picture("no task ran", 160, 20, label(0, 14, "no task ran"))
    first = receipts[0].began
    total = max(each.began + each.seconds for each in receipts) - first or 1e-6
    lanes = _lanes(receipts)
    shown = lanes[:_MOST_LANES]
    longest = 1.5 * total * len(shown) / _MOST_BOXES if len(receipts) > _MOST_BOXES else 0.0
    boxes = [_boxes(each, first, longest) for _, each in shown]
    names = [name for name, _ in shown]
    margin = max(map(text_width, names)) + 12
    drawn = [
        moved(0, 24 + row * (_LANE + _GAP), *_lane(name, each, margin, total))
        for row, (name, each) in enumerate(zip(names, boxes, strict=True))
    ]
    bottom = 24 + len(names) * (_LANE + _GAP)
    if len(lanes) > _MOST_LANES:
        drawn.append(label(0, bottom + 13, f"and {count_text(len(lanes) - _MOST_LANES, 'more thread')}"))
    kinds = [kind for kind in _KINDS if any(box.kind == kind for row in boxes for box in row)]
    drawn += [moved(margin, 0, *_legend(kinds)), moved(margin, bottom, *_axis(total))]
    title = f"{count_text(len(receipts), 'task')} of {count_text(len(lanes), 'thread')} in {total:.2f} s"
    return Picture(title, ceil(margin + _WIDTH + _BUSY), ceil(bottom + 20), join(drawn))


def task_sums(report: Report) -> list[tuple[str, ...]]:
    """Return the rows of a table of the tasks by kind: their number, bytes and seconds."""
    kinds: dict[str, list[Receipt]] = {}
    for receipt in report.receipts:
        kinds.setdefault(receipt.task.partition(" ")[0], []).append(receipt)
    rows: list[tuple[str, ...]] = []
    for kind, receipts in kinds.items():
        read, written, seconds = map(sum, zip(*(receipt[1:4] for receipt in receipts), strict=True))
        rows.append((_KINDS[kind][0], f"{len(receipts):,}", bytes_text(read), bytes_text(written), f"{seconds:.3f} s"))
    return rows


def _lanes(receipts: Sequence[Receipt]) -> list[tuple[str, list[Receipt]]]:
    """Return the receipts of each thread with its name; they are sorted by begin."""
    by_process: dict[str, dict[str, list[Receipt]]] = {}
    for receipt in receipts:
        process, _, thread = receipt.worker.partition(" ")
        by_process.setdefault(process, {}).setdefault(thread, []).append(receipt)
    lanes = []
    for number, threads in enumerate(by_process.values(), 1):
        for within, receipts_of_thread in enumerate(threads.values(), 1):
            parts = [f"process {number}"] if len(by_process) > 1 else []
            parts += [f"thread {within}"] if len(threads) > 1 or not parts else []
            lanes.append((", ".join(parts), receipts_of_thread))
    return lanes


def _boxes(receipts: Sequence[Receipt], first: float, longest: float) -> list[Box]:
    """Return the boxes of a lane; tasks of one kind that follow each other share one of at most `longest` seconds."""
    boxes: list[Box] = []
    for receipt in receipts:
        kind, begin = receipt.task.partition(" ")[0], receipt.began - first
        end, read, written = begin + receipt.seconds, receipt.bytes_read, receipt.bytes_written
        last = boxes[-1] if boxes else None
        if last and last.kind == kind and end - last.begin <= longest:
            boxes[-1] = Box(
                kind, last.begin, max(last.end, end), last.busy + receipt.seconds, last.tasks + 1,
                last.read + read, last.written + written,
            )  # fmt: skip
        else:
            boxes.append(Box(kind, begin, end, receipt.seconds, 1, read, written))
    return boxes


def _lane(name: str, boxes: Sequence[Box], margin: float, total: float) -> list[Markup]:
    busy = sum(box.busy for box in boxes)
    read, written = sum(box.read for box in boxes), sum(box.written for box in boxes)
    tip = tag("title", f"{name}: read {bytes_text(read)}, wrote {bytes_text(written)}")
    parts = [
        tag("rect", tip, x=margin, y=0.0, width=_WIDTH, height=_LANE, fill="currentColor", fill_opacity=0.06),
        label(0, 14, name),
        label(margin + _WIDTH + 8, 14, f"{min(busy / total, 1):.0%} busy", size=10, opacity=0.66),
    ]
    for box in boxes:
        x, end = (margin + _WIDTH * at / total for at in (box.begin, box.end))
        wide = max(end - x, 0.7)
        share = min(box.busy / ((box.end - box.begin) or 1), 1) if box.tasks > 1 else 1.0
        path = Markup(f"M{x:.1f} 0h{wide:.1f}v{_LANE:.0f}h-{wide:.1f}z")
        opacity = {} if share > 0.95 else {"fill_opacity": round(max(share, 0.25), 2)}
        parts.append(tag("path", tag("title", box.text), d=path, fill=_KINDS[box.kind][1], **opacity))
        if not opacity and box.written and (text := fitting([bytes_text(box.written)], wide - 4, 10)):
            middle = x + wide / 2
            parts.append(label(middle, 14, text, size=10, anchor="middle", fill="#1a1a1a", pointer_events="none"))
    return parts


def _legend(kinds: Iterable[str]) -> list[Markup]:
    parts, x = [], 0.0
    for title, fill in map(_KINDS.__getitem__, kinds):
        parts += [tag("rect", x=x, y=3.0, width=10.0, height=10.0, rx=2, fill=fill), label(x + 14, 12, title)]
        x += 28 + text_width(title)
    return parts


def _axis(total: float) -> list[Markup]:
    """Draw marks at round numbers of seconds."""
    power = 10.0 ** floor(log10(total / _TICKS))
    step = next((power * factor for factor in (1, 2, 5) if total / (power * factor) <= _TICKS), power * 10)
    digits = max(0, -floor(log10(step) + 1e-9))
    parts = []
    for number in range(int(total / step) + 1):
        x = _WIDTH * number * step / total
        if x < _WIDTH - 8:
            parts.append(label(x, 13, f"{number * step:.{digits}f} s", size=10, opacity=0.66))
    return parts
