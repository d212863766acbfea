"""A table of blocks, from which a format makes a checkpoint: the core checks it before a byte is read by it."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from reshard.core.layout.block import Block, cover_fault, shape_text
from reshard.core.model.checkpoint import Checkpoint, Shard, SourceFile, TensorSpec
from reshard.core.model.entries import Entry, Extent, FileIndex
from reshard.core.model.facts import Extras
from reshard.core.model.reshape import Shared
from reshard.core.storage.places import any_store
from reshard.dtypes import BY_NAME
from reshard.errors import Faults, SourceError, names

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from reshard.core.format import Found
    from reshard.core.layout.block import Shape
    from reshard.core.model.checkpoint import Tensor
    from reshard.core.model.facts import Object
    from reshard.dtypes import DType

_MOST_AXES = 32
_LARGEST = 1 << 62


class BlockList:
    """The tensors of a checkpoint as a table: for each block, its place in the tensor, its file and its byte ranges.

    A format adds blocks, and returns `checkpoint()`, which checks all of it:

    * each file is below the directory of the checkpoint, and exists;
    * byte ranges lie inside their file, do not overlap, and have as many bytes as the block;
    * the blocks of a tensor cover it without gaps. Equal blocks are copies; others may not overlap.

    Args:
        found: what the format's `find` returned.

    >>> from reshard.formats import BlockList
    >>> table = BlockList(found)  # doctest: +SKIP
    >>> table.add("w", "float32", (4, 8), (0, 0), (2, 8), "part0.bin", [(0, 64)])  # doctest: +SKIP
    >>> table.add("w", "float32", (4, 8), (2, 0), (2, 8), "part1.bin", [(0, 64)])  # doctest: +SKIP
    >>> table.checkpoint()  # doctest: +SKIP
    """

    def __init__(self, found: Found) -> None:
        self._found = found
        self._specs: dict[str, TensorSpec] = {}
        self._blocks: dict[str, list[tuple[Block, str, tuple[tuple[int, int], ...]]]] = {}
        self._faults = Faults(str(found.place))

    def add(
        self,
        name: str,
        dtype: str,
        shape: Sequence[int],
        offset: Sequence[int],
        size: Sequence[int],
        file: str,
        ranges: Sequence[tuple[int, int]],
    ) -> None:
        """Add a block.

        Args:
            name: the tensor.
            dtype: the name of its dtype, such as `float32`.
            shape: the shape of the whole tensor, in elements.
            offset: where the block begins, in elements along each axis.
            size: the shape of the block.
            file: the path of its file below the checkpoint's directory, with `/`; "" if the checkpoint is a file.
            ranges: its byte ranges in the file, as offsets and lengths in bytes: together the elements of the block in
                row-major order, little-endian.
        """
        fault = _fault(dtype, shape, offset, size, file, ranges)
        if not fault and not (self._found.here.names or not file):
            fault = f"names the file {file!r:.200}, and the checkpoint is one file"
        if fault:
            self._faults.add(f"tensor {name!r:.200}", fault, code="bad-table")
            return
        spec = TensorSpec(name, BY_NAME[dtype], tuple(shape))
        if self._specs.setdefault(name, spec) != spec:
            fault = f"is {dtype} {shape_text(spec.shape)} here, and something else in another block"
            self._faults.add(f"tensor {name!r:.200}", fault, code="bad-table")
            return
        block = Block(tuple(offset), tuple(start + extent for start, extent in zip(offset, size, strict=True)))
        kept = tuple((begin, length) for begin, length in ranges if length)
        if sum(length for _, length in kept) != block.size * spec.dtype.itemsize:
            expected = block.size * spec.dtype.itemsize
            found = sum(length for _, length in kept)
            fault = f"has {found} bytes in {file or 'the file'} for {block}; expected {expected}"
            self._faults.add(f"tensor {name!r:.200}", fault, code="bad-table")
            return
        self._blocks.setdefault(name, []).append((block, file, kept))

    def checkpoint(
        self,
        *,
        warnings: Sequence[str] = (),
        unreadable: Mapping[str, str] | None = None,
        objects: Mapping[str, Object] | None = None,
        described_by: str = "",
    ) -> Checkpoint:
        """Return the checkpoint.

        Args:
            warnings: warnings for the user.
            unreadable: names that cannot be read, with the reason, a predicate such as `is compressed`.
            objects: what is not a tensor.
            described_by: the file that lists the blocks, for messages; by default the name of the format.

        Raises:
            SourceError: the table is wrong: all faults at once, with the code `bad-table`; or a file is missing or too
                short.
        """
        self._faults.raise_if_any(SourceError)
        root = self._found.place.absolute()
        paths = sorted({file for blocks in self._blocks.values() for _, file, _ in blocks})
        numbers = {file: number for number, file in enumerate(paths)}
        sizes = self._sizes(paths)
        list_of = Blocks()
        tensors = {}
        by_file: dict[str, dict[str, Entry]] = {file: {} for file in paths}
        used: dict[str, set[tuple[int, int, str]]] = {file: set() for file in paths}
        for name, spec in self._specs.items():
            for number, (block, file, ranges) in enumerate(self._blocks[name]):
                entries = by_file[file]
                entries[f"{name} {number}" if name in entries else name] = Entry(spec.dtype, block.shape, ranges)
                used[file].update((begin, begin + length, name) for begin, length in ranges)
            try:
                tensors[name] = list_of.tensor(
                    spec, [(block, Extent(numbers[file], ranges)) for block, file, ranges in self._blocks[name]]
                )
            except SourceError as error:
                self._faults.add(f"tensor {name!r:.200}", error.message, code="bad-table")
        for file, spans in used.items():
            self._check_ranges(file, sorted(spans), sizes[file][0])
        self._faults.raise_if_any(SourceError)
        if not tensors:
            raise SourceError(f"{root} has no tensor", code="no-tensors")
        format_ = self._found.format
        files = tuple(
            SourceFile(
                str(root / file if file else root), *sizes[file],
                FileIndex(format_.name, by_file[file], header_id=numbers[file]),
            )
            for file in paths
        )  # fmt: skip
        extras = Extras(described_by or format_.title, objects=dict(objects or {}))
        return Checkpoint(
            str(self._found.place), tensors, files, (0,) * len(files), warnings=tuple(warnings),
            unreadable=dict(unreadable or {}), extras=extras, format=format_,
        )  # fmt: skip

    def _sizes(self, paths: Sequence[str]) -> dict[str, tuple[int, int]]:
        """Return the size and the time of each file.

        Raises:
            SourceError: files are missing, or links to files outside of the directory.
        """
        root = self._found.place.absolute()
        sizes = {}
        for file in paths:
            path = root / file if file else root
            if not path.is_file():
                self._faults.add(file, "is missing", code="missing-file")
                continue
            if file and not path.real().is_relative_to(root.real()):  # type: ignore[arg-type]  # of one kind
                self._faults.add(file, "is a link to a file outside of the directory", code="bad-table")
                continue
            any_store().size(str(path))  # forgets an older file of this name that is held open
            status = path.status()
            sizes[file] = status.nbytes, status.mtime_ns
        self._faults.raise_if_any(SourceError)
        return sizes

    def _check_ranges(self, file: str, spans: Sequence[tuple[int, int, str]], nbytes: int) -> None:
        """Add the first range of a file that leads out of it, or overlaps another one."""
        end, before = 0, ""
        for begin, stop, name in spans:
            if stop > nbytes:
                fault = f"has bytes {begin} to {stop} of {file or 'the file'}, which has {nbytes}"
                self._faults.add(f"tensor {name!r:.200}", fault, code="truncated")
                return
            if begin < end:
                fault = f"has bytes from {begin} on of {file or 'the file'}, where {before!r:.200} has some up to {end}"
                self._faults.add(f"tensor {name!r:.200}", fault, code="bad-table")
                return
            end, before = stop, name


def _fault(
    dtype: str,
    shape: Sequence[int],
    offset: Sequence[int],
    size: Sequence[int],
    file: str,
    ranges: Sequence[tuple[int, int]],
) -> str:
    """Return what is wrong with a block by itself, or ""."""
    numbers = [*shape, *offset, *size, *(number for pair in ranges for number in pair)]
    if any(type(number) is not int or not 0 <= number < _LARGEST for number in numbers):
        return f"has {next(n for n in numbers if type(n) is not int or not 0 <= n < _LARGEST)!r:.60}; expected sizes"
    if dtype not in BY_NAME:
        return f"is of the unknown dtype {dtype!r:.60}; known are {names(sorted(BY_NAME))}"
    if not len(shape) == len(offset) == len(size) or len(shape) > _MOST_AXES or prod(shape) >= _LARGEST:
        return f"is {shape_text(tuple(shape))}, and a block {shape_text(tuple(size))} at {shape_text(tuple(offset))}"
    if any(start + extent > whole for whole, start, extent in zip(shape, offset, size, strict=True)):
        return f"is {shape_text(tuple(shape))}, and a block at {shape_text(tuple(offset))} ends outside of it"
    parts = file.split("/")
    if file and (file.startswith("/") or {"", ".", ".."}.intersection(parts) or not file.isprintable()):
        return f"names the file {file!r:.200}, which leads out of the directory"
    return ""


class Blocks:
    """Assembles tensors from blocks.

    Tensors with equal blocks in the same files share their records.
    """

    def __init__(self) -> None:
        self._shared = Shared()
        self._faults: dict[tuple[Shape, tuple[Block, ...]], str | None] = {}

    def tensor(self, spec: TensorSpec, blocks: Iterable[tuple[Block, Extent]]) -> Tensor:
        """Return a tensor.

        Args:
            spec: its name, dtype and shape.
            blocks: its blocks, with each replica. Empty blocks are left out: they occur if a tensor is cut into more
                parts than it has rows.

        Raises:
            SourceError: the blocks do not cover it once; the message is a predicate.
        """
        whole = Block.whole(spec.shape)
        replicas: dict[Block, list[Extent]] = {}
        for block, extent in blocks:
            if block.size or block == whole:
                replicas.setdefault(block, []).append(extent)
        key = spec.shape, tuple(replicas)
        if key not in self._faults:
            self._faults[key] = cover_fault(spec.shape, replicas)
        if fault := self._faults[key]:
            raise SourceError(fault, code="missing-blocks")
        return self._shared.tensor(spec, (Shard(block, tuple(sorted(extents))) for block, extents in replicas.items()))


def common_dtype(dtypes: Iterable[DType]) -> DType:
    """Return the dtype of all parts of a tensor; raise `SourceError` if they differ."""
    by_name = {dtype.name: dtype for dtype in dtypes}
    if len(by_name) > 1:
        raise SourceError(f"is {names(sorted(by_name))} in different files", code="mixed-dtypes")
    (dtype,) = by_name.values()
    return dtype


def nothing_readable(unreadable: Mapping[str, str]) -> str:
    """Return the message for a checkpoint without readable tensors."""
    why = next((f": {name!r} {reason}" for name, reason in unreadable.items()), "; was saving it interrupted?")
    return f"holds no tensor that can be read{why}"
