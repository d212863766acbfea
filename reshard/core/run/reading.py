"""Read the files of a plan without writing them: any range of any file, computed when it is asked for.

A range is made of the bytes that a run would write there: literals, rows of tensors, checksums of them, and zeros. Rows
are moved by the engine, into the buffer in place of a file. So all that a plan does (rules, casts, adapters, averages,
dequantizing, selections) is in the bytes.

A stored CRC-32 is of a whole tensor: whoever reads one waits until that tensor has been read once. Compressed and
encrypted files have no bytes before they are written.
"""

from __future__ import annotations

import io
import threading
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, cast

from reshard.core.model.checkpoint import stored_files
from reshard.core.plan.partition import whole_files
from reshard.core.plan.plan import Piece, Task
from reshard.core.plan.uploads.copies import needed_pieces
from reshard.core.run.engine import move_pieces
from reshard.core.run.state.unchanged import check_source, check_sources
from reshard.core.storage.cipher import store_of
from reshard.core.storage.crc import crc32
from reshard.core.storage.places import any_store, can
from reshard.core.storage.threads import map_ordered
from reshard.errors import MissingNameError, UsageError
from reshard.spelling import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from reshard.core.model.entries import Crc, FileLayout
    from reshard.core.plan.plan import Plan
    from reshard.core.storage.sinks import Sinks

PART_BYTES = 8 << 20
"""The most bytes that one thread reads at once for a longer request."""

BUFFER_BYTES = 1 << 20
"""The bytes that an open file reads ahead."""

