"""Digests of what two machines, or two runs, must have the same: a file's header, its contents, a plan.

They are short texts of hexadecimal digits, the same on every machine. None depends on a time: copying a file changes
that.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING

from reshard.source.records import digest
from reshard.storage.local import local_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.formats.entries import FileIndex, FileLayout
    from reshard.plan.plan import Plan, Way

_SMALL = 64 << 10
_PAGE = 4096
_PAGES = 4


def index_digest(index: FileIndex) -> str:
    """Return the digest of all that a file's header says: names, dtypes, shapes, byte ranges, notes and text."""
    return index_digests([index])[0]


def index_digests(indexes: Sequence[FileIndex]) -> list[str]:
    """Return the digest of each of the headers that were read together (`index_digest`): of shared entries, once."""
    entries = {index.header: index for index in indexes}
    digests = {header: _entries_digest(index) for header, index in entries.items()}
    notes: dict[tuple[object, ...], str] = {}
    found = []
    for index in indexes:
        key = (index.format, digests[index.header], index.metadata, index.crc, index.deduplicated, index.unreadable)
        if key not in notes:
            notes[key] = digest(key)
        found.append(notes[key])
    return found


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
    """Return the digest of all that a plan writes: files, their headers, and which bytes of which file go there.

    How the work is shared out (tasks, bands, threads), and where the source is, is not in it.
    """
    sources = [b"%d" % number for number in range(len(plan.source.files))]
    whole = [plan.format, plan.ranks, plan.dropped, plan.missing, dict(plan.texts)]
    files = [(file.rank, file.last) for file in plan.files]
    return digest([whole, files, _file_digests(plan, sources)])


def file_digests(plan: Plan) -> list[str]:
    """Return, for each target file of a plan, a digest of all that makes its bytes.

    That is its layout and literal bytes, and for each block in it the dtypes, the extents that it is made of, and path,
    size, time and header of their files. What else the plan writes is not in it: other ranks of the same target may be
    written by other plans.
    """
    headers = index_digests([file.index for file in plan.source.files])
    return _file_digests(
        plan,
        [
            repr((file.path, file.nbytes, file.mtime_ns, header)).encode()
            for file, header in zip(plan.source.files, headers, strict=True)
        ],
    )


def _file_digests(plan: Plan, sources: Sequence[bytes]) -> list[str]:
    """Return a digest for each target file, in which these bytes stand for the source files."""
    literals: dict[FileLayout, bytes] = {}
    for layout in {file.layout for file in plan.files}:
        found = sha256()
        for offset, content in layout.literals:
            found.update(b"%d %d:" % (offset, len(content)))
            found.update(content)
        literals[layout] = found.digest()
    hashes = [
        sha256(repr((file.path, file.layout.size, file.link, *plan.coded(file))).encode() + literals[file.layout])
        for file in plan.files
    ]
    known: dict[Way, list[tuple[int, int, bytes]]] = {}  # file, number of runs, what the block is made of
    for move in plan.moves:
        way = move.way
        if way not in known:
            made_of = zip(_made_of(way, sources), way.writes, strict=True)
            known[way] = [(file, runs, block) for block, written in made_of for file, runs in written]
        own = repr((move.dtype.name, move.target_dtype.name, move.read_runs)).encode()
        in_files = [sha256(own + repr(runs).encode()).digest() for runs in move.write_runs]
        for number, runs, block in known[way]:
            hashes[number].update(in_files[runs] + block)
    # Of a link no block is written: what makes its bytes is what makes the file that it links to.
    made = {file.path: found.digest() for file, found in zip(plan.files, hashes, strict=True)}
    for file, found in zip(plan.files, hashes, strict=True):
        if file.link is not None:
            found.update(made[file.link])
    return [found.hexdigest() for found in hashes]


def _made_of(way: Way, sources: Sequence[bytes]) -> list[bytes]:
    """Return, for each target block, a digest of it and of all that it is made of."""
    recipe = way.recipe
    rows: dict[tuple[int, int], list[int]] = {}  # source blocks by their first axis, so that few are looked at
    for number, source in enumerate(recipe.sources):
        rows.setdefault((source.start[0], source.stop[0]), []).append(number)
    made_of = []
    for block in recipe.targets:
        near = [some for (start, stop), some in rows.items() if start < block.stop[0] and stop > block.start[0]]
        given = [number for some in near for number in some if recipe.sources[number] & block]
        read = [(recipe.sources[number], way.reads[number].runs) for number in given]
        found = sha256(repr((recipe.shape, block, read)).encode())
        for number in given:
            found.update(sources[way.reads[number].file])
        made_of.append(found.digest())
    return made_of


def changes_digest(plan: Plan) -> str:
    """Return a digest of when anything of each source file last changed; empty where that is not known of all.

    Not of the numbers of their inodes, which some network file systems give again.
    """
    changes = [(file.path, file.change[0]) for file in plan.source.files]
    return digest(changes) if all(changed for _, changed in changes) else ""


def _entries_digest(index: FileIndex) -> str:
    return digest([(name, e.dtype.name, e.shape, e.runs, e.text) for name, e in index.entries.items()])
