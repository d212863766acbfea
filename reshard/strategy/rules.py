"""Build strategies without compiling a network: from a mesh and rules, or from operator strategies.

The tutorials compile a target network only for its strategy file, which depends on little of the network:

1. Each weight gets the layout of the first rule whose glob matches its name, in the order given. A weight without a
   matching rule is whole on every device of its stage.
2. Optimizer states (and `accu_grads.*`) get the layout of their weight, even if a rule matches their names: a state's
   name ends with a dot and its weight's name. The rules apply only to a state of another shape than its weight, and to
   a tensor whose full name is a rule.
3. With optimizer parallel, each weight's block is cut again along dimension 0 over the devices that share it. As in
   MindSpore 2.10.0, this is skipped if only one device has the block; if the whole weight is smaller than
   `parallel_optimizer_threshold` x 1024 bytes; and if the block's rows do not divide by the number of pieces. There
   is one piece for each device that shares the block, or `optimizer_weight_shard_size` if that is less and more than 1;
   if that does not divide the number of devices, the cut is skipped, too.
4. In a pipeline the mesh covers one stage; globs give the stage, or stages, of each weight.

A tensor without dimensions, or with a rule of None, is not in the strategy, and is copied unchanged (`global_step`).

Every block agrees with MindSpore's own files (`test_rules.py` counts them). Only a compilation can tell three things:
layouts that a search chose or propagated (`auto_parallel`), so give these as rules; frozen weights, which
`only_trainable_params` leaves out of a file; and weights with `parallel_optimizer=False`, so name these in
`optimizer_parallel_except`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, TypedDict

from reshard.dtypes import DType, by_name
from reshard.errors import Faults, LayoutError, UsageError, names
from reshard.layout.grid import MOST_DEVICES
from reshard.layout.layout import Layout, whole
from reshard.layout.placements import is_placement, layout_of_placements, placement
from reshard.strategy.names import matches, matching, no_match, optimizer_states
from reshard.strategy.strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from reshard.layout.block import Shape
    from reshard.strategy.names import State
    from reshard.strategy.operators import OperatorStrategy

    LayoutOf = Callable[[Shape], Layout]  # returns the layout of a tensor of a shape

AxisEntry = str | tuple[str, ...] | None
"""The mesh axes that split a dimension: one, several (major first), or None."""

Rule = Sequence[AxisEntry] | Mapping[str, Any] | None
"""An entry for each dimension, the rest not split; None: not in the strategy.

Or PyTorch's placements, one for each axis of the mesh, such as `["shard(0)", "replicate"]` (`layout.placements`). For
other axes of the same devices, as for experts: `{"mesh": {"dp": 2, "ep": 4}, "layout": ["ep"]}`.
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


_MOST_WAYS = 64  # the largest number of parts in a hint
_MOST_STAGES = 1 << 16

OPTIONS = frozenset(Options.__annotations__) - {"dtypes", "only_by_rule", "predict"}
"""The options that a rules file may have."""


def from_rules(
    shapes: Mapping[str, Shape],
    mesh: Mapping[str, int],
    rules: Mapping[str, Rule],
    options: Options,
    faults: Faults | None = None,
) -> Strategy:
    """Build a strategy from a mesh and rules; see `Strategy.from_rules`.

    Args:
        shapes: the whole shape of every tensor.
        mesh: the extents of the axes by name, outermost first: the device matrix.
        rules: globs of tensor names to rules for their dimensions; the first match counts.
        options: see `Options`.
        faults: collects the faults, under the name of a file.

    Raises:
        UsageError: all faults at once, each with its place.
    """
    faults = faults or Faults("rules")
    extents = _mesh(mesh, "mesh", faults)
    layout_rules = {
        glob: _mesh_rule(rule, extents, _at("rules", glob), faults) for glob, rule in _items(rules, "rules", faults)
    }
    _check_options(options, faults)
    faults.raise_if_any(UsageError)
    unsplit = Layout(tuple(extents.values()), ())
    return _build(
        shapes, layout_rules, lambda shape: replace(unsplit, tensor_map=((),) * len(shape)), "rules", options, faults
    )


