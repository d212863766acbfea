"""`reshard.demo`: checkpoints for notebooks and guides, the same each time, quick, and in a folder that is its own."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from checkpoints import tree
from refusals import refused
from samples import slow

import reshard
from reshard.api.demos import _DEMOS, MARK

if TYPE_CHECKING:
    from pathlib import Path

SOURCES = {"mindspore": 8, "large": 8, "70b": 512}  # and their numbers of ranks


def small_files(folder: Path) -> dict[str, bytes | int]:
    """The contents of files by path, or the size of those that are large; without ledgers, which have times."""
    paths = [path for path in folder.rglob("*") if path.is_file() and ".reshard" not in path.parts]
    sizes = {path: path.stat().st_size for path in paths}
    return {
        str(path.relative_to(folder)): size if size > 1 << 26 else path.read_bytes() for path, size in sizes.items()
    }


@pytest.mark.parametrize("name", [slow(name) if name in {"large", "70b"} else name for name in _DEMOS])
def test_it_is_quick_and_the_same_each_time(name: str, tmp_path: Path) -> None:
    began = time.monotonic()
    home = reshard.demo(name, tmp_path / "first")
    assert time.monotonic() - began < 20
    assert home == tmp_path / "first"
    again = reshard.demo(name, tmp_path / "second")
    assert small_files(home) == small_files(again)
    assert f"`{name}`" in (reshard.demo.__doc__ or "")
    for line in (home / MARK).read_text().splitlines()[2:]:
        assert (home / line.split()[0]).exists() or "what `reshard demo` makes" in line


@pytest.mark.parametrize("name", [slow(name) if name == "large" else name for name in SOURCES])
def test_a_checkpoint_of_ranks_has_both_strategies(name: str, tmp_path: Path) -> None:
    home = reshard.demo(name, tmp_path)
    source = reshard.open(home / "src_checkpoints", strategy=home / "src_strategy.ckpt")
    assert len(set(source.ranks)) == SOURCES[name]
    plan = reshard.plan(source, home / "dst_strategy.ckpt")
    assert not plan.dropped
    assert not plan.missing


def test_a_large_model_of_holes_takes_little_room(tmp_path: Path) -> None:
    home = reshard.demo("70b", tmp_path)
    files = [path.stat() for path in home.rglob("*.safetensors")]
    assert sum(file.st_size for file in files) > 1e12
    assert sum(file.st_blocks * 512 for file in files) < 40e6
    source = reshard.open(home / "src_checkpoints", strategy=home / "src_strategy.ckpt")
    assert 70e9 < source.nbytes / 10 < 71e9, "bfloat16 weights, two float32 moments"


def test_a_checkpoint_of_torchtitan_is_complete_and_says_nothing_of_reshard(tmp_path: Path) -> None:
    home = reshard.demo("torchtitan", tmp_path)
    assert {path.name for path in (home / "step-1000").iterdir()} == {
        ".metadata", *(f"__{rank}_0.distcp" for rank in range(8))
    }  # fmt: skip
    assert reshard.verify(home / "step-1000", against=home / "model.safetensors")
    assert reshard.open(home / "step-1000")["optimizer.state.norm.weight.step"].compute() == 1000


def test_a_training_has_one_nan(tmp_path: Path) -> None:
    home = reshard.demo("training", tmp_path)
    steps = [reshard.open(home / f"step-{number}") for number in (1000, 2000, 3000)]
    assert [step.format for step in steps] == ["safetensors", "dcp", "hf"]
    assert [sum(each.nans for each in step.stats().groups("name").values()) for step in steps] == [0, 1, 0]


def test_a_second_time_replaces_its_own_files(tmp_path: Path) -> None:
    home = reshard.demo("training", tmp_path / "home")
    before = tree(home)
    source = reshard.open(home / "step-3000")
    for target, to in (("hf", "hf"), ("mine.zarr", "zarr")):
        reshard.convert(source, home / target, to=to)
    (home / "step-1000" / "more").mkdir()
    (home / "step-2000" / ".metadata").write_bytes(b"")
    assert tree(reshard.demo("training", home)).keys() == before.keys()
    assert {path.name for path in home.iterdir()} == {name.partition("/")[0] for name in before}
    assert not (home / "step-1000" / "more").exists()
    assert (home / "step-2000" / ".metadata").read_bytes()


def test_files_of_somebody_else_in_it_stay(tmp_path: Path) -> None:
    home = reshard.demo("mindspore", tmp_path / "home")
    other = reshard.demo("training", tmp_path / "other")
    (home / "mine" / "deep").mkdir(parents=True)
    (home / "thesis.txt").write_text("mine")
    (home / "link").symlink_to(other)
    (home / "src_strategy.ckpt").unlink()
    (home / "src_strategy.ckpt").symlink_to(other / "reshard-demo.txt")
    reshard.convert(other / "step-3000", home / "result", to="hf")
    before = tree(other), tree(home / "result")
    reshard.demo("mindspore", home)
    assert {"mine", "thesis.txt", "link", "result"} < {path.name for path in home.iterdir()}
    assert (home / "mine" / "deep").is_dir()
    assert (tree(other), tree(home / "result")) == before
    assert not (home / "src_strategy.ckpt").is_symlink()


def test_what_is_not_a_demos_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with refused(reshard.TargetError, "already-exists", tmp_path):
        reshard.demo("mindspore", tmp_path)
    with refused(reshard.TargetError, "not-writable", tmp_path / "thesis.txt"):
        reshard.demo("mindspore", tmp_path / "thesis.txt")
    with refused(reshard.UsageError, "unknown-demo", "'llama'"):
        reshard.demo("llama", tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
