"""Averages of checkpoints: weighted sums in float32, rounded once.

The arithmetic: `acc = f32(w0) * f32(a)`, then `acc + f32(w1) * f32(b)` and so on, in the given order; each product and
each sum is rounded to float32 by itself, and the result once to its dtype. float64 is summed in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard.core.layout.block import flat_boxes
from reshard.core.model.facts import Computation, Extras, Opening
from reshard.dtypes import by_name
from reshard.errors import Faults, Option, SourceError, Text, UsageError, names
from reshard.expressions.arithmetic import rounded, scratch
from reshard.expressions.computed import computed
from reshard.expressions.model_config import config_of_average
from reshard.expressions.operand import AnyBox, Operand
from reshard.expressions.quantized.methods import way_out
from reshard.strategy.names import is_step, is_training_state, optimizer_states

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from numpy.typing import NDArray

    from reshard.core.layout.block import Block, Shape
    from reshard.core.model.checkpoint import Checkpoint, Tensor, TensorSpec
    from reshard.dtypes import DType
    from reshard.expressions.operand import Expression


LARGEST = float(np.finfo(np.float32).max)
"""The largest weight."""

CHUNK = 1 << 15
"""How many elements are added at once, so that they stay in a core's own cache."""


COMPARED_BYTES = 1 << 20
"""The most bytes of a tensor that are compared whole before a run."""

_SAMPLES, _SAMPLE = 8, 16 << 10
"""The number of samples of larger tensors, and the bytes of each."""

FLOATS = ("float32", "bfloat16", "float16", "float64")
"""The dtypes that are averaged."""

_SUM_TOLERANCE = 1e-6
"""How far a sum of weights may be from 1 without a warning."""


@dataclass(frozen=True, slots=True, eq=False)
class WeightedSum(AnyBox):
    """The weighted sum of tensors of one shape, in float32, or in float64 if an operand is float64.

    Attributes:
        operands: the tensors, in the order in which they are added.
        weights: their weights.
        dtype: the dtype of the result.
        shift: a number that is added at the end, if it is not 0.
        wide: the dtype of the sums.
    """

    operands: tuple[Operand, ...]
    weights: tuple[float, ...]
    dtype: DType
    shift: float = 0.0
    wide: np.dtype[Any] = field(init=False)

    def __post_init__(self) -> None:
        wide = np.float64 if any(operand.spec.dtype.name == "float64" for operand in self.operands) else np.float32
        object.__setattr__(self, "wide", np.dtype(wide))

    @property
    def shape(self) -> Shape:
        """Return the shape of the result."""
        return self.operands[0].spec.shape

    @property
    def scratch(self) -> int:
        """Return the scratch bytes for each element: a sum, a product, and an operand."""
        return 2 * self.wide.itemsize + max(op.spec.dtype.itemsize for op in self.operands)

    def evaluate(self, box: Block, out: NDArray[Any]) -> None:
        """Fill an array with sums."""
        wide = self.wide
        with (
            scratch((out.size,), wide) as total,
            scratch((min(out.size, CHUNK),), wide) as product,
            np.errstate(over="ignore", invalid="ignore"),
        ):
            for number, (operand, weight) in enumerate(zip(self.operands, self.weights, strict=True)):
                factor = wide.type(weight)
                with scratch(box.shape, operand.spec.dtype.carrier()) as bits:
                    operand.read_into(box, bits)
                    content = bits.reshape(-1).view(operand.spec.dtype.numpy())
                    for begin in range(0, out.size, CHUNK):
                        part = total[begin : begin + CHUNK]
                        target = product[: len(part)] if number else part
                        np.copyto(target, content[begin : begin + CHUNK])
                        np.multiply(target, factor, out=target)
                        if number:
                            np.add(part, target, out=part)
            if self.shift:
                np.add(total, wide.type(self.shift), out=total)
            rounded(total, out.reshape(-1))

    def definition(self) -> str:
        """Return the weights and the dtype."""
        weights = [float.hex(float(weight)) for weight in (*self.weights, self.shift)]
        return f"sum {weights} {self.dtype}"


