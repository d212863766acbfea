"""Read, write and merge strategy files, protobuf or JSON.

Sources: MindSpore 2.10 `node_strategy.proto` (in `proto/strategy.proto`) and `parallel/_parallel_serialization.py`.

* The pipeline stage is only in the operators' entries; `current_stage` has no meaning.
* A file is merged if every tensor name begins with a stage number and a dash.
* A stage of a merged file with operators but no tensors has ranks like any other stage: they hold the tensors that no
  strategy names.
* The file of stage 0 does not say that there are other stages. The files of a pipeline's ranks are in one directory and
  have the rank as the last number of their names; the file of the highest rank shows that there are more stages.
* A nested tensor map is one `tensor_map` message for each dimension in protobuf, the second one empty for a nested
  1-D tensor; JSON has it expanded (see `layout.layout.foldings`).
* Unknown protobuf fields and JSON keys are kept and written back. But an unknown JSON key that resembles a missing one
  is a typing error.
"""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.errors import Faults, LayoutError, ReshardError, StrategyError, UsageError
from reshard.layout.block import LONGEST_NAME, Shape, shape_text
from reshard.layout.layout import Layout, foldings
from reshard.storage.base import reading
from reshard.storage.places import AnyName, Place, as_place
from reshard.storage.small import is_text, parse_json, read_small, refuse_inputs, write_whole
from reshard.strategy.proto.messages import Said, Unknown, flat, from_protobuf, to_protobuf
from reshard.strategy.strategy import Operator, Placed, Strategy, agreed_devices, merge, merged_names

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

Json = dict[str, Any]

_LAYOUT_KEYS = {
    "dev_matrix", "tensor_map", "tensor_shape", "field", "opt_weight_shard_step", "opt_weight_shard_size",
    "param_split_shape", "indices_offset",
}  # fmt: skip
_OPERATOR_KEYS = {"parallel_strategy", "stage"}
_TOP_KEYS = {"current_stage", "parallel_layout_item", "parallel_strategy_item"}
_ALIKE = 0.8  # of difflib: one letter in a short word, some in a long one
_MOST_STAGES = 1 << 16
_MOST_RANKS = 1 << 20
_LARGEST_FILE = 1 << 26
_LAST_NUMBER = re.compile(r"(.*?)(\d{1,9})(\D*)", re.DOTALL)

# The ranges of the protobuf fields, so that every strategy read from JSON can be written as protobuf, too.
_INT32, _UINT32, _INT64 = range(-(1 << 31), 1 << 31), range(1 << 32), range(-(1 << 63), 1 << 63)
_RANGES = {
    "dev_matrix": _UINT32, "tensor_map": _INT32, "param_split_shape": _INT64, "indices_offset": _INT64,
    "tensor_shape": range(1 << 63), "parallel_strategy": _UINT32, "field": _INT32, "opt_weight_shard_step": _INT32,
    "opt_weight_shard_size": _INT32, "current_stage": _UINT32, "stage": range(_MOST_STAGES),
}  # fmt: skip


@reading(StrategyError)
def read_strategy(path: AnyName) -> Strategy:
    """Read a strategy file, or merge a directory of the files of a pipeline's ranks.

    The content decides whether a file is protobuf or JSON. If a local file is not merged, the file next to it with the
    highest number in place of its own is read, too: it shows whether there are more stages.

    Args:
        path: a file or a directory, local or at a URL.

    Raises:
        StrategyError: the file is missing, cannot be parsed or contradicts itself; all faults at once, each with
            its path in the file.
    """
    location = as_place(path)
    if location.is_dir():
        return merge([(str(file), _read_file(file)) for file in strategy_files(location)])
    strategy = _read_file(location)
    if not strategy.tensors:
        raise StrategyError(
            f"{location} names no tensor",
            code="no-tensors",
            facts=["MindSpore leaves such a file if the network has no parallel parameter, or did not compile"],
        )
    if not (location.can.waits or strategy.merged or strategy.others):
        return replace(strategy, others=_has_more_stages(location, strategy))
    return strategy


