"""Who writes a target file: tasks that each write a few tensors into all files, or one task a file.

*By tensor*, every source byte is read once, and files are written at many places at a time. *By file*, a task writes
a few files side by side, each from its first byte to its last: the way of object stores, and of file systems to which
writing in order matters. What is split in another way than the files are is then read once for every group of files
that needs it. So files are put together that read the same bytes:

1. In each segment of each recipe (`bands`), the rows of a source block are read for a set of files: `_readers`.
2. Sets are taken in the order of what reading once saves, and their files put together, as many as may be open at
   once; until less than a sixteenth of the bytes would be read twice.
3. What is then still read several times is counted, and told in the plan.

A zarr store at a URL is written by file too, each task from the rows that its files of chunks have: these are never
read twice, because chunks cut tensors along rows first.

All of it is integers.
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
from reshard.plan.bands import Recipe
from reshard.plan.build import shared_out, thread_bytes
from reshard.plan.plan import Piece
from reshard.storage.remote import is_url
from reshard.storage.remote_store import LIBRARY_BYTES, part_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reshard.layout.block import Block
    from reshard.plan.plan import Move, Plan

OWNERSHIPS = ("tensor", "file")

FILES_AT_ONCE = 64
"""The most local files that a task writes side by side."""

STREAMS_AT_ONCE = 16
"""The most files at URLs: each holds a part, and a copy of it while it is sent."""


def owned(plan: Plan, ownership: str | None, directory: str) -> Plan:
    """Return the plan as it is carried out in a directory: by tensor, or by file.

    Args:
        plan: a plan by tensor.
        ownership: `tensor` or `file`; None for what suits the storage: by file at URLs, by tensor elsewhere.
        directory: where the target files go.

    Raises:
        UsageError: an unknown ownership, or one that the storage has no way for.
    """
    if ownership not in {None, *OWNERSHIPS}:
        raise UsageError(f"unknown ownership {ownership!r}; known are {' and '.join(OWNERSHIPS)}")
    if ownership == "tensor" and is_url(directory):
        raise UsageError(
            f"{directory}: files at URLs are written from first byte to last; leave ownership 'tensor' out"
        )
    if plan.alone and ownership == "file" and not is_url(directory):
        raise UsageError(
            f"{directory}: a zarr store in a local directory is written by tensor; leave ownership 'file' out"
        )
    by_file = ownership == "file" or is_url(directory)
    if not by_file or plan.groups:
        return plan
    if plan.alone:
        return _with_whole_chunks(plan)
    readers = _readers(plan.moves)
    numbers = [number for number, file in enumerate(plan.files) if file.link is None and not file.last]
    groups = _groups(readers, numbers, STREAMS_AT_ONCE if is_url(directory) else FILES_AT_ONCE)
    of = {number: group for group, some in enumerate(groups) for number in some}
    stats = plan.stats._replace(
        bytes_read=sum(nbytes * len({of[number] for number in files}) for files, nbytes in readers.items()),
        tasks=len(groups),
        peak_memory=plan.stats.peak_memory + _held(plan, groups, directory) + _more_bands(plan, len(groups)),
    )
    return replace(plan, groups=groups, tasks=(), stats=stats)


def group_plan(plan: Plan, group: Sequence[int]) -> Plan:
    """Return the plan of one group of files alone: one task, which writes each file in its order."""
    wanted = frozenset(group)
    known: dict[tuple[int, int], tuple[Recipe, tuple[int, ...], tuple[tuple[int, ...], ...]]] = {}
    moves: dict[str, list[Move]] = {}
    for move in plan.moves:
        key = (id(move.recipe), id(move.targets))
        if key not in known:
            known[key] = _share(move, wanted)
        recipe, sources, targets = known[key]
        if targets:
            holders = tuple(move.holders[number] for number in sources)
            moves.setdefault(move.name, []).append(move._replace(recipe=recipe, holders=holders, targets=targets))
    ordered = tuple(move for name in _order(plan, group) for move in moves[name])
    pieces = tuple(Piece(number, 0, move.recipe.rows(move.axis)) for number, move in enumerate(ordered))
    return replace(plan, moves=ordered, tasks=(pieces,), groups=())


def _more_bands(plan: Plan, tasks: int) -> int:
    """Return what the bands of threads take that have something to do only now that there are so many tasks."""
    threads = min(plan.threads, tasks) - min(plan.threads, plan.stats.tasks)
    casts = any(move.dtype != move.target_dtype for move in plan.moves)
    return max(threads, 0) * thread_bytes(plan.band_bytes, 3 if casts else 2)


def _with_whole_chunks(plan: Plan) -> Plan:
    """Return the plan of a zarr store of which each task writes whole files: as by tensor, but cut where files are."""
    moves = plan.moves
    weights = [prod(move.recipe.shape) * max(move.dtype.itemsize, move.target_dtype.itemsize) for move in moves]
    tasks = shared_out(moves, weights, whole_files=True)
    groups: list[dict[int, None]] = [{} for _ in tasks]
    pieces: list[list[tuple[int, int]]] = [[] for _ in moves]  # of each move: first row and task
    for number, task in enumerate(tasks):
        for piece in task:
            pieces[piece.move].append((piece.start, number))
    sent = held = 0
    for move, some in zip(moves, pieces, strict=True):
        row = prod(move.recipe.shape[1 : move.axis + 1])
        for block, (file,) in zip(move.recipe.targets, move.targets, strict=True):
            first = block.start[0] * row if block.start else 0
            groups[some[bisect_right(some, first, key=itemgetter(0)) - 1][1]][file] = None
        one_sent, one_held = _at_once(plan, move)
        sent, held = max(sent, one_sent), max(held, one_held)
    more = 2 * plan.band_bytes  # a part is sent when a band has made it longer than it need be
    memory = _library_bytes(plan) + min(plan.threads, max(len(tasks), 1)) * (sent + held + more)
    stats = plan.stats._replace(tasks=len(tasks), peak_memory=plan.stats.peak_memory + memory)
    return replace(plan, groups=tuple(map(tuple, groups)), tasks=tasks, stats=stats)


def _at_once(plan: Plan, move: Move) -> tuple[int, int]:
    """Return how many bytes of an array are held for being sent, and for being sent later.

    Files that some rows meet are open side by side, and each begins and ends with the same rows. In a shard of several
    plain chunks, those of the same rows wait for the first.
    """
    files: dict[int, tuple[int, ...]] = {}
    chunks: Counter[tuple[int, ...]] = Counter()
    blocks = move.recipe.targets
    lead = _first_cut(blocks)
    for block, (file,) in zip(blocks, move.targets, strict=True):
        files[file] = min(files.get(file, block.start), block.start)
        chunks[block.start[: lead + 1]] += block.size * move.target_dtype.itemsize
    side_by_side: Counter[tuple[int, ...]] = Counter()
    for file, start in files.items():
        size = plan.files[file].layout.size
        side_by_side[start[: lead + 1]] += 2 * min(part_bytes(size), size)
    waits = move.starts and plan.coding is None
    return max(side_by_side.values(), default=0), max(chunks.values(), default=0) if waits else 0


def _first_cut(blocks: Sequence[Block]) -> int:
    """Return the first axis along which a block has more than one element."""
    return min((axis for block in blocks[:1] for axis, extent in enumerate(block.shape) if extent > 1), default=0)


def _share(move: Move, wanted: frozenset[int]) -> tuple[Recipe, tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Return the part of a recipe that makes the blocks of some files: with its sources by number, and its files."""
    kept = [
        (block, some)
        for block, files in zip(move.recipe.targets, move.targets, strict=True)
        if (some := tuple(number for number in files if number in wanted))
    ]
    blocks = tuple(block for block, _ in kept)
    given = [n for n, source in enumerate(move.recipe.sources) if any(source & block for block in blocks)]
    recipe = Recipe(move.recipe.shape, tuple(move.recipe.sources[n] for n in given), blocks)
    return recipe, tuple(given), tuple(some for _, some in kept)


