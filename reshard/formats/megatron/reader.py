"""Open the weights of Megatron-LM's older checkpoints: `mp_rank_TT_PPP/model_optim_rng.pt`, one file of each rank.

A rank is one tensor-parallel part of one pipeline stage, and has some of the experts. Its file has the arguments of the
training, and the model, or with virtual stages several. They are joined as follows:

1. The arguments of all files must agree, and give the numbers of parts, of stages, of virtual stages and of
   expert-parallel ranks.
2. Layers and experts get their numbers in the whole model (`megatron_model`).
3. The parts of a tensor are joined by the table `cuts.MEGATRON`, or by the user's rules.
4. If embeddings are tied, the output layer of the last stage is another replica of the embedding.
5. The shapes of the whole tensors are compared with the sizes in the arguments.

The files do not say which weights the states of the optimizer belong to, so these are refused by name. The vocabulary
stays padded.

Sources: Megatron-LM `megatron/training/checkpointing.py`, core 0.16.1, and of 2019 to 2022, and files made with it.
"""

from __future__ import annotations

import re
from itertools import islice
from typing import TYPE_CHECKING, Literal, NamedTuple

from reshard.core.runs import iteration_of
from reshard.core.storage.base import COPY_AGAIN
from reshard.core.storage.places import workers_at
from reshard.core.storage.small import is_text
from reshard.core.storage.threads import map_ordered
from reshard.errors import Faults, SourceError, names
from reshard.formats.megatron.model import OF_MODEL, Model, Rank, RankModel, expert_parts
from reshard.formats.megatron.names import RANKS, RELEASE
from reshard.formats.torch_save.saves import TensorFinder, kind_of, read_state_dict
from reshard.kits.parts.cuts import Cuts
from reshard.kits.parts.joining import JoinedParts, check_shapes, join, opened
from reshard.kits.torch.dtensors import Tensors
from reshard.kits.torch.file import TorchFile
from reshard.kits.torch.pickles import Pairs
from reshard.kits.training.arguments import Arguments, shape_of
from reshard.kits.training.pickled import stated_in

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.storage.places import Place
    from reshard.formats.torch_save.saves import Contents

_EXPECTED = "a checkpoint of Megatron-LM"
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_NEMO = "model_weights.ckpt"
_STATES = ("distrib_optim.pt", "optim.pt")
_OPTIMIZER = "optimizer"
_MODEL = re.compile(r"model(0|[1-9]\d{0,4})?")


class _RankFile(NamedTuple):
    """The contents of a rank's file.

    Attributes:
        path: the file.
        arguments: the arguments of the training.
        stated: the same as the file states them.
        iteration, version: the iteration, and the version of the format; None if the file does not say it.
        chunks: the number of virtual stages; 0 without any.
        contents: the models; names begin with the key of the model.
        others: descriptions of the other values.
        has_states: whether it has tensors of the optimizer.
    """

    path: str
    arguments: Arguments
    stated: Mapping[str, object]
    iteration: float | None
    version: float | None
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
            files or each other, or replicas differ.
        StrategyError: a rule does not fit.
    """
    locations, state_files = _locations(directory, listing)
    places = [place for _, place in locations]
    read = list(map_ordered(lambda item: _read(item[1], item[0]), list(enumerate(places)), workers_at(places)))
    first = _agreed(read)
    files = _by_rank(
        directory, [(numbers, file) for (numbers, _), file in zip(locations, read, strict=True)], first.arguments
    )
    _check_ranks(directory, first, files)
    model = Model(
        directory, {rank: RankModel(file.path, file.contents) for rank, file in files.items()}, first.arguments
    )
    cuts = Cuts(lambda name: model.rule(name, first.version), rules, model.names)
    parts = first.arguments.tensor_model_parallel_size or 1
    dense = join(model.parts, parts, cuts.of)
    experts = join(model.experts, expert_parts(first.arguments) or parts, cuts.of)
    joined = JoinedParts(*(first | second for first, second in zip(dense, experts, strict=True)))
    _check(directory, joined, cuts, model, first)
    joined.unreadable.update(model.unreadable)
    if any(file.has_states for file in files.values()):
        state_files = {first.path.rpartition("/")[2], *state_files}
    joined.unreadable.update(
        (f"{_OPTIMIZER}.state.{name}", "holds states of the optimizer, and no file says of which weights they are")
        for name in sorted(state_files)
    )
    return opened(
        directory,
        [(number, file.contents.file) for number, file in enumerate(files.values())],
        joined,
        objects=model.objects | {name: kind for file in files.values() for name, kind in file.others.items()},
        rules=rules,
        warnings=_warnings(directory, first),
        contents=contents,
        arguments=first.stated,
    )


def open_release(
    directory: Place,
    listing: Sequence[str],
    *,
    contents: bool | Literal["blocks"] = True,
    rules: Mapping[str, str] | None = None,
) -> Checkpoint:
    """Open the checkpoint `release` of a run; arguments and errors as for `open_megatron`."""
    return open_megatron(directory / RELEASE, listing, contents=contents, rules=rules)


class _Numbers(NamedTuple):
    """The numbers in the name of a rank's directory: the last is an expert-parallel rank if there are three."""

    second: int
    part: int
    third: int | None


