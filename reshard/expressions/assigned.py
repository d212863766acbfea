"""Assigned arrays: tensors that a dask array computes.

The chunks of an array are the blocks of its tensor. A run on a local file system adds the array's tasks to its own
graph, and its tasks get the chunks that they write (`Needed`, `given`). In every other case (files that are written
from the first byte to the last, averages, verification, arrays) a chunk is computed when its bytes are read, and each
thread keeps the last chunk. Workers of a cluster do so too; then the array itself is sent to them (`carrying`).
"""

from __future__ import annotations

import pickle
import sys
import threading
from bisect import bisect_left, bisect_right
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from math import prod
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard.core.layout.block import Block
from reshard.errors import SourceError
from reshard.expressions.computed import Computing, block_at, computations
from reshard.expressions.in_place import LAYER

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from reshard.core.layout.block import Shape
    from reshard.core.model.checkpoint import Checkpoint, Tensor
    from reshard.core.model.entries import Extent
    from reshard.core.plan.plan import Plan, Task, Transfer
    from reshard.dtypes import DType
    from reshard.expressions.operand import Expression, Operand

_TASK_BYTES = 4000  # a chunk's task in dask; if it is computed by several, these are usually fused

Key = tuple[Any, ...]
"""The key of a chunk in dask: the name of its array, and its place in the grid of chunks."""


class _ThreadChunks(threading.local):
    """The chunks of a thread: the ones that `given` set, and the last one that it computed.

    Attributes:
        carries: whether the thread pickles arrays as a whole.
    """

    def __init__(self) -> None:
        self.carries = False
        self.given: Mapping[Key, Any] = {}
        self.last: tuple[Key, Any] = ((), None)


_chunks = _ThreadChunks()


