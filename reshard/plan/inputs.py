"""The inputs of a plan as provenance, and a selection from its record."""

from __future__ import annotations

from dataclasses import asdict, replace
from glob import escape
from typing import TYPE_CHECKING

from reshard.formats.provenance import (
    LoraRecord,
    Provenance,
    SelectionRecord,
    SourceRecord,
    StrategyRecord,
    TargetRecord,
)
from reshard.plan.select import Selection
from reshard.strategy.strategy import Strategy

if TYPE_CHECKING:
    from reshard.plan.plan import Plan

_MOST_STARS = 8


def provenance_of(plan: Plan, source: SourceRecord) -> Provenance:
    """Return the provenance of a plan's target.

    Args:
        plan: the plan; without a request, its files are converted one by one.
        source: the record of its source.
    """
    from reshard import __version__

    request = plan.request
    strategy = request.target if request and isinstance(request.target, Strategy) else None
    target = TargetRecord(
        StrategyRecord.of(strategy),
        request.stage if request else None,
        plan.format,
        bool(request and request.remove_redundancy),
        plan.cipher.mode if plan.cipher else None,
        next((file.path for file in plan.files if file.last), None),
    )
    selection = request.selection if request else Selection(drop=tuple(map(escape, plan.dropped)))
    return Provenance(__version__, source, target, selection_record(selection))


def ledger_provenance(plan: Plan) -> Provenance:
    """Return the provenance of a plan's target for its ledger, equal for all plans that write parts of one target."""
    result = provenance_of(plan, SourceRecord.by_path(plan.source.opened))
    target, selection = result.target, result.selection
    if any(file.pointer for file in plan.files):  # it describes itself, without the dropped tensors
        target = replace(target, strategy=None)
        selection = replace(selection, exclude=(*selection.exclude, *map(escape, plan.dropped)))
    if target.strategy is not None and len(range(*target.strategy.stages)) > 1:
        target = replace(target, stage=None)  # the strategy defines the ranks, even if only some are written
    return replace(result, target=target, selection=selection)


def selection_record(selection: Selection) -> SelectionRecord:
    """Return the record of a selection."""
    return SelectionRecord(
        selection.include, selection.exclude, selection.weights_only, dict(selection.name_map), dict(selection.cast),
        selection.drop, selection.allow_missing, selection.rules.data() if selection.rules else None,
        LoraRecord(**asdict(selection.lora)) if selection.lora else None,
    )  # fmt: skip


def selection_of(record: SelectionRecord) -> Selection:
    """Return the selection of a record; raise `ValueError`, or a `ReshardError`, if it is invalid.

    Globs whose regular expressions could take forever are refused.
    """
    for old in record.names:
        if old.count("*") > _MOST_STARS or "**" in old:
            key_path = f"$.provenance.selection.names[{old!r:.60}]"
            raise ValueError(f"{key_path} has more than {_MOST_STARS} stars, or two next to each other")
    return Selection(
        record.include, record.exclude, record.weights_only, record.names, record.cast, record.drop,
        record.allow_missing, record.rules, asdict(record.lora) if record.lora else None,
    )  # fmt: skip
