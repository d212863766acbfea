"""Read and write JSON strategy files; `strategy.files` has the notes on both formats."""

from __future__ import annotations

import difflib
import json
from math import prod
from typing import TYPE_CHECKING, Any

from reshard.core.layout.block import Shape, shape_text
from reshard.core.layout.layout import Layout
from reshard.core.storage.small import is_text, parse_json
from reshard.errors import Faults, LayoutError, StrategyError, UsageError, names
from reshard.strategy.proto.messages import flat
from reshard.strategy.strategy import MOST_STAGES, Operator, Strategy

if TYPE_CHECKING:
    from reshard.strategy.proto.messages import Said, Unknown

Json = dict[str, Any]

_LAYOUT_KEYS = {
    "dev_matrix", "tensor_map", "tensor_shape", "field", "opt_weight_shard_step", "opt_weight_shard_size",
    "param_split_shape", "indices_offset",
}  # fmt: skip
_OPERATOR_KEYS = {"parallel_strategy", "stage"}
_TOP_KEYS = {"current_stage", "parallel_layout_item", "parallel_strategy_item"}
_ALIKE = 0.8  # of difflib: one letter in a short word, some in a long one
# The ranges of the protobuf fields, so that every strategy read from JSON can be written as protobuf, too.
_INT32, _UINT32, _INT64 = range(-(1 << 31), 1 << 31), range(1 << 32), range(-(1 << 63), 1 << 63)
_RANGES = {
    "dev_matrix": _UINT32, "tensor_map": _INT32, "param_split_shape": _INT64, "indices_offset": _INT64,
    "tensor_shape": range(1 << 63), "parallel_strategy": _UINT32, "field": _INT32, "opt_weight_shard_step": _INT32,
    "opt_weight_shard_size": _INT32, "current_stage": _UINT32, "stage": range(MOST_STAGES),
}  # fmt: skip


def from_json(content: bytes, path: str, faults: Faults) -> Said:
    """Parse a JSON strategy file; faults of its items are added to `faults`.

    Raises:
        StrategyError: it is not JSON, or of another kind.
    """
    repeated: list[str] = []
    try:
        top = parse_json(content, repeated)
    except ValueError as error:
        raise StrategyError(f"{path} is not JSON", code="not-json", facts=[str(error)]) from None
    if not isinstance(top, dict):
        raise StrategyError(f"{path} holds a JSON {type(top).__name__}; expected an object", code="not-a-strategy")
    if "reshard_plan" in top:
        raise StrategyError(
            f"{path} is a plan, not a strategy file", code="not-a-strategy", hint=f"reshard run {path} TARGET"
        )
    if top and all(isinstance(value, str) for value in top.values()):
        raise StrategyError(
            f"{path} is a name map, not a strategy file",
            code="not-a-strategy",
            hint="give it as the name map of a conversion",
        )
    if top and not any(difflib.get_close_matches(key, _TOP_KEYS, cutoff=_ALIKE) for key in top):
        raise StrategyError(
            f"{path} is JSON, but not a strategy file", code="not-a-strategy",
            facts=[f"expected the key parallel_layout_item; it has {names(top)}"],
        )  # fmt: skip
    for key in repeated:
        faults.add(key, "is listed twice", code="duplicate-key")
    layouts = []
    for name, item in _objects(top, "parallel_layout_item", faults):
        key_path = f"$.parallel_layout_item.{name}"
        numbers = {
            key: _integers(item, key, key_path, faults, required=key in {"dev_matrix", "tensor_map"})
            for key in ("dev_matrix", "tensor_map", "param_split_shape", "indices_offset", "tensor_shape")
        }
        field, step, size = (
            _integer(item, key, key_path, faults) for key in ("field", "opt_weight_shard_step", "opt_weight_shard_size")
        )
        if any(value is None for value in numbers.values()):
            continue
        shape = tuple(numbers["tensor_shape"] or ()) if "tensor_shape" in item else None
        ndim = len(numbers["tensor_map"] or ())
        if shape is not None and len(shape) != ndim:
            faults.add(
                f"{key_path}.tensor_shape",
                f"is {shape_text(shape)}; expected {ndim} dimensions, as in tensor_map",
                code="wrong-dimensions",
            )
        try:
            layout = Layout.of(
                numbers["dev_matrix"] or (),
                numbers["tensor_map"] or (),
                size,
                opt_weight_shard_step=step,
                param_split_shape=numbers["param_split_shape"] or (),
                indices_offset=numbers["indices_offset"] or (),
                field=field,
            )
        except LayoutError as error:
            faults.add(key_path, error)
            continue
        layouts.append((name, layout, shape, _unknown_items(item, _LAYOUT_KEYS, key_path, faults)))
    operators = []
    for name, item in _objects(top, "parallel_strategy_item", faults):
        key_path = f"$.parallel_strategy_item.{name}"
        dims = item.get("parallel_strategy", [])
        if not isinstance(dims, list):
            faults.unexpected(f"{key_path}.parallel_strategy", dims, "a list of lists of integers")
            dims = []
        parts = tuple(
            tuple(_checked_list(part, "parallel_strategy", f"{key_path}.parallel_strategy[{number}]", faults) or ())
            for number, part in enumerate(dims)
        )
        stage = _integer(item, "stage", key_path, faults)
        operators.append(Operator(name, stage, parts, _unknown_items(item, _OPERATOR_KEYS, key_path, faults)))
    current = _integer(top, "current_stage", "$", faults)
    return layouts, tuple(operators), current, _unknown_items(top, _TOP_KEYS, "$", faults)


