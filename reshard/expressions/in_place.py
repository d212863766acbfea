"""Tensors that are computed from a single operand, element by element, each copy of a block from its own copy.

1. A computed tensor has the blocks, the files and so the ranks of its operand. Its bytes are in the same files, at
   offsets behind every stored byte (`LAYER`); so plans, pictures and comparisons see its replicas, and reading one rank
   needs the files of that rank only.
2. `ChangingStore` reads them: it fills the buffer with the elements of the operand, and changes them there. Requests at
   URLs are made together, as for stored tensors.
3. Two tensors may have one operand: each has its own offsets.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from reshard.core.layout.block import flat_boxes
from reshard.core.layout.strided import SCRATCH, TILE_BYTES
from reshard.core.model.checkpoint import Sharding
from reshard.core.model.entries import wants as wants_of
from reshard.core.model.stored import StoredBlock
from reshard.core.storage.base import Around
from reshard.core.storage.cipher import store_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from reshard.core.layout.block import Block, Shape
    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.model.entries import Runs
    from reshard.core.storage.base import Coding, Want
    from reshard.dtypes import DType
    from reshard.expressions.operand import Operand

LAYER = 1 << 44
"""Computed bytes of a file begin at this offset; if they are computed from computed ones, at a multiple of it."""

_ALIGNMENT = 64
_CHANGED_BYTES, _COPY_BYTES = 600, 300


class Resource(Protocol):
    """Memory that expressions share, such as a cache. Compared by identity."""

    def nbytes(self, threads: int) -> int:
        """Return the memory that it takes with a number of threads."""


class InPlaceRule(Protocol):
    """A rule that changes elements of a tensor, and keeps its dtype and shape."""

    @property
    def resource(self) -> Resource:
        """Return the memory that it needs."""

    def definition(self) -> str:
        """Return a text that tells rules apart."""

    def change(self, path: str, block: Block, first: int, elements: NDArray[Any]) -> None:
        """Change elements of a block, which follow each other in row-major order.

        The result of an element does not depend on the other elements of the call.

        Args:
            path: the file of the block, for messages.
            block: the block.
            first: the number of the first element in the block.
            elements: the elements.

        Raises:
            SourceError: their values are not valid for the rule.
        """


class InPlace(NamedTuple):
    """An expression over one tensor, which is changed in the buffer that it is read into."""

    operand: Operand
    rule: InPlaceRule


class _Copies(NamedTuple):
    """The copies of the blocks of tensors with one sharding.

    Attributes:
        sharding: the sharding of the computed tensors.
        elements: for each run of bytes of the computed tensor, the number of elements.
        runs: for each of them, the index of the same run in the operand.
        of_file: by path and index of the run, the block and its strides.
    """

    sharding: Sharding
    elements: tuple[int, ...]
    runs: tuple[int, ...]
    of_file: Mapping[tuple[str, int], tuple[Block, Shape]]

    @classmethod
    def of(cls, sharding: Sharding, paths: Sequence[str]) -> _Copies:
        """Number the runs: as in the operand if each stands for one block in each file, else one by one."""
        copies = [
            (block, at) for block, replicas in zip(sharding.blocks, sharding.replicas, strict=True) for at in replicas
        ]
        sizes: dict[int, int] = {}
        same = not sharding.is_strided and len({at[:2] for _, at in copies}) == len(copies)
        same = same and all(sizes.setdefault(at.runs_index, block.size) == block.size for block, at in copies)
        if same:
            count = max(sizes, default=-1) + 1
            elements = tuple(sizes.get(number, 0) for number in range(count))
            of_file = {(paths[at.file], at.runs_index): (block, at.strides) for block, at in copies}
            return cls(sharding, elements, tuple(range(count)), of_file)
        number, replicas = 0, []
        for of_block in sharding.replicas:
            replicas.append(tuple(at._replace(runs_index=number + n, strides=()) for n, at in enumerate(of_block)))
            number += len(of_block)
        return cls(
            Sharding(sharding.blocks, tuple(replicas)), tuple(block.size for block, _ in copies),
            tuple(at.runs_index for _, at in copies),
            {(paths[at.file], n): (block, at.strides) for n, (block, at) in enumerate(copies)},
        )  # fmt: skip


class _Changed(NamedTuple):
    """A computed tensor.

    Attributes:
        begins: the offset of each of its runs.
        dtype: its dtype.
        runs: the runs of the operand.
        copies: its blocks.
        rule: the rule that computes it.
    """

    begins: tuple[int, ...]
    dtype: DType
    runs: tuple[Runs, ...]
    copies: _Copies
    rule: InPlaceRule


@dataclass(frozen=True, slots=True, eq=False)
class Changing:
    """The coding of files with tensors that are computed in place.

    Attributes:
        inner: the coding of the stored files.
        first: the offset of the first computed byte of each file.
        tensors: the computed tensors, in the order of their offsets.
        digest: a digest of the rules and the names of their operands.
    """

    inner: Coding | None
    first: int
    tensors: tuple[_Changed, ...]
    digest: str

    def nbytes(self, threads: int) -> int:
        """Return the memory for changes: of rules, of strided reads, and of the tables of offsets."""
        resources = dict.fromkeys(each.rule.resource for each in self.tensors)
        copies = {each.copies.sharding: each.copies for each in self.tensors}.values()
        strided = any(strides for each in copies for _, strides in each.of_file.values())
        located = _CHANGED_BYTES * len(self.tensors) + _COPY_BYTES * sum(len(each.of_file) for each in copies)
        nbytes = located + sum(each.nbytes(threads) for each in resources) + strided * threads * (SCRATCH + TILE_BYTES)
        return nbytes + (self.inner.nbytes(threads) if self.inner else 0)

    def store(self) -> ChangingStore:
        """Return a store that computes the tensors."""
        return ChangingStore(self)

    def at(self, offset: int) -> tuple[_Changed, int]:
        """Return the tensor and the index of its run that contain a computed byte."""
        found = self.tensors[bisect_right(self.tensors, offset, key=lambda each: each.begins[0]) - 1]
        return found, bisect_right(found.begins, offset) - 1

    def operand_offset(self, offset: int) -> int:
        """Return the begin in the operand of the run with a computed byte; return other offsets unchanged."""
        if offset < self.first:
            return offset
        found, number = self.at(offset)
        return next((begin for begin, _ in found.runs[found.copies.runs[number]]), 0)


class ChangingStore(Around):
    """A store that computes tensors in the buffers that it fills; thread-safe."""

    def __init__(self, changing: Changing) -> None:
        super().__init__(store_of(changing.inner))
        self._changing = changing

    def read(self, wants: Sequence[Want]) -> None:
        """Fill buffers; all stored bytes are read together."""
        stored: list[Want] = []
        changes: list[tuple[InPlaceRule, str, Block, int, NDArray[Any]]] = []
        strided: list[tuple[StoredBlock, int, NDArray[Any]]] = []
        for path, offset, buffer in wants:
            if offset < self._changing.first:
                stored.append((path, offset, buffer))
                continue
            changed, number = self._changing.at(offset)
            block, strides = changed.copies.of_file[path, number]
            runs, begin = changed.runs[changed.copies.runs[number]], offset - changed.begins[number]
            elements: NDArray[Any] = np.frombuffer(buffer, changed.dtype.numpy())
            first = begin // changed.dtype.itemsize
            changes.append((changed.rule, path, block, first, elements))
            if strides or not runs:
                at = StoredBlock(block, path, runs, self._changing.inner, strides)
                strided.append((at, first, elements.view(changed.dtype.carrier())))
            else:
                stored += wants_of(path, runs, begin, buffer)
        if stored:
            self.inner.read(stored)
        for at, first, elements in strided:
            _read_elements(at, first, elements)
        for rule, path, block, first, elements in changes:
            rule.change(path, block, first, elements)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill one buffer."""
        self.read([(path, offset, buffer)])

    def __reduce__(self) -> tuple[Any, ...]:
        return ChangingStore, (self._changing,)