def _order(plan: Plan, group: Sequence[int]) -> Iterable[str]:
    """Return the names of tensors with contents so that each file's own order is kept."""
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for places in {id(places): places for places in (plan.files[number].layout.places for number in group)}.values():
        stored = [name for name, runs in places.items() if sum(nbytes for _, nbytes in runs)]
        stored.sort(key=lambda name: places[name][0])
        for name in stored:
            sorter.add(name)
        for before, name in pairwise(stored):
            sorter.add(name, before)
    return sorter.static_order()


def _readers(moves: Iterable[Move]) -> Counter[frozenset[int]]:
    """Return how many bytes are read for each set of files: whatever is read for one of its files serves all."""
    found: Counter[frozenset[int]] = Counter()
    known: dict[tuple[int, int, int], Counter[frozenset[int]]] = {}
    for move in moves:
        key = (id(move.recipe), move.axis, id(move.targets))
        if key not in known:
            known[key] = _elements(move)
        for files, elements in known[key].items():
            found[files] += elements * move.dtype.itemsize
    return found


def _elements(move: Move) -> Counter[frozenset[int]]:
    recipe, found = move.recipe, Counter[frozenset[int]]()
    known: dict[int, list[tuple[frozenset[int], int]]] = {}
    for segment in recipe.segments(move.axis, 0, recipe.rows(move.axis)):
        columns = segment.columns
        if id(columns) not in known:
            files: list[set[int]] = [set() for _ in columns.sources]
            for target, parts in zip(columns.targets, columns.parts, strict=True):
                for part in parts:
                    files[part.read].update(move.targets[target])
            known[id(columns)] = [
                (frozenset(some), prod(shape)) for some, shape in zip(files, columns.source_shapes, strict=True)
            ]
        for some, elements in known[id(columns)]:
            found[some] += elements * (segment.stop - segment.start)
    return found


