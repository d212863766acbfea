"""Compare the contents of tensors that rules merge into one."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard.core.layout.block import flat_boxes
from reshard.core.model.stored import stored_tensor

if TYPE_CHECKING:
    from reshard.core.model.checkpoint import Checkpoint, Tensor

WHOLE_BYTES = 1 << 20
"""The most bytes of a tensor that are compared whole."""

_SAMPLES, _SAMPLE = 32, 16 << 10
"""The number of samples of larger tensors, and the bytes of each."""


def equal(source: Checkpoint, name: str, second: str) -> bool:
    """Compare two tensors: small ones fully, others by sampling."""
    a, b = source.tensors[name], source.tensors[second]
    if (a.spec.dtype.name, a.spec.shape) != (b.spec.dtype.name, b.spec.shape):
        return False
    size = a.spec.nbytes // a.spec.dtype.itemsize
    length = size if a.spec.nbytes <= WHOLE_BYTES else _SAMPLE // a.spec.dtype.itemsize
    last = size - length
    begins = {0, last, *(Random(name).randrange(last) for _ in range(_SAMPLES if last else 0))}  # noqa: S311
    return all(
        np.array_equal(_elements(source, a, begin, length), _elements(source, b, begin, length))
        for begin in sorted(begins)
    )


def is_zero(source: Checkpoint, tensor: Tensor, first: int, count: int) -> bool:
    """Return whether elements are zero; only the beginning of a large range is read."""
    return not _elements(source, tensor, first, min(count, WHOLE_BYTES // tensor.spec.dtype.itemsize)).any()


def _elements(source: Checkpoint, tensor: Tensor, first: int, count: int) -> np.ndarray[Any, Any]:
    """Read a range of a tensor's elements in row-major order, as bits."""
    stored = stored_tensor(tensor, [file.path for file in source.files], source.coding)
    out = np.zeros(count, stored.kind.carrier())
    done = 0
    for box in flat_boxes(tensor.spec.shape, first, first + count):
        stored.fill(box.ranges, out[done : done + box.size].reshape(box.shape))  # what is in no file stays zero
        done += box.size
    return out
