"""Layouts, strategies and plans in words and as plain data.

`rows / 4 × 2 copies` means 4 blocks of rows, each on 2 ranks. The words omit the order of the ranks; pictures show it,
and so do the device matrix and the tensor map of `--raw`.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import groupby, pairwise
from math import prod
from typing import TYPE_CHECKING

from reshard.core.layout.block import shape_text
from reshard.core.model.checkpoint import stored_files
from reshard.core.model.reshape import stacked_axes
from reshard.core.plan.bands import is_grid
from reshard.errors import LayoutError, printable
from reshard.strategy.names import group_names, ranges_text
from reshard.view.text import count_text, fields_data

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.core.layout.block import Block, Shape
    from reshard.core.layout.layout import Layout
    from reshard.core.model.checkpoint import Checkpoint, Sharding, Tensor
    from reshard.strategy.strategy import Placed, Strategy

_SAVED_BY_TORCH = "torch.save"

LEGEND = """\
layout: [extents of the device axes] map [the axis that cuts each dimension:
0 is the last, -1 none] opt N: rows are cut once more for the optimizer, into
N pieces or, with -1, into one for each rank that would hold the same"""
"""The meaning of a layout's text."""


# --- layouts ----------------------------------------------------------------------------------------------------


def raw_text(layout: Layout) -> str:
    """Write a layout in the notation of strategy files.

    >>> from reshard.core.layout.layout import Layout
    >>> raw_text(Layout.of([2, 4], [1, -1]))
    '[2, 4] map [1, -1]'
    """
    text = str(layout)
    if layout.param_split_shape:
        text += f" rows {shape_text(layout.param_split_shape)}"
    return f"{text} field {layout.field}" if layout.field else text


def layout_words(layout: Layout) -> str:
    """Describe how a layout cuts a tensor.

    >>> from reshard.core.layout.layout import Layout
    >>> layout_words(Layout.of([2, 4], [1, -1])), layout_words(Layout.of([4], [-1])), layout_words(Layout.of([1], [-1]))
    ('rows / 2 × 4 copies', 'whole × 4 copies', 'whole')
    >>> layout_words(Layout.of([2, 2, 2], [2, 1], -1)), layout_words(Layout.of([4], [-1, 0, -1]))
    ('rows / 4 (2 for the optimizer), columns / 2', 'axis 1 / 4')
    """
    try:
        ways = layout.splits
    except LayoutError as error:
        return f"not possible: {error.message}"
    parts = _parts(ways, layout.optimizer_shards if ways else 1)
    if layout.param_split_shape and parts:
        parts[0] += f" as {shape_text(layout.param_split_shape)}"
    if layout.field:
        parts.append(f"{layout.field} fields interleaved")
    return f"{', '.join(parts) or 'whole'}{_copies(layout.devices // prod(ways))}"


def caption_words(layout: Layout) -> str:
    """Describe a layout above a picture: how it cuts a tensor, and the mesh of its ranks.

    >>> from reshard.core.layout.layout import Layout
    >>> caption_words(Layout.of([2, 2, 2], [-1, 1])), caption_words(Layout.of([4], [0, -1]))
    ('columns / 2 × 4 copies; 8 ranks as a mesh of 2 × 2 × 2', 'rows / 4')
    """
    axes = [extent for extent in layout.dev_matrix if extent > 1]
    mesh = f"; {layout.devices} ranks as a mesh of {' × '.join(map(str, axes))}" if len(axes) > 1 else ""
    return f"{layout_words(layout)}{mesh}"


def placement_words(layout: Layout) -> str:
    """Write a layout as PyTorch does: a placement for each axis of the device mesh.

    >>> from reshard.core.layout.layout import Layout
    >>> placement_words(Layout.of([2, 4], [1, -1])), placement_words(Layout.of([2, 2], [(1, 0), -1]))
    ('Shard(0), Replicate()', 'Shard(0), Shard(0)')
    """
    last = len(layout.dev_matrix) - 1
    dims = {last - value: dim for dim, axes in enumerate(layout.tensor_map) for value in axes}
    return ", ".join(f"Shard({dims[axis]})" if axis in dims else "Replicate()" for axis in range(last + 1))


@lru_cache(maxsize=256)
def sharding_words(sharding: Sharding, shape: Shape) -> str:
    """Describe how the files cut a tensor without a layout; cached, since tensors share shardings."""
    blocks = sharding.blocks
    copies = sorted({len(replicas) for replicas in sharding.replicas} or {1})
    if len(blocks) > 1 and not is_grid(shape, blocks):
        cut = f"{len(blocks):,} blocks"
    else:
        ways = [len({block.start[axis] for block in blocks}) or 1 for axis in range(len(shape))]
        cut = ", ".join(_parts(ways, 1)) or "whole"
    return cut + (_copies(copies[0]) if len(copies) == 1 else f" × {copies[0]} to {copies[-1]} copies")


