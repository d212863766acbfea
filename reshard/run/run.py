"""Running a plan: on this machine's threads, or on a dask cluster.

A target file gets its final name only when every file of the run is complete, or at URLs, when it is complete itself; a
run that fails leaves what the next one can resume from (`run.session`), or else nothing.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.errors import UsageError, names
from reshard.plan.partition import partitioned
from reshard.run.beside import refuse_other_ranks
from reshard.run.executor import check_workers, work_by, work_here, work_on
from reshard.run.graph import Graph
from reshard.run.ledger import Checksums
from reshard.run.preflight import check_target
from reshard.run.session import Session, older_at
from reshard.run.tasks import How, Receipt, changed_sources, check_sources, drop_sources
from reshard.source.records import DIRECTORY
from reshard.storage.cipher import store_of
from reshard.storage.local import local_store
from reshard.storage.places import any_store, as_place, can
from reshard.upward import upward

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reshard.plan.plan import Plan
    from reshard.storage.places import AnyName
    from reshard.verify.manifest import Manifest


class Progress(NamedTuple):
    """How far a run is.

    Attributes:
        written: bytes of contents that are written, by this run or an earlier one.
        total: of how many.
        seconds: since this run began.
        resumed: those of `written` that an earlier run wrote; they tell nothing of how fast this one is.
    """

    written: int
    total: int
    seconds: float
    resumed: int = 0


class Report(NamedTuple):
    """What a run did.

    Attributes:
        directory: where the target files are.
        files: their paths below it.
        bytes_read: bytes of contents read.
        bytes_written: bytes of contents written, replicas included.
        seconds: the whole run, from its first check to the last file's name.
        receipts: what each task did.
        tensors: how many distinct tensors were moved.
        source_files: how many files were read.
        target_bytes: size of all files written, headers included.
        replicas: blocks written for one more rank, beyond the first that got them.
        links: how many of the files are links to another one.
        dropped: names in the source that the target does not have.
        missing: names in the target that the source does not have.
        peak_memory: the most resident memory that this process had since it began, in bytes; the workers of a cluster
            are other processes.
        resumed: bytes of contents that an earlier run had written; not among `bytes_written`.
        finished: how many of the files an earlier run had finished; they were not read again, and their size and time
            are as it noted them.
        touched: how many of those when anything of the source files but size and time was not as it is now: they may
            have been changed since, or copied, linked, or given to another user.
        checksums: target file to tensor to the CRC-32C of its bytes there; None where none were made.
        removed: files of earlier runs that were removed, because `overwrite` or `restart` was asked for.
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

    def manifest(self) -> Manifest:
        """Return the manifest of the target files, as `reshard.make_manifest` would by reading them.

        Its checksums are those of the receipts, also where earlier runs wrote; a block that is without one is read.

        Raises:
            UsageError: there are no checksums: of a run without them or without a ledger, into a zarr store, or of
                files that are encoded or encrypted.
            SourceError: a block must be read for its sum, and cannot be.
        """
        made: Manifest = upward("manifest_of")(self)
        return made

    def write_manifest(self, path: AnyName, *, overwrite: bool = False) -> int:
        """Write the manifest of the target files as `reshard.write_manifest` does, file by file, in little memory.

        Returns:
            how many checksums it has.

        Raises:
            TargetError: it exists, cannot be written, or is a target file or a source file.
            UsageError, SourceError: as for `manifest`.
        """
        written: int = upward("manifest_of")(self, path, overwrite=overwrite)
        return written

    def __repr__(self) -> str:
        return (
            f"<Report: {len(self.files)} files in {names([self.directory])}, {self.bytes_read} bytes read, "
            f"{self.bytes_written} written, {self.seconds:.2f} s>"
        )

    def _repr_html_(self) -> str:
        return str(upward("html")(self))


