"""Buffers that a thread uses again: touching new memory takes longer than most arithmetic."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from reshard.layout.block import Shape


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
