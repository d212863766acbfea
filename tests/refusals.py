"""Assert errors by kind, stable code and place, not by their wording."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import click
import pytest
from commands import call

from reshard.cli import commands
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
        assert str(place) in str(error), f"{place} is not named: {error}"


def failed(exit_code: int, code: str, *arguments: str | Path, places: tuple[object, ...] = ()) -> Result:
    """Run a command that must fail with this exit status and code, and name these places on stderr."""
    errors: list[BaseException] = []

    with pytest.MonkeyPatch.context() as patch:
        for name in ("told", "_usage_message"):
            original = getattr(commands, name)
            patch.setattr(commands, name, lambda error, say=original: (errors.append(error), say(error))[1])
        result = call(*arguments)
    assert result.exit_code == exit_code, result.output
    error = errors[0] if errors else error_of(result)
    codes = getattr(error, "codes", ("usage",) if isinstance(error, click.UsageError) else ())
    assert code in codes, f"{codes}: {result.stderr}"
    for place in places:
        assert str(place) in result.stderr, result.stderr
    return result


def error_of(result: Result) -> BaseException:
    """Return the error that a command reported before it exited."""
    error = result.exc_info[1] if result.exc_info else None
    while error is not None and not isinstance(error, ReshardError | click.UsageError | OSError):
        error = error.__context__
    assert error is not None, result.output
    return error
