"""Progress on a terminal: what is left on it, above what is said next."""

from __future__ import annotations

import io
import re
import sys
import time
from contextlib import redirect_stderr

import pytest
from terminals import run_in_terminal, screen

from reshard.core.run.run import Progress
from reshard.view.progress import Lines, phase, progress


class Terminal(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """What is on it in the end."""
        return screen(self.getvalue(), 100)


@pytest.fixture(params=["rich", "plain"])
def terminal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Terminal:
    if request.param == "rich":
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    return Terminal()


BAR = """
import sys, time
if {plain}:
    sys.modules["rich"] = None
from reshard.core.run.settings import Progress
from reshard.view.progress import progress

began = time.monotonic()
with progress(quiet=False) as show:
    for done in range(1001):
        show(Progress(done * 10**9, 10**12, 1 + time.monotonic() - began, resumed=10**9))
        time.sleep({pause})
print("the report")
print(time.monotonic() - began)
"""


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("plain", [False, True])
def test_a_bar_fits_the_terminal_and_is_gone_in_the_end(plain: bool, columns: int) -> None:
    if not plain:
        pytest.importorskip("rich")
    script = BAR.format(plain=plain, pause=0.0005)
    output = run_in_terminal([sys.executable, "-c", script], columns)
    lines = screen(output, columns)
    assert lines[0] == "the report"
    frames = [re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", line) for line in re.split(r"[\r\n]", output)]
    frames = [frame for frame in frames if "writing" in frame or "syncing" in frame]
    assert all(len(frame.rstrip()) <= columns for frame in frames)
    assert 1 <= len(frames) <= 10 * float(lines[1]) + 2  # rich draws when it begins and when it ends


def test_the_rate_is_that_of_new_bytes(terminal: Terminal) -> None:
    """Of a run that is resumed: at 900 of 1,000 bytes, 800 of an earlier run, 100 in 10 s."""
    with redirect_stderr(terminal), progress(quiet=False) as shown:
        assert shown is not None
        shown(Progress(900, 1000, 10.0, resumed=800))
        time.sleep(0.2)  # until it is drawn
    assert "90%" in terminal.getvalue()
    assert "900 B of 1.0 kB, 10 B/s, 0:00:10 left" in terminal.getvalue()


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
            time.sleep(0.2)  # until it is drawn
            raise error

    with pytest.raises(error):
        stopped()
    assert "50%" in terminal.getvalue()
    terminal.write("error: it is full\n")
    assert terminal.lines() == ["error: it is full"]


def test_a_log_gets_a_line_every_thirty_seconds() -> None:
    now, said = 1000.0, []
    lines = Lines(("writing", "syncing"), clock=lambda: now, say=said.append)
    for second in range(101):
        now = 1000.0 + second
        lines(Progress(10_000 + 900 * second, 100_000, float(second), resumed=10_000))
    now += 30
    lines(Progress(100_000, 100_000, 130.0, resumed=10_000))
    assert said == [
        "writing: 37%, 37.0 kB of 100.0 kB, 900 B/s, 0:01:10 left",
        "writing: 64%, 64.0 kB of 100.0 kB, 900 B/s, 0:00:40 left",
        "writing: 91%, 91.0 kB of 100.0 kB, 900 B/s, 0:00:10 left",
        "syncing: 100%, 100.0 kB of 100.0 kB, 692 B/s, 0:00:00 left",
    ]


def test_a_phase_without_bytes_is_named_and_gone_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    with redirect_stderr(terminal):
        with phase("reading headers", quiet=False, after=0.01):
            deadline = time.monotonic() + 10
            while "reading headers..." not in terminal.getvalue() and time.monotonic() < deadline:
                time.sleep(0.01)
        assert "reading headers..." in terminal.getvalue()
        assert terminal.lines() == []
        with phase("reading headers", quiet=False), phase("reading headers", quiet=True, after=0):
            pass
    assert terminal.lines() == []
    monkeypatch.setattr(Lines, "EVERY", 0.01)
    log = io.StringIO()
    with redirect_stderr(log), phase("reading headers", quiet=False):
        deadline = time.monotonic() + 10
        while log.getvalue().count("\n") < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert set(log.getvalue().splitlines()) == {"reading headers: 0 s"}
