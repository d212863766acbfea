"""Refuse one file of several, which would pass for whole tensors.

A block, a shard of a set and a file of whole tensors have similar contents. Before any header is read, they are told
apart by unique file names, and by the first bytes of files whose names other programs use, too (`FileNames`).
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import TYPE_CHECKING

from reshard.core.format import parts_of_several
from reshard.core.listing import FileNames, Listing
from reshard.errors import SourceError, names
from reshard.kits.indexes import files_beside
from reshard.siblings import siblings_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reshard.core.storage.places import Place
    from reshard.siblings import Siblings

_NUMBERED = re.compile(
    r"(?P<before>.*_part(?=\d+\.\w+\Z)|(?:.*_)?mp_rank_|consolidated\.)(?P<number>\d+)(?P<after>.*)", re.DOTALL
)
_ORIGINAL = "convert the Hugging Face model that it was made from"
_ALONE = frozenset({"foreign", "alone"})
FOREIGN = (
    FileNames(
        re.compile(r"model-rank-\d+-part-\d+\.safetensors"), "is of the sharded state of vLLM, which is not read",
        _ORIGINAL, code="unsupported-format", when=frozenset({"foreign"}),
    ),
    FileNames(
        re.compile(r"rank\d+\.engine"), "is of a model for TensorRT-LLM, which is not read", _ORIGINAL,
        {"config.json": re.compile(rb'"mapping"\s*:\s*\{[^{}]*"world_size"')}, "unsupported-format",
        frozenset({"foreign"}),
    ),
    FileNames(
        re.compile(r".+\.gguf", re.DOTALL), "is a GGUF file of llama.cpp, which is not read", _ORIGINAL,
        code="unsupported-format", when=_ALONE,
    ),
    FileNames(
        re.compile(r".+\.np[yz]", re.DOTALL), "is a file of NumPy, which is not read",
        'load it with NumPy, and in Python: reshard.write({"NAME": array}, "TARGET.safetensors")',
        code="unsupported-format", when=_ALONE,
    ),
)  # fmt: skip
"""Files of other programs that are not read; next to a checkpoint, some are ignored."""


def is_later_part(path: str) -> bool:
    """Return whether a file name is a rank's file of a pipeline stage after the first.

    >>> is_later_part("rank_0/net_part1.ckpt"), is_later_part("rank_0/net_part0.ckpt"), is_later_part("net.ckpt")
    (True, False, False)
    """
    match = _NUMBERED.fullmatch(PurePath(path).name)
    return match is not None and match["before"].endswith("_part") and int(match["number"]) > 0


def refuse_directory(directory: Place, names: Iterable[str], *accepted: str) -> None:
    """Raise an error if a directory contains files that are useful together only.

    Args:
        directory: the directory.
        names: the names of its files.
        accepted: the words of `FileNames.when` that are true.

    Raises:
        SourceError: it contains such files.
    """
    here = Listing(directory, sorted(names))
    for each in parts_of_several():
        if each.when.isdisjoint(accepted) and (name := each.shown_by(here)):
            raise SourceError(f"{directory / name} {each.problem}", code=each.code, hint=each.advice)


def refuse_one_of_several(path: Place) -> None:
    """Raise an error if a file is one of several of a checkpoint.

    Its name and its siblings decide. The target of a link is checked, too.

    Raises:
        SourceError: it is one of several.
    """
    _refuse_one_of_several(path)
    if path.is_symlink():
        _refuse_one_of_several(path.real())  # loops of links are no error


def _refuse_one_of_several(path: Place) -> None:
    directory = path.absolute().parent
    siblings = siblings_of(directory)
    index, files = files_beside(directory, path.name, siblings)
    if path.name in files:
        if len(files) > 1:
            raise SourceError(
                f"{path} is one of {len(files)} files of a set",
                code="one-of-several",
                facts=[f"{index} next to it names all of them"],
                hint=f"open {directory}",
            )
        return
    parts = _numbered_alike(path.name, siblings)
    for each in parts_of_several():
        marks = [name for name in each.marks if name in siblings.names]
        if name := each.shown_by(Listing(directory, [path.name, *parts, *marks])):
            subject = path if name == path.name else f"{name} next to {path}"
            raise SourceError(f"{subject} {each.problem}", code=each.code, hint=each.advice)
    match = _NUMBERED.fullmatch(path.name)
    above = directory
    is_part = bool(match and (parts or int(match["number"])))
    others = list(parts)
    for each in parts_of_several():
        if "directory" in each.when and (of_rank := each.files.fullmatch(directory.name)):
            above = directory.parent
            ranks = siblings_of(above).matching(each.files)
            is_part = len(ranks) > 1 or any(map(int, of_rank.groups("0")))
            others = [f"{rank}/{path.name}" for rank in sorted(ranks) if rank != directory.name]
    if is_part:
        raise SourceError(
            f"{path} is one of several parts of a checkpoint, by its name",
            code="one-of-several",
            facts=[f"others are {names(others, most=3)}"] if others else [],
            hint=f"open {above}, or rename a file that has all of the checkpoint",
        )


def _numbered_alike(name: str, siblings: Siblings) -> list[str]:
    """Return the siblings that differ from a name only in the number of a part or rank."""
    match = _NUMBERED.fullmatch(name)
    alike = siblings.alike(_NUMBERED, match["before"], match["after"]).names if match else {}
    return sorted({*alike.values()} - {name})
