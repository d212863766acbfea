"""What is in a target already: a finished run's, another plan's, somebody else's; what may be replaced."""

from __future__ import annotations

from typing import TYPE_CHECKING

from checkpoints import assert_rank_files, tree
from refusals import failed, refused
from stopped_runs import FULL, TARGET, call, command, small_tasks, source, stopped, times

import reshard
from reshard import Layout, Strategy
from reshard.errors import TargetError

if TYPE_CHECKING:
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


def test_a_begun_target_of_another_plan_is_refused(source: reshard.Checkpoint, tmp_path: Path) -> None:
    stopped(reshard.plan(source, TARGET), tmp_path / "out")
    other = reshard.plan(source, TARGET, selection=reshard.Selection(cast={"float32": "float64"}))
    with refused(TargetError, "other-run", tmp_path / "out"):
        other.run(tmp_path / "out")
    other.run(tmp_path / "out", restart=True)
    other.run(tmp_path / "undisturbed")
    assert tree(tmp_path / "out") == tree(tmp_path / "undisturbed")


def test_somebody_elses_file_needs_overwrite(command: list[str | Path], tmp_path: Path) -> None:
    foreign = tmp_path / "out" / "rank_1" / "checkpoint_1.safetensors"
    foreign.parent.mkdir(parents=True)
    foreign.write_bytes(b"theirs")
    for more in ([], ["--restart"]):
        failed(6, "already-exists", *command, *more, places=("rank_1/checkpoint_1.safetensors", "--overwrite"))
        assert tree(tmp_path / "out") == {"rank_1/checkpoint_1.safetensors": b"theirs"}
    assert call(*command, "--overwrite").exit_code == 0
    assert_rank_files(tmp_path / "out", FULL, TARGET)


def test_a_finished_file_that_was_changed_is_somebody_elses(source: reshard.Checkpoint, tmp_path: Path) -> None:
    target = Strategy.of({name: Layout.of([2], [-1] * array.ndim) for name, array in FULL.items()})
    plan = reshard.plan(source, target)
    plan.run(tmp_path / "out")
    path = tmp_path / "out" / plan._record.files[0].path
    path.unlink()
    path.write_bytes(b"edited")
    with refused(TargetError, "already-exists", plan._record.files[0].path, "overwrite=True"):
        plan.run(tmp_path / "out")
    assert path.read_bytes() == b"edited"


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
