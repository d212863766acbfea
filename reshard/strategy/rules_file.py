"""Read rules files: YAML that describes how tensors are cut, for `reshard strategy make`.

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

from typing import TYPE_CHECKING, Any

from reshard.errors import Faults, LayoutError, UsageError, names
from reshard.storage.places import as_place
from reshard.storage.small import read_yaml
from reshard.strategy.operators import OPERATORS, OperatorStrategy
from reshard.strategy.rules import OPTIONS, from_operators, from_rules

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from reshard.dtypes import DType
    from reshard.layout.block import Shape
    from reshard.storage.places import AnyName
    from reshard.strategy.strategy import Strategy


def strategy_from_file(
    path: AnyName,
    shapes: Mapping[str, Shape],
    *,
    dtypes: Mapping[str, DType | str] | None = None,
    only_by_rule: Collection[str] = (),
    predict: bool = False,
) -> Strategy:
    """Build the strategy that a rules file describes.

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
        )
    for key in sorted(kind - top.keys()):
        faults.add(
            f"$.{key}",
            f"is missing; expected {names(sorted(kinds[0]))}, or {names(sorted(kinds[1]))}",
            code="missing-key",
            hint="`reshard help strategies` has examples",
        )
    operators = _operators(top.get("operators"), faults)
    faults.raise_if_any(UsageError)
    arguments: Any = {**options, "dtypes": dtypes or {}, "only_by_rule": only_by_rule, "predict": predict}
    if kind is kinds[0]:
        return from_rules(shapes, top["mesh"], top["rules"], arguments, faults)
    return from_operators(shapes, operators, top["devices"], arguments, faults)


def _operators(value: object, faults: Faults) -> dict[str, OperatorStrategy | None]:
    """Parse operators such as `{matmul: [[2, 1], [1, 2]], transpose_b: true}`."""
    if not isinstance(value, dict):
        if value is not None:
            faults.add("$.operators", f"is {value!r:.60}; expected a mapping", code="wrong-type")
        return {}
    operators: dict[str, OperatorStrategy | None] = {}
    for glob, item in value.items():
        key_path = f"$.operators[{glob!r}]"
        kinds = [key for key in item if key in OPERATORS] if isinstance(item, dict) else []
        if item is None:
            operators[glob] = None
        elif len(kinds) != 1:
            faults.add(
                key_path,
                f"is {item!r:.60}; expected one of {names(OPERATORS, most=9)} with its strategy",
                code="unknown-operator",
            )
        else:
            options = {key: option for key, option in item.items() if key != kinds[0]}
            try:
                operators[glob] = OPERATORS[kinds[0]](tuple(map(tuple, item[kinds[0]])), **options)
            except LayoutError as error:
                faults.add(key_path, error)
            except TypeError:
                faults.add(
                    key_path,
                    f"is {item!r:.60}; expected e.g. {{matmul: [[2, 1], [1, 2]], transpose_b: true}}",
                    code="wrong-type",
                )
    return operators
