"""Files that are cut off, and files that are missing: one code for all formats, and the place."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from commands import done
from refusals import refused

import reshard
from reshard.errors import SourceError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("path", "pattern", "missing"),
    [
        ("dcp/fsdp2_bf16", "*.distcp", "missing-file"),
        ("deepspeed/s3_dp2_bf16", "*/*optim_states.pt", "missing-ranks"),
        ("checkpoint2/graph_dp2_tp2_pp2_zero", "**/*-model-*.safetensors", "missing-file"),
        ("orbax/mesh8_ocdbt_zarr2", "**/d/*", "missing-file"),
    ],
)
def test_a_file_that_is_cut_off_or_missing(
    path: str, pattern: str, missing: str, mindspore_data: Path, tmp_path: Path
) -> None:
    root = tmp_path / "checkpoint"
    shutil.copytree(mindspore_data / path / "checkpoint", root)
    file = max(root.glob(pattern), key=lambda each: each.stat().st_size)
    half = file.stat().st_size // 2
    file.write_bytes(file.read_bytes()[:half])
    with refused(SourceError, "truncated", file.name, f"{half} bytes") as caught:
        reshard.open(root)
    assert caught.value.hint
    file.unlink()
    with refused(SourceError, missing) as caught:
        reshard.open(root)
    assert caught.value.hint


def test_tensors_and_objects_that_are_left_out_are_counted_apart(mindspore_data: Path, tmp_path: Path) -> None:
    """By the conversion and by `verify`: Megatron's metadata list 9 states, and 16 objects."""
    source, target = mindspore_data / "dcp/mcore_tp2_pp2/checkpoint", tmp_path / "weights"
    count = "9 tensors and 16 objects left out"
    assert count in done("convert", source, target, "--to", "dcp", "--weights-only").stdout
    assert count in done("verify", target).stdout
