"""Differences of two checkpoints: names, shapes, dtypes, and for each tensor how far its values are apart.

Both sides are read in the same boxes; their layouts and formats may differ. Values are compared as numbers in float64:
0.0 and -0.0 are equal, as are a bfloat16 and the float32 of the same value. A NaN equals only a NaN of the same bits,
or any NaN of another dtype.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from math import inf, isnan, nan, prod, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reshard import environment
from reshard.compute.boxes import BOX_BYTES, BoxGrid, RowBoxes, incomplete
from reshard.compute.pairs import PAIR_BYTES, PairMeter, PairSums
from reshard.core.layout.axes import common
from reshard.core.layout.block import shape_text
from reshard.core.model.reshape import Shared
from reshard.core.model.stored import stored_tensor
from reshard.core.plan import budget
from reshard.core.plan.budget import values_budget
from reshard.core.run.clusters.where import refuse_unshared
from reshard.core.run.executor import map_tasks
from reshard.core.storage.cipher import store_of
from reshard.core.verify.sums import progress_callback, thread_count
from reshard.errors import BudgetError, UsageError, names
from reshard.upward import upward

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reshard.core.layout.block import Shape
    from reshard.core.model.checkpoint import Checkpoint, Tensor
    from reshard.core.run.settings import Progress
    from reshard.core.storage.base import Coding

_MOST_BOX_BYTES = 16 << 20
"""The most bytes of a box, if the tensor is cut into many columns, which are read one by one."""

_COLUMN_BYTES = 32 << 10
"""The bytes of a box for each of its columns: reading them takes about as long as the call itself."""


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """The difference of two tensors of a name and a shape.

    Norms and sums cover the elements that are finite on both sides.

    Attributes:
        name: the name.
        shape: the shape.
        dtypes: the name of the dtype of each side.
        differing: number of elements that differ.
        not_finite: number of differing elements with a NaN or an infinity on either side.
        max_abs: the largest absolute difference; infinity or NaN if elements that are not finite differ.
        mean_abs: the sum of absolute differences of finite elements, divided by the number of all elements.
        relative: the norm of the difference, divided by the norm of the first side; infinity if that is zero.
        cosine: the cosine of the angle between the two; None if either is zero.
        first: the index of the first element that differs, in row-major order; None if none does.
    """

    name: str
    shape: Shape
    dtypes: tuple[str, str]
    differing: int
    not_finite: int
    max_abs: float
    mean_abs: float
    relative: float
    cosine: float | None
    first: tuple[int, ...] | None

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)

    @property
    def equal(self) -> bool:
        """Return whether no element differs."""
        return not self.differing


@dataclass(frozen=True, slots=True)
class CheckpointDiff:
    """The result of `diff`: true if two checkpoints are the same within the tolerance.

    Attributes:
        a: the directory or file of the first side.
        b: the directory or file of the second side.
        tensors: the tensors of both sides, by descending difference.
        only_a: names that only the first side has.
        only_b: names that only the second side has.
        unlike: names whose shapes or texts differ, with the reasons.
        not_compared: names on both sides whose tensors cannot be read, with the reasons.
        tolerance: the largest absolute difference that counts as equal.
        relative: the largest relative difference that counts as equal; None if only `tolerance` counts.
        bytes_read: number of bytes read, of both sides.
        seconds: the duration.
        warnings: warnings from opening the two.

    >>> source = reshard.open("src_checkpoints", strategy="src_strategy.ckpt")
    >>> differences = reshard.diff(source, source.scale("net.layer1.weight", factor=2))
    >>> differences.tensors["net.layer1.weight"].relative
    1.0
    """

    a: str
    b: str
    tensors: Mapping[str, TensorDiff]
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    unlike: Mapping[str, str] = field(default_factory=dict)
    not_compared: Mapping[str, str] = field(default_factory=dict)
    tolerance: float = 0.0
    relative: float | None = None
    bytes_read: int = 0
    seconds: float = 0.0
    warnings: tuple[str, ...] = ()

    @property
    def dtypes(self) -> dict[str, tuple[str, str]]:
        """Return both dtypes of each tensor whose dtypes differ; such a tensor may still be equal."""
        return {name: diff.dtypes for name, diff in self.tensors.items() if diff.dtypes[0] != diff.dtypes[1]}

    @property
    def changed(self) -> list[str]:
        """Return the names of tensors with an element that differs, by descending difference."""
        return [name for name, diff in self.tensors.items() if not diff.equal]

    @property
    def beyond(self) -> list[str]:
        """Return the names of tensors whose difference exceeds the tolerance."""
        return [name for name, diff in self.tensors.items() if not self.accepts(diff)]

    def accepts(self, diff: TensorDiff) -> bool:
        """Return whether the difference of a tensor is within the tolerance."""
        if diff.not_finite:
            return False
        return diff.max_abs <= self.tolerance or (self.relative is not None and diff.relative <= self.relative)

    @property
    def same(self) -> bool:
        """Return whether names and shapes are equal, and all values within the tolerance."""
        return not (self.only_a or self.only_b or self.unlike or self.not_compared or self.beyond)

    def __bool__(self) -> bool:
        return self.same

    def to_dataframe(self) -> Any:
        """Return the differences as a `pandas.DataFrame`, a row for each tensor of both sides, largest first.

        Columns: the attributes of each of `tensors`, and `within`: whether it is within the tolerance.

        Raises:
            reshard.ReshardError: pandas is not installed.
        """
        from reshard.compute.frames import diff_frame  # not on every start

        return diff_frame(self)

    def __repr__(self) -> str:
        verdict = f"{len(self.changed)} of {len(self.tensors)} tensors differ"
        return f"<CheckpointDiff of {names([self.a])} and {names([self.b])}: {verdict}>"

    def _repr_html_(self) -> str:
        return str(upward("html")(self))


class _TensorPair(NamedTuple):
    """The two tensors of one name, in one coordinate space, and the boxes that cut this space."""

    a: Tensor
    b: Tensor
    cut: BoxGrid


class _DiffTask(NamedTuple):
    """A range of boxes of a pair: the index of the pair, and the begin and end of the range."""

    pair: int
    begin: int
    end: int


class _Result(NamedTuple):
    """The sums over the boxes of a task, and the number of bytes read."""

    task: _DiffTask
    sums: PairSums
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class BoxComparison:
    """The pairs of tensors to compare; small enough to send to workers.

    Attributes:
        pairs: the pairs.
        paths: the paths of the files of each side.
        codings: decode or decrypt the files of each side.
    """

    pairs: tuple[_TensorPair, ...]
    paths: tuple[tuple[str, ...], tuple[str, ...]]
    codings: tuple[Coding | None, Coding | None]

    def tasks(self) -> list[tuple[_DiffTask, ...]]:
        """Divide the boxes into tasks of about `budget.TASK_BYTES`."""
        tasks: list[list[_DiffTask]] = [[]]
        room = budget.TASK_BYTES
        for number, pair in enumerate(self.pairs):
            count = len(pair.cut)
            each = max(1, (pair.a.spec.nbytes + pair.b.spec.nbytes) // max(count, 1))
            begin = 0
            while begin < count:
                boxes = min(count - begin, max(1, room // each))
                if tasks[-1] and each > room:
                    tasks.append([])
                    room = budget.TASK_BYTES
                    continue
                tasks[-1].append(_DiffTask(number, begin, begin + boxes))
                room -= boxes * each
                begin += boxes
        return [tuple(task) for task in tasks if task]


def compare(comparison: BoxComparison, tasks: Sequence[_DiffTask]) -> list[_Result]:
    """Compare the boxes of one task."""
    return [_compared(comparison, task) for task in tasks]


def _compared(comparison: BoxComparison, task: _DiffTask) -> _Result:
    pair = comparison.pairs[task.pair]
    readers = [
        RowBoxes(stored_tensor(tensor, paths, coding))
        for tensor, paths, coding in zip((pair.a, pair.b), comparison.paths, comparison.codings, strict=True)
    ]
    meter = PairMeter(pair.a.spec.dtype, pair.b.spec.dtype)
    sums, nbytes = PairSums(), 0
    for number in range(task.begin, task.end):
        box = pair.cut.box(number)
        contents = [reader.read(box) for reader in readers]
        of_box = meter.measure(*contents)
        nbytes += sum(content.nbytes for content in contents)
        if of_box.first >= 0 and box.shape:
            inside = np.unravel_index(of_box.first, box.shape)
            at = tuple(int(n) + start for n, start in zip(inside, box.start, strict=True))
            of_box = of_box._replace(first=int(np.ravel_multi_index(at, pair.cut.shape)))
        sums = sums.joined(of_box)
    return _Result(task, sums, nbytes)


# --- the whole --------------------------------------------------------------------------------------------------


def diff(
    a: Checkpoint,
    b: Checkpoint,
    *,
    tolerance: float = 0.0,
    relative: float | None = None,
    memory: int | None = None,
    threads: int | None = None,
    client: Any = None,
    progress: Callable[[Progress], None] | None = None,
) -> CheckpointDiff:
    """Return the differences of two checkpoints; see `reshard.diff`. `memory` is in bytes."""
    began = time.perf_counter()
    refuse_unshared(client, (file.path for side in (a, b) for file in side.files))
    for word, value in (("tolerance", tolerance), ("relative", relative)):
        if value is not None and not value >= 0:
            raise UsageError(f"{word} is {value}; expected 0 or more", code="out-of-range")
    names_a, names_b = a.all_names.keys() - a.extras.objects, b.all_names.keys() - b.extras.objects
    only_a, only_b = names_a - names_b, names_b - names_a
    both = [name for name in a.all_names if name in names_a and name not in only_a]
    reasons = [{**dict(incomplete(side)), **side.unreadable} for side in (a, b)]
    not_compared = {
        name: "; ".join(f"{title} {why[name]}" for title, why in zip("AB", reasons, strict=True) if name in why)
        for name in both
        if any(name in why for why in reasons)
    }
    comparable = [name for name in both if name not in not_compared]
    unlike = {name: reason for name in comparable if (reason := _unlike(a.tensors[name], b.tensors[name]))}
    numbers = [name for name in comparable if name not in unlike and a.tensors[name].text is None]
    thread_number = thread_count(threads)
    pairs, thread_number = _planned(a, b, numbers, environment.memory(memory), thread_number)
    comparison = BoxComparison(
        tuple(pairs), (tuple(file.path for file in a.files), tuple(file.path for file in b.files)), (a.coding, b.coding)
    )
    total = sum(pair.a.spec.nbytes + pair.b.spec.nbytes for pair in pairs)
    results: list[_Result] = []
    read = 0
    on_progress = progress_callback(progress, began)

    def add(of_task: list[_Result]) -> None:
        nonlocal read
        results.extend(of_task)
        read += sum(result.nbytes for result in of_task)
        on_progress(read, total)

    try:
        map_tasks(compare, comparison, comparison.tasks(), threads=thread_number, client=client, on_result=add)
    finally:
        for side in (a, b):
            store_of(side.coding).close()
    sums = dict.fromkeys(range(len(numbers)), PairSums())
    for result in sorted(results, key=lambda result: result.task):
        sums[result.task.pair] = sums[result.task.pair].joined(result.sums)
    diffs = [
        _of_sums(name, spec.shape, (spec.dtype.name, b.tensors[name].spec.dtype.name), sums[number])
        for number, (name, spec) in enumerate((name, a.tensors[name].spec) for name in numbers)
    ]
    diffs.sort(key=lambda each: (not each.not_finite, -each.relative, -each.differing))
    return CheckpointDiff(
        a.title, b.title, {each.name: each for each in diffs},
        tuple(name for name in a.all_names if name in only_a),
        tuple(name for name in b.all_names if name in only_b),
        unlike, not_compared, tolerance, relative, read, time.perf_counter() - began,
        tuple(dict.fromkeys((*a.warnings, *b.warnings))),
    )  # fmt: skip


def _unlike(a: Tensor, b: Tensor) -> str:
    """Return why two tensors cannot be compared element by element, or why their texts differ; else ""."""
    if a.text is not None or b.text is not None:
        texts = ["a tensor" if side.text is None else repr(side.text[:80]) for side in (a, b)]
        return "" if a.text == b.text else f"is {texts[0]} in A, {texts[1]} in B"
    if a.spec.shape != b.spec.shape:
        return f"has shape {shape_text(a.spec.shape)} in A, {shape_text(b.spec.shape)} in B"
    if a.spec.dtype is not b.spec.dtype and (a.spec.dtype.bits or b.spec.dtype.bits):
        return f"is {a.spec.dtype} in A, {b.spec.dtype} in B"
    return ""


def _planned(
    a: Checkpoint, b: Checkpoint, numbers: Sequence[str], memory: int | None, threads: int
) -> tuple[list[_TensorPair], int]:
    """Return the pairs to compare and the number of threads that fit in `memory`.

    If memory is short, boxes are smaller.

    Raises:
        BudgetError: `memory` is too little.
    """
    tensors = [_in_one_space(a.tensors[name], b.tensors[name]) for name in numbers]
    for most in (_MOST_BOX_BYTES, BOX_BYTES):
        nbytes = [min(most, _box_bytes(*pair)) for pair in tensors]
        of_thread = 3 * max(nbytes, default=0) + PAIR_BYTES
        try:
            limits = values_budget([a, b], of_thread, memory=memory, threads=threads)
        except BudgetError:
            if most == BOX_BYTES:
                raise
            continue
        break
    limits.reserve()
    pairs = [
        _TensorPair(*pair, BoxGrid.of(pair[0].spec.shape, _elements(pair, size)))
        for pair, size in zip(tensors, nbytes, strict=True)
    ]
    return pairs, limits.threads


def _elements(pair: tuple[Tensor, Tensor], nbytes: int) -> int:
    """Return the number of elements of a box of `nbytes` bytes."""
    return max(1, nbytes // max(side.spec.dtype.itemsize for side in pair))


def _in_one_space(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return both tensors in a common shape in which all their blocks are boxes; if there is none, as they are."""
    shape = a.spec.shape
    space = common(shape, [side.space or shape for side in (a, b)]) if a.space or b.space else None
    if space is None:  # if a side is fused, its blocks are divided at each read
        return a, b
    shared = Shared()
    first, second = (
        shared.in_space(side, space)._replace(spec=side.spec._replace(shape=space), space=None) for side in (a, b)
    )
    return first, second


