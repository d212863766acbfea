"""Adapters over layers of Conv1D and of Linear, which have one `fan_in_fan_out`: numpy's sums."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from adapters import ALPHA, RANK, save
from checkpoints import write_file
from refusals import failed, refused

import reshard
from reshard.errors import SourceError

if TYPE_CHECKING:
    from pathlib import Path

    from helpers import Array

CONV, LINEAR = True, False
Layers = dict[str, tuple[int, int, bool]]  # rows of B, columns of A, and the kind


def case(root: Path, layers: Layers, *, flag: bool, model_type: str = "", biases: bool = False) -> dict[str, Array]:
    """Write a base and an adapter; return the merged weights: W + s B A, or W + s (B A)^T."""
    rng, model, pairs, expected = np.random.default_rng(7), {}, {}, {}
    for name, (out, columns, kind) in layers.items():
        a, b = (rng.standard_normal(shape).astype("f4") for shape in ((RANK, columns), (out, RANK)))
        weight = rng.standard_normal((columns, out) if kind else (out, columns)).astype("f4")
        model[f"{name}.weight"] = weight
        expected[f"{name}.weight"] = weight + np.float32(ALPHA / RANK) * ((b @ a).T if kind else b @ a)
        if biases:
            model[f"{name}.bias"] = expected[f"{name}.bias"] = rng.standard_normal(out).astype("f4")
        pairs |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
    write_file(root / "base" / "model.safetensors", model)
    if model_type:
        (root / "base" / "config.json").write_text(json.dumps({"model_type": model_type}))
    save(root / "lora", pairs, fan_in_fan_out=flag)
    return expected


def assert_merged(root: Path, expected: dict[str, Array]) -> None:
    found = reshard.open(root / "base").merge_lora(str(root / "lora"))
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(np.asarray(found[name]), value, atol=1e-5, err_msg=name)


SQUARE: Layers = {"h.0.attn.c_proj": (8, 8, CONV)}
HEAD: Layers = {"lm_head": (10, 8, LINEAR)}


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize(
    ("layers", "model_type", "biases"),
    [
        ({"any.wide": (24, 8, CONV), "any.other": (10, 8, LINEAR)}, "", False),
        (SQUARE | HEAD, "gpt2", False),
        (SQUARE | HEAD, "openai-gpt", False),
        (SQUARE | {"score": (8, 8, LINEAR)}, "gpt2", False),
        (SQUARE | {"h.0.mlp.c_proj": (8, 32, CONV)} | HEAD, "", False),
        (SQUARE | {"h.0.mlp.c_proj": (8, 32, CONV)} | HEAD, "", True),
        ({"h.0.attn.c_proj": (8, 8, LINEAR), "h.0.mlp.c_proj": (8, 32, LINEAR)}, "", True),
        ({"h.0.attn.c_proj": (8, 8, LINEAR), "score": (8, 8, LINEAR)}, "gpt_bigcode", False),
    ],
)
def test_shapes_then_names_and_model_type(
    tmp_path: Path, layers: Layers, model_type: str, biases: bool, flag: bool
) -> None:
    """Whatever the flag says, which belongs to the layer that PEFT wrapped last."""
    assert_merged(tmp_path, case(tmp_path, layers, flag=flag, model_type=model_type, biases=biases))


def test_square_layers_of_llama_need_no_config(tmp_path: Path) -> None:
    layers: Layers = {f"layers.0.{name}": (8, 8, LINEAR) for name in ("q_proj", "k_proj", "o_proj")}
    assert_merged(tmp_path, case(tmp_path, layers | {"layers.0.up_proj": (24, 8, LINEAR)}, flag=False))


@pytest.mark.parametrize(
    ("layers", "flag"),
    [
        (SQUARE | HEAD, False),
        ({"x.mix": (8, 8, CONV), "x.wide": (24, 8, CONV)} | HEAD, False),
        ({"x.mix": (8, 8, LINEAR), "x.wide": (24, 8, CONV)}, True),
    ],
)
def test_square_layers_that_may_be_either(tmp_path: Path, layers: Layers, flag: bool) -> None:
    case(tmp_path, layers, flag=flag)
    square = next(iter(layers))
    with refused(SourceError, "unknown-kind", f"'{square}.weight'", "8 x 8", "config.json"):
        reshard.open(tmp_path / "base").merge_lora(str(tmp_path / "lora"))
    command = ("convert", tmp_path / "base", tmp_path / "out", "--to", "hf", "--lora", tmp_path / "lora")
    failed(4, "unknown-kind", *command, places=(square,))
    assert not (tmp_path / "out").exists()
