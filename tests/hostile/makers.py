"""How the bytes of hostile files are made, knowing nothing of what `reshard` does with them."""

from __future__ import annotations

import json
import os
import struct
from typing import TYPE_CHECKING, Any

from reshard.strategy.proto import message_class  # the message description alone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path


def varint(value: int) -> bytes:
    """An unsigned number as protobuf has it."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def field(number: int, content: bytes | int) -> bytes:
    """A protobuf field: bytes with their length, or a number."""
    if isinstance(content, int):
        return varint(number << 3) + varint(content % (1 << 64))
    return varint(number << 3 | 2) + varint(len(content)) + content


def proto(name: bytes = b"w", dims: Iterable[int] = (4,), kind: bytes = b"Int8", content: bytes = b"abcd") -> bytes:
    """A tensor of a `.ckpt` file."""
    tensor = b"".join(field(1, dim) for dim in dims) + field(2, kind) + field(3, content)
    return field(1, field(1, name) + field(2, tensor))


def st(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file with any header, of any stated length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(begin: int, end: int, shape: Iterable[Any] | None = None, dtype: str = "I8") -> dict[str, Any]:
    """A tensor of a safetensors header."""
    return {"dtype": dtype, "shape": [end - begin] if shape is None else list(shape), "data_offsets": [begin, end]}


W = proto()
TENSORS = {"w": tensor(0, 4)}


def strategy(**tensors: tuple[list[int], list[int]]) -> Any:
    """A protobuf strategy: device matrix and tensor map of each tensor."""
    message: Any = message_class("mindspore.straspb.ParallelStrategyMap")(current_stage=2)
    for name, (dev_matrix, tensor_map) in tensors.items():
        item = message.parallel_layout_item.add(param_name=name)
        item.parallel_layouts.dev_matrix.add(dim=dev_matrix)
        item.parallel_layouts.tensor_map.add(dim=tensor_map)
        item.parallel_layouts.field = 0
        item.parallel_layouts.opt_weight_shard_step = 0
        item.parallel_layouts.opt_weight_shard_size = 0
    return message


def edited(dev_matrix: list[int], tensor_map: list[int], /, **fields: Any) -> bytes:
    """A protobuf strategy of one tensor, with other fields of its layout."""
    message = strategy(w=(dev_matrix, tensor_map))
    layouts = message.parallel_layout_item[0].parallel_layouts
    for name, value in fields.items():
        if isinstance(value, list):
            getattr(layouts, name).add(dim=value)
        else:
            setattr(layouts, name, value)
    made: bytes = message.SerializeToString()
    return made


def layout(**items: Any) -> bytes:
    """A JSON strategy of one tensor over two devices, some items otherwise."""
    item = {"dev_matrix": [2], "tensor_map": [0], "tensor_shape": [4], "field": 0} | items
    return layouts({"w": item})


def layouts(items: Any, **top: Any) -> bytes:
    """A JSON strategy of any layouts."""
    return json.dumps({"parallel_layout_item": items, **top}).encode()


def block(content: bytes, *, length: int | None = None, iv: int = 16, magic: int = 0x7F3A5ED8) -> bytes:
    """A block of an encrypted file, whose tag is wrong, of any stated length of its contents."""
    length = len(content) if length is None else length
    stated = struct.pack("<ii16si", (24 + length) % (1 << 31), iv, bytes(16), length)
    return struct.pack("<I", magic) + bytes(16) + stated + content


def planned_strategy(stages: Any = (0, 1), devices: Any = 2, matrix: Any = (2,), axes: Any = ((0,),)) -> dict[str, Any]:
    """The strategy of one tensor, as plan files have it."""
    layout = [matrix, axes, 0, 0, [], [], 0]
    places = [[[0, 0, None, False]]]
    return {
        "stages": stages, "devices": devices, "merged": False, "layouts": [layout], "places": places,
        "tensors": {"w": 0},
    }  # fmt: skip


def a_plan_file(
    pattern: object = None,
    way: tuple[str, dict[str, Any]] = ("ckpt", {"prefix": "checkpoint_", "suffix": "", "name": None}),
    warnings: Sequence[str] = ("\x1b[2J",),
    **source: Any,
) -> Callable[[Path], None]:
    """A plan file of the valid checkpoint file next to the item's directory, whose source is said to be otherwise."""

    def make(path: Path) -> None:
        known = {
            "root": str(path.parents[1] / "valid"), "described_by": "", "strategy": None, "stage": None,
            "partial": False, "by_file": False, "varying": [], "elsewhere": [], "left_out": [], "encrypted": False,
            "headers": ["0" * 32], "files": [[0, "file.ckpt", len(proto()), 0, "0" * 32]],
        }  # fmt: skip
        target = {
            "strategy": None, "stage": None, "format": "ckpt", "remove_redundancy": False, "encryption": None,
            "index": None,
        }  # fmt: skip
        selection: dict[str, Any] = {key: [] for key in ("include", "exclude", "drop", "allow_missing")}
        selection |= {"weights_only": False, "names": {}, "cast": {}, "rules": None, "lora": None}
        plan = {
            "reshard_plan": 4, "digest": "0" * 32,
            "provenance": {
                "made_by": "0.1.0", "source": known | source, "target": target, "selection": selection,
            },
            "warnings": warnings, "looked": None, "arrangement": pattern, "files": {"to": way[0], "fields": way[1]},
            "ranks": None, "memory": None, "directory": None,
        }  # fmt: skip
        path.write_text(json.dumps(plan))

    return make


def sums(path: str, file: str = '{"nbytes": 21, "crc32c": "00000000"}') -> bytes:
    """A manifest of one file, which is said to be so."""
    return f'{{"reshard_manifest": 2, "files": {{{json.dumps(path)}: {file}}}}}'.encode()


def fifo(path: Path) -> None:
    os.mkfifo(path)


def link(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def unreadable(path: Path) -> None:
    path.write_bytes(proto())
    path.chmod(0)


def sparse(content: bytes, size: int) -> Callable[[Path], None]:
    """A file of that size, which begins so and takes no space."""

    def make(path: Path) -> None:
        path.write_bytes(content)
        os.truncate(path, size)

    return make


def repeated(head: bytes, piece: bytes, count: int, tail: bytes = b"") -> Callable[[Path], None]:
    """A file of many equal pieces, made where it is needed."""
    return lambda path: path.write_bytes(head + piece * count + tail) and None


def tree(files: dict[str, bytes | Callable[[Path], None]]) -> Callable[[Path], None]:
    """A directory of files, by their paths below it."""

    def make(path: Path) -> None:
        path.mkdir()
        for name, content in files.items():
            file = path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                file.write_bytes(content)
            else:
                content(file)

    return make
