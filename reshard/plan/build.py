"""Making a plan: from a checkpoint and a target strategy to files, moves and tasks.

For every tensor that is selected:

1. the target strategy's grid says which ranks get which block, and the volumes in which file of a rank it goes;
2. source shards and wanted blocks make a recipe (`bands`), with a source file for each shard: a *way*;
3. every wanted block becomes an entry of its files, which the format then lays out;
4. rows are shared out into tasks of about equal weight.

Tensors with the same shape, shards and wanted blocks have one way, and target files with the same entries one layout.
Such things are remembered by identity: to hash a grid of 4,096 blocks for every tensor would cost more than the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod
from typing import TYPE_CHECKING, NamedTuple

from reshard.errors import BudgetError, Faults, LayoutError, SourceError, UsageError, names
from reshard.formats import by_name
from reshard.formats.entries import Content, FileLayout
from reshard.formats.target_files import Stored
from reshard.formats.zarr import NAME as ZARR
from reshard.layout.block import Block, shape_text
from reshard.layout.replicas import stored_once
from reshard.plan.bands import VIEWS, Recipe, is_grid
from reshard.plan.plan import Move, Piece, Plan, Stats, TargetFile
from reshard.plan.select import select
from reshard.source.checkpoint import Shard
from reshard.storage.remote import is_url
from reshard.storage.remote_store import fetched_bytes
from reshard.strategy.names import is_training_state

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from reshard.formats.target_files import TargetFiles
    from reshard.layout.block import Shape
    from reshard.layout.layout import Grid
    from reshard.plan.select import Selection
    from reshard.source.checkpoint import Checkpoint, Tensor
    from reshard.storage.local import TargetCoding
    from reshard.strategy.strategy import Strategy

TASK_BYTES = 64 << 20
"""How much a task moves, at least: few, fat tasks, because a scheduler takes 25 µs to 1.5 ms for each."""

MOST_TASKS = 4096

BAND_BYTES = 4 << 20
"""The most bytes of a tensor that a thread reads at once; measured best between 1 and 16 MB."""

LEAST_BAND_BYTES = 64 << 10
"""The least; below it a run is mostly calls."""

THREADS = 4
"""How many threads a run has at most, unless another number is asked for."""

IMPORTED_BYTES = 53 << 20
"""Resident memory of the interpreter with everything that a run imports; measured on CPython 3.11, with numpy.

dask imports jinja2 where it is installed: 2 MiB of it.
"""

CAST_BYTES = 4 << 20
"""What the import of ml_dtypes adds, which only a cast needs."""

TENSOR_BYTES = 1400
"""Resident memory of a tensor in a checkpoint and in a plan. Measured, as the two below, with names of 35 letters."""

ENTRY_BYTES = 700
"""Resident memory of a tensor's entry in an index of a source file, or in a layout of a target file."""

TASK_MEMORY = 4000
"""Resident memory of a task in a plan, in the graph and in the scheduler."""

CHUNK_BYTES = 650
"""Resident memory of a chunk of a zarr store that is read; measured."""


class Wanted(NamedTuple):
    """The blocks of a tensor that are wanted, and the target files that get each."""

    blocks: tuple[Block, ...]
    files: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Way:
    """What moves between equal grids have in common.

    Attributes:
        recipe: see `Move`.
        holders: see `Move`.
        wanted: the target blocks and their files.
        written: elements to be written, replicas included.
        shapes: the distinct shapes of target blocks, with all files that get a block of that shape.
    """

    recipe: Recipe
    holders: tuple[int, ...]
    wanted: Wanted
    written: int
    shapes: tuple[tuple[Shape, tuple[int, ...]], ...]


