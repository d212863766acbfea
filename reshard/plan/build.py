"""Build a plan of files, moves and tasks from tensors and a destination.

1. The destination returns the target blocks of every tensor, and the files that they go into (`Wanted`).
2. Source shards and target blocks make a recipe (`bands`), with a replica to read for each shard: a *route*.
3. The destination lays out its files, now that their contents are known.
4. Routes become ways, with the numbers of runs in source and target files; each tensor becomes one move with a way.
5. Rows are divided into tasks of about equal weight (`partition`).

Tensors with the same sharding and target blocks share one route. Shared objects are looked up by identity, not by
content: to hash a grid of 4,096 blocks for every tensor would cost more than the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from reshard.errors import Faults, SourceError
from reshard.formats.entries import Where, part_of
from reshard.layout.axes import boxes
from reshard.plan.bands import Recipe, is_grid
from reshard.plan.partition import share_out
from reshard.plan.plan import Label, Move, Plan, Stats, Way
from reshard.strategy.names import ranks_text
from reshard.targets.destination import Item

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reshard.formats.entries import FileLayout, Runs
    from reshard.layout.block import Shape
    from reshard.plan.budget import Budget
    from reshard.source.checkpoint import Checkpoint, Sharding, Tensor
    from reshard.targets.destination import Destination, TargetFile, Wanted


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """The transfer shared by tensors with equal shardings and target blocks.

    Attributes:
        recipe: see `Way`.
        reads: see `Way`.
        wanted: the target blocks and their files.
        pieces: if the recipe's targets are parts of these blocks, for each target: the number of its block, its first
            element in that block, and its number of consecutive elements.
        written: elements to be written, replicas included.
        shapes: the distinct shapes of target blocks, with all files that get a block of that shape.
    """

    recipe: Recipe
    reads: tuple[Where, ...]
    wanted: Wanted
    written: int
    shapes: tuple[tuple[Shape, tuple[int, ...]], ...]
    pieces: tuple[tuple[int, int, int], ...] = ()


Routed = tuple[Item, Route]


def build(source: Checkpoint, items: Sequence[Item], destination: Destination, budget: Budget, faults: Faults) -> Plan:
    """Build a plan.

    Args:
        source: the checkpoint that is read.
        items: the planned tensors, in the order of the target files.
        destination: lays out the target files.
        budget: the memory that a run may use.
        faults: collects the faults that the destination finds.

    Raises:
        SourceError: a block that a target needs is in no file, or the destination found faults; all at once.
    """
    routes = _Routes(source, faults)
    texts: list[Item] = []
    varying: list[Item] = []
    routed: list[Routed] = []
    for item in items:
        if item.tensor.text is not None:
            texts.append(item)
        elif item.tensor.varies and not destination.cuts(item.name):
            varying.append(item)
        else:
            wanted = destination.wanted(item)
            route = routes.to(item.tensor, wanted) if wanted is not None and wanted.blocks else None
            if route is not None:
                routed.append((item, route))
    faults.raise_if_any(SourceError)
    read = _files_read({route for _, route in routed}) if varying else {}
    for item in varying:
        for at, wanted in destination.copies(item, read):
            route = routes.to(item.tensor, wanted, only=at)
            if route is not None:
                routed.append((item, route))
    files = destination.files(routed, texts)
    moves = _moves(routed, files, budget.band_bytes)
    weights = [max(prod(route.recipe.shape), route.written) * item.tensor.spec.dtype.itemsize for item, route in routed]
    tasks = share_out(moves, weights, budget.band_bytes, whole_files=destination.coding is not None)
    labels: dict[Label, Label] = {}  # a name in many files is stored once
    move_labels = tuple(
        labels.setdefault(label, label) for label in (Label(i.name, i.tensor.spec.name) for i, _ in routed)
    )
    stats, memory = _stats(files, moves, routed, budget, len(tasks))
    result = Plan(
        source,
        files,
        moves,
        move_labels,
        tasks,
        stats,
        destination.format,
        destination.ranks,
        budget.band_bytes,
        budget.threads,
        texts={item.name: item.tensor.text or "" for item in texts},
        coding=destination.coding,
        cipher=destination.cipher,
        exclusive=destination.exclusive,
        memory=memory,
    )
    size = sum(result.size_of(file) for file in files if file.link is None)
    return replace(result, stats=stats._replace(target_bytes=size))


class _Routes:
    """Finds the routes of tensors, and caches them for similar tensors."""

    def __init__(self, source: Checkpoint, faults: Faults) -> None:
        self._source, self._faults = source, faults
        self._known: dict[tuple[Sharding, Wanted, Where | None, Shape | None], Route | None] = {}

    def to(self, tensor: Tensor, wanted: Wanted, *, only: Where | None = None) -> Route | None:
        """Return the route to target blocks, or None if a block is in no file.

        If `only` is given, read this replica, because copies differ.
        """
        key = (tensor.sharding, wanted, only, tensor.space)
        if key not in self._known:
            self._known[key] = _route(tensor, wanted, only)
        route = self._known[key]
        if route is None:
            self._report_absent(tensor, wanted)
        return route

    def _report_absent(self, tensor: Tensor, wanted: Wanted) -> None:
        """Report the source ranks that are needed for a tensor but missing."""
        spec, strategy = tensor.spec, self._source.strategy
        for source, replicas in zip(tensor.sharding.blocks, tensor.sharding.replicas, strict=True):
            if not replicas and any(source & block for block in wanted.blocks):
                grid = strategy.grid(spec.name, spec.shape) if strategy else None
                owners = zip(grid.blocks, grid.ranks, strict=True) if grid else ()
                ranks = next((ranks for block, ranks in owners if block == source), ())
                self._faults.add(
                    f"tensor {spec.name!r}", f"lacks block {source}; expected it in the file of {ranks_text(ranks)}",
                    code="missing-block",
                )  # fmt: skip


def _route(tensor: Tensor, wanted: Wanted, only: Where | None) -> Route | None:
    """Return the route from shards to target blocks, or None if a shard is missing."""
    shape, sharding = tensor.space or tensor.spec.shape, tensor.sharding
    shards = list(zip(sharding.blocks, sharding.replicas, strict=True))
    if only is not None:
        shards = [(block, (only,)) for block, _ in shards]
    targets, pieces = wanted.blocks, tuple[tuple[int, int, int], ...]()
    if tensor.space is not None:
        boxes_in_blocks = [(box, n, at) for n, block in enumerate(targets) for box, at in boxes(block, tensor.axes)]
        boxes_in_blocks.sort(key=lambda piece: piece[1:])  # in the order of sequential writes
        targets, pieces = (
            tuple(box for box, _, _ in boxes_in_blocks),
            tuple((n, at, box.size) for box, n, at in boxes_in_blocks),
        )
    # If the target or the source is incomplete, or has empty blocks, take only the shards that are needed.
    if not (is_grid(shape, targets) and tensor.is_complete):
        shards = [(source, copies) for source, copies in shards if any(source & block for block in targets)]
    if not all(replicas for _, replicas in shards):
        return None
    recipe = Recipe.of(shape, [block for block, _ in shards], targets)
    written = 0
    shapes: dict[Shape, list[int]] = {}
    for block, files in zip(wanted.blocks, wanted.files, strict=True):
        written += block.size * len(files)
        shapes.setdefault(block.shape, []).extend(files)
    return Route(
        recipe,
        tuple(replicas[0] for _, replicas in shards),
        wanted,
        written,
        tuple((extent, tuple(files)) for extent, files in shapes.items()),
        pieces,
    )


def _files_read(routes: Iterable[Route]) -> dict[int, set[int]]:
    """Return the source files that are read for each target file."""
    read_for_file: dict[int, set[int]] = {}
    for route in routes:
        for target, files in zip(route.recipe.targets, _files_of(route), strict=True):
            read = {at.file for block, at in zip(route.recipe.sources, route.reads, strict=True) if block & target}
            for file in files:
                read_for_file.setdefault(file, set()).update(read)
    return read_for_file


def _files_of(route: Route) -> Sequence[tuple[int, ...]]:
    """Return the files that each target of a route's recipe goes into."""
    return [route.wanted.files[number] for number, _, _ in route.pieces] if route.pieces else route.wanted.files


