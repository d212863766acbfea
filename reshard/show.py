"""Text of layouts, strategies, checkpoints and plans, and the same as data for `--json`.

Pure functions: they open no file and print nothing. Names come from files that nobody vouches for, so every one goes
through `printable` before it may reach a terminal. Equal layers are folded into one row (`layers.{0-31}.wq.weight`),
without which a table of ten thousand tensors tells nothing.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from reshard.block import shape_text
from reshard.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from reshard.block import Shape
    from reshard.checkpoint import Checkpoint, Entry, Shard, SourceFile, Tensor
    from reshard.layout import Layout
    from reshard.plan import Plan
    from reshard.run import Report
    from reshard.strategy import Strategy

_INTEGER = re.compile(r"([0-9]{1,18})")  # longer runs of digits are cut, because int() of a huge one is slow
_MOST_RUNS = 8
_MOST_FILES = 8
_MOST_NAMES = 10
_LEAST_NAME = 24
_RIGHT = frozenset({"count", "bytes", "bytes in all"})  # columns of numbers

LEGEND = """\
layout: [extents of the device axes] map [the axis that cuts each dimension: 0 is
the last, -1 none] opt N: rows are cut once more for the optimizer, into N pieces
or, with -1, into one for each rank that would hold the same"""
"""What the text of a layout means."""

KindT = TypeVar("KindT", bound="Hashable")


# --- pieces of text ---------------------------------------------------------------------------------------------


def printable(text: object, *, keep: str = "") -> str:
    r"""Escape what a terminal would obey instead of showing: control characters, bidirectional marks, lone bytes.

    >>> print(printable("w\x1b[2J\n"), printable("a\nb", keep="\n").count("\n"), printable("größe"))
    w\x1b[2J\n 1 größe
    """
    text = str(text)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode("ascii") for c in text)


def bytes_text(nbytes: float) -> str:
    """Write a size in decimal units, as disks and networks are sold by.

    >>> bytes_text(0), bytes_text(999), bytes_text(1_500_000), bytes_text(999_999), bytes_text(2e15)
    ('0 B', '999 B', '1.5 MB', '1.0 MB', '2000.0 TB')
    """
    size = float(nbytes)
    unit = "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 999.5 or (unit != "B" and size < 999.95):
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"


def count_text(number: int, noun: str) -> str:
    """Write how many of something there are.

    >>> count_text(1, "file"), count_text(12_000, "tensor")
    ('1 file', '12,000 tensors')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def ranges_text(numbers: Iterable[int | str]) -> str:
    """Write ascending integers as runs, the first few of many.

    >>> ranges_text([0, 1, 2, 5, 7, 8]), ranges_text(["08", "09", "10"]), ranges_text(range(0, 40, 2))
    ('0-2,5,7-8', '08-10', '0,2,4,6,8,10,12,14,...')
    """
    runs: list[tuple[int | str, int | str]] = []
    for number in numbers:
        if runs and int(number) == int(runs[-1][1]) + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    shown = [f"{a}" if a == b else f"{a}-{b}" for a, b in runs[:_MOST_RUNS]]
    return ",".join([*shown, "..."] if len(runs) > _MOST_RUNS else shown)


def fold(items: Iterable[tuple[str, KindT]]) -> list[tuple[str, KindT, int]]:
    """Fold names that differ in nothing but integers, where everything else about them (their kind) is equal.

    Args:
        items: names, each with its kind.

    Returns:
        for each folded name, its kind and how many names it stands for, in order of first appearance. A row with
        several ranges stands for all their combinations, so that nothing is shown that is not there.

    >>> names = [f"h.{i}.{w}" for i in range(3) for w in ("wq", "wk")] + ["h.7.wq", "ln"]
    >>> fold((name, None) for name in names)
    [('h.{0-2,7}.wq', None, 4), ('h.{0-2}.wk', None, 3), ('ln', None, 1)]
    """
    groups: dict[tuple[tuple[str, ...], KindT], list[tuple[str, ...]]] = {}
    for name, kind in items:
        parts = _INTEGER.split(name)
        groups.setdefault((tuple(parts[::2]), kind), []).append(tuple(parts[1::2]))
    rows = []
    for (texts, kind), numbers in groups.items():
        for box in _boxes(numbers):
            inside = [values[0] if len(values) == 1 else f"{{{ranges_text(values)}}}" for values in box]
            name = "".join(a + b for a, b in zip(texts, [*inside, ""], strict=True))
            rows.append((name, kind, prod(map(len, box))))
    return rows


def _boxes(numbers: Sequence[tuple[str, ...]]) -> list[tuple[tuple[str, ...], ...]]:
    """Join points of a lattice into boxes, axis after axis from the last; each point is in exactly one."""
    boxes: list[tuple[tuple[str, ...], ...]] = [tuple((number,) for number in point) for point in numbers]
    for axis in reversed(range(len(numbers[0]))):
        joined: dict[tuple[tuple[str, ...], ...], list[str]] = {}
        for box in boxes:
            joined.setdefault((*box[:axis], *box[axis + 1 :]), []).extend(box[axis])
        boxes = [
            (*rest[:axis], tuple(sorted(values, key=lambda value: (int(value), value))), *rest[axis:])
            for rest, values in joined.items()
        ]
    return boxes


def _table(
    header: Sequence[str], rows: Iterable[Sequence[str]], width: int | None = None, *, below: int = 0
) -> list[str]:
    """Return the lines of a table, numbers to the right.

    Args:
        header: the titles; the first column is that of names.
        rows: the cells.
        width: how long lines may be, if not as long as they are: names are cut in the middle.
        below: so many columns, the last ones, go to a line of their own where the width does not suffice.
    """
    lines = [tuple(header), *map(tuple, rows)]
    sizes = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if width is None or sum(sizes) + 2 * len(sizes) - 2 <= width:
        return _columns(header, lines)
    kept = len(header) - below
    room = max(_LEAST_NAME, width - sum(sizes[1:kept]) - 2 * (kept - 1))
    above = _columns(header[:kept], [(_shortened(line[0], room), *line[1:kept]) for line in lines])
    return [
        text
        for line, first in zip(lines, above, strict=True)
        for text in (first, *(["    " + "  ".join(line[kept:])] if below else []))
    ]


def _shortened(name: str, room: int) -> str:
    """Cut a name in its middle.

    >>> _shortened("model.layers.{0-31}.attention.wq.weight", 24)
    'model.layer....wq.weight'
    """
    if len(name) <= room:
        return name
    tail = (room - 3) // 2
    return f"{name[: room - 3 - tail]}...{name[-tail:]}"


def _columns(header: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return [
        "  ".join(
            cell.rjust(width) if title in _RIGHT else cell.ljust(width)
            for cell, width, title in zip(line, widths, header, strict=True)
        ).rstrip()
        for line in lines
    ]


def list_text(found: Sequence[str]) -> str:
    """Return names, folded, the first few of many."""
    folded = [printable(name) for name, _, _ in fold((name, None) for name in found)]
    more = f" and {len(folded) - _MOST_NAMES:,} more" if len(folded) > _MOST_NAMES else ""
    return f"{count_text(len(found), 'name')}: {', '.join(folded[:_MOST_NAMES])}{more}"


# --- layouts and strategies -------------------------------------------------------------------------------------


def layout_text(layout: Layout) -> str:
    """Write a layout on one line: the numbers of the strategy file, and what they do to the tensor.

    >>> from reshard.layout import Layout
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

    >>> from reshard.layout import Layout
    >>> from reshard.strategy import Strategy
    >>> print(strategy_text(Strategy.of({f"h.{i}.w": Layout.of([2], [0, -1]) for i in range(4)}), "s.ckpt"))
    s.ckpt: 4 tensors over 2 ranks (0-1): 1 stage of 2 devices
    <BLANKLINE>
    [2] map [0, -1]: 2 x 1 blocks, each on 1 rank
      h.{0-3}.w  (4 tensors)
    <BLANKLINE>
    layout: [extents of the device axes] map [the axis that cuts each dimension: 0 is
    the last, -1 none] opt N: rows are cut once more for the optimizer, into N pieces
    or, with -1, into one for each rank that would hold the same
    """
    stages = count_text(len(strategy.stages), "stage")
    if strategy.stages.start:
        stages = f"stage {strategy.stages.start} of a longer pipeline,"
    lines = [
        (
            f"{printable(title)}: {count_text(len(strategy.tensors), 'tensor')} over "
            f"{count_text(len(strategy.ranks), 'rank')} ({ranges_text(strategy.ranks)}): "
            f"{stages} of {count_text(strategy.devices, 'device')}"
        )
    ]
    several = len(strategy.stages) > 1
    groups: dict[tuple[int, Layout], list[str]] = {}
    for stage in strategy.stages:
        for name, places in strategy.tensors.items():
            for placed in places:
                if placed.stage == stage:
                    groups.setdefault((stage, placed.layout), []).append(name)
    for (stage, layout), found in groups.items():
        lines += ["", f"stage {stage}: {layout_text(layout)}" if several else layout_text(layout)]
        for name, _, count in fold((name, None) for name in found):
            lines.append(f"  {printable(name)}" + (f"  ({count_text(count, 'tensor')})" if count > 1 else ""))
    return "\n".join([*lines, "", *LEGEND.splitlines()])


def strategy_data(strategy: Strategy) -> dict[str, object]:
    """Return a strategy for `--json`; a tensor has one item for each stage that holds it."""
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


# --- checkpoints ------------------------------------------------------------------------------------------------


def files_text(title: str, files: Sequence[SourceFile], ranks: Sequence[int]) -> str:
    """Write what files a checkpoint has, on one line."""
    formats = sorted({file.index.format for file in files})
    distinct = sorted(set(ranks))
    return (
        f"{printable(title)}: {count_text(len(files), 'file')} ({', '.join(formats)}), "
        f"{count_text(len(distinct), 'rank')} ({ranges_text(distinct)}), "
        f"{bytes_text(sum(file.nbytes for file in files))}"
    )


def checkpoint_text(checkpoint: Checkpoint, *, width: int | None = None) -> str:
    """Write a checkpoint as a table of its tensors, repeated layers folded, with sums.

    Args:
        checkpoint: what is shown.
        width: how many columns the terminal has; None for any number.
    """
    counted: dict[int, str] = {}
    rows = [
        (tensor.spec.name, _kind(checkpoint, tensor, _shards_text(tensor, counted)))
        for tensor in checkpoint.tensors.values()
    ]
    header = ("tensor", "count", "dtype", "shape", "bytes", "layout", "shards x replicas")
    table = [
        (
            printable(name),
            f"{count:,}",
            dtype,
            shape_text(shape),
            bytes_text(nbytes * count),
            layout,
            shards,
        )
        for name, (dtype, shape, nbytes, layout, shards), count in fold(rows)
    ]
    distinct = {id(file.index): file.index for file in checkpoint.files}  # ranks mostly share theirs
    sizes = {key: sum(entry.nbytes for entry in index.entries.values()) for key, index in distinct.items()}
    stored = sum(sizes[id(file.index)] for file in checkpoint.files)
    lines = [files_text(checkpoint.root, checkpoint.files, checkpoint.ranks), ""]
    lines += [*_table(header, table, width, below=2), ""]
    if checkpoint.strategy is not None:
        lines += [*LEGEND.splitlines(), ""]
    lines.append(
        f"{count_text(len(checkpoint), 'tensor')}, {bytes_text(checkpoint.nbytes)} in whole tensors, "
        f"{bytes_text(stored)} in the files with replicas"
    )
    for name, reason in checkpoint.unreadable.items():
        lines.append(f"not readable: {printable(name)}: {printable(reason)}")
    return "\n".join(lines)


def _kind(checkpoint: Checkpoint, tensor: Tensor, shards: str) -> tuple[str, Shape, int, str, str]:
    """Return what the row of a tensor says beside its name."""
    layouts = _layouts(checkpoint, tensor)
    if len(layouts) > 1:
        told = ", ".join(f"stage {stage}: {layout}" for stage, layout in layouts)
    else:
        told = str(layouts[0][1]) if layouts else "whole"
    if checkpoint.strategy is not None and len(checkpoint.strategy.stages) > 1 and len(layouts) == 1:
        told = f"stage {layouts[0][0]}: {told}"
    return tensor.spec.dtype.name, tensor.spec.shape, tensor.spec.nbytes, told, shards


def _layouts(checkpoint: Checkpoint, tensor: Tensor) -> list[tuple[int, Layout]]:
    """Return the layouts of a tensor by stage; none of one that no strategy names."""
    if checkpoint.strategy is None or not tensor.listed:
        return []
    return [(placed.stage, placed.layout) for placed in checkpoint.strategy.tensors.get(tensor.spec.name, ())]


def _shards_text(tensor: Tensor, known: dict[int, str]) -> str:
    """Write how many blocks and how many copies of each there are; tensors share their shards, so once for all."""
    key = id(tensor.shards)
    if key not in known:
        copies = sorted({len(shard.holders) for shard in tensor.shards} or {1})
        replicas = f"{copies[0]}" if len(copies) == 1 else f"{copies[0]}-{copies[-1]}"
        known[key] = f"{max(len(tensor.shards), 1)} x {replicas}"
    return known[key]


def checkpoint_data(checkpoint: Checkpoint) -> dict[str, object]:
    """Return a checkpoint for `--json`; nothing is folded there."""
    ranks = checkpoint.ranks
    holders: dict[int, list[dict[str, object]]] = {}
    return {
        **_files_data(checkpoint.root, checkpoint.files, ranks),
        "nbytes": checkpoint.nbytes,
        "notices": list(checkpoint.notices),
        "unreadable": dict(checkpoint.unreadable),
        "tensors": [
            {
                "name": tensor.spec.name,
                "dtype": tensor.spec.dtype.name,
                "shape": list(tensor.spec.shape),
                "nbytes": tensor.spec.nbytes,
                "layouts": [{"stage": stage, **layout_data(layout)} for stage, layout in _layouts(checkpoint, tensor)],
                "shards": _shards_data(tensor.shards, ranks, holders),
            }
            for tensor in checkpoint.tensors.values()
        ],
    }


def _shards_data(
    shards: tuple[Shard, ...], ranks: Sequence[int], known: dict[int, list[dict[str, object]]]
) -> list[dict[str, object]]:
    if id(shards) not in known:
        known[id(shards)] = [
            {
                "start": list(shard.block.start),
                "stop": list(shard.block.stop),
                "ranks": [ranks[number] for number in shard.holders],
            }
            for shard in shards
        ]
    return known[id(shards)]


def _files_data(title: str, files: Sequence[SourceFile], ranks: Sequence[int]) -> dict[str, object]:
    return {
        "source": title,
        "ranks": sorted(set(ranks)),
        "files": [
            {"rank": rank, "path": file.path, "format": file.index.format, "nbytes": file.nbytes}
            for file, rank in zip(files, ranks, strict=True)
        ],
    }


def rank_files_text(title: str, files: Sequence[SourceFile], ranks: Sequence[int], *, width: int | None = None) -> str:
    """Write what each rank's files hold, where no strategy tells the whole tensors; ranks that hold the same as one."""
    lines = [files_text(title, files, ranks)]
    for alike, entries in _ranks_alike(files, ranks):
        found = [(name, (entry.dtype.name, entry.shape, entry.nbytes)) for name, entry in entries.items()]
        total = sum(entry.nbytes for entry in entries.values())
        each = "each " if len(alike) > 1 else ""
        lines += [
            "",
            (
                f"{'ranks' if len(alike) > 1 else 'rank'} {ranges_text(alike)}: "
                f"{each}{count_text(len(entries), 'tensor')}, {bytes_text(total)}"
            ),
        ]
        table = [
            (printable(name), f"{count:,}", dtype, shape_text(shape), bytes_text(nbytes * count))
            for name, (dtype, shape, nbytes), count in fold(found)
        ]
        lines += _table(("tensor", "count", "dtype", "shape in the file", "bytes"), table, width)
    return "\n".join(lines)


def rank_files_data(title: str, files: Sequence[SourceFile], ranks: Sequence[int]) -> dict[str, object]:
    """Return what each rank's files hold, for `--json`."""
    return {
        **_files_data(title, files, ranks),
        "groups": [
            {
                "ranks": alike,
                "tensors": [
                    {
                        "name": name,
                        "dtype": entry.dtype.name,
                        "shape": list(entry.shape),
                        "nbytes": entry.nbytes,
                    }
                    for name, entry in entries.items()
                ],
            }
            for alike, entries in _ranks_alike(files, ranks)
        ],
    }


def _ranks_alike(files: Sequence[SourceFile], ranks: Sequence[int]) -> list[tuple[list[int], Mapping[str, Entry]]]:
    """Group ranks whose files hold tensors of equal names, dtypes and shapes, in order of the first of each group.

    Ranks mostly share their index (`source` sees to that), so each distinct one is looked through once.
    """
    by_rank: dict[int, list[SourceFile]] = {}
    for file, rank in zip(files, ranks, strict=True):
        by_rank.setdefault(rank, []).append(file)
    of_index: dict[tuple[int, ...], tuple[Hashable, Mapping[str, Entry]]] = {}
    groups: dict[Hashable, tuple[list[int], Mapping[str, Entry]]] = {}
    for rank, held in sorted(by_rank.items()):
        key = tuple(id(file.index) for file in held)
        if key not in of_index:
            entries: Mapping[str, Entry] = {name: entry for file in held for name, entry in file.index.entries.items()}
            contents = frozenset((name, entry.dtype, entry.shape) for name, entry in entries.items())
            of_index[key] = contents, entries
        contents_of_rank, entries = of_index[key]
        groups.setdefault(contents_of_rank, ([], entries))[0].append(rank)
    return list(groups.values())


# --- plans and reports ------------------------------------------------------------------------------------------


def plan_text(plan: Plan, directory: str) -> str:
    """Write what a plan would do."""
    stats = plan.stats
    rows = [
        ("from", files_text(plan.source.root, plan.source.files, plan.source.ranks)),
        (
            "to",
            (
                f"{printable(directory)}: {count_text(stats.target_files, 'file')} ({plan.format}), "
                f"{count_text(len(plan.ranks), 'rank')} ({ranges_text(plan.ranks)})"
            ),
        ),
        ("tensors", f"{stats.tensors:,}"),
        (
            "read",
            (
                f"{bytes_text(stats.bytes_read)} from {count_text(stats.source_files, 'file')}, "
                f"{stats.read_amplification:.2f} x what is needed"
            ),
        ),
        ("write", f"{bytes_text(stats.target_bytes)} to {count_text(stats.target_files, 'file')}"),
        ("tasks", f"{stats.tasks:,}"),
        ("memory", f"about {bytes_text(stats.peak_memory)} at the peak"),
        ("dropped", list_text(plan.dropped) if plan.dropped else "none"),
        ("missing", list_text(plan.missing) if plan.missing else "none"),
    ]
    for number, file in enumerate(plan.files[:_MOST_FILES]):
        path = printable(f"{Path(directory) / file.path}")
        rows.append(("" if number else "files", f"{path}  {bytes_text(file.layout.size)}"))
    if len(plan.files) > _MOST_FILES:
        rows.append(("", f"and {len(plan.files) - _MOST_FILES:,} more"))
    return "\n".join(f"{title:<8} {text}" for title, text in rows)


def plan_data(plan: Plan, directory: str, report: Report | None = None) -> dict[str, object]:
    """Return a plan, and what came of it, for `--json`: the same keys before a run (`seconds` is null) and after."""
    stats = asdict(plan.stats)
    if report is not None:
        stats["bytes_read"] = report.bytes_read
    return {
        "dry_run": report is None,
        "source": plan.source.root,
        "target": directory,
        "format": plan.format,
        "ranks": list(plan.ranks),
        **stats,
        "read_amplification": plan.stats.read_amplification,
        "seconds": None if report is None else report.seconds,
        "dropped": list(plan.dropped),
        "missing": list(plan.missing),
        "notices": list(plan.notices),
        "files": [{"rank": file.rank, "path": file.path, "nbytes": file.layout.size} for file in plan.files],
    }
