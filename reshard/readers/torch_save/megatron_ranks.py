"""Open the weights of Megatron-LM's older checkpoints: `mp_rank_TT_PPP/model_optim_rng.pt`, one file of each rank.

A rank is one tensor-parallel part of one pipeline stage. Its file has the arguments of the training, and the model, or
with virtual stages several. They are joined as follows:

1. The arguments of all files must agree, and give the number of parts, of stages and of virtual stages.
2. Layers are numbered from 0 in each file. The layers of virtual stage `v` of stage `p` follow the layers of all
   `(v, p)` before, so that their numbers in the whole model follow from the numbers of layers.
3. The parts of a tensor are joined by the table `cuts.MEGATRON`, or by the user's rules. The first layer of an MLP has
   the parts of a gate and of an up projection if the arguments say so.
4. If embeddings are tied, the output layer of the last stage is another replica of the embedding.
5. The shapes of the whole tensors are compared with the sizes in the arguments.

The files do not say which weights the states of the optimizer belong to, so these are refused by name. Expert
parallelism is refused. The vocabulary stays padded.

Sources: Megatron-LM `megatron/training/checkpointing.py`, core 0.16.1, and of 2019 to 2022, and files made with it.
"""

from __future__ import annotations

import re
from itertools import islice
from typing import TYPE_CHECKING, Literal, NamedTuple

from reshard.errors import Faults, SourceError, names
from reshard.formats.directories import MEGATRON_RANKS, RELEASE
from reshard.readers.pickles import Pairs
from reshard.readers.runs import iteration_of
from reshard.readers.torch_save.cuts import GATE_AND_UP, MEGATRON, Cuts, rule_in
from reshard.readers.torch_save.dtensors import Tensors
from reshard.readers.torch_save.file import TorchFile
from reshard.readers.torch_save.joining import JoinedParts, check_shapes, join, opened
from reshard.readers.torch_save.megatron_args import Arguments
from reshard.readers.torch_save.saves import TensorFinder, kind_of, read_state_dict
from reshard.storage.places import workers_at
from reshard.storage.small import is_text
from reshard.storage.threads import map_ordered

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard.readers.torch_save.file import FileTensor
    from reshard.readers.torch_save.saves import Contents
    from reshard.source.checkpoint import Checkpoint
    from reshard.storage.places import Place

_EXPECTED = "a checkpoint of Megatron-LM"
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_STATES = ("distrib_optim.pt", "optim.pt")
_OPTIMIZER = "optimizer"
_NOTHING = "a pickled NoneType, which is not read"
_MODEL = re.compile(r"model(0|[1-9]\d{0,4})?")
_LAYER = re.compile(r"(?P<stack>(?:.*?\.)?layers)\.(?P<layer>0|[1-9]\d{0,8})\.(?P<rest>.+)", re.DOTALL)
_FIRST_LAYER = re.compile(r"\.(?:linear_fc1|dense_h_to_4h)\.(?:weight|bias)\d*\Z")
_OF_MODEL = re.compile(r"(?:language_model\.)?(?:embedding|encoder|decoder|transformer|output_layer|mtp)\.")
_TIED_HEAD, _HEAD, _EMBEDDING = ".word_embeddings_for_head.weight", ".output_layer.weight", ".word_embeddings.weight"


class _Rank(NamedTuple):
    """The pipeline stage of a rank, and its tensor-parallel part."""

    stage: int
    part: int