def _read_elements(at: StoredBlock, first: int, elements: NDArray[Any]) -> None:
    """Fill an array with elements of a block in row-major order."""
    done = 0
    for box in flat_boxes(at.block.shape, first, first + len(elements)):
        items = box.ranges
        at.read_items(items, elements[done : done + box.size].reshape(box.shape))
        done += box.size


def changed(source: Checkpoint, expressions: Mapping[str, InPlace]) -> Checkpoint:
    """Return a checkpoint with tensors that are computed in place: see `computed`."""
    layer, coding = 1, source.coding
    while coding is not None:
        layer = max(layer, coding.first // LAYER + 1 if isinstance(coding, Changing) else 1)
        coding = getattr(coding, "inner", None)
    position = first = layer * LAYER
    paths = [file.path for file in source.files]
    copies: dict[Sharding, _Copies] = {}
    tensors = dict(source.tensors)
    laid_out: list[_Changed] = []
    for name, expression in expressions.items():
        tensor = expression.operand.tensor
        if tensor.sharding not in copies:
            copies[tensor.sharding] = _Copies.of(tensor.sharding, paths)
        of_tensor, dtype = copies[tensor.sharding], tensor.spec.dtype
        begins, sizes = [], [count * dtype.itemsize for count in of_tensor.elements]
        for nbytes in sizes:
            begins.append(position)
            position += -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
        tensors[name] = tensor._replace(
            spec=tensor.spec._replace(name=name), sharding=of_tensor.sharding,
            runs=tuple(((begin, nbytes),) for begin, nbytes in zip(begins, sizes, strict=True)),
        )  # fmt: skip
        if begins:
            laid_out.append(_Changed(tuple(begins), dtype, tensor.runs, of_tensor, expression.rule))
    rules = [(name, each.rule.definition(), each.operand.name) for name, each in expressions.items()]
    digest = sha256(repr(rules).encode()).hexdigest()
    return replace(source, tensors=tensors, coding=Changing(source.coding, first, tuple(laid_out), digest))
