"""What is named when, and disks without room: nothing half-written has a final name, whatever goes wrong."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dask
import pytest
from checkpoints import assert_rank_files, plan_with, tree
from refusals import refused
from stopped_runs import FULL, TARGET, Written, small_tasks, source, stopped, times, written

import reshard
from reshard.core.plan.plan import file_digests
from reshard.core.run import tasks
from reshard.core.storage.base import unfinished_path
from reshard.errors import BudgetError, bytes_text
from reshard.formats.checkpoint2.options import Checkpoint2
from reshard.formats.dcp.names import DCP
from reshard.formats.sets.options import HuggingFaceSet
from reshard.formats.zarr.layout import ZarrGroup

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["small_tasks", "source", "written"]  # fixtures, for pytest to find


@pytest.mark.parametrize("partition", ["tensor", "file"])
@pytest.mark.parametrize("files", [DCP(), HuggingFaceSet(max_shard_size=600), Checkpoint2(step=3)], ids=repr)
def test_what_stands_last_has_the_latest_time(
    source: reshard.Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: Any, partition: str
) -> None:
    """Also where others are complete long after they were made: copying tools and readers go by it."""
    complete, moved = tasks._complete, tasks.move_pieces

    def late(path: str, file: Any, *more: Any) -> None:
        time.sleep(0 if file.publish != "file" else 0.05)  # some ticks of a file system's clock
        complete(path, file, *more)

    def late_too(*given: Any, **more: Any) -> Any:
        time.sleep(0.05)
        return moved(*given, **more)

    monkeypatch.setattr(tasks, "_complete", late)
    monkeypatch.setattr(tasks, "move_pieces", late_too)
    target = None if isinstance(files, HuggingFaceSet) else TARGET
    plan_with(source, target, files=files).run(tmp_path / "out", partition=partition, threads=4)
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
    made = plan_with(source, TARGET if isinstance(files, DCP) else None, files=files)
    dask.compute(made.graph(tmp_path / "out"), scheduler="synchronous")
    assert len(named) == len(made._record.files)


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let the disk have so much room."""

    def set_to(nbytes: int) -> None:
        real = os.statvfs("/")
        fake = os.statvfs_result((1, 1, *real[2:4], nbytes, *real[5:]))
        monkeypatch.setattr(os, "statvfs", lambda _: fake)

    return set_to


def test_room_is_looked_for_before_the_first_byte(
    source: reshard.Checkpoint, tmp_path: Path, room: Callable[[int], None], written: Written
) -> None:
    plan = reshard.plan(source, TARGET)
    room(plan.stats.target_bytes - 1)
    with refused(
        BudgetError, "no-space", tmp_path / "deep" / "out", bytes_text(plan.stats.target_bytes), "free 1 B,"
    ) as caught:
        plan.run(tmp_path / "deep" / "out")
    assert caught.value.exit_code == 5
    assert not written.ranges
    assert not (tmp_path / "deep" / "out").exists()
    room(plan.stats.target_bytes)
    plan.run(tmp_path / "deep" / "out")


@pytest.mark.parametrize("digest", ["0123abcd", "its own"])
@pytest.mark.parametrize("fsync", [True, False])
def test_what_an_earlier_run_took_counts(
    source: reshard.Checkpoint, tmp_path: Path, room: Callable[[int], None], fsync: bool, digest: str
) -> None:
    """Unfinished files have all their space: resumed or made again, they need no more of it."""
    plan = reshard.plan(source, TARGET)
    plan.run(tmp_path / "undisturbed")
    for file, own in zip(plan._record.files, file_digests(plan._record), strict=True):
        path = tmp_path / "out" / unfinished_path(file.path, own if digest == "its own" else digest)
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(file.layout.size))
    room(0)
    plan.run(tmp_path / "out", fsync=fsync)
    assert tree(tmp_path / "out") == tree(tmp_path / "undisturbed")


def test_a_full_disk_keeps_what_was_written(
    source: reshard.Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And when it is full still at the next run, that loses nothing either."""
    plan = reshard.plan(source, TARGET)
    plan.run(tmp_path / "undisturbed")
    stopped(plan, tmp_path / "out")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with refused(BudgetError, "no-space", tmp_path / "out") as caught:
            plan.run(tmp_path / "out")
    assert " are written and kept" in caught.value.__notes__[0]
    assert plan.run(tmp_path / "out").resumed > 0
    assert tree(tmp_path / "out") == tree(tmp_path / "undisturbed")


def test_a_journal_that_cannot_be_written_is_a_full_disk(
    source: reshard.Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write

    def write(descriptor: int, content: bytes) -> int:
        if b'"ready"' in content:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, content[: max(1, len(content) // 2)])  # and comes short

    plan = reshard.plan(source, TARGET)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        with refused(BudgetError, "no-space", ".jsonl"):
            plan.run(tmp_path / "out")
    assert not times(tmp_path / "out")
    assert plan.run(tmp_path / "out").resumed == plan.stats.bytes_written
    assert_rank_files(tmp_path / "out", FULL, TARGET)
