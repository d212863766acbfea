"""Names of files that `torch.save` wrote."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from reshard.core.model.findings import Findings, of_error
from reshard.core.storage.base import reading
from reshard.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from reshard.core.model.findings import Directory

COMMON, BACKEND = "common.pt", "metadata.json"
"""The files that Megatron-Core writes next to the tensors: its common state, and the names of its own format."""

SAVE_EXTENSIONS = {".pt", ".pth", ".bin"}
"""The extensions of files with a whole state dict, as `torch.save` writes them; `.ckpt` may be of MindSpore, too."""

TRAINER_FILES = re.compile(
    r"common\.pt|(?:optim(?:izer)?|(?:lr_)?scheduler|(?:grad_)?scaler|sampler|training_args|rng_state|recipe_state"
    r"|dl_state_dict)(?:[-_].*)?\.(?:pt|pth|bin)",
    re.DOTALL,
)
"""What trainers save next to the weights, with `torch.save`."""


def with_trainer_files(tree: Directory, examine: Callable[[], Findings]) -> Findings:
    """Return the findings about a checkpoint, and about the files of its trainer."""
    findings = examine()
    return (faulty_trainer_file(tree) or findings) if findings.state == "complete" else findings


def faulty_trainer_file(tree: Directory) -> Findings | None:
    """Return the findings about the first file of a trainer that cannot be read, or None."""
    from reshard.kits.torch.file import TorchFile  # not on every start

    for name in sorted(filter(TRAINER_FILES.fullmatch, tree.files)):
        try:
            with reading(SourceError):
                TorchFile.read(tree.place / name, "the state of a trainer", with_value=False)
        except SourceError as error:
            return of_error(error, tree.place)
    return None


_READABLE = re.compile(r"rank_\d+|.*\.(?:safetensors|ckpt)", re.DOTALL)


def is_beside_readable(names: Iterable[str]) -> bool:
    """Return whether a directory with these names has a checkpoint that is preferred to parts of `torch.save`."""
    return any(map(_READABLE.fullmatch, names))
