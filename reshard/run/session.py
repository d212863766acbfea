"""One run's hold on its target files: what an earlier run left of them, what this one writes, what it leaves.

A file is one of four: *finished* as this run would make it; *begun* by a run of the same plan from the same sources,
so that what is written of it need not be written again; *foreign*, which is refused unless it may be replaced; or not
there.

What is kept of unfinished files, and where names are given, depends on the storage: see `journal` and `remote_journal`.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from reshard.errors import BudgetError, ChangedError, Option, ReshardError, TargetError, Text, names
from reshard.plan.fingerprint import changes_digest, file_digests
from reshard.plan.partition import group_plan
from reshard.plan.remaining import bytes_left, covers, joined, remaining
from reshard.run.journal import Journal
from reshard.run.receipts import in_files
from reshard.run.remote_journal import RemoteJournal, journal_at
from reshard.run.target_check import check_target
from reshard.storage.base import PARTIAL
from reshard.storage.local import local_store
from reshard.storage.places import RemotePath, is_url
from reshard.storage.remote import REQUESTS
from reshard.storage.threads import results

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from reshard.plan.plan import Plan
    from reshard.plan.remaining import Spans
    from reshard.run.journal import Range, Record
    from reshard.run.tasks import Receipt
    from reshard.storage.base import Status

FLUSH_SECONDS = 1.0
"""How long receipts wait before they are noted: what is lost of them with the process is written again."""

T = TypeVar("T")


class Found(NamedTuple):
    """What is there of the files that a plan writes.

    Attributes:
        finished: the files that an earlier run finished, by number.
        unsynced: those of them that it did not sync.
        touched: those of them that were made when the source files, though of the same size and time, had not been
            touched or copied as since.
        begun: those that one began, with what their journals say.
        ours: size and time of files that earlier runs finished, of this plan or another.
        changed: paths of those that this plan would not make so.
        foreign: paths of what else has their names.
    """

    finished: Collection[int] = ()
    unsynced: Sequence[int] = ()
    touched: Sequence[int] = ()
    begun: Sequence[tuple[int, Record]] = ()
    ours: Mapping[int, tuple[int, int]] = MappingProxyType({})
    changed: Sequence[str] = ()
    foreign: Sequence[str] = ()


def foreseen(plan: Plan, root: str, *, overwrite: bool, restart: bool) -> Found:
    """Return what a run would find of its target files now; nothing is taken or changed.

    Locks of other runs, and room on the disk, are seen by the run alone.

    Raises:
        TargetError: no run may write there (`check_target`), or the journals are behind a link.
        SourceError: the target's storage cannot be reached.
    """
    root = root if is_url(root) else os.path.realpath(root)
    check_target(plan, root)
    paths = [file.path for file in plan.files]
    if plan.alone and is_url(root):  # without a journal
        return Found(foreign=() if overwrite or restart else RemotePath(root).existing(paths))
    journal = journal_at(root, alone=plan.alone)
    if isinstance(journal, Journal):
        journal.refuse_link()
    journal.look(paths)
    if not any(journal.found(path) or journal.read(path).digest for path in paths):
        return Found()  # digests of a large plan take long
    return _sorted_out(plan, journal, file_digests(plan), overwrite=overwrite, restart=restart)


class Session:
    """The target files of one run.

    Attributes:
        plan: what is left to do.
        resumed: bytes of contents that an earlier run wrote, of those that the whole plan writes.
        touched: how many finished files are kept of `Found.touched`.
    """

    def __init__(self, plan: Plan, root: str, *, overwrite: bool, restart: bool, threads: int, fsync: bool) -> None:
        """Take the files, and look at what is there; with `fsync`, have what is finished on the disk.

        Raises:
            TargetError: another run writes one of the files; or one is there that this run must not replace.
            SourceError: the target's storage cannot be reached.
            BudgetError: the disk has no room for what is left.
        """
        self._whole, self._root, self._overwrite = plan, root, overwrite
        self._journal = journal_at(root, alone=plan.alone)
        try:
            self._journal.lock([file.path for file in plan.files])
            self._digests, self._sources = file_digests(plan), changes_digest(plan)
            there = self._accepted(overwrite=overwrite, restart=restart)
            self._ours, begun, self.touched = there.ours, there.begun, len(there.touched)
            if fsync:
                self._sync(there.unsynced)
            found = results(self._verified, begun, max(threads, 1))
            self._good: dict[int, list[Range]] = {
                number: good for (number, _), good in zip(begun, found, strict=True) if good
            }
            local_store().close()  # what was read is written next
            written = {number: _spans(good) for number, good in self._good.items()}
            complete = [
                number for number in written if plan.groups and _is_complete(plan, number, written[number], root)
            ]
            self.plan = remaining(plan, there.finished, written, complete)
            # Links are made before that is noted; what is there now was not made by this run.
            self._before = {n: self._journal.found(file.path) for n, file in enumerate(plan.files) if file.link}
            self._left = [number for number, file in enumerate(self.plan.files) if not file.done]
            if not is_url(root):
                self._check_space()
            self._begin()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                error.add_note("nothing is written yet but what an earlier run left; the same command resumes")
            self._journal.unlock()
            raise
        self.resumed = 0 if self.plan is plan else plan.stats.bytes_written - bytes_left(self.plan)
        self._noted: dict[int, list[Range]] = {}
        self._flushed = time.monotonic()

    def note(self, receipt: Receipt) -> None:
        """Remember what a task wrote."""
        if receipt.wrote and not self._journal.early:
            kind, _, number = receipt.task.partition(" ")
            plan = group_plan(self.plan, self.plan.groups[int(number)]) if kind == "files" else self.plan
            for file, written in in_files(plan, receipt.wrote).items():
                self._noted.setdefault(file, []).extend(written)
        if time.monotonic() - self._flushed >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write down what is remembered."""
        for file, noted in self._noted.items():
            self._journal.wrote(self._path(file), noted)
            self._good.setdefault(file, []).extend(noted)
        self._noted = {}
        self._flushed = time.monotonic()

    def finished(self) -> None:
        """End the journals; of a directory that may have nothing else in it, leave none."""
        self.flush()
        if self._whole.alone:
            for file in self._whole.files:
                self._journal.forget(file.path)

    def failed(self, error: BaseException, changed: Mapping[int, Status | None]) -> None:
        """Leave what another run can go on from, and tell in a note of the error what to type.

        Args:
            error: why the run failed.
            changed: the source files that are not what was opened, by number, and their state now; None of one that is
                gone. What is unfinished is worth nothing then, nor where one was another for a while.
        """
        with suppress(ReshardError):  # a full disk, perhaps: what is not noted is written again
            self.flush()
        spoiled = bool(changed) or isinstance(error, ChangedError)
        if spoiled:
            self._good = {}
        try:
            self._journal.look([file.path for file in self._whole.files])
        except ReshardError:  # the storage cannot be reached, which may be why the run failed
            if not isinstance(error, ChangedError):
                more = "nothing unfinished is kept; start again"
                error.add_note(more if spoiled else "what is finished is kept; the same command resumes")
            return
        kept = sum(self._each(lambda number: self._kept(number, spoiled=spoiled), range(len(self._whole.files))))
        if spoiled:
            if note := self._how_to_begin_anew(error, changed):
                error.add_note(note)
        elif kept:
            error.add_note(
                Text(
                    f"{kept} of {self._whole.stats.bytes_written} bytes are written and kept; the same command "
                    "resumes (with ", Option("restart"), " it starts over)",
                )
            )  # fmt: skip
        elif isinstance(error, KeyboardInterrupt):
            error.add_note("unfinished files are removed; the same command starts from the beginning")

    def _how_to_begin_anew(self, error: BaseException, changed: Mapping[int, Status | None]) -> str:
        """Tell what to type where a source changed: files that were made of it before are refused without an option."""
        files = list(self._whole.source.files)
        for number, status in changed.items():
            nbytes, mtime_ns = status[:2] if status else (0, 0)
            files[number] = replace(files[number], nbytes=nbytes, mtime_ns=mtime_ns)
        now = file_digests(replace(self._whole, source=replace(self._whole.source, files=tuple(files))))
        held = [self._journal.read(file.path).digest for file in self._whole.files]
        refused = not self._overwrite and any(old not in {"", new} for old, new in zip(held, now, strict=True))
        option = Text("with ", Option("restart"), ", since files that were made of it before are there")
        if isinstance(error, ChangedError):  # it says the rest itself
            return option if refused else ""
        advice = Text("start again ", option) if refused else "start again"
        return Text("a source file changed since it was opened, so nothing unfinished is kept; ", advice)

    def close(self) -> None:
        """Give up the files."""
        self._journal.unlock()

    def _kept(self, number: int, *, spoiled: bool) -> int:
        """Return how many bytes of a file's contents another run can use; discard the file where it can use none."""
        file = self._whole.files[number]
        record, found = self._journal.read(file.path), self._journal.found(file.path)
        if found and found == record.ready:
            if spoiled and isinstance(self._journal, RemoteJournal) and number in self._left:
                with suppress(ReshardError):  # it got its name before all were complete
                    self._journal.remove(file.path)
                return 0
            return 0 if file.link else file.layout.content_bytes
        if number in self._good:
            return sum(end - begin for begin, end in _spans(self._good[number]))
        self._journal.discard(file.path)
        made = file.link is not None and found is not None and found != self._before[number]
        if made and record.digest == self._digests[number] and not spoiled:
            return 0  # and not noted yet
        if found is None or not (found == record.replaces or _is_unnoted(self._journal, record, found)):
            self._journal.forget(file.path)
        return 0

    def _accepted(self, *, overwrite: bool, restart: bool) -> Found:
        """Return what is there; refuse what this run must not replace."""
        there = _sorted_out(self._whole, self._journal, self._digests, overwrite=overwrite, restart=restart)
        if there.changed:
            verb = "was" if len(there.changed) == 1 else "were"
            raise TargetError(
                Text(
                    f"{self._root}: {names(there.changed, most=3)} {verb} written by a run of another plan, or from "
                    "sources that changed since; start over with ",
                    Option("restart"),
                    ", or choose another target",
                )
            )
        if there.foreign:
            raise exists(self._root, there.foreign)
        return there

    def _sync(self, finished: Iterable[int]) -> None:
        """Have files on the disk that a run without fsync finished."""
        for file in map(self._path, finished):
            path = f"{self._root}/{file}"
            local_store().sync_finished(path)
            self._journal.ready(file, path, sync=True)

    def _verified(self, begun: tuple[int, Record]) -> list[Range]:
        file = self._whole.files[begun[0]]
        return self._journal.verified(file.path, begun[1], file.layout.size)

    def _path(self, number: int) -> str:
        return self._whole.files[number].path

    def _check_space(self) -> None:
        place = self._root
        while not os.path.isdir(place):
            place = os.path.dirname(place)
        status = os.statvfs(place)
        needed = 0
        for number in self._left:
            file = self.plan.files[number]
            if file.link is None and not self.plan.coded(file):  # how large a coded one is, is not known
                # What is of no use in its unfinished file makes room for it.
                needed += file.layout.size - _allocated(f"{self._root}/{file.path}")
        free = status.f_bavail * status.f_frsize
        if needed > free:
            raise BudgetError(
                f"{self._root}: the target files take {needed} bytes more, and {free} are free; free space or choose "
                "another target"
            )

    def _begin(self) -> None:
        """Begin the journals of what is left; what is good of an earlier run stays."""
        self._each(self._begin_file, self._left)

    def _each(self, function: Callable[[int], T], numbers: Iterable[int]) -> list[T]:
        """Do something with each of some files; at a URL side by side, because each request takes its time."""
        if not is_url(self._root):
            return list(map(function, numbers))
        return results(function, list(numbers), REQUESTS)

    def _begin_file(self, number: int) -> None:
        file = self.plan.files[number]
        if isinstance(self._journal, RemoteJournal):
            if file.last:  # a set with an index is complete, and soon the first of its files is another
                self._journal.remove(file.path)
        elif number not in self._good:
            local_store().discard(local_store().unfinished(f"{self._root}/{file.path}"))
        self._journal.begin(
            file.path,
            self._digests[number],
            file.layout.size,
            wrote=self._good.get(number, ()),
            replaces=self._ours.get(number),
            sources=self._sources,
        )


