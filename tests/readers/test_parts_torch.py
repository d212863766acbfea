"""With PyTorch and transformers installed: what they make of a Llama in parts is read, every bit right.

RESHARD_TORCH_PYTHON=torch/bin/python pytest -m torch  (with transformers)
"""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import numpy as np
import pytest
from commands import done

import reshard

if TYPE_CHECKING:
    from pathlib import Path

PYTHON = os.environ.get("RESHARD_TORCH_PYTHON", "")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not PYTHON, reason="RESHARD_TORCH_PYTHON names no Python that has PyTorch"),
]

SAVED = """
import argparse, enum, io, json, pathlib, random, sys
import numpy as np, torch
from transformers import LlamaConfig, LlamaForCausalLM

root = pathlib.Path(sys.argv[1])
torch.manual_seed(0)
sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)).bfloat16()
for parameter in model.parameters():
    torch.nn.init.normal_(parameter)
full = {name: tensor.detach() for name, tensor in model.state_dict().items()}

def kept(name, tensors):
    bits = {key: tensor.contiguous().reshape(-1).view(torch.uint8).numpy() for key, tensor in tensors.items()}
    np.savez(root / f"{name}.npz", **bits)

# A set, each file in another format of torch.save.
(root / "set").mkdir()
names, weight_map = list(full), {}
for number in range(2):
    file = f"pytorch_model-{number + 1:05d}-of-00002.bin"
    part = {name: full[name] for name in names[number::2]}
    weight_map |= dict.fromkeys(part, file)
    torch.save(part, root / "set" / file, _use_new_zipfile_serialization=not number)
(root / "set" / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
kept("set", full)

# Meta's names and parts.
LLAMA = {
    "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output",
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
    "post_attention_layernorm": "ffn_norm", "input_layernorm": "attention_norm", "model.layers": "layers",
}
meta = {}
for name, tensor in full.items():
    for old, new in LLAMA.items():
        name = name.replace(old, new)
    meta[name] = tensor
(root / "llama").mkdir()
for part in range(2):
    state = {}
    for name, tensor in meta.items():
        rows = name.endswith(("wo.weight", "w2.weight", "tok_embeddings.weight"))
        axis = None if "norm" in name else int(rows)
        state[name] = tensor if axis is None else tensor.chunk(2, axis)[part].clone()
    torch.save(state, root / "llama" / f"consolidated.{part:02d}.pth")
params = {"dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": -1, "multiple_of": 8, "norm_eps": 1e-6}
(root / "llama" / "params.json").write_text(json.dumps(params))
kept("llama", meta)

# Megatron's, as its training saves them.
class Backend(enum.Enum):
    auto = 5

args = argparse.Namespace(
    tensor_model_parallel_size=2, pipeline_model_parallel_size=1, virtual_pipeline_model_parallel_size=None,
    num_layers=2, hidden_size=16, ffn_hidden_size=24, num_attention_heads=4, num_query_groups=2, swiglu=True,
    group_query_attention=True, padded_vocab_size=32, untie_embeddings_and_output_weights=True, kv_channels=4,
    params_dtype=torch.bfloat16, lr=3e-4, betas=(0.9, 0.95), data_path=["a", {"b": 1}], attention_backend=Backend.auto,
)
mcore, cut = {}, {}
for layer in range(2):
    at, of = f"decoder.layers.{layer}.", lambda name: full[f"model.layers.{layer}.{name}.weight"]
    groups = [(of("self_attn.q_proj").view(2, 8, 16), of("self_attn.k_proj").view(2, 4, 16),
               of("self_attn.v_proj").view(2, 4, 16))]
    fused = torch.cat(groups[0], 1).reshape(-1, 16)
    both = [of("mlp.gate_proj"), of("mlp.up_proj")]
    mcore |= {
        at + "self_attention.linear_qkv.weight": fused,
        at + "self_attention.linear_proj.weight": of("self_attn.o_proj"),
        at + "self_attention.linear_qkv.layer_norm_weight": of("input_layernorm"),
        at + "mlp.linear_fc1.weight": torch.cat(both), at + "mlp.linear_fc2.weight": of("mlp.down_proj"),
        at + "mlp.linear_fc1.layer_norm_weight": of("post_attention_layernorm"),
    }
    cut[at + "mlp.linear_fc1.weight"] = [torch.cat([half.chunk(2)[part] for half in both]) for part in range(2)]
mcore |= {
    "embedding.word_embeddings.weight": full["model.embed_tokens.weight"],
    "decoder.final_layernorm.weight": full["model.norm.weight"], "output_layer.weight": full["lm_head.weight"],
}
model.config.save_pretrained(root)
for part in range(2):
    state = {}
    for name, tensor in mcore.items():
        axis = None if "norm" in name else 1 if name.endswith(("proj.weight", "fc2.weight")) else 0
        state[name] = tensor if axis is None else tensor.chunk(2, axis)[part].clone()
        if axis is not None:
            extra = io.BytesIO(b"x") if part else torch.zeros(0, dtype=torch.uint8)
            state[name.replace("weight", "_extra_state")] = extra
    state |= {name: parts[part] for name, parts in cut.items()}
    rng = {
        "random_rng_state": random.getstate(), "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(), "rng_tracker_states": {"x": torch.get_rng_state()},
    }
    value = {
        "args": args, "checkpoint_version": 3.0, "iteration": 7, "model": state, "rng_state": [rng],
        "optimizer": {"optimizer": {"param_groups": [{"lr": 0.1}]}, "grad_scaler": None},
        "opt_param_scheduler": {"max_lr": 0.1}, "num_floating_point_operations_so_far": 1.5e20,
    }
    directory = root / "run" / "iter_0000007" / f"mp_rank_{part:02d}"
    directory.mkdir(parents=True)
    torch.save(value, directory / "model_optim_rng.pt")
(root / "run" / "latest_checkpointed_iteration.txt").write_text("7")
kept("run", mcore)
"""


def test_parts_that_pytorch_saved(tmp_path: Path) -> None:
    subprocess.run([PYTHON, "-c", SAVED, str(tmp_path)], check=True, timeout=300, capture_output=True)
    for name in ("set", "llama", "run"):
        full = dict(np.load(tmp_path / f"{name}.npz"))
        source = reshard.open(tmp_path / name)
        assert set(source) == set(full)
        assert not source.unreadable
        assert not source.warnings
        for key, bits in full.items():
            assert source[key].compute().tobytes() == bits.tobytes(), key
        reshard.plan(source, to="safetensors").run(tmp_path / f"{name}-whole", fsync=False)
        assert reshard.verify(tmp_path / f"{name}-whole").equal
        assert not reshard.verify(tmp_path / name).differences
    done(
        "convert", tmp_path / "run", tmp_path / "hf", "--to", "hf", "--weights-only",
        "--rules", "llama-hf-mcore-layers",
        "--model-config", tmp_path / "config.json",
    )  # fmt: skip
    again, first = reshard.open(tmp_path / "hf"), dict(np.load(tmp_path / "set.npz"))
    assert {name: again[name].compute().tobytes() for name in again} == {
        name: bits.tobytes() for name, bits in first.items()
    }
