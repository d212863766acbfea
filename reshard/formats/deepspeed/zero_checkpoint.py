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
from reshard.formats.deepspeed.buffers import RankBuffers
from reshard.formats.deepspeed.listing import checkpoint_files, read_files
from reshard.formats.deepspeed.model import ModelStates
from reshard.formats.deepspeed.part import PartTensors, add_expert, add_rounded, add_states, add_weights
from reshard.formats.deepspeed.tensor_parallel import TensorCuts
from reshard.formats.deepspeed.weights import with_computed, with_masters_compared
from reshard.formats.torch_save.saves import kind_of
from reshard.kits.parts.joining import JoinedParts, join, with_replicas_compared

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard.core.model.checkpoint import Tensor
    from reshard.core.storage.places import Place
    from reshard.formats.deepspeed.buffers import Flat
    from reshard.formats.deepspeed.listing import PartFiles
    from reshard.kits.torch.file import FileTensor, TorchFile

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
    parts = checkpoint_files(directory, listing)
    ranked = sorted(
        (rank * len(parts) + number, name)  # tensor-parallel ranks are next to each other
        for number, files in enumerate(parts)
        for rank, name in (*enumerate(files.model), *enumerate(files.optim), *((0, name) for name in files.experts))
    )
    numbers = {name: number for number, (_, name) in enumerate(ranked)}
    read = [_part(directory, files, numbers, len(parts)) for files in parts]
    warnings = [] if parts[0].optim else [_WITHOUT_STATES.format(directory)]
    return checkpoint_of(directory, [rank for rank, _ in ranked], read, warnings, contents=contents, rules=rules)


def _part(
    directory: Place, files: PartFiles, numbers: Mapping[str, int], count: int
) -> tuple[PartTensors, ModelStates]:
    """Read the files of a tensor-parallel part; return its tensors and its model states.

    Args:
        directory: the directory of the files.
        files: their names.
        numbers: the number of each file.
        count: the number of parts.
    """
    part = PartTensors()
    first, *others = files.model
    model = ModelStates.of(read_files(directory, [first], _unchanged)[first])
    model.check_parts(count)
    models = {first: model}
    if model.frozen:
        models |= read_files(directory, others, ModelStates.of)
    else:  # the same shapes again
        for name, file in read_files(directory, others, _unchanged, with_value=False).items():
            part.files[numbers[name]] = file
    ranks = read_files(directory, files.optim, lambda file: RankBuffers.of(file, numbers[file.path.rpartition("/")[2]]))
    part.files.update((numbers[name], states.file) for name, states in models.items())
    part.files.update((buffers.number, buffers.file) for buffers in ranks.values())
    add_weights(part, [(numbers[name], states) for name, states in models.items()])
    of_experts: list[str] = []
    for name, file in read_files(directory, files.experts, _unchanged).items():
        of_experts += add_expert(part, numbers[name], file)
        part.files[numbers[name]] = file._replace(value=None)
    if ranks:
        add_states(part, model, list(ranks.values()), of_experts)
    add_rounded(part, model)
    return part, model


def _unchanged(file: TorchFile) -> TorchFile:
    return file


_WITHOUT_STATES = (
    "{} has no files of optimizer states, so only weights are read (without ZeRO, the states are in the model states, "
    "by number and without names)"
)


