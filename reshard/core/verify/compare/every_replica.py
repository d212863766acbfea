"""Compare the replicas of a checkpoint, which may differ despite valid checksums."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from reshard.core.model.checkpoint import Sharding
from reshard.core.plan.budget import comparison_budget
from reshard.core.verify.compare import Outcome, checks, compare

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reshard.core.model.checkpoint import Checkpoint


def compare_replicas(
    target: Checkpoint, several: Sequence[str], threads: int, client: Any, on_progress: Callable[[int, int], object]
) -> Outcome:
    """Compare the first copy of each block with its replicas; each copy is read once.

    Args:
        target: the checkpoint.
        several: names of tensors that have replicas.
        threads: number of threads.
        client: as for `compare`.
        on_progress: called with the bytes read and the bytes to be read.
    """
    tensors = {name: target.tensors[name] for name in several}
    shardings = {tensor.sharding for tensor in tensors.values()}

    def only(chosen: slice) -> Checkpoint:
        partial = {
            sharding: Sharding(sharding.blocks, tuple(copies[chosen] for copies in sharding.replicas))
            for sharding in shardings
        }
        cut = {name: tensor._replace(sharding=partial[tensor.sharding]) for name, tensor in tensors.items()}
        return replace(target, tensors=cut)

    firsts, rest = only(slice(1)), only(slice(1, None))
    limits = comparison_budget((firsts, rest), casts=False, threads=threads)
    all_checks = checks(firsts, rest, [(name, name) for name in several], limits.band_bytes)
    return compare(firsts, rest, all_checks, limits, client, on_progress)
