"""An unfinished target says how far it is, and which command resumes it; `reshard runs` lists it as incomplete."""

from __future__ import annotations

import json
import os
import shlex
from typing import TYPE_CHECKING

import click
import numpy as np
import pytest
from checkpoints import write_file
from commands import call, done
from refusals import failed, refused
from stopped_runs import SOURCE, TARGET, small_tasks, source, stopped  # noqa: F401 -- fixtures

import reshard
from reshard import SourceError
from reshard.cli.commands import TYPED, Command
from reshard.core.records.logs import Record, known, unfinished
from reshard.core.run.state.ledger import Ledger
from reshard.formats.catalog import stored_checkpoints

if TYPE_CHECKING:
    from pathlib import Path


def test_how_far_a_run_in_python_is(source: reshard.Checkpoint, tmp_path: Path) -> None:  # noqa: F811
    plan = reshard.plan(source, TARGET)
    stopped(plan, tmp_path / "dst")
    progress = unfinished(str(tmp_path / "dst"))
    assert progress is not None
    assert 0 < progress.written < progress.total == plan.stats.target_bytes
    assert progress.command == ()
    for _ in range(2):
        with refused(SourceError, "unfinished", tmp_path / "dst", " of "):
            reshard.open(tmp_path / "dst", strategy=TARGET)
    (found,) = stored_checkpoints(tmp_path / "dst")
    assert (found.state, found.path) == ("incomplete", str(tmp_path / "dst"))
    plan.run(tmp_path / "dst")
    assert unfinished(str(tmp_path / "dst")) is None
    assert [each.state for each in stored_checkpoints(tmp_path / "dst")] == ["complete"]


@pytest.mark.parametrize("to", ["hf", "dcp", "zarr"])
def test_the_command_that_resumes_it(to: str, tmp_path: Path) -> None:
    """The log of a killed command, in which nothing is ready."""
    write_file(tmp_path / "a.safetensors", {"w": np.ones((64, 64), np.float32), "v": np.ones((64, 64), np.float32)})
    target = tmp_path / "a target"
    done("convert", tmp_path / "a.safetensors", target, "--to", to, "--overwrite")
    (log,) = (*target.glob(".reshard/*.jsonl"), *tmp_path.glob("*.reshard/*.jsonl"))
    lines = [line for line in log.read_text().splitlines() if '"ready"' not in line]
    log.write_text("\n".join(lines) + "\n")
    if to == "zarr":
        log.parent.rename(target / ".reshard")
    for path in target.rglob("*"):
        if path.is_file() and path.parent.name != ".reshard":
            path.unlink()
    result = failed(4, "unfinished", "inspect", target)
    command = shlex.join(["reshard", "convert", str(tmp_path / "a.safetensors"), str(target), "--to", to])
    assert command in result.stderr
    assert "--overwrite" not in result.stderr
    found = json.loads(done("runs", tmp_path, "--json").stdout)["checkpoints"]
    (record,) = (each for each in found if each["path"] == str(target))
    assert record["state"] == "incomplete"
    assert command in record["hint"]
    done(*shlex.split(command)[1:])
    assert call("inspect", target).exit_code == 0


def test_the_command_of_another_directory_without_passwords(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = (
        "convert",
        "ftp://me:hush@host/run",
        "--source-strategy=https://host/s.json?sig=hush",
        "-- out",
        "layers.?",
    )
    context = click.Context(
        Command("convert", params=[click.Argument(["words"], nargs=-1)]), info_name="reshard convert"
    )
    context.command.parse_args(context, ["--", *words[1:]])
    shown = context.meta[TYPED]
    assert shown[2:] == ("ftp://me:***@host/run", "--source-strategy=https://host/s.json?***", "-- out", "layers.?")
    for command, expected in ((shown, f"resume it in {tmp_path}: reshard convert "), (("x" * 70_000,), "the call")):
        target = str(tmp_path / command[0][:9])
        ledger = Ledger(target, command=command)
        ledger.add({"a": Record(digest="ab", size=100)})
        monkeypatch.chdir("/")
        progress = unfinished(target)
        assert progress is not None
        assert progress.hint.startswith(expected)
        assert "hush" not in progress.hint
        monkeypatch.chdir(tmp_path)
        progress = unfinished(target)
        assert progress is not None
        assert str(tmp_path) not in progress.hint


def test_a_file_that_is_unfinished_hides_nothing(tmp_path: Path) -> None:
    """The ledger of a file is in its directory."""
    for name in ("step-5/model.safetensors", "old.safetensors"):
        write_file(tmp_path / name, {"w": np.ones((4,), np.float32)})
    (tmp_path / ".reshard").mkdir()
    lines = [{"reshard": 1}, {"file": "whole.safetensors", "rank": 0, "digest": "ab", "size": 100}]
    lines += [{"file": "whole.safetensors", "wrote": [[10, 30, 7]]}]
    (tmp_path / ".reshard" / "00000001-abcdef12.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = {os.path.relpath(each.path, tmp_path): each for each in stored_checkpoints(tmp_path)}
    states = {path: each.state for path, each in found.items()}
    assert states == {"whole.safetensors": "incomplete", ".": "complete", "step-5": "complete"}
    assert "30 B of 100 B" in found["whole.safetensors"].reason


def test_a_log_that_lies_about_its_command(tmp_path: Path) -> None:
    write_file(tmp_path / "a.safetensors", {"w": np.ones((4,), np.float32)})
    done("convert", tmp_path / "a.safetensors", tmp_path / "dst", "--to", "hf")
    (log,) = (tmp_path / "dst" / ".reshard").glob("*.jsonl")
    head, *lines = (json.loads(line) for line in log.read_text().splitlines() if line)
    for command in (5, {"a": 1}, [["x"]], ["convert", "$(rm x)\n;"], ["x" * 900_000]):
        lines = [line for line in lines if "ready" not in line]
        log.write_text("\n".join(json.dumps(line) for line in ({**head, "command": command}, *lines)))
        assert all(isinstance(record.command, tuple) for record in known(str(tmp_path / "dst")).records.values())
        progress = unfinished(str(tmp_path / "dst"))
        assert progress is None or len(progress.hint) < 1000
        assert progress is None or "\n;" not in progress.hint or "'$(rm x)\n;'" in progress.hint
        assert call("runs", tmp_path).exit_code == 0
