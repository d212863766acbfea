"""What is computed with values that are not stored as they are: merged adapters, encrypted files, strided tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from adapters import matrices, merged, save, weights, written
from checkpoints import numbers, write_file
from dcp_files import cut, item, write_torch

import reshard

if TYPE_CHECKING:
    from pathlib import Path

    from checkpoints import Array


def assert_read(checkpoint: reshard.Checkpoint, full: dict[str, Array], tmp_path: Path) -> None:
    """Statistics are those of whole tensors, and these equal the checkpoint."""
    stats = checkpoint.stats()
    assert set(stats.tensors) == set(full)
    for name, array in full.items():
        assert stats.tensors[name].norm == pytest.approx(np.linalg.norm(array.astype(np.float64)), rel=1e-12)
        assert stats.tensors[name].max == array.astype(np.float64).max()
    whole = write_file(tmp_path / "whole.safetensors", written(full))
    for sides in ((checkpoint, whole), (whole, checkpoint)):
        assert reshard.diff(*sides)


def test_a_merged_adapter(tmp_path: Path) -> None:
    model = weights()
    pairs = matrices(model)
    base = reshard.open(write_file(tmp_path / "model.safetensors", written(model)))
    both = base.merge_lora(save(tmp_path / "lora", pairs))
    assert_read(both, merged(model, pairs), tmp_path)
    changed = {name for name in pairs if "lora_A" in name}
    assert len(reshard.diff(base, both).changed) == len(changed)


def test_strided_tensors(tmp_path: Path) -> None:
    """Items of a DCP whose elements lie in column-major order, with gaps, or are one for many."""
    full = numbers({"turned": (320, 300), "step": (400, 250)})
    full["rows"] = np.repeat(numbers({"rows": (7000, 1)})["rows"], 2, axis=1)
    gaps = np.full((400, 500), 7, np.float32)
    gaps[:, 1::2] = full["step"]
    lying = {
        "turned": {"storage": np.ascontiguousarray(full["turned"].T).reshape(-1), "strides": (1, 320)},
        "step": {"storage": gaps.reshape(-1), "strides": (500, 2), "first": 1},
        "rows": {"storage": np.ascontiguousarray(full["rows"][:, 0]), "strides": (1, 0)},
    }
    items = [
        (name, ((0, 0), array.shape), item(cut(array, ((0, 0), array.shape)), **lying[name]))
        for name, array in full.items()
    ]
    checkpoint = reshard.open(write_torch(tmp_path / "dcp", full, {0: items}))
    assert any(tensor.sharding.is_strided for tensor in checkpoint.tensors.values())
    assert_read(checkpoint, full, tmp_path)
