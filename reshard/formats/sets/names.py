"""Unified sets: whole tensors in files of limited size, and an index of them.

The index gets its name last, so that a set with an index is complete. The map of a MindSpore set names tensors of the
parts only; a `hyper_param` file is recorded next to the total size, which MindSpore ignores.

Sources: MindSpore 2.10 `parallel/transform_safetensors.py` (`unified_safetensors`: part<k>, hyper_param,
param_name_map.json) and the Hugging Face hub's sharded safetensors (`model.safetensors.index.json`).
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.arguments import checked_fields
from reshard.core.model.entries import ShardFiles, SomeFiles
from reshard.core.storage.base import COPY_AGAIN, reading
from reshard.core.storage.small import parse_json, read_small
from reshard.errors import Faults, Option, SourceError, Text, UsageError, names

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from reshard.core.model.entries import SizedTensor
    from reshard.core.storage.places import Place
    from reshard.siblings import Siblings

MAX_SHARD_BYTES = 4_000_000_000
"""The maximum size of a file of a unified set, unless a single tensor is larger."""

DCP_NAME = "dcp"

CHECKPOINT2_NAME = "checkpoint2"

UNIVERSAL_NAME = "deepspeed-universal"

ORBAX_NAME = "orbax"

TO = ("ckpt", "safetensors", "hf", "mindspore", DCP_NAME, CHECKPOINT2_NAME, UNIVERSAL_NAME, ORBAX_NAME, "zarr")
"""The target formats: values of `--to` on the command line, and of `to` and `format` in Python."""

OTHER_WORDS = {"huggingface": "hf", "distcp": DCP_NAME, "ms": "mindspore"}
"""Aliases of target formats."""

DCP_ITEMS = "distcp"
"""The format of DCP data files, whose items are written by PyTorch's `torch.save`."""

DCP_INDEX = ".metadata"
"""The file that lists the blocks of a distributed checkpoint."""

DCP_FILE_BYTES = 1 << 30
"""The maximum size of a DCP data file, unless a single block is larger: each is written by one thread."""

MOST_STEPS = 10**18
"""A number of steps above any real training."""

_MINDSPORE_INDEX = "param_name_map.json"
_HUGGING_FACE_INDEX = "model.safetensors.index.json"
_HYPER_PARAMETERS = "hyper_param"

SET_INDEX = re.compile(rf"{re.escape(_MINDSPORE_INDEX)}|.+\.safetensors\.index(?:\.[^.]+)?\.json", re.DOTALL)
"""The possible names of a set's index: MindSpore's, and those of transformers, diffusers and PEFT, with a variant, too:
`model.safetensors.index.fp16.json`."""

HYPER_FILES = (f"{_HYPER_PARAMETERS}.safetensors", f"{_HYPER_PARAMETERS}.ckpt")
"""Files that belong to a set of MindSpore by name, even if its index does not list them."""

SAVED_INDEX = re.compile(r".+\.(?:bin|pt|pth)\.index(?:\.[^.]+)?\.json", re.DOTALL)
"""The possible names of the index of a set of files of `torch.save`, such as `pytorch_model.bin.index.json`."""

MODEL_CONFIG = "config.json"
"""The configuration of a model, next to its Hugging Face set."""

_OF = re.compile(r"(.*?)(\d{1,9})-of-(\d{1,9})\.", re.DOTALL)
_LARGEST_INDEX = 1 << 26


