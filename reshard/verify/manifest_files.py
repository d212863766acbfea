"""Making a manifest of files, and comparing files with one: each byte is read once, on some threads."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from reshard.dtypes import STR
from reshard.errors import SourceError
from reshard.formats import index_file
from reshard.formats.entries import FileIndex, ranges
from reshard.layout.block import shape_text
from reshard.source.headers import gaps
from reshard.storage.crc32c import combine_ranges, crc32c
from reshard.storage.places import any_store
from reshard.storage.threads import each
from reshard.verify.difference import Difference
from reshard.verify.manifest import Manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reshard.formats.entries import Entry, Runs
    from reshard.source.checkpoint import SourceFile
    from reshard.verify.difference import Kind
    from reshard.verify.manifest import FileSums

TASK_BYTES = 64 << 20
BAND_BYTES = 1 << 20
"""How much is read at once: what the processor's cache still holds when it is summed."""


class _Range(NamedTuple):
    """A range of the contents of one tensor in one file; without a name, of all that is not contents."""

    path: str
    name: str | None
    runs: Runs
    begin: int
    nbytes: int


class Summed(NamedTuple):
    """The checksums of tensors in files, and of the rest of files, by path and name, and how many bytes were read."""

    sums: Mapping[tuple[str, str | None], int]
    read: int


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
    root: Path,
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
        others: paths below it of files that are no checkpoints, such as the index of a set.
        threads: how many read.
        progress: called with the bytes read and the bytes to be read.

    Raises:
        SourceError: a file cannot be read, or is shorter than its header says.
    """
    top = root.absolute()
    paths = {file.path: Path(file.path).relative_to(top).as_posix() for file in files}
    sizes = {file.path: file.nbytes for file in files}
    sizes |= {place: Path(place).stat().st_size for place in (str(top / name) for name in others)}
    paths |= {str(top / name): name for name in others}
    indexed = {file.path: file.index for file in files}
    rest = {place: gaps(indexed[place], n) if place in indexed else ((0, n),) for place, n in sizes.items()}
    summed = _summed({place: index.entries for place, index in indexed.items()}, rest, threads, progress)
    tensors = {
        paths[file.path]: {
            name: (entry.dtype, shape_of(entry), summed.sums[file.path, name])
            for name, entry in file.index.entries.items()
        }
        for file in files
    }
    nbytes = {paths[place]: size for place, size in sizes.items()}
    return Manifest.of(tensors, nbytes, {path: summed.sums[place, None] for place, path in paths.items()})


def check_files(
    root: Path, manifest: Manifest, *, partial: bool, threads: int, progress: Callable[[int, int], None]
) -> Checked:
    """Compare the files below a directory with a manifest; nothing else is needed.

    Args:
        root: the directory.
        manifest: says what the files hold.
        partial: files may be lacking.
        threads: how many read.
        progress: called with the bytes read and the bytes to be read.
    """
    top = root.resolve()
    differences: list[Difference] = []
    paths: dict[str, str] = {}  # of the manifest, by where the file is
    indexed: dict[str, Mapping[str, Entry]] = {}
    rest: dict[str, Runs] = {}
    for path, file in manifest.files.items():
        place = top / path
        if partial and not os.path.lexists(place):
            continue
        paths[str(place)] = path
        fault = _file_fault(top, place, file)
        if fault is not None:
            differences.append(replace(fault, path=path))
        elif not file.tensors:
            rest[str(place)] = ((0, file.nbytes),)
        else:
            before = len(differences)
            index, indexed[str(place)] = _entries(path, str(place), file, differences)
            if len(differences) == before:  # or the header is known to be another
                rest[str(place)] = gaps(index, file.nbytes)
    summed = _summed(indexed, rest, threads, progress)
    for (where, name), found in summed.sums.items():
        file = manifest.files[paths[where]]
        expected = file.crc32c if name is None else file.tensors[name].crc32c
        if found != expected:
            what = "the header, or what else is not contents, " if name is None and file.tensors else ""
            text = f"{what}has the CRC-32C {found:08x}; expected {expected:08x}"
            differences.append(Difference("checksum", text, name, path=paths[where]))
    return Checked(tuple(differences), tuple(paths.values()), summed.read)


def sum_entries(indexed: Mapping[str, Mapping[str, Entry]], *, threads: int) -> Mapping[tuple[str, str], int]:
    """Read some tensors' parts in files, and return their checksums by path and name.

    Args:
        indexed: path to name to what the file holds of the tensor.
        threads: how many read.

    Raises:
        SourceError: a file cannot be read, or is shorter than was said.
    """
    sums = _summed(indexed, {}, threads, lambda _done, _total: None).sums
    return {(path, name): value for (path, name), value in sums.items() if name is not None}


def _file_fault(top: Path, place: Path, file: FileSums) -> Difference | None:
    """Tell what is wrong with a file as a whole."""
    if not os.path.lexists(place):
        return Difference("file", "is not there")
    if not place.resolve().is_relative_to(top):
        return Difference("file", "leads out of the directory, and is not followed")
    if not place.is_file():
        return Difference("file", "is no regular file")
    nbytes = place.stat().st_size
    return None if nbytes == file.nbytes else Difference("size", f"has {nbytes} bytes; expected {file.nbytes}")


def _entries(
    path: str, place: str, file: FileSums, differences: list[Difference]
) -> tuple[FileIndex, dict[str, Entry]]:
    """Return what a file holds, and of it the tensors that are worth summing; all else becomes a difference."""
    found: dict[str, Entry] = {}
    try:
        index = index_file(place)
    except SourceError as error:
        differences.append(Difference("file", f"cannot be read: {error}", path=path))
        return FileIndex("", {}), found
    entries = index.entries
    for name, part in file.tensors.items():
        entry = entries.get(name)
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
        for name in entries
        if name not in file.tensors
    ]
    return index, found


def shape_of(entry: Entry) -> tuple[int, ...]:
    """Return the shape of what a file has; formats differ in what they say of text."""
    return () if entry.dtype is STR else entry.shape


def _summed(
    indexed: Mapping[str, Mapping[str, Entry]],
    rest: Mapping[str, Runs],
    threads: int,
    progress: Callable[[int, int], None],
) -> Summed:
    """Sum the contents of tensors in files, and the ranges that are the rest of files."""
    tasks: list[list[_Range]] = [[]]
    sums: dict[tuple[str, str | None], int] = {}
    wanted: list[tuple[str, str | None, Runs]] = [(path, None, runs) for path, runs in rest.items()]
    for path, entries in indexed.items():
        for name, entry in entries.items():
            if entry.text is not None:
                sums[path, name] = crc32c(entry.text.encode())
            else:
                wanted.append((path, name, entry.runs))
    room = TASK_BYTES
    total = 0
    for path, part, runs in wanted:
        sums[path, part] = 0  # of no bytes
        nbytes = sum(length for _, length in runs)
        for begin in range(0, nbytes, TASK_BYTES):
            one = _Range(path, part, runs, begin, min(TASK_BYTES, nbytes - begin))
            if one.nbytes > room:
                tasks.append([])
                room = TASK_BYTES
            tasks[-1].append(one)
            room -= one.nbytes
        total += nbytes
    found: dict[tuple[str, str | None], list[tuple[int, int, int]]] = {}
    read = 0
    scratch = threading.local()

    def add(summed: list[tuple[_Range, int]]) -> None:
        nonlocal read
        for one, value in summed:
            found.setdefault((one.path, one.name), []).append((one.begin, one.nbytes, value))
            read += one.nbytes
        progress(read, total)

    try:
        each(lambda task: _task(task, scratch), tasks, threads, add)
    finally:
        any_store().close()
    sums |= {key: combine_ranges(some) for key, some in found.items()}
    return Summed(sums, read)


def _task(task: Sequence[_Range], scratch: threading.local) -> list[tuple[_Range, int]]:
    """Return each range with its sum."""
    if not hasattr(scratch, "buffer"):
        scratch.buffer = memoryview(bytearray(BAND_BYTES))
    summed = []
    for one in task:
        value = 0
        for begin in range(one.begin, one.begin + one.nbytes, BAND_BYTES):
            band = scratch.buffer[: min(BAND_BYTES, one.begin + one.nbytes - begin)]
            any_store().read(
                [(one.path, offset, band[start:stop]) for offset, start, stop in ranges(one.runs, begin, len(band))]
            )
            value = crc32c(band, value)
        summed.append((one, value))
    return summed