def from_operators(
    shapes: Mapping[str, Shape],
    operators: Mapping[str, OperatorStrategy | Layout | None],
    devices: int,
    options: Options,
    faults: Faults | None = None,
) -> Strategy:
    """Build a strategy from operators; see `Strategy.from_operators`.

    Args:
        shapes: the whole shape of every tensor.
        operators: globs of tensor names to the strategy of the operator that uses them, or to a layout.
        devices: ranks in each stage.
        options: see `Options`.
        faults: collects the faults, under the name of a file.

    Raises:
        UsageError: all faults at once, each with its place.
    """
    faults = faults or Faults("operators")
    _check_options(options, faults)
    if type(devices) is not int or not 1 <= devices <= MOST_DEVICES:
        faults.add("$.devices", f"is {devices!r:.60}; expected a number from 1 to {MOST_DEVICES}", code="out-of-range")
        faults.raise_if_any(UsageError)
    layout_rules: dict[str, Any] = {}
    for glob, operator in _items(operators, "operators", faults):
        try:
            layout = operator if operator is None or isinstance(operator, Layout) else operator.layout(devices)
        except LayoutError as error:
            faults.add(_at("operators", glob), error)
            continue
        if layout is not None and layout.devices != devices:
            faults.add(
                _at("operators", glob),
                f"is a layout of {layout.devices} devices; a stage has {devices}",
                code="devices-differ",
            )
        layout_rules[glob] = layout and _exactly(layout)
    faults.raise_if_any(UsageError)
    return _build(shapes, layout_rules, lambda shape: whole(len(shape), devices), "operators", options, faults)


# --- rules ------------------------------------------------------------------------------------------------------


def _at(key: str, name: str) -> str:
    return f"$.{key}[{name!r}]"


def _items(value: object, key: str, faults: Faults) -> list[tuple[str, Any]]:
    """Return the items of a mapping with text keys; report a fault for anything else."""
    if not isinstance(value, Mapping):
        faults.add(f"$.{key}", f"is {value!r:.60}; expected a mapping", code="wrong-type")
        return []
    for name in value:
        if not isinstance(name, str) or not name:
            faults.add(f"$.{key}", f"has the key {name!r:.60}; expected text", code="bad-name")
    return [(name, item) for name, item in value.items() if isinstance(name, str) and name]


def _mesh(mesh: object, key: str, faults: Faults) -> dict[str, int]:
    extents = {}
    for axis, extent in _items(mesh, key, faults):
        if type(extent) is not int or not 1 <= extent <= MOST_DEVICES:
            faults.add(
                f"$.{key}.{axis}",
                f"is {extent!r:.60}; expected a number from 1 to {MOST_DEVICES}",
                code="out-of-range",
            )
        else:
            extents[axis] = extent
    try:
        Layout(tuple(extents.values()), ())
    except LayoutError as error:
        faults.add(f"$.{key}", error.changed(lambda text: text.replace("dev_matrix", "mesh")))
    return extents


def _mesh_rule(rule: object, mesh: Mapping[str, int], key_path: str, faults: Faults) -> LayoutOf | None:
    """Return a function from shapes to the layouts of a rule; report faults."""
    if rule is None:
        return None
    values = {axis: len(mesh) - 1 - number for number, axis in enumerate(mesh)}
    tensor_map: list[tuple[int, ...]] = []
    if isinstance(rule, Mapping) and rule.keys() == {"mesh", "layout"}:
        rule_mesh = _mesh(rule["mesh"], f"{key_path.removeprefix('$.')}.mesh", faults)
        if prod(rule_mesh.values()) != prod(mesh.values()):
            devices = f"{prod(rule_mesh.values())} devices; a stage has {prod(mesh.values())}"
            faults.add(f"{key_path}.mesh", f"has {devices}", code="devices-differ")
        return _mesh_rule(rule["layout"], rule_mesh, f"{key_path}.layout", faults)
    if isinstance(rule, str) or not isinstance(rule, Sequence):
        expected = "a list with one entry per dimension, a mesh and a layout, or null"
        faults.add(key_path, f"is {rule!r:.60}; expected {expected}", code="wrong-type")
        return None
    if any(is_placement(entry) and entry not in mesh for entry in rule):
        return _placements_rule(rule, mesh, key_path, faults)
    used: set[str] = set()
    for dim, entry in enumerate(rule):
        axes = () if entry in (None, "None", []) else (entry,) if isinstance(entry, str) else entry
        if not isinstance(axes, Sequence) or not all(isinstance(axis, str) for axis in axes):
            faults.add(
                f"{key_path}[{dim}]", f"is {entry!r:.60}; expected an axis, a list of axes, or null", code="wrong-type"
            )
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


def _exactly(layout: Layout) -> LayoutOf:
    def of(shape: Shape) -> Layout:
        if len(layout.tensor_map) != len(shape):
            raise LayoutError(
                f"is for {len(layout.tensor_map)} dimensions; the tensor has {len(shape)}", code="wrong-dimensions"
            )
        return layout

    return of


# --- from rules to layouts --------------------------------------------------------------------------------------