@dataclass(frozen=True, slots=True, eq=False)
class Same(AnyBox):
    """A tensor that must be equal in all checkpoints, such as one of integers."""

    operands: tuple[Operand, ...]

    @property
    def dtype(self) -> DType:
        """Return the dtype of the first operand."""
        return self.operands[0].spec.dtype

    @property
    def shape(self) -> Shape:
        """Return the shape of the result."""
        return self.operands[0].spec.shape

    @property
    def scratch(self) -> int:
        """Return the scratch bytes for each element: two operands and the result of their comparison."""
        return 2 * self.dtype.itemsize + 1

    def evaluate(self, box: Block, out: NDArray[Any]) -> None:
        """Fill an array with the common values.

        Raises:
            SourceError: they differ.
        """
        first, *others = self.operands
        out[...] = first.read(box)
        bits = self.dtype.carrier()
        for other in others:
            if not np.array_equal(other.read(box).view(bits), out.view(bits)):
                raise SourceError(
                    f"tensor {first.name!r} of {other.checkpoint.root} differs from that of {first.checkpoint.root}",
                    code="different-values", facts=[f"{self.dtype} cannot be averaged"],
                )  # fmt: skip

    def definition(self) -> str:
        """Return the name of the rule."""
        return f"same of {len(self.operands)}"


def schedule(name: str, count: int) -> tuple[float, ...]:
    """Return weights, oldest first, for an average that imitates a decay of the learning rate.

    If the training goes on from the oldest of n checkpoints, and the update between checkpoints i - 1 and i is scaled
    by d(i / n), the result is their average with the weights d(i / n) - d((i + 1) / n), where d(0) = 1 and d(1) = 0:

    * `linear`: d(x) = 1 - x, and the weights are 1 / n;
    * `minus-sqrt`: d(x) = 1 - sqrt(x), and the weights are sqrt((i + 1) / n) - sqrt(i / n).

    Sources: the warmup-stable-merge schedules of arXiv:2507.17634, as in `tools/checkpoint/weighted_merge.py` of
    Megatron-LM (pull request 5114).

    Raises:
        UsageError: there is no such schedule.

    >>> schedule("linear", 4)
    (0.25, 0.25, 0.25, 0.25)
    >>> [round(weight, 4) for weight in schedule("minus-sqrt", 4)]
    [0.5, 0.2071, 0.1589, 0.134]
    """
    if name not in _DECAYS:
        raise UsageError(f"unknown schedule {name!r:.60}", code="unknown-schedule", facts=[f"known: {names(_DECAYS)}"])
    decay = [*(_DECAYS[name](index / count) for index in range(1, count)), 0.0]
    later = [a - b for a, b in pairwise(decay)]
    return (1 - math.fsum(later), *later)


_DECAYS: dict[str, Callable[[float], float]] = {"linear": lambda x: 1 - x, "minus-sqrt": lambda x: 1 - math.sqrt(x)}
SCHEDULES = tuple(_DECAYS)


def average(
    inputs: Sequence[Checkpoint],
    weights: Sequence[float] | str | None = None,
    dtype: str | None = None,
    states: bool = False,
    *,
    compare: bool = True,
) -> Checkpoint:
    """Return the weighted sum of checkpoints; only samples of integers and the like are read.

    Args:
        inputs: the checkpoints, of any layouts and formats.
        weights: a factor for each; by default they are equal, with the sum 1. Or the name of a `schedule`; the
            checkpoints are then in the order of their steps.
        dtype: the dtype of all results that are floats; by default each has the dtype in the first checkpoint.
        states: average optimizer states, too. Other training state, such as the step, is taken from the first.
        compare: compare samples of tensors that are not floats, such as integers, which must be equal; all of their
            bytes are compared when they are read.

    Raises:
        SourceError: the checkpoints have other names, shapes or kinds of dtypes, or tensors that cannot be averaged;
            all at once.
        UsageError: fewer than two checkpoints, or weights or a dtype that cannot be used.
    """
    factors = _factors(inputs, weights)
    target = None if dtype is None else _float(dtype)
    for each in inputs:
        each.require_whole(numbered=False)  # all of them are given
    left_out, kept = _left_out(inputs, states=states)
    first, *others = chosen = [each.unbound().without(left_out) for each in inputs]
    faults = Faults(f"average of {names([each.root for each in inputs], most=3)}")
    averaged = [name for name in first.tensors if name not in kept]
    _check_names(chosen, kept, faults)
    expressions: dict[str, Expression] = {}
    shared = _shared_keys(chosen, averaged)
    by_key: dict[Hashable, Expression] = {}
    for name in averaged:
        if any(name not in each.tensors for each in others):
            continue
        operands = tuple(Operand(each, name) for each in chosen)
        if not _fits(operands, faults, compare=compare):
            continue
        source = operands[0].spec.dtype
        key = shared.get(name, name)
        if key not in by_key:
            is_float = _kind(source) == "float"
            by_key[key] = WeightedSum(operands, factors, target or source) if is_float else Same(operands)
        expressions[name] = by_key[key]
    if not averaged:
        faults.add("no tensor", "is left; they are all optimizer states or training state", code="no-tensors")
    faults.raise_if_any(SourceError)
    options = {"weights": list(factors), "dtype": target and target.name, "states": states}
    base = replace(
        first, strategy=None, origin=None, warnings=(*_warnings(inputs), *_sum_warning(factors)),
        opening=Opening(computation=Computation("average", options, tuple(inputs))),
        extras=Extras(
            first.extras.described_by, paths=first.extras.paths,
            model_config=config_of_average(inputs[0], target), arguments=first.extras.arguments,
        ),
    )  # fmt: skip
    return computed(base, expressions, others)