def _sorted_out(
    plan: Plan, journal: Journal | RemoteJournal, wanted: Sequence[str], *, overwrite: bool, restart: bool
) -> Found:
    """Return what is there of a plan's files, whose digests are `wanted`."""
    finished, unsynced, touched, begun, ours, changed, foreign = set(), [], [], [], {}, [], []
    sources = changes_digest(plan)
    for number, file in enumerate(plan.files):
        record = journal.read(file.path)
        state = journal.found(file.path)
        same = record.digest == wanted[number]
        is_touched = same and "" not in {sources, record.sources} and sources != record.sources
        # A link is made before that is noted, and so are all files at URLs.
        unnoted = same and state is not None and _is_unnoted(journal, record, state)
        linked = unnoted or (same and file.link is not None and record.ready is None)
        if is_ours := state is not None and state in {record.ready, record.replaces}:
            ours[number] = state
        if is_ours and same and state == record.ready and not (record.may_be_lost or restart):
            finished.add(number)
            if record.boot:
                unsynced.append(number)
            if is_touched:
                touched.append(number)
        elif state and not is_ours and not overwrite and not linked:
            foreign.append(file.path)
        elif restart or (overwrite and not same):
            continue
        elif same:
            if not is_touched:  # or a file might have blocks of two sources
                begun.append((number, record))
        elif is_ours or (record.digest and journal.is_begun(file.path)):
            changed.append(file.path)
    if len(finished) < len(plan.files):  # a set with an index is complete: it is withdrawn, and made anew at the end
        finished -= {number for number, file in enumerate(plan.files) if file.last}
        unsynced = [number for number in unsynced if number in finished]
        touched = [number for number in touched if number in finished]
    return Found(finished, unsynced, touched, begun, ours, changed, foreign)


