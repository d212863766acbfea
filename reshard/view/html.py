"""The pages that notebooks show for objects, and the pictures of objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reshard.errors import LayoutError
from reshard.view.pages.checkpoint_view import checkpoint_html, groups_html
from reshard.view.pages.diff_view import diff_html
from reshard.view.pages.stats_view import stats_html, values_html
from reshard.view.pages.strategy_view import strategy_diff_html, strategy_html
from reshard.view.pictures.flow import plan_picture
from reshard.view.pictures.pens import checkpoint_picture, layout_picture, strategy_picture
from reshard.view.pictures.task_stream import task_stream
from reshard.view.plans import graph_html, plan_html, report_html
from reshard.view.sections import Note, page
from reshard.view.verdict import verification_html
from reshard.view.words import layout_words

if TYPE_CHECKING:
    from collections.abc import Callable

    from reshard.core.layout.layout import Layout
    from reshard.view.svg import Picture


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
