"""Build a plan of files, transfers and tasks from tensors and a destination.

1. The destination returns the target blocks of every tensor, and the files that they go into (`TargetBlocks`).
2. Source shards and target blocks make a recipe (`bands`), with a replica to read for each shard: `_Reads`.
3. The destination lays out its files, now that their contents are known.
4. Each tensor becomes a transfer, with the byte ranges of its blocks in source and target files.
5. Rows are divided into tasks of about equal weight (`partition`).

Tensors with the same sharding and target blocks share reads and a route. Shared objects are looked up by identity, not
by content: to hash a grid of 4,096 blocks for every tensor would cost more than the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from reshard.core.layout.axes import boxes
from reshard.core.layout.strided import is_permuted
from reshard.core.model.checkpoint import stored_files
from reshard.core.model.entries import Replica, part_of
from reshard.core.plan.bands import Recipe, is_grid
from reshard.core.plan.partition import share_out
from reshard.core.plan.plan import Plan, Route, Stats, Transfer
from reshard.errors import Faults, SourceError
from reshard.strategy.names import ranks_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from reshard.core.layout.block import Shape
    from reshard.core.model.checkpoint import Checkpoint, Sharding, Tensor
    from reshard.core.model.entries import FileLayout, Runs
    from reshard.core.plan.budget import Budget
    from reshard.core.storage.base import Coding
    from reshard.core.storage.cipher import Cipher
    from reshard.core.target import Target, TargetBlocks, TargetFile, TargetTensor
    from reshard.kits.chunks import Decoding


@dataclass(frozen=True, slots=True, eq=False)
class _Reads:
    """The reads that tensors with equal shardings and target blocks share. Compared by identity.

    Attributes:
        recipe: see `Route`.
        replicas: the replica to read, for each source block of the recipe.
        blocks: the target blocks and their files.
        pieces: if the recipe's targets are parts of these blocks, for each target: the number of its block, its first
            element in that block, and its number of consecutive elements.
    """

    recipe: Recipe
    replicas: tuple[Replica, ...]
    blocks: TargetBlocks
    pieces: tuple[tuple[int, int, int], ...] = ()


def build(
    source: Checkpoint, items: Sequence[TargetTensor], destination: Target, budget: Budget, faults: Faults
) -> Plan:
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
    shared = _SharedReads(source, faults)
    texts: list[TargetTensor] = []
    varying: list[TargetTensor] = []
    planned: list[tuple[TargetTensor, _Reads]] = []
    for item in items:
        if item.tensor.text is not None:
            texts.append(item)
        elif item.tensor.varies and not destination.cuts(item.name):
            varying.append(item)
        else:
            blocks = destination.blocks_of(item)
            reads = shared.of(item.tensor, blocks) if blocks is not None and blocks.blocks else None
            if reads is not None:
                planned.append((item, reads))
    faults.raise_if_any(SourceError)
    read = _files_read({reads for _, reads in planned}) if varying else {}
    for item in varying:
        for replica, blocks in destination.copies(item, read):
            reads = shared.of(item.tensor, blocks, only=replica)
            if reads is not None:
                planned.append((item, reads))
    files = destination.files([(item, reads.blocks) for item, reads in planned], texts)
    transfers = _transfers(planned, files, budget.band_bytes, source)
    weights = [
        max(prod(reads.recipe.shape), reads.blocks.elements) * item.tensor.spec.dtype.itemsize
        for item, reads in planned
    ]
    cuts = _cuts(source, transfers)
    edges = chunk_edges(source.coding, [file.path for file in source.files], transfers)
    tasks = share_out(
        transfers, weights, budget.band_bytes, whole_files=destination.coding is not None, cuts=cuts, edges=edges
    )
    stats, memory = _stats(source, files, transfers, budget, len(tasks), destination.cipher)
    return Plan(
        source,
        files,
        transfers,
        tasks,
        stats,
        destination.format,
        destination.ranks,
        budget.band_bytes,
        budget.threads,
        texts={item.name: item.tensor.text or "" for item in texts},
        coding=destination.coding,
        cipher=destination.cipher,
        shape=destination.shape,
        memory=memory,
        warnings=tuple(_decoded_again(source, [transfers[number] for number in edges])),
        shared_bytes=budget.shared_bytes,
    )


class _SharedReads:
    """Finds the reads of tensors, and caches them for similar tensors."""

    def __init__(self, source: Checkpoint, faults: Faults) -> None:
        self._source, self._faults = source, faults
        self._known: dict[tuple[Sharding, TargetBlocks, Replica | None, Shape | None], _Reads | None] = {}

    def of(self, tensor: Tensor, blocks: TargetBlocks, *, only: Replica | None = None) -> _Reads | None:
        """Return the reads for target blocks, or None if a block is in no file.

        If `only` is given, read this replica, because copies differ.
        """
        key = (tensor.sharding, blocks, only, tensor.space)
        if key not in self._known:
            self._known[key] = _reads(tensor, blocks, only)
        reads = self._known[key]
        if reads is None:
            self._report_absent(tensor, blocks)
        return reads

    def _report_absent(self, tensor: Tensor, target: TargetBlocks) -> None:
        """Add a fault for each missing block that a target needs."""
        spec, strategy = tensor.spec, self._source.strategy
        for source, replicas in zip(tensor.sharding.blocks, tensor.sharding.replicas, strict=True):
            if not replicas and any(source & block for block in target.blocks):
                grid = strategy.grid(spec.name, spec.shape) if strategy else None
                owners = zip(grid.blocks, grid.ranks, strict=True) if grid else ()
                ranks = next((ranks for block, ranks in owners if block == source), ())
                self._faults.add(
                    f"tensor {spec.name!r}", f"lacks block {source}; expected it in the file of {ranks_text(ranks)}",
                    code="missing-block",
                )  # fmt: skip


def _reads(tensor: Tensor, target: TargetBlocks, only: Replica | None) -> _Reads | None:
    """Return the reads for target blocks, or None if a shard is missing."""
    shape, sharding = tensor.space or tensor.spec.shape, tensor.sharding
    shards = list(zip(sharding.blocks, sharding.replicas, strict=True))
    if only is not None:
        shards = [(block, (only,)) for block, _ in shards]
    targets, pieces = target.blocks, tuple[tuple[int, int, int], ...]()
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
    return _Reads(recipe, tuple(replicas[0] for _, replicas in shards), target, pieces)


def _files_read(every: Iterable[_Reads]) -> dict[int, set[int]]:
    """Return the source files that are read for each target file."""
    read_for_file: dict[int, set[int]] = {}
    for reads in every:
        of_block = reads.blocks.files
        files_of_target = [of_block[number] for number, _, _ in reads.pieces] if reads.pieces else of_block
        for target, files in zip(reads.recipe.targets, files_of_target, strict=True):
            blocks = zip(reads.recipe.sources, reads.replicas, strict=True)
            read = {replica.file for block, replica in blocks if block & target}
            for file in files:
                read_for_file.setdefault(file, set()).update(read)
    return read_for_file


def _transfers(
    planned: Sequence[tuple[TargetTensor, _Reads]], files: Sequence[TargetFile], band_bytes: int, source: Checkpoint
) -> tuple[Transfer, ...]:
    """Return the transfer of each tensor; similar tensors share their routes."""
    computes = any(file.inputs is not None for file in source.files)
    writes: dict[_Reads, tuple[tuple[tuple[Replica, ...], ...], list[_BlockRuns]]] = {}
    routes: dict[tuple[_Reads, int], Route] = {}
    runs: dict[FileLayout, dict[str, list[Runs]]] = {}
    transfers = []
    for item, reads in planned:
        if reads not in writes:
            writes[reads] = _writes(reads, files)
        replicas, block_runs = writes[reads]
        dtype = item.tensor.spec.dtype
        axis = reads.recipe.axis(band_bytes // max(dtype.itemsize, item.dtype.itemsize))
        route = routes.get((reads, axis))
        if route is None:
            multiple = prod(reads.recipe.shape[1 : axis + 1]) * reads.blocks.unit_rows or 1
            held = tuple(reads.blocks.blocks[number] for number, _, _ in reads.pieces)
            route = routes[reads, axis] = Route(reads.recipe, axis, reads.replicas, replicas, multiple, held)
        write_runs = []
        for layout, number, piece in block_runs:
            if layout not in runs:
                runs[layout] = _runs_of(layout)
            whole = runs[layout][item.name][number]
            begin, count = (n * item.dtype.itemsize for n in piece) if piece else (0, 0)
            write_runs.append(part_of(whole, begin, count) if piece else whole)
        cost = _cost(source, route, item.tensor.runs) if computes else 1.0
        transfers.append(
            Transfer(
                route, item.name, item.tensor.spec.name, dtype, item.dtype, item.tensor.runs, tuple(write_runs), cost
            )
        )  # fmt: skip
    return tuple(transfers)


def _cuts(source: Checkpoint, transfers: Sequence[Transfer]) -> dict[int, list[int]]:
    """Return the rows at which tasks may be cut, for transfers of assigned arrays."""
    if all(file.inputs is None for file in source.files):
        return {}
    from reshard.expressions.assigned import array_of, row_edges  # rarely needed

    cuts = {}
    for number, transfer in enumerate(transfers):
        reads = ((source.files[at.file].path, at.runs[0][0]) for at in transfer.reads if at.runs)
        if any(array_of(source.coding, path, offset) is not None for path, offset in reads):
            cuts[number] = row_edges(transfer)
    return cuts


def _decoding(coding: Coding | None) -> Decoding | None:
    """Return the coding of a source if it has encoded chunks, else None."""
    if coding is None:
        return None
    from reshard.kits.chunks import Decoding  # rarely needed

    return coding if isinstance(coding, Decoding) else None


def chunk_edges(coding: Coding | None, paths: Sequence[str], transfers: Sequence[Transfer]) -> dict[int, list[int]]:
    """Return the rows at which encoded chunks begin, and last the number of rows, for transfers that have any."""
    decoding = _decoding(coding)
    if decoding is None:
        return {}
    edges = {}
    for number, transfer in enumerate(transfers):
        unit = prod(transfer.recipe.shape[1 : transfer.axis + 1])
        starts = {
            block.start[0] * unit
            for block, at in zip(transfer.recipe.sources, transfer.reads, strict=True)
            if at.runs and decoding.chunk_at(paths[at.file], at.runs[0][0])
        }
        if starts:
            edges[number] = sorted({0, transfer.rows, *starts})
    return edges


def _decoded_again(source: Checkpoint, transfers: Sequence[Transfer]) -> Iterator[str]:
    """Yield a warning if transfers permute the elements of encoded chunks, or share strided ones."""
    decoding = _decoding(source.coding)
    if decoding is None:
        return
    permuted: set[int] = set()
    users: dict[tuple[str, int], set[int]] = {}
    for number, transfer in enumerate(transfers):
        for block, at in zip(transfer.recipe.sources, transfer.reads, strict=True):
            chunk = decoding.chunk_at(source.files[at.file].path, at.runs[0][0]) if at.strides else None
            if chunk is not None:
                users.setdefault(chunk, set()).add(number)
                if is_permuted(block.shape, at.strides):
                    permuted.add(number)
    if count := len(permuted.union(*(numbers for numbers in users.values() if len(numbers) > 1))):
        yield (
            f"{count} tensor{'s need' if count > 1 else ' needs'} the elements of compressed chunks in another order, "
            "so that chunks are decoded several times; converting to safetensors without rules first, and then with "
            "rules, is faster"
        )


def _cost(source: Checkpoint, route: Route, runs: Sequence[Runs]) -> float:
    """Return the bytes that are read for each byte of a tensor."""
    from reshard.expressions.computed import cost_of  # rarely needed

    return cost_of(source, route.reads[0].file, runs) if route.reads else 1.0


_BlockRuns = tuple["FileLayout", int, tuple[int, int] | None]
"""Runs in a file: its layout, the number of a tensor's block in it, and the first element and count of a part."""


