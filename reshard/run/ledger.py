"""The ledger of a target: what runs know of its files, and which run may write which of them.

`hold` takes files, `load` says what is known of them, `add` notes more, `forget` takes it back. The logs are as
`source.records` says; a run writes one of its own, once it has something to say, and removes those of earlier runs that
tell of no file that its own does not. So no log is ever appended to by two, or through another name of it (`cp -l`).

Only the process that runs a plan writes its log: tasks tell by their receipts what they did.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from reshard.errors import ReshardError, TargetError, names
from reshard.formats.entries import ranges
from reshard.run.locks import locks_at, opened
from reshard.source.records import DIRECTORY, RANGES_A_LINE, VERSION, Record, digest, known, lines_of, listed, parts_of
from reshard.storage.crc import CASTAGNOLI, combine
from reshard.storage.local import write_error
from reshard.storage.places import as_place, can, store_at
from reshard.storage.remote import remote_store
from reshard.storage.small import read_small

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from reshard.plan.plan import Plan
    from reshard.source.records import Range

Line = dict[str, Any]

_MADE = re.compile(r"made-([0-9a-f]+)\.json")
_HEAD = b'{"reshard":'
_LARGEST_MADE = 1 << 28


class Ledger:
    """What is known of the files of one target, for one run.

    Args:
        root: the target, a local path or a URL.
        keeps: note anything; without, there are locks alone, as far as the file system has any.
        made: what the run makes its files of, as `source.made` has it; empty where nobody need know.
        sources: when anything of the source files last changed (`changes_digest`).
    """

    def __init__(self, root: str, *, keeps: bool = True, made: bytes = b"", sources: str = "") -> None:
        self.root, self.keeps = root, keeps
        self._directory, self._made = f"{root}/{DIRECTORY}", made
        self._head: Line = {"reshard": VERSION, "made": digest(made) if made else "", "sources": sources}
        self._locks = locks_at(root)
        self._log = ""
        self._parts = 0
        self._older: dict[str, set[str]] = {}
        self._own: set[str] = set()

    def hold(self, files: Sequence[str]) -> None:
        """Have target files to oneself until `release` or the end of the process.

        Raises:
            TargetError: another run writes one of them, or they cannot be locked.
            SourceError: the target's storage cannot be reached.
        """
        try:
            self._locks.take(files)
        except TargetError as error:
            if self.keeps or not isinstance(error.__cause__, OSError):
                raise  # else there are no locks on this file system, or there is no right to make any

    def spare(self, files: Sequence[str]) -> list[str]:
        """Lock more files, and return those that no other run writes.

        Raises:
            SourceError: the target's storage cannot be reached.
        """
        return self._locks.spare(files)

    def release(self) -> None:
        """Give the files up; what of the log is in parts becomes one."""
        if self._parts > 1:
            with suppress(Exception):  # the parts say the same
                parts = parts_of(self._directory)[self._log]
                remote_store().put(parts[0], b"\n".join(lines_of(parts, 1 << 62)))
                for part in parts[1:]:
                    remote_store().discard(part)
        self._locks.release()

    def load(self, files: Collection[str]) -> dict[str, Record]:
        """Return the newest record of each file that is known.

        Raises:
            SourceError: the target's storage cannot be reached.
        """
        if not self.keeps:
            return {}
        records, logs, _ = known(self.root, files)
        self._older = {name: named for name, named in logs.items() if name != self._log}
        return records

    def add(self, records: Mapping[str, Record], *, durable: bool = False) -> None:
        """Note more; a record without a digest adds to the one before it.

        Args:
            records: by their files.
            durable: have it on the disk.

        Raises:
            TargetError, BudgetError: it cannot be written.
        """
        if not self.keeps or not records:
            return
        begun = {file for file, record in records.items() if record.digest}
        self._write([line for file, record in records.items() for line in _lines(file, record)], durable=durable)
        if begun - self._own:
            self._own |= begun
            self._remove_logs_of(self._own)

    def forget(self, files: Collection[str]) -> None:
        """Know nothing of some files any more; a log that mentions nothing else goes."""
        mine = self._own.intersection(files)
        named = set().union(*self._older.values())
        others = [file for file in files if file in named]
        self._own -= mine
        if not self._own and self._log and not others:
            self._remove(self._log)
            self._log, self._parts = "", 0
        elif self.keeps and (mine or others):
            self._write([{"file": file, "forgotten": True} for file in sorted({*mine, *others})], durable=False)

    def move(self, directory: str) -> None:
        """Move the log of this run, and what its files are made of, to another directory; older ledger files there go.

        If that cannot be written, or is a link, there is no ledger any more: what is finished is of use without it.
        """
        if self._log:
            with suppress(ReshardError):
                if not as_place(directory).is_symlink():
                    self._copy(directory)
            for name in [self._log, *self._older]:
                self._remove(name)
            self._log, self._parts = "", 0

    def dissolve(self, files: Collection[str]) -> None:
        """Remove every log that mentions only some files: nothing is left of a ledger that has no others."""
        self._remove_logs_of(files)
        self.forget(files)

    def removed(self, files: Collection[str]) -> None:
        """Note that files of earlier runs are gone; logs that mention nothing else go, too."""
        self.forget(files)
        self._remove_logs_of({*self._own, *files})

    def _remove_logs_of(self, files: Collection[str]) -> None:
        """Remove the earlier logs that mention only some files."""
        for name, named in list(self._older.items()):
            if named and named.issubset(files):
                del self._older[name]
                self._remove(name)

    def _copy(self, directory: str) -> None:
        """Write this run's log and what its files are made of into a directory, then remove older ledger files."""
        older = own_files(directory)
        log = f"{self._log}.{'' if can(directory).appends else '000000.'}jsonl"
        put(f"{directory}/{log}", b"\n".join(lines_of(parts_of(self._directory)[self._log], 1 << 62)))
        made = f"made-{self._head['made']}.json"
        content = read_small(as_place(f"{self._directory}/{made}"), "ledger", 1 << 62, TargetError)
        put(f"{directory}/{made}", content)
        for name in older:
            if name not in {log, made}:
                erase(f"{directory}/{name}")

    def _write(self, lines: Iterable[Line], *, durable: bool) -> None:
        if not self._log:
            newest = max((int(name[:8]) for name in self._older), default=0)
            self._log = f"{min(newest + 1, 10**8 - 1):08d}-{os.urandom(4).hex()}"
            lines = [self._head, *lines]
        content = b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)
        place = f"{self._directory}/{self._log}"
        if not can(self.root).appends:
            remote_store().put(f"{place}.{self._parts:06d}.jsonl", content)
            self._parts += 1
        else:  # it begins a line, also where another ended in the middle of its own because the disk was full
            append(f"{place}.jsonl", b"\n" + content, sync=durable)
        if self._made:
            put(f"{self._directory}/made-{self._head['made']}.json", self._made)
            self._made = b""

    def _remove(self, name: str) -> None:
        """Remove a log, and what no other log says that files are made of."""
        parts = parts_of(self._directory).get(name, ())
        if _is_log(parts):
            for part in parts:
                erase(part)
        logs = known(self.root, (), with_ranges=False).made.values()
        for place in listed(self._directory):
            if (match := _MADE.fullmatch(place)) and match[1] not in logs and _is_made(self._directory, place):
                erase(f"{self._directory}/{place}")


