"""Partition a plan into tasks, by tensor or by file.

*By tensor*, every task writes a few tensors into all files: every source byte is read once, and files are written at
many offsets at a time. *By file*, a task writes a few files side by side, each from its first byte to its last, for
object stores and file systems that need sequential writes. Tensors that are split differently than the files are then
read once for every group of files that needs them. So files that read the same bytes are grouped:

1. In each segment of each recipe (`bands`), the rows of a source block are read for a set of files: `_readers`.
2. Take the sets in the order of the bytes saved by reading once, and group their files, up to the number of files that
   may be open at once; stop when less than a sixteenth of the bytes would be read twice.
3. Count the bytes that are still read several times in the plan's statistics.

A zarr store at a URL is written by file too, each task from the rows of its chunk files: these are never read twice,
because chunks cut tensors along rows first.

All values are integers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import replace
from graphlib import TopologicalSorter
from itertools import pairwise
from math import prod
from operator import itemgetter
from typing import TYPE_CHECKING

from reshard.errors import UsageError
from reshard.formats.entries import ranges
from reshard.plan import budget
from reshard.plan.bands import AHEAD, Recipe
from reshard.plan.budget import band_buffers, thread_bytes
from reshard.plan.plan import Piece, Task, Way
from reshard.storage.cipher import BLOCK_BYTES
from reshard.storage.places import can
from reshard.storage.remote import part_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from reshard.formats.entries import FileLayout
    from reshard.layout.block import Block
    from reshard.plan.bands import Columns
    from reshard.plan.plan import Move, Plan

PARTITIONS = ("tensor", "file")

FILES_AT_ONCE = 64
"""Maximum number of local files that a task writes side by side."""

STREAMS_AT_ONCE = 16
"""The same for files at URLs: each buffers a part, and a copy of the part while it is uploaded."""


def partitioned(plan: Plan, partition: str | None, directory: str) -> Plan:
    """Return the plan with tasks by tensor or by file, to suit a directory.

    Args:
        plan: a plan by tensor.
        partition: `tensor` or `file`; by default `file` at URLs or if files are encrypted, else `tensor`.
        directory: the target directory.

    Raises:
        UsageError: the partition is unknown, or the storage does not support it.
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
    if plan.exclusive and partition == "file" and can(directory).positioned:
        raise UsageError(
            f"a zarr store in a local directory such as {directory} is written by tensor", code="wrong-partition",
            hint="leave partition 'file' out",
        )  # fmt: skip
    by_file = partition == "file" or plan.cipher is not None or not can(directory).positioned
    if not by_file or plan.by_file:
        return plan
    if plan.exclusive:
        return _with_whole_chunks(plan, directory)
    readers = _readers(plan.moves)
    numbers = [number for number, file in enumerate(plan.files) if file.link is None and not file.last]
    groups = _groups(readers, numbers, FILES_AT_ONCE if can(directory).positioned else STREAMS_AT_ONCE)
    group_of = {number: index for index, group in enumerate(groups) for number in group}
    memory = (("sending", _write_buffers(plan, groups, directory)), ("more bands", _extra_bands(plan, len(groups))))
    stats = plan.stats._replace(
        bytes_read=sum(nbytes * len({group_of[number] for number in files}) for files, nbytes in readers.items()),
        tasks=len(groups),
        peak_memory=plan.stats.peak_memory + sum(nbytes for _, nbytes in memory),
    )
    tasks = tuple(Task(files=group) for group in groups)
    return replace(plan, tasks=tasks, stats=stats, memory=(*plan.memory, *memory))