@checked_fields
@dataclass(frozen=True, slots=True)
class MindSporeSet:
    """A unified set in MindSpore's style.

    Its files are `part<k>.safetensors`, `hyper_param.safetensors` and `param_name_map.json`. The parts are filled
    evenly, the largest tensors first, as in MindSpore; the map names their tensors. Text, and tensors that are not in
    the strategy, are in `hyper_param.safetensors`.

    Attributes:
        max_shard_size: the maximum bytes of tensors in a part, unless a single tensor is larger; None for those of the
            largest file of a source that is a set, too, else for `MAX_SHARD_BYTES`.

    >>> source = reshard.open("src_checkpoints", strategy="src_strategy.ckpt")
    >>> reshard.plan(source, format="safetensors", files=reshard.MindSporeSet()).run("whole").files
    ('part0.safetensors', 'hyper_param.safetensors', 'param_name_map.json')
    """

    max_shard_size: int | None = None

    def __post_init__(self) -> None:
        check_size(self.max_shard_size)

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
            paths.append(f"{_HYPER_PARAMETERS}{extension}")
            content["metadata"][_HYPER_PARAMETERS] = paths[-1]
        return ShardFiles(tuple(paths), of, (_MINDSPORE_INDEX, json.dumps(content, indent=4).encode()))


@checked_fields
@dataclass(frozen=True, slots=True)
class HuggingFaceSet:
    """A unified set in Hugging Face's style.

    Its files are `model-0000k-of-0000n.safetensors`, filled in the tensors' order, and `model.safetensors.index.json`.

    Attributes:
        max_shard_size: the maximum bytes of tensors in a file, unless a single tensor is larger; None as in
            `MindSporeSet`.

    >>> source = reshard.open("src_checkpoints", strategy="src_strategy.ckpt")
    >>> files = reshard.HuggingFaceSet(max_shard_size=10_000)
    >>> reshard.plan(source, format="safetensors", files=files).run("hf").files
    ('model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors', 'model.safetensors.index.json')
    """

    max_shard_size: int | None = None

    def __post_init__(self) -> None:
        check_size(self.max_shard_size)

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
        return ShardFiles(paths, of, (_HUGGING_FACE_INDEX, index), {"format": "pt"})


@checked_fields
@dataclass(frozen=True, slots=True)
class DCP:
    """A distributed checkpoint of PyTorch.

    Its files are `__RANK_NUMBER.distcp`, filled in the tensors' order, and `.metadata`.

    Attributes:
        max_shard_size: the maximum bytes of tensors in a file, unless a single block is larger.
        step: the step of the training. With it, the files are in `iter_STEP` of the run directory, and the tracker
            file names that, as Megatron-Core expects. By default, they are in the directory itself.

    Raises:
        UsageError: a size below 1, or a number of steps below 0.

    >>> source = reshard.open("src_checkpoints", strategy="src_strategy.ckpt")
    >>> report = reshard.plan(source, files=reshard.DCP(step=100)).run("run")
    >>> report.files[0], report.files[-1]
    ('iter_0000100/__0_0.distcp', 'latest_checkpointed_iteration.txt')
    """

    max_shard_size: int = DCP_FILE_BYTES
    step: int | None = None

    def __post_init__(self) -> None:
        check_size(self.max_shard_size)
        check_step(self.step)


@dataclass(frozen=True, slots=True)
class LinkedDCP:
    """Links to the data files of one or more DCPs, with a new `.metadata`.

    No bytes of tensors are copied.
    Tensors and objects may be left out or renamed; dtypes and blocks do not change.

    >>> report = reshard.convert("src_checkpoints", "step", to="dcp", source_strategy="src_strategy.ckpt")
    >>> plan = reshard.plan(reshard.open("step"), files=reshard.LinkedDCP(), weights_only=True)
    >>> plan.run("weights").bytes_written
    0
    """


@dataclass(frozen=True, slots=True)
class DeepSpeedUniversal:
    """A Universal Checkpoint of DeepSpeed.

    Its files are `zero/PARAMETER/STATE.pt`, model states for all stages of ZeRO, and `latest_universal`.
    """


