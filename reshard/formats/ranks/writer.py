"""The files of the ranks of a strategy, or of one rank of whole tensors.

They are in rank directories, have explicit names, or form a set (`formats.sets.options`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from reshard.core.layout.block import Block, shape_text
from reshard.core.layout.replicas import stored_once
from reshard.core.model.entries import Content, FileLayout, ShardFiles, SizedTensor
from reshard.core.target import MAX_SHARD_BYTES, Target, TargetBlocks, TargetFile, literal, merged_notes
from reshard.errors import LayoutError, UsageError, names
from reshard.formats.sets.options import UnifiedSet
from reshard.formats.sets.sidecars import Sidecars, shard_size
from reshard.kits.files import by_name
from reshard.strategy.names import is_training_state, ranks_text
from reshard.strategy.strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from reshard.core.layout.arrangement import Arrangement
    from reshard.core.layout.block import Shape
    from reshard.core.layout.grid import Grid
    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.model.entries import Replica
    from reshard.core.plan.plan import Request
    from reshard.core.target import Assigned, TargetInputs, TargetTensor
    from reshard.errors import Faults


class Ranks(Target):
    """The files of the ranks of a target."""

    def __init__(self, inputs: TargetInputs) -> None:
        source, request, items, arrangement, _, faults = inputs
        written = by_name(request.format)
        self.format, self.cipher = written.NAME, request.cipher
        self.ranks = _wanted_ranks(arrangement, request.ranks)
        self._source, self._target, self._items = source, arrangement, items
        self._faults = faults
        self._lay_out = written.lay_out
        stored = [self._stored(item) for item in items]
        self._sidecars = Sidecars(source, items, are_wanted=isinstance(request.files, UnifiedSet))
        self.carried = self._sidecars.names
        self.memory = (("sidecar files", self._sidecars.nbytes),)
        self._shard_files: ShardFiles = request.files.shard_files(stored, written.EXTENSION)
        self._remove_redundancy = request.remove_redundancy
        self._fitted: dict[str, Grid | None] = {}
        self._grids = self._stored_once()
        self._rank_files = self._list_files()
        self._files = {(rank, part): number for number, (rank, part, _) in enumerate(self._rank_files)}
        self._wanted: dict[tuple[Grid | Shape, int], TargetBlocks] = {}

    @classmethod
    def settled(cls, request: Request, source: Checkpoint) -> Request:
        """Return the request, with the size of the files of a set; raise `UsageError` if its target is no Strategy."""
        if request.target is not None and not isinstance(request.target, Strategy):
            raise UsageError(
                "the target is the layout of a Checkpoint 2.0, not a Strategy", code="wrong-type",
                hint="give to='checkpoint2', or a Strategy",
            )  # fmt: skip
        files = request.files
        if isinstance(files, UnifiedSet) and files.max_shard_size is None:
            return replace(request, files=replace(files, max_shard_size=shard_size(source) or MAX_SHARD_BYTES))
        return request

    def cuts(self, name: str) -> bool:
        """Return whether the target strategy names a tensor."""
        return self._target is not None and name in self._target.tensors

    def blocks_of(self, item: TargetTensor) -> TargetBlocks | None:
        """Return the target blocks with their files, or None if the layout does not fit."""
        shape = item.tensor.spec.shape
        number = self._shard_files.of[item.name]
        if not self.cuts(item.name):
            if (shape, number) not in self._wanted:
                everywhere = tuple(self._files[rank, number] for rank in self.ranks)
                self._wanted[shape, number] = TargetBlocks((Block.whole(shape),), (everywhere,))
            return self._wanted[shape, number]
        grid = self.stored(item.name, shape)
        if grid is None:
            return None
        if (grid, number) not in self._wanted:
            wanted = [
                (block, tuple(self._files[rank, number] for rank in ranks if (rank, number) in self._files))
                for block, ranks in zip(grid.blocks, grid.ranks, strict=True)
            ]
            written = [(block, files) for block, files in wanted if files]
            self._wanted[grid, number] = TargetBlocks(tuple(b for b, _ in written), tuple(f for _, f in written))
        return self._wanted[grid, number]

    def copies(self, item: TargetTensor, read: Mapping[int, set[int]]) -> list[tuple[Replica, TargetBlocks]]:
        """Return each copy that a target rank gets, with the files of these ranks.

        Rank r gets the copy of source rank `r mod n` if its file is read for r anyway, else the copy of the lowest rank
        whose file is read for r, else the copy of the lowest rank that has one.
        """
        replicas = item.tensor.sharding.replicas[0]
        ranks = self._source.ranks
        by_rank = {ranks[at.file]: at for at in reversed(replicas)}
        count = max(ranks) + 1
        chosen: dict[Replica, list[int]] = {}
        read_for: dict[int, set[int]] = {}
        for file, numbers in read.items():
            read_for.setdefault(self._rank_files[file][0], set()).update(ranks[number] for number in numbers)
        lowest = min(by_rank)
        for rank in self.ranks:
            near = read_for.get(rank, set()) & by_rank.keys()
            at = by_rank[rank % count if rank % count in near else min(near, default=lowest)]
            chosen.setdefault(at, []).append(self._files[rank, self._shard_files.of[item.name]])
        whole = (Block.whole(item.tensor.spec.shape),)
        return [(at, TargetBlocks(whole, (tuple(files),))) for at, files in sorted(chosen.items())]

    def files(self, assigned: Sequence[Assigned], texts: Sequence[TargetTensor]) -> tuple[TargetFile, ...]:
        """Lay out every file; ranks with equal contents share a layout."""
        contents: list[Content] = []
        number_of: dict[tuple[str, Shape], int] = {}
        groups: dict[tuple[int, ...], list[int]] = {}  # indexes into `contents`, by the files that have them
        for item, blocks in assigned:
            for shape, files in blocks.files_by_shape.items():
                number = number_of.setdefault((item.name, shape), len(contents))
                if number == len(contents):
                    contents.append(Content(item.name, item.dtype, shape))
                groups.setdefault(files, []).append(number)
        for item in texts:
            part = self._shard_files.of[item.name]
            files = tuple(self._files[rank, part] for rank in self.ranks)
            groups.setdefault(files, []).append(len(contents))
            contents.append(Content(item.name, item.tensor.spec.dtype, (), item.tensor.text))
        result = self._laid_out(contents, groups)
        last_files = {**self._sidecars.contents, **dict(filter(None, [self._shard_files.index]))}
        result += [
            TargetFile(self.ranks[0], path, literal(content), publish="index") for path, content in last_files.items()
        ]
        if len({file.path for file in result}) < len(result):
            raise UsageError(
                f"several ranks would write to one file of {names(self._shard_files.paths)}", code="duplicate-name",
                hint="add {rank} to the file name",
            )  # fmt: skip
        return tuple(result)

    def _laid_out(
        self, contents: Sequence[Content], groups: Mapping[tuple[int, ...], Sequence[int]]
    ) -> list[TargetFile]:
        """Lay out files, given indexes into contents by the files that have them."""
        order = {item.name: index for index, item in enumerate(self._items)}
        deduplicated = self._remove_redundancy and not self._shard_files.numbered
        notes = merged_notes(self._source.files, self._shard_files.notes, deduplicated=deduplicated)
        numbers_of = list(groups.values())
        groups_of_file: list[list[int]] = [[] for _ in self._rank_files]
        for group, files in enumerate(groups):
            for file in files:
                groups_of_file[file].append(group)

        @cache
        def lay_out(numbers: tuple[int, ...]) -> FileLayout:
            return self._lay_out(sorted((contents[n] for n in numbers), key=lambda item: order[item.name]), notes)

        @cache
        def of_groups(*own: int) -> FileLayout:
            return lay_out(tuple(sorted(number for group in own for number in numbers_of[group])))

        return [
            TargetFile(rank, path, of_groups(*own))
            for (rank, _, path), own in zip(self._rank_files, groups_of_file, strict=True)
        ]

    def warnings(self) -> tuple[str, ...]:
        """Warn of tensors that every rank gets whole, and of sidecar files that are left out."""
        return (*copied_whole(self._source, self._target, self._items), *self._sidecars.warnings())

    def _stored(self, item: TargetTensor) -> SizedTensor:
        tensor = item.tensor
        is_text = tensor.text is not None
        nbytes = 0 if is_text else Block.whole(tensor.spec.shape).size * item.dtype.itemsize
        return SizedTensor(item.name, nbytes, tensor.listed or self.cuts(item.name), is_text=is_text)

    def _stored_once(self) -> dict[str, Grid]:
        """Return the grids of tensors without redundancy; empty if not requested."""
        if not self._remove_redundancy or self._target is None:
            return {}
        cut = [item for item in self._items if self.cuts(item.name)]
        grids = {item.name: self._grid(item.name, item.tensor.spec.shape) for item in cut}
        itemsizes = {item.name: item.dtype.itemsize for item in cut}
        fitted_grids = {name: grid for name, grid in grids.items() if grid is not None}
        reduced = stored_once(fitted_grids, devices=self._target.devices, itemsizes=itemsizes)
        return reduced if self._shard_files.numbered else _none_empty(reduced, fitted_grids, itemsizes)

    def _list_files(self) -> list[tuple[int, int, str]]:
        """Return the rank, the index among the rank's files, and the path of each file."""
        paths = self._shard_files.paths
        if not self._shard_files.numbered:
            parts = list(enumerate(paths))
            return [(rank, part, path.replace("{rank}", str(rank))) for rank in self.ranks for part, path in parts]
        everywhere: set[int] = set()
        cut: dict[tuple[int, Grid], None] = {}
        for item in self._items:
            part = self._shard_files.of[item.name]
            if item.tensor.text is not None or not self.cuts(item.name):
                everywhere.add(part)
            elif grid := self.stored(item.name, item.tensor.spec.shape):
                cut[part, grid] = None
        holders: list[set[int]] = [set(self.ranks) if part in everywhere else set() for part in range(len(paths))]
        for part, grid in cut:
            holders[part].update(*grid.ranks)
        numbers = [{rank: number for number, rank in enumerate(sorted(ranks))} for ranks in holders]
        return [
            (rank, part, paths[part].format(number=number_of[rank], count=len(number_of)))
            for rank in self.ranks
            for part, number_of in enumerate(numbers)
            if rank in number_of
        ]

    def part_of(self, name: str) -> int:
        """Return the index of a tensor's file among a rank's files."""
        return self._shard_files.of[name]

    def path(self, rank: int, part: int) -> str:
        """Return the path of one of the files of a rank."""
        return self._rank_files[self._files[rank, part]][2]

    def stored(self, name: str, shape: Shape) -> Grid | None:
        """Return the blocks of a listed tensor and the ranks that store them, or None."""
        return self._grids.get(name) or self._grid(name, shape)

    def _grid(self, name: str, shape: Shape) -> Grid | None:
        """Return a tensor's blocks and ranks; on misfit, add a single fault and return None."""
        if name not in self._fitted:
            assert self._target is not None  # noqa: S101 -- it names the tensor
            self._fitted[name] = fitted(self._target, name, shape, self._faults)
        return self._fitted[name]


