"""A Universal Checkpoint of DeepSpeed, which trainings load at any stage of ZeRO and on any number of devices.

`zero/NAME/` has the states of a parameter as whole tensors, each in a file of `torch.save` (`saved_tensors`), in a dict
with the axis of tensor parallelism (`cutting`). Weights are in the model states (`model_states`), of which there are
two files: one for ZeRO stages 1 and 2, and one for stage 3. Other values of the source are carried
(`saved_values`).

`zero/optimizer_state.pt` and `latest_universal` get their names last. The latter contains `.`: DeepSpeed loads the
directory as such, or as a tag in its parent.

Source: DeepSpeed 0.19.8 `checkpoint/ds_to_universal.py`, `runtime/engine.py` (`_load_checkpoint`),
`runtime/base_optimizer.py` and `runtime/zero/stage3.py` (`load_hp_checkpoint_state…`).
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from reshard.core.layout.block import Block
from reshard.core.model.entries import Content, FileLayout
from reshard.core.storage.cipher import store_of
from reshard.core.storage.places import as_place
from reshard.core.target import Target, TargetBlocks, TargetFile, literal
from reshard.errors import Option, Text, UsageError, names
from reshard.formats.deepspeed.model import ModelStates
from reshard.formats.deepspeed.names import MODEL_STATES, OPTIM_STATES
from reshard.formats.deepspeed.part import STEP
from reshard.formats.deepspeed.universal import DIRECTORY, OPTIMIZER
from reshard.formats.deepspeed.writer.cutting import Cutting
from reshard.formats.deepspeed.writer.model_states import CarriedModelStates
from reshard.formats.deepspeed.writer.optimizer import CarriedOptimizer, StepTensor
from reshard.formats.deepspeed.writer.saved_values import SavedValues, entries_of
from reshard.formats.deepspeed.writer.states import number_of, parameter_states
from reshard.formats.deepspeed.zero_checkpoint import DESCRIBED_BY
from reshard.kits.torch.objects import SavedObjects
from reshard.kits.torch.pickling import pickled
from reshard.kits.torch.saved_tensors import saved_object, saved_tensor, torch_dtype

if TYPE_CHECKING:
    import re
    from collections.abc import Collection, Iterator, Sequence

    from reshard.core.layout.block import Shape
    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.plan.budget import Share
    from reshard.core.plan.plan import Request
    from reshard.core.storage.places import Place
    from reshard.core.target import Assigned, TargetInputs, TargetTensor
    from reshard.kits.torch.saved_tensors import Saved

TRACKER = "latest_universal"
"""The file that names the directory of a Universal Checkpoint."""

_MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
_FILE_BYTES, _TENSOR_BYTES = 2500, 500  # resident memory of a file in a plan, and of a tensor in model states

_NEEDED = {"dp_world_size", "mp_world_size", "global_steps", "skipped_steps", "lr_scheduler"}
"""Values of the model states without which DeepSpeed does not load them."""


class UniversalTarget(Target):
    """The files of a Universal Checkpoint."""

    format = "deepspeed-universal"
    ranks: tuple[int, ...] = (0,)
    carries = True

    def __init__(self, inputs: TargetInputs) -> None:
        source, _, items, _, objects, faults = inputs
        self._source = source
        self._items = {item.name: item for item in items}
        for item in items:
            torch_dtype(item.name, item.dtype)
        opened = source.opened
        saved = SavedValues.read(_file_of_rank_0(opened, MODEL_STATES))
        model = ModelStates.of(saved.file)
        self._states = parameter_states(source, items, model.module, faults)
        self._numbers = {name: len(_MODEL_FILES) + number for number, name in enumerate(self._states)}
        steps = [name for name, state in self._states.items() if state.kind == STEP]
        numbers = {name: number_of(source, self._items[name].tensor) for name in steps}
        self._steps = {name: number for name, number in numbers.items() if number is not None}
        self._wanted: dict[tuple[Shape, tuple[int, ...]], TargetBlocks] = {}
        dropped = opened.extras.objects.keys() - objects.keys() - _NEEDED
        self._model = CarriedModelStates(saved, dropped)
        self._optimizer = _optimizer(opened, self._model)
        parameters = dict.fromkeys(self._old_name(state.parameter) for state in self._states.values())
        self._cutting = Cutting(model, opened.opening.rules, parameters)
        self._optimizer_file = self._optimizer.saved(self._step(steps[0]) if steps else None)
        self.carried = {*objects}
        self.memory: tuple[Share, ...] = (
            ("files of states", _FILE_BYTES * len(self._states)),
            ("model states", _TENSOR_BYTES * len(items) + self._model.nbytes + len(self._optimizer_file)),
        )

    @classmethod
    def settled(cls, request: Request, source: Checkpoint) -> Request:
        """Return the request.

        Raises:
            UsageError: it is not for whole tensors, or the source is not of DeepSpeed, or is computed.
        """
        if request.target or request.is_partial or request.remove_redundancy:
            raise UsageError(
                "a Universal Checkpoint of DeepSpeed holds whole tensors", code="needs-whole-tensors",
                hint="leave the target strategy, ranks and redundancy out",
            )  # fmt: skip
        opened = source.opened
        if opened.extras.described_by != DESCRIBED_BY:
            raise UsageError(
                f"{source.title} is not a checkpoint of DeepSpeed", code="wrong-source",
                facts=["a Universal Checkpoint continues a training of DeepSpeed, and needs its model states"],
                hint=Text("choose ", Option("to", "hf"), " for weights"),
            )  # fmt: skip
        if source.lora or opened.opening.computation:
            raise UsageError(
                f"{source.title} has computed weights, and the masters of DeepSpeed are others", code="wrong-source",
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
        shape = item.tensor.spec.shape
        if (shape, files) not in self._wanted:
            self._wanted[shape, files] = TargetBlocks((Block.whole(shape),), (files,))
        return self._wanted[shape, files]

    def files(self, assigned: Sequence[Assigned], texts: Sequence[TargetTensor]) -> tuple[TargetFile, ...]:  # noqa: ARG002 -- as in Target
        """Lay out every file."""
        weights = {name: item for name, item in self._items.items() if name not in self._states}
        shapes = {name: (item.dtype, item.tensor.spec.shape) for name, item in weights.items()}
        buffers = [name for name, item in weights.items() if item.tensor.spec.name in self._model.buffers]
        result = []
        for path, whole in zip(_MODEL_FILES, (None, buffers), strict=True):
            stored = weights if whole is None else whole
            layout = _layout(self._model.saved(shapes, whole), [weights[name] for name in stored])
            result.append(TargetFile(0, path, layout))
        for name, state in self._states.items():
            item = self._items[name]
            if name in self._steps:
                layout = literal(saved_object(self._steps[name]))
            else:
                entries = () if state.kind == STEP else self._cutting.entries(self._old_name(state.parameter))
                layout = _layout(saved_tensor(item.dtype, item.tensor.spec.shape, entries), [item])
            result.append(TargetFile(0, f"{DIRECTORY}/{state.parameter}/{state.kind}.pt", layout))
        return (
            *result,
            TargetFile(0, f"{DIRECTORY}/{OPTIMIZER}", literal(self._optimizer_file), last=True),
            TargetFile(0, TRACKER, literal(b"."), last=True),
        )

    def warnings(self) -> tuple[str, ...]:
        """Warn of missing hyper-parameters, of names that are carried as they were, and of what loading needs."""
        result = [f"{self._source.root}: {remark}" for remark in (*self._model.remarks, *self._cutting.remarks)]
        if not self._optimizer.has_groups:
            result.append(
                f"{self._source.root}: has no hyper-parameters; a training that loads the target keeps its own"
            )
        if renamed := [name for name in self._model.parameters if name not in self._items]:
            result.append(
                f"{names(renamed, most=3)}: not in the target; what is carried of the model states names them"
            )
        return tuple(result)

    def _old_name(self, parameter: str) -> str:
        """Return the name of a parameter in the source."""
        return self._items[parameter].tensor.spec.name

    def _step(self, name: str) -> float | StepTensor:
        """Return the number of steps of the optimizer."""
        if name in self._steps:
            return self._steps[name]
        tensor = self._items[name].tensor
        ((replica, *_), *_) = tensor.sharding.replicas
        ((offset, nbytes),) = tensor.runs[replica.runs_index]
        buffer = bytearray(nbytes)
        path = self._source.files[replica.file].path
        store_of(self._source.coding).read_into(path, offset, memoryview(buffer))
        return StepTensor(tensor.spec.dtype, tensor.spec.shape, bytes(buffer))


class ModelValues(SavedObjects):
    """Values of the model states, by their names in the file; they are compared by their pickles and storages."""

    def problems(self, names: Collection[str]) -> dict[str, str]:  # noqa: ARG002 -- they are in one pickle
        """See `Objects`."""
        return {}

    def compared(self, names: Collection[str]) -> Iterator[tuple[str, object]]:
        """See `Objects`."""
        yield from values_of(self.checkpoint.opened, names).items()


def values_of(checkpoint: Checkpoint, names: Collection[str]) -> dict[str, tuple[bytes, dict[str, bytes]]]:
    """Return the pickles and the storages of values of the model states, by name.

    Raises:
        SourceError: the file is not valid, or values are too large.
    """
    saved = SavedValues.read(_file_of_rank_0(checkpoint, MODEL_STATES))
    values = {name: value for name, value in entries_of(saved.root).items() if name in names}
    storages = {name: saved.storages({name: value}) for name, value in values.items()}
    return {name: (pickled(value), storages[name]) for name, value in values.items()}


def _optimizer(source: Checkpoint, model: CarriedModelStates) -> CarriedOptimizer:
    """Read what is carried of the optimizer."""
    file = _file_of_rank_0(source, OPTIM_STATES)
    return CarriedOptimizer(
        SavedValues.read(file), universal=file.name == OPTIMIZER, groups=max(model.groups, 1), version=model.version
    )


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
