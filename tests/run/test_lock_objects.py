"""Locks at URLs: objects with time stamps, of runs that go on, have ended here, or gave no sign for long."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
from checkpoints import tree, write_ranks
from refusals import refused
from remotes import COLUMNS, FULL, ROWS, get

import reshard
from reshard.core.records.logs import DIRECTORY
from reshard.core.run.state import locks
from reshard.core.run.state.locks import LockObjects
from reshard.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


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


@pytest.fixture
def source(tmp_path: Path) -> reshard.Checkpoint:
    return reshard.open(write_ranks(tmp_path / "src", FULL, ROWS), strategy=ROWS)


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


def test_runs_of_the_same_files_are_kept_apart(source: reshard.Checkpoint, root: str, tmp_path: Path) -> None:
    """One begins in the middle of the other: of the same files it is refused, of another rank's it succeeds."""
    plan, errors = reshard.plan(source, COLUMNS, ranks=[0, 1]), []

    def disturb(_: object) -> None:
        if not errors:
            for ledger in (True, False):
                with refused(TargetError, "locked", "rank_1/") as caught:
                    reshard.plan(source, COLUMNS, ranks=[1]).run(f"{root}/out", ledger=ledger, overwrite=True)
                errors.append(caught.value)
            reshard.plan(source, COLUMNS, ranks=[2]).run(f"{root}/out")
            assert len(objects(f"{root}/out")) == 1

    plan.run(f"{root}/out", progress=disturb)
    assert f"process {os.getpid()}" in str(errors[0])
    assert objects(f"{root}/out") == []
    reshard.plan(source, COLUMNS).run(tmp_path / "out")
    assert get(f"{root}/out") == tree(tmp_path / "out")
    assert reshard.plan(source, COLUMNS).run(f"{root}/out").finished == 3


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
