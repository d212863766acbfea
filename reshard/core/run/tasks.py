"""Implement the tasks of a graph: create files, move bytes, name files.

Each task is a function of the plan and its part of the work; it carries no arrays, and does not depend on dask. Tasks
that move or create something return a receipt. `graph` says which task waits for which, and why working tasks may run
in any process, even twice, and tasks that name files may not.
"""

from __future__ import annotations

import os
from array import array
from contextlib import contextmanager, suppress
from functools import partial
from heapq import merge
from typing import TYPE_CHECKING

from reshard.core.model.entries import merged
from reshard.core.plan.partition import whole_files
from reshard.core.plan.uploads.copies import needed_pieces
from reshard.core.plan.uploads.sending import reserve
from reshard.core.run.clusters.waking import wake_after_losses
from reshard.core.run.engine import Moved, move_pieces
from reshard.core.run.settings import Receipt, TaskOptions, timed
from reshard.core.run.state.sums import in_files, longest, sum_of
from reshard.core.run.state.unchanged import check_sources
from reshard.core.run.state.uploads import uploads_of
from reshard.core.storage.cipher import store_of
from reshard.core.storage.crc import CRC32, crc32, crc_of_range
from reshard.core.storage.local import local_store
from reshard.core.storage.page_cache import ReadSpans, cache_of
from reshard.core.storage.places import any_store, can, store_at
from reshard.core.storage.sinks import Ordered, Sinks, Summing
from reshard.core.storage.threads import live_runs
from reshard.core.storage.urls.remote import remote_store
from reshard.errors import SourceError, TargetError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from reshard.core.model.entries import Crc, FileLayout
    from reshard.core.plan.plan import Piece, Plan, Transfer
    from reshard.core.records.logs import Range
    from reshard.core.storage.base import ReadStore, Sink
    from reshard.core.storage.urls.s3.upload_parts import Upload
    from reshard.core.target import TargetFile
    from reshard.expressions.assigned import Key

SYNC_TASKS = 16
"""With `drop_cache`, one of this many tasks waits until the files of all of them are on the disk."""

WRITEBACK_FILES = 64
"""Up to this number of target files, each task starts writeback; with more, it writes too little to each to help."""

_ADJOINED_BYTES = 64 << 10
"""The most bytes of literals and sums that are joined into one write."""

_ZEROS = memoryview(bytes(1 << 20))


@contextmanager
def _working(options: TaskOptions, directory: str, written: Iterable[str] = ()) -> Iterator[None]:
    """Enter a task; if several processes share the files, close them afterwards.

    With `fsync`, written files are synced, unless a process on the same machine syncs them when all is written. Closing
    sends the bytes to the server of a network file system. Also, a handle left open would still point to the old file
    after a later run replaces it.
    """
    if options.wakes:
        wake_after_losses()
    live_runs.add(options.run, 1)
    try:
        live_runs.check_cancelled(options.run)
        if options.sentinel and not os.path.exists(options.sentinel):  # a worker that joined after `check_workers`
            raise TargetError(
                f"{directory} is another directory on a worker, or none",
                code="different-directory", hint="every worker must reach the target by the same path",
            )  # fmt: skip
        yield
        is_synced_later = options.cached and options.cached == cache_of(directory)
        if options.multi_process and options.fsync and not is_synced_later:
            for path in written:
                local_store().sync(path)
    finally:
        if options.multi_process:
            local_store().close()
        live_runs.add(options.run, -1)


@timed
def create_files(plan: Plan, files: Sequence[int], directory: str, options: TaskOptions) -> Receipt:
    """Create unfinished target files, allocate their space, and write their literals.

    Files with checksums of their contents, and files published last (they need the latest modification time), get
    their literals when they are closed.
    """
    store = local_store()
    paths = {number: unfinished(plan, number, directory) for number in files}
    written = [path for number, path in paths.items() if not _waits(plan.files[number])]
    with _working(options, directory, written):
        for number, path in paths.items():
            file = plan.files[number]
            sink = store.create(path, None if plan.encoded(file) else file.layout.size)
            if not _waits(file):
                for offset, content in file.layout.literals:
                    sink.write_at(offset, content)
    return Receipt(f"create {files[0]}", 0, 0)


