"""The layout of written zarr v3 stores: one group with one array per tensor; each chunk is a file of row-major bytes.

1. A tensor is cut into chunks of equal shape: its source blocks if they are equal, else as many of its first rows as
   fit a size limit (`cut`). If the shape does not divide, the last chunk is stored whole, padded with zeros.
2. Small chunks are combined into shards: files of consecutive chunks with an index at the end.
3. Each file, a chunk or a shard, is a `Unit`. Uncompressed files are ordinary target files with known offsets;
   compressed ones are assembled in memory (`codec`).

Only the first axis along which an array is cut can have a partial last chunk, so the tensor's bytes in a chunk are the
beginning of the chunk. bfloat16, float8 and int4, which zarr lacks, are stored as integers of their width, with the
dtype's name in the attributes. A name that is invalid in a file system is percent-escaped, with the original there.

Source: the zarr v3 core specification, sharding codec 1.0; what zarr-python 3.1 writes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from itertools import count, product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.arguments import checked_fields
from reshard.core.layout.block import Block
from reshard.core.model.entries import Content, FileLayout
from reshard.core.options import Options, option
from reshard.core.storage.crc import crc32c
from reshard.dtypes import INT4
from reshard.errors import Option, Text, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from reshard.core.layout.block import Shape
    from reshard.dtypes import DType

NAME = "zarr"

METADATA = "zarr.json"
"""The file that describes a group or an array."""

ATTRIBUTES = "reshard"
"""The attribute of arrays and groups that contains all notes of this program."""

CARRIED, CARRIED_CHUNK = "%carried", "c.0"
"""The directory of the array of what is carried and not a tensor, and its only chunk.

Its elements are the bytes of files beside the weights of a set, and of objects of a DCP, one after the other; its
attributes have the name and the size of each. No tensor has the name of its directory (`escaped`). A store of which
nothing is to be carried has no such array.
"""

SEPARATOR = "."
"""The separator of numbers in the names of chunk files; zarr's default, `/`, takes a directory for each, 0.2 ms."""

ABSENT = (1 << 64) - 1
"""Offset and length of a chunk that is missing from a shard."""

NATIVE = {
    "bool": False, "complex64": [0.0, 0.0], "float16": 0.0, "float32": 0.0, "float64": 0.0,
    **{f"{sign}int{bits}": 0 for sign in ("", "u") for bits in (8, 16, 32, 64)},
}  # fmt: skip
"""The dtypes of zarr itself, each with its zero."""

MOST_CHUNK_BYTES = 256 << 20
"""The largest chunk that follows a source block; larger blocks are cut. zarr reads a chunk whole."""

OTHER_CHUNK_BYTES = 64 << 20
"""The maximum chunk size if source blocks are not equal."""

COMPRESSED_BYTES = 4 << 20
"""The maximum total size of compressed chunks that share a row: a thread buffers all of them."""

SMALL_CHUNK_BYTES = 4 << 20
"""Smaller chunks are put into shards by default: creating a file costs about as much as writing this many bytes."""

SHARD_BYTES = 64 << 20

_LONGEST_FILE_NAME = 255
_LEVELS = range(-131072, 23)  # compression levels of zstd


