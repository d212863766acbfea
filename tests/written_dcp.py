"""Reads PyTorch's distributed checkpoints for tests: by Python's pickle with classes that do nothing, and zipfile."""

from __future__ import annotations

import io
import pickle
import zipfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from format_files import saved, st_file

import reshard
from reshard.dtypes import BY_NAME

if TYPE_CHECKING:
    from pathlib import Path

    from helpers import Array


class Inert:
    """What a class or a function of another program is read as."""

    name = ""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: object) -> None:
        self.state = state


class Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return type(name, (Inert,), {"name": f"{module}.{name}"})

    def persistent_load(self, pid: Any) -> Any:
        return pid


def simple(value: Any) -> Any:
    """What an unpickled value consists of, with nothing of other programs."""
    if isinstance(value, type):
        return value.name  # type: ignore[attr-defined]
    if isinstance(value, Inert):
        arguments = getattr(value, "arguments", ())
        return (value.name, *map(simple, arguments), *([simple(value.state)] if getattr(value, "state", None) else []))
    if isinstance(value, dict):
        return [(simple(key), simple(item)) for key, item in value.items()]
    return type(value)(map(simple, value)) if isinstance(value, (list, tuple)) else value


def unpickled(content: bytes) -> Any:
    return simple(Reader(io.BytesIO(content)).load())


@dataclass
class Tensor:
    """A tensor as `.metadata` describes it: its dtype, its shape, and its chunks (offsets, sizes), with their items."""

    dtype: str
    shape: tuple[int, ...]
    chunks: list[tuple[tuple[int, ...], tuple[int, ...]]]
    items: dict[tuple[int, ...], bytes] = field(default_factory=dict)


@dataclass
class Dcp:
    """A checkpoint: its tensors, its objects, and the names of its files with the ranges of their items."""

    tensors: dict[str, Tensor]
    objects: dict[str, Any]
    planner_data: dict[str, tuple[str | int, ...]]
    ranges: dict[str, list[tuple[int, int]]]
    state: dict[str, Any]

    def whole(self) -> dict[str, Array]:
        """Put every tensor together, as bits."""
        found = {}
        for name, tensor in self.tensors.items():
            kind = tensor.dtype.removeprefix("torch.")
            itemsize = np.dtype(getattr(ml_dtypes, kind, kind)).itemsize
            array = np.full((*tensor.shape, itemsize), 0xA5, np.uint8)
            for offsets, sizes in tensor.chunks:
                part = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
                array[part] = np.frombuffer(contents(tensor.items[offsets]), np.uint8).reshape(*sizes, itemsize)
            found[name] = array
        return found


def contents(item: bytes) -> bytes:
    """The bytes of a tensor; every CRC is checked."""
    with zipfile.ZipFile(io.BytesIO(item)) as archive:
        assert archive.testzip() is None
        for info in archive.infolist():  # each begins at a multiple of 64 bytes; its sum stands behind it, too
            lengths = (item[at : at + 2] for at in (info.header_offset + 26, info.header_offset + 28))
            begin = info.header_offset + 30 + sum(int.from_bytes(length, "little") for length in lengths)
            assert begin % 64 == 0
            if info.file_size:
                described = item[begin + info.file_size :][:8]
                assert described == b"PK\7\10" + info.CRC.to_bytes(4, "little")
        return archive.read("archive/data/0")


def read(directory: Path) -> Dcp:
    """Read a checkpoint whole; its tensors' chunks must be those of its items."""
    kind, state = unpickled((directory / ".metadata").read_bytes())
    assert kind == "torch.distributed.checkpoint.metadata.Metadata"
    top = dict(state)
    found = Dcp({}, {}, dict(top["planner_data"] or ()), {}, top)
    for name, described in top["state_dict_metadata"]:
        if described[0].endswith("TensorStorageMetadata"):
            about = dict(described[1])
            chunks = [(dict(chunk[1])["offsets"][1], dict(chunk[1])["sizes"][1]) for chunk in about["chunks"]]
            found.tensors[name] = Tensor(about["properties"][1][0], about["size"][1], chunks)
    for index, info in top["storage_data"]:
        key, at = dict(index[1]), dict(info[1])
        begin, end = at["offset"], at["offset"] + at["length"]
        item = (directory / at["relative_path"]).read_bytes()[begin:end]
        found.ranges.setdefault(at["relative_path"], []).append((begin, end))
        if key["fqn"] in found.tensors:
            found.tensors[key["fqn"]].items[key["offset"][1]] = item
        else:
            with zipfile.ZipFile(io.BytesIO(item)) as archive:
                assert archive.testzip() is None
                found.objects[key["fqn"]] = unpickled(archive.read("archive/data.pkl"))
    for tensor in found.tensors.values():
        assert {offsets for offsets, _ in tensor.chunks} == set(tensor.items)
    for path, ranges in found.ranges.items():  # back to back
        ends = [0, *(end for _, end in sorted(ranges))]
        assert [begin for begin, _ in sorted(ranges)] == ends[:-1]
        assert (directory / path).stat().st_size == ends[-1]
    return found


def bits(arrays: dict[str, Array]) -> dict[str, Array]:
    """Arrays as `Dcp.whole` has them."""
    return {
        name: np.frombuffer(array.tobytes(), np.uint8).reshape(*array.shape, array.itemsize)
        for name, array in arrays.items()
    }


def assert_whole(directory: Path, full: dict[str, Array]) -> Dcp:
    """Check that a checkpoint has these tensors and no others, bit by bit; return it."""
    found = read(directory)
    whole = found.whole()
    assert whole.keys() == full.keys()
    for name, array in bits(full).items():
        np.testing.assert_array_equal(whole[name], array, err_msg=name)
        assert found.tensors[name].dtype == f"torch.{full[name].dtype.name}"
    return found


def every_dtype(tmp_path: Path) -> tuple[reshard.Checkpoint, dict[str, Array]]:
    """A file with a tensor of each dtype that safetensors and PyTorch have, a 0-dim one and an empty one."""
    full: dict[str, Array] = {}
    for dtype in BY_NAME.values():
        if dtype.safetensors and dtype.name not in {"int4", "bool"}:
            full[dtype.name] = np.arange(6 * dtype.itemsize, dtype=np.uint8).view(dtype.numpy()).reshape(2, 3)
    full |= {
        "bool": np.array([True, False]),
        "scalar": np.array(2.5, np.float32),
        "empty": np.zeros((0, 4), np.float16),
    }
    header: dict[str, Any] = {}
    for name, array in full.items():
        begin = sum(full[before].nbytes for before in header)
        kind = BY_NAME[array.dtype.name].safetensors
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [begin, begin + array.nbytes]}
    file = saved(tmp_path, st_file(header, b"".join(array.tobytes() for array in full.values())), "a.safetensors")
    return reshard.open(file), full
