"""`load_param_into_net`: load parameters into a network of any framework.

A network is anything with `parameters_and_names()` (any class, a MindSpore `Cell`), a `torch.nn.Module`, or a mapping
of names to parameters or arrays. No framework is imported: the network's own is imported already.

Source: MindSpore 2.10 `train/serialization.py` (`load_param_into_net`, `_update_param`,
`_load_dismatch_prefix_params`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard.errors import ReshardError, UsageError, names
from reshard.mindspore.parameter import Parameter, Tensor, as_mindspore, as_tensor, as_torch, dtype_of, kind_of

if TYPE_CHECKING:
    from reshard.dtypes import DType

_log = logging.getLogger("reshard.mindspore")

# Within each of these a value is converted unless strict_load is given.
_FAMILIES = ({"float16", "float32", "float64", "bfloat16"}, {"int4", "int8", "int16", "int32", "int64"})


class NetworkError(ReshardError, RuntimeError):
    """A parameter does not fit the network. Also a RuntimeError, as in MindSpore."""


def load_param_into_net(
    net: Any, parameter_dict: Mapping[str, Any], strict_load: bool = False, remove_redundancy: bool = False
) -> tuple[list[str], list[str]]:
    """Load the parameters of a checkpoint into a network, by name.

    Without `strict_load`, a network's parameter that the checkpoint lacks takes the one whose name ends with its own
    (`weight` takes `net.weight`) unless that is ambiguous; floats are converted to floats, integers to integers. Shapes
    must agree; `(12, 2048, 1, 1)` also goes to `(12, 2048)`.

    Unlike MindSpore's, all parameters are checked before the first is set, and a parameter that was loaded under a
    longer name is not listed as unused.

    Args:
        net: anything with `parameters_and_names()`, a MindSpore `Cell`, a `torch.nn.Module` (its buffers included), or
            a mapping of names to Parameters (here or MindSpore's) or arrays, which are written in place.
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
    _check_arguments(parameter_dict, strict_load, remove_redundancy)
    targets = parameters_of(net, "net")
    values = {name: value for name, value in parameter_dict.items() if not isinstance(value, str | list)}
    matches = {name: name for name in targets if name in values}
    missing = [name for name in targets if name not in values and not name.startswith("accu_grads")]
    if not strict_load:
        matches |= _by_suffix(missing, values)
    fitted = {name: _fitted(name, targets[name], values[source], strict_load) for name, source in matches.items()}
    mindspore: Any = sys.modules.get("mindspore")
    if mindspore is not None and isinstance(net, mindspore.nn.Cell):
        not_loaded = _set_in_cell(net, fitted, matches, parameter_dict)
    else:
        for name, tensor in fitted.items():
            _set(targets[name], tensor)
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
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(net, torch.nn.Module):
        return dict(net.state_dict(keep_vars=True))
    raise TypeError(
        f"{argument} is a {type(net).__name__}; expected a mapping, something with parameters_and_names(), or a "
        "torch.nn.Module"
    )


def _check_arguments(parameter_dict: object, strict_load: object, remove_redundancy: object) -> None:
    if not isinstance(strict_load, bool):
        raise TypeError(f"strict_load is a {type(strict_load).__name__}; expected a bool")
    if not isinstance(remove_redundancy, bool):
        raise UsageError(
            f"remove_redundancy is a {type(remove_redundancy).__name__}; expected a bool", code="wrong-type"
        )
    if not isinstance(parameter_dict, dict):
        raise TypeError(f"parameter_dict is a {type(parameter_dict).__name__}; expected a dict")
    for name, value in parameter_dict.items():
        if not isinstance(name, str) or isinstance(value, bytes | int | float | dict | None):
            raise TypeError(
                f"parameter_dict holds {name!r}: {type(value).__name__}; expected names as strings and Parameters"
            )


def _by_suffix(missing: list[str], values: Mapping[str, Any]) -> dict[str, str]:
    """Match missing names with longer ones of the checkpoint; return the checkpoint's name of each.

    The prefix with the most names wins; of equals, the prefix with which all others end: `net.` before `moment1.net.`.
    If that does not decide, MindSpore takes the first in the file; here a name that could be two parameters is not
    matched.
    """
    matches: dict[str, str] = {}
    unmatched = set(missing)
    while prefixes := _prefixes(unmatched, values):
        most = max(map(len, prefixes.values()))
        likely = [prefix for prefix, served in prefixes.items() if len(served) == most]
        prefix = min(likely, key=len)
        for rival in likely:
            both = prefixes[prefix] & prefixes[rival]
            if both and not rival.endswith(prefix):
                for name in sorted(both):
                    _log.warning("%r may be %r or %r; it is not loaded", name, *sorted((prefix + name, rival + name)))
                unmatched -= both
                break
        else:
            _log.warning("names without their prefix %r are taken", prefix)
            matches |= {name: prefix + name for name in prefixes[prefix]}
            unmatched -= prefixes[prefix]
    return matches


def _prefixes(missing: set[str], values: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return the prefixes of missing names in the checkpoint, with these names.

    Only prefixes that end in a dot count, if there are any.
    """
    prefixes: dict[str, set[str]] = {}
    for longer in values:
        start = longer.find(".") + 1
        while start:
            if longer[start:] in missing:
                prefixes.setdefault(longer[:start], set()).add(longer[start:])
            start = longer.find(".", start) + 1
    if not prefixes:
        for name in missing:
            for longer in values:
                if longer.endswith(name) and longer != name:
                    prefixes.setdefault(longer.removesuffix(name), set()).add(name)
    return prefixes


def _fitted(name: str, target: Any, value: Any, strict_load: bool) -> Tensor:
    """Convert a value to the shape and dtype of the network's parameter, or raise `NetworkError`."""
    tensor = as_tensor(value, name)
    if isinstance(target, Parameter) and not isinstance(value, Tensor):
        tensor = Tensor(tensor)  # the network keeps it: not the memory of another library
    shape, kind = tuple(target.shape), target.kind if isinstance(target, Tensor) else kind_of(target.dtype)
    if kind is None:
        raise NetworkError(
            f"parameter {name!r} is {target.dtype} in the network; no checkpoint holds such elements",
            code="unsupported-dtype",
        )
    if tensor.shape != shape:
        extra = len(tensor.shape) - len(shape)
        if extra <= 0 or tensor.shape != (*shape, *(1,) * extra):
            raise NetworkError(
                f"parameter {name!r} has shape {shape} in the network and {tensor.shape} in the checkpoint",
                code="wrong-shape",
                hint="load the checkpoint of this network, and of this rank",
            )
        tensor = Tensor.of_kind(tensor.array.reshape(shape), tensor.kind)
    if tensor.kind is not kind:
        if strict_load or not any({tensor.kind.name, kind.name} <= family for family in _FAMILIES):
            raise NetworkError(
                f"parameter {name!r} is {kind} in the network and {tensor.kind} in the checkpoint"
                + ("; strict_load converts nothing" if strict_load else ""),
                code="wrong-dtype",
            )
        _log.warning("%r is %s in the checkpoint; converted to the network's %s", name, tensor.kind, kind)
        tensor = _converted(name, tensor, kind)
    return tensor


def _converted(name: str, tensor: Tensor, kind: DType) -> Tensor:
    """Return a tensor in another kind of its family.

    Raises:
        NetworkError: an integer is too large for the kind; MindSpore makes another number of it.
    """
    with np.errstate(over="ignore"):
        converted = tensor.astype(dtype_of(kind))
    if converted.array.dtype.kind == "i":
        if not np.array_equal(converted.array, tensor.array):
            raise NetworkError(
                f"parameter {name!r} is {kind} in the network, and the checkpoint has larger numbers",
                code="out-of-range",
            )
    elif lost := int((np.isfinite(tensor.array) & ~np.isfinite(converted.array)).sum()):
        _log.warning("%r: %d numbers are too large for %s, and are infinite now", name, lost, kind)
    return converted


def _set(target: Any, tensor: Tensor) -> None:
    """Set the value of a network's parameter."""
    mindspore: Any = sys.modules.get("mindspore")
    if isinstance(target, Parameter):
        target.set_data(tensor, target.sliced)
    elif isinstance(target, Tensor):
        target.array[...] = tensor.array
    elif isinstance(target, np.ndarray):  # of a void dtype: the same kind, or MindSpore's own bfloat16
        target[...] = tensor.array.view(target.dtype) if target.dtype.kind == "V" else tensor.array
    elif mindspore is not None and isinstance(target, mindspore.Tensor):  # a Parameter, too
        if hasattr(target, "set_data"):
            target.set_data(as_mindspore(tensor), target.sliced)
        else:
            target.assign_value(as_mindspore(tensor))
    elif hasattr(target, "copy_"):
        target.detach().copy_(as_torch(tensor))
    else:
        target.set_data(tensor)


def _set_in_cell(
    cell: Any, fitted: Mapping[str, Tensor], matches: Mapping[str, str], parameter_dict: Mapping[str, Any]
) -> list[str]:
    """Have MindSpore load values that fit into a Cell; return the names that it reports as not loaded."""
    mindspore: Any = sys.modules["mindspore"]
    parameters = {name: value for name, value in parameter_dict.items() if isinstance(value, str | list)}
    for name, tensor in fitted.items():
        value = parameter_dict[matches[name]]
        is_same_kind = isinstance(value, mindspore.Parameter) and kind_of(value.dtype) is tensor.kind
        fits = is_same_kind and tuple(value.shape) == tensor.shape
        parameters[name] = value if fits else mindspore.Parameter(as_mindspore(tensor), name=name)
    not_loaded: list[str] = mindspore.load_param_into_net(cell, parameters, strict_load=True)[0]
    return not_loaded
