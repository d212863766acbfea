"""Cut tensors into boxes of a few megabytes, and read the boxes from the files of a checkpoint.

* `FileBoxes` reads each byte of a tensor once, in the order of the files: the first replica of each block.
* `RowBoxes` reads the same boxes of several checkpoints, even if their blocks differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reshard.core.layout.block import Block
from reshard.core.model.entries import wants
from reshard.core.model.stored import StoredBlock
from reshard.core.plan import budget
from reshard.core.storage.cipher import store_of
from reshard.core.storage.places import can, in_batches
from reshard.errors import SourceError, names

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from reshard.core.layout.block import Shape
    from reshard.core.model.checkpoint import Checkpoint, Tensor
    from reshard.core.model.stored import StoredTensor
    from reshard.core.storage.base import Coding, ReadStore, Want

Array = np.ndarray[Any, np.dtype[Any]]

BOX_BYTES = 2 << 20
"""The most bytes of a box, for the dtype with the fewest bytes; it stays in a core's cache."""


@dataclass(frozen=True, slots=True)
class BoxGrid:
    """The boxes that cut a shape, in row-major order, each up to a maximum number of elements.

    Attributes:
        shape: the shape.
        axis: the number of leading axes that are cut: a box has one index along each, but a range along the last.
        rows: the maximum length of this range.
    """

    shape: Shape
    axis: int
    rows: int

    @classmethod
    def of(cls, shape: Shape, most: int) -> BoxGrid:
        """Return the cut of a shape into boxes of at most `most` elements.

        >>> [str(box) for box in BoxGrid.of((2, 5, 3), 9)], len(BoxGrid.of((0, 3), 9))
        (['[0:1, 0:3, 0:3]', '[0:1, 3:5, 0:3]', '[1:2, 0:3, 0:3]', '[1:2, 3:5, 0:3]'], 0)
        """
        axis, inner = len(shape), 1
        while axis and inner * shape[axis - 1] <= most:
            axis -= 1
            inner *= shape[axis]
        return cls(shape, axis, max(1, most // max(inner, 1)))

    def __len__(self) -> int:
        if not prod(self.shape):
            return 0
        return prod(self.shape[: self.axis - 1]) * -(-self.shape[self.axis - 1] // self.rows) if self.axis else 1

    def __iter__(self) -> Iterator[Block]:
        return (self.box(number) for number in range(len(self)))

    def box(self, number: int) -> Block:
        """Return the box with an index."""
        if not self.axis:
            return Block.whole(self.shape)
        extent = self.shape[self.axis - 1]
        outer, part = divmod(number, -(-extent // self.rows))
        start = tuple(int(n) for n in np.unravel_index(outer, self.shape[: self.axis - 1])) if self.axis > 1 else ()
        first = part * self.rows
        after = self.shape[self.axis :]
        return Block(
            (*start, first, *(0 for _ in after)),
            (*(n + 1 for n in start), min(extent, first + self.rows), *after),
        )


class TensorPart(NamedTuple):
    """A part of a tensor: some of its blocks, or some boxes of one block.

    Attributes:
        tensor: the number of the tensor.
        blocks: the numbers of the first block, and of the one after the last.
        boxes: the numbers of the first box and of the one after the last; None for all boxes.
    """

    tensor: int
    blocks: tuple[int, int]
    boxes: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class FileBox:
    """The elements of a box of a block, in the order of its file.

    Attributes:
        tensor: the number of the tensor.
        file: the number of the file.
        codes: the bits of the elements, one after the other.
        block: the block of the tensor.
        order: the axes of the block, by descending strides in the file.
        box: the box, in the axes of `order`, or in one axis that counts all elements.
    """

    tensor: int
    file: int
    codes: Array
    block: Block
    order: tuple[int, ...]
    box: Block

    def first_index(self, positions: Array, shape: Shape, space: Shape | None) -> int:
        """Return the smallest row-major index in the whole tensor among chosen elements.

        Args:
            positions: the positions of the elements in `codes`.
            shape: the shape of the tensor.
            space: the coordinate space of its blocks, if it is not the shape.
        """
        whole = space or shape
        if not whole:
            return 0
        inside = np.unravel_index(positions, self.box.shape)
        moved = [index + start for index, start in zip(inside, self.box.start, strict=True)]
        coordinates = [moved[0]]
        if self.order:
            coordinates = [moved[self.order.index(axis)] for axis in range(len(self.order))]
        elif self.block.shape != (self.block.size,):
            coordinates = list(np.unravel_index(moved[0], self.block.shape))
        at = [index + start for index, start in zip(coordinates, self.block.start, strict=True)]
        return int(np.ravel_multi_index(at, whole).min())


@dataclass(frozen=True, slots=True, eq=False)
class FileBoxes:
    """The boxes of tensors in the order of the files; small enough to send to workers.

    Attributes:
        tensors: the tensors; every block is in a file.
        paths: the paths of the files.
        coding: decodes or decrypts the files.
        box_bytes: the most bytes of a box.
    """

    tensors: tuple[Tensor, ...]
    paths: tuple[str, ...]
    coding: Coding | None
    box_bytes: int = BOX_BYTES

    @classmethod
    def of(cls, checkpoint: Checkpoint, names: Iterable[str]) -> FileBoxes:
        """Return the boxes of some tensors of a checkpoint."""
        tensors = tuple(checkpoint.tensors[name] for name in names)
        return cls(tensors, tuple(file.path for file in checkpoint.files), checkpoint.coding)

    def spans(self) -> list[tuple[TensorPart, ...]]:
        """Divide all tensors into tasks of about `budget.TASK_BYTES`."""
        tasks: list[list[TensorPart]] = [[]]
        room = budget.TASK_BYTES
        for number, tensor in enumerate(self.tensors):
            itemsize = tensor.spec.dtype.itemsize
            first, blocks = 0, tensor.sharding.blocks
            for at, block in enumerate(blocks):
                nbytes = block.size * itemsize
                if nbytes <= room:
                    room -= nbytes
                    continue
                if at > first:
                    tasks[-1].append(TensorPart(number, (first, at)))
                tasks.append([])
                room = budget.TASK_BYTES - nbytes
                first = at
                if nbytes > budget.TASK_BYTES:
                    step = max(1, budget.TASK_BYTES // self.box_bytes)
                    count = len(self._cut(tensor, at)[1])
                    tasks[-1:] = [
                        [TensorPart(number, (at, at + 1), (begin, min(count, begin + step)))]
                        for begin in range(0, count, step)
                    ]
                    tasks.append([])
                    first, room = at + 1, budget.TASK_BYTES
            if first < len(blocks):
                tasks[-1].append(TensorPart(number, (first, len(blocks))))
        return [tuple(task) for task in tasks if task]

    def read(self, spans: Sequence[TensorPart]) -> Iterator[tuple[int, FileBox]]:
        """Read the boxes of a task, each with the index of its span; the next box overwrites the buffer.

        Raises:
            SourceError: a file cannot be read, or is shorter than its header says.
        """
        for (number, box), _, reader in in_batches(self._steps(spans)):
            if reader is not None:
                reader()
            yield number, box

    def _steps(self, spans: Sequence[TensorPart]) -> Iterator[tuple[tuple[Any, ...], ReadStore, list[Want]]]:
        """Yield read steps: a box, with the function or the requests that read it."""
        store = store_of(self.coding)
        memory = np.empty(self.box_bytes, np.uint8)
        remote = any(can(path).has_latency for path in self.paths)
        for number, span in enumerate(spans):
            tensor = self.tensors[span.tensor]
            carrier = tensor.spec.dtype.carrier()
            for index in range(*span.blocks):
                (piece, file), cut, order = self._cut(tensor, index)
                for at in range(*(span.boxes or (0, len(cut)))):
                    box = cut.box(at)
                    flat = memory[: box.size * carrier.itemsize].view(carrier)
                    step = (number, FileBox(span.tensor, file, flat, piece.block, order, box))
                    if order:
                        yield (step, None, _strided_reader(piece, order, box, flat)), store, []
                    elif remote and piece.runs:
                        begin = box.start[0] * carrier.itemsize
                        view = flat.view(np.uint8).data
                        yield (step, None, None), store, wants(piece.path, piece.runs, begin, view)
                    else:
                        yield (step, None, _flat_reader(piece, box, flat)), store, []

    def _cut(self, tensor: Tensor, index: int) -> tuple[tuple[StoredBlock, int], BoxGrid, tuple[int, ...]]:
        """Return a block with the number of its file, its cut, and the order of its axes if it is strided."""
        block = tensor.sharding.blocks[index]
        extent = tensor.sharding.replicas[index][0].extent(tensor.runs)
        itemsize = tensor.spec.dtype.itemsize
        piece = StoredBlock(block, self.paths[extent.file], extent.runs, self.coding, extent.strides)
        most = max(1, self.box_bytes // itemsize)
        if not extent.strides:
            if extent.runs and (missing := block.size * itemsize - sum(nbytes for _, nbytes in extent.runs)) > 0:
                raise SourceError(f"{piece.path} lacks {missing} bytes of block {block}", code="truncated")
            return (piece, extent.file), BoxGrid.of((block.size,), most), ()
        order = tuple(sorted(range(len(block.shape)), key=lambda axis: -extent.strides[axis]))
        return (piece, extent.file), BoxGrid.of(tuple(block.shape[axis] for axis in order), most), order


def _flat_reader(piece: StoredBlock, box: Block, flat: Array) -> Any:
    begin = box.start[0] * flat.itemsize
    return lambda: piece.read([(begin, flat.view(np.uint8).data)])


def _strided_reader(piece: StoredBlock, order: Sequence[int], box: Block, flat: Array) -> Any:
    """Return a function that reads a box of a strided block into an array in the order of the file."""
    inverse = [order.index(axis) for axis in range(len(order))]
    out = flat.reshape(box.shape).transpose(inverse)
    items = [range(box.start[axis], box.stop[axis]) for axis in inverse]
    return lambda: piece.read_items(items, out)


def incomplete(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yield tensors that lack blocks, with the reasons."""
    for name, tensor in checkpoint.tensors.items():
        if not tensor.is_complete:
            absent = [str(shard.block) for shard in tensor.shards if not shard.replicas]
            yield name, f"is not complete: no file has block {names(absent)}"


class RowBoxes:
    """Reads boxes of a tensor one after the other, into the same memory."""

    def __init__(self, stored: StoredTensor) -> None:
        self._stored = stored
        self._memory = np.empty(0, stored.kind.carrier())

    def read(self, box: Block) -> Array:
        """Return the bits of the elements of a box, one after the other; they are valid until the next call.

        Raises:
            SourceError: a file cannot be read, or is shorter than its header says.
        """
        if len(self._memory) < box.size:
            self._memory = np.empty(box.size, self._memory.dtype)
        out = self._memory[: box.size]
        self._stored.read_into(box.ranges, out.reshape(box.shape))
        return out
