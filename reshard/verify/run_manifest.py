"""The manifest of what a run wrote: what the files hold is known from their layouts, the checksums from the receipts.

All that is not contents of tensors is in the plan, too: the literals of a layout, one behind the other.

Only a block whose receipts do not make it up (one that was written twice around a crash,
or by a run without checksums) is read from the disk.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from reshard.errors import UsageError
from reshard.formats.entries import Entry
from reshard.run.ledger import Checksums
from reshard.storage.crc32c import crc32c
from reshard.storage.small import refuse_inputs
from reshard.verify.manifest import FileSums, Manifest, Part, write_manifest
from reshard.verify.manifest_files import sum_entries

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from reshard.formats.entries import FileLayout
    from reshard.plan.plan import TargetFile
    from reshard.run.run import Report

_MOST_THREADS = 4


def manifest_of(
    report: Report, path: str | os.PathLike[str] | None = None, *, overwrite: bool = False
) -> Manifest | int:
    """Return the manifest of what a run wrote; with a path, write it file by file, and return its number of checksums.

    Raises:
        UsageError: there are no checksums: of a run without them or without a journal, into a zarr store, or of files
            that are coded.
        SourceError: a block must be read for its sum, and cannot be.
        TargetError: the manifest exists, cannot be written, or is a target file or a source file.
    """
    sums = report.checksums
    if not isinstance(sums, Checksums):
        raise UsageError(
            f"{report.directory}: no checksums were made for a manifest; run with checksums=True and a journal, "
            "or read the files with reshard.make_manifest"
        )
    found = sums_of_files(sums.root, sums.files, sums)
    if path is None:
        return Manifest(dict(found))
    advice = "choose another name for the manifest"
    refuse_inputs([path], sums.sources, "one of the source files", advice)
    refuse_inputs([path], [f"{sums.root}/{file}" for file in report.files], "one of the target files", advice)
    return write_manifest(found, path, overwrite=overwrite)


def sums_of_files(
    root: str, files: Iterable[TargetFile], sums: Mapping[str, Mapping[str, int]]
) -> Iterator[tuple[str, FileSums]]:
    """Yield the path and the sums of files that are written, in the order of their paths: what a manifest has of them.

    They are made one file at a time, so that no more is held than of one.

    Args:
        root: the directory that the files are in.
        files: those of a plan.
        sums: for each of them, by its path, the CRC-32C of the contents of its tensors, as far as they are known.

    Raises:
        SourceError: a block must be read for its sum, and cannot be.
    """
    known: dict[FileLayout, int] = {}  # of a layout's literals
    threads = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
    for file in sorted(files, key=lambda file: file.path):
        layout = file.layout
        if layout not in known:
            known[layout] = crc32c(b"".join(content for _, content in sorted(layout.literals)))
        given = sums[file.path]
        place = f"{root}/{file.path}"
        left = {
            content.name: Entry(content.dtype, content.shape, content.runs)
            for content in layout.contents
            if content.text is None and content.name not in given
        }
        read = sum_entries({place: left}, threads=threads) if left else {}
        parts = {
            content.name: Part(
                content.dtype,
                content.shape,
                crc32c(content.text.encode())
                if content.text is not None
                else read[place, content.name]
                if content.name in left
                else given[content.name],
            )
            for content in layout.contents
        }
        yield file.path, FileSums(layout.size, known[layout], parts)