@dataclass(frozen=True, slots=True, eq=False)
class FromArray:
    """A dask array as a tensor.

    Attributes:
        name: the name of the tensor, for messages.
        array: the array; None in another process, which gets chunks by `given`.
        key: the name of the array in dask, which is unique.
        edges: for each dimension, the begins of its chunks, and its extent.
        dtype: the dtype of the elements.
        is_carried: it came from another process with its array, and goes on with it: workers send plans to each other.
    """

    name: str
    array: Any
    key: str
    edges: tuple[tuple[int, ...], ...]
    dtype: DType
    is_carried: bool = False

    @classmethod
    def of(cls, name: str, array: Any, dtype: DType) -> FromArray:
        """Return a dask array with known chunks as an expression."""
        edges = tuple(tuple(accumulate(sizes, initial=0)) for sizes in array.chunks)
        return cls(name, array, array.name, edges, dtype)

    @property
    def shape(self) -> Shape:
        """Return the shape of the array."""
        return tuple(edges[-1] for edges in self.edges)

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Return no operands: the tensors that the array reads are unknown."""
        return ()

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Return the chunks."""
        spans = [list(pairwise(edges)) for edges in self.edges]
        return tuple(Block(tuple(a for a, _ in box), tuple(b for _, b in box)) for box in product(*spans))

    @property
    def scratch(self) -> int:
        """Return 0: evaluation needs no memory except for chunks, which `thread_bytes` counts."""
        return 0

    @property
    def row_bytes(self) -> int:
        """Return the bytes of all chunks of the same rows, which are written together."""
        rows = max((b - a for edges in self.edges[:1] for a, b in pairwise(edges)), default=1)
        return self.dtype.itemsize * rows * prod(self.shape[1:])

    @property
    def thread_bytes(self) -> int:
        """Return the memory of a thread: the chunks that it writes, the next ones, already computed, and a copy."""
        return 3 * self.row_bytes

    @property
    def held_bytes(self) -> int:
        """Return the memory of the tasks of dask."""
        return _TASK_BYTES * prod(len(edges) - 1 for edges in self.edges)

    @property
    def can_shrink(self) -> bool:
        """Return whether a chunk has several rows."""
        return any(b - a > 1 for edges in self.edges[:1] for a, b in pairwise(edges))

    def smaller(self, nbytes: int) -> Shape:
        """Return a shape of chunks of whole rows that have at most `nbytes` bytes, or of one row.

        >>> from reshard.dtypes import BFLOAT16
        >>> FromArray("w", None, "w-1", ((0, 1000), (0, 5, 10)), BFLOAT16).smaller(200)
        (10, 10)
        """
        rows = max(1, nbytes // max(1, self.dtype.itemsize * prod(self.shape[1:])))
        return (min(rows, self.shape[0]), *self.shape[1:]) if self.shape else ()

    def evaluate(self, box: Block, out: NDArray[Any]) -> None:
        """Fill an array with elements of one chunk.

        Raises:
            SourceError: the chunk has another shape or dtype than the array declares, or cannot be computed here.
        """
        at = tuple(bisect_right(edges, start) - 1 for edges, start in zip(self.edges, box.start, strict=True))
        begin = tuple(edges[number] for edges, number in zip(self.edges, at, strict=True))
        end = tuple(edges[number + 1] for edges, number in zip(self.edges, at, strict=True))
        chunk = self._chunk((self.key, *at), at, Block(begin, end))
        out[...] = chunk[box.within(Block(begin, end))]

    def _chunk(self, key: Key, at: Shape, block: Block) -> NDArray[Any]:
        chunk = _chunks.given.get(key)
        if chunk is None:
            if _chunks.last[0] != key:
                if self.array is None:
                    raise SourceError(
                        f"assigned array {self.name!r} cannot be computed in another process",
                        code="array-not-here", hint="write it first, or run without a cluster",
                    )  # fmt: skip
                _chunks.last = ((), None)  # only one is held
                array = self.array.blocks[at] if at else self.array
                clients = {future.client for future in futures_of(array)}
                _chunks.last = key, array.compute(scheduler=clients.pop() if clients else "synchronous")
            chunk = _chunks.last[1]
        if isinstance(chunk, np.ma.MaskedArray):
            raise SourceError(
                f"a chunk of array {self.name!r} is masked, and a checkpoint has no masks", code="wrong-chunk",
                hint="fill it with a value: array.map_blocks(numpy.ma.filled, 0)",
            )  # fmt: skip
        chunk = np.asarray(chunk)
        if chunk.shape != block.shape or chunk.dtype != self.dtype.numpy():
            raise SourceError(
                f"a chunk of array {self.name!r} is {chunk.dtype} {[*chunk.shape]}", code="wrong-chunk",
                facts=[f"expected {self.dtype} {[*block.shape]}, as the array says"],
            )  # fmt: skip
        return chunk

    def definition(self) -> str:
        """Return the name of the array in dask, and its chunks."""
        return f"array {self.key} {self.edges} {self.dtype}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the expression, with its array inside `carrying` only; else another process gets chunks by `given`."""
        pickled = None
        if (_chunks.carries or self.is_carried) and self.array is not None:
            import cloudpickle  # dask brings it

            if futures_of(self.array):  # a worker that waits for another could wait for itself
                raise SourceError(
                    f"assigned array {self.name!r} cannot be sent to another process", code="array-not-here",
                    facts=["a cluster holds its chunks"], hint="write it first, or do not persist it",
                )  # fmt: skip
            try:
                pickled = cloudpickle.dumps(self.array)
            except Exception as error:
                raise SourceError(
                    f"assigned array {self.name!r} cannot be sent to another process", code="array-not-here",
                    facts=[f"{type(error).__name__}: {error}"], hint="write it first, or run without a cluster",
                ) from error  # fmt: skip
        return _unpickled, (self.name, pickled, self.key, self.edges, self.dtype)


def _unpickled(
    name: str, pickled: bytes | None, key: str, edges: tuple[tuple[int, ...], ...], dtype: DType
) -> FromArray:
    array = None if pickled is None else pickle.loads(pickled)  # noqa: S301 -- from `FromArray.__reduce__`
    return FromArray(name, array, key, edges, dtype, is_carried=array is not None)


def futures_of(array: Any) -> list[Any]:
    """Return the chunks of an array that a cluster holds, as after `persist()`."""
    distributed = sys.modules.get("distributed")
    return distributed.futures_of(array) if distributed else []


@contextmanager
def carrying() -> Iterator[None]:
    """Pickle assigned arrays as a whole in this thread, for processes that are given no chunks."""
    _chunks.carries = True
    try:
        yield
    finally:
        _chunks.carries = False


@contextmanager
def given(chunks: Mapping[Key, Any]) -> Iterator[None]:
    """Provide this thread with computed chunks."""
    _chunks.given = chunks
    try:
        yield
    finally:
        _chunks.given = {}
        _chunks.last = ((), None)


def array_of(coding: object, path: str, offset: int) -> FromArray | None:
    """Return the array that computes the bytes at an offset of a file; None if no array computes them."""
    found = block_at(coding, path, offset)
    return found.expression if found is not None and isinstance(found.expression, FromArray) else None


def assigned(checkpoint: Checkpoint, tensor: Tensor) -> Any:
    """Return the dask array that a tensor is, chunk by chunk; None if its elements are others, or in another order."""
    if tensor.space is not None or not tensor.is_complete:
        return None
    array: FromArray | None = None
    for block, (at, *_) in tensor.shards:
        of_block = _array_with_chunk(checkpoint, block, at)
        if of_block is None or array not in {None, of_block}:
            return None
        array = of_block
    same = array is not None and (array.shape, array.dtype) == (tensor.spec.shape, tensor.spec.dtype)
    return array.array if array is not None and same and array.blocks == tensor.sharding.blocks else None


def _array_with_chunk(checkpoint: Checkpoint, block: Block, at: Extent) -> FromArray | None:
    """Return the array that a block is a chunk of, element by element; None for any other block."""
    file = checkpoint.files[at.file]
    if file.inputs is None or at.strides or len(at.runs) != 1 or at.runs[0][0] >= LAYER:  # others are changed in place
        return None
    chunk = block_at(checkpoint.coding, file.path, at.runs[0][0])
    if chunk is None or not isinstance(chunk.expression, FromArray):
        return None
    is_whole = at.runs[0] == (chunk.begin, chunk.block.size * chunk.expression.dtype.itemsize)
    return chunk.expression if is_whole and chunk.block == block else None


def arrays_in(coding: object) -> list[FromArray]:
    """Return all assigned arrays of a checkpoint."""
    expressions = dict.fromkeys(_expressions(coding))
    return [each for each in expressions if isinstance(each, FromArray)]


def _expressions(coding: object) -> Iterator[Expression]:
    """Yield the expression of each block of a checkpoint's virtual files."""
    for each in computations(coding):
        if isinstance(each, Computing):
            yield from (span.expression for span in each.spans)


def reads_arrays(coding: object) -> bool:
    """Return whether any tensor of a checkpoint is computed from an assigned array."""
    if arrays_in(coding):
        return True
    return any(map(reads_arrays, {op.checkpoint.coding for each in _expressions(coding) for op in each.operands}))


def not_given(plan: Plan, *, by_file: bool) -> list[FromArray]:
    """Return the assigned arrays of which a plan's tasks need more than the chunks that they are given.

    Args:
        plan: the plan.
        by_file: tasks write whole files; they are given no chunks.
    """
    source = plan.source
    seen: set[Expression] = set()
    for transfer in plan.transfers:
        for at in transfer.reads:
            span = block_at(source.coding, source.files[at.file].path, at.runs[0][0]) if at.runs else None
            if span is not None and (by_file or not isinstance(span.expression, FromArray)):
                _collect(span.expression, seen)
    return [each for each in seen if isinstance(each, FromArray)]


def _collect(expression: Expression, seen: set[Expression]) -> None:
    """Add an expression, and the ones that compute its operands."""
    if expression in seen:
        return
    seen.add(expression)
    for operand in expression.operands:
        for at in (replicas[0] for replicas in operand.tensor.sharding.replicas if replicas):
            runs, file = operand.tensor.runs[at.runs_index], operand.checkpoint.files[at.file]
            span = block_at(operand.checkpoint.coding, file.path, runs[0][0]) if runs else None
            if span is not None:
                _collect(span.expression, seen)


def row_edges(transfer: Transfer) -> list[int]:
    """Return the rows of a transfer at which chunks begin, and last the number of rows."""
    if not transfer.recipe.shape:
        return [0, transfer.rows]
    unit = prod(transfer.recipe.shape[1 : transfer.axis + 1])
    return sorted({0, transfer.rows, *(block.start[0] * unit for block in transfer.recipe.sources)})


class Needed:
    """Finds the chunks that tasks of a plan write."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._keys: dict[int, tuple[list[int], list[int], list[Key]]] = {}

    def of(self, task: Task) -> list[Key]:
        """Return the keys of the chunks that a task writes."""
        keys: dict[Key, None] = {}
        for piece in task.pieces:
            if piece.transfer not in self._keys:
                self._keys[piece.transfer] = self._of_transfer(self._plan.transfers[piece.transfer])
            starts, stops, of_transfer = self._keys[piece.transfer]
            transfer = self._plan.transfers[piece.transfer]
            unit = prod(transfer.recipe.shape[1 : transfer.axis + 1]) or 1
            first, last = bisect_right(stops, piece.start // unit), bisect_left(starts, -(-piece.stop // unit))
            keys.update(dict.fromkeys(of_transfer[first:last]))
        return list(keys)

    def _of_transfer(self, transfer: Transfer) -> tuple[list[int], list[int], list[Key]]:
        """Return begins and ends of the rows of the chunks that a transfer reads, ascending, and their keys."""
        source = self._plan.source
        found: list[tuple[int, int, Key]] = []
        for block, at in zip(transfer.recipe.sources, transfer.reads, strict=True):
            file = source.files[at.file]
            for offset, _ in at.runs if file.inputs is not None else ():
                if block.size and (key := _key_at(source.coding, file.path, offset)):
                    found.append((*((block.start[0], block.stop[0]) if block.start else (0, 1)), key))
        found.sort(key=itemgetter(0))
        return (
            [start for start, _, _ in found],
            list(accumulate((stop for _, stop, _ in found), max)),
            [key for _, _, key in found],
        )


def _key_at(coding: object, path: str, offset: int) -> Key | None:
    """Return the key of the chunk at an offset of a file; None if no array computes its bytes."""
    found = block_at(coding, path, offset)
    if found is None or not isinstance(found.expression, FromArray):
        return None
    places = zip(found.expression.edges, found.block.start, strict=True)
    return (found.expression.key, *(bisect_right(edges, start) - 1 for edges, start in places))