def _objects(top: Json, key: str, faults: Faults) -> list[tuple[str, Json]]:
    items = top.get(key, {})
    if not isinstance(items, dict):
        faults.add(f"$.{key}", f"is a {type(items).__name__}; expected an object", code="wrong-type")
        return []
    for name, item in items.items():
        if not is_text(name):
            faults.add(f"$.{key}.{name!a}", "is not a valid name; it has a lone surrogate", code="bad-name")
        if not isinstance(item, dict):
            faults.add(f"$.{key}.{name}", f"is a {type(item).__name__}; expected an object", code="wrong-type")
    return [(name, item) for name, item in items.items() if isinstance(item, dict)]


def _integers(item: Json, key: str, key_path: str, faults: Faults, *, required: bool) -> list[int] | None:
    if key not in item:
        if required:
            faults.add(f"{key_path}.{key}", "is missing", code="missing-key")
        return None if required else []
    return _checked_list(item[key], key, f"{key_path}.{key}", faults)


def _checked_list(value: object, key: str, key_path: str, faults: Faults) -> list[int] | None:
    """Return a value if it is a list of integers in their range; else report a fault."""
    if not isinstance(value, list) or not all(type(number) is int for number in value):
        faults.unexpected(key_path, value, "a list of integers")
        return None
    for number in value:
        if number not in _RANGES[key]:
            faults.add(key_path, f"holds {number!r:.60}; expected {_range_text(key)}", code="out-of-range")
            return None
    return value


def _integer(item: Json, key: str, key_path: str, faults: Faults) -> int:
    value = item.get(key, 0)
    if type(value) is not int:
        faults.unexpected(f"{key_path}.{key}", value, "an integer")
    elif value not in _RANGES[key]:
        faults.unexpected(f"{key_path}.{key}", value, _range_text(key), code="out-of-range")
    else:
        return value
    return 0


def _range_text(key: str) -> str:
    return f"{_RANGES[key].start} to {_RANGES[key].stop - 1}"


def _unknown_items(item: Json, known_keys: set[str], key_path: str, faults: Faults) -> Unknown:
    """Return the unknown items; report a fault if a key resembles a missing one."""
    unknown = tuple((key, value) for key, value in item.items() if key not in known_keys)
    missing = sorted(known_keys - item.keys())
    for key, _ in unknown:
        if meant := difflib.get_close_matches(key.lower(), missing, n=1, cutoff=_ALIKE):
            faults.add(f"{key_path}.{key}", f"is unknown; did you mean {meant[0]!r}?", code="unknown-key")
    return unknown or b""


def to_json(strategy: Strategy) -> bytes:
    """Write a strategy as JSON.

    Raises:
        UsageError: the shape of a tensor with nested entries is not known, or JSON cannot have its layout.
    """
    layouts = {}
    for name, placed in strategy.in_file_order():
        layout = placed.layout
        item: Json = {
            "dev_matrix": list(layout.dev_matrix),
            "field": layout.field,
            "opt_weight_shard_size": layout.opt_weight_shard_size,
            "opt_weight_shard_step": layout.opt_weight_shard_step,
        }
        item["tensor_map"], shape = _expanded(name, layout, placed.shape)
        if shape is not None:
            item["tensor_shape"] = list(shape)
        if layout.param_split_shape:
            item["param_split_shape"] = list(layout.param_split_shape)
        if layout.indices_offset:
            item["indices_offset"] = list(layout.indices_offset)
        layouts[name] = item | _json_items(placed.unknown)
    operators: dict[str, Json] = {}
    for operator in strategy.operators:
        dims = [list(parts) for parts in operator.strategy]
        operators[operator.name] = {"parallel_strategy": dims, "stage": operator.stage} | _json_items(operator.unknown)
    if not operators and strategy.tensors:
        operators["reshard"] = {"parallel_strategy": [], "stage": strategy.stages.start}
    top = {
        "current_stage": strategy.current_stage,
        "parallel_layout_item": layouts,
        "parallel_strategy_item": operators,
    }
    return json.dumps(top | _json_items(strategy.unknown)).encode()


def _json_items(unknown: object) -> Json:
    return dict(unknown) if isinstance(unknown, tuple) else {}


def _expanded(name: str, layout: Layout, shape: Shape | None) -> tuple[list[int], Shape | None]:
    """Expand a layout's map and shape for JSON.

    All but the last axis of a nested entry become dimensions of their own.
    """
    if all(len(axes) <= 1 for axes in layout.tensor_map):
        return flat(layout.tensor_map), shape
    if shape is None:
        raise UsageError(
            f"tensor {name!r} cannot be written as JSON: its shape is unknown",
            code="unknown-shape",
            facts=[f"JSON expands the nested entries of its layout {layout}"],
            hint="write protobuf: a file name that does not end with .json",
        )
    if len(shape) != len(layout.tensor_map):
        raise UsageError(
            f"tensor {name!r}: layout {layout} does not fit its shape {shape_text(shape)}", code="wrong-dimensions"
        )
    if layout.param_split_shape and len(layout.tensor_map[0]) > 1:
        raise UsageError(
            f"tensor {name!r} cannot be written as JSON: several axes cut dimension 0 unevenly",
            code="not-in-json",
            facts=[f"its layout is {layout}"],
            hint="write protobuf: a file name that does not end with .json",
        )
    tensor_map: list[int] = []
    sizes: list[int] = []
    for axes, extent in zip(layout.tensor_map, shape, strict=True):
        outer = [layout.axis_extent(value) for value in axes[:-1]]
        tensor_map += axes or (-1,)
        sizes += [*outer, extent // prod(outer)]
    return tensor_map, tuple(sizes)