_KEPT_FILES = 64


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Where the tensor bytes of a file come from.

    Attributes:
        plan: the transfers into this file alone.
        begins: the offsets of their runs in the file, ascending.
        ends: the ends of these runs.
        transfers: for each run, the number of its transfer.
    """

    plan: Plan
    begins: Sequence[int]
    ends: Sequence[int]
    transfers: Sequence[int]

    @classmethod
    def of(cls, plan: Plan, number: int) -> _Rows:
        """Return the rows of a file of a plan."""
        part, _ = whole_files(plan, Task(files=(number,)))
        runs = sorted(
            (begin, begin + nbytes, transfer)
            for transfer, each in enumerate(part.transfers)
            for extents in each.writes
            for extent in extents
            for begin, nbytes in extent.runs
        )
        begins, ends, transfers = ([run[column] for run in runs] for column in range(3))
        return cls(part, begins, ends, transfers)

    def pieces(self, begin: int, end: int) -> list[Piece]:
        """Return the transfers that have bytes in a range of the file, with all of their rows."""
        first, last = bisect_right(self.ends, begin), bisect_left(self.begins, end)
        numbers = dict.fromkeys(self.transfers[first:last])
        return [Piece(number, 0, self.plan.transfers[number].rows) for number in numbers]


class _Into:
    """Takes what is written to a file, and keeps a range of it in a buffer; see `Sinks`."""

    def __init__(self, begin: int, buffer: memoryview) -> None:
        self._begin, self._buffer = begin, buffer

    def write_at(self, _file: int, offset: int, data: memoryview | bytes) -> None:
        """Copy the part of the data that is in the range."""
        first = max(offset, self._begin)
        last = min(offset + len(data), self._begin + len(self._buffer))
        if first < last:
            self._buffer[first - self._begin : last - self._begin] = data[first - offset : last - offset]


class TargetReader:
    """Reads the files of a plan; safe to use from several threads.

    Raises:
        UsageError: the files are compressed or encrypted.
        TargetError: a source file changed since it was opened.

    Attributes:
        sizes: the sizes of the files, by their paths below the target.
    """

    def __init__(self, plan: Plan) -> None:
        if plan.coding is not None or plan.cipher is not None:
            how = "compressed" if plan.cipher is None else "encrypted"
            raise UsageError(
                f"{how} files have no bytes before they are written", code="needs-run",
                hint="run the plan, or plan it without",
            )  # fmt: skip
        check_sources(plan, None)
        self._plan = plan
        self._numbers = {file.path: number for number, file in enumerate(plan.files)}
        self.sizes: Mapping[str, int] = {file.path: file.layout.size for file in plan.files}
        self._rows = lru_cache(maxsize=_KEPT_FILES)(partial(_Rows.of, plan))
        self._sums: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()

    def number(self, path: str) -> int:
        """Return the number of a file.

        Raises:
            MissingNameError: the plan has no such file.
        """
        if (number := self._numbers.get(path)) is None:
            raise MissingNameError(
                f"the plan writes no file {path!r:.200}", code="not-found", hint=did_you_mean(path, self._numbers)
            )
        return number

    def read(self, path: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Return bytes of a file; fewer at its end, as of a file on a disk.

        Raises:
            MissingNameError: the plan has no such file.
            UsageError: a negative offset or number of bytes.
            SourceError: a source file cannot be read.
        """
        self.number(path)
        size = self.sizes[path]
        if offset < 0 or (nbytes is not None and nbytes < 0):
            raise UsageError(f"cannot read {nbytes} bytes from {offset}", code="out-of-range")
        end = size if nbytes is None else min(offset + nbytes, size)
        content = bytearray(max(end - offset, 0))
        self.read_into(path, offset, memoryview(content))
        return bytes(content)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill a buffer with bytes of a file, all of which it has; long ones on several threads."""
        number = self.number(path)
        parts = [(offset + begin, buffer[begin : begin + PART_BYTES]) for begin in range(0, len(buffer), PART_BYTES)]
        workers = min(len(parts), self._plan.threads) if len(parts) > 1 else 0
        for _ in map_ordered(lambda part: self._fill(number, *part), parts, workers):
            pass

    def _fill(self, number: int, offset: int, buffer: memoryview) -> None:
        file = self._plan.files[number]
        if file.link is not None:
            any_store().read_into(file.link, offset, buffer)
            self._check(at for at, each in enumerate(self._plan.source.files) if each.path == file.link)
            return
        end = offset + len(buffer)
        rows = self._rows(number)
        pieces = rows.pieces(offset, end)
        if not (len(pieces) == 1 and _is_inside(rows, offset, end)):
            buffer[:] = bytes(len(buffer))  # between literals and tensors there may be gaps
        into = _Into(offset, buffer)
        for begin, content in _literals(file.layout, offset, end):
            into.write_at(number, begin, content)
        skips = [span for span in ((0, offset), (end, file.layout.size)) if span[0] < span[1]]
        needed = needed_pieces(rows.plan, pieces, {number: skips})
        if needed:
            move_pieces(rows.plan, needed, store_of(self._plan.source.coding), cast("Sinks", into))
            self._check(at.file for piece in needed for at in rows.plan.transfers[piece.transfer].route.reads)
        for crc in file.layout.crcs:
            for place in crc.places:
                if place < end and place + 4 > offset:
                    into.write_at(number, place, self._sum(number, crc).to_bytes(4, "little"))

    def _check(self, numbers: Iterable[int]) -> None:
        """Raise an error if a local source file that was read has changed; at a URL it would be a request each time."""
        files = self._plan.source.files
        for number in stored_files(files, numbers):
            if not can(files[number].path).has_latency:
                check_source(files[number])

    def _sum(self, number: int, crc: Crc) -> int:
        """Return the CRC-32 of a range of a file, which is read once for it."""
        key = number, crc.begin
        if key not in self._sums:
            buffer, value = memoryview(bytearray(min(PART_BYTES, crc.nbytes))), 0
            for begin in range(crc.begin, crc.begin + crc.nbytes, PART_BYTES):
                part = buffer[: min(PART_BYTES, crc.begin + crc.nbytes - begin)]
                self._fill(number, begin, part)
                value = crc32(part, value)
            with self._lock:
                self._sums[key] = value
        return self._sums[key]


def _is_inside(rows: _Rows, begin: int, end: int) -> bool:
    """Return whether a range is inside one run of tensor bytes."""
    at = bisect_right(rows.begins, begin) - 1
    return at >= 0 and end <= rows.ends[at]


def _literals(layout: FileLayout, begin: int, end: int) -> list[tuple[int, bytes]]:
    """Return the literals of a file that may have bytes in a range."""
    first = max(bisect_right(layout.literals, begin, key=lambda literal: literal[0]) - 1, 0)
    return [*layout.literals[first : bisect_left(layout.literals, end, key=lambda literal: literal[0])]]


class _RawFile(io.RawIOBase):
    """A file of a plan, without a buffer."""

    def __init__(self, reader: TargetReader, path: str) -> None:
        super().__init__()
        self.name = path
        self._reader, self._size, self._position = reader, reader.sizes[path], 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the offset of the next byte."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to an offset, and return it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"cannot seek to {base + offset}")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # of any buffer
        """Fill a buffer, or less of it at the end of the file."""
        view = memoryview(buffer).cast("B")
        count = max(min(len(view), self._size - self._position), 0)
        self._reader.read_into(self.name, self._position, view[:count])
        self._position += count
        return count


def opened(reader: TargetReader, path: str) -> io.BufferedReader:
    """Return a file of a plan as a binary file that can seek.

    Raises:
        MissingNameError: the plan has no such file.
    """
    reader.number(path)
    return io.BufferedReader(_RawFile(reader, path), BUFFER_BYTES)


@lru_cache(maxsize=4)
def reader_of(plan: Plan) -> TargetReader:
    """Return the reader of a plan, which is kept for the next call."""
    return TargetReader(plan)
