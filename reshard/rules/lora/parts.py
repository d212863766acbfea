"""The parts of an adapter: pairs of matrices, and copies of the weights that it was trained on."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.core.model.entries import wants
from reshard.core.storage.places import any_store
from reshard.errors import ChangedError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from reshard.core.model.checkpoint import SourceFile


class Pair(NamedTuple):
    """A product of two matrices that is added to one weight.

    Attributes:
        weight: the name of the weight.
        a, b: the names of the two matrices in the adapter's file.
        shape: the shape of their product: rows of B, columns of A.
        rank: the columns of B, and rows of A.
        scale: the factor of the product.
        transposed: the product is added transposed: to an embedding, or to a layer of Conv1D. An adapter says that of
            all layers at once, until `conv1d.oriented` looks at each.
    """

    weight: str
    a: str
    b: str
    shape: tuple[int, int]
    rank: int
    scale: float
    transposed: bool

    @property
    def embedding(self) -> bool:
        """Return whether the weight is an embedding for PEFT."""
        return ".lora_embedding_" in self.a

    @property
    def nbytes(self) -> int:
        """Return the size of the two matrices as float32, in bytes."""
        return 4 * self.rank * sum(self.shape)


class Copy(NamedTuple):
    """A tensor of the model, as it was when the adapter was trained.

    Attributes:
        weight: the name of the tensor in the model.
        name: the name of the copy in the adapter's file.
        transposed: never; a `Pair` may be.
    """

    weight: str
    name: str
    transposed: bool = False


class Adapter(NamedTuple):
    """An opened adapter.

    Attributes:
        file: the file with the matrices.
        pairs: the pair of each weight.
        copies: copies of the model's own tensors, to be compared with them.
        digest: a digest of the file and of the parameters of its pairs.
    """

    file: SourceFile
    pairs: tuple[Pair, ...]
    copies: tuple[Copy, ...]
    digest: str

    def require_unchanged(self) -> None:
        """Raise `ChangedError` if the file changed since it was opened."""
        if not any_store().status(self.file.path).is_unchanged_since(self.file.status):
            raise ChangedError(
                f"{self.file.path} changed since it was opened", code="source-changed", hint="run the command again"
            )

    def matrix(self, name: str) -> NDArray[Any]:
        """Read a whole matrix, as float32."""
        import numpy as np

        entry = self.file.index.entries[name]
        return self.rows(name, 0, entry.shape[0]).astype(np.float32)

    def rows(self, name: str, first: int, last: int) -> NDArray[Any]:
        """Read rows of a matrix; a vector is a matrix of one column."""
        import numpy as np

        entry = self.file.index.entries[name]
        width = prod(entry.shape[1:])
        pitch = width * entry.dtype.itemsize
        content = bytearray((last - first) * pitch)
        any_store().read(wants(self.file.path, entry.runs, first * pitch, memoryview(content)))
        return np.frombuffer(content, entry.dtype.numpy()).reshape(last - first, width)