def copied_whole(source: Checkpoint, target: Arrangement | None, items: Sequence[TargetTensor]) -> tuple[str, ...]:
    """Warn of tensors copied whole to every rank because no strategy names them."""
    if target is None or source.strategy is not None:
        return ()
    whole = [
        item.name
        for item in items
        if not (item.name in target.tensors or is_training_state(item.tensor.spec.name, item.tensor))
    ]
    if not whole:
        return ()
    count = f"{len(whole)} tensor{'s' * (len(whole) != 1)}"
    return (f"copied whole to every rank, as the target strategy does not name it: {count}, {names(whole, most=3)}",)


def fitted(target: Arrangement, name: str, shape: Shape, faults: Faults) -> Grid | None:
    """Return a tensor's blocks and their ranks, or add a fault and return None."""
    try:
        grid = target.grid(name, shape)
    except LayoutError as error:
        prefix = f"tensor {name!r}: "
        bare = error.changed(lambda text: text.removeprefix(prefix) if text.startswith(prefix) else text)
        faults.add(f"tensor {name!r}", bare)
        return None
    expected = target.shape_of(name)
    if expected not in {None, shape}:
        faults.add(
            f"tensor {name!r}", f"has shape {shape_text(shape)}; the target strategy says {shape_text(expected or ())}",
            code="wrong-shape",
        )  # fmt: skip
        return None
    return grid


