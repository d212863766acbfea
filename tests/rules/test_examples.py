"""The rules files that come with the program, against numpy and the programs that they are for.

Those between Hugging Face and Megatron-Core of llama and Qwen2-MoE are compared with what Megatron wrote in
`test_recorded`; here are all others, on small random models, and what needs these programs:

RESHARD_MINDSPORE_PYTHON=mf/bin/python pytest -m mindspore  (with mindformers)
RESHARD_TORCH_PYTHON=torch/bin/python pytest -m torch  (with transformers)
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from checkpoints import write_file, write_ranks
from orbax_files import maxtext
from truths import assert_arrays

import reshard
from reshard import HuggingFaceSet, Layout, Rules, Selection, Strategy
from reshard.rules import rules as of_rules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from helpers import Array

EXAMPLES = sorted(path.stem for path in (Path(of_rules.__file__).parent / "examples").glob("*.yaml"))
CONFIG = {
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "hidden_size": 12, "vocab_size": 10,
    "num_experts": 3, "num_local_experts": 3, "n_routed_experts": 3,
}  # fmt: skip
LAYERS, HIDDEN, FFN, EXPERTS = 3, 12, 5, 3
HEADS, GROUPS, HEAD, VOCAB, PADDED = 4, 2, 4, 10, 16
EMBEDDINGS = {
    "model.embed_tokens.weight": (VOCAB, HIDDEN),
    "lm_head.weight": (VOCAB, HIDDEN),
    "model.norm.weight": (HIDDEN,),
}
ATTENTION = {
    "input_layernorm.weight": (HIDDEN,), "post_attention_layernorm.weight": (HIDDEN,),
    "self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN), "self_attn.k_proj.weight": (GROUPS * HEAD, HIDDEN),
    "self_attn.v_proj.weight": (GROUPS * HEAD, HIDDEN), "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
}  # fmt: skip
NORMS = {"self_attn.q_norm.weight": (HEAD,), "self_attn.k_norm.weight": (HEAD,)}
MLP = {
    "mlp.gate_proj.weight": (FFN, HIDDEN),
    "mlp.up_proj.weight": (FFN, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, FFN),
}


def random(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
    rng = np.random.default_rng(18)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def model(layer: Mapping[str, tuple[int, ...]], numbers: Iterable[int] = range(LAYERS)) -> dict[str, tuple[int, ...]]:
    return EMBEDDINGS | {f"model.layers.{n}.{name}": shape for n in numbers for name, shape in layer.items()}


def experts(gate: str, expert: str, gate_up_down: tuple[str, str, str]) -> dict[str, tuple[int, ...]]:
    shapes = ((FFN, HIDDEN), (FFN, HIDDEN), (HIDDEN, FFN))
    return {gate: (EXPERTS, HIDDEN)} | {
        f"{expert}.{e}.{name}.weight": shape
        for e in range(EXPERTS)
        for name, shape in zip(gate_up_down, shapes, strict=True)
    }


QWEN3_MOE = ATTENTION | NORMS | experts("mlp.gate.weight", "mlp.experts", ("gate_proj", "up_proj", "down_proj"))
MIXTRAL = ATTENTION | experts("block_sparse_moe.gate.weight", "block_sparse_moe.experts", ("w1", "w3", "w2"))
QWEN2 = (
    ATTENTION | MLP | {f"self_attn.{x}_proj.bias": (n * HEAD,) for x, n in (("q", HEADS), ("k", GROUPS), ("v", GROUPS))}
)


# --- the same by numpy ---------------------------------------------------------------------------------------------


def fused_qkv(q: Array, k: Array, v: Array) -> Array:
    """Of each group its queries, its keys, its values: `QKVConvertOp` of mindformers, mcore's linear_qkv."""
    some = []
    for group in range(GROUPS):
        some += [q[group * 2 * HEAD : (group + 1) * 2 * HEAD], *(x[group * HEAD : (group + 1) * HEAD] for x in (k, v))]
    return np.concatenate(some)


def alternating(gate: Array, up: Array) -> Array:
    """Rows in turn: `ConcatConvertOp` of mindformers."""
    found = np.empty((2 * len(gate), *gate.shape[1:]), gate.dtype)
    found[::2], found[1::2] = gate, up
    return found