def _locations(directory: Place, listing: Sequence[str]) -> tuple[list[tuple[_Numbers, Place]], set[str]]:
    """Return the files of the ranks in order, and the names of files that have only states of the optimizer."""
    inside: dict[str, set[str]] = {}
    for path in directory.files(depth=2):
        parts = path.relative_to(str(directory)).parts
        if len(parts) == 2:
            inside.setdefault(parts[0], set()).add(parts[1])
    locations: list[tuple[_Numbers, Place]] = []
    states: set[str] = set()
    for match in filter(None, map(RANKS.files.fullmatch, sorted(listing))):
        present = inside.get(match[0], set())
        states |= present.intersection(_STATES)
        if name := next((name for name in _FILES if name in present), None):
            third = int(match["expert"]) if match["expert"] else None
            numbers = _Numbers(int(match["stage"] or 0), int(match["part"]), third)
            locations.append((numbers, directory / match[0] / name))
        elif _NEMO in present:
            raise SourceError(
                f"{directory} has the ranks of a checkpoint of NeMo 1", code="unsupported-layout",
                facts=[f"{match[0]} has {_NEMO}, which does not say how it is cut"],
                hint="save it with NeMo with tensor_model_parallel_size 1 and pipeline_model_parallel_size 1",
            )  # fmt: skip
    if not locations:
        raise SourceError(f"{directory} has no {_FILES[0]} of any rank", code="no-checkpoint")
    return sorted(locations, key=lambda item: (*item[0][:2], item[0].third or 0)), states


def _read(location: Place, number: int) -> _RankFile:
    """Read the file of a rank, number `number` of the checkpoint."""
    saved = TorchFile.read(location, _EXPECTED)
    values: dict[str, object] = {}
    for key, value in saved.value.items() if isinstance(saved.value, Pairs) else ():
        if not isinstance(key, str) or not is_text(key) or key in values:
            raise SourceError(f"{saved.path} has {key!r:.60} twice, or it is not a valid name", code="bad-name")
        values[key] = value
    models = [key for key in values if _MODEL.fullmatch(key)]
    chunks = 0 if models == ["model"] else len(models)
    if not models or {*models} != ({f"model{chunk}" for chunk in range(chunks)} or {"model"}):
        raise SourceError(
            f"{saved.path} has {names(models) or 'no model'}; expected model, or model0, model1 and so on",
            code="not-a-checkpoint",
        )
    try:
        stated = stated_in(values.get("args"))
        arguments = Arguments.of(stated)
    except SourceError as error:
        raise SourceError(f"{saved.path} {error.message}", code=error.code) from None
    state_dict = Pairs()
    for key in models:
        state_dict[key] = values[key]
    contents = read_state_dict(saved, number, state_dict, "", Tensors(0, 1))
    if not contents.tensors.keys().isdisjoint(models) or not contents.refused.keys().isdisjoint(models):
        raise SourceError(f"{saved.path} has a model that is not a dict of tensors", code="not-a-state-dict")
    has_states = TensorFinder().has_tensor(values.get(_OPTIMIZER))
    others = {
        key: f"a pickled {kind_of(value)}, which is not read"
        for key, value in values.items()
        if key not in models and not (key == _OPTIMIZER and has_states)
    }
    return _RankFile(
        saved.path, arguments, stated, _number(values.get("iteration")), _number(values.get("checkpoint_version")),
        chunks, contents, others, has_states,
    )  # fmt: skip


def _number(value: object) -> float | None:
    return value if isinstance(value, int | float) else None


def _agreed(files: Sequence[_RankFile]) -> _RankFile:
    """Return the first file; refuse files of another checkpoint, and arguments that contradict the files."""
    first = files[0]
    for file in files:
        facts = {
            "iteration": file.iteration == first.iteration,
            "checkpoint_version": file.version == first.version,
            "number of virtual stages": file.chunks == first.chunks,
        }
        argument = file.arguments.difference(first.arguments)
        if different := argument or next((name for name, is_equal in facts.items() if not is_equal), ""):
            raise SourceError(
                f"{file.path} has another {different} than {first.path}", code="files-disagree",
                hint="get all files of one checkpoint",
            )  # fmt: skip
    arguments = first.arguments
    if arguments.tensor_model_parallel_size is None:
        raise SourceError(f"{first.path} has no tensor_model_parallel_size in args", code="no-layout")
    try:
        virtual = arguments.virtual_stages()
    except SourceError as error:
        raise SourceError(f"{first.path} {error.message}", code=error.code) from None
    if (first.chunks or 1) != (virtual or 1):
        said = f"args say {virtual} virtual stages" if virtual else "args say nothing of virtual stages"
        raise SourceError(
            f"{first.path} has {first.chunks or 1} models; {said}", code="files-disagree",
            facts=[] if virtual else ["expected virtual_pipeline_model_parallel_size in args"],
        )  # fmt: skip
    unsupported = {
        "schedules_method": first.chunks > 1 and not arguments.is_backwards and arguments.schedules_method,
        "tp_2d": arguments.tp_2d,
        "moe_tp_extend_ep": arguments.moe_tp_extend_ep,
        "noop_layers": arguments.noop_layers,
    }
    for name, value in unsupported.items():
        if value:
            raise SourceError(
                f"{first.path} has {name} {first.stated.get(name)} in args, which reshard does not read",
                code="unsupported-layout", hint="save it with --ckpt-format torch_dist, which reshard reads",
            )  # fmt: skip
    return first


