"""What a verification finds: each thing that is not as it should be, with its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from reshard.layout.block import Block

Kind = Literal["values", "missing", "extra", "dtype", "shape", "text", "note", "object", "file", "size", "checksum"]


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not as it should be.

    Attributes:
        kind: `values` (elements differ), `missing` or `extra` (a tensor, in the target or in one rank's file, which
            may be there so that it cannot be read), `dtype`, `shape`, `text` (a `str` entry), `note` (in the
            `__metadata__` of a file), `object` (what is no tensor, of a distributed checkpoint); and against a manifest
            `file` (not there, or not readable), `size`, `checksum`, which is also that of a file that contradicts the
            checksums that it carries.
        text: what was found and what was expected, in words.
        name: the tensor, as the target calls it; None where a file, or a note of it, is meant.
        side: `source` where a replica in the source differs from another one there.
        rank: of the file; None where no file is meant.
        path: of the file.
        block: the part of the tensor that the file holds, or shall hold.
        index: of the first element that differs, in the whole tensor, of `values`; so are all that follow.
        count: how many elements differ, of those that were compared.
        found: the bits of that element, as hexadecimal digits; of `dtype`, the dtype.
        expected: what it should be.
        reference: the source file that says so.
        dtype: of both, of `values`.
        largest: the largest absolute difference of the elements that differ, NaNs left out, in float64.
        nans: how many of the elements that differ are NaN, in either file.
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
        """The index in the block that the file holds, of the first element that differs.

        >>> from reshard.layout.block import Block
        >>> Difference("values", "", block=Block((4, 0), (8, 2)), index=(5, 1)).index_in_block
        (1, 1)
        """
        if self.index is None or self.block is None:
            return None
        return tuple(place - start for place, start in zip(self.index, self.block.start, strict=False))
