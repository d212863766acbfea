"""safetensors files: an 8-byte length, a JSON header, the contents of the tensors.

They are written like the safetensors library writes them: tensors sorted by dtype (its own order, by descending width)
and then by name, so that all stay aligned; the header padded with spaces to a multiple of 8 bytes.

Sources: the safetensors format description and library 0.8; MindSpore 2.10 `train/serialization.py` for its keys in
`__metadata__`: `format`, `crc_num`, `remove_redundancy`, and `Int4` under the name of an int4 tensor, whose dtype in
the header is I8. `str` entries, which this format lacks, are stored there under `reshard.str` as JSON.

Shapes in a header count values, also of F4 and F6, which are packed without gaps within a row. Here their last extent
counts bytes.
"""

from __future__ import annotations

import json
import re
from math import prod
from typing import TYPE_CHECKING, Any, TypeGuard

from reshard.core.layout.block import LONGEST_NAME, is_possible, shape_text
from reshard.core.model.entries import Entry, FileIndex, FileLayout
from reshard.core.storage.base import truncated
from reshard.core.storage.small import is_text, parse_json
from reshard.dtypes import BY_SAFETENSORS, INT4, SAFETENSORS_ORDER, STR
from reshard.errors import Faults, SourceError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard.core.layout.block import Shape
    from reshard.core.model.entries import Content, RangeReader
    from reshard.dtypes import DType

NAME = "safetensors"
EXTENSION = ".safetensors"

TEXTS = "reshard.str"
"""The metadata key of `str` entries."""

_LONGEST_HEADER = 100_000_000  # the library's own limit
_OWN_KEYS = {"crc_num", "remove_redundancy", TEXTS}


def recognizes(start: bytes, size: int) -> bool:
    """Return whether a file is safetensors: a plausible header length, then a brace."""
    return size >= 8 and start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= max(size, _LONGEST_HEADER)


def index(reader: RangeReader) -> FileIndex:
    """Return the index of a safetensors file.

    Raises:
        SourceError: the header is not JSON, or does not cover the rest of the file exactly, without gap or overlap.
    """
    header, data_start = _header(reader)
    metadata = header.pop("__metadata__", {})
    if not _are_texts(metadata):
        fault = f"{reader.path} has a __metadata__ that is not an object of strings in UTF-8"
        raise SourceError(fault, code="bad-metadata")
    faults = Faults(reader.path)
    entries, unreadable = _entries(header, metadata, data_start, reader.size, faults)
    faults.raise_if_any(SourceError)
    for name, text in _texts(metadata, reader.path).items():
        if name in entries:
            fault = f"{reader.path} has {name!r} as a tensor and as a text entry of its __metadata__"
            raise SourceError(fault, code="duplicate-name")
        entries[name] = Entry(STR, (0,), (), text)
    crc = metadata.get("crc_num", "")
    return FileIndex(
        NAME,
        entries,
        tuple((key, value) for key, value in metadata.items() if key not in _OWN_KEYS and key not in header),
        crc=int(crc) if re.fullmatch("[0-9]{1,10}", crc) else None,
        deduplicated=metadata.get("remove_redundancy") == "True",
        unreadable=tuple(unreadable.items()),
    )


def _header(reader: RangeReader) -> tuple[dict[str, Any], int]:
    """Return the JSON header of a file, and where its data begin."""
    length = int.from_bytes(reader.read(0, 8), "little")
    if length > _LONGEST_HEADER:
        fact = f"its header would have {length} bytes; at most {_LONGEST_HEADER} are allowed"
        raise SourceError(f"{reader.path} is corrupt", code="corrupt", facts=[fact])
    if length > reader.size - 8:
        raise truncated(reader.path, reader.size, 8 + length, facts=["it ends within its header"])
    repeated: list[str] = []
    try:
        header = parse_json(reader.read(8, length), repeated)
    except ValueError as error:
        fault = f"{reader.path} has a header that is not JSON in UTF-8"
        raise SourceError(fault, code="not-json", facts=[str(error)]) from None
    faults = Faults(reader.path)
    for name in repeated:
        faults.add(f"{name!a:.60}", "is twice in one object of the header", code="duplicate-name")
    faults.raise_if_any(SourceError)
    if not isinstance(header, dict):
        fault = f"{reader.path} has a header that is a JSON {type(header).__name__}; expected an object"
        raise SourceError(fault, code="bad-header")
    return header, 8 + length


