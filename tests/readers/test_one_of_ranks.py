"""One rank's file is never the model: the names next to it tell, or else the user. Steps of a run are each whole."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import assert_equal, write_file
from commands import done
from fsspec.core import url_to_fs
from refusals import failed, refused
from safetensors.numpy import save_file
from saves_files import tensor, write_save

import reshard
from reshard.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from checkpoints import Array


WHOLE = np.arange(32, dtype=np.float32).reshape(8, 4)

RANKS = [
    "model_final.rank_{}.pth",  # FSDP1
    "ep0-ba10-rank{}.pt",  # Composer
    "checkpoint_last-shard{}.pt",  # fairseq
    "reshard-model_part-{}-shard0.pt",  # metaseq
    "model_part-{}.pt",
    "pytorch_model_rank{}.bin",  # accelerate
    "ModelRank{}.pt",
    "rank{}.pt",
    "model-tp0{}.safetensors",
    "model.rank_{}.safetensors",
    "net_rank_{}.ckpt",
    "tp_rank_0{}_pp_rank_000/model_weights.ckpt",  # NeMo
    "tp_rank_00_pp_rank_00{}/model_weights.ckpt",
    "rank{}/model.safetensors",
    "rank_{}/model.pt",
    "tp_{}/pytorch_model.bin",
]
UNDECIDED = ["model{}-mp2.safetensors", "pytorch_model_{}.bin", "{}.pt", "weights_{}.ckpt", "model.{}.safetensors"]
STEPS = [
    "epoch_{}.pth",
    "step-{}.safetensors",
    "checkpoint{}.pt",  # fairseq
    "checkpoint-{}/model.safetensors",
    "ckpt_{}.safetensors",
    "iter_000000{}.ckpt",
    "epoch={}-step={}00.ckpt",  # Lightning
    "last-v{}.ckpt",
    "loss=0.{}.ckpt",
    "net-{}_100.ckpt",  # MindSpore
    "ep{}-ba{}0-rank0.pt",  # Composer
    "model_00{}000.pt",  # nanochat
    "model_{}00.safetensors",
]


def write(path: Path, array: Array, name: str = "w") -> Path:
    """Write a file by its extension, as another library does; `net…ckpt` is of MindSpore."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        save_file({name: array}, path)
        return path
    if path.name.startswith("net"):
        write_file(path, {name: array}, format="ckpt")
        return path
    return write_save(path, {name: tensor(array)})


def write_ranks(root: Path, stem: str) -> list[Path]:
    """Write the rows of a tensor to the files of two ranks."""
    return [write(root / stem.format(rank), WHOLE[4 * rank : 4 * rank + 4]) for rank in (0, 1)]


@pytest.mark.parametrize("stem", RANKS)
def test_one_ranks_file_is_refused(stem: str, tmp_path: Path) -> None:
    for path, other in zip(files := write_ranks(tmp_path, stem), reversed(files), strict=True):
        with refused(SourceError, "one-of-several", path, other.relative_to(tmp_path)):
            reshard.open(path)
    with pytest.raises(SourceError):
        reshard.open(tmp_path)
    assert not any(each.state == "complete" for each in reshard.runs(tmp_path))


@pytest.mark.parametrize("stem", UNDECIDED)
def test_what_may_be_of_a_rank_or_a_step_is_not_converted_until_it_is_said_to_be_whole(
    stem: str, tmp_path: Path
) -> None:
    for path, other in zip(files := write_ranks(tmp_path, stem), reversed(files), strict=True):
        source = reshard.open(path)
        assert any(other.name in warning for warning in source.warnings)
        with refused(SourceError, "one-rank", path, other.name):
            reshard.convert(source, tmp_path / "out", to="hf")
    assert {each.state for each in reshard.runs(tmp_path)} == {"unknown"}
    assert_equal(reshard.open(files[0], layout={"*": "whole"}), {"w": WHOLE[:4]})
    if stem.endswith(".safetensors"):
        with refused(SourceError, "one-rank", files[0]):
            reshard.convert(reshard.open({0: files[0]}), tmp_path / "out", to="hf")


@pytest.mark.parametrize("stem", STEPS)
def test_steps_of_one_directory_are_whole(stem: str, tmp_path: Path) -> None:
    full = {step: WHOLE + step for step in (1, 2)}
    files = {step: write(tmp_path / stem.format(step, step), full[step]) for step in full}
    for step, path in files.items():
        assert_equal(reshard.open(path), {"w": full[step]})
    assert {each.state for each in reshard.runs(tmp_path)} == {"complete"}


