"""zarr stores on the command line: `unify --format zarr`, `transform`, and both steps with `--via-zarr`."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
from checkpoints import tree, write_file
from refusals import refused
from zarr_stores import FULL, SOURCE, TARGET, invoke, source

import reshard
from reshard.errors import UsageError

__all__ = ["source"]  # fixtures, for pytest to find


@pytest.fixture
def strategies(tmp_path: Path) -> tuple[Path, Path]:
    reshard.write_strategy(SOURCE, tmp_path / "source.ckpt")
    reshard.write_strategy(TARGET, tmp_path / "target.ckpt")
    return tmp_path / "source.ckpt", tmp_path / "target.ckpt"


def test_unify_to_zarr_and_split_again(
    source: reshard.Checkpoint, tmp_path: Path, strategies: tuple[Path, Path]
) -> None:
    store = tmp_path / "m.zarr"
    done = invoke(
        "unify", source.root, store, "--source-strategy", strategies[0], "--format", "zarr", "--chunk-size", "1kB",
        "--shard-size", "0", "--compression", "zstd:5",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    codecs = json.loads((store / "layers.0.wo" / "zarr.json").read_text())["codecs"]
    assert codecs[1] == {"name": "zstd", "configuration": {"level": 5, "checksum": False}}
    (proposed,) = [line for line in done.output.splitlines() if line.startswith("next: ")]
    checked = invoke(*shlex.split(proposed.partition(": ")[2])[1:])
    assert checked.exit_code == 0, checked.output
    shown = invoke("inspect", store)
    assert shown.exit_code == 0
    assert "zarr" in shown.output
    assert invoke("transform", store, tmp_path / "out", "--target-strategy", strategies[1]).exit_code == 0
    reshard.plan(source, TARGET).run(tmp_path / "direct")
    assert tree(tmp_path / "out") == tree(tmp_path / "direct")


def test_the_name_of_a_target_says_its_format(source: reshard.Checkpoint, tmp_path: Path) -> None:
    """No directory of safetensors files is called z.zarr, nor a safetensors file x.ckpt."""
    words = ["unify", write_file(tmp_path / "net.safetensors", FULL)]
    assert invoke(*words, tmp_path / "z.zarr").exit_code == 0
    assert reshard.open(tmp_path / "z.zarr").format == "zarr"
    store = tmp_path / "other.zarr"
    commands = [
        [*words, store, "--format", "safetensors"],
        [*words, store, "--format", "dcp"],
        [*words, store, "--style", "huggingface"],
        ["convert", words[1], store, "--format", "ckpt"],
        ["convert", words[1], tmp_path / "other.ckpt", "--format", "safetensors"],
        ["convert", words[1], tmp_path / "other.safetensors", "--format", "ckpt"],
    ]
    before = set(tree(tmp_path))
    for command in commands:
        assert invoke(*command).exit_code == 2, command
    with refused(UsageError, "wrong-extension", "other.zarr"):
        reshard.plan(source, TARGET).run(store)
    assert set(tree(tmp_path)) == before
    assert invoke("convert", words[1], tmp_path / "net.ckpt", "--format", "ckpt").exit_code == 0


def test_options_of_the_other_format_are_refused(source: reshard.Checkpoint, tmp_path: Path) -> None:
    for options in (["--chunk-size", "1MB"], ["--format", "zarr", "--style", "huggingface"], ["--shard-size", "0"],
                    ["--format", "zarr", "--max-shard-size", "1GB"], ["--compression", "zstd"]):  # fmt: skip
        done = invoke("unify", source.root, tmp_path / "out", *options)
        assert done.exit_code == 2
        assert options[-2] in done.output


def test_via_zarr_and_again_without_the_source(
    source: reshard.Checkpoint, tmp_path: Path, strategies: tuple[Path, Path]
) -> None:
    store = tmp_path / "m.zarr"
    common = ["--source-strategy", strategies[0], "--target-strategy", strategies[1], "--via-zarr", store]
    reshard.plan(source, TARGET).run(tmp_path / "direct")
    dry = invoke("transform", source.root, tmp_path / "one", *common, "--dry-run", "--json")
    assert json.loads(dry.output)["format"] == "zarr"
    assert not store.exists()
    done = invoke("transform", source.root, tmp_path / "one", *common)
    assert done.exit_code == 0, done.output
    assert tree(tmp_path / "one") == tree(tmp_path / "direct")
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*")}
    done = invoke("transform", source.root, tmp_path / "two", *common)
    assert "is finished and of this source; it is used as it is" in done.output
    shutil.move(source.root, tmp_path / "gone")
    done = invoke("transform", source.root, tmp_path / "three", *common)
    assert done.exit_code == 0, done.output
    assert "does not exist; " in done.output
    assert before == {path: path.stat().st_mtime_ns for path in store.rglob("*")}
    assert tree(tmp_path / "one") == tree(tmp_path / "two") == tree(tmp_path / "three")


def test_via_zarr_refuses_the_store_of_another_source(
    source: reshard.Checkpoint, tmp_path: Path, strategies: tuple[Path, Path]
) -> None:
    common = ["--source-strategy", strategies[0], "--target-strategy", strategies[1], "--via-zarr", tmp_path / "m.zarr"]
    assert invoke("transform", source.root, tmp_path / "one", *common).exit_code == 0
    Path(source._record.files[0].path).touch()
    done = invoke("transform", source.root, tmp_path / "two", *common)
    assert done.exit_code == 6
    assert "is finished, and was made from another source" in done.output
    assert not (tmp_path / "two").exists()
