"""A distributed checkpoint (DCP) of PyTorch: blocks that list themselves in `.metadata`, which gets its name last.

Each block is an item, what `torch.save` makes of it (`torch_save`), and the items of a rank lie back to back in
`__RANK_NUMBER.distcp`. A block that several ranks hold is stored once, so that all store about as much. Of a tensor
that is not empty itself, empty blocks are left out. Texts are objects in the file of the first rank.

PyTorch loads such a checkpoint into any mesh, whatever blocks it has. It finds tensors by their names; the paths in
`planner_data`, by which `dcp_to_torch_save` nests them, are the names, too. Nothing in it says where it was made.

Sources: PyTorch 2.13 `distributed/checkpoint/{metadata,filesystem,planner_helpers}.py`, and files that it wrote
(`tests/data/dcp`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from reshard.formats.entries import Content, Crc, FileLayout
from reshard.formats.sets import DCP_INDEX, DCP_NAME
from reshard.layout.block import Block
from reshard.layout.layout import Grid
from reshard.layout.replicas import by_size
from reshard.readers.pickles import Name
from reshard.targets.destination import Destination, TargetFile, Wanted, literal
from reshard.targets.pickles import Call, Instance, Items, pickled
from reshard.targets.ranks import fitted
from reshard.targets.torch_save import saved_tensor, saved_text, torch_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reshard.errors import Faults
    from reshard.formats.entries import Where
    from reshard.formats.sets import DCP
    from reshard.layout.block import Shape
    from reshard.plan.budget import Share
    from reshard.plan.build import Routed
    from reshard.targets.destination import Arrangement, Item
    from reshard.targets.torch_save import Saved

_ITEM_BYTES = 1500  # resident memory of a block: its part of a file's layout, and of the metadata; measured
_VERSION = "1.0.0"


class _Place(NamedTuple):
    """A file: which one of which rank."""

    rank: int
    part: int

    @property
    def path(self) -> str:
        return f"__{self.rank}_{self.part}.distcp"


class DCPTarget(Destination):
    """The files of a distributed checkpoint."""

    format = DCP_NAME

    def __init__(self, target: Arrangement | None, items: Sequence[Item], *, files: DCP, faults: Faults) -> None:
        self.ranks = (0,) if target is None else tuple(target.ranks)
        self._items = items
        self._grids: dict[str, Grid] = {}
        for name, tensor, dtype in items:
            if tensor.text is None:
                torch_dtype(name, dtype)
                shape = tensor.spec.shape
                cut = target is not None and name in target.tensors and 0 not in shape
                grid = fitted(target, name, shape, faults) if target and cut else _whole(shape, self.ranks)
                if grid is not None:
                    self._grids[name] = grid
        places = self._placed(files.max_shard_bytes)
        self._places = sorted({_Place(self.ranks[0], 0)}.union(*places.values()))
        numbers = {place: number for number, place in enumerate(self._places)}
        self._files = {name: tuple(numbers[place] for place in some) for name, some in places.items()}
        self._wanted: dict[tuple[Grid, tuple[int, ...]], Wanted] = {}
        self.memory: tuple[Share, ...] = (("items", _ITEM_BYTES * sum(map(len, self._files.values()))),)

    def cuts(self, name: str) -> bool:  # noqa: ARG002 -- as in Destination
        """Return False: where copies of a tensor differ, one of them is taken."""
        return False

    def wanted(self, item: Item) -> Wanted | None:
        """Return the blocks, each with the one file that it is in; None where the layout does not fit."""
        grid = self._grids.get(item.name)
        if grid is None:
            return None
        key = (grid, self._files[item.name])
        if key not in self._wanted:
            self._wanted[key] = Wanted(tuple(block for block, _ in _held(grid)), tuple((file,) for file in key[1]))
        return self._wanted[key]

    def copies(self, item: Item, read: Mapping[int, set[int]]) -> list[tuple[Where, Wanted]]:  # noqa: ARG002 -- likewise
        """Return the copy of the lowest rank: there is one of each tensor."""
        wanted = self.wanted(item)
        return [(item.tensor.sharding.replicas[0][0], wanted)] if wanted else []

    def files(self, routed: Sequence[Routed], texts: Sequence[Item]) -> tuple[TargetFile, ...]:
        """Lay out every file, and list what is in which."""
        files = [_File() for _ in self._places]
        parts: dict[str, list[_Part]] = {}
        for item in texts:
            content = Content(item.name, item.dtype, (), item.tensor.text)
            begin, nbytes = files[0].add(content, saved_text(item.tensor.text or ""))
            parts[item.name] = [_Part(None, (), self._places[0].path, begin, nbytes)]
        for item, route in routed:
            parts[item.name] = []
            for block, (number,) in zip(route.wanted.blocks, route.wanted.files, strict=True):
                shape = block.shape
                begin, nbytes = files[number].add(
                    Content(item.name, item.dtype, shape), saved_tensor(item.dtype, shape)
                )
                parts[item.name].append(_Part(block.start, shape, self._places[number].path, begin, nbytes))
        metadata = literal(_metadata([(item, parts[item.name]) for item in self._items if item.name in parts]))
        found = [
            TargetFile(place.rank, place.path, file.layout()) for place, file in zip(self._places, files, strict=True)
        ]
        return (*found, TargetFile(self.ranks[0], DCP_INDEX, metadata, last=True))

    def _placed(self, max_shard_bytes: int) -> dict[str, list[_Place]]:
        """Return the file of each block, in the order of the blocks."""
        dtypes = {item.name: item.dtype for item in self._items}
        sizes = {
            name: [(ranks, block.size * dtypes[name].itemsize) for block, ranks in _held(grid)]
            for name, grid in self._grids.items()
        }
        filled: dict[int, tuple[int, int]] = {}  # of a rank, the number of its last file and the bytes of that
        found: dict[str, list[_Place]] = {}
        for name, chosen in by_size(sizes).items():
            found[name] = []
            for (rank,), (_, nbytes) in zip(chosen, sizes[name], strict=True):
                part, held = filled.get(rank, (0, 0))
                if held and held + nbytes > max_shard_bytes:
                    part, held = part + 1, 0
                filled[rank] = part, held + nbytes
                found[name].append(_Place(rank, part))
        return found


class _Part(NamedTuple):
    """An item: where its block begins in the tensor, None of an object; the block's shape; a range of a file."""

    start: Shape | None
    shape: Shape
    path: str
    offset: int
    nbytes: int


