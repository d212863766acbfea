"""A small checkpoint of 8 ranks, a target of 6 for it, and tasks as small as these."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from checkpoints import numbers, write_ranks

import reshard
from reshard import Layout, Strategy
from reshard.core.plan import budget
from reshard.core.run import graph

if TYPE_CHECKING:
    from pathlib import Path

ROWS = Strategy.of({"w": Layout.of([8], [0, -1]), "b": Layout.of([8], [-1]), "c": Layout.of([2, 4], [1, 0])})
TARGET = Strategy.of({"w": Layout.of([3, 2], [-1, 0]), "b": Layout.of([6], [0]), "c": Layout.of([6], [-1, -1], -1)})
FULL = numbers({"w": (48, 36), "b": (12,), "c": (24, 8)})


@pytest.fixture
def source(tmp_path: Path) -> reshard.Checkpoint:
    return reshard.open(write_ranks(tmp_path / "src", FULL, ROWS, "ckpt"), strategy=ROWS)


@pytest.fixture
def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the work so fine that a small model has many bands and tasks."""
    monkeypatch.setattr(budget, "TASK_BYTES", 512)
    monkeypatch.setattr(budget, "BAND_BYTES", 256)
    monkeypatch.setattr(graph, "FILES_A_TASK", 2)