def _are_texts(texts: object) -> TypeGuard[dict[str, str]]:
    """Return whether JSON is an object of strings without half of a surrogate pair."""
    return isinstance(texts, dict) and all(
        isinstance(value, str) and is_text(value) and is_text(name) for name, value in texts.items()
    )


def _entries(
    header: dict[str, Any], metadata: Mapping[str, str], data_start: int, size: int, faults: Faults
) -> tuple[dict[str, Entry], dict[str, str]]:
    """Return the tensors of a header, and why others cannot be read; add a fault if they do not cover the file."""
    entries: dict[str, Entry] = {}
    unreadable: dict[str, str] = {}
    places: list[tuple[int, int, str]] = []
    for name, item in header.items():
        try:
            begin, end = _place(name, item)
        except SourceError as error:
            faults.add(f"tensor {name!r:.300}", error)
            continue
        places.append((begin, end, name))
        try:
            dtype, shape = _kind(item, end - begin, is_int4=metadata.get(name) == INT4.mindspore)
        except SourceError as error:
            unreadable[name] = error.message
            continue
        entries[name] = Entry(dtype, shape, ((data_start + begin, end - begin),))
    if faults.count:
        return {}, {}
    position = 0
    for begin, end, name in sorted(places):
        if begin != position or end < begin:
            kind = "a gap" if begin > position else "an overlap" if begin < position else f"it ends at byte {end}"
            fault = f"begins at byte {begin} of the data; expected {position} ({kind})"
            faults.add(f"tensor {name!r}", fault, code="bad-offsets")
            return {}, {}
        position = end
    described = data_start + position
    if size < described:
        raise truncated(faults.subject, size, described)
    if size > described:
        faults.add("end", f"the file has {size} bytes; its header describes {described}", code="trailing-bytes")
    return entries, unreadable


def _place(name: str, item: object) -> tuple[int, int]:
    """Return begin and end of a tensor in the header; raise `SourceError` without its name if it is not valid."""
    if not is_text(name):
        raise SourceError("has half of a surrogate pair in its name, which is not UTF-8", code="bad-name")
    if len(name.encode()) > LONGEST_NAME:
        fault = f"has a name of {len(name)} characters; at most {LONGEST_NAME} bytes are read"
        raise SourceError(fault, code="name-too-long")
    match item:
        case {"dtype": str(), "shape": [*extents], "data_offsets": [begin, end]} if all(
            type(number) is int and 0 <= number < 1 << 63 for number in (*extents, begin, end)
        ):
            return begin, end
    raise SourceError("has no valid dtype, shape and data_offsets in the header", code="bad-header")


def _kind(item: Mapping[str, Any], nbytes: int, *, is_int4: bool) -> tuple[DType, Shape]:
    """Return dtype and shape of a tensor in the header; raise `SourceError` with a predicate if it cannot be read."""
    dtype, extents = BY_SAFETENSORS.get(item["dtype"]), tuple(item["shape"])
    if dtype is None:
        raise SourceError(f"has unknown dtype {item['dtype']!r:.60}", code="unknown-dtype")
    if is_int4:
        dtype = INT4
    if not is_possible(extents):
        raise SourceError(f"has the impossible shape {shape_text(extents)}", code="bad-shape")
    shape = dtype.as_bytes(extents)
    if shape is None:
        fault = f"has shape {shape_text(extents)} of {dtype.safetensors}; expected rows of whole bytes"
        raise SourceError(fault, code="not-divisible")
    if nbytes != prod(shape) * dtype.itemsize:
        expected = f"{prod(shape) * dtype.itemsize} for {dtype.safetensors} {shape_text(extents)}"
        raise SourceError(f"has {nbytes} bytes; expected {expected}", code="wrong-size")
    return dtype, shape


