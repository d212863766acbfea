"""The tensors of all ranks of Megatron-LM's older format, under their names in the whole model.

* Layers are numbered from 0 in each file. The layers of a virtual stage of a stage follow those of all before, so that
  their numbers in the whole model follow from the numbers of layers. The order is that of the arguments; the embedding
  has to be before all layers, and the head behind them.
* Experts are numbered from 0 in each file, too. Those of an expert-parallel rank follow those of all ranks before.
  Tensors that are not of experts are the same in all expert-parallel ranks.
* The first layer of an MLP has the parts of a gate and of an up projection if it has twice the rows that the second has
  columns.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from reshard.errors import Faults, SourceError, names
from reshard.kits.parts.cuts import GATE_AND_UP, MEGATRON, rule_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from reshard.core.storage.places import Place
    from reshard.formats.torch_save.saves import Contents
    from reshard.kits.torch.file import FileTensor
    from reshard.kits.training.arguments import Arguments

OF_MODEL = re.compile(r"(?:language_model\.)?(?:embedding|encoder|decoder|transformer|output_layer|mtp)\.")
"""The beginnings of names whose sizes are in the arguments."""

_NOTHING = "a pickled NoneType, which is not read"
_LAYER = re.compile(r"(?P<stack>(?:.*?\.)?layers)\.(?P<layer>0|[1-9]\d{0,8})\.(?P<rest>.+)", re.DOTALL)
_EXPERT = re.compile(
    r"(?P<module>.*\.experts\.)(?P<before>local_experts\.|linear_fc[12]\.(?:weight|bias))(?P<number>0|[1-9]\d{0,8})"
    r"(?P<after>\..+)?",
    re.DOTALL,
)
_FIRST_LAYER = re.compile(r"\.(?:linear_fc1|dense_h_to_4h)\.(?:weight|bias)\d*\Z")
_SECOND_LAYERS = {"linear_fc1": "linear_fc2", "dense_h_to_4h": "dense_4h_to_h"}
_TIED_HEAD, _HEAD, _EMBEDDING = ".word_embeddings_for_head.weight", ".output_layer.weight", ".word_embeddings.weight"
_LAST_NORM = ".final_layernorm.weight"


class Rank(NamedTuple):
    """The pipeline stage of a rank, its tensor-parallel part, and its expert-parallel rank."""

    stage: int
    part: int
    expert: int = 0


class RankModel(NamedTuple):
    """The models of a rank's file.

    Attributes:
        path: the file.
        contents: the models; names begin with the key of the model.
    """

    path: str
    contents: Contents


class Model:
    """The tensors of all ranks.

    Attributes:
        parts: by name, the replicas of a tensor that is not of an expert, each with its parts.
        experts: the same for tensors of experts, which may be cut into other parts.
        experts_of_layer: the number of experts of a layer; 0 without any.
        unreadable: the names of tensors that cannot be read, with the reason.
        objects: descriptions of values that are not read.
    """

    def __init__(self, directory: Place, files: Mapping[Rank, RankModel], arguments: Arguments) -> None:
        self.unreadable: dict[str, str] = {}
        self.objects: dict[str, str] = {}
        self._arguments = arguments
        self._offsets = _offsets(directory, files, arguments)
        self._experts = _experts_per_rank(directory, files, arguments)
        self.experts_of_layer = self._experts * (arguments.expert_model_parallel_size or 1)
        self._copies: dict[str, dict[tuple[int, ...], dict[int, list[FileTensor]]]] = {}
        for number, (rank, file) in enumerate(files.items()):
            self._add(number, rank, file.contents)
        for name in self.unreadable:
            self._copies.pop(name, None)
        self._check_layers_with_experts(directory)
        self._tie()
        self.parts = {name: [*_complete_sets(places)] for name, places in self._copies.items()}
        self.experts = {name: self.parts.pop(name) for name in [*self.parts] if is_of_expert(name)}

    @property
    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return [*self.parts, *self.experts, *self.unreadable]

    def rule(self, name: str, version: float | None) -> str | None:
        """Return how a tensor is cut, by the table, the shapes and the arguments.

        Args:
            name: the tensor.
            version: the version of the format.
        """
        if "key_value." in name and (version or 0) < 1:
            return None  # the parts have queries, keys and values one after the other
        if is_of_expert(name) and not _EXPERT.fullmatch(name):
            return None
        if _FIRST_LAYER.search(name):
            return self._first_rule(name)
        return rule_in(MEGATRON, name)

    def _first_rule(self, name: str) -> str | None:
        """Return how the first layer of an MLP is cut; None if it is unknown whether it has a gate."""
        is_gated = self.has_gate(name)
        if is_gated is None:
            is_gated = self._arguments.is_gated
        has_interleaved = self._arguments.moe_mlp_glu_interleave_size and is_of_expert(name)
        if is_gated is None or (is_gated and (has_interleaved or not OF_MODEL.match(name))):
            return None
        return GATE_AND_UP if is_gated else rule_in(MEGATRON, name)

    def has_gate(self, name: str) -> bool | None:
        """Return whether the first layer of an MLP has rows for a gate, by its shapes; None if they do not show it."""
        if not _FIRST_LAYER.search(name):
            return None
        weight = name.replace(".bias", ".weight")
        second = weight
        for before, after in _SECOND_LAYERS.items():
            second = second.replace(f".{before}.", f".{after}.")
        first_shape, second_shape = (self._shape(each) for each in (weight, second))
        if len(first_shape) != 2 or len(second_shape) != 2 or not second_shape[1]:
            return None
        return {2 * second_shape[1]: True, second_shape[1]: False}.get(first_shape[0])

    def _shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the parts of a tensor; () if there are none."""
        for parts in self.parts.get(name, self.experts.get(name, [])):
            for part in parts.values():
                return part.shape
        return ()

    def _add(self, number: int, rank: Rank, contents: Contents) -> None:
        """Add the tensors of a file."""
        tensors, refused = contents.parts(number)
        for local, tensor in tensors.items():
            chunk, name = self._name(local, rank)
            if _is_extra(name):
                self.objects[name] = "a state of a layer of Transformer Engine, which is not read"
                continue
            if reason := self._reason(name):
                self.unreadable[name] = reason
            part = rank.part % self._expert_parts if is_of_expert(name) else rank.part
            place = self._copies.setdefault(name, {}).setdefault((chunk, rank.stage), {})
            place.setdefault(part, []).append(tensor)
        for local, reason in refused.items():
            _, name = self._name(local, rank)
            (self.objects if _is_extra(name) else self.unreadable).setdefault(name, reason)
        for local, kind in contents.objects.items():
            name = self._name(local, rank)[1]
            if name and not (_is_extra(name) and kind == _NOTHING):  # not of an empty model, or without a state
                self.objects.setdefault(name, kind)

    def _check_layers_with_experts(self, directory: Place) -> None:
        """Compare which layers have experts with the arguments, which shows layers under wrong numbers."""
        of_stack: dict[str, dict[int, bool]] = {}
        for name in self._copies:
            match = _LAYER.fullmatch(name)
            if match and OF_MODEL.match(name) and not name.startswith("mtp") and ".mlp." in name:
                has_experts = of_stack.setdefault(match["stack"], {})
                has_experts[int(match["layer"])] = has_experts.get(int(match["layer"]), False) or is_of_expert(name)
        faults = Faults(str(directory))
        for number, is_sparse in next(iter(of_stack.values()), {}).items() if len(of_stack) == 1 else ():
            expected = self._arguments.has_experts(number)
            if expected not in {None, is_sparse}:
                fault = f"has {'experts' if is_sparse else 'no experts'}; args say the opposite (moe_layer_freq)"
                faults.add(f"layer {number}", fault, code="missing-experts")
        faults.raise_if_any(SourceError)

    @property
    def _expert_parts(self) -> int:
        return expert_parts(self._arguments) or self._arguments.tensor_model_parallel_size or 1

    def _reason(self, name: str) -> str:
        """Return why a tensor of experts cannot be joined, or ""."""
        if not is_of_expert(name):
            return ""
        parts, experts = self._arguments.tensor_model_parallel_size or 1, self._arguments.expert_model_parallel_size
        if expert_parts(self._arguments) is None:
            size = self._arguments.expert_tensor_parallel_size
            return f"is cut by expert_tensor_parallel_size {size}, and tensor_model_parallel_size is {parts}"
        if not _EXPERT.fullmatch(name) and max(parts, experts or 1) > 1:
            return "has several experts in one tensor, and its parts are not joined"
        return ""

    def _name(self, local: str, rank: Rank) -> tuple[int, str]:
        """Return the virtual stage, and the name in the whole model, of a name in a file."""
        chunk, name = _split(local)
        if match := _LAYER.fullmatch(name):
            layer = int(match["layer"]) + self._offsets[match["stack"]][chunk, rank.stage]
            name = f"{match['stack']}.{layer}.{match['rest']}"
        if match := _EXPERT.fullmatch(name):
            number = int(match["number"]) + rank.expert * self._experts
            name = f"{match['module']}{match['before']}{number}{match['after'] or ''}"
        return chunk, name

    def _tie(self) -> None:
        """Make the output layer a replica of the embedding if the two are tied."""
        embeddings = [name for name in self._copies if f".{name}".endswith(_EMBEDDING)]
        is_tied = self._arguments.untie_embeddings_and_output_weights is False
        endings = (_TIED_HEAD, _HEAD) if is_tied else (_TIED_HEAD,)
        heads = [name for name in self._copies if f".{name}".endswith(endings)] if len(embeddings) == 1 else []
        for number, head in enumerate(heads):
            copies = self._copies.pop(head)
            self._copies[embeddings[0]].update(((*place, number), parts) for place, parts in copies.items())


