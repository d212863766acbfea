"""Predict a run's memory, and choose threads and band size to fit a limit.

The constants are resident memory, measured on CPython 3.11 with numpy; `tests/run/test_memory.py` compares predictions
with runs.
"""

from __future__ import annotations

import sys
from math import ceil
from typing import TYPE_CHECKING, NamedTuple, Protocol

from reshard import environment
from reshard.core.layout.strided import SCRATCH, TILE_BYTES
from reshard.core.plan.bands import AHEAD, VIEWS
from reshard.core.storage.places import can
from reshard.core.storage.urls.clients import buffering
from reshard.core.storage.urls.pool import pool, shared_bytes
from reshard.core.storage.urls.remote import fetched_bytes
from reshard.errors import BudgetError, Option, Text, bytes_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reshard.core.model.checkpoint import Checkpoint, Tensor
    from reshard.core.target import Target, TargetTensor

BAND_BYTES = 4 << 20
"""Maximum bytes of a tensor that a thread reads at once; the fastest of 1 to 16 MB, as measured."""

STRIDED_BAND_BYTES, STRIDED_THREADS = 2 << 20, 2
"""The same, and the maximum number of threads, for strided elements: a gathered band stays in a core's own cache, and
each thread buffers `AHEAD` times as many bytes read."""

LEAST_BAND_BYTES = 64 << 10
"""Minimum band size; below it a run spends most of its time in calls."""

THREADS = 4
"""Default maximum number of threads of a run."""

TASK_BYTES = 64 << 20
"""Minimum bytes that a task moves: tasks are few and large, because a scheduler takes 25 µs to 1.5 ms for each."""

MOST_TASKS = 4096

IMPORTED_BYTES = (64 if sys.version_info >= (3, 14) else 55) << 20
"""The interpreter with all imports of a run, measured with Python 3.11 and 3.14.

2 MiB are for jinja2, which dask imports if it is installed, and 2 MiB for modules that Python compiles in the process,
as it does if it may not write bytecode.
"""

CAST_BYTES = 4 << 20
"""The import of ml_dtypes, which only a cast needs."""

TENSOR_BYTES = 1750
"""A tensor in a checkpoint and in a plan, for a name of 35 letters, as for the next two constants."""

ENTRY_BYTES = 700
"""A tensor's entry in an index of a source file, or in a layout of a target file."""

TASK_MEMORY = 4000
"""A task in a plan, in the graph and in the scheduler."""

PLACE_BYTES = 100
"""A storage entry of a block in the metadata of a Checkpoint 2.0, when they are read."""

Share = tuple[str, int]
"""A part of a prediction: its purpose and its bytes."""

HELD_BEFORE = frozenset({"program", "checkpoint", "layouts"})
"""The purposes of memory that a process holds before a run begins."""


class Coder(Protocol):
    """Anything that decrypts, decodes or compresses."""

    def nbytes(self, threads: int) -> int:
        """Return the memory that it needs with a number of threads."""


