"""The metadata of zarr, checked: of format 3, and of format 2 as zarr-python, xarray and TensorStore write it.

Nothing is trusted: a key that is not known here, and that must be understood, is refused.

Chunks that are plain, or compressed by zstd, are read here; zarr decodes all others, and judges their codecs. Filters
of format 2 are refused. TensorStore writes dtypes that numpy lacks by name, which zarr's library refuses; it is given
integers of their width.

Source: the specifications of zarr v2 and v3; TensorStore 0.1.86 `driver/zarr/metadata.cc`, and arrays that it and
zarr 3.1 wrote.
"""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from reshard.core.layout.block import shape_text
from reshard.core.storage.base import truncated
from reshard.core.storage.crc import crc32c
from reshard.dtypes import BY_NAME, INT4, STR
from reshard.errors import SourceError, names
from reshard.formats.zarr.codec import ZarrCodec
from reshard.formats.zarr.layout import ABSENT, ATTRIBUTES, METADATA, NATIVE, counts, zarr_dtype
from reshard.kits.chunks import zstd_chunk

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from reshard.core.layout.block import Shape
    from reshard.core.storage.places import Place
    from reshard.dtypes import DType
    from reshard.kits.chunks import Decode

ARRAY_V2 = ".zarray"
"""The file that describes an array of zarr v2."""

LARGEST_METADATA = 1 << 28
"""The most bytes of a file of metadata."""

_MOST_DIMS = 32
_MOST_CHUNKS = 1 << 20  # of an array

_KEYS = {
    "group": {"zarr_format", "node_type", "attributes", "consolidated_metadata"},
    "array": {
        "zarr_format", "node_type", "attributes", "shape", "data_type", "chunk_grid", "chunk_key_encoding", "codecs",
        "fill_value", "storage_transformers", "dimension_names",
    },
}  # fmt: skip
_KEYS_V2 = {
    "chunks", "compressor", "dimension_separator", "dtype", "fill_value", "filters", "order", "shape", "zarr_format",
}  # fmt: skip
_NOTED = {
    "group": {"common", "tensors", "texts", "notes", "source", "version", "sources", "strategy"},  # the last two: older
    "array": {"dtype", "listed", "layout", "name", "carried"},
}
_NUMPY_NAMES = {"b1": "bool"} | {
    f"{kind[0]}{int(bits) // 8}": kind + bits for kind, bits in re.findall(r"([a-z]+)(\d+)", " ".join(NATIVE))
}

_LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
_ONE_BYTE = ({"name": "bytes"}, {"name": "bytes", "configuration": {}})  # elements of one byte have no order
_INDEX_CODECS = [_LITTLE, {"name": "crc32c"}]
_SHARDING = {"chunk_shape", "codecs", "index_codecs", "index_location"}

_COMPRESSORS = {"zstd", "gzip", "blosc", "lz4", "zlib", "bz2", "lzma"}
"""The compressors of zarr and numcodecs; other codecs do not expand."""


