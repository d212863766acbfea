"""One run's hold on its target files: what an earlier run left of them, what this one writes, what it leaves.

What to do with each file is decided in `run.preflight`, from the plan, the ledger and what is found; here it is done.
What is kept of unfinished files, and where names are given, depends on the storage: at URLs a file has its name as soon
as it is complete, and an unfinished one is of no use to the next run.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from array import array
from contextlib import suppress
from dataclasses import replace
from glob import escape
from stat import S_ISREG
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from reshard.errors import BudgetError, ChangedError, Option, ReshardError, TargetError, Text, bytes_text, names
from reshard.plan.partition import bytes_left, covers, merged, remaining
from reshard.plan.plan import changes_digest, file_digests
from reshard.plan.select import Selection, selection_data
from reshard.run.beside import older_files, remove_older
from reshard.run.ledger import Ledger, in_files, refuse_foreign
from reshard.run.preflight import (
    Do,
    Policy,
    fates,
    is_unnoted,
    of,
    planned_files,
    seen_files,
    states_of,
)
from reshard.run.tasks import unfinished, withdraw
from reshard.source.headers import contents_digest
from reshard.source.made import VERSION, small_strategy, source_data
from reshard.source.records import Record, digest
from reshard.storage.crc import crc32, crc_of_range
from reshard.storage.local import free_bytes, local_store
from reshard.storage.page_cache import boot_id
from reshard.storage.places import can
from reshard.storage.remote import REQUESTS, remote_store
from reshard.storage.threads import map_threads
from reshard.strategy.strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from reshard.formats.entries import FileLayout
    from reshard.plan.partition import Spans
    from reshard.plan.plan import Plan
    from reshard.run.beside import Older
    from reshard.run.tasks import Receipt
    from reshard.source.records import Range, State
    from reshard.storage.base import Status

FLUSH_SECONDS = 1.0
"""How long receipts wait before they are noted: what is lost of them with the process is written again."""

T = TypeVar("T")


class _Left(NamedTuple):
    """What is left of a file: bytes of contents that another run can use, whether it is known, a state to be noted."""

    nbytes: int = 0
    is_known: bool = True
    ready: State | None = None


class Session:
    """The target files of one run.

    Attributes:
        plan: what is left to do.
        resumed: bytes of contents that an earlier run wrote, of those that the whole plan writes.
        touched: how many finished files are kept though their sources were touched or copied since.
        removed: the files of earlier runs that were removed, once all files were complete.
    """

    def __init__(
        self,
        plan: Plan,
        root: str,
        *,
        overwrite: bool,
        restart: bool,
        threads: int,
        fsync: bool,
        ledger: bool = True,
        older: Mapping[str, Older] | None = None,
    ) -> None:
        """Take the files, and look at what is there; with `fsync`, have what is finished on the disk.

        Args:
            plan: the whole of it.
            root: the target.
            overwrite: replace what is somebody else's.
            restart: forget what an earlier run left.
            threads: that look at what is written.
            fsync: see above.
            ledger: keep a ledger; without, whatever is there is somebody else's, and nothing unfinished is left.
            older: files of earlier runs that are to be removed (`beside.older_files`).

        Raises:
            TargetError: another run writes one of the files; or one is there that this run must not replace.
            SourceError: the target's storage cannot be reached.
            BudgetError: the disk has no room for what is left.
        """
        self._root, self._overwrite, self._fsync = root, overwrite, fsync
        self._early = not can(root).positioned
        self._older = older or {}
        self.removed: tuple[str, ...] = ()
        if ledger and plan.exclusive:
            refuse_foreign(f"{root}.reshard")
        sources = changes_digest(plan)
        made = made_data(plan) if ledger else b""
        self._made = digest(made)
        self.ledger = Ledger(root, keeps=ledger, made=made, sources=sources)
        self._paths = [file.path for file in plan.files]
        self.ledger.hold(self._paths)
        try:
            digests = file_digests(plan) if ledger else [uuid.uuid4().hex] * len(plan.files)
            self._whole = plan = replace(plan, digests=tuple(digests))
            self._wanted = planned_files(plan, digests)
            records = self.ledger.load(self._paths)
            self._seen = seen_files(plan, root, records, self._paths if overwrite or restart else records)
            policy = Policy(sources, self._early, overwrite or (restart and not ledger), restart)
            self._fates = fates(self._wanted, self._seen, policy)
            self._refuse()
            kept = self._numbers(Do.KEEP)
            self.touched = sum(self._fates[self._paths[number]].is_touched for number in kept)
            if fsync:
                self._sync(kept)
            begun = [number for number in self._numbers(Do.RESUME) if self._record(number).wrote]
            found = map_threads(self._verified, begun, max(threads, 1))
            good = {number: ranges for number, ranges in zip(begun, found, strict=True) if ranges}
            local_store().close()  # what was read is written next
            self._spans = {number: _spans(ranges) for number, ranges in good.items()}
            complete = [n for n, spans in self._spans.items() if plan.by_file and _is_complete(plan, n, spans, root)]
            self.plan = remaining(plan, kept, self._spans, complete)
            self._ready: dict[int, State | None] = {number: self._record(number).ready for number in kept}
            self._left = [number for number, file in enumerate(self.plan.files) if not file.done]
            self._begin(good)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                error.add_note("nothing is written yet but what an earlier run left; the same command resumes")
            self.ledger.release()
            raise
        self.resumed = 0 if self.plan is plan else plan.stats.bytes_written - bytes_left(self.plan)
        self._noted: dict[int, array[int]] = {}
        self._completed: dict[int, State] = {}
        self._flushed = time.monotonic()

    def note(self, receipt: Receipt) -> None:
        """Remember what a task wrote, and which files are complete."""
        for file, written in in_files(self.plan, receipt.wrote).items():
            self._noted.setdefault(file, array("Q")).extend(number for some in written for number in some)
        for file, offset, nbytes, crc in zip(*(receipt.ranges[n::4] for n in range(4)), strict=True):
            self._noted.setdefault(file, array("Q")).extend((offset, nbytes, crc))
        self._completed.update((number, (size, time)) for number, size, time in receipt.ready)
        if time.monotonic() - self._flushed >= FLUSH_SECONDS:
            self.flush()

    def flush(self, *, durable: bool = False) -> None:
        """Write down what is remembered; with `durable`, have it on the disk."""
        boot = "" if self._fsync or self._early else boot_id()  # at a URL what is there is there for good
        records = {}
        for number in {**self._noted, **self._completed}:
            wrote, ready = self._noted.get(number, array("Q")), self._completed.get(number)
            records[self._paths[number]] = Record(wrote=wrote, ready=ready, boot=boot if ready else "")
        self.ledger.add(records, durable=durable)
        for number, wrote in self._noted.items():
            more = _spans(Record(wrote=wrote).ranges)
            self._spans[number] = merged([*self._spans.get(number, ()), *more])
        self._ready |= self._completed
        self._noted, self._completed = {}, {}
        self._flushed = time.monotonic()

    def complete(self) -> None:
        """Note what is complete, before it gets its name: a name says that a file is; remove what is older."""
        self.flush(durable=self._fsync)
        self._note_kept()
        if self._older:
            withdraw(self._root, [self._whole.files[number] for number in self._left])
            free = self.ledger.spare(sorted({one.file for one in self._older.values()}))
            self.removed = tuple(remove_older(self._root, self._older, free))
            self.ledger.removed({self._older[path].file for path in self.removed})

    def finished(self) -> None:
        """End the ledger; leave none in a directory that may have nothing else in it, or is another's."""
        self.flush()
        if self._whole.exclusive:
            self.ledger.move(f"{self._root}.reshard")
        if self._whole.alone:
            self.ledger.dissolve(self._paths)

    def failed(self, error: BaseException, changed: Mapping[int, Status | None]) -> None:
        """Leave what another run can resume from, and note on the error what to type.

        Args:
            error: why the run failed.
            changed: the source files that are not what was opened, by number, and their state now; None of one that is
                gone. What is unfinished is worth nothing then, nor where one was another for a while.
        """
        with suppress(ReshardError):  # a full disk, perhaps: what is not noted is written again
            self.flush()
        is_spoiled = bool(changed) or isinstance(error, ChangedError)
        if is_spoiled or not self.ledger.keeps:
            self._spans = {}
        try:
            states = states_of(self._root, self._paths, self._paths)  # no task of the run writes any more
        except ReshardError:  # the storage cannot be reached, which may be why the run failed
            if not isinstance(error, ChangedError):
                more = "nothing unfinished is kept; start again"
                error.add_note(more if is_spoiled else "what is finished is kept; the same command resumes")
            return
        numbers = range(len(self._paths))
        left = self._each(lambda n: self._leave(n, states.get(self._paths[n]), is_spoiled=is_spoiled), numbers)
        kept = sum(one.nbytes for one in left)
        known = {path for path, one in zip(self._paths, left, strict=True) if one.is_known}
        with suppress(ReshardError):
            self.ledger.add(
                {path: Record(ready=one.ready) for path, one in zip(self._paths, left, strict=True) if one.ready}
            )
            self.ledger.forget([path for path in self._paths if path not in known])
        if is_spoiled:
            if note := self._how_to_start_over(error, changed, known):
                error.add_note(note)
        elif kept:
            written = f"{bytes_text(kept)} of {bytes_text(self._whole.stats.bytes_written)}"
            resumes = f"{written} are written and kept; the same command resumes (with "
            error.add_note(Text(resumes, Option("restart"), " it starts over)"))
        elif isinstance(error, KeyboardInterrupt):
            error.add_note("unfinished files are removed; the same command starts from the beginning")

    def _how_to_start_over(
        self, error: BaseException, changed: Mapping[int, Status | None], known: Collection[str]
    ) -> str:
        """Return what to type where a source changed: files that were made of it before are refused without that."""
        files = list(self._whole.source.files)
        for number, status in changed.items():
            nbytes, mtime_ns = status[:2] if status else (0, 0)
            files[number] = replace(files[number], nbytes=nbytes, mtime_ns=mtime_ns)
        is_refused = False
        if known and not self._overwrite:
            now = file_digests(replace(self._whole, source=replace(self._whole.source, files=tuple(files))))
            new = dict(zip(self._paths, now, strict=True))
            is_refused = any(self._wanted[path].digest != new[path] for path in known)
        option = Text("with ", Option("restart"), ", since files that were made of it before are there")
        if isinstance(error, ChangedError):  # it says the rest itself
            return option if is_refused else ""
        advice = Text("start again ", option) if is_refused else "start again"
        return Text("a source file changed since it was opened, so nothing unfinished is kept; ", advice)

    def close(self) -> None:
        """Give up the files."""
        self.ledger.release()

    def _leave(self, number: int, state: State | None, *, is_spoiled: bool) -> _Left:
        """Leave of a file what another run can use; where it can use nothing, what is unfinished goes."""
        file, path, is_left = self._whole.files[number], self._paths[number], number in self._left
        before, ready = self._seen[path].state, self._ready.get(number)
        keeps = self.ledger.keeps
        if self._early and is_left and state is not None and (is_spoiled or not keeps):
            if state == ready or (not keeps and (before is None or (self._whole.exclusive and state != before))):
                remote_store().discard(f"{self._root}/{path}")  # it got its name before all were complete
                return _Left(is_known=False)
        elif self._early and is_left and ready is None and state not in {None, before}:
            return _Left(0 if file.link else file.layout.content_bytes, ready=state)  # its receipt was not waited for
        if state is not None and state == ready:
            return _Left(0 if file.link else file.layout.content_bytes)
        if number in self._spans:
            return _Left(sum(end - begin for begin, end in self._spans[number]))
        self._discard(number)
        return _Left(
            is_known=state is not None and (not is_left or self._may_be_ours(number, state, is_spoiled=is_spoiled))
        )

    def _may_be_ours(self, number: int, state: State, *, is_spoiled: bool) -> bool:
        """Return whether what has the name of a file that is left was made by an earlier run, or by this one."""
        path = self._paths[number]
        wanted, seen, replaces = self._wanted[path], self._seen[path], self._fates[path].ours
        if state == replaces:
            return True
        if wanted.is_link and state != seen.state:
            return not is_spoiled  # this run made it, and has not noted that yet
        begun = seen.record if wanted.is_link else Record(wanted.digest, wanted.size, replaces=replaces)
        return is_unnoted(wanted, begun, state, early=self._early)

    def _discard(self, number: int) -> None:
        """Remove an unfinished file, and the directories below the target's that are then empty."""
        path = self._paths[number]
        if self._early:
            if self._unfinished(number) != f"{self._root}/{path}":
                remote_store().discard(self._unfinished(number))
            return
        local_store().discard(self._unfinished(number))
        directory = os.path.dirname(f"{self._root}/{path}")
        while len(directory) > len(self._root):  # the target directory itself may have been there before
            with suppress(OSError):  # it holds something else
                os.rmdir(directory)
            directory = os.path.dirname(directory)

    def _refuse(self) -> None:
        """Refuse what this run must not replace."""
        if changed := of(self._fates, Do.CHANGED):
            key = ", or with another key" if self._whole.cipher else ""
            raise TargetError(
                f"{self._root} holds {names(changed, most=3)} of a different run",
                code="other-run",
                facts=[f"it was of another plan{key}, or its sources changed since"],
                hint=Text("to start over, pass ", Option("restart"), "; or choose another target"),
            )
        if there := of(self._fates, Do.UNMANAGED):
            them = "it" if len(there) == 1 else "them"
            raise TargetError(
                f"{self._root} already has {names(there, most=3)}",
                code="already-exists",
                hint=Text(f"to replace {them}, pass ", Option("overwrite"), "; or choose another target"),
            )

    def _sync(self, kept: Iterable[int]) -> None:
        """Have files on the disk that a run without fsync finished."""
        synced = {}
        for number in kept:
            record = self._record(number)
            if record.boot:
                local_store().sync_finished(f"{self._root}/{self._paths[number]}")
                synced[self._paths[number]] = replace(record, boot="")
        self.ledger.add(synced, durable=True)

    def _verified(self, number: int) -> list[Range]:
        """Return the ranges of an unfinished file that still hold what was written."""
        size = self._whole.files[number].layout.size
        path = self._unfinished(number)
        good: list[Range] = []
        with suppress(ReshardError, OSError):
            status = os.lstat(path)
            # One with a second name is not written into but made again (`LocalStore.create`), and its contents are
            # gone.
            if not S_ISREG(status.st_mode) or status.st_size != size or status.st_nlink > 1:
                return []
            for begin, nbytes, crc in self._record(number).ranges:
                if 0 <= begin < begin + nbytes <= size and crc_of_range(local_store(), path, begin, nbytes) == crc:
                    good.append((begin, nbytes, crc))
        return good

    def _begin(self, good: Mapping[int, Sequence[Range]]) -> None:
        """Begin with what is left; what is good of an earlier run stays."""
        if self._early:
            # A set with an index is complete, and soon a file of it is another.
            withdraw(self._root, [self._whole.files[number] for number in self._left])
        else:
            self._check_space()
            for number in self._left:
                resumed = self._unfinished(number) if number in self._spans else None
                for path in self._seen[self._paths[number]].unfinished:
                    if path != resumed:
                        local_store().discard(path)
        wrote = {number: array("Q", [one for some in ranges for one in some]) for number, ranges in good.items()}
        begun = self._records(self._left)
        self.ledger.add({
            path: replace(one, wrote=wrote.get(number, one.wrote))
            for number, (path, one) in zip(self._left, begun.items(), strict=True)
        })  # fmt: skip

    def _records(self, numbers: Iterable[int]) -> dict[str, Record]:
        """Return what is noted of some files of the plan when they are begun, by their paths."""
        records = {}
        headers = _headers(self._whole)
        for file in (self._whole.files[number] for number in numbers):
            wanted, ours = self._wanted[file.path], self._fates[file.path].ours
            rank = file.rank if file.layout.contents or not file.last else None
            header, link = headers.get(file.layout, ""), file.link if file.link in self._wanted else ""
            records[file.path] = Record(
                wanted.digest, wanted.size, replaces=ours, rank=rank, header=header, link=link or ""
            )
        return records

    def _note_kept(self) -> None:
        """Note of files that are kept what they are made of now: a run that made them for another target said other."""
        kept = [number for number in self._numbers(Do.KEEP) if self._record(number).made != self._made]
        known = {self._paths[number]: self._record(number) for number in kept}
        self.ledger.add({
            path: replace(one, wrote=known[path].wrote, ready=known[path].ready, boot=known[path].boot)
            for path, one in self._records(kept).items()
        })  # fmt: skip

    def _check_space(self) -> None:
        needed = 0
        for number in self._left:
            file = self.plan.files[number]
            if file.link is None and not self.plan.encoded(file):  # how large an encoded one is, is not known
                # What is of no use in its unfinished files makes room for it.
                needed += self.plan.size_of(file) - sum(map(_allocated, self._seen[file.path].unfinished))
        free = free_bytes(self._root)
        if needed > free:
            raise BudgetError(
                f"{self._root} has too little room for the target",
                code="no-space",
                facts=[f"the files need {bytes_text(needed)} more; {bytes_text(free)} are free"],
                hint=f"free {bytes_text(needed - free)}, or choose another target",
            )

    def _each(self, function: Callable[[int], T], numbers: Sequence[int]) -> list[T]:
        """Do something with each of some files; at a URL side by side, because each request takes its time."""
        return map_threads(function, numbers, REQUESTS) if self._early else list(map(function, numbers))

    def _numbers(self, do: Do) -> list[int]:
        return [number for number, path in enumerate(self._paths) if self._fates[path].do is do]

    def _unfinished(self, number: int) -> str:
        return unfinished(self._whole, number, self._root)

    def _record(self, number: int) -> Record:
        return self._seen[self._paths[number]].record


