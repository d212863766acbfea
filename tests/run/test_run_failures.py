"""Runs that fail: nothing half-written has a final name, whatever goes wrong and whenever."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
from checkpoints import numbers, tree, write_file
from eight_ranks import TARGET, small_tasks, source
from refusals import refused

import reshard
from reshard import plan
from reshard.core.run import tasks
from reshard.core.storage.base import stem_of_unfinished
from reshard.errors import BudgetError, TargetError
from reshard.formats.checkpoint2.options import Checkpoint2
from reshard.formats.dcp.names import DCP
from reshard.formats.sets.options import HuggingFaceSet
from reshard.formats.zarr.layout import ZarrGroup

__all__ = ["small_tasks", "source"]  # fixtures, for pytest to find


@pytest.fixture
def writing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the twentieth write find a full disk, while other threads go on."""
    count = 0
    real = os.pwrite

    def pwrite(fd: int, content: memoryview, offset: int) -> int:
        nonlocal count
        count += 1
        if count == 20:
            raise OSError(28, "No space left on device")
        return real(fd, content, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)


def test_a_source_cut_short_after_opening_leaves_nothing(source: reshard.Checkpoint, tmp_path: Path) -> None:
    path = Path(source._record.files[2].path)
    path.write_bytes(path.read_bytes()[:-50])
    with refused(TargetError, "source-changed", path):
        reshard.plan(source, TARGET).run(tmp_path / "out")
    assert tree(tmp_path / "out") == {}


@pytest.mark.parametrize("partition", ["tensor", "file"])
@pytest.mark.parametrize("files", [DCP(), HuggingFaceSet(max_shard_size=600), Checkpoint2(step=3)], ids=repr)
def test_what_stands_last_has_the_latest_time(
    source: reshard.Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: Any, partition: str
) -> None:
    """Also where others are complete long after they were made: copying tools and readers go by it."""
    complete, moved = tasks._complete, tasks.move_pieces

    def late(path: str, file: Any, *more: Any) -> None:
        time.sleep(0 if file.last else 0.05)  # some ticks of a file system's clock
        complete(path, file, *more)

    def late_too(*given: Any, **more: Any) -> Any:
        time.sleep(0.05)
        return moved(*given, **more)

    monkeypatch.setattr(tasks, "_complete", late)
    monkeypatch.setattr(tasks, "move_pieces", late_too)
    target = None if isinstance(files, HuggingFaceSet) else TARGET
    plan(source, target, files=files).run(tmp_path / "out", partition=partition, threads=4)
    written = [path for path in (tmp_path / "out").rglob("*") if path.is_file() and ".reshard" not in path.parts]
    contents = {path for path in written if path.suffix in {".distcp", ".safetensors", ".ckpt"}}
    assert 1 < len(contents) < len(written)
    latest = max(path.stat().st_mtime_ns for path in contents)
    assert all(path.stat().st_mtime_ns >= latest for path in written if path not in contents)


@pytest.mark.parametrize("files", [DCP(), HuggingFaceSet(max_shard_size=600), ZarrGroup(chunk_size=400)], ids=repr)
def test_no_file_of_a_graph_is_named_before_it_is_on_the_disk(
    source: reshard.Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: Any
) -> None:
    """Tasks of a graph may run on any machine: each sees to what it writes."""
    to_be_synced, named = set(), []
    pwrite, fsync, rename = os.pwrite, os.fsync, os.replace

    def written(fd: int, *more: Any) -> int:
        to_be_synced.add(Path(f"/proc/self/fd/{fd}").readlink())
        return pwrite(fd, *more)

    def synced(fd: int) -> None:
        to_be_synced.discard(Path(f"/proc/self/fd/{fd}").readlink())
        fsync(fd)

    def renamed(unfinished: str, path: str) -> None:
        named.append(path)
        assert Path(unfinished).resolve() not in to_be_synced
        rename(unfinished, path)

    monkeypatch.setattr(os, "pwrite", written)
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    made = plan(source, TARGET if isinstance(files, DCP) else None, files=files)
    dask.compute(made.graph(tmp_path / "out"), scheduler="synchronous")
    assert len(named) == len(made._record.files)


def test_a_failed_unified_set_is_gone_on_with(
    source: reshard.Checkpoint, tmp_path: Path, small_tasks: None, writing_fails: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    made = reshard.plan(source, to="mindspore")
    with refused(BudgetError, "no-space", tmp_path / "out"):
        made.run(tmp_path / "out")
    assert set(map(stem_of_unfinished, tree(tmp_path / "out"))) <= {file.path for file in made._record.files}
    monkeypatch.undo()
    report = made.run(tmp_path / "out")
    assert 0 < report.resumed < made.stats.bytes_written == report.bytes_written + report.resumed
    made.run(tmp_path / "other", ledger=False)
    assert tree(tmp_path / "out") == tree(tmp_path / "other")


def test_a_source_that_changes_under_the_run_is_refused(
    source: reshard.Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = reshard.plan(source, TARGET)
    real = tasks.move_pieces

    def changing(*arguments: Any, **options: Any) -> Any:
        Path(source._record.files[3].path).touch()
        return real(*arguments, **options)

    monkeypatch.setattr(tasks, "move_pieces", changing)
    for _ in range(2):  # the second time it is refused before anything is read
        with refused(TargetError, "source-changed", "checkpoint_3.ckpt") as caught:
            made.run(tmp_path / "out")
        assert caught.value.exit_code == 6
        assert tree(tmp_path / "out") == {}


@pytest.mark.parametrize("scheduler", ["threads", "synchronous"])
def test_a_full_disk_leaves_nothing(
    source: reshard.Checkpoint, tmp_path: Path, small_tasks: None, writing_fails: object, scheduler: str
) -> None:
    with refused(BudgetError, "no-space", tmp_path / "out") as caught:
        reshard.plan(source, TARGET).run(tmp_path / "out", client=scheduler)
    assert caught.value.exit_code == 5
    left = tree(tmp_path / "out")
    if scheduler == "threads" and any("written and kept" in note for note in getattr(caught.value, "__notes__", ())):
        assert all(name.endswith(".partial") for name in left)  # a task was done before the disk was full
    else:
        assert left == {}


def test_a_disk_too_small_is_found_before_the_first_byte(source: reshard.Checkpoint, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    big = numbers({"b": (12,)}) | {"w": np.zeros((1 << 10, 1 << 8), np.float32)}
    path = write_file(tmp_path / "big.safetensors", big)
    made = reshard.plan(reshard.open(path), None)
    import signal

    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with refused(BudgetError, "file-too-large", tmp_path / "out"):
            made.run(tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)
    assert tree(tmp_path / "out") == {}
