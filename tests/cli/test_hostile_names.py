"""Names that a terminal would obey: no command prints them as they are."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest
import yaml
from checkpoints import write_file, write_ranks
from commands import call

import reshard
from reshard import Layout, Strategy

if TYPE_CHECKING:
    from pathlib import Path

EVIL = "\x1b]0;owned\x07\x9b31m\u202e\nerror: forged"
"""Sets the title of a terminal and a colour, turns text round, and begins a line."""

WEIGHT, STATE, GATE, UP = f"w{EVIL}", f"adam_m.w{EVIL}", f"gate{EVIL}", f"up{EVIL}"
ROWS = Strategy.of({WEIGHT: Layout.of([2], [0, -1]), STATE: Layout.of([2], [0, -1])})
COLUMNS = Strategy.of({WEIGHT: Layout.of([2], [-1, 0]), STATE: Layout.of([2], [-1, 0])})
FULL = {name: np.arange(64, dtype=np.float32).reshape(8, 8) + n for n, name in enumerate((WEIGHT, STATE))}

COMMANDS = """
inspect src --source-strategy rows.ckpt
inspect src
inspect bad.safetensors
inspect src --source-strategy lacking.ckpt
strategy show rows.ckpt
strategy diff rows.ckpt columns.ckpt
strategy diff rows.ckpt lacking.ckpt
strategy make cut.yaml --like whole.safetensors -o made.ckpt
strategy make uncuttable.yaml --like whole.safetensors -o more.ckpt
rules check fuse.yaml parts.safetensors
rules check fuse.yaml parts.safetensors whole.safetensors
rules check fuse.yaml whole.safetensors
rules show fuse.yaml parts.safetensors
rules show fuse.yaml parts.safetensors nothing
plan src --source-strategy rows.ckpt --target-strategy columns.ckpt -o plan.json
plan src --source-strategy rows.ckpt --target-strategy lacking.ckpt
run plan.json ran --dry-run
convert src dst --source-strategy rows.ckpt --target-strategy columns.ckpt --dry-run
convert src dst --source-strategy rows.ckpt --target-strategy columns.ckpt
convert src dst --source-strategy rows.ckpt --target-strategy lacking.ckpt
convert src ckpt2 --source-strategy rows.ckpt --target-strategy columns.ckpt --to checkpoint2 --target-step 1
convert src unknown --source-strategy rows.ckpt --target-strategy other.ckpt
convert src dcp --source-strategy rows.ckpt --target-strategy columns.ckpt --to dcp
inspect dcp
verify dcp
convert --to=mindspore src uni --source-strategy rows.ckpt --weights-only
convert --to=mindspore src uni2 --source-strategy rows.ckpt --include nothing
convert src uni.zarr --to zarr --source-strategy rows.ckpt
inspect uni.zarr
convert src converted --to ckpt
convert parts.safetensors fused --rules fuse.yaml --to hf
verify src --target-strategy rows.ckpt
verify src --target-strategy other.ckpt
verify dst --against changed --source-strategy rows.ckpt --target-strategy columns.ckpt
verify changed --against src
verify torn --target-strategy copies.ckpt
verify whole.safetensors --against parts.safetensors
verify bad.safetensors
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hostile")
    write_ranks(root / "src", FULL, ROWS)
    shutil.copytree(root / "src", root / "changed")
    changed = {WEIGHT: FULL[WEIGHT][:4] + 1, STATE: FULL[STATE][:4] - 1}
    write_file(next((root / "changed" / "rank_0").iterdir()), changed)
    for rank in (0, 1):
        write_file(root / "torn" / f"rank_{rank}" / "a.safetensors", {WEIGHT: FULL[WEIGHT] + rank})
    write_file(root / "whole.safetensors", FULL)
    write_file(root / "parts.safetensors", {GATE: FULL[WEIGHT], UP: FULL[STATE]})
    (root / "bad.safetensors").write_bytes((root / "whole.safetensors").read_bytes()[:-40])
    strategies = {
        "rows": ROWS,
        "columns": COLUMNS,
        "lacking": Strategy.of({STATE: Layout.of([2], [0, -1])}),
        "odd": Strategy.of({WEIGHT: Layout.of([2], [0])}),
        "other": Strategy.of({f"x{EVIL}": Layout.of([2], [0, -1])}),
        "copies": Strategy.of({WEIGHT: Layout.of([2], [-1, -1])}),
    }
    for name, strategy in strategies.items():
        reshard.write_strategy(strategy, root / f"{name}.ckpt")
    fuse = {"a": [GATE, UP], "b": {"concat": f"fused{EVIL}"}}
    files = {
        "fuse": {"reshard-rules": 1, "sides": ["a", "b"], "rules": [fuse]},
        "cut": {"mesh": {"x": 2}, "rules": {WEIGHT: ["x"]}},
        "uncuttable": {"mesh": {"x": 3}, "rules": {WEIGHT: ["x"], f"nothing{EVIL}": ["y"]}},
    }
    for name, content in files.items():
        (root / f"{name}.yaml").write_text(yaml.safe_dump(content))
    return root


def test_no_command_prints_what_a_terminal_obeys(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    codes = []
    for line in COMMANDS.strip().splitlines():
        result = call(*line.split())
        codes.append((line, result.exit_code))
        for sign in EVIL.replace(" ", ""):
            assert sign.isprintable() or sign == "\n" or sign not in result.output, (line, result.output)
        forged = [text for text in result.output.splitlines() if text.startswith("error: forged")]
        assert not forged, (line, result.output)
        assert "unexpected" not in result.output, (line, result.output)
    assert {code for _, code in codes} == {0, 2, 3, 4}
