"""The numbers of layers and experts in the whole model, which the files of ranks count from 0 each.

* The layers of a virtual stage of a stage follow those of all before. The order is that of the arguments; the embedding
  has to be before all layers, and the head and the last norm behind them.
* The experts of an expert-parallel rank follow those of all ranks before.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from reshard.errors import Faults, SourceError, names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.core.storage.places import Place
    from reshard.formats.torch_save.saves import Contents
    from reshard.kits.training.arguments import Arguments

OF_MODEL = re.compile(r"(?:language_model\.)?(?:embedding|encoder|decoder|transformer|output_layer|mtp)\.")
"""The beginnings of names whose sizes are in the arguments."""

EMBEDDING, HEAD = ".word_embeddings.weight", ".output_layer.weight"
_LAST_NORM = ".final_layernorm.weight"
_BACKWARDS = "dualpipev"
_LAYER = re.compile(r"(?P<stack>(?:.*?\.)?layers)\.(?P<layer>0|[1-9]\d{0,8})\.(?P<rest>.+)", re.DOTALL)
_EXPERT = re.compile(
    r"(?P<module>.*\.experts\.)(?P<before>local_experts\.|linear_fc[12]\.(?:weight|bias))(?P<number>0|[1-9]\d{0,8})"
    r"(?P<after>\..+)?",
    re.DOTALL,
)

Position = tuple[int, int]
"""A virtual stage of a stage: its number in the stage, and the stage, or its opposite if it runs backwards."""


class Rank(NamedTuple):
    """The pipeline stage of a rank, its tensor-parallel part, and its expert-parallel rank."""

    stage: int
    part: int
    expert: int = 0

    def __str__(self) -> str:
        of_expert = f" of expert-parallel rank {self.expert}" if self.expert else ""
        return f"part {self.part} of stage {self.stage}{of_expert}"


class Mesh(NamedTuple):
    """The numbers of stages, of tensor-parallel parts, of expert-parallel ranks, and of the parts of an expert.

    The second virtual stages run through the pipeline backwards if `is_backwards` is true.
    """

    stages: int
    parts: int
    experts: int
    expert_parts: int
    is_backwards: bool

    @classmethod
    def of(cls, arguments: Arguments) -> Mesh:
        """Return the mesh that arguments state; an unknown size is 1."""
        parts = arguments["tensor_model_parallel_size"] or 1
        return cls(
            arguments["pipeline_model_parallel_size"] or 1, parts, arguments["expert_model_parallel_size"] or 1,
            arguments["expert_tensor_parallel_size"] or parts, arguments["schedules_method"] == _BACKWARDS,
        )  # fmt: skip


class Numbering:
    """Names in the whole model by those in files.

    Attributes:
        mesh: the mesh that the arguments state.
    """

    def __init__(self, directory: Place, files: Mapping[Rank, Contents], arguments: Arguments) -> None:
        """Count the layers and experts of all files.

        Args:
            directory: the directory, for messages.
            files: the contents of each rank's file; names begin with the key of a model, such as `model1`.
            arguments: the arguments of the training.

        Raises:
            SourceError: layers or experts are missing, or contradict the arguments; all faults at once.
        """
        self._arguments, self.mesh = arguments, Mesh.of(arguments)
        # Of each stack: its layers by virtual stage, and of each layer, whether tensors of an MLP are of experts.
        self._stacks: dict[str, dict[Position, dict[int, set[bool]]]] = {}
        self._ends: dict[str, set[Position]] = {}
        self._experts: dict[tuple[Rank, int, str], set[int]] = {}
        self._first_layers: dict[tuple[str, Position], int] = {}
        for rank, contents in files.items():
            for local in (*contents.tensors, *contents.refused, *contents.objects):
                self._add(local, rank)
        self._experts_per_rank = 1 + max((max(numbers) for numbers in self._experts.values()), default=-1)
        faults = Faults(str(directory))
        self._check_experts(faults)
        self._count_layers(faults)
        self._check_layers(faults)
        faults.raise_if_any(SourceError)

    def name(self, local: str, rank: Rank) -> tuple[int, str]:
        """Return the virtual stage, and the name in the whole model, of a name in a file."""
        chunk, name = _split(local)
        if match := _LAYER.fullmatch(name):
            layer = int(match["layer"]) + self._first_layers[match["stack"], self._position(chunk, rank)]
            name = f"{match['stack']}.{layer}.{match['rest']}"
        if match := _EXPERT.fullmatch(name):
            number = int(match["number"]) + rank.expert * self._experts_per_rank
            name = f"{match['module']}{match['before']}{number}{match['after'] or ''}"
        return chunk, name

    def _position(self, chunk: int, rank: Rank) -> Position:
        return chunk, -rank.stage if chunk and self.mesh.is_backwards else rank.stage

    def _add(self, local: str, rank: Rank) -> None:
        """Note the layer and the expert of a name in a file."""
        chunk, name = _split(local)
        position = self._position(chunk, rank)
        if match := _LAYER.fullmatch(name):
            layers = self._stacks.setdefault(match["stack"], {}).setdefault(position, {})
            of_mlp = layers.setdefault(int(match["layer"]), set())
            if ".mlp." in name:
                of_mlp.add(is_of_expert(name))
        elif OF_MODEL.match(name) and f".{name}".endswith((EMBEDDING, HEAD, _LAST_NORM)):
            self._ends.setdefault(name, set()).add(position)
        if match := _EXPERT.fullmatch(name):
            self._experts.setdefault((rank, chunk, match["module"]), set()).add(int(match["number"]))

    def _check_experts(self, faults: Faults) -> None:
        """Check that each module has the same number of experts."""
        ranks, count, expected = self.mesh.experts, self._experts_per_rank, self._arguments["num_experts"]
        for (rank, _, module), numbers in self._experts.items():
            if len(numbers) < count:
                faults.add(
                    f"{module!r:.200}", f"has experts {names(sorted(numbers))} in {rank}; others have {count}",
                    code="missing-experts",
                )  # fmt: skip
        if count and expected not in {None, ranks * count}:
            faults.add(
                "the model", f"has {count} experts in each of {ranks} ranks; args say num_experts {expected}",
                code="missing-experts",
            )  # fmt: skip

    def _count_layers(self, faults: Faults) -> None:
        """Number the layers of each stack on."""
        for stack, by_position in self._stacks.items():
            first = 0
            for position, layers in sorted(by_position.items()):
                self._first_layers[stack, position] = first
                first += len(layers)
                if max(layers) >= len(layers):
                    stage = abs(position[1])
                    fault = f"has {len(layers)} layers in stage {stage}, which are not numbered from 0 on"
                    faults.add(f"{stack!r:.200}", fault, code="missing-layers")

    def _check_layers(self, faults: Faults) -> None:
        """Compare the layers with the arguments, if the model has one stack of them, and their order with its ends."""
        counts = {stack: sum(map(len, by_position.values())) for stack, by_position in self._stacks.items()}
        further = sum(count for stack, count in counts.items() if stack.startswith("mtp"))
        of_model = [stack for stack in counts if OF_MODEL.match(stack) and not stack.startswith("mtp")]
        expected, of_mtp = self._arguments["num_layers"], self._arguments["mtp_num_layers"]
        if of_mtp not in {None, further}:
            fault = f"has {further} layers of mtp; args say mtp_num_layers {of_mtp}"
            faults.add("the model", fault, code="missing-layers")
        if len(of_model) != 1:
            return
        (stack,) = of_model
        if expected not in {None, counts[stack]}:
            faults.add("the model", f"has {counts[stack]} layers; args say {expected}", code="missing-layers")
        self._check_kinds(stack, faults)
        positions = self._stacks[stack]
        for name, places in self._ends.items():
            is_embedding = f".{name}".endswith(EMBEDDING)
            if min(places) > min(positions) if is_embedding else max(places) < max(positions):
                where, schedule = "behind" if is_embedding else "before", self._arguments["schedules_method"]
                faults.add(
                    f"tensor {name!r:.200}", f"is {where} a layer by the order of schedules_method {schedule} in args",
                    code="files-disagree", hint="reshard reads stages in turn, interleaved ones and dualpipev",
                )  # fmt: skip

    def _check_kinds(self, stack: str, faults: Faults) -> None:
        """Compare which layers have experts with the arguments, which shows layers under wrong numbers."""
        for position, layers in self._stacks[stack].items():
            for layer, of_mlp in layers.items():
                number = layer + self._first_layers[stack, position]
                if of_mlp and self._has_experts(number) not in {None, True in of_mlp}:
                    kind = "experts" if True in of_mlp else "no experts"
                    faults.add(
                        f"layer {number}", f"has {kind}; args say the opposite (moe_layer_freq)", code="missing-experts"
                    )

    def _has_experts(self, layer: int) -> bool | None:
        """Return whether the arguments say that a layer has experts; None if unknown."""
        frequency = self._arguments["moe_layer_freq"]
        if self._arguments["num_experts"] is None or not isinstance(frequency, int | list):
            return None
        if isinstance(frequency, list):
            return bool(frequency[layer]) if layer < len(frequency) else None
        return frequency > 0 and layer % frequency == 0 and layer >= (self._arguments["first_k_dense_replace"] or 0)


def is_of_expert(name: str) -> bool:
    """Return whether a tensor is of one of several experts, or of all."""
    return ".experts." in name


def is_grouped(name: str) -> bool:
    """Return whether a tensor has several experts in it."""
    return is_of_expert(name) and not _EXPERT.fullmatch(name)


def is_extra(name: str) -> bool:
    """Return whether a value is a state of a layer of Transformer Engine, which is no weight."""
    return name.endswith("._extra_state")


def _split(local: str) -> tuple[int, str]:
    """Return the virtual stage of a name in a file, and the name without the key of its model.

    >>> _split("model1.decoder.layers.0.w"), _split("model.w")
    ((1, 'decoder.layers.0.w'), (0, 'w'))
    """
    key, _, name = local.partition(".")
    return int(key.removeprefix("model") or 0), name
