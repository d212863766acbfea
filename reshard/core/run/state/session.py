"""Manage the target files of a run: reuse earlier files, record progress, clean up.

`preflight` decides what to do with each file, from the plan, the ledger and the files found; this does it.
Whether unfinished files are kept, and when files get their names, depends on the storage: at URLs a file has its name
as soon as it is complete, and only S3 keeps what there is of an unfinished one (`core.run.state.uploads`).
"""

from __future__ import annotations

import os
import time
import uuid
from array import array
from contextlib import suppress
from dataclasses import replace
from stat import S_ISREG
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from reshard.core.model.digests import contents_digest, digest
from reshard.core.model.entries import merged
from reshard.core.plan.inputs import ledger_provenance
from reshard.core.plan.partition import bytes_left, remaining
from reshard.core.plan.plan import changes_digest, file_digests
from reshard.core.records.logs import Record
from reshard.core.records.made import provenance_file
from reshard.core.run.settings import ledger_bytes
from reshard.core.run.state.beside import remove_older
from reshard.core.run.state.ledger import Ledger, refuse_foreign
from reshard.core.run.state.preflight import (
    Do,
    Policy,
    fates_of,
    is_unnoted,
    planned_files,
    refuse,
    seen_files,
    states_of,
)
from reshard.core.run.state.sums import in_files, is_complete, spans_of
from reshard.core.run.state.uploads import begin_uploads, sent_bytes
from reshard.core.run.tasks import unfinished, withdraw
from reshard.core.storage.crc import crc_of_range
from reshard.core.storage.local import allocated, free_bytes, local_store
from reshard.core.storage.page_cache import boot_id
from reshard.core.storage.places import can
from reshard.core.storage.threads import map_ordered
from reshard.core.storage.urls.remote import REQUESTS, remote_store
from reshard.errors import BudgetError, ChangedError, Option, ReshardError, Text, bytes_text
from reshard.messages import log
from reshard.strategy.strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from reshard.core.model.entries import FileLayout
    from reshard.core.plan.plan import Plan
    from reshard.core.records.logs import Range, State
    from reshard.core.run.settings import Receipt, RunOptions
    from reshard.core.run.state.beside import Older
    from reshard.core.storage.base import Status

FLUSH_SECONDS = 1.0
"""Interval in which receipts are recorded; if the process dies, unrecorded ranges are written again."""

T = TypeVar("T")


class _Remains(NamedTuple):
    """The remains of a file after a failed run.

    Attributes:
        nbytes: bytes of contents that another run can use.
        is_known: the ledger keeps a record of the file.
        ready: the state to record, if the file is complete.
    """

    nbytes: int = 0
    is_known: bool = True
    ready: State | None = None


