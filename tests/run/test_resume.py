"""Going on with a run that was stopped: how far it is, what is written again, and that the bytes are the same."""

from __future__ import annotations

import errno
import json
import os
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click
import numpy as np
import pytest
from checkpoints import assert_rank_files, numbers, plan_with, tree, write_file, write_ranks
from commands import call, done, heed_signals
from faulty import IMPORTED
from generators import Model, models
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import failed, refused
from samples import examples
from stopped_runs import (
    FULL,
    SOURCE,
    TARGET,
    StoppedError,
    Written,
    command,
    small_tasks,
    source,
    stop_after,
    stopped,
    written,
)

import reshard
from reshard import Layout, SourceError, Strategy
from reshard.cli.commands import TYPED, Command
from reshard.core.catalog import stored_checkpoints
from reshard.core.model.entries import covers
from reshard.core.plan import partition
from reshard.core.plan.partition import bytes_left, remaining
from reshard.core.plan.plan import file_digests
from reshard.core.records import logs as records
from reshard.core.records.logs import Record, known, unfinished
from reshard.core.run.settings import RunOptions
from reshard.core.run.state.ledger import Ledger
from reshard.core.run.state.preflight import Do, files_with, preflight
from reshard.core.run.state.sums import spans_of
from reshard.core.storage.base import PARTIAL, unfinished_path
from reshard.errors import TargetError, bytes_text
from reshard.formats.sets.options import HuggingFaceSet, MindSporeSet

if TYPE_CHECKING:
    from pathlib import Path

    from reshard.core.run.run import Progress

__all__ = ["command", "small_tasks", "source", "written"]  # fixtures, for pytest to find


@settings(max_examples=examples(25))
@given(models(), st.data())
def test_only_what_is_not_there_is_written_again(
    tmp_path_factory: pytest.TempPathFactory, model: Model, data: st.DataObject
) -> None:
    """Stop anywhere, spoil some of what was written, cut ledgers short; then the rest gives the same bytes."""
    root = tmp_path_factory.mktemp("run")
    full = numbers(model.shapes, "int16")
    checkpoint = reshard.open(write_ranks(root / "src", full, model.source), strategy=model.source)
    plan = reshard.plan(checkpoint, model.target)
    plan.run(root / "undisturbed", fsync=False)
    with suppress(StoppedError):
        progress = stop_after(data.draw(st.integers(0, len(plan._record.tasks))))
        plan.run(root / "out", progress=progress, threads=1, fsync=False, checksums=True)
    logs = sorted((root / "out" / ".reshard").glob("*.jsonl"))
    if logs and data.draw(st.booleans()):
        os.truncate(logs[-1], max(0, logs[-1].stat().st_size - data.draw(st.integers(1, 400))))
    noted = records.known(str(root / "out")).records
    finished = [number for number, file in enumerate(plan._record.files) if (root / "out" / file.path).exists()]
    good = {}
    for number, (file, digest) in enumerate(zip(plan._record.files, file_digests(plan._record), strict=True)):
        path = root / "out" / unfinished_path(file.path, digest)
        if not path.exists():
            continue
        content = bytearray(path.read_bytes())
        spoiled = data.draw(st.sets(st.integers(0, len(content) - 1), max_size=2))
        for place in spoiled:
            content[place] ^= 0x55
        path.write_bytes(content)
        good[number] = spans_of(
            (begin, nbytes, crc)
            for begin, nbytes, crc in noted.get(file.path, records.Record()).ranges
            if not any(begin <= place < begin + nbytes for place in spoiled)
        )
    report = plan.run(root / "out", fsync=False)
    assert tree(root / "out") == tree(root / "undisturbed")
    left = remaining(plan._record, finished, good)
    assert report.bytes_written == bytes_left(left) == plan.stats.bytes_written - report.resumed


