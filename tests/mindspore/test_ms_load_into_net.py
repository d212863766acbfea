"""load_param_into_net: parameters go to their names in a network, with the dtypes and shapes that it has."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ms_files import (
    refused_as_mindspore,
    warnings_logged,  # noqa: F401 -- applies to every test here
)
from refusals import refused

import reshard.mindspore as ms
from reshard.mindspore import Parameter, Tensor
from reshard.mindspore.network import NetworkError


def parameter(value: Any, name: str = "w", dtype: str = "float32") -> Parameter:
    return Parameter(np.array(value, dtype), name)


class Net:
    """A network of one's own."""

    def __init__(self, **values: Any) -> None:
        self.parameters = [Parameter(np.array(value, np.float32), name) for name, value in values.items()]

    def parameters_and_names(self) -> list[tuple[str, Parameter]]:
        return [(f"scope.{parameter.name}", parameter) for parameter in self.parameters]

    def values(self) -> dict[str, Any]:
        return {parameter.name: parameter.asnumpy().tolist() for parameter in self.parameters}


def test_parameters_go_to_their_names_and_two_lists_come_back() -> None:
    net = Net(w=[0, 0], b=[0])
    checkpoint = {"w": parameter([1, 2]), "step": parameter(3, "step"), "note": "text"}
    assert ms.load_param_into_net(net, checkpoint) == (["b"], ["step", "note"])
    assert net.values() == {"w": [1, 2], "b": [0]}


def test_a_longer_name_is_taken_unless_strict() -> None:
    checkpoint = {"net.w": parameter([1, 2]), "net.b": parameter([3], "net.b"), "ema.x": parameter(4, "ema.x")}
    net = Net(w=[0, 0], b=[0], x=0)
    assert ms.load_param_into_net(net, checkpoint) == ([], [])
    assert net.values() == {"w": [1, 2], "b": [3], "x": 4}
    net = Net(w=[0, 0], b=[0])
    assert ms.load_param_into_net(net, checkpoint, strict_load=True) == (["w", "b"], ["net.w", "net.b", "ema.x"])
    assert net.values() == {"w": [0, 0], "b": [0]}


def test_of_longer_names_the_weights_are_taken_not_the_states(caplog: pytest.LogCaptureFixture) -> None:
    """Safetensors files are read in the order of names, so that `moment1.net.w` comes first; MindSpore takes it."""
    checkpoint = {f"{prefix}{n}": parameter([k], n) for k, prefix in enumerate(("moment1.net.", "net.")) for n in "wb"}
    net = Net(w=[5], b=[5])
    assert ms.load_param_into_net(net, checkpoint) == ([], ["moment1.net.w", "moment1.net.b"])
    assert net.values() == {"w": [1], "b": [1]}
    most = {"ema.w": parameter([7]), "net.w": parameter([8]), "net.b": parameter([9])}
    ms.load_param_into_net(net, most)
    assert net.values() == {"w": [8], "b": [9]}
    net = Net(w=[5], b=[5])
    either = {"conv.w": parameter([1]), "dense.w": parameter([2]), "net.b": parameter([3])}
    assert ms.load_param_into_net(net, either) == (["w"], ["conv.w", "dense.w"])
    assert net.values() == {"w": [5], "b": [3]}
    assert "'w' may be 'conv.w' or 'dense.w'; it is not loaded" in caplog.text
    assert ms.load_param_into_net(net, {"my_w": parameter([4]), "my_b": parameter([6])}) == ([], [])
    assert net.values() == {"w": [4], "b": [6]}


def test_numbers_that_do_not_fit_are_not_made_others(caplog: pytest.LogCaptureFixture) -> None:
    net = {"i": np.zeros(2, np.int8), "h": np.zeros(2, np.float16)}
    with refused(NetworkError, "out-of-range", "'i'", "int8"):
        ms.load_param_into_net(net, {"i": np.array([300, 1])})
    ms.load_param_into_net(net, {"i": np.array([-128, 127]), "h": np.array([1e6, np.inf], np.float32)})
    assert net["i"].tolist() == [-128, 127]
    assert "'h': 1 numbers are too large for float16, and are infinite now" in caplog.text


