"""Opening a source: read the headers of its files and join them with a strategy.

`open` reads headers only. Of the contents it reads no more than a few small pieces, to find out what headers cannot
tell: tensors that are split though no strategy lists them, and listed ones that every rank holds whole. Either would
make a wrong whole-model file, which is the worst that this tool could write.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.block import Block, Shape, shape_text
from reshard.checkpoint import Checkpoint, Entry, FileIndex, Shard, SourceFile, Tensor, TensorSpec
from reshard.errors import Faults, LayoutError, SourceError, StrategyError, names
from reshard.formats import index_file
from reshard.layout import Layout
from reshard.rank_files import RANK_PATTERN, rank_files
from reshard.store import local_store
from reshard.strategy import Strategy
from reshard.strategy_file import read_strategy

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping, Sequence

    from reshard.layout import Grid

_SMALL = 64 * 1024  # tensors up to this size are compared whole when a checkpoint is opened
_SAMPLE = 4096  # of larger ones, this much at the beginning, in the middle and at the end
_MOST_COMPARED = 64  # how many listed tensors are looked at; `integrated_save` makes all of them whole


def open(  # noqa: A001 -- reshard.open, as zarr.open and xarray.open_dataset
    path: str | os.PathLike[str],
    *,
    strategy: Strategy | str | os.PathLike[str] | None = None,
    rank_pattern: str = RANK_PATTERN,
    suffix: str | None = None,
    layouts: Mapping[str, str] | None = None,
) -> Checkpoint:
    """Open a sharded checkpoint, reading headers only.

    Args:
        path: a directory of rank directories, or one file of whole tensors.
        strategy: which rank holds which block: a strategy, a strategy file, or a directory of the files of a
            pipeline's ranks. None: the source is one rank of whole tensors.
        rank_pattern: where a rank's files are below `path`; `{rank}` stands for its number.
        suffix: take the files whose names end so (extension left out or not), where a rank has several.
        layouts: glob of tensor names to a rule (see `Layout.parse`), in place of what the strategy says.

    Raises:
        SourceError: no files, no step that every rank has, missing ranks, headers that contradict the strategy;
            all faults at once.
        StrategyError: the strategy cannot be read.
    """
    root = Path(path)
    files, ranks, notices = read_headers(root, rank_pattern=rank_pattern, suffix=suffix)
    if strategy is not None and not isinstance(strategy, Strategy):
        strategy = read_strategy(strategy)
    strategy, ruled = _with_rules(strategy, layouts or {}, files, ranks)
    join = _Join(str(root), files, ranks, strategy, notices)
    tensors = join.tensors()
    join.compare_contents(tensors, ruled)
    return Checkpoint(str(root), tensors, files, ranks, strategy, tuple(notices), join.unreadable)


def read_headers(
    path: str | os.PathLike[str], *, rank_pattern: str = RANK_PATTERN, suffix: str | None = None
) -> tuple[tuple[SourceFile, ...], tuple[int, ...], list[str]]:
    """Return the files of a checkpoint, the rank of each, and what was noticed; no strategy is needed for that.

    Raises:
        SourceError: no files, no step that every rank has, a file that is not sound.
    """
    notices: list[str] = []
    files, ranks = _indexed(rank_files(Path(path), rank_pattern, suffix, notices))
    return files, ranks, notices


def _indexed(chosen: Mapping[int, Sequence[Path]]) -> tuple[tuple[SourceFile, ...], tuple[int, ...]]:
    """Index every file. Ranks with equal headers share one index, or 4,096 of them would not fit into memory."""
    files: list[SourceFile] = []
    ranks: list[int] = []
    distinct: dict[int, list[FileIndex]] = {}
    for rank, paths in chosen.items():
        for path in paths:
            status = path.stat()
            index = index_file(str(path))
            alike = distinct.setdefault(len(index.entries), [])
            try:
                index = alike[alike.index(index)]
            except ValueError:
                alike.append(index)
            files.append(SourceFile(str(path.absolute()), status.st_size, status.st_mtime_ns, index))
            ranks.append(rank)
    return tuple(files), tuple(ranks)


def _with_rules(
    strategy: Strategy | None, rules: Mapping[str, str], files: Sequence[SourceFile], ranks: Sequence[int]
) -> tuple[Strategy | None, set[str]]:
    """Apply layouts given by hand; return the strategy and the names they were for."""
    if not rules:
        return strategy, set()
    shapes = {name: entry.shape for file in files for name, entry in file.index.entries.items()}
    devices = strategy.devices if strategy else max(ranks) + 1
    result = strategy or Strategy({}, range(1), devices)
    ruled: set[str] = set()
    for pattern, rule in rules.items():
        matching = [name for name in shapes if fnmatchcase(name, pattern)]
        if not matching:
            raise StrategyError(f"--layout {pattern}={rule}: no tensor in the files has such a name")
        for name in matching:
            result = result.with_layout(name, Layout.parse(rule, len(shapes[name]), devices))
        ruled.update(matching)
    return result, ruled


# --- joining files and strategy ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _KnownGrid:
    """What tensors of one grid have in common: each rank's block, and the shards for each set of holders."""

    grid: Grid
    blocks: dict[int, Block]
    shards: dict[tuple[int, ...], tuple[Shard, ...] | None]


