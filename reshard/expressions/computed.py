"""Checkpoints with computed tensors: they are laid out in a virtual file, and evaluated when it is read.

1. `computed` lays the blocks of all computed tensors out one after the other in that file, in row-major order. Plans,
   arrays, rules and comparisons then see blocks and byte ranges as of any other checkpoint.
2. `ComputingStore` reads it: a range of bytes is a range of elements of a block, which is evaluated box by box.
3. The files of all operands are files of the checkpoint, too, so that they are watched for changes.

A weight with an adapter stays in the files of its operand (`in_place`).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from hashlib import sha256
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard.core.layout.block import Block, flat_boxes
from reshard.core.layout.strided import SCRATCH, TILE_BYTES
from reshard.core.model.checkpoint import Sharding, SourceFile, Tensor, TensorSpec
from reshard.core.model.digests import index_digests
from reshard.core.model.entries import FileIndex, Replica
from reshard.core.storage.base import Around
from reshard.core.storage.cipher import store_of
from reshard.core.storage.places import can
from reshard.expressions.in_place import Changing, InPlace, changed
from reshard.expressions.operand import LOCATED, LOCATED_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reshard.core.layout.block import Shape
    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.model.entries import Runs
    from reshard.core.storage.base import Coding, Want
    from reshard.expressions.operand import Expression, Operand

_PIECE = 1 << 19
"""The most elements that are evaluated at once; more would not make reads faster."""

_REMOTE_PIECE = 1 << 21
"""The same, if requests for operands have a high latency."""

_ALIGNMENT = 64
_SPAN_BYTES = 300
_IMPORTED_BYTES = 6 << 20  # numpy's and ml_dtypes' conversions


@dataclass(frozen=True, slots=True)
class ComputedBlock:
    """A block of a computed tensor, and the offset of its first byte in the file."""

    begin: int
    block: Block
    expression: Expression


@dataclass(frozen=True, slots=True, eq=False)
class Computing:
    """The coding of a checkpoint with computed tensors.

    Attributes:
        inner: the coding of the stored files.
        path: the path of the virtual file of computed tensors.
        nbytes_of_file: the size of the virtual file.
        spans: the blocks in it, in order.
        piece: the most elements that are evaluated at once.
    """

    inner: Coding | None
    path: str
    nbytes_of_file: int
    spans: tuple[ComputedBlock, ...]
    piece: int

    def nbytes(self, threads: int) -> int:
        """Return the memory for evaluation: the buffers of each thread, and the spans."""
        expressions = dict.fromkeys(span.expression for span in self.spans)
        scratch = max((each.scratch + each.dtype.itemsize for each in expressions), default=0)
        fixed = sum(each.held_bytes for each in expressions) + _IMPORTED_BYTES
        codings = {op.checkpoint.coding for each in expressions for op in each.operands} | {self.inner}
        inner = sum(coding.nbytes(threads) for coding in codings if coding is not None)
        fixed += (
            LOCATED
            * LOCATED_BYTES
            * max((len(op.tensor.sharding.blocks) for each in expressions for op in each.operands), default=0)
        )
        of_thread = max((each.thread_bytes for each in expressions), default=0)
        of_thread += self.piece * scratch + SCRATCH + TILE_BYTES  # of operands that are gathered from several blocks
        return _SPAN_BYTES * len(self.spans) + threads * of_thread + fixed + inner

    def span_at(self, offset: int) -> ComputedBlock:
        """Return the block at an offset of the file."""
        return self.spans[bisect_right(self.spans, offset, key=lambda span: span.begin) - 1]

    def store(self) -> ComputingStore:
        """Return a store that evaluates the tensors."""
        return ComputingStore(self)


def _cost(expression: Expression) -> float:
    """Return the bytes that are read for each byte of an expression."""
    nbytes = prod(expression.shape) * expression.dtype.itemsize
    return sum(_read_bytes(op.checkpoint, op.name) for op in expression.operands) / max(nbytes, 1)


def _read_bytes(checkpoint: Checkpoint, name: str) -> float:
    """Return the bytes that are read for a whole tensor."""
    tensor = checkpoint.tensors[name]
    return tensor.spec.nbytes * cost_of(checkpoint, tensor.sharding.replicas[0][0].file, tensor.runs)


def cost_of(checkpoint: Checkpoint, file: int, runs: Sequence[Runs]) -> float:
    """Return the bytes that are read for each byte of a tensor: 1, unless it is computed."""
    offset = next((of_block[0][0] for of_block in runs if of_block), 0)
    block = block_at(checkpoint.coding, checkpoint.files[file].path, offset)
    return 1.0 if block is None else _cost(block.expression)


def computations(coding: object) -> Iterator[Computing | Changing]:
    """Yield the codings of a checkpoint that compute tensors, from the last to the first."""
    while isinstance(coding, Computing | Changing):
        yield coding
        coding = coding.inner


def block_at(coding: object, path: str, offset: int) -> ComputedBlock | None:
    """Return the computed block at an offset of a file, below changes in place; None for a stored file."""
    for each in computations(coding):
        if isinstance(each, Changing):
            offset = each.operand_offset(offset)
        elif each.path == path:
            return each.span_at(offset)
    return None


class ComputingStore(Around):
    """A store that evaluates computed tensors; thread-safe."""

    def __init__(self, computing: Computing) -> None:
        super().__init__(store_of(computing.inner))
        self._computing = computing

    def size(self, path: str) -> int:
        """Return the size of a file."""
        return self._computing.nbytes_of_file if path == self._computing.path else self.inner.size(path)

    def read(self, wants: Sequence[Want]) -> None:
        """Fill buffers; stored bytes are read together."""
        stored = [want for want in wants if want[0] != self._computing.path]
        if stored:
            self.inner.read(stored)
        for path, offset, buffer in wants:
            if path == self._computing.path:
                self._evaluate(offset, buffer)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill one buffer."""
        self.read([(path, offset, buffer)])

    def drop_cache(self, path: str, first: int = 0, last: int | None = None) -> None:
        """Evict a byte range of a stored file from the page cache."""
        if path != self._computing.path:
            self.inner.drop_cache(path, first, last)

    def _evaluate(self, offset: int, buffer: memoryview) -> None:
        """Fill a buffer with computed elements of one block."""
        span = self._computing.span_at(offset)
        dtype = span.expression.dtype
        first = (offset - span.begin) // dtype.itemsize
        elements: np.ndarray[Any, Any] = np.frombuffer(buffer, dtype.numpy())
        done = 0
        for box in _boxes(span.block.shape, first, first + len(elements), self._computing.piece):
            at = Block(*(tuple(map(sum, zip(a, span.block.start, strict=True))) for a in (box.start, box.stop)))
            span.expression.evaluate(at, elements[done : done + box.size].reshape(box.shape))
            done += box.size

    def __reduce__(self) -> tuple[Any, ...]:
        return ComputingStore, (self._computing,)


