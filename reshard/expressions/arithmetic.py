"""Buffers that a thread uses again, as touching new memory takes longer than most arithmetic; and rounding."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from reshard.core.layout.block import Shape


class _Free(threading.local):
    """The buffers of a thread that are not in use."""

    def __init__(self) -> None:
        self.buffers: list[NDArray[Any]] = []


_free = _Free()


@contextmanager
def scratch(shape: Shape, dtype: np.dtype[Any]) -> Iterator[NDArray[Any]]:
    """Yield an array without contents, which is valid until the context ends; contexts may be nested.

    A thread keeps as many buffers as were in use at once.
    """
    nbytes = prod(shape) * dtype.itemsize
    buffer = _free.buffers.pop() if _free.buffers else np.empty(0, np.uint8)
    if len(buffer) < nbytes:
        buffer = np.empty(nbytes, np.uint8)
    try:
        yield buffer[:nbytes].view(dtype).reshape(shape)
    finally:
        _free.buffers.append(buffer)


def rounded(numbers: NDArray[Any], out: NDArray[Any]) -> None:
    """Round numbers to nearest, ties to even; too large ones become infinity.

    ml_dtypes rounds float64 to float32 first, and then again. So the first rounding is to odd, which makes the second
    right: an inexact number gets an odd last bit.

    >>> import ml_dtypes
    >>> number, out = np.array([1 + 2**-8 + 2**-40]), np.empty(1, ml_dtypes.bfloat16)
    >>> rounded(number, out)
    >>> float(out[0]), float(number.astype(ml_dtypes.bfloat16)[0])
    (1.0078125, 1.0)
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if numbers.dtype != np.float64 or out.dtype.isbuiltin == 1:
            np.copyto(out, numbers, casting="unsafe")
            return
        single = numbers.astype(np.float32)
        bits = single.view(np.int32)
        inexact = np.isfinite(single) & (single != numbers) & (bits & 1 == 0)
        bits[inexact] += np.where(np.abs(single[inexact]) < np.abs(numbers[inexact]), 1, -1).astype(np.int32)
        np.copyto(out, single, casting="unsafe")
