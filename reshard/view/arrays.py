"""Lazy dask arrays of a checkpoint's tensors, and of the blocks of them that a plan's ranks will hold.

1. A tensor becomes one dask array; its chunks are its source shards.
2. A slice of it stands for its own part of the files; dask pushes steps, and what is left, down to the object beneath,
   which turns them into ranges of each shard.
3. Of each shard only the byte ranges asked for are read (`layout.strided`).
4. Arrays of low-precision floats are `TensorArray`s, whose sums and means are right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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

from reshard.dtypes import BY_NAME, DType
from reshard.errors import SourceError, names
from reshard.formats.entries import ranges
from reshard.layout.axes import refined, row_major
from reshard.layout.block import Block
from reshard.layout.strided import read_strided
from reshard.storage.cipher import store_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from reshard.formats.entries import Runs
    from reshard.layout.block import Shape
    from reshard.plan.plan import RankBlock
    from reshard.source.checkpoint import Checkpoint
    from reshard.storage.base import Coding

_KINDS = [kind for kind in vars(ml_dtypes).values() if isinstance(kind, type) and issubclass(kind, np.generic)]
_EXTENSION_DTYPES = [np.dtype(kind) for kind in _KINDS]

for _dtype in _EXTENSION_DTYPES:
    # dask tells dtypes apart by `dtype.str`, which is '<V1' for nearly all of these: casts to two of them
    # would share one name, and with it one result.
    normalize_token.register(type(_dtype), lambda dtype: ("ml_dtypes", dtype.name))

LOW_PRECISION = {np.dtype(np.float16), *(dtype for dtype in _EXTENSION_DTYPES if "float" in dtype.name)}
"""The float dtypes too narrow to be summed in: each is a subset of float32."""


def tensor_array(checkpoint: Checkpoint, name: str, *, replica: int | None = None) -> da.Array:
    """Return a tensor of a checkpoint as a lazy dask array, one chunk a source shard.

    Of a tensor whose copies differ, `replica` is the number of the file whose copy is meant.

    Where the shards are not a grid, every edge of one cuts all of them. A `str` entry is a 0-d array of its
    text. The array's name in dask is a token of the bytes it stands for, so that equal arrays are read once.
    Computing it raises `SourceError` where a file is gone, truncated, or holds less than its header said.
    """
    tensor = checkpoint.tensors[name]
    if tensor.text is not None:
        return _text_array(name, tensor.text)
    spec = tensor.spec
    shards = tensor.shards
    absent = [str(shard.block) for shard in shards if not shard.replicas]
    if absent:
        raise SourceError(
            f"no file of {checkpoint.root} has block {names(absent)} of tensor {name!r}", code="missing-blocks"
        )
    read = [next(e for e in shard.replicas if replica in {None, e.file}) for shard in shards]
    files = [checkpoint.files[extent.file] for extent in read]
    pieces = tuple(
        _Piece(shard.block, file.path, extent.runs, checkpoint.coding, extent.strides)
        for shard, extent, file in zip(shards, read, files, strict=True)
    )
    token = tokenize(
        "reshard",
        name,
        spec.dtype.name,
        spec.shape,
        [(file.path, *file.status) for file in files],
        [(piece.block.start, piece.block.stop, piece.runs, piece.strides) for piece in pieces],
    )
    return _from_files(_Stored(name, spec.dtype, spec.shape, pieces, tensor.axes), f"{name}-{token}")


def _from_files(stored: _Stored, name: str) -> da.Array:
    """Return what is in files as a dask array with this name, one chunk a piece of it."""
    array = da.from_array(
        stored,
        chunks=_chunks(stored),
        name=name,
        asarray=False,
        meta=np.empty((0,) * stored.ndim, stored.dtype),
    )
    kind = _LowInFiles if stored.dtype in LOW_PRECISION else _InFiles
    found = kind(array.dask, array.name, array.chunks, meta=array._meta)  # noqa: SLF001 -- as dask rebuilds it
    found.stored = stored
    return found


def _text_array(name: str, text: str) -> da.Array:
    return da.from_array(np.array(text), name=f"{name}-{tokenize('reshard', name, text)}")


def sub_array(checkpoint: Checkpoint, name: str, block: Block, *, replica: int | None = None) -> da.Array:
    """Return one block of a tensor as a lazy dask array; all of a `str` entry, which is never split."""
    tensor = checkpoint.tensors[name]
    whole = tensor_array(checkpoint, name, replica=replica)
    return whole if tensor.text is not None else whole[block.within(Block.whole(tensor.spec.shape))]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RankArrays(Mapping[str, da.Array]):
    """What one target rank will hold: a mapping of target names to lazy dask arrays.

    Attributes:
        checkpoint: the source.
        blocks: for each target name, the source tensor and the block of it.
        texts: the `str` entries.
    """

    checkpoint: Checkpoint
    blocks: Mapping[str, RankBlock]
    texts: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> da.Array:
        if name in self.texts:
            return _text_array(name, self.texts[name])
        held = self.blocks[name]
        array = sub_array(self.checkpoint, held.source_name, held.block, replica=held.replica)
        same = held.dtype == self.checkpoint.tensors[held.source_name].spec.dtype
        return array if same else guard(array.astype(held.dtype.numpy()))

    def __iter__(self) -> Iterator[str]:
        return iter([*self.blocks, *self.texts])

    def __len__(self) -> int:
        return len(self.blocks) + len(self.texts)

    def __contains__(self, name: object) -> bool:
        return name in self.blocks or name in self.texts

    def __repr__(self) -> str:
        return f"<RankArrays of {names([self.checkpoint.root])}: {len(self)} tensor{'s' * (len(self) != 1)}>"


def _chunks(stored: _Stored) -> tuple[tuple[int, ...], ...]:
    """Return the chunk sizes along each dimension: every edge of a block is an edge of chunks.

    Of a dimension that is several axes, only the first of these has edges.
    """
    found = []
    axis = 0
    for dim, extent in enumerate(stored.shape):
        sizes = stored.axes[dim] if stored.axes else (extent,)
        inner = prod(sizes[1:])
        edges = {0, extent}
        for block in (piece.block for piece in stored.pieces if sizes):
            edges.update(min(max(edge * inner, 0), extent) for edge in (block.start[axis], block.stop[axis]))
        found.append(tuple(b - a for a, b in pairwise(sorted(edges))) or (0,))
        axis += len(sizes)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A block of a tensor and where its bytes are, in row-major order or in strides."""

    block: Block
    path: str
    runs: Runs
    coding: Coding | None = None
    strides: Shape = ()

    def read(self, begin: int, buffer: memoryview) -> None:
        """Fill a buffer with what the runs hold from `begin` on, or with zeros."""
        if not self.runs:
            buffer[:] = bytes(len(buffer))
            return
        missing = begin + len(buffer) - sum(nbytes for _, nbytes in self.runs)
        if missing > 0:
            raise SourceError(f"{self.path} lacks {missing} bytes of block {self.block}", code="truncated")
        store_of(self.coding).read(
            [(self.path, offset, buffer[start:stop]) for offset, start, stop in ranges(self.runs, begin, len(buffer))]
        )

    def read_items(self, items: Sequence[range], out: np.ndarray[Any, Any]) -> None:
        """Fill `out` with the block's items at these indices along each dimension, none of them empty."""
        strides = self.strides or row_major(self.block.shape)
        first = sum(each.start * step for each, step in zip(items, strides, strict=True))
        pitch = tuple(out.itemsize * step * each.step for each, step in zip(items, strides, strict=True))
        read_strided(self.read, out.itemsize * first, pitch, out)


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in files, indexed as numpy is (without new axes): what dask slices.

    `axes` are those of the pieces that each dimension is, where these have others (`Tensor.space`).
    """

    name: str
    kind: DType
    shape: Shape
    pieces: tuple[_Piece, ...]
    axes: tuple[Shape, ...] = ()

    @property
    def dtype(self) -> np.dtype[Any]:
        return BY_NAME[self.kind.name].numpy()  # it knows kinds by identity, which a pickle loses

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def part(self, box: Block) -> _Stored:
        """Return a part of the tensor as one of its own; blocks that begin before it keep where their bytes are."""
        moved = [
            replace(
                piece,
                block=Block(
                    tuple(a - o for a, o in zip(piece.block.start, box.start, strict=True)),
                    tuple(b - o for b, o in zip(piece.block.stop, box.start, strict=True)),
                ),
            )
            for piece in self.pieces
            if piece.block & box is not None
        ]
        return replace(self, shape=box.shape, pieces=tuple(moved))

    def __getitem__(self, index: object) -> np.ndarray[Any, Any]:
        given = list(index) if isinstance(index, tuple) else [index]
        place = given.index(...) if ... in given else len(given)
        given[place : place + 1] = [slice(None)] * (self.ndim - len(given) + (... in given))
        if not all(isinstance(item, slice | Integral) for item in given):
            # Lists, which dask pushes down too: read by the slices, then take from what was read. `fancy=False`
            # would keep them out, but dask (2026.8) then pushes down nothing at all.
            slices = tuple(item if isinstance(item, slice) else slice(None) for item in given)
            others: tuple[Any, ...] = tuple(slice(None) if isinstance(item, slice) else item for item in given)
            return np.asarray(self[slices][others])
        asked = [_picked(extent, item) for extent, item in zip(self.shape, given, strict=True)]
        found = self._read([each if each.step > 0 else each[::-1] for each in asked])
        flips = tuple(slice(None, None, 1 if each.step > 0 else -1) for each in asked)
        scalars: tuple[Any, ...] = tuple(slice(None) if isinstance(item, slice) else 0 for item in given)
        return found[flips][(*scalars, ...)]

    def _read(self, items: Sequence[range]) -> np.ndarray[Any, Any]:
        """Return the items at these ascending indices along each dimension."""
        out = np.empty([len(each) for each in items], self.kind.carrier())
        filled = self._fill(items, out) if not self.axes else self._fill_of_axes(items, out)
        if filled < out.size:
            raise SourceError(
                f"no shard has {out.size - filled} of the {out.size} items asked for of tensor {self.name!r}",
                code="missing-blocks",
            )
        return out.view(self.dtype)

    def _fill_of_axes(self, items: Sequence[range], out: np.ndarray[Any, Any]) -> int:
        """Fill an array with items whose dimensions are several axes each; return how many were there."""
        asked = Block(
            tuple(each.start for each in items), tuple(each[-1] + 1 if each else each.start for each in items)
        )
        if asked.shape != out.shape:  # of steps what is between them is read, too
            found = np.empty(asked.shape, out.dtype)
            filled = self._fill_of_axes([range(a, b) for a, b in zip(asked.start, asked.stop, strict=True)], found)
            out[...] = found[tuple(slice(None, None, each.step) for each in items)]
            return filled - found.size + out.size
        return sum(
            self._fill(
                [range(a, b) for a, b in zip(box.start, box.stop, strict=True)],
                out[part.within(asked)].reshape(box.shape),
            )
            for box, part in refined(asked, self.axes)
        )

    def _fill(self, items: Sequence[range], out: np.ndarray[Any, Any]) -> int:
        """Fill an array with items; return how many of them were there."""
        filled = 0
        for piece in self.pieces:
            places = tuple(
                slice(_position(each, a), _position(each, b))
                for each, a, b in zip(items, piece.block.start, piece.block.stop, strict=True)
            )
            part = out[places] if places else out  # `out[()]` would be a copy
            if part.size:
                piece.read_items(
                    [
                        range(each[place.start] - a, each[place.stop - 1] - a + 1, each.step)
                        for each, place, a in zip(items, places, piece.block.start, strict=True)
                    ],
                    part,
                )
                filled += part.size
        return filled


def _picked(extent: int, item: Any) -> range:
    """Return the indices that an integer or a slice picks from a dimension."""
    found = range(extent)[item]
    return found if isinstance(found, range) else range(found, found + 1)


def _position(items: range, edge: int) -> int:
    """Return how many of some ascending indices lie before an edge.

    >>> [_position(range(1, 9, 3), edge) for edge in (0, 1, 2, 4, 5, 8, 20)]
    [0, 0, 1, 1, 2, 3, 3]
    """
    return min(max(-((items.start - edge) // items.step), 0), len(items))


def guard(value: Any) -> Any:
    """Return a dask array of a low-precision float dtype as a `TensorArray`, and anything else as it is.

    Use it on what `dask.array`'s own functions made of a tensor:

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
    """A dask array of bfloat16, float8 or float16, whose sums and means are right.

    dask accumulates these dtypes in their own precision: the mean of a million bfloat16 ones comes out as
    0.001 or as nan, without a word. Here whatever accumulates is computed in float32, and its result is
    float32, or of the `dtype` asked for: the methods (`x.mean()`, `x @ y`) and numpy's functions
    (`np.mean(x)`). What only moves, picks or compares items keeps the dtype, as does arithmetic item by item,
    and gives a `TensorArray` again. `compute()` gives plain numpy arrays of the real dtype.

    **Not covered: the free functions of `dask.array`.** `da.mean(x)` and `da.sum(x)` choose the dtype to
    accumulate in from `x.dtype` alone and then speak only to the chunks, so that no array can step in;
    `da.concatenate` and its like return plain dask arrays, which `guard` turns into this class. Write
    `x.mean()`, `np.mean(x)` or `da.mean(x.astype("float32"))`.

    On a cluster of several processes cast float8_e5m2 before it travels: ml_dtypes describes it as `<f1`, which
    distributed cannot read back (ml_dtypes issues 148 and 216). float16, bfloat16 and float8_e4m3fn travel well.

    >>> ones = guard(da.ones(1_000_000, dtype="float16", chunks=250_000))
    >>> float(ones.mean()), float(np.sum(ones[::2])), (ones - ones).std().dtype.name
    (1.0, 500000.0, 'float32')
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorArray, (self.dask, self.name, self.chunks, self.dtype, self._meta)

    @property
    def real(self) -> TensorArray:
        """The array itself: these dtypes are real."""
        return self

    @property
    def blocks(self) -> BlockView:
        """The chunks, indexed as an array of chunks."""
        return _Blocks(self)

    def __array_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if func in _KEEPS_DTYPE:
            return guard(super().__array_function__(func, types, args, kwargs))
        return _in_float32(func, *args, **kwargs)

    def __array_ufunc__(self, numpy_ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if numpy_ufunc.signature is not None:  # matmul, vecdot: they sum
            inputs = _widened(inputs)
        return guard(super().__array_ufunc__(numpy_ufunc, method, *inputs, **kwargs))


class _InFiles(da.Array):  # type: ignore[misc]
    """A whole tensor, or a box of one, as it is in files.

    dask (2026.8) pushes a slice down to the reads only while a single task uses it: of `x = w[:4]; x - x.mean()`, or of
    the difference of two slices with other chunks, it reads whole chunks. So a slice is taken here, before dask
    sees it. Whatever is computed from this array is a plain dask array, or a `TensorArray`.
    """

    stored: _Stored | None = None

    def __getitem__(self, index: Any) -> da.Array:
        box = _box(self.shape, index)
        if self.stored is None or self.stored.axes or box is None or not 0 < box.size < self.size:
            return super().__getitem__(index)
        part = _from_files(self.stored.part(box), f"{self.stored.name}-{tokenize(self.name, box.start, box.stop)}")
        given = index if isinstance(index, tuple) else (index,)
        if not any(isinstance(item, Integral) for item in given):
            return part
        return part[tuple(0 if isinstance(item, Integral) else ... if item is ... else slice(None) for item in given)]


class _LowInFiles(_InFiles, TensorArray):
    """The same of a low-precision float dtype."""


def _box(shape: Shape, index: Any) -> Block | None:
    """Return the box that integers and slices without steps pick; None for any other index.

    >>> str(_box((8, 6), (slice(2, 4), -1))), str(_box((8, 6), (..., slice(3)))), _box((8,), slice(None, None, 2))
    ('[2:4, 5:6]', '[0:8, 0:3]', None)
    """
    given = list(index) if isinstance(index, tuple) else [index]
    if sum(item is ... for item in given) > 1 or len(given) - any(item is ... for item in given) > len(shape):
        return None
    place = next((n for n, item in enumerate(given) if item is ...), len(given))
    given[place : place + 1] = [slice(None)] * (len(shape) - len(given) + (place < len(given)))
    spans = []
    for extent, item in zip(shape, given, strict=True):
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
"""numpy's functions that add nothing up. Any other is given float32, which holds every item exactly."""

