"""Whether a checkpoint is all there and sound, from headers alone, and what unfinished runs left beside it."""

from __future__ import annotations

from itertools import combinations
from math import prod
from typing import TYPE_CHECKING

from reshard.bands import is_grid
from reshard.block import shape_text
from reshard.errors import Faults, SourceError, names
from reshard.selection import matches, optimizer_states
from reshard.store import PARTIAL

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from reshard.block import Block, Shape
    from reshard.checkpoint import Checkpoint
    from reshard.strategy import Strategy


def check_structure(target: Checkpoint, allow_missing: Iterable[str]) -> list[str]:
    """Check all that headers tell, beyond what was checked when the checkpoint was opened.

    Args:
        target: a checkpoint; one that has no tensors is of ranks that no strategy joins.
        allow_missing: globs of weights that the strategy names and no file need have.

    Returns:
        what should be known though it is no fault.

    Raises:
        SourceError: something is not sound; all faults at once.
    """
    faults = Faults(target.root)
    notices = [*target.notices, *(f"tensor {name!r} {reason}" for name, reason in target.unreadable.items())]
    if not target.tensors:
        notices.append("no strategy joins the ranks: each is sound for itself; a strategy would tell whether it is all")
        present = set(target.ranks)
        absent = sorted({*range(max(present))} - present)
        if absent:
            faults.add(f"rank {names(absent)}", f"has no file, though there are ranks up to {max(present)}")
    _check_cover(target, faults)
    if target.strategy is not None:
        _check_names(target, target.strategy, allow_missing, faults)
        notices += _lacking(target, target.strategy)
    faults.raise_if_any(SourceError)
    return notices


def _check_cover(target: Checkpoint, faults: Faults) -> None:
    """Every element of a tensor must be in exactly one of its distinct blocks."""
    known: dict[int, str | None] = {}
    for name, tensor in target.tensors.items():
        key = id(tensor.shards)
        if key not in known:
            known[key] = _cover_fault(tensor.spec.shape, [shard.block for shard in tensor.shards])
        if fault := known[key]:
            faults.add(f"tensor {name!r}", fault)


def _cover_fault(shape: Shape, blocks: Sequence[Block]) -> str | None:
    """Tell why blocks do not cover a tensor exactly once; None where they do."""
    if is_grid(shape, blocks):
        return None
    for a, b in combinations(blocks, 2):
        if a & b:
            return f"is of shape {shape_text(shape)}, and its blocks {a} and {b} overlap"
    held = sum(block.size for block in blocks)
    if held != prod(shape):
        return f"is of shape {shape_text(shape)}, and its blocks have {held} of {prod(shape)} elements"
    return None


def _check_names(target: Checkpoint, strategy: Strategy, allow_missing: Iterable[str], faults: Faults) -> None:
    """Every weight that the strategy names must be there, as far as ranks of its stages are."""
    states = optimizer_states({**target.tensors, **strategy.tensors})
    stages = {strategy.stage_of(rank) for rank in target.ranks}
    for name in strategy.tensors:
        known = name in target.tensors or name in target.unreadable or name in states
        if not known and stages.intersection(strategy.stages_of(name)) and not matches(name, allow_missing):
            faults.add(
                f"tensor {name!r}",
                f"is in the strategy and in no file; if it need not be there, give --allow-missing '{name}'",
            )


def _lacking(target: Checkpoint, strategy: Strategy) -> list[str]:
    """Tell which ranks lack what the strategy gives them and others have."""
    present = set(target.ranks)
    held: dict[int, set[str]] = {rank: set() for rank in present}
    for file, rank in zip(target.files, target.ranks, strict=True):
        held[rank].update(file.index.entries)
    ranks: set[int] = set()
    lacking: dict[str, None] = {}
    for name in target.tensors:
        for stage in strategy.stages_of(name):
            first = stage * strategy.devices
            for rank in present.intersection(range(first, first + strategy.devices)):
                if name not in held[rank]:
                    ranks.add(rank)
                    lacking[name] = None
    if not lacking:
        return []
    told = "replicas are stored once, or a tensor that stages share is left out of some"
    return [f"rank {names(sorted(ranks))} lacks what other ranks have of {names(lacking, most=3)}: {told}"]


def leftovers(root: Path) -> list[str]:
    """Tell what an unfinished run, or one that goes on, has left below a directory."""
    if not root.is_dir():
        return []
    unfinished = [path.relative_to(root).as_posix() for path in sorted(root.rglob(f"*{PARTIAL}"))]
    found = []
    if unfinished:
        count = f"{len(unfinished)} unfinished file{'s' * (len(unfinished) != 1)}"
        found.append(f"{root}: has {count} ({names(unfinished, most=3)}): a run was interrupted, or goes on")
    return found