class _File:
    """A file that items are added to."""

    def __init__(self) -> None:
        self._size = 0
        self._literals: list[tuple[int, bytes]] = []
        self._contents: list[Content] = []
        self._crcs: list[Crc] = []

    def add(self, content: Content, saved: Saved) -> tuple[int, int]:
        """Add an item; return where it begins, and its size."""
        begin = self._size
        self._size += saved.nbytes
        self._literals += [(begin + offset, own) for offset, own in saved.literals]
        offset, nbytes = saved.data
        self._contents.append(
            content if content.text is not None else content._replace(runs=((begin + offset, nbytes),))
        )
        if saved.crcs:
            self._crcs.append(Crc(begin + offset, nbytes, tuple(begin + place for place in saved.crcs)))
        return begin, saved.nbytes

    def layout(self) -> FileLayout:
        """Return where everything of the file goes."""
        return FileLayout(self._size, tuple(self._literals), tuple(self._contents), tuple(self._crcs))


@lru_cache(maxsize=4096)
def _whole(shape: Shape, ranks: tuple[int, ...]) -> Grid:
    """Return the grid of a tensor that all ranks hold whole."""
    return Grid(shape, (Block.whole(shape),), (ranks,))


def _held(grid: Grid) -> list[tuple[Block, tuple[int, ...]]]:
    """Return the blocks of a grid that are not empty, and who holds each; of an empty tensor its one block."""
    held = zip(grid.blocks, grid.ranks, strict=True)
    return [(block, ranks) for block, ranks in held if block.size or len(grid.blocks) == 1]


def _metadata(listed: Sequence[tuple[Item, Sequence[_Part]]]) -> bytes:
    """Return the pickle that says what is where."""
    state = {
        "state_dict_metadata": Items((item.name, _described(item, parts)) for item, parts in listed),
        "planner_data": Items((item.name, (item.name,)) for item, _ in listed),
        "storage_data": Items(stored for item, parts in listed for stored in _stored(item.name, parts)),
        "storage_meta": None,
        "version": _VERSION,
    }
    return pickled(Instance(_of_metadata("Metadata"), state), 4)


def _described(item: Item, parts: Sequence[_Part]) -> Instance:
    """Return what the metadata say of a tensor, or of an object."""
    if item.tensor.text is not None:
        return Instance(_OBJECT, None)
    properties = (torch_dtype(item.name, item.dtype), _STRIDED, False, _CONTIGUOUS, False)  # gradients, memory pinned
    chunks = [Instance(_CHUNK, {"offsets": _size(part.start or ()), "sizes": _size(part.shape)}) for part in parts]
    size = _size(item.tensor.spec.shape)
    return Instance(_TENSOR, {"properties": Instance(_PROPERTIES, properties), "size": size, "chunks": chunks})


def _stored(name: str, parts: Sequence[_Part]) -> Iterator[tuple[Instance, Instance]]:
    """Yield where each block of a tensor is, or an object."""
    for number, part in enumerate(parts):
        index: dict[str, object] = {"fqn": name, "index": None}
        if part.start is not None:
            index |= {"index": number, "offset": _size(part.start)}
        info = {"relative_path": part.path, "offset": part.offset, "length": part.nbytes}
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
