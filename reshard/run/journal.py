"""What is known of a target's files, kept beside them: which are finished, which parts of others are written.

Below `.reshard` in the target directory, every target file has a journal of JSON lines (those of a zarr store have one
together, see `store_journal`):

    {"reshard": 1, "digest": "9f…", "size": 4096}        what makes the file: its plan, and the sources as they were;
                                                         "replaces": an earlier run's file that has the name till then;
                                                         "sources": when anything of their files last changed
    {"wrote": [[128, 2048, 305419896], …]}               ranges of the unfinished file: begin, bytes, CRC-32C
    {"ready": [4096, 1790000000000000000]}               complete and synced: size and time; it gets its name next;
                                                         "boot": not synced, and worth nothing once the machine was
                                                         started again, or on another

Nothing in it is believed without a look: a range counts if its bytes still have that sum, a finished file if its size
and time are those. So a journal may be behind the disk, or the disk behind the journal, after any kind of crash.

Locks are byte ranges of one lock file, one for each target file, so that runs for other ranks or stages may write into
the same directory at the same time. The kernel gives them up with the process, however it ends.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import struct
import time
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from stat import S_ISREG
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from reshard.errors import ReshardError, TargetError, names
from reshard.storage.base import PARTIAL
from reshard.storage.crc32c import crc32c
from reshard.storage.local import local_store, write_error
from reshard.storage.page_cache import boot_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


DIRECTORY = ".reshard"
"""Where journals are, below the target directory."""

VERSION = 1
"""Of what journals say, and how."""

UNSOUND = (ValueError, TypeError, KeyError, OverflowError, RecursionError)
"""What a line that lies makes its readers raise."""

_READ_BYTES = 4 << 20
_LONGEST_NAME = 200
_LONGEST_LINE = 1 << 20
_RANGES_A_LINE = 1 << 12
_MOST_RANGES = 1 << 20  # of a file; what is noted beyond is not known, and so written again
_MOST_BYTES = 64 * _MOST_RANGES  # of a journal
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of Linux: l_type, l_whence, l_start, l_len, l_pid

Range = tuple[int, int, int]
"""Where a range of a file begins, its bytes, and their CRC-32C."""


@dataclass(slots=True)
class Record:
    """What the journal of one target file says.

    Attributes:
        digest: of what makes the file; empty where there is no journal.
        size: its bytes.
        wrote: the ranges that were written.
        ready: size in bytes and time of the complete file, once there was one.
        replaces: those of the file under the final name, where an earlier run made it and this one may replace it.
        boot: of a complete file that was not synced: which start of the machine that was in.
        sources: what tells the source files, as they were when it was begun, from such as were touched or copied since
            (`changes_digest`); empty where that is not known.
    """

    digest: str = ""
    size: int = 0
    wrote: list[Range] = field(default_factory=list)
    ready: tuple[int, int] | None = None
    replaces: tuple[int, int] | None = None
    boot: str = ""
    sources: str = ""

    @property
    def may_be_lost(self) -> bool:
        """Return whether the machine was started again before the complete file was surely on the disk."""
        return self.boot not in {"", boot_id()}


class Journal:
    """The journals of the files of one target directory. May travel to other processes; locks do not.

    Args:
        root: the target directory, a local path.
    """

    early = False
    """Files have their names before all are complete."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._locks: int | None = None
        self._made = False

    def path(self, file: str) -> str:
        """Return where the journal of a target file is."""
        return f"{self.root}/{DIRECTORY}/{record_name(file)}.jsonl"

    def look(self, files: Sequence[str]) -> None:
        """Do nothing: every method looks for itself."""

    def read(self, file: str) -> Record:
        """Return what is known of a target file; what cannot be read is not known."""
        return record_of(lines_of(self.path(file)))

    def begin(
        self,
        file: str,
        digest: str,
        size: int,
        *,
        wrote: Iterable[Range] = (),
        replaces: tuple[int, int] | None = None,
        sources: str = "",
    ) -> None:
        """Begin the journal of a file anew, whatever was in its place.

        Args:
            file: the target file.
            digest: of what makes it.
            size: its bytes.
            wrote: ranges of it that are written already.
            replaces: size and time of the file under its final name, where that may be replaced.
            sources: as in `Record`.

        Raises:
            TargetError, BudgetError: it cannot be written.
        """
        write_anew(self.path(file), noted(Record(digest, size, list(wrote), replaces=replaces, sources=sources)))

    def wrote(self, file: str, ranges: Iterable[Range]) -> None:
        """Note ranges of an unfinished file that are written."""
        self._write(file, _wrote_lines(list(ranges)), os.O_APPEND)

    def ready(self, file: str, path: str, *, wrote: Iterable[Range] = (), sync: bool) -> None:
        """Note that a target file is complete: at `path`, from where it gets its name next."""
        try:
            status = os.stat(path)
        except OSError as error:
            raise TargetError(f"{path}: is gone since it was written: {error.strerror}") from error
        line = _ready_line((status.st_size, status.st_mtime_ns), "" if sync else boot_id())
        self._write(file, [*_wrote_lines(list(wrote)), line], os.O_APPEND, sync=sync)

    def forget(self, file: str) -> None:
        """Remove the journal of a file, if it is there."""
        for path in (self.path(file), self.path(file) + PARTIAL):
            with suppress(OSError):
                os.unlink(path)

    def found(self, file: str) -> tuple[int, int] | None:
        """Return size and time of what has a target file's final name; None where nothing has."""
        try:
            status = os.lstat(f"{self.root}/{file}")
        except OSError:
            return None
        return status.st_size, status.st_mtime_ns

    def verified(self, file: str, record: Record, size: int) -> list[Range]:
        """Return the ranges of an unfinished file, of that size in bytes, that still hold what was written."""
        path = f"{self.root}/{file}{PARTIAL}"
        good: list[Range] = []
        with suppress(ReshardError, OSError):
            status = os.lstat(path)
            # One with a second name is not written into but made anew (`LocalStore.create`), and its contents are gone.
            if not S_ISREG(status.st_mode) or status.st_size != size or status.st_nlink > 1:
                return []
            for begin, nbytes, crc in record.wrote:
                if 0 <= begin < begin + nbytes <= size and _sum(path, begin, nbytes) == crc:
                    good.append((begin, nbytes, crc))
        return good

    def is_begun(self, file: str) -> bool:
        """Return whether there is an unfinished file."""
        return os.path.lexists(f"{self.root}/{file}{PARTIAL}")

    def discard(self, file: str) -> None:
        """Remove an unfinished file, and the directories below the target's that are then empty."""
        discard(f"{self.root}/{file}", self.root)

    def refuse_link(self) -> None:
        """Refuse journals that are behind a link, which may lead out of the target: `TargetError`."""
        directory = f"{self.root}/{DIRECTORY}"
        if os.path.islink(directory):
            raise TargetError(f"{directory}: is a link; remove it, or choose another target directory")

    def lock(self, files: Sequence[str]) -> None:
        """Have target files to oneself until `unlock` or the end of the process.

        Raises:
            TargetError: another run writes one of them.
        """
        self._made = not os.path.isdir(self.root)
        self.refuse_link()
        for seconds in (0.0, 0.01, 0.1):  # a run that ends has every byte for a moment
            time.sleep(seconds)
            self._locks, taken = _locked(f"{self.root}/{DIRECTORY}/lock", files)
            if not taken:
                return
            self.unlock()
        raise TargetError(
            f"{self.root}: another run writes {names(taken, most=3)}; wait for its end, or choose another target"
        )

    def unlock(self) -> None:
        """Give up the locks, and remove what holds no journal and is in nobody's use."""
        if self._locks is None:
            return
        directory = f"{self.root}/{DIRECTORY}"
        with suppress(OSError):
            if os.listdir(directory) == ["lock"] and _take(self._locks, 0, 0):
                os.unlink(f"{directory}/lock")
                os.rmdir(directory)
                if self._made:
                    os.rmdir(self.root)
        os.close(self._locks)
        self._locks = None

    def _write(self, file: str, lines: Iterable[dict[str, Any]], flags: int, *, sync: bool = False) -> None:
        write_lines(self.path(file), lines, flags, sync=sync)

    def __reduce__(self) -> tuple[type[Journal], tuple[str]]:
        """Travel without the locks."""
        return type(self), (self.root,)


