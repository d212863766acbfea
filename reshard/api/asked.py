"""Options of a conversion that `reshard.convert` and the command line share. It imports little, since help needs it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from reshard.core.listing import RANK_PATTERN
from reshard.errors import UsageError
from reshard.view.notebook.opened import OpenedArrays

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import zarr
    from typing_extensions import TypeIs
    from zarr.abc.store import Store

    from reshard.core.layout.arrangement import Arrangement
    from reshard.core.storage.cipher import Cipher
    from reshard.core.storage.places import AnyName
    from reshard.strategy.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class OpenOptions:
    """The values of the options of opening a checkpoint, as `reshard.open` describes them.

    They are the keywords of `formats.open.open`: `open(path, **vars(options))`.
    """

    strategy: Strategy | AnyName | None = None
    rank_pattern: str = RANK_PATTERN
    suffix: str | None = None
    layouts: Mapping[str, str] = field(default_factory=dict)
    stage: int | None = None
    iteration: int | None = None
    partial: bool = False
    cipher: Cipher | None = None

    @property
    def given(self) -> list[str]:
        """Return the options that differ from their defaults, except the strategy and the key."""
        default = OpenOptions(strategy=self.strategy, cipher=self.cipher)
        return [option.name for option in fields(self) if getattr(self, option.name) != getattr(default, option.name)]

    @property
    def of_files(self) -> dict[str, Any]:
        """Return the options of finding and reading files, without a strategy."""
        return {"rank_pattern": self.rank_pattern, "suffix": self.suffix, "cipher": self.cipher}


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """The values of the options of a target, by option name; sizes are in bytes."""

    to: str | None = None
    format: str | None = None
    style: str | None = None
    target_strategy: Strategy | Arrangement | AnyName | None = None
    layouts_of: AnyName | None = None
    ranks: Iterable[int] | None = None
    target_stage: int | None = None
    remove_redundancy: bool = False
    link_replicas: bool = False
    link: bool = False
    same_ranks: bool = False
    prefix: str | None = None
    target_step: int | None = None
    max_shard_size: int | None = None
    chunk_size: int | None = None
    shard_size: int | None = None
    compression: str | None = None
    memory: int | None = None
    target_cipher: Cipher | None = None

    def given(self, names: Iterable[str]) -> list[str]:
        """Return the options among `names` that were given."""
        return [name for name in names if getattr(self, name) is not None and getattr(self, name) is not False]


def is_of_zarr(value: object) -> TypeIs[zarr.Group | Store]:
    """Return whether a value is a store or a group of zarr, which is not imported to ask."""
    return type(value).__module__.partition(".")[0] == "zarr"


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
