"""The arguments of a training with Megatron-LM, as its checkpoints state them: the sizes of the model and of its mesh.

An argument that is missing, None or of another kind is unknown, not off: it may be younger than the file, or another
program wrote the file. Another name of an argument counts if the first has no value.

Sources: Megatron-LM `megatron/training/arguments.py`, core 0.16.1, and of 2019 to 2022; MindSpeed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reshard.kits.torch.pickles import Pairs, PickledObject, describe

if TYPE_CHECKING:
    from collections.abc import Mapping

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

        >>> arguments = Arguments.of({"num_layers": 4, "moe_intermediate_size": 8, "swiglu": "yes"})
        >>> arguments["num_layers"], arguments["moe_ffn_hidden_size"], arguments["swiglu"]
        (4, 8, None)
        """
        values: dict[str, Any] = {}
        for kind, names in ((_is_number, _NUMBERS), (_is_flag, _FLAGS), (bool, _OTHERS)):
            for name in names:
                candidates = (stated.get(each) for each in (name, _OTHER_NAMES.get(name, name)))
                values[name] = next(filter(kind, candidates), None)
        return cls(values)

    def __getitem__(self, name: str) -> Any:
        """Return the value of an argument; None if it is unknown."""
        return self.values[name]

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


def _is_number(value: object) -> bool:
    return type(value) is int and 0 < value < 1 << 63


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def stated_in(namespace: object) -> dict[str, object]:
    """Return the arguments in a pickled `argparse.Namespace`, as plain data; {} for another value."""
    state = namespace.state if isinstance(namespace, PickledObject) and namespace.name == "Namespace" else None
    return (
        known({key: value for key, value in state.items() if isinstance(key, str)}) if isinstance(state, Pairs) else {}
    )


def known(values: Mapping[Any, object]) -> dict[str, object]:
    """Return the arguments that are read, under all their names; a value that is not plain becomes its description."""
    return {name: _plain(values[name]) for name in _NAMES if name in values}


def _plain(value: object) -> object:
    items = value if isinstance(value, list) else [value]
    is_plain = all(item is None or isinstance(item, bool | float | str | int) for item in items)
    return value if is_plain else describe(value)