def expert_parts(arguments: Arguments) -> int | None:
    """Return into how many tensor-parallel parts experts are cut; None if the ranks do not show who has which part."""
    parts = arguments.tensor_model_parallel_size or 1
    of_experts = arguments.expert_tensor_parallel_size or parts
    return None if parts % of_experts else of_experts


def is_of_expert(name: str) -> bool:
    """Return whether a tensor is of one of several experts."""
    return ".experts." in name


def _complete_sets(places: Mapping[tuple[int, ...], Mapping[int, list[FileTensor]]]) -> Iterator[dict[int, FileTensor]]:
    """Yield the replicas of a tensor, each with its parts by number."""
    for copies in places.values():
        for number in range(min(map(len, copies.values()))):
            yield {part: tensors[number] for part, tensors in copies.items()}


def _split(local: str) -> tuple[int, str]:
    """Return the virtual stage of a name in a file, and the name without the key of its model.

    >>> _split("model1.decoder.layers.0.w"), _split("model.w")
    ((1, 'decoder.layers.0.w'), (0, 'w'))
    """
    key, _, name = local.partition(".")
    return int(key.removeprefix("model") or 0), name


def _is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == "_extra_state"


def _local_names(file: RankModel) -> Iterator[tuple[int, str]]:
    """Yield the virtual stage and the name of each value in a file."""
    yield from map(_split, (*file.contents.tensors, *file.contents.refused, *file.contents.objects))


