"""The states of parameters in a Universal Checkpoint: a directory for each parameter, a file for each kind of state."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from reshard.errors import Option, Text, UsageError, names
from reshard.expressions.cast import Number
from reshard.expressions.computed import block_at
from reshard.formats.deepspeed.buffers import MASTERS
from reshard.strategy.names import optimizer_states

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from reshard.core.model.checkpoint import Checkpoint, Tensor
    from reshard.core.target import TargetTensor
    from reshard.errors import Faults

_LONGEST = 255  # bytes of the name of a directory


class ParameterState(NamedTuple):
    """A state of a parameter: the parameter's name in the target, and the kind of state."""

    parameter: str
    kind: str


def parameter_states(
    source: Checkpoint, items: Sequence[TargetTensor], weights: Collection[str], faults: Faults
) -> dict[str, ParameterState]:
    """Return the planned tensors that are states, by their names in the target.

    Args:
        source: the checkpoint.
        items: the planned tensors.
        weights: names that are of no state, even if they look like one.
        faults: collects parameters that lack a state, and names that are not of a directory.

    Raises:
        UsageError: there are none.
    """
    source_names = dict.fromkeys((*source.tensors, *source.unreadable, *source.left_out))
    states = optimizer_states(source_names, source.opening.states)
    known = {name: state for name, state in states.items() if name not in weights}
    new_names = {item.tensor.spec.name: item.name for item in items}
    expected: dict[str, dict[str, None]] = {}  # optimizers may have other states for other weights
    for each in known.values():
        expected.setdefault(each.weight, {MASTERS: None})[each.kind] = None
    kinds: dict[str, set[str]] = {name: set() for name in new_names if name in expected}
    result = {}
    for item in items:
        state = known.get(item.tensor.spec.name)
        if state is None:
            continue
        if state.weight not in kinds:
            faults.add(
                f"tensor {item.name!r}", f"is a state of {state.weight!r}, which is left out", code="no-weight",
                hint=Text("to leave it out, give ", Option("exclude", f"*.{state.weight}")),
            )  # fmt: skip
            continue
        kinds[state.weight].add(state.kind)
        result[item.name] = ParameterState(new_names[state.weight], state.kind)
    if not result:
        raise UsageError(
            f"{source.title} has no optimizer states", code="no-states",
            facts=["a Universal Checkpoint consists of them"], hint=Text("choose ", Option("to", "hf"), " for weights"),
        )  # fmt: skip
    for name, of_parameter in kinds.items():
        if missing := [kind for kind in expected[name] if kind not in of_parameter]:
            faults.add(
                f"tensor {name!r}", f"is trained, and lacks its {names(missing)}", code="missing-state",
                hint="leave a parameter out with all its states, or keep all",
            )  # fmt: skip
        if not _is_directory_name(new_names[name]):
            faults.add(
                f"tensor {new_names[name]!r:.300}", "has a name that no directory can have", code="bad-name",
                hint="give it another name",
            )  # fmt: skip
    return result


def number_of(source: Checkpoint, tensor: Tensor) -> float | None:
    """Return the value of a tensor that is a number in the files of the source, else None."""
    ((replica, *_), *_) = tensor.sharding.replicas
    runs = tensor.runs[replica.runs_index]
    block = block_at(source.coding, source.files[replica.file].path, runs[0][0]) if runs else None
    return block.expression.value if block and isinstance(block.expression, Number) else None


def _is_directory_name(name: str) -> bool:
    return (
        name.isprintable() and "/" not in name and "\\" not in name and name.strip(". ") != ""
        and len(name.encode()) <= _LONGEST and not name.endswith(".pt")
    )  # fmt: skip
