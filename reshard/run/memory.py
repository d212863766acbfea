"""Measure the memory of a run as its plan predicts it.

A plan predicts the peak of a process that does nothing else. A notebook may hold much more when a run begins, or may
have held it before; neither is counted.
"""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from reshard.plan.budget import HELD_BEFORE

if TYPE_CHECKING:
    from reshard.plan.plan import Plan


def other_memory(plan: Plan) -> int:
    """Return the resident bytes of this process that a plan does not count, at the beginning of its run.

    If there are any, or the process once held more than was predicted, the system's record of the peak begins again.
    """
    counted = sum(nbytes for purpose, nbytes in plan.memory if purpose in HELD_BEFORE)
    other = max(_resident("VmRSS") - counted, 0)
    if other or _resident("VmHWM") > plan.stats.peak_memory:
        with suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as peak:
            peak.write("5")  # proc(5): resets the peak resident set size to the current one
    return other


def peak_memory(other: int) -> int:
    """Return the peak resident memory of this process in bytes, without the `other_memory` of its run.

    This is VmHWM on Linux, else `ru_maxrss`, which starts at the peak of the parent process.
    """
    unit = 1 if sys.platform == "darwin" else 1024
    return (_resident("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit) - other


def _resident(key: str) -> int:
    """Return a number of bytes in the status of this process on Linux, else 0."""
    with suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return 0
