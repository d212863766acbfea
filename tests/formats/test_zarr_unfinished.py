"""zarr stores that are not finished: the group comes last, and a run goes on where one was killed."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import plan_with, tree
from refusals import refused
from samples import slow
from zarr_stores import FULL, GROUPS, assert_same, source

import reshard
from reshard import Selection
from reshard.core.plan import budget
from reshard.core.plan.plan import file_digests
from reshard.core.run.settings import TaskOptions
from reshard.core.run.state.session import Session
from reshard.core.run.tasks import close_files, commit_files, create_files, move_task, withdraw_index
from reshard.core.storage.base import stem_of_unfinished, unfinished_path
from reshard.errors import SourceError, TargetError
from reshard.formats.zarr.layout import ZarrGroup

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["source"]  # fixtures, for pytest to find


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_the_group_is_there_when_all_is(
    source: reshard.Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str | None
) -> None:
    store = tmp_path / "z"
    order: list[str] = []
    real = os.replace

    def replace(old: str, new: str) -> None:
        assert stem_of_unfinished(old) == new
        order.append(new)
        real(old, new)

    monkeypatch.setattr(os, "replace", replace)
    source.to_zarr(store, compression=compression)
    assert order[-1] == f"{store}/zarr.json"
    assert set(order) == {str(path) for path in store.rglob("*") if path.is_file()}


class Killed(BaseException):
    """Ends a run as a kill does, with no time to clean up."""


@pytest.fixture
def unclean(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed run notes what it wrote, and leaves everything as it is."""
    monkeypatch.setattr(Session, "failed", lambda session, _error, *_changed: session.flush())


def killed_at(call: int, name: str, run: Callable[[], object]) -> int:
    """Have a run end at a call of a function of `os`; return how many there were."""
    real, count = getattr(os, name), 0

    def killing(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == call:
            raise Killed
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, name, killing)
        if call:
            with pytest.raises(Killed):
                run()
        else:
            run()
    return count


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize(("name", "share"), [("pwrite", 0.7), slow("pwrite", 1), slow("replace", 0.3), ("replace", 1)])
@pytest.mark.usefixtures("unclean")
def test_a_run_goes_on_where_one_was_killed(
    source: reshard.Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    group: ZarrGroup,
    name: str,
    share: float,
) -> None:
    """Ranges of plain files, and whole files of any kind; at the end nothing but the store is there."""
    monkeypatch.setattr(budget, "TASK_BYTES", 512)
    plan = plan_with(source, files=group)
    count = killed_at(0, name, lambda: plan.run(tmp_path / "whole", client="synchronous"))
    store = tmp_path / "z"
    killed_at(round(share * count), name, lambda: plan.run(store, client="synchronous"))
    assert (store / ".reshard").is_dir()
    with refused(SourceError, "unfinished", store):
        reshard.open(store)
    report = plan.run(store)
    assert report.resumed + report.bytes_written == plan.stats.bytes_written
    if not (plan._record.coding and name == "pwrite"):
        all_there = share == 1 or (name == "replace" and not plan._record.coding)  # what is written last is the group's
        assert (report.resumed == plan.stats.bytes_written) is all_there
        assert report.resumed
    assert tree(store) == tree(tmp_path / "whole")


@pytest.mark.usefixtures("unclean")
def test_chunks_of_another_coding_are_not_gone_on_with(source: reshard.Checkpoint, tmp_path: Path) -> None:
    """A plain chunk that has its name already, and would be at the same path compressed, is not taken for that."""
    store = tmp_path / "z"
    killed_at(6, "replace", lambda: plan_with(source, files=ZarrGroup(shard_size=0)).run(store))
    with refused(TargetError, "other-run", "experts/zarr.json", "restart=True"):
        plan_with(source, files=ZarrGroup(shard_size=0, compression="zstd")).run(store)
    plan_with(source, files=ZarrGroup(shard_size=0, compression="zstd")).run(store, restart=True)
    assert_same(reshard.open(store)["layers.0.wo"].compute(), FULL["layers.0.wo"])
    assert not (store / ".reshard").exists()