def _build(
    shapes: Mapping[str, Shape],
    rules: Mapping[str, LayoutOf | None],
    unmatched: LayoutOf,
    key: str,
    options: Options,
    faults: Faults,
) -> Strategy:
    """Apply rules, pipeline and optimizer parallel to every tensor (the steps above)."""
    homes: dict[str, str] = {}  # the weight of each tensor, and itself for a weight
    owners: dict[str, str] = {}  # the tensor whose rule applies
    states = optimizer_states(shapes)
    for name, shape in shapes.items():
        if name in states and name not in rules and options.get("predict", False):
            continue
        weight = None if name in rules else _weight(name, states, shapes)
        homes[name] = weight or name
        owners[name] = weight if weight is not None and tuple(shapes[weight]) == tuple(shape) else name
    ruled = _first_matches(rules, dict.fromkeys(owners.values()), key, shapes, faults)
    by_rule = frozenset(options.get("only_by_rule", ()))
    strategy_shapes = {
        name: tuple(shapes[name])
        for name, glob in ruled.items()
        if (rules[glob] is not None if glob is not None else shapes[name] and name not in by_rule)
    }
    layouts = _layouts(strategy_shapes, rules, ruled, unmatched, key, faults)
    if options.get("optimizer_parallel", False):
        layouts = _optimizer_parallel(strategy_shapes, layouts, options, faults)
    stages = _stages([homes[name] for name in strategy_shapes], shapes, options.get("pipeline"), faults)
    faults.raise_if_any(UsageError)
    by_name: dict[str, Layout | Mapping[int, Layout]] = {
        name: dict.fromkeys(stages[homes[name]], layouts[owner]) for name, owner in owners.items() if owner in layouts
    }
    if not by_name:
        raise UsageError(f"{faults.subject}: no tensor is left for a strategy", code="no-tensors")
    return Strategy.of(by_name, shapes={name: tuple(shapes[name]) for name in by_name})


def _weight(name: str, states: Mapping[str, State], weights: Collection[str]) -> str | None:
    """Return the weight of an optimizer state, or None.

    A state may be the state of a state (`accu_grads.adam_m.w`).
    """
    weight = name
    while weight in states:
        weight = states[weight].weight
    return weight if weight != name and weight in weights else None


def _first_matches(
    patterns: Collection[str], weights: Collection[str], key: str, tensor_names: Collection[str], faults: Faults
) -> dict[str, str | None]:
    """Return each weight's first matching glob; report globs that are never first."""
    first = {name: next((glob for glob in patterns if matches(name, [glob])), None) for name in weights}
    used = set(first.values())
    for glob in (glob for glob in patterns if glob not in used):
        if matched := matching(glob, tensor_names):
            faults.add(
                _at(key, glob),
                f"is never used: an earlier pattern takes {names(matched)}, or it is an optimizer state",
                code="unused-pattern",
            )
        else:
            faults.add(_at(key, glob), partial(no_match, glob, tensor_names), code="no-match")
    return first


def _layouts(
    shapes: Mapping[str, Shape],
    rules: Mapping[str, LayoutOf | None],
    ruled: Mapping[str, str | None],
    unmatched: LayoutOf,
    key: str,
    faults: Faults,
) -> dict[str, Layout]:
    """Return the layout of each weight by the rules.

    Layouts that do not fit are faults, reported once for each rule.
    """
    layouts: dict[str, Layout] = {}
    wrong: dict[tuple[str, str, str], list[str]] = {}
    hints: dict[str, str] = {}
    for name, shape in shapes.items():
        glob = ruled[name]
        try:
            layout_of = unmatched if glob is None else rules[glob] or unmatched
            layouts[name] = layout_of(shape)
            splits = layouts[name].splits
        except LayoutError as error:
            wrong.setdefault((glob or "", "; ".join([error.message, *error.facts]), error.code), []).append(name)
            continue
        for dim, (extent, ways) in enumerate(zip(shape, splits, strict=True)):
            if extent % ways and not (dim == 0 and layouts[name].param_split_shape):
                fault = f"cannot cut dimension {dim}, of size {extent}, into {ways} equal parts"
                ways_that_fit = ", ".join(str(n) for n in range(2, min(extent, _MOST_WAYS) + 1) if extent % n == 0)
                hints.setdefault(fault, f"{extent} can be cut into {ways_that_fit or 'no'} parts; null leaves it whole")
                wrong.setdefault((glob or "", fault, "not-divisible"), []).append(name)
    for (glob, fault, code), tensors in wrong.items():
        faults.add(_at(key, glob), f"{fault} ({names(tensors)})", code=code, hint=hints.get(fault, ""))
    return layouts


# --- optimizer parallel and pipelines ---------------------------------------------------------------------------


