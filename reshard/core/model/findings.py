"""The state of a checkpoint by names and headers: complete if it opens without a warning."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from reshard.core.model.facts import DAMAGED
from reshard.core.storage.base import reading
from reshard.errors import EncryptedError, ReshardError, SourceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.storage.places import Place


State = Literal["complete", "incomplete", "unknown"]

_UNDECIDED = (
    "unsupported-", "unknown-", "several-", "ambiguous-", "too-", "cannot-read", "no-tensors", "unreadable-ledger",
)  # fmt: skip
"""The beginnings of codes of errors that say nothing about completeness: there is more in the files than is read."""


class Findings(NamedTuple):
    """The state of a checkpoint by its headers.

    Attributes:
        state: complete, incomplete or unknown.
        reason: why it is not complete; empty if it is.
        ranks: the number of ranks; None if unknown.
        hint: how to complete it, if that is known.
    """

    state: State
    reason: str = ""
    ranks: int | None = None
    hint: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A checkpoint by its names, whose headers are not read yet.

    Attributes:
        path: its directory or file.
        format: the name of its format.
        step: the step in its name; empty if there is none.
        files: the states of its files.
        examine: looks at its headers, or at those of its metadata only.
        confirm: looks at all headers, if that takes far longer and `examine` does not.
        is_numbered: a number at the end of its name is its step, whatever is before it.
    """

    path: Place
    format: str
    step: str
    files: Sequence[FileStat]
    examine: Callable[[], Findings]
    confirm: Callable[[], Findings] | None = None
    is_numbered: bool = False

    @property
    def modified(self) -> float:
        """Return the time of the last change of a file."""
        return max((file.modified for file in self.files), default=0.0)


def by_opening(
    opens: Callable[[], Checkpoint], root: Place, doubt: Callable[[Checkpoint], str] = lambda _: ""
) -> Findings:
    """Return whether a checkpoint is complete: it opens without a warning, and every tensor can be read.

    Args:
        opens: opens it, without its contents.
        root: its path.
        doubt: returns why that does not show that it is complete, or "".
    """
    try:
        with reading(SourceError):
            checkpoint = opens()
    except SourceError as error:
        return of_error(error, root)
    ranks = len(set(checkpoint.ranks))
    if checkpoint.opening.lone_rank or checkpoint.opening.numbered:
        return Findings("unknown", "looks like one rank of several")
    if checkpoint.unreadable:
        name, reason = next(iter(checkpoint.unreadable.items()))
        others = f", and {len(checkpoint.unreadable) - 1:,} more" if len(checkpoint.unreadable) > 1 else ""
        text = f"{name!r:.200}{others} cannot be read: it {reason}"
        return Findings("incomplete" if reason.startswith(DAMAGED) else "unknown", text, ranks)
    return doubted([*checkpoint.warnings, *filter(None, [doubt(checkpoint)])], root, ranks)


def doubted(warnings: Sequence[str], root: Place, ranks: int | None = None) -> Findings:
    """Return that a checkpoint is complete, or unknown because of its first warning."""
    return Findings("unknown", _without(root, warnings[0]), ranks) if warnings else Findings("complete", "", ranks)


def of_error(error: ReshardError, root: Place) -> Findings:
    """Return the findings for an error; the root is left out of its text."""
    undecided = isinstance(error, EncryptedError) or any(code.startswith(_UNDECIDED) for code in error.codes)
    text = _without(root, "; ".join([error.message, *error.facts]))
    return Findings("unknown" if undecided else "incomplete", text)


def _without(root: Place, text: str) -> str:
    """Return a text without the root in front of it."""
    for prefix in (f"{root}: ", f"{root}/", f"{root} "):
        text = text.removeprefix(prefix)
    return text


class FileStat(NamedTuple):
    """The size of a file in bytes, and the time of its last change in seconds since 1970; 0 if unknown."""

    nbytes: int
    modified: float


@dataclass(slots=True, eq=False)
class Directory:
    """A directory below the root.

    Attributes:
        place: its path.
        files: its files by name.
        below: its subdirectories by name.
        hidden: the names of its hidden subdirectories.
        problem: why it cannot be listed; empty if it was.
    """

    place: Place
    files: dict[str, FileStat] = field(default_factory=dict)
    below: dict[str, Directory] = field(default_factory=dict)
    hidden: list[str] = field(default_factory=list)
    problem: str = ""

    @property
    def names(self) -> list[str]:
        """Return the names of its entries."""
        return [*self.files, *self.below, *self.hidden]

    def every_directory(self) -> Iterator[Directory]:
        """Yield itself, and the directories below it."""
        yield self
        for directory in self.below.values():
            yield from directory.every_directory()

    def every_file(self) -> Iterator[FileStat]:
        """Yield its files, and those below it."""
        for directory in self.every_directory():
            yield from directory.files.values()
