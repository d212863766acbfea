"""`merge_sliced_parameter`: join the slices of a parameter from all ranks, by hand (the r1.5 flow).

The steps, once the slices and the layout are known to belong together:

1. The layout says which block of the whole each rank holds, optimizer sharding and nested entries included
   (`reshard.core.layout`); ranks that hold the same block must hold the same bits.
2. Uneven rows (`param_split_shape`) have one size a slice; slices next to each other have the same.
3. Interleaved rows (`field`): every device holds rows of each field, one field after the other. Joined, they are in the
   order (device, field, rows), and are reordered to (field, device, rows).

Differences from MindSpore 2.10, which silently returns wrong values for most of these:

* optimizer sharding is undone (MindSpore takes one piece of several for the whole block);
* nested tensor maps are read whole (MindSpore reads the first entry), those of JSON files too;
* bfloat16 stays bfloat16, bit for bit (MindSpore returns float32);
* slices that the layout calls replicas and that differ are refused (MindSpore takes the last rank's);
* under `field`, ranks that are replicas by the tensor map count once, and columns are joined as columns (MindSpore
  takes every device for a slice of rows); tensors need not have two dimensions.

Source: MindSpore 2.10 `parallel/checkpoint_transform.py` (`merge_sliced_parameter`), `parallel/_tensor.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard.core.layout.block import Block, Shape, shape_text
from reshard.core.layout.layout import Layout, foldings
from reshard.errors import LayoutError, names
from reshard.mindspore.parameter import Parameter, Tensor, as_parameter
from reshard.mindspore.strategy import layout_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    Array = np.ndarray[Any, np.dtype[Any]]


def merge_sliced_parameter(sliced_parameters: list[Any], strategy: Mapping[str, Any] | None = None) -> Parameter:
    """Join the slices of a parameter into the whole one.

    Unlike MindSpore's it is right under optimizer sharding and nested tensor maps.

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
    if strategy and not isinstance(strategy, Mapping):
        raise TypeError(
            f"strategy is {type(strategy).__name__}; expected the dict that build_searched_strategy returns"
        )
    slices = [parameter.data.asnumpy() for parameter in parameters]
    if strategy:
        if first.name not in strategy:
            raise KeyError(
                f"parameter {first.name!r} is not in the strategy; to join its slices along axis 0 give no strategy"
            )
        try:
            merged = _merged(slices, _folded(*layout_of(strategy[first.name]), first.shape))
        except LayoutError as error:
            raise error.about(f"parameter {first.name!r}") from None
    elif first.shape:
        merged = np.concatenate(slices)
    else:
        raise ValueError(
            f"parameter {first.name!r} has no dimensions, so its slices cannot be joined along axis 0; give a strategy"
        )
    whole = Parameter.over(Tensor.of_kind(merged, first.kind), first.name)  # Int4 is int8 to numpy
    whole.requires_grad, whole.layerwise_parallel = first.requires_grad, first.layerwise_parallel
    return whole


def _checked(slices: object) -> list[Parameter]:
    """Return the slices as Parameters; check that all belong to one."""
    if not isinstance(slices, list):
        raise TypeError(f"sliced_parameters is {type(slices).__name__}; expected a list of Parameters")
    if not slices:
        raise ValueError("sliced_parameters is empty; expected the slice of every rank")
    parameters = [as_parameter(value, f"sliced_parameters[{number}]") for number, value in enumerate(slices)]
    first = parameters[0]
    for number, parameter in enumerate(parameters):
        if parameter.name != first.name:
            raise ValueError(
                f"sliced_parameters[{number}] is a slice of {parameter.name!r}; expected one of {first.name!r}, as the "
                "first"
            )
        if parameter.dtype != first.dtype or parameter.ndim != first.ndim or parameter.shape[1:] != first.shape[1:]:
            raise ValueError(
                f"parameter {first.name!r}: slice {number} is {parameter.dtype} {shape_text(parameter.shape)}, the "
                f"first {first.dtype} {shape_text(first.shape)}; they may differ in dimension 0 only"
            )
    return parameters


