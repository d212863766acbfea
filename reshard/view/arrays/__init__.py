"""Lazy dask arrays of a checkpoint's tensors; `view.ranks` has those of one rank.

1. A tensor becomes one plain dask array. A chunk is a source shard, or some rows of a large one.
2. Each chunk is one task, which carries its own pieces of files (`StoredTensor`). dask pushes a slice that one task
   uses down to it, so that only the bytes of the slice are read.
3. Chunks of low-precision floats are `LowPrecisionArray`s, whose sums and means are computed in float32.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from math import prod
from typing import TYPE_CHECKING, Any

import dask
import dask.array as da
import numpy as np
from dask._task_spec import DataNode, Task
from dask.array.core import getter
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph
from dask.utils import parse_bytes

from reshard.core.layout.block import Block
from reshard.core.model.stored import StoredBlock, StoredTensor
from reshard.errors import SourceError, UsageError, names
from reshard.expressions.assigned import assigned
from reshard.view.arrays.low import low_precision, teach_distributed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from reshard.core.layout.block import Shape
    from reshard.core.model.checkpoint import Checkpoint, TensorSpec
    from reshard.core.model.entries import Extent

    Chunks = tuple[tuple[int, ...], ...]

CHUNK_BYTES = 8 << 20
"""The most bytes of a chunk by default: each thread holds one, and a sum in float32 takes twice as much beside it."""


def tensor_array(checkpoint: Checkpoint, name: str, *, chunks: Any = None) -> da.Array:
    """Return a tensor of a checkpoint as a lazy dask array.

    A `str` entry is a 0-d array of its text, and an assigned array is itself. The name of the array in dask is a token
    of its files and byte ranges, so that equal arrays are read once. Computing it raises `SourceError` if a file is
    missing, truncated, or shorter than its header says.

    Args:
        checkpoint: the checkpoint.
        name: the name of the tensor.
        chunks: as in `Checkpoint.array`; None for those of `reshard.open`.

    Raises:
        SourceError: blocks are in no file.
        UsageError: dask does not understand the chunks.
    """
    tensor = checkpoint.tensors[name]
    if tensor.text is not None:
        return text_array(name, tensor.text)
    chunks = checkpoint.opening.chunks if chunks is None else chunks
    if (array := assigned(checkpoint, tensor)) is not None:
        if _are_default(chunks):
            return array
        return array.rechunk(_sizes(chunks, array.chunks, array.shape, array.dtype, name))
    return _tensor_box(checkpoint, name, Block.whole(tensor.spec.shape), None, chunks)


def sub_array(checkpoint: Checkpoint, name: str, block: Block, *, replica: int | None = None) -> da.Array:
    """Return a block of a tensor as a lazy dask array; a `str` entry is never split.

    `replica` is the number of the file to read, for a tensor whose copies differ.
    """
    tensor = checkpoint.tensors[name]
    if tensor.text is not None:
        return text_array(name, tensor.text)
    if (array := assigned(checkpoint, tensor)) is not None:
        return array[block.within(Block.whole(tensor.spec.shape))]
    return _tensor_box(checkpoint, name, block, replica, checkpoint.opening.chunks)


def _tensor_box(checkpoint: Checkpoint, name: str, box: Block, replica: int | None, chunks: Any) -> da.Array:
    tensor = checkpoint.tensors[name]
    absent = [str(shard.block) for shard in tensor.shards if not shard.replicas]
    if absent:
        raise SourceError(
            f"no file of {checkpoint.root} has block {names(absent)} of tensor {name!r}", code="missing-blocks"
        )
    read = [(shard.block, next(e for e in shard.replicas if replica in {None, e.file})) for shard in tensor.shards]
    return _lazy(*_stored(checkpoint, tensor.spec, read, tensor.axes), box, chunks)


def stored_array(checkpoint: Checkpoint, spec: TensorSpec, located: Sequence[tuple[Block, Extent]]) -> da.Array:
    """Return blocks in files, each with its location, as one lazy dask array."""
    return _lazy(*_stored(checkpoint, spec, located, ()), Block.whole(spec.shape), checkpoint.opening.chunks)


def flat_array(arrays: Sequence[da.Array]) -> da.Array:
    """Return the elements of arrays, in order, as one flat array."""
    return da.concatenate([array.reshape(-1) for array in arrays])


def cast_array(array: da.Array, dtype: np.dtype[Any]) -> da.Array:
    """Return an array in another dtype, which accumulates in float32 if it is of low precision."""
    meta = low_precision(array._meta.astype(dtype))  # noqa: SLF001 -- dask's own word for it
    return array.map_blocks(_cast, dtype, dtype=dtype, meta=meta)


def _cast(chunk: Any, dtype: np.dtype[Any]) -> Any:
    return low_precision(chunk.astype(dtype))


def text_array(name: str, text: str) -> da.Array:
    """Return the value of a `str` entry as a 0-d array."""
    return da.from_array(np.array(text), name=f"{name}-{tokenize('reshard', name, text)}")


def _stored(
    checkpoint: Checkpoint, spec: TensorSpec, located: Sequence[tuple[Block, Extent]], axes: tuple[Shape, ...]
) -> tuple[_Stored, str]:
    """Return blocks in files as a tensor, and a token of what is read."""
    files = [checkpoint.files[extent.file] for _, extent in located]
    pieces = tuple(
        StoredBlock(block, file.path, extent.runs, checkpoint.coding, extent.strides)
        for (block, extent), file in zip(located, files, strict=True)
    )
    read = [
        (file.path, *file.status, piece.block.start, piece.block.stop, piece.runs, piece.strides)
        for piece, file in zip(pieces, files, strict=True)
    ]
    # As one text: dask is slow at lists.
    token = tokenize("reshard", spec.name, spec.dtype.name, spec.shape, repr(read))
    return _Stored(spec.name, spec.dtype, spec.shape, pieces, axes), token


@dataclass(frozen=True, slots=True)
class _Stored(StoredTensor):
    """A tensor in files, or the pieces of one chunk, whose items are of the type that dask gets."""

    def __getitem__(self, index: object) -> Any:
        return low_precision(StoredTensor.__getitem__(self, index))


def _lazy(stored: _Stored, token: str, box: Block, chunks: Any) -> da.Array:
    """Return a box of a stored tensor, which has a token, as a dask array, with chunks as in `Checkpoint.array`."""
    teach_distributed()  # it may have been imported since
    hulls = [list(_spans(stored, piece.block)) for piece in stored.pieces]
    sizes = _shards(hulls, box)
    if _are_default(chunks):
        sizes = _cut(sizes, stored.dtype.itemsize)
    else:
        sizes = _sizes(chunks, sizes, box.shape, stored.dtype, stored.name)
    name = f"{stored.name}-{tokenize(token, box.start, box.stop, sizes)}"
    edges = [[*accumulate(of_dim, initial=start)] for of_dim, start in zip(sizes, box.start, strict=True)]
    pieces: dict[Shape, list[StoredBlock]] = {}
    for piece, hull in zip(stored.pieces, hulls, strict=True):
        for place in product(*(_overlapped(of_dim, *span) for of_dim, span in zip(edges, hull, strict=True))):
            pieces.setdefault(place, []).append(piece)
    tasks = {}
    for place in product(*(range(len(of_dim)) for of_dim in sizes)):
        own = DataNode(None, replace(stored, pieces=tuple(pieces.get(place, ()))))
        index = tuple(slice(of_dim[number], of_dim[number + 1]) for of_dim, number in zip(edges, place, strict=True))
        tasks[name, *place] = Task((name, *place), getter, own, index)
    meta = low_precision(np.empty((0,) * stored.ndim, stored.dtype))
    if hasattr(da.Array, "expr"):  # dask plans expressions, and names what is made of tasks itself
        from dask.array._array_expr._collection import from_graph  # there is no public way

        return from_graph(tasks, meta, sizes, [*tasks], stored.name)
    return da.Array(HighLevelGraph.from_collections(name, tasks), name, sizes, meta=meta)


def _overlapped(edges: list[int], start: int, stop: int) -> range:
    """Return the numbers of the chunks along a dimension that a span overlaps.

    >>> _overlapped([0, 4, 8, 10], 3, 8), _overlapped([2, 4], 0, 2)
    (range(0, 2), range(0, 0))
    """
    if len(edges) == 2 and edges[0] == edges[1]:
        return range(1)
    return range(max(bisect_right(edges, start) - 1, 0), min(bisect_left(edges, stop), len(edges) - 1))


def _spans(stored: StoredTensor, block: Block) -> Iterator[tuple[int, int]]:
    """Yield the span of a block along each dimension.

    If a dimension consists of several axes, it is the span along the first of these.
    """
    axis = 0
    for dim, extent in enumerate(stored.shape):
        sizes = stored.axes[dim] if stored.axes else (extent,)
        inner = prod(sizes[1:])
        yield (block.start[axis] * inner, block.stop[axis] * inner) if sizes else (0, extent)
        axis += len(sizes)


def _shards(hulls: Sequence[Sequence[tuple[int, int]]], box: Block) -> Chunks:
    """Return the chunk sizes along each dimension of a box, cut at every edge of a block."""
    chunks = []
    for dim, (start, stop) in enumerate(zip(box.start, box.stop, strict=True)):
        edges = {start, stop, *(min(max(edge, start), stop) for hull in hulls for edge in hull[dim])}
        chunks.append(tuple(b - a for a, b in pairwise(sorted(edges))) or (0,))
    return tuple(chunks)


def _cut(sizes: Chunks, itemsize: int) -> Chunks:
    """Return chunk sizes with large chunks cut along their rows, or inside of these if one row is too large.

    >>> _cut(((75_000, 8), (64,)), 4)
    ((25000, 25000, 25000, 8), (64,))
    """
    limit = min(CHUNK_BYTES, parse_bytes(dask.config.get("array.chunk-size")))
    cut: list[tuple[int, ...]] = []
    for dim, of_dim in enumerate(sizes):
        row = itemsize * prod(max(each) for each in sizes[dim + 1 :])
        cut.append(tuple(part for size in of_dim for part in _parts(size, max(limit // max(row, 1), 1))))
    return tuple(cut)


def _parts(size: int, most: int) -> Iterable[int]:
    """Return the sizes of the fewest about equal parts that have at most `most` elements.

    >>> _parts(10, 4), _parts(0, 4)
    ([4, 3, 3], [0])
    """
    count = -(-size // most) or 1
    return [size // count + (number < size % count) for number in range(count)]


def _are_default(chunks: Any) -> bool:
    """Return whether the chunks are those of the source, for which xarray's word is {}."""
    return chunks is None or (isinstance(chunks, dict) and not chunks)


def _sizes(chunks: Any, shards: Chunks, shape: Shape, dtype: np.dtype[Any], name: str) -> Chunks:
    """Return the chunk sizes that dask makes of its words, such as `"auto"`.

    Raises:
        UsageError: dask does not understand them.
    """
    if not shape:
        return ()
    try:
        if isinstance(chunks, dict):  # dask ignores keys that are no dimension, also -1
            chunks = {dim + len(shape) if dim < 0 else dim: size for dim, size in chunks.items()}
        sizes: Chunks = da.core.normalize_chunks(chunks, shape, dtype=dtype, previous_chunks=shards)
    except (ValueError, TypeError, NotImplementedError, ZeroDivisionError) as error:
        raise UsageError(
            f"chunks of tensor {name!r} is {chunks!r:.80}: {error}", code="bad-chunks",
            hint='give "auto", a size such as "16MB", -1, or rows and columns as dask.array takes them',
        ) from None  # fmt: skip
    return sizes
