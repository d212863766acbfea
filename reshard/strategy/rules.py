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

A rules file is YAML, for `reshard strategy make`:

    mesh: {dp: 2, mp: 4}              # the devices of a stage, outermost axis first
    rules:                            # globs of names; the first match counts
      "*.wq.weight": [mp]             # dimension 0 by mp, the others whole
      "*.wo.weight": [null, [dp, mp]] # dimension 1 by both, dp major
      "*.wk.weight": [shard(0), replicate]  # PyTorch's placements: one for each axis of the mesh
      "*.experts.*": {mesh: {edp: 2, ep: 4}, layout: [ep]}  # over other axes of the same devices
      "learning_rate*": null          # not in the strategy: copied as it is
    optimizer_parallel: true
    optimizer_weight_shard_size: -1   # these two are MindSpore's defaults
    parallel_optimizer_threshold: 64  # KB
    optimizer_parallel_except: ["embedding*"]
    pipeline: {"layers.[0-3].*": 0, "layers.[4-7].*": 1, "embedding*": [0, 1]}

Or, instead of mesh and rules, the strategies of the network's operators, and the number of devices in a stage:

    devices: 8
    operators:
      "layer1.weight": {matmul: [[2, 1], [1, 2]], transpose_b: false}
      "layer1.bias": {add: [[2, 2], [2]]}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from reshard.core.layout.grid import MOST_DEVICES
