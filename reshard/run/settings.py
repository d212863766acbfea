"""The options of a run, and its progress. It imports little, since the help of the command line needs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The values of the options of a run, as `reshard.Plan.run` describes them.

    Raises:
        UsageError: a value is not valid, or two contradict each other.
    """

    client: Any = None
    scheduler: str | Callable[..., Any] | None = None
    threads: int | None = None
    fsync: bool = True
    drop_cache: bool | None = None
    overwrite: bool = False
    restart: bool = False
    checksums: bool | None = None
    ledger: bool = True
    partition: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.client, str):
            raise UsageError(
                f"client is {self.client!r}; expected a distributed.Client",
                code="wrong-type",
                hint=f"pass client=distributed.Client({self.client!r})",
            )
        if callable(self.scheduler):
            if self.client is not None:
                raise UsageError("a client is a scheduler, and another is given", code="two-schedulers")
        elif self.scheduler not in {None, "threads", "synchronous"}:
            raise UsageError(
                f"scheduler is {self.scheduler!r}; expected 'threads' or 'synchronous'", code="unknown-scheduler"
            )
        if self.threads is not None and self.threads < 1:
            raise UsageError(f"threads is {self.threads}; expected at least 1", code="out-of-range")

    @property
    def starts_over(self) -> bool:
        """Whether files of earlier runs are replaced, and the others of them removed."""
        return self.overwrite or self.restart


class Progress(NamedTuple):
    """The progress of a run.

    Attributes:
        written: bytes of contents written so far, by this run or an earlier one.
        total: bytes of contents to be written in total.
        seconds: seconds since this run began.
        resumed: bytes in `written` from an earlier run; do not count them in the speed of this run.
    """

    written: int
    total: int
    seconds: float
    resumed: int = 0
