"""Tell whether source files are the ones that a run opened, and the ones that finished target files were made of.

While a run reads, the state of its source files must not change (`check_sources`). Between two runs a file may be
copied, moved or linked without a change of size and time, or swapped for another: inode and change time show that
something happened, and samples of the finished target files show what (`are_of_others`).
"""

from __future__ import annotations

import os
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, NoReturn, TypeVar

from reshard.core.model.entries import merged
from reshard.core.plan.plan import Piece
from reshard.core.run.engine import move_pieces
from reshard.core.storage.cipher import store_of
from reshard.core.storage.places import any_store, workers_at
from reshard.core.storage.sinks import Sinks
from reshard.core.storage.threads import map_ordered
from reshard.errors import ChangedError, GoneError, SourceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from reshard.core.layout.block import Block, Shape
    from reshard.core.model.checkpoint import SourceFile
    from reshard.core.plan.plan import Plan, Transfer
    from reshard.core.run.settings import Receipt
    from reshard.core.storage.base import ReadStore, Status

_MOST_BYTES = 64 << 20
"""Up to this many bytes of finished files are compared in full; of more, samples of about as many bytes."""

_LEAST_BYTES = 4 << 10
_LINK_BYTES = 64 << 10

T = TypeVar("T")


def check_sources(plan: Plan, _moved: object) -> list[Receipt]:
    """Raise an error if a source file changed since it was opened.

    Raises:
        ChangedError: a source file changed or is gone.
    """
    list(_of_sources(plan, lambda number: check_source(plan.source.files[number])))
    return []


def check_source(file: SourceFile) -> None:
    """Raise an error if a source file changed since it was opened; errors as for `check_sources`."""
    try:
        status = any_store().status(file.path)
    except GoneError as error:
        raise ChangedError(
            f"{file.path} is gone since it was opened", code="source-gone", facts=[str(error)], hint="start again"
        ) from None
    if not status.is_unchanged_since(file.status):
        only = status[:2] == file.status[:2]
        facts = ["its size and time are as they were; its contents, links, owner or rights are not"] if only else []
        raise ChangedError(
            f"{file.path} changed since it was opened", code="source-changed", facts=facts, hint="start again"
        )


def changed_sources(plan: Plan) -> dict[int, Status | None]:
    """Return the current states of changed source files; None for a missing file.

    Files whose state cannot be requested are not included: unreachable storage may come back.
    """
    files = plan.source.files

    def status(number: int) -> Status | None:
        try:
            return any_store().status(files[number].path)
        except GoneError:
            return None
        except SourceError:
            return files[number].status

    statuses = zip(plan.read_files(), _of_sources(plan, status), strict=True)
    return {number: now for number, now in statuses if now is None or not now.is_unchanged_since(files[number].status)}


def _of_sources(plan: Plan, function: Callable[[int], T]) -> Iterable[T]:
    """Apply a function to the number of each source file that is read."""
    numbers = plan.read_files()
    return map_ordered(function, numbers, workers_at(plan.source.files[number].path for number in numbers))


class _DiffersError(Exception):
    """A target file has other bytes than the source files."""


class _Compared:
    """A sink that compares what is written with a file that exists."""

    ended = False

    def __init__(self, store: ReadStore, path: str) -> None:
        self._store, self._path = store, path

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        """Raise `_DiffersError` if the file has other bytes there."""
        stored = bytearray(len(data))
        self._store.read_into(self._path, offset, memoryview(stored))
        if memoryview(stored) != memoryview(data).cast("B"):
            raise _DiffersError

    def finish(self, *, durable: bool) -> NoReturn:
        """Do nothing else: the file is finished."""
        raise NotImplementedError

    def abort(self) -> None:
        """Leave the file as it is."""


class _Ignored(_Compared):
    """A sink for files that are not compared."""

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        """Ignore the bytes."""


