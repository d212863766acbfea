"""Digests of the headers and pages of files, by which a change is noticed."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import TYPE_CHECKING

from reshard.core.storage.local import local_store

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reshard.core.model.entries import Content, Entry, FileIndex, Runs

DIGEST_BYTES = 16
_SMALL = 64 << 10
_PAGE = 4096
_PAGES = 4


def digest(content: object) -> str:
    """Return the digest of bytes, or of a JSON value.

    >>> digest([1, "w"]) == digest((1, "w")), len(digest(b""))
    (True, 32)
    """
    if not isinstance(content, bytes):
        content = json.dumps(content, separators=(",", ":")).encode()
    return blake2b(content, digest_size=DIGEST_BYTES).hexdigest()


def gaps(index: FileIndex, size: int) -> Runs:
    """Return the ranges of a file outside of tensor contents, including text."""
    ranges: list[tuple[int, int]] = []
    position = 0
    for offset, nbytes in sorted(run for entry in index.entries.values() if entry.text is None for run in entry.runs):
        if offset > position:
            ranges.append((position, offset - position))
        position = offset + nbytes
    if position < size:
        ranges.append((position, size - position))
    return tuple(ranges)


def index_digests(indexes: Sequence[FileIndex]) -> list[str]:
    """Return the digests of headers: names, dtypes, shapes, ranges, notes and text.

    The headers were read together: entries that they share are digested once.
    """
    entries = {index.header_id: index for index in indexes}
    digests = {header: _entries_digest(index) for header, index in entries.items()}
    notes: dict[tuple[object, ...], str] = {}
    result = []
    for index in indexes:
        key = (index.format, digests[index.header_id], index.metadata, index.crc, index.deduplicated, index.unreadable)
        if key not in notes:
            notes[key] = digest(key)
        result.append(notes[key])
    return result


def contents_digest(contents: Iterable[tuple[str, Entry | Content]]) -> str:
    """Return the digest of the tensors in a header, independent of notes and order.

    The layout of a file to be written has the same digest as the header that is read from it.
    """
    facts = ((name, e.dtype.name, e.shape, e.runs) if e.text is None else (name, e.text) for name, e in contents)
    return digest(sorted(facts))


def pages_digest(path: str) -> str:
    """Return the digest of four pages of a file, or all of it up to 64 KiB.

    Checkpoints of two steps of one training have equal names, shapes and headers; their weights differ everywhere.

    Raises:
        SourceError: the file cannot be read.
    """
    store = local_store()
    nbytes = store.size(path)
    pages, length = 1, nbytes
    if nbytes > _SMALL:
        pages, length = _PAGES, _PAGE
    content = bytearray(pages * length)
    for number in range(pages):
        offset = (nbytes - length) * (number + 1) // pages
        store.read_into(path, offset, memoryview(content)[number * length : (number + 1) * length])
    return digest(bytes(content))


def _entries_digest(index: FileIndex) -> str:
    return digest([(name, e.dtype.name, e.shape, e.runs, e.text) for name, e in index.entries.items()])