def _merged(slices: Sequence[Array], layout: Layout) -> Array:
    """Join the slices of all ranks by a layout."""
    if len(slices) != layout.devices:
        raise LayoutError(
            f"{len(slices)} slices are given; its layout {layout} is for {layout.devices} devices", code="wrong-count"
        )
    if layout.field:
        return _interleaved(slices, layout)
    if layout.param_split_shape:
        layout = _with_row_sizes(layout)
    elif len({part.shape for part in slices}) > 1:
        raise LayoutError(
            f"the slices have {names(part.shape[0] for part in slices)} rows; expected the same number in each",
            code="row-mismatch",
            facts=["the layout has no param_split_shape"],
        )
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
            if not np.array_equal(_bits(slices[rank]), _bits(slices[ranks[-1]])):
                raise LayoutError(
                    f"slices {rank} and {ranks[-1]} differ; its layout {layout} says that they are the same",
                    code="replicas-differ",
                    hint="give the slices in the order of their ranks, and this parameter's layout",
                )
        merged[block.within(whole)] = slices[ranks[-1]]
    return merged


def _folded(layout: Layout, expanded: Shape | None, part: Shape) -> Layout:
    """Fold the nested entries of a JSON layout, so that it has as many dimensions as the slices.

    >>> print(_folded(Layout.of([2, 2], [1, 0]), (2, 4), (2,)))
    [2, 2] map [(1, 0)]
    """
    if expanded is None or (len(layout.tensor_map) == len(part) and layout.param_split_shape):
        return layout
    if len(layout.tensor_map) == len(part):
        if layout.full_shape(part) != expanded:
            raise LayoutError(
                f"its JSON layout {layout} is of a tensor {shape_text(expanded)}; slices {shape_text(part)} make one "
                f"of {shape_text(layout.full_shape(part))}",
                code="wrong-shape",
            )
        return layout
    candidates = {
        whole: folded for folded, whole in foldings(layout, expanded, len(part)) if folded.full_shape(part) == whole
    }
    if len(candidates) != 1:
        raise LayoutError(
            f"its JSON layout {layout} of expanded shape {shape_text(expanded)} stands for {len(candidates)} layouts "
            f"whose slices are {shape_text(part)}; expected one",
            code="ambiguous-layout" if candidates else "strategy-mismatch",
            hint="read the protobuf strategy file instead",
        )
    return next(iter(candidates.values()))


def _with_row_sizes(layout: Layout) -> Layout:
    """Return a layout whose `param_split_shape` has one size for each slice of dimension 0.

    MindSpore lists a size for every slice, row-major, also for slices next to each other.

    >>> _with_row_sizes(Layout.of([2, 2], [1, 0], param_split_shape=[3, 3, 1, 1])).param_split_shape
    (3, 1)
    """
    if layout.optimizer_shards > 1:
        raise LayoutError(
            f"its layout {layout} has param_split_shape and is sharded by the optimizer, too",
            code="unsupported-layout",
            facts=["expected one of the two"],
        )
    rows, columns = layout.splits[0] if layout.splits else 1, prod(layout.splits[1:])
    sizes = layout.param_split_shape
    if len(sizes) != rows * columns or any(sizes[i] != sizes[i - i % columns] for i in range(len(sizes))):
        raise LayoutError(
            f"param_split_shape is {shape_text(sizes)}; expected {rows * columns} sizes, a row size for each slice"
            + (f" and the same for the {columns} next to each other" if columns > 1 else ""),
            code="wrong-sizes",
        )
    return replace(layout, param_split_shape=sizes[::columns], opt_weight_shard_size=0)


def _interleaved(slices: Sequence[Array], layout: Layout) -> Array:
    """Join slices with rows of (field, rows) to a whole with rows of (field, device, rows)."""
    if layout.param_split_shape or not layout.tensor_map or layout.field < 0:
        raise LayoutError(
            f"field is {layout.field} and param_split_shape {shape_text(layout.param_split_shape)}; expected a tensor "
            "of rows and fields of equal size",
            code="unsupported-layout",
        )
    plain = replace(layout, field=0)
    groups = plain.grid(plain.full_shape(slices[0].shape)).ranks
    if any(not np.array_equal(_bits(slices[ranks[0]]), _bits(slices[rank])) for ranks in groups for rank in ranks):
        # These are no replicas, although the map says so: each device has rows of its own, as in MindSpore.
        plain = Layout.of([layout.devices], [0, *[-1] * (len(layout.tensor_map) - 1)])
    merged = _merged(slices, plain)
    devices = plain.splits[0] // plain.optimizer_shards
    rows, rest = divmod(len(merged), devices * layout.field)
    if rest:
        raise LayoutError(
            f"a device's {len(merged) // devices} rows do not divide into {layout.field} fields", code="not-divisible"
        )
    parts = merged.reshape(devices, layout.field, rows, *merged.shape[1:])
    return np.ascontiguousarray(parts.swapaxes(0, 1)).reshape(merged.shape)


def _bits(array: Array) -> Array:
    """Return an array's bytes, in which NaN equals itself."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