def are_of_others(plan: Plan, root: str, finished: Sequence[int], threads: int) -> bool:
    """Return whether finished target files have other contents than the source files now, by samples.

    Args:
        plan: the plan of the files.
        root: the target.
        finished: the numbers of the files; none is compressed.
        threads: number of threads that compare.

    Raises:
        SourceError: a file cannot be read.
    """
    numbers, links = frozenset(finished), plan.linked
    stores = store_of(plan.cipher), store_of(plan.source.coding)

    def sink(number: int) -> _Compared:
        return (_Compared if number in numbers else _Ignored)(stores[0], f"{root}/{plan.files[number].path}")

    def compare(pieces: Sequence[Piece]) -> None:
        move_pieces(plan, pieces, stores[1], Sinks(sink))

    pieces = list(_samples(plan, numbers))
    step = -(-len(pieces) // max(threads, 1)) or 1
    shares = [pieces[begin : begin + step] for begin in range(0, len(pieces), step)]
    try:
        list(map_ordered(compare, shares, max(threads, 1)))
        for number in finished:
            if (link := plan.files[number].link) in links:
                _compare_files(f"{root}/{plan.files[number].path}", str(link), plan.files[number].layout.size)
    except _DiffersError:
        return True
    return False


def is_as_planned(plan: Plan, root: str, number: int) -> bool:
    """Return whether an existing file has the size, the literals and, by samples, the contents that are planned."""
    file = plan.files[number]
    path, store = f"{root}/{file.path}", store_of(plan.cipher)
    try:
        if any_store().size(path) != plan.size_of(file):
            return False
        for offset, content in file.layout.literals:
            _Compared(store, path).write_at(offset, content)
    except (SourceError, _DiffersError):  # a SourceError: it is encrypted with another key, or not at all
        return False
    return not are_of_others(plan, root, [number], plan.threads)


def _samples(plan: Plan, files: frozenset[int]) -> Iterator[Piece]:
    """Yield rows of each tensor in some target files: all, or the first, middle and last of each block if too many."""
    blocks = {
        route: [
            block
            for block, written in zip(route.recipe.targets, route.writes, strict=True)
            if block.size and any(at.file in files for at in written)
        ]
        for route in {transfer.route for transfer in plan.transfers}
    }
    nbytes = sum(block.size * item.target_dtype.itemsize for item in plan.transfers for block in blocks[item.route])
    most = 0
    if nbytes > _MOST_BYTES:
        most = max(_LEAST_BYTES, _MOST_BYTES // (3 * sum(len(blocks[item.route]) for item in plan.transfers)))
    for number, item in enumerate(plan.transfers):
        spans = (span for block in blocks[item.route] for span in _rows(block, item, most))
        yield from (Piece(number, start, stop) for start, stop in merged(spans))


def _rows(block: Block, transfer: Transfer, most: int) -> Iterator[tuple[int, int]]:
    """Yield the rows of a block to compare: three runs of about `most` bytes, or all if that is 0."""
    shape = transfer.recipe.shape
    start = _row(block.start, shape, transfer.axis)
    stop = _row(tuple(end - 1 for end in block.stop), shape, transfer.axis) + 1
    rows = most // max(1, prod(shape[transfer.axis + 1 :]) * transfer.dtype.itemsize) or 1
    if not most or 3 * rows >= stop - start:
        yield start, stop
        return
    for first in (start, (start + stop - rows) // 2, stop - rows):
        yield first, first + rows


def _row(index: Shape, shape: Shape, axis: int) -> int:
    """Return the number of the row of an element."""
    row = 0
    for at, extent in zip(index[: axis + 1], shape, strict=False):
        row = row * extent + at
    return row


def _compare_files(path: str, other: str, size: int) -> None:
    """Raise `_DiffersError` if two local files differ in size, or in the first bytes of some of their parts."""
    if os.path.samefile(path, other):
        return
    if any_store().size(path) != size or any_store().size(other) != size:
        raise _DiffersError
    edges = sorted({size * number // 16 for number in range(17)})
    for begin, end in pairwise(edges):
        content = bytearray(min(end - begin, _LINK_BYTES))
        any_store().read_into(other, begin, memoryview(content))
        _Compared(any_store(), path).write_at(begin, memoryview(content))
