"""Plans: which bytes go where, known before anything is read or written.

`plan` is pure: it opens no file, reads no clock and knows no scheduler. A plan is small (a few bytes a tensor and
rank), because everything that tensors have in common is worked out once and shared: grids, recipes, holders, and the
layouts of target files with equal contents.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from reshard.bands import Recipe
from reshard.block import Block
from reshard.checkpoint import Checkpoint, Shard, Tensor
from reshard.errors import Faults, LayoutError, UsageError, names
from reshard.formats import Content, FileLayout, Format, by_name
from reshard.selection import Selection, select

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping, Sequence

    from reshard.arrays import RankArrays
    from reshard.block import Shape
    from reshard.dtypes import DType
    from reshard.graph import Graph
    from reshard.layout import Grid
    from reshard.run import Report
    from reshard.strategy import Strategy

BAND_BYTES = 4 << 20
"""The most bytes of a tensor that a thread holds at once; measured best between 1 and 16 MB."""

TASK_BYTES = 64 << 20
"""How much a task moves, at least: few, fat tasks, because a scheduler takes 25 µs to 1.5 ms for each."""

MOST_TASKS = 4096

IMPORTED_BYTES = 60 << 20
"""Resident memory of the interpreter with everything that a run imports; measured on CPython 3.11."""


@dataclass(frozen=True, slots=True)
class TargetFile:
    """A file to be written.

    Attributes:
        rank: the target rank that it is for.
        path: where it goes, below the target directory.
        layout: its size, its own bytes and the places of the contents; shared by ranks with equal contents.
    """

    rank: int
    path: str
    layout: FileLayout


@dataclass(frozen=True, slots=True)
class Move:
    """One tensor's way from source files to target files.

    Attributes:
        name: the tensor's name in the target files.
        source_name: its name in the source files.
        dtype: kind of the elements, which travel as bits.
        recipe: which rows and columns go where; shared by tensors of equal shape and layouts.
        axis: the axis along which bands are cut.
        holders: for each source block of the recipe, the source file to read it from.
        targets: for each target block of the recipe, the target files that get it: replicas of one another.
    """

    name: str
    source_name: str
    dtype: DType
    recipe: Recipe
    axis: int
    holders: tuple[int, ...]
    targets: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of one move: the part of a task."""

    move: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Stats:
    """What a plan costs. Sizes are in bytes.

    Attributes:
        tensors: how many distinct tensors are moved.
        bytes_needed: distinct bytes of source tensors that the targets hold.
        bytes_read: bytes of contents to be read; more than is needed only where some ranks of a target are wanted.
        bytes_written: bytes of contents to be written, replicas included.
        target_bytes: size of all target files, headers included.
        source_files, target_files: how many files are read and written.
        tasks: how many tasks move bytes.
        peak_memory: resident memory predicted for two threads.
    """

    tensors: int
    bytes_needed: int
    bytes_read: int
    bytes_written: int
    target_bytes: int
    source_files: int
    target_files: int
    tasks: int
    peak_memory: int

    @property
    def read_amplification(self) -> float:
        """Bytes read for each byte needed; 1.0 is best."""
        return self.bytes_read / self.bytes_needed if self.bytes_needed else 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """All that a conversion will do.

    Attributes:
        source: the checkpoint that is read.
        files: the files to be written.
        moves: one for each tensor (several for a copy whose source differs from rank to rank).
        tasks: how the moves are shared out; each is done by one thread from beginning to end.
        stats: what it costs.
        format: name of the target files' format.
        ranks: the ranks of the target that are written.
        dropped: names in the source that the target does not have.
        missing: names in the target that the source does not have.
        notices: what a user should know though it is no error.
    """

    source: Checkpoint
    files: tuple[TargetFile, ...]
    moves: tuple[Move, ...]
    tasks: tuple[tuple[Piece, ...], ...]
    stats: Stats
    format: str
    ranks: tuple[int, ...]
    dropped: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()

    def source_ranks(self) -> tuple[int, ...]:
        """Return the ranks whose files are read, ascending."""
        return tuple(sorted({self.source.ranks[number] for move in self.moves for number in move.holders}))

    def blocks(self, rank: int) -> dict[str, tuple[str, Block]]:
        """Return what a target rank will hold: for each target name, the source name and the block."""
        numbers = {number for number, file in enumerate(self.files) if file.rank == rank}
        return {
            move.name: (
                move.source_name,
                block if self.source.tensors[move.source_name].spec.shape else Block((), ()),
            )
            for move in self.moves
            for block, files in zip(move.recipe.targets, move.targets, strict=True)
            if not numbers.isdisjoint(files)
        }

    def rank(self, rank: int) -> RankArrays:
        """Return what a target rank will hold, as a mapping of names to lazy dask arrays.

        Raises:
            UsageError: the plan does not write this rank.
        """
        from reshard.arrays import RankArrays  # upward: a convenience, see DESIGN section 6

        if rank not in self.ranks:
            raise UsageError(f"rank {rank} is not written by this plan; its ranks are {names(self.ranks)}")
        return RankArrays(self.source, self.blocks(rank))

    def graph(self, directory: str | os.PathLike[str], *, fsync: bool = True) -> Graph:
        """Return the one dask graph that writes the target files below a directory, as a dask collection."""
        from reshard.graph import Graph  # upward, as above

        return Graph(self, str(directory), fsync=fsync)

    def run(self, directory: str | os.PathLike[str], **options: Any) -> Report:
        """Write the target files below a directory; see `reshard.run.run` for the options."""
        from reshard.run import run  # upward, as above

        return run(self, directory, **options)

    def __repr__(self) -> str:
        stats = self.stats
        return (
            f"<Plan: {stats.tensors} tensors to {stats.target_files} {self.format} files, "
            f"{stats.bytes_read} bytes to read, {stats.target_bytes} to write>"
        )


