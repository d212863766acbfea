"""Digests of what two machines, or two runs, must have the same: a file's header, its contents, a plan.

They are short texts of hexadecimal digits, the same on every machine. None depends on a time: copying a file changes
that.
"""

from __future__ import annotations

import json
from hashlib import blake2b, sha256
from typing import TYPE_CHECKING

from reshard.storage.local import local_store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reshard.formats.entries import Entry, FileIndex, FileLayout
    from reshard.plan.bands import Recipe
    from reshard.plan.plan import Move, Plan

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


def file_digests(plan: Plan) -> list[str]:
    """Return, for each target file of a plan, a digest of all that makes its bytes.

    That is its layout and literal bytes, and for each block in it the names and dtypes, the source blocks that it is
    made of, and path, size, time and header of their files. What else the plan writes is not in it: other ranks of
    the same target may be written by other plans.
    """
    facts = ((file.path, file.layout.size, file.link, *plan.coded(file)) for file in plan.files)
    hashes = [sha256(repr(some).encode()) for some in facts]
    for file, found in zip(plan.files, hashes, strict=True):
        for offset, content in file.layout.literals:
            found.update(b"%d:" % offset)
            found.update(content)
    headers = index_digests([file.index for file in plan.source.files])
    states = [
        repr((file.path, file.nbytes, file.mtime_ns, header)).encode()
        for file, header in zip(plan.source.files, headers, strict=True)
    ]
    known: dict[tuple[int, int], list[tuple[bytes, int]]] = {}
    for move in plan.moves:
        key = (id(move.recipe), id(move.holders))
        if key not in known:
            known[key] = _made_of(move, states)
        own = repr((move.name, move.source_name, move.dtype.name, move.target_dtype.name)).encode()
        for number, (files, (made_of, holder)) in enumerate(zip(move.targets, known[key], strict=True)):
            if files:
                runs = plan.source.entry(holder, move.source_name).runs if holder >= 0 else ()
                block = sha256(b"%b%b%r%r" % (own, made_of, runs, move.starts[number : number + 1])).digest()
                for place in files:
                    hashes[place].update(block)
    # Of a link no block is written: what makes its bytes is what makes the file that it links to.
    made = {file.path: found.digest() for file, found in zip(plan.files, hashes, strict=True)}
    for file, found in zip(plan.files, hashes, strict=True):
        if file.link is not None:
            found.update(made[file.link])
    return [found.hexdigest() for found in hashes]


def changes_digest(plan: Plan) -> str:
    """Return a digest of when anything of each source file last changed; empty where that is not known of all.

    Not of the numbers of their inodes, which some network file systems give anew.
    """
    changes = [(file.path, file.change[0]) for file in plan.source.files]
    return digest(changes) if all(changed for _, changed in changes) else ""


def _made_of(move: Move, facts: Sequence[bytes]) -> list[tuple[bytes, int]]:
    """Return, for each target block, a digest of it and all that it is made of, and the first file with some of it."""
    recipe = move.recipe
    rows: dict[tuple[int, int], list[int]] = {}  # source blocks by their first axis, so that few are looked at
    for number, source in enumerate(recipe.sources):
        rows.setdefault((source.start[0], source.stop[0]), []).append(number)
    made_of = []
    for block in recipe.targets:
        near = [some for (start, stop), some in rows.items() if start < block.stop[0] and stop > block.start[0]]
        given = [number for some in near for number in some if recipe.sources[number] & block]
        found = sha256(repr((recipe.shape, block, [recipe.sources[number] for number in given])).encode())
        for number in given:
            found.update(facts[move.holders[number]])
        made_of.append((found.digest(), move.holders[given[0]] if given else -1))
    return made_of
