r"""Records of the files of a target, in one log per run below `.reshard`.

A log consists of JSON lines; at URLs, to which nothing can be appended, of several small objects in sequence:

    {"reshard": 1, "made": "5c…", "sources": "0b…", "command": ["convert", …], "directory": "/home/me"}
                                                         first: digests of the provenance (`core.records.made`) and of
                                                         the last change of the source files; the command, and the
                                                         directory in which it was typed, if it was
    {"file": "rank_0/a.ckpt", "rank": 0, "digest": "9f…", "size": 4096, "header": "e1…"}
                                                         a file: the digest of its plan and sources, and of its header
                                                         (`headers.contents_digest`);
                                                         "replaces": an earlier run's file that has the name till then
    {"file": "rank_0/a.ckpt", "wrote": [[128, 2048, 305419896], …]}
                                                         ranges of the file: begin, bytes, CRC-32C
    {"file": "rank_0/a.ckpt", "upload": "2~Xb… 12.5b1f0c…"}
                                                         at S3: the identifier of its upload, and of its parts
    {"file": "rank_0/a.ckpt", "ready": [4096, 1790000000000000000]}
                                                         complete: size and time (at a URL, version); "boot": not
                                                         synced, and invalid after the machine was restarted
    {"file": "rank_0/a.ckpt", "forgotten": true}

All logs are read. They are numbered, and the newest record of a file counts. Records are always checked: a range is
valid if its bytes still have the sum, a finished file if it has the recorded size and time and, if `sources` differ,
contents as the sources now (`core.run.state.unchanged`). Readers, which do not write, also accept a copy: a file with
the recorded size, header and samples (`made.Made.change`). So after any kind of crash, the log may be behind the disk,
or the disk behind the log. Invalid lines are skipped.
"""

from __future__ import annotations

import json
import os
import re
from array import array
from contextlib import suppress
from dataclasses import dataclass, field, replace
from errno import ELOOP, ENOENT, ENOTDIR, ENXIO
from pathlib import Path
from shlex import join
from stat import S_ISREG
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.core.storage.base import PARTIAL
from reshard.core.storage.page_cache import boot_id
from reshard.core.storage.places import can
from reshard.core.storage.threads import map_ordered
from reshard.core.storage.urls.listings import listings
from reshard.core.storage.urls.remote import REQUESTS, remote_store
from reshard.errors import SourceError, bytes_text, names

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from reshard.core.storage.places import Place

DIRECTORY = ".reshard"
"""The directory of logs, below the target directory."""

UNREADABLE_LEDGER = "unreadable-ledger"
"""The code of errors about ledgers that exist and cannot be read."""

VERSION = 1
"""The version of the log format."""

UNSOUND = (ValueError, TypeError, KeyError, OverflowError, RecursionError)
"""Exceptions that a malformed record may raise when parsed."""

RANGES_A_LINE = 1 << 12


LONGEST_COMMAND = 1 << 14
"""The most characters of a command that is recorded; a line of a log is limited, and a message should be."""

_LONGEST_LINE = 1 << 20
_MOST_BYTES = 64 << 20  # of a log of few files; records beyond are not read, and their ranges written again
_BYTES_A_FILE = 64 << 10
_MOST_RANGES = 1 << 20  # of a file
_NAME = re.compile(r"([0-9]{8}-[0-9a-f]{8})(?:\.[0-9]{6})?\.jsonl")
_DIGEST = re.compile("[0-9a-f]{1,128}")
_WROTE = b'"wrote":'  # not in any JSON string, which has escaped quotes

State = tuple[int, int]
"""The state of a complete file: its size, and its time (at a URL, a number that stands for its version)."""

Range = tuple[int, int, int]
"""A range of a file: its begin, its bytes, and their CRC-32C."""


@dataclass(frozen=True, slots=True)
class Record:
    """The record of one target file.

    Attributes:
        digest: a digest of the plan and sources of the file; empty in a record that extends the one before it.
        size: the size in bytes.
        wrote: the ranges that were written: three numbers for each, as in `Range`.
        ready: the state of the complete file, once it was complete.
        replaces: the state of the file with the final name, if an earlier run made it and this one may replace it.
        boot: the identifier of the boot in which the file was completed, if it was not synced.
        sources: a digest of the source files when the file was begun, which changes if they are touched or copied
            (`changes_digest`); empty if unknown.
        rank: the rank of the file; None for a file that is not a checkpoint, such as the index of a set.
        made: the digest of the provenance of the run's files; empty if unknown.
        header: the digest of the header of the file; empty if unknown.
        upload: at S3, the identifier of the upload that makes it and of its parts; else empty.
        command: the words of the command that wrote it, without passwords; empty if it was another program.
        directory: the directory in which the command ran.
    """

    digest: str = ""
    size: int = 0
    wrote: Sequence[int] = field(default_factory=lambda: array("Q"))
    ready: State | None = None
    replaces: State | None = None
    boot: str = ""
    sources: str = ""
    rank: int | None = None
    made: str = ""
    header: str = ""
    upload: str = ""
    command: tuple[str, ...] = ()
    directory: str = ""

    @property
    def ranges(self) -> Iterator[Range]:
        """Return the ranges that were written."""
        return zip(self.wrote[::3], self.wrote[1::3], self.wrote[2::3], strict=True)

    @property
    def may_be_lost(self) -> bool:
        """Return whether the machine was restarted before the complete file was synced."""
        return self.boot not in {"", boot_id()}


