"""Find the tensors of one tensor-parallel part of a DeepSpeed checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

from reshard.core.storage.places import any_store, in_batches
from reshard.errors import SourceError
from reshard.formats.deepspeed.buffers import RankStates, cut_by_itself, states_by_name
from reshard.formats.deepspeed.model import MASTERS, STEP, table
from reshard.kits.torch.file import FileTensor
from reshard.kits.torch.tensors import rebuilt

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from reshard.core.model.entries import Entry
    from reshard.core.storage.base import ReadStore, Want
    from reshard.formats.deepspeed.buffers import Flat
    from reshard.formats.deepspeed.model import ModelStates
    from reshard.kits.torch.file import TorchFile
    from reshard.kits.torch.tensors import Rebuilt

_COUNTS = (
    "files of an earlier run with more ranks stay in the directory; checkpoints that are cut within groups of ranks "
    "(MiCS) are not supported"
)
_OF_EXPERTS = (
    "is the state of an expert: the files do not say which ranks have which expert's states, so only weights are read"
)
_PARTITIONED = 3  # the stage of ZeRO that cuts weights
_OF_ADAM = (MASTERS, "exp_avg", "exp_avg_sq", STEP)


@dataclass(frozen=True, slots=True)
class PartTensors:
    """The tensors of one part.

    Attributes:
        located: tensors and single numbers in files, by name.
        numbers: states that are numbers in a pickle, by name.
        unreadable: names that cannot be read, with the reason.
        files: the files, by number.
        entries: the entries of the tensors of each file, by the number of the file.
    """

    located: dict[str, Flat | FileTensor] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    files: dict[int, TorchFile] = field(default_factory=dict)
    entries: dict[int, dict[str, Entry]] = field(default_factory=dict)

    def add(self, name: str, location: Flat | FileTensor | float | str) -> None:
        """Add a tensor, a number, or the reason why a tensor cannot be read."""
        if isinstance(location, str):
            self.unreadable[name] = location
        elif isinstance(location, int | float):
            self.numbers[name] = location
        else:
            self.located[name] = location

    def add_stored(self, number: int, file: TorchFile, tensors: Mapping[str, Rebuilt]) -> None:
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


def add_weights(part: PartTensors, models: Sequence[ModelStates]) -> None:
    """Add the weights and buffers that model states have; with ZeRO stage 3 of each rank, in order.

    Raises:
        SourceError: files contradict each other.
    """
    model = models[0]
    part.files.update((each.number, each.file) for each in models)
    part.unreadable.update(model.refused)
    part.add_stored(model.number, model.file, {
        name: tensor for name, tensor in model.module.items()
        if tensor.shape != (0,) or not model.is_partitioned or name in model.buffers  # stage 3 has cut the others
    })  # fmt: skip
    if model.frozen:
        _add_frozen(part, models)


def _add_frozen(part: PartTensors, models: Sequence[ModelStates]) -> None:
    """Add frozen parameters of stage 3: each rank's model states have a part of them."""
    first = models[0]
    begins: dict[str, list[int]] = {name: [] for name in first.frozen}
    for model in models:
        if model.frozen_shapes != first.frozen_shapes or model.frozen.keys() != first.frozen.keys():
            raise SourceError(f"{model.file.path} has other frozen parameters than rank 0", code="ranks-disagree")
        storages = model.file.storages({tensor.record for tensor in model.frozen.values()})
        for name, tensor in model.frozen.items():
            shape = first.frozen_shapes.get(name)
            expected = None if shape is None else -(-prod(shape) // len(models))
            if tensor.shape != (expected,) or tensor.dtype is not first.frozen[name].dtype:
                raise SourceError(
                    f"{model.file.path} has {tensor.shape[0]:,} elements of {name!r:.60}; expected {expected}",
                    code="wrong-shape",
                )
            begins[name].append(FileTensor.of(tensor, model.number, storages[tensor.record]).begin)
    files = [model.number for model in models]
    for name, tensor in first.frozen.items():
        part.located[name] = cut_by_itself(tensor.dtype, first.frozen_shapes[name], files, begins[name])


def weights_of_expert(file: TorchFile, number: int) -> tuple[int, TorchFile, dict[str, Rebuilt]]:
    """Return the number of the file of an expert, the file without its value, and its tensors."""
    weights = {name: rebuilt(value) for name, value in table(file.value, "the weights of an expert").items()}
    return number, file._replace(value=None), weights


def add_states(part: PartTensors, model: ModelStates, ranks: Sequence[RankStates], experts: Collection[str]) -> None:
    """Add the states of trainable parameters.

    Args:
        part: the part.
        model: the model states, which have the shapes of the parameters.
        ranks: the optimizer states of each rank, in order.
        experts: the weights of experts. If there are any, groups with fewer partitions are theirs, and left out.

    Raises:
        SourceError: files contradict each other, or the order of parameters is unknown.
    """
    _check_counts(ranks, has_experts=bool(experts))
    _check_steps(ranks)
    if model.groups is None:
        advice = "move the optimizer's files to another directory to read the weights alone"
        raise SourceError(
            f"{model.file.path} has no param_shapes, so the order of parameters in the optimizer is not known",
            code="unsupported-version",
            hint=advice if ranks[0].stage < _PARTITIONED else "",
        )
    skipped = {group for group, count in enumerate(ranks[0].partition_counts()) if count != len(ranks)}
    for rank in ranks:
        part.files[rank.number] = rank.file
        part.entries.setdefault(rank.number, {}).update(rank.entries())
    for name, kind, location in states_by_name(ranks, model.groups, skipped):
        state = f"{kind}.{name}"
        if state in model.module or state in part.located or state in part.numbers:
            raise SourceError(
                f"{model.file.path} has {state!r:.60} twice, or as a weight and as a state", code="duplicate-name"
            )
        part.add(state, location)
    for state in sorted(f"{kind}.{name}" for name in experts for kind in _OF_ADAM):
        if state not in part.located and state not in part.numbers:
            part.unreadable[state] = _OF_EXPERTS


def _check_counts(ranks: Sequence[RankStates], *, has_experts: bool) -> None:
    """Compare the number of files with the number of partitions, and the stages of the files with each other."""
    if len({rank.stage for rank in ranks}) > 1:
        raise SourceError(f"{ranks[0].file.path} and other ranks are of different stages", code="ranks-disagree")
    for rank in ranks:
        counts = rank.partition_counts()
        count = max(counts) if has_experts else next((each for each in counts if each != len(ranks)), len(ranks))
        if count != len(ranks):
            raise SourceError(
                f"{rank.file.path} is one of {count} partitions, and there are files of {len(ranks)} ranks",
                code="wrong-count",
                facts=[_COUNTS],
                hint=f"move the files of ranks {count} and up to another directory" if count < len(ranks) else "",
            )
        for of_group in rank.values.get("ds_zero_partition_groups") or ():
            if table(of_group, "ds_zero_partition_groups").get("partition_count") not in {None, len(ranks)}:
                raise SourceError(
                    f"{rank.file.path} is cut within groups of ranks, which is not supported", code="unsupported-layout"
                )


def _check_steps(ranks: Sequence[RankStates]) -> None:
    """Refuse ranks of different steps: files of two savings under one name differ in nothing else."""

    def steps() -> Iterator[tuple[tuple[RankStates, object, bytearray], ReadStore, list[Want]]]:
        for rank in ranks:
            step = next((group[STEP] for group in rank.groups if not isinstance(group.get(STEP, ""), str)), None)
            if isinstance(step, FileTensor):
                content = bytearray(step.dtype.itemsize)
                want = rank.file.path, step.begin, memoryview(content)
                yield (rank, step.dtype, content), any_store(), [want]
            elif step is not None:
                yield (rank, step, bytearray()), any_store(), []

    first: tuple[RankStates, object] | None = None
    for rank, number_or_dtype, content in in_batches(steps()):
        value = number_or_dtype, bytes(content)
        first = first or (rank, value)
        if value != first[1]:
            raise SourceError(
                f"{rank.file.path} is of another step than {first[0].file.path}", code="several-steps",
                facts=["saving over an earlier checkpoint was interrupted, or files of two checkpoints are mixed"],
            )  # fmt: skip
