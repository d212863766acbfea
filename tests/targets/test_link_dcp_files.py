"""The files of distributed checkpoints that are linked to others: shared, resumed, refused; and the command."""

from __future__ import annotations

import errno
import itertools
import json
import os
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from checkpoints import tree, write_file
from commands import done
from dcp_files import write_hyper
from fsspec.core import url_to_fs
from linked_dcp import FULL, WHOLE, assert_equal, linked, paths_in, simple
from refusals import failed, refused

import reshard
from reshard import DCP, Selection, Strategy
from reshard.core.storage import local
from reshard.core.storage.local import LocalStore
from reshard.errors import BudgetError, ChangedError, SourceError, TargetError, UsageError

if TYPE_CHECKING:
    from pathlib import Path


# --- the files ---


def test_a_link_is_of_the_file_that_a_link_leads_to(tmp_path: Path) -> None:
    root = simple(tmp_path)
    (root / "__0_0.distcp").rename(tmp_path / "blob")
    (root / "__0_0.distcp").symlink_to("../blob")
    linked(root, tmp_path / "deep" / "out")
    assert not (tmp_path / "deep" / "out" / "__0_0.distcp").is_symlink()
    assert_equal(reshard.open(tmp_path / "deep" / "out"), {"w": FULL["w"], "b": FULL["b"]})


def test_once_more(tmp_path: Path) -> None:
    """A finished target is left alone; what is made anew, or by another plan, leaves the source as it is."""
    root = simple(tmp_path)
    before = tree(root)
    linked(root, tmp_path / "out")
    plan = reshard.plan(reshard.open(root), files=DCP(link=True))
    again = plan.run(tmp_path / "out")
    assert (again.finished, again.touched) == (3, 0)
    assert plan.run(tmp_path / "out", restart=True).finished == 0
    other = reshard.plan(reshard.open(root), files=DCP(link=True), selection=Selection(name_map={"w": "v"}))
    with refused(TargetError, "other-run", ".metadata"):
        other.run(tmp_path / "out")
    other.run(tmp_path / "out", overwrite=True)
    assert set(reshard.open(tmp_path / "out")) == {"v", "b"}
    assert tree(root) == before
    assert (root / "__0_0.distcp").stat().st_nlink <= 2


def test_a_source_that_was_swapped_is_refused(tmp_path: Path) -> None:
    """The file that the link has is no longer the one that the source has."""
    root = simple(tmp_path)
    linked(root, tmp_path / "out")
    path = root / "__1_0.distcp"
    status, content = path.stat(), bytearray(path.read_bytes())
    for start, refuses in ((0, False), (len(content) - 1, True)):
        content[start] ^= refuses
        (root / "new").write_bytes(content)
        os.utime(root / "new", ns=(status.st_atime_ns, status.st_mtime_ns))
        (root / "new").rename(path)
        if not refuses:
            linked(root, tmp_path / "out")
            continue
        with refused(TargetError, "other-run", "__1_0.distcp"):
            linked(root, tmp_path / "out")


@pytest.mark.parametrize("failed", [0, 1])
def test_stopped_halfway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed: int) -> None:
    root = simple(tmp_path)
    link, calls = LocalStore.link, []

    def stopped(self: LocalStore, original: str, unfinished: str) -> None:
        calls.append(original)
        if len(calls) > failed:
            raise KeyboardInterrupt
        link(self, original, unfinished)

    monkeypatch.setattr(LocalStore, "link", stopped)
    with pytest.raises(KeyboardInterrupt):
        linked(root, tmp_path / "out")
    assert ".metadata" not in paths_in(tmp_path / "out")
    with pytest.raises(SourceError):
        reshard.open(tmp_path / "out")
    monkeypatch.undo()
    linked(root, tmp_path / "out")
    assert_equal(reshard.open(tmp_path / "out"), {"w": FULL["w"], "b": FULL["b"]})
    assert paths_in(tmp_path / "out") == [".metadata", "__0_0.distcp", "__1_0.distcp"]


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("first", range(1, 7))
def test_failed_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, restart: bool) -> None:
    """A link that got its name, and could not be noted, is a run's own however many runs fail after it."""
    plan = reshard.plan(reshard.open(simple(tmp_path)), files=DCP(link=True))
    fsync, calls = os.fsync, itertools.count(1)

    def failing(fd: int) -> None:
        if next(calls) >= first:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(fd)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", failing)
        for _ in range(2):
            with suppress(BudgetError):
                plan.run(tmp_path / "out")
    plan.run(tmp_path / "out", restart=restart)
    assert_equal(reshard.open(tmp_path / "out"), {"w": FULL["w"], "b": FULL["b"]})


