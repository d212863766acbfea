"""The ledger of a target: records of its files, and locks for writing them.

`hold` locks files, `load` returns their records, `add` appends records, `forget` revokes them. `core.records.logs`
describes the logs. A run writes its own log, once it has something to record, and removes logs of earlier runs that
mention no other files than its own. So no log is ever appended to by two runs, or through a second name (`cp -l`).

Only the process that runs a plan writes its log: tasks report their work by receipts.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from reshard.core.model.digests import digest
from reshard.core.records.logs import (
    DIRECTORY,
    LONGEST_COMMAND,
    RANGES_A_LINE,
    UNREADABLE_LEDGER,
    VERSION,
    Logs,
    Record,
    current_directory,
    known,
    lines_of,
    listed,
    parts_of,
)
from reshard.core.run.state.locks import locks_at, opened
from reshard.core.storage.local import write_error
from reshard.core.storage.page_cache import sync_file
from reshard.core.storage.places import as_place, can, store_at
from reshard.core.storage.small import read_small
from reshard.core.storage.urls.remote import remote_store
from reshard.errors import ReshardError, SourceError, TargetError, names

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence


Line = dict[str, Any]

_PROVENANCE_NAME = re.compile(r"made-([0-9a-f]+)\.json")
_HEAD = b'{"reshard":'
_LARGEST_PROVENANCE = 1 << 28


class Ledger:
    """The records and locks of the files of one target, for one run.

    Args:
        root: the target, a local path or a URL.
        keeps: write records; otherwise there are only locks, if the file system has any.
        provenance: the provenance of the files, as in `core.records.made`; empty if it is not recorded.
        sources: a digest of the last change of the source files (`changes_digest`).
        command: the words of the command that runs, to resume it.
        room: how many bytes to reserve for the log, so that a full disk does not prevent records.
    """

    def __init__(
        self,
        root: str,
        *,
        keeps: bool = True,
        provenance: bytes = b"",
        sources: str = "",
        command: Sequence[str] = (),
        room: int = 0,
    ) -> None:
        self.root, self.keeps = root, keeps
        self._directory, self._provenance = f"{root}/{DIRECTORY}", provenance
        self._head: Line = {"reshard": VERSION, "made": digest(provenance) if provenance else "", "sources": sources}
        if 0 < sum(map(len, command)) < LONGEST_COMMAND:
            self._head |= {"command": [*command], "directory": current_directory()}
        self._locks = locks_at(root)
        self._log = ""
        self._parts, self._end, self._room = 0, 0, room
        self._older: dict[str, set[str]] = {}
        self._begun: set[str] = set()

    @property
    def has_log(self) -> bool:
        """Return whether this run has recorded something."""
        return bool(self._log)

    def hold(self, files: Sequence[str]) -> None:
        """Lock target files until `release` or process exit.

        Raises:
            TargetError: another run writes one of them, or they cannot be locked.
            SourceError: the target's storage cannot be reached.
        """
        try:
            self._locks.take(files)
        except TargetError as error:
            if self.keeps or not isinstance(error.__cause__, OSError):
                raise  # otherwise this file system has no locks, or no permission to make any

    def spare(self, files: Sequence[str]) -> list[str]:
        """Lock additional files; return the ones that no other run writes.

        Raises:
            SourceError: the target's storage cannot be reached.
        """
        return self._locks.spare(files)

    def release(self) -> None:
        """Unlock the files; join the parts of the log, or free the room that it does not need."""
        self._free_room()
        if self._parts > 1:
            with suppress(Exception):  # the parts have the same content
                parts = parts_of(self._directory)[self._log]
                remote_store().put(parts[0], b"\n".join(lines_of(parts, 1 << 62)))
                for part in parts[1:]:
                    remote_store().discard(part)
        self._locks.release()

    def load(self, files: Collection[str], *, beside: bool = False) -> dict[str, Record]:
        """Return the newest record of each file that has one.

        Args:
            files: the files.
            beside: read the log of a finished run, too, which `move` put beside the target.

        Raises:
            SourceError: the target's storage cannot be reached.
        """
        if not self.keeps:
            return {}
        records, logs, _, _ = known_of_target(self.root, files)
        self._older = {name: named for name, named in logs.items() if name != self._log}
        return records_beside(self.root, files) | records if beside else records

    def add(self, records: Mapping[str, Record], *, durable: bool = False) -> None:
        """Append records; one without a digest extends the record before it.

        Args:
            records: the records, by file.
            durable: sync them to the disk.

        Raises:
            TargetError, BudgetError: the log cannot be written.
        """
        if not self.keeps or not records:
            return
        begun = {file for file, record in records.items() if record.digest}
        self._write([line for file, record in records.items() for line in _lines(file, record)], durable=durable)
        if begun - self._begun:
            self._begun |= begun
            self._remove_logs_of(self._begun)

    def forget(self, files: Collection[str]) -> None:
        """Forget some files; delete the log if it mentions no others."""
        mine = self._begun.intersection(files)
        named = set().union(*self._older.values())
        earlier = [file for file in files if file in named]
        self._begun -= mine
        if not self._begun and self._log and not earlier:
            self._remove(self._log)
            self._log, self._parts = "", 0
        elif self.keeps and (mine or earlier):
            self._write([{"file": file, "forgotten": True} for file in sorted({*mine, *earlier})], durable=False)

    def move(self, directory: str) -> None:
        """Move the log of this run to another directory; remove older ledger files there.

        The provenance of the files is moved with it. If the directory cannot be written, or is a link, the ledger is
        removed: finished files are usable without it.
        """
        if self._log:
            self._free_room()
            with suppress(ReshardError):
                if not as_place(directory).is_symlink():
                    self._copy(directory)
            for name in [self._log, *self._older]:
                self._remove(name)
            self._log, self._parts = "", 0

    def dissolve(self, files: Collection[str]) -> None:
        """Remove all logs that mention only these files."""
        self._remove_logs_of(files)
        self.forget(files)

    def removed(self, files: Collection[str]) -> None:
        """Record that files were removed; delete logs that mention no others."""
        self.forget(files)
        self._remove_logs_of({*self._begun, *files})

    def _remove_logs_of(self, files: Collection[str]) -> None:
        """Remove the logs of earlier runs that mention only these files."""
        for name, named in list(self._older.items()):
            if named and named.issubset(files):
                del self._older[name]
                self._remove(name)

    def _copy(self, directory: str) -> None:
        """Copy log and provenance into a directory, then remove older ledger files."""
        older = own_files(directory)
        log = f"{self._log}.{'' if can(directory).appends else '000000.'}jsonl"
        put(f"{directory}/{log}", b"\n".join(lines_of(parts_of(self._directory)[self._log], 1 << 62)))
        provenance = f"made-{self._head['made']}.json"
        content = read_small(as_place(f"{self._directory}/{provenance}"), "ledger", 1 << 62, TargetError)
        put(f"{directory}/{provenance}", content)
        for name in older:
            if name not in {log, provenance}:
                erase(f"{directory}/{name}")

    def _write(self, lines: Iterable[Line], *, durable: bool) -> None:
        if not self._log:
            newest = max((int(name[:8]) for name in self._older), default=0)
            self._log = f"{min(newest + 1, 10**8 - 1):08d}-{os.urandom(4).hex()}"
            lines = [self._head, *lines]
        content = b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)
        path = f"{self._directory}/{self._log}"
        if not can(self.root).appends:
            remote_store().put(f"{path}.{self._parts:06d}.jsonl", content)
            self._parts += 1
        else:
            self._end = write_at(f"{path}.jsonl", self._end, content, sync=durable, room=self._room)
            self._room = 0
        if self._provenance:
            put(f"{self._directory}/made-{self._head['made']}.json", self._provenance)
            self._provenance = b""

    def _free_room(self) -> None:
        """Cut the log after its last line."""
        if self._end and self._log:
            with suppress(OSError):
                os.truncate(f"{self._directory}/{self._log}.jsonl", self._end)

    def _remove(self, name: str) -> None:
        """Remove a log, and provenance files that no other log refers to."""
        parts = parts_of(self._directory).get(name, ())
        if _is_log(parts):
            for part in parts:
                erase(part)
        logs = known(self.root, (), with_ranges=False).made.values()
        for file in listed(self._directory):
            match = _PROVENANCE_NAME.fullmatch(file)
            if match and match[1] not in logs and _is_provenance(self._directory, file):
                erase(f"{self._directory}/{file}")


def known_of_target(root: str, files: Collection[str] | None = None, *, with_ranges: bool = True) -> Logs:
    """Read the logs of a target that is written, as `known` does.

    Raises:
        TargetError: they exist and cannot be read.
        SourceError: the storage of the target cannot be reached.
    """
    try:
        return known(root, files, with_ranges=with_ranges)
    except SourceError as error:
        if error.code != UNREADABLE_LEDGER:
            raise
        raise TargetError(error.message, code=error.code, hint=error.hint) from None


def records_beside(root: str, files: Collection[str]) -> dict[str, Record]:
    """Return the records in the ledger beside a finished zarr store; it is no link (`refuse_foreign`)."""
    return known(root, files, directory=f"{root}.reshard", with_ranges=False).records


def _lines(file: str, record: Record) -> Iterable[Line]:
    """Yield the log lines of a record; none exceeds the length limit of readers."""
    if record.digest:
        begun = {"file": file, "rank": record.rank, "digest": record.digest, "size": record.size}
        more = {"header": record.header, "replaces": record.replaces}
        yield begun | {key: value for key, value in more.items() if value}
    for first in range(0, len(record.wrote), 3 * RANGES_A_LINE):
        numbers = record.wrote[first : first + 3 * RANGES_A_LINE]
        yield {"file": file, "wrote": list(zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True))}
    if record.upload:
        yield {"file": file, "upload": record.upload}
    if record.ready:
        yield {"file": file, "ready": record.ready} | ({"boot": record.boot} if record.boot else {})


def own_files(directory: str) -> list[str]:
    """Return the ledger files in a directory, recognized by name and contents."""
    logs = [part.rpartition("/")[2] for parts in parts_of(directory).values() if _is_log(parts) for part in parts]
    return [*logs, *(name for name in listed(directory) if _is_provenance(directory, name))]


def refuse_foreign(directory: str) -> None:
    """Reject a ledger directory next to a zarr store that is a link or not its own.

    Raises:
        TargetError: the directory is a link or a file, or has files that are not of a ledger.
        SourceError: the storage cannot be reached.
    """
    if as_place(directory).is_symlink():
        raise TargetError(f"{directory} is a link", code="is-link", hint="choose another target, or move the link away")
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
    """Return whether a log begins with a head line, or is empty (not begun)."""
    return next((line for line in lines_of(parts[:1], _LARGEST_PROVENANCE) if line.strip()), _HEAD).startswith(_HEAD)


def _is_provenance(directory: str, name: str) -> bool:
    """Return whether a file is a provenance file, named after its digest."""
    match = _PROVENANCE_NAME.fullmatch(name)
    if match is None:
        return False
    with suppress(ReshardError):
        content = read_small(as_place(f"{directory}/{name}"), "ledger", _LARGEST_PROVENANCE, TargetError)
        return not content or digest(content) == match[1]
    return False


def put(path: str, content: bytes) -> None:
    """Write a small file named after its contents, unless it exists with that size.

    Raises:
        TargetError, BudgetError: the file cannot be written.
    """
    if not can(path).appends:
        remote_store().put(path, content)
        return
    with suppress(OSError):
        if os.lstat(path).st_size == len(content):
            return
        os.unlink(path)
    write_at(path, 0, content)


def erase(path: str) -> None:
    """Remove a small file if it exists; never raise."""
    store_at(path).discard(path)


def write_at(path: str, offset: int, content: bytes, *, sync: bool = False, room: int = 0) -> int:
    """Write into a file below `.reshard`, and return where the next bytes go; create both if necessary.

    Args:
        path: the file, which only this run writes.
        offset: where to write.
        content: what to write.
        sync: sync the file to the disk.
        room: how many bytes to reserve, zeros until they are written, if the disk has so many.

    Raises:
        TargetError, BudgetError: the file cannot be written.
    """
    descriptor = opened(path, os.O_WRONLY | os.O_CREAT)
    try:
        if room > len(content) and hasattr(os, "posix_fallocate"):
            with suppress(OSError):
                os.posix_fallocate(descriptor, 0, room)
        os.lseek(descriptor, offset, os.SEEK_SET)
        done = os.write(descriptor, content)
        while done < len(content):
            done += os.write(descriptor, content[done:])
        if sync:
            sync_file(descriptor)
    except OSError as error:
        raise write_error(path, error, len(content)) from error
    finally:
        os.close(descriptor)
    return offset + len(content)
