"""What is in a target already: a finished run's, another plan's, another step's, somebody else's; what is replaced."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import pytest
from checkpoints import assert_rank_files, numbers, plan_with, tree, write_ranks
from refusals import failed, refused
from stopped_runs import FULL, SOURCE, TARGET, call, command, small_tasks, source, stopped, times

import reshard
from reshard import Layout, Strategy
from reshard.core.plan.plan import file_digests
from reshard.core.run import graph
from reshard.core.run.tasks import create_files
from reshard.core.storage.base import PARTIAL, stem_of_unfinished, unfinished_path, unfinished_stem
from reshard.errors import ReshardError, TargetError
from reshard.formats.sets.options import HuggingFaceSet, MindSporeSet

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["command", "small_tasks", "source"]  # fixtures, for pytest to find


def test_over_a_finished_target_nothing_is_left_to_do(command: list[str | Path], tmp_path: Path) -> None:
    assert call(*command).exit_code == 0
    before = times(tmp_path / "out")
    again = call(*command)
    assert again.exit_code == 0
    assert "nothing is left to do" in again.output
    assert call(*command, "--overwrite").exit_code == 0
    assert times(tmp_path / "out") == before
    assert call(*command, "--restart").exit_code == 0
    assert times(tmp_path / "out").keys() == before.keys()
    assert not times(tmp_path / "out").items() & before.items()


def test_a_changed_plan_is_refused(command: list[str | Path], tmp_path: Path) -> None:
    assert call(*command).exit_code == 0
    before = tree(tmp_path / "out")
    failed(6, "other-run", *command, "--cast", "float32=float16", places=(tmp_path / "out", "--restart"))
    assert tree(tmp_path / "out") == before
    assert call(*command, "--cast", "float32=float16", "--restart").exit_code == 0
    assert tree(tmp_path / "out") != before


def test_somebody_elses_file_needs_overwrite(command: list[str | Path], tmp_path: Path) -> None:
    foreign = tmp_path / "out" / "rank_1" / "checkpoint_1.safetensors"
    foreign.parent.mkdir(parents=True)
    foreign.write_bytes(b"theirs")
    for more in ([], ["--restart"]):
        failed(6, "already-exists", *command, *more, places=("rank_1/checkpoint_1.safetensors", "--overwrite"))
        assert tree(tmp_path / "out") == {"rank_1/checkpoint_1.safetensors": b"theirs"}
    assert call(*command, "--overwrite").exit_code == 0
    assert_rank_files(tmp_path / "out", FULL, TARGET)


def test_a_restart_that_is_stopped_may_be_typed_again(source: reshard.Checkpoint, tmp_path: Path) -> None:
    """The files that it replaces are still those of the run before, and not somebody else's."""
    old = reshard.plan(source, TARGET, selection=reshard.Selection(cast={"float32": "float64"}))
    old.run(tmp_path / "out")
    plan = reshard.plan(source, TARGET)
    for tasks in (0, 6):
        stopped(plan, tmp_path / "out", tasks, restart=True)
        assert len(times(tmp_path / "out")) == 2
    report = plan.run(tmp_path / "out")
    assert report.resumed > 0
    assert_rank_files(tmp_path / "out", FULL, TARGET)


def test_other_ranks_may_be_written_into_the_same_target(source: reshard.Checkpoint, tmp_path: Path) -> None:
    for ranks in ([0], [1], [0, 1]):
        report = reshard.plan(source, TARGET, ranks=ranks).run(tmp_path / "out")
    assert report.finished == 2, "what other runs finished is as this one would make it"
    assert_rank_files(tmp_path / "out", FULL, TARGET)


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
    (index,) = (file.path for file in plan._record.files if file.publish != "file")
    parts = [file.path for file in plan._record.files if file.publish == "file"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail_once(os.replace, lambda _, new: new.endswith(parts[1]), errno.EIO))
        with refused(TargetError, "cannot-write", "rename"):
            plan.run(target, overwrite=True)
    assert not (target / index).exists()
    plan.run(target, overwrite=True)
    plan.run(tmp_path / "undisturbed")
    assert tree(target) == tree(tmp_path / "undisturbed")


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


@pytest.fixture
def other(tmp_path: Path) -> reshard.Plan:
    """The same target from another source."""
    full = numbers({"w": (48, 16), "b": (24,), "c": (12, 8)}, "int32")
    full = {name: (array + 1000).astype("float32") for name, array in full.items()}
    checkpoint = reshard.open(write_ranks(tmp_path / "other", full, SOURCE), strategy=SOURCE)
    return reshard.plan(checkpoint, TARGET)


