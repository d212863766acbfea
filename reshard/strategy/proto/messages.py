"""Strategies as protobuf messages, and back; `strategy.files` has the notes on both formats."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING, Any

from reshard.errors import Faults, LayoutError, StrategyError, UsageError
from reshard.layout.block import Shape, shape_text
from reshard.layout.layout import Axes, Layout
from reshard.strategy.proto import message_class
from reshard.strategy.strategy import Operator, Strategy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from google.protobuf.message import Message

Unknown = bytes | tuple[tuple[str, object], ...]
"""What a file says beyond the format known here: protobuf bytes or JSON items."""

Said = tuple["Sequence[tuple[str, Layout, Shape | None, Unknown]]", tuple[Operator, ...], int, Unknown]
"""What a file says: names of tensors, their layouts and shapes; the operators; the current stage; what is unknown."""

_MISSING = "is missing; the file is truncated or not a strategy file"


def _message_class() -> type[Any]:
    return message_class("mindspore.straspb.ParallelStrategyMap")


def from_protobuf(content: bytes, path: str, faults: Faults) -> Said:
    """Return what a file says; what is wrong with single tensors is added to the faults.

    Raises:
        StrategyError: it is not such a message, or lacks what every one has.
    """
    from google.protobuf.message import DecodeError

    message = _message_class()()
    try:
        message.ParseFromString(content)
    except (DecodeError, UnicodeDecodeError) as error:
        made = f"reshard strategy make {quote(path)} -o strategy.ckpt --like CHECKPOINT"
        hint = f"if these are rules: {made}" if path.endswith((".yaml", ".yml")) else ""
        raise StrategyError(
            f"{path} is not a strategy file", code="not-a-strategy", facts=[str(error)], hint=hint
        ) from None
    if not message.HasField("current_stage"):
        faults.add("current_stage", _MISSING, code="missing-key")
    for part, key in (("parallel_layout_item", "param_name"), ("parallel_strategy_item", "node_name")):
        for place, item in enumerate(getattr(message, part)):
            # Older files lack the two optimizer fields; every other required field must be there.
            for where in () if item.IsInitialized() else item.FindInitializationErrors():
                if not where.endswith((".opt_weight_shard_step", ".opt_weight_shard_size")):
                    faults.add(f"{part}[{place}].{where}", _MISSING, code="missing-key")
            if isinstance(name := getattr(item, key), bytes):  # what protobuf gives for text that is not UTF-8
                faults.add(f"{part}[{place}].{key}", f"is {name!r:.60}, which is not UTF-8", code="not-utf-8")
    faults.raise_if_any(StrategyError)
    layouts = []
    for item in message.parallel_layout_item:
        try:
            layout = layout_of_message(item.parallel_layouts)
        except LayoutError as error:
            faults.add(item.param_name, error)
            continue
        layouts.append((item.param_name, layout, None, _unknown(item, "parallel_layouts")))
    operators = tuple(
        Operator(
            item.node_name,
            item.parallel_strategys.stage,
            tuple(tuple(part.dim) for part in item.parallel_strategys.parallel_strategy),
            _unknown(item, "parallel_strategys"),
        )
        for item in message.parallel_strategy_item
    )
    return layouts, operators, message.current_stage, _unknown(message)


def layout_of_message(given: Any) -> Layout:
    """Return the layout of a `ParallelLayouts` message, or of what has its fields.

    One part of a tensor map holds a flat map. Several hold one entry each; of a nested 1-D tensor the second is empty,
    and is not a dimension.

    Raises:
        LayoutError: it contradicts itself.
    """
    parts = [list(part.dim) for part in given.tensor_map]
    return Layout.of(
        [extent for part in given.dev_matrix for extent in part.dim],
        parts[0] if len(parts) == 1 else [part for part in parts if part],
        int(given.opt_weight_shard_size),
        opt_weight_shard_step=int(given.opt_weight_shard_step),
        param_split_shape=[n for part in given.param_split_shape for n in part.dim],
        indices_offset=[n for part in given.indices_offset for n in part.dim],
        field=int(given.field),
    )


def tensor_map_parts(layout: Layout) -> list[Axes]:
    """Return a tensor map in parts, as a message has it; see `layout_of_message`.

    >>> tensor_map_parts(Layout.of([2, 2], [1, -1])), tensor_map_parts(Layout.of([2, 2], [(1, 0)]))
    ([(1, -1)], [(1, 0), ()])
    """
    if all(len(axes) <= 1 for axes in layout.tensor_map):
        return [tuple(flat(layout.tensor_map))]
    parts = [axes or (-1,) for axes in layout.tensor_map]
    return parts if len(parts) > 1 else [*parts, ()]


def _unknown(message: Message, inside: str = "") -> bytes:
    """Return the serialized fields of a message, and of its part `inside`, that the format known here does not have."""
    rest: Any = type(message)()
    rest.CopyFrom(message)
    for part in (getattr(rest, inside), rest) if inside else (rest,):
        for descriptor in part.DESCRIPTOR.fields:
            if part is not rest or descriptor.name != inside or not getattr(rest, inside).SerializePartialToString():
                part.ClearField(descriptor.name)
    content: bytes = rest.SerializePartialToString()
    return content


def to_protobuf(strategy: Strategy) -> bytes:
    """Return the file of a strategy.

    Raises:
        UsageError: it is not known whether a layout is nested.
    """
    message = _message_class()(current_stage=strategy.current_stage)
    for operator in strategy.operators:
        item = message.parallel_strategy_item.add(node_name=operator.name)
        item.parallel_strategys.stage = operator.stage
        for dims in operator.strategy:
            item.parallel_strategys.parallel_strategy.add(dim=dims)
        _add_unknown(item, operator.unknown)
    if not strategy.operators and strategy.tensors:
        # The stage of a file stands only in its operators, and MindSpore's merging refuses a file without any.
        item = message.parallel_strategy_item.add(node_name="reshard")
        item.parallel_strategys.stage = strategy.stages.start
    for name, placed in strategy.in_file_order():
        layout = placed.layout
        if placed.expanded:
            raise UsageError(
                f"tensor {name!r} cannot be written as protobuf: its layout may have been nested",
                code="unknown-nesting",
                facts=[f"JSON has it expanded: {layout} of shape {shape_text(placed.shape or ())}"],
                hint="write JSON: a file name that ends with .json",
            )
        item = message.parallel_layout_item.add(param_name=name)
        given = item.parallel_layouts
        given.dev_matrix.add(dim=layout.dev_matrix)
        for part in tensor_map_parts(layout):
            given.tensor_map.add(dim=part)
        given.param_split_shape.add(dim=layout.param_split_shape)
        given.indices_offset.add(dim=layout.indices_offset)
        given.field = layout.field
        given.opt_weight_shard_step = layout.opt_weight_shard_step
        given.opt_weight_shard_size = layout.opt_weight_shard_size
        _add_unknown(item, placed.unknown)
    _add_unknown(message, strategy.unknown)
    content: bytes = message.SerializeToString(deterministic=True)
    return content


def _add_unknown(message: Message, unknown: object) -> None:
    if isinstance(unknown, bytes):
        message.MergeFromString(unknown)


def flat(tensor_map: tuple[Axes, ...]) -> list[int]:
    """Return a tensor map without nested entries as integers."""
    return [axes[0] if axes else -1 for axes in tensor_map]
