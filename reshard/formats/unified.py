"""Unified sets: whole tensors in several files that are not too large, and an index of which tensor is where.

The index gets its name last, so that a set with an index is complete.

Sources: MindSpore 2.10 `parallel/transform_safetensors.py` (`unified_safetensors`: part<k>, hyper_param,
param_name_map.json) and the Hugging Face hub's sharded safetensors (`model.safetensors.index.json`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.errors import SourceError
from reshard.target_files import Volumes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from reshard.target_files import Stored

MAX_SHARD_BYTES = 4_000_000_000
"""How large a file of a unified set may grow, unless one tensor is larger."""

_MINDSPORE_INDEX = "param_name_map.json"
_HUGGING_FACE_INDEX = "model.safetensors.index.json"
_HYPER_PARAMETERS = "hyper_param"


@dataclass(frozen=True, slots=True)
class MindSporeSet:
    """`part<k>.safetensors`, `hyper_param.safetensors` for what no strategy names, and `param_name_map.json`.

    The parts are filled evenly, the largest tensors first, as MindSpore does; the map names what is in them.
    """

    max_shard_bytes: int = MAX_SHARD_BYTES

    def volumes(self, tensors: Sequence[Stored], extension: str) -> Volumes:
        """Share the tensors out to parts."""
        listed = [tensor for tensor in tensors if tensor.listed] or list(tensors)
        parts = sorted(listed, key=lambda tensor: -tensor.nbytes)
        total = sum(tensor.nbytes for tensor in parts)
        held = [0] * max(1, min(-(-total // self.max_shard_bytes), len(parts)))
        of: dict[str, int] = {}
        for tensor in parts:
            of[tensor.name] = least = held.index(min(held))
            held[least] += tensor.nbytes
        paths = [f"part{number}{extension}" for number in range(len(held))]
        content = {
            "metadata": {"total_size": total},
            "weight_map": {name: paths[number] for name, number in of.items()},
        }
        others = [tensor.name for tensor in tensors if tensor.name not in of]
        if others:
            of.update(dict.fromkeys(others, len(paths)))
            paths.append(f"{_HYPER_PARAMETERS}{extension}")
        return Volumes(tuple(paths), of, (_MINDSPORE_INDEX, json.dumps(content, indent=4).encode()))


@dataclass(frozen=True, slots=True)
class HuggingFaceSet:
    """`model-0000k-of-0000n.safetensors`, filled in the tensors' order, and `model.safetensors.index.json`."""

    max_shard_bytes: int = MAX_SHARD_BYTES

    def volumes(self, tensors: Sequence[Stored], extension: str) -> Volumes:
        """Fill one file after the other."""
        of: dict[str, int] = {}
        number = room = 0
        for tensor in tensors:
            if tensor.nbytes > room or not number:
                number, room = number + 1, self.max_shard_bytes
            of[tensor.name] = number - 1
            room -= tensor.nbytes
        count = max(number, 1)
        paths = tuple(f"model-{k + 1:05d}-of-{count:05d}{extension}" for k in range(count))
        content = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors)},
            "weight_map": {name: paths[k] for name, k in sorted(of.items())},
        }
        return Volumes(paths, of, (_HUGGING_FACE_INDEX, json.dumps(content, indent=2).encode() + b"\n"))


def read_index(directory: Path) -> tuple[list[Path], Mapping[str, str]] | None:
    """Return the files of a unified set and the file of each tensor in its index; None where there is no index.

    The hyper-parameters that MindSpore keeps beside are among the files, though not in the index.

    Raises:
        SourceError: the index is not sound, names a file that is not there, or one outside the directory.
    """
    indexes = [path for name in (_MINDSPORE_INDEX, _HUGGING_FACE_INDEX) if (path := directory / name).is_file()]
    if not indexes:
        return None
    path = indexes[0]
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{path}: cannot be read as JSON: {error}") from None
    weight_map = content.get("weight_map", content) if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise SourceError(f"{path}: has no weight_map of tensor names to file names")
    files = []
    for name in dict.fromkeys(weight_map.values()):
        file = directory / name
        if file.name != name or name in {"", ".", ".."}:
            raise SourceError(f"{path}: names the file {name!r}; expected a name in the same directory")
        if not file.is_file():
            raise SourceError(f"{path}: names the file {name!r}, which is not there")
        files.append(file)
    files += [file for file in sorted(directory.glob(f"{_HYPER_PARAMETERS}.*")) if file not in files]
    return files, weight_map
