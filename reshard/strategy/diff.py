"""Compare two strategies, or a strategy and a checkpoint.

Two layouts may be written differently and be equivalent: `[8]` and `[2, 4]` that split nothing, optimizer sharding -1
and the number that it stands for, a nested entry and its expansion in JSON. They are equivalent if every rank holds
the same block. This needs no shapes: it is enough to compare the blocks of one shape that both divide evenly.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING

from reshard.core.layout.layout import Layout, least_shape
from reshard.errors import LayoutError
from reshard.upward import upward

if TYPE_CHECKING:
    from reshard.strategy.strategy import Placed, Strategy


@dataclass(frozen=True, slots=True)
class LayoutChange:
    """The two layouts of a tensor in one stage, if two strategies disagree on it."""

    name: str
    stage: int
    a: Layout
    b: Layout


@dataclass(frozen=True, slots=True, repr=False)
class Diff:
    """The differences between two strategies.

    Attributes:
        a, b: the strategies.
        only_a: names and stages that only the first has.
        only_b: names and stages that only the second has.
        blocks: layouts that give some rank another block.
        fields: layouts that differ in their numbers, but give every rank the same block.
    """

    a: Strategy
    b: Strategy
    only_a: tuple[tuple[str, int], ...]
    only_b: tuple[tuple[str, int], ...]
    blocks: tuple[LayoutChange, ...]
    fields: tuple[LayoutChange, ...]

    @property
    def same(self) -> bool:
        """Return whether every rank holds the same blocks of the same tensors."""
        return not (self.only_a or self.only_b or self.blocks)

    def __repr__(self) -> str:
        counts = f"{len(self.blocks)} with other blocks, {len(self.only_a)} only in A, {len(self.only_b)} only in B"
        return f"<Diff of two strategies: {counts}>"

    def _repr_html_(self) -> str:
        return str(upward("html")(self))


def diff(a: Strategy, b: Strategy) -> Diff:
    """Compare two strategies.

    >>> from reshard.strategy.strategy import Strategy
    >>> whole = Strategy.of({"w": Layout.of([8], [-1]), "v": Layout.of([8], [0])})
    >>> other = Strategy.of({"w": Layout.of([2, 4], [-1]), "v": Layout.of([2, 4], [0])})
    >>> [change.name for change in diff(whole, other).fields], [change.name for change in diff(whole, other).blocks]
    (['w'], ['v'])
    """
    first, second = _by_name_and_stage(a), _by_name_and_stage(b)
    blocks: list[LayoutChange] = []
    fields: list[LayoutChange] = []
    for key, placed in first.items():
        counterpart = second.get(key)
        if counterpart is None or placed.layout == counterpart.layout:
            continue
        ndim = min(len(placed.layout.tensor_map), len(counterpart.layout.tensor_map))  # JSON expands nested entries
        readings = product(placed.of_dimensions(ndim), counterpart.of_dimensions(ndim))
        same = any(_same_blocks(first_layout, second_layout) for (first_layout, _), (second_layout, _) in readings)
        (fields if same else blocks).append(LayoutChange(*key, placed.layout, counterpart.layout))
    return Diff(
        a,
        b,
        tuple(key for key in first if key not in second),
        tuple(key for key in second if key not in first),
        tuple(blocks),
        tuple(fields),
    )


def _by_name_and_stage(strategy: Strategy) -> dict[tuple[str, int], Placed]:
    return {(name, placed.stage): placed for name, places in strategy.tensors.items() for placed in places}


@lru_cache(maxsize=4096)
def _same_blocks(a: Layout, b: Layout) -> bool:
    """Return whether two layouts give each rank the same block of any tensor."""
    if a.devices != b.devices:
        return False
    try:
        shape = least_shape([a, b])
        return a.grid(shape) == b.grid(shape)
    except LayoutError:  # interleaved, or with different sizes
        return False
