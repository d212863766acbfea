"""Local files: read, write, name and link them.

Files are never mapped: page faults are slow, count as resident memory, and stall or kill the process on network
file systems.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
from contextlib import suppress
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from reshard.core.storage.base import (
    Capabilities,
    Status,
    is_of_a_run,
    read_error,
    reading,
    stem_of_unfinished,
    truncated,
    unfinished_path,
    unfinished_stem,
)
from reshard.core.storage.handles import OpenFiles
from reshard.core.storage.page_cache import (
    GLANCE_BYTES,
    Glances,
    drop_pages,
    prefetch_pages,
    start_writeback,
    sync_file,
)
from reshard.errors import BudgetError, GoneError, SourceError, TargetError, bytes_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from reshard.core.storage.base import Sink, Want

LOCAL = Capabilities(positioned=True, whole=False, appends=True, locks=True, requests=1, library_bytes=0)
"""The capabilities of local files."""

_FICLONE = 0x40049409  # linux/fs.h
_SCATTERED = 16  # the fewest requests for one file that are prefetched once one is not cached

WRITE_BYTES = 512 << 10
"""The largest single write; longer ones are split at multiples of this offset.

With large folios a long write at a multiple of its length takes several times as long (ext4 and XFS, Linux 6.16 on).
"""


_MOST_READ = 1 << 30  # of a single call; macOS refuses 2 GiB


class LocalStore:
    """The files of this machine. Safe to use from several threads."""

    def __init__(self, most_open: int | None = None) -> None:
        self.files = OpenFiles(most_open)
        self._glances = Glances()

    def status(self, path: str) -> Status:
        """Return the state of a file as it is now."""
        try:
            status = os.stat(path)
        except OSError as error:
            kind = GoneError if isinstance(error, FileNotFoundError) else SourceError
            raise read_error(kind, path, error) from None
        return Status.of(status)

    def size(self, path: str) -> int:
        """Return the file's current size in bytes, ignoring cached handles."""
        self.files.forget(path)  # a cached handle may be of a file that was replaced since
        with reading(SourceError, path), self.files.open(path, os.O_RDONLY) as fd:
            return os.fstat(fd).st_size

    def forget(self, path: str) -> None:
        """Close the cached handle of a file, which may be of a file that was replaced since."""
        self.files.forget(path)

    def read(self, wants: Sequence[Want]) -> None:
        """Fill buffers from files, one after the other."""
        for path, of_file in groupby(wants, itemgetter(0)):
            requests = [(offset, buffer) for _, offset, buffer in of_file]
            prefetches = len(requests) >= _SCATTERED
            with self.files.open(path, os.O_RDONLY) as fd:
                for number, (offset, buffer) in enumerate(requests):
                    done = self._glances.read(path, fd, offset, buffer)
                    if done < len(buffer) and prefetches:
                        self._glances.prefetch(path, fd, requests[number:])
                        prefetches = False
                    self._read(path, fd, offset, buffer, done)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from a file.

        Raises:
            SourceError: the file ends before the buffer is full, or cannot be read.
        """
        with self.files.open(path, os.O_RDONLY) as fd:
            self._read(path, fd, offset, buffer, self._glances.read(path, fd, offset, buffer))

    @staticmethod
    def _read(path: str, fd: int, offset: int, buffer: memoryview, done: int) -> None:
        """Fill a buffer of which `done` bytes are read."""
        while done < len(buffer):
            try:
                count = os.preadv(fd, [buffer[done : done + _MOST_READ]], offset + done)
            except OSError as error:
                raise read_error(SourceError, path, error, f"at byte {offset + done}") from error
            if not count:
                raise truncated(path, offset + done, offset + len(buffer))
            done += count

    def holds(self, path: str, pieces: Iterable[tuple[int, bytes]]) -> bool:
        """Return whether a file has certain bytes at certain offsets.

        Raises:
            SourceError: it cannot be read.
        """
        with self.files.open(path, os.O_RDONLY) as fd:
            try:
                for offset, piece in pieces:
                    glanced = bytearray(len(piece) if len(piece) <= GLANCE_BYTES else 0)
                    is_complete = self._glances.read(path, fd, offset, glanced) == len(piece)
                    if (glanced if is_complete else os.pread(fd, len(piece), offset)) != piece:
                        return False
            except OSError as error:
                raise read_error(SourceError, path, error) from error
        return True

    def drop_glances(self, paths: Collection[str]) -> None:
        """Evict the pages that scattered small reads cached, before files are read in order."""
        for path, first, last in self._glances.take_misses(paths):
            with suppress(OSError, SourceError), self.files.open(path, os.O_RDONLY) as fd:
                drop_pages(fd, first, last)

    @staticmethod
    def unfinished(path: str, digest: str = "") -> str:
        """Return the path that a file has until it is published; see `base.unfinished_path`."""
        return unfinished_path(path, digest)

    @staticmethod
    def all_unfinished(paths: Collection[str]) -> dict[str, list[str]]:
        """Return the unfinished files that runs left, by final path; their names have digits."""
        by_stem: dict[str, list[str]] = {}
        for directory in {os.path.dirname(path) for path in paths}:
            with suppress(OSError):  # it does not exist yet, or is writable but cannot be listed
                for path in (os.path.join(directory, name) for name in os.listdir(directory) if is_of_a_run(name)):
                    by_stem.setdefault(stem_of_unfinished(path), []).append(path)
        return {path: by_stem[stem] for path in paths if (stem := unfinished_stem(path)) in by_stem} if by_stem else {}

    def create(self, path: str, size: int | None) -> Sink:
        """Create an unfinished file, and allocate its space if its size is known.

        Existing contents stay: if a worker of a cluster is lost, this runs again while others write.

        Raises:
            BudgetError: the disk has no room; a new file is not left behind.
        """
        self.files.forget(path)  # a cached handle may be of a file that was removed since
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            fd = _open_own(path)
        except OSError as error:
            raise TargetError(f"cannot create {path}: {error.strerror}", code="cannot-write") from error
        old_size = os.fstat(fd).st_size
        try:
            if size is not None and old_size > size:
                os.ftruncate(fd, size)  # the remains of another run; the rest is overwritten
            if size:
                _allocate(fd, size)
        except OSError as error:
            if not old_size:
                with suppress(OSError):
                    os.unlink(path)
            raise write_error(path, error, size or 0) from error
        finally:
            os.close(fd)
        return _LocalSink(self, path, sized=size is not None)

    def sink(self, path: str, *, sized: bool) -> Sink:
        """Return a sink for an unfinished file that exists.

        Unless it is `sized`, the file is cut after the last byte written.
        """
        return _LocalSink(self, path, sized=sized)

    def prefetch(self, path: str, offset: int, nbytes: int) -> None:
        """Start to read a byte range into the page cache, if supported; do not wait."""
        with self.files.open(path, os.O_RDONLY) as fd:
            prefetch_pages(fd, offset, nbytes)

    def drop_cache(
        self, path: str, first: int = 0, last: int | None = None, *, written: bool = False, wait: bool = True
    ) -> None:
        """Evict a byte range of a file (default: all of it) from the page cache.

        Args:
            path: the file.
            first: the begin of the range, in bytes.
            last: its end, in bytes; None for the end of the file.
            written: it is an unfinished file; sync its data to disk first.
            wait: wait for the sync; if not, only start it, and evict the pages that are on disk already.
        """
        with self.files.open(path, os.O_RDWR if written else os.O_RDONLY) as fd:
            if written and wait:
                try:
                    getattr(os, "fdatasync", os.fsync)(fd)  # macOS has fsync alone
                except OSError as error:
                    raise write_error(path, error, 0) from error
            drop_pages(fd, first, last)

    def start_writeback(self, path: str) -> None:
        """Start to write an unfinished file's dirty pages to disk, without waiting.

        The disk then works during later writes; `sync` has less to wait for, and reports failures.
        """
        with self.files.open(path, os.O_RDWR) as fd:
            start_writeback(fd)

    def sync(self, path: str) -> None:
        """Sync an unfinished file to disk."""
        with self.files.open(path, os.O_RDWR) as fd:
            try:
                sync_file(fd)
            except OSError as error:
                raise write_error(path, error, 0) from error

    def sync_finished(self, path: str) -> None:
        """Sync a file that has its final name to disk, and its directory entry."""
        with self.files.open(path, os.O_RDONLY) as fd:
            try:
                sync_file(fd)
                _sync_directory(path)
            except OSError as error:
                raise write_error(path, error, 0) from error

    def publish(self, unfinished: str, path: str, *, durable: bool) -> None:
        """Rename an unfinished file to its final name; sync the directory too if `durable`."""
        try:
            self.files.forget(unfinished)  # closes it; only then may a network file system report lost bytes
            self.files.forget(path)
            os.replace(unfinished, path)
            with suppress(FileNotFoundError):
                os.unlink(unfinished)  # renaming one link of a file to another leaves both
            if durable:
                _sync_directory(path)
        except OSError as error:
            raise write_error(unfinished, error, 0, "rename") from error

    def link(self, original: str, unfinished: str) -> None:
        """Create an unfinished file that shares another's blocks, or else is a hard link to it."""
        self.discard(unfinished)
        try:
            os.makedirs(os.path.dirname(unfinished) or ".", exist_ok=True)
            if not _share_blocks(original, unfinished):
                os.link(os.path.realpath(original), unfinished)  # else a link would be linked, not its file
        except OSError as error:
            if error.errno == errno.EXDEV:
                raise TargetError(
                    f"cannot link {unfinished} to {original}, which is on another file system",
                    code="other-file-system",
                    hint="choose a target on that file system, or make a copy, without links",
                ) from error
            raise write_error(unfinished, error, 0, f"link {original} to") from error

    def remove(self, path: str) -> None:
        """Remove a finished file, if it exists."""
        self.files.forget(path)
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise TargetError(f"cannot remove {path}: {error.strerror}", code="cannot-remove") from error

    def discard(self, path: str) -> None:
        """Remove an unfinished file, if it exists; never raises."""
        self.files.forget(path)
        with suppress(OSError):  # a failure here must not hide why the file is discarded
            os.unlink(path)

    def close(self) -> None:
        """Close all files that are not in use."""
        self.files.close()

    def __reduce__(self) -> tuple[type[LocalStore], tuple[()]]:
        """Travel to another process as a fresh store: handles do not."""
        return LocalStore, ()


