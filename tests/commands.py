"""Runs commands for tests on the tutorial's files, and looks at what they said and wrote."""

from __future__ import annotations

import shlex
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

import helpers
import pytest
from click.testing import CliRunner, Result

from reshard.cli.main import cli
from reshard.errors import BudgetError, Option

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass(frozen=True)
class Case:
    """The tutorial's 8 ranks and 4 ranks, from MindSpore."""

    source: Path
    source_strategy: Path
    target_strategy: Path

    @property
    def strategies(self) -> list[str | Path]:
        return ["--source-strategy", self.source_strategy, "--target-strategy", self.target_strategy]


@pytest.fixture(scope="session")
def case(mindspore_data: Path) -> Case:
    real = mindspore_data / "real"
    source = real / "tut_src8"
    return Case(source / "ckpt", source / "strategy_0.ckpt", real / "tut_dst4_opt" / "strategy_0.ckpt")


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="reshard")


def done(*arguments: str | Path) -> Result:
    result = call(*arguments)
    assert result.exit_code == 0, result.stderr
    return result


def heed_signals() -> None:
    """A shell starts its background jobs with some signals ignored, and whoever starts these tests may be one."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Have an interrupt of this process raise, as `heed_signals` does in others."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def next_command(result: Result) -> list[str]:
    """The words of the command that a run proposes, after `reshard`; none if it proposes none."""
    line = result.stdout.splitlines()[-1]
    return shlex.split(line.removeprefix("next: reshard ")) if line.startswith("next: reshard ") else []


def names_in(root: Path) -> set[str]:
    files = [path for path in root.rglob("*.*") if path.suffix in {".safetensors", ".ckpt"}]
    return {name for path in files for name in helpers.read_rank_file(path)}


def proposed(result: Result) -> list[str]:
    """The command that a run with -v proposes to look at what was written."""
    return shlex.split(result.stderr.split("to look at it: reshard ", 1)[1])


def least_memory(error: BudgetError) -> int:
    """The bytes of memory that an error says are enough."""
    (value,) = [part.value for part in error.text.parts if isinstance(part, Option) and part.name == "memory"]
    assert isinstance(value, int)
    return value
