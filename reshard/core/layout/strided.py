"""Read strided elements: gaps between them are skipped, or read and discarded.

Gaps of up to 32 KiB are read through, because one longer read costs less than two. At most 2 MiB are read at once in
addition to the result, and one tile is buffered. If the elements are in another order than in the result, neighbours in
the file are far apart in the result, and any few rows of it would take all of the file. So `Ahead` also reads the rows
that come next, if it has memory for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise
from math import prod
from operator import mul
from typing import TYPE_CHECKING, Any

from reshard.core.layout.block import Block, flat_boxes

if TYPE_CHECKING:
    import numpy as np

    from reshard.core.layout.block import Shape

GAP = 32 << 10
"""The longest gap, in bytes, that is not skipped: reading that much takes about as long as one more call."""

SCRATCH = 2 << 20
"""The most bytes read at once if some of them are discarded."""

_TILE = 512
"""The most rows and columns of a tile that is transposed at once, so that it fits into a cache."""

TILE_BYTES = 1 << 20
"""The most bytes of a tile."""

_NEAR = 64
"""Neighbours in the source that are fewer elements apart in the target are copied without tiles."""

_PADDING = 64
"""Bytes between the rows of a tile: rows at steps of 4 KiB would share the same lines of a cache."""

_ALIGNED = 16
"""The alignment in bytes that suits elements of every dtype."""

_REQUESTS = 1024  # the most that are made at once

Read = Callable[[Sequence[tuple[int, memoryview]]], None]
"""Fills buffers with contents, each from a byte offset on."""

Take = Callable[[int], "np.ndarray[Any, Any]"]
"""Returns a buffer of a number of bytes, which is valid until the next call."""


def _new(nbytes: int) -> np.ndarray[Any, Any]:
    import numpy as np

    return np.empty(nbytes, np.uint8)


def read_strided(read: Read, begin: int, pitch: Shape, out: np.ndarray[Any, Any], take: Take = _new) -> None:
    """Fill an array with strided elements.

    Args:
        read: fills buffers with contents.
        begin: the byte offset of the first element.
        pitch: the stride in bytes along each dimension.
        out: the array, in any memory order; not empty.
        take: returns a buffer for reads that include gaps.
    """
    import numpy as np

    pitch = tuple(step for step, count in zip(pitch, out.shape, strict=True) if count > 1)
    out = out.squeeze()
    order = _order(pitch)
    out, pitch, dims = out.transpose(order), tuple(pitch[dim] for dim in order), out.ndim
    span = [out.itemsize] * (dims + 1)  # bytes from the first element to the end of the last one
    for dim in reversed(range(dims)):
        span[dim] = (out.shape[dim] - 1) * pitch[dim] + span[dim + 1]
    dense = dims  # from this dimension on, elements are contiguous: without gaps and without repeats
    while dense and pitch[dense - 1] == span[dense]:
        dense -= 1
    depth = dims  # gaps in the dimensions before it are skipped; from it on they are read
    while depth:
        dim = depth - 1
        gap = pitch[dim] - span[depth]
        in_place = dense <= dim and out.flags.c_contiguous
        if gap > GAP or (max(pitch[dim], span[depth]) > SCRATCH and not in_place):
            break
        depth = dim
    if dense <= depth and out[(0,) * depth].flags.c_contiguous:
        parts = _contiguous(begin, pitch[:depth], out)
        while requests := list(islice(parts, _REQUESTS)):
            read(requests)
        return
    for outer in np.ndindex(out.shape[:depth]):
        first = begin + sum(map(mul, outer, pitch))
        target = out[(*outer, ...)]
        rows = 1 + (SCRATCH - span[depth + 1]) // max(pitch[depth], 1)
        for row in range(0, len(target), rows):
            part = target[row : row + rows]
            scratch = take((len(part) - 1) * pitch[depth] + span[depth + 1])
            read([(first + row * pitch[depth], scratch.data)])
            _copy(part, np.ndarray(part.shape, out.dtype, scratch, strides=tuple(pitch[depth:])))


def _contiguous(begin: int, pitch: Shape, out: np.ndarray[Any, Any]) -> Iterator[tuple[int, memoryview]]:
    """Yield the offset and the buffer of each contiguous part of an array; `pitch` has the other dimensions."""
    import numpy as np

    if not pitch:
        yield begin, out.reshape(-1).view(np.uint8).data
        return
    for outer in np.ndindex(out.shape[: len(pitch) - 1]):
        first = begin + sum(map(mul, outer, pitch))
        parts = out[(*outer, ...)]
        if parts.flags.c_contiguous:
            content, nbytes = parts.reshape(-1).view(np.uint8).data, parts.nbytes // len(parts)
            for number in range(len(parts)):
                yield first + number * pitch[-1], content[number * nbytes : (number + 1) * nbytes]
        else:
            for number in range(len(parts)):
                part = parts[number : number + 1]  # never a scalar, which would be a copy
                yield first + number * pitch[-1], part.reshape(-1).view(np.uint8).data


def _order(pitch: Shape) -> list[int]:
    """Return the dimensions, ordered from the longest stride to the shortest.

    >>> _order((8, 2, 24))
    [2, 0, 1]
    """
    return sorted(range(len(pitch)), key=lambda dim: -pitch[dim])


def _copy(target: np.ndarray[Any, Any], source: np.ndarray[Any, Any]) -> None:
    """Copy an array that is not empty, tile by tile if it is transposed and contiguous along the last dimension.

    A tile has rows along the dimensions with the shortest strides in `target`, and columns along the last dimensions.
    """
    import numpy as np

    nearest = sorted(range(target.ndim), key=lambda dim: target.strides[dim])
    nearest = nearest[: nearest.index(target.ndim - 1)] if nearest else []
    between = prod(target.shape[dim] for dim in nearest)  # the distance in `target` of neighbours in `source`
    if between < _NEAR or source.strides[-1] != target.itemsize:
        target[...] = source
        return
    most_rows = min(_TILE, TILE_BYTES // (_TILE * target.itemsize + _PADDING))
    row_dims, rows, row_step = _fitting(nearest, target.shape, most_rows)
    others = [dim for dim in reversed(range(target.ndim)) if dim not in row_dims]
    column_dims, columns, column_step = _fitting(others, target.shape, _TILE)
    outer_dims = [dim for dim in range(target.ndim) if dim not in {*row_dims, *column_dims}]
    order = (*outer_dims, *row_dims[::-1], *column_dims[::-1])
    target, source = target.transpose(order), source.transpose(order)
    row_dim, column_dim = len(outer_dims), len(outer_dims) + len(row_dims)  # the first ones
    inner_rows, inner_columns = target.shape[row_dim + 1 : column_dim], target.shape[column_dim + 1 :]
    padded = np.empty((rows, columns + _PADDING // target.itemsize), target.dtype)[:, :columns]
    tile = padded.reshape(row_step, *inner_rows, column_step, *inner_columns)
    every = (slice(None),) * len(inner_rows)
    for outer in np.ndindex(target.shape[:row_dim]):
        for row in range(0, target.shape[row_dim], row_step):
            for column in range(0, target.shape[column_dim], column_step):
                index = (*outer, slice(row, row + row_step), *every, slice(column, column + column_step))
                piece = source[index]
                buffer = tile[tuple(map(slice, piece.shape))]
                buffer[...] = piece
                target[index] = buffer


def _fitting(dims: Sequence[int], shape: Shape, most: int) -> tuple[list[int], int, int]:
    """Return the dimensions of a tile, how many of `most` elements it has, and its extent along the last of them.

    These are the first of `dims` that have so many elements together, or all.

    >>> _fitting([2, 0, 1], (3, 5, 4), 20), _fitting([2, 0], (9, 5, 4), 20)
    (([2, 0, 1], 12, 1), ([2, 0], 20, 5))
    """
    chosen: list[int] = []
    before = count = 1
    for dim in dims:
        chosen.append(dim)
        before, count = count, count * shape[dim]
        if count >= most:
            break
    step = min(max(1, most // before), shape[chosen[-1]])
    return chosen, before * step, step


class Ahead:
    """Reads consecutive boxes of blocks with read-ahead, along the first dimensions.

    Data for later boxes is kept in file order, in memory that is reused from block to block.

    Args:
        allocate: returns memory of a number of bytes.
    """

    def __init__(self, allocate: Callable[[int], memoryview]) -> None:
        self._allocate = allocate
        self._memory = self._scratch = memoryview(b"")
        self._key: object = None
        self._block_bytes = 0
        self._windows: dict[int, tuple[Block, np.ndarray[Any, Any]]] = {}

    def share(self, key: object, blocks: int, nbytes: int) -> None:
        """Divide memory among blocks that are read concurrently.

        Args:
            key: identifies the blocks across calls.
            blocks: the number of blocks.
            nbytes: the memory of all blocks together.
        """
        if key != self._key:
            self._key, self._block_bytes = key, nbytes // blocks // _ALIGNED * _ALIGNED
            self._windows.clear()
            if len(self._memory) < nbytes:
                self._memory = self._allocate(nbytes)

    def take(self, nbytes: int) -> np.ndarray[Any, Any]:
        """Return a buffer for reads that include gaps."""
        import numpy as np

        if len(self._scratch) < nbytes:
            self._scratch = self._allocate(nbytes)
        return np.frombuffer(self._scratch[:nbytes], np.uint8)

    def read(
        self,
        number: int,
        read: Read,
        shape: Shape,
        strides: Shape,
        first: int,
        out: np.ndarray[Any, Any],
    ) -> None:
        """Fill a flat array with elements of a block in row-major order.

        Args:
            number: the index of the block among the blocks that share the memory.
            read: fills buffers with the contents that hold the block.
            shape: the shape of the block.
            strides: the strides of the block in these contents, in elements.
            first: the row-major index of the first element to read.
            out: the array.
        """
        done = 0
        pitch = tuple(step * out.itemsize for step in strides)
        for box in flat_boxes(shape, first, first + len(out)):
            part = out[done : done + box.size].reshape(box.shape)
            done += box.size
            if not is_permuted(shape, pitch) or part.nbytes > self._block_bytes:
                read_strided(read, sum(map(mul, box.start, pitch)), pitch, part, self.take)
                continue
            window = self._windows.get(number)
            if window is None or window[0] & box != box:
                self._windows.pop(number, None)  # its memory is overwritten, even if reading fails
                extended = _longer(box, shape, self._block_bytes // out.itemsize)
                window = self._windows[number] = extended, self._read(number, read, extended, pitch, out.dtype)
            target, source = part.squeeze(), window[1][box.within(window[0])].squeeze()
            order = _order(source.strides)
            _copy(target.transpose(order), source.transpose(order))

    def _read(self, number: int, read: Read, box: Block, pitch: Shape, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """Return the elements of a box, in the memory order of the file."""
        import numpy as np

        order = _order(pitch)
        flat = np.frombuffer(self._memory, dtype, box.size, number * self._block_bytes)
        window = flat.reshape([box.shape[dim] for dim in order]).transpose(
            [order.index(dim) for dim in range(len(order))]
        )
        read_strided(read, sum(map(mul, box.start, pitch)), pitch, window, self.take)
        return window


def is_permuted(shape: Shape, pitch: Shape) -> bool:
    """Return whether elements are in another order than row-major.

    >>> is_permuted((2, 1, 3), (3, 9, 1)), is_permuted((2, 3), (1, 2))
    (False, True)
    """
    steps = [step for step, count in zip(pitch, shape, strict=True) if count > 1]
    return any(a < b for a, b in pairwise(steps))


def _longer(box: Block, shape: Shape, most: int) -> Block:
    """Extend a box with the elements that follow it in a block, up to `most`.

    It grows to whole rows first, then to more rows. Along the last dimension that is extended, the rest of the block
    is divided into equal parts, and the box gets one.

    >>> str(_longer(Block((0, 0), (10, 4)), (100, 4), 150)), str(_longer(Block((1, 7), (2, 9)), (3, 10), 9))
    ('[0:34, 0:4]', '[1:2, 7:10]')
    >>> str(_longer(Block((1, 7), (2, 9)), (9, 10), 40))
    '[1:5, 0:10]'
    """
    start, stop = list(box.start), list(box.stop)
    row = 1
    for axis in reversed(range(len(shape))):
        extent, count = shape[axis], stop[axis] - start[axis]
        has_more = any(end < whole for end, whole in zip(stop[:axis], shape, strict=False))
        if count < extent and not (has_more and 2 * row * extent <= most):
            remaining = extent - start[axis]
            parts = -(-remaining // max(count, most // row))
            stop[axis] = start[axis] + max(count, -(-remaining // parts))
            break
        start[axis], stop[axis] = 0, extent
        row *= extent
    return Block(tuple(start), tuple(stop))