class Session:
    """The target files of one run.

    Attributes:
        plan: the unfinished remainder of the plan.
        resumed: bytes of contents of the whole plan that an earlier run wrote.
        touched: number of finished files that are kept although their sources were touched or copied since.
        removed: the files of earlier runs that were removed, once all files were complete.
    """

    def __init__(
        self,
        plan: Plan,
        root: str,
        options: RunOptions,
        *,
        threads: int,
        older: Mapping[str, Older] | None = None,
    ) -> None:
        """Lock the target files, and find out which of them can be reused.

        Args:
            plan: the whole plan.
            root: the target.
            options: with `overwrite` foreign files are replaced, with `restart` no file of an earlier run is reused;
                without `ledger` all existing files are foreign, and no unfinished file is kept.
            threads: number of threads that verify ranges of unfinished files.
            older: files of earlier runs to be removed (`beside.older_files`).

        Raises:
            TargetError: another run writes one of the files, or one exists that this run must not replace.
            SourceError: the storage of the target cannot be reached.
            BudgetError: the disk has no space for the remaining files.
        """
        self._root, self._options, ledger = root, options, options.ledger
        self._named_early = not can(root).positioned  # URLs: a file gets its name as soon as it is complete
        self._older = older or {}
        self.removed: tuple[str, ...] = ()
        if ledger and plan.shape == "store":
            refuse_foreign(f"{root}.reshard")
        sources = changes_digest(plan)
        provenance = provenance_file(ledger_provenance(plan)) if ledger else b""
        self._provenance_digest = digest(provenance)
        self.ledger = Ledger(
            root, keeps=ledger, provenance=provenance, sources=sources, command=options.command, room=ledger_bytes(plan)
        )
        self._paths = [file.path for file in plan.files]
        self.ledger.hold(self._paths)
        try:
            digests = file_digests(plan) if ledger else [uuid.uuid4().hex] * len(plan.files)
            self._whole = plan = replace(plan, digests=tuple(digests))
            self._planned = planned_files(plan, digests)
            records = self.ledger.load(self._paths, beside=plan.shape == "store")
            self._existing = seen_files(plan, root, records, self._paths if options.starts_over else records)
            replaces = options.overwrite or (options.restart and not ledger)
            policy = Policy(sources, self._named_early, replaces, options.restart)
            self._fates = fates_of(plan, root, self._planned, self._existing, policy)
            refuse(self._fates, root, has_key=bool(plan.cipher))
            finished = self._numbers(Do.KEEP)
            self.touched = sum(self._fates[self._paths[number]].is_touched for number in finished)
            if options.fsync:
                self._sync(finished)
            begun = [number for number in self._numbers(Do.RESUME) if self._record(number).wrote]
            verified = map_ordered(self._verified, begun, max(threads, 1))
            good = {number: ranges for number, ranges in zip(begun, verified, strict=True) if ranges}
            local_store().close()  # files that were read are written next
            self._spans = {number: spans_of(ranges) for number, ranges in good.items()}
            in_order = self._spans.items() if plan.by_file else ()
            complete = [n for n, s in in_order if is_complete(self._unfinished(n), plan.files[n].layout, s)]
            self.plan = remaining(plan, finished, self._spans, complete)
            self._ready: dict[int, State | None] = {number: self._record(number).ready for number in finished}
            self._unfinished_numbers = [number for number, file in enumerate(self.plan.files) if not file.done]
            self._begin(good)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                error.add_note("this run wrote nothing; files of an earlier run are kept; the same command resumes")
            self.ledger.release()
            raise
        self.resumed = 0 if self.plan is plan else plan.stats.bytes_written - bytes_left(self.plan)
        for numbers, done in ((finished, "kept, finished by an earlier run"), (self._spans, "resumed")):
            for number in numbers:
                log().info("%s/%s: %s", root, self._paths[number], done)
        self._pending: dict[int, array[int]] = {}
        self._completed: dict[int, State] = {}
        self._flushed = time.monotonic()

    def note(self, receipt: Receipt) -> None:
        """Collect the ranges that a task wrote, and the files that it completed."""
        for file, written in in_files(self.plan, receipt.crc32c_ranges).items():
            self._pending.setdefault(file, array("Q")).extend(number for span in written for number in span)
        for file, offset, nbytes, crc in zip(*(receipt.file_ranges[n::4] for n in range(4)), strict=True):
            self._pending.setdefault(file, array("Q")).extend((offset, nbytes, crc))
        self._completed.update((number, (size, time)) for number, size, time in receipt.ready)
        if time.monotonic() - self._flushed >= FLUSH_SECONDS:
            self.flush()

    def flush(self, *, durable: bool = False) -> None:
        """Write the collected ranges and states to the ledger; sync it if `durable`."""
        boot = "" if self._options.fsync or self._named_early else boot_id()  # at a URL a complete file is durable
        records = {}
        for number in {**self._pending, **self._completed}:
            wrote, ready = self._pending.get(number, array("Q")), self._completed.get(number)
            records[self._paths[number]] = Record(wrote=wrote, ready=ready, boot=boot if ready else "")
        self.ledger.add(records, durable=durable)
        for number, wrote in self._pending.items():
            written = spans_of(Record(wrote=wrote).ranges)
            self._spans[number] = merged([*self._spans.get(number, ()), *written])
        self._ready |= self._completed
        self._pending, self._completed = {}, {}
        self._flushed = time.monotonic()

    def complete(self) -> None:
        """Record complete files before they get their names; remove files of earlier runs."""
        self.flush(durable=self._options.fsync)
        self._note_kept()
        if self._older:
            withdraw(self._root, [self._whole.files[number] for number in self._unfinished_numbers])
            free = self.ledger.spare(sorted({file.file for file in self._older.values()}))
            self.removed = tuple(remove_older(self._root, self._older, free))
            ended = {path for path, item in self._older.items() if item.upload and item.file in free}
            self.ledger.removed({self._older[path].file for path in ended.union(self.removed)})

    def finished(self) -> None:
        """Write the last records; move or remove the ledger if the target directory may not hold it."""
        self.flush()
        if self._whole.shape == "store":
            self.ledger.move(f"{self._root}.reshard")
        if self._whole.shape == "file":
            self.ledger.dissolve(self._paths)

    def failed(self, error: BaseException, changed: Mapping[int, Status | None]) -> None:
        """Keep resumable files, and add a note to the error with advice.

        Args:
            error: the error of the run.
            changed: the current states of source files that changed since they were opened, by number; None if a file
                is gone. Unfinished files are worthless then, as after a `ChangedError`.
        """
        with suppress(ReshardError):  # the disk may be full; ranges that are not recorded are written again
            self.flush()
        is_spoiled = bool(changed) or isinstance(error, ChangedError)
        if is_spoiled or not self.ledger.keeps:
            self._spans = {}
        try:
            states = states_of(self._root, self._paths, self._paths)  # all tasks of the run have stopped
        except ReshardError:  # the storage cannot be reached; that may have failed the run
            if not isinstance(error, ChangedError):
                advice = "nothing unfinished is kept; start again"
                error.add_note(advice if is_spoiled else "what is finished is kept; the same command resumes")
            return
        numbers = range(len(self._paths))

        def decide(number: int) -> _Remains:
            ends = is_spoiled or number in self._ready or not self.ledger.keeps
            sent = sent_bytes(self.plan, number, self._root, ends=ends)
            if sent is not None:
                return _Remains(sent)
            return self._keep_or_discard(number, states.get(self._paths[number]), is_spoiled=is_spoiled)

        remains = list(map_ordered(decide, numbers, REQUESTS if self._named_early else 0))
        usable = sum(item.nbytes for item in remains)
        known_paths = {path for path, item in zip(self._paths, remains, strict=True) if item.is_known}
        with suppress(ReshardError):
            self.ledger.add(
                {path: Record(ready=item.ready) for path, item in zip(self._paths, remains, strict=True) if item.ready}
            )
            self.ledger.forget([path for path in self._paths if path not in known_paths])
        if is_spoiled:
            if note := self._how_to_start_over(error, changed, known_paths):
                error.add_note(note)
        elif usable:
            written = f"{bytes_text(usable)} of {bytes_text(self._whole.stats.bytes_written)}"
            resumes = f"{written} are written and kept; the same command resumes (with "
            error.add_note(Text(resumes, Option("restart"), " it starts over)"))
        elif isinstance(error, KeyboardInterrupt | BudgetError):
            error.add_note("unfinished files are removed; the same command starts from the beginning")

    def _how_to_start_over(
        self, error: BaseException, changed: Mapping[int, Status | None], known_paths: Collection[str]
    ) -> str:
        """Return the advice for a changed source: its earlier files may need `restart`."""
        files = list(self._whole.source.files)
        for number, status in changed.items():
            nbytes, mtime_ns = status[:2] if status else (0, 0)
            files[number] = replace(files[number], nbytes=nbytes, mtime_ns=mtime_ns)
        is_refused = False
        if known_paths and not self._options.overwrite:
            now = file_digests(replace(self._whole, source=replace(self._whole.source, files=tuple(files))))
            new = dict(zip(self._paths, now, strict=True))
            is_refused = any(self._planned[path].digest != new[path] for path in known_paths)
        option = Text("with ", Option("restart"), ", because the target has files made from its earlier version")
        if isinstance(error, ChangedError):  # its message has the rest
            return option if is_refused else ""
        advice = Text("start again ", option) if is_refused else "start again"
        return Text("a source file changed since it was opened, so nothing unfinished is kept; ", advice)

    def close(self) -> None:
        """Unlock the files."""
        self.ledger.release()

    def _keep_or_discard(self, number: int, state: State | None, *, is_spoiled: bool) -> _Remains:
        """Keep a partial file if it can be resumed; otherwise delete it."""
        file, path, was_unfinished = self._whole.files[number], self._paths[number], number in self._unfinished_numbers
        before, ready = self._existing[path].state, self._ready.get(number)
        keeps = self.ledger.keeps
        if self._named_early and was_unfinished and state is not None and (is_spoiled or not keeps):
            if state == ready or (not keeps and (before is None or (self._whole.shape == "store" and state != before))):
                remote_store().discard(f"{self._root}/{path}")  # it got its name before all files were complete
                return _Remains(is_known=False)
        elif self._named_early and was_unfinished and ready is None and state not in {None, before}:
            return _Remains(0 if file.link else file.layout.content_bytes, ready=state)  # its receipt did not arrive
        if state is not None and state == ready:
            return _Remains(0 if file.link else file.layout.content_bytes)
        if number in self._spans:
            return _Remains(sum(end - begin for begin, end in self._spans[number]))
        self._discard(number)
        if state is None:
            return _Remains(is_known=False)
        return _Remains(is_known=not was_unfinished or self._may_be_ours(number, state, is_spoiled=is_spoiled))

    def _may_be_ours(self, number: int, state: State, *, is_spoiled: bool) -> bool:
        """Return whether an earlier run or this one made the existing file."""
        path = self._paths[number]
        planned, existing, replaces = self._planned[path], self._existing[path], self._fates[path].ours
        if state == replaces:
            return True
        if planned.is_link and state != existing.state:
            return not is_spoiled  # this run made it, and has not recorded that yet
        begun = existing.record if planned.is_link else Record(planned.digest, planned.size, replaces=replaces)
        return is_unnoted(planned, begun, state, early=self._named_early)

    def _discard(self, number: int) -> None:
        """Remove an unfinished file, and directories below the target that become empty."""
        path = self._paths[number]
        if self._named_early:
            if self._unfinished(number) != f"{self._root}/{path}":
                remote_store().discard(self._unfinished(number))
            return
        local_store().discard(self._unfinished(number))
        directory = os.path.dirname(f"{self._root}/{path}")
        while len(directory) > len(self._root):  # the target directory itself may have existed before
            with suppress(OSError):  # it has other files
                os.rmdir(directory)
            directory = os.path.dirname(directory)

    def _sync(self, finished: Iterable[int]) -> None:
        """Sync files that a run without fsync finished."""
        synced = {}
        for number in finished:
            record = self._record(number)
            if record.boot:
                local_store().sync_finished(f"{self._root}/{self._paths[number]}")
                synced[self._paths[number]] = replace(record, boot="")
        self.ledger.add(synced, durable=True)

    def _verified(self, number: int) -> list[Range]:
        """Return the ranges of an unfinished file that have the recorded checksums."""
        size = self._whole.files[number].layout.size
        path = self._unfinished(number)
        good: list[Range] = []
        with suppress(ReshardError, OSError):
            status = os.lstat(path)
            # A hard-linked file is replaced, not written in place (`LocalStore.create`), so its contents are not used.
            if not S_ISREG(status.st_mode) or status.st_size != size or status.st_nlink > 1:
                return []
            for begin, nbytes, crc in self._record(number).ranges:
                if 0 <= begin < begin + nbytes <= size and crc_of_range(local_store(), path, begin, nbytes) == crc:
                    good.append((begin, nbytes, crc))
        return good

    def _begin(self, good: Mapping[int, Sequence[Range]]) -> None:
        """Begin the remaining files; keep good ranges of an earlier run."""
        wrote = {number: array("Q", [value for span in ranges for value in span]) for number, ranges in good.items()}
        begun = self._records(self._unfinished_numbers)

        def record(uploads: Mapping[int, str]) -> None:
            self.ledger.add({
                path: replace(value, wrote=wrote.get(number, value.wrote), upload=uploads.get(number, ""))
                for number, (path, value) in zip(self._unfinished_numbers, begun.items(), strict=True)
            })  # fmt: skip

        if self._named_early:
            # An index marks a set as complete, and this run replaces files of it.
            withdraw(self._root, [self._whole.files[number] for number in self._unfinished_numbers])
            numbers = self._unfinished_numbers if self.ledger.keeps else []
            recorded = {number: self._record(number).upload for number in numbers}
            uploads = begin_uploads(self.plan, self._root, recorded, self._numbers(Do.RESUME), record)
            self.plan = replace(self.plan, uploads=uploads)
        else:
            self._check_space()
            for number in self._unfinished_numbers:
                resumed = self._unfinished(number) if number in self._spans else None
                for path in self._existing[self._paths[number]].unfinished:
                    if path != resumed:
                        local_store().discard(path)
            record({})

    def _records(self, numbers: Iterable[int]) -> dict[str, Record]:
        """Return the records of files at their beginning, by path."""
        records = {}
        headers = _headers(self._whole)
        for file in (self._whole.files[number] for number in numbers):
            planned, ours = self._planned[file.path], self._fates[file.path].ours
            rank = file.rank if file.layout.contents or file.publish == "file" else None
            header = headers.get(file.layout, "")
            records[file.path] = Record(planned.digest, planned.size, replaces=ours, rank=rank, header=header)
        return records

    def _note_kept(self) -> None:
        """Record kept files whose records in an earlier log have another provenance, or will be lost with it."""
        if self._whole.shape == "file":
            return
        replaces_log = self._whole.shape == "store" and self.ledger.has_log
        made = self._provenance_digest
        numbers = [number for number in self._numbers(Do.KEEP) if replaces_log or self._record(number).made != made]
        records = {self._paths[number]: self._record(number) for number in numbers}
        self.ledger.add({
            path: replace(record, wrote=records[path].wrote, ready=records[path].ready, boot=records[path].boot)
            for path, record in self._records(numbers).items()
        })  # fmt: skip

    def _check_space(self) -> None:
        needed = 0
        for number in self._unfinished_numbers:
            file = self.plan.files[number]
            if file.link is None and not self.plan.encoded(file):  # the size of encoded files is unknown
                # Space of its unfinished files becomes free.
                needed += self.plan.size_of(file) - sum(map(allocated, self._existing[file.path].unfinished))
        free = free_bytes(self._root)
        if needed > free:
            raise BudgetError(
                f"{self._root} has too little room for the target",
                code="no-space",
                facts=[f"the files need {bytes_text(needed)} more; {bytes_text(free)} are free"],
                hint=f"free {bytes_text(needed - free)}, or choose another target",
            )

    def _numbers(self, do: Do) -> list[int]:
        return [number for number, path in enumerate(self._paths) if self._fates[path].do is do]

    def _unfinished(self, number: int) -> str:
        return unfinished(self._whole, number, self._root)

    def _record(self, number: int) -> Record:
        return self._existing[self._paths[number]].record


def _headers(plan: Plan) -> dict[FileLayout, str]:
    """Return header digests by layout, if the ledger tells how to read the target."""
    if not (plan.request and isinstance(plan.request.target, Strategy)):
        return {}
    layouts = {file.layout for file in plan.files}
    return {layout: contents_digest((entry.name, entry) for entry in layout.contents) for layout in layouts}