def _has_more_stages(path: Place, strategy: Strategy) -> bool:
    """Return whether the strategy file of the last rank shows more stages."""
    parts = _LAST_NUMBER.fullmatch(path.name)
    if parts is None:
        return False
    try:
        matches = [_LAST_NUMBER.fullmatch(sibling.name) for sibling in path.parent.iterdir()]
        alike = [match for match in matches if match and _are_alike(match, parts)]
        last = path.parent / max(alike, key=lambda match: int(match[2]))[0]
        if last.name == path.name or _are_equal(path, last):  # ranks of one stage have equal files
            return False
        last_strategy = _read_file(last)
    except (OSError, ReshardError, ValueError):  # the user did not ask for this file
        return False
    return (
        not last_strategy.merged
        and last_strategy.devices == strategy.devices
        and last_strategy.stages != strategy.stages
    )


def _are_equal(a: Place, b: Place) -> bool:
    return a.status().nbytes == b.status().nbytes and a.read_bytes() == b.read_bytes()


def _are_alike(a: re.Match[str], b: re.Match[str]) -> bool:
    """Return whether two names differ only in their last numbers.

    The number may appear in a name more than once.

    >>> names = ["s_0.ckpt", "s_7.ckpt", "rank_0_rank_0.ckpt", "rank_7_rank_7.ckpt", "run_7_s_7.ckpt"]
    >>> a, b, c, d, e = (_LAST_NUMBER.fullmatch(name) for name in names)
    >>> _are_alike(a, b), _are_alike(c, d), _are_alike(a, e), _are_alike(c, e)
    (True, True, False, False)
    """
    first, second = (re.sub(rf"(?<!\d){match[2]}(?!\d)", "#", match[0]) for match in (a, b))
    return a.group(1, 3) == b.group(1, 3) or first == second


def strategy_files(directory: Place) -> list[Place]:
    """Return the strategy files of a directory, ordered by the numbers in names.

    Raises:
        StrategyError: the directory has files of both formats, or no strategy file.
    """
    files: dict[str, list[Place]] = {
        suffix: [p for p in directory.iterdir() if p.suffix == suffix and p.is_file()] for suffix in (".ckpt", ".json")
    }
    if all(files.values()):
        raise StrategyError(
            f"{directory} has strategy files of two formats",
            code="mixed-formats",
            facts=[f"{len(files[suffix])} {suffix}" for suffix in (".ckpt", ".json")],
            hint="move the files of one format away",
        )
    if not any(files.values()):
        raise StrategyError(
            f"{directory} has no strategy file",
            code="no-strategy-file",
            facts=["expected a .ckpt or .json file per rank"],
        )
    numbers = re.compile(r"\d+")
    return sorted(files[".ckpt"] + files[".json"], key=lambda p: ([int(n) for n in numbers.findall(p.name)], p.name))


def write_strategy(strategy: Strategy, path: str | os.PathLike[str]) -> None:
    """Write a strategy file for MindSpore.

    It is JSON if its name ends with `.json`, else protobuf. The file appears under its name only when it is complete.

    Raises:
        UsageError: for JSON, the shape of a tensor with nested entries is not known; for protobuf, the number of
            dimensions of a tensor from JSON, which expands such entries, is not known.
        TargetError: the file cannot be written.
    """
    target = Path(path)
    write_whole(target, _to_json(strategy) if target.suffix == ".json" else to_protobuf(strategy))


@reading(StrategyError)
def merge_strategies(directory: str | os.PathLike[str], target: str | os.PathLike[str]) -> Strategy:
    """Merge the strategy files of a pipeline's ranks into one, and return it.

    Raises:
        StrategyError: a stage is missing, a file is empty, files of one stage disagree; all faults at once.
        TargetError: the file to write is one of the sources, or cannot be written.
    """
    source = as_place(directory)
    if not source.is_dir():
        raise StrategyError(
            f"{source} is not a directory",
            code="not-a-directory",
            hint="give the directory of all ranks' strategy files",
        )
    files = strategy_files(source)
    refuse_inputs([target], files, "one of the files that are merged")
    merged = merge([(str(file), _read_file(file)) for file in files])
    write_strategy(merged, target)
    return merged


