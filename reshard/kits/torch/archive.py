"""Read the zip archives of `torch.save`: an item of a distributed checkpoint, or a file.

Records are stored without compression, one directly behind the other: a header with padding, the contents, and usually
a descriptor. So the central directory gives the range of each record's contents, and these ranges neither overlap nor
leave the archive. The name and the lengths in a record's own header are compared with it.

Each record has a CRC-32, unless `torch.serialization.set_crc32_options` turned them off: then all are 0. Other fields
of headers, such as times and versions, change nothing and are not verified. torch.load verifies no checksum.

Sources: PKWARE's APPNOTE 6.3.10; PyTorch 2.13 `caffe2/serialize/inline_container.cc`, which always writes zip64 ends,
and its miniz; archives that these wrote (`tests/data/dcp`).
"""

from __future__ import annotations

from struct import Struct, pack, unpack
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from reshard.core.model.entries import Summed, merged
from reshard.core.storage.base import COPY_AGAIN
from reshard.core.storage.crc import crc32, crc32_fault
from reshard.core.storage.places import any_store, in_batches
from reshard.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from reshard.core.model.entries import RangeReader, Spans
    from reshard.core.storage.base import ReadStore, Want

LARGE = 0xFFFFFFFF
"""Numbers from this on are in zip64 fields."""

_MOST_RECORDS = 1 << 18  # three for each weight of the largest models, in the states of their optimizers
_LARGEST_DIRECTORY = 1 << 25
_LOCAL = Struct("<4s4xH4x3I2H")
_ENTRY = Struct("<4s4x2H4x3I4H2x2I")
_END = Struct("<10xH2I2x")
_END64 = Struct("<32x3Q")
_ENDING = 98  # bytes behind a directory, with zip64
_DESCRIPTOR = b"PK\7\10"
_FLAGS = 0x808  # in a directory: names are UTF-8; a descriptor follows the contents
_IS_DIRECTORY = 16  # of external attributes; PyTorch reads such a record as nothing

# for `verify`
_WHOLE = 64 << 10  # an archive of at most this size is read at once
_SHORT, _MOST_SHORT = 4 << 10, 1 << 12  # larger ones: contents read with the headers; the most records for it
_TAIL = 4 << 10  # larger ones: bytes at the end that are read first, which contain most directories
_MOST_HEADERS = 64 << 20
_CUT = "is no zip archive, or is cut off"


class Damaged(Exception):  # noqa: N818 -- it describes an archive
    """An archive is not a zip of stored records. The message does not name the file."""


class ZipRecord(NamedTuple):
    """A record as the central directory describes it; offsets and sizes are in bytes.

    Attributes:
        name: the name in the archive.
        header: the offset of its own header, directly behind the previous record.
        begin: the offset of its contents.
        size: the size of its contents.
        crc: the CRC-32 of its contents.
        end: the offset behind its descriptor.
    """

    name: bytes
    header: int
    begin: int
    size: int
    crc: int
    end: int

    @property
    def label(self) -> str:
        """Return the name without the top directory, for messages."""
        return _label(self.name)

    @property
    def least(self) -> int:
        """Return the size of its own header without extra fields."""
        return _LOCAL.size + len(self.name)

    def check(self, header: bytes | bytearray | memoryview) -> None:
        """Raise `Damaged` if its own header, of `least` bytes or more, contradicts the directory."""
        mark, method, *_, name_bytes, extra_bytes = _LOCAL.unpack_from(header)
        lengths = len(self.name), self.begin - self.header - self.least
        name = header[_LOCAL.size : self.least]
        if mark != b"PK\3\4" or method or (name_bytes, extra_bytes) != lengths or name != self.name:
            raise Damaged(f"has no record {self.label!r} at byte {self.header:,}, where its directory says it is")