def _by_rank(
    directory: Place, files: Sequence[tuple[_Numbers, _RankFile]], arguments: Arguments
) -> dict[Rank, _RankFile]:
    """Return the files by rank; the arguments say what the second of two numbers is."""
    result: dict[Rank, _RankFile] = {}
    is_of_experts = (arguments.pipeline_model_parallel_size or 1) == 1 < (arguments.expert_model_parallel_size or 1)
    for (second, part, third), file in files:
        rank = Rank(0, part, second) if third is None and is_of_experts else Rank(second, part, third or 0)
        if rank in result:
            raise SourceError(f"{directory} has {_text(rank)} twice", code="duplicate-rank")
        result[rank] = file
    return result


def _text(rank: Rank) -> str:
    """Return a rank as words."""
    return f"part {rank.part} of stage {rank.stage}" + (f" of expert-parallel rank {rank.expert}" * bool(rank.expert))


def _check_ranks(directory: Place, first: _RankFile, files: Collection[Rank]) -> None:
    """Refuse ranks that are missing, or that the arguments do not have."""
    arguments = first.arguments
    sizes = {
        "pipeline_model_parallel_size": (arguments.pipeline_model_parallel_size, "pipeline stages"),
        "tensor_model_parallel_size": (arguments.tensor_model_parallel_size, "tensor-parallel parts"),
        "expert_model_parallel_size": (arguments.expert_model_parallel_size, "expert-parallel ranks"),
    }
    for index, (name, (size, _)) in enumerate(sizes.items()):
        if size is None and any(rank[index] for rank in files):
            raise SourceError(f"{first.path} has no {name} in args", code="no-layout")
    stages, parts, experts = (size or 1 for size, _ in sizes.values())
    texts = [f"{size} {text}" for size, text in sizes.values() if size and (size > 1 or "expert" not in text)]
    facts = [f"args say {names(texts)}"]
    if surplus := [rank for rank in files if rank.stage >= stages or rank.part >= parts or rank.expert >= experts]:
        raise SourceError(f"{directory} has {_text(surplus[0])}", code="no-such-rank", facts=facts)
    present = {(rank.stage, rank.part) for rank in files}
    expected = (Rank(stage, part) for stage in range(stages) for part in range(parts))
    missing = list(islice((rank for rank in expected if rank[:2] not in present), 8))
    if not missing and experts > 1:
        of_experts = expert_parts(arguments) or parts
        present_experts = {(rank.stage, rank.part % of_experts, rank.expert) for rank in files}
        expected = (
            Rank(stage, part, expert)
            for stage in range(stages)
            for part in range(of_experts)
            for expert in range(experts)
        )
        missing = list(islice((rank for rank in expected if rank not in present_experts), 8))
    if missing:
        raise SourceError(
            f"{directory} has no file of {names(map(_text, missing), most=3)}", code="missing-ranks", facts=facts,
            hint=COPY_AGAIN,
        )  # fmt: skip


def _check(directory: Place, joined: JoinedParts, cuts: Cuts, model: Model, file: _RankFile) -> None:
    """Compare the shapes of tensors that are joined by the table with the arguments, and experts with their router."""
    shapes = file.arguments.shapes()
    expected = {
        name: shape
        for name in joined.tensors
        if OF_MODEL.match(name) and not cuts.is_ruled(name) and (shape := shape_of(name, shapes)) is not None
    }
    faults = Faults(str(directory))
    said = file.arguments.is_gated
    for name in expected:
        if (is_gated := model.has_gate(name)) is not None and said not in {None, is_gated}:
            fault = f"has {'a gate' if is_gated else 'no gate'} by the rows of it and of the layer behind it"
            faults.add(f"tensor {name!r}", f"{fault}; args say {file.arguments.gating}", code="wrong-shape")
    count = model.experts_of_layer
    for name in expected if count else ():
        if name.endswith(".router.weight") and (rows := joined.tensors[name].spec.shape[0]) != count:
            fault = f"has {rows} rows; the files have {count} experts of each layer"
            faults.add(f"tensor {name!r}", fault, code="missing-experts")
    faults.raise_if_any(SourceError)
    check_shapes(directory, joined.tensors, expected, "args")


def _warnings(directory: Place, file: _RankFile) -> list[str]:
    number = iteration_of(directory)
    if number is None or file.iteration in {None, number}:
        return []
    return [f"{directory} is of iteration {file.iteration:g}, according to its files"]
