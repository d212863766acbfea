"""Files of `torch.save` that are a checkpoint by themselves, under any name, and alone in a directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from checkpoints import assert_equal, numbers
from commands import done
from refusals import failed, refused
from saves_files import tensor, write_save

import reshard
from reshard.errors import SourceError

if TYPE_CHECKING:
    from pathlib import Path

FULL = numbers({"w": (4, 3), "b": (5,)})


def save(path: Path, full: object = None) -> Path:
    """Write what `torch.save` makes of a state dict."""
    return write_save(path, {name: tensor(array) for name, array in (full or FULL).items()})  # type: ignore[attr-defined]


def write_legacy(path: Path) -> Path:
    """Write the format of before PyTorch 1.6: a chain of pickles, then the bytes of a tensor of [1, 2]."""
    path.write_bytes(
        b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}X\r\x00\x00\x00little_endian\x88s."
        b"\x80\x02}X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
        b"X\x01\x00\x00\x00aX\x03\x00\x00\x00cpuK\x02NtQK\x00K\x02\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtRs."
        b"\x80\x02]X\x01\x00\x00\x00aa." + (2).to_bytes(8, "little") + np.array([1, 2], "<f4").tobytes()
    )
    return path


@pytest.mark.parametrize(
    "name", ["last.ckpt", "epoch=1-step=20.ckpt", "v1-5.ckpt", "weights", "w.pkl", "w.safetensors"]
)
def test_contents_and_not_the_name_say_what_a_file_is(name: str, tmp_path: Path) -> None:
    """Lightning and Stable Diffusion name files like MindSpore."""
    assert_equal(reshard.open(save(tmp_path / name)), FULL)


def test_the_older_format(tmp_path: Path) -> None:
    assert_equal(reshard.open(write_legacy(tmp_path / "old.ckpt")), {"w": np.array([1, 2], "<f4")})
    assert_equal(reshard.open(tmp_path), {"w": np.array([1, 2], "<f4")})


def test_the_older_format_with_another_number_of_elements(tmp_path: Path) -> None:
    """Before a storage there is their number, which PyTorch compares, too: it has no other check."""
    path = write_legacy(tmp_path / "old.ckpt")
    content = path.read_bytes()
    path.write_bytes(content[:-16] + (1).to_bytes(8, "little") + content[-8:])
    with refused(SourceError, "corrupt", "old.ckpt", "'a'"):
        reshard.open(path)


def test_runs_tells_which_is_newest(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path / "checkpoints" / f"epoch={step // 10}-step={step}.ckpt")
    runs = reshard.runs(tmp_path)
    assert [(each.step, each.format, each.state) for each in runs] == [
        ("10", "torch.save", "complete"),
        ("20", "torch.save", "complete"),
    ]
    path = done("runs", tmp_path, "--newest").stdout.strip()
    assert path == str(tmp_path / "checkpoints" / "epoch=2-step=20.ckpt")
    assert_equal(reshard.open(path), FULL)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "ckpt.pth", "last.ckpt"])
def test_the_only_file_of_a_directory(name: str, tmp_path: Path) -> None:
    """With what a trainer saves beside it."""
    root = tmp_path / "model"
    save(root / name)
    for other in ("optimizer.pt", "scheduler.pt", "training_args.bin", "rng_state_0.pth", "optim_000100_rank0.pt"):
        save(root / other, {"state": np.ones(3, "f4")})
    (root / "config.json").write_text("{}")
    assert_equal(reshard.open(root), FULL)
    done("convert", root, tmp_path / "out", "--to", "hf")
    assert_equal(reshard.open(tmp_path / "out"), FULL)
    assert (tmp_path / "out" / "config.json").read_text() == "{}"
    assert "complete" in [each.state for each in reshard.runs(root)]


def test_a_directory_above_names_theirs(tmp_path: Path) -> None:
    save(tmp_path / "unet" / "diffusion_pytorch_model.bin")
    save(tmp_path / "state" / "optimizer.pt")
    failed(4, "no-checkpoint", "inspect", tmp_path, places=(f"open {tmp_path / 'unet'}",))


def test_another_archive_is_no_checkpoint(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", w=FULL["w"])
    (tmp_path / "a.npz").rename(tmp_path / "a.ckpt")
    with refused(SourceError, "corrupt", tmp_path / "a.ckpt"):
        reshard.open(tmp_path / "a.ckpt")
