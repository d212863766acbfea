"""Read tensors from files: any box, or any items as of a numpy array; only their bytes are read.

Lazy arrays, computed tensors, comparisons as numbers and what rules look at read tensors by `StoredTensor`. The blocks
near a box are found along the axis that is cut most often, so that a tensor of many blocks takes no longer.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard.core.layout.axes import refined, row_major
from reshard.core.layout.block import Block
from reshard.core.layout.strided import read_strided
from reshard.core.model.entries import wants_of
from reshard.core.storage.cipher import store_of
from reshard.dtypes import BY_NAME, DType
from reshard.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.core.layout.block import Shape
    from reshard.core.model.checkpoint import Tensor
    from reshard.core.model.entries import Runs
    from reshard.core.storage.base import Coding


_FEW = 4
"""The fewest blocks of a tensor that are worth a search."""


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block of a tensor and the location of its bytes, in row-major order or strided."""

    block: Block
    path: str
    runs: Runs
    coding: Coding | None = None
    strides: Shape = ()

    def read(self, requests: Sequence[tuple[int, memoryview]]) -> None:
        """Fill buffers with the bytes of the runs, each from an offset on, or with zeros if there are no runs."""
        if not self.runs:
            for _, buffer in requests:
                buffer[:] = bytes(len(buffer))
            return
        missing = max(begin + len(buffer) for begin, buffer in requests) - sum(nbytes for _, nbytes in self.runs)
        if missing > 0:
            raise SourceError(f"{self.path} lacks {missing} bytes of block {self.block}", code="truncated")
        store_of(self.coding).read(wants_of(self.path, self.runs, requests))

    def read_items(self, items: Sequence[range], out: np.ndarray[Any, Any]) -> None:
        """Fill `out` with the block's items at these indices along each dimension; none may be empty."""
        strides = self.strides or row_major(self.block.shape)
        first = sum(each.start * step for each, step in zip(items, strides, strict=True))
        pitch = tuple(out.itemsize * step * each.step for each, step in zip(items, strides, strict=True))
        read_strided(self.read, out.itemsize * first, pitch, out)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in files, indexed like a numpy array, but without new axes; dask slices it.

    `axes` has the axes of the pieces for each dimension, if they differ from the dimensions (`Tensor.space`).
    """

    name: str
    kind: DType
    shape: Shape
    pieces: tuple[StoredBlock, ...]
    axes: tuple[Shape, ...] = ()
    _finder: _Finder | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return numpy's dtype."""
        return BY_NAME[self.kind.name].numpy()  # `DType.numpy` compares identities, which pickling loses

    @property
    def ndim(self) -> int:
        """Return the number of dimensions."""
        return len(self.shape)

    def __getitem__(self, index: object) -> np.ndarray[Any, Any]:
        items = full_index(index, self.ndim)
        if not all(isinstance(item, slice | Integral) for item in items):
            # dask pushes lists down, too: read the slices, then take items of the result. `fancy=False` would prevent
            # that, but then dask (2026.8) does not push down slices either.
            slices = tuple(item if isinstance(item, slice) else slice(None) for item in items)
            lists = tuple(slice(None) if isinstance(item, slice) else item for item in items)
            return np.asarray(self[slices][lists])
        picked = [_picked(extent, item) for extent, item in zip(self.shape, items, strict=True)]
        array = self.read([each if each.step > 0 else each[::-1] for each in picked])
        flips = tuple(slice(None, None, 1 if each.step > 0 else -1) for each in picked)
        scalars: tuple[Any, ...] = tuple(slice(None) if isinstance(item, slice) else 0 for item in items)
        return array[flips][(*scalars, ...)]

    def read(self, items: Sequence[range]) -> np.ndarray[Any, Any]:
        """Read the items at ascending indices along each dimension."""
        out = np.empty([len(each) for each in items], self.kind.carrier())
        self.read_into(items, out)
        return out.view(self.dtype)

    def read_into(self, items: Sequence[range], out: np.ndarray[Any, Any]) -> None:
        """Fill an array of the carrier with the items at ascending indices along each dimension.

        Raises:
            SourceError: an item is in no file; a file cannot be read, or is shorter than its header says.
        """
        filled = self.fill(items, out)
        if filled < out.size:
            raise SourceError(
                f"no shard has {out.size - filled} of the {out.size} items asked for of tensor {self.name!r}",
                code="missing-blocks",
            )

    def read_box(self, box: Block) -> np.ndarray[Any, Any]:
        """Read a box, in the dtype of the tensor; errors as for `read_into`."""
        return self.read(box.ranges)

    def fill(self, items: Sequence[range], out: np.ndarray[Any, Any]) -> int:
        """Fill an array like `read_into` with the items that are in files; return their number."""
        return self._fill_of_axes(items, out) if self.axes else self._fill(items, out)

    def _fill_of_axes(self, items: Sequence[range], out: np.ndarray[Any, Any]) -> int:
        """Fill an array like `_fill`, if dimensions consist of several axes."""
        region = Block(
            tuple(each.start for each in items), tuple(each[-1] + 1 if each else each.start for each in items)
        )
        if region.shape != out.shape:  # steps: read the items between them, too
            whole = np.empty(region.shape, out.dtype)
            filled = self._fill_of_axes(region.ranges, whole)
            out[...] = whole[tuple(slice(None, None, each.step) for each in items)]
            return filled - whole.size + out.size
        return sum(
            self._fill(box.ranges, out[part.within(region)].reshape(box.shape))
            for box, part in refined(region, self.axes)
        )

    def _near(self, items: Sequence[range]) -> Sequence[StoredBlock]:
        """Return the blocks that may have some of the items."""
        if len(self.pieces) < _FEW or not all(items):
            return self.pieces
        if self._finder is None:
            object.__setattr__(self, "_finder", _Finder.of(self.pieces))
        assert self._finder  # noqa: S101 -- for mypy
        return self._finder.near(items)

    def _fill(self, items: Sequence[range], out: np.ndarray[Any, Any]) -> int:
        """Fill an array with the items that are in files; return their number."""
        filled = 0
        for piece in self._near(items):
            starts = piece.block.start
            inside = tuple(
                slice(_position(each, a), _position(each, b))
                for each, a, b in zip(items, starts, piece.block.stop, strict=True)
            )
            part = out[inside] if inside else out  # `out[()]` would be a copy
            if part.size:
                of_piece = [each[span] for each, span in zip(items, inside, strict=True)]
                piece.read_items(
                    [range(e[0] - a, e[-1] - a + 1, e.step) for e, a in zip(of_piece, starts, strict=True)], part
                )
                filled += part.size
        return filled


