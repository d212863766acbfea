"""The blocks of one rank as lazy arrays: of a plan, or of its files."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from reshard.core.layout.block import Block, shape_text
from reshard.core.model.holdings import with_all_stages
from reshard.errors import UsageError, bytes_text, names
from reshard.expressions.assigned import assigned
from reshard.spelling import missing_name
from reshard.strategy.names import ranks_text
from reshard.view.arrays import cast_array, flat_array, stored_array, sub_array, text_array
from reshard.view.sections import Table, lines, page
from reshard.view.text import count_text
from reshard.view.words import is_computed, ranks_read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dask.array import Array

    from reshard.core.layout.block import Shape
    from reshard.core.model.checkpoint import Checkpoint, Sharding, Tensor
    from reshard.core.model.entries import Extent, Replica
    from reshard.core.plan.plan import Plan, RankBlock

    Arrays = Mapping[str, Array]
else:
    Arrays = Mapping


class Part(NamedTuple):
    """What a rank has of a tensor.

    Attributes:
        dtype: the name of its dtype.
        shape: the shape of the array.
        nbytes: its size.
        block: the part of the whole tensor, in words.
        make: makes the lazy array.
    """

    dtype: str
    shape: Shape
    nbytes: int
    block: str
    make: Callable[[], Array]


class RankArrays(Arrays):
    """The arrays of one rank, of a plan or of its files: a mapping of names to lazy dask arrays, shown as a table."""

    __slots__ = ("_parts", "_title")

    def __init__(self, title: str, parts: Mapping[str, Part]) -> None:
        self._title, self._parts = title, parts

    __eq__ = object.__eq__  # Mapping's would compute arrays
    __hash__ = object.__hash__

    def __getitem__(self, name: str) -> Array:
        if name not in self._parts:
            raise missing_name(name, self, f"{self._title} has no tensor")
        return self._parts[name].make()

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __contains__(self, name: object) -> bool:
        return name in self._parts

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)

    def _table(self) -> Table:
        rows = [
            (name, part.dtype, shape_text(part.shape), bytes_text(part.nbytes), part.block)
            for name, part in self._parts.items()
        ]
        return Table("Tensors", ("name", "dtype", "shape", "size", "block"), rows, "tensor", opened=True)

    def __repr__(self) -> str:
        return f"<{self._title}: {count_text(len(self), 'tensor')}>"

    def __str__(self) -> str:
        return "\n".join([*lines(self._table()), "", repr(self).strip("<>")])

    def _repr_html_(self) -> str:
        return page(("Blocks", f"of {self._title}"), [self._table()], str(self))


def _text_part(name: str, text: str) -> Part:
    return Part("str", (), len(text.encode()), "whole", partial(text_array, name, text))


def _block_text(block: Block, whole: Shape) -> str:
    return "whole" if block == Block.whole(whole) else str(block)


# --- of a plan --------------------------------------------------------------------------------------------------


def planned_arrays(plan: Plan, rank: int) -> RankArrays:
    """Return the future contents of a target rank."""
    source = plan.source
    parts = {name: planned_part(source, block) for name, block in plan.blocks(rank).items()}
    parts |= {name: _text_part(name, text) for name, text in plan.texts.items()}
    return RankArrays(f"target rank {rank} of {names([source.title])}", parts)


def planned_part(source: Checkpoint, of: RankBlock) -> Part:
    """Return what a target rank will have of a tensor of a source."""
    spec, block = source.tensors[of.source_name].spec, of.block

    def make() -> Array:
        array = sub_array(source, of.source_name, block, replica=of.source_file)
        return array if of.dtype == spec.dtype else cast_array(array, of.dtype.numpy())

    return Part(of.dtype.name, block.shape, block.size * of.dtype.itemsize, _block_text(block, spec.shape), make)


# --- of files ---------------------------------------------------------------------------------------------------


def stored_arrays(checkpoint: Checkpoint, rank: int) -> RankArrays:
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
        if is_computed(checkpoint, tensor):
            if of_computed := _computed_blocks(checkpoint, tensor, rank):
                blocks[name] = of_computed
            continue
        if tensor.sharding not in shared:
            of_rank = zip(tensor.sharding.blocks, tensor.sharding.replicas, strict=True)
            first = ((block, next((at for at in replicas if at.file in files), None)) for block, replicas in of_rank)
            shared[tensor.sharding] = [(block, at) for block, at in first if at is not None]
        if shared[tensor.sharding]:
            blocks[name] = tuple((block, at.extent(tensor.runs)) for block, at in shared[tensor.sharding])
    title = f"rank {rank} of {names([checkpoint.title])}"
    return RankArrays(title, {name: stored_part(checkpoint, checkpoint.tensors[name], blocks[name]) for name in blocks})


def stored_part(checkpoint: Checkpoint, tensor: Tensor, located: Sequence[tuple[Block, Extent]]) -> Part:
    """Return what a rank has of a tensor: blocks, each at a place in its files.

    Blocks that are no block together, as in ZeRO's partitions, are one flat array.
    """
    name, dtype, whole = tensor.spec
    if tensor.text is not None:
        return _text_part(name, tensor.text)
    blocks = [block for block, _ in located]
    box = _box(blocks)
    shape: Shape
    if box is None:
        shape, text = (sum(block.size for block in blocks),), names(blocks, most=3)
    else:
        shape, text = _shape(tensor, box), _block_text(box, tensor.space or whole)

    def make() -> Array:
        is_whole = len(located) == len(tensor.sharding.blocks)
        if is_whole and (array := assigned(checkpoint, tensor)) is not None:
            return array
        if box is None:
            return flat_array([stored(block, [(block, extent)]) for block, extent in located])
        array = stored(box, located)
        return array if tensor.space is None else array.reshape(shape)

    def stored(box: Block, inside: Sequence[tuple[Block, Extent]]) -> Array:
        spec = tensor.spec._replace(shape=box.shape)
        return stored_array(checkpoint, spec, [(_moved(block, box), extent) for block, extent in inside])

    return Part(dtype.name, shape, prod(shape) * dtype.itemsize, text, make)


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
    if computation is None or not is_computed(checkpoint, tensor):
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
