"""Which ranks hold which blocks: in all stages of a checkpoint, and as a strategy.

The strategy assigns every block to a group of ranks. If each block is stored once per group of replicas
(`remove_redundancy`), one rank of each pipeline stage has it. A conversion writes a shared tensor in each of
its stages, and a tensor that no strategy names on every rank; MindSpore omits a shared tensor from the files of later
stages, and its ranks save tensors that no strategy names only for their own stage.

`strategy_of` derives a strategy from the arrangement of a self-describing checkpoint. A stage is a range of ranks, as
many as the largest layout has devices. Several meshes that make up a stage in order, each with a whole tensor, become
one mesh with another axis. A strategy cannot express a tensor on other ranks. Optimizer parallelism is in the layouts
already (Checkpoint 2.0 folds it into nested maps), so no size of it is set. Training state on every rank, such as the
step, is omitted, as by MindSpore.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from reshard.core.layout.layout import whole
from reshard.core.model.assemble import sharding_of, where
from reshard.core.model.checkpoint import matched
from reshard.core.model.facts import DAMAGED
from reshard.errors import Faults, Option, SourceError, Text, UsageError
from reshard.strategy.names import is_training_state, ranges_text
from reshard.strategy.strategy import Placed, Strategy

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from reshard.core.layout.block import Block, Shape
    from reshard.core.layout.layout import Layout
    from reshard.core.model.checkpoint import Checkpoint, Sharding, Tensor
    from reshard.core.storage.places import Place


class Lack(NamedTuple):
    """A rank and a block that it should hold but lacks."""

    rank: int
    block: Block


def in_several_stages(checkpoint: Checkpoint, tensor: Tensor) -> bool:
    """Return whether several pipeline stages share a tensor."""
    return (
        tensor.listed and checkpoint.strategy is not None and len(checkpoint.strategy.stages_of(tensor.spec.name)) > 1
    )


def with_all_stages(checkpoint: Checkpoint, tensor: Tensor) -> Tensor:
    """Return a tensor with its blocks in all stages; blocks of two stages may overlap.

    A computed tensor, such as a weight with a merged adapter, has only those of the stage that is read.
    """
    strategy, origin = checkpoint.strategy, checkpoint.origin
    is_merged = origin is not None and tensor.spec.name in origin.merged
    read = [at.file for replicas in tensor.sharding.replicas[:1] for at in replicas[:1]]
    is_computed = any(checkpoint.files[file].inputs is not None for file in read)
    if strategy is None or is_merged or is_computed or not in_several_stages(checkpoint, tensor):
        return tensor
    name = tensor.spec.name
    files = checkpoint.files
    places, firsts = where(files, (number for number, file in enumerate(files) if name in file.index.entries))
    sharding = sharding_of(strategy.grid(name, tensor.spec.shape), checkpoint.ranks, places.values())
    return tensor._replace(sharding=sharding, runs=tuple(files[number].index.entries[name].runs for number in firsts))


def is_deduplicated(checkpoint: Checkpoint) -> bool:
    """Return whether a header says that each block is stored once per group of replicas."""
    return any(file.index.deduplicated for file in checkpoint.files)


class MissingBlocks:
    """Finds missing blocks of ranks; results are cached by sharding."""

    def __init__(self, checkpoint: Checkpoint, *, once: bool, converted: bool) -> None:
        """Prepare the search.

        Args:
            checkpoint: the checkpoint.
            once: each block may be stored once per group of replicas.
            converted: expect the blocks that a conversion writes. Otherwise a tensor may be missing from a whole stage.
        """
        self._checkpoint, self._once, self._converted = checkpoint, once, converted
        present = set(checkpoint.ranks)
        whole = checkpoint.strategy is not None and converted and not checkpoint.opening.partial
        self._expected = {*checkpoint.strategy.ranks} if whole and checkpoint.strategy else present
        self._cache: dict[Sharding, tuple[Lack, ...]] = {}

    def lacking(self, tensor: Tensor) -> tuple[Lack, ...]:
        """Return the missing blocks of a tensor, by rank; empty if there is no strategy."""
        if self._checkpoint.strategy is None:
            return ()
        if in_several_stages(self._checkpoint, tensor):
            return tuple(self._missing(tensor))
        if tensor.sharding not in self._cache:
            self._cache[tensor.sharding] = tuple(self._missing(tensor))
        return self._cache[tensor.sharding]

    def may_be_elsewhere(self, name: str, shape: Shape) -> bool:
        """Return whether absent ranks may store all blocks of a tensor that is in no file."""
        strategy = self._checkpoint.strategy
        if not self._once or strategy is None or name not in strategy.tensors:
            return False
        groups = strategy.grid(name, shape).ranks
        return all({*ranks} - self._expected for group in groups for _, ranks in groupby(group, strategy.stage_of))

    def _missing(self, tensor: Tensor) -> Iterator[Lack]:
        strategy, rank_of = self._checkpoint.strategy, self._checkpoint.ranks
        assert strategy is not None  # noqa: S101 -- checked by the callers
        sharding = with_all_stages(self._checkpoint, tensor).sharding
        ranks: Sequence[Sequence[int]] = [strategy.ranks]
        if tensor.listed:
            ranks = strategy.grid(tensor.spec.name, tensor.spec.shape).ranks
        stages = {strategy.stage_of(rank_of[at.file]) for replicas in sharding.replicas for at in replicas}
        for block, copies, giving in zip(sharding.blocks, sharding.replicas, ranks, strict=True):
            present = {rank_of[at.file] for at in copies}
            for stage, ranks_of_stage in groupby(giving, strategy.stage_of):
                group = set(ranks_of_stage)
                absent = group & self._expected - present
                if not (self._converted or stage in stages):
                    continue
                if self._once and (group & present or group - self._expected):
                    continue  # it is stored, or may be stored by an absent rank
                yield from (Lack(rank, block) for rank in sorted(absent))


def leave_out(name: str, reason: str = "") -> Text:
    """Return the hint for a tensor that cannot be read for this reason, or has no place."""
    option = Option("drop", name)
    if reason.startswith(DAMAGED):
        return Text("open another step, or get the file again; to do without the tensor, give ", option)
    return Text("to leave it out, give ", option)


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
    if dropped and not checkpoint.all_names:
        raise UsageError(
            f"no tensor of {checkpoint.root} is left", code="no-tensors", hint=Text("drop fewer: ", Option("drop"))
        )
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
        faults.add(f"tensor {name!r}", reason, code="unreadable-tensor", hint=leave_out(name, reason))
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
            faults.add(f"tensor {name!r}", fault, code="not-whole-stages", hint=leave_out(name))
        else:
            fault = "is on ranks that its layout does not describe"
            faults.add(f"tensor {name!r}", fault, code="unknown-blocks", hint=leave_out(name))
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
