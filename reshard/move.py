"""Moving one piece of a plan: read, gather, write. The hot loop and nothing else.

For each band every source block's part is read once into a buffer of this thread, columns are copied where they have
to be, and every target block's part is written once for each of its replicas. `preadv`, `pwrite` and numpy's copies
release the interpreter's lock, so threads run side by side.
"""

from __future__ import annotations

import itertools
import threading
from array import array
from collections import OrderedDict
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from reshard.checkpoint import ranges
from reshard.checksum import crc32c
from reshard.remote import is_url
from reshard.remote_store import FETCH_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from reshard.bands import Columns, Recipe, Segment
    from reshard.checkpoint import Runs
    from reshard.plan import Piece, Plan
    from reshard.remote_store import Range
    from reshard.store import Writer

    Array = NDArray[Any]


class Files(Protocol):
    """What reads the source files and writes the target files, by path."""

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from a file."""

    def fetch(self, ranges: Iterable[Range]) -> None:
        """Request ranges that are read soon, where that takes long."""

    def write_at(self, path: str, offset: int, buffer: memoryview) -> None:
        """Write a whole buffer into an unfinished file."""


class Rows(NamedTuple):
    """Some rows of a segment, from `start` on."""

    segment: Segment
    start: int
    rows: int


_VIEWS_KEPT = 1024
"""How many views of its buffers a thread keeps with their bands, at most: half a megabyte."""


class Band(list[Rows]):
    """Rows that are read, and then written, at once.

    Attributes:
        copies: for target blocks whose columns are put together, by place and bytes of an element: the buffers, and
            views of them, what is put where. Making the views takes as long as copying what they show; tensors alike
            have the same. None where they are not kept.
    """

    __slots__ = ("copies",)

    def __init__(self) -> None:
        super().__init__()
        self.copies: dict[tuple[int, int], tuple[memoryview, memoryview, list[tuple[Array, Array]]]] | None = None


class Moved(NamedTuple):
    """What a task moved.

    Attributes:
        read, written: bytes of contents.
        wrote: five numbers for each range that was written: the move, the target block, where the range begins in the
            block's contents, its bytes and their CRC-32C. Empty where no sums are asked for.
    """

    read: int
    written: int
    wrote: array[int]


class _Buffers(threading.local):
    """Three buffers a thread, kept from band to band: memory touched for the first time costs more than the copy.

    With them, the bands of the last few shapes of tensors: layers repeat, and to work their bands out, with the views
    of the buffers, takes as long as to put their columns together.
    """

    _threads = itertools.count()

    def __init__(self) -> None:
        self.thread = next(self._threads)
        self.held = [memoryview(b"")] * 3
        self._bands: OrderedDict[tuple[object, ...], tuple[Recipe, list[Band]]] = OrderedDict()
        self._views = 0

    def get(self, which: int, nbytes: int) -> memoryview:
        if len(self.held[which]) < nbytes:
            self._bands.clear()  # their views would keep the buffer that is too small
            self._views = 0
            self.held[which] = memoryview(bytearray(nbytes))
        return self.held[which][:nbytes]

    def bands(self, recipe: Recipe, axis: int, start: int, stop: int, most_elements: int) -> list[Band]:
        """Return the bands of some rows."""
        key = (id(recipe), axis, start, stop, most_elements)
        if key in self._bands:
            self._bands.move_to_end(key)
            return self._bands[key][1]
        found = list(_bands(recipe.segments(axis, start, stop), most_elements))
        if _views(found) <= _VIEWS_KEPT:
            for band in found:
                band.copies = {}
            self._bands[key] = recipe, found
            self._views += _views(found)
            while self._views > _VIEWS_KEPT:
                _, (_, old) = self._bands.popitem(last=False)
                self._views -= _views(old)
        return found


_buffers = _Buffers()


def move_pieces(
    plan: Plan,
    pieces: Sequence[Piece],
    directory: str,
    store: Files,
    writer: Writer | None = None,
    *,
    checksums: bool = False,
    in_order: bool = False,
    go_on: Callable[[], object] = lambda: None,
) -> Moved:
    """Move some rows of some tensors from the source files into the unfinished target files.

    Args:
        plan: what goes where.
        pieces: the rows.
        directory: where the target files are.
        store: reads and writes ranges of bytes.
        writer: writes them where the store does not.
        checksums: sum up what is written.
        in_order: write each file from its first byte to its last, as far as the pieces follow its order.
        go_on: called before each band; raises where the run is given up.

    Returns:
        the bytes of contents read and written, and the ranges where `checksums`.

    Raises:
        SourceError: a source file ends early or cannot be read.
        TargetError, BudgetError: a target file cannot be written.
    """
    read = written = 0
    sums = _Sums() if checksums else None
    for mover, band in _ahead(_all_bands(plan, pieces, directory, store, writer or store, in_order=in_order), store):
        go_on()
        mover.band(band, sums)
        read += mover.read
        written += mover.written
    return Moved(read, written, sums.ranges() if sums else array("Q"))


def _all_bands(
    plan: Plan, pieces: Sequence[Piece], directory: str, store: Files, writer: Files | Writer, *, in_order: bool
) -> Iterator[tuple[_Mover, Band]]:
    """Yield the bands of all pieces, each with what moves it."""
    for piece in pieces:
        mover = _Mover(plan, piece.move, directory, store, writer)
        recipe, axis, most_elements = mover.move.recipe, mover.move.axis, plan.band_bytes // mover.width
        bands = _buffers.bands(recipe, axis, piece.start, piece.stop, most_elements)
        for band in bands if in_order or plan.coding else _turned(bands):  # whole chunks are compressed
            yield mover, band


def _ahead(bands: Iterable[tuple[_Mover, Band]], store: Files) -> Iterator[tuple[_Mover, Band]]:
    """Where sources are at URLs, have the bytes of several bands fetched at once before these are moved."""
    waiting: list[tuple[_Mover, Band]] = []
    wanted: list[Range] = []
    room = FETCH_BYTES
    for mover, band in bands:
        waiting.append((mover, band))
        if mover.is_remote:
            for _, path, runs, begin, nbytes in mover.reads(band):
                wanted += [(path, offset, stop - start) for offset, start, stop in ranges(runs, begin, nbytes)]
                room -= nbytes
            if room > 0:
                continue
        if wanted:
            store.fetch(wanted)
        yield from waiting
        waiting, wanted, room = [], [], FETCH_BYTES
    if wanted:
        store.fetch(wanted)
        yield from waiting
        store.fetch(())


def _turned(some: list[Any]) -> list[Any]:
    """Begin in another place in every thread: two that write to one file wait for each other."""
    start = len(some) * (_buffers.thread % 4) // 2 % len(some) if some else 0
    return some[start:] + some[:start]


def _bands(segments: Iterable[Segment], most_elements: int) -> Iterator[Band]:
    """Cut segments into bands, and join short ones that have the same targets: long writes are quicker than many."""
    band = Band()
    room = most_elements
    for segment in segments:
        row = segment.columns.row_elements
        start = segment.start
        while start < segment.stop:
            if band and (row > room or not _goes_on(band[-1], segment, start)):
                yield band
                band, room = Band(), most_elements
            rows = min(segment.stop - start, max(1, room // row))
            band.append(Rows(segment, start, rows))
            room -= rows * row
            start += rows
    if band:
        yield band


def _goes_on(last: Rows, segment: Segment, start: int) -> bool:
    """Tell whether rows are put together with those before them, in each target block."""
    before, columns = last.segment.columns, segment.columns
    gathered = not any(len(parts) == 1 and not parts[0].taken for some in (before, columns) for parts in some.parts)
    follows = last.start + last.rows == start and before.targets == columns.targets
    return gathered and follows and before.target_shapes == columns.target_shapes


def _views(bands: Iterable[Band]) -> int:
    """Return how many views of buffers some bands have at most, and one for themselves."""
    return 1 + sum(len(parts) for band in bands for part in band for parts in part.segment.columns.parts)


def _alike(band: Band, place: int) -> Iterator[tuple[Columns, int]]:
    """Yield the columns of rows, and how many: those of several source blocks at once, where all is alike in them."""
    first, rows = band[0].segment.columns, 0
    for segment, _, some in band:
        columns = segment.columns
        if rows and not (
            len(first.sources) == len(columns.sources) == 1
            and first.source_shapes == columns.source_shapes
            and first.parts[place] == columns.parts[place]
        ):
            yield first, rows
            rows = 0
        first, rows = columns, rows + some
    yield first, rows


class _Sums:
    """Checksums of what is written, range by range; a range goes on as long as writes follow each other in a block."""

    def __init__(self) -> None:
        self._ended = array("Q")
        self._last: dict[tuple[int, int], list[int]] = {}

    def add(self, move: int, target: int, runs: Runs, begin: int, content: memoryview) -> None:
        """Add what is written of a block's contents from `begin` on; no range goes beyond one of the block's runs."""
        if len(runs) > 1:
            for _, start, stop in ranges(runs, begin, len(content)):
                self._ended.extend((move, target, begin + start, stop - start, crc32c(content[start:stop])))
            return
        last = self._last.get((move, target))
        if last and last[0] + last[1] == begin:
            last[1:] = last[1] + len(content), crc32c(content, last[2])
        else:
            if last:
                self._ended.extend((move, target, *last))
            self._last[move, target] = [begin, len(content), crc32c(content)]

    def ranges(self) -> array[int]:
        """Return the ranges so far, as `Moved.wrote` tells."""
        for key, last in self._last.items():
            self._ended.extend((*key, *last))
        self._last = {}
        return self._ended


class _Mover:
    """Moves the segments of one tensor; `read` and `written` are the bytes of the last band."""

    def __init__(self, plan: Plan, number: int, directory: str, store: Files, writer: Files | Writer) -> None:
        self.number = number
        self.move = move = plan.moves[number]
        self.width = max(move.dtype.itemsize, move.target_dtype.itemsize)
        self.store, self.writer = store, writer
        self.sources = [
            (plan.source.files[holder].path, plan.source.entry(holder, move.source_name).runs)
            for holder in move.holders
        ]
        self.targets = [
            [(f"{directory}/{plan.files[n].path}", plan.files[n].layout.places[move.name]) for n in numbers]
            for numbers in move.targets
        ]
        self.is_remote = any(is_url(path) for path, _ in self.sources)
        self.read = self.written = 0
        self.carrier: np.dtype[Any] | None = None

    def band(self, band: Band, sums: _Sums | None) -> None:
        """Move the rows of one band."""
        self.read = self.written = 0
        first = band[0]
        columns = first.segment.columns
        target_itemsize = self.move.target_dtype.itemsize
        given = self._gathered(band)
        rows = sum(part.rows for part in band)
        for place in _turned(list(range(len(columns.targets)))):
            content = self._content(band, place, given, rows)
            if self.move.dtype is not self.move.target_dtype:
                content = self._cast(content)
            done = (first.start - first.segment.start) * prod(columns.target_shapes[place])
            begin = (first.segment.target_offsets[place] + done) * target_itemsize
            target = columns.targets[place]
            if self.move.starts:
                begin += self.move.starts[target]
            for path, runs in self.targets[target]:
                self._write(path, runs, begin, content)
            if sums and self.targets[target]:
                sums.add(self.number, target, self.targets[target][0][1], begin, content)

    def _gathered(self, band: Band) -> list[list[memoryview]]:
        """Read the rows of every source block of every part into one buffer; return where each is."""
        itemsize = self.move.dtype.itemsize
        buffer = _buffers.get(0, itemsize * sum(part.rows * part.segment.columns.row_elements for part in band))
        found: list[list[memoryview]] = [[] for _ in band]
        place = 0
        for part, path, runs, begin, nbytes in self.reads(band):
            view = buffer[place : place + nbytes]
            self._read(path, runs, begin, view)
            found[part].append(view)
            place += nbytes
        return found

    def reads(self, band: Band) -> Iterator[tuple[int, str, Runs, int, int]]:
        """Yield what is read for a band: for which part, of which file's contents, from where, how many bytes."""
        itemsize = self.move.dtype.itemsize
        for part, (segment, start, rows) in enumerate(band):
            columns = segment.columns
            for source, offset, shape in zip(
                columns.sources, segment.source_offsets, columns.source_shapes, strict=True
            ):
                row = prod(shape) * itemsize
                path, runs = self.sources[source]
                yield part, path, runs, offset * itemsize + (start - segment.start) * row, rows * row

    def _content(self, band: Band, place: int, given: Sequence[Sequence[memoryview]], rows: int) -> memoryview:
        """Return the rows of one target block: a source block's as they are, or columns put together."""
        parts = band[0].segment.columns.parts[place]
        if len(parts) == 1 and not parts[0].taken:
            return given[0][parts[0].read]
        itemsize = self.move.dtype.itemsize
        buffer = _buffers.get(1, rows * prod(band[0].segment.columns.target_shapes[place]) * itemsize)
        read, put, copies = (band.copies or {}).get((place, itemsize), (None, None, []))
        if read is not _buffers.held[0] or put is not _buffers.held[1]:
            copies = self._copies(band, place, rows, buffer)
            if band.copies is not None:
                band.copies[place, itemsize] = _buffers.held[0], _buffers.held[1], copies
        for gathered, taken in copies:
            gathered[...] = taken
        return buffer

    def _copies(self, band: Band, place: int, rows: int, buffer: memoryview) -> list[tuple[Array, Array]]:
        """Return views of what is put together, and of where it is taken from."""
        import numpy as np  # a quarter of the start-up of a command; rows that stay whole need none of it

        carrier = self.carrier = self.carrier or self.move.dtype.carrier()
        count = sum(part.rows * part.segment.columns.row_elements for part in band)
        read = np.frombuffer(_buffers.held[0], carrier, count)
        gathered = np.frombuffer(buffer, carrier).reshape(rows, *band[0].segment.columns.target_shapes[place])
        found = []
        begin = done = 0  # in the elements that were read, and in the rows
        for columns, some in _alike(band, place):
            starts = list(accumulate((some * prod(shape) for shape in columns.source_shapes), initial=begin))
            for part in columns.parts[place]:
                given = read[starts[part.read] : starts[part.read + 1]].reshape(some, *columns.source_shapes[part.read])
                found.append((gathered[done : done + some][part.put or ...], given[part.taken or ...]))
            begin = starts[-1]
            done += some
        return found

    def _cast(self, content: memoryview) -> memoryview:
        """Return the elements as the target's dtype; rounding is numpy's and ml_dtypes', to nearest, ties to even."""
        import numpy as np

        elements = np.frombuffer(content, self.move.dtype.numpy())
        dtype = self.move.target_dtype
        buffer = _buffers.get(2, len(elements) * dtype.itemsize)
        with np.errstate(over="ignore", invalid="ignore"):  # infinity is what a cast of too large a number gives
            np.copyto(np.frombuffer(buffer, dtype.numpy()), elements, casting="unsafe")
        return buffer

    def _read(self, path: str, runs: Runs, begin: int, view: memoryview) -> None:
        """Fill a buffer with the contents of a file from `begin`, which may lie in several runs."""
        self.read += len(view)
        if len(runs) == 1:
            self.store.read_into(path, runs[0][0] + begin, view)
            return
        for offset, start, stop in ranges(runs, begin, len(view)):
            self.store.read_into(path, offset, view[start:stop])

    def _write(self, path: str, runs: Runs, begin: int, view: memoryview) -> None:
        self.written += len(view)
        if len(runs) == 1:
            self.writer.write_at(path, runs[0][0] + begin, view)
            return
        for offset, start, stop in ranges(runs, begin, len(view)):
            self.writer.write_at(path, offset, view[start:stop])
