"""The values of one item: all that a database or a directory has under each name."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reshard.core.storage.places import any_store, in_batches
from reshard.errors import SourceError, names
from reshard.formats.orbax.ocdbt import Database, StoredValue
from reshard.formats.orbax.steps import MANIFEST, PROCESS
from reshard.formats.zarr.files import StoreFiles
from reshard.kits.chunks.decoding import zstd_content
from reshard.kits.chunks.streaming import ChunkStream, RepeatedValue

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from reshard.core.storage.base import ReadStore, Want
    from reshard.core.storage.places import Place
    from reshard.formats.orbax.tree import SavedTree
    from reshard.kits.chunks.streaming import Stream

STRIDE = 1 << 40
"""The distance between decoded chunks in a virtual file; none is longer."""


class ItemValues:
    """The values of an item, by key.

    Attributes:
        files: the files of the item.
        values: the values.
        first_process: the directory of the database of the first process, or "".
        warnings: warnings from opening it.
    """

    def __init__(self, directory: Place, listing: Iterable[str], tree: SavedTree | None) -> None:
        self.files = StoreFiles(directory)
        self.warnings: tuple[str, ...] = ()
        self.values: dict[str, StoredValue] = {}
        self._sorted: list[str] = []
        listing = set(listing)
        base = self.files.base
        uses_ocdbt = None if tree is None else tree.uses_ocdbt
        if uses_ocdbt is False:  # an array may be named like a file of a database
            listing = set()
        of_process = sorted((int(match[1]), match[0]) for match in map(PROCESS.fullmatch, listing) if match)
        self.first_process = of_process[0][1] if of_process else ""
        if MANIFEST in listing:
            self.values = Database(base, self.files).values
        elif of_process:
            for _, name in of_process:
                self.values = Database(base / name, self.files).values | self.values
            unmerged = names([name for _, name in of_process], most=3)
            warning = (
                f"{directory} has no {MANIFEST}: saving it was interrupted before the databases of its processes were "
                f"merged; they are read as they are: {unmerged}"
            )
            self.warnings = (warning,)
        elif uses_ocdbt:
            raise SourceError(
                f"{directory} has no {MANIFEST}, which has the locations of all values", code="missing-file",
                hint="copy all of the checkpoint; if saving it was interrupted, open an older step",
            )  # fmt: skip
        else:
            self.values = {key: StoredValue(f"{base}/{key}", 0, size) for key, size in self.files.sizes()}

    def count(self, name: str) -> int:
        """Return how many chunks or shards an array has at most: its keys but one, of its metadata."""
        if not self._sorted:
            self._sorted = sorted(self.values)
        first, after = (bisect_left(self._sorted, f"{name}{end}") for end in "/0")  # 0 comes after /
        return max(after - first - 1, 0)

    def read(self, keys: Iterable[str], most: int) -> Iterator[tuple[str, bytes]]:
        """Yield the values of some keys that exist; of those with more than `most` bytes, the first ones alone."""

        def steps() -> Iterator[tuple[tuple[str, bytes | bytearray], ReadStore, list[Want]]]:
            for key in keys:
                value = self.values.get(key)
                if value is not None and value.content is not None:
                    yield (key, value.content[:most]), any_store(), []
                elif value is not None:
                    buffer = bytearray(min(value.nbytes, most))
                    yield (key, buffer), any_store(), [(value.path, value.offset, memoryview(buffer))]

        for key, content in in_batches(steps()):
            yield key, bytes(content)


LONGEST_WHOLE = 4 << 20
"""The most bytes of a chunk that is decoded whole; longer ones are decoded piece by piece."""


@dataclass(slots=True, eq=False)
class EncodedValues:
    """A file of encoded chunks, or of chunks that are in memory; see `kits.chunks.decoding.Chunks`.

    Attributes:
        spans: the offset and length of each chunk in the file, of 0 bytes for those in memory. The first one stands for
            the file itself, whose plain chunks are read by their own offsets.
        sizes: the decoded size of each chunk.
        contents: the chunks that are in memory: within a node of a database, or an element of the fill value.
        plain: the numbers of chunks that are not compressed.
        piece_bytes: how many bytes of long chunks are read at once.
    """

    spans: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    sizes: list[int] = field(default_factory=lambda: [0])
    contents: dict[int, bytes] = field(default_factory=dict)
    plain: set[int] = field(default_factory=set)
    piece_bytes: int = 0

    def add(self, span: tuple[int, int], nbytes: int, *, content: bytes | None, plain: bool) -> int:
        """Add a chunk; return its offset in the virtual file."""
        number = len(self.spans)
        self.spans.append(span)
        self.sizes.append(nbytes)
        if content is not None:
            self.contents[number] = content
        if plain:
            self.plain.add(number)
        return number * STRIDE

    @property
    def chunk_bytes(self) -> int:
        """Return the distance of chunks in the virtual file."""
        return STRIDE

    @property
    def plain_bytes(self) -> int:
        """Return the offset of the first decoded chunk."""
        return STRIDE

    def stream(self, number: int, store: ReadStore, path: str) -> Stream | None:
        """Return a long compressed chunk, or one that is not compressed; None for others."""
        size, content = self.sizes[number], self.contents.get(number)
        if number in self.plain and content is not None:
            return RepeatedValue(content, size)
        if size <= LONGEST_WHOLE:
            return None
        return ChunkStream(store, path, self.spans[number], size, self.piece_bytes, content)

    def decoded(self, number: int, encoded: bytearray) -> memoryview:
        """Return a decoded chunk; raise `ValueError` if it is damaged."""
        size = self.sizes[number]
        decoded = zstd_content(self.contents.get(number, encoded), size)
        if len(decoded) != size:
            raise ValueError(f"it has {len(decoded):,} bytes; the metadata says {size:,}")
        return decoded
