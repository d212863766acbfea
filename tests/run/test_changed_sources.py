"""Sources that change: between two runs, or under one; nothing is kept that was made of both."""

from __future__ import annotations

import json
import os
import pickle
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from checkpoints import assert_rank_files, tree, write_ranks
from refusals import check, failed, refused
from stopped_runs import FULL, SOURCE, TARGET, call, command, small_tasks, source, stopped, times

import reshard
from reshard import Layout, Strategy
from reshard.core.model import digests
from reshard.core.plan.plan import file_digests
from reshard.core.run.settings import RunOptions
from reshard.core.run.state import session as resume
from reshard.core.storage.local import local_store
from reshard.errors import ChangedError, ReshardError, SourceError, TargetError, bytes_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from faulty import Call, Faults


__all__ = ["command", "small_tasks", "source"]  # fixtures, for pytest to find


def test_a_changed_source_is_refused(command: list[str | Path], tmp_path: Path) -> None:
    assert call(*command).exit_code == 0
    full = {name: array + 1 for name, array in FULL.items()}
    write_ranks(tmp_path / "src", full, SOURCE)
    failed(6, "other-run", *command, places=("--restart",))
    assert_rank_files(tmp_path / "out", FULL, TARGET)
    assert call(*command, "--restart").exit_code == 0
    assert_rank_files(tmp_path / "out", full, TARGET)


def test_a_source_that_was_touched_is_refused(source: reshard.Checkpoint, tmp_path: Path) -> None:
    plan = reshard.plan(source, TARGET)
    stopped(plan, tmp_path / "out")
    path = Path(source._record.files[0].path)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    plan = reshard.plan(reshard.open(tmp_path / "src", strategy=SOURCE), TARGET)
    with refused(TargetError, "other-run", "restart=True"):
        plan.run(tmp_path / "out")
    plan.run(tmp_path / "out", restart=True)
    assert_rank_files(tmp_path / "out", FULL, TARGET)


@pytest.mark.parametrize("how", ["gone", "content"])
@pytest.mark.parametrize("partition", ["tensor", "file"])
def test_a_source_that_changes_during_the_run(
    source: reshard.Checkpoint, tmp_path: Path, how: str, partition: str, faults: Faults
) -> None:
    path = Path(source._record.files[1].path)

    def change(_call: Call) -> None:
        if how == "gone":
            path.unlink()
        else:
            path.write_bytes(bytes(path.stat().st_size))
            os.utime(path, ns=(0, 0))

    faults.nth(10, change, "write_at")
    with pytest.raises(ChangedError) as caught:
        reshard.plan(source, TARGET).run(tmp_path / "out", partition=partition, threads=1)
    assert str(path) in str(caught.value)
    assert tree(tmp_path / "out") == {}
    assert not list(tmp_path.glob("out/.reshard/*.jsonl"))


