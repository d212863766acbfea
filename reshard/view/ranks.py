"""The blocks of one rank as lazy arrays: of a plan, or of its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

from reshard.core.layout.block import Block, shape_text
from reshard.core.model.holdings import with_all_stages
from reshard.errors import UsageError, bytes_text, names, printable
from reshard.expressions.assigned import assigned
from reshard.spelling import missing_name
from reshard.strategy.names import ranks_text
from reshard.view.arrays import cast_array, flat_array, stored_array, sub_array, text_array
from reshard.view.sections import Table, page
from reshard.view.text import count_text, table_lines
from reshard.view.words import ranks_read

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dask.array import Array

    from reshard.core.layout.block import Shape
    from reshard.core.model.checkpoint import Checkpoint, Sharding, Tensor
    from reshard.core.model.entries import Extent, Replica
    from reshard.core.plan.plan import RankBlock
    from reshard.dtypes import DType
    from reshard.errors import MissingNameError

    Arrays = Mapping[str, Array]
else:
    Arrays = Mapping

_TITLES = ("name", "dtype", "shape", "size", "block")


class _Table(Arrays):
    """A mapping of names to lazy arrays that shows itself as a table."""

    __slots__ = ()
    _SIDE = ""
    checkpoint: Checkpoint
    rank: int

    __eq__ = object.__eq__  # Mapping's would compute arrays
    __hash__ = object.__hash__

    def _rows(self) -> list[tuple[str, str, str, str, str]]:
        """Return the name, dtype, shape, size and block of each array."""
        raise NotImplementedError

    def _title(self) -> str:
        return f"{self._SIDE}rank {self.rank} of {names([self.checkpoint.title])}"

    def _missing(self, name: object) -> MissingNameError:
        return missing_name(name, self, f"{self._title()} has no tensor")

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)

    def __repr__(self) -> str:
        return f"<{self._title()}: {count_text(len(self), 'tensor')}>"

    def __str__(self) -> str:
        rows = [(printable(name), *cells) for name, *cells in self._rows()]
        return "\n".join([*table_lines(_TITLES, rows), "", repr(self).strip("<>")])

    def _repr_html_(self) -> str:
        table = Table("Tensors", _TITLES, self._rows(), "tensor", opened=True)
        return page(("Blocks", f"of {self._title()}"), [table], str(self))


def _row(name: str, dtype: DType, shape: Shape, block: str) -> tuple[str, str, str, str, str]:
    return name, dtype.name, shape_text(shape), bytes_text(prod(shape) * dtype.itemsize), block


def _text_row(name: str, text: str) -> tuple[str, str, str, str, str]:
    return name, "str", "[]", bytes_text(len(text.encode())), "whole"


def _block_text(block: Block, whole: Shape) -> str:
    return "whole" if block == Block.whole(whole) else str(block)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RankArrays(_Table):
    """The future contents of one target rank: a mapping of target names to lazy dask arrays.

    Attributes:
        checkpoint: the source.
        rank: the target rank.
        blocks: for each target name, the source tensor and its block.
        texts: the `str` entries.
    """

    _SIDE = "target "

    checkpoint: Checkpoint
    rank: int
    blocks: Mapping[str, RankBlock]
    texts: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Array:
        if name in self.texts:
            return text_array(name, self.texts[name])
        if name not in self.blocks:
            raise self._missing(name)
        block = self.blocks[name]
        array = sub_array(self.checkpoint, block.source_name, block.block, replica=block.source_file)
        same = block.dtype == self.checkpoint.tensors[block.source_name].spec.dtype
        return array if same else cast_array(array, block.dtype.numpy())

    def __iter__(self) -> Iterator[str]:
        return iter([*self.blocks, *self.texts])

    def __len__(self) -> int:
        return len(self.blocks) + len(self.texts)

    def __contains__(self, name: object) -> bool:
        return name in self.blocks or name in self.texts

    def _rows(self) -> list[tuple[str, str, str, str, str]]:
        tensors = self.checkpoint.tensors
        rows = [
            _row(name, item.dtype, item.block.shape, _block_text(item.block, tensors[item.source_name].spec.shape))
            for name, item in self.blocks.items()
        ]
        return rows + [_text_row(name, text) for name, text in self.texts.items()]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class StoredArrays(_Table):
    """The contents of one rank's files: a mapping of names to lazy dask arrays.

    Attributes:
        checkpoint: the checkpoint.
        rank: the rank.
        blocks: for each name, the blocks in the rank's files, and the location of each.
    """

    checkpoint: Checkpoint
    rank: int
    blocks: Mapping[str, tuple[tuple[Block, Extent], ...]]

    def __getitem__(self, name: str) -> Array:
        if name not in self.blocks:
            raise self._missing(name)
        located = self.blocks[name]
        tensor = self.checkpoint.tensors[name]
        if tensor.text is not None:
            return text_array(name, tensor.text)
        is_whole = len(located) == len(tensor.sharding.blocks)
        if is_whole and (array := assigned(self.checkpoint, tensor)) is not None:
            return array
        box = _box([block for block, _ in located])
        if box is not None:
            spec = tensor.spec._replace(shape=box.shape)
            array = stored_array(self.checkpoint, spec, [(_moved(block, box), extent) for block, extent in located])
            return array if tensor.space is None else array.reshape(_shape(tensor, box))
        return flat_array(
            [
                stored_array(self.checkpoint, tensor.spec._replace(shape=block.shape), [(_moved(block, block), extent)])
                for block, extent in located
            ]
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self.blocks)

    def __len__(self) -> int:
        return len(self.blocks)

    def __contains__(self, name: object) -> bool:
        return name in self.blocks

    def _rows(self) -> list[tuple[str, str, str, str, str]]:
        return [self._row(self.checkpoint.tensors[name], located) for name, located in self.blocks.items()]

    def _row(self, tensor: Tensor, located: Sequence[tuple[Block, Extent]]) -> tuple[str, str, str, str, str]:
        name, dtype, whole = tensor.spec
        if tensor.text is not None:
            return _text_row(name, tensor.text)
        blocks = [block for block, _ in located]
        if (box := _box(blocks)) is None:
            return _row(name, dtype, (sum(block.size for block in blocks),), names(blocks, most=3))
        return _row(name, dtype, _shape(tensor, box), _block_text(box, tensor.space or whole))


def stored_arrays(checkpoint: Checkpoint, rank: int) -> StoredArrays:
    """Return the contents of a rank's files.

    Raises:
        UsageError: there are no files of this rank.
    """
    if rank not in checkpoint.ranks:
        raise UsageError(
            f"{checkpoint.title} has no files of rank {rank}", code="no-such-rank",
            facts=[f"it has {ranks_text(checkpoint.ranks)}"],
        )  # fmt: skip
    files = {number for number, of_file in enumerate(checkpoint.ranks) if of_file == rank}
    shared: dict[Sharding, list[tuple[Block, Replica]]] = {}
    blocks = {}
    for name, read in checkpoint.tensors.items():
        tensor = with_all_stages(checkpoint, read)
        if _is_computed(checkpoint, tensor):
            if of_computed := _computed_blocks(checkpoint, tensor, rank):
                blocks[name] = of_computed
            continue
        if tensor.sharding not in shared:
            of_rank = zip(tensor.sharding.blocks, tensor.sharding.replicas, strict=True)
            first = ((block, next((at for at in replicas if at.file in files), None)) for block, replicas in of_rank)
            shared[tensor.sharding] = [(block, at) for block, at in first if at is not None]
        if shared[tensor.sharding]:
            blocks[name] = tuple((block, at.extent(tensor.runs)) for block, at in shared[tensor.sharding])
    return StoredArrays(checkpoint, rank, blocks)


def _is_computed(checkpoint: Checkpoint, tensor: Tensor) -> bool:
    """Return whether a tensor is in no file, as it is computed from others or from an array."""
    read = (replicas[0].file for replicas in tensor.sharding.replicas if replicas)
    return any(checkpoint.files[number].inputs is not None for number in read)


def _is_of_one_rank(checkpoint: Checkpoint, file: int) -> bool:
    """Return whether a file is stored, or computed from the files of one rank; others are of no rank."""
    return checkpoint.files[file].inputs is None or len(ranks_read(checkpoint, file)) <= 1


def _computed_blocks(checkpoint: Checkpoint, tensor: Tensor, rank: int) -> tuple[tuple[Block, Extent], ...]:
    """Return the blocks of a computed tensor that a rank has of the tensor before, or all of them if it had others."""
    ranks = _ranks_before(checkpoint, tensor)
    return tuple(
        (block, replicas[0])
        for number, (block, replicas) in enumerate(tensor.shards)
        if replicas and (ranks is None or rank in ranks[number])
    )


def _ranks_before(checkpoint: Checkpoint, tensor: Tensor) -> list[set[int]] | None:
    """Return the ranks with each block of a tensor before it was computed; None if it did not have these blocks."""
    computation = checkpoint.opening.computation
    if computation is None or not _is_computed(checkpoint, tensor):
        return [
            {checkpoint.ranks[at.file] for at in replicas if _is_of_one_rank(checkpoint, at.file)}
            for replicas in tensor.sharding.replicas
        ]
    first = computation.inputs[0] if computation.inputs else None
    before = first.tensors.get(tensor.spec.name) if first else None
    if first is None or before is None or before.sharding.blocks != tensor.sharding.blocks:
        return None
    return _ranks_before(first, before)


def _box(blocks: Sequence[Block]) -> Block | None:
    """Return the block that distinct blocks make up together, or None.

    >>> str(_box([Block((0, 2), (2, 4)), Block((0, 4), (2, 5))])), _box([Block((0, 2), (1, 4)), Block((1, 0), (2, 4))])
    ('[0:2, 2:5]', None)
    """
    box = Block(
        tuple(map(min, zip(*(block.start for block in blocks), strict=True))),
        tuple(map(max, zip(*(block.stop for block in blocks), strict=True))),
    )
    return box if box.size == sum(block.size for block in blocks) else None


def _moved(block: Block, box: Block) -> Block:
    """Return a block with indices that begin at the corner of a box."""
    spans = block.within(box)
    return Block(tuple(span.start for span in spans), tuple(span.stop for span in spans))


def _shape(tensor: Tensor, box: Block) -> Shape:
    """Return the shape of a box in the dimensions of a tensor."""
    sizes = iter(box.shape)
    return tuple(prod(next(sizes) for _ in axes) for axes in tensor.axes) if tensor.space else box.shape
