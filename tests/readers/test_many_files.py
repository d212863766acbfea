"""Directories of many one-file checkpoints: each is listed once, and the work grows with the number of files."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import write_file
from refusals import refused

import reshard
from reshard.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


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
