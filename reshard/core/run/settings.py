"""The options of a run and of its tasks, their receipts, its progress and its report.

The module imports little, since the help of the command line needs it.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from array import array
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec

from reshard.errors import UsageError, names
from reshard.sizes import counted
from reshard.upward import upward

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reshard.core.plan.plan import Plan
    from reshard.core.run.prefetch import Prefetch
    from reshard.core.storage.places import AnyName
    from reshard.core.verify.manifest import Manifest
    from reshard.view.svg import Picture

P = ParamSpec("P")

_LOG_HEAD, _LOG_FILE, _LOG_RANGE, _MOST_LOG = 4 << 10, 512, 100, 64 << 20

_HOST = os.uname().nodename


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The values of the options of a run, as `reshard.Plan.run` describes them, and the words of the command.

    Raises:
        UsageError: a value is not valid, or two contradict each other.
    """

    client: Any = None
    threads: int | None = None
    fsync: bool = True
    drop_cache: bool | None = None
    overwrite: bool = False
    restart: bool = False
    checksums: bool | None = None
    ledger: bool = True
    partition: str | None = None
    server_copy: bool = True
    command: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise UsageError(f"threads is {self.threads}; expected at least 1", code="out-of-range")

    @property
    def starts_over(self) -> bool:
        """Whether files of earlier runs are replaced, and removed if this run does not write them."""
        return self.overwrite or self.restart


class TaskOptions(NamedTuple):
    """Options of the tasks of a graph.

    Attributes:
        fsync: sync every file to the disk before it gets its name.
        drop_cache: evict source and target files from the page cache.
        multi_process: the tasks may run in several processes.
        prefetch: the source ranges that each task prefetches for a later one.
        checksums: compute CRC-32C sums of the written bytes.
        crcs: compute CRC-32 sums as well, because target files contain such sums; set by the graph.
        cached: `page_cache.cache_of` of the target, if all processes share it: files are then synced once when all is
            written, as by one process, and not by every task that wrote into them.
        run: the identifier of the run; set by the graph.
        sentinel: a file in the target directory that every writing process must see; empty if there is none.
        wakes: dask computes the graph itself, so its tasks see to it that a scheduler which loses a worker goes on.
    """

    fsync: bool = True
    drop_cache: bool = False
    multi_process: bool = False
    prefetch: Prefetch | None = None
    checksums: bool = False
    crcs: bool = False
    cached: str = ""
    run: str = ""
    sentinel: str = ""
    wakes: bool = False


class Progress(NamedTuple):
    """The progress of a run.

    Attributes:
        written: bytes of contents written so far, by this run or an earlier one.
        total: bytes of contents to be written in total.
        seconds: seconds since this run began.
        resumed: bytes in `written` from an earlier run; do not count them in the speed of this run.

    >>> source = reshard.open("src_checkpoints", strategy="src_strategy.ckpt")
    >>> events = []
    >>> report = reshard.plan(source).run("whole", progress=events.append)
    >>> events[-1].written == events[-1].total
    True
    """

    written: int
    total: int
    seconds: float
    resumed: int = 0


class Receipt(NamedTuple):
    """The result of a task.

    Attributes:
        task: `create`, `move`, `close`, `commit` or (for whole files) `files`, with a number.
        bytes_read, bytes_written: bytes of contents.
        seconds: duration of the task.
        crc32c_ranges, crc32_ranges: the ranges that were written, as in `engine.Moved`.
        file_ranges: the ranges that a task of whole files wrote: file number, begin, bytes and CRC-32C of each.
        ready: the complete files: number, size, and time or version.
        bytes_copied: bytes of files that the store copied from source files; not included in the other numbers.
        bytes_kept: bytes of files that an earlier run had sent.
        began: when the task began, in seconds since 1970 by the clock of its machine.
        worker: the machine, process and thread that executed it, as `HOST:PID THREAD`.
    """

    task: str
    bytes_read: int
    bytes_written: int
    seconds: float = 0.0
    crc32c_ranges: array[int] = array("Q")
    crc32_ranges: array[int] = array("Q")
    file_ranges: array[int] = array("Q")
    ready: tuple[tuple[int, int, int], ...] = ()
    bytes_copied: int = 0
    bytes_kept: int = 0
    began: float = 0.0
    worker: str = ""