def whole_files(plan: Plan, task: Task) -> tuple[Plan, tuple[Piece, ...]]:
    """Return a plan of the moves of a task that writes whole files, and its pieces.

    Pieces are in the order of each file. A task of a zarr store has its pieces already; for others, the plan is
    restricted to the task's files.
    """
    if task.pieces:
        return plan, task.pieces
    chosen_files = frozenset(task.files)
    shares: dict[Way, tuple[Way, dict[tuple[FileLayout, int], None]] | None] = {}
    moves: list[tuple[int, Move]] = []
    begins: dict[FileLayout, list[tuple[int, int]]] = {}  # offset and move of each content, by layout
    for number, move in enumerate(plan.moves):
        if move.way not in shares:
            shares[move.way] = _restrict(plan, move.way, chosen_files)
        if share := shares[move.way]:
            for layout, runs in share[1]:
                if any(nbytes for _, nbytes in move.write_runs[runs]):
                    begins.setdefault(layout, []).append((move.write_runs[runs][0][0], len(moves)))
            moves.append((number, move._replace(way=share[0])))
    sorter: TopologicalSorter[int] = TopologicalSorter()
    for places in begins.values():
        places.sort()
        for _, number in places:
            sorter.add(number)
        for (_, before), (_, number) in pairwise(places):
            if number != before:  # several pieces of a block
                sorter.add(number, before)
    ordered = [moves[number] for number in sorter.static_order()]
    pieces = tuple(Piece(number, 0, move.rows) for number, (_, move) in enumerate(ordered))
    labels = tuple(plan.labels[number] for number, _ in ordered)
    return replace(plan, moves=tuple(move for _, move in ordered), labels=labels), pieces


def _restrict(
    plan: Plan, way: Way, chosen_files: frozenset[int]
) -> tuple[Way, dict[tuple[FileLayout, int], None]] | None:
    """Restrict a way to the blocks of some files, and return it with their runs.

    The runs are given by the layouts of the files and the numbers of runs.

    Return None if the way writes no block of these files.
    """
    kept = [
        (block, chosen_writes)
        for block, written in zip(way.recipe.targets, way.writes, strict=True)
        if (chosen_writes := tuple(at for at in written if at.file in chosen_files))
    ]
    if not kept:
        return None
    blocks = tuple(block for block, _ in kept)
    source_numbers = [n for n, source in enumerate(way.recipe.sources) if any(source & block for block in blocks)]
    recipe = Recipe(way.recipe.shape, tuple(way.recipe.sources[n] for n in source_numbers), blocks)
    writes = tuple(chosen_writes for _, chosen_writes in kept)
    share = Way(recipe, way.axis, tuple(way.reads[n] for n in source_numbers), writes, way.row_multiple)
    return share, {(plan.files[at.file].layout, at.runs): None for chosen_writes in writes for at in chosen_writes}


def _extra_bands(plan: Plan, tasks: int) -> int:
    """Return the memory for bands of the threads that become busy with more tasks."""
    threads = min(plan.threads, tasks) - min(plan.threads, plan.stats.tasks)
    casts = any(move.dtype != move.target_dtype for move in plan.moves)
    strided = any(way.is_strided for way in {move.way for move in plan.moves})
    return max(threads, 0) * thread_bytes(plan.band_bytes, band_buffers(casts=casts, strided=strided))


def _with_whole_chunks(plan: Plan, directory: str) -> Plan:
    """Return the plan of a zarr store with tasks that are cut at file boundaries."""
    moves = plan.moves
    weights = [prod(move.recipe.shape) * max(move.dtype.itemsize, move.target_dtype.itemsize) for move in moves]
    tasks = share_out(moves, weights, plan.band_bytes, whole_files=True)
    groups: list[dict[int, None]] = [{} for _ in tasks]
    pieces: list[list[tuple[int, int]]] = [[] for _ in moves]  # for each move: first row and task
    for number, task in enumerate(tasks):
        for piece in task.pieces:
            pieces[piece.move].append((piece.start, number))
    sending = waiting = 0
    for move, starts in zip(moves, pieces, strict=True):
        row = prod(move.recipe.shape[1 : move.axis + 1])
        for block, (at,) in zip(move.recipe.targets, move.way.writes, strict=True):
            first = block.start[0] * row if block.start else 0
            groups[starts[bisect_right(starts, first, key=itemgetter(0)) - 1][1]][at.file] = None
        array_sent, array_waiting = _array_buffers(plan, move)
        sending, waiting = max(sending, array_sent), max(waiting, array_waiting)
    overshoot = 2 * plan.band_bytes  # the last band of a part may exceed the part size
    memory = _library_bytes(plan, directory) + min(plan.threads, max(len(tasks), 1)) * (sending + waiting + overshoot)
    stats = plan.stats._replace(tasks=len(tasks), peak_memory=plan.stats.peak_memory + memory)
    shares = (*plan.memory, ("sending", memory))
    tasks = tuple(Task(task.pieces, tuple(files)) for task, files in zip(tasks, groups, strict=True))
    return replace(plan, tasks=tasks, stats=stats, memory=shares)


