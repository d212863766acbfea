"""A small source and its target, runs that end in the middle, and what they wrote until then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from checkpoints import numbers, write_ranks
from click.testing import CliRunner, Result

import reshard
from reshard import Layout, Strategy
from reshard.cli.main import cli
from reshard.core.plan import budget
from reshard.core.run.state import session as resume

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from faulty import Faults

    from reshard.api.plans import Plan

FULL = numbers({"w": (48, 16), "b": (24,), "c": (12, 8)})
SOURCE = Strategy.of({"w": Layout.of([4], [0, -1]), "b": Layout.of([4], [-1]), "c": Layout.of([4], [-1, 0])})
TARGET = Strategy.of({"w": Layout.of([2], [-1, 0]), "b": Layout.of([2], [0]), "c": Layout.of([2], [0, -1])})


@pytest.fixture(autouse=True)
def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the work so fine that a small model has many bands and tasks, and note every receipt at once."""
    monkeypatch.setattr(budget, "TASK_BYTES", 512)
    monkeypatch.setattr(budget, "BAND_BYTES", 256)
    monkeypatch.setattr(resume, "FLUSH_SECONDS", 0)


@pytest.fixture
def source(tmp_path: Path) -> reshard.Checkpoint:
    return reshard.open(write_ranks(tmp_path / "src", FULL, SOURCE), strategy=SOURCE)


class StoppedError(Exception):
    """What ends a run in the middle."""


def stop_after(tasks: int) -> Callable[[object], None]:
    """End a run when so many tasks have told of their work."""
    left = iter(range(tasks))

    def progress(_: object) -> None:
        if next(left, None) is None:
            raise StoppedError

    return progress


def stopped(plan: Plan, target: Path, tasks: int = 6, **options: Any) -> None:
    """Run a plan, and end it in the middle as a kill would: with its receipts noted."""
    with pytest.raises(StoppedError):
        plan.run(target, progress=stop_after(tasks), threads=1, **options)


class Written:
    """Counts what is written into unfinished files."""

    def __init__(self, faults: Faults) -> None:
        self.ranges: list[tuple[str, int, int]] = []
        faults.every(lambda call: self.ranges.append((call.path, call.offset, call.offset + call.nbytes)), "write_at")


@pytest.fixture
def written(faults: Faults) -> Written:
    return Written(faults)


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="reshard")


@pytest.fixture
def command(source: reshard.Checkpoint, tmp_path: Path) -> list[str | Path]:
    reshard.write_strategy(SOURCE, tmp_path / "source.ckpt")
    reshard.write_strategy(TARGET, tmp_path / "target.ckpt")
    strategies: list[str | Path] = [
        "--source-strategy", tmp_path / "source.ckpt", "--target-strategy", tmp_path / "target.ckpt",
    ]  # fmt: skip
    return ["convert", tmp_path / "src", tmp_path / "out", *strategies]


def times(root: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_ino) for path in root.rglob("*.safetensors")}
