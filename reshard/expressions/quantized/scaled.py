"""Scaled blocks: float8 values, or two E2M1 values a byte, times the scale of their block.

The arithmetic: `float32(value) * float32(scale)`, rounded to float32, then once to the dtype of the result.

A stored byte has only 256 codes, so results are looked up in tables: one of all products for E8M0 scales, which have
256 codes too, and one for each block for other scales. Blocks that are smaller than a table are multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard.core.layout.block import Block
from reshard.dtypes import BY_NAME, E8M0
from reshard.expressions.operand import AnyBox

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from reshard.core.layout.block import Shape
    from reshard.dtypes import DType
    from reshard.expressions.operand import Operand

FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
"""The dtypes of values that can be scaled."""

PACKED = ("int8", "uint8")
"""The dtypes of bytes with two values each."""

SCALES = ("float32", "bfloat16", "float16", E8M0)
"""The dtypes of scales."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

_CODES = 256

_CHUNK = 1 << 16
"""How many bytes are looked up at once, so that they stay in a core's own cache."""

_MOST_COLUMNS = 1 << 13
"""How many bytes of a row are looked up at once, so that the tables of a row of blocks stay there, too."""

_LEAST_COLUMNS = 64
"""The least columns of a block with a table; so the number of a table and a code are an index of 16 bits."""

_SCRATCH = 3
"""Bytes of memory for each element besides the stored ones: scales, and the buffers of a chunk."""


@dataclass(frozen=True, slots=True, eq=False)
class ScaledBlocks(AnyBox):
    """A tensor of values that are multiplied by the scale of their block.

    Attributes:
        values: the values.
        scales: the scales: one for each block, with short blocks at the end of rows and columns. A single one for all
            may have fewer dimensions, and so may one for each row.
        block: the rows and columns of a block, in the last two dimensions.
        dtype: the dtype of the result.
        packed: each byte has two values, the first in its low four bits. Scales are then E8M0.
    """

    values: Operand
    scales: Operand
    block: tuple[int, int]
    dtype: DType
    packed: bool = False

    @property
    def per_byte(self) -> int:
        """Return how many values a byte has."""
        return 2 if self.packed else 1

    @property
    def shape(self) -> Shape:
        """Return the shape of the result."""
        *leading, columns = self.values.spec.shape
        return (*leading, columns * self.per_byte)

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Return the values and the scales."""
        return self.values, self.scales

    @property
    def scratch(self) -> int:
        """Return the bytes of memory for each element."""
        return 1 + _SCRATCH

    @property
    def held_bytes(self) -> int:
        """Return the bytes of the table of all products."""
        return _CODES * _CODES * self.per_byte * self.dtype.itemsize if self.scales.spec.dtype.name == E8M0 else 0

    def definition(self) -> str:
        """Return the blocks and the dtype."""
        return f"scaled by {self.block} {self.dtype}{' packed' * self.packed}"

    def evaluate(self, box: Block, out: NDArray[Any]) -> None:
        """Fill an array with scaled values."""
        if not out.size:
            return
        stored, blocks = _divided(box, (1, self.per_byte)), _divided(box, self.block)
        codes = self.values.read(stored).view(np.uint8).reshape(-1, *stored.shape[-2:])
        dims = len(self.scales.spec.shape)
        scales = self.scales.read(Block(blocks.start[:dims], blocks.stop[:dims])).reshape(-1, *blocks.shape[-2:])
        results = out.view(self.dtype.carrier()).reshape(-1, *box.shape[-2:])
        (row, column), (first_row, first) = box.start[-2:], stored.start[-2:]
        for begin in range(first, stored.stop[-1], _MOST_COLUMNS):
            end = min(begin + _MOST_COLUMNS, stored.stop[-1])
            columns = range(max(begin * self.per_byte, column), min(end * self.per_byte, box.stop[-1]))
            part = slice(columns.start - begin * self.per_byte, columns.stop - begin * self.per_byte)
            lookup = _Lookup(self, range(begin, end))
            for plane, factors, target in zip(codes, scales, results, strict=True):
                cells = plane[:, begin - first : end - first]
                lines = target[:, columns.start - column : columns.stop - column]
                of_columns = factors[:, lookup.blocks.start - blocks.start[-1] : lookup.blocks.stop - blocks.start[-1]]
                for rows, of_rows in _row_groups(range(row, box.stop[-2]), self.block[0], lookup.step):
                    bits_of = lookup.of(of_columns[of_rows], len(rows))
                    for top in range(rows.start - first_row, rows.stop - first_row, lookup.step):
                        bottom = min(top + lookup.step, rows.stop - first_row)
                        lines[top:bottom] = bits_of(cells[top:bottom])[:, part]


class _Lookup:
    """Looks up results in a range of columns.

    Attributes:
        blocks: the columns of blocks that overlap the range.
        step: the number of rows that are looked up at once.
    """

    def __init__(self, expression: ScaledBlocks, cells: range) -> None:
        """Take an expression, and the columns of stored bytes."""
        self._values, self._dtype = expression.values.spec.dtype.name, expression.dtype
        self._is_e8m0, self._packed = expression.scales.spec.dtype.name == E8M0, expression.packed
        self._columns = expression.block[1] // expression.per_byte
        self._skipped, self._width = cells.start % self._columns, len(cells)
        self.blocks = range(cells.start // self._columns, -(-cells.stop // self._columns))
        self.step = max(_CHUNK // len(cells), 1)

    def of(self, scales: NDArray[Any], rows: int) -> Callable[[NDArray[np.uint8]], NDArray[np.unsignedinteger]]:
        """Return a function that takes stored bytes and returns the bits of results.

        Args:
            scales: the scales of these columns, for each row or one row for all.
            rows: the number of rows in a call.
        """
        if self._is_e8m0:
            table = _e8m0_products(self._values, self._dtype.name, packed=self._packed)
            tables = self._widened(scales.view(np.uint8).astype(np.uint16) << 8)
        elif self._columns < _LEAST_COLUMNS or rows * self._columns < 2 * _CODES or len(scales) > 1:
            values, factors = _values(self._values), self._widened(_as_float32(scales))
            return lambda codes: _products(values.take(codes), factors, self._dtype)
        else:
            table = _products(_values(self._values), _as_float32(scales).reshape(-1, 1), self._dtype).reshape(-1)
            tables = self._widened(np.arange(len(self.blocks), dtype=np.uint16)[None] << 8)
        carrier = self._dtype.carrier()
        return lambda codes: table.take(tables + codes, mode="wrap").view(carrier)

    def _widened(self, by_block: NDArray[Any]) -> NDArray[Any]:
        """Repeat the items of blocks for each of their columns."""
        return np.repeat(by_block, self._columns, axis=1)[:, self._skipped : self._skipped + self._width]


@lru_cache(maxsize=4)
def _e8m0_products(values: str, dtype: str, *, packed: bool) -> NDArray[np.unsignedinteger]:
    """Return the bits of the products of all scales and codes; of packed values, in pairs."""
    scales = _as_float32(np.arange(_CODES, dtype=np.uint8).view(BY_NAME[E8M0].numpy()))
    if not packed:
        return _products(_values(values), scales[:, None], BY_NAME[dtype]).reshape(-1)
    codes = np.arange(_CODES)
    e2m1 = np.array([*_E2M1, *(-value for value in _E2M1)], np.float32)
    pairs = np.stack([e2m1[codes & 15], e2m1[codes >> 4]], axis=1)
    bits = _products(pairs, scales[:, None, None], BY_NAME[dtype])
    return bits.view(np.dtype(f"uint{16 * bits.itemsize}")).reshape(-1)


def _products(values: NDArray[np.float32], scales: NDArray[np.float32], dtype: DType) -> NDArray[np.unsignedinteger]:
    """Return the bits of products, rounded to a dtype."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return (values * scales).astype(dtype.numpy()).view(dtype.carrier())


