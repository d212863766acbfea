"""Options of a target that is a Checkpoint 2.0, and what a source says of them."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf, prod
from typing import TYPE_CHECKING, Any

from reshard.arguments import checked_fields
from reshard.core.model.entries import ShardFiles, wants
from reshard.core.options import Options, option
from reshard.core.runs import iteration_of
from reshard.core.storage.cipher import store_of
from reshard.core.storage.places import as_place
from reshard.core.storage.small import parse_json
from reshard.core.target import MAX_SHARD_BYTES, MOST_STEPS, check_size, check_step, one_after_the_other
from reshard.errors import Option, Text, UsageError
from reshard.formats.checkpoint2.names import COMMON, FILES
from reshard.strategy.names import TRAINING_STATE, optimizer_states

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.model.entries import SizedTensor

PREFIX = "checkpoint"
"""The default prefix of file names, as in mindformers' dynamic-graph mode."""

COMMON_KEYS = (
    "epoch_num", "step_num", "global_step", "loss_scale", "global_batch_size", "consumed_samples", "ckpt_status",
)  # fmt: skip
"""The keys of mindformers' `CommonInfo`, which refuses any other key; a training may leave out the last two."""

NOTES = {"format": "ms"}
_LONGEST_PREFIX = 200  # a file name may have 255 bytes


@checked_fields
@dataclass(frozen=True, slots=True)
class Checkpoint2(Options):
    """The files of a Checkpoint 2.0.

    These are `iteration_N/PREFIX-model-K-of.safetensors` and so on, `common.json`, `metadata.json` of blocks, and the
    tracker.

    Attributes:
        step: N, the number of steps done; by default the source's step.
        prefix: the prefix of file names, or `""`; by default the source's prefix, else `checkpoint`.
        max_shard_size: how many bytes of whole tensors a file may hold, unless one tensor has more. Blocks are in a
            file of weights and a file of states for each rank.
        common: the contents of `common.json`; by default the source's file, or made from the source's progress.

    >>> source = reshard.open("src_checkpoints", strategy="src_strategy.ckpt")
    >>> report = reshard.plan(source, "dst_strategy.ckpt", to="checkpoint2", target_step=4).run("run")
    >>> report.files[0]
    'iteration_00000004/checkpoint-model-0000000-0000004.safetensors'
    """

    step: int | None = option(
        "How many steps the training has done; TARGET/iteration_N is written, and the tracker names it.",
        "count",
        name="target_step",
        shown="what the source says",
    )
    prefix: str | None = option(
        "What names of files begin with: PREFIX-model-… and so on.",
        "text",
        shown="the source's, else checkpoint",
        metavar="PREFIX",
    )
    max_shard_size: int = option(
        "Most tensor bytes in a file of whole tensors. One tensor alone may have more.",
        "size",
        default=MAX_SHARD_BYTES,
        shown="4GB",
        whole=True,
    )
    common: str | None = None

    def __post_init__(self) -> None:
        check_size(self.max_shard_size)
        check_step(self.step)
        try:
            parse_common(self.common or "{}")
        except ValueError as error:
            fault = f"common is not a JSON object, as {COMMON} is"
            raise UsageError(fault, code="not-json", facts=[str(error)]) from None
        prefix = self.prefix or ""
        is_name = prefix.isprintable() and not prefix.startswith(".") and not {*"/\\{}"}.intersection(prefix)
        if not is_name or len(prefix.encode()) > _LONGEST_PREFIX:
            fault = f"prefix {prefix!r:.60} cannot begin a file name"
            raise UsageError(fault, code="bad-name", hint="give e.g. 'checkpoint'")

    def of(self, source: Checkpoint) -> Checkpoint2:
        """Return a copy with missing values filled in from a source.

        Raises:
            UsageError: the step is unknown.
        """
        progress = _progress(source)
        step = progress["global_step"] if self.step is None else self.step
        if step is None:
            raise UsageError(
                f"{source.root} does not say how many steps were done", code="missing-step",
                hint=Text("give ", Option("target_step")),
            )  # fmt: skip
        prefix, common = self.prefix, self.common
        if prefix is None:
            matches = (FILES.files.fullmatch(as_place(file.path).name) for file in source.files)
            prefix = next((match["prefix"].removesuffix("-") for match in matches if match), PREFIX)
        if common is None:
            made = dict.fromkeys(COMMON_KEYS) | progress | {"global_step": step}
            common = common_of(source) or json.dumps(made, indent=4)
        return replace(self, step=step, prefix=prefix, common=common)

    @property
    def directory(self) -> str:
        """Name of the iteration's directory."""
        return f"iteration_{self.step:08d}"

    def path(self, kind: str, extension: str) -> str:
        """Return the path of a kind of files, with placeholders for number and count."""
        prefix = f"{self.prefix}-" if self.prefix else ""
        return f"{self.directory}/{prefix}{kind}-{{number:07d}}-{{count:07d}}{extension}"

    def shard_files(self, tensors: Sequence[SizedTensor], extension: str) -> ShardFiles:
        """Fill one file after the other, files of weights first."""
        paths: list[str] = []
        file_of: dict[str, int] = {}
        for kind, kind_tensors in kinds_of(tensors):
            numbers = one_after_the_other(kind_tensors, self.max_shard_size)
            file_of |= {name: len(paths) + number for name, number in numbers.items()}
            count = max(numbers.values()) + 1
            paths += [self.path(kind, extension).format(number=number, count=count) for number in range(count)]
        return ShardFiles(tuple(paths), file_of, notes=NOTES)