def _lines(file: str, record: Record) -> Iterable[Line]:
    """Yield the lines that say what a record does, none longer than is read."""
    if record.digest:
        begun = {"file": file, "rank": record.rank, "digest": record.digest, "size": record.size}
        begun |= {key: value for key, value in (("header", record.header), ("link", record.link)) if value}
        yield begun | ({"replaces": record.replaces} if record.replaces else {})
    for first in range(0, len(record.wrote), 3 * RANGES_A_LINE):
        some = record.wrote[first : first + 3 * RANGES_A_LINE]
        yield {"file": file, "wrote": list(zip(some[::3], some[1::3], some[2::3], strict=True))}
    if record.ready:
        yield {"file": file, "ready": record.ready} | ({"boot": record.boot} if record.boot else {})


def own_files(directory: str) -> list[str]:
    """Return the names of the files in a directory that ledgers wrote, by their names and their contents."""
    logs = [part.rpartition("/")[2] for parts in parts_of(directory).values() if _is_log(parts) for part in parts]
    return [*logs, *(name for name in listed(directory) if _is_made(directory, name))]


def refuse_foreign(directory: str) -> None:
    """Refuse a directory for a ledger, next to a zarr store, that is a link or has anything but ledger files.

    Raises:
        TargetError: it is, or it has.
        SourceError: the storage cannot be reached.
    """
    if as_place(directory).is_symlink():
        raise TargetError(f"{directory} is a link", code="is-link", hint="remove it, or choose another target")
    if can(directory).positioned and os.path.lexists(directory) and not os.path.isdir(directory):
        raise TargetError(
            f"{directory} is a file, and the ledger of the store goes there",
            code="not-a-directory",
            hint="choose another target",
        )
    foreign = sorted(set(listed(directory)).difference(own_files(directory)))
    if foreign:
        raise TargetError(
            f"{directory} has {names(foreign, most=3)}, and the ledger of the store goes there",
            code="other-files",
            hint=f"move {'it' if len(foreign) == 1 else 'them'} away, or choose another target",
        )


