"""A small model, adapters for it, and what these make of it by numpy."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import write_file

import reshard
from reshard import Layout, LoRA, Strategy

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from helpers import Array

BF16 = np.dtype(ml_dtypes.bfloat16)
MODEL = {
    "model.embed_tokens.weight": (48, 32),
    "model.layers.0.q_proj.weight": (64, 32),
    "model.layers.0.k_proj.weight": (16, 32),
    "model.layers.0.down_proj.weight": (32, 80),
    "model.layers.0.norm.weight": (32,),
}
LAYERS = ("model.layers.0.q_proj", "model.layers.0.k_proj", "model.layers.0.down_proj")
RANK, ALPHA = 4, 6
CUTS = {"rows": ([2], [0, -1]), "columns": ([2], [-1, 0]), "both": ([2, 2], [1, 0]), "nested": ([4], [0, -1])}


def weights(dtype: str = "bfloat16", shapes: Mapping[str, tuple[int, ...]] = MODEL) -> dict[str, Array]:
    rng = np.random.default_rng(1)
    return {
        name: rng.standard_normal(shape).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        for name, shape in shapes.items()
    }


def matrices(model: Mapping[str, Array], layers: tuple[str, ...] = LAYERS, rank: int = RANK) -> dict[str, Array]:
    """A and B of some layers, by their names in PEFT."""
    rng = np.random.default_rng(2)
    found = {}
    for layer in layers:
        out, columns = model[f"{layer}.weight"].shape
        found[f"base_model.model.{layer}.lora_A.weight"] = rng.standard_normal((rank, columns), dtype=np.float32)
        found[f"base_model.model.{layer}.lora_B.weight"] = rng.standard_normal((out, rank), dtype=np.float32)
    return found


def written(bits: Mapping[str, Array]) -> dict[str, Array]:
    """The same with uint16 for bfloat16, as the helpers have it."""
    return {name: value.view(np.uint16) if value.dtype == BF16 else value for name, value in bits.items()}


def save(root: Path, pairs: Mapping[str, Array], **config: object) -> LoRA:
    """Write an adapter."""
    write_file(root / "adapter_model.safetensors", written(pairs))
    said = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", **config}
    (root / "adapter_config.json").write_text(json.dumps({key: one for key, one in said.items() if one is not ...}))
    return LoRA(str(root))


def product(pairs: Mapping[str, Array], layer: str) -> Array:
    a, b = (pairs[f"base_model.model.{layer}.lora_{side}.weight"].astype(np.float32) for side in "AB")
    return b @ a


def merged(model: Mapping[str, Array], pairs: Mapping[str, Array], scale: float = ALPHA / RANK) -> dict[str, Array]:
    """What numpy makes of whole matrices: in float32, and rounded once."""
    found = dict(model)
    for name in model:
        layer = name.removesuffix(".weight")
        if f"base_model.model.{layer}.lora_A.weight" in pairs:
            total = model[name].astype(np.float32) + np.float32(scale) * product(pairs, layer)
            found[name] = total.astype(model[name].dtype)
    return found


def cut(shapes: Mapping[str, Array], how: str) -> Strategy:
    matrix, axes = CUTS[how]
    layouts = {name: Layout.of(matrix, axes if one.ndim == 2 else [-1] * one.ndim) for name, one in shapes.items()}
    return Strategy.of(layouts)


def assert_arrays(found: Mapping[str, Any], expected: Mapping[str, Array]) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        got = np.asarray(found[name])
        assert (got.dtype, got.shape, got.tobytes()) == (value.dtype, value.shape, value.tobytes()), name


@pytest.fixture
def base(tmp_path: Path) -> reshard.Checkpoint:
    return reshard.open(write_file(tmp_path / "base" / "model.safetensors", written(weights())))


@pytest.fixture
def lora(tmp_path: Path) -> LoRA:
    return save(tmp_path / "lora", matrices(weights()))


EXPECTED = merged(weights(), matrices(weights()))