def _is_unnoted(journal: Journal | RemoteJournal, record: Record, state: tuple[int, int]) -> bool:
    """Return whether a file at a URL may have got its name from a run that ended before it could note that."""
    return journal.early and record.ready is None and state != record.replaces and state[0] == record.size


def exists(root: str, files: Sequence[str]) -> TargetError:
    """Return the error that target files exist."""
    return TargetError(
        Text(
            f"{root}: has {names(files, most=3)} already; choose another target directory, or replace "
            f"{'it' if len(files) == 1 else 'them'} with ",
            Option("overwrite"),
        )
    )


def _is_complete(plan: Plan, number: int, spans: Spans, root: str) -> bool:
    """Return whether a file that is written in order has all its contents, and all its own bytes."""
    layout = plan.files[number].layout
    path = f"{root}/{plan.files[number].path}{PARTIAL}"
    if not all(covers(spans, at, at + n) for content in layout.contents for at, n in content.runs):
        return False
    for offset, content in layout.literals:
        held = bytearray(len(content))
        local_store().read_into(path, offset, memoryview(held))
        if held != content:
            return False
    return True


def _spans(good: Iterable[Range]) -> Spans:
    return joined((begin, begin + nbytes) for begin, nbytes, _ in good)


def _allocated(path: str) -> int:
    """Return how many bytes an unfinished file takes that would be free without it."""
    try:
        status = os.lstat(path + PARTIAL)
    except OSError:
        return 0
    return status.st_blocks * 512 if status.st_nlink == 1 else 0
