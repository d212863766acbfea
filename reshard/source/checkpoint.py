"""Checkpoints: which tensors exist, which blocks of them there are, and where the bytes of each lie.

A `Checkpoint` holds no tensor data. A set of rank directories becomes one through a strategy (`reshard.open`); a
format that describes itself lists its blocks and needs none. Everything after it (plans, arrays, verification) sees
only blocks and byte ranges.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from reshard.errors import SourceError, Text, UsageError, joined, names, parted
from reshard.formats.entries import Extent, Where
from reshard.layout.axes import factors
from reshard.storage.base import Status
from reshard.storage.cipher import Cipher
from reshard.strategy.names import matches, matching, no_match

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from reshard.dtypes import DType
    from reshard.formats.entries import FileIndex, Runs
    from reshard.formats.rank_dirs import Step
    from reshard.layout.block import Block, Shape
    from reshard.layout.layout import Layout
    from reshard.rules.lora import LoRA
    from reshard.rules.rules import Rules
    from reshard.storage.base import Coding
    from reshard.strategy.strategy import Strategy


class TensorSpec(NamedTuple):
    """What a tensor is: its name, the kind of its elements and its whole shape."""

    name: str
    dtype: DType
    shape: Shape

    @property
    def nbytes(self) -> int:
        """The size of the whole tensor in bytes."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One checkpoint file: its path, its size and time when it was indexed, and what it holds.

    `change` is as in `Status`. It does not travel to other processes, whose machines may see another one.
    """

    path: str
    nbytes: int
    mtime_ns: int
    index: FileIndex
    change: tuple[int, int] = field(default=(0, 0), compare=False)

    @property
    def status(self) -> Status:
        """Its state when it was indexed."""
        return Status(self.nbytes, self.mtime_ns, self.change)

    def __reduce__(self) -> tuple[type[SourceFile], tuple[str, int, int, FileIndex]]:
        return SourceFile, (self.path, self.nbytes, self.mtime_ns, self.index)


class Shard(NamedTuple):
    """One block of a tensor and where its bytes are.

    Attributes:
        block: what part of the tensor.
        replicas: the extents that hold it, in `Checkpoint.files`, the first of which is read; none where the checkpoint
            was opened in part and the block is not there.
    """

    block: Block
    replicas: tuple[Extent, ...]

    @property
    def files(self) -> tuple[int, ...]:
        """The numbers of the files that hold it, in the same order."""
        return tuple(extent.file for extent in self.replicas)


@dataclass(frozen=True, slots=True, eq=False)
class Sharding:
    """What tensors have in common that are cut alike and lie in the same files; equal only to itself.

    Attributes:
        blocks: distinct blocks that together cover the tensor, in row-major order.
        replicas: for each block where it is; the first is read.
    """

    blocks: tuple[Block, ...]
    replicas: tuple[tuple[Where, ...], ...]

    @property
    def is_strided(self) -> bool:
        """Elements of some block lie in strides."""
        return any(at.strides for some in self.replicas for at in some)


class Tensor(NamedTuple):
    """A tensor of a checkpoint.

    Attributes:
        spec: name, dtype and whole shape.
        sharding: its blocks, and which files hold each.
        runs: the byte ranges of its blocks in those files; `Where.runs` is a number of them. Files with equal headers
            share one.
        listed: the strategy names it. A tensor that it does not name is whole in every file that has it.
        varies: its copies differ from rank to rank, as far as was looked (tensors that no strategy names only).
        text: the value of a `str` entry; else None.
        space: the shape that its blocks are boxes of, where some of its dimensions are several axes there; its elements
            are in the same order. None where that is the tensor's own.
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
        """Build a tensor from its blocks, as a format that describes itself lists them."""
        numbers: dict[Runs, int] = {}
        blocks, replicas = [], []
        for block, extents in shards:
            blocks.append(block)
            replicas.append(
                tuple(Where(at.file, numbers.setdefault(at.runs, len(numbers)), at.strides) for at in extents)
            )
        return cls(spec, Sharding(tuple(blocks), tuple(replicas)), tuple(numbers), listed, varies, text)

    @property
    def shards(self) -> tuple[Shard, ...]:
        """Its blocks and their extents; built when asked for, as all of a large checkpoint would fill the memory."""
        return tuple(
            Shard(block, tuple(Extent(at.file, self.runs[at.runs], at.strides) for at in replicas))
            for block, replicas in zip(self.sharding.blocks, self.sharding.replicas, strict=True)
        )

    @property
    def axes(self) -> tuple[Shape, ...]:
        """The axes of its space that each of its dimensions is; none where its blocks are of its own shape."""
        return tuple(factors(self.spec.shape, self.space) or ()) if self.space else ()

    @property
    def is_complete(self) -> bool:
        """Every block is in some file."""
        return all(self.sharding.replicas)


