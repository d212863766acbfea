"""Directory formats: recognise checkpoints whose files are useful only together.

A block, a shard of a set and a file of whole tensors have similar contents, so that one file of several, or a directory
of another program's blocks, would pass for whole tensors or for rank files. Before any header is read, they are told
apart by unique file names, and by the first bytes of files whose names other programs use too. (The headers of
PyTorch's safetensors blocks also identify them as blocks.)

None of these formats is read file by file: a unified set is read with its index (`sets`), each of the others by a
package of `readers`.

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

from reshard.core.model.entries import RangeReader
from reshard.errors import SourceError, names
from reshard.formats.sets.names import (
    DCP_INDEX,
    HYPER_FILES,
    MODEL_CONFIG,
    SAVED_INDEX,
    SET_INDEX,
    files_beside,
)
from reshard.siblings import siblings_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from reshard.core.storage.places import Place
    from reshard.siblings import Siblings

SHARDING_INFO = "DCP_SHARDING_INFO"
"""The note of a safetensors file with the offsets of its blocks in their tensors, as PyTorch writes it."""

_MARK_BYTES = 4096  # a mark is in the first bytes; the file grows with the number of tensors
_NUMBERED = re.compile(
    r"(?P<before>.*_part(?=\d+\.\w+\Z)|(?:.*_)?mp_rank_|consolidated\.)(?P<number>\d+)(?P<after>.*)", re.DOTALL
)


class DirectoryFormat(NamedTuple):
    """A format of checkpoints in the files of one directory.

    Attributes:
        files: matches the names of its files, unique to this format.
        problem: a predicate that describes such a file, for messages.
        advice: the hint of the error.
        marks: file names that are not unique, each with a pattern that matches this format's first bytes.
        code: the code of the error.
    """

    files: re.Pattern[str]
    problem: str
    advice: str
    marks: Mapping[str, re.Pattern[bytes]] = MappingProxyType({})
    code: str = "one-of-several"

    def shown_by(self, directory: Place, names: Iterable[str]) -> str | None:
        """Return the first file name of a directory that belongs to this format, or None; marks are read last."""
        names = list(names)
        marked = (name for name in names if name in self.marks and self.marks[name].search(_start(directory / name)))
        return next(filter(self.files.fullmatch, names), None) or next(marked, None)


_SET = "get the other files and their index, param_name_map.json or model.safetensors.index.json"
PARTS = DirectoryFormat(
    re.compile(r"(?:part\d+|hyper_param)\.(?:safetensors|ckpt)"),
    "is one of the parts of a unified set",
    f"{_SET}, or rename a file that has all of a model",
)
"""Recognised by short names, which a rank's only file may have too."""

TRACKER = "latest_checkpointed_iteration.txt"
"""The tracker file of runs that save Checkpoint 2.0, and of Megatron-LM; names the last complete iteration."""


RELEASE = "release"
"""The directory of a checkpoint of Megatron-LM without an iteration, as its conversions write it."""

ORBAX = "orbax"
"""The name of the format of Orbax's files."""


class RunFormat(NamedTuple):
    """The layout of a training run's directory of checkpoints.

    Attributes:
        tracker: the file with the iteration of the last complete checkpoint.
        directory: matches the name of a checkpoint's directory and captures its iteration.
        by_name: the tracker file has the name of the directory, which need not match.
        is_numbered: there is no tracker file: the contents of the directories show whether they are checkpoints, and
            finished. Their names differ in the number alone.
    """

    tracker: str
    directory: re.Pattern[str]
    by_name: bool = False
    is_numbered: bool = False


_STEP_WORD = r"(?:.*[-_.=])?(?:global_?steps?|steps?|iter(?:ation)?s?|checkpoint|ckpt|epoch)[-_.=]?"
STEP_NAME = rf"{_STEP_WORD}(\d{{1,18}})"
"""Matches names that end in a word for a step of the training and its number, whatever the case."""

