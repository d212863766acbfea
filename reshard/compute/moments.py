"""Count, sum and square the elements of arrays, in float64 and in a fixed order.

Arrays are taken in chunks that stay in a core's cache. Elements of one byte are counted by their 256 codes. Chunks with
a NaN or an infinity are slower, as their finite elements are selected first.
"""

from __future__ import annotations

import sys
from math import inf, sqrt, ulp
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from reshard.dtypes import DType

Array = np.ndarray[Any, np.dtype[Any]]

CHUNK = 1 << 17
"""The elements of a chunk: a megabyte of float64."""

_TINY = 1e-290
"""Numbers of bins in ranges of smaller numbers overflow in numpy."""

_ROW = 1 << 13  # the elements of a dot product; OpenBLAS divides longer ones among threads, which changes the sum

_SIGN = 0x8000  # the bits of -0.0 in two bytes

THREAD_BYTES = 24 * CHUNK
"""The memory that a `Meter` takes: a chunk as float64, once more without NaNs, and masks."""


class Moments(NamedTuple):
    """Statistics of elements; `joined` combines the statistics of two sets of elements.

    Attributes:
        finite: number of finite elements; `least`, `most`, `mean` and `spread` cover only these.
        nans: number of NaNs.
        infs: number of infinities.
        zeros: number of zeros.
        least: the minimum.
        most: the maximum.
        mean: the mean.
        spread: the sum of the squared distances to the mean.
    """

    finite: int = 0
    nans: int = 0
    infs: int = 0
    zeros: int = 0
    least: float = inf
    most: float = -inf
    mean: float = 0.0
    spread: float = 0.0

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return self.finite + self.nans + self.infs

    @property
    def std(self) -> float:
        """Return the standard deviation."""
        return sqrt(self.spread / self.finite) if self.finite else 0.0

    @property
    def norm(self) -> float:
        """Return the square root of the sum of squares."""
        return sqrt(self.spread + self.finite * self.mean**2)

    def joined(self, other: Moments) -> Moments:
        """Return the statistics of the elements of both together.

        >>> a, b = Moments(2, least=1, most=3, mean=2.0, spread=2.0), Moments(1, zeros=1, least=0, most=0)
        >>> joined = a.joined(b)
        >>> joined.finite, joined.zeros, joined.least, joined.most, round(joined.mean, 3), round(joined.norm**2, 3)
        (3, 1, 0, 3, 1.333, 10.0)
        """
        if not (self.finite and other.finite):
            values = self if self.finite else other
            mean, spread = values.mean, values.spread
        else:
            share = other.finite / (self.finite + other.finite)
            distance = other.mean - self.mean
            mean = self.mean + distance * share
            spread = self.spread + other.spread + distance * distance * self.finite * share
        return Moments(
            self.finite + other.finite,
            self.nans + other.nans,
            self.infs + other.infs,
            self.zeros + other.zeros,
            min(self.least, other.least),
            max(self.most, other.most),
            mean,
            spread,
        )


def ends_of_bins(low: float, high: float, bins: int) -> tuple[float, float]:
    """Return a range that numpy can divide into bins: float64 has no numbers between neighbors.

    >>> ends_of_bins(0.0, 3.0, 4), ends_of_bins(1e30, 1e30, 1)
    ((0.0, 3.0), (9.999999999999999e+29, 1.0000000000000002e+30))
    """
    if low == high:
        low, high = low - 0.5, high + 0.5  # as numpy does
    least, most = bins * ulp(max(abs(low), abs(high), _TINY)), sys.float_info.max
    return (low, high) if high - low >= least else (max(low - least, -most), min(high + least, most))


def dot(a: Array, b: Array) -> float:
    """Return the dot product of two flat float64 arrays; the result does not depend on the library's threads."""
    rows = len(a) // _ROW
    end = rows * _ROW
    total = float(a[end:] @ b[end:])
    if rows:
        rows_a, rows_b = (array[:end].reshape(rows, _ROW) for array in (a, b))
        total += float((rows_a[:, None, :] @ rows_b[:, :, None]).sum())
    return total