def _writes(reads: _Reads, files: Sequence[TargetFile]) -> tuple[tuple[tuple[Replica, ...], ...], list[_BlockRuns]]:
    """Return the replicas of each target of a recipe, and the keys of their runs, indexed by `Replica.number`."""
    count: dict[int, int] = {}  # the tensor's blocks in each file, so far
    blocks = []
    for files_of_block in reads.blocks.files:
        blocks.append([(file, count.get(file, 0)) for file in files_of_block])
        for file in files_of_block:
            count[file] = count.get(file, 0) + 1
    parts = reads.pieces or [(number, 0, 0) for number in range(len(blocks))]
    numbers: dict[_BlockRuns, int] = {}
    replicas = []
    for block, begin, elements in parts:
        piece = (begin, elements) if reads.pieces else None
        keys = [(file, (files[file].layout, number, piece)) for file, number in blocks[block]]
        replicas.append(tuple(Replica(file, numbers.setdefault(key, len(numbers))) for file, key in keys))
    return tuple(replicas), list(numbers)


def _runs_of(layout: FileLayout) -> dict[str, list[Runs]]:
    """Return the runs of each tensor's blocks in a file, by name, in the file's order."""
    result: dict[str, list[Runs]] = {}
    for content in layout.contents:
        result.setdefault(content.name, []).append(content.runs)
    return result


