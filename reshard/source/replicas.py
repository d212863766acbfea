"""Which files hold each block of a tensor, in whatever stage, and which ranks lack a block that they shall hold.

The strategy gives every block to some ranks. Stored once (`remove_redundancy`), one of them in each pipeline stage has
it. A conversion writes a tensor that stages share in each of them, and a tensor that no strategy names on every rank;
MindSpore leaves a shared tensor out of later stages' files, and its ranks save what no strategy names of their own
stage only.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from reshard.source.assemble import sharding_of, where

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reshard.layout.block import Block, Shape
    from reshard.source.checkpoint import Checkpoint, Sharding, Tensor


class Lack(NamedTuple):
    """A rank, and the block that it shall hold and does not."""

    rank: int
    block: Block


def in_several_stages(checkpoint: Checkpoint, tensor: Tensor) -> bool:
    """Return whether several pipeline stages share a tensor."""
    return (
        tensor.listed and checkpoint.strategy is not None and len(checkpoint.strategy.stages_of(tensor.spec.name)) > 1
    )


def in_every_stage(checkpoint: Checkpoint, tensor: Tensor) -> Tensor:
    """Return a tensor with every block of it that is in any stage; blocks of two stages may overlap."""
    strategy = checkpoint.strategy
    if strategy is None or not in_several_stages(checkpoint, tensor):
        return tensor
    name = tensor.spec.name
    files = checkpoint.files
    places, firsts = where(files, (number for number, file in enumerate(files) if name in file.index.entries))
    sharding = sharding_of(strategy.grid(name, tensor.spec.shape), checkpoint.ranks, places.values())
    return tensor._replace(sharding=sharding, runs=tuple(files[number].index.entries[name].runs for number in firsts))


def is_deduplicated(checkpoint: Checkpoint) -> bool:
    """Return whether files say that each replica is stored once in their set."""
    return any(file.index.deduplicated for file in checkpoint.files)


class Replicas:
    """Finds what ranks lack; what is worked out for one tensor is remembered for the next with the same replicas."""

    def __init__(self, checkpoint: Checkpoint, *, once: bool, converted: bool) -> None:
        """Prepare to look.

        Args:
            checkpoint: what is looked at.
            once: each replica may be stored once.
            converted: it shall be as a conversion writes it. Otherwise a stage of which no rank has a tensor need not
                have it.
        """
        self._checkpoint, self._once, self._converted = checkpoint, once, converted
        present = set(checkpoint.ranks)
        whole = checkpoint.strategy is not None and converted and not checkpoint.opening.partial
        self._expected = {*checkpoint.strategy.ranks} if whole and checkpoint.strategy else present
        self._known: dict[Sharding, tuple[Lack, ...]] = {}

    def lacking(self, tensor: Tensor) -> tuple[Lack, ...]:
        """Return the ranks that lack what they shall hold of a tensor; none where no strategy joins ranks."""
        if self._checkpoint.strategy is None:
            return ()
        if in_several_stages(self._checkpoint, tensor):
            return tuple(self._found(tensor))
        if tensor.sharding not in self._known:
            self._known[tensor.sharding] = tuple(self._found(tensor))
        return self._known[tensor.sharding]

    def may_be_elsewhere(self, name: str, shape: Shape) -> bool:
        """Return whether ranks that are not here may store every block of a tensor that none of those here has."""
        strategy = self._checkpoint.strategy
        if not self._once or strategy is None or name not in strategy.tensors:
            return False
        groups = strategy.grid(name, shape).ranks
        return all({*some} - self._expected for group in groups for _, some in groupby(group, strategy.stage_of))

    def _found(self, tensor: Tensor) -> Iterator[Lack]:
        strategy, rank_of = self._checkpoint.strategy, self._checkpoint.ranks
        assert strategy is not None  # noqa: S101 -- as it was asked
        sharding = in_every_stage(self._checkpoint, tensor).sharding
        ranks: Sequence[Sequence[int]] = [strategy.ranks]
        if tensor.listed:
            ranks = strategy.grid(tensor.spec.name, tensor.spec.shape).ranks
        stages = {strategy.stage_of(rank_of[at.file]) for some in sharding.replicas for at in some}
        for block, some_at, giving in zip(sharding.blocks, sharding.replicas, ranks, strict=True):
            held = {rank_of[at.file] for at in some_at}
            for stage, some in groupby(giving, strategy.stage_of):
                group = set(some)
                absent = group & self._expected - held
                if not (self._converted or stage in stages):
                    continue
                if self._once and (group & held or group - self._expected):
                    continue  # it is stored, or may be by a rank that is not here
                yield from (Lack(rank, block) for rank in sorted(absent))
