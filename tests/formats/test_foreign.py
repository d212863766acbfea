"""Files of other programs, empty directories and directories above checkpoints: refused by name, with what to type.

What opens and what `runs` lists next to such files, and above them, is in `conformance/listings.json`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from checkpoints import write_file
from refusals import failed

import reshard

if TYPE_CHECKING:
    from pathlib import Path

WEIGHTS = {"w": np.ones((2, 4), np.float32)}
MAPPING = json.dumps({"dtype": "float16", "mapping": {"world_size": 2, "tp_size": 2}}).encode()
FOREIGN: dict[str, dict[str, bytes | None]] = {
    "gguf": {"model-q4.gguf": b"GGUF" + bytes(60)},
    "vllm": {f"model-rank-{rank}-part-0.safetensors": None for rank in range(2)},
    "engine": {"rank0.engine": b"ftrt" + bytes(60)},
    "tensorrt": {"rank0.safetensors": None, "rank1.safetensors": None, "config.json": MAPPING},
    "npz": {"a.npz": b"PK\3\4", "b.npy": b"\x93NUMPY"},
}
"""The contents of files by name; None for a safetensors file."""


@pytest.mark.parametrize("program", FOREIGN)
def test_another_programs_files_are_refused(program: str, tmp_path: Path) -> None:
    """The directory, and each file by itself."""
    for name, content in FOREIGN[program].items():
        if content is None:
            write_file(tmp_path / name, WEIGHTS)
        else:
            (tmp_path / name).write_bytes(content)
    for path in (tmp_path, tmp_path / next(iter(FOREIGN[program]))):
        for command in ("inspect", "verify"):
            result = failed(4, "unsupported-format", command, path, places=(path,))
            assert "hint:" in result.stderr


def test_what_the_hint_on_archives_says_works(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **WEIGHTS)
    reshard.write(dict(np.load(tmp_path / "a.npz")), tmp_path / "a.safetensors")
    assert np.array_equal(np.asarray(reshard.open(tmp_path / "a.safetensors")["w"]), WEIGHTS["w"])


def test_checkpoints_below(tmp_path: Path) -> None:
    for step in (1, 2):
        write_file(tmp_path / "exp" / "a" / f"step-{step}" / "model.safetensors", WEIGHTS)
    for name in (".git", "gguf"):
        (tmp_path / "exp" / name).mkdir()
    (tmp_path / "exp" / "gguf" / "model.gguf").write_bytes(b"GGUF")
    failed(4, "no-checkpoint", "inspect", tmp_path, places=("exp/a/step-1, exp/a/step-2", f"reshard runs {tmp_path}"))
    failed(4, "no-checkpoint", "inspect", tmp_path / "exp" / "a", places=("step-1, step-2",))
    (tmp_path / "none" / "x").mkdir(parents=True)
    failed(4, "no-checkpoint", "inspect", tmp_path / "none", places=("--rank-pattern",))
    failed(4, "empty-directory", "inspect", tmp_path / "none" / "x", places=(tmp_path,))
