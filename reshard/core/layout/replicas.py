"""Choose the rank that stores each block, if each block is stored once per group of replicas.

Ranks that hold the same block are replicas of each other: a group. Stored once, a block is in the file of one rank
of its group, and a reader finds it there because it knows the layout. There are two ways to distribute the blocks, both
deterministic:

* **by turns** (round robin), as MindSpore does: each group counts its tensors in the order of their names, and the n-th
  one goes to rank `n mod size` of the group. Even in the number of tensors, not in bytes: if weights and biases
  alternate, one rank of two gets all the weights.
* **by size** (balanced): the largest block first, each to the rank of its group that has the fewest bytes so far. Small
  groups go before large ones, because large ones can still even out the difference.

A tensor in several pipeline stages is stored once in each: MindSpore gathers it within a stage only.

Source: MindSpore 2.10 `train/_utils.py` (`get_parameter_redundancy`, `remove_param_redundancy`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import groupby, product
from typing import TYPE_CHECKING

from reshard.core.layout.grid import flat_index

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from reshard.core.layout.grid import Grid
    from reshard.core.layout.layout import Layout

Group = tuple[int, ...]
"""Ranks that hold the same block, ascending."""


@lru_cache(maxsize=4096)
def replica_groups(layout: Layout, first_rank: int = 0) -> tuple[Group, ...]:
    """Return the ranks of a stage, grouped by block, for a tensor of any shape.

    The groups come in MindSpore's order: by the coordinate on the last split device axis, then on the one before it,
    and so on; the pieces of the optimizer, which divide a group, come last.

    Args:
        layout: how the tensor is cut.
        first_rank: the global number of the stage's first rank.

    Raises:
        LayoutError: the optimizer's pieces do not divide the ranks that share a block.

    >>> from reshard.core.layout.layout import Layout
    >>> replica_groups(Layout.of([2, 4], [1, -1]))
    ((0, 1, 2, 3), (4, 5, 6, 7))
    >>> replica_groups(Layout.of([2, 4], [1, -1], 2), 8)
    ((8, 10), (9, 11), (12, 14), (13, 15))
    """
    pieces = layout.optimizer_shards
    unused = layout.unused_axes
    used = [axis for axis in reversed(range(len(layout.dev_matrix))) if axis not in unused]
    groups: dict[Group, list[int]] = defaultdict(list)
    for rank, coordinates in enumerate(product(*map(range, layout.dev_matrix)), first_rank):
        piece = flat_index(coordinates, layout.dev_matrix, unused) % pieces
        groups[(*(coordinates[axis] for axis in used), piece)].append(rank)
    return tuple(tuple(groups[key]) for key in sorted(groups))


def by_turns(groups: Mapping[str, Iterable[Group]], *, copies: int = 1) -> dict[str, list[Group]]:
    """Choose the ranks that store each block, round robin within each group.

    Args:
        groups: for each tensor, the groups that hold its blocks. Turns are taken in this order of the tensors.
        copies: the number of ranks of each group that store it; all, if the group has fewer.

    Returns:
        For each tensor and group, the ranks that store its block.

    >>> by_turns({"a": [(0, 1)], "b": [(0, 1)], "c": [(0,), (1,)]})
    {'a': [(0,)], 'b': [(1,)], 'c': [(0,), (1,)]}
    """
    turns: dict[Group, int] = defaultdict(int)
    chosen: dict[str, list[Group]] = {}
    for name, block_groups in groups.items():
        chosen[name] = []
        for group in block_groups:
            turn = turns[group]
            turns[group] = turn + 1
            chosen[name].append(tuple(group[(turn + copy) % len(group)] for copy in range(min(copies, len(group)))))
    return chosen


def by_size(groups: Mapping[str, Sequence[tuple[Group, int]]]) -> dict[str, list[Group]]:
    """Choose the rank that stores each block, so that bytes are balanced over ranks.

    Args:
        groups: for each tensor, the groups that hold its blocks, and the size of each block in bytes.

    Returns:
        For each tensor and group, the one rank that stores its block.

    >>> by_size({"a": [((0, 1), 100)], "b": [((0, 1), 400)], "c": [((0, 1), 200)]})
    {'a': [(1,)], 'b': [(0,)], 'c': [(1,)]}
    """
    stored: dict[int, int] = defaultdict(int)
    of_group: dict[Group, list[tuple[int, str, int]]] = defaultdict(list)
    for name, blocks in groups.items():
        for number, (group, nbytes) in enumerate(blocks):
            of_group[group].append((-nbytes, name, number))
    chosen: dict[str, list[Group]] = {name: [()] * len(blocks) for name, blocks in groups.items()}
    for group in sorted(of_group, key=lambda group: (len(group), group)):
        heap = [(stored[rank], rank) for rank in group]
        heapify(heap)
        for negative, name, number in sorted(of_group[group]):
            nbytes, rank = heap[0]
            heapreplace(heap, (nbytes - negative, rank))
            chosen[name][number] = (rank,)
        stored.update((rank, nbytes) for nbytes, rank in heap)
    return chosen


def stored_once(
    grids: Mapping[str, Grid], *, devices: int, itemsizes: Mapping[str, int] | None = None
) -> dict[str, Grid]:
    """Return grids with one storing rank for each replicated block.

    Args:
        grids: each tensor's grid over the global ranks (`Strategy.grid`).
        devices: ranks in a pipeline stage; a block that several stages hold is stored once in each.
        itemsizes: bytes per element of each tensor, to balance the blocks by size; without it they are distributed by
            turns, exactly as MindSpore does.

    Returns:
        For each tensor a grid of the same shape and blocks; equal results of one grid are one object.

    >>> from reshard.core.layout.layout import Layout
    >>> every = Layout.of([4], [-1, -1]).grid((8, 8))
    >>> kept = stored_once({"weight": every, "bias": every}, devices=4)
    >>> kept["bias"].ranks, kept["weight"].ranks
    (((0,),), ((1,),))
    """
    split: dict[Grid, list[list[Group]]] = {}
    for grid in grids.values():
        if grid not in split:
            split[grid] = [_by_stage(ranks, devices) for ranks in grid.ranks]
    shared = [name for name in sorted(grids) if any(len(g) > 1 for held_by in split[grids[name]] for g in held_by)]
    if itemsizes is None:
        chosen = by_turns({name: [g for held_by in split[grids[name]] for g in held_by] for name in shared})
    else:
        chosen = by_size(
            {
                name: [
                    (group, block.size * itemsizes[name])
                    for block, held_by in zip(grids[name].blocks, split[grids[name]], strict=True)
                    for group in held_by
                ]
                for name in sorted(grids)
            }
        )
    cache: dict[tuple[Grid, tuple[Group, ...]], Grid] = {}
    results = {}
    for name, grid in grids.items():
        if name not in chosen:
            results[name] = grid
            continue
        keepers = iter(chosen[name])
        ranks = tuple(tuple(rank for _ in held_by for rank in next(keepers)) for held_by in split[grid])
        if (grid, ranks) not in cache:
            cache[grid, ranks] = grid if ranks == grid.ranks else replace(grid, ranks=ranks)
        results[name] = cache[grid, ranks]
    return results


def covering_ranks(groups: Iterable[frozenset[int]], preferred: int) -> set[int]:
    """Return a minimal set of ranks with a member in every group.

    Take the rank that is in most groups, until each group has one; then drop every rank whose groups all have another.
    Each remaining rank is necessary; a smaller set may exist, but is hard to find. Among equally good ranks
    `preferred` wins.

    >>> sorted(covering_ranks([frozenset({0, 1}), frozenset({1, 2}), frozenset({3})], 0))
    [1, 3]
    """
    member_of: dict[int, list[frozenset[int]]] = defaultdict(list)
    for group in groups:
        for rank in group:
            member_of[rank].append(group)
    uncovered = set(groups)
    count = Counter({rank: len(members) for rank, members in member_of.items()})
    chosen: set[int] = set()
    while uncovered:
        rank = min(count, key=lambda rank: (-count[rank], rank != preferred, rank))
        chosen.add(rank)
        for group in uncovered.intersection(member_of[rank]):
            uncovered.discard(group)
            count.subtract(group)
    for rank in sorted(chosen, key=lambda rank: (rank == preferred, rank)):
        if all(len(group & chosen) > 1 for group in member_of[rank]):
            chosen.discard(rank)  # ranks chosen later cover its groups
    return chosen


def _by_stage(ranks: Group, devices: int) -> list[Group]:
    """Group ascending ranks by pipeline stage.

    >>> _by_stage((0, 2, 5, 6), 4)
    [(0, 2), (5, 6)]
    """
    return [tuple(group) for _, group in groupby(ranks, key=lambda rank: rank // devices)]
