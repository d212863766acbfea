"""Open a DeepSpeed checkpoint of ZeRO stage 0, 1, 2 or 3.

16-bit weights are not in a checkpoint of stage 3: they are the float32 masters, rounded to the dtype that the module
has. If weights are stored, samples of them are compared with the masters, which are located by sizes alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from reshard.core.model.checkpoint import Checkpoint, Shard, TensorSpec
from reshard.core.model.facts import Extras, Object, Opening
from reshard.core.model.reshape import Shared
from reshard.core.model.table import nothing_readable
from reshard.errors import SourceError, StrategyError
from reshard.formats.deepspeed.buffers import RankStates
from reshard.formats.deepspeed.files import checkpoint_files, read_files
from reshard.formats.deepspeed.masters import with_computed, with_masters_compared
from reshard.formats.deepspeed.model import ModelStates, whole_number
from reshard.formats.deepspeed.part import PartTensors, add_states, add_weights, weights_of_expert
from reshard.formats.deepspeed.tensor_parallel import TensorCuts
from reshard.formats.torch_save.saves import kind_of
from reshard.kits.parts.joining import JoinedParts, join, with_replicas_compared

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard.core.model.checkpoint import Tensor
    from reshard.core.storage.places import Place
    from reshard.formats.deepspeed.files import PartFiles

DESCRIBED_BY = "DeepSpeed"

_WITHOUT_STATES = (
    "{} has no files of optimizer states, so only weights are read (without ZeRO, the states are in the model states, "
    "by number and without names)"
)


def open_zero(
    directory: Place, listing: Sequence[str], *, contents: bool | Literal["blocks"] = True,
    rules: Mapping[str, str] | None = None,
) -> Checkpoint:  # fmt: skip
    """Open a checkpoint, reading the pickles of its files.

    Args:
        directory: the directory of its tag.
        listing: the names in it.
        contents: compare samples of weights and masters.
        rules: the user's rules for tensor-parallel parts, by name or glob.

    Raises:
        SourceError: a file is missing or not valid, or there are files of another checkpoint, or neither the files nor
            the user say how tensors are cut.
        StrategyError: a rule does not fit, or there is only one part.
    """
    of_parts = checkpoint_files(directory, listing)
    ranked = sorted(
        (rank * len(of_parts) + number, name)  # tensor-parallel ranks are next to each other
        for number, files in enumerate(of_parts)
        for rank, name in (*enumerate(files.model), *enumerate(files.optim), *((0, name) for name in files.experts))
    )
    numbers = {name: number for number, (_, name) in enumerate(ranked)}
    parts, models = read_parts(directory, of_parts, numbers)
    for model in models:
        expected = whole_number(model.others.get("mp_world_size"))
        if expected not in {None, len(parts)}:
            raise SourceError(
                f"{model.file.path} has mp_world_size {expected}, and there are files of {len(parts)} tensor-parallel "
                "parts",
                code="wrong-count",
            )
    return checkpoint_of(
        directory, [rank for rank, _ in ranked], parts, models, contents=contents, rules=rules,
        warnings=[] if of_parts[0].optim else [_WITHOUT_STATES.format(directory)],
    )  # fmt: skip


def read_parts(
    directory: Place, of_parts: Sequence[PartFiles], numbers: Mapping[str, int]
) -> tuple[list[PartTensors], list[ModelStates]]:
    """Read the files of tensor-parallel parts; return the tensors and the model states of each.

    Args:
        directory: the directory of the files.
        of_parts: their names.
        numbers: the number of each file.
    """
    read = [_part(directory, files, numbers) for files in of_parts]
    return [part for part, _ in read], [model for _, model in read]


def _part(directory: Place, files: PartFiles, numbers: Mapping[str, int]) -> tuple[PartTensors, ModelStates]:
    part = PartTensors()
    first, *others = files.model
    (model,) = read_files(directory, [first], numbers, ModelStates.of)
    models = [model]
    if model.frozen:
        models += read_files(directory, others, numbers, ModelStates.of)
    else:  # the same shapes again
        part.files.update(read_files(directory, others, numbers, lambda file, number: (number, file), with_value=False))
    add_weights(part, models)
    of_experts: list[str] = []
    for number, file, weights in read_files(directory, files.experts, numbers, weights_of_expert):
        part.files[number] = file
        part.add_stored(number, file, weights)
        of_experts += weights
    if ranks := read_files(directory, files.optim, numbers, RankStates.of):
        add_states(part, model, ranks, of_experts)
    return part, model


def checkpoint_of(
    directory: Place,
    ranks: Sequence[int],
    parts: Sequence[PartTensors],
    models: Sequence[ModelStates],
    *,
    contents: bool | Literal["blocks"],
    rules: Mapping[str, str] | None = None,
    states: PartTensors | None = None,
    warnings: Sequence[str] = (),
) -> Checkpoint:
    """Return the checkpoint of tensor-parallel parts.

    Args:
        directory: the directory of the files.
        ranks: the rank of each file, by its number.
        parts: the tensors of each part.
        models: the model states of each part. Those of the first give the order of weights, and further values.
        contents: compare samples of weights and masters.
        rules: the user's rules.
        states: states that are whole, not in parts.
        warnings: warnings of the checkpoint.

    Raises:
        SourceError: no tensor can be read, or it is not known how tensors are cut.
        StrategyError: a rule does not fit.
    """
    model, every = models[0], [*parts, *([] if states is None else [states])]
    joined = _joined(directory, parts, model, rules)
    unreadable = {name: reason for part in reversed(every) for name, reason in part.unreadable.items()}
    unreadable |= joined.unreadable
    tensors = joined.tensors | ({} if states is None else _whole(states))
    tensors = {name: tensor for name, tensor in tensors.items() if name not in unreadable}
    if not tensors:
        raise SourceError(f"{directory}: {nothing_readable(unreadable)}", code="no-tensors")
    files = {number: file for part in every for number, file in part.files.items()}
    entries = {number: of_file for part in every for number, of_file in part.entries.items()}
    objects = {name: Object(problem=_problem(value)) for name, value in model.others.items() if value is not None}
    checkpoint = Checkpoint(
        str(directory), tensors,
        tuple(files[number].source_file(number, entries.get(number, {})) for number in range(len(ranks))),
        tuple(ranks), warnings=tuple(warnings), unreadable=unreadable,
        extras=Extras(DESCRIBED_BY, objects=objects),
        opening=Opening(rules=rules or {}, states=_state_words(models, every)),
    )  # fmt: skip
    checkpoint = with_replicas_compared(checkpoint, joined, contents=contents)
    if contents:
        checkpoint = with_masters_compared(checkpoint)
    numbers = {name: number for part in reversed(every) for name, number in part.numbers.items()}
    checkpoint = with_computed(checkpoint, model, numbers)
    first = [name for name in model.module if name in checkpoint.tensors]
    return replace(checkpoint, tensors={name: checkpoint.tensors[name] for name in (*first, *checkpoint.tensors)})


def _joined(
    directory: Place, parts: Sequence[PartTensors], model: ModelStates, rules: Mapping[str, str] | None
) -> JoinedParts:
    """Return the whole tensors of parts."""
    if len(parts) == 1:
        if rules:
            raise StrategyError(
                f"{directory} has no tensor-parallel parts", code="self-described",
                hint="leave the strategy and layout out",
            )  # fmt: skip
        return JoinedParts(_whole(parts[0]), {}, {}, [])
    cuts = TensorCuts(model, rules, len(parts), {*model.module, *model.frozen})
    every_name = dict.fromkeys(name for part in parts for name in part.located)
    sets = {
        name: [{number: part.located[name] for number, part in enumerate(parts) if name in part.located}]
        for name in every_name
    }
    return join(sets, len(parts), cuts)


def _whole(part: PartTensors) -> dict[str, Tensor]:
    """Return tensors whose blocks are all in one part; equal cuts share their blocks."""
    shared = Shared()
    return {
        name: shared.tensor(
            TensorSpec(name, location.dtype, location.shape),
            [Shard(block, (extent,)) for block, extent in location.pieces()],
        )
        for name, location in part.located.items()
    }


def _state_words(models: Sequence[ModelStates], parts: Sequence[PartTensors]) -> frozenset[str]:
    """Return the kinds of state before the names of weights, whatever the optimizer calls them."""
    weights = {name for model in models for name in (*model.module, *model.frozen)}
    names = {name for part in parts for name in (*part.located, *part.numbers, *part.unreadable)} - weights
    return frozenset(kind for kind, _, weight in (name.partition(".") for name in names) if weight in weights)


def _problem(value: object) -> str:
    """Return why a value of the model states is not read, with a short description."""
    if isinstance(value, bool | int | float | str):
        return f"is {value!r:.60}, which only a Universal Checkpoint keeps"
    return f"is a pickled {kind_of(value)}, which only a Universal Checkpoint keeps"