def _read_file(path: Place) -> Strategy:
    content = read_small(path, "strategy file", _LARGEST_FILE, StrategyError)
    if not content:
        raise StrategyError(f"{path} is empty; expected a strategy file", code="empty-file")
    faults = Faults(str(path))
    if path.suffix == ".json" or content.lstrip()[:1] == b"{":
        return _strategy(faults, *_from_json(content, str(path), faults))
    # Field 1 of a strategy is a number (0x08), of a checkpoint a message (0x0a); safetensors begin with a length.
    if content[:1] == b"\n" or (content[8:9] == b"{" and int.from_bytes(content[:8], "little") < len(content)):
        raise StrategyError(
            f"{path} is a checkpoint, not a strategy file", code="not-a-strategy", hint=f"reshard inspect {path}"
        )
    return _strategy(faults, *from_protobuf(content, str(path), faults))


def _strategy(
    subject: Faults,
    layouts: Sequence[tuple[str, Layout, Shape | None, Unknown]],
    operators: tuple[Operator, ...],
    current_stage: int,
    unknown: Unknown,
) -> Strategy:
    """Build the strategy from the parsed parts of a file.

    The stages come from names or operators. All tensors must have the same number of devices.
    """
    staged = merged_names(name for name, *_ in layouts)
    merged = bool(staged)
    operator_stages = {operator.stage for operator in operators}
    if not merged and len(operator_stages) > 1:
        subject.add(
            "operators",
            f"are of stages {sorted(operator_stages)}; a file that is not merged has one",
            code="several-stages",
        )
    own_stage = min(operator_stages, default=0)
    if own_stage >= _MOST_STAGES:
        subject.add("operators", f"are of stage {own_stage}; the highest is {_MOST_STAGES - 1}", code="out-of-range")
    by_name: dict[str, dict[int, Placed]] = {}
    for full_name, layout, shape, extra in layouts:
        if len(full_name.encode(errors="replace")) > LONGEST_NAME:
            subject.add(
                f"{full_name!r:.60}…",
                f"has {len(full_name)} characters; names have at most {LONGEST_NAME} bytes",
                code="name-too-long",
            )
            continue
        stage, name = staged.get(full_name, (own_stage, full_name))
        if stage in by_name.setdefault(name, {}):
            subject.add(full_name, "is listed twice", code="duplicate-name")
        is_plausible = shape is not None and len(shape) == len(layout.tensor_map) > 1
        expanded = is_plausible and bool(foldings(layout, shape or (), len(layout.tensor_map) - 1))
        by_name[name][stage] = Placed(stage, layout, shape, extra, expanded)
    tensors = {name: tuple(places[stage] for stage in sorted(places)) for name, places in by_name.items()}
    devices = agreed_devices(tensors, subject)
    stages = range(own_stage, own_stage + 1)
    if merged:
        last = max({placed.stage for places in tensors.values() for placed in places} | operator_stages, default=0)
        if last >= _MOST_STAGES:
            subject.add(f"stage {last}", f"is too high; the highest is {_MOST_STAGES - 1}", code="out-of-range")
        stages = range(last + 1)
    if len(stages) <= _MOST_STAGES and len(stages) * devices > _MOST_RANKS:
        subject.add(
            "stages",
            f"are {len(stages)} of {devices} devices; at most {_MOST_RANKS} ranks are supported",
            code="too-many-ranks",
        )
    subject.raise_if_any(StrategyError)
    return Strategy(tensors, stages, devices, operators, merged, current_stage, unknown)