def test_what_is_verified_is_not_written_again(source: reshard.Checkpoint, tmp_path: Path, written: Written) -> None:
    plan = reshard.plan(source, TARGET)
    plan.run(tmp_path / "undisturbed")
    stopped(plan, tmp_path / "out")
    noted = records.known(str(tmp_path / "out")).records
    good = {f"{tmp_path}/out/{file.path}": spans_of(noted[file.path].ranges) for file in plan._record.files}
    assert sum(end - begin for spans in good.values() for begin, end in spans) > 1000
    written.ranges.clear()
    report = plan.run(tmp_path / "out")
    assert 1000 < report.resumed < plan.stats.bytes_written == report.resumed + report.bytes_written
    literals = {
        (f"{tmp_path}/out/{file.path}", offset) for file in plan._record.files for offset, _ in file.layout.literals
    }
    for path, begin, end in written.ranges:
        assert (path, begin) in literals or not covers(good[path], begin, end)
    assert tree(tmp_path / "out") == tree(tmp_path / "undisturbed")


@pytest.mark.parametrize("partition", ["tensor", "file"])
@pytest.mark.parametrize("missing", [0, 1])
def test_a_finished_file_that_was_removed_is_made_again(
    source: reshard.Checkpoint, tmp_path: Path, written: Written, partition: str, missing: int
) -> None:
    plan = reshard.plan(source, TARGET)
    plan.run(tmp_path / "out", partition=partition)
    before = tree(tmp_path / "out")
    (tmp_path / "out" / plan._record.files[missing].path).unlink()
    written.ranges.clear()
    plan.run(tmp_path / "out", partition=partition)
    assert tree(tmp_path / "out") == before
    assert {path for path, _, _ in written.ranges} == {f"{tmp_path}/out/{plan._record.files[missing].path}"}


def test_a_finished_file_that_was_not_synced_is_synced_by_the_next_run(
    source: reshard.Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = reshard.plan(source, TARGET)
    plan.run(tmp_path / "out", fsync=False)
    synced: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_ino), real(fd)))
    assert plan.run(tmp_path / "out").finished == 2
    assert {path.stat().st_ino for path in (tmp_path / "out").rglob("*.safetensors")} <= set(synced)
    monkeypatch.setattr(records, "boot_id", lambda: "another start of the machine")
    assert plan.run(tmp_path / "out").finished == 2


@pytest.mark.parametrize("fsync", [True, False])
def test_a_finished_file_that_was_not_synced_is_made_again_after_a_power_cut(
    source: reshard.Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: bool
) -> None:
    plan = reshard.plan(source, TARGET)
    out = tmp_path / "out"
    plan.run(out, fsync=fsync)
    whole = tree(out)
    assert plan.run(out, fsync=fsync).finished == 2
    monkeypatch.setattr(records, "boot_id", lambda: "another start of the machine")
    for path in out.rglob("*.safetensors"):  # the name and the size were on the disk, and no more
        status = path.stat()
        path.write_bytes(path.read_bytes() if fsync else bytes(status.st_size))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert len(files_with(preflight(plan._record, str(out), RunOptions()).fates, Do.KEEP)) == 2 * fsync
    assert plan.run(out).finished == 2 * fsync
    assert tree(out) == whole
    assert plan.run(out).finished == 2


@pytest.mark.parametrize("first", ["tensor", "file"])
def test_ownership_may_change_between_runs(
    source: reshard.Checkpoint, tmp_path: Path, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition, "FILES_AT_ONCE", 1)
    plan = reshard.plan(source, TARGET)
    plan.run(tmp_path / "undisturbed")
    stopped(plan, tmp_path / "out", tasks=0 if first == "file" else 6, partition=first)
    plan.run(tmp_path / "out", partition="tensor" if first == "file" else "file")
    assert tree(tmp_path / "out") == tree(tmp_path / "undisturbed")


def test_progress_begins_at_what_an_earlier_run_wrote(source: reshard.Checkpoint, tmp_path: Path) -> None:
    plan = reshard.plan(source, TARGET)
    stopped(plan, tmp_path / "out")
    events: list[Progress] = []
    report = plan.run(tmp_path / "out", progress=events.append)
    assert 0 < report.resumed == events[0].written == events[0].resumed
    assert {event.resumed for event in events} == {report.resumed}
    assert events[-1].written - events[-1].resumed == report.bytes_written
    plan.run(tmp_path / "new", progress=events.append)
    assert events[-1].resumed == 0


