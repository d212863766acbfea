"""What the tasks of a plan's graph do: make the target files, move the bytes, give the files their names.

Each is a function of the plan and of what it shall do of it, carries no arrays and knows nothing of dask; what moves or
makes something returns a receipt. Which task waits for which, and why working tasks may run in any process and twice
even, and those that name files may not, is in `graph`.
"""

from __future__ import annotations

import os
import time
from array import array
from contextlib import contextmanager, suppress
from functools import partial
from heapq import merge
from typing import TYPE_CHECKING, NamedTuple

from reshard.errors import ChangedError, GoneError, SourceError, TargetError
from reshard.plan.partition import whole_files
from reshard.run.engine import Moved, move_pieces
from reshard.run.ledger import in_files, longest, sum_of
from reshard.storage.base import Around, Ordered, Sinks, Summing
from reshard.storage.cipher import store_of
from reshard.storage.crc import CRC32, crc32, crc_of_range
from reshard.storage.local import local_store
from reshard.storage.page_cache import cache_of
from reshard.storage.places import any_store, can, store_at
from reshard.storage.threads import live_runs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from reshard.formats.entries import Crc, FileLayout
    from reshard.plan.plan import Move, Piece, Plan
    from reshard.source.records import Range
    from reshard.storage.base import ReadStore, Sink, Status
    from reshard.targets.destination import TargetFile

SYNC_TASKS = 16
"""Where the page cache is to stay free: the last of so many tasks waits until what they wrote into is on the disk."""

WRITEBACK_FILES = 64
"""Where there are more target files, a task writes too little of each for the disk to begin with it at once."""

_ADJOINED_BYTES = 64 << 10
"""The most of a file's own bytes that are put together to be written at once."""

_ZEROS = memoryview(bytes(1 << 20))


class Receipt(NamedTuple):
    """What a task did.

    Attributes:
        task: `create`, `move`, `close` or `commit`, with its number; where a task writes whole files, `files`.
        read, written: bytes of contents.
        seconds: how long it took.
        wrote, crcs: the ranges that were written, as `Moved` has them.
        ranges: those that a task of whole files wrote: of each the file's number, its begin, bytes and CRC-32C.
        ready: the files that are complete: number, size, and time or version.
    """

    task: str
    read: int
    written: int
    seconds: float
    wrote: array[int] = array("Q")
    crcs: array[int] = array("Q")
    ranges: array[int] = array("Q")
    ready: tuple[tuple[int, int, int], ...] = ()


class How(NamedTuple):
    """How the tasks of a graph do their work.

    Attributes:
        fsync: have every file on the disk before it gets its name.
        drop_cache: leave nothing in the page cache.
        apart: the tasks may run in several processes.
        checksums: sum up what is written.
        crcs: sum it up by CRC-32 as well, because target files carry such sums; a graph sets it.
        cached: `page_cache.cache_of` of the target, where tasks that run apart share it: files are then put on the disk
            when all is written, as by one process, and not by every task that wrote into them.
        run: which run it is; a graph gives itself one.
        seen: a file in the target directory that whoever writes there must see; empty if there is none.
    """

    fsync: bool = True
    drop_cache: bool = False
    apart: bool = False
    checksums: bool = False
    crcs: bool = False
    cached: str = ""
    run: str = ""
    seen: str = ""


@contextmanager
def _working(how: How, directory: str, written: Sequence[str] = ()) -> Iterator[None]:
    """Do the work of a task; where several processes share the files, leave nothing of them in this one.

    What is written goes to the disk if that is asked for, unless a process on the same machine sees to that when all is
    written; or at least to the server of a network file system, which closing sees to. And a file that is held open is
    not the one that gets its name next time.
    """
    live_runs.add(how.run, 1)
    try:
        live_runs.check_cancelled(how.run)
        if how.seen and not os.path.exists(how.seen):  # a worker that came after `check_workers`
            raise TargetError(
                f"{directory} is another directory on a worker, or none",
                code="different-directory", hint="every worker must reach the target by the same path",
            )  # fmt: skip
        yield
        if how.apart and how.fsync and written and not (how.cached and how.cached == cache_of(directory)):
            for path in written:
                local_store().sync(path)
    finally:
        if how.apart:
            local_store().close()
        live_runs.add(how.run, -1)


