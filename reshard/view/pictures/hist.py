"""The histogram of one tensor as a picture, and as text for a terminal."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from reshard.compute.histogram import histogram
from reshard.compute.stats import number_text
from reshard.core.layout.block import shape_text
from reshard.errors import printable
from reshard.view.svg import Markup, Picture, join, label, moved, tag
from reshard.view.text import count_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.compute.stats import ValueStats
    from reshard.core.model.checkpoint import Checkpoint

_WIDTH, _HEIGHT = 560.0, 150.0
_LINES, _BAR = 16, 48  # of the text: at most so many lines, and characters of the longest bar
_EIGHTHS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class HistogramPicture(Picture):
    """The histogram of a tensor: a picture in a notebook, bars of characters in a terminal.

    Attributes:
        counts: the number of finite elements in each bin, as a numpy array.
        edges: the edges of the bins, one more than there are bins.
        words: the statistics.
    """

    counts: Any = field(default=None)
    edges: Any = field(default=None)
    words: str = ""

    def __repr__(self) -> str:
        merged = -(-len(self.counts) // _LINES)
        rows = [
            (number_text(float(self.edges[first])), int(self.counts[first : first + merged].sum()))
            for first in range(0, len(self.counts), merged)
        ]
        most = max(count for _, count in rows) or 1
        wide, numbers = max(len(edge) for edge, _ in rows), max(len(f"{count:,}") for _, count in rows)
        bars = [f"{edge:>{wide}} {count:{numbers},} {_bar(count / most)}".rstrip() for edge, count in rows]
        return "\n".join([printable(self.title), *bars, f"{number_text(float(self.edges[-1])):>{wide}}", self.words])


def _bar(share: float) -> str:
    eighths = round(share * _BAR * 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def histogram_picture(checkpoint: Checkpoint, name: str, bins: int) -> HistogramPicture:
    """Read a tensor, and draw its histogram."""
    values, counts, edges = histogram(checkpoint, name, bins)
    words = statistics_words(values)
    drawing, height = drawn(counts, edges, words)
    title = f"{name} {values.dtype} {shape_text(values.shape or ())}"
    return HistogramPicture(title, _WIDTH + 2, height, drawing, counts=counts, edges=edges, words=words)


def drawn(counts: Any, edges: Any, words: str) -> tuple[Markup, float]:
    """Draw a histogram with its range and statistics below it; return its height, too."""
    base = _HEIGHT - 1
    step = _WIDTH / len(counts)
    tips = [
        tag(
            "rect",
            tag("title", f"{number_text(low)} to {number_text(high)}: {count_text(round(float(count)), 'element')}"),
            x=number * step, y=0.0, width=step, height=_HEIGHT, fill="#77aadd", fill_opacity=0.0,
        )
        for number, (count, low, high) in enumerate(zip(counts, edges[:-1].tolist(), edges[1:].tolist(), strict=True))
    ]  # fmt: skip
    ends = [
        label(0, _HEIGHT + 13, number_text(float(edges[0]))),
        label(_WIDTH, _HEIGHT + 13, number_text(float(edges[-1])), anchor="end"),
        label(0, _HEIGHT + 30, words, opacity=0.66),
    ]
    return moved(1, 1, outline(counts, edges, _WIDTH, base), *tips, *ends), _HEIGHT + 38


def outline(counts: Any, edges: Any, width: float, base: float) -> Markup:
    """Draw the steps of a histogram on a line at `base`, with a line at zero."""
    step, most = width / len(counts), float(counts.max()) or 1.0
    line: dict[str, str | float] = {
        "stroke": "currentColor",
        "stroke_opacity": 0.4,
        "vector_effect": "non-scaling-stroke",
    }
    steps = "".join(
        f"V{base - (base - 1) * float(count) / most:.1f}H{(number + 1) * step:.1f}"
        for number, count in enumerate(counts)
    )
    parts = [
        tag("path", d=Markup(f"M0 {base:.1f}{steps}V{base:.1f}Z"), fill="#77aadd", stroke="none"),
        tag("path", d=Markup(f"M0 {base:.1f}H{width:.1f}"), **line),
    ]
    if edges[0] < 0 < edges[-1]:
        zero = width * float(-edges[0] / (edges[-1] - edges[0]))
        parts.append(tag("path", d=Markup(f"M{zero:.1f} 1V{base:.1f}"), **line))
    return join(parts)


def statistics_words(values: ValueStats) -> str:
    """Write the statistics of a tensor in one line, with the titles of the table."""
    numbers = [(title, getattr(values, title)) for title in ("mean", "std", "norm")]
    counts: Sequence[tuple[int, str]] = [(values.zeros, "zero"), (values.nans, "NaN"), (values.infs, "Inf")]
    parts = [count_text(values.size, "element")]
    parts += [f"{title} {number_text(number)}" for title, number in numbers if number is not None]
    if values.quartiles:
        parts.append(f"quartiles {', '.join(map(number_text, values.quartiles))}")
    parts += [count_text(count, word) if word == "zero" else f"{count:,} {word}" for count, word in counts if count]
    return " · ".join(parts)
