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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
import pytest
from checkpoints import write_file, write_ranks
from orbax_files import maxtext
from samples import sampled
from truths import assert_arrays

import reshard
from reshard import Layout, Rules, Strategy
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


# --- The rules files that come with the program, with optimizer states: names and numbers on both sides,  ---

OUTPUTS = {"lm_head.weight", "output_layer.weight", "output.weight", "params.params.decoder.logits_dense.kernel"}
FORMS: dict[str, Any] = {
    "PyTorch's": lambda weight, kind: f"optim.state.{weight}.{kind}",
    "torchtitan's": lambda weight, kind: f"optimizer.state.{weight}.{kind}",
    "flattened": lambda weight, kind: f"state.{weight}.{kind}",
    "Megatron's": lambda weight, kind: f"optimizer.state.{kind}.{weight}",
    "DeepSpeed's": lambda weight, kind: f"{kind}.{weight}",
    "MindSpore's": lambda weight, kind: {"exp_avg": "adam_m.", "exp_avg_sq": "moment2."}.get(kind, "fp32.") + weight,
    "optax's": lambda weight, kind: (
        f"opt_state.0.{'mu' if kind == 'exp_avg' else 'nu'}.{weight.removeprefix('params.')}"
    ),
}


def with_states(weights: Mapping[str, Array], form: str, factors: Mapping[str, float]) -> dict[str, Array]:
    """Weights, and of each weight two tensors that are multiples of it, and a number of steps."""
    named = FORMS[form]
    found = dict(weights)
    for name, value in weights.items():
        for kind, factor in factors.items():
            found[named(name, kind)] = value * np.float32(factor)
        if form not in {"MindSpore's", "optax's"}:
            found[named(name, "step")] = np.array(7, np.float32)
    if form == "optax's":
        found["opt_state.0.count"] = np.array(7, np.int32)
    return found


@pytest.mark.parametrize("name", sampled([(name,) for name in EXAMPLES], 6))
def test_names_of_states_both_ways(tmp_path: Path, name: str) -> None:
    """In every form, of a model with a head of its own, and of a tied one."""
    for form in FORMS:
        for tied in (False, True):
            check(tmp_path, name, form, tied=tied, contents=False)


@pytest.mark.parametrize(
    ("name", "form"), sampled([("maxtext-hf", "optax's"), *((name, "PyTorch's") for name in EXAMPLES)], 3)
)
def test_states_both_ways(tmp_path: Path, name: str, form: str) -> None:
    check(tmp_path, name, form, tied=False)


@pytest.mark.slow
@pytest.mark.parametrize("form", list(FORMS)[1:])
@pytest.mark.parametrize("name", EXAMPLES)
def test_states_of_every_form_both_ways(tmp_path: Path, name: str, form: str) -> None:
    check(tmp_path, name, form, tied=True)


def check(tmp_path: Path, name: str, form: str, *, tied: bool, contents: bool = True) -> None:
    """Derive each side from the other, and compare names, shapes and perhaps contents."""
    rules = Rules.read(name, config=CONFIG, let={"divisor": 8} if name.endswith(("mcore", "layers")) else None)
    factors = {"exp_avg": 2.0, "exp_avg_sq": 0.5}
    first, second = (
        with_states({key: value for key, value in side.items() if not (tied and key in OUTPUTS)}, form, factors)
        for side in both_sides(name)
    )
    for given, expected in ((first, second), (second, first)):
        derived = reshard.open(write_file(tmp_path / f"{len(given)}.safetensors", given)).derive(rules)
        assert {key: tensor.spec.shape for key, tensor in derived.tensors.items()} == {
            key: value.shape for key, value in expected.items()
        }, (form, tied)
        if contents:
            for key, content in zip(derived, dask.compute(*(derived[key] for key in derived)), strict=True):
                assert np.array_equal(content, expected[key]), key


