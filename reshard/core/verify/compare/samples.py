"""Sample the replicas of a checkpoint, which may be from two training steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.core.model.probe import torn_blocks
from reshard.core.verify.difference import Difference

if TYPE_CHECKING:
    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.model.facts import SampleStats


def sample_replicas(target: Checkpoint) -> tuple[list[Difference], SampleStats]:
    """Sample replicas as in `open`; return a difference for each torn tensor."""
    torn, statistics = torn_blocks(target)
    source = target.extras.described_by or "the strategy"
    says = {True: f"which {source} says hold the same", False: f"and {source} does not say that it is cut"}
    differences = [
        Difference(
            "values",
            f"differs between rank {target.ranks[block.file]} and rank {target.ranks[block.other]}, "
            f"{says[block.tensor.listed]}",
            block.tensor.spec.name,
            rank=target.ranks[block.other],
            path=target.files[block.other].path,
            block=block.tensor.sharding.blocks[block.number],
            reference=target.files[block.file].path,
        )
        for block in torn
    ]
    return differences, statistics
