"""The files of the ranks of a strategy, or of one rank of whole tensors.

They are in rank directories, have names that were given, or are a set (`formats.sets`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.errors import LayoutError, UsageError, names
from reshard.formats.entries import Content, FileLayout, Stored
from reshard.layout.block import Block, shape_text
from reshard.layout.replicas import stored_once
from reshard.strategy.names import is_training_state, ranks_text
from reshard.targets.destination import TargetFile, Wanted, literal, merged_notes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from reshard.errors import Faults
    from reshard.formats.entries import Format, TargetFiles, Where
    from reshard.layout.block import Shape
    from reshard.layout.layout import Grid
    from reshard.plan.budget import Share
    from reshard.plan.build import Routed
    from reshard.source.checkpoint import Checkpoint
    from reshard.storage.base import TargetCoding
    from reshard.storage.cipher import Cipher
    from reshard.strategy.strategy import Strategy
    from reshard.targets.destination import Item


class Ranks:
    """The files of the ranks of a target: `Destination`."""

    exclusive = False
    coding: TargetCoding | None = None
    memory: tuple[Share, ...] = ()

    def __init__(
        self,
        source: Checkpoint,
        target: Strategy | None,
        items: Sequence[Item],
        *,
        format: Format,  # noqa: A002 -- as in `plan`
        files: TargetFiles,
        ranks: Iterable[int] | None,
        remove_redundancy: bool,
        link_replicas: bool,
        cipher: Cipher | None,
        faults: Faults,
    ) -> None:
        self.format = format.NAME
        self.cipher = cipher
        self.ranks = _wanted_ranks(target, ranks)
        self._source, self._target, self._items = source, target, items
        self._faults = faults
        self._lay_out = format.lay_out
        self._shard_files = files.shard_files([self._stored(item) for item in items], format.EXTENSION)
        self._first_files = {rank: place * len(self._shard_files.paths) for place, rank in enumerate(self.ranks)}
        self._remove_redundancy = remove_redundancy
        self._fitted: dict[str, Grid | None] = {}
        self._grids = self._stored_once()
        self._originals = self._equal_ranks() if link_replicas else {rank: rank for rank in self.ranks}
        self._wanted: dict[tuple[Grid | Shape, int], Wanted] = {}

    def cuts(self, name: str) -> bool:
        """Return whether the target strategy names a tensor."""
        return self._target is not None and name in self._target.tensors

    def wanted(self, item: Item) -> Wanted | None:
        """Return the blocks that the ranks get, with their files; None where the layout does not fit."""
        shape = item.tensor.spec.shape
        number = self._shard_files.of[item.name]
        if not self.cuts(item.name):
            if (shape, number) not in self._wanted:
                everywhere = tuple(self._first_files[rank] + number for rank in self._written_ranks())
                self._wanted[shape, number] = Wanted((Block.whole(shape),), (everywhere,))
            return self._wanted[shape, number]
        grid = self._grids.get(item.name) or self._grid(item.name, shape)
        if grid is None:
            return None
        if (grid, number) not in self._wanted:
            wanted = [
                (block, tuple(self._first_files[rank] + number for rank in ranks if self._originals.get(rank) == rank))
                for block, ranks in zip(grid.blocks, grid.ranks, strict=True)
            ]
            kept = [(block, files) for block, files in wanted if files]
            self._wanted[grid, number] = Wanted(tuple(b for b, _ in kept), tuple(f for _, f in kept))
        return self._wanted[grid, number]

    def copies(self, item: Item, read: Mapping[int, set[int]]) -> list[tuple[Where, Wanted]]:
        """Return, for each copy that some target rank gets, where it is and the files of those ranks.

        Rank r gets that of source rank `r mod n` if its file is read for r anyway, else of the lowest rank so read that
        has it, else of the lowest that has it.
        """
        replicas = item.tensor.sharding.replicas[0]
        ranks = self._source.ranks
        by_rank = {ranks[at.file]: at for at in reversed(replicas)}
        count = max(ranks) + 1
        chosen: dict[Where, list[int]] = {}
        for rank in self._written_ranks():
            first = self._first_files[rank]
            files = range(first, first + len(self._shard_files.paths))
            near = {ranks[number] for file in files for number in read.get(file, ())} & set(by_rank)
            at = by_rank[rank % count if rank % count in near else min(near or by_rank)]
            chosen.setdefault(at, []).append(first + self._shard_files.of[item.name])
        whole = (Block.whole(item.tensor.spec.shape),)
        return [(at, Wanted(whole, (tuple(files),))) for at, files in sorted(chosen.items())]

    def files(self, routed: Sequence[Routed], texts: Sequence[Item]) -> tuple[TargetFile, ...]:
        """Lay out every file; ranks with equal contents share a layout."""
        count = len(self._shard_files.paths)
        contents: list[Content] = []
        held: list[list[int]] = [[] for _ in range(len(self.ranks) * count)]  # numbers of contents, which files share
        known: dict[tuple[str, Shape], int] = {}
        for item, route in routed:
            for shape, files in route.shapes:
                number = known.setdefault((item.name, shape), len(contents))
                if number == len(contents):
                    contents.append(Content(item.name, item.dtype, shape))
                for file in files:
                    held[file].append(number)
        for item in texts:
            for rank in self._written_ranks():
                held[self._first_files[rank] + self._shard_files.of[item.name]].append(len(contents))
            contents.append(Content(item.name, item.tensor.spec.dtype, (), item.tensor.text))
        order = {item.name: place for place, item in enumerate(self._items)}
        places = [order[content.name] for content in contents]
        layouts: dict[tuple[int, ...], FileLayout] = {}
        notes = merged_notes(self._source.files, self._shard_files.notes, deduplicated=self._remove_redundancy)
        found = []
        for number, listed in enumerate(held):
            listed.sort(key=places.__getitem__)
            key = tuple(listed)
            if key not in layouts:
                layouts[key] = self._lay_out([contents[n] for n in listed], notes)
            rank = self.ranks[number // count]
            path = self._shard_files.paths[number % count].replace("{rank}", str(rank))
            found.append(TargetFile(rank, path, layouts[key]))
        found = self._linked(found)
        if self._shard_files.index:
            path, content_bytes = self._shard_files.index
            found.append(TargetFile(self.ranks[0], path, literal(content_bytes), last=True))
        if len({file.path for file in found}) < len(found):
            raise UsageError(
                f"file names {names(self._shard_files.paths)} give not one file for each rank; add {{rank}}"
            )
        return tuple(found)

    def copied_whole(self) -> tuple[str, ...]:
        """Warn of tensors of a source of whole ones that every rank gets whole: no strategy says how they are cut."""
        if self._target is None or self._source.strategy is not None:
            return ()
        whole = [
            item.name
            for item in self._items
            if not (self.cuts(item.name) or is_training_state(item.tensor.spec.name, item.tensor))
        ]
        if not whole:
            return ()
        count = f"{len(whole)} tensor{'s' * (len(whole) != 1)}"
        return (
            f"copied whole to every rank, as the target strategy does not name it: {count}, {names(whole, most=3)}",
        )

    def _stored(self, item: Item) -> Stored:
        tensor = item.tensor
        is_text = tensor.text is not None
        nbytes = 0 if is_text else Block.whole(tensor.spec.shape).size * item.dtype.itemsize
        return Stored(item.name, nbytes, tensor.listed or self.cuts(item.name), is_text=is_text)

    def _written_ranks(self) -> list[int]:
        """Return the ranks whose files are written, not linked."""
        return [rank for rank in self.ranks if self._originals[rank] == rank]

    def _stored_once(self) -> dict[str, Grid]:
        """Return the grids of the target's tensors where not every rank of them stores its block; else none."""
        if not self._remove_redundancy or self._target is None:
            return {}
        listed = [item for item in self._items if self.cuts(item.name)]
        grids = {item.name: self._grid(item.name, item.tensor.spec.shape) for item in listed}
        itemsizes = {item.name: item.dtype.itemsize for item in listed}
        found = {name: grid for name, grid in grids.items() if grid is not None}
        kept = stored_once(found, devices=self._target.devices, itemsizes=itemsizes)
        return _none_empty(kept, found, itemsizes)

    def _grid(self, name: str, shape: Shape) -> Grid | None:
        """Return which ranks of the target hold which block; None where it does not fit, a fault that is kept once."""
        if name not in self._fitted:
            self._fitted[name] = self._fit(name, shape)
        return self._fitted[name]

    def _fit(self, name: str, shape: Shape) -> Grid | None:
        assert self._target is not None  # noqa: S101 -- it names the tensor
        try:
            grid = self._target.grid(name, shape)
        except LayoutError as error:
            self._faults.add(f"tensor {name!r}", str(error).removeprefix(f"tensor {name!r}: "))
            return None
        stated = [p.shape for p in self._target.tensors[name] if p.shape is not None and not p.expanded]
        if stated and stated[0] != shape:
            self._faults.add(
                f"tensor {name!r}", f"has shape {shape_text(shape)}; the target strategy says {shape_text(stated[0])}"
            )
            return None
        return grid

    def _equal_ranks(self) -> dict[int, int]:
        """Return, for each rank, the lowest one that gets the same file, byte for byte."""
        if any(item.tensor.varies for item in self._items):
            return {rank: rank for rank in self.ranks}
        cut = [item for item in self._items if self.cuts(item.name)]
        fitted = {self._grids.get(item.name) or self._grid(item.name, item.tensor.spec.shape): None for item in cut}
        held: dict[int, list[int]] = {rank: [] for rank in self.ranks}
        for grid in fitted:
            if grid is not None:
                by_rank = {rank: number for number, ranks in enumerate(grid.ranks) for rank in ranks}
                for rank, numbers in held.items():
                    numbers.append(by_rank.get(rank, -1))
        first: dict[tuple[int, ...], int] = {}
        return {rank: first.setdefault(tuple(numbers), rank) for rank, numbers in held.items()}

    def _linked(self, files: list[TargetFile]) -> list[TargetFile]:
        """Make the files of replicas links to those of the rank that is written."""
        count = len(self._shard_files.paths)
        found = []
        for number, file in enumerate(files):
            original = files[self._first_files[self._originals[file.rank]] + number % count]
            found.append(
                file if original is file else original._replace(path=file.path, rank=file.rank, link=original.path)
            )
        return found


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
        kept[name] = replace(kept[name], ranks=tuple(stored))
    return kept


def _wanted_ranks(target: Strategy | None, ranks: Iterable[int] | None) -> tuple[int, ...]:
    every = target.ranks if target else range(1)
    wanted = tuple(every if ranks is None else sorted(set(ranks)))
    outside = [rank for rank in wanted if rank not in every]
    if outside or not wanted:
        asked = f"{ranks_text(outside)} {'is' if len(outside) == 1 else 'are'}" if outside else "no rank is"
        raise UsageError(f"{asked} asked for; the target has ranks {every.start} to {every.stop - 1}")
    return wanted
