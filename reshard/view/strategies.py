"""Layouts and strategies in words, and as plain data."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from reshard.errors import LayoutError
from reshard.layout.block import shape_text
from reshard.view.folding import fold, ranges_text
from reshard.view.words import count_text, printable

if TYPE_CHECKING:
    from reshard.layout.layout import Layout
    from reshard.strategy.strategy import Strategy

LEGEND = """\
layout: [extents of the device axes] map [the axis that cuts each dimension:
0 is the last, -1 none] opt N: rows are cut once more for the optimizer, into
N pieces or, with -1, into one for each rank that would hold the same"""
"""What the text of a layout means."""


def layout_text(layout: Layout) -> str:
    """Write a layout on one line: the numbers of the strategy file, and what they do to the tensor.

    >>> from reshard.layout.layout import Layout
    >>> layout_text(Layout.of([2, 4], [1, -1])), layout_text(Layout.of([4], [-1]))
    ('[2, 4] map [1, -1]: 2 x 1 blocks, each on 4 ranks', '[4] map [-1]: whole on 4 ranks')
    """
    text = str(layout)
    if layout.param_split_shape:
        text += f" rows {shape_text(layout.param_split_shape)}"
    if layout.field:
        text += f" field {layout.field}"
    try:
        splits = layout.splits
    except LayoutError as error:
        return f"{text}: not possible: {error}"
    copies = layout.devices // prod(splits)
    where = count_text(copies, "rank")
    if prod(splits) == 1:
        return f"{text}: whole on {where}"
    return f"{text}: {' x '.join(map(str, splits))} blocks, each on {where}"


def layout_data(layout: Layout) -> dict[str, object]:
    """Return a layout in the words of a JSON strategy file; the entries of the map are lists of axes."""
    return {
        "dev_matrix": list(layout.dev_matrix),
        "tensor_map": [list(axes) for axes in layout.tensor_map],
        "opt_weight_shard_size": layout.opt_weight_shard_size,
        "opt_weight_shard_step": layout.opt_weight_shard_step,
        "param_split_shape": list(layout.param_split_shape),
        "field": layout.field,
    }


def strategy_text(strategy: Strategy, title: str) -> str:
    """Write a strategy: its devices, stages and ranks, and the tensors of each layout, folded.

    >>> from reshard.layout.layout import Layout
    >>> from reshard.strategy.strategy import Strategy
    >>> print(strategy_text(Strategy.of({f"h.{i}.w": Layout.of([2], [0, -1]) for i in range(4)}), "s.ckpt"))
    s.ckpt: 4 tensors over 2 ranks (0-1): 1 stage of 2 devices
    <BLANKLINE>
    [2] map [0, -1]: 2 x 1 blocks, each on 1 rank
      h.{0-3}.w  (4 tensors)
    <BLANKLINE>
    layout: [extents of the device axes] map [the axis that cuts each dimension:
    0 is the last, -1 none] opt N: rows are cut once more for the optimizer, into
    N pieces or, with -1, into one for each rank that would hold the same
    """
    stages = count_text(len(strategy.stages), "stage")
    if strategy.others:
        stages = f"stage {strategy.stages.start} of a longer pipeline,"
    lines = [
        (
            f"{printable(title)}: {count_text(len(strategy.tensors), 'tensor')} over "
            f"{count_text(len(strategy.ranks), 'rank')} ({ranges_text(strategy.ranks)}): "
            f"{stages} of {count_text(strategy.devices, 'device')}"
        )
    ]
    several = len(strategy.stages) > 1
    for (stage, layout), found in groups_of(strategy).items():
        lines += ["", f"stage {stage}: {layout_text(layout)}" if several else layout_text(layout)]
        for name, _, count in fold((name, None) for name in found):
            lines.append(f"  {printable(name)}" + (f"  ({count_text(count, 'tensor')})" if count > 1 else ""))
    return "\n".join([*lines, "", *LEGEND.splitlines()])


def groups_of(strategy: Strategy) -> dict[tuple[int, Layout], list[str]]:
    """Return the tensors of each layout, by stage."""
    groups: dict[tuple[int, Layout], list[str]] = {}
    for name, placed in strategy.by_stage():
        groups.setdefault((placed.stage, placed.layout), []).append(name)
    return groups


def strategy_data(strategy: Strategy) -> dict[str, object]:
    """Return a strategy as plain data; a tensor has one item for each stage that holds it."""
    return {
        "ranks": list(strategy.ranks),
        "stages": list(strategy.stages),
        "devices_per_stage": strategy.devices,
        "merged": strategy.merged,
        "tensors": [
            {"name": name, "stage": placed.stage, "layout": layout_data(placed.layout)}
            for name, places in strategy.tensors.items()
            for placed in places
        ],
    }
