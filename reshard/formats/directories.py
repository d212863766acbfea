"""Directory formats: what is kept in many files that mean something only together, and how each is recognised.

A block, a shard of a set and a file of whole tensors look the same from inside, so that one of several, or a directory
of another program's blocks, would pass for whole tensors or for rank files. What tells them apart is looked for before
any header is read: names that no other files have, and the first bytes of files that other programs use too. (Blocks of
PyTorch's safetensors also say in their header that they are some.)

None of these formats is read file by file: a unified set is with its index (`sets`), each of the others by a room of
`readers`.

Sources: PyTorch 2.13 `distributed/checkpoint` (`filesystem.py`, `hf_storage.py`), hyper-parallel
`core/distributed_checkpoint`, mindformers 2.1.0 `checkpoint/checkpoint.py`, MindSpore 2.10
`parallel/transform_safetensors.py`, Hugging Face's sharded safetensors.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import PurePath
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from reshard.errors import SourceError
from reshard.formats.entries import RangeReader
from reshard.formats.sets import DCP_INDEX, SET_FILES, SET_INDEXES, files_beside

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from reshard.storage.places import Place

SHARDING_INFO = "DCP_SHARDING_INFO"
"""In the notes of a safetensors file: where its blocks lie in their tensors, as PyTorch writes it."""

_MARK_BYTES = 4096  # a mark is in the first bytes; the file may be as long as a model has tensors
_NUMBERED = re.compile(
    r"(?P<before>.*_part(?=\d+\.\w+\Z)|(?:.*_)?mp_rank_|consolidated\.)(?P<number>\d+)(?P<after>.*)", re.DOTALL
)


class DirectoryFormat(NamedTuple):
    """A way to keep a checkpoint in the files of one directory.

    Attributes:
        files: matches the names of its files, which no other checkpoint's files have.
        problem: what such a file is, as the rest of a sentence.
        advice: what to do, as a hint.
        marks: names of files that others have too, and what finds this format in their first bytes.
    """

    files: re.Pattern[str]
    problem: str
    advice: str
    marks: Mapping[str, re.Pattern[bytes]] = MappingProxyType({})

    def shown_by(self, directory: Place, names: Iterable[str]) -> str | None:
        """Return the first of some files of a directory that is of this format; None where none is."""
        for name in names:
            mark = self.marks.get(name)
            if self.files.fullmatch(name) or (mark and mark.search(_start(directory / name))):
                return name
        return None


_SET = f"get the other files and their index, {' or '.join(SET_INDEXES)}"
PARTS = DirectoryFormat(
    re.compile(r"(?:part\d+|hyper_param)\.(?:safetensors|ckpt)"),
    "is one of the parts of a unified set",
    f"{_SET}, or rename a file that has all of a model",
)
"""Told by short names, which the only file of a rank may have too."""

TRACKER = "latest_checkpointed_iteration.txt"
"""Names the last complete iteration of a run that saves Checkpoint 2.0, or of Megatron-LM."""


class RunFormat(NamedTuple):
    """How a training run keeps its checkpoints.

    Attributes:
        tracker: the file that names the last complete one, by its iteration.
        directory: matches the name of the directory of one, with its iteration.
    """

    tracker: str
    directory: re.Pattern[str]


RUN_FORMATS = (
    RunFormat(TRACKER, re.compile(r"iteration_(\d{8,18})")),  # MindSpore Transformers
    RunFormat("latest_checkpoint_iteration.txt", re.compile(r"global_step_(\d{1,18})")),  # hyper-parallel
    RunFormat(TRACKER, re.compile(r"iter_(\d{7,18})")),  # Megatron-LM
)


def is_iteration(name: str) -> bool:
    """Return whether the name of a directory is that of a checkpoint in the directory of a run."""
    return any(run.directory.fullmatch(name) for run in RUN_FORMATS)


RUNS = DirectoryFormat(
    re.compile("|".join(re.escape(run.tracker) for run in RUN_FORMATS)),
    "names an iteration of a training run that saves distributed checkpoints",
    "open the directory of the run, which has that of the iteration",
)
"""Above the directories that have the files; a whole file next to it is not a part of it."""

CHECKPOINT2 = DirectoryFormat(
    re.compile(r"(?P<prefix>(?:.+-)?)(?P<kind>model|opt)-(?P<number>\d{7,})-(?P<count>\d{7,})\.safetensors", re.DOTALL),
    "is of a Checkpoint 2.0 of MindSpore Transformers",
    "open the directory of all its files",
    {"metadata.json": re.compile(rb'"state_dict_metadata"\s*:')},
)

DCP_FILES = {
    "StorageInfo": re.compile(r"_rank(\d{1,9})_\.safetensors"),
    "_StorageInfo": re.compile(r"(?:[^/\\]*__(\d{1,9})_\d+|[^/\\]+)\.distcp", re.DOTALL),
}
"""The names of files of tensors, with the rank, by the class that says which has a box: hyper-parallel's, PyTorch's."""

DCP_OF_RANK = re.compile(r"((?:__)?(?=\d+\.)|\.rank(?=\d+_))(0|[1-9]\d{0,8})[._]metadata")
"""The names of metadata that ranks write for themselves, PyTorch's and two of hyper-parallel's: the kind, the rank."""

DCP = DirectoryFormat(
    re.compile("|".join(known.pattern for known in (*DCP_FILES.values(), DCP_OF_RANK)), re.DOTALL),
    "is of a distributed checkpoint (DCP) of PyTorch, Megatron or hyper-parallel",
    "open the directory of all its files",
    {DCP_INDEX: re.compile(rb"\A\x80[\x02-\x05]")},  # a pickle
)

SAVES = DirectoryFormat(
    re.compile(r"(?P<kind>.+)_world_size_(?P<count>[1-9]\d{0,8})_rank_(?P<rank>0|[1-9]\d{0,8})\.pt", re.DOTALL),
    "is what one rank saved of its tensors (torch.save)",
    "open the directory of the files of all ranks",
)

SAVE_EXTENSIONS = {".pt", ".pth", ".bin"}
"""Of a file that has all of a state dict, as `torch.save` makes it."""

BLOCKS = DirectoryFormat(
    re.compile(r"shard-(?P<shard>\d{5,9})-.+-(?P<number>\d{5,9})-of-(?P<count>\d{5,9})\.safetensors", re.DOTALL),
    "has blocks that PyTorch saved for Hugging Face",
    "open the directory of all its files",
)

_SAVED = "load all of the files with the program that wrote them, and save the model in one"
SAVED_PARTS = (
    DirectoryFormat(
        re.compile(r"(?:.+[-_.])?\d{5,}-of-(?!0*1\.)\d{5,}\.(?:bin|pt|pth)", re.DOTALL),
        "is one of several files that torch.save made of one model",
        _SAVED,
    ),
    DirectoryFormat(
        re.compile(
            r"(?:.*_)?(?:zero_pp_rank_\d+_|mp_rank_(?!0+[_.])\d+).*\.pt|layer_\d+-model_\d+.*\.pt"
            r"|consolidated\.(?!0+\.)\d+\.pth",
            re.DOTALL,
        ),
        "is what one rank of several saved of a model (torch.save)",
        _SAVED,
    ),
)
"""Files of `torch.save` that are not put together; next to others that can be read they do no harm. Shards, as those of
Hugging Face's `pytorch_model`; ranks, as those of DeepSpeed, Megatron-LM and Llama."""

