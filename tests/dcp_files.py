"""Writes distributed checkpoints by Python's own pickler, with classes of the names that other programs have."""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from checkpoints import dtype_name, write_file
from numcodecs import zstd

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from checkpoints import Array

OLD, NEW = "hyper_parallel.core.checkpoint", "hyper_parallel.core.distributed_checkpoint"
TORCH = "torch.distributed.checkpoint"
STORAGES = {"float32": "FloatStorage", "int64": "LongStorage", "float64": "DoubleStorage", "complex128": "X"}
METADATA = [
    "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "BytesStorageMetadata",
    "MetadataIndex",
]  # fmt: skip
OF_TORCH = {
    "torch": [*STORAGES.values(), "Size", "float32", "int64", "float64"],
    "torch._utils": ["_rebuild_tensor_v2", "_rebuild_parameter", "_rebuild_from_type_v2"],
    f"{TORCH}.metadata": METADATA,
    f"{TORCH}.filesystem": ["_StorageInfo"],
}

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and extents."""


@contextmanager
def classes(names: Mapping[str, Iterable[str]]) -> Iterator[Any]:
    """Empty classes by these names, in modules that can be imported for the time being."""
    found = ModuleType("found")
    parts = [module.split(".") for module in names]
    modules = dict.fromkeys(".".join(each[:depth]) for each in parts for depth in range(1, len(each) + 1))
    before = {module: sys.modules.pop(module) for module in modules if module in sys.modules}
    for module in modules:
        made = sys.modules[module] = ModuleType(module)
        for name in names.get(module, ()):
            made.__dict__[name] = type(name, (), {"__module__": module})
            setattr(found, name, made.__dict__[name])
    try:
        yield found
    finally:
        for module in modules:
            del sys.modules[module]
        sys.modules.update(before)


def filled(kind: type, **state: object) -> Any:
    """An object with these attributes."""
    made = kind()
    made.__dict__.update(state)
    return made


def metadata(
    tensors: Mapping[str, Array],
    boxes: Mapping[str, Iterable[Box]],
    places: Iterable[tuple[str, tuple[int, ...], str, str | None]],
    objects: Iterable[str] = (),
    *,
    package: str = NEW,
) -> bytes:
    """The pickled metadata.

    Args:
        tensors: whole ones.
        boxes: of each tensor.
        places: name, offsets, file and key of each box in a file.
        objects: names of pickled objects.
        package: which generation.
    """
    with classes({f"{package}.metadata": METADATA, f"{package}.storage": ["StorageInfo"]}) as kinds:
        listed: dict[str, Any] = {name: kinds.BytesStorageMetadata() for name in objects}
        for name, some in boxes.items():
            dtype = f"torch.{dtype_name(tensors[name])}" if package == NEW else dtype_name(tensors[name]).title()
            listed[name] = filled(
                kinds.TensorStorageMetadata,
                properties=filled(kinds.TensorProperties, dtype=dtype, requires_grad=False, memory_format=None),
                size=tensors[name].shape,
                chunks=[filled(kinds.ChunkStorageMetadata, offsets=at, sizes=extents) for at, extents in some],
            )
        stored = {}
        for name, offsets, file, key in places:
            index = filled(kinds.MetadataIndex, fqn=name, offset=offsets, index=len(stored))
            more = {"tensor_key": key} if package == NEW else {}
            stored[index] = filled(kinds.StorageInfo, relative_path=file, offset=0, length=-1, **more)
        for name in objects:
            index = filled(kinds.MetadataIndex, fqn=name, offset=None, index=None)
            stored[index] = filled(kinds.StorageInfo, relative_path="_rank0_.bytes", offset=0, length=1)
        return pickle.dumps(
            filled(
                kinds.Metadata,
                state_dict_metadata=listed, planner_data=None, storage_data=stored, version="2.0",
            )
        )  # fmt: skip


def cut(array: Array, box: Box) -> Array:
    """The part of an array that is in a box."""
    return array[tuple(slice(begin, begin + extent) for begin, extent in zip(*box, strict=True))]


def write_hyper(
    root: Path,
    tensors: Mapping[str, Array],
    boxes: Mapping[int, Mapping[str, list[Box]]],
    *,
    objects: Iterable[str] = (),
    by_rank: bool = False,
    package: str = NEW,
) -> Path:
    """Write a checkpoint: by rank, the boxes that its file has of each tensor.

    Of a name with several boxes in a file, each is under a key of its own, as hyper-parallel calls it.
    """
    root.mkdir(parents=True, exist_ok=True)
    parts: list[tuple[dict[str, list[Box]], list[tuple[str, tuple[int, ...], str, str | None]]]] = []
    for rank, of_rank in boxes.items():
        file, content = f"_rank{rank}_.safetensors", {}
        listed, places = {}, []
        for name, some in of_rank.items():
            listed[name] = list(some)
            for number, box in enumerate(some):
                key = f"{name}.__dcp_chunk_{number}" if len(some) > 1 else name
                content[key] = cut(tensors[name], box)
                places.append((name, box[0], file, key if len(some) > 1 else None))
        write_file(root / file, content)
        parts.append((listed, places))
    if by_rank:
        for rank, (listed, places) in zip(boxes, parts, strict=True):
            name = f"{rank}.metadata" if package == NEW else f".rank{rank}_metadata"
            (root / name).write_bytes(metadata(tensors, listed, places, objects, package=package))
        return root
    joined: dict[str, list[Box]] = {}
    for listed, _ in parts:
        for name, some in listed.items():
            joined[name] = [*joined.get(name, []), *some]
    every = [place for _, places in parts for place in places]
    (root / ".metadata").write_bytes(metadata(tensors, joined, every, objects, package=package))
    return root


# --- PyTorch's ---


class _Made:
    """Pickled as a call of a function with arguments."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.made = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.made


