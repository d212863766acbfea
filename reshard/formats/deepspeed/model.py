"""Read DeepSpeed's model states: weights and buffers, and the shapes and order of parameters.

`module` has whole weights, views of the flat buffers of their groups; with ZeRO stage 3 its parameters are of shape
(0,). `param_shapes` has the trainable parameters in the order of the flat buffers: a dict for each group, with stage 3
for each sub-group. Frozen parameters are in `module`; with stage 3 each rank has a part of them, in
`frozen_param_fragments`. `shared_params` has the names of tied parameters, each with the name that has the states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.core.layout.block import LONGEST_NAME, is_possible, shape_text
from reshard.errors import SourceError
from reshard.formats.deepspeed.names import MODEL_STATES
from reshard.kits.torch.dtensors import is_tensor
from reshard.kits.torch.pickles import Pairs, PickledObject, describe, numbers
from reshard.kits.torch.tensors import rebuilt

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from reshard.core.layout.block import Shape
    from reshard.kits.torch.file import TorchFile
    from reshard.kits.torch.tensors import Rebuilt

MASTERS = "fp32"
"""The kind of state that is a parameter in float32."""

STEP = "step"
"""The number of steps of the optimizer, as a kind of state."""

_MOST_NAMES = 1 << 20
_TENSORS = {"module", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params", "buffer_names"}
_EXPERT_LAYERS = ("ds_autoep_layers", "autoep_layers")


class ModelStates(NamedTuple):
    """The model states of one file.

    Attributes:
        number: the number of the file in the checkpoint.
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

    number: int
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
    def of(cls, file: TorchFile, number: int) -> ModelStates:
        """Interpret a file of model states; raise `SourceError` if it is not valid."""
        values = table(file.value, "model states")
        module, refused = _module(values)
        groups = values.get("param_shapes")
        if groups is not None and not isinstance(groups, list | tuple):
            raise SourceError(f"has {describe(groups)} for param_shapes; expected a list of dicts", code="bad-value")
        buffers = values.get("buffer_names")
        frozen_shapes = _shapes(values.get("frozen_param_shapes") or Pairs(), "frozen_param_shapes")
        frozen = {
            name: flat(value, f"the fragment of {name!r:.60}")
            for name, value in optional_table(values, "frozen_param_fragments").items()
            if name not in module or module[name].shape != frozen_shapes.get(name)  # with stage 2, they are whole
        }
        shared = optional_table(values, "shared_params")
        return cls(
            number, file._replace(value=None), module, refused,
            None if groups is None else [_shapes(group, "param_shapes") for group in groups],
            frozen_shapes, frozen,
            {alias: name for alias, name in shared.items() if isinstance(name, str)},
            {name for name in buffers if isinstance(name, str)} if isinstance(buffers, list) else set(),
            {name: value for name, value in values.items() if name not in _TENSORS},
        )  # fmt: skip

    @property
    def is_partitioned(self) -> bool:
        """Return whether ZeRO stage 3 has cut the weights, by the name of the file."""
        match = MODEL_STATES.fullmatch(self.file.path.rpartition("/")[2])
        return match is not None and match["rank"] is not None

    @property
    def shapes(self) -> dict[str, Shape]:
        """Return the shapes of all trainable parameters."""
        return {name: shape for group in self.groups or () for name, shape in group.items()}


def _module(values: Mapping[str, Any]) -> tuple[dict[str, Rebuilt], dict[str, str]]:
    """Return the tensors of the module, and the reason for each value that is not read."""
    if "module" not in values:
        raise SourceError("has no module; expected model states of DeepSpeed", code="not-a-state-dict")
    if values["module"] is None:
        raise SourceError("has no weights: pipeline-parallel trainings are not supported", code="unsupported-layout")
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
    return module, refused


def table(value: object, name: str) -> dict[str, Any]:
    """Return the values of a pickled dict or OrderedDict whose keys are texts; other keys are left out.

    Raises:
        SourceError: it is another value, or a key is too long. The message does not name the file.
    """
    pairs = (value.items or Pairs()) if isinstance(value, PickledObject) and value.name == "OrderedDict" else value
    if not isinstance(pairs, Pairs) or len(pairs) > 2 * _MOST_NAMES:
        raise SourceError(f"has {describe(value)} for {name}; expected a dict", code="bad-value")
    result = {key: item for key, item in pairs.items() if isinstance(key, str)}
    if long := next((key for key in result if len(key.encode()) > LONGEST_NAME), None):
        raise SourceError(f"has {long!r:.60} in {name}; expected at most {LONGEST_NAME} bytes", code="bad-name")
    return result


def optional_table(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a dict among values; empty if there is none. Errors as for `table`."""
    value = values.get(name)
    return {} if value is None else table(value, name)


def _shapes(value: object, name: str) -> dict[str, Shape]:
    """Return shapes by the names of their tensors; raise `SourceError` for other values."""
    result = {}
    for key, size in table(value, name).items():
        shape = numbers(size)
        if not is_possible(shape):
            raise SourceError(f"has the shape {shape_text(shape)} for {key!r:.60} in {name}", code="bad-shape")
        result[key] = shape
    return result


def flat(value: object, name: str) -> Rebuilt:
    """Return a tensor of one dimension without gaps; raise `SourceError` for other values."""
    try:
        tensor = rebuilt(value)
    except SourceError as error:
        raise SourceError(f"has a value for {name} that {error.message}", code=error.code) from None
    if len(tensor.shape) != 1 or (tensor.shape[0] > 1 and tensor.strides != (1,)):
        raise SourceError(
            f"has {name} of shape {shape_text(tensor.shape)}; expected a flat tensor without gaps", code="wrong-shape"
        )
    return tensor


def whole_number(value: object) -> int | None:
    """Return a number from 0, which may be of an enumeration; None for other values."""
    if isinstance(value, PickledObject) and isinstance(value.arguments, tuple) and len(value.arguments) == 1:
        (value,) = value.arguments
    return value if type(value) is int and 0 <= value < 1 << 31 else None
