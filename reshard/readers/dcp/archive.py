"""The sums that a zip of `torch.save` carries: an item of PyTorch's distributed checkpoints, or a file.

1. The directory has the name, place, size and sum of each record (`records`).
2. The header of each record, what lies behind its contents, and the end of the zip are compared with the directory.
3. Short contents are summed at once. Of others it is said where they are, so that they are read in bands.

So each bit is under a sum, stands in two places, or can have one value only. torch.load looks at none of it. A program
may have told PyTorch to compute no sums (`torch.serialization.set_crc32_options`): then all of them are 0.

Sources: APPNOTE.TXT 6.3.10 of PKWARE; PyTorch 2.13 `caffe2/serialize/inline_container.cc` and its miniz, and what these
wrote (`tests/data/dcp`).
"""

from __future__ import annotations

from functools import lru_cache
from struct import pack
from typing import TYPE_CHECKING, NamedTuple

from reshard.formats.entries import Summed
from reshard.readers.dcp.records import Damaged, Record, carries_sums, directory, endings
from reshard.storage.crc import crc32, crc32_fault
from reshard.storage.places import in_batches

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reshard.storage.base import ReadStore, Want

_WHOLE = 64 << 10  # a zip of at most so many bytes is read at once
_SHORT, _MOST_SHORT = 4 << 10, 1 << 12  # of others, contents that are read with the headers; of how many records
_TAIL = 4 << 10  # of these, what is read first; it has all of most directories
_MOST_HEADERS = 64 << 20


class Part(NamedTuple):
    """A zip: whose it is, where it begins in its file, and its bytes; without a name it is the file."""

    name: str
    begin: int
    nbytes: int

    @property
    def text(self) -> str:
        """Where it is, in words."""
        return f"its item at byte {self.begin} of the file" if self.name else "the file"


class Archives(NamedTuple):
    """The zips of a file that are not encoded, which carry sums."""

    parts: tuple[Part, ...]

    def read(self, path: str, store: ReadStore) -> Iterator[Summed]:
        """Yield each, its headers compared and its short records summed."""
        for item, frame in in_batches(_frames(path, store, in_batches(_tails(path, store, self.parts)))):
            yield item.checked(frame)


class _Item(NamedTuple):
    """A zip of which the directory is read.

    Attributes:
        part: which it is.
        records: of its directory.
        short: the most bytes of contents that are read with its headers.
        fault: why it has none.
    """

    part: Part
    records: Sequence[Record]
    short: int
    fault: str = ""

    def checked(self, frame: memoryview) -> Summed:
        """Return what is known of it once all but long contents is read."""
        at = self.part.text
        if self.fault:
            return Summed(self.part.name, self.part[1:], faults=(f"{at} {self.fault}",))
        carries = carries_sums(self.records)
        faults, left = [], []
        place = 0
        for record in self.records:
            header = frame[place : place + record.begin - record.header]
            place += len(header)
            content = None
            if record.size <= self.short:
                content = frame[place : place + record.size]
                place += record.size
            elif carries:
                run = self.part.begin + record.begin, record.size
                left.append((f"{record.label} in {at}", (run,), record.crc))
            fault = _fault(record, bytes(header), bytes(frame[place : place + record.tail]))
            if not fault and carries and content is not None:
                fault = crc32_fault(crc32(content), record.crc)
            if fault:
                faults.append(f"{record.label} in {at} {fault}")
            place += record.tail
        return Summed(self.part.name, self.part[1:], tuple(left), tuple(faults), carries)


def _fault(record: Record, header: bytes, descriptor: bytes) -> str:
    """Return in what a record differs from the directory; empty where in nothing.

    Where a descriptor stands behind the contents, sum and sizes in the header may be 0, as they were not known yet.
    """
    entry, extra, behind = record.entry, record.extra, record.least
    end, of_extra = behind + len(extra), (len(header) - behind).to_bytes(2, "little")
    expected = b"PK\3\4" + entry[6:16], entry[28:30] + of_extra + record.name, _padding(len(header) - end)
    early = header[14:26]
    if (
        (header[:14], header[26:behind], header[end:]) != expected
        or (early != entry[16:28] and (early != bytes(12) or not record.tail))
        or (header[behind:end] != extra and not (record.tail and _is_early(header[behind:end], extra)))
    ):
        return "has another header than the central directory says"
    sizes = "<4sI2Q" if record.tail == 24 else "<4s3I"
    if record.tail and descriptor != pack(sizes, b"PK\7\10", record.crc, record.size, record.size):
        return "has another sum or size behind it than in the central directory"
    return ""


