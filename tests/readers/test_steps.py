"""Directories of steps without a tracker file: DCPs as torchtitan names them, and Orbax with a prefix."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest
from checkpoints import assert_equal
from commands import done
from dcp_files import item, write_torch
from refusals import failed, refused

import reshard
from reshard.errors import SourceError

if TYPE_CHECKING:
    from pathlib import Path


def write_step(root: Path, value: float) -> dict[str, np.ndarray]:
    """Write a DCP of one tensor, as PyTorch does."""
    full = {"w": np.full((4, 2), value, np.float32)}
    write_torch(root, full, {0: [("w", ((0, 0), (4, 2)), item(full["w"]))]})
    return full


@pytest.mark.parametrize(
    "name", ["step-{}", "step_{}", "checkpoint-{}", "epoch_{}", "Step{}", "model-step-{}", "step_{}_ckp"]
)
def test_the_newest_step_of_a_run(name: str, tmp_path: Path) -> None:
    for step in (9, 10):
        full = write_step(tmp_path / name.format(step), step)
    source = reshard.open(tmp_path)
    assert_equal(source, full)
    assert not source.warnings
    assert_equal(reshard.open(tmp_path, step=9), {"w": np.full((4, 2), 9, np.float32)})
    assert [(each.step, each.last) for each in reshard.runs(tmp_path)] == [("9", False), ("10", True)]
    done("convert", tmp_path, tmp_path.with_suffix(".out"), "--to", "hf")
    assert_equal(reshard.open(tmp_path.with_suffix(".out")), full)


def test_an_unfinished_step_is_passed_over_with_a_warning(tmp_path: Path) -> None:
    full = write_step(tmp_path / "step-1", 1)
    write_step(tmp_path / "step-2", 2)
    (tmp_path / "step-2" / ".metadata").unlink()
    source = reshard.open(tmp_path)
    assert_equal(source, full)
    assert any("step-2" in warning for warning in source.warnings)
    failed(4, "unfinished", "inspect", tmp_path, "--step", "2", places=(".metadata",))
    shutil.rmtree(tmp_path / "step-1")
    with refused(SourceError, "no-such-iteration", tmp_path):
        reshard.open(tmp_path)


@pytest.mark.parametrize("name", ["checkpoint_{}", "my_run_{}", "step_{:06}"])
def test_steps_of_orbax_have_a_prefix(name: str, mindspore_data: Path, tmp_path: Path) -> None:
    run = mindspore_data / "orbax" / "run" / "checkpoint"
    steps = sorted(int(each.name) for each in run.iterdir() if each.name.isdigit())
    for step in steps:
        shutil.copytree(run / str(step), tmp_path / name.format(step))
    last = {key: np.asarray(value).tobytes() for key, value in reshard.open(tmp_path / name.format(steps[-1])).items()}
    assert {key: np.asarray(value).tobytes() for key, value in reshard.open(tmp_path).items()} == last
    assert [each.step for each in reshard.runs(tmp_path)] == [*map(str, steps)]
