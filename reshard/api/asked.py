"""Options of a conversion that `reshard.convert` and the command line share. It imports little, since help needs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reshard.formats.rank_dirs import RANK_PATTERN

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reshard.storage.cipher import Cipher
    from reshard.storage.places import AnyName
    from reshard.strategy.strategy import Strategy

OPENING: dict[str, Any] = {
    "rank_pattern": RANK_PATTERN,
    "suffix": None,
    "layouts": {},
    "stage": None,
    "iteration": None,
    "partial": False,
}
"""The parameters of opening a checkpoint except its strategy and its key, with their defaults."""


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """The values of the options of a target, by option name; sizes are in bytes."""

    to: str | None = None
    format: str | None = None
    style: str | None = None
    target_strategy: Strategy | AnyName | None = None
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
