"""Locks of target files: two runs never write the same file.

*Local* locks are byte ranges of one lock file below `.reshard`, one byte for each target file, so that runs for other
ranks or stages can write into the same directory at the same time. The kernel releases them at process exit. It
compares each new lock with all others, so that 32,000 take a minute: a run of very many files locks all bytes instead.

*At URLs*, which have no locks, each run writes a lock object, as restic does: its files, machine, process, and the time
of the last refresh. A run writes its own object before it looks for others, so that neither of two runs that begin at
once continues without having seen the other. The object is refreshed during the run. The lock of an ended process of
this machine is ignored. Whether a process of another machine has ended is unknown: if its lock is no longer refreshed,
it is reported as stale, and the user overrides it by removing the object.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import struct
import sys
import threading
import time
from contextlib import suppress
from hashlib import sha256
from stat import S_ISREG
from typing import TYPE_CHECKING, Any, Protocol

from reshard.core.records.logs import DIRECTORY, UNSOUND
from reshard.core.storage.local import write_error
from reshard.core.storage.page_cache import boot_id
from reshard.core.storage.places import as_place, can
from reshard.core.storage.urls.remote import remote_store
from reshard.errors import ReshardError, TargetError, names

if TYPE_CHECKING:
    from collections.abc import Sequence

_WAIT = "wait for its end, or choose another target"

REFRESH_SECONDS = 30.0
"""Interval in which a run at a URL refreshes its lock."""

STALE_SECONDS = 300.0
"""Age from which a lock that was not refreshed is called stale."""

_FLOCK = struct.Struct("hhqqi4x")  # struct flock of Linux: l_type, l_whence, l_start, l_len, l_pid
_LARGEST = 64 << 20
_MOST_LOCKS = 1 << 13
_LOCK_NAME = re.compile(r"lock-[^/]*\.json")


class Locks(Protocol):
    """Locks of the target files of a run."""

    def take(self, files: Sequence[str]) -> None:
        """Lock target files until `release` or process exit.

        Raises:
            TargetError: another run writes one of them.
        """

    def spare(self, files: Sequence[str]) -> list[str]:
        """Lock additional files; return the ones that no other run has locked."""

    def release(self) -> None:
        """Release all locks."""


def locks_at(root: str) -> Locks:
    """Return the kind of locks that fits a target, given its path or URL."""
    return LockFile(root) if can(root).locks else LockObjects(root)


class LockFile:
    """Locks on the bytes of one local file; pickling keeps only the path.

    Args:
        root: the target directory.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._descriptor: int | None = None
        self._is_new = False

    def take(self, files: Sequence[str]) -> None:
        """See `Locks.take`."""
        self._is_new = not os.path.isdir(self._root)
        refuse_link(self._root)
        for seconds in (0.0, 0.01, 0.1):  # a run that ends locks all bytes for a moment
            time.sleep(seconds)
            self._descriptor, locked = _locked(f"{self._root}/{DIRECTORY}/lock", files)
            if not locked:
                return
            self.release()
        raise TargetError(f"another run writes {names(locked, most=3)} of {self._root}", code="locked", hint=_WAIT)

    def spare(self, files: Sequence[str]) -> list[str]:
        """See `Locks.spare`."""
        descriptor = self._descriptor
        return [] if descriptor is None else [file for file in files if _take(descriptor, *_byte_of(file))]

    def release(self) -> None:
        """Release the locks; remove the directory if it has no log and is unused."""
        if self._descriptor is None:
            return
        directory = f"{self._root}/{DIRECTORY}"
        with suppress(OSError):
            status = os.fstat(self._descriptor)  # a lock file is empty; a file with contents is foreign
            empty = S_ISREG(status.st_mode) and not status.st_size
            if empty and os.listdir(directory) == ["lock"] and _take(self._descriptor, 0, 0):
                os.unlink(f"{directory}/lock")
                os.rmdir(directory)
                if self._is_new:
                    os.rmdir(self._root)
        os.close(self._descriptor)
        self._descriptor = None

    def __reduce__(self) -> tuple[type[LockFile], tuple[str]]:
        return type(self), (self._root,)