def one_after_the_other(tensors: Iterable[SizedTensor], max_shard_size: int) -> dict[str, int]:
    """Return the number of each tensor's file if files are filled one after the other.

    >>> from reshard.core.model.entries import SizedTensor
    >>> tensors = [SizedTensor(name, size, True) for name, size in zip("abcd", (3, 3, 9, 0))]
    >>> one_after_the_other(tensors, 6)
    {'a': 0, 'b': 0, 'c': 1, 'd': 1}
    """
    of: dict[str, int] = {}
    count = room = 0
    for tensor in tensors:
        if not count or (max(room, 0) < tensor.nbytes and room < max_shard_size):
            count, room = count + 1, max_shard_size
        of[tensor.name] = count - 1
        room -= tensor.nbytes
    return of


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
    parts = [number for number, path in enumerate(every.paths) if not path.startswith(_HYPER_PARAMETERS)]
    size, rest = divmod(len(parts), processes)
    first = size * (process - 1) + min(process - 1, rest)
    numbers = parts[first : first + size + (process <= rest)]
    if process == 1:
        numbers += [number for number in range(len(every.paths)) if number not in parts]
    return SomeFiles(every, tuple(numbers), with_index=process == 1)


def check_size(max_shard_size: int | None) -> None:
    """Raise `UsageError` if the maximum size is below 1."""
    if max_shard_size is not None and max_shard_size < 1:
        raise UsageError(
            f"a file of a set cannot have at most {max_shard_size} bytes; expected at least 1", code="out-of-range"
        )


def check_step(step: int | None) -> None:
    """Raise `UsageError` if a number of steps is out of range; None is accepted."""
    if step is not None and not 0 <= step < MOST_STEPS:
        raise UsageError(f"step is {step}; expected a number from 0 to {MOST_STEPS - 1}", code="out-of-range")


def set_indexes(names: Iterable[str]) -> list[str]:
    """Return which of the names in a directory are indexes of sets.

    >>> set_indexes(["config.json", "model.safetensors", "diffusion_pytorch_model.safetensors.index.fp16.json"])
    ['diffusion_pytorch_model.safetensors.index.fp16.json']
    """
    return sorted(filter(SET_INDEX.fullmatch, names))


def set_word(index: str) -> str:
    """Return the word for the sets with an index of this name."""
    return "mindspore" if index == _MINDSPORE_INDEX else "hf"


@reading(SourceError)
def read_index(
    directory: Place, index_names: Iterable[str] | None = None
) -> tuple[list[Place], Mapping[str, str]] | None:
    """Return the files of a unified set and the file of each tensor; None without an index.

    MindSpore's hyper-parameter files are included, although only indexes written by this program name them.

    Args:
        directory: the directory of the set.
        index_names: the names of its index, if known.

    Raises:
        SourceError: the index is not valid, or names a file that does not exist or is outside the directory.
    """
    candidates = set_indexes(directory.names()) if index_names is None else index_names
    indexes = [path for name in candidates if (path := directory / name).is_file()]
    if not indexes:
        return None
    if len(indexes) > 1:
        move = "move one set to another directory"
        choose = Text("choose one with ", Option("suffix", "index.json"), " or the end of another name, or ", move)
        raise SourceError(
            f"{directory} has the indexes of several sets, {names([path.name for path in indexes])}",
            code="several-checkpoints",
            hint=choose if SET_INDEX.fullmatch(indexes[0].name) else move,
        )
    path = indexes[0]
    weight_map, hyper_parameters = _read_map(path)
    faults = Faults(str(path))
    files: list[Place] = []
    for name in dict.fromkeys((*weight_map.values(), *hyper_parameters)):
        file = directory / name
        if file.name != name or name in {"", ".", ".."}:
            fault = "is not in the directory of the index; expected a name without a slash"
            faults.add(f"file {name!r:.300}", fault, code="bad-name")
        elif not _is_file(file):
            faults.add(f"file {name!r:.300}", f"is missing; {path.name} names it", code="not-found", hint=COPY_AGAIN)
        files.append(file)
    for family, numbers in _numbered(weight_map.values()).items():
        if len(numbers) < int(family[1]):
            fault = f"is named {len(numbers)} times; expected {int(family[1])} shards"
            faults.add(f"{family[0]}…-of-{family[1]}", fault, code="missing-shards", hint=COPY_AGAIN)
    faults.raise_if_any(SourceError)
    if path.name == _MINDSPORE_INDEX:
        siblings = [directory / name for name in HYPER_FILES]
        files += [file for file in siblings if file not in files and file.is_file()]
    return files, weight_map


