"""Open a Universal Checkpoint of DeepSpeed: a directory of files for each parameter.

`zero/NAME/` has `fp32.pt`, `exp_avg.pt` and `exp_avg_sq.pt`, each a whole tensor in a dict, `param`; of ZeRO stage 3 a
flat tensor, whose shape is in the model states only. `step.pt` is a number; with stage 3 there is none, and the step is
in `zero/optimizer_state.pt`. Since 0.19 there is a `fp32.pt` alone for each name of the module that is not trained: a
copy, which is not a master, and not read. Weights are in the model states; of stage 3, or if it is not known how
tensor-parallel parts of the model states are cut, they are the rounded masters.

Source: DeepSpeed 0.19.8 `checkpoint/ds_to_universal.py`, and directories that 0.16.9 and 0.19.8 wrote
(`tests/data/deepspeed`).
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Literal

from reshard.errors import SourceError
from reshard.layout.block import shape_text
from reshard.readers.deepspeed.buffers import MASTERS
from reshard.readers.deepspeed.listing import checkpoint_files, read_files
from reshard.readers.deepspeed.model import ModelStates
from reshard.readers.deepspeed.part import PartTensors, add_rounded, add_weights, check_is_no_weight
from reshard.readers.deepspeed.pickled import flat, numbered, scalar, table
from reshard.readers.deepspeed.tensor_parallel import Recorded
from reshard.readers.deepspeed.zero_checkpoint import checkpoint_of
from reshard.readers.pickles import Pairs
from reshard.readers.torch_save.tensors import Rebuilt, rebuilt

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reshard.layout.block import Shape
    from reshard.readers.torch_save.file import TorchFile
    from reshard.source.checkpoint import Checkpoint
    from reshard.storage.places import Place

DIRECTORY = "zero"
"""The directory of parameters."""

OPTIMIZER = "optimizer_state.pt"
"""The file of what the optimizer has beside tensors, in that directory."""

STEP = "step"
"""The number of steps of the optimizer, as a kind of state."""

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
    first, *others = files.parts[0].model
    model = ModelStates.of(read_files(directory, [first], lambda file: file)[first])
    read = {first: model.file}
    models = {first: model}
    if model.frozen:
        models |= read_files(directory, others, ModelStates.of)
        read |= {name: states.file for name, states in models.items()}
    shapes = {name: shape for group in model.groups or () for name, shape in group.items()}
    states = {name: kinds[name] for name in kinds if kinds[name] != [MASTERS] or name in shapes}
    optimizer = f"{DIRECTORY}/{OPTIMIZER}"
    paths = {f"{DIRECTORY}/{name}/{kind}.pt": (name, kind) for name in states for kind in states[name]}
    models_of_parts = [model]
    if not files.parts[0].partitioned and (len(files.parts) == 1 or Recorded(model).is_known):
        of_parts = read_files(directory, [of_part.model[0] for of_part in files.parts[1:]], ModelStates.of)
        models_of_parts += of_parts.values()
        read |= {name: states_of_part.file for name, states_of_part in of_parts.items()}
    read |= read_files(directory, [optimizer, *paths], lambda file: file)
    numbers = {name: number for number, name in enumerate(read)}
    part = PartTensors()
    if len(files.parts) == 1:
        add_weights(part, [(numbers[name], states_of_rank) for name, states_of_rank in models.items()])
    for path, (name, kind) in paths.items():
        check_is_no_weight(f"{kind}.{name}", model)
        _add_state(part, numbers[path], read[path], f"{kind}.{name}", shapes.get(name))
    _add_step(part, numbers[optimizer], read[optimizer], states)
    add_rounded(part, model)
    in_order = [(0, file._replace(value=None)) for file in read.values()]
    if len(models_of_parts) == 1:
        return checkpoint_of(directory, in_order, [(part, model)], contents=contents)
    parts = [(PartTensors(), states_of_part) for states_of_part in models_of_parts]
    for weights, states_of_part in parts:
        add_weights(weights, [(numbers[states_of_part.file.path.rpartition("/")[2]], states_of_part)])
    return checkpoint_of(directory, in_order, parts, contents=contents, whole=part)


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


def _add_state(part: PartTensors, number: int, file: TorchFile, state: str, shape: Shape | None) -> None:
    """Add a state of a parameter.

    Args:
        part: the part.
        number: the number of the file.
        file: the file of the state.
        state: its name.
        shape: the shape of the parameter, for a state that is stored flat; None if the model states do not have it.
    """
    value = file.value
    try:
        is_flat = not isinstance(value, Pairs)
        value = value if is_flat else table(value, "a state").get(_PARAM)
        if isinstance(single := scalar(value), int | float):
            part.numbers[state] = single
            return
        tensor = rebuilt(value)
        if is_flat and single is None:
            tensor = flat(value, "a state without a dict")
            if shape is None or prod(shape) != tensor.shape[0]:
                raise SourceError(  # noqa: TRY301 -- with the file
                    f"has {tensor.shape[0]:,} elements; the shape in the model states is "
                    f"{'not known' if shape is None else shape_text(shape)}",
                    code="wrong-shape",
                )
        kept = shape if is_flat and tensor.shape else None
        part.add_stored(number, state, tensor, file.storages([tensor.record])[tensor.record], kept)
    except SourceError as error:
        raise error.about(file.path) from None


def _add_step(part: PartTensors, number: int, file: TorchFile, names: Iterable[str]) -> None:
    """Add the step of all parameters, which the optimizer's file has if it is of ZeRO stage 3."""
    inner = table(file.value, "the optimizer").get("optimizer_state_dict")
    if inner is None:
        return
    groups = numbered(table(inner, "optimizer_state_dict").get("state"), "states of groups")
    single = scalar(table(groups[0], "the states of group 0").get(STEP)) if groups and groups[0] is not None else None
    for name in names:
        state = f"{STEP}.{name}"
        if single is None or state in part.located or state in part.numbers:
            continue
        if isinstance(single, Rebuilt):
            part.add_stored(number, state, single, file.storages([single.record])[single.record])
        else:
            part.numbers[state] = single
