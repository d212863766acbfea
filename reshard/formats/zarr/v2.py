"""The metadata of arrays of zarr's format 2, as TensorStore writes them: checked and parsed.

Only plain chunks, and chunks compressed by zstd, are supported. TensorStore writes dtypes that numpy lacks by name,
which zarr's library refuses.

Source: the zarr v2 specification; TensorStore 0.1.86 `driver/zarr/metadata.cc`, and arrays that it wrote.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reshard.dtypes import BY_NAME, INT4, STR
from reshard.errors import SourceError
from reshard.formats.zarr.array import ArrayMetadata, check_shapes, fill_bytes
from reshard.formats.zarr.files import refuse_unknown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.dtypes import DType
    from reshard.storage.places import Place

NAME = ".zarray"
"""The file that describes an array."""

_KINDS = {"b": "bool", "c": "complex", "f": "float", "i": "int", "u": "uint"}
_KEYS = {
    "chunks", "compressor", "dimension_separator", "dtype", "fill_value", "filters", "order", "shape", "zarr_format",
}  # fmt: skip


def parse_v2(directory: Place, metadata: Mapping[str, Any]) -> ArrayMetadata:
    """Check and parse a `.zarray`.

    Raises:
        SourceError: it is not valid, or has an option that is not supported.
    """
    path = str(directory / NAME)
    refuse_unknown(path, "", metadata, _KEYS)
    match metadata:
        case {"zarr_format": 2, "shape": [*shape], "chunks": [*chunk], "dtype": stored, "order": "C"}:
            separator = metadata.get("dimension_separator", ".")
        case _:
            raise SourceError(f"{path} does not describe an array of chunks in row-major order", code="bad-metadata")
    compressor = metadata.get("compressor")
    kind = compressor.get("id") if isinstance(compressor, dict) else compressor
    if kind not in (None, "zstd") or metadata.get("filters"):
        raise SourceError(
            f"{path} has compressor {kind!r:.60} and filters {metadata.get('filters')!r:.60}; expected zstd or none",
            code="unsupported-storage",
        )
    dtype = _dtype(stored)
    if dtype is None:
        raise SourceError(f"{path} has dtype {stored!r:.60}, which no checkpoint has", code="unknown-dtype")
    check_shapes(path, shape, chunk, chunk, dtype.itemsize)
    if separator not in ("/", "."):
        raise SourceError(f"{path} has separator {separator!r:.60}; expected '/' or '.'", code="bad-metadata")
    return ArrayMetadata(
        directory, tuple(shape), dtype, tuple(chunk), tuple(chunk), sharded=False, index_at_end=True,
        encoding=None if kind is None else b"", separator=separator, prefix="",
        fill=fill_bytes(path, metadata.get("fill_value"), dtype), by_reshard=False,
    )  # fmt: skip


def _dtype(text: object) -> DType | None:
    """Return a dtype by its name in `.zarray`; None if it is not known.

    >>> [str(_dtype(text)) for text in ("<f4", "|b1", "bfloat16", ">f4", "<U4")]
    ['float32', 'bool', 'bfloat16', 'None', 'None']
    """
    if not isinstance(text, str):
        return None
    if text[:1] not in {"<", "|", ">"}:
        dtype = BY_NAME.get(text)
        return None if dtype in {INT4, STR} else dtype
    kind, size = _KINDS.get(text[1:2]), text[2:]
    if kind is None or not (size.isascii() and size.isdigit()) or len(size) > 1 or (text[0] != "<" and size != "1"):
        return None
    return BY_NAME.get(kind if kind == "bool" else f"{kind}{8 * int(size)}")