def same_time(path: Path, change: Callable[[Path], object]) -> None:
    """Change a file as a program does that sets its time back: `rsync --times`, `cp -p`, `touch -r`."""
    time.sleep(0.02)  # the system's clock of files has steps
    before = path.stat()
    change(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def in_place(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-96:] = bytes(96)
    with path.open("r+b") as file:
        file.write(content)


def replaced(path: Path) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(path.read_bytes())
    in_place(new)
    new.rename(path)


@pytest.mark.parametrize("change", [in_place, replaced])
@pytest.mark.parametrize("partition", ["tensor", "file"])
@pytest.mark.parametrize("turn", [0, 3, 6, 10])
def test_a_source_that_changes_during_the_run_and_has_its_time_set_back(
    source: reshard.Checkpoint,
    tmp_path: Path,
    partition: str,
    change: Callable[[Path], object],
    turn: int,
    faults: Faults,
) -> None:
    """Blocks of both were written, and called done."""
    path = Path(source._record.files[1].path)
    faults.nth(turn, lambda _call: same_time(path, change), "write_at")
    with refused(ChangedError, "source-changed", path, "size and time are as they were"):
        reshard.plan(source, TARGET).run(tmp_path / "out", partition=partition, threads=1)
    assert tree(tmp_path / "out") == {}
    assert not list(tmp_path.glob("out/.reshard/*.jsonl"))


@pytest.mark.parametrize("change", [in_place, replaced])
def test_what_is_begun_is_not_gone_on_with_where_a_source_changed_and_has_its_time_set_back(
    source: reshard.Checkpoint, tmp_path: Path, change: Callable[[Path], object]
) -> None:
    """A file would have blocks of two sources. Nor is it refused: a copy or a link looks the same."""
    stopped(reshard.plan(source, TARGET), tmp_path / "out")
    same_time(Path(source._record.files[1].path), change)
    plan = reshard.plan(reshard.open(tmp_path / "src", strategy=SOURCE), TARGET)
    assert plan.run(tmp_path / "out").resumed == 0
    plan.run(tmp_path / "undisturbed")
    assert tree(tmp_path / "out") == tree(tmp_path / "undisturbed")


def test_finished_files_of_a_source_that_was_only_touched_are_kept(
    source: reshard.Checkpoint, command: list[str | Path], tmp_path: Path
) -> None:
    assert call(*command, "--ranks=0").exit_code == 0
    assert "warning" not in call(*command, "--ranks=0").output
    same_time(Path(source._record.files[1].path), lambda path: path.chmod(0o600))
    foreseen, done = call(*command, "--dry-run"), call(*command)
    assert "warning: would keep 1 target file" in foreseen.output
    assert done.exit_code == 0
    assert "warning: kept 1 target file" in done.output
    assert "warning" not in call(*command, "--restart").output
    reshard.plan(reshard.open(tmp_path / "src", strategy=SOURCE), TARGET).run(tmp_path / "undisturbed")
    assert tree(tmp_path / "out") == tree(tmp_path / "undisturbed")


def test_what_travels_has_no_inode_of_this_machine(source: reshard.Checkpoint, tmp_path: Path) -> None:
    """On another one the same file may have another number, and so it is compared by size and time there."""
    there = pickle.loads(pickle.dumps(source._record.files[0]))  # noqa: S301 -- made here
    assert (there, there.change) == (source._record.files[0], (0, 0))
    assert source._record.files[0].change != (0, 0)
    same_time(Path(there.path), in_place)
    now = local_store().status(there.path)
    assert now.is_unchanged_since(there.status)
    assert not now.is_unchanged_since(source._record.files[0].status)


@pytest.mark.parametrize("ends", [True, False], ids=["finished", "stopped"])
def test_a_source_with_another_header_is_another(source: reshard.Checkpoint, tmp_path: Path, ends: bool) -> None:
    """Though it has the size and the time that it had: two tensors of as many bytes lie the other way round."""
    plan = reshard.plan(source, TARGET)
    plan.run(tmp_path / "out") if ends else stopped(plan, tmp_path / "out")
    before = tree(tmp_path / "out")
    path = Path(source._record.files[1].path)
    status, old = path.stat(), source._record.files[1].index.entries
    spans = {name: old[name].runs[0] for name in ("b", "c")}
    assert spans["b"][1] == spans["c"][1]
    content = path.read_bytes()
    start = int.from_bytes(content[:8], "little") + 8
    header = json.loads(content[8:start])
    header["b"]["data_offsets"], header["c"]["data_offsets"] = (header[name]["data_offsets"] for name in ("c", "b"))
    new = json.dumps(header, separators=(",", ":")).encode().ljust(start - 8)
    assert len(new) == start - 8
    path.write_bytes(content[:8] + new + content[start:])
    os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))
    # Compared with the replica of rank 0, it would be refused as it is opened.
    changed = reshard.plan(reshard.open(tmp_path / "src", strategy=SOURCE, contents=False), TARGET)
    with refused(TargetError, "other-run", "restart=True"):
        changed.run(tmp_path / "out")
    assert tree(tmp_path / "out") == before
    changed.run(tmp_path / "out", restart=True)
    changed.run(tmp_path / "fresh")
    assert tree(tmp_path / "out") == tree(tmp_path / "fresh")