@pytest.mark.parametrize("first", [{"w": (8, 4)}, {"v": (4, 4)}, {"w": (8, 4, 1)}, {"w": (4, 4), "b": (1,)}])
def test_files_of_other_tensors_are_no_ranks(first: dict[str, tuple[int, ...]], tmp_path: Path) -> None:
    """Such as two text encoders; ranks cut a tensor along one axis."""
    save_file({name: np.ones(shape, np.float32) for name, shape in first.items()}, tmp_path / "encoder_1.safetensors")
    save_file({"w": np.ones((4, 5), np.float32)}, tmp_path / "encoder_2.safetensors")
    assert {*reshard.open(tmp_path / "encoder_1.safetensors")} == {*first}


def test_what_the_user_says_is_kept_for_verify_and_the_next_run(tmp_path: Path) -> None:
    for stem in ("model_final.rank_{}.pth", "model.rank_{}.safetensors"):
        path, out = write_ranks(tmp_path, stem)[0], tmp_path / stem.format("out")
        failed(4, "one-of-several", "convert", path, out, "--to", "hf", places=("--layout '*=whole'",))
        command = "convert", path, out, "--to", "hf", "--layout", "*=whole"
        assert "nothing is left" not in done(*command).stdout
        assert "every bit" in done("verify", out).stdout
        assert "nothing is left" in done(*command).stdout
        assert_equal(reshard.open(out), {"w": WHOLE[:4]})


@pytest.mark.parametrize("stem", ["model.rank_{}.safetensors", "model-tp0{}.safetensors", "net_rank_{}.ckpt"])
def test_what_the_hint_says_joins_the_ranks(stem: str, tmp_path: Path) -> None:
    write_ranks(tmp_path, stem)
    pattern = stem.replace("0{}", "{}").format("{rank}")
    failed(4, "one-of-several", "inspect", tmp_path, places=(f"--rank-pattern {pattern}",))
    assert_equal(reshard.open(tmp_path, rank_pattern=pattern, layout={"w": "split:0"}), {"w": WHOLE})


def test_the_target_of_a_link_is_looked_at(tmp_path: Path) -> None:
    files = write_ranks(tmp_path / "run", "ep1-rank{}.pt")
    (tmp_path / "latest.pt").symlink_to(files[0])
    with refused(SourceError, "one-of-several", files[0]):
        reshard.open(tmp_path / "latest.pt")


def test_at_a_url(tmp_path: Path) -> None:
    fs, place = url_to_fs("memory://one-of-ranks")
    for stem in (RANKS[0], UNDECIDED[0], STEPS[0]):
        for path in write_ranks(tmp_path, stem):
            fs.pipe_file(f"{place}/{path.name}", path.read_bytes())
    with refused(SourceError, "one-of-several", RANKS[0].format(1)):
        reshard.open(f"memory://one-of-ranks/{RANKS[0].format(0)}")
    with refused(SourceError, "one-rank", UNDECIDED[0].format(1)):
        reshard.convert(f"memory://one-of-ranks/{UNDECIDED[0].format(0)}", tmp_path / "out", to="hf")
    assert_equal(reshard.open(f"memory://one-of-ranks/{STEPS[0].format(0)}"), {"w": WHOLE[:4]})


def test_ranks_of_adapters_and_numbers_far_apart_are_no_ranks_of_a_run(tmp_path: Path) -> None:
    for number in (8, 16):
        write(tmp_path / f"lora_rank_{number}.pt", WHOLE)
        write(tmp_path / f"width_{number}.safetensors", WHOLE)
    for path in tmp_path.iterdir():
        assert_equal(reshard.open(path), {"w": WHOLE})


def files(root: Path, pattern: str, numbers: range) -> Path:
    for number in numbers:
        write_file(root / pattern.format(number), {"w": np.zeros(2, "float32")})
    return root


def lists(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> int:
    """Return how often a directory is listed."""
    count = 0
    listdir, scandir = os.listdir, os.scandir

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call_it(*arguments: Any) -> Any:
            nonlocal count
            result = function(*arguments)  # a file is not counted
            count += 1
            return result

        return call_it

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", counting(listdir))
        patch.setattr(os, "scandir", counting(scandir))
        action()
    return count


@pytest.mark.parametrize("pattern", ["step_{}.safetensors", "model_{}.safetensors", "a{}b7.safetensors"])
def test_a_directory_is_listed_once_for_all_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    few, many = files(tmp_path / "few", pattern, range(5)), files(tmp_path / "many", pattern, range(60))
    assert len(reshard.runs(many)) == 60
    assert lists(monkeypatch, lambda: reshard.runs(many)) == lists(monkeypatch, lambda: reshard.runs(few))


def test_files_that_appear_later_are_seen(tmp_path: Path) -> None:
    """What was listed for `runs` is forgotten then."""
    root = files(tmp_path / "r", "rank_{}.safetensors", range(1))
    assert len(reshard.runs(root)) == 1
    assert "w" in reshard.open(root / "rank_0.safetensors")
    files(root, "rank_{}.safetensors", range(1, 3))
    with refused(SourceError, "one-of-several", "rank_1.safetensors"):
        reshard.open(root / "rank_0.safetensors")
