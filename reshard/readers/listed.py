"""Tensors of which a format lists the blocks: boxes of any sizes, each with the places where its bytes lie."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.formats.entries import Where
from reshard.layout.block import Block, cover_fault
from reshard.source.checkpoint import Sharding, Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from reshard.formats.entries import Extent
    from reshard.layout.block import Shape
    from reshard.source.checkpoint import TensorSpec

_Places = tuple[tuple[Block, int], ...]


class Listed:
    """Joins the blocks of tensors; tensors that are cut alike and lie in the same files share what says so."""

    def __init__(self) -> None:
        self._known: dict[tuple[Shape, _Places], Sharding | str] = {}

    def tensor(self, spec: TensorSpec, held: Iterable[tuple[Block, Extent]]) -> Tensor | str:
        """Return a tensor, or why its blocks do not make it.

        Args:
            spec: what it is.
            held: its blocks, one several times where it has replicas. Empty ones are left out: what cuts a tensor into
                more parts than it has rows writes some.
        """
        whole = Block.whole(spec.shape)
        some = sorted((block, extent) for block, extent in held if block.size or block == whole)
        key = spec.shape, tuple((block, extent.file) for block, extent in some)
        if key not in self._known:
            self._known[key] = _sharding(*key)
        sharding = self._known[key]
        if isinstance(sharding, str):
            return sharding
        runs = tuple(extent.runs for _, extent in some) or ((),)
        return Tensor(spec, sharding, runs, listed=len(sharding.blocks) > 1)


def nothing_readable(unreadable: Mapping[str, str]) -> str:
    """Return what to say where there is not one tensor, with why the first cannot be read."""
    why = next((f": {name!r} {reason}" for name, reason in unreadable.items()), "; was saving it interrupted?")
    return f"holds no tensor that can be read{why}"


def _sharding(shape: Shape, places: _Places) -> Sharding | str:
    """Return the sharding of a tensor of which every place has runs of its own, in this order."""
    replicas: dict[Block, list[Where]] = {}
    for number, (block, file) in enumerate(places):
        replicas.setdefault(block, []).append(Where(file, number))
    fault = cover_fault(shape, replicas)
    if fault is not None:
        return fault
    if not replicas:  # a tensor without elements, of which no block is the whole
        replicas[Block.whole(shape)] = [Where(0, 0)]
    return Sharding(tuple(replicas), tuple(map(tuple, replicas.values())))
