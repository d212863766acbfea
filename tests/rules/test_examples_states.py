"""The rules files that come with the program, with optimizer states: names and numbers on both sides, by numpy.

The weights of the two sides are those of `test_examples`. The states of a weight are named as programs name them, after
the weight of their own side.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
import pytest
from checkpoints import write_file
from samples import sampled
from test_examples import CONFIG, EXAMPLES, both_sides
from truths import assert_arrays

import reshard
from reshard import Rules

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from helpers import Array

HEADS = {"lm_head.weight", "output_layer.weight", "output.weight", "params.params.decoder.logits_dense.kernel"}
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


@pytest.mark.parametrize("name", sampled([(name,) for name in EXAMPLES], 3))
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
        with_states({key: value for key, value in side.items() if not (tied and key in HEADS)}, form, factors)
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
