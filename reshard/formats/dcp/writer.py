"""A distributed checkpoint (DCP) of PyTorch.

Blocks are listed in `.metadata`, which gets its name last.

Each block is an item, the output of `torch.save` (`saved_tensors`), and the items of a rank are back to back in
`__RANK_NUMBER.distcp`. A block that several ranks hold is stored once, balanced over the ranks. Empty blocks of
non-empty tensors are left out. Texts are objects in the file of the first rank. Objects of a source DCP are carried
byte for byte into the same file, and Megatron-Core's sidecar files into files of the same names. If a target for
Megatron-Core has no sidecar files to carry, they are made (`sidecars`).

PyTorch loads such a checkpoint into any mesh, with any blocks. Nothing in it depends on the machine that wrote it.

`.metadata` is a pickle that lists the contents and the byte ranges that store them. PyTorch finds tensors and objects
by name; `planner_data` are the paths at which `dcp_to_torch_save` nests them.

Sources: PyTorch 2.13 `distributed/checkpoint/{metadata,filesystem,planner_helpers}.py`, and files that it wrote
(`tests/data/dcp`).
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from reshard.core.layout.block import Block
from reshard.core.layout.grid import Grid
from reshard.core.layout.replicas import by_size
from reshard.core.model.entries import Content, Crc, FileLayout
from reshard.core.target import Target, TargetBlocks, TargetFile, literal
from reshard.errors import UsageError
from reshard.formats.dcp.metadata import Item
from reshard.formats.dcp.names import DCP_INDEX, TRACKER
from reshard.formats.dcp.sidecars import HOW_TO_LOAD, check_objects, is_for_megatron, new_sidecars, target_files
from reshard.formats.ranks.writer import fitted
from reshard.kits.torch.carried import Carried, nested
from reshard.kits.torch.pickles import Name, PickledObject
from reshard.kits.torch.pickling import Items, pickled
from reshard.kits.torch.saved_tensors import Saved, saved_tensor, saved_text, torch_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reshard.core.layout.block import Shape
    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.plan.budget import Share
    from reshard.core.plan.plan import Request
    from reshard.core.target import Assigned, TargetInputs, TargetTensor

_ITEM_BYTES = 2050  # resident memory of a block in a file's layout and in the metadata, as measured
_VERSION = "1.0.0"
_METADATA = "torch.distributed.checkpoint.metadata"
_SIZE = Name("torch", "Size")
_INFO = Name("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_INDEX = Name(_METADATA, "MetadataIndex")
_CHUNK = Name(_METADATA, "ChunkStorageMetadata")
_TENSOR = Name(_METADATA, "TensorStorageMetadata")
_OBJECT = Name(_METADATA, "BytesStorageMetadata")
_PROPERTIES = Name(_METADATA, "TensorProperties")
_STRIDED = PickledObject(Name("torch.serialization", "_get_layout"), ("torch.strided",))
_CONTIGUOUS = PickledObject(Name(_METADATA, "_MEM_FORMAT_ENCODING"), (0,))


class _FileKey(NamedTuple):
    """A data file, as its rank and its number among the rank's files."""

    rank: int
    part: int

    @property
    def path(self) -> str:
        return f"__{self.rank}_{self.part}.distcp"