class _Outside:
    """Pickled as a persistent id."""

    def __init__(self, *number: object) -> None:
        self.number = number


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: object) -> object:
        return value.number if isinstance(value, _Outside) else None


def item(
    array: Array,
    *,
    strides: tuple[int, ...] | None = None,
    first: int = 0,
    storage: Array | None = None,
    wrapped: str = "",
    order: str = "little",
    align: int = 64,
    key: str = "0",
    more: tuple[Any, ...] = (),
) -> bytes:
    """What `torch.save` makes of a tensor, by Python's zip writer.

    Args:
        array: the tensor.
        strides: in elements, where it is not contiguous.
        first: the element of the storage that it begins with.
        storage: what it lies in, by default its own bytes.
        wrapped: a function that makes it of the tensor.
        order: of bytes, as it is said.
        align: where the bytes begin is a multiple of this.
        key: of the storage.
        more: arguments behind the others.
    """
    storage = np.ascontiguousarray(array).reshape(-1) if storage is None else storage
    steps = tuple(int(np.prod(array.shape[dim + 1 :], dtype=int)) for dim in range(array.ndim))
    with classes(OF_TORCH) as kinds:
        pid = _Outside("storage", getattr(kinds, STORAGES[array.dtype.name]), "0", "cpu", storage.size)
        shape = tuple(map(int, array.shape))
        arguments = (pid, first, shape, strides or steps, False, OrderedDict(), *more)
        made = _Made(kinds._rebuild_tensor_v2, *arguments)
        if wrapped == "_rebuild_parameter":
            made = _Made(kinds._rebuild_parameter, made, True, OrderedDict())
        elif wrapped:
            made = _Made(kinds._rebuild_from_type_v2, kinds._rebuild_tensor_v2, kinds.Size, arguments, {})
        pickled = io.BytesIO()
        _Pickler(pickled, 2).dump(made)
    found = io.BytesIO()
    with zipfile.ZipFile(found, "w") as archive:
        for name, content in (("data.pkl", pickled.getvalue()), ("byteorder", order.encode())):
            archive.writestr(f"archive/{name}", content)
        info = zipfile.ZipInfo(f"archive/data/{key}")
        gap = -(found.tell() + 30 + len(info.filename) + 4) % align
        info.extra = b"FB" + gap.to_bytes(2, "little") + b"Z" * gap
        archive.writestr(info, storage.tobytes())
        archive.writestr("archive/version", "3\n")
    return found.getvalue()


ZSTD = ["stream.zstd/1"]


def stream(content: bytes, *, checksum: bool = False) -> bytes:
    """A zstd stream that does not say how long it is."""
    found = zstd.compress(content, 1, checksum)
    flags = found[4]
    begin = 5 + (not flags >> 5 & 1) + ((flags >> 5 & 1, 2, 4, 8)[flags >> 6])
    return found[:4] + bytes([flags & 4, 0x78]) + found[begin:]


def zip_records(content: bytes) -> dict[str, bytes]:
    """The records of a zip, by Python's reader, without their sums; fields that PyTorch does not read are corrected."""
    entry = content.find(b"PK\1\2")
    corrected = bytearray(content)
    while entry >= 0:
        corrected[entry + 6 : entry + 8] = b"\x14\0"  # the version that is needed
        entry = content.find(b"PK\1\2", entry + 1)
    with zipfile.ZipFile(io.BytesIO(corrected)) as archive:
        records = {}
        for info in archive.infolist():
            name_bytes, extra_bytes = struct.unpack_from("<2H", content, info.header_offset + 26)
            begin = info.header_offset + 30 + name_bytes + extra_bytes
            records[info.filename] = content[begin : begin + info.file_size]
        return records


