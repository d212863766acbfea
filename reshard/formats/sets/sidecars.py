"""Carry the files beside the weights of a set to a set or store made from it: model card, configuration, tokenizer.

They are carried byte for byte and kept in memory from planning on. Only files in the directory of the set are, with the
names that models have; not its index, weights, hidden files or directories. Links are followed only to where the
weights are, as in a cache of the Hugging Face Hub: a link to anywhere else would publish a file that is not of the
model. Nothing in them is run.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from reshard.core.format import is_of_several
from reshard.core.model.objects import contents
from reshard.core.storage.places import as_place
from reshard.core.storage.small import read_small
from reshard.errors import SourceError, bytes_text
from reshard.expressions.model_config import with_dtypes, without_quantization
from reshard.kits.indexes import MODEL_CONFIG

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.storage.places import Place
    from reshard.core.target import TargetTensor

_NAMES = re.compile(
    r"(?:README|LICEN[CS]E|NOTICE|USE_POLICY)(?:\.\w+)?"
    r"|[^.].*\.(?:json|jinja|model|txt|py|md|tiktoken|vocab|bpe)",
    re.DOTALL | re.IGNORECASE,
)
_NO_NAMES = re.compile(r".*(?:index|manifest|strategy|param_name_map).*\.json", re.DOTALL | re.IGNORECASE)
_NO_NAMES_DEQUANTIZED = re.compile(rf"{_NO_NAMES.pattern}|.*quant.*\.json", _NO_NAMES.flags)
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt"}

PARAMS = "params.json"
"""Mistral's configuration of a model."""

LARGEST = 64 << 20
"""The most bytes of a carried file; vocabularies have less."""


class Sidecars:
    """The sidecar files of a target.

    Attributes:
        contents: the bytes of each file, by name.
        left_out: why other files are left out, by name.
    """

    def __init__(self, source: Checkpoint, items: Sequence[TargetTensor], *, are_wanted: bool = True) -> None:
        """Read the files.

        Args:
            source: the checkpoint that is converted.
            items: the planned tensors.
            are_wanted: the target is a set or a zarr store; no other has sidecar files.

        Raises:
            SourceError: a file cannot be read.
        """
        self.contents: dict[str, bytes] = {}
        self.left_out: dict[str, str] = {}
        is_renamed = source.origin is not None and source.origin.rules is not None
        if is_renamed or not are_wanted:
            return  # with rules the target is of another program
        first, is_dequantized = _first(source)
        skipped = _NO_NAMES_DEQUANTIZED if is_dequantized else _NO_NAMES
        own = {as_place(file.path).real().parent for _, file in first.stored_files}
        for path in _beside(first):
            if skipped.fullmatch(path.name):
                continue
            if path.is_symlink() and path.real().parent not in {*own, path.parent.real()}:
                self.left_out[path.name] = "outside the directory"
            elif path.status().nbytes > LARGEST:
                self.left_out[path.name] = f"more than {bytes_text(LARGEST)}"
            else:
                self.contents[path.name] = read_small(path, "sidecar file", LARGEST, SourceError)
        files = first.extras.files
        self.contents |= contents(
            {name: files[name] for name in filter(is_sidecar, files) if not skipped.fullmatch(name)}
        )
        if source.extras.model_config:
            self.contents[MODEL_CONFIG] = source.extras.model_config
        if PARAMS in self.contents and is_dequantized:
            self.contents[PARAMS] = without_quantization(self.contents[PARAMS])
        if MODEL_CONFIG in self.contents:
            dtypes = {item.tensor.spec.dtype.name: item.dtype.name for item in items}
            self.contents[MODEL_CONFIG] = with_dtypes(self.contents[MODEL_CONFIG], dtypes)

    @property
    def names(self) -> set[str]:
        """Return the names of the files, and those that a warning names."""
        return {*self.contents, *self.left_out}

    @property
    def nbytes(self) -> int:
        """Return the number of bytes in memory."""
        return sum(map(len, self.contents.values()))

    def warnings(self) -> list[str]:
        """Return warnings about files that are left out."""
        return [f"{name}: {why}, not copied beside the weights" for name, why in self.left_out.items()]


def is_sidecar(name: str) -> bool:
    """Return whether a file of this name may stand beside the weights of a set."""
    return "/" not in name and bool(_NAMES.fullmatch(name)) and not _NO_NAMES.fullmatch(name)


def sidecar_names(source: Checkpoint) -> list[str]:
    """Return the names of the files beside the weights of a set, or of the set that a store was made of."""
    first, _ = _first(source)
    names_beside = [path.name for path in _beside(first) if is_sidecar(path.name)]
    return sorted({*names_beside, *filter(is_sidecar, first.extras.files)})


def shard_size(source: Checkpoint) -> int:
    """Return the most bytes of tensors in a file of a set of several files, or of a store made of one; 0 for others."""
    first, _ = _first(source)
    weights = [file for _, file in first.stored_files if is_of_several(as_place(file.path).name)]
    if first.extras.described_by or first.strategy or len(weights) < 2:
        return first.extras.shard_size
    return max(sum(entry.nbytes for entry in file.index.entries.values() if entry.text is None) for file in weights)


def _first(source: Checkpoint) -> tuple[Checkpoint, bool]:
    """Return the opened checkpoint (of a computed one, the first input), and whether it was dequantized."""
    first, is_dequantized = source.opened, False
    while computation := first.opening.computation:
        is_dequantized |= computation.kind == "dequantize"
        first = computation.inputs[0].opened
    return first, is_dequantized


def _beside(source: Checkpoint) -> list[Place]:
    """Return the files to carry from the directory of a set; none if the checkpoint is not a set."""
    root = as_place(source.root)
    weights = {as_place(file.path) for _, file in source.stored_files}
    is_one_of_ranks = source.strategy is not None and source.strategy.devices > 1
    if source.opening.by_file or is_one_of_ranks or {*source.ranks} != {0}:
        return []
    if {path.parent for path in weights} != {root.absolute()} or not {path.suffix for path in weights} <= _WEIGHTS:
        return []
    return sorted(path for path in root.files(depth=1) if path.parent == root and _NAMES.fullmatch(path.name))