def _boxes(shape: Shape, begin: int, end: int, most: int) -> Iterator[Block]:
    """Yield the boxes of a range of elements, none larger than `most` elements.

    >>> [str(box) for box in _boxes((4, 6), 3, 24, 6)]
    ['[0:1, 3:6]', '[1:2, 0:6]', '[2:3, 0:6]', '[3:4, 0:6]']
    """
    unit = 1
    for extent in reversed(shape):
        if unit * extent > most:
            break
        unit *= extent
    step = most // unit * unit
    while begin < end:
        stop = min(end, begin // unit * unit + step)
        yield from flat_boxes(shape, begin, stop)
        begin = stop


def computed(
    source: Checkpoint, expressions: Mapping[str, Expression | InPlace], others: Sequence[Checkpoint] = ()
) -> Checkpoint:
    """Return a checkpoint with computed tensors in place of, or in addition to, its own.

    Args:
        source: the checkpoint; tensors without an expression stay stored.
        expressions: the expressions, by the names of their tensors. A tensor that `source` has keeps its blocks; one
            that is computed in place has the blocks and files of its operand, which is a tensor of `source`.
        others: further checkpoints that expressions read.
    """
    in_place = {name: each for name, each in expressions.items() if isinstance(each, InPlace)}
    apart = {name: each for name, each in expressions.items() if not isinstance(each, InPlace)}
    if in_place:
        source = changed(source, in_place)
    return _apart(source, apart, others) if apart else source


def _apart(source: Checkpoint, expressions: Mapping[str, Expression], others: Sequence[Checkpoint]) -> Checkpoint:
    """Return a checkpoint with computed tensors in a virtual file."""
    spans: list[ComputedBlock] = []
    tensors = dict(source.tensors)
    index = FileIndex(source.file_format or "safetensors", {}, header_id=-1)
    stripped: list[SourceFile] = []
    headers = index_digests([file.index for file in source.files])
    for other in others:
        begin = len(source.files) + len(stripped)
        stripped += [_watched(file, index, begin) for file in other.files]
        headers += index_digests([file.index for file in other.files])
    number = len(source.files) + len(stripped)
    position = 0
    laid_out: dict[Expression, Tensor] = {}
    for name, expression in expressions.items():
        spec = TensorSpec(name, expression.dtype, expression.shape)
        if expression in laid_out:  # tied tensors are computed once
            tensors[name] = laid_out[expression]._replace(spec=spec)
            continue
        before = source.tensors.get(name)
        blocks = expression.blocks
        if not blocks and before and before.spec.shape == spec.shape and not before.space:
            blocks = before.sharding.blocks
        blocks = blocks or (Block.whole(spec.shape),)
        runs = []
        for block in blocks:
            runs.append(((position, block.size * spec.dtype.itemsize),))
            spans.append(ComputedBlock(position, block, expression))
            position += -(-max(block.size * spec.dtype.itemsize, 1) // _ALIGNMENT) * _ALIGNMENT
        replicas = tuple((Replica(number, index),) for index in range(len(blocks)))
        tensor = Tensor(spec, Sharding(blocks, replicas), tuple(runs), listed=before.listed if before else True)
        tensors[name] = laid_out[expression] = tensor
    identities = _Identities([source, *others])
    rules = [(name, each.definition(), list(map(identities.of, each.operands))) for name, each in expressions.items()]
    digest = sha256(repr((rules, headers)).encode()).hexdigest()
    path = f"computed:{digest[:32]}"
    files = (*source.files, *stripped)
    # An operand's checkpoint may be the source before some of its options were replaced: its files are the same.
    reads_source = any(op.checkpoint.files is source.files for each in expressions.values() for op in each.operands)
    inputs = [*range(len(source.files))] if reads_source else []
    inputs += range(len(source.files), len(files))
    virtual = SourceFile(path, position, 0, index, inputs=tuple(inputs))
    remote = any(can(file.path).has_latency for file in files)
    coding = Computing(
        source.coding, path, position, tuple(spans), _REMOTE_PIECE if remote else _PIECE,
    )  # fmt: skip
    ranks = (*source.ranks, *(source.ranks[-1:] or (0,)) * (len(stripped) + 1))
    return replace(source, tensors=tensors, files=(*files, virtual), ranks=ranks, coding=coding)


class _Identities:
    """Tells operands apart: their checkpoints, blocks, byte ranges, and how their bytes are computed in turn."""

    def __init__(self, checkpoints: Sequence[Checkpoint]) -> None:
        self._paths = [[file.path for file in checkpoint.files] for checkpoint in checkpoints]
        self._numbers: dict[Checkpoint, int] = {}
        self._shardings: dict[Sharding, str] = {}

    def of(self, operand: Operand) -> tuple[object, ...]:
        """Return an identity that does not depend on where and when files were written."""
        checkpoint, (spec, sharding, runs, *_, space) = operand.checkpoint, operand.tensor
        if sharding not in self._shardings:
            copies = [of_block[:1] for of_block in sharding.replicas]
            blocks = [(block.start, block.stop) for block in sharding.blocks], copies
            self._shardings[sharding] = sha256(repr(blocks).encode()).hexdigest()
        if checkpoint not in self._numbers:
            self._numbers[checkpoint] = self._paths.index([file.path for file in checkpoint.files])
        facts = (spec.name, spec.dtype.name, spec.shape, space, self._shardings[sharding], runs)
        return (self._numbers[checkpoint], *facts, *_codings(checkpoint))


def _codings(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield digests of the computations of a checkpoint, from the last to the first."""
    for each in computations(checkpoint.coding):
        yield each.path if isinstance(each, Computing) else each.digest


def _watched(file: SourceFile, index: FileIndex, begin: int) -> SourceFile:
    """Return a file of an input that is only watched for changes; its inputs are numbered from `begin`."""
    inputs = None if file.inputs is None else tuple(number + begin for number in file.inputs)
    return replace(file, index=index, inputs=inputs)
