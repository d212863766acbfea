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
from reshard.formats.deepspeed.buffers import MASTERS
from reshard.formats.deepspeed.listing import checkpoint_files, read_files
from reshard.formats.deepspeed.model import ModelStates
from reshard.formats.deepspeed.part import STEP, PartTensors, add_rounded, add_weights, check_is_no_weight
from reshard.formats.deepspeed.pickled import flat, numbered, optional_table, scalar, table
from reshard.formats.deepspeed.tensor_parallel import Recorded
from reshard.formats.deepspeed.zero_checkpoint import checkpoint_of
from reshard.kits.torch.file import Storage
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

_PARAM = "param"


def open_universal(
    directory: Place, listing: Sequence[str], *, contents: bool | Literal["blocks"] = True
) -> Checkpoint:
    """Open a Universal Checkpoint, reading the pickles of its files.

    Args:
        directory: the directory.
        listing: the names in it.
        contents: compare samples of weights and masters.

    Raises:
        SourceError: a file is missing or not valid.
    """
    files = checkpoint_files(directory, listing, universal=True)
    kinds, has_optimizer = _state_files(directory / DIRECTORY)
    if not has_optimizer:
        raise SourceError(
            f"{directory / DIRECTORY} has no {OPTIMIZER}, which is written last; was converting it interrupted?",
            code="unfinished",
        )
    first = files[0].model[0]
    model = ModelStates.of(read_files(directory, [first], lambda file: file)[first])
    of_parts = [files[0].model if model.frozen else files[0].model[:1]]
    has_weights = len(files) == 1 or (not model.is_partitioned and Recorded(model).is_known)
    if has_weights:
        of_parts += [of_part.model[:1] for of_part in files[1:]]
    others = [name for names in of_parts for name in names if name != first]
    models = {first: model, **read_files(directory, others, ModelStates.of)}
    shapes = {name: shape for group in model.groups or () for name, shape in group.items()}
    states = {name: kinds[name] for name in kinds if kinds[name] != [MASTERS] or name in shapes}
    paths = {f"{DIRECTORY}/{name}/{kind}.pt": (name, kind) for name in states for kind in states[name]}
    optimizer_path = f"{DIRECTORY}/{OPTIMIZER}"
    optimizer = read_files(directory, [optimizer_path], _StateFile.of_optimizer)[optimizer_path]
    read_states = {**read_files(directory, paths, _StateFile.of), optimizer_path: optimizer}
    numbers = {name: number for number, name in enumerate((*models, *read_states))}
    parts = []
    for names in of_parts:
        part = PartTensors(files={numbers[name]: models[name].file for name in names})
        if has_weights:
            add_weights(part, [(numbers[name], models[name]) for name in names])
        parts.append((part, models[names[0]]))
    several = len(parts) > 1
    whole = PartTensors() if several else parts[0][0]
    whole.files.update((numbers[path], state.file) for path, state in read_states.items())
    for path, (name, kind) in paths.items():
        check_is_no_weight(f"{kind}.{name}", model)
        read_states[path].add(whole, numbers[path], f"{kind}.{name}", shapes.get(name))
    for name in states:
        if (step := f"{STEP}.{name}") not in whole.located and step not in whole.numbers:
            optimizer.add(whole, numbers[optimizer_path], step)
    add_rounded(whole, model)
    ranks = [0] * len(numbers)
    return checkpoint_of(directory, ranks, parts, contents=contents, whole=whole if several else None)


def _state_files(directory: Place) -> tuple[dict[str, list[str]], bool]:
    """Return the kinds of state in each directory, and whether the optimizer's file exists."""
    kinds: dict[str, list[str]] = {}
    has_optimizer = False
    for path in directory.files(depth=2):
        name, _, file = str(path).removeprefix(f"{directory}/").rpartition("/")
        has_optimizer = has_optimizer or (not name and file == OPTIMIZER)
        if name and file.endswith(".pt"):
            kinds.setdefault(name, []).append(file.removesuffix(".pt"))
    return {name: sorted(kinds[name]) for name in sorted(kinds)}, has_optimizer


class _StateFile(NamedTuple):
    """A state of a parameter, or the step of all.

    Attributes:
        file: the file, without its value.
        value: the tensor, or a number; None if the file has none.
        storage: the range of its storage in the file.
        is_flat: it is not in a dict, so that its shape is that of the parameter.
    """

    file: TorchFile
    value: Rebuilt | float | None
    storage: Storage
    is_flat: bool = False

    @classmethod
    def of(cls, file: TorchFile) -> _StateFile:
        """Interpret a file of a state; raise `SourceError` if it is not valid."""
        try:
            is_flat = not isinstance(file.value, Pairs)
            value = file.value if is_flat else table(file.value, "a state").get(_PARAM)
            number_or_tensor = scalar(value)
            if not isinstance(number_or_tensor, int | float):
                number_or_tensor = rebuilt(value)
                if is_flat and number_or_tensor.shape:
                    number_or_tensor = flat(value, "a state without a dict")
            return cls._of(file, number_or_tensor, is_flat=is_flat)
        except SourceError as error:
            raise error.about(file.path) from None

    @classmethod
    def of_optimizer(cls, file: TorchFile) -> _StateFile:
        """Return the step in the optimizer's file, which has it if it is of ZeRO stage 3."""
        try:
            inner = optional_table(table(file.value, "the optimizer"), "optimizer_state_dict")
            groups = numbered(inner.get("state", []), "states of groups")
            return cls._of(file, scalar(table(groups[0], "the states of group 0").get(STEP)) if groups else None)
        except SourceError as error:
            raise error.about(file.path) from None

    @classmethod
    def _of(cls, file: TorchFile, value: Rebuilt | float | None, *, is_flat: bool = False) -> _StateFile:
        storage = file.storages([value.record])[value.record] if isinstance(value, Rebuilt) else Storage(0, 0)
        return cls(file._replace(value=None), value, storage, is_flat)

    def add(self, part: PartTensors, number: int, name: str, shape: Shape | None = None) -> None:
        """Add the state to a part.

        Args:
            part: the part.
            number: the number of the file.
            name: the name of the state.
            shape: the shape of the parameter; None if the model states do not have it.

        Raises:
            SourceError: it is stored flat, and not of this shape.
        """
        if isinstance(self.value, Rebuilt):
            is_flat = self.is_flat and bool(self.value.shape)
            if is_flat and (shape is None or prod(shape) != self.value.shape[0]):
                raise SourceError(
                    f"{self.file.path} has {self.value.shape[0]:,} elements; the shape in the model states is "
                    f"{'not known' if shape is None else shape_text(shape)}",
                    code="wrong-shape",
                )
            part.add_stored(number, name, self.value, self.storage, shape if is_flat else None)
        elif self.value is not None:
            part.numbers[name] = self.value
