"""What Megatron-Core and MindSpore Transformers have of the same weights as Hugging Face, and the rules between them.

The weights were written by these programs (`tests/data/README.md`). For states of the optimizer, of which the files of
Hugging Face have none, the same is done to arrays of numpy; the tests check it on the weights.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from reshard import Rules
from reshard.rules.rules import example

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from helpers import Array

CASES = {
    "mcore_tp2_pp2": "llama-hf-mcore",
    "mcore_layers_apart": "llama-hf-mcore-layers",
    "mcore_moe_ep2": "qwen3-moe-hf-mcore",
}
STATE = "optimizer.state.exp_avg."


def yaml_of(name: str) -> str:
    """The text of an example."""
    path = example(name)
    assert path is not None, name
    return path.read_text()


def made(text: str, *, config: Mapping[str, Any] | None = None, **let: int) -> Rules:
    """Rules of a text."""
    data = yaml.safe_load(text)
    return Rules.of({**data, "let": {**data.get("let", {}), **let}, "config": config or {}})


@dataclass(frozen=True)
class Truth:
    """A checkpoint of Megatron's, and what Hugging Face has of it.

    Attributes:
        checkpoint: its directory.
        rules: between the two.
        mcore: its whole tensors, bfloat16 as bits.
        hf: those of Hugging Face, states included.
        back: Megatron's tensors as these give them: with padding of zeros.
    """

    checkpoint: Path
    rules: Rules
    mcore: dict[str, Array]
    hf: dict[str, Array]
    back: dict[str, Array]


def truth(root: Path, name: str) -> Truth:
    """Return one of the recorded cases."""
    folder = root / "dcp" / name
    sizes = json.loads((folder / "meta.json").read_text())["sizes"]
    mcore = {key.replace("\\", "/"): value for key, value in np.load(folder / "full.npz").items()}
    hf = dict(np.load(folder / "hf.npz"))
    states = {key.removeprefix(STATE): value for key, value in mcore.items() if key.startswith(STATE)}
    weights = {key: value for key, value in mcore.items() if not key.startswith(STATE)}
    for key, value in split(weights, sizes).items():
        assert np.array_equal(value, hf[key]), key
    assert split(weights, sizes).keys() == hf.keys()
    hf |= {STATE + key: value for key, value in split(states, sizes).items()}
    text = yaml_of(CASES[name])
    if sizes["experts"]:  # built without Transformer Engine, and no norms of queries and keys
        text = text.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
        text = re.sub(r"(q|k)_layernorm.weight, by: l}", r"\g<0>\n    optional: true", text)
    config = {
        "num_attention_heads": sizes["heads"], "num_key_value_heads": sizes["kv"], "head_dim": sizes["d"],
        "vocab_size": sizes["vocab"],
    }  # fmt: skip
    back = {key: value.copy() for key, value in mcore.items()}
    for key, value in back.items():
        if "word_embeddings" in key or "output_layer" in key:
            value[sizes["vocab"] :] = 0
    return Truth(folder / "checkpoint", made(text, config=config, divisor=sizes["padded"]), mcore, hf, back)


def split(mcore: Mapping[str, Array], sizes: Mapping[str, int]) -> dict[str, Array]:
    """What Hugging Face has of Megatron's tensors, by numpy."""
    heads, groups, head = sizes["heads"], sizes["kv"], sizes["d"]
    found: dict[str, Array] = {}
    for name, value in mcore.items():
        numbered = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name)
        if numbered:
            layers = {int(numbered[1]): value}
            rest = numbered[2]
        elif name.startswith("decoder.layers."):
            layers, rest = dict(enumerate(value)), name.removeprefix("decoder.layers.")
        else:
            ends = {
                "embedding.word_embeddings.weight": "model.embed_tokens.weight",
                "output_layer.weight": "lm_head.weight",
                "decoder.final_layernorm.weight": "model.norm.weight",
            }
            found[ends[name]] = value[: sizes["vocab"]] if value.ndim > 1 else value
            continue
        for number, layer in layers.items():
            for key, part in split_layer(rest, layer, heads // groups * head, head).items():
                found[f"model.layers.{number}.{key}"] = part
    return found


def split_layer(name: str, value: Array, queries: int, head: int) -> dict[str, Array]:
    """What Hugging Face has of one tensor of a layer."""
    same = {
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
        "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
        "mlp.linear_fc2.weight": "mlp.down_proj.weight",
        "mlp.router.weight": "mlp.gate.weight",
    }
    if name in same:
        return {same[name]: value}
    if name == "self_attention.linear_qkv.weight":
        groups = np.split(value, len(value) // (queries + 2 * head))
        rows = {"q": slice(0, queries), "k": slice(queries, queries + head), "v": slice(queries + head, None)}
        return {f"self_attn.{x}_proj.weight": np.concatenate([one[at] for one in groups]) for x, at in rows.items()}
    if name == "mlp.linear_fc1.weight":
        gate, up = np.split(value, 2)
        return {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up}
    found = {}
    for number, expert in enumerate(value):
        if name == "mlp.experts.experts.linear_fc2.weight":
            found[f"mlp.experts.{number}.down_proj.weight"] = expert
        else:
            assert name == "mlp.experts.experts.linear_fc1.weight"
            gate, up = np.split(expert, 2)
            found[f"mlp.experts.{number}.gate_proj.weight"] = gate
            found[f"mlp.experts.{number}.up_proj.weight"] = up
    return found


def assert_arrays(found: Mapping[str, Any], expected: Mapping[str, Array]) -> None:
    """The lazy arrays of a checkpoint are these, bit for bit."""
    assert set(found) == set(expected)
    for name, value in expected.items():
        array = np.asarray(found[name])
        assert (array.shape, array.tobytes()) == (value.shape, value.tobytes()), name
