"""The metadata of arrays of zarr's format 2, as zarr-python, xarray and TensorStore write them: checked and parsed.

Plain chunks, and chunks compressed by zstd, are read as those of format 3. zarr decodes all others: other compressors,
chunks in column-major order, big-endian numbers. Filters are refused. TensorStore writes dtypes that numpy lacks by
name, which zarr's library refuses; it is given integers of their width.

Source: the zarr v2 specification; TensorStore 0.1.86 `driver/zarr/metadata.cc`, and arrays that it and zarr 3.1 wrote.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from reshard.dtypes import BY_NAME, INT4, STR
from reshard.errors import SourceError
from reshard.formats.zarr.array import ArrayMetadata, check_shapes, fill_bytes
from reshard.formats.zarr.files import ARRAY_V2, refuse_unknown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.core.storage.places import Place
    from reshard.dtypes import DType

NAME = ARRAY_V2
"""The file that describes an array."""

_KINDS = {"b": "bool", "c": "complex", "f": "float", "i": "int", "u": "uint"}
_KEYS = {
    "chunks", "compressor", "dimension_separator", "dtype", "fill_value", "filters", "order", "shape", "zarr_format",
}  # fmt: skip


def parse_v2(directory: Place, content: bytes) -> ArrayMetadata:
    """Check and parse a `.zarray`.

    Raises:
        SourceError: it is not valid, has a dtype that no checkpoint has, or has filters.
    """
    path = str(directory / NAME)
    metadata = parse_json(path, content)
    refuse_unknown(path, "", metadata, _KEYS)
    match metadata:
        case {"zarr_format": 2, "shape": [*shape], "chunks": [*chunk], "dtype": stored, "order": "C" | "F" as order}:
            separator = metadata.get("dimension_separator", ".")
        case _:
            raise SourceError(f"{path} does not describe an array of regular chunks", code="bad-metadata")
    dtype = _dtype(stored)
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
        encoding = _one_chunk(metadata, chunk, stored, dtype)
    return ArrayMetadata(
        directory, tuple(shape), dtype, tuple(chunk), tuple(chunk), sharded=False, index_at_end=True,
        encoding=encoding, separator=separator, prefix="",
        fill=fill_bytes(path, metadata.get("fill_value"), dtype), by_reshard=False, file=NAME,
    )  # fmt: skip


def parse_json(path: str, content: bytes) -> dict[str, Any]:
    """Parse a file of metadata of format 2; raise `SourceError` if it is not a JSON object of that format."""
    try:
        metadata = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path} is not JSON", code="not-json", facts=[str(error)]) from None
    if not isinstance(metadata, dict) or metadata.get("zarr_format") != 2:
        raise SourceError(f"{path} is not metadata of zarr's format 2", code="bad-metadata")
    return metadata


def _one_chunk(metadata: Mapping[str, Any], chunk: list[int], stored: str, dtype: DType) -> bytes:
    """Return the `.zarray` of an array of one such chunk."""
    known = stored if stored[0] in "<>|" else f"<u{dtype.itemsize}"
    changed = {"shape": chunk, "dtype": known, "fill_value": None, "filters": None, "dimension_separator": "."}
    return json.dumps({**metadata, **changed}).encode()


def _dtype(text: object) -> DType | None:
    """Return a dtype by its name in `.zarray`; None if it is not known.

    >>> [str(_dtype(text)) for text in ("<f4", "|b1", "bfloat16", ">f4", "<U4")]
    ['float32', 'bool', 'bfloat16', 'float32', 'None']
    """
    if not isinstance(text, str):
        return None
    if text[:1] not in {"<", ">", "|"}:
        dtype = BY_NAME.get(text)
        return None if dtype in {INT4, STR} else dtype
    kind, size = _KINDS.get(text[1:2]), text[2:]
    if kind is None or not (size.isascii() and size.isdigit()) or len(size) > 1 or (text[0] == "|" and size != "1"):
        return None
    return BY_NAME.get(kind if kind == "bool" else f"{kind}{8 * int(size)}")