@pytest.fixture
def tasks_of(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """The tasks that runs have begun, to be done again by a worker that does not know that its client is lost."""
    found: list[Callable[[], object]] = []
    for name in ("move_task", "files_task"):
        task = getattr(graph, name)

        def noted(plan: Any, number: int, directory: str, how: Any, *more: Any, task: Any = task) -> Any:
            lost = how._replace(run="of a lost client")
            found.append(lambda: task(plan, number, directory, lost, *more))
            return task(plan, number, directory, how, *more)

        monkeypatch.setattr(graph, name, noted)
    return found


@pytest.mark.parametrize("ledger", [True, False])
@pytest.mark.parametrize("partition", ["tensor", "file"])
def test_a_task_of_a_lost_run_does_not_write_into_the_files_of_another(
    source: reshard.Checkpoint,
    other: reshard.Plan,
    tmp_path: Path,
    tasks_of: list[Callable[[], object]],
    partition: str,
    ledger: bool,
) -> None:
    """As a worker of a cluster does, whose client was killed: locks ended with that."""
    other.run(tmp_path / "undisturbed", partition=partition)
    tasks_of.clear()
    out, finished = tmp_path / "out", []
    tasks = 4 if partition == "tensor" else 1
    stopped(reshard.plan(source, TARGET), out, tasks, partition=partition, ledger=ledger)
    lost = list(tasks_of)
    assert lost

    def disturb(progress: reshard.Progress) -> None:
        if progress.written == progress.total:
            for task in lost:
                with suppress(TargetError):  # its file is gone
                    task()
            finished.append(progress)

    other.run(out, restart=True, partition=partition, ledger=ledger, progress=disturb, threads=1)
    assert finished
    expected = tree(tmp_path / "undisturbed")
    assert {path: content for path, content in tree(out).items() if not path.endswith(PARTIAL)} == expected


def test_what_a_lost_task_leaves_goes_with_the_next_run(
    source: reshard.Checkpoint, other: reshard.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other.run(tmp_path / "undisturbed")
    made: list[Any] = []
    monkeypatch.setattr(graph, "create_files", lambda *given: (made.append(given), create_files(*given))[1])
    stopped(reshard.plan(source, TARGET), tmp_path / "out")
    other.run(tmp_path / "out", restart=True)
    for plan, files, directory, how in made[:-2]:  # of the first run
        with suppress(ReshardError):
            create_files(plan, files, directory, how._replace(run="of a lost client"))
    assert any(path.endswith(PARTIAL) for path in tree(tmp_path / "out"))
    other.run(tmp_path / "out", restart=True)
    assert tree(tmp_path / "out") == tree(tmp_path / "undisturbed")


def test_a_plan_of_fewer_ranks_resumes_what_a_plan_of_all_began(source: reshard.Checkpoint, tmp_path: Path) -> None:
    whole, part = reshard.plan(source, TARGET), reshard.plan(source, TARGET, ranks=[1])
    whole.run(tmp_path / "undisturbed")
    stopped(whole, tmp_path / "out")
    begun = {path for path in tree(tmp_path / "out") if path.endswith(PARTIAL)}
    files = zip(whole._record.files, file_digests(whole._record), strict=True)
    assert begun == {unfinished_path(file.path, digest) for file, digest in files}
    assert part.run(tmp_path / "out").resumed > 0
    assert whole.run(tmp_path / "out").resumed > 0
    assert tree(tmp_path / "out") == tree(tmp_path / "undisturbed")


@pytest.mark.parametrize("options", [{"restart": True}, {"overwrite": True}])
def test_what_another_plan_began_is_refused_and_then_removed(
    source: reshard.Checkpoint, other: reshard.Plan, tmp_path: Path, options: dict[str, bool]
) -> None:
    other.run(tmp_path / "undisturbed")
    stopped(reshard.plan(source, TARGET), tmp_path / "out")
    before = tree(tmp_path / "out")
    with refused(TargetError, "other-run", tmp_path / "out"):
        other.run(tmp_path / "out")
    assert tree(tmp_path / "out") == before
    other.run(tmp_path / "out", **options)
    assert tree(tmp_path / "out") == tree(tmp_path / "undisturbed")


@pytest.mark.parametrize("size", [238, 239, 247, 255])
def test_a_name_as_long_as_names_can_be(command: list[str | Path], tmp_path: Path, size: int) -> None:
    """It has no room for digits, nor for a part of a letter where it is cut."""
    prefix = "é" * 60 + "n" * (size - 120 - len("0.safetensors"))
    more = ["--prefix", prefix, "--to", "safetensors"]
    assert call(*command, *more).exit_code == 0
    names = [PurePath(path).name for path in tree(tmp_path / "out")]
    assert [len(os.fsencode(name)) for name in names] == [size, size]
    unfinished = [unfinished_path(f"rank_0/{name}", "0123abcd") for name in names]
    assert all(len(os.fsencode(PurePath(path).name)) <= 255 for path in unfinished)
    assert len(set(unfinished)) == 2
    assert [stem_of_unfinished(path) for path in unfinished] == [unfinished_stem(f"rank_0/{name}") for name in names]
