"""What a Universal Checkpoint carries of its source: the model states and the optimizer, without tensors of weights."""

from __future__ import annotations

from itertools import count
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.errors import SourceError
from reshard.formats.deepspeed.writer.values import Dict, Made, entries, value_of, with_entries, written
from reshard.kits.torch.pickles import Name, Pairs
from reshard.kits.torch.pickling import Items
from reshard.kits.torch.saved_tensors import Saved, rebuilding, saved_storages

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterator, Mapping

    from reshard.core.layout.block import Shape
    from reshard.dtypes import DType
    from reshard.formats.deepspeed.writer.values import SavedValues

_MODULE, _FROZEN = "module", "frozen_param_fragments"
_OF_TORCH, _BASE, _GROUPS, _PARAMS = "optimizer_state_dict", "base_optimizer_state", "param_groups", "params"
_OF_RANK = {
    _OF_TORCH, _BASE, _GROUPS, "single_partition_of_fp32_groups", "fp32_flat_groups", "fp32_groups",
    "param_slice_mappings",
}  # fmt: skip


class CarriedModelStates:
    """The model states of a source, without the tensors of its module.

    All values but the tensors of the module are carried unchanged: counters, schedulers, the state of the client. There
    are two files. DeepSpeed looks for `mp_rank_00_model_states.pt` at ZeRO stages 1 and 2, and for
    `zero_pp_rank_0_mp_rank_00_model_states.pt` at stage 3. It takes no weights from either, but rounds the masters; so
    the second has parameters of shape (0,), as DeepSpeed itself writes them at stage 3.

    Frozen parameters are in the module. In the first file, `frozen_param_fragments` are the same tensors; the second
    has none, since they may be most of a model, and would be there twice.

    Args:
        saved: the file of the source.
        dropped: the names of values that are not carried.

    Attributes:
        version: the version of DeepSpeed.
        nbytes: the size of carried storages.

    Raises:
        SourceError: it is not valid, or has values that cannot be carried.
    """

    def __init__(self, saved: SavedValues, dropped: Container[str]) -> None:
        self._root = saved.root
        self._values = {name: value for name, value in entries(saved.root).items() if name not in dropped}
        self._module: Dict = self._values[_MODULE]
        of_module = entries(self._module)
        self._tensors = {name for name, value in of_module.items() if _is_tensor(value)}
        others = {name: value for name, value in of_module.items() if name not in self._tensors}
        carried = self._values | {_MODULE: with_entries(self._module, others), _FROZEN: None}
        self._storages = saved.storages(carried)
        self.nbytes = sum(map(len, self._storages.values()))
        self.version = entries(saved.root).get("ds_version")

    def saved(self, tensors: Mapping[str, tuple[DType, Shape]], whole: Collection[str] | None = None) -> Saved:
        """Return a file of model states, with the bytes of whole tensors in their order.

        Args:
            tensors: the dtypes and shapes of the tensors of the module, by name.
            whole: the names of whole tensors, in the file for stage 3; None if all are whole.
        """
        stored = {
            name: (dtype, shape if whole is None or name in whole else (0,)) for name, (dtype, shape) in tensors.items()
        }
        keys = dict(zip(stored, _free_keys(self._storages), strict=False))
        rebuilt = entries(value_of(Items((name, rebuilding(*stored[name], keys[name])) for name in stored)))
        others = {name: value for name, value in entries(self._module).items() if name not in self._tensors}
        values = self._values | {_MODULE: with_entries(self._module, others | rebuilt)}
        frozen = self._values.get(_FROZEN)
        if isinstance(frozen, Dict):
            names = entries(frozen).keys() & rebuilt.keys() if whole is None else ()
            values[_FROZEN] = with_entries(frozen, {name: rebuilt[name] for name in names})
        sizes = {keys[name]: prod(shape) * dtype.itemsize for name, (dtype, shape) in stored.items()}
        return saved_storages(written(with_entries(self._root, values)).content, {**self._storages, **sizes})


class StepTensor(NamedTuple):
    """The number of steps as a tensor of one element."""

    dtype: DType
    shape: Shape
    content: bytes


class CarriedOptimizer:
    """The optimizer of a source, without the states of parameters: `zero/optimizer_state.pt`.

    DeepSpeed looks for other values at each stage of ZeRO. Stages 1 and 2 take hyper-parameters from `param_groups`, a
    dict for each group. Stage 3 takes those of the first group for all groups, from
    `optimizer_state_dict.param_groups`; so only those that are equal in all groups are there, and the training keeps
    its own for the others. Stage 3 also takes the step from `optimizer_state_dict.state[0].step`. All other values are
    carried as they are, but for the flat buffers.

    Args:
        saved: the optimizer states of rank 0, or the optimizer's file of a Universal Checkpoint.
        universal: the source is a Universal Checkpoint.
        groups: the number of groups of parameters, if the source does not have the hyper-parameters.
        version: the version of DeepSpeed, if the file does not have it.

    Attributes:
        has_groups: the source has the hyper-parameters.

    Raises:
        SourceError: the file is not valid, or has values that cannot be carried.
    """

    def __init__(self, saved: SavedValues, *, universal: bool, groups: int, version: object) -> None:
        root = saved.root if universal else entries(saved.root).get(_OF_TORCH)  # DeepSpeed's own, of the same name
        if not isinstance(root, Dict):
            raise SourceError(f"{saved.file.path} has no {_OF_TORCH}", code="bad-value")
        values = entries(root)
        of_torch = values.get(_OF_TORCH, values.get(_BASE))
        hyper = entries(of_torch).get(_GROUPS) if isinstance(of_torch, Dict) else None  # a list if it is elastic
        self._root = root
        self._groups = [group for group in values.get(_GROUPS, hyper) or () if isinstance(group, Dict)]
        self.has_groups = any(len(entries(group)) > 1 for group in self._groups)
        self._groups = self._groups or [Pairs([_PARAMS, [number]]) for number in range(groups)]
        self._values = {name: value for name, value in values.items() if name not in _OF_RANK}
        if version is not None:
            self._values.setdefault("ds_version", version)
        self._storages = saved.storages({**self._values, _GROUPS: self._groups})

    def saved(self, step: float | StepTensor | None) -> bytes:
        """Return the file; `step` is None if the optimizer does not count steps."""
        storages = dict(self._storages)
        value: object = step
        if isinstance(step, StepTensor):
            key = next(_free_keys(storages))
            storages[key] = step.content
            value = value_of(rebuilding(step.dtype, step.shape, key))
        first = self._groups[0]
        contents = [{name: written(value).content for name, value in entries(group).items()} for group in self._groups]
        shared = {
            name: value for name, value in entries(first).items()
            if name == _PARAMS or all(content.get(name) == contents[0][name] for content in contents)
        }  # fmt: skip
        of_torch = {
            "state": {0: {} if step is None else {"step": value}}, _GROUPS: [with_entries(first, shared)],
        }  # fmt: skip
        root = with_entries(self._root, {**self._values, _OF_TORCH: of_torch, _GROUPS: self._groups})
        pickle = written(root).content
        return b"".join(content for _, content in saved_storages(pickle, storages).literals)


def _is_tensor(value: object) -> bool:
    """Return whether a value is a tensor, also of a kind that is not read."""
    return isinstance(value, Made) and isinstance(value.function, Name) and value.function.name.startswith("_rebuild_")


def _free_keys(storages: Mapping[str, Any]) -> Iterator[str]:
    """Yield keys that no storage has."""
    return (key for number in count() if (key := str(number)) not in storages)
