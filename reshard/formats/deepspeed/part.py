"""Find the tensors of one tensor-parallel part of a DeepSpeed checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

from reshard.core.storage.places import any_store, in_batches
from reshard.errors import SourceError
from reshard.formats.deepspeed.buffers import MASTERS, RankBuffers, cut_by_itself, states_by_name
from reshard.formats.deepspeed.pickled import table
from reshard.kits.torch.file import FileTensor
from reshard.kits.torch.tensors import rebuilt

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from reshard.core.layout.block import Shape
    from reshard.core.model.entries import Entry
    from reshard.core.storage.base import ReadStore, Want
    from reshard.dtypes import DType
    from reshard.formats.deepspeed.buffers import Flat
    from reshard.formats.deepspeed.model import ModelStates
    from reshard.kits.torch.file import Storage, TorchFile
    from reshard.kits.torch.tensors import Rebuilt

_COUNTS = (
    "files of an earlier run with more ranks stay in the directory; checkpoints that are cut within groups of ranks "
    "(MiCS) are not supported"
)

_OF_EXPERTS = (
    "is the state of an expert: the files do not say which ranks have which expert's states, so only weights are read"
)

_PARTITIONED = 3  # the stage of ZeRO that cuts weights

STEP = "step"
"""The number of steps of the optimizer, as a kind of state."""

STATES = (MASTERS, "exp_avg", "exp_avg_sq", STEP)
"""The kinds of state of Adam."""


@dataclass(frozen=True, slots=True)
class PartTensors:
    """The tensors of one part.

    Attributes:
        located: tensors and single numbers in files, by name.
        numbers: states that are numbers in a pickle, by name.
        rounded: weights that are not stored: the name of the master, and the dtype.
        unreadable: names that cannot be read, with the reason.
        files: the files, by number.
        entries: the entries of the tensors of each file, by the number of the file.
    """

    located: dict[str, Flat | FileTensor] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    rounded: dict[str, tuple[str, DType]] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    files: dict[int, TorchFile] = field(default_factory=dict)
    entries: dict[int, dict[str, Entry]] = field(default_factory=dict)

    def add_stored(self, number: int, name: str, tensor: Rebuilt, storage: Storage, shape: Shape | None = None) -> None:
        """Add a tensor that is whole in a file; it is unreadable if its storage is too short."""
        try:
            stored = FileTensor.of(tensor, number, storage)
        except SourceError as error:
            self.unreadable[name] = error.message
            return
        self.entries.setdefault(number, {})[name] = stored.entry
        self.located[name] = stored if shape is None else stored._replace(shape=shape)


def add_weights(part: PartTensors, models: Sequence[tuple[int, ModelStates]]) -> None:
    """Add the weights and buffers that model states have.

    Args:
        part: the part.
        models: the number of each file, and its model states; with ZeRO stage 3 of each rank, in order.

    Raises:
        SourceError: files contradict each other.
    """
    number, model = models[0]
    stored = {name: tensor for name, tensor in model.module.items() if not _is_placeholder(name, tensor, model)}
    storages = model.file.storages({tensor.record for tensor in stored.values()})
    for name, tensor in stored.items():
        part.add_stored(number, name, tensor, storages[tensor.record])
    part.unreadable.update(model.refused)
    _add_frozen(part, models)


def _is_placeholder(name: str, tensor: Rebuilt, model: ModelStates) -> bool:
    """Return whether a tensor of the module stands for one that stage 3 has cut."""
    return tensor.shape == (0,) and model.is_partitioned and name not in model.buffers


def add_expert(part: PartTensors, number: int, file: TorchFile) -> list[str]:
    """Add the weights of one expert and return their names; raise `SourceError` if the file is not valid."""
    try:
        weights = {name: rebuilt(value) for name, value in table(file.value, "the weights of an expert").items()}
    except SourceError as error:
        raise error.about(file.path) from None
    storages = file.storages({tensor.record for tensor in weights.values()})
    for name, tensor in weights.items():
        if name in part.located:
            raise SourceError(f"{file.path} has {name!r:.60}, which another file has, too", code="duplicate-name")
        part.add_stored(number, name, tensor, storages[tensor.record])
    return list(weights)


def _add_frozen(part: PartTensors, models: Sequence[tuple[int, ModelStates]]) -> None:
    """Add frozen parameters of stage 3: each rank's model states have a part of them."""
    first = models[0][1]
    if not first.frozen:
        return
    for _, model in models:
        if model.frozen_shapes != first.frozen_shapes or model.frozen.keys() != first.frozen.keys():
            raise SourceError(f"{model.file.path} has other frozen parameters than rank 0", code="ranks-disagree")
    begins: dict[str, list[int]] = {}
    for number, model in models:
        storages = model.file.storages({tensor.record for tensor in model.frozen.values()})
        for name, tensor in model.frozen.items():
            shape = first.frozen_shapes.get(name)
            expected = None if shape is None else -(-prod(shape) // len(models))
            if tensor.shape != (expected,) or tensor.dtype is not first.frozen[name].dtype:
                raise SourceError(
                    f"{model.file.path} has {tensor.shape[0]:,} elements of {name!r:.60}; expected {expected}",
                    code="wrong-shape",
                )
            begins.setdefault(name, []).append(FileTensor.of(tensor, number, storages[tensor.record]).begin)
    files = [number for number, _ in models]
    for name, tensor in first.frozen.items():
        part.located[name] = cut_by_itself(tensor.dtype, first.frozen_shapes[name], files, begins[name])


def _check_counts(ranks: Sequence[RankBuffers], *, has_experts: bool) -> None:
    """Compare the number of files with the number of partitions, and the stages of the files with each other."""
    if len({buffers.stage for buffers in ranks}) > 1:
        raise SourceError(f"{ranks[0].file.path} and other ranks are of different stages", code="ranks-disagree")
    for buffers in ranks:
        counts = buffers.partition_counts()
        if max(counts) != len(ranks) or (min(counts) != len(ranks) and not has_experts):
            count = max(counts) if max(counts) != len(ranks) else min(counts)
            raise SourceError(
                f"{buffers.file.path} is one of {count} partitions, and there are files of {len(ranks)} ranks",
                code="wrong-count",
                facts=[_COUNTS],
                hint=f"move the files of ranks {count} and up to another directory" if count < len(ranks) else "",
            )
        for of_group in buffers.values.get("ds_zero_partition_groups") or ():
            if table(of_group, "ds_zero_partition_groups").get("partition_count") not in {None, len(ranks)}:
                raise SourceError(
                    f"{buffers.file.path} is cut within groups of ranks, which is not supported",
                    code="unsupported-layout",
                )


def check_is_no_weight(state: str, model: ModelStates) -> None:
    """Refuse a state whose name is also that of a weight, such as of a module `fp32`."""
    if state in model.module:
        raise SourceError(
            f"{model.file.path} has the weight {state!r:.60}, which is also the name of a state of another weight",
            code="duplicate-name",
        )


def _check_steps(ranks: Sequence[RankBuffers]) -> None:
    """Refuse ranks of different steps: files of two savings under one name differ in nothing else."""

    def steps() -> Iterator[tuple[tuple[RankBuffers, object, bytearray], ReadStore, list[Want]]]:
        for buffers in ranks:
            step = next((scalars[STEP] for scalars in buffers.scalars if STEP in scalars), None)
            if isinstance(step, FileTensor):
                content = bytearray(step.dtype.itemsize)
                want = buffers.file.path, step.begin, memoryview(content)
                yield (buffers, step.dtype, content), any_store(), [want]
            elif step is not None:
                yield (buffers, step, bytearray()), any_store(), []

    first: tuple[RankBuffers, object] | None = None
    for buffers, number_or_dtype, content in in_batches(steps()):
        value = number_or_dtype, bytes(content)
        first = first or (buffers, value)
        if value != first[1]:
            raise SourceError(
                f"{buffers.file.path} is of another step than {first[0].file.path}", code="several-steps",
                facts=["saving over an earlier checkpoint was interrupted, or files of two checkpoints are mixed"],
            )  # fmt: skip


def add_states(part: PartTensors, model: ModelStates, ranks: Sequence[RankBuffers], experts: Collection[str]) -> None:
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
    for buffers in ranks:
        part.entries.setdefault(buffers.number, {}).update(buffers.entries())
    for name, kind, location in states_by_name(ranks, model.groups, skipped):
        state = f"{kind}.{name}"
        check_is_no_weight(state, model)
        if state in part.located or state in part.numbers:
            raise SourceError(f"{model.file.path} has {name!r:.60} twice in param_shapes", code="duplicate-name")
        if isinstance(location, str):
            part.unreadable[state] = location
        elif isinstance(location, int | float):
            part.numbers[state] = location
        else:
            part.located[state] = location
    states = {f"{kind}.{name}" for name in experts for kind in STATES}
    part.unreadable.update(dict.fromkeys(sorted(states - {*part.located, *part.numbers}), _OF_EXPERTS))


def add_rounded(part: PartTensors, model: ModelStates) -> None:
    """Add weights of stage 3, which follow from their masters, and other names of tied weights."""
    for name, tensor in model.module.items():
        if name in part.located or name in part.unreadable:
            continue
        kept = model.shared.get(name, name)
        location = part.located.get(kept) or part.located.get(f"{MASTERS}.{kept}")
        if location is None:
            part.unreadable[name] = "is not stored whole, and has no master"
        elif location.dtype is tensor.dtype:
            part.located[name] = location
        else:
            part.rounded[name] = f"{MASTERS}.{kept}", tensor.dtype
