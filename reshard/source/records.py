r"""What is known of a target's files: the logs below `.reshard` in it, one for each run, all of which are read.

A log is JSON lines; where nothing can be appended, at URLs, it is several small objects, one after the other:

    {"reshard": 1, "made": "5c…", "sources": "0b…"}      first: of what the run makes its files (`source.made`), and
                                                         when anything of the source files last changed
    {"file": "rank_0/a.ckpt", "rank": 0, "digest": "9f…", "size": 4096, "header": "e1…"}
                                                         what makes the file: its plan, and the sources as they were;
                                                         the digest of its header (`headers.contents_digest`);
                                                         "link": the file whose contents it has;
                                                         "replaces": an earlier run's file that has the name till then
    {"file": "rank_0/a.ckpt", "wrote": [[128, 2048, 305419896], …]}
                                                         ranges of the file: begin, bytes, CRC-32C
    {"file": "rank_0/a.ckpt", "ready": [4096, 1790000000000000000]}
                                                         complete: size and time (at a URL, version); "boot": not
                                                         synced, and worth nothing once the machine was started again
    {"file": "rank_0/a.ckpt", "forgotten": true}

Logs are numbered, and the newest record of a file counts. Nothing in them is believed without a look: a range counts if
its bytes still have that sum, a finished file if its size and time are those; to readers, who keep what they find, also
one whose size, header and samples are those (`made.Made.change`): a copy. So a log may be behind the disk, or the
disk behind the log, after any kind of crash. What is not valid is passed by.
"""

from __future__ import annotations

import json
import os
import re
from array import array
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from stat import S_ISREG
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.storage.page_cache import boot_id
from reshard.storage.places import RemotePath, can
from reshard.storage.remote import REQUESTS, remote_store
from reshard.storage.threads import map_threads

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

DIRECTORY = ".reshard"
"""Where logs are, below the target directory."""

VERSION = 1
"""Of what logs say, and how."""

UNSOUND = (ValueError, TypeError, KeyError, OverflowError, RecursionError)
"""What a line that lies makes its readers raise."""

RANGES_A_LINE = 1 << 12

DIGEST_BYTES = 16

_LONGEST_LINE = 1 << 20
_MOST_BYTES = 64 << 20  # of a log of few files; what is noted beyond is not known, and so written again
_BYTES_A_FILE = 64 << 10
_MOST_RANGES = 1 << 20  # of a file
_NAME = re.compile(r"([0-9]{8}-[0-9a-f]{8})(?:\.[0-9]{6})?\.jsonl")
_DIGEST = re.compile("[0-9a-f]{1,128}")
_WROTE = b'"wrote":'  # in no text of JSON, where quotes are escaped

State = tuple[int, int]
"""Of a complete file: its size, and its time, or what stands for its version at a URL."""

Range = tuple[int, int, int]
"""Where a range of a file begins, its bytes, and their CRC-32C."""


