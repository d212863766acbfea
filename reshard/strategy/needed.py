"""Find a small set of source ranks that a target rank needs, from two strategies without any file.

1. For a tensor that both strategies name, take a shape that both layouts cut evenly. It can replace the real one, as
   the edges of equal parts are at the same fractions of every shape.
2. Every source block that overlaps the target rank's block is needed. The ranks that hold it are a *group*: one of
   them suffices.
3. `core.layout.replicas.covering_ranks` chooses a rank of each group.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from reshard.core.layout.block import Block
from reshard.core.layout.layout import least_shape
from reshard.core.layout.mesh import Mesh
from reshard.core.layout.replicas import covering_ranks
from reshard.errors import LayoutError, UsageError

if TYPE_CHECKING:
    from reshard.core.layout.block import Shape
    from reshard.core.layout.layout import Layout
    from reshard.strategy.strategy import Placed, Strategy

Group = frozenset[int]


def needed_ranks(source: Strategy, target: Strategy | None, rank: int) -> tuple[int, ...]:
    """Return a few source ranks that hold all blocks that a target rank needs.

    Only tensors that both strategies name count. A tensor that several pipeline stages hold is read from the lowest,
    as `reshard.open` does: the files of later stages may lack it. Among equally good ranks, the target rank's own
    number is preferred, so that tensors that differ by rank stay with their number. There is at least one rank, which
    supplies the tensors that are copied whole.

    Args:
        source: the strategy of the files.
        target: the strategy of the result; None for whole tensors.
        rank: the target rank; any number if the tensors are whole.

    Returns:
        source ranks, ascending.

    Raises:
        UsageError: the target has no such rank.
        LayoutError: two layouts of a tensor cannot be of the same shape.

    >>> from reshard.core.layout.layout import Layout
    >>> from reshard.strategy.strategy import Strategy
    >>> rows = Strategy.of({"w": Layout.of([2, 2], [1, -1])})
    >>> columns = Strategy.of({"w": Layout.of([4], [-1, 0])})
    >>> rows.grid("w", (8, 8)).ranks, needed_ranks(rows, columns, 0), needed_ranks(columns, rows, 0)
    (((0, 1), (2, 3)), (0, 2), (0, 1, 2, 3))
    """
    groups = _needs(source, target, rank)
    preferred = rank if rank in source.ranks else source.ranks.start
    return tuple(sorted(covering_ranks(groups, preferred))) or (preferred,)


def _needs(source: Strategy, target: Strategy | None, rank: int) -> set[Group]:
    """Return the groups of all tensors that a rank shares with the source."""
    if target is not None and rank not in target.ranks:
        raise UsageError(
            f"the target has no rank {rank}; it has ranks {target.ranks.start} to {target.ranks.stop - 1}",
            code="no-such-rank",
        )
    stage = target.stage_of(rank) if target else 0
    local = rank % target.devices if target else 0
    groups: dict[object, frozenset[Group]] = {}
    for name, (placed, *_) in source.tensors.items():
        counterpart = None
        if target is not None:
            counterpart = next((each for each in target.tensors.get(name, ()) if each.stage == stage), None)
            if counterpart is None:
                continue
        key = (placed, counterpart)
        if key not in groups:
            try:
                groups[key] = _groups(placed, counterpart, placed.stage * source.devices, local)
            except LayoutError as error:
                raise error.about(f"tensor {name!r}") from None
    return set().union(*groups.values())


def _groups(source: Placed, target: Placed | None, first_rank: int, local: int) -> frozenset[Group]:
    """Return the groups of source ranks that one tensor of a target rank needs."""
    groups: set[Group] = set()
    for before, after, shape in _readings(source, target):
        block = Block.whole(shape) if after is None else after.grid(shape).by_rank()[local]
        groups.update(map(frozenset, Mesh.of(before, first_rank).grid(shape).holders(block)))
    return frozenset(groups)


def _readings(source: Placed, target: Placed | None) -> list[tuple[Layout, Layout | None, Shape]]:
    """Return the possible layouts of both sides, with a shape that both cut evenly.

    There may be several only for JSON strategies, which write nested entries expanded.
    """
    if target is None:
        return [(source.layout, None, source.shape or least_shape([source.layout]))]
    readings: list[tuple[Layout, Layout | None, Shape]] = [
        (before, after, source_shape or target_shape or least_shape([before, after]))
        for ndim in range(1 + max(len(source.layout.tensor_map), len(target.layout.tensor_map)))
        for (before, source_shape), (after, target_shape) in product(
            source.of_dimensions(ndim), target.of_dimensions(ndim)
        )
        if source_shape is None or target_shape is None or source_shape == target_shape
    ]
    if not readings:
        raise LayoutError(
            f"source layout {source.layout} and target layout {target.layout} fit no common shape",
            code="no-common-shape",
        )
    return readings