RUN_FORMATS = (
    RunFormat(TRACKER, re.compile(r"iteration_(\d{8,18})")),  # MindSpore Transformers
    RunFormat("latest_checkpoint_iteration.txt", re.compile(r"global_step_(\d{1,18})")),  # hyper-parallel
    RunFormat(TRACKER, re.compile(r"iter_(\d{7,18})")),  # Megatron-LM
    RunFormat("latest", re.compile(r"global_step(\d{1,18})"), by_name=True),  # DeepSpeed
    RunFormat("latest_universal", re.compile(r"global_step(\d{1,18})_universal"), by_name=True),
    RunFormat("", re.compile(r"(?:.+_)?(\d{1,18})", re.DOTALL), is_numbered=True),  # Orbax
    RunFormat(
        "", re.compile(rf"(?:{_STEP_WORD})?(\d{{1,18}})(?:[-_.]ckpt?)?", re.IGNORECASE | re.DOTALL), is_numbered=True
    ),  # DCPs, as of torchtitan
)


def is_iteration(name: str) -> bool:
    """Return whether a name is a checkpoint's directory within the directory of a run; not by a number alone."""
    return any(run.directory.fullmatch(name) for run in RUN_FORMATS if not run.is_numbered)


RUNS = DirectoryFormat(
    re.compile("|".join(re.escape(run.tracker) for run in RUN_FORMATS if run.tracker and not run.by_name)),
    "names an iteration of a training run that saves distributed checkpoints",
    "open the directory of the run, which has that of the iteration",
)
"""The parent directory of checkpoints; a whole file in it belongs to none of them."""

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
"""Patterns of the names of data files, with the rank, by the class of their storage records: hyper-parallel's and
PyTorch's."""

DCP_OF_RANK = re.compile(r"((?:__)?(?=\d+\.)|\.rank(?=\d+_))(0|[1-9]\d{0,8})[._]metadata")
"""The names of metadata of single ranks, PyTorch's and two of hyper-parallel's; captures the kind and the rank."""

