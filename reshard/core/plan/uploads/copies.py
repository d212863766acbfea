"""Byte ranges that a store can copy from source files into target files without sending them here.

A run of a target file is copied if it is a run of a source file: the rows of a target block that have the columns of
one source block, in the same dtype, unencrypted, uncompressed and not computed. Runs that adjoin in both files are
joined, also across tensors.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from reshard.core.model.entries import merged, ranges
from reshard.core.plan.bands import is_whole
from reshard.core.plan.plan import Piece
from reshard.core.storage.places import can
from reshard.core.storage.urls.clients import in_s3
from reshard.core.storage.urls.s3.options import share_options
from reshard.core.storage.urls.s3.upload_parts import LEAST_BYTES, Copied, Upload, parts_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from reshard.core.model.entries import Runs, Spans
    from reshard.core.plan.plan import Plan, Route, Transfer

_SHORTEST = 64 << 10  # shorter runs, unless they are whole blocks, are not worth the time to find them


class _Run(NamedTuple):
    """Elements of a target block that are consecutive in a source block, too."""

    target: int
    target_first: int
    source: int
    source_first: int
    elements: int


class _SharedRun(NamedTuple):
    """A run in the files of a group of transfers that share their route."""

    group: int
    read_index: int
    write_index: int
    source_first: int
    target_first: int
    elements: int


def reads_urls(plan: Plan) -> bool:
    """Return whether any source file of a plan is at a URL."""
    return any(can(file.path).has_latency for file in plan.source.files)


def can_copy(plan: Plan, directory: str) -> bool:
    """Return whether any byte could be copied by the store of a target."""
    plain = plan.coding is None and plan.cipher is None and plan.source.cipher is None
    sources = [file.path for file in plan.source.files if in_s3(file.path)] if plain and in_s3(directory) else []
    return bool(sources) and all(share_options(path, directory) for path in sources)


def copies_of(plan: Plan, numbers: Iterable[int]) -> dict[int, tuple[Copied, ...]]:
    """Return the ranges of target files that the store can copy, by file number."""
    files = {number for number in numbers if not plan.files[number].layout.crcs}  # their sums need the bytes
    usable = {number for number, file in enumerate(plan.source.files) if file.inputs is None and in_s3(file.path)}
    similar: dict[tuple[Route, int], list[Transfer]] = {}
    for transfer in plan.transfers:
        if transfer.dtype is transfer.target_dtype and transfer.cost == 1:
            similar.setdefault((transfer.route, transfer.dtype.itemsize), []).append(transfer)
    # By target file: the source file of each run, and the run.
    runs_of: dict[int, list[tuple[int, _SharedRun]]] = {}
    for group, (route, itemsize) in enumerate(similar):
        for run in _runs(route, itemsize):
            read = route.reads[run.source]
            for write in route.writes[run.target] if read.file in usable and not read.strides else ():
                if write.file in files:
                    shared = _SharedRun(
                        group, read.runs_index, write.runs_index, run.source_first, run.target_first, run.elements
                    )
                    runs_of.setdefault(write.file, []).append((read.file, shared))
    transfers = list(similar.values())
    # Files that differ in their sources only are looked through once.
    known: dict[tuple[tuple[int, _SharedRun], ...], tuple[Copied, ...]] = {}
    result = {}
    for number, runs in runs_of.items():
        sources = sorted({source for source, _ in runs})
        position = {source: index for index, source in enumerate(sources)}
        key = tuple((position[source], run) for source, run in runs)
        if key not in known:
            known[key] = _joined(sorted(_copies(key, transfers)))
        if known[key]:
            result[number] = tuple(copied._replace(source=sources[copied.source]) for copied in known[key])
    return result


def _copies(runs: Iterable[tuple[int, _SharedRun]], transfers: Sequence[Sequence[Transfer]]) -> Iterator[Copied]:
    """Yield the ranges of the runs of one file, for all transfers that have them."""
    for source, run in runs:
        for transfer in transfers[run.group]:
            size = transfer.dtype.itemsize
            read, write = transfer.read_runs[run.read_index], transfer.write_runs[run.write_index]
            if read:
                pairs = _pairs(write, run.target_first * size, read, run.source_first * size, run.elements * size)
                for offset, nbytes, origin in pairs:
                    yield Copied(offset, nbytes, source, origin)


def _runs(route: Route, itemsize: int) -> Iterator[_Run]:
    """Yield the runs of a route, in elements; rows are taken along the first axis, so that they are long."""
    recipe = route.recipe
    for segment in recipe.segments(0, 0, recipe.rows(0)):
        columns = segment.columns
        rows = segment.stop - segment.start
        for index, target in enumerate(columns.targets):
            elements = rows * prod(columns.target_shapes[index])
            is_block = elements == recipe.targets[target].size
            if not is_whole(columns.parts[index]) or (elements * itemsize < _SHORTEST and not is_block):
                continue
            position = columns.parts[index][0].source
            first, start = segment.target_offsets[index], segment.source_offsets[position]
            yield _Run(target, first, columns.sources[position], start, elements)


def _pairs(write: Runs, begin: int, read: Runs, first: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
    """Yield parts that are contiguous in both files: offset in the target, length, offset in the source."""
    for offset, start, stop in ranges(write, begin, nbytes):
        for origin, low, high in ranges(read, first + start, stop - start):
            yield offset + low, high - low, origin


def _joined(copies: Sequence[Copied]) -> tuple[Copied, ...]:
    """Join copies that adjoin in both files; leave short ones out."""
    result: list[Copied] = []
    for copied in copies:
        last = result[-1] if result else None
        if last is not None and copied.begin < last.begin + last.nbytes:
            continue  # twice the same
        is_next = (
            last is not None
            and last.source == copied.source
            and last.begin + last.nbytes == copied.begin
            and last.offset + last.nbytes == copied.offset
        )
        if last is not None and is_next:
            result[-1] = last._replace(nbytes=last.nbytes + copied.nbytes)
        else:
            result.append(copied)
    return tuple(copied for copied in result if copied.nbytes >= LEAST_BYTES)


def copied_bytes(plan: Plan, groups: Iterable[Iterable[int]]) -> tuple[int, int]:
    """Return how many bytes are copied, and how many are not read therefore: a group of files reads a byte once."""
    copied = unread = 0
    for group in groups:
        copies = [part.copied for n in group if n in plan.copies for part in upload_of(plan, n).parts if part.copied]
        copied += sum(copy.nbytes for copy in copies)
        unread += sum(nbytes for nbytes, _, _ in {copy[1:] for copy in copies})
    return copied, unread


def upload_of(plan: Plan, number: int) -> Upload:
    """Return how a target file is sent, by its size and the ranges that are copied."""
    return Upload(parts_of(plan.size_of(plan.files[number]), plan.copies.get(number, ())))


def needed_pieces(plan: Plan, pieces: Sequence[Piece], skips: Mapping[int, Spans]) -> tuple[Piece, ...]:
    """Return the rows of which any byte must be written.

    Args:
        plan: the plan of the transfers.
        pieces: the rows of the transfers, in the order of the files.
        skips: the ranges of each file that need not be written, by file number; joined and ascending.
    """
    return tuple(needed for piece in pieces for needed in _needed(plan.transfers[piece.transfer], piece, skips))


def _needed(transfer: Transfer, piece: Piece, skips: Mapping[int, Spans]) -> Iterator[Piece]:
    """Yield the rows of a piece of which any byte must be written."""
    recipe, axis, size = transfer.recipe, transfer.axis, transfer.target_dtype.itemsize
    rows: list[tuple[int, int]] = []
    for target, replicas in enumerate(transfer.writes):

        def before(row: int, target: int = target) -> int:
            return recipe.elements_before(target, axis, row) * size

        begin, end = before(piece.start), before(piece.stop)
        for file, runs, _ in replicas:
            for start, stop in _uncovered(runs, begin, end, skips.get(file, [])):
                span = range(piece.start, piece.stop + 1)
                first = bisect_right(span, start, key=before) - 1
                last = bisect_left(span, stop, key=before)
                rows.append((span[first], span[last]))
    for start, stop in merged(rows):
        yield Piece(piece.transfer, start, stop)


def _uncovered(runs: Runs, begin: int, end: int, skips: Spans) -> Iterator[tuple[int, int]]:
    """Yield the bytes of a block, from `begin` to `end`, that are not skipped in a file."""
    for offset, start, stop in ranges(runs, begin, end - begin):
        shift = begin + start - offset
        position, last = offset, offset + stop - start
        index = max(bisect_right(skips, (position, 1 << 63)) - 1, 0)
        while index < len(skips) and skips[index][0] < last:
            low, high = skips[index]
            if low > position:
                yield position + shift, low + shift
            position = max(position, high)
            index += 1
        if position < last:
            yield position + shift, last + shift
