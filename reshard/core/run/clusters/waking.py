"""Wake a scheduler that forgot its queue, and notice that it has no worker any more.

A scheduler looks at its queue when a task is done or a worker is added, but not when a worker is lost (distributed
2026.7.1). If that takes inputs from all tasks of the others, nothing is executed again and a run would wait forever.
"""

from __future__ import annotations

import sys
import threading
import time
import uuid
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any

from reshard.messages import log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WOKEN_AFTER = 5.0
"""Seconds between two tasks that wake the scheduler."""

NO_WORKERS_AFTER = 30.0
"""Seconds without any worker after which a run fails."""


@contextmanager
def kept_awake(client: Any, on_no_workers: Callable[[], object]) -> Iterator[None]:
    """Let the scheduler look at its queue every few seconds, by a task that does nothing; log workers that are lost.

    Args:
        client: a `distributed.Client`.
        on_no_workers: called in another thread, once the cluster has had no worker for `NO_WORKERS_AFTER`.
    """
    ended = threading.Event()
    present: set[str] = set(client.nthreads())

    def look() -> set[str]:
        now = set(client.nthreads(callback_timeout=WOKEN_AFTER))
        for worker in sorted(present - now):
            log().warning("worker %s is lost; its tasks run again on others", worker)
        present.clear()
        present.update(now)
        return now

    def wake() -> None:
        futures: list[Any] = []
        seen = time.monotonic()
        while not ended.wait(min(WOKEN_AFTER, NO_WORKERS_AFTER / 2)):
            with suppress(Exception):  # without a scheduler, the thread that waits for results is told
                futures.clear()  # dask queues tasks of a kind of which it knows many
                futures.append(client.submit(int, key=f"reshard-wake-{uuid.uuid4().hex}"))
                if look():
                    seen = time.monotonic()
                elif time.monotonic() - seen > NO_WORKERS_AFTER:
                    on_no_workers()
                    return

    thread = threading.Thread(target=wake, name="reshard-wake", daemon=True)
    try:
        thread.start()
        yield
    finally:
        ended.set()
        thread.join()
        with suppress(Exception):  # a worker may be lost shortly before the end
            look()


def wake_after_losses() -> None:
    """In a task of a worker, let the scheduler look at its queue whenever it loses a worker; elsewhere do nothing.

    For graphs that dask computes itself, so that no client of this program waits for them.
    """
    distributed = sys.modules.get("distributed")
    if distributed is not None:
        with suppress(Exception):  # this is no worker, or its scheduler takes no plugins
            _register(distributed.get_worker().scheduler.address)


@cache
def _register(_scheduler: str) -> None:
    """Add a plugin to the scheduler of this worker, unless another worker has."""
    from distributed import SchedulerPlugin, get_client

    class Waking(SchedulerPlugin):  # type: ignore[misc]  # distributed has no types; local, so pickled by value
        name = "reshard-waking"
        idempotent = True

        def remove_worker(self, scheduler: Any, _worker: str = "", *, stimulus_id: str, **_options: Any) -> None:
            scheduler.stimulus_queue_slots_maybe_opened(stimulus_id=stimulus_id)

    get_client().register_plugin(Waking())
