"""`merge_sliced_parameter`: join the slices of a parameter from all ranks, by hand (the r1.5 flow).

Source: MindSpore 2.10 `parallel/checkpoint_transform.py` (`merge_sliced_parameter`), `parallel/_tensor.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard.core.layout.block import Block, shape_text
from reshard.errors import LayoutError
from reshard.mindspore.parameter import Parameter, as_parameter
from reshard.mindspore.strategy import layout_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.core.layout.layout import Layout
    from reshard.mindspore.parameter import Array


def merge_sliced_parameter(sliced_parameters: list[Any], strategy: Mapping[str, Any] | None = None) -> Parameter:
    """Join the slices of a parameter into the whole one.

    Args:
        sliced_parameters: the slices, in order of their ranks in the stage: Parameters, here or MindSpore's own.
        strategy: the layout of each parameter by its name, as `build_searched_strategy`, here or MindSpore's, returns
            it. None (or an empty dict) joins the slices along axis 0.

    Returns:
        The whole parameter (ours), with the name, `requires_grad` and `layerwise_parallel` of the first slice.

    Raises:
        TypeError: `sliced_parameters` is not a list of Parameters, or `strategy` is not a dict.
        ValueError: the list is empty, the slices do not belong together, or the layout does not describe them.
        KeyError: the strategy does not name the parameter.

    >>> import reshard.mindspore as ms
    >>> from reshard import Layout
    >>> slices = [ms.Parameter(ms.Tensor(np.full((1, 2), rank, np.float32)), "w") for rank in range(4)]
    >>> merge_sliced_parameter(slices).shape
    (4, 2)
    >>> merge_sliced_parameter(slices, {"w": Layout.of([2, 2], [0, 1])}).asnumpy()
    array([[0., 0., 2., 2.],
           [1., 1., 3., 3.]], dtype=float32)
    """
    parameters = _checked(sliced_parameters)
    first = parameters[0]
    slices = [parameter.array for parameter in parameters]
    if not strategy:
        merged = np.concatenate(slices)
    elif not isinstance(strategy, Mapping):
        raise TypeError(f"strategy is a {type(strategy).__name__}; expected a dict of layouts")
    elif first.name not in strategy:
        raise KeyError(f"parameter {first.name!r} is not in the strategy")
    else:
        try:
            merged = _merged(slices, layout_of(strategy[first.name]))
        except LayoutError as error:
            raise error.about(f"parameter {first.name!r}") from None
    whole = Parameter.over(merged, first.name)
    whole.requires_grad, whole.layerwise_parallel = first.requires_grad, first.layerwise_parallel
    return whole


def _checked(slices: object) -> list[Parameter]:
    """Return the slices as Parameters; check that all belong to one."""
    if not isinstance(slices, list):
        raise TypeError(f"sliced_parameters is {type(slices).__name__}; expected a list of Parameters")
    if not slices:
        raise ValueError("sliced_parameters is empty; expected the slice of every rank")
    parameters = [as_parameter(value, f"sliced_parameters[{number}]") for number, value in enumerate(slices)]
    first, *others = ((p.name, p.dtype, p.ndim, p.shape[1:]) for p in parameters)
    for number, other in enumerate(others, 1):
        if other != first:
            raise ValueError(
                f"sliced_parameters[{number}] is {parameters[number]}, the first {parameters[0]}; slices of one "
                "parameter differ in dimension 0 only"
            )
    return parameters


def _merged(slices: Sequence[Array], layout: Layout) -> Array:
    """Join the slices of all ranks by a layout."""
    if len(slices) != layout.devices:
        raise LayoutError(
            f"{len(slices)} slices are given; its layout {layout} is for {layout.devices} devices", code="wrong-count"
        )
    if layout.field:
        raise LayoutError(f"its layout {layout} has interleaved rows (field)", code="unsupported-layout")
    if layout.param_split_shape:  # MindSpore lists a size for every slice, also for slices next to each other
        layout = replace(layout, param_split_shape=layout.param_split_shape[:: prod(layout.splits[1:])])
    whole = Block.whole(layout.full_shape(slices[0].shape))
    merged = np.empty(whole.stop, slices[0].dtype)
    grid = layout.grid(whole.stop)
    for block, ranks in zip(grid.blocks, grid.ranks, strict=True):
        for rank in ranks:
            if slices[rank].shape != block.shape:
                raise LayoutError(
                    f"slice {rank} is {shape_text(slices[rank].shape)}; its layout {layout} makes it "
                    f"{shape_text(block.shape)}",
                    code="wrong-shape",
                )
            if slices[rank].tobytes() != slices[ranks[-1]].tobytes():
                raise LayoutError(
                    f"slices {rank} and {ranks[-1]} differ; its layout {layout} says that they are the same",
                    code="replicas-differ",
                    hint="give the slices in the order of their ranks, and this parameter's layout",
                )
        merged[block.within(whole)] = slices[ranks[-1]]
    return merged