class DCPTarget(Target):
    """The files of a distributed checkpoint."""

    format = "dcp"
    carries = True

    def __init__(self, inputs: TargetInputs) -> None:
        source, request, items, target, objects, faults = inputs
        files = request.files
        self.ranks = (0,) if target is None else tuple(target.ranks)
        self._items, self._step = items, files.step
        self._directory = "" if files.step is None else f"iter_{files.step:07d}/"  # as in Megatron-LM
        self._grids: dict[str, Grid] = {}
        for name, tensor, dtype in items:
            if tensor.text is None:
                torch_dtype(name, dtype)
                shape = tensor.spec.shape
                cut = target is not None and name in target.tensors and 0 not in shape
                grid = fitted(target, name, shape, faults) if target and cut else _whole(shape, self.ranks)
                if grid is not None:
                    self._grids[name] = _without_overlaps(grid, target.devices if target else 1)
        files_of_blocks = self._assign_files(files.max_shard_size)
        self._data_files = sorted({_FileKey(self.ranks[0], 0)}.union(*files_of_blocks.values()))
        numbers = {file: number for number, file in enumerate(self._data_files)}
        self._files = {
            name: tuple(numbers[file] for file in tensor_files) for name, tensor_files in files_of_blocks.items()
        }
        self._wanted: dict[tuple[Grid, tuple[int, ...]], TargetBlocks] = {}
        self._carried = Carried(source, {item.name: item.tensor.spec.name for item in items}, objects, faults)
        self._paths = nested(self._carried.paths or {}, faults)
        self.carried = self._carried.names
        self._sidecars = self._carried.beside
        self._has_new_sidecars = not self._sidecars and is_for_megatron(source, files.step)
        if self._has_new_sidecars:
            texts = {item.tensor.spec.name: item.name for item in items if item.tensor.text is not None}
            check_objects({**texts, **objects}.items(), faults)
            self._sidecars = new_sidecars(files.step, (item.name for item in items))
        self.memory: tuple[Share, ...] = (
            ("items", _ITEM_BYTES * (sum(map(len, self._files.values())) + len(objects))),
            ("objects", self._carried.nbytes),
        )

    @classmethod
    def settled(cls, request: Request, _source: Checkpoint) -> Request:
        """Return the request; raise `UsageError` unless it is for all ranks and blocks once."""
        if request.is_partial or request.remove_redundancy:
            raise UsageError(
                "a DCP has the blocks of all ranks, each once", code="needs-all-ranks",
                hint="leave ranks, stage and redundancy out",
            )  # fmt: skip
        return request

    def blocks_of(self, item: TargetTensor) -> TargetBlocks | None:
        """Return the blocks, each with its single file; None if the layout does not fit."""
        grid = self._grids.get(item.name)
        if grid is None:
            return None
        key = (grid, self._files[item.name])
        if key not in self._wanted:
            blocks = tuple(block for block, _ in _stored_blocks(grid))
            self._wanted[key] = TargetBlocks(blocks, tuple((file,) for file in key[1]))
        return self._wanted[key]

    def files(self, assigned: Sequence[Assigned], texts: Sequence[TargetTensor]) -> tuple[TargetFile, ...]:
        """Lay out every file, and make the metadata that list the items."""
        contents = [_FileContents(data_file.path) for data_file in self._data_files]
        parts: dict[str, list[tuple[Item, Shape]]] = {}
        for item in texts:
            content = Content(item.name, item.dtype, (), item.tensor.text)
            parts[item.name] = [(contents[0].add((), content, saved_text(item.tensor.text or "")), ())]
        for name, carried in self._carried.objects.items():
            parts[name] = [(contents[0].add((), None, Saved(len(carried), ((0, carried),))), ())]
        for item, target in assigned:
            parts[item.name] = []
            for block, (number,) in zip(target.blocks, target.files, strict=True):
                content = Content(item.name, item.dtype, block.shape)
                part = contents[number].add(block.start, content, saved_tensor(item.dtype, block.shape))
                parts[item.name].append((part, block.shape))
        paths = {} if self._has_new_sidecars else self._paths
        entries = []
        for item in self._items:
            if item.name in parts:
                dtype = torch_dtype(item.name, item.dtype) if item.tensor.text is None else None
                shape = item.tensor.spec.shape
                entries.append(ListedTensor(item.name, dtype, shape, parts[item.name], paths.get(item.name)))
        entries += [ListedTensor(name, None, (), parts[name], paths.get(name)) for name in self._carried.objects]
        files = [
            TargetFile(data_file.rank, f"{self._directory}{data_file.path}", file.layout())
            for data_file, file in zip(self._data_files, contents, strict=True)
        ]
        files += target_files(self.ranks[0], self._directory, {**self._sidecars, DCP_INDEX: metadata(entries, {})})
        if self._step is not None:
            tracker = literal(f"{self._step}".encode())
            files.append(TargetFile(self.ranks[0], TRACKER, tracker, publish="pointer"))
        return tuple(files)

    def warnings(self) -> tuple[str, ...]:
        """Warn of carried data that contradict the target; say how Megatron-Core loads it."""
        how_to_load = [HOW_TO_LOAD] if self._has_new_sidecars and not self._carried.objects else []
        return (*self._carried.warnings(self._step), *how_to_load)

    def _assign_files(self, max_shard_size: int) -> dict[str, list[_FileKey]]:
        """Return the file of each block of each tensor."""
        dtypes = {item.name: item.dtype for item in self._items}
        sizes = {
            name: [(ranks, block.size * dtypes[name].itemsize) for block, ranks in _stored_blocks(grid)]
            for name, grid in self._grids.items()
        }
        filled: dict[int, tuple[int, int]] = {}  # the number of the last file of each rank, and its bytes
        result: dict[str, list[_FileKey]] = {}
        for name, chosen in by_size(sizes).items():
            result[name] = []
            for (rank,), (_, nbytes) in zip(chosen, sizes[name], strict=True):
                part, filled_bytes = filled.get(rank, (0, 0))
                if filled_bytes and filled_bytes + nbytes > max_shard_size:
                    part, filled_bytes = part + 1, 0
                filled[rank] = part, filled_bytes + nbytes
                result[name].append(_FileKey(rank, part))
        return result


