"""`.metadata` of PyTorch's distributed checkpoints.

It is a pickle that lists the contents and the byte ranges that store them.

PyTorch finds tensors and objects by name; `planner_data` are the paths at which `dcp_to_torch_save` nests them.

Sources: PyTorch 2.13 `distributed/checkpoint/{metadata,filesystem,planner_helpers}.py`, and files that it wrote
(`tests/data/dcp`).
"""

from __future__ import annotations

import re
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

from reshard.kits.torch.pickles import Name
from reshard.kits.torch.pickling import Call, Instance, Items, pickled

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reshard.core.layout.block import Shape
    from reshard.errors import Faults
    from reshard.formats.dcp.metadata import KeyPath

_VERSION = "1.0.0"


class ItemPart(NamedTuple):
    """An item: its block, and its range of a file.

    Attributes:
        start: the offsets of the block in its tensor; None for an object.
        shape: the shape of the block.
        path: the path of the file.
        offset: the offset of the item in the file.
        nbytes: the size of the item.
        encoding: the names of its encoders, in order.
    """

    start: Shape | None
    shape: Shape
    path: str
    offset: int
    nbytes: int
    encoding: tuple[str, ...] = ()


class ListedTensor(NamedTuple):
    """A tensor, or an object.

    Attributes:
        name: its name.
        dtype: PyTorch's name of the dtype; None for an object.
        shape: the shape of the whole tensor.
        parts: its items.
        path: its path in nested dicts and lists; None if it is not known.
    """

    name: str
    dtype: Name | None
    shape: Shape
    parts: Sequence[ItemPart]
    path: tuple[str | int, ...] | None


def metadata(entries: Sequence[ListedTensor], extra_keys: Mapping[str, object]) -> bytes:
    """Return the pickle of the metadata; `extra_keys` are additional keys of other programs."""
    paths = [(entry.name, entry.path) for entry in entries if entry.path is not None]
    state = {
        "state_dict_metadata": Items((entry.name, _tensor_metadata(entry)) for entry in entries),
        "planner_data": Items(paths) if paths else None,
        "storage_data": Items(stored for entry in entries for stored in _storage_entries(entry)),
        "storage_meta": None,
        "version": _VERSION,
        **extra_keys,
    }
    return pickled(Instance(_metadata_name("Metadata"), state), 4)


def _tensor_metadata(entry: ListedTensor) -> Instance:
    """Return the metadata of a tensor or an object."""
    if entry.dtype is None:
        return Instance(_OBJECT, None)
    properties = (entry.dtype, _STRIDED, False, _CONTIGUOUS, False)  # gradients, memory pinned
    chunks = [
        Instance(_CHUNK, {"offsets": _size(part.start or ()), "sizes": _size(part.shape)}) for part in entry.parts
    ]
    size = _size(entry.shape)
    return Instance(_TENSOR, {"properties": Instance(_PROPERTIES, properties), "size": size, "chunks": chunks})


def _storage_entries(entry: ListedTensor) -> Iterator[tuple[Instance, Instance]]:
    """Yield the storage entries of a tensor's blocks, or of an object."""
    for number, part in enumerate(entry.parts):
        index: dict[str, object] = {"fqn": entry.name, "index": None}
        if part.start is not None:
            index |= {"index": number, "offset": _size(part.start)}
        info: dict[str, object] = {"relative_path": part.path, "offset": part.offset, "length": part.nbytes}
        if part.encoding:
            info["transform_descriptors"] = list(part.encoding)
        yield Instance(_INDEX, index), Instance(_INFO, info)


def _size(extents: Shape) -> Call:
    return Call(_SIZE, (extents,))


def _metadata_name(name: str) -> Name:
    return Name("torch.distributed.checkpoint.metadata", name)


