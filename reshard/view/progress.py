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
        self._due = _Due()

    def __call__(self, state: Progress) -> None:
        self.state = state
        if self._due(state):
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

    A terminal gets a bar, by `rich` if it is installed. It is as wide as the terminal at most, is drawn ten times a
    second at most, and is removed at the end: what was done is in the report. A log gets a line every 30 seconds.

    `words` name the phases: writing bytes, and syncing files.
    """
    if quiet or is_agent():
        yield None
    elif not sys.stderr.isatty():
        yield Lines(words)
    else:
        try:
            import rich.progress  # noqa: F401 -- an extra
        except ImportError:
            bar = _plain_bar(words)
        else:
            bar = _rich_bar(words)
        with bar as callback:
            yield callback


@contextmanager
def _rich_bar(words: tuple[str, str]) -> Iterator[Callable[[Progress], None]]:
    from rich import progress as bars
    from rich.console import Console
    from rich.table import Column

    one_line = {"no_wrap": True, "overflow": "ellipsis"}
    columns = (
        bars.TextColumn("{task.description}", table_column=Column(**one_line)),
        bars.BarColumn(table_column=Column(ratio=1)),
        bars.TaskProgressColumn(table_column=Column(**one_line)),
        bars.TextColumn("{task.fields[pace]}", table_column=Column(**one_line)),
    )
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(words[0], total=None, pace="")

        def show(state: Progress) -> None:
            phase = _phase(state, words)
            bar.update(task, total=state.total, completed=state.written, description=phase, pace=pace(state))

        yield show


@contextmanager
def _plain_bar(words: tuple[str, str]) -> Iterator[Callable[[Progress], None]]:
    """Draw a bar in characters from a thread, which also draws the last state while files are synced."""
    done = threading.Event()
    last: Progress | None = None

    def draw_often() -> None:
        drawn, width, ends = None, 0, False
        while not ends:
            ends = done.wait(_PAUSE)  # the last state is drawn, too, as rich does
            if last is not None and last is not drawn:
                drawn = last
                line = _line(_phase(drawn, words), drawn, (columns_of(sys.stderr) or 80) - 1)
                _to_stderr(f"\r{line.ljust(width)}", end="")
                width = len(line)
        _clear(width)

    def show(state: Progress) -> None:
        nonlocal last
        last = state

    drawer = threading.Thread(target=draw_often, name="reshard-bar", daemon=True)
    drawer.start()
    try:
        yield show
    finally:
        done.set()
        drawer.join()


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


class _Due:
    """A timer that limits how often a bar is redrawn; its end is drawn at once, but once."""

    def __init__(self) -> None:
        self._drawn_at, self._ended = 0.0, False

    def __call__(self, state: Progress) -> bool:
        now, ends = time.monotonic(), state.written >= state.total
        if now - self._drawn_at < _PAUSE and (self._ended or not ends):
            return False
        self._drawn_at, self._ended = now, ends
        return True


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
    terminal, began, done = sys.stderr.isatty(), time.monotonic(), threading.Event()

    def announce() -> None:
        if not terminal:
            while not done.wait(Lines.EVERY):
                _to_stderr(f"{name}: {time.monotonic() - began:.0f} s")
        elif not done.wait(after):
            line = f"{name}..."[: (columns_of(sys.stderr) or 80) - 1]
            _to_stderr(line, end="")
            done.wait()
            _clear(len(line))

    announcer = threading.Thread(target=announce, name="reshard-phase", daemon=True)
    announcer.start()
    try:
        yield
    finally:
        done.set()
        announcer.join()


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
    """Return the name of the phase; files are synced once all bytes are written."""
    return words[1] if state.written >= state.total else words[0]


def _percent(state: Progress) -> int:
    return 100 * state.written // state.total if state.total else 100


class Lines:
    """Show progress as a line every 30 seconds, for logs.

    Args:
        words: as for `progress`.
        clock: returns seconds.
        say: writes a line.
    """

    EVERY = 30.0

    def __init__(
        self,
        words: tuple[str, str],
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], object] | None = None,
    ) -> None:
        self._words, self._clock, self._say = words, clock, say or _to_stderr
        self._next = clock() + self.EVERY

    def __call__(self, state: Progress) -> None:
        """Write a line if 30 seconds have passed."""
        now = self._clock()
        if now >= self._next:
            self._next = now + self.EVERY
            self._say(f"{_phase(state, self._words)}: {_percent(state)}%, {pace(state)}")


def columns_of(stream: TextIO) -> int | None:
    """Return the width of the terminal that a stream writes to, or None if it writes to none."""
    if not stream.isatty():
        return None
    with suppress(OSError, ValueError):
        if not os.environ.get("COLUMNS", "").isdecimal() and (columns := os.get_terminal_size(stream.fileno()).columns):
            return columns
    return shutil.get_terminal_size().columns


def _to_stderr(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)


def _clear(width: int) -> None:
    """Erase a line on a terminal."""
    if width:
        _to_stderr(f"\r{' ' * width}\r", end="")
