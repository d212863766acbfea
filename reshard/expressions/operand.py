"""Operands and expressions: the inputs of a computed tensor, and the rule that evaluates a box of it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from reshard.core.layout.axes import position, row_major
from reshard.core.model.stored import StoredBlock, StoredTensor
from reshard.errors import SourceError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from reshard.core.layout.block import Block, Shape
    from reshard.core.model.checkpoint import Checkpoint, Tensor, TensorSpec
    from reshard.dtypes import DType

LOCATED, LOCATED_BYTES = 64, 300
"""The most operands whose blocks are kept located, and the memory of a located block."""


class Operand(NamedTuple):
    """A tensor of a checkpoint that an expression reads."""

    checkpoint: Checkpoint
    name: str

    @property
    def tensor(self) -> Tensor:
        """Return the tensor."""
        return self.checkpoint.tensors[self.name]

    @property
    def spec(self) -> TensorSpec:
        """Return its name, dtype and shape."""
        return self.tensor.spec

    def read(self, box: Block) -> NDArray[Any]:
        """Return a box of the tensor, in its dtype.

        Raises:
            SourceError: a file cannot be read, or has no such block.
        """
        out = np.empty(box.shape, self.spec.dtype.carrier())
        self.read_into(box, out)
        return out.view(self.spec.dtype.numpy())

    def read_into(self, box: Block, out: NDArray[Any]) -> None:
        """Fill an array of the box's shape with the bits of its elements, in row-major order; errors as for `read`."""
        _located(self.checkpoint, self.name).read_into(box, out)

    def require(self) -> None:
        """Check that every block of the tensor is in a file, and that its copies are equal.

        Raises:
            SourceError: a block is missing, or its value differs from rank to rank.
        """
        if not self.tensor.is_complete:
            raise SourceError(f"no file of {self.checkpoint.root} has all of its blocks", code="missing-blocks")
        if self.tensor.varies:
            raise SourceError(f"differs from rank to rank in {self.checkpoint.root}", code="varying-tensor")


class Expression(Protocol):
    """A rule that computes a tensor, box by box."""

    @property
    def dtype(self) -> DType:
        """Return the dtype of the result."""

    @property
    def shape(self) -> Shape:
        """Return the shape of the result."""

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Return the tensors that it reads, each element once."""

    @property
    def scratch(self) -> int:
        """Return the scratch bytes for each element of the result during evaluation."""

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Return the blocks in which it must be evaluated; empty if any will do."""

    @property
    def thread_bytes(self) -> int:
        """Return the memory of a thread that does not depend on the number of elements."""

    @property
    def held_bytes(self) -> int:
        """Return the memory that threads share."""

    def evaluate(self, box: Block, out: NDArray[Any]) -> None:
        """Evaluate a box into an array of its shape, in the dtype of the result.

        The bits of an element do not depend on the box.

        Raises:
            SourceError: an operand cannot be read, or its values are not valid for the expression.
        """

    def definition(self) -> str:
        """Return a text that tells expressions over the same operands apart, such as weights."""


class AnyBox:
    """The properties of expressions that are evaluated in any boxes, with scratch memory alone."""

    __slots__ = ()

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Return no blocks: any will do."""
        return ()

    @property
    def thread_bytes(self) -> int:
        """Return 0."""
        return 0

    @property
    def held_bytes(self) -> int:
        """Return 0."""
        return 0


class _Located:
    """The blocks of a tensor, found by their rows.

    Args:
        tensor: the tensor, with all blocks.
    """

    def __init__(self, tensor: StoredTensor) -> None:
        pieces = sorted(tensor.pieces, key=lambda piece: piece.block.start)
        self._tensor, self._pieces = tensor, pieces
        self._starts = [piece.block.start[:1] for piece in pieces]
        self._reaches = list(accumulate((piece.block.stop[:1] for piece in pieces), max))

    def read_into(self, box: Block, out: NDArray[Any]) -> None:
        """Fill an array with the bits of a box of the tensor."""
        tensor = self._tensor
        if box.start and not tensor.axes:
            first, last = bisect_right(self._reaches, box.start[:1]), bisect_left(self._starts, box.stop[:1])
            pieces = self._pieces[first:last]
            if len(pieces) == 1 and not pieces[0].strides and is_flat(box, pieces[0].block):
                shape, start = pieces[0].block.shape, pieces[0].block.start
                begin = position(box.start, start, row_major(shape)) * out.itemsize
                pieces[0].read([(begin, out.reshape(-1).view(np.uint8).data)])
                return
            tensor = StoredTensor(tensor.name, tensor.kind, tensor.shape, tuple(pieces))
        items = [range(start, stop) for start, stop in zip(box.start, box.stop, strict=True)]
        tensor.read_into(items, out)


@lru_cache(maxsize=LOCATED)
def _located(checkpoint: Checkpoint, name: str) -> _Located:
    """Return the blocks of a tensor, cached by the identity of its checkpoint."""
    return _Located(stored(checkpoint, name))


def stored(checkpoint: Checkpoint, name: str) -> StoredTensor:
    """Return a tensor in files; the first replica of each block is read."""
    tensor = checkpoint.tensors[name]
    pieces = tuple(
        StoredBlock(block, checkpoint.files[at.file].path, at.runs, checkpoint.coding, at.strides)
        for block, (at, *_) in tensor.shards
    )
    return StoredTensor(name, tensor.spec.dtype, tensor.spec.shape, pieces, tensor.axes)


def is_flat(box: Block, block: Block) -> bool:
    """Return whether a box is in a block, and contiguous there in row-major order.

    >>> from reshard.core.layout.block import Block
    >>> whole = Block((0, 0), (4, 6))
    >>> [is_flat(Block(*box), whole) for box in (((1, 0), (3, 6)), ((1, 2), (2, 5)), ((1, 0), (3, 5)))]
    [True, True, False]
    """
    partial = False
    edges = zip(box.start, box.stop, block.start, block.stop, strict=True)
    for begin, end, first, last in reversed([*edges]):
        if begin < first or end > last or (partial and end - begin != 1):
            return False
        partial = partial or (begin, end) != (first, last)
    return True
