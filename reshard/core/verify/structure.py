"""Check from headers alone that a checkpoint is complete and valid.

The strategy tells which rank should have which block. For tensors outside the strategy, all ranks of a stage must have
the same names, because they run the same network.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.core.layout.block import cover_fault
from reshard.core.model.holdings import MissingBlocks, in_several_stages, is_deduplicated, leave_out, with_all_stages
from reshard.errors import Faults, Option, SourceError, Text, UsageError, names
from reshard.strategy.names import matches, optimizer_states, ranks_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reshard.core.model.checkpoint import Checkpoint, Sharding
    from reshard.core.plan.inputs import Selection
    from reshard.strategy.strategy import Strategy


def refuse_deduplicated(target: Checkpoint) -> None:
    """Refuse to take replicas for stored once, if no strategy says where each rank has them.

    Raises:
        UsageError: the target has no strategy.
    """
    if target.strategy is None:
        raise UsageError(
            Text(Option("deduplicated"), f" is for ranks with a strategy, and {target.root} has none"),
            code="no-effect", hint="leave it out",
        )  # fmt: skip


def _refuse_unused_drop(target: Checkpoint, selection: Selection) -> None:
    for pattern in selection.drop:
        if pattern != "*" and not any(matches(name, [pattern]) for name in target.unreadable):
            reason = Text(Option("drop", pattern), " has no effect: it matches nothing that cannot be read")
            raise UsageError(reason, code="no-effect", hint="leave it out")


def check_structure(target: Checkpoint, selection: Selection, *, deduplicated: bool = False) -> list[str]:
    """Check everything in headers that opening the checkpoint did not check.

    Args:
        target: a checkpoint; without tensors if no strategy joins its ranks.
        selection: `allow_missing` has globs of tensors that may be missing, `drop` of unreadable entries.
        deduplicated: replicas are stored once, even if no header says so.

    Returns:
        warnings.

    Raises:
        SourceError: the checkpoint is invalid; all faults at once.
        UsageError: a pattern of `drop` matches nothing that cannot be read.
    """
    _refuse_unused_drop(target, selection)
    faults = Faults(target.root)
    warnings = list(target.warnings)
    for number, file in enumerate(target.files):
        for name, reason in file.index.unreadable:
            if name in target.unreadable and not matches(name, selection.drop):
                faults.add(
                    f"rank {target.ranks[number]}: {name!r}",
                    reason,
                    code="unreadable-tensor",
                    hint=leave_out(name, reason),
                )
    in_files = {name for file in target.files for name, _ in file.index.unreadable}
    for name, reason in target.unreadable.items():
        if name not in in_files and not matches(name, selection.drop):
            faults.add(f"tensor {name!r}", reason, code="unreadable-tensor", hint=leave_out(name, reason))
    if not target.tensors:
        warnings.append(
            "no strategy joins the ranks: each is valid by itself; a strategy would show whether everything is there"
        )
        present = set(target.ranks)
        absent = sorted({*range(max(present))} - present)
        if absent:
            have = "has" if len(absent) == 1 else "have"
            fault = f"{have} no file, though there are ranks up to {max(present)}"
            faults.add(ranks_text(absent), fault, code="missing-ranks")
        empty = [r for r, file in zip(target.ranks, target.files, strict=True) if not file.index.entries]
        if empty:
            warnings.append(f"the file of {ranks_text(empty)} has no tensor, and others have tensors")
    _check_cover(target, faults)
    if deduplicated:
        refuse_deduplicated(target)
    if target.strategy is not None:
        _check_names(target, target.strategy, selection.allow_missing, faults)
        once = deduplicated or is_deduplicated(target)
        _check_ranks(target, selection, faults, once=once)
        warnings += _shared(target, target.strategy)
        if once:
            warnings.append("replicas are stored once: each block is there at least once in its stage")
    faults.raise_if_any(SourceError)
    return warnings


def _check_cover(target: Checkpoint, faults: Faults) -> None:
    """Report tensors whose distinct blocks overlap, or do not cover them."""
    cover_faults: dict[Sharding, str | None] = {}
    for name, tensor in target.tensors.items():
        if tensor.sharding not in cover_faults:
            cover_faults[tensor.sharding] = cover_fault(tensor.spec.shape, tensor.sharding.blocks)
        if fault := cover_faults[tensor.sharding]:
            faults.add(f"tensor {name!r}", fault, code="not-covered")


def _check_names(target: Checkpoint, strategy: Strategy, allow_missing: Iterable[str], faults: Faults) -> None:
    """Report missing weights of the strategy, if ranks of their stages exist."""
    states = optimizer_states({**target.tensors, **strategy.tensors}, target.opening.states)
    stages = {strategy.stage_of(rank) for rank in target.ranks}
    for name in strategy.tensors:
        is_present = name in target.tensors or name in target.unreadable or name in states
        if not is_present and stages.intersection(strategy.stages_of(name)) and not matches(name, allow_missing):
            hint = Text("to do without it, pass ", Option("allow_missing", name))
            faults.add(f"tensor {name!r}", "is in the strategy but in no file", code="missing-tensor", hint=hint)


def _check_ranks(target: Checkpoint, selection: Selection, faults: Faults, *, once: bool) -> None:
    """Report ranks that lack a tensor which other ranks of their stage have."""
    replicas = MissingBlocks(target, once=once, converted=False)
    unreadable = {
        (rank, name) for rank, file in zip(target.ranks, target.files, strict=True) for name, _ in file.index.unreadable
    }
    lacking: dict[int, list[str]] = {}
    for name, tensor in target.tensors.items():
        lacks = replicas.lacking(tensor)
        if lacks and not matches(name, selection.allow_missing):
            for rank in dict.fromkeys(lack.rank for lack in lacks if (lack.rank, name) not in unreadable):
                lacking.setdefault(rank, []).append(name)
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank, missing in sorted(lacking.items()):
        alike.setdefault(tuple(missing), []).append(rank)
    for lacked, ranks in alike.items():
        is_not = "is not" if len(lacked) == 1 else "are not"
        its_file = "its file" if len(ranks) == 1 else "their files"
        faults.add(
            f"{ranks_text(ranks)}: {names(lacked, most=3)}",
            f"{is_not} in {its_file}, unlike in those of other ranks of the stage",
            code="missing-replicas",
            hint=Text("if each replica is stored once, pass ", Option("deduplicated")),
        )


def _shared(target: Checkpoint, strategy: Strategy) -> list[str]:
    """Return a warning about stages that have no part of tensors shared across stages."""
    lacking: dict[str, None] = {}
    stages: set[int] = set()
    present = {strategy.stage_of(rank) for rank in target.ranks}
    for name, tensor in target.tensors.items():
        if in_several_stages(target, tensor):
            replicas = with_all_stages(target, tensor).sharding.replicas
            stages_with_tensor = {strategy.stage_of(target.ranks[at.file]) for copies in replicas for at in copies}
            if without := present.intersection(strategy.stages_of(name)) - stages_with_tensor:
                lacking[name] = None
                stages |= without
    if not lacking:
        return []
    lack = f"stage {names(sorted(stages))} has nothing of {names(lacking, most=3)}, which it shares with others"
    return [f"{lack}: MindSpore leaves out what another stage stores"]
