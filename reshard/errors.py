"""What goes wrong, and the exit code each kind of it has at the command line.

Every error is one clear sentence: what, where, what was expected and found, what to do next. Where a file
has several faults, all of them are told at once, each with its place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_SHOWN_FAULTS = 20


class ReshardError(Exception):
    """Something failed; the base of every error that `reshard` raises on purpose."""

    exit_code: ClassVar[int] = 1


class UsageError(ReshardError, ValueError):
    """The call itself is wrong: options that contradict each other, a value outside its range."""

    exit_code = 2


class VerifyError(ReshardError):
    """Two checkpoints that should hold the same values do not."""

    exit_code = 3


class SourceError(ReshardError, ValueError):
    """A source checkpoint is incomplete or corrupt."""

    exit_code = 4


class GoneError(SourceError):
    """A source file is not there any more."""


class LayoutError(SourceError):
    """A layout cannot be applied to a tensor: sizes do not divide, axes are out of range."""


class StrategyError(SourceError):
    """A strategy file cannot be read, contradicts itself or does not fit the checkpoint."""


class PlanError(SourceError):
    """A plan file cannot be read, contradicts itself, or would do something else than was planned."""


class BudgetError(ReshardError):
    """Memory or disk space does not suffice."""

    exit_code = 5


class TargetError(ReshardError):
    """A target file exists already, is one of the sources, or a source changed under the run."""

    exit_code = 6


class ChangedError(TargetError):
    """A source is not what it was, so that what is written of it is worth nothing."""


class Faults:
    """Collects the faults of one subject, to raise them all at once.

    >>> faults = Faults("strategy.ckpt")
    >>> faults.add("$.w.dev_matrix", "is empty; expected at least one axis")
    >>> faults.add("$.b.tensor_map[0]", "is 3; expected -1 to 1")
    >>> faults.raise_if_any(StrategyError)
    Traceback (most recent call last):
    ...
    reshard.errors.StrategyError: strategy.ckpt has 2 faults:
      $.w.dev_matrix: is empty; expected at least one axis
      $.b.tensor_map[0]: is 3; expected -1 to 1
    """

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.count = 0
        self._first: list[tuple[str, str]] = []  # no more than are shown: a hostile file has millions

    def add(self, where: str, what: str) -> None:
        """Remember one fault: `where` in the subject, and `what` is wrong there."""
        self.count += 1
        if self.count <= _SHOWN_FAULTS:
            self._first.append((where if where.isprintable() else repr(where), what))

    def raise_if_any(self, kind: type[ReshardError], *, advice: str = "") -> None:
        """Raise `kind` with every fault, one a line, and `advice` behind them; return if there are none."""
        if self.count:
            self._raise(kind, advice)

    def _raise(self, kind: type[ReshardError], advice: str) -> NoReturn:
        if self.count == 1:
            where, what = self._first[0]
            raise kind("; ".join([f"{self.subject}: {where}: {what}", *([advice] if advice else [])]))
        lines = [f"  {where}: {what}" for where, what in self._first]
        if self.count > _SHOWN_FAULTS:
            lines.append(f"  and {self.count - _SHOWN_FAULTS} more")
        if advice:
            lines.append(f"  {advice}")
        raise kind(f"{self.subject} has {self.count} faults:\n" + "\n".join(lines))


def names(items: Iterable[object], *, most: int = 5) -> str:
    """List some items for a message, the first few of many.

    >>> names(["a", "b"]), names(range(9), most=3)
    ('a, b', '0, 1, 2 and 6 more')
    """
    listed: Sequence[str] = [text if (text := str(item)).isprintable() else repr(text) for item in items]
    if len(listed) <= most:
        return ", ".join(listed)
    return ", ".join(listed[:most]) + f" and {len(listed) - most} more"
