"""Sources that change: between two runs, or under one; nothing is kept that was made of both."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from checkpoints import tree
from refusals import refused
from stopped_runs import SOURCE, TARGET, call, command, small_tasks, source, stopped

import reshard
from reshard.errors import ChangedError, ReshardError, SourceError, TargetError, bytes_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from faulty import Call, Faults


__all__ = ["command", "small_tasks", "source"]  # fixtures, for pytest to find


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


def rewritten(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))
    os.utime(path, ns=(0, 0))


CHANGES: dict[str, Callable[[Path], object]] = {
    "gone": Path.unlink,
    "rewritten": rewritten,
    "cut short": lambda path: os.truncate(path, path.stat().st_size // 4),
    "in place, its time set back": lambda path: same_time(path, in_place),
    "replaced, its time set back": lambda path: same_time(path, replaced),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("partition", ["tensor", "file"])
@pytest.mark.parametrize("turn", [0, 10])
def test_a_source_that_changes_during_the_run(
    source: reshard.Checkpoint, tmp_path: Path, partition: str, change: str, turn: int, faults: Faults
) -> None:
    """Blocks of both were written, and called done."""
    path = Path(source._record.files[1].path)
    faults.nth(turn, lambda _call: CHANGES[change](path), "write_at")
    with pytest.raises(ReshardError) as caught:
        reshard.plan(source, TARGET).run(tmp_path / "out", partition=partition, threads=1)
    assert isinstance(caught.value, ChangedError) or change in {"gone", "cut short"}
    assert "start again" in "; ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert str(path) in str(caught.value)
    assert "set back" not in change or "size and time are as they were" in str(caught.value)
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