def create_files(plan: Plan, files: Sequence[int], directory: str, how: How) -> Receipt:
    """Make unfinished target files with the space for them, and write all that is not contents.

    Some of that waits until files are closed: the own bytes of a file that carries sums of its contents, and of one
    that stands last, which must have the latest modification time.
    """
    began = time.perf_counter()
    store = local_store()
    paths = {number: unfinished(plan, number, directory) for number in files}
    written = [path for number, path in paths.items() if not _waits(plan.files[number])]
    with _working(how, directory, written):
        for number, path in paths.items():
            file = plan.files[number]
            sink = store.create(path, None if plan.encoded(file) else file.layout.size)
            if not _waits(file):
                for offset, content in file.layout.literals:
                    sink.write_at(offset, content)
    return Receipt(f"create {files[0]}", 0, 0, time.perf_counter() - began)


def move_task(plan: Plan, number: int, directory: str, how: How, _made: object) -> Receipt:
    """Move the pieces of one task."""
    began = time.perf_counter()
    store = store_of(plan.source.coding)
    sinks = Sinks(partial(_positioned, plan, directory))
    spans = _Spans(store) if how.drop_cache and not how.apart and plan.source.coding is None else None
    with _working(how, directory, _written(plan, [number], directory) if how.apart else ()):
        moved = move_pieces(
            plan,
            plan.tasks[number].pieces,
            spans or store,
            sinks,
            checksums=how.checksums,
            crcs=how.crcs,
            check_cancelled=lambda: live_runs.check_cancelled(how.run),
        )
        if plan.coding:  # whose files are each of one task
            sinks.finish(durable=False)
        if spans:
            spans.drop()
        elif how.drop_cache:
            drop_sources(plan, [plan.moves[piece.move] for piece in plan.tasks[number].pieces], store)
        if how.drop_cache:
            last = number % SYNC_TASKS == SYNC_TASKS - 1
            tasks = range(number + 1 - SYNC_TASKS, number + 1) if last and not how.apart else [number]
            for path in _written(plan, tasks, directory):
                local_store().drop_cache(path, written=True, wait=last or how.apart)
        elif how.fsync and len(plan.files) <= WRITEBACK_FILES:
            for path in _written(plan, [number], directory):
                local_store().start_writeback(path)
    return Receipt(f"move {number}", moved.read, moved.written, time.perf_counter() - began, moved.wrote, moved.crcs)


def unfinished(plan: Plan, number: int, directory: str) -> str:
    """Return the path of a target file until it gets its name: another for each plan that makes other bytes."""
    return store_at(directory).unfinished(f"{directory}/{plan.files[number].path}", plan.digests[number])


def _positioned(plan: Plan, directory: str, number: int) -> Sink:
    """Return what takes the contents of a target file in any order; others may write the same file."""
    sink = partial(local_store().sink, unfinished(plan, number, directory))
    file = plan.files[number]
    if plan.coding and plan.coding.of(file.path):
        return plan.coding.sink(file.path, sink(sized=False))
    return sink(sized=True)


