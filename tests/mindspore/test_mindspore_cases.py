"""Recorded MindSpore checkpoints, converted: every byte must be that of the slice of the whole tensor."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import helpers
import numpy as np
import pytest
from checkpoints import strategy_of, tree

import reshard

if TYPE_CHECKING:
    from pathlib import Path

FORMATS = ["ckpt", "safetensors"]


def check_side(root: Path, full: dict, side: dict, prefix: str, allowed_missing: set[str]) -> None:
    """Hold the files of every rank against plain slices, with an oracle that knows nothing of `reshard`."""
    for rank in range(side["devices"]):
        (path,) = (root / f"rank_{rank}").glob(f"{prefix}{rank}.*")
        found = helpers.read_rank_file(path)
        expected = helpers.expected_blocks(full, side, rank)
        assert set(expected) - set(found) <= allowed_missing, rank
        for name, (_, shape, content) in found.items():
            block = expected.get(name, full[name])
            if name not in expected and side["layouts"] is not None:
                assert name not in side["layouts"], f"{name} is not of rank {rank}'s stage"
            assert (shape, content) == (block.shape, np.ascontiguousarray(block).tobytes()), (rank, name)


@pytest.mark.parametrize(
    ("name", "source_format", "target_format"),
    [
        pytest.param(name, *formats, marks=[] if (row - column) % 4 == 0 else pytest.mark.slow)
        for row, name in enumerate(name for name in helpers.case_names() if not name.startswith("lost"))
        for column, formats in enumerate(product(FORMATS, FORMATS))
    ],
)
def test_every_recorded_case_converts_to_slices_and_back(
    mindspore_data: Path, tmp_path: Path, name: str, source_format: str, target_format: str
) -> None:
    case = mindspore_data / "cases" / name
    meta, full = helpers.load_meta(case), helpers.load_full(case)
    before, after = strategy_of(case, meta["src"]), strategy_of(case, meta["dst"])
    source = reshard.open(case / f"src_{source_format}", strategy=before)
    forth = reshard.plan(source, after, to=target_format, prefix="out", drop=["*"], allow_missing=["*"])
    report = forth.run(tmp_path / "there", fsync=False)
    assert report.bytes_read == forth.stats.bytes_read
    check_side(tmp_path / "there", full, meta["dst"], "out", set(forth.missing))

    there = reshard.open(tmp_path / "there", strategy=after)
    assert set(there) == set(source) - set(forth.dropped)
    back = reshard.plan(there, before, to=source_format, prefix="src", drop=["*"], allow_missing=["*"])
    back.run(tmp_path / "back", fsync=False)
    lost = set(forth.dropped) | set(forth.missing) | set(back.missing) | set(back.dropped)
    for path in sorted((tmp_path / "back").rglob("src*")):
        (first,) = (case / f"src_{source_format}" / path.parent.name).iterdir()
        original = helpers.read_rank_file(first)
        again = helpers.read_rank_file(path)
        for tensor in set(original) | set(again):
            if tensor in lost:
                continue
            if tensor not in original:  # MindSpore leaves a tensor that two stages share out of the later stage's files
                assert len(meta["src"]["layouts"][tensor]["stages"]) > 1
                continue
            assert again[tensor] == original[tensor], (path, tensor)


@pytest.mark.parametrize("name", ["basic_1", "bf16_1", "pipe_1", "pipeopt_3"])
def test_a_ckpt_target_is_the_file_that_mindspore_writes(mindspore_data: Path, tmp_path: Path, name: str) -> None:
    case = mindspore_data / "cases" / name
    meta = helpers.load_meta(case)
    (call,) = (c for c in meta["calls"] if c.get("out") == "tc_ckpt")
    source = reshard.open(case / "src_ckpt", strategy=strategy_of(case, meta["src"]))
    reshard.plan(source, strategy_of(case, meta["dst"]), prefix="out").run(tmp_path, fsync=False)
    ours, theirs = tree(tmp_path), tree(case / "tc_ckpt")
    assert set(ours) == set(theirs)
    wrong = {path.removeprefix("tc_ckpt/") for path in call["differs_from_reference"]}
    assert {path for path in ours if ours[path] != theirs[path]} == wrong


@pytest.mark.parametrize("run", ["dp4_opt_momentum", "tp4_adam"])
def test_executed_runs_agree_in_all_three_forms(mindspore_data: Path, tmp_path: Path, run: str) -> None:
    folder = mindspore_data / "real" / run
    found = {}
    for form in ("ckpt", "safetensors", "dedup"):
        source = reshard.open(folder / form, strategy=folder / "strategy_0.ckpt")
        reshard.plan(source, to="safetensors").run(tmp_path / form, fsync=False)
        found[form] = helpers.read_rank_file(tmp_path / form / "rank_0" / "checkpoint_0.safetensors")
    assert found["ckpt"] == found["safetensors"] == found["dedup"]