@lru_cache(maxsize=256)
def shard_counts(sharding: Sharding) -> tuple[str, str]:
    """Write the number of blocks and of copies of each; cached, since tensors share shardings."""
    copies = sorted({len(replicas) for replicas in sharding.replicas} or {1})
    return f"{max(len(sharding.blocks), 1)}", f"{copies[0]}" if len(copies) == 1 else f"{copies[0]}-{copies[-1]}"


def _parts(ways: Sequence[int], optimizer: int) -> list[str]:
    """Return the text of each dimension that is cut."""
    axes = ["rows", "columns"] if len(ways) == 2 else ["rows"] if len(ways) == 1 else []
    axes += [f"axis {dim}" for dim in range(len(axes), len(ways))]
    parts = [f"{axis} / {way}" for axis, way in zip(axes, ways, strict=True) if way > 1]
    if optimizer > 1:
        parts[0] += f" ({optimizer} for the optimizer)"
    return parts


def _copies(count: int) -> str:
    return f" × {count} copies" if count > 1 else ""


def layout_data(layout: Layout) -> dict[str, object]:
    """Return a layout as plain data, with the keys of a JSON strategy file; map entries are lists of axes."""
    return fields_data(
        layout, "dev_matrix", "tensor_map", "opt_weight_shard_size", "opt_weight_shard_step", "param_split_shape",
        "field",
    )  # fmt: skip


# --- tensors of a checkpoint ------------------------------------------------------------------------------------


def extents_text(tensor: Tensor) -> str:
    """Write the shape of a tensor, with the units of its first dimensions, if known."""
    shape, words = tensor.spec.shape, stacked_axes(tensor)
    counted = ", ".join(count_text(extent, word) for extent, word in zip(shape, words, strict=False))
    rest = shape_text(shape[len(words) :])
    return f"[{counted}{', ' if rest != '[]' else ''}{rest[1:]}" if words else rest


def placements_of(checkpoint: Checkpoint, tensor: Tensor) -> tuple[Placed, ...]:
    """Return the stages and layouts of a tensor in the strategy."""
    if checkpoint.strategy is None or not tensor.listed:
        return ()
    return checkpoint.strategy.tensors.get(tensor.spec.name, ())


def layouts_of(checkpoint: Checkpoint, tensor: Tensor) -> list[tuple[int, Layout]]:
    """Return the stages and layouts of a tensor, from the strategy or from metadata."""
    if places := placements_of(checkpoint, tensor):
        return [(placed.stage, placed.layout) for placed in places]
    layout = checkpoint.extras.layout_of(tensor.spec.name)
    return [] if layout is None else [(0, layout)]


def blocks_of(checkpoint: Checkpoint, tensor: Tensor) -> tuple[tuple[Block, ...], tuple[tuple[int, ...], ...]]:
    """Return the blocks of a tensor and the ranks that hold each.

    They are the blocks of the files, or those of the training's mesh if the files are of no rank, as in Orbax. No rank
    holds a computed tensor.
    """
    if is_computed(checkpoint, tensor):
        return tensor.sharding.blocks, ((),) * len(tensor.sharding.blocks)
    arrangement, name, ranks = checkpoint.extras.arrangement, tensor.spec.name, checkpoint.ranks
    if arrangement and {*ranks} == {0} and name in arrangement.tensors and arrangement.tensors[name].meshes:
        grid = arrangement.grid(name, tensor.spec.shape)
        return grid.blocks, grid.ranks
    sharding = tensor.sharding
    return sharding.blocks, tuple(tuple(sorted({ranks[at.file] for at in every})) for every in sharding.replicas)


def is_computed(checkpoint: Checkpoint, tensor: Tensor) -> bool:
    """Return whether a tensor is in no file, but computed when it is read."""
    return _computed_file(checkpoint, tensor) is not None


def _computed_file(checkpoint: Checkpoint, tensor: Tensor) -> int | None:
    """Return the number of the file that stands for a computed tensor, or None."""
    number = next((replicas[0].file for replicas in tensor.sharding.replicas if replicas), None)
    return None if number is None or checkpoint.files[number].inputs is None else number


@lru_cache(maxsize=4)
def ranks_read(checkpoint: Checkpoint, number: int) -> tuple[int, ...]:
    """Return the ranks of the files from which a file of computed tensors is read."""
    return tuple(sorted({checkpoint.ranks[file] for file in stored_files(checkpoint.files, [number])}))


