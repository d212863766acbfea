"""A lost tensor is noticed: one word has one range in all rules, and config.json says how many layers there are."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import write_file
from commands import call, done
from refusals import refused
from samples import sampled
from test_examples import CONFIG, EXAMPLES, both_sides
from truths import assert_arrays

import reshard
from reshard import Rules
from reshard.errors import SourceError

if TYPE_CHECKING:
    from pathlib import Path

    from helpers import Array

LAYERS = range(4)


def rules(*items: dict[str, Any], config: dict[str, Any] | None = None) -> Rules:
    return Rules.of({"reshard-rules": 1, "sides": ["a", "b"], "rules": list(items), "config": config or {}})


def opened(tmp_path: Path, names: list[str]) -> reshard.Checkpoint:
    arrays = {name: np.full((2, 3), number, np.float32) for number, name in enumerate(names)}
    return reshard.open(write_file(tmp_path / "source.safetensors", arrays))


def layers(name: str, numbers: Any = LAYERS) -> list[str]:
    return [name.format(number) for number in numbers]


Q = {"a": "q.{l}", "b": "query.{l}"}
K = {"a": "k.{l}", "b": "key.{l}"}
STACKED = {"a": "k.{l}", "b": {"stack": "key", "by": "l"}}
OPTIONAL = {**K, "optional": True}


@pytest.mark.parametrize("second", [K, STACKED, OPTIONAL])
@pytest.mark.parametrize("lost", [0, 2, 3])
def test_a_tensor_that_one_layer_lacks(tmp_path: Path, second: dict[str, Any], lost: int) -> None:
    both = rules(Q, second)
    names = [*layers("q.{}"), *layers("k.{}")]
    assert len(opened(tmp_path, names).derive(both).tensors) == (5 if second is STACKED else 8)
    names.remove(f"k.{lost}")
    with refused(SourceError, "missing-tensor", f"'k.{lost}'"):
        opened(tmp_path, names).derive(both)


def test_the_other_way_round(tmp_path: Path) -> None:
    """What is lost is named as the source names it; a stack that is too short is of too few."""
    names = [*layers("query.{}"), *layers("key.{}", range(3))]
    with refused(SourceError, "missing-tensor", "'key.3'"):
        opened(tmp_path, names).derive(rules(Q, K))
    arrays = {"key": np.zeros((3, 2), np.float32)} | {name: np.zeros(2, np.float32) for name in layers("query.{}")}
    source = reshard.open(write_file(tmp_path / "stack.safetensors", arrays))
    with refused(SourceError, "missing-tensor", "'k.3'"):
        source.derive(rules(Q, STACKED))


def test_a_state_that_one_layer_lacks(tmp_path: Path) -> None:
    """States have ranges of their own: some layers may be frozen, and then all their states are absent."""
    weights = [*layers("q.{}"), *layers("k.{}")]
    frozen = [f"{name}.exp_avg" for name in weights if name.endswith(("2", "3"))]
    assert len(opened(tmp_path, weights + frozen).derive(rules(Q, K)).tensors) == 12
    with refused(SourceError, "missing-tensor", "'k.3.exp_avg'"):
        opened(tmp_path, [*weights, *frozen[:-1]]).derive(rules(Q, K))


def test_layers_of_two_kinds_have_two_words(tmp_path: Path) -> None:
    names = [*layers("q.{}"), *layers("dense.{}", [0]), *layers("experts.{}", [1, 2, 3])]
    dense, experts = ({"a": f"{kind}.{{{word}}}", "b": f"x.{kind}.{{{word}}}"} for kind, word in
                      (("dense", "l"), ("experts", "l")))  # fmt: skip
    with refused(SourceError, "missing-tensor", "$.rules[1]", "$.rules[2]", "another word"):
        opened(tmp_path, names).derive(rules(Q, dense, experts))
    experts = {"a": "experts.{moe}", "b": "x.experts.{moe}"}
    dense = {"a": "dense.{dense}", "b": "x.dense.{dense}"}
    assert len(opened(tmp_path, names).derive(rules(Q, dense, experts)).tensors) == 8


def test_what_a_nearer_rule_takes_is_not_lost(tmp_path: Path) -> None:
    """Nor what was not chosen when the checkpoint was opened, and what is left out need not be whole."""
    nearer = {"a": "k.0", "b": "first"}
    names = [*layers("q.{}"), *layers("k.{}")]
    assert len(opened(tmp_path, names).derive(rules(Q, K, nearer)).tensors) == 8
    back = [*layers("query.{}"), *layers("key.{}", [1, 2, 3]), "first"]
    assert set(opened(tmp_path, back).derive(rules(Q, K, nearer)).tensors) == set(names)
    chosen = opened(tmp_path, names).sel("q.*", "k.1")
    assert len(chosen.derive(rules(Q, K, nearer | {"optional": True})).tensors) == 5
    names += layers("inv_freq.{}", [0, 7])
    assert len(opened(tmp_path, names).derive(rules(Q, K, {"a": "inv_freq.{l}", "b": None})).tensors) == 8


@pytest.mark.parametrize("name", sampled([(name,) for name in EXAMPLES], 6))
def test_each_tensor_of_the_last_layer_of_each_example(tmp_path: Path, name: str) -> None:
    """On both sides; what may be absent (`optional`), and what predicts one token more, may be so in all layers."""
    some = Rules.read(name, config=CONFIG, let={"divisor": 8} if name.endswith(("mcore", "layers")) else None)
    for tensors, expected in zip(both_sides(name), reversed(both_sides(name)), strict=True):
        source = reshard.open(write_file(tmp_path / "source.safetensors", tensors))
        assert_arrays(source.derive(some), expected)
        last = max((f".{n}." for n in range(9) if any(f"layers.{n}." in key for key in tensors)), default="none")
        lost = [key for key in tensors if f"layers{last}" in key and not key.startswith("mtp.")]
        assert lost or not any("layers.0." in key for key in tensors)
        for key in lost:
            rest = {name: tensor for name, tensor in source.tensors.items() if name != key}
            without = reshard.Checkpoint(replace(source._record, tensors=rest))
            with pytest.raises(SourceError):
                without.derive(some)


# --- how many layers the configuration says ------------------------------------------------------------------------


def model(numbers: Any, *, hidden: int = 2) -> dict[str, Array]:
    names = ("input_layernorm", "self_attn.v_proj")
    some = {f"model.layers.{n}.{name}.weight": np.ones((hidden,), np.float32) for n in numbers for name in names}
    return some | {"model.norm.weight": np.ones((hidden,), np.float32)}


PLAIN = [
    {"a": "model.norm.weight", "b": "norm"},
    {"a": "model.layers.{l}.input_layernorm.weight", "b": {"stack": "norms", "by": "l"}},
    {"a": "model.layers.{l}.self_attn.v_proj.weight", "b": "v.{l}"},
]
MTP = [
    {"a": "model.layers.3.input_layernorm.weight", "b": "mtp.norm", "optional": True},
    {"a": "model.layers.3.self_attn.v_proj.weight", "b": "mtp.v", "optional": True},
]


@pytest.mark.parametrize(
    ("numbers", "config", "is_fine"),
    [
        (range(3), {"num_hidden_layers": 3}, True),
        (range(2), {"num_hidden_layers": 3}, False),
        (range(4), {"num_hidden_layers": 3}, False),
        (range(3), {"text_config": {"num_hidden_layers": 3}}, True),
        (range(2), {"text_config": {"num_hidden_layers": 3}}, False),
        (range(3), {"num_hidden_layers": 3, "num_nextn_predict_layers": 1}, True),
        (range(4), {"num_hidden_layers": 3, "num_nextn_predict_layers": 1}, True),
        (range(2), {"num_hidden_layers": 3, "num_nextn_predict_layers": 1}, False),
        (range(2), {"vision_config": {"num_hidden_layers": 3}}, True),
    ],
)
@pytest.mark.parametrize("more", [[], MTP])
def test_how_many_layers_there_are(
    tmp_path: Path, numbers: Any, config: dict[str, Any], is_fine: bool, more: list[dict[str, Any]]
) -> None:
    """Both ways: the layers are those of the names that parts have, on whichever side these are."""
    source = reshard.open(write_file(tmp_path / "source.safetensors", model(numbers)))
    made = source.derive(rules(*PLAIN, *more))
    arrays = {name: np.asarray(array) for name, array in made.items()}
    back = reshard.open(write_file(tmp_path / "made.safetensors", arrays))
    with_config = rules(*PLAIN, *more, config=config)
    for side in (source, back):
        if is_fine:
            assert side.derive(with_config).tensors
        else:
            with refused(SourceError, "missing-layers", "num_hidden_layers"):
                side.derive(with_config)


def test_at_the_command_line(tmp_path: Path) -> None:
    """By the source's own config.json, and by --model-config in place of it."""
    (tmp_path / "hf").mkdir()
    write_file(tmp_path / "hf" / "model.safetensors", model(range(2)))
    content = {"reshard-rules": 1, "sides": ["a", "b"], "rules": PLAIN}
    (tmp_path / "rules.yaml").write_text(json.dumps(content))
    words = ["unify", tmp_path / "hf", tmp_path / "out", "--rules", tmp_path / "rules.yaml"]
    for count, place in ((3, tmp_path / "hf"), (2, tmp_path)):
        (place / "config.json").write_text(json.dumps({"num_hidden_layers": count}))
    assert call(*words).exit_code == 4
    assert not (tmp_path / "out").exists()
    done(*words, "--model-config", tmp_path / "config.json")
    assert set(reshard.open(tmp_path / "out").tensors) == {"norm", "norms", "v.0", "v.1"}