def _from_json(content: bytes, path: str, faults: Faults) -> Said:
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
    for key in repeated:
        faults.add(key, "is listed twice", code="duplicate-key")
    layouts = []
    for name, item in _objects(top, "parallel_layout_item", faults):
        key_path = f"$.parallel_layout_item.{name}"
        numbers = {
            key: _integers(item, key, key_path, faults, required=key in {"dev_matrix", "tensor_map"})
            for key in ("dev_matrix", "tensor_map", "param_split_shape", "indices_offset", "tensor_shape")
        }
        single = {
            key: _integer(item, key, key_path, faults)
            for key in ("field", "opt_weight_shard_step", "opt_weight_shard_size")
        }
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
                single["opt_weight_shard_size"],
                opt_weight_shard_step=single["opt_weight_shard_step"],
                param_split_shape=numbers["param_split_shape"] or (),
                indices_offset=numbers["indices_offset"] or (),
                field=single["field"],
            )
        except LayoutError as error:
            faults.add(key_path, error)
            continue
        layouts.append((name, layout, shape, _other_items(item, _LAYOUT_KEYS, key_path, faults)))
    operators = []
    for name, item in _objects(top, "parallel_strategy_item", faults):
        key_path = f"$.parallel_strategy_item.{name}"
        dims = item.get("parallel_strategy", [])
        if not isinstance(dims, list):
            faults.add(
                f"{key_path}.parallel_strategy",
                f"is {dims!r:.60}; expected a list of lists of integers",
                code="wrong-type",
            )
            dims = []
        parts = [
            _checked_list(part, "parallel_strategy", f"{key_path}.parallel_strategy[{number}]", faults)
            for number, part in enumerate(dims)
        ]
        stage = _integer(item, "stage", key_path, faults)
        operators.append(
            Operator(
                name,
                stage,
                tuple(tuple(part or ()) for part in parts),
                _other_items(item, _OPERATOR_KEYS, key_path, faults),
            )
        )
    current = _integer(top, "current_stage", "$", faults)
    return layouts, tuple(operators), current, _other_items(top, _TOP_KEYS, "$", faults)


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
        faults.add(key_path, f"is {value!r:.60}; expected a list of integers", code="wrong-type")
        return None
    for number in value:
        if number not in _RANGES[key]:
            faults.add(key_path, f"holds {number!r:.60}; expected {_range_text(key)}", code="out-of-range")
            return None
    return value


def _integer(item: Json, key: str, key_path: str, faults: Faults) -> int:
    value = item.get(key, 0)
    if type(value) is not int:
        faults.add(f"{key_path}.{key}", f"is {value!r:.60}; expected an integer", code="wrong-type")
    elif value not in _RANGES[key]:
        faults.add(f"{key_path}.{key}", f"is {value!r:.60}; expected {_range_text(key)}", code="out-of-range")
    else:
        return value
    return 0


def _range_text(key: str) -> str:
    return f"{_RANGES[key].start} to {_RANGES[key].stop - 1}"


def _other_items(item: Json, known_keys: set[str], key_path: str, faults: Faults) -> Unknown:
    """Return the unknown items; report a fault if a key resembles a missing one."""
    unknown = tuple((key, value) for key, value in item.items() if key not in known_keys)
    missing = sorted(known_keys - item.keys())
    for key, _ in unknown:
        if meant := difflib.get_close_matches(key.lower(), missing, n=1, cutoff=_ALIKE):
            faults.add(f"{key_path}.{key}", f"is unknown; did you mean {meant[0]!r}?", code="unknown-key")
    return unknown or b""


def _to_json(strategy: Strategy) -> bytes:
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
        layouts[name] = item | _known_items(placed.unknown)
    operators: dict[str, Json] = {
        operator.name: {
            "parallel_strategy": [list(dims) for dims in operator.strategy],
            "stage": operator.stage,
        }
        | _known_items(operator.unknown)
        for operator in strategy.operators
    }
    if not operators and strategy.tensors:
        operators["reshard"] = {"parallel_strategy": [], "stage": strategy.stages.start}
    top = {
        "current_stage": strategy.current_stage,
        "parallel_layout_item": layouts,
        "parallel_strategy_item": operators,
    }
    return json.dumps(top | _known_items(strategy.unknown)).encode()


def _known_items(unknown: object) -> Json:
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
