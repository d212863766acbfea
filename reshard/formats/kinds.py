"""Kinds of targets: words of `--to` and `format`, options, and destinations."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from reshard.core.model.entries import NamedFile, RankFiles, TargetFiles
from reshard.core.records.schema import Count, InnerPath
from reshard.core.records.schema import read as read_record
from reshard.core.storage.places import as_place
from reshard.errors import Option, Text, UsageError, joined
from reshard.formats.checkpoint2.writer import Checkpoint2
from reshard.formats.dcp.names import DCP, LinkedDCP
from reshard.formats.deepspeed.names import DeepSpeedUniversal
from reshard.formats.sets.options import HuggingFaceSet, MindSporeSet
from reshard.formats.zarr.layout import NAME as ZARR
from reshard.formats.zarr.layout import OrbaxTree, ZarrGroup

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from reshard.core.storage.places import AnyName, Place
    from reshard.core.target import Target

DCP_NAME, CHECKPOINT2_NAME, UNIVERSAL_NAME, ORBAX_NAME = "dcp", "checkpoint2", "deepspeed-universal", "orbax"
TO = ("ckpt", "safetensors", "hf", "mindspore", DCP_NAME, CHECKPOINT2_NAME, UNIVERSAL_NAME, ORBAX_NAME, "zarr")
"""The target formats: values of `--to` on the command line, and of `to` and `format` in Python."""

OTHER_WORDS = {"huggingface": "hf", "distcp": DCP_NAME, "ms": "mindspore"}
"""Aliases of target formats."""

RANKS = ("safetensors", "ckpt")
"""Words for files of ranks."""

WHOLE = {
    "hf": "a Hugging Face set", "mindspore": "a unified set of MindSpore", ZARR: "a zarr store",
    UNIVERSAL_NAME: "a Universal Checkpoint of DeepSpeed", ORBAX_NAME: "a checkpoint of Orbax",
}  # fmt: skip
"""Words for targets of whole tensors only."""

_BLOCKS = (*RANKS, DCP_NAME, CHECKPOINT2_NAME)
TAKEN_BY: Mapping[str, Sequence[str]] = {
    "layouts_of": (DCP_NAME, CHECKPOINT2_NAME),
    "target_strategy": _BLOCKS,
    "ranks": _BLOCKS,
    "target_stage": _BLOCKS,
    "remove_redundancy": _BLOCKS,
    "link_replicas": _BLOCKS,
    "same_ranks": RANKS,
    "prefix": (*RANKS, CHECKPOINT2_NAME),
    "target_step": (DCP_NAME, CHECKPOINT2_NAME),
    "max_shard_size": ("hf", "mindspore", DCP_NAME, CHECKPOINT2_NAME),
    "link": (DCP_NAME,),
    "chunk_size": (ZARR, ORBAX_NAME),
    "shard_size": (ZARR, ORBAX_NAME),
    "compression": (ZARR, ORBAX_NAME),
}
"""The words that accept each option, for options that not all words accept."""

CUT = ("layouts_of", "target_strategy", "ranks", "target_stage", "remove_redundancy", "link_replicas")
"""Options for the ranks of the target."""

_FOREIGN = {".npz", ".npy", ".pt", ".pth", ".bin", ".h5", ".pkl", ".json", ".gguf", ".onnx", ".zip", ".tar", ".gz"}
"""Extensions of files that are not written."""

AnyFiles = TargetFiles | ZarrGroup | DCP | LinkedDCP | DeepSpeedUniversal
"""A file layout of a target."""

OF_FORMATS: dict[str | None, type[ZarrGroup | DCP | DeepSpeedUniversal]] = {
    ZARR: ZarrGroup, DCP_NAME: DCP, UNIVERSAL_NAME: DeepSpeedUniversal,
}  # fmt: skip
"""Formats of whole directories, with their file layouts."""

_DESTINATIONS: dict[type, str] = {
    Checkpoint2: "reshard.formats.checkpoint2.writer:Checkpoint2Target",
    DCP: "reshard.formats.dcp.writer:DCPTarget",
    DeepSpeedUniversal: "reshard.formats.deepspeed.writer:UniversalTarget",
    LinkedDCP: "reshard.formats.dcp.relinked:Relinked",
    OrbaxTree: "reshard.formats.orbax.writer:OrbaxItem",
    ZarrGroup: "reshard.formats.zarr.writer:ZarrStore",
}

_IN_PLAN_FILES: dict[str, tuple[type[Any], Any]] = {
    "rank_files": (RankFiles, tuple[str, str]),
    "named_file": (NamedFile, tuple[InnerPath]),
    "mindspore_set": (MindSporeSet, tuple[Count]),
    "hugging_face_set": (HuggingFaceSet, tuple[Count]),
    "checkpoint2": (Checkpoint2, tuple[Count | None, str | None, Count, str | None]),
    "zarr_group": (ZarrGroup, tuple[Count | None, Count | None, str | None, bool]),
    "orbax_tree": (OrbaxTree, tuple[Count | None, Count | None, str | None, bool]),
    "dcp": (DCP, tuple[Count, Count | None]),
    "linked_dcp": (LinkedDCP, tuple[()]),
    "deepspeed_universal": (DeepSpeedUniversal, tuple[()]),
}
"""The classes that lay out the target's files: name in a plan file, class, and type of the class's fields."""


@dataclass(frozen=True, slots=True)
class FilesRecord:
    """How the target's files are laid out, in a plan file: a name in `_IN_PLAN_FILES`, and the fields of the class."""

    way: str
    fields: Any

    @classmethod
    def of(cls, files: AnyFiles) -> FilesRecord:
        """Return the record of a file layout.

        Raises:
            UsageError: a plan with such files cannot be saved.
        """
        fields: Any = files  # each of the classes in `_IN_PLAN_FILES` is a tuple or a dataclass
        if isinstance(files, ZarrGroup) and files.times:
            raise UsageError(
                "a plan of a zarr store with the times of its source files cannot be saved", code="not-savable",
                hint="leave the times out",
            )  # fmt: skip
        for name, (kind, _) in _IN_PLAN_FILES.items():
            if type(files) is kind:
                return cls(name, fields if isinstance(fields, tuple) else astuple(fields))
        raise UsageError(f"a plan with files of {type(files).__name__} cannot be saved", code="not-savable")

    def read(self) -> AnyFiles:
        """Return the file layout; raise `ValueError` if the record is invalid."""
        if self.way not in _IN_PLAN_FILES:
            raise ValueError(f"$.files.way is {self.way!r:.60}; known are {', '.join(_IN_PLAN_FILES)}")
        kind, types = _IN_PLAN_FILES[self.way]
        files: AnyFiles = kind(*read_record(types, self.fields, "$.files.fields"))
        return files


