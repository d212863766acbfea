"""Check the values of rules, and convert rules to functions that return the layout of a shape.

People write these values, in a rules file or in Python; so all faults are collected, each with its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, TypedDict

from reshard.core.layout.grid import MOST_DEVICES
from reshard.core.layout.layout import Layout
from reshard.core.layout.placements import is_placement, layout_of_placements, placement
from reshard.errors import Faults, LayoutError, names
from reshard.strategy.operators import OPERATORS, OperatorStrategy

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from reshard.core.layout.block import Shape
    from reshard.dtypes import DType

    LayoutOf = Callable[[Shape], Layout]  # returns the layout of a tensor of a shape

AxisEntry = str | tuple[str, ...] | None
"""The mesh axes that split a dimension: one, several (major first), or None."""

Rule = Sequence[AxisEntry] | Mapping[str, Any] | None
"""An entry for each dimension, the rest not split; None: not in the strategy.

Or PyTorch's placements, one for each axis of the mesh, such as `["shard(0)", "replicate"]` (`core.layout.placements`).
For other axes of the same devices, as for experts: `{"mesh": {"dp": 2, "ep": 4}, "layout": ["ep"]}`.
"""


class Options(TypedDict, total=False):
    """The common options of strategies from rules and from operators.

    Attributes:
        dtypes: the dtypes of the tensors, by name, for the threshold; float32 by default.
        optimizer_parallel: cut blocks again over the devices that share them (`enable_parallel_optimizer`).
        optimizer_weight_shard_size: the maximum number of pieces; -1 for all devices that share a block.
        parallel_optimizer_threshold: the smallest weight that is cut again, in KB of 1024 bytes; 64 by default.
        optimizer_parallel_except: globs of weights that are not cut again (`Parameter.parallel_optimizer = False`).
        pipeline: globs of weights to their stage or stages; the first match counts.
        only_by_rule: names of tensors that are left out unless a rule matches them, as `global_step` in MindSpore.
        predict: leave out optimizer states and `accu_grads.*`, as `infer_predict_layout` does.
    """

    dtypes: Mapping[str, DType | str]
    optimizer_parallel: bool
    optimizer_weight_shard_size: int
    parallel_optimizer_threshold: int
    optimizer_parallel_except: Sequence[str]
    pipeline: Mapping[str, int | Sequence[int]] | None
    only_by_rule: Collection[str]
    predict: bool


OPTIONS = frozenset(Options.__annotations__) - {"dtypes", "only_by_rule", "predict"}
"""The options that a rules file may have."""


def key_path_of(key: str, name: str) -> str:
    """Return the place of a name in a mapping of a rules file."""
    return f"$.{key}[{name!r}]"


def named_items(value: object, key: str, faults: Faults) -> list[tuple[str, Any]]:
    """Return the items of a mapping with text keys; report a fault for anything else."""
    if not isinstance(value, Mapping):
        faults.unexpected(f"$.{key}", value, "a mapping")
        return []
    for name in value:
        if not isinstance(name, str) or not name:
            faults.add(f"$.{key}", f"has the key {name!r:.60}; expected text", code="bad-name")
    return [(name, item) for name, item in value.items() if isinstance(name, str) and name]


def parse_mesh(mesh: object, key: str, faults: Faults) -> dict[str, int]:
    """Return the extents of a mesh's axes; report faults."""
    extents = {}
    for axis, extent in named_items(mesh, key, faults):
        if type(extent) is not int or not 1 <= extent <= MOST_DEVICES:
            faults.unexpected(f"$.{key}.{axis}", extent, f"a number from 1 to {MOST_DEVICES}", code="out-of-range")
        else:
            extents[axis] = extent
    try:
        Layout(tuple(extents.values()), ())
    except LayoutError as error:
        faults.add(f"$.{key}", error.changed(lambda text: text.replace("dev_matrix", "mesh")))
    return extents