class Planner:
    """Makes one plan; what is worked out for one tensor is remembered here for the next alike."""

    coding: TargetCoding | None = None  # of the target files

    def __init__(
        self,
        source: Checkpoint,
        target: Strategy | None,
        *,
        format: str | None,  # noqa: A002 -- as in `plan`
        files: TargetFiles,
        ranks: Iterable[int] | None,
        wishes: Selection,
        remove_redundancy: bool,
        link_replicas: bool,
        memory: int | None,
        threads: int | None,
    ) -> None:
        self.source, self.target, self.wishes = source, target, wishes
        self.format = by_name(format or ("safetensors" if source.format in {None, ZARR} else source.format))
        self.ranks = _wanted_ranks(target, ranks)
        self.selected = select(source, target, wishes)
        self.volumes = files.volumes([self._stored(*names) for names in self.selected.kept], self.format.EXTENSION)
        self.first_files = {rank: place * len(self.volumes.paths) for place, rank in enumerate(self.ranks)}
        self.remove_redundancy = remove_redundancy
        self.threads, self.band_bytes = self._within(memory, threads or THREADS)
        self.faults = Faults(source.root)
        self._fitted: dict[str, Grid | None] = {}
        self.grids = self._grids()
        self.originals = self._originals() if link_replicas else {rank: rank for rank in self.ranks}
        self._wanted: dict[object, tuple[Wanted, object]] = {}
        self._ways: dict[tuple[Shape, int, int], _Way] = {}

    def plan(self) -> Plan:
        """Make the plan."""
        kept = [(self.source.tensors[name], new) for name, new in self.selected.kept]
        texts = [(tensor, new) for tensor, new in kept if tensor.text is not None]
        varying = [(t, new) for t, new in kept if t.text is None and t.varies and not self._names(new)]
        set_aside = {new for _, new in (*texts, *varying)}
        moves: list[tuple[Move, _Way]] = []
        for tensor, new in kept:
            if new not in set_aside:
                moves += self._moves(tensor, new)
        self.faults.raise_if_any(SourceError)
        read_for = self._ranks_read([move for move, _ in moves]) if varying else {}
        for tensor, new in varying:
            moves += self._copies(tensor, new, read_for)
        files = self._files(moves, texts)
        tasks = _shared_out(moves, whole_files=self.coding is not None)
        return Plan(
            self.source,
            files,
            tuple(move for move, _ in moves),
            tasks,
            self._stats(files, moves, len(tasks)),
            self.format.NAME,
            self.ranks,
            self.band_bytes,
            self.threads,
            self.selected.dropped,
            self.selected.missing,
            {new: tensor.text or "" for tensor, new in texts},
            (*self.source.notices, *self.selected.notices, *self._whole_copies()),
            coding=self.coding,
        )

    def _stored(self, name: str, new: str) -> Stored:
        tensor = self.source.tensors[name]
        itemsize = self.wishes.target_dtype(tensor.spec.dtype).itemsize
        nbytes = prod(tensor.spec.shape) * itemsize if tensor.text is None else 0
        return Stored(new, nbytes, tensor.listed or self._names(new), is_text=tensor.text is not None)

    def _grids(self) -> dict[str, Grid]:
        """Return the grids of the target's tensors where not every rank of them stores its block; else none."""
        if not self.remove_redundancy or self.target is None:
            return {}
        listed = [(self.source.tensors[name].spec, new) for name, new in self.selected.kept if self._names(new)]
        grids = {new: self._grid(new, spec.shape) for spec, new in listed}
        itemsizes = {new: self.wishes.target_dtype(spec.dtype).itemsize for spec, new in listed}
        found = {new: grid for new, grid in grids.items() if grid is not None}
        kept = stored_once(found, devices=self.target.devices, itemsizes=itemsizes)
        return _none_empty(kept, found, itemsizes)

    def _grid(self, new: str, shape: Shape) -> Grid | None:
        """Return which ranks of the target hold which block; None where the layout does not fit, which is told once."""
        if new not in self._fitted:
            self._fitted[new] = self._fit(new, shape)
        return self._fitted[new]

    def _fit(self, new: str, shape: Shape) -> Grid | None:
        assert self.target is not None  # noqa: S101 -- it names the tensor
        try:
            grid = self.target.grid(new, shape)
        except LayoutError as error:
            self.faults.add(f"tensor {new!r}", str(error).removeprefix(f"tensor {new!r}: "))
            return None
        stated = [p.shape for p in self.target.tensors[new] if p.shape is not None and not p.expanded]
        if stated and stated[0] != shape:
            self.faults.add(
                f"tensor {new!r}", f"has shape {shape_text(shape)}; the target strategy says {shape_text(stated[0])}"
            )
            return None
        return grid

    def _whole_copies(self) -> tuple[str, ...]:
        """Tell which tensors of a source of whole ones are copied to every rank: no strategy says how they are cut."""
        if self.target is None or self.source.strategy is not None:
            return ()
        tensors = self.source.tensors
        whole = [
            new for old, new in self.selected.kept if not (self._names(new) or is_training_state(old, tensors[old]))
        ]
        if not whole:
            return ()
        count = f"{len(whole)} tensor{'s' * (len(whole) != 1)}"
        return (
            f"copied whole to every rank, as the target strategy does not name it: {count}, {names(whole, most=3)}",
        )

    def _names(self, new: str) -> bool:
        """Return whether the target strategy names a tensor."""
        return self.target is not None and new in self.target.tensors

    def _within(self, memory: int | None, threads: int) -> tuple[int, int]:
        """Return how many threads, and bytes in a band, keep a run within a budget."""
        if memory is None:
            return threads, BAND_BYTES
        plain = self._fixed_bytes()
        for fewer in range(threads, 0, -1):
            fixed = plain + self._coding_bytes(fewer)
            band = min(BAND_BYTES, int((memory - fixed) / ((self._buffers() + VIEWS) * fewer)))
            if band >= (BAND_BYTES if fewer > 1 else LEAST_BAND_BYTES):
                return fewer, band
        least = fixed + thread_bytes(LEAST_BAND_BYTES, self._buffers())
        stored = [tensor for _, tensor in sorted((t.spec.nbytes, t.spec.name) for t in self.source.tensors.values())]
        raise BudgetError(
            f"{memory} bytes of memory are too little; the least that works is {least}: {fixed} for the program and "
            f"its plan of {len(stored)} tensors, and the rest to hold a band of tensor {stored[-1] if stored else ''!r}"
        )

    def _buffers(self) -> int:
        """Return how many bands a thread holds: as read, as put together, and cast."""
        return 3 if self.wishes.cast else 2

    def _fixed_bytes(self) -> int:
        """Return about how much memory a run takes beside the bands: the program, the source's indexes, the plan."""
        indexes = {id(file.index.entries): len(file.index.entries) for file in self.source.files}
        kept = [self.source.tensors[name].spec.nbytes for name, _ in self.selected.kept]
        tasks = min(MOST_TASKS, sum(kept) * len(self.ranks) // TASK_BYTES)  # at most: where all ranks get everything
        return (
            IMPORTED_BYTES
            + (CAST_BYTES if self.wishes.cast else 0)
            + TENSOR_BYTES * len(kept)
            + ENTRY_BYTES * (sum(indexes.values()) + len(kept))
            + TASK_MEMORY * tasks
            + 13 * len(self.ranks) * len(kept)  # which tensors are in which file
            + (CHUNK_BYTES * len(self.source.files) if self.source.format == ZARR else 0)
        )

    def _coding_bytes(self, threads: int) -> int:
        """Return how much memory so many threads take to decrypt, decode and compress, and to read at URLs."""
        coded = sum(coding.nbytes(threads) for coding in (self.source.coding, self.coding) if coding)
        remote = any(is_url(file.path) for file in self.source.files)
        return coded + (fetched_bytes(threads, BAND_BYTES) if remote else 0)

    def _written_ranks(self) -> list[int]:
        """Return the ranks whose files are written, not linked."""
        return [rank for rank in self.ranks if self.originals[rank] == rank]

    def _originals(self) -> dict[int, int]:
        """Return, for each rank, the lowest one that gets the same file, byte for byte."""
        kept = [(self.source.tensors[name], new) for name, new in self.selected.kept]
        if any(tensor.varies for tensor, _ in kept):
            return {rank: rank for rank in self.ranks}
        grids = {}
        for tensor, new in kept:
            grid = (self.grids.get(new) or self._grid(new, tensor.spec.shape)) if self._names(new) else None
            if grid is not None:
                grids[id(grid)] = grid
        held: dict[int, list[int]] = {rank: [] for rank in self.ranks}
        for grid in grids.values():
            by_rank = {rank: number for number, ranks in enumerate(grid.ranks) for rank in ranks}
            for rank, numbers in held.items():
                numbers.append(by_rank.get(rank, -1))
        first: dict[tuple[int, ...], int] = {}
        return {rank: first.setdefault(tuple(numbers), rank) for rank, numbers in held.items()}

    def _moves(self, tensor: Tensor, new: str) -> list[tuple[Move, _Way]]:
        """Plan one tensor; nothing where no wanted rank gets any of it, or a fault was found."""
        wanted = self._wanted_of(tensor, new)
        if wanted is None or not wanted.blocks:
            return []
        key = (tensor.spec.shape, id(tensor.shards), id(wanted))
        way = self._ways.get(key)
        if way is None:
            way = _way(tensor.spec.shape, tensor.shards, wanted)
            if way is None:
                self._tell_absent(tensor, wanted)
                return []
            self._ways[key] = way
        return [(self._move(tensor, new, way), way)]

    def _move(self, tensor: Tensor, new: str, way: _Way) -> Move:
        spec = tensor.spec
        target_dtype = self.wishes.target_dtype(spec.dtype)
        axis = way.recipe.axis(self.band_bytes // max(spec.dtype.itemsize, target_dtype.itemsize))
        return Move(new, spec.name, spec.dtype, target_dtype, way.recipe, axis, way.holders, way.wanted.files)

    def _wanted_of(self, tensor: Tensor, new: str) -> Wanted | None:
        """Return the blocks that the wanted ranks get, with their files; None where a fault was found."""
        shape = tensor.spec.shape
        volume = self.volumes.of[new]
        if self.target is None or not self._names(new):
            key: object = (shape, volume)
            if key not in self._wanted:
                everywhere = tuple(self.first_files[rank] + volume for rank in self._written_ranks())
                self._wanted[key] = Wanted((Block.whole(shape),), (everywhere,)), None
            return self._wanted[key][0]
        grid = self.grids.get(new) or self._grid(new, shape)
        if grid is None:
            return None
        key = (id(grid), volume)
        if key not in self._wanted:
            wanted = [
                (block, tuple(self.first_files[rank] + volume for rank in ranks if self.originals.get(rank) == rank))
                for block, ranks in zip(grid.blocks, grid.ranks, strict=True)
            ]
            kept = [(block, files) for block, files in wanted if files]
            # The grid is kept too, so that no other one can get its identity.
            self._wanted[key] = Wanted(tuple(b for b, _ in kept), tuple(f for _, f in kept)), grid
        return self._wanted[key][0]

    def _tell_absent(self, tensor: Tensor, wanted: Wanted) -> None:
        """Say which ranks of the source are needed for a tensor and not there."""
        spec, strategy = tensor.spec, self.source.strategy
        for shard in tensor.shards:
            if not shard.holders and any(shard.block & block for block in wanted.blocks):
                grid = strategy.grid(spec.name, spec.shape) if strategy else None
                ranks = (
                    next((r for b, r in zip(grid.blocks, grid.ranks, strict=True) if b == shard.block), ())
                    if grid
                    else ()
                )
                self.faults.add(
                    f"tensor {spec.name!r}",
                    f"block {shard.block} is in no file that is there; rank {names(ranks)} has it",
                )

    def _copies(self, tensor: Tensor, new: str, read_for: Mapping[int, set[int]]) -> list[tuple[Move, _Way]]:
        """Plan a copy whose value differs between source ranks: each target rank gets that of one of them.

        It is source rank `r mod n` if a move reads it for rank r anyway, else the lowest rank so read that has it,
        else the lowest that has it.
        """
        shard = tensor.shards[0]
        by_rank = {self.source.ranks[number]: number for number in reversed(shard.holders)}
        count = max(self.source.ranks) + 1
        chosen: dict[int, list[int]] = {}
        for rank in self._written_ranks():
            first = self.first_files[rank]
            read = read_for.get(rank, set()) & set(by_rank)
            holder = by_rank[rank % count if rank % count in read else min(read or by_rank)]
            chosen.setdefault(holder, []).append(first + self.volumes.of[new])
        whole = (Block.whole(tensor.spec.shape),)
        ways = [
            _way(tensor.spec.shape, (Shard(shard.block, (holder,)),), Wanted(whole, (tuple(files),)))
            for holder, files in sorted(chosen.items())
        ]
        return [(self._move(tensor, new, way), way) for way in ways if way is not None]

    def _ranks_read(self, moves: Sequence[Move]) -> dict[int, set[int]]:
        """Return, for each target rank, the source ranks whose files are read for it."""
        found: dict[int, set[int]] = {}
        done = set()
        for move in moves:
            key = (id(move.recipe), move.holders, move.targets)
            if key in done:
                continue
            done.add(key)
            for target, files in zip(move.recipe.targets, move.targets, strict=True):
                ranks = {
                    self.source.ranks[holder]
                    for block, holder in zip(move.recipe.sources, move.holders, strict=True)
                    if block & target
                }
                for file in files:
                    found.setdefault(self.ranks[file // len(self.volumes.paths)], set()).update(ranks)
        return found

    def _files(self, moves: Sequence[tuple[Move, _Way]], texts: Sequence[tuple[Tensor, str]]) -> tuple[TargetFile, ...]:
        """Lay out every target file; files with equal contents share one layout."""
        count = len(self.volumes.paths)
        contents: list[list[Content]] = [[] for _ in range(len(self.ranks) * count)]
        shared: dict[tuple[str, Shape], Content] = {}
        for move, way in moves:
            for shape, files in way.shapes:
                content = shared.setdefault((move.name, shape), Content(move.name, move.target_dtype, shape))
                for number in files:
                    contents[number].append(content)
        for tensor, new in texts:
            content = Content(new, tensor.spec.dtype, (), tensor.text)
            for rank in self._written_ranks():
                contents[self.first_files[rank] + self.volumes.of[new]].append(content)
        layouts: dict[tuple[int, ...], FileLayout] = {}
        metadata = self._metadata()
        found = []
        order = {new: place for place, (_, new) in enumerate(self.selected.kept)}
        for number, listed in enumerate(contents):
            listed.sort(key=lambda content: order[content.name])
            key = tuple(map(id, listed))
            if key not in layouts:
                layouts[key] = self.format.lay_out(listed, metadata)
            rank = self.ranks[number // count]
            found.append(TargetFile(rank, self._path(rank, number % count), layouts[key]))
        found = self._linked(found)
        if self.volumes.index:
            path, content_bytes = self.volumes.index
            layout = FileLayout(len(content_bytes), ((0, content_bytes),), {})
            found.append(TargetFile(self.ranks[0], path, layout, last=True))
        if len({file.path for file in found}) < len(found):
            raise UsageError(f"file names {names(self.volumes.paths)} give not one file for each rank; add {{rank}}")
        return tuple(found)

    def _path(self, rank: int, volume: int) -> str:
        return self.volumes.paths[volume].replace("{rank}", str(rank))

    def _linked(self, files: list[TargetFile]) -> list[TargetFile]:
        """Make the files of replicas links to those of the rank that is written."""
        count = len(self.volumes.paths)
        found = []
        for number, file in enumerate(files):
            original = files[self.first_files[self.originals[file.rank]] + number % count]
            found.append(
                file if original is file else original._replace(path=file.path, rank=file.rank, link=original.path)
            )
        return found

    def _metadata(self) -> Mapping[str, str]:
        """Keep the notes of the source files; MindSpore marks its safetensors files with `format`."""
        notes = {"format": "ms"}
        for file in reversed(self.source.files):
            notes.update(file.index.metadata)
        notes.update(self.volumes.notes)
        if self.remove_redundancy:
            notes["remove_redundancy"] = "True"
        return notes

    def _stats(self, files: Sequence[TargetFile], moves: Sequence[tuple[Move, _Way]], tasks: int) -> Stats:
        """Add up what a plan costs."""
        costs: dict[tuple[int, int], tuple[int, int]] = {}
        needed = read = band = 0
        for move, way in moves:
            key = (id(way), move.axis)
            if key not in costs:
                elements = way.recipe.elements_read(move.axis)
                costs[key] = (elements, min(elements, sum(block.size for block in way.recipe.targets)))
            elements, distinct = costs[key]
            read += elements * move.dtype.itemsize
            needed += distinct * move.dtype.itemsize
            band = max(band, min(self.band_bytes, elements * max(move.dtype.itemsize, move.target_dtype.itemsize)))
        return Stats(
            tensors=len({move.name for move, _ in moves}),
            bytes_needed=needed,
            bytes_read=read,
            bytes_written=sum(way.written * move.target_dtype.itemsize for move, way in moves),
            target_bytes=sum(file.layout.size for file in files if file.link is None),
            source_files=len({number for move, _ in moves for number in move.holders}),
            target_files=len(files),
            tasks=tasks,
            peak_memory=self._fixed_bytes()
            + self._coding_bytes(min(self.threads, max(tasks, 1)))
            + min(self.threads, tasks) * (self._buffers() * band + ceil(VIEWS * self.band_bytes)),
        )


def thread_bytes(band: int, buffers: int = 2) -> int:
    """Return the memory that a thread takes for bands of so many bytes: its buffers, and what it keeps of bands."""
    return ceil((buffers + VIEWS) * band)


def _none_empty(kept: dict[str, Grid], every: Mapping[str, Grid], itemsizes: Mapping[str, int]) -> dict[str, Grid]:
    """Let a rank that would store nothing store its smallest block after all; MindSpore reads no file without any."""
    storing = {rank for grid in kept.values() for ranks in grid.ranks for rank in ranks}
    smallest: dict[int, tuple[int, str, int]] = {}
    for name, grid in every.items():
        for number, (block, ranks) in enumerate(zip(grid.blocks, grid.ranks, strict=True)):
            for rank in set(ranks) - storing:
                choice = (block.size * itemsizes[name], name, number)
                smallest[rank] = min(smallest.get(rank, choice), choice)
    for rank, (_, name, number) in sorted(smallest.items()):
        stored = list(kept[name].ranks)
        stored[number] = tuple(sorted((*stored[number], rank)))
        kept[name] = kept[name]._replace(ranks=tuple(stored))
    return kept


def _wanted_ranks(target: Strategy | None, ranks: Iterable[int] | None) -> tuple[int, ...]:
    every = target.ranks if target else range(1)
    wanted = tuple(every if ranks is None else sorted(set(ranks)))
    outside = [rank for rank in wanted if rank not in every]
    if outside or not wanted:
        raise UsageError(
            f"rank {names(outside) or 'none'} is asked for; the target has ranks {every.start} to {every.stop - 1}"
        )
    return wanted


def _way(shape: Shape, shards: Sequence[Shard], wanted: Wanted) -> _Way | None:
    """Return the way from shards to wanted blocks; None where a shard that is needed has no holder."""
    # Of some ranks only, or with blocks that are empty: take the shards that are needed.
    if not (is_grid(shape, wanted.blocks) and all(shard.holders for shard in shards)):
        shards = [shard for shard in shards if any(shard.block & block for block in wanted.blocks)]
    if not all(shard.holders for shard in shards):
        return None
    recipe = Recipe.of(shape, [shard.block for shard in shards], wanted.blocks)
    written = 0
    shapes: dict[Shape, list[int]] = {}
    for block, files in zip(wanted.blocks, wanted.files, strict=True):
        written += block.size * len(files)
        shapes.setdefault(block.shape, []).extend(files)
    return _Way(
        recipe,
        tuple(shard.holders[0] for shard in shards),
        wanted,
        written,
        tuple((extent, tuple(files)) for extent, files in shapes.items()),
    )


def _shared_out(moves: Sequence[tuple[Move, _Way]], *, whole_files: bool) -> tuple[tuple[Piece, ...], ...]:
    """Share the rows of all moves out into tasks of about equal weight."""
    weights = [max(prod(way.recipe.shape), way.written) * move.dtype.itemsize for move, way in moves]
    return shared_out([move for move, _ in moves], weights, whole_files=whole_files)


def shared_out(moves: Sequence[Move], weights: Sequence[int], *, whole_files: bool) -> tuple[tuple[Piece, ...], ...]:
    """Share the rows of moves out into tasks of about equal weight.

    Args:
        moves: what is moved.
        weights: the bytes of each.
        whole_files: a task does whole files (`Move.grain`).
    """
    limit = max(TASK_BYTES, -(-sum(weights) // MOST_TASKS))
    tasks: list[tuple[Piece, ...]] = []
    task: list[Piece] = []
    room = limit
    for number, (move, weight) in enumerate(zip(moves, weights, strict=True)):
        rows = move.recipe.rows(move.axis) if weight else 0
        grain = move.grain if whole_files else 1
        start = 0
        while start < rows:
            count = min(rows - start, -(-max(1, rows * room // weight) // grain) * grain)
            task.append(Piece(number, start, start + count))
            start += count
            room -= weight * count // rows
            if room <= limit // 16:
                tasks.append(tuple(task))
                task, room = [], limit
    if task:
        tasks.append(tuple(task))
    return tuple(tasks)