def padded(array: Array) -> Array:
    return np.concatenate([array, np.zeros((PADDED - VOCAB, HIDDEN), array.dtype)])


def of_layer(hf: Mapping[str, Array], *, mcore: bool) -> dict[str, Array]:
    """What the other program has of the tensors of a layer, but its norms."""
    found = {}
    for kind in ("weight", "bias"):
        if f"self_attn.q_proj.{kind}" in hf:
            parts = [hf[f"self_attn.{x}_proj.{kind}"] for x in "qkv"]
            found[f"self_attention.linear_qkv.{kind}"] = fused_qkv(*parts)
    found["self_attention.linear_proj.weight"] = hf["self_attn.o_proj.weight"]
    for x in "qk":
        if f"self_attn.{x}_norm.weight" in hf:
            found[f"self_attention.{x}_layernorm.weight"] = hf[f"self_attn.{x}_norm.weight"]
    if "mlp.gate_proj.weight" in hf:
        gate_up = hf["mlp.gate_proj.weight"], hf["mlp.up_proj.weight"]
        found["mlp.linear_fc1.weight"] = np.concatenate(gate_up) if mcore else alternating(*gate_up)
        found["mlp.linear_fc2.weight"] = hf["mlp.down_proj.weight"]
        return found
    mixtral = "block_sparse_moe.gate.weight" in hf
    at = "block_sparse_moe" if mixtral else "mlp"
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    gate, up, down = ([hf[f"{at}.experts.{e}.{name}.weight"] for e in range(EXPERTS)] for name in names)
    found["mlp.router.weight"] = hf[f"{at}.gate.weight"]
    if mcore:
        found["mlp.experts.experts.linear_fc1.weight"] = np.stack(
            [np.concatenate(p) for p in zip(gate, up, strict=True)]
        )
        found["mlp.experts.experts.linear_fc2.weight"] = np.stack(down)
    else:
        found["mlp.experts.weight1"] = np.concatenate([np.hstack([g.T, u.T]) for g, u in zip(gate, up, strict=True)])
        found["mlp.experts.weight2"] = np.concatenate([one.T for one in down])
    return found


