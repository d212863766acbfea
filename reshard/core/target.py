"""Destinations lay out the files of a target, and assign blocks to them.

`plan.build` first asks a destination for the target blocks of every tensor and the files that they go into; then, once
all blocks are known, for the files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from reshard.core.model.entries import FileLayout
from reshard.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from reshard.core.layout.arrangement import Arrangement
    from reshard.core.layout.block import Block, Shape
    from reshard.core.model.checkpoint import Checkpoint, SourceFile, Tensor
    from reshard.core.model.entries import Replica, SizedTensor
    from reshard.core.plan.budget import Share
    from reshard.core.plan.plan import Request
    from reshard.core.storage.base import TargetCoding
    from reshard.core.storage.cipher import Cipher
    from reshard.dtypes import DType
    from reshard.errors import Faults


class TargetTensor(NamedTuple):
    """A planned tensor: its target name, the source tensor, and its target dtype."""

    name: str
    tensor: Tensor
    dtype: DType


@dataclass(frozen=True, slots=True, eq=False)
class TargetBlocks:
    """The target blocks of a tensor. Compared by identity, since tensors share it.

    Attributes:
        blocks: the blocks.
        files: the numbers of the target files that get each block.
        unit_rows: how many rows of the tensor a whole file has, if each file is written by one task; else 0.
        elements: elements to be written, replicas included.
        files_by_shape: the distinct shapes of the blocks, with all files that get a block of that shape.
    """

    blocks: tuple[Block, ...]
    files: tuple[tuple[int, ...], ...]
    unit_rows: int = 0
    elements: int = field(init=False)
    files_by_shape: Mapping[Shape, tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        by_shape: dict[Shape, list[int]] = {}
        for block, files in zip(self.blocks, self.files, strict=True):
            by_shape.setdefault(block.shape, []).extend(files)
        object.__setattr__(self, "elements", sum(prod(shape) * len(files) for shape, files in by_shape.items()))
        object.__setattr__(self, "files_by_shape", {shape: tuple(files) for shape, files in by_shape.items()})


Assigned = tuple[TargetTensor, TargetBlocks]
Publish = Literal["file", "index", "pointer"]
TargetShape = Literal["directory", "store", "file"]


class TargetFile(NamedTuple):
    """A file to be written.

    Attributes:
        rank: the target rank that it is for.
        path: its path below the target directory.
        layout: its size, its literal bytes and the offsets of its contents; shared by ranks with equal contents.
        publish: when it gets its name: a `file` as soon as it is complete; an `index`, after which the target is
            complete, after all files, and in order; a `pointer`, which names the current checkpoint of a directory, at
            the end, even if it exists and names another one.
        link: the absolute path of the source file that it links to; the file is not written then.
        done: it is already complete; the file is not written then either.
    """

    rank: int
    path: str
    layout: FileLayout
    publish: Publish = "file"
    link: str | None = None
    done: bool = False


class TargetInputs(NamedTuple):
    """The inputs of a destination.

    Attributes:
        source: the checkpoint that is read.
        request: the resolved options.
        items: the planned tensors.
        arrangement: the layouts and ranks of planned tensors; None for whole tensors.
        objects: old names to new names of carried objects, if it can carry objects.
        faults: collects the faults found.
    """

    source: Checkpoint
    request: Request
    items: Sequence[TargetTensor]
    arrangement: Arrangement | None
    objects: Mapping[str, str]
    faults: Faults


class Target(Protocol):
    """A way to lay out the files of a target.

    Attributes:
        format: the name of the files' format; on the class, the only supported format, or empty if there are several.
        ranks: the ranks of the target that are written.
        shape: what its files are: a `directory`, where other files may be, too; a `store`, which has nothing else in
            it; or one `file`, in a directory that belongs to others.
        coding: how the files are encoded; None if their contents are plain.
        cipher: encrypts the files; None if they are plain.
        memory: the memory that it needs beyond that of every plan.
        carried: the names of the source's objects that are carried byte for byte; and of the files beside its
            weights, if they are, too, or if a warning names them.
        carries: objects, and tensors that are bound to the source's format, are carried to the target.
        links: its files are links to the source's files, so that no bytes are moved.
        dropped: source names that cannot be linked, and that the selection allows to drop.
    """

    format: str = ""
    ranks: tuple[int, ...]
    shape: TargetShape = "directory"
    coding: TargetCoding | None = None
    cipher: Cipher | None = None
    memory: tuple[Share, ...] = ()
    carried: Collection[str] = ()
    carries: bool = False
    links: bool = False
    dropped: tuple[str, ...] = ()

    def __init__(self, inputs: TargetInputs, /) -> None:
        """Assign blocks to files."""

    @classmethod
    def settled(cls, request: Request, _source: Checkpoint, /) -> Request:
        """Resolve the options that a request leaves open.

        Raises:
            UsageError: the options contradict each other or the source.
        """
        return request

    def blocks_of(self, item: TargetTensor) -> TargetBlocks | None:
        """Return the target blocks of a tensor, or None after adding a fault."""

    def cuts(self, name: str) -> bool:  # noqa: ARG002 -- subclasses use it
        """Return whether it defines a tensor's blocks; if so, copies must not differ."""
        return False

    def copies(self, item: TargetTensor, read: Mapping[int, set[int]]) -> Sequence[tuple[Replica, TargetBlocks]]:  # noqa: ARG002 -- subclasses use it
        """Return the copies to read if copies differ, with their target blocks.

        By default all files get the copy of the lowest rank.

        Args:
            item: the tensor.
            read: the source files that are read for each target file anyway.
        """
        target_blocks = self.blocks_of(item)
        return [(item.tensor.sharding.replicas[0][0], target_blocks)] if target_blocks else []

    def files(self, assigned: Sequence[Assigned], texts: Sequence[TargetTensor]) -> tuple[TargetFile, ...]:
        """Lay out every file; those with equal contents share a layout."""

    def warnings(self) -> tuple[str, ...]:
        """Return warnings for the user about the target; empty by default."""
        return ()