class _RankFile(NamedTuple):
    """The contents of a rank's file.

    Attributes:
        path: the file.
        arguments: the arguments of the training.
        iteration, version: the iteration, and the version of the format; None if the file does not say it.
        chunks: the number of virtual stages; 0 without any.
        contents: the models; names begin with the key of the model.
        others: descriptions of the other values.
        has_states: whether it has tensors of the optimizer.
    """

    path: str
    arguments: Arguments
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
    numbers = {location: number for number, location in enumerate(locations.values())}
    files = dict(
        zip(
            locations,
            map_ordered(lambda path: _read(path, numbers[path]), list(numbers), workers_at(numbers)),
            strict=True,
        )
    )
    first = _agreed(directory, files)
    model = _Model(directory, files, first.arguments)
    cuts = Cuts(lambda name: _rule(name, first), rules, [*model.parts, *model.unreadable])
    parts = first.arguments.tensor_model_parallel_size or 1
    joined = join({name: [*of_stages.values()] for name, of_stages in model.parts.items()}, parts, cuts)
    _check(directory, joined, cuts, first.arguments)
    joined.unreadable.update(model.unreadable)
    if any(file.has_states for file in files.values()):
        state_files = {first.path.rpartition("/")[2], *state_files}
    joined.unreadable.update(
        (f"{_OPTIMIZER}.state.{name}", "holds states of the optimizer, and no file says of which weights they are")
        for name in sorted(state_files)
    )
    return opened(
        directory,
        [(rank.stage * parts + rank.part, file.contents.file) for rank, file in files.items()],
        joined,
        objects=model.objects | {name: kind for file in files.values() for name, kind in file.others.items()},
        rules=rules,
        warnings=_warnings(directory, first),
        contents=contents,
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


def _locations(directory: Place, listing: Sequence[str]) -> tuple[dict[_Rank, Place], set[str]]:
    """Return the files of the ranks in order, and the names of files that have only states of the optimizer."""
    inside: dict[str, set[str]] = {}
    for path in directory.files(depth=2):
        parts = path.relative_to(str(directory)).parts
        if len(parts) == 2:
            inside.setdefault(parts[0], set()).add(parts[1])
    locations: dict[_Rank, Place] = {}
    states: set[str] = set()
    for match in filter(None, map(MEGATRON_RANKS.files.fullmatch, sorted(listing))):
        present = inside.get(match[0], set())
        states |= present.intersection(_STATES)
        if match["expert"]:
            _refuse_experts(directory, match[0])
        name = next((name for name in _FILES if name in present), None)
        if name is None:
            continue
        rank = _Rank(int(match["stage"] or 0), int(match["part"]))
        if rank in locations:
            raise SourceError(f"{directory} has part {rank.part} of stage {rank.stage} twice", code="duplicate-rank")
        locations[rank] = directory / match[0] / name
    if not locations:
        raise SourceError(f"{directory} has no {_FILES[0]} of any rank", code="no-checkpoint")
    return dict(sorted(locations.items())), states


def _refuse_experts(directory: Place, why: str) -> None:
    raise SourceError(
        f"{directory} is of expert-parallel ranks", code="unsupported-layout",
        facts=[f"{why}; no file says which rank has which expert"],
        hint="save it with --ckpt-format torch_dist, which reshard reads",
    )  # fmt: skip


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
        arguments = Arguments.of(values.get("args"))
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
        saved.path, arguments, _number(values.get("iteration")), _number(values.get("checkpoint_version")), chunks,
        contents, others, has_states,
    )  # fmt: skip


def _number(value: object) -> float | None:
    return value if isinstance(value, int | float) else None


def _agreed(directory: Place, files: Mapping[_Rank, _RankFile]) -> _RankFile:
    """Return the first file; refuse ranks that are missing or of another checkpoint."""
    first = next(iter(files.values()))
    for file in files.values():
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
    if (arguments.expert_model_parallel_size or 1) > 1:
        _refuse_experts(directory, f"expert_model_parallel_size is {arguments.expert_model_parallel_size}")
    counts = arguments.pipeline_model_parallel_size or 1, arguments.tensor_model_parallel_size
    if surplus := [rank for rank in files if rank.stage >= counts[0] or rank.part >= counts[1]]:
        raise SourceError(
            f"{directory} has part {surplus[0].part} of stage {surplus[0].stage}", code="no-such-rank",
            facts=[f"args say {counts[1]} tensor-parallel parts and {counts[0]} pipeline stages"],
        )  # fmt: skip
    expected = (_Rank(stage, part) for stage in range(counts[0]) for part in range(counts[1]))
    if missing := list(islice((rank for rank in expected if rank not in files), 8)):
        texts = [f"part {part} of stage {stage}" for stage, part in missing]
        raise SourceError(
            f"{directory} has no file of {names(texts, most=3)}", code="missing-ranks",
            facts=[f"args say {counts[1]} tensor-parallel parts and {counts[0]} pipeline stages"],
        )  # fmt: skip
    virtual = arguments.virtual_pipeline_model_parallel_size or 1
    if (first.chunks or 1) != virtual:
        raise SourceError(
            f"{first.path} has {first.chunks or 1} models; args say {virtual} virtual stages", code="files-disagree"
        )
    return first