class Object(NamedTuple):
    """What is not a tensor: bytes that the program that wrote them understands, which are carried as they are.

    Attributes:
        path: the file.
        begin, nbytes: its bytes in that.
        problem: why they are not read; empty where they are.
    """

    path: str = ""
    begin: int = 0
    nbytes: int = 0
    problem: str = ""


class Looked(NamedTuple):
    """How much of the contents was looked at when a checkpoint was opened (`source.probe`).

    Attributes:
        tensors: how many tensors were sampled.
        of_tensors: of how many whose files can be compared.
        copies: how many replicas were compared with the first one of their block, by samples.
        whole: how many of these bit for bit, because they are small.
        of_copies: how many replicas there are, beyond the first of each block.
    """

    tensors: int
    of_tensors: int
    copies: int
    whole: int
    of_copies: int


class Origin(NamedTuple):
    """What a checkpoint was derived from.

    Attributes:
        checkpoint: the one whose files it has.
        rules: between the names and shapes of the two; None where these are the same.
        left_out: names of that one's tensors that the rules leave out.
        lora: what was merged into its weights first.
        ties: tensors that the rules make one, behind its name, of which samples were compared; the first is read.
        merged: the names of those weights, in that one.
        side: what the rules call the side that was made; empty without rules.
    """

    checkpoint: Checkpoint
    rules: Rules | None
    left_out: frozenset[str]
    lora: LoRA | None = None
    ties: tuple[tuple[str, tuple[Tensor, ...]], ...] = ()
    merged: frozenset[str] = frozenset()
    side: str = ""


@dataclass(frozen=True, slots=True)
class Opening:
    """How a checkpoint was opened, and facts about its files that this showed.

    Attributes:
        stage: the pipeline stage if the source is one stage of a longer pipeline.
        elsewhere: names of tensors that only other stages have, if known.
        partial: whether files of some ranks may be missing.
        by_file: whether its files were named one by one, so that the root, where the first is, may have others.
        lone_rank: why its tensors, which are taken as whole, seem to be the blocks of one rank; else empty.
        looked: statistics of the samples of contents that were compared, if any were.
        step: which checkpoint of a training run it is, if the names of its files say so.
    """

    stage: int | None = None
    elsewhere: frozenset[str] = frozenset()
    partial: bool = False
    by_file: bool = False
    lone_rank: str = ""
    looked: Looked | None = None
    step: Step | None = None