def _is_log(parts: Sequence[str]) -> bool:
    """Return whether the first line of a log is the head of one; an empty file is a log that was not begun."""
    return next((line for line in lines_of(parts[:1], _LARGEST_MADE) if line.strip()), _HEAD).startswith(_HEAD)


def _is_made(directory: str, name: str) -> bool:
    """Return whether a file of a directory says what files are made of: its name has the digest of its contents."""
    match = _MADE.fullmatch(name)
    if match is None:
        return False
    with suppress(ReshardError):
        content = read_small(as_place(f"{directory}/{name}"), "ledger", _LARGEST_MADE, TargetError)
        return not content or digest(content) == match[1]
    return False


def put(path: str, content: bytes) -> None:
    """Write a small file, whose name says what is in it; one of that size says the same.

    Raises:
        TargetError, BudgetError: it cannot be written.
    """
    if not can(path).appends:
        remote_store().put(path, content)
        return
    with suppress(OSError):
        if os.lstat(path).st_size == len(content):
            return
        os.unlink(path)
    append(path, content)


def erase(path: str) -> None:
    """Remove a small file, if it is there; never raises."""
    store_at(path).discard(path)


def append(path: str, content: bytes, *, sync: bool = False) -> None:
    """Append to a file below `.reshard`, which is made where it is not there.

    Raises:
        TargetError, BudgetError: it cannot be written.
    """
    descriptor = opened(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
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


class Checksums(Mapping[str, Mapping[str, int]]):
    """Target file to tensor to the CRC-32C of its contents there, from the ledger, which is read when asked for.

    A block that was written twice in parts, around a crash, may have none. A linked file has those of the one it is a
    link to.

    Attributes:
        root: the target directory.
        files: the target files.
        sources: paths of the source files.
    """

    def __init__(self, plan: Plan, root: str) -> None:
        self.root, self.files = root, plan.files
        self.sources = [file.path for file in plan.source.files]
        self._files = {file.path: file for file in plan.files}
        self._records: dict[str, Record] | None = None

    def load(self) -> Mapping[str, Record]:
        """Return the records of the files, read once."""
        if self._records is None:
            self._records = known(self.root, list(self._files)).records
        return self._records

    def __getitem__(self, path: str) -> dict[str, int]:
        file = self._files[path]
        wrote = longest(self.load().get(file.link or path, Record()).ranges)
        found = {content.name: sum_of(content.runs, wrote) for content in file.layout.contents if content.text is None}
        return {name: value for name, value in found.items() if value is not None}

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def in_files(plan: Plan, wrote: Sequence[int]) -> dict[int, list[Range]]:
    """Return where in which file the ranges of a receipt are: ranges by the files' numbers."""
    found: dict[int, list[Range]] = {}
    for place in range(0, len(wrote), 5):
        number, target, begin, nbytes, crc = wrote[place : place + 5]
        move = plan.moves[number]
        for file, runs, _ in move.way.writes[target]:
            for offset, _, _ in ranges(move.write_runs[runs], begin, nbytes):
                found.setdefault(file, []).append((offset, nbytes, crc))
    return found


def longest(wrote: Iterable[Range]) -> dict[int, tuple[int, int]]:
    """Return ranges by their begins; of those written twice around a crash, the longest."""
    return {begin: (nbytes, crc) for begin, nbytes, crc in sorted(wrote)}


def sum_of(
    runs: Sequence[tuple[int, int]], wrote: Mapping[int, tuple[int, int]], polynomial: int = CASTAGNOLI
) -> int | None:
    """Return the CRC-32C of a block's contents, from those of ranges of its file; None where they do not make it up.

    Args:
        runs: where the contents lie.
        wrote: ranges by their begins: bytes and sum.
        polynomial: of the sums.
    """
    value = 0
    for offset, nbytes in runs:
        end = offset
        while end < offset + nbytes:
            length, crc = wrote.get(end, (0, 0))
            if not 0 < length <= offset + nbytes - end:
                return None
            value = combine(value, crc, length, polynomial)
            end += length
    return value