def _tails(
    path: str, store: ReadStore, parts: Sequence[Part]
) -> Iterator[tuple[tuple[Part, memoryview], ReadStore, list[Want]]]:
    """Yield what is read first of items: the whole of a short one, the end of another."""
    for part in parts:
        nbytes = part.nbytes if part.nbytes <= _WHOLE else _TAIL
        view = memoryview(bytearray(nbytes))
        yield (part, view), store, [(path, part.begin + part.nbytes - nbytes, view)]


def _frames(
    path: str, store: ReadStore, tails: Iterator[tuple[Part, memoryview]]
) -> Iterator[tuple[tuple[_Item, memoryview], ReadStore, list[Want]]]:
    """Yield what is read next: the headers of records and short contents, one behind the other."""
    for part, tail in tails:
        try:
            records = _directory(path, store, part, tail)
            short = _WHOLE if part.nbytes <= _WHOLE else _SHORT if len(records) <= _MOST_SHORT else 0
            runs = _runs(records, short)
        except Damaged as error:
            yield (_Item(part, (), 0, str(error)), memoryview(b"")), store, []
            continue
        if len(tail) == part.nbytes:
            yield (_Item(part, records, short), tail), store, []
            continue
        frame = memoryview(bytearray(sum(length for _, length in runs)))
        wanted: list[Want] = []
        place = 0
        for begin, length in runs:
            wanted.append((path, part.begin + begin, frame[place : place + length]))
            place += length
        yield (_Item(part, records, short), frame), store, wanted


def _runs(records: Sequence[Record], short: int) -> list[tuple[int, int]]:
    """Return where the headers of records, and contents that are short, lie in an item."""
    runs: list[tuple[int, int]] = []
    begin = 0
    for record in records:
        if record.size > short:
            runs.append((begin, record.begin - begin))
            begin = record.begin + record.size
    runs.append((begin, records[-1].end - begin))
    if sum(length for _, length in runs) > _MOST_HEADERS:
        raise Damaged(f"has more than {_MOST_HEADERS:,} bytes of headers")
    return runs


def _directory(path: str, store: ReadStore, part: Part, tail: memoryview) -> list[Record]:
    """Return the records of a zip of which the end is here; raise `Damaged` where that is not as it is written."""

    def read(begin: int, nbytes: int) -> bytes:
        start = begin - (part.nbytes - len(tail))
        if start >= 0:
            return bytes(tail[start : start + nbytes])
        held = bytearray(nbytes)
        store.read_into(path, part.begin + begin, memoryview(held))
        return bytes(held)

    records, end = directory(part.nbytes, read)
    begin, ending = records[-1].end, read(end, part.nbytes - end)
    if ending not in endings(len(records), begin, end - begin):
        raise Damaged("does not end as a zip archive does")
    first = records[0].entry
    if any((one.entry[4:6], one.entry[36:42]) != (first[4:6], first[36:42]) for one in records):
        raise Damaged("has other attributes of one record in its central directory than of others")
    return records


@lru_cache(maxsize=256)
def _padding(nbytes: int) -> bytes:
    """Return what PyTorch fills a header up with, a field of its own."""
    return b"FB" + (nbytes - 4).to_bytes(2, "little") + b"Z" * (nbytes - 4) if nbytes >= 4 else b""


def _is_early(extra: bytes, expected: bytes) -> bool:
    """Return whether the large sizes in a header are those of the directory, or 0, as they were not known by then."""
    return extra[:4] == expected[:4] and all(
        extra[at : at + 8] in {expected[at : at + 8], bytes(8)} for at in range(4, len(expected), 8)
    )
