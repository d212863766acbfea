"""Comparing tensors that rules make one: a run looks at samples of them, and reads the first."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from reshard.source.checkpoint import Sharding
from reshard.verify.compare import Outcome, checks, compare

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from reshard.plan.budget import Budget
    from reshard.source.checkpoint import Checkpoint


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
    """Compare the tensors of a source that rules made one, each with the first of them.

    Args:
        source: a checkpoint that rules made.
        compared: names of its tensors; ties of others are left out.
        limits: as for `compare`.
        client: likewise.
        on_progress: likewise.
        sample: likewise.
        seed: likewise.
    """
    ties = source.origin.ties if source.origin else ()
    groups = [tensors for name, tensors in ties if name in compared]
    if not groups:
        return Outcome((), (), 0, 0)
    firsts = {}
    for first, *_ in groups:  # whose copies are compared with each other as those of the tensor that they became
        copies = tuple(copies[:1] for copies in first.sharding.replicas)
        firsts[first.spec.name] = first._replace(sharding=Sharding(first.sharding.blocks, copies))
    others = {tensor.spec.name: tensor for _, *tied in groups for tensor in tied}
    reference, target = replace(source, tensors=firsts), replace(source, tensors=others)
    pairs = [(first.spec.name, tensor.spec.name) for first, *tied in groups for tensor in tied]
    first_of = {other: first for first, other in pairs}
    every = checks(reference, target, pairs, limits.band_bytes)
    outcome = compare(reference, target, every, limits, client, on_progress, sample=sample, seed=seed)
    differences = [
        replace(one, side="source", text=f"{one.text}; rules make it one with {first_of[one.name or '']!r}")
        for one in outcome.differences
    ]
    return outcome._replace(differences=tuple(differences))
