"""Files that are cut off, and files that are missing: one wording for all formats, and a hint."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest
from commands import done
from refusals import refused
from safetensors.numpy import save_file

import reshard
from reshard.errors import SourceError

if TYPE_CHECKING:
    from pathlib import Path

RECORDED = {
    "a DCP": ("dcp/fsdp2_bf16/checkpoint", "*.distcp", "truncated", "missing-file"),
    "DeepSpeed": ("deepspeed/s3_dp2_bf16/checkpoint", "*/*optim_states.pt", "truncated", "missing-ranks"),
    "Checkpoint 2.0": (
        "checkpoint2/graph_dp2_tp2_pp2_zero/checkpoint",
        "**/*-model-*.safetensors",
        "truncated",
        "missing-file",
    ),
    "Orbax": ("orbax/mesh8_ocdbt_zarr2/checkpoint", "**/d/*", "truncated", "missing-file"),
}
"""A recorded checkpoint, one of its files, and the codes if that is cut off or missing."""


@pytest.fixture(params=RECORDED)
def recorded(request: pytest.FixtureRequest, mindspore_data: Path, tmp_path: Path) -> tuple[Path, Path, str, str]:
    path, pattern, cut, missing = RECORDED[request.param]
    root = tmp_path / "checkpoint"
    shutil.copytree(mindspore_data / path, root)
    return root, max(root.glob(pattern), key=lambda file: file.stat().st_size), cut, missing


def test_a_file_that_is_cut_off_says_how_many_bytes_it_has(recorded: tuple[Path, Path, str, str]) -> None:
    root, file, code, _ = recorded
    half = file.stat().st_size // 2
    file.write_bytes(file.read_bytes()[:half])
    with refused(SourceError, code, file.name, f"it has {half} bytes") as caught:
        reshard.open(root)
    assert caught.value.hint.startswith("copy all files")


def test_a_file_that_is_missing_is_named_with_a_hint(recorded: tuple[Path, Path, str, str]) -> None:
    root, file, _, code = recorded
    file.unlink()
    with refused(SourceError, code) as caught:
        reshard.open(root)
    assert caught.value.hint.startswith("copy all files")


def test_a_set_of_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"w": np.zeros((4, 4), np.float32)}, path)
    size = path.stat().st_size
    for nbytes in (size - 1, 20):
        path.write_bytes(path.read_bytes()[:nbytes])
        with refused(SourceError, "truncated", f"it has {nbytes} bytes of ") as caught:
            reshard.open(path)
        assert caught.value.hint.startswith("copy all files")


def test_tensors_and_objects_that_are_left_out_are_counted_apart(mindspore_data: Path, tmp_path: Path) -> None:
    """By the conversion and by `verify`: Megatron's metadata list 9 states, and 16 objects."""
    source, target = mindspore_data / "dcp/mcore_tp2_pp2/checkpoint", tmp_path / "weights"
    count = "9 tensors and 16 objects left out"
    assert count in done("convert", source, target, "--to", "dcp", "--weights-only").stdout
    assert count in done("verify", target).stdout