def timed(task: Callable[P, Receipt]) -> Callable[P, Receipt]:
    """Wrap a task so that its receipt says when it ran, for how long, and where."""

    @wraps(task)
    def run(*args: P.args, **kwargs: P.kwargs) -> Receipt:
        began, clock = time.time(), time.perf_counter()
        receipt = task(*args, **kwargs)
        seconds = time.perf_counter() - clock
        worker = sys.intern(f"{process_name()} {threading.current_thread().name}")
        return receipt._replace(seconds=seconds, began=began, worker=worker)

    return run


class Report(NamedTuple):
    """The result of a run.

    Attributes:
        directory: the target directory.
        files: paths of the target files below it.
        bytes_read: bytes of contents read.
        bytes_written: bytes of contents written, replicas included.
        seconds: duration of the run, from the first check until the last file has its name.
        receipts: the receipts of all tasks.
        tensors: number of distinct tensors moved.
        source_files: number of files read.
        target_bytes: size of all files written, headers included.
        replicas: number of blocks written again for further ranks.
        links: number of files that are links to another file.
        dropped: names in the source that the target does not have.
        missing: names in the target that the source does not have.
        peak_memory: peak resident memory of this process in bytes, to be compared with `predicted_memory`: without what
            else it held when the run began, such as other objects of a notebook. Excludes workers of a cluster; 0 if
            a cluster computed the report, as it does for `Plan.graph`.
        resumed: bytes of contents that an earlier run had written; not included in `bytes_written`.
        finished: number of files that an earlier run had finished; they were not read again, and have the size and time
            in its records.
        touched: number of finished files for which the source files had the same size and time but otherwise another
            state than now: they may have been changed since, or copied, linked, or given to another user.
        checksums: target file to tensor to the CRC-32C of its bytes; None if none were computed.
        removed: files of earlier runs that `overwrite` or `restart` removed.
        warnings: warnings of the plan, and of `convert` about other files in the target directory.
        bytes_copied: bytes of the target files that their store copied from source files; they were not read here, and
            not included in `bytes_written`.
        predicted_memory: the peak that the plan predicted, in bytes.
        ran_on: where the tasks ran, such as `4 threads` or `cluster tcp://10.0.0.1:8786 (2 workers, 8 threads)`.

    >>> source = reshard.open("src_checkpoints", strategy="src_strategy.ckpt")
    >>> report = reshard.plan(source, "dst_strategy.ckpt").run("dst")
    >>> report.tensors, report.bytes_read, report.files[0]
    (15, 14924, 'rank_0/checkpoint_0.ckpt')
    """

    directory: str
    files: tuple[str, ...]
    bytes_read: int
    bytes_written: int
    seconds: float
    receipts: tuple[Receipt, ...]
    tensors: int
    source_files: int
    target_bytes: int
    replicas: int
    links: int
    dropped: tuple[str, ...]
    missing: tuple[str, ...]
    peak_memory: int
    resumed: int = 0
    finished: int = 0
    touched: int = 0
    checksums: Mapping[str, Mapping[str, int]] | None = None
    removed: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    bytes_copied: int = 0
    predicted_memory: int = 0
    ran_on: str = ""

    def manifest(self) -> Manifest:
        """Return the manifest of the target files, without reading them if possible.

        It equals the result of `reshard.Manifest.make`. Checksums are from the ledger, including the records of earlier
        runs; a block without a checksum is read.

        Raises:
            UsageError: there are no checksums: the run had them or the ledger disabled, wrote a zarr store, or encoded
                or encrypted the files.
            SourceError: a block without a checksum cannot be read.
        """
        manifest: Manifest = upward("manifest_of")(self)
        return manifest

    def write_manifest(self, path: AnyName, *, overwrite: bool = False) -> int:
        """Write the manifest file by file, like `reshard.Manifest.write`.

        Returns:
            the number of checksums in it.

        Raises:
            TargetError: the path exists, cannot be written, or is a target file or a source file.
            UsageError, SourceError: as for `manifest`.
        """
        written: int = upward("manifest_of")(self, path, overwrite=overwrite)
        return written

    def task_stream(self) -> Picture:
        """Draw which thread did what when: a box for each task, with the bytes that it read and wrote.

        A notebook shows the picture; `save` writes it to a file. On a cluster, a row is a thread of a process.
        """
        picture: Picture = upward("picture")(self)
        return picture

    def __repr__(self) -> str:
        return (
            f"<Report: {counted(len(self.files), 'file')} in {names([self.directory])}, {self.bytes_read} bytes read, "
            f"{self.bytes_written} written, {self.seconds:.2f} s>"
        )

    def _repr_html_(self) -> str:
        return str(upward("html")(self))


