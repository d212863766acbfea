"""Measures whole commands: seconds, processor time and honest peak memory."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

RESHARD = [sys.executable, "-m", "reshard"]

# A process starts with the peak memory of the one that started it; so a small one does.
_LAUNCH = """
import os, sys, time
began = time.perf_counter()
child = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ)
_, status, usage = os.wait4(child, 0)
seconds = time.perf_counter() - began
print("FIGURES", seconds, usage.ru_utime, usage.ru_stime, usage.ru_maxrss * 1024, flush=True)
sys.exit(os.waitstatus_to_exitcode(status))
"""


@dataclass(frozen=True)
class Measured:
    """What a command took, and what it printed.

    Attributes:
        seconds: by the clock.
        cpu: processor seconds, the kernel's included.
        own: processor seconds without the kernel's, which depend on how much memory the machine has free.
        peak: the most resident memory, in bytes, not inherited from whoever started it.
        code: the exit code.
        out, err: what it printed.
    """

    seconds: float
    cpu: float
    own: float
    peak: int
    code: int
    out: str
    err: str


def measured(*command: str) -> Measured:
    """Run a command as a whole process, with the operating system's own account of it."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _LAUNCH, *command], capture_output=True, text=True, check=False
    )
    out, _, figures = done.stdout.rpartition("FIGURES")
    *times, peak = figures.split()
    seconds, own, kernel = map(float, times)
    return Measured(seconds, own + kernel, own, int(peak), done.returncode, out, done.stderr)


_PLANNING = """
import sys, time
import reshard
source, before, after, out = sys.argv[1:]
began = time.process_time()
checkpoint, target = reshard.open(source, strategy=before), reshard.read_strategy(after)
opened = time.process_time()
plan = reshard.plan(checkpoint, target)
planned = time.process_time()
graph = plan.graph(out).__dask_graph__()
ended = time.process_time()
print(opened - began, planned - opened, ended - planned, len(graph), len(plan._record.files), plan.stats.peak_memory)
"""


@dataclass(frozen=True)
class Planning:
    """What it takes to plan, from the strategy files and headers on the disk to the dask graph.

    Attributes:
        opening, planning, graphing: processor seconds of each.
        nodes: of the graph.
        files: to be written.
        predicted: peak memory of a run, in bytes.
        peak: the most resident memory of the process, in bytes; imports, indexes, plan and graph.
    """

    opening: float
    planning: float
    graphing: float
    nodes: int
    files: int
    predicted: int
    peak: int

    @property
    def cpu(self) -> float:
        """Processor seconds in all."""
        return self.opening + self.planning + self.graphing


def planning(source: Path, before: Path, after: Path) -> Planning:
    """Plan in a process of its own."""
    took = measured(sys.executable, "-c", _PLANNING, str(source), str(before), str(after), f"{source}.out")
    assert took.code == 0, took.err
    *seconds, nodes, files, predicted = took.out.split()
    return Planning(*map(float, seconds), int(nodes), int(files), int(predicted), took.peak)
