"""The names of unfinished files: each plan that makes other bytes has its own, so that nobody writes into another's."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import pytest
from checkpoints import numbers, tree, write_ranks
from refusals import refused
from stopped_runs import SOURCE, TARGET, call, command, small_tasks, source, stopped

import reshard
from reshard.core.plan.plan import file_digests
from reshard.core.run import graph
from reshard.core.run.tasks import create_files
from reshard.core.storage.base import PARTIAL, stem_of_unfinished, unfinished_path, unfinished_stem
from reshard.errors import ReshardError, TargetError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["command", "small_tasks", "source"]  # fixtures, for pytest to find


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


def test_graphs_without_a_run_have_names_of_their_own(source: reshard.Checkpoint, tmp_path: Path) -> None:
    plan = reshard.plan(source, TARGET)
    one, two = (plan.graph(tmp_path / "out", fsync=False).plan.digests for _ in range(2))
    assert one != two
    assert len(set(one)) == 1
    plan.graph(tmp_path / "out", fsync=False).compute()
    plan.run(tmp_path / "undisturbed")
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


def test_a_long_name_is_resumed(source: reshard.Checkpoint, tmp_path: Path) -> None:
    plan = reshard.plan(source, TARGET, prefix="n" * 241)
    plan.run(tmp_path / "undisturbed")
    stopped(plan, tmp_path / "out")
    assert plan.run(tmp_path / "out").resumed > 0
    assert tree(tmp_path / "out") == tree(tmp_path / "undisturbed")