class _Join:
    """Works out which blocks there are and who holds them, collecting faults and notices on the way."""

    def __init__(
        self,
        root: str,
        files: tuple[SourceFile, ...],
        ranks: tuple[int, ...],
        strategy: Strategy | None,
        notices: list[str],
    ) -> None:
        self.files, self.ranks, self.strategy, self.notices = files, ranks, strategy, notices
        self.faults = Faults(root)
        self.root = root
        self.unreadable = {name: reason for file in files for name, reason in file.index.unreadable}
        self._lost: list[tuple[int, str]] = []  # a rank without a file, and a tensor that needs it
        self._known: dict[int, _KnownGrid] = {}  # by identity: to hash a large grid for every tensor is slow

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor of the files, checked against the strategy.

        Raises:
            SourceError: all faults at once.
        """
        self._check_ranks()
        found: dict[str, Tensor] = {}
        for name, holders in self._holders().items():
            listed = self.strategy is not None and name in self.strategy.tensors
            tensor = self._listed(name, holders) if listed else self._unlisted(name, holders)
            if tensor is not None:
                found[name] = tensor
        for rank in sorted({rank for rank, _ in self._lost}):
            needing = [name for lost, name in self._lost if lost == rank]
            self.faults.add(
                f"rank {rank}",
                f"has no file; it is needed for {len(needing)} tensors ({names(needing, most=3)})",
            )
        self.faults.raise_if_any(SourceError)
        return found

    def _check_ranks(self) -> None:
        present = sorted(set(self.ranks))
        if self.strategy is None:
            if len(present) > 1:
                raise SourceError(
                    f"{self.root}: has {len(present)} ranks and no strategy says which part each holds; "
                    "give --source-strategy, or --layout '*=RULE'"
                )
            return
        expected = self.strategy.ranks
        unknown = [rank for rank in present if rank not in expected]
        if unknown and not self.strategy.stages.start:
            raise SourceError(
                f"{self.root}: has rank {names(unknown)}; the strategy describes ranks {expected.start} to "
                f"{expected.stop - 1}; give the strategy of all {len(present)} ranks (of a pipeline: the directory "
                "of its strategy files, or the merged file)"
            )

    def _holders(self) -> dict[str, list[int]]:
        """Return the numbers of the files that have each name, of the ranks that the strategy describes."""
        holders: dict[str, list[int]] = {}
        expected = self.strategy.ranks if self.strategy else None
        for number, (file, rank) in enumerate(zip(self.files, self.ranks, strict=True)):
            if expected is None or rank in expected:
                for name in file.index.entries:
                    holders.setdefault(name, []).append(number)
        return holders

    def _listed(self, name: str, holders: list[int]) -> Tensor | None:
        """Join a tensor that the strategy names; it is read from the lowest stage that holds all of it."""
        assert self.strategy is not None  # noqa: S101 -- for the type checker; only called with one
        faults, lost = len(self.faults.found), len(self._lost)
        for stage in self.strategy.stages_of(name):
            in_stage = tuple(n for n in holders if self.strategy.stage_of(self.ranks[n]) == stage)
            if in_stage:
                tensor = self._in_stage(name, stage, in_stage)
                if tensor is not None:
                    del (
                        self.faults.found[faults:],
                        self._lost[lost:],
                    )  # this stage has what an earlier one lacked
                    return tensor
        if len(self.faults.found) == faults and len(self._lost) == lost:
            where = sorted({self.ranks[number] for number in holders})
            stages = names(self.strategy.stages_of(name))
            self.faults.add(
                f"tensor {name!r}",
                f"is in rank {names(where)}; the strategy has it in stage {stages}, other ranks",
            )
        return None

    def _in_stage(self, name: str, stage: int, holders: tuple[int, ...]) -> Tensor | None:
        assert self.strategy is not None  # noqa: S101 -- as above
        first = self.files[holders[0]].index.entries[name]
        if first.text is not None:
            return Tensor(TensorSpec(name, first.dtype, first.shape), (), listed=False, text=first.text)
        try:
            shape = self.strategy.whole_shape(name, first.shape, stage=stage)
            grid = self.strategy.grid(name, shape, stage=stage)
        except LayoutError as error:
            self.faults.add(self.files[holders[0]].path, str(error))
            return None
        faults = len(self.faults.found)
        self._check_stated_shape(name, stage, shape)
        self._check_entries(name, first, grid, holders)
        shards = self._shards_of(name, grid, holders)
        if shards is None or len(self.faults.found) > faults:
            return None
        return Tensor(TensorSpec(name, first.dtype, shape), shards)

    def _check_stated_shape(self, name: str, stage: int, shape: Shape) -> None:
        """Compare with the shape that a JSON strategy gives; whole tensors under a splitting layout show there."""
        assert self.strategy is not None  # noqa: S101 -- as above
        placed = next(p for p in self.strategy.tensors[name] if p.stage == stage)
        if placed.shape is not None and len(placed.shape) == len(shape) and placed.shape != shape:
            self.faults.add(
                f"tensor {name!r}",
                f"would be {shape_text(shape)} by what the files store; the strategy says {shape_text(placed.shape)} "
                f"(saved whole with integrated_save=True? then give --layout '{name}=whole')",
            )

    def _check_entries(self, name: str, first: Entry, grid: Grid, holders: Iterable[int]) -> None:
        blocks = self._known_grid(grid).blocks
        for number in holders:
            entry = self.files[number].index.entries[name]
            block = blocks[self.ranks[number]]
            if entry is first and block.shape == first.shape:
                continue
            if entry.dtype is not first.dtype:
                self.faults.add(
                    self.files[number].path,
                    f"tensor {name!r} is {entry.dtype}; other ranks have {first.dtype}",
                )
            elif entry.shape != block.shape:
                self.faults.add(
                    self.files[number].path,
                    f"tensor {name!r} has shape {shape_text(entry.shape)}; the strategy and the other ranks say "
                    f"{shape_text(block.shape)}",
                )

    def _shards_of(self, name: str, grid: Grid, holders: tuple[int, ...]) -> tuple[Shard, ...] | None:
        """Return who holds each block, or None where nobody holds one."""
        shards_of = self._known_grid(grid).shards
        if holders not in shards_of:
            by_rank: dict[int, list[int]] = {}
            for number in holders:
                by_rank.setdefault(self.ranks[number], []).append(number)
            shards = [
                Shard(block, tuple(number for rank in ranks for number in by_rank.get(rank, ())))
                for block, ranks in zip(grid.blocks, grid.ranks, strict=True)
            ]
            shards_of[holders] = tuple(shards) if all(shard.holders for shard in shards) else None
        found = shards_of[holders]
        if found is None:
            self._tell_lost(name, grid, holders)
        return found

    def _known_grid(self, grid: Grid) -> _KnownGrid:
        known = self._known.get(id(grid))
        if known is None:
            known = self._known[id(grid)] = _KnownGrid(grid, grid.by_rank(), {})
        return known

    def _tell_lost(self, name: str, grid: Grid, holders: Iterable[int]) -> None:
        present = {self.ranks[number] for number in holders}
        for block, ranks in zip(grid.blocks, grid.ranks, strict=True):
            if present.isdisjoint(ranks):
                without_file = [rank for rank in ranks if rank not in self.ranks]
                if without_file:
                    self._lost.append((without_file[0], name))
                else:
                    self.faults.add(f"tensor {name!r}", f"block {block} is in no file; expected in rank {names(ranks)}")

    def _unlisted(self, name: str, holders: list[int]) -> Tensor | None:
        """Join a tensor that no layout describes: every file that has it must hold the same whole of it."""
        first = self.files[holders[0]].index.entries[name]
        for number in holders[1:]:
            entry = self.files[number].index.entries[name]
            if entry is not first and (entry.dtype, entry.shape) != (first.dtype, first.shape):
                self.faults.add(
                    f"tensor {name!r}",
                    f"is {entry.dtype} {shape_text(entry.shape)} in rank {self.ranks[number]} and {first.dtype} "
                    f"{shape_text(first.shape)} in rank {self.ranks[holders[0]]}, and no strategy lists it; "
                    f"{_UNLISTED.format(name=name)}",
                )
                return None
        spec = TensorSpec(name, first.dtype, first.shape)
        if first.text is not None:
            texts = {self.files[number].index.entries[name].text for number in holders}
            return Tensor(
                spec,
                (Shard(Block.whole(first.shape), tuple(holders)),),
                listed=False,
                varies=len(texts) > 1,
                text=first.text,
            )
        return Tensor(spec, (Shard(Block.whole(first.shape), tuple(holders)),), listed=False)

    # --- what headers cannot tell ---

    def compare_contents(self, tensors: dict[str, Tensor], ruled: set[str]) -> None:
        """Look at contents for tensors that are split but not listed, and listed but not split.

        Raises:
            SourceError: there are some; all at once.
        """
        for name, tensor in tensors.items():
            if not tensor.listed:
                self._compare_copies(tensors, name, tensor)
            elif name in ruled:
                self._compare_replicas(name, tensor)
        self._compare_blocks([t for name, t in tensors.items() if t.listed and name not in ruled])
        self.faults.raise_if_any(SourceError)

    def _compare_copies(self, tensors: dict[str, Tensor], name: str, tensor: Tensor) -> None:
        holders = tensor.shards[0].holders if tensor.shards else ()
        differs = tensor.varies
        if tensor.text is None and len(holders) > 1:
            first = self._sample(holders[0], name)
            differs = any(self._sample(number, name) != first for number in holders[1:])
        if not differs:
            return
        if name == "global_step":
            self.faults.add(
                "global_step",
                "differs between the ranks, which are of different steps; choose the files with --suffix",
            )
        elif tensor.text is None and tensor.spec.nbytes > tensor.spec.dtype.itemsize:
            self.faults.add(
                f"tensor {name!r}",
                f"differs between the ranks and no strategy lists it; {_UNLISTED.format(name=name)}",
            )
        else:
            tensors[name] = Tensor(tensor.spec, tensor.shards, listed=False, varies=True, text=tensor.text)
            self.notices.append(f"{name} differs between the ranks; each target rank gets that of one source rank")

    def _compare_replicas(self, name: str, tensor: Tensor) -> None:
        """Look whether a layout given by hand makes replicas of what differs."""
        for shard in tensor.shards:
            first = self._sample(shard.holders[0], name)
            for number in shard.holders[1:]:
                if self._sample(number, name) != first:
                    self.faults.add(
                        f"tensor {name!r}",
                        f"block {shard.block} differs between rank {self.ranks[shard.holders[0]]} and rank "
                        f"{self.ranks[number]}, which --layout says hold the same; give another rule",
                    )
                    return

    def _compare_blocks(self, listed: list[Tensor]) -> None:
        """Look for listed tensors whose distinct blocks are all equal, which `integrated_save` makes."""
        split = [tensor for tensor in listed if len(tensor.shards) > 1 and tensor.spec.nbytes]
        small = [tensor for tensor in split if tensor.spec.nbytes <= _SMALL][: _MOST_COMPARED * 4]
        large = [tensor for tensor in split if tensor.spec.nbytes > _SMALL]
        alike = []
        proven_split = False
        for tensor in small + large[:: len(large) // _MOST_COMPARED + 1]:
            name, width = tensor.spec.name, tensor.spec.dtype.itemsize
            first = self._sample(tensor.shards[0].holders[0], name)
            if any(self._sample(shard.holders[0], name) != first for shard in tensor.shards[1:]):
                proven_split = True
            elif first != first[:width] * (len(first) // width):  # constant tensors (zeros, ones) tell nothing
                alike.append(name)
        if alike and not proven_split:
            self.faults.add(
                f"tensor {names([repr(name) for name in alike], most=3)}",
                "is split by the strategy, and every rank holds the same bytes: whole tensors, saved with "
                "integrated_save=True? Then give --layout 'NAME=whole'; else the layout as a rule",
            )
        elif alike:
            self.notices.append(f"all blocks of {names(alike, most=3)} are equal, though the strategy splits it")

    def _sample(self, number: int, name: str) -> bytes:
        """Return the contents of a small tensor in one file, or pieces of a large one."""
        entry = self.files[number].index.entries[name]
        nbytes = entry.nbytes
        if nbytes <= _SMALL:
            wanted: Iterable[tuple[int, int]] = [(0, nbytes)]
        else:
            middle = nbytes // 2 // entry.dtype.itemsize * entry.dtype.itemsize
            wanted = [(0, _SAMPLE), (middle, _SAMPLE), (nbytes - _SAMPLE, _SAMPLE)]
        return b"".join(_read(self.files[number].path, entry, start, length) for start, length in wanted)


_UNLISTED = (
    "it may be sharded but not listed: save the strategy with only_trainable_params=False, "
    "or give --layout '{name}=RULE'"
)


def _read(path: str, entry: Entry, start: int, nbytes: int) -> bytes:
    """Read part of the contents of an entry, by its offset among them."""
    found = bytearray(nbytes)
    done = position = 0
    for offset, length in entry.runs:
        begin = max(start + done - position, 0)
        if done < nbytes and begin < length:
            count = min(length - begin, nbytes - done)
            local_store().read_into(path, offset + begin, memoryview(found)[done : done + count])
            done += count
        position += length
    return bytes(found)
