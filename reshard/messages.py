"""Messages to Python's users beside results: warnings, the log, and errors as notebooks show them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable
    from logging import Logger
    from types import FrameType, TracebackType

_PACKAGE = str(Path(__file__).parent) + "/"

_SHOWN = "_reshard_was_shown"


class ReshardWarning(UserWarning):
    """A fact about a checkpoint or a plan that may matter, though it does not stop the work.

    >>> import warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("error", reshard.ReshardWarning)
    ...     source = reshard.open("src_checkpoints", strategy="src_strategy.ckpt")
    """


def warn(texts: Iterable[str]) -> None:
    """Warn of each text, at the line of the user that called this package."""
    import warnings  # not on every start

    level, frame = 2, sys._getframe(1)  # noqa: SLF001 -- as warnings does it
    while _is_ours(frame) and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    for text in texts:
        warnings.warn(text, ReshardWarning, stacklevel=level)


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_PACKAGE)


def log() -> Logger:
    """Return the logger `reshard`, which writes nothing unless the user's program sets up logging."""
    import logging  # not on every start

    logger = logging.getLogger("reshard")
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())  # otherwise Python prints warnings to stderr
    return logger


def traceback_lines(error: BaseException) -> list[str]:
    """Return what IPython shows of an error: its line in the cell, and the error, without the stack.

    IPython calls this when the error is raised, and again for `%tb`, which shows all of the stack.
    """
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None and getattr(error, _SHOWN, False):
        lines: list[str] = shell.InteractiveTB.structured_traceback(type(error), error, error.__traceback__)
        return lines
    setattr(error, _SHOWN, True)
    notes = getattr(error, "__notes__", ())
    return [*_callers_line(error.__traceback__, shell), f"{type(error).__name__}: {error}", *notes]


def _callers_line(traceback: TracebackType | None, shell: Any) -> list[str]:
    """Return the last line before the first call of this package, with its place."""
    from linecache import getline

    place = None
    while traceback is not None and not _is_ours(traceback.tb_frame):
        place = traceback.tb_frame.f_code.co_filename, traceback.tb_lineno
        traceback = traceback.tb_next
    if place is None:
        return []
    cell = shell.compile.format_code_name(place[0]) if shell is not None else None
    name = " ".join(cell) if cell else f"File {place[0]}"
    line = getline(*place).strip()
    return [f"{name}, line {place[1]}: {line}" if line else f"{name}, line {place[1]}"]
