"""The files of `torch.save`: a zip of stored records, a pickle and the storages of tensors.

The contents of a record begin at a multiple of 64 bytes of the zip; its checksum and size are in a descriptor behind
them and in the central directory. The checksum of a tensor's bytes is known only after they are written, so it is
filled in last. For a file of one tensor, all other bytes depend on dtype and shape alone, and are shared by similar
tensors. There is no `.data/serialization_id`, which identifies files by their checksums, and which PyTorch does not
need.

Source: PyTorch 2.13 `caffe2/serialize/inline_container.cc` and its miniz, `torch/serialization.py`, `torch/_utils.py`;
the bytes before the contents are those of real files.
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from itertools import groupby
from math import prod
from struct import pack
from typing import TYPE_CHECKING, NamedTuple

from reshard.core.layout.axes import row_major
from reshard.core.model.entries import Crc
from reshard.errors import UsageError
from reshard.kits.torch.archive import LARGE, ending
from reshard.kits.torch.pickles import Name, PickledObject
from reshard.kits.torch.pickling import pickled
from reshard.kits.torch.tensors import STORAGES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.core.layout.block import Shape
    from reshard.dtypes import DType

_STORAGES = {dtype: storage for storage, dtype in STORAGES.items()}
_UNTYPED = {
    "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "float8_e8m0fnu", "float4_e2m1fn_x2",
}  # fmt: skip

_ALIGNMENT = 64
_LARGE_LITERAL = 64 << 10
_UTF8, _DESCRIBED = 0x800, 8  # flags: names are UTF-8; a descriptor follows the contents


class Saved(NamedTuple):
    """A zip without the contents of its tensors.

    Attributes:
        nbytes: the size of the zip.
        literals: all bytes but those of tensors and their checksums, with their offsets.
        data: the offset and number of the bytes of each tensor that has any.
        crcs: the checksums of these bytes.
    """

    nbytes: int
    literals: tuple[tuple[int, bytes], ...]
    data: tuple[tuple[int, int], ...] = ()
    crcs: tuple[Crc, ...] = ()


def torch_dtype(name: str, dtype: DType) -> Name:
    """Return PyTorch's name of a dtype.

    Raises:
        UsageError: PyTorch has no such dtype; the message names the tensor.
    """
    if dtype.name not in _UNTYPED and dtype.name not in _STORAGES:
        raise UsageError(
            f"PyTorch has no dtype {dtype}, which tensor {name!r} has", code="unsupported-dtype",
            hint="leave it out" if dtype.bits else "cast the tensor, or leave it out",
        )  # fmt: skip
    return Name("torch", dtype.name)


@lru_cache(maxsize=4096)
def saved_tensor(dtype: DType, shape: Shape, entries: tuple[tuple[str, int], ...] = ()) -> Saved:
    """Return the zip of a tensor in row-major order, of a dtype that PyTorch has.

    Args:
        dtype: the dtype.
        shape: the shape.
        entries: with these, the tensor is in a dict, next to them, as `param`.
    """
    tensor = rebuilding(dtype, shape)
    value = {"param": tensor, **dict(entries)} if entries else tensor
    return saved_storages(pickled(value), {"0": prod(shape) * dtype.itemsize})


def rebuilding(dtype: DType, shape: Shape, key: str = "0") -> PickledObject:
    """Return the call that makes a tensor of the storage with a key."""
    numel = prod(shape)
    strides = row_major(tuple(max(extent, 1) for extent in shape))
    is_untyped = dtype.name in _UNTYPED
    kind = Name("torch.storage", "UntypedStorage") if is_untyped else Name("torch", f"{_STORAGES[dtype.name]}Storage")
    nbytes_or_elements = numel * dtype.itemsize if is_untyped else numel
    storage = PickledObject(None, ("storage", kind, key, "cpu", nbytes_or_elements))
    hooks = PickledObject(Name("collections", "OrderedDict"), ())
    dtype_arguments = (Name("torch", dtype.name),) if is_untyped else ()
    function = Name("torch._utils", "_rebuild_tensor_v3" if is_untyped else "_rebuild_tensor_v2")
    return PickledObject(function, (storage, 0, shape, strides, False, hooks, *dtype_arguments))


@lru_cache(maxsize=64)
def saved_text(text: str) -> Saved:
    """Return the zip of a text."""
    return saved_storages(pickled(text), {})


def saved_object(value: object) -> bytes:
    """Return the zip of an object that has no tensors."""
    return b"".join(content for _, content in saved_storages(pickled(value), {}).literals)


Parts = list[bytes | int | None]
"""The parts of a zip in order: literal bytes, a number of a tensor's bytes, or None for the CRC-32 of these. The one in
the record is directly behind these bytes; those in the directory are in the same order."""


def saved_storages(pickle: bytes, storages: Mapping[str, bytes | int]) -> Saved:
    """Return the zip of a pickle and storages.

    Args:
        pickle: the pickle.
        storages: by key, the bytes of a storage, or their number if they are written later.
    """
    records: list[tuple[str, bytes | int]] = [
        ("data.pkl", pickle),
        (".format_version", b"1"),
        (".storage_alignment", b"%d" % _ALIGNMENT),
        ("byteorder", b"little"),
        *((f"data/{key}", content) for key, content in storages.items()),
        ("version", b"3\n"),
    ]
    parts: Parts = []
    directory: Parts = []
    begin = 0
    for name, content in records:
        record, entry = _record(name, content, begin)
        parts += record
        directory += entry
        begin += _size(record)
    return _saved([*parts, *directory, ending(len(records), begin, _size(directory))])


def _record(name: str, content: bytes | int, begin: int) -> tuple[Parts, Parts]:
    """Return the parts of a record, and of its entry in the central directory.

    Args:
        name: the name of the record.
        content: its contents, or the number of a tensor's bytes in it.
        begin: its offset in the zip.
    """
    nbytes = len(content) if isinstance(content, bytes) else content
    crc = pack("<I", zlib.crc32(content)) if isinstance(content, bytes) else None if content else bytes(4)
    path = f"archive/{name}".encode()
    large = [*([nbytes] * 2 if nbytes >= LARGE else []), *([begin] if begin >= LARGE else [])]
    zip64 = pack(f"<2H{len(large)}Q", 1, 8 * len(large), *large) if large else b""
    flags = _UTF8 | (_DESCRIBED if nbytes else 0)
    padding = -(begin + 30 + len(path) + len(zip64) + 4) % _ALIGNMENT
    header = pack("<4s5H3I2H", b"PK\3\4", 0, flags, 0, 0, 0, 0, 0, 0, len(path), len(zip64) + 4 + padding)
    parts: Parts = [header + path + zip64 + pack("<2sH", b"FB", padding) + b"Z" * padding]
    if nbytes:
        parts += [content, b"PK\7\10", crc, pack("<2Q" if large else "<2I", nbytes, nbytes)]
    small, offset = min(nbytes, LARGE), min(begin, LARGE)
    rest = pack("<2I5H2I", small, small, len(path), len(zip64), 0, 0, 0, 0, offset)
    return parts, [pack("<4s6H", b"PK\1\2", 0, 0, flags, 0, 0, 0), crc, rest + path + zip64]


def _size(parts: Parts) -> int:
    return sum(part if isinstance(part, int) else 4 if part is None else len(part) for part in parts)


def _saved(parts: Parts) -> Saved:
    """Return the zip with the offsets of its parts; short literals are joined, and large ones not copied."""
    literals: list[tuple[int, bytes]] = []
    data: list[tuple[int, int]] = []
    sums: list[int] = []
    position = 0
    for is_short, group in groupby(parts, lambda part: isinstance(part, bytes) and len(part) < _LARGE_LITERAL):
        short = b"".join(part for part in group if isinstance(part, bytes)) if is_short else b""
        for part in [short] if is_short else group:
            if part is None:
                sums.append(position)
            elif isinstance(part, int):
                data.append((position, part))
            else:
                literals.append((position, part))
            position += _size([part])
    half = len(sums) // 2
    places = zip(sums[:half], sums[half:], strict=True)
    crcs = tuple(Crc(*run, at) for run, at in zip(data, places, strict=True))
    return Saved(position, tuple(literals), tuple(data), crcs)