def _none_empty(reduced: dict[str, Grid], full: Mapping[str, Grid], itemsizes: Mapping[str, int]) -> dict[str, Grid]:
    """Let every rank store a block, since MindSpore cannot read a file without tensors.

    A rank without blocks stores its smallest block.
    """
    storing = {rank for grid in reduced.values() for ranks in grid.ranks for rank in ranks}
    of_grid: dict[Grid, tuple[int, str]] = {}
    for name, grid in full.items():
        of_grid[grid] = min(of_grid.get(grid, (itemsizes[name], name)), (itemsizes[name], name))
    smallest: dict[int, tuple[int, str, int]] = {}
    for grid, (itemsize, name) in of_grid.items():
        for number, (block, ranks) in enumerate(zip(grid.blocks, grid.ranks, strict=True)):
            choice = (block.size * itemsize, name, number)
            for rank in set(ranks) - storing:
                smallest[rank] = min(smallest.get(rank, choice), choice)
    for rank, (_, name, number) in sorted(smallest.items()):
        stored = list(reduced[name].ranks)
        stored[number] = tuple(sorted((*stored[number], rank)))
        reduced[name] = replace(reduced[name], ranks=tuple(stored))
    return reduced


def _wanted_ranks(target: Arrangement | None, ranks: Iterable[int] | None) -> tuple[int, ...]:
    available = range(1) if target is None else target.ranks
    result = tuple(available if ranks is None else sorted(set(ranks)))
    outside = [rank for rank in result if rank not in available]
    if outside or not result:
        has = f"the target has ranks {available.start} to {available.stop - 1}"
        if not outside:
            raise UsageError("no rank was requested", code="no-ranks", facts=[has])
        are = "is" if len(outside) == 1 else "are"
        raise UsageError(f"{ranks_text(outside)} {are} not in the target", code="no-such-rank", facts=[has])
    return result
