"""Compute checksums of ranges of files, with threads or a cluster.

Some files contain checksums of their own contents, which most loaders ignore; `check_carried` checks them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from reshard import environment
from reshard.core.model.entries import wants
from reshard.core.plan import budget
from reshard.core.run.engine import scratch
from reshard.core.run.executor import map_tasks
from reshard.core.storage.cipher import store_of
from reshard.core.storage.crc import CRC32, CRC32C, combine_ranges, crc32_fault, crc32c
from reshard.core.storage.places import in_batches
from reshard.core.storage.threads import map_ordered, processor_count
from reshard.core.verify.difference import Difference
from reshard.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.model.entries import Entry, Runs, Summed
    from reshard.core.run.settings import Progress
    from reshard.core.storage.base import Coding, ReadStore, Want
    from reshard.core.storage.crc import Checksum
    from reshard.core.storage.places import Place

    OnProgress = Callable[[int, int], None]
    """Called with the bytes done and the bytes to be done."""

K = TypeVar("K", bound="Hashable")

_Range = tuple[K, str, "Runs", int, int]
"""The key of the contents, the file, their runs in it; the offset of the range in the contents, and its bytes."""


def thread_count(threads: int | None) -> int:
    """Return the number of threads, by default one per processor up to a limit."""
    threads = environment.threads(threads)
    if threads is None:
        return min(processor_count(), budget.THREADS)
    if threads < 1:
        raise UsageError(f"threads is {threads}; expected at least 1", code="out-of-range")
    return threads


def progress_callback(progress: Callable[[Progress], None] | None, began: float) -> OnProgress:
    """Return a function that reports progress to the callback of a user."""
    if progress is None:
        return lambda _done, _total: None
    from reshard.core.run.settings import Progress  # lazy import: only with a callback

    return lambda done, total: progress(Progress(done, total, time.perf_counter() - began))


def sum_contents(
    wanted: Iterable[tuple[K, str, Runs]],
    *,
    threads: int,
    on_progress: Callable[[int, int], object] | None = None,
    kind: Checksum = CRC32C,
    coding: Coding | None = None,
    client: Any = None,
) -> tuple[dict[K, int], int]:
    """Return checksums of contents of files, and the number of bytes read.

    Args:
        wanted: a unique key, the file and the runs of each content, in about the order of the file.
        threads: number of reading threads.
        on_progress: called with the bytes read and the bytes to be read.
        kind: the kind of checksum.
        coding: decodes or decrypts the bytes of the files.
        client: a `distributed.Client`, whose workers read in place of the threads.

    Raises:
        SourceError: a file cannot be read, or is shorter than its runs.
    """
    tasks: list[list[_Range[K]]] = [[]]
    sums: dict[K, list[tuple[int, int, int]]] = {}
    room = budget.TASK_BYTES
    total = read = 0
    for key, path, runs in wanted:
        sums[key] = []
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
        for key, *span in summed:
            sums[key].append((span[0], span[1], span[2]))
            read += span[1]
        if on_progress is not None:
            on_progress(read, total)

    try:
        map_tasks(_summed, (kind, coding), tasks, threads=threads, client=client, on_result=add)
    finally:
        store_of(coding).close()
    return {key: combine_ranges(ranges, kind.polynomial) for key, ranges in sums.items()}, read


def _summed(options: tuple[Checksum, Coding | None], task: Sequence[_Range[K]]) -> list[tuple[K, int, int, int]]:
    """Return the key, begin, bytes and checksum of each range."""
    kind, coding = options
    sums = [0] * len(task)
    for number, band in in_batches(_bands(task, store_of(coding))):
        sums[number] = kind.extend(band, sums[number])
    return [(key, begin, nbytes, value) for (key, _, _, begin, nbytes), value in zip(task, sums, strict=True)]


def _bands(
    task: Sequence[_Range[K]], store: ReadStore
) -> Iterator[tuple[tuple[int, memoryview], ReadStore, list[Want]]]:
    """Yield bands of each range, with its number, store and read requests."""
    for number, (_, path, runs, begin, nbytes) in enumerate(task):
        for start in range(begin, begin + nbytes, budget.BAND_BYTES):
            band = scratch(min(budget.BAND_BYTES, begin + nbytes - start))
            yield (number, band), store, wants(path, runs, start, band)


class SumsChecked(NamedTuple):
    """The result of comparing files with the checksums that they contain.

    Attributes:
        differences: contents with a wrong checksum, and contradictions within a file.
        nbytes: number of bytes that checksums cover, including headers.
        rest: number of bytes that are not covered.
        bare: names of contents that could have checksums, but have none.
    """

    differences: tuple[Difference, ...]
    nbytes: int
    rest: int
    bare: tuple[str, ...]


def check_carried(
    target: Checkpoint, *, threads: int, on_progress: Callable[[int, int], object], client: Any = None
) -> SumsChecked:
    """Compare files with the checksums that they contain; skip contents without any.

    Args:
        target: the checkpoint.
        threads: number of reading threads.
        on_progress: called with the bytes read and the bytes to be read.
        client: as for `sum_contents`.

    Raises:
        SourceError: a file cannot be read, or is shorter than its header says.
    """
    differences: list[Difference] = []
    bare: dict[str, None] = {}
    covered: set[tuple[int, int, int]] = set()
    to_sum: dict[tuple[int, Runs, int], list[tuple[str, str]]] = {}  # two names may share one item

    def add(number: int, name: str, text: str) -> None:
        file = target.files[number]
        differences.append(Difference("checksum", text, name or None, rank=target.ranks[number], path=file.path))

    def read(number: int) -> tuple[int, list[Summed]]:
        file = target.files[number]
        sums = file.index.sums
        return number, [] if sums is None else list(sums.read(file.path, store_of(target.coding)))

    def note(item: tuple[int, list[Summed]]) -> None:
        number, parts = item
        for part in parts:
            for fault in part.faults:
                add(number, part.name, fault)
            name = part.name or target.files[number].path.rpartition("/")[2]
            if part.carries:
                covered.add((number, *part.run))
            else:
                bare[name] = None
            for subject, runs, crc in part.pending:
                to_sum.setdefault((number, runs, crc), []).append((part.name, subject))

    map_ordered(read, range(len(target.files)), threads, note)
    values, _ = sum_contents(
        ((key, target.files[key[0]].path, key[1]) for key in to_sum),
        threads=threads, on_progress=on_progress, kind=CRC32, coding=target.coding, client=client,
    )  # fmt: skip
    for key, value in values.items():
        number, _, crc = key
        for name, subject in to_sum[key] if (fault := crc32_fault(value, crc)) else ():
            add(number, name, f"{subject} {fault}")
    nbytes = sum(length for *_, length in covered)
    rest = sum(file.nbytes for file in target.files) - nbytes
    return SumsChecked(tuple(differences), nbytes, rest, tuple(bare))


def sum_entries(
    top: Place,
    contents: Mapping[str, tuple[Mapping[str, Entry], Runs | None]],
    threads: int,
    progress: OnProgress,
) -> tuple[dict[tuple[str, str | None], int], int]:
    """Return the checksums of tensors in files below a directory, and the bytes read.

    The keys are a path and a tensor, or None for the rest of the file; `contents` has the entries and that rest.
    """
    sums: dict[tuple[str, str | None], int] = {}
    to_sum: list[tuple[tuple[str, str | None], str, Runs]] = []
    for path, (entries, rest) in contents.items():
        file_path = str(top / path)
        if rest is not None:
            to_sum.append(((path, None), file_path, rest))
        for name, entry in entries.items():
            if entry.text is None:
                to_sum.append(((path, name), file_path, entry.runs))
            else:
                sums[path, name] = crc32c(entry.text.encode())
    computed, read = sum_contents(to_sum, threads=threads, on_progress=progress)
    return sums | computed, read