class _Model:
    """The tensors of all ranks, under their names in the whole model.

    Attributes:
        parts: by name, and by virtual stage and stage, the parts of a tensor.
        unreadable: the names of tensors that cannot be read, with the reason.
        objects: descriptions of values that are not read.
    """

    def __init__(self, directory: Place, files: Mapping[_Rank, _RankFile], arguments: Arguments) -> None:
        self.parts: dict[str, dict[tuple[int, ...], dict[int, FileTensor]]] = {}
        self.unreadable: dict[str, str] = {}
        self.objects: dict[str, str] = {}
        self._offsets = _offsets(directory, files, arguments)
        for number, (rank, file) in enumerate(files.items()):
            self._add(number, rank, file.contents)
        for name in self.unreadable:
            self.parts.pop(name, None)
        self._tie(arguments)

    def _add(self, number: int, rank: _Rank, contents: Contents) -> None:
        """Add the tensors of a file."""
        tensors, refused = contents.parts(number)
        for local, tensor in tensors.items():
            chunk, name = self._name(local, rank.stage)
            if _is_extra(name):
                self.objects[name] = "a state of a layer of Transformer Engine, which is not read"
                continue
            self.parts.setdefault(name, {}).setdefault((chunk, rank.stage), {})[rank.part] = tensor
        for local, reason in refused.items():
            _, name = self._name(local, rank.stage)
            (self.objects if _is_extra(name) else self.unreadable).setdefault(name, reason)
        for local, kind in contents.objects.items():
            name = self._name(local, rank.stage)[1]
            if name and not (_is_extra(name) and kind == _NOTHING):  # not of an empty model, or without a state
                self.objects.setdefault(name, kind)

    def _name(self, local: str, stage: int) -> tuple[int, str]:
        """Return the virtual stage, and the name in the whole model, of a name in a file."""
        chunk, name = _split(local)
        match = _LAYER.fullmatch(name)
        if not match:
            return chunk, name
        layer = int(match["layer"]) + self._offsets[match["stack"]][chunk, stage]
        return chunk, f"{match['stack']}.{layer}.{match['rest']}"

    def _tie(self, arguments: Arguments) -> None:
        """Make the output layer a replica of the embedding if the two are tied."""
        embeddings = [name for name in self.parts if f".{name}".endswith(_EMBEDDING)]
        endings = (_TIED_HEAD,) if arguments.untie_embeddings_and_output_weights else (_TIED_HEAD, _HEAD)
        heads = [name for name in self.parts if f".{name}".endswith(endings)] if len(embeddings) == 1 else []
        for number, head in enumerate(heads):
            copies = self.parts.pop(head)
            self.parts[embeddings[0]].update(((*place, number), parts) for place, parts in copies.items())


def _split(local: str) -> tuple[int, str]:
    """Return the virtual stage of a name in a file, and the name without the key of its model.

    >>> _split("model1.decoder.layers.0.w"), _split("model.w")
    ((1, 'decoder.layers.0.w'), (0, 'w'))
    """
    key, _, name = local.partition(".")
    return int(key.removeprefix("model") or 0), name


def _is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == "_extra_state"


def _offsets(
    directory: Place, files: Mapping[_Rank, _RankFile], arguments: Arguments
) -> dict[str, dict[tuple[int, int], int]]:
    """Return the number of the first layer of each virtual stage of each stage, for each stack of layers."""
    layers: dict[str, dict[tuple[int, int], set[int]]] = {}
    for rank, file in files.items():
        for local in (*file.contents.tensors, *file.contents.refused, *file.contents.objects):
            chunk, name = _split(local)
            if match := _LAYER.fullmatch(name):
                by_place = layers.setdefault(match["stack"], {})
                by_place.setdefault((chunk, rank.stage), set()).add(int(match["layer"]))
    faults = Faults(str(directory))
    offsets: dict[str, dict[tuple[int, int], int]] = {}
    totals: dict[str, int] = {}
    for stack, by_place in layers.items():
        offset = 0
        for place, numbers in sorted(by_place.items()):
            offsets.setdefault(stack, {})[place] = offset
            offset += len(numbers)
            if max(numbers) != len(numbers) - 1:
                fault = f"has {len(numbers)} layers in stage {place[1]}, which are not numbered from 0 on"
                faults.add(f"{stack!r:.200}", fault, code="missing-layers")
        totals[stack] = offset
    of_model = [total for stack, total in totals.items() if _OF_MODEL.match(stack) and not stack.startswith("mtp")]
    expected = arguments.num_layers
    if len(of_model) == 1 and expected not in {None, of_model[0]}:
        faults.add("the model", f"has {of_model[0]} layers; args say {expected}", code="missing-layers")
    faults.raise_if_any(SourceError)
    return offsets


def _rule(name: str, file: _RankFile) -> str | None:
    """Return the rule of a tensor, by the table and the arguments."""
    arguments = file.arguments
    if "key_value." in name and (file.version or 0) < 1:
        return None  # the parts have queries, keys and values one after the other
    if ".experts." in name and arguments.expert_tensor_parallel_size not in {
        None,
        arguments.tensor_model_parallel_size,
    }:
        return None
    if arguments.is_gated and _FIRST_LAYER.search(name):
        return GATE_AND_UP if _OF_MODEL.match(name) else None
    return rule_in(MEGATRON, name)


def _check(directory: Place, joined: JoinedParts, cuts: Cuts, arguments: Arguments) -> None:
    """Compare the shapes of tensors that are joined by the table with the arguments."""
    shapes = arguments.shapes()
    expected: dict[str, tuple[int | None, ...]] = {}
    for name in joined.tensors:
        if _OF_MODEL.match(name) and not cuts.is_ruled(name):
            dotted = f".{name}"
            expected.update((name, shape) for ending, shape in shapes.items() if dotted.endswith(ending))
    check_shapes(directory, joined.tensors, expected, "args")


def _warnings(directory: Place, file: _RankFile) -> list[str]:
    number = iteration_of(directory)
    if number is None or file.iteration in {None, number}:
        return []
    return [f"{directory} is of iteration {file.iteration:g}, according to its files"]