def directory(size: int, read: Callable[[int, int], bytes]) -> list[ZipRecord]:
    """Return the records of an archive, from its central directory.

    Args:
        size: the size of the archive.
        read: returns bytes of the archive, by offset and length.

    Raises:
        Damaged: the archive does not end as a zip does, or has records that are not stored one behind the other.
    """
    tail = read(max(size - _ENDING, 0), min(size, _ENDING))
    if tail[-_END.size : 4 - _END.size] != b"PK\5\6":
        raise Damaged(_CUT)
    count, nbytes, begin = _END.unpack(tail[-_END.size :])
    is_wide = tail[_END64.size : _END64.size + 4] == b"PK\6\7"
    if is_wide:
        count, nbytes, begin = _END64.unpack_from(tail)
    width = _ENDING if is_wide else _END.size
    if begin + nbytes != size - width:
        raise Damaged("has a directory that goes beyond its end, or does not reach it")
    if count > _MOST_RECORDS or nbytes > _LARGEST_DIRECTORY:
        raise Damaged(f"has {count:,} records in a directory of {nbytes:,} bytes; at most {_MOST_RECORDS:,} are read")
    if not 0 < count * _ENTRY.size <= nbytes:
        raise Damaged(f"has a directory of {nbytes:,} bytes for {count:,} records")
    records = list(_entries(read(begin, nbytes), count, begin))
    tail, expected = tail[-width:], ending(count, begin, nbytes)[-width:]
    if tail[:12] + tail[16:] != expected[:12] + expected[16:]:  # between them: the versions in zip64 ends
        raise Damaged("does not end as a zip archive does")
    return records


def ending(count: int, begin: int, nbytes: int) -> bytes:
    """Return the bytes behind a directory of `count` records, with zip64 ends as PyTorch writes them."""
    few, small, near = min(count, 0xFFFF), min(nbytes, LARGE), min(begin, LARGE)
    return (
        pack("<4sQ2H2I4Q", b"PK\6\6", 44, 0x31E, 45, 0, 0, count, count, nbytes, begin)
        + pack("<4sIQI", b"PK\6\7", 0, begin + nbytes, 1)
        + pack("<4s4H2IH", b"PK\5\6", 0, 0, few, few, small, near, 0)
    )


def carries_sums(records: Collection[ZipRecord]) -> bool:
    """Return whether the records have checksums; if PyTorch was told to compute none, all are 0."""
    return any(record.crc for record in records) or not any(record.size for record in records)