_SIZE = Name("torch", "Size")
_INFO = Name("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_INDEX = _metadata_name("MetadataIndex")
_CHUNK = _metadata_name("ChunkStorageMetadata")
_TENSOR = _metadata_name("TensorStorageMetadata")
_OBJECT = _metadata_name("BytesStorageMetadata")
_PROPERTIES = _metadata_name("TensorProperties")
_STRIDED = Call(Name("torch.serialization", "_get_layout"), ("torch.strided",))
_CONTIGUOUS = Call(_metadata_name("_MEM_FORMAT_ENCODING"), (0,))


_NUMBER = re.compile(r"\d{1,9}", re.ASCII)

_HINT = "choose other names"


def followed(path: KeyPath, old: str, new: str) -> KeyPath:
    """Return the path for a new name.

    >>> followed(("optim", "state", "layers.0.w", "step"), "optim.state.layers.0.w.step", "optim.state.w.step")
    ('optim', 'state', 'w', 'step')
    >>> followed(("model", "w"), "model.w", "w"), followed(("w",), "w", "model.w")
    (('w',), ('model.w',))
    >>> followed(("list", 1, "w"), "list.1.w", "list.7.w"), followed(("a", "b", "w"), "a.b.w", "x.w")
    (('list', 7, 'w'), ('x', 'w'))
    """
    keys = list(map(str, path))
    if new == old or ".".join(keys) != old:
        return path if new == old else (new,)
    begin, end, rest = 0, len(keys), new
    while begin < end - 1 and rest.startswith(f"{keys[begin]}."):
        rest = rest.removeprefix(f"{keys[begin]}.")
        begin += 1
    while begin < end - 1 and rest.endswith(f".{keys[end - 1]}"):
        rest = rest.removesuffix(f".{keys[end - 1]}")
        end -= 1
    if begin < end - 1 and rest == keys[end - 1]:
        return (*path[:begin], *path[end - 1 :])
    between = _split(rest, [key.count(".") + 1 for key in keys[begin:end]])
    before_keys = path[begin:end] if len(between) == end - begin else between
    return (*path[:begin], *(_like(key, before) for key, before in zip(between, before_keys, strict=True)), *path[end:])


def _split(text: str, sizes: list[int]) -> list[str]:
    """Split a text into keys with `sizes` words each; the last key gets the rest.

    Return a single key if no words are left for the last.

    >>> _split("net.blocks.0.w", [1, 2]), _split("net", [1, 1])
    (['net', 'blocks.0.w'], ['net'])
    """
    words = text.split(".")
    if len(words) <= sum(sizes[:-1]):
        return [text]
    ends = [*accumulate(sizes[:-1]), len(words)]
    return [".".join(words[begin:end]) for begin, end in pairwise([0, *ends])]


def _like(key: str, before: str | int) -> str | int:
    """Return a key, as a list index if it replaces a list index."""
    return int(key) if isinstance(before, int) and _NUMBER.fullmatch(key) else key


def without_gaps(paths: Mapping[str, KeyPath]) -> dict[str, KeyPath]:
    """Renumber list indexes from 0, since PyTorch cannot rebuild a list with gaps.

    >>> without_gaps({"l.1.w": ("l", 1, "w"), "l.3.w": ("l", 3, "w"), "a": ("a",)})
    {'l.1.w': ('l', 0, 'w'), 'l.3.w': ('l', 1, 'w'), 'a': ('a',)}
    """
    indexes: dict[KeyPath, set[int]] = {}
    for path in paths.values():
        for depth, key in enumerate(path):
            if isinstance(key, int):
                indexes.setdefault(path[:depth], set()).add(key)
    numbers = {above: {key: number for number, key in enumerate(sorted(keys))} for above, keys in indexes.items()}
    return {
        name: tuple(numbers[path[:n]][key] if isinstance(key, int) else key for n, key in enumerate(path))
        for name, path in paths.items()
    }


def check_nesting(paths: Mapping[str, KeyPath], faults: Faults) -> None:
    """Check that no path is below another, and that lists have only indexes as keys."""
    at: dict[KeyPath, str] = {}
    for name, path in paths.items():
        other_name = at.setdefault(path, name)
        if other_name != name:
            faults.add(
                f"names {name!r} and {other_name!r}", "would have the same place in nested dicts",
                code="duplicate-name", hint=_HINT,
            )  # fmt: skip
    kinds: dict[KeyPath, tuple[type, str]] = {}
    for name, path in paths.items():
        for depth, key in enumerate(path):
            above = path[:depth]
            kind, first = kinds.setdefault(above, (type(key), name))
            if above in at or kind is not type(key):
                other_name = at.get(above, first)
                faults.add(
                    f"names {name!r} and {other_name!r}", "cannot both be in nested dicts and lists",
                    code="conflicting-names", hint=_HINT,
                )  # fmt: skip
                break
