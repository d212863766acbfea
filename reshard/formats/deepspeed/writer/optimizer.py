"""`zero/optimizer_state.pt` of a Universal Checkpoint: the optimizer without the states of parameters.

DeepSpeed looks for other values at each stage of ZeRO. Stages 1 and 2 take hyper-parameters from `param_groups`, a dict
for each group. Stage 3 takes those of the first group for all groups, from `optimizer_state_dict.param_groups`; so only
those that are equal in all groups are there, and the training keeps its own for the others. Stage 3 also takes the step
from `optimizer_state_dict.state[0].step`. All other values are carried as they are, but for the flat buffers.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from reshard.errors import SourceError
from reshard.formats.deepspeed.writer.instructions import GraphNode, dict_of, list_of, text, value_of, written
from reshard.kits.torch.saved_tensors import rebuilding, saved_storages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.core.layout.block import Shape
    from reshard.dtypes import DType
    from reshard.formats.deepspeed.writer.instructions import Value
    from reshard.formats.deepspeed.writer.saved_values import SavedValues

_OF_TORCH, _GROUPS, _VERSION, _PARAMS = "optimizer_state_dict", "param_groups", "ds_version", "params"
_BASE = "base_optimizer_state"
_OF_RANK = (_BASE, "single_partition_of_fp32_groups", "fp32_flat_groups", "fp32_groups", "param_slice_mappings")


class StepTensor(NamedTuple):
    """The number of steps as a tensor of one element."""

    dtype: DType
    shape: Shape
    content: bytes


class CarriedOptimizer:
    """The optimizer of a source, without the states of parameters.

    Attributes:
        has_groups: the source has the hyper-parameters.
    """

    def __init__(self, saved: SavedValues, *, universal: bool, groups: int, version: Value | None) -> None:
        """Read what is carried.

        Args:
            saved: the optimizer states of rank 0, or the optimizer's file of a Universal Checkpoint.
            universal: the source is a Universal Checkpoint.
            groups: the number of groups of parameters, if the source does not have the hyper-parameters.
            version: the version of DeepSpeed, if the file does not have it.

        Raises:
            SourceError: the file is not valid, or has values that cannot be carried.
        """
        of_file = saved.root.entries
        root = saved.root if universal else of_file.get(_OF_TORCH)  # DeepSpeed's own, of the same name
        if not isinstance(root, GraphNode):
            raise SourceError(f"{saved.file.path} has no {_OF_TORCH}", code="bad-value")
        values = root.entries
        of_torch = values.get(_OF_TORCH, values.get(_BASE))  # a list if the checkpoint is elastic
        hyper = of_torch.entries.get(_GROUPS) if isinstance(of_torch, GraphNode) else None
        stored = values.get(_GROUPS, hyper)
        items = stored.items if isinstance(stored, GraphNode) else ()
        self._groups = [group for group in items if isinstance(group, GraphNode)]
        self.has_groups = any(len(group.entries) > 1 for group in self._groups)
        if not self._groups:
            self._groups = [dict_of([(text(_PARAMS), value_of([number]))]) for number in range(groups)]
        self._protocol = saved.protocol
        self._root = root.with_entries(
            {**dict.fromkeys((*_OF_RANK, _OF_TORCH, _GROUPS)), _VERSION: values.get(_VERSION, version)}
        )
        self._storages = saved.storages({**self._root.entries, _GROUPS: list_of(self._groups)})

    def saved(self, step: float | StepTensor | None) -> bytes:
        """Return the file; `step` is None if the optimizer does not count steps."""
        storages = dict(self._storages)
        if isinstance(step, StepTensor):
            key = next(key for number in count() if (key := str(number)) not in storages)
            storages[key] = step.content
            value = value_of(rebuilding(step.dtype, step.shape, key))
        else:
            value = value_of(step)
        of_first = [] if step is None else [(text("step"), value)]
        state = dict_of([(value_of(0), dict_of(of_first))])
        shared = list_of([_shared(self._groups)])
        of_torch = dict_of([(text("state"), state), (text(_GROUPS), shared)])
        root = self._root.with_entries({_OF_TORCH: of_torch, _GROUPS: list_of(self._groups)})
        return b"".join(content for _, content in saved_storages(written(root, self._protocol), storages).literals)


def _shared(groups: Sequence[GraphNode]) -> GraphNode:
    """Return the first group with those hyper-parameters that are equal in all groups."""
    first = groups[0]
    contents = [{name: written(value, 2) for name, value in group.entries.items()} for group in groups]
    differing = [
        name for name in first.entries
        if name != _PARAMS and any(content.get(name) != contents[0][name] for content in contents)
    ]  # fmt: skip
    return first.with_entries(dict.fromkeys(differing))
