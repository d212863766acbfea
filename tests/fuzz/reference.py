"""Models, layouts and files for the fuzzers, by small code of their own: DESIGN sections 2, 3 and 4 in numpy.

Nothing here is taken from the package but the descriptions of protobuf messages, so that what it does wrong is not
done wrong here in the same way. Tensors are bits: unsigned integers of the dtype's width.
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import lcm, prod
from typing import TYPE_CHECKING, Any, NamedTuple

import helpers
import ml_dtypes
import numpy as np
import safetensors
import strategy_files
import zarr

from reshard.strategy.proto import message_class  # the description of the message alone

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path
    from random import Random

Array = np.ndarray[Any, np.dtype[Any]]
Shape = tuple[int, ...]

CKPT = {name: kind for kind, name in helpers.MINDSPORE_NAMES.items()}
PREFIXES = ("adam_m", "moment1", "accu_grads")


def numpy_dtype(name: str) -> np.dtype[Any]:
    if name == "int4":
        return np.dtype(np.int8)
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def itemsize(name: str) -> int:
    return numpy_dtype(name).itemsize


class Held(NamedTuple):
    """A tensor, or what a file has of one."""

    dtype: str
    shape: Shape
    content: bytes

    @classmethod
    def of(cls, dtype: str, bits: Array) -> Held:
        return cls(dtype, bits.shape, np.ascontiguousarray(bits).tobytes())

    def bits(self) -> Array:
        return np.frombuffer(self.content, f"u{itemsize(self.dtype)}").reshape(self.shape)


class Read(NamedTuple):
    """What a file has: tensors, text entries, and the notes of safetensors."""

    tensors: dict[str, Held]
    texts: dict[str, str]
    notes: dict[str, str] = {}  # noqa: RUF012 -- a tuple has no default factory; nothing changes it


@dataclass(frozen=True)
class Cut:
    """A tensor's layout: device matrix, entries of the tensor map (none where not split), optimizer, uneven sizes."""

    matrix: Shape
    entries: tuple[Shape, ...]
    optimizer: int = 0
    uneven: Shape = ()

    @property
    def splits(self) -> list[int]:
        """In how many parts each dimension is cut."""
        last = len(self.matrix) - 1
        ways = [prod(self.matrix[last - value] for value in entry) for entry in self.entries]
        if self.optimizer and ways:
            ways[0] *= prod(self.matrix) // prod(ways) if self.optimizer == -1 else self.optimizer
        return ways

    def slices(self, shape: Shape, rank: int) -> tuple[slice, ...]:
        """Return where a rank of the stage finds its block."""
        if not shape:  # a scalar has nothing to cut, whatever a flipped bit says
            return ()
        side = {
            "dev_matrix": self.matrix,
            "tensor_map": [list(entry) or -1 for entry in self.entries],
            "opt_weight_shard_size": self.optimizer,
        }
        if not self.uneven:
            return helpers.slices(side, shape, rank)
        one = helpers.slices(side, (len(self.uneven), *shape[1:]), rank)  # as if every slice had one row
        place = one[0].start
        low = sum(self.uneven[:place])
        return (slice(low, low + self.uneven[place]), *one[1:])


