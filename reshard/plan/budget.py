"""How much memory a run takes: what a prediction consists of, and how many threads and bytes in a band keep a limit.

The constants are resident memory, measured on CPython 3.11 with numpy; `tests/run/test_memory.py` holds predictions
against runs.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, NamedTuple, Protocol

from reshard.errors import BudgetError, Option, Text, bytes_text
from reshard.formats.sets import DCP_ITEMS
from reshard.formats.zarr import NAME as ZARR
from reshard.layout.strided import SCRATCH, TILE_BYTES
from reshard.plan.bands import AHEAD, VIEWS
from reshard.storage.places import can
from reshard.storage.remote import fetched_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reshard.source.checkpoint import Checkpoint, Tensor
    from reshard.targets.destination import Destination, Item

BAND_BYTES = 4 << 20
"""The most bytes of a tensor that a thread reads at once; measured best between 1 and 16 MB."""

STRIDED_BAND_BYTES, STRIDED_THREADS = 2 << 20, 2
"""The same, and how many threads there are at most, where elements lie in strides: what is put together of them stays
in a processor's own cache, and each thread holds `AHEAD` times as much of what is read."""

LEAST_BAND_BYTES = 64 << 10
"""The least; below it a run is mostly calls."""

THREADS = 4
"""How many threads a run has at most, unless another number is asked for."""

TASK_BYTES = 64 << 20
"""How much a task moves, at least: few, fat tasks, because a scheduler takes 25 µs to 1.5 ms for each."""

MOST_TASKS = 4096

IMPORTED_BYTES = 53 << 20
"""The interpreter with everything that a run imports; dask imports jinja2 where it is installed: 2 MiB of it."""

CAST_BYTES = 4 << 20
"""What the import of ml_dtypes adds, which only a cast needs."""

TENSOR_BYTES = 1750
"""A tensor in a checkpoint and in a plan, with a name of 35 letters; so are the next two."""

ENTRY_BYTES = 700
"""A tensor's entry in an index of a source file, or in a layout of a target file."""

TASK_MEMORY = 4000
"""A task in a plan, in the graph and in the scheduler."""

CHUNK_BYTES = 650
"""A chunk of a zarr store that is read."""

PLACE_BYTES = 100
"""A place of a block in the metadata of a Checkpoint 2.0, when they are read."""

DCP_ITEM_BYTES = 800
"""An item of a distributed checkpoint, when the metadata are read as PyTorch's own pickler wrote them."""

Share = tuple[str, int]
"""A part of a prediction: what it is for, and its bytes."""


class Coder(Protocol):
    """What decrypts, decodes or compresses."""

    def nbytes(self, threads: int) -> int:
        """Return the memory that so many threads take for it."""


class Budget(NamedTuple):
    """What a run's memory consists of.

    Attributes:
        fixed: what is taken whatever the threads.
        coders: what else takes memory by the thread.
        buffers: how many bands a thread holds: as read, as put together or as they are compared with it, and cast.
        remote: files that are read are at URLs.
        threads: how many there are at most.
        band_bytes: the most bytes of a tensor that one of them reads at once.
    """

    fixed: tuple[Share, ...]
    coders: tuple[Coder, ...]
    buffers: int
    remote: bool
    threads: int
    band_bytes: int

    def coding_bytes(self, threads: int) -> int:
        """Return the memory that so many threads take to decrypt, decode and compress, and to read at URLs."""
        fetched = fetched_bytes(threads, BAND_BYTES) if self.remote else 0
        return sum(coder.nbytes(threads) for coder in self.coders) + fetched

    def within(self, memory: int | None, what: str, band_of: str) -> Budget:
        """Return the budget with as many threads, and bytes in a band, as keep it within so much memory.

        Args:
            memory: the most that may be taken; None for no limit.
            what: what memory is taken for whatever the threads, for the message.
            band_of: what a band is of, likewise.

        Raises:
            BudgetError: it is too little; the least that works is in the error.
        """
        if memory is None:
            return self
        plain = sum(nbytes for _, nbytes in self.fixed)
        for fewer in range(self.threads, 0, -1):
            taken = plain + self.coding_bytes(fewer)
            band = min(self.band_bytes, int((memory - taken) / ((self.buffers + VIEWS) * fewer)))
            if band >= (self.band_bytes if fewer > 1 else LEAST_BAND_BYTES):
                return self._replace(threads=fewer, band_bytes=band)
        megabytes = ceil((taken + thread_bytes(LEAST_BAND_BYTES, self.buffers)) / 1e6)
        raise BudgetError(
            f"{bytes_text(memory)} of memory is not enough", code="not-enough-memory",
            facts=[f"{bytes_text(taken)} is for {what}, the rest for a band of {band_of}"],
            hint=Text("the least that works is ", Option("memory", megabytes * 1_000_000, f"{megabytes}MB")),
        )  # fmt: skip

    def shares(self, tasks: int, band: int) -> tuple[Share, ...]:
        """Return what a run of so many tasks takes, whose largest band has so many bytes."""
        threads = min(self.threads, tasks)
        return (
            *self.fixed,
            ("coding and fetching", self.coding_bytes(max(threads, 1))),
            ("bands", threads * (self.buffers * band + ceil(VIEWS * self.band_bytes))),
        )


def thread_bytes(band: int, buffers: int) -> int:
    """Return the memory that a thread takes for bands of so many bytes: its buffers, and what it keeps of bands."""
    return ceil((buffers + VIEWS) * band)