def test_a_header_that_is_shared_is_digested_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header has up to ten thousand tensors; those of ranks alike are one object."""
    replicas = Strategy.of({name: Layout.of([8], [-1] * array.ndim) for name, array in FULL.items()})
    source = reshard.open(write_ranks(tmp_path / "src", FULL, replicas), strategy=replicas)
    real, digested = digests._entries_digest, []

    def entries_digest(entries: Any) -> str:
        digested.append(entries)
        return real(entries)

    monkeypatch.setattr(digests, "_entries_digest", entries_digest)
    file_digests(reshard.plan(source, TARGET)._record)
    assert len(digested) == 1
    assert len({*digests.index_digests([source._record.files[0].index._replace(crc=crc) for crc in (1, 2, 3)])}) == 3
    assert len(digested) == 2


@pytest.mark.parametrize("partition", ["tensor", "file"])
def test_nothing_is_kept_of_a_source_that_is_cut_short_during_the_run(
    source: reshard.Checkpoint, tmp_path: Path, partition: str, faults: Faults
) -> None:
    """What it says is true: whole again, though of another time, the same command makes everything again."""
    path = Path(source._record.files[1].path)
    content = path.read_bytes()
    faults.nth(10, lambda _call: os.truncate(path, len(content) // 4), "write_at")
    with pytest.raises(ReshardError) as caught:
        reshard.plan(source, TARGET).run(tmp_path / "out", partition=partition, threads=1)
    said = "; ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert str(path) in said
    assert "resumes" not in said
    assert said.endswith("start again")
    assert tree(tmp_path / "out") == {}
    path.write_bytes(content)
    again = reshard.plan(reshard.open(tmp_path / "src", strategy=SOURCE), TARGET).run(tmp_path / "out")
    assert again.resumed == 0
    assert_rank_files(tmp_path / "out", FULL, TARGET)


def test_finished_files_of_a_source_that_changes_are_reported(
    source: reshard.Checkpoint, tmp_path: Path, faults: Faults
) -> None:
    """An earlier run made them: the next one is refused without an option, and the error of this one names it."""
    reshard.plan(source, TARGET, ranks=[0]).run(tmp_path / "out")
    path = Path(source._record.files[1].path)
    faults.nth(4, lambda _call: os.utime(path, ns=(0, 0)), "write_at")
    with pytest.raises(ChangedError) as caught:
        reshard.plan(source, TARGET).run(tmp_path / "out", threads=1)
    check(caught.value, "source-changed", path)
    (note,) = caught.value.__notes__
    assert "restart=True" in note
    assert len(tree(tmp_path / "out")) == 1
    plan = reshard.plan(reshard.open(tmp_path / "src", strategy=SOURCE), TARGET)
    with refused(TargetError, "other-run", "restart=True"):
        plan.run(tmp_path / "out")
    plan.run(tmp_path / "out", restart=True)
    assert_rank_files(tmp_path / "out", FULL, TARGET)


def test_a_source_that_was_another_for_a_while(source: reshard.Checkpoint, tmp_path: Path) -> None:
    """It is as it was when the run has failed; but what was read meanwhile is not of it."""
    plan, path = reshard.plan(source, TARGET), Path(source._record.files[1].path)
    error = ChangedError(f"{path}: changed since it was opened; start again")
    stopped(plan, tmp_path / "out")
    session = resume.Session(plan._record, str(tmp_path / "out"), RunOptions(), threads=1)
    assert session.resumed > 0
    session.failed(error, {})
    session.close()
    assert not hasattr(error, "__notes__")
    assert tree(tmp_path / "out") == {}
    assert plan.run(tmp_path / "out").resumed == 0


def test_a_source_out_of_reach_has_not_changed(source: reshard.Checkpoint, tmp_path: Path, faults: Faults) -> None:
    """A network file system that is gone for a while: what is written is kept, and the same command goes on."""
    plan = reshard.plan(source, TARGET)
    gone = False

    def status(call: Call) -> None:
        if gone:
            raise SourceError(f"{call.path}: cannot be read: Stale file handle")

    def away(event: Any) -> None:
        nonlocal gone
        gone = event.written == event.total

    faults.every(status, "status")
    with refused(SourceError, "bad-source", "Stale file handle") as caught:
        plan.run(tmp_path / "out", progress=away)
    gone = False
    assert not isinstance(caught.value, ChangedError)
    total = plan.stats.bytes_written
    (note,) = caught.value.__notes__
    assert note.startswith(f"{bytes_text(total)} of {bytes_text(total)} are written and kept; the same command resumes")
    assert plan.run(tmp_path / "out").resumed == total
    plan.run(tmp_path / "undisturbed")
    assert tree(tmp_path / "out") == tree(tmp_path / "undisturbed")


def test_a_source_cut_short_is_refused_afterwards(source: reshard.Checkpoint, tmp_path: Path) -> None:
    plan = reshard.plan(source, TARGET)
    stopped(plan, tmp_path / "out")
    path = Path(source._record.files[0].path)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ReshardError):
        plan.run(tmp_path / "out")
    with pytest.raises(SourceError):
        reshard.open(tmp_path / "src", strategy=SOURCE)
    assert not times(tmp_path / "out")
