"""Assemble tensors from files and a strategy.

The result has the blocks of each tensor, and the files of each block. A tensor in the strategy is read from the lowest
pipeline stage that has all of it; MindSpore omits shared tensors from the files of later stages, which is not a fault.
A tensor outside the strategy is whole in every file that has it. Every file is compared with the strategy, and all
faults are reported at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.core.layout.block import Block, shape_text
from reshard.core.model.checkpoint import Sharding, Tensor, TensorSpec
from reshard.core.model.entries import Replica
from reshard.core.storage.base import COPY_AGAIN
from reshard.errors import Faults, LayoutError, Option, SourceError, Text, names
from reshard.strategy.names import ranks_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reshard.core.layout.block import Shape
    from reshard.core.layout.grid import Grid
    from reshard.core.model.checkpoint import SourceFile
    from reshard.core.model.entries import Entry
    from reshard.strategy.strategy import Strategy

_MOST_TIMES = 256  # a strategy with more ranks per existing rank does not belong to the checkpoint


def unlisted_hint(name: str) -> Text:
    """Return advice for a tensor outside the strategy that differs between ranks."""
    return Text(
        "save the strategy with only_trainable_params=False if it is sharded, or give ",
        Option("layout", name, "RULE"),
        " (RULE: split:DIM, DEV_MATRIX:TENSOR_MAP; whole; copy if every rank has a value of its own)",
    )


def assemble(
    root: str, files: Sequence[SourceFile], ranks: Sequence[int], strategy: Strategy | None, *, partial: bool
) -> dict[str, Tensor]:
    """Return every tensor of the files.

    Args:
        root: for messages.
        files: the files of all ranks.
        ranks: the rank of each file.
        strategy: assigns blocks to ranks; None for one rank of whole tensors.
        partial: blocks may be in no file.

    Raises:
        SourceError: ranks are missing, or headers contradict the strategy or each other; all faults at once.
    """
    if strategy is None:
        return _WithoutStrategy(root, files, ranks).tensors()
    return _WithStrategy(root, files, ranks, strategy, partial=partial).tensors()


def sharding_of(grid: Grid, ranks: Sequence[int], replicas: Iterable[Replica]) -> Sharding:
    """Return the blocks of a grid with the files that hold each.

    Args:
        grid: assigns blocks to ranks.
        ranks: the rank of each file.
        replicas: the files that hold any block.
    """
    by_rank: dict[int, list[Replica]] = {}
    for at in replicas:
        by_rank.setdefault(ranks[at.file], []).append(at)
    return Sharding(
        grid.blocks, tuple(tuple(at for rank in group for at in by_rank.get(rank, ())) for group in grid.ranks)
    )


def assemble_whole(
    root: str, files: Sequence[SourceFile], ranks: Sequence[int], numbers: Sequence[int]
) -> dict[str, Tensor]:
    """Return the tensors of the files with these numbers; each is whole in every file."""
    return _WithoutStrategy(root, files, ranks, numbers).tensors()


def by_header(files: Sequence[SourceFile], numbers: Iterable[int]) -> list[list[int]]:
    """Group files that share their entries, as most ranks do."""
    groups: dict[int, list[int]] = {}
    for number in numbers:
        groups.setdefault(files[number].index.header_id, []).append(number)
    return list(groups.values())


def where(files: Sequence[SourceFile], file_numbers: Iterable[int]) -> tuple[dict[int, Replica], tuple[int, ...]]:
    """Return the `Replica` of each file, numbered by header, and a file of each header."""
    alike = by_header(files, file_numbers)
    by_file = {number: Replica(number, index) for index, numbers in enumerate(alike) for number in numbers}
    return by_file, tuple(numbers[0] for numbers in alike)


class _WithoutStrategy:
    """Assembles tensors without a strategy."""

    def __init__(
        self, root: str, files: Sequence[SourceFile], ranks: Sequence[int], numbers: Sequence[int] | None = None
    ) -> None:
        self.numbers = range(len(files)) if numbers is None else numbers
        self.root, self.files, self.ranks = root, files, ranks
        self.faults = Faults(root)
        self._whole: dict[tuple[Shape, tuple[int, ...]], tuple[Sharding, tuple[int, ...]]] = {}

    def tensors(self) -> dict[str, Tensor]:
        """Return whole tensors; raise an error if there are several ranks."""
        ranks = {self.ranks[number] for number in self.numbers}
        if len(ranks) > 1:
            raise SourceError(
                f"{self.root} has {len(ranks)} ranks, and nothing says how they were sharded",
                code="no-layout",
                hint=Text("give ", Option("strategy"), ", or ", Option("layout", "*", "RULE")),
            )
        tensors = {name: self._assemble_unlisted(name, numbers) for name, numbers in self.files_by_name().items()}
        self.faults.raise_if_any(SourceError)
        return tensors

    def files_by_name(self) -> dict[str, tuple[int, ...]]:
        """Return the numbers of the files with each name, ascending."""
        alike = by_header(self.files, self.numbers)
        groups: dict[str, list[int]] = {}
        for index, numbers in enumerate(alike):
            for name in self.files[numbers[0]].index.entries:
                groups.setdefault(name, []).append(index)
        files_of: dict[tuple[int, ...], tuple[int, ...]] = {}
        numbers_of = {}
        for name, places in groups.items():
            key = tuple(places)
            if key not in files_of:
                files_of[key] = tuple(sorted(number for index in key for number in alike[index]))
            numbers_of[name] = files_of[key]
        return numbers_of

    def entry(self, number: int, name: str) -> Entry:
        """Return the entry of a tensor in a file."""
        return self.files[number].index.entries[name]

    def _assemble_unlisted(self, name: str, file_numbers: Sequence[int]) -> Tensor:
        """Assemble a tensor without a layout, which must be whole in each file."""
        first = self.entry(file_numbers[0], name)
        for number in file_numbers[1:]:
            entry = self.entry(number, name)
            if entry is not first and (entry.dtype, entry.shape) != (first.dtype, first.shape):
                self.faults.add(
                    f"tensor {name!r}",
                    f"is {entry.dtype} {shape_text(entry.shape)} in rank {self.ranks[number]} and {first.dtype} "
                    f"{shape_text(first.shape)} in rank {self.ranks[file_numbers[0]]}, and no strategy lists it",
                    code="unlisted-tensor",
                    hint=unlisted_hint(name),
                )
                break
        spec = TensorSpec(name, first.dtype, first.shape)
        varies = first.text is not None and len({self.entry(number, name).text for number in file_numbers}) > 1
        sharding, firsts = self.whole(first.shape, tuple(file_numbers))
        runs = tuple(self.entry(number, name).runs for number in firsts)
        return Tensor(spec, sharding, runs, listed=False, varies=varies, text=first.text)

    def whole(self, shape: Shape, file_numbers: tuple[int, ...]) -> tuple[Sharding, tuple[int, ...]]:
        """Return the sharding of whole tensors in files, and a file of each header."""
        key = (shape, file_numbers)
        if key not in self._whole:
            places, firsts = where(self.files, file_numbers)
            self._whole[key] = Sharding((Block.whole(shape),), (tuple(places[n] for n in file_numbers),)), firsts
        return self._whole[key]


@dataclass(frozen=True, slots=True, eq=False)
class _SharedFacts:
    """Facts that tensors with the same grid and files share.

    Attributes:
        sharding: the files of each block; a block in no file has no replica.
        firsts: a file of each header, by the number of its runs.
        expected: groups of files that share their entries, with the expected shape of the tensor in them.
    """

    sharding: Sharding
    firsts: tuple[int, ...]
    expected: tuple[tuple[list[int], Shape], ...]


class _WithStrategy(_WithoutStrategy):
    """Assembles tensors with a strategy, and tensors that are not in it."""

    def __init__(
        self, root: str, files: Sequence[SourceFile], ranks: Sequence[int], strategy: Strategy, *, partial: bool
    ) -> None:
        super().__init__(root, files, ranks)
        self.strategy, self.partial = strategy, partial
        self._needing: dict[int, list[str]] = {}  # tensors with a missing block, by a rank that should have it
        self._facts: dict[tuple[Grid, tuple[int, ...]], _SharedFacts] = {}
        self._stages: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor of the files."""
        self._check_ranks()
        tensors: dict[str, Tensor] = {}
        for name, file_numbers in self.files_by_name().items():
            in_strategy = name in self.strategy.tensors and self.entry(file_numbers[0], name).text is None
            tensor = self._listed(name, file_numbers) if in_strategy else self._assemble_unlisted(name, file_numbers)
            if tensor is not None:
                tensors[name] = tensor
        if not self.partial:
            self._tell_missing()
        self.faults.raise_if_any(SourceError)
        return tensors

    def _check_ranks(self) -> None:
        expected = self.strategy.ranks
        unknown = sorted({rank for rank in self.ranks if rank not in expected})
        if unknown:
            raise SourceError(
                f"{self.root} has {ranks_text(unknown)}, which the strategy does not describe",
                code="strategy-mismatch",
                facts=[f"the strategy describes ranks {expected.start} to {expected.stop - 1}"],
                hint=f"give the strategy of all {len(set(self.ranks))} ranks (of a pipeline: the directory of its "
                "strategy files, or the merged file)",
            )

        if not self.partial and len(expected) > _MOST_TIMES * len(set(self.ranks)):
            raise SourceError(
                f"{self.root} has {len(set(self.ranks))} ranks; the strategy describes {len(expected)}",
                code="strategy-mismatch",
                hint=Text("give the checkpoint's own strategy, or ", Option("partial")),
            )

    def _tell_missing(self) -> None:
        """Report missing ranks, even if no block is lost: the strategy may be wrong."""
        present = set(self.ranks)
        with_tensors = {placed.stage for places in self.strategy.tensors.values() for placed in places}
        missing = [
            rank for rank in self.strategy.ranks if rank not in present and self.strategy.stage_of(rank) in with_tensors
        ]
        for rank in sorted(set(self._needing) & set(missing)):
            needing = self._needing.pop(rank)
            self.faults.add(
                f"rank {rank}",
                f"has no file; it is needed for {len(needing)} tensors ({names(needing, most=3)})",
                code="missing-ranks",
                hint=COPY_AGAIN,
            )
            missing.remove(rank)
        for rank, needing in sorted(self._needing.items()):
            self.faults.add(
                f"rank {rank}",
                f"has no {names(needing, most=3)} in its file, nor has any replica",
                code="missing-blocks",
            )
        if missing:
            has = "has" if len(missing) == 1 else "have"
            self.faults.add(
                ranks_text(missing),
                f"{has} no file, of the {len(self.strategy.ranks)} ranks that the strategy describes; no block is "
                "known to be lost",
                code="missing-replicas",
                hint=Text("if it is the right strategy, give ", Option("partial")),
            )

    def _listed(self, name: str, file_numbers: tuple[int, ...]) -> Tensor | None:
        """Assemble a tensor from the lowest complete stage; check other stages, too."""
        joined: Tensor | None = None
        incomplete: Tensor | None = None
        lacking: list[int] = []
        placed = 0
        for stage in self.strategy.stages_of(name):
            in_stage = self._of_stage(file_numbers, stage)
            if not in_stage:
                continue
            placed += len(in_stage)
            tensor = self._in_stage(name, stage, in_stage)
            if tensor is None:
                continue  # the fault is reported
            if joined and (tensor.spec.dtype, tensor.spec.shape) != (joined.spec.dtype, joined.spec.shape):
                self.faults.add(
                    f"tensor {name!r}",
                    f"is {tensor.spec.dtype} {shape_text(tensor.spec.shape)} in stage {stage} and {joined.spec.dtype} "
                    f"{shape_text(joined.spec.shape)} in a stage before",
                    code="stages-differ",
                )
            if joined is None and tensor.is_complete:
                joined = tensor
            elif self.partial:
                incomplete = incomplete or tensor
            elif not tensor.is_complete:
                grid = self.strategy.grid(name, tensor.spec.shape, stage=stage)
                empty = [r for copies, r in zip(tensor.sharding.replicas, grid.ranks, strict=True) if not copies]
                lacking += [next((rank for rank in r if rank not in self.ranks), r[0]) for r in empty]
        if placed < len(file_numbers):
            stages = self.strategy.stages_of(name)
            ranks = {self.ranks[n] for n in file_numbers}
            misplaced = sorted(rank for rank in ranks if self.strategy.stage_of(rank) not in stages)
            self.faults.add(
                f"tensor {name!r}",
                f"is in {ranks_text(misplaced)}; the strategy places it in stage {names(stages)}",
                code="wrong-stage",
            )
        joined = joined or incomplete
        if joined is None:
            for rank in lacking:
                self._needing.setdefault(rank, []).append(name)
        return joined

    def _of_stage(self, file_numbers: tuple[int, ...], stage: int) -> tuple[int, ...]:
        """Return the files of ranks of one stage."""
        key = (file_numbers, stage)
        if key not in self._stages:
            self._stages[key] = tuple(n for n in file_numbers if self.strategy.stage_of(self.ranks[n]) == stage)
        return self._stages[key]

    def _in_stage(self, name: str, stage: int, file_numbers: tuple[int, ...]) -> Tensor | None:
        """Assemble a tensor from the ranks of one stage; None on faults."""
        first = self.entry(file_numbers[0], name)
        try:
            shape = self.strategy.whole_shape(name, first.shape, stage=stage)
            grid = self.strategy.grid(name, shape, stage=stage)
        except LayoutError as error:
            named = f"tensor {name!r}: "
            bare = error.changed(lambda text: text.removeprefix(named) if text.startswith(named) else text)
            self.faults.add(f"tensor {name!r}", bare)
            return None
        faults = self.faults.count
        self._check_stated_shape(name, stage, shape, first.shape)
        facts = self._facts_of(grid, file_numbers)
        self._check_entries(name, first, facts)
        if self.faults.count > faults:
            return None
        runs = tuple(self.entry(number, name).runs for number in facts.firsts)
        return Tensor(TensorSpec(name, first.dtype, shape), facts.sharding, runs)

    def _check_stated_shape(self, name: str, stage: int, shape: Shape, stored: Shape) -> None:
        """Compare with the shape in a JSON strategy; tensors saved whole differ."""
        placed = next(p for p in self.strategy.tensors[name] if p.stage == stage)
        if placed.shape is not None and len(placed.shape) == len(shape) and placed.shape != shape:
            wrong = f"is {shape_text(shape)} according to the files; the strategy says {shape_text(placed.shape)}"
            if stored == placed.shape:
                hint = Text("if it was saved whole (integrated_save=True), give ", Option("layout", name, "whole"))
                self.faults.add(f"tensor {name!r}", wrong, code="saved-whole", hint=hint)
            else:
                self.faults.add(
                    f"tensor {name!r}",
                    wrong,
                    code="strategy-mismatch",
                    hint=Text("give the strategy that the checkpoint was saved with: ", Option("strategy")),
                )

    def _check_entries(self, name: str, first: Entry, facts: _SharedFacts) -> None:
        """Compare the entry in each file with the block that its rank should have."""
        for numbers, shape in facts.expected:
            entry = self.entry(numbers[0], name)
            for number in numbers if entry.dtype is not first.dtype or entry.shape != shape else ():
                subject = f"tensor {name!r} in {self.files[number].path}"
                if entry.dtype is not first.dtype:
                    fault = f"is {entry.dtype}; other ranks have {first.dtype}"
                    self.faults.add(subject, fault, code="mixed-dtypes")
                else:
                    fault = f"is {shape_text(entry.shape)}; the strategy and the other ranks say {shape_text(shape)}"
                    self.faults.add(subject, fault, code="wrong-shape")

    def _facts_of(self, grid: Grid, file_numbers: tuple[int, ...]) -> _SharedFacts:
        key = (grid, file_numbers)
        if key not in self._facts:
            places, firsts = where(self.files, file_numbers)
            sharding = sharding_of(grid, self.ranks, places.values())
            self._facts[key] = _SharedFacts(sharding, firsts, self._expected(grid, file_numbers))
        return self._facts[key]

    def _expected(self, grid: Grid, file_numbers: Iterable[int]) -> tuple[tuple[list[int], Shape], ...]:
        blocks = grid.by_rank()
        by_shape: dict[Shape, list[int]] = {}
        for number in file_numbers:
            by_shape.setdefault(blocks[self.ranks[number]].shape, []).append(number)
        return tuple((alike, shape) for shape, numbers in by_shape.items() for alike in by_header(self.files, numbers))
