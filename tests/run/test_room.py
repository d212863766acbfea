"""Room on the disk: looked for before the first byte, and what a disk that is full keeps."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest
from checkpoints import assert_rank_files, tree
from refusals import refused
from stopped_runs import FULL, TARGET, Written, small_tasks, source, stopped, times, written

import reshard
from reshard.core.plan.plan import file_digests
from reshard.core.storage.base import unfinished_path
from reshard.errors import BudgetError, bytes_text

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["small_tasks", "source", "written"]  # fixtures, for pytest to find


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


def test_what_another_program_left_makes_no_room(
    source: reshard.Checkpoint, tmp_path: Path, room: Callable[[int], None]
) -> None:
    """Without digits in its name it may be anybody's, and stays."""
    plan = reshard.plan(source, TARGET)
    theirs = [tmp_path / "out" / unfinished_path(file.path) for file in plan._record.files]
    for file, path in zip(plan._record.files, theirs, strict=True):
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(file.layout.size))
    room(plan.stats.target_bytes - 1)
    with pytest.raises(BudgetError):
        plan.run(tmp_path / "out")
    room(plan.stats.target_bytes)
    plan.run(tmp_path / "out")
    for file, path in zip(plan._record.files, theirs, strict=True):
        assert path.read_bytes() == bytes(file.layout.size)


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
