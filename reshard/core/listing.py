"""What a format is asked about: the names in a directory, and the options of opening it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from reshard.core.model.entries import RangeReader
from reshard.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from reshard.core.storage.cipher import Cipher
    from reshard.core.storage.places import AnyName, Place
    from reshard.strategy.strategy import Strategy

MARK_BYTES = 4096
"""The first bytes of a file that tell its format."""

RANK_PATTERN = "rank_{rank}/*"
"""The default path pattern of a rank's files, below the opened directory."""

RANK_DIRECTORY = re.compile(r"rank_([0-9]+)")
"""Matches the names of the directories of ranks."""

STEP_WORD = r"(?:.*[-_.=])?(?:global_?steps?|steps?|iter(?:ation)?s?|checkpoint|ckpt|epoch)[-_.=]?"
STEP_NAME = rf"{STEP_WORD}(\d{{1,18}})"
"""Matches names that end in a word for a step of the training and its number, whatever the case."""


class Listing:
    """The names in a directory, listed once.

    Attributes:
        place: the directory, or a file.

    >>> from reshard.core.storage.places import as_place
    >>> here = Listing(as_place("src_checkpoints"))
    >>> sorted(here.names)[:2], here.below("rank_0").names
    (['rank_0', 'rank_1'], ['checkpoint_0.ckpt'])
    """

    def __init__(self, place: Place, names: Sequence[str] | None = None) -> None:
        self.place = place
        if names is not None:
            self.names = names

    @cached_property
    def names(self) -> Sequence[str]:
        """Return the names of its entries; empty for a file."""
        return self.place.names()

    @cached_property
    def is_file(self) -> bool:
        """Return whether it is a file."""
        return not self.names and self.place.is_file()

    def below(self, name: str) -> Listing:
        """Return the names in a subdirectory; there are none if it is a file."""
        return Listing(self.place / name)

    def start(self, name: str = "", nbytes: int = MARK_BYTES) -> bytes:
        """Return the first bytes of a file in it, or of the file itself; b"" if it cannot be read."""
        path = self.place / name if name else self.place
        try:
            return RangeReader(str(path), window=nbytes).upto(0, nbytes)
        except (SourceError, OSError):
            return b""


class FileNames(NamedTuple):
    """Names of files that are useful together only.

    A block, a shard of a set and a file of whole tensors have similar contents. So one file of several would pass for
    whole tensors, and is refused by its name.

    Attributes:
        files: matches the names of its files, unique to this format.
        problem: a predicate that describes such a file, for messages.
        advice: the hint of the error.
        marks: file names that are not unique, each with a pattern that matches this format's first bytes.
        code: the code of the error.
        when: what is so of them: `alone`, they are ignored next to readable files; `others`, such a file may be all of
            a rank; `directory`, they are names of directories of ranks; `run`, they are of the directory of a run;
            `foreign`, they are of a program whose files are not read.
    """

    files: re.Pattern[str]
    problem: str
    advice: str
    marks: Mapping[str, re.Pattern[bytes]] = MappingProxyType({})
    code: str = "one-of-several"
    when: frozenset[str] = frozenset()

    def shown_by(self, here: Listing, names: Iterable[str] | None = None) -> str | None:
        """Return the first of the names that belongs to this format, or None; marks are read last."""
        names = list(here.names if names is None else names)
        marked = (name for name in names if name in self.marks and self.marks[name].search(here.start(name)))
        return next(filter(self.files.fullmatch, names), None) or next(marked, None)


class RunLayout(NamedTuple):
    """The directory of a training run, which has a directory for each step.

    Attributes:
        tracker: the file with the number of the last complete step; empty if the contents of the directories show what
            they are, and which of them are finished.
        directory: matches the name of the directory of a step, and captures its number.
        by_name: the tracker has the name of the directory, which need not match.
    """

    tracker: str
    directory: re.Pattern[str]
    by_name: bool = False

    @property
    def is_numbered(self) -> bool:
        """Whether there is no tracker: the names of steps differ in a number alone."""
        return not self.tracker


@dataclass(frozen=True, kw_only=True)
class OpenOptions:
    """The options of opening a checkpoint, as `reshard.open` describes them.

    Attributes:
        strategy: which rank holds which block.
        rank_pattern: the path pattern of a rank's files.
        suffix: the end of the names of the files.
        layouts: how tensors are cut, by name or glob.
        stage: the pipeline stage that the source is.
        step: which checkpoint of a run.
        partial: whether ranks may be missing.
        cipher: decrypts the files.
    """

    strategy: Strategy | AnyName | None = None
    rank_pattern: str = RANK_PATTERN
    suffix: str | None = None
    layouts: Mapping[str, str] = field(default_factory=dict)
    stage: int | Literal["own"] | None = None
    step: int | None = None
    partial: bool = False
    cipher: Cipher | None = None

    @property
    def given(self) -> list[str]:
        """Return the options that differ from their defaults, except the strategy and the key."""
        default = OpenOptions(strategy=self.strategy, cipher=self.cipher)
        return [name for name, value in vars(self).items() if value != getattr(default, name)]

    @property
    def of_files(self) -> dict[str, Any]:
        """Return the options of finding and reading files, without a strategy."""
        return {"rank_pattern": self.rank_pattern, "suffix": self.suffix, "cipher": self.cipher}


Contents = bool | Literal["blocks"]
"""Whether samples of the contents are read on open: to compare replicas, and to find wrong layouts; or blocks alone."""
