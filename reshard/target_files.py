"""Which files a target has, and what each is called.

Rank directories have one file a rank. Other ways to lay out a target are in the formats that have them, such as the
sets of `formats.unified`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Protocol

from reshard.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor to be stored: its name, its size in bytes, and whether a strategy names it."""

    name: str
    nbytes: int
    listed: bool


@dataclass(frozen=True, slots=True)
class Volumes:
    """How the tensors of a rank are shared out to files.

    Attributes:
        paths: the files of a rank, below the target directory; `{rank}` stands for its number.
        of: for each tensor, the number of its file.
        index: path and content of the index file, if there is one.
    """

    paths: tuple[str, ...]
    of: Mapping[str, int]
    index: tuple[str, bytes] | None = None


class TargetFiles(Protocol):
    """A way to lay out the files of a target."""

    def volumes(self, tensors: Sequence[Stored], extension: str) -> Volumes:
        """Share the tensors out to files."""


@dataclass(frozen=True, slots=True)
class RankFiles:
    """`rank_<r>/<prefix><r><suffix>.<ext>`; the suffix is `_part<stage>` for one stage of a pipeline.

    >>> RankFiles("checkpoint_").volumes([], ".ckpt").paths
    ('rank_{rank}/checkpoint_{rank}.ckpt',)
    """

    prefix: str = "checkpoint_"
    suffix: str = ""

    def volumes(self, tensors: Sequence[Stored], extension: str) -> Volumes:
        """Put all tensors of a rank into one file."""
        for part in (self.prefix, self.suffix):
            if not part.isprintable() or "/" in part:
                raise UsageError(f"prefix {part!r} is no beginning of a file name; expected one such as 'checkpoint_'")
        path = f"rank_{{rank}}/{self.prefix}{{rank}}{self.suffix}{extension}"
        return Volumes((path,), {tensor.name: 0 for tensor in tensors})


@dataclass(frozen=True, slots=True)
class NamedFile:
    """One file a rank, of a given name below the target directory, in which `{rank}` stands for the rank."""

    name: str

    def volumes(self, tensors: Sequence[Stored], extension: str) -> Volumes:  # noqa: ARG002 -- the name has its own
        """Put all tensors of a rank into the file of that name."""
        path = PurePosixPath(self.name)
        if path.is_absolute() or ".." in path.parts or not path.name or not self.name.isprintable():
            raise UsageError(f"file name {self.name!r} leads out of the target directory, or is none")
        return Volumes((self.name,), {tensor.name: 0 for tensor in tensors})
