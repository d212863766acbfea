"""Holding the tensors of one checkpoint against those of another, bit for bit, whatever the layouts of the two.

1. Of every source block one copy is the *reference*. All else is compared with it: the copies that other source ranks
   have, and every copy of every target block.
2. References and the distinct blocks of all those copies make a recipe (`bands`), as if the copies were to be made.
3. Band by band, each reference's part is read once, and each copy's part once; columns are compared where they lie.
4. A tensor of which every source rank has a value of its own is compared by digest: a target's copy must be that of
   one source rank.

Elements are compared as bits: two NaNs with other payloads differ, and so do 0.0 and -0.0. Where the target has
another dtype, source elements are cast first, as a conversion casts them.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import ceil, prod
from random import Random
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from reshard.formats.entries import ranges
from reshard.plan.bands import Recipe
from reshard.source.replicas import in_every_stage, in_several_stages
from reshard.storage.cipher import store_of
from reshard.storage.threads import each

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from reshard.dtypes import DType
    from reshard.formats.entries import Runs
    from reshard.layout.block import Block, Shape
    from reshard.plan.bands import Part, Segment
    from reshard.source.checkpoint import Checkpoint, Sharding, Tensor

Array = np.ndarray[Any, np.dtype[Any]]
Side = Literal["source", "target"]

TASK_BYTES = 64 << 20
"""How much a task reads, at most, unless one row has more."""

SAMPLE_BYTES = 256 << 10
"""How much a run of rows has that is sampled or left out as one."""


class Copy(NamedTuple):
    """Where a block is: the side, the number of the file there, and which of the tensor's runs (`Where`)."""

    side: Side
    file: int
    runs: int