def _stats(
    source: Checkpoint,
    files: Sequence[TargetFile],
    transfers: Sequence[Transfer],
    budget: Budget,
    tasks: int,
    cipher: Cipher | None,
) -> tuple[Stats, tuple[tuple[str, int], ...]]:
    """Return the costs of a plan, and the parts of its memory."""
    costs: dict[Route, tuple[int, int, int]] = {}
    needed = read = written = band = 0
    for transfer in transfers:
        route = transfer.route
        if route not in costs:
            elements = route.recipe.elements_read(route.axis)
            targets = route.recipe.targets
            copied = sum(block.size * len(replicas) for block, replicas in zip(targets, route.writes, strict=True))
            costs[route] = elements, min(elements, sum(block.size for block in targets)), copied
        elements, distinct, copied = costs[route]
        read += round(elements * transfer.dtype.itemsize * transfer.cost)
        needed += round(distinct * transfer.dtype.itemsize * transfer.cost)
        written += copied * transfer.target_dtype.itemsize
        band = max(
            band, min(budget.band_bytes, elements * max(transfer.dtype.itemsize, transfer.target_dtype.itemsize))
        )
    memory = budget.shares(tasks, band)
    sizes = [file.layout.size for file in files if file.link is None]
    stats = Stats(
        tensors=len({transfer.name for transfer in transfers}),
        bytes_needed=needed,
        bytes_read=read,
        bytes_written=written,
        target_bytes=sum(map(cipher.encrypted_size, sizes) if cipher else sizes),
        source_files=len(stored_files(source.files, {replica.file for route in costs for replica in route.reads})),
        target_files=len(files),
        tasks=tasks,
        peak_memory=sum(nbytes for _, nbytes in memory),
    )
    return stats, memory