def current_directory() -> str:
    """Return the current directory; empty if it was removed."""
    with suppress(OSError):
        return str(Path.cwd())
    return ""


class Unfinished(NamedTuple):
    """The progress of an unfinished target.

    Attributes:
        files: its files.
        written: how many bytes are written, those of complete files included.
        total: how many bytes the target will have.
        command: the words of the command; empty if it was another program.
        directory: the directory in which it ran.
    """

    files: tuple[str, ...]
    written: int
    total: int
    command: tuple[str, ...]
    directory: str

    @property
    def text(self) -> str:
        """Return how far it is, as a fact for messages."""
        return f"{bytes_text(self.written)} of {bytes_text(self.total)} are written"

    @property
    def hint(self) -> str:
        """Return how to resume it."""
        if not 0 < sum(map(len, self.command)) < LONGEST_COMMAND:
            return "the call that wrote it resumes it"
        elsewhere = f" in {self.directory}" if self.directory not in {"", current_directory()} else ""
        return f"resume it{elsewhere}: {join(['reshard', *self.command])}"


class Logs(NamedTuple):
    """The contents of the logs of a target.

    Attributes:
        records: the newest record of each requested file.
        logs: the files that each log mentions, by the name of the log, oldest first.
        made: the digest of the provenance in each log, by the name of the log.
        damaged: the names of logs that have lines, but none that is valid.
    """

    records: dict[str, Record]
    logs: dict[str, set[str]]
    made: dict[str, str]
    damaged: list[str]


def known(root: str, files: Collection[str] | None = None, *, directory: str = "", with_ranges: bool = True) -> Logs:
    """Read the logs of a target; records of files that were begun last come last.

    Args:
        root: the target.
        files: the requested files; None for all.
        directory: the directory of the logs, if not `.reshard` in the target.
        with_ranges: read the ranges that were written, too, which are nearly all of the bytes.

    Raises:
        SourceError: the storage of the target cannot be reached, or the logs cannot be read.
    """
    requested = None if files is None else frozenset(files)
    result = Logs({}, {}, {}, [])
    most = _MOST_BYTES + _BYTES_A_FILE * len(files or ())
    for name, parts in parts_of(directory or f"{root}/{DIRECTORY}").items():
        lines = lines_of(parts, most)
        _read_log(lines if with_ranges else (line for line in lines if _WROTE not in line), result, name, requested)
    for file in [file for file, record in result.records.items() if not record.digest]:
        del result.records[file]
    return result


def unfinished(root: str, *, directory: str = "") -> Unfinished | None:
    """Return how far the newest unfinished run of a target is; None if there is none.

    Args:
        root: the target.
        directory: as for `known`.

    Raises:
        SourceError: the storage of the target cannot be reached.
    """
    records = known(root, directory=directory, with_ranges=False).records
    if all(record.ready for record in records.values()):
        return None
    records = known(root, directory=directory).records
    begun = [record for record in records.values() if not record.ready]
    if not begun:  # it was finished in between
        return None
    newest = begun[-1]
    of_run = {file: record for file, record in records.items() if record.made == newest.made}
    written = sum(min(sum(record.wrote[1::3]), record.size) for record in of_run.values() if not record.ready)
    written += sum(record.ready[0] for record in of_run.values() if record.ready)
    total = sum(record.size for record in of_run.values())
    return Unfinished(tuple(of_run), written, total, newest.command, newest.directory)


def leftovers(root: Place) -> list[str]:
    """Return a fact on the unfinished files below a directory; [] without any."""
    files = root.files() if root.is_dir() else []
    partial = sorted(path.relative_to(str(root)).as_posix() for path in files if path.suffix == PARTIAL)
    if not partial:
        return []
    count = f"{len(partial)} unfinished file{'s' * (len(partial) != 1)}"
    return [f"{root} has {count} ({names(partial, most=1)}): a run was interrupted, or is not done"]


