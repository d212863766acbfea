"""Execute transfers: read each band once and scatter it to all target blocks.

For each band, the part of every source block is read once into a buffer of this thread, and columns are gathered
(`BandReader`, with `buffers`). `move_pieces` writes the result into the target files, once for each replica; a
comparison (`verify.compare`) compares it. If requests have a high latency, as at URLs, several bands are read at once
(`places.in_batches`).
"""

from __future__ import annotations

from array import array
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from reshard.formats.entries import ranges, wants
from reshard.plan.bands import AHEAD
from reshard.run.buffers import buffers, cast
from reshard.storage.crc import crc32, crc32c
from reshard.storage.places import in_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from reshard.dtypes import DType
    from reshard.formats.entries import Extent, Runs
    from reshard.layout.block import Shape
    from reshard.layout.strided import Ahead
    from reshard.plan.plan import Piece, Plan, Transfer
    from reshard.run.buffers import Band
    from reshard.storage.base import ReadStore, Sinks, Want


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


class _StridedBlocks(NamedTuple):
    """The strided source blocks of a transfer, and the bytes of its rows."""

    sources: frozenset[int]
    nbytes: int


class BandReader:
    """Reads bands of transfers; for use by one thread.

    Attributes:
        nbytes: the number of bytes read.
    """

    def __init__(
        self,
        transfers: Sequence[Transfer] | Mapping[int, Transfer],
        paths: Sequence[str],
        store: ReadStore,
        band_bytes: int,
    ) -> None:
        """Prepare to read.

        Args:
            transfers: the transfers, by number.
            paths: the source files, by number.
            store: reads the source files.
            band_bytes: the most bytes of a tensor that are read at once.
        """
        self._transfers, self._paths, self._store, self._band_bytes = transfers, paths, store, band_bytes
        self._strided: dict[int, _StridedBlocks] = {}  # by transfer number
        self._token = object()  # data that is read ahead belongs to this reader alone
        self.nbytes = 0

    def read(
        self, pieces: Iterable[Piece], *, in_order: bool = False, check: Callable[[], object] = lambda: None
    ) -> Iterator[BandOutput]:
        """Read pieces of transfers, and yield the part of each target block.

        Args:
            pieces: the rows to read.
            in_order: read in the order of the target blocks; otherwise every thread starts at a different row.
            check: called before each band; raises if the work is cancelled.

        Raises:
            SourceError: a source file ends early or cannot be read.
        """
        for number, band in in_batches(self.bands(pieces, in_order=in_order)):
            check()
            self.gather(number, band)
            for write in band.writes:
                yield BandOutput(number, write.target, write.first, write.gathered())

    def bands(
        self, pieces: Iterable[Piece], *, in_order: bool = False
    ) -> Iterator[tuple[tuple[int, Band], ReadStore, list[Want]]]:
        """Yield the bands of pieces, each with its transfer number, store and read requests.

        Once the requests are complete, `gather` reads the strided blocks.
        """
        for piece in pieces:
            transfer = self._transfers[piece.transfer]
            sources = [(self._paths[at.file], at.runs) for at in transfer.reads]
            strided = frozenset(number for number, at in enumerate(transfer.reads) if at.is_apart)
            row = prod(transfer.recipe.shape[transfer.axis + 1 :]) * transfer.dtype.itemsize
            self._strided[piece.transfer] = _StridedBlocks(strided, (piece.stop - piece.start) * row)
            for band in buffers.bands(piece, transfer, self._band_bytes, in_order=in_order or bool(strided)):
                requests: list[Want] = []
                for source, begin, view in band.reads:
                    if source not in strided:
                        requests += wants(*sources[source], begin, view)
                    self.nbytes += len(view)
                yield (piece.transfer, band), self._store, requests

    def gather(self, number: int, band: Band) -> None:
        """Read the strided source blocks of a band, and fill blocks that are all zeros."""
        strided = self._strided[number]
        if strided.sources:
            transfer = self._transfers[number]
            reads = [read for read in band.reads if read.source in strided.sources]
            room = min(AHEAD * self._band_bytes, strided.nbytes)
            buffers.ahead.share((self._token, number, room, *(read.source for read in reads)), len(reads) or 1, room)
            for index, (source, begin, view) in enumerate(reads):
                shape = transfer.recipe.sources[source].shape
                at = transfer.reads[source]
                read_block(self._store, self._paths, at, shape, transfer.dtype, begin, view, buffers.ahead, index)


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
    import numpy as np  # seldom

    def read(offset: int, buffer: memoryview) -> None:
        store.read(wants(paths[extent.file], extent.runs, offset, buffer))

    out = np.frombuffer(view, dtype.carrier())
    ahead.read(index, read, shape, extent.strides, begin // dtype.itemsize, out)


class Moved(NamedTuple):
    """The amount and the ranges of contents that a task moved.

    Attributes:
        read, written: bytes of contents.
        wrote: five numbers for each range that was written: the transfer, the target block, the offset of the range in
            the contents of the block, its bytes and their CRC-32C. Empty if no sums are requested.
        crcs: the same, with CRC-32 sums.
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
    written = 0
    wrote, summed = _RangeSums(crc32c), _RangeSums(crc32)
    sums = [summing for summing, is_requested in ((wrote, checksums), (summed, crcs)) if is_requested]
    reader = BandReader(plan.transfers, [file.path for file in plan.source.files], store, plan.band_bytes)
    current = -1
    targets: list[list[tuple[int, Runs]]] = []
    in_order = in_order or plan.coding is not None  # whole chunks are compressed
    for number, target, first, elements in reader.read(pieces, in_order=in_order, check=check_cancelled):
        transfer = plan.transfers[number]
        if number != current:
            targets = [[(at.file, at.runs) for at in extents] for extents in transfer.writes]
            current = number
        content = cast(elements, transfer.dtype, transfer.target_dtype)
        begin = first * transfer.target_dtype.itemsize
        for file, runs in targets[target]:
            written += len(content)
            if len(runs) == 1:
                writer.write_at(file, runs[0][0] + begin, content)
                continue
            for offset, start, stop in ranges(runs, begin, len(content)):
                writer.write_at(file, offset, content[start:stop])
        if targets[target]:
            for summing in sums:
                summing.add(number, target, targets[target][0][1], begin, content)
    return Moved(reader.nbytes, written, wrote.ranges(), summed.ranges())


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
                self._complete.extend(
                    (transfer, target, begin + start, stop - start, self._extend(content[start:stop], 0))
                )
            return
        last = self._last.get((transfer, target))
        if last and last[0] + last[1] == begin:
            last[1:] = last[1] + len(content), self._extend(content, last[2])
        else:
            if last:
                self._complete.extend((transfer, target, *last))
            self._last[transfer, target] = [begin, len(content), self._extend(content, 0)]

    def ranges(self) -> array[int]:
        """Return the ranges so far, in the format of `Moved.wrote`."""
        for key, last in self._last.items():
            self._complete.extend((*key, *last))
        self._last = {}
        return self._complete