def test_without_a_ledger_nothing_of_an_unfinished_file_stays(source: reshard.Checkpoint, tmp_path: Path) -> None:
    plan = plan_with(source, files=GROUPS["chunks"])  # of which some go beyond their tensor
    plan.run(tmp_path / "whole")
    for file in plan._record.files:
        path = tmp_path / "z" / unfinished_path(file.path, "0123abcd")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * file.layout.size)
    plan.run(tmp_path / "z", ledger=False)
    assert tree(tmp_path / "z") == tree(tmp_path / "whole")


def test_making_files_again_leaves_what_is_in_them(source: reshard.Checkpoint, tmp_path: Path) -> None:
    """As on a cluster that lost the worker with the receipts of that, while others were writing."""
    plan = plan_with(source, files=GROUPS["zstd shards"])
    plan.run(tmp_path / "whole")
    record = replace(plan._record, digests=tuple(file_digests(plan._record)))
    root, how = str(tmp_path / "z"), TaskOptions(fsync=False)
    every = range(len(record.files))
    create_files(record, every, root, how)
    for number in range(len(record.tasks)):
        move_task(record, number, root, how, None)
        create_files(record, every, root, how)
    close_files(record, every, root, how, {}, None)
    withdraw_index(record, root, None)
    commit_files(record, every, root, how, None)
    assert tree(tmp_path / "z") == tree(tmp_path / "whole")


@pytest.mark.parametrize("digest", ["", "0123abcd"])
def test_an_unfinished_store_is_reported(source: reshard.Checkpoint, tmp_path: Path, digest: str) -> None:
    source.to_zarr(tmp_path / "z")
    (tmp_path / "z" / "zarr.json").rename(tmp_path / "z" / unfinished_path("zarr.json", digest))
    with refused(SourceError, "unfinished", "zarr.json"):
        reshard.open(tmp_path / "z")


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_over_a_finished_store_nothing_is_left_to_do(
    source: reshard.Checkpoint, tmp_path: Path, compression: str | None
) -> None:
    """Nor is what is missing written with the rest: the ledger beside the store knows each file."""
    store = tmp_path / "z"
    count = len(source.to_zarr(store, chunk_size=400, compression=compression).files)
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*") if path.is_file()}
    content = tree(store)
    assert source.to_zarr(store, chunk_size=400, compression=compression).finished == count
    assert {path: path.stat().st_mtime_ns for path in store.rglob("*") if path.is_file()} == before
    for _ in range(2):
        (store / "layers.0.wo" / "zarr.json").unlink()
        assert source.to_zarr(store, chunk_size=400, compression=compression).finished == count - 2  # and the group
        assert source.to_zarr(store, chunk_size=400, compression=compression, fsync=False).finished == count
    assert tree(store) == content


def test_another_store_in_the_way(source: reshard.Checkpoint, tmp_path: Path) -> None:
    store = tmp_path / "z"
    source.to_zarr(store, chunk_size=400)
    assert not (store / ".reshard").exists()  # zarr would warn of it
    shutil.move(tmp_path / "z.reshard", tmp_path / "elsewhere")  # without it, it may be anybody's
    with refused(TargetError, "already-exists", store, "overwrite=True"):
        source.to_zarr(store, chunk_size=400)
    source.to_zarr(store, chunk_size=400, overwrite=True)
    with refused(TargetError, "other-files", "experts/zarr.json"):
        source.to_zarr(store, selection=Selection(include=("bits",)))  # chunks of the old one would be taken for its
    (store / "mine").touch()
    with refused(TargetError, "other-files", "mine"):
        source.to_zarr(store, selection=Selection(include=("bits",)), overwrite=True)
    assert_same(reshard.open(store)["layers.0.wo"].compute(), FULL["layers.0.wo"])
    (store / "mine").unlink()
    source.to_zarr(store, selection=Selection(include=("bits",)), overwrite=True)
    source.to_zarr(tmp_path / "new", selection=Selection(include=("bits",)))
    assert tree(store) == tree(tmp_path / "new")
    assert not [path for path in store.rglob("*") if path.is_dir() and not any(path.iterdir())]


@pytest.mark.slow
def test_a_store_that_is_written_anew_has_no_group_meanwhile(
    source: reshard.Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "z"
    source.to_zarr(store)
    real = os.replace

    def replace(old: str, new: str) -> None:
        assert not (store / "zarr.json").exists()
        real(old, new)

    monkeypatch.setattr(os, "replace", replace)
    source.to_zarr(store, restart=True)
    assert_same(reshard.open(store)["bits"].compute().view(np.uint16), FULL["bits"])