class Widener:
    """Converts arrays of one dtype to float64, or complex ones to complex128.

    Attributes:
        dtype: numpy's dtype.
        is_complex: the numbers are complex.
    """

    def __init__(self, dtype: DType) -> None:
        self.dtype = dtype.numpy()
        self.is_complex = self.dtype.kind == "c"
        self._table = _table_of(dtype) if dtype.itemsize == 1 else None
        self._wide = np.empty(CHUNK, np.complex128 if self.is_complex else np.float64)

    def widen(self, codes: Array) -> Array:
        """Return at most `CHUNK` elements, given their bits; the result is valid until the next call."""
        wide = self._wide[: len(codes)]
        if self._table is not None:
            np.take(self._table, codes, out=wide, mode="clip")
        else:
            np.copyto(wide, codes.view(self.dtype), casting="unsafe")
        return wide


def _table_of(dtype: DType) -> Array:
    """Return the value of each code of a dtype of one byte, as float64."""
    codes = np.arange(256, dtype=np.uint8)
    return (codes != 0 if dtype.name == "bool" else codes.view(dtype.numpy())).astype(np.float64)


def _magnitudes(values: Array) -> Array:
    """Return magnitudes as float64: those of finite complex64 may be infinite in float32."""
    return np.abs(values.astype(np.complex128))


