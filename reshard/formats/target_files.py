"""Which files a target has, and what each is called.

Rank directories have one file a rank. Other ways to lay out a target are in the formats that have them, such as the
sets of `formats.sets`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, NamedTuple, Protocol

from reshard.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Stored(NamedTuple):
    """A tensor to be stored: its name, its size in bytes, whether a strategy names it, whether it is a `str` entry."""

    name: str
    nbytes: int
    listed: bool
    is_text: bool = False


@dataclass(frozen=True, slots=True)
class Volumes:
    """How the tensors of a rank are shared out to files.

    Attributes:
        paths: the files of a rank, below the target directory; `{rank}` stands for its number.
        of: for each tensor, the number of its file.
        index: path and content of the index file, if there is one.
        notes: what the files' own notes say, whatever those of the source say.
    """

    paths: tuple[str, ...]
    of: Mapping[str, int]
    index: tuple[str, bytes] | None = None
    notes: Mapping[str, str] = field(default_factory=dict)


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
            hides = part is self.prefix and part.startswith(".")
            if not part.isprintable() or "/" in part or "{rank}" in part or hides:
                raise UsageError(f"prefix {part!r}: not the beginning of a file name; expected e.g. 'checkpoint_'")
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


@dataclass(frozen=True, slots=True)
class SomeFiles:
    """Some files of a set that is laid out already: one process's share of the work.

    Attributes:
        every: how all tensors are shared out to the files of the set.
        numbers: the files that are written; a plan takes their tensors only.
        with_index: the index file is written too.

    >>> some = SomeFiles(Volumes(("a", "b"), {"w": 0, "v": 1}), (1,), with_index=False)
    >>> some.volumes([Stored("v", 8, True)], "")
    Volumes(paths=('b',), of={'v': 0}, index=None, notes={})
    """

    every: Volumes
    numbers: tuple[int, ...]
    with_index: bool

    def has(self, name: str) -> bool:
        """Return whether a tensor is in one of the files that are written."""
        return self.every.of[name] in self.numbers

    def volumes(self, tensors: Sequence[Stored], extension: str) -> Volumes:  # noqa: ARG002 -- the set has its own
        """Put the tensors where the set has them."""
        places = {number: place for place, number in enumerate(self.numbers)}
        return Volumes(
            tuple(self.every.paths[number] for number in self.numbers),
            {tensor.name: places[self.every.of[tensor.name]] for tensor in tensors},
            self.every.index if self.with_index else None,
            self.every.notes,
        )
