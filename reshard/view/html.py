"""HTML pages of checkpoints, strategies, layouts, plans, reports and verifications, for notebooks.

The size of a page is bounded: layers are folded, long lists are cut with a count of the rest, and pictures are drawn
coarser.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from math import prod
from typing import TYPE_CHECKING, Any

from reshard.errors import PYTHON, LayoutError, bytes_text, spelled
from reshard.layout.block import shape_text
from reshard.strategy.names import group_members, group_names, ranges_text
from reshard.view import words
from reshard.view.blocks import checkpoint_picture, layout_picture, strategy_picture, thumbnail, tiny
from reshard.view.computed.diff_view import diff_html
from reshard.view.computed.stats_view import stats_html
from reshard.view.flow import fusion_picture, plan_picture
from reshard.view.runs.task_stream import task_stream, tasks_section
from reshard.view.svg import (
    MOST_ITEMS,
    Markup,
    and_more,
    colour,
    details,
    heading,
    join,
    listing,
    note,
    page,
    section,
    table,
    tag,
    tiles,
    warnings_listed,
)
from reshard.view.tables import group_rows, objects_of
from reshard.view.text import changed_text, count_text
from reshard.view.verdict import below, conclusion

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from reshard.layout.block import Shape
    from reshard.layout.layout import Layout
    from reshard.plan.plan import Plan, Transfer
    from reshard.rules.show import Fusion
    from reshard.run.graph import Graph
    from reshard.run.settings import Report
    from reshard.source.checkpoint import Checkpoint, SourceFile, Tensor
    from reshard.strategy.strategy import Strategy
    from reshard.targets.destination import TargetFile
    from reshard.verify.difference import Difference
    from reshard.verify.verification import Verification
    from reshard.view.svg import Picture
    from reshard.view.tables import Groups


_MOST_ROWS, _MOST_GROUPS = 240, 32
_PARTS = re.compile(r"\.(?![^{}]*\})")  # dots outside braces: `{0,2,4,...}` has dots, too


# --- checkpoints ------------------------------------------------------------------------------------------------


def checkpoint_html(checkpoint: Checkpoint) -> str:
    """Show a checkpoint: sizes, dtypes, the tree of its tensors, its files and its problems."""
    ranks = sorted(set(checkpoint.ranks))
    files = checkpoint.stored_files
    formats = ", ".join(sorted({file.index.format for _, file in files}))
    stored = bytes_text(sum(file.nbytes for _, file in files))

    def file_row(item: tuple[int, SourceFile]) -> Sequence[str]:
        rank, file = item
        return f"{rank}", file.path, file.index.format, f"{len(file.index.entries):,}", bytes_text(file.nbytes)

    strategy, left_out = checkpoint.strategy, len(checkpoint.left_out)
    if strategy:
        stages = ("stages", f"{len(strategy.stages)}", "")
    else:
        stages = ("stages", "1", "layouts of its own" if checkpoint.extras.has_layouts else "no strategy")
    parts = [
        heading("Checkpoint", checkpoint.title),
        tiles(
            ("tensors", f"{len(checkpoint.tensors):,}", f"{left_out:,} left out" if left_out else ""),
            ("whole tensors", bytes_text(checkpoint.nbytes), "replicas once"),
            ("files", f"{len(files):,}", f"{formats}, {stored}"),
            ("ranks", f"{len(ranks):,}", ranges_text(ranks)),
            stages,
        ),
        _dtypes(checkpoint),
        details("Tensors", _tree(checkpoint), opened=True),
        section(
            "Files",
            ("rank", "file", "format", "tensors", "bytes"),
            files,
            file_row,
            "file",
        ),
    ]
    facts, objects = objects_of(checkpoint)
    by_title = {
        "Not readable": checkpoint.unreadable,
        "Bound": checkpoint.extras.bound,
        "Megatron": {word: str(fact) for word, fact in facts.items()},
        "Not tensors": objects,
    }
    parts += [
        section(title, ("tensor", "reason"), list(by_name.items()), tuple, "tensor", opened=True)
        for title, by_name in by_title.items()
        if by_name
    ]
    return page(*parts, *warnings_listed(checkpoint.warnings))


def _dtypes(checkpoint: Checkpoint) -> Markup:
    """Show the shares of dtypes in the bytes, as a bar with a legend."""
    nbytes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        nbytes[tensor.spec.dtype.name] += tensor.spec.nbytes
        counts[tensor.spec.dtype.name] += 1
    total = sum(nbytes.values()) or 1
    bar, legend = [], []
    for number, (name, size) in enumerate(nbytes.most_common()):
        fill = colour(number, len(nbytes))[0]
        text = tag("span", f"{count_text(counts[name], 'tensor')}, {bytes_text(size)}", class_="more")
        bar.append(tag("span", style=f"background:{fill};width:{100 * size / total:.3f}%"))
        legend.append(tag("span", tag("i", style=f"background:{fill}"), f"{name} ", text))
    return join([tag("div", *bar, class_="bar"), tag("div", *legend, class_="legend")])


@dataclass(slots=True)
class _Branch:
    """A node of the tree of names, with its child nodes and its tensors."""

    below: dict[str, _Branch] = field(default_factory=dict)
    tensors: list[tuple[str, list[Tensor]]] = field(default_factory=list)
    count: int = 0
    nbytes: int = 0


def _tree(checkpoint: Checkpoint) -> Markup:
    """Show the tensors as a tree of the parts of their names, repeated layers folded."""
    rows = group_members((name, _row_key(checkpoint, tensor)) for name, tensor in checkpoint.tensors.items())
    root = _Branch()
    for name, _, members in rows[:_MOST_ROWS]:
        tensors = [checkpoint.tensors[member] for member in members]
        *parents, last = _PARTS.split(name)
        branch = root
        for part in parents:
            branch = branch.below.setdefault(part, _Branch())
            branch.count += len(tensors)
            branch.nbytes += sum(tensor.spec.nbytes for tensor in tensors)
        branch.tensors.append((last, tensors))
    lines = _branch(checkpoint, root, 0, opened=len(rows) <= 40)
    titles = [("name", "name"), ("dtype", ""), ("shape", ""), ("size", "size"), ("layout", "")]
    head = tag("div", *(tag("span", title, class_=kind) for title, kind in titles), class_="row top")
    tree = [tag("div", head, *lines, class_="tree")]
    if rest := sum(len(members) for _, _, members in rows[_MOST_ROWS:]):
        tree.append(
            note(f"and {count_text(rest, 'more tensor')}: look at some with .sel(glob), or at .groups('prefix')")
        )
    return join(tree)


def _branch(checkpoint: Checkpoint, branch: _Branch, depth: int, *, opened: bool) -> list[Markup]:
    """Return the lines below a branch; a part with a single child shares its line."""
    lines = []
    for first, child in branch.below.items():
        name, node = first, child
        while len(node.below) == 1 and not node.tensors:
            ((part, node),) = node.below.items()
            name += f".{part}"
        if not node.below and len(node.tensors) == 1:
            ((part, tensors),) = node.tensors
            lines.append(_leaf(checkpoint, f"{name}.{part}", tensors, depth))
            continue
        summary = tag(
            "summary",
            tag("span", name, tag("span", f"  {count_text(node.count, 'tensor')}", class_="count"), class_="name"),
            tag("span"), tag("span"),
            tag("span", bytes_text(node.nbytes), class_="size"),
            class_="row", style=f"--depth:{depth}",
        )  # fmt: skip
        inside = _branch(checkpoint, node, depth + 1, opened=opened)
        attributes = {"open": "open"} if opened or (depth == 0 and len(branch.below) <= 4) else {}
        lines.append(tag("details", summary, *inside, class_="branch", **attributes))
    return lines + [_leaf(checkpoint, name, tensors, depth) for name, tensors in branch.tensors]


def _row_key(checkpoint: Checkpoint, tensor: Tensor) -> Hashable:
    """Return the properties that tensors of one row share; their stages may differ."""
    layouts = tuple(layout for _, layout in words.layouts_of(checkpoint, tensor))
    return tensor.spec.dtype, tensor.spec.shape, tensor.text is None, layouts, words.shard_counts(tensor.sharding)


def _leaf(checkpoint: Checkpoint, name: str, tensors: Sequence[Tensor], depth: int) -> Markup:
    tensor, count = tensors[0], len(tensors)
    cut = words.cut_words(checkpoint, tensor)
    layouts = words.layouts_of(checkpoint, tensor)
    counts = " x ".join(words.shard_counts(tensor.sharding))
    rule = f"{words.layouts_text(checkpoint, tensors)}; {counts} blocks x copies in the files"
    drawn = [tiny(layouts[0][1] if layouts else None, checkpoint, tensor)] if cut != "whole" else []
    shape = words.extents_text(tensor) if tensor.text is None else "text"
    times = [tag("span", f"  x {count:,}", class_="count")] if count > 1 else []
    return tag(
        "div",
        tag("span", name, *times, class_="name", title=tensor.spec.name),
        tag("span", tensor.spec.dtype.name),
        tag("span", shape, title=shape),
        tag("span", bytes_text(tensor.spec.nbytes * count), class_="size"),
        tag("span", *(tag("span", each, class_="tiny") for each in drawn), cut, title=rule),
        class_="row leaf", style=f"--depth:{depth}",
    )  # fmt: skip


def groups_html(groups: Groups) -> str:
    """Show sizes, counts and dtypes by group."""
    return page(
        heading("Groups", groups.checkpoint.title, f"by {groups.by}", bytes_text(sum(groups.sizes.values()))),
        table(("group", "tensors", "bytes", "dtype"), group_rows(groups)[:_MOST_ROWS]),
        *and_more(len(groups), _MOST_ROWS, "group"),
    )


def layout_html(layout: Layout) -> str:
    """Show a picture of a layout, or the reason why it is invalid."""
    try:
        picture = layout_picture(layout)
    except LayoutError as error:
        return page(heading("Layout", str(layout)), note(f"not possible: {error.message}"))
    return page(heading("Layout", ""), picture.html())


def strategy_html(strategy: Strategy) -> str:
    """Show a strategy: devices, stages and the tensors of each layout."""
    groups = words.groups_of(strategy)
    several = len(strategy.stages) > 1
    parts = []
    for (stage, layout), members in islice(groups.items(), _MOST_GROUPS):
        folded = [name for name, _, _ in group_names((name, None) for name in members)]
        spans = [tag("span", name) for name in folded[:MOST_ITEMS]]
        rest = f" and {len(folded) - MOST_ITEMS:,} more" if len(folded) > MOST_ITEMS else ""
        title = f"stage {stage} · " if several else ""
        rule = tag("span", words.raw_text(layout), class_="rule more")
        facts = tag(
            "div",
            tag("div", tag("b", words.layout_words(layout)), " ", rule),
            tag("div", f"{title}{count_text(len(members), 'tensor')}", class_="more"),
            tag("div", Markup(", ".join(spans)), rest, class_="names"),
        )
        parts.append(tag("div", tag("div", thumbnail(layout), class_="thumb"), facts, class_="group"))
    stages = f"{strategy.stages.start} to {strategy.stages.stop - 1}" if several else f"stage {strategy.stages.start}"
    return page(
        heading("Strategy", "", "merged" if strategy.merged else ""),
        tiles(
            ("tensors", f"{len(strategy.tensors):,}", ""),
            ("ranks", f"{len(strategy.ranks):,}", ranges_text(strategy.ranks)),
            ("stages", f"{len(strategy.stages)}", stages),
            ("devices in a stage", f"{strategy.devices:,}", ""),
            ("layouts", f"{len(groups):,}", "equal ones together"),
        ),
        details("Layouts", *parts, *and_more(len(groups), _MOST_GROUPS, "layout"), opened=True),
        note(words.LEGEND.replace("\n", " ")),
    )


# --- plans, reports, verifications, graphs ----------------------------------------------------------------------


def plan_html(plan: Plan) -> str:
    """Show a plan: its costs, the flow of its bytes, and dropped and missing tensors."""
    stats = plan.stats
    written = f"{count_text(stats.target_files, 'file')}, {ranges_text(plan.ranks)}"
    read = f"{count_text(stats.source_files, 'file')}, {stats.read_amplification:.2f} x needed"
    changed = changed_text(plan)

    def file_row(file: TargetFile) -> Sequence[str]:
        link = f"link to {file.link}" if file.link else ""
        return f"{file.rank}", file.path, bytes_text(plan.size_of(file)), link

    return page(
        heading("Plan", plan.source.title, f"to {count_text(stats.target_files, f'{plan.format} file')}"),
        tiles(
            ("tensors", f"{stats.tensors:,}", ""),
            ("read", bytes_text(stats.bytes_read), read),
            ("write", bytes_text(stats.target_bytes), written),
            ("tasks", f"{stats.tasks:,}", f"bands of up to {bytes_text(plan.band_bytes)}"),
            ("memory", bytes_text(stats.peak_memory), f"at the peak, {count_text(plan.threads, 'thread')}"),
        ),
        *([note(f"changed: {changed}")] if changed else []),
        details("What goes where", plan_picture(plan).html(), opened=True),
        details("Tensors", *_transfers(plan), more=f"{stats.tensors:,}"),
        section("Target files", ("rank", "file", "bytes", ""), plan.files, file_row, "file"),
        *_dropped_and_missing(plan),
        *warnings_listed(plan.warnings),
    )


def _dropped_and_missing(subject: Plan | Report) -> list[Markup]:
    return [
        listing("Dropped", subject.dropped, "in the source, not in the target"),
        listing("Missing", subject.missing, "in the target, not in the source"),
    ]


def _transfers(plan: Plan) -> list[Markup]:
    """Return a table of the transfers, and the number of rows that are not shown."""

    def row(transfer: Transfer) -> tuple[str, Shape, int, str, str]:
        recipe, dtype, target_dtype = transfer.recipe, transfer.dtype, transfer.target_dtype
        dtypes = f"{dtype}" if dtype == target_dtype else f"{dtype} → {target_dtype}"
        blocks = f"{len(recipe.sources):,} → {len(recipe.targets):,}"
        files = len({at.file for copies in transfer.route.writes for at in copies})
        return dtypes, recipe.shape, prod(recipe.shape) * dtype.itemsize, blocks, f"{files:,}"

    folded = group_names((transfer.name, row(transfer)) for transfer in plan.transfers)
    rows = (
        (name, f"{count:,}", dtype, shape_text(shape), bytes_text(nbytes * count), blocks, files)
        for name, (dtype, shape, nbytes, blocks, files), count in folded[:_MOST_ROWS]
    )
    header = ("tensor", "count", "dtype", "shape", "bytes", "blocks", "in files")
    return [table(header, rows), *and_more(len(folded), _MOST_ROWS, "row")]


def report_html(report: Report) -> str:
    """Show the results of a run."""
    rate = report.bytes_written / report.seconds if report.seconds else 0
    target = count_text(len(report.files), "file")
    if report.links:
        target += f", {count_text(report.links, 'link')}"
    if report.resumed:
        target += f", {bytes_text(report.resumed)} before"
    return page(
        heading("Report", report.directory),
        tiles(
            ("tensors", f"{report.tensors:,}", f"{count_text(report.replicas, 'replica')} of blocks"),
            ("read", bytes_text(report.bytes_read), count_text(report.source_files, "file")),
            ("written", bytes_text(report.bytes_written), target),
            ("time", f"{report.seconds:.2f} s", f"{bytes_text(rate)}/s"),
            ("memory", bytes_text(report.peak_memory), f"at the peak; {bytes_text(report.predicted_memory)} predicted"),
        ),
        section("Files", ("file",), report.files, lambda path: (path,), "file"),
        tasks_section(report),
        *_dropped_and_missing(report),
    )


def verification_html(verification: Verification) -> str:
    """Show the scope and the differences of a verification."""
    target, against, seconds = verification.target, verification.against, verification.seconds
    count = len(verification.differences)
    both = against is not None and bool(verification.ranks)
    rate = bytes_text(verification.bytes_read / seconds) + "/s" if seconds and verification.bytes_read else ""
    sampled = verification.sample is not None
    sample = f"a sample of {bytes_text(verification.total_bytes)}" if sampled else "of both sides"
    blocks = f"{count_text(verification.copies, 'block')} {'compared' if both else 'in files'}"
    ranks = f"ranks {ranges_text(verification.ranks)}" if verification.ranks else ""
    parts = [
        heading("Verification", target, conclusion(verification)),
        tiles(
            ("differences", f"{count:,}" if count else "none", ""),
            ("tensors", f"{verification.tensors:,}", blocks),
            ("files", f"{verification.files:,}", ranks),
            ("read", bytes_text(verification.bytes_read), sample if both else ""),
            ("time", f"{seconds:.2f} s", rate),
        ),
    ]

    def row(difference: Difference) -> Sequence[str]:
        return (
            difference.name or below(difference.path or "", target),
            spelled(difference.text, PYTHON),
            "" if difference.index is None else shape_text(difference.index),
            difference.side if difference.rank is None else f"{difference.side}, rank {difference.rank}",
            below(difference.path or "", against if difference.side == "source" else target),
        )

    if count:
        header = ("tensor or file", "difference", "first at", "where", "file")
        parts.append(
            section("Differences", header, verification.differences, row, "difference", wrap="difference", opened=True)
        )
    absent = (
        ("Dropped", verification.dropped, "in the source, not in the target"),
        ("Left out", verification.left_out, "in the target, and not asked for"),
    )
    parts += [listing(title, tensors, meaning) for title, tensors, meaning in absent if tensors]
    unchecked = f"not looked at: {'; '.join(verification.unchecked)}" if verification.unchecked else ""
    parts += [note(text) for text in (verification.note, unchecked) if text]
    return page(*parts, *warnings_listed(verification.warnings))


def graph_html(graph: Graph) -> str:
    """Show a graph: its tasks by kind and the flow of its bytes."""
    kinds = graph.kinds()
    return page(
        heading("Graph", graph.directory, f"writes {count_text(len(graph.plan.files), 'file')} when it is computed"),
        table(("task", "count"), [(kind, f"{count:,}") for kind, count in kinds.items()]),
        details("What goes where", plan_picture(graph.plan).html()),
    )


def fusion_html(fusion: Fusion) -> str:
    """Show the parts of a fused tensor."""
    return page(heading("Rule", fusion.name, fusion.verb), fusion_picture(fusion).html(), tag("pre", str(fusion)))


_HTML: dict[str, Callable[[Any], str]] = {
    "Checkpoint": checkpoint_html,
    "CheckpointDiff": diff_html,
    "CheckpointStats": stats_html,
    "Fusion": fusion_html,
    "Graph": graph_html,
    "Groups": groups_html,
    "Layout": layout_html,
    "Plan": plan_html,
    "Report": report_html,
    "Strategy": strategy_html,
    "Verification": verification_html,
}
_PICTURES: dict[str, Callable[..., Picture]] = {
    "Checkpoint": checkpoint_picture,
    "Layout": layout_picture,
    "Plan": plan_picture,
    "Report": task_stream,
    "Strategy": strategy_picture,
}


def html(subject: object) -> str:
    """Return the page that a notebook shows for an object."""
    return _HTML[type(subject).__name__](subject)


def picture(subject: object, *arguments: object) -> Picture:
    """Return the picture of a checkpoint's tensor, a layout, a plan, a report or a strategy."""
    return _PICTURES[type(subject).__name__](subject, *arguments)