class Meter:
    """Measures arrays of one dtype.

    Args:
        dtype: the dtype; magnitudes of complex numbers are measured.
    """

    def __init__(self, dtype: DType) -> None:
        self._dtype = dtype.numpy()
        self._carrier = dtype.carrier()
        self._is_float = self._dtype.kind not in "biuc"
        if dtype.itemsize == 1:
            self._table = _table_of(dtype)
        else:
            self._wide = np.empty(CHUNK)
        # The bits of infinity, of dtypes whose codes are ordered like their values.
        self._infinity = {"bfloat16": 0x7F80, "float16": 0x7C00}.get(dtype.name)

    def measure(self, codes: Array) -> Moments:
        """Return the moments of elements, given their bits."""
        if self._carrier.itemsize == 1:
            return self._of_counts(counted(codes))
        moments = Moments()
        with np.errstate(all="ignore"):
            for begin in range(0, len(codes), CHUNK):
                moments = moments.joined(self._of_chunk(codes[begin : begin + CHUNK]))
        return moments

    def bad_positions(self, codes: Array) -> Array:
        """Return the positions of NaNs and infinities."""
        if self._carrier.itemsize == 1:
            return np.flatnonzero(~np.isfinite(self._table)[codes])
        with np.errstate(all="ignore"):
            parts = [
                np.flatnonzero(~np.isfinite(self.values(codes[begin : begin + CHUNK]))) + begin
                for begin in range(0, len(codes), CHUNK)
            ]
        return np.concatenate(parts)

    def sample_codes(self, codes: Array) -> Array:
        """Return the first 13 bits of elements as float32: sign, exponent and 4 bits of the fraction."""
        if self._infinity == 0x7F80:
            return codes >> 3
        values = self._table[codes] if self._carrier.itemsize == 1 else self.values(codes)
        with np.errstate(all="ignore"):
            narrow: Array = values.astype(np.float32).view(np.uint32) >> 19
        return narrow

    def values(self, codes: Array) -> Array:
        """Return elements as float64."""
        values = codes.view(self._dtype)
        wide: Array = _magnitudes(values) if self._dtype.kind == "c" else values.astype(np.float64)
        return wide

    def _of_counts(self, counts: Array) -> Moments:
        """Return the moments of elements of one byte, given the number of each code."""
        present = np.flatnonzero(counts)
        values, weights = self._table[present], counts[present]
        nans, infs = (int(weights[mask].sum()) for mask in (np.isnan(values), np.isinf(values)))
        is_finite = np.isfinite(values)
        values, weights = values[is_finite], weights[is_finite]
        finite = int(weights.sum())
        if not finite:
            return Moments(0, nans, infs)
        mean = float(values @ weights) / finite
        spread = float((values - mean) ** 2 @ weights)
        zeros = int(weights[values == 0].sum())
        return Moments(finite, nans, infs, zeros, *self._range(values.min(), values.max()), mean, spread)

    def _range(self, least: Any, most: Any) -> tuple[float, float]:
        """Return the minimum and the maximum; whole numbers stay exact."""
        kind: Any = float if self._is_float or self._dtype.kind == "c" else int
        return kind(least) + 0, kind(most) + 0  # +0.0, not -0.0

    def _of_chunk(self, codes: Array) -> Moments:
        if self._infinity is not None:
            return self._of_half(codes, self._infinity)
        values = codes.view(self._dtype)
        if self._dtype.kind == "c":
            values = _magnitudes(values)
        least, most = values.min(), values.max()
        wide = self._wide[: len(values)]
        np.copyto(wide, values, casting="unsafe")
        if self._dtype.kind in "fc" and not (np.isfinite(least) and np.isfinite(most)):
            return self._of_finite(wide)
        zeros = len(values) - int(np.count_nonzero(values if self._dtype.kind in "iu" else wide != 0))
        mean = float(wide.sum()) / len(wide)
        np.subtract(wide, mean, out=wide)
        return Moments(len(wide), 0, 0, zeros, *self._range(least, most), mean, dot(wide, wide))

    def _of_half(self, codes: Array, infinity: int) -> Moments:
        """Return the moments of two-byte floats, whose codes are sign-magnitude integers."""
        positive, negative = int(codes.view(np.int16).max()), int(codes.max())  # of the largest magnitude
        wide = self._wide[: len(codes)]
        np.copyto(wide, codes.view(self._dtype), casting="unsafe")
        if positive >= infinity or negative >= _SIGN + infinity:
            return self._of_finite(wide)
        smallest = int(codes.min()) if positive < 0 or negative < _SIGN else 0  # if all have one sign
        least, most = negative if negative >= _SIGN else smallest, positive if positive >= 0 else smallest
        ends = np.array([least, most], np.uint16).view(self._dtype)
        zeros = len(codes) - int(np.count_nonzero(codes)) + int(np.count_nonzero(codes == _SIGN))
        total = float(wide.sum())
        mean = total / len(wide)
        spread = max(0.0, dot(wide, wide) - total * mean)  # at most 11 bits a value: nothing cancels
        return Moments(len(wide), 0, 0, zeros, *self._range(*ends), mean, spread)

    def _of_finite(self, wide: Array) -> Moments:
        """Return the moments of float64 elements that include NaN or infinity."""
        nans = int(np.count_nonzero(np.isnan(wide)))
        finite = wide[np.isfinite(wide)]
        infs = len(wide) - nans - len(finite)
        if not len(finite):
            return Moments(0, nans, infs)
        mean = float(finite.sum()) / len(finite)
        zeros = len(finite) - int(np.count_nonzero(finite))
        ends = self._range(finite.min(), finite.max())
        finite -= mean
        return Moments(len(finite), nans, infs, zeros, *ends, mean, dot(finite, finite))


def counted(codes: Array) -> Array:
    """Count the codes of one byte; two of them are counted at once.

    >>> np.flatnonzero(counted(np.array([3, 3, 7], np.uint8))), int(counted(np.array([3, 3, 7], np.uint8))[3])
    (array([3, 7]), 2)
    """
    even = len(codes) // 2 * 2
    pairs = np.zeros(1 << 16, np.int64)
    for begin in range(0, even, 2 * CHUNK):
        pairs += np.bincount(codes[begin : min(even, begin + 2 * CHUNK)].view(np.uint16), minlength=1 << 16)
    table = pairs.reshape(256, 256)
    counts: Array = table.sum(axis=0) + table.sum(axis=1)
    if even < len(codes):
        counts[codes[-1]] += 1
    return counts
