"""Open a DeepSpeed checkpoint of ZeRO stage 0, 1, 2 or 3.

Each tensor-parallel part has its own files. Its tensors are found first, then the parts are joined.

16-bit weights are not in a checkpoint of stage 3: they are the float32 masters, rounded to the dtype that the module
has. If weights are stored, samples of them are compared with the masters, which are located by sizes alone.
"""

from __future__ import annotations

from collections import ChainMap, deque
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Literal

from reshard.core.model.checkpoint import Checkpoint, Shard, TensorSpec
from reshard.core.model.facts import Extras, Object, Opening
from reshard.core.model.reshape import Shared
from reshard.core.model.table import nothing_readable
from reshard.core.storage.places import any_store, in_batches
from reshard.errors import SourceError, StrategyError
from reshard.formats.deepspeed.buffers import Flat, RankStates, states_by_name
from reshard.formats.deepspeed.files import checkpoint_files, read_files
from reshard.formats.deepspeed.masters import with_computed, with_masters_compared
from reshard.formats.deepspeed.model import MASTERS, STEP, ModelStates, table, whole_number
from reshard.formats.deepspeed.tensor_parallel import TensorCuts
from reshard.formats.torch_save.saves import kind_of
from reshard.kits.parts.joining import JoinedParts, join, with_replicas_compared
from reshard.kits.torch.file import FileTensor
from reshard.kits.torch.tensors import rebuilt

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard.core.model.checkpoint import Tensor
    from reshard.core.model.entries import Entry
    from reshard.core.storage.places import Place
    from reshard.formats.deepspeed.files import PartFiles
    from reshard.kits.torch.file import TorchFile
    from reshard.kits.torch.tensors import Rebuilt

DESCRIBED_BY = "DeepSpeed"

_WITHOUT_STATES = (
    "{} has no files of optimizer states, so only weights are read (without ZeRO, the states are in the model states, "
    "by number and without names)"
)
_COUNTS = (
    "files of an earlier run with more ranks stay in the directory; checkpoints that are cut within groups of ranks "
    "(MiCS) are not supported"
)
_OF_EXPERTS = (
    "is the state of an expert: the files do not say which ranks have which expert's states, so only weights are read"
)
_OF_ADAM = (MASTERS, "exp_avg", "exp_avg_sq", STEP)