def _groups(readers: Counter[frozenset[int]], numbers: Sequence[int], most: int) -> tuple[tuple[int, ...], ...]:
    """Put files together that read the same bytes, at most so many.

    >>> _groups(Counter({frozenset({0, 1}): 50, frozenset({2, 3}): 50, frozenset({0, 1, 2, 3}): 1}), range(4), 4)
    ((0, 1), (2, 3))
    """
    of = {number: [number] for number in numbers}
    saved = sorted(((nbytes * (len(files) - 1), sorted(files)) for files, nbytes in readers.items()), reverse=True)
    left, enough = sum(nbytes for nbytes, _ in saved), sum(readers.values()) // 16
    for nbytes, files in saved:
        if left <= enough:
            break
        left -= nbytes
        group = of[files[0]]
        for number in files[1:]:
            other = of[number]
            if other is group:
                continue
            if len(group) + len(other) <= most:
                group += other
                of.update(dict.fromkeys(other, group))
            else:
                group = other
    return tuple(tuple(sorted(group)) for group in {id(group): group for group in of.values()}.values())


def _held(plan: Plan, groups: Sequence[Sequence[int]], directory: str) -> int:
    """Return how many bytes a run holds to write at URLs: a library, and in each thread what it is to send."""
    if not is_url(directory):
        return 0
    sizes = ([plan.files[number].layout.size for number in group] for group in groups)
    sent = max((sum(2 * min(part_bytes(size), size) for size in some) for some in sizes), default=0)
    return _library_bytes(plan) + min(plan.threads, max(len(groups), 1)) * sent


def _library_bytes(plan: Plan) -> int:
    """Return what a library takes that writes at URLs; where sources are at URLs too, the plan has it already."""
    return 0 if any(is_url(file.path) for file in plan.source.files) else LIBRARY_BYTES
