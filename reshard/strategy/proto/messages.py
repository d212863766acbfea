"""Convert strategies to protobuf messages and back; `strategy.files` has the notes on both formats."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reshard.core.layout.block import Shape, shape_text
from reshard.core.layout.layout import Layout
from reshard.errors import Faults, LayoutError, StrategyError, UsageError
from reshard.strategy.proto import message_class
from reshard.strategy.strategy import Operator, Strategy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from google.protobuf.message import Message

    from reshard.core.layout.grid import Axes

Unknown = bytes | tuple[tuple[str, object], ...]
"""The unknown fields of a file: protobuf bytes or JSON items."""

Said = tuple["Sequence[tuple[str, Layout, Shape | None, Unknown]]", tuple[Operator, ...], int, Unknown]
"""The parsed parts of a file: tensors with layouts and shapes; operators; the current stage; unknown fields."""

_MISSING = "is missing; the file is truncated or not a strategy file"


def _message_class() -> type[Any]:
    return message_class("mindspore.straspb.ParallelStrategyMap")


def from_protobuf(content: bytes, path: str, faults: Faults) -> Said:
    """Parse a protobuf strategy file; faults of single tensors are added to `faults`.

    Raises:
        StrategyError: it is not such a message, or lacks required fields.
    """
    from google.protobuf.message import DecodeError

    message = _message_class()()
    try:
        message.ParseFromString(content)
    except (DecodeError, UnicodeDecodeError) as error:
        raise StrategyError(f"{path} is not a strategy file", code="not-a-strategy", facts=[str(error)]) from None
    if not message.HasField("current_stage"):
        faults.add("current_stage", _MISSING, code="missing-key")
    for part, key in (("parallel_layout_item", "param_name"), ("parallel_strategy_item", "node_name")):
        for number, item in enumerate(getattr(message, part)):
            # Older files lack the two optimizer fields; every other required field must be there.
            for field in () if item.IsInitialized() else item.FindInitializationErrors():
                if not field.endswith((".opt_weight_shard_step", ".opt_weight_shard_size")):
                    faults.add(f"{part}[{number}].{field}", _MISSING, code="missing-key")
            if isinstance(name := getattr(item, key), bytes):  # protobuf returns bytes for text that is not UTF-8
                faults.add(f"{part}[{number}].{key}", f"is {name!r:.60}, which is not UTF-8", code="not-utf-8")
    faults.raise_if_any(StrategyError)
    plain = type(message)()
    plain.CopyFrom(message)
    plain.DiscardUnknownFields()
    has_unknown = plain.SerializePartialToString() != message.SerializePartialToString()
    unknown_of = _unknown if has_unknown else _nothing
    layouts = []
    known: dict[bytes, Layout] = {}  # most tensors share their layout with others
    for item in message.parallel_layout_item:
        content = item.parallel_layouts.SerializePartialToString()
        try:
            layout = known[content] = known.get(content) or layout_of_message(item.parallel_layouts)
        except LayoutError as error:
            faults.add(item.param_name, error)
            continue
        layouts.append((item.param_name, layout, None, unknown_of(item, "parallel_layouts")))
    operators = tuple(
        Operator(
            item.node_name,
            item.parallel_strategys.stage,
            tuple(tuple(part.dim) for part in item.parallel_strategys.parallel_strategy),
            unknown_of(item, "parallel_strategys"),
        )
        for item in message.parallel_strategy_item
    )
    return layouts, operators, message.current_stage, unknown_of(message)


def layout_of_message(message: Any) -> Layout:
    """Return the layout of a `ParallelLayouts` message or of a similar object.

    A single part of a tensor map holds a flat map. Several parts hold one entry each; for a nested 1-D tensor the
    second part is empty, and is not a dimension.

    Raises:
        LayoutError: it contradicts itself.
    """
    parts = [list(part.dim) for part in message.tensor_map]
    return Layout.of(
        [extent for part in message.dev_matrix for extent in part.dim],
        parts[0] if len(parts) == 1 else [part for part in parts if part],
        int(message.opt_weight_shard_size),
        opt_weight_shard_step=int(message.opt_weight_shard_step),
        param_split_shape=[n for part in message.param_split_shape for n in part.dim],
        indices_offset=[n for part in message.indices_offset for n in part.dim],
        field=int(message.field),
    )


def tensor_map_parts(layout: Layout) -> list[Axes]:
    """Split a tensor map into the parts of a message; see `layout_of_message`.

    >>> tensor_map_parts(Layout.of([2, 2], [1, -1])), tensor_map_parts(Layout.of([2, 2], [(1, 0)]))
    ([(1, -1)], [(1, 0), ()])
    """
    if all(len(axes) <= 1 for axes in layout.tensor_map):
        return [tuple(flat(layout.tensor_map))]
    parts = [axes or (-1,) for axes in layout.tensor_map]
    return parts if len(parts) > 1 else [*parts, ()]


def _nothing(_message: Message, _inside: str = "") -> bytes:
    """Return no unknown fields; most files have none."""
    return b""


def _unknown(message: Message, inside: str = "") -> bytes:
    """Return the unknown fields of a message, and of its part `inside`, serialized."""
    rest: Any = type(message)()
    rest.CopyFrom(message)
    for part in (getattr(rest, inside), rest) if inside else (rest,):
        for descriptor in part.DESCRIPTOR.fields:
            if part is not rest or descriptor.name != inside or not getattr(rest, inside).SerializePartialToString():
                part.ClearField(descriptor.name)
    content: bytes = rest.SerializePartialToString()
    return content


def to_protobuf(strategy: Strategy) -> bytes:
    """Return the contents of the protobuf file of a strategy.

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
        # Only the operators have the stage of a file, and MindSpore's merging refuses a file without operators.
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
        parts = item.parallel_layouts
        parts.dev_matrix.add(dim=layout.dev_matrix)
        for part in tensor_map_parts(layout):
            parts.tensor_map.add(dim=part)
        parts.param_split_shape.add(dim=layout.param_split_shape)
        parts.indices_offset.add(dim=layout.indices_offset)
        parts.field = layout.field
        parts.opt_weight_shard_step = layout.opt_weight_shard_step
        parts.opt_weight_shard_size = layout.opt_weight_shard_size
        _add_unknown(item, placed.unknown)
    _add_unknown(message, strategy.unknown)
    content: bytes = message.SerializeToString(deterministic=True)
    return content


def _add_unknown(message: Message, unknown: object) -> None:
    if isinstance(unknown, bytes):
        message.MergeFromString(unknown)


def flat(tensor_map: tuple[Axes, ...]) -> list[int]:
    """Return a tensor map without nested entries as a list of integers."""
    return [axes[0] if axes else -1 for axes in tensor_map]
