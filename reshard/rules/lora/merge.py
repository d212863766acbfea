"""An adapter in the weights of a checkpoint: a store around that of its files adds to the bytes of a weight.

1. Each run of bytes of a weight that gets something is a `Span`: where it lies in a file, and which elements it has.
2. A band is read as ever; then to each of its elements in a span comes that of the product, in float32, and the sum is
   rounded once, to the dtype of the weight.
3. The product is numpy's, in tiles of the whole weight's own grid: an element is the same in whatever band it is read.
   A tile is small enough that OpenBLAS takes one thread, which its result may depend on otherwise. Where sizes are
   multiples of 16 it is, bit for bit, that of the whole matrices; another library for matrices than numpy's, or a
   processor without fused multiply-add, may round the last bit of float32 in another way.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.errors import ChangedError, Faults, SourceError, UsageError
from reshard.formats.entries import wants
from reshard.layout.block import Block, flat_boxes, shape_text
from reshard.source.checkpoint import Origin
from reshard.storage.base import Around
from reshard.storage.cipher import store_of
from reshard.storage.places import any_store
from reshard.strategy.names import no_match

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from reshard.dtypes import DType
    from reshard.formats.entries import Extent
    from reshard.layout.block import Shape
    from reshard.rules.lora import LoRA
    from reshard.rules.lora.adapter import Adapter, Pair
    from reshard.source.checkpoint import Checkpoint
    from reshard.storage.base import Coding, Want

_DTYPES = {"float32", "float16", "bfloat16"}

_TILE = 1 << 18
"""The most multiplications for a tile: from there on OpenBLAS takes several threads (interface/gemm.c)."""

_STEP = 16
_LEAST_HELD = 32 << 20
_IMPORTED_BYTES = 24 << 20
_TILES_BYTES = 16  # for each element of a row of tiles: the product twice, and the weight in float32
_SPAN_BYTES = 400


class Span(NamedTuple):
    """A run of bytes of a block of a weight.

    Attributes:
        begin, end: where it is in the file.
        first: the number of its first element in the block.
        block: the block, whose dimensions are in the order in which its elements lie.
        dtype: of the weight.
        pair: what is added to the weight.
        transposed: the block is one of the transposed product.
    """

    begin: int
    end: int
    first: int
    block: Block
    dtype: DType
    pair: Pair
    transposed: bool


def merge(source: Checkpoint, adapter: Adapter, lora: LoRA) -> Checkpoint:
    """Return a checkpoint with an adapter in its weights.

    Raises:
        SourceError: a weight is not there, has another shape, or is not of float numbers; all at once.
        UsageError: the checkpoint is one stage of a pipeline, or was made of another already.
    """
    source.require_whole()
    if source.origin is not None:
        raise UsageError(f"{source.root}: has other names, or an adapter, already; merge one adapter, and first of all")
    if source.part is not None:
        raise UsageError(f"{source.root}: is one stage of a pipeline, and an adapter is of all; open all stages")
    faults = Faults(adapter.file.path)
    spans: dict[str, list[Span]] = {}
    for pair in adapter.pairs:
        tensor = source.tensors.get(pair.weight)
        if tensor is None:
            if pair.weight not in source.left_out:
                said = partial(no_match, pair.weight, source.every)
                faults.add(f"layer {pair.weight!r}", lambda said=said: f"{said()}, in {source.root}")  # type: ignore[misc]
            continue
        shape = pair.shape[::-1] if pair.transposed else pair.shape
        if tensor.spec.shape != shape or tensor.spec.dtype.name not in _DTYPES:
            found = f"{tensor.spec.dtype} {shape_text(tensor.spec.shape)} in {source.root}"
            expected = f"{shape_text(shape)} of {', '.join(sorted(_DTYPES))}"
            faults.add(f"layer {pair.weight!r}", f"is {found}; expected {expected}")
            continue
        for block, replicas in tensor.shards:
            for extent in replicas:
                if extent.strides and not _are_rows(extent.strides, block.shape):
                    found = f"lies in the strides {shape_text(extent.strides)} in {source.root}"
                    faults.add(f"layer {pair.weight!r}", f"{found}; expected rows or columns, each in one run")
                else:
                    of_file = spans.setdefault(source.files[extent.file].path, [])
                    of_file += _spans(extent, block, tensor.spec.dtype, pair)
    faults.raise_if_any(SourceError)
    ordered = {path: tuple(sorted(some, key=lambda span: span[:2])) for path, some in spans.items()}
    origin = Origin(source, None, frozenset(), lora)
    return replace(source, decoding=Merging(source.coding, adapter, ordered), origin=origin)


def _are_rows(strides: Shape, shape: Shape) -> bool:
    """Return whether elements of each row follow each other, or those of each column, and no two are one."""
    (pitch, _), (step, extent) = sorted(zip(strides, shape, strict=True), reverse=True)
    return step == 1 and pitch >= extent


def _spans(extent: Extent, block: Block, dtype: DType, pair: Pair) -> Iterator[Span]:
    """Yield what is added to in a file of a block of a weight; of one that lies in strides, row by row or at once."""
    if not extent.strides:
        position = 0
        for offset, nbytes in extent.runs:
            yield Span(offset, offset + nbytes, position // dtype.itemsize, block, dtype, pair, pair.transposed)
            position += nbytes
        return
    turned = extent.strides[0] < extent.strides[1]
    start, stop = (at[::-1] if turned else at for at in (block.start, block.stop))
    pitch, columns = max(extent.strides), stop[1] - start[1]
    ((offset, _),) = extent.runs
    height = 1 if pitch > columns else stop[0] - start[0]
    for row in range(start[0], stop[0], height):
        begin = offset + (row - start[0]) * pitch * dtype.itemsize
        part = Block((row, start[1]), (row + height, stop[1]))
        yield Span(begin, begin + part.size * dtype.itemsize, 0, part, dtype, pair, pair.transposed != turned)


@dataclass(frozen=True, slots=True, eq=False)
class Merging:
    """How files are read in whose weights an adapter is merged.

    Attributes:
        inner: how they are read without.
        adapter: what is added.
        spans: what of each file it is added to, in order.
    """

    inner: Coding | None
    adapter: Adapter
    spans: Mapping[str, tuple[Span, ...]]

    @property
    def held_bytes(self) -> int:
        """How much of the matrices is held, as float32: of the few that are in use at a time."""
        sizes = [pair.nbytes for pair in self.adapter.pairs]
        return min(sum(sizes), max(4 * max(sizes), _LEAST_HELD))

    def nbytes(self, threads: int) -> int:
        """Return the memory that merging takes: matrices held, and of each thread one that is read, and tiles."""
        largest = max(pair.nbytes for pair in self.adapter.pairs)
        tiles = _TILES_BYTES * max(_TILE, _STEP * max(pair.shape[1] for pair in self.adapter.pairs))
        spans = _SPAN_BYTES * sum(map(len, self.spans.values()))
        own = _IMPORTED_BYTES + self.held_bytes + spans + threads * (2 * largest + tiles)
        return own + (self.inner.nbytes(threads) if self.inner else 0)

    def store(self) -> MergingStore:
        """Return what reads the files."""
        return MergingStore(self)


class MergingStore(Around):
    """Files whose weights are read with what an adapter adds to them. Safe to use from several threads."""

    def __init__(self, merging: Merging) -> None:
        super().__init__(store_of(merging.inner))
        self._merging = merging
        self._most = merging.held_bytes
        self._held: OrderedDict[Pair, tuple[NDArray[Any], NDArray[Any]]] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, wants: Sequence[Want]) -> None:
        """Fill buffers, and add to them.

        Raises:
            SourceError: the adapter cannot be read.
            ChangedError: it is not what was looked at.
        """
        self.inner.read(wants)
        for want in wants:
            self._add(*want)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill one buffer, and add to it."""
        self.inner.read_into(path, offset, buffer)
        self._add(path, offset, buffer)

    def _add(self, path: str, offset: int, buffer: memoryview) -> None:
        """Add to those bytes of a file in a buffer that are in spans."""
        import numpy as np

        spans = self._merging.spans.get(path, ())
        number = bisect_right(spans, offset, key=lambda span: span.end)
        while number < len(spans) and spans[number].begin < offset + len(buffer):
            span = spans[number]
            number += 1
            begin, end = max(span.begin, offset), min(span.end, offset + len(buffer))
            assert (begin - span.begin) % span.dtype.itemsize == 0, "whole elements are read"  # noqa: S101
            elements = np.frombuffer(buffer[begin - offset : end - offset], span.dtype.numpy())
            first = span.first + (begin - span.begin) // span.dtype.itemsize
            a, b = self._matrices(span.pair)
            for box in flat_boxes(span.block.shape, first, first + len(elements)):
                some, elements = elements[: box.size].reshape(box.shape), elements[box.size :]
                row, column = (at + start for at, start in zip(box.start, span.block.start, strict=True))
                if span.transposed:
                    some, row, column = some.T, column, row
                _add_product(some, row, column, a, b, span.pair.scale)

    def _matrices(self, pair: Pair) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return A and B of a pair, as float32."""
        with self._lock:
            if found := self._held.get(pair):
                self._held.move_to_end(pair)
                return found
        found = self._read(pair.a), self._read(pair.b)
        file = self._merging.adapter.file
        if not any_store().status(file.path).is_still(file.status):
            raise ChangedError(f"{file.path}: changed since it was opened; start again")
        with self._lock:
            self._held[pair] = found
            while sum(one.nbytes for one in self._held) > self._most and len(self._held) > 1:
                self._held.popitem(last=False)
        return found

    def _read(self, name: str) -> NDArray[Any]:
        import numpy as np

        file = self._merging.adapter.file
        entry = file.index.entries[name]
        content = bytearray(entry.nbytes)
        any_store().read(wants(file.path, entry.runs, 0, memoryview(content)))
        return np.frombuffer(content, entry.dtype.numpy()).reshape(entry.shape).astype(np.float32)

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel to another process as a fresh store."""
        return MergingStore, (self._merging,)