def older_at(plan: Plan, root: str) -> dict[str, Older]:
    """Return the files of earlier runs that a run which starts over removes: `beside.older_files`."""
    return older_files(plan, root, digest(made_data(plan)))


def made_data(plan: Plan) -> bytes:
    """Return what a plan makes its files of, for the ledger."""
    from reshard import __version__

    request = plan.request
    selection = request.selection if request else Selection(drop=tuple(map(escape, plan.dropped)))
    target = request.target if request and isinstance(request.target, Strategy) else None
    if any(file.pointer for file in plan.files):  # it describes itself, and not what it has no place for
        target, selection = None, replace(selection, exclude=(*selection.exclude, *map(escape, plan.dropped)))
    stage = request.stage if request else None
    if target is not None and len(target.stages) > 1:
        stage = None  # the strategy says which ranks there are, whatever is written of them
    content = {
        "reshard_made": VERSION,
        "by": __version__,
        "source": source_data(plan.source.opened),
        "target": {
            "strategy": small_strategy(target),
            "stage": stage,
            "format": plan.format,
            "deduplicated": bool(request and request.remove_redundancy),
            "encrypted": plan.cipher is not None,
            "index": next((file.path for file in plan.files if file.last), None),
        },
        "selection": selection_data(selection),
    }
    return json.dumps(content, separators=(",", ":")).encode()