def run(
    plan: Plan,
    directory: AnyName,
    *,
    client: Any = None,
    scheduler: str | Callable[..., Any] | None = None,
    threads: int | None = None,
    fsync: bool = True,
    drop_cache: bool | None = None,
    overwrite: bool = False,
    restart: bool = False,
    checksums: bool | None = None,
    ledger: bool = True,
    partition: str | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Report:
    """Write the target files of a plan: `reshard.Plan.run` describes the options and errors."""
    began = time.perf_counter()
    if isinstance(client, str):
        raise UsageError(
            f"client is {client!r}; expected a distributed.Client",
            code="wrong-type",
            hint=f"pass client=distributed.Client({client!r})",
        )
    target = as_place(directory)
    root = str(target.real())
    plan = partitioned(plan, partition, root)
    older = older_at(plan, root) if ledger and (overwrite or restart) else {}
    check_target(plan, root, older)
    if ledger and (overwrite or restart):
        refuse_other_ranks(plan, root, older)
    check_sources(plan, None)
    local_store().drop_glances({file.path for file in plan.source.files})
    get = _scheduler(scheduler, client)
    threads = _threads(threads, scheduler, plan.threads)
    if drop_cache is None:
        drop_cache = plan.stats.bytes_read + plan.stats.target_bytes > _memory()
    cached = ""
    if client is not None:
        cached = check_workers(plan, root, client)
    session = Session(
        plan, root, overwrite=overwrite, restart=restart, threads=threads, fsync=fsync, ledger=ledger, older=older
    )
    if checksums is None:
        checksums = fsync and ledger
    checksums = checksums and not (plan.coding or plan.cipher or plan.linked)  # on the disk are others, or none new
    how = How(
        fsync,
        drop_cache,
        apart=client is not None or get is not None,
        checksums=checksums,
        cached=cached,
        seen=_lock_of(root) if client else "",
    )
    reporter = _Reporter(plan.stats.bytes_written, progress, began, session)
    try:
        reporter.begin()
        graph = Graph(session.plan, root, how)
        receipts = _work(graph, client, get, threads, reporter)
        receipts = work_here(graph.closing(receipts), graph.closed, graph.run, threads, reporter.add)
        session.complete()
        receipts = work_here(graph.naming(receipts), graph.key, graph.run, threads, reporter.add)
        sums = Checksums(plan, root) if ledger and checksums and not plan.exclusive else None
        if sums is not None and plan.alone:
            sums.load()  # before the ledger goes
        session.finished()
    except BaseException as error:
        session.failed(error, changed_sources(plan))
        raise
    finally:
        session.close()
        # What was read ahead, and nobody read; on a cluster tasks leave nothing of a file.
        drop_sources(plan, plan.moves if drop_cache and client is None else (), any_store())
        local_store().close()
        store_of(plan.source.coding).close()
    report = report_of(plan, root, receipts, time.perf_counter() - began)
    return report._replace(
        resumed=session.resumed,
        finished=sum(file.done for file in session.plan.files),
        touched=session.touched,
        checksums=sums,
        removed=session.removed,
    )


def _work(
    graph: Graph, client: Any, get: Callable[..., Any] | None, threads: int, reporter: _Reporter
) -> Sequence[Receipt]:
    """Make the files and fill them; return the receipts."""
    if client is not None:
        receipts = work_on(client, graph, reporter.add)
    elif get is not None:
        receipts = work_by(get, graph, reporter.add)
    else:
        return work_here(graph.work(), graph.ready, graph.run, threads, reporter.add)
    check_sources(graph.plan, None)  # what other processes did not see
    return receipts


def report_of(plan: Plan, root: str, receipts: Sequence[Receipt], seconds: float) -> Report:
    """Return the report of a run that began with nothing in the target."""
    return Report(
        root,
        tuple(file.path for file in plan.files),
        sum(receipt.read for receipt in receipts),
        sum(receipt.written for receipt in receipts),
        seconds,
        tuple(receipts),
        plan.stats.tensors,
        plan.stats.source_files,
        plan.stats.target_bytes,
        plan.replicas,
        sum(file.link is not None for file in plan.files),
        plan.dropped,
        plan.missing,
        _peak_memory(),
    )


def _scheduler(scheduler: str | Callable[..., Any] | None, client: Any) -> Callable[..., Any] | None:
    """Return the function that does the work, if one is given."""
    if not callable(scheduler):
        return None
    if client is not None:
        raise UsageError("a client is a scheduler, and another is given", code="two-schedulers")
    return scheduler


def _threads(threads: int | None, scheduler: object, most: int) -> int:
    """Return how many threads do the work; 0 for the one that calls."""
    if threads is None:
        threads = len(os.sched_getaffinity(0))
    if threads < 1:
        raise UsageError(f"threads is {threads}; expected at least 1", code="out-of-range")
    threads = min(threads, most)
    if not callable(scheduler) and scheduler not in {None, "threads", "synchronous"}:
        raise UsageError(f"scheduler is {scheduler!r}; expected 'threads' or 'synchronous'", code="unknown-scheduler")
    return 0 if scheduler == "synchronous" else threads


def _memory() -> int:
    """Return the machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _peak_memory() -> int:
    """Return the most resident memory of this process so far, in bytes.

    It is Linux's VmHWM; elsewhere `ru_maxrss`, which begins with the peak of the process that started this one.
    """
    with suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _lock_of(root: str) -> str:
    """Return the path of the lock in a target directory; empty if there is none, as at a URL."""
    lock = f"{root}/{DIRECTORY}/lock"
    return lock if can(root).positioned and os.path.exists(lock) else ""


class _Reporter:
    """Adds up receipts as they come, and calls back."""

    def __init__(self, total: int, progress: Callable[[Progress], None] | None, began: float, session: Session) -> None:
        self.total, self.progress, self.began, self.session = total, progress, began, session
        self.written = session.resumed

    def begin(self) -> None:
        """Tell what an earlier run wrote, if anything is left to do."""
        if 0 < self.written < self.total:
            self._tell()

    def add(self, receipt: Receipt) -> None:
        self.session.note(receipt)
        self.written += receipt.written
        self._tell()

    def _tell(self) -> None:
        if self.progress is not None:
            seconds = time.perf_counter() - self.began
            self.progress(Progress(self.written, self.total, seconds, self.session.resumed))
