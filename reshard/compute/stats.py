"""Statistics of the values of a checkpoint, for each tensor and for groups of tensors.

Each byte of a tensor is read once; replicas are not read. Sums are joined in the order of the blocks, not of the
threads, so that the same files give the same bits.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reshard import environment
from reshard.compute.boxes import BOX_BYTES, FileBoxes, incomplete
from reshard.compute.moments import THREAD_BYTES, Meter, Moments, ends_of_bins
from reshard.core.layout.block import shape_text
from reshard.core.model.stored import stored_tensor
from reshard.core.plan.budget import values_budget
from reshard.core.plan.select import kinds
from reshard.core.run.clusters.where import refuse_unshared
from reshard.core.run.executor import map_tasks
from reshard.core.storage.cipher import store_of
from reshard.core.verify.sums import progress_callback, thread_count
from reshard.errors import UsageError, names
from reshard.sizes import counted
from reshard.spelling import missing_name
from reshard.strategy.names import group_members
from reshard.upward import upward

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from reshard.compute.boxes import FileBox, TensorPart
    from reshard.core.layout.block import Shape
    from reshard.core.model.checkpoint import Checkpoint, Tensor
    from reshard.core.run.settings import Progress

Array = np.ndarray[Any, np.dtype[Any]]

GROUPINGS = ("name", "prefix", "dtype", "kind", "tensor")
"""The properties by which tensors are grouped; `tensor` is each by itself."""

_SAMPLED = 1 << 16  # the histogram of a tensor with at most this number of elements counts all of them
_EXACT = 1024  # the most elements of a tensor whose values are kept, for exact quartiles and histograms
_STEP = 61  # a larger tensor is sampled: each 61st element of a box; row lengths are rarely multiples of this prime


@dataclass(frozen=True, slots=True)
class NotFinite:
    """The first NaN or infinity of a tensor, in row-major order.

    Attributes:
        index: its index in the whole tensor.
        value: `nan`, `inf` or `-inf`.
        rank: the rank of the file that has it.
        path: the file.
    """

    index: tuple[int, ...]
    value: str
    rank: int
    path: str


@dataclass(frozen=True, slots=True, repr=False)
class ValueStats:
    """Statistics of the values of a tensor, or of a group of tensors.

    Minimum, maximum, mean, standard deviation and norm cover the finite values, and of complex numbers the magnitudes.

    Attributes:
        name: the name of the tensor or of the group.
        tensors: the number of tensors.
        dtype: the name of the dtype; the names of all dtypes of a group.
        shape: the shape of the tensor; None for a group.
        moments: the statistics.
        sample: how often each pattern of the first 13 bits occurs among sampled values as float32.
        first: the first NaN or infinity; None without one, and for a group.
        values: all finite values of a tensor of at most 1,024 elements, as float64, ascending; None for others.
    """

    name: str
    tensors: int
    dtype: str
    shape: Shape | None
    moments: Moments
    sample: Mapping[int, int] = field(repr=False)
    first: NotFinite | None = None
    values: Array | None = field(default=None, repr=False, compare=False)

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return self.moments.size

    @property
    def min(self) -> float | None:
        """Return the minimum; None without a finite value."""
        return self.moments.least if self.moments.finite else None

    @property
    def max(self) -> float | None:
        """Return the maximum; None without a finite value."""
        return self.moments.most if self.moments.finite else None

    @property
    def mean(self) -> float | None:
        """Return the mean; None without a finite value."""
        return self.moments.mean if self.moments.finite else None

    @property
    def std(self) -> float | None:
        """Return the standard deviation; None without a finite value."""
        return self.moments.std if self.moments.finite else None

    @property
    def norm(self) -> float | None:
        """Return the square root of the sum of squares; None without a finite value."""
        return self.moments.norm if self.moments.finite else None

    @property
    def zeros(self) -> int:
        """Return the number of zeros."""
        return self.moments.zeros

    @property
    def nans(self) -> int:
        """Return the number of NaNs."""
        return self.moments.nans

    @property
    def infs(self) -> int:
        """Return the number of infinities."""
        return self.moments.infs

    @property
    def quartiles(self) -> tuple[float, float, float] | None:
        """Return the quartiles, the median between them; None for a tensor of more than 1,024 elements, or a group."""
        if self.values is None or not len(self.values):
            return None
        low, median, high = (float(value) for value in np.quantile(self.values, (0.25, 0.5, 0.75)))
        return low, median, high

    def histogram(self, bins: int = 24) -> tuple[Array, Array]:
        """Count finite values in bins of equal width; return counts and edges, as `numpy.histogram`.

        Counts are exact for a tensor of at most 1,024 elements; those of others are of values that are rounded to 5
        significant bits, and a tensor of more than 65,536 elements is sampled. `Checkpoint.hist` counts all of any.
        """
        if self.values is not None and len(self.values):
            return np.histogram(self.values, bins, ends_of_bins(float(self.values[0]), float(self.values[-1]), bins))
        least, most = float(self.moments.least), float(self.moments.most)
        if not self.moments.finite:
            return np.zeros(bins), np.linspace(0, 1, bins + 1)
        edges = np.linspace(*ends_of_bins(least, most, bins), bins + 1)
        codes = np.array([*self.sample], np.uint32)
        counts = np.array([*self.sample.values()], np.float64)
        # A code stands for an interval, which is shared among the bins that it overlaps.
        with np.errstate(invalid="ignore"):  # codes of NaNs are left out below
            ends = np.stack([codes << 19, ((codes + 1) << 19) - 1]).view(np.float32).astype(np.float64)
        ends = ends[:, is_finite := np.isfinite(ends).all(axis=0)]
        ends.sort(axis=0)
        low, high = ends.clip(least, most)
        low = np.minimum(low, np.nextafter(edges[-1], -np.inf))
        high = np.maximum(high, np.nextafter(low, np.inf))
        overlap = (np.minimum(high[:, None], edges[1:]) - np.maximum(low[:, None], edges[:-1])).clip(0)
        return counts[is_finite] @ (overlap / overlap.sum(axis=1, keepdims=True)), edges

    def __repr__(self) -> str:
        numbers = {title: getattr(self, title) for title in ("min", "max", "mean", "std", "norm", "zeros")}
        counts = {"NaN": self.nans, "Inf": self.infs}
        numbers |= {title: count for title, count in counts.items() if count}
        if self.quartiles:
            numbers |= dict(zip(("25 %", "median", "75 %"), self.quartiles, strict=True))
        shape = f"{self.tensors} tensors" if self.shape is None else shape_text(self.shape)
        words = ", ".join(f"{title} {number_text(number)}" for title, number in numbers.items() if number is not None)
        return f"<{names([self.name])} {self.dtype} {shape}: {words}>"

    def _repr_html_(self) -> str:
        return str(upward("html")(self))


def number_text(value: float | None) -> str:
    """Write a number with four digits, or whole if it is whole.

    >>> number_text(3), number_text(0.000123456), number_text(None), number_text(-0.0)
    ('3', '0.0001235', '', '0')
    """
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value + 0.0:.4g}"


@dataclass(frozen=True, slots=True)
class CheckpointStats:
    """Statistics of the values of a checkpoint.

    Attributes:
        root: the directory or file that was read.
        tensors: the statistics of each tensor, by name.
        kinds: the kind of each tensor: `weights`, a state of the optimizer such as `adam_m`, or `other`.
        not_computed: tensors without statistics, with the reasons.
        bytes_read: number of bytes read.
        seconds: the duration.
        by_ranks: each file belongs to a rank.
        warnings: warnings from opening the checkpoint.

    >>> stats = reshard.open("src_checkpoints", strategy="src_strategy.ckpt").stats()
    >>> round(stats.tensors["net.layer1.weight"].moments.mean, 4)
    -0.1065
    """

    root: str
    tensors: Mapping[str, ValueStats]
    kinds: Mapping[str, str]
    not_computed: Mapping[str, str]
    bytes_read: int = 0
    seconds: float = 0.0
    by_ranks: bool = False
    warnings: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> ValueStats:
        """Return the statistics of a tensor.

        Raises:
            reshard.UsageError: there are none of this name.
        """
        if name not in self.tensors:
            raise missing_name(name, self.tensors, "there are no statistics of a tensor")
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def _ipython_key_completions_(self) -> list[str]:
        return list(self.tensors)

    @property
    def total(self) -> ValueStats:
        """Return the statistics of all tensors together."""
        return _joined(self.root, list(self.tensors.values()))

    @property
    def not_finite(self) -> Mapping[str, NotFinite]:
        """Return the first NaN or infinity of each tensor that has any."""
        return {name: stats.first for name, stats in self.tensors.items() if stats.first is not None}

    def groups(self, by: str = "name") -> dict[str, ValueStats]:
        """Return the statistics of groups of tensors.

        Args:
            by: `name` (names that differ only in numbers are one group: `layers.{0-31}.wq.weight`), `prefix` (the part
                before the first dot), `dtype`, `kind`, or `tensor`: each by itself.

        Raises:
            reshard.UsageError: an unknown value of `by`.
        """
        if by not in GROUPINGS:
            raise UsageError(f"tensors cannot be grouped by {by!r}; expected {names(GROUPINGS)}", code="bad-value")
        if by == "tensor":
            return dict(self.tensors)
        members: dict[str, list[str]] = {}
        if by == "name":
            folded = group_members((name, (stats.dtype, stats.shape)) for name, stats in self.tensors.items())
            for group, _, names_of_group in folded:
                members.setdefault(group, []).extend(names_of_group)
        else:
            for name, stats in self.tensors.items():
                keys = {"prefix": name.partition(".")[0], "dtype": stats.dtype, "kind": self.kinds[name]}
                members.setdefault(keys[by], []).append(name)
        return {
            group: _joined(group, [self.tensors[name] for name in names_of_group])
            for group, names_of_group in members.items()
        }

    def to_dataframe(self) -> Any:
        """Return the statistics as a `pandas.DataFrame`, a row for each tensor.

        Columns: `name`, `dtype`, `shape`, `kind`, `size` in elements, `min`, `max`, `mean`, `std`, `norm`, `zeros`,
        `nans`, `infs`.

        Raises:
            reshard.ReshardError: pandas is not installed.
        """
        from reshard.compute.frames import stats_frame  # not on every start

        return stats_frame(self)

    def __repr__(self) -> str:
        tensors = counted(len(self.tensors), "tensor")
        return f"<CheckpointStats of {names([self.root])}: {tensors}, {len(self.not_finite)} with NaN or Inf>"

    def _repr_html_(self) -> str:
        return str(upward("html")(self))


def _joined(name: str, members: Sequence[ValueStats]) -> ValueStats:
    """Join the statistics of several tensors."""
    if len(members) == 1:
        return replace(members[0], name=name)
    sample: dict[int, int] = {}
    for code, count in chain.from_iterable(stats.sample.items() for stats in members):
        sample[code] = sample.get(code, 0) + count
    dtypes = ", ".join(dict.fromkeys(stats.dtype for stats in members))
    moments = reduce(Moments.joined, (stats.moments for stats in members), Moments())
    return ValueStats(name, len(members), dtypes, None, moments, sample)


class _Measured(NamedTuple):
    """The statistics of a span.

    Attributes:
        span: the span.
        moments: the statistics.
        codes: sampled codes, each once.
        counts: how often each occurs.
        first: the row-major index in the whole tensor of the first NaN or infinity, and its file; None if none.
        nbytes: number of bytes read.
        values: the elements of a small tensor, as float64.
    """

    span: TensorPart
    moments: Moments
    codes: Array
    counts: Array
    first: tuple[int, int] | None
    nbytes: int
    values: Array | None


def measure(boxes: FileBoxes, spans: Sequence[TensorPart]) -> list[_Measured]:
    """Measure the spans of one task."""
    measured: list[_Measured] = []
    meters: dict[str, Meter] = {}
    current: _Measuring | None = None
    last = -1
    for number, box in boxes.read(spans):
        if number != last and current is not None:
            measured.append(current.result())
            current = None
        last = number
        if current is None:
            tensor = boxes.tensors[box.tensor]
            dtype = tensor.spec.dtype
            if dtype.name not in meters:
                meters[dtype.name] = Meter(dtype)
            current = _Measuring(spans[number], tensor, meters[dtype.name])
        current.add(box)
    if current is not None:
        measured.append(current.result())
    return measured


class _Measuring:
    """Joins the statistics of the boxes of a span."""

    def __init__(self, span: TensorPart, tensor: Tensor, meter: Meter) -> None:
        self._span, self._tensor, self._meter = span, tensor, meter
        self._moments = Moments()
        self._sample = np.zeros(1 << 13, np.int64)
        self._first: tuple[int, int] | None = None
        self._nbytes = 0
        size = prod(tensor.spec.shape)
        self._step = _STEP if size > _SAMPLED else 1
        self._values: list[Array] | None = [] if size <= _EXACT else None

    def add(self, box: FileBox) -> None:
        """Measure a box."""
        moments = self._meter.measure(box.codes)
        self._moments = self._moments.joined(moments)
        self._nbytes += box.codes.nbytes
        self._sample += np.bincount(self._meter.sample_codes(box.codes[:: self._step]), minlength=1 << 13)
        if self._values is not None:
            self._values.append(self._meter.values(box.codes))
        if moments.nans or moments.infs:
            positions = self._meter.bad_positions(box.codes)
            index = box.first_index(positions, self._tensor.spec.shape, self._tensor.space)
            self._first = min(filter(None, (self._first, (index, box.file))))

    def result(self) -> _Measured:
        """Return the statistics of the span."""
        codes = np.flatnonzero(self._sample).astype(np.uint16)
        values = None if self._values is None else np.concatenate(self._values)
        return _Measured(self._span, self._moments, codes, self._sample[codes], self._first, self._nbytes, values)


def stats(
    checkpoint: Checkpoint,
    *,
    memory: int | None = None,
    threads: int | None = None,
    client: Any = None,
    progress: Callable[[Progress], None] | None = None,
) -> CheckpointStats:
    """Return the statistics of a checkpoint; see `Checkpoint.stats`. `memory` is in bytes."""
    began = time.perf_counter()
    refuse_unshared(client, (file.path for file in checkpoint.files))
    texts = {name: "is a text" for name, tensor in checkpoint.tensors.items() if tensor.text is not None}
    narrow = {name: f"is {each.spec.dtype}" for name, each in checkpoint.tensors.items() if each.spec.dtype.bits}
    not_computed = {**dict(incomplete(checkpoint)), **texts, **narrow, **checkpoint.unreadable}
    computed = [name for name in checkpoint.tensors if name not in not_computed]
    limits = values_budget(
        [checkpoint], BOX_BYTES + THREAD_BYTES, memory=environment.memory(memory), threads=thread_count(threads)
    )
    limits.reserve()
    threads = limits.threads
    boxes = FileBoxes.of(checkpoint, computed)
    total = sum(tensor.spec.nbytes for tensor in boxes.tensors)
    results: list[_Measured] = []
    read = 0
    on_progress = progress_callback(progress, began)

    def add(measured: list[_Measured]) -> None:
        nonlocal read
        results.extend(measured)
        read += sum(result.nbytes for result in measured)
        on_progress(read, total)

    try:
        map_tasks(measure, boxes, boxes.spans(), threads=threads, client=client, on_result=add)
        by_tensor: dict[int, list[_Measured]] = {}
        for result in sorted(results, key=lambda result: result.span[:2] + (result.span.boxes or (0, 0))):
            by_tensor.setdefault(result.span.tensor, []).append(result)
        values = {
            name: _of_tensor(checkpoint, tensor, by_tensor.get(number, []))
            for number, (name, tensor) in enumerate(zip(computed, boxes.tensors, strict=True))
        }
    finally:
        store_of(checkpoint.coding).close()
    return CheckpointStats(
        checkpoint.title, values, kinds(checkpoint), not_computed, read, time.perf_counter() - began,
        checkpoint.strategy is not None or len(set(checkpoint.ranks)) > 1, tuple(checkpoint.warnings),
    )  # fmt: skip


def _of_tensor(checkpoint: Checkpoint, tensor: Tensor, results: Sequence[_Measured]) -> ValueStats:
    """Join the results of all spans of a tensor, in order."""
    name, dtype, shape = tensor.spec
    sample = np.zeros(1 << 13, np.int64)
    for result in results:
        sample[result.codes] += result.counts
    codes = np.flatnonzero(sample)
    moments = reduce(Moments.joined, (result.moments for result in results), Moments())
    parts = [result.values for result in results if result.values is not None]
    values = np.sort(np.concatenate(parts)) if parts else None
    first = min((result.first for result in results if result.first is not None), default=None)
    return ValueStats(
        name, 1, dtype.name, shape, moments,
        dict(zip(codes.tolist(), sample[codes].tolist(), strict=True)),
        None if first is None else _not_finite(checkpoint, tensor, *first),
        None if values is None else values[np.isfinite(values)],
    )  # fmt: skip


def _not_finite(checkpoint: Checkpoint, tensor: Tensor, at: int, file: int) -> NotFinite:
    """Describe a NaN or an infinity, given its row-major index; its value is read again."""
    shape = tensor.spec.shape
    index = tuple(int(n) for n in np.unravel_index(at, shape)) if shape else ()
    stored = stored_tensor(tensor, [source.path for source in checkpoint.files], checkpoint.coding)
    with np.errstate(all="ignore"):  # signalling NaNs
        value = complex(stored[index].astype(np.complex128))
    parts = [part for part in (value.real, value.imag) if not np.isfinite(part)]
    # Parts that are finite may have an infinite magnitude.
    text = "nan" if any(np.isnan(part) for part in parts) else f"{parts[0] if parts else np.inf}"
    return NotFinite(index, text, checkpoint.ranks[file], checkpoint.files[file].path)