def check_members(root: Place, weight_map: Mapping[str, str], members: Mapping[str, Iterable[str]]) -> None:
    """Compare an index with the names in the files of a set.

    Args:
        root: the directory, for messages.
        weight_map: the file of each tensor according to the index.
        members: the names in each file.

    Raises:
        SourceError: a file lacks a tensor, or a tensor is in several files; all faults at once.
    """
    files_by_name: dict[str, list[str]] = {}
    for file, names_in_file in members.items():
        for name in names_in_file:
            files_by_name.setdefault(name, []).append(file)
    faults = Faults(str(root))
    for name, file in weight_map.items():
        if file not in files_by_name.get(name, ()):
            fault = f"is not in {file}, although the index lists it there"
            faults.add(f"tensor {name!r}", fault, code="missing-tensor")
    for name, files in files_by_name.items():
        if len(files) > 1:  # one file may belong to an older set
            faults.add(f"tensor {name!r}", f"is in several files: {names(files)}", code="duplicate-name")
    faults.raise_if_any(SourceError)


def _numbered(file_names: Iterable[str]) -> dict[tuple[str, str], set[int]]:
    """Return the numbers of shards with names like `NAME-NUMBER-of-COUNT`, by name and count.

    >>> _numbered(["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors", "part0.safetensors"])
    {('model-', '00003'): {1, 3}}
    """
    numbers: dict[tuple[str, str], set[int]] = {}
    for name in file_names:
        if match := _OF.match(name):
            numbers.setdefault((match[1], match[3]), set()).add(int(match[2]))
    return numbers


def files_beside(directory: Place, name: str, siblings: Siblings) -> tuple[str, set[str]]:
    """Return the name of the index that names a file, and all files of its set; empty if no readable index does.

    Args:
        directory: the directory of the file.
        name: the name of the file.
        siblings: the names in the directory.
    """
    for index in [*sorted(siblings.matching(SET_INDEX)), *siblings.matching(SAVED_INDEX)]:
        with suppress(SourceError, OSError):
            unlisted = HYPER_FILES if index == _MINDSPORE_INDEX else ()
            files = {*_read_map(directory / index)[0].values(), *unlisted}
            if name in files:
                return index, files.difference({*unlisted}.difference(siblings.names))
    return "", set()


def _is_file(path: Place) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long
        return False


def _read_map(path: Place) -> tuple[dict[str, str], list[str]]:
    """Return the file of each tensor in an index, and the file of hyper-parameters if named."""
    repeated: list[str] = []
    raw = read_small(path, "index", _LARGEST_INDEX, SourceError)
    try:
        content = parse_json(raw, repeated)
    except ValueError as error:
        raise SourceError(f"{path} is not JSON", code="not-json", facts=[str(error)]) from None
    faults = Faults(str(path))
    for name in repeated:
        faults.add(f"tensor {name!a:.200}", "is listed twice", code="duplicate-name")
    weight_map = content.get("weight_map", content) if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise SourceError(f"{path} has no weight_map of tensor names to file names", code="bad-index")
    metadata = content.get("metadata") if path.name == _MINDSPORE_INDEX and weight_map is not content else None
    hyper_file = metadata.get(_HYPER_PARAMETERS) if isinstance(metadata, dict) else None
    if hyper_file is not None and hyper_file not in HYPER_FILES:
        fault = f"is {hyper_file!a:.60}; expected {' or '.join(HYPER_FILES)}"
        faults.add(f"metadata.{_HYPER_PARAMETERS}", fault, code="bad-value")
    faults.raise_if_any(SourceError)
    return weight_map, [] if hyper_file is None else [hyper_file]
