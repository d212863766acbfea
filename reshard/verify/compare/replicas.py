"""Comparing the replicas of a checkpoint: each may have its checksum, and they be of two steps of a training."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from reshard.plan.budget import comparison_budget
from reshard.source.checkpoint import Sharding
from reshard.verify.compare import Outcome, checks, compare

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reshard.source.checkpoint import Checkpoint


def compare_replicas(
    target: Checkpoint, several: Sequence[str], threads: int, client: Any, on_progress: Callable[[int, int], object]
) -> Outcome:
    """Compare the first copy of each block of some tensors with its others; each copy is read once.

    Args:
        target: the checkpoint.
        several: names of tensors that have replicas.
        threads: how many.
        client: as for `compare`.
        on_progress: called with bytes read and to be read.
    """
    tensors = {name: target.tensors[name] for name in several}
    shardings = {tensor.sharding for tensor in tensors.values()}

    def only(some: slice) -> Checkpoint:
        held = {one: Sharding(one.blocks, tuple(copies[some] for copies in one.replicas)) for one in shardings}
        cut = {name: tensor._replace(sharding=held[tensor.sharding]) for name, tensor in tensors.items()}
        return replace(target, tensors=cut)

    firsts, others = only(slice(1)), only(slice(1, None))
    limits = comparison_budget((firsts, others), casts=False, threads=threads)
    every = checks(firsts, others, [(name, name) for name in several], limits.band_bytes)
    return compare(firsts, others, every, limits, client, on_progress)
