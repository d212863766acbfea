"""Strategies as HTML, and the differences of two: thumbnails, layouts in words, and the tensors of each."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from reshard.core.layout.grid import grid
from reshard.core.layout.layout import least_shape
from reshard.errors import LayoutError
from reshard.strategy.names import group_names
from reshard.view import words
from reshard.view.pictures.blocks import DrawnSide
from reshard.view.pictures.thumbnails import Thumbnails
from reshard.view.sections import MOST_ITEMS, Facts, Names, Note, and_more, details, page
from reshard.view.svg import Markup, join, ranks_range, tag
from reshard.view.text import count_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.core.layout.layout import Layout
    from reshard.strategy.diff import Diff, LayoutChange
    from reshard.strategy.strategy import Strategy
    from reshard.view.sections import Section

_MOST_GROUPS = 32
_SIZE = (96.0, 64.0, 20.0)


def strategy_html(strategy: Strategy) -> str:
    """Show a strategy: devices, stages and the tensors of each layout."""
    groups = words.groups_of(strategy)
    thumbnails = Thumbnails(_SIZE)
    parts = [
        _group([_thumbnail(thumbnails, strategy, stage, layout)], [_rule(layout)], _stage(strategy, stage), members)
        for (stage, layout), members in islice(groups.items(), _MOST_GROUPS)
    ]
    several = len(strategy.stages) > 1
    stages = f"{strategy.stages.start} to {strategy.stages.stop - 1}" if several else f"stage {strategy.stages.start}"
    sections: list[Section] = [
        Facts([
            ("tensors", f"{len(strategy.tensors):,}", ""),
            ("ranks", f"{len(strategy.ranks):,}", ranks_range(strategy.ranks)),
            ("stages", f"{len(strategy.stages)}", stages),
            ("devices in a stage", f"{strategy.devices:,}", ""),
            ("layouts", f"{len(groups):,}", "equal ones together"),
        ]),
        thumbnails.symbols(),
        details("Layouts", *parts, *and_more(len(groups), _MOST_GROUPS, "layout"), opened=True),
        Note(words.LEGEND.replace("\n", " ")),
    ]  # fmt: skip
    return page(
        ("Strategy", "", "merged" if strategy.merged else ""), sections, words.strategy_text(strategy, "strategy")
    )


def strategy_diff_html(diff: Diff) -> str:
    """Show the differences of two strategies: both layouts of the tensors that have two."""
    a, b = diff.a, diff.b
    thumbnails, to = Thumbnails(_SIZE), tag("span", "→", class_="to")
    sections = []
    for title, changes in (("Other blocks", diff.blocks), ("The same blocks, written otherwise", diff.fields)):
        groups: dict[tuple[int, Layout, Layout], list[LayoutChange]] = {}
        for change in changes:
            groups.setdefault((change.stage, change.a, change.b), []).append(change)
        parts = [
            _group(
                [_thumbnail(thumbnails, a, stage, first), to, _thumbnail(thumbnails, b, stage, second)],
                [_rule(first, "A "), _rule(second, "B ")],
                _stage(a, stage),
                [change.name for change in group],
            )
            for (stage, first, second), group in islice(groups.items(), _MOST_GROUPS)
        ]
        if parts:
            parts += and_more(len(groups), _MOST_GROUPS, "pair of layouts")
            sections.append(details(title, *parts, more=count_text(len(changes), "tensor"), opened=True))
    verdict = "every rank holds the same blocks" if diff.same else "they differ"
    only = [
        Names("Only in A", [name for name, _ in diff.only_a], "in A, not in B"),
        Names("Only in B", [name for name, _ in diff.only_b], "in B, not in A"),
    ]
    facts = Facts([
        ("A", f"{len(a.tensors):,} tensors", f"ranks {ranks_range(a.ranks)}"),
        ("B", f"{len(b.tensors):,} tensors", f"ranks {ranks_range(b.ranks)}"),
        ("other blocks", f"{len(diff.blocks):,}", ""),
        ("written otherwise", f"{len(diff.fields):,}", "the same blocks"),
    ])  # fmt: skip
    shown = [facts, thumbnails.symbols(), *sections, *(each for each in only if each.names)]
    return page(("Two strategies", "", verdict), shown, repr(diff))


def _group(pictures: Sequence[Markup], rules: Sequence[Markup], stage: str, members: Sequence[str]) -> Markup:
    """Return a row: thumbnails, layouts in words, and the names of the tensors, folded."""
    folded = [name for name, _, _ in group_names((name, None) for name in members)]
    names = Markup(", ".join(tag("span", name) for name in folded[:MOST_ITEMS]))
    rest = f" and {len(folded) - MOST_ITEMS:,} more" if len(folded) > MOST_ITEMS else ""
    facts = tag(
        "div",
        *(tag("div", rule) for rule in rules),
        tag("div", f"{stage}{count_text(len(members), 'tensor')}", class_="more"),
        tag("div", names, rest, class_="names"),
    )
    return tag("div", tag("div", *pictures, class_="thumb"), facts, class_="group")


def _rule(layout: Layout, side: str = "") -> Markup:
    rule = tag("span", words.raw_text(layout), class_="rule more")
    return join([tag("span", side, class_="more"), tag("b", words.layout_words(layout)), Markup(" "), rule])


def _stage(strategy: Strategy, stage: int) -> str:
    return f"stage {stage} · " if len(strategy.stages) > 1 else ""


def _thumbnail(thumbnails: Thumbnails, strategy: Strategy, stage: int, layout: Layout) -> Markup:
    """Return a drawing of a layout with the ranks of its stage, or "" if the layout is not possible."""

    def side() -> DrawnSide | None:
        try:
            shape = least_shape([layout])
            blocks = grid(shape, ((layout, stage * strategy.devices),))
        except LayoutError:
            return None
        return DrawnSide("", shape, blocks.blocks, blocks.ranks)

    return thumbnails.of((strategy.devices, stage, layout), side, words.layout_words(layout))
