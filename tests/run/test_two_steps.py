"""One target, two steps of training: what the first left there is nowhere taken for a part of the second."""

from __future__ import annotations

import errno
import fcntl
import os
from typing import TYPE_CHECKING, Any

import pytest
from checkpoints import plan_with, tree, write_ranks
from refusals import refused
from stopped_runs import FULL, SOURCE, TARGET, small_tasks, source, stopped

import reshard
from reshard import Layout, Strategy
from reshard.errors import BudgetError, TargetError
from reshard.formats.sets.options import HuggingFaceSet, MindSporeSet

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["small_tasks", "source"]  # fixtures, for pytest to find

REPLICATED = Strategy.of({name: Layout.of([2], [-1] * array.ndim) for name, array in FULL.items()})


@pytest.fixture
def later(tmp_path: Path) -> reshard.Checkpoint:
    """The same model at another step."""
    full = {name: array + 1000 for name, array in FULL.items()}
    return reshard.open(write_ranks(tmp_path / "later", full, SOURCE), strategy=SOURCE)


def fail_once(function: Callable[..., Any], when: Callable[..., bool], number: int) -> Callable[..., Any]:
    """Return a function that fails, as the system does, the first time that a condition is met."""
    left = [True]

    def failing(*arguments: Any, **options: Any) -> Any:
        if left and when(*arguments):
            left.clear()
            raise OSError(number, os.strerror(number))
        return function(*arguments, **options)

    return failing


@pytest.mark.parametrize("files", [MindSporeSet(2000), HuggingFaceSet(2000)])
def test_a_set_that_is_replaced_is_without_its_index_until_all_is_new(
    source: reshard.Checkpoint, later: reshard.Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: Any
) -> None:
    target = tmp_path / "out"
    plan_with(source, files=files, format="safetensors").run(target)
    plan = plan_with(later, files=files, format="safetensors")
    (index,) = (file.path for file in plan._record.files if file.last)
    parts = [file.path for file in plan._record.files if not file.last]
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail_once(os.replace, lambda _, new: new.endswith(parts[1]), errno.EIO))
        with refused(TargetError, "cannot-write", "rename"):
            plan.run(target, overwrite=True)
    assert not (target / index).exists()
    plan.run(target, overwrite=True)
    plan.run(tmp_path / "undisturbed")
    assert tree(target) == tree(tmp_path / "undisturbed")


@pytest.mark.parametrize("share", [None, 0.0, 0.5, 0.9])
def test_a_target_that_is_begun_anew_is_known_at_every_time(
    source: reshard.Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float | None
) -> None:
    """The log of the second run cannot be made, or is torn."""
    plan = reshard.plan(source, TARGET)
    plan.run(tmp_path / "out")

    def torn(descriptor: int, content: bytes) -> int:
        if share is None or b'"digest"' not in content:
            return write(descriptor, content)
        write(descriptor, content[: int(share * len(content))])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    real = os.open
    begins, write = fail_once(os.open, lambda path, *_: ".jsonl" in str(path), errno.ENOSPC), os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", torn)
        if share is None:
            patch.setattr(os, "open", lambda *args: (begins if args[1] & os.O_CREAT else real)(*args))
        with pytest.raises(BudgetError):
            plan.run(tmp_path / "out", restart=True)
    before = tree(tmp_path / "out")
    plan.run(tmp_path / "out")  # and is refused by no run, without any option
    assert tree(tmp_path / "out") == before


def test_without_a_journal_there_are_locks(
    source: reshard.Checkpoint, later: reshard.Checkpoint, tmp_path: Path
) -> None:
    other = reshard.plan(later, TARGET)
    errors = []

    def disturb(_: object) -> None:
        with refused(TargetError, "locked", "rank_0") as caught:
            other.run(tmp_path / "out", ledger=False, overwrite=True)
        errors.append(caught.value)

    plan = reshard.plan(source, TARGET)
    plan.run(tmp_path / "undisturbed")
    plan.run(tmp_path / "out", progress=disturb)
    assert errors
    assert tree(tmp_path / "out") == tree(tmp_path / "undisturbed")
    stopped(plan, tmp_path / "begun")
    other.run(tmp_path / "begun", ledger=False)
    other.run(tmp_path / "second")
    assert tree(tmp_path / "begun") == tree(tmp_path / "second")


def test_a_full_disk_at_the_last_step(
    source: reshard.Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = reshard.plan(source, TARGET)
    final = fail_once(os.replace, lambda _, new: new.endswith("checkpoint_0.safetensors"), errno.ENOSPC)
    monkeypatch.setattr(os, "replace", final)
    with refused(BudgetError, "no-space", "checkpoint_0.safetensors"):
        plan.run(tmp_path / "out")


def test_what_is_not_a_directory_and_no_file_is_told_before(source: reshard.Checkpoint, tmp_path: Path) -> None:
    plan = reshard.plan(source, TARGET)
    (tmp_path / "file").write_text("")
    for target in (tmp_path / "file", tmp_path / "file" / "below"):
        with refused(TargetError, "not-a-directory", tmp_path / "file"):
            plan.run(target)
    (tmp_path / "out" / "rank_1" / "checkpoint_1.safetensors").mkdir(parents=True)
    for more in ({}, {"overwrite": True}, {"restart": True}):
        with refused(TargetError, "is-directory", "rank_1/checkpoint_1.safetensors"):
            plan.run(tmp_path / "out", **more)


def test_without_a_journal_locks_are_an_attempt(
    source: reshard.Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "fcntl", fail_once(fcntl.fcntl, lambda *_: True, errno.ENOSYS))
    reshard.plan(source, TARGET).run(tmp_path / "out", ledger=False)
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "fcntl", fail_once(fcntl.fcntl, lambda *_: True, errno.ENOSYS))
        with refused(TargetError, "cannot-lock", tmp_path / "other"):
            reshard.plan(source, TARGET).run(tmp_path / "other")
