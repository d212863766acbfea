"""The manifest that a command that writes leaves beside: where it may go, and its writing when all else is done."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.errors import ReshardError, UsageError
from reshard.source.open import files_read
from reshard.storage.small import refuse_existing, refuse_inputs

if TYPE_CHECKING:
    from pathlib import Path

    from reshard.plan.plan import Plan
    from reshard.run.run import Report
    from reshard.storage.places import Place


def check_place(path: Path | None, *, overwrite: bool) -> None:
    """Refuse a manifest that could not be written, before anything is.

    Raises:
        TargetError: the manifest is there already, or a directory is.
    """
    if path is not None:
        refuse_existing(path, overwrite=overwrite)


def check_plan(path: Path | None, plan: Plan, target: Place) -> None:
    """Refuse a manifest that would stand in place of a file of the run, or that no files are for.

    Raises:
        UsageError: the target is a zarr store.
        TargetError: the manifest's path is that of a target file or of a source file.
    """
    if path is None:
        return
    if plan.alone:
        raise UsageError(
            f"--write-manifest is of checkpoint files, and {target} becomes a zarr store; leave it out, and compare "
            "the store with its source by `reshard verify --against`"
        )
    advice = "choose another name for the manifest"
    refuse_inputs([path], files_read(plan.source.root, plan.source.files), "one of the source files", advice)
    refuse_inputs([path], [f"{target}/{file.path}" for file in plan.files], "one of the target files", advice)


def write(path: Path, report: Report, *, overwrite: bool) -> str:
    """Write the manifest of a run that is done, and return what to say of it."""
    from reshard.view.words import count_text  # not on every start

    try:
        count = report.write_manifest(path, overwrite=overwrite)
    except ReshardError as error:
        error.add_note("the target files are complete; the same command, without --restart, makes the manifest alone")
        raise
    return f"{path}, {count_text(count, 'checksum')} of {count_text(len(report.files), 'file')}"