def converted(hf: Mapping[str, Array], norms: tuple[str, str], *, mcore: bool, stacked: bool) -> dict[str, Array]:
    """What Megatron-Core or MindSpore Transformers has."""
    found = {
        "embedding.word_embeddings.weight": hf["model.embed_tokens.weight"],
        "output_layer.weight": hf["lm_head.weight"],
    }
    found = {name: padded(value) if mcore else value for name, value in found.items()}
    found["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
    layers = []
    for number in range(LAYERS):
        prefix = f"model.layers.{number}."
        own = {name.removeprefix(prefix): value for name, value in hf.items() if name.startswith(prefix)}
        layer = of_layer(own, mcore=mcore)
        layer |= {norms[0]: own["input_layernorm.weight"], norms[1]: own["post_attention_layernorm.weight"]}
        layers.append(layer)
    if stacked:
        return found | {f"decoder.layers.{name}": np.stack([layer[name] for layer in layers]) for name in layers[0]}
    return found | {
        f"decoder.layers.{n}.{name}": value for n, layer in enumerate(layers) for name, value in layer.items()
    }


MCORE, MCORE_MOE = (
    ("self_attention.linear_qkv.layer_norm_weight", second)
    for second in ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
)
MF = ("input_layernorm.weight", "pre_mlp_layernorm.weight")


def deepseek(*, mcore: bool) -> tuple[dict[str, Array], dict[str, Array]]:
    """DeepSeek-V3's tensors, of layers 0 to 3 and 61, by names as mindformers maps them: parts of them are replaced."""
    attention = {
        "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,), "self_attn.q_a_proj": (6, HIDDEN),
        "self_attn.q_a_layernorm": (6,), "self_attn.q_b_proj": (8, 6), "self_attn.kv_a_proj_with_mqa": (7, HIDDEN),
        "self_attn.kv_a_layernorm": (4,), "self_attn.kv_b_proj": (8, 4), "self_attn.o_proj": (HIDDEN, 8),
    }  # fmt: skip
    layer = {f"{name}.weight": shape for name, shape in attention.items()}
    moe = experts("mlp.gate.weight", "mlp.experts", ("gate_proj", "up_proj", "down_proj"))
    moe |= {"mlp.gate.e_score_correction_bias": (EXPERTS,)}
    moe |= {name.replace("mlp.", "mlp.shared_experts."): shape for name, shape in MLP.items()}
    last = {"enorm.weight": (HIDDEN,), "hnorm.weight": (HIDDEN,), "eh_proj.weight": (HIDDEN, 2 * HIDDEN)}
    last |= {"shared_head.norm.weight": (HIDDEN,)}
    shapes = model(layer | MLP, range(3)) | model(layer | moe, [3]) | model(layer | moe | last, [61])
    hf = random(shapes)
    names = {
        "model.embed_tokens": "embedding.word_embeddings",
        "lm_head": "output_layer",
        "model.norm": "decoder.final_layernorm",
        "self_attn.q_a_proj": "self_attention.linear_q_down_proj",
        "self_attn.q_b_proj": "self_attention.linear_q_up_proj",
        "self_attn.kv_a_proj_with_mqa": "self_attention.linear_kv_down_proj",
        "self_attn.kv_b_proj": "self_attention.linear_kv_up_proj",
        "self_attn.o_proj": "self_attention.linear_proj",
        "self_attn.q_a_layernorm.": "self_attention.q_layernorm.",
        "self_attn.kv_a_layernorm.": "self_attention.kv_layernorm.",
        "post_attention_layernorm": "pre_mlp_layernorm",
        "mlp.gate.e_score_correction_bias": "mlp.router.expert_bias",
        "mlp.gate.": "mlp.router.",
        ".down_proj.": ".linear_fc2.",
        "model.layers.61.shared_head.norm": "mtp.layers.0.final_layernorm",
        "model.layers.61.enorm": "mtp.layers.0.enorm",
        "model.layers.61.hnorm": "mtp.layers.0.hnorm",
        "model.layers.61.eh_proj": "mtp.layers.0.eh_proj",
        "model.layers.61.": "mtp.layers.0.transformer_layer.",
        "model.layers.": "decoder.layers.",
    }
    if mcore:  # Transformer Engine has norms in the layer behind them
        names |= {
            "self_attn.q_a_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
            "self_attn.kv_a_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
        }
    made: dict[str, Array] = {}
    apart: dict[str, dict[int, dict[str, Array]]] = {}
    for name, value in hf.items():
        new = name
        for old, other in sorted(names.items(), key=lambda pair: -len(pair[0])):
            new = new.replace(old, other)
        if mcore and (dense := re.fullmatch(r"decoder.layers.([012]).pre_mlp_layernorm.weight", new)):
            new = f"decoder.layers.{dense[1]}.mlp.linear_fc1.layer_norm_weight"
        if found := re.fullmatch(r"(.*)\.experts\.(\d+)\.(\w+)\.weight", new):
            apart.setdefault(found[1], {}).setdefault(int(found[2]), {})[found[3]] = value
        elif found := re.fullmatch(r"(.*)\.(gate|up)_proj\.weight", new):
            apart.setdefault(found[1], {}).setdefault(-1, {})[f"{found[2]}_proj"] = value
        else:
            made[new] = padded(value) if mcore and len(value) == VOCAB else value
    join: Callable[..., Array] = (lambda *parts: np.concatenate(parts)) if mcore else alternating
    for name, some in apart.items():
        if -1 in some:
            made[f"{name}.linear_fc1.weight"] = join(some[-1]["gate_proj"], some[-1]["up_proj"])
            continue
        every = [some[number] for number in range(EXPERTS)]
        if mcore:
            both = [np.concatenate([one["gate_proj"], one["up_proj"]]) for one in every]
            made[f"{name}.experts.experts.linear_fc1.weight"] = np.stack(both)
            made[f"{name}.experts.experts.linear_fc2.weight"] = np.stack([one["linear_fc2"] for one in every])
        else:
            both = [np.hstack([one["gate_proj"].T, one["up_proj"].T]) for one in every]
            made[f"{name}.experts.weight1"] = np.concatenate(both)
            made[f"{name}.experts.weight2"] = np.concatenate([one["linear_fc2"].T for one in every])
    return hf, made


def permuted(weight: Array, heads: int) -> Array:
    """`_permute` of transformers' convert_llama_weights_to_hf: from Meta's order of rows to that of Hugging Face."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def titan() -> tuple[dict[str, Array], dict[str, Array]]:
    own = {
        "tok_embeddings.weight": (VOCAB, HIDDEN), "output.weight": (VOCAB, HIDDEN), "norm.weight": (HIDDEN,),
    }  # fmt: skip
    for n in range(LAYERS):
        own |= {
            f"layers.{n}.attention.wq.weight": (HEADS * HEAD, HIDDEN),
            f"layers.{n}.attention.wk.weight": (GROUPS * HEAD, HIDDEN),
            f"layers.{n}.attention.wv.weight": (GROUPS * HEAD, HIDDEN),
            f"layers.{n}.attention.wo.weight": (HIDDEN, HEADS * HEAD),
            f"layers.{n}.feed_forward.w1.weight": (FFN, HIDDEN),
            f"layers.{n}.feed_forward.w2.weight": (HIDDEN, FFN), f"layers.{n}.feed_forward.w3.weight": (FFN, HIDDEN),
            f"layers.{n}.attention_norm.weight": (HIDDEN,), f"layers.{n}.ffn_norm.weight": (HIDDEN,),
        }  # fmt: skip
    made = random(own)
    hf = {
        "model.embed_tokens.weight": made["tok_embeddings.weight"], "lm_head.weight": made["output.weight"],
        "model.norm.weight": made["norm.weight"],
    }  # fmt: skip
    same = {
        "self_attn.v_proj": "attention.wv", "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1",
        "mlp.down_proj": "feed_forward.w2", "mlp.up_proj": "feed_forward.w3", "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    for n in range(LAYERS):
        hf |= {f"model.layers.{n}.{a}.weight": made[f"layers.{n}.{b}.weight"] for a, b in same.items()}
        hf[f"model.layers.{n}.self_attn.q_proj.weight"] = permuted(made[f"layers.{n}.attention.wq.weight"], HEADS)
        hf[f"model.layers.{n}.self_attn.k_proj.weight"] = permuted(made[f"layers.{n}.attention.wk.weight"], GROUPS)
    return hf, made


def llama_mindformers() -> tuple[dict[str, Array], dict[str, Array]]:
    """Names as `name_replace` of mindformers' models/llama/convert_weight.py gives them."""
    hf = random(model(ATTENTION | MLP))
    made = {}
    for name, value in hf.items():
        new = name.replace("embed_tokens.weight", "tok_embeddings.embedding_weight").replace(".norm.", ".norm_out.")
        for old, other in {
            ".self_attn.q_proj.": ".attention.wq.", ".self_attn.k_proj.": ".attention.wk.",
            ".self_attn.v_proj.": ".attention.wv.", ".self_attn.o_proj.": ".attention.wo.",
            ".mlp.gate_proj.": ".feed_forward.w1.", ".mlp.down_proj.": ".feed_forward.w2.",
            ".mlp.up_proj.": ".feed_forward.w3.", ".input_layernorm.": ".attention_norm.",
            ".post_attention_layernorm.": ".ffn_norm.",
        }.items():  # fmt: skip
            new = new.replace(old, other)
        made[new] = value
    return hf, made


def both_sides(name: str) -> tuple[dict[str, Array], dict[str, Array]]:
    """The tensors of Hugging Face, and those of the other program, of a small model."""
    alone: dict[str, Callable[[], tuple[dict[str, Array], dict[str, Array]]]] = {
        "maxtext-hf": lambda: ((hf := random(model(ATTENTION | NORMS | MLP))), maxtext(hf, HEADS, GROUPS)),
        "llama-hf-torchtitan": titan,
        "llama-hf-mindformers": llama_mindformers,
        "deepseek-v3-hf-mcore": lambda: deepseek(mcore=True),
        "deepseek-v3-hf-mindformers": lambda: deepseek(mcore=False),
    }
    if name in alone:
        return alone[name]()
    kind, _, _ = name.partition("-hf-")
    layer = {"llama": QWEN2, "qwen3": ATTENTION | NORMS | MLP, "qwen3-moe": QWEN3_MOE, "mixtral": MIXTRAL}[kind]
    hf = random(model(layer))
    mcore = "mindformers" not in name
    norms = MF if not mcore else MCORE_MOE if kind in {"qwen3-moe", "mixtral"} else MCORE
    return hf, converted(hf, norms, mcore=mcore, stacked=mcore and not name.endswith("layers"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_as_numpy_does_it_both_ways(tmp_path: Path, name: str) -> None:
    """The configuration is found next to the files; from one file, and from rank files cut by rows."""
    hf, made = both_sides(name)
    rules = Rules.read(name, let={"divisor": 8} if name.endswith(("mcore", "layers")) else None)
    for side, tensors, expected in (("hf", hf, made), ("other", made, hf)):
        (tmp_path / side).mkdir()
        (tmp_path / side / "config.json").write_text(json.dumps(CONFIG))
        write_file(tmp_path / side / "model.safetensors", tensors)
        assert_arrays(reshard.open(tmp_path / side).derive(rules), expected)
        strategy = Strategy.of({
            key: Layout.of([2], [-1 if value.shape[0] % 2 else 0, *[-1] * (value.ndim - 1)])
            for key, value in tensors.items()
        })  # fmt: skip
        root = write_ranks(tmp_path / f"{side}_ranks", tensors, strategy)
        with_config = Rules.read(name, config=CONFIG, let={"divisor": 8} if "divisor" in rules.numbers.let else None)
        assert_arrays(reshard.open(root, strategy=strategy).derive(with_config), expected)


def test_of_a_tied_model(tmp_path: Path) -> None:
    hf = random(model(ATTENTION | MLP))
    del hf["lm_head.weight"]
    rules = Rules.read("llama-hf-mcore", config=CONFIG)
    made = reshard.open(write_file(tmp_path / "model.safetensors", hf)).derive(rules)
    assert made["embedding.word_embeddings.weight"].shape == (128, HIDDEN)
    assert "output_layer.weight" not in made


# --- with the programs themselves ----------------------------------------------------------------------------------

MINDSPORE, TORCH = (os.environ.get(f"RESHARD_{program}_PYTHON", "") for program in ("MINDSPORE", "TORCH"))


TINY = """
import sys, torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
torch.manual_seed(18)
config = Qwen3MoeConfig(
    vocab_size=50, hidden_size=16, intermediate_size=24, moe_intermediate_size=8, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
)
Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(sys.argv[1])
"""
LOGITS = """
import sys, torch
from transformers import AutoModelForCausalLM
torch.manual_seed(1)
words = torch.randint(0, 50, (2, 9))
models = []
for path in sys.argv[1:]:
    model, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    models.append(model)
with torch.no_grad():
    one, two = (model(words).logits for model in models)
assert one.abs().max() > 0
print("SAME" if torch.equal(one, two) else "OTHER")
"""


@pytest.mark.torch
@pytest.mark.timeout(600)
def test_transformers_loads_what_comes_back(tmp_path: Path) -> None:
    """A tiny Qwen3-MoE to Megatron's names and shapes, in a DCP, and back: equal logits."""
    found = "import importlib.util as u; raise SystemExit(u.find_spec('transformers') is None)"
    if not TORCH or subprocess.run([TORCH, "-c", found], check=False).returncode:
        pytest.skip("RESHARD_TORCH_PYTHON names no Python that has PyTorch and transformers")
    hf, mcore, back = (tmp_path / name for name in ("hf", "mcore", "back"))
    subprocess.run([TORCH, "-c", TINY, hf], check=True, capture_output=True)
    rules = Rules.read("qwen3-moe-hf-mcore", config=hf / "config.json")
    source = reshard.open(hf)
    made = source.derive(rules)
    rows = Strategy.of({
        name: Layout.of([2], [*[-1] * (tensor.ndim - 2), 0, -1]) for name, tensor in made.items() if tensor.ndim > 1
    })  # fmt: skip
    reshard.plan(made, rows, format="dcp").run(mcore, fsync=False)
    selection = Selection(rules=rules)
    reshard.plan(reshard.open(mcore), files=HuggingFaceSet(), format="safetensors", selection=selection).run(back)
    (back / "config.json").write_bytes((hf / "config.json").read_bytes())
    assert_arrays(reshard.open(back), {name: np.asarray(array) for name, array in source.items()})
    ran = subprocess.run([TORCH, "-c", LOGITS, hf, back], capture_output=True, text=True, check=False)
    assert ran.stdout.split()[-1:] == ["SAME"], ran.stderr[-3000:]
