"""What receipts and the ledger say was written: where in which file, and the checksums of whole tensors from those."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from reshard.formats.entries import ranges
from reshard.source.records import Record, known
from reshard.storage.crc32c import combine

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from reshard.plan.plan import Plan
    from reshard.source.records import Range


class Checksums(Mapping[str, Mapping[str, int]]):
    """Target file to tensor to the CRC-32C of its contents there, from the ledger, which is read when asked for.

    A block that was written twice in parts, around a crash, may have none. A linked file has those of the one it is a
    link to.

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

    def __getitem__(self, path: str) -> dict[str, int]:
        file = self._files[path]
        if self._records is None:
            self._records = known(self.root, list(self._files)).records
        wrote = longest(self._records.get(file.link or path, Record()).ranges)
        found = {content.name: sum_of(content.runs, wrote) for content in file.layout.contents if content.text is None}
        return {name: value for name, value in found.items() if value is not None}

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def in_files(plan: Plan, wrote: Sequence[int]) -> dict[int, list[Range]]:
    """Return where in which file the ranges of a receipt are: ranges by the files' numbers."""
    found: dict[int, list[Range]] = {}
    for place in range(0, len(wrote), 5):
        number, target, begin, nbytes, crc = wrote[place : place + 5]
        move = plan.moves[number]
        for file, runs in move.way.writes[target]:
            for offset, _, _ in ranges(move.write_runs[runs], begin, nbytes):
                found.setdefault(file, []).append((offset, nbytes, crc))
    return found


def longest(wrote: Iterable[Range]) -> dict[int, tuple[int, int]]:
    """Return ranges by their begins; of those written twice around a crash, the longest."""
    return {begin: (nbytes, crc) for begin, nbytes, crc in sorted(wrote)}


def sum_of(runs: Sequence[tuple[int, int]], wrote: Mapping[int, tuple[int, int]]) -> int | None:
    """Return the CRC-32C of a block's contents, from those of ranges of its file; None where they do not make it up."""
    value = 0
    for offset, nbytes in runs:
        end = offset
        while end < offset + nbytes:
            length, crc = wrote.get(end, (0, 0))
            if not 0 < length <= offset + nbytes - end:
                return None
            value = combine(value, crc, length)
            end += length
    return value
