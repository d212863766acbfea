"""An item of a DCP whose header is damaged: `runs`, `convert` and `verify` say the same of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from commands import done
from dcp_files import item, write_torch
from refusals import failed, refused

import reshard
from reshard.errors import SourceError

if TYPE_CHECKING:
    from pathlib import Path

FULL = {f"w{number}": np.full((40, 20), number, np.float32) for number in range(4)}
ITEMS = {name: item(array) for name, array in FULL.items()}
BEGIN = len(ITEMS["w0"]) + len(ITEMS["w1"])  # of w2


def write_steps(root: Path, damaged: tuple[int, ...], *, at: int = BEGIN, content: bytes = b"\0" * 40) -> None:
    """Write three steps, with other bytes in the header of the third item of some."""
    for step in (1, 2, 3):
        boxes = [(name, ((0, 0), (40, 20)), ITEMS[name]) for name in FULL]
        write_torch(root / f"step-{step}", FULL, {0: boxes})
        if step in damaged:
            data = root / f"step-{step}" / "__0_0.distcp"
            whole = data.read_bytes()
            data.write_bytes(whole[:at] + content + whole[at + len(content) :])


@pytest.mark.parametrize(("damaged", "newest"), [((3,), 2), ((2, 3), 1), ((1,), 3)])
def test_the_newest_is_one_that_can_be_read(damaged: tuple[int, ...], newest: int, tmp_path: Path) -> None:
    write_steps(tmp_path, damaged)
    assert done("runs", tmp_path, "--newest").stdout.strip() == str(tmp_path / f"step-{newest}")
    runs = {each.step: each for each in reshard.runs(tmp_path)}
    assert [step for step, each in runs.items() if each.newest] == [str(newest)]
    for step in damaged:
        if step > newest:
            assert runs[str(step)].state == "incomplete"
            assert f"byte {BEGIN:,} of __0_0.distcp" in runs[str(step)].reason


@pytest.mark.parametrize("content", [b"\0" * 40, b"PK\3\4" + b"\xff" * 40])
def test_the_error_names_the_file_and_the_byte(content: bytes, tmp_path: Path) -> None:
    write_steps(tmp_path, (3,), content=content)
    places = ("w2", f"{BEGIN:,}", "__0_0.distcp", "--drop 'w2'")
    command = "convert", tmp_path / "step-3", tmp_path / "out", "--to", "hf"
    result = failed(4, "unreadable-tensor", *command, places=places)
    assert "b'" not in result.stderr
    source = reshard.open(tmp_path / "step-3")
    with refused(SourceError, "unreadable-tensor", "__0_0.distcp"):
        np.asarray(source["w2"])
    assert np.array_equal(np.asarray(source["w1"]), FULL["w1"])


def test_another_record_first(tmp_path: Path) -> None:
    """Texts of a file are shown as text."""
    name = ITEMS["w2"].index(b"/data/0")
    write_steps(tmp_path, (3,), at=BEGIN + name, content=b"/data/7")
    (reason,) = reshard.open(tmp_path / "step-3").unreadable.values()
    assert "data/7" in reason
    assert "b'" not in reason


def test_plain_verify_shows_what_verify_without_the_tensor_shows(tmp_path: Path) -> None:
    write_steps(tmp_path, (3,))
    plain = failed(3, "different", "verify", tmp_path / "step-3")
    dropped = failed(3, "different", "verify", tmp_path / "step-3", "--drop", "w2")
    assert plain.stdout == dropped.stdout
    assert "__0_0.distcp" in plain.stdout
    assert "w2" in plain.stdout
    done("verify", tmp_path / "step-2")


def test_verify_still_fails_if_no_checksum_differs(tmp_path: Path) -> None:
    """A tensor that no item has: only the metadata show it."""
    boxes = [(name, ((0, 0), (40, 20)), ITEMS[name]) for name in ("w0", "w1")]
    declared = {"w0": FULL["w0"], "w1": FULL["w1"], "w2": FULL["w2"]}
    write_torch(tmp_path, declared, {0: boxes}, boxes={name: [((0, 0), (40, 20))] for name in declared})
    failed(4, "unreadable-tensor", "verify", tmp_path)
