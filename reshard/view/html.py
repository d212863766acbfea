"""The pages that notebooks show for objects, and the pictures of objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reshard.errors import LayoutError, bytes_text
from reshard.view.pages.diff_view import diff_html
from reshard.view.pages.stats_view import stats_html, values_html
from reshard.view.pages.strategy_view import strategy_diff_html, strategy_html
from reshard.view.pages.tensor_tree import dtypes_bar, tree
from reshard.view.pictures.flow import plan_picture
from reshard.view.pictures.fused import fusion_html
from reshard.view.pictures.pens import checkpoint_picture, layout_picture, strategy_picture
from reshard.view.pictures.task_stream import task_stream
from reshard.view.plans import graph_html, plan_html, report_html
from reshard.view.sections import MOST_ROWS, Facts, Note, Reasons, Table, details, page, warnings_of
from reshard.view.svg import ranks_range
from reshard.view.tables import checkpoint_text, group_rows, objects_of, troubles
from reshard.view.verdict import verification_html
from reshard.view.words import layout_words

if TYPE_CHECKING:
    from collections.abc import Callable

    from reshard.core.layout.layout import Layout
    from reshard.core.model.checkpoint import Checkpoint
    from reshard.view.sections import Section
    from reshard.view.svg import Picture
    from reshard.view.tables import Groups


def checkpoint_html(checkpoint: Checkpoint) -> str:
    """Show a checkpoint: sizes, dtypes, the tree of its tensors, its files and its problems."""
    files, left_out = checkpoint.stored_files, len(checkpoint.left_out)
    formats = ", ".join(sorted({file.index.format for _, file in files}))
    rows = [
        (f"{rank}", file.path, file.index.format, f"{len(file.index.entries):,}", bytes_text(file.nbytes))
        for rank, file in files
    ]
    facts, objects = described = objects_of(checkpoint)
    training = {word: str(fact) for word, fact in facts.items()}
    sections: list[Section] = [
        Facts([
            ("tensors", f"{len(checkpoint.tensors):,}", f"{left_out:,} left out" if left_out else ""),
            ("whole tensors", bytes_text(checkpoint.nbytes), "replicas once"),
            ("files", f"{len(files):,}", f"{formats}, {bytes_text(sum(file.nbytes for _, file in files))}"),
            _ranks_fact(checkpoint),
            _stages_fact(checkpoint),
        ]),
        dtypes_bar(checkpoint),
        details("Tensors", tree(checkpoint), opened=True),
        Table("Files", ("rank", "file", "format", "tensors", "bytes"), rows, "file", wrap="file"),
        Reasons("Training", training, ("name", "value"), "value"),
        *troubles(checkpoint, objects),
        *warnings_of(checkpoint),
    ]  # fmt: skip
    return page(("Checkpoint", checkpoint.title), sections, checkpoint_text(checkpoint, described=described))


def _ranks_fact(checkpoint: Checkpoint) -> tuple[str, str, str]:
    """Return the ranks of the files, or the devices of the training if its files are of no rank."""
    arrangement, ranks = checkpoint.extras.arrangement, sorted(set(checkpoint.ranks))
    if arrangement and ranks == [0] and len(arrangement.ranks) > 1:
        return "devices", f"{len(arrangement.ranks):,}", "of the training; files are of no rank"
    if checkpoint.opening.computation:
        return "ranks", "none", "computed"
    return "ranks", f"{len(ranks):,}", ranks_range(ranks)


def _stages_fact(checkpoint: Checkpoint) -> tuple[str, str, str]:
    if checkpoint.strategy:
        return "stages", f"{len(checkpoint.strategy.stages)}", ""
    return "stages", "1", "layouts of its own" if checkpoint.extras.has_layouts else "no strategy"


def groups_html(groups: Groups) -> str:
    """Show sizes, counts and dtypes by group."""
    table = Table("", ("group", "tensors", "bytes", "dtype"), group_rows(groups), "group", most=MOST_ROWS)
    title = "Groups", groups.checkpoint.title, f"by {groups.by}", bytes_text(sum(groups.sizes.values()))
    return page(title, [table], str(groups))


def layout_html(layout: Layout) -> str:
    """Show a picture of a layout, or the reason why it is invalid."""
    try:
        picture = layout_picture(layout)
    except LayoutError as error:
        return page(("Layout", str(layout)), [Note(f"not possible: {error.message}")], str(layout))
    return page(("Layout", ""), [picture.html()], f"{layout}: {layout_words(layout)}")


def picture_html(picture: Picture) -> str:
    """Show a picture."""
    return page((), [picture.html()], repr(picture))


_HTML: dict[str, Callable[[Any], str]] = {
    "Checkpoint": checkpoint_html,
    "CheckpointDiff": diff_html,
    "CheckpointStats": stats_html,
    "Diff": strategy_diff_html,
    "Fusion": fusion_html,
    "Graph": graph_html,
    "Groups": groups_html,
    "HistogramPicture": picture_html,
    "Layout": layout_html,
    "Picture": picture_html,
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