class _FileContents:
    """A data file under construction."""

    def __init__(self, path: str) -> None:
        self._path, self._size = path, 0
        self._literals: list[tuple[int, bytes]] = []
        self._contents: list[Content] = []
        self._crcs: list[Crc] = []

    def add(self, offsets: Shape, content: Content | None, saved: Saved) -> Item:
        """Add an item, and return its storage entry; carried bytes have no content."""
        begin = self._size
        self._size += saved.nbytes
        self._literals += [(begin + offset, literal_bytes) for offset, literal_bytes in saved.literals]
        if content is not None:
            self._contents.append(content._replace(runs=tuple((begin + at, nbytes) for at, nbytes in saved.data)))
        for at, nbytes, places in saved.crcs:
            self._crcs.append(Crc(begin + at, nbytes, tuple(begin + place for place in places)))
        return Item(offsets, self._path, begin, saved.nbytes)

    def layout(self) -> FileLayout:
        """Return the layout of the file."""
        return FileLayout(self._size, tuple(self._literals), tuple(self._contents), tuple(self._crcs))


@lru_cache(maxsize=4096)
def _whole(shape: Shape, ranks: tuple[int, ...]) -> Grid:
    """Return the grid of a tensor that is whole on all ranks."""
    return Grid(shape, (Block.whole(shape),), (ranks,))


@lru_cache(maxsize=4096)
def _without_overlaps(grid: Grid, devices: int) -> Grid:
    """Return a grid without overlapping blocks.

    If stages cut a tensor differently, the layout of the first stage counts.

    >>> both = Grid((4,), (Block((0,), (2,)), Block((0,), (4,)), Block((2,), (4,))), ((0,), (2, 3), (1,)))
    >>> _without_overlaps(both, 2).ranks
    ((0,), (1,))
    """
    if sum(block.size for block in grid.blocks) <= prod(grid.shape):
        return grid
    first = min(min(ranks) for ranks in grid.ranks) // devices
    blocks = zip(grid.blocks, grid.ranks, strict=True)
    first_blocks = [(block, ranks) for block, ranks in blocks if min(ranks) // devices == first]
    return Grid(grid.shape, tuple(block for block, _ in first_blocks), tuple(ranks for _, ranks in first_blocks))


def _stored_blocks(grid: Grid) -> list[tuple[Block, tuple[int, ...]]]:
    """Return the non-empty blocks and their ranks, or an empty tensor's only block."""
    blocks = zip(grid.blocks, grid.ranks, strict=True)
    return [(block, ranks) for block, ranks in blocks if block.size or len(grid.blocks) == 1]


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
    return pickled(_instance(Name(_METADATA, "Metadata"), state), 4, streams=True)


def _tensor_metadata(entry: ListedTensor, sizes: _Sizes) -> PickledObject:
    """Return the metadata of a tensor or an object."""
    if entry.dtype is None:
        return _instance(_OBJECT, None)
    properties = (entry.dtype, _STRIDED, False, _CONTIGUOUS, False)  # gradients, memory pinned
    chunks = [_instance(_CHUNK, {"offsets": sizes[item.offsets], "sizes": sizes[shape]}) for item, shape in entry.parts]
    return _instance(
        _TENSOR, {"properties": _instance(_PROPERTIES, properties), "size": sizes[entry.shape], "chunks": chunks}
    )


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
