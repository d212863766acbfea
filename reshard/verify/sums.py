"""Checksums of ranges of files: each byte is read once, on some threads, wherever the files are."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar

from reshard.errors import UsageError
from reshard.formats.entries import wants
from reshard.plan import budget
from reshard.run.engine import scratch
from reshard.storage.crc import combine_ranges, crc32c
from reshard.storage.places import any_store, in_batches
from reshard.storage.threads import run_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

    from reshard.formats.entries import Runs
    from reshard.storage.base import ReadStore, Want

K = TypeVar("K", bound="Hashable")

_Range = tuple[K, str, "Runs", int, int]
"""What it is part of, the file, where that is in it; and where the range begins among the contents, and its bytes."""


def thread_count(threads: int | None) -> int:
    """Return how many threads there are: by default one for each available processor, at most `budget.THREADS`."""
    if threads is None:
        return min(len(os.sched_getaffinity(0)), budget.THREADS)
    if threads < 1:
        raise UsageError(f"{threads} threads are asked for; expected at least 1")
    return threads


def sum_contents(
    wanted: Iterable[tuple[K, str, Runs]], *, threads: int, on_progress: Callable[[int, int], object] | None = None
) -> tuple[dict[K, int], int]:
    """Return the CRC-32C of some contents of files, and how many bytes were read.

    Args:
        wanted: a key, each once, the file and where in it the contents are; near each other those that are so in a
            file.
        threads: how many read.
        on_progress: called with the bytes read and the bytes to be read.

    Raises:
        SourceError: a file cannot be read, or is shorter than was said.
    """
    tasks: list[list[_Range[K]]] = [[]]
    found: dict[K, list[tuple[int, int, int]]] = {}
    room = budget.TASK_BYTES
    total = read = 0
    for key, path, runs in wanted:
        found[key] = []
        nbytes = sum(length for _, length in runs)
        for begin in range(0, nbytes, budget.TASK_BYTES):
            length = min(budget.TASK_BYTES, nbytes - begin)
            if length > room:
                tasks.append([])
                room = budget.TASK_BYTES
            tasks[-1].append((key, path, runs, begin, length))
            room -= length
        total += nbytes

    def add(summed: list[tuple[K, int, int, int]]) -> None:
        nonlocal read
        for key, *one in summed:
            found[key].append((one[0], one[1], one[2]))
            read += one[1]
        if on_progress is not None:
            on_progress(read, total)

    try:
        run_threads(_summed, tasks, threads, add)
    finally:
        any_store().close()
    return {key: combine_ranges(some) for key, some in found.items()}, read


def _summed(task: Sequence[_Range[K]]) -> list[tuple[K, int, int, int]]:
    """Return where each range begins, its bytes and its sum."""
    sums = [0] * len(task)
    for number, band in in_batches(_bands(task)):
        sums[number] = crc32c(band, sums[number])
    return [(key, begin, nbytes, value) for (key, _, _, begin, nbytes), value in zip(task, sums, strict=True)]


def _bands(task: Sequence[_Range[K]]) -> Iterator[tuple[tuple[int, memoryview], ReadStore, list[Want]]]:
    """Yield what is read in turn: some bytes of a range, with its number."""
    for number, (_, path, runs, begin, nbytes) in enumerate(task):
        for start in range(begin, begin + nbytes, budget.BAND_BYTES):
            band = scratch(min(budget.BAND_BYTES, begin + nbytes - start))
            yield (number, band), any_store(), wants(path, runs, start, band)
