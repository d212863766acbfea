"""Partition a plan into tasks, by tensor or by file.

*By tensor*, every task writes a few tensors into all files: every source byte is read once, and files are written at
many offsets at a time. *By file*, a task writes a few files side by side, each from its first byte to its last, for
object stores and file systems that need sequential writes. Tensors that are split differently than the files are then
read once for every group of files that needs them. So files that read the same bytes are grouped:

1. In each segment of each recipe (`bands`), the rows of a source block are read for a set of files: `_readers`.
2. Take the sets in the order of the bytes saved by reading once, and group their files, up to the number of files that
   may be open at once; stop when less than a sixteenth of the bytes would be read twice.
3. Count the bytes that are still read several times in the plan's statistics.

A zarr store at a URL is written by file too: each task takes the rows that its chunk files hold. Chunks cut tensors
along rows first, so no source byte is read twice.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import replace
from functools import partial
from graphlib import TopologicalSorter
from itertools import pairwise
from math import prod
from operator import itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING

from reshard.core.model.entries import covers, ranges
from reshard.core.plan import budget
from reshard.core.plan.bands import AHEAD, Recipe
from reshard.core.plan.budget import times_held
from reshard.core.plan.plan import Piece, Route, Task
from reshard.core.plan.uploads.copies import copied_bytes
from reshard.core.plan.uploads.sending import extra_bands, file_bytes, library_bytes, with_uploads
from reshard.core.storage.places import can
from reshard.core.storage.urls.pool import shared_bytes
from reshard.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from reshard.core.layout.block import Block
    from reshard.core.model.entries import FileLayout, Spans
    from reshard.core.plan.bands import Columns
    from reshard.core.plan.budget import Share
    from reshard.core.plan.plan import Plan, Transfer

PARTITIONS = ("tensor", "file")

FILES_AT_ONCE = 64
"""Maximum number of local files that a task writes side by side."""


def partitioned(plan: Plan, partition: str | None, directory: str, *, server_copy: bool = True) -> Plan:
    """Return the plan with tasks by tensor or by file, to suit a directory.

    Args:
        plan: a plan by tensor.
        partition: `tensor` or `file`; by default `file` at URLs or if files are encrypted, else `tensor`.
        directory: the target directory.
        server_copy: let the store of the target copy bytes that it has, if it can.

    Raises:
        UsageError: the partition is unknown, or the storage does not support it.
        BudgetError: the memory of the plan is too little to send files.
    """
    if partition not in {None, *PARTITIONS}:
        raise UsageError(
            f"there is no partition {partition!r}", code="unknown-partition",
            hint=f"choose {' or '.join(PARTITIONS)}",
        )  # fmt: skip
    if partition == "tensor" and not can(directory).positioned:
        raise UsageError(
            f"files in {directory} can only be written from first byte to last", code="wrong-partition",
            hint="leave partition 'tensor' out",
        )  # fmt: skip
    if partition == "tensor" and plan.cipher is not None:
        raise UsageError(
            "encrypted files can only be written from first byte to last", code="wrong-partition",
            hint="leave partition 'tensor' out",
        )  # fmt: skip
    if plan.shape == "store" and partition == "file" and can(directory).positioned:
        raise UsageError(
            f"a store in a local directory such as {directory} is written by tensor", code="wrong-partition",
            hint="leave partition 'file' out",
        )  # fmt: skip
    by_file = partition == "file" or plan.cipher is not None or not can(directory).positioned
    if not by_file or plan.by_file:
        return plan
    if plan.shape == "store":
        return _with_whole_chunks(plan, directory)
    readers = _readers(plan.transfers)
    numbers = [number for number, file in enumerate(plan.files) if file.link is None and file.publish == "file"]
    if can(directory).positioned:
        groups = _groups(readers, numbers, FILES_AT_ONCE)
        return _by_groups(plan, groups, readers, (("more bands", extra_bands(plan, len(groups))),))
    plan, groups, memory = with_uploads(plan, directory, partial(_groups, readers, numbers), server_copy=server_copy)
    return _by_groups(plan, groups, readers, memory)


def _by_groups(
    plan: Plan, groups: Sequence[tuple[int, ...]], readers: Counter[frozenset[int]], memory: tuple[Share, ...]
) -> Plan:
    """Return the plan with a task for each group of files."""
    group_of = {number: index for index, group in enumerate(groups) for number in group}
    read = sum(nbytes * len({group_of[number] for number in files}) for files, nbytes in readers.items())
    copied, unread = copied_bytes(plan, groups)
    stats = plan.stats._replace(
        bytes_read=max(read - unread, 0),
        bytes_copied=copied,
        tasks=len(groups),
        peak_memory=plan.stats.peak_memory + sum(nbytes for _, nbytes in memory),
    )
    tasks = tuple(Task(files=group) for group in groups)
    return replace(plan, tasks=tasks, stats=stats, memory=(*plan.memory, *memory))


def whole_files(plan: Plan, task: Task) -> tuple[Plan, tuple[Piece, ...]]:
    """Return a plan of the transfers of a task that writes whole files, and its pieces.

    Pieces are in the order of each file. A task of a zarr store has its pieces already; for others, the plan is
    restricted to the task's files.
    """
    if task.pieces:
        return plan, task.pieces
    chosen_files = frozenset(task.files)
    shares: dict[Route, tuple[Route, dict[tuple[FileLayout, int], None]] | None] = {}
    transfers: list[Transfer] = []
    begins: dict[FileLayout, list[tuple[int, int]]] = {}  # offset and transfer of each content, by layout
    for transfer in plan.transfers:
        if transfer.route not in shares:
            shares[transfer.route] = _restrict(plan, transfer.route, chosen_files)
        if share := shares[transfer.route]:
            for layout, runs in share[1]:
                if any(nbytes for _, nbytes in transfer.write_runs[runs]):
                    begins.setdefault(layout, []).append((transfer.write_runs[runs][0][0], len(transfers)))
            transfers.append(transfer._replace(route=share[0]))
    sorter: TopologicalSorter[int] = TopologicalSorter()
    for places in begins.values():
        places.sort()
        for _, number in places:
            sorter.add(number)
        for (_, before), (_, number) in pairwise(places):
            if number != before:  # several pieces of a block
                sorter.add(number, before)
    ordered = [transfers[number] for number in sorter.static_order()]
    pieces = tuple(Piece(number, 0, transfer.rows) for number, transfer in enumerate(ordered))
    return replace(plan, transfers=tuple(ordered)), pieces


def _restrict(
    plan: Plan, route: Route, chosen_files: frozenset[int]
) -> tuple[Route, dict[tuple[FileLayout, int], None]] | None:
    """Restrict a route to the blocks of some files, and return it with their runs.

    The runs are given by the layouts of the files and the numbers of runs.

    Return None if the route writes no block of these files.
    """
    kept = [
        (block, chosen_writes)
        for block, written in zip(route.recipe.targets, route.writes, strict=True)
        if (chosen_writes := tuple(at for at in written if at.file in chosen_files))
    ]
    if not kept:
        return None
    blocks = tuple(block for block, _ in kept)
    source_numbers = [n for n, source in enumerate(route.recipe.sources) if any(source & block for block in blocks)]
    recipe = Recipe(route.recipe.shape, tuple(route.recipe.sources[n] for n in source_numbers), blocks)
    writes = tuple(chosen_writes for _, chosen_writes in kept)
    share = Route(recipe, route.axis, tuple(route.reads[n] for n in source_numbers), writes, route.row_multiple)
    return share, {
        (plan.files[at.file].layout, at.runs_index): None for chosen_writes in writes for at in chosen_writes
    }


def _with_whole_chunks(plan: Plan, directory: str) -> Plan:
    """Return the plan of a zarr store with tasks that are cut at file boundaries."""
    transfers = plan.transfers
    weights = [
        prod(transfer.recipe.shape) * max(transfer.dtype.itemsize, transfer.target_dtype.itemsize)
        for transfer in transfers
    ]
    tasks = share_out(transfers, weights, plan.band_bytes, whole_files=True)
    groups: list[dict[int, None]] = [{} for _ in tasks]
    pieces: list[list[tuple[int, int]]] = [[] for _ in transfers]  # for each transfer: first row and task
    for number, task in enumerate(tasks):
        for piece in task.pieces:
            pieces[piece.transfer].append((piece.start, number))
    sending = waiting = 0
    for transfer, starts in zip(transfers, pieces, strict=True):
        row = prod(transfer.recipe.shape[1 : transfer.axis + 1])
        for block, (at,) in zip(transfer.recipe.targets, transfer.route.writes, strict=True):
            first = block.start[0] * row if block.start else 0
            groups[starts[bisect_right(starts, first, key=itemgetter(0)) - 1][1]][at.file] = None
        array_sent, array_waiting = _array_buffers(plan, transfer, directory)
        sending, waiting = max(sending, array_sent), max(waiting, array_waiting)
    overshoot = 2 * plan.band_bytes  # the last band of a part may exceed the part size
    memory = library_bytes(plan, directory) + min(plan.threads, max(len(tasks), 1)) * (sending + waiting + overshoot)
    limit = plan.request.memory if plan.request else None
    held = times_held([plan.source])
    shared = shared_bytes(plan.stats.peak_memory - held * plan.shared_bytes + memory, limit) // held
    memory += held * (shared - plan.shared_bytes)
    stats = plan.stats._replace(tasks=len(tasks), peak_memory=plan.stats.peak_memory + memory)
    shares = (*plan.memory, ("sending", memory))
    tasks = tuple(Task(task.pieces, tuple(files)) for task, files in zip(tasks, groups, strict=True))
    return replace(plan, tasks=tasks, stats=stats, memory=shares, shared_bytes=shared)


def _array_buffers(plan: Plan, transfer: Transfer, directory: str) -> tuple[int, int]:
    """Return how many bytes of an array are buffered for sending, and how many wait.

    Files that share rows are open side by side, and each begins and ends with the same rows. In a shard of several
    plain chunks, the chunks of the same rows wait for the first.
    """
    files: dict[int, tuple[int, ...]] = {}
    chunks: Counter[tuple[int, ...]] = Counter()
    blocks = transfer.recipe.targets
    lead = _first_cut(blocks)
    for block, (at,) in zip(blocks, transfer.route.writes, strict=True):
        files[at.file] = min(files.get(at.file, block.start), block.start)
        chunks[block.start[: lead + 1]] += block.size * transfer.target_dtype.itemsize
    side_by_side: Counter[tuple[int, ...]] = Counter()
    for file, start in files.items():
        side_by_side[start[: lead + 1]] += file_bytes(plan.files[file].layout.size, directory)
    waits = len(files) < len(blocks) and plan.coding is None
    return max(side_by_side.values(), default=0), max(chunks.values(), default=0) if waits else 0


def _first_cut(blocks: Sequence[Block]) -> int:
    """Return the first axis along which a block has more than one element."""
    return min((axis for block in blocks[:1] for axis, extent in enumerate(block.shape) if extent > 1), default=0)


def _readers(transfers: Iterable[Transfer]) -> Counter[frozenset[int]]:
    """Return how many bytes are read for each set of files that share them."""
    itemsizes: Counter[Route] = Counter()  # the sum of those of all transfers
    for transfer in transfers:
        itemsizes[transfer.route] += transfer.dtype.itemsize
    nbytes_by_files: Counter[frozenset[int]] = Counter()
    for route, itemsize in itemsizes.items():
        for files, elements in _elements(route).items():
            nbytes_by_files[files] += elements * itemsize
    return nbytes_by_files


def _elements(route: Route) -> Counter[frozenset[int]]:
    recipe, elements_by_files = route.recipe, Counter[frozenset[int]]()
    by_columns: dict[Columns, list[tuple[frozenset[int], int]]] = {}
    for segment in recipe.segments(route.axis, 0, recipe.rows(route.axis)):
        columns = segment.columns
        if columns not in by_columns:
            files: list[set[int]] = [set() for _ in columns.sources]
            for target, parts in zip(columns.targets, columns.parts, strict=True):
                for part in parts:
                    files[part.source].update(at.file for at in route.writes[target])
            by_columns[columns] = [
                (frozenset(readers), prod(shape)) for readers, shape in zip(files, columns.source_shapes, strict=True)
            ]
        for readers, elements in by_columns[columns]:
            elements_by_files[readers] += elements * (segment.stop - segment.start)
    return elements_by_files


def share_out(
    transfers: Sequence[Transfer],
    weights: Sequence[int],
    band_bytes: int,
    *,
    whole_files: bool,
    cuts: Mapping[int, Sequence[int]] = MappingProxyType({}),
    edges: Mapping[int, Sequence[int]] = MappingProxyType({}),
) -> tuple[Task, ...]:
    """Share the rows of transfers out into tasks of about equal weight.

    Args:
        transfers: the transfers.
        weights: the bytes of each transfer.
        band_bytes: maximum bytes of a tensor that are read at once. Strided tensors are cut at the end of a read-ahead
            of about `AHEAD` times as many bytes.
        whole_files: cut tasks at file boundaries (`Route.row_multiple`).
        cuts: for transfers that are cut into smaller tasks, the rows at which they may be cut.
        edges: for transfers whose source blocks are decoded from their beginnings, the rows at which blocks begin, and
            the number of rows: tasks are cut there.
    """
    limit = max(budget.TASK_BYTES, -(-sum(weights) // budget.MOST_TASKS))
    strided = {route for route in {transfer.route for transfer in transfers} if route.is_strided}
    tasks: list[Task] = []
    task: list[Piece] = []
    room = limit
    for number, (transfer, weight) in enumerate(zip(transfers, weights, strict=True)):
        rows = transfer.rows if weight and number not in cuts else 0
        multiple = transfer.route.row_multiple if whole_files else 1
        if multiple == 1 and rows and transfer.route in strided:
            multiple = -(-rows // -(-weight // (AHEAD * band_bytes)))
        start = 0
        while start < rows:
            count = min(rows - start, -(-max(1, rows * room // weight) // multiple) * multiple)
            if number in edges and multiple == 1:
                count = edges[number][bisect_left(edges[number], start + count)] - start
            task.append(Piece(number, start, start + count))
            start += count
            room -= weight * count // rows
            if room <= limit // 16:
                tasks.append(Task(tuple(task)))
                task, room = [], limit
    if task:
        tasks.append(Task(tuple(task)))
    return (*tasks, *_small_tasks(transfers, weights, band_bytes, cuts, whole_files=whole_files))


def _small_tasks(
    transfers: Sequence[Transfer], weights: Sequence[int], least: int, cuts: Mapping[int, Sequence[int]], *,
    whole_files: bool,
) -> list[Task]:  # fmt: skip
    """Return tasks of transfers with cuts: of one interval each, or of several of fewer than `least` bytes."""
    tasks: list[Task] = []
    task: list[Piece] = []
    size = 0
    for number, edges in cuts.items():
        multiple = transfers[number].route.row_multiple if whole_files else 1
        rows = transfers[number].rows if weights[number] else 0
        stops = sorted({min(rows, -(-edge // multiple) * multiple) for edge in edges})
        for start, stop in pairwise(stops):
            nbytes = weights[number] * (stop - start) // rows
            if task and size + nbytes > least:
                tasks.append(Task(tuple(task)))
                task, size = [], 0
            if task and task[-1].transfer == number and task[-1].stop == start:
                task[-1] = task[-1]._replace(stop=stop)
            else:
                task.append(Piece(number, start, stop))
            size += nbytes
    return [*tasks, Task(tuple(task))] if task else tasks


def _groups(readers: Counter[frozenset[int]], numbers: Sequence[int], most: int) -> tuple[tuple[int, ...], ...]:
    """Group files that read the same bytes, with at most `most` files in a group.

    >>> _groups(Counter({frozenset({0, 1}): 50, frozenset({2, 3}): 50, frozenset({0, 1, 2, 3}): 1}), range(4), 4)
    ((0, 1), (2, 3))
    """
    group_of = {number: [number] for number in numbers}
    saved = sorted(((nbytes * (len(files) - 1), sorted(files)) for files, nbytes in readers.items()), reverse=True)
    remaining_bytes, enough = sum(nbytes for nbytes, _ in saved), sum(readers.values()) // 16
    for nbytes, files in saved:
        if remaining_bytes <= enough:
            break
        remaining_bytes -= nbytes
        group = group_of[files[0]]
        for number in files[1:]:
            other_group = group_of[number]
            if other_group is group:
                continue
            if len(group) + len(other_group) <= most:
                group += other_group
                group_of.update(dict.fromkeys(other_group, group))
            else:
                group = other_group
    return tuple(tuple(sorted(group)) for number, group in group_of.items() if number == min(group))


def remaining(plan: Plan, finished: Iterable[int], written: Mapping[int, Spans], complete: Iterable[int] = ()) -> Plan:
    """Return the unfinished remainder of a plan; files keep their numbers.

    Args:
        plan: the whole plan.
        finished: the numbers of finished files.
        written: the byte ranges that are written, for unfinished files.
        complete: the numbers of unfinished files that were written in order and have all their bytes.
    """
    done = frozenset(finished)
    if not done and not written:
        return plan
    files = tuple(file._replace(done=True) if number in done else file for number, file in enumerate(plan.files))
    routes: dict[Route, Route] = {}
    transfers = (
        tuple(transfer._replace(route=_without_finished(transfer.route, done, routes)) for transfer in plan.transfers)
        if done
        else plan.transfers
    )
    plan = replace(plan, files=files, transfers=transfers)
    written_whole = done.union(complete)
    tasks = (_remaining_task(plan, task, done, written_whole, written) for task in plan.tasks)
    return replace(plan, tasks=tuple(task for task in tasks if task))


def _remaining_task(
    plan: Plan, task: Task, done: frozenset[int], written_whole: frozenset[int], written: Mapping[int, Spans]
) -> Task | None:
    """Return the unfinished remainder of a task, or None."""
    if not task.files:
        pieces = tuple(piece for piece in task.pieces if _is_incomplete(plan, piece, written))
        return Task(pieces) if pieces else None
    files = tuple(file for file in task.files if file not in done)
    return None if written_whole.issuperset(files) else task._replace(files=files)


def _without_finished(route: Route, done: frozenset[int], routes: dict[Route, Route]) -> Route:
    """Return a route without its writes into files that are done."""
    if route not in routes:
        writes = tuple(tuple(at for at in extents if at.file not in done) for extents in route.writes)
        routes[route] = replace(route, writes=writes)
    return routes[route]


def _is_incomplete(plan: Plan, piece: Piece, written: Mapping[int, Spans]) -> bool:
    """Return whether any byte of a piece is missing in one of its files."""
    transfer = plan.transfers[piece.transfer]
    width = transfer.target_dtype.itemsize
    for number, extents in enumerate(transfer.writes):
        begin, end = (
            transfer.recipe.elements_before(number, transfer.axis, row) * width for row in (piece.start, piece.stop)
        )
        for file, runs, _ in extents:
            spans = written.get(file, [])
            if not all(covers(spans, at, at + stop - start) for at, start, stop in ranges(runs, begin, end - begin)):
                return True
    return False


def bytes_left(plan: Plan) -> int:
    """Return how many bytes of contents a plan writes."""
    total = sum(plan.files[n].layout.content_bytes for task in plan.tasks if not task.pieces for n in task.files)
    for piece in (piece for task in plan.tasks for piece in task.pieces):
        transfer = plan.transfers[piece.transfer]
        for number, written in enumerate(transfer.route.writes):
            if written:
                rows = (
                    transfer.recipe.elements_before(number, transfer.axis, row) for row in (piece.stop, piece.start)
                )
                total += (next(rows) - next(rows)) * transfer.target_dtype.itemsize * len(written)
    return total