def destination_of(files: AnyFiles) -> type[Target]:
    """Return the destination class for a file layout; `Ranks` by default."""
    names = (_DESTINATIONS[base] for base in type(files).__mro__ if base in _DESTINATIONS)
    module, _, name = next(names, "reshard.formats.ranks.writer:Ranks").partition(":")
    # Import the module only if needed.
    destination: type[Target] = getattr(import_module(module), name)
    return destination


def word_of(name: str) -> str:
    """Return the word for a format name.

    Raises:
        UsageError: the format is unknown.

    >>> word_of("huggingface"), word_of("ckpt")
    ('hf', 'ckpt')
    """
    word = OTHER_WORDS.get(name, name)
    if word not in TO:
        raise UsageError(f"unknown format {name!r:.60}; known are {', '.join(TO)}", code="unknown-format")
    return word


def named_word(target: AnyName) -> tuple[str, str] | None:
    """Return the word implied by the name of a target, and the reason; or None."""
    path = as_place(target)
    if path.suffix == f".{ZARR}":
        return ZARR, f"as {path.name} is the name of a zarr store"
    if is_file_name(target):
        return path.suffix[1:], f"as {path.name} is the name of such a file"
    return None


def is_file_name(target: AnyName) -> bool:
    """Return whether a target has the name of a single file, and is not a directory."""
    path = as_place(target)
    return path.suffix[1:] in RANKS and not path.is_dir()