def _factors(inputs: Sequence[Checkpoint], weights: Sequence[float] | str | None) -> tuple[float, ...]:
    """Return the weights; raise `UsageError` if they cannot be used."""
    if not inputs:
        raise UsageError("no checkpoint is given to average", code="no-sources", hint="give two or more")
    if len(inputs) == 1:
        raise UsageError(
            f"{inputs[0].root} is the only checkpoint to average", code="one-source", hint="give two or more"
        )
    if isinstance(weights, str):
        return schedule(weights, len(inputs))
    if weights is None:
        return (1 / len(inputs),) * len(inputs)
    weights = list(weights)
    if len(weights) != len(inputs):
        raise UsageError(
            f"{len(inputs)} checkpoints have {len(weights)} weights", code="wrong-count", hint="give one for each"
        )
    for each in weights:
        is_number = isinstance(each, int | float | np.number) and not isinstance(each, bool)
        if not (is_number and abs(each) <= LARGEST):
            raise UsageError(f"weight {each!r:.60} is not a finite number of float32", code="bad-weight")
    return tuple(map(float, weights))


def _float(dtype: str) -> DType:
    """Return the dtype of averages; raise `UsageError` if it is not a plain float."""
    result = by_name(dtype, UsageError, FLOATS)
    if _kind(result) != "float":
        raise UsageError(
            f"averages cannot be {result}", code="unsupported-dtype",
            hint=f"give {names(FLOATS)}",
        )  # fmt: skip
    return result


def _sum_warning(factors: Sequence[float]) -> list[str]:
    total = math.fsum(factors)
    is_one = abs(total - 1) <= _SUM_TOLERANCE
    return [] if is_one else [f"the sum of the weights is {total:.6g}, not 1; they are used as they are"]


def _warnings(inputs: Sequence[Checkpoint]) -> dict[str, None]:
    return dict.fromkeys(warning for each in inputs for warning in each.warnings)


def _left_out(inputs: Sequence[Checkpoint], *, states: bool) -> tuple[set[str], set[str]]:
    """Return the names that are left out, and the names taken unchanged from the first checkpoint."""
    every = set[str]().union(*(each.all_names for each in inputs))
    objects = set[str]().union(*(each.extras.objects for each in inputs))
    training: set[str] = set()
    for each in inputs:
        training |= {name for name, tensor in each.tensors.items() if is_training_state(name, tensor)}
    words = frozenset[str]().union(*(each.opening.states for each in inputs))
    of_optimizer = optimizer_states(every, words)
    if not states:
        return {*objects, *of_optimizer, *training}, set()
    if not (of_optimizer or training):
        reason = Text(Option("states"), " has no effect: the checkpoints have no optimizer states")
        raise UsageError(reason, code="no-effect", hint="leave it out")
    kept = {name for name in training if name in inputs[0].tensors and not _is_averaged(name, inputs[0].tensors[name])}
    return objects | {name for name in training if name not in inputs[0].tensors}, kept


def _is_averaged(name: str, tensor: Tensor) -> bool:
    """Return whether training state is averaged: floats are, texts and counters are not."""
    return tensor.text is None and not (is_step(name, tensor.spec.shape) and _kind(tensor.spec.dtype) != "float")


def _check_names(chosen: Sequence[Checkpoint], kept: set[str], faults: Faults) -> None:
    """Add a fault for each tensor that a checkpoint lacks or cannot read."""
    every = dict.fromkeys(name for each in chosen for name in each.tensors if name not in kept)
    for each in chosen:
        for name, reason in each.unreadable.items():
            faults.add(f"tensor {name!r} of {each.root}", reason, code="unreadable-tensor")
        for name in every:
            if name not in each.tensors and name not in each.unreadable:
                having = names([other.root for other in chosen if name in other.tensors], most=3)
                faults.add(
                    f"tensor {name!r}", f"is in {having} and not in {each.root}", code="missing-tensor",
                    alike=f"{having} {each.root}", hint=Text("leave such tensors out: ", Option("exclude", "NAME")),
                )  # fmt: skip


