"""The command line: one module for each group of commands, and what they share.

What an interrupt does before anything was begun is here, since it is loaded before anything slow.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn


def stop(_number: int, _frame: FrameType | None) -> NoReturn:
    """Exit at once, as nothing was begun. An exception might be lost: some that is imported catches what it can."""
    os.write(2, b"interrupted; nothing was written\n")
    os._exit(130)
