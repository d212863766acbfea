"""Open a DeepSpeed checkpoint of ZeRO stage 0, 1, 2 or 3.

16-bit weights are not in a checkpoint of stage 3: they are the float32 masters, rounded to the dtype that the module
has. If weights are stored, samples of them are compared with the masters, which are located by sizes alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from reshard.errors import SourceError, StrategyError
from reshard.readers.deepspeed.buffers import RankBuffers
from reshard.readers.deepspeed.flat import FlatTensors
from reshard.readers.deepspeed.listing import checkpoint_files, read_files
from reshard.readers.deepspeed.model import ModelStates
from reshard.readers.deepspeed.part import PartTensors, add_expert, add_rounded, add_states, add_weights
from reshard.readers.deepspeed.tensor_parallel import JoinedTensors, TensorCuts, join
from reshard.readers.deepspeed.weights import with_computed, with_masters_compared
from reshard.readers.listed import nothing_readable
from reshard.readers.torch_save.saves import kind_of
from reshard.source.checkpoint import Checkpoint
from reshard.source.facts import Extras, Object, Opening
from reshard.source.probe import compare_contents

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard.readers.deepspeed.listing import PartFiles
    from reshard.readers.torch_save.file import TorchFile
    from reshard.storage.places import Place

DESCRIBED_BY = "DeepSpeed"


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
    files = checkpoint_files(directory, listing)
    ranked = sorted(
        (rank * len(files.parts) + number, name)  # tensor-parallel ranks are next to each other
        for number, of_part in enumerate(files.parts)
        for names_of_ranks in (of_part.model, of_part.optim)
        for rank, name in enumerate(names_of_ranks)
    )
    ranked += [(0, name) for name in files.experts]
    ranked.sort(key=lambda item: item[0])
    numbers = {name: number for number, (_, name) in enumerate(ranked)}
    read: dict[str, TorchFile] = {}
    parts = [_part(directory, of_part, files.experts, numbers, read, count=len(files.parts)) for of_part in files.parts]
    warnings = [] if files.parts[0].optim else [_WITHOUT_STATES.format(directory)]
    in_order = [(rank, read[name]) for rank, name in ranked]
    return checkpoint_of(directory, in_order, parts, warnings, contents=contents, rules=rules)


def _part(
    directory: Place,
    files: PartFiles,
    experts: Sequence[str],
    numbers: Mapping[str, int],
    read: dict[str, TorchFile],
    *,
    count: int,
) -> tuple[PartTensors, ModelStates]:
    """Read the files of a tensor-parallel part; return its tensors and its model states.

    Args:
        directory: the directory of the files.
        files: their names.
        experts: the names of the files of experts.
        numbers: the number of each file.
        read: gets the files.
        count: the number of parts.
    """
    first, *others = files.model
    model = ModelStates.of(read_files(directory, [first], lambda file: file)[first])
    model.check_parts(count)
    models = {first: model}
    if model.frozen:
        models |= read_files(directory, others, ModelStates.of)
    else:  # the same shapes again
        read |= read_files(directory, others, lambda file: file, with_value=False)
    ranks = read_files(directory, files.optim, lambda file: RankBuffers.of(file, numbers[file.path.rpartition("/")[2]]))
    part = PartTensors()
    add_weights(part, [(numbers[name], states) for name, states in models.items()])
    of_experts: list[str] = []
    for name, file in read_files(directory, experts, lambda file: file).items():
        of_experts += add_expert(part, numbers[name], file)
        read[name] = file._replace(value=None)
    if ranks:
        add_states(part, model, list(ranks.values()), of_experts)
    add_rounded(part, model)
    read |= {name: states.file for name, states in models.items()}
    read |= {name: buffers.file for name, buffers in ranks.items()}
    return part, model


_WITHOUT_STATES = (
    "{} has no files of optimizer states, so only weights are read (without ZeRO, the states are in the model states, "
    "by number and without names)"
)


def checkpoint_of(
    directory: Place,
    files: Sequence[tuple[int, TorchFile]],
    parts: Sequence[tuple[PartTensors, ModelStates]],
    warnings: Sequence[str] = (),
    *,
    contents: bool | Literal["blocks"],
    rules: Mapping[str, str] | None = None,
    whole: PartTensors | None = None,
) -> Checkpoint:
    """Return the checkpoint of files and their tensors.

    Args:
        directory: the directory of the files.
        files: the rank of each file and the file, in the order of their numbers.
        parts: the tensors and the model states of each tensor-parallel part. The model states of the first give the
            order of weights, and further values.
        warnings: warnings of the checkpoint.
        contents: compare samples of weights and masters.
        rules: the user's rules.
        whole: tensors that are whole, whatever the number of parts. Weights that are rounded masters are replaced by
            those of the parts, if they fit.

    Raises:
        SourceError: no tensor can be read, or it is not known how tensors are cut.
        StrategyError: a rule does not fit.
    """
    part, model = parts[0]
    if len(parts) > 1:
        weights = {*model.module, *model.frozen}
        cuts = TensorCuts(model, rules, len(parts), weights)
        joined = join([each for each, _ in parts], cuts, weights)
    elif rules:
        raise StrategyError(
            f"{directory} has no tensor-parallel parts", code="self-described", hint="leave the strategy and layout out"
        )
    else:
        builder = FlatTensors()
        joined = JoinedTensors({name: builder.tensor(name, place) for name, place in part.located.items()}, {}, {})
    unreadable = {name: reason for each, _ in reversed(parts) for name, reason in each.unreadable.items()}
    unreadable |= joined.unreadable
    if whole is not None:
        part = _merged(joined, whole)
        unreadable = {
            name: reason for name, reason in (unreadable | part.unreadable).items() if name not in part.rounded
        }
    tensors = {name: tensor for name, tensor in joined.tensors.items() if name not in unreadable}
    if not tensors:
        raise SourceError(f"{directory}: {nothing_readable(unreadable)}", code="no-tensors")
    every = [*(each for each, _ in parts), part]
    entries = {number: of_file for each in every for number, of_file in each.entries.items()}
    objects = {name: Object(problem=_problem(value)) for name, value in model.others.items() if value is not None}
    checkpoint = Checkpoint(
        str(directory), tensors,
        tuple(file.source_file(number, entries.get(number, {})) for number, (_, file) in enumerate(files)),
        tuple(rank for rank, _ in files), warnings=tuple(warnings), unreadable=unreadable,
        extras=Extras(DESCRIBED_BY, objects=objects), opening=Opening(rules=rules or {}),
    )  # fmt: skip
    checkpoint = compare_contents(checkpoint, joined.rules, contents=contents)
    if contents:
        checkpoint = with_masters_compared(checkpoint)
    checkpoint = with_computed(checkpoint, part.rounded, part.numbers)
    first = [name for name in model.module if name in checkpoint.tensors]
    return replace(checkpoint, tensors={name: checkpoint.tensors[name] for name in (*first, *checkpoint.tensors)})


def _merged(joined: JoinedTensors, whole: PartTensors) -> PartTensors:
    """Add whole tensors to joined ones; return them without the weights that are joined."""
    builder = FlatTensors()
    tensors = {name: builder.tensor(name, place) for name, place in whole.located.items()}
    for name, (master, _) in whole.rounded.items():
        if name in joined.tensors and joined.tensors[name].spec.shape != tensors[master].spec.shape:
            del joined.tensors[name]  # without the padding of a vocabulary
    rounded = {name: value for name, value in whole.rounded.items() if name not in joined.tensors}
    unreadable = {name: reason for name, reason in whole.unreadable.items() if name not in joined.tensors}
    joined.tensors.update(tensors)
    return replace(whole, rounded=rounded, unreadable=unreadable)


def _problem(value: object) -> str:
    """Return why a value of the model states is not read, with a short description."""
    if isinstance(value, bool | int | float | str):
        return f"is {value!r:.60}, which only a Universal Checkpoint keeps"
    return f"is a pickled {kind_of(value)}, which only a Universal Checkpoint keeps"