def report_of(plan: Plan, root: str, receipts: Sequence[Receipt], seconds: float, peak: int) -> Report:
    """Return the report of a run that resumed nothing."""
    return Report(
        root,
        tuple(file.path for file in plan.files),
        sum(receipt.bytes_read for receipt in receipts),
        sum(receipt.bytes_written for receipt in receipts),
        seconds,
        tuple(receipts),
        plan.stats.tensors,
        plan.stats.source_files,
        plan.stats.target_bytes,
        plan.replicas,
        sum(file.link is not None for file in plan.files),
        plan.dropped,
        plan.missing,
        peak,
        predicted_memory=plan.stats.peak_memory,
    )


def process_name() -> str:
    """Return the name of this process in receipts, `HOST:PID`."""
    return f"{_HOST}:{os.getpid()}"


def ledger_bytes(plan: Plan) -> int:
    """Return about how many bytes the log of a run takes: a few lines a file, and a range for each block of a task."""
    blocks = {transfer.route: sum(map(len, transfer.route.writes)) for transfer in plan.transfers}
    ranges = sum(blocks[plan.transfers[piece.transfer].route] for task in plan.tasks for piece in task.pieces)
    ranges += sum(len(file.layout.contents) for file in plan.files) if plan.by_file else 0
    return min(_MOST_LOG, _LOG_HEAD + _LOG_FILE * len(plan.files) + _LOG_RANGE * ranges)


def uncounted_memory(plan: Plan) -> int:
    """Return the resident bytes of this process that a plan does not count, at the beginning of its run.

    A plan predicts the peak of a process that does nothing else; a notebook may hold much more, or may have held it.
    If there are such bytes, or the process once held more than was predicted, the record of its peak begins again.
    """
    from reshard.core.plan.budget import HELD_BEFORE  # no help of a command needs it

    counted = sum(nbytes for purpose, nbytes in plan.memory if purpose in HELD_BEFORE)
    uncounted = max(_resident("VmRSS") - counted, 0)
    if uncounted or _resident("VmHWM") > plan.stats.peak_memory:
        with suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as peak:
            peak.write("5")  # proc(5): resets the peak resident set size to the current one
    return uncounted


def peak_memory(uncounted: int) -> int:
    """Return the peak resident memory of this process in bytes, without the `uncounted_memory` of its run.

    This is VmHWM on Linux, else `ru_maxrss`, which starts at the peak of the parent process.
    """
    unit = 1 if sys.platform == "darwin" else 1024
    return (_resident("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit) - uncounted


def _resident(key: str) -> int:
    """Return a number of bytes in the status of this process on Linux, else 0."""
    with suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return 0