DIRECTORY_FORMATS = (
    DCP,
    SAVES,
    BLOCKS,
    CHECKPOINT2,
    RUNS,
    DirectoryFormat(
        re.compile(r"(?:.+[-_.])?\d{5,}-of-(?!0*1\.)\d{5,}\.(?:safetensors|ckpt)"),
        "is one of the shards of a unified set",
        _SET,
    ),
    PARTS,
    *SAVED_PARTS,
)
"""Every one that is recognised, the surest first."""


_MOST_PARTS = 16
_OTHERS = re.compile(r"rank_\d+|.*\.(?:safetensors|ckpt)", re.DOTALL)


def parts_below(directory: Place, names: Collection[str]) -> list[str]:
    """Return the paths of all that is in directories below one, two at least, that each have a DCP; else none.

    Programs that save the model and the optimizer apart make such. Next to another checkpoint they are not looked for.

    Args:
        directory: where they are.
        names: of what is in it.
    """
    asked = sorted(name for name in names if "." not in name)
    if len(asked) > _MOST_PARTS or any(map(_OTHERS.fullmatch, names)):
        return []
    below = {name: (directory / name).names() for name in asked}
    parts = {name: there for name, there in below.items() if DCP.shown_by(directory / name, there)}
    return [f"{name}/{file}" for name, there in parts.items() for file in there] if len(parts) > 1 else []


_OF_A_SET = re.compile(r"(?:.+[-_.])?\d{5,}-of-\d{5,}\.(?:safetensors|ckpt)|model\.safetensors")


