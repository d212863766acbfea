"""Find the files of each block in all stages, and ranks that lack a block.

The strategy assigns every block to a group of ranks. If replicas are stored once (`remove_redundancy`), one rank of
each pipeline stage has the block. A conversion writes a shared tensor in each of its stages, and a tensor that no
strategy names on every rank; MindSpore omits a shared tensor from the files of later stages, and its ranks save tensors
that no strategy names only for their own stage.
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
    """A rank and a block that it should hold but lacks."""

    rank: int
    block: Block


def in_several_stages(checkpoint: Checkpoint, tensor: Tensor) -> bool:
    """Return whether several pipeline stages share a tensor."""
    return (
        tensor.listed and checkpoint.strategy is not None and len(checkpoint.strategy.stages_of(tensor.spec.name)) > 1
    )


def in_every_stage(checkpoint: Checkpoint, tensor: Tensor) -> Tensor:
    """Return a tensor with its blocks in all stages; blocks of two stages may overlap."""
    strategy = checkpoint.strategy
    if strategy is None or not in_several_stages(checkpoint, tensor):
        return tensor
    name = tensor.spec.name
    files = checkpoint.files
    places, firsts = where(files, (number for number, file in enumerate(files) if name in file.index.entries))
    sharding = sharding_of(strategy.grid(name, tensor.spec.shape), checkpoint.ranks, places.values())
    return tensor._replace(sharding=sharding, runs=tuple(files[number].index.entries[name].runs for number in firsts))


def is_deduplicated(checkpoint: Checkpoint) -> bool:
    """Return whether a header says that replicas are stored once in the set."""
    return any(file.index.deduplicated for file in checkpoint.files)


class MissingBlocks:
    """Finds missing blocks of ranks; results are cached by sharding."""

    def __init__(self, checkpoint: Checkpoint, *, once: bool, converted: bool) -> None:
        """Prepare the search.

        Args:
            checkpoint: the checkpoint.
            once: each replica may be stored once.
            converted: expect the blocks that a conversion writes. Otherwise a tensor may be missing from a whole stage.
        """
        self._checkpoint, self._once, self._converted = checkpoint, once, converted
        present = set(checkpoint.ranks)
        whole = checkpoint.strategy is not None and converted and not checkpoint.opening.partial
        self._expected = {*checkpoint.strategy.ranks} if whole and checkpoint.strategy else present
        self._cache: dict[Sharding, tuple[Lack, ...]] = {}

    def lacking(self, tensor: Tensor) -> tuple[Lack, ...]:
        """Return the missing blocks of a tensor, by rank; empty if there is no strategy."""
        if self._checkpoint.strategy is None:
            return ()
        if in_several_stages(self._checkpoint, tensor):
            return tuple(self._missing(tensor))
        if tensor.sharding not in self._cache:
            self._cache[tensor.sharding] = tuple(self._missing(tensor))
        return self._cache[tensor.sharding]

    def may_be_elsewhere(self, name: str, shape: Shape) -> bool:
        """Return whether absent ranks may store all blocks of a tensor that is in no file."""
        strategy = self._checkpoint.strategy
        if not self._once or strategy is None or name not in strategy.tensors:
            return False
        groups = strategy.grid(name, shape).ranks
        return all({*ranks} - self._expected for group in groups for _, ranks in groupby(group, strategy.stage_of))

    def _missing(self, tensor: Tensor) -> Iterator[Lack]:
        strategy, rank_of = self._checkpoint.strategy, self._checkpoint.ranks
        assert strategy is not None  # noqa: S101 -- checked by the callers
        sharding = in_every_stage(self._checkpoint, tensor).sharding
        ranks: Sequence[Sequence[int]] = [strategy.ranks]
        if tensor.listed:
            ranks = strategy.grid(tensor.spec.name, tensor.spec.shape).ranks
        stages = {strategy.stage_of(rank_of[at.file]) for replicas in sharding.replicas for at in replicas}
        for block, copies, giving in zip(sharding.blocks, sharding.replicas, ranks, strict=True):
            present = {rank_of[at.file] for at in copies}
            for stage, ranks_of_stage in groupby(giving, strategy.stage_of):
                group = set(ranks_of_stage)
                absent = group & self._expected - present
                if not (self._converted or stage in stages):
                    continue
                if self._once and (group & present or group - self._expected):
                    continue  # it is stored, or may be stored by an absent rank
                yield from (Lack(rank, block) for rank in sorted(absent))
