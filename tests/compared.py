"""Eight ranks that became six, to be verified; and how one bit of them is flipped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import numbers, write_ranks

import reshard
from reshard import Layout, Strategy
from reshard.core.model.entries import ranges
from reshard.kits.files import index_file

if TYPE_CHECKING:
    from pathlib import Path

BEFORE = Strategy.of({"w": Layout.of([8], [0, -1]), "b": Layout.of([8], [-1]), "c": Layout.of([2, 4], [1, 0])})

AFTER = Strategy.of({"w": Layout.of([3, 2], [-1, 0]), "b": Layout.of([6], [0]), "c": Layout.of([6], [-1, -1], -1)})

FULL = numbers({"w": (48, 36), "b": (12,), "c": (24, 8)})


def compared(source: Path, target: Path, **options: Any) -> reshard.Verification:
    return reshard.verify(target, AFTER, against=source, source_strategy=BEFORE, **options)


def rank_file(root: Path, rank: int) -> Path:
    (path,) = (root / f"rank_{rank}").iterdir()
    return path


def flip(path: Path, name: str, element: int, bit: int = 0) -> None:
    """Flip one bit of one element of a tensor in a file, where the file's own index says it lies."""
    entry = index_file(str(path)).entries[name]
    ((offset, _, _),) = ranges(entry.runs, element * entry.dtype.itemsize + bit // 8, 1)
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit % 8]))


@pytest.fixture
def sides(tmp_path: Path) -> tuple[Path, Path]:
    """A source of 8 ranks, and what a conversion made of it for 6."""
    source = write_ranks(tmp_path / "src", FULL, BEFORE, "ckpt", also={"step": np.array(7, np.int32), "note": "hello"})
    reshard.plan(reshard.open(source, strategy=BEFORE), AFTER, to="safetensors").run(tmp_path / "dst", fsync=False)
    return source, tmp_path / "dst"