@dataclass(frozen=True, slots=True)
class Extras:
    """What the metadata of a format say beyond names, shapes and places of tensors.

    Attributes:
        described_by: the metadata file, or the format, that says which block is where; empty if a strategy does.
        layouts: the layouts of tensors.
        holders: the ranks that hold each tensor: those of the devices of its layout, in order, one pipeline stage after
            the other if several share it; ascending if it has no layout. A tensor is absent if its ranks are unknown.
        defects: warnings of errors in the metadata that do not keep anything from being read.
        objects: objects of the program that wrote it, by name. Only targets of the same format receive them.
        beside: other files that the training needs, by name. Likewise.
        bound: tensors that only a target of the same format can hold, with the reason.
        paths: the keys of dicts and places in lists under which each tensor was saved, if not its name alone; None if
            nothing is known of that, and a program does without.
    """

    described_by: str = ""
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    holders: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    defects: tuple[str, ...] = ()
    objects: Mapping[str, Object] = field(default_factory=dict)
    beside: Mapping[str, Object] = field(default_factory=dict)
    bound: Mapping[str, str] = field(default_factory=dict)
    paths: Mapping[str, tuple[str | int, ...]] | None = field(default_factory=dict)

    def without(self, names: Collection[str]) -> Extras:
        """Return the extras without some objects and bound tensors."""
        objects = {name: place for name, place in self.objects.items() if name not in names}
        bound = {name: reason for name, reason in self.bound.items() if name not in names}
        return replace(self, objects=objects, bound=bound)


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A set of checkpoint files seen as whole tensors. `reshard.Checkpoint` is what users see of it.

    Attributes:
        root: the directory or file that was opened.
        tensors: the tensors, in the order of the files.
        files: the files, in rank order.
        ranks: the rank of each file, in the same order.
        strategy: the strategy that says which rank holds which block; None for a source of whole tensors.
        warnings: warnings from opening it.
        unreadable: names in the files that cannot be converted, with the reason.
        coding: decodes or decrypts the bytes of the files; None if they are plain.
        left_out: names in the files that `sel` did not choose.
        opening: how it was opened.
        extras: what its format says besides.
        origin: the checkpoint that rules or an adapter made this one of, and these.
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

    @property
    def cipher(self) -> Cipher | None:
        """The cipher that decrypts the files; None if they are not encrypted."""
        if isinstance(self.coding, Cipher):
            return self.coding
        return self.origin.checkpoint.cipher if self.origin else None  # an adapter decrypts what it merges into

    def require_whole(self) -> None:
        """Check that nothing says that its tensors, opened as whole ones, are the blocks of one rank.

        Raises:
            SourceError: its place or its header does; what to do is in the error.
        """
        if self.opening.lone_rank:
            what, *why = parted(self.opening.lone_rank, "expected ")
            facts, *advice = parted(joined("", why), "open ")
            raise SourceError(what, code="one-rank", facts=[facts] if facts else [], hint=joined("", advice))

    def entry_text(self, number: int, name: str) -> str | None:
        """Return the value of a `str` entry in a file, by the file's number."""
        return self.files[number].index.entries[name].text

    @property
    def opened(self) -> Checkpoint:
        """The checkpoint as it was opened: without the rules that it is derived by, and without an adapter."""
        return self.origin.checkpoint if self.origin else self

    @property
    def lora(self) -> LoRA | None:
        """The adapter that is merged into its weights."""
        return self.origin.lora if self.origin else None

    @property
    def format(self) -> str | None:
        """The format of the files; None where they are of several."""
        formats = {file.index.format for file in self.files}
        return formats.pop() if len(formats) == 1 else None

    @property
    def every(self) -> Mapping[str, None]:
        """The names of all that it has: tensors, what cannot be converted, objects."""
        return dict.fromkeys((*self.tensors, *self.unreadable, *self.extras.objects))

    @property
    def nbytes(self) -> int:
        """The size of all whole tensors, replicas counted once, in bytes."""
        return sum(tensor.spec.nbytes for tensor in self.tensors.values())

    def sel(self, *patterns: str) -> Checkpoint:
        """Return the checkpoint of some tensors only; nothing is read.

        A plan leaves out what this leaves out, and does not report it as missing.

        Args:
            patterns: names of tensors, or globs; every one must match.

        Raises:
            UsageError: a pattern matches no tensor; the nearest is named.
        """
        chosen = matched(self.root, self.every, patterns)
        elsewhere = frozenset(name for name in self.opening.elsewhere if matches(name, patterns))
        opening = replace(self.opening, elsewhere=elsewhere)
        return replace(self.without(self.every.keys() - chosen), opening=opening)

    def without(self, left_out: Collection[str]) -> Checkpoint:
        """Return the checkpoint without some tensors; names that it does not have do no harm."""
        return replace(
            self,
            tensors={name: tensor for name, tensor in self.tensors.items() if name not in left_out},
            unreadable={name: reason for name, reason in self.unreadable.items() if name not in left_out},
            extras=self.extras.without(left_out),
            left_out=self.left_out.union(left_out),
        )

    def unbound(self) -> Checkpoint:
        """Return the checkpoint as one of another format is made of it: its bound tensors cannot be read for that."""
        bound = self.extras.bound
        if not bound:
            return self
        tensors = {name: tensor for name, tensor in self.tensors.items() if name not in bound}
        extras = replace(self.extras, bound={})
        return replace(self, tensors=tensors, unreadable={**self.unreadable, **bound}, extras=extras)

    def require(self, name: str) -> None:
        """Check that a tensor is there and can be read.

        Raises:
            KeyError: there is no such tensor.
            SourceError: it cannot be read; the reason is that of `unreadable`.
        """
        if not isinstance(name, str):
            raise KeyError(name)
        if name in self.unreadable:
            raise SourceError(Text(f"tensor {name!r} of {self.root} ", self.unreadable[name]), code="unreadable-tensor")
        if name not in self.tensors:
            alike = get_close_matches(name, self.tensors, n=3)
            raise KeyError(f"{name}; did you mean {' or '.join(alike)}?" if alike else name)

    def __repr__(self) -> str:
        count = len(self.tensors)
        titles = [names([self.root]), *([self.opening.step.text()] if self.opening.step else [])]
        return (
            f"<Checkpoint {', '.join(titles)}: {count} tensor{'s' * (count != 1)}, "
            f"{self.nbytes} bytes in {len(self.files)} file{'s' * (len(self.files) != 1)}>"
        )


def matched(root: str, every: Collection[str], patterns: Iterable[str]) -> set[str]:
    """Return those of a checkpoint's names that patterns choose: names, or globs; every one must match.

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