def optimizer_sharded(layout: Layout, shape: Shape, nbytes: int, *, size: int = -1, threshold: int = 64) -> Layout:
    """Cut a weight's blocks again over the devices that share them.

    This is done only if MindSpore does it: see step 3 above.

    Args:
        layout: the weight's layout without optimizer parallel.
        shape: the shape of the whole weight.
        nbytes: the size of the whole weight.
        size: the maximum number of pieces; -1 or 1 for no limit.
        threshold: the smallest weight that is cut, in KB of 1024 bytes.

    >>> rows = Layout.of([2, 4], [0, -1])
    >>> print(optimizer_sharded(rows, (128, 128), 65536)), print(optimizer_sharded(rows, (127, 128), 65024))
    [2, 4] map [0, -1] opt -1
    [2, 4] map [0, -1]
    (None, None)
    """
    sharing = prod(layout.dev_matrix[axis] for axis in layout.unused_axes)
    pieces = min(size, sharing) if size > 1 else sharing
    if (
        layout.opt_weight_shard_size
        or layout.param_split_shape
        or sharing == 1
        or not shape
        or nbytes < threshold * 1024
    ):
        return layout
    if sharing % pieces or shape[0] // layout.splits[0] % pieces:
        return layout
    cut = replace(layout, opt_weight_shard_size=pieces if size > 1 else -1)
    return replace(cut, opt_weight_shard_step=cut.shard_step())


def _optimizer_parallel(
    shapes: Mapping[str, Shape], layouts: Mapping[str, Layout], options: Options, faults: Faults
) -> dict[str, Layout]:
    excepted = options.get("optimizer_parallel_except", ())
    for number, glob in enumerate(excepted):
        if not matching(glob, layouts):
            faults.add(
                f"$.optimizer_parallel_except[{number}]",
                f"{glob!r} matches no weight; there are {names(layouts)}",
                code="no-match",
            )
    dtypes = options.get("dtypes") or {}
    sharded = {}
    for name, layout in layouts.items():
        dtype = dtypes.get(name, "float32")
        itemsize = (by_name(dtype, UsageError) if isinstance(dtype, str) else dtype).itemsize
        sharded[name] = layout
        if not matches(name, excepted):
            sharded[name] = optimizer_sharded(
                layout,
                shapes[name],
                prod(shapes[name]) * itemsize,
                size=options.get("optimizer_weight_shard_size", -1),
                threshold=options.get("parallel_optimizer_threshold", 64),
            )
    return sharded


def _stages(
    weights: Collection[str], tensor_names: Collection[str], pipeline: object, faults: Faults
) -> dict[str, list[int]]:
    """Return the stages of each weight; report unplaced weights and empty stages."""
    if pipeline is None:
        return {name: [0] for name in weights}
    by_glob: dict[str, list[int]] = {}
    for glob, value in _items(pipeline, "pipeline", faults):
        stages = [value] if type(value) is int else value
        if (
            not isinstance(stages, Sequence)
            or not stages
            or any(type(n) is not int or not 0 <= n < _MOST_STAGES for n in stages)
        ):
            faults.add(
                _at("pipeline", glob),
                f"is {value!r:.60}; expected a stage, counted from 0, or a list of stages",
                code="bad-stage",
            )
            stages = []
        by_glob[glob] = list(stages)
    first = _first_matches(by_glob, weights, "pipeline", tensor_names, faults)
    homeless = [name for name, glob in first.items() if glob is None]
    if homeless:
        faults.add("$.pipeline", f"gives no stage to {names(homeless)}", code="unplaced-tensor")
    by_name = {name: by_glob[glob] for name, glob in first.items() if glob is not None}
    used = {stage for stages in by_name.values() for stage in stages}
    if missing := set(range(max(used, default=0))) - used:
        faults.add(
            "$.pipeline",
            f"has no tensor for stage {names(sorted(missing))}, but some for stage {max(used)}",
            code="missing-stage",
        )
    return by_name


def _check_options(options: Options, faults: Faults) -> None:
    for option in ("optimizer_parallel", "predict"):
        if not isinstance(value := options.get(option, False), bool):
            faults.add(f"$.{option}", f"is {value!r:.60}; expected true or false", code="wrong-type")
    size = options.get("optimizer_weight_shard_size", -1)
    if type(size) is not int or size < -1 or size == 0:
        faults.add(
            "$.optimizer_weight_shard_size",
            f"is {size!r:.60}; expected -1, or a number of at least 1",
            code="out-of-range",
        )
    threshold = options.get("parallel_optimizer_threshold", 64)
    if type(threshold) is not int or threshold < 0:
        faults.add(
            "$.parallel_optimizer_threshold",
            f"is {threshold!r:.60}; expected a number of KB, at least 0",
            code="out-of-range",
        )
    excepted = options.get("optimizer_parallel_except", ())
    if isinstance(excepted, str) or not isinstance(excepted, Sequence) or not all(isinstance(g, str) for g in excepted):
        faults.add(
            "$.optimizer_parallel_except", f"is {excepted!r:.60}; expected a list of patterns", code="wrong-type"
        )
