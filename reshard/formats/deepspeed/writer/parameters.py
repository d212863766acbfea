"""The parameters of a Universal Checkpoint: which tensors are their states, and what is written next to these.

A Universal Checkpoint has a directory for each parameter, with a file for each kind of state. Next to a state it says
how tensor parallelism cuts the parameter. DeepSpeed cuts along `cat_dim`; each half by itself if `param_n_sub_params`
is 2; and fills up the vocabulary with zeros if `vocab_tensor` is set. Here these follow from the patterns in the model
states, or from what the user says of the parts of the source. A training without tensor parallelism needs none of them.

Source: DeepSpeed 0.19.8 `checkpoint/universal_checkpoint.py` (`load_hp_checkpoint_state`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from reshard.errors import Option, SourceError, Text, UsageError, names
from reshard.expressions.cast import Number
from reshard.expressions.computed import block_at
from reshard.formats.deepspeed.model import MASTERS, optional_table
from reshard.formats.deepspeed.tensor_parallel import PATTERNS, NamePatterns, Recorded
from reshard.kits.parts.cuts import COLUMNS, COPY, GATE_AND_UP, ROWS, WHOLE
from reshard.strategy.names import matches

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from reshard.core.model.checkpoint import Checkpoint, Tensor
    from reshard.core.target import TargetTensor
    from reshard.errors import Faults
    from reshard.formats.deepspeed.model import ModelStates

_LONGEST = 255  # bytes of the name of a directory

Entries = tuple[tuple[str, int], ...]
"""Entries next to a tensor."""

_ENTRIES: Mapping[str, Entries] = {
    COLUMNS: (("cat_dim", 0),),
    WHOLE: (("cat_dim", 0),),
    COPY: (("cat_dim", 0),),
    ROWS: (("cat_dim", 1),),
    GATE_AND_UP: (("cat_dim", 0), ("param_n_sub_params", 2)),
}
_VOCABULARY = "vocabulary_parameter_patterns"


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
    kinds_of: dict[str, dict[str, None]] = {}  # optimizers may have other states for other weights
    known: dict[str, tuple[str, str]] = {}
    source_names = dict.fromkeys((*source.tensors, *source.unreadable, *source.left_out))
    for name in source_names:
        kind, _, weight = name.partition(".")
        if kind in source.opening.states and weight in source_names and name not in weights:
            known[name] = kind, weight
            kinds_of.setdefault(weight, {MASTERS: None})[kind] = None
    new_names = {item.tensor.spec.name: item.name for item in items}
    lacking = {name: dict(kinds) for name, kinds in kinds_of.items() if name in new_names}
    result = {}
    for item in items:
        kind, weight = known.get(item.tensor.spec.name, ("", ""))
        if weight in lacking:
            del lacking[weight][kind]
            result[item.name] = ParameterState(new_names[weight], kind)
        elif weight:
            faults.add(
                f"tensor {item.name!r}", f"is a state of {weight!r}, which is left out", code="no-weight",
                hint=Text("to leave it out, give ", Option("exclude", f"*.{weight}")),
            )  # fmt: skip
    if not result:
        raise UsageError(
            f"{source.title} has no optimizer states", code="no-states",
            facts=["a Universal Checkpoint consists of them"], hint=Text("choose ", Option("to", "hf"), " for weights"),
        )  # fmt: skip
    for name, missing in lacking.items():
        if missing:
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


def cutting(model: ModelStates, rules: Mapping[str, str], parameters: Iterable[str]) -> tuple[dict[str, Entries], bool]:
    """Return the entries next to the states of each parameter, and whether it is known how each is cut.

    Args:
        model: the model states of the source.
        rules: how the user says that its parts are cut, by name or glob; the last one that matches counts.
        parameters: the names of parameters in the source.
    """
    try:
        recorded, vocabulary = Recorded(model), NamePatterns(model.file.path)
        for pattern in optional_table(model.others, PATTERNS).get(_VOCABULARY) or ():
            vocabulary.add(pattern, value=True)
    except SourceError:  # of patterns that are not supported
        return dict.fromkeys(parameters, _ENTRIES[COLUMNS]), False
    result, is_known = {}, True
    for name in parameters:
        rule = next((rule for pattern, rule in reversed([*rules.items()]) if matches(name, (pattern,))), None)
        is_known = is_known and (rule in _ENTRIES if rule else not recorded.unsupported.get(name))
        entries = _ENTRIES.get(rule or recorded.rule(name) or COLUMNS, _ENTRIES[COLUMNS])
        result[name] = (*entries, ("vocab_tensor", True)) if vocabulary.get(name) else entries
    return result, is_known