class LockObjects:
    """Locks that are objects with time stamps.

    Args:
        root: the URL of the target.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._path = f"{root}/{DIRECTORY}/lock-{os.urandom(8).hex()}.json"
        self._files: list[str] = []
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, files: Sequence[str]) -> None:
        """See `Locks.take`."""
        self._files = list(files)
        self._write()
        try:
            self._refuse_others(frozenset(files))
        except BaseException:
            remote_store().discard(self._path)
            raise
        self._thread = threading.Thread(target=self._refresh, name="reshard-lock", daemon=True)
        self._thread.start()

    def spare(self, files: Sequence[str]) -> list[str]:
        """See `Locks.spare`."""
        self._files = [*self._files, *files]
        self._write()
        locked = {file for _, lock in self._other_locks() if not _has_ended(lock) for file in lock["files"]}
        return [file for file in files if file not in locked]

    def release(self) -> None:
        """Remove the object."""
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
            self._thread = None
            remote_store().discard(self._path)

    def _refuse_others(self, files: frozenset[str]) -> None:
        for path, lock in self._other_locks():
            if locked := sorted(files.intersection(lock["files"])):
                if not _has_ended(lock):
                    raise self._refused(path, lock, locked)
                remote_store().discard(path)

    def _other_locks(self) -> list[tuple[str, dict[str, Any]]]:
        """Return paths and contents of the locks of other runs; skip invalid ones."""
        directory = as_place(f"{self._root}/{DIRECTORY}")
        directory.refresh()
        locks = []
        for path in map(str, directory.files()):
            if _LOCK_NAME.fullmatch(path.removeprefix(f"{directory}/")) and path != self._path:
                with suppress(*UNSOUND):
                    lock = json.loads((remote_store().contents(path) or b"")[:_LARGEST])
                    lock = {key: type(_LOCK[key])(lock[key]) for key in _LOCK}
                    locks.append((path, lock | {"files": [file for file in lock["files"] if isinstance(file, str)]}))
        return locks

    def _refused(self, path: str, lock: dict[str, Any], files: list[str]) -> TargetError:
        seconds = max(time.time() - lock["time"], 0)
        owner = f"process {lock['process']} on {lock['host']!r:.80}"
        if seconds < STALE_SECONDS:
            return TargetError(
                f"another run writes {names(files, most=3)} of {self._root}", code="locked", facts=[owner], hint=_WAIT
            )
        return TargetError(
            f"another run wrote {names(files, most=3)} of {self._root}",
            code="stale-lock",
            facts=[f"{owner}, silent for {seconds / 60:.0f} minutes"],
            hint=f"choose another target; or, if that run has ended, remove its lock, {path}, and start again",
        )

    def _write(self) -> None:
        lock = {"time": time.time(), **_this_process(), "files": self._files}
        remote_store().put(self._path, json.dumps(lock, separators=(",", ":")).encode())

    def _refresh(self) -> None:
        while not self._ended.wait(REFRESH_SECONDS):
            with suppress(ReshardError):  # it may succeed the next time
                self._write()


_LOCK: dict[str, Any] = {"time": 0.0, "host": "", "machine": "", "process": 0, "began": 0, "files": []}


def _this_process() -> dict[str, Any]:
    return {
        "host": os.uname().nodename,
        "machine": _machine(),
        "process": os.getpid(),
        "began": _began(os.getpid()),
    }


def _machine() -> str:
    """Return an identifier of this boot and PID namespace."""
    container = ""
    with suppress(OSError):
        container = str(os.stat("/proc/self/ns/pid").st_ino)
    return f"{boot_id()} {container}"


def _began(process: int) -> int:
    """Return the start time of a process in clock ticks; 0 if it is gone or unknown."""
    with suppress(OSError, ValueError, IndexError), open(f"/proc/{process}/stat", "rb") as status:
        return int(status.read().rpartition(b")")[2].split()[19])
    return 0


def _has_ended(lock: dict[str, Any]) -> bool:
    """Return whether a lock is of a process of this machine that has ended."""
    mine = lock["machine"] == _machine() and boot_id() != ""
    return mine and lock["began"] != 0 and _began(lock["process"]) != lock["began"]


def refuse_link(root: str) -> None:
    """Raise `TargetError` if `.reshard` is a link, which may lead out of the target."""
    directory = f"{root}/{DIRECTORY}"
    if as_place(directory).is_symlink():
        raise TargetError(f"{directory} is a link", code="is-link", hint="choose another target, or move the link away")


def opened(path: str, flags: int, tries: int = 100) -> int:
    """Open a file below `.reshard`; refuse links.

    Raises:
        TargetError, BudgetError: the file is a link or cannot be opened.
    """
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if os.path.islink(path):  # it may point out of the target directory
            hint = "choose another target, or move the link away"
            raise TargetError(f"{path} is a link", code="is-link", hint=hint) from None
        # Another run removed the empty directory before or during `makedirs`.
        if error.errno in {errno.ENOENT, errno.EEXIST} and tries > 1:
            return opened(path, flags, tries - 1)
        raise write_error(path, error, 0) from error


def _locked(path: str, files: Sequence[str]) -> tuple[int, list[str]]:
    """Open and lock the lock file; return it, and files locked by another run.

    Another run may remove the lock file between opening and locking; then it is opened again.
    """
    while True:
        descriptor = opened(path, os.O_RDWR | os.O_CREAT)
        try:
            if len(files) > _MOST_LOCKS:
                locked = [] if _take(descriptor, 0, 0) else list(files)
            else:
                locked = [file for file in files if not _take(descriptor, *_byte_of(file))]
        except OSError as error:
            os.close(descriptor)
            raise TargetError(f"cannot lock {path}: {error.strerror}", code="cannot-lock") from error
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor, locked
        os.close(descriptor)


def _byte_of(file: str) -> tuple[int, int]:
    """Return the offset of the lock byte of a target file, and its length, 1."""
    return int.from_bytes(sha256(file.encode("utf-8", "surrogateescape")).digest()[:7], "little"), 1


def _take(descriptor: int, start: int, nbytes: int) -> bool:
    """Lock bytes of a lock file (0: to the end); return False if any is locked."""
    try:
        if sys.platform == "linux":  # locks of the open file, which also separate two runs of one process
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, nbytes, 0))
        else:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, nbytes, start)
    except (BlockingIOError, PermissionError):
        return False
    return True
