"""Derive a strategy from a self-describing checkpoint, or from a rules file.

A stage is a range of ranks, as many as the largest layout has devices. Several meshes that make up a stage in order,
each with a whole tensor, become one mesh with another axis. A strategy cannot express a tensor on other ranks.

Optimizer parallelism is in the layouts already (Checkpoint 2.0 folds it into nested maps), so no size of it is set.
Training state on every rank, such as the step, is omitted, as by MindSpore.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.errors import Faults, Option, SourceError, Text, UsageError
from reshard.layout.layout import whole
from reshard.source.checkpoint import matched
from reshard.strategy.names import is_training_state, ranges_text
from reshard.strategy.strategy import Placed, Strategy

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from reshard.layout.layout import Layout
    from reshard.source.checkpoint import Checkpoint
    from reshard.storage.places import Place


def _leave_out(name: str) -> Text:
    return Text("to leave it out, give ", Option("drop", name))


def strategy_of(checkpoint: Checkpoint, *, drop: Collection[str] = ()) -> Strategy:
    """Return the strategy of a checkpoint, as opened or from its metadata.

    Args:
        checkpoint: an opened checkpoint.
        drop: names of tensors to leave out, or globs; every one must match.

    Raises:
        UsageError: the checkpoint has no strategy, and does not describe its blocks, unlike Checkpoint 2.0; a pattern
            matches no tensor.
        SourceError: tensors cannot be read, or are on ranks that no strategy can express; all faults at once.
    """
    dropped = matched(checkpoint.root, {**checkpoint.tensors, **checkpoint.unreadable}, drop)
    checkpoint = checkpoint.without(dropped)
    if checkpoint.strategy is not None:
        remaining = {name: placed for name, placed in checkpoint.strategy.tensors.items() if name not in dropped}
        return replace(checkpoint.strategy, tensors=remaining)
    arrangement = checkpoint.extras.arrangement
    if arrangement is None:
        raise UsageError(
            f"{checkpoint.root} does not say which rank holds which block",
            code="no-layout",
            facts=["whole tensors need no strategy"],
        )
    layouts = [arranged.layout for arranged in arrangement.tensors.values() if arranged.layout]
    devices = max((layout.devices for layout in layouts), default=len(set(checkpoint.ranks)))
    faults = Faults(checkpoint.root)
    for name, reason in checkpoint.unreadable.items():
        faults.add(f"tensor {name!r}", reason, code="unreadable-tensor", hint=_leave_out(name))
    tensors = {}
    for name, tensor in checkpoint.tensors.items():
        arranged = arrangement.tensors.get(name)
        if arranged is None or is_training_state(name, tensor):
            continue
        shape, ranks = tensor.spec.shape, arranged.ranks
        layout = arranged.layout or whole(len(shape), devices)
        if (stages_with_tensor := _stages(ranks, devices)) and not devices % layout.devices:
            layout = replace(layout, dev_matrix=_filled(layout, devices))
            tensors[name] = tuple(Placed(stage, layout, shape) for stage in sorted(stages_with_tensor))
        elif ranks:
            fault = f"is on ranks {ranges_text(ranks)}, which are not whole stages of {devices} ranks in order"
            faults.add(f"tensor {name!r}", fault, code="not-whole-stages", hint=_leave_out(name))
        else:
            fault = "is on ranks that its layout does not describe"
            faults.add(f"tensor {name!r}", fault, code="unknown-blocks", hint=_leave_out(name))
    faults.raise_if_any(SourceError)
    stages = range(max(max(arranged.ranks, default=0) for arranged in arrangement.tensors.values()) // devices + 1)
    several = len(stages) > 1
    return Strategy(tensors, stages, devices, merged=several, current_stage=1 if several else 2)


def _stages(ranks: Sequence[int], devices: int) -> list[int]:
    """Return the stages that consist of these ranks in order; empty if there are none.

    >>> _stages((4, 5, 6, 7, 0, 1, 2, 3), 4), _stages((0, 2), 4), _stages((1, 0), 2)
    ([1, 0], [], [])
    """
    stages = [rank // devices for rank in ranks[::devices]]
    return stages if [*ranks] == [stage * devices + device for stage in stages for device in range(devices)] else []


def _filled(layout: Layout, devices: int) -> tuple[int, ...]:
    """Return the device matrix of a layout, repeated to cover `devices` devices."""
    outer = devices // layout.devices
    return (outer, *layout.dev_matrix) if outer > 1 else layout.dev_matrix


def strategy_by_rules(
    rules: Place, checkpoint: Checkpoint, *, target_names: Mapping[str, str] | None = None, predict: bool = False
) -> Strategy:
    """Return the strategy that a rules file defines for the tensors of a checkpoint.

    Args:
        rules: a YAML file; see `strategy.rules`.
        checkpoint: the source of names, shapes and dtypes. Tensors without a known layout, and training state
            (global_step and the like), are left out unless a rule matches them.
        target_names: the new name of each tensor to include, by name in the checkpoint; by default all, unchanged.
        predict: leave out the states of the optimizer.

    Raises:
        UsageError: the file cannot be read, or is not a rules file for these tensors; all faults at once.
        SourceError: the checkpoint seems to have the blocks of one rank.
    """
    from reshard.strategy.rules import layouts_from_file  # lazy import: rarely needed

    checkpoint.require_whole()
    names = {name: name for name in checkpoint.tensors} if target_names is None else target_names
    tensors = {new: checkpoint.tensors[old] for old, new in names.items() if checkpoint.tensors[old].text is None}
    has_layout = checkpoint.strategy is not None or checkpoint.extras.has_layouts
    layouts, shapes = layouts_from_file(
        rules,
        {name: tensor.spec.shape for name, tensor in tensors.items()},
        dtypes={name: tensor.spec.dtype for name, tensor in tensors.items()},
        only_by_rule={
            name for name, t in tensors.items() if is_training_state(name, t) or (has_layout and not t.listed)
        },
        predict=predict,
    )
    return Strategy.of(layouts, shapes=shapes)
