"""Prefetch the source ranges of later tasks into the page cache.

A task of encoded chunks reads a few megabytes at a time, too little for Linux to read far ahead: each task prefetches
the chunks of the task that its thread is likely to do next. Strided elements, such as one layer of a stack of layers,
are small reads with gaps between them, which take a disk several times as long as one long read. If the tasks of a run
together read most of a file, the ranges with such gaps are prefetched whole, each once. A run without `drop_cache`
expects that the page cache holds its sources.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from operator import itemgetter
from typing import TYPE_CHECKING

from reshard.core.model.entries import ranges
from reshard.core.plan.budget import TASK_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from reshard.core.model.entries import Spans
    from reshard.core.plan.plan import Plan


Range = tuple[str, int, int]
"""Path, offset and size of a part of a file."""


class Prefetch:
    """The ranges that each task of a run prefetches for a later task.

    Args:
        plan: the plan of the run.
        threads: the number of threads; a thread is likely to do the task so many places later next.
    """

    def __init__(self, plan: Plan, threads: int) -> None:
        self._plan, self._threads = plan, threads
        self._strided = {} if plan.source.coding else strided_ranges(plan, threads)

    def ranges(self, number: int) -> Iterator[Range]:
        """Yield the ranges that a task prefetches."""
        yield from self._strided.get(number, ())
        later = number + self._threads
        if self._plan.source.coding and later < len(self._plan.tasks):
            yield from ranges_read(self._plan, later)


def ranges_read(plan: Plan, number: int) -> Iterator[Range]:
    """Yield the source ranges that a task reads, without those of strided blocks."""
    for piece in plan.tasks[number].pieces:
        transfer = plan.transfers[piece.transfer]
        reads, itemsize = transfer.reads, transfer.dtype.itemsize
        for segment in transfer.recipe.segments(transfer.axis, piece.start, piece.stop):
            for source, first, count in segment.parts_read(segment.start, segment.stop - segment.start):
                extent = reads[source]
                if not extent.is_indirect:
                    for offset, start, stop in ranges(extent.runs, first * itemsize, count * itemsize):
                        yield plan.source.files[extent.file].path, offset, stop - start


def strided_ranges(plan: Plan, threads: int) -> dict[int, list[Range]]:
    """Return the ranges that hold strided blocks, by the number of the task that prefetches them.

    Ranges that overlap, such as those of the layers of a stack, are one. A file is left out if the tasks together read
    less than half of its ranges. The ranges that a task is the first to read are prefetched by the tasks before it, one
    part each of as many bytes as a task moves: the disk reads a stack while the one before is worked on.
    """
    strided = {route for route in {transfer.route for transfer in plan.transfers} if route.is_strided}
    runs: defaultdict[int, dict[tuple[int, int], int]] = defaultdict(dict)  # by file: the bytes of the blocks in them
    reads: list[list[tuple[int, int]]] = []  # by task: file and offset of each run of transfers that no task had before
    known: set[int] = set()
    for task in plan.tasks:
        found = []
        for number in {piece.transfer: None for piece in task.pieces}:
            transfer = plan.transfers[number]
            if number in known or transfer.route not in strided:
                continue
            known.add(number)
            for source, at in zip(transfer.recipe.sources, transfer.reads, strict=True):
                for run in at.runs if at.strides else ():
                    runs[at.file][run] = source.size * transfer.dtype.itemsize // len(at.runs)
                    found.append((at.file, run[0]))
        reads.append(found)
    spans = {
        file: joined
        for file, joined in ((file, _overlapping(of_file)) for file, of_file in runs.items())
        if 2 * sum(runs[file].values()) >= sum(end - begin for begin, end in joined)
    }
    asked: set[tuple[int, int]] = set()
    result: defaultdict[int, list[Range]] = defaultdict(list)
    for number, found in enumerate(reads):
        parts: list[Range] = []
        for file, offset in found:
            if file not in spans:
                continue
            begin, end = spans[file][bisect_right(spans[file], offset, key=itemgetter(0)) - 1]
            if (file, begin) not in asked:
                asked.add((file, begin))
                path = plan.source.files[file].path
                parts += ((path, at, min(TASK_BYTES, end - at)) for at in range(begin, end, TASK_BYTES))
        for index, part in enumerate(parts, number - threads - len(parts)):
            result[max(0, index)].append(part)
    return dict(result)


def _overlapping(runs: Iterable[tuple[int, int]]) -> Spans:
    """Return the begins and ends of runs, with overlapping ones joined; see `merged`, which joins touching ones, too.

    >>> _overlapping([(0, 4), (3, 4), (7, 2)])
    [(0, 7), (7, 9)]
    """
    result: Spans = []
    for offset, length in sorted(runs):
        if result and offset < result[-1][1]:
            result[-1] = result[-1][0], max(result[-1][1], offset + length)
        else:
            result.append((offset, offset + length))
    return result
