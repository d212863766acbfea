"""`.metadata` of PyTorch's distributed checkpoints: a pickle of what there is, and which bytes of which file have it.

PyTorch finds tensors and objects by their names; `planner_data` are the paths by which `dcp_to_torch_save` nests them.

Sources: PyTorch 2.13 `distributed/checkpoint/{metadata,filesystem,planner_helpers}.py`, and files that it wrote
(`tests/data/dcp`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from reshard.readers.pickles import Name
from reshard.targets.pickles import Call, Instance, Items, pickled

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reshard.layout.block import Shape

_VERSION = "1.0.0"


class Part(NamedTuple):
    """An item: where its block begins in the tensor, None of an object; the block's shape; a range of a file.

    `encoding` names what the range is encoded by, one after the other.
    """

    start: Shape | None
    shape: Shape
    path: str
    offset: int
    nbytes: int
    encoding: tuple[str, ...] = ()


class Listed(NamedTuple):
    """A tensor, or an object.

    Attributes:
        name: of it.
        dtype: what PyTorch calls it; None of an object.
        shape: of the whole tensor.
        parts: its items.
        path: where it is in nested dicts and lists; None where nothing says it.
    """

    name: str
    dtype: Name | None
    shape: Shape
    parts: Sequence[Part]
    path: tuple[str | int, ...] | None


def metadata(listed: Sequence[Listed], more: Mapping[str, object]) -> bytes:
    """Return the pickle that says what is where; `more` is what other programs add to it."""
    paths = [(one.name, one.path) for one in listed if one.path is not None]
    state = {
        "state_dict_metadata": Items((one.name, _described(one)) for one in listed),
        "planner_data": Items(paths) if paths else None,
        "storage_data": Items(stored for one in listed for stored in _stored(one)),
        "storage_meta": None,
        "version": _VERSION,
        **more,
    }
    return pickled(Instance(_of_metadata("Metadata"), state), 4)


def _described(one: Listed) -> Instance:
    """Return what the metadata say of a tensor, or of an object."""
    if one.dtype is None:
        return Instance(_OBJECT, None)
    properties = (one.dtype, _STRIDED, False, _CONTIGUOUS, False)  # gradients, memory pinned
    chunks = [Instance(_CHUNK, {"offsets": _size(part.start or ()), "sizes": _size(part.shape)}) for part in one.parts]
    size = _size(one.shape)
    return Instance(_TENSOR, {"properties": Instance(_PROPERTIES, properties), "size": size, "chunks": chunks})


def _stored(one: Listed) -> Iterator[tuple[Instance, Instance]]:
    """Yield where each block of a tensor is, or an object."""
    for number, part in enumerate(one.parts):
        index: dict[str, object] = {"fqn": one.name, "index": None}
        if part.start is not None:
            index |= {"index": number, "offset": _size(part.start)}
        info: dict[str, object] = {"relative_path": part.path, "offset": part.offset, "length": part.nbytes}
        if part.encoding:
            info["transform_descriptors"] = list(part.encoding)
        yield Instance(_INDEX, index), Instance(_INFO, info)


def _size(extents: Shape) -> Call:
    return Call(_SIZE, (extents,))


def _of_metadata(name: str) -> Name:
    return Name("torch.distributed.checkpoint.metadata", name)


_SIZE = Name("torch", "Size")
_INFO = Name("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_INDEX = _of_metadata("MetadataIndex")
_CHUNK = _of_metadata("ChunkStorageMetadata")
_TENSOR = _of_metadata("TensorStorageMetadata")
_OBJECT = _of_metadata("BytesStorageMetadata")
_PROPERTIES = _of_metadata("TensorProperties")
_STRIDED = Call(Name("torch.serialization", "_get_layout"), ("torch.strided",))
_CONTIGUOUS = Call(_of_metadata("_MEM_FORMAT_ENCODING"), (0,))
