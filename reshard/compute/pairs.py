"""Compare pairs of arrays element by element: sums of differences and products, in float64 and in a fixed order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reshard.compute.moments import CHUNK, Widener, dot

if TYPE_CHECKING:
    from reshard.dtypes import DType

Array = np.ndarray[Any, np.dtype[Any]]

_FEW = 16  # if fewer than one element in 16 differs, only the differing ones are subtracted

PAIR_BYTES = 64 * CHUNK
"""The memory that a `PairMeter` takes: chunks of both sides and their difference as float64, and masks."""


class PairSums(NamedTuple):
    """Sums in float64 over the pairs of finite elements, and counts over all pairs.

    Attributes:
        differing, not_finite: as in `TensorDiff`.
        has_nan: a differing element is a NaN.
        largest: the largest absolute difference.
        distance: the sum of absolute differences.
        of_diff, of_a, of_b, of_both: the dot products of the difference with itself, of each side with itself, and of
            the two sides.
        first: the row-major index of the first element that differs; -1 if none does.
    """

    differing: int = 0
    not_finite: int = 0
    has_nan: bool = False
    largest: float = 0.0
    distance: float = 0.0
    of_diff: float = 0.0
    of_a: float = 0.0
    of_b: float = 0.0
    of_both: float = 0.0
    first: int = -1

    def joined(self, other: PairSums) -> PairSums:
        """Return the sums over both ranges of elements; the elements of `other` come later."""
        return PairSums(
            self.differing + other.differing,
            self.not_finite + other.not_finite,
            self.has_nan or other.has_nan,
            max(self.largest, other.largest),
            self.distance + other.distance,
            self.of_diff + other.of_diff,
            self.of_a + other.of_a,
            self.of_b + other.of_b,
            self.of_both + other.of_both,
            self.first if self.first >= 0 else other.first,
        )


class PairMeter:
    """Compares flat arrays of two dtypes."""

    def __init__(self, a: DType, b: DType) -> None:
        self._same = a is b
        self._wideners = Widener(a), Widener(b)
        self._is_complex = any(widener.is_complex for widener in self._wideners)
        self._is_long = self._same and a.name in {"int64", "uint64"}
        self._difference = np.empty(CHUNK, np.complex128 if self._is_complex else np.float64)

    def measure(self, a: Array, b: Array) -> PairSums:
        """Return the sums over two arrays of one length, given their bits."""
        sums = PairSums()
        with np.errstate(all="ignore"):
            for begin in range(0, len(a), CHUNK):
                of_chunk = self._of_chunk(*(side[begin : begin + CHUNK] for side in (a, b)))
                sums = sums.joined(of_chunk if of_chunk.first < 0 else of_chunk._replace(first=of_chunk.first + begin))
        return sums

    def _of_chunk(self, codes_a: Array, codes_b: Array) -> PairSums:
        if self._same:
            unequal_bits = codes_a != codes_b
            count = int(np.count_nonzero(unequal_bits))
            if not count:
                return self._of_equal(codes_a)
            if count < len(codes_a) // _FEW and (few := self._of_few(codes_a, codes_b, unequal_bits)):
                return few
        return self._of_all(codes_a, codes_b) or self._of_not_finite(codes_a, codes_b)

    def _of_few(self, codes_a: Array, codes_b: Array, unequal_bits: Array) -> PairSums | None:
        """Return the sums if few elements differ; None if an element is not finite."""
        places = np.flatnonzero(unequal_bits)
        few = self._of_all(*(side[places] for side in (codes_a, codes_b)))
        rest = self._wideners[0].widen(codes_a)
        rest[places] = 0
        square = _product(rest, rest)
        if few is None or not np.isfinite(square):
            return None
        first = int(places[few.first]) if few.first >= 0 else -1
        return few.joined(PairSums(of_a=square, of_b=square, of_both=square))._replace(first=first)

    def _of_all(self, codes_a: Array, codes_b: Array) -> PairSums | None:
        """Return the sums if every element may differ; None if one is not finite."""
        a, b = (widener.widen(codes) for widener, codes in zip(self._wideners, (codes_a, codes_b), strict=True))
        of_a, of_b = _product(a, a), _product(b, b)
        if not np.isfinite(of_a + of_b):
            return None
        difference = self._difference[: len(a)]
        np.subtract(a, b, out=difference)
        if self._is_long:
            kind = self._wideners[0].dtype
            difference[:] = _long_difference(codes_a.view(kind), codes_b.view(kind))
        unequal = difference != 0
        differing = int(np.count_nonzero(unequal))
        of_diff = _product(difference, difference)
        distances = np.abs(difference) if self._is_complex else np.abs(difference, out=difference)
        return PairSums(
            differing, 0, False, float(distances.max()), float(distances.sum()), of_diff, of_a, of_b,
            _product(a, b), int(unequal.argmax()) if differing else -1,
        )  # fmt: skip

    def _of_equal(self, codes: Array) -> PairSums:
        """Return the sums over elements with equal bits on both sides."""
        a = self._wideners[0].widen(codes)
        square = _product(a, a)
        if not np.isfinite(square):
            finite = a[np.isfinite(a)]
            square = _product(finite, finite)
        return PairSums(of_a=square, of_b=square, of_both=square)

    def _of_not_finite(self, codes_a: Array, codes_b: Array) -> PairSums:
        """Return the sums over elements that include NaN or infinity."""
        a, b = (widener.widen(codes) for widener, codes in zip(self._wideners, (codes_a, codes_b), strict=True))
        equal = a == b
        equal |= codes_a == codes_b if self._same else np.isnan(a) & np.isnan(b)
        finite = np.isfinite(a) & np.isfinite(b)
        unlike = ~equal & ~finite
        a_finite, b_finite = a[finite], b[finite]
        difference = a_finite - b_finite
        distances = np.abs(difference)
        return PairSums(
            int(np.count_nonzero(~equal)),
            int(np.count_nonzero(unlike)),
            bool((np.isnan(a[unlike]) | np.isnan(b[unlike])).any()),
            float(distances.max(initial=0)),
            float(distances.sum()),
            _product(difference, difference),
            _product(a_finite, a_finite),
            _product(b_finite, b_finite),
            _product(a_finite, b_finite),
            -1 if equal.all() else int(equal.argmin()),
        )


def _product(a: Array, b: Array) -> float:
    """Return the real part of the inner product."""
    if a.dtype.kind == "c" or b.dtype.kind == "c":
        return float((a.conj() * b).real.sum())
    return dot(a, b)


def _long_difference(a: Array, b: Array) -> Array:
    """Return the absolute difference of integers of eight bytes, which float64 cannot hold."""
    high, low = np.maximum(a, b).view(np.uint64), np.minimum(a, b).view(np.uint64)
    distance: Array = (high - low).astype(np.float64)
    return distance
