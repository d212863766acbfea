"""Display of the progress of a run: a bar in a notebook or on a terminal, lines in a log.

Each display is a callback that receives `run.Progress` events, from local threads or from a cluster.
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from reshard.errors import bytes_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reshard.run.settings import Progress

READING = "reading headers and planning"
"""The name of the phase before a run."""

_WORDS = ("writing", "syncing", "written")  # names of the phases of a run
_PAUSE = 0.1  # seconds between two drawings of a bar
_CELLS = 24  # of the bar in characters
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
            return _WORDS[2] if self.done else "begins"
        phase = _WORDS[2] if self.done else _phase(self.state, _WORDS)
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
def progress(*, quiet: bool, words: tuple[str, str, str] = _WORDS) -> Iterator[Callable[[Progress], None] | None]:
    """Provide a callback that shows progress on stderr; None if `quiet`.

    A terminal gets a bar, by `rich` if it is installed; the bar is removed on an error, or if there was nothing to do.
    A log gets a line every 30 seconds.

    `words` name the phases: writing bytes, syncing files, and the end.
    """
    if quiet:
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
def _rich_bar(words: tuple[str, str, str]) -> Iterator[Callable[[Progress], None]]:
    from rich import progress as bars
    from rich.console import Console

    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.TaskProgressColumn(),
        bars.TextColumn("{task.fields[pace]}"),
    )
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(words[0], total=None, pace="")

        def show(state: Progress) -> None:
            phase = _phase(state, words)
            bar.update(task, total=state.total, completed=state.written, description=phase, pace=pace(state))

        yield show
        bar.update(task, description=words[2])
        bar.live.transient = bar.tasks[task].total is None


@contextmanager
def _plain_bar(words: tuple[str, str, str]) -> Iterator[Callable[[Progress], None]]:
    """Draw a bar in characters, at most ten times a second."""
    due, width = _Due(), 0
    last: Progress | None = None

    def draw(phase: str, state: Progress) -> None:
        nonlocal width
        percent = _percent(state)
        cells = ("#" * (percent * _CELLS // 100)).ljust(_CELLS, ".")
        line = f"{phase} [{cells}] {percent:3d}%  {pace(state)}"
        _to_stderr(f"\r{line.ljust(width)}", end="")
        width = len(line)

    def show(state: Progress) -> None:
        nonlocal last
        last = state
        if due(state):
            draw(_phase(state, words), state)

    try:
        yield show
    except BaseException:
        _clear(width)
        raise
    if last is not None:
        draw(words[2], last)
        _to_stderr("")


class _Due:
    """A timer that limits how often a bar is redrawn; the end is always drawn."""

    def __init__(self) -> None:
        self._drawn_at = 0.0

    def __call__(self, state: Progress) -> bool:
        now = time.monotonic()
        if now - self._drawn_at < _PAUSE and state.written < state.total:
            return False
        self._drawn_at = now
        return True


@contextmanager
def phase(name: str, *, quiet: bool, after: float = 1.0) -> Iterator[None]:
    """Show the name of a phase that counts no bytes, on a terminal or every 30 seconds in a log.

    Args:
        name: the name, such as `reading headers`.
        quiet: write nothing.
        after: seconds before the name is shown on a terminal. It is removed when the phase ends.
    """
    if quiet:
        yield
        return
    terminal, began, done = sys.stderr.isatty(), time.monotonic(), threading.Event()

    def announce() -> None:
        if not terminal:
            while not done.wait(Lines.EVERY):
                _to_stderr(f"{name}: {time.monotonic() - began:.0f} s")
        elif not done.wait(after):
            _to_stderr(f"{name}...", end="")
            done.wait()
            _clear(len(name) + 3)

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

    >>> from reshard.run.settings import Progress
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


def _phase(state: Progress, words: tuple[str, str, str]) -> str:
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
        words: tuple[str, str, str],
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


def _to_stderr(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)


def _clear(width: int) -> None:
    """Erase a line on a terminal."""
    if width:
        _to_stderr(f"\r{' ' * width}\r", end="")
