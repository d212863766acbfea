"""Arrays of low-precision floats whose sums, means and products are accumulated in float32.

numpy and dask accumulate bfloat16, float16 and float8 in their own precision: the mean of 20,000 ones in bfloat16 is
0.013. dask chooses the dtype of a result before it calls numpy for each chunk, so that no subclass of its arrays can
help. Therefore the chunks and the `meta` of a lazy array are `LowPrecisionArray`s:

1. What accumulates (`sum`, `mean`, `tensordot`, `norm`) does so in float32, whatever narrower dtype dask asks for.
   The result is float32, or a wider dtype that was asked for.
2. Results are `AccumulatedArray`s: the next step of dask asks for the narrow dtype again.
3. An empty result is what dask infers the dtype of a lazy array from. It refuses dask's cast to the narrow dtype
   (`AccumulatedArray.astype`), so that the lazy array says float32, too.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from dask.array import dispatch
from dask.base import normalize_token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

_KINDS = [kind for kind in vars(ml_dtypes).values() if isinstance(kind, type) and issubclass(kind, np.generic)]
_EXTENSION_DTYPES = [np.dtype(kind) for kind in _KINDS]

for _dtype in _EXTENSION_DTYPES:
    # dask identifies dtypes by `dtype.str`, which is '<V1' for nearly all of these: casts to two of them
    # would get the same name, and thus the same result.
    normalize_token.register(type(_dtype), lambda dtype: ("ml_dtypes", dtype.name))

LOW_PRECISION = {np.dtype(np.float16), *(dtype for dtype in _EXTENSION_DTYPES if "float" in dtype.name)}
"""The float dtypes too narrow to be summed in: each is a subset of float32."""

_ADDS_NOTHING = """
all allclose any append arange argmax argmin argpartition argsort around array array2string array_equal array_repr
array_split array_str asanyarray asarray ascontiguousarray asfortranarray atleast_1d atleast_2d atleast_3d block
broadcast_arrays broadcast_to can_cast clip compress concatenate copy copyto count_nonzero delete diag diagonal dsplit
dstack empty empty_like expand_dims extract flatnonzero flip fliplr flipud full full_like hsplit hstack imag insert
isclose isin lexsort max may_share_memory min min_scalar_type moveaxis nan_to_num nanargmax nanargmin nanmax nanmin
ndim nonzero ones ones_like pad partition place put put_along_axis putmask ravel real repeat reshape resize
result_type roll rollaxis rot90 round save savez searchsorted select shape shares_memory size sort split squeeze stack
swapaxes take take_along_axis tile transpose tril triu unique vsplit vstack where zeros zeros_like
"""
_KEEPS_DTYPE = frozenset(getattr(np, name) for name in _ADDS_NOTHING.split())
"""numpy's functions that move, select or compare. Others get float32 arrays, which are exact."""

_WITHOUT_COPY = frozenset({np.sum, np.prod, np.mean, np.cumsum, np.cumprod})
"""Functions that convert to a `dtype` piece by piece, and need no copy of the array in float32."""

_ACCUMULATE = frozenset({np.add, np.subtract, np.multiply, np.divide, np.hypot, np.logaddexp, np.logaddexp2})
"""Ufuncs whose `reduce` and `accumulate` round at every step."""

_POWERS = frozenset({np.power, np.square})
"""Ufuncs of norms and moments: squares of float16 overflow, and those of float8 are hardly numbers."""


