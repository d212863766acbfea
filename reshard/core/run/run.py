"""Run a plan on threads of this machine, or on a dask cluster.

A target file gets its final name once all files of the run are complete; at URLs, once it is complete itself. A failed
run leaves only files from which the next run can resume (`core.run.state.session`).
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from reshard import environment
from reshard.core.records.logs import DIRECTORY
from reshard.core.run.bound import Bound, bind
from reshard.core.run.clusters.where import located
from reshard.core.run.clusters.workers import check_workers
from reshard.core.run.executor import execute
from reshard.core.run.graph import Graph
from reshard.core.run.prefetch import Prefetch
from reshard.core.run.settings import Progress, Receipt, Report, TaskOptions, peak_memory, report_of, uncounted_memory
from reshard.core.run.state.session import Session
from reshard.core.run.state.sums import Checksums
from reshard.core.run.state.unchanged import changed_sources, check_sources
from reshard.core.run.tasks import drop_sources
from reshard.core.storage.cipher import store_of
from reshard.core.storage.local import local_store
from reshard.core.storage.places import any_store, can
from reshard.core.storage.threads import processor_count
from reshard.core.storage.urls.pool import pool

if TYPE_CHECKING:
    from collections.abc import Callable

    from reshard.core.plan.plan import Plan
    from reshard.core.run.clusters.where import Where
    from reshard.core.run.settings import RunOptions
    from reshard.core.storage.places import AnyName


def run(
    plan: Plan,
    directory: AnyName,
    options: RunOptions,
    *,
    progress: Callable[[Progress], None] | None = None,
) -> Report:
    """Write the target files of a plan; see `reshard.Plan.run`."""
    return run_bound(bind(plan, directory, options), options, progress=progress)


def run_bound(bound: Bound, options: RunOptions, *, progress: Callable[[Progress], None] | None = None) -> Report:
    """Write the target files of a plan that is bound to its target."""
    with located(options.client, options.threads) as where:
        return _run(bound, options, where, progress)


def _run(bound: Bound, options: RunOptions, where: Where, progress: Callable[[Progress], None] | None) -> Report:
    began = time.perf_counter()
    plan, root, older = bound
    uncounted = uncounted_memory(plan)
    check_sources(plan, None)
    local_store().drop_glances({file.path for file in plan.source.files})
    threads = (
        0 if where.is_synchronous else min(environment.threads(options.threads) or processor_count(), plan.threads)
    )
    drop_cache = options.drop_cache
    if drop_cache is None:
        drop_cache = plan.stats.bytes_read + plan.stats.target_bytes > _memory()
    cached = "" if where.client is None else check_workers(plan, root, where.client)
    ran_on = where.text(threads)
    session = Session(plan, root, options, threads=threads, older=older)
    checksums = options.fsync and options.ledger if options.checksums is None else options.checksums
    # Encoded and encrypted files have other bytes on the disk; of linked files no bytes are written.
    checksums = checksums and not (plan.coding or plan.cipher or plan.linked)
    task_options = TaskOptions(
        options.fsync,
        drop_cache,
        multi_process=where.is_elsewhere,
        checksums=checksums,
        cached=cached,
        sentinel=_lock_of(root) if where.client is not None else "",
    )
    reporter = _Reporter(plan.stats.bytes_written, progress, began, session)
    try:
        reporter.begin()
        graph = Graph(session.plan, root, _with_prefetch(task_options, session.plan, threads))
        made = None
        if graph.has_arrays:  # chunks that are computed while files are created would fill the memory
            made = execute(graph.creating(), graph.created, graph.run, threads, reporter.add, where)
        receipts = execute(graph.work(made), graph.ready, graph.run, threads, reporter.add, where)
        if where.is_elsewhere:
            check_sources(graph.plan, None)  # other processes may have missed a change
        receipts = execute(graph.closing(receipts), graph.closed, graph.run, threads, reporter.add)
        session.complete()
        receipts = execute(graph.naming(receipts), graph.key, graph.run, threads, reporter.add)
        sums = Checksums(plan, root) if options.ledger and checksums and plan.shape != "store" else None
        if sums is not None and plan.shape == "file":
            sums.load()  # before the ledger is removed
        session.finished()
    except BaseException as error:
        session.failed(error, changed_sources(plan))
        raise
    finally:
        session.close()
        # Evict bytes that were read ahead and not used; on a cluster, tasks evict the source files themselves.
        drop_sources(plan, plan.transfers if drop_cache and where.client is None else (), any_store())
        local_store().close()
        store_of(plan.source.coding).close()
        pool.reset()
    report = report_of(plan, root, receipts, time.perf_counter() - began, peak_memory(uncounted))
    return report._replace(
        resumed=session.resumed + sum(receipt.bytes_kept for receipt in receipts),
        finished=sum(file.done for file in session.plan.files),
        touched=session.touched,
        checksums=sums,
        removed=session.removed,
        warnings=plan.warnings,
        bytes_copied=sum(receipt.bytes_copied for receipt in receipts),
        ran_on=ran_on,
    )


def _with_prefetch(options: TaskOptions, plan: Plan, threads: int) -> TaskOptions:
    """Let tasks prefetch, unless they evict whole files, or another machine may do the later task."""
    if options.drop_cache or options.multi_process:
        return options
    return options._replace(prefetch=Prefetch(plan, threads))


def _memory() -> int:
    """Return the memory of the machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


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
        written = receipt.bytes_written + receipt.bytes_copied + receipt.bytes_kept
        self.written = min(self.written + written, self.total)  # headers and bytes that are sent twice do not count
        self._tell()

    def _tell(self) -> None:
        if self.progress is not None:
            seconds = time.perf_counter() - self.began
            self.progress(Progress(self.written, self.total, seconds, self.session.resumed))