@dataclass
class Side:
    """A strategy: for each tensor its cut in each stage that holds it."""

    stages: int
    devices: int
    cuts: dict[str, dict[int, Cut]] = field(default_factory=dict)
    form: str = "protobuf"

    @property
    def ranks(self) -> range:
        return range(self.stages * self.devices)

    def slices(self, name: str, shape: Shape, rank: int) -> tuple[slice, ...] | None:
        """Return where a rank finds its block of a listed tensor; None where its stage does not hold it."""
        stage, local = divmod(rank, self.devices)
        cut = self.cuts[name].get(stage)
        return None if cut is None else cut.slices(shape, local)

    def blocks(self, name: str, shape: Shape) -> dict[int, dict[tuple[tuple[int, int], ...], list[int]]]:
        """Return, for each stage, the distinct blocks and who holds each."""
        found: dict[int, dict[tuple[tuple[int, int], ...], list[int]]] = defaultdict(lambda: defaultdict(list))
        for rank in self.ranks:
            slices = self.slices(name, shape, rank)
            if slices is not None:
                found[rank // self.devices][tuple((s.start, s.stop) for s in slices)].append(rank)
        return found

    def write(self, path: Path, shapes: Mapping[str, Shape]) -> Path:
        """Write the strategy as its form says; return the file or directory."""
        if self.form == "directory":
            for rank in self.ranks:
                stage = rank // self.devices
                top = strategy_files.message()
                strategy_files.add_operator(top, f"MatMul_{stage}", stage)
                for name, cuts in self.cuts.items():
                    if stage in cuts:
                        _add(top, name, cuts[stage])
                strategy_files.saved(path / f"strategy_{rank}.ckpt", top)
            return path
        merged = self.stages > 1 or self.form.endswith("merged")
        listed = [
            (f"{stage}-{name}" if merged else name, name, cut)
            for name, cuts in self.cuts.items()
            for stage, cut in cuts.items()
        ]
        if self.form.startswith("json"):
            items = {}
            for full, name, cut in listed:
                flat, sizes = helpers.expanded(cut.matrix, cut.entries, shapes[name])
                items[full] = strategy_files.json_item(
                    dev_matrix=list(cut.matrix),
                    tensor_map=flat,
                    tensor_shape=list(sizes),
                    opt_weight_shard_size=cut.optimizer,
                )
            return strategy_files.saved(path.with_suffix(".json"), strategy_files.json_top(items))
        top = strategy_files.message()
        for full, _, cut in listed:
            _add(top, full, cut)
        return strategy_files.saved(path.with_suffix(".ckpt"), top)


def _add(top: Any, name: str, cut: Cut) -> None:
    nested = any(len(entry) > 1 for entry in cut.entries)
    parts = [list(entry) or [-1] for entry in cut.entries]
    if not nested:
        parts = [[value for part in parts for value in part]]
    elif len(parts) == 1:
        parts.append([])
    item = strategy_files.add_layout(top, name, list(cut.matrix), *parts, opt_weight_shard_size=cut.optimizer)
    item.parallel_layouts.param_split_shape[0].dim.extend(cut.uneven)


def some_cut(rng: Random, devices: int, ndim: int) -> Cut:
    """Return a random layout: entries flat or nested, axes in any order or unused, optimizer sharding or none."""
    matrix: list[int] = []
    rest = devices
    while rest > 1 and len(matrix) < 3:
        matrix.append(rng.choice([n for n in range(1, rest + 1) if rest % n == 0]))
        rest //= matrix[-1]
    matrix.append(rest)
    rng.shuffle(matrix)
    entries: list[list[int]] = [[] for _ in range(ndim)]
    used = []
    for value in rng.sample(range(len(matrix)), len(matrix)):
        place = rng.randrange(-1, ndim)
        if place >= 0 and (not entries[place] or rng.random() < 0.5):
            entries[place].append(value)
            used.append(matrix[len(matrix) - 1 - value])
    sharing = devices // prod(used)
    optimizer = 0
    if ndim and rng.random() < 0.4:
        optimizer = rng.choice([-1, *(n for n in range(1, sharing + 1) if sharing % n == 0)])
    return Cut(tuple(matrix), tuple(map(tuple, entries)), optimizer)


def with_uneven(rng: Random, cut: Cut, rows: int) -> Cut:
    """Return a layout whose slices of dimension 0 have random sizes, some maybe none."""
    edges = sorted(rng.randint(0, rows) for _ in range(cut.splits[0] - 1))
    return replace(cut, uneven=tuple(b - a for a, b in zip([0, *edges], [*edges, rows], strict=True)))


@dataclass
class Tensor:
    """A tensor of a model.

    Attributes:
        name: in the source.
        dtype: of the elements.
        bits: the whole tensor; of a text entry, none.
        text: of a text entry.
        weight: the weight whose optimizer state it is.
        own: the values of the ranks, where each rank has one of its own.
    """

    name: str
    dtype: str
    bits: Array
    text: str | None = None
    weight: str | None = None
    own: dict[int, Array] = field(default_factory=dict)

    @property
    def shape(self) -> Shape:
        return self.bits.shape

    def held(self, slices: tuple[slice, ...] = ()) -> Held:
        return Held.of(self.dtype, self.bits[slices])


WEIGHTS = (
    "net.layer1.weight", "net.layer1.bias", "net.layer2.weight", "embed/ω", "head.gamma", "layers.0-1.wq",
    "a b", "x" * 60,
)  # fmt: skip


def some_names(rng: Random, most: int) -> list[tuple[str, str | None]]:
    """Return names of weights, each followed by those of its optimizer states; with the weight of each state."""
    prefixes = rng.sample(PREFIXES, rng.randint(0, 2))
    found: list[tuple[str, str | None]] = []
    for weight in rng.sample(WEIGHTS, rng.randint(1, most)):
        found.append((weight, None))
        found += [(f"{prefix}.{weight}", weight) for prefix in prefixes]
    return found


def some_bits(rng: Random, dtype: str, shape: Shape) -> Array:
    """Return random bits; of bool, what is one."""
    raw = rng.randbytes(prod(shape) * itemsize(dtype))
    if dtype == "bool":
        raw = bytes(byte & 1 for byte in raw)
    return np.frombuffer(raw, f"u{itemsize(dtype)}").reshape(shape)


def some_stages(rng: Random, side: Side) -> set[int]:
    """Return which stages hold a tensor."""
    return set(rng.sample(range(side.stages), min(side.stages, rng.choice([1, 1, 1, 2]))))


def looks_whole(bits: Array, side: Side, name: str) -> bool:
    """Return whether all distinct blocks are equal and not constant, which is what whole tensors look like."""
    blocks = next(iter(side.blocks(name, bits.shape).values()))
    parts = [bits[tuple(slice(*edge) for edge in block)] for block in blocks]
    alike = len(parts) > 1 and len({(part.shape, part.tobytes()) for part in parts}) == 1
    return alike and len(np.unique(parts[0])) > 1


def fitting(rng: Random, cuts: Iterable[Cut], ndim: int, *, empty: bool) -> Shape:
    """Return a shape that every one of some layouts divides."""
    ways = [cut.splits for cut in cuts]
    shape = [lcm(*(some[dim] for some in ways)) * rng.randint(1, 3) for dim in range(ndim)]
    if ndim and empty and rng.random() < 0.04:
        shape[rng.randrange(ndim)] = 0
    return tuple(shape)


def ckpt_bytes(entries: Mapping[str, Held | str], rng: Random) -> bytes:
    """Write a `.ckpt` file as MindSpore does, now and then in the ways that older or asynchronous saves have."""
    message: Any = message_class("Checkpoint")()
    for name, held in entries.items():
        if isinstance(held, str):
            kind, shape, content = "str", (0,), (held or "\0").encode("utf-32-le")
        else:
            kind, shape, content = CKPT[held.dtype], held.shape, held.content
        if shape == () and rng.random() < 0.2:
            shape = (0,)  # a scalar of an older file
        edges = [0, len(content)]
        if len(content) > 1 and rng.random() < 0.1:
            edges.insert(1, rng.randrange(1, len(content)))  # as of a large tensor
        for begin, end in pairwise(edges):
            tensor = message.value.add(tag=name).tensor
            tensor.tensor_type, tensor.tensor_content = kind, content[begin:end]
            tensor.dims.extend(shape)
    found: bytes = message.SerializeToString()
    if found and rng.random() < 0.1:
        found += b"crc_num" + zlib.crc32(found).to_bytes(10, "big")
    return found


def safetensors_bytes(entries: Mapping[str, Held | str], notes: Mapping[str, str]) -> bytes:
    """Write a safetensors file by its own library."""
    texts = {name: held for name, held in entries.items() if isinstance(held, str)}
    tensors = {name: held for name, held in entries.items() if not isinstance(held, str)}
    every = {**notes, **{name: "Int4" for name, held in tensors.items() if held.dtype == "int4"}}
    if texts:
        every["reshard.str"] = json.dumps(texts)
    named = {
        name: ("int8" if held.dtype == "int4" else held.dtype, held.shape, held.content)
        for name, held in tensors.items()
    }
    return helpers.library_safetensors(named, every or None)


def read_file(path: Path) -> Read:
    """Read a checkpoint file, by the libraries of safetensors and protobuf."""
    return read_bytes(path.read_bytes())


def read_bytes(content: bytes) -> Read:
    if content[8:9] != b"{":
        return _read_ckpt(content)
    size = int.from_bytes(content[:8], "little")
    notes = json.loads(content[8 : 8 + size]).get("__metadata__", {})
    tensors = {}
    for name, item in safetensors.deserialize(content):
        dtype = "int4" if notes.get(name) == "Int4" else helpers.SAFETENSORS_NAMES[item["dtype"]]
        tensors[name] = Held(dtype, tuple(item["shape"]), bytes(item["data"]))
    return Read(tensors, json.loads(notes.get("reshard.str", "{}")), notes)


def _read_ckpt(content: bytes) -> Read:
    if content[-17:-10] == b"crc_num":
        require_format(int.from_bytes(content[-10:], "big") == zlib.crc32(content[:-17]), "CRC-32")
        content = content[:-17]
    message: Any = message_class("Checkpoint")()
    message.ParseFromString(content)
    parts: dict[str, Held] = {}
    for value in message.value:
        tensor = value.tensor
        before = parts[value.tag].content if value.tag in parts else b""
        kind = helpers.MINDSPORE_NAMES[tensor.tensor_type]
        parts[value.tag] = Held(kind, tuple(tensor.dims), before + tensor.tensor_content)
    tensors, texts = {}, {}
    for name, held in parts.items():
        if held.dtype == "str":
            texts[name] = held.content.decode("utf-32-le").rstrip("\0")  # numpy pads text so, and has none of no length
            continue
        scalar = held.shape == (0,) and len(held.content) == itemsize(held.dtype)
        shape = () if scalar else held.shape
        require_format(prod(shape) * itemsize(held.dtype) == len(held.content), "size")
        tensors[name] = held._replace(shape=shape)
    return Read(tensors, texts)


def require_format(sound: bool, what: str) -> None:
    if not sound:
        raise ValueError(f"{what} of a file is not valid")


def read_store(path: Path) -> Read:
    """Read a zarr store, by zarr itself."""
    group = zarr.open_group(path, mode="r")
    tensors = {}
    for key in group:
        array = group[key]
        about = array.attrs.get("reshard", {})
        found = np.asarray(array[...])
        dtype = about.get("dtype", found.dtype.name)
        tensors[about.get("name", key)] = Held.of(
            dtype, found.view(f"u{found.dtype.itemsize}") if found.ndim else found
        )
    return Read(tensors, dict(group.attrs.get("reshard", {}).get("texts", {})))


def read_set(root: Path) -> tuple[Read, dict[str, str], dict[str, Read]]:
    """Read a unified set: all tensors, what the index says, and each file."""
    (index,) = [path for path in root.iterdir() if path.suffix == ".json"]
    weight_map = json.loads(index.read_text())["weight_map"]
    files = {path.name: read_file(path) for path in sorted(root.glob("*.safetensors"))}
    tensors: dict[str, Held] = {}
    texts: dict[str, str] = {}
    for found in files.values():
        require_format(not tensors.keys() & found.tensors.keys(), "a tensor of two files")
        tensors.update(found.tensors)
        texts.update(found.texts)
    return Read(tensors, texts), weight_map, files


def cast_bits(old: str, new: str, bits: Array) -> Array:
    """Return the bits of numbers that are cast, as numpy and ml_dtypes do it."""
    if new == old:
        return bits
    with np.errstate(all="ignore"):
        made = bits.view(numpy_dtype(old)).astype(numpy_dtype(new))
    return made.view(f"u{itemsize(new)}")
