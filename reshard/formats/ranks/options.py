"""Options of a target that is the files of ranks, or one file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from reshard.core.model.entries import ShardFiles
from reshard.core.options import Options, option
from reshard.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.core.model.entries import SizedTensor

DEFAULT_PREFIX = "checkpoint_"


@dataclass(frozen=True, slots=True)
class RankFiles(Options):
    """One file per rank, `rank_<r>/<prefix><r><suffix>.<ext>`.

    Attributes:
        prefix: what the names of files begin with.
        suffix: `_part<stage>` for one stage of a pipeline.
        name: the path of the file below the target directory, in place of the others; `{rank}` stands for the rank.

    >>> RankFiles("checkpoint_").shard_files([], ".ckpt").paths
    ('rank_{rank}/checkpoint_{rank}.ckpt',)
    """

    prefix: str = option(
        "What names of files begin with: rank_0/PREFIX0.ckpt and so on.", "text", default=DEFAULT_PREFIX,
        shown=DEFAULT_PREFIX, metavar="PREFIX",
    )  # fmt: skip
    suffix: str = ""
    name: str | None = None

    def __post_init__(self) -> None:
        for kind, part in (("prefix", self.prefix), ("suffix", self.suffix)):
            hides = kind == "prefix" and part.startswith(".")
            if not part.isprintable() or "/" in part or "{rank}" in part or hides:
                raise UsageError(
                    f"{kind} {part!r} cannot be part of a file name", code="bad-name", hint="use one such as 'model_'"
                )
        if self.name is None:
            return
        path = PurePosixPath(self.name)
        if path.is_absolute() or ".." in path.parts or not path.name or not self.name.isprintable():
            raise UsageError(f"file name {self.name!r} is empty or leads out of the target directory", code="bad-name")

    @property
    def is_one_file(self) -> bool:
        """See `Options`."""
        return self.name is not None and "{rank}" not in self.name

    def of_stage(self, stage: int) -> RankFiles:
        """See `Options`."""
        return replace(self, suffix=f"_part{stage}")

    def path_of_rank(self, extension: str) -> str:
        """See `Options`."""
        return self.name or f"rank_{{rank}}/{self.prefix}{{rank}}{self.suffix}{extension}"

    def shard_files(self, tensors: Sequence[SizedTensor], extension: str) -> ShardFiles:
        """Put all tensors of a rank into one file."""
        return ShardFiles((self.path_of_rank(extension),), {tensor.name: 0 for tensor in tensors})
