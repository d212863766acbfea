"""Moving one piece of a plan: read, gather, write. The hot loop and nothing else.

For each band every source block's part is read once into a buffer of this thread, columns are copied where they have
to be, and every target block's part is written once for each of its replicas. `preadv`, `pwrite` and numpy's copies
release the interpreter's lock, so threads run side by side.
"""

from __future__ import annotations

import itertools
import threading
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.checkpoint import ranges

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from reshard.bands import Columns, Segment
    from reshard.checkpoint import Runs
    from reshard.plan import Piece, Plan
    from reshard.store import Store


class Moved(NamedTuple):
    """How many bytes of contents a task read and wrote."""

    read: int = 0
    written: int = 0


class _Buffers(threading.local):
    """Three buffers a thread, kept from band to band: memory touched for the first time costs more than the copy."""

    _threads = itertools.count()

    def __init__(self) -> None:
        self.thread = next(self._threads)
        self._held = [memoryview(b"")] * 3

    def get(self, which: int, nbytes: int) -> memoryview:
        if len(self._held[which]) < nbytes:
            self._held[which] = memoryview(bytearray(nbytes))
        return self._held[which][:nbytes]


_buffers = _Buffers()


def move_pieces(plan: Plan, pieces: Sequence[Piece], directory: str, store: Store) -> Moved:
    """Move some rows of some tensors from the source files into the unfinished target files.

    Args:
        plan: what goes where.
        pieces: the rows.
        directory: where the target files are.
        store: reads and writes ranges of bytes.

    Returns:
        the bytes of contents read and written.

    Raises:
        SourceError: a source file ends early or cannot be read.
        TargetError, BudgetError: a target file cannot be written.
    """
    read = written = 0
    # Tensors alike, which follow each other in a model's layers, have the same segments.
    known: dict[tuple[int, int, int, int], list[Segment]] = {}
    for piece in pieces:
        mover = _Mover(plan, piece.move, directory, store)
        recipe, axis = mover.move.recipe, mover.move.axis
        key = (id(recipe), axis, piece.start, piece.stop)
        if key not in known:
            known[key] = _turned(list(recipe.segments(axis, piece.start, piece.stop)))
        for segment in known[key]:
            mover.segment(segment)
        read += mover.read
        written += mover.written
    return Moved(read, written)


def _turned(some: list[Any]) -> list[Any]:
    """Begin in another place in every thread: two that write to one file wait for each other."""
    start = len(some) * (_buffers.thread % 4) // 2 % len(some) if some else 0
    return some[start:] + some[:start]


class _Mover:
    """Moves the segments of one tensor."""

    def __init__(self, plan: Plan, number: int, directory: str, store: Store) -> None:
        self.move = move = plan.moves[number]
        self.band_bytes = plan.band_bytes
        self.store = store
        self.sources = [
            (plan.source.files[holder].path, plan.source.entry(holder, move.source_name).runs)
            for holder in move.holders
        ]
        self.targets = [
            [(f"{directory}/{plan.files[n].path}", plan.files[n].layout.places[move.name]) for n in numbers]
            for numbers in move.targets
        ]
        self.read = self.written = 0
        self.carrier: np.dtype[Any] | None = None

    def segment(self, segment: Segment) -> None:
        """Move a run of rows with equal columns, a band at a time."""
        columns = segment.columns
        itemsize, target_itemsize = self.move.dtype.itemsize, self.move.target_dtype.itemsize
        source_rows = [prod(shape) * itemsize for shape in columns.source_shapes]
        target_rows = [prod(shape) * target_itemsize for shape in columns.target_shapes]
        most_rows = max(1, self.band_bytes // (max(itemsize, target_itemsize) * columns.row_elements))
        places = _turned(list(range(len(columns.targets))))
        for start in range(segment.start, segment.stop, most_rows):
            rows = min(most_rows, segment.stop - start)
            done = start - segment.start
            given = self._gathered(segment, source_rows, rows, done)
            for place in places:
                content = self._content(columns, place, given, rows)
                if self.move.dtype is not self.move.target_dtype:
                    content = self._cast(content)
                begin = segment.target_offsets[place] * target_itemsize + done * target_rows[place]
                for path, runs in self.targets[columns.targets[place]]:
                    self._write(path, runs, begin, content)

    def _gathered(self, segment: Segment, source_rows: Sequence[int], rows: int, done: int) -> list[memoryview]:
        """Read the rows of every source block into one buffer; return each block's part of it."""
        buffer = _buffers.get(0, rows * sum(source_rows))
        found = []
        place = 0
        for source, offset, row in zip(segment.columns.sources, segment.source_offsets, source_rows, strict=True):
            part = buffer[place : place + rows * row]
            path, runs = self.sources[source]
            self._read(path, runs, offset * self.move.dtype.itemsize + done * row, part)
            found.append(part)
            place += rows * row
        return found

    def _content(self, columns: Columns, place: int, given: Sequence[memoryview], rows: int) -> memoryview:
        """Return the rows of one target block: a source block's as they are, or columns put together."""
        parts = columns.parts[place]
        if len(parts) == 1 and not parts[0].taken:
            return given[parts[0].read]
        import numpy as np  # a quarter of the start-up of a command; rows that stay whole need none of it

        carrier = self.carrier = self.carrier or self.move.dtype.carrier()
        shape = (rows, *columns.target_shapes[place])
        buffer = _buffers.get(1, prod(shape) * carrier.itemsize)
        gathered = np.frombuffer(buffer, carrier).reshape(shape)
        for part in parts:
            rows_given = np.frombuffer(given[part.read], carrier).reshape(rows, *columns.source_shapes[part.read])
            gathered[part.put] = rows_given[part.taken]
        return buffer

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
            self.store.write_at(path, runs[0][0] + begin, view)
            return
        for offset, start, stop in ranges(runs, begin, len(view)):
            self.store.write_at(path, offset, view[start:stop])
