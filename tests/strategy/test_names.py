"""Names of optimizer states: a prefix and a weight in MindSpore, and the forms that distributed checkpoints have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from checkpoints import write_file
from safetensors.numpy import load_file

import reshard
from reshard import Selection
from reshard.strategy.names import optimizer_states

if TYPE_CHECKING:
    from pathlib import Path

WEIGHTS = ["model.h.0.w", "model.h.0.b", "emb"]

FORMS = {
    "PyTorch's, of a model under a prefix": ("optim.state.h.0.w.exp_avg", "model.h.0.w", "optim.state.exp_avg"),
    "of a model under none": ("optim.state.emb.step", "emb", "optim.state.step"),
    "torchtitan's": ("state.model.h.0.w.exp_avg_sq", "model.h.0.w", "state.exp_avg_sq"),
    "groups of it": ("param_groups.model.h.0.w.lr", "model.h.0.w", "param_groups.lr"),
    "of a weight that is elsewhere": ("state.other.exp_avg", "other", "state.exp_avg"),
    "what comes with that": ("state.other.step", "other", "state.step"),
    "by number": ("optimizer.state.0.exp_avg", "0", "optimizer.state.exp_avg"),
    "Megatron's": ("optimizer.state.exp_avg.model.h.0.b", "model.h.0.b", "optimizer.state.exp_avg"),
    "its weights in full": ("optimizer.state.param.other.w", "other.w", "optimizer.state.param"),
    "a weight called like a kind": ("optim.state.param.w.exp_avg", "param.w", "optim.state.exp_avg"),
    "MindSpore's": ("adam_m.emb", "emb", "adam_m"),
}


@pytest.mark.parametrize("form", FORMS)
def test_states_of_every_form(form: str) -> None:
    name, weight, kind = FORMS[form]
    more = ["state.other.exp_avg"] if form == "what comes with that" else []
    weights = ["param.w"] if form == "a weight called like a kind" else WEIGHTS
    states = optimizer_states([*weights, name, *more])
    assert (states[name].weight, states[name].kind) == (weight, kind)
    assert states[name].of(weight) == name
    assert not states.keys() & set(weights)


@pytest.mark.parametrize("name", ["state.encoder.step", "state.w", "state", "param_groups.x.y", "state.sum", "optim.x"])
def test_names_that_only_look_like_it(name: str) -> None:
    assert not optimizer_states([*WEIGHTS, name])


COPIES = {
    "BYOL": ("online_encoder.net", "target_encoder.net"), "of a smoothed model": ("ema", "model_ema.module", "swa"),
    "of distillation": ("teacher", "student"), "DINO": ("student.backbone", "teacher.backbone"),
    "of a wrapper": ("module", "_orig_mod", "model", "base_model.model"),
    "MoCo": ("momentum_encoder", "encoder_q", "encoder_k", "queue"), "of DQN": ("target", "policy"),
    "of one weight each": ("head", "linear", "prev", "stat", "state", "param", "encoder.m"),
}  # fmt: skip
WORDS = (
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum", "momentum_buffer", "moments", "moment1",
    "moment2", "adam_m", "adam_v", "lamb_m", "muon_m", "mu", "nu", "m", "v", "accum", "accu_grads", "square_avg",
    "vhat", "master", "fp32", "main_param", "step", "optimizer.exp_avg", "opt.adam_m",
)  # fmt: skip


@pytest.mark.parametrize("form", COPIES)
def test_copies_of_the_weights_under_another_prefix_are_weights(tmp_path: Path, form: str) -> None:
    """Lazily, by kind, if only weights are converted, and in an average; a real state beside them is none."""
    weights = [
        prefix + name for prefix in ("", "net.", *(f"{each}." for each in COPIES[form])) for name in ("w", "b.w")
    ]
    arrays = {name: np.full((2, 2), number, np.float32) for number, name in enumerate([*weights, "exp_avg.net.w"])}
    assert set(optimizer_states(arrays)) == {"exp_avg.net.w"}
    source = reshard.open(write_file(tmp_path / "a.safetensors", arrays))
    assert source.groups(by="kind").counts == {"weights": len(weights), "exp_avg": 1}
    report = reshard.convert(source, tmp_path / "out", to="hf", weights_only=True)
    assert report.warnings == ()
    for read in (load_file(tmp_path / "out" / "model-00001-of-00001.safetensors"), reshard.average([source, source])):
        assert {name: float(np.asarray(read[name]).mean()) for name in read} == {
            name: float(number) for number, name in enumerate(weights)
        }


@pytest.mark.parametrize("word", WORDS)
def test_words_of_optimizers(word: str) -> None:
    names = [*WEIGHTS, *(f"ema.{name}" for name in WEIGHTS), *(f"{word}.{name}" for name in WEIGHTS)]
    states = optimizer_states(names)
    assert {name: state.weight for name, state in states.items()} == {f"{word}.{name}": name for name in WEIGHTS}


def test_words_that_modules_have_too_are_states_beside_others_of_their_optimizer() -> None:
    for word, other in (("linear", "moments"), ("stat", "accum"), ("prev", "step_size")):
        assert not optimizer_states(["fc.w", f"{word}.fc.w"])
        assert set(optimizer_states(["fc.w", f"{word}.fc.w", f"{other}.fc.w"])) == {f"{word}.fc.w", f"{other}.fc.w"}


def test_they_follow_their_weights() -> None:
    names = [*WEIGHTS, *(name for name, _, _ in FORMS.values())]
    found = Selection(name_map={"model.h.*": "model.layers.*", "emb": "tok"}).renamed(names)
    assert {old: new for old, new in found.items() if old != new and old not in WEIGHTS} == {
        "optim.state.h.0.w.exp_avg": "optim.state.layers.0.w.exp_avg",
        "optim.state.emb.step": "optim.state.tok.step",
        "state.model.h.0.w.exp_avg_sq": "state.model.layers.0.w.exp_avg_sq",
        "param_groups.model.h.0.w.lr": "param_groups.model.layers.0.w.lr",
        "optimizer.state.exp_avg.model.h.0.b": "optimizer.state.exp_avg.model.layers.0.b",
        "adam_m.emb": "adam_m.tok",
    }
    without = Selection(name_map={"model.*": "*"}).renamed(names)
    assert without["optim.state.h.0.w.exp_avg"] == "optim.state.h.0.w.exp_avg"
    assert without["state.model.h.0.w.exp_avg_sq"] == "state.h.0.w.exp_avg_sq"


@pytest.mark.parametrize(
    ("names", "new_names", "expected"),
    [
        (  # of a model that has a `model` itself, as those of Hugging Face have
            ["model.model.e.w", "model.lm.w", "optim.state.model.e.w.exp_avg", "optim.state.lm.w.step"],
            {"model.*": "*"},
            ["model.e.w", "lm.w", "optim.state.model.e.w.exp_avg", "optim.state.lm.w.step"],
        ),
        (
            ["model.model.e.w", "model.lm.w", "optim.state.model.e.w.exp_avg", "optim.param_groups.lm.w.lr"],
            {"model.model.e.w": "e.w", "model.lm.w": "lm.w"},
            ["e.w", "lm.w", "optim.state.e.w.exp_avg", "optim.param_groups.lm.w.lr"],
        ),
        (  # of which one more is called like the dict
            ["model.a.w", "model.b.w", "optim.state.a.w.exp_avg", "optim.state.b.w.exp_avg"],
            {"model.a.w": "model.x.w", "model.b.w": "y.w"},
            ["model.x.w", "y.w", "optim.state.model.x.w.exp_avg", "optim.state.y.w.exp_avg"],
        ),
        (
            ["model.a.w", "optim.state.a.w.exp_avg", "accu_grads.model.a.w"],
            {"model.*": "model.decoder.*"},
            ["model.decoder.a.w", "optim.state.decoder.a.w.exp_avg", "accu_grads.model.decoder.a.w"],
        ),
        (
            ["params.a.w", "opt_state.0.mu.a.w", "opt_state.0.count"],
            {"params.*": "*"},
            ["a.w", "opt_state.0.mu.a.w", "opt_state.0.count"],
        ),
        (["w", "adam_m.w", "accu_grads.adam_m.w"], {"*": "x.*"}, ["x.w", "adam_m.x.w", "accu_grads.adam_m.x.w"]),
    ],
)
def test_globs_are_of_the_weight_that_a_state_follows(
    names: list[str], new_names: dict[str, str], expected: list[str]
) -> None:
    """And all states are named after the same part of their weights' names."""
    assert list(Selection(name_map=new_names).renamed(names).values()) == expected
