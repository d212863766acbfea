"""Layouts in words, and drawn in characters: how a tensor is cut, and which rank holds which block.

`rows / 4 × 2 copies` is cut into 4 blocks of rows, each on 2 ranks. Words leave out the order of the ranks: the picture
has it, and so have the device matrix and the tensor map that `--raw` shows.
"""

from __future__ import annotations

from itertools import groupby, pairwise
from math import prod
from typing import TYPE_CHECKING

from reshard.errors import LayoutError
from reshard.layout.block import shape_text
from reshard.plan.bands import is_grid
from reshard.strategy.names import ranges_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard.layout.block import Block, Shape
    from reshard.layout.layout import Layout
    from reshard.source.checkpoint import Checkpoint, Sharding, Tensor

SAVED_BY_TORCH = "torch.save"

MOST_ROWS, MOST_COLUMNS = 16, 8
"""The most blocks that a picture in characters has downwards and to the right."""


def layout_words(layout: Layout) -> str:
    """Write how a layout cuts a tensor.

    >>> from reshard.layout.layout import Layout
    >>> layout_words(Layout.of([2, 4], [1, -1])), layout_words(Layout.of([4], [-1])), layout_words(Layout.of([1], [-1]))
    ('rows / 2 × 4 copies', 'whole × 4 copies', 'whole')
    >>> layout_words(Layout.of([2, 2, 2], [2, 1], -1)), layout_words(Layout.of([4], [-1, 0, -1]))
    ('rows / 4 (2 for the optimizer), columns / 2', 'axis 1 / 4')
    """
    try:
        ways = layout.splits
    except LayoutError as error:
        return f"not possible: {error.message}"
    optimizer = layout.optimizer_shards if ways else 1
    parts = _parts(ways, optimizer)
    if layout.param_split_shape and parts:
        parts[0] += f" as {shape_text(layout.param_split_shape)}"
    if layout.field:
        parts.append(f"{layout.field} fields interleaved")
    return f"{', '.join(parts) or 'whole'}{_copies(layout.devices // prod(ways))}"


def placement_words(layout: Layout) -> str:
    """Write a layout as PyTorch does: a placement for each axis of the device mesh.

    >>> from reshard.layout.layout import Layout
    >>> placement_words(Layout.of([2, 4], [1, -1])), placement_words(Layout.of([2, 2], [(1, 0), -1]))
    ('Shard(0), Replicate()', 'Shard(0), Shard(0)')
    """
    last = len(layout.dev_matrix) - 1
    dims = {last - value: dim for dim, axes in enumerate(layout.tensor_map) for value in axes}
    return ", ".join(f"Shard({dims[axis]})" if axis in dims else "Replicate()" for axis in range(last + 1))


def sharding_words(sharding: Sharding, shape: Shape) -> str:
    """Write how the files cut a tensor, without a layout that says so."""
    blocks = sharding.blocks
    copies = sorted({len(replicas) for replicas in sharding.replicas} or {1})
    if len(blocks) > 1 and not is_grid(shape, blocks):
        cut = f"{len(blocks):,} blocks"
    else:
        ways = [len({block.start[axis] for block in blocks}) or 1 for axis in range(len(shape))]
        cut = ", ".join(_parts(ways, 1)) or "whole"
    return cut + (_copies(copies[0]) if len(copies) == 1 else f" × {copies[0]} to {copies[-1]} copies")


def _parts(ways: Sequence[int], optimizer: int) -> list[str]:
    """Return what is done to each dimension that is cut."""
    names = ["rows", "columns"] if len(ways) == 2 else ["rows"] if len(ways) == 1 else []
    names += [f"axis {dim}" for dim in range(len(names), len(ways))]
    parts = [f"{name} / {way}" for name, way in zip(names, ways, strict=True) if way > 1]
    if optimizer > 1:
        parts[0] += f" ({optimizer} for the optimizer)"
    return parts


def _copies(count: int) -> str:
    return f" × {count} copies" if count > 1 else ""


def layouts_of(checkpoint: Checkpoint, tensor: Tensor) -> list[tuple[int, Layout]]:
    """Return the layouts of a tensor by stage; none of one that neither a strategy nor metadata name."""
    if checkpoint.strategy is None or not tensor.listed:
        layout = checkpoint.extras.layout_of(tensor.spec.name)
        return [] if layout is None else [(0, layout)]
    return [(placed.stage, placed.layout) for placed in checkpoint.strategy.tensors.get(tensor.spec.name, ())]


def cut_words(checkpoint: Checkpoint, tensor: Tensor, known: dict[Sharding, str]) -> str:
    """Write how a tensor of a checkpoint is cut: its layout, if there is one, else what its files have.

    Args:
        checkpoint: the checkpoint.
        tensor: one of its tensors.
        known: the words of shardings that were written before, since tensors share them.
    """
    layouts = layouts_of(checkpoint, tensor)
    if not layouts:
        if tensor.sharding not in known:
            known[tensor.sharding] = sharding_words(tensor.sharding, tensor.spec.shape)
        return known[tensor.sharding]
    write = placement_words if checkpoint.extras.described_by == SAVED_BY_TORCH else layout_words
    stages = {stage: write(layout) for stage, layout in layouts}
    if len(set(stages.values())) == 1:
        return next(iter(stages.values()))
    return ", ".join(f"stage {stage}: {words}" for stage, words in stages.items())


