"""Assert errors by kind, stable code and place, not by their wording."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click
import pytest
from commands import call

from reshard.cli.main import cli
from reshard.cli.terminal import ErrorReport, error_report
from reshard.errors import ReshardError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from click.testing import Result


@contextmanager
def refused(kind: type[BaseException], code: str, *places: object) -> Iterator[pytest.ExceptionInfo[ReshardError]]:
    """Expect an error of this class and code, whose text names these places (files, tensors, options, numbers)."""
    with pytest.raises(kind) as caught:
        yield caught  # type: ignore[misc]  # a ReshardError, as is asserted next
    check(caught.value, code, *places)


def check(error: BaseException, code: str, *places: object) -> None:
    """Assert the code of an error, and that its text names some places."""
    assert isinstance(error, ReshardError), repr(error)
    assert code in error.codes, f"{error.codes}: {error}"
    for place in places:
        assert str(place) in one_line(str(error)), f"{place} is not named: {error}"


def failed(exit_code: int, code: str, *arguments: str | Path, places: tuple[object, ...] = ()) -> Result:
    """Run a command that must fail with this exit status and code, and name these places on stderr.

    The options that its hint proposes must be its own, or those of a command that the hint names.
    """
    with reported() as errors:
        result = call(*arguments)
    assert result.exit_code == exit_code, result.output
    codes = [each for error in errors for each in getattr(error, "codes", ("failed",))]
    assert code in (codes or ["usage"]), f"{codes}: {result.stderr}"
    for place in places:
        assert str(place) in one_line(result.stderr), result.stderr
    command = command_of([str(argument) for argument in arguments])
    params = command.get_params(click.Context(command))
    accepted = {flag for param in params for flag in (*param.opts, *param.secondary_opts)}
    is_group = isinstance(command, click.Group)  # the hint is about a command of it
    assert is_group or proposed(result.stderr) <= accepted, f"{command.name} has no such option: {result.stderr}"
    return result


def command_of(arguments: list[str]) -> click.Command:
    """Return the command that arguments call."""
    command: click.Command = cli
    for argument in arguments:
        below = command.get_command(click.Context(command), argument) if isinstance(command, click.Group) else None
        command = below or command
    return command


def proposed(said: str) -> set[str]:
    """Return the options that hints propose to add to the same command: those that are in no command of their own."""
    hints = "".join(line for line in said.splitlines() if line.startswith("hint:"))
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", re.sub(r"`[^`]*`|\breshard [a-z-].*", "", hints)))


def one_line(text: str) -> str:
    """Return a message with what was expected on the line of what was found."""
    return re.sub(r"\n +expected ", "; expected ", text)


@contextmanager
def reported() -> Iterator[list[BaseException]]:
    """Collect the errors that commands report; those that click reports itself, of wrong usage, are not among them."""
    errors: list[BaseException] = []

    def collect(error: BaseException) -> ErrorReport:
        errors.append(error)
        return error_report(error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("reshard.cli.commands.error_report", collect)
        yield errors
