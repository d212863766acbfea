"""Check the workers of a cluster before a run, and settle them after it."""

from __future__ import annotations

import os
import signal
import uuid
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from reshard.core.run.clusters.carried import WithArrays, carries_arrays
from reshard.core.storage.page_cache import cache_of
from reshard.core.storage.places import any_store, can, workers_at
from reshard.core.storage.threads import live_runs, map_ordered
from reshard.core.storage.urls.s3.options import refuse_on_cluster
from reshard.errors import ReshardError, SourceError, TargetError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reshard.core.plan.plan import Plan

_MOST_LOOKED_AT = 64  # source files that each worker checks before a run; tasks check their own files


def check_workers(plan: Plan, root: str, client: Any) -> str:
    """Reject a cluster whose workers do not all see the same files.

    Returns:
        `page_cache.cache_of` of the target directory, if all workers and this process share it; else "", or if there
        is no worker yet.

    Raises:
        SourceError, TargetError: the worker and the file are named; or an assigned array cannot be sent to workers.
        ReshardError: a worker cannot run this program, or has not the options of a bucket.
    """
    refuse_on_cluster((root, *(file.path for file in plan.source.files)))
    if carries_arrays(plan, by_file=plan.by_file or not can(root).positioned):
        WithArrays(plan)  # raises before anything is written
    files = plan.read_files()
    sampled = [plan.source.files[number] for number in files[:: len(files) // _MOST_LOOKED_AT + 1]]
    expected = [(file.path, (file.nbytes, file.mtime_ns)) for file in sampled]  # machines have only these in common
    with _probe(root) as probe:
        here = cache_of(os.path.dirname(probe)) if probe else ""
        answers = client.run(look, expected, probe, on_error="return")
        for worker, answer in answers.items():
            if isinstance(answer, SourceError | TargetError):
                error = answer.about(f"worker {worker}")
                error.hint = "make the source and the target reachable by the same paths on every worker"
                raise error
            if isinstance(answer, BaseException):
                raise ReshardError(
                    f"worker {worker} cannot run reshard",
                    code="worker-failed",
                    facts=[f"{type(answer).__name__}: {answer}"],
                )
    return here if answers and all(answer == here for answer in answers.values()) else ""


def look(expected: Sequence[tuple[str, tuple[int, int]]], probe: str | None) -> str:
    """Check on a worker that source files and target directory are the same as here.

    Returns:
        `page_cache.cache_of` of the target directory.
    """
    paths = [path for path, _ in expected]
    statuses = map_ordered(any_store().status, paths, workers_at(paths))
    for (path, expected_state), status in zip(expected, statuses, strict=True):
        if status[:2] != expected_state:
            raise SourceError(
                f"{path} is not the file that was opened", code="different-file", facts=["its size or time differs"]
            )
    if probe is not None and not os.path.exists(probe):
        raise TargetError(f"{os.path.dirname(probe)} is another directory there, or none", code="different-directory")
    return cache_of(os.path.dirname(probe)) if probe is not None else ""


@contextmanager
def _probe(root: str) -> Iterator[str | None]:
    """Yield the path of a temporary file in a local target; None for a URL."""
    if not can(root).positioned:
        yield None
        return
    is_new = not os.path.isdir(root)
    path = f"{root}/.reshard-{uuid.uuid4().hex}"
    try:
        os.makedirs(root, exist_ok=True)
        with open(path, "x"):
            pass
    except OSError as error:
        raise TargetError(f"cannot write to {root}: {error.strerror}", code="cannot-write") from None
    try:
        yield path
    except BaseException:
        os.unlink(path)
        if is_new:
            with suppress(OSError):
                os.rmdir(root)
        raise
    os.unlink(path)
    if is_new:
        with suppress(OSError):
            os.rmdir(root)


async def settled(run: str) -> None:
    """Cancel a run on a worker, and wait for its writes, before files are removed."""
    import asyncio

    live_runs.stopped.add(run)
    while live_runs.tasks[run]:
        await asyncio.sleep(0.05)


def ignore_interrupts() -> None:
    """Ignore Ctrl-C on a local worker, since the command handles it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