def layouts_text(checkpoint: Checkpoint, tensors: Sequence[Tensor]) -> str:
    """Write the layouts of tensors that share a row, with their stages; "" if unknown."""
    stages: dict[str, set[int]] = {}
    for tensor in tensors:
        for stage, layout in layouts_of(checkpoint, tensor):
            stages.setdefault(str(layout), set()).add(stage)
    if stages and checkpoint.strategy and len(checkpoint.strategy.stages) > 1:
        return ", ".join(f"stage {ranges_text(sorted(numbers))}: {layout}" for layout, numbers in stages.items())
    if stages:
        return next(iter(stages))
    return "whole" if all(len(tensor.sharding.blocks) <= 1 for tensor in tensors) else ""


def cut_words(checkpoint: Checkpoint, tensor: Tensor) -> str:
    """Describe how a tensor is cut: by its layout, or else by the blocks in its files."""
    if (number := _computed_file(checkpoint, tensor)) is not None:
        ranks = ranks_read(checkpoint, number)
        return f"computed from {count_text(len(ranks), 'rank')}" if len(ranks) > 1 else "computed"
    layouts = layouts_of(checkpoint, tensor)
    if not layouts:
        return sharding_words(tensor.sharding, tensor.spec.shape)
    write = placement_words if checkpoint.extras.described_by == _SAVED_BY_TORCH else layout_words
    stages = {stage: write(layout) for stage, layout in layouts}
    if len(set(stages.values())) == 1:
        return next(iter(stages.values()))
    return ", ".join(f"stage {stage}: {words}" for stage, words in stages.items())


# --- strategies -------------------------------------------------------------------------------------------------


def groups_of(strategy: Strategy) -> dict[tuple[int, Layout], list[str]]:
    """Return the tensors of each layout, by stage."""
    groups: dict[tuple[int, Layout], list[str]] = {}
    for name, placed in strategy.by_stage():
        groups.setdefault((placed.stage, placed.layout), []).append(name)
    return groups


def strategy_text(strategy: Strategy, title: str, *, raw: bool = False) -> str:
    """Write a strategy: its devices, stages and ranks, and the names of each layout, folded.

    `title` is the name of its file; `raw` writes the device matrix and tensor map of each layout, too.

    >>> from reshard.core.layout.layout import Layout
    >>> from reshard.strategy.strategy import Strategy
    >>> print(strategy_text(Strategy.of({f"h.{i}.w": Layout.of([2], [0, -1]) for i in range(4)}), "s.ckpt"))
    s.ckpt: 4 tensors over 2 ranks (0-1): 1 stage of 2 devices
    <BLANKLINE>
    rows / 2
      h.{0-3}.w  (4 tensors)
    """
    stages = count_text(len(strategy.stages), "stage")
    if strategy.others:
        stages = f"stage {strategy.stages.start} of a longer pipeline,"
    tensors, ranks = count_text(len(strategy.tensors), "tensor"), count_text(len(strategy.ranks), "rank")
    devices = f"{stages} of {count_text(strategy.devices, 'device')}"
    lines = [f"{printable(title)}: {tensors} over {ranks} ({ranges_text(strategy.ranks)}): {devices}"]
    groups: dict[tuple[int, str], list[str]] = {}
    for (stage, layout), members in groups_of(strategy).items():
        words = f"{layout_words(layout)}   # {raw_text(layout)}" if raw else layout_words(layout)
        groups.setdefault((stage, words), []).extend(members)
    for (stage, words), members in groups.items():
        lines += ["", f"stage {stage}: {words}" if len(strategy.stages) > 1 else words]
        for name, _, count in group_names((name, None) for name in members):
            lines.append(f"  {printable(name)}" + (f"  ({count_text(count, 'tensor')})" if count > 1 else ""))
    return "\n".join([*lines, "", *LEGEND.splitlines()] if raw else lines)


def strategy_data(strategy: Strategy) -> dict[str, object]:
    """Return a strategy as plain data, with one item for each tensor and stage."""
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


# --- ranks ------------------------------------------------------------------------------------------------------


def ranks_words(ranks: Sequence[int]) -> str:
    """Write ranks as ranges, with a step if it is regular; `no file` if there are no ranks.

    >>> ranks_words([0, 8, 16, 24]), ranks_words([0, 1, 2, 3]), ranks_words([0, 1, 4, 5]), ranks_words([])
    ('0-24, step 8', '0-3', '0-1,4-5', 'no file')
    """
    ordered = sorted(ranks)
    steps = [step for step, _ in groupby(b - a for a, b in pairwise(ordered))]
    if len(ordered) > 2 and len(steps) == 1 and steps[0] > 1:
        return f"{ordered[0]}-{ordered[-1]}, step {steps[0]}"
    return ranges_text(ordered) if ordered else "no file"
