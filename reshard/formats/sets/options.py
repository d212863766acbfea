"""Unified sets: whole tensors in files of limited size, and an index of them.

The index gets its name last, so that a set with an index is complete. The map of a MindSpore set names tensors of the
parts only; a `hyper_param` file is recorded next to the total size, which MindSpore ignores.

Sources: MindSpore 2.10 `parallel/transform_safetensors.py` (`unified_safetensors`: part<k>, hyper_param,
param_name_map.json) and the Hugging Face hub's sharded safetensors (`model.safetensors.index.json`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.arguments import checked_fields
from reshard.core.model.entries import ShardFiles, SomeFiles
from reshard.core.options import Options, option
from reshard.core.target import MAX_SHARD_BYTES, check_size, one_after_the_other
from reshard.kits.indexes import HUGGING_FACE_INDEX, HYPER_PARAMETERS, MINDSPORE_INDEX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.core.model.entries import SizedTensor


@dataclass(frozen=True, slots=True)
class UnifiedSet(Options):
    """The options of all sets."""

    max_shard_size: int | None = option(
        "Most tensor bytes in a file of the set. One tensor alone may have more.",
        "size",
        default=None,
        shown="as in the files of a set that is read, else 4GB",
    )

    def __post_init__(self) -> None:
        check_size(self.max_shard_size)


@checked_fields
@dataclass(frozen=True, slots=True)
class MindSporeSet(UnifiedSet):
    """A unified set in MindSpore's style.

    Its files are `part<k>.safetensors`, `hyper_param.safetensors` and `param_name_map.json`. The parts are filled
    evenly, the largest tensors first, as in MindSpore; the map names their tensors. Text, and tensors that are not in
    the strategy, are in `hyper_param.safetensors`.

    Attributes:
        max_shard_size: the maximum bytes of tensors in a part, unless a single tensor is larger; None for those of the
            largest file of a source that is a set, too, else for `MAX_SHARD_BYTES`.

    >>> source = reshard.open("src_checkpoints", strategy="src_strategy.ckpt")
    >>> reshard.plan(source, to="mindspore").run("whole").files
    ('part0.safetensors', 'hyper_param.safetensors', 'param_name_map.json')
    """

    def shard_files(self, tensors: Sequence[SizedTensor], extension: str) -> ShardFiles:
        """Assign the tensors to parts."""
        most = self.max_shard_size or MAX_SHARD_BYTES
        stored = [tensor for tensor in tensors if not tensor.is_text]
        in_strategy = [tensor for tensor in stored if tensor.listed] or stored
        parts = sorted(in_strategy, key=lambda tensor: -tensor.nbytes)
        total = sum(tensor.nbytes for tensor in parts)
        sizes = [0] * max(1, min(-(-total // most), sum(tensor.nbytes > 0 for tensor in parts)))
        of: dict[str, int] = {}
        for tensor in parts:
            least = sizes.index(min(sizes))
            if tensor.nbytes and sizes[least] and sizes[least] + tensor.nbytes > most:
                least = len(sizes)
                sizes.append(0)
            of[tensor.name] = least
            sizes[least] += tensor.nbytes
        paths = [f"part{number}{extension}" for number in range(len(sizes))]
        content: dict[str, dict[str, object]] = {
            "metadata": {"total_size": total},
            "weight_map": {name: paths[number] for name, number in of.items()},
        }
        hyper_parameters = [tensor.name for tensor in tensors if tensor.name not in of]
        if hyper_parameters:
            of.update(dict.fromkeys(hyper_parameters, len(paths)))
            paths.append(f"{HYPER_PARAMETERS}{extension}")
            content["metadata"][HYPER_PARAMETERS] = paths[-1]
        return ShardFiles(tuple(paths), of, (MINDSPORE_INDEX, json.dumps(content, indent=4).encode()))


@checked_fields
@dataclass(frozen=True, slots=True)
class HuggingFaceSet(UnifiedSet):
    """A unified set in Hugging Face's style.

    Its files are `model-0000k-of-0000n.safetensors`, filled in the tensors' order, and `model.safetensors.index.json`.

    Attributes:
        max_shard_size: the maximum bytes of tensors in a file, unless a single tensor is larger; None as in
            `MindSporeSet`.

    >>> source = reshard.open("src_checkpoints", strategy="src_strategy.ckpt")
    >>> reshard.plan(source, to="hf", max_shard_size="10kB").run("hf").files
    ('model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors', 'model.safetensors.index.json')
    """

    def shard_files(self, tensors: Sequence[SizedTensor], extension: str) -> ShardFiles:
        """Fill one file after the other."""
        # Text is in a file's notes, so the index must not name it: other readers look for tensors.
        most = self.max_shard_size or MAX_SHARD_BYTES
        of = one_after_the_other([tensor for tensor in tensors if not tensor.is_text], most)
        count = max(of.values(), default=0) + 1
        paths = tuple(f"model-{k + 1:05d}-of-{count:05d}{extension}" for k in range(count))
        content = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors)},
            "weight_map": {name: paths[k] for name, k in sorted(of.items())},
        }
        of.update({tensor.name: 0 for tensor in tensors if tensor.is_text})
        index = json.dumps(content, indent=2).encode() + b"\n"
        # transformers refuses files with an unknown `format`.
        return ShardFiles(paths, of, (HUGGING_FACE_INDEX, index), {"format": "pt"})


def share_of(every: ShardFiles, process: int, processes: int) -> SomeFiles:
    """Return one process's share of the files of a MindSpore set: consecutive parts.

    The first process also writes the hyper-parameters and the index, as with MindSpore's `split_dst_file`.

    Args:
        every: the assignment of tensors to files, the same for all processes.
        process: the number of the process, from 1.
        processes: the number of processes.

    >>> every = ShardFiles(("part0.st", "part1.st", "part2.st", "hyper_param.st"), {}, ("index", b""))
    >>> [share_of(every, process, 2).numbers for process in (1, 2)]
    [(0, 1, 3), (2,)]
    """
    parts = [number for number, path in enumerate(every.paths) if not path.startswith(HYPER_PARAMETERS)]
    size, rest = divmod(len(parts), processes)
    first = size * (process - 1) + min(process - 1, rest)
    numbers = parts[first : first + size + (process <= rest)]
    if process == 1:
        numbers += [number for number in range(len(every.paths)) if number not in parts]
    return SomeFiles(every, tuple(numbers), with_index=process == 1)