def literal(content: bytes) -> FileLayout:
    """Return the layout of a file without tensors."""
    return FileLayout(len(content), ((0, content),))


def merged_notes(files: Sequence[SourceFile], more: Mapping[str, str], *, deduplicated: bool) -> dict[str, str]:
    """Merge the notes of source files; earlier files win.

    The note `format` marks safetensors files of MindSpore.
    """
    notes = {"format": "ms"}
    for file in reversed(files):
        notes.update(file.index.metadata)
    notes.update(more)
    if deduplicated:
        notes["remove_redundancy"] = "True"
    return notes


MAX_SHARD_BYTES = 4_000_000_000
"""The maximum size of a file of whole tensors, unless a single tensor is larger."""

MOST_STEPS = 10**18
"""A number of steps above any real training."""


def one_after_the_other(tensors: Iterable[SizedTensor], max_shard_size: int) -> dict[str, int]:
    """Return the number of each tensor's file if files are filled one after the other.

    >>> from reshard.core.model.entries import SizedTensor
    >>> tensors = [SizedTensor(name, size, True) for name, size in zip("abcd", (3, 3, 9, 0))]
    >>> one_after_the_other(tensors, 6)
    {'a': 0, 'b': 0, 'c': 1, 'd': 1}
    """
    of: dict[str, int] = {}
    count = room = 0
    for tensor in tensors:
        if not count or (max(room, 0) < tensor.nbytes and room < max_shard_size):
            count, room = count + 1, max_shard_size
        of[tensor.name] = count - 1
        room -= tensor.nbytes
    return of


def check_size(max_shard_size: int | None) -> None:
    """Raise `UsageError` if the maximum size is below 1."""
    if max_shard_size is not None and max_shard_size < 1:
        raise UsageError(
            f"a file of a set cannot have at most {max_shard_size} bytes; expected at least 1", code="out-of-range"
        )


def check_step(step: int | None) -> None:
    """Raise `UsageError` if a number of steps is out of range; None is accepted."""
    if step is not None and not 0 <= step < MOST_STEPS:
        raise UsageError(f"step is {step}; expected a number from 0 to {MOST_STEPS - 1}", code="out-of-range")