def test_gradient_accumulators_are_not_listed() -> None:
    class Accumulating(Net):
        def parameters_and_names(self) -> list[tuple[str, Parameter]]:
            return [("", parameter(0, "accu_grads.w")), ("", parameter(0, "w"))]

    assert ms.load_param_into_net(Accumulating(), {"x.y": parameter(1, "x.y")}) == (["w"], ["x.y"])


def test_shapes_must_agree_but_for_ones_at_the_end() -> None:
    net = Net(w=[0, 0], b=0)
    ms.load_param_into_net(net, {"w": parameter([[[1]], [[2]]]), "b": parameter([3], "b")})
    assert net.values() == {"w": [1, 2], "b": 3}
    for wrong in ([1, 2, 3], [[1, 2]], [[1], [2], [3]], 1):
        with refused(RuntimeError, "wrong-shape", "'w'", "(2,)", np.shape(wrong)):
            ms.load_param_into_net(net, {"w": parameter(wrong), "b": parameter(4, "b")})
    assert net.values() == {"w": [1, 2], "b": 3}  # all are checked before one is set


@pytest.mark.parametrize("dtype", ["float16", "float64", "bfloat16"])
def test_floats_are_converted_unless_strict(dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = {"w": Parameter(np.array([1.5, 2.5]).astype(getattr(ml_dtypes, dtype, dtype)), "w")}
    net = Net(w=[0, 0])
    assert ms.load_param_into_net(net, checkpoint) == ([], [])
    assert net.parameters[0].dtype == ms.float32
    assert net.values() == {"w": [1.5, 2.5]}
    assert f"'w' is {dtype} in the checkpoint; converted to the network's float32" in caplog.text
    with refused(NetworkError, "wrong-dtype", "'w'", "float32", dtype, "strict_load"):
        ms.load_param_into_net(net, checkpoint, strict_load=True)


def test_integers_do_not_become_floats() -> None:
    with refused(NetworkError, "wrong-dtype", "'w'", "float32", "int32"):
        ms.load_param_into_net(Net(w=[0, 0]), {"w": parameter([1, 2], dtype="int32")})
    net = {"w": np.zeros(2, np.int8)}
    ms.load_param_into_net(net, {"w": parameter([1, 2], dtype="int64")})
    assert net["w"].tolist() == [1, 2]


def test_a_mapping_of_arrays_is_written_in_place() -> None:
    array, tensor = np.zeros(2, np.float32), Tensor(np.zeros(2, np.float32))
    assert ms.load_param_into_net({"a": array, "t": tensor}, {"a": np.ones(2, np.float32), "t": parameter([2, 2])}) == (
        [], [],
    )  # fmt: skip
    assert (array.tolist(), tensor.asnumpy().tolist()) == ([1, 1], [2, 2])


@pytest.mark.parametrize(
    ("error", "code", "place", "arguments"),
    [
        (TypeError, "", "net is", (3, {})),
        (TypeError, "", "parameter_dict", ({}, [])),
        (TypeError, "", "parameter_dict holds 3", ({}, {3: parameter(1)})),
        (TypeError, "", "parameter_dict holds 'w'", ({}, {"w": 3})),
        (TypeError, "", "'w'", ({"w": np.zeros(1)}, {"w": object()})),
        (TypeError, "", "strict_load", ({}, {}, 3)),
        (ValueError, "wrong-type", "remove_redundancy", ({}, {}, False, 3)),
    ],
)
def test_wrong_arguments_to_load_into_raise_what_mindspore_raises(
    error: type[Exception], code: str, place: str, arguments: tuple[Any, ...]
) -> None:
    with refused_as_mindspore(error, code, place):
        ms.load_param_into_net(*arguments)
