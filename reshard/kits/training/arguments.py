"""The arguments of a training with Megatron-LM, as its checkpoints state them: the sizes of the model and of its mesh.

An argument that is missing or None is unknown, not off: it may be younger than the file, or another program wrote the
file. Names of other programs count if Megatron's own has no value. What is known is compared with the files.

Sources: Megatron-LM `megatron/training/arguments.py`, core 0.16.1, and of 2019 to 2022; megatron-core 0.16.1
`transformer/{transformer_block,pipeline_parallel_layer_layout}.py`; MindSpeed's `schedules_method` and `noop_layers`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from reshard.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Mapping

DUALPIPE_V = "dualpipev"
"""The schedule whose second virtual stage runs through the pipeline backwards."""

RANK_SIZES = (
    "tensor_model_parallel_size", "model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size",
)  # fmt: skip
"""The arguments that say on how many ranks a model is."""

_OTHER_NAMES = {
    "tensor_model_parallel_size": ("model_parallel_size",),  # before pipelines
    "virtual_pipeline_model_parallel_size": ("num_virtual_stages_per_pipeline_rank",),
    "decoder_first_pipeline_num_layers": ("num_layers_in_first_pipeline_stage",),
    "decoder_last_pipeline_num_layers": ("num_layers_in_last_pipeline_stage",),
    "schedules_method": ("schedule_method",),
    "num_layers": ("num_hidden_layers",),
    "num_experts": ("num_moe_experts", "n_routed_experts"),
    "ffn_hidden_size": ("intermediate_size",),
    "moe_ffn_hidden_size": ("moe_intermediate_size",),
    "kv_channels": ("head_dim",),
    "qk_head_dim": ("qk_nope_head_dim",),
    "qk_pos_emb_head_dim": ("qk_rope_head_dim",),
    "apply_layernorm_1p": ("layernorm_zero_centered_gamma",),
}
_OPPOSITES = {"untie_embeddings_and_output_weights": ("tie_word_embeddings", "share_embeddings_and_output_weights")}
_AT_LEAST_ONE = {
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size", "num_layers", "hidden_size", "ffn_hidden_size",
    "num_attention_heads", "num_query_groups", "kv_channels", "padded_vocab_size",
}  # fmt: skip
_MOST_PLACES = 1 << 12


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a training, under the names of Megatron-LM; None for what is unknown."""

    tensor_model_parallel_size: int | None = None
    pipeline_model_parallel_size: int | None = None
    virtual_pipeline_model_parallel_size: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    expert_model_parallel_size: int | None = None
    expert_tensor_parallel_size: int | None = None
    num_layers: int | None = None
    decoder_first_pipeline_num_layers: int | None = None
    decoder_last_pipeline_num_layers: int | None = None
    mtp_num_layers: int | None = None
    hidden_size: int | None = None
    ffn_hidden_size: int | None = None
    num_attention_heads: int | None = None
    num_query_groups: int | None = None
    num_key_value_heads: int | None = None
    kv_channels: int | None = None
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_head_dim: int | None = None
    qk_pos_emb_head_dim: int | None = None
    v_head_dim: int | None = None
    vocab_size: int | None = None
    padded_vocab_size: int | None = None
    num_experts: int | None = None
    first_k_dense_replace: int | None = None
    moe_ffn_hidden_size: int | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_latent_size: int | None = None
    moe_mlp_glu_interleave_size: int | None = None
    moe_shared_expert_glu_interleave_size: int | None = None
    group_query_attention: bool | None = None
    swiglu: bool | None = None
    quick_geglu: bool | None = None
    gated_linear_unit: bool | None = None
    attention_output_gate: bool | None = None
    multi_latent_attention: bool | None = None
    untie_embeddings_and_output_weights: bool | None = None
    account_for_embedding_in_pipeline_split: bool | None = None
    account_for_loss_in_pipeline_split: bool | None = None
    rotary_interleaved: bool | None = None
    apply_layernorm_1p: bool | None = None
    tp_2d: bool | None = None
    moe_tp_extend_ep: bool | None = None
    schedules_method: str | None = None
    pipeline_model_parallel_layout: str | None = None
    num_layer_list: str | None = None
    moe_layer_freq: object = None
    noop_layers: object = None
    heterogeneous_layers_config_path: object = None
    heterogeneous_layers_config_encoded_json: object = None

    @classmethod
    def of(cls, values: Mapping[str, object]) -> Arguments:
        """Return the arguments among the attributes of a namespace.

        Raises:
            SourceError: a value is not of its kind, or two names of one argument have different values. The message
                does not name the file.
        """
        result: dict[str, Any] = {}
        for field in fields(cls):
            known = {
                name: value
                for name in (field.name, *_OTHER_NAMES.get(field.name, ()))
                if (value := _value(name, str(field.type), field.name, values.get(name))) is not None
            }
            for name in _OPPOSITES.get(field.name, ()):
                if (opposite := _value(name, "bool", name, values.get(name))) is not None:
                    known[name] = not opposite
            if not known:
                continue
            first, *others = known
            other = next((name for name in others if known[name] != known[first]), "")
            if other and other != "model_parallel_size":  # which once was the product of both
                facts = f"{first} {values[first]} and {other} {values[other]}"
                raise SourceError(f"has {facts} in args, which contradict each other", code="files-disagree")
            result[field.name] = known[first]
        return cls(**result)

    @property
    def is_gated(self) -> bool | None:
        """Return whether the first layer of an MLP is two fused ones, gate and up; None if unknown."""
        flags = (self.swiglu, self.quick_geglu, self.gated_linear_unit)
        return True if True in flags else None if self.swiglu is None else False

    @property
    def gating(self) -> str:
        """Return what is stated of the activation, for messages."""
        flags = {name: getattr(self, name) for name in ("swiglu", "quick_geglu", "gated_linear_unit")}
        return next((f"{name} True" for name, value in flags.items() if value), f"swiglu {self.swiglu}")

    @property
    def groups(self) -> int | None:
        """Return the number of heads of keys and values; None if unknown."""
        if self.num_key_value_heads is not None:
            return self.num_key_value_heads  # which other programs write, beside Megatron's flag or without it
        return self.num_attention_heads if self.group_query_attention is False else self.num_query_groups

    @property
    def head_width(self) -> int | None:
        """Return the width of a head; None if unknown."""
        if self.kv_channels is None and self.hidden_size and self.num_attention_heads:
            return self.hidden_size // self.num_attention_heads
        return self.kv_channels

    @property
    def is_backwards(self) -> bool:
        """Return whether the second virtual stage runs through the pipeline backwards."""
        return self.schedules_method == DUALPIPE_V

    def has_experts(self, layer: int) -> bool | None:
        """Return whether a layer has experts, by number; None if unknown."""
        frequency = self.moe_layer_freq
        if self.num_experts is None or frequency is None:
            return None
        if isinstance(frequency, list):
            return bool(frequency[layer]) if layer < len(frequency) else None
        is_in_turn = isinstance(frequency, int) and frequency > 0 and layer % frequency == 0
        return is_in_turn and layer >= (self.first_k_dense_replace or 0)

    def virtual_stages(self) -> int | None:
        """Return the number of virtual stages; None if unknown.

        Raises:
            SourceError: the arguments contradict each other. The message does not name the file.
        """
        stages = self.pipeline_model_parallel_size or 1
        derived: dict[str, int] = {}
        if self.virtual_pipeline_model_parallel_size:
            derived["virtual_pipeline_model_parallel_size"] = self.virtual_pipeline_model_parallel_size
        if self.is_backwards:
            derived[f"schedules_method {DUALPIPE_V}"] = 2
        if self.pipeline_model_parallel_layout is not None:
            places = len(_layout(self.pipeline_model_parallel_layout))
            derived[f"pipeline_model_parallel_layout {self.pipeline_model_parallel_layout!r:.80}"] = -(
                -places // stages
            )
        size, layers = self.num_layers_per_virtual_pipeline_stage, self.num_layers
        is_uneven = self.decoder_first_pipeline_num_layers or self.decoder_last_pipeline_num_layers
        if size and layers and not is_uneven and stages > 1:
            layers += bool(self.account_for_embedding_in_pipeline_split) + bool(self.account_for_loss_in_pipeline_split)
            if layers % (stages * size):
                raise SourceError(
                    f"has num_layers_per_virtual_pipeline_stage {size} in args; {layers} layers in {stages} stages "
                    "cannot be cut so", code="files-disagree",
                )  # fmt: skip
            derived[f"num_layers_per_virtual_pipeline_stage {size}"] = layers // stages // size
        if len({*derived.values()}) > 1:
            facts = ", ".join(f"{count} virtual stages by {name}" for name, count in derived.items())
            raise SourceError(f"has args that contradict each other: {facts}", code="files-disagree")
        return next(iter(derived.values()), None)

    def layers_by_place(self) -> tuple[str, dict[tuple[int, int], int]]:
        """Return the number of layers of each virtual stage of each stage, and the argument that gives it.

        Both are empty if no argument gives them: stages need not be even, and how they are not is often unsaid.
        """
        stages, chunks = self.pipeline_model_parallel_size or 1, self.virtual_stages() or 1
        if stages * chunks > _MOST_PLACES:
            return "", {}
        places = [(chunk, stage) for chunk in range(chunks) for stage in range(stages)]
        if (layout := self.pipeline_model_parallel_layout) is not None:
            counts = [of_place.count("t") for of_place in _layout(layout)]
            return f"pipeline_model_parallel_layout {layout!r:.80}", dict(zip(places, counts, strict=False))
        if self.num_layer_list is not None and chunks == 1:
            counts = [int(text) for text in self.num_layer_list.split(",") if text.strip().isdecimal()]
            return f"num_layer_list {self.num_layer_list!r:.80}", dict(zip(places, counts, strict=False))
        ends = {
            0: (self.decoder_first_pipeline_num_layers, "decoder_first_pipeline_num_layers"),
            stages - 1: (self.decoder_last_pipeline_num_layers, "decoder_last_pipeline_num_layers"),
        }
        known = {stage: count for stage, (count, _) in ends.items() if count is not None}
        if known and stages > 1:
            texts = [f"{name} {count}" for count, name in ends.values() if count is not None]
            rest = (self.num_layers or 0) - sum(known.values())
            if self.num_layers and stages > len(known) and rest >= 0 and not rest % (stages - len(known)):
                known |= {stage: rest // (stages - len(known)) for stage in range(stages) if stage not in known}
            by_place = {(c, s): known[s] // chunks for c, s in places if s in known and not known[s] % chunks}
            return " and ".join(texts), by_place
        size = self.num_layers_per_virtual_pipeline_stage
        if size and stages > 1 and not self.is_backwards:
            by_place = dict.fromkeys(places, size)
            by_place[places[0]] -= bool(self.account_for_embedding_in_pipeline_split)
            by_place[places[-1]] -= bool(self.account_for_loss_in_pipeline_split)
            return f"num_layers_per_virtual_pipeline_stage {size}", by_place
        return "", {}

    def difference(self, other: Arguments) -> str:
        """Return the name of the first argument that differs, or ""."""
        return next((each.name for each in fields(self) if getattr(self, each.name) != getattr(other, each.name)), "")

    def shapes(self) -> dict[str, tuple[int | None, ...]]:
        """Return the whole shapes that follow, by the ending of the name of a tensor; of two, the longer counts."""
        hidden, heads, vocabulary = self.hidden_size, self.num_attention_heads, self.padded_vocab_size
        shapes: dict[str, tuple[int | None, ...]] = {
            ".word_embeddings.weight": (vocabulary, hidden), "output_layer.weight": (vocabulary, hidden),
            ".router.weight": (self.num_experts, hidden), ".router.expert_bias": (self.num_experts,),
        }  # fmt: skip
        if self.heterogeneous_layers_config_path or self.heterogeneous_layers_config_encoded_json:
            return shapes
        width, groups = self.head_width, self.groups
        queries = heads * width if heads and width else None
        gated = (2 if self.attention_output_gate else 1) * (queries or 0)  # each query has a gate
        fused = gated + 2 * groups * width if gated and width and groups else None
        if self.multi_latent_attention:
            queries = heads * self.v_head_dim if heads and self.v_head_dim else None
            shapes |= self._latent_shapes()
        shapes |= {
            ".linear_qkv.weight": (fused, hidden), ".query_key_value.weight": (fused, hidden),
            ".linear_qkv.bias": (fused,), ".query_key_value.bias": (fused,),
            ".linear_proj.weight": (hidden, queries), "attention.dense.weight": (hidden, queries),
            "input_layernorm.weight": (hidden,), "final_layernorm.weight": (hidden,),
        }  # fmt: skip
        experts, shared = self.moe_ffn_hidden_size, self.moe_shared_expert_intermediate_size
        outside = self.moe_latent_size or hidden
        for first, second in (("linear_fc1", "linear_fc2"), ("dense_h_to_4h", "dense_4h_to_h")):
            shapes |= self._mlp_shapes(".mlp", first, second, self.ffn_hidden_size, hidden)
            shapes |= self._mlp_shapes(".experts", first, second, experts, outside)
            shapes |= self._mlp_shapes(".shared_experts", first, second, shared, hidden)
        return shapes

    def _mlp_shapes(
        self, prefix: str, first: str, second: str, inner: int | None, outside: int | None
    ) -> dict[str, tuple[int | None, ...]]:
        rows = None if inner is None or self.is_gated is None else inner * (2 if self.is_gated else 1)
        return {
            f"{prefix}.{first}.weight": (rows, outside), f"{prefix}.{first}.bias": (rows,),
            f"{prefix}.{second}.weight": (outside, inner),
        }  # fmt: skip

    def _latent_shapes(self) -> dict[str, tuple[int | None, ...]]:
        """Return the shapes of multi-latent attention."""
        heads, keys, positions, values = (
            self.num_attention_heads, self.qk_head_dim, self.qk_pos_emb_head_dim, self.v_head_dim,
        )  # fmt: skip
        queries = heads * (keys + positions) if heads and keys and positions else None
        both = heads * (keys + values) if heads and keys and values else None
        return {
            ".linear_q_proj.weight": (queries, self.hidden_size),
            ".linear_q_up_proj.weight": (queries, self.q_lora_rank),
            ".linear_kv_up_proj.weight": (both, self.kv_lora_rank),
        }


NAMES = frozenset(
    {each.name for each in fields(Arguments)}.union(*_OTHER_NAMES.values(), *_OPPOSITES.values())
)  # fmt: skip
"""The arguments that are read, under all their names."""

_LOCAL_EXPERT = re.compile(r"\.experts\.local_experts\.\d{1,9}\.|\.experts\.experts\.(?:\d{1,9}\.)?")
_NUMBERED = re.compile(r"(?<=\.weight)\d{1,9}\Z|(?<=\.bias)\d{1,9}\Z")  # as Transformer Engine groups experts


def shape_of(name: str, shapes: Mapping[str, tuple[int | None, ...]]) -> tuple[int | None, ...] | None:
    """Return the shape of a tensor of Megatron by the ending of its name; None if nothing of it is known.

    >>> shape_of("a.mlp.experts.local_experts.3.linear_fc2.weight", {".experts.linear_fc2.weight": (8, 4)})
    (8, 4)
    """
    dotted = _LOCAL_EXPERT.sub(".experts.", "." + _NUMBERED.sub("", name))
    endings = [ending for ending in shapes if dotted.endswith(ending)]
    shape = shapes[max(endings, key=len)] if endings else ()
    return shape if any(shape) else None


def _value(name: str, kind: str, field: str, value: object) -> object:
    """Return a value of an argument, None if it is unknown; raise `SourceError` if it is of another kind."""
    if value is None or (name == "num_experts" and value == [1]):  # which Megatron-DeepSpeed has for no experts
        return None
    if name == "moe_layer_freq":
        return value if isinstance(value, int | list) and value else None
    if kind == "object":
        return True if value else None
    if kind.startswith("str"):
        return value if isinstance(value, str) and value else None
    is_flag = kind.startswith("bool")
    if type(value) is int and not value and not is_flag and field not in _AT_LEAST_ONE:
        return None
    if type(value) is not (bool if is_flag else int) or not (is_flag or 0 < value < 1 << 63):
        raise SourceError(
            f"has {name} {value!r:.60} in args; expected a {'flag' if is_flag else 'number'}", code="bad-value"
        )
    return value


def _layout(text: str) -> list[str]:
    """Return the letters of each place of a pipeline, as `pipeline_model_parallel_layout` gives them.

    >>> _layout("Et*2|(t|)*2,mL")
    ['Ett', 't', 't', 'mL']
    """
    text = text.replace(",", "")
    for pattern in (r"\(([^()]+)\)\*(\d{1,5})", r"([^()*])\*(\d{1,5})"):
        before = text
        text = re.sub(pattern, lambda match: match[1] * min(int(match[2]), _MOST_PLACES), before[:_MOST_PLACES])
    if not re.fullmatch(r"[EtmL|]*", text) or len(text) > _MOST_PLACES:
        raise SourceError(
            f"has pipeline_model_parallel_layout {text!r:.60} in args, which is not such a layout", code="bad-value"
        )
    return text.split("|")