class _Spans(Around):
    """A store that notes what a task reads of each file: the page cache has what is read afterwards beside it."""

    def __init__(self, store: ReadStore) -> None:
        super().__init__(store)
        self._spans: dict[str, tuple[int, int]] = {}

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from a file."""
        self.inner.read_into(path, offset, buffer)
        first, last = self._spans.get(path, (offset, 0))
        self._spans[path] = min(first, offset), max(last, offset + len(buffer))

    def drop(self) -> None:
        """Leave nothing in the page cache from the first byte that was read of a file to the last."""
        for path, (first, last) in self._spans.items():
            self.inner.drop_cache(path, first, last)


def _written(plan: Plan, numbers: Iterable[int], directory: str) -> list[str]:
    """Return the unfinished files that some tasks write."""
    targets = set[int]().union(*(_targets(plan, number) for number in numbers))
    return [unfinished(plan, target, directory) for target in sorted(targets)]


def _targets(plan: Plan, number: int) -> set[int]:
    """Return the files that a task writes; of the many of a zarr array, those that its rows are in."""
    found: set[int] = set()
    for piece in plan.tasks[number].pieces:
        move = plan.moves[piece.move]
        for target, written in enumerate(move.way.writes):
            begin, end = (move.recipe.before(target, move.axis, row) for row in (piece.start, piece.stop))
            if begin < end:
                found.update(at.file for at in written)
    return found


def drop_sources(plan: Plan, moves: Iterable[Move], store: ReadStore) -> None:
    """Leave nothing in the page cache of the source files of some moves, as far as they can still be opened."""
    for file in {at.file for way in {move.way for move in moves} for at in way.reads}:
        with suppress(OSError, SourceError):
            store.drop_cache(plan.source.files[file].path)


def files_task(plan: Plan, number: int, directory: str, how: How) -> Receipt:
    """Write the files of a task, each from its first byte to its last; at a URL what is complete stays."""
    began = time.perf_counter()
    files = plan.tasks[number].files
    part, pieces = whole_files(plan, plan.tasks[number])
    ready: tuple[tuple[int, int, int], ...] = ()
    with _working(how, directory):
        moved = _write_files(part, pieces, files, directory, how)
        if not can(directory).positioned:  # what is complete stays, whatever comes of the others
            ready = tuple(_published(plan, target, directory, how) for target in files)
        if how.drop_cache:
            drop_sources(plan, [part.moves[piece.move] for piece in pieces], any_store())
            for target in files:
                any_store().drop_cache(unfinished(plan, target, directory), written=True)
    found = in_files(part, moved.wrote).items()
    ranges = array("Q", [value for file, written in found for some in written for value in (file, *some)])
    return Receipt(
        f"files {number}", moved.read, moved.written, time.perf_counter() - began, ranges=ranges, ready=ready
    )


def _published(plan: Plan, number: int, directory: str, how: How) -> tuple[int, int, int]:
    """Give a file its name, and return its number and state: as the store has it, asked for it alone."""
    path, store = f"{directory}/{plan.files[number].path}", store_at(directory)
    store.publish(unfinished(plan, number, directory), path, durable=how.fsync)
    return (number, *store.status(path)[:2])


def check_sources(plan: Plan, _moved: object) -> list[Receipt]:
    """Refuse to finish what was read from files that changed meanwhile.

    Raises:
        ChangedError: a source file is not what was opened.
    """
    for number, status in _statuses(plan).items():
        file = plan.source.files[number]
        if isinstance(status, GoneError):
            raise ChangedError(
                f"{file.path} is gone since it was opened", code="source-gone", facts=[str(status)], hint="start again"
            )
        if isinstance(status, SourceError):
            raise status
        if not status.is_still(file.status):
            only = status[:2] == file.status[:2]
            how = ["its size and time are as they were; its contents, links, owner or rights are not"] if only else []
            raise ChangedError(
                f"{file.path} changed since it was opened", code="source-changed", facts=how, hint="start again"
            )
    return []


def changed_sources(plan: Plan) -> dict[int, Status | None]:
    """Return the source files that are not what was opened, by number: their state now; None of one that is gone.

    One that cannot be asked is not said to have changed: storage that is out of reach comes back.
    """
    changed: dict[int, Status | None] = {}
    for number, status in _statuses(plan).items():
        file = plan.source.files[number]
        if isinstance(status, GoneError):
            changed[number] = None
        elif not isinstance(status, SourceError) and not status.is_still(file.status):
            changed[number] = status
    return changed


def _statuses(plan: Plan) -> dict[int, Status | SourceError]:
    """Return the state of each source file that is read, by number."""
    numbers = plan.read_files()
    found = any_store().statuses([plan.source.files[number].path for number in numbers])
    return dict(zip(numbers, found, strict=True))


def crcs_of_files(plan: Plan, receipts: Iterable[Receipt]) -> dict[int, list[Range]]:
    """Return what receipts say of CRC-32 sums, by the number of the file: ranges."""
    found: dict[int, list[Range]] = {}
    for receipt in receipts:
        for file, some in in_files(plan, receipt.crcs).items():
            found.setdefault(file, []).extend(some)
    return found


def _waits(file: TargetFile) -> bool:
    """Return whether the bytes of a file that are not contents are written when it is closed."""
    return file.last or bool(file.layout.crcs)


def close_files(
    plan: Plan,
    files: Sequence[int],
    directory: str,
    how: How,
    crcs: Mapping[int, Sequence[Range]],
    _before: object,
) -> Receipt:
    """Complete local target files, before any gets its name, and have them on the disk: naming all is quick then.

    What has waited (see `create_files`) is written here, with the sums of contents, which are combined from those of
    ranges. In a plan by file, only files that stand last are left to be written.
    """
    began = time.perf_counter()
    ready = []
    with _working(how, directory):
        for number in files:
            file, path = plan.files[number], unfinished(plan, number, directory)
            if not plan.by_file:
                _complete(path, file, crcs.get(number, ()), how)
            elif file.last:
                write_literals(plan, number, directory, sync=how.fsync)
            ready.append((number, *local_store().status(path)[:2]))
    return Receipt(f"close {files[0]}", 0, 0, time.perf_counter() - began, ready=tuple(ready))


def _complete(path: str, file: TargetFile, known: Iterable[Range], how: How) -> None:
    """Write what has waited of a file, and sync it unless the tasks that wrote it did."""
    store, waits = local_store(), _waits(file)
    if waits:
        sink, layout = store.sink(path, sized=True), file.layout
        for offset, content in _adjoined(merge(layout.literals, _crcs(path, layout.crcs, known))):
            sink.write_at(offset, content)
    if waits or how.cached or not how.apart:
        if how.drop_cache:
            store.drop_cache(path, written=True)
        if how.fsync:
            store.sync(path)


def _crcs(path: str, crcs: Iterable[Crc], known: Iterable[Range]) -> Iterator[tuple[int, bytes]]:
    """Yield the CRC-32 sums that a file carries, with their offsets.

    A range that receipts do not cover, because an earlier run wrote some of it, is read.
    """
    wrote = longest(known)
    for begin, nbytes, places in crcs:
        value = sum_of([(begin, nbytes)], wrote, CRC32.polynomial)
        if value is None:
            value = crc_of_range(local_store(), path, begin, nbytes, crc32)
        for place in places:
            yield place, value.to_bytes(4, "little")


def _adjoined(pieces: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Join short pieces of a file that follow each other, to write them at once; they come in the order of offsets."""
    begin, end, some = 0, 0, list[bytes]()
    for offset, content in pieces:
        if some and (offset != end or end - begin + len(content) > _ADJOINED_BYTES):
            yield begin, b"".join(some)
            some = []
        if not some:
            begin = offset
        some.append(content)
        end = offset + len(content)
    if some:
        yield begin, b"".join(some)


