"""Execute transfers: read each band once and scatter it to all target blocks.

For each band, the part of every source block is read once into a buffer of this thread, and columns are gathered
(`BandReader`). `move_pieces` writes the result into the target files, once for each replica; a comparison
(`verify.compare`) compares it. `preadv` and numpy's copies release the interpreter's lock, so threads run side by side.
If requests have a high latency, as at URLs, several bands are read at once (`places.in_batches`).
"""

from __future__ import annotations

import mmap
import threading
from array import array
from collections import OrderedDict
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.core.layout.strided import Ahead
from reshard.core.model.entries import ranges, wants, wants_of
from reshard.core.plan.bands import AHEAD, VIEWS, cut, elements_of, is_whole, runs_of_equal_parts, views_of
from reshard.core.storage.crc import crc32, crc32c
from reshard.core.storage.handles import thread
from reshard.core.storage.places import in_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from reshard.core.layout.block import Shape
    from reshard.core.model.entries import Extent, Runs
    from reshard.core.plan.bands import Rows
    from reshard.core.plan.plan import Piece, Plan, Transfer
    from reshard.core.storage.base import ReadStore, Want
    from reshard.core.storage.sinks import Sinks
    from reshard.dtypes import DType

    Array = NDArray[Any]


class BandOutput(NamedTuple):
    """The part of a band that belongs to one target block.

    Attributes:
        transfer: the number of the transfer.
        target: the number of the target block in its recipe.
        first: the offset in the block, in elements.
        content: the elements in the dtype of the source; valid until the next part is requested.
    """

    transfer: int
    target: int
    first: int
    content: memoryview


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
        copies: pairs of a destination and a source view to copy when gathering, in the order of the columns.
    """

    target: int
    first: int
    content: memoryview
    copies: Sequence[tuple[Array, Array]]

    def gather_columns(self) -> memoryview:
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

    Bands of the last few tensor shapes are cached, too: layers repeat, and to compute them takes as long as to gather.

    Attributes:
        read: the bytes that are read for a band.
        gather_buffer: the gathered columns of one target block.
        cast: these elements in another dtype.
        ahead: reads strided source blocks.
        copies: reads strided copies that are compared with the source blocks.
    """

    def __init__(self) -> None:
        self.read = self.gather_buffer = self.cast = memoryview(b"")
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
        segments = transfer.recipe.segments(transfer.axis, piece.start, piece.stop)
        parts = list(cut(segments, band_bytes // max(itemsizes)))
        self.reserve(max([band_bytes, *(max(itemsizes) * elements_of(rows) for rows in parts)]))
        bands = (_band(rows, transfer, in_order=in_order) for rows in (parts if in_order else _turned(parts)))
        views, limit = 1 + sum(map(views_of, parts)), int(band_bytes * VIEWS) // _VIEW_BYTES
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
            self.read, self.gather_buffer = _memory(nbytes), _memory(nbytes)


def _memory(nbytes: int) -> memoryview:
    """Return a buffer; only pages that are touched take memory."""
    return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


_buffers = _Buffers()


class BandReader:
    """Reads bands of transfers; for use by one thread.

    Args:
        transfers: the transfers, by number.
        paths: the source files, by number.
        store: reads the source files.
        band_bytes: the most bytes of a tensor that are read at once.

    Attributes:
        nbytes: the number of bytes of files read.
    """

    def __init__(
        self, transfers: Sequence[Transfer] | Mapping[int, Transfer], paths: Sequence[str], store: ReadStore,
        band_bytes: int,
    ) -> None:  # fmt: skip
        self._transfers, self._paths, self._store, self._band_bytes = transfers, paths, store, band_bytes
        self._strided: dict[int, tuple[frozenset[int], int]] = {}  # by transfer: strided sources, bytes of the rows
        self._token = object()  # data that is read ahead belongs to this reader alone
        self.nbytes = 0.0

    def read(
        self, pieces: Iterable[Piece], *, in_order: bool = False, check: Callable[[], object] = lambda: None
    ) -> Iterator[BandOutput]:
        """Read pieces of transfers, and yield the part of each target block.

        Args:
            pieces: the rows to read.
            in_order: read in the order of the target blocks; otherwise half of the threads start at the middle band.
            check: called before each band; raises if the work is cancelled.

        Raises:
            SourceError: a source file ends early or cannot be read.
        """
        for number, band in in_batches(self.bands(pieces, in_order=in_order)):
            check()
            self.read_strided_blocks(number, band)
            for write in band.writes:
                yield BandOutput(number, write.target, write.first, write.gather_columns())

    def bands(
        self, pieces: Iterable[Piece], *, in_order: bool = False
    ) -> Iterator[tuple[tuple[int, Band], ReadStore, list[Want]]]:
        """Yield the bands of pieces, each with its transfer number, store and read requests.

        Once the requests are complete, `read_strided_blocks` reads the strided blocks.
        """
        for piece in pieces:
            transfer = self._transfers[piece.transfer]
            sources = [(self._paths[at.file], at.runs) for at in transfer.reads]
            strided = frozenset(number for number, at in enumerate(transfer.reads) if at.is_indirect)
            row = prod(transfer.recipe.shape[transfer.axis + 1 :]) * transfer.dtype.itemsize
            self._strided[piece.transfer] = strided, (piece.stop - piece.start) * row
            for band in _buffers.bands(piece, transfer, self._band_bytes, in_order=in_order or bool(strided)):
                requests: list[Want] = []
                for source, begin, view in band.reads:
                    if source not in strided:
                        requests += wants(*sources[source], begin, view)
                    self.nbytes += len(view) * transfer.cost
                yield (piece.transfer, band), self._store, requests

    def read_strided_blocks(self, number: int, band: Band) -> None:
        """Read the strided source blocks of a band, and fill blocks that are all zeros."""
        strided, nbytes = self._strided[number]
        if strided:
            transfer = self._transfers[number]
            reads = [read for read in band.reads if read.source in strided]
            room = min(AHEAD * self._band_bytes, nbytes)
            _buffers.ahead.share((self._token, number, room, *(read.source for read in reads)), len(reads) or 1, room)
            for index, (source, begin, view) in enumerate(reads):
                shape = transfer.recipe.sources[source].shape
                at = transfer.reads[source]
                read_block(self._store, self._paths, at, shape, transfer.dtype, begin, view, _buffers.ahead, index)


def read_block(
    store: ReadStore,
    paths: Sequence[str],
    extent: Extent,
    shape: Shape,
    dtype: DType,
    begin: int,
    view: memoryview,
    ahead: Ahead,
    index: int,
) -> None:
    """Fill a buffer from byte `begin` of a block that is strided or all zeros.

    The bytes that follow are read `ahead`; `index` is the number of the block among blocks that are read side by side.
    """
    if not extent.runs:
        view[:] = bytes(len(view))
        return
    import numpy as np  # rarely needed

    def read(requests: Sequence[tuple[int, memoryview]]) -> None:
        store.read(wants_of(paths[extent.file], extent.runs, requests))

    out = np.frombuffer(view, dtype.carrier())
    ahead.read(index, read, shape, extent.strides, begin // dtype.itemsize, out)


def cast(content: memoryview, dtype: DType, target_dtype: DType) -> memoryview:
    """Cast elements to another dtype, rounding to nearest, ties to even.

    The result is in a buffer of this thread, and valid until the next call.
    """
    if dtype is target_dtype:
        return content
    import numpy as np

    elements = np.frombuffer(content, dtype.numpy())
    if len(_buffers.cast) < len(elements) * target_dtype.itemsize:
        _buffers.cast = _memory(len(elements) * target_dtype.itemsize)
    buffer = _buffers.cast[: len(elements) * target_dtype.itemsize]
    with np.errstate(over="ignore", invalid="ignore"):  # a number that is too large becomes infinity
        np.copyto(np.frombuffer(buffer, target_dtype.numpy()), elements, casting="unsafe")
    return buffer


def copies_ahead() -> Ahead:
    """Return the reader of strided copies for this thread."""
    return _buffers.copies


def scratch(nbytes: int) -> memoryview:
    """Return the gather buffer of this thread, to read other data into."""
    _buffers.reserve(nbytes)
    return _buffers.gather_buffer[:nbytes]


def _turned(items: list[Any]) -> list[Any]:
    """Rotate a list by thread: threads that write to one file wait for each other."""
    start = len(items) * thread.number // 2 % len(items) if items else 0
    return items[start:] + items[:start]


def _band(parts: Sequence[Rows], transfer: Transfer, *, in_order: bool) -> Band:
    """Lay out a band in the buffers of this thread, one part after the other."""
    itemsize = transfer.dtype.itemsize
    reads = []
    position = 0
    for segment, start, rows in parts:
        for source, first, count in segment.parts_read(start, rows):
            end = position + count * itemsize
            reads.append(BandRead(source, first * itemsize, _buffers.read[position:end]))
            position = end
    return Band(reads, _writes(parts, transfer, reads, _buffers.read[:position], in_order=in_order))


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
        if is_whole(columns.parts[number]):
            yield BandWrite(columns.targets[number], first, reads[columns.parts[number][0].source].view, ())
        else:
            content = _buffers.gather_buffer[: rows * row * transfer.dtype.itemsize]
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
    for columns, rows in runs_of_equal_parts(parts, number):
        starts = list(accumulate((rows * prod(shape) for shape in columns.source_shapes), initial=begin))
        for source, source_slices, target_slices in columns.parts[number]:
            block = elements[starts[source] : starts[source + 1]].reshape(rows, *columns.source_shapes[source])
            copies.append((gathered[done : done + rows][target_slices or ...], block[source_slices or ...]))
        begin = starts[-1]
        done += rows
    return copies


class Moved(NamedTuple):
    """The amount and the ranges of contents that a task moved.

    Attributes:
        bytes_read, bytes_written: bytes of contents.
        crc32c_ranges: five numbers for each range that was written: the transfer, the target block, the offset of the
            range in the contents of the block, its bytes and their CRC-32C. Empty if no sums are requested.
        crc32_ranges: the same, with CRC-32 sums.
    """

    bytes_read: int
    bytes_written: int
    crc32c_ranges: array[int]
    crc32_ranges: array[int]


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
    """Move rows of tensors from the source files into the unfinished target files.

    Args:
        plan: the plan of all transfers.
        pieces: the rows.
        store: reads the source files.
        writer: writes the target files.
        checksums: compute CRC-32C sums of the written bytes.
        crcs: compute CRC-32 sums of the written bytes.
        in_order: write each file from its first byte to its last, if the pieces follow its order.
        check_cancelled: called before each band; raises if the run is cancelled.

    Returns:
        the bytes of contents read and written, and the ranges if `checksums` or `crcs`.

    Raises:
        SourceError: a source file ends early or cannot be read.
        TargetError, BudgetError: a target file cannot be written.
    """
    bytes_written = 0
    crc32c_sums, crc32_sums = _RangeSums(crc32c), _RangeSums(crc32)
    sums = [summing for summing, is_requested in ((crc32c_sums, checksums), (crc32_sums, crcs)) if is_requested]
    reader = BandReader(plan.transfers, [file.path for file in plan.source.files], store, plan.band_bytes)
    current = -1
    targets: list[list[tuple[int, Runs]]] = []
    in_order = in_order or plan.coding is not None or plan.source.coding is not None  # chunks are coded in order
    for number, target, first, elements in reader.read(pieces, in_order=in_order, check=check_cancelled):
        transfer = plan.transfers[number]
        if number != current:
            targets = [[(at.file, at.runs) for at in extents] for extents in transfer.writes]
            current = number
        content = cast(elements, transfer.dtype, transfer.target_dtype)
        begin = first * transfer.target_dtype.itemsize
        for file, runs in targets[target]:
            bytes_written += len(content)
            if len(runs) == 1:
                writer.write_at(file, runs[0][0] + begin, content)
                continue
            for offset, start, stop in ranges(runs, begin, len(content)):
                writer.write_at(file, offset, content[start:stop])
        if targets[target]:
            for summing in sums:
                summing.add(number, target, targets[target][0][1], begin, content)
    return Moved(round(reader.nbytes), bytes_written, crc32c_sums.ranges(), crc32_sums.ranges())


class _RangeSums:
    """Checksums of written ranges; adjacent writes extend a range."""

    def __init__(self, extend: Callable[[memoryview, int], int]) -> None:
        self._extend = extend
        self._complete = array("Q")
        self._last: dict[tuple[int, int], list[int]] = {}

    def add(self, transfer: int, target: int, runs: Runs, begin: int, content: memoryview) -> None:
        """Add bytes written at offset `begin` of a block; ranges never cross its runs."""
        if len(runs) > 1:
            for _, start, stop in ranges(runs, begin, len(content)):
                crc = self._extend(content[start:stop], 0)
                self._complete.extend((transfer, target, begin + start, stop - start, crc))
            return
        last = self._last.get((transfer, target))
        if last and last[0] + last[1] == begin:
            last[1:] = last[1] + len(content), self._extend(content, last[2])
        else:
            if last:
                self._complete.extend((transfer, target, *last))
            self._last[transfer, target] = [begin, len(content), self._extend(content, 0)]

    def ranges(self) -> array[int]:
        """Return the ranges so far, in the format of `Moved.crc32c_ranges`."""
        for key, last in self._last.items():
            self._complete.extend((*key, *last))
        self._last = {}
        return self._complete