def kinds_of(tensors: Sequence[SizedTensor]) -> list[tuple[str, list[SizedTensor]]]:
    """Return the tensors of each kind of file; text belongs to the weights."""
    states = optimizer_states({tensor.name for tensor in tensors})
    tensors_of: dict[str, list[SizedTensor]] = {"model": [], "opt": []}
    for tensor in tensors:
        is_state = tensor.name in states or tensor.name in TRAINING_STATE
        tensors_of["opt" if is_state and not tensor.is_text else "model"].append(tensor)
    return [(kind, kind_tensors) for kind, kind_tensors in tensors_of.items() if kind_tensors]


def parse_common(common: str) -> dict[str, Any]:
    """Parse `common.json`; raise `ValueError` if it is not a JSON object."""
    parsed = parse_json(common.encode(), [])
    if not isinstance(parsed, dict):
        raise ValueError("it is not an object")  # noqa: TRY004 -- it is about a file's contents
    return parsed


def common_of(source: Checkpoint) -> str:
    """Return the contents of `common.json` of a source, or of the one that a store was made of; "" without it."""
    with suppress(ValueError):  # any program may have written a store
        if source.extras.common and parse_common(source.extras.common):
            return source.extras.common
    return ""


def _progress(source: Checkpoint) -> dict[str, Any]:
    """Return the training's progress by key of `common.json`; unknown values are None.

    File names count steps from the beginning of the epoch.
    """
    progress: dict[str, Any] = {key: _number(source, key, int) for key in ("epoch_num", "step_num", "global_step")}
    progress["loss_scale"] = _number(source, "loss_scale", int, float)
    if source.opening.step is not None:
        epoch, step = map(int, source.opening.step.name.split("_"))
        from_name = {"epoch_num": epoch, "step_num": step} | ({"global_step": step} if epoch == 1 else {})
        progress |= {key: value for key, value in from_name.items() if progress[key] is None}
    iteration = _iteration(source)
    return progress if iteration is None else progress | {"global_step": iteration}


def _iteration(source: Checkpoint) -> int | None:
    """Return the steps done, by the directory name, `common.json` or a DCP, or None."""
    if source.extras.described_by and source.format is not None and source.format.has_steps:
        number = iteration_of(as_place(source.root), numbered=source.format.is_numbered)
        if number is not None:
            return number
    from reshard.kits.torch.objects import iteration  # not on every start

    common = common_of(source)
    step = parse_common(common).get("global_step") if common else iteration(source)
    return step if type(step) is int and 0 <= step < MOST_STEPS else None


def _number(source: Checkpoint, name: str, *types: type) -> int | float | None:
    """Return the value of a tensor with one number of `types`, or None if below 0."""
    tensor = source.tensors.get(name)
    if tensor is None or tensor.text is not None or tensor.varies or prod(tensor.spec.shape) != 1:
        return None
    import numpy as np  # not on every start

    at = tensor.sharding.replicas[0][0]
    content = bytearray(tensor.spec.dtype.itemsize)
    path = source.files[at.file].path
    store_of(source.coding).read(wants(path, tensor.runs[at.runs_index], 0, memoryview(content)))
    value = np.frombuffer(content, tensor.spec.dtype.numpy())[0].item()
    return value if type(value) in types and 0 <= value < inf else None
