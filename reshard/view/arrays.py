"""Lazy dask arrays of a checkpoint's tensors; `view.ranks` has those of one rank.

1. A tensor becomes one dask array; its chunks are its source shards.
2. A slice reads only its own bytes; dask pushes steps and other indices down to `StoredTensor`, which converts them to
   byte ranges of each shard (`layout.strided`).
3. Arrays of low-precision floats are `TensorArray`s, whose sums and means are computed in float32.
"""

from __future__ import annotations

from functools import wraps
from inspect import signature
from itertools import pairwise
from math import prod
from numbers import Integral
from types import FunctionType
from typing import TYPE_CHECKING, Any

import dask.array as da
import ml_dtypes
import numpy as np
from dask.array.core import BlockView
from dask.base import normalize_token, tokenize

from reshard.errors import SourceError, names
from reshard.expressions.assigned import assigned
from reshard.layout.block import Block
from reshard.source.stored import StoredBlock, StoredTensor, full_index

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reshard.formats.entries import Extent
    from reshard.layout.block import Shape
    from reshard.source.checkpoint import Checkpoint, TensorSpec

_KINDS = [kind for kind in vars(ml_dtypes).values() if isinstance(kind, type) and issubclass(kind, np.generic)]
_EXTENSION_DTYPES = [np.dtype(kind) for kind in _KINDS]

for _dtype in _EXTENSION_DTYPES:
    # dask identifies dtypes by `dtype.str`, which is '<V1' for nearly all of these: casts to two of them
    # would get the same name, and thus the same result.
    normalize_token.register(type(_dtype), lambda dtype: ("ml_dtypes", dtype.name))

LOW_PRECISION = {np.dtype(np.float16), *(dtype for dtype in _EXTENSION_DTYPES if "float" in dtype.name)}
"""The float dtypes too narrow to be summed in: each is a subset of float32."""


def tensor_array(checkpoint: Checkpoint, name: str, *, replica: int | None = None) -> da.Array:
    """Return a tensor of a checkpoint as a lazy dask array, one chunk per source shard.

    If the shards are not a grid, the chunks are cut at every edge of a shard. A `str` entry is a 0-d array of its text.
    The name of the array in dask is a token of its files and byte ranges, so that equal arrays are read once. Computing
    it raises `SourceError` if a file is missing, truncated, or shorter than its header says.

    Args:
        checkpoint: the checkpoint.
        name: the name of the tensor.
        replica: the number of the file to read, for a tensor whose copies differ.
    """
    tensor = checkpoint.tensors[name]
    if tensor.text is not None:
        return text_array(name, tensor.text)
    if (array := assigned(checkpoint, tensor)) is not None:
        return array
    spec = tensor.spec
    shards = tensor.shards
    absent = [str(shard.block) for shard in shards if not shard.replicas]
    if absent:
        raise SourceError(
            f"no file of {checkpoint.root} has block {names(absent)} of tensor {name!r}", code="missing-blocks"
        )
    read = [(shard.block, next(e for e in shard.replicas if replica in {None, e.file})) for shard in shards]
    return stored_array(checkpoint, spec, read, tensor.axes)


def stored_array(
    checkpoint: Checkpoint, spec: TensorSpec, located: Sequence[tuple[Block, Extent]], axes: tuple[Shape, ...] = ()
) -> da.Array:
    """Return blocks in files as one lazy dask array.

    Args:
        checkpoint: the checkpoint.
        spec: name, dtype and shape of the array.
        located: the blocks, each with its location.
        axes: as in `StoredTensor`.
    """
    files = [checkpoint.files[extent.file] for _, extent in located]
    pieces = tuple(
        StoredBlock(block, file.path, extent.runs, checkpoint.coding, extent.strides)
        for (block, extent), file in zip(located, files, strict=True)
    )
    token = tokenize(
        "reshard",
        spec.name,
        spec.dtype.name,
        spec.shape,
        [(file.path, *file.status) for file in files],
        [(piece.block.start, piece.block.stop, piece.runs, piece.strides) for piece in pieces],
    )
    return _from_files(StoredTensor(spec.name, spec.dtype, spec.shape, pieces, axes), f"{spec.name}-{token}")


def flat_array(arrays: Sequence[da.Array]) -> da.Array:
    """Return the elements of arrays, in order, as one flat array."""
    return guard(da.concatenate([array.reshape(-1) for array in arrays]))


