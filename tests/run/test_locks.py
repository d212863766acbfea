"""Locks: two runs never write one file, in two processes or in one; at URLs they are objects with time stamps."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
from checkpoints import assert_rank_files, tree
from refusals import refused
from remotes import get
from stopped_runs import FULL, TARGET, small_tasks, source

import reshard
from reshard.core.records.logs import DIRECTORY
from reshard.core.run.state import locks
from reshard.core.run.state.locks import LockFile, LockObjects
from reshard.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

__all__ = ["small_tasks", "source"]  # fixtures, for pytest to find


_HOLD = """
import sys
from reshard.core.run.state import locks
from reshard.core.run.state.locks import LockFile
locks = LockFile(sys.argv[1])
locks.take(sys.argv[2:])
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other_process(tmp_path: Path) -> Iterator[Callable[[list[str]], subprocess.Popen[str]]]:
    """Start a process that locks some files, until it is killed."""
    with ExitStack() as stack:

        def start(files: list[str]) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-c", _HOLD, tmp_path / "out", *files],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            stack.enter_context(process)
            assert process.stdout is not None
            assert process.stdout.readline() == "locked\n"
            return process

        yield start


def test_a_run_of_very_many_files(
    tmp_path: Path, other_process: Callable[[list[str]], subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It locks all files at once, since the kernel compares each lock with all others."""
    monkeypatch.setattr(locks, "_MOST_LOCKS", 2)
    process = other_process(["a"])
    with refused(TargetError, "locked"):
        LockFile(str(tmp_path / "out")).take(["b", "c", "d"])
    process.kill()
    process.wait()
    many, few = LockFile(str(tmp_path / "out")), LockFile(str(tmp_path / "out"))
    many.take(["b", "c", "d"])
    with refused(TargetError, "locked", "a"):
        few.take(["a"])
    many.release()
    few.take(["a"])
    few.release()


def test_locks_of_another_process(
    source: reshard.Checkpoint, tmp_path: Path, other_process: Callable[[list[str]], subprocess.Popen[str]]
) -> None:
    paths = [file.path for file in reshard.plan(source, TARGET)._record.files]
    process = other_process(paths[:1])
    with refused(TargetError, "locked", paths[0], tmp_path / "out"):
        reshard.plan(source, TARGET).run(tmp_path / "out")
    reshard.plan(source, TARGET, ranks=[1]).run(tmp_path / "out")
    assert tree(tmp_path / "out").keys() == {paths[1]}
    process.kill()
    process.wait()
    reshard.plan(source, TARGET, ranks=[0]).run(tmp_path / "out")
    assert_rank_files(tmp_path / "out", FULL, TARGET)


@pytest.mark.parametrize("where", ["local", "memory", "s3"])
def test_two_runs_of_one_process(
    source: reshard.Checkpoint, tmp_path: Path, where: str, request: pytest.FixtureRequest
) -> None:
    """One begins in the middle of the other: of the same files it is refused, of another rank's it succeeds."""
    out = str(tmp_path / "out")
    if where != "local":
        out = f"{request.getfixturevalue('bucket') if where == 's3' else 'memory://two-runs'}/out"
    plan = reshard.plan(source, TARGET, ranks=[0])
    other = reshard.plan(source, TARGET, ranks=[1])
    errors = []

    def progress(_: object) -> None:
        if not errors:
            for ledger in (True, False):
                with refused(TargetError, "locked", out) as caught:
                    reshard.plan(source, TARGET, ranks=[0]).run(out, ledger=ledger, overwrite=True)
                errors.append(caught.value)
            thread = threading.Thread(target=other.run, args=(out,))
            thread.start()
            thread.join()

    plan.run(out, progress=progress)
    assert errors
    assert reshard.plan(source, TARGET).run(out).finished == 2
    plan.run(tmp_path / "expected")
    other.run(tmp_path / "expected")
    assert (tree(tmp_path / "out") if where == "local" else get(out)) == tree(tmp_path / "expected")


def test_locks_are_taken_while_others_remove_the_lock_file(tmp_path: Path) -> None:
    """The last one to give up its locks removes the file they are on, just when another opens it."""
    held = []
    failures = []

    def lock(number: int) -> None:
        for _ in range(100):
            one = LockFile(str(tmp_path / "out"))
            try:
                one.take([f"{number % 2}"])
            except TargetError:
                continue
            held.append(number % 2)
            if held.count(number % 2) > 1:
                failures.append(number)
            held.remove(number % 2)
            one.release()

    threads = [threading.Thread(target=lock, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.fixture(autouse=True)
def released(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test takes and leaves, as a run that goes on does, is given up at its end: it has a thread."""
    made: list[LockObjects] = []
    take = LockObjects.take

    def noted(self: LockObjects, files: Sequence[str]) -> None:
        made.append(self)
        take(self, files)

    monkeypatch.setattr(LockObjects, "take", noted)
    yield
    for one in made:
        one.release()


def objects(root: str) -> list[str]:
    fs, path = fsspec.core.url_to_fs(f"{root}/{DIRECTORY}")
    fs.invalidate_cache()
    return [name for name in fs.find(path) if "/lock-" in name] if fs.exists(path) else []


def rewritten(root: str, **changes: Any) -> str:
    """Change what the one lock of a target says."""
    fs, _ = fsspec.core.url_to_fs(root)
    (name,) = objects(root)
    fs.pipe_file(name, json.dumps(json.loads(fs.cat_file(name)) | changes).encode())
    return name


def test_a_lock_is_refreshed_while_the_run_goes_on(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "REFRESH_SECONDS", 0.01)
    held = LockObjects(root)
    held.take(["a"])
    fs, _ = fsspec.core.url_to_fs(root)
    (name,) = objects(root)
    before = json.loads(fs.cat_file(name))
    deadline = time.monotonic() + 30
    while (now := json.loads(fs.cat_file(name))) == before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert now["time"] > before["time"]
    assert now | {"time": 0} == before | {"time": 0}
    held.release()
    assert objects(root) == []


def test_the_lock_of_a_process_that_has_ended_here_counts_for_nothing(bucket: str) -> None:
    script = f"""
import os
from reshard.core.run.state.locks import LockObjects
LockObjects({bucket!r}).take(['a'])
os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 9
    assert len(objects(bucket)) == 1
    held = LockObjects(bucket)
    held.take(["a"])
    assert len(objects(bucket)) == 1
    held.release()


@pytest.mark.parametrize("elsewhere", [{"machine": "another"}, {"began": 0}])
def test_a_stale_lock_is_reported_and_overridden_by_removing_it(root: str, elsewhere: dict[str, Any]) -> None:
    """Of another machine nobody can know whether a process has ended, nor where the system does not say."""
    LockObjects(root).take(["a", "b"])
    rewritten(root, host="far\n", process=7, **elsewhere)
    with refused(TargetError, "locked", "writes a of", root, r"process 7 on 'far\n'"):
        LockObjects(root).take(["a", "c"])
    name = rewritten(root, time=time.time() - 3600)
    with refused(TargetError, "stale-lock", "60 minutes", f"{root}/{DIRECTORY}/{name.rpartition('/')[2]}"):
        LockObjects(root).take(["b"])
    assert objects(root) == [name]
    LockObjects(root).take(["c"])
    fsspec.core.url_to_fs(root)[0].rm_file(name)
    LockObjects(root).take(["a"])


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'{"files": ["a"]}', b"[" * 100_000, b'{"time": 1e400, "files": [{}], "host": 1}',
     b'{"time": "x", "host": "", "machine": "", "process": 1, "began": 1, "files": ["a"]}'],
)  # fmt: skip
def test_a_lock_that_lies_is_nobodys(root: str, content: bytes) -> None:
    fs, path = fsspec.core.url_to_fs(f"{root}/{DIRECTORY}/lock-0123.json")
    fs.pipe_file(path, content)
    held = LockObjects(root)
    held.take(["a"])
    held.release()
