"""Errors: exit codes, and many faults told at once."""

from __future__ import annotations

import re

import pytest

from reshard import errors
from reshard.errors import Faults, ReshardError, SourceError


def test_every_kind_has_its_exit_code() -> None:
    kinds = {name: kind.exit_code for name, kind in vars(errors).items() if name.endswith("Error")}
    assert kinds == {
        "ReshardError": 1,
        "UsageError": 2,
        "VerifyError": 3,
        "SourceError": 4,
        "GoneError": 4,
        "LayoutError": 4,
        "StrategyError": 4,
        "PlanError": 4,
        "BudgetError": 5,
        "TargetError": 6,
        "ChangedError": 6,
    }
    assert all(issubclass(getattr(errors, name), ReshardError) for name in kinds)


def test_a_single_fault_is_one_line() -> None:
    faults = Faults("a.ckpt")
    faults.raise_if_any(SourceError)
    faults.add("tensor 'w'", "is cut short")
    with pytest.raises(SourceError, match=r"^a\.ckpt: tensor 'w': is cut short; copy it again$"):
        faults.raise_if_any(SourceError, advice="copy it again")


def test_many_faults_are_counted_and_the_first_twenty_shown() -> None:
    faults = Faults("a.ckpt")
    for number in range(23):
        faults.add(f"w{number}", "is wrong")
    with pytest.raises(SourceError) as caught:
        faults.raise_if_any(SourceError, advice="copy it again")
    lines = str(caught.value).splitlines()
    assert lines[0] == "a.ckpt has 23 faults:"
    assert lines[1] == "  w0: is wrong"
    assert lines[20:] == ["  w19: is wrong", "  and 3 more", "  copy it again"]


def test_names_are_listed_as_far_as_one_reads() -> None:
    assert errors.names([]) == ""
    assert errors.names("abcde") == "a, b, c, d, e"
    assert re.fullmatch(r"0, 1, 2, 3, 4 and 95 more", errors.names(range(100)))