from reshard.core.layout.layout import Layout, whole
from reshard.core.storage.places import as_place
from reshard.core.storage.small import read_yaml
from reshard.dtypes import by_name
from reshard.errors import Faults, LayoutError, UsageError, names
from reshard.spelling import did_you_mean
from reshard.strategy.names import matches, matching, no_match, optimizer_states
from reshard.strategy.rule_values import (
    OPTIONS,
    check_options,
    exact_rule,
    key_path_of,
    mesh_rule,
    named_items,
    parse_mesh,
    parse_operators,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    from reshard.core.layout.block import Shape
    from reshard.core.storage.places import AnyName
    from reshard.dtypes import DType
    from reshard.strategy.operators import OperatorStrategy
    from reshard.strategy.rule_values import LayoutOf, Options, Rule

_MOST_WAYS = 64  # the largest number of parts in a hint
_MOST_STAGES = 1 << 16

Built = tuple[dict[str, "Layout | Mapping[int, Layout]"], dict[str, "Shape"]]
"""The layouts of a strategy and the whole shapes, by name."""


def from_rules(
    shapes: Mapping[str, Shape],
    mesh: Mapping[str, int],
    rules: Mapping[str, Rule],
    options: Options,
    faults: Faults | None = None,
) -> Built:
    """Build layouts from a mesh and rules; see `Strategy.from_rules`.

    The faults of a rules file are collected in `faults`, under its name.
    """
    faults = faults or Faults("rules")
    extents = parse_mesh(mesh, "mesh", faults)
    layout_rules = {
        glob: mesh_rule(rule, extents, key_path_of("rules", glob), faults)
        for glob, rule in named_items(rules, "rules", faults)
    }
    check_options(options, faults)
    faults.raise_if_any(UsageError)
    matrix = tuple(extents.values())
    return _build(shapes, layout_rules, lambda shape: Layout(matrix, ((),) * len(shape)), "rules", options, faults)


def from_operators(
    shapes: Mapping[str, Shape],
    operators: Mapping[str, OperatorStrategy | Layout | None],
    devices: int,
    options: Options,
    faults: Faults | None = None,
) -> Built:
    """Build layouts from operators; see `Strategy.from_operators`.

    The faults of a rules file are collected in `faults`, under its name.
    """
    faults = faults or Faults("operators")
    check_options(options, faults)
    if type(devices) is not int or not 1 <= devices <= MOST_DEVICES:
        faults.unexpected("$.devices", devices, f"a number from 1 to {MOST_DEVICES}", code="out-of-range")
        faults.raise_if_any(UsageError)
    layout_rules: dict[str, Any] = {}
    for glob, operator in named_items(operators, "operators", faults):
        try:
            layout = operator if operator is None or isinstance(operator, Layout) else operator.layout(devices)
        except LayoutError as error:
            faults.add(key_path_of("operators", glob), error)
            continue
        if layout is not None and layout.devices != devices:
            faults.add(
                key_path_of("operators", glob),
                f"is a layout of {layout.devices} devices; a stage has {devices}",
                code="devices-differ",
            )
        layout_rules[glob] = layout and exact_rule(layout)
    faults.raise_if_any(UsageError)
    return _build(shapes, layout_rules, lambda shape: whole(len(shape), devices), "operators", options, faults)


def layouts_from_file(
    path: AnyName,
    shapes: Mapping[str, Shape],
    *,
    dtypes: Mapping[str, DType | str] | None = None,
    only_by_rule: Collection[str] = (),
    predict: bool = False,
) -> Built:
    """Build the layouts that a rules file describes.

    Args:
        path: a YAML file.
        shapes: the whole shape of every tensor.
        dtypes: the dtypes of the tensors, for the threshold of optimizer parallel.
        only_by_rule: names of tensors that are left out unless a rule matches them.
        predict: leave out the states of the optimizer.

    Raises:
        UsageError: the file cannot be read, or is not a rules file for such tensors; all faults at once, each with its
            place in the file.
    """
    faults = Faults(str(path))
    top = read_yaml(as_place(path), "rules file", faults)
    if not isinstance(top, dict) or not all(isinstance(key, str) for key in top):
        raise UsageError(
            f"{path} holds a YAML {type(top).__name__}; expected a mapping with the keys mesh and rules",
            code="wrong-type",
        )
    if "reshard-rules" in top:
        raise UsageError(
            f"{path} is a file of --rules, which rename and fuse tensors",
            code="wrong-kind",
            facts=["expected the keys mesh and rules, which say how tensors are cut"],
        )
    options = {key: top.pop(key) for key in OPTIONS & top.keys()}
    kinds = [{"mesh", "rules"}, {"devices", "operators"}]
    kind = next((keys for keys in kinds if keys & top.keys()), kinds[0])
    for key in (key for key in top if key not in kind):
        faults.add(
            f"$.{key}",
            f"is unknown; expected {names(sorted(kind))}, and perhaps {names(sorted(OPTIONS), most=9)}",
            code="unknown-key",
            hint=did_you_mean(key, sorted(kind | OPTIONS)),
        )
    for key in sorted(kind - top.keys()):
        faults.add(
            f"$.{key}",
            f"is missing; expected {names(sorted(kinds[0]))}, or {names(sorted(kinds[1]))}",
            code="missing-key",
            hint="" if top.keys() - kind else "`reshard help strategies` has examples",
        )
    operators = parse_operators(top.get("operators"), faults)
    faults.raise_if_any(UsageError)
    arguments: Any = {**options, "dtypes": dtypes or {}, "only_by_rule": only_by_rule, "predict": predict}
    if kind is kinds[0]:
        return from_rules(shapes, top["mesh"], top["rules"], arguments, faults)
    return from_operators(shapes, operators, top["devices"], arguments, faults)


# --- from rules to layouts --------------------------------------------------------------------------------------


def _build(
    shapes: Mapping[str, Shape],
    rules: Mapping[str, LayoutOf | None],
    unmatched: LayoutOf,
    key: str,
    options: Options,
    faults: Faults,
) -> Built:
    """Apply rules, pipeline and optimizer parallel to every tensor (the steps above)."""
    homes: dict[str, str] = {}  # the weight of each tensor, and itself for a weight
    owners: dict[str, str] = {}  # the tensor whose rule applies
    states = optimizer_states(shapes)
    for name, shape in shapes.items():
        if name in states and name not in rules and options.get("predict", False):
            continue
        weight = name
        while weight in states and name not in rules:  # a state may be of a state (`accu_grads.adam_m.w`)
            weight = states[weight].weight
        homes[name] = weight if weight in shapes else name
        owners[name] = homes[name] if tuple(shapes[homes[name]]) == tuple(shape) else name
    glob_of = _first_matches(rules, dict.fromkeys(owners.values()), key, shapes, faults)
    by_rule = frozenset(options.get("only_by_rule", ()))
    strategy_shapes = {
        name: tuple(shapes[name])
        for name, glob in glob_of.items()
        if (rules[glob] is not None if glob is not None else shapes[name] and name not in by_rule)
    }
    layouts = _layouts(strategy_shapes, rules, glob_of, unmatched, key, faults)
    if options.get("optimizer_parallel", False):
        layouts = _optimizer_parallel(strategy_shapes, layouts, options, faults)
    stages = _stages([homes[name] for name in strategy_shapes], shapes, options.get("pipeline"), faults)
    faults.raise_if_any(UsageError)
    by_name: dict[str, Layout | Mapping[int, Layout]] = {
        name: dict.fromkeys(stages[homes[name]], layouts[owner]) for name, owner in owners.items() if owner in layouts
    }
    if not by_name:
        raise UsageError(f"{faults.subject}: no tensor is left for a strategy", code="no-tensors")
    return by_name, {name: tuple(shapes[name]) for name in by_name}


def _first_matches(
    patterns: Collection[str], weights: Collection[str], key: str, tensor_names: Collection[str], faults: Faults
) -> dict[str, str | None]:
    """Return each weight's first matching glob; report globs that are never first."""
    first = {name: next((glob for glob in patterns if matches(name, [glob])), None) for name in weights}
    used = set(first.values())
    for glob in (glob for glob in patterns if glob not in used):
        if matched := matching(glob, tensor_names):
            faults.add(
                key_path_of(key, glob),
                f"is never used: an earlier pattern takes {names(matched)}, or it is an optimizer state",
                code="unused-pattern",
            )
        else:
            faults.add(key_path_of(key, glob), partial(no_match, glob, tensor_names), code="no-match")
    return first


def _layouts(
    shapes: Mapping[str, Shape],
    rules: Mapping[str, LayoutOf | None],
    glob_of: Mapping[str, str | None],
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
        glob = glob_of[name]
        layout_of = (rules[glob] if glob is not None else None) or unmatched
        try:
            layouts[name] = layout_of(shape)
            splits = layouts[name].splits
        except LayoutError as error:
            wrong.setdefault((glob or "", "; ".join([error.message, *error.facts]), error.code), []).append(name)
            continue
        for dim, (extent, ways) in enumerate(zip(shape, splits, strict=True)):
            if extent % ways and not (dim == 0 and layouts[name].param_split_shape):
                fault = f"cannot cut dimension {dim}, of size {extent}, into {ways} equal parts"
                ways_that_fit = ", ".join(str(n) for n in range(2, min(extent, _MOST_WAYS) + 1) if extent % n == 0)
                can = f"can be cut into {ways_that_fit} parts" if ways_that_fit else "cannot be cut into equal parts"
                hints.setdefault(fault, f"{extent} {can}; null leaves it whole")
                wrong.setdefault((glob or "", fault, "not-divisible"), []).append(name)
    for (glob, fault, code), tensors in wrong.items():
        faults.add(key_path_of(key, glob), f"{fault} ({names(tensors)})", code=code, hint=hints.get(fault, ""))
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
            sentence = f"{glob!r} {no_match(glob, layouts)}"
            faults.add(f"$.optimizer_parallel_except[{number}]", sentence, code="no-match")
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
    for glob, value in named_items(pipeline, "pipeline", faults):
        stages = [value] if type(value) is int else value
        if (
            not isinstance(stages, Sequence)
            or not stages
            or any(type(n) is not int or not 0 <= n < _MOST_STAGES for n in stages)
        ):
            expected = "a stage, counted from 0, or a list of stages"
            faults.unexpected(key_path_of("pipeline", glob), value, expected, code="bad-stage")
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