def refuse_foreign_name(target: Place) -> None:
    """Refuse a target whose name has the extension of a format that is not written.

    Raises:
        UsageError: it has such an extension, and is not an existing directory.
    """
    if target.suffix in _FOREIGN and not target.is_dir():
        raise UsageError(
            f"{target.name} is the name of a {target.suffix} file, which reshard does not write", code="unknown-format",
            hint="name a directory, or a file that ends with .safetensors or .ckpt",
        )  # fmt: skip


def check_options(word: str, options: Collection[str]) -> None:
    """Check that a target accepts options.

    Args:
        word: the kind of the target.
        options: the names of the options, as in `TAKEN_BY`.

    Raises:
        UsageError: the target does not accept an option.
    """
    wrong = [name for name in options if word not in TAKEN_BY.get(name, TO)]
    if not wrong:
        return
    options_text = joined(", ", [Text(Option(name)) for name in wrong])
    code = "option-of-another-format"
    if word in WHOLE and (cut := [name for name in wrong if name in CUT]):
        raise UsageError(
            f"{WHOLE[word]} holds whole tensors", code=code,
            hint=Text("leave ", joined(", ", [Text(Option(name)) for name in cut]), " out"),
        )  # fmt: skip
    first, *alternatives = TAKEN_BY[wrong[0]]
    raise UsageError(
        Text(options_text, f" does not go with the format {word}"), code=code,
        hint=Text("leave ", options_text, " out, or choose ", Option("to", first),
            *(f" or {alternative}" for alternative in alternatives),
        ),
    )  # fmt: skip


def files_of(
    word: str,
    name: str | None = None,
    *,
    prefix: str | None = None,
    step: int | None = None,
    max_shard_size: int | None = None,
    chunk_size: int | None = None,
    shard_size: int | None = None,
    compression: str | None = None,
) -> AnyFiles | None:
    """Return the file layout of a target, or None for the files of ranks.

    Args:
        word: the kind of the target.
        name: the name of the target, if it is a single file.
        prefix: as in `Checkpoint2`.
        step: as in `Checkpoint2` and `DCP`.
        max_shard_size: as in `Checkpoint2`, `DCP` and the sets.
        chunk_size: as in `ZarrGroup`.
        shard_size: as in `ZarrGroup`.
        compression: as in `ZarrGroup`.
    """
    if word in {ZARR, ORBAX_NAME}:
        return (ZarrGroup if word == ZARR else OrbaxTree)(chunk_size, shard_size, compression)
    if word in RANKS:
        return None if name is None else NamedFile(name)
    size_option: dict[str, Any] = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    if word == DCP_NAME:
        return DCP(step=step, **size_option)
    if word == UNIVERSAL_NAME:
        return DeepSpeedUniversal()
    if word == CHECKPOINT2_NAME:
        return Checkpoint2(step, prefix, **size_option)
    return HuggingFaceSet(**size_option) if word == "hf" else MindSporeSet(**size_option)


def file_format(word: str) -> str | None:
    """Return the format of the files of a target; None for a Checkpoint 2.0.

    >>> file_format("hf"), file_format("dcp")
    ('safetensors', 'dcp')
    """
    if word == CHECKPOINT2_NAME:
        return None  # a Checkpoint 2.0 has its own format
    if word == ORBAX_NAME:
        return ZARR
    return word if word in {*RANKS, *OF_FORMATS} else "safetensors"