def _texts(metadata: Mapping[str, str], path: str) -> dict[str, str]:
    try:
        texts = parse_json(metadata.get(TEXTS, "{}").encode(), [])
    except ValueError:
        texts = None
    if not _are_texts(texts):
        fault = f"{path} has a __metadata__[{TEXTS!r}] that is not a JSON object of strings"
        raise SourceError(fault, code="bad-metadata")
    return texts


def lay_out(contents: Sequence[Content], metadata: Mapping[str, str]) -> FileLayout:
    """Return the layout of a safetensors file: its header, and the offsets of contents.

    Args:
        contents: the tensors, in any order.
        metadata: entries for `__metadata__`, to which this module adds its own.

    Raises:
        UsageError: a tensor has a dtype that the format lacks, or a reserved name, or is cut within a value.
    """
    notes = dict(metadata)
    texts = {content.name: content.text for content in contents if content.text is not None}
    if texts:
        notes[TEXTS] = json.dumps(texts, ensure_ascii=False)
    tensors = sorted(
        (content for content in contents if content.text is None),
        key=lambda content: (-SAFETENSORS_ORDER[_stored_dtype(content)], content.name),
    )
    notes |= {content.name: "Int4" for content in tensors if content.dtype is INT4}
    header: dict[str, Any] = {"__metadata__": notes} if notes else {}
    position = 0
    for content in tensors:
        values = content.dtype.as_values(content.shape)
        if values is None:
            raise UsageError(
                f"tensor {content.name!r} is {content.dtype} and would be cut within a value", code="not-divisible",
                hint="cut it along another dimension",
            )  # fmt: skip
        end = position + prod(content.shape) * content.dtype.itemsize
        header[content.name] = {
            "dtype": content.dtype.safetensors, "shape": list(values), "data_offsets": [position, end],
        }  # fmt: skip
        position = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode(errors="surrogatepass")
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    laid_out = []
    for content in tensors:
        begin, end = header[content.name]["data_offsets"]
        laid_out.append(content._replace(runs=((start + begin, end - begin),)))
    laid_out += [content for content in contents if content.text is not None]
    return FileLayout(start + position, ((0, len(text).to_bytes(8, "little") + text),), tuple(laid_out))


def _stored_dtype(content: Content) -> DType:
    """Return the dtype in the header, where int4 is I8; raise `UsageError` if the format cannot hold a tensor."""
    if content.name == "__metadata__":
        raise UsageError(
            f"safetensors cannot hold a tensor {content.name!r}: it keeps its notes under this name", code="bad-name",
            hint="rename the tensor",
        )  # fmt: skip
    if content.dtype.safetensors is None:
        fault = f"safetensors cannot hold tensor {content.name!r}, which is {content.dtype}"
        raise UsageError(fault, code="unsupported-dtype")
    return BY_SAFETENSORS[content.dtype.safetensors]


SHARDING_INFO = "DCP_SHARDING_INFO"
"""The note of a file with the offsets of its blocks in their tensors, as PyTorch writes it."""


def refuse_blocks(path: str, notes: Mapping[str, str]) -> None:
    """Raise `SourceError` if the notes in a file's header say that it contains blocks of tensors."""
    if SHARDING_INFO in notes:
        raise SourceError(
            f"{path} has blocks that PyTorch saved, as its header says ({SHARDING_INFO})", code="one-of-several",
            hint="give all such files PyTorch's names, shard-00001-model-00001-of-00001.safetensors and so on, and "
            "open their directory",
        )  # fmt: skip
