"""Digests of what two machines, or two runs, must have the same: a file's header, its contents, a plan.

They are short texts of hexadecimal digits, the same on every machine. None depends on a time: copying a file changes
that.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import TYPE_CHECKING

from reshard.storage.local import local_store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reshard.formats.entries import Entry, FileIndex, FileLayout
    from reshard.plan.bands import Recipe
    from reshard.plan.plan import Plan

DIGEST_BYTES = 16

_SMALL = 64 << 10
_PAGE = 4096
_PAGES = 4


def digest(content: object) -> str:
    """Return the digest of bytes, or of what JSON can say.

    >>> digest([1, "w"]) == digest((1, "w")), len(digest(b""))
    (True, 32)
    """
    if not isinstance(content, bytes):
        content = json.dumps(content, separators=(",", ":")).encode()
    return blake2b(content, digest_size=DIGEST_BYTES).hexdigest()


def index_digest(index: FileIndex) -> str:
    """Return the digest of all that a file's header says: names, dtypes, shapes, byte ranges, notes and text."""
    return index_digests([index])[0]


def index_digests(indexes: Sequence[FileIndex]) -> list[str]:
    """Return the digest of each of many headers (`index_digest`): of those that are shared, once."""
    entries_of = _once(_entries_digest)

    def of(index: FileIndex) -> str:
        notes = [index.metadata, index.crc, index.deduplicated, index.unreadable]
        return digest([index.format, entries_of(index.entries), *notes])

    return list(map(_once(of), indexes))


def pages_digest(path: str) -> str:
    """Return the digest of four pages of a file, the last one among them; of all of it up to 64 KiB.

    Checkpoints of two steps of one training have equal names, shapes and headers; their weights differ everywhere.

    Raises:
        SourceError: it cannot be read.
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


def plan_digest(plan: Plan) -> str:
    """Return the digest of all that a plan writes: files, their headers, and which block of which file goes there.

    How the work is shared out (tasks, bands, threads) is not in it.
    """
    recipe_of = _once(_recipe_digest)
    layout_of = _once(_layout_digest)
    numbers_of = _once(digest)
    return digest(
        [
            plan.format,
            plan.ranks,
            plan.dropped,
            plan.missing,
            dict(plan.texts),
            [
                (file.rank, file.path, layout_of(file.layout), file.last, file.link, *plan.coded(file))
                for file in plan.files
            ],
            [
                (
                    move.name,
                    move.source_name,
                    move.dtype.name,
                    move.target_dtype.name,
                    recipe_of(move.recipe),
                    numbers_of(move.holders),
                    numbers_of(move.targets),
                    *move.starts,
                )
                for move in plan.moves
            ],
        ]
    )


def _once(function: Callable[..., str]) -> Callable[[object], str]:
    """Remember digests by identity: tensors share their recipes, and files their headers; large ones are slow."""
    known: dict[int, str] = {}

    def remembered(value: object) -> str:
        if id(value) not in known:
            known[id(value)] = function(value)
        return known[id(value)]

    return remembered


def _entries_digest(entries: Mapping[str, Entry]) -> str:
    return digest([(name, e.dtype.name, e.shape, e.runs, e.text) for name, e in entries.items()])


def _recipe_digest(recipe: Recipe) -> str:
    blocks = [[(block.start, block.stop) for block in some] for some in (recipe.sources, recipe.targets)]
    return digest([recipe.shape, blocks])


def _layout_digest(layout: FileLayout) -> str:
    literals = [(offset, digest(content)) for offset, content in layout.literals]
    return digest([layout.size, literals, dict(layout.places)])
