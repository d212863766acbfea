"""Read DeepSpeed's model states: weights and buffers, and the shapes and order of parameters.

`module` has whole weights, views of the flat buffers of their groups; with ZeRO stage 3 its parameters are of shape
(0,). `param_shapes` has the trainable parameters in the order of the flat buffers: a dict for each group, with stage 3
for each sub-group. Frozen parameters are in `module`; with stage 3 each rank has a part of them, in
`frozen_param_fragments`. `shared_params` has the names of tied parameters, each with the name that has the states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.errors import SourceError
from reshard.formats.deepspeed.names import MODEL_STATES
from reshard.formats.deepspeed.pickled import flat, shapes, table, whole_number
from reshard.kits.torch.dtensors import is_tensor
from reshard.kits.torch.pickles import Pairs, describe
from reshard.kits.torch.tensors import rebuilt

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from reshard.core.layout.block import Shape
    from reshard.kits.torch.file import TorchFile
    from reshard.kits.torch.tensors import Rebuilt

_TENSORS = {"module", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params", "buffer_names"}
_EXPERT_LAYERS = ("ds_autoep_layers", "autoep_layers")


class ModelStates(NamedTuple):
    """The model states of one file.

    Attributes:
        file: the file, without its value.
        module: the tensors of the module, by name.
        refused: values of the module that are not read, with the reason.
        groups: the shapes of trainable parameters, in the order of the flat buffers; None if the file has none.
        frozen_shapes: the shapes of frozen parameters.
        frozen: the rank's part of frozen parameters with ZeRO stage 3.
        shared: the name that has the states, by the other names of tied parameters; in old checkpoints, none.
        buffers: the names of the buffers in the module.
        others: the other values.
    """

    file: TorchFile
    module: Mapping[str, Rebuilt]
    refused: Mapping[str, str]
    groups: Sequence[Mapping[str, Shape]] | None
    frozen_shapes: Mapping[str, Shape]
    frozen: Mapping[str, Rebuilt]
    shared: Mapping[str, str]
    buffers: Collection[str]
    others: Mapping[str, Any]

    @classmethod
    def of(cls, file: TorchFile) -> ModelStates:
        """Interpret a file of model states; raise `SourceError` if it is not valid."""
        try:
            return cls._of(file, table(file.value, "model states"))
        except SourceError as error:
            raise error.about(file.path) from None

    @classmethod
    def _of(cls, file: TorchFile, values: dict[str, Any]) -> ModelStates:
        if "module" not in values:
            raise SourceError("has no module; expected model states of DeepSpeed", code="not-a-state-dict")
        if values["module"] is None:
            raise SourceError(
                "has no weights: pipeline-parallel trainings are not supported", code="unsupported-layout"
            )
        if any(values.get(name) for name in _EXPERT_LAYERS):
            raise SourceError(
                "has experts that DeepSpeed cut by itself (AutoEP), which is not supported", code="unsupported-layout"
            )
        module, refused = {}, {}
        for name, value in table(values["module"], "module").items():
            try:
                module[name] = rebuilt(value)
            except SourceError as error:
                refused[name] = error.message if is_tensor(value) else f"is {describe(value)}, not a tensor"
        groups = values.get("param_shapes")
        if groups is not None and not isinstance(groups, list | tuple):
            raise SourceError(f"has {describe(groups)} for param_shapes; expected a list of dicts", code="bad-value")
        optional = {name: values.get(name) or Pairs() for name in _TENSORS}
        fragments = table(optional["frozen_param_fragments"], "frozen_param_fragments")
        buffers = values.get("buffer_names")
        buffers = buffers if isinstance(buffers, list) else []
        frozen_shapes = shapes(optional["frozen_param_shapes"], "frozen_param_shapes")
        return cls(
            file._replace(value=None), module, refused,
            None if groups is None else [shapes(group, "param_shapes") for group in groups],
            frozen_shapes,
            {
                name: flat(value, f"the fragment of {name!r:.60}") for name, value in fragments.items()
                if name not in module or module[name].shape != frozen_shapes.get(name)  # with stage 2, they are whole
            },
            {
                alias: name for alias, name in table(optional["shared_params"], "shared_params").items()
                if isinstance(name, str)
            },
            {name for name in buffers if isinstance(name, str)},
            {name: value for name, value in values.items() if name not in _TENSORS},
        )  # fmt: skip

    @property
    def is_partitioned(self) -> bool:
        """Return whether ZeRO stage 3 has cut the weights, by the name of the file."""
        match = MODEL_STATES.fullmatch(self.file.path.rpartition("/")[2])
        return match is not None and match["rank"] is not None

    def check_parts(self, count: int) -> None:
        """Compare the number of tensor-parallel parts that have files with `mp_world_size`, if the file has it.

        Raises:
            SourceError: they differ.
        """
        expected = whole_number(self.others.get("mp_world_size"))
        if expected not in {None, count}:
            raise SourceError(
                f"{self.file.path} has mp_world_size {expected}, and there are files of {count} tensor-parallel parts",
                code="wrong-count",
            )
