"""The metadata of zarr arrays of format 3, and of format 2 as zarr-python, xarray and TensorStore write it: checked.

Nothing is trusted: a key or option that is not known here, and that must be understood, is refused.

Chunks that are plain, or compressed by zstd, are read here; zarr decodes all others. Of format 2 these have another
compressor, are in column-major order, or have big-endian numbers; its filters are refused. TensorStore writes dtypes
that numpy lacks by name, which zarr's library refuses; it is given integers of their width.

Source: the specifications of zarr v2 and v3; TensorStore 0.1.86 `driver/zarr/metadata.cc`, and arrays that it and
zarr 3.1 wrote.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from reshard.core.layout.axes import row_major
from reshard.core.layout.block import shape_text
from reshard.core.model.entries import Extent
from reshard.core.storage.base import truncated
from reshard.core.storage.crc import crc32c
from reshard.dtypes import BY_NAME, INT4, STR
from reshard.errors import SourceError, names
from reshard.formats.zarr.files import ARRAY_V2, parse_json, refuse_unknown
from reshard.formats.zarr.layout import ABSENT, METADATA, NATIVE, counts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reshard.core.layout.block import Shape
    from reshard.core.storage.places import Place
    from reshard.dtypes import DType

_MOST_DIMS = 32
_MOST_CHUNKS = 1 << 20
_MOST_RUNS = 1 << 12  # of a chunk that extends beyond the tensor; with more, its part is strided

_INDEX_CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]

_OPTIONS = {
    "regular": {"chunk_shape"},
    "default": {"separator"},
    "v2": {"separator"},
    "bytes": {"endian"},
    "zstd": {"level", "checksum"},
    "crc32c": set(),
    "sharding_indexed": {"chunk_shape", "codecs", "index_codecs", "index_location"},
}
"""The options of each chunk grid, chunk key encoding and codec supported here; zarr checks its other codecs."""

_INNER = ("codecs", "index_codecs")
"""The options of a codec that are codecs."""

_COMPRESSORS = {"zstd", "gzip", "blosc", "lz4", "zlib", "bz2", "lzma"}
"""The compressors of zarr and numcodecs; other codecs do not expand."""


_KINDS_V2 = {"b": "bool", "c": "complex", "f": "float", "i": "int", "u": "uint"}
_KEYS_V2 = {
    "chunks", "compressor", "dimension_separator", "dtype", "fill_value", "filters", "order", "shape", "zarr_format",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ArrayMetadata:
    """The metadata of an array.

    Attributes:
        directory: the directory of the array.
        shape: the shape of the tensor.
        dtype: the dtype of the tensor.
        unit: the shape of a file's part of the tensor.
        chunk: the shape of a chunk, which is encoded by itself; equal to `unit` unless files are shards.
        sharded: whether files are shards, with an index.
        index_at_end: whether the index is at the end of the file, not at its beginning.
        encoding: None if chunks are plain bytes; empty if they are compressed by zstd; else the metadata of an array of
            one such chunk, for zarr to decode it.
        separator: the text between the numbers in the name of a file.
        prefix: the beginning of file names.
        fill: an element of an absent chunk.
        by_reshard: whether this program wrote it, so that no chunk may be absent.
        file: the name of the file of the metadata, which is another one in zarr's format 2.
    """

    directory: Place
    shape: Shape
    dtype: DType
    unit: Shape
    chunk: Shape
    sharded: bool
    index_at_end: bool
    encoding: bytes | None
    separator: str
    prefix: str
    fill: bytes
    by_reshard: bool
    file: str = METADATA

    @classmethod
    def parse(cls, directory: Place, metadata: Mapping[str, Any], notes: Mapping[str, Any]) -> ArrayMetadata | None:
        """Check and parse the metadata of an array; None if no checkpoint has its dtype.

        Raises:
            SourceError: they are inconsistent or malicious.
        """
        path = f"{directory / METADATA}"
        match metadata:
            case {
                "node_type": "array", "shape": [*shape], "data_type": data_type, "codecs": [*codecs],
                "fill_value": fill, "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [*unit]}},
                "chunk_key_encoding": {"name": ("default" | "v2") as encoding, **keys},
            }:  # fmt: skip
                separator = option(keys, "separator", "/" if encoding == "default" else ".")
            case _:
                raise SourceError(f"{path} does not describe an array of regular chunks", code="bad-metadata")
        for section in (metadata["chunk_grid"], metadata["chunk_key_encoding"], *codecs):
            check_options(path, section)
        _check_compressors(path, codecs)
        if metadata.get("storage_transformers"):
            raise SourceError(f"{path} has storage transformers, which are not supported", code="unsupported-storage")
        stored = BY_NAME.get(data_type) if isinstance(data_type, str) else None
        if stored is None or stored is STR or stored is INT4:
            return None
        dtype = BY_NAME.get(str(notes.get("dtype", stored.name)))
        if dtype is None or dtype is STR or dtype.itemsize != stored.itemsize:
            raise SourceError(
                f"{path} stores {data_type}, but its attributes say dtype {notes.get('dtype')!r}", code="wrong-dtype"
            )
        chunk, sharded, at_end = unit, False, True
        match codecs:
            case [
                {"name": "sharding_indexed", "configuration": {"chunk_shape": [*inner], "codecs": [*of_inner], **rest}}
            ]:
                location = rest.get("index_location", "end")
                if location not in ("start", "end"):
                    raise SourceError(
                        f"{path} has index_location {location!r:.60}; expected 'start' or 'end'", code="bad-metadata"
                    )
                at_end = location == "end"
                if rest.get("index_codecs") == _INDEX_CODECS:  # otherwise zarr decodes the shard as one chunk
                    chunk, sharded, codecs = inner, True, of_inner
        check_shapes(path, shape, unit, chunk, dtype.itemsize)
        if separator not in {"/", "."}:
            raise SourceError(f"{path} has separator {separator!r}; expected '/' or '.'", code="bad-metadata")
        return cls(
            directory, tuple(shape), dtype, tuple(unit), tuple(chunk), sharded, at_end,
            _encoding(codecs, stored, chunk), separator,
            "c" if encoding == "default" else "", fill_bytes(path, fill, stored), bool(notes),
        )  # fmt: skip

    @property
    def chunk_bytes(self) -> int:
        """Bytes in a decoded chunk."""
        return prod(self.chunk) * self.dtype.itemsize

    @property
    def inner(self) -> Shape:
        """Return the number of chunks of a file along each dimension."""
        return counts(self.unit, self.chunk)

    def key(self, cell: Shape) -> str:
        """Return the path of the file of a cell of the grid, below the array."""
        numbers = [*([self.prefix] if self.prefix else []), *map(str, cell)]
        return self.separator.join(numbers) or "0"

    @property
    def first_key(self) -> str:
        """Return the path of the only chunk in the array that `encoding` describes."""
        zeros = ["0"] * len(self.chunk)
        return "/".join(["c", *zeros]) if self.file == METADATA else ".".join(zeros) or "0"

    def path(self, cell: Shape) -> Place:
        """Return the file of a cell of the grid."""
        return self.directory / self.key(cell)

    @property
    def index_bytes(self) -> int:
        """Return the size of the index of a shard."""
        return 16 * prod(self.inner) + 4

    def spans(self, path: object, nbytes: int, content: bytearray) -> tuple[tuple[int, int], ...]:
        """Return the offset and length of each chunk of a shard.

        Args:
            path: the shard, for messages.
            nbytes: its size.
            content: its index, or all of the shard if that is shorter.

        Raises:
            SourceError: the index is damaged, or a chunk is not within the shard.
        """
        size = self.index_bytes
        if nbytes < size:
            raise truncated(path, nbytes, size, facts=[f"the index of its {prod(self.inner)} chunks has {size} bytes"])
        begin = nbytes - size if self.index_at_end else 0
        if struct.unpack_from("<I", content, size - 4)[0] != crc32c(memoryview(content)[:-4]):
            raise SourceError(f"{path} has an index that does not match its checksum", code="wrong-checksum")
        spans = tuple(struct.iter_unpack("<QQ", bytes(content[:-4])))
        for number, (offset, length) in enumerate(spans):
            if (offset, length) == (ABSENT, ABSENT):
                continue
            valid = offset + length <= begin if self.index_at_end else size <= offset <= nbytes - length
            if not valid or (self.encoding is None and length != self.chunk_bytes):
                raise SourceError(
                    f"{path} has chunk {number} at bytes {offset} to {offset + length} by its index",
                    code="out-of-range",
                    facts=[
                        f"the file has {nbytes} bytes, {size} of them the index",
                        *([f"a chunk has {self.chunk_bytes} bytes"] if self.encoding is None else []),
                    ],
                )
        return spans


def _encoding(codecs: list[Any], stored: DType, chunk: list[int]) -> bytes | None:
    """Return how chunks are encoded; see `ArrayMetadata.encoding`."""
    match codecs:
        case [{"name": "bytes", **rest}, *compressors] if (
            option(rest, "endian", None) == "little" or stored.itemsize == 1
        ):
            if not compressors:
                return None
            if [compressor.get("name") if isinstance(compressor, dict) else None for compressor in compressors] == [
                "zstd"
            ]:
                return b""
    metadata = {
        "zarr_format": 3, "node_type": "array", "shape": chunk, "data_type": stored.name, "codecs": codecs,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": NATIVE.get(stored.name, 0), "attributes": {},
    }  # fmt: skip
    return json.dumps(metadata).encode()


def check_shapes(path: str, shape: list[Any], unit: list[Any], chunk: list[Any], itemsize: int) -> None:
    """Raise `SourceError` if shapes are impossible, do not fit each other, or make too many chunks."""
    for label, extents, least in (("shape", shape, 0), ("chunk shape", unit, 1), ("shape of inner chunks", chunk, 1)):
        if len(extents) > _MOST_DIMS or not all(
            type(extent) is int and least <= extent < 1 << 62 for extent in extents
        ):
            raise SourceError(f"{path} has {label} {extents[:4]}{'…' * (len(extents) > 4)}", code="bad-shape")
        if prod(extents) * itemsize >= 1 << 62:
            raise SourceError(f"{path} has {label} {shape_text(extents)}, larger than any disk", code="bad-shape")
    if not len(shape) == len(unit) == len(chunk) or any(a % b for a, b in zip(unit, chunk, strict=True)):
        raise SourceError(
            f"{path} has a shape and chunks that do not fit",
            code="wrong-shape",
            facts=[f"shape {shape_text(shape)}, chunks {shape_text(unit)}, inner chunks {shape_text(chunk)}"],
        )
    count = prod(counts(tuple(shape), tuple(chunk)))
    if count > _MOST_CHUNKS:
        raise SourceError(
            f"{path} has {count} chunks; at most {_MOST_CHUNKS} are supported",
            code="too-many-blocks",
            hint="write it with larger chunks",
        )


def fill_bytes(path: str, value: object, stored: DType) -> bytes:
    """Return the bytes of a fill value."""
    if value in (0, None) and not isinstance(value, float):  # also False
        return bytes(stored.itemsize)
    if isinstance(value, str) and value.startswith("0x") and len(value) == 2 + 2 * stored.itemsize:
        try:
            return bytes.fromhex(value[2:])[::-1]
        except ValueError:
            value = object()
    import numpy as np

    kind = stored.numpy()
    number: Any = value
    try:
        if isinstance(value, list) and kind.kind == "c":
            number = complex(*map(float, value))
        elif kind.kind not in "biu":
            number = float(number)  # also "NaN" and "-Infinity"
        return np.asarray(number, kind).reshape(()).tobytes()
    except (TypeError, ValueError, OverflowError):
        raise SourceError(f"{path} has fill value {value!r}, which is not a {stored}", code="bad-value") from None


def option(metadata: Mapping[Any, Any], key: str, default: object) -> Any:
    """Return an option of a chunk grid, a chunk key encoding or a codec."""
    options = metadata.get("configuration")
    return options.get(key, default) if isinstance(options, dict) else default


def check_options(where: str, metadata: object) -> None:
    """Raise `SourceError` if a chunk grid, chunk key encoding or codec has unknown options.

    Nested codecs are checked, too.
    """
    if not isinstance(metadata, dict):
        return
    name = metadata.get("name")
    refuse_unknown(where, "", metadata, {"name", "configuration", "must_understand"})
    options = metadata.get("configuration", {})
    if not isinstance(name, str) or not isinstance(options, dict):
        raise SourceError(
            f"{where} has {metadata!r:.60}; expected a name and an object of options", code="bad-metadata"
        )
    if name in _OPTIONS:
        refuse_unknown(where, f"{name}.", options, _OPTIONS[name])
    for inner in _INNER:
        for codec in options[inner] if isinstance(options.get(inner), list) else ():
            check_options(where, codec)


def _check_compressors(where: str, codecs: Sequence[object]) -> None:
    """Raise `SourceError` if chunks are compressed twice: neither size of a file bounds what is in between."""
    compressors = [*_compressors(codecs)]
    if len(compressors) > 1:
        fault = f"{where} has chunks that are compressed more than once, by {names(compressors)}"
        raise SourceError(fault, code="unsupported-storage", facts=["expected one compressor, or none"])


def _compressors(codecs: Sequence[object]) -> Iterator[str]:
    """Yield the compressors among codecs, and among those of shards; the codecs are valid."""
    for codec in codecs:
        if isinstance(codec, dict):
            if codec["name"].removeprefix("numcodecs.") in _COMPRESSORS:
                yield codec["name"]
            for inner in _INNER:
                yield from _compressors(listed if isinstance(listed := option(codec, inner, ()), list) else ())


def clipped(file: int, offset: int, chunk: Shape, shape: Shape, itemsize: int) -> Extent:
    """Return the extent of a chunk's leading part; it is strided if its byte ranges are too many.

    Args:
        file: the number of the file.
        offset: the offset of the chunk in bytes.
        chunk: the shape of the chunk.
        shape: the shape of the part, which begins where the chunk does.
        itemsize: bytes per element.

    >>> clipped(0, 0, (4, 3), (2, 3), 2).runs, clipped(0, 100, (4, 3), (2, 2), 2).runs
    (((0, 12),), ((100, 4), (106, 4)))
    """
    axis = max((axis for axis, extent in enumerate(chunk) if shape[axis] < extent), default=0)
    strides = row_major(chunk)
    if prod(shape[:axis]) > _MOST_RUNS:
        last = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
        return Extent(file, ((offset, (last + 1) * itemsize),), strides)
    nbytes = itemsize * prod(shape[axis:])
    return Extent(
        file,
        tuple(
            (offset + itemsize * sum(map(int.__mul__, position, strides)), nbytes)
            for position in product(*map(range, shape[:axis]))
        ),
    )


def parse_v2(directory: Place, content: bytes) -> ArrayMetadata:
    """Check and parse a `.zarray`.

    Raises:
        SourceError: it is not valid, has a dtype that no checkpoint has, or has filters.
    """
    path = str(directory / ARRAY_V2)
    metadata = parse_json(path, content, 2)
    refuse_unknown(path, "", metadata, _KEYS_V2)
    match metadata:
        case {"zarr_format": 2, "shape": [*shape], "chunks": [*chunk], "dtype": stored, "order": "C" | "F" as order}:
            separator = metadata.get("dimension_separator", ".")
        case _:
            raise SourceError(f"{path} does not describe an array of regular chunks", code="bad-metadata")
    dtype = _dtype_v2(stored)
    if dtype is None:
        raise SourceError(f"{path} has dtype {stored!r:.60}, which no checkpoint has", code="unknown-dtype")
    compressor = metadata.get("compressor")
    kind = compressor.get("id") if isinstance(compressor, dict) else compressor
    if metadata.get("filters") or not (kind is None or isinstance(kind, str)):
        raise SourceError(
            f"{path} has compressor {compressor!r:.60} and filters {metadata.get('filters')!r:.60}",
            code="unsupported-storage", facts=["expected a compressor or none, and no filters"],
        )  # fmt: skip
    check_shapes(path, shape, chunk, chunk, dtype.itemsize)
    if separator not in ("/", "."):
        raise SourceError(f"{path} has separator {separator!r:.60}; expected '/' or '.'", code="bad-metadata")
    encoding = None if kind is None else b""
    if kind not in {None, "zstd"} or order == "F" or stored.startswith(">"):
        encoding = _one_chunk_v2(metadata, chunk, stored, dtype)
    return ArrayMetadata(
        directory, tuple(shape), dtype, tuple(chunk), tuple(chunk), sharded=False, index_at_end=True,
        encoding=encoding, separator=separator, prefix="",
        fill=fill_bytes(path, metadata.get("fill_value"), dtype), by_reshard=False, file=ARRAY_V2,
    )  # fmt: skip


def _one_chunk_v2(metadata: Mapping[str, Any], chunk: list[int], stored: str, dtype: DType) -> bytes:
    """Return the `.zarray` of an array of one such chunk."""
    known = stored if stored[0] in "<>|" else f"<u{dtype.itemsize}"
    changed = {"shape": chunk, "dtype": known, "fill_value": None, "filters": None, "dimension_separator": "."}
    return json.dumps({**metadata, **changed}).encode()


def _dtype_v2(text: object) -> DType | None:
    """Return a dtype by its name in `.zarray`; None if it is not known.

    >>> [str(_dtype_v2(text)) for text in ("<f4", "|b1", "bfloat16", ">f4", "<U4")]
    ['float32', 'bool', 'bfloat16', 'float32', 'None']
    """
    if not isinstance(text, str):
        return None
    if text[:1] not in {"<", ">", "|"}:
        dtype = BY_NAME.get(text)
        return None if dtype in {INT4, STR} else dtype
    kind, size = _KINDS_V2.get(text[1:2]), text[2:]
    if kind is None or not (size.isascii() and size.isdigit()) or len(size) > 1 or (text[0] == "|" and size != "1"):
        return None
    return BY_NAME.get(kind if kind == "bool" else f"{kind}{8 * int(size)}")
