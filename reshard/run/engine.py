"""The engine: bands of moves are read, and every target block gets its part of them, whoever wants it.

For each band every source block's part is read once into a buffer of this thread, and columns are copied where they
have to be (`BandReader`). `move_pieces` writes what comes into the target files, once for each replica; a comparison
(`verify.compare`) compares it. `preadv` and numpy's copies release the interpreter's lock, so threads run side by side.
Where a request takes its time, as at URLs, parts of several bands are read at once (`places.in_batches`).
"""

from __future__ import annotations

import mmap
import threading
from array import array
from collections import OrderedDict
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.formats.entries import ranges, wants
from reshard.layout.strided import Ahead
from reshard.plan.bands import AHEAD, VIEWS
from reshard.storage.crc import crc32, crc32c
from reshard.storage.local import thread
from reshard.storage.places import in_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from reshard.dtypes import DType
    from reshard.formats.entries import Extent, Runs
    from reshard.layout.block import Shape
    from reshard.plan.bands import Columns, Part, Segment
    from reshard.plan.plan import Move, Piece, Plan
    from reshard.storage.base import ReadStore, Sinks, Want

    Array = NDArray[Any]


class Given(NamedTuple):
    """What a target block gets of a band.

    Attributes:
        move: the number of the move.
        target: the number of the target block in its recipe.
        first: where it begins in the block, in elements.
        content: the elements, as the source has them; they are there until the next are asked for.
    """

    move: int
    target: int
    first: int
    content: memoryview


class Rows(NamedTuple):
    """Some rows of a segment, from `start` on."""

    segment: Segment
    start: int
    rows: int


class Read(NamedTuple):
    """A source block's part of a band: which block, where in its contents in bytes, and the buffer for it."""

    source: int
    begin: int
    view: memoryview


class Write(NamedTuple):
    """A target block's part of a band.

    Attributes:
        target: which block.
        first: where in the block, in elements.
        content: what it gets: a part that is read, or the buffer that columns are put together in.
        copies: what is put where for that, in the order of the columns.
    """

    target: int
    first: int
    content: memoryview
    copies: Sequence[tuple[Array, Array]]

    def put_together(self) -> memoryview:
        """Return what it gets, once the band is read; it is there until that of another is put together."""
        for put, taken in self.copies:
            put[...] = taken
        return self.content


class Band(NamedTuple):
    """Rows of a tensor that are read, and then written, at once."""

    reads: Sequence[Read]
    writes: Iterable[Write]


class _Apart(NamedTuple):
    """What `gather` reads of some rows of a move: the source blocks that lie apart, and the bytes of the rows."""

    sources: frozenset[int]
    nbytes: int


_VIEW_BYTES = 200  # of a view of a buffer in a band that is kept, with its share of what holds it; measured


