"""Carry the files beside the weights of a set to a set made from it: model card, configuration, tokenizer.

They are carried byte for byte and kept in memory from planning on. Only files in the directory of the set are, with the
names that models have; not its index, weights, hidden files or directories. Links are followed only to where the
weights are, as in a cache of the Hugging Face Hub: a link to anywhere else would publish a file that is not of the
model. Nothing in them is run.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from reshard.errors import SourceError, bytes_text, names
from reshard.expressions.model_config import with_dtypes, without_quantization
from reshard.formats.sets import MODEL_CONFIG, HuggingFaceSet, MindSporeSet
from reshard.storage.places import as_place
from reshard.storage.small import read_small

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.source.checkpoint import Checkpoint
    from reshard.storage.places import Place
    from reshard.targets.destination import TargetTensor

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
        too_large: names of files that are left out because of their size.
        outside: names of links to files outside the set, which are left out.
    """

    def __init__(self, source: Checkpoint, files: object, items: Sequence[TargetTensor]) -> None:
        """Read the files.

        Args:
            source: the checkpoint that is converted.
            files: the file layout of the target; only sets have sidecar files.
            items: the planned tensors.

        Raises:
            SourceError: a file cannot be read.
        """
        self.contents: dict[str, bytes] = {}
        self.too_large: list[str] = []
        self.outside: list[str] = []
        is_renamed = source.origin is not None and source.origin.rules is not None
        if is_renamed or not isinstance(files, HuggingFaceSet | MindSporeSet):
            return  # with rules the target is of another program
        first, skipped = source.opened, _NO_NAMES
        while computation := first.opening.computation:
            skipped = _NO_NAMES_DEQUANTIZED if computation.kind == "dequantize" else skipped
            first = computation.inputs[0].opened
        own = {as_place(file.path).real().parent for _, file in first.stored_files}
        for path in _beside(first):
            if skipped.fullmatch(path.name):
                continue
            if path.is_symlink() and path.real().parent not in {*own, path.parent.real()}:
                self.outside.append(path.name)
            elif path.status().nbytes > LARGEST:
                self.too_large.append(path.name)
            else:
                self.contents[path.name] = read_small(path, "sidecar file", LARGEST, SourceError)
        own_config = source.extras.model_config
        if own_config:
            self.contents[MODEL_CONFIG] = own_config
        if PARAMS in self.contents and skipped is _NO_NAMES_DEQUANTIZED:
            self.contents[PARAMS] = without_quantization(self.contents[PARAMS])
        if MODEL_CONFIG in self.contents:
            dtypes = {item.tensor.spec.dtype.name: item.dtype.name for item in items}
            self.contents[MODEL_CONFIG] = with_dtypes(self.contents[MODEL_CONFIG], dtypes)

    @property
    def nbytes(self) -> int:
        """Return the number of bytes in memory."""
        return sum(map(len, self.contents.values()))

    def warnings(self) -> list[str]:
        """Return warnings about files that are too large, and about links."""
        reasons = {f"more than {bytes_text(LARGEST)}": self.too_large, "outside the directory": self.outside}
        return [f"{names(left)}: {why}, not copied beside the weights" for why, left in reasons.items() if left]


def _beside(source: Checkpoint) -> list[Place]:
    """Return the files to carry from the directory of a set; none if the checkpoint is not a set."""
    root = as_place(source.root)
    weights = {as_place(file.path) for _, file in source.stored_files}
    in_root = {path.parent for path in weights} == {root.absolute()}
    if not in_root or source.opening.by_file or {*source.ranks} != {0}:
        return []
    if source.strategy is not None and source.strategy.devices > 1:
        return []  # the files of one rank of several
    if any(path.suffix not in _WEIGHTS for path in weights):
        return []
    return sorted(path for path in root.files(depth=1) if path.parent == root and _NAMES.fullmatch(path.name))