def discard(path: str, root: str) -> None:
    """Remove an unfinished file, and the directories below the target's that are then empty."""
    local_store().discard(local_store().unfinished(path))
    directory = os.path.dirname(path)
    while len(directory) > len(root):  # the target directory itself may have been there before
        with suppress(OSError):  # it holds something else
            os.rmdir(directory)
        directory = os.path.dirname(directory)


def record_name(file: str) -> str:
    """Return what the journal of a target file is called, but for its extension."""
    name = quote(file, safe=" ", errors="surrogateescape")
    return name if len(name) <= _LONGEST_NAME else sha256(name.encode()).hexdigest()


def record_of(lines: Iterable[bytes]) -> Record:
    """Return what lines of JSON say of a target file, up to the first that is not sound; see the top of the module."""
    record = Record()
    with suppress(OSError, *UNSOUND):
        for text in lines:
            record = taken(record, json.loads(text))
    return record


def taken(record: Record, line: Any) -> Record:
    """Return a record with what one more line says; raises one of `UNSOUND` where that is nothing."""
    if not isinstance(line, dict):
        raise TypeError("no object")
    if "reshard" in line:
        known = line["reshard"] == VERSION
        record = Record(str(line["digest"]) if known else "unknown", int(line.get("size", 0)))
        record.replaces = _size_and_time(line["replaces"]) if "replaces" in line else None
        record.sources = str(line.get("sources", ""))
    if "wrote" in line:
        record.wrote += map(_range, line["wrote"])
        if len(record.wrote) > _MOST_RANGES:
            raise ValueError("too many ranges")
    if "ready" in line:
        record.ready = _size_and_time(line["ready"])
        record.boot = str(line.get("boot", ""))
    return record