def plan(
    source: Checkpoint,
    target: Strategy | None = None,
    *,
    format: str | None = None,  # noqa: A002 -- the word of every such tool
    prefix: str = "checkpoint_",
    ranks: Iterable[int] | None = None,
    drop: Iterable[str] = (),
    allow_missing: Iterable[str] = (),
) -> Plan:
    """Plan how a checkpoint becomes that of another strategy.

    Args:
        source: the checkpoint to convert.
        target: which rank shall hold which block; None for one rank of whole tensors.
        format: `safetensors` or `ckpt`; by default the source's, and safetensors where that is mixed.
        prefix: target files are `rank_<r>/<prefix><r>.<ext>`.
        ranks: only these ranks of the target; by default all.
        drop: globs of weights that the target may lack though the source has them.
        allow_missing: globs of weights that the source may lack though the target has them.

    Raises:
        SourceError: weights are missing or would be dropped; all at once.
        LayoutError: a target layout does not fit a tensor's shape.
        UsageError: unknown format, rank or an unsound prefix.
    """
    selection = select(source, target, drop=tuple(drop), allow_missing=tuple(allow_missing))
    return _Planner(
        source,
        target,
        selection,
        by_name(format or source.format or "safetensors"),
        prefix,
        _wanted_ranks(target, ranks),
    ).plan()


def _wanted_ranks(target: Strategy | None, ranks: Iterable[int] | None) -> tuple[int, ...]:
    every = target.ranks if target else range(1)
    wanted = tuple(every if ranks is None else sorted(set(ranks)))
    outside = [rank for rank in wanted if rank not in every]
    if outside or not wanted:
        raise UsageError(
            f"rank {names(outside) or 'none'} is asked for; the target has ranks {every.start} to {every.stop - 1}"
        )
    return wanted


@dataclass(frozen=True, slots=True, eq=False)
class _Wanted:
    """The blocks of a tensor that are wanted, and the target files that get each."""

    blocks: tuple[Block, ...]
    files: tuple[tuple[int, ...], ...]
    grid: Grid | None = None


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
    wanted: _Wanted
    written: int
    shapes: tuple[tuple[Shape, tuple[int, ...]], ...]


