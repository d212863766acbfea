"""The directory of a zip of stored records, which `torch.save` makes: what has which name, and where it lies.

Records are stored as they are, so that each is a range of the zip. They lie one behind the other, from the first byte
to the directory: a header with padding, the contents, and mostly a descriptor. So the directory says where the contents
of each begin, and these neither overlap nor go beyond it. Each header says so again, and is compared with that.

Sources: PKWARE's APPNOTE 6.3.10; PyTorch 2.13 `caffe2/serialize/inline_container.cc`, which always writes zip64 ends.
"""

from __future__ import annotations

from struct import Struct, pack, unpack
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from reshard.errors import SourceError
from reshard.storage.places import any_store, in_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from reshard.formats.entries import RangeReader
    from reshard.storage.base import ReadStore, Want

LARGE = 0xFFFFFFFF
"""Numbers from this on are in fields of zip64."""

_MOST_RECORDS = 1 << 18  # three for each weight of the largest models, in the states of their optimizers
_LARGEST_DIRECTORY = 1 << 25
_LOCAL = Struct("<4s5H3I2H")
_ENTRY = Struct("<4s4x2H4x3I4H6xI")
_END = Struct("<4s6xH2IH")
_END64 = Struct("<4s28x3Q")
_ENDING = 98  # bytes behind a directory, with zip64
_LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."  # the magic number, pickled, of before PyTorch 1.6


class Damaged(Exception):  # noqa: N818 -- it says what a zip is
    """A zip is not one of stored records: a short fact."""


class Record(NamedTuple):
    """A record as the directory has it; places and sizes are in bytes.

    Attributes:
        entry: the fixed part of its entry there.
        name: behind that.
        extra: likewise.
        header: where its own header begins, directly behind the record before.
        begin: where its contents do.
        size: of these.
        crc: the CRC-32 of these.
        tail: the size of what lies behind them.
    """

    entry: bytes
    name: bytes
    extra: bytes
    header: int
    begin: int
    size: int
    crc: int
    tail: int

    @property
    def end(self) -> int:
        """Where the next record begins."""
        return self.begin + self.size + self.tail

    @property
    def label(self) -> str:
        """Its name without the directory that all have."""
        return _text(self.name)

    @property
    def least(self) -> int:
        """How many bytes its own header has at least."""
        return _LOCAL.size + len(self.name)

    def check(self, header: bytes | bytearray) -> None:
        """Raise `Damaged` where the beginning of its own header is not what the directory says."""
        mark, _, _, method, *_, of_name, of_more = _LOCAL.unpack_from(header)
        lengths = len(self.name), self.begin - self.header - self.least
        if mark != b"PK\3\4" or method or (of_name, of_more) != lengths or header[_LOCAL.size :] != self.name:
            raise Damaged(f"has no record {self.label!r} at byte {self.header:,}, where its directory says it is")


def directory(size: int, read: Callable[[int, int], bytes]) -> tuple[list[Record], int]:
    """Return the records of a zip, and where its directory ends.

    Args:
        size: of the zip.
        read: returns bytes of it: from which one on, and how many.

    Raises:
        Damaged: it does not end as a zip does, or has records that are not stored, or not where they can be.
    """
    ending = read(max(size - _ENDING, 0), min(size, _ENDING))
    if ending[-_END.size : 4 - _END.size] != b"PK\5\6":
        raise Damaged("is no zip archive, or is cut off")
    _, count, nbytes, begin, _ = _END.unpack(ending[-_END.size :])
    end = size - _END.size
    if ending[_END64.size : _END64.size + 4] == b"PK\6\7":
        _, count, nbytes, begin = _END64.unpack_from(ending)
        end = size - _ENDING
    if begin + nbytes != end:
        raise Damaged("has a directory that goes beyond its end, or does not reach it")
    if count > _MOST_RECORDS or nbytes > _LARGEST_DIRECTORY:
        raise Damaged(f"has {count:,} records in a directory of {nbytes:,} bytes; at most {_MOST_RECORDS:,} are read")
    if not 0 < count * _ENTRY.size <= nbytes:
        raise Damaged(f"has a directory of {nbytes:,} bytes for {count:,} records")
    return list(_records(read(begin, nbytes), count, begin)), end


def carries_sums(records: Collection[Record]) -> bool:
    """Return whether the records of a zip have sums: PyTorch can be told to make none, and then all of them are 0."""
    return any(record.crc for record in records) or not any(record.size for record in records)


def endings(count: int, begin: int, nbytes: int) -> tuple[bytes, ...]:
    """Return what can stand behind a directory of so many records: what PyTorch writes, then what Python does.

    Args:
        count: how many records there are.
        begin: where the directory begins.
        nbytes: how many bytes it has.
    """
    few, small, near = min(count, 0xFFFF), min(nbytes, LARGE), min(begin, LARGE)
    end = pack("<4s4H2IH", b"PK\5\6", 0, 0, few, few, small, near, 0)
    locator = pack("<4sIQI", b"PK\6\7", 0, begin + nbytes, 1)
    wide = [
        pack("<4sQ2H2I4Q", b"PK\6\6", 44, made_by, 45, 0, 0, count, count, nbytes, begin) + locator + end
        for made_by in (0x31E, 45)
    ]
    return (*wide, end)


