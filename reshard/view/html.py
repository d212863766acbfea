"""What a notebook shows of checkpoints, strategies, layouts, plans, reports and verifications: their `_repr_html_`.

However large a thing is, its page stays small: layers are folded, long lists end with how many more there are, and
pictures are drawn coarser.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from reshard.errors import PYTHON, LayoutError, bytes_text, spelled
from reshard.layout.block import shape_text
from reshard.strategy.names import group_members, group_names, ranges_text
from reshard.view.blocks import checkpoint_picture, fusion_picture, layout_picture, strategy_picture, thumbnail, tiny
from reshard.view.flow import plan_picture
from reshard.view.svg import (
    MOST_NAMES,
    Markup,
    and_more,
    colour,
    details,
    heading,
    join,
    listing,
    note,
    page,
    reasons,
    table,
    tag,
    tiles,
    warnings_listed,
)
from reshard.view.tables import extents_text, layouts_text, objects_of
from reshard.view.text import LEGEND, below, changed_text, conclusion, count_text, groups_of, raw_text, shards_text
from reshard.view.words import cut_words, layout_words, layouts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from reshard.layout.layout import Layout
    from reshard.plan.plan import Plan
    from reshard.rules.show import Fusion
    from reshard.run.graph import Graph
    from reshard.run.run import Report
    from reshard.run.tasks import Receipt
    from reshard.source.checkpoint import Checkpoint, Sharding, SourceFile, Tensor
    from reshard.strategy.strategy import Strategy
    from reshard.verify.verify import Verification
    from reshard.view.svg import Picture
    from reshard.view.tables import Groups


_MOST_ROWS = 240
_MOST_FILES = 24
_MOST_GROUPS = 32
_PARTS = re.compile(r"\.(?![^{}]*\})")  # dots, but for those of `{0,2,4,...}`


# --- checkpoints ------------------------------------------------------------------------------------------------


def checkpoint_html(checkpoint: Checkpoint) -> str:
    """Show a checkpoint: sizes, dtypes, the tree of its tensors, its files, and what was noticed."""
    ranks = sorted(set(checkpoint.ranks))
    formats = ", ".join(sorted({file.index.format for file in checkpoint.files}))
    strategy = checkpoint.strategy
    own = "layouts of its own" if checkpoint.extras.has_layouts else "no strategy"
    left_out = len(checkpoint.left_out)
    parts = [
        heading("Checkpoint", checkpoint.root),
        tiles(
            ("tensors", f"{len(checkpoint.tensors):,}", f"{left_out:,} left out" if left_out else ""),
            ("whole tensors", bytes_text(checkpoint.nbytes), "replicas once"),
            (
                "files",
                f"{len(checkpoint.files):,}",
                f"{formats}, {bytes_text(sum(f.nbytes for f in checkpoint.files))}",
            ),
            ("ranks", f"{len(ranks):,}", ranges_text(ranks)),
            ("stages", f"{len(strategy.stages)}" if strategy else "1", "" if strategy else own),
        ),
        _dtypes(checkpoint),
        details("Tensors", _tree(checkpoint), opened=True),
        details("Files", _files(checkpoint.files, checkpoint.ranks), more=f"{len(checkpoint.files):,}"),
    ]
    if checkpoint.unreadable:
        parts.append(reasons("Not readable", checkpoint.unreadable.items()))
    if checkpoint.extras.bound:
        parts.append(reasons("Bound", checkpoint.extras.bound.items()))
    facts, shown = objects_of(checkpoint)
    if facts:
        parts.append(reasons("Megatron", ((word, str(fact)) for word, fact in facts.items())))
    if shown:
        parts.append(reasons("Not tensors", shown.items()))
    return page(*parts, *warnings_listed(checkpoint.warnings))


def _dtypes(checkpoint: Checkpoint) -> Markup:
    """Show how the bytes are shared out over the dtypes, as a bar and its legend."""
    nbytes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        nbytes[tensor.spec.dtype.name] += tensor.spec.nbytes
        counts[tensor.spec.dtype.name] += 1
    total = sum(nbytes.values()) or 1
    order = [name for name, _ in nbytes.most_common()]
    fills = [colour(number, len(order))[0] for number in range(len(order))]
    bar = [
        tag("span", style=f"background:{fill};width:{100 * nbytes[name] / total:.3f}%")
        for name, fill in zip(order, fills, strict=True)
    ]
    legend = [
        tag(
            "span",
            tag("i", style=f"background:{fill}"),
            f"{name} ",
            tag("span", f"{count_text(counts[name], 'tensor')}, {bytes_text(nbytes[name])}", class_="more"),
        )
        for name, fill in zip(order, fills, strict=True)
    ]
    return join([tag("div", *bar, class_="bar"), tag("div", *legend, class_="legend")])


@dataclass(slots=True)
class _Branch:
    """A part of names with what is below it."""

    below: dict[str, _Branch] = field(default_factory=dict)
    tensors: list[tuple[str, list[Tensor]]] = field(default_factory=list)
    count: int = 0
    nbytes: int = 0


def _tree(checkpoint: Checkpoint) -> Markup:
    """Show the tensors by the parts of their names, folded layers as one."""
    known: dict[Sharding, str] = {}
    rows = group_members((name, _said(checkpoint, tensor, known)) for name, tensor in checkpoint.tensors.items())
    root = _Branch()
    for name, _, members in rows[:_MOST_ROWS]:
        *parents, last = _PARTS.split(name)
        branch = root
        for part in parents:
            branch = branch.below.setdefault(part, _Branch())
        branch.tensors.append((last, [checkpoint.tensors[member] for member in members]))
    _add_up(root)
    lines = _branch(checkpoint, root, 0, known, opened=len(rows) <= 40)
    titles = [("name", "name"), ("dtype", ""), ("shape", ""), ("size", "size"), ("layout", "")]
    head = tag("div", *(tag("span", title, class_=kind) for title, kind in titles), class_="row top")
    tree = [tag("div", head, *lines, class_="tree")]
    if len(rows) > _MOST_ROWS:
        more = sum(len(members) for _, _, members in rows[_MOST_ROWS:])
        tree.append(
            note(f"and {count_text(more, 'more tensor')}: look at some with .sel(glob), or at .groups('prefix')")
        )
    return join(tree)


def _add_up(branch: _Branch) -> None:
    for child in branch.below.values():
        _add_up(child)
    below = branch.below.values()
    branch.count = sum(len(some) for _, some in branch.tensors) + sum(child.count for child in below)
    branch.nbytes = sum(t.spec.nbytes for _, some in branch.tensors for t in some) + sum(c.nbytes for c in below)


def _branch(
    checkpoint: Checkpoint, branch: _Branch, depth: int, known: dict[Sharding, str], *, opened: bool
) -> list[Markup]:
    """Return the lines below a branch: a part that has one child only shares its line with it."""
    lines = []
    for part, child in branch.below.items():
        name, node = part, child
        while len(node.below) == 1 and not node.tensors:
            ((more, node),) = node.below.items()
            name += f".{more}"
        if not node.below and len(node.tensors) == 1:
            ((more, some),) = node.tensors
            lines.append(_leaf(checkpoint, f"{name}.{more}", some, depth, known))
            continue
        summary = tag(
            "summary",
            tag("span", name, tag("span", f"  {count_text(node.count, 'tensor')}", class_="count"), class_="name"),
            tag("span"), tag("span"),
            tag("span", bytes_text(node.nbytes), class_="size"),
            class_="row", style=f"--depth:{depth}",
        )  # fmt: skip
        attributes = {"open": "open"} if opened or (depth == 0 and len(branch.below) <= 4) else {}
        lines.append(
            tag(
                "details",
                summary,
                *_branch(checkpoint, node, depth + 1, known, opened=opened),
                class_="branch",
                **attributes,
            )
        )
    return lines + [_leaf(checkpoint, name, some, depth, known) for name, some in branch.tensors]


def _said(checkpoint: Checkpoint, tensor: Tensor, known: dict[Sharding, str]) -> Hashable:
    """Return what the row of a tensor says but for its stage: tensors of which it says the same may share theirs."""
    layouts = tuple(layout for _, layout in layouts_of(checkpoint, tensor))
    return tensor.spec.dtype, tensor.spec.shape, tensor.text is None, layouts, shards_text(tensor, known)


def _leaf(
    checkpoint: Checkpoint, name: str, tensors: Sequence[Tensor], depth: int, known: dict[Sharding, str]
) -> Markup:
    tensor, count = tensors[0], len(tensors)
    words = cut_words(checkpoint, tensor, {})
    layouts = layouts_of(checkpoint, tensor)
    rule = f"{layouts_text(checkpoint, tensors)}; {shards_text(tensor, known)} blocks x copies in the files"
    thumb = (
        [tag("span", tiny(layouts[0][1] if layouts else None, tensor, checkpoint.ranks), class_="tiny")]
        if words != "whole"
        else []
    )
    shape = extents_text(tensor) if tensor.text is None else "text"
    times = [tag("span", f"  x {count:,}", class_="count")] if count > 1 else []
    return tag(
        "div",
        tag("span", name, *times, class_="name", title=tensor.spec.name),
        tag("span", tensor.spec.dtype.name),
        tag("span", shape, title=shape),
        tag("span", bytes_text(tensor.spec.nbytes * count), class_="size"),
        tag("span", *thumb, words, title=rule),
        class_="row leaf",
        style=f"--depth:{depth}",
    )


def _files(files: Sequence[SourceFile], ranks: Sequence[int]) -> Markup:
    rows = [
        (f"{rank}", file.path, file.index.format, f"{len(file.index.entries):,}", bytes_text(file.nbytes))
        for file, rank in zip(files[:_MOST_FILES], ranks, strict=False)
    ]
    header = ("rank", "file", "format", "tensors", "bytes")
    return join([table(header, rows, right=("rank", "tensors", "bytes")), *and_more(len(files), _MOST_FILES, "file")])


def groups_html(groups: Groups) -> str:
    """Show sizes, counts and dtypes by group."""
    rows = [
        (name, f"{groups.counts[name]:,}", bytes_text(groups.sizes[name]), ", ".join(groups.dtypes[name]))
        for name in list(groups)[:_MOST_ROWS]
    ]
    return page(
        heading("Groups", groups.checkpoint.root, f"by {groups.by}", bytes_text(sum(groups.sizes.values()))),
        table(("group", "tensors", "bytes", "dtype"), rows, right=("tensors", "bytes")),
        *and_more(len(groups), _MOST_ROWS, "group"),
    )


# --- layouts and strategies -------------------------------------------------------------------------------------


def layout_html(layout: Layout) -> str:
    """Show a layout: its numbers, what they mean, and which rank holds which block."""
    try:
        picture = layout_picture(layout)
    except LayoutError as error:
        return page(heading("Layout", str(layout)), note(f"not possible: {error.message}"))
    return page(heading("Layout", ""), picture.html())  # which says the rest


def strategy_html(strategy: Strategy) -> str:
    """Show a strategy: devices, stages, and the tensors of each layout."""
    groups = groups_of(strategy)
    several = len(strategy.stages) > 1
    parts = []
    for (stage, layout), members in list(groups.items())[:_MOST_GROUPS]:
        folded = [name for name, _, _ in group_names((name, None) for name in members)]
        more = f" and {len(folded) - MOST_NAMES:,} more" if len(folded) > MOST_NAMES else ""
        rule, meaning = raw_text(layout), layout_words(layout)
        where = f"stage {stage} · " if several else ""
        parts.append(
            tag(
                "div",
                tag("div", thumbnail(layout), class_="thumb"),
                tag(
                    "div",
                    tag("div", tag("b", meaning), " ", tag("span", rule, class_="rule more")),
                    tag("div", f"{where}{count_text(len(members), 'tensor')}", class_="more"),
                    tag("div", *_names(folded), more, class_="names"),
                ),
                class_="group",
            )
        )
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
        note(LEGEND.replace("\n", " ")),
    )


def _names(folded: Sequence[str]) -> list[Markup]:
    """Return the first of some names, each an element of its own, with commas between them."""
    shown = [tag("span", name) for name in folded[:MOST_NAMES]]
    return [Markup(f"{', ' * (number > 0)}{name}") for number, name in enumerate(shown)]


# --- plans, reports, verifications, graphs ----------------------------------------------------------------------


def plan_html(plan: Plan) -> str:
    """Show a plan: what it costs, what goes where, what is dropped and missing."""
    stats = plan.stats
    parts = [
        heading("Plan", plan.source.root, f"to {count_text(stats.target_files, f'{plan.format} file')}"),
        tiles(
            ("tensors", f"{stats.tensors:,}", ""),
            (
                "read",
                bytes_text(stats.bytes_read),
                f"{stats.source_files:,} files, {stats.read_amplification:.2f} x needed",
            ),
            ("write", bytes_text(stats.target_bytes), f"{stats.target_files:,} files, {ranges_text(plan.ranks)}"),
            ("tasks", f"{stats.tasks:,}", f"bands of up to {bytes_text(plan.band_bytes)}"),
            ("memory", bytes_text(stats.peak_memory), f"at the peak, {count_text(plan.threads, 'thread')}"),
        ),
        *([note(f"changed: {changed}")] if (changed := changed_text(plan)) else []),
        details("What goes where", plan_picture(plan).html(), opened=True),
        details("Tensors", _moves(plan), more=f"{stats.tensors:,}"),
        details("Target files", _target_files(plan), more=f"{len(plan.files):,}"),
        listing("Dropped", plan.dropped, "in the source, not in the target"),
        listing("Missing", plan.missing, "in the target, not in the source"),
    ]
    return page(*parts, *warnings_listed(plan.warnings))


def _moves(plan: Plan) -> Markup:
    folded = group_names(
        (
            transfer.name,
            (
                transfer.dtype.name
                if transfer.dtype == transfer.target_dtype
                else f"{transfer.dtype} → {transfer.target_dtype}",
                transfer.recipe.shape,
                prod(transfer.recipe.shape) * transfer.dtype.itemsize,
                len(transfer.recipe.sources),
                len(transfer.recipe.targets),
                len({at.file for written in transfer.route.writes for at in written}),
            ),
        )
        for transfer in plan.transfers
    )
    rows = [
        (
            name,
            f"{count:,}",
            dtype,
            shape_text(shape),
            bytes_text(nbytes * count),
            f"{sources:,} → {targets:,}",
            f"{n:,}",
        )
        for name, (dtype, shape, nbytes, sources, targets, n), count in folded[:_MOST_ROWS]
    ]
    header = ("tensor", "count", "dtype", "shape", "bytes", "blocks", "in files")
    return join(
        [
            table(header, rows, right=("count", "bytes", "blocks", "in files")),
            *and_more(len(folded), _MOST_ROWS, "row"),
        ]
    )


def _target_files(plan: Plan) -> Markup:
    rows = [
        (f"{file.rank}", file.path, bytes_text(plan.size_of(file)), f"link to {file.link}" if file.link else "")
        for file in plan.files[:_MOST_FILES]
    ]
    header = ("rank", "file", "bytes", "")
    return join([table(header, rows, right=("rank", "bytes")), *and_more(len(plan.files), _MOST_FILES, "file")])


def report_html(report: Report) -> str:
    """Show what a run did."""
    rate = report.bytes_written / report.seconds if report.seconds else 0
    kinds: dict[str, list[Receipt]] = {}
    for receipt in report.receipts:
        kinds.setdefault(receipt.task.partition(" ")[0], []).append(receipt)
    rows = [
        (
            kind,
            f"{len(found):,}",
            bytes_text(sum(receipt.read for receipt in found)),
            bytes_text(sum(receipt.written for receipt in found)),
            f"{sum(receipt.seconds for receipt in found):.3f} s",
        )
        for kind, found in kinds.items()
    ]
    files = [(path,) for path in report.files[:_MOST_FILES]]
    header = ("task", "count", "read", "written", "time of all")
    files_text = count_text(len(report.files), "file") + f", {count_text(report.links, 'link')}" * bool(report.links)
    before = f", {bytes_text(report.resumed)} before" if report.resumed else ""
    return page(
        heading("Report", report.directory),
        tiles(
            ("tensors", f"{report.tensors:,}", f"{count_text(report.replicas, 'replica')} of blocks"),
            ("read", bytes_text(report.bytes_read), count_text(report.source_files, "file")),
            ("written", bytes_text(report.bytes_written), f"{files_text}{before}"),
            ("time", f"{report.seconds:.2f} s", f"{bytes_text(rate)}/s"),
            ("memory", bytes_text(report.peak_memory), "at the peak"),
        ),
        details("Files", table(("file",), files), *and_more(len(report.files), _MOST_FILES, "file"),
                more=f"{len(report.files):,}"),
        details("Tasks", table(header, rows, right=header[1:]), more=f"{len(report.receipts):,}"),
        listing("Dropped", report.dropped, "in the source, not in the target"),
        listing("Missing", report.missing, "in the target, not in the source"),
    )  # fmt: skip


def verification_html(found: Verification) -> str:
    """Show what was verified, and each thing that is not as it should be."""
    many = len(found.differences)
    both = found.against is not None and bool(found.ranks)
    rate = bytes_text(found.bytes_read / found.seconds) + "/s" if found.seconds and found.bytes_read else ""
    sample = f"a sample of {bytes_text(found.total_bytes)}" if found.sample is not None else "of both sides"
    rows = [
        (
            one.name or below(one.path or "", found.target),
            spelled(one.text, PYTHON),
            "" if one.index is None else shape_text(one.index),
            one.side if one.rank is None else f"{one.side}, rank {one.rank}",
            below(one.path or "", found.against if one.side == "source" else found.target),
        )
        for one in found.differences[:_MOST_FILES]
    ]
    header = ("tensor or file", "difference", "first at", "where", "file")
    differences = [table(header, rows, wrap="difference"), *and_more(many, _MOST_FILES, "difference")]
    absent = (
        ("Dropped", found.dropped, "in the source, not in the target"),
        ("Left out", found.left_out, "in the target, and not asked for"),
    )
    return page(
        heading("Verification", found.target, conclusion(found)),
        tiles(
            ("differences", f"{many:,}" if many else "none", ""),
            (
                "tensors",
                f"{found.tensors:,}",
                f"{count_text(found.copies, 'block')} {'compared' if both else 'in files'}",
            ),
            ("files", f"{found.files:,}", f"ranks {ranges_text(found.ranks)}" if found.ranks else ""),
            ("read", bytes_text(found.bytes_read), sample if both else ""),
            ("time", f"{found.seconds:.2f} s", rate),
        ),
        *([details("Differences", *differences, more=f"{many:,}", opened=True)] if many else []),
        *(listing(title, some, meaning) for title, some, meaning in absent if some),
        *([note(found.note)] if found.note else []),
        *([note(f"not looked at: {'; '.join(found.unchecked)}")] if found.unchecked else []),
        *warnings_listed(found.warnings),
    )


def graph_html(graph: Graph) -> str:
    """Show a graph: how many tasks of which kind it has, and how to run it."""
    kinds = graph.kinds()
    return page(
        heading("Graph", graph.directory, f"writes {count_text(len(graph.plan.files), 'file')} when it is computed"),
        table(("task", "count"), [(kind, f"{count:,}") for kind, count in kinds.items()], right=("count",)),
        details("What goes where", plan_picture(graph.plan).html()),
    )


def fusion_html(fusion: Fusion) -> str:
    """Show how a fused tensor is made of its parts."""
    return page(heading("Rule", fusion.name, fusion.verb), fusion_picture(fusion).html(), tag("pre", str(fusion)))


# --- whatever it is ---------------------------------------------------------------------------------------------

_HTML: dict[str, Callable[[Any], str]] = {
    "Checkpoint": checkpoint_html,
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
    "Strategy": strategy_picture,
}


def html(subject: object) -> str:
    """Return what a notebook shows of a checkpoint, graph, groups, layout, plan, report, strategy or verification."""
    return _HTML[type(subject).__name__](subject)


def picture(subject: object, *arguments: object) -> Picture:
    """Return the picture of a checkpoint's tensor, a layout, a plan or a strategy."""
    return _PICTURES[type(subject).__name__](subject, *arguments)
