"""Moving pieces of a plan: what is read of a band goes into the target files, once for each replica."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

from reshard.formats.entries import ranges
from reshard.run.reader import BandReader, cast
from reshard.storage.crc32c import crc32c

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reshard.formats.entries import Runs
    from reshard.plan.plan import Piece, Plan
    from reshard.storage.base import ReadStore, Sinks


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


def move_pieces(
    plan: Plan,
    pieces: Sequence[Piece],
    directory: str,
    store: ReadStore,
    writer: Sinks,
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
        store: reads the source files.
        writer: writes the target files.
        checksums: sum up what is written.
        in_order: write each file from its first byte to its last, as far as the pieces follow its order.
        go_on: called before each band; raises where the run is given up.

    Returns:
        the bytes of contents read and written, and the ranges where `checksums`.

    Raises:
        SourceError: a source file ends early or cannot be read.
        TargetError, BudgetError: a target file cannot be written.
    """
    written = 0
    sums = _Sums() if checksums else None
    reader = BandReader(plan.moves, [file.path for file in plan.source.files], store, plan.band_bytes)
    current = -1
    targets: list[list[tuple[str, Runs]]] = []
    in_order = in_order or plan.coding is not None  # whole chunks are compressed
    for number, target, first, given in reader.read(pieces, in_order=in_order, check=go_on):
        move = plan.moves[number]
        if number != current:
            targets = [
                [(f"{directory}/{plan.files[file].path}", runs) for file, runs in extents] for extents in move.writes
            ]
            current = number
        content = cast(given, move.dtype, move.target_dtype)
        begin = first * move.target_dtype.itemsize
        for path, runs in targets[target]:
            written += len(content)
            if len(runs) == 1:
                writer.write_at(path, runs[0][0] + begin, content)
                continue
            for offset, start, stop in ranges(runs, begin, len(content)):
                writer.write_at(path, offset, content[start:stop])
        if sums and targets[target]:
            sums.add(number, target, targets[target][0][1], begin, content)
    return Moved(reader.nbytes, written, sums.ranges() if sums else array("Q"))


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
