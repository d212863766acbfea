"""Lay out bands in the buffers of a thread: where rows are read, and how their columns are gathered.

`preadv` and numpy's copies release the interpreter's lock, so threads run side by side, each with its own buffers.
"""

from __future__ import annotations

import mmap
import threading
from collections import OrderedDict
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.layout.strided import Ahead
from reshard.plan.bands import VIEWS
from reshard.storage.handles import thread

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from reshard.dtypes import DType
    from reshard.plan.bands import Columns, Part, Segment
    from reshard.plan.plan import Piece, Transfer

    Array = NDArray[Any]


class Rows(NamedTuple):
    """Consecutive rows of a segment, beginning at `start`."""

    segment: Segment
    start: int
    rows: int


class BandRead(NamedTuple):
    """The part of a source block in a band: block, offset in bytes, and buffer."""

    source: int
    begin: int
    view: memoryview


class BandWrite(NamedTuple):
    """The part of a target block in a band.

    Attributes:
        target: the number of the block.
        first: the offset in the block, in elements.
        content: the elements: a part of the read buffer, or the buffer in which columns are gathered.
        copies: pairs of a destination and a source view to copy for that, in the order of the columns.
    """

    target: int
    first: int
    content: memoryview
    copies: Sequence[tuple[Array, Array]]

    def gathered(self) -> memoryview:
        """Gather the columns of a read band; the result is valid until the next call."""
        for target, source in self.copies:
            target[...] = source
        return self.content


class Band(NamedTuple):
    """Rows of a tensor that are read, and then written, together."""

    reads: Sequence[BandRead]
    writes: Iterable[BandWrite]


_VIEW_BYTES = 200  # size of a view in a cached band, with its share of the containers; measured