class LowPrecisionArray(np.ndarray[Any, Any]):
    """A numpy array of bfloat16, float16 or float8 that accumulates in float32.

    Chunks of lazy arrays of these dtypes, and what `compute()` returns for such arrays, are of this type. Sums, means,
    products of matrices, norms and powers are float32. Other results have the dtype that numpy gives them; those of
    another dtype are plain arrays. `np.asarray(x)` returns the plain array, without a copy.

    >>> ones = low_precision(np.ones(20_000, ml_dtypes.bfloat16))
    >>> float(ones.mean()), float(np.sum(ones)), (ones @ ones).dtype.name, float(np.asarray(ones).sum())
    (1.0, 20000.0, 'float32', 256.0)
    >>> ones[:2] + 1
    LowPrecisionArray([2, 2], dtype=bfloat16)
    """

    __array_priority__ = 1.0  # dask chooses its functions for chunks by the highest

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        out = kwargs.pop("out", None)
        if any(_is_foreign(each) for each in (*inputs, *(out or ()))):
            return NotImplemented
        widens = ufunc.signature is not None or (ufunc in _POWERS and any(map(np.ndim, inputs)))
        accumulates = method in {"reduce", "accumulate", "reduceat"} and ufunc in _ACCUMULATE
        if accumulates:
            kwargs["dtype"] = _wide(kwargs.get("dtype") or inputs[0].dtype)
        elif (widens or _any_wide(inputs)) and _is_low(kwargs.get("dtype")):
            kwargs["dtype"] = np.dtype(np.float32)
        values = _widened(inputs) if widens else _plain(inputs)
        if out is None or method == "at":
            result = _wrapped(getattr(ufunc, method)(*values, **kwargs), inputs, accumulated=widens or accumulates)
            return _as_array(result) if method == "__call__" and _any_wide(inputs) else result
        if widens or accumulates:
            np.copyto(_plain(out[0]), getattr(ufunc, method)(*values, **kwargs), casting="unsafe")
        else:
            getattr(ufunc, method)(*values, out=_plain(out), **kwargs)
        return out[0] if len(out) == 1 else out

    def __array_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any, kwargs: Mapping[str, Any]
    ) -> Any:
        if not all(issubclass(each, np.ndarray) for each in types):
            return NotImplemented
        arrays = [*args, *kwargs.values()]
        if func in _KEEPS_DTYPE:
            result = _wrapped(func(*_plain(args), **_plain(kwargs)), arrays, accumulated=False)
            # dask asks with `keepdims`, and may stack what it gets: stacked scalars would be a plain array.
            is_narrow_scalar = "keepdims" in kwargs and isinstance(result, np.generic) and result.dtype in LOW_PRECISION
            return low_precision(np.asarray(result)) if is_narrow_scalar else result
        if func in _WITHOUT_COPY:
            wanted = args[2] if len(args) > 2 else kwargs.get("dtype")
            options = {**kwargs, "dtype": _wide(wanted or args[0].dtype)}
            return _wrapped(func(*_plain(args[:2]), *args[3:], **_plain(options)), arrays, accumulated=True)
        options = {**kwargs, "dtype": np.dtype(np.float32)} if _is_low(kwargs.get("dtype")) else dict(kwargs)
        return _wrapped(func(*_widened(args), **_widened(options)), arrays, accumulated=True)

    def __getitem__(self, index: Any) -> Any:
        if self.ndim == 0 and isinstance(index, tuple) and index == ():
            return self  # dask takes the `meta` of a 0-d array by this
        return super().__getitem__(index)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # As bytes: numpy cannot read back the description of some of these dtypes.
        plain = np.ascontiguousarray(self)
        return _unpickled, (type(self), np.asarray(plain).reshape(-1).view(np.uint8), self.dtype.name, self.shape)

    def astype(self, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        """Return a copy of another dtype: a plain array if it is not of low precision."""
        return low_precision(np.asarray(self).astype(dtype, *args, **kwargs))

    def view(self, *args: Any, **kwargs: Any) -> Any:
        """Return a view: a plain array if its dtype is not of low precision."""
        return low_precision(np.asarray(self).view(*args, **kwargs))

    def sum(self, *args: Any, **kwargs: Any) -> Any:
        """Return the sum in float32; arguments as of `numpy.sum`."""
        if not (self.size or args or kwargs):  # so dask makes a `meta` 0-d, also of a minimum; it may cast the result
            return np.zeros((), np.float32).view(AccumulatedArray)
        return np.sum(self, *args, **kwargs)


def _method(name: str) -> Callable[..., Any]:
    """Return a method that is numpy's function, which accumulates in float32."""
    function = getattr(np, name)

    def method(self: LowPrecisionArray, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    method.__name__ = name
    method.__doc__ = f"Return the result of `numpy.{name}`, which is accumulated in float32."
    return method


for _name in ("prod", "mean", "var", "std", "cumsum", "cumprod", "trace", "dot"):
    setattr(LowPrecisionArray, _name, _method(_name))


class AccumulatedArray(LowPrecisionArray):
    """A float32 array that was accumulated from low precision, or counts; the next step may be in low precision again.

    To infer a dtype, dask (2026.8) calls a function with empty arrays. It casts the result to the dtype that it
    expects, which is the narrow one, up to three times, and slices it at most once before each cast. Such a result
    ignores these casts, and no later one, which is a user's: there are two slices before it.
    """

    _casts = 0  # to ignore
    _sliced = False  # since the last one

    def __array_finalize__(self, origin: Any) -> None:
        self._casts = 0 if getattr(origin, "_sliced", True) else getattr(origin, "_casts", 0)
        self._sliced = True

    def astype(self, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        """Return a copy of another dtype."""
        if self._casts and _is_low(dtype):
            return _as_meta(np.asarray(self), self._casts - 1)
        result = super().astype(dtype, *args, **kwargs)
        return result.view(AccumulatedArray) if result.dtype.kind == "i" else result  # counts are added, too

    def sum(self, *args: Any, **kwargs: Any) -> Any:
        """Return the sum; an array even if it has no dimensions, as dask divides it by a count."""
        return _as_array(np.sum(self, *args, **kwargs))

    def __repr__(self) -> str:
        return repr(np.asarray(self))


def _as_meta(result: Any, casts: int = 3) -> AccumulatedArray:
    """Return an accumulated result from which dask infers a dtype."""
    meta: AccumulatedArray = result.view(AccumulatedArray)
    meta._casts, meta._sliced = casts, False  # noqa: SLF001 -- of this module
    return meta


def _as_array(result: Any) -> Any:
    """Return a scalar as an array of no dimensions, so that the next step knows that it was accumulated."""
    return np.asarray(result).view(AccumulatedArray) if isinstance(result, np.generic) else result


def low_precision(array: Any) -> Any:
    """Return an array of a low-precision dtype as a `LowPrecisionArray`, without a copy; other values unchanged."""
    return array.view(LowPrecisionArray) if type(array) is np.ndarray and array.dtype in LOW_PRECISION else array


def _is_low(dtype: Any) -> bool:
    return dtype is not None and np.dtype(dtype) in LOW_PRECISION


def _wide(dtype: Any) -> np.dtype[Any]:
    return np.dtype(np.float32) if _is_low(dtype) else np.dtype(dtype)


def _is_foreign(value: Any) -> bool:
    """Return whether a value defines ufuncs itself, such as a dask array."""
    return hasattr(value, "__array_ufunc__") and not isinstance(value, np.ndarray | np.generic)


def _plain(value: Any) -> Any:
    return _each(value, np.asarray)


def _widened(value: Any) -> Any:
    return _each(value, lambda array: np.asarray(array, dtype=_wide(array.dtype)))


def _each(value: Any, convert: Callable[[Any], Any]) -> Any:
    """Convert the arrays of low precision in a value, or in a list, tuple or dict."""
    is_low = isinstance(value, np.ndarray) and value.dtype in LOW_PRECISION
    if is_low or isinstance(value, LowPrecisionArray):
        return convert(value)
    if type(value) in {list, tuple}:
        return type(value)(_each(item, convert) for item in value)
    if type(value) is dict:
        return {key: _each(item, convert) for key, item in value.items()}
    return value


def _arrays(values: Any) -> Iterator[Any]:
    """Yield the arrays in nested lists."""
    for value in values:
        if isinstance(value, np.ndarray):
            yield value
        elif isinstance(value, list | tuple):
            yield from _arrays(value)


def _any_wide(values: Any) -> bool:
    return any(isinstance(array, AccumulatedArray) for array in _arrays(values))


def _wrapped(result: Any, inputs: Any, *, accumulated: bool) -> Any:
    """Return the result of plain arrays as the type that the inputs ask for."""
    if isinstance(result, tuple | list):
        items = [_wrapped(item, inputs, accumulated=accumulated) for item in result]
        return type(result)(*items) if hasattr(result, "_fields") else type(result)(items)
    arrays = list(_arrays(inputs))
    if accumulated and all(not array.size or getattr(array, "_casts", 0) for array in arrays):
        return _as_meta(np.asarray(result)) if isinstance(result, np.ndarray | np.generic) else result
    if type(result) is not np.ndarray:
        return result
    if result.dtype in LOW_PRECISION:
        return result.view(LowPrecisionArray)
    wide = [array for array in arrays if isinstance(array, AccumulatedArray)]
    is_count = result.dtype.kind == "i" and any(array.dtype.kind == "i" for array in wide)
    is_sum = result.dtype.kind == "f" and (accumulated or bool(wide))
    return result.view(AccumulatedArray) if is_count or is_sum else result


def _unpickled(kind: type, contents: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    return contents.view(np.dtype(getattr(ml_dtypes, dtype, dtype))).reshape(shape).view(kind)


def teach_distributed() -> None:
    """Let distributed pickle these arrays, if it is imported: it would send them as arrays of numpy."""
    if protocol := sys.modules.get("distributed.protocol"):
        protocol.dask_serialize.register(LowPrecisionArray)(_not_as_numpy)


def _not_as_numpy(array: LowPrecisionArray) -> Any:
    raise NotImplementedError  # distributed then takes the next serializer, which is pickle


teach_distributed()


# --- what dask looks up by the type of a chunk --------------------------------------------------------------------


def _numel(array: Any, **kwargs: Any) -> Any:
    return _count(np.broadcast_to(np.True_, array.shape), **kwargs)


def _nannumel(array: Any, **kwargs: Any) -> Any:
    return _count(~np.isnan(np.asarray(array)), **kwargs)


def _count(where: Any, **kwargs: Any) -> Any:
    """Count elements in float64: the dtype of the result, which dask asks for, is too narrow."""
    return _as_array(np.sum(where, **{**kwargs, "dtype": np.float64})).view(AccumulatedArray)


def _einsum(*args: Any, **kwargs: Any) -> Any:
    return _as_array(np.einsum(*args, **kwargs))


def _percentile(array: Any, *args: Any, **kwargs: Any) -> Any:
    return dispatch.percentile_lookup(_widened(array), *args, **kwargs)


def _divide(a: Any, b: Any, dtype: Any = None) -> Any:
    result = np.true_divide(_plain(a), _plain(b)).astype(_wide(dtype or np.float32))
    return result.view(AccumulatedArray) if result.ndim else result


dispatch.numel_lookup.register(LowPrecisionArray, _numel)
dispatch.nannumel_lookup.register(LowPrecisionArray, _nannumel)
dispatch.einsum_lookup.register(LowPrecisionArray, _einsum)
dispatch.percentile_lookup.register(LowPrecisionArray, _percentile)
dispatch.divide_lookup.register(LowPrecisionArray, _divide)
