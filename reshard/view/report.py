"""The report at the end of a run: what was read and written, how fast, in how much memory, how to verify it.

Pure functions over `run.Report`, in words it fits on one screen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.view.checkpoints import looked_text
from reshard.view.folding import ranges_text
from reshard.view.plans import plan_data
from reshard.view.words import bytes_text, count_text, list_text, printable

if TYPE_CHECKING:
    from reshard.plan.plan import Plan
    from reshard.run.run import Report


def report_text(
    plan: Plan, report: Report, verify: str | None = None, manifest: str | None = None, check: str | None = None
) -> str:
    """Write in words what a run did.

    Args:
        plan: what was run.
        report: what came of it.
        verify: the command that verifies the result, to be copied as it is.
        manifest: the manifest that was written, and what is in it.
        check: the command that compares the files with it, likewise.
    """
    commands = [
        *([f"manifest: {printable(manifest)}"] if manifest else []),
        *([f"to verify it: {printable(verify)}"] if verify else []),
        *([f"to check it against the manifest: {printable(check)}"] if check else []),
    ]
    rate = report.bytes_written / report.seconds if report.seconds else 0
    if report.finished == len(report.files):
        done = (
            f"nothing is left to do: {count_text(len(report.files), 'file')} ({plan.format}) in "
            f"{printable(report.directory)}, finished by an earlier run"
        )
        return "\n".join([done, _unread_text(report, verify), *commands])
    wrote = bytes_text(report.bytes_written if report.resumed or report.finished else report.target_bytes)
    looked = looked_text(plan.source.looked)
    links = f", {count_text(report.links, 'file')} linked" if report.links else ""
    return "\n".join(
        [
            (
                f"wrote {count_text(len(report.files), 'file')} ({plan.format}) for "
                f"{count_text(len(plan.ranks), 'rank')} ({ranges_text(plan.ranks)}) to {printable(report.directory)}"
            ),
            (
                f"read {bytes_text(report.bytes_read)} from {count_text(report.source_files, 'file')}, "
                f"wrote {wrote} in {report.seconds:.2f} s ({bytes_text(rate)}/s)"
            ),
            *([f"resumed from {bytes_text(report.resumed)} that an earlier run wrote"] if report.resumed else []),
            *([_unread_text(report, verify)] if report.finished else []),
            f"{count_text(report.tensors, 'tensor')}, {count_text(report.replicas, 'replica')} of their blocks{links}",
            f"dropped, because the target does not have it: {_names_or_none(report.dropped)}",
            f"missing, because the source does not have it: {_names_or_none(report.missing)}",
            *([f"sampled, when the source was opened: {looked}"] if looked else []),
            f"checksums: {_checksums_text(report)}",
            f"memory: {bytes_text(report.peak_memory)} at the peak of this process",
            *commands,
        ]
    )


def _unread_text(report: Report, verify: str | None) -> str:
    """Say of finished files that what their contents are now is not known: they may have rotted on the disk."""
    how = "the command below reads" if verify else "reshard verify reads"
    files = "file" if report.finished == 1 else "files"
    return (
        f"not read again: {report.finished:,} finished {files}, whose size and time are as the earlier run noted them; "
        f"{how} every bit"
    )


def _names_or_none(found: tuple[str, ...]) -> str:
    return list_text(found) if found else "none"


def _checksums_text(report: Report) -> str:
    if report.checksums is None:
        return "none made"
    return f"CRC-32C of every block, in {printable(report.directory)}/.reshard"


def report_data(
    plan: Plan, directory: str, report: Report | None = None, verify: str | None = None, check: str | None = None
) -> dict[str, object]:
    """Return a plan and the report of its run as plain data; the keys are the same before a run (null) and after.

    The two commands are those of `report_text`.
    """
    data = plan_data(plan, directory, report)
    data["replicas"] = plan.replicas
    data["links"] = sum(file.link is not None for file in plan.files)
    data["measured_memory"] = report and report.peak_memory
    data["checksums"] = report and _checksums_data(report)
    data["resumed"] = report and report.resumed
    data["finished"] = report and report.finished
    data["verify"] = report and verify
    data["manifest"] = report and check
    return data


def _checksums_data(report: Report) -> dict[str, dict[str, str]] | None:
    if report.checksums is None:
        return None
    return {
        path: {name: f"{checksum:08x}" for name, checksum in tensors.items()}
        for path, tensors in report.checksums.items()
    }
