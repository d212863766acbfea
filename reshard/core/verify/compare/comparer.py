"""Compare bands of references with their copies, in one task."""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import blake2b
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reshard.core.layout.block import Block
from reshard.core.model.entries import Extent, Replica, wants
from reshard.core.plan.bands import AHEAD
from reshard.core.plan.plan import Piece, Route
from reshard.core.run.engine import Band, BandReader, BandWrite, cast, copies_ahead, read_block, scratch
from reshard.core.storage.cipher import store_of
from reshard.core.storage.places import in_batches

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from reshard.core.layout.block import Shape
    from reshard.core.storage.base import ReadStore, Want
    from reshard.core.verify.compare import Check, ComparisonPlan
    from reshard.dtypes import DType

Array = np.ndarray[Any, np.dtype[Any]]

_WIDENED = 64 << 10  # elements that are converted to float64 at once: half a megabyte


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A difference between a copy and its references.

    Attributes:
        file: the number of the file with the copy.
        block: the block of the tensor.
        index: the index of the first differing element in the whole tensor.
        count: number of compared elements that differ.
        found: the bits of the first differing element in the copy.
        expected: the bits of that element in the reference.
        reference: the number of the source file with the reference.
        largest: the largest absolute difference of two numbers, in float64; 0 if only NaNs or the sign of 0 differ.
        nans: number of differing elements that are NaN in either file.
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
    """The result of a task.

    Attributes:
        found: mismatches, each with the number of its check.
        read: number of bytes read.
        varying: names of tensors with different values on source ranks.
    """

    found: list[tuple[int, Mismatch]]
    read: int
    varying: list[str]


class _SideBySide(NamedTuple):
    """A strided copy in a group that is read side by side.

    Attributes:
        of: the key of the group.
        beside: the number of copies in the group.
        place: the index of the copy in the group.
    """

    of: object
    beside: int
    place: int


class _References(NamedTuple):
    """A band of the references of a check."""

    number: int
    band: Band


class _CopyPart(NamedTuple):
    """A part of a copy and its buffer; without a copy, references to be cast."""

    number: int
    write: BandWrite
    copy: Extent | None
    content: memoryview
    side: _SideBySide | None = None


_Turn = tuple[_References | _CopyPart, "ReadStore", list["Want"]]