_ACCUMULATES = frozenset(
    {
        "__matmul__",
        "__rmatmul__",
        "cumprod",
        "cumsum",
        "dot",
        "mean",
        "moment",
        "prod",
        "std",
        "sum",
        "trace",
        "var",
    }
)
"""dask's methods that do not keep the dtype."""


def _in_float32(function: Callable[..., Any], *given: Any, **kwargs: Any) -> Any:
    """Call a function with low-precision arrays as float32; cast to a low-precision `dtype` at the end."""
    args, kwargs = list(_widened(given)), _widened(kwargs)
    try:
        place = list(signature(function).parameters).index("dtype")
    except ValueError:  # it has no dtype, or is written in C and says nothing
        return function(*args, **kwargs)
    dtype = args[place] if place < len(args) else kwargs.get("dtype")
    if dtype is None or np.dtype(dtype) not in LOW_PRECISION:
        return function(*args, **kwargs)
    kwargs.pop("dtype", None)
    args[place : place + 1] = [None] * (place < len(args))
    return guard(function(*args, **kwargs).astype(dtype))


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


# Every method and operator, internal ones (`_rebuild` of `persist`, `_vindex`) included: dask builds each
# result as a plain `Array`, so none may be forgotten, nor any that a later dask adds.
for _name, _method in vars(da.Array).items():
    if isinstance(_method, FunctionType) and _name not in vars(TensorArray):
        setattr(TensorArray, _name, _guarded(_name, _method))
