"""Blocks without any row, tensors without any element: nothing is moved for them, and nothing else is disturbed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import helpers
import numpy as np
import pytest
from checkpoints import write_file

import reshard
from reshard import Layout, Strategy

if TYPE_CHECKING:
    from pathlib import Path

ROWS = {"z": (1, 2, 1), "a": (2, 0, 2), "y": (0, 4, 0), "x": (0, 0, 4)}
SPLIT = Strategy.of({name: Layout.of([3], [0], param_split_shape=rows) for name, rows in ROWS.items()})
FULL = {name: np.arange(4, dtype=np.float32) + 10 * number for number, name in enumerate(ROWS)}


def block(name: str, rank: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    begin = sum(ROWS[name][:rank])
    return FULL[name][begin : begin + ROWS[name][rank]]


@pytest.mark.parametrize("partition", ["tensor", "file"])
@pytest.mark.parametrize("format", ["safetensors", "ckpt"])
def test_a_rank_may_hold_no_row(tmp_path: Path, partition: str, format: str) -> None:
    whole = reshard.open(write_file(tmp_path / "whole.safetensors", FULL))
    split = reshard.plan(whole, SPLIT, to=format)
    report = split.run(tmp_path / "split", partition=partition)
    assert report.bytes_read == report.bytes_written == split.stats.bytes_read == 64
    for rank in range(3):
        (path,) = (tmp_path / "split" / f"rank_{rank}").iterdir()
        assert {n: content for n, (_, _, content) in helpers.read_rank_file(path).items()} == {
            name: block(name, rank).tobytes() for name in ROWS
        }
    back = reshard.open(tmp_path / "split", strategy=SPLIT)
    reshard.plan(back, to="safetensors").run(tmp_path / "back", partition=partition)
    found = helpers.read_rank_file(tmp_path / "back" / "rank_0" / "checkpoint_0.safetensors")
    assert {name: content for name, (_, _, content) in found.items()} == {n: a.tobytes() for n, a in FULL.items()}
    assert not reshard.verify(tmp_path / "split", SPLIT, against=tmp_path / "whole.safetensors").differences


@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]])
def test_a_tensor_without_elements(tmp_path: Path, ranks: list[int]) -> None:
    full = {"e": np.zeros((0, 4), np.float32), "w": np.arange(4, dtype=np.float32)}
    target = Strategy.of({"e": Layout.of([2], [-1, 0]), "w": Layout.of([2], [0])})
    plan = reshard.plan(reshard.open(write_file(tmp_path / "whole.safetensors", full)), target, ranks=ranks)
    plan.run(tmp_path / "out")
    for rank in ranks:
        found = helpers.read_rank_file(tmp_path / "out" / f"rank_{rank}" / f"checkpoint_{rank}.safetensors")
        assert {name: shape for name, (_, shape, _) in found.items()} == {"e": (0, 2), "w": (2,)}
    assert plan.run(tmp_path / "out").finished == len(ranks)


def test_it_is_not_lost_with_a_rank_that_had_none_of_it(tmp_path: Path) -> None:
    split = Strategy.of({"e": Layout.of([2], [-1, 0]), "w": Layout.of([2], [-1])})
    write_file(
        tmp_path / "src" / "rank_1" / "checkpoint_1.safetensors",
        {"e": np.zeros((0, 2), np.float32), "w": np.arange(4, dtype=np.float32)},
    )
    plan = reshard.plan(reshard.open(tmp_path / "src", strategy=split, partial=True))
    plan.run(tmp_path / "out")
    assert set(helpers.read_rank_file(tmp_path / "out" / "rank_0" / "checkpoint_0.safetensors")) == {"e", "w"}