def commit_files(plan: Plan, files: Sequence[int], directory: str, how: How, _ready: object) -> Receipt:
    """Give complete target files their names; make links, and at URLs what stands last.

    Of a zarr store by file that is all metadata, which no task writes: those of the group are the last.
    """
    began = time.perf_counter()
    store, positioned = store_at(directory), can(directory).positioned
    ready: list[tuple[int, int, int]] = []
    for number in files:
        file = plan.files[number]
        if file.link is not None:
            store.link(os.path.join(directory, file.link), unfinished(plan, number, directory))
        elif not positioned:
            write_literals(plan, number, directory, sync=how.fsync)
        if positioned and file.link is None:
            store.publish(unfinished(plan, number, directory), f"{directory}/{file.path}", durable=how.fsync)
        else:  # it is noted once it has its name
            ready.append(_published(plan, number, directory, how))
    return Receipt(f"commit {files[0]}", 0, 0, time.perf_counter() - began, ready=tuple(ready))


def withdraw_index(plan: Plan, directory: str, _ready: object) -> list[Receipt]:
    """Remove the index that is to be replaced, before the first of its files is: a set with an index is complete."""
    withdraw(directory, [file for file in plan.files if not file.done])
    return []


def withdraw(directory: str, files: Iterable[TargetFile]) -> None:
    """Remove the indexes among some files, and a pointer to what is replaced; one to another checkpoint stays."""
    for file in files:
        path = f"{directory}/{file.path}"
        if file.last and not (file.pointer and _is_of_another(path, file.layout)):
            store_at(directory).remove(path)


