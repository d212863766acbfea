"""What the kernel's page cache has of files: asking for it, leaving nothing in it, having it written.

Where the system cannot say what the cache has, or has no call that begins to write, files are read and written all the
same.
"""

from __future__ import annotations

import ctypes
import os
import resource
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

GLANCE_BYTES = 64 << 10
"""The most bytes of a read that the page cache is asked for first."""

_MOST_NOTED = 1 << 14  # in some 150 bytes each; then all are forgotten
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)  # only what the page cache has; 0 where the system cannot say, and reads all
_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h


class Glances:
    """Little reads here and there: where the page cache had nothing of a file is noted.

    When Linux, reading ahead, comes upon single pages that it has, it reads page by page from there on, which takes
    twice as long. So what such reads brought into the cache is given up before a file is read in order.

    Attributes:
        noted: paths, and which piece of `GLANCE_BYTES`.
    """

    def __init__(self) -> None:
        self.noted: set[tuple[str, int]] = set()
        self._asks = True  # until a file system cannot tell

    def read(self, path: str, fd: int, offset: int, buffer: memoryview | bytearray) -> int:
        """Read a little if the page cache has it, else note where it is; return how many bytes were read.

        Long reads are none of it: nothing is read, and nothing noted.
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
            if len(self.noted) >= _MOST_NOTED:
                self.noted.clear()
            self.noted.add((path, offset // GLANCE_BYTES))
        return done

    def taken(self, paths: Collection[str]) -> Iterator[tuple[str, int, int]]:
        """Yield path, begin and end of what is noted of some files, and forget it.

        What the cache had before stays in it, but for up to 128 KB around what it did not have.
        """
        for path, number in sorted(glance for glance in self.noted.copy() if glance[0] in paths):
            # A read may end in the next piece, and have brought a little more.
            yield path, number * GLANCE_BYTES, (number + 3) * GLANCE_BYTES
            self.noted.discard((path, number))


def drop_pages(fd: int, first: int = 0, last: int | None = None) -> None:
    """Leave nothing in the page cache of a file, or of its bytes from `first` to `last`, but what is to be written."""
    page = resource.getpagesize()  # the kernel leaves one that is named only in part
    first = first // page * page
    count = 0 if last is None else max(-(-last // page) * page - first, 1)  # 0 is all
    os.posix_fadvise(fd, first, count, os.POSIX_FADV_DONTNEED)


def start_writeback(fd: int) -> None:
    """Have what is written of a file go to the disk, without waiting; where the system has no such call, do nothing."""
    start = sync_file_range()
    if start is not None:
        start(fd, 0, 0, _SYNC_FILE_RANGE_WRITE)


@lru_cache(maxsize=1)
def sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Return the system call of that name, which Python has not; None where there is none."""
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call.argtypes = ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint
    return call


@lru_cache(maxsize=1)
def boot_id() -> str:
    """Return what distinguishes this start of the kernel from all others; empty where that is not known."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot:
            return boot.read().strip()
    except OSError:
        return ""


@lru_cache(maxsize=16)
def cache_of(directory: str) -> str:
    """Return what two processes have in common whose files in a directory are one: the kernel and the mounted device.

    What one of them wrote there, the other one can have put on the disk. Empty where that is not known.
    """
    try:
        return f"{boot_id()} {os.stat(directory).st_dev}" if boot_id() else ""
    except OSError:
        return ""
