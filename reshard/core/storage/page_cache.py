"""The kernel's page cache: read from it without I/O, prefetch and evict pages, start writeback, sync.

If the system cannot tell which pages are cached, cannot evict them or cannot start writeback, as macOS, files are read
and written without this.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING

from reshard.core.storage.base import Around

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from reshard.core.storage.base import ReadStore, Want

GLANCE_BYTES = 64 << 10
"""The largest read that tries the page cache first."""

_MOST_MISSES = 1 << 14  # of about 150 bytes each; then all are forgotten
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)  # reads cached pages only; 0, an ordinary read, if not supported
_PREFETCHED = 256 << 10  # bytes of one request; of longer ones Linux may read only the first part
_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h


class ReadSpans(Around):
    """A store that records the span read of each file, to evict it afterwards."""

    def __init__(self, store: ReadStore) -> None:
        super().__init__(store)
        self._spans: dict[str, tuple[int, int]] = {}

    def read(self, wants: Sequence[Want]) -> None:
        """Fill buffers from files, all of them by one call of the store."""
        for path, offset, buffer in wants:
            first, last = self._spans.get(path, (offset, 0))
            self._spans[path] = min(first, offset), max(last, offset + len(buffer))
        self.inner.read(wants)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from a file."""
        self.read([(path, offset, buffer)])

    def drop(self) -> None:
        """Evict each file from the page cache, from the first byte read to the last."""
        for path, (first, last) in self._spans.items():
            self.inner.drop_cache(path, first, last)


class Glances:
    """Scattered small reads, with a record of page cache misses.

    If Linux meets single cached pages while it reads ahead, it continues page by page, which takes twice as long. So
    the pages that such reads cached are evicted before a file is read in order.

    Attributes:
        misses: path and piece number, in units of `GLANCE_BYTES`, of each miss.
    """

    def __init__(self) -> None:
        self.misses: set[tuple[str, int]] = set()
        self._asks = True  # until a file system cannot tell

    def read(self, path: str, fd: int, offset: int, buffer: memoryview | bytearray) -> int:
        """Read from the page cache, record a miss, and return the number of bytes read.

        Reads of more than `GLANCE_BYTES` do neither and return 0.
        """
        if not self._asks or not 0 < len(buffer) <= GLANCE_BYTES:
            return 0
        try:
            done = os.preadv(fd, [buffer], offset, _NOWAIT)
        except BlockingIOError:
            done = 0
        except (OSError, NotImplementedError):  # a file system or a C library that cannot tell
            self._asks = False
            return 0
        if done < len(buffer):
            self._record(path, offset)
        return done

    def _record(self, path: str, offset: int) -> None:
        if len(self.misses) >= _MOST_MISSES:
            self.misses.clear()
        self.misses.add((path, offset // GLANCE_BYTES))

    def prefetch(self, path: str, fd: int, requests: Sequence[tuple[int, memoryview]]) -> None:
        """Start to read the requests of at most `GLANCE_BYTES`: a disk serves many at once sooner than one by one."""
        for offset, buffer in requests:
            if len(buffer) <= GLANCE_BYTES:
                prefetch_pages(fd, offset, len(buffer))
                self._record(path, offset)

    def take_misses(self, paths: Collection[str]) -> Iterator[tuple[str, int, int]]:
        """Yield path, begin and end of each recorded miss in these files, and forget it.

        Pages cached before stay cached, except in the 192 KiB from the start of the missed piece.
        """
        for path, number in sorted(glance for glance in self.misses.copy() if glance[0] in paths):
            # A read may end in the next piece, and read ahead a little further.
            yield path, number * GLANCE_BYTES, (number + 3) * GLANCE_BYTES
            self.misses.discard((path, number))


def drop_pages(fd: int, first: int = 0, last: int | None = None) -> None:
    """Evict the clean pages of a byte range (default: the file) from the page cache, if supported."""
    if not hasattr(os, "posix_fadvise"):
        return
    page = resource.getpagesize()  # the kernel keeps pages that the range covers only in part
    first = first // page * page
    count = 0 if last is None else max(-(-last // page) * page - first, 1)  # 0 is all
    os.posix_fadvise(fd, first, count, os.POSIX_FADV_DONTNEED)


def prefetch_pages(fd: int, offset: int, nbytes: int) -> None:
    """Start to read a byte range into the page cache, if supported; do not wait."""
    with suppress(OSError, AttributeError):
        for begin in range(offset, offset + nbytes, _PREFETCHED):
            os.posix_fadvise(fd, begin, min(_PREFETCHED, offset + nbytes - begin), os.POSIX_FADV_WILLNEED)


def sync_file(fd: int) -> None:
    """Sync a file or a directory to disk, and return when its data survive a power failure."""
    if hasattr(fcntl, "F_FULLFSYNC"):  # macOS, where fsync leaves the data in the cache of the drive
        try:
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
        except OSError:  # not on every file system
            pass
        else:
            return
    os.fsync(fd)


def start_writeback(fd: int) -> None:
    """Start to write a file's dirty pages to disk, if supported; do not wait."""
    start = sync_file_range()
    if start is not None:
        start(fd, 0, 0, _SYNC_FILE_RANGE_WRITE)


@lru_cache(maxsize=1)
def sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Return the system call `sync_file_range`, which Python lacks; None if not supported."""
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call.argtypes = ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint
    return call


@lru_cache(maxsize=1)
def boot_id() -> str:
    """Return the kernel's identifier of this boot, or "" if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot:
            return boot.read().strip()
    except OSError:
        return ""


@lru_cache(maxsize=16)
def cache_of(directory: str) -> str:
    """Return an identifier of the page cache of a directory, or "" if unknown.

    It is made of boot and device. Processes with equal identifiers share that cache: one can sync the data that another
    wrote there.
    """
    try:
        return f"{boot_id()} {os.stat(directory).st_dev}" if boot_id() else ""
    except OSError:
        return ""
