"""The one journal of a zarr store that is being written: resumed, of another plan, torn, and lying."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from checkpoints import tree
from stopped_runs import small_tasks, source, stopped

import reshard
from reshard import ZarrGroup
from reshard.errors import TargetError
from reshard.plan.fingerprint import file_digests
from reshard.run import journal
from reshard.run.journal import DIRECTORY, Record
from reshard.run.store_journal import StoreJournal

if TYPE_CHECKING:
    from reshard.plan.plan import Plan

__all__ = ["small_tasks", "source"]  # fixtures, for pytest to find


MADE = 12
"""So many files are made, a task each, before the first byte is moved."""


@pytest.fixture
def plan(source: reshard.Checkpoint) -> Plan:
    plan = reshard.plan(source, files=ZarrGroup(chunk_bytes=512, shard_bytes=0))
    assert len(plan.files) == MADE
    return plan


def test_what_is_noted_is_known(tmp_path: Path) -> None:
    noted = StoreJournal(str(tmp_path))
    files = ["a/c/0", "b", "ω/\udc80", "file"]
    for number, file in enumerate(files):
        noted.begin(file, f"digest {number}", number, wrote=[(0, 1, number)])
        noted.wrote(file, [(8, 2, 3)])
    (tmp_path / "b").touch()
    noted.ready("b", str(tmp_path / "b"), sync=True)
    noted.begin("file", "another", 9, replaces=(1, 2))
    seen = StoreJournal(str(tmp_path))
    assert not seen.read("b").digest
    seen.look([*files[1:], "c"])
    assert seen.read("b") == Record("digest 1", 1, [(0, 1, 1), (8, 2, 3)], noted.found("b"))
    assert seen.read("ω/\udc80").wrote == [(0, 1, 2), (8, 2, 3)]
    assert seen.read("file") == Record("another", 9, replaces=(1, 2))
    assert seen.read("a/c/0") == seen.read("c") == Record()  # not asked for, and not there
    assert [path.name for path in (tmp_path / DIRECTORY).iterdir()] == ["store.jsonl"]


def test_it_is_gone_with_the_last_file(tmp_path: Path) -> None:
    noted = StoreJournal(str(tmp_path))
    for file in "ab":
        noted.begin(file, "digest", 1)
    noted.forget("c")
    noted.forget("a")
    assert Path(noted.path()).exists()
    noted.forget("b")
    assert not Path(noted.path()).exists()


def test_a_torn_line_takes_no_other_with_it(tmp_path: Path) -> None:
    noted = StoreJournal(str(tmp_path))
    noted.begin("a", "digest", 1)
    noted.begin("b", "digest", 1)
    with Path(noted.path()).open("ab") as file:
        file.write(b'{"file":"a","rea')  # the disk was full
    (tmp_path / "b").touch()
    noted.ready("b", str(tmp_path / "b"), sync=False)
    noted.look(["a", "b"])
    assert (noted.read("a").ready, noted.read("b").ready) == (None, noted.found("b"))


def test_a_journal_of_many_files_is_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_MOST_BYTES", 100)
    noted = StoreJournal(str(tmp_path))
    files = [f"w/c/{number}" for number in range(100)]
    for file in files:
        noted.begin(file, "digest", 1)
    noted.look(files)
    assert noted.read(files[-1]).digest
    noted.look(files[:1])  # of a file more than its share is not read
    assert not noted.read(files[-1]).digest


@pytest.mark.parametrize("links", [1, 2])
def test_a_run_goes_on_with_a_journal_of_its_own(plan: Plan, tmp_path: Path, links: int) -> None:
    """A line that was torn by a power cut ends there, and a copy made with `cp -l` stays as it is."""
    plan.run(tmp_path / "whole")
    stopped(plan, tmp_path / "out", MADE + 2)
    path = tmp_path / "out" / DIRECTORY / "store.jsonl"
    with path.open("ab") as file:
        file.write(b'{"file":"w/c/0/0","wro')
    before = path.read_bytes()
    if links == 2:
        (tmp_path / "copy").hardlink_to(path)
    stopped(plan, tmp_path / "out", tasks=4)
    assert all(map(json.loads, path.read_bytes().split()))
    assert links == 1 or (tmp_path / "copy").read_bytes() == before
    report = plan.run(tmp_path / "out")
    assert report.resumed
    assert report.resumed + report.bytes_written == plan.stats.bytes_written
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    assert not (tmp_path / "out" / DIRECTORY).exists()


def test_what_is_synced_later_is_noted_in_a_journal_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    noted = StoreJournal(str(tmp_path))
    noted.begin("a", "digest", 0)
    noted.ready("a", str(tmp_path / "a"), sync=False)
    (tmp_path / "copy").hardlink_to(noted.path())
    before = (tmp_path / "copy").read_bytes()
    later = StoreJournal(str(tmp_path))
    later.look(["a"])
    assert later.read("a").boot
    later.ready("a", str(tmp_path / "a"), sync=True)
    later.look(["a"])
    assert (later.read("a").boot, later.read("a").ready) == ("", later.found("a"))
    assert (tmp_path / "copy").read_bytes() == before


def test_another_plan_is_told_so(source: reshard.Checkpoint, plan: Plan, tmp_path: Path) -> None:
    stopped(plan, tmp_path / "out", MADE + 2)
    other = reshard.plan(source, files=ZarrGroup(chunk_bytes=512, shard_bytes=0, compression="zstd"))
    with pytest.raises(TargetError, match="start over with restart=True"):
        other.run(tmp_path / "out")
    other.run(tmp_path / "out", restart=True)
    other.run(tmp_path / "undisturbed")
    assert tree(tmp_path / "out") == tree(tmp_path / "undisturbed")
    assert not (tmp_path / "out" / DIRECTORY).exists()


LINES = [
    b"", b"\n\n", b"{", b"null", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"file": "FILE"}', b'{"file": ["FILE"]}',
    b'{"file": {}, "reshard": 1, "digest": "DIGEST"}',
    b'{"file": "../../outside", "reshard": 1, "digest": "DIGEST"}',
    b'{"file": "FILE", "reshard": 1}',
    b'{"file": "FILE", "wrote": [[0, 8, 0]]}',
    b'{"file": "FILE", "reshard": 1, "digest": "DIGEST"}\n{"file": "FILE", "wrote": [[0, SIZE, 1]]}',
    b'{"file": "FILE", "reshard": 1, "digest": "DIGEST"}\n{"file": "FILE", "wrote": [[0, 1e400, 0]]}',
    b'{"file": "FILE", "reshard": 1, "digest": "DIGEST"}\n{"file": "FILE", "ready": [SIZE, 0]}',
]  # fmt: skip


@pytest.mark.parametrize("content", LINES, ids=lambda content: content[:60].decode("ascii", "replace"))
def test_a_journal_that_lies(plan: Plan, tmp_path: Path, content: bytes) -> None:
    plan.run(tmp_path / "undisturbed")
    path = tmp_path / "out" / DIRECTORY / "store.jsonl"
    path.parent.mkdir(parents=True)
    with path.open("wb") as lines:
        for file, digest in zip(plan.files, file_digests(plan), strict=True):
            size = str(file.layout.size).encode()
            line = content.replace(b"DIGEST", digest.encode()).replace(b"SIZE", size)
            lines.write(line.replace(b"FILE", file.path.encode()) + b"\n")
    for file in plan.files:
        partial = tmp_path / "out" / (file.path + ".partial")
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(os.urandom(file.layout.size))
    plan.run(tmp_path / "out")
    assert tree(tmp_path / "out") == tree(tmp_path / "undisturbed")
    assert not (tmp_path / "out" / DIRECTORY).exists()


@pytest.mark.parametrize("kind", ["symlink", "fifo", "directory"])
def test_something_else_in_its_place(plan: Plan, tmp_path: Path, kind: str) -> None:
    """Nothing is written through it; the run succeeds, or says in a sentence what is in its way."""
    stopped(plan, tmp_path / "out", MADE + 2)
    path = tmp_path / "out" / DIRECTORY / "store.jsonl"
    outside = tmp_path / "outside"
    path.rename(outside)
    before = outside.read_bytes()
    if kind == "symlink":
        path.symlink_to(outside)
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    said = ""
    try:
        plan.run(tmp_path / "out")
    except TargetError as error:
        said = str(error)
    assert said == "" or (str(path) in said and "\n" not in said)
    assert (said != "") == (kind == "directory")
    assert outside.read_bytes() == before
