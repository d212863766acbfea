"""Replicas of two steps of a training: verifying a checkpoint alone finds them, by samples."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import numbers, write_file, write_ranks
from commands import call, done

import reshard
from reshard import Layout, Strategy

if TYPE_CHECKING:
    from pathlib import Path

LARGE = numbers({"w": (64, 1024), "v": (32, 8)}) | {"global_step": np.array([7], np.int32)}
ROWS = Strategy.of({"w": Layout.of([2, 2], [0, -1]), "v": Layout.of([2, 2], [-1, -1])})
"""On each half of four ranks the same; a block of `w` is too large to be sampled whole."""


def of_step(place: Path, step: int) -> Path:
    """Write a Checkpoint 2.0 on four ranks, of some step."""
    full = {name: value + value.dtype.type(step) for name, value in LARGE.items()}
    source = reshard.open(write_file(place.parent / f"step_{step}.safetensors", full))
    reshard.plan(source, ROWS, to="checkpoint2", target_step=7).run(place, fsync=False)
    shutil.rmtree(place / ".reshard")  # as MindSpore Transformers would have written it
    return place / "iteration_00000007"


@pytest.fixture
def torn(tmp_path: Path) -> Path:
    """A Checkpoint 2.0 whose rank 3 has files of another step."""
    place, other = of_step(tmp_path / "run", 0), of_step(tmp_path / "other", 1)
    done("verify", place.parent)
    for path in other.glob("*-0000003-*.safetensors"):
        shutil.copy(path, place)
    return place


def differences(*words: Any) -> list[dict[str, Any]]:
    result = call("verify", *words, "--json")
    assert result.exit_code == 3, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)["differences"]
    return found


def test_of_a_checkpoint_2(torn: Path, tmp_path: Path) -> None:
    for place in (torn, torn.parent):
        found = {one["tensor"]: one for one in differences(place)}
        assert set(found) == set(LARGE)
        assert all((one["kind"], one["rank"]) == ("values", 3) for one in found.values())
        assert all("-0000003-" in one["path"] for one in found.values())
        assert all("rank 3" in one["text"] for one in found.values())
    shown = call("verify", torn)
    assert "differs between rank 1 and rank 3" in shown.stdout
    assert call("convert", "--to=mindspore", torn, tmp_path / "u").exit_code == 4
    assert not reshard.verify(torn).equal


def test_of_a_step_alone(torn: Path) -> None:
    """A rank whose weights are right and whose count of steps is not."""
    model = "checkpoint-model-0000003-0000004.safetensors"
    shutil.copy(torn / model.replace("0000003-", "0000001-"), torn / model)
    assert [one["tensor"] for one in differences(torn)] == ["global_step"]


def test_of_ranks_with_a_strategy(tmp_path: Path) -> None:
    root = write_ranks(tmp_path / "ranks", {name: LARGE[name] for name in ("w", "v")}, ROWS)
    reshard.write_strategy(ROWS, tmp_path / "rows.ckpt")
    words = [root, "--target-strategy", tmp_path / "rows.ckpt"]
    assert "but for samples of 5 of 5 replicas" in done("verify", *words, "-v").stdout
    later = {"w": LARGE["w"][:32] + np.float32(1), "v": LARGE["v"]}
    write_file(next((root / "rank_2").iterdir()), later)
    (one,) = differences(*words)
    assert (one["tensor"], one["rank"], one["block"]) == ("w", 2, {"start": [0, 0], "stop": [32, 1024]})


def test_values_of_each_rank_s_own_are_no_difference(tmp_path: Path) -> None:
    for rank in range(2):
        own = {"w": LARGE["w"], "learning_rate": np.array(rank, np.float32)}
        write_file(tmp_path / f"ranks/rank_{rank}/a.safetensors", own)
    reshard.write_strategy(Strategy.of({"w": Layout.of([2], [-1, -1])}), tmp_path / "s.ckpt")
    done("verify", tmp_path / "ranks", "--target-strategy", tmp_path / "s.ckpt")
