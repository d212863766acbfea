"""Differences that a verification reports, with their location."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from reshard.core.layout.block import Block

Kind = Literal["values", "missing", "extra", "dtype", "shape", "text", "note", "object", "file", "size", "checksum"]


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference between a checkpoint and its expected state.

    Attributes:
        kind: `values` (elements differ), `missing` or `extra` (a tensor, in the target or in the file of one rank; it
            may be there but unreadable), `dtype`, `shape`, `text` (a `str` entry), `note` (in the `__metadata__` of a
            file), `object` (not a tensor, in a distributed checkpoint); and against a manifest `file` (missing or
            unreadable), `size`, `checksum`. The last is also used for a file that contradicts its own checksums.
        text: a message with the actual and the expected state.
        name: the name of the tensor in the target; None for a difference of a file or its note.
        side: `source` if a replica in the source differs from another replica there.
        rank: the rank of the file; None if there is no file.
        path: the path of the file.
        block: the block of the tensor that the file holds or should hold.
        index: the index of the first differing element in the whole tensor. This and all further attributes are only
            for `values`, except `found` and `expected`.
        count: number of compared elements that differ.
        found: the bits of the first differing element, as hexadecimal digits; for `dtype`, the dtype.
        expected: the expected value of `found`.
        reference: the source file with the expected element.
        dtype: the dtype of both elements.
        largest: the largest absolute difference of differing elements without NaNs, in float64.
        nans: number of differing elements that are NaN in either file.
    """

    kind: Kind
    text: str
    name: str | None = None
    side: Literal["source", "target"] = "target"
    rank: int | None = None
    path: str | None = None
    block: Block | None = None
    index: tuple[int, ...] | None = None
    count: int | None = None
    found: str | None = None
    expected: str | None = None
    reference: str | None = None
    dtype: str | None = None
    largest: float | None = None
    nans: int = 0

    @property
    def index_in_block(self) -> tuple[int, ...] | None:
        """Return the index of the first differing element in the block of the file.

        >>> from reshard.core.layout.block import Block
        >>> Difference("values", "", block=Block((4, 0), (8, 2)), index=(5, 1)).index_in_block
        (1, 1)
        """
        if self.index is None or self.block is None:
            return None
        return tuple(position - start for position, start in zip(self.index, self.block.start, strict=False))
