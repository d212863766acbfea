"""Display of the progress of a run: a bar in a notebook or on a terminal, lines in a log.

Each display is a callback that receives `run.Progress` events, from local threads or from a cluster.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from reshard.environment import is_agent
from reshard.errors import bytes_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TextIO

    from reshard.core.run.settings import Progress

READING = "reading headers and planning"
"""The name of the phase before a run."""

EVERY = 30.0
"""Seconds between two lines of a log."""

_WORDS = ("writing", "syncing")  # names of the phases of a run
_DONE = "written"
_PAUSE = 0.1  # seconds between two drawings of a bar
_CELLS = 24  # of the bar in characters, if the terminal has room
# An output without a number begins 12 pixels further left in the HTML that a notebook is exported to.
_STYLE = "padding: 4px 0 4px 12px; font: 13px var(--jp-ui-font-family, system-ui, sans-serif)"


# --- notebooks --------------------------------------------------------------------------------------------------


@contextmanager
def shown() -> Iterator[Callable[[Progress], None] | None]:
    """Provide a callback that shows progress in a notebook, on a terminal or in a log."""
    ipython = sys.modules.get("IPython")
    if not hasattr(ipython.get_ipython() if ipython else None, "kernel"):
        with progress(quiet=False) as callback:
            yield callback
        return
    from IPython.display import display

    bar = _Bar()
    bar.handle = display(bar, display_id=True)
    yield bar
    bar.done = True
    bar.handle.update(bar)


class _Bar:
    """The output of a notebook cell: an HTML progress bar and its text."""

    def __init__(self) -> None:
        self.handle: Any = None
        self.state: Progress | None = None
        self.done = False
        self._drawn_at = 0.0

    def __call__(self, state: Progress) -> None:
        self.state, now = state, time.monotonic()
        if now - self._drawn_at >= _PAUSE or state.written >= state.total:
            self._drawn_at = now
            self.handle.update(self)

    def __repr__(self) -> str:
        if self.state is None:
            return _DONE if self.done else "begins"
        phase = _DONE if self.done else _phase(self.state, _WORDS)
        before = f" ({bytes_text(self.state.resumed)} by an earlier run)" if self.state.resumed else ""
        return f"{phase}: {_amount(self.state)}{before} in {self.state.seconds:.1f} s"

    def _repr_html_(self) -> str:
        from reshard.view.svg import tag  # no terminal needs it

        share = 1.0 if self.done else 0.0
        if self.state and self.state.total:
            share = self.state.written / self.state.total
        return tag("div", tag("progress", value=f"{share:.3f}", max="1"), f" {self!r}", style=_STYLE)


# --- terminals and logs -----------------------------------------------------------------------------------------


@contextmanager
def progress(*, quiet: bool, words: tuple[str, str] = _WORDS) -> Iterator[Callable[[Progress], None] | None]:
    """Provide a callback that shows progress on stderr; None if `quiet`, or for an agent.

    A terminal gets a bar, which is removed at the end: what was done is in the report. A log gets a line every 30
    seconds. `words` name the phases: writing bytes, and syncing files.
    """
    if quiet or is_agent():
        yield None
        return
    last: Progress | None = None

    def show(state: Progress) -> None:
        nonlocal last
        last = state

    def line(width: int | None) -> str:
        if last is None:
            return ""
        phase = _phase(last, words)
        return f"{phase}: {_percent(last)}%, {pace(last)}" if width is None else _line(phase, last, width)

    with _said(line, after=_PAUSE):
        yield show


@contextmanager
def phase(name: str, *, quiet: bool, after: float = 1.0) -> Iterator[None]:
    """Show the name of a phase that counts no bytes, on a terminal or every 30 seconds in a log.

    Args:
        name: the name, such as `reading headers`.
        quiet: write nothing.
        after: seconds before the name is shown on a terminal. It is removed when the phase ends.
    """
    if quiet or is_agent():
        yield
        return
    began = time.monotonic()

    def line(width: int | None) -> str:
        return f"{name}: {time.monotonic() - began:.0f} s" if width is None else f"{name}..."[:width]

    with _said(line, after=after):
        yield


@contextmanager
def _said(line: Callable[[int | None], str], *, after: float) -> Iterator[None]:
    """Write a line to stderr from a thread, again and again: in place on a terminal, every 30 seconds to a log.

    Args:
        line: returns the line for a number of columns, or for a log; "" if there is nothing to say yet.
        after: seconds before the first line on a terminal.
    """
    done, terminal = threading.Event(), sys.stderr.isatty()

    def speak() -> None:
        shown, wait = "", after if terminal else EVERY
        while not done.wait(wait):
            if not terminal:
                if text := line(None):
                    _to_stderr(f"{text}\n")
            elif (text := line((columns_of(sys.stderr) or 80) - 1)) != shown:
                _to_stderr(f"\r{text.ljust(len(shown))}")
                shown = text
            wait = _PAUSE if terminal else EVERY
        if shown:
            _to_stderr(f"\r{' ' * len(shown)}\r")

    speaker = threading.Thread(target=speak, name="reshard-progress", daemon=True)
    speaker.start()
    try:
        yield
    finally:
        done.set()
        speaker.join()


def _line(phase: str, state: Progress, width: int) -> str:
    """Return the line of a bar; if it does not fit, the bar is shorter or left out, and the text is cut.

    >>> from reshard.core.run.settings import Progress
    >>> state = Progress(written=3_000_000, total=4_000_000, seconds=2.0)
    >>> _line("writing", state, 64)
    'writing [#####..]  75%  3.0 MB of 4.0 MB, 1.5 MB/s, 0:00:01 left'
    >>> _line("writing", state, 40)
    'writing  75%  3.0 MB of 4.0 MB, 1.5 MB/s'
    """
    percent = _percent(state)
    end = f" {percent:3d}%  {pace(state)}"
    cells = min(_CELLS, width - len(phase) - len(end) - 3)
    bar = f" [{('#' * (percent * cells // 100)).ljust(cells, '.')}]" if cells > 0 else ""
    return f"{phase}{bar}{end}"[:width].rstrip(" ,")


def pace(state: Progress) -> str:
    """Write bytes, rate and time left.

    The rate is averaged over this whole run, since tasks finish in bursts. It excludes bytes of an earlier run.

    >>> from reshard.core.run.settings import Progress
    >>> pace(Progress(written=3_000_000, total=4_000_000, seconds=2.0, resumed=1_000_000))
    '3.0 MB of 4.0 MB, 1.0 MB/s, 0:00:01 left'
    """
    written = state.written - state.resumed
    if not (written > 0 and state.seconds):
        return _amount(state)
    rate = written / state.seconds
    minutes, seconds = divmod(round((state.total - state.written) / rate), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{_amount(state)}, {bytes_text(rate)}/s, {hours}:{minutes:02}:{seconds:02} left"


def _amount(state: Progress) -> str:
    return f"{bytes_text(state.written)} of {bytes_text(state.total)}"


def _phase(state: Progress, words: tuple[str, str]) -> str:
    return words[1] if state.written >= state.total else words[0]  # files are synced once all bytes are written


def _percent(state: Progress) -> int:
    return 100 * state.written // state.total if state.total else 100


def columns_of(stream: TextIO) -> int | None:
    """Return the width of the terminal that a stream writes to, or None if it writes to none."""
    if not stream.isatty():
        return None
    with suppress(OSError, ValueError):
        if not os.environ.get("COLUMNS", "").isdecimal() and (columns := os.get_terminal_size(stream.fileno()).columns):
            return columns
    return shutil.get_terminal_size().columns


def _to_stderr(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)
