"""`.metadata` of PyTorch's distributed checkpoints.

It is a pickle that lists the contents and the byte ranges that store them.

PyTorch finds tensors and objects by name; `planner_data` are the paths at which `dcp_to_torch_save` nests them.

Sources: PyTorch 2.13 `distributed/checkpoint/{metadata,filesystem,planner_helpers}.py`, and files that it wrote
(`tests/data/dcp`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from reshard.kits.torch.pickles import Name, PickledObject
from reshard.kits.torch.pickling import Items, pickled

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reshard.core.layout.block import Shape
    from reshard.formats.dcp.metadata import Item

_VERSION = "1.0.0"


class ListedTensor(NamedTuple):
    """A tensor, or an object.

    Attributes:
        name: its name.
        dtype: PyTorch's name of the dtype; None for an object.
        shape: the shape of the whole tensor.
        parts: its items, and the shape of the block in each.
        path: its path in nested dicts and lists; None if it is not known.
    """

    name: str
    dtype: Name | None
    shape: Shape
    parts: Sequence[tuple[Item, Shape]]
    path: tuple[str | int, ...] | None


def metadata(entries: Sequence[ListedTensor], extra_keys: Mapping[str, object]) -> bytes:
    """Return the pickle of the metadata; `extra_keys` are additional keys of other programs."""
    paths = [(entry.name, entry.path) for entry in entries if entry.path is not None]
    sizes = _Sizes()
    state = {
        "state_dict_metadata": Items((entry.name, _tensor_metadata(entry, sizes)) for entry in entries),
        "planner_data": Items(paths) if paths else None,
        "storage_data": Items(stored for entry in entries for stored in _storage_entries(entry, sizes)),
        "storage_meta": None,
        "version": _VERSION,
        **extra_keys,
    }
    return pickled(_instance(_metadata_name("Metadata"), state), 4, streams=True)


def _tensor_metadata(entry: ListedTensor, sizes: _Sizes) -> PickledObject:
    """Return the metadata of a tensor or an object."""
    if entry.dtype is None:
        return _instance(_OBJECT, None)
    properties = (entry.dtype, _STRIDED, False, _CONTIGUOUS, False)  # gradients, memory pinned
    chunks = [_instance(_CHUNK, {"offsets": sizes[item.offsets], "sizes": sizes[shape]}) for item, shape in entry.parts]
    state = {"properties": _instance(_PROPERTIES, properties), "size": sizes[entry.shape], "chunks": chunks}
    return _instance(_TENSOR, state)


def _storage_entries(entry: ListedTensor, sizes: _Sizes) -> Iterator[tuple[PickledObject, PickledObject]]:
    """Yield the storage entries of a tensor's blocks, or of an object."""
    for number, (item, _) in enumerate(entry.parts):
        index: dict[str, object] = {"fqn": entry.name, "index": None}
        if entry.dtype is not None:
            index |= {"index": number, "offset": sizes[item.offsets]}
        info: dict[str, object] = {"relative_path": item.file, "offset": item.begin, "length": item.nbytes}
        if item.encoding:
            info["transform_descriptors"] = list(item.encoding)
        yield _instance(_INDEX, index), _instance(_INFO, info)


def _instance(kind: Name, state: object) -> PickledObject:
    return PickledObject(kind, (), state=state, is_new=True)


class _Sizes(dict[tuple[int, ...], PickledObject]):
    """Calls of `torch.Size`, one for all equal sizes."""

    def __missing__(self, extents: Shape) -> PickledObject:
        size = self[extents] = PickledObject(_SIZE, (extents,))
        return size


def _metadata_name(name: str) -> Name:
    return Name("torch.distributed.checkpoint.metadata", name)


_SIZE = Name("torch", "Size")
_INFO = Name("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_INDEX = _metadata_name("MetadataIndex")
_CHUNK = _metadata_name("ChunkStorageMetadata")
_TENSOR = _metadata_name("TensorStorageMetadata")
_OBJECT = _metadata_name("BytesStorageMetadata")
_PROPERTIES = _metadata_name("TensorProperties")
_STRIDED = PickledObject(Name("torch.serialization", "_get_layout"), ("torch.strided",))
_CONTIGUOUS = PickledObject(_metadata_name("_MEM_FORMAT_ENCODING"), (0,))