class _Planner:
    """Makes one plan; what is worked out for one tensor is remembered here for the next alike.

    Shards and wanted blocks are shared by the tensors that have them in common, so they are remembered by identity:
    to hash a grid of 4,096 blocks for every tensor would cost more than the plan.
    """

    def __init__(
        self,
        source: Checkpoint,
        target: Strategy | None,
        selection: Selection,
        format: Format,  # noqa: A002 -- as in `plan`
        prefix: str,
        ranks: tuple[int, ...],
    ) -> None:
        if not prefix.isprintable() or "/" in prefix:
            raise UsageError(f"prefix {prefix!r} is no beginning of a file name; expected one such as 'checkpoint_'")
        self.source, self.target, self.selection = source, target, selection
        self.format, self.prefix, self.ranks = format, prefix, ranks
        self.numbers = {rank: number for number, rank in enumerate(self.ranks)}
        self.everywhere = tuple(self.numbers.values())
        self._wanted_whole: dict[Shape, _Wanted] = {}
        self._wanted: dict[int, _Wanted] = {}
        self._ways: dict[tuple[Shape, int, int], _Way] = {}

    def plan(self) -> Plan:
        """Make the plan."""
        order = [self.source.tensors[name] for name in self.selection.kept]
        texts = [tensor for tensor in order if tensor.text is not None]
        varying = [t for t in order if t.text is None and t.varies and not self._names(t)]
        set_aside = {tensor.spec.name for tensor in (*texts, *varying)}
        faults = Faults("target strategy")
        ways: list[tuple[Move, _Way]] = []
        for tensor in order:
            if tensor.spec.name not in set_aside:
                try:
                    ways += self._move(tensor)
                except LayoutError as error:
                    faults.add(*str(error).split(": ", 1))
        faults.raise_if_any(LayoutError)
        if varying:
            same_everywhere = [move for move, _ in ways]
            for tensor in varying:
                ways += self._copies(tensor, same_everywhere)
        moves = tuple(move for move, _ in ways)
        files = self._files(ways, texts)
        tasks = _shared_out(ways)
        stats = self._stats(files, ways, len(tasks))
        return Plan(
            self.source,
            files,
            moves,
            tasks,
            stats,
            self.format.NAME,
            self.ranks,
            self.selection.dropped,
            self.selection.missing,
            self.source.notices,
        )

    def _names(self, tensor: Tensor) -> bool:
        """Tell whether the target strategy names a tensor."""
        return self.target is not None and tensor.spec.name in self.target.tensors

    def _move(self, tensor: Tensor) -> list[tuple[Move, _Way]]:
        """Plan one tensor; nothing where no wanted rank gets any of it."""
        wanted = self._wanted_of(tensor)
        if not wanted.blocks:
            return []
        key = (tensor.spec.shape, id(tensor.shards), id(wanted))
        way = self._ways.get(key)
        if way is None:
            way = self._ways[key] = _way(tensor.spec.shape, tensor.shards, wanted)
        return [(_moved(tensor, way), way)]

    def _wanted_of(self, tensor: Tensor) -> _Wanted:
        """Return the blocks that the wanted ranks get, with their files."""
        shape = tensor.spec.shape
        if self.target is None or not self._names(tensor):
            if shape not in self._wanted_whole:
                self._wanted_whole[shape] = _Wanted((Block.whole(shape),), (self.everywhere,))
            return self._wanted_whole[shape]
        grid = self.target.grid(tensor.spec.name, shape)
        if id(grid) not in self._wanted:
            wanted = [
                (block, tuple(self.numbers[rank] for rank in ranks if rank in self.numbers))
                for block, ranks in zip(grid.blocks, grid.ranks, strict=True)
            ]
            kept = [(block, files) for block, files in wanted if files]
            # The grid is kept too, so that no other one can get its identity.
            self._wanted[id(grid)] = _Wanted(tuple(b for b, _ in kept), tuple(f for _, f in kept), grid)
        return self._wanted[id(grid)]

    def _copies(self, tensor: Tensor, moves: Sequence[Move]) -> list[tuple[Move, _Way]]:
        """Plan a copy whose value differs between source ranks: each target rank gets that of one of them.

        It is source rank `r mod n` if a move reads it for rank r anyway, else the lowest rank so read that has it,
        else the lowest that has it.
        """
        read_for = self._ranks_read(moves)
        shard = tensor.shards[0]
        by_rank = {self.source.ranks[number]: number for number in reversed(shard.holders)}
        count = max(self.source.ranks) + 1
        chosen: dict[int, list[int]] = {}
        for rank, number in self.numbers.items():
            read = read_for.get(number, set()) & set(by_rank)
            holder = by_rank[rank % count if rank % count in read else min(read or by_rank)]
            chosen.setdefault(holder, []).append(number)
        whole = (Block.whole(tensor.spec.shape),)
        ways = [
            _way(tensor.spec.shape, (Shard(shard.block, (holder,)),), _Wanted(whole, (tuple(files),)))
            for holder, files in sorted(chosen.items())
        ]
        return [(_moved(tensor, way), way) for way in ways]

    def _ranks_read(self, moves: Sequence[Move]) -> dict[int, set[int]]:
        """Return, for each target file, the source ranks whose files are read for it."""
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
                    found.setdefault(file, set()).update(ranks)
        return found

    def _files(self, moves: Sequence[tuple[Move, _Way]], texts: Sequence[Tensor]) -> tuple[TargetFile, ...]:
        """Lay out every target file; ranks with equal contents share one layout."""
        contents: list[list[Content]] = [[] for _ in self.ranks]
        shared: dict[tuple[str, Shape], Content] = {}
        for move, way in moves:
            for shape, files in way.shapes:
                content = shared.setdefault((move.name, shape), Content(move.name, move.dtype, shape))
                for number in files:
                    contents[number].append(content)
        for tensor in texts:
            content = Content(tensor.spec.name, tensor.spec.dtype, (), tensor.text)
            for listed in contents:
                listed.append(content)
        layouts: dict[tuple[int, ...], FileLayout] = {}
        metadata = self._metadata()
        found = []
        for rank, listed in zip(self.ranks, contents, strict=True):
            key = tuple(map(id, listed))
            if key not in layouts:
                layouts[key] = self.format.lay_out(listed, metadata)
            path = f"rank_{rank}/{self.prefix}{rank}{self.format.EXTENSION}"
            found.append(TargetFile(rank, path, layouts[key]))
        return tuple(found)

    def _metadata(self) -> Mapping[str, str]:
        """Keep the notes of the source files; MindSpore marks its safetensors files with `format`."""
        notes = {"format": "ms"}
        for file in reversed(self.source.files):
            notes.update(file.index.metadata)
        return notes

    # --- sharing out, and what it costs ---

    def _stats(self, files: Sequence[TargetFile], moves: Sequence[tuple[Move, _Way]], tasks: int) -> Stats:
        costs: dict[tuple[int, int], tuple[int, int]] = {}
        needed = read = largest = 0
        for move, way in moves:
            key = (id(way), move.axis)
            if key not in costs:
                elements = way.recipe.elements_read(move.axis)
                costs[key] = (elements, min(elements, sum(block.size for block in way.recipe.targets)))
            read += costs[key][0] * move.dtype.itemsize
            needed += costs[key][1] * move.dtype.itemsize
            largest = max(largest, min(BAND_BYTES, costs[key][0] * move.dtype.itemsize))
        return Stats(
            tensors=len({move.name for move, _ in moves}),
            bytes_needed=needed,
            bytes_read=read,
            bytes_written=sum(way.written * move.dtype.itemsize for move, way in moves),
            target_bytes=sum(file.layout.size for file in files),
            source_files=len({number for move, _ in moves for number in move.holders}),
            target_files=len(files),
            tasks=tasks,
            # Two threads, each with the bytes of a band as they were read and as they will be written.
            peak_memory=IMPORTED_BYTES + 2 * 2 * largest,
        )