@checked_fields
@dataclass(frozen=True, slots=True)
class ZarrGroup(Options):
    """One zarr v3 group of whole tensors.

    Attributes:
        chunk_size: the maximum bytes in a chunk; None for chunks that follow the source's blocks.
        shard_size: the maximum bytes of chunks in a shard; 0 for no shards; None for shards if chunks are small. Not
            an option for users.
        compression: None, or `zstd` with a level, as in `zstd:3` (the level is 0, zstd's own choice, if left out).

    Raises:
        UsageError: a chunk size below 1, or an unknown compression.

    >>> ZarrGroup(compression="zstd:5").level
    5
    """

    chunk_size: int | None = option(
        "The most bytes in a chunk, such as 16MB.", "size", shown="chunks are the source's blocks"
    )
    shard_size: int | None = None
    compression: str | None = option("zstd, or zstd:LEVEL like zstd:3.", "text", shown="none", metavar="CODEC")

    def __post_init__(self) -> None:
        if self.chunk_size is not None and self.chunk_size < 1:
            raise UsageError(f"a chunk cannot have at most {self.chunk_size} bytes", code="out-of-range")
        _ = self.level

    @property
    def level(self) -> int | None:
        """The zstd level; None for no compression."""
        if self.compression is None:
            return None
        kind, _, level = self.compression.partition(":")
        try:
            number = int(level or 0)
        except ValueError:
            number = _LEVELS.stop
        if kind != "zstd" or number not in _LEVELS:
            raise UsageError(
                f"unknown compression {self.compression!r}",
                code="unknown-compression",
                hint="use zstd, or zstd:LEVEL with a level of at most 22",
            )
        return number

    def array(self, shape: Shape, dtype: DType, blocks: Iterable[Block]) -> Array:
        """Choose chunks and shards for a tensor with these source blocks."""
        if not prod(shape):
            return Array(shape, dtype, tuple(max(extent, 1) for extent in shape), None, self.level)
        block = _common_shape(shape, blocks)
        if self.chunk_size is not None:
            chunk = cut(shape, self.chunk_size // dtype.itemsize)
        elif block is None:
            most = OTHER_CHUNK_BYTES if self.level is None else COMPRESSED_BYTES
            chunk = cut(shape, most // dtype.itemsize)
        else:
            across = prod(counts(shape[1:], block[1:]))
            most = MOST_CHUNK_BYTES if self.level is None else COMPRESSED_BYTES // across
            chunk = cut(block, most // dtype.itemsize)
        nbytes = prod(chunk) * dtype.itemsize
        usual = SHARD_BYTES if nbytes < SMALL_CHUNK_BYTES else 0
        most = usual if self.shard_size is None else self.shard_size
        many = cut(counts(shape, chunk), most // nbytes)
        shard = tuple(map(int.__mul__, many, chunk)) if prod(many) > 1 else None
        return Array(shape, dtype, chunk, shard, self.level)


class Unit(NamedTuple):
    """A file of an array: a chunk, or a shard.

    Attributes:
        path: the path below the array.
        blocks: the block of the tensor in each chunk, partial at the edge; consecutive chunks of a shard are one block
            if they are contiguous in the tensor too.
        valid: for each of its chunks, the number of bytes that belong to the tensor; 0 for a chunk beyond its end.
    """

    path: str
    blocks: tuple[Block, ...]
    valid: tuple[int, ...]


@dataclass(frozen=True)
class Array:
    """The layout of a tensor's array.

    Attributes:
        shape: the shape of the tensor.
        dtype: the dtype of its elements.
        chunk: the shape of a chunk.
        shard: the shape of a shard; None if each chunk has its own file.
        level: the zstd level; None for no compression.
    """

    shape: Shape
    dtype: DType
    chunk: Shape
    shard: Shape | None
    level: int | None

    @property
    def chunk_bytes(self) -> int:
        """Bytes in a chunk, uncompressed."""
        return prod(self.chunk) * self.dtype.itemsize

    @property
    def unit(self) -> Shape:
        """The shape of the part of the tensor in each file."""
        return self.shard or self.chunk

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """Every file of chunks, in row-major order."""
        inner, units = counts(self.unit, self.chunk), []
        is_one_block = follows(self.unit, self.chunk)
        for cell in grid(self.shape, self.unit):
            chunks = [*parts(self.shape, self.chunk, cell, inner)]
            blocks = [part(self.shape, self.unit, cell)] if is_one_block else chunks
            valid = tuple(block.size * self.dtype.itemsize if block else 0 for block in chunks)
            units.append(Unit(SEPARATOR.join(("c", *map(str, cell))), tuple(filter(None, blocks)), valid))
        return tuple(units)

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Every block of every file."""
        return tuple(block for unit in self.units for block in unit.blocks)

    def file_layout(self, name: str, unit: Unit) -> FileLayout:
        """Return the layout of a file of uncompressed chunks: contents and, in a shard, the index.

        A compressed file gets its uncompressed layout; its real size is known only at the end.
        """
        contents = tuple(
            Content(name, self.dtype, block.shape, runs=((start, block.size * self.dtype.itemsize),))
            for start, block in zip(count(0, self.chunk_bytes), unit.blocks)
        )
        starts = count(0, self.chunk_bytes)
        spans = [(next(starts), self.chunk_bytes) if valid else (ABSENT, ABSENT) for valid in unit.valid]
        nbytes = next(starts)
        if self.shard is None or self.level is not None:
            return FileLayout(nbytes, (), contents)
        index = shard_index(spans)
        return FileLayout(nbytes + len(index), ((nbytes, index),), contents)

    def metadata(self, attributes: Mapping[str, object], data_type: str | None = None) -> dict[str, Any]:
        """Return the contents of the array's `zarr.json`, as zarr-python writes it; by default with a dtype of zarr."""
        stored = data_type or zarr_dtype(self.dtype)
        plain: dict[str, Any] = {"name": "bytes"}
        if self.dtype.itemsize > 1:
            plain["configuration"] = {"endian": "little"}
        codecs = [plain]
        if self.level is not None:
            codecs.append({"name": "zstd", "configuration": {"level": self.level, "checksum": False}})
        if self.shard is not None:
            configuration = {
                "chunk_shape": self.chunk,
                "codecs": codecs,
                "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
                "index_location": "end",
            }
            codecs = [{"name": "sharding_indexed", "configuration": configuration}]
        return {
            "shape": self.shape,
            "data_type": stored,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": self.unit}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": SEPARATOR}},
            "fill_value": NATIVE.get(stored, 0.0),
            "codecs": codecs,
            "attributes": {ATTRIBUTES: attributes},
            **({"dimension_names": dimension_names(self.shape)} if self.shape else {}),
            "zarr_format": 3,
            "node_type": "array",
            "storage_transformers": [],
        }


def dimension_names(shape: Shape) -> tuple[str, ...]:
    """Return names of dimensions: equal ones have equal extents, and an array has none twice.

    >>> dimension_names((4096, 11008)), dimension_names((4096, 4096))
    (('dim_4096', 'dim_11008'), ('dim_4096', 'dim_4096_2'))
    """
    counted = (shape[: axis + 1].count(extent) for axis, extent in enumerate(shape))
    return tuple(
        f"dim_{extent}" if number == 1 else f"dim_{extent}_{number}"
        for extent, number in zip(shape, counted, strict=True)
    )


def zarr_dtype(dtype: DType) -> str:
    """Return the zarr dtype that stores the bits of a dtype.

    >>> from reshard.dtypes import BFLOAT16
    >>> zarr_dtype(BFLOAT16), zarr_dtype(INT4)
    ('uint16', 'int8')
    """
    if dtype is INT4:
        return "int8"
    return dtype.name if dtype.name in NATIVE else f"uint{8 * dtype.itemsize}"


def shard_index(spans: Iterable[tuple[int, int]]) -> bytes:
    """Return the index of a shard: offset and length of each chunk, and their CRC-32C."""
    content = b"".join(struct.pack("<QQ", *span) for span in spans)
    return content + struct.pack("<I", crc32c(content))


def cut(box: Shape, most: int) -> Shape:
    """Return the shape of the first rows of a box, with at most `most` elements, at least one.

    The box is cut evenly if that takes fewer than twice the minimum number of parts.

    >>> cut((100, 6), 240), cut((97, 6), 240), cut((4, 100, 6), 30), cut((5,), 9)
    ((25, 6), (33, 6), (1, 5, 6), (5,))
    """
    for axis, extent in enumerate(box):
        row = prod(box[axis + 1 :])
        if row <= most:
            fewest = -(-extent // (most // row))
            evenly = (parts for parts in range(fewest, min(2 * fewest, fewest + 1000)) if extent % parts == 0)
            return (1,) * axis + (-(-extent // next(evenly, fewest)), *box[axis + 1 :])
    return (1,) * len(box)


def grid(shape: Shape, unit: Shape) -> Iterator[Shape]:
    """Yield the grid positions of a tensor's parts, in row-major order; none if it is empty."""
    return product(*map(range, counts(shape, unit)))


def counts(shape: Shape, unit: Shape) -> Shape:
    """Return the number of parts along each dimension; the last ones may be partial."""
    return tuple(-(-extent // part) for extent, part in zip(shape, unit, strict=True))


def part(shape: Shape, unit: Shape, place: Shape) -> Block | None:
    """Return the block at a grid position, clipped to the tensor; None beyond its end.

    >>> part((5, 4), (2, 2), (2, 1)), part((5, 4), (2, 2), (3, 0))
    (Block(start=(4, 2), stop=(5, 4)), None)
    """
    start = tuple(map(int.__mul__, place, unit))
    stop = tuple(min(a + extent, end) for a, extent, end in zip(start, unit, shape, strict=True))
    return Block(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None


def parts(shape: Shape, chunk: Shape, place: Shape, inner: Shape) -> Iterator[Block | None]:
    """Yield the block of each chunk of a file in row-major order; None for one beyond the tensor's end.

    The file is at a place in the grid of files, and has `inner` chunks along each dimension.
    """
    for within in product(*map(range, inner)):
        yield part(shape, chunk, tuple(a * many + b for a, many, b in zip(place, inner, within, strict=True)))


def follows(unit: Shape, chunk: Shape) -> bool:
    """Return whether the consecutive chunks of a shard form the shard in row-major order.

    >>> follows((8, 6), (2, 6)), follows((8, 6), (8, 3)), follows((1, 8, 6), (1, 2, 6)), follows((2, 8), (2, 2))
    (True, False, True, False)
    """
    axis = next((axis for axis, extent in enumerate(unit) if extent > 1), 0)
    return unit[axis + 1 :] == chunk[axis + 1 :]


def slab_bytes(shape: Shape, chunk: Shape, itemsize: int) -> int:
    """Return the size of the chunks that share rows, which a thread must cache to decode each chunk only once.

    >>> slab_bytes((100, 8), (10, 2), 4), slab_bytes((7, 100, 8), (1, 10, 8), 4)
    (320, 320)
    """
    axis = next((axis for axis, extent in enumerate(chunk) if extent > 1), len(chunk) - 1)
    return itemsize * prod(chunk[: axis + 1]) * prod(map(max, shape[axis + 1 :], chunk[axis + 1 :]))


def escaped(name: str) -> str:
    """Return the name of a tensor's array, which is also the name of a directory.

    Characters are percent-escaped if they could leave the directory, hide the name, or are special to zarr or a
    terminal.

    >>> [escaped(name) for name in ("layers.0.wq.weight", "a/b", "..", "zarr.json", "__w", "", "50%")]
    ['layers.0.wq.weight', 'a%2Fb', '%2E.', '%7Aarr.json', '%5F_w', '%', '50%25']

    Raises:
        UsageError: it is too long for a file name.
    """
    text = "".join(char if char.isprintable() and char not in "/\\%" else _percent(char) for char in name) or "%"
    if text.startswith((".", "__", METADATA)):  # hidden files and v2 metadata; reserved; the group's own
        text = _percent(text[0]) + text[1:]
    if len(text.encode()) > _LONGEST_FILE_NAME:
        raise UsageError(
            f"the name of tensor {name[:40]!r}… is too long for a directory",
            code="name-too-long",
            facts=[f"it has {len(text.encode())} bytes there; at most {_LONGEST_FILE_NAME} are possible"],
            hint=Text("rename it with ", Option("name_map")),
        )
    return text


def _percent(char: str) -> str:
    return "".join(f"%{byte:02X}" for byte in char.encode(errors="surrogatepass"))


def _common_shape(shape: Shape, blocks: Iterable[Block]) -> Shape | None:
    """Return the shape of blocks that cut a tensor into equal parts; None if they do not."""
    shapes = {block.shape for block in blocks}
    if len(shapes) != 1:
        return None
    (block,) = shapes
    divides = all(part and extent % part == 0 for extent, part in zip(shape, block, strict=True))
    return block if divides else None
