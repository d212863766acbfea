"""Compare files with a manifest: their sizes, the tensors in their headers, and the checksums of all bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.core.layout.block import shape_text
from reshard.core.model.digests import gaps
from reshard.core.model.entries import FileIndex
from reshard.core.rank_files import EXTENSIONS
from reshard.core.records.logs import leftovers
from reshard.core.storage.base import truncated_text
from reshard.core.storage.places import workers_at
from reshard.core.storage.threads import map_ordered
from reshard.core.verify.difference import Difference
from reshard.core.verify.manifest import Manifest, shape_of
from reshard.core.verify.sums import sum_entries
from reshard.core.verify.verification import Comparison, Counts, Verification
from reshard.errors import SourceError, names
from reshard.kits.files import index_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.core.model.entries import Entry, Runs
    from reshard.core.storage.places import AnyName, Place
    from reshard.core.verify.difference import Kind
    from reshard.core.verify.manifest import FileSums
    from reshard.core.verify.sums import OnProgress


def verify_files(
    target: Place, manifest: Manifest | AnyName, *, partial: bool, threads: int, progress: OnProgress
) -> Verification:
    """Compare files with a manifest.

    Args:
        target: their directory, or a file in it.
        manifest: the manifest, or its path.
        partial: files may be missing.
        threads: number of reading threads.
        progress: called with the bytes read and the bytes to be read.
    """
    expected = manifest if isinstance(manifest, Manifest) else Manifest.read(manifest)
    target.refresh()
    root = target if target.is_dir() else target.parent
    warnings = leftovers(target)
    in_directory = [path for path in root.files() if path.suffix in EXTENSIONS] if root == target else []
    unlisted = sorted({path.relative_to(str(root)).as_posix() for path in in_directory} - set(expected.files))
    warnings += [f"{names(unlisted, most=3)}: not in the manifest, and not checked"] if unlisted else []
    top = root.real()
    differences: list[Difference] = []
    files: list[FileSums] = []
    contents: dict[str, tuple[Mapping[str, Entry], Runs | None]] = {}
    places = [top / path for path in expected.files]
    indexes = map_ordered(lambda path: _look(top, path, expected), places, workers_at(places))
    for (path, file), index in zip(expected.files.items(), indexes, strict=True):
        if index is None and partial:
            continue
        files.append(file)
        if index is None:
            differences.append(Difference("file", "is not there", path=path))
        elif isinstance(index, Difference):
            differences.append(index)
        else:
            entries, faults = _entries(path, index, file)
            differences += faults
            # With faults, the header is known to differ: there is no need to sum it.
            contents[path] = entries, None if faults else gaps(index, file.nbytes)
    sums, read = sum_entries(top, contents, threads, progress)
    for (path, name), value in sums.items():
        file = expected.files[path]
        expected_sum = file.crc32c if name is None else file.tensors[name].crc32c
        if value != expected_sum:
            subject = "the header, or what else is not contents, " if name is None and file.tensors else ""
            text = f"{subject}has the CRC-32C {value:08x}; expected {expected_sum:08x}"
            differences.append(Difference("checksum", text, name, path=path))
    if len(files) < len(expected.files):
        absent = len(expected.files) - len(files)
        warnings.append(f"{absent} of the {len(expected.files)} files of the manifest are not here")
    tensors = [name for file in files for name in file.tensors]
    return Verification(
        str(target),
        counts=Counts(len(files), len(set(tensors)), len(tensors), read, read),
        compared=Comparison("a manifest" if isinstance(manifest, Manifest) else str(manifest)),
        differences=tuple(differences),
        warnings=tuple(warnings),
    )


def _look(top: Place, file_path: Place, manifest: Manifest) -> FileIndex | Difference | None:
    """Return the index of a file, or a fault of the file; None if it is missing."""
    if not file_path.is_there():
        return None
    path = file_path.relative_to(str(top)).as_posix()
    file = manifest.files[path]
    if not file_path.real().is_relative_to(str(top)):
        return Difference("file", "leads out of the directory, and is not followed", path=path)
    if not file_path.is_file():
        return Difference("file", "is not a regular file", path=path)
    try:
        if (nbytes := file_path.status().nbytes) != file.nbytes:
            fault = f"has {nbytes} bytes; expected {file.nbytes}"
            fault = truncated_text(nbytes, file.nbytes) if nbytes < file.nbytes else fault
            return Difference("size", fault, path=path)
        return index_file(str(file_path)) if file.tensors else FileIndex("", {})
    except SourceError as error:
        return Difference("file", f"cannot be read: {error.message}", path=path)


def _entries(path: str, index: FileIndex, file: FileSums) -> tuple[dict[str, Entry], list[Difference]]:
    """Return the tensors that match the manifest, and the differences of others."""
    matching: dict[str, Entry] = {}
    differences: list[Difference] = []
    for name, part in file.tensors.items():
        entry = index.entries.get(name)
        if entry is None:
            differences.append(Difference("missing", "is not in the file", name=name, path=path))
        elif (entry.dtype, shape_of(entry)) != part[:2]:
            fault = f"is {entry.dtype} {shape_text(shape_of(entry))}; expected {part.dtype} {shape_text(part.shape)}"
            kind: Kind = "dtype" if entry.dtype is not part.dtype else "shape"
            differences.append(Difference(kind, fault, name=name, path=path))
        else:
            matching[name] = entry
    differences += [
        Difference("extra", "is in the file, not in the manifest", name=name, path=path)
        for name in index.entries
        if name not in file.tensors
    ]
    return matching, differences
