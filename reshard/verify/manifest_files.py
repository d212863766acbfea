"""Manifests of files that are read, and of what a run wrote; and comparing files with one.

What files hold that a run wrote is known from their layouts, the checksums from its receipts; what is not contents of
tensors is in the plan, too: the literals of a layout, one behind the other. Only a block whose receipts do not make it
up (one that was written twice around a crash, or by a run without checksums) is read again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from reshard.dtypes import STR
from reshard.errors import SourceError, UsageError
from reshard.formats import index_file
from reshard.formats.entries import FileIndex
from reshard.layout.block import shape_text
from reshard.source.headers import gaps
from reshard.storage.crc import crc32c
from reshard.storage.places import as_place, of_each
from reshard.storage.small import refuse_inputs
from reshard.verify.difference import Difference
from reshard.verify.manifest import FileSums, Manifest, Part, write_manifest
from reshard.verify.sums import sum_contents, thread_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from reshard.formats.entries import Entry, FileLayout, Runs
    from reshard.run.run import Report
    from reshard.source.checkpoint import SourceFile
    from reshard.storage.places import AnyName, Place
    from reshard.targets.destination import TargetFile
    from reshard.verify.difference import Kind


class Checked(NamedTuple):
    """What comparing files with a manifest found.

    Attributes:
        differences: what is not as the manifest says.
        paths: the files that were checked, as the manifest calls them.
        read: how many bytes were read.
    """

    differences: tuple[Difference, ...]
    paths: tuple[str, ...]
    read: int


def sum_files(
    root: Place,
    files: Sequence[SourceFile],
    others: Sequence[str],
    *,
    threads: int,
    progress: Callable[[int, int], None],
) -> Manifest:
    """Read files, and return their manifest.

    Args:
        root: the directory that the paths of the manifest go out from.
        files: the checkpoint files below it.
        others: paths below it of files that are not checkpoints, such as the index of a set.
        threads: how many read.
        progress: called with the bytes read and the bytes to be read.

    Raises:
        SourceError: a file cannot be read, or is shorter than its header says.
    """
    top = root.absolute()
    paths = {file.path: as_place(file.path).relative_to(str(top)).as_posix() for file in files}
    held = {paths[file.path]: (file.index.entries, gaps(file.index, file.nbytes)) for file in files}
    sizes = {paths[file.path]: file.nbytes for file in files}
    for name in others:
        sizes[name] = (top / name).status().nbytes
        held[name] = {}, ((0, sizes[name]),)
    sums, _ = _sums(top, held, threads, progress)
    tensors = {
        path: {name: (entry.dtype, shape_of(entry), sums[path, name]) for name, entry in entries.items()}
        for path, (entries, _) in held.items()
    }
    return Manifest.of(tensors, sizes, {path: sums[path, None] for path in held})


def check_files(
    root: Place, manifest: Manifest, *, partial: bool, threads: int, progress: Callable[[int, int], None]
) -> Checked:
    """Compare the files below a directory with a manifest; nothing else is needed.

    Args:
        root: the directory.
        manifest: says what the files hold.
        partial: files may be lacking.
        threads: how many read.
        progress: called with the bytes read and the bytes to be read.
    """
    top = root.real()
    places = [top / path for path in manifest.files]
    differences: list[Difference] = []
    paths: list[str] = []
    held: dict[str, tuple[Mapping[str, Entry], Runs | None]] = {}
    found = of_each(lambda place: _look(top, place, manifest), places)
    for (path, file), one in zip(manifest.files.items(), found, strict=True):
        if one is None and partial:
            continue
        paths.append(path)
        if one is None:
            differences.append(Difference("file", "is not there", path=path))
        elif isinstance(one, Difference):
            differences.append(one)
        else:
            entries, faults = _entries(path, one, file)
            differences += faults
            held[path] = entries, None if faults else gaps(one, file.nbytes)  # or the header is known to be another
    sums, read = _sums(top, held, threads, progress)
    for (path, name), value in sums.items():
        file = manifest.files[path]
        expected = file.crc32c if name is None else file.tensors[name].crc32c
        if value != expected:
            what = "the header, or what else is not contents, " if name is None and file.tensors else ""
            text = f"{what}has the CRC-32C {value:08x}; expected {expected:08x}"
            differences.append(Difference("checksum", text, name, path=path))
    return Checked(tuple(differences), tuple(paths), read)


def _look(top: Place, place: Place, manifest: Manifest) -> FileIndex | Difference | None:
    """Return what a file holds, or what is wrong with it as a whole; None where it is not there."""
    if not place.is_there():
        return None
    path = place.relative_to(str(top)).as_posix()
    file = manifest.files[path]
    if not place.real().is_relative_to(str(top)):
        return Difference("file", "leads out of the directory, and is not followed", path=path)
    if not place.is_file():
        return Difference("file", "is not a regular file", path=path)
    try:
        if (nbytes := place.status().nbytes) != file.nbytes:
            return Difference("size", f"has {nbytes} bytes; expected {file.nbytes}", path=path)
        return index_file(str(place)) if file.tensors else FileIndex("", {})
    except SourceError as error:
        return Difference("file", f"cannot be read: {error.message}", path=path)


def _entries(path: str, index: FileIndex, file: FileSums) -> tuple[dict[str, Entry], list[Difference]]:
    """Return the tensors of a file that are worth summing, and in what its header differs from the manifest."""
    found: dict[str, Entry] = {}
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
            found[name] = entry
    differences += [
        Difference("extra", "is in the file, not in the manifest", name=name, path=path)
        for name in index.entries
        if name not in file.tensors
    ]
    return found, differences


def shape_of(entry: Entry) -> tuple[int, ...]:
    """Return the shape of what a file has; formats differ in what they say of text."""
    return () if entry.dtype is STR else entry.shape


def _sums(
    top: Place,
    held: Mapping[str, tuple[Mapping[str, Entry], Runs | None]],
    threads: int,
    progress: Callable[[int, int], None],
) -> tuple[dict[tuple[str, str | None], int], int]:
    """Return the checksums of tensors in files, and of the rest of files, without a name; and how much was read."""
    sums: dict[tuple[str, str | None], int] = {}
    wanted: list[tuple[tuple[str, str | None], str, Runs]] = []
    for path, (entries, rest) in held.items():
        place = str(top / path)
        if rest is not None:
            wanted.append(((path, None), place, rest))
        for name, entry in entries.items():
            if entry.text is None:
                wanted.append(((path, name), place, entry.runs))
            else:
                sums[path, name] = crc32c(entry.text.encode())
    found, read = sum_contents(wanted, threads=threads, on_progress=progress)
    return sums | found, read


def manifest_of(report: Report, path: AnyName | None = None, *, overwrite: bool = False) -> Manifest | int:
    """Return the manifest of what a run wrote; with a path, write it file by file, and return its number of checksums.

    Raises:
        UsageError: there are no checksums: of a run without them or without a ledger, into a zarr store, or of files
            that are encoded.
        SourceError: a block must be read for its sum, and cannot be.
        TargetError: the manifest exists, cannot be written, or is a target file or a source file.
    """
    from reshard.run.ledger import Checksums  # a run has it; to verify takes none of its modules

    sums = report.checksums
    if not isinstance(sums, Checksums):
        raise UsageError(
            f"the run into {report.directory} made no checksums for a manifest",
            code="no-checksums",
            hint="run with checksums=True and a ledger, or read the files with reshard.make_manifest",
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
    for file in sorted(files, key=lambda file: file.path):
        layout = file.layout
        if layout not in known:
            known[layout] = crc32c(b"".join(content for _, content in sorted(layout.literals)))
        given = sums[file.path]
        left = [
            (content.name, f"{root}/{file.path}", content.runs)
            for content in layout.contents
            if content.text is None and content.name not in given
        ]
        read, _ = sum_contents(left, threads=thread_count(None)) if left else ({}, 0)
        parts = {
            content.name: Part(
                content.dtype,
                content.shape,
                crc32c(content.text.encode())
                if content.text is not None
                else read[content.name]
                if content.name in read
                else given[content.name],
            )
            for content in layout.contents
        }
        yield file.path, FileSums(layout.size, known[layout], parts)
