"""A Universal Checkpoint of DeepSpeed, which trainings load at any stage of ZeRO and on any number of devices.

`zero/NAME/` has the states of a parameter as whole tensors, each in a file of `torch.save`. Next to a state it says how
tensor parallelism cuts the parameter. DeepSpeed cuts along `cat_dim`; each half by itself if `param_n_sub_params` is 2;
and fills up the vocabulary with zeros if `vocab_tensor` is set. Here these follow from the patterns in the model
states, or from what the user says of the parts of the source.

Weights are in the model states, of which there are two files: one for ZeRO stages 1 and 2, and one for stage 3.
`zero/optimizer_state.pt` and `latest_universal` get their names last. The latter contains `.`: DeepSpeed loads the
directory as such, or as a tag in its parent.

Source: DeepSpeed 0.19.8 `checkpoint/ds_to_universal.py`, `checkpoint/universal_checkpoint.py`, `runtime/engine.py`
(`_load_checkpoint`), `runtime/base_optimizer.py` and `runtime/zero/stage3.py` (`load_hp_checkpoint_state…`).
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from reshard.core.layout.block import Block
from reshard.core.model.entries import Content, FileLayout
from reshard.core.model.objects import Objects
from reshard.core.storage.cipher import store_of
from reshard.core.storage.places import as_place
from reshard.core.target import Target, TargetBlocks, TargetFile, literal
from reshard.errors import Option, SourceError, Text, UsageError, names
from reshard.expressions.cast import Number
from reshard.expressions.computed import block_at
from reshard.formats.deepspeed.carried import CarriedModelStates, CarriedOptimizer, SavedValues, written
from reshard.formats.deepspeed.checkpoint import DESCRIBED_BY
from reshard.formats.deepspeed.model import MASTERS, STEP, ModelStates, optional_table
from reshard.formats.deepspeed.names import MODEL_STATES, OPTIM_STATES
from reshard.formats.deepspeed.tensor_parallel import PATTERNS, NamePatterns, Recorded, patterns_of
from reshard.formats.deepspeed.universal import DIRECTORY, OPTIMIZER
from reshard.kits.parts.cuts import COLUMNS, COPY, GATE_AND_UP, ROWS, WHOLE
from reshard.kits.torch.saved_tensors import rebuilding, saved_object, saved_tensor, torch_dtype
from reshard.strategy.names import matches

if TYPE_CHECKING:
    import re
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.plan.budget import Share
    from reshard.core.plan.plan import Request
    from reshard.core.storage.places import Place
    from reshard.core.target import Assigned, TargetInputs, TargetTensor
    from reshard.errors import Faults
    from reshard.kits.torch.saved_tensors import Saved

TRACKER = "latest_universal"
"""The file that names the directory of a Universal Checkpoint."""

_MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
_FILE_BYTES, _TENSOR_BYTES = 2500, 500  # resident memory of a file in a plan, and of a tensor in model states
_LONGEST = 255  # bytes of the name of a directory

_NEEDED = {"dp_world_size", "mp_world_size", "global_steps", "skipped_steps", "lr_scheduler"}
"""Values of the model states without which DeepSpeed does not load them."""

_ROUND_ROBIN = (
    "the training has round_robin_gradients: load the target without it (DeepSpeed 0.19 puts states of parameters in "
    "wrong places with it, and says nothing)"
)
_UNKNOWN_CUT = (
    "how tensor parallelism cuts some parameters is not written: load the target without it, or with DeepSpeed's AutoTP"
)
_WITHOUT_GROUPS = "has no hyper-parameters; a training that loads the target keeps its own"

Entries = tuple[tuple[str, int], ...]
"""Entries next to a state."""

_ENTRIES: Mapping[str, Entries] = {
    COLUMNS: (("cat_dim", 0),),
    WHOLE: (("cat_dim", 0),),
    COPY: (("cat_dim", 0),),
    ROWS: (("cat_dim", 1),),
    GATE_AND_UP: (("cat_dim", 0), ("param_n_sub_params", 2)),
}


ParameterState = tuple[str, str]
"""A state of a parameter: the parameter's name in the target, and the kind of state."""


