"""Names of the files and of the index of a set: those of transformers, diffusers and PEFT, with variants."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from checkpoints import assert_equal
from commands import done
from refusals import failed, refused
from safetensors.numpy import save_file

import reshard
from reshard.errors import SourceError, TargetError

if TYPE_CHECKING:
    from pathlib import Path

SETS = [
    ("model-0000{}-of-00002.safetensors", "model.safetensors.index.json"),
    ("diffusion_pytorch_model-0000{}-of-00002.safetensors", "diffusion_pytorch_model.safetensors.index.json"),
    ("diffusion_pytorch_model.fp16-0000{}-of-00002.safetensors", "diffusion_pytorch_model.safetensors.index.fp16.json"),
    ("diffusion_pytorch_model.fp16-0000{}-of-00002.safetensors", "diffusion_pytorch_model.fp16.safetensors.index.json"),
    ("model.fp16-0000{}-of-00002.safetensors", "model.safetensors.index.fp16.json"),
    ("adapter_model-0000{}-of-00002.safetensors", "adapter_model.safetensors.index.json"),
]


def write_set(root: Path, stem: str, index: str, factor: int = 1) -> dict[str, np.ndarray]:
    """Write a set of two files with the library of safetensors."""
    root.mkdir(exist_ok=True)
    full = {f"w{number}": np.arange(4, dtype=np.float32) * number * factor for number in (1, 2)}
    for number, (name, array) in enumerate(full.items(), 1):
        save_file({name: array}, root / stem.format(number))
    weight_map = {f"w{number}": stem.format(number) for number in (1, 2)}
    (root / index).write_text(json.dumps({"metadata": {"total_size": 32}, "weight_map": weight_map}))
    return full


@pytest.mark.parametrize(("stem", "index"), SETS)
def test_a_set_is_opened_by_its_directory(stem: str, index: str, tmp_path: Path) -> None:
    full = write_set(tmp_path / "set", stem, index)
    (tmp_path / "set" / "config.json").write_text("{}")
    assert_equal(reshard.open(tmp_path / "set"), full)
    assert [(each.format, each.state) for each in reshard.runs(tmp_path)] == [("hf set", "complete")]
    done("convert", tmp_path / "set", tmp_path / "out", "--to", "hf")
    done("verify", tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").glob("*.json")} == {"model.safetensors.index.json", "config.json"}
    with refused(SourceError, "one-of-several", index):
        reshard.open(tmp_path / "set" / stem.format(1))
    same_names = index == "model.safetensors.index.json"
    code = "already-exists" if same_names else "other-set"
    with refused(TargetError, code, tmp_path / "set"):  # nor is it written over
        reshard.convert(tmp_path / "out", tmp_path / "set", to="hf")


@pytest.mark.parametrize(("stem", "index"), SETS)
def test_a_set_that_lacks_a_file_is_refused(stem: str, index: str, tmp_path: Path) -> None:
    write_set(tmp_path, stem, index)
    (tmp_path / stem.format(2)).unlink()
    failed(4, "not-found", "inspect", tmp_path, places=(stem.format(2),))
    assert [each.state for each in reshard.runs(tmp_path)] == ["incomplete"]


def test_one_of_two_sets_is_chosen_by_its_suffix(tmp_path: Path) -> None:
    plain = write_set(tmp_path / "two", *SETS[0])
    half = write_set(tmp_path / "two", *SETS[4], 2)
    with refused(SourceError, "several-checkpoints", SETS[4][1]):
        reshard.open(tmp_path / "two")
    failed(4, "several-checkpoints", "inspect", tmp_path / "two", places=("--suffix index.json",))
    assert_equal(reshard.open(tmp_path / "two", suffix="index.json"), plain)
    for suffix in ("fp16", "fp16.json"):
        assert_equal(reshard.open(tmp_path / "two", suffix=suffix), half)
    done("convert", tmp_path / "two", tmp_path / "out", "--to", "hf", "--suffix", "fp16")
    assert_equal(reshard.open(tmp_path / "out"), half)
    done("verify", tmp_path / "out")
