"""Plan how files are sent to a URL: how many side by side, with what memory, and in which parts."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

from reshard.core.plan.budget import band_buffers, thread_bytes, times_held
from reshard.core.plan.uploads.copies import can_copy, copies_of, reads_urls, upload_of
from reshard.core.storage.cipher import BLOCK_BYTES
from reshard.core.storage.places import can
from reshard.core.storage.urls.clients import buffering, in_s3
from reshard.core.storage.urls.pool import SLAB_BYTES, pool, shared_bytes
from reshard.core.storage.urls.s3.upload_parts import part_bytes
from reshard.errors import BudgetError, Option, Text, bytes_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reshard.core.plan.budget import Share
    from reshard.core.plan.plan import Plan

STREAMS_AT_ONCE = 16
"""Maximum number of files that a task sends side by side; each buffers a part."""

SENDING_BYTES = 128 << 20
"""The most memory of the parts of files that are sent side by side, unless the memory of a run is given."""

Groups = tuple[tuple[int, ...], ...]
"""The files of each task, by number."""


def with_uploads(
    plan: Plan, directory: str, grouped: Callable[[int], Groups], *, server_copy: bool
) -> tuple[Plan, Groups, tuple[Share, ...]]:
    """Choose the files that are sent side by side, and the threads, to fit in the memory of a plan.

    Args:
        plan: a plan by tensor.
        directory: the URL of the target.
        grouped: returns groups of at most a number of files.
        server_copy: let the store copy bytes that it has, if it can.

    Returns:
        the plan, the files that each task sends, and the additional memory.

    Raises:
        BudgetError: the memory is too little to send one file.
    """
    limit = plan.request.memory if plan.request else None
    library = library_bytes(plan, directory)
    held = times_held([plan.source])
    of_reading = thread_bytes(plan.band_bytes, buffers_of(plan)) + reads_urls(plan) * held * SLAB_BYTES
    reading = held * plan.shared_bytes + min(plan.threads, plan.stats.tasks) * of_reading
    fixed = plan.stats.peak_memory - reading + library
    most = STREAMS_AT_ONCE
    while True:
        groups = grouped(most)
        of_sending = max((_group_bytes(plan, group, directory) for group in groups), default=0)
        for threads in range(max(min(plan.threads, len(groups)), 1), 0, -1):
            sending = threads * of_sending
            needed = fixed + sending + threads * of_reading
            if needed <= limit if limit is not None else sending <= SENDING_BYTES or most == threads == 1:
                shared = shared_bytes(needed, limit) // held
                copies = {}
                if server_copy and can_copy(plan, directory):
                    copies = copies_of(plan, [number for group in groups for number in group])
                more = needed + held * shared - plan.stats.peak_memory
                plan = replace(plan, threads=min(plan.threads, threads), shared_bytes=shared, copies=copies)
                return plan, groups, (("sending", more),)
        if most == 1:
            break
        most //= 2
    raise BudgetError(
        f"{bytes_text(limit or 0)} of memory is not enough", code="not-enough-memory",
        facts=[f"{bytes_text(needed)} is needed to send one file at a time"],
        hint=Text("the least that works is ", Option("memory", needed, f"{ceil(needed / 1e6)}MB")),
    )  # fmt: skip


def _group_bytes(plan: Plan, group: Sequence[int], directory: str) -> int:
    """Return the memory for sending a group of files side by side."""
    block = BLOCK_BYTES if plan.cipher else 0  # buffered until its header is known
    sizes = [plan.size_of(plan.files[number]) for number in group]
    return sum(file_bytes(size, directory) + min(block, size) for size in sizes)


def file_bytes(size: int, directory: str) -> int:
    """Return the memory of the buffers for sending a file of this size, besides the shared buffers."""
    part = -(-part_bytes(size) // SLAB_BYTES) * SLAB_BYTES
    return min(buffering(directory).sent * part, size)


def buffers_of(plan: Plan) -> int:
    """Return how many bands a thread buffers."""
    casts = any(transfer.dtype != transfer.target_dtype for transfer in plan.transfers)
    strided = any(route.is_strided for route in {transfer.route for transfer in plan.transfers})
    return band_buffers(casts=casts, strided=strided)


def extra_bands(plan: Plan, tasks: int) -> int:
    """Return the memory for bands of the threads that become busy with more tasks."""
    threads = min(plan.threads, tasks) - min(plan.threads, plan.stats.tasks)
    return max(threads, 0) * thread_bytes(plan.band_bytes, buffers_of(plan))


def library_bytes(plan: Plan, directory: str) -> int:
    """Return the memory of the target's client library, unless sources need it too."""
    return 0 if reads_urls(plan) else can(directory).library_bytes


def reserve(plan: Plan, directory: str) -> None:
    """Set the memory of the shared buffers for requests of this process, if a plan makes any."""
    reads, sends = reads_urls(plan), not can(directory).positioned
    if reads or sends:
        pool.limit(plan.shared_bytes, reads=reads, sends=sends)


class Requests(NamedTuple):
    """The requests of a run to object stores, by kind; stores charge for them.

    Attributes:
        get: requests for bytes of source files, about.
        put: parts and files that are sent.
        copy: parts, and files that are equal to others, that the store copies.
        post: uploads that are begun and completed.
        other: requests for the states of files, and for listings, about.
    """

    get: int = 0
    put: int = 0
    copy: int = 0
    post: int = 0
    other: int = 0


def requests_of(plan: Plan, directory: str) -> Requests | None:
    """Return the requests of a run of a plan; None if all files are local."""
    remote = sum(can(file.path).has_latency for file in plan.source.files)
    if not (remote or can(directory).has_latency):
        return None
    get = max(remote, ceil(plan.stats.bytes_read / SLAB_BYTES)) if remote else 0
    put = copy = post = 0
    if in_s3(directory):
        for number, file in enumerate(plan.files):
            if file.link is not None:
                copy += 1
                continue
            parts = upload_of(plan, number).parts
            copied = sum(part.copied is not None for part in parts)
            copy += copied
            put += max(len(parts) - copied, not parts)
            post += 2 * (len(parts) > 1 or copied > 0)
    return Requests(get, put, copy, post, 2 * remote + len(plan.files) * can(directory).has_latency + 5)