def _array_buffers(plan: Plan, move: Move) -> tuple[int, int]:
    """Return how many bytes of an array are buffered for sending, and how many wait.

    Files that share rows are open side by side, and each begins and ends with the same rows. In a shard of several
    plain chunks, the chunks of the same rows wait for the first.
    """
    files: dict[int, tuple[int, ...]] = {}
    chunks: Counter[tuple[int, ...]] = Counter()
    blocks = move.recipe.targets
    lead = _first_cut(blocks)
    for block, (at,) in zip(blocks, move.way.writes, strict=True):
        files[at.file] = min(files.get(at.file, block.start), block.start)
        chunks[block.start[: lead + 1]] += block.size * move.target_dtype.itemsize
    side_by_side: Counter[tuple[int, ...]] = Counter()
    for file, start in files.items():
        size = plan.files[file].layout.size
        side_by_side[start[: lead + 1]] += 2 * min(part_bytes(size), size)
    waits = len(files) < len(blocks) and plan.coding is None
    return max(side_by_side.values(), default=0), max(chunks.values(), default=0) if waits else 0


def _first_cut(blocks: Sequence[Block]) -> int:
    """Return the first axis along which a block has more than one element."""
    return min((axis for block in blocks[:1] for axis, extent in enumerate(block.shape) if extent > 1), default=0)


def _readers(moves: Iterable[Move]) -> Counter[frozenset[int]]:
    """Return how many bytes are read for each set of files that share them."""
    nbytes_by_files: Counter[frozenset[int]] = Counter()
    by_way: dict[Way, Counter[frozenset[int]]] = {}
    for move in moves:
        if move.way not in by_way:
            by_way[move.way] = _elements(move.way)
        for files, elements in by_way[move.way].items():
            nbytes_by_files[files] += elements * move.dtype.itemsize
    return nbytes_by_files


def _elements(way: Way) -> Counter[frozenset[int]]:
    recipe, elements_by_files = way.recipe, Counter[frozenset[int]]()
    by_columns: dict[Columns, list[tuple[frozenset[int], int]]] = {}
    for segment in recipe.segments(way.axis, 0, recipe.rows(way.axis)):
        columns = segment.columns
        if columns not in by_columns:
            files: list[set[int]] = [set() for _ in columns.sources]
            for target, parts in zip(columns.targets, columns.parts, strict=True):
                for part in parts:
                    files[part.read].update(at.file for at in way.writes[target])
            by_columns[columns] = [
                (frozenset(readers), prod(shape)) for readers, shape in zip(files, columns.source_shapes, strict=True)
            ]
        for readers, elements in by_columns[columns]:
            elements_by_files[readers] += elements * (segment.stop - segment.start)
    return elements_by_files