def checkpoint_of(
    directory: Place,
    ranks: Sequence[int],
    parts: Sequence[tuple[PartTensors, ModelStates]],
    warnings: Sequence[str] = (),
    *,
    contents: bool | Literal["blocks"],
    rules: Mapping[str, str] | None = None,
    whole: PartTensors | None = None,
) -> Checkpoint:
    """Return the checkpoint of parts.

    Args:
        directory: the directory of the files.
        ranks: the rank of each file, by its number.
        parts: the tensors and the model states of each tensor-parallel part. The model states of the first give the
            order of weights, and further values.
        warnings: warnings of the checkpoint.
        contents: compare samples of weights and masters.
        rules: the user's rules.
        whole: tensors that are whole in all parts. Its weights replace weights of the parts that are absent or of
            another shape.

    Raises:
        SourceError: no tensor can be read, or it is not known how tensors are cut.
        StrategyError: a rule does not fit.
    """
    part, model = parts[0]
    if len(parts) > 1:
        weights = {*model.module, *model.frozen}
        cuts = TensorCuts(model, rules, len(parts), weights)
        located = [each.located for each, _ in parts]
        every_name = dict.fromkeys(name for of_part in located for name in of_part)
        sets = {name: [{n: each[name] for n, each in enumerate(located) if name in each}] for name in every_name}
        joined = join(sets, len(parts), cuts.of)
    elif rules:
        raise StrategyError(
            f"{directory} has no tensor-parallel parts", code="self-described", hint="leave the strategy and layout out"
        )
    else:
        joined = JoinedParts(whole_tensors(part.located), {}, {})
    unreadable = {name: reason for each, _ in reversed(parts) for name, reason in each.unreadable.items()}
    unreadable |= joined.unreadable
    every = [each for each, _ in parts]
    if whole is not None:
        every.append(whole)
        part = _merged(joined, whole)
        readable = joined.tensors.keys() | part.rounded.keys()
        unreadable = {name: reason for name, reason in (unreadable | whole.unreadable).items() if name not in readable}
    tensors = {name: tensor for name, tensor in joined.tensors.items() if name not in unreadable}
    if not tensors:
        raise SourceError(f"{directory}: {nothing_readable(unreadable)}", code="no-tensors")
    files = {number: file for each in every for number, file in each.files.items()}
    entries = {number: of_file for each in every for number, of_file in each.entries.items()}
    objects = {name: Object(problem=_problem(value)) for name, value in model.others.items() if value is not None}
    checkpoint = Checkpoint(
        str(directory), tensors,
        tuple(files[number].source_file(number, entries.get(number, {})) for number in range(len(ranks))),
        tuple(ranks), warnings=tuple(warnings), unreadable=unreadable,
        extras=Extras(DESCRIBED_BY, objects=objects),
        opening=Opening(rules=rules or {}, states=_state_words([model for _, model in parts], every)),
    )  # fmt: skip
    checkpoint = with_replicas_compared(checkpoint, joined, contents=contents)
    if contents:
        checkpoint = with_masters_compared(checkpoint)
    checkpoint = with_computed(checkpoint, part.rounded, part.numbers)
    first = [name for name in model.module if name in checkpoint.tensors]
    return replace(checkpoint, tensors={name: checkpoint.tensors[name] for name in (*first, *checkpoint.tensors)})


def _state_words(models: Sequence[ModelStates], parts: Sequence[PartTensors]) -> frozenset[str]:
    """Return the kinds of state before the names of weights, whatever the optimizer calls them."""
    weights = {name for model in models for name in (*model.module, *model.frozen)}
    names = {name for part in parts for name in (*part.located, *part.numbers, *part.unreadable)} - weights
    return frozenset(kind for kind, _, weight in (name.partition(".") for name in names) if weight in weights)


def whole_tensors(located: Mapping[str, Flat | FileTensor]) -> dict[str, Tensor]:
    """Return tensors whose blocks are all in one tensor-parallel part; equal cuts share their blocks."""
    shared = Shared()
    return {
        name: shared.tensor(
            TensorSpec(name, location.dtype, location.shape),
            [Shard(block, (extent,)) for block, extent in location.pieces()],
        )
        for name, location in located.items()
    }


def _merged(joined: JoinedParts, whole: PartTensors) -> PartTensors:
    """Add whole tensors to joined ones; return them without the weights that are joined."""
    located = {name: whole.located.get(master) for name, (master, _) in whole.rounded.items()} | whole.located
    kept = {
        name for name, location in located.items()
        if location and name in joined.tensors and joined.tensors[name].spec.shape == location.shape
    }  # fmt: skip
    for name in located.keys() - kept:  # a joined vocabulary is padded
        joined.tensors.pop(name, None)
    joined.tensors.update(whole_tensors({name: at for name, at in whole.located.items() if name not in kept}))
    return replace(whole, rounded={name: value for name, value in whole.rounded.items() if name not in kept})


def _problem(value: object) -> str:
    """Return why a value of the model states is not read, with a short description."""
    if isinstance(value, bool | int | float | str):
        return f"is {value!r:.60}, which only a Universal Checkpoint keeps"
    return f"is a pickled {kind_of(value)}, which only a Universal Checkpoint keeps"
