"""Indexes of sets: whole tensors in several files, and a JSON file that says which tensor is in which file.

The index gets its name last, so that a set with an index is complete. The map of a MindSpore set names tensors of the
parts only; a `hyper_param` file is recorded next to the total size, which MindSpore ignores.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING

from reshard.core.storage.base import COPY_AGAIN, reading
from reshard.core.storage.small import parse_json, read_small
from reshard.errors import Faults, Option, SourceError, Text, names

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from reshard.core.storage.places import Place
    from reshard.siblings import Siblings

MINDSPORE_INDEX = "param_name_map.json"
HUGGING_FACE_INDEX = "model.safetensors.index.json"
HYPER_PARAMETERS = "hyper_param"

SET_INDEX = re.compile(rf"{re.escape(MINDSPORE_INDEX)}|.+\.safetensors\.index(?:\.[^.]+)?\.json", re.DOTALL)
"""The possible names of a set's index: MindSpore's, and those of transformers, diffusers and PEFT, with a variant, too:
`model.safetensors.index.fp16.json`."""

HYPER_FILES = (f"{HYPER_PARAMETERS}.safetensors", f"{HYPER_PARAMETERS}.ckpt")
"""Files that belong to a set of MindSpore by name, even if its index does not list them."""

SAVED_INDEX = re.compile(r".+\.(?:bin|pt|pth)\.index(?:\.[^.]+)?\.json", re.DOTALL)
"""The possible names of the index of a set of files of `torch.save`, such as `pytorch_model.bin.index.json`."""

MODEL_CONFIG = "config.json"
"""The configuration of a model, next to its Hugging Face set."""

_OF = re.compile(r"(.*?)(\d{1,9})-of-(\d{1,9})\.", re.DOTALL)
_LARGEST_INDEX = 1 << 26


def set_indexes(names: Iterable[str]) -> list[str]:
    """Return which of the names in a directory are indexes of sets.

    >>> set_indexes(["config.json", "model.safetensors", "diffusion_pytorch_model.safetensors.index.fp16.json"])
    ['diffusion_pytorch_model.safetensors.index.fp16.json']
    """
    return sorted(filter(SET_INDEX.fullmatch, names))


def set_word(index: str) -> str:
    """Return the word for the sets with an index of this name."""
    return "mindspore" if index == MINDSPORE_INDEX else "hf"


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
            code="several-checkpoints", hint=choose if SET_INDEX.fullmatch(indexes[0].name) else move,
        )  # fmt: skip
    path = indexes[0]
    weight_map, hyper_parameters = _read_map(path)
    faults = Faults(str(path))
    files: list[Place] = []
    numbers: dict[tuple[str, str], set[int]] = {}
    for name in dict.fromkeys((*weight_map.values(), *hyper_parameters)):
        file = directory / name
        if file.name != name or name in {"", ".", ".."}:
            fault = "is not in the directory of the index; expected a name without a slash"
            faults.add(f"file {name!r:.300}", fault, code="bad-name")
        elif not _is_file(file):
            faults.add(f"file {name!r:.300}", f"is missing; {path.name} names it", code="not-found", hint=COPY_AGAIN)
        files.append(file)
        if match := _OF.match(name):
            numbers.setdefault((match[1], match[3]), set()).add(int(match[2]))
    for (family, count), present in numbers.items():
        if len(present) < int(count):
            fault = f"is named {len(present)} times; expected {int(count)} shards"
            faults.add(f"{family}…-of-{count}", fault, code="missing-shards", hint=COPY_AGAIN)
    faults.raise_if_any(SourceError)
    if path.name == MINDSPORE_INDEX:
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


def files_beside(directory: Place, name: str, siblings: Siblings) -> tuple[str, set[str]]:
    """Return the name of the index that names a file, and all files of its set; empty if no readable index does.

    Args:
        directory: the directory of the file.
        name: the name of the file.
        siblings: the names in the directory.
    """
    for index in [*sorted(siblings.matching(SET_INDEX)), *siblings.matching(SAVED_INDEX)]:
        with suppress(SourceError, OSError):
            unlisted = HYPER_FILES if index == MINDSPORE_INDEX else ()
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
    metadata = content.get("metadata") if path.name == MINDSPORE_INDEX and weight_map is not content else None
    hyper_file = metadata.get(HYPER_PARAMETERS) if isinstance(metadata, dict) else None
    if hyper_file is not None and hyper_file not in HYPER_FILES:
        fault = f"is {hyper_file!a:.60}; expected {' or '.join(HYPER_FILES)}"
        faults.add(f"metadata.{HYPER_PARAMETERS}", fault, code="bad-value")
    faults.raise_if_any(SourceError)
    return weight_map, [] if hyper_file is None else [hyper_file]