class UniversalTarget(Target):
    """The files of a Universal Checkpoint."""

    format = "deepspeed-universal"
    ranks: tuple[int, ...] = (0,)
    carries = True

    def __init__(self, inputs: TargetInputs) -> None:
        self._source, _, items, _, objects, faults = inputs
        self._items = {item.name: item for item in items}
        for item in items:
            torch_dtype(item.name, item.dtype)
        opened = self._source.opened
        saved = SavedValues.read(_file_of_rank_0(opened, MODEL_STATES))
        self._model = ModelStates.of(saved.file, 0)
        self._states = _parameter_states(self._source, items, self._model.module, faults)
        self._numbers = {name: len(_MODEL_FILES) + number for number, name in enumerate(self._states)}
        steps = [name for name, (_, kind) in self._states.items() if kind == STEP]
        numbers = {name: _number(self._source, self._items[name]) for name in steps}
        self._steps = {name: number for name, number in numbers.items() if number is not None}
        self._carried = CarriedModelStates(saved, opened.extras.objects.keys() - objects.keys() - _NEEDED)
        file = _file_of_rank_0(opened, OPTIM_STATES)
        optimizer = CarriedOptimizer(
            SavedValues.read(file), universal=file.name == OPTIMIZER, groups=len(self._model.groups or ()) or 1,
            version=self._carried.version,
        )  # fmt: skip
        self._optimizer_file = self._saved_optimizer(optimizer, steps[0] if steps else None)
        parameters = {self._items[parameter].tensor.spec.name for parameter, _ in self._states.values()}
        self._cut, is_cut_known = _cutting(self._model, opened.opening.rules, parameters)
        zero = optional_table(optional_table(self._model.others, "ds_config"), "zero_optimization")
        self._remarks = {
            _ROUND_ROBIN: zero.get("round_robin_gradients") is True,
            _UNKNOWN_CUT: not is_cut_known,
            _WITHOUT_GROUPS: not optimizer.has_groups,
        }
        self.carried = {*objects}
        self.memory: tuple[Share, ...] = (
            ("files of states", _FILE_BYTES * len(self._states)),
            ("model states", _TENSOR_BYTES * len(items) + self._carried.nbytes + len(self._optimizer_file)),
        )

    @classmethod
    def settled(cls, request: Request, source: Checkpoint) -> Request:
        """Return the request; raise `UsageError` if the source is not of DeepSpeed, or is computed."""
        opened = source.opened
        if opened.extras.described_by != DESCRIBED_BY or source.lora or opened.opening.computation:
            raise UsageError(
                f"{source.title} is not a checkpoint of DeepSpeed, or has computed weights", code="wrong-source",
                facts=["a Universal Checkpoint continues a training of DeepSpeed, and needs its model states"],
                hint=Text("choose ", Option("to", "hf"), " for weights"),
            )  # fmt: skip
        return request

    def blocks_of(self, item: TargetTensor) -> TargetBlocks:
        """Return the whole tensor, with its files; a step that is not a tensor is in no block."""
        if item.name in self._steps:
            return TargetBlocks((), ())
        if item.name in self._numbers:
            files: tuple[int, ...] = (self._numbers[item.name],)
        else:
            files = (0, 1) if item.tensor.spec.name in self._model.buffers else (0,)
        return TargetBlocks((Block.whole(item.tensor.spec.shape),), (files,))

    def files(self, assigned: Sequence[Assigned], texts: Sequence[TargetTensor]) -> tuple[TargetFile, ...]:  # noqa: ARG002 -- as in Target
        """Lay out every file."""
        weights = {name: item for name, item in self._items.items() if name not in self._states}
        shapes = {name: (item.dtype, item.tensor.spec.shape) for name, item in weights.items()}
        buffers = [name for name, item in weights.items() if item.tensor.spec.name in self._model.buffers]
        result = []
        for path, whole in zip(_MODEL_FILES, (None, buffers), strict=True):
            stored = weights if whole is None else whole
            layout = _layout(self._carried.saved(shapes, whole), [weights[name] for name in stored])
            result.append(TargetFile(0, path, layout))
        for name, (parameter, kind) in self._states.items():
            item = self._items[name]
            if name in self._steps:
                layout = literal(saved_object(self._steps[name]))
            else:
                beside = () if kind == STEP else self._cut[self._items[parameter].tensor.spec.name]
                layout = _layout(saved_tensor(item.dtype, item.tensor.spec.shape, beside), [item])
            result.append(TargetFile(0, f"{DIRECTORY}/{parameter}/{kind}.pt", layout))
        return (
            *result,
            TargetFile(0, f"{DIRECTORY}/{OPTIMIZER}", literal(self._optimizer_file), publish="index"),
            TargetFile(0, TRACKER, literal(b"."), publish="index"),
        )

    def warnings(self) -> tuple[str, ...]:
        """Warn of missing hyper-parameters, of names that are carried as they were, and of what loading needs."""
        result = [f"{self._source.root}: {remark}" for remark, is_true in self._remarks.items() if is_true]
        if renamed := [name for name in self._model.shapes if name not in self._items]:
            result.append(
                f"{names(renamed, most=3)}: not in the target; what is carried of the model states names them"
            )
        return tuple(result)

    def _saved_optimizer(self, optimizer: CarriedOptimizer, step: str | None) -> bytes:
        """Return the optimizer's file, given the name of a step."""
        if step is None or step in self._steps:
            return optimizer.saved(self._steps.get(step or ""))
        tensor = self._items[step].tensor
        ((replica, *_), *_) = tensor.sharding.replicas
        ((offset, nbytes),) = tensor.runs[replica.runs_index]
        content = bytearray(nbytes)
        path = self._source.files[replica.file].path
        store_of(self._source.coding).read_into(path, offset, memoryview(content))
        key = optimizer.free_key
        return optimizer.saved(rebuilding(tensor.spec.dtype, tensor.spec.shape, key), {key: bytes(content)})