@dataclass(frozen=True, slots=True)
class Check:
    """One tensor, and all that is to be compared with its references.

    Attributes:
        name: the tensor's name in the target.
        source_name: its name in the source.
        dtype: kind of the elements in the source.
        target_dtype: what a conversion makes of them.
        shape: the whole tensor's.
        recipe: from the references' blocks to those of the copies.
        references: for each source block of the recipe, where it is.
        copies: for each target block of the recipe, where it is.
        source_runs: the byte ranges of the tensor's blocks in source files.
        target_runs: likewise in target files.
        own_values: every source rank has a value of its own; `references` are all of them, and `recipe` has one block.
    """

    name: str
    source_name: str
    dtype: DType
    target_dtype: DType
    shape: Shape
    recipe: Recipe
    references: tuple[Copy, ...]
    copies: tuple[tuple[Copy, ...], ...]
    source_runs: tuple[Runs, ...]
    target_runs: tuple[Runs, ...]
    own_values: bool = False

    @property
    def nbytes(self) -> int:
        """How many bytes are read to compare everything, each once."""
        references = sum(block.size for block in self.recipe.sources) * (len(self.references) if self.own_values else 1)
        itemsize = {"source": self.dtype.itemsize, "target": self.target_dtype.itemsize}
        return references * self.dtype.itemsize + sum(
            block.size * itemsize[copy.side]
            for block, copies in zip(self.recipe.targets, self.copies, strict=True)
            for copy in copies
        )

    def axis(self, band_bytes: int) -> int:
        """Return the axis along which bands of so many bytes are cut."""
        return self.recipe.axis(band_bytes // max(self.dtype.itemsize, self.target_dtype.itemsize))


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Where a copy differs from its references.

    Attributes:
        copy: the copy.
        block: what part of the tensor it is.
        index: of the first element that differs, in the whole tensor.
        count: how many elements differ, of those that were compared.
        found: the bits of that element, in the copy.
        expected: the bits that it should have.
        reference: the number of the source file that says so.
    """

    copy: Copy
    block: Block
    index: tuple[int, ...]
    count: int
    found: int
    expected: int
    reference: int


class Compared(NamedTuple):
    """What a task found.

    Attributes:
        found: mismatches, each with the number of its check.
        read: how many bytes were read.
        varying: tensors of which source ranks do have different values of their own.
    """

    found: list[tuple[int, Mismatch]]
    read: int
    varying: list[str]


def checks(
    source: Checkpoint, target: Checkpoint, pairs: Iterable[tuple[str, str]], cast: Callable[[DType], DType]
) -> list[Check]:
    """Return what is to be compared of some tensors.

    Args:
        source: has the references.
        target: compared with them.
        pairs: source name and target name of each tensor, which both have with the same shape.
        cast: the dtype that a conversion makes of another.
    """
    known: dict[tuple[Shape, Sharding, Sharding], Check] = {}
    found = []
    for source_name, name in pairs:
        tensor, other = source.tensors[source_name], target.tensors[name]
        names = (name, source_name, tensor.spec.dtype, cast(tensor.spec.dtype))
        key = (tensor.spec.shape, tensor.sharding, other.sharding)
        if tensor.varies or in_several_stages(source, tensor) or in_several_stages(target, other):
            found.append(_check(source, tensor, target, other, names))
            continue
        if key not in known:  # tensors alike have one recipe, and one list of copies
            known[key] = _check(source, tensor, target, other, names)
        alike = known[key]
        found.append(Check(*names, alike.shape, alike.recipe, alike.references, alike.copies, tensor.runs, other.runs))
    return found


def _check(
    source: Checkpoint,
    tensor: Tensor,
    target: Checkpoint,
    other: Tensor,
    names: tuple[str, str, DType, DType],
) -> Check:
    shape = tensor.spec.shape
    every, compared = in_every_stage(source, tensor), in_every_stage(target, other)
    given = _held("source", every)
    own_values = tensor.varies and not other.listed
    # Of a tensor that stages share one stage's blocks are the references: those of others may overlap them.
    first = {block: some[0].file for block, some in _held("source", tensor)}
    references = {block: next(at for at in some if at.file == first[block]) for block, some in given if block in first}
    copies: dict[Block, list[Copy]] = {}
    if not tensor.varies:
        for block, some in given:
            if others := [at for at in some if at != references.get(block)]:
                copies.setdefault(block, []).extend(others)
    for block, some in _held("target", compared):
        copies.setdefault(block, []).extend(some)
    recipe = Recipe.of(shape, list(references), list(copies))
    read = tuple(given[0][1]) if own_values else tuple(references.values())
    return Check(*names, shape, recipe, read, tuple(map(tuple, copies.values())), every.runs, compared.runs, own_values)


def _held(side: Side, tensor: Tensor) -> list[tuple[Block, list[Copy]]]:
    """Return the blocks of a tensor that are in files, and where each is."""
    return [
        (block, [Copy(side, *at) for at in replicas])
        for block, replicas in zip(tensor.sharding.blocks, tensor.sharding.replicas, strict=True)
        if replicas
    ]


class Run(NamedTuple):
    """Some rows of a check, by its number."""

    check: int
    start: int
    stop: int


def shared_out(
    some: Sequence[Check], band_bytes: int, *, sample: float | None = None, seed: int = 0
) -> tuple[list[list[Run]], int]:
    """Share the rows of all checks out into tasks.

    Args:
        some: the checks.
        band_bytes: as for `Comparer`.
        sample: the share of the rows to be compared, taken at random in runs of `SAMPLE_BYTES`; of every tensor at
            least one run. None for all rows.
        seed: of the random numbers, which depend on it and on the tensor's name only.

    Returns:
        the tasks, and how many bytes they read.
    """
    tasks: list[list[Run]] = [[]]
    room = TASK_BYTES
    total = 0
    for number, check in enumerate(some):
        rows = 1 if check.own_values else check.recipe.rows(check.axis(band_bytes))
        nbytes = check.nbytes
        if not (rows and nbytes and check.copies):
            continue
        length = max(1, rows * (TASK_BYTES if sample is None else SAMPLE_BYTES) // nbytes)
        runs: Sequence[int] = range(-(-rows // length))
        if sample is not None:
            runs = sorted(Random(f"{seed} {check.name}").sample(runs, ceil(sample * len(runs))))  # noqa: S311
        for place in runs:
            run = Run(number, place * length, min(rows, (place + 1) * length))
            cost = nbytes * (run.stop - run.start) // rows
            if tasks[-1] and cost > room:
                tasks.append([])
                room = TASK_BYTES
            tasks[-1].append(run)
            room -= cost
            total += cost
    return [task for task in tasks if task], total


class Comparer:
    """Compares runs of rows. Safe to use from several threads, each of which has buffers of its own."""

    def __init__(self, source: Checkpoint, target: Checkpoint, some: Sequence[Check], band_bytes: int) -> None:
        self.sides = {"source": source, "target": target}
        self.stores = {side: store_of(checkpoint.coding) for side, checkpoint in self.sides.items()}
        self.checks = some
        self.band_bytes = band_bytes
        self.buffers = _Buffers()

    def run(
        self, tasks: Sequence[Sequence[Run]], threads: int, told: Callable[[Compared], None]
    ) -> dict[int, list[Mismatch]]:
        """Carry out tasks on some threads; `told` gets what each found.

        Returns:
            for each check, by its number, one mismatch for every copy that differs.

        Raises:
            SourceError: a file cannot be read, or is shorter than its header says.
        """
        found: dict[tuple[int, Copy, Block], Mismatch] = {}

        def add(compared: Compared) -> None:
            for number, mismatch in compared.found:
                key = (number, mismatch.copy, mismatch.block)
                found[key] = _joined(found[key], mismatch) if key in found else mismatch
            told(compared)

        try:
            each(self.task, tasks, threads, add)
        finally:
            for store in self.stores.values():
                store.close()
        by_check: dict[int, list[Mismatch]] = {}
        for (number, _, _), mismatch in sorted(found.items(), key=lambda item: item[0][0]):
            by_check.setdefault(number, []).append(mismatch)
        return by_check

    def task(self, runs: Sequence[Run]) -> Compared:
        """Compare some rows of some tensors."""
        found: list[tuple[int, Mismatch]] = []
        reader = _Reader(self)
        known: dict[tuple[Recipe, int, int, int], list[Segment]] = {}  # tensors alike follow each other
        for run in runs:
            check = self.checks[run.check]
            if check.own_values:
                found += [(run.check, mismatch) for mismatch in reader.own_values(check)]
                continue
            axis = check.axis(self.band_bytes)
            key = (check.recipe, axis, run.start, run.stop)
            if key not in known:
                known[key] = list(check.recipe.segments(axis, run.start, run.stop))
            found += [(run.check, mismatch) for mismatch in reader.segments(check, axis, known[key])]
        return Compared(found, reader.nbytes, reader.varying)


class _Buffers(threading.local):
    """Two buffers a thread: memory touched for the first time costs more than to fill it."""

    def __init__(self) -> None:
        self.held = [np.empty(0, np.uint8)] * 2

    def get(self, which: int, nbytes: int) -> Array:
        if len(self.held[which]) < nbytes:
            self.held[which] = np.empty(nbytes, np.uint8)
        return self.held[which][:nbytes]


class _Reader:
    """Reads and compares what one task is about."""

    def __init__(self, comparer: Comparer) -> None:
        self.comparer = comparer
        self.nbytes = 0
        self.varying: list[str] = []

    def segments(self, check: Check, axis: int, segments: Iterable[Segment]) -> Iterator[Mismatch]:
        """Compare segments, band by band."""
        width = max(check.dtype.itemsize, check.target_dtype.itemsize)
        for segment in segments:
            row = segment.columns.row_elements
            if not row:  # no reference, or no elements
                continue
            rows = max(1, self.comparer.band_bytes // width // row)
            for start in range(segment.start, segment.stop, rows):
                yield from self._band(check, axis, segment, start, min(rows, segment.stop - start))

    def _band(self, check: Check, axis: int, segment: Segment, start: int, rows: int) -> Iterator[Mismatch]:
        columns = segment.columns
        done = start - segment.start
        shapes = [(rows, *shape) for shape in columns.source_shapes]
        sizes = [prod(shape) * check.dtype.itemsize for shape in shapes]
        buffer = self.comparer.buffers.get(0, sum(sizes))
        given = []
        for number, offset, shape, size in zip(columns.sources, segment.source_offsets, shapes, sizes, strict=True):
            begin = (offset + done * prod(shape[1:])) * check.dtype.itemsize
            self._read(check, check.references[number], begin, buffer[:size])
            given.append(buffer[:size].view(check.dtype.carrier()).reshape(shape))
            buffer = buffer[size:]
        for place, number in enumerate(columns.targets):
            parts = columns.parts[place]
            block = check.recipe.targets[number]
            wanted = {"source": [given[part.read][part.taken or ...] for part in parts]}
            wanted["target"] = [_cast(check, elements) for elements in wanted["source"]]
            shape = (rows, *columns.target_shapes[place])
            first = segment.target_offsets[place] + done * prod(shape[1:])
            for copy in check.copies[number]:
                dtype = check.target_dtype if copy.side == "target" else check.dtype
                found = self.comparer.buffers.get(1, prod(shape) * dtype.itemsize)
                self._read(check, copy, first * dtype.itemsize, found)
                elements = found.view(dtype.carrier()).reshape(shape)
                for part, expected in zip(parts, wanted[copy.side], strict=True):
                    here = elements[part.put or ...]
                    unequal = expected != here
                    if unequal.any():
                        reference = check.references[columns.sources[part.read]].file
                        mismatch = _mismatch(copy, block, unequal, here, expected, reference)
                        yield replace(mismatch, index=_whole_index(check, axis, block, part, start, mismatch.index))

    def own_values(self, check: Check) -> Iterator[Mismatch]:
        """Look whether every copy in the target is that of one source rank; a wrong one is compared with the first."""
        known = {self._digest(check, reference) for reference in check.references}
        if len(known) > 1:
            self.varying.append(check.source_name)
        for block, copies in zip(check.recipe.targets, check.copies, strict=True):
            wrong = tuple(copy for copy in copies if self._digest(check, copy) not in known)
            if wrong:
                recipe = replace(check.recipe, targets=(block,))
                one = replace(check, recipe=recipe, references=check.references[:1], copies=(wrong,), own_values=False)
                axis = one.axis(self.comparer.band_bytes)
                found: dict[Copy, Mismatch] = {}
                for mismatch in self.segments(one, axis, recipe.segments(axis, 0, recipe.rows(axis))):
                    before = found.get(mismatch.copy)
                    found[mismatch.copy] = _joined(before, mismatch) if before else mismatch
                yield from found.values()

    def _digest(self, check: Check, copy: Copy) -> bytes:
        """Return the digest of all that a file has of a tensor, cast as a conversion casts it."""
        digest = blake2b(digest_size=32)
        dtype = check.target_dtype if copy.side == "target" else check.dtype
        total = prod(check.shape) * dtype.itemsize
        step = max(1, self.comparer.band_bytes // dtype.itemsize) * dtype.itemsize
        for begin in range(0, total, step):
            buffer = self.comparer.buffers.get(0, min(step, total - begin))
            self._read(check, copy, begin, buffer)
            elements = buffer.view(dtype.carrier())
            digest.update((_cast(check, elements) if copy.side == "source" else elements).data)
        return digest.digest()

    def _read(self, check: Check, copy: Copy, begin: int, buffer: Array) -> None:
        """Fill a buffer with the contents of a copy from a byte on."""
        path = self.comparer.sides[copy.side].files[copy.file].path
        runs = (check.target_runs if copy.side == "target" else check.source_runs)[copy.runs]
        view = buffer.data
        for offset, start, stop in ranges(runs, begin, len(view)):
            self.comparer.stores[copy.side].read_into(path, offset, view[start:stop])
        self.nbytes += len(view)


def _cast(check: Check, elements: Array) -> Array:
    """Return the bits of source elements as a conversion writes them (`run.mover`)."""
    if check.dtype is check.target_dtype:
        return elements
    with np.errstate(over="ignore", invalid="ignore"):
        cast: Array = elements.view(check.dtype.numpy()).astype(check.target_dtype.numpy(), casting="unsafe")
    return cast.view(check.target_dtype.carrier())


def _mismatch(copy: Copy, block: Block, unequal: Array, found: Array, expected: Array, reference: int) -> Mismatch:
    """Tell the first of unequal elements; the index is that in the part which was compared."""
    index = tuple(map(int, np.unravel_index(int(unequal.argmax()), unequal.shape)))
    return Mismatch(
        copy, block, index, int(np.count_nonzero(unequal)), int(found[index]), int(expected[index]), reference
    )


def _whole_index(
    check: Check, axis: int, block: Block, part: Part, first_row: int, index: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the index in the whole tensor of an element of a part of a band."""
    if not check.shape:
        return ()
    row, *inner = index
    leading = np.unravel_index(first_row + row, check.recipe.shape[: axis + 1])
    put = [some.start for some in part.put[1:]] or [0] * len(inner)
    return (*map(int, leading), *map(sum, zip(block.start[axis + 1 :], put, inner, strict=True)))


def _joined(a: Mismatch, b: Mismatch) -> Mismatch:
    """Join what two bands of one copy say."""
    first = min(a, b, key=lambda mismatch: mismatch.index)
    return replace(first, count=a.count + b.count)
