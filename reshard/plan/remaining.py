"""What is left of a plan when some files are finished, and some ranges of others are written."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.formats.entries import ranges

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from reshard.plan.plan import Piece, Plan, Way

Spans = list[tuple[int, int]]
"""Begins and ends of byte ranges of a file, ascending, which do not touch."""


def remaining(plan: Plan, finished: Iterable[int], written: Mapping[int, Spans], complete: Iterable[int] = ()) -> Plan:
    """Return a plan without what is done; files keep their numbers.

    Args:
        plan: the whole plan.
        finished: the numbers of finished files.
        written: for unfinished files, the byte ranges that are written.
        complete: the numbers of unfinished files that, written in order, have all their bytes.
    """
    done = frozenset(finished)
    if not done and not written:
        return plan
    files = tuple(file._replace(done=True) if number in done else file for number, file in enumerate(plan.files))
    ways: dict[Way, Way] = {}
    moves = tuple(move._replace(way=_without(move.way, done, ways)) for move in plan.moves) if done else plan.moves
    plan = replace(plan, files=files, moves=moves)
    if plan.groups:
        made = done.union(complete)
        left = [number for number, group in enumerate(plan.groups) if not made.issuperset(group)]
        groups = tuple(tuple(file for file in plan.groups[number] if file not in done) for number in left)
        return replace(plan, groups=groups, tasks=tuple(plan.tasks[number] for number in left if plan.tasks))
    tasks = [tuple(piece for piece in pieces if _is_left(plan, piece, written)) for pieces in plan.tasks]
    return replace(plan, tasks=tuple(pieces for pieces in tasks if pieces))


def _without(way: Way, done: frozenset[int], known: dict[Way, Way]) -> Way:
    """Return a way that writes nothing into files that are done."""
    if way not in known:
        writes = tuple(tuple(at for at in some if at.file not in done) for some in way.writes)
        known[way] = replace(way, writes=writes)
    return known[way]


def _is_left(plan: Plan, piece: Piece, written: Mapping[int, Spans]) -> bool:
    """Return whether some bytes of a piece are not in all their files."""
    move = plan.moves[piece.move]
    width = move.target_dtype.itemsize
    for number, extents in enumerate(move.writes):
        begin, end = (move.recipe.before(number, move.axis, row) * width for row in (piece.start, piece.stop))
        for file, runs in extents:
            spans = written.get(file, [])
            if not all(covers(spans, at, at + stop - start) for at, start, stop in ranges(runs, begin, end - begin)):
                return True
    return False


def bytes_left(plan: Plan) -> int:
    """Return how many bytes of contents a plan writes."""
    if plan.groups and not plan.tasks:
        return sum(plan.files[number].layout.content_bytes for group in plan.groups for number in group)
    total = 0
    for piece in (piece for pieces in plan.tasks for piece in pieces):
        move = plan.moves[piece.move]
        for number, written in enumerate(move.way.writes):
            if written:
                rows = (move.recipe.before(number, move.axis, row) for row in (piece.stop, piece.start))
                total += (next(rows) - next(rows)) * move.target_dtype.itemsize * len(written)
    return total


def covers(spans: Spans, begin: int, end: int) -> bool:
    """Return whether one of some spans holds a range.

    >>> [covers([(0, 4), (6, 9)], *some) for some in ((0, 4), (3, 7), (6, 6), (9, 10))]
    [True, False, True, False]
    """
    place = bisect_right(spans, begin, key=lambda span: span[0]) - 1
    return begin == end or (place >= 0 and end <= spans[place][1])


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return begins and ends, those joined that touch or overlap.

    >>> merged([(4, 6), (0, 2), (2, 3), (5, 9)])
    [(0, 3), (4, 9)]
    """
    found: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found
