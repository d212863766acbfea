"""Writes hyper-parallel's distributed checkpoints by Python's own pickler, with classes of the names that it has."""

from __future__ import annotations

import pickle
import sys
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from checkpoints import dtype_name, write_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from checkpoints import Array

OLD, NEW = "hyper_parallel.core.checkpoint", "hyper_parallel.core.distributed_checkpoint"
NAMES = {
    "metadata": [
        "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "BytesStorageMetadata",
        "MetadataIndex",
    ],
    "storage": ["StorageInfo"],
}  # fmt: skip

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and extents."""


@contextmanager
def classes(package: str = NEW) -> Iterator[Any]:
    """Empty classes by these names, in modules that can be imported for the time being."""
    found = ModuleType("found")
    parts = package.split(".")
    above = {".".join(parts[: number + 1]): ModuleType(part) for number, part in enumerate(parts)}
    sys.modules.update(above)
    for module, names in NAMES.items():
        made = sys.modules[f"{package}.{module}"] = ModuleType(module)
        for name in names:
            made.__dict__[name] = type(name, (), {"__module__": f"{package}.{module}"})
            setattr(found, name, made.__dict__[name])
    try:
        yield found
    finally:
        for module in [*above, *(f"{package}.{module}" for module in NAMES)]:
            del sys.modules[module]


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
    with classes(package) as kinds:
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
