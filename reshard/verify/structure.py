"""Whether a checkpoint is all there and valid, from headers alone, and what unfinished runs left next to it.

Which rank shall hold which block is known from the strategy; of what it does not name, only that all ranks of a stage
save the same names, because they run the same network.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.errors import Faults, Option, SourceError, Text, names
from reshard.layout.block import cover_fault
from reshard.source.replicas import Replicas, in_every_stage, in_several_stages, is_deduplicated
from reshard.strategy.names import matches, optimizer_states, ranks_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reshard.plan.select import Selection
    from reshard.source.checkpoint import Checkpoint, Sharding
    from reshard.strategy.strategy import Strategy


def check_structure(target: Checkpoint, selection: Selection, *, deduplicated: bool = False) -> list[str]:
    """Check all that headers tell, beyond what was checked when the checkpoint was opened.

    Args:
        target: a checkpoint; one that has no tensors is of ranks that no strategy joins.
        selection: `allow_missing` has globs of tensors that need not be there, `drop` of entries that nobody can read.
        deduplicated: each replica is stored once, whether the files say so or not.

    Returns:
        what should be known though it is not a fault.

    Raises:
        SourceError: something is not valid; all faults at once.
    """
    faults = Faults(target.root)
    defects = target.extras.defects
    warnings = [warning for warning in target.warnings if warning not in defects]
    if defects:  # all of one file
        where, whats = defects[0].partition(": ")[0], [text.partition(": ")[2] for text in defects]
        faults.add(where, "; ".join(whats), code="wrong-description")
    for number, file in enumerate(target.files):
        for name, reason in file.index.unreadable:
            if name in target.unreadable and not matches(name, selection.drop):
                faults.add(
                    f"rank {target.ranks[number]}: {name!r}", reason, code="unreadable-tensor", hint=_leave_out(name)
                )
    in_files = {name for file in target.files for name, _ in file.index.unreadable}
    for name, reason in target.unreadable.items():
        if name not in in_files and not matches(name, selection.drop):
            faults.add(f"tensor {name!r}", reason, code="unreadable-tensor", hint=_leave_out(name))
    if not target.tensors:
        warnings.append(
            "no strategy joins the ranks: each is valid by itself; a strategy would show whether everything is there"
        )
        present = set(target.ranks)
        absent = sorted({*range(max(present))} - present)
        if absent:
            have = "has" if len(absent) == 1 else "have"
            what = f"{have} no file, though there are ranks up to {max(present)}"
            faults.add(ranks_text(absent), what, code="missing-ranks")
        empty = [r for r, file in zip(target.ranks, target.files, strict=True) if not file.index.entries]
        if empty:
            warnings.append(f"the file of {ranks_text(empty)} has no tensor, and others have tensors")
    _check_cover(target, faults)
    if target.strategy is not None:
        _check_names(target, target.strategy, selection.allow_missing, faults)
        once = deduplicated or is_deduplicated(target)
        _check_ranks(target, selection, faults, once=once)
        warnings += _shared(target, target.strategy)
        if once:
            warnings.append("replicas are stored once: each block is there at least once in its stage")
    faults.raise_if_any(SourceError)
    return warnings


def _leave_out(name: str) -> Text:
    return Text("to leave it out, pass ", Option("drop", name))


def _check_cover(target: Checkpoint, faults: Faults) -> None:
    """Every element of a tensor must be in exactly one of its distinct blocks."""
    known: dict[Sharding, str | None] = {}
    for name, tensor in target.tensors.items():
        if tensor.sharding not in known:
            known[tensor.sharding] = cover_fault(tensor.spec.shape, tensor.sharding.blocks)
        if fault := known[tensor.sharding]:
            faults.add(f"tensor {name!r}", fault, code="not-covered")


def _check_names(target: Checkpoint, strategy: Strategy, allow_missing: Iterable[str], faults: Faults) -> None:
    """Every weight that the strategy names must be there, as far as ranks of its stages are."""
    states = optimizer_states({**target.tensors, **strategy.tensors})
    stages = {strategy.stage_of(rank) for rank in target.ranks}
    for name in strategy.tensors:
        known = name in target.tensors or name in target.unreadable or name in states
        if not known and stages.intersection(strategy.stages_of(name)) and not matches(name, allow_missing):
            hint = Text("to do without it, pass ", Option("allow_missing", name))
            faults.add(f"tensor {name!r}", "is in the strategy but in no file", code="missing-tensor", hint=hint)


def _check_ranks(target: Checkpoint, selection: Selection, faults: Faults, *, once: bool) -> None:
    """Every rank that is there must have what the strategy gives it, as far as any rank of its stage has it."""
    replicas = Replicas(target, once=once, converted=False)
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
    for rank, some in sorted(lacking.items()):
        alike.setdefault(tuple(some), []).append(rank)
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
    """Return which stages have nothing of what they share with others."""
    lacking: dict[str, None] = {}
    stages: set[int] = set()
    present = {strategy.stage_of(rank) for rank in target.ranks}
    for name, tensor in target.tensors.items():
        if in_several_stages(target, tensor):
            replicas = in_every_stage(target, tensor).sharding.replicas
            held = {strategy.stage_of(target.ranks[at.file]) for some in replicas for at in some}
            if without := present.intersection(strategy.stages_of(name)) - held:
                lacking[name] = None
                stages |= without
    if not lacking:
        return []
    lack = f"stage {names(sorted(stages))} has nothing of {names(lacking, most=3)}, which it shares with others"
    return [f"{lack}: MindSpore leaves out what another stage stores"]
