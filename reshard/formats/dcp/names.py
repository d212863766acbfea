"""Names of the files of distributed checkpoints."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from reshard.arguments import checked_fields
from reshard.core.listing import FileNames, Listing
from reshard.core.options import Options, option
from reshard.core.target import check_size, check_step

if TYPE_CHECKING:
    from collections.abc import Collection

    from reshard.core.storage.places import Place

DCP_INDEX = ".metadata"
"""The file that lists the blocks of a distributed checkpoint."""

DCP_ITEMS = "distcp"
"""The format of data files whose items are written by PyTorch's `torch.save`."""

TRACKER = "latest_checkpointed_iteration.txt"
"""The tracker of a run of Megatron-LM."""

DCP_FILES = {
    "StorageInfo": re.compile(r"_rank(\d{1,9})_\.safetensors"),
    "_StorageInfo": re.compile(r"(?:[^/\\]*__(\d{1,9})_\d+|[^/\\]+)\.distcp", re.DOTALL),
}
"""Patterns of the names of data files, with the rank, by the class of their storage records: hyper-parallel's and
PyTorch's."""


def rank_of(path: str) -> int:
    """Return the rank that wrote a file, from its name; 0 if the name has no rank."""
    name = path.rpartition("/")[2]
    match = next(filter(None, (pattern.fullmatch(name) for pattern in DCP_FILES.values())), None)
    return int(match[1]) if match and match[1] else 0


@lru_cache(maxsize=1 << 16)
def is_data_of(kind: str, file: str) -> bool:
    """Return whether a file has a name that the files of this class of storage records have."""
    return DCP_FILES[kind].fullmatch(file) is not None and file.isprintable()


DCP_OF_RANK = re.compile(r"((?:__)?(?=\d+\.)|\.rank(?=\d+_))(0|[1-9]\d{0,8})[._]metadata")
"""The names of metadata of single ranks, PyTorch's and two of hyper-parallel's; captures the kind and the rank."""

FILES = FileNames(
    re.compile("|".join(names.pattern for names in (*DCP_FILES.values(), DCP_OF_RANK)), re.DOTALL),
    "is of a distributed checkpoint (DCP) of PyTorch, Megatron or hyper-parallel",
    "open the directory of all its files",
    {DCP_INDEX: re.compile(rb"\A\x80[\x02-\x05]")},  # a pickle
)

BLOCKS = FileNames(
    re.compile(r"shard-(?P<shard>\d{5,9})-.+-(?P<number>\d{5,9})-of-(?P<count>\d{5,9})\.safetensors", re.DOTALL),
    "has blocks that PyTorch saved for Hugging Face",
    "open the directory of all its files",
)

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
    below = [Listing(directory / name) for name in candidates]
    parts = [each for each in below if FILES.shown_by(each)]
    return [f"{each.place.name}/{file}" for each in parts for file in each.names] if len(parts) > 1 else []


DCP_FILE_BYTES = 1 << 30
"""The maximum size of a data file, unless a single block is larger: each is written by one thread."""


@checked_fields
@dataclass(frozen=True, slots=True)
class DCP(Options):
    """A distributed checkpoint of PyTorch.

    Its files are `__RANK_NUMBER.distcp`, filled in the tensors' order, and `.metadata`.

    Attributes:
        max_shard_size: the maximum bytes of tensors in a file, unless a single block is larger.
        step: the step of the training. With it, the files are in `iter_STEP` of the run directory, and the tracker
            file names that, as Megatron-Core expects. By default, they are in the directory itself.
        link: link the data files of one or more DCPs, and write a new `.metadata` alone. No bytes of tensors are
            copied; tensors and objects may be left out or renamed, and dtypes and blocks do not change.

    Raises:
        UsageError: a size below 1, or a number of steps below 0.

    >>> source = reshard.open("src_checkpoints", strategy="src_strategy.ckpt")
    >>> report = reshard.plan(source, to="dcp", target_step=100).run("run")
    >>> report.files[0], report.files[-1]
    ('iter_0000100/__0_0.distcp', 'latest_checkpointed_iteration.txt')
    """

    max_shard_size: int = option(
        "Most tensor bytes in a file. One tensor alone may have more.",
        "size",
        default=DCP_FILE_BYTES,
        shown="1GiB",
    )
    step: int | None = option(
        "Write to TARGET/iter_N, as Megatron does.", "count", name="target_step", shown="TARGET itself"
    )
    link: bool = option(
        "Link the files of SOURCE, a DCP or the directory of several, and write .metadata alone: to rename, leave out "
        "or merge takes no time and no space.",
        "flag",
        default=False,
        alone=True,
    )

    def __post_init__(self) -> None:
        check_size(self.max_shard_size)
        check_step(self.step)
