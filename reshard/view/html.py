"""HTML pages of checkpoints, strategies, layouts, plans, reports and verifications, for notebooks.

The size of a page is bounded: layers are folded, long lists are cut with a count of the rest, and pictures are drawn
coarser.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from reshard.core.layout.block import shape_text
from reshard.errors import PYTHON, LayoutError, bytes_text, spelled
from reshard.strategy.names import group_members
from reshard.view import words
from reshard.view.computed.diff_view import diff_html
from reshard.view.computed.stats_view import stats_html, values_html
from reshard.view.cuts.fused import fusion_html
from reshard.view.cuts.strategy_view import strategy_diff_html, strategy_html
from reshard.view.cuts.tensor_tree import MOST_ROWS, dtypes_bar, tree
from reshard.view.cuts.thumbnails import Thumbnails
from reshard.view.flow import plan_picture
from reshard.view.pens import checkpoint_picture, layout_picture, strategy_picture
from reshard.view.runs.task_stream import task_stream, tasks_section
from reshard.view.svg import (
    Markup,
    and_more,
    details,
    heading,
    join,
    listing,
    note,
    page,
    ranks_label,
    ranks_range,
    searched,
    section,
    table,
    tag,
    tiles,
    warnings_listed,
)
from reshard.view.tables import checkpoint_text, group_rows, objects_of
from reshard.view.text import changed_text, count_text
from reshard.view.verdict import below, conclusion

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from reshard.core.layout.block import Shape
    from reshard.core.layout.layout import Layout
    from reshard.core.model.checkpoint import Checkpoint, SourceFile
    from reshard.core.plan.plan import Plan, Transfer
    from reshard.core.run.graph import Graph
    from reshard.core.run.settings import Report
    from reshard.core.target import TargetFile
    from reshard.core.verify.difference import Difference
    from reshard.core.verify.verification import Verification
    from reshard.view.svg import Picture
    from reshard.view.tables import Groups


# --- checkpoints ------------------------------------------------------------------------------------------------


def checkpoint_html(checkpoint: Checkpoint) -> str:
    """Show a checkpoint: sizes, dtypes, the tree of its tensors, its files and its problems."""
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
            _ranks_tile(checkpoint),
            stages,
        ),
        dtypes_bar(checkpoint),
        details("Tensors", tree(checkpoint), opened=True),
        section(
            "Files",
            ("rank", "file", "format", "tensors", "bytes"),
            files,
            file_row,
            "file",
            wrap="file",
        ),
    ]
    facts, objects = objects_of(checkpoint)
    sections = (
        ("Not readable", ("tensor", "reason"), checkpoint.unreadable, "tensor"),
        ("Bound", ("tensor", "reason"), checkpoint.extras.bound, "tensor"),
        ("Training", ("name", "value"), {word: str(fact) for word, fact in facts.items()}, "value"),
        ("Not tensors", ("name", "what it is"), objects, "object"),
    )
    parts += [
        section(title, header, list(by_name.items()), tuple, noun, opened=True, wrap=header[1])
        for title, header, by_name, noun in sections
        if by_name
    ]
    return page(
        *parts, *warnings_listed(checkpoint.warnings), text=checkpoint_text(checkpoint, described=(facts, objects))
    )


def _ranks_tile(checkpoint: Checkpoint) -> tuple[str, str, str]:
    """Return the ranks of the files, or the devices of the training if its files are of no rank."""
    arrangement, ranks = checkpoint.extras.arrangement, sorted(set(checkpoint.ranks))
    if arrangement and ranks == [0] and len(arrangement.ranks) > 1:
        return "devices", f"{len(arrangement.ranks):,}", "of the training; files are of no rank"
    if checkpoint.opening.computation:
        return "ranks", "none", "computed"
    return "ranks", f"{len(ranks):,}", ranks_range(ranks)


def groups_html(groups: Groups) -> str:
    """Show sizes, counts and dtypes by group."""
    header, rows = ("group", "tensors", "bytes", "dtype"), group_rows(groups)
    shown = table(header, rows[:MOST_ROWS])
    return page(
        heading("Groups", groups.checkpoint.title, f"by {groups.by}", bytes_text(sum(groups.sizes.values()))),
        searched([shown, *and_more(len(groups), MOST_ROWS, "group")], header, rows),
        text=str(groups),
    )


def layout_html(layout: Layout) -> str:
    """Show a picture of a layout, or the reason why it is invalid."""
    try:
        picture = layout_picture(layout)
    except LayoutError as error:
        return page(heading("Layout", str(layout)), note(f"not possible: {error.message}"), text=str(layout))
    return page(heading("Layout", ""), picture.html(), text=f"{layout}: {words.layout_words(layout)}")


# --- plans, reports, verifications, graphs ----------------------------------------------------------------------


def plan_html(plan: Plan) -> str:
    """Show a plan: its costs, the flow of its bytes, and dropped and missing tensors."""
    stats = plan.stats
    ranks = f", {ranks_label(plan.ranks)}" if any(plan.ranks) else ""
    written = f"{count_text(stats.target_files, 'file')}{ranks}"
    read = f"{count_text(stats.source_files, 'file')}, {stats.read_amplification:.2f} x needed"
    changed = changed_text(plan)
    left_out = [*plan.left_out, *sorted(plan.source.left_out)]

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
        section("Target files", ("rank", "file", "bytes", ""), plan.files, file_row, "file", wrap="file"),
        *([listing("Left out", left_out, "not chosen")] if left_out else []),
        *_dropped_and_missing(plan),
        *warnings_listed(plan.warnings),
        text=repr(plan),
    )


def _dropped_and_missing(subject: Plan | Report) -> list[Markup]:
    return [
        listing("Dropped", subject.dropped, "in the source, not in the target"),
        listing("Missing", subject.missing, "in the target, not in the source"),
    ]


def _transfers(plan: Plan) -> list[Markup]:
    """Return a table of the transfers, with their cuts, and the number of rows that are not shown."""
    source, thumbnails = plan.source, Thumbnails()

    def row(transfer: Transfer) -> tuple[str, Shape, int, str, str]:
        recipe, dtype, target_dtype = transfer.recipe, transfer.dtype, transfer.target_dtype
        dtypes = f"{dtype}" if dtype == target_dtype else f"{dtype} → {target_dtype}"
        blocks = f"{len(recipe.sources):,} → {len(recipe.targets):,}"
        files = len({at.file for copies in transfer.route.writes for at in copies})
        return dtypes, recipe.shape, prod(recipe.shape) * dtype.itemsize, blocks, f"{files:,}"

    def cut(transfer: Transfer) -> Markup:
        tensor = source.tensors[transfer.source_name]
        read = thumbnails.of_tensor(source, tensor, words.cut_words(source, tensor))
        return join([read, tag("span", "→", class_="to"), thumbnails.of_target(plan, transfer.route)])

    keys = [row(transfer) for transfer in plan.transfers]
    first: dict[tuple[str, Hashable], Transfer] = {}
    for transfer, key in zip(plan.transfers, keys, strict=True):
        first.setdefault((transfer.name, key), transfer)
    folded = group_members((transfer.name, key) for transfer, key in zip(plan.transfers, keys, strict=True))
    rows = [
        (name, f"{len(members):,}", key[0], shape_text(key[1]), bytes_text(key[2] * len(members)),
         cut(first[members[0], key]), *key[3:])
        for name, key, members in folded[:MOST_ROWS]
    ]  # fmt: skip
    header = ("tensor", "count", "dtype", "shape", "bytes", "cut", "blocks", "in files")
    shown = [table(header, rows), *and_more(len(folded), MOST_ROWS, "row")]
    single = [
        (transfer.name, key[0], shape_text(key[1]), bytes_text(key[2]), *key[3:])
        for transfer, key in zip(plan.transfers, keys, strict=True)
    ]
    titles = ("tensor", "dtype", "shape", "bytes", "blocks", "in files")
    return [thumbnails.symbols(), searched(shown, titles, single, code=[".picture(NAME)"])]


def report_html(report: Report) -> str:
    """Show the results of a run."""
    rate = report.bytes_written / report.seconds if report.seconds else 0
    whole = not (report.resumed or report.finished)
    target = count_text(len(report.files), "file")
    if report.links:
        target += f", {count_text(report.links, 'link')}"
    if report.resumed:
        target += f", {bytes_text(report.resumed)} before"
    predicted = f"at the peak; {bytes_text(report.predicted_memory)} predicted"
    measured = bytes_text(report.peak_memory) if report.peak_memory else "not measured"
    return page(
        heading("Report", report.directory),
        tiles(
            ("tensors", f"{report.tensors:,}", f"{count_text(report.replicas, 'replica')} of blocks"),
            ("read", bytes_text(report.bytes_read), count_text(report.source_files, "file")),
            ("written", bytes_text(report.target_bytes if whole else report.bytes_written), target),
            ("time", f"{report.seconds:.2f} s", f"{bytes_text(rate)}/s"),
            ("memory", measured, predicted),
        ),
        note(f"ran on {report.ran_on}"),
        section("Files", ("file",), report.files, lambda path: (path,), "file"),
        tasks_section(report),
        *_dropped_and_missing(report),
        *warnings_listed(report.warnings),
        text=repr(report),
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
    ranks = ranks_label(verification.ranks) if verification.ranks else ""
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
    return page(*parts, *warnings_listed(verification.warnings), text=repr(verification))


def graph_html(graph: Graph) -> str:
    """Show a graph: its tasks by kind and the flow of its bytes."""
    kinds = graph.kinds()
    return page(
        heading("Graph", graph.directory, f"writes {count_text(len(graph.plan.files), 'file')} when it is computed"),
        table(("task", "count"), [(kind, f"{count:,}") for kind, count in kinds.items()]),
        details("What goes where", plan_picture(graph.plan).html()),
        text=repr(graph),
    )


_HTML: dict[str, Callable[[Any], str]] = {
    "Checkpoint": checkpoint_html,
    "CheckpointDiff": diff_html,
    "CheckpointStats": stats_html,
    "Diff": strategy_diff_html,
    "Fusion": fusion_html,
    "Graph": graph_html,
    "Groups": groups_html,
    "Layout": layout_html,
    "Plan": plan_html,
    "Report": report_html,
    "Strategy": strategy_html,
    "ValueStats": values_html,
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