@dataclass(frozen=True, slots=True)
class ArrayMetadata:
    """The metadata of an array.

    Attributes:
        name: the path of the array in its store.
        file: the name of the file of the metadata.
        shape: the shape of the tensor.
        dtype: the dtype of the tensor.
        unit: the shape of a file's part of the tensor.
        chunk: the shape of a chunk, which is encoded by itself; equal to `unit` unless files are shards.
        index: where in a shard its index is: `start` or `end`; empty if files are not shards.
        decode: decodes a chunk; None if chunks are plain bytes.
        separator: the text between the numbers in the name of a file.
        prefix: the beginning of file names.
        fill: an element of an absent chunk.
        notes: the notes of this program in the attributes; none in an array of another program.
    """

    name: str
    file: str
    shape: Shape
    dtype: DType
    unit: Shape
    chunk: Shape
    index: str
    decode: Decode | None
    separator: str
    prefix: str
    fill: bytes
    notes: Mapping[str, Any]

    @property
    def chunk_bytes(self) -> int:
        """Bytes in a decoded chunk."""
        return prod(self.chunk) * self.dtype.itemsize

    @property
    def inner(self) -> Shape:
        """Return the number of chunks of a file along each dimension."""
        return counts(self.unit, self.chunk)

    def key(self, cell: Shape) -> str:
        """Return the path of the file of a cell of the grid."""
        numbers = [*([self.prefix] if self.prefix else []), *map(str, cell)]
        return f"{self.name}/{self.separator.join(numbers) or '0'}"

    @property
    def index_bytes(self) -> int:
        """Return the size of the index of a shard."""
        return 16 * prod(self.inner) + 4

    def spans(self, path: object, nbytes: int, content: bytearray) -> tuple[tuple[int, int], ...]:
        """Return the offset and length of each chunk of a shard of a size, given its index.

        Raises:
            SourceError: the index is damaged, or a chunk is not within the shard.
        """
        size = self.index_bytes
        if nbytes < size:
            raise truncated(path, nbytes, size)
        if struct.unpack_from("<I", content, size - 4)[0] != crc32c(memoryview(content)[:-4]):
            raise SourceError(f"{path} has an index that does not match its checksum", code="wrong-checksum")
        spans = tuple(struct.iter_unpack("<QQ", bytes(content[:-4])))
        first, last = (0, nbytes - size) if self.index == "end" else (size, nbytes)
        for number, (offset, length) in enumerate(spans):
            is_inside = first <= offset and offset + length <= last
            is_whole = self.decode is not None or length == self.chunk_bytes
            if (offset, length) != (ABSENT, ABSENT) and not (is_inside and is_whole):
                where = f"chunk {number} at bytes {offset} to {offset + length}"
                raise SourceError(f"{path} cannot have {where}, as its index says", code="out-of-range")
        return spans


def _checked(array: ArrayMetadata, where: object) -> ArrayMetadata:
    """Return an array; raise `SourceError` if its shapes are impossible, do not fit, or make too many chunks."""
    for label, extents, least in (("shape", array.shape, 0), ("chunks", array.unit, 1), ("chunks", array.chunk, 1)):
        valid = all(type(extent) is int and least <= extent < 1 << 62 for extent in extents)
        if not valid or len(extents) > _MOST_DIMS or prod(extents) * array.dtype.itemsize >= 1 << 62:
            shown = f"{list(extents[:4])}{'…' * (len(extents) > 4)}"
            raise SourceError(f"{where} has {label} {shown:.200}, which no array has", code="bad-shape")
    ranks = {len(array.shape), len(array.unit), len(array.chunk)}
    if len(ranks) > 1 or any(a % b for a, b in zip(array.unit, array.chunk, strict=True)):
        shapes = f"shape {shape_text(array.shape)}, chunks {shape_text(array.unit)} of {shape_text(array.chunk)}"
        raise SourceError(f"{where} has a shape and chunks that do not fit: {shapes}", code="wrong-shape")
    count = prod(counts(array.shape, array.chunk))
    if count > _MOST_CHUNKS:
        raise SourceError(f"{where} has {count} chunks; at most {_MOST_CHUNKS} are supported", code="too-many-blocks")
    if array.separator not in ("/", "."):
        raise SourceError(f"{where} has separator {array.separator!r:.60}; expected '/' or '.'", code="bad-metadata")
    return array


def parse_array(name: str, metadata: Mapping[str, Any], where: object) -> ArrayMetadata:
    """Check and parse the metadata of an array, by its path in the store.

    Raises:
        SourceError: they are inconsistent or malicious; of a dtype that no checkpoint has (`unknown-dtype`), or stored
            in an unknown way (`unsupported-storage`).
    """
    parse = _parse_v2 if metadata["zarr_format"] == 2 else _parse_v3
    try:
        return _checked(parse(name, metadata, where), where)
    except RecursionError:
        raise SourceError(f"{where} is nested too deeply", code="bad-metadata") from None


