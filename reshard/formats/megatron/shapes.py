"""The shapes of whole tensors that the arguments of a training give, by the endings of their names."""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.kits.training.arguments import Arguments

KnownShape = tuple[int | None, ...]
"""A shape, with None for an extent that is unknown."""

_OF_MODEL = {
    ".word_embeddings.weight": ("padded_vocab_size", "hidden_size"),
    ".output_layer.weight": ("padded_vocab_size", "hidden_size"),
    ".router.weight": ("num_experts", "hidden_size"),
    ".router.expert_bias": ("num_experts",),
}
_OF_LAYERS = {
    "input_layernorm.weight": ("hidden_size",),
    "final_layernorm.weight": ("hidden_size",),
    ".linear_qkv.weight": ("queries, keys and values", "hidden_size"),
    ".linear_qkv.bias": ("queries, keys and values",),
    ".linear_proj.weight": ("hidden_size", "outputs"),
    ".linear_q_proj.weight": ("latent queries", "hidden_size"),
    ".linear_q_up_proj.weight": ("latent queries", "q_lora_rank"),
    ".linear_kv_up_proj.weight": ("latent keys and values", "kv_lora_rank"),
}
_OF_MLP = {
    ".mlp": ("ffn_hidden_size", "hidden_size"),
    ".experts": ("moe_ffn_hidden_size", "around experts"),
    ".shared_experts": ("moe_shared_expert_intermediate_size", "hidden_size"),
}


def shapes(arguments: Arguments) -> dict[str, KnownShape]:
    """Return the known shapes by the ending of a name, as `core_name` has it."""
    heads, width = arguments["num_attention_heads"], arguments.head_width
    latent_width, values_width = arguments["qk_head_dim"], arguments["v_head_dim"]
    gates = 2 if arguments["attention_output_gate"] else 1  # each query has one
    sizes: dict[str, int | None] = {
        "queries, keys and values": _sum(_product(gates, heads, width), _product(2, arguments.groups, width)),
        "outputs": _product(heads, values_width if arguments["multi_latent_attention"] else width),
        "latent queries": _product(heads, _sum(latent_width, arguments["qk_pos_emb_head_dim"])),
        "latent keys and values": _product(heads, _sum(latent_width, values_width)),
        "around experts": arguments["moe_latent_size"] or arguments["hidden_size"],
    }
    named = dict(_OF_MODEL)
    if not (arguments["heterogeneous_layers_config_path"] or arguments["heterogeneous_layers_config_encoded_json"]):
        named |= _OF_LAYERS
        for module, (inside, outside) in _OF_MLP.items():
            rows = f"rows of {inside}"
            sizes[rows] = None if arguments.is_gated is None else _product(1 + arguments.is_gated, arguments[inside])
            named |= {f"{module}.linear_fc1.weight": (rows, outside), f"{module}.linear_fc1.bias": (rows,)}
            named |= {f"{module}.linear_fc2.weight": (outside, inside)}
    return {
        ending: tuple(sizes[size] if size in sizes else arguments[size] for size in shape)
        for ending, shape in named.items()
    }


def shape_of(name: str, known: Mapping[str, KnownShape]) -> KnownShape | None:
    """Return the shape of a tensor by the ending of its name; None if nothing of it is known.

    >>> shape_of("a.mlp.experts.local_experts.3.linear_fc2.weight", {".experts.linear_fc2.weight": (8, 4)})
    (8, 4)
    """
    name = f".{core_name(name)}"
    shape = next((shape for ending, shape in known.items() if name.endswith(ending)), ())
    return shape if any(shape) else None


_EXPERT = re.compile(r"\.local_experts\.\d{1,9}(?=\.)|(?<=\.weight)\d{1,9}\Z|(?<=\.bias)\d{1,9}\Z")
_OLDER = {
    "query_key_value.": "linear_qkv.", "attention.dense.": "attention.linear_proj.",
    "dense_h_to_4h.": "linear_fc1.", "dense_4h_to_h.": "linear_fc2.",
}  # fmt: skip


def core_name(name: str) -> str:
    """Return the name of a tensor as Megatron-Core has it; that of an expert has no number.

    >>> core_name("layers.0.mlp.experts.local_experts.3.dense_4h_to_h.weight"), core_name("experts.linear_fc1.weight12")
    ('layers.0.mlp.experts.linear_fc2.weight', 'experts.linear_fc1.weight')
    """
    for older, newer in _OLDER.items():
        name = name.replace(older, newer)
    return _EXPERT.sub("", name)


def _product(*sizes: int | None) -> int | None:
    """Return the product of sizes; None if one is unknown."""
    known = [size for size in sizes if size is not None]
    return prod(known) if len(known) == len(sizes) else None


def _sum(first: int | None, second: int | None) -> int | None:
    """Return the sum of two sizes; None if one is unknown."""
    return None if first is None or second is None else first + second
