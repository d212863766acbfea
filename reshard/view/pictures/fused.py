"""Fused tensors as HTML: their rows in the colours of their parts."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from reshard.view.sections import page
from reshard.view.svg import Picture, colour, join, label, tag, text_width

if TYPE_CHECKING:
    from reshard.rules.show import Fusion

_MOST_BANDS = 576
_HEIGHT = 420.0


def fusion_html(fusion: Fusion) -> str:
    """Show the parts of a fused tensor."""
    return page(
        ("Rule", fusion.name, fusion.verb), [fusion_picture(fusion).html(), tag("pre", str(fusion))], str(fusion)
    )


def fusion_picture(fusion: Fusion) -> Picture:
    """Draw the rows of a fused tensor in the colours of their parts."""
    count = len(fusion.parts)
    fills = [*(colour(number, count) for number in range(count)), "none"]
    scale = _HEIGHT / max(fusion.rows, 1)
    bars = [label(0, 12, fusion.name, font_weight=600), label(0, 28, f"{fusion.rows:,} rows along axis {fusion.axis}")]
    for band in fusion.bands[:_MOST_BANDS]:
        spans = [band.rows] if band.step == 1 else [range(row, row + 1) for row in band.rows[:_MOST_BANDS]]
        last = band.first + len(band.rows) - 1
        part = f"{fusion.parts[band.part]} {band.first}-{last}" if band.part >= 0 else "padding"
        title = tag("title", f"rows {band.rows[0]}-{band.rows[-1]}: {part}")
        bars += [
            tag("rect", title, x=0.0, y=36 + span.start * scale, width=90.0, height=max(len(span) * scale, 0.5),
                fill=fills[band.part], stroke="#00000040", stroke_width=0.5)
            for span in spans
        ]  # fmt: skip
        if band.step == 1 and len(band.rows) * scale >= 4:
            bars.append(label(96, 40 + (band.start + band.stop) / 2 * scale, f"{band.start}-{band.stop - 1}", size=10))
    for number, part in enumerate(fusion.parts):
        y = 36.0 + 18 * number
        bars += [tag("rect", x=180.0, y=y, width=12.0, height=12.0, fill=fills[number]), label(198, y + 10, part)]
    width = 200 + max(map(text_width, (*fusion.parts, fusion.name)))
    height = 40 + max(_HEIGHT, 18 * count)
    return Picture(f"{fusion.name}: {fusion.verb}", ceil(width), ceil(height), join(bars))
