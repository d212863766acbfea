"""Adapters of trainings: the float32 masters that optimizers have of a merged weight are merged, too."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from adapters import ALPHA, RANK, matrices, product, save
from checkpoints import write_file
from commands import done
from deepspeed_files import values, write_zero
from refusals import failed
from saves_files import tensor

import reshard

if TYPE_CHECKING:
    from pathlib import Path

    from helpers import Array

LAYERS = ("l.0.q_proj", "l.0.up")
GROUPS = [{"l.0.q_proj.weight": (8, 8), "l.0.up.weight": (12, 8)}, {"norm.weight": (8,)}]
NAMES = [name for group in GROUPS for name in group]


def with_adapter(full: dict[str, Array], pairs: dict[str, Array], prefixes: tuple[str, ...]) -> dict[str, Array]:
    """What numpy makes of weights and their masters."""
    result = dict(full)
    for name in (f"{prefix}{layer}.weight" for layer in LAYERS for prefix in prefixes):
        layer = name.removesuffix(".weight").rpartition("l.0")[1:]
        total = full[name].astype("f4") + np.float32(ALPHA / RANK) * product(pairs, "".join(layer))
        result[name] = total.astype(full[name].dtype)
    return result


def assert_same(found: reshard.Checkpoint, expected: dict[str, Array]) -> None:
    for name in found:
        assert np.asarray(found[name]).tobytes() == expected[name].tobytes(), name


def run_of(root: Path, stage: int, dtype: str) -> dict[str, Array]:
    """Write a run of ZeRO; its weights are in bfloat16 or float32."""
    full = values(GROUPS)
    if dtype == "bfloat16":
        return write_zero(root, GROUPS, stage=stage, full=full)
    full |= {name: full[f"fp32.{name}"] for name in NAMES}
    module = {name: tensor(np.zeros(0, "f4") if stage == 3 else full[name]) for name in NAMES}

    def model(states: dict[str, Any]) -> None:
        states["module"] = OrderedDict(module)

    return write_zero(root, GROUPS, stage=stage, full=full, model=model)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_zero(tmp_path: Path, stage: int, dtype: str) -> None:
    full = run_of(tmp_path / "run", stage, dtype)
    pairs = matrices({name: np.zeros(shape) for name, shape in GROUPS[0].items()}, LAYERS)
    lora = save(tmp_path / "lora", pairs)
    expected = with_adapter(full, pairs, ("", "fp32."))
    opened = reshard.open(tmp_path / "run")
    assert_same(opened.merge_lora(lora), expected)
    assert_same(opened.sel("fp32.*").merge_lora(lora), expected)
    command = ("convert", tmp_path / "run", "--to", "hf", "--lora", lora.root, "--tune=fsync=no")
    for number, options in enumerate((("--include", "fp32.*"), ("--weights-only",), ())):
        out = tmp_path / f"out{number}"
        done(*command[:2], out, *command[2:], *options)
        assert_same(reshard.open(out), expected)
        done("verify", out)
    assert set(reshard.open(tmp_path / "out0")) == {f"fp32.{name}" for name in NAMES}
    failed(2, "no-effect", *command[:2], tmp_path / "no", *command[2:], "--include", "exp_avg.*", places=("--lora",))
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    "master", ["optimizer.state.fp32_param.{}", "optimizer.state.param.{}", "optim.state.{}.master_param", "fp32.{}"]
)
def test_masters_by_other_names(tmp_path: Path, master: str) -> None:
    """Megatron's, PyTorch's and DeepSpeed's; moments stay, and are merged into nothing."""
    rng = np.random.default_rng(5)
    model = {f"{layer}.weight": rng.standard_normal((8, 8)).astype(ml_dtypes.bfloat16) for layer in LAYERS}
    states = {master.format(name): rng.standard_normal((8, 8)).astype("f4") for name in model}
    moments = {f"exp_avg.{name}": rng.standard_normal((8, 8)).astype("f4") for name in model}
    full: dict[str, Array] = model | states | moments
    written = {name: one.view(np.uint16) if name in model else one for name, one in full.items()}
    pairs = matrices(model, LAYERS)
    source = reshard.open(write_file(tmp_path / "model.safetensors", written))
    found = source.merge_lora(save(tmp_path / "lora", pairs))
    expected = with_adapter(model, pairs, ("",)) | moments
    for layer in LAYERS:
        name = master.format(f"{layer}.weight")
        expected[name] = states[name] + np.float32(ALPHA / RANK) * product(pairs, layer)
    assert set(found) == set(expected)
    assert_same(found, expected)


def test_masters_of_another_shape_are_named(tmp_path: Path) -> None:
    model = {"l.0.q_proj.weight": np.ones((8, 8), "f4"), "fp32.l.0.q_proj.weight": np.ones(64, "f4")}
    source = reshard.open(write_file(tmp_path / "model.safetensors", model))
    found = source.merge_lora(save(tmp_path / "lora", matrices(model, ("l.0.q_proj",))))
    assert np.array_equal(np.asarray(found["fp32.l.0.q_proj.weight"]), model["fp32.l.0.q_proj.weight"])
    assert any("fp32.l.0.q_proj.weight" in warning for warning in found.warnings)
