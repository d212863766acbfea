"""Oracles and readers that know nothing of `reshard`: what its results are compared with."""

from __future__ import annotations

import itertools
import json
import tarfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from reshard.strategy.proto import message_class  # the message description alone; the bytes are parsed by protobuf

DATA = Path(__file__).parent / "data"
ARCHIVES = sorted(DATA.glob("*.tar.xz"))

Array = np.ndarray[Any, np.dtype[Any]]

MINDSPORE_NAMES = {
    "Int4": "int4", "Int8": "int8", "UInt8": "uint8", "Int16": "int16", "UInt16": "uint16", "Int32": "int32",
    "UInt32": "uint32", "Int64": "int64", "UInt64": "uint64", "Float16": "float16", "Float32": "float32",
    "Float64": "float64", "BFloat16": "bfloat16", "Bool": "bool", "str": "str",
}  # fmt: skip
SAFETENSORS_NAMES = {
    "I8": "int8", "U8": "uint8", "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32",
    "I64": "int64", "U64": "uint64", "F16": "float16", "F32": "float32", "F64": "float64", "BF16": "bfloat16",
    "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "C64": "complex64",
}  # fmt: skip


def unpack(target: Path) -> Path:
    """Unpack the archives of `tests/data` and return where they are."""
    for archive in ARCHIVES:
        with tarfile.open(archive, "r:xz") as tar:
            extract_all(tar, target)
    return target


def extract_all(archive: tarfile.TarFile, folder: Path) -> None:
    """Extract an archive of ours, with the filter that Python 3.11.4 brought, and without it before."""
    options: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    archive.extractall(folder, **options)  # noqa: S202 -- it is ours


@lru_cache
def packed_files(folder: str) -> tuple[str, ...]:
    """The paths of the files in one archive (`cases`, `strategies`, …), for parametrizing tests by them."""
    with tarfile.open(DATA / f"{folder}.tar.xz", "r:xz") as tar:
        return tuple(tar.getnames())


def case_names() -> list[str]:
    """The recorded cases, `basic_1` and so on."""
    return sorted({name.split("/")[1] for name in packed_files("cases")})


def load_meta(case_dir: Path) -> dict[str, Any]:
    """What is recorded about a case."""
    meta: dict[str, Any] = json.loads((case_dir / "meta.json").read_text())
    return meta


def load_full(case_dir: Path) -> dict[str, Array]:
    """The whole tensors of a case (or of a run in `real`); bfloat16 comes as its uint16 bits."""
    with np.load(case_dir / "full.npz", allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def read_rank_file(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """What a rank file holds, by protobuf or safetensors itself: each tensor's dtype, shape and bytes."""
    content = path.read_bytes()
    if content[8:9] == b"{":
        notes = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]).get("__metadata__", {})
        return {
            name: (
                "int4" if notes.get(name) == "Int4" else SAFETENSORS_NAMES[item["dtype"]],
                tuple(item["shape"]),
                bytes(item["data"]),
            )
            for name, item in safetensors.deserialize(content)
        }
    if content[-17:-10] == b"crc_num":
        content = content[:-17]
    message: Any = message_class("Checkpoint")()
    message.ParseFromString(content)
    found: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for value in message.value:
        before = found[value.tag][2] if value.tag in found else b""
        tensor = value.tensor
        found[value.tag] = (
            MINDSPORE_NAMES[tensor.tensor_type],
            tuple(tensor.dims),
            before + tensor.tensor_content,
        )
    return found


def slices(layout: dict[str, Any], shape: tuple[int, ...], rank: int) -> tuple[slice, ...]:
    """Where a rank of one stage finds its block: DESIGN section 2 in numbers, one dimension after the other.

    Blocks are cut again and again, axis by axis, and the devices that share a block are counted off by
    looking at all of them, so that no step is the one that `reshard.core.layout` takes.
    """
    extents = layout["dev_matrix"]
    everyone = list(itertools.product(*(range(extent) for extent in extents)))
    mine = everyone[rank]
    found = []
    for size, entry in zip(shape, layout["tensor_map"], strict=True):
        low, high = 0, size
        for value in entry if isinstance(entry, list | tuple) else [entry]:
            if value >= 0:
                axis = len(extents) - 1 - value
                step = (high - low) // extents[axis]
                assert step * extents[axis] == high - low, "the oracle is given only what divides"
                low, high = low + mine[axis] * step, low + (mine[axis] + 1) * step
        found.append((low, high))
    pieces = layout["opt_weight_shard_size"]
    if pieces:
        flat = np.hstack([np.ravel(entry) for entry in layout["tensor_map"]]) if layout["tensor_map"] else []
        used = [len(extents) - 1 - int(value) for value in flat if value >= 0]
        sharing = [other for other in everyone if all(other[axis] == mine[axis] for axis in used)]
        pieces = len(sharing) if pieces == -1 else pieces
        low, high = found[0]
        assert (high - low) % pieces == 0, "the oracle is given only what divides"
        step = (high - low) // pieces
        low += sharing.index(mine) % pieces * step
        found[0] = (low, low + step)
    return tuple(slice(low, high) for low, high in found)


def expected_blocks(full: dict[str, Array], side: dict[str, Any], rank: int) -> dict[str, Array]:
    """The block of every listed tensor that a global rank holds.

    Args:
        full: the whole tensors.
        side: `meta["src"]` or `meta["dst"]`: devices (of all stages together), stages, layouts.
        rank: the global rank.
    """
    if side["layouts"] is None:
        return dict(full)
    per_stage = side["devices"] // side["stages"]
    stage, local = divmod(rank, per_stage)
    return {
        name: full[name][slices(layout, full[name].shape, local)]
        for name, layout in side["layouts"].items()
        if stage in layout["stages"] and name in full  # a strategy may name what no file has
    }


def expanded(
    dev_matrix: tuple[int, ...], tensor_map: tuple[tuple[int, ...], ...], shape: tuple[int, ...]
) -> tuple[list[int], tuple[int, ...]]:
    """A nested map as MindSpore's JSON has it: all axes of an entry but the last are dimensions."""
    flat: list[int] = []
    sizes: list[int] = []
    for axes, size in zip(tensor_map, shape, strict=True):
        rest = size
        for value in axes[:-1]:
            extent = dev_matrix[-1 - value]
            flat.append(value)
            sizes.append(extent)
            rest //= extent
        flat.append(axes[-1] if axes else -1)
        sizes.append(rest)
    return flat, tuple(sizes)


def library_safetensors(
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]], metadata: dict[str, str] | None = None
) -> bytes:
    """What the safetensors library writes for tensors given as (dtype name, shape, bytes)."""
    if hasattr(safetensors, "TensorSpec"):  # since 0.8; it takes addresses
        buffers = {name: np.frombuffer(content, np.uint8) for name, (_, _, content) in tensors.items()}
        specs = {
            name: safetensors.TensorSpec(
                dtype=dtype, shape=list(shape), data_ptr=buffers[name].ctypes.data, data_len=len(content)
            )
            for name, (dtype, shape, content) in tensors.items()
        }
    else:
        specs = {
            name: {"dtype": dtype, "shape": list(shape), "data": content}
            for name, (dtype, shape, content) in tensors.items()
        }
    return bytes(safetensors.serialize(specs, metadata))