class ModelValues(Objects):
    """Values of the model states, by their names in the file; they are compared by their pickles and storages."""

    def problems(self, names: Collection[str]) -> dict[str, str]:  # noqa: ARG002 -- they are in one pickle
        """See `Objects`."""
        return {}

    def compared(self, names: Collection[str]) -> Iterator[tuple[str, object]]:
        """See `Objects`."""
        saved = SavedValues.read(_file_of_rank_0(self.checkpoint.opened, MODEL_STATES))
        for name, value in saved.root.entries.items():
            if name in names:
                yield name, (written(value), saved.storages({name: value}))


def _file_of_rank_0(source: Checkpoint, pattern: re.Pattern[str]) -> Place:
    """Return the first file that matches a pattern, by part and rank; else the optimizer's file."""
    paths = {file.path.rpartition("/")[2]: file.path for file in source.files if file.inputs is None}
    matches = [match for match in map(pattern.fullmatch, paths) if match]
    first = min(matches, key=lambda match: (int(match["part"]), int(match["rank"] or -1)), default=None)
    return as_place(paths[OPTIMIZER if first is None else first[0]])


def _layout(saved: Saved, items: Sequence[TargetTensor]) -> FileLayout:
    """Return the layout of a file, given the tensors whose bytes it has, in their order."""
    runs = iter(saved.data)
    contents = [
        Content(item.name, item.dtype, shape := item.tensor.spec.shape, runs=(next(runs),) if prod(shape) else ())
        for item in items
    ]
    return FileLayout(saved.nbytes, saved.literals, tuple(contents), saved.crcs)


def _number(source: Checkpoint, item: TargetTensor) -> float | None:
    """Return the value of a tensor that is a number in the files of the source, else None."""
    ((replica, *_), *_) = item.tensor.sharding.replicas
    runs = item.tensor.runs[replica.runs_index]
    block = block_at(source.coding, source.files[replica.file].path, runs[0][0]) if runs else None
    return block.expression.value if block and isinstance(block.expression, Number) else None


def _parameter_states(
    source: Checkpoint, items: Sequence[TargetTensor], weights: Collection[str], faults: Faults
) -> dict[str, ParameterState]:
    """Return the planned tensors that are states, by their names in the target; `weights` are of no state.

    Faults are parameters that lack a state, and names that are not of a directory.

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
            result[item.name] = new_names[weight], kind
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


def _is_directory_name(name: str) -> bool:
    return (
        name.isprintable() and "/" not in name and "\\" not in name and name.strip(". ") != ""
        and len(name.encode()) <= _LONGEST and not name.endswith(".pt")
    )  # fmt: skip


def _cutting(
    model: ModelStates, rules: Mapping[str, str], parameters: Collection[str]
) -> tuple[dict[str, Entries], bool]:
    """Return the entries next to the states of each parameter of a source, and whether it is known how each is cut.

    Rules are the user's, by name or glob; the last one that matches counts.
    """
    try:
        recorded, vocabulary = Recorded(model), NamePatterns(model.file.path)
        for pattern in patterns_of(optional_table(model.others, PATTERNS).get("vocabulary_parameter_patterns")):
            vocabulary.add(pattern, value=True)
    except SourceError:  # of patterns that are not supported
        return dict.fromkeys(parameters, _ENTRIES[COLUMNS]), False
    result, is_known = {}, True
    for name in parameters:
        rule = next((rule for pattern, rule in reversed([*rules.items()]) if matches(name, (pattern,))), None)
        is_known = is_known and (rule in _ENTRIES if rule else not recorded.unsupported.get(name))
        of_name = _ENTRIES.get(rule or recorded.rule(name) or COLUMNS, _ENTRIES[COLUMNS])
        result[name] = (*of_name, ("vocab_tensor", True)) if vocabulary.get(name) else of_name
    return result, is_known
