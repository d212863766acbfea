"""`load_param_into_net`: load parameters into a network.

A network is anything with `parameters_and_names()`, such as MindSpore's `Cell`, or a mapping of names to parameters.
MindSpore is not imported: a `Cell` has imported it already.

Source: MindSpore 2.10 `train/serialization.py` (`load_param_into_net`, `_update_param`,
`_load_dismatch_prefix_params`).
"""

from __future__ import annotations

import logging
import sys
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard.errors import ReshardError, names
from reshard.mindspore.parameter import Parameter, Tensor, as_mindspore, as_tensor, numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

_log = logging.getLogger("reshard.mindspore")

# Within each of these a value is converted unless strict_load is given.
_FAMILIES = ({"float16", "float32", "float64", "bfloat16"}, {"int4", "int8", "int16", "int32", "int64"})


class NetworkError(ReshardError, RuntimeError):
    """A parameter does not fit the network. Also a RuntimeError, as in MindSpore."""


def load_param_into_net(
    net: Any,
    parameter_dict: Mapping[str, Any],
    strict_load: bool = False,
    remove_redundancy: bool = False,  # noqa: ARG001 -- accepted, see above
) -> tuple[list[str], list[str]]:
    """Load the parameters of a checkpoint into a network, by name.

    Without `strict_load`, a network's parameter that the checkpoint lacks takes the one whose name ends with its own
    (`weight` takes `net.weight`) unless that is ambiguous; floats are converted to floats, integers to integers. Shapes
    must agree; `(12, 2048, 1, 1)` also goes to `(12, 2048)`. All parameters are checked before the first is set.

    Args:
        net: anything with `parameters_and_names()`, such as a MindSpore `Cell`, or a mapping of names to Parameters.
        parameter_dict: the result of `load_checkpoint`, here or MindSpore's; values may be arrays and tensors too.
        strict_load: convert nothing, and match only equal names.
        remove_redundancy: accepted.

    Returns:
        names in the network that were not loaded (`accu_grads*` left out, as MindSpore does), and names in the
        checkpoint that were not used.

    Raises:
        TypeError: `net` has no named parameters, or `parameter_dict` is not a dict of parameters.
        RuntimeError: a shape, dtype or integer does not fit (a `NetworkError`).

    >>> net = {"w": Parameter([[0.0, 0.0]], "w"), "b": Parameter([0.0], "b")}
    >>> load_param_into_net(net, {"w": Parameter([[1.0, 2.0]], "w"), "step": Parameter(7, "step")})
    (['b'], ['step'])
    >>> net["w"].asnumpy().tolist()
    [[1.0, 2.0]]
    """
    if not isinstance(parameter_dict, dict):
        raise TypeError(f"parameter_dict is a {type(parameter_dict).__name__}; expected a dict")
    targets = parameters_of(net, "net")
    if not all(hasattr(target, "set_data") for target in targets.values()):
        raise TypeError("net has arrays; expected Parameters")
    values = {name: value for name, value in parameter_dict.items() if not isinstance(value, str | list)}
    matches = {name: name for name in targets if name in values}
    missing = [name for name in targets if name not in values and not name.startswith("accu_grads")]
    if not strict_load:
        matches |= _by_suffix(missing, values)
    fitted = {name: _fitted(name, targets[name], values[source], strict_load) for name, source in matches.items()}
    _set(net, targets, fitted)
    not_loaded = [name for name in missing if name not in matches]
    if not_loaded:
        _log.warning("%d parameters of the network are not loaded: %s", len(not_loaded), names(not_loaded))
    used = set(matches.values())
    return not_loaded, [name for name in parameter_dict if name not in used]


def parameters_of(net: Any, argument: str) -> dict[str, Any]:
    """Return the parameters of a network by name; raise TypeError if it is not a network."""
    if isinstance(net, Mapping):
        return dict(net)
    if hasattr(net, "parameters_and_names"):
        return {param.name: param for _, param in net.parameters_and_names()}
    raise TypeError(
        f"{argument} is a {type(net).__name__}; expected a mapping, or something with parameters_and_names()"
    )


def _by_suffix(missing: Collection[str], values: Iterable[str]) -> dict[str, str]:
    """Return longer names of the checkpoint for missing ones; of several the shortest, if the others end with it."""
    wanted = set(missing)
    candidates: dict[str, list[str]] = defaultdict(list)
    for longer in values:
        parts = longer.split(".")
        for number in range(1, len(parts)):
            name = ".".join(parts[number:])
            if name in wanted:
                candidates[name].append(longer)
    matches: dict[str, str] = {}
    for name, longer_names in candidates.items():
        shortest = min(longer_names, key=len)
        if all(longer.endswith(shortest) for longer in longer_names):
            matches[name] = shortest
        else:
            _log.warning("%r may be %s; it is not loaded", name, names(longer_names))
    return matches


def _fitted(name: str, target: Any, value: Any, strict_load: bool) -> Tensor:
    """Convert a value to the shape and dtype of the network's parameter, or raise `NetworkError`."""
    tensor = as_tensor(value, name)
    if isinstance(target, Parameter) and not isinstance(value, Tensor):
        tensor = Tensor(tensor)  # the network keeps it: not the memory of another library
    shape, dtype = tuple(target.shape), numpy_dtype(target.dtype)
    if tensor.shape != shape:
        if tensor.shape != shape + (1,) * (tensor.ndim - len(shape)):
            raise NetworkError(
                f"parameter {name!r} has shape {shape} in the network and {tensor.shape} in the checkpoint",
                code="wrong-shape",
            )
        tensor = Tensor.from_numpy(tensor.array.reshape(shape))
    if tensor.dtype != dtype:
        if strict_load or not any({tensor.dtype.name, dtype.name} <= family for family in _FAMILIES):
            raise NetworkError(
                f"parameter {name!r} is {dtype} in the network and {tensor.dtype} in the checkpoint"
                + ("; strict_load converts nothing" if strict_load else ""),
                code="wrong-dtype",
            )
        _log.warning("%r is %s in the checkpoint; converted to the network's %s", name, tensor.dtype, dtype)
        converted = tensor.astype(dtype)
        if converted.asnumpy().dtype.kind == "i" and not np.array_equal(tensor.asnumpy(), converted.asnumpy()):
            raise NetworkError(
                f"parameter {name!r} is {dtype} in the network, and the checkpoint has larger numbers",
                code="out-of-range",
            )
        return converted
    return tensor


def _set(net: Any, targets: Mapping[str, Any], fitted: Mapping[str, Tensor]) -> None:
    """Set the values of a network's parameters."""
    mindspore: Any = sys.modules.get("mindspore")
    if mindspore is not None and isinstance(net, mindspore.nn.Cell):
        theirs = {name: mindspore.Parameter(as_mindspore(tensor), name=name) for name, tensor in fitted.items()}
        mindspore.load_param_into_net(net, theirs, strict_load=True)
    else:
        for name, tensor in fitted.items():
            target = targets[name]
            target.set_data(tensor if isinstance(target, Parameter) else as_mindspore(tensor), target.sliced)