class _Buffers(threading.local):
    """Buffers of a thread, kept from band to band: memory touched for the first time costs more than the copy.

    With them, the bands of the last few shapes of tensors: layers repeat, and to work bands out, with the views of the
    buffers, takes as long as to put their columns together.

    Attributes:
        read: for what is read of a band.
        put: for the columns of one target block, put together.
        cast: for these elements in another dtype.
        ahead: reads source blocks whose elements lie in strides.
        copies: reads copies of them that are compared with these.
    """

    def __init__(self) -> None:
        self.read = self.put = self.cast = memoryview(b"")
        self.ahead, self.copies = Ahead(_memory), Ahead(_memory)
        self._bands: OrderedDict[tuple[object, ...], tuple[int, list[Band]]] = OrderedDict()
        self._views = 0

    def bands(self, piece: Piece, move: Move, band_bytes: int, *, in_order: bool) -> Iterable[Band]:
        """Return the bands of some rows, in another order in every thread unless `in_order`."""
        itemsizes = move.dtype.itemsize, move.target_dtype.itemsize
        key = (move.recipe, move.axis, piece.start, piece.stop, band_bytes, itemsizes, in_order)
        if key in self._bands:
            self._bands.move_to_end(key)
            return self._bands[key][-1]
        cut = list(_cut(move.recipe.segments(move.axis, piece.start, piece.stop), band_bytes // max(itemsizes)))
        self.hold(max([band_bytes, *(max(itemsizes) * _elements(rows) for rows in cut)]))
        made = (_band(rows, move, in_order=in_order) for rows in (cut if in_order else _turned(cut)))
        views = 1 + sum(map(_views, cut))
        most = int(band_bytes * VIEWS) // _VIEW_BYTES
        if views > most:
            return made
        while self._views + views > most:
            _, (fewer, _) = self._bands.popitem(last=False)
            self._views -= fewer
        found = [Band(band.reads, list(band.writes)) for band in made]
        self._bands[key] = views, found
        self._views += views
        return found

    def hold(self, nbytes: int) -> None:
        """Have buffers of so many bytes; what is not used of them takes no memory."""
        if len(self.read) < nbytes:
            self._bands.clear()  # their views would keep the buffers that are too small
            self._views = 0
            self.read, self.put = _memory(nbytes), _memory(nbytes)


def _memory(nbytes: int) -> memoryview:
    """Return a buffer, which takes memory where it is touched."""
    return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


_buffers = _Buffers()


class BandReader:
    """Reads bands of moves. For one thread.

    Attributes:
        nbytes: how many bytes were read.
    """

    def __init__(
        self, moves: Sequence[Move] | Mapping[int, Move], paths: Sequence[str], store: ReadStore, band_bytes: int
    ) -> None:
        """Prepare to read.

        Args:
            moves: the moves, by number.
            paths: the files that they read from, by number.
            store: reads these.
            band_bytes: the most bytes of a tensor that are read at once.
        """
        self._moves, self._paths, self._store, self._band_bytes = moves, paths, store, band_bytes
        self._apart: dict[int, _Apart] = {}  # of each move
        self._token = object()  # what is read ahead is for this reader alone
        self.nbytes = 0

    def read(
        self, pieces: Iterable[Piece], *, in_order: bool = False, check: Callable[[], object] = lambda: None
    ) -> Iterator[Given]:
        """Read some rows of some moves.

        Args:
            pieces: the rows.
            in_order: as they stand in the target blocks; otherwise every thread begins in another place.
            check: called before each band; raises where the work is given up.

        Raises:
            SourceError: a source file ends early or cannot be read.
        """
        for number, band in in_batches(self.bands(pieces, in_order=in_order)):
            check()
            self.gather(number, band)
            for write in band.writes:
                yield Given(number, write.target, write.first, write.put_together())

    def bands(
        self, pieces: Iterable[Piece], *, in_order: bool = False
    ) -> Iterator[tuple[tuple[int, Band], ReadStore, list[Want]]]:
        """Yield the bands of some rows, each with the number of its move and what is to be read for it.

        When that is read, `gather` reads the rest.
        """
        for piece in pieces:
            move = self._moves[piece.move]
            sources = [(self._paths[at.file], at.runs) for at in move.reads]
            apart = frozenset(number for number, at in enumerate(move.reads) if at.is_apart)
            row = prod(move.recipe.shape[move.axis + 1 :]) * move.dtype.itemsize
            self._apart[piece.move] = _Apart(apart, (piece.stop - piece.start) * row)
            for band in _buffers.bands(piece, move, self._band_bytes, in_order=in_order or bool(apart)):
                wanted: list[Want] = []
                for source, begin, view in band.reads:
                    if source not in apart:
                        wanted += wants(*sources[source], begin, view)
                    self.nbytes += len(view)
                yield (piece.move, band), self._store, wanted

    def gather(self, number: int, band: Band) -> None:
        """Read what a band has of source blocks whose elements lie in strides, and fill those of zeros."""
        apart = self._apart[number]
        if apart.sources:
            move = self._moves[number]
            wanted = [read for read in band.reads if read.source in apart.sources]
            room = min(AHEAD * self._band_bytes, apart.nbytes)
            _buffers.ahead.share((self._token, number, room, *(read.source for read in wanted)), len(wanted) or 1, room)
            for place, (source, begin, view) in enumerate(wanted):
                shape = move.recipe.sources[source].shape
                at = move.reads[source]
                read_block(self._store, self._paths, at, shape, move.dtype, begin, view, _buffers.ahead, place)


def read_block(
    store: ReadStore,
    paths: Sequence[str],
    extent: Extent,
    shape: Shape,
    dtype: DType,
    begin: int,
    view: memoryview,
    ahead: Ahead,
    place: int,
) -> None:
    """Fill a buffer with the contents of a block from a byte on: elements that lie in strides, or zeros.

    What follows is read `ahead`, as that of the block with this number of those that are read side by side.
    """
    if not extent.runs:
        view[:] = bytes(len(view))
        return
    import numpy as np  # seldom

    def read(offset: int, buffer: memoryview) -> None:
        store.read(wants(paths[extent.file], extent.runs, offset, buffer))

    out = np.frombuffer(view, dtype.carrier())
    ahead.read(place, read, shape, extent.strides, begin // dtype.itemsize, out)


def cast(content: memoryview, dtype: DType, target_dtype: DType) -> memoryview:
    """Return elements as those of another dtype; rounding is numpy's and ml_dtypes', to nearest, ties to even.

    They are in a buffer of this thread until its next call.
    """
    if dtype is target_dtype:
        return content
    import numpy as np

    elements = np.frombuffer(content, dtype.numpy())
    if len(_buffers.cast) < len(elements) * target_dtype.itemsize:
        _buffers.cast = _memory(len(elements) * target_dtype.itemsize)
    buffer = _buffers.cast[: len(elements) * target_dtype.itemsize]
    with np.errstate(over="ignore", invalid="ignore"):  # infinity is what a cast of too large a number gives
        np.copyto(np.frombuffer(buffer, target_dtype.numpy()), elements, casting="unsafe")
    return buffer


def copies_ahead() -> Ahead:
    """Return what reads copies whose elements lie in strides, for this thread."""
    return _buffers.copies


def scratch(nbytes: int) -> memoryview:
    """Return the buffer of this thread that columns are put together in, for something else that is read."""
    _buffers.hold(nbytes)
    return _buffers.put[:nbytes]


def _turned(some: list[Any]) -> list[Any]:
    """Begin in another place in every thread: two that write to one file wait for each other."""
    start = len(some) * thread.number // 2 % len(some) if some else 0
    return some[start:] + some[:start]


def _cut(segments: Iterable[Segment], most_elements: int) -> Iterator[list[Rows]]:
    """Cut segments into bands, and join short ones that have the same targets: long writes are quicker than many."""
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
    """Return whether rows are put together with those before them, in each target block."""
    before, columns = last.segment.columns, segment.columns
    gathered = not any(_is_whole(parts) for some in (before, columns) for parts in some.parts)
    follows = last.start + last.rows == start and before.targets == columns.targets
    return gathered and follows and before.target_shapes == columns.target_shapes


def _is_whole(parts: Sequence[Part]) -> bool:
    """Return whether a target block's columns are just those of one source block."""
    return len(parts) == 1 and not parts[0].taken


def _elements(parts: Sequence[Rows]) -> int:
    """Return how many elements are read for a band; no target block has more of them."""
    return sum(rows * segment.columns.row_elements for segment, _, rows in parts)


def _views(parts: Sequence[Rows]) -> int:
    """Return about how many views of buffers a band has; what a write has besides its copies counts as four."""
    gathered = 2 * sum(1 for _ in _alike(parts, 0))
    every = parts[0].segment.columns.parts
    writes = sum(1 if _is_whole(some) else 4 + len(some) * gathered for some in every)
    return 1 + sum(len(segment.columns.sources) for segment, _, _ in parts) + writes


def _band(parts: Sequence[Rows], move: Move, *, in_order: bool) -> Band:
    """Lay a band out in this thread's buffers: what is read lies one after the other; columns are put together."""
    itemsize = move.dtype.itemsize
    reads = []
    place = 0
    for segment, start, rows in parts:
        columns = segment.columns
        for source, offset, shape in zip(columns.sources, segment.source_offsets, columns.source_shapes, strict=True):
            row = prod(shape) * itemsize
            begin = offset * itemsize + (start - segment.start) * row
            reads.append(Read(source, begin, _buffers.read[place : place + rows * row]))
            place += rows * row
    return Band(reads, _writes(parts, move, reads, _buffers.read[:place], in_order=in_order))


def _writes(
    parts: Sequence[Rows], move: Move, reads: Sequence[Read], given: memoryview, *, in_order: bool
) -> Iterator[Write]:
    """Yield what is written of a band, from another target block on in every thread unless `in_order`."""
    segment, start, _ = parts[0]
    columns = segment.columns
    rows = sum(rows for _, _, rows in parts)
    numbers = list(range(len(columns.targets)))
    for number in numbers if in_order else _turned(numbers):
        row = prod(columns.target_shapes[number])
        first = segment.target_offsets[number] + (start - segment.start) * row
        if _is_whole(columns.parts[number]):
            yield Write(columns.targets[number], first, reads[columns.parts[number][0].read].view, ())
        else:
            content = _buffers.put[: rows * row * move.dtype.itemsize]
            yield Write(columns.targets[number], first, content, _copies(parts, number, move, given, content))


def _copies(
    parts: Sequence[Rows], number: int, move: Move, given: memoryview, content: memoryview
) -> list[tuple[Array, Array]]:
    """Return views of where one target block's columns go, and of where they are taken from."""
    import numpy as np  # a quarter of the start-up of a command; rows that stay whole need none of it

    carrier = move.dtype.carrier()
    elements = np.frombuffer(given, carrier)
    shape = parts[0].segment.columns.target_shapes[number]
    gathered = np.frombuffer(content, carrier).reshape(sum(rows for _, _, rows in parts), *shape)
    found = []
    begin = done = 0  # in the elements that were read, and in the rows
    for columns, rows in _alike(parts, number):
        starts = list(accumulate((rows * prod(shape) for shape in columns.source_shapes), initial=begin))
        for read, taken, put in columns.parts[number]:
            block = elements[starts[read] : starts[read + 1]].reshape(rows, *columns.source_shapes[read])
            found.append((gathered[done : done + rows][put or ...], block[taken or ...]))
        begin = starts[-1]
        done += rows
    return found


def _alike(parts: Sequence[Rows], number: int) -> Iterator[tuple[Columns, int]]:
    """Yield the columns of rows, and how many: those of several source blocks at once, where all is alike in them."""
    first, rows = parts[0].segment.columns, 0
    for segment, _, some in parts:
        columns = segment.columns
        if rows and not (
            len(first.sources) == len(columns.sources) == 1
            and first.source_shapes == columns.source_shapes
            and first.parts[number] == columns.parts[number]
        ):
            yield first, rows
            rows = 0
        first, rows = columns, rows + some
    yield first, rows


class Moved(NamedTuple):
    """What a task moved.

    Attributes:
        read, written: bytes of contents.
        wrote: five numbers for each range that was written: the move, the target block, where the range begins in the
            block's contents, its bytes and their CRC-32C. Empty where no sums are asked for.
        crcs: the same, with their CRC-32.
    """

    read: int
    written: int
    wrote: array[int]
    crcs: array[int]


def move_pieces(
    plan: Plan,
    pieces: Sequence[Piece],
    store: ReadStore,
    writer: Sinks,
    *,
    checksums: bool = False,
    crcs: bool = False,
    in_order: bool = False,
    check_cancelled: Callable[[], object] = lambda: None,
) -> Moved:
    """Move some rows of some tensors from the source files into the unfinished target files.

    Args:
        plan: what goes where.
        pieces: the rows.
        store: reads the source files.
        writer: writes the target files.
        checksums: sum up what is written, by CRC-32C.
        crcs: sum it up by CRC-32.
        in_order: write each file from its first byte to its last, as far as the pieces follow its order.
        check_cancelled: called before each band; raises where the run is given up.

    Returns:
        the bytes of contents read and written, and the ranges where `checksums` or `crcs`.

    Raises:
        SourceError: a source file ends early or cannot be read.
        TargetError, BudgetError: a target file cannot be written.
    """
    written = 0
    wrote, summed = _Sums(crc32c), _Sums(crc32)
    sums = [one for one, wanted in ((wrote, checksums), (summed, crcs)) if wanted]
    reader = BandReader(plan.moves, [file.path for file in plan.source.files], store, plan.band_bytes)
    current = -1
    targets: list[list[tuple[int, Runs]]] = []
    in_order = in_order or plan.coding is not None  # whole chunks are compressed
    for number, target, first, given in reader.read(pieces, in_order=in_order, check=check_cancelled):
        move = plan.moves[number]
        if number != current:
            targets = [[(at.file, at.runs) for at in extents] for extents in move.writes]
            current = number
        content = cast(given, move.dtype, move.target_dtype)
        begin = first * move.target_dtype.itemsize
        for file, runs in targets[target]:
            written += len(content)
            if len(runs) == 1:
                writer.write_at(file, runs[0][0] + begin, content)
                continue
            for offset, start, stop in ranges(runs, begin, len(content)):
                writer.write_at(file, offset, content[start:stop])
        if targets[target]:
            for one in sums:
                one.add(number, target, targets[target][0][1], begin, content)
    return Moved(reader.nbytes, written, wrote.ranges(), summed.ranges())


class _Sums:
    """Checksums of what is written, range by range; a range goes on as long as writes follow each other in a block."""

    def __init__(self, extend: Callable[[memoryview, int], int]) -> None:
        self._extend = extend
        self._ended = array("Q")
        self._last: dict[tuple[int, int], list[int]] = {}

    def add(self, move: int, target: int, runs: Runs, begin: int, content: memoryview) -> None:
        """Add what is written of a block's contents from `begin` on; no range goes beyond one of the block's runs."""
        if len(runs) > 1:
            for _, start, stop in ranges(runs, begin, len(content)):
                self._ended.extend((move, target, begin + start, stop - start, self._extend(content[start:stop], 0)))
            return
        last = self._last.get((move, target))
        if last and last[0] + last[1] == begin:
            last[1:] = last[1] + len(content), self._extend(content, last[2])
        else:
            if last:
                self._ended.extend((move, target, *last))
            self._last[move, target] = [begin, len(content), self._extend(content, 0)]

    def ranges(self) -> array[int]:
        """Return the ranges so far, as `Moved.wrote` tells."""
        for key, last in self._last.items():
            self._ended.extend((*key, *last))
        self._last = {}
        return self._ended
