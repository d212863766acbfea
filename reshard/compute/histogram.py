"""The histogram of one tensor: exact counts, computed out of core."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reshard.compute.boxes import FileBoxes
from reshard.compute.moments import CHUNK, Meter, ends_of_bins
from reshard.compute.stats import ValueStats, stats
from reshard.core.run.executor import map_tasks
from reshard.core.storage.cipher import store_of
from reshard.core.verify.sums import thread_count
from reshard.errors import SourceError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.compute.boxes import TensorPart
    from reshard.core.model.checkpoint import Checkpoint

Array = np.ndarray[Any, np.dtype[Any]]

_MOST_BINS = 1 << 16  # each is drawn, and each thread counts in bins of its own


class Histogram(NamedTuple):
    """The numbers of finite elements of a tensor in bins of equal width.

    Attributes:
        stats: the statistics of the tensor.
        counts: the number of elements in each bin.
        edges: the edges of the bins, one more than there are bins.
    """

    stats: ValueStats
    counts: Array
    edges: Array


def histogram(checkpoint: Checkpoint, name: str, bins: int) -> Histogram:
    """Read a tensor twice, and return its histogram; see `reshard.Checkpoint.hist`."""
    if not 1 <= bins <= _MOST_BINS:
        raise UsageError(f"bins is {bins!r:.60}; expected 1 to {_MOST_BINS}", code="bad-value")
    checkpoint.require(name)
    result = stats(checkpoint.sel(name))
    if name in result.not_computed:
        raise SourceError(f"tensor {name!r} {result.not_computed[name]}", code="unreadable-tensor")
    values = result.tensors[name]
    ends = (0.0, 1.0)
    if values.min is not None and values.max is not None:
        ends = ends_of_bins(float(values.min), float(values.max), bins)
        if not isfinite(ends[1] - ends[0]):
            raise SourceError(f"tensor {name!r} has values that are too far apart for a histogram", code="out-of-range")
    counts, edges = np.histogram(np.empty(0), bins, ends)
    boxes = FileBoxes.of(checkpoint, [name])

    def add(part: Array) -> None:
        nonlocal counts
        counts = counts + part

    try:
        map_tasks(_counted, (boxes, bins, ends), boxes.spans(), threads=thread_count(None), on_result=add)
    finally:
        store_of(checkpoint.coding).close()
    return Histogram(values, counts, edges)


def _counted(shared: tuple[FileBoxes, int, tuple[float, float]], spans: Sequence[TensorPart]) -> Array:
    """Count the elements of one task in bins."""
    boxes, bins, ends = shared
    meter = Meter(boxes.tensors[0].spec.dtype)
    counts = np.zeros(bins, np.int64)
    for _, box in boxes.read(spans):
        for begin in range(0, len(box.codes), CHUNK):
            with np.errstate(all="ignore"):
                values = meter.values(box.codes[begin : begin + CHUNK])
                counts += np.histogram(values[np.isfinite(values)], bins, ends)[0]
    return counts
