"""Tensors of which a format lists the blocks: boxes of any sizes, each with the places where its bytes lie."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.layout.block import Block, cover_fault
from reshard.source.checkpoint import Shard
from reshard.source.reshape import Shared

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from reshard.formats.entries import Extent
    from reshard.layout.block import Shape
    from reshard.source.checkpoint import Tensor, TensorSpec


class Listed:
    """Joins the blocks of tensors; those that are cut alike and lie in the same files share what says so."""

    def __init__(self) -> None:
        self._shared = Shared()
        self._faults: dict[tuple[Shape, tuple[Block, ...]], str | None] = {}

    def tensor(self, spec: TensorSpec, held: Iterable[tuple[Block, Extent]]) -> Tensor | str:
        """Return a tensor, or why its blocks do not make it.

        Args:
            spec: what it is.
            held: its blocks, one several times where it has replicas. Empty ones are left out: what cuts a tensor into
                more parts than it has rows writes some.
        """
        whole = Block.whole(spec.shape)
        replicas: dict[Block, list[Extent]] = {}
        for block, extent in held:
            if block.size or block == whole:
                replicas.setdefault(block, []).append(extent)
        key = spec.shape, tuple(replicas)
        if key not in self._faults:
            self._faults[key] = cover_fault(spec.shape, replicas)
        shards = (Shard(block, tuple(sorted(some))) for block, some in replicas.items())
        return self._faults[key] or self._shared.tensor(spec, shards)


def nothing_readable(unreadable: Mapping[str, str]) -> str:
    """Return what to say where there is not one tensor, with why the first cannot be read."""
    why = next((f": {name!r} {reason}" for name, reason in unreadable.items()), "; was saving it interrupted?")
    return f"holds no tensor that can be read{why}"