def open_zero(
    directory: Place, listing: Sequence[str], *, contents: bool | Literal["blocks"] = True,
    rules: Mapping[str, str] | None = None,
) -> Checkpoint:  # fmt: skip
    """Open a checkpoint in the directory of its tag, given the names in it and the user's rules for parts.

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
    parts = [PartTensors.read(directory, files, numbers) for files in of_parts]
    for part in parts:
        expected = whole_number(part.model.others.get("mp_world_size"))
        if expected not in {None, len(parts)}:
            raise SourceError(
                f"{part.model.file.path} has mp_world_size {expected}, and there are files of {len(parts)} "
                "tensor-parallel parts",
                code="wrong-count",
            )
    return checkpoint_of(
        directory, [rank for rank, _ in ranked], parts, contents=contents, rules=rules,
        warnings=[] if of_parts[0].optim else [_WITHOUT_STATES.format(directory)],
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PartTensors:
    """The tensors of one part.

    Attributes:
        model: the model states.
        located: tensors and single numbers in files, by name.
        numbers: states that are numbers in a pickle, by name.
        unreadable: names that cannot be read, with the reason.
        files: the files, by number.
        entries: the entries of the tensors of each file, by the number of the file.
    """

    model: ModelStates
    located: dict[str, Flat | FileTensor] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    files: dict[int, TorchFile] = field(default_factory=dict)
    entries: dict[int, dict[str, Entry]] = field(default_factory=dict)

    @classmethod
    def read(cls, directory: Place, files: PartFiles, numbers: Mapping[str, int]) -> PartTensors:
        """Read the files of a part, given the number of each; raise `SourceError` if they contradict each other."""
        first, *others = files.model
        (model,) = read_files(directory, [first], numbers, ModelStates.of)
        part = cls(model, unreadable=dict(model.refused), files={model.number: model.file})
        part.add_whole(model.number, model.file, {
            name: tensor for name, tensor in model.module.items()
            if tensor.shape != (0,) or not model.is_partitioned or name in model.buffers  # stage 3 has cut the others
        })  # fmt: skip
        if model.frozen:
            part.add_frozen([model, *read_files(directory, others, numbers, ModelStates.of)])
        else:  # the same shapes again
            unread = read_files(directory, others, numbers, lambda file, number: (number, file), with_value=False)
            part.files.update(unread)
        experts = read_files(directory, files.experts, numbers, _weights_of_expert)
        for number, file, weights in experts:
            part.files[number] = file
            part.add_whole(number, file, weights)
        if ranks := read_files(directory, files.optim, numbers, RankStates.of):
            part.add_states(ranks, [name for _, _, weights in experts for name in weights])
        return part

    def add_whole(self, number: int, file: TorchFile, tensors: Mapping[str, Rebuilt]) -> None:
        """Add tensors that are whole in a file; one is unreadable if its storage is too short."""
        storages = file.storages({tensor.record for tensor in tensors.values()})
        for name, tensor in tensors.items():
            if name in self.located:
                raise SourceError(f"{file.path} has {name!r:.60}, which another file has, too", code="duplicate-name")
            try:
                stored = FileTensor.of(tensor, number, storages[tensor.record])
            except SourceError as error:
                self.unreadable[name] = error.message
                continue
            self.entries.setdefault(number, {})[name] = stored.entry
            self.located[name] = stored

    def add_frozen(self, models: Sequence[ModelStates]) -> None:
        """Add frozen parameters of stage 3: each rank's model states have a part of them."""
        begins: dict[str, list[int]] = {name: [] for name in self.model.frozen}
        for model in models:
            self.files[model.number] = model.file
            if model.frozen_shapes != self.model.frozen_shapes or model.frozen.keys() != begins.keys():
                raise SourceError(f"{model.file.path} has other frozen parameters than rank 0", code="ranks-disagree")
            storages = model.file.storages({tensor.record for tensor in model.frozen.values()})
            for name, tensor in model.frozen.items():
                shape = model.frozen_shapes.get(name)
                expected = None if shape is None else -(-prod(shape) // len(models))
                if tensor.shape != (expected,) or tensor.dtype is not self.model.frozen[name].dtype:
                    raise SourceError(
                        f"{model.file.path} has {tensor.shape[0]:,} elements of {name!r:.60}; expected {expected}",
                        code="wrong-shape",
                    )
                begins[name].append(FileTensor.of(tensor, model.number, storages[tensor.record]).begin)
        files = [model.number for model in models]
        for name, tensor in self.model.frozen.items():
            self.located[name] = Flat.of_parts(tensor.dtype, self.model.frozen_shapes[name], files, begins[name])

    def add_states(self, ranks: Sequence[RankStates], experts: Sequence[str]) -> None:
        """Add the states of trainable parameters.

        If there are weights of experts, groups with fewer partitions are theirs, and left out.
        """
        _check_counts(ranks, has_experts=bool(experts))
        _check_steps(ranks)
        if self.model.groups is None:
            raise SourceError(
                f"{self.model.file.path} has no param_shapes, so the order of parameters in the optimizer is not known",
                code="unsupported-version",
                hint="if it has weights, move the optimizer's files to another directory to read them alone",
            )
        for rank in ranks:
            self.files[rank.number] = rank.file
            self.entries.setdefault(rank.number, {}).update(rank.entries())
        skipped = {group for group, count in enumerate(ranks[0].counts) if count != len(ranks)}
        try:
            states = list(states_by_name(ranks, self.model.groups, skipped))
        except SourceError as error:
            raise error.about(ranks[0].file.path) from None
        for name, kind, state in states:
            self.add_state(f"{kind}.{name}", state)
        for name in sorted(f"{kind}.{name}" for name in experts for kind in _OF_ADAM):
            if name not in self.located and name not in self.numbers:
                self.unreadable[name] = _OF_EXPERTS

    def add_state(self, name: str, state: Flat | FileTensor | float | str) -> None:
        """Add a state: its location, its value, or the reason why it cannot be read."""
        if name in self.model.module or name in self.located or name in self.numbers:
            raise SourceError(
                f"{self.model.file.path} has {name!r:.60} twice, or as a weight and as a state", code="duplicate-name"
            )
        if isinstance(state, str):
            self.unreadable[name] = state
        elif isinstance(state, int | float):
            self.numbers[name] = state
        else:
            self.located[name] = state


def _weights_of_expert(file: TorchFile, number: int) -> tuple[int, TorchFile, dict[str, Rebuilt]]:
    """Return the number of the file of an expert, the file without its value, and its tensors."""
    weights = {name: rebuilt(value) for name, value in table(file.value, "the weights of an expert").items()}
    return number, file._replace(value=None), weights


def _check_counts(ranks: Sequence[RankStates], *, has_experts: bool) -> None:
    """Compare the number of files with the number of partitions, and the stages of the files with each other."""
    if len({rank.stage for rank in ranks}) > 1:
        raise SourceError(f"{ranks[0].file.path} and other ranks are of different stages", code="ranks-disagree")
    for rank in ranks:
        others = [count for count in rank.counts if count != len(ranks)]
        if others and (max(rank.counts) != len(ranks) or not has_experts):
            raise SourceError(
                f"{rank.file.path} is one of {max(others)} partitions, and there are files of {len(ranks)} ranks",
                code="wrong-count",
                facts=[_COUNTS],
                hint="move the files of further ranks, if there are any, to another directory",
            )


def _check_steps(ranks: Sequence[RankStates]) -> None:
    """Refuse ranks of different steps: files of two savings under one name differ in nothing else."""
    of_ranks = [next((group[STEP] for group in rank.groups if STEP in group), None) for rank in ranks]
    steps = [bytearray(step.dtype.itemsize) if isinstance(step, FileTensor) else step for step in of_ranks]
    deque(in_batches(
        (None, any_store(), [(rank.file.path, step.begin, memoryview(buffer))])
        for rank, step, buffer in zip(ranks, of_ranks, steps, strict=True)
        if isinstance(step, FileTensor) and isinstance(buffer, bytearray)
    ), maxlen=0)  # fmt: skip  # which fills the buffers
    for rank, step in zip(ranks, steps, strict=True):
        if step != steps[0]:
            raise SourceError(
                f"{rank.file.path} is of another step than {ranks[0].file.path}", code="several-steps",
                facts=["saving over an earlier checkpoint was interrupted, or files of two checkpoints are mixed"],
            )  # fmt: skip


def checkpoint_of(
    directory: Place,
    ranks: Sequence[int],
    parts: Sequence[PartTensors],
    *,
    contents: bool | Literal["blocks"],
    rules: Mapping[str, str] | None = None,
    states: PartTensors | None = None,
    warnings: Sequence[str] = (),
) -> Checkpoint:
    """Return the checkpoint of tensor-parallel parts, and of states that are whole.

    The model states of the first part give the order of weights, and further values. Ranks are those of the files, by
    number.
    """
    model, every = parts[0].model, [*parts, *([] if states is None else [states])]
    joined = _joined(directory, parts, rules)
    unreadable = {**ChainMap(*(part.unreadable for part in every)), **joined.unreadable}
    tensors = joined.tensors | ({} if states is None else _whole(states))
    tensors = {name: tensor for name, tensor in tensors.items() if name not in unreadable}
    if not tensors:
        raise SourceError(f"{directory}: {nothing_readable(unreadable)}", code="no-tensors")
    files = ChainMap(*(part.files for part in every))
    entries = ChainMap(*(part.entries for part in every))
    objects = {name: Object(problem=_problem(value)) for name, value in model.others.items() if value is not None}
    checkpoint = Checkpoint(
        str(directory), tensors,
        tuple(files[number].source_file(number, entries.get(number, {})) for number in range(len(ranks))),
        tuple(ranks), warnings=tuple(warnings), unreadable=unreadable,
        extras=Extras(DESCRIBED_BY, objects=objects),
        opening=Opening(rules=rules or {}, states=_kinds_of_states(every)),
    )  # fmt: skip
    checkpoint = with_replicas_compared(checkpoint, joined, contents=contents)
    if contents:
        checkpoint = with_masters_compared(checkpoint)
    checkpoint = with_computed(checkpoint, model, ChainMap(*(part.numbers for part in every)))
    first = [name for name in model.module if name in checkpoint.tensors]
    return replace(checkpoint, tensors={name: checkpoint.tensors[name] for name in (*first, *checkpoint.tensors)})


def _joined(directory: Place, parts: Sequence[PartTensors], rules: Mapping[str, str] | None) -> JoinedParts:
    """Return the whole tensors of parts."""
    model = parts[0].model
    if len(parts) > 1:
        cuts = TensorCuts(model, rules, len(parts), {*model.module, *model.frozen})
        sets: dict[str, dict[int, Flat | FileTensor]] = {}
        for number, part in enumerate(parts):
            for name, location in part.located.items():
                sets.setdefault(name, {})[number] = location
        return join({name: [of_name] for name, of_name in sets.items()}, len(parts), cuts.of)
    if rules:
        raise StrategyError(
            f"{directory} has no tensor-parallel parts", code="self-described", hint="leave the strategy and layout out"
        )
    return JoinedParts(_whole(parts[0]), {}, {})


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


def _kinds_of_states(parts: Sequence[PartTensors]) -> frozenset[str]:
    """Return the kinds of state before the names of weights, whatever the optimizer calls them."""
    weights = {name for part in parts for name in (*part.model.module, *part.model.frozen)}
    names = {name for part in parts for name in (*part.located, *part.numbers, *part.unreadable)} - weights
    return frozenset(kind for kind, _, weight in (name.partition(".") for name in names) if weight in weights)


def _problem(value: object) -> str:
    """Return why a value of the model states is not read, with a short description."""
    kind = f"{value!r:.60}" if isinstance(value, bool | int | float | str) else f"a pickled {kind_of(value)}"
    return f"is {kind}, which only a Universal Checkpoint keeps"
