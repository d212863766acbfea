"""The expression of a weight with an adapter: products of low rank are added to its elements.

1. The elements are compared with the adapter's own copy of the weight, if it has one.
2. Elements of the products are added, in float32, one product after the other; each sum is rounded once, to the dtype
   of the weight.
3. A product is computed by numpy, in tiles of a fixed grid over the whole product: an element is the same in every
   band. A tile is so small that OpenBLAS uses one thread, as its result may depend on the number of threads. If sizes
   are multiples of 16, the product equals the product of the whole matrices bit for bit. Another BLAS, or a processor
   without fused multiply-add, may round the last bit of float32 differently.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard.core.layout.block import Block, flat_boxes
from reshard.errors import SourceError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from reshard.rules.lora.parts import Adapter, Copy, Pair

_TILE = 1 << 18
"""The most multiplications for a tile: from there on OpenBLAS takes several threads (interface/gemm.c)."""

_STEP = 16
_LEAST_CACHE_BYTES = 32 << 20
_IMPORTED_BYTES = 24 << 20
_TILES_BYTES = 16  # for each element of a row of tiles: the product twice, and the weight in float32
_COPY_BYTES = 1 << 20  # the rows of a copy that are compared at once


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """A weight with an adapter.

    Attributes:
        name: the name of the weight, for messages.
        matrices: the matrices of the adapter.
        products: the products that are added, in order.
        copies: the adapter's copies of the weight.
    """

    name: str
    matrices: Matrices
    products: tuple[Pair, ...]
    copies: tuple[Copy, ...]

    @property
    def resource(self) -> Matrices:
        """Return the matrices, which all weights share."""
        return self.matrices

    def definition(self) -> str:
        """Return the digest of the adapter, the products and the copies."""
        return repr((self.matrices.adapter.digest, self.products, self.copies))

    def change(self, path: str, block: Block, first: int, elements: NDArray[Any]) -> None:
        """Add the products to elements.

        Raises:
            SourceError: the adapter cannot be read, or its copy of the weight differs from the weight.
            ChangedError: the adapter changed since it was opened.
        """
        done = 0
        for inner in flat_boxes(block.shape, first, first + len(elements)):
            part = elements[done : done + inner.size].reshape(inner.shape)
            done += inner.size
            starts = tuple(a + b for a, b in zip(inner.start, block.start, strict=True))
            box = Block(starts, tuple(a + b for a, b in zip(starts, inner.shape, strict=True)))
            for copy in self.copies:
                self._compare(path, copy, box, part)
            for pair in self.products:
                self._add(pair, box, part)

    def _compare(self, path: str, copy: Copy, box: Block, part: NDArray[Any]) -> None:
        """Compare a box with the adapter's copy, bit for bit."""
        adapter = self.matrices.adapter
        entry = adapter.file.index.entries[copy.name]
        step = max(1, _COPY_BYTES * entry.shape[0] // max(entry.nbytes, 1))
        bits = np.dtype(f"u{entry.dtype.itemsize}")
        row, column = (*box.start, 0)[:2]
        part = part.reshape(len(part), -1)
        for top in range(0, len(part), step):
            with np.errstate(over="ignore", invalid="ignore"):  # the model may be trained in another dtype
                ours = part[top : top + step].astype(entry.dtype.numpy())
            theirs = adapter.rows(copy.name, row + top, row + top + len(ours))
            theirs = theirs[:, column : column + ours.shape[1]]
            if not np.array_equal(ours.view(bits), theirs.view(bits)):
                adapter.require_unchanged()
                raise SourceError(
                    f"{self.name} in {path} differs from the copy in the adapter", code="different-model",
                    facts=[f"the copy is in {adapter.file.path}", "the adapter was trained on another model"],
                )  # fmt: skip

    def _add(self, pair: Pair, box: Block, part: NDArray[Any]) -> None:
        """Add a product to a box."""
        target, (row, column) = part, box.start
        if pair.transposed:
            target, row, column = part.T, column, row
        _add_product(target, row, column, *self.matrices.of(pair), pair.scale)


class Matrices:
    """The matrices of an adapter; the few in use are cached, as float32. Thread-safe."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self._cache_bytes = self._held_bytes
        self._cache: OrderedDict[Pair, tuple[NDArray[Any], NDArray[Any]]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def _held_bytes(self) -> int:
        """Return the size of the cache."""
        sizes = [pair.nbytes for pair in self.adapter.pairs]
        return min(sum(sizes), max(4 * max(sizes), _LEAST_CACHE_BYTES))

    def nbytes(self, threads: int) -> int:
        """Return the memory of the cache, and of each thread: for a matrix that is read, for tiles, and for copies."""
        pairs, entries = self.adapter.pairs, self.adapter.file.index.entries
        largest = max(pair.nbytes for pair in pairs)
        tiles = _TILES_BYTES * max(_TILE, _STEP * max(pair.shape[1] for pair in pairs))
        copies = [entries[copy.name] for copy in self.adapter.copies]
        rows = max((4 * max(_COPY_BYTES, entry.nbytes // max(entry.shape[0], 1)) for entry in copies), default=0)
        return _IMPORTED_BYTES + self._held_bytes + threads * (2 * largest + tiles + rows)

    def of(self, pair: Pair) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return A and B of a pair, as float32."""
        with self._lock:
            if matrices := self._cache.get(pair):
                self._cache.move_to_end(pair)
                return matrices
        matrices = self.adapter.matrix(pair.a), self.adapter.matrix(pair.b)
        self.adapter.require_unchanged()
        with self._lock:
            self._cache[pair] = matrices
            while sum(cached.nbytes for cached in self._cache) > self._cache_bytes and len(self._cache) > 1:
                self._cache.popitem(last=False)
        return matrices

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the matrices without the cache."""
        return Matrices, (self.adapter,)


def _add_product(target: NDArray[Any], row: int, column: int, a: NDArray[Any], b: NDArray[Any], scale: float) -> None:
    """Add a part of `scale * b @ a` to a target, in float32 and rounded once.

    The part begins at `row` and `column` of the product and has the shape of the target.
    """
    high, wide = _tile(*a.shape)
    stop, begin = column + target.shape[1], column // wide * wide
    with np.errstate(over="ignore", invalid="ignore"):  # numbers that are too large become infinity
        for top in range(row // high * high, row + target.shape[0], high):
            product = np.empty((min(high, len(b) - top), min(-(-stop // wide) * wide, a.shape[1]) - begin), np.float32)
            for first_column in range(begin, stop, wide):
                tile = product[:, first_column - begin : first_column - begin + wide]
                np.matmul(b[top : top + high], a[:, first_column : first_column + wide], out=tile)
            rows = slice(max(top, row), min(top + high, row + target.shape[0]))
            addend = product[rows.start - top : rows.stop - top, column - begin : stop - begin]
            addend *= np.float32(scale)
            rows_of_target = target[rows.start - row : rows.stop - row]
            addend += rows_of_target.astype(np.float32, copy=False)
            rows_of_target[...] = addend


def _tile(rank: int, columns: int) -> tuple[int, int]:
    """Return the rows and columns of a tile of a product with this number of columns.

    >>> _tile(16, 4096), _tile(64, 4096), _tile(8, 48)
    ((16, 1024), (16, 256), (672, 48))
    """
    wide = min(columns, max(_STEP, _TILE // (_STEP * rank) // _STEP * _STEP))
    return max(_STEP, _TILE // (rank * wide) // _STEP * _STEP), wide
