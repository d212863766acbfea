"""Small models in parts of tensor-parallel ranks, as Meta and Megatron-LM save them. The cuts are written out here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from saves_files import Made, tensor, write_save

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from checkpoints import Array

LLAMA_AXES = {
    "output.weight": 0, "wq.weight": 0, "wk.weight": 0, "wv.weight": 0, "w1.weight": 0, "w3.weight": 0,
    "wo.weight": 1, "w2.weight": 1,
}  # fmt: skip
MEGATRON_AXES = {
    "word_embeddings.weight": 0, "output_layer.weight": 0, "linear_qkv.weight": 0, "linear_qkv.bias": 0,
    "linear_fc1.weight": 0, "linear_proj.weight": 1, "linear_fc2.weight": 1, "query_key_value.weight": 0,
    "dense_h_to_4h.weight": 0, "attention.dense.weight": 1, "dense_4h_to_h.weight": 1,
}  # fmt: skip
PARAMS = {"dim": 8, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": -1, "norm_eps": 1e-5}


def random(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
    """Random values, of which no two are equal."""
    generator = np.random.default_rng(7)
    return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def axis_of(name: str, axes: Mapping[str, int]) -> int | None:
    return next((axis for ending, axis in axes.items() if name.endswith(ending)), None)


def part_of(array: Array, axis: int | None, part: int, parts: int, *, gated: bool = False) -> Array:
    """One part; of two fused layers, a part of each."""
    if axis is None:
        return array
    if gated:
        return np.concatenate([np.split(half, parts)[part] for half in np.split(array, 2)])
    return np.split(array, parts, axis)[part]


def llama() -> dict[str, Array]:
    """A model with the sizes of `PARAMS`."""
    shapes: dict[str, tuple[int, ...]] = {
        "tok_embeddings.weight": (16, 8), "norm.weight": (8,), "output.weight": (16, 8), "rope.freqs": (1,)
    }  # fmt: skip
    for layer in range(2):
        shapes |= {
            f"layers.{layer}.{name}.weight": shape
            for name, shape in {
                "attention.wq": (8, 8), "attention.wk": (4, 8), "attention.wv": (4, 8), "attention.wo": (8, 8),
                "feed_forward.w1": (12, 8), "feed_forward.w2": (8, 12), "feed_forward.w3": (12, 8),
                "attention_norm": (8,), "ffn_norm": (8,),
            }.items()
        }  # fmt: skip
    return random(shapes)


def write_llama(
    root: Path,
    full: Mapping[str, Array],
    parts: int = 2,
    *,
    embedding_axis: int = 0,
    change: Callable[[int, dict[str, Any]], object] = lambda part, state: None,  # noqa: ARG005
) -> Path:
    """Write the files of all parts; `change` spoils the state dict of one."""
    axes = LLAMA_AXES | {"tok_embeddings.weight": embedding_axis}
    for part in range(parts):
        state: dict[str, Any] = {
            name: tensor(part_of(array, axis_of(name, axes), part, parts)) for name, array in full.items()
        }
        change(part, state)
        write_save(root / f"consolidated.{part:02d}.pth", state)
    return root


ARGS = {
    "num_layers": 4, "hidden_size": 8, "num_attention_heads": 4, "num_query_groups": 2, "group_query_attention": True,
    "ffn_hidden_size": 12, "padded_vocab_size": 16, "vocab_size": 13, "swiglu": True,
    "untie_embeddings_and_output_weights": True, "add_bias_linear": False, "params_dtype": "torch.float32",
}  # fmt: skip


def megatron(layers: int = 4, stack: str = "decoder", *, gated: bool = True, old: bool = False) -> dict[str, Array]:
    """A model with the sizes of `ARGS`, under the names of Megatron-Core, or those of before."""
    attention, dense, fused = ("self_attention", "linear_proj", "linear_qkv")
    first, second, norm = "linear_fc1", "linear_fc2", "pre_mlp_layernorm"
    embedding, head = "embedding.word_embeddings.weight", "output_layer.weight"
    if old:
        attention, dense, fused, norm = "attention", "dense", "query_key_value", "post_attention_layernorm"
        first, second = "dense_h_to_4h", "dense_4h_to_h"
        embedding, head = f"language_model.{embedding}", f"language_model.{head}"
        stack = "language_model.encoder"
    shapes: dict[str, tuple[int, ...]] = {embedding: (16, 8)}
    for layer in range(layers):
        shapes |= {
            f"{stack}.layers.{layer}.{name}": shape
            for name, shape in {
                "input_layernorm.weight": (8,), f"{attention}.{fused}.weight": (16, 8),
                f"{attention}.{dense}.weight": (8, 8), f"{norm}.weight": (8,),
                f"mlp.{first}.weight": (24 if gated else 12, 8), f"mlp.{second}.weight": (8, 12),
            }.items()
        }  # fmt: skip
    return random(shapes | {f"{stack}.final_layernorm.weight": (8,), head: (16, 8)})


def write_megatron(
    root: Path,
    full: Mapping[str, Array],
    layers: list[list[int]],
    parts: int = 2,
    *,
    args: Mapping[str, Any] | None = None,
    change: Callable[[int, int, dict[str, Any]], object] = lambda stage, part, value: None,  # noqa: ARG005
    name: str = "model_optim_rng.pt",
    **top: Any,
) -> Path:
    """Write the files of all ranks.

    Args:
        root: the directory of the iteration.
        full: the whole model.
        layers: for each virtual stage, the number of layers in each stage.
        parts: the number of tensor-parallel parts.
        args: other arguments; those that are None are left out.
        change: spoils the value of a file.
        name: the name of the files.
        top: other items of the dicts.
    """
    stages, chunks = len(layers[0]), len(layers)
    sizes = {
        "tensor_model_parallel_size": parts, "pipeline_model_parallel_size": stages,
        "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
    }  # fmt: skip
    known = {key: value for key, value in (ARGS | sizes | dict(args or {})).items() if value != "left out"}
    models: dict[tuple[int, int, int], dict[str, Any]] = {}
    first = 0
    for chunk, of_stages in enumerate(layers):
        for stage, count in enumerate(of_stages):
            is_last = (chunk, stage) == (chunks - 1, stages - 1)
            for part in range(parts):
                model = models[chunk, stage, part] = {}
                for key, array in full.items():
                    local = _local(key, range(first, first + count), is_first=not chunk and not stage, is_last=is_last)
                    if local:
                        gated = bool(known["swiglu"]) and ("linear_fc1" in key or "dense_h_to_4h" in key)
                        cut = part_of(array, axis_of(key, MEGATRON_AXES), part, parts, gated=gated)
                        model[local] = tensor(cut)
            first += count
    for stage in range(stages):
        for part in range(parts):
            of_rank = [models[chunk, stage, part] for chunk in range(chunks)]
            value: dict[str, Any] = {
                "args": Made("Namespace", state=dict(known), module="argparse"), "checkpoint_version": 3.0,
                "iteration": 5, **({f"model{chunk}": model for chunk, model in enumerate(of_rank)} if chunks > 1 else
                                   {"model": of_rank[0]}), **top,
            }  # fmt: skip
            change(stage, part, value)
            directory = f"mp_rank_{part:02d}" + (f"_{stage:03d}" if stages > 1 else "")
            write_save(root / directory / name, value)
    return root


def _local(key: str, layers: range, *, is_first: bool, is_last: bool) -> str:
    """Return the name of a tensor in the file of a stage with some layers; "" if it is not there."""
    before, found, rest = key.partition(".layers.")
    if found:
        number, _, rest = rest.partition(".")
        return f"{before}.layers.{int(number) - layers.start}.{rest}" if int(number) in layers else ""
    return key if (is_first if "embedding" in key else is_last) else ""


def nested(model: Mapping[str, Any]) -> dict[str, Any]:
    """A model of before Megatron-Core: dicts by module, and in that of the layers dotted names."""
    result: dict[str, Any] = {}
    for key, value in model.items():
        path = key.split(".", 2 if ".encoder." in key else -1)
        inner = result
        for step in path[:-1]:
            inner = inner.setdefault(step, {})
        inner[path[-1]] = value
    return result
