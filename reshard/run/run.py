"""Run a plan on threads of this machine, or on a dask cluster.

A target file gets its final name once all files of the run are complete; at URLs, once it is complete itself. A failed
run leaves only files from which the next run can resume (`run.session`).
"""

from __future__ import annotations

import os
import resource
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from reshard.errors import names
from reshard.plan.partition import partitioned
from reshard.run.beside import refuse_other_ranks
from reshard.run.executor import check_workers, execute
from reshard.run.graph import Graph
from reshard.run.ledger import Checksums
from reshard.run.preflight import changed_sources, check_sources, check_target
from reshard.run.session import Session, older_at
from reshard.run.settings import Progress
from reshard.run.tasks import Receipt, TaskOptions, drop_sources
from reshard.source.records import DIRECTORY
from reshard.storage.cipher import store_of
from reshard.storage.local import local_store
from reshard.storage.places import any_store, as_place, can
from reshard.upward import upward

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reshard.plan.plan import Plan
    from reshard.run.settings import RunOptions
    from reshard.storage.places import AnyName
    from reshard.verify.manifest import Manifest


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
        peak_memory: peak resident memory of this process since its start, in bytes; excludes workers of a cluster.
        resumed: bytes of contents that an earlier run had written; not included in `bytes_written`.
        finished: number of files that an earlier run had finished; they were not read again, and have the size and time
            in its records.
        touched: number of finished files for which the source files had the same size and time but otherwise another
            state than now: they may have been changed since, or copied, linked, or given to another user.
        checksums: target file to tensor to the CRC-32C of its bytes; None if none were computed.
        removed: files of earlier runs that `overwrite` or `restart` removed.
        warnings: warnings of the plan, and of `convert` about other files in the target directory.
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

    def manifest(self) -> Manifest:
        """Return the manifest of the target files, without reading them if possible.

        It equals the result of `reshard.make_manifest`. Checksums are from the ledger, including the records of earlier
        runs; a block without a checksum is read.

        Raises:
            UsageError: there are no checksums: the run had them or the ledger disabled, wrote a zarr store, or encoded
                or encrypted the files.
            SourceError: a block without a checksum cannot be read.
        """
        manifest: Manifest = upward("manifest_of")(self)
        return manifest

    def write_manifest(self, path: AnyName, *, overwrite: bool = False) -> int:
        """Write the manifest file by file, like `reshard.write_manifest`.

        Returns:
            the number of checksums in it.

        Raises:
            TargetError: the path exists, cannot be written, or is a target file or a source file.
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
    options: RunOptions,
    *,
    progress: Callable[[Progress], None] | None = None,
) -> Report:
    """Write the target files of a plan; see `reshard.Plan.run`."""
    began = time.perf_counter()
    root = str(as_place(directory).real())
    plan = partitioned(plan, options.partition, root)
    removes = options.ledger and options.starts_over
    older = older_at(plan, root) if removes else {}
    check_target(plan, root, older)
    if removes:
        refuse_other_ranks(plan, root, older)
    check_sources(plan, None)
    local_store().drop_glances({file.path for file in plan.source.files})
    client, get = options.client, options.scheduler if callable(options.scheduler) else None
    threads = _threads(options, plan.threads)
    drop_cache = options.drop_cache
    if drop_cache is None:
        drop_cache = plan.stats.bytes_read + plan.stats.target_bytes > _memory()
    cached = "" if client is None else check_workers(plan, root, client)
    session = Session(plan, root, options, threads=threads, older=older)
    checksums = options.fsync and options.ledger if options.checksums is None else options.checksums
    # Encoded and encrypted files have other bytes on the disk; of linked files no bytes are written.
    checksums = checksums and not (plan.coding or plan.cipher or plan.linked)
    task_options = TaskOptions(
        options.fsync,
        drop_cache,
        multi_process=client is not None or get is not None,
        checksums=checksums,
        cached=cached,
        sentinel=_lock_of(root) if client else "",
    )
    reporter = _Reporter(plan.stats.bytes_written, progress, began, session)
    try:
        reporter.begin()
        graph = Graph(session.plan, root, task_options)
        receipts = execute(graph.work(), graph.ready, graph.run, threads, reporter.add, client=client, get=get)
        if client is not None or get is not None:
            check_sources(graph.plan, None)  # other processes may have missed a change
        receipts = execute(graph.closing(receipts), graph.closed, graph.run, threads, reporter.add)
        session.complete()
        receipts = execute(graph.naming(receipts), graph.key, graph.run, threads, reporter.add)
        sums = Checksums(plan, root) if options.ledger and checksums and not plan.exclusive else None
        if sums is not None and plan.alone:
            sums.load()  # before the ledger is removed
        session.finished()
    except BaseException as error:
        session.failed(error, changed_sources(plan))
        raise
    finally:
        session.close()
        # Evict bytes that were read ahead and not used; on a cluster, tasks evict the source files themselves.
        drop_sources(plan, plan.transfers if drop_cache and client is None else (), any_store())
        local_store().close()
        store_of(plan.source.coding).close()
    report = report_of(plan, root, receipts, time.perf_counter() - began)
    return report._replace(
        resumed=session.resumed,
        finished=sum(file.done for file in session.plan.files),
        touched=session.touched,
        checksums=sums,
        removed=session.removed,
        warnings=plan.warnings,
    )


def report_of(plan: Plan, root: str, receipts: Sequence[Receipt], seconds: float) -> Report:
    """Return the report of a run that resumed nothing."""
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


def _threads(options: RunOptions, most: int) -> int:
    """Return the number of threads; 0 means the calling thread."""
    if options.scheduler == "synchronous":
        return 0
    return min(options.threads or len(os.sched_getaffinity(0)), most)


def _memory() -> int:
    """Return the memory of the machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _peak_memory() -> int:
    """Return the peak resident memory of this process, in bytes.

    This is VmHWM on Linux, else `ru_maxrss`, which starts at the peak of the parent process.
    """
    with suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _lock_of(root: str) -> str:
    """Return the path of the lock in a target directory, or "" if it has none."""
    lock = f"{root}/{DIRECTORY}/lock"
    return lock if can(root).positioned and os.path.exists(lock) else ""


class _Reporter:
    """Adds up receipts as they arrive, and reports progress."""

    def __init__(self, total: int, progress: Callable[[Progress], None] | None, began: float, session: Session) -> None:
        self.total, self.progress, self.began, self.session = total, progress, began, session
        self.written = session.resumed

    def begin(self) -> None:
        """Report the bytes of an earlier run, unless all are written."""
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