def _box_bytes(a: Tensor, b: Tensor) -> int:
    """Return the bytes of a box: more if each of its rows is in many blocks, or if elements are strided."""
    if a.sharding.is_strided or b.sharding.is_strided:
        return _MOST_BOX_BYTES
    columns = max(len(side.sharding.blocks) // max(len(_first_rows(side)), 1) for side in (a, b))
    return min(_MOST_BOX_BYTES, max(BOX_BYTES, columns * _COLUMN_BYTES))


def _first_rows(tensor: Tensor) -> set[int]:
    return {block.start[0] for block in tensor.sharding.blocks if block.start}


def _of_sums(name: str, shape: Shape, dtypes: tuple[str, str], sums: PairSums) -> TensorDiff:
    """Return the difference of two tensors, given the sums over their elements."""
    size = prod(shape)
    largest = sums.largest if not sums.not_finite else nan if sums.has_nan else inf
    both = sqrt(sums.of_a) * sqrt(sums.of_b)
    relative = sqrt(sums.of_diff) / sqrt(sums.of_a) if sums.of_a else inf
    cosine = max(-1.0, min(1.0, sums.of_both / both)) if 0 < both < inf else None
    index = None
    if sums.first >= 0:
        index = tuple(int(n) for n in np.unravel_index(sums.first, shape)) if shape else ()
    return TensorDiff(
        name, shape, dtypes, sums.differing, sums.not_finite, largest, sums.distance / size if size else 0.0,
        0.0 if not sums.of_diff else inf if isnan(relative) else relative,
        1.0 if cosine is not None and not sums.differing else cosine, index,
    )  # fmt: skip
