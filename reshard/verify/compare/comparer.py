"""What one task compares: bands of references with what copies of them have, read in turn."""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import blake2b
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reshard.formats.entries import Extent, Where, wants
from reshard.layout.block import Block
from reshard.plan.bands import AHEAD
from reshard.plan.plan import Piece, Way
from reshard.run.engine import Band, BandReader, Write, cast, copies_ahead, read_block, scratch
from reshard.storage.cipher import store_of
from reshard.storage.places import in_batches

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from reshard.dtypes import DType
    from reshard.layout.block import Shape
    from reshard.storage.base import ReadStore, Want
    from reshard.verify.compare import Check, Comparison

Array = np.ndarray[Any, np.dtype[Any]]


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
        largest: the largest absolute difference of two numbers, in float64; 0 if only NaNs or the sign of 0 differ.
        nans: how many of the elements that differ are NaN, in either file.
    """

    file: int
    block: Block
    index: tuple[int, ...]
    count: int
    found: int
    expected: int
    reference: int
    largest: float
    nans: int


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


class _Side(NamedTuple):
    """A copy that lies apart, among those that are read side by side: what sets these apart, their number, its own."""

    of: object
    beside: int
    place: int


class _References(NamedTuple):
    """A band of what the copies of a check are compared with."""

    number: int
    band: Band


class _Part(NamedTuple):
    """A part of a copy and the buffer for it; of no copy, what its copies are compared with, cast, before these."""

    number: int
    write: Write
    copy: Extent | None
    content: memoryview
    side: _Side | None = None


_Turn = tuple[_References | _Part, "ReadStore", list["Want"]]


class Comparer:
    """Compares what one task is about."""

    def __init__(self, comparison: Comparison) -> None:
        self._comparison = comparison
        self._stores = [store_of(coding) for coding in comparison.codings]
        self._token = object()  # what is read ahead is for this one alone
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
            if isinstance(turn, _References):
                reader.gather(*turn)
                continue
            number, write, copy, found, side = turn
            check = checks[number]
            if copy is None:
                converted = cast(write.put_together(), check.move.dtype, check.move.target_dtype)
                continue
            dtype = self._comparison.copy_dtype(check, copy.file)
            shape = check.move.recipe.targets[write.target].shape
            self._gather(copy, shape, dtype, write.first * dtype.itemsize, found, side)
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
                yield number, self._mismatch(check, write.target, copy.file, write.first, unequal, here, there)
        self.nbytes += reader.nbytes

    def _turns(self, reader: BandReader, checks: Mapping[int, Check], pieces: Iterable[Piece]) -> Iterator[_Turn]:
        """Yield what is read in turn: a band of the references, then every copy of each part of it."""
        for (number, band), store, wanted in reader.bands(pieces):
            yield _References(number, band), store, wanted
            move = checks[number].move
            writes, sides = band.writes, iter(tuple[_Side, ...]())
            if any(copy.is_apart for copies in move.writes for copy in copies):
                writes = list(writes)
                sides = _sides(number, [(write.target, move.writes[write.target]) for write in writes])
            for write in writes:
                elements = len(write.content) // move.dtype.itemsize
                dtype = move.dtype
                for copy in move.writes[write.target]:
                    before, dtype = dtype, self._comparison.copy_dtype(checks[number], copy.file)
                    if dtype is not before:
                        yield _Part(number, write, None, write.content), store, []
                    itemsize = dtype.itemsize
                    found, of_copy, reading = self._reading(copy, write.first * itemsize, elements * itemsize)
                    side = next(sides) if copy.is_apart else None
                    yield _Part(number, write, copy, found, side), of_copy, reading

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
        dtype = self._comparison.copy_dtype(check, file)
        largest, nans = _distance(here[unequal], there[unequal], dtype)
        if not check.shape:
            index = ()
        elif check.shape != recipe.shape:
            index, *corners = (
                _unravelled(at, recipe.shape, check.shape)
                for at in (index, block.start, tuple(end - 1 for end in block.stop))
            )
            block = Block(corners[0], tuple(at + 1 for at in corners[1]))
        count = int(np.count_nonzero(unequal))
        return Mismatch(file, block, index, count, int(here[place]), int(there[place]), reference, largest, nans)

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
                    found[mismatch.file] = joined(before, mismatch) if before else mismatch
                yield from found.values()

    def _digests(self, check: Check, copies: Sequence[Where]) -> list[bytes]:
        """Return the digests of all that files have of a tensor, cast as a conversion casts it."""
        found = [blake2b(digest_size=32) for _ in copies]
        for number, extent, begin, content in in_batches(self._contents(check, copies)):
            dtype = self._comparison.copy_dtype(check, extent.file)
            side = _Side((check.source_name, number), 1, 0) if extent.is_apart else None
            self._gather(extent, check.shape, dtype, begin, content, side)
            found[number].update(cast(content, dtype, check.move.target_dtype))
        return [digest.digest() for digest in found]

    def _contents(
        self, check: Check, copies: Sequence[Where]
    ) -> Iterator[tuple[tuple[int, Extent, int, memoryview], ReadStore, list[Want]]]:
        """Yield what is read in turn of some copies, each whole: the copy, by number, too, and from which byte on."""
        for number, at in enumerate(copies):
            itemsize = self._comparison.copy_dtype(check, at.file).itemsize
            total = prod(check.shape) * itemsize
            step = max(1, self._comparison.band_bytes // itemsize) * itemsize
            for begin in range(0, total, step):
                extent = Extent(at.file, check.move.read_runs[at.runs], at.strides)
                content, store, wanted = self._reading(extent, begin, min(step, total - begin))
                yield (number, extent, begin, content), store, wanted

    def _reading(self, extent: Extent, begin: int, nbytes: int) -> tuple[memoryview, ReadStore, list[Want]]:
        """Return the buffer for contents of a copy from a byte on, the store that has them, and what fills it."""
        view = scratch(nbytes)
        self.nbytes += nbytes
        path = self._comparison.paths[extent.file]
        return view, self._store(extent), [] if extent.is_apart else wants(path, extent.runs, begin, view)

    def _gather(
        self, extent: Extent, shape: Shape, dtype: DType, begin: int, view: memoryview, side: _Side | None
    ) -> None:
        """Fill the buffer for contents of a copy that lies apart, in its turn; that of others is full then."""
        if side:
            ahead, paths = copies_ahead(), self._comparison.paths
            ahead.share((self._token, side.of), side.beside, AHEAD * self._comparison.band_bytes)
            read_block(self._store(extent), paths, extent, shape, dtype, begin, view, ahead, side.place)

    def _store(self, extent: Extent) -> ReadStore:
        return self._stores[extent.file >= self._comparison.sources]


def _sides(number: int, copies: Sequence[tuple[int, Sequence[Extent]]]) -> Iterator[_Side]:
    """Return which one each copy that lies apart is, of those of a band's target blocks."""
    of = number, tuple(target for target, _ in copies)
    count = sum(copy.is_apart for _, some in copies for copy in some)
    return (_Side(of, count, place) for place in range(count))


def _unravelled(index: Shape, space: Shape, shape: Shape) -> Shape:
    """Return the index in a shape of an element of a space."""
    return tuple(int(at) for at in np.unravel_index(int(np.ravel_multi_index(index, space)), shape))


def joined(a: Mismatch, b: Mismatch) -> Mismatch:
    """Join what two bands of one copy say."""
    first = min(a, b, key=lambda mismatch: mismatch.index)
    return replace(first, count=a.count + b.count, largest=max(a.largest, b.largest), nans=a.nans + b.nans)


def _distance(here: Array, there: Array, dtype: DType) -> tuple[float, int]:
    """Return the largest absolute difference of elements, given as bits, and how many pairs have a NaN."""
    wide = np.complex128 if dtype.numpy().kind == "c" else np.float64
    with np.errstate(all="ignore"):
        a, b = (bits.view(dtype.numpy()).astype(wide) for bits in (here, there))
        apart = np.abs(a - b)
    nans = np.isnan(a) | np.isnan(b)
    return float(apart[~nans].max(initial=0)), int(np.count_nonzero(nans))
