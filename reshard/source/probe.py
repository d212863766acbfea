"""What headers cannot say: tensors that are split though no strategy lists them, replicas that differ, whole "blocks".

Each would make a wrong whole-model file, which is the worst that this tool could write. So contents are sampled when a
checkpoint is opened: small tensors whole, of larger ones three pages, in some of the files that hold them. `Looked`
says how much that was; `reshard verify` compares everything.

* MindSpore's default `only_trainable_params=True` leaves frozen weights out of the strategy though they are split: a
  tensor without a layout whose bytes differ between ranks.
* A strategy of another run may call replicas what are different blocks: bytes that differ between ranks which it says
  hold the same block.
* `integrated_save=True` stores whole tensors though they are listed: distinct blocks that are all equal. Constant
  tensors (zeros, ones) look so too and say nothing, unless nothing else is known to be split. A rule that the user
  gives for whole tensors looks so, too; it is believed of a tensor that it names, if the strategy says the same of it.

Which files are sampled:

1. The first and the last rank of a block's replicas have different coordinates on every device axis along which they
   are replicas. So if the tensor is split along any of those axes in truth, these two differ. Likewise the first and
   the last block differ if the tensor is split along any axis at all.
2. More replicas and blocks follow as far as the number of reads allows, which is shared out between all tensors.
3. Where there are too many tensors for that, some are taken, spread evenly over the order of the files.

Not compared are blocks that two pipeline stages cut differently of a tensor that they share; `verify` does.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, groupby, islice
from math import prod
from operator import mul
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from reshard.errors import Faults, Option, SourceError, Text, names
from reshard.formats.entries import wants
from reshard.layout.axes import row_major
from reshard.layout.block import flat_boxes
from reshard.source.assemble import unlisted
from reshard.source.checkpoint import Looked
from reshard.source.replicas import in_every_stage
from reshard.storage.cipher import store_of
from reshard.storage.places import can, in_batches

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from reshard.formats.entries import Where
    from reshard.layout.block import Shape
    from reshard.source.checkpoint import Checkpoint, Sharding, Tensor
    from reshard.storage.base import ReadStore, Want

T = TypeVar("T")

_STEP = "global_step"
_SMALL = 64 * 1024  # parts up to this size are compared whole
_PAGE = 4096
_PAGES = 3  # of larger parts: at the beginning, in the middle and at the end
_CONFIRMING_PAGES = 16  # before blocks are called equal
_POINTS = 8  # elements in place of a page, where those of a tensor lie in strides
_MOST_READS = 8192  # of contents; about 10 µs each in a warm cache
_MOST_REQUESTS = 512  # likewise, at URLs
_FEWEST = 3  # files of a tensor: two replicas, and another block
_MOST_NAMED = 64  # tensors whose blocks are equal; then no more are looked for


def compare_contents(
    checkpoint: Checkpoint,
    ruled: Mapping[str, str],
    confirmed: Collection[str] = (),
    *,
    contents: bool | Literal["blocks"] = True,
) -> Checkpoint:
    """Look at the contents of tensors; return the checkpoint with `varies` set on those whose copies differ.

    Args:
        checkpoint: as the headers and the strategy say.
        ruled: the rules of the tensors whose layouts the user gave.
        confirmed: those of them that a strategy cuts likewise: their blocks may be equal.
        contents: what is compared; `blocks` is different blocks alone, not replicas or copies of unlisted tensors.

    Raises:
        SourceError: a tensor is split but not listed, or listed but whole, replicas differ, or a rule cannot be right;
            all at once.
    """
    look = _Look(checkpoint, ruled, confirmed, copies=contents is True)
    found, others = {}, []
    for name, tensor in checkpoint.tensors.items():
        found[name] = tensor
        if tensor.listed or not (name == _STEP or _may_vary(tensor, ruled)):
            others.append(tensor)
        elif contents is True:
            found[name] = look.every_copy(tensor)
        elif tensor.text is None:  # not looked at, such a copy is taken for its rank's own value
            found[name] = tensor._replace(varies=name != _STEP)
    looked = look.samples(others) if contents else None
    look.faults.raise_if_any(SourceError)
    return replace(
        checkpoint,
        tensors={name: tensor for name, tensor in found.items() if name not in look.unreadable},
        unreadable={**checkpoint.unreadable, **look.unreadable},
        warnings=(*checkpoint.warnings, *look.warnings),
        opening=replace(checkpoint.opening, looked=looked),
    )


class Torn(NamedTuple):
    """A block whose replicas differ: the tensor, the number of the block, and two files, by their numbers."""

    tensor: Tensor
    number: int
    file: int
    other: int


def torn_blocks(checkpoint: Checkpoint) -> tuple[list[Torn], Looked]:
    """Compare samples of replicas, as `compare_contents` does; return one torn block of each tensor that has any.

    Left out are tensors of which every rank may have its own value, or blocks that no strategy lists.
    """
    look, says = _Replicas(checkpoint), bool(checkpoint.extras.described_by)
    looked = look.samples([
        tensor
        for name, tensor in checkpoint.tensors.items()
        if tensor.listed or name == _STEP or (says and not _may_vary(tensor, {}))
    ])  # fmt: skip
    return look.torn, looked


def _may_vary(tensor: Tensor, ruled: Mapping[str, str]) -> bool:
    """Return whether every rank may have its own value of what no strategy lists: one number, text, or by a rule."""
    single = tensor.text is not None or tensor.spec.nbytes <= tensor.spec.dtype.itemsize
    return single or ruled.get(tensor.spec.name) == "copy"


class _Chosen(NamedTuple):
    """A tensor, and which of its replicas are sampled: the number of the block, and where it is."""

    tensor: Tensor
    places: list[tuple[int, Where]]


class _Look:
    """Compares contents, collecting faults and warnings."""

    def __init__(
        self, checkpoint: Checkpoint, ruled: Mapping[str, str], confirmed: Collection[str], *, copies: bool
    ) -> None:
        self.checkpoint, self.ruled, self.confirmed, self.compare_copies = checkpoint, ruled, confirmed, copies
        self.files, self.ranks = checkpoint.files, checkpoint.ranks
        self.store = store_of(checkpoint.coding)
        self.faults, self.warnings = Faults(checkpoint.root), list[str]()
        self.most = _MOST_REQUESTS if any(can(file.path).waits for file in self.files) else _MOST_READS
        self.proven_split = False
        self.unreadable: dict[str, str] = {}
        self._strided: dict[Sharding, bool] = {}
        self.alike: list[str] = []
        self.constant: list[str] = []

    def every_copy(self, tensor: Tensor) -> Tensor:
        """Compare all copies of what every rank may have its own value of, or must not: the step."""
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

    def samples(self, tensors: Sequence[Tensor]) -> Looked:
        """Sample tensors, within the number of reads that opening may take; return how many of how much."""
        strategy = self.checkpoint.strategy
        if self.compare_copies and strategy is not None and len(strategy.stages) > 1:
            tensors = [in_every_stage(self.checkpoint, tensor) for tensor in tensors]
        candidates = [tensor for tensor in tensors if self._is_comparable(tensor)]
        each = self.most // max(len(candidates), 1)
        pages = _PAGES if each >= _PAGES * _FEWEST else 1
        most = max(each // pages, _FEWEST)
        chosen = [
            _Chosen(tensor, sorted(islice(self._in_turn(tensor), most)))
            for tensor in _spread(candidates, self.most // _FEWEST)
        ]
        samples = self.contents(((one, place), one.tensor, place, pages) for one in chosen for place in one.places)
        for one, found in groupby(samples, lambda sample: sample[0][0]):
            self._compare(one.tensor, ((place, content) for (_, place), content in found))
        self._tell_whole()
        return self._looked(candidates, chosen)

    def _is_comparable(self, tensor: Tensor) -> bool:
        """Return whether two files hold what should be equal, or should not."""
        if tensor.text is not None or not tensor.spec.nbytes:
            return False
        return self._may_be_whole(tensor) or (
            self.compare_copies and any(len(some) > 1 for some in tensor.sharding.replicas)
        )

    def _may_be_whole(self, tensor: Tensor) -> bool:
        """Return whether a tensor should be in several blocks, and nobody has looked already."""
        if self.checkpoint.extras.described_by or tensor.spec.name in self.confirmed:  # by shapes in headers, or twice
            return False
        return len(tensor.sharding.blocks) > 1 and tensor.listed

    def _in_turn(self, tensor: Tensor) -> Iterator[tuple[int, Where]]:
        """Yield the numbers of blocks and where they are, those first that say most."""
        held = [(number, some) for number, some in enumerate(tensor.sharding.replicas) if some]
        ends = held[:1] + held[1:][-1:]
        if not self.compare_copies:
            return ((number, some[0]) for number, some in chain(ends, held[1:-1]))
        turns = chain(
            ((number, some[place]) for number, some in ends for place in (0, -1)),
            ((number, some[place]) for number, some in held[1:-1] for place in (0, -1)),
            ((number, at) for number, some in held for at in some[1:-1]),
        )
        return iter(dict.fromkeys(turns))

    def _compare(self, tensor: Tensor, samples: Iterable[tuple[tuple[int, Where], bytearray]]) -> None:
        """Compare the samples of a tensor: replicas with the first one, and blocks with each other."""
        first: dict[int, tuple[Where, bytearray]] = {}
        for (number, at), found in samples:
            known = first.setdefault(number, (at, found))
            if known[1] != found:
                self._tell_differing(tensor, number, known[0].file, at.file)
                return
        if len(first) > 1 and self._may_be_whole(tensor):
            self._compare_blocks(tensor, [found for _, found in first.values()])

    def _tell_differing(self, tensor: Tensor, block: int, one: int, other: int) -> None:
        name, ranks = tensor.spec.name, f"rank {self.ranks[one]} and rank {self.ranks[other]}"
        subject = f"tensor {name!r}"
        differs = f"block {tensor.sharding.blocks[block]} differs between {ranks}"
        metadata = self.checkpoint.extras.described_by
        if metadata and not tensor.listed:
            self.unreadable[name] = f"differs between the ranks, and {metadata} does not say that it is cut"
            return
        if metadata:
            self.faults.add(subject, f"{differs}, which {metadata} says hold the same", code="replicas-differ")
        elif not tensor.listed:
            what = "differs between the ranks, and no strategy lists it"
            self.faults.add(subject, what, code="unlisted-tensor", hint=unlisted(name))
        elif name in self.ruled:
            what = f"{differs}, which the rule {self.ruled[name]!r} says hold the same"
            self.faults.add(subject, what, code="replicas-differ-by-rule")
        else:
            hint = Text(
                "give the strategy that the checkpoint was saved with, or the layout of this tensor with ",
                Option("layout", name, "RULE"),
            )
            what = f"{differs}, which the strategy says hold the same"
            self.faults.add(subject, what, code="replicas-differ", hint=hint)

    def _compare_blocks(self, tensor: Tensor, samples: list[bytearray]) -> None:
        """Note whether a tensor is split: where the samples of its blocks are equal, look at all blocks, and closer."""
        name, width = tensor.spec.name, tensor.spec.dtype.itemsize
        if any(sample != samples[0] for sample in samples):
            self.proven_split = True
        elif samples[0] == samples[0][:width] * (len(samples[0]) // width):
            self.constant.append(name)
        elif len(self.alike) < _MOST_NAMED:
            blocks = [(number, some[0]) for number, some in enumerate(tensor.sharding.replicas) if some]
            if self.differ(tensor, blocks, _CONFIRMING_PAGES):
                self.proven_split = True
            else:
                self.alike.append(name)

    def _tell_whole(self) -> None:
        """Refuse listed tensors that every rank has whole; warn of those of which that cannot be known."""
        some_whole = "whole" in self.ruled.values()
        doubtful = self.constant if self.alike or some_whole else []
        if not self.proven_split and doubtful:
            self.alike, doubtful = self.alike + doubtful, []
        if self.alike:
            rule = Option("layout", self.alike[0] if self.proven_split else "*", "whole")
            more = " and so on" if self.proven_split and len(self.alike) > 1 else ""
            subject = f"tensor {names([repr(name) for name in self.alike], most=3)}"
            by_rule = {self.ruled[name] for name in self.alike if name in self.ruled}
            if by_rule and all(name in self.ruled for name in self.alike):
                what = f"is not split as the rule {names(map(repr, by_rule))} says: every rank holds the same bytes"
                self.faults.add(subject, what, code="saved-whole", hint=Text("give ", rule, more))
            else:
                hint = Text(
                    "if tensors were saved whole (integrated_save=True), give ",
                    rule,
                    f"{more}; else the layout as a rule",
                )
                what = "is split by the strategy, and every rank holds the same bytes"
                self.faults.add(subject, what, code="saved-whole", hint=hint)
        if doubtful:
            self.warnings.append(
                Text(
                    f"{names(doubtful, most=3)}: constant, and equal on all ranks; that cannot show whether it is "
                    "split as the strategy says, or whole as others are; give ",
                    Option("layout", "NAME", "whole"),
                    " if it is",
                )
            )

    def _looked(self, candidates: Sequence[Tensor], chosen: Sequence[_Chosen]) -> Looked:
        of_each: dict[Sharding, int] = {}
        for sharding in {tensor.sharding for tensor in candidates}:
            of_each[sharding] = sum(len(some) - 1 for some in sharding.replicas if some)
        copies = sum(of_each[tensor.sharding] for tensor in candidates)
        compared = whole = 0
        for one in chosen:
            more = len(one.places) - len({number for number, _ in one.places})
            compared += more
            nbytes = sum(length for _, length in one.tensor.runs[one.places[0][1].runs])
            whole += more if nbytes <= _SMALL and not self.is_strided(one.tensor.sharding) else 0
        return Looked(len(chosen), len(candidates), compared, whole, copies)

    def differ(self, tensor: Tensor, places: Iterable[tuple[int, Where]], pages: int) -> bool:
        """Return whether samples at some places differ."""
        samples = self.contents((None, tensor, place, pages) for place in places)
        _, first = next(samples)
        return any(sample != first for _, sample in samples)

    def contents(self, wanted: Iterable[tuple[T, Tensor, tuple[int, Where], int]]) -> Iterator[tuple[T, bytearray]]:
        """Yield, with what it is for, the sample of so many pages of each place of a tensor."""

        def steps() -> Iterator[tuple[tuple[T, bytearray], ReadStore, list[Want]]]:
            for item, tensor, place, pages in wanted:
                content, reading = self.sample(tensor, *place, pages)
                yield (item, content), self.store, reading

        return in_batches(steps())

    def sample(self, tensor: Tensor, block: int, at: Where, pages: int) -> tuple[bytearray, list[Want]]:
        """Return a buffer for a sample of a block, and what fills it: all of up to 64 KiB, else so many pages.

        The first and the last are among them; one page is in the middle, where neither padding nor what is not trained
        is likely. Where elements of the tensor lie in strides, which can differ from file to file, it is a few of them.
        """
        runs, width = tensor.runs[at.runs], tensor.spec.dtype.itemsize
        nbytes = sum(length for _, length in runs)
        begins, length = [0], nbytes
        if self.is_strided(tensor.sharding):
            points = _points(tensor.sharding.blocks[block].shape, at.strides, pages * _POINTS)
            begins, length = [point * width for point in points], width
        elif nbytes > _SMALL:
            places = [0.5] if pages == 1 else [page / (pages - 1) for page in range(pages)]
            begins, length = [int((nbytes - _PAGE) * place) // width * width for place in places], _PAGE
        content = bytearray(length * len(begins))
        reading: list[Want] = []
        for number, begin in enumerate(begins):
            part = memoryview(content)[number * length : (number + 1) * length]
            reading += wants(self.files[at.file].path, runs, begin, part)
        return content, reading

    def is_strided(self, sharding: Sharding) -> bool:
        """Return whether elements of some block lie in strides."""
        if sharding not in self._strided:
            self._strided[sharding] = sharding.is_strided
        return self._strided[sharding]


class _Replicas(_Look):
    """Compares replicas alone, and collects what differs."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint, {}, (), copies=True)
        self.torn: list[Torn] = []

    def _may_be_whole(self, tensor: Tensor) -> bool:  # noqa: ARG002 -- different blocks are not compared
        return False

    def _tell_differing(self, tensor: Tensor, block: int, one: int, other: int) -> None:
        self.torn.append(Torn(tensor, block, one, other))


def _points(shape: Shape, strides: Shape, count: int) -> Iterator[int]:
    """Yield where at most so many elements of a block are in what holds it, evenly spread."""
    size = prod(shape)
    for number in range(min(count, size)):
        place = number * (size - 1) // max(min(count, size) - 1, 1)
        (box,) = flat_boxes(shape, place, place + 1)
        yield sum(map(mul, box.start, strides or row_major(shape)))


def _spread(tensors: Sequence[Tensor], most: int) -> list[Tensor]:
    """Return at most so many tensors, evenly spread.

    Multiples of the golden ratio are: equal steps would meet the same tensor of every layer.
    """
    if len(tensors) <= most:
        return list(tensors)
    golden = (5**0.5 - 1) / 2
    places = sorted(range(len(tensors)), key=lambda place: place * golden % 1)[:most]
    return [tensors[place] for place in sorted(places)]