@lru_cache(maxsize=8)
def _values(dtype: str) -> NDArray[np.float32]:
    """Return the value of each code of a float8 dtype."""
    return _as_float32(np.arange(_CODES, dtype=np.uint8).view(BY_NAME[dtype].numpy()))


def _as_float32(numbers: NDArray[Any]) -> NDArray[np.float32]:
    """Return numbers in float32, with the same bits for all NaNs."""
    with np.errstate(invalid="ignore"):
        result = numbers.astype(np.float32)
    result[np.isnan(result)] = np.nan
    return result


def _row_groups(rows: range, of_block: int, step: int) -> Iterator[tuple[range, slice]]:
    """Yield ranges of rows and the rows of their scales: a row of blocks each, or `step` one-row blocks.

    >>> [*_row_groups(range(100, 300), 128, 10)]
    [(range(100, 128), slice(0, 1, None)), (range(128, 256), slice(1, 2, None)), (range(256, 300), slice(2, 3, None))]
    >>> [*_row_groups(range(5, 8), 1, 2)]
    [(range(5, 7), slice(0, 2, None)), (range(7, 8), slice(2, 3, None))]
    """
    begin = rows.start
    while begin < rows.stop:
        block = begin // of_block
        end = min(begin + step if of_block == 1 else (block + 1) * of_block, rows.stop)
        first = block - rows.start // of_block
        yield range(begin, end), slice(first, first + (end - begin if of_block == 1 else 1))
        begin = end


def _divided(box: Block, size: tuple[int, int]) -> Block:
    """Return the box, in units of blocks of a size, of the blocks that a box overlaps.

    >>> str(_divided(Block((0, 100, 5), (1, 200, 6)), (64, 2)))
    '[0:1, 1:4, 2:3]'
    """
    sizes = (*(1 for _ in box.start[:-2]), *size)
    return Block(
        tuple(begin // extent for begin, extent in zip(box.start, sizes, strict=True)),
        tuple(-(-end // extent) for end, extent in zip(box.stop, sizes, strict=True)),
    )


def scales_shape(shape: Shape, block: tuple[int, int]) -> Shape:
    """Return the shape of the scales of a tensor.

    >>> scales_shape((3, 300, 129), (128, 128))
    (3, 3, 2)
    """
    return _divided(Block.whole(shape), block).stop
