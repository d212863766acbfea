"""Sample contents to find wrong layouts and other faults that headers do not show.

Each fault would lead to a wrong whole-model file, the worst result this tool could write. So contents are sampled when
a checkpoint is opened: small tensors fully, three pages of larger ones, in some of their files. `SampleStats` counts
them; `reshard verify` compares everything.

* A tensor without a layout differs between ranks: the default `only_trainable_params=True` of MindSpore omits frozen
  weights from the strategy although they are split.
* Replicas of a block differ: with the strategy of another run, different blocks may be called replicas.
* All blocks of a tensor are equal: `integrated_save=True` stores tensors whole although the strategy splits them.
  Constant tensors (zeros, ones) look the same and prove nothing, unless no other tensor is known to be split. A wrong
  rule of the user looks the same, too; a rule that names a tensor is trusted if the strategy agrees with it.

The files are sampled as follows:

1. The first and the last replica of a block have different coordinates on every device axis along which they are
   replicas. So if the tensor is really split along any of those axes, these two differ. In the same way, the first and
   the last block differ if the tensor is split along any axis at all.
2. Further replicas and blocks follow, up to a limit on the number of reads, which all tensors share.
3. If there are too many tensors for that, a part of them is sampled, spread evenly over the order of the files.

If two pipeline stages split a shared tensor differently, their blocks are not compared here, only by `verify`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, groupby, islice
from math import prod
from operator import mul
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from reshard.core.layout.axes import row_major
from reshard.core.layout.block import flat_boxes
from reshard.core.model.assemble import unlisted_hint
from reshard.core.model.entries import wants
from reshard.core.model.facts import SampleStats
from reshard.core.model.holdings import with_all_stages
from reshard.core.storage.cipher import store_of
from reshard.core.storage.places import can, in_batches
from reshard.errors import Faults, Option, SourceError, Text, names

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from reshard.core.layout.block import Shape
    from reshard.core.model.checkpoint import Checkpoint, Sharding, Tensor
    from reshard.core.model.entries import Replica
    from reshard.core.storage.base import ReadStore, Want

T = TypeVar("T")

_STEP = "global_step"
_SMALL = 64 * 1024  # parts up to this size are compared whole
_PAGE = 4096
_PAGES = 3  # pages of larger parts: at the beginning, in the middle and at the end
_CONFIRMING_PAGES = 16  # pages compared before blocks are called equal
_POINTS = 8  # elements in place of a page, for strided tensors
_MOST_READS = 8192  # reads of contents; about 10 µs each in a warm cache
_MOST_REQUESTS = 512  # the same at URLs
_FEWEST = 3  # files of a tensor: two replicas, and another block
_MOST_NAMED = 64  # tensors with equal blocks, after which the search stops


def compare_contents(
    checkpoint: Checkpoint,
    ruled: Mapping[str, str],
    confirmed: Collection[str] = (),
    *,
    contents: bool | Literal["blocks"] = True,
) -> Checkpoint:
    """Sample the contents of tensors; set `varies` on tensors whose copies differ.

    Args:
        checkpoint: the checkpoint, assembled from headers and strategy.
        ruled: the rules of tensors with a layout from the user, by name.
        confirmed: tensors whose rule agrees with the strategy: their blocks may be equal.
        contents: whether to compare; `blocks` compares only different blocks, not replicas or copies of unlisted
            tensors.

    Raises:
        SourceError: a tensor is split but not listed, or listed but whole, replicas differ, or a rule is wrong; all
            faults at once.
    """
    sampler = _Sampler(checkpoint, ruled, confirmed, copies=contents is True)
    tensors, candidates = {}, []
    for name, tensor in checkpoint.tensors.items():
        tensors[name] = tensor
        if tensor.listed or not (name == _STEP or _may_vary(tensor, ruled)):
            candidates.append(tensor)
        elif contents is True:
            tensors[name] = sampler.every_copy(tensor)
        elif tensor.text is None:  # without a comparison, each copy counts as a value of its rank
            tensors[name] = tensor._replace(varies=name != _STEP)
    statistics = sampler.samples(candidates) if contents else None
    sampler.faults.raise_if_any(SourceError)
    return replace(
        checkpoint,
        tensors={name: tensor for name, tensor in tensors.items() if name not in sampler.unreadable},
        unreadable={**checkpoint.unreadable, **sampler.unreadable},
        warnings=(*checkpoint.warnings, *sampler.warnings),
        opening=replace(checkpoint.opening, looked=statistics),
    )


class Torn(NamedTuple):
    """A block whose replicas differ: tensor, block number, numbers of two files."""

    tensor: Tensor
    number: int
    file: int
    other: int


def torn_blocks(checkpoint: Checkpoint) -> tuple[list[Torn], SampleStats]:
    """Sample replicas; return one torn block of each torn tensor.

    Tensors that may differ by rank, and unlisted blocks, are left out.
    """
    sampler, is_described = _ReplicaSampler(checkpoint), bool(checkpoint.extras.described_by)
    statistics = sampler.samples([
        tensor
        for name, tensor in checkpoint.tensors.items()
        if tensor.listed or name == _STEP or (is_described and not _may_vary(tensor, {}))
    ])  # fmt: skip
    return sampler.torn, statistics


def _may_vary(tensor: Tensor, ruled: Mapping[str, str]) -> bool:
    """Return whether an unlisted tensor may differ by rank: a scalar, text, by rule."""
    single = tensor.text is not None or tensor.spec.nbytes <= tensor.spec.dtype.itemsize
    return single or ruled.get(tensor.spec.name) == "copy"


class _Chosen(NamedTuple):
    """A tensor and its sampled replicas: block numbers and extents."""

    tensor: Tensor
    places: list[tuple[int, Replica]]


class _Sampler:
    """Compares contents, collecting faults and warnings."""

    def __init__(
        self, checkpoint: Checkpoint, ruled: Mapping[str, str], confirmed: Collection[str], *, copies: bool
    ) -> None:
        self.checkpoint, self.ruled, self.confirmed, self.compare_copies = checkpoint, ruled, confirmed, copies
        self.files, self.ranks = checkpoint.files, checkpoint.ranks
        self.store = store_of(checkpoint.coding)
        self.faults, self.warnings = Faults(checkpoint.root), list[str]()
        self.most = _MOST_REQUESTS if any(can(file.path).has_latency for file in self.files) else _MOST_READS
        self.proven_split = False
        self.unreadable: dict[str, str] = {}
        self._strided: dict[Sharding, bool] = {}
        self.alike: list[str] = []
        self.constant: list[str] = []

    def every_copy(self, tensor: Tensor) -> Tensor:
        """Compare all copies of a tensor that may differ by rank, or of the step."""
        name, copies = tensor.spec.name, tensor.sharding.replicas[0]
        differs = tensor.varies
        if tensor.text is None and len(copies) > 1:
            differs = self.differ(tensor, [(0, at) for at in copies], _PAGES)
        if differs and name == _STEP and self.checkpoint.extras.described_by:
            self.unreadable[name] = "differs between the ranks, which are of different steps"
        elif differs and name == _STEP:
            self.faults.add(
                _STEP,
                "differs between the ranks, which are of different steps",
                code="several-steps",
                hint=Text("choose the files with ", Option("suffix")),
            )
        elif differs:
            self.warnings.append(
                f"{names([name])} differs between the ranks; each target rank gets that of one source rank"
            )
        return tensor._replace(varies=True) if differs else tensor

    def samples(self, tensors: Sequence[Tensor]) -> SampleStats:
        """Sample tensors within the limit on reads; return statistics."""
        strategy = self.checkpoint.strategy
        if self.compare_copies and strategy is not None and len(strategy.stages) > 1:
            tensors = [with_all_stages(self.checkpoint, tensor) for tensor in tensors]
        candidates = [tensor for tensor in tensors if self._is_comparable(tensor)]
        reads = self.most // max(len(candidates), 1)
        pages = _PAGES if reads >= _PAGES * _FEWEST else 1
        most = max(reads // pages, _FEWEST)
        spread = _spread(candidates, self.most // _FEWEST)
        places = {each: sorted(islice(self._in_turn(each), most)) for each in {tensor.sharding for tensor in spread}}
        chosen = [_Chosen(tensor, places[tensor.sharding]) for tensor in spread]
        samples = self.contents(
            ((choice, replica), choice.tensor, replica, pages) for choice in chosen for replica in choice.places
        )
        for choice, group in groupby(samples, lambda sample: sample[0][0]):
            self._compare(choice.tensor, ((replica, content) for (_, replica), content in group))
        self._tell_whole()
        return self._statistics(candidates, chosen)

    def _is_comparable(self, tensor: Tensor) -> bool:
        """Return whether two files have contents that should be equal, or should differ."""
        if tensor.text is not None or not tensor.spec.nbytes:
            return False
        return self._may_be_whole(tensor) or (
            self.compare_copies and any(len(replicas) > 1 for replicas in tensor.sharding.replicas)
        )

    def _may_be_whole(self, tensor: Tensor) -> bool:
        """Return whether a split tensor may be stored whole, and has not been checked yet."""
        # Shapes in headers, or a rule that agrees with the strategy, have shown it.
        name = tensor.spec.name
        if name in self.confirmed or (self.checkpoint.extras.described_by and name not in self.ruled):
            return False
        return len(tensor.sharding.blocks) > 1 and tensor.listed

    def _in_turn(self, sharding: Sharding) -> Iterator[tuple[int, Replica]]:
        """Yield block numbers and extents, the most informative first."""
        stored = [(number, replicas) for number, replicas in enumerate(sharding.replicas) if replicas]
        ends = stored[:1] + stored[1:][-1:]
        if not self.compare_copies:
            return ((number, replicas[0]) for number, replicas in chain(ends, stored[1:-1]))
        turns = chain(
            ((number, replicas[index]) for number, replicas in ends for index in (0, -1)),
            ((number, replicas[index]) for number, replicas in stored[1:-1] for index in (0, -1)),
            ((number, at) for number, replicas in stored for at in replicas[1:-1]),
        )
        return iter(dict.fromkeys(turns))

    def _compare(self, tensor: Tensor, samples: Iterable[tuple[tuple[int, Replica], bytearray]]) -> None:
        """Compare the samples of replicas with the first, and of blocks with each other."""
        first: dict[int, tuple[Replica, bytearray]] = {}
        for (number, at), content in samples:
            reference = first.setdefault(number, (at, content))
            if reference[1] != content:
                self._tell_differing(tensor, number, reference[0].file, at.file)
                return
        if len(first) > 1 and self._may_be_whole(tensor):
            self._compare_blocks(tensor, [content for _, content in first.values()])

    def _tell_differing(self, tensor: Tensor, block: int, first: int, second: int) -> None:
        name, ranks = tensor.spec.name, f"rank {self.ranks[first]} and rank {self.ranks[second]}"
        subject = f"tensor {name!r}"
        differs = f"block {tensor.sharding.blocks[block]} differs between {ranks}"
        metadata = self.checkpoint.extras.described_by
        if metadata and not tensor.listed:
            self.unreadable[name] = f"differs between the ranks, and {metadata} does not say that it is cut"
            return
        if metadata:
            self.faults.add(subject, f"{differs}, which {metadata} says hold the same", code="replicas-differ")
        elif not tensor.listed:
            fault = "differs between the ranks, and no strategy lists it"
            self.faults.add(subject, fault, code="unlisted-tensor", hint=unlisted_hint(name))
        elif name in self.ruled:
            fault = f"{differs}, which the rule {self.ruled[name]!r} says hold the same"
            self.faults.add(subject, fault, code="replicas-differ-by-rule")
        else:
            hint = Text(
                "give the strategy that the checkpoint was saved with, or the layout of this tensor with ",
                Option("layout", name, "RULE"),
            )
            fault = f"{differs}, which the strategy says hold the same"
            self.faults.add(subject, fault, code="replicas-differ", hint=hint)

    def _compare_blocks(self, tensor: Tensor, samples: list[bytearray]) -> None:
        """Record whether a tensor is split; compare all blocks if samples are equal."""
        name, width = tensor.spec.name, tensor.spec.dtype.itemsize
        if any(sample != samples[0] for sample in samples):
            self.proven_split = True
        elif samples[0] == samples[0][:width] * (len(samples[0]) // width):
            self.constant.append(name)
        elif len(self.alike) < _MOST_NAMED:
            blocks = [(number, replicas[0]) for number, replicas in enumerate(tensor.sharding.replicas) if replicas]
            if self.differ(tensor, blocks, _CONFIRMING_PAGES):
                self.proven_split = True
            else:
                self.alike.append(name)

    def _tell_whole(self) -> None:
        """Reject sharded tensors that every rank stores whole; warn if undecidable."""
        some_whole = "whole" in self.ruled.values()
        doubtful = self.constant if self.alike or some_whole else []
        if not self.proven_split and doubtful:
            self.alike, doubtful = self.alike + doubtful, []
        if self.alike:
            rule = Option("layout", self.alike[0] if self.proven_split else "*", "whole")
            suffix = " and so on" if self.proven_split and len(self.alike) > 1 else ""
            subject = f"tensor {names([repr(name) for name in self.alike], most=3)}"
            by_rule = {self.ruled[name] for name in self.alike if name in self.ruled}
            if by_rule and all(name in self.ruled for name in self.alike):
                fault = f"is not split as the rule {names(map(repr, by_rule))} says: every rank holds the same bytes"
                self.faults.add(subject, fault, code="saved-whole", hint=Text("give ", rule, suffix))
            else:
                hint = Text(
                    "if tensors were saved whole (integrated_save=True), give ",
                    rule,
                    f"{suffix}; else the layout as a rule",
                )
                fault = "is split by the strategy, and every rank holds the same bytes"
                self.faults.add(subject, fault, code="saved-whole", hint=hint)
        if doubtful:
            self.warnings.append(
                Text(
                    f"{names(doubtful, most=3)}: constant, and equal on all ranks; that cannot show whether it is "
                    "split as the strategy says, or whole as others are; give ",
                    Option("layout", "NAME", "whole"),
                    " if it is",
                )
            )

    def _statistics(self, candidates: Sequence[Tensor], chosen: Sequence[_Chosen]) -> SampleStats:
        extra_copies: dict[Sharding, int] = {}
        for sharding in {tensor.sharding for tensor in candidates}:
            extra_copies[sharding] = sum(len(replicas) - 1 for replicas in sharding.replicas if replicas)
        copies = sum(extra_copies[tensor.sharding] for tensor in candidates)
        compared = whole = 0
        for choice in chosen:
            extra = len(choice.places) - len({number for number, _ in choice.places})
            compared += extra
            nbytes = sum(length for _, length in choice.tensor.runs[choice.places[0][1].runs_index])
            whole += extra if nbytes <= _SMALL and not self.is_strided(choice.tensor.sharding) else 0
        return SampleStats(len(chosen), len(candidates), compared, whole, copies)

    def differ(self, tensor: Tensor, places: Iterable[tuple[int, Replica]], pages: int) -> bool:
        """Return whether samples of the given replicas differ."""
        samples = self.contents((None, tensor, replica, pages) for replica in places)
        _, first = next(samples)
        return any(sample != first for _, sample in samples)

    def contents(self, requests: Iterable[tuple[T, Tensor, tuple[int, Replica], int]]) -> Iterator[tuple[T, bytearray]]:
        """Yield the key and the sample of each requested replica."""

        def steps() -> Iterator[tuple[tuple[T, bytearray], ReadStore, list[Want]]]:
            for item, tensor, replica, pages in requests:
                content, reading = self.sample(tensor, *replica, pages)
                yield (item, content), self.store, reading

        return in_batches(steps())

    def sample(self, tensor: Tensor, block: int, at: Replica, pages: int) -> tuple[bytearray, list[Want]]:
        """Return a buffer for a sample of a block, and the read requests that fill it.

        The sample is all of a block up to 64 KiB, else `pages` pages, including the first and the last; a single page
        is in the middle, where padding and untrained elements are unlikely. For strided tensors, whose strides can
        differ from file to file, it is a few elements.
        """
        runs, width = tensor.runs[at.runs_index], tensor.spec.dtype.itemsize
        nbytes = sum(length for _, length in runs)
        begins, length = [0], nbytes
        if self.is_strided(tensor.sharding):
            points = _points(tensor.sharding.blocks[block].shape, at.strides, pages * _POINTS)
            begins, length = [point * width for point in points], width
        elif nbytes > _SMALL:
            places = [0.5] if pages == 1 else [page / (pages - 1) for page in range(pages)]
            begins, length = [int((nbytes - _PAGE) * share) // width * width for share in places], _PAGE
        content = bytearray(length * len(begins))
        reading: list[Want] = []
        for number, begin in enumerate(begins):
            part = memoryview(content)[number * length : (number + 1) * length]
            reading += wants(self.files[at.file].path, runs, begin, part)
        return content, reading

    def is_strided(self, sharding: Sharding) -> bool:
        """Return whether any block is strided (cached)."""
        if sharding not in self._strided:
            self._strided[sharding] = sharding.is_strided
        return self._strided[sharding]


class _ReplicaSampler(_Sampler):
    """Compares only replicas, and collects torn blocks."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint, {}, (), copies=True)
        self.torn: list[Torn] = []

    def _may_be_whole(self, tensor: Tensor) -> bool:  # noqa: ARG002 -- different blocks are not compared
        return False

    def _tell_differing(self, tensor: Tensor, block: int, first: int, second: int) -> None:
        self.torn.append(Torn(tensor, block, first, second))


def _points(shape: Shape, strides: Shape, count: int) -> Iterator[int]:
    """Yield the offsets of up to `count` evenly spread elements of a block."""
    size = prod(shape)
    for number in range(min(count, size)):
        position = number * (size - 1) // max(min(count, size) - 1, 1)
        (box,) = flat_boxes(shape, position, position + 1)
        yield sum(map(mul, box.start, strides or row_major(shape)))


def _spread(tensors: Sequence[Tensor], most: int) -> list[Tensor]:
    """Return at most `most` tensors, evenly spread.

    Multiples of the golden ratio are used, because equal steps would hit the same tensor of every layer.
    """
    if len(tensors) <= most:
        return list(tensors)
    golden = (5**0.5 - 1) / 2
    places = sorted(range(len(tensors)), key=lambda index: index * golden % 1)[:most]
    return [tensors[index] for index in sorted(places)]
