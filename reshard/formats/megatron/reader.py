"""Open the weights of Megatron-LM's older checkpoints: `mp_rank_TT_PPP/model_optim_rng.pt`, one file of each rank.

A rank is one tensor-parallel part of one pipeline stage, and has some of the experts. Its file has the arguments of the
training, and the model, or with virtual stages several. They are joined as follows:

1. The arguments of all files must agree, and give the numbers of parts, of stages and of expert-parallel ranks.
2. Layers and experts get their numbers in the whole model (`numbering`).
3. The parts of a tensor are joined by a table of names, or by the user's rules (`model`).
4. The shapes of the whole tensors are compared with the sizes in the arguments.

The files do not say which weights the states of the optimizer belong to, so these are refused by name. The vocabulary
stays padded.

Sources: Megatron-LM `megatron/training/checkpointing.py`, core 0.16.1, and of 2019 to 2022, and files made with it.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from reshard.core.storage.base import COPY_AGAIN
from reshard.core.storage.places import workers_at
from reshard.core.storage.small import is_text
from reshard.core.storage.threads import map_ordered
from reshard.errors import SourceError, names
from reshard.formats.megatron.model import Model
from reshard.formats.megatron.names import RANKS
from reshard.formats.megatron.numbering import Mesh, Rank
from reshard.formats.torch_save.saves import TensorFinder, kind_of, read_state_dict
from reshard.kits.parts.joining import opened
from reshard.kits.torch.dtensors import Tensors
from reshard.kits.torch.file import TorchFile
from reshard.kits.torch.pickles import Pairs
from reshard.kits.training.arguments import Arguments, stated_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.storage.places import Place
    from reshard.formats.torch_save.saves import Contents

_EXPECTED = "a checkpoint of Megatron-LM"
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_STATES = ("distrib_optim.pt", "optim.pt")
_OPTIMIZER = "optimizer"
_MODEL = re.compile(r"model(0|[1-9]\d{0,4})?")
_FACTS = ("iteration", "checkpoint_version")
_UNSUPPORTED = ("tp_2d", "moe_tp_extend_ep", "noop_layers")
_MOST_MISSING = 8


class _RankFile(NamedTuple):
    """The contents of a rank's file.

    Attributes:
        path: the file.
        stated: what it states: the arguments of the training, the iteration and the version of the format, by name.
        chunks: the number of virtual stages.
        contents: the models; names begin with the key of the model.
        others: descriptions of the other values.
        has_states: whether it has tensors of the optimizer.
    """

    path: str
    stated: Mapping[str, Any]
    chunks: int
    contents: Contents
    others: Mapping[str, str]
    has_states: bool


def open_megatron(
    directory: Place,
    listing: Sequence[str],
    *,
    contents: bool | Literal["blocks"] = True,
    rules: Mapping[str, str] | None = None,
) -> Checkpoint:
    """Open the files of all ranks.

    Args:
        directory: the directory of one iteration.
        listing: the names in it.
        contents: compare samples of replicas.
        rules: the user's rules, in place of the table.

    Raises:
        SourceError: a rank has no file, a file is not valid, files are of several checkpoints, arguments contradict the
            files, or replicas differ.
        StrategyError: a rule does not fit.
    """
    locations, state_files = _locations(directory, listing)
    places = [place for _, place in locations]
    read = list(map_ordered(lambda item: _read(item[1], item[0]), list(enumerate(places)), workers_at(places)))
    first = read[0]
    for file in read[1:]:
        _check_alike(file, first)
    arguments = Arguments.of(first.stated)
    mesh = Mesh.of(arguments)
    _check_supported(first, arguments, mesh)
    ranks = [_rank_in(match, has_stages=mesh.stages > 1 or mesh.experts == 1) for match, _ in locations]
    _check_ranks(directory, mesh, ranks)
    model = Model(directory, dict(zip(ranks, (file.contents for file in read), strict=True)), arguments)
    joined = model.joined(rules, has_first_version=first.stated.get("checkpoint_version", 0) < 1)
    if any(file.has_states for file in read):
        state_files.add(places[0].name)
    joined.unreadable.update(
        (f"{_OPTIMIZER}.state.{name}", "holds states of the optimizer, and no file says of which weights they are")
        for name in sorted(state_files)
    )
    return opened(
        directory,
        [file.contents.file for file in read],
        joined,
        objects=model.objects | {name: kind for file in read for name, kind in file.others.items()},
        rules=rules,
        contents=contents,
        arguments=first.stated,
    )


def _locations(directory: Place, listing: Sequence[str]) -> tuple[list[tuple[re.Match[str], Place]], set[str]]:
    """Return the file of each rank with the match of its directory, and the names of files of the optimizer alone."""
    paths = {path.relative_to(str(directory)).as_posix() for path in directory.files(depth=2)}
    locations: list[tuple[re.Match[str], Place]] = []
    states: set[str] = set()
    for match in filter(None, map(RANKS.files.fullmatch, sorted(listing))):
        states.update(name for name in _STATES if f"{match[0]}/{name}" in paths)
        if name := next((name for name in _FILES if f"{match[0]}/{name}" in paths), None):
            locations.append((match, directory / match[0] / name))
    if not locations:
        raise SourceError(
            f"{directory} has no {_FILES[0]} of any rank", code="no-checkpoint",
            hint="save a checkpoint of NeMo 1 with NeMo, with one tensor-parallel part and one pipeline stage",
        )  # fmt: skip
    return sorted(locations, key=lambda item: _rank_in(item[0])), states


def _read(location: Place, number: int) -> _RankFile:
    """Read the file of a rank, number `number` of the checkpoint."""
    saved = TorchFile.read(location, _EXPECTED)
    items = saved.value.items() if isinstance(saved.value, Pairs) else ()
    values = {key: value for key, value in items if isinstance(key, str) and is_text(key)}
    keys = set(filter(_MODEL.fullmatch, values))
    if not keys or keys not in ({"model"}, {f"model{chunk}" for chunk in range(len(keys))}):
        raise SourceError(
            f"{saved.path} has {names(keys) or 'no model'}; expected model, or model0, model1 and so on",
            code="not-a-checkpoint",
        )
    stated = stated_in(values.get("args"))
    stated |= {name: value for name in _FACTS if isinstance(value := values.get(name), int | float)}
    models = Pairs()
    for key in sorted(keys):
        models[key] = values[key]
    contents = read_state_dict(saved, number, models, "", Tensors(0, 1))
    if not keys.isdisjoint((*contents.tensors, *contents.refused)):
        raise SourceError(f"{saved.path} has a model that is not a dict of tensors", code="not-a-state-dict")
    has_states = TensorFinder().has_tensor(values.get(_OPTIMIZER))
    read = {*keys, _OPTIMIZER} if has_states else keys
    others = {key: f"a pickled {kind_of(value)}, which is not read" for key, value in values.items() if key not in read}
    return _RankFile(saved.path, stated, len(keys), contents, others, has_states)


def _check_alike(file: _RankFile, first: _RankFile) -> None:
    """Refuse a file of another checkpoint."""
    different = [name for name in {**file.stated, **first.stated} if file.stated.get(name) != first.stated.get(name)]
    different += ["number of virtual stages"] if file.chunks != first.chunks else []
    if different:
        raise SourceError(
            f"{file.path} has another {different[0]} than {first.path}", code="files-disagree",
            hint="get all files of one checkpoint",
        )  # fmt: skip


def _check_supported(file: _RankFile, arguments: Arguments, mesh: Mesh) -> None:
    """Refuse a file whose arguments contradict it, or say nothing, or say what is not read."""
    virtual = arguments["virtual_pipeline_model_parallel_size"]
    if arguments["tensor_model_parallel_size"] is None:
        raise SourceError(f"{file.path} has no tensor_model_parallel_size in args", code="no-layout")
    if virtual not in {None, file.chunks}:
        raise SourceError(
            f"{file.path} has {file.chunks} models; args say {virtual} virtual stages", code="files-disagree"
        )
    unsupported = [name for name in _UNSUPPORTED if arguments[name]]
    if file.chunks > 1 and not mesh.is_backwards and arguments["schedules_method"]:
        unsupported.append("schedules_method")
    if mesh.parts % mesh.expert_parts:
        unsupported.append("expert_tensor_parallel_size")
    if unsupported:
        raise SourceError(
            f"{file.path} has {names(f'{name} {arguments[name]}' for name in unsupported)} in args, which reshard does "
            "not read", code="unsupported-layout", hint="save it with --ckpt-format torch_dist, which reshard reads",
        )  # fmt: skip


def _rank_in(match: re.Match[str], *, has_stages: bool = True) -> Rank:
    """Return the rank in the name of a directory; without stages, the second of two numbers is of experts."""
    part, second = int(match["part"]), int(match["stage"] or 0)
    if match["expert"] is None and not has_stages:
        return Rank(0, part, second)
    return Rank(second, part, int(match["expert"] or 0))


def _check_ranks(directory: Place, mesh: Mesh, ranks: Sequence[Rank]) -> None:
    """Refuse ranks that are missing, or there twice, or that the arguments do not have."""
    facts = [f"args say {mesh.stages} stages, {mesh.parts} parts and {mesh.experts} expert-parallel ranks"]
    for rank, count in Counter(ranks).items():
        if rank.stage >= mesh.stages or rank.part >= mesh.parts or rank.expert >= mesh.experts:
            raise SourceError(f"{directory} has {rank}", code="no-such-rank", facts=facts)
        if count > 1:
            raise SourceError(f"{directory} has {rank} twice", code="duplicate-rank")
    if missing := dict.fromkeys(map(str, islice(_missing(mesh, ranks), _MOST_MISSING))):
        raise SourceError(
            f"{directory} has no file of {names(missing, most=3)}", code="missing-ranks", facts=facts, hint=COPY_AGAIN
        )


def _missing(mesh: Mesh, ranks: Sequence[Rank]) -> Iterator[Rank]:
    """Yield ranks of which no file has the part of the model, or the part of the experts."""
    dense = {rank._replace(expert=0) for rank in ranks}
    of_experts = {rank._replace(part=rank.part % mesh.expert_parts) for rank in ranks}
    for stage in range(mesh.stages):
        for part in range(mesh.parts):
            if (rank := Rank(stage, part)) not in dense:
                yield rank
        for part in range(mesh.expert_parts):
            for expert in range(mesh.experts):
                if (rank := Rank(stage, part, expert)) not in of_experts:
                    yield rank