def _fits(operands: Sequence[Operand], faults: Faults, *, compare: bool) -> bool:
    """Add the faults of a tensor; return whether it fits."""
    count = faults.count
    first, *others = operands
    name, specs = first.name, [operand.spec for operand in operands]
    where = f"tensor {name!r}"
    for operand in operands:
        try:
            operand.require()
        except SourceError as error:
            faults.add(where, error)
        if fault := _unsupported(operand):
            hint = way_out(operand.checkpoint) if "quantized" in fault else ""
            faults.add(where, f"{fault} in {operand.checkpoint.root}", code="not-averageable", hint=hint)
    for operand in others:
        mine, its = first.spec, operand.spec
        roots = first.checkpoint.root, operand.checkpoint.root
        if mine.shape != its.shape:
            problem = f"is {[*mine.shape]} in {roots[0]} and {[*its.shape]} in {roots[1]}"
            faults.add(where, problem, code="different-shapes")
        elif _kind(mine.dtype) != _kind(its.dtype):
            faults.add(where, f"is {mine.dtype} in {roots[0]} and {its.dtype} in {roots[1]}", code="different-dtypes")
    if compare and count == faults.count and _kind(specs[0].dtype) != "float":
        for operand in others:
            if not _seem_equal(first, operand):
                problem = f"is {specs[0].dtype} and differs in {first.checkpoint.root} and {operand.checkpoint.root}"
                faults.add(
                    where, problem, code="different-values", hint=Text("leave it out: ", Option("exclude", name))
                )
    return count == faults.count


def _kind(dtype: DType) -> str:
    """Return `float` for dtypes that are averaged, else the dtype's name, as others must be equal."""
    return "float" if dtype.name in FLOATS else dtype.name


def _unsupported(operand: Operand) -> str:
    """Return why a tensor cannot be averaged, or an empty string."""
    dtype, name = operand.spec.dtype, operand.name
    if dtype.bits or dtype.name.startswith("float8"):
        return f"is {dtype}, which is quantized,"
    if dtype.name in {"int8", "uint8", "int4", "int16", "int32"}:
        scales = {f"{name}_scale_inv", f"{name}_scale", f"{name}.scale", f"{name.removesuffix('.weight')}.scale"}
        if operand.checkpoint.opening.quantized is not None and len(operand.spec.shape) > 1:
            return f"is {dtype} in a checkpoint that is quantized,"
        if scale := next((each for each in sorted(scales) if each in operand.checkpoint.tensors), ""):
            return f"is {dtype} and has scales, {scale!r}: it is quantized"
    if dtype.name.startswith("complex"):
        return f"is {dtype}, of which no average is made,"
    return ""


def _seem_equal(first: Operand, second: Operand) -> bool:
    """Compare the bits of two tensors: small ones fully, others by samples."""
    spec = first.spec
    size, bits = math.prod(spec.shape), spec.dtype.carrier()
    length = size if spec.nbytes <= COMPARED_BYTES else _SAMPLE // spec.dtype.itemsize
    last = size - length
    begins = {0, last, *(Random(first.name).randrange(last) for _ in range(_SAMPLES if last else 0))}  # noqa: S311
    return all(
        np.array_equal(first.read(box).view(bits), second.read(box).view(bits))
        for begin in sorted(begins)
        for box in flat_boxes(spec.shape, begin, begin + length)
    )


def _shared_keys(chosen: Sequence[Checkpoint], averaged: Sequence[str]) -> Mapping[str, Hashable]:
    """Return a key for each tensor that shares its bytes with another one in all checkpoints.

    Tensors of one key are tied, and are computed once.
    """
    candidates = [list(averaged)]
    for checkpoint in chosen:
        for key in (_start_of, _extents_of):  # the first is cheap
            candidates = [part for members in candidates for part in _alike(members, checkpoint.tensors, key)]
    return {name: (number, members[0]) for number, members in enumerate(candidates) for name in members}


def _alike(
    members: Sequence[str], tensors: Mapping[str, Tensor], key: Callable[[Tensor, str], Hashable]
) -> list[list[str]]:
    """Return the groups of several names whose tensors have equal keys."""
    groups: dict[Hashable, list[str]] = {}
    for name in members:
        if name in tensors:
            groups.setdefault(key(tensors[name], name), []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def _start_of(tensor: Tensor, name: str) -> Hashable:
    """Return the file and first byte range of a tensor's first block; its name if there is none."""
    replicas = tensor.sharding.replicas[0] if tensor.sharding.replicas else ()
    runs = tensor.runs[replicas[0].runs_index] if replicas else ()
    return (replicas[0].file, runs[0]) if runs else name


def _extents_of(tensor: Tensor, _name: str) -> Hashable:
    """Return everything that defines the values of a tensor."""
    spec: TensorSpec = tensor.spec._replace(name="")
    return spec, tensor.space, tuple((block, replicas[:1]) for block, replicas in tensor.shards)