class Comparer:
    """Compares the copies of one task with their references."""

    def __init__(self, comparison: ComparisonPlan) -> None:
        self._comparison = comparison
        self._stores = [store_of(coding) for coding in comparison.codings]
        self._token = object()  # data that is read ahead belongs to this comparer alone
        self.found: list[tuple[int, Mismatch]] = []
        self.varying: list[str] = []
        self.nbytes = 0

    def compare(self, pieces: Sequence[Piece]) -> None:
        """Compare the rows of pieces; compare tensors with separate values as a whole."""
        checks = {piece.transfer: self._comparison.checks[piece.transfer] for piece in pieces}
        self.found += self._rows(checks, [piece for piece in pieces if not checks[piece.transfer].own_values])
        for number, check in checks.items():
            if check.own_values:
                self.found += [(number, mismatch) for mismatch in self._own_values(check)]

    def _rows(self, checks: Mapping[int, Check], pieces: Iterable[Piece]) -> Iterator[tuple[int, Mismatch]]:
        """Compare the rows of pieces, and yield mismatches with check numbers."""
        transfers = {number: check.transfer for number, check in checks.items()}
        reader = BandReader(transfers, self._comparison.paths, self._stores[0], self._comparison.band_bytes)
        converted = memoryview(b"")
        for turn in in_batches(self._turns(reader, checks, pieces)):
            if isinstance(turn, _References):
                reader.read_strided_blocks(*turn)
                continue
            number, write, copy, content, side = turn
            check = checks[number]
            if copy is None:
                converted = cast(write.gather_columns(), check.transfer.dtype, check.transfer.target_dtype)
                continue
            dtype = self._comparison.copy_dtype(check, copy.file)
            shape = check.transfer.recipe.targets[write.target].shape
            self._gather(copy, shape, dtype, write.first * dtype.itemsize, content, side)
            expected = write.content if dtype is check.transfer.dtype else converted
            if expected is write.content and write.copies:
                # The copy is in the gather buffer: compare its columns with the read buffers.
                if all(np.array_equal(*columns) for columns in write.copies):
                    continue
                content = memoryview(bytes(content))
                write.gather_columns()
            copy_bits, reference_bits = (np.frombuffer(buffer, dtype.carrier()) for buffer in (content, expected))
            unequal = copy_bits != reference_bits
            if unequal.any():
                location = check, write.target, copy.file, write.first
                yield number, self._mismatch(*location, unequal, copy_bits, reference_bits)
        self.nbytes += round(reader.nbytes)

    def _turns(self, reader: BandReader, checks: Mapping[int, Check], pieces: Iterable[Piece]) -> Iterator[_Turn]:
        """Yield read steps: a band of the references, then every copy of each part of it."""
        in_order = any(coding is not None for coding in self._comparison.codings)  # decoded from their beginning
        for (number, band), store, requests in reader.bands(pieces, in_order=in_order):
            yield _References(number, band), store, requests
            transfer = checks[number].transfer
            writes, sides = band.writes, iter(tuple[_SideBySide, ...]())
            if any(copy.is_indirect for copies in transfer.writes for copy in copies):
                writes = list(writes)
                sides = _sides(number, [(write.target, transfer.writes[write.target]) for write in writes])
            for write in writes:
                elements = len(write.content) // transfer.dtype.itemsize
                dtype = transfer.dtype
                for copy in transfer.writes[write.target]:
                    before, dtype = dtype, self._comparison.copy_dtype(checks[number], copy.file)
                    if dtype is not before:
                        yield _CopyPart(number, write, None, write.content), store, []
                    itemsize = dtype.itemsize
                    content, of_copy, reading = self._reading(copy, write.first * itemsize, elements * itemsize)
                    side = next(sides) if copy.is_indirect else None
                    yield _CopyPart(number, write, copy, content, side), of_copy, reading

    def _mismatch(
        self, check: Check, target: int, file: int, first: int, unequal: Array, actual: Array, expected: Array
    ) -> Mismatch:
        """Describe the unequal elements of a part of a copy."""
        position = int(unequal.argmax())
        recipe = check.transfer.recipe
        block = recipe.targets[target]
        inside = np.unravel_index(first + position, block.shape)
        index = tuple(start + int(at) for start, at in zip(block.start, inside, strict=True))
        reference = next(
            at.file
            for source, at in zip(recipe.sources, check.transfer.route.reads, strict=True)
            if all(a <= i < b for a, i, b in zip(source.start, index, source.stop, strict=True))
        )
        dtype = self._comparison.copy_dtype(check, file)
        largest, nans = _distance(unequal, actual, expected, dtype)
        if not check.shape:
            index = ()
        elif check.shape != recipe.shape:
            index, *corners = (
                _unravelled(at, recipe.shape, check.shape)
                for at in (index, block.start, tuple(end - 1 for end in block.stop))
            )
            block = Block(corners[0], tuple(at + 1 for at in corners[1]))
        count = int(np.count_nonzero(unequal))
        return Mismatch(
            file, block, index, count, int(actual[position]), int(expected[position]), reference, largest, nans
        )

    def _own_values(self, check: Check) -> Iterator[Mismatch]:
        """Compare copies that equal no value of a source rank with the first value."""
        transfer = check.transfer
        values = {*self._digests(check, check.references)}
        if len(values) > 1:
            self.varying.append(check.source_name)
        for block, copies in zip(transfer.recipe.targets, transfer.route.writes, strict=True):
            digests = self._digests(check, copies)
            wrong = tuple(at for at, digest in zip(copies, digests, strict=True) if digest not in values)
            if wrong:
                recipe = replace(transfer.recipe, targets=(block,))
                single = replace(
                    check,
                    transfer=transfer._replace(route=Route(recipe, transfer.axis, transfer.route.reads, (wrong,))),
                )
                by_file: dict[int, Mismatch] = {}
                for _, mismatch in self._rows({0: single}, [Piece(0, 0, transfer.rows)]):
                    before = by_file.get(mismatch.file)
                    by_file[mismatch.file] = joined(before, mismatch) if before else mismatch
                yield from by_file.values()

    def _digests(self, check: Check, copies: Sequence[Replica]) -> list[bytes]:
        """Return the digests of whole copies of a tensor, cast as in a conversion."""
        hashes = [blake2b(digest_size=32) for _ in copies]
        for number, extent, begin, content in in_batches(self._contents(check, copies)):
            dtype = self._comparison.copy_dtype(check, extent.file)
            side = _SideBySide((check.source_name, number), 1, 0) if extent.is_indirect else None
            self._gather(extent, check.shape, dtype, begin, content, side)
            hashes[number].update(cast(content, dtype, check.transfer.target_dtype))
        return [digest.digest() for digest in hashes]

    def _contents(
        self, check: Check, copies: Sequence[Replica]
    ) -> Iterator[tuple[tuple[int, Extent, int, memoryview], ReadStore, list[Want]]]:
        """Yield read steps for whole copies: number, extent, byte offset and buffer."""
        for number, at in enumerate(copies):
            itemsize = self._comparison.copy_dtype(check, at.file).itemsize
            total = prod(check.shape) * itemsize
            step = max(1, self._comparison.band_bytes // itemsize) * itemsize
            for begin in range(0, total, step):
                extent = at.extent(check.transfer.read_runs)
                content, store, requests = self._reading(extent, begin, min(step, total - begin))
                yield (number, extent, begin, content), store, requests

    def _reading(self, extent: Extent, begin: int, nbytes: int) -> tuple[memoryview, ReadStore, list[Want]]:
        """Return a buffer for contents of a copy, their store, and read requests."""
        view = scratch(nbytes)
        self.nbytes += nbytes
        path = self._comparison.paths[extent.file]
        return view, self._store(extent), [] if extent.is_indirect else wants(path, extent.runs, begin, view)

    def _gather(
        self, extent: Extent, shape: Shape, dtype: DType, begin: int, view: memoryview, side: _SideBySide | None
    ) -> None:
        """Gather a strided copy into its buffer; contiguous ones are already filled."""
        if side:
            ahead, paths = copies_ahead(), self._comparison.paths
            ahead.share((self._token, side.of), side.beside, AHEAD * self._comparison.band_bytes)
            read_block(self._store(extent), paths, extent, shape, dtype, begin, view, ahead, side.place)

    def _store(self, extent: Extent) -> ReadStore:
        return self._stores[extent.file >= self._comparison.sources]


def _sides(number: int, copies: Sequence[tuple[int, Sequence[Extent]]]) -> Iterator[_SideBySide]:
    """Return the `_SideBySide` of each strided copy of the target blocks of a band."""
    of = number, tuple(target for target, _ in copies)
    count = sum(copy.is_indirect for _, extents in copies for copy in extents)
    return (_SideBySide(of, count, index) for index in range(count))


def _unravelled(index: Shape, space: Shape, shape: Shape) -> Shape:
    """Convert the index of an element in a space to its index in a shape."""
    return tuple(int(at) for at in np.unravel_index(int(np.ravel_multi_index(index, space)), shape))


def joined(a: Mismatch, b: Mismatch) -> Mismatch:
    """Join the mismatches of two bands of one copy."""
    first = min(a, b, key=lambda mismatch: mismatch.index)
    return replace(first, count=a.count + b.count, largest=max(a.largest, b.largest), nans=a.nans + b.nans)


def _distance(unequal: Array, actual: Array, expected: Array, dtype: DType) -> tuple[float, int]:
    """Return the largest absolute difference of unequal elements, and the number of pairs with a NaN."""
    wide = np.complex128 if dtype.numpy().kind == "c" else np.float64
    largest, nans = 0.0, 0
    for begin in range(0, len(unequal), _WIDENED):
        part = slice(begin, begin + _WIDENED)
        with np.errstate(all="ignore"):
            a, b = (bits[part][unequal[part]].view(dtype.numpy()).astype(wide) for bits in (actual, expected))
            distances = np.abs(a - b)
        nan = np.isnan(a) | np.isnan(b)
        largest = max(largest, float(distances[~nan].max(initial=0)))
        nans += int(np.count_nonzero(nan))
    return largest, nans