def record_places(content: bytes) -> list[int]:
    """The offsets of all bytes of a zip that are contents of records."""
    places: list[int] = []
    at = 0
    for record in zip_records(content).values():
        at = content.index(record, at)
        places += range(at, at + len(record))
    return places


def without_sums(content: bytes, *, behind: bool = False) -> bytes:
    """An item with every sum 0, as of `torch.serialization.set_crc32_options(False)`.

    Python's zip writer has sums in the headers of records, PyTorch's `behind` records.
    """
    found = bytearray(content)
    for mark, at in ((b"PK\7\10", 4) if behind else (b"PK\3\4", 14), (b"PK\1\2", 16)):
        place = found.find(mark)
        while place >= 0:
            found[place + at : place + at + 4] = bytes(4)
            place = found.find(mark, place + 1)
    return bytes(found)


def saved(value: object) -> bytes:
    """What `torch.save` makes of an object, by Python's pickler and zip writer."""
    found = io.BytesIO()
    with zipfile.ZipFile(found, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(value, 2))
        archive.writestr("archive/version", "3\n")
    return found.getvalue()


def write_torch(
    root: Path,
    tensors: Mapping[str, Array],
    items: Mapping[int, Iterable[tuple[str, Box, bytes]]],
    *,
    boxes: Mapping[str, list[Box]] | None = None,
    objects: Mapping[str, bytes] | None = None,
    apart: bool = False,
    **more: object,
) -> Path:
    """Write a checkpoint of PyTorch: of each rank the name, box and bytes of its items.

    Args:
        root: where.
        tensors: whole ones, of which the metadata say dtype and shape.
        items: what the files have.
        boxes: what the metadata list, where that is something else.
        objects: the bytes of objects, which the first file has behind its items.
        apart: each object has a file of its own.
        more: in the metadata, besides what is usual; `transform_descriptors` of every item, `coded` of objects.
    """
    root.mkdir(parents=True, exist_ok=True)
    every: dict[str, list[Box]] = {}
    places = []
    for rank, some in items.items():
        content = bytearray()
        for name, box, made in some:
            every.setdefault(name, []).append(box)
            places.append((name, box[0], f"__{rank}_0.distcp", len(content), len(made)))
            content += made
        (root / f"__{rank}_0.distcp").write_bytes(content)
    own = []
    for number, content in enumerate((objects or {}).values(), 1):
        path = root / f"__0_{number if apart else 0}.distcp"
        with path.open("ab") as file:
            own.append((path.name, file.tell(), file.write(content)))
    with classes(OF_TORCH) as kinds:
        listed = {}
        for name, some_boxes in (boxes or every).items():
            properties = kinds.TensorProperties()
            properties.__dict__["dtype"] = getattr(kinds, tensors[name].dtype.name)
            listed[name] = filled(
                kinds.TensorStorageMetadata,
                properties=properties,
                size=_Made(kinds.Size, tensors[name].shape),
                chunks=[
                    filled(kinds.ChunkStorageMetadata, offsets=_Made(kinds.Size, at), sizes=_Made(kinds.Size, extents))
                    for at, extents in some_boxes
                ],
            )
        listed |= {name: kinds.BytesStorageMetadata() for name in objects or {}}
        encoding = {key: more.pop(key) for key in ("transform_descriptors",) if key in more}
        stored = {
            filled(kinds.MetadataIndex, fqn=name, offset=_Made(kinds.Size, at), index=number): filled(
                kinds._StorageInfo, relative_path=file, offset=begin, length=nbytes, **encoding
            )
            for number, (name, at, file, begin, nbytes) in enumerate(places)
        }  # fmt: skip
        coded: dict[str, Any] = {"transform_descriptors": more.pop("coded")} if "coded" in more else {}
        for name, (path_name, begin, nbytes) in zip(objects or (), own, strict=True):
            place = filled(kinds._StorageInfo, relative_path=path_name, offset=begin, length=nbytes, **coded)
            stored[filled(kinds.MetadataIndex, fqn=name, offset=None, index=None)] = place
        pickled = pickle.dumps(
            filled(
                kinds.Metadata,
                state_dict_metadata=listed,
                planner_data=more.pop("planner_data", {}),
                storage_data=stored,
                version="1.0.0",
                **more,
            )
        )
    (root / ".metadata").write_bytes(pickled)
    return root