KINDS: list[dict[str, Any]] = [
    {"files": MindSporeSet(2000)},
    {"files": HuggingFaceSet(2000)},
    {"to": "ckpt"},
    {"cast": {"float32": "bfloat16"}},
    {"remove_redundancy": True},
]
HOW = [{"drop_cache": True}, {"fsync": False}, {"fsync": False, "checksums": True}]


@pytest.mark.parametrize(("options", "how"), [*((options, {}) for options in KINDS), *zip(KINDS, HOW, strict=False)])
def test_every_kind_of_target_is_gone_on_with(
    source: reshard.Checkpoint, tmp_path: Path, options: dict[str, Any], how: dict[str, bool]
) -> None:
    replicated = Strategy.of({name: Layout.of([2, 2], [0] + [-1] * (a.ndim - 1)) for name, a in FULL.items()})
    target = None if "files" in options else replicated
    make = plan_with if "files" in options else reshard.plan
    plan = make(source, target, **options)
    plan.run(tmp_path / "undisturbed")
    stopped(plan, tmp_path / "out", **how)
    report = plan.run(tmp_path / "out", **how)
    assert (report.resumed > 0) == (how.get("checksums", how.get("fsync", True)))
    assert tree(tmp_path / "out") == tree(tmp_path / "undisturbed")
    again = plan.run(tmp_path / "out", **how)
    assert again.finished == len(plan._record.files)
    assert again.bytes_written == 0


@pytest.mark.parametrize("fsync", [True, False])
@pytest.mark.parametrize("named", [1, 2])
def test_a_run_that_fails_between_two_names_is_gone_on_with(
    source: reshard.Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: bool, named: int
) -> None:
    plan = reshard.plan(source, to="mindspore", max_shard_size=2000)
    plan.run(tmp_path / "undisturbed")
    real, left = os.replace, iter(range(named))

    def replace(old: str, new: str) -> None:
        if ".reshard" not in new and next(left, None) is None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with refused(TargetError, "cannot-write", "rename") as caught:
            plan.run(tmp_path / "out", fsync=fsync)
    assert "the same command resumes" in caught.value.__notes__[0]
    made = {name: content for name, content in tree(tmp_path / "out").items() if not name.endswith(PARTIAL)}
    assert len(made) == named
    assert made.items() <= tree(tmp_path / "undisturbed").items()
    report = plan.run(tmp_path / "out", fsync=fsync)
    assert report.finished == named
    assert tree(tmp_path / "out") == tree(tmp_path / "undisturbed")


