"""`.metadata` of PyTorch's distributed checkpoints.

It is a pickle that lists the contents and the byte ranges that store them.

PyTorch finds tensors and objects by name; `planner_data` are the paths at which `dcp_to_torch_save` nests them.

Sources: PyTorch 2.13 `distributed/checkpoint/{metadata,filesystem,planner_helpers}.py`, and files that it wrote
(`tests/data/dcp`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from reshard.kits.torch.pickles import Name
from reshard.kits.torch.pickling import Call, Instance, Items, pickled

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
    chunks = [Instance(_CHUNK, {"offsets": _size(item.offsets), "sizes": _size(shape)}) for item, shape in entry.parts]
    size = _size(entry.shape)
    return Instance(_TENSOR, {"properties": Instance(_PROPERTIES, properties), "size": size, "chunks": chunks})


def _storage_entries(entry: ListedTensor) -> Iterator[tuple[Instance, Instance]]:
    """Yield the storage entries of a tensor's blocks, or of an object."""
    for number, (item, _) in enumerate(entry.parts):
        index: dict[str, object] = {"fqn": entry.name, "index": None}
        if entry.dtype is not None:
            index |= {"index": number, "offset": _size(item.offsets)}
        info: dict[str, object] = {"relative_path": item.file, "offset": item.begin, "length": item.nbytes}
        if item.encoding:
            info["transform_descriptors"] = list(item.encoding)
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
