"""Verifying at URLs: in as few requests as a run makes, whatever is compared with what."""

from __future__ import annotations

from typing import TYPE_CHECKING

import fsspec
import numpy as np
import pytest
from checkpoints import write_ranks
from commands import least_memory
from refusals import refused
from remotes import Requests, put

import reshard
from reshard import Layout, Manifest, Strategy
from reshard.core.storage.urls import remote
from reshard.errors import BudgetError, SourceError, TargetError

if TYPE_CHECKING:
    from pathlib import Path

NAMES = [f"layers.{i}.w" for i in range(40)]
FULL = {name: np.arange(24 * 16, dtype=np.float32).reshape(24, 16) + i for i, name in enumerate(NAMES)}
ALSO = {"step": np.array(7, np.int32)}
SOURCE = Strategy.of({name: Layout.of([4], [0, -1]) for name in NAMES})
TARGET = Strategy.of({name: Layout.of([2, 2], [-1, 0]) for name in NAMES})
STORED = sum(array.nbytes for array in FULL.values())


@pytest.fixture
def made(root: str, tmp_path: Path) -> str:
    """A URL below which `src` is, of 4 ranks, and `dst`, made from it, of 4 ranks that hold each block twice."""
    put(write_ranks(tmp_path / "src", FULL, SOURCE, also=ALSO), f"{root}/src")
    reshard.plan(reshard.open(f"{root}/src", strategy=SOURCE), TARGET).run(f"{root}/dst")
    return root


def flip(url: str, place: int) -> None:
    fs, path = fsspec.core.url_to_fs(url)
    content = bytearray(fs.cat_file(path))
    content[place] ^= 1
    fs.pipe_file(path, bytes(content))


def test_opening_samples_all_files_at_once(made: str, asked: Requests) -> None:
    asked.ranges.clear()
    reshard.open(f"{made}/dst", strategy=TARGET)
    assert len(asked.ranges) <= 4 + 2 * 4  # headers; of every rank the step, and what it has of the tensors


def test_a_comparison_asks_as_seldom_as_a_run(made: str, asked: Requests) -> None:
    """Forty tensors of four source and four target files: what lies near in a file is one request."""
    source = reshard.open(f"{made}/src", strategy=SOURCE)
    target = reshard.open(f"{made}/dst", strategy=TARGET, contents=False)
    asked.ranges.clear()
    reshard.plan(source, TARGET).run(f"{made}/again")
    of_a_run = len(asked.ranges)
    asked.ranges.clear()
    found = reshard.verify(target, against=source)
    assert found.equal
    assert found.bytes_read == found.total_bytes == 3 * STORED + 8 * 4
    assert of_a_run <= 4 + 1
    # Of the source as a run does; of the target each file once; and the step of every rank, which is compared whole.
    assert len(asked.ranges) <= 4 + 4 + 8
    flip(f"{made}/dst/rank_2/checkpoint_2.safetensors", -1)
    (one,) = reshard.verify(target, against=source).differences
    assert (one.kind, one.rank, one.count) == ("values", 2, 1)


def test_the_ledgers_sums_are_compared_in_a_request_a_file(made: str, asked: Requests) -> None:
    fs, path = fsspec.core.url_to_fs(f"{made}/src")
    fs.rm(path, recursive=True)
    asked.ranges.clear()
    found = reshard.verify(f"{made}/dst")
    assert (found.equal, found.against, found.bytes_read) == (True, "its ledger", 2 * STORED + 4 * 4)
    assert len(asked.ranges) == 4
    flip(f"{made}/dst/rank_1/checkpoint_1.safetensors", -1)
    fs.rm_file(f"{path[: -len('/src')]}/dst/rank_3/checkpoint_3.safetensors")
    said = [(one.kind, one.rank) for one in reshard.verify(f"{made}/dst").differences]
    assert said == [("file", 3), ("checksum", 1)]


def test_a_manifest_is_made_and_compared_in_two_requests_a_file(made: str, asked: Requests, tmp_path: Path) -> None:
    """One for the header, one for all else."""
    asked.ranges.clear()
    asked.operations.clear()
    manifest = reshard.Manifest.make(f"{made}/dst")
    assert list(manifest.files) == [f"rank_{rank}/checkpoint_{rank}.safetensors" for rank in range(4)]
    assert len(asked.ranges) == 2 * 4
    assert len(asked.operations) <= 2 * 4 + 12
    asked.ranges.clear()
    asked.operations.clear()
    found = reshard.verify(f"{made}/dst", manifest=manifest)
    assert found.equal
    assert found.bytes_read == sum(file.nbytes for file in manifest.files.values())
    assert len(asked.ranges) == 2 * 4
    assert len(asked.operations) <= 2 * 4 + 12
    reshard.plan(reshard.open(f"{made}/src", strategy=SOURCE), TARGET).run(tmp_path / "dst")
    assert reshard.Manifest.make(tmp_path / "dst") == manifest


def test_a_manifest_may_be_at_a_url(made: str) -> None:
    manifest = reshard.Manifest.make(f"{made}/dst")
    assert manifest.write(f"{made}/m.json") == manifest.checksums
    assert reshard.Manifest.read(f"{made}/m.json") == manifest
    with refused(TargetError, "already-exists", "m.json"):
        manifest.write(f"{made}/m.json")
    with refused(TargetError, "not-a-file", f"{made}/dst"):
        manifest.write(f"{made}/dst", overwrite=True)
    Manifest({}).write(f"{made}/m.json", overwrite=True)
    assert reshard.Manifest.read(f"{made}/m.json") == Manifest({})
    with refused(SourceError, "not-found", "nothing.json"):
        reshard.Manifest.read(f"{made}/nothing.json")


def test_a_comparison_keeps_to_the_budget_that_it_says_it_needs(made: str, tmp_path: Path) -> None:
    """What is requested at URLs is a part of it."""
    local = reshard.open(tmp_path / "src", strategy=SOURCE)

    def least(target: object) -> int:
        with refused(BudgetError, "not-enough-memory", "memory=") as caught:
            reshard.verify(target, against=local, memory=1)  # type: ignore[arg-type]
        return least_memory(caught.value)

    there = reshard.open(f"{made}/dst", strategy=TARGET, contents=False)
    here = least(local)
    assert least(there) - here >= remote.fetched_bytes(1, 0, 1)
    assert reshard.verify(there, against=local, memory=least(there)).equal
