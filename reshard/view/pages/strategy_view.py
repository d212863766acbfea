"""Strategies as pages, and the differences of two: thumbnails, layouts in words, and the tensors of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.core.layout.grid import grid
from reshard.core.layout.layout import least_shape
from reshard.errors import LayoutError
from reshard.view import words
from reshard.view.pictures.blocks import DrawnSide
from reshard.view.pictures.thumbnails import Thumbnails
from reshard.view.sections import MOST_ITEMS, Facts, Names, Note, Table, page
from reshard.view.svg import Markup, join, ranks_range, tag
from reshard.view.text import folded_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard.core.layout.layout import Layout
    from reshard.strategy.diff import Diff, LayoutChange
    from reshard.strategy.strategy import Strategy
    from reshard.view.sections import Section

_MOST_GROUPS = 32
_SIZE = (96.0, 64.0, 20.0)
_HEADER = ("cut", "layout", "tensors", "names")


def strategy_html(strategy: Strategy) -> str:
    """Show a strategy: devices, stages and the tensors of each layout."""
    groups: dict[tuple[int, tuple[Layout, ...]], list[str]] = {
        (stage, (layout,)): names for (stage, layout), names in words.groups_of(strategy).items()
    }
    several, thumbnails = len(strategy.stages) > 1, Thumbnails(_SIZE)
    stages = f"{strategy.stages.start} to {strategy.stages.stop - 1}" if several else f"stage {strategy.stages.start}"
    sections: list[Section] = [
        Facts([
            ("tensors", f"{len(strategy.tensors):,}", ""),
            ("ranks", f"{len(strategy.ranks):,}", ranks_range(strategy.ranks)),
            ("stages", f"{len(strategy.stages)}", stages),
            ("devices in a stage", f"{strategy.devices:,}", ""),
            ("layouts", f"{len(groups):,}", "equal ones together"),
        ]),
        _table("Layouts", [strategy], groups, thumbnails),
        thumbnails.symbols(),
        Note(words.LEGEND.replace("\n", " ")),
    ]  # fmt: skip
    title = "Strategy", "", "merged" if strategy.merged else ""
    return page(title, sections, words.strategy_text(strategy, "strategy"))


def strategy_diff_html(diff: Diff) -> str:
    """Show the differences of two strategies: both layouts of the tensors that have two."""
    a, b, thumbnails = diff.a, diff.b, Thumbnails(_SIZE)
    sections: list[Section] = [
        Facts([
            ("A", f"{len(a.tensors):,} tensors", f"ranks {ranks_range(a.ranks)}"),
            ("B", f"{len(b.tensors):,} tensors", f"ranks {ranks_range(b.ranks)}"),
            ("other blocks", f"{len(diff.blocks):,}", ""),
            ("written otherwise", f"{len(diff.fields):,}", "the same blocks"),
        ])
    ]  # fmt: skip
    for title, changes in (("Other blocks", diff.blocks), ("The same blocks, written otherwise", diff.fields)):
        if changes:
            sections.append(_table(title, [a, b], _grouped(changes), thumbnails))
    for title, only in (("Only in A", diff.only_a), ("Only in B", diff.only_b)):
        sections.append(Names(title, [name for name, _ in only]))
    verdict = "every rank holds the same blocks" if diff.same else "they differ"
    return page(("Two strategies", "", verdict), [*sections, thumbnails.symbols()], repr(diff))


def _grouped(changes: Sequence[LayoutChange]) -> dict[tuple[int, tuple[Layout, ...]], list[str]]:
    groups: dict[tuple[int, tuple[Layout, ...]], list[str]] = {}
    for change in changes:
        groups.setdefault((change.stage, (change.a, change.b)), []).append(change.name)
    return groups


def _table(
    title: str,
    strategies: Sequence[Strategy],
    groups: Mapping[tuple[int, tuple[Layout, ...]], Sequence[str]],
    thumbnails: Thumbnails,
) -> Table:
    """Return a table of layouts, one of each strategy in a row, with the names of their tensors, folded."""
    to = tag("span", "→", class_="to")
    rows: list[Sequence[str]] = []
    found = []
    for number, ((stage, layouts), names) in enumerate(groups.items()):
        rest = f"{len(names):,}", folded_text(names, MOST_ITEMS)
        of_stage = f"stage {stage}: " if len(strategies[0].stages) > 1 else ""
        found.append((f"{of_stage}{' → '.join(map(words.layout_words, layouts))}", *rest))
        if number < _MOST_GROUPS:
            first, *more = (_thumbnail(thumbnails, *pair, stage) for pair in zip(strategies, layouts, strict=True))
            cut = join([first, *(part for each in more for part in (to, each))])
            rules = [
                part
                for layout in layouts
                for part in (tag("b", of_stage + words.layout_words(layout)), tag("span", words.raw_text(layout)))
            ]
            rows.append((cut, join(tag("div", rule) for rule in rules), *rest))
        else:
            rows.append(())
    return Table(
        title, _HEADER, rows, "layout", wrap="names", most=_MOST_GROUPS, opened=True,
        found=(_HEADER[1:], found),
    )  # fmt: skip


def _thumbnail(thumbnails: Thumbnails, strategy: Strategy, layout: Layout, stage: int) -> Markup:
    """Return a drawing of a layout with the ranks of its stage, or "" if the layout is not possible."""

    def side() -> DrawnSide | None:
        try:
            shape = least_shape([layout])
            blocks = grid(shape, ((layout, stage * strategy.devices),))
        except LayoutError:
            return None
        return DrawnSide("", shape, blocks.blocks, blocks.ranks)

    return thumbnails.of((strategy.devices, stage, layout), side, words.layout_words(layout))
