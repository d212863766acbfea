"""Tensors that are computed in place, over computed ones, and below them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from adapters import assert_arrays, cut, matrices, merged, save, weights
from checkpoints import write_ranks

import reshard
from reshard.api.checkpoints import Checkpoint, record_of
from reshard.expressions.average import WeightedSum
from reshard.expressions.computed import computed
from reshard.expressions.operand import Operand

if TYPE_CHECKING:
    from pathlib import Path

    from reshard.core.model.checkpoint import Checkpoint as Record


def half_and_half(one: Record, other: Record) -> Checkpoint:
    expressions = {
        name: WeightedSum((Operand(one, name), Operand(other, name)), (0.5, 0.5), tensor.spec.dtype)
        for name, tensor in one.tensors.items()
    }
    return Checkpoint(computed(one, expressions, [other]))


def test_averages_and_adapters(tmp_path: Path) -> None:
    """An adapter in an average, and the average of two with adapters; both count what they read."""
    model = weights("float32")
    models = [model, {name: one * 3 for name, one in model.items()}]
    pairs = matrices(model)
    lora = save(tmp_path / "lora", pairs)
    sources = [
        reshard.open(write_ranks(tmp_path / how, bits, cut(bits, how)), strategy=cut(bits, how))
        for how, bits in zip(("rows", "columns"), models, strict=True)
    ]
    half = np.float32(0.5)

    def mean(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: half * one[name] + half * other[name] for name in one}

    total = sum(one.nbytes for one in model.values())
    later = half_and_half(*map(record_of, sources)).merge_lora(lora)
    first = half_and_half(*(record_of(source.merge_lora(lora)) for source in sources))
    for at, found, expected in (
        ("later", later, merged(mean(*models), pairs)),
        ("first", first, mean(*(merged(bits, pairs) for bits in models))),
    ):
        assert_arrays(found, expected)
        plan = reshard.plan(found, to="safetensors")
        assert plan.stats.bytes_read == 2 * total
        assert plan.run(tmp_path / at, fsync=False).bytes_read == 2 * total
        assert_arrays(reshard.open(tmp_path / at), expected)
