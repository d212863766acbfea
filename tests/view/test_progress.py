"""Progress on a terminal: what is left on it, above what is said next."""

from __future__ import annotations

import io
import re
import sys
import time
from contextlib import redirect_stderr
from typing import TYPE_CHECKING

import pytest
from terminals import run_in_terminal, screen

from reshard.core.run.run import Progress
from reshard.view import progress as view
from reshard.view.progress import phase, progress

if TYPE_CHECKING:
    from collections.abc import Callable


class Terminal(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """What is on it in the end."""
        return screen(self.getvalue(), 100)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    return Terminal()


BAR = """
import time
from reshard.core.run.settings import Progress
from reshard.view.progress import progress

began = time.monotonic()
with progress(quiet=False) as show:
    for done in range(1001):
        show(Progress(done * 10**9, 10**12, 1 + time.monotonic() - began, resumed=10**9))
        time.sleep(0.0005)
print("the report")
print(time.monotonic() - began)
"""


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_bar_fits_the_terminal_and_is_gone_in_the_end(columns: int) -> None:
    output = run_in_terminal([sys.executable, "-c", BAR], columns)
    lines = screen(output, columns)
    assert lines[0] == "the report"
    frames = [frame for frame in re.split(r"[\r\n]", output) if "writing" in frame or "syncing" in frame]
    assert all(len(frame.rstrip()) <= columns for frame in frames)
    assert 1 <= len(frames) <= 10 * float(lines[1]) + 1


def test_the_rate_is_that_of_new_bytes(terminal: Terminal) -> None:
    """Of a run that is resumed: at 900 of 1,000 bytes, 800 of an earlier run, 100 in 10 s."""
    with redirect_stderr(terminal), progress(quiet=False) as shown:
        assert shown is not None
        shown(Progress(900, 1000, 10.0, resumed=800))
        wait_for(lambda: "90%" in terminal.getvalue())
    assert "900 B of 1.0 kB, 10 B/s, 0:00:10 left" in terminal.getvalue()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def test_no_bar_stays_where_nothing_was_done(terminal: Terminal) -> None:
    with redirect_stderr(terminal), progress(quiet=False):
        pass
    terminal.write("nothing is left to do\n")
    assert terminal.lines() == ["nothing is left to do"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_no_bar_stays_above_an_error(terminal: Terminal, error: type[BaseException]) -> None:
    def stopped() -> None:
        with redirect_stderr(terminal), progress(quiet=False) as shown:
            assert shown is not None
            shown(Progress(500, 1000, 0.1))
            wait_for(lambda: "50%" in terminal.getvalue())
            raise error

    with pytest.raises(error):
        stopped()
    terminal.write("error: it is full\n")
    assert terminal.lines() == ["error: it is full"]


def test_a_log_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "EVERY", 0.02)
    log = io.StringIO()
    with redirect_stderr(log), progress(quiet=False) as shown:
        assert shown is not None
        for state in (
            Progress(37_000, 100_000, 30.0, resumed=10_000),
            Progress(100_000, 100_000, 130.0, resumed=10_000),
        ):
            before = log.getvalue().count("\n")
            shown(state)
            wait_for(lambda: log.getvalue().count("\n") > before + 1)  # noqa: B023 -- called at once
    assert set(log.getvalue().splitlines()) == {
        "writing: 37%, 37.0 kB of 100.0 kB, 900 B/s, 0:01:10 left",
        "syncing: 100%, 100.0 kB of 100.0 kB, 692 B/s, 0:00:00 left",
    }


def test_a_phase_without_bytes_is_named_and_gone_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    with redirect_stderr(terminal):
        with phase("reading headers", quiet=False, after=0.01):
            wait_for(lambda: "reading headers..." in terminal.getvalue())
        assert terminal.lines() == []
        with phase("reading headers", quiet=False), phase("reading headers", quiet=True, after=0):
            pass
    assert terminal.lines() == []
    monkeypatch.setattr(view, "EVERY", 0.01)
    log = io.StringIO()
    with redirect_stderr(log), phase("reading headers", quiet=False):
        wait_for(lambda: log.getvalue().count("\n") > 1)
    assert set(log.getvalue().splitlines()) == {"reading headers: 0 s"}
