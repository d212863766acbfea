"""Journals that lie, and other things in the place of the files beside them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from checkpoints import tree
from stopped_runs import TARGET, small_tasks, source, stopped

import reshard
from reshard.errors import TargetError
from reshard.plan.fingerprint import file_digests
from reshard.run.journal import DIRECTORY, Journal
from reshard.storage.base import PARTIAL

__all__ = ["small_tasks", "source"]  # fixtures, for pytest to find

LINES = [
    b"", b"\n\n", b"{", b"null\n", b"[]\n", b"\xff\xfe\n", b"{}\n" * 1000, b"[" * 100_000,
    b'{"reshard": 2, "digest": "DIGEST"}\n',
    b'{"reshard": 1}\n',
    b'{"reshard": 1, "digest": {"a": 1}}\n',
    b'{"reshard": 1, "digest": "DIGEST", "replaces": 3}\n',
    b'{"reshard": 1, "digest": "DIGEST"}\n{"wrote": [[0, 1e400, 0]]}\n',
    b'{"reshard": 1, "digest": "DIGEST"}\n{"wrote": [[1e400, 1, 0]]}\n{"ready": [NaN, 0]}\n',
    b'{"reshard": 1, "digest": "DIGEST"}\n{"wrote": [[-8, 16, 0], [0, 99999999999999999999, 0], [0, 0, 0]]}\n',
    b'{"reshard": 1, "digest": "DIGEST"}\n{"wrote": [[0, ' + b"9" * 5000 + b", 0]]}\n",
    b'{"reshard": 1, "digest": "DIGEST"}\n{"wrote": {"a": 1}}\n{"wrote": "abc"}\n',
    b'{"reshard": 1, "digest": "DIGEST"}\n{"wrote": [[0, SIZE, 1]]}\n',
    b'{"reshard": 1, "digest": "DIGEST"}\n{"ready": [SIZE, 0]}\n',
    b'{"reshard": 1, "digest": "DIGEST", "replaces": [SIZE, 0]}\n{"ready": [SIZE, 0]}\n{"ready": 7}\n',
]  # fmt: skip


@pytest.mark.parametrize("content", LINES, ids=lambda content: content[:60].decode("ascii", "replace"))
def test_a_journal_that_lies(source: reshard.Checkpoint, tmp_path: Path, content: bytes) -> None:
    plan = reshard.plan(source, TARGET)
    plan.run(tmp_path / "undisturbed")
    noted = Journal(str(tmp_path / "out"))
    for file, digest in zip(plan.files, file_digests(plan), strict=True):
        path = Path(noted.path(file.path))
        path.parent.mkdir(parents=True, exist_ok=True)
        size = str(file.layout.size).encode()
        path.write_bytes(content.replace(b"DIGEST", digest.encode()).replace(b"SIZE", size))
        partial = tmp_path / "out" / (file.path + PARTIAL)
        partial.parent.mkdir(exist_ok=True)
        partial.write_bytes(os.urandom(file.layout.size))
    if b'"reshard": 2' in content or b'"digest": {' in content:
        with pytest.raises(TargetError, match="start over with restart=True"):
            plan.run(tmp_path / "out")
        plan.run(tmp_path / "out", restart=True)
    plan.run(tmp_path / "out")
    assert tree(tmp_path / "out") == tree(tmp_path / "undisturbed")


@pytest.mark.parametrize("kind", ["symlink", "hard link", "fifo", "directory"])
@pytest.mark.parametrize("place", ["journal", "partial", "lock", "the directory"])
def test_other_things_in_the_place_of_files(source: reshard.Checkpoint, tmp_path: Path, kind: str, place: str) -> None:
    """Nothing is written through them; the run succeeds, or says in a sentence what is in its way."""
    plan = reshard.plan(source, TARGET)
    plan.run(tmp_path / "undisturbed")
    stopped(plan, tmp_path / "out")
    file = plan.files[0].path
    path = {
        "journal": Path(Journal(str(tmp_path / "out")).path(file)),
        "partial": tmp_path / "out" / (file + PARTIAL),
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
        said = str(error)
    assert said == "" or (str(path.parent) in said and "\n" not in said)
    assert said != "" or tree(tmp_path / "out") == tree(tmp_path / "undisturbed")
    assert (tree(outside) if outside.is_dir() else outside.read_bytes()) == before