@timed
def move_task(
    plan: Plan,
    number: int,
    directory: str,
    options: TaskOptions,
    _made: object,
    keys: Sequence[Key] = (),
    chunks: Sequence[object] = (),
) -> Receipt:
    """Move the pieces of one task; it needs these chunks of assigned arrays."""
    if keys:
        from reshard.expressions.assigned import given  # rarely needed

        with given(dict(zip(keys, chunks, strict=True))):
            return move_task(plan, number, directory, options, _made)
    reserve(plan, directory)
    store = store_of(plan.source.coding)
    sinks = Sinks(partial(_positioned, plan, directory))
    drops_spans = options.drop_cache and not (options.multi_process or plan.source.coding)
    spans = ReadSpans(store) if drops_spans else None
    with _working(options, directory, _paths(plan, sinks, directory)):
        for part in options.prefetch.ranges(number) if options.prefetch else ():
            live_runs.check_cancelled(options.run)
            store.prefetch(*part)
        moved = move_pieces(
            plan,
            plan.tasks[number].pieces,
            spans or store,
            sinks,
            checksums=options.checksums,
            crcs=options.crcs,
            check_cancelled=lambda: live_runs.check_cancelled(options.run),
        )
        if plan.coding:  # each file is written by one task
            sinks.finish(durable=False)
        if spans:
            spans.drop()
        elif options.drop_cache:
            drop_sources(plan, [plan.transfers[piece.transfer] for piece in plan.tasks[number].pieces], store)
        if options.drop_cache:
            last = number % SYNC_TASKS == SYNC_TASKS - 1
            tasks = range(number + 1 - SYNC_TASKS, number + 1) if last and not options.multi_process else [number]
            for path in _written(plan, tasks, directory):
                local_store().drop_cache(path, written=True, wait=last or options.multi_process)
        elif options.fsync and len(plan.files) <= WRITEBACK_FILES:
            for path in _paths(plan, sinks, directory):
                local_store().start_writeback(path)
    return Receipt(f"move {number}", *moved[:2], 0.0, *moved[2:])


def unfinished(plan: Plan, number: int, directory: str) -> str:
    """Return the temporary path of a target file, named after `plan.digests[number]`."""
    return store_at(directory).unfinished(f"{directory}/{plan.files[number].path}", plan.digests[number])


def _positioned(plan: Plan, directory: str, number: int) -> Sink:
    """Return a sink for writes in any order to a file that tasks may share."""
    sink = partial(local_store().sink, unfinished(plan, number, directory))
    file = plan.files[number]
    if plan.coding and plan.coding.of(file.path):
        return plan.coding.sink(file.path, sink(sized=False))
    return sink(sized=True)


def _paths(plan: Plan, sinks: Sinks, directory: str) -> Iterator[str]:
    """Yield the unfinished paths of the files that a task has written into."""
    yield from (unfinished(plan, file, directory) for file in sorted(sinks.ended.union(sinks)))


def _written(plan: Plan, numbers: Iterable[int], directory: str) -> list[str]:
    """Return the unfinished paths that tasks write; of a zarr array, only the files of their rows."""
    files: set[int] = set()
    for piece in (piece for number in numbers for piece in plan.tasks[number].pieces):
        transfer = plan.transfers[piece.transfer]
        before = partial(transfer.recipe.elements_before, axis=transfer.axis)
        for target, written in enumerate(transfer.route.writes):
            if before(target, row=piece.start) < before(target, row=piece.stop):
                files.update(at.file for at in written)
    return [unfinished(plan, file, directory) for file in sorted(files)]


def drop_sources(plan: Plan, transfers: Iterable[Transfer], store: ReadStore) -> None:
    """Evict the source files of transfers from the page cache; ignore errors."""
    for file in {at.file for route in {transfer.route for transfer in transfers} for at in route.reads}:
        with suppress(OSError, SourceError):
            store.drop_cache(plan.source.files[file].path)


@timed
def files_task(plan: Plan, number: int, directory: str, options: TaskOptions) -> Receipt:
    """Write the files of a task in the order of their bytes; at URLs, publish them."""
    reserve(plan, directory)
    files = plan.tasks[number].files
    part, pieces = whole_files(plan, plan.tasks[number])
    ready: tuple[tuple[int, int, int], ...] = ()
    uploads = uploads_of(plan, files, directory)
    if any(upload.skips for upload in uploads.values()):
        pieces = needed_pieces(part, pieces, {number: merged(upload.skips) for number, upload in uploads.items()})
    with _working(options, directory):
        moved = _write_files(part, pieces, files, directory, options, uploads)
        if not can(directory).positioned:  # complete files stay, even if other tasks fail
            ready = tuple(_published(plan, target, directory, options) for target in files)
        if options.drop_cache:
            drop_sources(plan, [part.transfers[piece.transfer] for piece in pieces], any_store())
            for target in files:
                any_store().drop_cache(unfinished(plan, target, directory), written=True)
    by_file = in_files(part, moved.crc32c_ranges).items()
    ranges = array("Q", [value for file, written in by_file for span in written for value in (file, *span)])
    copied = sum(upload.copied_bytes for upload in uploads.values())
    kept = sum(upload.kept_bytes for upload in uploads.values())
    return Receipt(f"files {number}", *moved[:2], file_ranges=ranges, ready=ready, bytes_copied=copied, bytes_kept=kept)