def _moves(routed: Sequence[Routed], files: Sequence[TargetFile], band_bytes: int) -> tuple[Move, ...]:
    """Return one move for each tensor; similar tensors share their ways."""
    writes: dict[Route, tuple[tuple[tuple[Where, ...], ...], list[_BlockRuns]]] = {}
    ways: dict[tuple[Route, int], Way] = {}
    runs: dict[FileLayout, dict[str, list[Runs]]] = {}
    moves = []
    for item, route in routed:
        if route not in writes:
            writes[route] = _writes(route, files)
        extents, block_runs = writes[route]
        dtype = item.tensor.spec.dtype
        axis = route.recipe.axis(band_bytes // max(dtype.itemsize, item.dtype.itemsize))
        way = ways.get((route, axis))
        if way is None:
            row = prod(route.recipe.shape[1 : axis + 1])
            multiple = row * route.wanted.unit_rows or 1
            blocks = tuple(route.wanted.blocks[number] for number, _, _ in route.pieces)
            way = ways[route, axis] = Way(route.recipe, axis, route.reads, extents, multiple, blocks)
        write_runs = []
        for layout, number, piece in block_runs:
            if layout not in runs:
                runs[layout] = _runs_of(layout)
            whole = runs[layout][item.name][number]
            begin, count = (n * item.dtype.itemsize for n in piece) if piece else (0, 0)
            write_runs.append(part_of(whole, begin, count) if piece else whole)
        moves.append(Move(way, dtype, item.dtype, item.tensor.runs, tuple(write_runs)))
    return tuple(moves)


_BlockRuns = tuple["FileLayout", int, tuple[int, int] | None]
"""Runs in a file: its layout, the number of a tensor's block in it, and the first element and count of a part."""


def _writes(route: Route, files: Sequence[TargetFile]) -> tuple[tuple[tuple[Where, ...], ...], list[_BlockRuns]]:
    """Return the extents of each target of a recipe, and the blocks they refer to."""
    count: dict[int, int] = {}  # the tensor's blocks in each file, so far
    blocks = []
    for files_of_block in route.wanted.files:
        blocks.append([(file, count.get(file, 0)) for file in files_of_block])
        for file in files_of_block:
            count[file] = count.get(file, 0) + 1
    parts = route.pieces or [(number, 0, 0) for number in range(len(blocks))]
    numbers: dict[_BlockRuns, int] = {}
    extents = []
    for block, begin, elements in parts:
        piece = (begin, elements) if route.pieces else None
        keys = [(file, (files[file].layout, number, piece)) for file, number in blocks[block]]
        extents.append(tuple(Where(file, numbers.setdefault(key, len(numbers))) for file, key in keys))
    return tuple(extents), list(numbers)


def _runs_of(layout: FileLayout) -> dict[str, list[Runs]]:
    """Return the runs of each tensor's blocks in a file, by name, in the file's order."""
    result: dict[str, list[Runs]] = {}
    for content in layout.contents:
        result.setdefault(content.name, []).append(content.runs)
    return result


def _stats(
    files: Sequence[TargetFile], moves: Sequence[Move], routed: Sequence[Routed], budget: Budget, tasks: int
) -> tuple[Stats, tuple[tuple[str, int], ...]]:
    """Return the costs of a plan, and the parts of its memory."""
    costs: dict[Way, tuple[int, int]] = {}
    needed = read = band = 0
    for move in moves:
        if move.way not in costs:
            elements = move.recipe.elements_read(move.axis)
            costs[move.way] = (elements, min(elements, sum(block.size for block in move.recipe.targets)))
        elements, distinct = costs[move.way]
        read += elements * move.dtype.itemsize
        needed += distinct * move.dtype.itemsize
        band = max(band, min(budget.band_bytes, elements * max(move.dtype.itemsize, move.target_dtype.itemsize)))
    memory = budget.shares(tasks, band)
    stats = Stats(
        tensors=len({item.name for item, _ in routed}),
        bytes_needed=needed,
        bytes_read=read,
        bytes_written=sum(route.written * item.dtype.itemsize for item, route in routed),
        target_bytes=sum(file.layout.size for file in files if file.link is None),
        source_files=len({at.file for way in costs for at in way.reads}),
        target_files=len(files),
        tasks=tasks,
        peak_memory=sum(nbytes for _, nbytes in memory),
    )
    return stats, memory