def _parse_v3(name: str, metadata: Mapping[str, Any], where: object) -> ArrayMetadata:
    match metadata:
        case {
            "node_type": "array", "shape": [*shape], "data_type": data_type, "codecs": [*codecs], "fill_value": fill,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [*unit], **of_grid}},
            "chunk_key_encoding": {"name": ("default" | "v2") as encoding, **more},
        } if isinstance(options := more.pop("configuration", {}), dict):  # fmt: skip
            pass
        case _:
            raise SourceError(f"{where} does not describe an array of regular chunks", code="bad-metadata")
    refuse_unknown(where, "chunk_grid.", of_grid, ())
    refuse_unknown(where, "chunk_key_encoding.", more, {"must_understand"})
    refuse_unknown(where, f"{encoding}.", options, {"separator"})
    compressors = [*_compressors(codecs)]
    if len(compressors) > 1 or metadata.get("storage_transformers"):
        # Compressed twice: neither size of a file bounds what is in between.
        fault = f"has storage transformers, or several compressors: {names(compressors)}"
        raise SourceError(f"{where} {fault}", code="unsupported-storage")
    stored = BY_NAME.get(data_type) if isinstance(data_type, str) else None
    if stored is None or stored in {STR, INT4}:
        raise SourceError(
            f"{where} is of zarr's dtype {data_type!r:.60}, which no checkpoint has", code="unknown-dtype"
        )
    notes = own_notes(metadata)
    dtype = BY_NAME.get(str(notes.get("dtype", stored.name)))
    if dtype is None or dtype is STR or dtype.itemsize != stored.itemsize:
        raise SourceError(f"{where} has dtype {data_type}, and {notes.get('dtype')!r} in its notes", code="wrong-dtype")
    chunk, index = unit, ""
    match codecs:
        case [{"name": "sharding_indexed", "configuration": {"chunk_shape": [*inner], "codecs": [*of_inner], **rest}}]:
            location = rest.get("index_location", "end")
            is_known = rest.keys() <= _SHARDING and location in ("start", "end")
            if is_known and rest.get("index_codecs") == _INDEX_CODECS:  # otherwise zarr decodes the shard as one chunk
                chunk, index, codecs = inner, str(location), of_inner
    return ArrayMetadata(
        name, METADATA, tuple(shape), dtype, tuple(unit), tuple(chunk), index, _decode_v3(codecs, stored, chunk),
        options.get("separator", "/" if encoding == "default" else "."), "c" if encoding == "default" else "",
        fill_bytes(where, fill, stored), notes,
    )  # fmt: skip


def _decode_v3(codecs: list[Any], stored: DType, chunk: list[int]) -> Decode | None:
    """Return how chunks are decoded: not at all, as zstd, or by zarr."""
    match codecs:
        case [plain, *compressors] if plain == _LITTLE or (stored.itemsize == 1 and plain in _ONE_BYTE):
            match compressors:
                case []:
                    return None
                case [{"name": "zstd", "configuration": dict(options)}] if options.keys() <= {"level", "checksum"}:
                    return zstd_chunk
    kind = zarr_dtype(stored)
    metadata = {
        "zarr_format": 3, "node_type": "array", "shape": chunk, "data_type": kind, "codecs": codecs,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": NATIVE[kind], "attributes": {},
    }  # fmt: skip
    last = codecs[-1] if codecs else None
    is_blosc = isinstance(last, dict) and str(last.get("name")).removeprefix("numcodecs.") == "blosc"
    return ZarrCodec(json.dumps(metadata).encode(), METADATA, "/".join(["c", *["0"] * len(chunk)]), is_blosc)


def _compressors(codecs: Iterable[object]) -> Iterator[str]:
    """Yield the compressors among codecs, and among those of shards."""
    for codec in codecs:
        name = codec.get("name") if isinstance(codec, dict) else codec
        if str(name).removeprefix("numcodecs.") in _COMPRESSORS:
            yield str(name)
        options = codec.get("configuration") if isinstance(codec, dict) else None
        for inner in ("codecs", "index_codecs"):
            listed = options.get(inner) if isinstance(options, dict) else None
            yield from _compressors(listed if isinstance(listed, list) else ())


def _parse_v2(name: str, metadata: Mapping[str, Any], where: object) -> ArrayMetadata:
    match metadata:
        case {"shape": [*shape], "chunks": [*chunk], "dtype": stored, "order": "C" | "F" as order}:
            separator = metadata.get("dimension_separator", ".")
        case _:
            raise SourceError(f"{where} does not describe an array of regular chunks", code="bad-metadata")
    dtype = _dtype_v2(stored)
    if dtype is None:
        raise SourceError(f"{where} has dtype {stored!r:.60}, which no checkpoint has", code="unknown-dtype")
    compressor = metadata.get("compressor")
    kind = compressor.get("id") if isinstance(compressor, dict) else compressor
    if metadata.get("filters") or not (kind is None or isinstance(kind, str)):
        fault = f"has compressor {compressor!r:.60} and filters {metadata.get('filters')!r:.60}, which are not read"
        raise SourceError(f"{where} {fault}", code="unsupported-storage")
    decode: Decode | None = None if kind is None else zstd_chunk
    if kind not in {None, "zstd"} or order == "F" or stored.startswith(">"):
        known = stored if stored[0] in "<>|" else f"<u{dtype.itemsize}"
        changed = {"shape": chunk, "dtype": known, "fill_value": None, "filters": None, "dimension_separator": "."}
        one = json.dumps({**metadata, **changed}).encode()
        decode = ZarrCodec(one, ARRAY_V2, ".".join(["0"] * len(chunk)) or "0", kind == "blosc")
    return ArrayMetadata(
        name, ARRAY_V2, tuple(shape), dtype, tuple(chunk), tuple(chunk), "", decode, separator, "",
        fill_bytes(where, metadata.get("fill_value"), dtype), {},
    )  # fmt: skip


