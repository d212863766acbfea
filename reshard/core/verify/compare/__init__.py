"""Compare the tensors of two checkpoints bit for bit, regardless of their layouts.

1. One copy of every source block is the *reference*. All other copies are compared with it: copies of other source
   ranks, and every copy of every target block.
2. References and the distinct blocks of all copies form a `Route`, as if the copies were to be written from the
   references: a comparison is a transfer whose contents are compared with existing files instead of written.
3. A tensor with a separate value on every source rank is compared by digest: a target copy must equal the value of one
   source rank.

Elements are compared as bits: two NaNs with different payloads differ, and so do 0.0 and -0.0. If the target has
another dtype, source elements are cast first, as in a conversion.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.core.layout.axes import common
from reshard.core.model.entries import Replica
from reshard.core.model.holdings import in_several_stages, with_all_stages
from reshard.core.model.reshape import Shared
from reshard.core.plan import budget
from reshard.core.plan.bands import Recipe
from reshard.core.plan.build import chunk_edges
from reshard.core.plan.partition import share_out
from reshard.core.plan.plan import Piece, Route, Transfer
from reshard.core.run.executor import map_tasks
from reshard.core.storage.cipher import store_of
from reshard.core.storage.urls.pool import pool
from reshard.core.verify.compare.comparer import Compared, Comparer, Mismatch, joined
from reshard.core.verify.difference import Difference
from reshard.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from reshard.core.layout.block import Block, Shape
    from reshard.core.model.checkpoint import Checkpoint, Sharding, Tensor
    from reshard.core.plan.budget import Budget
    from reshard.core.storage.base import Coding
    from reshard.dtypes import DType

SAMPLE_BYTES = 256 << 10
"""Bytes of a run of rows, the unit of sampling."""


@dataclass(frozen=True, slots=True)
class Check:
    """The comparison of one tensor.

    Attributes:
        name: the name of the tensor in the target.
        source_name: its name in the source.
        shape: its whole shape.
        transfer: a transfer from references to copies; source files are numbered first, then target files.
        own_values: every source rank has a separate value; `references` has all of them.
        references: the extents of separate values; empty for other tensors.
    """

    name: str
    source_name: str
    shape: Shape
    transfer: Transfer
    own_values: bool = False
    references: tuple[Replica, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class ComparisonPlan:
    """The comparison of two checkpoints; small enough to send to workers.

    Attributes:
        checks: the tensors.
        paths: the source files, then the target files.
        sources: number of source files.
        codings: decode or decrypt the files of either side.
        band_bytes: the most bytes of a tensor that a thread reads at once.
    """

    checks: tuple[Check, ...]
    paths: tuple[str, ...]
    sources: int
    codings: tuple[Coding | None, Coding | None]
    band_bytes: int

    @classmethod
    def of(cls, source: Checkpoint, target: Checkpoint, checks: Iterable[Check], band_bytes: int) -> ComparisonPlan:
        """Build the comparison of two checkpoints."""
        paths = tuple(file.path for side in (source, target) for file in side.files)
        return cls(tuple(checks), paths, len(source.files), (source.coding, target.coding), band_bytes)

    def copy_dtype(self, check: Check, file: int) -> DType:
        """Return the dtype of a copy."""
        return check.transfer.dtype if file < self.sources else check.transfer.target_dtype

    def nbytes(self, check: Check) -> int:
        """Return the number of bytes read to compare a whole tensor."""
        recipe = check.transfer.recipe
        times = len(check.references) if check.own_values else 1
        references = sum(block.size for block in recipe.sources) * times * check.transfer.dtype.itemsize
        return references + sum(
            block.size * self.copy_dtype(check, at.file).itemsize
            for block, copies in zip(recipe.targets, check.transfer.route.writes, strict=True)
            for at in copies
        )

    def piece_bytes(self, piece: Piece) -> int:
        """Return the number of bytes read to compare the rows of a piece."""
        check = self.checks[piece.transfer]
        rows = 1 if check.own_values else check.transfer.rows
        return self.nbytes(check) * (piece.stop - piece.start) // rows

    def tasks(self, *, sample: float | None = None, seed: int = 0) -> list[tuple[Piece, ...]]:
        """Divide the rows of all checks into tasks.

        Args:
            sample: the share of rows to compare, chosen at random in runs of `SAMPLE_BYTES`, at least one run per
                tensor. None for all rows.
            seed: the seed; the choice depends only on it and the name of the tensor.
        """
        weights = [self.nbytes(check) if any(check.transfer.route.writes) else 0 for check in self.checks]
        transfers = [check.transfer for check in self.checks]
        if sample is None:
            # Separate values of ranks are compared as a whole.
            shared_weights = [0 if check.own_values else n for check, n in zip(self.checks, weights, strict=True)]
            edges = chunk_edges(self.codings[0], self.paths, transfers)
            shared = share_out(transfers, shared_weights, self.band_bytes, whole_files=False, edges=edges)
            separate = (Piece(n, 0, 1) for n, check in enumerate(self.checks) if check.own_values and weights[n])
            return [*(task.pieces for task in shared), *((piece,) for piece in separate)]
        pieces: list[Piece] = []
        for number, (check, weight) in enumerate(zip(self.checks, weights, strict=True)):
            rows = 1 if check.own_values else check.transfer.rows
            if not (rows and weight):
                continue
            length = max(1, rows * SAMPLE_BYTES // weight)
            runs = range(-(-rows // length))
            chosen = Random(f"{seed} {check.name}").sample(runs, ceil(sample * len(runs)))  # noqa: S311
            pieces += [Piece(number, n * length, min(rows, (n + 1) * length)) for n in sorted(chosen)]
        return self._packed(pieces)

    def _packed(self, pieces: Iterable[Piece]) -> list[tuple[Piece, ...]]:
        """Group pieces into tasks."""
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
        """Compare the rows of one task.

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
    """Return the checks of some tensors.

    Args:
        source: the checkpoint with the references.
        target: the checkpoint to compare with them.
        pairs: source and target name of each tensor; both must have the same shape, and the target the dtype after the
            conversion.
        band_bytes: the most bytes of a tensor that a thread reads at once.
    """
    routes: dict[tuple[Shape, Shape | None, Sharding, Sharding, DType, DType], Route] = {}
    shared = Shared()
    result = []
    for source_name, name in pairs:
        tensor, counterpart = source.tensors[source_name], target.tensors[name]
        all_stages, compared = with_all_stages(source, tensor), with_all_stages(target, counterpart)
        if all_stages.space or compared.space:
            shape = all_stages.spec.shape
            space = common(shape, [item.space or shape for item in (all_stages, compared)])
            if space is None:
                raise SourceError(
                    f"the rules of both sides cut the axes of tensor {name!r} differently", code="no-common-shape"
                )
            tensor, all_stages, compared = (shared.in_space(item, space) for item in (tensor, all_stages, compared))
        dtype = counterpart.spec.dtype
        own_values = tensor.varies and not counterpart.listed
        key = (tensor.spec.shape, tensor.space, tensor.sharding, compared.sharding, tensor.spec.dtype, dtype)
        alike = not (tensor.varies or in_several_stages(source, tensor) or in_several_stages(target, counterpart))
        route = routes.get(key) if alike else None
        if route is None:
            route = _route(tensor, all_stages, compared, len(source.files), dtype, band_bytes)
            if alike:
                routes[key] = route
        runs = (*all_stages.runs, *compared.runs)
        transfer = Transfer(route, name, source_name, tensor.spec.dtype, dtype, runs, runs)
        references = all_stages.sharding.replicas[0] if own_values else ()
        result.append(Check(name, source_name, tensor.spec.shape, transfer, own_values, references))
    return result