def _add_product(some: NDArray[Any], row: int, column: int, a: NDArray[Any], b: NDArray[Any], scale: float) -> None:
    """Add `scale * b @ a` to some rows and columns of it, from these on: in float32, and rounded once."""
    import numpy as np

    high, wide = _tile(*a.shape)
    stop, begin = column + some.shape[1], column // wide * wide
    with np.errstate(over="ignore", invalid="ignore"):  # infinity is what too large a number becomes
        for top in range(row // high * high, row + some.shape[0], high):
            product = np.empty((min(high, len(b) - top), min(-(-stop // wide) * wide, a.shape[1]) - begin), np.float32)
            for left in range(begin, stop, wide):
                put = product[:, left - begin : left - begin + wide]
                np.matmul(b[top : top + high], a[:, left : left + wide], out=put)
            rows = slice(max(top, row), min(top + high, row + some.shape[0]))
            found = product[rows.start - top : rows.stop - top, column - begin : stop - begin]
            found *= np.float32(scale)
            into = some[rows.start - row : rows.stop - row]
            found += into.astype(np.float32, copy=False)
            into[...] = found


def _tile(rank: int, columns: int) -> tuple[int, int]:
    """Return the rows and the columns of a tile of a product of so many columns.

    >>> _tile(16, 4096), _tile(64, 4096), _tile(8, 48)
    ((16, 1024), (16, 256), (672, 48))
    """
    wide = min(columns, max(_STEP, _TILE // (_STEP * rank) // _STEP * _STEP))
    return max(_STEP, _TILE // (rank * wide) // _STEP * _STEP), wide
