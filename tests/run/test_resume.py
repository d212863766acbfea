"""Going on with a run that was stopped: only what is not there is written again, and the bytes are the same."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import assert_rank_files, numbers, places, tree, write_ranks
from commands import heed_signals
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
    call,
    command,
    small_tasks,
    source,
    stop_after,
    stopped,
    written,
)

import reshard
from reshard import Layout, Strategy
from reshard.core.layout.block import Block
from reshard.core.model.entries import covers
from reshard.core.plan import budget, partition
from reshard.core.plan.bands import Recipe
from reshard.core.plan.partition import bytes_left, remaining
from reshard.core.plan.plan import file_digests
from reshard.core.records import logs as records
from reshard.core.run.settings import RunOptions
from reshard.core.run.state.preflight import Do, files_with, preflight
from reshard.core.run.state.sums import spans_of
from reshard.core.storage.base import PARTIAL, unfinished_path
from reshard.core.storage.crc import crc32c
from reshard.errors import TargetError, bytes_text
from reshard.formats.sets.options import HuggingFaceSet, MindSporeSet

if TYPE_CHECKING:
    from pathlib import Path

    from reshard.core.plan.plan import Plan
    from reshard.core.run.run import Progress

__all__ = ["command", "small_tasks", "source", "written"]  # fixtures, for pytest to find


@st.composite
def blocks(draw: st.DrawFn) -> tuple[tuple[int, ...], Block]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    edges = [sorted(draw(st.tuples(st.integers(0, extent), st.integers(0, extent)))) for extent in shape]
    return shape, Block(tuple(a for a, _ in edges), tuple(b for _, b in edges))


@given(blocks(), st.data())
def test_elements_before_a_row(given_block: tuple[tuple[int, ...], Block], data: st.DataObject) -> None:
    shape, block = given_block
    recipe = Recipe.of(shape, [Block.whole(shape)], [block])
    inside = np.zeros(shape, bool)
    inside[tuple(slice(a, b) for a, b in zip(block.start, block.stop, strict=True))] = True
    axis = data.draw(st.integers(0, len(shape) - 1))
    rows = inside.reshape(recipe.rows(axis), -1)
    for row in range(len(rows) + 1):
        assert recipe.elements_before(0, axis, row) == rows[:row].sum()


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


def test_files_in_order_are_gone_on_with_file_by_file(
    source: reshard.Checkpoint, tmp_path: Path, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition, "FILES_AT_ONCE", 1)
    plan = reshard.plan(source, TARGET)
    plan.run(tmp_path / "undisturbed")
    stopped(plan, tmp_path / "out", tasks=0, partition="file")
    written.ranges.clear()
    report = plan.run(tmp_path / "out", partition="file")
    assert 0 < report.resumed < plan.stats.bytes_written
    assert len({path for path, _, _ in written.ranges}) == 1
    assert tree(tmp_path / "out") == tree(tmp_path / "undisturbed")


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


def test_the_tasks_of_the_next_run_may_be_others(
    source: reshard.Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranges of files are noted, not tasks: another budget of memory is not an other plan."""
    plan = reshard.plan(source, TARGET)
    plan.run(tmp_path / "undisturbed")
    stopped(plan, tmp_path / "out")
    monkeypatch.setattr(budget, "TASK_BYTES", 700)
    monkeypatch.setattr(budget, "BAND_BYTES", 64)
    report = reshard.plan(source, TARGET).run(tmp_path / "out")
    assert report.resumed > 0
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


@pytest.mark.parametrize(
    "options",
    [
        {"files": MindSporeSet(2000), "format": "safetensors"},
        {"files": HuggingFaceSet(2000), "format": "safetensors"},
        {"format": "ckpt"},
        {"selection": reshard.Selection(cast={"float32": "bfloat16"})},
        {"remove_redundancy": True},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("how", [{}, {"drop_cache": True}, {"fsync": False}, {"fsync": False, "checksums": True}])
def test_every_kind_of_target_is_gone_on_with(
    source: reshard.Checkpoint, tmp_path: Path, options: dict[str, Any], how: dict[str, bool]
) -> None:
    replicated = Strategy.of({name: Layout.of([2, 2], [0] + [-1] * (a.ndim - 1)) for name, a in FULL.items()})
    target = None if "files" in options else replicated
    plan = reshard.plan(source, target, **options)
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


def test_checksums_are_of_what_is_there(source: reshard.Checkpoint, tmp_path: Path) -> None:
    plan = reshard.plan(source, TARGET)
    stopped(plan, tmp_path / "out")
    expected = {
        file.path: {
            name: crc32c(b"".join(content[offset : offset + nbytes] for offset, nbytes in runs))
            for name, runs in places(file.layout).items()
        }
        for file in plan._record.files
        for content in [plan_bytes(plan._record, tmp_path)[file.path]]
    }
    assert plan.run(tmp_path / "out").checksums == expected
    assert plan.run(tmp_path / "out").checksums == expected


def plan_bytes(plan: Plan, root: Path) -> dict[str, bytes]:
    reshard.Plan(plan).run(root / "undisturbed")
    return tree(root / "undisturbed")


def test_no_checksum_is_made_up(source: reshard.Checkpoint, tmp_path: Path) -> None:
    """A run without them finished the files; the next one has none to tell."""
    plan = reshard.plan(source, TARGET)
    plan.run(tmp_path / "out", checksums=False)
    assert plan.run(tmp_path / "out").checksums == {file.path: {} for file in plan._record.files}


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
            str(number), operation, str(at), *map(str, command), "--threads", "1",
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


def test_over_a_store_at_a_url_that_is_finished_nothing_is_left_to_do(source: reshard.Checkpoint) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    plan = reshard.plan(source, to="zarr")
    paths = [file.path for file in plan._record.files]
    assert files_with(preflight(plan._record, url, RunOptions()).fates, Do.MAKE) == paths
    plan.run(url)
    assert files_with(preflight(plan._record, url, RunOptions()).fates, Do.KEEP) == paths
    assert files_with(preflight(plan._record, url, RunOptions(restart=True)).fates, Do.MAKE) == paths
    assert plan.run(url).finished == len(paths)
