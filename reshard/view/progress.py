"""Progress of a run where one looks: a bar in a notebook's cell, or on a terminal.

Both are fed by the same events, `run.Progress`, which come from receipts: on this machine's threads as on a cluster.
"""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from reshard.errors import bytes_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reshard.plan.plan import Plan
    from reshard.run.run import Progress, Report

_PAUSE = 0.1  # seconds between two pictures of a notebook's bar
# What has no number of an output begins 12 pixels further left in the HTML that a notebook is exported to.
_STYLE = "padding: 4px 0 4px 12px; font: 13px var(--jp-ui-font-family, system-ui, sans-serif)"


def run(
    plan: Plan, directory: Any, *, progress: Callable[[Progress], None] | bool | None = None, **options: Any
) -> Report:
    """Run a plan: `Plan.run`, with a bar in a notebook or on a terminal where `progress` is true."""
    from reshard.run.run import run as run_plan  # it brings dask

    with shown() if progress is True else nullcontext(progress or None) as callback:
        return run_plan(plan, directory, progress=callback, **options)


@contextmanager
def shown() -> Iterator[Callable[[Progress], None] | None]:
    """Give a callback for `run` that shows progress in a notebook or on a terminal; None where neither is."""
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
    """Give a callback that shows progress on a terminal, by `rich` where it is installed; None elsewhere.

    No bar is left above an error, nor where there was nothing to do.

    `words` are what is done, what is done when all bytes are, and what is done at the end.
    """
    if quiet or not sys.stderr.isatty():
        yield None
        return
    try:
        from rich import progress as bars
        from rich.console import Console
    except ImportError:
        plain = _PlainProgress()
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
            # At the end files are still synced to the disk, which takes a while and counts no bytes.
            kind = words[1] if state.written >= state.total else words[0]
            bar.update(task, total=state.total, completed=state.written, description=kind, pace=_pace(state))

        yield show
        bar.update(task, description=words[2])
        bar.live.transient = bar.tasks[task].total is None


def _pace(state: Progress) -> str:
    """Write bytes, rate and time left. The rate is this whole run's: tasks finish in bursts, which show nothing."""
    text = f"{bytes_text(state.written)} of {bytes_text(state.total)}"
    written = state.written - state.resumed
    if not (written and state.seconds):
        return text
    rate = written / state.seconds
    minutes, seconds = divmod(round((state.total - state.written) / rate), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{text}, {bytes_text(rate)}/s, {hours}:{minutes:02}:{seconds:02} left"


class _PlainProgress:
    """One line that is written again, at most ten times a second."""

    def __init__(self) -> None:
        self._shown_at = 0.0
        self._width = 0

    def __call__(self, state: Progress) -> None:
        now = time.monotonic()
        if now - self._shown_at < 0.1 and state.written < state.total:
            return
        self._shown_at = now
        share = 100 * state.written // state.total if state.total else 100
        line = f"{share:3d}%  {_pace(state)}"
        sys.stderr.write("\r" + line.ljust(self._width))
        sys.stderr.flush()
        self._width = len(line)

    def end(self, *, leave: bool) -> None:
        if self._width:
            sys.stderr.write("\n" if leave else f"\r{' ' * self._width}\r")