class _Buffers(threading.local):
    """Buffers of a thread, reused because touching new memory is slower than copying.

    The bands of the last few tensor shapes are cached, too: layers repeat, and computing bands with their views of the
    buffers takes as long as gathering their columns.

    Attributes:
        read: the bytes that are read for a band.
        gather: the gathered columns of one target block.
        cast: these elements in another dtype.
        ahead: reads strided source blocks.
        copies: reads strided copies that are compared with the source blocks.
    """

    def __init__(self) -> None:
        self.read = self.gather = self.cast = memoryview(b"")
        self.ahead, self.copies = Ahead(_memory), Ahead(_memory)
        self._bands: OrderedDict[tuple[object, ...], tuple[int, list[Band]]] = OrderedDict()
        self._views = 0

    def bands(self, piece: Piece, transfer: Transfer, band_bytes: int, *, in_order: bool) -> Iterable[Band]:
        """Return the bands of a piece; unless `in_order`, rotate them by thread."""
        itemsizes = transfer.dtype.itemsize, transfer.target_dtype.itemsize
        key = (transfer.recipe, transfer.axis, piece.start, piece.stop, band_bytes, itemsizes, in_order)
        if key in self._bands:
            self._bands.move_to_end(key)
            return self._bands[key][-1]
        cut = list(_cut(transfer.recipe.segments(transfer.axis, piece.start, piece.stop), band_bytes // max(itemsizes)))
        self.reserve(max([band_bytes, *(max(itemsizes) * _elements(rows) for rows in cut)]))
        bands = (_band(rows, transfer, in_order=in_order) for rows in (cut if in_order else _turned(cut)))
        views = 1 + sum(map(_views, cut))
        limit = int(band_bytes * VIEWS) // _VIEW_BYTES
        if views > limit:
            return bands
        while self._views + views > limit:
            _, (count, _) = self._bands.popitem(last=False)
            self._views -= count
        cached = [Band(band.reads, list(band.writes)) for band in bands]
        self._bands[key] = views, cached
        self._views += views
        return cached

    def reserve(self, nbytes: int) -> None:
        """Ensure the buffers hold at least `nbytes` bytes. Untouched pages cost nothing."""
        if len(self.read) < nbytes:
            self._bands.clear()  # their views would keep the old, smaller buffers alive
            self._views = 0
            self.read, self.gather = _memory(nbytes), _memory(nbytes)


def _memory(nbytes: int) -> memoryview:
    """Return a buffer; only pages that are touched take memory."""
    return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


buffers = _Buffers()


def cast(content: memoryview, dtype: DType, target_dtype: DType) -> memoryview:
    """Cast elements to another dtype, rounding to nearest, ties to even.

    The result is in a buffer of this thread, and valid until the next call.
    """
    if dtype is target_dtype:
        return content
    import numpy as np

    elements = np.frombuffer(content, dtype.numpy())
    if len(buffers.cast) < len(elements) * target_dtype.itemsize:
        buffers.cast = _memory(len(elements) * target_dtype.itemsize)
    buffer = buffers.cast[: len(elements) * target_dtype.itemsize]
    with np.errstate(over="ignore", invalid="ignore"):  # a number that is too large becomes infinity
        np.copyto(np.frombuffer(buffer, target_dtype.numpy()), elements, casting="unsafe")
    return buffer


def copies_ahead() -> Ahead:
    """Return the reader of strided copies for this thread."""
    return buffers.copies


def scratch(nbytes: int) -> memoryview:
    """Return the gather buffer of this thread, to read other data into."""
    buffers.reserve(nbytes)
    return buffers.gather[:nbytes]


def _turned(items: list[Any]) -> list[Any]:
    """Rotate a list by thread: threads that write to one file wait for each other."""
    start = len(items) * thread.number // 2 % len(items) if items else 0
    return items[start:] + items[:start]


def _cut(segments: Iterable[Segment], most_elements: int) -> Iterator[list[Rows]]:
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
    gathered = not any(_is_whole(parts) for part_lists in (before.parts, columns.parts) for parts in part_lists)
    follows = last.start + last.rows == start and before.targets == columns.targets
    return gathered and follows and before.target_shapes == columns.target_shapes


def _is_whole(parts: Sequence[Part]) -> bool:
    """Return whether the columns of a target block are exactly one source block's."""
    return len(parts) == 1 and not parts[0].taken


def _elements(parts: Sequence[Rows]) -> int:
    """Return the number of elements in a band; no target block gets more."""
    return sum(rows * segment.columns.row_elements for segment, _, rows in parts)


def _views(parts: Sequence[Rows]) -> int:
    """Estimate the number of buffer views in a band; a write has four, and its copies."""
    gathered = 2 * sum(1 for _ in _alike(parts, 0))
    targets = parts[0].segment.columns.parts
    writes = sum(1 if _is_whole(items) else 4 + len(items) * gathered for items in targets)
    return 1 + sum(len(segment.columns.sources) for segment, _, _ in parts) + writes


def _band(parts: Sequence[Rows], transfer: Transfer, *, in_order: bool) -> Band:
    """Lay out a band in the buffers of this thread, one part after the other."""
    itemsize = transfer.dtype.itemsize
    reads = []
    position = 0
    for segment, start, rows in parts:
        columns = segment.columns
        for source, offset, shape in zip(columns.sources, segment.source_offsets, columns.source_shapes, strict=True):
            row = prod(shape) * itemsize
            begin = offset * itemsize + (start - segment.start) * row
            reads.append(BandRead(source, begin, buffers.read[position : position + rows * row]))
            position += rows * row
    return Band(reads, _writes(parts, transfer, reads, buffers.read[:position], in_order=in_order))


def _writes(
    parts: Sequence[Rows], transfer: Transfer, reads: Sequence[BandRead], read_bytes: memoryview, *, in_order: bool
) -> Iterator[BandWrite]:
    """Yield the writes of a band; unless `in_order`, rotate them by thread."""
    segment, start, _ = parts[0]
    columns = segment.columns
    rows = sum(rows for _, _, rows in parts)
    numbers = list(range(len(columns.targets)))
    for number in numbers if in_order else _turned(numbers):
        row = prod(columns.target_shapes[number])
        first = segment.target_offsets[number] + (start - segment.start) * row
        if _is_whole(columns.parts[number]):
            yield BandWrite(columns.targets[number], first, reads[columns.parts[number][0].read].view, ())
        else:
            content = buffers.gather[: rows * row * transfer.dtype.itemsize]
            copies = _copies(parts, number, transfer, read_bytes, content)
            yield BandWrite(columns.targets[number], first, content, copies)


def _copies(
    parts: Sequence[Rows], number: int, transfer: Transfer, read_bytes: memoryview, content: memoryview
) -> list[tuple[Array, Array]]:
    """Return destination and source views for the columns of one target block."""
    import numpy as np  # a quarter of the start-up time of a command; whole rows do not need it

    carrier = transfer.dtype.carrier()
    elements = np.frombuffer(read_bytes, carrier)
    shape = parts[0].segment.columns.target_shapes[number]
    gathered = np.frombuffer(content, carrier).reshape(sum(rows for _, _, rows in parts), *shape)
    copies = []
    begin = done = 0  # offsets in the elements that were read, and in the rows
    for columns, rows in _alike(parts, number):
        starts = list(accumulate((rows * prod(shape) for shape in columns.source_shapes), initial=begin))
        for read, source_index, target_index in columns.parts[number]:
            block = elements[starts[read] : starts[read + 1]].reshape(rows, *columns.source_shapes[read])
            copies.append((gathered[done : done + rows][target_index or ...], block[source_index or ...]))
        begin = starts[-1]
        done += rows
    return copies


def _alike(parts: Sequence[Rows], number: int) -> Iterator[tuple[Columns, int]]:
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
