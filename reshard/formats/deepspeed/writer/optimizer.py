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
from reshard.formats.deepspeed.writer.saved_values import entries_of, is_dict, with_entries
from reshard.kits.torch.pickles import Pairs, PickledObject
from reshard.kits.torch.pickling import pickled
from reshard.kits.torch.saved_tensors import rebuilding, saved_storages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.core.layout.block import Shape
    from reshard.dtypes import DType
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

    def __init__(self, saved: SavedValues, *, universal: bool, groups: int, version: object) -> None:
        """Read what is carried.

        Args:
            saved: the optimizer states of rank 0, or the optimizer's file of a Universal Checkpoint.
            universal: the source is a Universal Checkpoint.
            groups: the number of groups of parameters, if the source does not have the hyper-parameters.
            version: the version of DeepSpeed, if the file does not have it.

        Raises:
            SourceError: the file is not valid, or has values that cannot be carried.
        """
        root = saved.root if universal else entries_of(saved.root).get(_OF_TORCH)  # DeepSpeed's own, of the same name
        if not is_dict(root):
            raise SourceError(f"{saved.file.path} has no {_OF_TORCH}", code="bad-value")
        values = entries_of(root)
        of_torch = values.get(_OF_TORCH, values.get(_BASE))  # a list if the checkpoint is elastic
        stored = values.get(_GROUPS, entries_of(of_torch).get(_GROUPS))
        self._groups = [group for group in stored if is_dict(group)] if isinstance(stored, list) else []
        self.has_groups = any(len(entries_of(group)) > 1 for group in self._groups)
        if not self._groups:
            self._groups = [Pairs([_PARAMS, [number]]) for number in range(groups)]
        versions = {} if version is None or _VERSION in values else {_VERSION: version}
        self._root = with_entries(root, versions, without=(*_OF_RANK, _OF_TORCH, _GROUPS))
        self._storages = saved.storages({**entries_of(self._root), _GROUPS: self._groups})

    def saved(self, step: float | StepTensor | None) -> bytes:
        """Return the file; `step` is None if the optimizer does not count steps."""
        storages = dict(self._storages)
        value: object = step
        if isinstance(step, StepTensor):
            key = next(key for number in count() if (key := str(number)) not in storages)
            storages[key] = step.content
            value = rebuilding(step.dtype, step.shape, key)
        of_first = {} if step is None else {"step": value}
        of_torch = {"state": {0: of_first}, _GROUPS: [_shared(self._groups)]}
        root = with_entries(self._root, {_OF_TORCH: of_torch, _GROUPS: self._groups})
        return b"".join(content for _, content in saved_storages(pickled(root), storages).literals)


def _shared(groups: Sequence[Pairs | PickledObject]) -> Pairs | PickledObject:
    """Return the first group with those hyper-parameters that are equal in all groups."""
    contents = [{name: pickled(value) for name, value in entries_of(group).items()} for group in groups]
    differing = [
        name for name in contents[0]
        if name != _PARAMS and any(content.get(name) != contents[0][name] for content in contents)
    ]  # fmt: skip
    return with_entries(groups[0], {}, without=differing)
