"""Derive the layouts of parameters from the strategies of operators, as MindSpore compiles them.

The tutorials shard operators: `ops.MatMul().shard(((2, 1), (1, 2)))` cuts the rows of the input in 2 and the columns of
the weight in 2. Over 8 devices MindSpore gives the weight `dev_matrix [2, 2, 2]` and `tensor_map [-1, 1]`:

1. An operator has its own dimensions, such as `m, k, n` of a MatMul. The strategies of its inputs say how each is cut.
2. They are the axes of the device matrix, in the operator's order: batch, m, k, n of a (Batch)MatMul; the dimensions of
   the output of Add, Mul and similar operators; the dimensions of the indices, then of the table, of Gather; and
   n, c, h, w, o of Conv2D.
3. Unused devices repeat the computation. They are the innermost axis, or the outermost one if Gather cuts the rows of
   its table.
4. Axes of extent 1 are left out. If no axis is left, the device matrix is `[devices]`.
5. For each dimension of the parameter the tensor map has its axis, or -1 if it is not cut.

An operator without a strategy is cut along its batch: the parameter is whole everywhere, `[devices]` and -1s. (For this
the batch must divide by the number of devices; otherwise axes of other extents appear, with the same blocks. The
parameter of a BatchMatMul or an Add that itself has the batch dimension is cut there, too: give its operator.)
Strategies in layouts (`Layout((2, 2, 2), ("dp", "sp", "mp"))`) do not need this module: the weight's layout is `rules`
over that mesh.

Source: compilations by MindSpore 2.10.0, listed in `test_operators.py`, and its strategy files in `tests/data`.
Two things need a compilation: the strategies that a search finds (`auto_parallel`), and the operator that decides if a
parameter has several.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from reshard.core.layout.grid import MOST_DEVICES
from reshard.core.layout.layout import Layout
from reshard.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reshard.core.layout.block import Shape

Strategies = tuple[tuple[int, ...], ...]
"""For each input of an operator, the number of parts of each dimension."""


@dataclass(frozen=True, slots=True)
class OperatorStrategy:
    """An operator's strategy, from the view of one of its parameters.

    Attributes:
        parts: the number of parts of each of the operator's own dimensions, outermost device axis first.
        dims: for each dimension of the parameter, the matching dimension of the operator; None if it is not cut.
        rows_gathered: the parameter is the table of a Gather, and its rows are cut.
    """

    parts: Shape
    dims: tuple[int | None, ...]
    rows_gathered: bool = False

    def layout(self, devices: int) -> Layout:
        """Return the parameter's layout over the devices of a stage.

        Raises:
            LayoutError: the number of devices that the strategy uses does not divide `devices`.

        >>> print(matmul(((2, 1), (1, 2))).layout(8), "|", matmul(((2, 1), (1, 2))).layout(4))
        [2, 2, 2] map [-1, 1] | [2, 2] map [-1, 0]
        """
        used = prod(self.parts)
        if devices % used:
            raise LayoutError(
                f"the strategy uses {used} devices, which does not divide the {devices} of a stage",
                code="not-divisible",
            )
        if self.rows_gathered and used < devices and sum(part > 1 for part in self.parts) > 1:
            raise LayoutError(
                f"MindSpore refuses a Gather that cuts rows and more over {used} of {devices} devices",
                code="refused-by-mindspore",
            )
        repeats = (devices // used,)
        extents = repeats + self.parts if self.rows_gathered else self.parts + repeats
        split_axes = [axis for axis, extent in enumerate(extents) if extent > 1]
        axes = [None if dim is None else dim + self.rows_gathered for dim in self.dims]
        tensor_map = [len(split_axes) - 1 - split_axes.index(axis) if axis in split_axes else -1 for axis in axes]
        return Layout.of([extents[axis] for axis in split_axes] or [1], tensor_map)


def matmul(
    strategies: Strategies, *, transpose_a: bool = False, transpose_b: bool = False, parameter: int = 1
) -> OperatorStrategy:
    """Return the strategy of a MatMul for its weight.

    Args:
        strategies: the strategies of the two inputs, as given to `shard`.
        transpose_a: the option of the operator; `nn.Dense` has `transpose_b=True`.
        transpose_b: the option of the operator.
        parameter: the number of the input that is the weight.

    Raises:
        LayoutError: the strategies do not fit such an operator.

    >>> print(matmul(((2, 2), (4, 2)), transpose_b=True).layout(16))
    [2, 2, 4] map [0, 1]
    """
    if any(len(cuts) != 2 for cuts in strategies):
        raise LayoutError(
            f"strategy {strategies} does not fit MatMul, which takes 2-D inputs", code="operator-mismatch"
        )
    return _matmul("MatMul", strategies, transpose_a, transpose_b, parameter)


def batch_matmul(
    strategies: Strategies, *, transpose_a: bool = False, transpose_b: bool = False, parameter: int = 1
) -> OperatorStrategy:
    """Return the strategy of a BatchMatMul for its weight.

    The weight may have fewer batch dimensions. See `matmul` for arguments and errors.

    >>> print(batch_matmul(((4, 1, 1), (4, 1, 2))).layout(8))
    [4, 2] map [1, -1, 0]
    """
    return _matmul("BatchMatMul", strategies, transpose_a, transpose_b, parameter)


def _matmul(
    kind: str, strategies: Strategies, transpose_a: bool, transpose_b: bool, parameter: int
) -> OperatorStrategy:
    _check(kind, strategies, inputs=(2,), least=2)
    batch = max(map(len, strategies)) - 2
    labels = [f"b{number}" for number in range(batch)]
    ends = (["k", "m"] if transpose_a else ["m", "k"], ["n", "k"] if transpose_b else ["k", "n"])
    inputs = [labels[batch - len(cuts) + 2 :] + end for cuts, end in zip(strategies, ends, strict=True)]
    return _operator(kind, [*labels, "m", "k", "n"], inputs, strategies, parameter, stretched=labels)


def add(strategies: Strategies, *, parameter: int = 1) -> OperatorStrategy:
    """Return the strategy of Add, BiasAdd, Mul, Sub or similar for a parameter.

    Dimensions are broadcast as in numpy.

    >>> print(add(((4, 2), (2,))).layout(8), "|", add(((4, 1), (1,))).layout(8))
    [4, 2] map [0] | [4, 2] map [-1]
    """
    _check("Add", strategies, inputs=(2,))
    ndim = max(map(len, strategies))
    labels = [f"d{number}" for number in range(ndim)]
    return _operator("Add", labels, [labels[ndim - len(s) :] for s in strategies], strategies, parameter, labels)


def layer_norm(strategies: Strategies, *, parameter: int = 1) -> OperatorStrategy:
    """Return the strategy of LayerNorm or RmsNorm for gamma or beta.

    These are never cut.

    >>> print(layer_norm(((4, 1), (1,), (1,))).layout(8))
    [4, 2] map [-1]
    """
    _check("LayerNorm", strategies, inputs=(2, 3))
    labels = [f"d{number}" for number in range(len(strategies[0]))]
    if any(cut > 1 for cuts in strategies[1:] for cut in cuts):
        raise LayoutError(
            f"strategy {strategies} cuts dimensions that LayerNorm normalizes; MindSpore refuses it",
            code="refused-by-mindspore",
        )
    inputs = [labels[len(labels) - len(s) :] for s in strategies]
    return _operator("LayerNorm", labels, inputs, strategies, parameter)


def gather(strategies: Strategies, *, parameter: int = 0) -> OperatorStrategy:
    """Return the strategy of Gather along axis 0, as in embeddings, for the table.

    Raises:
        LayoutError: also if MindSpore refuses it: rows and more of the table or the indices are cut, with unused
            devices.

    >>> print(gather(((2, 1), (4,))).layout(8), "|", gather(((2, 1), (1,))).layout(8))
    [4, 2] map [0, -1] | [4, 2] map [0, -1]
    """
    _check("Gather", strategies, inputs=(2,))
    table = [f"t{number}" for number in range(len(strategies[0]))]
    indices = [f"i{number}" for number in range(len(strategies[1]))]
    strategy = _operator("Gather", indices + table, [table, indices], strategies, parameter)
    return replace(strategy, rows_gathered=strategies[0][0] > 1)


def conv2d(strategies: Strategies, *, parameter: int = 1) -> OperatorStrategy:
    """Return the strategy of a Conv2D for its weight.

    The input is n, c, h, w and the weight is o, c, height, width.

    >>> print(conv2d(((2, 2, 1, 1), (2, 2, 1, 1))).layout(8))
    [2, 2, 2] map [0, 1, -1, -1]
    """
    return _operator("Conv2D", [*"nchwoyx"], [[*"nchw"], [*"ocyx"]], strategies, parameter)


OPERATORS: dict[str, Callable[..., OperatorStrategy]] = {
    "matmul": matmul,
    "batch_matmul": batch_matmul,
    "add": add,
    "layer_norm": layer_norm,
    "gather": gather,
    "conv2d": conv2d,
}
"""The operators by the names that rules files use."""


def _check(kind: str, strategies: Strategies, *, inputs: tuple[int, ...], least: int = 1) -> None:
    """Check the number of inputs, their dimensions and their parts."""
    if len(strategies) not in inputs or any(len(cuts) < least for cuts in strategies):
        raise LayoutError(
            f"strategy {strategies} does not fit {kind}; expected {inputs[0]} inputs", code="operator-mismatch"
        )
    if any(type(cut) is not int or not 1 <= cut <= MOST_DEVICES for cuts in strategies for cut in cuts):
        raise LayoutError(
            f"strategy {strategies!r:.200} of {kind} must hold integers from 1 to {MOST_DEVICES}", code="out-of-range"
        )


def _operator(
    kind: str,
    order: Sequence[str],
    inputs: Sequence[Sequence[str]],
    strategies: Strategies,
    parameter: int,
    stretched: Sequence[str] = (),
) -> OperatorStrategy:
    """Join the strategies of an operator's inputs by the labels of their dimensions.

    Args:
        kind: for messages.
        order: the operator's own dimensions, outermost device axis first.
        inputs: the labels of each input's dimensions.
        strategies: the parts of each input's dimensions.
        parameter: the number of the input that is the parameter.
        stretched: labels of dimensions that are broadcast: one input may be cut there and the other not.
    """
    _check(kind, strategies, inputs=(len(inputs),))
    if [len(cuts) for cuts in strategies] != [len(labels) for labels in inputs] or parameter not in range(len(inputs)):
        expected = ", ".join(str(len(labels)) for labels in inputs)
        raise LayoutError(
            f"strategy {strategies} does not fit {kind}; expected inputs of {expected} dimensions",
            code="operator-mismatch",
        )
    cuts_of: dict[str, set[int]] = {label: set() for label in order}
    for labels, cuts in zip(inputs, strategies, strict=True):
        for label, cut in zip(labels, cuts, strict=True):
            cuts_of[label].add(cut)
    for label, parts in cuts_of.items():
        if len(parts - {1} if label in stretched else parts) > 1:
            numbers = " and ".join(map(str, sorted(parts)))
            raise LayoutError(
                f"strategy {strategies} of {kind} cuts dimension {label} into {numbers} parts", code="inputs-disagree"
            )
    dims = [
        order.index(label) if cut > 1 else None
        for label, cut in zip(inputs[parameter], strategies[parameter], strict=True)
    ]
    return OperatorStrategy(tuple(max(cuts_of[label], default=1) for label in order), tuple(dims))
