"""Sinks around sinks: the files that a task writes, files that are written in order, and sums of ranges."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

from reshard.core.storage.base import Sink
from reshard.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class Sinks(dict[int, Sink]):
    """The files that a task writes, by file number; each is opened with its first byte.

    Attributes:
        ended: the numbers of the complete files.
    """

    def __init__(self, opened: Callable[[int], Sink]) -> None:
        super().__init__()
        self._opened = opened
        self.ended: set[int] = set()

    def __missing__(self, file: int) -> Sink:
        sink = self[file] = self._opened(file)
        return sink

    def open(self, files: Iterable[int]) -> None:
        """Open files even if no data will be written to them."""
        for file in files:
            self[file] = self._opened(file)

    def write_at(self, file: int, offset: int, data: memoryview | bytes) -> None:
        """Write bytes into a file; drop its sink once it is complete."""
        sink = self[file]
        sink.write_at(offset, data)
        if sink.ended:
            self.ended.add(file)
            del self[file]

    def finish(self, *, durable: bool) -> None:
        """Finish all files."""
        for file, sink in list(self.items()):
            sink.finish(durable=durable)
            self.ended.add(file)
            del self[file]

    def abort(self) -> None:
        """Abort all unfinished files."""
        for sink in self.values():
            sink.abort()


class Ordered:
    """A sink that writes a file in order; early pieces wait in memory.

    Args:
        begin: opens the sink to write to, when the first byte can be written.
        path: for messages.
        size: the size of the file; None if unknown.
        room: the total bytes that may be buffered over the whole file; read-only pieces do not count.
        ends: finish the file with its last byte, not when `finish` is called.
        skips: byte ranges that need not be written, joined and ascending; some of their bytes may be written.
    """

    def __init__(
        self,
        begin: Callable[[], Sink],
        path: str,
        size: int | None,
        *,
        room: int = 0,
        ends: bool = False,
        skips: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.ended = False
        self._skips = [*reversed(skips)]
        self._may_skip = bool(skips)
        self._begin, self._path, self._size, self._room, self._ends = begin, path, size, room, ends
        self._into: Sink | None = None
        self._position = 0
        self._waiting: dict[int, bytes | memoryview] = {}
        self._offsets: list[int] = []  # a heap

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        """Write the next bytes, or let them wait for their turn; read-only bytes are not copied."""
        if self._may_skip:
            self._skip(offset)
            if offset < self._position:  # all these bytes, or the first of them, are skipped
                data = memoryview(data)[self._position - offset :]
                offset = self._position
                if not data:
                    return
        if offset != self._position:
            if not memoryview(data).readonly:
                data = bytes(data)
                self._room -= len(data)
                assert self._room >= 0, "bytes arrive nearly in order"  # noqa: S101
            self._wait(offset, data)
            return
        self._append(data)
        while (piece := self._next_waiting()) is not None:
            self._append(piece)
        if self._ends and self._position == self._size:
            self.finish(durable=False)

    def _next_waiting(self) -> bytes | memoryview | None:
        """Return the waiting piece whose turn it is."""
        while self._may_skip and self._offsets:
            offset = self._offsets[0]
            self._skip(offset)
            if offset >= self._position:
                break
            heappop(self._offsets)
            rest = memoryview(self._waiting.pop(offset, b""))[self._position - offset :]
            if rest:  # the first bytes of the piece were skipped
                self._wait(self._position, rest)
        return self._waiting.pop(self._position, None)

    def _wait(self, offset: int, data: bytes | memoryview) -> None:
        self._waiting[offset] = data
        heappush(self._offsets, offset)

    def _skip(self, offset: int) -> None:
        """Go on to an offset if all bytes before it are skipped."""
        while self._skips and self._skips[-1][1] <= self._position:
            self._skips.pop()
        if self._skips and self._skips[-1][0] <= self._position < offset:
            self._position = min(offset, self._skips[-1][1])

    def _append(self, data: memoryview | bytes) -> None:
        if self._into is None:
            self._into = self._begin()
        self._into.write_at(self._position, data)
        self._position += len(data)

    def finish(self, *, durable: bool) -> None:
        """Finish the file.

        Raises:
            TargetError: bytes are missing, or it cannot be written.
        """
        if self._size is not None:
            self._skip(self._size)
        if self._waiting or self._size not in {None, self._position}:
            raise TargetError(
                f"{self._path} is incomplete",
                code="internal-error",
                facts=[f"expected {self._size} bytes, found {self._position} in order"],
                hint="this is an error of reshard; please report it",
            )
        self._into = self._into or self._begin()
        self._into.finish(durable=durable)
        self.ended = True

    def abort(self) -> None:
        """Abort the file."""
        if self._into is not None:
            self._into.abort()


class Summing:
    """A sink that writes a file in order and fills in the checksums of its ranges.

    Args:
        into: the sink to write to.
        sums: for each range, its offset, its size and the offsets of its checksum after it; ascending. Each checksum
            arrives as a piece of four zero bytes.
        crc: continues a checksum of four bytes with the next bytes.
    """

    def __init__(
        self,
        into: Sink,
        sums: Iterable[tuple[int, int, tuple[int, ...]]],
        crc: Callable[[memoryview | bytes, int], int],
    ) -> None:
        self._into, self._crc = into, crc
        self._sums = iter(sums)
        self._range = next(self._sums, None)
        self._value = 0
        self._computed: dict[int, bytes] = {}

    @property
    def ended(self) -> bool:
        """Return whether the file is complete."""
        return self._into.ended

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        """Write the next bytes of the file."""
        end = offset + len(data)
        while self._range and self._range[0] < end:
            begin, nbytes, offsets = self._range
            self._value = self._crc(data[max(begin - offset, 0) : begin + nbytes - offset], self._value)
            if begin + nbytes > end:
                break
            self._computed.update(dict.fromkeys(offsets, self._value.to_bytes(4, "little")))
            self._range, self._value = next(self._sums, None), 0
        self._into.write_at(offset, self._computed.pop(offset, data))

    def finish(self, *, durable: bool) -> None:
        """Finish the file."""
        self._into.finish(durable=durable)

    def abort(self) -> None:
        """Abort the file."""
        self._into.abort()