def _records(content: bytes, count: int, end: int) -> Iterator[Record]:
    """Yield the records of a directory, which begins where the last of them ends."""
    found: dict[bytes, Record] = {}
    at = 0
    for _ in range(count):
        entry = content[at : at + _ENTRY.size]
        if entry[:4] != b"PK\1\2" or len(entry) < _ENTRY.size:
            raise Damaged("has a directory that ends early")
        _, flags, method, crc, packed, size, of_name, of_extra, comment, disk, header = _ENTRY.unpack(entry)
        at += _ENTRY.size + of_name + of_extra
        name, extra = content[at - of_extra - of_name : at - of_extra], content[at - of_extra : at]
        if method or flags & 1:
            raise Damaged(f"has the record {_text(name)!r} {'encrypted' if flags & 1 else 'compressed'}")
        is_wide = extra[:2] == b"\1\0"
        packed, size, header = _wide([packed, size, header], extra) if is_wide else (packed, size, header)
        if packed != size or comment or disk or name in found:
            raise Damaged(f"has the record {_text(name)!r} twice, or is not one of plain records")
        tail = (24 if is_wide else 16) if flags & 8 else 0  # sum and sizes stand behind the contents
        found[name] = Record(entry, name, extra, header, 0, size, crc, tail)
    begins = [one.header for one in found.values()]
    if at != len(content) or begins[0]:
        raise Damaged("has a directory with other bytes than its records, or before these")
    for one, stop in zip(found.values(), [*begins[1:], end], strict=True):
        begin = stop - one.tail - one.size
        if not 0 <= begin - one.header - one.least <= 0xFFFF:
            raise Damaged(f"has the record {one.label!r} of a size or at a place that cannot be")
        yield one._replace(begin=begin)


def _wide(numbers: list[int], extra: bytes) -> list[int]:
    """Return sizes and the place of a record, of which those that are large are in its field of zip64."""
    some = extra[4 : 4 + int.from_bytes(extra[2:4], "little")]
    if len(some) != 8 * numbers.count(LARGE):
        raise Damaged("has a directory with sizes that are not whole")
    wide = iter(unpack(f"<{len(some) // 8}Q", some))
    return [next(wide) if number == LARGE else number for number in numbers]


def _text(name: bytes) -> str:
    return name.partition(b"/")[2][:60].decode(errors="replace") or "a record without a name"


class Content(NamedTuple):
    """The contents of a record, to be read as if they were a file."""

    reader: RangeReader
    begin: int
    size: int

    @property
    def path(self) -> str:
        """The file."""
        return self.reader.path

    def upto(self, offset: int, nbytes: int) -> bytes:
        """Return at most so many bytes from one on."""
        return self.reader.read(self.begin + offset, max(min(nbytes, self.size - offset), 0))


class Archive:
    """A file that is a zip of records.

    Attributes:
        reader: reads the file.
        records: all that it has, by their names without the directory that all have.
    """

    def __init__(self, reader: RangeReader) -> None:
        """Read the directory; raise `SourceError` where it is not valid."""
        self.reader = reader
        start = reader.upto(0, len(_LEGACY))
        if start == _LEGACY:
            raise SourceError(
                f"{reader.path} was saved by PyTorch before 1.6, which made no zip",
                code="unsupported-version",
                hint="load and save it with a newer PyTorch",
            )
        if start[:4] != b"PK\3\4":
            self._refuse(f"begins with {start[:8].hex(' ') or 'nothing'}")
        try:
            found, _ = directory(reader.size, reader.read)
        except Damaged as error:
            self._refuse(str(error))
        root = found[0].name[: found[0].name.find(b"/") + 1]
        self.records = {record.name.removeprefix(root): record for record in found}

    def checked(self, names: Collection[bytes]) -> dict[bytes, Record]:
        """Return some records, their headers compared with the directory; at URLs, many are read at once.

        Raises:
            SourceError: a record is not there, or its own header says otherwise than the directory.
        """
        for name in names:
            if name not in self.records:
                self._refuse(f"has no record {name.decode(errors='replace')!r:.60}")
        found = {name: self.records[name] for name in names}

        def steps() -> Iterator[tuple[tuple[Record, bytearray], ReadStore, list[Want]]]:
            for record in found.values():
                header = bytearray(record.least)
                yield (record, header), any_store(), [(self.reader.path, record.header, memoryview(header))]

        for record, header in in_batches(steps()):
            try:
                record.check(header)
            except Damaged as error:
                self._refuse(str(error))
        return found

    def content(self, name: bytes) -> Content:
        """Return the contents of a record; errors as for `checked`."""
        record = self.checked([name])[name]
        return Content(self.reader, record.begin, record.size)

    def _refuse(self, why: str) -> NoReturn:
        raise SourceError(
            f"{self.reader.path} is not a complete file of torch.save", code="corrupt", facts=[f"it {why}"]
        )
