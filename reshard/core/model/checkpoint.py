"""Checkpoints: the tensors, their blocks, and the byte ranges of each block.

A `Checkpoint` holds no tensor data. A set of rank directories becomes one through a strategy (`reshard.open`); a
self-describing format lists its blocks and needs no strategy. All later steps (plans, arrays, verification) see only
blocks and byte ranges.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.core.layout.axes import factors
from reshard.core.model.entries import Extent, Replica
from reshard.core.model.facts import Extras, Opening, computed_title
from reshard.core.storage.base import Status
from reshard.core.storage.cipher import Cipher
from reshard.errors import SourceError, Text, UsageError, joined, names, parted
from reshard.spelling import missing_name
from reshard.strategy.names import matches, matching, no_match

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from reshard.core.format import Format
    from reshard.core.layout.block import Block, Shape
    from reshard.core.model.entries import FileIndex, Runs
    from reshard.core.model.facts import Origin
    from reshard.core.rank_files import Step
    from reshard.core.storage.base import Coding
    from reshard.dtypes import DType
    from reshard.rules.lora import LoRA
    from reshard.strategy.strategy import Strategy


class TensorSpec(NamedTuple):
    """The name, dtype and whole shape of a tensor."""

    name: str
    dtype: DType
    shape: Shape

    @property
    def nbytes(self) -> int:
        """Return the size of the whole tensor in bytes."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One checkpoint file: its path, its index, and size and time when indexed.

    `change` is as in `Status`. It is not pickled, because other machines may see another value.
    `inputs` are the numbers of the files from which it is computed, if it does not exist (`expressions.computed`);
    None for a file that exists.
    """

    path: str
    nbytes: int
    mtime_ns: int
    index: FileIndex
    change: tuple[int, int] = field(default=(0, 0), compare=False)
    inputs: tuple[int, ...] | None = None

    @property
    def status(self) -> Status:
        """Return the state of the file when it was indexed."""
        return Status(self.nbytes, self.mtime_ns, self.change)

    def __reduce__(self) -> tuple[type[SourceFile], tuple[Any, ...]]:
        return SourceFile, (self.path, self.nbytes, self.mtime_ns, self.index, (0, 0), self.inputs)


def unreadable_in(files: Iterable[SourceFile]) -> dict[str, str]:
    """Return the entries of files that cannot be converted, with the reason."""
    return {name: reason for file in files for name, reason in file.index.unreadable}


class IndexedFiles(NamedTuple):
    """The indexed files of a checkpoint, with ranks, warnings, step and key.

    `step` is the one that was chosen if there are several.
    """

    files: tuple[SourceFile, ...]
    ranks: tuple[int, ...]
    warnings: list[str]
    step: Step | None = None
    cipher: Cipher | None = None


class Shard(NamedTuple):
    """One block of a tensor and its byte ranges.

    Attributes:
        block: the block.
        replicas: the extents of its copies in `Checkpoint.files`; the first is read. Empty if the checkpoint was opened
            partially and the block is missing.
    """

    block: Block
    replicas: tuple[Extent, ...]

    @property
    def files(self) -> tuple[int, ...]:
        """Return the numbers of the files with a copy, in the order of `replicas`."""
        return tuple(extent.file for extent in self.replicas)


@dataclass(frozen=True, slots=True, eq=False)
class Sharding:
    """Blocks and files that several tensors can share; equal only to itself.

    Attributes:
        blocks: distinct blocks that together cover the tensor, in row-major order.
        replicas: the copies of each block; the first is read.
    """

    blocks: tuple[Block, ...]
    replicas: tuple[tuple[Replica, ...], ...]

    @property
    def is_strided(self) -> bool:
        """Return whether any block is strided."""
        return any(at.strides for replicas in self.replicas for at in replicas)


class Tensor(NamedTuple):
    """A tensor of a checkpoint.

    Attributes:
        spec: name, dtype and whole shape.
        sharding: its blocks, and the files of each.
        runs: the byte ranges of its blocks in the files; `Replica.runs_index` is an index into this. Files with equal
            headers share one.
        listed: its blocks are known, from a strategy or the format; if False, every file that has it has all of it.
        varies: its copies were found to differ between ranks (only for tensors that no strategy names).
        text: the value of a `str` entry; else None.
        space: the blocks' coordinate space if it is not `spec.shape`: the same row-major elements, with some dimensions
            split into several axes.
    """

    spec: TensorSpec
    sharding: Sharding
    runs: tuple[Runs, ...]
    listed: bool = True
    varies: bool = False
    text: str | None = None
    space: Shape | None = None

    @classmethod
    def of(
        cls, spec: TensorSpec, shards: Iterable[Shard], *, listed: bool = True, varies: bool = False,
        text: str | None = None,
    ) -> Tensor:  # fmt: skip
        """Build a tensor from its blocks, as listed by a self-describing format."""
        numbers: dict[Runs, int] = {}
        blocks, replicas = [], []
        for block, extents in shards:
            blocks.append(block)
            replicas.append(
                tuple(Replica(at.file, numbers.setdefault(at.runs, len(numbers)), at.strides) for at in extents)
            )
        return cls(spec, Sharding(tuple(blocks), tuple(replicas)), tuple(numbers), listed, varies, text)

    @property
    def shards(self) -> tuple[Shard, ...]:
        """Return the blocks and their extents; built on demand to save memory."""
        return tuple(
            Shard(block, tuple(replica.extent(self.runs) for replica in replicas))
            for block, replicas in zip(self.sharding.blocks, self.sharding.replicas, strict=True)
        )

    @property
    def axes(self) -> tuple[Shape, ...]:
        """Return the axes in `space` of each dimension; empty if `space` is None."""
        return tuple(factors(self.spec.shape, self.space) or ()) if self.space else ()

    @property
    def is_complete(self) -> bool:
        """Return whether every block is in a file."""
        return all(self.sharding.replicas)


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A set of checkpoint files as whole tensors; `reshard.Checkpoint` wraps it.

    Attributes:
        root: the directory or file that was opened.
        tensors: the tensors, in the order of the files.
        files: the files, in rank order.
        ranks: the rank of each file, in the same order.
        strategy: the strategy, which assigns blocks to ranks; None for a source of whole tensors.
        warnings: warnings from opening it.
        unreadable: names in the files that cannot be converted, with the reason.
        coding: decodes or decrypts the bytes of the files; None if they are plain.
        left_out: names in the files that were left out by `sel`, `drop` or rules.
        opening: options with which it was opened.
        extras: further metadata of its format.
        origin: the original checkpoint and the rules or adapter applied to it; None if it is not derived.
        format: the format that opened it; None if it is in no files.
    """

    root: str
    tensors: Mapping[str, Tensor]
    files: tuple[SourceFile, ...]
    ranks: tuple[int, ...]
    strategy: Strategy | None = None
    warnings: tuple[str, ...] = ()
    unreadable: Mapping[str, str] = field(default_factory=dict)
    coding: Coding | None = None
    left_out: frozenset[str] = frozenset()
    opening: Opening = field(default_factory=Opening)
    extras: Extras = field(default_factory=Extras)
    origin: Origin | None = None
    format: Format | None = None

    @property
    def title(self) -> str:
        """Return the root, or how the checkpoint is computed from others."""
        computation = self.opened.opening.computation
        if computation is None:
            return self.root
        return computed_title(computation.kind, [each.title for each in computation.inputs])

    @property
    def sources(self) -> tuple[Checkpoint, ...]:
        """Return the checkpoints in files: this one, or those from which its tensors are computed."""
        computation = self.opened.opening.computation
        inputs = computation.inputs if computation else ()
        return tuple(source for each in inputs for source in each.sources) or (self,)

    @property
    def stored_files(self) -> tuple[tuple[int, SourceFile], ...]:
        """Return the rank and the record of each file that exists, of all `sources`."""
        pairs = (zip(source.ranks, source.files, strict=True) for source in self.sources)
        return tuple(pair for of_source in pairs for pair in of_source if pair[1].inputs is None)

    @property
    def cipher(self) -> Cipher | None:
        """Return the cipher of the files; None if they are not encrypted."""
        if isinstance(self.coding, Cipher):
            return self.coding
        if computation := self.opened.opening.computation:
            return next((each.cipher for each in computation.inputs if each.cipher), None)
        return self.origin.checkpoint.cipher if self.origin else None  # an adapter decrypts the weights it merges into

    def require_whole(self, *, numbered: bool = True) -> None:
        """Raise an error if tensors opened as whole seem to be the blocks of one rank.

        Args:
            numbered: also if that is open, as other files differ from it in a number only.

        Raises:
            SourceError: the path or a header says so; the error has advice.
        """
        if reason := self.opening.lone_rank or (self.opening.numbered if numbered else ""):
            # Such as "run/rank_1: is of rank 1; expected whole tensors, found its blocks; open the directory above".
            fault, *why = parted(reason, "expected ")
            facts, *advice = parted(joined("", why), "open ")
            raise SourceError(fault, code="one-rank", facts=[facts] if facts else [], hint=joined("", advice))

    def entry_text(self, number: int, name: str) -> str | None:
        """Return the value of a `str` entry of the file with this number."""
        return self.files[number].index.entries[name].text

    @property
    def opened(self) -> Checkpoint:
        """Return the checkpoint as it was opened, without rules and adapter."""
        return self.origin.checkpoint if self.origin else self

    @property
    def lora(self) -> LoRA | None:
        """Return the adapter that is merged into the weights, if any."""
        return self.origin.lora if self.origin else None

    @property
    def file_format(self) -> str | None:
        """Return the encoding of the files; None if there are several."""
        formats = {file.index.format for file in self.files}
        return formats.pop() if len(formats) == 1 else None

    @property
    def word(self) -> str:
        """Return the word of `to` for a target like it."""
        return self.format.word_of(self) if self.format else "safetensors"

    @property
    def all_names(self) -> Mapping[str, None]:
        """Return all names: tensors, entries that cannot be converted, objects."""
        return dict.fromkeys((*self.tensors, *self.unreadable, *self.extras.objects))

    @property
    def nbytes(self) -> int:
        """Return the size of all whole tensors in bytes, without replicas."""
        return sum(tensor.spec.nbytes for tensor in self.tensors.values())

    def sel(self, *patterns: str) -> Checkpoint:
        """Return the checkpoint with only the chosen tensors; nothing is read.

        A plan leaves out the other tensors, too, and does not report them as missing.

        Args:
            patterns: names of tensors, or globs; every one must match.

        Raises:
            UsageError: a pattern matches no tensor; the nearest is named.
        """
        chosen = matched(self.root, self.all_names, patterns)
        other_stage_names = frozenset(name for name in self.opening.elsewhere if matches(name, patterns))
        opening = replace(self.opening, elsewhere=other_stage_names)
        return replace(self.without(self.all_names.keys() - chosen), opening=opening)

    def without(self, left_out: Collection[str]) -> Checkpoint:
        """Return the checkpoint without some tensors; unknown names are ignored."""
        return replace(
            self,
            tensors={name: tensor for name, tensor in self.tensors.items() if name not in left_out},
            unreadable={name: reason for name, reason in self.unreadable.items() if name not in left_out},
            extras=self.extras.without(left_out),
            left_out=self.left_out.union(left_out),
        )

    def unbound(self) -> Checkpoint:
        """Return the checkpoint with bound tensors unreadable, for other formats."""
        bound = self.extras.bound
        if not bound:
            return self
        tensors = {name: tensor for name, tensor in self.tensors.items() if name not in bound}
        extras = replace(self.extras, bound={})
        return replace(self, tensors=tensors, unreadable={**self.unreadable, **bound}, extras=extras)

    def require(self, name: str) -> None:
        """Check that a tensor exists and can be read.

        Raises:
            MissingNameError: there is no such tensor.
            SourceError: it cannot be read; the reason is in `unreadable`.
        """
        is_text = isinstance(name, str)  # a list is no key, and cannot be looked up
        if is_text and name in self.unreadable:
            raise SourceError(Text(f"tensor {name!r} of {self.root} ", self.unreadable[name]), code="unreadable-tensor")
        if not is_text or name not in self.tensors:
            raise missing_name(name, self.tensors, "the checkpoint has no tensor", choice=f".sel({name!r})")

    def __repr__(self) -> str:
        count, files = len(self.tensors), len(self.stored_files)
        titles = [names([self.title]), *([self.opening.step.text()] if self.opening.step else [])]
        return (
            f"<Checkpoint {', '.join(titles)}: {count} tensor{'s' * (count != 1)}, "
            f"{self.nbytes} bytes in {files} file{'s' * (files != 1)}>"
        )


def stored_files(files: Sequence[SourceFile], numbers: Iterable[int]) -> list[int]:
    """Return the numbers of the files that exist, ascending: inputs in place of computed files."""
    found = set(numbers)
    while computed := [number for number in found if files[number].inputs is not None]:
        found.difference_update(computed)
        found.update(number for file in computed for number in files[file].inputs or ())
    return sorted(found)


def matched(root: str, every: Collection[str], patterns: Iterable[str]) -> set[str]:
    """Return the names that match patterns (names or globs); each must match.

    Raises:
        UsageError: a pattern matches no tensor; the nearest is named.
    """
    chosen: set[str] = set()
    for pattern in patterns:
        members = matching(pattern, every)
        if not members:
            raise UsageError(f"{pattern!r} {no_match(pattern, every)}", code="no-match", facts=[f"checkpoint: {root}"])
        chosen.update(members)
    return chosen
