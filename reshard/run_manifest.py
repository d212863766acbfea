"""The manifest of what a run wrote: what the files hold is known from their layouts, the checksums from the receipts.

Headers are read from the plan's own bytes, by the formats' own readers, so that the manifest is the one that the
files themselves would give. Only a block whose receipts do not make it up (one that was written twice around a crash,
or by a run without checksums) is read from the disk.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from typing import TYPE_CHECKING

from reshard.checksum import crc32c
from reshard.formats import index_file
from reshard.manifest import Manifest
from reshard.manifest_files import shape_of, sum_entries

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from reshard.checkpoint import Entry
    from reshard.formats import FileLayout
    from reshard.plan import TargetFile

_MOST_THREADS = 4


def manifest_of(root: str, files: Iterable[TargetFile], sums: Mapping[str, Mapping[str, int]]) -> Manifest:
    """Return the manifest of files that are written.

    Args:
        root: the directory that the files are in.
        files: those of a plan.
        sums: for each of them, by its path, the CRC-32C of the contents of its tensors, as far as they are known.

    Raises:
        SourceError: a block must be read for its sum, and cannot be.
    """
    indexed: dict[int, Mapping[str, Entry]] = {}  # by the identity of layouts, which ranks with equal contents share
    held: dict[str, Mapping[str, Entry]] = {}
    nbytes: dict[str, int] = {}
    others: dict[str, int] = {}
    for file in files:
        nbytes[file.path] = file.layout.size
        if file.last or not file.layout.size:  # the index of a set; a .ckpt of nothing, which no format is told by
            others[file.path] = crc32c(b"".join(content for _, content in sorted(file.layout.literals)))
            continue
        if id(file.layout) not in indexed:
            indexed[id(file.layout)] = index_file(file.path, store=_OwnBytes(file.layout)).entries
        held[file.path] = indexed[id(file.layout)]
    known = {(path, name): value for path in held for name, value in sums[path].items()}
    left = {
        f"{root}/{path}": some
        for path, entries in held.items()
        if (some := {name: entry for name, entry in entries.items() if (path, name) not in known})
    }
    found = sum_entries(left, threads=min(len(os.sched_getaffinity(0)), _MOST_THREADS))
    known |= {(path, name): found[f"{root}/{path}", name] for path in held for name in left.get(f"{root}/{path}", ())}
    tensors = {
        path: {name: (entry.dtype, shape_of(entry), known[path, name]) for name, entry in entries.items()}
        for path, entries in held.items()
    }
    return Manifest.of(tensors, nbytes, others)


class _OwnBytes:
    """A file that is read without being there: its own bytes are those of a layout, its contents are zeros."""

    def __init__(self, layout: FileLayout) -> None:
        self._size = layout.size
        self._literals = sorted(layout.literals)

    def size(self, path: str) -> int:  # noqa: ARG002 -- there is one
        return self._size

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:  # noqa: ARG002 -- likewise
        buffer[:] = bytes(len(buffer))
        end = offset + len(buffer)
        first = max(bisect_right(self._literals, offset, key=lambda literal: literal[0]) - 1, 0)
        for begin, content in self._literals[first:]:
            if begin >= end:
                break
            part = content[max(offset - begin, 0) : end - begin]
            start = max(begin - offset, 0)
            buffer[start : start + len(part)] = part