def _offsets(
    directory: Place, files: Mapping[Rank, RankModel], arguments: Arguments
) -> dict[str, dict[tuple[int, int], int]]:
    """Return the number of the first layer of each virtual stage of each stage, for each stack of layers."""
    layers: dict[str, dict[tuple[int, int], set[int]]] = {}
    ends: dict[str, set[tuple[int, int]]] = {}
    for rank, file in files.items():
        for chunk, name in _local_names(file):
            if match := _LAYER.fullmatch(name):
                by_place = layers.setdefault(match["stack"], {})
                by_place.setdefault((chunk, rank.stage), set()).add(int(match["layer"]))
            elif OF_MODEL.match(name) and f".{name}".endswith((_EMBEDDING, _HEAD, _LAST_NORM)):
                ends.setdefault(name, set()).add((chunk, rank.stage))

    def order(place: tuple[int, int]) -> tuple[int, int]:
        chunk, stage = place
        return chunk, -stage if arguments.is_backwards and chunk else stage

    faults = Faults(str(directory))
    offsets: dict[str, dict[tuple[int, int], int]] = {}
    for stack, by_place in layers.items():
        offset = 0
        for place in sorted(by_place, key=order):
            numbers = by_place[place]
            offsets.setdefault(stack, {})[place] = offset
            offset += len(numbers)
            if max(numbers) != len(numbers) - 1:
                fault = f"has {len(numbers)} layers in stage {place[1]}, which are not numbered from 0 on"
                faults.add(f"{stack!r:.200}", fault, code="missing-layers")
    counted = {stack: {place: len(numbers) for place, numbers in places.items()} for stack, places in layers.items()}
    _check_counts(counted, arguments, faults)
    faults.raise_if_any(SourceError)
    orders = {stack: [*map(order, places)] for stack, places in layers.items()}
    for name, places in ends.items():
        _check_end(directory, name, sorted(map(order, places)), orders, arguments)
    return offsets