def block_picture(shape: Shape, blocks: Sequence[Block], ranks: Sequence[Sequence[int]]) -> list[str]:
    r"""Draw which ranks hold which block, in box-drawing characters.

    The first two axes that are cut are drawn, rows downwards; along other axes the first blocks are.

    Args:
        shape: the whole tensor's.
        blocks: distinct blocks, a grid.
        ranks: the ranks that hold each block.

    >>> from reshard.layout.layout import Layout
    >>> grid = Layout.of([2, 2], [1, 0]).grid((4, 6))
    >>> for line in block_picture(grid.shape, grid.blocks, grid.ranks):
    ...     print(line)
           0-2 3-5
          ┌───┬───┐
      0-1 │ 0 │ 1 │
          ├───┼───┤
      2-3 │ 2 │ 3 │
          └───┴───┘
    """
    if not blocks or not is_grid(shape, blocks):
        return [f"{len(blocks):,} blocks, which are no grid"]
    cut = [axis for axis in range(len(shape)) if any(block.start[axis] for block in blocks)]
    down, right = _drawn_axes(cut, len(shape))
    at = {_corner(block, down, right): ranks[n] for n, block in enumerate(blocks) if _is_first(block, down, right)}
    rows, columns = _spans(blocks, down), _spans(blocks, right)
    return _drawn(rows, columns, at)


def _drawn_axes(cut: Sequence[int], ndim: int) -> tuple[int | None, int | None]:
    """Return the axes that are drawn downwards and to the right."""
    if len(cut) >= 2:
        return cut[0], cut[1]
    if len(cut) == 1:
        return (cut[0], None) if cut[0] == 0 and ndim > 1 else (None, cut[0])
    return None, None


def _corner(block: Block, down: int | None, right: int | None) -> tuple[int, int]:
    return (0 if down is None else block.start[down], 0 if right is None else block.start[right])


def _is_first(block: Block, down: int | None, right: int | None) -> bool:
    """Return whether a block is the first one along all axes that are not drawn."""
    return not any(start for axis, start in enumerate(block.start) if axis not in {down, right})


def _spans(blocks: Sequence[Block], axis: int | None) -> list[tuple[int, str]]:
    """Return where blocks begin along an axis, and the indices that each has."""
    if axis is None:
        return [(0, "")]
    spans = sorted({(block.start[axis], block.stop[axis]) for block in blocks})
    return [(start, f"{start}-{stop - 1}") for start, stop in spans]


def _drawn(
    rows: Sequence[tuple[int, str]], columns: Sequence[tuple[int, str]], at: Mapping[tuple[int, int], Sequence[int]]
) -> list[str]:
    """Return the lines of a grid with the ranks in its cells."""
    more_rows, more_columns = len(rows) > MOST_ROWS, len(columns) > MOST_COLUMNS
    rows, columns = rows[:MOST_ROWS], columns[:MOST_COLUMNS]
    cells = [[ranks_words(at.get((row, column), ())) for column, _ in columns] for row, _ in rows]
    widths = [max(len(title), *(len(line[n]) + 2 for line in cells)) for n, (_, title) in enumerate(columns)]
    margin = max(len(title) for _, title in rows) + 3

    def rule(left: str, middle: str, right: str) -> str:
        return " " * margin + left + middle.join("─" * width for width in widths) + right

    titles = " ".join(title.ljust(width) for (_, title), width in zip(columns, widths, strict=True)).rstrip()
    lines = [" " * (margin + 1) + titles] if titles else []
    lines.append(rule("┌", "┬", "┐"))
    for (_, title), line in zip(rows, cells, strict=True):
        if lines[-1].lstrip()[0] != "┌":
            lines.append(rule("├", "┼", "┤"))
        inner = "│".join(f" {cell}".ljust(width) for cell, width in zip(line, widths, strict=True))
        lines.append(f"{title:>{margin - 1}} │{inner}│{' …' if more_columns else ''}")
    lines.append(rule("└", "┴", "┘"))
    return [*lines, " " * margin + "…"] if more_rows else lines


def ranks_words(ranks: Sequence[int]) -> str:
    """Write ranks as one reads them: `0-3`, `0-56 step 8`, `0, 1, 4, 5`; nothing for a block in no file.

    >>> ranks_words([0, 8, 16, 24]), ranks_words([0, 1, 2, 3]), ranks_words([0, 1, 4, 5]), ranks_words([])
    ('0-24 step 8', '0-3', '0-1,4-5', 'no file')
    """
    ordered = sorted(ranks)
    steps = [step for step, _ in groupby(b - a for a, b in pairwise(ordered))]
    if len(ordered) > 2 and len(steps) == 1 and steps[0] > 1:
        return f"{ordered[0]}-{ordered[-1]} step {steps[0]}"
    return ranges_text(ordered) if ordered else "no file"
