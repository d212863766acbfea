"""Adapters that are refused: what their files, their configuration or the weights say does not go together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from adapters import matrices, save, weights, written
from checkpoints import write_file, write_ranks

import reshard
from reshard import Layout, LoRA, Strategy
from reshard.errors import SourceError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from helpers import Array


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "LOHA"}, r"peft_type: is 'LOHA'; expected LORA"),
        ({"peft_type": ...}, r"peft_type: is None; expected LORA"),
        ({"use_dora": True}, r"use_dora: is True: it also scales the rows of the sum \(DoRA\)"),
        ({"bias": "lora_only"}, r"bias: is 'lora_only': biases were trained too"),
        ({"lora_bias": True}, r"lora_bias: is True: it adds to biases too"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save: is \['lm_head'\]: it has whole weights of its own"),
        ({"target_parameters": ["experts.gate_up_proj"]}, r"target_parameters: is .*it is of parameters"),
        ({"layer_replication": [[0, 4], [2, 5]]}, r"layer_replication: is .*its model has layers twice"),
        ({"init_lora_weights": "pissa_niter_4"}, r"init_lora_weights: is 'pissa_niter_4', which changes the weights"),
        ({"r": 10**9}, r"r: is 1000000000; expected a whole number from 1 to"),
        ({"r": 0}, r"r: is 0; expected a whole number"),
        ({"r": True}, r"r: is True; expected"),
        ({"r": ...}, r"r: is missing; expected the rank"),
        ({"r": 5}, r"expected \[5, in\] and \[out, 5\], as adapter_config.json says"),
        ({"rank_pattern": {"q_proj": 8}}, r"has A \[4, 32\] and B \[64, 4\]; expected \[8, in\]"),
        ({"rank_pattern": {"(a|a)*b": 8}}, r"rank_pattern: is .*expected names or simple patterns"),
        ({"rank_pattern": {"[z-a]": 8}}, r"rank_pattern: is .*expected names or simple patterns"),
        ({"rank_pattern": {".*.*.*b": 8}}, r"rank_pattern: is .*expected names or simple patterns"),
        ({"rank_pattern": ["q_proj"]}, r"rank_pattern: is \['q_proj'\]; expected"),
        ({"alpha_pattern": {"q_proj": float("nan")}}, r"alpha_pattern: is .*; expected names or simple patterns"),
        ({"lora_alpha": float("nan")}, r"lora_alpha: is nan; expected a number"),
        ({"lora_alpha": float("inf")}, r"lora_alpha: is inf; expected a number"),
        ({"lora_alpha": 10**400}, r"lora_alpha: is 1000.*; expected a number"),
        ({"lora_alpha": "16"}, r"lora_alpha: is '16'; expected a number"),
        ({"use_rslora": "yes"}, r"use_rslora: is 'yes'; expected true or false"),
    ],
)
def test_configurations(tmp_path: Path, base: reshard.Checkpoint, config: dict[str, Any], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        base.merge_lora(save(tmp_path / "lora", matrices(weights()), **config))


def renamed(old: str, new: str) -> dict[str, Array]:
    return {name.replace(old, new): one for name, one in matrices(weights()).items()}


Q = "base_model.model.model.layers.0.q_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{Q}.lora_B.weight": None}, r"layer 'model.layers.0.q_proj': has no lora_B; expected A and B"),
        ({f"{Q}.lora_magnitude_vector": np.ones(4, np.float32)}, r"lora_magnitude_vector': is neither lora_A nor"),
        ({f"{Q}.bias": np.ones(4, np.float32)}, r"q_proj.bias': is neither lora_A nor lora_B of a layer"),
        ({f"{Q}.lora_A.default.weight": np.ones((4, 32), np.float32)}, r"is that of model.layers.0.q_proj once more"),
        ({f"{Q}.lora_A.weight": np.ones((4, 32), np.int8)}, r"lora_A.weight is int8; expected bfloat16, float16"),
        ({f"{Q}.lora_A.weight": np.ones((4, 32), np.float64)}, r"lora_A.weight is float64; expected bfloat16"),
        ({f"{Q}.lora_A.weight": np.ones((4, 8, 3, 3), np.float32)}, r"has A \[4, 8, 3, 3\] and B \[64, 4\]; expected"),
        ({f"{Q}.lora_B.weight": np.ones((64, 3), np.float32)}, r"has A \[4, 32\] and B \[64, 3\]; expected \[4, in\]"),
        ({f"{Q}.lora_B.weight": np.ones((65, 4), np.float32)}, r"is bfloat16 \[64, 32\] in .*; expected \[65, 32\] of"),
        (
            {
                f"{Q}.lora_embedding_A": np.ones((4, 64), np.float32),
                f"{Q}.lora_embedding_B": np.ones((32, 4), np.float32),
            },
            r"layer 'model.layers.0.q_proj.weight': has two pairs",
        ),
        (
            {
                "base_model.model.../../etc.lora_A.weight": np.ones((4, 64), np.float32),
                "base_model.model.../../etc.lora_B.weight": np.ones((32, 4), np.float32),
            },
            r"layer '../../etc.weight': matches no tensor",
        ),
    ],
)
def test_matrices(tmp_path: Path, base: reshard.Checkpoint, change: dict[str, Array | None], message: str) -> None:
    pairs = {name: one for name, one in {**matrices(weights()), **change}.items() if one is not None}
    with pytest.raises(SourceError, match=message):
        base.merge_lora(save(tmp_path / "lora", pairs))


def test_weights(tmp_path: Path, base: reshard.Checkpoint, lora: LoRA) -> None:
    """Those that are not there, with the nearest; quantised ones; and everything at once."""
    with pytest.raises(SourceError, match=r"has 3 faults:\n.*nearest is 'model.layers.\*.down_proj.weight', in "):
        base.merge_lora(save(tmp_path / "other", renamed("layers.0", "layers.7")))
    model = {**written(weights()), "model.layers.0.q_proj.weight": np.ones((64, 32), np.int8)}
    quantised = reshard.open(write_file(tmp_path / "int8.safetensors", model))
    with pytest.raises(
        SourceError, match=r"is int8 \[64, 32\] in .*; expected \[64, 32\] of bfloat16, float16, float32"
    ):
        quantised.merge_lora(lora)


def test_what_is_no_adapter(tmp_path: Path, base: reshard.Checkpoint) -> None:
    with pytest.raises(SourceError, match=r"none: has no adapter_config.json; expected the directory of a LoRA"):
        base.merge_lora(LoRA(str(tmp_path / "none")))
    lora = save(tmp_path / "lora", matrices(weights()))
    weights_file, config = (tmp_path / "lora" / name for name in ("adapter_model.safetensors", "adapter_config.json"))
    weights_file.rename(tmp_path / "lora" / "adapter_model.bin")
    with pytest.raises(
        SourceError, match=r"has adapter_model.bin, a pickle, which is not read; expected adapter_model.s"
    ):
        base.merge_lora(lora)
    write_file(weights_file, {})
    with pytest.raises(SourceError, match="has no tensors; expected lora_A and lora_B of each layer"):
        base.merge_lora(lora)
    weights_file.write_bytes(b"\xff" * 100)
    with pytest.raises(SourceError, match=r"adapter_model.safetensors: "):
        base.merge_lora(lora)
    for content in ("[1]", "{", '{"r": 1, "r": 2}', "\xff", "[" * 100_000):
        config.write_text(content, encoding="latin-1")
        with pytest.raises(SourceError, match=r"adapter_config.json: (is not JSON|expected a JSON object)"):
            base.merge_lora(lora)


def test_one_stage_of_a_pipeline(tmp_path: Path, lora: LoRA) -> None:
    model = weights()
    stages = Strategy.of(
        {name: {int("q_proj" in name): Layout.of([1], [-1] * one.ndim)} for name, one in model.items()}
    )
    source = reshard.open(write_ranks(tmp_path / "src", written(model), stages), strategy=stages, stage=1)
    with pytest.raises(UsageError, match="is one stage of a pipeline, and an adapter is of all; open all stages"):
        source.merge_lora(lora)
