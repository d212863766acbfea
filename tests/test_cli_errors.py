"""The command line when something is wrong: every exit code, and messages without a traceback."""

from __future__ import annotations

import errno
import json
import os
import shutil
from typing import TYPE_CHECKING

import pytest
from checkpoints import tree
from commands import Case, call

import reshard

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    "arguments",
    [
        ["transform", "a"],
        ["transform", "a", "b", "--ranks", "x"],
        ["transform", "a", "b", "--ranks", "5-3"],
        ["transform", "a", "b", "--ranks", "0-99999999999999"],
        ["transform", "a", "b", "--layout", "no-rule"],
        ["transform", "a", "b", "--threads", "0"],
        ["transform", "a", "b", "--format", "pickle"],
        ["transform", "a", "b", "--cast", "float32"],
        ["transform", "a", "b", "--cast", "float32=float16", "--cast", "float32=bfloat16"],
        ["transform", "a", "b", "--memory", "much"],
        ["transform", "a", "b", "--stage", "-1"],
        ["unify", "a", "b", "--style", "torch"],
        ["unify", "a", "b", "--max-shard-size", "4 elephants"],
        ["convert", "a", "b"],
        ["inspect"],
        ["nonsense"],
        ["strategy", "merge", "a"],
    ],
)
def test_wrong_usage_is_2(arguments: list[str]) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert "Error: " in result.stderr


def test_a_rank_outside_the_target_is_2(case: Case, tmp_path: Path) -> None:
    result = call("transform", case.source, tmp_path, *case.strategies, "--ranks", "4")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: rank 4 is asked for")


def test_an_incomplete_source_is_4(case: Case, tmp_path: Path) -> None:
    shutil.copytree(case.source, tmp_path / "src")
    for rank in (0, 1, 4, 5):
        shutil.rmtree(tmp_path / "src" / f"rank_{rank}")
    result = call("transform", tmp_path / "src", tmp_path / "dst", *case.strategies)
    assert result.exit_code == 4
    assert result.stderr.startswith("error: ")
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize(
    "arguments", [["inspect", "/nonexistent"], ["strategy", "show", "/nonexistent"], ["strategy", "show", __file__]]
)
def test_a_bad_source_or_strategy_is_4(arguments: list[str]) -> None:
    result = call(*arguments)
    assert result.exit_code == 4
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr


def test_a_full_disk_is_5(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int, _offset: int, _size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    result = call("transform", case.source, tmp_path, *case.strategies)
    assert result.exit_code == 5
    assert "No space left on device" in result.stderr
    assert tree(tmp_path) == {}


def test_a_directory_that_cannot_be_made_is_no_traceback(case: Case, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = call("transform", case.source, tmp_path / "file" / "dst", *case.strategies)
    assert result.exit_code == 6
    assert result.stderr.startswith("error: ")


def test_control_characters_of_a_file_do_not_reach_the_terminal(tmp_path: Path) -> None:
    bad = tmp_path / "x.json"
    bad.write_text(json.dumps({"parallel_layout_item": {"w\x1b[31m\u202e": {"dev_matrix": [0], "tensor_map": [0]}}}))
    result = call("strategy", "show", bad)
    assert result.exit_code == 4
    assert "\x1b" not in result.stderr
    assert "\u202e" not in result.stderr
    assert "w\\x1b[31m\\u202e" in result.stderr


def test_a_fault_of_our_own_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_path: object) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(reshard, "read_strategy", broken)
    result = call("strategy", "show", "x")
    assert result.exit_code == 1
    assert result.stderr == (
        "error: unexpected RuntimeError: first line (a fault of reshard; add --debug to see where)\n"
    )


@pytest.mark.parametrize("how", [["--debug", "strategy", "show", "x"], ["strategy", "show", "x", "--debug"], None])
def test_debug_shows_the_traceback(how: list[str] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_path: object) -> None:
        raise RuntimeError("oh")

    monkeypatch.setattr(reshard, "read_strategy", broken)
    if how is None:
        monkeypatch.setenv("RESHARD_DEBUG", "1")
    result = call(*(how or ["strategy", "show", "x"]))
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    assert "in broken" in result.stderr


def test_memory_that_does_not_suffice_is_5(monkeypatch: pytest.MonkeyPatch) -> None:
    def hungry(_path: object) -> None:
        raise MemoryError

    monkeypatch.setattr(reshard, "read_strategy", hungry)
    result = call("strategy", "show", "x")
    assert (result.exit_code, result.stderr) == (5, "error: memory does not suffice\n")