class _LocalSink:
    """An unfinished local file, written at any offset; see `Sink`."""

    __slots__ = ("_end", "_path", "_sized", "_store")
    ended = False

    def __init__(self, store: LocalStore, path: str, *, sized: bool) -> None:
        self._store, self._path, self._sized = store, path, sized
        self._end = 0

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        """Write bytes at an offset of the file."""
        end = offset + len(data)
        with self._store.files.open(self._path, os.O_RDWR) as fd:
            try:
                stop = offset - offset % WRITE_BYTES + WRITE_BYTES
                begin = offset + os.pwrite(fd, data if end <= stop else data[: stop - offset], offset)
                while begin < end:
                    stop = begin - begin % WRITE_BYTES + WRITE_BYTES
                    begin += os.pwrite(fd, data[begin - offset : stop - offset], begin)
            except OSError as error:
                raise write_error(self._path, error, len(data)) from error
        if not self._sized:
            self._end = max(self._end, end)

    def finish(self, *, durable: bool) -> None:
        """Cut the file after the last byte written if its size was unknown; sync if `durable`."""
        if not self._sized:
            with self._store.files.open(self._path, os.O_RDWR) as fd:
                try:
                    os.ftruncate(fd, self._end)  # a task that a lost worker began may have written more
                except OSError as error:
                    raise write_error(self._path, error, 0) from error
        if durable:
            self._store.sync(self._path)

    def abort(self) -> None:
        """Do nothing: the run discards the file, as it does with files of other tasks."""


