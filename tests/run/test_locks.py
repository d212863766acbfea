"""Locks: two runs never write one file, in two processes or in one."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
from checkpoints import assert_rank_files, tree
from refusals import refused
from stopped_runs import FULL, TARGET, small_tasks, source

import reshard
from reshard.core.run.state import locks
from reshard.core.run.state.locks import LockFile
from reshard.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
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


def test_two_runs_of_one_process(source: reshard.Checkpoint, tmp_path: Path) -> None:
    """One begins in the middle of the other: of the same files it is refused, of another rank's it succeeds."""
    plan = reshard.plan(source, TARGET, ranks=[0])
    other = reshard.plan(source, TARGET, ranks=[1])
    errors = []

    def progress(_: object) -> None:
        if not errors:
            with refused(TargetError, "locked", tmp_path / "out") as caught:
                reshard.plan(source, TARGET, ranks=[0]).run(tmp_path / "out")
            errors.append(caught.value)
            thread = threading.Thread(target=other.run, args=(tmp_path / "out",))
            thread.start()
            thread.join()

    plan.run(tmp_path / "out", progress=progress)
    assert errors
    assert_rank_files(tmp_path / "out", FULL, TARGET)


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


def test_locks_do_not_travel(tmp_path: Path) -> None:
    import pickle

    one = LockFile(str(tmp_path / "out"))
    one.take(["a"])
    pickle.loads(pickle.dumps(one)).release()  # noqa: S301 -- our own
    with refused(TargetError, "locked", tmp_path / "out"):
        LockFile(str(tmp_path / "out")).take(["a"])
    one.release()
    assert not (tmp_path / "out").exists()
