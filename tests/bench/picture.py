"""Draw `docs/benchmark.svg` from the figures in `docs/benchmarks.json`, which `bench.py --json` writes.

python tests/bench/picture.py [FILE]
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

DOCS = Path(__file__).parent.parent.parent / "docs"
LABEL, BAR, NUMBER, GAP, ROW, HEAD = 250, 150, 70, 20, 24, 34  # pixels
STYLE = """
text { font: 13px system-ui, -apple-system, 'Segoe UI', sans-serif; fill: #1f2328 }
.head { font-weight: 600 } .small { font-size: 12px; fill: #59636e }
.ours { fill: #1a7f64 } .theirs { fill: #8c959f }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc } .small { fill: #9198a1 } .ours { fill: #3fb68b } .theirs { fill: #656c76 } }
"""


class Bar(NamedTuple):
    """One program's figures for a job: seconds and bytes of memory at the peak."""

    name: str
    seconds: float
    peak: float


def groups(recorded: dict[str, Any]) -> list[tuple[str, list[Bar]]]:
    """Return the jobs and what each program took for them: medians."""
    rows = {row["row"]: row for row in recorded["figures"] if "row" in row}
    peers = {row["peer"]: row["pairs"] for row in recorded["figures"] if "peer" in row}
    size = f"{recorded['bytes'] / 1e9:.1f} GB"
    found = []
    theirs = [
        Bar(
            name.replace("safetensors load, ", "load, "),
            *(statistics.median(pair[0][k] for pair in pairs) for k in (0, 1)),
        )
        for name, pairs in peers.items()
        if ".ckpt" not in name
    ]
    found.append((f"MindSpore ranks, 8 → 4, safetensors, {size}", [ours(rows["same"]), *theirs]))
    torch = [Bar("PyTorch 2.13", *(statistics.median(one[k] for one in rows["dcp-hf"]["torch"]) for k in (2, 3)))]
    found.append((f"PyTorch DCP of 8 ranks → Hugging Face set, {size}", [ours(rows["dcp-hf"]), *torch]))
    return found


def ours(row: dict[str, Any]) -> Bar:
    """Return our figures of a row."""
    return Bar("reshard", statistics.median(row["seconds"]), row["peak"])


def memory_text(nbytes: float) -> str:
    """Write bytes in MB or GB."""
    return f"{nbytes / 1e6:.0f} MB" if nbytes < 1e9 else f"{nbytes / 1e9:.1f} GB"


def picture(recorded: dict[str, Any]) -> str:
    """Return the SVG."""
    jobs = groups(recorded)
    slowest = max(bar.seconds for _, bars in jobs for bar in bars)
    largest = max(bar.peak for _, bars in jobs for bar in bars)
    second = LABEL + BAR + NUMBER + GAP
    width = second + BAR + NUMBER
    parts, y = [], 20
    text(parts, LABEL, y, "time", "head")
    text(parts, second, y, "peak memory", "head")
    y += 8
    for title, bars in jobs:
        y += HEAD - 8
        text(parts, 0, y, title, "head")
        for bar in bars:
            y += ROW
            kind = "ours" if bar.name == "reshard" else "theirs"
            text(parts, 0, y, bar.name)
            for x, share, number in (
                (LABEL, bar.seconds / slowest, f"{bar.seconds:.1f} s"),
                (second, bar.peak / largest, memory_text(bar.peak)),
            ):
                long = max(2, round(BAR * share))
                parts.append(f'<rect class="{kind}" x="{x}" y="{y - 12}" width="{long}" height="15" rx="2"/>')
                text(parts, x + long + 6, y, number)
    y += HEAD
    text(parts, 0, y, f"reshard {recorded['version']}, medians, {recorded['machine']}, {recorded['date']}", "small")
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y + 12}" width="{width}" height="{y + 12}">'
    return "\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>", ""])


def text(parts: list[str], x: int, y: int, content: str, kind: str = "") -> None:
    """Add a text to the picture."""
    of_kind = f' class="{kind}"' if kind else ""
    parts.append(f'<text{of_kind} x="{x}" y="{y}">{escape(content)}</text>')


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS / "benchmark.svg"
    target.write_text(picture(json.loads((DOCS / "benchmarks.json").read_text())))