def share_out(moves: Sequence[Move], weights: Sequence[int], band_bytes: int, *, whole_files: bool) -> tuple[Task, ...]:
    """Share the rows of moves out into tasks of about equal weight.

    Args:
        moves: the moves.
        weights: the bytes of each move.
        band_bytes: maximum bytes of a tensor that are read at once. Strided tensors are cut at the end of a read-ahead
            of about `AHEAD` times as many bytes.
        whole_files: cut tasks at file boundaries (`Way.row_multiple`).
    """
    limit = max(budget.TASK_BYTES, -(-sum(weights) // budget.MOST_TASKS))
    strided = {way for way in {move.way for move in moves} if way.is_strided}
    tasks: list[Task] = []
    task: list[Piece] = []
    room = limit
    for number, (move, weight) in enumerate(zip(moves, weights, strict=True)):
        rows = move.rows if weight else 0
        multiple = move.way.row_multiple if whole_files else 1
        if multiple == 1 and rows and move.way in strided:
            multiple = -(-rows // -(-weight // (AHEAD * band_bytes)))
        start = 0
        while start < rows:
            count = min(rows - start, -(-max(1, rows * room // weight) // multiple) * multiple)
            task.append(Piece(number, start, start + count))
            start += count
            room -= weight * count // rows
            if room <= limit // 16:
                tasks.append(Task(tuple(task)))
                task, room = [], limit
    if task:
        tasks.append(Task(tuple(task)))
    return tuple(tasks)


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


def _write_buffers(plan: Plan, groups: Sequence[Sequence[int]], directory: str) -> int:
    """Return the memory of uploads: the client library and buffers of each thread."""
    if can(directory).positioned:
        return 0
    block = BLOCK_BYTES if plan.cipher else 0  # buffered until its header is known
    sizes_by_group = ([plan.size_of(plan.files[number]) for number in group] for group in groups)
    sent = max(
        (sum(2 * min(part_bytes(size), size) + min(block, size) for size in sizes) for sizes in sizes_by_group),
        default=0,
    )
    return _library_bytes(plan, directory) + min(plan.threads, max(len(groups), 1)) * sent


def _library_bytes(plan: Plan, directory: str) -> int:
    """Return the memory of the target's client library, unless sources need it too."""
    return 0 if any(can(file.path).library_bytes for file in plan.source.files) else can(directory).library_bytes


Spans = list[tuple[int, int]]
"""Ascending byte ranges of a file, as begins and ends, that do not touch."""


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
    ways: dict[Way, Way] = {}
    moves = (
        tuple(move._replace(way=_without_finished(move.way, done, ways)) for move in plan.moves) if done else plan.moves
    )
    plan = replace(plan, files=files, moves=moves)
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


def _without_finished(way: Way, done: frozenset[int], ways: dict[Way, Way]) -> Way:
    """Return a way without its writes into files that are done."""
    if way not in ways:
        writes = tuple(tuple(at for at in extents if at.file not in done) for extents in way.writes)
        ways[way] = replace(way, writes=writes)
    return ways[way]


def _is_incomplete(plan: Plan, piece: Piece, written: Mapping[int, Spans]) -> bool:
    """Return whether any byte of a piece is missing in one of its files."""
    move = plan.moves[piece.move]
    width = move.target_dtype.itemsize
    for number, extents in enumerate(move.writes):
        begin, end = (move.recipe.before(number, move.axis, row) * width for row in (piece.start, piece.stop))
        for file, runs, _ in extents:
            spans = written.get(file, [])
            if not all(covers(spans, at, at + stop - start) for at, start, stop in ranges(runs, begin, end - begin)):
                return True
    return False


def bytes_left(plan: Plan) -> int:
    """Return how many bytes of contents a plan writes."""
    total = sum(plan.files[n].layout.content_bytes for task in plan.tasks if not task.pieces for n in task.files)
    for piece in (piece for task in plan.tasks for piece in task.pieces):
        move = plan.moves[piece.move]
        for number, written in enumerate(move.way.writes):
            if written:
                rows = (move.recipe.before(number, move.axis, row) for row in (piece.stop, piece.start))
                total += (next(rows) - next(rows)) * move.target_dtype.itemsize * len(written)
    return total


def covers(spans: Spans, begin: int, end: int) -> bool:
    """Return whether a single span covers a range.

    >>> [covers([(0, 4), (6, 9)], *span) for span in ((0, 4), (3, 7), (6, 6), (9, 10))]
    [True, False, True, False]
    """
    index = bisect_right(spans, begin, key=lambda span: span[0]) - 1
    return begin == end or (index >= 0 and end <= spans[index][1])


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges, with touching or overlapping ones joined.

    >>> merged([(4, 6), (0, 2), (2, 3), (5, 9)])
    [(0, 3), (4, 9)]
    """
    result: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((begin, end))
    return result
