"""Merge an adapter into the weights of a checkpoint: a wrapper around the store of its files adds the product.

1. Each run of bytes of a changed weight is a `WeightSpan`: its position in a file, and its elements.
2. A band is read as usual; then the elements of the product are added to its elements in spans, in float32, and the
   sum is rounded once, to the dtype of the weight.
3. The product is computed by numpy, in tiles of a fixed grid over the whole weight: an element is the same in every
   band. A tile is so small that OpenBLAS uses one thread, as its result may depend on the number of threads. If sizes
   are multiples of 16, the product equals the product of the whole matrices bit for bit. Another BLAS, or a processor
   without fused multiply-add, may round the last bit of float32 differently.
4. Before that, the elements are compared with the adapter's own copy of the weight, if it has one.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.errors import Faults, SourceError, UsageError
from reshard.layout.block import Block, flat_boxes, shape_text
from reshard.rules.lora.adapter import read_adapter
from reshard.rules.lora.parts import Copy, Pair
from reshard.rules.lora.tied import ALIAS, resolve
from reshard.source.checkpoint import Origin
from reshard.storage.base import Around
from reshard.storage.cipher import store_of
from reshard.strategy.names import no_match

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from reshard.dtypes import DType
    from reshard.formats.entries import Extent
    from reshard.layout.block import Shape
    from reshard.rules.lora import LoRA
    from reshard.rules.lora.parts import Adapter
    from reshard.source.checkpoint import Checkpoint, Tensor
    from reshard.storage.base import Coding, Want

_DTYPES = {"float32", "float16", "bfloat16"}

_TILE = 1 << 18
"""The most multiplications for a tile: from there on OpenBLAS takes several threads (interface/gemm.c)."""

_STEP = 16
_LEAST_CACHE_BYTES = 32 << 20
_IMPORTED_BYTES = 24 << 20
_TILES_BYTES = 16  # for each element of a row of tiles: the product twice, and the weight in float32
_SPAN_BYTES = 400
_COPY_BYTES = 1 << 20  # the rows of a copy that are compared at once
_SAMPLE = 4096


class WeightSpan(NamedTuple):
    """A run of bytes of a block of a weight.

    Attributes:
        begin, end: the byte range in the file.
        first: the number of its first element in the block.
        block: the block, with its dimensions in memory order.
        dtype: the dtype of the weight.
        of: the pair that is added to the weight, or the copy that is compared with it.
        transposed: the block belongs to the transposed product.
    """

    begin: int
    end: int
    first: int
    block: Block
    dtype: DType
    of: Pair | Copy
    transposed: bool


def merged(source: Checkpoint, lora: LoRA) -> Checkpoint:
    """Return a checkpoint with an adapter merged into its weights: see `Checkpoint.merge_lora`."""
    adapter = read_adapter(lora)
    if lora.digest not in {"", adapter.digest}:
        raise SourceError(
            f"{lora.root} is not the LoRA adapter that was planned or merged", code="different-adapter",
            hint="give that adapter",
        )  # fmt: skip
    return merge(source, adapter, replace(lora, digest=adapter.digest))


def merge(source: Checkpoint, adapter: Adapter, lora: LoRA) -> Checkpoint:
    """Return a checkpoint with an adapter merged into its weights.

    Raises:
        SourceError: a weight is missing, has another shape, or has no float dtype; all faults at once.
        UsageError: the checkpoint is one stage of a pipeline, or was already derived from another.
    """
    source.require_whole()
    if source.origin is not None:
        raise UsageError(
            f"{source.root} already has other names or an adapter", code="already-derived",
            hint="merge one adapter, before everything else",
        )  # fmt: skip
    if source.opening.stage is not None:
        raise UsageError(
            f"{source.root} is one stage of a pipeline; an adapter needs all", code="one-stage",
            hint="open all stages",
        )  # fmt: skip
    resolved = resolve(source, adapter, lora.tied)
    faults = Faults(adapter.file.path)
    spans: dict[str, list[WeightSpan]] = {}
    items: tuple[Pair | Copy, ...] = (*resolved.copies, *resolved.pairs)
    for item in items:
        item_text = f"tensor {item.name!r}" if isinstance(item, Copy) else f"layer {item.weight!r}"
        tensor = resolved.source.tensors.get(item.weight)
        if tensor is None:
            if item.weight not in source.left_out:
                faults.add(item_text, partial(_no_match, item.weight, source), code="no-match")
        elif fault := _fault(tensor, item, adapter, source.root):
            faults.add(item_text, fault)
        else:
            for block, replicas in tensor.shards:
                for extent in replicas:
                    of_file = spans.setdefault(source.files[extent.file].path, [])
                    of_file += _spans(extent, block, tensor.spec.dtype, item)
    faults.raise_if_any(SourceError)
    merging = Merging(source.coding, adapter, {path: _FileSpans.of(file_spans) for path, file_spans in spans.items()})
    merging.store().compare_samples()
    merged = frozenset(pair.weight for pair in resolved.pairs if pair.weight in resolved.source.tensors)
    return replace(resolved.source, coding=merging, origin=Origin(source, None, frozenset(), lora, (), merged))


def _no_match(weight: str, source: Checkpoint) -> str:
    return f"{no_match(weight, source.all_names)}, in {source.root}"


def _fault(tensor: Tensor, item: Pair | Copy, adapter: Adapter, root: str) -> SourceError | None:
    """Return an error if an item does not fit a tensor, or None."""
    dtype, shape = tensor.spec.dtype, tensor.spec.shape
    expected = item.shape if isinstance(item, Pair) else adapter.file.index.entries[item.name].shape
    expected = expected[::-1] if item.transposed else expected
    here = f"{dtype} {shape_text(shape)} in {root}"
    if isinstance(item, Copy) and (shape != expected or len(shape) not in {1, 2}):
        return SourceError(
            f"is {shape_text(expected)}, but {item.weight} is {here}", code="different-model",
            facts=["the adapter was trained on another model or vocabulary"],
        )  # fmt: skip
    if shape != expected:
        return SourceError(f"is {here}; expected {shape_text(expected)}", code="wrong-shape")
    if dtype.name not in _DTYPES:
        return SourceError(f"is {here}; expected {', '.join(sorted(_DTYPES))}", code="wrong-dtype")
    for block, replicas in tensor.shards:
        for extent in replicas:
            if extent.strides and not _are_rows(extent.strides, block.shape):
                return SourceError(
                    f"has strides {shape_text(extent.strides)} in {root}; expected contiguous rows or columns",
                    code="unsupported-strides",
                )
    return None


def _are_rows(strides: Shape, shape: Shape) -> bool:
    """Return whether each row or each column is contiguous, and no elements overlap."""
    if len(shape) == 1:
        return strides == (1,)
    (pitch, _), (step, extent) = sorted(zip(strides, shape, strict=True), reverse=True)
    return step == 1 and pitch >= extent


def _spans(extent: Extent, block: Block, dtype: DType, item: Pair | Copy) -> Iterator[WeightSpan]:
    """Yield the spans of a block in a file; a strided block may have one per row."""
    if not extent.strides or len(extent.strides) == 1:
        position = 0
        for offset, nbytes in extent.runs:
            yield WeightSpan(offset, offset + nbytes, position // dtype.itemsize, block, dtype, item, item.transposed)
            position += nbytes
        return
    turned = extent.strides[0] < extent.strides[1]
    start, stop = (at[::-1] if turned else at for at in (block.start, block.stop))
    pitch, columns = max(extent.strides), stop[1] - start[1]
    ((offset, _),) = extent.runs
    height = 1 if pitch > columns else stop[0] - start[0]
    for row in range(start[0], stop[0], height):
        begin = offset + (row - start[0]) * pitch * dtype.itemsize
        part = Block((row, start[1]), (row + height, stop[1]))
        yield WeightSpan(begin, begin + part.size * dtype.itemsize, 0, part, dtype, item, item.transposed != turned)


class _FileSpans(NamedTuple):
    """The spans of a file, which may overlap.

    Attributes:
        spans: the spans, sorted by their begin.
        reaches: for each span, the largest end of it and all spans before it.
    """

    spans: tuple[WeightSpan, ...]
    reaches: tuple[int, ...]

    @classmethod
    def of(cls, spans: Iterable[WeightSpan]) -> _FileSpans:
        ordered = sorted(spans, key=lambda span: span[:2])
        return cls(tuple(ordered), tuple(accumulate((span.end for span in ordered), max)))

    def within(self, begin: int, end: int) -> Iterator[WeightSpan]:
        """Yield the spans that overlap a byte range."""
        for number in range(bisect_right(self.reaches, begin), len(self.spans)):
            span = self.spans[number]
            if span.begin >= end:
                return
            if span.end > begin:
                yield span


@dataclass(frozen=True, slots=True, eq=False)
class Merging:
    """The coding of files into whose weights an adapter is merged.

    Attributes:
        inner: the coding without the adapter.
        adapter: the adapter.
        spans: for each file, the spans that the adapter is added to or compared with.
    """

    inner: Coding | None
    adapter: Adapter
    spans: Mapping[str, _FileSpans]

    @property
    def held_bytes(self) -> int:
        """Return the size of the cache for the few matrices in use, as float32."""
        sizes = [pair.nbytes for pair in self.adapter.pairs]
        return min(sum(sizes), max(4 * max(sizes), _LEAST_CACHE_BYTES))

    def nbytes(self, threads: int) -> int:
        """Return the memory that merging takes, in bytes.

        It is used for cached matrices, and in each thread for a matrix that is read and for tiles.
        """
        largest = max(pair.nbytes for pair in self.adapter.pairs)
        tiles = _TILES_BYTES * max(_TILE, _STEP * max(pair.shape[1] for pair in self.adapter.pairs))
        spans = _SPAN_BYTES * sum(len(of_file.spans) for of_file in self.spans.values())
        entries = [self.adapter.file.index.entries[copy.name] for copy in self.adapter.copies]
        rows = max((4 * max(_COPY_BYTES, entry.nbytes // max(entry.shape[0], 1)) for entry in entries), default=0)
        merging_bytes = _IMPORTED_BYTES + self.held_bytes + spans + threads * (2 * largest + tiles + rows)
        return merging_bytes + (self.inner.nbytes(threads) if self.inner else 0)

    def store(self) -> MergingStore:
        """Return a store that reads the files."""
        return MergingStore(self)


class MergingStore(Around):
    """A store that adds an adapter to the weights that it reads; thread-safe."""

    def __init__(self, merging: Merging) -> None:
        super().__init__(store_of(merging.inner))
        self._merging = merging
        self._cache_bytes = merging.held_bytes
        self._cache: OrderedDict[Pair, tuple[NDArray[Any], NDArray[Any]]] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, wants: Sequence[Want]) -> None:
        """Fill buffers, and add the adapter to them.

        Raises:
            SourceError: the adapter cannot be read, or its copy of a weight differs from the weight.
            ChangedError: the adapter changed since it was opened.
        """
        self.inner.read([(path, offset % ALIAS, buffer) for path, offset, buffer in wants])
        for want in wants:
            self._compare(*want)
            self._add(*want)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill one buffer, and add the adapter to it."""
        self.inner.read_into(path, offset % ALIAS, buffer)
        self._compare(path, offset, buffer)
        self._add(path, offset, buffer)

    def compare_samples(self) -> None:
        """Compare the ends of each copy with the weight.

        Raises:
            SourceError: they differ.
        """
        ends: dict[Copy, dict[str, list[WeightSpan]]] = {}
        for path, (spans, _) in self._merging.spans.items():
            for span in spans:
                if isinstance(span.of, Copy):
                    ends.setdefault(span.of, {}).setdefault(path, []).append(span)
        for of_path in ends.values():
            paths = list(of_path)
            for path, span in ((paths[0], of_path[paths[0]][0]), (paths[-1], of_path[paths[-1]][-1])):
                length = min(_SAMPLE, span.end - span.begin)
                for begin in {span.begin, span.end - length}:
                    content = memoryview(bytearray(length))
                    self.inner.read_into(path, begin % ALIAS, content)
                    self._compare(path, begin, content)

    def _boxes(self, path: str, offset: int, buffer: memoryview) -> Iterator[tuple[WeightSpan, NDArray[Any], int, int]]:
        """Yield the parts of a buffer that are in spans.

        Each is a span, a matrix, and the row and column of the matrix in the whole weight.
        """
        import numpy as np

        if path not in self._merging.spans:
            return
        for span in self._merging.spans[path].within(offset, offset + len(buffer)):
            begin, end = max(span.begin, offset), min(span.end, offset + len(buffer))
            assert (begin - span.begin) % span.dtype.itemsize == 0, "whole elements are read"  # noqa: S101
            elements = np.frombuffer(buffer[begin - offset : end - offset], span.dtype.numpy())
            first = span.first + (begin - span.begin) // span.dtype.itemsize
            for box in flat_boxes(span.block.shape, first, first + len(elements)):
                part, elements = elements[: box.size], elements[box.size :]
                part = part.reshape(box.shape if len(box.shape) > 1 else (box.size, 1))
                row, column = (*(at + start for at, start in zip(box.start, span.block.start, strict=True)), 0)[:2]
                yield (span, part.T, column, row) if span.transposed else (span, part, row, column)

    def _compare(self, path: str, offset: int, buffer: memoryview) -> None:
        """Compare a buffer with the adapter's copies, bit for bit."""
        import numpy as np

        adapter = self._merging.adapter
        for span, part, row, column in self._boxes(path, offset, buffer):
            if isinstance(span.of, Pair):
                continue
            entry = adapter.file.index.entries[span.of.name]
            step = max(1, _COPY_BYTES * entry.shape[0] // max(entry.nbytes, 1))
            bits = np.dtype(f"u{entry.dtype.itemsize}")
            for top in range(0, len(part), step):
                with np.errstate(over="ignore", invalid="ignore"):  # the model may be trained in another dtype
                    ours = part[top : top + step].astype(entry.dtype.numpy())
                theirs = adapter.rows(span.of.name, row + top, row + top + len(ours))
                theirs = theirs[:, column : column + ours.shape[1]]
                if not np.array_equal(ours.view(bits), theirs.view(bits)):
                    adapter.require_unchanged()
                    raise SourceError(
                        f"{span.of.weight} in {path} differs from the copy in the adapter", code="different-model",
                        facts=[f"the copy is in {adapter.file.path}", "the adapter was trained on another model"],
                    )  # fmt: skip

    def _add(self, path: str, offset: int, buffer: memoryview) -> None:
        """Add the adapter to a buffer."""
        for span, part, row, column in self._boxes(path, offset, buffer):
            if isinstance(span.of, Pair):
                a, b = self._matrices(span.of)
                _add_product(part, row, column, a, b, span.of.scale)

    def _matrices(self, pair: Pair) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return A and B of a pair, as float32."""
        adapter = self._merging.adapter
        with self._lock:
            if matrices := self._cache.get(pair):
                self._cache.move_to_end(pair)
                return matrices
        matrices = adapter.matrix(pair.a), adapter.matrix(pair.b)
        adapter.require_unchanged()
        with self._lock:
            self._cache[pair] = matrices
            while sum(cached.nbytes for cached in self._cache) > self._cache_bytes and len(self._cache) > 1:
                self._cache.popitem(last=False)
        return matrices

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the store without its cache."""
        return MergingStore, (self._merging,)


def _add_product(target: NDArray[Any], row: int, column: int, a: NDArray[Any], b: NDArray[Any], scale: float) -> None:
    """Add a part of `scale * b @ a` to a target, in float32 and rounded once.

    The part begins at `row` and `column` of the product and has the shape of the target.
    """
    import numpy as np

    high, wide = _tile(*a.shape)
    stop, begin = column + target.shape[1], column // wide * wide
    with np.errstate(over="ignore", invalid="ignore"):  # numbers that are too large become infinity
        for top in range(row // high * high, row + target.shape[0], high):
            product = np.empty((min(high, len(b) - top), min(-(-stop // wide) * wide, a.shape[1]) - begin), np.float32)
            for first_column in range(begin, stop, wide):
                tile = product[:, first_column - begin : first_column - begin + wide]
                np.matmul(b[top : top + high], a[:, first_column : first_column + wide], out=tile)
            rows = slice(max(top, row), min(top + high, row + target.shape[0]))
            addend = product[rows.start - top : rows.stop - top, column - begin : stop - begin]
            addend *= np.float32(scale)
            rows_of_target = target[rows.start - row : rows.stop - row]
            addend += rows_of_target.astype(np.float32, copy=False)
            rows_of_target[...] = addend


def _tile(rank: int, columns: int) -> tuple[int, int]:
    """Return the rows and columns of a tile of a product with this number of columns.

    >>> _tile(16, 4096), _tile(64, 4096), _tile(8, 48)
    ((16, 1024), (16, 256), (672, 48))
    """
    wide = min(columns, max(_STEP, _TILE // (_STEP * rank) // _STEP * _STEP))
    return max(_STEP, _TILE // (rank * wide) // _STEP * _STEP), wide