@pytest.mark.parametrize("where", ["first", "sum"])
def test_a_file_whose_header_or_sum_a_crash_took_is_not_named_as_it_is(
    source: reshard.Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """All tensors are on the disk, and bytes between them are not: of a header, or a sum of a zip's member."""
    plan = reshard.plan(source, TARGET, to="dcp")
    plan.run(tmp_path / "undisturbed", partition="file")
    real = os.replace

    def replace(old: str, new: str) -> None:
        if ".reshard" not in new:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with refused(TargetError, "cannot-write", "rename"):
            plan.run(tmp_path / "out", partition="file")
    layout = next(file.layout for file in plan._record.files if file.layout.crcs)
    path = tmp_path / "out" / next(file.path for file in plan._record.files if file.layout is layout)
    at = layout.literals[0][0] if where == "first" else layout.crcs[0].places[0]
    (unfinished,) = path.parent.glob(f"*{path.name}*{PARTIAL}*")
    kept = unfinished.stat()
    with unfinished.open("r+b") as file:
        file.seek(at)
        file.write(bytes(4))
    os.utime(unfinished, ns=(kept.st_atime_ns, kept.st_mtime_ns))
    plan.run(tmp_path / "out", partition="file")
    assert tree(tmp_path / "out") == tree(tmp_path / "undisturbed")


_SIGNALLED = """
import os, sys
from reshard.core.plan import budget; from reshard.core.run.state import session as resume
from faulty import Faults, MonkeyPatch, install
budget.TASK_BYTES, budget.BAND_BYTES, resume.FLUSH_SECONDS = 512, 256, 0
faults = Faults()
faults.nth(int(sys.argv[3]), lambda call: os.kill(os.getpid(), int(sys.argv[1])), sys.argv[2])
install(faults, MonkeyPatch())
from reshard.cli.main import main
main(sys.argv[4:])
"""


@pytest.mark.parametrize(
    ("number", "code", "operation", "at"),
    [(signal.SIGTERM, 143, "write_at", 14), (signal.SIGINT, 130, "publish", 0)],
)
def test_a_stopped_run_says_how_far_it_is(
    command: list[str | Path], tmp_path: Path, number: int, code: int, operation: str, at: int
) -> None:
    total = reshard.plan(reshard.open(tmp_path / "src", strategy=SOURCE), TARGET).stats.bytes_written
    ended = subprocess.run(
        [
            sys.executable, "-c", IMPORTED + _SIGNALLED,
            str(number), operation, str(at), *map(str, command), "--threads", "1", "--to", "safetensors",
        ],
        check=False, capture_output=True, text=True, preexec_fn=heed_signals,
    )  # fmt: skip
    assert ended.returncode == code
    begin, bytes_kept, rest = ended.stderr.replace(" of ", "; ", 1).split("; ", 2)
    assert begin in {"stopped by SIGTERM", "interrupted"}
    assert bytes_kept[0] in "123456789"
    assert rest == (
        f"{bytes_text(total)} are written and kept; the same command resumes (with --restart it starts over)\n"
    )
    done = call(*command)
    assert done.exit_code == 0
    assert_rank_files(tmp_path / "out", FULL, TARGET)


def test_a_dry_run_tells_of_what_is_begun(
    source: reshard.Checkpoint, command: list[str | Path], tmp_path: Path
) -> None:
    stopped(reshard.plan(source, TARGET), tmp_path / "out")
    before = tree(tmp_path / "out")
    told = call(*command, "--dry-run")
    assert told.exit_code == 0
    assert "warning: 2 target files would be resumed, begun by an earlier run\n" in told.output
    assert "notice" not in call(*command, "--dry-run", "--restart").output
    assert tree(tmp_path / "out") == before
    (tmp_path / "out" / ".reshard").rename(tmp_path / "elsewhere")
    (tmp_path / "out" / ".reshard").symlink_to(tmp_path / "elsewhere")
    for options in (["--dry-run"], []):
        failed(6, "is-link", *command, *options, places=(".reshard",))


def test_how_far_a_run_in_python_is(source: reshard.Checkpoint, tmp_path: Path) -> None:
    plan = reshard.plan(source, TARGET)
    stopped(plan, tmp_path / "dst")
    progress = unfinished(str(tmp_path / "dst"))
    assert progress is not None
    assert 0 < progress.written < progress.total == plan.stats.target_bytes
    assert progress.command == ()
    for _ in range(2):
        with refused(SourceError, "unfinished", tmp_path / "dst", " of "):
            reshard.open(tmp_path / "dst", strategy=TARGET)
    (found,) = stored_checkpoints(tmp_path / "dst")
    assert (found.state, found.path) == ("incomplete", str(tmp_path / "dst"))
    plan.run(tmp_path / "dst")
    assert unfinished(str(tmp_path / "dst")) is None
    assert [each.state for each in stored_checkpoints(tmp_path / "dst")] == ["complete"]


@pytest.mark.parametrize("to", ["hf", "dcp", "zarr"])
def test_the_command_that_resumes_it(to: str, tmp_path: Path) -> None:
    """The log of a killed command, in which nothing is ready."""
    write_file(tmp_path / "a.safetensors", {"w": np.ones((64, 64), np.float32), "v": np.ones((64, 64), np.float32)})
    target = tmp_path / "a target"
    done("convert", tmp_path / "a.safetensors", target, "--to", to, "--overwrite")
    (log,) = (*target.glob(".reshard/*.jsonl"), *tmp_path.glob("*.reshard/*.jsonl"))
    lines = [line for line in log.read_text().splitlines() if '"ready"' not in line]
    log.write_text("\n".join(lines) + "\n")
    if to == "zarr":
        log.parent.rename(target / ".reshard")
    for path in target.rglob("*"):
        if path.is_file() and path.parent.name != ".reshard":
            path.unlink()
    result = failed(4, "unfinished", "inspect", target)
    command = shlex.join(["reshard", "convert", str(tmp_path / "a.safetensors"), str(target), "--to", to])
    assert command in result.stderr
    assert "--overwrite" not in result.stderr
    found = json.loads(done("runs", tmp_path, "--json").stdout)["checkpoints"]
    (record,) = (each for each in found if each["path"] == str(target))
    assert record["state"] == "incomplete"
    assert command in record["hint"]
    done(*shlex.split(command)[1:])
    assert call("inspect", target).exit_code == 0


def test_the_command_of_another_directory_without_passwords(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = (
        "convert",
        "ftp://me:hush@host/run",
        "--source-strategy=https://host/s.json?sig=hush",
        "-- out",
        "layers.?",
    )
    context = click.Context(
        Command("convert", params=[click.Argument(["words"], nargs=-1)]), info_name="reshard convert"
    )
    context.command.parse_args(context, ["--", *words[1:]])
    shown = context.meta[TYPED]
    assert shown[2:] == ("ftp://me:***@host/run", "--source-strategy=https://host/s.json?***", "-- out", "layers.?")
    for typed, expected in ((shown, f"resume it in {tmp_path}: reshard convert "), (("x" * 70_000,), "the call")):
        target = str(tmp_path / typed[0][:9])
        ledger = Ledger(target, command=typed)
        ledger.add({"a": Record(digest="ab", size=100)})
        monkeypatch.chdir("/")
        progress = unfinished(target)
        assert progress is not None
        assert progress.hint.startswith(expected)
        assert "hush" not in progress.hint
        monkeypatch.chdir(tmp_path)
        progress = unfinished(target)
        assert progress is not None
        assert str(tmp_path) not in progress.hint


def test_a_file_that_is_unfinished_hides_nothing(tmp_path: Path) -> None:
    """The ledger of a file is in its directory."""
    for name in ("step-5/model.safetensors", "old.safetensors"):
        write_file(tmp_path / name, {"w": np.ones((4,), np.float32)})
    (tmp_path / ".reshard").mkdir()
    lines = [{"reshard": 1}, {"file": "whole.safetensors", "rank": 0, "digest": "ab", "size": 100}]
    lines += [{"file": "whole.safetensors", "wrote": [[10, 30, 7]]}]
    (tmp_path / ".reshard" / "00000001-abcdef12.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = {os.path.relpath(each.path, tmp_path): each for each in stored_checkpoints(tmp_path)}
    states = {path: each.state for path, each in found.items()}
    assert states == {"whole.safetensors": "incomplete", ".": "complete", "step-5": "complete"}
    assert "30 B of 100 B" in found["whole.safetensors"].reason


def test_a_log_that_lies_about_its_command(tmp_path: Path) -> None:
    write_file(tmp_path / "a.safetensors", {"w": np.ones((4,), np.float32)})
    done("convert", tmp_path / "a.safetensors", tmp_path / "dst", "--to", "hf")
    (log,) = (tmp_path / "dst" / ".reshard").glob("*.jsonl")
    head, *lines = (json.loads(line) for line in log.read_text().splitlines() if line)
    for lie in (5, {"a": 1}, [["x"]], ["convert", "$(rm x)\n;"], ["x" * 900_000]):
        lines = [line for line in lines if "ready" not in line]
        log.write_text("\n".join(json.dumps(line) for line in ({**head, "command": lie}, *lines)))
        assert all(isinstance(record.command, tuple) for record in known(str(tmp_path / "dst")).records.values())
        progress = unfinished(str(tmp_path / "dst"))
        assert progress is None or len(progress.hint) < 1000
        assert progress is None or "\n;" not in progress.hint or "'$(rm x)\n;'" in progress.hint
        assert call("runs", tmp_path).exit_code == 0
