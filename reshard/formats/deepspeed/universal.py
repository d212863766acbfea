"""Open a Universal Checkpoint of DeepSpeed: a directory of files for each parameter.

`zero/NAME/` has `fp32.pt`, `exp_avg.pt` and `exp_avg_sq.pt`, each a whole tensor in a dict, `param`; of ZeRO stage 3 a
flat tensor, whose shape is in the model states only. `step.pt` is a number; with stage 3 it is missing, and the step is
in `zero/optimizer_state.pt`. Since 0.19 there is a `fp32.pt` alone for each name of the module that is not trained: a
copy, which is not a master, and not read. Weights are in the model states; of stage 3, or if it is not known how
tensor-parallel parts of the model states are cut, they are the rounded masters.

Source: DeepSpeed 0.19.8 `checkpoint/ds_to_universal.py`, and directories that 0.16.9 and 0.19.8 wrote
(`tests/data/deepspeed`).
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Literal, NamedTuple

from reshard.core.layout.block import shape_text
from reshard.errors import SourceError
from reshard.formats.deepspeed.buffers import numbered, single
from reshard.formats.deepspeed.checkpoint import PartTensors, checkpoint_of
from reshard.formats.deepspeed.files import checkpoint_files, read_files
from reshard.formats.deepspeed.model import MASTERS, STEP, ModelStates, flat, optional_table, table
from reshard.formats.deepspeed.tensor_parallel import Recorded
from reshard.kits.torch.file import FileTensor
from reshard.kits.torch.pickles import Pairs
from reshard.kits.torch.tensors import Rebuilt, rebuilt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.core.layout.block import Shape
    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.storage.places import Place
    from reshard.kits.torch.file import TorchFile

DIRECTORY = "zero"
"""The directory of parameters."""

OPTIMIZER = "optimizer_state.pt"
"""The file of the other values of the optimizer, in that directory."""


def open_universal(
    directory: Place, listing: Sequence[str], *, contents: bool | Literal["blocks"] = True
) -> Checkpoint:
    """Open a Universal Checkpoint, given the names in its directory.

    Raises:
        SourceError: a file is missing or not valid.
    """
    of_parts = checkpoint_files(directory, listing, universal=True)
    kinds = _kinds_of_states(directory / DIRECTORY)
    numbers = {name: number for number, name in enumerate(name for files in of_parts for name in files.model)}
    parts = [PartTensors.read(directory, files, numbers) for files in of_parts]
    model = parts[0].model
    if len(parts) > 1 and (model.is_partitioned or not Recorded(model).is_known):  # all weights are rounded
        parts = [PartTensors(model, files={number: file for part in parts for number, file in part.files.items()})]
    states = _states(directory, kinds, model, len(numbers))
    ranks = [0] * (len(numbers) + len(states.files))
    return checkpoint_of(directory, ranks, parts, contents=contents, states=states)


def _kinds_of_states(directory: Place) -> dict[str, list[str]]:
    """Return the kinds of state of each parameter; raise `SourceError` if the optimizer's file is missing."""
    kinds: dict[str, list[str]] = {}
    has_optimizer = False
    for path in directory.files(depth=2):
        name, _, file = str(path).removeprefix(f"{directory}/").rpartition("/")
        has_optimizer = has_optimizer or (not name and file == OPTIMIZER)
        if name and file.endswith(".pt"):
            kinds.setdefault(name, []).append(file.removesuffix(".pt"))
    if not has_optimizer:
        raise SourceError(
            f"{directory} has no {OPTIMIZER}, which is written last; was converting it interrupted?", code="unfinished"
        )
    return {name: sorted(kinds[name]) for name in sorted(kinds)}


def _states(directory: Place, kinds: dict[str, list[str]], model: ModelStates, begin: int) -> PartTensors:
    """Read the states of all parameters; the number of their first file is `begin`."""
    shapes = model.shapes
    trained = {name: of_name for name, of_name in kinds.items() if of_name != [MASTERS] or name in shapes}
    paths = {f"{DIRECTORY}/{name}/{kind}.pt": (name, kind) for name in trained for kind in trained[name]}
    last = f"{DIRECTORY}/{OPTIMIZER}"
    numbers = {path: begin + number for number, path in enumerate((*paths, last))}
    (optimizer,) = read_files(directory, [last], numbers, _StateFile.of_optimizer)
    part = PartTensors(model)
    for (name, kind), file in zip(paths.values(), read_files(directory, paths, numbers, _StateFile.of), strict=True):
        file.add(part, f"{kind}.{name}", shapes.get(name))
    for name, of_name in trained.items():
        if STEP not in of_name:
            optimizer.add(part, f"{STEP}.{name}", None)
    part.files[optimizer.number] = optimizer.file
    return part


class _StateFile(NamedTuple):
    """A file of a state of a parameter, or of the step of all.

    Attributes:
        number: its number in the checkpoint.
        file: the file, without its value.
        value: the state; None if the file has none.
        is_flat: it is not in a dict, so that its shape is that of the parameter.
    """

    number: int
    file: TorchFile
    value: FileTensor | float | None
    is_flat: bool = False

    @classmethod
    def of(cls, file: TorchFile, number: int) -> _StateFile:
        """Interpret a file of a state; raise `SourceError` if it is not valid."""
        is_flat = not isinstance(file.value, Pairs)
        value = file.value if is_flat else table(file.value, "a state").get("param")
        state = single(value)
        if state is None:
            state = flat(value, "a state without a dict") if is_flat else rebuilt(value)
        return cls._of(file, number, state, is_flat=is_flat)

    @classmethod
    def of_optimizer(cls, file: TorchFile, number: int) -> _StateFile:
        """Return the step in the optimizer's file, which has it if it is of ZeRO stage 3."""
        inner = optional_table(table(file.value, "the optimizer"), "optimizer_state_dict")
        groups = numbered(inner.get("state", []), "states of groups")
        step = table(groups[0], "the states of group 0").get(STEP) if groups else None
        return cls._of(file, number, single(step))

    @classmethod
    def _of(cls, file: TorchFile, number: int, value: Rebuilt | float | None, *, is_flat: bool = False) -> _StateFile:
        if isinstance(value, Rebuilt):
            stored = FileTensor.of(value, number, file.storages([value.record])[value.record])
            return cls(number, file._replace(value=None), stored, is_flat and bool(value.shape))
        return cls(number, file._replace(value=None), value)

    def add(self, part: PartTensors, name: str, shape: Shape | None) -> None:
        """Add the state to a part, given the shape of the parameter if the model states have it."""
        part.files[self.number] = self.file
        state = self.value
        if isinstance(state, FileTensor):
            part.entries.setdefault(self.number, {})[name] = state.entry
            if self.is_flat:
                if shape is None or prod(shape) != state.shape[0]:
                    raise SourceError(
                        f"{self.file.path} has {state.shape[0]:,} elements; the shape in the model states is "
                        f"{'not known' if shape is None else shape_text(shape)}",
                        code="wrong-shape",
                    )
                state = state._replace(shape=shape)
        if state is not None:
            part.add_state(name, state)