def _is_of_another(path: str, layout: FileLayout) -> bool:
    """Return whether a file has other contents than it is to have."""
    held = bytearray(layout.size)
    try:
        if any_store().size(path) != layout.size:
            return True
        any_store().read_into(path, 0, memoryview(held))
    except SourceError:  # it is not there
        return False
    return [(0, bytes(held))] != list(layout.literals)


def _write_files(plan: Plan, pieces: Sequence[Piece], files: Sequence[int], directory: str, how: How) -> Moved:
    """Write some files in the order of their bytes; nothing of them is left where that fails.

    What stands in a file before and between the contents (its header, the heads of its messages, zeros of a chunk at
    the edge, the index of a shard) waits in the file's sink for its turn, so that nothing is written twice.

    A checkpoint file takes its contents in its own order. Of a zarr store, whose files are small and many, bytes come
    row by row: a file is begun when its first byte comes and ends with its last one, so that only those that some rows
    meet are open at a time; in a shard, bytes of a later chunk wait for those before them.

    Raises:
        SourceError: a source file ends early, cannot be read or changed.
        TargetError, BudgetError: a target file cannot be written.
    """
    sinks = Sinks(lambda number: _sink(plan, number, directory))
    try:
        sinks.open(files)
        moved = move_pieces(
            plan,
            pieces,
            store_of(plan.source.coding),
            sinks,
            checksums=how.checksums,
            in_order=True,
            check_cancelled=lambda: live_runs.check_cancelled(how.run),
        )
        if not plan.exclusive:  # a store is not complete without its group, and the graph looks before that is written
            check_sources(plan, None)
        sinks.finish(durable=how.fsync)
    except BaseException:
        sinks.abort()
        for number in sinks.ended:  # others may have the name, where files appear whole, of one that is to be replaced
            store_at(directory).discard(unfinished(plan, number, directory))
        raise
    return moved


def write_literals(plan: Plan, number: int, directory: str, *, sync: bool) -> None:
    """Write a file that has no contents of tensors, such as the index of a set."""
    sink = _sink(plan, number, directory)
    try:
        sink.finish(durable=sync)
    except BaseException:
        sink.abort()
        raise


def _sink(plan: Plan, number: int, directory: str) -> Sink:
    """Return what takes the contents of a target file in about their order."""
    file, layout = plan.files[number], plan.files[number].layout
    path, size = f"{directory}/{file.path}", plan.size_of(file)

    def create() -> Sink:
        made = store_at(directory).create(unfinished(plan, number, directory), size)
        return Summing(made, layout.crcs, crc32) if layout.crcs else made

    def begin() -> Sink:
        if plan.cipher is None:
            return create()
        return plan.cipher.sink(create() if can(directory).positioned else Ordered(create, path, size))

    if plan.coding and plan.coding.of(file.path):
        return plan.coding.sink(file.path, Ordered(begin, path, None))
    ends = plan.exclusive and bool(layout.contents)
    ordered = Ordered(begin, path, layout.size, room=layout.size if ends else 0, ends=ends)
    constant: list[tuple[int, bytes | memoryview]] = [*layout.literals, *_zeros(layout)]
    for offset, content in constant:
        ordered.write_at(offset, content)
    return ordered


def _zeros(layout: FileLayout) -> Iterator[tuple[int, memoryview]]:
    """Yield the zeros of a file where neither contents come nor its own bytes are: offset, and up to a MB of them."""
    known = [(offset, len(content)) for offset, content in layout.literals]
    known += [run for content in layout.contents for run in content.runs]
    end = 0
    for start, nbytes in sorted([*known, (layout.size, 0)]):
        for begin in range(end, start, len(_ZEROS)):
            yield begin, _ZEROS[: start - begin]
        end = start + nbytes
