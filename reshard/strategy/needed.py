"""Which source ranks a target rank needs: few of them, known from two strategies without any file.

1. For a tensor that both strategies name, take a shape that both layouts cut evenly. It stands for the real one, as
   the edges of equal parts lie at the same fractions of every shape.
2. Every source block that overlaps the target rank's block is needed. The ranks that hold it are a *group*: one of
   them suffices.
3. The rank that is in most groups is taken, again and again, until each group has one; then those are left out whose
   groups have others. None of what remains can be left out; a smaller set may exist, which is hard to find.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import product
from typing import TYPE_CHECKING

from reshard.errors import LayoutError, UsageError
from reshard.layout.block import Block
from reshard.layout.layout import foldings, grid, least_shape

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from reshard.layout.block import Shape
    from reshard.layout.layout import Layout
    from reshard.strategy.strategy import Placed, Strategy

Group = frozenset[int]


def needed_ranks(source: Strategy, target: Strategy | None, rank: int) -> tuple[int, ...]:
    """Return source ranks, few of them, that have all that a target rank gets of the tensors that both name.

    A tensor that several pipeline stages hold is taken from the lowest, as `reshard.open` does: the files of later ones
    may lack it. Of ranks that would do equally well the target rank's own number is taken, so that what each rank has
    a value of its own for stays with its number. There is at least one rank, from which copies come.

    Args:
        source: the strategy of the files.
        target: the strategy wanted; None for whole tensors.
        rank: the target rank; of whole tensors there is only one, whatever its number.

    Returns:
        source ranks, ascending.

    Raises:
        UsageError: the target has no such rank.
        LayoutError: two layouts of a tensor cannot be of the same shape.

    >>> from reshard.layout.layout import Layout
    >>> from reshard.strategy.strategy import Strategy
    >>> rows = Strategy.of({"w": Layout.of([2, 2], [1, -1])})
    >>> columns = Strategy.of({"w": Layout.of([4], [-1, 0])})
    >>> rows.grid("w", (8, 8)).ranks, needed_ranks(rows, columns, 0), needed_ranks(columns, rows, 0)
    (((0, 1), (2, 3)), (0, 2), (0, 1, 2, 3))
    """
    groups = {group for _, of_stages in _needs(source, target, rank) for group in of_stages[0]}
    own = rank if rank in source.ranks else source.ranks.start
    return tuple(sorted(_cover(groups, own))) or (own,)


def lacking_ranks(
    source: Strategy, target: Strategy | None, rank: int, present: Collection[int]
) -> dict[int, list[str]]:
    """Return source ranks that a target rank needs besides those present, each with the tensors that it would supply.

    Args:
        source: the strategy of the files.
        target: the strategy wanted; None for whole tensors.
        rank: the target rank.
        present: the source ranks whose files are there.

    Raises:
        UsageError: the target has no such rank.
        LayoutError: two layouts of a tensor cannot be of the same shape.

    >>> from reshard.layout.layout import Layout
    >>> from reshard.strategy.strategy import Strategy
    >>> lacking_ranks(Strategy.of({"w": Layout.of([2, 2], [1, -1])}), None, 0, {0, 1})
    {2: ['w']}
    """
    held = frozenset(present)
    needing: dict[Group, list[str]] = defaultdict(list)
    for name, of_stages in _needs(source, target, rank):
        unmet = [[group for group in groups if not group & held] for groups in of_stages]
        if all(unmet):
            for group in unmet[0]:
                needing[group].append(name)
    found = sorted(_cover(needing, rank))
    return {
        lacking: list(dict.fromkeys(name for group, some in needing.items() if lacking in group for name in some))
        for lacking in found
    }


def _needs(source: Strategy, target: Strategy | None, rank: int) -> Iterable[tuple[str, list[frozenset[Group]]]]:
    """Yield each tensor that both name and the rank gets, with the groups that it needs of each source stage."""
    if target is not None and rank not in target.ranks:
        raise UsageError(
            f"the target has no rank {rank}; it has ranks {target.ranks.start} to {target.ranks.stop - 1}",
            code="no-such-rank",
        )
    stage = target.stage_of(rank) if target else 0
    local = rank % target.devices if target else 0
    known: dict[object, frozenset[Group]] = {}
    for name, places in source.tensors.items():
        wanted = None
        if target is not None:
            wanted = next((placed for placed in target.tensors.get(name, ()) if placed.stage == stage), None)
            if wanted is None:
                continue
        found = []
        for placed in places:
            key = (placed, wanted)
            if key not in known:
                try:
                    known[key] = _groups(placed, wanted, placed.stage * source.devices, local)
                except LayoutError as error:
                    raise error.about(f"tensor {name!r}") from None
            found.append(known[key])
        yield name, found


def _groups(source: Placed, target: Placed | None, first_rank: int, local: int) -> frozenset[Group]:
    """Return the groups of source ranks that a target rank needs for one tensor."""
    found: set[Group] = set()
    for before, after, shape in _readings(source, target):
        held = grid(shape, ((before, first_rank),))
        block = Block.whole(shape) if after is None else grid(shape, ((after, 0),)).by_rank()[local]
        found.update(frozenset(ranks) for other, ranks in zip(held.blocks, held.ranks, strict=True) if other & block)
    return frozenset(found)


def _readings(source: Placed, target: Placed | None) -> list[tuple[Layout, Layout | None, Shape]]:
    """Return the layouts of both sides with a shape that both cut evenly, for each shape that they may mean.

    Only JSON strategies, which write nested entries expanded, may mean several.
    """
    if target is None:
        return [(source.layout, None, source.shape or least_shape([source.layout]))]
    found: list[tuple[Layout, Layout | None, Shape]] = []
    ndims = range(1 + max(len(source.layout.tensor_map), len(target.layout.tensor_map)))
    for ndim in ndims:
        for (before, size), (after, other) in product(_folded(source, ndim), _folded(target, ndim)):
            if size is None or other is None or size == other:
                found.append((before, after, size or other or least_shape([before, after])))
    if not found:
        raise LayoutError(
            f"source layout {source.layout} and target layout {target.layout} fit no common shape",
            code="no-common-shape",
        )
    return found


def _folded(placed: Placed, ndim: int) -> list[tuple[Layout, Shape | None]]:
    """Return what a layout may be for a tensor of so many dimensions, with its shape where that is known."""
    if placed.expanded and placed.shape is not None:
        return [*foldings(placed.layout, placed.shape, ndim)]
    return [(placed.layout, placed.shape)] if len(placed.layout.tensor_map) == ndim else []


def _cover(groups: Iterable[Group], own: int) -> set[int]:
    """Return ranks of which every group has one and none can be left out; `own` is taken before its equals."""
    member_of: dict[int, list[Group]] = defaultdict(list)
    for group in groups:
        for rank in group:
            member_of[rank].append(group)
    left = set(groups)
    count = Counter({rank: len(some) for rank, some in member_of.items()})
    taken: set[int] = set()
    while left:
        rank = min(count, key=lambda rank: (-count[rank], rank != own, rank))
        taken.add(rank)
        for group in left.intersection(member_of[rank]):
            left.discard(group)
            count.subtract(group)
    for rank in sorted(taken, key=lambda rank: (rank == own, rank)):
        if all(len(group & taken) > 1 for group in member_of[rank]):
            taken.discard(rank)  # those that came later have what it was taken for
    return taken
