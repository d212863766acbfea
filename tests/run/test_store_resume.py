"""Zarr stores that are resumed, local and at URLs: their ledger is torn, of another plan, and gone when all is done."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest
from checkpoints import plan_with, tree
from refusals import refused
from remotes import get, records
from samples import slow
from stopped_runs import StoppedError, small_tasks, source, stop_after, stopped

import reshard
from reshard.core.records.logs import DIRECTORY
from reshard.core.run.state.locks import LockObjects
from reshard.core.run.state.session import Session
from reshard.errors import TargetError
from reshard.formats.zarr.layout import ZarrGroup

if TYPE_CHECKING:
    from pathlib import Path

    from faulty import Faults

    from reshard.core.plan.plan import Plan

__all__ = ["small_tasks", "source"]  # fixtures, for pytest to find


MADE = 12
"""So many files are made, a task each, before the first byte is moved."""


@pytest.fixture
def plan(source: reshard.Checkpoint) -> Plan:
    plan = plan_with(source, files=ZarrGroup(chunk_size=512, shard_size=0))
    assert len(plan._record.files) == MADE
    return plan


@pytest.mark.parametrize("links", [1, 2])
def test_a_run_goes_on_with_a_log_of_its_own(plan: Plan, tmp_path: Path, links: int) -> None:
    """A line that was torn by a power cut ends there, and a copy made with `cp -l` stays as it is."""
    plan.run(tmp_path / "whole")
    stopped(plan, tmp_path / "out", MADE + 2)
    (path,) = (tmp_path / "out" / DIRECTORY).glob("*.jsonl")
    with path.open("ab") as file:
        file.write(b'{"file":"w/c/0/0","wro')
    before = path.read_bytes()
    if links == 2:
        (tmp_path / "copy").hardlink_to(path)
    stopped(plan, tmp_path / "out", tasks=4)
    (own,) = (tmp_path / "out" / DIRECTORY).glob("*.jsonl")
    assert own != path
    assert all(map(json.loads, own.read_bytes().split()))
    assert links == 1 or (tmp_path / "copy").read_bytes() == before
    report = plan.run(tmp_path / "out")
    assert report.resumed
    assert report.resumed + report.bytes_written == plan.stats.bytes_written
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    assert not (tmp_path / "out" / DIRECTORY).exists()


def test_another_plan_is_told_so(source: reshard.Checkpoint, plan: Plan, tmp_path: Path) -> None:
    stopped(plan, tmp_path / "out", MADE + 2)
    other = plan_with(source, files=ZarrGroup(chunk_size=512, shard_size=0, compression="zstd"))
    with refused(TargetError, "other-run", "restart=True"):
        other.run(tmp_path / "out")
    other.run(tmp_path / "out", restart=True)
    other.run(tmp_path / "undisturbed")
    assert tree(tmp_path / "out") == tree(tmp_path / "undisturbed")
    assert not (tmp_path / "out" / DIRECTORY).exists()


@pytest.mark.parametrize("kind", ["symlink", "fifo", "directory"])
def test_something_else_in_its_place(plan: Plan, tmp_path: Path, kind: str) -> None:
    """Nothing is written through it."""
    stopped(plan, tmp_path / "out", MADE + 2)
    (path,) = (tmp_path / "out" / DIRECTORY).glob("*.jsonl")
    outside = tmp_path / "outside"
    path.rename(outside)
    before = outside.read_bytes()
    if kind == "symlink":
        path.symlink_to(outside)
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    plan.run(tmp_path / "out")
    assert outside.read_bytes() == before


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("tasks", [slow(1), 3, slow(7)])
@pytest.mark.parametrize("killed", [True, False])
def test_a_store_at_a_url_is_resumed(
    source: reshard.Checkpoint, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tasks: int, killed: bool,
    compression: str | None, faults: Faults,
) -> None:  # fmt: skip
    """Files of chunks that are complete are not sent again; at the end nothing but the store is there."""
    plan = plan_with(source, files=ZarrGroup(chunk_size=512, shard_size=0, compression=compression))
    plan.run(tmp_path / "whole")
    with monkeypatch.context() as patch:
        if killed:
            patch.setattr(Session, "failed", lambda *_: None)
            patch.setattr(LockObjects, "release", lambda locks: locks._ended.set())  # the object stays
            patch.setattr("reshard.core.run.state.locks._has_ended", lambda _: True)
        with pytest.raises(StoppedError) as caught:
            plan.run(f"{root}/out", progress=stop_after(tasks), client="synchronous")
    assert killed or "written and kept; the same command resumes" in caught.value.__notes__[0]
    assert "zarr.json" not in get(f"{root}/out")
    kept = get(f"{root}/out")
    assert 0 < len(kept) < len(plan._record.files)
    faults.clear()
    monkeypatch.setattr("reshard.core.run.state.locks._has_ended", lambda _: True)
    report = plan.run(f"{root}/out")
    sent = [call.path.removeprefix(f"{root}/out/") for call in faults.of("create")]
    assert sorted(sent) == sorted({file.path for file in plan._record.files} - kept.keys())
    assert report.finished == len(kept)
    assert report.resumed + report.bytes_written == plan.stats.bytes_written
    assert get(f"{root}/out") == tree(tmp_path / "whole")
    assert not records(f"{root}/out")


def test_a_store_at_a_url_of_another_plan_is_refused(source: reshard.Checkpoint, root: str, tmp_path: Path) -> None:
    plan = plan_with(source, files=ZarrGroup(chunk_size=512, shard_size=0))
    with pytest.raises(StoppedError):
        plan.run(f"{root}/out", progress=stop_after(3), client="synchronous")
    other = plan_with(source, files=ZarrGroup(chunk_size=512, shard_size=0, compression="zstd"))
    with refused(TargetError, "other-run", "restart=True"):
        other.run(f"{root}/out")
    other.run(f"{root}/out", restart=True)
    other.run(tmp_path / "undisturbed")
    assert get(f"{root}/out") == tree(tmp_path / "undisturbed")
