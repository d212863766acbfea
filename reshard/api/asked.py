"""Options of a conversion that `reshard.convert` and the command line share. It imports little, since help needs it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from reshard.errors import UsageError
from reshard.view.notebook.opened import OpenedArrays

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from reshard.core.layout.arrangement import Arrangement
    from reshard.core.storage.cipher import Cipher
    from reshard.core.storage.places import AnyName
    from reshard.strategy.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """The values of the options of a target, by option name; sizes are in bytes.

    `of_format` has those that single formats take.
    """

    to: str | None = None
    target_strategy: Strategy | Arrangement | AnyName | None = None
    ranks: Iterable[int] | None = None
    target_stage: int | None = None
    remove_redundancy: bool = False
    same_ranks: bool = False
    of_format: Mapping[str, Any] = field(default_factory=dict)
    memory: int | None = None
    target_cipher: Cipher | None = None

    def given(self, names: Iterable[str]) -> list[str]:
        """Return the options among `names` that were given."""
        values = {**vars(self), **self.of_format}
        return [name for name in names if values.get(name) is not None and values[name] is not False]


def refuse_options_of_paths(side: object, hint: str = "leave it out", **options: object) -> None:
    """Refuse options of opening a path for a checkpoint that is open.

    Args:
        side: a path or a checkpoint.
        hint: what to do.
        options: the options by name; None for those that are not given.

    Raises:
        UsageError: there is one.
    """
    given = [name for name, value in options.items() if value is not None]
    if given and isinstance(side, OpenedArrays):
        raise UsageError(f"{given[0]} is for a path, and {side!r:.60} is opened", code="no-effect", hint=hint)
