"""What Megatron-LM's files state of the training is compared with the rules, and None is not False."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from refusals import refused
from saves_files import Made, tensor, write_save
from truths import CASES, assert_arrays, truth, yaml_of
from yaml import safe_load

import reshard
from reshard import Rules
from reshard.errors import SourceError

if TYPE_CHECKING:
    from pathlib import Path

    from truths import Truth

DENSE, SPARSE = "mcore_tp2_pp2", "mcore_moe_ep2"
OUT = "left out"


def stating(data: Path, root: Path, name: str, args: dict[str, Any]) -> Truth:
    """A checkpoint that Megatron-Core saved, with other arguments in its common.pt."""
    case = truth(data, name)
    checkpoint = shutil.copytree(case.checkpoint, root / "checkpoint")
    state = {"unread": Made("Thing", module="m"), **args}
    write_save(checkpoint / "common.pt", {"args": Made("Namespace", state=state, module="argparse"), "iteration": 1})
    return replace(case, checkpoint=checkpoint)


RIGHT = {
    "num_layers": 4, "num_attention_heads": 4, "num_query_groups": 2, "group_query_attention": True, "kv_channels": 4,
    "swiglu": True, "untie_embeddings_and_output_weights": True, "padded_vocab_size": 16, "vocab_size": 13,
    "moe_mlp_glu_interleave_size": None, "rotary_interleaved": False, "apply_layernorm_1p": False,
    "mtp_num_layers": None,
}  # fmt: skip


def right(case: Truth) -> dict[str, Any]:
    """The arguments that fit a case."""
    shape = case.mcore["embedding.word_embeddings.weight"].shape
    layers = {len(value) for key, value in case.mcore.items() if key.endswith("linear_qkv.weight")}
    config = case.rules.numbers.config
    heads = {"num_attention_heads": config["num_attention_heads"], "num_query_groups": config["num_key_value_heads"]}
    heads |= {"kv_channels": config["head_dim"], "vocab_size": config["vocab_size"]}
    args = {**RIGHT, **heads, "padded_vocab_size": shape[0], "hidden_size": shape[1], "num_layers": max(layers)}
    return {key: value for key, value in args.items() if value != OUT}


STATED: dict[str, tuple[dict[str, Any], str]] = {
    "all": ({}, ""),
    "nothing": (dict.fromkeys([*RIGHT, "hidden_size"]), ""),
    "groups of another program": (
        {"num_query_groups": None, "group_query_attention": False, "num_key_value_heads": 2}, "",
    ),
    "a number that is a flag": ({"num_attention_heads": True}, ""),
    "half the heads, twice as wide": ({"num_attention_heads": 2, "num_query_groups": 1, "kv_channels": 8}, "groups"),
    "as many groups, other heads": ({"num_attention_heads": 2, "kv_channels": None, "hidden_size": None}, "queries"),
    "another width": ({"kv_channels": 8}, "linear_qkv"),
    "no groups": ({"group_query_attention": False}, "4 groups"),
    "groups, and no flag": ({"group_query_attention": None}, ""),
    "a gate of attention": ({"attention_output_gate": True}, "queries"),
    "another order of rows": ({"rotary_interleaved": True}, "rotary_interleaved"),
    "no gate": ({"swiglu": False}, "swiglu False"),
    "no gate, by another flag": ({"swiglu": False, "gated_linear_unit": True}, ""),
    "more words than are kept": ({"vocab_size": 14}, "vocab_size 14"),
    "fewer words": ({"vocab_size": 7}, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", STATED)
def test_arguments_that_rules_depend_on(mindspore_data: Path, tmp_path: Path, name: str) -> None:
    args, place = STATED[name]
    case = stating(mindspore_data, tmp_path, DENSE, right(truth(mindspore_data, DENSE)) | args)
    source = reshard.open(case.checkpoint)  # which needs none of them
    if not place:
        assert_arrays(source.derive(case.rules), case.hf)
        return
    with refused(SourceError, "files-disagree", place):
        source.derive(case.rules)


@pytest.mark.parametrize(
    ("args", "place"),
    [
        ({"moe_mlp_glu_interleave_size": 0}, ""),
        ({"moe_mlp_glu_interleave_size": 2}, "moe_mlp_glu_interleave_size"),
        ({"moe_shared_expert_glu_interleave_size": 2}, ""),
    ],
)  # fmt: skip
def test_arguments_of_experts(mindspore_data: Path, tmp_path: Path, args: dict[str, Any], place: str) -> None:
    known = right(truth(mindspore_data, SPARSE)) | args
    case = stating(mindspore_data, tmp_path, SPARSE, {k: v for k, v in known.items() if v != OUT})
    if not place:
        assert_arrays(reshard.open(case.checkpoint).derive(case.rules), case.hf)
        return
    with refused(SourceError, "files-disagree", place):
        reshard.open(case.checkpoint).derive(case.rules)


def test_an_mlp_without_a_gate_under_rules_that_take_one(tmp_path: Path) -> None:
    """The shapes show it, also without arguments."""
    text = {"reshard-rules": 1, "sides": ["hf", "mcore"], "rules": [
        {"hf": ["l.{l}.gate", "l.{l}.up"], "mcore": {"concat": "decoder.layers.{l}.mlp.linear_fc1.weight"}},
        {"hf": "l.{l}.down", "mcore": "decoder.layers.{l}.mlp.linear_fc2.weight"},
    ]}  # fmt: skip
    model = {
        "decoder.layers.0.mlp.linear_fc1.weight": np.ones((8, 4), np.float32),
        "decoder.layers.0.mlp.linear_fc2.weight": np.ones((4, 8), np.float32),
    }
    path = write_save(tmp_path / "model.pt", {name: tensor(array) for name, array in model.items()})
    with refused(SourceError, "files-disagree", "linear_fc2", "8"):
        reshard.open(path).derive(Rules.of(text))


def test_norms_less_one(mindspore_data: Path, tmp_path: Path) -> None:
    """The rules that come with the program copy norms; others may be for a model that has them so."""
    known = right(truth(mindspore_data, DENSE)) | {"apply_layernorm_1p": True}
    case = stating(mindspore_data, tmp_path, DENSE, known)
    source = reshard.open(case.checkpoint)
    assert_arrays(source.derive(case.rules), case.hf)
    shipped = replace(case.rules, root=CASES[DENSE])
    with refused(SourceError, "files-disagree", "apply_layernorm_1p"):
        source.derive(shipped)


def test_an_untied_model_without_a_head(mindspore_data: Path, tmp_path: Path) -> None:
    """The rules take a head as optional, so that its absence would not show."""
    case = truth(mindspore_data, "mcore_layers_apart")
    model = {
        name: array for name, array in case.mcore.items()
        if name.startswith(("decoder.layers", "embedding", "decoder.final"))
    }  # fmt: skip
    text = safe_load(yaml_of("llama-hf-mcore-layers"))
    let = text["let"] | {"divisor": len(case.mcore["output_layer.weight"])}
    rules = Rules.of(text | {"let": let, "config": dict(case.rules.numbers.config)})
    for tied, place in ((False, ""), (None, ""), (True, "output_layer")):
        directory = tmp_path / str(tied) / "mp_rank_00"
        state = {"tensor_model_parallel_size": 1, "untie_embeddings_and_output_weights": tied}
        value = {
            "args": Made("Namespace", state=state, module="argparse"), "checkpoint_version": 3.0,
            "model": {name: tensor(array) for name, array in model.items()},
        }  # fmt: skip
        write_save(directory / "model_optim_rng.pt", value)
        source = reshard.open(directory.parent)
        if place:
            with refused(SourceError, "files-disagree", place):
                source.derive(rules)
        else:
            assert "lm_head.weight" not in source.derive(rules)
