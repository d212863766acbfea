"""Ledgers that lie, and other things in the place of their files."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from checkpoints import tree
from refusals import refused
from stopped_runs import TARGET, small_tasks, source, stopped

import reshard
from reshard.core.plan.plan import file_digests
from reshard.core.records.logs import DIRECTORY
from reshard.core.storage.base import unfinished_path
from reshard.errors import TargetError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["small_tasks", "source"]  # fixtures, for pytest to find

HEAD = b'{"reshard": 1}\n'
BEGUN = HEAD + b'{"file": "FILE", "digest": "DIGEST", "size": SIZE}\n'

LINES = [
    b"", b"\n\n", b"{", b"null\n", b"[]\n", b"\xff\xfe\n", b"{}\n" * 1000, b"[" * 100_000,
    b'{"reshard": 2}\n{"file": "FILE", "digest": "DIGEST", "size": SIZE}\n',
    HEAD,
    b'{"file": "FILE", "digest": "DIGEST", "size": SIZE}\n',
    HEAD + b'{"file": ["FILE"], "digest": "DIGEST", "size": SIZE}\n{"file": {}}\n{"file": "FILE"}\n',
    HEAD + b'{"file": "../../outside", "digest": "DIGEST", "size": SIZE}\n',
    HEAD + b'{"file": "FILE", "digest": "DIGEST"}\n',
    HEAD + b'{"file": "FILE", "wrote": [[0, 8, 0]]}\n',
    HEAD + b'{"file": "FILE", "digest": {"a": 1}, "size": 1}\n',
    HEAD + b'{"file": "FILE", "digest": "DIGEST", "size": SIZE, "replaces": 3}\n',
    HEAD + b'{"file": "FILE", "digest": "DIGEST", "size": SIZE, "rank": -1}\n',
    b'{"reshard": 1, "made": "../../outside"}\n{"file": "FILE", "digest": "DIGEST", "size": SIZE}\n',
    BEGUN + b'{"file": "FILE", "wrote": [[0, 1e400, 0]]}\n',
    BEGUN + b'{"file": "FILE", "wrote": [[1e400, 1, 0]]}\n{"file": "FILE", "ready": [NaN, 0]}\n',
    BEGUN + b'{"file": "FILE", "wrote": [[-8, 16, 0], [0, 99999999999999999999, 0], [0, 0, 0]]}\n',
    BEGUN + b'{"file": "FILE", "wrote": [[0, ' + b"9" * 5000 + b", 0]]}\n",
    BEGUN + b'{"file": "FILE", "wrote": {"a": 1}}\n{"file": "FILE", "wrote": "abc"}\n',
    BEGUN + b'{"file": "FILE", "wrote": [[0, SIZE, 1]]}\n',
    BEGUN + b'{"file": "FILE", "ready": [SIZE, 0]}\n',
    BEGUN + b'{"file": "FILE", "ready": [SIZE, 0]}\n{"file": "FILE", "ready": 7}\n',
]  # fmt: skip


@pytest.mark.parametrize("content", LINES, ids=lambda content: content[-90:].decode("ascii", "replace"))
def test_a_ledger_that_lies(source: reshard.Checkpoint, tmp_path: Path, content: bytes) -> None:
    plan = reshard.plan(source, TARGET)
    plan.run(tmp_path / "undisturbed")
    directory = tmp_path / "out" / DIRECTORY
    directory.mkdir(parents=True)
    for number, (file, digest) in enumerate(zip(plan._record.files, file_digests(plan._record), strict=True)):
        size = str(file.layout.size).encode()
        lines = content.replace(b"DIGEST", digest.encode()).replace(b"SIZE", size).replace(b"FILE", file.path.encode())
        (directory / f"0000000{number}-0123abcd.jsonl").write_bytes(lines)
        partial = tmp_path / "out" / unfinished_path(file.path, digest)
        partial.parent.mkdir(exist_ok=True)
        partial.write_bytes(os.urandom(file.layout.size))
    if b'"reshard": 2' in content or (b'"digest": {' in content and b"size" in content):
        with refused(TargetError, "other-run", "restart=True"):
            plan.run(tmp_path / "out")
        plan.run(tmp_path / "out", restart=True)
    plan.run(tmp_path / "out")
    assert tree(tmp_path / "out") == tree(tmp_path / "undisturbed")


@pytest.mark.parametrize("kind", ["symlink", "hard link", "fifo", "directory"])
@pytest.mark.parametrize("place", ["log", "partial", "lock", "the directory"])
def test_other_things_in_the_place_of_files(source: reshard.Checkpoint, tmp_path: Path, kind: str, place: str) -> None:
    """Nothing is written through them; the run succeeds, or says in a sentence what is in its way."""
    plan = reshard.plan(source, TARGET)
    plan.run(tmp_path / "undisturbed")
    stopped(plan, tmp_path / "out")
    file = plan._record.files[0].path
    path = {
        "log": next((tmp_path / "out" / DIRECTORY).glob("*.jsonl")),
        "partial": tmp_path / "out" / unfinished_path(file, file_digests(plan._record)[0]),
        "lock": tmp_path / "out" / DIRECTORY / "lock",
        "the directory": tmp_path / "out" / DIRECTORY,
    }[place]
    outside = tmp_path / "outside"
    path.rename(outside)
    before = tree(outside) if outside.is_dir() else outside.read_bytes()
    if kind == "symlink":
        path.symlink_to(outside)
    elif kind == "hard link" and outside.is_file():
        path.hardlink_to(outside)
    elif kind == "directory":
        path.mkdir()
    else:
        os.mkfifo(path)
    said = ""
    try:
        plan.run(tmp_path / "out")
    except TargetError as error:
        said = error.message
    assert said == "" or (str(path.parent) in said and "\n" not in said)
    assert said != "" or tree(tmp_path / "out") == tree(tmp_path / "undisturbed")
    assert (tree(outside) if outside.is_dir() else outside.read_bytes()) == before
