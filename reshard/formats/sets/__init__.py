"""Unified sets: whole tensors in files of limited size, and an index of them."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

from reshard.core.format import Found
from reshard.core.listing import FileNames, Listing, OpenOptions
from reshard.core.model.findings import doubted, of_error
from reshard.errors import Option, SourceError, Text
from reshard.formats.ranks import AnyFiles
from reshard.kits.indexes import HYPER_FILES, SET_INDEX, read_index, set_indexes, set_word
from reshard.kits.torch.names import with_trainer_files

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from reshard.core.model.findings import Candidate, Directory, Findings
    from reshard.core.options import Options
    from reshard.core.storage.places import Place
    from reshard.core.target import Target

_ADVICE = "get the other files and their index, param_name_map.json or model.safetensors.index.json"
SHARDS = FileNames(
    re.compile(r"(?:.+[-_.])?\d{5,}-of-(?!0*1\.)\d{5,}\.(?:safetensors|ckpt)"),
    "is one of the shards of a unified set",
    _ADVICE,
)
PARTS = FileNames(
    re.compile(r"(?:part\d+|hyper_param)\.(?:safetensors|ckpt)"),
    "is one of the parts of a unified set",
    f"{_ADVICE}, or rename a file that has all of a model",
    when=frozenset({"others"}),
)
"""Recognised by short names, which a rank's only file may have too."""

_OF_A_SET = re.compile(r"(?:.+[-_.])?\d{5,}-of-\d{5,}\.(?:safetensors|ckpt)|model\.safetensors")


class Set(AnyFiles):
    """A set with an index."""

    extends = ("ranks",)
    encoding = "safetensors"

    @property
    def options(self) -> type[Options]:
        """See `Format`."""
        from reshard.formats.sets import options

        return {"hf": options.HuggingFaceSet, "mindspore": options.MindSporeSet}[self.name]

    def target(self, options: Options) -> type[Target]:  # noqa: ARG002 -- all are of one kind
        """See `Format`."""
        from reshard.formats.ranks.writer import Ranks

        return Ranks

    def find(self, here: Listing) -> Found | None:
        """See `Format`."""
        indexes = set_indexes(here.names)
        return Found(self, here, indexes) if indexes and set_word(indexes[0]) == self.name else None

    def owns(self, name: str) -> bool:
        """See `Format`. A set of one file, and its index, count."""
        return super().owns(name) or name in HYPER_FILES or bool(SET_INDEX.fullmatch(name) or _OF_A_SET.fullmatch(name))

    def files_by_rank(self, found: Found, options: OpenOptions) -> Mapping[int, Sequence[Place]]:
        """See `Format`. All are of one rank."""
        from reshard.formats.ranks.opening import chosen_indexes

        files, _ = read_index(found.place, chosen_indexes(found.files, options.suffix)) or ([], {})
        return {0: files}

    def listed(self, tree: Directory) -> Iterator[tuple[Candidate, Iterable[str]]]:
        """See `Format`."""
        if (indexes := set_indexes(tree.files)) and set_word(indexes[0]) == self.name:
            yield self.candidate(tree, partial(with_trainer_files, tree, partial(self._findings, tree))), ()

    def _findings(self, tree: Directory) -> Findings:
        """Return whether the headers have all that the index names."""
        found = Found(self, Listing(tree.place, tree.names))
        try:
            return doubted(self.headers(found, OpenOptions()).warnings, tree.place)
        except SourceError as error:
            return of_error(error, tree.place)


class HuggingFace(Set):
    """The files and the index of transformers, diffusers and PEFT."""

    name = "hf"
    title = "hf set"
    parts = (SHARDS,)
    aliases = ("huggingface",)
    whole = "a Hugging Face set"

    def notes(self, names: Iterable[str]) -> Sequence[str]:
        """See `Format`. Names of Megatron-Core are known to no program that loads such sets."""
        if not any(".linear_qkv." in name or ".linear_fc1." in name for name in names):
            return ()
        return (Text("names are those of Megatron-Core; for Hugging Face's add ", Option("rules")),)


class MindSpore(Set):
    """The files and the map of MindSpore's unified checkpoints."""

    name = "mindspore"
    title = "mindspore set"
    parts = (PARTS,)
    aliases = ("ms",)
    whole = "a unified set of MindSpore"


FORMATS = (HuggingFace(), MindSpore())
