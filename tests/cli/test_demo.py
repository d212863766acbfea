"""`reshard demo`: real MindSpore files, a check that can fail, and a folder that is only ever its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from commands import done
from refusals import failed, refused

import reshard
from reshard.cli.groups import demo
from reshard.errors import VerifyError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A demo folder, transformed."""
    reshard.demo("mindspore", tmp_path)
    demo.convert(tmp_path)
    return tmp_path


def test_the_lines_for_python_run(tmp_path: Path) -> None:
    lines: list[str] = []
    demo.demo("mindspore", tmp_path, lines.append)
    code = "\n".join(lines).split("The same from Python:\n")[1]
    exec("\n".join(line[2:] for line in code.splitlines()), {})  # noqa: S102 -- our own text
    assert (tmp_path / "dst_again" / "rank_3" / "checkpoint_3.ckpt").is_file()


def test_the_files_are_mindspores_own(made: Path, mindspore_data: Path) -> None:
    real = mindspore_data / "real"
    for rank in range(8):
        ours = made / "src_checkpoints" / f"rank_{rank}" / f"checkpoint_{rank}.ckpt"
        assert ours.read_bytes() == (real / "tut_src8" / "ckpt" / f"rank_{rank}" / "net.ckpt").read_bytes()
    for ours, theirs in {
        "src_strategy.ckpt": "tut_src8/strategy_0.ckpt",
        "dst_strategy.ckpt": "tut_dst4_opt/strategy_0.ckpt",
        "full.npz": "tut_src8/full.npz",
    }.items():
        assert (made / ours).read_bytes() == (real / theirs).read_bytes()


@pytest.mark.parametrize("place", [0, 1588, 3970])
def test_a_changed_byte_is_found_wherever_it_is(made: Path, place: int) -> None:
    path = made / "dst_checkpoints" / "rank_2" / "checkpoint_2.ckpt"
    content = bytearray(path.read_bytes())
    content[place] ^= 0x10
    path.write_bytes(content)
    code = "not-equal" if place else "missing-tensor"  # whose name it is that is another
    with refused(VerifyError, code, path):
        demo.check(made)


def test_the_first_byte_that_differs_is_named(made: Path) -> None:
    path = made / "dst_checkpoints" / "rank_1" / "checkpoint_1.ckpt"
    whole = demo._parsed(path)["net.layer2.weight"][2]
    content = path.read_bytes()
    assert content.count(whole) == 1
    path.write_bytes(content.replace(whole, whole[:17] + bytes([whole[17] ^ 1]) + whole[18:]))
    with refused(
        VerifyError,
        "not-equal",
        "'net.layer2.weight'",
        path,
        "byte 17 ",
        f"0x{whole[17] ^ 1:02x}",
        f"0x{whole[17]:02x}",
    ):
        demo.check(made)


def test_a_missing_file_is_found(made: Path) -> None:
    (made / "dst_checkpoints" / "rank_3" / "checkpoint_3.ckpt").unlink()
    with refused(VerifyError, "cannot-read", "checkpoint_3.ckpt"):
        demo.check(made)


# --- `reshard demo`: what it prints, and how it exits when a byte is wrong or the folder is not its own ---


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
