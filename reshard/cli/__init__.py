"""The command line: one module for each group of commands, and shared options and values.

The handler of an early interrupt is here, since this module is loaded before any slow one.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn


def stop(_number: int, _frame: FrameType | None) -> NoReturn:
    """Exit at once: while modules are imported, an exception could be swallowed."""
    os.write(2, b"interrupted; nothing was written\n")
    os._exit(130)
