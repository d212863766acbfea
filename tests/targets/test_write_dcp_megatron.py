"""A DCP that rules make for Megatron-Core has the two files that it needs beside; Megatron-Core loads all parameters.

python -m venv torch && torch/bin/pip install torch==2.13.0 megatron-core==0.16.1 numpy
RESHARD_TORCH_PYTHON=torch/bin/python pytest -m torch
"""

from __future__ import annotations

import io
import json
import os
import subprocess
from typing import TYPE_CHECKING

import numpy as np
import pytest
from checkpoints import numbers, write_file
from commands import done

import reshard

if TYPE_CHECKING:
    from pathlib import Path

PYTHON = os.environ.get("RESHARD_TORCH_PYTHON", "")

CONFIG = {
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 32,
    "tie_word_embeddings": False,
}  # fmt: skip
BESIDE = ["common.pt", "metadata.json"]

LOAD = """
import sys, numpy as np, torch, torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

where, hf = sys.argv[1], np.load(sys.argv[2])
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
parallel_state.initialize_model_parallel()
config = TransformerConfig(
    num_layers=3, hidden_size=16, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=24, kv_channels=4,
    use_cpu_initialization=True, add_bias_linear=False, gated_linear_unit=True, normalization="RMSNorm",
    activation_func=torch.nn.functional.silu,
)
model = GPTModel(
    config, get_gpt_layer_local_spec(normalization="RMSNorm"), 32, 16, share_embeddings_and_output_weights=False,
    position_embedding_type="rope",
)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.fill_(float("nan"))
assert dist_checkpointing.check_is_distributed_checkpoint(where)
common = dist_checkpointing.load_common_state_dict(where)
state = model.sharded_state_dict(metadata=common.get("content_metadata"))
loaded = dist_checkpointing.load({"model": state}, where, strict=StrictHandling.LOG_ALL)
model.load_state_dict(loaded["model"], strict=False)
found = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
assert not [name for name, value in found.items() if np.isnan(value).any()]
expected = {
    "embedding.word_embeddings.weight": hf["model.embed_tokens.weight"],
    "output_layer.weight": hf["lm_head.weight"],
    "decoder.final_layernorm.weight": hf["model.norm.weight"],
}
for number in range(3):
    own, its = f"decoder.layers.{number}.", f"model.layers.{number}."
    q, k, v = (hf[f"{its}self_attn.{x}_proj.weight"].reshape(2, -1, 16) for x in "qkv")
    expected |= {
        own + "input_layernorm.weight": hf[its + "input_layernorm.weight"],
        own + "pre_mlp_layernorm.weight": hf[its + "post_attention_layernorm.weight"],
        own + "self_attention.linear_qkv.weight": np.concatenate([q, k, v], 1).reshape(-1, 16),
        own + "self_attention.linear_proj.weight": hf[its + "self_attn.o_proj.weight"],
        own + "mlp.linear_fc1.weight": np.concatenate([hf[f"{its}mlp.{x}_proj.weight"] for x in ("gate", "up")]),
        own + "mlp.linear_fc2.weight": hf[its + "mlp.down_proj.weight"],
    }
assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
for name, value in expected.items():
    assert np.array_equal(found[name], value), name
print("LOADED", len(found), common["iteration"])
"""


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    """A llama of three layers, as Hugging Face has it."""
    shapes = {"model.embed_tokens.weight": (32, 16), "lm_head.weight": (32, 16), "model.norm.weight": (16,)}
    for layer in (f"model.layers.{number}" for number in range(3)):
        shapes |= {f"{layer}.self_attn.{x}_proj.weight": (16 if x in "qo" else 8, 16) for x in "qkvo"}
        shapes |= {f"{layer}.mlp.{x}_proj.weight": (24, 16) for x in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj.weight": (16, 24)}
        shapes |= {f"{layer}.{x}_layernorm.weight": (16,) for x in ("input", "post_attention")}
    write_file(tmp_path / "hf" / "model.safetensors", numbers(shapes))
    (tmp_path / "hf" / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "hf"


def made(hf: Path, target: Path, rules: str, step: int | None) -> Path:
    """Return the directory of the DCP."""
    words = ["--to", "dcp", "--rules", rules, "--let", "divisor=32"]
    done("convert", "--to=mindspore", hf, target, *words, *([] if step is None else ["--target-step", f"{step}"]))
    return target if step is None else target / f"iter_{step:07}"


CASES = pytest.mark.parametrize(
    ("rules", "step"), [("llama-hf-mcore", None), ("llama-hf-mcore", 7), ("llama-hf-mcore-layers", 7)]
)


@CASES
def test_what_is_beside(hf: Path, tmp_path: Path, rules: str, step: int | None) -> None:
    out = made(hf, tmp_path / "out", rules, step)
    assert json.loads((out / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    assert {path.name for path in out.iterdir() if path.is_file()} == {".metadata", "__0_0.distcp", *BESIDE}
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").exists() == (step is not None)
    done("verify", tmp_path / "out")
    again = reshard.open(tmp_path / "out")  # what was made is carried over
    reshard.plan(again, to="dcp").run(tmp_path / "again")
    for name in BESIDE:
        assert (next((tmp_path / "again").rglob(name))).read_bytes() == (out / name).read_bytes()


def test_not_for_pytorch(hf: Path, tmp_path: Path) -> None:
    done("convert", hf, tmp_path / "out", "--to", "dcp")
    assert not [name for name in BESIDE if (tmp_path / "out" / name).exists()]


@pytest.mark.torch
@pytest.mark.skipif(not PYTHON, reason="RESHARD_TORCH_PYTHON names no Python that has PyTorch")
@CASES
def test_megatron_loads_all_parameters(hf: Path, tmp_path: Path, rules: str, step: int | None) -> None:
    out = made(hf, tmp_path / "out", rules, step)
    tensors = io.BytesIO()
    np.savez(tensors, **{name: tensor.compute() for name, tensor in reshard.open(hf).items()})
    (tmp_path / "hf.npz").write_bytes(tensors.getvalue())
    run = subprocess.run(
        [PYTHON, "-c", LOAD, out, tmp_path / "hf.npz"], capture_output=True, text=True, timeout=300, check=False
    )
    if "No module named 'megatron'" in run.stderr:
        pytest.skip("no Megatron-Core there")
    assert run.returncode == 0, run.stderr
    assert run.stdout.split()[-3:] == ["LOADED", "21", f"{step or 0}"]
