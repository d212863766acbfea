"""Manifests: the sizes of files, and checksums of tensors and all other bytes.

A manifest accompanies files that leave the machine: they can be checked with it alone, without a strategy. Its JSON:

    {"reshard_manifest": 2,
     "files": {
       "rank_0/checkpoint_0.ckpt": {
         "nbytes": 8237, "crc32c": "0d4f5e11", "tensors": {"w": ["float32", [2, 8], "8a9136aa"]}},
       "param_name_map.json": {"nbytes": 312, "crc32c": "62a8ab43"}}}

with paths below the directory, and the CRC-32C of the contents of each tensor in the file, row-major, little-endian, or
of the UTF-8 bytes of a `str` entry. The `crc32c` of the file covers all its bytes outside of tensor contents, from
first to last: the header with all notes, `str` entries as they are stored, padding and trailers; so every bit of a file
has a checksum. A file without tensors (the index of a set) has only this one.

A manifest is made from files, or from a run. The contents of files that a run wrote are known from their layouts, the
checksums of tensors from its receipts, and the remaining bytes from the plan: the literals of a layout in order. A
block is read again only if receipts do not cover it (because it was written twice around a crash, or by a run without
checksums).
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Annotated, NamedTuple

from reshard.arguments import checked
from reshard.core.format import marked
from reshard.core.layout.block import LONGEST_NAME
from reshard.core.listing import RANK_PATTERN
from reshard.core.model.digests import gaps
from reshard.core.open import read_headers
from reshard.core.records.schema import FormatError, Kind
from reshard.core.records.schema import read as read_record
from reshard.core.storage.crc import crc32c
from reshard.core.storage.places import as_place
from reshard.core.storage.small import parse_json, read_small, refuse_existing, refuse_inputs, write_whole
from reshard.core.verify.sums import progress_callback, sum_contents, sum_entries, thread_count
from reshard.dtypes import BY_NAME, STR, DType
from reshard.errors import EncryptedError, Faults, SourceError, UsageError, names
from reshard.kits.indexes import set_indexes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from reshard.core.layout.block import Shape
    from reshard.core.model.checkpoint import SourceFile
    from reshard.core.model.entries import Entry, FileLayout
    from reshard.core.run.settings import Progress, Report
    from reshard.core.storage.places import AnyName, Place
    from reshard.core.target import TargetFile
    from reshard.core.verify.sums import OnProgress

VERSION = 2

_VERSION_KEY = "reshard_manifest"
_LARGEST = 1 << 28
_MOST_DIMS = 64


def _is_sum(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{8}", value) is not None


def _is_shape(value: object) -> bool:
    return (
        isinstance(value, list) and len(value) <= _MOST_DIMS and all(type(n) is int and 0 <= n < 1 << 62 for n in value)
    )


_Size = Annotated[int, Kind("a size in bytes", lambda value: type(value) is int and 0 <= value < 1 << 62)]
_Sum = Annotated[int, Kind("a CRC-32C, such as '8a9136aa'", _is_sum, lambda value: int(value, 16))]
_Shape = Annotated[tuple[int, ...], Kind("a shape, such as [2, 8]", _is_shape, tuple)]
_DType = Annotated[
    DType, Kind("a dtype", lambda value: isinstance(value, str) and value in BY_NAME, lambda value: BY_NAME[value])
]


class PartSum(NamedTuple):
    """The part of a tensor in a file: dtype, shape and the CRC-32C of the bytes."""

    dtype: _DType
    shape: _Shape
    crc32c: _Sum


@dataclass(frozen=True, slots=True)
class FileSums:
    """The size and the checksums of a file.

    Attributes:
        nbytes: its size.
        crc32c: the CRC-32C of all bytes outside of tensor contents.
        tensors: the part of each tensor in it.
    """

    nbytes: _Size
    crc32c: _Sum
    tensors: dict[str, PartSum] = field(default_factory=dict)

    @property
    def checksums(self) -> int:
        """Return the number of checksums: one of each tensor, and one of the rest."""
        return len(self.tensors) + 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """The sizes and checksums of checkpoint files, by path below the directory.

    Raises:
        SourceError: a path leads out of the directory.

    >>> manifest = reshard.Manifest.make("src_checkpoints")
    >>> manifest.files["rank_0/checkpoint_0.ckpt"].nbytes
    12445
    >>> manifest.write("sums.json")
    128
    >>> reshard.Manifest.read("sums.json") == manifest
    True
    """

    files: Mapping[str, FileSums]

    def __post_init__(self) -> None:
        check_paths(self.files)

    @staticmethod
    @checked
    def make(
        target: AnyName,
        *,
        rank_pattern: str = RANK_PATTERN,
        suffix: str | None = None,
        threads: int | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> Manifest:
        """Read the files of a checkpoint, and return their manifest.

        Args:
            target: as for `reshard.open`; paths in the manifest are relative to it, or to its parent if it is a file.
            rank_pattern: as for `reshard.open`.
            suffix: as for `reshard.open`.
            threads: number of threads; by default one for each available processor, at most 4.
            progress: called with the bytes read (as `written`) and the bytes to be read.

        Raises:
            SourceError: a file cannot be read, or is corrupt.
            UsageError: the target is a zarr store, or encrypted.

        >>> manifest = reshard.Manifest.make("src_checkpoints")
        >>> len(manifest.files), min(manifest.files)
        (8, 'rank_0/checkpoint_0.ckpt')
        """
        on_progress = progress_callback(progress, time.perf_counter())
        try:
            files = read_headers(target, rank_pattern=rank_pattern, suffix=suffix).files
        except EncryptedError:
            raise UsageError(
                f"{target} is encrypted, and a manifest is of files that are not",
                code="encrypted",
                hint="compare it with its source",
            ) from None
        if store := marked(as_place(target).names()):
            raise UsageError(
                f"{target} is {store.called}, and a manifest is of checkpoint files",
                code="no-manifest",
                hint="compare it with its source",
            )
        path = as_place(target)
        root = path if path.is_dir() else path.parent
        indexes = set_indexes(root.names()) if root == path else []
        return sum_files(root, files, indexes, threads=thread_count(threads), progress=on_progress)

    @staticmethod
    @checked
    def read(path: AnyName) -> Manifest:
        """Read and validate a manifest, which may be at a URL.

        Raises:
            SourceError: it cannot be read, is not a manifest, has another version, or has paths that lead out of the
                directory.

        >>> count = reshard.Manifest.make("src_checkpoints").write("sums.json")
        >>> len(reshard.Manifest.read("sums.json").files)
        8
        """
        faults = Faults(f"manifest {path}")
        repeated: list[str] = []
        raw = read_small(as_place(path), "manifest", _LARGEST, SourceError)
        try:
            content = parse_json(raw, repeated)
        except ValueError as error:
            raise SourceError(f"manifest {path} is not JSON", code="not-json", facts=[str(error)]) from None
        if repeated:
            faults.add("$", f"has {names(repeated, most=3)} twice in one object", code="duplicate-key")
        if not isinstance(content, dict) or _VERSION_KEY not in content:
            raise SourceError(
                f"{path} is not a manifest",
                code="not-a-manifest",
                facts=[f"expected a JSON object with the key {_VERSION_KEY!r}"],
            )
        version = content[_VERSION_KEY]
        if type(version) is not int or version != VERSION:
            advice = "make it again from files that are valid" if version == 1 else "use a newer reshard"
            raise SourceError(
                f"manifest {path} has version {version!r:.40}; expected {VERSION}",
                code="unsupported-version",
                hint=advice,
            )
        items = content.get("files")
        if not isinstance(items, dict) or len(content) != 2:
            raise SourceError(
                f"manifest {path} is not valid",
                code="bad-manifest",
                facts=["expected an object of paths under the key 'files', and no other key"],
            )
        _check_paths(items, faults)
        files: dict[str, FileSums] = {}
        for name, item in items.items():
            try:
                files[name] = read_record(FileSums, item, f"$.files[{name!r:.200}]")
            except FormatError as error:
                is_tensor = "].tensors[" in error.path
                faults.add(error.path, error.problem, code="bad-tensor" if is_tensor else "bad-entry")
                continue
            for tensor in filter(_is_long, files[name].tensors):
                fault = f"is a name of {len(tensor)} characters; names have at most {LONGEST_NAME} bytes"
                faults.add(f"$.files[{name!r:.200}].tensors[{tensor!r:.200}]", fault, code="name-too-long")
        faults.raise_if_any(SourceError)
        return Manifest(files)

    @checked
    def write(self, path: AnyName, *, overwrite: bool = False) -> int:
        """Write it as JSON, a line per file; the output is deterministic.

        Args:
            path: the path or URL to write to. It appears only when it is complete.
            overwrite: replace an existing file.

        Returns:
            the number of checksums in it.

        Raises:
            TargetError: the file exists, or cannot be written.

        >>> reshard.Manifest.make("src_checkpoints").write("sums.json")
        128
        >>> bool(reshard.verify("src_checkpoints", manifest="sums.json"))
        True
        """
        return write_items(self.files.items(), path, overwrite=overwrite)

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, Mapping[str, tuple[DType, Shape, int]]],
        nbytes: Mapping[str, int],
        crc32c: Mapping[str, int],
    ) -> Manifest:
        """Build a manifest from checksums of blocks, such as those that a run combined.

        Args:
            tensors: by checkpoint file and tensor: dtype, shape and CRC-32C.
            nbytes: the size of each file.
            crc32c: by file: the CRC-32C of all bytes outside of tensor contents.

        >>> from reshard.dtypes import BFLOAT16
        >>> made = Manifest.of({"a.ckpt": {"w": (BFLOAT16, (2,), 7)}}, {"a.ckpt": 100, "i": 3}, {"a.ckpt": 8, "i": 9})
        >>> made.files["a.ckpt"].tensors["w"].crc32c, made.files["i"]
        (7, FileSums(nbytes=3, crc32c=9, tensors={}))
        """
        files = {
            path: FileSums(size, crc32c[path], {name: PartSum(*part) for name, part in tensors.get(path, {}).items()})
            for path, size in nbytes.items()
        }
        return cls(dict(sorted(files.items())))

    @property
    def checksums(self) -> int:
        """Return the number of checksums of all files."""
        return sum(file.checksums for file in self.files.values())

    def __repr__(self) -> str:
        """Describe the manifest on one line.

        >>> Manifest({"a": FileSums(8, 0x62A8AB43)})
        <Manifest: 1 file, 8 bytes, 0 checksums of tensors>
        """
        count = len(self.files)
        sums = sum(len(file.tensors) for file in self.files.values())
        nbytes = sum(file.nbytes for file in self.files.values())
        return f"<Manifest: {count} file{'s' * (count != 1)}, {nbytes} bytes, {sums} checksums of tensors>"


def write_items(items: Iterable[tuple[str, FileSums]], path: AnyName, *, overwrite: bool) -> int:
    """Write the items of a manifest, sorted by path; see `Manifest.write`.

    Raises:
        SourceError: a path leads out of the directory.
        TargetError: the file exists, or cannot be written.
    """
    count = 0

    def lines() -> Iterator[bytes]:
        nonlocal count
        yield f'{{"{_VERSION_KEY}": {VERSION},\n"files": {{\n'.encode()
        between = ""
        for name, file in items:
            check_paths([name])
            count += file.checksums
            yield f"{between}{json.dumps(name)}: {json.dumps(_file_data(file))}".encode()
            between = ",\n"
        yield b"\n}}\n"

    refuse_existing(path, overwrite=overwrite)
    write_whole(path, lines())
    return count


def check_paths(paths: Iterable[str]) -> None:
    """Raise `SourceError` if a path leads out, is too long, or has control characters."""
    faults = Faults("manifest")
    _check_paths(paths, faults)
    faults.raise_if_any(SourceError)


def _file_data(file: FileSums) -> dict[str, object]:
    data: dict[str, object] = {"nbytes": file.nbytes, "crc32c": f"{file.crc32c:08x}"}
    if file.tensors:
        data["tensors"] = {
            name: [part.dtype.name, list(part.shape), f"{part.crc32c:08x}"] for name, part in file.tensors.items()
        }
    return data


def _is_long(name: str) -> bool:
    return len(name) > LONGEST_NAME or len(name.encode(errors="surrogatepass")) > LONGEST_NAME


def _check_paths(paths: Iterable[str], faults: Faults) -> None:
    """Report paths that are not plain paths below a directory."""
    for path in paths:
        if _is_long(path):
            fault = f"has {len(path)} characters; paths have at most {LONGEST_NAME} bytes"
            faults.add(f"path {path!r:.200}", fault, code="name-too-long")
            continue
        pure = PurePosixPath(path)
        if pure.is_absolute() or ".." in pure.parts or str(pure) != path or not pure.name or not path.isprintable():
            fault = "is not a path below a directory, such as 'rank_0/checkpoint_0.ckpt'"
            faults.add(f"path {path!r:.200}", fault, code="outside-directory")


def sum_files(
    root: Place,
    files: Sequence[SourceFile],
    others: Sequence[str],
    *,
    threads: int,
    progress: OnProgress,
) -> Manifest:
    """Read files, and return their manifest.

    Args:
        root: the directory to which the paths of the manifest are relative.
        files: the checkpoint files below it.
        others: paths below it of files that are not checkpoints, such as the index of a set.
        threads: number of reading threads.
        progress: called with the bytes read and the bytes to be read.

    Raises:
        SourceError: a file cannot be read, or is shorter than its header says.
    """
    top = root.absolute()
    paths = {file.path: as_place(file.path).relative_to(str(top)).as_posix() for file in files}
    contents = {paths[file.path]: (file.index.entries, gaps(file.index, file.nbytes)) for file in files}
    sizes = {paths[file.path]: file.nbytes for file in files}
    for name in others:
        sizes[name] = (top / name).status().nbytes
        contents[name] = {}, ((0, sizes[name]),)
    sums, _ = sum_entries(top, contents, threads, progress)
    tensors = {
        path: {name: (entry.dtype, shape_of(entry), sums[path, name]) for name, entry in entries.items()}
        for path, (entries, _) in contents.items()
    }
    return Manifest.of(tensors, sizes, {path: sums[path, None] for path in contents})


def shape_of(entry: Entry) -> tuple[int, ...]:
    """Return the shape of an entry; () for text, on which formats disagree."""
    return () if entry.dtype is STR else entry.shape


def manifest_of(report: Report, path: AnyName | None = None, *, overwrite: bool = False) -> Manifest | int:
    """Return the manifest of a run; with a path, write it and return its length.

    It is written file by file; its length is the number of checksums.

    Raises:
        UsageError: there are no checksums: the run had them or the ledger disabled, wrote a zarr store, or encoded the
            files.
        SourceError: a block without a checksum cannot be read.
        TargetError: the manifest exists, cannot be written, or is a target file or a source file.
    """
    from reshard.core.run.state.sums import Checksums  # lazy import: verification needs no modules of a run

    sums = report.checksums
    if not isinstance(sums, Checksums):
        raise UsageError(
            f"the run into {report.directory} made no checksums for a manifest",
            code="no-checksums",
            hint="run with checksums=True and a ledger, or read the files with reshard.Manifest.make",
        )
    items = sums_of_files(sums.root, sums.files, sums)
    if path is None:
        return Manifest(dict(items))
    advice = "choose another name for the manifest"
    refuse_inputs([path], sums.sources, "one of the source files", advice)
    refuse_inputs([path], [f"{sums.root}/{file}" for file in report.files], "one of the target files", advice)
    return write_items(items, path, overwrite=overwrite)


def sums_of_files(
    root: str, files: Iterable[TargetFile], sums: Mapping[str, Mapping[str, int]]
) -> Iterator[tuple[str, FileSums]]:
    """Yield the manifest items of files that a run wrote, sorted by path.

    Files are handled one by one to save memory.

    Args:
        root: the directory of the files.
        files: the files of a plan.
        sums: by file path: the known CRC-32C sums of the contents of its tensors.

    Raises:
        SourceError: a block without a checksum cannot be read.
    """
    literal_sums: dict[FileLayout, int] = {}  # sums of the literals of a layout
    for file in sorted(files, key=lambda file: file.path):
        layout = file.layout
        if layout not in literal_sums:
            literal_sums[layout] = crc32c(b"".join(content for _, content in sorted(layout.literals)))
        known_sums = sums[file.path]
        unknown = [
            (content.name, f"{root}/{file.path}", content.runs)
            for content in layout.contents
            if content.text is None and content.name not in known_sums
        ]
        read, _ = sum_contents(unknown, threads=thread_count(None)) if unknown else ({}, 0)
        parts = {
            content.name: PartSum(
                content.dtype,
                content.shape,
                crc32c(content.text.encode())
                if content.text is not None
                else read[content.name]
                if content.name in read
                else known_sums[content.name],
            )
            for content in layout.contents
        }
        yield file.path, FileSums(layout.size, literal_sums[layout], parts)
