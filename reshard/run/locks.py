"""Locks: two runs never write one file.

*Local*: byte ranges of one lock file below `.reshard`, one for each target file, so that runs for other ranks or stages
may write into the same directory at the same time. The kernel gives them up with the process, however it ends.

*At URLs*, where nothing can be locked, as restic does it: an object for each run that says which files it writes, on
which machine and in which process, and when that was last so. A run writes its own first and looks for others then, so
that of two that begin at once none goes on unless it has seen the other. The object is refreshed while the run goes on.
That of a process of this machine which has ended counts for nothing; of others nobody can know, so that one which is
not refreshed any more is reported, and is overridden by removing the object.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import struct
import threading
import time
from contextlib import suppress
from hashlib import sha256
from stat import S_ISREG
from typing import TYPE_CHECKING, Any, Protocol

from reshard.errors import ReshardError, TargetError, names
from reshard.source.records import DIRECTORY, UNSOUND
from reshard.storage.local import write_error
from reshard.storage.page_cache import boot_id
from reshard.storage.places import RemotePath, as_place, can
from reshard.storage.remote import forget_listings, remote_store

if TYPE_CHECKING:
    from collections.abc import Sequence

_WAIT = "wait for its end, or choose another target"

REFRESH_SECONDS = 30.0
"""How often a run at a URL says that it goes on."""

STALE_SECONDS = 300.0
"""After how long without that its lock is said to be stale."""

_FLOCK = struct.Struct("hhqqi4x")  # struct flock of Linux: l_type, l_whence, l_start, l_len, l_pid
_LARGEST = 64 << 20
_LOCK_NAME = re.compile(r"lock-[^/]*\.json")


class Locks(Protocol):
    """What keeps runs apart."""

    def take(self, files: Sequence[str]) -> None:
        """Have target files to oneself until `release` or the end of the process.

        Raises:
            TargetError: another run writes one of them.
        """

    def spare(self, files: Sequence[str]) -> list[str]:
        """Lock more files, and return those that no other run has."""

    def release(self) -> None:
        """Give them up."""


def locks_at(root: str) -> Locks:
    """Return the locks of a target, by its path or URL."""
    return LockFile(root) if can(root).locks else LockObjects(root)


class LockFile:
    """Locks on the bytes of one local file. They do not travel to other processes.

    Args:
        root: the target directory.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._descriptor: int | None = None
        self._made = False

    def take(self, files: Sequence[str]) -> None:
        """See `Locks.take`."""
        self._made = not os.path.isdir(self._root)
        refuse_link(self._root)
        for seconds in (0.0, 0.01, 0.1):  # a run that ends has every byte for a moment
            time.sleep(seconds)
            self._descriptor, taken = _locked(f"{self._root}/{DIRECTORY}/lock", files)
            if not taken:
                return
            self.release()
        raise TargetError(f"another run writes {names(taken, most=3)} of {self._root}", code="locked", hint=_WAIT)

    def spare(self, files: Sequence[str]) -> list[str]:
        """See `Locks.spare`."""
        descriptor = self._descriptor
        return [] if descriptor is None else [file for file in files if _take(descriptor, *_place(file))]

    def release(self) -> None:
        """Give up the locks, and remove what holds no log and is in nobody's use."""
        if self._descriptor is None:
            return
        directory = f"{self._root}/{DIRECTORY}"
        with suppress(OSError):
            status = os.fstat(self._descriptor)  # a lock file is empty; what has contents is another's
            empty = S_ISREG(status.st_mode) and not status.st_size
            if empty and os.listdir(directory) == ["lock"] and _take(self._descriptor, 0, 0):
                os.unlink(f"{directory}/lock")
                os.rmdir(directory)
                if self._made:
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
        self._own = f"{root}/{DIRECTORY}/lock-{os.urandom(8).hex()}.json"
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
            remote_store().discard(self._own)
            raise
        self._thread = threading.Thread(target=self._refresh, name="reshard-lock", daemon=True)
        self._thread.start()

    def spare(self, files: Sequence[str]) -> list[str]:
        """See `Locks.spare`."""
        self._files = [*self._files, *files]
        self._write()
        taken = {file for _, lock in self._others() if not _has_ended(lock) for file in lock["files"]}
        return [file for file in files if file not in taken]

    def release(self) -> None:
        """Remove the object."""
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
            self._thread = None
            remote_store().discard(self._own)

    def _refuse_others(self, files: frozenset[str]) -> None:
        for path, lock in self._others():
            if taken := sorted(files.intersection(lock["files"])):
                if not _has_ended(lock):
                    raise self._refused(path, lock, taken)
                remote_store().discard(path)

    def _others(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the locks of other runs by their places; what is not valid is nobody's."""
        forget_listings(self._root)
        directory = RemotePath(f"{self._root}/{DIRECTORY}")
        found = []
        for path in map(str, directory.files()):
            if _LOCK_NAME.fullmatch(path.removeprefix(f"{directory}/")) and path != self._own:
                with suppress(*UNSOUND):
                    lock = json.loads((remote_store().contents(path) or b"")[:_LARGEST])
                    lock = {key: type(_LOCK[key])(lock[key]) for key in _LOCK}
                    found.append((path, lock | {"files": [file for file in lock["files"] if isinstance(file, str)]}))
        return found

    def _refused(self, path: str, lock: dict[str, Any], taken: list[str]) -> TargetError:
        seconds = max(time.time() - lock["time"], 0)
        who = f"process {lock['process']} on {lock['host']!r:.80}"
        if seconds < STALE_SECONDS:
            return TargetError(
                f"another run writes {names(taken, most=3)} of {self._root}", code="locked", facts=[who], hint=_WAIT
            )
        return TargetError(
            f"another run wrote {names(taken, most=3)} of {self._root}",
            code="stale-lock",
            facts=[f"{who}, silent for {seconds / 60:.0f} minutes"],
            hint=f"if it has ended, remove its lock, {path}, and start again",
        )

    def _write(self) -> None:
        lock = {"time": time.time(), **_this_process(), "files": self._files}
        remote_store().put(self._own, json.dumps(lock, separators=(",", ":")).encode())

    def _refresh(self) -> None:
        while not self._ended.wait(REFRESH_SECONDS):
            with suppress(ReshardError):  # the next time, perhaps
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
    """Return what the processes that this one can see have in common: the start of the machine, and a container."""
    container = ""
    with suppress(OSError):
        container = str(os.stat("/proc/self/ns/pid").st_ino)
    return f"{boot_id()} {container}"


def _began(process: int) -> int:
    """Return when a process began, in the system's own count; 0 where there is no such process, or nobody knows."""
    with suppress(OSError, ValueError, IndexError), open(f"/proc/{process}/stat", "rb") as status:
        return int(status.read().rpartition(b")")[2].split()[19])
    return 0


def _has_ended(lock: dict[str, Any]) -> bool:
    """Return whether the run of a lock was one of this machine, and is no more."""
    mine = lock["machine"] == _machine() and boot_id() != ""
    return mine and lock["began"] != 0 and _began(lock["process"]) != lock["began"]


def refuse_link(root: str) -> None:
    """Refuse logs that are behind a link, which may lead out of the target: `TargetError`."""
    directory = f"{root}/{DIRECTORY}"
    if as_place(directory).is_symlink():
        raise TargetError(f"{directory} is a link", code="is-link", hint="remove it, or choose another target")


def opened(path: str, flags: int, tries: int = 100) -> int:
    """Open a file below `.reshard`, and no link.

    Raises:
        TargetError, BudgetError: it cannot be opened.
    """
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if os.path.islink(path):  # it may lead out of the target directory
            hint = "remove it, or choose another target"
            raise TargetError(f"{path} is a link", code="is-link", hint=hint) from None
        # Another run has just removed the empty directory, before or while `makedirs` looked.
        if error.errno in {errno.ENOENT, errno.EEXIST} and tries > 1:
            return opened(path, flags, tries - 1)
        raise write_error(path, error, 0) from error


def _locked(path: str, files: Sequence[str]) -> tuple[int, list[str]]:
    """Open the lock file and lock the bytes of some target files; return those that another run has, too.

    Another run may remove the lock file between the opening and the locking: then it is opened again.
    """
    while True:
        descriptor = opened(path, os.O_RDWR | os.O_CREAT)
        try:
            taken = [file for file in files if not _take(descriptor, *_place(file))]
        except OSError as error:
            os.close(descriptor)
            raise TargetError(f"cannot lock {path}: {error.strerror}", code="cannot-lock") from error
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor, taken
        os.close(descriptor)


def _place(file: str) -> tuple[int, int]:
    """Return the byte of the lock file that stands for a target file."""
    return int.from_bytes(sha256(file.encode("utf-8", "surrogateescape")).digest()[:7], "little"), 1


def _take(descriptor: int, start: int, nbytes: int) -> bool:
    """Lock bytes of a lock file (0: all from there on); False where another run has some of them."""
    try:
        if hasattr(fcntl, "F_OFD_SETLK"):  # Linux: locks of the open file, which also part two runs of one process
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, nbytes, 0))
        else:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, nbytes, start)
    except (BlockingIOError, PermissionError):
        return False
    return True