def _route(tensor: Tensor, all_stages: Tensor, compared: Tensor, sources: int, dtype: DType, band_bytes: int) -> Route:
    """Return the route from references to copies.

    Args:
        tensor: the source tensor, as it is converted.
        all_stages: the source tensor with its blocks of all stages.
        compared: the target tensor with its blocks of all stages.
        sources: number of source files.
        dtype: the dtype of the target.
        band_bytes: the most bytes in a band.
    """
    # If stages share the tensor, references are the blocks of one stage; blocks of other stages may overlap them.
    stored = _stored_blocks(all_stages)
    first = {block: extents[0].file for block, extents in _stored_blocks(tensor)}
    references = {
        block: next(at for at in extents if at.file == first[block]) for block, extents in stored if block in first
    }
    copies: dict[Block, list[Replica]] = {}
    if not tensor.varies:
        for block, extents in stored:
            if further := [at for at in extents if at != references.get(block)]:
                copies.setdefault(block, []).extend(further)
    behind = len(all_stages.runs)
    for block, extents in _stored_blocks(compared):
        copies.setdefault(block, []).extend(
            Replica(sources + at.file, behind + at.runs_index, at.strides) for at in extents
        )
    recipe = Recipe.of(tensor.space or tensor.spec.shape, list(references), list(copies))
    axis = recipe.axis(band_bytes // max(tensor.spec.dtype.itemsize, dtype.itemsize))
    return Route(recipe, axis, tuple(references.values()), tuple(map(tuple, copies.values())))


def _stored_blocks(tensor: Tensor) -> list[tuple[Block, tuple[Replica, ...]]]:
    """Return the blocks of a tensor that are in files, with their extents."""
    sharding = tensor.sharding
    return [(block, extents) for block, extents in zip(sharding.blocks, sharding.replicas, strict=True) if extents]


class Outcome(NamedTuple):
    """The result of a comparison.

    Attributes:
        differences: one for every copy that differs.
        varying: names of tensors with different values on source ranks.
        nbytes: number of bytes read.
        total_bytes: number of bytes of all rows.
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
        source: the checkpoint with the references.
        target: the checkpoint to compare with them.
        every: the checks to make.
        limits: threads, and bytes in a band.
        client: a `distributed.Client`, whose workers compare in place of the threads; or None.
        on_progress: called with the bytes read and the bytes to be read.
        sample: as for `ComparisonPlan.tasks`.
        seed: as for `ComparisonPlan.tasks`.

    Raises:
        SourceError: a file cannot be read, or is shorter than its header says.
    """
    limits.reserve()
    comparison = ComparisonPlan.of(source, target, every, limits.band_bytes)
    tasks = comparison.tasks(sample=sample, seed=seed or 0)
    nbytes = sum(comparison.piece_bytes(piece) for task in tasks for piece in task)
    results: list[Compared] = []
    read = 0

    def add(result: Compared) -> None:
        nonlocal read
        results.append(result)
        read += result.read
        on_progress(min(read, nbytes), nbytes)

    try:
        map_tasks(ComparisonPlan.run, comparison, tasks, threads=limits.threads, client=client, on_result=add)
    finally:
        for side in (source, target):
            store_of(side.coding).close()
        pool.reset()
    return Outcome(
        tuple(
            _difference(source, target, every[number], mismatch)
            for number, mismatches in _gathered(results).items()
            for mismatch in mismatches
        ),
        tuple(name for result in results for name in result.varying),
        read,
        sum(comparison.nbytes(check) for check in every if any(check.transfer.route.writes)),
    )


def _difference(source: Checkpoint, target: Checkpoint, check: Check, mismatch: Mismatch) -> Difference:
    """Turn a mismatch into a difference with full details of its location."""
    of_source = mismatch.file < len(source.files)
    side, number = (source, mismatch.file) if of_source else (target, mismatch.file - len(source.files))
    dtype = check.transfer.dtype if of_source else check.transfer.target_dtype
    actual, expected = (f"{bits:0{2 * dtype.itemsize}x}" for bits in (mismatch.found, mismatch.expected))
    return Difference(
        "values",
        f"{mismatch.count} of {mismatch.block.size} elements differ; the first is 0x{actual}, expected 0x{expected}",
        check.name,
        "source" if of_source else "target",
        side.ranks[number],
        side.files[number].path,
        mismatch.block,
        mismatch.index,
        mismatch.count,
        actual,
        expected,
        source.files[mismatch.reference].path,
        f"{dtype}",
        mismatch.largest,
        mismatch.nans,
    )


def _gathered(results: Iterable[Compared]) -> dict[int, list[Mismatch]]:
    """Return one mismatch for every copy that differs, by check number."""
    by_copy: dict[tuple[int, int, Block], Mismatch] = {}
    for compared in results:
        for number, mismatch in compared.found:
            key = (number, mismatch.file, mismatch.block)
            by_copy[key] = joined(by_copy[key], mismatch) if key in by_copy else mismatch
    by_check: dict[int, list[Mismatch]] = {}
    for (number, _, _), mismatch in sorted(by_copy.items(), key=lambda item: item[0][0]):
        by_check.setdefault(number, []).append(mismatch)
    return by_check