class Budget(NamedTuple):
    """The parts of a run's memory.

    Attributes:
        fixed: memory that does not depend on the number of threads.
        coders: coders that need memory for each thread.
        buffers: how many bands a thread buffers: as read, as gathered or compared with, and as cast.
        remote: how many buffers for requests a thread may hold, if files that are read are at URLs; else 0.
        threads: maximum number of threads.
        band_bytes: maximum bytes of a tensor that a thread reads at once.
        shared_bytes: memory of the buffers for requests that threads share, if files are at URLs.
        held: how many times a requested byte is held.
    """

    fixed: tuple[Share, ...]
    coders: tuple[Coder, ...]
    buffers: int
    remote: int
    threads: int
    band_bytes: int
    shared_bytes: int = 0
    held: int = 1

    def coding_bytes(self, threads: int) -> int:
        """Return the memory that threads need to decrypt, decode, compress and fetch."""
        fetched = fetched_bytes(threads * self.remote, self.shared_bytes, self.held) if self.remote else 0
        return sum(coder.nbytes(threads) for coder in self.coders) + fetched

    def within(self, memory: int | None, what: str, band_of: str) -> Budget:
        """Return the budget with the threads and band size reduced to fit in `memory`.

        Args:
            memory: maximum memory in bytes; None for no limit.
            what: the purpose of the fixed memory, for the message.
            band_of: the thing that bands are read from, for the message.

        Raises:
            BudgetError: `memory` is too little; the error names the minimum.
        """
        if memory is None:
            needed = sum(nbytes for _, nbytes in self.shares(self.threads, self.band_bytes))
            return self._replace(shared_bytes=shared_bytes(needed, None) // self.held if self.remote else 0)
        plain = sum(nbytes for _, nbytes in self.fixed)
        for threads in range(self.threads, 0, -1):
            fixed = plain + self.coding_bytes(threads)
            band = min(self.band_bytes, int((memory - fixed) / ((self.buffers + VIEWS) * threads)))
            if band >= (self.band_bytes if threads > 1 else LEAST_BAND_BYTES):
                needed = fixed + threads * thread_bytes(band, self.buffers)
                shared = shared_bytes(needed, memory) // self.held if self.remote else 0
                return self._replace(threads=threads, band_bytes=band, shared_bytes=shared)
        megabytes = ceil((fixed + thread_bytes(LEAST_BAND_BYTES, self.buffers)) / 1e6)
        raise BudgetError(
            f"{bytes_text(memory)} of memory is not enough", code="not-enough-memory",
            facts=[f"{bytes_text(fixed)} is needed for {what}, and more for a band of {band_of}"],
            hint=Text("the least that works is ", Option("memory", megabytes * 1_000_000, f"{megabytes}MB")),
        )  # fmt: skip

    def reserve(self) -> None:
        """Set the memory of the shared buffers for requests of this process."""
        if self.remote:
            pool.limit(self.shared_bytes, reads=True, sends=False)

    def shares(self, tasks: int, band: int) -> tuple[Share, ...]:
        """Return the parts of a run's memory, for `tasks` tasks and bands up to `band` bytes."""
        threads = min(self.threads, tasks)
        return (
            *self.fixed,
            ("coding and fetching", self.coding_bytes(max(threads, 1))),
            ("bands", threads * (self.buffers * band + ceil(VIEWS * self.band_bytes))),
        )


def thread_bytes(band: int, buffers: int) -> int:
    """Return the memory of a thread's buffers and views, for bands of `band` bytes."""
    return ceil((buffers + VIEWS) * band)


def band_buffers(*, casts: bool, strided: bool) -> int:
    """Return how many bands a thread buffers: read, gathered, cast and read ahead."""
    return 2 + casts + (AHEAD if strided else 0)


def _fixed_shares(
    source: Checkpoint, items: Sequence[TargetTensor], ranks: int, extra: Sequence[Share]
) -> tuple[Share, ...]:
    """Return the memory of the program, the source's indexes and the plan.

    Args:
        source: the checkpoint.
        items: the planned tensors.
        ranks: how many ranks the target has.
        extra: the parts that the destination adds.
    """
    nbytes = sum(item.tensor.spec.nbytes for item in items)
    tasks = min(MOST_TASKS, nbytes * ranks // TASK_BYTES)  # an upper bound: every rank gets every tensor
    return (
        _program(casts=_casts(items)),
        ("checkpoint", _checkpoint_bytes(source, [item.tensor for item in items])),
        ("layouts", (ENTRY_BYTES + 13 * ranks) * len(items)),  # and the numbers of the tensors in each file
        ("tasks", TASK_MEMORY * tasks),
        *extra,
    )


def budget(
    source: Checkpoint,
    items: Sequence[TargetTensor],
    destination: Target,
    *,
    memory: int | None = None,
    threads: int | None = None,
) -> Budget:
    """Return the budget of a run: threads and band size that fit in `memory`.

    Args:
        source: the checkpoint that is read.
        items: the planned tensors.
        destination: lays out the target files.
        memory: maximum memory of a run in bytes; None for no limit.
        threads: maximum number of threads.

    Raises:
        BudgetError: `memory` is too little; the error names the minimum.
    """
    strided = _is_strided(item.tensor for item in items)
    coders = (source.coding, destination.coding, destination.cipher, *[_Strided()] * strided)
    used_coders = tuple(coder for coder in coders if coder is not None)
    fixed = _fixed_shares(source, items, len(destination.ranks), destination.memory)
    remote = int(any(can(file.path).has_latency for file in source.files))
    buffers = band_buffers(casts=_casts(items), strided=strided)
    most, band = (STRIDED_THREADS, STRIDED_BAND_BYTES) if strided else (THREADS, BAND_BYTES)
    limits = Budget(
        fixed, used_coders, buffers, remote, environment.threads(threads) or most, band, held=times_held([source])
    )
    largest = max(((t.spec.nbytes, t.spec.name) for t in source.tensors.values()), default=(0, ""))[1]
    purpose = f"the program and its plan of {len(source.tensors)} tensors"
    return limits.within(memory, purpose, f"tensor {largest!r}")


def comparison_budget(
    sides: Sequence[Checkpoint], *, casts: bool, memory: int | None = None, threads: int = THREADS
) -> Budget:
    """Return the budget of a comparison: threads and band size that fit in `memory`.

    Args:
        sides: the checkpoints that are compared.
        casts: elements are cast before they are compared.
        memory: maximum memory of the comparison in bytes; None for no limit.
        threads: maximum number of threads.

    Raises:
        BudgetError: `memory` is too little; the error names the minimum.
    """
    checkpoint_bytes = sum(_checkpoint_bytes(side, list(side.tensors.values())) for side in sides)
    checkpoint_bytes += sum(
        TENSOR_BYTES * len(file.index.entries) for side in sides if not side.tensors for file in side.files
    )
    strided = sum(_is_strided(side.tensors.values()) for side in sides)
    coders = tuple(coder for coder in (*(side.coding for side in sides), *[_Strided()] * strided) if coder is not None)
    remote = 2 * any(can(file.path).has_latency for side in sides for file in side.files)  # both sides are read
    # One more band for the mask of differing elements; either side may be read ahead.
    buffers = 1 + band_buffers(casts=casts, strided=False) + AHEAD * strided
    most, band = (min(threads, STRIDED_THREADS), STRIDED_BAND_BYTES) if strided else (threads, BAND_BYTES)
    fixed = (_program(casts=casts), ("checkpoints", checkpoint_bytes))
    limits = Budget(fixed, coders, buffers, remote, most, band, held=times_held(sides))
    return limits.within(memory, "the program and what the headers say", "either side")


def values_budget(
    sides: Sequence[Checkpoint], thread_bytes: int, *, memory: int | None = None, threads: int = THREADS
) -> Budget:
    """Return the budget of a computation with values: the threads that fit in `memory`.

    Args:
        sides: the checkpoints that are read.
        thread_bytes: the memory of a thread's buffers.
        memory: maximum memory of the computation in bytes; None for no limit.
        threads: maximum number of threads.

    Raises:
        BudgetError: `memory` is too little; the error names the minimum.
    """
    checkpoint_bytes = sum(_checkpoint_bytes(side, list(side.tensors.values())) for side in sides)
    strided = sum(_is_strided(side.tensors.values()) for side in sides)
    coders = (*(side.coding for side in sides), *[_Strided()] * strided, _Working(thread_bytes))
    remote = int(any(can(file.path).has_latency for side in sides for file in side.files))
    shares = (_program(casts=True), ("checkpoints", checkpoint_bytes))
    used_coders = tuple(coder for coder in coders if coder is not None)
    limits = Budget(shares, used_coders, 0, remote, threads, LEAST_BAND_BYTES, held=times_held(sides))
    return limits.within(memory, "the program, what the headers say, and a thread", "a tensor")


def times_held(sides: Iterable[Checkpoint]) -> int:
    """Return how many times a requested byte is held: in its buffer, and maybe by the library of its store."""
    urls = (file.path for side in sides for file in side.files if can(file.path).has_latency)
    return max((buffering(url).read for url in urls), default=1)


class _Working(NamedTuple):
    """The buffers of threads that compute."""

    of_thread: int

    def nbytes(self, threads: int) -> int:
        """Return the memory of the buffers of threads."""
        return threads * self.of_thread


class _Strided(NamedTuple):
    """The reader of strided elements."""

    def nbytes(self, threads: int) -> int:
        """Return the memory that threads need to read through gaps and to transpose."""
        return threads * (SCRATCH + TILE_BYTES)


def _is_strided(tensors: Iterable[Tensor]) -> bool:
    """Return whether any tensor has strided blocks."""
    return any(sharding.is_strided for sharding in {tensor.sharding for tensor in tensors})


def _program(*, casts: bool) -> Share:
    return "program", IMPORTED_BYTES + (CAST_BYTES if casts else 0)


def _checkpoint_bytes(checkpoint: Checkpoint, tensors: Sequence[Tensor]) -> int:
    """Return the memory of a checkpoint's tensors and of the indexes of all its files."""
    indexes = {file.index.header_id: len(file.index.entries) for file in checkpoint.files}
    block, entry = (checkpoint.format.block_bytes, checkpoint.format.entry_bytes) if checkpoint.format else (0, 0)
    blocks = block * sum(len(tensor.sharding.blocks) for tensor in tensors) if block else 0
    shardings = [tensor.sharding for tensor in tensors] if checkpoint.extras.arrangement is not None else []
    sizes = {sharding: sum(map(len, sharding.replicas)) for sharding in set(shardings)}
    places = PLACE_BYTES * sum(sizes[sharding] for sharding in shardings)
    entries = (ENTRY_BYTES + entry) * sum(indexes.values())
    return TENSOR_BYTES * len(tensors) + entries + blocks + places


def _casts(items: Sequence[TargetTensor]) -> bool:
    return any(item.dtype is not item.tensor.spec.dtype for item in items)
