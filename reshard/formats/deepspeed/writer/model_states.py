"""The model states of a Universal Checkpoint: the source's, with whole weights.

All values but the tensors of the module are carried unchanged: counters, schedulers, the state of the client. There are
two files. DeepSpeed looks for `mp_rank_00_model_states.pt` at ZeRO stages 1 and 2, and for
`zero_pp_rank_0_mp_rank_00_model_states.pt` at stage 3. It takes no weights from either, but rounds the masters; so the
second has parameters of shape (0,), as DeepSpeed itself writes them at stage 3.

Frozen parameters are in the module. In the first file, `frozen_param_fragments` are the same tensors; the second has
none, since they may be most of a model, and would be there twice.
"""

from __future__ import annotations

from itertools import count
from math import prod
from typing import TYPE_CHECKING, Any

from reshard.errors import SourceError
from reshard.formats.deepspeed.pickled import optional_table, table
from reshard.formats.deepspeed.writer.saved_values import entries_of, is_dict, pairs_of, with_entries, with_pairs
from reshard.kits.torch.dtensors import is_tensor
from reshard.kits.torch.pickling import pickled
from reshard.kits.torch.saved_tensors import Saved, rebuilding, saved_storages

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from reshard.core.layout.block import Shape
    from reshard.dtypes import DType
    from reshard.formats.deepspeed.writer.saved_values import SavedValues

_MODULE, _FROZEN = "module", "frozen_param_fragments"
_ROUND_ROBIN = (
    "the training has round_robin_gradients: load the target without it (DeepSpeed 0.19 puts states of parameters in "
    "wrong places with it, and says nothing)"
)


class CarriedModelStates:
    """The model states of a source, without the tensors of its module.

    Attributes:
        buffers: the names of the module's buffers.
        groups: the number of groups of trainable parameters.
        parameters: the names of these.
        remarks: warnings for a user who loads a Universal Checkpoint of them.
        version: the version of DeepSpeed.
        nbytes: the size of carried storages.
    """

    def __init__(self, saved: SavedValues, dropped: Collection[str]) -> None:
        """Read what is carried.

        Args:
            saved: the file.
            dropped: the names of values that are not carried.

        Raises:
            SourceError: it is not valid, or has values that cannot be carried.
        """
        values = table(saved.file.value, "model states")
        module = values.get(_MODULE)
        if not is_dict(module):
            raise SourceError(f"{saved.file.path} has no module; expected model states of DeepSpeed", code="bad-value")
        self._module = module
        self._tensors = {name for name, value in table(values[_MODULE], _MODULE).items() if is_tensor(value)}
        self._root = with_entries(saved.root, {}, without=dropped)
        others = with_entries(module, {}, without=self._tensors)
        carried = with_entries(self._root, {_MODULE: others}, without=[_FROZEN])
        self._storages = saved.storages(entries_of(carried))
        self.nbytes = sum(map(len, self._storages.values()))
        self.buffers = set(map(str, values.get("buffer_names") or ()))
        groups = [table(group, "param_shapes") for group in values.get("param_shapes") or ()]
        self.groups, self.parameters = len(groups), [name for group in groups for name in group]
        self.remarks, self.version = [*_remarks(values)], values.get("ds_version")

    def saved(self, tensors: Mapping[str, tuple[DType, Shape]], whole: Collection[str] | None = None) -> Saved:
        """Return a file of model states, with the bytes of whole tensors in their order.

        Args:
            tensors: the dtypes and shapes of the tensors of the module, by name.
            whole: the names of whole tensors, in the file for stage 3; None if all are whole.
        """
        free = (key for number in count() if (key := str(number)) not in self._storages)
        keys = dict(zip(tensors, free, strict=False))
        stored = {
            name: (dtype, shape if whole is None or name in whole else (0,)) for name, (dtype, shape) in tensors.items()
        }
        saved_tensors = {name: rebuilding(*stored[name], keys[name]) for name in stored}
        module = with_entries(self._module, saved_tensors, without=self._tensors - saved_tensors.keys())
        entries: dict[str, object] = {_MODULE: module}
        if is_dict(frozen := entries_of(self._root).get(_FROZEN)):
            names = [name for name, _ in pairs_of(frozen) if whole is None and name in saved_tensors]
            entries[_FROZEN] = with_pairs(frozen, [(name, saved_tensors[name]) for name in names])
        storages = {keys[name]: prod(shape) * dtype.itemsize for name, (dtype, shape) in stored.items()}
        pickle = pickled(with_entries(self._root, entries))
        return saved_storages(pickle, {**self._storages, **storages})


def _remarks(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield remarks on the configuration of the training."""
    zero = optional_table(optional_table(values, "ds_config"), "zero_optimization")
    if zero.get("round_robin_gradients") is True:
        yield _ROUND_ROBIN
