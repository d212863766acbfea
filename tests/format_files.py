"""Checkpoint files put together from bytes, valid ones and others, and what an index finds in them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from checkpoints import build

from reshard.core.model.entries import Content
from reshard.dtypes import STR, by_name
from reshard.errors import UsageError
from reshard.strategy.proto import message_class

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from reshard.core.model.entries import Entry, FileIndex
    from reshard.kits import files as formats

Held = dict[str, tuple[str, tuple[int, ...], bytes]]
"""Tensors as (dtype name, shape, bytes)."""


def write(format_: formats.Format, held: Held, metadata: dict[str, str] | None = None) -> bytes:
    """What a format makes of tensors; `str` ones are given as UTF-32."""
    contents = [
        Content(name, STR, (0,), data.decode("utf-32-le"))
        if dtype == "str"
        else Content(name, by_name(dtype, UsageError), shape)
        for name, (dtype, shape, data) in held.items()
    ]
    layout = format_.lay_out(contents, metadata or {})
    return build(layout, {name: data for name, (dtype, _, data) in held.items() if dtype != "str"})


def contents_of(path: Path, index: FileIndex) -> Held:
    """What an index says is in a file, read where it says."""
    file = path.read_bytes()

    def data(entry: Entry) -> bytes:
        if entry.text is not None:
            return entry.text.encode("utf-32-le")
        return b"".join(file[offset : offset + nbytes] for offset, nbytes in entry.runs)

    return {name: (entry.dtype.name, entry.shape, data(entry)) for name, entry in index.entries.items()}


def message(name: str, kind: str, dims: Sequence[int], content: bytes) -> bytes:
    """One Checkpoint message, by protobuf."""
    made: Any = message_class("Checkpoint")()
    value = made.value.add(tag=name)
    value.tensor.dims.extend(dims)
    value.tensor.tensor_type = kind
    value.tensor.tensor_content = content
    data: bytes = made.SerializeToString()
    return data


def saved(tmp_path: Path, content: bytes, name: str = "a.ckpt") -> Path:
    path = tmp_path / name
    path.write_bytes(content)
    return path


def st_file(header: dict[str, Any] | bytes, data: bytes = b"") -> bytes:
    """A safetensors file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


SAMPLE: Held = {
    "layer.weight": ("float32", (2, 3), bytes(range(24))),
    "layer.bias": ("bfloat16", (3,), b"abcdef"),
    "step": ("int32", (), b"\x07\0\0\0"),
    "quant": ("int4", (2,), b"\x01\xf9"),
    "empty": ("float16", (0, 4), b""),
}
CODE = {"code": ("str", (0,), "aé中😀".encode("utf-32-le"))}
