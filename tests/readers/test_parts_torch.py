"""With PyTorch and transformers installed: what they make of a Llama in parts is read, every bit right.

RESHARD_TORCH_PYTHON=torch/bin/python pytest -m torch  (with transformers)
"""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import numpy as np
import pytest

import reshard

if TYPE_CHECKING:
    from pathlib import Path

PYTHON = os.environ.get("RESHARD_TORCH_PYTHON", "")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not PYTHON, reason="RESHARD_TORCH_PYTHON names no Python that has PyTorch"),
]

SAVED = """
import json, pathlib, sys
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
"""


def test_parts_that_pytorch_saved(tmp_path: Path) -> None:
    subprocess.run([PYTHON, "-c", SAVED, str(tmp_path)], check=True, timeout=300, capture_output=True)
    for name in ("set", "llama"):
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
