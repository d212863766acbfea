"""Row bands: move a tensor's bytes from its source blocks to its target blocks.

A segment is the rows [a, b) of the whole tensor between two adjacent edges of source or target blocks. In row-major
files each source block's part of it is one contiguous run, and so is each target block's part, for any two splits. A
band is one or more adjacent pieces of segments. It is moved with one read per piece and source block, a copy of
columns, and one write per target block:

1. Take the first axis along which one row of the whole tensor is small enough; its "rows" are numbered through all
   the axes before it.
2. Sweep over the rows; at every block edge the set of blocks that the rows meet changes, and a new `Segment` begins.
3. In a segment all rows have the same columns, so the mapping of source to target columns is computed once: `Columns`.

Offsets, rows and sizes are exact integers. A model of ten thousand tensors has a few dozen distinct recipes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod
from operator import sub
from typing import TYPE_CHECKING, NamedTuple

from reshard.core.layout.block import Block, Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


VIEWS = 0.25
"""Memory of a thread's cached bands, with views of its buffers, as a fraction of the bytes of a band."""

AHEAD = 16
"""How many bands a thread may read ahead if elements are needed in another order than they are stored."""

_ROWS = slice(None)  # all rows of a band


class Part(NamedTuple):
    """Columns copied from one source block to one target block.

    Attributes:
        source: position of the source block among `Columns.sources`.
        source_slices: slices of the columns in the rows of the source block; empty if both blocks have equal columns.
        target_slices: the same in the rows of the target block.
    """

    source: int
    source_slices: tuple[slice, ...]
    target_slices: tuple[slice, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """The column mapping that all rows of a segment share. Compared by identity.

    Attributes:
        sources: the source blocks that are read, by number in the recipe.
        source_shapes: the shape of one row of each source block.
        targets: the target blocks that are written, by number in the recipe.
        target_shapes: the shape of one row of each target block.
        parts: the origins of the columns of each target block; a single part without slices if one source block has
            exactly the same columns, so that no copy is needed.
    """

    sources: tuple[int, ...]
    source_shapes: tuple[Shape, ...]
    targets: tuple[int, ...]
    target_shapes: tuple[Shape, ...]
    parts: tuple[tuple[Part, ...], ...]

    @property
    def row_elements(self) -> int:
        """Number of elements that are read in each row."""
        return sum(map(prod, self.source_shapes))


class Segment(NamedTuple):
    """A run of rows with the same columns.

    Attributes:
        start, stop: the rows, numbered through all axes up to the banding axis.
        columns: the column mapping of these rows.
        source_offsets: the offset of the first row in each source block, in elements.
        target_offsets: the same for each target block.
    """

    start: int
    stop: int
    columns: Columns
    source_offsets: tuple[int, ...]
    target_offsets: tuple[int, ...]

    def parts_read(self, start: int, rows: int) -> Iterator[tuple[int, int, int]]:
        """Yield source block, first element and number of elements of each part that rows from `start` on read."""
        columns = self.columns
        for source, offset, shape in zip(columns.sources, self.source_offsets, columns.source_shapes, strict=True):
            row = prod(shape)
            yield source, offset + (start - self.start) * row, rows * row


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """The mapping of source to target blocks of one shape. Compared by identity.

    Attributes:
        shape: the shape of the whole tensor; `(1,)` for a scalar.
        sources: the source blocks to read, disjoint; they cover all targets.
        targets: the blocks to be made.

    >>> recipe = Recipe.of((4, 6), [Block((0, 0), (2, 6)), Block((2, 0), (4, 6))], [Block((0, 3), (4, 6))])
    >>> [(s.start, s.stop, s.columns.sources, s.target_offsets) for s in recipe.segments(0, 0, 4)]
    [(0, 2, (0,), (0,)), (2, 4, (1,), (6,))]
    """

    shape: Shape
    sources: tuple[Block, ...]
    targets: tuple[Block, ...]

    @classmethod
    def of(cls, shape: Shape, sources: Sequence[Block], targets: Sequence[Block]) -> Recipe:
        """Build a recipe; a scalar is treated as a tensor of one element."""
        if shape:
            return cls(shape, tuple(sources), tuple(targets))
        element = Block((0,), (1,))
        return cls((1,), (element,) * len(sources), (element,) * len(targets))

    def axis(self, most_elements: int) -> int:
        """Return the first axis along which a row has at most `most_elements` elements."""
        for axis in range(len(self.shape)):
            if prod(self.shape[axis + 1 :]) <= most_elements:
                return axis
        return len(self.shape) - 1

    def rows(self, axis: int) -> int:
        """Return the number of rows along an axis and all before it."""
        return prod(self.shape[: axis + 1])

    def elements_before(self, target: int, axis: int, row: int) -> int:
        """Return how many elements of a target block lie in the rows before a row.

        >>> recipe = Recipe.of((4, 6), [Block.whole((4, 6))], [Block((1, 3), (4, 6))])
        >>> [recipe.elements_before(0, 0, row) for row in range(5)], recipe.elements_before(0, 1, 10)
        ([0, 0, 3, 6, 9], 1)
        """
        block = self.targets[target]
        if row >= self.rows(axis):
            return block.size
        outer, last = divmod(row, self.shape[axis])
        count = 0
        for dim, index in enumerate((*_unravel(outer, self.shape[:axis]), last)):
            start, stop = block.start[dim], block.stop[dim]
            count += min(max(index - start, 0), stop - start) * prod(block.shape[dim + 1 :])
            if not start <= index < stop:
                break
        return count

    def segments(self, axis: int, start: int, stop: int) -> Iterator[Segment]:
        """Yield the segments of rows `start` to `stop`, without rows that no target needs."""
        extent = self.shape[axis]
        if start >= stop:
            return
        for outer in range(start // extent, (stop - 1) // extent + 1):
            prefix = _unravel(outer, self.shape[:axis])
            first = max(start - outer * extent, 0)
            last = min(stop - outer * extent, extent)
            sources = _blocks_meeting(self.sources, prefix, first, last)
            targets = _blocks_meeting(self.targets, prefix, first, last)
            for a, b, some_sources, some_targets in _sweep(self, axis, first, last, sources, targets):
                columns = _columns(self, axis, some_sources, some_targets)
                if columns.targets:
                    yield Segment(
                        outer * extent + a,
                        outer * extent + b,
                        columns,
                        tuple(_offset(self.sources[i], prefix, a) for i in columns.sources),
                        tuple(_offset(self.targets[i], prefix, a) for i in columns.targets),
                    )

    def elements_read(self, axis: int) -> int:
        """Return the number of elements read; rows of source blocks are read whole."""
        if is_grid(self.shape, self.targets):
            return prod(self.shape)  # every element once
        return sum((s.stop - s.start) * s.columns.row_elements for s in self.segments(axis, 0, self.rows(axis)))


def is_grid(shape: Shape, blocks: Sequence[Block]) -> bool:
    """Return whether blocks form a grid that covers a tensor exactly once.

    They do if they are the product of intervals that divide every axis.

    >>> is_grid((4,), [Block((0,), (1,)), Block((1,), (4,))]), is_grid((4,), [Block((0,), (2,)), Block((1,), (3,))])
    (True, False)
    """
    count = 1
    for axis, extent in enumerate(shape):
        intervals = sorted({(block.start[axis], block.stop[axis]) for block in blocks})
        ends = [0, *(stop for _, stop in intervals)]
        if [start for start, _ in intervals] != ends[:-1] or ends[-1] != extent:
            return False
        count *= len(intervals)
    return count == len(blocks) == len(set(blocks))


def _blocks_meeting(blocks: Sequence[Block], prefix: Shape, first: int, last: int) -> list[int]:
    """Return the blocks with rows from `first` to `last` at leading indices `prefix`."""
    axis = len(prefix)
    return [
        number
        for number, block in enumerate(blocks)
        if max(block.start[axis], first) < min(block.stop[axis], last)
        and all(a <= i < b for a, b, i in zip(block.start, block.stop, prefix, strict=False))
    ]


def _sweep(
    recipe: Recipe, axis: int, first: int, last: int, sources: list[int], targets: list[int]
) -> Iterator[tuple[int, int, tuple[int, ...], tuple[int, ...]]]:
    """Yield runs of rows in order, with the source and target blocks in each run."""
    begins: dict[int, list[tuple[bool, int]]] = {}
    ends: dict[int, list[tuple[bool, int]]] = {}
    for is_target, blocks, numbers in ((False, recipe.sources, sources), (True, recipe.targets, targets)):
        for number in numbers:
            block = blocks[number]
            begins.setdefault(max(block.start[axis], first), []).append((is_target, number))
            ends.setdefault(min(block.stop[axis], last), []).append((is_target, number))
    edges = sorted({first, last, *begins, *ends})
    met: tuple[set[int], set[int]] = (set(), set())
    for a, b in pairwise(edges):
        for is_target, number in ends.get(a, ()):
            met[is_target].discard(number)
        for is_target, number in begins.get(a, ()):
            met[is_target].add(number)
        yield a, b, tuple(sorted(met[0])), tuple(sorted(met[1]))


@lru_cache(maxsize=1024)
def _columns(recipe: Recipe, axis: int, sources: tuple[int, ...], targets: tuple[int, ...]) -> Columns:
    """Map source columns to target columns, without the sources that are not used."""
    source_columns = [_inner(recipe.sources[number], axis) for number in sources]
    target_columns = [(number, _inner(recipe.targets[number], axis)) for number in targets]
    near = _neighbours(source_columns)
    overlaps = [
        (number, target, [(i, common) for i in near(target) if (common := source_columns[i] & target) is not None])
        for number, target in target_columns
        if target.size
    ]
    used = sorted({i for _, _, pieces in overlaps for i, _ in pieces})
    position_of = {i: position for position, i in enumerate(used)}
    parts = tuple(
        tuple(
            Part(position_of[i], (), ())
            if source_columns[i] == target
            else Part(position_of[i], (_ROWS, *common.within(source_columns[i])), (_ROWS, *common.within(target)))
            for i, common in pieces
        )
        for _, target, pieces in overlaps
    )
    return Columns(
        tuple(sources[i] for i in used),
        tuple(source_columns[i].shape for i in used),
        tuple(number for number, _, _ in overlaps),
        tuple(target.shape for _, target, _ in overlaps),
        parts,
    )


def _neighbours(blocks: Sequence[Block]) -> Callable[[Block], list[int]]:
    """Return a function that returns the blocks that may meet a block, by number, ascending."""
    if not blocks or not blocks[0].start:
        return lambda _: list(range(len(blocks)))
    order = sorted(range(len(blocks)), key=lambda number: blocks[number].start[0])
    starts = [blocks[number].start[0] for number in order]
    longest = max(block.stop[0] - block.start[0] for block in blocks)

    def near(block: Block) -> list[int]:
        first = bisect_right(starts, block.start[0] - longest)
        return sorted(order[first : bisect_left(starts, block.stop[0], lo=first)])

    return near


def _inner(block: Block, axis: int) -> Block:
    return Block(block.start[axis + 1 :], block.stop[axis + 1 :])


def _offset(block: Block, prefix: Shape, row: int) -> int:
    """Return the offset of a row in a block, in elements."""
    position = 0
    for index, start, stop in zip((*prefix, row), block.start, block.stop, strict=False):
        position = position * (stop - start) + index - start
    inner = len(prefix) + 1
    size: int = prod(map(sub, block.stop[inner:], block.start[inner:]))
    return position * size


def _unravel(position: int, shape: Shape) -> Shape:
    """Return the indices of a row-major position.

    >>> _unravel(5, (2, 4))
    (1, 1)
    """
    indices: list[int] = []
    for extent in reversed(shape):
        position, index = divmod(position, extent)
        indices.append(index)
    return tuple(reversed(indices))


class Rows(NamedTuple):
    """Consecutive rows of a segment, beginning at `start`."""

    segment: Segment
    start: int
    rows: int


def cut(segments: Iterable[Segment], most_elements: int) -> Iterator[list[Rows]]:
    """Cut segments into bands; join short ones, because long writes are faster."""
    band: list[Rows] = []
    room = most_elements
    for segment in segments:
        row = segment.columns.row_elements
        start = segment.start
        while start < segment.stop:
            if band and (row > room or not _goes_on(band[-1], segment, start)):
                yield band
                band, room = [], most_elements
            rows = min(segment.stop - start, max(1, room // row))
            band.append(Rows(segment, start, rows))
            room -= rows * row
            start += rows
    if band:
        yield band


def _goes_on(last: Rows, segment: Segment, start: int) -> bool:
    """Return whether rows can be gathered together with the rows before them."""
    before, columns = last.segment.columns, segment.columns
    gathered = not any(is_whole(parts) for part_lists in (before.parts, columns.parts) for parts in part_lists)
    follows = last.start + last.rows == start and before.targets == columns.targets
    return gathered and follows and before.target_shapes == columns.target_shapes


def is_whole(parts: Sequence[Part]) -> bool:
    """Return whether the columns of a target block are exactly one source block's."""
    return len(parts) == 1 and not parts[0].source_slices


def elements_of(parts: Sequence[Rows]) -> int:
    """Return the number of elements in a band; no target block gets more."""
    return sum(rows * segment.columns.row_elements for segment, _, rows in parts)


def views_of(parts: Sequence[Rows]) -> int:
    """Estimate the number of buffer views in a band; a write that gathers has four, plus two per copy."""
    gathered = 2 * sum(1 for _ in runs_of_equal_parts(parts, 0))
    targets = parts[0].segment.columns.parts
    writes = sum(1 if is_whole(items) else 4 + len(items) * gathered for items in targets)
    return 1 + sum(len(segment.columns.sources) for segment, _, _ in parts) + writes


def runs_of_equal_parts(parts: Sequence[Rows], number: int) -> Iterator[tuple[Columns, int]]:
    """Yield columns and row counts; join adjacent source blocks with equal parts."""
    first, rows = parts[0].segment.columns, 0
    for segment, _, count in parts:
        columns = segment.columns
        if rows and not (
            len(first.sources) == len(columns.sources) == 1
            and first.source_shapes == columns.source_shapes
            and first.parts[number] == columns.parts[number]
        ):
            yield first, rows
            rows = 0
        first, rows = columns, rows + count
    yield first, rows
