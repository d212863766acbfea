"""zarr stores on the command line: into one, and out of it."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING

import pytest
from checkpoints import tree, write_file
from refusals import refused
from zarr_stores import FULL, SOURCE, TARGET, invoke, source

import reshard
from reshard.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["source"]  # fixtures, for pytest to find


@pytest.fixture
def strategies(tmp_path: Path) -> tuple[Path, Path]:
    reshard.write_strategy(SOURCE, tmp_path / "source.ckpt")
    reshard.write_strategy(TARGET, tmp_path / "target.ckpt")
    return tmp_path / "source.ckpt", tmp_path / "target.ckpt"


def test_to_zarr_and_split_again(source: reshard.Checkpoint, tmp_path: Path, strategies: tuple[Path, Path]) -> None:
    store = tmp_path / "m.zarr"
    done = invoke(
        "convert", source.root, store, "--source-strategy", strategies[0], "--to", "zarr", "--chunk-size", "1kB",
        "--compression", "zstd:5",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    codecs = json.loads((store / "layers.0.wo" / "zarr.json").read_text())["codecs"]
    inner = codecs[0]["configuration"]["codecs"] if codecs[0]["name"] == "sharding_indexed" else codecs
    assert inner[1] == {"name": "zstd", "configuration": {"level": 5, "checksum": False}}
    (proposed,) = [line for line in done.output.splitlines() if line.startswith("next: ")]
    checked = invoke(*shlex.split(proposed.partition(": ")[2])[1:])
    assert checked.exit_code == 0, checked.output
    shown = invoke("inspect", store)
    assert shown.exit_code == 0
    assert "zarr" in shown.output
    assert invoke("convert", store, tmp_path / "out", "--target-strategy", strategies[1]).exit_code == 0
    reshard.plan(source, TARGET).run(tmp_path / "direct")
    assert tree(tmp_path / "out") == tree(tmp_path / "direct")


def test_the_name_of_a_target_says_its_format(source: reshard.Checkpoint, tmp_path: Path) -> None:
    """No directory of safetensors files is called z.zarr, nor a safetensors file x.ckpt."""
    words = ["convert", write_file(tmp_path / "net.safetensors", FULL)]
    assert invoke(*words, tmp_path / "z.zarr").exit_code == 0
    assert reshard.open(tmp_path / "z.zarr").format == "zarr"
    store = tmp_path / "other.zarr"
    commands = [
        [*words, store, "--to", "safetensors"],
        [*words, store, "--to", "dcp"],
        [*words, store, "--to", "hf"],
        [*words, store, "--to", "ckpt"],
        ["convert", words[1], tmp_path / "other.ckpt", "--to", "safetensors"],
        ["convert", words[1], tmp_path / "other.safetensors", "--to", "ckpt"],
    ]
    before = set(tree(tmp_path))
    for command in commands:
        assert invoke(*command).exit_code == 2, command
    with refused(UsageError, "wrong-extension", "other.zarr"):
        reshard.plan(source, TARGET).run(store)
    assert set(tree(tmp_path)) == before
    assert invoke("convert", words[1], tmp_path / "net.ckpt", "--to", "ckpt").exit_code == 0
