"""The arguments of a training with Megatron-LM, as its checkpoints state them: the sizes of the model and of its mesh.

An argument that is missing or None is unknown, not off: it may be younger than the file, or another program wrote the
file. Another name of an argument counts if the first has no value. What is known is compared with the files.

Sources: Megatron-LM `megatron/training/arguments.py`, core 0.16.1, and of 2019 to 2022; MindSpeed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from reshard.errors import SourceError
from reshard.kits.torch.pickles import Pairs, PickledObject, describe

if TYPE_CHECKING:
    from collections.abc import Mapping

DUALPIPE_V = "dualpipev"
"""The schedule whose second virtual stage runs through the pipeline backwards."""

RANK_SIZES = (
    "tensor_model_parallel_size", "model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size",
)  # fmt: skip
"""The arguments that say on how many ranks a model is."""

_NUMBERS = (
    # how the model is cut
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size",
    # the model
    "num_layers", "mtp_num_layers", "hidden_size", "ffn_hidden_size", "vocab_size", "padded_vocab_size",
    # attention
    "num_attention_heads", "num_query_groups", "num_key_value_heads", "kv_channels", "q_lora_rank", "kv_lora_rank",
    "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim",
    # experts
    "num_experts", "first_k_dense_replace", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size",
    "moe_latent_size", "moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size",
)  # fmt: skip
_FLAGS = (
    "group_query_attention", "attention_output_gate", "multi_latent_attention", "rotary_interleaved",
    "swiglu", "quick_geglu", "gated_linear_unit", "apply_layernorm_1p", "untie_embeddings_and_output_weights",
    "tp_2d", "moe_tp_extend_ep",
)  # fmt: skip
_OTHERS = (
    "schedules_method", "noop_layers", "moe_layer_freq", "heterogeneous_layers_config_path",
    "heterogeneous_layers_config_encoded_json",
)  # fmt: skip
_OTHER_NAMES = {
    "tensor_model_parallel_size": "model_parallel_size",  # before pipelines
    "schedules_method": "schedule_method",
    "moe_ffn_hidden_size": "moe_intermediate_size",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
}
_NAMES = (*_NUMBERS, *_FLAGS, *_OTHERS, *_OTHER_NAMES.values())

KnownShape = tuple[int | None, ...]
"""A shape, with None for an extent that is unknown."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a training.

    Attributes:
        values: the value of each argument under the name of Megatron-LM; None if it is unknown.
    """

    values: Mapping[str, Any]

    @classmethod
    def of(cls, stated: Mapping[str, object]) -> Arguments:
        """Return the arguments among what a file states.

        Raises:
            SourceError: a value is not of its kind. The message does not name the file.

        >>> arguments = Arguments.of({"num_layers": 4, "moe_intermediate_size": 8})
        >>> arguments["num_layers"], arguments["moe_ffn_hidden_size"], arguments["swiglu"]
        (4, 8, None)
        """
        values: dict[str, Any] = {}
        for name in (*_NUMBERS, *_FLAGS, *_OTHERS):
            other = _OTHER_NAMES.get(name, name)
            own_value, other_value = (_value(each, stated.get(each), name) for each in (name, other))
            values[name] = other_value if own_value is None else own_value
        return cls(values)

    def __getitem__(self, name: str) -> Any:
        """Return the value of an argument; None if it is unknown."""
        return self.values[name]

    def difference(self, other: Arguments) -> str:
        """Return the name of the first argument that differs, or ""."""
        return next((name for name, value in self.values.items() if value != other[name]), "")

    @property
    def is_gated(self) -> bool | None:
        """Return whether the first layer of an MLP is two fused ones, gate and up; None if unknown."""
        if self["swiglu"] or self["quick_geglu"] or self["gated_linear_unit"]:
            return True
        return None if self["swiglu"] is None else False

    @property
    def groups(self) -> int | None:
        """Return the number of heads of keys and values; None if unknown."""
        groups: int | None = self["num_key_value_heads"]  # of other programs, beside Megatron's flag or without it
        if groups is None:
            groups = self["num_attention_heads" if self["group_query_attention"] is False else "num_query_groups"]
        return groups

    @property
    def head_width(self) -> int | None:
        """Return the width of a head; None if unknown."""
        hidden, heads = self["hidden_size"], self["num_attention_heads"]
        width: int | None = self["kv_channels"]
        return hidden // heads if width is None and hidden and heads else width

    @property
    def is_backwards(self) -> bool:
        """Return whether the second virtual stage runs through the pipeline backwards."""
        return bool(self["schedules_method"] == DUALPIPE_V)

    def has_experts(self, layer: int) -> bool | None:
        """Return whether a layer has experts, by number; None if unknown."""
        frequency = self["moe_layer_freq"]
        if self["num_experts"] is None:
            return None
        if isinstance(frequency, list):
            return bool(frequency[layer]) if layer < len(frequency) else None
        if not isinstance(frequency, int):
            return None
        return frequency > 0 and layer % frequency == 0 and layer >= (self["first_k_dense_replace"] or 0)

    def shapes(self) -> dict[str, KnownShape]:
        """Return the whole shapes that follow, by the ending of the name of a tensor (see `core_name`)."""
        hidden, vocabulary, experts = self["hidden_size"], self["padded_vocab_size"], self["num_experts"]
        shapes: dict[str, KnownShape] = {
            ".word_embeddings.weight": (vocabulary, hidden), ".output_layer.weight": (vocabulary, hidden),
            ".router.weight": (experts, hidden), ".router.expert_bias": (experts,),
        }  # fmt: skip
        if self["heterogeneous_layers_config_path"] or self["heterogeneous_layers_config_encoded_json"]:
            return shapes
        shapes |= {"input_layernorm.weight": (hidden,), "final_layernorm.weight": (hidden,)}
        shapes |= self._attention_shapes()
        shapes |= self._mlp_shapes(".mlp", "ffn_hidden_size", hidden)
        shapes |= self._mlp_shapes(".experts", "moe_ffn_hidden_size", self["moe_latent_size"] or hidden)
        shapes |= self._mlp_shapes(".shared_experts", "moe_shared_expert_intermediate_size", hidden)
        return shapes

    def _attention_shapes(self) -> dict[str, KnownShape]:
        hidden, heads, width, groups = self["hidden_size"], self["num_attention_heads"], self.head_width, self.groups
        queries = _product(heads, 2 if self["attention_output_gate"] else 1, width)  # each query has a gate
        keys_and_values = _product(2, groups, width)
        fused = None if queries is None or keys_and_values is None else queries + keys_and_values
        values = _product(heads, self["v_head_dim"] if self["multi_latent_attention"] else width)
        latent_queries = _product(heads, _sum(self["qk_head_dim"], self["qk_pos_emb_head_dim"]))
        latent_keys_and_values = _product(heads, _sum(self["qk_head_dim"], self["v_head_dim"]))
        return {
            ".linear_qkv.weight": (fused, hidden), ".linear_qkv.bias": (fused,),
            ".linear_proj.weight": (hidden, values),
            ".linear_q_proj.weight": (latent_queries, hidden),
            ".linear_q_up_proj.weight": (latent_queries, self["q_lora_rank"]),
            ".linear_kv_up_proj.weight": (latent_keys_and_values, self["kv_lora_rank"]),
        }  # fmt: skip

    def _mlp_shapes(self, module: str, inner: str, outside: int | None) -> dict[str, KnownShape]:
        rows = None if self.is_gated is None else _product(self[inner], 2 if self.is_gated else 1)
        return {
            f"{module}.linear_fc1.weight": (rows, outside), f"{module}.linear_fc1.bias": (rows,),
            f"{module}.linear_fc2.weight": (outside, self[inner]),
        }  # fmt: skip


def shape_of(name: str, shapes: Mapping[str, KnownShape]) -> KnownShape | None:
    """Return the shape of a tensor of Megatron by the ending of its name; None if nothing of it is known.

    >>> shape_of("a.mlp.experts.local_experts.3.linear_fc2.weight", {".experts.linear_fc2.weight": (8, 4)})
    (8, 4)
    """
    name = f".{core_name(name)}"
    shape = next((shape for ending, shape in shapes.items() if name.endswith(ending)), ())
    return shape if any(shape) else None


_EXPERT = re.compile(r"\.experts\.(?:local_experts\.\d{1,9}\.|experts\.(?:\d{1,9}\.)?)")
_NUMBERED = re.compile(r"(?<=\.weight)\d{1,9}\Z|(?<=\.bias)\d{1,9}\Z")  # as Transformer Engine groups experts
_OLDER = {
    "query_key_value.": "linear_qkv.", "attention.dense.": "attention.linear_proj.",
    "dense_h_to_4h.": "linear_fc1.", "dense_4h_to_h.": "linear_fc2.",
}  # fmt: skip


def core_name(name: str) -> str:
    """Return the name of a tensor of Megatron-LM as Megatron-Core has it; that of an expert has no number.

    >>> core_name("layers.0.mlp.experts.local_experts.3.dense_4h_to_h.weight")
    'layers.0.mlp.experts.linear_fc2.weight'
    """
    for older, newer in _OLDER.items():
        name = name.replace(older, newer)
    return _NUMBERED.sub("", _EXPERT.sub(".experts.", name))


def stated_in(namespace: object) -> dict[str, object]:
    """Return the arguments in a pickled `argparse.Namespace`, as plain data.

    Raises:
        SourceError: it is not a namespace. The message does not name the file.
    """
    state = namespace.state if isinstance(namespace, PickledObject) and namespace.name == "Namespace" else None
    if not isinstance(state, Pairs):
        raise SourceError("has no args, which say how it is cut", code="no-layout")
    return known({key: value for key, value in state.items() if isinstance(key, str)})


def known(values: Mapping[Any, object]) -> dict[str, object]:
    """Return the arguments that are read, under all their names; a value that is not plain becomes its description."""
    return {name: _plain(values[name]) for name in _NAMES if name in values}


def _plain(value: object) -> object:
    items = value if isinstance(value, list) else [value]
    return (
        value if all(item is None or isinstance(item, bool | float | str | int) for item in items) else describe(value)
    )


def _value(name: str, value: object, argument: str) -> Any:
    """Return the value under a name of an argument, None if it is unknown.

    Raises:
        SourceError: it is of another kind.
    """
    if argument in _OTHERS:
        return value or None
    kind = bool if argument in _FLAGS else int
    if value is None or value == [1] or (kind is int and type(value) is int and not value):
        return None  # Megatron-DeepSpeed has the list for no experts
    if type(value) is not kind or not 0 <= value < 1 << 63:
        raise SourceError(
            f"has {name} {value!r:.60} in args; expected a {'flag' if kind is bool else 'number'}", code="bad-value"
        )
    return value


def _product(*sizes: int | None) -> int | None:
    """Return the product of sizes; None if one is unknown."""
    known_sizes = [size for size in sizes if size is not None]
    return prod(known_sizes) if len(known_sizes) == len(sizes) else None


def _sum(first: int | None, second: int | None) -> int | None:
    """Return the sum of two sizes; None if one is unknown."""
    return None if first is None or second is None else first + second
