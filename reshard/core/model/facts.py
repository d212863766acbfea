"""Facts about a checkpoint other than its tensors: how it was opened or derived, and the metadata of its format."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from reshard.core.layout.arrangement import Arrangement
    from reshard.core.layout.layout import Layout
    from reshard.core.model.checkpoint import Checkpoint, Tensor
    from reshard.core.rank_files import Step
    from reshard.rules.lora import LoRA
    from reshard.rules.rules import Rules


ARRAYS = "(arrays)"
"""The root of a checkpoint of no files, to which arrays are assigned."""

_TITLES = {"astype": "converted tensors", "dequantize": "dequantized weights", "scale": "scaled tensors"}
"""Nouns for the kinds of computations, if they are not nouns."""


def computed_title(kind: str, titles: Sequence[str]) -> str:
    """Return the title of a computed checkpoint.

    >>> computed_title("average", ["a", "b", "c"])
    'average of a, b, c'
    """
    if kind == "assign":  # of nothing, or to a checkpoint
        return " and ".join(["arrays", *(title for title in titles if not title.endswith(ARRAYS))])
    return f"{_TITLES.get(kind, kind)} of {', '.join(titles)}"


class Object(NamedTuple):
    """An object that is not a tensor: opaque bytes that are copied unchanged.

    Attributes:
        path: the file.
        begin, nbytes: the range of its bytes in the file.
        problem: the reason if it cannot be read; else empty.
    """

    path: str = ""
    begin: int = 0
    nbytes: int = 0
    problem: str = ""


class SampleStats(NamedTuple):
    """Statistics of the content sampling done on open (`core.model.probe`).

    Attributes:
        tensors: number of tensors sampled.
        of_tensors: number of tensors with comparable files.
        copies: number of replicas compared by samples with the first one of their block.
        whole: number of these that were compared bit for bit, because they are small.
        of_copies: number of replicas in total, beyond the first of each block.
    """

    tensors: int
    of_tensors: int
    copies: int
    whole: int
    of_copies: int


class Origin(NamedTuple):
    """The origin of a derived checkpoint.

    Attributes:
        checkpoint: the original checkpoint, which has the same files.
        rules: the rules between the names and shapes of the two; None if these are the same.
        left_out: names of original tensors that the rules leave out.
        lora: the adapter that was merged into the weights first.
        ties: tensors that the rules join into one, by its name; samples of them were compared, and the first is read.
        merged: the names of the tensors with a merged adapter: of weights, and of their masters in the optimizer.
        side: the name in the rules of the derived side; empty without rules.
    """

    checkpoint: Checkpoint
    rules: Rules | None
    left_out: frozenset[str]
    lora: LoRA | None = None
    ties: tuple[tuple[str, tuple[Tensor, ...]], ...] = ()
    merged: frozenset[str] = frozenset()
    side: str = ""


DAMAGED = "is damaged"
"""The beginning of the reason why a tensor cannot be read if its bytes are not what was saved."""


class Computation(NamedTuple):
    """How the tensors of a checkpoint were computed from those of others.

    Attributes:
        kind: `average`, `dequantize` and so on.
        options: its options, as plain data.
        inputs: the checkpoints, in order.
    """

    kind: str
    options: Mapping[str, Any]
    inputs: tuple[Checkpoint, ...]


class Quantized(NamedTuple):
    """How the weights of a checkpoint are quantized.

    Attributes:
        method: the name of the method.
        file: the name of the file next to the tensors that says it; empty if their names show it.
        text: a sentence that says it.
        problem: why such weights are not dequantized here; else empty.
    """

    method: str
    file: str
    text: str
    problem: str


@dataclass(frozen=True, slots=True)
class Opening:
    """Options with which a checkpoint was opened, and facts found about its files.

    Attributes:
        stage: the pipeline stage if the source is one stage of a longer pipeline.
        elsewhere: names of tensors that only other stages have, if known.
        partial: whether files of some ranks may be missing.
        by_file: whether its files were named one by one; the root, the directory of the first, may have other files.
        lone_rank: why tensors that were opened as whole seem to be the blocks of one rank; else empty.
        numbered: why a file may be one rank's part of a model: others have another number and the same tensors; else
            empty.
        looked: statistics of the content sampling done on open, or None.
        step: the training step of the checkpoint, if the names of its files have one.
        computation: how its tensors were computed from other checkpoints; None if they are in files.
        rules: how the user says that tensor-parallel parts are cut, in a format that does not say it; by name or glob.
        states: the words before the names of weights that are optimizer states, if the format has them.
        quantized: how its weights are quantized; None if they are plain, or nothing tells.
        chunks: the chunks of lazy arrays, in the words of dask; None for the source's shards.
    """

    stage: int | None = None
    elsewhere: frozenset[str] = frozenset()
    partial: bool = False
    by_file: bool = False
    lone_rank: str = ""
    numbered: str = ""
    looked: SampleStats | None = None
    step: Step | None = None
    computation: Computation | None = None
    rules: Mapping[str, str] = field(default_factory=dict)
    states: frozenset[str] = frozenset()
    quantized: Quantized | None = None
    chunks: Any = None


@dataclass(frozen=True, slots=True)
class Extras:
    """Metadata of a format beyond names, shapes and byte ranges of tensors.

    Attributes:
        described_by: the metadata file, or the format, that lists the blocks; empty if a strategy defines them.
        arrangement: the layouts and ranks of tensors, as the metadata say; None if they say nothing.
        objects: objects of the program that wrote it, by name. Only targets of the same format, and zarr stores,
            receive them.
        beside: sidecar files that the training needs, by name, for the same targets as objects.
        common: the state of the training as JSON, which a program keeps beside the tensors; empty if there is none.
        files: the files beside the weights of the set that a store was made of, by name.
        shard_size: the most bytes of tensors in a file of the set that a store was made of; 0 if it was none.
        bound: tensors that only a target of the same format can hold, with the reason.
        paths: the dict keys and list indices under which each tensor was saved, if not only its name; None if they are
            unknown and not needed.
        model_config: the `config.json` for a Hugging Face set of these tensors, if it differs from the source's; else
            empty.
        arguments: the arguments of the training that Megatron-LM's files state, which rules are compared with; see
            `kits.training.arguments`.
    """

    described_by: str = ""
    arrangement: Arrangement | None = None
    objects: Mapping[str, Object] = field(default_factory=dict)
    beside: Mapping[str, Object] = field(default_factory=dict)
    common: str = ""
    files: Mapping[str, Object] = field(default_factory=dict)
    shard_size: int = 0
    bound: Mapping[str, str] = field(default_factory=dict)
    paths: Mapping[str, tuple[str | int, ...]] | None = field(default_factory=dict)
    model_config: bytes = b""
    arguments: Mapping[str, object] = field(default_factory=dict)

    def layout_of(self, name: str) -> Layout | None:
        """Return the layout of a tensor; None if it has none, or it is unknown."""
        arranged = self.arrangement.tensors.get(name) if self.arrangement else None
        return arranged.layout if arranged else None

    @property
    def has_layouts(self) -> bool:
        """Return whether the metadata give the layout of any tensor."""
        return self.arrangement is not None and any(arranged.meshes for arranged in self.arrangement.tensors.values())

    def without(self, names: Collection[str]) -> Extras:
        """Return the extras without some objects and bound tensors."""
        objects = {name: item for name, item in self.objects.items() if name not in names}
        bound = {name: reason for name, reason in self.bound.items() if name not in names}
        return replace(self, objects=objects, bound=bound)