def _check_counts(counted: Mapping[str, Mapping[tuple[int, int], int]], arguments: Arguments, faults: Faults) -> None:
    """Compare the numbers of layers with the arguments."""
    of_model = [stack for stack in counted if OF_MODEL.match(stack) and not stack.startswith("mtp")]
    further = sum(sum(by_place.values()) for stack, by_place in counted.items() if stack.startswith("mtp"))
    if arguments.mtp_num_layers not in {None, further}:
        fault = f"has {further} layers of mtp; args say mtp_num_layers {arguments.mtp_num_layers}"
        faults.add("the model", fault, code="missing-layers")
    if len(of_model) != 1:
        return
    (stack,) = of_model
    total, expected = sum(counted[stack].values()), arguments.num_layers
    if expected not in {None, total}:
        faults.add("the model", f"has {total} layers; args say {expected}", code="missing-layers")
        return
    why, by_place = arguments.layers_by_place()
    for place, count in by_place.items():
        if counted[stack].get(place, 0) != count:
            fault = (
                f"has {counted[stack].get(place, 0)} layers in virtual stage {place[0]} of stage {place[1]}; "
                f"args say {count} ({why})"
            )
            faults.add(f"{stack!r:.200}", fault, code="missing-layers")


def _check_end(
    directory: Place,
    name: str,
    places: list[tuple[int, int]],
    orders: Mapping[str, list[tuple[int, int]]],
    arguments: Arguments,
) -> None:
    """Check that an embedding is before all layers, and a head or the last norm behind them."""
    prefix = name.removesuffix(_LAST_NORM.removeprefix(".")) if name.endswith(_LAST_NORM) else ""
    layers = [
        place
        for stack, of_stack in orders.items()
        for place in of_stack
        if OF_MODEL.match(stack) and not stack.startswith("mtp") and stack.startswith(prefix)
    ]
    is_first = f".{name}".endswith(_EMBEDDING)
    if not layers or (places[0] <= min(layers) if is_first else places[-1] >= max(layers)):
        return
    (chunk, stage), (of_chunk, of_stage) = (places[0], min(layers)) if is_first else (places[-1], max(layers))
    raise SourceError(
        f"{directory} has {name} in virtual stage {chunk} of stage {abs(stage)}, and layers "
        f"{'before' if is_first else 'behind'} it, in virtual stage {of_chunk} of stage {abs(of_stage)}",
        code="files-disagree",
        facts=[f"the order of stages follows from schedules_method {arguments.schedules_method} in args"],
        hint="reshard reads stages in turn, interleaved ones, and those of dualpipev",
    )


def _experts_per_rank(directory: Place, files: Mapping[Rank, RankModel], arguments: Arguments) -> int:
    """Return the number of experts that each file has of each layer with experts; 0 without any."""
    faults = Faults(str(directory))
    counts: dict[int, str] = {}
    for rank, file in files.items():
        numbers: dict[tuple[int, str], set[int]] = {}
        for chunk, name in _local_names(file):
            if (match := _EXPERT.fullmatch(name)) and not _is_extra(name):
                numbers.setdefault((chunk, match["module"]), set()).add(int(match["number"]))
        for (_, module), present in numbers.items():
            if max(present) != len(present) - 1:
                fault = f"has {len(present)} experts, which are not numbered from 0 on ({names(sorted(present))})"
                faults.add(f"{module!r:.200} of {file.path}", fault, code="missing-experts")
            counts.setdefault(len(present), f"{module!r:.200} of rank {rank.expert}")
    if len(counts) > 1:
        texts = [f"{count} in {where}" for count, where in counts.items()]
        faults.add("the model", f"has different numbers of experts: {names(texts, most=2)}", code="missing-experts")
    ranks, count = arguments.expert_model_parallel_size or 1, next(iter(counts), 0)
    if count and arguments.num_experts not in {None, ranks * count}:
        fault = f"has {count} experts in each of {ranks} expert-parallel ranks; args say num_experts "
        faults.add("the model", f"{fault}{arguments.num_experts}", code="missing-experts")
    faults.raise_if_any(SourceError)
    return count