def is_of_a_set(name: str) -> bool:
    """Return whether a file, by its name, is a file or the index of a unified set of whichever style, or of blocks.

    >>> [is_of_a_set(name) for name in ("part7.safetensors", "model-00001-of-00001.safetensors", "net.safetensors")]
    [True, True, False]
    """
    others = (*SET_FILES, *CHECKPOINT2.marks)
    return name in others or any(known.fullmatch(name) for known in (PARTS.files, _OF_A_SET, CHECKPOINT2.files))


def is_later_part(path: str) -> bool:
    """Return whether a file is, by its name, what a stage of a pipeline that is not the first has of a rank.

    >>> is_later_part("rank_0/net_part1.ckpt"), is_later_part("rank_0/net_part0.ckpt"), is_later_part("net.ckpt")
    (True, False, False)
    """
    match = _NUMBERED.fullmatch(PurePath(path).name)
    return match is not None and match["before"].endswith("_part") and int(match["number"]) > 0


def refuse_directory(directory: Place, names: Iterable[str], *, besides: Collection[DirectoryFormat] = ()) -> None:
    """Check that files of a directory are not those of a directory format.

    Args:
        directory: where they are.
        names: of the files in it.
        besides: formats that they may have all the same.

    Raises:
        SourceError: they are.
    """
    names = sorted(names)
    for known in DIRECTORY_FORMATS:
        if known not in besides and (name := known.shown_by(directory, names)):
            raise SourceError(f"{directory / name} {known.problem}", code="one-of-several", hint=known.advice)


def refuse_one_of_several(path: Place) -> None:
    """Check that a file is not one of several that make a checkpoint together, by its name and what is next to it.

    Of a link, what it leads to is looked at, too.

    Raises:
        SourceError: it is.
    """
    _refuse_one_of_several(path)
    if path.is_symlink():
        _refuse_one_of_several(path.real())  # which a loop of links does not disturb


def _refuse_one_of_several(path: Place) -> None:
    directory, beside = path.absolute().parent, [path.name]
    with suppress(SourceError, OSError):  # a directory that may not be listed
        beside = [other.name for other in directory.iterdir()]
    index, files = files_beside(directory, beside)
    if path.name in files:
        if len(files) > 1:
            raise SourceError(
                f"{path} is one of {len(files)} files of a set",
                code="one-of-several",
                facts=[f"{index} next to it names all of them"],
                hint=f"open {directory}",
            )
        return
    others = _numbered_alike(path.name, beside)
    for known in DIRECTORY_FORMATS:
        if name := known.shown_by(directory, [path.name, *others, *set(known.marks).intersection(beside)]):
            subject = path if name == path.name else f"{name} next to {path}"
            raise SourceError(f"{subject} {known.problem}", code="one-of-several", hint=known.advice)
    numbered = [(path.name, others)]
    if directory.name.startswith("mp_rank_"):  # as Megatron-LM has them
        with suppress(SourceError, OSError):
            above = (other.name for other in directory.parent.iterdir())
            numbered.append((directory.name, _numbered_alike(directory.name, above)))
    for name, some in numbered:
        match = _NUMBERED.fullmatch(name)
        if match and (some or int(match["number"])):
            raise SourceError(
                f"{path} is one of several parts of a checkpoint, by its name",
                code="one-of-several",
                hint=f"open {directory}, or rename a file that has all of the checkpoint",
            )


def _numbered_alike(name: str, beside: Iterable[str]) -> list[str]:
    """Return the names that have another number at the place where one has the number of a part or a rank."""
    match = _NUMBERED.fullmatch(name)
    found = [other for one in beside if one != name and (other := _NUMBERED.fullmatch(one))]
    return sorted(other[0] for other in found if match and other.group(1, 3) == match.group(1, 3))


def refuse_blocks(path: str, notes: Mapping[str, str]) -> None:
    """Check that a file does not say of itself that it has blocks of tensors.

    Args:
        path: the file.
        notes: what its header says besides the tensors.

    Raises:
        SourceError: it does.
    """
    if SHARDING_INFO in notes:
        raise SourceError(
            f"{path} has blocks that PyTorch saved, as its header says ({SHARDING_INFO})",
            code="one-of-several",
            hint="give all such files PyTorch's names, shard-00001-model-00001-of-00001.safetensors and so on, and "
            "open their directory",
        )


def _start(path: Place) -> bytes:
    """Return the first bytes of a file, none of one that cannot be read."""
    with suppress(SourceError, OSError):
        return RangeReader(str(path), window=_MARK_BYTES).upto(0, _MARK_BYTES)
    return b""