@dataclass(frozen=True, slots=True)
class Record:
    """What is known of one target file.

    Attributes:
        digest: of what makes the file; empty in a record that adds to the one before it.
        size: its bytes.
        wrote: the ranges that were written: three numbers for each, as in `Range`.
        ready: of the complete file, once there was one.
        replaces: of the file under the final name, where an earlier run made it and this one may replace it.
        boot: of a complete file that was not synced: which start of the machine that was in.
        sources: what distinguishes the source files, as they were when it was begun, from such as were touched or
            copied since (`changes_digest`); empty where that is not known.
        rank: whose it is; None of a file that is not a checkpoint, such as the index of a set.
        made: the digest of what the run makes its files of; empty where that is not known.
        header: the digest of what the file's header says; empty where that is not known.
        link: the file of the same target whose contents it has, where it was linked; else empty.
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
    link: str = ""

    @property
    def ranges(self) -> Iterator[Range]:
        """The ranges that were written."""
        return zip(self.wrote[::3], self.wrote[1::3], self.wrote[2::3], strict=True)

    @property
    def may_be_lost(self) -> bool:
        """Return whether the machine was started again before the complete file was surely on the disk."""
        return self.boot not in {"", boot_id()}


def digest(content: object) -> str:
    """Return the digest of bytes, or of what JSON can say.

    >>> digest([1, "w"]) == digest((1, "w")), len(digest(b""))
    (True, 32)
    """
    if not isinstance(content, bytes):
        content = json.dumps(content, separators=(",", ":")).encode()
    return blake2b(content, digest_size=DIGEST_BYTES).hexdigest()


class Known(NamedTuple):
    """What the logs of a target say.

    Attributes:
        records: of each file that was asked for, and that is known, the newest.
        logs: the logs by their names, oldest first, and the files that each mentions.
        made: the logs by their names, and of what each says that its files are made.
    """

    records: dict[str, Record]
    logs: dict[str, set[str]]
    made: dict[str, str]


def known(root: str, files: Collection[str] | None = None, *, directory: str = "", with_ranges: bool = True) -> Known:
    """Return what the logs of a target say of some files, or of all; those begun last come last.

    Args:
        root: the target.
        files: those that are asked for; None for all.
        directory: where the logs are, if they are not below `.reshard` in the target.
        with_ranges: return the ranges that were written, too, which are nearly all that there is to read.

    Raises:
        SourceError: the target's storage cannot be reached.
    """
    wanted = None if files is None else frozenset(files)
    found = Known({}, {}, {})
    most = _MOST_BYTES + _BYTES_A_FILE * len(files or ())
    for name, parts in parts_of(directory or f"{root}/{DIRECTORY}").items():
        lines = lines_of(parts, most)
        _take(lines if with_ranges else (line for line in lines if _WROTE not in line), found, name, wanted)
    for file in [file for file, record in found.records.items() if not record.digest]:
        del found.records[file]
    return found


def parts_of(directory: str) -> dict[str, list[str]]:
    """Return the paths or URLs of which each log in a directory consists, by the logs' names, oldest first."""
    found: dict[str, list[str]] = {}
    for name in listed(directory):
        if match := _NAME.fullmatch(name):
            found.setdefault(match[1], []).append(f"{directory}/{name}")
    return found


def listed(directory: str) -> list[str]:
    """Return the names of what is in a directory for logs, sorted; none where it is not there."""
    if not can(directory).appends:
        return sorted(str(path.relative_to(RemotePath(directory))) for path in RemotePath(directory).files())
    with suppress(OSError):
        return sorted(os.listdir(directory))  # noqa: PTH208 -- by text, as at URLs
    return []


def lines_of(parts: Sequence[str], most: int) -> Iterator[bytes]:
    """Yield the lines of a log, up to so many bytes; no line that is longer than any that is written is whole."""
    if parts and not can(parts[0]).appends:
        for content in map_threads(remote_store().contents, parts, REQUESTS):
            yield from (content or b"")[:most].splitlines()
        return
    for path in parts:
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            if not S_ISREG(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                continue
            with os.fdopen(descriptor, "rb") as file:
                left = most
                while left > 0 and (line := file.readline(_LONGEST_LINE)):
                    left -= len(line)
                    yield line


def _take(lines: Iterable[bytes], found: Known, name: str, wanted: frozenset[str] | None) -> None:
    """Add what a log says."""
    names, records = found.logs.setdefault(name, set()), found.records
    head: dict[str, Any] = {}
    for text in lines:
        with suppress(*UNSOUND):
            line = json.loads(text)
            if not isinstance(line, dict):
                continue
            if "reshard" in line:
                head = line
                found.made[name] = str(line.get("made", ""))
            file = line.get("file")
            if not isinstance(file, str):
                continue
            names.add(file)
            if wanted is None or file in wanted:
                record = _taken(records.get(file, Record()), line, head)
                if "digest" in line:
                    records.pop(file, None)
                records[file] = record


def _taken(record: Record, line: dict[str, Any], head: dict[str, Any]) -> Record:
    """Return a record with what one more line says; raises one of `UNSOUND` where that is nothing."""
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
            link=str(line.get("link", "")),
        )
    if line.get("forgotten"):
        return Record()
    if "wrote" in line:
        wrote = array("Q", [number for some in map(_range, line["wrote"]) for number in some])
        if len(record.wrote) + len(wrote) > 3 * _MOST_RANGES:
            raise ValueError("too many ranges")
        assert isinstance(record.wrote, array)  # noqa: S101 -- it was made here, and nobody has it yet
        record.wrote.extend(wrote)
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