def _from_files(stored: StoredTensor, name: str) -> da.Array:
    """Return a stored tensor as a dask array with this name, one chunk per piece."""
    meta = np.empty((0,) * stored.ndim, stored.dtype)
    plain = da.from_array(stored, chunks=_chunks(stored), name=name, asarray=False, meta=meta)
    kind = _LowInFiles if stored.dtype in LOW_PRECISION else _InFiles
    array = kind(plain.dask, plain.name, plain.chunks, meta=plain._meta)  # noqa: SLF001 -- as dask rebuilds it
    array.stored = stored
    return array


def text_array(name: str, text: str) -> da.Array:
    """Return the value of a `str` entry as a 0-d array."""
    return da.from_array(np.array(text), name=f"{name}-{tokenize('reshard', name, text)}")


def sub_array(checkpoint: Checkpoint, name: str, block: Block, *, replica: int | None = None) -> da.Array:
    """Return a block of a tensor as a lazy dask array; a `str` entry is never split."""
    tensor = checkpoint.tensors[name]
    whole = tensor_array(checkpoint, name, replica=replica)
    return whole if tensor.text is not None else whole[block.within(Block.whole(tensor.spec.shape))]


def _chunks(stored: StoredTensor) -> tuple[tuple[int, ...], ...]:
    """Return the chunk sizes along each dimension, cut at every edge of a block.

    If a dimension consists of several axes, only edges along the first of these count.
    """
    chunks = []
    axis = 0
    for dim, extent in enumerate(stored.shape):
        sizes = stored.axes[dim] if stored.axes else (extent,)
        inner = prod(sizes[1:])
        edges = {0, extent}
        for block in (piece.block for piece in stored.pieces if sizes):
            edges.update(min(max(edge * inner, 0), extent) for edge in (block.start[axis], block.stop[axis]))
        chunks.append(tuple(b - a for a, b in pairwise(sorted(edges))) or (0,))
        axis += len(sizes)
    return tuple(chunks)


# --- low-precision floats ---------------------------------------------------------------------------------------


def guard(value: Any) -> Any:
    """Convert dask arrays of low-precision float dtypes to `TensorArray`s; return other values unchanged.

    Use it on the results of functions in `dask.array`:

    >>> half = guard(da.ones(100_000, dtype="float16"))
    >>> half.dtype.name, float(half.sum()), float(guard(da.concatenate([half, half])).mean())
    ('float16', 100000.0, 1.0)
    """
    if type(value) is da.Array and value.dtype in LOW_PRECISION:
        return TensorArray(value.dask, value.name, value.chunks, meta=value._meta)  # noqa: SLF001 -- as dask rebuilds it
    if type(value) in {tuple, list}:
        return type(value)(map(guard, value))
    return value


