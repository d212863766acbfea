"""Adapters that are refused: what their files, their configuration or the weights say does not go together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from adapters import matrices, save, weights, written
from checkpoints import write_file, write_ranks
from refusals import refused

import reshard
from reshard import Layout, LoRA, Strategy
from reshard.errors import SourceError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from helpers import Array


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"peft_type": "LOHA"}, ("not-lora", "peft_type", "'LOHA'")),
        ({"peft_type": ...}, ("not-lora", "peft_type")),
        ({"use_dora": True}, ("unsupported-adapter", "use_dora")),
        ({"bias": "lora_only"}, ("unsupported-adapter", "bias", "'lora_only'")),
        ({"lora_bias": True}, ("unsupported-adapter", "lora_bias")),
        ({"modules_to_save": ["lm_head"]}, ("unsupported-adapter", "modules_to_save", "'lm_head'")),
        ({"target_parameters": ["experts.gate_up_proj"]}, ("unsupported-adapter", "target_parameters")),
        ({"layer_replication": [[0, 4], [2, 5]]}, ("unsupported-adapter", "layer_replication")),
        ({"init_lora_weights": "pissa_niter_4"}, ("unsupported-init", "init_lora_weights", "'pissa_niter_4'")),
        ({"r": 10**9}, ("bad-value", "r", "1000000000", "1 to")),
        ({"r": 0}, ("bad-value", "r", "is 0")),
        ({"r": True}, ("bad-value", "r")),
        ({"r": ...}, ("missing-key", "r")),
        ({"r": 5}, ("wrong-shape", "[5, in]", "[out, 5]", "adapter_config.json")),
        ({"rank_pattern": {"q_proj": 8}}, ("wrong-shape", "[4, 32]", "[64, 4]", "[8, in]")),
        ({"rank_pattern": {"(a|a)*b": 8}}, ("bad-value", "rank_pattern")),
        ({"rank_pattern": {"[z-a]": 8}}, ("bad-value", "rank_pattern")),
        ({"rank_pattern": {".*.*.*b": 8}}, ("bad-value", "rank_pattern")),
        ({"rank_pattern": ["q_proj"]}, ("bad-value", "rank_pattern", "'q_proj'")),
        ({"alpha_pattern": {"q_proj": float("nan")}}, ("bad-value", "alpha_pattern")),
        ({"lora_alpha": float("nan")}, ("bad-value", "lora_alpha")),
        ({"lora_alpha": float("inf")}, ("bad-value", "lora_alpha")),
        ({"lora_alpha": 10**400}, ("bad-value", "lora_alpha", "1000")),
        ({"lora_alpha": "16"}, ("bad-value", "lora_alpha", "'16'")),
        ({"use_rslora": "yes"}, ("bad-value", "use_rslora", "'yes'")),
    ],
)
def test_configurations(
    tmp_path: Path, base: reshard.Checkpoint, config: dict[str, Any], expected: tuple[str, ...]
) -> None:
    with refused(SourceError, *expected):
        base.merge_lora(save(tmp_path / "lora", matrices(weights()), **config))


def renamed(old: str, new: str) -> dict[str, Array]:
    return {name.replace(old, new): one for name, one in matrices(weights()).items()}


Q = "base_model.model.model.layers.0.q_proj"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({f"{Q}.lora_B.weight": None}, ("missing-tensor", "'model.layers.0.q_proj'", "lora_B")),
        (
            {f"{Q}.lora_magnitude_vector": np.ones(4, np.float32)},
            ("unexpected-tensor", "lora_magnitude_vector", "lora_A"),
        ),
        ({f"{Q}.bias": np.ones(4, np.float32)}, ("unexpected-tensor", "q_proj.bias", "lora_A", "lora_B")),
        ({f"{Q}.lora_A.default.weight": np.ones((4, 32), np.float32)}, ("duplicate-name", "model.layers.0.q_proj")),
        ({f"{Q}.lora_A.weight": np.ones((4, 32), np.int8)}, ("wrong-dtype", "lora_A.weight", "int8", "bfloat16")),
        ({f"{Q}.lora_A.weight": np.ones((4, 32), np.float64)}, ("wrong-dtype", "lora_A.weight", "float64", "bfloat16")),
        ({f"{Q}.lora_A.weight": np.ones((4, 8, 3, 3), np.float32)}, ("wrong-shape", "[4, 8, 3, 3]", "[64, 4]")),
        ({f"{Q}.lora_B.weight": np.ones((64, 3), np.float32)}, ("wrong-shape", "[4, 32]", "[64, 3]", "[4, in]")),
        ({f"{Q}.lora_B.weight": np.ones((65, 4), np.float32)}, ("wrong-shape", "bfloat16", "[64, 32]", "[65, 32]")),
        (
            {
                f"{Q}.lora_embedding_A": np.ones((4, 64), np.float32),
                f"{Q}.lora_embedding_B": np.ones((32, 4), np.float32),
            },
            ("duplicate-name", "'model.layers.0.q_proj.weight'"),
        ),
        (
            {
                "base_model.model.../../etc.lora_A.weight": np.ones((4, 64), np.float32),
                "base_model.model.../../etc.lora_B.weight": np.ones((32, 4), np.float32),
            },
            ("no-match", "'../../etc.weight'"),
        ),
    ],
)
def test_matrices(
    tmp_path: Path, base: reshard.Checkpoint, change: dict[str, Array | None], expected: tuple[str, ...]
) -> None:
    pairs = {name: one for name, one in {**matrices(weights()), **change}.items() if one is not None}
    with refused(SourceError, *expected):
        base.merge_lora(save(tmp_path / "lora", pairs))


def test_weights(tmp_path: Path, base: reshard.Checkpoint, lora: LoRA) -> None:
    """Those that are not there, with the nearest; quantised ones; and everything at once."""
    with refused(SourceError, "no-match", "3 faults", "'model.layers.0.down_proj.weight'"):
        base.merge_lora(save(tmp_path / "other", renamed("layers.0", "layers.7")))
    model = {**written(weights()), "model.layers.0.q_proj.weight": np.ones((64, 32), np.int8)}
    quantised = reshard.open(write_file(tmp_path / "int8.safetensors", model))
    with refused(SourceError, "wrong-dtype", "int8", "[64, 32]", "bfloat16", "float32"):
        quantised.merge_lora(lora)


def test_what_is_no_adapter(tmp_path: Path, base: reshard.Checkpoint) -> None:
    with refused(SourceError, "not-an-adapter", "adapter_config.json"):
        base.merge_lora(LoRA(str(tmp_path / "none")))
    lora = save(tmp_path / "lora", matrices(weights()))
    weights_file, config = (tmp_path / "lora" / name for name in ("adapter_model.safetensors", "adapter_config.json"))
    weights_file.rename(tmp_path / "lora" / "adapter_model.bin")
    with refused(SourceError, "unsupported-pickle", "adapter_model.bin", "adapter_model.safetensors"):
        base.merge_lora(lora)
    write_file(weights_file, {})
    with refused(SourceError, "no-tensors", "lora_A", "lora_B"):
        base.merge_lora(lora)
    weights_file.write_bytes(b"\xff" * 100)
    with refused(SourceError, "not-a-checkpoint", "adapter_model.safetensors"):
        base.merge_lora(lora)
    contents = {"[1]": "wrong-type", "{": "not-json", '{"r": 1, "r": 2}': "duplicate-key", "\xff": "not-json"}
    for content, code in {**contents, "[" * 100_000: "not-json"}.items():
        config.write_text(content, encoding="latin-1")
        with refused(SourceError, code, "adapter_config.json"):
            base.merge_lora(lora)


def test_one_stage_of_a_pipeline(tmp_path: Path, lora: LoRA) -> None:
    model = weights()
    stages = Strategy.of(
        {name: {int("q_proj" in name): Layout.of([1], [-1] * one.ndim)} for name, one in model.items()}
    )
    source = reshard.open(write_ranks(tmp_path / "src", written(model), stages), strategy=stages, stage=1)
    with refused(UsageError, "one-stage"):
        source.merge_lora(lora)
