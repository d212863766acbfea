"""Compare the contents of tensors that rules merge into one."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard.core.layout.axes import position, row_major
from reshard.core.layout.block import flat_boxes
from reshard.core.layout.strided import read_strided
from reshard.core.model.entries import wants_of
from reshard.core.storage.cipher import store_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.core.model.checkpoint import Checkpoint, Tensor
    from reshard.core.model.entries import Runs
    from reshard.core.storage.base import ReadStore

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
    store, dtype = store_of(source.coding), tensor.spec.dtype.carrier()
    arrays = [np.empty(0, dtype)]
    for box in flat_boxes(tensor.space or tensor.spec.shape, first, first + count):
        out = np.zeros(box.shape, dtype)
        for block, replicas in tensor.shards:
            common = block & box
            if common is None or not replicas:
                continue
            at = replicas[0]
            strides = at.strides or row_major(block.shape)
            begin = position(common.start, block.start, strides) * out.itemsize
            read = partial(_read, store, source.files[at.file].path, at.runs)
            pitch = tuple(step * out.itemsize for step in strides)
            part: np.ndarray[Any, Any] = out[(*common.within(box), ...)]  # type: ignore[arg-type]  # of one number too
            read_strided(read, begin, pitch, part)
        arrays.append(out.reshape(-1))
    return np.concatenate(arrays)


def _read(store: ReadStore, path: str, runs: Runs, requests: Sequence[tuple[int, memoryview]]) -> None:
    store.read(wants_of(path, runs, requests))