def _open_own(path: str) -> int:
    """Open or create a file that has no other name.

    A run that was killed may have left a hard link to a finished file.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(path, flags, 0o666)
    if os.fstat(fd).st_nlink > 1:
        os.close(fd)
        os.unlink(path)
        fd = os.open(path, flags, 0o666)
    return fd


def _allocate(fd: int, size: int) -> None:
    """Allocate the space of a file; as fast as `ftruncate`, and fails early on a full disk.

    macOS and some network file systems cannot; the size is then set without allocating space.
    """
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if error.errno not in {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV}:
                raise
        else:
            return
    os.ftruncate(fd, size)


def _sync_directory(path: str) -> None:
    """Sync the directory entry of a file to disk."""
    directory = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync_file(directory)
    finally:
        os.close(directory)


def _share_blocks(original: str, path: str) -> bool:
    """Create a file that shares the blocks of another (FICLONE); False if not supported.

    It keeps the original's modification time, as a hard link does: an index written last must not be older.
    """
    with open(original, "rb") as source, open(path, "xb") as target:
        try:
            fcntl.ioctl(target.fileno(), _FICLONE, source.fileno())
        except OSError:
            os.unlink(path)
            return False
        status = os.fstat(source.fileno())
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    return True


def free_bytes(path: str) -> int:
    """Return the free space at the path of a file or directory, which need not exist yet."""
    while path and not os.path.isdir(path):
        path = os.path.dirname(path)
    status = os.statvfs(path or ".")
    return status.f_bavail * status.f_frsize


def allocated(path: str) -> int:
    """Return the number of bytes that removing an unfinished file would free."""
    try:
        status = os.lstat(path)
    except OSError:
        return 0
    return status.st_blocks * 512 if status.st_nlink == 1 else 0


def write_error(path: str, error: OSError, nbytes: int, action: str = "write") -> BudgetError | TargetError:
    """Return an error for a failed action on a file, such as a write of `nbytes` bytes."""
    if error.errno == errno.EFBIG:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        is_unlimited = limit == resource.RLIM_INFINITY
        return BudgetError(
            f"{path} would be larger than a file may be",
            code="file-too-large",
            facts=[] if is_unlimited else [f"this process may write at most {bytes_text(limit)} into a file"],
            hint="choose a target on another file system" if is_unlimited else "raise the limit: ulimit -f unlimited",
        )
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        free = ""
        if error.errno == errno.ENOSPC:
            with suppress(OSError):
                free = f"; {bytes_text(free_bytes(path))} are free"
        return BudgetError(
            f"no room for {bytes_text(nbytes)} more in {path}" if nbytes else f"no room for {path}",
            code="no-space",
            facts=[f"{error.strerror}{free}"],
            hint="free space, or choose another target",
        )
    return TargetError(f"cannot {action} {path}: {error.strerror}", code="cannot-write")


@lru_cache(maxsize=1)
def local_store() -> LocalStore:
    """Return this process's only store of local files; it bounds the number of open files."""
    return LocalStore()