def _published(plan: Plan, number: int, directory: str, options: TaskOptions) -> tuple[int, int, int]:
    """Give a file its name; return its number, size, and time or version, from a status request for it alone."""
    path, store = f"{directory}/{plan.files[number].path}", store_at(directory)
    store.publish(unfinished(plan, number, directory), path, durable=options.fsync)
    return (number, *store.status(path)[:2])


def crcs_of_files(plan: Plan, receipts: Iterable[Receipt]) -> dict[int, list[Range]]:
    """Return the ranges with CRC-32 sums in receipts, by file number."""
    by_file: dict[int, list[Range]] = {}
    for receipt in receipts:
        for file, spans in in_files(plan, receipt.crc32_ranges).items():
            by_file.setdefault(file, []).extend(spans)
    return by_file


def _waits(file: TargetFile) -> bool:
    """Return whether the literals of a file are written when it is closed."""
    return file.publish != "file" or bool(file.layout.crcs)


@timed
def close_files(
    plan: Plan,
    files: Sequence[int],
    directory: str,
    options: TaskOptions,
    crcs: Mapping[int, Sequence[Range]],
    _before: object,
) -> Receipt:
    """Complete and sync local target files before any gets its name.

    Delayed literals (see `create_files`) are written here, with the sums of contents, which are combined from sums of
    ranges. In a plan by file, only files that are published last remain to be written. Naming all files is fast then.
    """
    ready: list[tuple[int, int, int]] = []
    with _working(options, directory):
        for number in files:
            file, path = plan.files[number], unfinished(plan, number, directory)
            if not plan.by_file:
                _complete(path, file, crcs.get(number, ()), options)
            elif file.publish != "file":
                write_literals(plan, number, directory, sync=options.fsync)
            ready.append((number, *local_store().status(path)[:2]))
    return Receipt(f"close {files[0]}", 0, 0, ready=tuple(ready))


def _complete(path: str, file: TargetFile, summed: Iterable[Range], options: TaskOptions) -> None:
    """Write the delayed literals of a file, and sync it unless its tasks did."""
    store, waits = local_store(), _waits(file)
    if waits:
        sink, layout = store.sink(path, sized=True), file.layout
        for offset, content in _adjoined(merge(layout.literals, _crcs(path, layout.crcs, summed))):
            sink.write_at(offset, content)
    if waits or options.cached or not options.multi_process:
        if options.drop_cache:
            store.drop_cache(path, written=True)
        if options.fsync:
            store.sync(path)


def _crcs(path: str, crcs: Iterable[Crc], summed: Iterable[Range]) -> Iterator[tuple[int, bytes]]:
    """Yield the offsets and bytes of the CRC-32 sums that a file contains.

    A range that receipts do not cover, because an earlier run wrote a part of it, is read.
    """
    wrote = longest(summed)
    for begin, nbytes, places in crcs:
        value = sum_of([(begin, nbytes)], wrote, CRC32.polynomial)
        if value is None:
            value = crc_of_range(local_store(), path, begin, nbytes, crc32)
        for offset in places:
            yield offset, value.to_bytes(4, "little")


