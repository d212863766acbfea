"""Writes what `torch.save` makes of state dicts: Python's pickler with names of PyTorch's classes, in a zip."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from checkpoints import Array

STORAGES = {"float32": "FloatStorage", "int64": "LongStorage", "uint8": "ByteStorage", "uint16": "BFloat16Storage"}


class Global(NamedTuple):
    """A class or function, by its module and name."""

    module: str
    name: str

    def __call__(self) -> None:
        """Be callable, as the pickler wants."""


class Made:
    """An object: what makes it of which arguments, and its state."""

    def __init__(self, name: str, *arguments: object, state: object = None, module: str = "torch") -> None:
        self.reduced = (Global(module, name), arguments, *([] if state is None else [state]))

    def __reduce__(self) -> Any:
        return self.reduced


class Storage(NamedTuple):
    """Bytes that are a record of their own; `nbytes` of them are there, where that is less."""

    elements: Array
    count: int | None = None


class Pickler(pickle._Pickler):  # type: ignore[name-defined]  # Python's own, of which globals can be written otherwise
    """Pickles globals that cannot be imported, and gathers storages."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, 2)
        self.storages: list[Storage] = []

    def save(self, value: Any, save_persistent_id: bool = True) -> None:
        """Write a value."""
        if isinstance(value, Global):
            self.write(b"c%s\n%s\n" % (value.module.encode(), value.name.encode()))
        else:
            super().save(value, save_persistent_id)

    def persistent_id(self, value: Any) -> Any:
        """Number storages."""
        if not isinstance(value, Storage):
            return None
        if not any(value is known for known in self.storages):
            self.storages.append(value)
        number = next(at for at, known in enumerate(self.storages) if known is value)
        kind = Global("torch", STORAGES[value.elements.dtype.name])
        return ("storage", kind, str(number), "cpu", value.elements.size if value.count is None else value.count)


def tensor(
    array: Array, *, storage: Storage | None = None, first: int = 0, strides: Sequence[int] | None = None
) -> Made:
    """A tensor, by default in a storage of its own."""
    steps = tuple(int(np.prod(array.shape[dim + 1 :], dtype=int)) for dim in range(array.ndim))
    storage = storage or Storage(np.ascontiguousarray(array).reshape(-1))
    shape = tuple(map(int, array.shape))
    return Made("_rebuild_tensor_v2", storage, first, shape, tuple(strides or steps), False, OrderedDict())


def mesh(extents: Sequence[int], rank: int, *, generation: str = "2.13", ranks: Sequence[int] | None = None) -> Made:
    """A mesh as a version of PyTorch pickles it."""
    known = tuple(ranks) if ranks is not None else tuple(range(int(np.prod(extents))))
    steps = tuple(int(np.prod(extents[axis + 1 :], dtype=int)) for axis in range(len(extents)))
    at = tuple(map(int, np.unravel_index(known.index(rank), tuple(extents)))) if rank in known else None
    if generation == "2.4":
        state = {"mesh": tensor(np.array(known, np.int64).reshape(extents)), "_flatten_mesh_list": known}
    elif generation == "2.10":
        layout = Made("_MeshLayout", state={"shape": tuple(extents), "stride": steps})
        state = {"_layout": layout, "_flatten_rank_map": known}
    else:
        axes = [Made("_FlatLayout", state={"shape": (n,), "stride": (s,)}) for n, s in zip(extents, steps, strict=True)]
        state = {"_layout": Made("_MeshLayout", state={"axes": tuple(axes)}), "_flatten_rank_map": known, "_rank": rank}
    return Made("DeviceMesh", state={**state, "_coordinate_on_dim": at})


def shard(dim: int, factor: int | None = None) -> Made:
    """A placement."""
    if factor is None:
        return Made("Shard", state={"dim": dim})
    return Made("_StridedShard", state={"dim": dim, "split_factor": factor})


def dtensor(local: Made, shape: Sequence[int], placements: Any, over: Any, **spec: object) -> Made:
    """A DTensor."""
    meta = Made("TensorMeta", Made("Size", tuple(shape)), (), "")
    placements = tuple(placements) if isinstance(placements, list) else placements
    state = {"mesh": over, "placements": placements, "tensor_meta": meta} | spec
    arguments = (Global("torch", "DTensor"), Global("torch", "float32"), tuple(shape))
    inner = {"_local_tensor": local, "_spec": Made("DTensorSpec", state=state)}
    return Made(
        "_rebuild_from_type_v2", Global("torch._utils", "_rebuild_wrapper_subclass"), Global("torch", "DTensor"),
        arguments, inner,
    )  # fmt: skip


def write_save(
    path: Path, state: object, *, records: Mapping[str, bytes] | None = None, method: int = zipfile.ZIP_STORED
) -> Path:
    """Write a file: the pickled state, its storages, and other records."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    pickler = Pickler(content)
    pickler.dump(state)
    every = {"data.pkl": content.getvalue(), "byteorder": b"little"}
    every |= {f"data/{number}": one.elements.tobytes() for number, one in enumerate(pickler.storages)}
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, some in (every | dict(records or {})).items():
            archive.writestr(f"{path.stem}/{name}", some)
    return path


def write_rank(root: Path, rank: int, count: int, state: object, kind: str = "model") -> Path:
    """Write the file of one rank."""
    return write_save(root / f"{kind}_world_size_{count}_rank_{rank}.pt", state)
