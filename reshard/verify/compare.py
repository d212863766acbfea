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

from dataclasses import dataclass, replace
from hashlib import blake2b
from math import ceil, prod
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reshard.formats.entries import Extent, Where, wants
from reshard.plan import budget
from reshard.plan.bands import Recipe
from reshard.plan.partition import share_out
from reshard.plan.plan import Move, Piece, Way
from reshard.run.engine import BandReader, Write, cast, scratch
from reshard.source.replicas import in_every_stage, in_several_stages
from reshard.storage.cipher import store_of
from reshard.storage.places import in_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from reshard.dtypes import DType
    from reshard.layout.block import Block, Shape
    from reshard.source.checkpoint import Checkpoint, Sharding, Tensor
    from reshard.storage.base import Coding, ReadStore, Want

Array = np.ndarray[Any, np.dtype[Any]]

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


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Where a copy differs from its references.

    Attributes:
        file: the number of the file that the copy is in.
        block: what part of the tensor it is.
        index: of the first element that differs, in the whole tensor.
        count: how many elements differ, of those that were compared.
        found: the bits of that element, in the copy.
        expected: the bits that it should have.
        reference: the number of the source file that says so.
    """

    file: int
    block: Block
    index: tuple[int, ...]
    count: int
    found: int
    expected: int
    reference: int


class Compared(NamedTuple):
    """What a task found.

    Attributes:
        found: mismatches, each with the number of its check.
        read: how many bytes were read.
        varying: tensors of which source ranks do have different values of their own.
    """

    found: list[tuple[int, Mismatch]]
    read: int
    varying: list[str]


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
            shared = share_out(moves, others, whole_files=False)
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
        task = _Task(self)
        task.compare(pieces)
        return Compared(task.found, task.nbytes, task.varying)


def checks(
    source: Checkpoint,
    target: Checkpoint,
    pairs: Iterable[tuple[str, str]],
    cast_to: Callable[[DType], DType],
    band_bytes: int,
) -> list[Check]:
    """Return what is to be compared of some tensors.

    Args:
        source: has the references.
        target: compared with them.
        pairs: source name and target name of each tensor, which both have with the same shape.
        cast_to: the dtype that a conversion makes of another.
        band_bytes: the most bytes of a tensor that a thread reads at once.
    """
    known: dict[tuple[Shape, Sharding, Sharding, DType, DType], Way] = {}
    found = []
    for source_name, name in pairs:
        tensor, other = source.tensors[source_name], target.tensors[name]
        every, compared = in_every_stage(source, tensor), in_every_stage(target, other)
        dtype = cast_to(tensor.spec.dtype)
        own_values = tensor.varies and not other.listed
        key = (tensor.spec.shape, tensor.sharding, other.sharding, tensor.spec.dtype, dtype)
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
        copies.setdefault(block, []).extend(Where(sources + file, behind + runs) for file, runs in some)
    recipe = Recipe.of(tensor.spec.shape, list(references), list(copies))
    axis = recipe.axis(band_bytes // max(tensor.spec.dtype.itemsize, dtype.itemsize))
    return Way(recipe, axis, tuple(references.values()), tuple(map(tuple, copies.values())))


def _held(tensor: Tensor) -> list[tuple[Block, tuple[Where, ...]]]:
    """Return the blocks of a tensor that are in files, and where each is."""
    sharding = tensor.sharding
    return [(block, some) for block, some in zip(sharding.blocks, sharding.replicas, strict=True) if some]


def gathered(found: Iterable[Compared]) -> dict[int, list[Mismatch]]:
    """Return, for each check by its number, one mismatch for every copy that differs."""
    joined: dict[tuple[int, int, Block], Mismatch] = {}
    for compared in found:
        for number, mismatch in compared.found:
            key = (number, mismatch.file, mismatch.block)
            joined[key] = _joined(joined[key], mismatch) if key in joined else mismatch
    by_check: dict[int, list[Mismatch]] = {}
    for (number, _, _), mismatch in sorted(joined.items(), key=lambda item: item[0][0]):
        by_check.setdefault(number, []).append(mismatch)
    return by_check


_Turn = tuple[tuple[int, Write, int, memoryview] | None, "ReadStore", list["Want"]]
"""What is read in turn: a band, or a part of a copy (the number of its check, the part, its file and its buffer).

