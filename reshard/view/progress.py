"""Progress of a run: a bar in a notebook's cell or on a terminal, lines in a log.

All are fed by the same events, `run.Progress`, which come from receipts: on this machine's threads as on a cluster.
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
"""The phase before a run."""

_PAUSE = 0.1  # seconds between two pictures of a notebook's bar
# What has no number of an output begins 12 pixels further left in the HTML that a notebook is exported to.
_STYLE = "padding: 4px 0 4px 12px; font: 13px var(--jp-ui-font-family, system-ui, sans-serif)"


@contextmanager
def shown() -> Iterator[Callable[[Progress], None] | None]:
    """Give a callback for `run` that shows progress in a notebook, on a terminal or in a log."""
    if not _in_notebook():
        with progress(quiet=False) as callback:
            yield callback
        return
    from IPython.display import display

    bar = _Bar()
    handle: Any = display(bar, display_id=True)
    last = 0.0

    def show(state: Progress) -> None:
        nonlocal last
        bar.state = state
        now = time.monotonic()
        if now - last >= _PAUSE or state.written >= state.total:
            last = now
            handle.update(bar)

    yield show
    bar.done = True
    handle.update(bar)


class _Bar:
    """What a cell shows: a bar of HTML's own, and words."""

    def __init__(self) -> None:
        self.state: Progress | None = None
        self.done = False

    def __repr__(self) -> str:
        if self.state is None:
            return "written" if self.done else "begins"
        done = f"{bytes_text(self.state.written)} of {bytes_text(self.state.total)}"
        before = f" ({bytes_text(self.state.resumed)} by an earlier run)" if self.state.resumed else ""
        pace = f"{done}{before} in {self.state.seconds:.1f} s"
        if self.done:
            return f"written: {pace}"
        return f"{'syncing' if self.state.written >= self.state.total else 'writing'}: {pace}"

    def _repr_html_(self) -> str:
        from reshard.view.svg import tag  # no terminal needs it

        part = 1.0 if self.done else 0.0
        if self.state and self.state.total:
            part = self.state.written / self.state.total
        bar = tag("progress", value=f"{part:.3f}", max="1")
        return tag("div", bar, f" {self!r}", style=_STYLE)


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return hasattr(shell, "kernel")


@contextmanager
def progress(
    *, quiet: bool, words: tuple[str, str, str] = ("writing", "syncing", "written")
) -> Iterator[Callable[[Progress], None] | None]:
    """Give a callback that shows progress on stderr; None if `quiet`.

    On a terminal it is a bar, by `rich` if that is installed. Elsewhere it is a line every 30 seconds, as a job's log
    has no use for more. No bar is left above an error, nor if there was nothing to do.

    `words` are the phase, its end when all bytes are done and files are synced, and what is said at the end.
    """
    if quiet:
        yield None
        return
    if not sys.stderr.isatty():
        yield Lines(words)
        return
    try:
        from rich import progress as bars
        from rich.console import Console
    except ImportError:
        plain = _PlainBar(words)
        try:
            yield plain
        except BaseException:
            plain.end(leave=False)
            raise
        plain.end(leave=True)
        return
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.TaskProgressColumn(),
        bars.TextColumn("{task.fields[pace]}"),
    )
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(words[0], total=None, pace="")

        def show(state: Progress) -> None:
            bar.update(
                task,
                total=state.total,
                completed=state.written,
                description=_phase(state, words),
                pace=pace(state),
            )

        yield show
        bar.update(task, description=words[2])
        bar.live.transient = bar.tasks[task].total is None


@contextmanager
def phase(name: str, *, quiet: bool, after: float = 1.0) -> Iterator[None]:
    """Name what is done while no bytes can be counted: on a terminal after a second, in a log every 30 seconds.

    Args:
        name: such as `reading headers`.
        quiet: say nothing.
        after: seconds, on a terminal. The line is gone when the phase ends.
    """
    if quiet:
        yield
        return
    terminal, began, done = sys.stderr.isatty(), time.monotonic(), threading.Event()

    def tell() -> None:
        if not terminal:
            while not done.wait(Lines.EVERY):
                _to_stderr(f"{name}: {time.monotonic() - began:.0f} s")
        elif not done.wait(after):
            sys.stderr.write(f"{name}...")
            sys.stderr.flush()
            done.wait()
            sys.stderr.write(f"\r{' ' * (len(name) + 3)}\r")
            sys.stderr.flush()

    teller = threading.Thread(target=tell, name="reshard-phase", daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


def pace(state: Progress) -> str:
    """Write bytes, rate and time left.

    The rate is that of this whole run: tasks finish in bursts, which show nothing. What an earlier run wrote does not
    count in it.

    >>> from reshard.run.settings import Progress
    >>> pace(Progress(written=3_000_000, total=4_000_000, seconds=2.0, resumed=1_000_000))
    '3.0 MB of 4.0 MB, 1.0 MB/s, 0:00:01 left'
    """
    text = f"{bytes_text(state.written)} of {bytes_text(state.total)}"
    written = state.written - state.resumed
    if not (written > 0 and state.seconds):
        return text
    rate = written / state.seconds
    minutes, seconds = divmod(round((state.total - state.written) / rate), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{text}, {bytes_text(rate)}/s, {hours}:{minutes:02}:{seconds:02} left"


def _phase(state: Progress, words: tuple[str, str, str]) -> str:
    """Return what is being done: at the end files are still synced to the disk, which counts no bytes."""
    return words[1] if state.written >= state.total else words[0]


def _percent(state: Progress) -> int:
    return 100 * state.written // state.total if state.total else 100


class Lines:
    """Shows progress as a line every 30 seconds, for logs.

    Args:
        words: as for `progress`.
        clock: tells the seconds.
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
        """Write a line if it is time for one."""
        now = self._clock()
        if now >= self._next:
            self._next = now + self.EVERY
            self._say(f"{_phase(state, self._words)}: {_percent(state)}%, {pace(state)}")


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


class _PlainBar:
    """A bar that is drawn again, at most ten times a second."""

    _CELLS = 24

    def __init__(self, words: tuple[str, str, str]) -> None:
        self._words = words
        self._shown_at = 0.0
        self._width = 0
        self._state: Progress | None = None

    def __call__(self, state: Progress) -> None:
        self._state = state
        now = time.monotonic()
        if now - self._shown_at < _PAUSE and state.written < state.total:
            return
        self._shown_at = now
        self._draw(_phase(state, self._words), state)

    def _draw(self, phase: str, state: Progress) -> None:
        share = _percent(state)
        bar = ("#" * (share * self._CELLS // 100)).ljust(self._CELLS, ".")
        line = f"{phase} [{bar}] {share:3d}%  {pace(state)}"
        sys.stderr.write("\r" + line.ljust(self._width))
        sys.stderr.flush()
        self._width = len(line)

    def end(self, *, leave: bool) -> None:
        if leave and self._state is not None:
            self._draw(self._words[2], self._state)
        if self._width:
            sys.stderr.write("\n" if leave else f"\r{' ' * self._width}\r")
