"""Weights and their masters: round masters to weights that are not stored, and compare stored weights with them."""

from __future__ import annotations

from dataclasses import replace
from itertools import starmap
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard.core.storage.places import any_store, can, in_batches
from reshard.dtypes import BY_NAME
from reshard.errors import Text, names
from reshard.expressions.arithmetic import rounded
from reshard.expressions.cast import Cast, Number
from reshard.expressions.computed import computed
from reshard.expressions.operand import Operand
from reshard.formats.deepspeed.model import MASTERS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from reshard.core.model.checkpoint import Checkpoint, Tensor
    from reshard.core.storage.base import ReadStore, Want
    from reshard.dtypes import DType
    from reshard.expressions.operand import Expression
    from reshard.formats.deepspeed.model import ModelStates

Arrays = list["NDArray[Any]"]

_SAMPLE = 64  # elements at the beginning and at the end of a tensor
_MOST_AT_URLS = 256  # tensors
_FLOATS = {"float32", "bfloat16", "float16"}
_DIFFERS = "is of another weight: the float32 master does not round to this one"
_WARNING = (
    "{root}: masters of {names} do not round to the weights, so they and their moments are of other weights; DeepSpeed "
    "converts to Universal Checkpoints so if a training has round_robin_gradients: read its own checkpoint instead"
)


def with_computed(checkpoint: Checkpoint, model: ModelStates, numbers: Mapping[str, float]) -> Checkpoint:
    """Return a checkpoint with tensors that are not stored: weights, and states that are single numbers.

    A weight that is not stored, or not as a whole, is its master, rounded; unreadable without one. Of tied weights one
    has a master.
    """
    tensors, unreadable = dict(checkpoint.tensors), dict(checkpoint.unreadable)
    rounded_to: dict[str, tuple[str, DType]] = {}
    for name, weight in model.module.items():
        kept = model.shared.get(name, name)
        master = f"{MASTERS}.{kept}"
        whole = tensors.get(master)
        if name in tensors and (whole is None or tensors[name].spec.shape == whole.spec.shape):
            continue
        whole = whole or tensors.get(kept)
        if whole is None:
            reason = unreadable.get(master)
            why = Text(f"is {master!r:.60}, rounded, which ", reason) if reason else "has no master, and is not stored"
            unreadable.setdefault(name, why)
            continue
        unreadable.pop(name, None)
        if whole.spec.dtype is weight.dtype:
            tensors[name] = whole._replace(spec=whole.spec._replace(name=name))
        else:
            tensors.pop(name, None)
            rounded_to[name] = whole.spec.name, weight.dtype
    checkpoint = replace(checkpoint, tensors=tensors, unreadable=unreadable)
    casts = {key: Cast(Operand(checkpoint, key[0]), key[1]) for key in dict.fromkeys(rounded_to.values())}
    constants = {value: Number(value, BY_NAME["float32"]) for value in dict.fromkeys(numbers.values())}
    expressions: dict[str, Expression] = {name: casts[key] for name, key in rounded_to.items()}
    expressions |= {name: constants[value] for name, value in numbers.items() if name not in tensors}
    return computed(checkpoint, expressions) if expressions else checkpoint


def with_masters_compared(checkpoint: Checkpoint) -> Checkpoint:
    """Compare samples of masters with the stored weights; if one differs, make its states unreadable."""
    compared = [
        name
        for name, weight in checkpoint.tensors.items()
        if (master := checkpoint.tensors.get(f"{MASTERS}.{name}")) and _are_comparable(master, weight)
    ]
    if any(can(file.path).has_latency for file in checkpoint.files):
        compared = compared[:: max(len(compared) // _MOST_AT_URLS, 1)]
    samples_read = in_batches(_samples(checkpoint, name) for name in compared)
    differing = {name for name, samples in samples_read if not all(starmap(_rounds, samples))}
    if not differing:
        return checkpoint
    wrong = {
        state: _DIFFERS
        for state, tensor in checkpoint.tensors.items()
        if state not in differing and state.partition(".")[2] in differing and tensor.spec.shape
    }
    warning = _WARNING.format(root=checkpoint.root, names=names(sorted(differing), most=3))
    return replace(
        checkpoint, tensors={name: tensor for name, tensor in checkpoint.tensors.items() if name not in wrong},
        unreadable={**checkpoint.unreadable, **wrong}, warnings=(*checkpoint.warnings, warning),
    )  # fmt: skip


def _are_comparable(master: Tensor, weight: Tensor) -> bool:
    """Return whether a weight is stored, and has the shape of its master."""
    floats = {master.spec.dtype.name, weight.spec.dtype.name} <= _FLOATS
    is_strided = master.sharding.is_strided or weight.sharding.is_strided
    return floats and not is_strided and master.spec.shape == weight.spec.shape and 0 not in weight.spec.shape


def _samples(checkpoint: Checkpoint, name: str) -> tuple[tuple[str, list[Arrays]], ReadStore, list[Want]]:
    """Return arrays for the first and the last elements of a master and its weight, and the requests that fill them."""
    pair = checkpoint.tensors[f"{MASTERS}.{name}"], checkpoint.tensors[name]
    samples: list[Arrays] = []
    wants: list[Want] = []
    for index in (0, -1):
        blocks = [tensor.sharding.blocks[index].shape for tensor in pair]
        whole_rows = len({block[1:] for block in blocks}) == 1
        count = min(_SAMPLE, *(prod(block) if whole_rows else block[-1] for block in blocks))
        arrays = [np.empty(count, tensor.spec.dtype.numpy()) for tensor in pair]
        for tensor, array in zip(pair, arrays, strict=True):
            replica = tensor.sharding.replicas[index][0]
            begin, nbytes = tensor.runs[replica.runs_index][index]
            offset = begin if index == 0 else begin + nbytes - array.nbytes
            wants.append((checkpoint.files[replica.file].path, offset, array.view(np.uint8).data))
        samples.append(arrays)
    return (name, samples), any_store(), wants


def _rounds(master: NDArray[Any], weight: NDArray[Any]) -> bool:
    """Return whether elements of a master round to elements of a weight."""
    expected = np.empty_like(weight)
    rounded(master, expected)
    return np.array_equal(expected, weight, equal_nan=True)
