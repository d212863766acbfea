"""Plans, in words and as plain data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.view.checkpoints import files_text, looked_data, looked_text
from reshard.view.folding import ranges_text
from reshard.view.words import bytes_text, count_text, list_text, printable

if TYPE_CHECKING:
    from reshard.plan.plan import Plan
    from reshard.run.run import Report

_MOST_FILES = 8


def plan_text(plan: Plan, directory: str) -> str:
    """Write what a plan would do."""
    stats = plan.stats
    rows = [
        ("from", files_text(plan.source.root, plan.source.files, plan.source.ranks)),
        (
            "to",
            (
                f"{printable(directory)}: {count_text(stats.target_files, 'file')} ({plan.format}), "
                f"{count_text(len(plan.ranks), 'rank')} ({ranges_text(plan.ranks)})"
            ),
        ),
        ("tensors", f"{stats.tensors:,}"),
        (
            "read",
            (
                f"{bytes_text(stats.bytes_read)} from {count_text(stats.source_files, 'file')}, "
                f"{stats.read_amplification:.2f} x what is needed"
            ),
        ),
        ("write", f"{bytes_text(stats.target_bytes)} to {count_text(stats.target_files, 'file')}"),
        ("tasks", f"{stats.tasks:,}{', each of which writes whole files' if plan.groups else ''}"),
        ("memory", f"about {bytes_text(stats.peak_memory)} at the peak"),
        ("dropped", list_text(plan.dropped) if plan.dropped else "none"),
        ("missing", list_text(plan.missing) if plan.missing else "none"),
    ]
    if looked := looked_text(plan.source.looked):
        rows.append(("sampled", looked))
    for number, file in enumerate(plan.files[:_MOST_FILES]):
        path = printable(f"{directory}/{file.path}")
        rows.append(("" if number else "files", f"{path}  {bytes_text(file.layout.size)}"))
    if len(plan.files) > _MOST_FILES:
        rows.append(("", f"and {len(plan.files) - _MOST_FILES:,} more"))
    return "\n".join(f"{title:<8} {text}" for title, text in rows)


def plan_data(plan: Plan, directory: str, report: Report | None = None) -> dict[str, object]:
    """Return a plan, and what came of it, as plain data: the same keys before a run (`seconds` is null) and after."""
    stats = plan.stats._asdict()
    if report is not None:
        stats["bytes_read"] = report.bytes_read
    return {
        "dry_run": report is None,
        "source": plan.source.root,
        "target": directory,
        "format": plan.format,
        "ranks": list(plan.ranks),
        **stats,
        "ownership": "file" if plan.groups else "tensor",
        "read_amplification": plan.stats.read_amplification,
        "seconds": None if report is None else report.seconds,
        "dropped": list(plan.dropped),
        "missing": list(plan.missing),
        "notices": list(plan.notices),
        "sampled": looked_data(plan.source.looked),
        "files": [{"rank": file.rank, "path": file.path, "nbytes": file.layout.size} for file in plan.files],
    }