def checked_records(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the name and contents of each record of an archive after verifying its header and checksum.

    Raises:
        SourceError: it is no zip of stored records, or does not match a checksum. The message does not name the file.
    """
    try:
        records = directory(len(content), lambda begin, nbytes: content[begin : begin + nbytes])
        for record in records:
            record.check(content[record.header : record.header + record.least])
    except Damaged as error:
        raise SourceError(f"is not an object of torch.save: it {error}", code="not-torch-save") from None
    has_sums = carries_sums(records)
    for record in records:
        name, data = record.name.decode(errors="replace"), content[record.begin : record.begin + record.size]
        if has_sums and crc32(data) != record.crc:
            raise SourceError(f"is corrupt: {name!r:.60} does not match its CRC-32", code="wrong-checksum")
        yield name, data


def first_records(head: bytes) -> Iterator[tuple[bytes, int, bytes | None]]:
    """Yield the records at the start of an archive whose headers are complete.

    Each is a name without the top directory, the offset of the contents, and the contents: None if their end is not in
    `head`, or not known.

    Raises:
        Damaged: it is not a zip of stored records.
    """
    at: int | None = 0
    while at is not None and len(head) - at >= _LOCAL.size:
        mark, method, _, _, size, name_bytes, extra_bytes = _LOCAL.unpack_from(head, at)
        if mark != b"PK\3\4" or method:
            raise Damaged("is not a zip archive of plain records")
        name_begin, begin = at + _LOCAL.size, at + _LOCAL.size + name_bytes + extra_bytes
        end, at = _end_of(head, begin, size)
        name = head[name_begin : name_begin + name_bytes].partition(b"/")[2]
        yield name, begin, None if end is None else head[begin:end]


def _end_of(head: bytes, begin: int, size: int) -> tuple[int, int] | tuple[None, None]:
    """Return the end of a record's contents and the offset of the next; None if they are not in `head`.

    If the size in the record's header is 0, a descriptor with the size follows the contents.
    """
    if size:
        return (begin + size, begin + size) if begin + size <= len(head) else (None, None)
    end = head.find(_DESCRIPTOR, begin)
    while end >= 0:
        if int.from_bytes(head[end + 8 : end + 12], "little") == end - begin:
            return end, end + 16
        end = head.find(_DESCRIPTOR, end + 1)
    return None, None


def _entries(content: bytes, count: int, end: int) -> Iterator[ZipRecord]:
    """Yield the records of a directory; the last record ends at `end`, the offset of the directory."""
    entries: dict[bytes, tuple[int, int, int, int]] = {}
    at = 0
    for _ in range(count):
        entry = content[at : at + _ENTRY.size]
        if entry[:4] != b"PK\1\2" or len(entry) < _ENTRY.size:
            raise Damaged("has a directory that ends early")
        _, flags, method, crc, packed, size, *lengths, disk, attributes, header = _ENTRY.unpack(entry)
        name_bytes, extra_bytes, comment = lengths
        at += _ENTRY.size + name_bytes + extra_bytes
        name, extra = content[at - extra_bytes - name_bytes : at - extra_bytes], content[at - extra_bytes : at]
        if method or flags & 1:
            raise Damaged(f"has the record {_label(name)!r} {'encrypted' if flags & 1 else 'compressed'}")
        is_wide = extra[:2] == b"\1\0"
        packed, size, header = _wide([packed, size, header], extra) if is_wide else (packed, size, header)
        has_unsupported = comment or disk or flags & ~_FLAGS or attributes & _IS_DIRECTORY
        if packed != size or has_unsupported or name in entries:
            raise Damaged(f"has the record {_label(name)!r} twice, or is not one of plain records")
        descriptor = (24 if is_wide else 16) if flags & 8 else 0
        entries[name] = header, size, crc, descriptor
    headers = [header for header, *_ in entries.values()]
    if at != len(content) or headers[0]:
        raise Damaged("has a directory with other bytes than its records, or before these")
    for (name, (header, size, crc, descriptor)), stop in zip(entries.items(), [*headers[1:], end], strict=True):
        record = ZipRecord(name, header, stop - descriptor - size, size, crc, stop)
        if not 0 <= record.begin - header - record.least <= 0xFFFF:
            raise Damaged(f"has the record {record.label!r} of a size or at a place that cannot be")
        yield record


def _wide(numbers: list[int], extra: bytes) -> list[int]:
    """Return the sizes and the offset of a record; large ones are in its zip64 field."""
    field = extra[4 : 4 + int.from_bytes(extra[2:4], "little")]
    if len(field) != 8 * numbers.count(LARGE):
        raise Damaged("has a directory with sizes that are not whole")
    wide = iter(unpack(f"<{len(field) // 8}Q", field))
    return [next(wide) if number == LARGE else number for number in numbers]


def _label(name: bytes) -> str:
    return name.partition(b"/")[2][:60].decode(errors="replace") or "a record without a name"


# --- reading a file ---


class RecordReader(NamedTuple):
    """Reads the contents of a record as if they were a file."""

    reader: RangeReader
    begin: int
    size: int

    @property
    def path(self) -> str:
        """Return the path of the archive."""
        return self.reader.path

    def upto(self, offset: int, nbytes: int) -> bytes:
        """Return at most `nbytes` bytes from `offset`."""
        return self.reader.read(self.begin + offset, max(min(nbytes, self.size - offset), 0))


class Archive:
    """A file that is a zip of records.

    Attributes:
        reader: reads the file.
        records: the records, by name without the top directory.
    """

    def __init__(self, reader: RangeReader) -> None:
        """Read the directory.

        Raises:
            SourceError: the file is not a complete archive.
        """
        self.reader = reader
        start = reader.upto(0, 8)
        if start[:4] != b"PK\3\4":
            self._refuse(f"begins with {start.hex(' ') or 'nothing'}")
        try:
            records = directory(reader.size, reader.read)
        except Damaged as error:
            if str(error) == _CUT:
                raise SourceError(
                    f"{reader.path} is truncated: it has {reader.size} bytes, and its zip directory should follow",
                    code="truncated", hint=COPY_AGAIN,
                ) from None  # fmt: skip
            self._refuse(str(error))
        root = records[0].name[: records[0].name.find(b"/") + 1]
        self.records = {record.name.removeprefix(root): record for record in records}

    def checked(self, names: Collection[bytes]) -> dict[bytes, ZipRecord]:
        """Return records after comparing their headers with the directory; at URLs, many are read at once.

        Raises:
            SourceError: a record is missing, or its own header contradicts the directory.
        """
        for name in names:
            if name not in self.records:
                self._refuse(f"has no record {name.decode(errors='replace')!r:.60}")
        records = {name: self.records[name] for name in names}

        def steps() -> Iterator[tuple[tuple[ZipRecord, bytearray], ReadStore, list[Want]]]:
            for record in records.values():
                header = bytearray(record.least)
                yield (record, header), any_store(), [(self.reader.path, record.header, memoryview(header))]

        for record, header in in_batches(steps()):
            try:
                record.check(header)
            except Damaged as error:
                self._refuse(str(error))
        return records

    def content(self, name: bytes) -> RecordReader:
        """Return a reader of a record's contents; errors as for `checked`."""
        record = self.checked([name])[name]
        return RecordReader(self.reader, record.begin, record.size)

    def _refuse(self, why: str) -> NoReturn:
        raise SourceError(
            f"{self.reader.path} is not a complete file of torch.save", code="corrupt", facts=[f"it {why}"]
        )


# --- verifying checksums ---


class ZipPart(NamedTuple):
    """The range of an archive in a file, and the name of its tensor or object; empty if the archive is the file."""

    name: str
    begin: int
    nbytes: int

    @property
    def text(self) -> str:
        """Return a description of the range, for messages."""
        return f"its item at byte {self.begin} of the file" if self.name else "the file"


class Archives(NamedTuple):
    """The archives of a file that are not encoded, to verify their checksums."""

    parts: tuple[ZipPart, ...]

    def read(self, path: str, store: ReadStore) -> Iterator[Summed]:
        """Yield each archive after verifying its headers and short records, not the long ones."""
        for indexed in in_batches(_headers(path, store, in_batches(_tails(path, store, self.parts)))):
            yield indexed.summed()


class _Indexed(NamedTuple):
    """An archive whose directory is read.

    Attributes:
        part: its range.
        records: the records; empty if it has a fault.
        pieces: its bytes but long contents, by offset; each piece begins with a record.
        fault: why the directory is not valid.
    """

    part: ZipPart
    records: Sequence[ZipRecord]
    pieces: Mapping[int, memoryview]
    fault: str = ""

    def summed(self) -> Summed:
        """Verify headers and short contents."""
        location = self.part.text
        faults = [f"{location} {self.fault}"] if self.fault else []
        pending = []
        has_sums = carries_sums(self.records)
        for record in self.records:
            if record.header in self.pieces:
                start, piece = record.header, self.pieces[record.header]
            label = f"{record.label} in {location}"
            begin = record.begin - start
            content = piece[begin : begin + record.size]
            try:
                record.check(piece[record.header - start :])
            except Damaged as error:
                faults.append(f"{location} {error}")
                continue
            if has_sums and len(content) < record.size:
                pending.append((label, ((self.part.begin + record.begin, record.size),), record.crc))
            elif has_sums and (fault := crc32_fault(crc32(content), record.crc)):
                faults.append(f"{label} {fault}")
        return Summed(self.part.name, self.part[1:], tuple(pending), tuple(faults), has_sums)


def _tails(
    path: str, store: ReadStore, parts: Sequence[ZipPart]
) -> Iterator[tuple[tuple[ZipPart, memoryview], ReadStore, list[Want]]]:
    """Yield the first read of each archive: all of a short one, the end of a longer one."""
    for part in parts:
        nbytes = part.nbytes if part.nbytes <= _WHOLE else _TAIL
        view = memoryview(bytearray(nbytes))
        yield (part, view), store, [(path, part.begin + part.nbytes - nbytes, view)]


def _headers(
    path: str, store: ReadStore, tails: Iterator[tuple[ZipPart, memoryview]]
) -> Iterator[tuple[_Indexed, ReadStore, list[Want]]]:
    """Yield the second read of each archive: the headers of records and short contents."""
    for part, tail in tails:
        try:
            records = directory(part.nbytes, _over_tail(path, store, part, tail))
            spans = [] if len(tail) == part.nbytes else _spans(records)
        except Damaged as error:
            yield _Indexed(part, (), {}, str(error)), store, []
            continue
        pieces = {begin: memoryview(bytearray(end - begin)) for begin, end in spans}
        requests = [(path, part.begin + begin, piece) for begin, piece in pieces.items()]
        yield _Indexed(part, records, pieces or {0: tail}), store, requests


def _spans(records: Sequence[ZipRecord]) -> Spans:
    """Return the ranges of headers and short contents in an archive: all but long contents."""
    short = _SHORT if len(records) <= _MOST_SHORT else 0
    spans = merged((record.header, record.begin if record.size > short else record.end) for record in records)
    if sum(end - begin for begin, end in spans) > _MOST_HEADERS:
        raise Damaged(f"has more than {_MOST_HEADERS:,} bytes of headers")
    return spans


def _over_tail(path: str, store: ReadStore, part: ZipPart, tail: memoryview) -> Callable[[int, int], bytes]:
    """Return a function that reads an archive, from its last bytes if they suffice."""

    def read(begin: int, nbytes: int) -> bytes:
        at = begin - (part.nbytes - len(tail))
        if at >= 0:
            return bytes(tail[at : at + nbytes])
        buffer = bytearray(nbytes)
        store.read_into(path, part.begin + begin, memoryview(buffer))
        return bytes(buffer)

    return read
