"""The parts of a file at S3: sent, or copied on the server from another object."""

from __future__ import annotations

from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LEAST_PART_BYTES = 8 << 20
"""The smallest size of parts, unless parts are copied."""

LEAST_BYTES = 5 << 20
"""The smallest part that S3 takes, but for the last one."""

_COPY_BYTES = 256 << 20  # of one copy: a longer run is copied in several parts at once
_MOST_PARTS = 9_000  # S3 takes 10,000


def part_bytes(size: int) -> int:
    """Return the part size for the upload of a file of this size, in bytes.

    >>> part_bytes(1 << 20) >> 20, part_bytes(1 << 40) >> 20
    (8, 117)
    """
    return max(LEAST_PART_BYTES, -(-size // (_MOST_PARTS << 20)) << 20)


class Copied(NamedTuple):
    """A byte range of a file that is a byte range of an object in the same store.

    Attributes:
        begin, nbytes: the range in the file.
        source: identifies the object.
        offset: the offset of the range in the object.
    """

    begin: int
    nbytes: int
    source: int
    offset: int


class UploadPart(NamedTuple):
    """A part of a file.

    Attributes:
        begin, end: its bytes in the file.
        copied: the range that it is copied from; None if it is sent.
    """

    begin: int
    end: int
    copied: Copied | None = None


def parts_of(size: int, copies: Sequence[Copied] = ()) -> list[UploadPart]:
    """Cut a file into parts, some of which are copied.

    Each part before the last must have `LEAST_BYTES`, so a short part before a copy takes bytes from it.

    Args:
        size: the size of the file, in bytes.
        copies: the ranges that can be copied, disjoint and ascending.

    >>> mib = 1 << 20
    >>> parts = parts_of(40 * mib, [Copied(mib, 30 * mib, 0, 0)])
    >>> [(part.begin // mib, part.end // mib, part.copied is not None) for part in parts]
    [(0, 5, False), (5, 31, True), (31, 39, False), (39, 40, False)]
    """
    least = LEAST_BYTES
    while True:
        parts = _parts(size, copies, least)
        if len(parts) <= _MOST_PARTS or not copies:
            return parts
        least *= 2  # without short copies there are fewer parts


def _parts(size: int, copies: Sequence[Copied], least: int) -> list[UploadPart]:
    """Return the parts of a file with copies of at least `least` bytes."""
    most = part_bytes(size)
    parts: list[UploadPart] = []
    position = 0
    for copied in copies:
        sent = copied.begin - position
        lead = 0
        if 0 < sent < LEAST_BYTES:
            lead = LEAST_BYTES - sent
        elif most < sent < 2 * LEAST_BYTES:  # too much for one part, too little for two
            lead = 2 * LEAST_BYTES - sent
        nbytes = copied.nbytes - lead
        if nbytes < least:
            continue
        begin, end = copied.begin + lead, copied.begin + copied.nbytes
        parts += _sent(position, begin, most, is_last=False)
        count = -(-nbytes // _COPY_BYTES)
        edges = [begin + nbytes * number // count for number in range(count + 1)]
        for first, last in pairwise(edges):
            offset = copied.offset + first - copied.begin
            parts.append(UploadPart(first, last, Copied(first, last - first, copied.source, offset)))
        position = end
    return [*parts, *_sent(position, size, most, is_last=True)]


def _sent(begin: int, end: int, most: int, *, is_last: bool) -> list[UploadPart]:
    """Cut bytes that are sent into parts; the last part of a file may be short."""
    nbytes = end - begin
    if is_last:
        return [UploadPart(first, min(first + most, end)) for first in range(begin, end, most)]
    count = -(-nbytes // most)
    edges = [begin + nbytes * number // count for number in range(count + 1)] if count else []
    return [UploadPart(first, last) for first, last in pairwise(edges)]


class Upload(NamedTuple):
    """How a file is sent.

    Attributes:
        parts: its parts, in order.
        identifier: the identifier of an upload that was begun before; "" to begin one.
        done: the entity tags of the parts that it has, by number from 1 on.
        sources: the objects that are copied from: bucket, key and entity tag, by identity as in `Copied`.
    """

    parts: Sequence[UploadPart]
    identifier: str = ""
    done: Mapping[int, str] = MappingProxyType({})
    sources: Mapping[int, tuple[str, str, str]] = MappingProxyType({})

    @property
    def skips(self) -> list[tuple[int, int]]:
        """Return the byte ranges of the file that need not be written, part by part."""
        skipped = (part for number, part in enumerate(self.parts, 1) if part.copied or number in self.done)
        return [(part.begin, part.end) for part in skipped]

    @property
    def kept_bytes(self) -> int:
        """Return how many bytes of the file the upload has already."""
        return sum(part.end - part.begin for number, part in enumerate(self.parts, 1) if number in self.done)

    @property
    def copied_bytes(self) -> int:
        """Return how many bytes of the file are still to be copied."""
        unsent = (part for number, part in enumerate(self.parts, 1) if part.copied and number not in self.done)
        return sum(part.end - part.begin for part in unsent)
