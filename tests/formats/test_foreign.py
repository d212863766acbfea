"""Files of other programs, empty directories and directories above checkpoints: refused by name, with what to type."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from checkpoints import write_file
from refusals import failed, refused

import reshard
from reshard import SourceError

if TYPE_CHECKING:
    from pathlib import Path

WEIGHTS = {"w": np.ones((2, 4), np.float32)}


def write_gguf(root: Path) -> str:
    (root / "model-q4.gguf").write_bytes(b"GGUF" + bytes(60))
    return "model-q4.gguf"


def write_vllm(root: Path) -> str:
    for rank in range(2):
        write_file(root / f"model-rank-{rank}-part-0.safetensors", WEIGHTS)
    return "model-rank-1-part-0.safetensors"


def write_engine(root: Path) -> str:
    (root / "rank0.engine").write_bytes(b"ftrt" + bytes(60))
    return "rank0.engine"


def write_tensorrt(root: Path) -> str:
    (root / "config.json").write_text(json.dumps({"dtype": "float16", "mapping": {"world_size": 2, "tp_size": 2}}))
    for rank in range(2):
        write_file(root / f"rank{rank}.safetensors", WEIGHTS)
    return "rank0.safetensors"


def write_npz(root: Path) -> str:
    np.savez(root / "a.npz", **WEIGHTS)
    np.save(root / "b.npy", WEIGHTS["w"])
    return "a.npz"


FOREIGN = [write_gguf, write_vllm, write_engine, write_tensorrt, write_npz]


@pytest.mark.parametrize("write", FOREIGN)
def test_another_programs_files_are_refused(write: object, tmp_path: Path) -> None:
    """The directory, and each file by itself."""
    name = write(tmp_path)  # type: ignore[operator]
    for path in (tmp_path, tmp_path / name):
        for command in ("inspect", "verify"):
            result = failed(4, "unsupported-format", command, path, places=(path,))
            assert "hint:" in result.stderr
        with refused(SourceError, "unsupported-format", path):
            reshard.open(path)
    assert not any(each.state == "complete" for each in reshard.runs(tmp_path))


@pytest.mark.parametrize("write", [write_gguf, write_npz])
def test_next_to_a_checkpoint_they_are_ignored(write: object, tmp_path: Path) -> None:
    write(tmp_path)  # type: ignore[operator]
    (tmp_path / "config.json").write_text('{"label_mapping": {"world": 1}, "mapping": "none"}')
    write_file(tmp_path / "model.safetensors", WEIGHTS)
    assert [*reshard.open(tmp_path)] == ["w"]
    assert [each.state for each in reshard.runs(tmp_path)] == ["complete"]


@pytest.mark.parametrize("write", [write_gguf, write_engine, write_npz])
def test_above_a_checkpoint_they_are_ignored(write: object, tmp_path: Path) -> None:
    write(tmp_path)  # type: ignore[operator]
    write_file(tmp_path / "weights" / "model.safetensors", WEIGHTS)
    failed(4, "no-checkpoint", "inspect", tmp_path, places=(f"open {tmp_path / 'weights'}",))
    assert [(each.path, each.state) for each in reshard.runs(tmp_path)] == [(str(tmp_path / "weights"), "complete")]


def test_what_the_hint_on_archives_says_works(tmp_path: Path) -> None:
    write_npz(tmp_path)
    reshard.write(dict(np.load(tmp_path / "a.npz")), tmp_path / "a.safetensors")
    assert np.array_equal(np.asarray(reshard.open(tmp_path / "a.safetensors")["w"]), WEIGHTS["w"])


def test_an_empty_directory(tmp_path: Path) -> None:
    failed(4, "empty-directory", "inspect", tmp_path, places=(tmp_path,))


def test_checkpoints_below(tmp_path: Path) -> None:
    for step in (1, 2):
        write_file(tmp_path / "exp" / "a" / f"step-{step}" / "model.safetensors", WEIGHTS)
    (tmp_path / "exp" / ".git").mkdir()
    (tmp_path / "exp" / "gguf").mkdir()
    write_gguf(tmp_path / "exp" / "gguf")
    failed(4, "no-checkpoint", "inspect", tmp_path, places=("exp/a/step-1, exp/a/step-2", f"reshard runs {tmp_path}"))
    failed(4, "no-checkpoint", "inspect", tmp_path / "exp" / "a", places=("step-1, step-2",))
    (tmp_path / "none" / "x").mkdir(parents=True)
    failed(4, "no-checkpoint", "inspect", tmp_path / "none", places=("--rank-pattern",))
