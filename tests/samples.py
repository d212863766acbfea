"""Some of what is exhaustive by default, and all of it where slow tests are run (`-m "slow or hypothesis"`).

What is chosen goes by a rule, each so-many-th, so that it turns over what is counted: of 20 commands and each seventh,
every command is met, and of two kinds and each third, both are.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "default")
SHARE = 5  # of the examples of a property, one in so many by default


def slow(*values: Any) -> Any:
    """Parameters of a case that is a slow test."""
    return pytest.param(*values, marks=pytest.mark.slow)


def sampled(cases: Iterable[tuple[Any, ...]], every: int) -> list[Any]:
    """Return parameters of cases: each `every`-th as it is, from the first on; the others are slow tests."""
    return [slow(*case) if number % every else pytest.param(*case) for number, case in enumerate(cases)]


def one_in(every: int) -> pytest.MarkDecorator:
    """Give a test `every`, by which it goes through its cases: of so many one by default, and all when it is slow."""
    return pytest.mark.parametrize(
        "every", [pytest.param(every, id=f"one in {every}"), pytest.param(1, id="all", marks=pytest.mark.slow)]
    )


def examples(most: int) -> int:
    """Return how many examples of a property are tried, of `most` in `.ci/run`."""
    return max(most // SHARE, 5) if PROFILE == "default" else most
