"""The arguments of a training with Megatron-LM, as its files carry them: the sizes of the model and of its mesh.

Only numbers and flags are read, from an `argparse.Namespace`. A missing number is unknown; a missing flag is off, as it
was before the flag existed.

Sources: Megatron-LM `megatron/training/arguments.py`, core 0.16.1, and of 2019 to 2022.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from reshard.errors import SourceError
from reshard.readers.pickles import Pairs, PickledObject, describe

if TYPE_CHECKING:
    from collections.abc import Mapping

_MOST_ARGUMENTS = 1 << 14
_FORMER = {"tensor_model_parallel_size": "model_parallel_size"}  # before pipelines


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a training, under the names of Megatron-LM; None for an unknown number."""

    tensor_model_parallel_size: int | None = None
    pipeline_model_parallel_size: int | None = None
    virtual_pipeline_model_parallel_size: int | None = None
    expert_model_parallel_size: int | None = None
    expert_tensor_parallel_size: int | None = None
    num_layers: int | None = None
    hidden_size: int | None = None
    ffn_hidden_size: int | None = None
    num_attention_heads: int | None = None
    num_query_groups: int | None = None
    kv_channels: int | None = None
    padded_vocab_size: int | None = None
    group_query_attention: bool = False
    swiglu: bool = False
    quick_geglu: bool = False
    attention_output_gate: bool = False
    multi_latent_attention: bool = False
    untie_embeddings_and_output_weights: bool = False

    @classmethod
    def of(cls, namespace: object) -> Arguments:
        """Return the arguments in a pickled `Namespace`.

        Raises:
            SourceError: it is not a namespace, or a value is not a number or flag. The message does not name the file.
        """
        values = _attributes(namespace)
        result: dict[str, Any] = {}
        for field in fields(cls):
            value = values.get(field.name, values.get(_FORMER.get(field.name, "")))
            if value is None:
                continue
            is_flag = field.default is False
            if type(value) is not (bool if is_flag else int) or not (is_flag or 0 < value < 1 << 63):
                raise SourceError(
                    f"has {field.name} {describe(value)} in args; expected a {'flag' if is_flag else 'number'}",
                    code="bad-value",
                )
            result[field.name] = value
        return cls(**result)

    @property
    def is_gated(self) -> bool:
        """Return whether the first layer of an MLP is two fused ones, gate and up."""
        return self.swiglu or self.quick_geglu

    @property
    def has_ranks(self) -> bool:
        """Return whether the model is on several ranks."""
        sizes = (self.tensor_model_parallel_size, self.pipeline_model_parallel_size, self.expert_model_parallel_size)
        return any(size is not None and size > 1 for size in sizes)

    def difference(self, other: Arguments) -> str:
        """Return the name of the first argument that differs, or ""."""
        return next((each.name for each in fields(self) if getattr(self, each.name) != getattr(other, each.name)), "")

    def shapes(self) -> dict[str, tuple[int | None, ...]]:
        """Return the whole shapes that follow, by the ending of the name of a tensor of the decoder."""
        hidden, heads, vocabulary, inner = (
            self.hidden_size, self.num_attention_heads, self.padded_vocab_size, self.ffn_hidden_size,
        )  # fmt: skip
        width = self.kv_channels or (hidden // heads if hidden and heads else None)
        groups = self.num_query_groups if self.group_query_attention else heads
        queries = heads * width if heads and width else None
        is_plain = not self.attention_output_gate  # which doubles the queries
        fused = queries + 2 * groups * width if queries and width and groups and is_plain else None
        first = inner * (2 if self.is_gated else 1) if inner else None
        if self.multi_latent_attention:
            queries = None
        return {
            ".word_embeddings.weight": (vocabulary, hidden), "output_layer.weight": (vocabulary, hidden),
            ".linear_qkv.weight": (fused, hidden), ".query_key_value.weight": (fused, hidden),
            ".linear_qkv.bias": (fused,), ".query_key_value.bias": (fused,),
            ".linear_proj.weight": (hidden, queries), "attention.dense.weight": (hidden, queries),
            ".mlp.linear_fc1.weight": (first, hidden), ".mlp.dense_h_to_4h.weight": (first, hidden),
            ".mlp.linear_fc1.bias": (first,), ".mlp.dense_h_to_4h.bias": (first,),
            ".mlp.linear_fc2.weight": (hidden, inner), ".mlp.dense_4h_to_h.weight": (hidden, inner),
            "input_layernorm.weight": (hidden,), "final_layernorm.weight": (hidden,),
        }  # fmt: skip


def _attributes(namespace: object) -> Mapping[str, object]:
    """Return the attributes of a pickled `Namespace`, by name."""
    state = namespace.state if isinstance(namespace, PickledObject) and namespace.name == "Namespace" else None
    if not isinstance(state, Pairs) or len(state) > 2 * _MOST_ARGUMENTS:
        raise SourceError("has no args, which say how it is cut", code="no-layout")
    return {key: value for key, value in state.items() if isinstance(key, str)}