def _way(shape: Shape, shards: Sequence[Shard], wanted: _Wanted) -> _Way:
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


def _moved(tensor: Tensor, way: _Way) -> Move:
    spec = tensor.spec
    axis = way.recipe.axis(BAND_BYTES // spec.dtype.itemsize)
    return Move(spec.name, spec.name, spec.dtype, way.recipe, axis, way.holders, way.wanted.files)


def _shared_out(moves: Sequence[tuple[Move, _Way]]) -> tuple[tuple[Piece, ...], ...]:
    """Share the rows of all moves out into tasks of about equal weight."""
    weights = [max(prod(way.recipe.shape), way.written) * move.dtype.itemsize for move, way in moves]
    limit = max(TASK_BYTES, -(-sum(weights) // MOST_TASKS))
    tasks: list[tuple[Piece, ...]] = []
    task: list[Piece] = []
    room = limit
    for number, ((move, _), weight) in enumerate(zip(moves, weights, strict=True)):
        rows = move.recipe.rows(move.axis) if weight else 0
        start = 0
        while start < rows:
            count = min(rows - start, max(1, rows * room // weight))
            task.append(Piece(number, start, start + count))
            start += count
            room -= weight * count // rows
            if room <= limit // 16:
                tasks.append(tuple(task))
                task, room = [], limit
    if task:
        tasks.append(tuple(task))
    return tuple(tasks)