def parts_of(directory: str) -> dict[str, list[str]]:
    """Return the paths or URLs of the parts of each log, by log name, oldest first."""
    parts: dict[str, list[str]] = {}
    for name in listed(directory):
        if match := _NAME.fullmatch(name):
            parts.setdefault(match[1], []).append(f"{directory}/{name}")
    return parts


def listed(directory: str) -> list[str]:
    """Return the sorted names in a directory of logs; empty if it does not exist."""
    if not can(directory).appends:
        return sorted(url.removeprefix(f"{directory}/") for url in listings.now(directory))  # others write there, too
    try:
        return sorted(os.listdir(directory))  # noqa: PTH208 -- by text, as at URLs
    except OSError as error:
        if error.errno in {ENOENT, ENOTDIR, ELOOP}:
            return []
        raise unreadable_ledger(directory, error.strerror) from None


def unreadable_ledger(path: str, reason: object) -> SourceError:
    """Return the error for a ledger that exists and cannot be read."""
    return SourceError(
        f"cannot read the ledger {path}: {reason}", code="unreadable-ledger",
        hint=f"make it readable, or move {path.partition(DIRECTORY)[0]}{DIRECTORY} away to do without it",
    )  # fmt: skip


def lines_of(parts: Sequence[str], most: int) -> Iterator[bytes]:
    """Yield the lines of a log, up to `most` bytes; split lines that are too long."""
    if parts and not can(parts[0]).appends:
        for content in map_ordered(remote_store().contents, parts, REQUESTS):
            yield from (content or b"")[:most].splitlines()
        return
    for path in parts:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            if not S_ISREG(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                continue
            with os.fdopen(descriptor, "rb") as file:
                remaining = most
                while remaining > 0 and (line := file.readline(_LONGEST_LINE)):
                    remaining -= len(line)
                    yield line
        except OSError as error:
            if error.errno not in {ENOENT, ELOOP, ENXIO}:  # removed since, a link, a socket
                raise unreadable_ledger(path, error.strerror) from None


def _read_log(lines: Iterable[bytes], result: Logs, name: str, requested: frozenset[str] | None) -> None:
    """Add the contents of a log to `found`."""
    names, records = result.logs.setdefault(name, set()), result.records
    head: dict[str, Any] = {}
    text = b""
    for text in lines:
        with suppress(*UNSOUND):
            line = json.loads(text)
            if not isinstance(line, dict):
                continue
            if "reshard" in line:
                head = line
                result.made[name] = str(line.get("made", ""))
            file = line.get("file")
            if not isinstance(file, str):
                continue
            names.add(file)
            if requested is None or file in requested:
                record = _extended(records.get(file, Record()), line, head)
                if "digest" in line:
                    records.pop(file, None)
                records[file] = record
    if text and not (head or names):
        result.damaged.append(name)


def _extended(record: Record, line: dict[str, Any], head: dict[str, Any]) -> Record:
    """Return a record extended by a line; raise one of `UNSOUND` if malformed."""
    if "digest" in line:
        same = head["reshard"] == VERSION
        rank = line.get("rank")
        record = Record(
            str(line["digest"]) if same else "unknown",
            int(line["size"]) if same else 0,
            replaces=_state(line["replaces"]) if "replaces" in line else None,
            sources=str(head.get("sources", "")),
            rank=None if rank is None else _rank(rank),
            made=_digest(head.get("made", "")),
            header=_digest(line.get("header", "")),
            command=tuple(map(str, head.get("command", ()))),
            directory=str(head.get("directory", "")),
        )
    if line.get("forgotten"):
        return Record()
    if "wrote" in line:
        wrote = array("Q", [number for span in map(_range, line["wrote"]) for number in span])
        if len(record.wrote) + len(wrote) > 3 * _MOST_RANGES:
            raise ValueError("too many ranges")
        assert isinstance(record.wrote, array)  # noqa: S101 -- created here, and not shared yet
        record.wrote.extend(wrote)
    if "upload" in line:
        record = replace(record, upload=str(line["upload"]))
    if "ready" in line:
        record = replace(record, ready=_state(line["ready"]), boot=str(line.get("boot", "")))
    return record


def _range(value: Any) -> Range:
    begin, nbytes, crc = map(int, value)
    if not (0 <= begin < 1 << 63 and 0 < nbytes < 1 << 63 and 0 <= crc < 1 << 32):
        raise ValueError("not a range of a file and CRC-32C")
    return begin, nbytes, crc


def _state(value: Any) -> State:
    size, mtime_ns = value
    return int(size), int(mtime_ns)


def _rank(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise ValueError("not a rank")
    return value


def _digest(value: Any) -> str:
    if value and not _DIGEST.fullmatch(value):
        raise ValueError("not a digest")
    return str(value)
