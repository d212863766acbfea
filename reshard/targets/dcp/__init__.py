"""A distributed checkpoint (DCP) of PyTorch: blocks that list themselves in `.metadata`, which gets its name last.

Each block is an item, what `torch.save` makes of it (`torch_save`), and the items of a rank lie back to back in
`__RANK_NUMBER.distcp`. A block that several ranks hold is stored once, so that all store about as much. Of a tensor
that is not empty itself, empty blocks are left out. Texts are objects in the file of the first rank, and so are the
objects of such a checkpoint, byte for byte; so is what Megatron-Core keeps beside, in files of its own. If a target is
for Megatron-Core and has none to carry, these files are made (`megatron`).

PyTorch loads such a checkpoint into any mesh, whatever blocks it has. Nothing in it says where it was made.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from reshard.errors import UsageError
from reshard.formats.directories import TRACKER
from reshard.formats.entries import Content, Crc, FileLayout
from reshard.formats.sets import DCP_INDEX, DCP_NAME
from reshard.layout.block import Block
from reshard.layout.layout import Grid
from reshard.layout.replicas import by_size
from reshard.targets.dcp.carried import Carried
from reshard.targets.dcp.megatron import HOW_TO_LOAD, check_objects, files_beside, is_for_megatron
from reshard.targets.dcp.metadata import Listed, Part, metadata
from reshard.targets.destination import Destination, TargetFile, Wanted, literal
from reshard.targets.ranks import fitted
from reshard.targets.torch_save import Saved, saved_tensor, saved_text, torch_dtype

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard.errors import Faults
    from reshard.layout.block import Shape
    from reshard.plan.budget import Share
    from reshard.plan.build import Routed
    from reshard.plan.plan import Request
    from reshard.readers.pickles import Name
    from reshard.source.checkpoint import Checkpoint
    from reshard.targets.destination import Item

_ITEM_BYTES = 2050  # resident memory of a block: its part of a file's layout, and of the metadata; measured


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
    carries = True

    def __init__(
        self, source: Checkpoint, request: Request, items: Sequence[Item], objects: Mapping[str, str], faults: Faults
    ) -> None:
        target, files = request.target, request.files
        self.ranks = (0,) if target is None else tuple(target.ranks)
        self._items, self._step = items, files.step
        self._directory = "" if files.step is None else f"iter_{files.step:07d}/"  # as Megatron-LM has it
        self._grids: dict[str, Grid] = {}
        for name, tensor, dtype in items:
            if tensor.text is None:
                torch_dtype(name, dtype)
                shape = tensor.spec.shape
                cut = target is not None and name in target.tensors and 0 not in shape
                grid = fitted(target, name, shape, faults) if target and cut else _whole(shape, self.ranks)
                if grid is not None:
                    self._grids[name] = _once(grid, target.devices if target else 1)
        places = self._placed(files.max_shard_size)
        self._places = sorted({_Place(self.ranks[0], 0)}.union(*places.values()))
        numbers = {place: number for number, place in enumerate(self._places)}
        self._files = {name: tuple(numbers[place] for place in some) for name, some in places.items()}
        self._wanted: dict[tuple[Grid, tuple[int, ...]], Wanted] = {}
        self._carried = Carried(source, {item.name: item.tensor.spec.name for item in items}, objects, faults)
        self.carried = self._carried.names
        self._beside, self._is_made = self._carried.beside, False
        if not self._beside and is_for_megatron(source, files.step):
            texts = {item.tensor.spec.name: item.name for item in items if item.tensor.text is not None}
            check_objects({**texts, **objects}.items(), faults)
            self._beside, self._is_made = files_beside(files.step, (item.name for item in items)), True
        self.memory: tuple[Share, ...] = (
            ("items", _ITEM_BYTES * (sum(map(len, self._files.values())) + len(objects))),
            ("objects", self._carried.nbytes),
        )

    @classmethod
    def settled(cls, request: Request, _source: Checkpoint) -> Request:
        """Return the request; raise `UsageError` if it is not for all ranks, or not for each block once."""
        if request.of_some or request.once:
            raise UsageError(
                "a DCP has the blocks of all ranks, each once", code="needs-all-ranks",
                hint="leave ranks, stage, redundancy and links out",
            )  # fmt: skip
        return request

    def wanted(self, item: Item) -> Wanted | None:
        """Return the blocks, each with the one file that it is in; None where the layout does not fit."""
        grid = self._grids.get(item.name)
        if grid is None:
            return None
        key = (grid, self._files[item.name])
        if key not in self._wanted:
            self._wanted[key] = Wanted(tuple(block for block, _ in _held(grid)), tuple((file,) for file in key[1]))
        return self._wanted[key]

    def files(self, routed: Sequence[Routed], texts: Sequence[Item]) -> tuple[TargetFile, ...]:
        """Lay out every file, and list what is in which."""
        files = [_File() for _ in self._places]
        parts: dict[str, list[Part]] = {}
        for item in texts:
            content = Content(item.name, item.dtype, (), item.tensor.text)
            begin, nbytes = files[0].add(content, saved_text(item.tensor.text or ""))
            parts[item.name] = [Part(None, (), self._places[0].path, begin, nbytes)]
        for name, own in self._carried.objects.items():
            begin, nbytes = files[0].add(None, Saved(len(own), ((0, own),)))
            parts[name] = [Part(None, (), self._places[0].path, begin, nbytes)]
        for item, route in routed:
            parts[item.name] = []
            for block, (number,) in zip(route.wanted.blocks, route.wanted.files, strict=True):
                shape = block.shape
                begin, nbytes = files[number].add(
                    Content(item.name, item.dtype, shape), saved_tensor(item.dtype, shape)
                )
                parts[item.name].append(Part(block.start, shape, self._places[number].path, begin, nbytes))
        paths = {} if self._is_made else self._carried.paths
        listed = [
            Listed(item.name, _dtype(item), item.tensor.spec.shape, parts[item.name], paths.get(item.name))
            for item in self._items
            if item.name in parts
        ]
        listed += [Listed(name, None, (), parts[name], paths.get(name)) for name in self._carried.objects]
        found = [
            TargetFile(place.rank, f"{self._directory}{place.path}", file.layout())
            for place, file in zip(self._places, files, strict=True)
        ]
        last = {f"{self._directory}{name}": own for name, own in self._beside.items()}
        last[f"{self._directory}{DCP_INDEX}"] = metadata(listed, {})
        found += [TargetFile(self.ranks[0], path, literal(own), last=True) for path, own in last.items()]
        if self._step is not None:
            tracker = literal(f"{self._step}".encode())
            found.append(TargetFile(self.ranks[0], TRACKER, tracker, last=True, pointer=True))
        return tuple(found)

    def warnings(self) -> tuple[str, ...]:
        """Warn of what is carried and does not go with the rest, and say how Megatron-Core loads what is made."""
        how_to_load = [HOW_TO_LOAD] if self._is_made and not self._carried.objects else []
        return (*self._carried.warnings(self._step), *how_to_load)

    def _placed(self, max_shard_size: int) -> dict[str, list[_Place]]:
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
                if held and held + nbytes > max_shard_size:
                    part, held = part + 1, 0
                filled[rank] = part, held + nbytes
                found[name].append(_Place(rank, part))
        return found


class _File:
    """A file that items are added to."""

    def __init__(self) -> None:
        self._size = 0
        self._literals: list[tuple[int, bytes]] = []
        self._contents: list[Content] = []
        self._crcs: list[Crc] = []

    def add(self, content: Content | None, saved: Saved) -> tuple[int, int]:
        """Add an item, which has no content where it is carried as it is; return where it begins, and its size."""
        begin = self._size
        self._size += saved.nbytes
        self._literals += [(begin + offset, own) for offset, own in saved.literals]
        offset, nbytes = saved.data
        if content is not None:
            runs = () if content.text is not None else ((begin + offset, nbytes),)
            self._contents.append(content._replace(runs=runs))
        if saved.crcs:
            self._crcs.append(Crc(begin + offset, nbytes, tuple(begin + place for place in saved.crcs)))
        return begin, saved.nbytes

    def layout(self) -> FileLayout:
        """Return where everything of the file goes."""
        return FileLayout(self._size, tuple(self._literals), tuple(self._contents), tuple(self._crcs))


def _dtype(item: Item) -> Name | None:
    return torch_dtype(item.name, item.dtype) if item.tensor.text is None else None


@lru_cache(maxsize=4096)
def _whole(shape: Shape, ranks: tuple[int, ...]) -> Grid:
    """Return the grid of a tensor that all ranks hold whole."""
    return Grid(shape, (Block.whole(shape),), (ranks,))


@lru_cache(maxsize=4096)
def _once(grid: Grid, devices: int) -> Grid:
    """Return a grid without blocks that overlap others: of stages that cut a tensor each in its way, the first counts.

    >>> both = Grid((4,), (Block((0,), (2,)), Block((0,), (4,)), Block((2,), (4,))), ((0,), (2, 3), (1,)))
    >>> _once(both, 2).ranks
    ((0,), (1,))
    """
    if sum(block.size for block in grid.blocks) <= prod(grid.shape):
        return grid
    first = min(min(ranks) for ranks in grid.ranks) // devices
    held = zip(grid.blocks, grid.ranks, strict=True)
    kept = [(block, ranks) for block, ranks in held if min(ranks) // devices == first]
    return Grid(grid.shape, tuple(block for block, _ in kept), tuple(ranks for _, ranks in kept))


def _held(grid: Grid) -> list[tuple[Block, tuple[int, ...]]]:
    """Return the blocks of a grid that are not empty, and who holds each; of an empty tensor its one block."""
    held = zip(grid.blocks, grid.ranks, strict=True)
    return [(block, ranks) for block, ranks in held if block.size or len(grid.blocks) == 1]
