"""What was written, as ranges with checksums: by file, as sums of blocks, and whether a file is complete."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from reshard.core.model.entries import covers, merged, ranges
from reshard.core.records.logs import Record, known
from reshard.core.storage.crc import CASTAGNOLI, combine, crc32, crc_of_range
from reshard.core.storage.local import local_store

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from reshard.core.model.entries import FileLayout, Spans
    from reshard.core.plan.plan import Plan
    from reshard.core.records.logs import Range


class Checksums(Mapping[str, Mapping[str, int]]):
    """A lazy mapping of target file to tensor to the CRC-32C of its contents.

    A block with parts that were written twice, around a crash, may have no checksum; a linked file has none.

    Attributes:
        root: the target directory.
        files: the target files.
        sources: paths of the source files.
    """

    def __init__(self, plan: Plan, root: str) -> None:
        self.root, self.files = root, plan.files
        self.sources = [file.path for file in plan.source.files]
        self._files = {file.path: file for file in plan.files}
        self._records: dict[str, Record] | None = None

    def load(self) -> Mapping[str, Record]:
        """Return the records of the files; read them once."""
        if self._records is None:
            self._records = known(self.root, list(self._files)).records
        return self._records

    def __getitem__(self, path: str) -> dict[str, int]:
        file = self._files[path]
        wrote = longest(self.load().get(path, Record()).ranges)
        sums = {content.name: sum_of(content.runs, wrote) for content in file.layout.contents if content.text is None}
        return {name: value for name, value in sums.items() if value is not None}

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def in_files(plan: Plan, wrote: Sequence[int]) -> dict[int, list[Range]]:
    """Return the ranges of a receipt as ranges of files, by file number."""
    by_file: dict[int, list[Range]] = {}
    for start in range(0, len(wrote), 5):
        number, target, begin, nbytes, crc = wrote[start : start + 5]
        transfer = plan.transfers[number]
        for replica in transfer.route.writes[target]:
            for offset, _, _ in ranges(transfer.write_runs[replica.runs_index], begin, nbytes):
                by_file.setdefault(replica.file, []).append((offset, nbytes, crc))
    return by_file


def longest(wrote: Iterable[Range]) -> dict[int, tuple[int, int]]:
    """Return ranges by begin; the longest, if a crash led to several."""
    return {begin: (nbytes, crc) for begin, nbytes, crc in sorted(wrote)}


def sum_of(
    runs: Sequence[tuple[int, int]], wrote: Mapping[int, tuple[int, int]], polynomial: int = CASTAGNOLI
) -> int | None:
    """Combine range checksums into the sum of a block; None if they do not cover it.

    Args:
        runs: the runs of the contents in the file.
        wrote: bytes and sum of ranges, by begin.
        polynomial: the CRC polynomial of the sums; CRC-32C by default.
    """
    value = 0
    for offset, nbytes in runs:
        end = offset
        while end < offset + nbytes:
            length, crc = wrote.get(end, (0, 0))
            if not 0 < length <= offset + nbytes - end:
                return None
            value = combine(value, crc, length, polynomial)
            end += length
    return value


def spans_of(wrote: Iterable[Range]) -> Spans:
    """Return the joined byte ranges, without their sums."""
    return merged((begin, begin + nbytes) for begin, nbytes, _ in wrote)


def is_complete(path: str, layout: FileLayout, spans: Spans) -> bool:
    """Return whether a file written in order has all contents, literals and sums.

    Args:
        path: the path of the unfinished file.
        layout: its planned contents.
        spans: the byte ranges that are written.
    """
    if not all(covers(spans, at, at + n) for content in layout.contents for at, n in content.runs):
        return False
    for offset, content in layout.literals:
        stored = bytearray(len(content))
        local_store().read_into(path, offset, memoryview(stored))
        if stored != content:
            return False
    for begin, nbytes, places in layout.crcs:
        stored = bytearray(4 * len(places))
        for at, crc_offset in enumerate(places):
            local_store().read_into(path, crc_offset, memoryview(stored)[4 * at : 4 * at + 4])
        if stored != crc_of_range(local_store(), path, begin, nbytes, crc32).to_bytes(4, "little") * len(places):
            return False
    return True
