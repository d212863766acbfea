"""`reshard runs`: a table, JSON, and the newest complete checkpoint for scripts."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import zarr
from checkpoints import write_file
from commands import done
from refusals import failed


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose last step is cut off."""
    root = tmp_path / "run"
    for step in (100, 200, 300):
        path = write_file(root / f"checkpoint-{step}" / "model.safetensors", {"w": np.ones((8, 8), np.float32)})
        os.utime(path, (step, step))
    path.write_bytes(path.read_bytes()[:-10])
    return root


def test_a_table(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = done("runs", run).stdout.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["checkpoint-100", "checkpoint-200", "checkpoint-300"]
    assert "newest" in lines[2]
    assert lines[4].startswith("checkpoint-300: ")
    assert lines[-1].endswith(str(run / "checkpoint-200"))
    for columns in (80, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        shown = done("runs", run).stdout.splitlines()
        assert all(len(line) <= columns for line in shown[:-2])
        assert any("incomplete" in line for line in shown)


def test_json_and_the_newest(run: Path) -> None:
    found = json.loads(done("runs", run, "--json").stdout)
    assert found["source"] == str(run)
    assert found["newest"] == str(run / "checkpoint-200")
    assert [(each["step"], each["state"], each["newest"]) for each in found["checkpoints"]] == [
        ("100", "complete", False), ("200", "complete", True), ("300", "incomplete", False),
    ]  # fmt: skip
    assert all(each["nbytes"] > 0 and each["files"] == 1 and each["modified"] for each in found["checkpoints"])
    assert done("runs", run, "--newest").stdout == f"{run / 'checkpoint-200'}\n"
    assert json.loads(done("runs", run, "--newest", "--json").stdout)["newest"] == str(run / "checkpoint-200")
    done("inspect", done("runs", run, "--newest").stdout.strip())


@pytest.mark.parametrize("name", ["-run", "a\x1b[31mb", "é\udcff", "$(x) 'y"])
def test_a_script_can_open_the_newest_whatever_its_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_file(Path(name) / "model.safetensors", {"w": np.ones((8, 8), np.float32)})
    path = os.fsdecode(done("runs", ".", "--newest").stdout_bytes).removesuffix("\n")
    done("inspect", path)
    assert Path(path) == Path(name)
    assert json.loads(done("runs", ".", "--newest", "--json").stdout)["newest"] == path
    assert "\x1b" not in done("runs", ".").stdout


def test_there_is_none(run: Path, tmp_path: Path) -> None:
    for step in (100, 200):
        shutil.rmtree(run / f"checkpoint-{step}")
    result = failed(4, "no-checkpoint", "runs", run, "--newest", places=("checkpoint-300",))
    assert result.stdout == ""
    result = failed(4, "no-checkpoint", "runs", run, "--newest", "--json")
    assert json.loads(result.stdout)["error"]["exit_code"] == 4
    assert json.loads(done("runs", run, "--json").stdout)["newest"] is None
    (tmp_path / "empty").mkdir()
    assert str(tmp_path / "empty") in done("runs", tmp_path / "empty").stdout
    failed(4, "no-checkpoint", "runs", tmp_path / "empty", "--newest")
    failed(4, "not-found", "runs", tmp_path / "gone")


def test_a_line_break_in_the_name_of_a_directory_hides_no_checkpoint(tmp_path: Path) -> None:
    for name, seconds in (("x\n-3", 2e9), ("ok-2", 1e9)):
        path = write_file(tmp_path / name / "model.safetensors", {"w": np.ones(4, np.float32)})
        os.utime(path, (seconds, seconds))
    data = json.loads(done("runs", tmp_path, "--json").stdout)
    assert {each["path"]: each["state"] for each in data["checkpoints"]} == {
        str(tmp_path / "x\n-3"): "complete", str(tmp_path / "ok-2"): "complete",
    }  # fmt: skip
    assert data["newest"] == str(tmp_path / "x\n-3")
    assert len(done("runs", tmp_path).stdout.splitlines()) == 5


def test_a_store_without_the_metadata_of_its_group_is_one_checkpoint(tmp_path: Path) -> None:
    for name in ("a", "b"):
        array = zarr.create_array(tmp_path / "s" / "step-3" / name, shape=(4,), dtype="float32", zarr_format=3)
        array[:] = np.ones(4)
    (record,) = json.loads(done("runs", tmp_path / "s", "--json").stdout)["checkpoints"]
    assert (record["path"], record["state"], record["step"]) == (str(tmp_path / "s" / "step-3"), "incomplete", "3")