def noted(record: Record) -> list[dict[str, Any]]:
    """Return the lines that say what a record does."""
    first = {"reshard": VERSION, "digest": record.digest, "size": record.size}
    replaces = {"replaces": record.replaces} if record.replaces else {}
    sources = {"sources": record.sources} if record.sources else {}
    ready = [_ready_line(record.ready, record.boot)] if record.ready else []
    return [first | replaces | sources, *_wrote_lines(record.wrote), *ready]


def write_lines(path: str, lines: Iterable[dict[str, Any]], flags: int, *, sync: bool = False) -> None:
    """Write lines of JSON into a journal, which is opened with these flags too.

    Raises:
        TargetError, BudgetError: it cannot be written.
    """
    # What is appended begins a line, also where another ended in the middle of its own because the disk was full.
    content = b"\n" if flags & os.O_APPEND else b""
    content += b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)
    descriptor = _opened(path, os.O_WRONLY | os.O_CREAT | flags)
    try:
        done = os.write(descriptor, content)
        while done < len(content):
            done += os.write(descriptor, content[done:])
        if sync:
            os.fsync(descriptor)
    except OSError as error:
        raise write_error(path, error, len(content)) from error
    finally:
        os.close(descriptor)


def write_anew(path: str, lines: Iterable[dict[str, Any]], *, sync: bool = False) -> None:
    """Write a journal, in place of one that may be there; at no time there is none.

    That one is not written over: its inode may have other names (`cp -l`), or be no file at all.

    Raises:
        TargetError, BudgetError: it cannot be written.
    """
    beside = path + PARTIAL
    with suppress(OSError):
        os.unlink(beside)
    try:
        write_lines(beside, lines, os.O_EXCL, sync=sync)
        os.replace(beside, path)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(beside)
        if not isinstance(error, OSError):
            raise
        raise write_error(path, error, 0) from error


def _ready_line(state: tuple[int, int], boot: str) -> dict[str, Any]:
    return {"ready": state} | ({"boot": boot} if boot else {})


def _wrote_lines(ranges: Sequence[Range]) -> list[dict[str, Any]]:
    """Return lines that note ranges, none longer than is read."""
    return [{"wrote": ranges[first : first + _RANGES_A_LINE]} for first in range(0, len(ranges), _RANGES_A_LINE)]


def _range(value: Any) -> Range:
    begin, nbytes, crc = map(int, value)
    if not (0 <= begin < 1 << 63 and 0 < nbytes < 1 << 63 and 0 <= crc < 1 << 32):
        raise ValueError("no range of a file and CRC-32C")
    return begin, nbytes, crc


def _size_and_time(value: Any) -> tuple[int, int]:
    size, mtime_ns = value
    return int(size), int(mtime_ns)


def lines_of(path: str, most_bytes: int = 0) -> Iterator[bytes]:
    """Yield the lines of a journal; one that is longer than any that is written ends it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        left = max(_MOST_BYTES, most_bytes) if S_ISREG(os.fstat(descriptor).st_mode) else 0
        while left > 0 and (line := file.readline(_LONGEST_LINE)):
            left -= len(line)
            if not line.isspace():
                yield line


def _opened(path: str, flags: int, tries: int = 100) -> int:
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if os.path.islink(path):  # it may lead out of the target directory
            raise TargetError(f"{path}: is a link; remove it, or choose another target directory") from None
        # Another run has just removed the empty directory, before or while `makedirs` looked.
        if error.errno in {errno.ENOENT, errno.EEXIST} and tries > 1:
            return _opened(path, flags, tries - 1)
        raise write_error(path, error, 0) from error


def _locked(path: str, files: Sequence[str]) -> tuple[int, list[str]]:
    """Open the lock file and lock the bytes of some target files; return those that another run has, too.

    Another run may remove the lock file between the opening and the locking: then it is opened again.
    """
    while True:
        descriptor = _opened(path, os.O_RDWR | os.O_CREAT)
        try:
            taken = [file for file in files if not _take(descriptor, *_place(file))]
        except OSError as error:
            os.close(descriptor)
            raise TargetError(f"{path}: cannot be locked: {error.strerror}") from error
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


def _sum(path: str, begin: int, nbytes: int) -> int:
    buffer = memoryview(bytearray(min(nbytes, _READ_BYTES)))
    value = 0
    for start in range(0, nbytes, _READ_BYTES):
        part = buffer[: min(_READ_BYTES, nbytes - start)]
        local_store().read_into(path, begin + start, part)
        value = crc32c(part, value)
    return value