def _dtype_v2(text: object) -> DType | None:
    """Return a dtype by its name in `.zarray`; None if it is not known.

    >>> [str(_dtype_v2(text)) for text in ("<f4", "|b1", "bfloat16", ">f4", "<U4")]
    ['float32', 'bool', 'bfloat16', 'float32', 'None']
    """
    if not isinstance(text, str):
        return None
    dtype = BY_NAME.get(_NUMPY_NAMES.get(text[1:], "") if text[:1] in {"<", ">", "|"} else text)
    return None if dtype in {INT4, STR} else dtype


def fill_bytes(where: object, value: Any, stored: DType) -> bytes:
    """Return the bytes of a fill value."""
    if value in (0, None) and not isinstance(value, float):  # also False
        return bytes(stored.itemsize)
    import numpy as np

    kind = stored.numpy()
    try:
        if isinstance(value, str) and value.startswith("0x"):
            value = np.frombuffer(bytes.fromhex(value[2:])[::-1], kind)
        elif isinstance(value, list) and kind.kind == "c":
            value = complex(*map(float, value))
        elif kind.kind not in "biu":
            value = float(value)  # also "NaN" and "-Infinity"
        return np.asarray(value, kind).reshape(()).tobytes()
    except (TypeError, ValueError, OverflowError):
        raise SourceError(f"{where} has fill value {value!r}, which is not a {stored}", code="bad-value") from None


def parse_node(where: Place | str, text: bytes) -> dict[str, Any]:
    """Parse and check the metadata of a group or an array, of the format that the name of their file says.

    As the specification requires, an unknown key is ignored only if its `must_understand` is false.

    Raises:
        SourceError: they are not valid, or have unknown keys.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{where} is not JSON", code="not-json", facts=[str(error)]) from None
    file = str(where).rpartition("/")[2]
    if not isinstance(content, dict) or content.get("zarr_format") != (3 if file == METADATA else 2):
        raise SourceError(
            f"{where} is not metadata of zarr's format {3 if file == METADATA else 2}", code="bad-metadata"
        )
    if file != METADATA:
        refuse_unknown(where, "", content, _KEYS_V2)
        return content
    kind = str(content.get("node_type"))
    needless = {
        key for key, value in content.items() if isinstance(value, dict) and value.get("must_understand") is False
    }
    refuse_unknown(where, "", content.keys() - needless, _KEYS.get(kind, content.keys()))
    attributes = content.get("attributes", {})
    if not isinstance(attributes, dict) or not isinstance(attributes.get(ATTRIBUTES, {}), dict):
        fault = f"has the attributes {attributes!r:.60}; expected an object, and one in {ATTRIBUTES!r}"
        raise SourceError(f"{where} {fault}", code="bad-metadata")
    notes = own_notes(content)
    refuse_unknown(where, f"attributes.{ATTRIBUTES}.", notes, _NOTED.get(kind, notes))
    return content


def refuse_unknown(where: object, prefix: str, keys: Iterable[Any], known: Collection[str]) -> None:
    """Raise `SourceError` if metadata have an unknown key; `prefix` is before keys in the message."""
    unknown = sorted(set(keys).difference(known))
    if unknown:
        fault = f"has unknown keys: {names([f'{prefix}{key}' for key in unknown])}"
        raise SourceError(
            f"{where} {fault}", code="unknown-key", facts=[f"known keys: {names(sorted(known), most=20)}"]
        )


def own_notes(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return this program's notes in the attributes; empty in a store of another program."""
    notes: dict[str, Any] = metadata.get("attributes", {}).get(ATTRIBUTES, {})
    return notes