A part of file `_REFERENCES` is what its copies are compared with, cast; it comes before they are read.
"""

_REFERENCES = -1


class _Task:
    """Compares what one task is about."""

    def __init__(self, comparison: Comparison) -> None:
        self._comparison = comparison
        self._stores = [store_of(coding) for coding in comparison.codings]
        self.found: list[tuple[int, Mismatch]] = []
        self.varying: list[str] = []
        self.nbytes = 0

    def compare(self, pieces: Sequence[Piece]) -> None:
        """Compare some rows of some tensors; all of those of which every rank has a value of its own."""
        checks = {piece.move: self._comparison.checks[piece.move] for piece in pieces}
        self.found += self._rows(checks, [piece for piece in pieces if not checks[piece.move].own_values])
        for number, check in checks.items():
            if check.own_values:
                self.found += [(number, mismatch) for mismatch in self._own_values(check)]

    def _rows(self, checks: Mapping[int, Check], pieces: Iterable[Piece]) -> Iterator[tuple[int, Mismatch]]:
        """Compare some rows of some tensors."""
        moves = {number: check.move for number, check in checks.items()}
        reader = BandReader(moves, self._comparison.paths, self._stores[0], self._comparison.band_bytes)
        converted = memoryview(b"")
        for turn in in_batches(self._turns(reader, checks, pieces)):
            if turn is None:  # another band of the references is there
                continue
            number, write, file, found = turn
            check = checks[number]
            if file == _REFERENCES:
                converted = cast(write.put_together(), check.move.dtype, check.move.target_dtype)
                continue
            dtype = self._comparison.copy_dtype(check, file)
            expected = write.content if dtype is check.move.dtype else converted
            if expected is write.content and write.copies:
                # The copy is where its columns would be put together: they are compared where they were read.
                if all(np.array_equal(*columns) for columns in write.copies):
                    continue
                found = memoryview(bytes(found))
                write.put_together()
            here, there = (np.frombuffer(some, dtype.carrier()) for some in (found, expected))
            unequal = here != there
            if unequal.any():
                yield number, self._mismatch(check, write.target, file, write.first, unequal, here, there)
        self.nbytes += reader.nbytes

    def _turns(self, reader: BandReader, checks: Mapping[int, Check], pieces: Iterable[Piece]) -> Iterator[_Turn]:
        """Yield what is read in turn: a band of the references, then every copy of each part of it."""
        for (number, band), store, wanted in reader.bands(pieces):
            yield None, store, wanted
            move = checks[number].move
            for write in band.writes:
                elements = len(write.content) // move.dtype.itemsize
                dtype = move.dtype
                for copy in move.writes[write.target]:
                    before, dtype = dtype, self._comparison.copy_dtype(checks[number], copy.file)
                    if dtype is not before:
                        yield (number, write, _REFERENCES, write.content), store, []
                    itemsize = dtype.itemsize
                    found, of_copy, reading = self._reading(copy, write.first * itemsize, elements * itemsize)
                    yield (number, write, copy.file, found), of_copy, reading

    def _mismatch(
        self, check: Check, target: int, file: int, first: int, unequal: Array, here: Array, there: Array
    ) -> Mismatch:
        """Return which elements of a part of a copy are unequal."""
        place = int(unequal.argmax())
        recipe = check.move.recipe
        block = recipe.targets[target]
        inside = np.unravel_index(first + place, block.shape)
        index = tuple(start + int(at) for start, at in zip(block.start, inside, strict=True))
        reference = next(
            at.file
            for source, at in zip(recipe.sources, check.move.way.reads, strict=True)
            if all(a <= i < b for a, i, b in zip(source.start, index, source.stop, strict=True))
        )
        count = int(np.count_nonzero(unequal))
        index = index if check.shape else ()
        return Mismatch(file, block, index, count, int(here[place]), int(there[place]), reference)

    def _own_values(self, check: Check) -> Iterator[Mismatch]:
        """Look whether every copy in the target is that of one source rank; a wrong one is compared with the first."""
        move = check.move
        known = {*self._digests(check, check.references)}
        if len(known) > 1:
            self.varying.append(check.source_name)
        for block, copies in zip(move.recipe.targets, move.way.writes, strict=True):
            digests = self._digests(check, copies)
            wrong = tuple(at for at, digest in zip(copies, digests, strict=True) if digest not in known)
            if wrong:
                recipe = replace(move.recipe, targets=(block,))
                one = replace(check, move=move._replace(way=Way(recipe, move.axis, move.way.reads, (wrong,))))
                found: dict[int, Mismatch] = {}
                for _, mismatch in self._rows({0: one}, [Piece(0, 0, move.rows)]):
                    before = found.get(mismatch.file)
                    found[mismatch.file] = _joined(before, mismatch) if before else mismatch
                yield from found.values()

    def _digests(self, check: Check, copies: Sequence[Where]) -> list[bytes]:
        """Return the digests of all that files have of a tensor, cast as a conversion casts it."""
        found = [blake2b(digest_size=32) for _ in copies]
        for number, content in in_batches(self._contents(check, copies)):
            dtype = self._comparison.copy_dtype(check, copies[number].file)
            found[number].update(cast(content, dtype, check.move.target_dtype))
        return [digest.digest() for digest in found]

    def _contents(
        self, check: Check, copies: Sequence[Where]
    ) -> Iterator[tuple[tuple[int, memoryview], ReadStore, list[Want]]]:
        """Yield what is read in turn of some copies, each whole, with the number of the copy."""
        for number, at in enumerate(copies):
            itemsize = self._comparison.copy_dtype(check, at.file).itemsize
            total = prod(check.shape) * itemsize
            step = max(1, self._comparison.band_bytes // itemsize) * itemsize
            for begin in range(0, total, step):
                extent = Extent(at.file, check.move.read_runs[at.runs])
                content, store, wanted = self._reading(extent, begin, min(step, total - begin))
                yield (number, content), store, wanted

    def _reading(self, extent: Extent, begin: int, nbytes: int) -> tuple[memoryview, ReadStore, list[Want]]:
        """Return the buffer for contents of a copy from a byte on, the store that has them, and what is read."""
        view = scratch(nbytes)
        self.nbytes += nbytes
        store = self._stores[extent.file >= self._comparison.sources]
        return view, store, wants(self._comparison.paths[extent.file], extent.runs, begin, view)


def _joined(a: Mismatch, b: Mismatch) -> Mismatch:
    """Join what two bands of one copy say."""
    first = min(a, b, key=lambda mismatch: mismatch.index)
    return replace(first, count=a.count + b.count)
