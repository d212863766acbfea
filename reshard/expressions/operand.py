"""Operands and expressions: the inputs of a computed tensor, and the rule that evaluates a box of it."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from reshard.core.model.stored import stored_tensor
from reshard.errors import SourceError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from reshard.core.layout.block import Block, Shape
    from reshard.core.model.checkpoint import Checkpoint, Tensor, TensorSpec
    from reshard.core.model.stored import StoredTensor
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
        return _stored(self.checkpoint, self.name).read_box(box)

    def read_into(self, box: Block, out: NDArray[Any]) -> None:
        """Fill an array of the box's shape with the bits of its elements, in row-major order; errors as for `read`."""
        _stored(self.checkpoint, self.name).read_into(box.ranges, out)

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


@lru_cache(maxsize=LOCATED)
def _stored(checkpoint: Checkpoint, name: str) -> StoredTensor:
    """Return a tensor of a checkpoint, cached by the identity of the checkpoint."""
    return stored_tensor(checkpoint.tensors[name], [file.path for file in checkpoint.files], checkpoint.coding)
