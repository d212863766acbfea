"""Reading elements that lie apart from each other: what is between them is jumped over, or read and left.

Gaps of up to 64 KiB are read through, because one longer read costs less than two; at most 2 MiB are read at once
besides the result, and a tile of that is held. Where elements lie in another order than they are wanted in, neighbours
in the file are far apart in the result, and any few rows of this would take all of the file; so `Ahead` reads for the
rows that come next, too, as far as it has memory.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from operator import mul
from typing import TYPE_CHECKING, Any

from reshard.layout.block import Block, flat_boxes

if TYPE_CHECKING:
    import numpy as np

    from reshard.layout.block import Shape

GAP = 64 << 10
"""Bytes between two wanted ranges that are read rather than jumped over: they take about the time of a call."""

SCRATCH = 2 << 20
"""The most bytes read at once where not all of them are wanted."""

_TILE = 512
"""The most rows and columns that are transposed at once, between buffers that caches hold."""

TILE_BYTES = 1 << 20
"""The most bytes of these."""

_PADDING = 64
"""Bytes between the rows of a tile: those at steps of 4 KiB would fall on the same lines of a cache."""

_ALIGNED = 16
"""Bytes that elements of every dtype may begin at a multiple of."""

Take = Callable[[int], "np.ndarray[Any, Any]"]
"""Returns memory of so many bytes, which is free again when it is asked for the next time."""


def _new(nbytes: int) -> np.ndarray[Any, Any]:
    import numpy as np

    return np.empty(nbytes, np.uint8)


def read_strided(
    read: Callable[[int, memoryview], None],
    begin: int,
    pitch: Shape,
    out: np.ndarray[Any, Any],
    take: Take = _new,
) -> None:
    """Fill an array with elements that lie in steps.

    Args:
        read: fills a buffer with contents from a byte on.
        begin: where the first element is.
        pitch: how many bytes it is from one element to the next along each dimension.
        out: the array, in any order of memory; not empty.
        take: gives memory for what is read where not all of it is wanted.
    """
    import numpy as np

    pitch = tuple(step for step, count in zip(pitch, out.shape, strict=True) if count > 1)
    out = out.squeeze()
    order = _order(pitch)
    out, pitch, dims = out.transpose(order), tuple(pitch[dim] for dim in order), out.ndim
    span = [out.itemsize] * (dims + 1)  # from the first to the end of the last
    for dim in reversed(range(dims)):
        span[dim] = (out.shape[dim] - 1) * pitch[dim] + span[dim + 1]
    dense = dims  # from it on, elements follow each other: neither apart, nor one of them several times
    while dense and pitch[dense - 1] == span[dense]:
        dense -= 1
    depth = dims  # the dimensions before it are jumped through, those from it on read through
    while depth:
        dim = depth - 1
        gap = pitch[dim] - span[depth]
        in_place = dense <= dim and out.flags.c_contiguous
        if gap > GAP or (max(pitch[dim], span[depth]) > SCRATCH and not in_place):
            break
        depth = dim
    for outer in np.ndindex(out.shape[:depth]):
        first = begin + sum(index * pitch[dim] for dim, index in enumerate(outer))
        target = out[(*outer, ...)]
        if dense <= depth and target.flags.c_contiguous:
            read(first, target.reshape(-1).view(np.uint8).data)
            continue
        rows = 1 + (SCRATCH - span[depth + 1]) // max(pitch[depth], 1)
        for row in range(0, len(target), rows):
            put = target[row : row + rows]
            scratch = take((len(put) - 1) * pitch[depth] + span[depth + 1])
            read(first + row * pitch[depth], scratch.data)
            _copy(put, np.ndarray(put.shape, out.dtype, scratch, strides=tuple(pitch[depth:])))


def _order(pitch: Shape) -> list[int]:
    """Return the dimensions from the longest steps to the shortest.

    >>> _order((8, 2, 24))
    [2, 0, 1]
    """
    return sorted(range(len(pitch)), key=lambda dim: -pitch[dim])


def _copy(put: np.ndarray[Any, Any], taken: np.ndarray[Any, Any]) -> None:
    """Copy an array; one that is transposed, tile by tile."""
    import numpy as np

    if put.ndim < 2 or taken.strides[-1] != put.itemsize or put.strides[-1] <= put.strides[-2]:
        put[...] = taken
        return
    columns = min(_TILE, put.shape[-1])
    padded = columns + _PADDING // put.itemsize
    rows = min(_TILE, put.shape[-2], TILE_BYTES // (padded * put.itemsize))
    tile = np.empty((rows, padded), put.dtype)
    for outer in np.ndindex(put.shape[:-2]):
        for row in range(0, put.shape[-2], rows):
            for column in range(0, put.shape[-1], columns):
                part = (*outer, slice(row, row + rows), slice(column, column + columns))
                found = taken[part]
                held = tile[: found.shape[0], : found.shape[1]]
                held[...] = found
                put[part] = held


class Ahead:
    """Reads boxes of blocks, of which one after the other is wanted along the block's first dimensions.

    What is read for boxes to come is held as it lies in the file, in memory that stays from block to block.

    Args:
        allocate: returns memory of so many bytes.
    """

    def __init__(self, allocate: Callable[[int], memoryview]) -> None:
        self._allocate = allocate
        self._memory = self._scratch = memoryview(b"")
        self._of: object = None
        self._room = 0
        self._held: dict[int, tuple[Block, np.ndarray[Any, Any]]] = {}

    def share(self, of: object, blocks: int, nbytes: int) -> None:
        """Share memory out to blocks that are read side by side.

        Args:
            of: what tells them from all others, of other runs too.
            blocks: how many they are.
            nbytes: how much they have together.
        """
        if of != self._of:
            self._of, self._room = of, nbytes // blocks // _ALIGNED * _ALIGNED
            self._held.clear()
            if len(self._memory) < nbytes:
                self._memory = self._allocate(nbytes)

    def take(self, nbytes: int) -> np.ndarray[Any, Any]:
        """Return memory for what is read where not all of it is wanted."""
        import numpy as np

        if len(self._scratch) < nbytes:
            self._scratch = self._allocate(nbytes)
        return np.frombuffer(self._scratch[:nbytes], np.uint8)

    def read(
        self,
        number: int,
        read: Callable[[int, memoryview], None],
        shape: Shape,
        strides: Shape,
        first: int,
        out: np.ndarray[Any, Any],
    ) -> None:
        """Fill a flat array with elements of a block in row-major order, from one of them on.

        Args:
            number: which it is of the blocks that share the memory.
            read: fills a buffer with what holds the block, from a byte on.
            shape: of the block.
            strides: how many elements of what holds it is from one of its elements to the next, along each dimension.
            first: the element of the block that the array begins with.
            out: the array.
        """
        done = 0
        pitch = tuple(step * out.itemsize for step in strides)
        for box in flat_boxes(shape, first, first + len(out)):
            part = out[done : done + box.size].reshape(box.shape)
            done += box.size
            if not _is_turned(shape, pitch) or part.nbytes > self._room:
                read_strided(read, sum(map(mul, box.start, pitch)), pitch, part, self.take)
                continue
            held = self._held.get(number)
            if held is None or held[0] & box != box:
                self._held.pop(number, None)  # its memory is overwritten, even if reading fails
                longer = _longer(box, shape, self._room // out.itemsize)
                held = self._held[number] = longer, self._read(number, read, longer, pitch, out.dtype)
            put, taken = part.squeeze(), held[1][box.within(held[0])].squeeze()
            order = _order(taken.strides)
            _copy(put.transpose(order), taken.transpose(order))

    def _read(
        self, number: int, read: Callable[[int, memoryview], None], box: Block, pitch: Shape, dtype: np.dtype[Any]
    ) -> np.ndarray[Any, Any]:
        """Return the elements of a box, which lie in the order of the file."""
        import numpy as np

        order = _order(pitch)
        flat = np.frombuffer(self._memory, dtype, box.size, number * self._room)
        held = flat.reshape([box.shape[dim] for dim in order]).transpose(
            [order.index(dim) for dim in range(len(order))]
        )
        read_strided(read, sum(map(mul, box.start, pitch)), pitch, held, self.take)
        return held


def _is_turned(shape: Shape, pitch: Shape) -> bool:
    """Return whether elements lie in another order than row-major.

    >>> _is_turned((2, 1, 3), (3, 9, 1)), _is_turned((2, 3), (1, 2))
    (False, True)
    """
    steps = [step for step, count in zip(pitch, shape, strict=True) if count > 1]
    return any(a < b for a, b in pairwise(steps))


def _longer(box: Block, shape: Shape, most: int) -> Block:
    """Return a box with what follows it in a block, as far as there is room: whole rows, and then more of these.

    Of what is left along the dimension that cuts it, it has one of several equal parts.

    >>> str(_longer(Block((0, 0), (10, 4)), (100, 4), 150)), str(_longer(Block((1, 7), (2, 9)), (3, 10), 9))
    ('[0:34, 0:4]', '[1:2, 7:10]')
    >>> str(_longer(Block((1, 7), (2, 9)), (9, 10), 40))
    '[1:5, 0:10]'
    """
    start, stop = list(box.start), list(box.stop)
    row = 1
    for axis in reversed(range(len(shape))):
        extent, count = shape[axis], stop[axis] - start[axis]
        more = any(end < whole for end, whole in zip(stop[:axis], shape, strict=False))
        if count < extent and not (more and 2 * row * extent <= most):
            left = extent - start[axis]
            parts = -(-left // max(count, most // row))
            stop[axis] = start[axis] + max(count, -(-left // parts))
            break
        start[axis], stop[axis] = 0, extent
        row *= extent
    return Block(tuple(start), tuple(stop))