def _headers(plan: Plan) -> dict[FileLayout, str]:
    """Return the digests of the headers of a target that its ledger tells how to read, by their layouts."""
    if not (plan.request and isinstance(plan.request.target, Strategy)):
        return {}
    layouts = {file.layout for file in plan.files}
    return {layout: contents_digest((one.name, one) for one in layout.contents) for layout in layouts}


def _is_complete(plan: Plan, number: int, spans: Spans, root: str) -> bool:
    """Return whether a file that is written in order has all its contents, and all its own bytes."""
    layout = plan.files[number].layout
    path = unfinished(plan, number, root)
    if not all(covers(spans, at, at + n) for content in layout.contents for at, n in content.runs):
        return False
    for offset, content in layout.literals:
        held = bytearray(len(content))
        local_store().read_into(path, offset, memoryview(held))
        if held != content:
            return False
    for begin, nbytes, places in layout.crcs:
        held = bytearray(4 * len(places))
        for at, place in enumerate(places):
            local_store().read_into(path, place, memoryview(held)[4 * at : 4 * at + 4])
        if held != crc_of_range(local_store(), path, begin, nbytes, crc32).to_bytes(4, "little") * len(places):
            return False
    return True


def _spans(good: Iterable[Range]) -> Spans:
    return merged((begin, begin + nbytes) for begin, nbytes, _ in good)


def _allocated(path: str) -> int:
    """Return how many bytes an unfinished file takes that would be free without it."""
    try:
        status = os.lstat(path)
    except OSError:
        return 0
    return status.st_blocks * 512 if status.st_nlink == 1 else 0
