"""Compare tensors that rules join into one; a run only samples them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from reshard.core.model.checkpoint import Sharding
from reshard.core.verify.compare import Outcome, checks, compare

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.plan.budget import Budget


def compare_ties(
    source: Checkpoint,
    compared: Collection[str],
    limits: Budget,
    client: Any,
    on_progress: Callable[[int, int], object],
    *,
    sample: float | None = None,
    seed: int | None = None,
) -> Outcome:
    """Compare each group of source tensors that rules joined with its first tensor.

    Args:
        source: a checkpoint with rules applied.
        compared: names of its compared tensors; other ties are ignored.
        limits: as for `compare`.
        client: as for `compare`.
        on_progress: as for `compare`.
        sample: as for `compare`.
        seed: as for `compare`.
    """
    ties = source.origin.ties if source.origin else ()
    groups = [tensors for name, tensors in ties if name in compared]
    if not groups:
        return Outcome((), (), 0, 0)
    firsts = {}
    for first, *_ in groups:  # its copies are compared with each other as copies of the joined tensor
        copies = tuple(copies[:1] for copies in first.sharding.replicas)
        firsts[first.spec.name] = first._replace(sharding=Sharding(first.sharding.blocks, copies))
    rest = {tensor.spec.name: tensor for _, *tied in groups for tensor in tied}
    reference, target = replace(source, tensors=firsts), replace(source, tensors=rest)
    pairs = [(first.spec.name, tensor.spec.name) for first, *tied in groups for tensor in tied]
    first_of = {tied_name: first for first, tied_name in pairs}
    all_checks = checks(reference, target, pairs, limits.band_bytes)
    outcome = compare(reference, target, all_checks, limits, client, on_progress, sample=sample, seed=seed)
    differences = [
        replace(
            difference,
            side="source",
            text=f"{difference.text}; rules make it one with {first_of[difference.name or '']!r}",
        )
        for difference in outcome.differences
    ]
    return outcome._replace(differences=tuple(differences))