def mesh_rule(rule: object, mesh: Mapping[str, int], key_path: str, faults: Faults) -> LayoutOf | None:
    """Return a function from shapes to the layouts of a rule; report faults.

    The result is None for a rule of None, and may be None after a reported fault.
    """
    if rule is None:
        return None
    if isinstance(rule, Mapping) and rule.keys() == {"mesh", "layout"}:
        rule_mesh = parse_mesh(rule["mesh"], f"{key_path.removeprefix('$.')}.mesh", faults)
        devices, stage_devices = prod(rule_mesh.values()), prod(mesh.values())
        if devices != stage_devices:
            faults.add(f"{key_path}.mesh", f"has {devices} devices; a stage has {stage_devices}", code="devices-differ")
        return mesh_rule(rule["layout"], rule_mesh, f"{key_path}.layout", faults)
    if isinstance(rule, str) or not isinstance(rule, Sequence):
        faults.unexpected(key_path, rule, "a list with one entry per dimension, a mesh and a layout, or null")
        return None
    if any(is_placement(entry) and entry not in mesh for entry in rule):
        return _placements_rule(rule, mesh, key_path, faults)
    values = {axis: len(mesh) - 1 - number for number, axis in enumerate(mesh)}
    tensor_map: list[tuple[int, ...]] = []
    used: set[str] = set()
    for dim, entry in enumerate(rule):
        axes = () if entry in (None, "None", []) else (entry,) if isinstance(entry, str) else entry
        if not isinstance(axes, Sequence) or not all(isinstance(axis, str) for axis in axes):
            faults.unexpected(f"{key_path}[{dim}]", entry, "an axis, a list of axes, or null")
            continue
        for axis in axes:
            if axis not in mesh:
                faults.add(
                    f"{key_path}[{dim}]", f"names axis {axis!r}; the mesh has {names(mesh)}", code="unknown-axis"
                )
            elif axis in used:
                faults.add(f"{key_path}[{dim}]", f"uses axis {axis!r} a second time", code="repeated-axis")
            used.add(axis)
        tensor_map.append(tuple(values.get(axis, 0) for axis in axes))
    extents = tuple(mesh.values())

    def layout(shape: Shape) -> Layout:
        ndim = len(shape)
        if len(tensor_map) > ndim:
            raise LayoutError(f"has {len(tensor_map)} entries for {ndim} dimensions", code="wrong-dimensions")
        return Layout(extents, (*tensor_map, *((),) * (ndim - len(tensor_map))))

    return layout


def _placements_rule(rule: Sequence[object], mesh: Mapping[str, int], key_path: str, faults: Faults) -> LayoutOf | None:
    """Return a function from shapes to the layouts of placements; report faults."""
    if len(rule) != len(mesh):
        faults.add(
            key_path,
            f"has {len(rule)} placements; expected one for each axis of the mesh ({names(mesh)})",
            code="wrong-count",
        )
    placements = []
    for number, entry in enumerate(rule):
        try:
            placements.append(placement(str(entry)))
        except LayoutError as error:
            faults.add(f"{key_path}[{number}]", error)
    return lambda shape: layout_of_placements(tuple(mesh.values()), placements, shape)


def exact_rule(layout: Layout) -> LayoutOf:
    """Return a function that returns a layout, and refuses shapes of other dimensions."""

    def layout_of(shape: Shape) -> Layout:
        if len(layout.tensor_map) != len(shape):
            raise LayoutError(
                f"is for {len(layout.tensor_map)} dimensions; the tensor has {len(shape)}", code="wrong-dimensions"
            )
        return layout

    return layout_of


def parse_operators(value: object, faults: Faults) -> dict[str, OperatorStrategy | None]:
    """Parse operators such as `{matmul: [[2, 1], [1, 2]], transpose_b: true}`."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        faults.unexpected("$.operators", value, "a mapping")
        return {}
    operators: dict[str, OperatorStrategy | None] = {}
    for glob, item in value.items():
        key_path = f"$.operators[{glob!r}]"
        kinds = [key for key in item if key in OPERATORS] if isinstance(item, dict) else []
        if item is None:
            operators[glob] = None
        elif len(kinds) != 1:
            expected = f"one of {names(OPERATORS, most=9)} with its strategy"
            faults.unexpected(key_path, item, expected, code="unknown-operator")
        else:
            options = {key: option for key, option in item.items() if key != kinds[0]}
            try:
                operators[glob] = OPERATORS[kinds[0]](tuple(map(tuple, item[kinds[0]])), **options)
            except LayoutError as error:
                faults.add(key_path, error)
            except TypeError:
                faults.unexpected(key_path, item, "e.g. {matmul: [[2, 1], [1, 2]], transpose_b: true}")
    return operators


def check_options(options: Options, faults: Faults) -> None:
    """Report options of wrong types or out of range."""
    for option in ("optimizer_parallel", "predict"):
        if not isinstance(value := options.get(option, False), bool):
            faults.unexpected(f"$.{option}", value, "true or false")
    size = options.get("optimizer_weight_shard_size", -1)
    if type(size) is not int or size < -1 or size == 0:
        expected = "-1, or a number of at least 1"
        faults.unexpected("$.optimizer_weight_shard_size", size, expected, code="out-of-range")
    threshold = options.get("parallel_optimizer_threshold", 64)
    if type(threshold) is not int or threshold < 0:
        expected = "a number of KB, at least 0"
        faults.unexpected("$.parallel_optimizer_threshold", threshold, expected, code="out-of-range")
    excepted = options.get("optimizer_parallel_except", ())
    if isinstance(excepted, str) or not isinstance(excepted, Sequence) or not all(isinstance(g, str) for g in excepted):
        faults.unexpected("$.optimizer_parallel_except", excepted, "a list of patterns")
