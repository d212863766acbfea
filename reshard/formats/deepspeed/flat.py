"""Cut whole tensors out of the flat buffers of ranks.

ZeRO flattens parameters in row-major order, and gives each rank one range of their elements. A range is at most
2 x dims - 1 boxes (`flat_boxes`), which lie in the rank's buffer one behind the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from reshard.core.layout.block import flat_boxes
from reshard.core.model.entries import Extent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reshard.core.layout.block import Block, Shape
    from reshard.dtypes import DType


@dataclass(frozen=True, slots=True, eq=False)
class Fragments:
    """The boxes of a tensor that is cut into ranges of its elements; shared by tensors that are cut alike.

    Attributes:
        blocks: the boxes, in row-major order.
        ranges: the number of the range that contains each.
        offsets: the offset of each in its range, in elements.
        sizes: the number of elements of each.
    """

    blocks: tuple[Block, ...]
    ranges: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@lru_cache(maxsize=1 << 12)
def fragments(shape: Shape, ends: tuple[int, ...]) -> Fragments:
    """Return the boxes of a tensor whose ranges end at these elements; the last end is its size.

    >>> cut = fragments((2, 3), (4, 6))
    >>> [(str(block), number, offset) for block, number, offset in zip(cut.blocks, cut.ranges, cut.offsets)]
    [('[0:1, 0:3]', 0, 0), ('[1:2, 0:1]', 0, 3), ('[1:2, 1:3]', 1, 0)]
    """
    blocks: list[Block] = []
    numbers: list[int] = []
    offsets: list[int] = []
    sizes: list[int] = []
    begin = 0
    for number, end in enumerate(ends):
        offset = 0
        for box in flat_boxes(shape, begin, end):
            blocks.append(box)
            numbers.append(number)
            offsets.append(offset)
            sizes.append(box.size)
            offset += sizes[-1]
        begin = end
    return Fragments(tuple(blocks), tuple(numbers), tuple(offsets), tuple(sizes))


class Flat(NamedTuple):
    """A tensor in ranges of flat buffers.

    Attributes:
        dtype: the dtype of its elements.
        shape: its shape.
        ends: the end of each range, in elements of the tensor.
        files: the number of the file of each range.
        begins: the offset of each range in its file, in bytes.
    """

    dtype: DType
    shape: Shape
    ends: tuple[int, ...]
    files: tuple[int, ...]
    begins: tuple[int, ...]

    def pieces(self) -> Iterator[tuple[Block, Extent]]:
        """Yield its boxes, each with the extent of its bytes."""
        cut, width = fragments(self.shape, self.ends), self.dtype.itemsize
        for block, number, offset, size in zip(cut.blocks, cut.ranges, cut.offsets, cut.sizes, strict=True):
            yield block, Extent(self.files[number], ((self.begins[number] + offset * width, size * width),))
