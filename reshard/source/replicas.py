"""Which files hold each block of a tensor, in whatever stage, and which ranks lack a block that they shall hold.

The strategy gives every block to some ranks. Stored once (`remove_redundancy`), one of them in each pipeline stage has
it. A conversion writes a tensor that stages share in each of them, and a tensor that no strategy names on every rank;
MindSpore leaves a shared tensor out of later stages' files, and its ranks save what no strategy names of their own
stage only.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from reshard.source.checkpoint import Shard

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reshard.layout.block import Block
    from reshard.source.checkpoint import Checkpoint, Tensor


class Lack(NamedTuple):
    """A rank, and the block that it shall hold and does not."""

    rank: int
    block: Block


def in_several_stages(checkpoint: Checkpoint, tensor: Tensor) -> bool:
    """Return whether several pipeline stages share a tensor."""
    return (
        tensor.listed and checkpoint.strategy is not None and len(checkpoint.strategy.stages_of(tensor.spec.name)) > 1
    )


def every_shard(checkpoint: Checkpoint, tensor: Tensor) -> tuple[Shard, ...]:
    """Return every block of a tensor and all files that hold it, in whatever stage; blocks of two may overlap."""
    strategy = checkpoint.strategy
    if strategy is None or not in_several_stages(checkpoint, tensor):
        return tensor.shards
    name = tensor.spec.name
    by_rank: dict[int, list[int]] = {}
    for number, (file, rank) in enumerate(zip(checkpoint.files, checkpoint.ranks, strict=True)):
        if name in file.index.entries:
            by_rank.setdefault(rank, []).append(number)
    grid = strategy.grid(name, tensor.spec.shape)
    return tuple(
        Shard(block, tuple(number for rank in ranks for number in by_rank.get(rank, ())))
        for block, ranks in zip(grid.blocks, grid.ranks, strict=True)
    )


def is_deduplicated(checkpoint: Checkpoint) -> bool:
    """Return whether files say that each replica is stored once in their set."""
    return any(file.index.deduplicated for file in checkpoint.files)


class Replicas:
    """Finds what ranks lack; what is worked out for one tensor is remembered for the next with the same holders."""

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
        whole = checkpoint.strategy is not None and converted and not checkpoint.partial
        self._expected = {*checkpoint.strategy.ranks} if whole and checkpoint.strategy else present
        self._known: dict[int, tuple[Lack, ...]] = {}

    def lacking(self, tensor: Tensor) -> tuple[Lack, ...]:
        """Return the ranks that lack what they shall hold of a tensor; none where no strategy joins ranks."""
        if self._checkpoint.strategy is None:
            return ()
        if in_several_stages(self._checkpoint, tensor):
            return tuple(self._found(tensor))
        key = id(tensor.shards if tensor.listed else tensor.shards[0].holders)  # which tensors alike share
        if key not in self._known:
            self._known[key] = tuple(self._found(tensor))
        return self._known[key]

    def _found(self, tensor: Tensor) -> Iterator[Lack]:
        strategy, rank_of = self._checkpoint.strategy, self._checkpoint.ranks
        assert strategy is not None  # noqa: S101 -- as it was asked
        shards = every_shard(self._checkpoint, tensor)
        ranks: Sequence[Sequence[int]] = [strategy.ranks]
        if tensor.listed:
            ranks = strategy.grid(tensor.spec.name, tensor.spec.shape).ranks
        stages = {strategy.stage_of(rank_of[number]) for shard in shards for number in shard.holders}
        for shard, giving in zip(shards, ranks, strict=True):
            held = {rank_of[number] for number in shard.holders}
            for stage, some in groupby(giving, strategy.stage_of):
                group = set(some)
                absent = group & self._expected - held
                if not (self._converted or stage in stages):
                    continue
                if self._once and (group & held or group - self._expected):
                    continue  # it is stored, or may be by a rank that is not here
                yield from (Lack(rank, shard.block) for rank in sorted(absent))
