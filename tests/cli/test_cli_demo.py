"""`reshard demo`: what it prints, and how it exits when a byte is wrong or the folder is not its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commands import done
from refusals import failed

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        result = done("demo")
        assert "all 14,960 bytes of their 60 tensors are equal" in result.stdout
        assert "What to type next" in result.stdout
    assert (tmp_path / "reshard-demo" / "dst_checkpoints" / "rank_3" / "checkpoint_3.ckpt").is_file()


def test_demo_exits_3_when_a_byte_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from reshard.cli.groups import demo

    honest = demo.convert

    def tampered(directory: Path) -> object:
        report = honest(directory)
        path = directory / "dst_checkpoints" / "rank_2" / "checkpoint_2.ckpt"
        content = bytearray(path.read_bytes())
        content[content.index(b"net.layer2.weight") + 60] ^= 1
        path.write_bytes(content)
        return report

    monkeypatch.setattr(demo, "convert", tampered)
    path = tmp_path / "d" / "dst_checkpoints" / "rank_2" / "checkpoint_2.ckpt"
    failed(3, "not-equal", "demo", "mindspore", tmp_path / "d", places=("'net.layer2.weight'", path))


def test_the_folders_that_guides_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done("demo", "training")
    monkeypatch.chdir(tmp_path / "reshard-demo-training")
    for step in ("step-100", "step-200", "step-300", "crashed/old/step-100", "crashed/step-300"):
        assert (tmp_path / "reshard-demo-training" / step / ".metadata").is_file()
    assert done("runs", "crashed", "--newest").stdout == "crashed/step-300\n"
    failed(2, "unknown-demo", "demo", "trainings", places=("training",))
