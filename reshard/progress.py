"""Progress of a run where one looks: a bar in a notebook's cell, or on a terminal.

Both are fed by the same events, `run.Progress`, which come from receipts: on this machine's threads as on a cluster.
"""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reshard.run import Progress

_PAUSE = 0.1  # seconds between two pictures of a notebook's bar


@contextmanager
def shown() -> Iterator[Callable[[Progress], None] | None]:
    """Give a callback for `run` that shows progress in a notebook or on a terminal; None where neither is."""
    if not _in_notebook():
        from reshard.terminal import progress

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
        from reshard.show import bytes_text

        if self.state is None:
            return "written" if self.done else "begins"
        pace = f"{bytes_text(self.state.written)} of {bytes_text(self.state.total)} in {self.state.seconds:.1f} s"
        if self.done:
            return f"written: {pace}"
        return f"{'syncing' if self.state.written >= self.state.total else 'writing'}: {pace}"

    def _repr_html_(self) -> str:
        part = 1.0 if self.done else 0.0
        if self.state and self.state.total:
            part = self.state.written / self.state.total
        return f'<progress value="{part:.3f}" max="1"></progress> {self!r}'


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return hasattr(shell, "kernel")