def _adjoined(pieces: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Join short adjacent pieces of a file, which are sorted by offset."""
    begin, end, parts = 0, 0, list[bytes]()
    for offset, content in pieces:
        if parts and (offset != end or end - begin + len(content) > _ADJOINED_BYTES):
            yield begin, b"".join(parts)
            parts = []
        if not parts:
            begin = offset
        parts.append(content)
        end = offset + len(content)
    if parts:
        yield begin, b"".join(parts)


@timed
def commit_files(plan: Plan, files: Sequence[int], directory: str, options: TaskOptions, _ready: object) -> Receipt:
    """Name complete target files; create links, and at URLs the last files.

    For a zarr store by file this writes all metadata, which no other task writes; the metadata of the group are last.
    """
    store, positioned, ready = store_at(directory), can(directory).positioned, list[tuple[int, int, int]]()
    for number in files:
        file = plan.files[number]
        if file.link is not None:
            store.link(file.link, unfinished(plan, number, directory))
        elif not positioned:
            write_literals(plan, number, directory, sync=options.fsync)
        if positioned and file.link is None:
            store.publish(unfinished(plan, number, directory), f"{directory}/{file.path}", durable=options.fsync)
        else:  # it is recorded once it has its name
            ready.append(_published(plan, number, directory, options))
    return Receipt(f"commit {files[0]}", 0, 0, ready=tuple(ready))


def withdraw_index(plan: Plan, directory: str, _ready: object) -> list[Receipt]:
    """Delete the old index before new files get their names: an index marks a set as complete."""
    withdraw(directory, [file for file in plan.files if not file.done])
    return []


def withdraw(directory: str, files: Iterable[TargetFile]) -> None:
    """Remove old indexes, and a tracker file unless it names another checkpoint."""
    for file in files:
        path = f"{directory}/{file.path}"
        if file.publish != "file" and not (file.publish == "pointer" and _is_of_another(path, file.layout)):
            store_at(directory).remove(path)


def _is_of_another(path: str, layout: FileLayout) -> bool:
    """Return whether a file exists and differs from its planned contents."""
    stored = bytearray(layout.size)
    try:
        if any_store().size(path) != layout.size:
            return True
        any_store().read_into(path, 0, memoryview(stored))
    except SourceError:  # it does not exist
        return False
    return [(0, bytes(stored))] != list(layout.literals)


def _write_files(
    plan: Plan,
    pieces: Sequence[Piece],
    files: Sequence[int],
    directory: str,
    options: TaskOptions,
    uploads: Mapping[int, Upload],
) -> Moved:
    """Write files in the order of their bytes; remove all of them on failure.

    Literals (the header of a file, the heads of its messages, zeros of a chunk at the edge, the index of a shard) wait
    in the sink of the file for their turn, so that nothing is written twice.

    A checkpoint file gets its contents in its own order. A zarr store has many small files, whose bytes arrive row by
    row: a file is opened with its first byte and closed after its last, so that only files of the current rows are
    open; in a shard, bytes of a later chunk wait for the bytes before them.

    Raises:
        SourceError: a source file ends early, cannot be read or changed.
        TargetError, BudgetError: a target file cannot be written.
    """
    sinks = Sinks(lambda number: _sink(plan, number, directory, uploads.get(number)))
    try:
        sinks.open(files)
        moved = move_pieces(
            plan,
            pieces,
            store_of(plan.source.coding),
            sinks,
            checksums=options.checksums,
            in_order=True,
            check_cancelled=lambda: live_runs.check_cancelled(options.run),
        )
        if plan.shape != "store":  # the graph checks the sources before it writes the group of a store
            check_sources(plan, None)
        sinks.finish(durable=options.fsync)
    except BaseException:
        sinks.abort()
        for number in sinks.ended:  # unfinished names only: a file to be replaced may have the final name
            store_at(directory).discard(unfinished(plan, number, directory))
        raise
    return moved


def write_literals(plan: Plan, number: int, directory: str, *, sync: bool) -> None:
    """Write a file that has only literals, such as the index of a set."""
    sink = _sink(plan, number, directory)
    try:
        sink.finish(durable=sync)
    except BaseException:
        sink.abort()
        raise


def _sink(plan: Plan, number: int, directory: str, upload: Upload | None = None) -> Sink:
    """Return a sink for a target file, for writes in about the order of offsets; `upload` tells how it is sent."""
    file, layout = plan.files[number], plan.files[number].layout
    path, size = f"{directory}/{file.path}", plan.size_of(file)

    def create() -> Sink:
        path = unfinished(plan, number, directory)
        known = None if plan.encoded(file) else size
        sink = remote_store().create(path, known, upload) if upload else store_at(directory).create(path, known)
        return Summing(sink, layout.crcs, crc32) if layout.crcs else sink

    def begin() -> Sink:
        if plan.cipher is None:
            return create()
        return plan.cipher.sink(create() if can(directory).positioned else Ordered(create, path, size))

    if plan.coding and plan.coding.of(file.path):
        return plan.coding.sink(file.path, Ordered(begin, path, None))
    ends = plan.shape == "store" and bool(layout.contents)
    skips = merged(upload.skips) if upload else []
    ordered = Ordered(begin, path, layout.size, room=layout.size if ends else 0, ends=ends, skips=skips)
    constant: list[tuple[int, bytes | memoryview]] = [*layout.literals, *_zeros(layout)]
    for offset, content in constant:
        ordered.write_at(offset, content)
    return ordered


def _zeros(layout: FileLayout) -> Iterator[tuple[int, memoryview]]:
    """Yield zeros, up to a MiB each, for gaps between contents and literals."""
    used = [(offset, len(content)) for offset, content in layout.literals]
    used += [run for content in layout.contents for run in content.runs]
    end = 0
    for start, nbytes in sorted([*used, (layout.size, 0)]):
        for begin in range(end, start, len(_ZEROS)):
            yield begin, _ZEROS[: start - begin]
        end = start + nbytes