def band_buffers(*, casts: bool, strided: bool) -> int:
    """Return how many bands a thread holds of a run: as read, as put together, as cast, and as elements lie apart."""
    return 2 + casts + (AHEAD if strided else 0)


def _fixed_shares(source: Checkpoint, items: Sequence[Item], ranks: int, more: Sequence[Share]) -> tuple[Share, ...]:
    """Return what is taken whatever the threads: the program, the source's indexes, the plan.

    Args:
        source: the checkpoint.
        items: what is planned of it.
        ranks: how many ranks the target has.
        more: what the destination adds.
    """
    nbytes = sum(item.tensor.spec.nbytes for item in items)
    tasks = min(MOST_TASKS, nbytes * ranks // TASK_BYTES)  # at most: where all ranks get everything
    return (
        _program(casts=_casts(items)),
        ("checkpoint", _checkpoint_bytes(source, [item.tensor for item in items])),
        ("layouts", (ENTRY_BYTES + 13 * ranks) * len(items)),  # and which tensors are in which file
        ("tasks", TASK_MEMORY * tasks),
        *more,
    )


def budget(
    source: Checkpoint,
    items: Sequence[Item],
    destination: Destination,
    *,
    memory: int | None = None,
    threads: int | None = None,
) -> Budget:
    """Return how many threads, and bytes in a band, keep a run within so much memory.

    Args:
        source: the checkpoint that is read.
        items: what is planned of it.
        destination: where it goes.
        memory: the most that a run may take; None for no limit.
        threads: how many are wanted.

    Raises:
        BudgetError: it is too little; the least that works is in the error.
    """
    strided = _is_strided(item.tensor for item in items)
    coders = (source.coding, destination.coding, destination.cipher, *[_Strided()] * strided)
    every = tuple(coder for coder in coders if coder is not None)
    fixed = _fixed_shares(source, items, len(destination.ranks), destination.memory)
    remote = any(can(file.path).waits for file in source.files)
    buffers = band_buffers(casts=_casts(items), strided=strided)
    most, band = (STRIDED_THREADS, STRIDED_BAND_BYTES) if strided else (THREADS, BAND_BYTES)
    found = Budget(fixed, every, buffers, remote, threads or most, band)
    largest = max(((t.spec.nbytes, t.spec.name) for t in source.tensors.values()), default=(0, ""))[1]
    what = f"the program and its plan of {len(source.tensors)} tensors"
    return found.within(memory, what, f"tensor {largest!r}")


def comparison_budget(
    sides: Sequence[Checkpoint], *, casts: bool, memory: int | None = None, threads: int = THREADS
) -> Budget:
    """Return how many threads, and bytes in a band, keep a comparison within so much memory.

    Args:
        sides: the checkpoints that are compared.
        casts: elements are cast before they are.
        memory: the most that it may take; None for no limit.
        threads: how many are wanted.

    Raises:
        BudgetError: it is too little; the least that works is in the error.
    """
    held = sum(_checkpoint_bytes(side, list(side.tensors.values())) for side in sides)
    held += sum(TENSOR_BYTES * len(file.index.entries) for side in sides if not side.tensors for file in side.files)
    strided = sum(_is_strided(side.tensors.values()) for side in sides)
    coders = tuple(coder for coder in (*(side.coding for side in sides), *[_Strided()] * strided) if coder is not None)
    remote = any(can(file.path).waits for side in sides for file in side.files)
    # What a copy has, and which elements differ; and either side may be read ahead.
    buffers = 1 + band_buffers(casts=casts, strided=False) + AHEAD * strided
    most, band = (min(threads, STRIDED_THREADS), STRIDED_BAND_BYTES) if strided else (threads, BAND_BYTES)
    found = Budget((_program(casts=casts), ("checkpoints", held)), coders, buffers, remote, most, band)
    return found.within(memory, "the program and what the headers say", "either side")


class _Strided(NamedTuple):
    """What reads elements that lie in strides."""

    def nbytes(self, threads: int) -> int:
        """Return the memory that so many threads take to read what is between them, too, and to transpose."""
        return threads * (SCRATCH + TILE_BYTES)


def _is_strided(tensors: Iterable[Tensor]) -> bool:
    """Return whether blocks of some tensors lie in strides."""
    return any(sharding.is_strided for sharding in {tensor.sharding for tensor in tensors})


def _program(*, casts: bool) -> Share:
    return "program", IMPORTED_BYTES + (CAST_BYTES if casts else 0)


def _checkpoint_bytes(checkpoint: Checkpoint, tensors: Sequence[Tensor]) -> int:
    """Return the memory of some tensors of a checkpoint, and of the indexes of all its files."""
    indexes = {file.index.header: len(file.index.entries) for file in checkpoint.files}
    chunks = sum(len(tensor.sharding.blocks) for tensor in tensors) if checkpoint.format == ZARR else 0
    listed = [tensor.sharding for tensor in tensors] if checkpoint.extras.holders else []
    sizes = {sharding: sum(map(len, sharding.replicas)) for sharding in set(listed)}
    places = PLACE_BYTES * sum(sizes[sharding] for sharding in listed)
    entry = ENTRY_BYTES + (DCP_ITEM_BYTES if checkpoint.format == DCP_ITEMS else 0)
    return TENSOR_BYTES * len(tensors) + entry * sum(indexes.values()) + CHUNK_BYTES * chunks + places


def _casts(items: Sequence[Item]) -> bool:
    return any(item.dtype is not item.tensor.spec.dtype for item in items)
