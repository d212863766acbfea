"""A bounded number of open local files.

A store takes paths, not handles, so that a plan of thousands of files runs under `ulimit -n 256`: the files used last
stay open, the others are closed and opened again when needed.
"""

from __future__ import annotations

import itertools
import os
import resource
import threading
from collections import OrderedDict
from contextlib import suppress
from stat import S_ISREG
from typing import TYPE_CHECKING

from reshard.core.storage.base import read_error
from reshard.errors import SourceError, TargetError

if TYPE_CHECKING:
    from reshard.errors import ReshardError

_SPARE_HANDLES = 64  # left for the interpreter, libraries and the scheduler
_MOST_HANDLES = 1024

NUMBERS = 4
"""The number of distinct thread numbers."""

_Key = tuple[str, int, int]  # identifies a handle: path, flags, and the number of the thread that reads through it


class _Thread(threading.local):
    """The number of the current thread, assigned round robin.

    Concurrent threads read through separate handles, since the kernel reads ahead of a handle's last read, and begin
    at different places.
    """

    _threads = itertools.count()

    def __init__(self) -> None:
        self.number = next(self._threads) % NUMBERS


thread = _Thread()


class OpenFiles:
    """The open files of a store, by path, flags and thread number. Safe to use from several threads.

    Args:
        most_open: the most files to keep open, in addition to files in use; by default as the system allows.
    """

    def __init__(self, most_open: int | None = None) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit == resource.RLIM_INFINITY:
            limit = _MOST_HANDLES + _SPARE_HANDLES
        self._most_open = most_open or max(8, min(limit - _SPARE_HANDLES, _MOST_HANDLES))
        self._lock = threading.Lock()
        self.handles: OrderedDict[_Key, _Handle] = OrderedDict()

    def open(self, path: str, flags: int) -> FileInUse:
        """Return a context manager that opens a file; its value is the descriptor."""
        return FileInUse(self, (path, flags, thread.number if flags == os.O_RDONLY else 0))

    def acquire(self, key: _Key) -> _Handle:
        """Return a handle, which stays open until it is released."""
        with self._lock:
            handle = self.handles.get(key)
            if handle is None:
                self._make_room()
                handle = self.handles[key] = _Handle(_open(*key[:2]))
            else:
                self.handles.move_to_end(key)
            handle.users += 1
            return handle

    def release(self, handle: _Handle) -> None:
        """Count a user less; the last user of a forgotten file closes it."""
        with self._lock:
            handle.users -= 1
            if handle.forgotten and not handle.users:
                os.close(handle.fd)

    def _make_room(self) -> None:
        excess = len(self.handles) - self._most_open + 1
        if excess <= 0:
            return
        unused = (key for key, handle in self.handles.items() if not handle.users)
        for key in list(itertools.islice(unused, excess)):
            os.close(self.handles.pop(key).fd)

    def forget(self, path: str) -> None:
        """Close a file, or mark it so that its last user closes it."""
        with self._lock:
            for key in ((path, os.O_RDWR, 0), *((path, os.O_RDONLY, number) for number in range(NUMBERS))):
                handle = self.handles.pop(key, None)
                if handle is not None:
                    handle.forgotten = True
                    if not handle.users:
                        os.close(handle.fd)

    def close(self) -> None:
        """Close all files that are not in use."""
        with self._lock:
            for key, handle in list(self.handles.items()):
                if not handle.users:
                    os.close(self.handles.pop(key).fd)


class FileInUse:
    """A context manager for a file in use. A generator would cost as much as a small read."""

    __slots__ = ("_files", "_handle", "_key")

    def __init__(self, files: OpenFiles, key: _Key) -> None:
        self._files, self._key = files, key

    def __enter__(self) -> int:
        self._handle = self._files.acquire(self._key)
        return self._handle.fd

    def __exit__(self, *_: object) -> None:
        self._files.release(self._handle)


class _Handle:
    __slots__ = ("fd", "forgotten", "users")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.users = 0
        self.forgotten = False


def open_regular(path: str | os.PathLike[str], error: type[ReshardError]) -> int:
    """Open a regular file for reading, through links, and return its descriptor.

    Raises:
        ReshardError: of class `error`: the file does not exist, cannot be read, or is not regular.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as failed:
        raise read_error(error, path, failed) from failed
    except ValueError as failed:  # a zero byte, or half of a surrogate pair, which no path may contain
        raise error(f"cannot read {str(path)!r}: {failed}", code="bad-name") from None
    if not S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise error(f"{path} is a directory, a pipe or a device; expected a regular file", code="not-a-file")
    return fd


def _open(path: str, flags: int) -> int:
    if flags == os.O_RDONLY:
        fd = open_regular(path, SourceError)
        with suppress(OSError, AttributeError):  # a hint to read further ahead, which not every system supports
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return fd
    try:
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise TargetError(f"cannot open {path}: {error.strerror}", code="cannot-write") from error