@dataclass(frozen=True, slots=True)
class _Finder:
    """Finds blocks along the axis with the most edges.

    Attributes:
        axis: the axis.
        pieces: the blocks, by their start along it.
        starts: these starts.
        longest: the longest extent of a block along it.
    """

    axis: int
    pieces: Sequence[StoredBlock]
    starts: Sequence[int]
    longest: int

    @classmethod
    def of(cls, pieces: Sequence[StoredBlock]) -> _Finder:
        """Sort blocks."""
        edges = [len(set(starts)) for starts in zip(*(piece.block.start for piece in pieces), strict=True)]
        axis = edges.index(max(edges))
        ordered = sorted(pieces, key=lambda piece: piece.block.start[axis])
        longest = max(piece.block.stop[axis] - piece.block.start[axis] for piece in pieces)
        return cls(axis, ordered, [piece.block.start[axis] for piece in ordered], longest)

    def near(self, items: Sequence[range]) -> Sequence[StoredBlock]:
        """Return the blocks that overlap the span of the items along the axis, and a few more."""
        span = items[self.axis]
        first = bisect_left(self.starts, span[0] - self.longest + 1)
        return self.pieces[first : bisect_left(self.starts, span[-1] + 1)]


def stored_tensor(tensor: Tensor, paths: Sequence[str], coding: Coding | None) -> StoredTensor:
    """Return a tensor that can be read; the first replica of each block is read.

    Args:
        tensor: the tensor.
        paths: the paths of all files of its checkpoint.
        coding: decodes or decrypts them.
    """
    pieces = tuple(
        StoredBlock(block, paths[extent.file], extent.runs, coding, extent.strides)
        for block, (extent, *_) in (shard for shard in tensor.shards if shard.replicas)
    )
    return StoredTensor(tensor.spec.name, tensor.spec.dtype, tensor.spec.shape, pieces, tensor.axes)


def _picked(extent: int, item: Any) -> range:
    """Return the indices that an integer or a slice selects from a dimension."""
    indices = range(extent)[item]
    return indices if isinstance(indices, range) else range(indices, indices + 1)


def full_index(index: object, ndim: int) -> list[Any]:
    """Return an index as one item per dimension, without an ellipsis; too many items are kept.

    >>> full_index((..., 3), 3), full_index(2, 2)
    ([slice(None, None, None), slice(None, None, None), 3], [2, slice(None, None, None)])
    """
    items = list(index) if isinstance(index, tuple) else [index]
    place = next((n for n, item in enumerate(items) if item is ...), len(items))
    items[place : place + 1] = [slice(None)] * (ndim - len(items) + (place < len(items)))
    return items


def _position(items: range, edge: int) -> int:
    """Count the ascending indices before an edge.

    >>> [_position(range(1, 9, 3), edge) for edge in (0, 1, 2, 4, 5, 8, 20)]
    [0, 0, 1, 1, 2, 3, 3]
    """
    return min(max(-((items.start - edge) // items.step), 0), len(items))
