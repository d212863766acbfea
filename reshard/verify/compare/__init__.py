"""Comparing the tensors of one checkpoint with those of another, bit for bit, whatever the layouts of the two.

1. Of every source block one copy is the *reference*. All else is compared with it: the copies that other source ranks
   have, and every copy of every target block.
2. References and the distinct blocks of all those copies make a way, as if the copies were to be made of the
   references: a comparison is a move whose contents are not written but compared with what is there.
3. A tensor of which every source rank has a value of its own is compared by digest: a target's copy must be that of
   one source rank.

Elements are compared as bits: two NaNs with other payloads differ, and so do 0.0 and -0.0. Where the target has
another dtype, source elements are cast first, as a conversion casts them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.errors import SourceError
from reshard.formats.entries import Where
from reshard.layout.axes import common
from reshard.plan import budget
from reshard.plan.bands import Recipe
from reshard.plan.partition import share_out
from reshard.plan.plan import Move, Piece, Way
from reshard.run.executor import map_tasks
from reshard.source.replicas import in_every_stage, in_several_stages
from reshard.source.reshape import Shared
from reshard.storage.cipher import store_of
from reshard.verify.compare.comparer import Compared, Comparer, Mismatch, joined
from reshard.verify.difference import Difference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from reshard.dtypes import DType
    from reshard.layout.block import Block, Shape
    from reshard.plan.budget import Budget
    from reshard.source.checkpoint import Checkpoint, Sharding, Tensor
    from reshard.storage.base import Coding

SAMPLE_BYTES = 256 << 10
"""How much a run of rows has that is sampled or left out as one."""


@dataclass(frozen=True, slots=True)
class Check:
    """One tensor, and all that is to be compared with its references.

    Attributes:
        name: the tensor's name in the target.
        source_name: its name in the source.
        shape: the whole tensor's.
        move: from references to copies, whose files are numbered behind each other: those of the source, then those of
            the target.
        own_values: every source rank has a value of its own, all of which are among the extents of `references`.
        references: of such a tensor, where each value is.
    """

    name: str
    source_name: str
    shape: Shape
    move: Move
    own_values: bool = False
    references: tuple[Where, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """Two checkpoints, and what is compared of them; small, so that it travels to the workers of a cluster.

    Attributes:
        checks: the tensors.
        paths: the files of the source, then those of the target.
        sources: how many of them are the source's.
        codings: how the bytes of either side are to be read.
        band_bytes: the most bytes of a tensor that a thread reads at once.
    """

    checks: tuple[Check, ...]
    paths: tuple[str, ...]
    sources: int
    codings: tuple[Coding | None, Coding | None]
    band_bytes: int

    @classmethod
    def of(cls, source: Checkpoint, target: Checkpoint, checks: Iterable[Check], band_bytes: int) -> Comparison:
        """Build the comparison of two checkpoints."""
        paths = tuple(file.path for side in (source, target) for file in side.files)
        return cls(tuple(checks), paths, len(source.files), (source.coding, target.coding), band_bytes)

    def copy_dtype(self, check: Check, file: int) -> DType:
        """Return the dtype of a copy."""
        return check.move.dtype if file < self.sources else check.move.target_dtype

    def nbytes(self, check: Check) -> int:
        """Return how many bytes are read to compare a tensor whole, each once."""
        recipe = check.move.recipe
        times = len(check.references) if check.own_values else 1
        given = sum(block.size for block in recipe.sources) * times * check.move.dtype.itemsize
        return given + sum(
            block.size * self.copy_dtype(check, at.file).itemsize
            for block, copies in zip(recipe.targets, check.move.way.writes, strict=True)
            for at in copies
        )

    def piece_bytes(self, piece: Piece) -> int:
        """Return how many bytes are read to compare some rows."""
        check = self.checks[piece.move]
        rows = 1 if check.own_values else check.move.rows
        return self.nbytes(check) * (piece.stop - piece.start) // rows

    def tasks(self, *, sample: float | None = None, seed: int = 0) -> list[tuple[Piece, ...]]:
        """Share the rows of all checks out into tasks.

        Args:
            sample: the share of the rows to be compared, taken at random in runs of `SAMPLE_BYTES`; of every tensor at
                least one run. None for all rows.
            seed: of the random numbers, which depend on it and on the tensor's name only.
        """
        weights = [self.nbytes(check) if any(check.move.way.writes) else 0 for check in self.checks]
        moves = [check.move for check in self.checks]
        if sample is None:
            # A value of every rank is compared whole.
            others = [0 if check.own_values else n for check, n in zip(self.checks, weights, strict=True)]
            shared = share_out(moves, others, self.band_bytes, whole_files=False)
            own = (Piece(n, 0, 1) for n, check in enumerate(self.checks) if check.own_values and weights[n])
            return [*(task.pieces for task in shared), *((piece,) for piece in own)]
        pieces: list[Piece] = []
        for number, (check, weight) in enumerate(zip(self.checks, weights, strict=True)):
            rows = 1 if check.own_values else check.move.rows
            if not (rows and weight):
                continue
            length = max(1, rows * SAMPLE_BYTES // weight)
            runs = range(-(-rows // length))
            chosen = Random(f"{seed} {check.name}").sample(runs, ceil(sample * len(runs)))  # noqa: S311
            pieces += [Piece(number, n * length, min(rows, (n + 1) * length)) for n in sorted(chosen)]
        return self._packed(pieces)

    def _packed(self, pieces: Iterable[Piece]) -> list[tuple[Piece, ...]]:
        """Put pieces together into tasks."""
        tasks: list[list[Piece]] = [[]]
        room = budget.TASK_BYTES
        for piece in pieces:
            cost = self.piece_bytes(piece)
            if tasks[-1] and cost > room:
                tasks.append([])
                room = budget.TASK_BYTES
            tasks[-1].append(piece)
            room -= cost
        return [tuple(task) for task in tasks if task]

    def run(self, pieces: Sequence[Piece]) -> Compared:
        """Compare some rows of some tensors: one task.

        Raises:
            SourceError: a file cannot be read, or is shorter than its header says.
        """
        task = Comparer(self)
        task.compare(pieces)
        return Compared(task.found, task.nbytes, task.varying)


def checks(
    source: Checkpoint,
    target: Checkpoint,
    pairs: Iterable[tuple[str, str]],
    band_bytes: int,
) -> list[Check]:
    """Return what is to be compared of some tensors.

    Args:
        source: has the references.
        target: compared with them.
        pairs: source name and target name of each tensor, which both have with the same shape, and the target with the
            dtype that a conversion makes of the source's.
        band_bytes: the most bytes of a tensor that a thread reads at once.
    """
    known: dict[tuple[Shape, Shape | None, Sharding, Sharding, DType, DType], Way] = {}
    shared = Shared()
    found = []
    for source_name, name in pairs:
        tensor, other = source.tensors[source_name], target.tensors[name]
        every, compared = in_every_stage(source, tensor), in_every_stage(target, other)
        if every.space or compared.space:
            shape = every.spec.shape
            space = common(shape, [one.space or shape for one in (every, compared)])
            if space is None:
                raise SourceError(
                    f"the rules of both sides cut the axes of tensor {name!r} differently", code="no-common-shape"
                )
            tensor, every, compared = (shared.in_space(one, space) for one in (tensor, every, compared))
        dtype = other.spec.dtype
        own_values = tensor.varies and not other.listed
        key = (tensor.spec.shape, tensor.space, tensor.sharding, compared.sharding, tensor.spec.dtype, dtype)
        alike = not (tensor.varies or in_several_stages(source, tensor) or in_several_stages(target, other))
        way = known.get(key) if alike else None
        if way is None:
            way = _way(tensor, every, compared, len(source.files), dtype, band_bytes)
            if alike:
                known[key] = way
        runs = (*every.runs, *compared.runs)
        move = Move(way, tensor.spec.dtype, dtype, runs, runs)
        references = every.sharding.replicas[0] if own_values else ()
        found.append(Check(name, source_name, tensor.spec.shape, move, own_values, references))
    return found


def _way(tensor: Tensor, every: Tensor, compared: Tensor, sources: int, dtype: DType, band_bytes: int) -> Way:
    """Return the way from references to copies.

    Args:
        tensor: of the source, as it is converted.
        every: with its blocks of all stages.
        compared: the target's, likewise.
        sources: how many files the source has.
        dtype: kind of the target's elements.
        band_bytes: the most bytes in a band.
    """
    # Of a tensor that stages share one stage's blocks are the references: those of others may overlap them.
    given = [(block, some) for block, some in _held(every)]
    first = {block: some[0].file for block, some in _held(tensor)}
    references = {block: next(at for at in some if at.file == first[block]) for block, some in given if block in first}
    copies: dict[Block, list[Where]] = {}
    if not tensor.varies:
        for block, some in given:
            if others := [at for at in some if at != references.get(block)]:
                copies.setdefault(block, []).extend(others)
    behind = len(every.runs)
    for block, some in _held(compared):
        copies.setdefault(block, []).extend(Where(sources + at.file, behind + at.runs, at.strides) for at in some)
    recipe = Recipe.of(tensor.space or tensor.spec.shape, list(references), list(copies))
    axis = recipe.axis(band_bytes // max(tensor.spec.dtype.itemsize, dtype.itemsize))
    return Way(recipe, axis, tuple(references.values()), tuple(map(tuple, copies.values())))


def _held(tensor: Tensor) -> list[tuple[Block, tuple[Where, ...]]]:
    """Return the blocks of a tensor that are in files, and where each is."""
    sharding = tensor.sharding
    return [(block, some) for block, some in zip(sharding.blocks, sharding.replicas, strict=True) if some]


class Outcome(NamedTuple):
    """What came of a comparison.

    Attributes:
        differences: every copy that differs.
        varying: tensors of which source ranks have different values of their own.
        nbytes: how many bytes were read.
        total_bytes: how many those of all rows are.
    """

    differences: tuple[Difference, ...]
    varying: tuple[str, ...]
    nbytes: int
    total_bytes: int


def compare(
    source: Checkpoint,
    target: Checkpoint,
    every: Sequence[Check],
    limits: Budget,
    client: Any,
    on_progress: Callable[[int, int], object],
    *,
    sample: float | None = None,
    seed: int | None = None,
) -> Outcome:
    """Compare tensors of two checkpoints.

    Args:
        source: has the references.
        target: is compared with them.
        every: what is compared.
        limits: threads, and bytes in a band.
        client: a `distributed.Client`, whose workers compare in place of the threads; or None.
        on_progress: called with bytes read and to be read.
        sample: as for `Comparison.tasks`.
        seed: likewise.

    Raises:
        SourceError: a file cannot be read, or is shorter than its header says.
    """
    comparison = Comparison.of(source, target, every, limits.band_bytes)
    tasks = comparison.tasks(sample=sample, seed=seed or 0)
    nbytes = sum(comparison.piece_bytes(piece) for task in tasks for piece in task)
    found: list[Compared] = []

    def add(one: Compared) -> None:
        found.append(one)
        on_progress(min(sum(each.read for each in found), nbytes), nbytes)

    try:
        map_tasks(Comparison.run, comparison, tasks, threads=limits.threads, client=client, on_result=add)
    finally:
        for side in (source, target):
            store_of(side.coding).close()
    return Outcome(
        tuple(
            _difference(source, target, every[number], mismatch)
            for number, mismatches in _gathered(found).items()
            for mismatch in mismatches
        ),
        tuple(name for one in found for name in one.varying),
        sum(one.read for one in found),
        sum(comparison.nbytes(check) for check in every if any(check.move.way.writes)),
    )


def _difference(source: Checkpoint, target: Checkpoint, check: Check, mismatch: Mismatch) -> Difference:
    """Return a mismatch with everything that a reader wants to know of its place."""
    of_source = mismatch.file < len(source.files)
    side, number = (source, mismatch.file) if of_source else (target, mismatch.file - len(source.files))
    dtype = check.move.dtype if of_source else check.move.target_dtype
    found, expected = (f"{bits:0{2 * dtype.itemsize}x}" for bits in (mismatch.found, mismatch.expected))
    return Difference(
        "values",
        f"{mismatch.count} of {mismatch.block.size} elements differ; the first is 0x{found}, expected 0x{expected}",
        check.name,
        "source" if of_source else "target",
        side.ranks[number],
        side.files[number].path,
        mismatch.block,
        mismatch.index,
        mismatch.count,
        found,
        expected,
        source.files[mismatch.reference].path,
        f"{dtype}",
        mismatch.largest,
        mismatch.nans,
    )


def _gathered(found: Iterable[Compared]) -> dict[int, list[Mismatch]]:
    """Return, for each check by its number, one mismatch for every copy that differs."""
    known: dict[tuple[int, int, Block], Mismatch] = {}
    for compared in found:
        for number, mismatch in compared.found:
            key = (number, mismatch.file, mismatch.block)
            known[key] = joined(known[key], mismatch) if key in known else mismatch
    by_check: dict[int, list[Mismatch]] = {}
    for (number, _, _), mismatch in sorted(known.items(), key=lambda item: item[0][0]):
        by_check.setdefault(number, []).append(mismatch)
    return by_check
