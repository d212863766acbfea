"""Prints what came of the faults, by kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

COLUMNS = ("faults", "not finished", "gone on with", "told to add an option")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    rows = [
        value
        for report in terminalreporter.getreports("passed")
        for name, value in report.user_properties
        if name == "faults"
    ]
    if not rows:
        return
    terminalreporter.section("faults on purpose")
    terminalreporter.write_line(f"{'kind':36}" + "".join(f"{column:>24}" for column in COLUMNS))
    for kind, *numbers in [*rows, ("in all", *(sum(column) for column in list(zip(*rows, strict=True))[1:]))]:
        terminalreporter.write_line(f"{kind:36}" + "".join(f"{number:>24}" for number in numbers))