DCP = DirectoryFormat(
    re.compile("|".join(names.pattern for names in (*DCP_FILES.values(), DCP_OF_RANK)), re.DOTALL),
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
"""The extensions of files with a whole state dict, as `torch.save` writes them; `.ckpt` may be of MindSpore, too."""

TRAINER_FILES = re.compile(
    r"common\.pt|(?:optim(?:izer)?|(?:lr_)?scheduler|(?:grad_)?scaler|sampler|training_args|rng_state|recipe_state"
    r"|dl_state_dict)(?:[-_].*)?\.(?:pt|pth|bin)",
    re.DOTALL,
)
"""What trainers save next to the weights, with `torch.save`."""

MODEL_STATES = re.compile(r"(?:zero_pp_rank_(?P<rank>\d{1,9})_)?mp_rank_(?P<part>\d{1,9})_model_states\.pt")
"""DeepSpeed's files of weights, and of all that is not of the optimizer: one of each tensor-parallel part; with ZeRO
stage 3, one of each of its data-parallel ranks."""

OPTIM_STATES = re.compile(r"(?:bf16_)?zero_pp_rank_(?P<rank>\d{1,9})_mp_rank_(?P<part>\d{1,9})_optim_states\.pt")
"""DeepSpeed's files of optimizer states: one of each data-parallel rank of each tensor-parallel part."""

EXPERT_STATES = re.compile(r"(?:layer_\d{1,9}_)?expert_\d{1,9}_mp_rank_(?P<part>\d{1,9})_model_states\.pt")
"""DeepSpeed's files of the weights of one expert."""

DEEPSPEED = DirectoryFormat(
    re.compile(
        r"(?:bf16_)?(?:zero_pp_rank_\d{1,9}_)?mp_rank_\d{1,9}_(?:model|optim)_states\.pt|"
        r"(?:layer_\d{1,9}_)?expert_\d{1,9}_mp_rank_\d{1,9}_model_states\.pt"
    ),
    "is of a checkpoint of DeepSpeed",
    "open the directory of all its files, or of the run",
)

BLOCKS = DirectoryFormat(
    re.compile(r"shard-(?P<shard>\d{5,9})-.+-(?P<number>\d{5,9})-of-(?P<count>\d{5,9})\.safetensors", re.DOTALL),
    "has blocks that PyTorch saved for Hugging Face",
    "open the directory of all its files",
)

_ALL = "open the directory of all its files"
SAVED_SET = DirectoryFormat(
    re.compile(rf"(?:.+[-_.])?\d{{5,}}-of-(?!0*1\.)\d{{5,}}\.(?:bin|pt|pth)|{SAVED_INDEX.pattern}", re.DOTALL),
    "is one of several files that torch.save made of one model",
    _ALL,
)
"""Sets of whole tensors in files of `torch.save`, as Hugging Face's `pytorch_model`."""

CONSOLIDATED = DirectoryFormat(
    re.compile(r"consolidated\.(?P<part>\d{1,9})\.pth"),
    "is what one rank of several saved of a model (torch.save)",
    _ALL,
)
"""Meta's files, one of each tensor-parallel part; the only one may be the whole model."""

MEGATRON_RANKS = DirectoryFormat(
    re.compile(r"[mt]p_rank_(?P<part>\d{2,9})(?:_(?:pp_rank_)?(?P<stage>\d{3,9}))?(?:_(?P<expert>\d{3,9}))?"),
    "is the directory of one rank of Megatron-LM",
    "open the directory above",
)
"""Directories of Megatron-LM's older format, one of each tensor-parallel part of each pipeline stage; and NeMo 1's."""

SAVED_PARTS = (
    SAVED_SET,
    DirectoryFormat(
        re.compile(
            r"(?:.*_)?(?:zero_pp_rank_\d+_|mp_rank_(?!0+[_.])\d+).*\.pt|layer_\d+-model_\d+.*\.pt"
            r"|consolidated\.(?!0+\.)\d+\.pth",
            re.DOTALL,
        ),
        CONSOLIDATED.problem,
        _ALL,
    ),
    MEGATRON_RANKS,
)
"""Partial files of `torch.save`; next to other readable files they are ignored."""

_ORIGINAL = "convert the Hugging Face model that it was made from"
FOREIGN_FILES = (
    DirectoryFormat(
        re.compile(r".+\.gguf", re.DOTALL), "is a GGUF file of llama.cpp, which is not read", _ORIGINAL,
        code="unsupported-format",
    ),
    DirectoryFormat(
        re.compile(r".+\.npy", re.DOTALL), "is a file of NumPy, which is not read",
        'in Python: reshard.write({"NAME": numpy.load("FILE.npy")}, "TARGET.safetensors")', code="unsupported-format",
    ),
    DirectoryFormat(
        re.compile(r".+\.npz", re.DOTALL), "is a file of NumPy, which is not read",
        'in Python: reshard.write(dict(numpy.load("FILE.npz")), "TARGET.safetensors")', code="unsupported-format",
    ),
)  # fmt: skip
"""Files of other programs that are not read; next to a checkpoint they are ignored."""

FOREIGN = (
    DirectoryFormat(
        re.compile(r"model-rank-\d+-part-\d+\.safetensors"), "is of the sharded state of vLLM, which is not read",
        _ORIGINAL, code="unsupported-format",
    ),
    DirectoryFormat(
        re.compile(r"rank\d+\.engine"), "is of a model for TensorRT-LLM, which is not read", _ORIGINAL,
        {MODEL_CONFIG: re.compile(rb'"mapping"\s*:\s*\{[^{}]*"world_size"')}, "unsupported-format",
    ),
    *FOREIGN_FILES,
)  # fmt: skip
"""Formats of other programs that are not read."""

DIRECTORY_FORMATS = (
    *FOREIGN,
    DCP,
    SAVES,
    DEEPSPEED,
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
"""All recognised formats, the surest first."""


_MOST_PARTS = 16
_OTHERS = re.compile(r"rank_\d+|.*\.(?:safetensors|ckpt)", re.DOTALL)


def parts_below(directory: Place, names: Collection[str]) -> list[str]:
    """Return the paths of all files in subdirectories with a DCP.

    The result is empty unless there are at least two such subdirectories. Programs that save the model and the
    optimizer separately write such directories. Next to another checkpoint, they are not searched for.

    Args:
        directory: the parent directory.
        names: the names of its entries.
    """
    candidates = sorted(name for name in names if "." not in name)
    if len(candidates) > _MOST_PARTS or any(map(_OTHERS.fullmatch, names)):
        return []
    below = {name: (directory / name).names() for name in candidates}
    parts = {name: files for name, files in below.items() if DCP.shown_by(directory / name, files)}
    return [f"{name}/{file}" for name, files in parts.items() for file in files] if len(parts) > 1 else []


_OF_A_SET = re.compile(r"(?:.+[-_.])?\d{5,}-of-\d{5,}\.(?:safetensors|ckpt)|model\.safetensors")


def saved_parts(kind: DirectoryFormat, directory: Place, names: Collection[str]) -> Collection[str]:
    """Return `names` if the directory is of a format of `torch.save`, and has no checkpoint that is preferred to it."""
    return names if kind.shown_by(directory, names) and not any(map(_OTHERS.fullmatch, names)) else []


def release_below(directory: Place, names: Collection[str]) -> Collection[str]:
    """Return the names in `release`, if that is the only checkpoint in the directory of a run of Megatron-LM."""
    inside = (directory / RELEASE).names() if {TRACKER, RELEASE} <= {*names} else []
    return inside if MEGATRON_RANKS.shown_by(directory, inside) else []


def is_of_a_set(name: str) -> bool:
    """Return whether a file name is of a unified set, its index, or a checkpoint of blocks or of DeepSpeed.

    >>> [is_of_a_set(name) for name in ("part7.safetensors", "model-00001-of-00001.safetensors", "net.safetensors")]
    [True, True, False]
    """
    exact_names = (*HYPER_FILES, *CHECKPOINT2.marks)
    patterns = (SET_INDEX, PARTS.files, _OF_A_SET, CHECKPOINT2.files, DEEPSPEED.files)
    return name in exact_names or any(pattern.fullmatch(name) for pattern in patterns)


def is_later_part(path: str) -> bool:
    """Return whether a file name is a rank's file of a pipeline stage after the first.

    >>> is_later_part("rank_0/net_part1.ckpt"), is_later_part("rank_0/net_part0.ckpt"), is_later_part("net.ckpt")
    (True, False, False)
    """
    match = _NUMBERED.fullmatch(PurePath(path).name)
    return match is not None and match["before"].endswith("_part") and int(match["number"]) > 0


def refuse_directory(directory: Place, names: Iterable[str], *, besides: Collection[DirectoryFormat] = ()) -> None:
    """Raise an error if a directory contains files of a directory format.

    Args:
        directory: the directory.
        names: the names of its files.
        besides: formats that are accepted.

    Raises:
        SourceError: it contains such files.
    """
    names = sorted(names)
    for format_ in DIRECTORY_FORMATS:
        if format_ not in besides and (name := format_.shown_by(directory, names)):
            raise SourceError(f"{directory / name} {format_.problem}", code=format_.code, hint=format_.advice)


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
    for format_ in DIRECTORY_FORMATS:
        if name := format_.shown_by(
            directory, [path.name, *parts, *(name for name in format_.marks if name in siblings.names)]
        ):
            subject = path if name == path.name else f"{name} next to {path}"
            raise SourceError(f"{subject} {format_.problem}", code=format_.code, hint=format_.advice)
    match = _NUMBERED.fullmatch(path.name)
    above = directory
    is_part = bool(match and (parts or int(match["number"])))
    others = list(parts)
    if of_rank := MEGATRON_RANKS.files.fullmatch(directory.name):
        is_part, above = any(int(number) for number in of_rank.groups("0")), directory.parent
        ranks = [name for name in siblings_of(above).names if MEGATRON_RANKS.files.fullmatch(name)]
        is_part = is_part or len(ranks) > 1
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


def refuse_blocks(path: str, notes: Mapping[str, str]) -> None:
    """Raise an error if a file's header says that it contains blocks of tensors.

    Args:
        path: the file.
        notes: the notes in its header.

    Raises:
        SourceError: it contains blocks.
    """
    if SHARDING_INFO in notes:
        raise SourceError(
            f"{path} has blocks that PyTorch saved, as its header says ({SHARDING_INFO})",
            code="one-of-several",
            hint="give all such files PyTorch's names, shard-00001-model-00001-of-00001.safetensors and so on, and "
            "open their directory",
        )


def _start(path: Place) -> bytes:
    """Return a file's first bytes, or b"" if it is unreadable."""
    with suppress(SourceError, OSError):
        return RangeReader(str(path), window=_MARK_BYTES).upto(0, _MARK_BYTES)
    return b""