@pytest.mark.parametrize("name", ["llama-hf-mcore", "maxtext-hf", "qwen3-moe-hf-mcore"])
def test_there_and_back_in_the_formats_that_have_states(tmp_path: Path, name: str) -> None:
    """Through a DCP or Orbax by the command's path: what comes back is what went."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    rules = Rules.read(name, config=tmp_path / "config.json", let={"divisor": 8} if "mcore" in name else None)
    side = both_sides(name)[name == "maxtext-hf"]
    form = "optax's" if name == "maxtext-hf" else "PyTorch's"
    to = "orbax" if name == "maxtext-hf" else "dcp"
    full = with_states(side, form, {"exp_avg": 2.0})
    reshard.convert(
        reshard.open(write_file(tmp_path / "a.safetensors", full)), tmp_path / "there", to="hf", rules=rules
    )
    reshard.convert(tmp_path / "there", tmp_path / "back", to=to, rules=rules)
    assert_arrays(reshard.open(tmp_path / "back"), full)


def named(rules: list[dict[str, Any]]) -> Rules:
    return Rules.of({"reshard-rules": 1, "sides": ["a", "b"], "rules": rules})


STATES = {
    "of optax, in a train state": (
        [{"a": "params.D_{n}.k", "b": "layers.{n}.w"}, {"a": "step", "b": "step", "optional": True}],
        ["params.D_0.k", "step", "opt_state.0.mu.D_0.k", "opt_state.0.count"],
        ["layers.0.w", "step", "opt_state.0.mu.layers.0.w", "opt_state.0.count"],
    ),
    "of a dict of model and optim": (
        [{"a": "model.l.{n}.w", "b": "model.layers.{n}.weight"}, {"a": "model.out.w", "b": "lm_head.weight"}],
        ["model.l.0.w", "model.out.w", "optim.state.l.0.w.exp_avg", "optim.state.out.w.step"],
        [
            "model.layers.0.weight", "lm_head.weight", "optim.state.model.layers.0.weight.exp_avg",
            "optim.state.lm_head.weight.step",
        ],
    ),
    "of two such dicts": (
        [{"a": "model.l.{n}.w", "b": "model.layers.{n}.weight"}],
        ["model.l.0.w", "optim.state.l.0.w.exp_avg"],
        ["model.layers.0.weight", "optim.state.layers.0.weight.exp_avg"],
    ),
    "of a model that has a model": (
        [{"a": "model.l.{n}.w", "b": "model.layers.{n}.weight"}],
        ["model.l.0.w", "optim.state.model.l.0.w.exp_avg"],
        ["model.layers.0.weight", "optim.state.model.layers.0.weight.exp_avg"],
    ),
    "of a flat model": (
        [{"a": "l.{n}.w", "b": "model.layers.{n}.weight"}, {"a": "out.w", "b": "lm_head.weight", "optional": True}],
        ["l.0.w", "optim.state.l.0.w.exp_avg"],
        ["model.layers.0.weight", "optim.state.model.layers.0.weight.exp_avg"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", STATES)
def test_states_are_named_as_on_the_side_that_they_go_to(tmp_path: Path, form: str) -> None:
    rules, *sides = STATES[form]
    for number, (given, expected) in enumerate((sides, sides[::-1])):
        arrays = {name: np.full((), n, np.float32) for n, name in enumerate(given)}
        path = write_file(tmp_path / f"{number}.safetensors", arrays)
        derived = reshard.open(path).derive(named(rules))
        assert {name: int(derived[name].compute()) for name in derived} == {name: n for n, name in enumerate(expected)}


def test_steps_of_a_stacked_tensor_are_as_many_as_what_else_is_split(tmp_path: Path) -> None:
    """Without the weight, as many as its states; with neither, a count is asked for."""
    rules = named([{"a": "l.{n}.w", "b": {"stack": "w", "by": "n"}}])
    for prefix, others in (("optim.state.", ["w"]), ("state.", ["state.w.exp_avg"]), ("", ["w.exp_avg"])):
        step = f"{prefix}w.step"
        arrays = {name: np.zeros((3, 2), np.float32) for name in others} | {step: np.array(5, np.float32)}
        derived = reshard.open(write_file(tmp_path / "a.safetensors", arrays)).derive(rules)
        expected = {f"{prefix}l.{n}.w.step" for n in range(3)}
        assert {name for name in derived if name.endswith("step")} == expected
        assert {float(derived[name].compute()) for name in expected} == {5.0}
