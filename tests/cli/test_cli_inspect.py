"""`reshard inspect`: with a strategy and without, of one file, and as wide as the terminal is."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from commands import Case, done

if TYPE_CHECKING:
    from pathlib import Path


def test_inspect_with_a_strategy(case: Case) -> None:
    result = done("inspect", case.source, "--source-strategy", case.source_strategy)
    assert "net.layer1.weight                1  float32  [16, 32]  2.0 kB" in result.stdout
    assert result.stderr == ""
    data = json.loads(done("inspect", case.source, "--source-strategy", case.source_strategy, "--json").stdout)
    assert data["ranks"] == list(range(8))
    weight = next(tensor for tensor in data["tensors"] if tensor["name"] == "net.layer1.weight")
    assert (weight["dtype"], weight["shape"], weight["nbytes"]) == ("float32", [16, 32], 2048)
    assert weight["layouts"][0]["dev_matrix"] == [2, 2, 2]
    assert weight["shards"][0] == {"start": [0, 0], "stop": [16, 16], "ranks": [0, 1, 4, 5]}


def test_inspect_without_a_strategy_shows_the_files(case: Case) -> None:
    result = done("inspect", case.source)
    assert "ranks 0-7: each 15 tensors" in result.stdout
    assert "[16, 16]" in result.stdout
    assert "give --source-strategy to see whole tensors" in result.stderr
    data = json.loads(done("inspect", case.source, "--json").stdout)
    assert data["groups"][0]["ranks"] == list(range(8))


def test_inspect_one_file(case: Case) -> None:
    result = done("inspect", case.source / "rank_3" / "net.ckpt")
    assert "15 tensors, 11.9 kB in whole tensors" in result.stdout


def on_a_terminal(columns: int, *arguments: str | Path) -> str:
    """What a command writes to a terminal of so many columns."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "reshard", *map(str, arguments)],
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "COLUMNS": str(columns)},
    )
    os.close(theirs)
    shown = b""
    with suppress(OSError):  # Linux's way to say that the other side is closed
        while piece := os.read(ours, 4096):
            shown += piece
    os.close(ours)
    assert process.wait() == 0
    return shown.decode()


@pytest.mark.parametrize("columns", [60, 80, 100, 200])
def test_inspect_fits_the_terminal(case: Case, columns: int) -> None:
    shown = on_a_terminal(columns, "inspect", case.source, "--source-strategy", case.source_strategy)
    table = shown.splitlines()[2:-6]
    assert all(len(line) <= columns for line in table), max(table, key=len)
    assert "[2, 2, 2] map [-1, 1]  2 x 4" in shown or columns >= 100
    assert ("moments.net.layer{1-2}.bias" in shown) == (columns > 60)
    files = on_a_terminal(columns, "inspect", case.source).splitlines()
    assert all(len(line) <= max(columns, 80) for line in files[3:])