class TensorArray(da.Array):  # type: ignore[misc]  # dask is untyped to mypy
    """A dask array of bfloat16, float8 or float16 that accumulates in float32.

    dask accumulates these dtypes in their own precision: the mean of a million bfloat16 ones is silently 0.001 or nan.
    This class computes sums, means and the like in float32, in methods (`x.mean()`, `x @ y`) and in numpy's functions
    (`np.mean(x)`); the result is float32, or has the requested `dtype`. Functions that only move, select or compare
    items keep the dtype, as does elementwise arithmetic, and return a `TensorArray`. `compute()` returns plain numpy
    arrays of the original dtype.

    **Not covered: the functions of `dask.array`.** `da.mean(x)` and `da.sum(x)` choose the accumulator by `x.dtype` and
    call only the chunks, so that no array class can intervene; `da.concatenate` and similar functions return plain dask
    arrays, which `guard` converts to this class. Write `x.mean()`, `np.mean(x)` or `da.mean(x.astype("float32"))`.

    On a cluster of several processes, cast float8_e5m2 before it is sent: ml_dtypes describes it as `<f1`, which
    distributed cannot read back (ml_dtypes issues 148 and 216). float16, bfloat16 and float8_e4m3fn are fine.

    >>> ones = guard(da.ones(1_000_000, dtype="float16", chunks=250_000))
    >>> float(ones.mean()), float(np.sum(ones[::2])), (ones - ones).std().dtype.name
    (1.0, 500000.0, 'float32')
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorArray, (self.dask, self.name, self.chunks, self.dtype, self._meta)

    @property
    def real(self) -> TensorArray:
        """Return the array itself: these dtypes are real."""
        return self

    @property
    def blocks(self) -> BlockView:
        """Return the chunks, indexed as an array of chunks."""
        return _Blocks(self)

    def __array_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if func in _KEEPS_DTYPE:
            return guard(super().__array_function__(func, types, args, kwargs))
        return _in_float32(func, *args, **kwargs)

    def __array_ufunc__(self, numpy_ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if numpy_ufunc.signature is not None:  # such as matmul and vecdot, which sum
            inputs = _widened(inputs)
        return guard(super().__array_ufunc__(numpy_ufunc, method, *inputs, **kwargs))


class _InFiles(da.Array):  # type: ignore[misc]
    """A whole tensor in files, or a box of one.

    dask (2026.8) pushes a slice down to the reads only if a single task uses it: for `x = w[:4]; x - x.mean()`, or for
    the difference of two slices with different chunks, it reads whole chunks. Therefore slices are applied here, before
    dask sees them. Results computed from this array are plain dask arrays or `TensorArray`s.
    """

    stored: StoredTensor | None = None

    def __getitem__(self, index: Any) -> da.Array:
        box = _box(self.shape, index)
        if self.stored is None or self.stored.axes or box is None or not 0 < box.size < self.size:
            return super().__getitem__(index)
        part = _from_files(self.stored.part(box), f"{self.stored.name}-{tokenize(self.name, box.start, box.stop)}")
        items = full_index(index, len(self.shape))
        if not any(isinstance(item, Integral) for item in items):
            return part
        return part[tuple(0 if isinstance(item, Integral) else slice(None) for item in items)]


class _LowInFiles(_InFiles, TensorArray):
    """A tensor of a low-precision float dtype in files, or a box of one."""


def _box(shape: Shape, index: Any) -> Block | None:
    """Return the box of an index of integers and slices without steps; None for any other index.

    >>> str(_box((8, 6), (slice(2, 4), -1))), str(_box((8, 6), (..., slice(3)))), _box((8,), slice(None, None, 2))
    ('[2:4, 5:6]', '[0:8, 0:3]', None)
    """
    items = full_index(index, len(shape))
    if len(items) != len(shape):
        return None
    spans = []
    for extent, item in zip(shape, items, strict=True):
        if isinstance(item, slice) and item.step in {None, 1}:
            start, stop, _ = item.indices(extent)
        elif isinstance(item, Integral) and not isinstance(item, bool) and -extent <= int(item) < extent:
            start = int(item) % extent
            stop = start + 1
        else:
            return None
        spans.append((start, max(start, stop)))
    return Block(tuple(a for a, _ in spans), tuple(b for _, b in spans))


class _Blocks(BlockView):  # type: ignore[misc]
    def __getitem__(self, index: Any) -> da.Array:
        return guard(super().__getitem__(index))


_ADDS_NOTHING = """
append around atleast_1d atleast_2d atleast_3d block broadcast_arrays broadcast_to clip compress
concatenate delete diag diagonal dstack empty_like expand_dims extract flip fliplr flipud full_like hstack
insert max min moveaxis nan_to_num nanmax nanmin ndim ones_like pad real repeat reshape result_type roll
rollaxis rot90 round select shape squeeze stack swapaxes take tile transpose tril triu unique vstack where
zeros_like
"""
_KEEPS_DTYPE = frozenset(getattr(np, name) for name in _ADDS_NOTHING.split())
"""numpy's functions that do not accumulate. All others get float32 arrays, which are exact."""

_ADDS = "__matmul__ __rmatmul__ cumprod cumsum dot mean moment prod std sum trace var"
_ACCUMULATES = frozenset(_ADDS.split())
"""dask's methods that accumulate."""


def _in_float32(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function with low-precision arrays as float32; cast the result to a low `dtype`."""
    wide, kwargs = list(_widened(args)), _widened(kwargs)
    try:
        position = list(signature(function).parameters).index("dtype")
    except ValueError:  # no such parameter, or a function in C without a signature
        return function(*wide, **kwargs)
    dtype = wide[position] if position < len(wide) else kwargs.get("dtype")
    if dtype is None or np.dtype(dtype) not in LOW_PRECISION:
        return function(*wide, **kwargs)
    kwargs.pop("dtype", None)
    wide[position : position + 1] = [None] * (position < len(wide))
    return guard(function(*wide, **kwargs).astype(dtype))


def _widened(value: Any) -> Any:
    if isinstance(value, da.Array | np.ndarray):
        return value.astype(np.float32) if value.dtype in LOW_PRECISION else value
    if isinstance(value, list | tuple):
        return type(value)(map(_widened, value))
    if isinstance(value, dict):
        return {key: _widened(item) for key, item in value.items()}
    return value


def _guarded(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if name in _ACCUMULATES:
            return _in_float32(method, *args, **kwargs)
        return guard(method(*args, **kwargs))

    return call


# Wrap every method and operator, including internal ones (`_rebuild` of `persist`, `_vindex`) and ones that later
# versions of dask add: dask returns each result as a plain `Array`.
for _name, _method in vars(da.Array).items():
    if isinstance(_method, FunctionType) and _name not in vars(TensorArray):
        setattr(TensorArray, _name, _guarded(_name, _method))