def test_copies_that_share_blocks_have_the_time_of_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As hard links have: `.metadata`, which is written before they are made, is to be no older."""

    def cloned(target: int, _request: int, source: int) -> None:
        os.pwrite(target, os.pread(source, 1 << 20, 0), 0)

    monkeypatch.setattr(local.fcntl, "ioctl", cloned)
    root = simple(tmp_path)
    for path in root.iterdir():
        os.utime(path, (path.stat().st_mtime - 100,) * 2)
    linked(root, tmp_path / "out")
    for name in ("__0_0.distcp", "__1_0.distcp"):
        one, other = (root / name).stat(), (tmp_path / "out" / name).stat()
        assert one.st_ino != other.st_ino
        assert one.st_mtime_ns == other.st_mtime_ns


def test_a_source_that_changes(tmp_path: Path) -> None:
    root = simple(tmp_path)
    plan = reshard.plan(reshard.open(root), files=DCP(link=True))
    file = root / "__1_0.distcp"
    os.utime(file, ns=(1, 1))
    with refused(ChangedError, "source-changed", file):
        plan.run(tmp_path / "out")
    assert ".metadata" not in paths_in(tmp_path / "out")
    linked(root, tmp_path / "out")
    content = bytearray(file.read_bytes())
    begin = content.find(FULL["b"].tobytes())
    content[begin] ^= 1
    file.unlink()  # replaced: the target keeps what it was made from
    file.write_bytes(content)
    assert_equal(reshard.open(tmp_path / "out"), {"w": FULL["w"], "b": FULL["b"]})
    assert [one.name for one in reshard.verify(tmp_path / "out").differences] == ["b"]


def test_another_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def elsewhere(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", elsewhere)
    monkeypatch.setattr("reshard.core.storage.local._share_blocks", lambda *_: False)
    with refused(TargetError, "other-file-system", "/__0_0.distcp", tmp_path / "out"):
        linked(simple(tmp_path), tmp_path / "out")
    assert paths_in(tmp_path / "out") == []


# --- what cannot be ---


def test_sources_that_cannot_be_linked(mindspore_data: Path, tmp_path: Path) -> None:
    fs, place = url_to_fs("memory://linked")
    for path in simple(tmp_path, "url").iterdir():
        fs.pipe(f"{place}/{path.name}", path.read_bytes())
    for source, code in (
        ("memory://linked", "not-linkable"),
        (mindspore_data / "dcp" / "safetensors_format" / "checkpoint", "not-a-dcp"),
        (write_hyper(tmp_path / "hyper", {"w": FULL["w"]}, {0: {"w": [WHOLE]}}), "not-a-dcp"),
        (write_file(tmp_path / "a.safetensors", {"w": FULL["w"]}), "not-a-dcp"),
        (mindspore_data / "dcp" / "hf_sharded" / "checkpoint", "not-a-dcp"),
    ):
        with refused(UsageError, code):
            linked(reshard.open(source), tmp_path / "out")


def test_targets_that_cannot_be(tmp_path: Path) -> None:
    root = simple(tmp_path / "run")
    for target, said in ((root, f"{root} holds"), (tmp_path / "run", f"source inside, {root}")):
        with refused(TargetError, "overlaps", said):
            reshard.plan(reshard.open(root), files=DCP(link=True)).run(target, overwrite=True, restart=True)
    with refused(TargetError, "not-linkable", "memory://target"):
        linked(root, "memory://target")  # type: ignore[arg-type]


def test_what_does_not_go_together(tmp_path: Path) -> None:
    checkpoint = reshard.open(simple(tmp_path))
    strategy = Strategy.from_rules({"w": (6, 4)}, {"dp": 2}, {"w": ["dp"]})
    for more, said in (
        ({"target": strategy}, ("not-linkable", "blocks")),
        ({"ranks": [0]}, ("needs-all-ranks", "ranks")),
        ({"link_replicas": True}, ("needs-all-ranks", "links")),
        ({"format": "ckpt"}, ("wrong-format", "ckpt")),
        ({"selection": Selection(cast={"float32": "bfloat16"})}, ("not-linkable", "dtypes")),
        ({"selection": Selection(name_map={"x": "y"})}, ("no-match", "'x'")),
        ({"selection": Selection(name_map={"w": "b"})}, ("duplicate-name", "'b'")),
    ):
        with refused(UsageError, *said):
            reshard.plan(checkpoint, files=DCP(link=True), **more)  # type: ignore[arg-type]


# --- the command line ---


def test_the_command(tmp_path: Path, apart: Path) -> None:
    (tmp_path / "names.json").write_text(json.dumps({"model.*": "net.*"}))
    words = ["convert", apart, tmp_path / "out", "--to", "dcp", "--link", "--name-map", tmp_path / "names.json"]
    done(*words)
    assert len(paths_in(tmp_path / "out", "distcp")) == 16
    before = tree(tmp_path / "out")
    done(*words)
    assert tree(tmp_path / "out") == before
    done("verify", tmp_path / "out")
    assert "net.emb.weight" in done("inspect", tmp_path / "out").stdout
    done("plan", apart, "--to", "dcp", "--link", "--include", "model.*", "-o", tmp_path / "plan.json")
    done("run", tmp_path / "plan.json", tmp_path / "planned")
    assert len(paths_in(tmp_path / "planned", "distcp")) == 8
    for more, place in (
        (["--target-strategy", tmp_path / "names.json"], "--target-strategy"),
        (["--ranks", "0"], "--ranks"),
        (["--prefix", "x"], "--prefix"),
    ):
        failed(2, "option-of-another-format", *words, *more, places=(place,))
    failed(2, "no-manifest", *words, "--write-manifest", tmp_path / "m.json", places=("--write-manifest",))
